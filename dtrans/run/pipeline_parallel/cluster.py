"""A pipeline as processes: each has some of the stages, with all their replicas on its own devices.

Every process goes through the same list of instructions, carries out those of its stages, and sends or receives where a
value goes from a stage of one process to that of another (`dtrans.run.pipeline_parallel.p2p`). The processes are the
trainers that `dtrans.connect()` connected; process k of N has the stages k*S/N to (k+1)*S/N.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from dtrans.errors import ConfigError
from dtrans.pipeline_parallel.plan import PipelinePlan
from dtrans.plan import realises
from dtrans.run.distributed.connect import connected
from dtrans.run.distributed.multihost import check_consistent
from dtrans.run.pipeline_parallel.instructions import RunStage, StepProgram, Transfer
from dtrans.run.pipeline_parallel.job import PipelineJob, PipelineState
from dtrans.run.pipeline_parallel.p2p import P2PChannels
from dtrans.run.pipeline_parallel.stage_devices import Function, OnDevices, Places, StageSharding


_jobs = itertools.count()


@realises(PipelinePlan, "cluster")
class ProcessJob(PipelineJob):
    """The stages of one process; made by `plan.on_cluster()`, in each of them.

    As `plan.on_mesh()`: every process gives the whole batch to `step`, and gets all results. A state has the arrays of
    the process's own stages; `params` and `opt_state` collect all, and must be called by all processes.
    """

    def __init__(self, plan: PipelinePlan, *, donate: bool) -> None:
        cluster = connected()
        stages, count = plan.options.num_stages, cluster.trainers
        if cluster.on_trainer_loss == "drop":
            raise ConfigError("on_trainer_loss='drop': a pipeline cannot go on without its stages")
        if stages % count:
            raise ConfigError(
                f"the plan has {stages} stages, which {count} processes do not divide: plan a multiple of {count}"
            )
        self.each, self.me = stages // count, cluster.trainer_id
        local, replicas = jax.local_devices(), plan.options.replicas
        shards = plan.cuts.shards[self.me * self.each :][: self.each]
        if len(local) < sum(shards) * replicas:
            raise ConfigError(
                f"the {self.each} stages of trainer {self.me} need {sum(shards) * replicas} devices for {replicas} "
                f"replicas, it has {len(local)}"
            )
        grids = dataclasses.replace(plan.cluster, devices=local).virtual_devices(shards, replicas)
        super().__init__(plan, _Local(grids, self.me * self.each, stages), donate=donate)
        o = plan.options
        self._how = {f.name: repr(getattr(o, f.name)) for f in dataclasses.fields(o)}
        self._how |= {"orders": repr(plan.schedule.orders), "stages": str(plan.stage_of)}
        self._agree(self._how)
        self.links = P2PChannels(cluster, str(next(_jobs)))
        self._step = 0

    def _agree(self, on: dict[str, str]) -> None:
        """Check that all processes mean to run the same. Raises PeerError, DeadlineError."""
        split = [n for n in self.plan.batch if self.plan.main.inputs[n].shape][:1]
        check_consistent(self.plan.main, split, {**on, **self.plan.merges})

    def _tape(self, arrays: dict[str, Any]) -> StepProgram:
        known = len(self._tapes)
        tape = super()._tape(arrays)
        if len(self._tapes) > known:  # what is sent is named by its place in this list
            shapes = "; ".join(f"{n} {x.shape} {x.dtype}" for n, x in arrays.items())
            self._agree({**self._how, "batch": shapes, "tape": "\n".join(tape.lines)})
        return tape

    def scheduled(self, name: str) -> ProcessJob:
        raise ConfigError(f"in a job of processes, plan.scheduled({name!r}).on_cluster() runs another schedule")

    def process_of(self, stage: int) -> int:
        """Which process has a stage."""
        return self.plan.device_of(stage) // self.each

    def is_mine(self, stage: int) -> bool:
        return self.process_of(stage) == self.me

    def play(
        self, tape: StepProgram, env: list[Any], look: Callable[[RunStage | Transfer], None] | None = None
    ) -> None:
        self._step += 1
        for number, (ins, empty) in enumerate(tape.instructions):
            if isinstance(ins, Transfer):
                self._move(number, ins, env)
            elif self.is_mine(ins.stage):
                for slot, x in zip(ins.makes, ins.fn(*[env[i] for i in ins.reads]), strict=True):
                    env[slot] = x
            if look is not None:
                look(ins)
            for slot in empty:
                env[slot] = None
        self._share(tape, env, len(tape.instructions))

    def _move(self, number: int, ins: Transfer, env: list[Any]) -> None:
        origin, target = self.process_of(ins.origin), self.process_of(ins.stage)
        if origin == target == self.me:
            env[ins.target] = self.put(ins, env[ins.source])
        elif origin == self.me:
            self.links.send(target, self._step, number, env[ins.source])
        elif target == self.me:
            x = self.links.receive(origin, self._step, number, f"{ins.what} for stage {ins.stage}")
            env[ins.target] = self.put(ins, x)

    def _share(self, tape: StepProgram, env: list[Any], first: int) -> None:
        """Let every process have all results."""
        for number, (n, (slot, _, stage)) in enumerate(tape.results.items()):
            origin = self.process_of(stage)
            if origin == self.me:
                self._tell(first + number, env[slot])
            else:
                x = self.links.receive(origin, self._step, first + number, n)
                env[slot] = jax.device_put(x)

    def _tell(self, key: int, x: Any) -> None:
        for k in range(self.links.count):
            if k != self.me:
                self.links.send(k, self._step, key, x)

    def params(self, state: PipelineState) -> Any:
        """The parameters, as the pytree that they were given in. All processes must ask for them together."""
        everything = self._collected(self.plan.update.program.args[0].names, state.params)
        return self._tree(self.plan.main.args[0], everything.__getitem__)

    def opt_state(self, state: PipelineState) -> Any:
        """The optimizer's state, likewise."""
        everything = self._collected(self.plan.update.program.args[1].names, state.opt_state)
        return self._tree(self.plan.main.args[1], everything.__getitem__)

    def _collected(self, names: Sequence[str], held: dict[str, Any]) -> dict[str, Any]:
        """Arrays of the state, of all processes."""
        self._step += 1
        found = {}
        for key, n in enumerate(names):
            origin = self.process_of(self._first(n))
            if origin == self.me:
                self._tell(key, held[n])
                found[n] = jax.device_put(held[n], jax.local_devices()[0])
            else:
                found[n] = jax.device_put(self.links.receive(origin, self._step, key, n), jax.local_devices()[0])
        return found

    def close(self) -> None:
        """End the lines to other processes. It is done at exit, too."""
        self.links.close()


class _Local(Places):
    """The devices of this process's stages; of other stages nothing is known.

    Args:
      grids: by stage of this process, its devices.
      first: the first stage of this process.
      stages: how many there are.
    """

    def __init__(self, grids: Sequence[Any], first: int, stages: int) -> None:
        super().__init__(len(grids[0]))
        self._on, self._first, self._stages, self._each = OnDevices(grids), first, stages, len(grids)

    def _local(self, stage: int) -> int | None:
        at = stage % self._stages - self._first
        return at if 0 <= at < self._each else None

    def put(self, x: Any, stage: int, kind: StageSharding) -> Any:
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
        ins: Sequence[StageSharding],
        outs: Sequence[StageSharding],
        donated: Sequence[int] = (),
    ) -> Function:
        at = self._local(stage)
        return fn if at is None else self._on.compiled(fn, at, ins, outs, donated)
