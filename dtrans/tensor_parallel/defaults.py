"""Default sharding of a layer: the dimension along which each parameter is sharded.

One pass over the equations chooses the dimensions. The first equation in this table that reads a
parameter decides how the parameter is sharded:

    dot_general    A kernel is sharded along its output dimension (columns). If the other operand
                   is already sharded along the contracted dimension, the kernel is sharded along
                   its contracted dimension (rows). So a second layer reads the shards of the first
                   layer. A stack of kernels with a batch dimension (experts) is sharded along the
                   batch dimension.
    convolution    A kernel is sharded along its output features.
    gather         An embedding table is sharded along the dimension of the ids.
    elementwise    A parameter (a bias) is sharded along the dimension in which another operand is
                   sharded.

The equation may read the parameter itself or a view: a transpose, a cast, or added dimensions. It
may also read the result of elementwise operations on parameters, such as a kernel divided by its
norm.

Source: EPL's `split` scopes (epl/ops/distributed_dense.py) shard the columns of every dense layer.
Megatron shards columns in one layer, and rows in the next (Shoeybi et al., 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from dtrans._jax import (
    Atom,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    facts_of,
    has_bodies,
    opened,
)
from dtrans.engine.layout import ShardLayout, Shards, sharded_along
from dtrans.engine.rules import Operand, choose
from dtrans.ir.inline import eliminate_dead, inline_calls
from dtrans.ir.interpret import ForwardAnalysis, enter
from dtrans.ir.selection import values_at
from dtrans.rows.layout import SHARED, RowAxis, row_axes, rows_or_none


# pair that describes a view of a parameter: (index of the parameter, dims). For each dimension of
# the view, `dims` has the dimension of the parameter, or None for an added dimension.
Origin = tuple[int, tuple[int | None, ...]]


def default_axes(
    jaxpr: ClosedJaxpr,
    params: Collection[int],
    shards: int,
    scope: Callable[[JaxprEqn], bool] | None = None,
    axes: Mapping[int, int] | None = None,
) -> dict[int, int]:
    """Return the dimension along which each parameter in a `dtrans.split(shards)` scope is sharded.

    Args:
      jaxpr: a forward pass, with or without gradients.
      params: indices of the inputs that are parameters.
      shards: the number of shards.
      scope: returns True if an equation is in the scope. By default all equations are. Parameters
        that no equation in the scope reads stay replicated.
      axes: dimensions that the user chose: index of an input -> dimension.

    Returns:
      The user's and the default dimensions: index of an input -> dimension.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dtrans.tensor_parallel.defaults import default_axes
      >>> model = lambda w1, b1, w2, x: jax.nn.relu(x @ w1 + b1) @ w2
      >>> shapes = [(4, 16), (16,), (16, 4), (8, 4)]
      >>> default_axes(jax.make_jaxpr(model)(*map(jnp.ones, shapes)), params=[0, 1, 2], shards=2)
      {0: 1, 1: 0, 2: 0}
    """
    return axes_and_reads(jaxpr, params, shards, scope, axes)[0]


def axes_and_reads(
    jaxpr: ClosedJaxpr,
    params: Collection[int],
    shards: int,
    scope: Callable[[JaxprEqn], bool] | None = None,
    axes: Mapping[int, int] | None = None,
) -> tuple[dict[int, int], dict[int, str]]:
    """Return the result of `default_axes`, and the parameters that `dtrans.split` scopes read.

    The second dict maps a parameter's index to the first primitive that computes with it. A caller
    lists these parameters in errors if no rule shards them.
    """
    flat = eliminate_dead(inline_calls(jaxpr))
    chooser = _AxisChooser(
        set(params), Shards(shards, ()), scope or (lambda eqn: True), dict(axes or {})
    )
    inner = opened(flat)
    for i, v in enumerate(inner.invars):
        if i in chooser.axes:
            chooser.layouts[v] = sharded_along(chooser.axes[i])
        elif i in chooser.params:
            chooser.origins[v] = (i, tuple(range(v.aval.ndim)))
    chooser.follow(inner.eqns)
    return chooser.axes, chooser.read


# layout of a sharded value, or None; and `Origin` of a view of a parameter, or None
_Fact = tuple[RowAxis | None, Origin | None]


def _join(one: _Fact, other: _Fact) -> _Fact:
    """Return the properties of a `cond` output that are equal in two branches.

    The properties are the output's sharded dimension, and the parameter that the output shows (for
    example, transposed).
    """
    return one[0] if one[0] == other[0] else None, one[1] if one[1] == other[1] else None


def _inside(fact: _Fact) -> _Fact:
    """Convert properties of a scanned operand to properties of its slice in one iteration.

    The properties are the sharded dimension, and the parameter that the operand shows.
    """
    row, origin = fact
    if row is not None:
        row = sharded_along(row.axis - 1) if row.axis else None
    return row, origin and (origin[0], origin[1][1:])


def _stack(fact: _Fact) -> _Fact:
    """Return the sharding of a scan's stacked output, which has a new dimension 0."""
    row, _ = fact
    return row and sharded_along(row.axis + 1), None


