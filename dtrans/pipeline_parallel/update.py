"""The end of a pipelined step: gradients of all micro-batches become new parameters.

It is a training step by itself. Its batch are the sums of gradients (summed over the stages that
share a leaf, divided by the number of micro-batches, marked) and the arguments that it reads, such
as a learning rate. So what is known of training steps holds for it: replicas reduce as in nccl2
mode, or keep slices of the optimizer's state as in sharding. Then it is cut by stage
(`dtrans.pipeline_parallel.update_by_stage`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import Atom, Literal, Var
from dtrans.data_parallel.reducer import ReduceSpec, clip_to_norm
from dtrans.data_parallel.transform import write_trainer
from dtrans.errors import GradientError
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import backward_slice
from dtrans.ir.program import FORWARD, OPTIMIZE, Program
from dtrans.ir.pytree import TreeSpec, tuple_of, unused_name
from dtrans.pipeline_parallel.balance import contiguous, part_of_each
from dtrans.pipeline_parallel.options import PipelineOptions
from dtrans.pipeline_parallel.split_stages import Cuts, split_update
from dtrans.pipeline_parallel.stage_scan import StageRows, joined
from dtrans.pipeline_parallel.update_by_stage import PlacedUpdate, grouped, place
from dtrans.rows.analysis import leaves_of_state
from dtrans.step.capture import value_and_grad_p
from dtrans.step.cut import GRAD, Cut, Gradient, cut
from dtrans.step.marks import mark_p
from dtrans.zero.choose_slices import Sliced, slices_of
from dtrans.zero.options import ShardingOptions, Slicing
from dtrans.zero.rank_program import RankLayout, rewritten


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """The update of a pipelined step.

    Attributes:
      placed: the program of one replica's update, in pieces.
      layout: the slices of the state that replicas store; None if each stores all of it.
      sums: each input that is a sum of gradients: its leaf, the stage that computes it, and its
        micro-batch; None for the sum over all.
    """

    placed: PlacedUpdate
    layout: RankLayout | None
    sums: Mapping[str, tuple[str, int, int | None]]

    @property
    def program(self) -> Program:
        """The program: (params, opt_state, sums and arguments) -> (params, opt_state, results of
        gradients)."""
        return self.placed.program

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments of the step, and values of the whole batch, that it reads: the same in all
        stages."""
        return tuple(n for n in self.program.args[2].names if n not in self.sums)

    def slice_axis(self, name: str) -> int | None:
        """Return the dimension of an array's slices over replicas; None if it is whole."""
        cuts = {} if self.layout is None else self.layout.cuts
        return cuts[name].axis if name in cuts else None


def update_of(
    step: Cut,
    sums: Mapping[str, Any],
    homes: Mapping[str, int],
    users: Mapping[str, Sequence[int]],
    cuts: Cuts,
    rows: Mapping[str, Sequence[StageRows]],
    o: PipelineOptions,
) -> Update:
    """Plan the update.

    Args:
      step: the step, captured and cut.
      sums: the types of the sums of gradients, by leaf.
      homes: the stage that holds each parameter.
      users: the stages that make gradients of a leaf.
      cuts: the shards of stages.
      rows: leaves whose rows stages store as leaves of their own.
    """
    types = step.program.inputs
    micros = [None] if o.clip_of_each is None else range(o.num_micro_batch)

    def name_of(n: str, s: int, m: int | None) -> str:
        at, of = "" if s == homes[n] else f".stage{s}", "" if m is None else f".micro{m}"
        return unused_name(f"{n}{GRAD}{at}{of}", types)

    named = {name_of(n, s, m): (n, s, m) for n in sums for s in users[n] for m in micros}
    called = {n: [[name_of(n, s, m) for s in users[n]] for m in micros] for n in sums}
    whole_sums = {n: t.update(shape=types[n].shape) for n, t in sums.items()}
    whole = cut(_step(step, whole_sums, called, rows, o)).with_reported()
    layout = None
    if o.replicas > 1 and o.memory.sharding_stage:
        layout = dataclasses.replace(RankLayout.of(whole, _sharding(o), {}), groups=homes)
        if o.memory.sharding_stage == 2:
            program = _on_sliced_sums(whole, layout, named, called, o)
        else:
            program = rewritten(whole, layout)
    else:
        program = write_trainer(
            whole, o.over_replicas, {}, lambda leaf: ReduceSpec(group=homes[leaf])
        )
    leaf_of = leaves_of_state(step.optimize, step.params)
    home: dict[str, int | None] = {n: homes[n] for n in step.params}
    home |= {n: homes[leaf_of[n]] if n in leaf_of else None for n in step.opt_state}
    out_at = dict(home)
    home |= dict.fromkeys(arguments_of(step)) | {n: stage for n, (_, stage, _) in named.items()}
    out_at |= {n: o.model_stages - 1 for n in program.out_names if n not in out_at}
    placed = place(program, home, out_at, o.model_stages)
    if o.memory.update_groups > 1:
        placed = grouped(
            placed, _apply_groups(step, homes, {n: n for n in step.params} | leaf_of, o)
        )
    return Update(split_update(placed, cuts, named), layout, named)


