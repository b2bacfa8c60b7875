"""Job of one process that is a parameter server."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from dtrans.checkpoint.orbax_io import load_orbax
from dtrans.checkpoint.pserver_state import check_saved_by_servers, is_saved_by_servers, scatter
from dtrans.checks import check_int, check_one_of
from dtrans.errors import ConfigError
from dtrans.parameter_server.snapshot_options import Snapshots
from dtrans.protocol.server.trainer_registry import log
from dtrans.run.parameter_server.checkpoints import ServerCheckpoints
from dtrans.run.parameter_server.server_saves import ServerStorage
from dtrans.run.parameter_server.snapshots import ServerSnapshots, check_drops, check_snapshots
from dtrans.run.parameter_server.state_writer import KeepLast
from dtrans.run.parameter_server.tables.new_rows import with_makers
from dtrans.run.role_jobs.role_job import RoleJob


class ServerJob(RoleJob):
    """Job of one process that is a parameter server.

    `init` computes the initial values of the parameters that this server stores. `serve` then
    updates them with the trainers' gradients, until every trainer has closed its job. The state is
    a dict from names to arrays: this server's blocks of parameters and optimizer state.

    Attributes:
      restored: path of the checkpoint that the state comes from; None without a checkpoint.
    """

    restored: Path | None = None

    @property
    def roles(self) -> tuple[str, ...]:
        return (self.role.current_endpoint,)

    def server_arrays(self, state: dict[str, Any], endpoint: str) -> dict[str, Any]:
        """Return this server's arrays by name; `endpoint` is ignored.

        Other jobs have several servers, and return the arrays of the server at `endpoint`.
        """
        return state

    def state_of(self, params: Any, opt_state: Any) -> dict[str, Any]:
        return scatter(self.plan, self.role.current_endpoint, params, opt_state)

    def init(self, *args: Any) -> dict[str, Any]:
        self._check_open()
        self.restored = None
        return self._init(*args)

    def _init(self, *args: Any) -> dict[str, Any]:
        startup = self.plan.servers[self.role.current_endpoint].startup
        first: dict[str, Any] = self._executor.run(startup, *args)
        return first

    def check(self, state: Any) -> None:
        self._check_open()

    def serve(
        self,
        state: dict[str, Any],
        *,
        checkpoints: str | os.PathLike[str] | None = None,
        on_failure: str | None = None,
        init: Sequence[Any] | None = None,
        snapshots: int | Snapshots | None = None,
    ) -> dict[str, Any]:
        """Run the server: update its parameters for the trainers, until every trainer has closed.

        After a failure, the server may save a checkpoint (`on_failure`). The name of the checkpoint
        is a number of steps. The server counts them from the last `job.save` with a number as its
        name, such as `job.save("300")`. Without such a call, it counts from the number of the
        restored checkpoint, or from 0.

        Args:
          state: the state that `init` or `dtrans.checkpoint.restore` returned.
          checkpoints: a folder that all servers share, for the checkpoints that trainers request
            with `job.save(name)`.
          on_failure: "save" writes the state to `checkpoints` if the job fails or this process gets
            SIGTERM. The checkpoint's name is the number of the step. "drop" does not save the
            state. The default is "save" if there is a folder, and servers store all arrays of a
            checkpoint.
          init: the arguments of `init`, if the state comes from a checkpoint. Then table rows with
            their initial values need no memory, and `job.tables.evict` can evict other rows.
          snapshots: the number of steps after which servers copy their state to disk, such as 100,
            or a `dtrans.Snapshots` with further options. Such a copy is a *snapshot*. After the
            failure of a process, the job continues from the last snapshot. Servers write snapshots
            only if `dtrans launch --restarts` started the job. A new snapshot waits until the
            previous one is written. With `snapshots`, the job counts its steps from the number of
            the restored checkpoint. An asynchronous server counts the steps of all trainers.

        Returns:
          The final state, for `dtrans.checkpoint.save`.

        Raises:
          ConfigError: on_failure="save" has no folder, or only trainers store some arrays of the
            plan. `checkpoints` is set, but orbax is not installed. Or `snapshots` is set, but the
            plan has state that snapshots cannot contain.
          DeadlineError, PeerError: the job has failed.
        """
        self._check_open()
        check_one_of("on_failure", on_failure, (None, "save", "drop"))
        self._check_folders(checkpoints)
        if init is not None:
            state = with_makers(state, self._init(*init))
        if checkpoints is None and on_failure == "save":
            raise ConfigError(
                'on_failure="save" needs a folder: job.serve(state, checkpoints=folder)'
            )
        if self.restored is not None and self.plan.compression.rounding_errors:
            log.warning(
                "pserver %s continues from %s. A trainer that calls job.init begins with rounding "
                "errors of zero; call dtrans.checkpoint.restore(path, job) on trainers, too",
                self.role.current_endpoint,
                self.restored,
            )
        first_step, written = self._number_of_restored, None
        if snapshots is not None:
            if not isinstance(snapshots, Snapshots):
                check_int("snapshots", snapshots, "a number of steps", least=1)
                snapshots = Snapshots(snapshots)
            check_snapshots(self.plan, snapshots)
            if self._generations is not None:
                check_drops(self.plan, self._generations.on_trainer_loss)
                load_orbax()
            endpoint = self.role.current_endpoint
            written = ServerSnapshots(
                *(self._generations, self.plan, endpoint, snapshots.every, first_step),
                at_loss=snapshots.at_loss,
                has_replicas=snapshots.replicas > 0,
            )
            first_step = 0  # `ServerSnapshots` already counts from the checkpoint's step
        elif self._generations is not None:
            self._generations.note_no_snapshots()
        storage = ServerStorage(snapshots=written)
        if checkpoints is not None:
            endpoint = self.role.current_endpoint
            saver = ServerCheckpoints(Path(checkpoints), self.plan, endpoint, first_step)
            keep_last = self._keep_last(saver, on_failure)
            storage = ServerStorage(saver.keep, keep_last, written, saver.sent)
        self._executor.set_storage(storage)
        program = self.plan.servers[self.role.current_endpoint].main
        final: dict[str, Any] = self._executor.run(program, state)
        return final

    def _check_folders(self, checkpoints: str | os.PathLike[str] | None) -> None:
        """Raise ConfigError if `checkpoints` is the folder of the job's snapshots.

        Files in that folder are removed while the job runs, so the checkpoints would be lost.
        """
        if checkpoints is None or self._generations is None:
            return
        if Path(checkpoints).absolute() == self._generations.path.absolute():
            raise ConfigError(
                f"checkpoints={os.fspath(checkpoints)!r} is also the folder of `dtrans launch "
                "--snapshots`, whose files are removed; pass another folder to "
                "job.serve(checkpoints=)"
            )

    @property
    def _number_of_restored(self) -> int:
        """The name of the restored checkpoint as an integer; 0 if the name is not a number."""
        if self.restored is not None and self.restored.name.isdecimal():
            return int(self.restored.name)
        return 0

    def _keep_last(self, saver: ServerCheckpoints, on_failure: str | None) -> KeepLast | None:
        """Return the function that saves a checkpoint after a failure; None to save none.

        Args:
          saver: writes this server's checkpoints.
          on_failure: as for `serve`.
        """
        load_orbax()
        if on_failure == "save":
            check_saved_by_servers(self.plan)
        saves_last = on_failure != "drop" and is_saved_by_servers(self.plan)
        return saver.keep_last if saves_last else None

    def step(self, state: Any, *batch: Any) -> NoReturn:
        raise ConfigError(
            f"{self.role.name} takes no steps: job.serve(state) serves until every trainer has "
            "closed"
        )

    def params(self, state: Any) -> NoReturn:
        raise ConfigError(
            f"{self.role.name} has only blocks of the parameters; save a checkpoint, and read the "
            "parameters with dtrans.checkpoint.load"
        )

    def lower(self, state: Any, *batch: Any) -> NoReturn:
        raise ConfigError(
            f"{self.role.name} compiles its update only when gradients arrive; call "
            "plan.on_mesh().lower() instead"
        )
