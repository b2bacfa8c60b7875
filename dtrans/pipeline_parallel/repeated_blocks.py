"""Repeated blocks: the layers of a model, which are repetitions in the model's list of equations.

Two rules find repeated blocks:

  - equal equations: runs of equations that repeat with a fixed period. Two equations are equal if
    their primitives, their parameters (including inner jaxprs) and their types are equal. The
    bounds of slices are ignored, so that an unrolled loop over stacked layers counts as repeated.
    Any equation of a period could begin a block. The blocks begin where the fewest bytes cross from
    block to block. On ties, they begin as late as possible, because the first layer of a model
    often begins differently.
  - name scopes: sibling scopes (`jax.named_scope`) that contain the same number of equations of
    each primitive; shapes may differ. Equations between two scopes belong to the first scope.
    Source: EPL, `find_repeated_blocks` (epl/parallel/planner.py), which demands four scopes of
    twenty ops.

If there are several ways to find blocks, the best one covers the most work. On ties, the way with
more blocks is better. After that, scopes are better, because the user wrote them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dtrans._jax import JaxprEqn, Literal, Var, facts_of, is_jaxpr, opened, scope_of
from dtrans.ir.dataflow import avals
from dtrans.ir.selection import values_at


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Consecutive repeated blocks in a list of equations.

    Attributes:
      starts: the index of the first equation of each block. A block ends where the next one begins.
      stop: the index after the last equation of the last block.
      how: the name of the rule that found the blocks, "equal equations" or "name scopes".
    """

    starts: tuple[int, ...]
    stop: int
    how: str

    def __len__(self) -> int:
        return len(self.starts)

    def costs(self, costs: Sequence[float]) -> tuple[float, ...]:
        """Return the cost of each block from the costs of all equations."""
        bounds = itertools.pairwise([*self.starts, self.stop])
        return tuple(sum(costs[a:b]) for a, b in bounds)


def repeated_blocks(
    eqns: Sequence[JaxprEqn], costs: Sequence[float], crossing: Sequence[float], at_least: int = 2
) -> list[Blocks]:
    """Return all divisions of equations into repeated blocks, the best division first.

    Args:
      eqns: the equations, in order.
      costs: the cost of each equation. Blocks without a cost are left out.
      crossing: the cost of a stage boundary in front of each equation.
      at_least: the least number of blocks.

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
    work: dict[Blocks, float] = {}
    for blocks in _equal(eqns, np.asarray(crossing, float), at_least):
        work[blocks] = float(done[blocks.stop] - done[blocks.starts[0]])
    # Equations between two scopes do not count as work of the blocks. Otherwise, two equal layers
    # at both ends of a model would seem to cover the complete model.
    for blocks, members in _scoped(eqns, at_least):
        work[blocks] = float(sum(values_at(costs, members)))
    order = lambda b: (-work[b], -len(b), b.how != "name scopes", b.starts)
    return sorted((b for b in work if work[b] > 0), key=order)


# -- equal equations -------------------------------------------------------------------------------


def _equal(eqns: Sequence[JaxprEqn], crossing: Any, at_least: int) -> Iterator[Blocks]:
    """Yield runs of equations that repeat with a fixed period, for each possible period."""
    known: dict[Any, int] = {}
    kinds = np.array([known.setdefault(signature(eqn), len(known)) for eqn in eqns], int)
    for period in range(1, len(eqns) // at_least + 1):
        # Find runs in which each equation equals the equation one period later.
        same = np.concatenate([[0], kinds[:-period] == kinds[period:], [0]]).astype(int)
        edges = np.flatnonzero(np.diff(same))
        for first, past in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            count, spare = divmod(past - first + period, period)
            if count < at_least:
                continue
            # Choose the start with the least crossing between blocks; on ties, the last start.
            least, start = np.inf, first
            for begin in range(first, first + spare + 1):
                sent = crossing[begin + period : begin + count * period : period].sum()
                if sent <= least:
                    least, start = sent, begin
            stop = start + count * period
            yield Blocks(tuple(range(start, stop, period)), stop, "equal equations")


def signature(eqn: JaxprEqn) -> tuple[Any, ...]:
    """Return a key of an equation's primitive, parameters and types, without its variables."""
    # JAX creates new function objects for the rules of custom derivatives at each call.
    has_rules = eqn.primitive.name.startswith("custom_")
    params = []
    for key, value in sorted(eqn.params.items()):
        if key not in _BOUNDS and (is_jaxpr(value) or not has_rules):
            params.append((key, _plain(value)))
    ins = tuple(map(str, avals(eqn.invars)))
    outs = tuple(map(str, avals(eqn.outvars)))
    return (eqn.primitive.name, tuple(params), ins, outs)


# Parameters of `slice` equations that a signature ignores: they select one layer from stacked
# weights.
_BOUNDS = ("start_indices", "limit_indices")


def _plain(value: Any) -> Any:
    """Return a hashable value that is equal for equal parameters of equations."""
    if is_jaxpr(value):
        return _body(value)
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    if callable(value):  # JAX creates new function objects at each call.
        return getattr(value, "__qualname__", type(value).__name__)
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


def _body(jaxpr: Any) -> tuple[Any, ...]:
    """Return a key of an inner jaxpr: equal for two jaxprs that differ only in variable names."""
    inner = opened(jaxpr)
    number: dict[Var, int] = {}
    read = lambda a: str(a) if isinstance(a, Literal) else number[a]
    for v in (*inner.constvars, *inner.invars):
        number[v] = len(number)
    wired = []
    for eqn in inner.eqns:
        wired.append((signature(eqn), tuple(map(read, eqn.invars))))
        for v in eqn.outvars:
            number[v] = len(number)
    ins = tuple(map(str, avals(inner.invars)))
    return (ins, tuple(wired), tuple(map(read, inner.outvars)))


# -- name scopes -----------------------------------------------------------------------------------


def _scoped(eqns: Sequence[JaxprEqn], at_least: int) -> Iterator[tuple[Blocks, list[int]]]:
    """Yield blocks that are sibling name scopes with the same numbers of equations.

    Each scope, such as `layer0`, comes with the indices of its equations.
    """
    members: dict[tuple[str, ...], list[int]] = {}
    for i, eqn in enumerate(eqns):
        path = tuple(p for p in scope_of(eqn).split("/") if p)
        for depth in range(1, len(path) + 1):
            members.setdefault(path[:depth], []).append(i)
    alike: dict[Any, list[list[int]]] = {}
    for path, places in members.items():
        # Only equations with a cost are compared, because scopes may share a cast or a mask.
        paid = Counter(eqns[i].primitive.name for i in places if facts_of(eqns[i]).flops != "none")
        alike.setdefault((path[:-1], frozenset(paid.items())), []).append(places)
    for group in alike.values():
        group.sort()
        apart = all(a[-1] < b[0] for a, b in itertools.pairwise(group))
        if len(group) >= at_least and apart:
            blocks = Blocks(tuple(places[0] for places in group), group[-1][-1] + 1, "name scopes")
            yield blocks, [i for places in group for i in places]
