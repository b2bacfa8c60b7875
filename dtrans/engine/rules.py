"""Strategies to run an equation on sharded values, and the choice of the cheapest.

A rule takes an equation and the layouts of its operands, and returns a `Strategy`: the layout in
which each operand is read, the layouts of outputs, and the reduction over shards. Most primitives
use the rules of the row analysis (`dtrans.rows.rules`), with the sharded dimension as rows. This
module adds rules for gathers and scatters along the sharded dimension, argmax, convolutions and
reshapes.

The layouts of operands may conflict. Then there is one strategy for each sharded operand: it keeps
the layout of that operand and converts all other operands. A last strategy gathers all operands.
`choose` returns the strategy that communicates the fewest bytes. Sharded inputs of the program are
large, so `choose` gathers them only if no other strategy exists.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.lax import GatherScatterMode as Mode

from dtrans._jax import Atom, JaxprEqn, warn_if_unknown
from dtrans.engine.layout import (
    Partial,
    ShardLayout,
    Shards,
    sharded_along,
)
from dtrans.engine.row_moves import RowMoves, moves_of, regroup
from dtrans.ir.cost import nbytes, total_bytes
from dtrans.ir.dataflow import avals
from dtrans.rows.layout import SHARED, RowAxis, Shared, row_axes, rows_or_none, rows_or_shared
from dtrans.rows.rules import step_of


Ins = Sequence[Shared | RowAxis]


@dataclasses.dataclass(frozen=True)
class Strategy:
    """One way to run an equation of the single-device program on shards.

    For example, a matrix product can run on pieces of rows without communication. It can also run
    on pieces of the contracted dimension, followed by a sum over shards.

    Attributes:
      operands: layout in which each operand is read; None for the full value.
      outs: layout of each output, after the reduction if there is one.
      reduce: reduction of the outputs over shards, such as "sum"; "" if there is none.
      params: function that takes the output types on a shard. It returns the parameters of the
        equation that change (a shape, say). None if none change.
      write: name of the function in `dtrans.engine.strategy_writers` that replaces the equation by
        others; "" to run the equation itself on the operands.
      at: for the writers "pick" and "put" (lookups and writes of single entries): the component of
        the indices that counts along the sharded dimension.
      sends: bytes that are communicated in addition to the conversions and the reduction.
      moves: for the writer "move": the new positions of entries within each piece.
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
    """Facts about one operand of an equation that determine the cost of a strategy.

    Attributes:
      layout: layout in which the operand was computed.
      is_input: True for a sharded input of the program (parameters, say), and for a cast or
        rearrangement of one. Gathering such an operand is a last resort.
      has: function that returns True if a conversion of the operand to a layout is already stored,
        and so costs nothing. None stands for the full value.
    """

    layout: ShardLayout
    is_input: bool = False
    has: Callable[[RowAxis | None], bool] = lambda row: False


def choose(
    eqn: JaxprEqn,
    operands: Sequence[Operand],
    shards: Shards,
    as_term: bool = False,
    known: Sequence[RowAxis] | None = None,
) -> Strategy:
    """Return the strategy for an equation that communicates the fewest bytes.

    Args:
      eqn: the equation. At least one operand is sharded or a partial sum.
      operands: facts about its operands.
      shards: number and mesh axes of the shards.
      as_term: True if later equations can work with a partial sum, so that no all-reduce is needed
        now.
      known: layouts of other values whose entries are not in order (`dtrans.rows.layout.RowOrder`);
        None if the result must keep its entries in order.
    """
    rows = [rows_or_shared(x.layout) for x in operands]
    cost = lambda way: _cost(eqn, operands, way, shards, as_term)
    natural = strategy_of(eqn, rows, shards, known)
    if natural is not None and cost(natural) == (0, 0):
        return natural
    ways = [natural]
    for i, x in enumerate(rows):
        if isinstance(x, RowAxis):
            only_this: list[Shared | RowAxis] = [SHARED] * len(rows)
            only_this[i] = x
            ways.append(strategy_of(eqn, only_this, shards, known))
    ways.append(Strategy((None,) * len(rows), (SHARED,) * len(eqn.outvars)))
    return min((w for w in ways if w is not None), key=cost)


def _cost(
    eqn: JaxprEqn, operands: Sequence[Operand], way: Strategy, shards: Shards, as_term: bool
) -> tuple[float, float]:
    """Return (bytes of program inputs that are gathered, bytes that are communicated)."""
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
            if operand.is_input and not exchanged:
                gathered += size
    if way.reduce and not (as_term and way.reduce == "sum"):
        moved += 2 * total_bytes(eqn.outvars)
    return gathered, moved


