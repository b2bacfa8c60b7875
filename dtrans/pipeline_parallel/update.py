"""Update of a pipelined step, which computes new parameters from sums of gradients.

The update is written as a separate training step, so that the transforms for training steps can
rewrite it. Its "batch" consists of summed gradients and of arguments that the update reads, such as
a learning rate. The gradients are summed over micro-batches. First, the step adds the sums of all
stages that share a leaf, and divides by the number of micro-batches. An equation marks the result
as a gradient. Then replicas reduce the gradients as trainers do (`dtrans.nccl2`), or each replica
updates a slice of the state (`dtrans.sharding`). Finally, the update is divided by stage
(`dtrans.pipeline_parallel.update_by_stage`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import Atom, Literal, Var
from dtrans.data_parallel.reducer import ReduceSpec
from dtrans.data_parallel.transform import write_trainer
from dtrans.engine.layout import Sliced
from dtrans.errors import GradientError
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import avals, bits_of, needed_equations, propagate
from dtrans.ir.program import FORWARD, OPTIMIZE, Program
from dtrans.ir.pytree import TreeSpec, tuple_of, unused_name
from dtrans.ir.selection import exclude, omit, subset, values_at
from dtrans.pipeline_parallel.balance import contiguous, part_of_each
from dtrans.pipeline_parallel.options import PipelineOptions
from dtrans.pipeline_parallel.split_stages import StageSharding, split_update
from dtrans.pipeline_parallel.stage_scan import StageRows, concatenate_along
from dtrans.pipeline_parallel.update_by_stage import PlacedUpdate, grouped, place
from dtrans.rows.analysis import leaves_of_state
from dtrans.step.capture import value_and_grad_p
from dtrans.step.halves import GRAD, DividedStep, Gradient, divide_step
from dtrans.step.local_clip import clip_to_norm
from dtrans.step.marks import mark_p
from dtrans.zero.choose_slices import choose_slices
from dtrans.zero.mixed_precision import scale_spec
from dtrans.zero.options import ShardingOptions, Slicing
from dtrans.zero.rank_layout import RankLayout
from dtrans.zero.rank_program import write_rank


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """Update of a pipelined step.

    Attributes:
      placed: the program of one replica's update, divided into pieces.
      layout: the slices of the state that replicas store; None if each replica stores the complete
        state.
      sharding: the state that the shards of split stages divide.
      sums: the inputs that are sums of gradients of one stage; maps each one to (leaf, stage,
        micro-batch). The micro-batch is None for a sum over all micro-batches.
    """

    placed: PlacedUpdate
    layout: RankLayout | None
    sharding: StageSharding
    sums: Mapping[str, tuple[str, int, int | None]]

    @property
    def program(self) -> Program:
        """Program of the update, before it is divided into pieces.

        Its inputs are (params, opt_state, sums and arguments). Its outputs are (params, opt_state,
        results that the step computes from gradients).
        """
        return self.placed.program

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the arguments of the step, such as a learning rate, that the update reads.

        They include values that the job computes from the full batch before the micro-batches.
        """
        return tuple(exclude(self.program.args[2].names, self.sums))

    @property
    def slices(self) -> Mapping[str, Sliced]:
        """Slices of each input that replicas divide, by name."""
        return {} if self.layout is None else self.layout.sliced


