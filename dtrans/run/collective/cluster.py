"""nccl2 mode as processes: each trainer is a device of a `jax.distributed` job, most often the one of its process.

    ClusterTrainers     a plan over the job; made by `plan.on_cluster()`
    SurvivingTrainers   the same, that goes on when trainers are lost
    ClusterFabric       the programs of the job, one by one; `Executor` has it

Every process runs the same compiled program, and XLA carries out the reductions: with Gloo on CPUs, with NCCL on GPUs.
The first state is trainer 0's, whatever the others made. How processes are connected, and what becomes of the job when
one ends, is in `dtrans.run.distributed.connect`.

All trainers must reduce the same things in the same order. That they mean to is checked at the first step, and whenever
the parts of the batch get other types; a trainer that does so alone waits for the others in vain, up to the deadline.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from dtrans._jax import JaxprEqn
from dtrans.data_parallel.plan import CollectivePlan
from dtrans.data_parallel.state import CollectiveState
from dtrans.errors import BatchError, ConfigError, StateError
from dtrans.ir.program import Program
from dtrans.ops import all_gather_p, all_reduce_p, broadcast_p, reduce_scatter_p, trainer_index_p
from dtrans.plan import realises
from dtrans.run.base.batch import batch_arrays
from dtrans.run.base.lowering import per_trainer
from dtrans.run.collective.mesh import MeshTrainers
from dtrans.run.distributed.connect import connect, connected
from dtrans.run.distributed.elastic import Loss, all_or_none
from dtrans.run.distributed.membership import lost
from dtrans.run.distributed.multihost import (
    broadcast,
    check_consistent,
    local_shard,
    peers,
    to_global_array,
    trainer_devices,
)
from dtrans.run.distributed.role import Role


OVER_AXES = (all_reduce_p, reduce_scatter_p, all_gather_p, trainer_index_p)
logger = logging.getLogger(__name__)


class ClusterTrainers(MeshTrainers):
    """Trainers that are processes; made by `plan.on_cluster()`, in each of them.

    As `plan.on_mesh()`, but for the batch: each process gives its own part to `step`. Parts are of one size; process k
    of N has rows k*B/N to (k+1)*B/N of the global batch, and splits them over its devices if it has several. 0-d
    arrays, and those that the plan has as `unsplit_inputs`, must be the same in every process. Parameters, state and
    results come whole, as arrays of this process's first device.
    """

    def __init__(self, plan: CollectivePlan, *, donate: bool = True) -> None:
        devices = trainer_devices()
        if plan.trainers not in (len(devices), jax.device_count()):
            each = jax.local_device_count()
            many = f": {len(connected().members)} processes with {each} devices each" if each > 1 else ""
            raise ConfigError(f"the plan is for {plan.trainers} trainers, {len(devices)} are connected{many}")
        super().__init__(plan.for_trainers(len(devices)), devices, donate=donate)

    @property
    def run_id(self) -> str:
        return connected().run

    def step(self, state: CollectiveState, *batch: Any) -> tuple[Any, ...]:
        """One step on this trainer's part of the batch: (state, loss[, aux]), merged over all trainers.

        Raises:
          BatchError: arrays of the batch that differ in their number of rows, or parts of trainers that do.
          StateError: not a state of this job, or one that was already stepped from, and was donated.
          PeerError: another trainer has ended, or trains something else.
          DeadlineError: parts of another shape, and a trainer that goes on with those of before.
        """
        with peers():
            state, *results = super().step(state, *batch)
        return (state, *jax.tree.map(own_of, results))

    def params(self, state: CollectiveState) -> Any:
        """The parameters, as the pytree that they were given in."""
        return jax.tree.map(own_of, super().params(state))

    def opt_state(self, state: CollectiveState) -> Any:
        """The optimizer's state, as the pytree that it was given in."""
        return jax.tree.map(own_of, super().opt_state(state))

    def _start(self, startup: Program, args: list[Any]) -> list[Any]:
        return [to_global_array(x, self._everywhere) for x in broadcast(startup.compiled(*args))]

    def _start_extra(self, extra: dict[str, Any]) -> dict[str, Any]:
        return {n: to_global_array(x, self._everywhere) for n, x in extra.items()}

    def _here(self, state: CollectiveState) -> CollectiveState:
        return jax.tree.map(
            lambda x: to_global_array(local_shard(x) if isinstance(x, jax.Array) else x, self._everywhere), state
        )

    def _arrays(self, batch: Sequence[Any]) -> list[Any]:
        parts = batch_arrays(self._specs, batch, self.plan.main.inputs)
        each = jax.local_device_count()
        for name, x in zip(self._names, parts, strict=True):
            if name in self._split and x.shape[0] % each:
                raise BatchError(
                    f"{name} has {x.shape[0]} rows, which the {each} devices of this process do not divide"
                )
        return [to_global_array(x, where) for x, where in zip(parts, self._places, strict=True)]

    def _check(self, state: CollectiveState, arrays: list[Any]) -> None:
        super()._check(state, arrays)
        program = self._program(state, arrays)
        check_consistent(program, self._split, self.plan.merges)

    def _told(self, x: Any, way: str) -> Any:
        return x if way == "same" else jax.lax.all_gather(x, self.plan.axis_names, tiled=way == "concat")

    def _spec(self, way: str) -> P:
        return P()  # every process has the whole


