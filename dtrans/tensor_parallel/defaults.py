"""Which parameters a split scope cuts, where the user does not say.

One pass over the equations, with the cuts that follow from what is decided so far:

    dot_general    a kernel, along its output dimension: columns. Where the other operand is cut along what is summed
                   over, along that: rows, so that a second layer takes the first one's pieces as
                   they are. A stack of kernels, one for each expert (a batch dimension), along the
                   experts
    convolution    a kernel, along its output features
    gather         a table of embeddings, along the dimension that is looked up in
    elementwise    what meets a value that is cut, and has its dimension (a bias), along the same

The first equation that reads a parameter in one of these ways decides. It may read it through
transposes, conversions of type and added dimensions.

Source: EPL's `split` scopes (epl/ops/distributed_dense.py: columns of every dense layer); rows
after columns are Megatron's (Shoeybi et al., 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from dtrans._jax import REMAT, Atom, ClosedJaxpr, JaxprEqn, Literal, Var, bodies, facts_of, opened
from dtrans.engine.layout import ShardLayout, Shards, cut_along
from dtrans.engine.rules import Operand, choose
from dtrans.ir.inline import eliminate_dead, inline_calls
from dtrans.rows.layout import SHARED, RowAxis


# a parameter, and which of its dimensions each dimension of a value is
Origin = tuple[int, tuple[int | None, ...]]


def default_cuts(
    jaxpr: ClosedJaxpr,
    params: Collection[int],
    shards: int,
    scope: Callable[[JaxprEqn], bool] | None = None,
    cuts: Mapping[int, int] | None = None,
) -> dict[int, int]:
    """The cuts that `split` is given where the user says no more than `dtrans.split(shards)`.

    Args:
      jaxpr: a forward pass, or one with its gradients.
      params: positions of the inputs that may be cut.
      shards: over how many.
      scope: whether an equation lies in the split scope; all do by default. Only what is read there
        is cut.
      cuts: of other inputs, or of parameters for which the user has decided.

    Returns:
      `cuts`, and those of the parameters that are to be cut: position to dimension.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dtrans.tensor_parallel.defaults import default_cuts
      >>> model = lambda w1, b1, w2, x: jax.nn.relu(x @ w1 + b1) @ w2
      >>> shapes = [(4, 16), (16,), (16, 4), (8, 4)]
      >>> default_cuts(jax.make_jaxpr(model)(*map(jnp.ones, shapes)), params=[0, 1, 2], shards=2)
      {0: 1, 1: 0, 2: 0}
    """
    flat = eliminate_dead(inline_calls(jaxpr))
    found = _Pass(set(params), Shards(shards, ()), scope or (lambda eqn: True), dict(cuts or {}))
    inner = opened(flat)
    for i, v in enumerate(inner.invars):
        if i in found.cuts:
            found.layouts[v] = cut_along(found.cuts[i])
        elif i in found.params:
            found.origins[v] = (i, tuple(range(v.aval.ndim)))
    found.over(inner.eqns)
    return found.cuts


class _Pass:
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
        """Of which parameter a value has the numbers, if nothing is decided about that yet."""
        found = None if isinstance(a, Literal) else self.origins.get(a)
        return None if found is None or found[0] in self.cuts else found

    def over(self, eqns: Iterable[JaxprEqn]) -> None:
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
                self.origins[eqn.outvars[0]] = (origin[0], _followed(eqn, origin[1]))

    def _remat(self, eqn: JaxprEqn) -> None:
        flat = opened(inline_calls(*bodies(eqn)))
        for a, v in zip(eqn.invars, flat.invars, strict=True):
            self.layouts[v] = self.layout(a)
            if origin := self.origin(a):
                self.origins[v] = origin
        self.over(flat.eqns)
        self.layouts.update(
            (v, self.layout(a)) for v, a in zip(eqn.outvars, flat.outvars, strict=True)
        )

    def _decide(self, eqn: JaxprEqn) -> None:
        """Cut the parameters that an equation reads in a way that tells how."""
        for i, a in enumerate(eqn.invars):
            origin = self.origin(a)
            if origin is None:
                continue
            axis = _axis(
                eqn,
                i,
                [x if isinstance(x := self.layout(b), RowAxis) else None for b in eqn.invars],
            )
            dim = None if axis is None else origin[1][axis]
            if dim is None:
                continue
            self.cuts[origin[0]] = dim
            for v, (pos, dims) in self.origins.items():  # what was made of it already is cut too
                if pos == origin[0] and dim in dims:
                    self.layouts[v] = cut_along(dims.index(dim))


def _axis(eqn: JaxprEqn, i: int, cuts: list[RowAxis | None]) -> int | None:
    """Along which dimension to cut operand `i`, a parameter; None where the equation does not
    tell."""
    name, shape = eqn.primitive.name, eqn.invars[i].aval.shape
    if name == "dot_general":
        contract, batch = eqn.params["dimension_numbers"]
        other = cuts[1 - i]
        if batch[i]:
            return int(batch[i][0])
        if other is not None:
            theirs = contract[1 - i]
            return int(contract[i][theirs.index(other.axis)]) if other.axis in theirs else None
        free = [d for d in range(len(shape)) if d not in contract[i]]
        return free[0] if free else None
    if name == "conv_general_dilated" and i == 1 and eqn.params["feature_group_count"] == 1:
        features = cuts[0] is None or cuts[0].axis != eqn.params["dimension_numbers"].lhs_spec[0]
        return int(eqn.params["dimension_numbers"].rhs_spec[0]) if features else None
    if name == "gather" and i == 0:
        numbers = eqn.params["dimension_numbers"]
        looked_up = [d for d in numbers.start_index_map if d in numbers.collapsed_slice_dims]
        return int(looked_up[0]) if looked_up else None
    if facts_of(eqn).elementwise:
        met = [x.axis for x in cuts if x is not None]
        fits = met and len(shape) > met[0] and shape[met[0]] == eqn.outvars[0].aval.shape[met[0]]
        return met[0] if fits else None
    return None


def _keeps_dimensions(eqn: JaxprEqn) -> bool:
    """Return True if the dimensions of an output are those of operand 0, some of size 1 apart."""
    return facts_of(eqn).keeps_order(eqn) or eqn.primitive.name in (
        "transpose",
        "convert_element_type",
    )


def _followed(eqn: JaxprEqn, dims: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Which dimensions of a parameter those of a value are, after a change of shape."""
    out, name = eqn.outvars[0].aval, eqn.primitive.name
    if name == "transpose":
        return tuple(dims[d] for d in eqn.params["permutation"])
    if name == "broadcast_in_dim":
        old, new = eqn.invars[0].aval.shape, tuple(eqn.params["broadcast_dimensions"])
        same = {axis: dims[d] for d, axis in enumerate(new) if old[d] == out.shape[axis]}
        return tuple(same.get(axis) for axis in range(out.ndim))
    if out.shape != eqn.invars[0].aval.shape:
        old = eqn.invars[0].aval.shape
        kept = [d for d, n in zip(dims, old, strict=True) if n != 1]
        if [n for n in old if n != 1] != [n for n in out.shape if n != 1]:
            return (None,) * out.ndim
        rest = iter(kept)
        return tuple(None if n == 1 else next(rest) for n in out.shape)
    return dims
