"""dtrans: one training step, rewritten into the programs of a distributed job.

    step (one jaxpr)  --transform-->  a plan: one jaxpr per role  --realise-->  a running job

Trace a step (`trace`), plan it (`pserver`, `nccl2`, `sharding`, `pipeline`, or `DistributeTranspiler` as Paddle wrote
it), run it in this process (`plan.on_mesh()`) or as processes (`Executor`, `plan.on_cluster()`, `dtrans launch`).
"""

from dtrans import (
    checkpoint as checkpoint,
    epl as epl,
    errors as errors,
    nn as nn,
    optimizers as optimizers,
    paddle as paddle,
)
from dtrans.data_parallel.options import Reduce as Reduce
from dtrans.data_parallel.plan import CollectivePlan as CollectivePlan
from dtrans.data_parallel.transform import nccl2 as nccl2
from dtrans.hosts.on_ray import RayJob as RayJob
from dtrans.hosts.role_table import RoleEntry as RoleEntry, RoleTable as RoleTable, role_table as role_table
from dtrans.ir.program import Op as Op, Program as Program
from dtrans.ops import CommunicatorConfig as CommunicatorConfig
from dtrans.paddle.config import DistributeTranspilerConfig as DistributeTranspilerConfig
from dtrans.paddle.transpiler import DistributeTranspiler as DistributeTranspiler, GeoSgdTranspiler as GeoSgdTranspiler
from dtrans.parameter_server.dispatch import (
    HashName as HashName,
    PSDispatcher as PSDispatcher,
    RoundRobin as RoundRobin,
    SizeBalanced as SizeBalanced,
    VarBlock as VarBlock,
    slice_variable as slice_variable,
)
from dtrans.parameter_server.options import (
    Async as Async,
    BlockPlacement as BlockPlacement,
    DelayCompensation as DelayCompensation,
    Geo as Geo,
    HalfAsync as HalfAsync,
    Sync as Sync,
)
from dtrans.parameter_server.overview import VarDistributed as VarDistributed, VarsDistributed as VarsDistributed
from dtrans.parameter_server.plan import PServerPlan as PServerPlan
from dtrans.parameter_server.tables.options import Rows as Rows
from dtrans.parameter_server.transform import pserver as pserver
from dtrans.pipeline_parallel.device_layout import Cluster as Cluster
from dtrans.pipeline_parallel.options import StageMemory as StageMemory, Stages as Stages
from dtrans.pipeline_parallel.plan import PipelinePlan as PipelinePlan
from dtrans.pipeline_parallel.schedule import Schedule as Schedule
from dtrans.pipeline_parallel.transform import pipeline as pipeline
from dtrans.run.base.feeder import feed as feed
from dtrans.run.base.metrics import MetricsWriter as MetricsWriter
from dtrans.run.base.summary_writer import SummaryWriter as SummaryWriter
from dtrans.run.distributed.connect import connect as connect
from dtrans.run.distributed.role import Role as Role
from dtrans.run.executor import Executor as Executor
from dtrans.run.parameter_server.tables.table_changes import ChangedRows as ChangedRows, TablesReport as TablesReport
from dtrans.step import summary as summary
from dtrans.step.batch_sharing import Batch as Batch, UnevenPart as UnevenPart, shard_batch as shard_batch
from dtrans.step.collect import collect as collect
from dtrans.step.marks import make_train_step as make_train_step, value_and_grad as value_and_grad
from dtrans.step.scopes import local as local, replicate as replicate, split as split
from dtrans.step.trace import trace as trace
from dtrans.step_meter import JobReport as JobReport
from dtrans.verification.by_hand import verify as verify
from dtrans.zero.options import LossScaling as LossScaling, Precision as Precision, Slicing as Slicing
from dtrans.zero.plan import ShardingPlan as ShardingPlan
from dtrans.zero.transform import sharding as sharding


__version__ = "0.1.0"
