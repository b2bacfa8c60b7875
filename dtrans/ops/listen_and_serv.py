"""Parameter server as one equation.

    state... = listen_and_serv state...
               [endpoint, Fanin, sync_mode, on_trainer_exit, optimize_blocks, ...]

It serves until every trainer has closed, and outputs its final state. `optimize_blocks` has its
work on gradients, as `cond` has branches. The first block has role lr_sched if the optimizer
computes values that no row enters; each parameter block follows. If the optimizer reduces over
rows, there are several levels: a level ends with a block of role dist that has its `all_reduce`
equations, and the next level reads their results.

Trainers may leave a synchronous job before others. `on_trainer_exit` defines later updates. "drop":
updates use the gradients of the remaining trainers, over their number
(`dtrans.slicing.mean.sent_by`). "paddle": its last gradient counts once more, then as zero, over
the number of all. "error" ends the job. (In Paddle that is one outcome of a race. A `complete`
makes the server zero gradients after its next update, but the end of a step reverts that. If the
message comes before the others have received parameters, the gradient counts in every later
update.)

Each trainer sends its gradient under its own name (`BlockGradient.sent`), and blocks read their
mean or their sum.

With sync_mode=False an update uses one gradient. Blocks that read `params/w.block0.bak` get the
block as the gradient's trainer last received it: `params/w.block0.trainer_1_bak` in the state.

Source: paddle/fluid/operators/distributed_ops/listen_and_serv_op.cc, and `Complete` and
`ResetBarrierCounter` of paddle/fluid/operators/distributed/rpc_server.cc, for 1.8.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dtrans._jax import ClosedJaxpr, NamedJaxpr
from dtrans.ops.primitive import communication


BACKUP = ".bak"
ON_TRAINER_EXIT = ("drop", "paddle", "error")


def backup_of(block: str, trainer_id: int) -> str:
    """Return the name of a server's copy of a block as a trainer last received it (Paddle's)."""
    return f"{block}.trainer_{trainer_id}_bak"


@dataclasses.dataclass(frozen=True, eq=False)
class BlockGradient:
    """Gradient of a parameter block that an optimize block reads: the trainers' gradients, reduced.

    Attributes:
      name: name in the optimize block: `params/w@GRAD.block0`.
      leaf, index: leaf and index of its block.
      sent: trainer to the name of its part: `params/w@GRAD.block0.trainer_1`. Updates by single
        gradients have one entry for all trainers.
      op: reduction: "mean" or "sum"; "same" for an argument of the step, which all trainers have.
    """

    name: str
    leaf: str
    index: int
    sent: Mapping[int, str]
    op: str = "mean"


@dataclasses.dataclass(frozen=True, eq=False)
class OptimizeBlock(NamedJaxpr):
    """Block of a server's work: a jaxpr on named values.

    Attributes:
      name: the parameter block that it updates, `lr_sched`, or `all_reduce`.
      role: `optimize`, `lr_sched` or `dist`.
      jaxpr: the closed jaxpr. Only a block of role `dist` communicates.
      in_names: inputs: gradients (`params/w@GRAD.block0`), state before the step
        (`params/w.block0`), and outputs of earlier blocks (`lr_sched/0`).
      out_names: outputs: state, or values for later blocks.
      level: number of exchanges between servers before it runs; one of role `dist` ends its level.
      grads: gradients among its inputs.
    """

    name: str
    role: str
    jaxpr: ClosedJaxpr
    in_names: tuple[str, ...]
    out_names: tuple[str, ...]
    level: int = 0
    grads: tuple[BlockGradient, ...] = ()

    def __repr__(self) -> str:
        return f"<{self.role} block {self.name}: {len(self.eqns)} equations>"


def _serve(*state: Any, **_: Any) -> list[Any]:
    return list(state)


listen_and_serv_p = communication("listen_and_serv", _serve)
