"""Parameter-server protocol of a trainer.

    token  = send X...            [epmap, names, ..., sections?, communicator?, merge?]
    token  = send_barrier token...  [endpoints, trainer_id, half_async?]
    X...   = recv token           [epmap, names, types, ..., sections?, communicator?]
    X...   = fetch_barrier X...   [endpoints, trainer_id, trainers?, sync_mode?, communicator?]
    X...   = send X... (uniq X S...)...  [epmap, names, sections, push_every, ..., tables?]
    X...   = exchange X...        [endpoint, round, how, ...]

Here `...` is trainer_id, trainers, sync_mode.

`send` sends one gradient's blocks to their servers and does not wait. `send_barrier` announces that
all gradients of this step were sent. `recv` receives the newest blocks of one parameter: in sync
mode those updated by the gradients of all trainers. `fetch_barrier` acknowledges their arrival;
without blocks it identifies the trainer.

`sections` has the rows of each block of a leaf: an operand is then a full leaf that is split when
the program runs, and so is a result of `recv` (Paddle's `runtime_split_send_recv`). With
`communicator`, both run in the background. `send` appends to its queue (`merge` says how it
combines several), and `recv` returns the last received value. `send_barrier` waits until the queue
is drained and the resulting parameters have arrived. A step that receives nothing, since all leaves
are tables, has a `fetch_barrier` after its last `send`.

The second `send` belongs to GEO-SGD (`geo_send_p`): its operands are parameters that the program
has updated itself. Every `push_every` times their changes since then are sent to the servers, and
the results include the changes of others. `push_every` is 0 in a startup program, which registers
the initial values. Each of its `tables` has a name and a number of arrays. Its operands are the ids
of rows that the step has looked up, these rows as updated, and their state; the trainer stores them
(`dtrans.ops.lookup`).

`exchange` is a collective of trainers in the middle of a synchronous step, through one of the
servers. Each operand is a part of a value. `how` has for each the name of a collective and its
parameters, such as ("all_reduce", op) or ("all_gather", axis) (`dtrans.ops.collective`). The rounds
of a step are numbered.

Source: paddle/fluid/operators/distributed_ops/{send,recv,send_barrier,fetch_barrier}_op.cc;
`exchange` has none there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax.numpy as jnp

from dtrans.checks import check_flag, check_int, check_one_of
from dtrans.errors import ConfigError
from dtrans.ops.collective import COLLECTIVES
from dtrans.ops.primitive import communication, token


DELTA = ".delta"  # suffix of the change of a block in GEO-SGD
MAX_MERGED = 1000  # largest number of steps whose gradients may be sent as one


@dataclasses.dataclass(frozen=True)
class CommunicatorConfig:
    """Options of the background communicator: queue of gradients, and receives of parameters.

    Attributes:
      max_merge_var_num: largest number of steps whose gradients are merged into one, if sending is
        slower than the steps.
      send_queue_size: largest number of steps whose gradients wait; a step blocks while the queue
        is full.
      min_send_grad_num_before_recv: number of sends before parameters are received again.
      independent_recv_thread: True to continue sending while parameters are received.
      merge: reduction of merged gradients, "sum" or "mean". "auto" is the sum if the update is
        linear in the gradient, as in SGD: one update by the sum then equals several updates. Else
        it is the mean. Gradients whose use depends on a count are never merged
        (`optax.MultiSteps`).

    Raises:
      ConfigError: a value is out of range.

    Source: the environment variables `FLAGS_communicator_*` of
    paddle/fluid/operators/distributed/communicator.h; its `is_sgd_optimizer` is `merge` here. Its
    defaults are numbers of processors.

    Example:
      >>> import dtrans
      >>> dtrans.CommunicatorConfig(max_merge_var_num=4).merge
      'auto'
      >>> dtrans.CommunicatorConfig(send_queue_size=0)
      Traceback (most recent call last):
      ...
      dtrans.errors.ConfigError: send_queue_size must be a positive number, it is 0
    """

    max_merge_var_num: int = 20
    send_queue_size: int = 20
    min_send_grad_num_before_recv: int = 1
    independent_recv_thread: bool = True
    merge: Literal["auto", "sum", "mean"] = "auto"

    def __post_init__(self) -> None:
        for name in ("max_merge_var_num", "send_queue_size", "min_send_grad_num_before_recv"):
            check_int(name, getattr(self, name))
        if self.min_send_grad_num_before_recv > self.send_queue_size:
            raise ConfigError(
                f"min_send_grad_num_before_recv={self.min_send_grad_num_before_recv} must not be "
                f"more than send_queue_size={self.send_queue_size}: only a reply acknowledges "
                "gradients"
            )
        if self.max_merge_var_num > MAX_MERGED:
            raise ConfigError(
                f"max_merge_var_num must be {MAX_MERGED} or less, it is {self.max_merge_var_num}"
            )
        check_flag("independent_recv_thread", self.independent_recv_thread)
        check_one_of("merge", self.merge, ("auto", "sum", "mean"))


def _send(
    *blocks: Any,
    epmap: Sequence[str],
    names: Sequence[str],
    sections: Sequence[int] | None = None,
    **_: Any,
) -> list[Any]:
    assert len(epmap) == len(names) == len(blocks if sections is None else sections)
    return [token()]


def _recv(
    *tokens: Any,
    epmap: Sequence[str],
    names: Sequence[str],
    types: Sequence[Any],
    sections: Sequence[int] | None = None,
    **_: Any,
) -> list[Any]:
    assert len(epmap) == len(names) == len(types if sections is None else sections)
    return list(types)


def _geo_send(
    *values: Any,
    epmap: Sequence[Any],
    names: Sequence[Any],
    sections: Sequence[Sequence[int]],
    tables: Sequence[tuple[str, int]] = (),
    **_: Any,
) -> list[Any]:
    assert (
        len(epmap)
        == len(names)
        == len(sections)
        == len(values) - sum(1 + count for _, count in tables)
    )
    return list(values[: len(epmap)])


def _exchange(*parts: Any, how: Sequence[tuple[Any, ...]], trainers: int, **_: Any) -> list[Any]:
    assert len(parts) == len(how)
    return [
        COLLECTIVES[name].type_of(x, trainers, *values)
        for x, (name, *values) in zip(parts, how, strict=True)
    ]


def exchanged(
    way: Sequence[Any], parts: Sequence[Any], mine: Callable[[Any, int], Any], xp: Any = jnp
) -> Any:
    """Return a trainer's result of an `exchange`, from the parts of all trainers in order.

    Args:
      way: name and parameters of the collective.
      parts: parts of all trainers.
      mine: returns this trainer's piece of an array along a dimension.
      xp: `jnp`, or `np` for NumPy arrays.
    """
    name, *values = way
    return COLLECTIVES[name].result(parts, mine, xp, *values)


send_p = communication("send", _send)
send_barrier_p = communication(
    "send_barrier", lambda *tokens, endpoints, trainer_id, **_: [token()]
)
recv_p = communication("recv", _recv)
fetch_barrier_p = communication(
    "fetch_barrier", lambda *blocks, endpoints, trainer_id, **_: list(blocks)
)
geo_send_p = communication("send", _geo_send)
exchange_p = communication("exchange", _exchange)
