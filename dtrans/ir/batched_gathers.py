"""Gathers and scatters by row indices, rewritten as gathers and scatters with batch dimensions.

`x[jnp.arange(len(y)), y]` reads one entry of each row of `x`. JAX traces it to a `gather` that
looks up (row, column) pairs in all of `x`. This pass proves that the row numbers are 0, 1, 2 and so
on, as in `arange`. Then it turns the rows of `x` and of the indices into batch dimensions of the
gather. So the row analysis (`dtrans.rows`) sees that row i of the output depends only on row i of
`x`. The derivative of the gather is a scatter; the pass gives the scatter batch dimensions as well.

    gather x[8,10] by [(0, y0), (1, y1), ...]       ->  gather each row of x by [(y0), (y1), ...]

`dtrans.ir.row_numbers` has the proofs. The new gather reads the same entries, so every program
computes the same numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from dtrans._jax import (
    Atom,
    ClosedJaxpr,
    JaxprEqn,
    Var,
    bodies,
    closed_with,
    equations,
    opened,
    with_bodies,
)
from dtrans.ir.builder import Builder, extract_part, read_from
from dtrans.ir.dataflow import outputs_of, variables, variables_read
from dtrans.ir.interpret import Facts
from dtrans.ir.row_numbers import Count, Fact, known_of, numbers_of
from dtrans.ir.selection import values_at


_PICKS = frozenset(
    {"gather", "scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"}
)
# fields of the dimension numbers: indexed dimensions of the operand, collapsed dimensions, window
# dimensions, and batch dimensions of the indices
_GATHER_FIELDS = (
    "start_index_map",
    "collapsed_slice_dims",
    "offset_dims",
    "start_indices_batching_dims",
)
_SCATTER_FIELDS = (
    "scatter_dims_to_operand_dims",
    "inserted_window_dims",
    "update_window_dims",
    "scatter_indices_batching_dims",
)


def batched_gathers(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Rewrite gathers and scatters, such as `x[arange(n), y]`, so that they have batch dimensions.

    An index array that equals `arange` along a dimension becomes a batch dimension. The function
    also rewrites the bodies of loops, branches and calls.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dtrans.ir.batched_gathers import batched_gathers
      >>> pick = lambda x, y: x[jnp.arange(4), y]
      >>> old = jax.make_jaxpr(pick)(jnp.ones((4, 5)), jnp.zeros(4, int))
      >>> new = batched_gathers(old)
      >>> (gather,) = (e for e in new.eqns if e.primitive.name == "gather")
      >>> gather.params["dimension_numbers"].operand_batching_dims
      (0,)
    """
    if not _has_picks(jaxpr):
        return jaxpr
    new: ClosedJaxpr = _rewritten(jaxpr, numbers_of(jaxpr))
    return new


def _has_picks(jaxpr: Any) -> bool:
    return any(e.primitive.name in _PICKS for e in equations(jaxpr))


def _rewritten(jaxpr: Any, numbers: Facts[Fact]) -> Any:
    """Return a jaxpr with batched gathers; return `jaxpr` itself if no gather changes.

    Args:
      jaxpr: an open or closed jaxpr. The result is open or closed, like `jaxpr`.
      numbers: integer arrays that are constant, or equal `arange` along a dimension.
    """
    inner = opened(jaxpr)
    if not _has_picks(inner):
        return jaxpr
    b, env, changed = Builder(closed_with(jaxpr)), dict[Var, Atom](), False
    b.invars += inner.invars
    for i, eqn in enumerate(inner.eqns):
        atoms = read_from(env, eqn.invars)
        b.source = eqn
        if (batched := _batched(eqn, env, numbers, inner.eqns[:i], b)) is not None:
            env[eqn.outvars[0]], changed = batched, True
            continue
        new = eqn
        if i in numbers.entered:
            new = _with_rewritten_bodies(eqn, numbers.entered[i].bodies)
        changed |= new is not eqn
        b.keep(new, atoms)
    if not changed:
        return jaxpr
    new_jaxpr = _without_unread(b.build(read_from(env, inner.outvars)), inner)
    if isinstance(jaxpr, ClosedJaxpr):
        return new_jaxpr
    return opened(new_jaxpr)


def _without_unread(jaxpr: ClosedJaxpr, old: Any) -> ClosedJaxpr:
    """Drop the equations that became dead because a gather was replaced.

    Equations that were dead before stay, so that an unchanged part of the program stays equal.
    """
    inner = opened(jaxpr)
    unread = set(outputs_of(old.eqns))
    unread.difference_update(variables_read(old.eqns, old.outvars))
    read = set(variables(inner.outvars))
    eqns: list[JaxprEqn] = []
    for eqn in reversed(inner.eqns):
        if eqn.effects or unread.intersection(eqn.outvars) or read.intersection(eqn.outvars):
            eqns.append(eqn)
            read.update(variables(eqn.invars))
    return extract_part(jaxpr, inner.invars, eqns[::-1], inner.outvars)


