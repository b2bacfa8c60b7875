"""Static slices of tables, such as `emb[3:7]`, rewritten as lookups of consecutive rows.

The search for tables recognises lookups by row ids only. JAX writes a static slice as `slice`, and
its derivative as a `pad` with zeros. This module replaces them by `dynamic_slice`, and by a
`dynamic_update_slice` of zeros. These operations take the first row as an operand, like other
lookups. Their results are the same, bit for bit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from functools import partial

import jax
import jax.numpy as jnp

from dtrans._jax import Atom, JaxprEqn, Literal, Var
from dtrans.ir.builder import Builder, read_from
from dtrans.ir.program import Program
from dtrans.ir.selection import values_at
from dtrans.parameter_server.tables.lookups import find_lookups
from dtrans.parameter_server.tables.options import Rows
from dtrans.step.halves import divide_step


def with_row_runs(main: Program, sparse: Mapping[str, Rows] | str | None, most: int) -> Program:
    """Return the step with lookups in place of static slices of tables, such as `emb[3:7]`.

    Args:
      main: the traced step.
      sparse: as in `dtrans.pserver`.
      most: with `sparse="auto"`, a leaf becomes a table if a step looks up at most one in `most`
        rows.
    """
    if sparse is None or not main.args:
        return main
    leaves: dict[Atom, str] = {main.invars[n]: n for n in main.args[0].names}
    names = list(dict.fromkeys(leaves[e.invars[0]] for e in main.eqns if _is_run(e, leaves)))
    if not isinstance(sparse, str):
        names = [n for n in names if n in sparse]
    if names and isinstance(sparse, str):
        found = find_lookups(divide_step(_with_starts(main, names))).tables
        names = [n for n in names if n in found and found[n].size * most <= found[n].rows]
    if not names:
        return main
    return main.rewritten(partial(_with_starts, names=names))


def _with_starts(main: Program, names: Collection[str]) -> Program:
    """Return the step with lookups by row id in place of static slices, and of their derivatives.

    Args:
      main: the traced step.
      names: names of the leaves that are tables.
    """
    leaves: list[Atom] = [main.invars[n] for n in names]
    shapes = {v.aval.shape for v in leaves}
    b = Builder(main.jaxpr)
    b.invars += main.inner.invars
    new: dict[Var, Atom] = {}
    for eqn, role in zip(main.eqns, main.roles, strict=True):
        b.role, b.source = role, eqn
        atoms = read_from(new, eqn.invars)
        if _is_run(eqn, leaves):
            fn = _slice_at(eqn.params["start_indices"][0], eqn.outvars[0].aval.shape)
        elif _is_padded_run(eqn, shapes):
            fn = _zeros_with(eqn.params["padding_config"][0][0], eqn.outvars[0].aval.shape)
        else:
            b.keep(eqn, atoms)
            continue
        (new[eqn.outvars[0]],) = b.call(fn, atoms[0])
    jaxpr = b.build(read_from(new, values_at(main.outvars, main.out_names)))
    labels = {}
    for v, text in main.labels.items():
        (atom,) = read_from(new, [v])
        if isinstance(atom, Var):
            labels[atom] = text
    return dataclasses.replace(main, jaxpr=jaxpr, roles=tuple(b.roles), labels=labels)


def _is_run(eqn: JaxprEqn, leaves: Collection[Atom]) -> bool:
    """Return True if an equation is a static slice that reads some consecutive rows of a leaf."""
    if eqn.primitive.name != "slice" or eqn.invars[0] not in leaves:
        return False
    shape, read = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    strides = eqn.params["strides"]
    return 0 < read[0] < shape[0] and read[1:] == shape[1:] and (strides is None or strides[0] == 1)


def _is_padded_run(eqn: JaxprEqn, shapes: Collection[tuple[int, ...]]) -> bool:
    """Return True if an equation adds rows of zeros before and after its rows.

    Such an equation is the derivative of a static slice.

    Args:
      eqn: the equation.
      shapes: the shapes of tables. The result must have one of them.
    """
    if eqn.primitive.name != "pad" or eqn.outvars[0].aval.shape not in shapes:
        return False
    (low, high, between), *others = eqn.params["padding_config"]
    value, has_rows = eqn.invars[1], eqn.invars[0].aval.shape[0] > 0
    is_zero = isinstance(value, Literal) and not value.val
    is_along_rows = min(low, high) >= 0 and not between and low + high > 0
    return is_zero and has_rows and is_along_rows and all(not any(x) for x in others)


@functools.cache
def _slice_at(start: int, shape: tuple[int, ...]) -> Callable[[jax.Array], jax.Array]:
    def fn(x: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(x, (start, *(0,) * (x.ndim - 1)), shape)

    return fn


@functools.cache
def _zeros_with(start: int, shape: tuple[int, ...]) -> Callable[[jax.Array], jax.Array]:
    def fn(rows: jax.Array) -> jax.Array:
        zeros = jnp.zeros(shape, rows.dtype)
        return jax.lax.dynamic_update_slice(zeros, rows, (start, *(0,) * (rows.ndim - 1)))

    return fn