def strategy_of(
    eqn: JaxprEqn, ins: Ins, shards: Shards, known: Sequence[RowAxis] | None = None
) -> Strategy | None:
    """Return the strategy that reads all operands in the given layouts; None if there is none.

    For example, there is no strategy for `x + y` if x and y are sharded along different dimensions.

    Args:
      eqn: the equation.
      ins: layout of each operand.
      shards: number and mesh axes of the shards.
      known: as in `choose`.
    """
    if not row_axes(ins):
        return None
    rule = RULES.get(eqn.primitive.name, _as_rows)
    way = rule(eqn, ins, shards)
    if way is None and known is not None:
        way = _moved(eqn, ins, shards, known)
    if way is None:
        return None
    operands = _simplified(shards, eqn.invars, way.operands)
    outs = _simplified(shards, eqn.outvars, way.outs)
    return dataclasses.replace(way, operands=operands, outs=outs)


def _simplified(shards: Shards, atoms: Sequence[Atom], layouts: Sequence[Any]) -> tuple[Any, ...]:
    found = []
    for a, layout in zip(atoms, layouts, strict=True):
        if isinstance(layout, RowAxis):
            layout = shards.plain(layout, a.aval.shape[layout.axis])
        found.append(layout)
    return tuple(found)


# -- rules ---------------------------------------------------------------------------------------


def _as_rows(eqn: JaxprEqn, ins: Ins, shards: Shards) -> Strategy | None:
    """Return the strategy that the row analysis finds for an equation (`dtrans.rows.rules`)."""
    step = step_of(eqn, ins)
    if step is None:
        warn_if_unknown(eqn, "is assumed to mix rows, so its operands are gathered")
        return None
    outs = tuple(map(rows_or_shared, step.outs))
    return Strategy(step.operands, outs, step.reduce or "", step.params)


def _reshape(eqn: JaxprEqn, ins: Ins, shards: Shards) -> Strategy | None:
    """Return the strategy of a reshape, in which each shard reshapes its own piece."""
    (row,) = ins[:1]
    if not isinstance(row, RowAxis) or not isinstance(eqn.invars[0].aval.dtype, np.dtype):
        return None
    size = eqn.invars[0].aval.shape[row.axis]
    is_fixed = row.order is not None or shards.pads(size, row)
    if not is_fixed:
        row = sharded_along(row.axis, shards.longest_run(size))
    return _as_rows(eqn, [row], shards)


def _moved(eqn: JaxprEqn, ins: Ins, shards: Shards, known: Sequence[RowAxis]) -> Strategy | None:
    """Return the strategy by which each shard moves entries within its piece.

    An example is a slice along the sharded dimension (`dtrans.engine.row_moves`).
    """
    if not shards.is_even:
        return None
    if eqn.primitive.name == "reshape":
        (row,) = ins
        assert isinstance(row, RowAxis)
        if eqn.params["dimensions"] is not None:
            return None
        to = regroup(eqn, row, shards)
        if to is None:
            return None
        return Strategy((row,), (to,), params=lambda outs: {"new_sizes": outs[0].shape})
    found = moves_of(eqn, ins, shards, known)
    if found is None:
        return None
    return Strategy(found.operands, found.outs, write="move", moves=found)


def _keep_layouts(eqn: JaxprEqn, ins: Ins, shards: Shards) -> Strategy | None:
    return Strategy(tuple(map(rows_or_none, ins)), tuple(ins))


def _gather_over_axis(eqn: JaxprEqn, ins: Ins, shards: Shards) -> Strategy | None:
    """Return the strategy of a collective over another mesh axis than the sharded one.

    Each shard runs the collective on its piece. If the collective moves entries along the sharded
    dimension, each shard needs the full value instead.
    """
    axes = {eqn.params[n] for n in ("axis", "cut", "joined") if n in eqn.params}
    outs: list[Shared | RowAxis] = []
    for x in ins:
        outs.append(x if isinstance(x, RowAxis) and x.axis not in axes else SHARED)
    return Strategy(tuple(map(rows_or_none, outs)), tuple(outs))


def _after(eqn: JaxprEqn, ins: Ins, shards: Shards) -> Strategy | None:
    """Return the strategy of `after`, which returns its first operand and waits for the second."""
    return Strategy(tuple(map(rows_or_none, ins)), tuple(ins[:1]))


def _arg_reduce(eqn: JaxprEqn, ins: Ins, shards: Shards) -> Strategy | None:
    (row,), (x,) = ins, eqn.invars
    if not isinstance(row, RowAxis) or eqn.params["axes"] != (row.axis,):
        return _as_rows(eqn, ins, shards)
    if x.aval.dtype == np.bool_ or row.order is not None:
        return None
    (out,) = eqn.outvars
    sends = 2 * out.aval.size * (4 + nbytes(x.aval) / x.aval.size)
    return Strategy((row,), (SHARED,), write="arg_reduce", sends=sends)


