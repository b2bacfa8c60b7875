"""Rewrite of loops over layers that recomputes residuals instead of storing them.

A residual is a value that the forward pass stores for the backward pass. Some residuals depend only
on parameters, such as a cast of each layer to bf16:

    forward: scan w -> h, stack of bf16(w)      becomes    forward: scan w -> h
    backward: scan (stack of bf16(w)) ...                  backward: scan w ..., begins with bf16(w)

The backward loop computes the residual again, from the parameters. So the forward loop stores no
copies of layers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dtrans._jax import (
    REMAT,
    SCAN,
    Atom,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    bodies,
    body_indices,
    closed_with,
    opened,
    rebuilt,
    with_bodies,
)
from dtrans.ir.builder import read_from
from dtrans.ir.selection import values_at
from dtrans.zero.slice_analysis import SliceAnalysis, is_cheap


class _LayerResidual(NamedTuple):
    """Output of a loop over layers that depends only on parameters, one entry for each layer.

    Attributes:
      out: the index of the output.
      stack: the index of the operand that stacks the layers.
      chain: the equations that compute the output from a layer.
    """

    out: int
    stack: int
    chain: Sequence[JaxprEqn]


def rematerialize_layers(analysis: SliceAnalysis, wanted: Collection[Atom]) -> list[JaxprEqn]:
    """Rewrite loops over layers so that they do not store residuals that depend only on parameters.

    The backward loops compute these residuals again. Otherwise a rank would store a copy of all
    layers.

    Args:
      analysis: the analysis of the equations.
      wanted: values that are read after these equations, and so must remain outputs.

    Returns:
      All equations of the analysis, with rewritten loops.
    """
    eqns = list(analysis.eqns)
    for i, eqn in enumerate(eqns):
        if eqn.primitive.name in REMAT and i in analysis.entered:
            (body,), (inside,) = map(opened, bodies(eqn)), analysis.entered[i].bodies
            new = closed_with(body, eqns=rematerialize_layers(inside, body.outvars))
            eqns[i] = eqn.replace(params={**eqn.params, **with_bodies(eqn, [opened(new)])})

    readers = _readers_of(eqns)
    for i, eqn in enumerate(eqns):
        if eqn.primitive.name != SCAN:
            continue
        body = opened(*bodies(eqn))
        removed: set[int] = set()
        for residual in _find_residuals(analysis, eqn, body):
            v = eqn.outvars[residual.out]
            # rewrite only residuals whose only readers are loops that read them layer by layer
            if v in wanted or not _is_read_by_slices(eqns, readers.get(v, ())):
                continue
            removed.add(residual.out)
            for j in {j for j, _ in readers[v]}:
                eqns[j] = _recompute(eqns[j], eqn, body, residual)
        if removed:
            stored = [k for k in range(len(eqn.outvars)) if k not in removed]
            new = closed_with(*bodies(eqn), outvars=values_at(body.outvars, stored))
            outvars = values_at(eqns[i].outvars, stored)
            eqns[i] = rebuilt(eqns[i], [new], eqns[i].invars, outvars)
    return eqns


def _readers_of(eqns: Sequence[JaxprEqn]) -> Mapping[Var, list[tuple[int, int]]]:
    """Return, for each value, the equations that read it: pairs (index of equation, of operand)."""
    readers: dict[Var, list[tuple[int, int]]] = {}
    for i, eqn in enumerate(eqns):
        for k, a in enumerate(eqn.invars):
            if isinstance(a, Var):
                readers.setdefault(a, []).append((i, k))
    return readers


def _is_read_by_slices(eqns: Sequence[JaxprEqn], readers: Sequence[tuple[int, int]]) -> bool:
    """Return True if all readers of a value are loops that read one entry in each iteration."""
    for i, k in readers:
        if eqns[i].primitive.name != SCAN or k not in body_indices(eqns[i]).slices:
            return False
    return bool(readers)


def _find_residuals(
    analysis: SliceAnalysis, eqn: JaxprEqn, body: Jaxpr
) -> Iterator[_LayerResidual]:
    """Yield the loop's stacked outputs that can be recomputed cheaply from one stack of layers."""
    indices = body_indices(eqn)
    stack_of: dict[Atom, int] = {}
    for k in indices.slices:
        if eqn.invars[k] in analysis.roots:
            stack_of[body.invars[k]] = k
    chains: dict[Atom, tuple[JaxprEqn, ...]] = dict.fromkeys(stack_of, ())
    for e in body.eqns:
        ins = [a for a in e.invars if not isinstance(a, Literal)]
        stacks = {stack_of.get(a) for a in ins}
        if len(stacks) != 1 or None in stacks or len(e.outvars) != 1:
            continue
        if is_cheap(e) and not e.effects:
            stack_of[e.outvars[0]] = stack_of[ins[0]]
            chains[e.outvars[0]] = _join(values_at(chains, ins), e)
    for k in indices.stacks:
        out = body.outvars[k]
        if isinstance(out, Var) and out in stack_of:
            yield _LayerResidual(k, stack_of[out], chains[out])


def _join(chains: Sequence[Sequence[JaxprEqn]], last: JaxprEqn) -> tuple[JaxprEqn, ...]:
    """Concatenate lists of equations without duplicates, and append `last`."""
    found = {id(e): e for chain in chains for e in chain}
    return (*found.values(), last)


def _recompute(eqn: JaxprEqn, source: JaxprEqn, inner: Jaxpr, residual: _LayerResidual) -> JaxprEqn:
    """Rewrite a loop so that it computes a residual from layers, instead of reading it.

    Args:
      eqn: the loop that reads the residual.
      source: the loop that outputs the residual.
      inner: the body of `source`.
      residual: the residual.
    """
    stored, stack = source.outvars[residual.out], source.invars[residual.stack]
    layer, out = inner.invars[residual.stack], inner.outvars[residual.out]
    body, slices = opened(*bodies(eqn)), body_indices(eqn).slices

    # operands: replace the stored residual by the stack of layers
    invars: list[Atom] = []
    ins: list[Var] = []
    values: dict[Any, Var] = {}  # value of `inner` -> variable of the new body
    read: list[Var] = []
    for k, (a, v) in enumerate(zip(eqn.invars, body.invars, strict=True)):
        if a is stored and k in slices:
            read.append(v)
            continue
        invars.append(a)
        ins.append(v)
        if a is stack and k in slices:
            values[layer] = v
    if layer not in values:
        values[layer] = Var(layer.aval)
        invars.append(stack)
        ins.append(values[layer])

    # body: compute the residual first, then run the equations that read it
    chain = []
    for e in residual.chain:
        outs = [values.setdefault(v, Var(v.aval)) for v in e.outvars]
        chain.append(e.replace(invars=read_from(values, e.invars), outvars=outs))
    new_values: dict[Var, Atom] = dict.fromkeys(read, values[out])
    rest = [e.replace(invars=read_from(new_values, e.invars)) for e in body.eqns]
    outvars = read_from(new_values, body.outvars)
    new = closed_with(*bodies(eqn), invars=ins, outvars=outvars, eqns=[*chain, *rest])
    return rebuilt(eqn, [new], invars, eqn.outvars)
