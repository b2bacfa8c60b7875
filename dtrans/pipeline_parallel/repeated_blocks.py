"""Repeated blocks: where a model does the same thing several times in a row.

They are found in two ways, in a row of equations:

  - equal equations: a stretch that repeats with some period, where equations are equal when
    primitive, parameters (bodies included) and the types of operands and results are. A loop over
    layers that was unrolled is found so too; where slices of a stack of layers begin makes no
    difference. Which of the equations of a period is the first is not in the equations: it is the
    one where the least crosses from block to block, of those the last, since a model's first layer
    often differs in what it begins with, and its last one in what comes after.
  - name scopes: scopes beside each other, in one scope, that hold the same number of equations of
    each primitive (EPL: epl/parallel/planner.py, `find_repeated_blocks`, which looks at op types
    too, and demands four scopes of twenty ops). Their widths may differ. What lies between two of
    them belongs to the first.

Of several candidates the one that covers the most work is the best; then the one of more blocks;
then scopes, whose bounds a person has drawn.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dtrans._jax import JaxprEqn, Literal, Var, facts_of, is_jaxpr, opened, scope_of


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks that follow one another.

    Attributes:
      starts: where each begins; a block ends where the next begins.
      stop: where the last one ends.
      how: "equal equations" or "name scopes".
    """

    starts: tuple[int, ...]
    stop: int
    how: str

    def __len__(self) -> int:
        return len(self.starts)

    def costs(self, costs: Sequence[float]) -> tuple[float, ...]:
        """Return the cost of each block, from those of equations."""
        ends = [*self.starts[1:], self.stop]
        return tuple(sum(costs[a:b]) for a, b in zip(self.starts, ends, strict=True))


def repeated_blocks(
    eqns: Sequence[JaxprEqn], costs: Sequence[float], crossing: Sequence[float], at_least: int = 2
) -> list[Blocks]:
    """All rows of repeated blocks in a row of equations, the best first.

    Args:
      costs: of each equation; what costs nothing is no block.
      crossing: what a cut in front of each equation costs.
      at_least: how many blocks there must be.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dtrans.ir.cost import flops
      >>> from dtrans.pipeline_parallel.repeated_blocks import repeated_blocks
      >>> def model(w, x):
      ...     x = jnp.exp(x)
      ...     for _ in range(3):
      ...         x = jnp.tanh(x @ w)
      ...     return x.sum()
      >>> eqns = jax.make_jaxpr(model)(jnp.ones((4, 4)), jnp.ones((2, 4))).jaxpr.eqns
      >>> repeated_blocks(eqns, [flops(e) for e in eqns], [0] * len(eqns))[0]
      Blocks(starts=(1, 3, 5), stop=7, how='equal equations')
    """
    at_least = max(2, at_least)
    done = np.concatenate([[0.0], np.cumsum(np.asarray(costs, float))])
    found = {
        b: float(done[b.stop] - done[b.starts[0]])
        for b in _equal(eqns, np.asarray(crossing, float), at_least)
    }
    # of scopes, what lies between them does not count: the first and the last layer of a model may
    # be alike
    found |= {b: float(sum(costs[i] for i in members)) for b, members in _scoped(eqns, at_least)}
    order = lambda b: (-found[b], -len(b), b.how != "name scopes", b.starts)
    return sorted((b for b in found if found[b] > 0), key=order)


# -- equal equations -------------------------------------------------------------------------------


def _equal(eqns: Sequence[JaxprEqn], crossing: Any, at_least: int) -> Iterator[Blocks]:
    """Stretches that repeat, for every period."""
    known: dict[Any, int] = {}
    kinds = np.array([known.setdefault(signature(eqn), len(known)) for eqn in eqns], int)
    for period in range(1, len(eqns) // at_least + 1):
        same = np.concatenate([[0], kinds[:-period] == kinds[period:], [0]]).astype(int)
        edges = np.flatnonzero(np.diff(same))
        for first, past in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            length = past - first + period
            count, spare = divmod(length, period)
            if count < at_least:
                continue
            sent = [
                crossing[first + s + period : first + s + count * period : period].sum()
                for s in range(spare + 1)
            ]
            start = first + max(s for s in range(spare + 1) if sent[s] == min(sent))
            yield Blocks(
                tuple(range(start, start + count * period, period)),
                start + count * period,
                "equal equations",
            )


def signature(eqn: JaxprEqn) -> tuple[Any, ...]:
    """Return a key of an equation's primitive, parameters and types, without variables."""
    # the rules of derivatives are made anew for each call
    derived = eqn.primitive.name.startswith("custom_")
    kept = {k: v for k, v in eqn.params.items() if k not in _WHERE and (is_jaxpr(v) or not derived)}
    params = [(k, _plain(v)) for k, v in sorted(kept.items())]
    types = [tuple(str(a.aval) for a in atoms) for atoms in (eqn.invars, eqn.outvars)]
    return (eqn.primitive.name, tuple(params), *types)


# where a slice begins is which layer of a stack it is
_WHERE = ("start_indices", "limit_indices")


def _plain(value: Any) -> Any:
    """Something to compare a parameter by."""
    if is_jaxpr(value):
        return _body(value)
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    if callable(value):  # made anew for each call
        return getattr(value, "__qualname__", type(value).__name__)
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


def _body(jaxpr: Any) -> tuple[Any, ...]:
    """Return a key of a body: its equations, and their wiring."""
    inner = opened(jaxpr)
    number: dict[Var, int] = {}
    for v in (*inner.constvars, *inner.invars, *(v for e in inner.eqns for v in e.outvars)):
        number[v] = len(number)
    read = lambda a: str(a) if isinstance(a, Literal) else number[a]
    wired = [(signature(e), tuple(map(read, e.invars))) for e in inner.eqns]
    return (tuple(str(v.aval) for v in inner.invars), tuple(wired), tuple(map(read, inner.outvars)))


# -- name scopes -----------------------------------------------------------------------------------


def _scoped(eqns: Sequence[JaxprEqn], at_least: int) -> Iterator[tuple[Blocks, list[int]]]:
    """Scopes in one scope that hold the same, and the equations in them."""
    members: dict[tuple[str, ...], list[int]] = {}
    for i, eqn in enumerate(eqns):
        path = tuple(p for p in scope_of(eqn).split("/") if p)
        for depth in range(1, len(path) + 1):
            members.setdefault(path[:depth], []).append(i)
    alike: dict[Any, list[list[int]]] = {}
    for path, places in members.items():
        # what costs nothing may be there once for several of them (a cast, a mask)
        held = Counter(eqns[i].primitive.name for i in places if facts_of(eqns[i]).flops != "none")
        alike.setdefault((path[:-1], frozenset(held.items())), []).append(places)
    for group in alike.values():
        group.sort()
        apart = all(a[-1] < b[0] for a, b in itertools.pairwise(group))
        if len(group) >= at_least and apart:
            blocks = Blocks(tuple(places[0] for places in group), group[-1][-1] + 1, "name scopes")
            yield blocks, [i for places in group for i in places]
