"""Recomputation of residuals that depend on layers only, in the loop that reads them.

    forward: scan w -> h, stack of bf16(w)      becomes    forward: scan w -> h
    backward: scan (stack of bf16(w)) ...                  backward: scan w ..., which begins with bf16(w)

So nothing is kept from one direction to the other, and the layer is gathered in the type in which
it is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from dtrans._jax import (
    REMAT,
    SCAN,
    Atom,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    bodies,
    closed_with,
    opened,
    rebuilt,
    wiring,
    with_bodies,
)
from dtrans.zero.slice_writer import SliceWriter, is_cheap


def remade(writer: SliceWriter, wanted: Collection[Atom]) -> list[JaxprEqn]:
    """Return the equations, with loops that hand on no value computed from layers alone.

    Args:
      writer: the analysis of the equations: values that are slices, and bodies that take slices.
      wanted: values that are read behind these equations.
    """
    eqns = list(writer.eqns)
    for i, eqn in enumerate(eqns):
        if eqn.primitive.name in REMAT and i in writer.entered:
            (body,), (inside,) = map(opened, bodies(eqn)), writer.entered[i].bodies
            new = closed_with(body, eqns=remade(inside, body.outvars))
            eqns[i] = eqn.replace(params={**eqn.params, **with_bodies(eqn, [opened(new)])})
    readers: dict[Var, list[tuple[int, int]]] = {}
    for i, eqn in enumerate(eqns):
        for k, a in enumerate(eqn.invars):
            if isinstance(a, Var):
                readers.setdefault(a, []).append((i, k))
    for i, eqn in enumerate(eqns):
        if eqn.primitive.name != SCAN:
            continue
        body = opened(*bodies(eqn))
        left_out: set[int] = set()
        for out, start, chain in _made_of_layers(writer, eqn, body):
            v = eqn.outvars[out]
            by = readers.get(v, [])
            in_slices = (
                eqns[j].primitive.name == SCAN and k in wiring(eqns[j]).slices for j, k in by
            )
            if v in wanted or not by or not all(in_slices):
                continue
            left_out.add(out)
            for j in {j for j, _ in by}:
                eqns[j] = _with_chain(
                    eqns[j], v, eqn.invars[start], body.invars[start], chain, body.outvars[out]
                )
        if left_out:
            kept = [k for k in range(len(eqn.outvars)) if k not in left_out]
            new = closed_with(*bodies(eqn), outvars=[body.outvars[k] for k in kept])
            eqns[i] = rebuilt(eqns[i], [new], eqns[i].invars, [eqns[i].outvars[k] for k in kept])
    return eqns


def _made_of_layers(
    writer: SliceWriter, eqn: JaxprEqn, body: Jaxpr
) -> Iterator[tuple[int, int, Sequence[JaxprEqn]]]:
    """Find stacked outputs of a loop that depend on one layer: output, operand, equations."""
    wires = wiring(eqn)
    layers = {body.invars[k]: k for k in wires.slices if eqn.invars[k] in writer.roots}
    start: dict[Var, int] = dict(layers)
    chains: dict[Var, tuple[JaxprEqn, ...]] = dict.fromkeys(layers, ())
    for e in body.eqns:
        ins = [a for a in e.invars if not isinstance(a, Literal)]
        cheap = is_cheap(e) and len(e.outvars) == 1 and not e.effects
        if (
            cheap
            and len({start.get(a) for a in ins} - {None}) == 1
            and all(a in start for a in ins)
        ):
            start[e.outvars[0]] = start[ins[0]]
            chains[e.outvars[0]] = _joined([chains[a] for a in ins], e)
    for k in wires.stacks:
        if isinstance(a := body.outvars[k], Var) and a in start:
            yield k, start[a], chains[a]


def _joined(chains: Sequence[Sequence[JaxprEqn]], last: JaxprEqn) -> tuple[JaxprEqn, ...]:
    """Return the equations of several chains, each once, and one more."""
    found = {id(e): e for chain in chains for e in chain}
    return (*found.values(), last)


def _with_chain(
    eqn: JaxprEqn, residual: Var, stack: Atom, layer: Var, chain: Sequence[JaxprEqn], out: Atom
) -> JaxprEqn:
    """Return a loop that computes a residual of layers, instead of reading it."""
    body = opened(*bodies(eqn))
    invars: list[Atom] = []
    inner: list[Var] = []
    names: dict[Atom, Var] = {}
    made: list[Var] = []
    slices = wiring(eqn).slices
    for k, (a, v) in enumerate(zip(eqn.invars, body.invars, strict=True)):
        if a is residual and k in slices:
            made.append(v)
            continue
        invars.append(a)
        inner.append(v)
        if a is stack and k in slices:
            names[layer] = v
    if layer not in names:
        names[layer] = Var(layer.aval)
        invars.append(stack)
        inner.append(names[layer])
    prefix = []
    for e in chain:
        outs = [names.setdefault(v, Var(v.aval)) for v in e.outvars]
        prefix.append(
            e.replace(
                invars=[a if isinstance(a, Literal) else names[a] for a in e.invars], outvars=outs
            )
        )
    for v in made:
        names[v] = names[out]
    seen = lambda a: a if isinstance(a, Literal) or a not in made else names[a]
    rest = [e.replace(invars=[seen(a) for a in e.invars]) for e in body.eqns]
    outvars = [seen(a) for a in body.outvars]
    new = closed_with(*bodies(eqn), invars=inner, outvars=outvars, eqns=[*prefix, *rest])
    return rebuilt(eqn, [new], invars, eqn.outvars)
