"""The optimize half where each leaf has an owner: one program for all ranks, in which each updates
what it owns.

Leaves are whole, so that nothing is cut; what differs from rank to rank is which equations there
are. They stand in the branches of a `switch` over the number of the rank. Its work is what a
parameter server would do that has these leaves (`dtrans.slicing.server_update`), level by level:

    level 0    switch        each rank: its parts of what crosses; what later levels need of this one
               all_reduce    parts made one: a value has one owner, all others add nothing
    level 1    switch        ...
    last       switch        new state and new parameters, in bins
               all_gather    parameters

Branches hold no collective, and all give arrays of the same types: what ranks keep from level to
level, and what they make, is in bins (`dtrans.zero.by_leaf.packing`). What no leaf enters (counts,
schedules) is made anew in each branch that needs it. The new values of such state are made once,
outside of the branches, so that they are the same on every rank whatever it owns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import Atom, ShapedArray, Var, evaluate, small_jaxpr
from dtrans.ir.array_fns import together
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import backward_slice
from dtrans.ir.inline import eliminate_dead, inline_calls
from dtrans.ir.program import DIST, LR_SCHED, OPTIMIZE
from dtrans.ops import OptimizeBlock, all_gather_p, all_reduce_p, identity_of, trainer_index_p
from dtrans.rows.analysis import RowAnalysis
from dtrans.slicing.blocks import Block, Placement
from dtrans.slicing.rounds import CrossServerValue
from dtrans.slicing.server_spec import analyse_update
from dtrans.slicing.server_update import write_server
from dtrans.step.cut import Gradient, Name, OptimizeHalf
from dtrans.zero.by_leaf.packing import Bins, free_name
from dtrans.zero.options import ShardingOptions


class OwnerWriter:
    """Writes the optimize half.

    Args:
      analysis: of the half of one device. All that it says of a leaf that has no owner is that it
        is read.
      owner: the rank of each leaf.
      o: the options.
      root: what the names of the bins of state begin with.
      ready: the leaves in the order in which their gradients are made, which is that of the bins of
        gradients.

    Attributes:
      grads: where gradients are, by the name of the leaf.
      state: where the state of leaves is.
      params: where new parameters are, before they are gathered: those that change.
    """

    def __init__(
        self,
        analysis: RowAnalysis,
        owner: Mapping[str, int],
        o: ShardingOptions,
        root: str,
        ready: Sequence[str],
    ) -> None:
        self.o = o
        self.ranks = ranks = o.degree
        self.spec = analyse_update(analysis, _placement(analysis, owner, ranks))
        self.analysis = a = self.spec.analysis
        self.crossings = self.spec.rounds.crossings
        types: dict[str, Any] = {n: v.aval for n, v in a.inputs.items() if isinstance(n, str)}
        # a gradient may be of another type than its leaf
        graded = {n: a.inputs[Gradient(n)].aval for n in ready if n in owner and n in a.half.graded}
        self.grads = Bins.of(graded, owner, ranks, free_name("grads", types))
        changed = {n: types[n] for n in owner if a.outputs[n] is not a.inputs[n]}
        self.params = Bins.of(changed, owner, ranks, "params")
        self.rank_of = {
            n: owner[home] for home, names in a.state_of.items() if home is not None for n in names
        }
        self.state = Bins.of({n: types[n] for n in self.rank_of}, self.rank_of, ranks, root)
        endpoints = self.spec.placement.endpoints
        self.work = [
            [b for b in write_server(self.spec, ep).blocks if b.role != DIST] for ep in endpoints
        ]
        grads = (g for work in self.work for b in work for g in b.grads)
        self.graded = {g.name: g.leaf for g in grads if g.leaf in self.grads.places}
        self.units = {u.name for units in self.spec.placement.units.values() for u in units}
        self.levels = sorted({b.level for work in self.work for b in work if self._is_unit(b)})
        self._outside()
        self.carried = {level: self._carried(level) for level in self.levels[:-1]}

    def _is_unit(self, block: OptimizeBlock) -> bool:
        """Return True if a block updates leaves; other blocks depend on no leaf."""
        return block.role != LR_SCHED and block.name in self.units

    def _named(self, name: str) -> str:
        """Return the name of a block's output here: blocks read the state from before the step."""
        return f"new {name}" if name in self.analysis.inputs else name

    def _outside(self) -> None:
        """Find what makes new values of state that lives with no leaf, and which crossings it
        takes."""
        eqns = self.spec.rounds.eqns
        outs = [self.analysis.outputs[n] for n in self.spec.shared_state]
        self.outside, read = backward_slice(eqns, outs, self.crossings)
        told = [c for v, c in self.crossings.items() if len(self.spec.over[v]) > 1 or v in read]
        self.told: dict[int, list[CrossServerValue]] = {}
        for c in told:
            self.told.setdefault(c.level, []).append(c)

    def _carried(self, level: int) -> Bins:
        """Return the bins of values that ranks compute at a level and read later."""
        types: dict[str, Any] = {}
        owner: dict[str, int] = {}
        for k, work in enumerate(self.work):
            later = {n for b in work if b.level > level for n in b.in_names}
            later |= {self._named(n) for n in (*self.state.of_rank(k), *self.params.of_rank(k))}
            for b in work:
                if b.level == level and self._is_unit(b):
                    made = dict(
                        zip(
                            map(self._named, b.out_names),
                            (a.aval for a in b.inner.outvars),
                            strict=True,
                        )
                    )
                    types |= {n: t for n, t in made.items() if n in later}
                    owner |= dict.fromkeys(made, k)
        return Bins.of(types, owner, self.ranks, f"level {level}")

    # -- the program -----------------------------------------------------------------------------

    def half(self) -> OptimizeHalf:
        """Write the update: bins of gradients (`grads/float32`), parameters and state to new
        ones."""
        a, b = self.analysis, Builder(self.analysis.half.jaxpr)
        binned = {*self.rank_of, *map(Gradient, self.grads.places)}
        alone = {n: b.input(v.aval) for n, v in a.inputs.items() if n not in binned}
        given: dict[str, Atom] = {str(n): x for n, x in alone.items()}
        bins: dict[str, Atom] = {
            n: b.input(t) for n, t in {**self.grads.types, **self.state.types}.items()
        }
        in_names: list[Name] = [
            *alone,
            *(Gradient(n) if n in self.grads.types else n for n in bins),
        ]
        b.role = OPTIMIZE
        (index,) = b.bind(trainer_index_p, over=(self.o.axis_name,))
        known: dict[Var, Atom] = {}
        for level in self.levels:
            names = [*given, *bins]
            made = written(b, self._switch(level, names), index, *given.values(), *bins.values())
            sums = self._sums(level)
            kept = self._kept(level)
            bins |= zip(kept, made[len(sums) :], strict=True)
            for (op, told), part in zip(sums.items(), made, strict=False):
                b.role = DIST
                (whole,) = b.bind(
                    all_reduce_p,
                    part,
                    op=op[0],
                    name="optimizer",
                    owners=(),
                    over=(self.o.axis_name,),
                )
                b.role = OPTIMIZE
                values = written(b, partial(_apart, tuple(c.var.aval.shape for c in told)), whole)
                known |= {c.var: x for c, x in zip(told, values, strict=True)}
                given |= {c.name: x for c, x in zip(told, values, strict=True)}
        found = gathered(
            b, self.params, {n: bins[f"new {n}"] for n in self.params.types}, self.o, "params"
        )
        found |= self._shared(b, given, known)
        found |= {n: bins[f"new {n}"] for n in self.state.types}
        return OptimizeHalf(
            eliminate_dead(b.build(list(found.values()))), tuple(in_names), tuple(found)
        )

    def _kept(self, level: int) -> list[str]:
        """Return the names of the bins that a level computes."""
        if level != self.levels[-1]:
            return list(self.carried[level].types)
        return [f"new {n}" for n in (*self.params.types, *self.state.types)]

    def _sums(self, level: int) -> dict[tuple[str, Any], list[CrossServerValue]]:
        """Return the values that ranks reduce after a level, by operation and type."""
        found: dict[tuple[str, Any], list[CrossServerValue]] = {}
        for c in self.told.get(level, ()):
            found.setdefault((c.op, c.var.aval.dtype), []).append(c)
        return found

    def _switch(self, level: int, names: Sequence[str]) -> Callable[..., Any]:
        """Return the function of the rank's number and of values that all ranks run at a level."""
        branches = [partial(self._branch, level, k, names) for k in range(self.ranks)]
        return lambda index, *values: jax.lax.switch(index, branches, *values)

    def _branch(self, level: int, rank: int, names: Sequence[str], *values: Any) -> list[Any]:
        """Compute one rank's part of a level."""
        given = dict(zip(names, values, strict=True))
        made: dict[str, Any] = {}
        before = [self.carried[n] for n in self.levels if n < level]

        def read(name: str) -> Any:
            if name in made:
                return made[name]
            for bins in (*before, self.state):
                if name in bins.places:
                    return bins.array_of(name, given)
            return (
                self.grads.array_of(self.graded[name], given)
                if name in self.graded
                else given[name]
            )

        for b in self.work[rank]:
            if b.level == level or (b.level < level and not self._is_unit(b)):
                made |= zip(
                    map(self._named, b.out_names),
                    evaluate(b.jaxpr, *map(read, b.in_names)),
                    strict=True,
                )
        outs = []
        for (op, dtype), told in self._sums(level).items():
            parts = [f"{c.home}/{c.name}" for c in told]
            nothing = [identity_of(op, c.var.aval.shape, dtype) for c in told]
            flat = [
                made[n] if n in made else none() for n, none in zip(parts, nothing, strict=True)
            ]
            rows = [_flat(x, dtype) for x in flat]
            outs.append(rows[0] if len(rows) == 1 else jax.lax.concatenate(rows, 0))
        if level != self.levels[-1]:
            return outs + list(self.carried[level].packed_of(rank, made).values())
        for bins in (self.params, self.state):
            outs += bins.packed_of(
                rank, {n: read(self._named(n)) for n in bins.of_rank(rank)}
            ).values()
        return outs

    def _shared(
        self, b: Builder, given: Mapping[str, Atom], known: Mapping[Var, Atom]
    ) -> dict[str, Atom]:
        """Write the new values of state that lives with no leaf."""
        a, eqns = self.analysis, self.spec.rounds.eqns
        env: dict[Var, Atom] = {
            v: given[n] for n, v in a.inputs.items() if isinstance(n, str) and n in given
        } | dict(known)
        read: Callable[[Atom], Atom] = lambda x: env.get(x, x) if isinstance(x, Var) else x
        b.role = OPTIMIZE
        for i in self.outside:
            made = b.copy(
                eqns[i], [read(x) for x in eqns[i].invars], [v.aval for v in eqns[i].outvars]
            )
            env |= {v: x for v, x in zip(eqns[i].outvars, made, strict=True) if v not in known}
        return {n: read(a.outputs[n]) for n in self.spec.shared_state}


