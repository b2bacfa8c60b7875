"""The end of a pipelined step: gradients of all micro-batches become new parameters.

It is a training step by itself, whose batch are the sums of gradients: summed over the stages that share a leaf,
divided by the number of micro-batches, marked. So what is known of training steps holds for it: replicas reduce as in
nccl2 mode, or keep slices of the optimizer's state as in sharding. Then it is cut by stage
(`dtrans.transforms.placed`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from dtrans._jax import Atom, Literal, Var
from dtrans.cut import GRAD, Cut, cut
from dtrans.marks import mark_p
from dtrans.program import FORWARD, OPTIMIZE, Program
from dtrans.rewrite import Builder, needed
from dtrans.rows import analyse
from dtrans.transforms.nccl2 import rewritten as over_replicas
from dtrans.transforms.pipeline_options import PipelineOptions
from dtrans.transforms.placed import Placed, place
from dtrans.transforms.rank import Layout, rewritten as rank_of
from dtrans.transforms.reducer import Kind
from dtrans.transforms.sharding_options import ShardingOptions
from dtrans.trees import TreeSpec


def shared_sum(leaf: str, stage: int) -> str:
    """The name of the sum of a leaf's gradients that is made in a stage that does not hold the leaf."""
    return f"{leaf}{GRAD}.stage{stage}"


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """The update of a pipelined step.

    Attributes:
      placed: its program, in pieces; it is of one replica.
      layout: how replicas share the state, where they keep slices of it.
    """

    placed: Placed
    layout: Layout | None

    @property
    def program(self) -> Program:
        """The program: (params, opt_state, sums of gradients) -> (params, opt_state, results of gradients)."""
        return self.placed.program

    def slice_axis(self, name: str) -> int | None:
        """The dimension along which replicas have slices of an array of the state; None where each has all of it."""
        cuts = {} if self.layout is None else self.layout.cuts
        return cuts[name].axis if name in cuts else None


def update_of(
    step: Cut, sums: Mapping[str, Any], homes: Mapping[str, int], users: Mapping[str, Sequence[int]], o: PipelineOptions
) -> Update:
    """Plan the update.

    Args:
      step: the step, captured and cut.
      sums: the types of the sums of gradients, by leaf.
      homes: the stage that holds each parameter.
      users: the stages that make gradients of a leaf.
    """
    whole = cut(_step(step, sums, homes, users, o)).with_observed()
    layout = None
    if o.replicas > 1 and o.sharding_stage:
        layout = dataclasses.replace(Layout.of(whole, _sharding(o), {}), groups=homes)
        program = rank_of(whole, layout)
    else:
        program = over_replicas(whole, o.over_replicas, {}, lambda leaf: Kind(group=homes[leaf]))
    analysis = analyse(step.optimize, step.params)
    home: dict[str, int | None] = {n: homes[n] for n in step.params}
    for n in step.opt_state:
        known = n in analysis.inputs
        leaf = analysis.home(analysis.layout(analysis.inputs[n])) if known else None
        home[n] = None if leaf is None else homes[leaf]
    out_at = dict(home)
    for n in program.in_names:
        if n not in home:
            leaf, _, rest = n.partition(GRAD)
            home[n] = int(rest.removeprefix(".stage")) if rest else homes[leaf]
    out_at |= {n: o.model_stages - 1 for n in program.out_names if n not in out_at}
    return Update(place(program, home, out_at, o.model_stages), layout)


def _sharding(o: PipelineOptions) -> ShardingOptions:
    """Sharding of the update over the replicas."""
    over = o.over_replicas
    return ShardingOptions(
        **{f.name: getattr(over, f.name) for f in dataclasses.fields(over)},
        stage=1,
        degree=o.replicas,
        dp_degree=1,
        dp_axis_name="dp",
        amp=None,
        loss_scaling=None,
        overlap=True,
        prefetch=0,
        prefetch_in_loops=0,
        automatic=False,
        segment_broadcast_MB=32.0,
        min_slice_size=o.min_slice_size,
        partition="rows",
    )


def _step(
    step: Cut, sums: Mapping[str, Any], homes: Mapping[str, int], users: Mapping[str, Sequence[int]], o: PipelineOptions
) -> Program:
    """The update as a step: (params, opt_state, sums) -> (params, opt_state, results of gradients)."""
    source = step.program
    inner = source.jaxpr.jaxpr
    vars_of = dict(zip(source.in_names, inner.invars, strict=True))
    b = Builder(source.jaxpr)
    b.role = FORWARD
    b.invars += [vars_of[n] for n in (*step.params, *step.opt_state)]
    names = {shared_sum(n, s) if s != homes[n] else n + GRAD: sums[n] for n in sums for s in users[n]}
    spec = TreeSpec.of(names)
    given = {n: b.input(names[n]) for n in spec.names}
    grads: dict[str, Atom] = {}
    for n in sums:
        total: Atom = given[n + GRAD] if n + GRAD in given else given[shared_sum(n, users[n][0])]
        for s in users[n]:
            other = given.get(shared_sum(n, s))
            if other is not None and other is not total:
                (total,) = b.call(jax.lax.add, total, other)
        divide = o.num_micro_batch if o.reduce == "mean" else 1
        (mean,) = b.call(_mean(divide, vars_of[n].aval.dtype), total)
        (grads[n],) = b.bind(mark_p, mean, vars_of[n], leaf=n)
    b.role = OPTIMIZE
    half = step.optimize
    atoms: list[Atom] = []
    for n in half.in_names:
        atoms.append(grads[n.removesuffix(GRAD)] if n.endswith(GRAD) else vars_of[n])
    found: dict[str, Atom] = {n: vars_of[n] for n in (*step.params, *step.opt_state)}
    found |= zip(half.out_names, b.inline(half.jaxpr, *atoms), strict=True)
    found |= _of_gradients(b, step, grads)
    state = (*source.args[:2], TreeSpec.of({n: source.outputs[n] for n in step.from_gradients}))
    out = TreeSpec(
        jax.tree_util.treedef_tuple([s.treedef for s in state]), tuple(leaf for s in state for leaf in s.leaves)
    )
    return Program(
        f"update of {source.name}",
        b.build([found[n] for n in out.names]),
        (*source.args[:2], spec),
        out,
        tuple(b.roles),
    )


def _of_gradients(b: Builder, step: Cut, grads: Mapping[str, Atom]) -> dict[str, Atom]:
    """Write the results that are computed from gradients."""
    source = step.program
    inner = source.jaxpr.jaxpr
    outs = dict(zip(source.out_names, inner.outvars, strict=True))
    env: dict[Var, Atom] = {v: grads[n] for n, v in step.border.items() if n in grads}
    read: Callable[[Atom], Atom] = lambda a: a if isinstance(a, Literal) else env.get(a, a)
    for i in needed(inner.eqns, [outs[n] for n in step.from_gradients], list(env))[0]:
        eqn = inner.eqns[i]
        env.update(zip(eqn.outvars, b.copy(eqn, [read(a) for a in eqn.invars]), strict=True))
    return {n: read(outs[n]) for n in step.from_gradients}


@functools.cache
def _mean(count: int, dtype: Any) -> Callable[[jax.Array], jax.Array]:
    return lambda total: (total / count if count > 1 else total).astype(dtype)
