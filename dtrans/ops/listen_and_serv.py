"""Parameter server as one equation.

    state... = listen_and_serv state...
               [endpoint, Fanin, sync_mode, on_trainer_exit, optimize_blocks, ...]

The server runs until all trainers have closed their connections, and outputs its final state. The
parameter `optimize_blocks` contains the jaxprs of the server's update, as `cond` contains branches.
Each of these jaxprs updates one block (range of rows) of a parameter. If the optimizer also
computes values for all rows, such as a learning rate, the first jaxpr has the role lr_sched and
computes these values. If the optimizer reduces over rows, as for a norm, the jaxprs run in several
levels. The last jaxpr of a level has the role dist and contains `all_reduce` equations among
servers. The next level reads their results.

A trainer may leave a synchronous job early. `on_trainer_exit` selects the rule for later updates.
"drop": updates use the mean of the remaining trainers' gradients (`dtrans.slicing.mean.sent_by`).
"paddle": the last gradient of the trainer is used once more, then zeros, and the mean is over all
trainers. "error": the job ends. (In Paddle, the result depends on a race. If the trainer's last
message, `complete`, arrives before all other trainers have received parameters, every later update
uses the last gradient.)

Each trainer sends its gradient under a separate name (`BlockGradient.sent`), perhaps encoded
(`BlockGradient.wire`). The jaxprs read the mean or the sum of the trainers' gradients.

With sync_mode=False an update uses one gradient, from one trainer. To correct the gradient for its
delay, a jaxpr may read `params/w.block0.bak`: the values of the block that this trainer has
received last. The state has a copy of the block for each trainer, such as
`params/w.block0.trainer_1_bak`.

Source: paddle/fluid/operators/distributed_ops/listen_and_serv_op.cc, and `Complete` and
`ResetBarrierCounter` of paddle/fluid/operators/distributed/rpc_server.cc, for 1.8.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dtrans._jax import ClosedJaxpr, NamedJaxpr
from dtrans.ops.primitive import communication
from dtrans.ops.wire_types import WireType


BACKUP = ".bak"
ON_TRAINER_EXIT = ("drop", "paddle", "error")


def backup_of(block: str, trainer_id: int) -> str:
    """Return Paddle's name for a server's copy of a block, as one trainer last received the block.

    Asynchronous jobs with delay compensation need these copies. For the block `params/w.block0` and
    trainer 1, the name is `params/w.block0.trainer_1_bak`.
    """
    return f"{block}.trainer_{trainer_id}_bak"


@dataclasses.dataclass(frozen=True, eq=False)
class BlockGradient:
    """Gradient of a block (a range of rows of a parameter), as an input of the block's update.

    A server reduces the gradients of all trainers to this value before it runs the update.

    Attributes:
      name: name in the update: `params/w@GRAD.block0`.
      leaf: name of the parameter: `params/w`.
      index: index of the block in the parameter.
      sent: for each trainer id, the name of the trainer's gradient:
        `params/w@GRAD.block0.trainer_1`. Asynchronous updates, which use one gradient, have a
        single entry for all trainers.
      op: the reduction, "mean" or "sum". Or "same" for an argument of the step, such as a learning
        rate, which is equal on all trainers.
      wire: the type in which trainers send the gradient; None for the gradient's own type. A server
        decodes the gradients of all trainers before the reduction.
    """

    name: str
    leaf: str
    index: int
    sent: Mapping[int, str]
    op: str = "mean"
    wire: WireType | None = None

    def sent_type(self, t: Any) -> Any:
        """Return the type of the array that a trainer sends; `t` is the gradient's type."""
        return t if self.wire is None else self.wire.type_of(t)


@dataclasses.dataclass(frozen=True, eq=False)
class OptimizeBlock(NamedJaxpr):
    """One jaxpr of a server's update; most of them update one block (range of rows) of a parameter.

    Attributes:
      name: name of the parameter block that the jaxpr updates; or `lr_sched`, or `all_reduce`.
      role: `optimize` for the update of a block, `lr_sched` for values that all blocks share, such
        as the learning rate, `dist` for all-reduces between servers.
      jaxpr: the closed jaxpr. Only a jaxpr of role `dist` communicates.
      in_names: names of inputs: gradients (`params/w@GRAD.block0`), state before the step
        (`params/w.block0`), and outputs of earlier jaxprs (`lr_sched/0`).
      out_names: names of outputs: state, or values for later jaxprs.
      level: number of rounds of all-reduces between servers before this jaxpr runs.
      grads: the gradients among its inputs.
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