def written(b: Builder, fn: Callable[..., Any], *atoms: Atom) -> list[Atom]:
    """The equations of a function of arrays; as `Builder.call`, which remembers the function for
    good."""
    return b.inline(inline_calls(small_jaxpr(fn, [x.aval for x in atoms])), *atoms)


def gathered(
    b: Builder, bins: Bins, own: Mapping[str, Atom], o: ShardingOptions, name: str
) -> dict[str, Atom]:
    """Write gathers of a rank's bins, in parts; the arrays of all ranks.

    Args:
      own: the bins of the rank.
      name: what the names of the gathers begin with.
    """
    b.role = DIST
    parts = bins.parts(o.reduce.bucket_MB * 2**20)
    found: list[Atom] = []
    for i, p in enumerate(parts):
        sent: Atom = own[p.bin]
        if (p.start, p.stop) != (0, bins.types[p.bin].size):
            sent = b.part(sent, 0, p.start, p.stop)
        if found and not o.slices.overlap:
            sent = b.call(together, sent, found[-1])[0]
        found += b.bind(
            all_gather_p, sent, name=f"{name}/{i}", over=(o.axis_name,), size=o.degree, axis=0
        )
    made = written(
        b, lambda *xs: list(bins.from_parts(dict(zip(parts, xs, strict=True))).values()), *found
    )
    return dict(zip(bins.places, made, strict=True))


