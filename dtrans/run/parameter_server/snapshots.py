"""Snapshots: copies of one server's state every few steps, from which a failed job continues.

After the failure of a process, synchronous servers and trainers load the newest snapshot, and
repeat the steps after it. A snapshot is stored like a checkpoint, in a folder of the launcher. Each
server writes its piece while the next steps run.

A snapshot of an asynchronous server contains only this server's state. After a failure, only a lost
server loads its newest snapshot. `dtrans.protocol.generations` describes the protocol.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtrans.checkpoint import api as checkpoint
from dtrans.checkpoint.runs import SaveId
from dtrans.errors import ConfigError, DtransError
from dtrans.parameter_server.plan import PServerPlan
from dtrans.parameter_server.replica_placement import backups_of
from dtrans.parameter_server.snapshot_options import Snapshots
from dtrans.protocol.generations import DROPS, REPLACE, Generation
from dtrans.protocol.server.trainer_registry import log
from dtrans.run.net.role_folder import RoleFolder
from dtrans.run.parameter_server.step_results import merged_results
from dtrans.run.parameter_server.update import ServerUpdate
from dtrans.step.frozen import changed_leaves


def computed_leaves(plan: PServerPlan) -> list[str]:
    """Return the names of arrays that only trainers compute and store, such as batch statistics.

    Rounding errors of compressed gradients are another example. After a failure, a job can restore
    these arrays only from files of the trainers.
    """
    return [*changed_leaves(plan.main, plan.frozen), *plan.compression.rounding_error_types]


def server_names(plan: PServerPlan) -> list[str]:
    """Return the names of the servers for logs and files: "pserver 0", "pserver 1", and so on."""
    return [f"pserver {i}" for i in range(len(plan.servers))]


@dataclasses.dataclass(frozen=True)
class GenerationStart:
    """State with which one server begins a generation (the part of a job between two failures).

    Attributes:
      generation: the generation.
      state: the server's arrays, by name.
      step: for a synchronous server, the number of steps that the job took before.
      counts: for an asynchronous server, the number of steps that each trainer took before, by the
        id of the trainer.
      loaded: step of the snapshot from which `state` was loaded; None for any other
        state.
    """

    generation: Generation
    state: Mapping[str, Any]
    step: int = 0
    counts: Mapping[int, int] = dataclasses.field(default_factory=dict)
    loaded: int | None = None


@dataclasses.dataclass(frozen=True)
class ServerSnapshots:
    """Writer and reader of one server's snapshots, from which a job continues after a failure.

    Attributes:
      folder: folder of the job's snapshots. None if the launcher does not restart processes; then
        nothing is written.
      plan: the job's plan.
      endpoint: the server's endpoint.
      every: number of steps between two snapshots.
      first_step: number of steps in the checkpoint that the job started from; 0 without a
        checkpoint.
      at_loss: as for `dtrans.Snapshots`: True to write the newest state when a process fails.
      has_replicas: True if another server stores a copy of each server's state.
    """

    folder: RoleFolder | None
    plan: PServerPlan
    endpoint: str
    every: int
    first_step: int = 0
    at_loss: bool = False
    has_replicas: bool = False

    @property
    def is_written(self) -> bool:
        """True if this server writes snapshots: a launcher restarts the job's processes."""
        return self.folder is not None

    @property
    def generations(self) -> RoleFolder:
        """Folder of the job's snapshots. It must exist: use it only if `is_written` is True."""
        assert self.folder is not None
        return self.folder

    @property
    def is_alone(self) -> bool:
        """True for an asynchronous server: its snapshots do not depend on other servers."""
        return not self.plan.sync_mode

    @property
    def name(self) -> str:
        """Name of the server for logs and files, such as "pserver 0"."""
        return server_names(self.plan)[list(self.plan.servers).index(self.endpoint)]

    def of_lost(self, endpoint: str, generation: int) -> ServerSnapshots:
        """Return a writer with which this server writes a failed server's snapshot from its copy.

        Args:
          endpoint: endpoint of the failed server.
          generation: number of the generation (part of the job between two failures) that is
            ending.
        """
        snapshots = dataclasses.replace(self, endpoint=endpoint)
        return dataclasses.replace(
            snapshots, folder=self.generations.of_lost(snapshots.name, generation)
        )

    @property
    def merges_results(self) -> bool:
        """True if this server merges the trainers' results of each step, such as the loss.

        The first server merges the results of all trainers into results for the full batch.
        """
        is_first = self.endpoint == next(iter(self.plan.servers))
        return is_first and bool(merged_results(self.plan, self.plan.shared))

    def begin(self, state: Mapping[str, Any]) -> GenerationStart:
        """Return the state with which a synchronous server begins or continues.

        The server calls this method at the start of the job, and after each failure of a process.
        After a failure, the state comes from a snapshot that all servers have written.

        Args:
          state: the initial arrays, by name. The server begins with them if there is no snapshot.

        Raises:
          ConfigError: the folder has snapshots of asynchronous servers.
          DamagedSnapshotError: the snapshot is damaged.
        """
        generation = self.generations.current()
        if self.generations.mark().is_alone:
            raise ConfigError(_other_mode(self.generations.path, "asynchronous", "synchronous"))
        if generation.snapshot is None:
            start = GenerationStart(generation, state, self.first_step)
        else:
            with self.generations.reading_snapshot(generation.snapshot):
                loaded = self._load(generation.snapshot)
            start = GenerationStart(
                generation, loaded, generation.snapshot, loaded=generation.snapshot
            )
        self.generations.enter(
            generation,
            with_trainers=bool(computed_leaves(self.plan)),
            writes_newest=self.at_loss,
            writes_replicas=self.has_replicas,
        )
        return start

    def begin_alone(self, state: Mapping[str, Any]) -> GenerationStart:
        """Return the state with which a new process of an asynchronous server begins.

        The process may replace a lost server. The state then comes from the lost server's newest
        snapshot.

        Args:
          state: the initial arrays, by name. The server begins with them if it has no snapshot.

        Raises:
          ConfigError: the folder has snapshots of synchronous servers.
          DamagedError: the server's snapshot is damaged. An asynchronous server has no older
            snapshot.
        """
        mark = self.generations.mark()
        if mark.snapshots and not mark.is_alone:
            raise ConfigError(_other_mode(self.generations.path, "synchronous", "asynchronous"))
        generation = self.enter_alone()
        for path in self._path(0).parent.glob("[0-9]*"):
            # A lost process left this folder: the process had not reported the snapshot yet, or had
            # reported that it removes the snapshot.
            if path.name not in map(str, mark.snapshots):
                shutil.rmtree(path, ignore_errors=True)
        if not mark.snapshots:
            counts = dict.fromkeys(range(self.plan.trainers), self.first_step)
            return GenerationStart(generation, state, counts=counts)
        (step,) = mark.snapshots
        log.warning("pserver %s continues from its snapshot after %d steps", self.endpoint, step)
        counts = dict(enumerate(mark.counts))
        return GenerationStart(generation, self._load(step), counts=counts, loaded=step)

    def enter_alone(self) -> Generation:
        """Record that this asynchronous server keeps its state after another process's failure.

        Returns:
          The new generation (part of the job between two failures).
        """
        generation = self.generations.current()
        self.generations.enter_alone(generation)
        return generation

    def _load(self, step: int) -> dict[str, Any]:
        path, job = self._path(step), self.generations.run
        return checkpoint.restore_snapshot(
            path, self.plan, self.endpoint, job, step, alone=self.is_alone
        )

    def save_id(self, since: int, sessions: Sequence[str], step: int) -> SaveId:
        """Return an identifier of the run and the step, to store in each piece of a saved state.

        A reader combines pieces of several servers only if their identifiers are equal. After a
        failure, repeated steps have the same bits, so pieces from before and after the failure may
        be combined. There are two exceptions: the trainers have changed, or the job was launched
        again, perhaps with another script. Then the identifier is another one.

        Args:
          since: number of the first generation (part of the job) with the current trainers.
          sessions: identifiers of the trainers' runs.
          step: the server's step.
        """
        job, launch = self.generations.run, self.generations.launch
        run = f"{job}-launch{launch}" if launch else job
        run += f"-{since}" if since else ""
        return SaveId((run, *sessions), step, job=job)

    def write(
        self,
        generation: int,
        counts: Mapping[int, int],
        state: Mapping[str, Any],
        save_id: SaveId,
        *,
        is_early: bool = False,
    ) -> None:
        """Write this server's files of a snapshot, and remove its files of old snapshots.

        The thread that writes checkpoints calls this method. If the piece cannot be written, the
        job continues with its earlier snapshots, and logs a warning. The method does nothing if a
        failure has happened since the snapshot was taken.

        Args:
          generation: number of the generation (part of the job between two failures) in which the
            state was current.
          counts: for an asynchronous server, the number of steps of each trainer in the state.
          state: the server's arrays, by name.
          save_id: identifier of the run and the step, which is stored with the arrays.
          is_early: True if the state may lack evictions of table rows after the step.
        """
        assert save_id.step is not None
        path = self._path(save_id.step)
        if not self.is_alone and generation != self.generations.entered:
            return
        try:
            # Remove an existing part first, because a save would not replace it. A lost process may
            # have written another state of this step.
            if self.is_alone:
                shutil.rmtree(path, ignore_errors=True)
            elif not self.generations.has_written(save_id.step):
                self.generations.remove_part(save_id.step)
            checkpoint.save_serving(
                path,
                self.plan,
                self.endpoint,
                state,
                save_id,
                servers_only=True,
                alone=self.is_alone,
            )
            self._note_snapshot(generation, save_id.step, counts, is_early=is_early)
        except (DtransError, OSError) as e:
            servers = [self.name] if self.is_alone else server_names(self.plan)
            newest = self.generations.newest_snapshot(servers)
            log.warning(
                "pserver %s cannot write the snapshot of step %d, so a restart would go back to "
                "step %s: %s",
                self.endpoint,
                save_id.step,
                newest,
                e,
            )

    def _note_snapshot(
        self, generation: int, step: int, counts: Mapping[int, int], *, is_early: bool
    ) -> None:
        """Report a written snapshot to the launcher, and remove old snapshots."""
        if self.is_alone:
            by_trainer = [counts.get(k, 0) for k in range(self.plan.trainers)]
            for old in self.generations.note_snapshot_alone(step, by_trainer):
                shutil.rmtree(self._path(old), ignore_errors=True)
        else:
            self.generations.note_snapshot(generation, step, is_early=is_early)
            self.generations.remove_old_snapshots(generation, server_names(self.plan))

    def note_end(self, generation: int, lost: Sequence[str] = ()) -> None:
        """Report to the launcher that this server has written its newest states after a failure.

        The launcher waits for this report of every live server, and then chooses the step from
        which the job continues. If a report fails, the launcher chooses the newest complete
        snapshot after some seconds.

        Args:
          generation: number of the generation (part of the job between two failures) that is
            ending.
          lost: names of the lost servers. This server has also written its copies of their states.
        """
        try:
            self.generations.note_end(generation, lost)
        except (DtransError, OSError) as e:
            log.warning(
                "pserver %s cannot report the snapshots of its newest steps: %s", self.endpoint, e
            )

    def _path(self, step: int) -> Path:
        folder = self.generations.path
        if self.is_alone:
            folder /= self.name.replace(" ", "-")
        return folder / str(step)