_FACTS = ForwardAnalysis[_Fact](
    _join, lambda eqn, ins: None, lambda aval, value: (None, None), _inside, _stack
)


class _AxisChooser:
    """Pass over the equations of a step that chooses a sharded dimension for each parameter.

    The pass also tracks the sharded dimension of each computed value, because rules depend on the
    other operands of an equation.
    """

    def __init__(
        self,
        params: set[int],
        shards: Shards,
        scope: Callable[[JaxprEqn], bool],
        axes: dict[int, int],
    ) -> None:
        self.params = params
        self.shards = shards
        self.scope = scope
        self.axes = axes
        self.layouts: dict[Var, ShardLayout] = {}
        self.origins: dict[Var, Origin] = {}
        # parameters that equations in the scope read -> the first primitive that computes with it
        self.read: dict[int, str] = {}
        self.weights: set[Var] = set()  # values that are computed from parameters only
        self._in_scope = False  # True in a body whose equation is in the scope

    def layout(self, a: Atom) -> ShardLayout:
        if isinstance(a, Literal):
            return SHARED
        return self.layouts.get(a, SHARED)

    def origin(self, a: Atom) -> Origin | None:
        """Return the parameter of a value that is a view, such as the transpose of a parameter.

        The result has the index of the parameter, and for each dimension of the value a dimension
        of the parameter. Return None for other values, and if the parameter is already sharded.
        """
        found = None if isinstance(a, Literal) else self.origins.get(a)
        if found is None or found[0] in self.axes:
            return None
        return found

    def follow(self, eqns: Iterable[JaxprEqn]) -> None:
        for eqn in eqns:
            if has_bodies(eqn):
                # the name stacks of a body do not contain the scopes of its equation
                outside, self._in_scope = self._in_scope, self._in_scope or self.scope(eqn)
                ins = list(map(self._fact, eqn.invars))
                self._take(eqn.outvars, enter(_FACTS, eqn, ins, self._follow_body).outs)
                self._in_scope = outside
                continue
            if self._in_scope or self.scope(eqn):
                self._decide(eqn)
            operands = [Operand(self.layout(a)) for a in eqn.invars]
            if row_axes(map(self.layout, eqn.invars)):
                outs = choose(eqn, operands, self.shards).outs
                self.layouts.update(zip(eqn.outvars, outs, strict=True))
            if _keeps_dimensions(eqn) and (origin := self.origin(eqn.invars[0])):
                self.origins[eqn.outvars[0]] = (origin[0], _map_dimensions(eqn, origin[1]))
            elif all(map(self._is_weight, eqn.invars)):
                self._follow_weights(eqn)

    def _is_weight(self, a: Atom) -> bool:
        return isinstance(a, Literal) or a in self.origins or a in self.weights

    def _follow_weights(self, eqn: JaxprEqn) -> None:
        """Record the outputs of an equation that reads only parameters and constants.

        An elementwise function of a parameter counts as a view of the parameter.
        """
        self.weights.update(eqn.outvars)
        if not facts_of(eqn).elementwise or len(eqn.outvars) > 1:
            return
        (out,) = eqn.outvars
        for a in eqn.invars:
            if a.aval.shape == out.aval.shape and (origin := self.origin(a)):
                self.origins[out] = origin
                return

    def _follow_body(
        self, number: int, body: Any, facts: list[_Fact]
    ) -> tuple[None, Sequence[_Fact]]:
        flat = opened(inline_calls(body))
        self._take(flat.invars, facts)
        self.follow(flat.eqns)
        return None, list(map(self._fact, flat.outvars))

    def _fact(self, a: Atom) -> _Fact:
        origin = None if isinstance(a, Literal) else self.origins.get(a)
        return rows_or_none(self.layout(a)), origin

    def _take(self, values: Sequence[Var], facts: Sequence[_Fact]) -> None:
        for v, (row, origin) in zip(values, facts, strict=True):
            self.layouts[v] = row or SHARED
            if origin is not None:
                self.origins[v] = origin

    def _decide(self, eqn: JaxprEqn) -> None:
        """Choose how to shard the parameters that an equation reads, by the rules of the module."""
        for i, a in enumerate(eqn.invars):
            if isinstance(a, Var) and a in self.origins:
                pos = self.origins[a][0]
                if _keeps_dimensions(eqn):
                    self.read.setdefault(pos, "")
                else:
                    self.read[pos] = self.read.get(pos) or eqn.primitive.name
            origin = self.origin(a)
            if origin is None:
                continue
            layouts = map(self.layout, eqn.invars)
            axis = _axis(eqn, i, list(map(rows_or_none, layouts)))
            dim = None if axis is None else origin[1][axis]
            if dim is None:
                continue
            self.axes[origin[0]] = dim
            # earlier views of the parameter are now sharded, too
            for v, (pos, dims) in self.origins.items():
                if pos == origin[0] and dim in dims:
                    self.layouts[v] = sharded_along(dims.index(dim))


