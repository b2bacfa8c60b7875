"""Default cuts of the parameters in a split scope.

One pass over the equations. Each equation decides from the cuts so far:

    dot_general    A kernel is cut along its output dimension (columns). If the other operand is
                   cut along the contracted dimension, so is the kernel (rows): a second layer
                   then reads the shards of the first. A stack of kernels, one for
                   each expert (a batch dimension), is cut along the experts.
    convolution    A kernel is cut along its output features.
    gather         An embedding table is cut along the dimension of the ids.
    elementwise    An operand with the cut dimension of another operand (a bias) is cut along it.

The first equation that reads a parameter in one of these ways decides. It may read it through
transposes, type conversions and added dimensions.

Source: EPL's `split` scopes (epl/ops/distributed_dense.py: columns of every dense layer); rows
after columns are Megatron's (Shoeybi et al., 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from dtrans._jax import REMAT, Atom, ClosedJaxpr, JaxprEqn, Literal, Var, bodies, facts_of, opened
from dtrans.engine.layout import ShardLayout, Shards, cut_along
from dtrans.engine.rules import Operand, choose
from dtrans.ir.inline import eliminate_dead, inline_calls
from dtrans.ir.selection import values_at
from dtrans.rows.layout import SHARED, RowAxis


# a parameter, and the parameter's dimension for each dimension of a value
Origin = tuple[int, tuple[int | None, ...]]


def default_cuts(
    jaxpr: ClosedJaxpr,
    params: Collection[int],
    shards: int,
    scope: Callable[[JaxprEqn], bool] | None = None,
    cuts: Mapping[int, int] | None = None,
) -> dict[int, int]:
    """Return the cuts of a split scope without explicit cuts, as `dtrans.split(shards)`.

    Args:
      jaxpr: a forward pass, or one with its gradients.
      params: positions of the inputs that may be cut.
      shards: the number of shards.
      scope: a predicate: True if an equation lies in the split scope; by default always. Only
        parameters read there are cut.
      cuts: dimensions of other inputs, or of parameters that the user has cut.

    Returns:
      `cuts` and the default cuts: position of an input to dimension.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dtrans.tensor_parallel.defaults import default_cuts
      >>> model = lambda w1, b1, w2, x: jax.nn.relu(x @ w1 + b1) @ w2
      >>> shapes = [(4, 16), (16,), (16, 4), (8, 4)]
      >>> default_cuts(jax.make_jaxpr(model)(*map(jnp.ones, shapes)), params=[0, 1, 2], shards=2)
      {0: 1, 1: 0, 2: 0}
    """
    flat = eliminate_dead(inline_calls(jaxpr))
    chooser = _CutChooser(
        set(params), Shards(shards, ()), scope or (lambda eqn: True), dict(cuts or {})
    )
    inner = opened(flat)
    for i, v in enumerate(inner.invars):
        if i in chooser.cuts:
            chooser.layouts[v] = cut_along(chooser.cuts[i])
        elif i in chooser.params:
            chooser.origins[v] = (i, tuple(range(v.aval.ndim)))
    chooser.follow(inner.eqns)
    return chooser.cuts


class _CutChooser:
    """Pass over equations that chooses cuts and follows the layouts that result."""

    def __init__(
        self,
        params: set[int],
        shards: Shards,
        scope: Callable[[JaxprEqn], bool],
        cuts: dict[int, int],
    ) -> None:
        self.params = params
        self.shards = shards
        self.scope = scope
        self.cuts = cuts
        self.layouts: dict[Var, ShardLayout] = {}
        self.origins: dict[Var, Origin] = {}

    def layout(self, a: Atom) -> ShardLayout:
        return SHARED if isinstance(a, Literal) else self.layouts.get(a, SHARED)

    def origin(self, a: Atom) -> Origin | None:
        """Return the parameter that a value is a view of, unless that is cut already."""
        found = None if isinstance(a, Literal) else self.origins.get(a)
        return None if found is None or found[0] in self.cuts else found

    def follow(self, eqns: Iterable[JaxprEqn]) -> None:
        for eqn in eqns:
            if eqn.primitive.name in REMAT:
                self._remat(eqn)
                continue
            if self.scope(eqn):
                self._decide(eqn)
            ins = [Operand(self.layout(a)) for a in eqn.invars]
            if any(isinstance(x.layout, RowAxis) for x in ins):
                outs = choose(eqn, ins, self.shards).outs
                self.layouts.update(zip(eqn.outvars, outs, strict=True))
            if _keeps_dimensions(eqn) and (origin := self.origin(eqn.invars[0])):
                self.origins[eqn.outvars[0]] = (origin[0], _map_dimensions(eqn, origin[1]))

    def _remat(self, eqn: JaxprEqn) -> None:
        flat = opened(inline_calls(*bodies(eqn)))
        for a, v in zip(eqn.invars, flat.invars, strict=True):
            self.layouts[v] = self.layout(a)
            if origin := self.origin(a):
                self.origins[v] = origin
        self.follow(flat.eqns)
        for v, a in zip(eqn.outvars, flat.outvars, strict=True):
            self.layouts[v] = self.layout(a)

    def _decide(self, eqn: JaxprEqn) -> None:
        """Cut the parameters that an equation reads in one of the known ways."""
        for i, a in enumerate(eqn.invars):
            origin = self.origin(a)
            if origin is None:
                continue
            layouts = map(self.layout, eqn.invars)
            axis = _axis(eqn, i, [x if isinstance(x, RowAxis) else None for x in layouts])
            dim = None if axis is None else origin[1][axis]
            if dim is None:
                continue
            self.cuts[origin[0]] = dim
            # earlier views of the parameter are cut too
            for v, (pos, dims) in self.origins.items():
                if pos == origin[0] and dim in dims:
                    self.layouts[v] = cut_along(dims.index(dim))


def _axis(eqn: JaxprEqn, i: int, cuts: list[RowAxis | None]) -> int | None:
    """Return the dimension to cut of operand `i`, a parameter; None if the equation has no rule."""
    name, shape = eqn.primitive.name, eqn.invars[i].aval.shape
    if name == "dot_general":
        contract, batch = eqn.params["dimension_numbers"]
        other = cuts[1 - i]
        if batch[i]:
            return int(batch[i][0])
        if other is not None:
            others = contract[1 - i]
            return int(contract[i][others.index(other.axis)]) if other.axis in others else None
        free = [d for d in range(len(shape)) if d not in contract[i]]
        return free[0] if free else None
    if name == "conv_general_dilated" and i == 1 and eqn.params["feature_group_count"] == 1:
        features = cuts[0] is None or cuts[0].axis != eqn.params["dimension_numbers"].lhs_spec[0]
        return int(eqn.params["dimension_numbers"].rhs_spec[0]) if features else None
    if name == "gather" and i == 0:
        numbers = eqn.params["dimension_numbers"]
        id_dims = [d for d in numbers.start_index_map if d in numbers.collapsed_slice_dims]
        return int(id_dims[0]) if id_dims else None
    if facts_of(eqn).elementwise:
        axes = [x.axis for x in cuts if x is not None]
        if not axes or axes[0] >= len(shape):
            return None
        axis = axes[0]
        return axis if shape[axis] == eqn.outvars[0].aval.shape[axis] else None
    return None


def _keeps_dimensions(eqn: JaxprEqn) -> bool:
    """Return True if an output has the dimensions of operand 0, apart from some of size 1."""
    return facts_of(eqn).keeps_order(eqn) or eqn.primitive.name in (
        "transpose",
        "convert_element_type",
    )


def _map_dimensions(eqn: JaxprEqn, dims: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Return the parameter's dimension for each dimension of a value after a change of shape."""
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
