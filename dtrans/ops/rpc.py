"""Messages of a trainer to parameter servers.

    token  = send X...            [epmap, names, ..., sections?, communicator?, merge?]
    token  = send_barrier token...  [endpoints, trainer_id, half_async?]
    X...   = recv token           [epmap, names, types, ..., sections?, communicator?]
    X...   = fetch_barrier X...   [endpoints, trainer_id, trainers?, sync_mode?, communicator?]
    X...   = send X... (uniq X S...)...  [epmap, names, sections, push_every, ..., tables?]
    X...   = exchange X...        [endpoint, round, how, ...]

`...` stands for trainer_id, trainers, sync_mode. `epmap` and `names` list the endpoint and the name
of each block (range of rows of an array).

`send` sends the blocks of one gradient to their servers and does not wait. `send_barrier` tells the
servers that all gradients of this step were sent. `recv` receives the newest blocks of one
parameter. In sync mode, these are the blocks after the update with all trainers' gradients.
`fetch_barrier` waits until these blocks have arrived, and all servers at `endpoints` have answered.

`sections` lists the numbers of rows of a leaf's blocks. With `sections`, the operand of `send` and
the result of `recv` are full leaves, which are split and joined when the program runs (Paddle's
`runtime_split_send_recv`). With `communicator`, `send` and `recv` work in the background: `send`
appends to a queue, in which gradients may be merged (`merge`), and `recv` returns the last received
value. `send_barrier` waits until the queue is drained and the updated parameters have arrived. If
all parameters are embedding tables, a step has no `recv`, and a `fetch_barrier` after its last
`send` waits in place of it.

The second `send` belongs to GEO-SGD (`geo_send_p`). Its operands are parameters that the program
has updated. In every `push_every`-th step the trainer sends their changes to the servers. The
results include changes of other trainers. In a startup program `push_every` is 0: the trainer then
records initial values. `tables` lists (name of a table, number of arrays). The operands of a table
are the ids of the rows that the step has looked up, and this number of arrays: the updated rows,
and their optimizer state. The trainer stores these rows (`dtrans.ops.lookup`).

`exchange` is a collective among trainers in the middle of a synchronous step, through a server.
`how` lists, for each operand, the name of the collective and its parameters, such as
("all_reduce", op) or ("all_gather", axis) (`dtrans.ops.collective`). `round` numbers the exchanges
of a step.

Source: paddle/fluid/operators/distributed_ops/{send,recv,send_barrier,fetch_barrier}_op.cc. Paddle
has no `exchange`.
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


DELTA = ".delta"  # name suffix for the change of a block in GEO-SGD
MAX_MERGED = 1000  # largest number of steps whose gradients may be merged


@dataclasses.dataclass(frozen=True)
class CommunicatorConfig:
    """Options of the communicator, which sends gradients and receives parameters in the background.

    Attributes:
      max_merge_var_num: largest number of steps in one message. If steps are faster than sending,
        the communicator merges the gradients of several steps.
      send_queue_size: largest number of steps with gradients in the queue; a step blocks while the
        queue is full.
      min_send_grad_num_before_recv: number of sends before parameters are received again.
      independent_recv_thread: True to continue sending while parameters are received.
      merge: reduction of merged gradients, "sum" or "mean". "auto" is "sum" if the update is linear
        in the gradient (SGD): one update with the sum then equals several updates. For all other
        updates "auto" is "mean". If updates depend on a count of gradients (`optax.MultiSteps`),
        gradients are never merged.

    Raises:
      ConfigError: a value is out of range.

    Source: the environment variables `FLAGS_communicator_*` of
    paddle/fluid/operators/distributed/communicator.h. `merge` replaces Paddle's
    `is_sgd_optimizer`. Paddle's defaults depend on the number of processors.

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
                f"min_send_grad_num_before_recv={self.min_send_grad_num_before_recv} must not "
                f"exceed send_queue_size={self.send_queue_size}, because gradients are "
                "acknowledged only by the answer to a request for parameters"
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
    types = []
    for x, (name, *values) in zip(parts, how, strict=True):
        types.append(COLLECTIVES[name].type_of(x, trainers, *values))
    return types


def exchanged(
    way: Sequence[Any], parts: Sequence[Any], mine: Callable[[Any, int], Any], xp: Any = jnp
) -> Any:
    """Return one trainer's result of a collective that trainers run through a server.

    Args:
      way: name and parameters of the collective, as `way_of` returns them: ("all_reduce", "sum").
      parts: the operands of all trainers, in order.
      mine: function of (array, dimension) that returns this trainer's piece of a scattered array.
      xp: module of the arrays, `jnp` or `np`.
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
