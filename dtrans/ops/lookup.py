"""Lookups in tables on servers: a trainer receives only the rows that a step looks up.

    uniq  = split_ids ids...        [table, rows, size, outside]
    X     = prefetch uniq           [table, epmap, names, spans, types, ...]
    token = send_rows uniq X        [table, epmap, names, spans, ...]
    X     = fake_init               [table, shape, dtype]
    X, S... = init_on_use args...   [table, types, write]
    X, S... = prefetch uniq         [table, epmap, names, spans, types, ...]
    X, S... = fake_init args...     [table, types, epmap, names, spans, write, ...]

`...` stands for trainer_id, trainers, sync_mode. `uniq` are row ids, `X` rows of a table, and `S`
their optimizer state. `epmap`, `names` and `spans` list the endpoint, the array name and the rows
of each server. Rows are a range, or buckets (`dtrans.rows.row_buckets`).

`split_ids` returns the sorted unique ids of all lookups in a table with `rows` rows. The result has
`size` integers; unused entries at its end have the value `rows`. For each operand, `outside` is the
treatment of ids outside of the table: "error", "clip" to the nearest row, or "drop". `prefetch`
receives the rows with these ids from their servers; rows for unused entries are zeros. `send_rows`
sends the gradient of these rows to the servers, as `send` does for a block. With `communicator`,
`prefetch` and `send_rows` run in the background, like `recv` and `send` (`dtrans.ops.rpc`).

`fake_init` returns a trainer's initial table, which has no rows. `init_on_use` represents a
server's rows of a table, and optimizer state with one row for each of these rows. `write(n)`
returns a program that computes `n` rows from their ids and the arguments of init. A server computes
each row on first use. If JAX evaluates the equation, it computes all rows.

The last two equations belong to GEO-SGD (`geo_prefetch_p`, `geo_init_p`). In GEO-SGD a trainer
stores the rows that it has looked up, with their optimizer state. At first it stores no rows.
`prefetch` returns the rows with the given ids, and requests rows that the trainer lacks from
servers. `write(n)` returns a program that computes the initial optimizer state of `n` rows.

Source:
paddle/fluid/operators/distributed_ops/{split_ids,prefetch,lookup_sparse_table,fake_init}_op.cc and
`split_selected_rows_op.cc`. Paddle's `merge_ids`, which returns rows in the order of ids, is a
gather here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from dtrans._jax import ClosedJaxpr, ShapedArray, evaluate, new_primitive
from dtrans.ops.primitive import communication, token


def _split_ids(*ids: Any, rows: int, size: int, **_: Any) -> list[Any]:
    assert all(jnp.issubdtype(x.dtype, jnp.integer) for x in ids)
    assert 0 < size <= max(1, sum(x.size for x in ids)) and size <= rows
    return [ShapedArray((size,), jnp.int32)]


def _prefetch(
    uniq: Any, *, types: Sequence[Any], spans: Sequence[Any], epmap: Sequence[str], **_: Any
) -> list[Any]:
    assert len(spans) == len(epmap) and all(t.shape[0] == uniq.shape[0] for t in types)
    return list(types)


def _send_rows(
    uniq: Any, grad: Any, *, spans: Sequence[Any], epmap: Sequence[str], **_: Any
) -> list[Any]:
    assert len(spans) == len(epmap) and grad.shape[0] == uniq.shape[0]
    return [token()]


def _fake_init(*, shape: Sequence[int], dtype: Any, **_: Any) -> list[Any]:
    return [ShapedArray((0, *shape[1:]), dtype)]


split_ids_p = communication("split_ids", _split_ids)
prefetch_p = communication("prefetch", _prefetch)
send_rows_p = communication("send_rows", _send_rows)
fake_init_p = communication("fake_init", _fake_init)
geo_prefetch_p = communication("prefetch", _prefetch)
geo_init_p = communication("fake_init", lambda *args, types, **_: list(types))


@dataclasses.dataclass(frozen=True, eq=False)
class RowsProgram:
    """Callable that returns a program; the program computes initial table rows from their ids.

    Calling it with a number n returns a jaxpr for n rows. The jaxpr takes the n ids, and then the
    inputs of init.
    """

    write: Callable[[int], ClosedJaxpr]

    def __call__(self, count: int) -> ClosedJaxpr:
        return self.write(count)

    def __repr__(self) -> str:
        return "rows by their numbers"


def _all_rows(*args: Any, types: Sequence[Any], write: RowsProgram, **_: Any) -> Sequence[Any]:
    rows: int = types[0].shape[0]
    return evaluate(write(rows), jnp.arange(rows, dtype=jnp.int32), *args)


init_on_use_p = new_primitive(
    "init_on_use",
    types=lambda *args, types, **_: list(types),
    impl=_all_rows,
    multiple_results=True,
)
