"""Step of one trainer on its part of the batch, derived from the step on the full batch.

The engine (`dtrans.engine`) rewrites the forward and backward pass of the full step for one
trainer. Parameters are replicated, and the batch is divided. Where a value depends on the full
batch, the program communicates: for the two sums of a masked mean, say, or the statistics of a
batch normalisation. Numbers that depend on the batch size, and random numbers of rows, equal the
numbers of one device.

Gradients are partial sums: the sum over trainers is one device's gradient. An identity equation
marks each gradient (`dtrans.step.marks`), and the user's update follows unchanged. A strategy
divides this program at the marked gradients, and reduces them there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax

from dtrans._jax import (
    LOOPS,
    Atom,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    closed,
    constants,
    equations,
    line_of,
    opened,
)
from dtrans.engine.layout import (
    PARTIAL,
    Gathered,
    Partial,
    ShardLayout,
    Shards,
    UnevenShards,
    sharded_along,
)
from dtrans.engine.open_sums import linear_terms
from dtrans.engine.row_demands import row_demands
from dtrans.engine.writer import SplitWriter, written
from dtrans.errors import BatchError
from dtrans.ir.cost import total_bytes
from dtrans.ir.dataflow import (
    avals,
    backward_slice,
    bits_of,
    outputs_of,
    propagate,
    variables,
    variables_read,
)
from dtrans.ir.inline import eliminate_dead
from dtrans.ir.program import FORWARD, Program
from dtrans.ir.pytree import TreeSpec
from dtrans.ir.selection import values_at
from dtrans.ops import collective_of, moved_values
from dtrans.rows.layout import SHARED, RowAxis
from dtrans.step.halves import DividedStep
from dtrans.step.marks import mark_p
from dtrans.step.scopes import has_local_scope


INDEX = "@number"  # name of the argument that is the trainer's index


@dataclasses.dataclass(frozen=True)
class Exchanged:
    """One collective in a trainer's forward or backward pass; plans and errors list them.

    Reductions of gradients and results do not count.

    Attributes:
      op: `all_reduce`, `all_gather`, `all_to_all` or `reduce_scatter`.
      line: source line that needs the collective, `model.py:12`; empty if unknown.
      nbytes: bytes that each trainer sends; for an all-gather, the bytes of its output.
    """

    op: str
    line: str
    nbytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class TrainerStep:
    """Step of one trainer, which the engine derived from the step on the full batch.

    Trainers with equal numbers of rows run the same program.

    Attributes:
      program: (params, opt_state, *part of the batch) -> results. Gradients, which identity
        equations mark, are partial sums.
      merges: the merge of each result, and of each parameter that trainers update without an
        optimizer (such as batch statistics): "sum", "same", or the dimension along which the parts
        are concatenated.
      exchanged: the collectives of the program, except reductions of gradients and results.
      gathers: records of the sharded values that are gathered, with reasons.
      scaled: records the values that are another value divided by a power of the number of
        trainers. `scaled[v]` is (w, k) if v = w / trainers**k.
      local: True if some equations are inside `dtrans.local`.
      takes_index: True if the last argument of the program is the trainer's index.
      sliced: maps a replicated input to its row dimension, if each trainer reads only its own rows.
    """

    program: Program
    merges: Mapping[str, str | int]
    exchanged: tuple[Exchanged, ...]
    gathers: tuple[Gathered, ...]
    scaled: Mapping[Var, tuple[Atom, int]]
    local: bool
    takes_index: bool = False
    sliced: Mapping[str, int] = dataclasses.field(default_factory=dict)


def trainer_step(
    step: DividedStep,
    axes: Mapping[str, int],
    trainers: int,
    over: Sequence[str],
    *,
    pieces: Mapping[str, int] = MappingProxyType({}),
    open_state: bool = False,
    noun: str = "trainer",
    takes_index: bool = False,
    shares: Sequence[int] = (),
    index: int = 0,
) -> TrainerStep:
    """Derive the step of one trainer from the step on the full batch.

    The derived step computes one device's numbers, and communicates where a value depends on the
    full batch.

    Args:
      step: the step, traced on the full batch (after `DividedStep.with_reported`).
      axes: divided dimension of each divided batch array; other arrays are replicated.
      trainers: number of trainers. Each part has `ceil(size / trainers)` entries; padding does not
        change any result.
      over: mesh axes of the trainers.
      pieces: sliced dimension of each array of state that trainers store in pieces.
      open_state: True if, for parameters updated without an optimizer (such as batch statistics),
        each trainer may return its term of a sum instead of the sum.
      noun: word for a trainer in errors, such as "rank".
      takes_index: True to pass the trainer's index as the last argument, if the program reads it.
      shares: number of rows of each trainer, if they differ; the step is then for one trainer.
      index: index of this trainer.

    Raises:
      ConfigError: the step reshapes rows, such as to pairs of rows, and the shares do not divide
        the pairs without a remainder.
      BatchError: an equation is inside `dtrans.local`, but trainers have different numbers of rows.
    """
    source = step.program
    eqns = source.eqns
    ins, outs = source.invars, source.outvars
    behind = propagate(eqns, dict.fromkeys(step.boundary.values(), 1), {})
    is_behind = lambda e: bits_of(behind, *e.invars) != 0
    late = [a for i in step.late for a in eqns[i].invars]
    positions, _ = backward_slice(eqns, [*outs.values(), *late], step.boundary.values())
    after = []
    for i in sorted({*positions, *step.late}):
        if i in step.late or is_behind(eqns[i]):
            after.append(eqns[i])
    update_values = set(outputs_of(after)) | set(step.boundary.values())

    graded = [n for n in step.params if n in step.gradients]
    terms = values_at(step.gradients, graded)
    before = [n for n, a in outs.items() if not (isinstance(a, Var) and a in update_values)]
    crossing = [v for v in variables_read(after) if v not in update_values]
    watched = values_at(eqns, step.early)
    wanted: list[Atom] = [*terms, *values_at(outs, before), *crossing]
    read = list(wanted)
    for eqn in watched:
        read += eqn.invars
    needed, _ = backward_slice(eqns, read)
    half = values_at(eqns, sorted({*needed, *step.early}))

    local = _is_local(half, source, axes, trainers, noun, shares)
    inner = closed(
        source.inner.constvars, source.jaxpr.consts, source.inner.invars, wanted, half, source.jaxpr
    )
    computed = [n for n in step.frozen if outs[n] is not ins[n] and n not in pieces]
    ours = [*step.results, *computed]
    opened = [n for n in before if n in step.results or (open_state and n in ours)]
    # if the update reads a sum from a loop, reduce the sum once, after the loop
    of_loops = set(outputs_of(e for e in half if e.primitive.name in LOOPS))
    ends = [*terms, *values_at(outs, opened)]
    ends += [v for v in crossing if v in of_loops]
    added = linear_terms(inner.jaxpr, variables(ends), variables(terms))
    sharded: dict[Var, RowAxis] = {}
    for n in before:
        out = outs[n]
        if n in pieces and isinstance(out, Var):
            sharded[out] = sharded_along(pieces[n])
    in_full = {v for v in variables(wanted) if v not in sharded}
    demands = row_demands(half, sharded, in_full) if pieces else {}

    shards = Shards(trainers, tuple(over), noun, finite_padding=takes_index)
    if shares:
        shards = UnevenShards(trainers, tuple(over), noun, shares=tuple(shares), index=index)
    rows = {source.inputs[n].shape[axis] for n, axis in axes.items()}

    def joins(row: RowAxis, aval: Any) -> bool:
        """Return True if the trainers' pieces, without padding, concatenate to the value."""
        size = aval.shape[row.axis]
        pads = any(n % trainers for n in rows) and shards.is_even
        is_even = not shards.pads(size, row) and not pads
        return row.order is None and (is_even or any(row.width * n == size for n in rows))

    def wanted_layout(i: int, layout: ShardLayout) -> ShardLayout:
        if i < len(terms):
            return PARTIAL
        i -= len(terms)
        if i < len(before) and before[i] in pieces:
            return sharded_along(pieces[before[i]])
        if i >= len(before) or before[i] not in opened:
            return SHARED
        if isinstance(layout, RowAxis) and not joins(layout, outs[before[i]].aval):
            return SHARED
        return layout

    def write(w: SplitWriter) -> TrainerStep:
        w.terms, b = added, w.b
        w.demands, w.state = demands, {ins[n] for n in pieces}
        w.pieces.takes_index = takes_index
        for n, v in ins.items():
            dim = axes.get(n, pieces.get(n))
            # `is_input` marks the batch: the engine prefers to gather pieces of state instead
            w.take(v, SHARED if dim is None else sharded_along(dim), is_input=n not in pieces)
        values, layouts = w.write(inner.jaxpr, wanted_layout)
        env: dict[Var, Atom] = dict(zip(crossing, values[len(terms) + len(before) :], strict=True))
        b.source = None
        for n, term in zip(graded, values, strict=False):
            (env[step.boundary[n]],) = b.bind(mark_p, term, w.read(ins[n], None), leaf=n)
        for eqn in after:
            # unlike `read_from`, this raises KeyError for a value that no equation has computed
            atoms = [a if isinstance(a, Literal) else env[a] for a in eqn.invars]
            env.update(zip(eqn.outvars, b.copy(eqn, atoms, avals(eqn.outvars)), strict=True))
        found: dict[str, Atom] = dict(zip(before, values[len(terms) :], strict=False))
        found |= {n: env[a] for n, a in outs.items() if n not in found and isinstance(a, Var)}
        how = dict(zip(before, layouts[len(terms) :], strict=False))
        jaxpr = eliminate_dead(b.build(values_at(found, source.out_names)))
        # placeholders: `divide_step` later replaces the roles of the equations
        roles = (FORWARD,) * len(jaxpr.jaxpr.eqns)
        numbered = takes_index and w.pieces.reads_index
        args = source.args
        if numbered:
            jaxpr, args = _index_last(jaxpr), (*args, TreeSpec(jax.tree.structure((0,)), (INDEX,)))
        program = Program(f"part of {source.name}", jaxpr, args, source.out, roles)
        merges = {n: _merge(how.get(n, SHARED)) for n in ours}
        exchanged = tuple(_exchanged(jaxpr))
        sliced = {}
        for n, v in ins.items():
            row = w.sliced.get(v)
            if isinstance(row, RowAxis):
                sliced[n] = int(row.axis)
        return TrainerStep(
            program, merges, exchanged, tuple(w.gathers), w.scaled, local, numbered, sliced
        )

    return written(inner, shards, write)