class SurvivingTrainers(ClusterTrainers):
    """The same, that goes on with the trainers that are left; made where `connect(on_trainer_loss="drop")` was said.

    Nothing is donated: a step that fails is taken again, from the same state. `plan` is that of those left.
    """

    def __init__(self, plan: CollectivePlan) -> None:
        super().__init__(plan, donate=False)

    def step(self, state: CollectiveState, *batch: Any) -> tuple[Any, ...]:
        """As `ClusterTrainers.step`; with the trainers that are left, when some have ended."""
        self._refuse(state)
        self._shared(self._arrays(batch))  # a batch is refused here, where nobody waits for this trainer yet
        return self._with_those_left(lambda: super(SurvivingTrainers, self).step(self._here(state), *batch))

    def _start(self, startup: Program, args: list[Any]) -> list[Any]:
        return self._with_those_left(lambda: super(SurvivingTrainers, self)._start(startup, args))

    def _with_those_left(self, run: Callable[[], Any]) -> Any:
        """What a function of all trainers gives; anew, with those left, when some have ended meanwhile."""
        while True:
            devices = trainer_devices()
            if len(devices) != self.plan.trainers:
                self._build(self.plan.for_trainers(len(devices)), devices, donate=False)
            try:
                with all_or_none():
                    made = run()
                    jax.block_until_ready(made)
            except Loss as loss:
                left = lost(loss.trainers)
                gone = " and ".join(f"trainer {k}" for k in sorted(loss.trainers))
                count = jax.process_count()
                logger.warning("%s: %s ended; going on with %d of %d", left.name, gone, left.trainers, count)
                continue
            return made


@realises(CollectivePlan, "cluster")
def cluster_job(plan: CollectivePlan, *, donate: bool) -> ClusterTrainers:
    """What `plan.on_cluster()` makes."""
    if connected().on_trainer_loss == "drop":
        return SurvivingTrainers(plan)
    return ClusterTrainers(plan, donate=donate)


def own_of(x: Any) -> Any:
    """This process's piece of an array; what is none, as it is."""
    return local_shard(x) if isinstance(x, jax.Array) else x


class ClusterFabric:
    """What one process needs to run the programs of an nccl2 job; arguments are those of `Executor`."""

    def __init__(self, *, deadline: float, allow_remote: bool) -> None:
        self._deadline = deadline
        self._allow_remote = allow_remote
        self._compiled: dict[Program, tuple[Callable[..., Any], list[NamedSharding]]] = {}
        self._last: Program | None = None

    def carry_out(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        """The outputs of one equation of a startup program."""
        if eqn.primitive is broadcast_p:
            connected()
            return broadcast(values[1:], eqn.params["root"])
        endpoints, k = eqn.params["endpoints"], eqn.params["trainer_id"]
        role = Role("trainer", len(endpoints), (), k, endpoints[k], endpoints)
        connect(role, deadline=self._deadline, allow_remote=self._allow_remote)
        return [None]

    def run(self, program: Program, flat: Sequence[Any]) -> list[Any]:
        """The outputs of a trainer's program: results as far as they are reduced, else this trainer's own part."""
        if program is not self._last:
            connected()
            check_consistent(program, _parts(program))
            self._last = program
        if program not in self._compiled:
            self._compiled[program] = self._compile(program)
        compiled, places = self._compiled[program]
        with peers():
            made = compiled(*map(to_global_array, flat, places))
        return [local_shard(x) for x in made]

    def _compile(self, program: Program) -> tuple[Callable[..., Any], list[NamedSharding]]:
        if jax.local_device_count() != 1:
            raise ConfigError(
                f"a program of one trainer runs on one device, this process sees {jax.local_device_count()}: start one "
                "process for each, and show it its own (JAX_LOCAL_DEVICE_IDS, CUDA_VISIBLE_DEVICES), or run the plan "
                "as a job, plan.on_cluster()"
            )
        axes = axes_of(program, connected().trainers)
        mesh = Mesh(np.array(trainer_devices()).reshape([*axes.values()]), tuple(axes))
        parts = _parts(program)
        specs = [P(tuple(axes)) if n in parts else P() for n in program.in_names]
        # every output is in the place of one that is the same on all: a trainer reads its own
        one = per_trainer(program)
        mapped = jax.shard_map(lambda *xs: one(*xs), mesh=mesh, in_specs=tuple(specs), out_specs=P(), check_vma=False)
        return jax.jit(mapped), [NamedSharding(mesh, s) for s in specs]


def _parts(program: Program) -> list[str]:
    """The arrays of a program that trainers have parts of."""
    held = {n for spec in program.args[:2] for n in spec.names}
    return [n for n, t in program.inputs.items() if n not in held and t.ndim]


def axes_of(program: Program, trainers: int) -> dict[str, int]:
    """The axes that a program's trainers are on, with their sizes.

    Raises:
      StateError: it is for another number of trainers.
    """
    eqns = [e for e in program.jaxpr.jaxpr.eqns if e.primitive in OVER_AXES]
    names = max((tuple(e.params["over"]) for e in eqns), key=len)
    known = {e.params["over"][0]: e.params["size"] for e in eqns if "size" in e.params}
    free = [n for n in names if n not in known]
    rest, odd = divmod(trainers, math.prod(known.values()))
    if odd or len(free) != 1:
        raise StateError(f"program {program.name} does not fit {trainers} trainers")
    return {n: known.get(n, rest) for n in names}


def is_of_cluster(program: Program) -> bool:
    """Whether a program reduces over trainers, and so is compiled as a whole."""
    return any(e.primitive in OVER_AXES for e in program.jaxpr.jaxpr.eqns)
