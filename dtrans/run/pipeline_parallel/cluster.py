"""A pipeline as processes: each has some of the stages, with all their replicas on its own devices.

Every process goes through the same list of instructions, carries out those of its stages, and sends
or receives where a value goes from a stage of one process to that of another
(`dtrans.run.pipeline_parallel.p2p`). The processes are the trainers that `dtrans.connect()`
connected; process k of N has the stages k*S/N to (k+1)*S/N.

Each gives its part of a batch: process k has rows k*B/N to (k+1)*B/N of the global one. A stage
reads whole arrays, so each part of an array is sent to the processes whose stages read it: tokens
to the first, labels to the last. Values of the whole batch that no parameter enters are made by the
first process, which is sent what they are made of; it sends them to those whose stages read them.
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
from dtrans.plan import realises
from dtrans.protocol import wire
from dtrans.protocol.arrivals import ValueType
from dtrans.run.base.batch import Share, global_types, share_of
from dtrans.run.base.spmd import AxisSharding, Function
from dtrans.run.distributed.connect import connected
from dtrans.run.distributed.membership import Membership
from dtrans.run.distributed.multihost import PARTS_DIFFER, check_consistent
from dtrans.run.pipeline_parallel.deployment import Deployment
from dtrans.run.pipeline_parallel.instructions import StepProgram, Transfer
from dtrans.run.pipeline_parallel.job import PipelineJob
from dtrans.run.pipeline_parallel.p2p import P2PChannels, on_host
from dtrans.run.pipeline_parallel.processes import OneProcess
from dtrans.run.pipeline_parallel.stage_devices import OnDevices, OneDevice, Places
from dtrans.run.pipeline_parallel.state import StateLayout
from dtrans.run.pipeline_parallel.value_types import of_value, value_types


_jobs = itertools.count()
MAKER = 0  # the process that makes values of the whole batch: it has stage 0


@realises(PipelinePlan, "cluster")
def cluster_job(plan: PipelinePlan, *, donate: bool) -> PipelineJob:
    """The stages of this process; what `plan.on_cluster()` makes, in each of the processes.

    As `plan.on_mesh()`, but for the batch: each process gives its own part to `step`, and all get
    all results. A state has the arrays of the process's own stages; `params` and `opt_state`
    collect all, and must be called by all.
    """
    cluster = connected()
    stages, count, me = plan.options.num_stages, cluster.trainers, cluster.trainer_id
    if cluster.on_trainer_loss == "drop":
        raise ConfigError("on_trainer_loss='drop': a pipeline cannot go on without its stages")
    if stages % count:
        raise ConfigError(
            f"the plan has {stages} stages, which {count} processes do not divide: plan a multiple "
            f"of {count}"
        )
    each, local, replicas = stages // count, jax.local_devices(), plan.options.replicas
    shards = plan.model.cuts.shards[me * each :][:each]
    if len(local) < sum(shards) * replicas:
        raise ConfigError(
            f"the {each} stages of trainer {me} need {sum(shards) * replicas} devices for "
            f"{replicas} replicas, it has "
            f"{len(local)}"
        )
    grids = dataclasses.replace(plan.options.stages.cluster, devices=local).virtual_devices(
        shards, replicas
    )
    mine = frozenset(k for k in range(plan.options.model_stages) if plan.device_of(k) // each == me)
    at = Deployment(plan, _Local(grids, me * each, plan.model.cuts.shards[:stages]), mine, donate)
    return PipelineJob(ConnectedProcesses(at, cluster))


class ConnectedProcesses(OneProcess):
    """The processes of a job, as one of them has them.

    Args:
      at: what this one runs.
      cluster: the job that it is connected to.

    Raises:
      PeerError, DeadlineError: other processes run another pipeline, or none.
    """

    def __init__(self, at: Deployment, cluster: Membership) -> None:
        super().__init__(at)
        self.part = self.me, self.count = cluster.trainer_id, cluster.trainers
        self.run_id, self.saves = cluster.run, self.me == 0
        o = at.plan.options
        self._whole = {n for n in at.plan.batch if is_under(n, o.batch.unsplit_inputs)}
        self._same = {f.name: repr(getattr(o, f.name)) for f in dataclasses.fields(o)} | {
            **at.plan.model.merges
        }
        self._same |= {
            "orders": repr(at.plan.schedule.orders),
            "stages": str(at.plan.model.stage_of),
        }
        check_consistent(at.plan.main, (), self._same)
        self.state_types = StateLayout(at).types
        self._links = P2PChannels(cluster, str(next(_jobs)))
        self._types: dict[StepProgram, Mapping[int, ValueType]] = {}
        self._playing: Mapping[int, ValueType] = {}  # of the step that is being made
        self._round = 0  # of messages: what is sent is named by its round, and by its place in it

    def process_of(self, stage: int) -> int:
        """Which process has a stage."""
        return self.at.plan.device_of(stage) // (self.at.plan.options.num_stages // self.count)

    def check_reorder(self, name: str) -> None:
        raise ConfigError(
            f"in a job of processes, plan.scheduled({name!r}).on_cluster() runs another schedule"
        )

    def close(self) -> None:
        self._links.close()

    # -- batches ---------------------------------------------------------------------------------

    def whole_types(self, arrays: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        split = {n: x.shape[0] for n, x in arrays.items() if isinstance(self._share(n, x), int)}
        shapes = "; ".join(f"{n} {x.shape} {x.dtype}" for n, x in arrays.items())
        rows = next(iter(split.values()), 0)
        check_consistent(self.at.plan.main, split, {**self._same, "batch": shapes}, rows=rows)
        o = self.at.plan.options
        for n, rows in split.items():
            if rows * self.count % o.parts:
                raise BatchError(
                    f"{n} has {rows} rows in each of {self.count} processes, {rows * self.count} "
                    "in all, which "
                    f"num_micro_batch={o.num_micro_batch} and replicas={o.replicas} do not divide: "
                    "give parts "
                    f"that make a multiple of {o.parts} rows"
                )
        types = global_types([(x, self._share(n, x)) for n, x in arrays.items()], self.count)
        return dict(zip(arrays, types, strict=True))

    def check_tape(self, tape: StepProgram, types: Mapping[str, jax.ShapeDtypeStruct]) -> None:
        check_consistent(self.at.plan.main, (), {**self._same, "tape": "\n".join(tape.lines)})
        self._types[tape] = value_types(tape, types)

    def whole_batch(
        self, tape: StepProgram, arrays: Mapping[str, Any], held: Mapping[tuple[int, str], Any]
    ) -> Mapping[str, Any]:
        self._round += 1
        self._playing = self._types[tape]
        readers: dict[str, set[int]] = {}
        for place, n in tape.given:
            readers.setdefault(n, set()).add(self.process_of(place))
        for n in () if tape.values is None else tape.values.read:
            readers.setdefault(n, set()).add(MAKER)
        # the numbers before are theirs
        keys = itertools.count(len(tape.instructions) + len(tape.results))
        split = {
            n: (next(keys), x) for n, x in arrays.items() if isinstance(self._share(n, x), int)
        }
        for n, (key, x) in split.items():
            others = readers.get(n, set()) - {self.me}
            # a copy: it is sent later, and an array of NumPy may be written to meanwhile
            part = np.array(x) if others and isinstance(x, np.ndarray) else x
            for k in others:
                self._links.send(k, self._round, key, part)
        self._check_arguments(arrays, keys)
        whole = {**arrays} | {
            n: jnp.concatenate(
                [x if k == self.me else self._part(k, key, n, x) for k in range(self.count)]
            )
            for n, (key, x) in split.items()
            if self.me in readers.get(n, ())
        }
        return (
            whole
            if tape.values is None
            else whole | self._given(tape, tape.values, whole, held, readers, keys)
        )

    def _given(
        self,
        tape: StepProgram,
        values: Program,
        whole: Mapping[str, Any],
        held: Mapping[tuple[int, str], Any],
        readers: Mapping[str, Collection[int]],
        keys: Iterator[int],
    ) -> dict[str, Any]:
        """The values of the whole batch that stages of this process read, which one process makes.

        Args:
          readers: the processes that read each.
          keys: numbers for messages, the same in all processes.
        """
        state = {**held}
        for n in values.args[-1].names:
            place, key = self.at.first_place(n), next(keys)
            owner = self.process_of(place)
            if self.me == owner != MAKER:
                self._links.send(MAKER, self._round, key, held[place, n])
            elif self.me == MAKER != owner:
                state[place, n] = self._receive(owner, key, of_value(self.state_types[n]), n)
        numbered = dict(zip(values.out_names, keys, strict=False))
        if self.me != MAKER:
            mine = {n: key for n, key in numbered.items() if self.me in readers.get(n, ())}
            what = "a value of the whole batch"
            return {
                n: self._receive(MAKER, key, of_value(values.outputs[n]), what)
                for n, key in mine.items()
            }
        made = self.made_first(tape, whole, state)
        for n, key in numbered.items():
            for k in {*readers.get(n, ())} - {self.me}:
                self._links.send(k, self._round, key, made[n])
        return made

    def _check_arguments(self, arrays: Mapping[str, Any], keys: Iterator[int]) -> None:
        """Raise PeerError where processes give an argument that the update reads, and that they
        must have the same."""
        others = [k for k in range(self.count) if k != self.me]
        numbered = dict(zip(self.at.plan.arguments, keys, strict=False))
        for n, key in numbered.items():
            for k in others:
                self._links.send(k, self._round, key, arrays[n])
        for n, key in numbered.items():
            mine = on_host(arrays[n])[0]
            for k in others:
                x = on_host(self._receive(k, key, of_value(arrays[n]), n))[0]
                if x.tobytes() != mine.tobytes():
                    one, two = sorted([(self.me, mine.tolist()), (k, x.tolist())])
                    raise PeerError(
                        f"{n} is {wire.brief(one[1])} on trainer {one[0]}, and "
                        f"{wire.brief(two[1])} on trainer "
                        f"{two[0]}: the update reads it, and there is one update; give all "
                        "processes the same"
                    )

    def _part(self, origin: int, key: int, name: str, mine: Any) -> Any:
        """The part of an array that another process gives."""
        x = self._receive(origin, key, of_value(mine, any_size=True), name)
        if x.shape != mine.shape:
            raise BatchError(
                f"{PARTS_DIFFER}; trainer {origin} gives {name} as {list(x.shape)}, trainer "
                f"{self.me} as "
                f"{list(mine.shape)}; take parts with job.shard_batch(*batch)"
            )
        return x

    def _share(self, name: str, x: Any) -> Share:
        """How processes share an array of the batch: see `share_of`."""
        return share_of(name, x, self.count, self._whole)

    # -- a step ----------------------------------------------------------------------------------

    def move(self, number: int, ins: Transfer, env: list[Any]) -> None:
        origin, target = self.process_of(ins.origin), self.process_of(ins.stage)
        if origin == target == self.me:
            super().move(number, ins, env)
        elif origin == self.me:
            self._links.send(target, self._round, number, env[ins.source])
        elif target == self.me:
            x = self._receive(
                origin, number, self._playing[number], f"{ins.what} for stage {ins.stage}"
            )
            env[ins.target] = self.at.put(ins, x)

    def share_results(self, tape: StepProgram, env: list[Any]) -> None:
        for key, (n, (slot, _, stage)) in enumerate(tape.results.items(), len(tape.instructions)):
            env[slot] = self._shared(self.process_of(stage), key, self._playing[key], n, env[slot])

    def collected(self, names: Sequence[str], held: Mapping[str, Any]) -> Mapping[str, Any]:
        self._round += 1
        found = {}
        for key, n in enumerate(names):
            kind = of_value(self.state_types[n])
            x = self._shared(self.process_of(self.at.first_place(n)), key, kind, n, held.get(n))
            found[n] = jax.device_put(x, jax.local_devices()[0])
        return found

    def _receive(self, origin: int, key: int, kind: ValueType, what: str) -> Any:
        """As `P2PChannels.receive`, of this round."""
        return self._links.receive(origin, self._round, key, kind, what)

    def _shared(self, origin: int, key: int, kind: ValueType, name: str, x: Any) -> Any:
        """What one process has, in all."""
        if origin != self.me:
            return jax.device_put(self._receive(origin, key, kind, name))
        for k in range(self.count):
            if k != self.me:
                self._links.send(k, self._round, key, x)
        return x


class _Local(Places):
    """The devices of this process's stages; of other stages nothing is known.

    Args:
      grids: by stage of this process, its devices.
      first: the first stage of this process.
      shards: of each stage.
    """

    def __init__(self, grids: Sequence[Any], first: int, shards: Sequence[int]) -> None:
        super().__init__(len(grids[0]))
        self._on, self._first, self._each = OnDevices(grids), first, len(grids)
        self._shards, self._stages = shards, len(shards)

    def _local(self, stage: int) -> int | None:
        at = stage % self._stages - self._first
        return at if 0 <= at < self._each else None

    def put(self, x: Any, stage: int, kind: AxisSharding) -> Any:
        at = self._local(stage)
        return x if at is None else self._on.put(x, at, kind)

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
        # that of another process is never run here: it says what types it makes
        places = (
            OneDevice(self.replicas, [self._shards[stage % self._stages]])
            if at is None
            else self._on
        )
        return places.compiled(fn, 0 if at is None else at, ins, outs, donated)