def _other_mode(path: Path, before: str, now: str) -> str:
    return (
        f"the folder {path} has snapshots of {before} servers, but the plan's mode is {now}; pass "
        "the same mode as before, or another folder of snapshots"
    )


def check_drops(plan: PServerPlan, on_trainer_loss: str) -> None:
    """Raise ConfigError if the launcher may continue without a lost trainer, but the plan cannot.

    For example, a step that needs values of the full batch cannot continue without a trainer. After
    a trainer is dropped, servers update as with on_trainer_exit="drop".

    Args:
      plan: the job's plan.
      on_trainer_loss: the launcher's option for the failure of a trainer: "drop", "replace" or
        "restart".
    """
    if on_trainer_loss not in DROPS:
        return
    start = f"on_trainer_loss={on_trainer_loss!r}: "
    restart = "launch the job with --on-trainer-loss restart"
    if not plan.sync_mode:
        raise ConfigError(
            f"{start}in asynchronous jobs with snapshots, the launcher starts a lost trainer "
            f"again; leave snapshots out of job.serve, or {restart}"
        )
    if plan.shares is not None:
        raise ConfigError(
            f"{start}with batch=dtrans.Batch(speeds=...) trainers have shares of one batch, and an "
            f"update needs all of them; leave out speeds, or {restart}"
        )
    if plan.shared is not None and not plan.shared.proven:
        raise ConfigError(
            f"{start}the step needs values of the full batch ({plan.shared.reason}), which the "
            f"remaining trainers cannot compute; pass batch='local', or {restart}"
        )
    if plan.options.on_trainer_exit == "error":
        raise ConfigError(
            f"{start}with on_trainer_exit='error' an update needs the gradients of all trainers; "
            f"pass on_trainer_exit='drop', or {restart}"
        )
    computed = computed_leaves(plan)
    if on_trainer_loss == REPLACE and computed:
        raise ConfigError(
            f"{start}{computed[0]} is computed by each trainer, and a trainer that joins later "
            f"lacks its newest values; launch the job with --on-trainer-loss drop, or {restart}"
        )


