"""dtrans: one training step, rewritten into the programs of a distributed job.

    step (one jaxpr)  --transform-->  a plan: one jaxpr per role  --realise-->  a running job

Trace a step (`trace`), plan it (`pserver`, `nccl2`, `sharding`, `pipeline`, or `DistributeTranspiler` as Paddle wrote
it), run it in this process (`plan.on_mesh()`) or as processes (`Executor`, `plan.on_cluster()`, `dtrans launch`).
"""

from typing import TYPE_CHECKING, Any

from dtrans import checkpoint as checkpoint, errors as errors, io as io, summary as summary
from dtrans.blocks import (
    HashName as HashName,
    PSDispatcher as PSDispatcher,
    RoundRobin as RoundRobin,
    SizeBalanced as SizeBalanced,
    VarBlock as VarBlock,
    slice_variable as slice_variable,
)
from dtrans.collect import collect as collect
from dtrans.collective import CollectivePlan as CollectivePlan
from dtrans.config import DistributeTranspilerConfig as DistributeTranspilerConfig
from dtrans.marks import make_train_step as make_train_step, value_and_grad as value_and_grad
from dtrans.ops import CommunicatorConfig as CommunicatorConfig
from dtrans.overview import VarDistributed as VarDistributed, VarsDistributed as VarsDistributed
from dtrans.pipelined import PipelinePlan as PipelinePlan
from dtrans.plan import PServerPlan as PServerPlan
from dtrans.program import Op as Op, Program as Program, trace as trace
from dtrans.run.connection import connect as connect
from dtrans.run.executor import Executor as Executor
from dtrans.run.roles import Role as Role
from dtrans.scopes import replicate as replicate, split as split
from dtrans.sharded import ShardingPlan as ShardingPlan
from dtrans.transforms import (
    geo_sgd as geo_sgd,
    nccl2 as nccl2,
    pipeline as pipeline,
    pserver as pserver,
    sharding as sharding,
)
from dtrans.transforms.sharding_options import LossScaling as LossScaling
from dtrans.transpiler import (
    DistributeTranspiler as DistributeTranspiler,
    GeoSgdTranspiler as GeoSgdTranspiler,
)
from dtrans.virtual import Cluster as Cluster


__version__ = "0.1.0"


if TYPE_CHECKING:
    from dtrans import optimizers as optimizers


def __getattr__(name: str) -> Any:
    """`dtrans.optimizers`, on first use: it imports optax, which takes as long as all the rest."""
    if name == "optimizers":
        import importlib

        return importlib.import_module("dtrans.optimizers")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