def arguments_of(step: Cut) -> tuple[str, ...]:
    """Return the arguments that the update, or a result of gradients, reads."""
    of_results = [step.program.outvars[n] for n in step.from_gradients]
    _, leaves = backward_slice(step.program.eqns, of_results, step.boundary.values())
    return tuple(n for n in step.batch if n in step.arguments or step.program.invars[n] in leaves)


def slices_of_sums(step: Cut, o: PipelineOptions) -> dict[str, Sliced]:
    """Return the leaves whose gradients replicas sum as slices, in stage 2 of sharding."""
    if o.replicas == 1:
        return {}
    return dict(
        slices_of(
            step, o.replicas, least=o.memory.min_slice_size, in_layers=False, sliced_in_use=False
        ).leaves
    )


def _apply_groups(
    step: Cut, homes: Mapping[str, int], leaf_of: Mapping[str, str], o: PipelineOptions
) -> dict[str, int]:
    """Assign the state of each stage to update groups: leaves in order, about equal in elements.

    Source: epl/runtime/optimizer_helper.py, which shares out all variables, and leaves most to the
      last group.
    """
    group: dict[str, int] = {}
    for s in range(o.model_stages):
        mine = [n for n in step.optimized if homes[n] == s]
        parts = min(o.memory.update_groups, len(mine))
        if parts > 1:
            starts = contiguous(
                [step.program.inputs[n].size for n in mine], [0.0] * len(mine), parts
            )
            group |= zip(mine, part_of_each(starts, len(mine)), strict=True)
    return {n: group.get(leaf, 0) for n, leaf in leaf_of.items()}


def _on_sliced_sums(
    step: Cut,
    layout: RankLayout,
    sums: Mapping[str, tuple[str, int, int | None]],
    called: Mapping[str, Sequence[Sequence[str]]],
    o: PipelineOptions,
) -> Program:
    """Write the update of a replica that has its slices of the sums of gradients: they are not
    reduced again."""
    leaves = layout.slices.leaves
    held = {n: leaves[leaf] for n, (leaf, _, _) in sums.items() if leaf in leaves}

    def gradients(b: Builder, local: Mapping[str, Atom]) -> Iterator[tuple[str, Atom]]:
        parts = {n: [local[name] for names in of for name in names] for n, of in called.items()}
        return _means(b, step, parts, o)

    return rewritten(step, dataclasses.replace(layout, sums=held), gradients)


def _sharding(o: PipelineOptions) -> ShardingOptions:
    """Sharding of the update over the replicas."""
    over = o.over_replicas
    return ShardingOptions(
        **{f.name: getattr(over, f.name) for f in dataclasses.fields(over)},
        stage=1,
        degree=o.replicas,
        slices=Slicing(
            min_slice_size=o.memory.min_slice_size, prefetch=0, axis_name=over.axis_name
        ),
    )