def check_snapshots(plan: PServerPlan, snapshots: Snapshots) -> None:
    """Raise ConfigError if a job that continues from a snapshot could compute other results.

    Snapshots contain the state of servers, and arrays that trainers of synchronous jobs and of
    GEO-SGD compute. They do not contain, for example, the older rows that a trainer reads with
    `staleness`.

    Args:
      plan: the job's plan.
      snapshots: the user's options of snapshots.
    """
    remedy = "leave snapshots out, and restart from checkpoints (docs/reliability.md)"
    computed = [] if plan.sync_mode or plan.push_every else computed_leaves(plan)
    if computed:
        raise ConfigError(
            f"snapshots: {computed[0]} is computed by each trainer, and snapshots of asynchronous "
            f"servers do not contain it; pass mode=dtrans.Sync(), or {remedy}"
        )
    for name, table in plan.tables.of.items():
        if table.staleness:
            raise ConfigError(
                f"snapshots: rows of {name} have staleness={table.staleness}, and snapshots do not "
                "contain the older rows that trainers have prefetched; pass "
                f"dtrans.Rows(staleness=0), or {remedy}"
            )
    if plan.options.on_trainer_exit == "paddle":
        raise ConfigError(
            "snapshots: with on_trainer_exit='paddle' an update uses the last gradients of a "
            f"trainer that has left, and snapshots do not contain gradients; {remedy}"
        )
    if snapshots.at_loss:
        _check_at_loss(
            plan, f"replicas={snapshots.replicas}" if snapshots.replicas else "at_loss=True"
        )
    if snapshots.replicas:
        _check_replicas(plan, snapshots)


