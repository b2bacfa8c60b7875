"""The parameter-server wire, as a trainer sees it.

    token  = send X...            [epmap, names, trainer_id, trainers, sync_mode, sections?, communicator?, merge?]
    token  = send_barrier token...  [endpoints, trainer_id, half_async?]
    X...   = recv token           [epmap, names, types, trainer_id, trainers, sync_mode, sections?, communicator?]
    X...   = fetch_barrier X...   [endpoints, trainer_id, trainers?, sync_mode?, communicator?]
    X...   = send X... (uniq X S...)...  [epmap, names, sections, push_every, trainer_id, trainers, tables?]
    X...   = exchange X...        [endpoint, round, how, trainer_id, trainers, sync_mode]

`send` gives one gradient's blocks to their servers and does not wait. `send_barrier` says that all
gradients of this step were sent. `recv` gives the newest blocks of one parameter: in sync mode
those made of the gradients of all trainers. `fetch_barrier` says that they have arrived; where
there is none, it says who asks.

With `sections`, the rows of its blocks, an operand is a whole leaf that is cut when the program
runs, and so is what `recv` gives (Paddle's `runtime_split_send_recv`). With `communicator`, both
are left to what runs beside the program: `send` puts into its queue (`merge` says how it combines
several), `recv` gives what it has received last, and `send_barrier` waits until it has sent all and
received what was made of it. A step that receives nothing, since all leaves are tables, has a
`fetch_barrier` after its last `send`.

The last is that of GEO-SGD (`geo_send_p`): its operands are parameters that the program has changed
itself. Every `push_every` times what has changed in them since is given to the servers, and what
others have changed is in its results; 0 in a startup program, which tells from where they are to be
changed. Of each of its `tables`, by name with the number of arrays, it has the numbers of the rows
that the step has looked up, these rows as the program has changed them, and their state; the
trainer keeps these (`dtrans.ops.lookup`).

`exchange` is what trainers tell each other in the middle of a synchronous step, through one of the
servers: each operand is a part of a value that all have parts of, and `how` says what each becomes:
the name of a collective and its parameters, such as ("all_reduce", op) or ("all_gather", axis)
(`dtrans.ops.collective`). The rounds of a step are numbered.

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


DELTA = ".delta"  # what has changed in a block, as GEO-SGD calls it
MAX_MERGED = 1000  # the most steps whose gradients may be sent as one


@dataclasses.dataclass(frozen=True)
class CommunicatorConfig:
    """How gradients wait to be sent, and when parameters are received, where a step waits for
    neither.

    Attributes:
      max_merge_var_num: how many steps' gradients may be merged into one where the sending is
        slower than the steps.
      send_queue_size: how many steps' gradients may wait; a step that finds the queue full waits
        for a place.
      min_send_grad_num_before_recv: how often is sent before parameters are received again.
      independent_recv_thread: go on sending, as often as that, while parameters are on their way.
      merge: gradients by their "sum" or their "mean". "auto" is the sum where the update is linear
        in the gradient, as that of SGD is, so that one update by the sum is what all of them would
        have done; and else the mean. Nothing is merged where a count decides how a gradient is
        used, as in `optax.MultiSteps`.

    Raises:
      ConfigError: a value that is out of range.

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
                "more than "
                f"send_queue_size={self.send_queue_size}: an answer is what tells that gradients "
                "have arrived"
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
    """Return what a trainer gets in an `exchange` in this way, from the parts of all, in the order
    of trainers.

    Args:
      mine: this trainer's piece of an array, of as many as there are trainers, along a dimension.
      xp: `jnp`, or `np` for arrays of NumPy.
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
