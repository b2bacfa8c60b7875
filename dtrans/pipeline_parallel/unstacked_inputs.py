"""Rewrite of functions of stacked parameters, if each stage stores some rows (layers) of the stack.

`job.apply` runs such functions, for example to evaluate the model. The rows of each stage become an
input of the function. A scan over the stack becomes one scan for each stage, so that the rows stay
on their stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dtrans._jax import (
    SCAN,
    Atom,
    ClosedJaxpr,
    JaxprEqn,
    Var,
    body_indices,
    is_reversed,
    opened,
    scan_length,
)
from dtrans.ir.builder import Builder, read_from
from dtrans.ir.dataflow import variables
from dtrans.ir.selection import values_at
from dtrans.pipeline_parallel.stage_scan import (
    StageRows,
    concatenate_along,
    sliced_rows,
    write_parts,
)


Stacks = Mapping[Var, Sequence[StageRows]]


def unstack_inputs(
    jaxpr: ClosedJaxpr, names: Sequence[str], rows: Mapping[str, Sequence[StageRows]]
) -> tuple[ClosedJaxpr, list[str]]:
    """Replace each stacked input of a function by one input for the rows of each stage.

    An equation that reads a stack in another way than a scan gets the concatenated rows.

    Args:
      jaxpr: the function.
      names: names of its first inputs.
      rows: the rows of each stack, by name.

    Returns:
      The new function, and the names of its first inputs.
    """
    stacks: dict[Var, Sequence[StageRows]] = {}
    for v, n in zip(opened(jaxpr).invars, names, strict=False):
        if n in rows:
            stacks[v] = rows[n]
    if not stacks:
        return jaxpr, list(names)
    split = _split_scans(jaxpr, stacks)
    inner, b = opened(split), Builder(split)
    pieces: dict[tuple[Atom, tuple[int, int]], Var] = {}
    parts: dict[Var, list[Var]] = {}
    new_names: list[str] = []
    for v, n in zip(inner.invars, names, strict=False):
        if v not in stacks:
            b.invars.append(v)
            new_names.append(n)
            continue
        parts[v] = b.inputs(r.part.type_in(v.aval) for r in stacks[v])
        new_names += [r.name for r in stacks[v]]
        for r, piece in zip(stacks[v], parts[v], strict=True):
            if r.part.axis == 0:
                pieces[v, (r.part.first, r.part.stop)] = piece
    b.invars += inner.invars[len(names) :]

    known: dict[Var, Atom] = {}

    def read(atoms: Sequence[Atom]) -> list[Atom]:
        for v in variables(atoms):
            if v in parts and v not in known:
                (known[v],) = b.call(concatenate_along(stacks[v][0].part.axis), *parts[v])
        return read_from(known, atoms)

    for eqn in inner.eqns:
        run = sliced_rows(eqn)
        piece_or_none = None if run is None else pieces.get((eqn.invars[0], run))
        if piece_or_none is None:
            b.keep(eqn, read(eqn.invars))
        else:
            known[eqn.outvars[0]] = piece_or_none
    return b.build(read(inner.outvars)), new_names


def _split_scans(jaxpr: ClosedJaxpr, stacks: Stacks) -> ClosedJaxpr:
    """Split each scan over stacks into one scan for the rows of each stage."""
    b = Builder(jaxpr)
    b.invars += opened(jaxpr).invars
    for eqn in opened(jaxpr).eqns:
        bounds = _bounds(eqn, stacks)
        if bounds is None:
            b.keep(eqn)
        else:
            for _ in write_parts(b, eqn, bounds):
                pass
    return b.build(opened(jaxpr).outvars)


def _bounds(eqn: JaxprEqn, stacks: Stacks) -> list[int] | None:
    """Return the first iteration of each stage in a scan over layers, and the scan's length.

    Return None if the equation cannot be split by stages. It may be no scan over stacked
    parameters, or its stacks may have different rows. Or stages divide another dimension than the
    rows.
    """
    if eqn.primitive.name != SCAN or is_reversed(eqn):
        return None
    found = set()
    for v in variables(values_at(eqn.invars, body_indices(eqn).slices)):
        if v not in stacks:
            continue
        if any(r.part.axis != 0 for r in stacks[v]):
            return None  # an array of the optimizer, whose rows lie along another dimension
        found.add(tuple(r.part.first for r in stacks[v]))
    if len(found) != 1:
        return None
    return [*found.pop(), scan_length(eqn)]
