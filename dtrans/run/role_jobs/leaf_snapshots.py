"""Snapshots of one synchronous trainer, with the leaves (arrays) that no server stores.

Servers store the trained parameters. Two kinds of leaves exist only on trainers
(`PServerPlan.frozen`):

    computed    leaves that each trainer computes itself, such as batch statistics, and rounding
                errors of compressed gradients. They differ between trainers. When servers write a
                snapshot, each trainer writes its values, too. When the job continues from a
                snapshot after a failure, each trainer loads its values
    constant    leaves that no step changes. Snapshots do not contain these leaves. A trainer that
                goes back to a snapshot still has them. In a process that starts again, the init
                computes them

A trainer writes its leaves at the beginning of the next step, because the user passes the state to
`step`. The trainer sends the gradients of this step afterwards.

    STEP/trainer-0.npz    the computed leaves of trainer 0 after STEP steps, by name
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtrans.checkpoint.assemble import as_jax
from dtrans.errors import StateError
from dtrans.ir.selection import exclude, subset
from dtrans.parameter_server.plan import PServerPlan
from dtrans.protocol.generations import ReplacedError
from dtrans.protocol.trainer.trainer_line import log
from dtrans.run.executor import Executor
from dtrans.run.net.role_folder import RoleFolder
from dtrans.run.parameter_server.snapshots import computed_leaves, server_names
from dtrans.run.role_jobs.snapshot_file import SnapshotFile
from dtrans.run.role_jobs.trainer_snapshots import TrainerSnapshots


class LeafSnapshots(TrainerSnapshots):
    """Writer and reader of a synchronous trainer's snapshots: the arrays that no server stores.

    Args:
      folder, plan, name: as for `TrainerSnapshots`.
    """

    def __init__(self, folder: RoleFolder | None, plan: PServerPlan, name: str) -> None:
        super().__init__(folder, plan, name)
        self._computed = computed_leaves(plan)
        self._constants = exclude(plan.frozen, self._computed)
        self._last_constants: dict[str, Any] = {}  # the constant leaves of the last step
        self._first = 0  # number of steps before the current generation (part of the job)

    def prepare(self, executor: Executor) -> None:
        """Do nothing: this trainer's arrays are not needed before it receives parameters."""

    def begin(self, executor: Executor, first: Any) -> tuple[tuple[Any, ...], int]:
        """Return the trainer's first state, and the number of steps that the job took before.

        The method is called when the job starts, and again after each failure of a process. If the
        job goes back to a snapshot, the leaves that the trainer computes come from the
        snapshot.

        Args:
          executor: the trainer's executor, which is already connected to the servers.
          first: the servers' parameters, and the initial values of all other leaves.

        Raises:
          DamagedSnapshotError: the file with the leaves is damaged.
          StateError: the file with the leaves cannot be read.
        """
        generation, self._first = executor.connections.generation, executor.connections.step_count
        state: tuple[Any, ...] = (first,)
        if self._computed and generation is not None and generation.snapshot == self._first:
            with self._generations.reading_snapshot(generation.snapshot):
                leaves = self._load(generation.snapshot)
            state = self._replace(state, leaves)
        return state, self._first

    def keep_constants(self, params: Any) -> Any:
        """Return the parameters with the values that constant leaves had in the last step.

        A trainer that goes back to a snapshot runs the init again. The user's state may have other
        values of constant leaves than the init, so the last values are used.
        """
        (params,) = self._replace((params,), self._last_constants)
        return params

    def before_step(self, executor: Executor, step: int, state: tuple[Any, ...]) -> None:
        """Write this trainer's leaves if a snapshot is due before the next step.

        The method also remembers the leaves that no step changes, for `keep_constants`. If the file
        cannot be written, the job continues with its earlier snapshots, and logs a warning.

        Args:
          executor: the trainer's executor.
          step: number of steps so far.
          state: the state before the next step.
        """
        connections = executor.connections
        generation, every = connections.generation, connections.steps_between_snapshots
        if not (self._constants or self._computed) or generation is None or not every:
            return
        leaves = self._leaves(state)
        self._last_constants = subset(leaves, self._constants)
        if self._computed and generation.is_snapshot_due(step, self._first, every):
            self._write(generation.number, step, subset(leaves, self._computed))

    # -- files -----------------------------------------------------------------------------------

    def _file(self, step: int) -> SnapshotFile:
        path = self._generations.path / str(step) / f"{self._file_name}.npz"
        return SnapshotFile(path, f"the leaves of {self._name} in the snapshot of step {step}")

    def _load(self, step: int) -> dict[str, Any]:
        types = {**self._plan.main.inputs, **self._plan.compression.rounding_error_types}
        types = subset(types, self._computed)
        found = self._file(step).read(types)
        return {n: as_jax(x, types[n].dtype) for n, x in found.items()}

    def _write(self, generation: int, step: int, leaves: Mapping[str, Any]) -> None:
        servers = server_names(self._plan)
        try:
            self._file(step).write(leaves)
            self._generations.note_snapshot(generation, step)
            self._generations.remove_old_snapshots(generation, servers)
        except ReplacedError:
            raise
        except (StateError, OSError) as e:
            log.warning(
                "%s cannot write its leaves in the snapshot of step %d, so a restart would go back "
                "to step %s: %s",
                self._name,
                step,
                self._generations.newest_snapshot(servers),
                e,
            )
