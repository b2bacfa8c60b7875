"""Plans in which the same devices divide both the batch and the parameters of `split` layers.

    layers outside of scopes   a trainer computes its rows of the batch
    layers in split scopes     a trainer computes all rows, with its pieces of the parameters

The user passes `mesh={"data": n, "model": "data"}`. One call of `dtrans.engine.split` writes the
full step for one trainer. The step all-gathers the rows that a split layer reads, and
reduce-scatters the layer's output or cotangent. The first and the last layer may both be split,
such as an embedding and a head. The layers between them still compute a trainer's rows.

Source: `cluster.colocate_split_and_replicate` (EPL).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from dtrans.batch.exact_step import ExactStep, batch_axes, full_type, rows_of
from dtrans.batch.trainer_step import TrainerStep
from dtrans.checks import check_together
from dtrans.data_parallel.options import Options, Reduce
from dtrans.data_parallel.plan import CollectivePlan
from dtrans.errors import BatchError
from dtrans.ir.dataflow import variables
from dtrans.ir.program import Program
from dtrans.step.halves import DividedStep
from dtrans.step.observers import callers_of, check_observers, refuse_calls
from dtrans.step.scopes import in_split_scope
from dtrans.step.startup import match_startup
from dtrans.tensor_parallel.model_axis import ModelState, shard_program, shard_state


def plan_colocated(
    plain: DividedStep,
    startup: Program,
    options: Options,
    replan: Callable[[Options], CollectivePlan],
) -> CollectivePlan:
    """Plan a job with trainers that divide the batch, and parameters of `dtrans.split` layers.

    Args:
      plain: the step, divided at its gradients.
      startup: as in `dtrans.nccl2`.
      options: the options of the data-parallel strategy.
      replan: plans the same step with other options.

    Raises:
      ConfigError: an option needs the separate gradients of each trainer, such as a local clip.
    """
    check_together(
        {
            f"num_micro_batch={options.num_micro_batch}": options.num_micro_batch > 1,
            f"local_sgd={options.local_sgd}": options.local_sgd is not None,
            f"batch={options.batch.kind!r}": not options.batch.exact,
            f"reduce={options.reduce}": options.reduce != Reduce(),
        },
        "all trainers compute the split layers together; leave one of the two out",
        f"mesh={{..., 'model': {options.axis_name!r}}}",
    )
    if options.trainers > 1:
        check_observers(plain.program, plain.observers)
        refuse_calls(plain.observers)
    matched = match_startup(plain.program, startup)
    all_axes = batch_axes(plain, options.batch)
    rows = rows_of(plain.program, all_axes, options.noun) * options.trainers
    # Each trainer gets all rows of arrays that only split layers read, such as labels. Otherwise
    # the engine would also compute arrays with all classes for a trainer's rows, and exchange them.
    outside = {v for e in plain.program.eqns if not in_split_scope(e) for v in variables(e.invars)}
    axes = {n: d for n, d in all_axes.items() if plain.program.invars[n] in outside}
    state = shard_state(plain, options.axis_name, options.trainers)
    part, joined = _trainer(plain, state, all_axes, axes, options)
    merges = {n: "concat" if n in joined else "same" for n in plain.results}

    def for_types(types: Any) -> ExactStep:
        raise BatchError(
            f"{plain.program.name} needs a batch whose size is a multiple of the "
            f"{options.trainers} trainers; pass such a batch"
        )

    shared = ExactStep(plain, "sum", merges, joined, axes, rows, part, False, for_types)
    return CollectivePlan(
        main=plain.program,
        startup=matched,
        program=part.program,
        options=options,
        buckets=(),
        merges=merges,
        callback_notes=callers_of(plain.observers, "", ""),
        replan=replan,
        shared=shared,
        model_state=state,
        device_gathers=tuple((state.axis, x) for x in part.gathers),
    )


def _trainer(
    plain: DividedStep,
    state: ModelState,
    all_axes: Mapping[str, int],
    axes: Mapping[str, int],
    options: Options,
) -> tuple[TrainerStep, dict[str, int]]:
    """Write the step of one trainer.

    Args:
      plain: the step, traced on one trainer's part of the batch.
      state: the parameters and optimizer state that trainers divide.
      all_axes: the dimension of the rows of each batch array that has rows.
      axes: the dimension of the rows of each batch array that trainers divide.
      options: the options of the data-parallel strategy.

    Returns:
      The trainer's step; and the divided dimension of each result that trainers compute in parts.
    """
    source = plain.program

    def full_types(types: Mapping[str, Any], axes: Mapping[str, int] = axes) -> dict[str, Any]:
        return {n: full_type(t, axes.get(n), options.trainers) for n, t in types.items()}

    together = source.specialize_flat([*full_types(source.inputs, all_axes).values()])
    shard = partial(shard_program, state=state, inputs=axes, splits_results=True, rows=all_axes)
    first = shard(together)

    def write(program: Program) -> Program:
        other = shard(program)
        if other.joined != first.joined:
            raise BatchError(
                f"the results that {source.name} computes in parts differ between this batch size "
                "and the traced batch size; trace the step with this batch"
            )
        return other.program

    program = together.rewritten(write, full_types, result=first.program)
    merges: dict[str, str | int] = dict.fromkeys(plain.results, "same") | first.joined
    return TrainerStep(program, merges, (), first.gathers, {}, False), first.joined