def _check_replicas(plan: PServerPlan, snapshots: Snapshots) -> None:
    """Raise ConfigError if a plan's servers cannot store copies of each other's states.

    The plan needs two servers, and each server needs a trained parameter.
    """
    backups_of(list(plan.servers))
    for endpoint, programs in plan.servers.items():
        if not ServerUpdate.from_program(programs.main).grad_types:
            least = plan.options.placement.min_block_size
            raise ConfigError(
                f"snapshots: replicas={snapshots.replicas} needs a trained parameter on each "
                f"server, but pserver {endpoint} has none; write fewer pservers, or replicas=0, or "
                "pass placement=dtrans.BlockPlacement(min_block_size=N) with N smaller than "
                f"{least}"
            )


def _check_at_loss(plan: PServerPlan, option: str) -> None:
    """Raise ConfigError if a plan's servers cannot write their newest states after a failure.

    Args:
      plan: the plan.
      option: the option that requires it, as text for the error.
    """
    if not plan.sync_mode:
        raise ConfigError(
            f"snapshots: {option} needs a common step of all servers, but asynchronous servers "
            "have none; pass mode=dtrans.Sync(), or leave this option out"
        )
    computed = computed_leaves(plan)
    if computed:
        raise ConfigError(
            f"snapshots: {computed[0]} is computed by each trainer, so {option} cannot restore its "
            "newest value on a lost trainer; leave this option out"
        )