def _with_rewritten_bodies(eqn: JaxprEqn, inside: Mapping[int, Facts[Fact]]) -> JaxprEqn:
    """Return an equation with batched gathers in its bodies; return `eqn` if no gather changes."""
    old = bodies(eqn)
    new = [_rewritten(body, inside[k]) for k, body in enumerate(old)]
    if all(a is b for a, b in zip(old, new, strict=True)):
        return eqn
    return eqn.replace(params={**eqn.params, **with_bodies(eqn, new)})


def _components(indices: Atom, before: Sequence[JaxprEqn]) -> list[Atom]:
    """Return the arrays that a `concatenate` joins to the index array `indices`; [] if none does.

    `x[i, j]` is traced to a gather with one array of (i, j) pairs. The components are i and j.
    """
    eqn = next((e for e in before if len(e.outvars) == 1 and e.outvars[0] is indices), None)
    if eqn is None or eqn.primitive.name != "concatenate":
        return []
    if eqn.params["dimension"] != indices.aval.ndim - 1:
        return []
    if all(a.aval.shape[-1] == 1 for a in eqn.invars):
        return list(eqn.invars)
    return []


def _batched(
    eqn: JaxprEqn,
    env: Mapping[Var, Atom],
    numbers: Facts[Fact],
    before: Sequence[JaxprEqn],
    b: Builder,
) -> Atom | None:
    """Write a gather or scatter with batch dimensions, and return its output.

    Write nothing and return None if no part of the indices equals `arange` along a dimension.

    Args:
      eqn: the gather or scatter.
      env: maps variables of the old jaxpr to values of the new one.
      numbers: integer arrays that are constant, or equal `arange` along a dimension.
      before: equations before `eqn`.
      b: builder of the new jaxpr.
    """
    if eqn.primitive.name not in _PICKS:
        return None
    gathers = eqn.primitive.name == "gather"
    fields = _GATHER_FIELDS if gathers else _SCATTER_FIELDS
    n = eqn.params["dimension_numbers"]
    dims, gone, windows, theirs = (getattr(n, field) for field in fields)
    x, indices = eqn.invars[0].aval, eqn.invars[1].aval
    window = (eqn.outvars[0] if gathers else eqn.invars[2]).aval

    # place: operand dimension -> window dimension of the output (or of the updates of a scatter)
    window_dims = [d for d in range(x.ndim) if d not in gone and d not in n.operand_batching_dims]
    place = dict(zip(window_dims, windows, strict=True))

    # found: operand dimension -> dimension of the indices that counts it
    found: dict[int, int] = {}
    for component, d in enumerate(dims):
        if len(found) == len(dims) - 1:  # a gather must keep one component in its indices
            break
        if d in place and window.shape[place[d]] != 1:
            continue
        known = known_of(numbers.of(eqn.invars[1]), component)
        if not isinstance(known, Count) or known.axis in (*theirs, *found.values()):
            continue
        if known.size == x.shape[d] == indices.shape[known.axis]:
            found[d] = known.axis
    if not found:
        return None

    # the window, the index components and the collapsed dimensions lose the new batch dimensions
    remaining = [component for component, d in enumerate(dims) if d not in found]
    new_dims = tuple(values_at(dims, remaining))
    new_gone = tuple(d for d in gone if d not in found)
    dropped = [place[d] for d in found if d in place]
    new_windows = []
    for w in windows:
        if w not in dropped:
            new_windows.append(w - sum(k < w for k in dropped))
    pairs = sorted([*zip(n.operand_batching_dims, theirs, strict=True), *found.items()])
    batch, index_batch = zip(*pairs, strict=True)
    new = dict(
        zip(fields, (new_dims, new_gone, tuple(new_windows), tuple(index_batch)), strict=True)
    )
    params = {"dimension_numbers": n._replace(operand_batching_dims=tuple(batch), **new)}

    atoms = read_from(env, eqn.invars)
    components = read_from(env, _components(eqn.invars[1], before))
    rest: list[Atom] = []
    if components:
        rest = values_at(components, remaining)
    else:
        for c in remaining:
            rest += b.call(_component(c), atoms[1])
    if len(rest) > 1:
        rest = b.call(_joined, *rest)
    (at,) = rest
    if gathers:
        (gathered,) = b.copy(eqn, [atoms[0], at], indices_are_sorted=False, **params)
        if not dropped:
            return gathered
        return b.call(_expanded(tuple(dropped)), gathered)[0]
    updates = atoms[2]
    if dropped:
        (updates,) = b.call(_squeezed(tuple(dropped)), updates)
    return b.copy(
        eqn, [atoms[0], at, updates], [eqn.outvars[0].aval], indices_are_sorted=False, **params
    )[0]


@functools.cache
def _component(number: int) -> Callable[[Any], Any]:
    return lambda indices: jax.lax.slice_in_dim(indices, number, number + 1, axis=indices.ndim - 1)


def _joined(*components: Any) -> Any:
    return jax.lax.concatenate(components, components[0].ndim - 1)


@functools.cache
def _expanded(dims: tuple[int, ...]) -> Callable[[Any], Any]:
    return lambda x: jax.lax.expand_dims(x, dims)


@functools.cache
def _squeezed(dims: tuple[int, ...]) -> Callable[[Any], Any]:
    return lambda x: jax.lax.squeeze(x, dims)