def _index_last(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    inner = opened(jaxpr)
    index, *others = inner.invars
    return closed(
        inner.constvars, constants(jaxpr), [*others, index], inner.outvars, inner.eqns, jaxpr
    )


def _is_local(
    eqns: Sequence[JaxprEqn],
    source: Program,
    axes: Mapping[str, int],
    trainers: int,
    noun: str,
    shares: Sequence[int],
) -> bool:
    """Return True if some equations were traced in `with dtrans.local()`.

    Raises:
      BatchError: there are such equations, but trainers have different numbers of rows.
    """
    if not any(map(has_local_scope, eqns)):
        return False
    if shares:
        raise BatchError(
            f"speeds of dtrans.Batch cannot be combined with dtrans.local(), which needs equally "
            f"many rows on each {noun}; leave out one of the two"
        )
    for n, axis in axes.items():
        rows = source.inputs[n].shape[axis]
        if rows % trainers:
            raise BatchError(
                f"{n} has {rows} rows for {trainers} {noun}s; dtrans.local() needs equally many "
                f"rows on each {noun}, so pass a multiple of {trainers} rows"
            )
    return True


def _merge(layout: ShardLayout) -> str | int:
    if isinstance(layout, RowAxis):
        return int(layout.axis)
    return "sum" if isinstance(layout, Partial) else "same"


def _exchanged(jaxpr: Any) -> Iterator[Exchanged]:
    eqns = list(equations(jaxpr))
    if all(collective_of(eqn) is None for eqn in eqns):
        return  # looking up source lines is slow
    # variable -> source line of its equation; if unknown, the source line of an operand
    lines: dict[Any, str] = {}
    for eqn in eqns:
        around = (lines.get(v, "") for v in variables(eqn.invars))
        line = line_of(eqn) or next(filter(None, around), "")
        lines |= dict.fromkeys(eqn.outvars, line)
        if collective_of(eqn) is not None:
            yield Exchanged(eqn.primitive.name, line, total_bytes(moved_values(eqn)))
