"""Scanned layers: a `lax.scan` over stacked parameters, split into one scan for each stage.

First, each iteration becomes a scan of one iteration, and the equations are assigned to stages.
Then the iterations of each stage are merged into one scan over the stage's rows of the stacked
parameters.

A *stack* is a parameter with one row for each layer. Each stage stores its rows as a separate
parameter, such as `params/w.block1`. It also stores the same rows of the optimizer state. The
update is written for blocks of rows, as for parameter servers (`dtrans.slicing.server_update`). If
the update does not work row by row (Muon), one stage stores the complete stack, and all stages read
the stack.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import (
    SCAN,
    Atom,
    JaxprEqn,
    Literal,
    Var,
    body_indices,
    closed_with,
    is_reversed,
    resized,
    scan_iterations,
    scan_length,
)
from dtrans.ir.builder import Builder, read_from
from dtrans.ir.dataflow import avals, variables
from dtrans.ir.program import FORWARD, Program
from dtrans.ir.pytree import TreeSpec, tuple_of
from dtrans.ir.selection import invert, subset, values_at
from dtrans.pipeline_parallel.forward_pass import ForwardPass
from dtrans.rows.analysis import RowAnalysis, analyse
from dtrans.rows.slices import Slice
from dtrans.rows.writer import RowRange
from dtrans.slicing.blocks import Block, Placement
from dtrans.slicing.server_spec import analyse_update
from dtrans.slicing.server_update import inline_update, write_server
from dtrans.step.halves import DividedStep, Gradient, Name, UpdateProgram


# One tuple for each scan to split: the first iteration of each part, then the number of iterations
ScanSplits = tuple[tuple[int, ...], ...]

# The origin of each equation after scans were split: (index of the original equation, index of its
# part)
Origins = list[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class StageRows:
    """Rows of a stack (an array with one row per layer) that one stage stores.

    The stack is a parameter, or an array of its optimizer state.

    Attributes:
      name: the name under which the stage stores the rows.
      part: the slice of the stack that contains the rows.
    """

    name: str
    part: Slice


# -- scans -----------------------------------------------------------------------------------------


def loops_of(forward: ForwardPass) -> list[int]:
    """Return the indices of the scans over layers, which are divided among stages.

    These are scans (not in reverse) over stacked parameters: arrays with one row for each layer.
    """
    found = []
    for i, eqn in enumerate(forward.eqns):
        if eqn.primitive.name == SCAN and not is_reversed(eqn) and scan_length(eqn) > 1:
            xs = variables(values_at(eqn.invars, body_indices(eqn).slices))
            if not forward.parameter_of_input.keys().isdisjoint(xs):
                found.append(i)
    return found


def split_iterations(forward: ForwardPass) -> ScanSplits:
    """Return the division of each scan over layers into scans of one layer each.

    A division lists the first layer of each part, then the number of layers. A scan of two layers
    has the division (0, 1, 2).
    """
    lengths = [scan_length(forward.eqns[i]) for i in loops_of(forward)]
    return tuple(tuple(range(length + 1)) for length in lengths)


def split_scans(forward: ForwardPass, splits: ScanSplits) -> tuple[ForwardPass, Origins]:
    """Split each scan over layers into several scans of consecutive iterations.

    Returns:
      The new forward pass, and the origins of its equations. An origin is a pair (index of the
      original equation, index of the part). The part is 0 for an equation that is not split.
    """
    if not splits:
        return forward, [(i, 0) for i in range(len(forward.eqns))]
    parts = dict(zip(loops_of(forward), splits, strict=True))
    b = Builder(forward.jaxpr)
    b.invars += forward.inner.invars
    origin: Origins = []
    for i, eqn in enumerate(forward.eqns):
        # The equation is not a scan, or the scan has one part.
        if i not in parts or len(parts[i]) == 2:
            b.keep(eqn)
            origin.append((i, 0))
            continue
        for part in write_parts(b, eqn, parts[i]):
            origin += [(i, part)] * (len(b.eqns) - len(origin))
    jaxpr = b.build(forward.inner.outvars)
    return dataclasses.replace(forward, jaxpr=jaxpr), origin


def write_parts(b: Builder, eqn: JaxprEqn, bounds: Sequence[int]) -> Iterator[int]:
    """Write a scan as several scans, each with consecutive iterations (a part of the scan).

    The generator yields the index of a part after it has written the equations of the part.

    Args:
      b: the builder to write to.
      eqn: the scan.
      bounds: the first iteration of each part, then the number of iterations.
    """
    indices, operands = body_indices(eqn), list(eqn.invars)
    stacked: dict[int, list[Atom]] = {j: [] for j in indices.stacks}
    last = len(bounds) - 2
    for k, (start, stop) in enumerate(itertools.pairwise(bounds)):
        for i in indices.slices:
            operands[i] = b.part(eqn.invars[i], 0, start, stop)
        types = avals(eqn.outvars)
        for j in stacked:
            types[j] = resized(types[j], 0, stop - start)
        outputs = b.copy(eqn, operands, types, **scan_iterations(stop - start))
        for i, j in indices.carried.items():
            operands[i] = outputs[j]
        for j, rows in stacked.items():
            rows.append(outputs[j])
        if k == last:
            # The last part returns the carry of the original scan, so its outputs get the variables
            # of the original scan. The stacked outputs of all parts are concatenated.
            outs = list(eqn.outvars)
            for j in stacked:
                outs[j] = outputs[j]
            b.eqns[-1] = b.eqns[-1].replace(outvars=outs)
            for j, rows in stacked.items():
                b.call_as(eqn.outvars[j], concatenate_along(0), *rows)
        yield k


def merge_iterations(forward: ForwardPass, origin: Origins, stage_of: Sequence[int]) -> ScanSplits:
    """Choose new divisions of scans: one scan for all layers that a stage runs.

    Before stages are assigned, each scan over layers is split into scans of one layer. Afterwards
    this function joins the layers on the same stage.

    Args:
      forward: the forward pass before scans were split.
      origin: for each equation after the split, a pair (index of the original equation, layer).
      stage_of: the stages of these equations.

    Returns:
      The division of each scan, as in `split_iterations`.
    """
    stage_at = _stages_by_origin(origin, stage_of)
    found = []
    for i in loops_of(forward):
        stages = [stage_at[i, k] for k in range(scan_length(forward.eqns[i]))]
        starts = [k for k in range(1, len(stages)) if stages[k] != stages[k - 1]]
        found.append((0, *starts, len(stages)))
    return tuple(found)


def stages_of_parts(
    splits: ScanSplits,
    forward: ForwardPass,
    parts_origin: Origins,
    origin: Origins,
    stage_of: Sequence[int],
) -> tuple[int, ...]:
    """Return the stage of each equation, after `split_scans` has written one scan for each stage.

    Args:
      splits: the divisions that `merge_iterations` returned.
      forward: the forward pass before scans were split.
      parts_origin: the second result of `split_scans` with `splits`.
      origin, stage_of: see `merge_iterations`.
    """
    stage_at = _stages_by_origin(origin, stage_of)
    bounds = dict(zip(loops_of(forward), splits, strict=True))
    found = []
    for i, part in parts_origin:
        iteration = bounds[i][part] if i in bounds else 0
        found.append(stage_at[i, iteration])
    return tuple(found)


def _stages_by_origin(origin: Origins, stage_of: Sequence[int]) -> dict[tuple[int, int], int]:
    """Return the stage of each original equation; for a scan, the stage of each of its parts.

    A key of the result is (index of the original equation, index of the part). If several equations
    have the same origin, their last stage counts.
    """
    found: dict[tuple[int, int], int] = {}
    for key, s in zip(origin, stage_of, strict=True):
        found[key] = max(s, found.get(key, s))
    return found


# -- rows of stacks --------------------------------------------------------------------------------


def stage_rows(forward: ForwardPass, stage_of: Sequence[int]) -> dict[str, tuple[StageRows, ...]]:
    """Return the rows of stacked parameters that each stage stores, by parameter.

    A stacked parameter has one row for each layer. If several stages run its layers, and the update
    works row by row, each stage stores the rows of its layers. All other stacked parameters are not
    in the result.
    """
    step = forward.step
    analysis: RowAnalysis | None = None
    word = _word_for_rows(step)
    found: dict[str, tuple[StageRows, ...]] = {}
    for v, leaf in forward.parameter_of_input.items():
        # Skip a stack that only one stage reads, or that an equation reads without slicing rows.
        runs: dict[Any, int] = {}
        for e, s in zip(forward.eqns, stage_of, strict=True):
            if v in e.invars:
                runs[sliced_rows(e)] = s
        if None in runs or len({*runs.values()}) < 2 or leaf not in step.optimized:
            continue
        if v in forward.inner.outvars or not _is_alone(forward, v, leaf):
            continue

        # Skip a stack whose slices do not cover each row exactly once.
        ordered = sorted(runs)
        bounds = [0, *(stop for _, stop in ordered)]
        if ordered != list(itertools.pairwise(bounds)) or bounds[-1] != v.aval.shape[0]:
            continue

        # Skip a stack whose update does not work row by row.
        analysis = analysis or analyse(step.optimize, step.params)
        if leaf in analysis.groups:
            continue
        rows = []
        for k, (start, stop) in enumerate(ordered):
            rows.append(StageRows(f"{leaf}.{word}{k}", Slice(0, start, stop - start)))
        found[leaf] = tuple(rows)
    return found


def _is_alone(forward: ForwardPass, v: Var, leaf: str) -> bool:
    """Return True if the loss function reads the parameter `leaf` only as its input `v`.

    Otherwise an equation before the loss function reads all rows of the parameter, and stages
    cannot store separate rows.
    """
    source, program, prelude = forward.sources[v], forward.step.program, forward.prelude.jaxpr
    if program.invars[leaf] is not source or source not in prelude.outvars:
        return False
    if sum(a is source for a in forward.sources.values()) > 1:
        return False
    return all(source not in e.invars for e in prelude.eqns)


def _word_for_rows(step: DividedStep) -> str:
    """Return a word for the names of rows, such as "block" in "params/w.block1".

    Underscores are appended to "block" if another name of the step contains the word.
    """
    word = "block"
    while any(f".{word}" in n for n in step.program.in_names):
        word += "_"
    return word


def sliced_rows(eqn: JaxprEqn) -> tuple[int, int] | None:
    """Return (start, stop) if an equation slices rows from its operand; else None."""
    if eqn.primitive.name != "slice" or eqn.params["strides"] is not None:
        return None
    if isinstance(eqn.invars[0], Literal):
        return None
    starts, stops = eqn.params["start_indices"], eqn.params["limit_indices"]
    if any(starts[1:]) or tuple(stops[1:]) != eqn.invars[0].aval.shape[1:]:
        return None
    return (starts[0], stops[0])


@dataclasses.dataclass(frozen=True)
class Unstacked:
    """Forward pass in which the rows of each stage are separate parameters, not parts of a stack.

    Attributes:
      forward: the forward pass. Its step has the rows as parameters.
      rows: maps each stack, a parameter or an array of the optimizer's state, to its rows.
      stage_of: the stage of each equation.
    """

    forward: ForwardPass
    rows: Mapping[str, tuple[StageRows, ...]]
    stage_of: tuple[int, ...]


def unstack_params(
    forward: ForwardPass, rows: Mapping[str, tuple[StageRows, ...]], stage_of: Sequence[int] = ()
) -> Unstacked:
    """Replace stacked parameters by the rows of each stage, in a forward pass.

    Args:
      forward: the forward pass with split scans.
      rows: maps each stacked parameter to its rows in each stage.
      stage_of: the stage of each equation, if the stages are known.
    """
    if not rows:
        return Unstacked(forward, {}, tuple(stage_of))
    half, state = _half_of_blocks(forward.step, rows)
    every = {**rows, **state}
    step = _step_of_rows(forward.step, every, half)

    # The inputs: rows replace the stacks.
    leaf_var = invert(forward.parameter_of_input)
    row_var: dict[tuple[Atom, tuple[int, int]], Var] = {}
    diff, sources = dict(forward.parameter_of_input), dict(forward.sources)
    for leaf, runs in rows.items():
        v = leaf_var[leaf]
        del diff[v], sources[v]
        for r in runs:
            new = Var(r.part.type_in(v.aval))
            row_var[v, (r.part.first, r.part.stop)] = new
            diff[new], sources[new] = r.name, step.program.invars[r.name]

    # Remove the equations that slice stacks, because their outputs are inputs now.
    eqns: list[JaxprEqn] = []
    left: list[int] = []
    renamed: dict[Var, Atom] = {}
    for i, eqn in enumerate(forward.eqns):
        run = sliced_rows(eqn)
        row = None if run is None else row_var.get((eqn.invars[0], run))
        if row is not None:
            renamed[eqn.outvars[0]] = row
            continue
        eqns.append(eqn.replace(invars=read_from(renamed, eqn.invars)))
        left.append(i)

    values = variables(sources.values())
    unstacked = dataclasses.replace(
        forward,
        step=step,
        jaxpr=closed_with(forward.jaxpr, invars=[*sources], eqns=eqns),
        parameter_of_input=diff,
        sources=sources,
        prelude=closed_with(forward.prelude, invars=step.program.inner.invars, outvars=values),
    )
    if stage_of:
        stage_of = values_at(stage_of, left)
    return Unstacked(unstacked, every, tuple(stage_of))


def _half_of_blocks(
    step: DividedStep, rows: Mapping[str, tuple[StageRows, ...]]
) -> tuple[UpdateProgram, dict[str, tuple[StageRows, ...]]]:
    """Rewrite the optimizer's update for the rows of each stage, instead of stacked parameters.

    `dtrans.slicing.server_update` writes the update of a parameter server. Here it writes the
    update of one server that stores the rows of all stages, each as a separate block.

    Args:
      step: the step, divided into forward and backward, and the update.
      rows: stacked parameter -> its rows in each stage.

    Returns:
      The new update, and a dict from each stacked array of the optimizer's state to its rows.
    """
    analysis = analyse(step.optimize, step.params)
    types = step.program.inputs
    blocks: dict[str, tuple[Block, ...]] = {}
    word = _word_for_rows(step)
    for n in step.optimized:
        t = types[n]
        if n not in rows:
            blocks[n] = (Block.from_leaf(n, t, "here"),)
            continue
        runs, of_leaf = rows[n], []
        for k, r in enumerate(runs):
            span = RowRange(r.part.first, r.part.stop)
            shape = (span.rows, *t.shape[1:])
            of_leaf.append(Block(n, k, len(runs), span, shape, t.dtype, "here", word))
        blocks[n] = tuple(of_leaf)
    placement = Placement(("here",), blocks, analysis.groups)
    work = write_server(analyse_update(analysis, placement), "here")

    # Add the inputs: parameters and optimizer state as the server stores them, then gradients.
    b = Builder(step.optimize.jaxpr)
    state: dict[str, list[StageRows]] = {}
    values: dict[str, Atom] = {}
    in_names: list[Name] = []
    for name, variable in work.variables.items():
        if variable.init_output in step.opt_state and variable.part is not None:
            state.setdefault(variable.init_output, []).append(StageRows(name, variable.part))
        values[name] = b.input(variable.stored_type(types[variable.init_output]))
        in_names.append(name)
    for block in work.blocks:
        for g in block.grads:
            values[g.name] = b.input(block.invars[g.name].aval)
            leaf = g.leaf
            if leaf in rows:
                leaf = rows[leaf][g.index].name
            in_names.append(Gradient(leaf))
    new = inline_update(b, work, values)
    half = UpdateProgram(b.build(list(new.values())), tuple(in_names), tuple(new))
    state_rows = {}
    for n, rows_of_state in state.items():
        state_rows[n] = tuple(sorted(rows_of_state, key=lambda r: r.part.first))
    return half, state_rows


def _step_of_rows(
    step: DividedStep, rows: Mapping[str, tuple[StageRows, ...]], half: UpdateProgram
) -> DividedStep:
    """Return a step with the rows of each stage in its state instead of stacked arrays.

    Args:
      step: the step with stacked arrays in its state.
      rows: maps each stacked array to its rows in each stage.
      half: the update for rows.
    """
    source = step.program
    vars_of, outs = source.invars, source.outvars
    b = Builder(source.jaxpr)
    b.role = FORWARD

    # The inputs: rows. They are concatenated first, so that the equations of the step need no
    # change.
    specs = []
    invars: dict[str, Var] = {}
    for names in (step.params, step.opt_state):
        types: dict[str, Any] = {}
        for n in names:
            t = vars_of[n].aval
            for r in rows.get(n, ()):
                types[r.name] = r.part.type_in(t)
            if n not in rows:
                types[n] = t
        specs.append(TreeSpec.from_tree(types))
        for n in specs[-1].names:
            invars[n] = vars_of[n] if n in vars_of else Var(types[n])
            b.invars.append(invars[n])
    b.invars += values_at(vars_of, step.batch)
    for n, runs in rows.items():
        parts = [invars[r.name] for r in runs]
        b.call_as(vars_of[n], concatenate_along(runs[0].part.axis), *parts)
    for eqn, role in zip(source.inner.eqns, source.roles, strict=True):
        b.role = role
        b.keep(eqn)

    # The outputs: the rows of the new stacked parameters.
    new: dict[str, Atom] = dict(outs)
    for n, runs in rows.items():
        out = new.pop(n)
        assert not isinstance(out, Literal), n
        for r in runs:
            new[r.name] = r.part.take_from(b, out)
    results = TreeSpec.from_tree(subset(source.outputs, step.results))
    args, out_spec = (*specs, *source.args[2:]), tuple_of(*specs, results)

    def row_names(names: Iterable[str]) -> dict[str, str]:
        """Return the old name for each new name: "params/w" for "params/w.block1"."""
        found = {}
        for n in names:
            for r in rows.get(n, ()):
                found[r.name] = n
            if n not in rows:
                found[n] = n
        return found

    return dataclasses.replace(
        step,
        program=Program.written(source.name, b, args, out_spec, new),
        params=specs[0].names,
        opt_state=specs[1].names,
        gradients={m: step.gradients[n] for m, n in row_names(step.gradients).items()},
        optimized=tuple(row_names(step.optimized)),
        frozen=tuple(row_names(step.frozen)),
        optimize=half,
    )


@functools.cache
def concatenate_along(axis: int) -> Callable[..., jax.Array]:
    """Return the function that concatenates arrays along a dimension."""
    return lambda *parts: jnp.concatenate(parts, axis)
