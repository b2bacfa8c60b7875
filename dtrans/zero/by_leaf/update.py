"""Writer of the update in which each rank updates the parameters that it owns.

All ranks run one program, but each rank owns different parameters. So the equations for each rank
are a branch of a `switch` over the index of the rank. Each branch updates the parameters that the
rank owns, like a parameter server that stores them (`dtrans.slicing.server_update`). A value may
depend on parameters of several ranks, such as a norm. So the update has several `switch` equations,
called *levels*, and ranks sum such values between two levels:

    level 0    switch        each rank computes its terms of norms and similar values
               all_reduce    sums the terms; a rank without a term adds the identity
    level 1    switch        ...
    last       switch        new state and new parameters, in bins
               all_gather    parameters

Branches contain no collective, since other ranks would not reach it. All branches return the same
types. So a branch packs its outputs into vectors (`dtrans.zero.by_leaf.packing`). The last level
returns the new state and parameters. Each other level returns the values that later levels read.

Some state belongs to no parameter, such as a count of steps. Its new value is computed outside the
branches, so that every rank has it, even a rank that owns no parameter. A branch that reads the new
value computes it again.
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
from dtrans.ir.dataflow import avals, backward_slice
from dtrans.ir.inline import eliminate_dead, inline_calls
from dtrans.ir.program import DIST, LR_SCHED, OPTIMIZE
from dtrans.ir.selection import subset, values_at
from dtrans.ops import OptimizeBlock, all_gather_p, all_reduce_p, identity_of, trainer_index_p
from dtrans.rows.analysis import RowAnalysis
from dtrans.slicing.blocks import Block, Placement
from dtrans.slicing.rounds import CrossServerValue
from dtrans.slicing.server_spec import analyse_update
from dtrans.slicing.server_update import write_server
from dtrans.step.halves import Gradient, Name, UpdateProgram
from dtrans.zero.by_leaf.packing import Bins, unused_root
from dtrans.zero.options import ShardingOptions


class OwnerWriter:
    """Writer of the update in which each rank updates the parameters that it owns.

    Arrays are packed into bins: one vector per owner and dtype. `half` returns the update.

    Args:
      analysis: the analysis of one device's update, which found the values that are computed row by
        row.
      owner: the rank that owns each parameter. A parameter that is not updated may be absent.
      options: the options of `dtrans.sharding`.
      root: the prefix of the names of packed state, such as "opt_state/bins".
      ready: the parameters in the order in which the backward pass computes their gradients.
        Gradients are packed in this order.

    Attributes:
      grads: the layout of packed gradients, by parameter.
      state: the layout of packed state that belongs to parameters.
      params: the layout of packed new parameters. It omits unchanged parameters.
    """

    def __init__(
        self,
        analysis: RowAnalysis,
        owner: Mapping[str, int],
        options: ShardingOptions,
        root: str,
        ready: Sequence[str],
    ) -> None:
        self.options = options
        self.ranks = options.degree
        self.spec = analyse_update(analysis, _place_leaves(analysis, owner, self.ranks))
        self.analysis = self.spec.analysis
        self._lay_out_bins(owner, root, ready)

        # for each rank, the programs of a parameter server that would store the rank's leaves
        placement = self.spec.placement
        self.work: list[list[OptimizeBlock]] = []
        for endpoint in placement.endpoints:
            blocks = write_server(self.spec, endpoint).blocks
            self.work.append([x for x in blocks if x.role != DIST])
        self.units = {u.name for units in placement.units.values() for u in units}
        self.graded: dict[str, str] = {}  # name of a gradient -> leaf
        levels: set[int] = set()
        for work in self.work:
            for block in work:
                self.graded |= {g.name: g.leaf for g in block.grads if g.leaf in self.grads.places}
                if self._is_unit(block):
                    levels.add(block.level)
        self.levels = sorted(levels)

        self._find_shared_work()
        self.carried = {level: self._carried_bins(level) for level in self.levels[:-1]}

    def _lay_out_bins(self, owner: Mapping[str, int], root: str, ready: Sequence[str]) -> None:
        """Choose the positions of gradients, state and new parameters in packed vectors.

        The arguments are those of the class.
        """
        a = self.analysis
        types: dict[str, Any] = {n: v.aval for n, v in a.inputs.items() if isinstance(n, str)}
        # a gradient may have another type than its leaf
        grad_types = {}
        for n in ready:
            if n in owner and n in a.half.graded:
                grad_types[n] = a.inputs[Gradient(n)].aval
        self.grads = Bins.from_types(grad_types, owner, self.ranks, unused_root("grads", types))
        changed = {n: types[n] for n in owner if a.outputs[n] is not a.inputs[n]}
        self.params = Bins.from_types(changed, owner, self.ranks, "params")
        self.rank_of: dict[str, int] = {}
        for leaf, names in a.state_of.items():
            if leaf is not None:
                self.rank_of |= dict.fromkeys(names, owner[leaf])
        state_types = subset(types, self.rank_of)
        self.state = Bins.from_types(state_types, self.rank_of, self.ranks, root)

    def _is_unit(self, block: OptimizeBlock) -> bool:
        """Return True if a block (small program of the update) updates parameters.

        Other blocks compute values such as a learning rate.
        """
        return block.role != LR_SCHED and block.name in self.units

    def _output_name(self, name: str) -> str:
        """Return a name for an output: "new NAME" if an input is already called NAME."""
        return f"new {name}" if name in self.analysis.inputs else name

    def _find_shared_work(self) -> None:
        """Find the values that ranks all-reduce, and the equations of state without a parameter."""
        rounds, crossings = self.spec.rounds, self.spec.rounds.crossings
        outs = values_at(self.analysis.outputs, self.spec.shared_state)
        self.shared_eqns, read = backward_slice(rounds.eqns, outs, crossings)
        self.reduced: dict[int, list[CrossServerValue]] = {}
        for v, c in crossings.items():
            if len(self.spec.participants[v]) > 1 or v in read:
                self.reduced.setdefault(c.level, []).append(c)

    def _carried_bins(self, level: int) -> Bins:
        """Choose the positions of values that one `switch` packs and a later `switch` reads.

        Args:
          level: the number of all-reduces before the first `switch`.
        """
        types: dict[str, Any] = {}
        owner: dict[str, int] = {}
        for k, work in enumerate(self.work):
            state = (*self.state.of_rank(k), *self.params.of_rank(k))
            later = set(map(self._output_name, state))
            for block in work:
                if block.level > level:
                    later.update(block.in_names)
            for block in work:
                if block.level == level and self._is_unit(block):
                    names = list(map(self._output_name, block.out_names))
                    owner |= dict.fromkeys(names, k)
                    for name, out in zip(names, block.inner.outvars, strict=True):
                        if name in later:
                            types[name] = out.aval
        return Bins.from_types(types, owner, self.ranks, f"level {level}")

    # -- the program -----------------------------------------------------------------------------

    def half(self) -> UpdateProgram:
        """Return the update in which each rank updates the parameters that it owns.

        Inputs are packed gradients (`grads/float32`), packed state, and full parameters. Outputs
        are full new parameters, and packed new state.
        """
        a, b = self.analysis, Builder(self.analysis.half.jaxpr)
        binned = {*self.rank_of, *map(Gradient, self.grads.places)}
        plain = {n: b.input(v.aval) for n, v in a.inputs.items() if n not in binned}
        in_names: list[Name] = list(plain)
        in_names += [Gradient(n) for n in self.grads.types]
        in_names += self.state.types
        values: dict[str, Atom] = {str(n): x for n, x in plain.items()}
        bins: dict[str, Atom] = {}
        for n, t in (*self.grads.types.items(), *self.state.types.items()):
            bins[n] = b.input(t)

        b.role = OPTIMIZE
        (index,) = b.bind(trainer_index_p, over=(self.options.axis_name,))
        known: dict[Var, Atom] = {}
        for level in self.levels:
            switch = self._switch(level, [*values, *bins])
            outputs = write_function(b, switch, index, *values.values(), *bins.values())
            sums = self._sums(level)
            bins |= zip(self._bin_names(level), outputs[len(sums) :], strict=True)
            for ((op, _), reduced), part in zip(sums.items(), outputs, strict=False):
                arrays = self._all_reduce(b, op, reduced, part)
                for c, x in zip(reduced, arrays, strict=True):
                    known[c.var] = values[c.name] = x

        params = {n: bins[f"new {n}"] for n in self.params.types}
        found = gather_bins(b, self.params, params, self.options, "params")
        found |= self._write_shared_state(b, values, known)
        found |= {n: bins[f"new {n}"] for n in self.state.types}
        jaxpr = eliminate_dead(b.build(list(found.values())))
        return UpdateProgram(jaxpr, tuple(in_names), tuple(found))

    def _all_reduce(
        self, b: Builder, op: str, reduced: Sequence[CrossServerValue], part: Atom
    ) -> list[Atom]:
        """All-reduce one vector that contains the ranks' terms of several values.

        Args:
          b: the builder to write with.
          op: the operation, such as "sum".
          reduced: the values to compute.
          part: this rank's terms, concatenated.

        Returns:
          The reduced values.
        """
        over = (self.options.axis_name,)
        b.role = DIST
        (vector,) = b.bind(all_reduce_p, part, op=op, name="optimizer", owners=(), over=over)
        b.role = OPTIMIZE
        return write_function(b, partial(_split, tuple(c.var.aval.shape for c in reduced)), vector)

    def _bin_names(self, level: int) -> list[str]:
        """Return the names of the packed vectors that one `switch` of the update returns.

        Args:
          level: the number of all-reduces before this `switch`.
        """
        if level != self.levels[-1]:
            return list(self.carried[level].types)
        return [f"new {n}" for n in (*self.params.types, *self.state.types)]

    def _sums(self, level: int) -> dict[tuple[str, Any], list[CrossServerValue]]:
        """Return the values to all-reduce after one `switch` of the update, by (operation, dtype).

        The values of each entry are concatenated, and need one all-reduce.

        Args:
          level: the number of all-reduces before this `switch`.
        """
        found: dict[tuple[str, Any], list[CrossServerValue]] = {}
        for c in self.reduced.get(level, ()):
            found.setdefault((c.op, c.var.aval.dtype), []).append(c)
        return found

    def _write_shared_state(
        self, b: Builder, values: Mapping[str, Atom], known: Mapping[Var, Atom]
    ) -> dict[str, Atom]:
        """Write the new values of state that belongs to no parameter, such as a count of steps."""
        a, eqns = self.analysis, self.spec.rounds.eqns
        env: dict[Var, Atom] = {}
        for n, v in a.inputs.items():
            if isinstance(n, str) and n in values:
                env[v] = values[n]
        env |= known
        read: Callable[[Atom], Atom] = lambda x: env.get(x, x) if isinstance(x, Var) else x
        b.role = OPTIMIZE
        for i in self.shared_eqns:
            types = avals(eqns[i].outvars)
            outputs = b.copy(eqns[i], list(map(read, eqns[i].invars)), types)
            for v, x in zip(eqns[i].outvars, outputs, strict=True):
                if v not in known:
                    env[v] = x
        return {n: read(a.outputs[n]) for n in self.spec.shared_state}

    # -- branches --------------------------------------------------------------------------------

    def _switch(self, level: int, names: Sequence[str]) -> Callable[..., Any]:
        """Return a function that computes a rank's part of the update between two all-reduces.

        Its arguments are the index of the rank, and values.

        Args:
          level: the number of all-reduces before this part of the update.
          names: the names of the values.
        """
        branches = [partial(self._branch, level, k, names) for k in range(self.ranks)]
        return lambda index, *values: jax.lax.switch(index, branches, *values)

    def _branch(self, level: int, rank: int, names: Sequence[str], *values: Any) -> list[Any]:
        """Compute one rank's part of the update between two all-reduces.

        Args:
          level: the number of all-reduces before this part.
          rank: the rank.
          names: the names of `values`.
          *values: packed vectors, parameters and reduced values.

        Returns:
          The vectors that ranks all-reduce, then packed values for later levels. At the last level:
            packed new parameters and state.
        """
        inputs = dict(zip(names, values, strict=True))
        computed: dict[str, Any] = {}
        stored = [self.carried[n] for n in self.levels if n < level] + [self.state]

        def read(name: str) -> Any:
            if name in computed:
                return computed[name]
            for bins in stored:
                if name in bins.places:
                    return bins.array_of(name, inputs)
            if name in self.graded:
                return self.grads.array_of(self.graded[name], inputs)
            return inputs[name]

        for block in self.work[rank]:
            if block.level == level or (block.level < level and not self._is_unit(block)):
                outputs = evaluate(block.jaxpr, *map(read, block.in_names))
                computed |= zip(map(self._output_name, block.out_names), outputs, strict=True)

        outs = [self._rank_terms(key, x, computed) for key, x in self._sums(level).items()]
        if level != self.levels[-1]:
            return outs + list(self.carried[level].pack_rank(rank, computed).values())
        for bins in (self.params, self.state):
            arrays = {n: read(self._output_name(n)) for n in bins.of_rank(rank)}
            outs += bins.pack_rank(rank, arrays).values()
        return outs

    def _rank_terms(
        self,
        key: tuple[str, Any],
        reduced: Sequence[CrossServerValue],
        computed: Mapping[str, Any],
    ) -> Any:
        """Concatenate a rank's terms of several values to the vector that ranks all-reduce.

        A rank without a term contributes the identity of the operation, such as 0 for a sum.

        Args:
          key: the operation, and the dtype of the vector.
          reduced: the values.
          computed: the values that the rank has computed, by name.
        """
        op, dtype = key
        terms = []
        for c in reduced:
            name = f"{c.home}/{c.name}"
            if name in computed:
                terms.append(computed[name])
            else:  # this rank has no term
                terms.append(identity_of(op, c.var.aval.shape, dtype)())
        rows = [jnp.reshape(jax.lax.convert_element_type(x, dtype), -1) for x in terms]
        return rows[0] if len(rows) == 1 else jax.lax.concatenate(rows, 0)


def write_function(b: Builder, fn: Callable[..., Any], *atoms: Atom) -> list[Atom]:
    """Trace a function of arrays and write its equations.

    Unlike `Builder.call`, this does not cache the traced function for the life of the process.
    """
    return b.inline(inline_calls(small_jaxpr(fn, avals(atoms))), *atoms)


def gather_bins(
    b: Builder, bins: Bins, shards: Mapping[str, Atom], options: ShardingOptions, name: str
) -> dict[str, Atom]:
    """All-gather the packed arrays of all ranks, and unpack them.

    Args:
      b: the builder to write with.
      bins: the layout of the packed vectors.
      shards: this rank's packed vectors, by name.
      options: the options of `dtrans.sharding`.
      name: the prefix for the names of the gathers.

    Returns:
      All arrays by name.
    """
    b.role = DIST
    parts = bins.parts(options.reduce.bucket_MB * 2**20)
    found: list[Atom] = []
    for i, p in enumerate(parts):
        sent: Atom = shards[p.bin]
        if (p.start, p.stop) != (0, bins.types[p.bin].size):
            sent = b.part(sent, 0, p.start, p.stop)
        if found and not options.slices.overlap:
            sent = b.call(together, sent, found[-1])[0]
        found += b.bind(
            all_gather_p,
            sent,
            name=f"{name}/{i}",
            over=(options.axis_name,),
            size=options.degree,
            axis=0,
        )

    def unpack(*xs: Any) -> list[Any]:
        return list(bins.from_parts(dict(zip(parts, xs, strict=True))).values())

    return dict(zip(bins.places, write_function(b, unpack, *found), strict=True))


def pack_bins(b: Builder, bins: Bins, atoms: Mapping[str, Atom]) -> dict[str, Atom]:
    """Write equations that pack arrays by owner, into the vectors of all ranks.

    Returns:
      The vectors by name.
    """
    names = list(bins.places)

    def pack(*xs: Any) -> list[Any]:
        return list(bins.pack(dict(zip(names, xs, strict=True))).values())

    outputs = write_function(b, pack, *values_at(atoms, names))
    return dict(zip(bins.types, outputs, strict=True))


def _split(shapes: Sequence[tuple[int, ...]], x: Any) -> list[Any]:
    """Split a vector into arrays with these shapes."""
    found, start = [], 0
    for shape in shapes:
        size = ShapedArray(shape, x.dtype).size
        found.append(jax.lax.slice(x, (start,), (start + size,)).reshape(shape))
        start += size
    return found


def _place_leaves(analysis: RowAnalysis, owner: Mapping[str, int], ranks: int) -> Placement:
    """Describe each rank as a parameter server that stores the rank's parameters.

    The functions that write updates of servers (`dtrans.slicing`) can then write the update of each
    rank.
    """
    endpoints = [f"rank {k}" for k in range(ranks)]
    blocks = {}
    for n in analysis.params:
        blocks[n] = (Block.from_leaf(n, analysis.inputs[n].aval, endpoints[owner[n]]),)
    return Placement(tuple(endpoints), blocks, analysis.groups)
