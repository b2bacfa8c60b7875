"""Choice of the number of stages for `num_stages="auto"`.

The user's scopes determine it. Without scopes it is the number with the fastest step, by the costs
of stages and by the schedule. More stages have less work each, and longer ramps at both ends. Among
numbers that are about as fast (`balance.SLACK`) the least is chosen, since each stage takes a
device.
"""

from __future__ import annotations

import dataclasses

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
    """Return options and schedule for the number of stages that scopes or costs choose.

    Args:
      forward: the forward pass to cut.
      o: the options, for one stage.

    Raises:
      ConfigError: scopes that chunks do not divide, or a policy that needs a number of stages.
    """
    if loops_of(forward):
        forward, _ = split_scans(forward, split_iterations(forward))
    chunks = o.chunks if o.chunks > 1 else None
    timetable = lambda n: schedule(o.schedule, n, o.num_micro_batch, chunks)
    by_scope = scoped_stages(forward.jaxpr)
    if by_scope is not None:
        count = max(by_scope) + 1
        if count % o.chunks:
            raise ConfigError(
                f"num_stages='auto': the model has {count} scopes, which chunks={o.chunks} do not "
                "divide; change chunks or the scopes"
            )
        best = count // o.chunks
    elif o.stages.policy == "REPEATED_LAYERS":
        raise ConfigError(
            "num_stages='auto' and policy='REPEATED_LAYERS', which needs to know how many stages "
            "share the layers; pass the number, or leave out the policy: the default avoids "
            "cutting layers"
        )
    else:
        counts = range(1, _most(forward, o) + 1)
        spans = {n: _makespan(forward, o, timetable(n)) for n in counts}
        limit = SLACK * min(spans.values())
        best = min(n for n, span in spans.items() if span <= limit)
    return dataclasses.replace(o, num_stages=best), timetable(best)


def _most(forward: ForwardPass, o: PipelineOptions) -> int:
    """Return the greatest number of stages that devices and equations allow."""
    work = sum(flops(e) > 0 for e in forward.eqns) or 1
    return max(1, min(_devices(o.stages.cluster, o.replicas), work // o.chunks))


def _devices(cluster: Cluster, replicas: int) -> int:
    """Return the number of devices of a replica, which is the most stages that it can have."""
    if cluster.slices is not None:  # [stage][replica][device]
        return len(cluster.slices)
    return 1 if cluster.layout == "all" else len(cluster.devices or jax.devices()) // replicas


def _makespan(forward: ForwardPass, o: PipelineOptions, timetable: Schedule) -> float:
    """Return the duration of a step, in floating-point operations of a device."""
    rate, batch = o.stages.flops_per_byte, forward.micro_batch_inputs
    stage_of = stages_of(
        forward.jaxpr,
        timetable.num_model_stages,
        policy=o.stages.policy,
        flops_per_byte=rate,
        batch=batch,
    )
    work = [c.flops + rate * c.sends for c in stage_costs(forward.jaxpr, stage_of, batch)]
    # a backward pass computes two products for each product of the forward pass
    return float(timetable.makespan(work, [2 * x for x in work], work))