def update_of(
    step: DividedStep,
    sums: Mapping[str, Any],
    homes: Mapping[str, int],
    users: Mapping[str, Sequence[int]],
    sharding: StageSharding,
    rows: Mapping[str, Sequence[StageRows]],
    o: PipelineOptions,
) -> Update:
    """Write the update of a step, and divide the update by stage.

    Args:
      step: the step of a micro-batch, divided into forward and backward, and the update.
      sums: shape and dtype of each leaf's sum of gradients, by leaf.
      homes: maps each parameter to the stage that stores it.
      users: maps each parameter to the stages that compute its gradient.
      sharding: the shards of split stages, and the state that the shards divide.
      rows: maps each stacked parameter to the rows that stages store as separate parameters.
      o: the options of the pipeline.
    """
    types = step.program.inputs
    micros = [None] if o.clip_of_each is None else range(o.num_micro_batch)

    # `inputs` is `Update.sums`. `parts` has the names of a leaf's sums, as [micro-batch][stage].
    inputs: dict[str, tuple[str, int, int | None]] = {}
    parts: dict[str, list[list[str]]] = {}
    for n in sums:
        parts[n] = [[] for _ in micros]
        for s in users[n]:
            at = "" if s == homes[n] else f".stage{s}"
            for m in micros:
                micro = "" if m is None else f".micro{m}"
                name = unused_name(f"{n}{GRAD}{at}{micro}", types)
                inputs[name] = (n, s, m)
                parts[n][m or 0].append(name)

    # Write the update of one replica.
    full_sums = {n: t.update(shape=types[n].shape) for n, t in sums.items()}
    step_of_sums = divide_step(_step_of_sums(step, full_sums, parts, rows, o)).with_reported()
    layout = None
    if o.replicas > 1 and o.memory.sharding_stage:
        layout = dataclasses.replace(
            RankLayout.from_step(step_of_sums, _sharding(o), {}, divided=sharding.params),
            groups=homes,
        )
        sharding = sharding.without_conflicts(layout.sliced)
        if o.slices_gradients:
            program = _on_sliced_sums(step_of_sums, layout, inputs, parts, o)
        else:
            program = write_rank(step_of_sums, layout)
    else:
        group = lambda leaf: ReduceSpec(group=homes[leaf])
        program = write_trainer(step_of_sums, o.over_replicas, {}, group)

    # Divide the update by stage. The stage of a leaf has the leaf's optimizer state. Every stage
    # has all other state.
    # The loss scale belongs to no leaf, although the update of a 0-d leaf reads it.
    leaf_of = omit(leaves_of_state(step.optimize, step.params), scale_spec().names)
    home: dict[str, int | None] = dict.fromkeys(step.opt_state)
    home |= {n: homes[leaf] for n, leaf in leaf_of.items()}
    home |= subset(homes, step.params)
    out_at = {**dict.fromkeys(program.out_names, o.model_stages - 1), **home}
    home |= dict.fromkeys(arguments_of(step))
    home |= {n: stage for n, (_, stage, _) in inputs.items()}
    placed = place(program, home, out_at, o.model_stages)
    if o.memory.update_groups > 1:
        leaf_of = dict(zip(step.params, step.params, strict=True)) | leaf_of
        placed = grouped(placed, _apply_groups(step, homes, leaf_of, o))
    return Update(split_update(placed, sharding, inputs), layout, sharding, inputs)


def arguments_of(step: DividedStep) -> tuple[str, ...]:
    """Return the arguments of the step that the update reads, such as a learning rate.

    Arguments that a result computed from gradients reads are included.
    """
    read = step.arguments
    return tuple(n for n in step.batch if n in read or results_from_gradients(step, n))


def results_from_gradients(step: DividedStep, argument: str) -> list[str]:
    """Return the results that are computed from gradients and from an argument of the step.

    Args:
      step: the training step, divided into forward and backward, and the update.
      argument: the name of the argument. Paths through gradients do not count.
    """
    read = {step.program.invars[argument]: 1}
    reached = propagate(step.program.eqns, read, dict.fromkeys(step.boundary.values(), 0))
    return [n for n in step.from_gradients if bits_of(reached, step.program.outvars[n])]


def slices_of_sums(
    step: DividedStep, o: PipelineOptions, divided: Mapping[str, int] = MappingProxyType({})
) -> dict[str, Sliced]:
    """Return slices of the leaves with reduce-scattered gradients (`sharding_stage` 2 and 3).

    Args:
      step: the training step, divided into forward and backward, and the update.
      o: the options of the pipeline.
      divided: the sharded dimension of each leaf that the shards of split stages divide.
    """
    if not o.slices_gradients:
        return {}
    slices = choose_slices(
        step,
        o.replicas,
        least=o.memory.min_slice_size,
        in_layers=False,
        sliced_in_use=o.slices_params,
        divided=divided,
    )
    return dict(slices.leaves)


