"""A parameter server as one equation.

    state... = listen_and_serv state...   [endpoint, Fanin, sync_mode, on_trainer_exit, optimize_blocks, ...]

It serves until every trainer has closed, and its outputs are the state it ends with. What it does
with the gradients is held in `optimize_blocks`, as `cond` holds its branches: a block of role
lr_sched first, if the optimizer does anything that no parameter's rows enter, then one for each
parameter block. Where the optimizer reduces over rows, there is more than one level of this: the
blocks of a level end with one of role dist, which holds its `all_reduce` equations, and those of
the next level go on with what they gave.

Trainers may leave a synchronous job before the others. `on_trainer_exit` says what updates are made
of then: with "drop" of the gradients of those who are there, over their number
(`dtrans.slicing.mean.sent_by`); with "paddle" its last gradient counts once more, and then as zero,
over the number of all; "error" ends the job. (In Paddle that is one outcome of a race. A `complete`
makes the server zero gradients after its next update, but the end of a step takes that
back: if the message comes before the others have received parameters, the gradient counts in every
  later update.)

A gradient comes from each trainer under a name of its own (`BlockGradient.sent`), and blocks read
their mean, or their sum.

With sync_mode=False an update is made of one gradient. Blocks that read `params/w.block0.bak` are
given that block as the trainer whose gradient it is has last received it:
`params/w.block0.trainer_1_bak` in the state.

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
    """What a server calls its copy of a block as a trainer last received it (Paddle's name)."""
    return f"{block}.trainer_{trainer_id}_bak"


@dataclasses.dataclass(frozen=True, eq=False)
class BlockGradient:
    """The gradient of a parameter block, which an optimize block reads: what trainers send, made
    one.

    Attributes:
      name: what the optimize block calls it: `params/w@GRAD.block0`.
      leaf, index: whose gradient it is: that of this block of this leaf.
      sent: trainer to what its part is called where it is sent: `params/w@GRAD.block0.trainer_1`.
        There is one where updates are of one gradient, whichever trainer it is from.
      op: how these become one: "mean" or "sum"; "same" of an argument of the step, which all
        trainers have.
    """

    name: str
    leaf: str
    index: int
    sent: Mapping[int, str]
    op: str = "mean"


@dataclasses.dataclass(frozen=True, eq=False)
class OptimizeBlock(NamedJaxpr):
    """One block of a server's work: a jaxpr on named values.

    Attributes:
      name: the parameter block it updates, `lr_sched`, or `all_reduce`.
      role: `optimize`, `lr_sched` or `dist`.
      jaxpr: the closed jaxpr. Only one of role `dist` communicates.
      in_names: what it reads: gradients (`params/w@GRAD.block0`), state as it was before the step
        (`params/w.block0`), and values that blocks before it made (`lr_sched/0`).
      out_names: what it makes: state, or values for blocks after it.
      level: after how many exchanges between servers it runs; one of role `dist` ends its level.
      grads: the gradients that it reads.
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
