"""The startup program of a trainer in nccl2 mode: meet the others, make the first state, take trainer 0's."""

from __future__ import annotations

from collections.abc import Sequence

from dtrans.data_parallel.plan import CollectivePlan
from dtrans.ir.builder import Builder
from dtrans.ir.program import DIST, FORWARD, RPC, Program
from dtrans.ops import broadcast_p, gen_nccl_id_p


def joining_startup(plan: CollectivePlan, trainer_id: int, endpoints: Sequence[str]) -> Program:
    """The startup program of one trainer: the arguments of init -> (params, opt_state), the same on every trainer.

    Source: `DistributeTranspiler._transpile_nccl2`, and `ParallelExecutor::BCastParamsToDevices` (Paddle).
    """
    startup = plan.startup
    inner = startup.inner
    b = Builder(startup.jaxpr)
    b.invars += inner.invars
    b.role = RPC
    (met,) = b.bind(gen_nccl_id_p, trainer_id=trainer_id, endpoints=tuple(endpoints))
    b.role = FORWARD
    for eqn in inner.eqns:
        b.keep(eqn)
    b.role = DIST
    shared = b.bind(broadcast_p, met, *inner.outvars, root=0, over=plan.axis_names) if inner.outvars else []
    return Program(
        f"startup of trainer {trainer_id}", b.build(shared), startup.args, startup.out, tuple(b.roles), b.labels
    )
