"""What each primitive does to values that are cut over shards, and the cheapest of the ways to
carry it out.

A rule looks at an equation whose operands are whole or cut, and answers with a `Way`: as what every
operand is read, how its outputs lie, and by which reduction the parts of all shards become one.
Most rules are those of the row analysis (`dtrans.rows.rules`): entries of a dimension that is cut
are rows. Here is what shards do besides: gathers that pick entries where the cut is, and their
transposes; the position of the largest entry; convolutions; reshapes.

Operands that are cut in ways that do not fit leave a choice: each of them may stay as it is while
the others follow, or all are made whole. `choose` takes what moves the fewest bytes, and gathers no
input of the program where there is another way: inputs are cut because they are large.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.lax import GatherScatterMode as Mode

from dtrans._jax import JaxprEqn, warn_if_unknown
from dtrans.engine.layout import Partial, Placed, Shards, cut_along, nbytes, rows_only
from dtrans.engine.row_moves import RowMoves, moves_of, regrouped
from dtrans.rows.layout import SHARED, RowAxis, Shared
from dtrans.rows.rules import step_of


Ins = Sequence[Shared | RowAxis]


@dataclasses.dataclass(frozen=True)
class Way:
    """How an equation is carried out on a shard.

    Attributes:
      operands: for each operand, the cut that it is read in; None for one that is read whole.
      outs: how each output lies; where there is a reduction, once it is done.
      reduce: the operation that makes the parts of all shards one; "" where there are no parts.
      params: parameters that depend on shapes, from the types of its outputs on a shard.
      write: what writes it, where that is not the equation itself on other operands: a name in
        `dtrans.engine.writer._WRITE`.
      at: what `write` has to know: the component of an index, or the like.
      sends: bytes that it moves beside its reduction.
      moves: how entries are moved along the dimension that is cut, where `write` is "move".
    """

    operands: tuple[RowAxis | None, ...]
    outs: tuple[Shared | RowAxis, ...]
    reduce: str = ""
    params: Callable[[Sequence[Any]], dict[str, Any]] | None = None
    write: str = ""
    at: int = 0
    sends: float = 0
    moves: RowMoves | None = None


@dataclasses.dataclass(frozen=True)
class Operand:
    """What is known of an operand, for the choice of a way.

    Attributes:
      layout: how it lies.
      is_input: whether it is an input of the program that is cut, or holds the same numbers.
      has: whether it is there already, read in some cut, or whole.
    """

    layout: Placed
    is_input: bool = False
    has: Callable[[RowAxis | None], bool] = lambda row: False


def choose(
    eqn: JaxprEqn,
    operands: Sequence[Operand],
    shards: Shards,
    as_term: bool = False,
    known: Sequence[RowAxis] | None = None,
) -> Way:
    """The way to carry out an equation some of whose operands are cut, or sums.

    Args:
      as_term: terms of what it makes are enough: to add them up costs nothing here.
      known: layouts with an order that values have already; None if values may have no order.
    """
    rows = [rows_only(x.layout) for x in operands]
    cost = lambda way: _cost(eqn, operands, way, shards, as_term)
    natural = way_of(eqn, rows, shards, known)
    if natural is not None and cost(natural) == (0, 0):
        return natural
    ways = [natural]
    for i, x in enumerate(rows):
        if isinstance(x, RowAxis):
            ways.append(
                way_of(eqn, [x if i == j else SHARED for j in range(len(rows))], shards, known)
            )
    ways.append(Way((None,) * len(rows), (SHARED,) * len(eqn.outvars)))
    return min((w for w in ways if w is not None), key=cost)


def _cost(
    eqn: JaxprEqn, operands: Sequence[Operand], way: Way, shards: Shards, as_term: bool
) -> tuple[float, float]:
    """Bytes of inputs that are gathered, and bytes that are moved."""
    gathered, moved = 0.0, float(way.sends)
    for a, operand, row in zip(eqn.invars, operands, way.operands, strict=True):
        had, size = operand.layout, nbytes(a.aval)
        if operand.has(row):
            continue
        if isinstance(had, Partial):
            moved += size if row else 2 * size
        elif isinstance(had, RowAxis) and had != row:
            exchanged = row is not None and row.axis != had.axis and not (row.order or had.order)
            moved += size / shards.count if exchanged else size
            gathered += 0 if exchanged or not operand.is_input else size
    if way.reduce and not (as_term and way.reduce == "sum"):
        moved += 2 * sum(nbytes(v.aval) for v in eqn.outvars)
    return gathered, moved


def way_of(
    eqn: JaxprEqn, ins: Ins, shards: Shards, known: Sequence[RowAxis] | None = None
) -> Way | None:
    """Return the way that the operands' cuts lead to; None if they do not fit, or pieces are not
    enough.

    Args:
      known: as in `choose`.
    """
    if not any(isinstance(x, RowAxis) for x in ins):
        return None
    rule = RULES.get(eqn.primitive.name, _as_rows)
    way = rule(eqn, ins, shards) or (None if known is None else _moved(eqn, ins, shards, known))
    if way is None:
        return None
    plain = lambda a, x: shards.plain(x, a.aval.shape[x.axis]) if isinstance(x, RowAxis) else x
    return dataclasses.replace(
        way,
        operands=tuple(plain(a, x) for a, x in zip(eqn.invars, way.operands, strict=True)),
        outs=tuple(plain(v, x) for v, x in zip(eqn.outvars, way.outs, strict=True)),
    )


# -- rules ---------------------------------------------------------------------------------------


def _as_rows(eqn: JaxprEqn, ins: Ins, shards: Shards) -> Way | None:
    """As the row analysis has it."""
    step = step_of(eqn, ins)
    if step is None:
        warn_if_unknown(eqn, "is treated as mixing rows: what it reads is gathered")
        return None
    return Way(step.operands, tuple(x if isinstance(x, RowAxis) else SHARED for x in step.outs),
               step.reduce or "", step.params)  # fmt: skip


def _reshape(eqn: JaxprEqn, ins: Ins, shards: Shards) -> Way | None:
    """Without padding, what counts are as many runs as there are shards; with it, the entries
    themselves."""
    (row,) = ins[:1]
    if not isinstance(row, RowAxis) or not isinstance(eqn.invars[0].aval.dtype, np.dtype):
        return None
    size = eqn.invars[0].aval.shape[row.axis]
    is_fixed = row.order is not None or shards.pads(size, row)
    wide = row if is_fixed else cut_along(row.axis, size // shards.count)
    return _as_rows(eqn, [wide], shards)


def _moved(eqn: JaxprEqn, ins: Ins, shards: Shards, known: Sequence[RowAxis]) -> Way | None:
    """Entries change their places along the dimension that is cut, and stay with their shards."""
    if eqn.primitive.name == "reshape":
        (row,) = ins
        assert isinstance(row, RowAxis)
        to = regrouped(eqn, row, shards) if eqn.params["dimensions"] is None else None
        return (
            None
            if to is None
            else Way((row,), (to,), params=lambda outs: {"new_sizes": outs[0].shape})
        )
    found = moves_of(eqn, ins, shards, known)
    return None if found is None else Way(found.operands, found.outs, write="move", moves=found)


def _each_its_own(eqn: JaxprEqn, ins: Ins, shards: Shards) -> Way | None:
    return Way(tuple(x if isinstance(x, RowAxis) else None for x in ins), tuple(ins))


def _arg_reduce(eqn: JaxprEqn, ins: Ins, shards: Shards) -> Way | None:
    (row,), (x,) = ins, eqn.invars
    if not isinstance(row, RowAxis) or eqn.params["axes"] != (row.axis,):
        return _as_rows(eqn, ins, shards)
    if x.aval.dtype == np.bool_ or row.order is not None:
        return None
    (out,) = eqn.outvars
    sends = 2 * out.aval.size * (4 + nbytes(x.aval) / x.aval.size)
    return Way((row,), (SHARED,), write="arg_reduce", sends=sends)


def _gather(eqn: JaxprEqn, ins: Ins, shards: Shards) -> Way | None:
    """Picks entries where the cut is; takes slices of other dimensions; or has indices that are
    cut."""
    (x, indices), (found, of) = (a.aval for a in eqn.invars), ins
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    out = eqn.outvars[0].aval
    batch = [
        d for d in range(out.ndim) if d not in numbers.offset_dims
    ]  # those of the indices, but for the last
    if isinstance(of, RowAxis):
        if of.axis == indices.ndim - 1:
            return None
        theirs: RowAxis | None = None
        if of.axis in numbers.start_indices_batching_dims:
            at = numbers.start_indices_batching_dims.index(of.axis)
            theirs = dataclasses.replace(of, axis=numbers.operand_batching_dims[at])
        if isinstance(found, RowAxis) and found != theirs:
            return None
        return Way((theirs, of), (dataclasses.replace(of, axis=batch[of.axis]),))
    if not isinstance(found, RowAxis):
        return None
    d = found.axis
    if d in numbers.operand_batching_dims:
        at = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(d)]
        own = dataclasses.replace(found, axis=at)
        return Way((found, own), (dataclasses.replace(found, axis=batch[at]),))
    if d in numbers.start_index_map:
        if sizes[d] != 1 or not isinstance(x.dtype, np.dtype) or found.order is not None:
            return None
        add = "or" if x.dtype == np.bool_ else "sum"
        return Way((found, None), (SHARED,), add, write="pick", at=numbers.start_index_map.index(d))
    if sizes[d] != x.shape[d]:
        return None
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    axis = numbers.offset_dims[[k for k in range(x.ndim) if k not in gone].index(d)]
    local = (*sizes[:d], shards.local(sizes[d], found), *sizes[d + 1 :])
    return Way(
        (found, None),
        (dataclasses.replace(found, axis=axis),),
        params=lambda _: {"slice_sizes": local},
    )


def _scatter(eqn: JaxprEqn, ins: Ins, shards: Shards) -> Way | None:
    """Into the entries where the cut is; into slices of other dimensions; or with indices that are
    cut."""
    x, indices, updates = (a.aval for a in eqn.invars)
    numbers = eqn.params["dimension_numbers"]
    batch = [d for d in range(updates.ndim) if d not in numbers.update_window_dims]
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window = [d for d in range(x.ndim) if d not in gone]  # in the order of update_window_dims
    for among, row in enumerate(ins):
        if not isinstance(row, RowAxis):
            continue
        way: Way | None = None
        as_ = lambda axis, row=row: dataclasses.replace(row, axis=axis)
        d, k = row.axis, row.axis
        if among == 2 and row.axis in batch:
            among, k = 1, batch.index(row.axis)
        elif among == 2:
            d = window[numbers.update_window_dims.index(row.axis)]
        if among == 1 and k in numbers.scatter_indices_batching_dims:
            d = numbers.operand_batching_dims[numbers.scatter_indices_batching_dims.index(k)]
        elif among == 1:
            if (
                eqn.primitive.name == "scatter-add"
                and k < indices.ndim - 1
                and isinstance(x.dtype, np.dtype)
            ):
                way = Way((None, as_(k), as_(batch[k])), (SHARED,), "sum", write="add_up")
            return _fits(way, ins)
        if d in numbers.operand_batching_dims:
            k = numbers.scatter_indices_batching_dims[numbers.operand_batching_dims.index(d)]
            way = Way((as_(d), as_(k), as_(batch[k])), (as_(d),))
        elif d in numbers.inserted_window_dims:
            clips = (
                eqn.params["mode"] == Mode.CLIP and len(numbers.scatter_dims_to_operand_dims) > 1
            )
            if d in numbers.scatter_dims_to_operand_dims and not clips and row.order is None:
                at = numbers.scatter_dims_to_operand_dims.index(d)
                way = Way((as_(d), None, None), (as_(d),), write="put", at=at)
        elif d not in numbers.scatter_dims_to_operand_dims:
            u = numbers.update_window_dims[window.index(d)]
            if updates.shape[u] == x.shape[d]:
                way = Way((as_(d), None, as_(u)), (as_(d),))
        return _fits(way, ins)
    return None


def _fits(way: Way | None, ins: Ins) -> Way | None:
    """A way that reads every operand that is cut as it is cut."""
    if way is None or any(
        isinstance(x, RowAxis) and x != row for x, row in zip(ins, way.operands, strict=True)
    ):
        return None
    return way


def _window(eqn: JaxprEqn, ins: Ins, shards: Shards) -> Way | None:
    """A window of one entry along the dimension that is cut, which is moved by one: a pool, or its
    derivative."""
    row = next(x for x in ins if isinstance(x, RowAxis))
    p, d = eqn.params, row.axis
    steps = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    if any(p[key][d] != 1 for key in steps if key in p) or tuple(p["padding"][d]) != (0, 0):
        return None
    operands = tuple(
        row if a.aval.ndim else None for a in eqn.invars
    )  # behind arrays stand what they begin with
    return _fits(Way(operands, (row,) * len(eqn.outvars)), ins)


def _array_sum(eqn: JaxprEqn, ins: Ins, shards: Shards) -> Way | None:
    """A sum over dimensions of an array, as a sum over the axis of a `vmap` becomes."""
    axes = eqn.params["axes"]
    if (
        not all(isinstance(a, (int, np.integer)) for a in axes)
        or eqn.params["axis_index_groups"] is not None
    ):
        return None
    row = next((x for x in ins if isinstance(x, RowAxis)), None)
    if row is None or any(x != row for x in ins):
        return None
    given = (row,) * len(ins)
    if row.axis in axes:
        return Way(given, (SHARED,) * len(ins), "sum")
    return Way(
        given,
        (dataclasses.replace(row, axis=row.axis - sum(a < row.axis for a in axes)),) * len(ins),
    )


def _convolution(eqn: JaxprEqn, ins: Ins, shards: Shards) -> Way | None:
    """Examples and output features are kept; input features are summed over."""
    p = eqn.params
    if p["feature_group_count"] != 1 or p["batch_group_count"] != 1:
        return None
    lhs, rhs, out = (
        p["dimension_numbers"].lhs_spec,
        p["dimension_numbers"].rhs_spec,
        p["dimension_numbers"].out_spec,
    )
    a, b = ins
    row = a if isinstance(a, RowAxis) else b
    assert isinstance(row, RowAxis)
    as_ = lambda axis: dataclasses.replace(row, axis=axis)
    if isinstance(a, RowAxis) and a.axis == lhs[0]:
        return _fits(Way((a, None), (as_(out[0]),)), ins)
    if isinstance(b, RowAxis) and b.axis == rhs[0]:
        return _fits(Way((None, b), (as_(out[1]),)), ins)
    if (a.axis == lhs[1]) if isinstance(a, RowAxis) else (row.axis == rhs[1]):
        return _fits(Way((as_(lhs[1]), as_(rhs[1])), (SHARED,), "sum"), ins)
    return None


RULES: Mapping[str, Callable[[JaxprEqn, Ins, Shards], Way | None]] = {
    "reshape": _reshape,
    "optimization_barrier": _each_its_own,
    "all_reduce": _each_its_own,  # over another axis
    "argmax": _arg_reduce,
    "argmin": _arg_reduce,
    "gather": _gather,
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"),
        _scatter,
    ),
    "conv_general_dilated": _convolution,
    **dict.fromkeys(
        ("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"), _window
    ),
    **dict.fromkeys(("select_and_scatter_add", "select_and_gather_add"), _window),
    "psum": _array_sum,
}
