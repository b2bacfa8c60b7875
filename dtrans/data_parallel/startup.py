"""Startup program of a trainer process: meet the other processes, run init, broadcast the state."""

from __future__ import annotations

from collections.abc import Sequence

from dtrans._jax import Atom
from dtrans.data_parallel.plan import CollectivePlan
from dtrans.ir.builder import Builder
from dtrans.ir.program import DIST, FORWARD, RPC, Program
from dtrans.ops import broadcast_p, gen_nccl_id_p


def rendezvous_startup(plan: CollectivePlan, trainer_id: int, endpoints: Sequence[str]) -> Program:
    """Return the program that one trainer process runs to get the first state.

    The processes first meet (rendezvous). Each one then runs init. At the end trainer 0 broadcasts
    its state, so that all trainers start equally.

    Args:
      plan: the plan.
      trainer_id: index of the trainer.
      endpoints: addresses of all trainers, `host:port`.

    Source: `DistributeTranspiler._transpile_nccl2`, and `ParallelExecutor::BCastParamsToDevices`
    (Paddle).
    """
    startup = plan.startup
    b = Builder(startup.jaxpr)
    b.invars += startup.inner.invars
    b.role = RPC
    (met,) = b.bind(gen_nccl_id_p, trainer_id=trainer_id, endpoints=tuple(endpoints))
    b.role = FORWARD
    for eqn in startup.eqns:
        b.keep(eqn)
    b.role = DIST
    outs = startup.outvars
    shared: Sequence[Atom] = []
    if outs:
        shared = b.bind(broadcast_p, met, *outs.values(), root=0, over=plan.axis_names)
    values = dict(zip(outs, shared, strict=True))
    return Program.written(f"startup of trainer {trainer_id}", b, startup.args, startup.out, values)