def _axis(eqn: JaxprEqn, i: int, layouts: list[RowAxis | None]) -> int | None:
    """Return the dimension along which to shard operand `i`, a parameter; None to replicate it."""
    name, shape = eqn.primitive.name, eqn.invars[i].aval.shape
    if name == "dot_general":
        contract, batch = eqn.params["dimension_numbers"]
        other = layouts[1 - i]
        if batch[i]:
            return int(batch[i][0])
        if other is not None:
            others = contract[1 - i]
            if other.axis not in others:
                return None
            return int(contract[i][others.index(other.axis)])
        free = [d for d in range(len(shape)) if d not in contract[i]]
        if free:
            return free[0]
        return None
    if name == "conv_general_dilated" and i == 1 and eqn.params["feature_group_count"] == 1:
        numbers = eqn.params["dimension_numbers"]
        if layouts[0] is not None and layouts[0].axis == numbers.lhs_spec[0]:
            return None  # the operand's batch dimension is sharded, so do not shard the kernel
        return int(numbers.rhs_spec[0])
    if name == "gather" and i == 0:
        numbers = eqn.params["dimension_numbers"]
        id_dims = [d for d in numbers.start_index_map if d in numbers.collapsed_slice_dims]
        if id_dims:
            return int(id_dims[0])
        return None
    if facts_of(eqn).elementwise:
        axes = [x.axis for x in layouts if x is not None]
        if not axes or axes[0] >= len(shape):
            return None
        axis = axes[0]
        if shape[axis] != eqn.outvars[0].aval.shape[axis]:
            return None
        return axis
    return None


def _keeps_dimensions(eqn: JaxprEqn) -> bool:
    """Return True if the output is a view of operand 0: transposed, cast, or reshaped."""
    is_view = eqn.primitive.name in ("transpose", "convert_element_type")
    return is_view or facts_of(eqn).keeps_order(eqn)


def _map_dimensions(eqn: JaxprEqn, dims: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Map each dimension of an equation's output to a dimension of a parameter.

    Args:
      eqn: an equation that rearranges its first operand.
      dims: for each dimension of the operand, the dimension of the parameter; None if there is
        none.
    """
    out, name = eqn.outvars[0].aval, eqn.primitive.name
    if name == "transpose":
        return tuple(values_at(dims, eqn.params["permutation"]))
    if name == "broadcast_in_dim":
        old, new = eqn.invars[0].aval.shape, tuple(eqn.params["broadcast_dimensions"])
        same = {axis: dims[d] for d, axis in enumerate(new) if old[d] == out.shape[axis]}
        return tuple(same.get(axis) for axis in range(out.ndim))
    if out.shape != eqn.invars[0].aval.shape:
        old = eqn.invars[0].aval.shape
        old_sizes = [n for n in old if n != 1]
        new_sizes = [n for n in out.shape if n != 1]
        if old_sizes != new_sizes:
            return (None,) * out.ndim
        rest = (d for d, n in zip(dims, old, strict=True) if n != 1)
        return tuple(None if n == 1 else next(rest) for n in out.shape)
    return dims
