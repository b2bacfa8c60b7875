"""Choice of the number of stages for `num_stages="auto"`.

If the model has `dtrans.replicate` scopes, each scope is a stage. Otherwise, the schedule is
simulated for each possible number of stages, with the estimated costs of the stages. With more
stages, each stage has less work, but the pipeline takes longer to fill and to drain. Each stage
also needs a device. A step may take at most `balance.SLACK` times as long as with the fastest
number of stages. The result is the smallest number of stages within this limit.
"""

from __future__ import annotations

import dataclasses
import statistics

import jax

from dtrans.errors import ConfigError
from dtrans.ir.cost import flops
from dtrans.pipeline_parallel.assign_stages import scoped_stages, stage_costs, stages_of
from dtrans.pipeline_parallel.balance import SLACK
from dtrans.pipeline_parallel.device_layout import Cluster
from dtrans.pipeline_parallel.forward_pass import ForwardPass
from dtrans.pipeline_parallel.options import PipelineOptions
from dtrans.pipeline_parallel.schedule import Schedule, schedule
from dtrans.pipeline_parallel.stage_scan import loops_of, split_iterations, split_scans


def auto_stages(forward: ForwardPass, o: PipelineOptions) -> tuple[PipelineOptions, Schedule]:
    """Choose the number of stages; return the options with this number, and the schedule.

    Args:
      forward: the forward pass to divide into stages.
      o: the options. The function ignores `num_stages`.

    Raises:
      ConfigError: the number of scopes is not a multiple of `chunks`. Or the policy is
        REPEATED_LAYERS, which needs a number of stages from the user. Or `Cluster.slices` lists
        devices for another number of stages.
    """
    if loops_of(forward):
        forward, _ = split_scans(forward, split_iterations(forward))
    timetable = lambda n: schedule(o.schedule, n, o.num_micro_batch, o.chunks)
    by_scope = scoped_stages(forward.jaxpr)
    if by_scope is not None:
        count = max(by_scope) + 1
        if count % o.chunks:
            raise ConfigError(
                f"num_stages='auto': the model has {count} scopes, which is not a multiple of "
                f"chunks={o.chunks}; change chunks or the scopes"
            )
        best = count // o.chunks
    elif o.stages.policy == "REPEATED_LAYERS":
        raise ConfigError(
            "num_stages is 'auto', but policy='REPEATED_LAYERS' needs a number of stages; pass the "
            "number, or leave out the policy: by default, stages begin between layers if possible"
        )
    else:
        counts = range(1, _most(forward, o) + 1)
        spans = {n: _makespan(forward, o, timetable(n)) for n in counts}
        limit = SLACK * min(spans.values())
        best = min(n for n, span in spans.items() if span <= limit)
    listed = o.stages.cluster.slices
    if listed is not None and len(listed) != best:
        remedy = f"list devices for {best} stages"
        if by_scope is None:
            remedy += f", or pass num_stages={len(listed)}"
        raise ConfigError(
            f"num_stages='auto' chose {best} stages, but slices of dtrans.Cluster lists devices "
            f"for {len(listed)}; {remedy}"
        )
    return dataclasses.replace(o, num_stages=best), timetable(best)


def _most(forward: ForwardPass, o: PipelineOptions) -> int:
    """Return the largest number of stages to try.

    Each stage needs a device, and an equation with a cost.
    """
    work = sum(flops(e) > 0 for e in forward.eqns) or 1
    return max(1, min(_devices(o.stages.cluster, o.replicas), work // o.chunks))


def _devices(cluster: Cluster, replicas: int) -> int:
    """Return the largest number of stages that the devices can run."""
    if cluster.slices is not None:  # [stage][replica][device]
        return len(cluster.slices)
    if cluster.layout == "all":
        return 1
    return len(cluster.devices or cluster.speeds or jax.devices()) // replicas


def _first_stages(cluster: Cluster, count: int) -> Cluster:
    """Return the cluster with only the first `count` stages in its option `slices`.

    Return the cluster itself if it does not have this option, which lists devices by stage.
    """
    if cluster.slices is None:
        return cluster
    return dataclasses.replace(cluster, slices=cluster.slices[:count])


def _makespan(forward: ForwardPass, o: PipelineOptions, timetable: Schedule) -> float:
    """Return the duration of a simulated step.

    The unit is the time of one floating-point operation on a device with the mean speed of the
    cluster. So durations for different numbers of stages are comparable.
    """
    rate, batch = o.stages.flops_per_byte, forward.micro_batch_inputs
    count = timetable.num_stages
    speeds = _first_stages(o.stages.cluster, count).stage_speeds([1] * count, o.replicas)
    speeds *= timetable.chunks
    mean = statistics.fmean(o.stages.cluster.speeds or speeds)
    stage_of = stages_of(
        forward.jaxpr,
        timetable.num_model_stages,
        policy=o.stages.policy,
        flops_per_byte=rate,
        batch=batch,
        speeds=speeds,
    )
    work, backward = [], []
    costs = stage_costs(forward.jaxpr, stage_of, batch)
    for cost, speed in zip(costs, speeds, strict=True):
        work.append(cost.flops * mean / speed + rate * cost.sends)
        # A backward pass computes two matrix products for each product of the forward pass.
        backward.append(2 * work[-1])
    return float(timetable.makespan(work, backward, work))
