"""Base class for snapshots of one trainer: copies of the state that no server stores.

    leaf_snapshots    arrays that a synchronous trainer computes itself
    geo_snapshots     state of a trainer of GEO-SGD
    snapshot_file     file format of a snapshot

A trainer's state is the tuple (params,). With GEO-SGD it is (params, opt_state), and with error
feedback ((params, rounding_errors),).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from dtrans.checkpoint.pserver_state import name_leaves
from dtrans.parameter_server.plan import PServerPlan
from dtrans.run.executor import Executor
from dtrans.run.net.role_folder import RoleFolder


class TrainerSnapshots(ABC):
    """Writer and reader of one trainer's snapshots of the state that no server stores.

    Servers write the state that they store. A trainer writes the remainder, so that a job can
    continue after the failure of a process.

    Args:
      folder: folder of the job's snapshots. None if the launcher does not restart processes.
      plan: the job's plan.
      name: name of the trainer, such as "trainer 0".
    """

    def __init__(self, folder: RoleFolder | None, plan: PServerPlan, name: str) -> None:
        self._folder, self._plan, self._name = folder, plan, name

    @abstractmethod
    def prepare(self, executor: Executor) -> None:
        """Prepare the trainer's executor, before the trainer receives the first parameters.

        Raises:
          StateError: the snapshot with which the trainer begins cannot be read.
        """

    @abstractmethod
    def begin(self, executor: Executor, first: Any) -> tuple[tuple[Any, ...], int]:
        """Return the trainer's first state, and the number of steps taken before this state.

        Args:
          executor: the trainer's executor.
          first: the trainer's initial parameters, and with GEO-SGD its optimizer state.

        Raises:
          StateError: the snapshot with which the trainer begins cannot be read.
        """

    @abstractmethod
    def before_step(self, executor: Executor, step: int, state: tuple[Any, ...]) -> None:
        """Write a snapshot of this trainer's state, if one is due before the next step.

        `job.step` calls this method first. If the file cannot be written, the job continues with
        its earlier snapshots, and logs a warning.

        Args:
          executor: the trainer's executor.
          step: number of steps so far.
          state: the state before the next step.
        """

    def keep_constants(self, params: Any) -> Any:
        """Return `params`. A subclass may restore the last values of arrays that never change."""
        return params

    # -- for subclasses --------------------------------------------------------------------------

    @property
    def _generations(self) -> RoleFolder:
        """The folder of the job's snapshots; only jobs with snapshots may use this property."""
        assert self._folder is not None
        return self._folder

    @property
    def _file_name(self) -> str:
        """The name of the role without spaces, for paths."""
        return self._name.replace(" ", "-")

    def _leaves(self, state: tuple[Any, ...]) -> dict[str, Any]:
        """Return the arrays of a trainer's state, by name."""
        found: dict[str, Any] = {}
        # without GEO-SGD, a state has no opt_state
        specs = zip(self._plan.trainer_specs, ("params", "opt_state"), state, strict=False)
        for spec, what, tree in specs:
            found |= name_leaves(spec, tree, what)
        return found

    def _replace(self, state: tuple[Any, ...], leaves: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return a trainer's state in which some arrays are replaced, by name."""
        new = {**self._leaves(state), **leaves}
        specs = self._plan.trainer_specs[: len(state)]
        return tuple(spec.unflatten_named(new) for spec in specs)