def _step(
    step: Cut,
    sums: Mapping[str, Any],
    called: Mapping[str, Sequence[Sequence[str]]],
    rows: Mapping[str, Sequence[StageRows]],
    o: PipelineOptions,
) -> Program:
    """Return the update as a step of (params, opt_state, sums and arguments)."""
    source = step.program
    vars_of = source.invars
    b = Builder(source.jaxpr)
    b.role = FORWARD
    b.invars += [vars_of[n] for n in (*step.params, *step.opt_state)]
    arguments = arguments_of(step)
    types = {name: sums[n] for n, parts in called.items() for names in parts for name in names}
    types |= {n: vars_of[n].aval for n in arguments}
    spec = TreeSpec.from_tree(types)
    given = {n: b.input(types[n]) for n in spec.names}
    read = {**vars_of, **{n: given[n] for n in arguments}}
    parts = {
        n: [_total(b, [given[name] for name in names]) for names in of] for n, of in called.items()
    }
    if o.clip_of_each is not None:
        for m in range(o.num_micro_batch):
            made = b.call(clip_to_norm(float(o.clip_of_each)), *(of[m] for of in parts.values()))
            for of, x in zip(parts.values(), made, strict=True):
                of[m] = x
    grads: dict[str, Atom] = {}
    for n, mean in _means(b, step, parts, o):
        (grads[n],) = b.bind(mark_p, mean, vars_of[n], leaf=n)
    b.role = OPTIMIZE
    half = step.optimize
    atoms = [grads[n.leaf] if isinstance(n, Gradient) else read[n] for n in half.in_names]
    found: dict[str, Atom] = {n: vars_of[n] for n in (*step.params, *step.opt_state)}
    found |= zip(half.out_names, b.inline(half.jaxpr, *atoms), strict=True)
    # state may be donated
    found |= {n: b.call(jnp.copy, a)[0] for n, a in found.items() if a in given.values()}
    found |= _of_gradients(b, step, grads, rows, {vars_of[n]: given[n] for n in arguments})
    results = TreeSpec.from_tree({n: source.outputs[n] for n in step.from_gradients})
    out = tuple_of(*source.args[:2], results)
    return Program.written(f"update of {source.name}", b, (*source.args[:2], spec), out, found)


def _means(
    b: Builder, step: Cut, parts: Mapping[str, Sequence[Atom]], o: PipelineOptions
) -> Iterator[tuple[str, Atom]]:
    """Write the gradient of each leaf, from the parts of its sum; a leaf without parts is not read
    by the loss."""
    for n in step.gradients:
        var = step.program.invars[n]
        yield (
            n,
            mean_of(b, parts[n], var.aval.dtype, o)
            if n in parts
            else b.call(jnp.zeros_like, var)[0],
        )


def mean_of(b: Builder, sums: Sequence[Atom], dtype: Any, o: PipelineOptions) -> Atom:
    """Write the gradient of a leaf, of parts of its sum over micro-batches."""
    return b.call(_mean(o.num_micro_batch if o.reduce.op == "mean" else 1, dtype), _total(b, sums))[
        0
    ]


def _total(b: Builder, parts: Sequence[Atom]) -> Atom:
    return functools.reduce(lambda x, y: b.call(jax.lax.add, x, y)[0], parts)


def _of_gradients(
    b: Builder,
    step: Cut,
    grads: Mapping[str, Atom],
    rows: Mapping[str, Sequence[StageRows]],
    arguments: Mapping[Var, Atom],
) -> dict[str, Atom]:
    """Write the results that are computed from gradients; `arguments` by the step's variables.

    Raises:
      GradientError: one that is made of values of the loss function too.
    """
    source = step.program
    inner = source.inner
    outs = source.outvars
    if not step.from_gradients:
        return {}
    env: dict[Var, Atom] = {v: grads[n] for n, v in step.boundary.items() if n in grads} | {
        **arguments
    }
    for n, v in step.boundary.items():
        if n in rows:
            (env[v],) = b.call(joined(0), *(grads[r.name] for r in rows[n]))
    read: Callable[[Atom], Atom] = lambda a: a if isinstance(a, Literal) else env.get(a, a)
    for i in backward_slice(inner.eqns, [outs[n] for n in step.from_gradients], list(env))[0]:
        eqn = inner.eqns[i]
        if eqn.primitive is value_and_grad_p:
            raise GradientError(
                f"{', '.join(step.from_gradients)}: computed from gradients and from what the loss "
                "function returns, "
                "which a pipeline has in other places; return them as two results"
            )
        env.update(zip(eqn.outvars, b.copy(eqn, [read(a) for a in eqn.invars]), strict=True))
    return {n: read(outs[n]) for n in step.from_gradients}


@functools.cache
def _mean(count: int, dtype: Any) -> Callable[[jax.Array], jax.Array]:
    return lambda total: (total / count if count > 1 else total).astype(dtype)
