"""Layers that are one loop: a scan over a stack of parameters, cut into a loop for each stage.

    before planning   each turn of a loop is a loop of one turn, which the planner takes for a layer
    after             the turns of a stage are one loop again, over its rows of the stack

Each stage then holds its rows of the stack alone, under a name of their own (`params/w.block1`),
with its rows of the optimizer's state: the update is written for blocks of rows, as for parameter
servers (`dtrans.slicing.server_update`). Where the optimizer does not let a leaf be cut (Muon), all
stages read it whole, from the stage that holds it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import (
    SCAN,
    Atom,
    JaxprEqn,
    Literal,
    Var,
    closed_with,
    is_reversed,
    resized,
    scan_iterations,
    scan_length,
    wiring,
)
from dtrans.ir.builder import Builder, read_from
from dtrans.ir.program import FORWARD, Program
from dtrans.ir.pytree import TreeSpec, tuple_of
from dtrans.pipeline_parallel.forward_pass import ForwardPass
from dtrans.rows.analysis import RowAnalysis, analyse
from dtrans.rows.slices import Slice
from dtrans.rows.writer import RowRange
from dtrans.slicing.blocks import Block, Placement
from dtrans.slicing.server_spec import analyse_update
from dtrans.slicing.server_update import inline_update, write_server
from dtrans.step.cut import Cut, Gradient, Name, OptimizeHalf


# of each loop that is cut, where its parts begin, and where the last ends
Turns = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class StageRows:
    """A run of rows of a leaf, or of what goes with it in the optimizer's state, as a parameter of
    its own.

    Attributes:
      name: its name.
      part: which rows.
    """

    name: str
    part: Slice


# -- loops -----------------------------------------------------------------------------------------


def loops_of(forward: ForwardPass) -> list[int]:
    """Return the positions of loops to cut: forward scans over a stack with a gradient."""
    found = []
    for i, eqn in enumerate(forward.eqns):
        if eqn.primitive.name == SCAN and not is_reversed(eqn) and scan_length(eqn) > 1:
            xs = [eqn.invars[k] for k in wiring(eqn).slices]
            if any(isinstance(a, Var) and a in forward.diff for a in xs):
                found.append(i)
    return found


def single_turns(forward: ForwardPass) -> Turns:
    """Every turn of every loop by itself."""
    return tuple(tuple(range(scan_length(forward.eqns[i]) + 1)) for i in loops_of(forward))


def turned(forward: ForwardPass, turns: Turns) -> tuple[ForwardPass, list[tuple[int, int]]]:
    """Return the forward pass with its loops in parts, and the origin of each equation.

    Returns:
      It, and for each of its equations the equation that it was, and the number of the part (0 for
      others).
    """
    if not turns:
        return forward, [(i, 0) for i in range(len(forward.eqns))]
    parts = dict(zip(loops_of(forward), turns, strict=True))
    b = Builder(forward.jaxpr)
    b.invars += forward.inner.invars
    origin: list[tuple[int, int]] = []
    for i, eqn in enumerate(forward.eqns):
        if i not in parts or len(parts[i]) == 2:  # all of it in one
            b.keep(eqn)
            origin.append((i, 0))
            continue
        for part in _parts(b, eqn, parts[i]):
            origin += [(i, part)] * (len(b.eqns) - len(origin))
    jaxpr = b.build(forward.inner.outvars)
    return dataclasses.replace(forward, jaxpr=jaxpr), origin


def _parts(b: Builder, eqn: JaxprEqn, bounds: Sequence[int]) -> Any:
    """Write a loop in parts; gives the number of each part once it is written."""
    wires, operands = wiring(eqn), list(eqn.invars)
    stacked: dict[int, list[Atom]] = {j: [] for j in wires.stacks}
    last = len(bounds) - 2
    for k, (start, stop) in enumerate(itertools.pairwise(bounds)):
        for i in wires.slices:
            operands[i] = b.part(eqn.invars[i], 0, start, stop)
        types = [
            resized(v.aval, 0, stop - start) if j in stacked else v.aval
            for j, v in enumerate(eqn.outvars)
        ]
        made = b.copy(eqn, operands, types, **scan_iterations(stop - start))
        for i, j in wires.carried.items():
            operands[i] = made[j]
        for j, rows in stacked.items():
            rows.append(made[j])
        if k == last:  # what reads the loop reads its last part
            outs = [v if j in stacked else eqn.outvars[j] for j, v in enumerate(made)]
            b.eqns[-1] = b.eqns[-1].replace(outvars=outs)
            for j, rows in stacked.items():
                b.call_as(eqn.outvars[j], joined(0), *rows)
        yield k


def joined_turns(
    forward: ForwardPass, origin: Sequence[tuple[int, int]], stage_of: Sequence[int]
) -> Turns:
    """Loops in parts of one stage each, as turns by themselves were planned.

    Args:
      forward: with the loops whole.
      origin, stage_of: of the equations where each turn is a loop by itself.
    """
    found = []
    for i in loops_of(forward):
        at: dict[int, int] = {}
        for (j, part), s in zip(origin, stage_of, strict=True):
            if j == i:
                at[part] = max(s, at.get(part, s))
        turns = [at[k] for k in sorted(at)]
        cuts = [k for k in range(1, len(turns)) if turns[k] != turns[k - 1]]
        found.append((0, *cuts, len(turns)))
    return tuple(found)


def stages_of_parts(
    turns: Turns,
    forward: ForwardPass,
    parts_origin: Sequence[tuple[int, int]],
    origin: Sequence[tuple[int, int]],
    stage_of: Sequence[int],
) -> tuple[int, ...]:
    """The stage of each equation where the turns of a stage are one loop, from those where each is
    by itself."""
    known: dict[tuple[int, int], int] = {}
    for key, s in zip(origin, stage_of, strict=True):
        known[key] = max(s, known.get(key, s))
    bounds = dict(zip(loops_of(forward), turns, strict=True))
    return tuple(known[i, bounds[i][part] if i in bounds else 0] for i, part in parts_origin)


# -- rows of stacks --------------------------------------------------------------------------------


def rows_of(forward: ForwardPass, stage_of: Sequence[int]) -> dict[str, tuple[StageRows, ...]]:
    """Find the stacked leaves of several stages; each stage reads only its rows."""
    step = forward.step
    outs = {a for a in forward.inner.outvars if isinstance(a, Var)}
    direct = {a for a in forward.prelude.jaxpr.outvars if isinstance(a, Var)}
    names = dict(zip(step.program.inner.invars, step.program.in_names, strict=True))
    read = {a for e in forward.prelude.jaxpr.eqns for a in e.invars if isinstance(a, Var)}
    analysis: RowAnalysis | None = None
    word = _word_for_rows(step)
    found: dict[str, tuple[StageRows, ...]] = {}
    for v, leaf in forward.diff.items():
        source = forward.given[v]
        uses = [(e, s) for e, s in zip(forward.eqns, stage_of, strict=True) if v in e.invars]
        runs = {_run(e): s for e, s in uses}
        if None in runs or len({*runs.values()}) < 2 or v in outs or leaf not in step.optimized:
            continue
        if (
            not isinstance(source, Var)
            or names.get(source) != leaf
            or source in read
            or source not in direct
        ):
            continue
        if sum(a is source for a in forward.given.values()) > 1:
            continue
        ordered = sorted(r for r in runs if r is not None)
        ends = [0, *(stop for _, stop in ordered)]
        if [start for start, _ in ordered] != ends[:-1] or ends[-1] != v.aval.shape[0]:
            continue
        analysis = analysis or analyse(step.optimize, step.params)
        if leaf in analysis.groups:
            continue
        found[leaf] = tuple(
            StageRows(f"{leaf}.{word}{k}", Slice(0, a, b - a)) for k, (a, b) in enumerate(ordered)
        )
    return found


def _word_for_rows(step: Cut) -> str:
    """Return "block", with underscores if a name in the step contains it already."""
    word = "block"
    while any(f".{word}" in n for n in step.program.in_names):
        word += "_"
    return word


def _run(eqn: JaxprEqn) -> tuple[int, int] | None:
    """Return the rows that an equation slices from its operand; None for another equation."""
    if eqn.primitive.name != "slice" or eqn.params["strides"] is not None:
        return None
    starts, stops, shape = (
        eqn.params["start_indices"],
        eqn.params["limit_indices"],
        eqn.invars[0].aval.shape,
    )
    whole = all(a == 0 and z == n for a, z, n in zip(starts[1:], stops[1:], shape[1:], strict=True))
    return (starts[0], stops[0]) if whole else None


@dataclasses.dataclass(frozen=True)
class Taken:
    """A forward pass with rows of stacks as parameters of their own.

    Attributes:
      forward: it; its step too has them.
      rows: by the name of what they are rows of, parameters and the optimizer's state.
    """

    forward: ForwardPass
    rows: Mapping[str, tuple[StageRows, ...]]


def taken_apart(forward: ForwardPass, rows: Mapping[str, tuple[StageRows, ...]]) -> Taken:
    """Return the forward pass and step on rows of stacks."""
    if not rows:
        return Taken(forward, {})
    half, state = _half_of_blocks(forward.step, rows)
    every = {**rows, **state}
    step = _step(forward.step, every, half)
    vars_of = step.program.invars
    by_leaf = {leaf: v for v, leaf in forward.diff.items()}
    env: dict[tuple[Var, tuple[int, int]], Var] = {}
    diff, given = dict(forward.diff), dict(forward.given)
    for leaf, runs in rows.items():
        v = by_leaf[leaf]
        del diff[v], given[v]
        for r in runs:
            own = Var(r.part.of(v.aval))
            env[v, (r.part.first, r.part.stop)] = own
            diff[own], given[own] = r.name, vars_of[r.name]
    eqns: list[JaxprEqn] = []
    renamed: dict[Var, Atom] = {}
    for eqn in forward.eqns:
        run = _run(eqn)
        operand = eqn.invars[0] if eqn.invars else None
        if run is not None and isinstance(operand, Var) and (operand, run) in env:
            renamed[eqn.outvars[0]] = env[operand, run]
        else:
            eqns.append(eqn.replace(invars=read_from(renamed, eqn.invars)))
    jaxpr = closed_with(forward.jaxpr, invars=list(given), eqns=eqns)
    outs = [a for a in given.values() if isinstance(a, Var)]
    prelude = closed_with(forward.prelude, invars=step.program.inner.invars, outvars=outs)
    return Taken(
        dataclasses.replace(
            forward, step=step, jaxpr=jaxpr, diff=diff, given=given, prelude=prelude
        ),
        every,
    )


def stages_without(
    forward: ForwardPass, rows: Mapping[str, tuple[StageRows, ...]], stage_of: Sequence[int]
) -> tuple[int, ...]:
    """Return the stage of each equation that `taken_apart` leaves."""
    by_leaf = {leaf: v for v, leaf in forward.diff.items() if leaf in rows}
    gone = {
        (by_leaf[leaf], (r.part.first, r.part.stop)) for leaf, runs in rows.items() for r in runs
    }
    left = [
        not (e.invars and (e.invars[0], _run(e)) in gone) if _is_run(e) else True
        for e in forward.eqns
    ]
    return tuple(s for s, keep in zip(stage_of, left, strict=True) if keep)


def _is_run(eqn: JaxprEqn) -> bool:
    return bool(eqn.invars) and isinstance(eqn.invars[0], Var) and _run(eqn) is not None


def _half_of_blocks(
    step: Cut, rows: Mapping[str, tuple[StageRows, ...]]
) -> tuple[OptimizeHalf, dict[str, tuple[StageRows, ...]]]:
    """Return the optimize half on rows, and the optimizer's state that has such rows.

    It is what a parameter server does that has all blocks.
    """
    analysis = analyse(step.optimize, step.params)
    types = step.program.inputs
    blocks: dict[str, tuple[Block, ...]] = {}
    word = _word_for_rows(step)
    for n in step.optimized:
        t = types[n]
        if n in rows:
            spans = [RowRange(r.part.first, r.part.stop) for r in rows[n]]
            blocks[n] = tuple(
                Block(n, k, len(spans), x, (x.rows, *t.shape[1:]), t.dtype, "here", word)
                for k, x in enumerate(spans)
            )
        else:
            blocks[n] = (Block.from_leaf(n, t, "here"),)
    placement = Placement(("here",), blocks, analysis.groups)
    work = write_server(analyse_update(analysis, placement), "here")
    state: dict[str, list[StageRows]] = {}
    for name, h in work.variables.items():
        if h.of in step.opt_state and h.part is not None:
            state.setdefault(h.of, []).append(StageRows(name, h.part))
    b = Builder(step.optimize.jaxpr)
    held = {n: b.input(h.cut(types[h.of])) for n, h in work.variables.items()}
    values: dict[str, Atom] = dict(held)
    name_of: dict[Var, Name] = {v: n for n, v in held.items()}
    for block in work.blocks:
        given = block.invars
        for g in block.grads:
            values[g.name] = v = b.input(given[g.name].aval)
            name_of[v] = Gradient(rows[g.leaf][g.index].name if g.leaf in rows else g.leaf)
    new = inline_update(b, work, values)
    half = OptimizeHalf(
        b.build(list(new.values())), tuple(name_of[v] for v in b.invars), tuple(new)
    )
    return half, {n: tuple(sorted(rs, key=lambda r: r.part.first)) for n, rs in state.items()}


def _step(step: Cut, rows: Mapping[str, tuple[StageRows, ...]], half: OptimizeHalf) -> Cut:
    """Return the step with rows as arrays of its state."""
    source = step.program
    inner = source.inner
    vars_of = source.invars
    outs = source.outvars
    named: Callable[[str], list[str]] = lambda n: [r.name for r in rows[n]] if n in rows else [n]
    b = Builder(source.jaxpr)
    b.role = FORWARD
    specs = []
    given: dict[str, Var] = {}
    for names in (step.params, step.opt_state):
        types: dict[str, Any] = {}
        for n in names:
            t = vars_of[n].aval
            for r in rows.get(n, ()):
                types[r.name] = r.part.of(t)
            if n not in rows:
                types[n] = t
        specs.append(TreeSpec.from_tree(types))
        for n in specs[-1].names:
            given[n] = vars_of[n] if n in vars_of else Var(types[n])
            b.invars.append(given[n])
    b.invars += [vars_of[n] for n in step.batch]
    for n, parts in rows.items():
        b.call_as(vars_of[n], joined(parts[0].part.axis), *(given[r.name] for r in parts))
    for eqn, role in zip(inner.eqns, source.roles, strict=True):
        b.role = role
        b.keep(eqn)
    new: dict[str, Atom] = {n: a for n, a in outs.items() if n not in rows}
    for n, parts in rows.items():
        out = outs[n]
        assert not isinstance(out, Literal), n
        new |= {r.name: r.part.cut(b, out) for r in parts}
    results = TreeSpec.from_tree({n: source.outputs[n] for n in step.results})
    program = Program.written(
        source.name, b, (*specs, *source.args[2:]), tuple_of(*specs, results), new
    )
    flat: Callable[[Sequence[str]], tuple[str, ...]] = lambda names: tuple(
        m for n in names for m in named(n)
    )
    return dataclasses.replace(
        step,
        program=program,
        params=specs[0].names,
        opt_state=specs[1].names,
        gradients={m: a for n, a in step.gradients.items() for m in named(n)},
        optimized=flat(step.optimized),
        frozen=flat(step.frozen),
        optimize=half,
    )


@functools.cache
def joined(axis: int) -> Callable[..., jax.Array]:
    """Arrays one behind the other."""
    return lambda *parts: jnp.concatenate(parts, axis)