def _apply_groups(
    step: DividedStep, homes: Mapping[str, int], leaf_of: Mapping[str, str], o: PipelineOptions
) -> dict[str, int]:
    """Assign each array of the state to an update group of its stage (`StageMemory.update_groups`).

    A stage updates one group after the other, to lower its peak memory. A group consists of
    consecutive parameters of a stage. All groups have about equal numbers of elements. EPL
    (epl/runtime/optimizer_helper.py) divides all variables of the job instead, and the last group
    is the largest.
    """
    group: dict[str, int] = {}
    for s in range(o.model_stages):
        mine = [n for n in step.optimized if homes[n] == s]
        parts = min(o.memory.update_groups, len(mine))
        if parts > 1:
            sizes = [step.program.inputs[n].size for n in mine]
            starts = contiguous(sizes, [0.0] * len(mine), parts)
            group |= zip(mine, part_of_each(starts, len(mine)), strict=True)
    return {n: group.get(leaf, 0) for n, leaf in leaf_of.items()}


def _on_sliced_sums(
    step: DividedStep,
    layout: RankLayout,
    sums: Mapping[str, tuple[str, int, int | None]],
    parts: Mapping[str, Sequence[Sequence[str]]],
    o: PipelineOptions,
) -> Program:
    """Return the update of a replica that stores only slices of summed gradients.

    The update reduces no gradients, because stages reduce-scatter them in each micro-batch.

    Args:
      step: the update as a training step that reads complete sums.
      layout: the slices.
      sums: see `Update`.
      parts: maps each leaf to the names of its sums, as [micro-batch][stage].
      o: the options of the pipeline.
    """
    leaves = layout.slices.leaves
    sliced = {n: leaves[leaf] for n, (leaf, _, _) in sums.items() if leaf in leaves}

    def gradients(b: Builder, local: Mapping[str, Atom]) -> Iterator[tuple[str, Atom]]:
        sums_of_leaf: dict[str, list[Atom]] = {}
        for n, by_micro in parts.items():
            sums_of_leaf[n] = values_at(local, itertools.chain(*by_micro))
        return _means(b, step, sums_of_leaf, o)

    return write_rank(step, dataclasses.replace(layout, sums=sliced), gradients)


def _sharding(o: PipelineOptions) -> ShardingOptions:
    """Return options of `dtrans.sharding` that divide the update among replicas.

    With `sharding_stage` 1 and 2, replicas update the same slices, so the options are equal.
    """
    over = o.over_replicas
    slices = Slicing(min_slice_size=o.memory.min_slice_size, prefetch=0, axis_name=over.axis_name)
    fields = {f.name: getattr(over, f.name) for f in dataclasses.fields(over)}
    stage = 3 if o.slices_params else 1
    return ShardingOptions(**fields, stage=stage, degree=o.replicas, slices=slices)


def _step_of_sums(
    step: DividedStep,
    sums: Mapping[str, Any],
    parts: Mapping[str, Sequence[Sequence[str]]],
    rows: Mapping[str, Sequence[StageRows]],
    o: PipelineOptions,
) -> Program:
    """Return the update as a training step; its batch consists of sums and arguments.

    Args:
      step: the training step, divided into forward and backward, and the update.
      sums: shape and dtype of each leaf's complete sum of gradients, by leaf.
      parts: maps each leaf to the names of its sums, as [micro-batch][stage].
      rows: maps each stack of layers to the rows that stages store as separate parameters.
      o: the options of the pipeline.
    """
    source = step.program
    vars_of = source.invars
    b = Builder(source.jaxpr)
    b.role = FORWARD
    b.invars += values_at(vars_of, (*step.params, *step.opt_state))
    arguments = arguments_of(step)
    types = dict(zip(arguments, avals(values_at(vars_of, arguments)), strict=True))
    for n, by_micro in parts.items():
        types |= dict.fromkeys(itertools.chain(*by_micro), sums[n])
    spec = TreeSpec.from_tree(types)
    inputs = dict(zip(spec.names, b.inputs(values_at(types, spec.names)), strict=True))

    # Compute gradients: sum over stages, clip each micro-batch, sum over micro-batches, mark.
    totals: dict[str, list[Atom]] = {}
    for n, by_micro in parts.items():
        totals[n] = [_total(b, list(map(inputs.__getitem__, names))) for names in by_micro]
    if o.clip_of_each is not None:
        for m in range(o.num_micro_batch):
            clip = clip_to_norm(float(o.clip_of_each))
            new = b.call(clip, *(sums_of_leaf[m] for sums_of_leaf in totals.values()))
            for sums_of_leaf, x in zip(totals.values(), new, strict=True):
                sums_of_leaf[m] = x
    grads: dict[str, Atom] = {}
    for n, mean in _means(b, step, totals, o):
        (grads[n],) = b.bind(mark_p, mean, vars_of[n], leaf=n)

    # The optimize half.
    b.role = OPTIMIZE
    half = step.optimize
    read = {**vars_of, **subset(inputs, arguments)}
    atoms = []
    for name in half.in_names:
        atoms.append(grads[name.leaf] if isinstance(name, Gradient) else read[name])
    found: dict[str, Atom] = subset(vars_of, (*step.params, *step.opt_state))
    found |= zip(half.out_names, b.inline(half.jaxpr, *atoms), strict=True)
    for n, a in found.items():
        # The next step may donate the state, so the state must not share memory with an input.
        if a in inputs.values():
            (found[n],) = b.call(jnp.copy, a)
    found |= _of_gradients(b, step, grads, rows, {vars_of[n]: inputs[n] for n in arguments})
    results = TreeSpec.from_tree(subset(source.outputs, step.from_gradients))
    out = tuple_of(*source.args[:2], results)
    return Program.written(f"update of {source.name}", b, (*source.args[:2], spec), out, found)