def _gather(eqn: JaxprEqn, ins: Ins, shards: Shards) -> Strategy | None:
    """Return the strategy of a gather.

    There is a strategy in four cases. The sharded dimension is a dimension of the indices, or a
    batch dimension of the operand. Or the gather looks up single entries along the sharded
    dimension, or copies all entries along it.
    """
    (x, indices), (found, of) = avals(eqn.invars), ins
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    out = eqn.outvars[0].aval
    # output dimensions that come from the leading dimensions of the indices
    batch = [d for d in range(out.ndim) if d not in numbers.offset_dims]
    if isinstance(of, RowAxis):
        if of.axis == indices.ndim - 1:
            return None
        theirs: RowAxis | None = None
        if of.axis in numbers.start_indices_batching_dims:
            at = numbers.start_indices_batching_dims.index(of.axis)
            theirs = dataclasses.replace(of, axis=numbers.operand_batching_dims[at])
        if isinstance(found, RowAxis) and found != theirs:
            return None
        return Strategy((theirs, of), (dataclasses.replace(of, axis=batch[of.axis]),))
    if not isinstance(found, RowAxis):
        return None
    d = found.axis
    if d in numbers.operand_batching_dims:
        at = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(d)]
        index_row = dataclasses.replace(found, axis=at)
        return Strategy((found, index_row), (dataclasses.replace(found, axis=batch[at]),))
    if d in numbers.start_index_map:
        if sizes[d] != 1 or not isinstance(x.dtype, np.dtype) or found.order is not None:
            return None
        add = "or" if x.dtype == np.bool_ else "sum"
        at = numbers.start_index_map.index(d)
        return Strategy((found, None), (SHARED,), add, write="pick", at=at)
    if sizes[d] != x.shape[d]:
        return None
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    window = [k for k in range(x.ndim) if k not in gone]  # in the order of offset_dims
    to = dataclasses.replace(found, axis=numbers.offset_dims[window.index(d)])
    local = (*sizes[:d], shards.local(sizes[d], found), *sizes[d + 1 :])
    return Strategy((found, None), (to,), params=lambda _: {"slice_sizes": local})


def _scatter(eqn: JaxprEqn, ins: Ins, shards: Shards) -> Strategy | None:
    """Return the strategy of a scatter.

    There is a strategy in four cases. The sharded dimension is a dimension of the indices, or a
    batch dimension of the operand. Or the scatter writes single entries along the sharded
    dimension, or all entries along it.
    """
    x, indices, updates = avals(eqn.invars)
    numbers = eqn.params["dimension_numbers"]
    batch = [d for d in range(updates.ndim) if d not in numbers.update_window_dims]
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window = [d for d in range(x.ndim) if d not in gone]  # in the order of update_window_dims
    for among, row in enumerate(ins):
        if not isinstance(row, RowAxis):
            continue
        way: Strategy | None = None
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
                way = Strategy((None, as_(k), as_(batch[k])), (SHARED,), "sum", write="add_up")
            return _fits(way, ins)
        if d in numbers.operand_batching_dims:
            k = numbers.scatter_indices_batching_dims[numbers.operand_batching_dims.index(d)]
            way = Strategy((as_(d), as_(k), as_(batch[k])), (as_(d),))
        elif d in numbers.inserted_window_dims:
            clips = (
                eqn.params["mode"] == Mode.CLIP and len(numbers.scatter_dims_to_operand_dims) > 1
            )
            if d in numbers.scatter_dims_to_operand_dims and not clips and row.order is None:
                at = numbers.scatter_dims_to_operand_dims.index(d)
                way = Strategy((as_(d), None, None), (as_(d),), write="put", at=at)
        elif d not in numbers.scatter_dims_to_operand_dims:
            u = numbers.update_window_dims[window.index(d)]
            if updates.shape[u] == x.shape[d]:
                way = Strategy((as_(d), None, as_(u)), (as_(d),))
        return _fits(way, ins)
    return None


def _fits(way: Strategy | None, ins: Ins) -> Strategy | None:
    """Return the strategy if it reads each sharded operand in its present layout, else None."""
    if way is None:
        return None
    for x, row in zip(ins, way.operands, strict=True):
        if isinstance(x, RowAxis) and x != row:
            return None
    return way


def _window(eqn: JaxprEqn, ins: Ins, shards: Shards) -> Strategy | None:
    """Return the strategy of a pooling operation, or of its derivative.

    Along the sharded dimension, windows must have size 1 and stride 1.
    """
    row = row_axes(ins)[0]
    p, d = eqn.params, row.axis
    steps = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    if any(p[key][d] != 1 for key in steps if key in p) or tuple(p["padding"][d]) != (0, 0):
        return None
    # the last operands are the initial values of the reduction, which are scalars
    operands = tuple(row if a.aval.ndim else None for a in eqn.invars)
    return _fits(Strategy(operands, (row,) * len(eqn.outvars)), ins)


