"""Collective jobs of several processes: each trainer is a device of a `jax.distributed` job.

    ClusterTrainers   backend of `plan.on_cluster()`
    SurvivingJob      job that continues when trainers are lost
    ClusterFabric     communication of `Executor`, which runs the job's programs one by one

Every process runs the same compiled program. XLA executes the collectives of this program, with
Gloo on CPUs and with NCCL on GPUs. Trainer 0 broadcasts its first state to all trainers.
`dtrans.run.distributed.connect` connects the processes, and handles their failures.

All trainers must run the same collectives in the same order. They compare their programs at the
first step, and again when the types of the batch change. If the types change on only one trainer,
the others do not take part in the comparison. Then that trainer raises DeadlineError.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from dtrans._jax import ClosedJaxpr, JaxprEqn
from dtrans.data_parallel.plan import CollectivePlan
from dtrans.data_parallel.state import CollectiveState
from dtrans.errors import ConfigError, StateError
from dtrans.ir import fingerprint
from dtrans.ir.program import Program
from dtrans.ir.pytree import all_names
from dtrans.job import Job
from dtrans.ops import broadcast_p, collective_of, exchange_p, recv_p, send_p, trainer_index_p
from dtrans.plan import register_runner
from dtrans.run.base.lowering import per_trainer
from dtrans.run.base.platforms import resolve_for_platform
from dtrans.run.base.spmd import AxisSharding, on_mesh
from dtrans.run.collective.job import CollectiveJob
from dtrans.run.collective.mesh import MeshTrainers, mesh_of
from dtrans.run.collective.trainers import without_padding
from dtrans.run.distributed.connect import connect, connected
from dtrans.run.distributed.elastic import Loss, all_or_none
from dtrans.run.distributed.membership import lost
from dtrans.run.distributed.multihost import (
    all_reduce_sum,
    broadcast,
    check_consistent,
    disagreement,
    local_shard,
    peers,
    to_global_array,
    trainer_devices,
)
from dtrans.run.distributed.role import Role
from dtrans.step_meter import metered
from dtrans.zero.plan import ShardingPlan


logger = logging.getLogger(__name__)


class ClusterTrainers(MeshTrainers):
    """Backend for several processes on one mesh; each process has some of the devices.

    Each process passes its part of a batch: process k of N passes rows k*B/N to (k+1)*B/N of the
    global batch, or a `dtrans.UnevenPart`. The backend splits these rows over the devices of the
    process. 0-d arrays, and the plan's `unsplit_inputs`, must be equal in every process.

    Parameters, state and results are complete arrays on this process's first device.
    """

    gathers = True  # each process needs all results on its own device

    def __init__(self, mesh: Mesh, over: tuple[str, ...]) -> None:
        super().__init__(mesh, over)
        self.run_id, self.here = connected().run, jax.local_device_count() * self.here // mesh.size
        order = list(dict.fromkeys(d.process_index for d in mesh.devices.flat))
        self.part = order.index(jax.process_index()), len(order)
        self.who = f"the {self.here} devices of this process"

    def replicate(self, xs: Sequence[Any]) -> list[Any]:
        return [to_global_array(x, self.state_sharding(AxisSharding())) for x in broadcast(xs)]

    def place_state(self, x: Any, sharding: AxisSharding) -> Any:
        where = self.state_sharding(sharding)
        if isinstance(x, jax.Array) and x.sharding == where:
            return x
        if not sharding.divided:
            return to_global_array(local_piece(x), where)
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, where, lambda index: host[index])

    def place_batch(self, arrays: Sequence[Any], shardings: Sequence[AxisSharding]) -> list[Any]:
        placed = []
        for x, sharding in zip(arrays, shardings, strict=True):
            placed.append(to_global_array(x, self.state_sharding(sharding)))
        return placed

    def check_start(self, startup: ClosedJaxpr) -> None:
        text = fingerprint.canonical_text(startup).encode()
        digest = np.frombuffer(hashlib.sha256(text).digest(), np.uint8)
        (first,) = broadcast([digest])
        # sum over all processes, so that all of them raise the error
        differs = np.zeros(jax.process_count(), np.int32)
        differs[jax.process_index()] = not np.array_equal(np.asarray(first), digest)
        (differs,) = all_reduce_sum(differs)
        if differs.any():
            init_differs = "another init; start all trainers with one script"
            raise disagreement(np.flatnonzero(differs), "the first state", init_differs)

    def check_step(self, program: Program, split: Sequence[str], merges: Mapping[str, str]) -> None:
        check_consistent(program, split, merges)

    def unshard(self, x: Any, shape: tuple[int, ...] | None) -> Any:
        return local_piece(x if shape is None else self._all_gather(x, shape))

    @cached_property
    def _all_gather(self) -> Callable[[jax.Array, tuple[int, ...]], jax.Array]:
        """Compiled function that gathers an array's slices on every device, without padding.

        All processes must call it together.
        """
        replicated = self.state_sharding(AxisSharding())
        return jax.jit(without_padding, static_argnums=1, out_shardings=replicated)

    def to_local(self, tree: Any) -> Any:
        return jax.tree.map(local_piece, tree)

    def step_context(self) -> contextlib.AbstractContextManager[Any]:
        return peers()


class SurvivingJob(Job):
    """Job of several processes that continues if trainers end (`connect(on_trainer_loss="drop")`).

    If trainers end during a step, the others repeat the step from the same state. So a step keeps
    its input state in memory (it does not donate it).

    Attributes:
      plan: the plan for the surviving trainers.
    """

    def __init__(self, plan: CollectivePlan, on_nonfinite: str) -> None:
        self._on_nonfinite = on_nonfinite
        self._job = job_of(plan, donate=False, on_nonfinite=on_nonfinite)

    @property
    def plan(self) -> CollectivePlan:
        return self._job.plan

    def init(self, *args: Any) -> CollectiveState:
        self._check_open()
        return self._run_with_survivors(lambda job: job.init(*args))

    @metered
    def step(self, state: CollectiveState, *batch: Any) -> tuple[Any, ...]:
        self._check_open()
        self._job.check(state)
        # check the batch first, because an error inside the step would leave other trainers waiting
        self._job.arrays(batch)
        return self._run_with_survivors(lambda job: job.step(job.place_state(state), *batch))

    def lower(self, state: CollectiveState, *batch: Any) -> Any:
        return self._job.lower(state, *batch)

    def state_of(self, params: Any, opt_state: Any) -> CollectiveState:
        return self._job.state_of(params, opt_state)

    def params(self, state: CollectiveState) -> Any:
        return self._job.params(state)

    def opt_state(self, state: CollectiveState) -> Any:
        return self._job.opt_state(state)

    def check(self, state: Any) -> None:
        self._job.check(state)

    @property
    def mesh(self) -> Mesh | None:
        """Devices of the surviving trainers."""
        return self._job.mesh

    @property
    def run_id(self) -> str:  # type: ignore[override]
        return self._job.run_id

    @property
    def part(self) -> tuple[int, int]:  # type: ignore[override]
        return self._job.part

    def split_axes(self) -> Mapping[str, int]:
        return self._job.split_axes()

    def sharding_of(self, name: str) -> NamedSharding | None:
        """Return the sharding of an array of the state; see `CollectiveJob.sharding_of`."""
        return self._job.sharding_of(name)

    def _run_with_survivors(self, run: Callable[[CollectiveJob], Any]) -> Any:
        """Run an operation of the job, such as a step; if trainers fail, repeat it without them.

        Args:
          run: function that runs the operation with a job. The survivors' job replaces the first
            job after a failure.
        """
        while True:
            if len(trainer_devices()) != self.plan.trainers:
                self._job = job_of(self.plan, donate=False, on_nonfinite=self._on_nonfinite)
            try:
                with all_or_none():
                    results = run(self._job)
                    # XLA reports a lost trainer when results are awaited, not at dispatch
                    jax.block_until_ready(results)
            except Loss as loss:
                survivors = lost(loss.trainers)
                gone = " and ".join(f"trainer {k}" for k in sorted(loss.trainers))
                logger.warning(
                    "%s: %s ended; continuing with %d of %d trainers",
                    survivors.name,
                    gone,
                    survivors.trainers,
                    jax.process_count(),
                )
                continue
            return results


@register_runner(CollectivePlan, "cluster")
def on_cluster(plan: CollectivePlan, *, donate: bool, on_nonfinite: str = "ignore") -> Job:
    """Return a job of all connected trainers.

    Options of the plan that the user left out get the defaults of JAX's backend.

    Args:
      plan: the plan of the job.
      donate: True to donate the state to each step.
      on_nonfinite: the reaction to infinite or NaN gradients, as in `plan.on_mesh`.

    Raises:
      ConfigError: the plan is for another number of trainers; or trainers store different parts of
        the state, and `connect(on_trainer_loss="drop")` was called.
    """
    # call connected() first: it also adopts a jax.distributed job that the user has started
    drop = connected().on_trainer_loss == "drop"
    devices = trainer_devices()
    if drop and isinstance(plan, ShardingPlan):
        raise ConfigError(
            "a sharded job cannot continue when it loses ranks, because each rank has the only "
            'copy of its slices; connect without on_trainer_loss="drop", and continue from a '
            "checkpoint"
        )
    each = jax.local_device_count()
    devices_each = plan.devices_per_trainer
    if drop and (devices_each > 1 or plan.options.colocated):
        raise ConfigError(
            "a job with a mesh cannot continue when it loses trainers; connect without "
            'on_trainer_loss="drop", and continue from a checkpoint'
        )
    if each % devices_each:
        axes = " x ".join(f"{size} {name}" for name, size in plan.device_axes)
        raise ConfigError(
            f"a trainer has {devices_each} devices ({axes}), but this process has {each}; give "
            f"each process a multiple of {devices_each} devices"
        )
    if plan.device_count not in (len(devices), jax.device_count()):
        count = (
            f"the plan is for {plan.trainers} {plan.options.noun}s, {len(devices)} are connected"
        )
        if devices_each > 1:
            count = f"the plan is for {plan.device_count} devices, {len(devices)} are connected"
        if each > 1:
            count += f": {len(connected().members)} processes with {each} devices each"
        raise ConfigError(count)
    if drop:
        return SurvivingJob(plan, on_nonfinite)
    return job_of(
        resolve_for_platform(plan, jax.default_backend()), donate=donate, on_nonfinite=on_nonfinite
    )


def job_of(plan: CollectivePlan, *, donate: bool, on_nonfinite: str) -> CollectiveJob:
    """Return a job of the connected trainers, which ends with an error if one of them is lost."""
    devices = trainer_devices()
    plan = plan.for_trainers(len(devices) // plan.devices_per_trainer)
    trainers = ClusterTrainers(mesh_of(plan, devices), plan.options.over)
    return CollectiveJob(plan, trainers, donate=donate, on_nonfinite=on_nonfinite)


def local_piece(x: Any) -> Any:
    """Return the part of a global array that is on this process's first device.

    Values of other types are returned unchanged.
    """
    return local_shard(x) if isinstance(x, jax.Array) else x


class ClusterFabric:
    """Communication for `dtrans.Executor`, which runs the programs of an nccl2 job one by one.

    An executor is an alternative to `plan.on_cluster()`: as in Paddle, the user calls
    `Executor.run` for each program.
    """

    def __init__(
        self, *, deadline: float, patience: float, allow_remote: bool, encryption: str | None
    ) -> None:
        self._deadline, self._patience = deadline, patience
        self._allow_remote, self._encryption = allow_remote, encryption
        self._compiled: dict[Program, tuple[Callable[..., Any], list[NamedSharding]]] = {}
        self._last: Program | None = None

    def carry_out(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        """Execute one communication equation of a startup program; return the equation's outputs.

        Args:
          eqn: the equation. It either connects all trainers, or broadcasts the first state.
          values: the equation's inputs.
        """
        if eqn.primitive is broadcast_p:
            connected()
            return broadcast(values[1:], eqn.params["root"])
        endpoints, k = eqn.params["endpoints"], eqn.params["trainer_id"]
        role = Role("trainer", len(endpoints), (), k, endpoints[k], endpoints)
        connect(
            role,
            deadline=self._deadline,
            patience=self._patience,
            allow_remote=self._allow_remote,
            transport_encryption=self._encryption,
        )
        return [None]

    def run(self, program: Program, flat: Sequence[Any]) -> list[Any]:
        """Run a trainer's program; return this trainer's copy of each output."""
        if program is not self._last:
            connected()
            check_consistent(program, _parts(program))
            self._last = program
        if program not in self._compiled:
            self._compiled[program] = self._compile(program)
        compiled, places = self._compiled[program]
        with peers():
            outputs = compiled(*map(to_global_array, flat, places))
        return [local_shard(x) for x in outputs]

    def _compile(self, program: Program) -> tuple[Callable[..., Any], list[NamedSharding]]:
        if jax.local_device_count() != 1:
            raise ConfigError(
                "a program of one trainer runs on one device, but this process has "
                f"{jax.local_device_count()}; start one process for each device "
                "(JAX_LOCAL_DEVICE_IDS, CUDA_VISIBLE_DEVICES), or run the plan as a job, "
                "plan.on_cluster()"
            )
        axes = axes_of(program, connected().trainers)
        mesh = Mesh(np.array(trainer_devices()).reshape([*axes.values()]), tuple(axes))
        parts = _parts(program)
        replicated, rows = AxisSharding(), AxisSharding().sharded_along(0, *axes)
        ins = []
        for name in program.in_names:
            ins.append(rows if name in parts else replicated)
        # Declare outputs as replicated, even if they differ between trainers. Then each process
        # reads the output of its trainer.
        mapped = on_mesh(per_trainer(program), mesh, ins, [replicated] * len(program.out_names))
        return jax.jit(mapped), [NamedSharding(mesh, sharding.spec) for sharding in ins]


def _parts(program: Program) -> list[str]:
    """Return the names of the batch arrays that are split over the trainers."""
    state = set(all_names(program.args[:2]))
    return [n for n, t in program.inputs.items() if n not in state and t.ndim]


def axes_of(program: Program, trainers: int) -> dict[str, int]:
    """Return the named axes over which a program's trainers are arranged, each with its size.

    For example, 8 trainers may form 2 groups of 4 for a hierarchical reduction. The equations of
    the program contain the sizes of all axes except one. The number of trainers determines that
    size.

    Raises:
      StateError: the program is for another number of trainers.
    """
    names: tuple[str, ...] = ()
    sizes: dict[str, int] = {}
    for eqn in program.eqns:
        if not _is_over_trainers(eqn):
            continue
        over = tuple(eqn.params["over"])
        names = max(names, over, key=len)
        if "size" in eqn.params:
            sizes[over[0]] = eqn.params["size"]
    free = [n for n in names if n not in sizes]
    size, odd = divmod(trainers, math.prod(sizes.values()))
    if odd or len(free) != 1:
        raise StateError(
            f"program {program.name} does not fit {trainers} trainers; plan for as many trainers "
            "as are connected"
        )
    return {n: sizes.get(n, size) for n in names}


def is_of_cluster(program: Program) -> bool:
    """Return True if a program communicates only by collectives, which XLA executes.

    Programs with messages to or from parameter servers give False.
    """
    kinds = {e.primitive for e in program.eqns}
    return any(map(_is_over_trainers, program.eqns)) and kinds.isdisjoint(
        (send_p, recv_p, exchange_p)
    )


def _is_over_trainers(eqn: JaxprEqn) -> bool:
    """Return True if a parameter of an equation contains the names of the trainers' axes."""
    return collective_of(eqn) is not None or eqn.primitive is trainer_index_p