def _means(
    b: Builder, step: DividedStep, parts: Mapping[str, Sequence[Atom]], o: PipelineOptions
) -> Iterator[tuple[str, Atom]]:
    """Yield each leaf and its gradient: the mean (or sum) over micro-batches.

    If the loss does not read the leaf, the gradient is zero.

    Args:
      b: the builder to write to.
      step: the training step, divided into forward and backward, and the update.
      parts: maps each leaf to several values; their total is the sum of the leaf's gradients.
      o: the options of the pipeline.
    """
    count = o.num_micro_batch if o.reduce.op == "mean" else 1
    for n in step.gradients:
        var = step.program.invars[n]
        if n in parts:
            (grad,) = b.call(_mean(count, var.aval.dtype), _total(b, parts[n]))
        else:
            (grad,) = b.call(jnp.zeros_like, var)
        yield n, grad


def _total(b: Builder, parts: Sequence[Atom]) -> Atom:
    return functools.reduce(lambda x, y: b.call(jax.lax.add, x, y)[0], parts)


def _of_gradients(
    b: Builder,
    step: DividedStep,
    grads: Mapping[str, Atom],
    rows: Mapping[str, Sequence[StageRows]],
    arguments: Mapping[Var, Atom],
) -> dict[str, Atom]:
    """Write the step's results that are computed from gradients, such as a gradient norm.

    Args:
      b: the builder to write to.
      step: the training step, divided into forward and backward, and the update.
      grads: maps each leaf to its gradient.
      rows: maps each stack of layers to the rows that stages store as separate parameters.
      arguments: maps the variable of each argument of the step to its value in `b`.

    Returns:
      The values of the results, by name.

    Raises:
      GradientError: a result also depends on a result of the loss function.
    """
    if not step.from_gradients:
        return {}
    inner, outs = step.program.inner, step.program.outvars
    env: dict[Var, Atom] = dict(arguments)
    for n, v in step.boundary.items():
        if n in grads:
            env.setdefault(v, grads[n])
        if n in rows:
            (env[v],) = b.call(concatenate_along(0), *(grads[r.name] for r in rows[n]))
    read: Callable[[Atom], Atom] = lambda a: a if isinstance(a, Literal) else env.get(a, a)
    wanted = values_at(outs, step.from_gradients)
    for eqn in needed_equations(inner.eqns, wanted, list(env)):
        if eqn.primitive is value_and_grad_p:
            raise GradientError(
                f"{', '.join(step.from_gradients)} depends on gradients and on results of the loss "
                "function, but a pipeline computes these at different times; return both, and "
                "combine them outside of the step"
            )
        outputs = b.copy(eqn, list(map(read, eqn.invars)))
        env.update(zip(eqn.outvars, outputs, strict=True))
    return {n: read(outs[n]) for n in step.from_gradients}


@functools.cache
def _mean(count: int, dtype: Any) -> Callable[[jax.Array], jax.Array]:
    return lambda total: (total / count if count > 1 else total).astype(dtype)