def packed(b: Builder, bins: Bins, atoms: Mapping[str, Atom]) -> dict[str, Atom]:
    """Write the bins of all ranks."""
    names = list(bins.places)
    made = written(
        b,
        lambda *xs: list(bins.packed(dict(zip(names, xs, strict=True))).values()),
        *(atoms[n] for n in names),
    )
    return dict(zip(bins.types, made, strict=True))


def _flat(x: Any, dtype: Any) -> Any:
    return jnp.reshape(jax.lax.convert_element_type(x, dtype), -1)


def _apart(shapes: Sequence[tuple[int, ...]], x: Any) -> list[Any]:
    """Split a vector into the arrays that lie in it."""
    found, start = [], 0
    for shape in shapes:
        size = ShapedArray(shape, x.dtype).size
        found.append(jax.lax.slice(x, (start,), (start + size,)).reshape(shape))
        start += size
    return found


def _placement(analysis: RowAnalysis, owner: Mapping[str, int], ranks: int) -> Placement:
    """Return the placement of whole leaves on ranks, as on parameter servers."""
    endpoints = [f"rank {k}" for k in range(ranks)]
    blocks = {
        n: (Block.from_leaf(n, analysis.inputs[n].aval, endpoints[owner[n]]),)
        for n in analysis.params
    }
    return Placement(tuple(endpoints), blocks, analysis.groups)
