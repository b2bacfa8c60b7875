"""Frozen tables: leaves that never change, such as pretrained embeddings, stored on servers.

A step returns a leaf unchanged if it does not train the leaf. Each trainer normally stores all rows
of such a leaf, since servers store only leaves with an update. For a large leaf, this module
therefore adds an update to the step: a gradient of zeros, and the new value `leaf - gradient`,
which has the same bits. Servers then store the rows, and trainers request only the rows that they
look up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp

from dtrans._jax import Atom, Var
from dtrans.ir.builder import Builder, read_from
from dtrans.ir.program import Program
from dtrans.ir.selection import values_at
from dtrans.parameter_server.tables.lookups import find_lookups
from dtrans.parameter_server.tables.options import Rows
from dtrans.step.halves import DividedStep, divide_step
from dtrans.step.marks import mark_p
from dtrans.step.trace import guess_roles


def with_frozen_tables(
    main: Program, sparse: Mapping[str, Rows] | str | None, most: int
) -> Program:
    """Return the step with an added update for each unchanged leaf that becomes a table.

    Servers store only leaves with an update. So without the added update, every trainer would store
    all rows of this leaf.

    Args:
      main: the traced step.
      sparse: as in `dtrans.pserver`.
      most: with `sparse="auto"`, a leaf becomes a table if a step looks up at most one in `most`
        rows.
    """
    if sparse is None or len(main.args) < 2:
        return main
    step = divide_step(main)
    outs, ins = step.program.outvars, step.program.invars
    unchanged = []
    for n in step.params:
        aval = ins[n].aval
        if outs[n] is ins[n] and aval.ndim and jnp.issubdtype(aval.dtype, jnp.floating):
            unchanged.append(n)
    names = unchanged if isinstance(sparse, str) else [n for n in unchanged if n in sparse]
    # `DividedStep.nested` lists the derivatives inside of another derivative. This list would be
    # lost when `_with_updates` marks gradients. So a step with a nested derivative stays unchanged.
    if not names or step.nested:
        return main
    if isinstance(sparse, str):
        lookups = find_lookups(divide_step(_with_updates(main, names)))
        found = lookups.tables
        names = [n for n in names if n in found and found[n].size * most <= found[n].rows]
    if not names:
        return main
    return main.rewritten(partial(_with_updates, names=names))


def _with_updates(main: Program, names: Sequence[str]) -> Program:
    """Add an update for each leaf in `names` and its unchanged optimizer state; return the step.

    An equation marks each added gradient. If a step marks one gradient, dtrans expects marks on all
    gradients. So this function also marks the gradients of all other leaves.
    """
    step = divide_step(main)
    source = step.program
    ins, outs = source.invars, dict(source.outvars)
    is_marked = any(eqn.primitive is mark_p for eqn in source.eqns)
    leaf_of = {} if is_marked else {v: n for n, v in step.boundary.items()}
    b = Builder(source.jaxpr)
    b.invars += source.inner.invars
    marks: dict[Var, Atom] = {}
    for eqn in source.eqns:
        b.keep(eqn, read_from(marks, eqn.invars))
        for v in eqn.outvars:
            if v in leaf_of:
                (marks[v],) = b.bind(mark_p, v, ins[leaf_of[v]], leaf=leaf_of[v])
    new = dict(zip(outs, read_from(marks, outs.values()), strict=True))
    for leaf in names:
        (zeros,) = b.call(jnp.zeros_like, ins[leaf])
        (gradient,) = b.bind(mark_p, zeros, ins[leaf], leaf=leaf)
        for n in (leaf, *_unchanged_state(step, leaf)):
            (new[n],) = b.call(_minus, ins[n], gradient)
    jaxpr = b.build(values_at(new, source.out_names))
    return dataclasses.replace(main, jaxpr=jaxpr, roles=guess_roles(jaxpr), labels={})


def _unchanged_state(step: DividedStep, leaf: str) -> list[str]:
    """Return the arrays of a leaf's optimizer state that the step returns unchanged."""
    ins, outs = step.program.invars, step.program.outvars
    paths = {n: "/" + n.partition("/")[2] for n in step.params}
    found = []
    for n in step.opt_state:
        # `mu/block/emb` ends with the paths of `block/emb` and of `emb`; the longer one is its leaf
        owners = [x for x, path in paths.items() if n.endswith(path)]
        is_of_leaf = leaf == max(owners, key=len, default=None)
        aval = ins[n].aval
        is_number = jnp.issubdtype(aval.dtype, jnp.number)
        if is_of_leaf and is_number and aval.shape == ins[leaf].aval.shape and outs[n] is ins[n]:
            found.append(n)
    return found


def _minus(x: jax.Array, gradient: jax.Array) -> jax.Array:
    return x - gradient.astype(x.dtype)
