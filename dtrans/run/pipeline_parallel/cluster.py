"""Pipeline in several processes. Each process runs some stages, with all replicas of these stages.

The processes are the trainers of `dtrans.connect()`. With N processes and S stages, process k runs
the stages k*S/N to (k+1)*S/N - 1. All processes have the same list of instructions, and each
process executes the instructions of its stages. Processes send values to each other over
channels (`dtrans.run.pipeline_parallel.p2p`).

Each process calls `step` with its part of the batch: process k has rows k*B/N to (k+1)*B/N - 1 of a
global batch of B rows. But a stage reads arrays of the global batch. So each process sends its part
of an array to the processes with stages that read the array. For example, tokens go to the first
process, and labels to the last. Some plans compute values of the full batch before the
micro-batches, such as a number of valid tokens. Process 0 computes these *precomputed* values, and
sends them to the processes that read them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans.errors import BatchError, ConfigError, PeerError
from dtrans.ir.program import Program
from dtrans.ir.pytree import is_under
from dtrans.pipeline_parallel.plan import PipelinePlan
from dtrans.plan import register_runner
from dtrans.protocol import wire
from dtrans.protocol.collective.arrivals import ValueType
from dtrans.run.base.batch import Share, global_types, share_of
from dtrans.run.base.spmd import AxisSharding, Function
from dtrans.run.distributed.connect import connected
from dtrans.run.distributed.membership import Membership
from dtrans.run.distributed.multihost import PARTS_DIFFER, check_consistent
from dtrans.run.pipeline_parallel.instructions import StepProgram, Transfer
from dtrans.run.pipeline_parallel.job import PipelineJob
from dtrans.run.pipeline_parallel.p2p import P2PChannels, on_host
from dtrans.run.pipeline_parallel.processes import OneProcess
from dtrans.run.pipeline_parallel.stage_devices import OnDevices, OneDevice, StageBackend
from dtrans.run.pipeline_parallel.stage_placement import StagePlacement
from dtrans.run.pipeline_parallel.state import StateLayout
from dtrans.run.pipeline_parallel.value_types import value_type, value_types


# Numbers for the jobs of this process. All processes create their jobs in the same order, so the
# numbers agree.
_jobs = itertools.count()
PRECOMPUTER = 0  # the process that computes precomputed values: the process of stage 0


@register_runner(PipelinePlan, "cluster")
def cluster_job(plan: PipelinePlan, *, donate: bool) -> PipelineJob:
    """Return the job of this process in a pipeline over the processes of `dtrans.connect()`.

    The job differs from the job of `plan.on_mesh()` in three ways. `step` takes this process's part
    of the batch, and returns all results in every process. A state contains only the arrays of this
    process's stages. `params` and `opt_state` gather the arrays of all processes, so all processes
    must call these methods together.
    """
    cluster = connected()
    stages, count, me = plan.options.num_stages, cluster.trainers, cluster.trainer_id
    if cluster.on_trainer_loss == "drop":
        raise ConfigError(
            "on_trainer_loss is 'drop', but a pipeline cannot continue without the stages of a "
            "lost process; leave the option out"
        )
    if stages % count:
        raise ConfigError(
            f"num_stages is {stages}; expected a multiple of {count}, the number of processes"
        )
    each, local, replicas = stages // count, jax.local_devices(), plan.options.replicas
    counts = plan.model.device_counts
    shards = counts[me * each :][:each]
    needed = sum(shards) * replicas
    if len(local) < needed:
        raise ConfigError(
            f"trainer {me} has {len(local)} devices, but its {each} stages need {needed} for "
            f"{replicas} replicas; start it with more devices, or plan fewer replicas"
        )
    # The stages are known, so the order of these devices needs no speeds.
    layout = dataclasses.replace(plan.options.stages.cluster, devices=local, speeds=None)
    grids = layout.virtual_devices(shards, replicas)
    mine = frozenset(k for k in range(plan.options.model_stages) if plan.device_of(k) // each == me)
    backend = _LocalDevices(grids, me * each, counts)
    return PipelineJob(ConnectedProcesses(StagePlacement(plan, backend, mine, donate), cluster))


class ConnectedProcesses(OneProcess):
    """One process of a pipeline job of several processes.

    Args:
      at: the devices of this process's stages.
      cluster: this process's membership of the distributed job.

    Raises:
      PeerError: another process runs a different pipeline.
      DeadlineError: another process does not create this job in time.
    """

    def __init__(self, at: StagePlacement, cluster: Membership) -> None:
        super().__init__(at)
        self.part = self.me, self.count = cluster.trainer_id, cluster.trainers
        self.run_id, self.saves = cluster.run, self.me == 0
        o = at.plan.options
        self._unsplit = {n for n in at.plan.batch if is_under(n, o.batch.unsplit_inputs)}
        # options and parts of the plan that must be equal in all processes
        self._same = {f.name: repr(getattr(o, f.name)) for f in dataclasses.fields(o)}
        self._same |= at.plan.model.merges
        self._same["orders"] = repr(at.plan.schedule.orders)
        self._same["stages"] = str(at.plan.model.stage_of)
        check_consistent(at.plan.main, (), self._same)
        self.state_types = StateLayout(at).types
        self._links = P2PChannels(cluster, str(next(_jobs)))
        self._types: dict[StepProgram, Mapping[int, ValueType]] = {}
        self._types_of_step: Mapping[int, ValueType] = {}  # the entry of `_types` for this step
        # The name of a message consists of a round and a key in the round. Each step is a round.
        # Each call of `params` or `opt_state` is also a round.
        self._round = 0

    def process_of(self, stage: int) -> int:
        """Return the process that runs a stage."""
        return self.at.plan.device_of(stage) // (self.at.plan.options.num_stages // self.count)

    def check_reorder(self, name: str) -> None:
        raise ConfigError(
            f"job.scheduled({name!r}) works only in jobs of one process; use "
            f"plan.scheduled({name!r}).on_cluster()"
        )

    def close(self) -> None:
        self._links.close()

    # -- batches ---------------------------------------------------------------------------------

    def global_types(self, arrays: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        split = {n: x.shape[0] for n, x in arrays.items() if isinstance(self._share(n, x), int)}
        shapes = "; ".join(f"{n} {x.shape} {x.dtype}" for n, x in arrays.items())
        rows = next(iter(split.values()), 0)
        check_consistent(self.at.plan.main, split, {**self._same, "batch": shapes}, rows=rows)
        o = self.at.plan.options
        for n, rows in split.items():
            if rows * self.count % o.parts:
                raise BatchError(
                    f"{n} has {rows} rows in each of {self.count} processes, together "
                    f"{rows * self.count}; expected a multiple of {o.parts} (num_micro_batch="
                    f"{o.num_micro_batch} times replicas={o.replicas})"
                )
        types = global_types([(x, self._share(n, x)) for n, x in arrays.items()], self.count)
        return dict(zip(arrays, types, strict=True))

    def check_program(
        self, program: StepProgram, types: Mapping[str, jax.ShapeDtypeStruct]
    ) -> None:
        check_consistent(self.at.plan.main, (), {**self._same, "program": "\n".join(program.lines)})
        self._types[program] = value_types(program, types)

    def gather_batch(
        self, program: StepProgram, arrays: Mapping[str, Any], state: Mapping[tuple[int, str], Any]
    ) -> Mapping[str, Any]:
        self._round += 1
        self._types_of_step = self._types[program]
        readers: dict[str, set[int]] = {}
        for place, n in program.inputs:
            readers.setdefault(n, set()).add(self.process_of(place))
        for n in () if program.values is None else program.values.read:
            readers.setdefault(n, set()).add(PRECOMPUTER)

        # Send this process's parts. Instructions and results use the smaller keys.
        keys = itertools.count(len(program.instructions) + len(program.results))
        split: dict[str, int] = {}
        for n, x in arrays.items():
            if not isinstance(self._share(n, x), int):
                continue
            split[n] = next(keys)
            others = readers.get(n, set()) - {self.me}
            part = x
            if others and isinstance(x, np.ndarray):
                # Sending is asynchronous. The array is copied, because the caller may write to it.
                part = np.array(x)
            for k in others:
                self._links.send(k, self._round, split[n], part)
        self._check_arguments(arrays, keys)

        # Receive the other processes' parts of the arrays that this process's stages read.
        gathered = dict(arrays)
        for n, key in split.items():
            if self.me in readers.get(n, ()):
                mine = arrays[n]
                parts = [self._receive_part(k, key, n, mine) for k in range(self.count)]
                gathered[n] = jnp.concatenate(parts)
        if program.values is None:
            return gathered
        return gathered | self._precomputed(program, program.values, gathered, state, readers, keys)

    def _precomputed(
        self,
        program: StepProgram,
        values: Program,
        arrays: Mapping[str, Any],
        state: Mapping[tuple[int, str], Any],
        readers: Mapping[str, Collection[int]],
        keys: Iterator[int],
    ) -> dict[str, Any]:
        """Return the values of the full batch that stages of this process read.

        Process 0 computes these values before the micro-batches, and sends each one to the
        processes that read it.

        Args:
          program: the step.
          values: the program that computes the values.
          arrays: the arrays of the batch. An array that this process reads is complete.
          state: the parameters and optimizer state that this process stores. The key of an array is
            (index of the stored copy, name).
          readers: maps each value's name to the processes that read the value.
          keys: unused keys for messages. All processes use them in the same order.
        """
        # Send the state that the values depend on to the process that computes the values.
        gathered = dict(state)
        for n in values.args[-1].names:
            place, key = self.at.first_place(n), next(keys)
            owner = self.process_of(place)
            if self.me == owner != PRECOMPUTER:
                self._links.send(PRECOMPUTER, self._round, key, state[place, n])
            elif self.me == PRECOMPUTER != owner:
                kind = value_type(self.state_types[n])
                gathered[place, n] = self._receive(owner, key, kind, n)

        numbered = dict(zip(values.out_names, keys, strict=False))
        found: dict[str, Any] = {}
        if self.me == PRECOMPUTER:
            found = self.precompute(program, arrays, gathered)
            for n, key in numbered.items():
                for k in {*readers.get(n, ())} - {self.me}:
                    self._links.send(k, self._round, key, found[n])
            return found
        for n, key in numbered.items():
            if self.me in readers.get(n, ()):
                kind = value_type(values.outputs[n])
                found[n] = self._receive(PRECOMPUTER, key, kind, "a precomputed value")
        return found

    def _check_arguments(self, arrays: Mapping[str, Any], keys: Iterator[int]) -> None:
        """Check that arguments of the update have equal values in all processes.

        Args:
          arrays: the batch that the user passed to `step` in this process.
          keys: unused keys for messages. All processes use them in the same order.

        Raises:
          PeerError: a process passed a different value.
        """
        others = [k for k in range(self.count) if k != self.me]
        numbered = dict(zip(self.at.plan.arguments, keys, strict=False))
        for n, key in numbered.items():
            for k in others:
                self._links.send(k, self._round, key, arrays[n])
        for n, key in numbered.items():
            mine = on_host(arrays[n])[0]
            for k in others:
                x = on_host(self._receive(k, key, value_type(arrays[n]), n))[0]
                if x.tobytes() != mine.tobytes():
                    one, two = sorted([(self.me, mine.tolist()), (k, x.tolist())])
                    raise PeerError(
                        f"{n} is {wire.brief(one[1])} on trainer {one[0]}, but "
                        f"{wire.brief(two[1])} on trainer {two[0]}; pass equal values in all "
                        "processes, because the update on each stage reads them"
                    )

    def _receive_part(self, origin: int, key: int, name: str, mine: Any) -> Any:
        """Receive another process's part of a batch array.

        Return `mine` if `origin` is this process.

        Args:
          origin: the process that sends its part.
          key: the key of the message.
          name: the name of the array.
          mine: this process's part of the array. The received part must have the same shape.
        """
        if origin == self.me:
            return mine
        x = self._receive(origin, key, value_type(mine, any_size=True), name)
        if x.shape != mine.shape:
            raise BatchError(
                f"{PARTS_DIFFER}; {name} has shape {list(x.shape)} on trainer {origin}, but "
                f"{list(mine.shape)} on trainer {self.me}; split batches with "
                "job.shard_batch(*batch)"
            )
        return x

    def _share(self, name: str, x: Any) -> Share:
        """Return the rule by which processes divide a batch array, for messages.

        The result is the dimension of the rows, "replicated" if the array is not divided, or "key"
        for a PRNG key.
        """
        return share_of(name, x, self.count, self._unsplit)

    # -- a step ----------------------------------------------------------------------------------

    def move(self, number: int, ins: Transfer, env: list[Any]) -> None:
        origin, target = self.process_of(ins.origin), self.process_of(ins.stage)
        if origin == target == self.me:
            super().move(number, ins, env)
        elif origin == self.me:
            self._links.send(target, self._round, number, env[ins.source])
        elif target == self.me:
            what = f"{ins.label} for stage {ins.stage}"
            x = self._receive(origin, number, self._types_of_step[number], what)
            env[ins.target] = self.at.put(ins, x)

    def share_results(self, program: StepProgram, env: list[Any]) -> None:
        for key, (n, (slot, _, stage)) in enumerate(
            program.results.items(), len(program.instructions)
        ):
            kind = self._types_of_step[key]
            env[slot] = self._broadcast(self.process_of(stage), key, kind, n, env[slot])

    def gather_state(self, names: Sequence[str], arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        self._round += 1
        found = {}
        for key, n in enumerate(names):
            origin, kind = self.process_of(self.at.first_place(n)), value_type(self.state_types[n])
            x = self._broadcast(origin, key, kind, n, arrays.get(n))
            found[n] = jax.device_put(x, jax.local_devices()[0])
        return found

    def _receive(self, origin: int, key: int, kind: ValueType, what: str) -> Any:
        """Receive a value of the current step from another process; see `P2PChannels.receive`."""
        return self._links.receive(origin, self._round, key, kind, what)

    def _broadcast(self, origin: int, key: int, kind: ValueType, name: str, x: Any) -> Any:
        """Send a value from one process to the other processes; return the value in every process.

        Args:
          origin: the process that sends the value.
          key, kind, name: the key, type and name of the value.
          x: the value in process `origin`. Other processes ignore this argument.
        """
        if origin != self.me:
            return jax.device_put(self._receive(origin, key, kind, name))
        for k in range(self.count):
            if k != self.me:
                self._links.send(k, self._round, key, x)
        return x


class _LocalDevices(StageBackend):
    """Backend for the stages of one process, in a job of several processes.

    Every process writes the instructions of all stages, but executes only those of its
    stages. So this backend ignores values of other stages.

    Args:
      grids: the devices of each stage of this process.
      first: the first stage of this process.
      shards: for each stage, the number of devices of one replica. Stages on the same devices have
        one entry together.
    """

    def __init__(self, grids: Sequence[Any], first: int, shards: Sequence[int]) -> None:
        super().__init__(len(grids[0]))
        self._on, self._first, self._each = OnDevices(grids), first, len(grids)
        self._shards, self._stages = shards, len(shards)

    def _local(self, stage: int) -> int | None:
        """Return the index of a stage among this process's stages; None for other stages."""
        at = stage % self._stages - self._first
        if 0 <= at < self._each:
            return at
        return None

    def put(self, x: Any, stage: int, kind: AxisSharding) -> Any:
        at = self._local(stage)
        if at is None:
            return x
        return self._on.put(x, at, kind)

    def startup(self, jaxpr: Any, stage: int) -> Function:
        at = self._local(stage)
        assert at is not None, stage
        return self._on.startup(jaxpr, at)

    def compiled(
        self,
        fn: Function,
        stage: int,
        ins: Sequence[AxisSharding],
        outs: Sequence[AxisSharding],
        donated: Sequence[int] = (),
    ) -> Function:
        at = self._local(stage)
        if at is not None:
            return self._on.compiled(fn, at, ins, outs, donated)
        # This process never runs the function, but `value_types` needs the types of its outputs.
        stand_in = OneDevice(self.replicas, [self._shards[stage % self._stages]])
        return stand_in.compiled(fn, 0, ins, outs, donated)