def _array_sum(eqn: JaxprEqn, ins: Ins, shards: Shards) -> Strategy | None:
    """Return the strategy of a `psum` over array dimensions, which `jax.vmap` writes."""
    axes = eqn.params["axes"]
    if (
        not all(isinstance(a, (int, np.integer)) for a in axes)
        or eqn.params["axis_index_groups"] is not None
    ):
        return None
    row = ins[0]
    if not isinstance(row, RowAxis) or any(x != row for x in ins):
        return None
    operands = (row,) * len(ins)
    if row.axis in axes:
        return Strategy(operands, (SHARED,) * len(ins), "sum")
    axis = row.axis - sum(a < row.axis for a in axes)
    return Strategy(operands, (dataclasses.replace(row, axis=axis),) * len(ins))


def _convolution(eqn: JaxprEqn, ins: Ins, shards: Shards) -> Strategy | None:
    """Return the strategy of a convolution.

    If examples or output features are sharded, so is the output. If input features are sharded, the
    output is a sum over shards. A derivative with respect to a kernel is also a convolution, in
    which the examples of the batch play the role of input features. For a grouped convolution, this
    derivative has groups of examples (`batch_group_count`). If no group mixes entries of several
    shards, each shard convolves its own groups.
    """
    p, numbers = eqn.params, eqn.params["dimension_numbers"]
    for key, axis in (("feature_group_count", 1), ("batch_group_count", 0)):
        way = _groups_of_rows(eqn, ins, key, numbers.lhs_spec[axis])
        if way is not None:
            return way
    groups_features, groups_examples = p["feature_group_count"] > 1, p["batch_group_count"] > 1
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    a, b = ins
    row = a if isinstance(a, RowAxis) else b
    assert isinstance(row, RowAxis)
    as_ = lambda axis: dataclasses.replace(row, axis=axis)
    if isinstance(a, RowAxis) and a.axis == lhs[0] and not groups_examples:
        return _fits(Strategy((a, None), (as_(out[0]),)), ins)
    is_grouped = groups_features or groups_examples
    if isinstance(b, RowAxis) and b.axis == rhs[0] and not is_grouped:
        return _fits(Strategy((None, b), (as_(out[1]),)), ins)
    input_features = lhs[1] if isinstance(a, RowAxis) else rhs[1]
    if row.axis == input_features and not groups_features:
        return _fits(Strategy((as_(lhs[1]), as_(rhs[1])), (SHARED,), "sum"), ins)
    return None


def _groups_of_rows(eqn: JaxprEqn, ins: Ins, key: str, axis: int) -> Strategy | None:
    """Return the strategy of a grouped convolution in which no group mixes several rows.

    Each shard convolves the groups of its rows. `jax.vmap` writes such a convolution if both
    operands have rows.

    Args:
      eqn, ins: as for `_convolution`.
      key: the parameter with the number of groups.
      axis: dimension of the first operand that is divided into groups.
    """
    (x, kernel), groups = avals(eqn.invars), eqn.params[key]
    numbers = eqn.params["dimension_numbers"]
    sizes = (x.shape[axis], kernel.shape[numbers.rhs_spec[0]])
    row, size = (ins[0], sizes[0]) if isinstance(ins[0], RowAxis) else (ins[1], sizes[1])
    assert isinstance(row, RowAxis)
    count = size // row.width
    if groups == 1 or not count or groups % count:
        return None
    operands = (
        dataclasses.replace(row, axis=axis, width=sizes[0] // count),
        dataclasses.replace(row, axis=numbers.rhs_spec[0], width=sizes[1] // count),
    )
    out = dataclasses.replace(operands[1], axis=numbers.out_spec[1])

    def local_groups(outs: Sequence[Any]) -> dict[str, Any]:
        rows = outs[0].shape[out.axis] // out.width
        return {key: rows * (groups // count)}

    # padding must be zeros: XLA may write groups as one product with zeros, and 0 * NaN is NaN
    return _fits(Strategy(operands, (out,), params=local_groups, write="fill_padding"), ins)


RULES: Mapping[str, Callable[[JaxprEqn, Ins, Shards], Strategy | None]] = {
    "reshape": _reshape,
    **dict.fromkeys(("device_put", "optimization_barrier"), _keep_layouts),
    "all_reduce": _keep_layouts,  # this all_reduce is over another mesh axis, so layouts stay
    **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all"), _gather_over_axis),
    "after": _after,
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
