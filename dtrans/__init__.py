"""dtrans: one training step, rewritten into the programs of a distributed job.

    step (one jaxpr)  --transform-->  a plan: one jaxpr per role  ----run----->  a running job

Trace a step with `trace`. Pass the traced step to `sharding` (ZeRO), `nccl2` (data parallelism),
`pserver` (parameter servers) or `pipeline`, which return a plan. Users of Paddle may call
`DistributeTranspiler` instead. Run the plan in this process (`plan.on_mesh()`), or as several
processes (`dtrans launch`, `plan.on_cluster()`, `Executor`).
"""

from dtrans import checkpoint, epl, errors, nn, optimizers, paddle
from dtrans.data_parallel.options import Reduce
from dtrans.data_parallel.plan import CollectivePlan
from dtrans.data_parallel.transform import nccl2
from dtrans.hosts.on_ray import RayJob
from dtrans.hosts.role_table import RoleEntry, RoleTable, role_table
from dtrans.ir.op_list import Op
from dtrans.ir.program import Program
from dtrans.ops import CommunicatorConfig
from dtrans.paddle.config import DistributeTranspilerConfig
from dtrans.paddle.transpiler import DistributeTranspiler, GeoSgdTranspiler
from dtrans.parameter_server.dispatch import (
    HashName,
    PSDispatcher,
    RoundRobin,
    SizeBalanced,
    VarBlock,
    slice_variable,
)
from dtrans.parameter_server.options import (
    Async,
    BlockPlacement,
    DelayCompensation,
    Geo,
    HalfAsync,
    Sync,
)
from dtrans.parameter_server.overview import VarDistributed, VarsDistributed
from dtrans.parameter_server.plan import PServerPlan
from dtrans.parameter_server.snapshot_options import Snapshots
from dtrans.parameter_server.tables.options import Rows
from dtrans.parameter_server.topk import TopK
from dtrans.parameter_server.transform import pserver
from dtrans.pipeline_parallel.device_layout import Cluster
from dtrans.pipeline_parallel.options import StageMemory, Stages
from dtrans.pipeline_parallel.plan import PipelinePlan
from dtrans.pipeline_parallel.schedule import Schedule
from dtrans.pipeline_parallel.transform import pipeline
from dtrans.run.base.feeder import feed
from dtrans.run.base.metrics import MetricsWriter
from dtrans.run.base.summary_writer import SummaryWriter
from dtrans.run.distributed.connect import connect
from dtrans.run.distributed.role import Role
from dtrans.run.executor import Executor
from dtrans.run.parameter_server.tables.job_tables import ChangedRows, TablesReport
from dtrans.run.role_jobs.log_replay import replay
from dtrans.step import summary
from dtrans.step.batch_sharing import Batch, UnevenPart, shard_batch
from dtrans.step.collect import collect
from dtrans.step.marks import make_train_step, value_and_grad
from dtrans.step.scopes import local, replicate, split
from dtrans.step.trace import trace
from dtrans.step_meter import JobReport
from dtrans.verification.user_shard_map import verify
from dtrans.zero.options import LossScaling, Precision, Slicing
from dtrans.zero.plan import ShardingPlan
from dtrans.zero.transform import sharding


__version__ = "0.1.0"

__all__ = [
    "Async",
    "Batch",
    "BlockPlacement",
    "ChangedRows",
    "Cluster",
    "CollectivePlan",
    "CommunicatorConfig",
    "DelayCompensation",
    "DistributeTranspiler",
    "DistributeTranspilerConfig",
    "Executor",
    "Geo",
    "GeoSgdTranspiler",
    "HalfAsync",
    "HashName",
    "JobReport",
    "LossScaling",
    "MetricsWriter",
    "Op",
    "PSDispatcher",
    "PServerPlan",
    "PipelinePlan",
    "Precision",
    "Program",
    "RayJob",
    "Reduce",
    "Role",
    "RoleEntry",
    "RoleTable",
    "RoundRobin",
    "Rows",
    "Schedule",
    "ShardingPlan",
    "SizeBalanced",
    "Slicing",
    "Snapshots",
    "StageMemory",
    "Stages",
    "SummaryWriter",
    "Sync",
    "TablesReport",
    "TopK",
    "UnevenPart",
    "VarBlock",
    "VarDistributed",
    "VarsDistributed",
    "checkpoint",
    "collect",
    "connect",
    "epl",
    "errors",
    "feed",
    "local",
    "make_train_step",
    "nccl2",
    "nn",
    "optimizers",
    "paddle",
    "pipeline",
    "pserver",
    "replay",
    "replicate",
    "role_table",
    "shard_batch",
    "sharding",
    "slice_variable",
    "split",
    "summary",
    "trace",
    "value_and_grad",
    "verify",
]


def __dir__() -> list[str]:
    """Return the public names, without subpackages."""
    return sorted([*__all__, "__version__"])
