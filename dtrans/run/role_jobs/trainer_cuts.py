"""Base class for the cuts of one trainer: copies of the state that no server stores.

    leaf_cuts    leaves that each trainer computes itself
    geo_cuts     state of a trainer of GEO-SGD
    cut_file     the file of a cut

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


class TrainerCuts(ABC):
    """Writer and reader of the cuts (snapshots) of one trainer.

    Args:
      folder: folder of the job's epochs and cuts; None without a launcher that restarts roles.
      plan: the job's plan.
      name: name of the trainer's role.
    """

    def __init__(self, folder: RoleFolder | None, plan: PServerPlan, name: str) -> None:
        self._folder, self._plan, self._name = folder, plan, name

    @abstractmethod
    def prepare(self, executor: Executor) -> None:
        """Prepare the trainer's executor for the startup program.

        Raises:
          StateError: the cut (snapshot) with which the trainer begins cannot be read.
        """

    @abstractmethod
    def begin(self, executor: Executor, first: Any) -> tuple[tuple[Any, ...], int]:
        """Return the first state, and the number of steps before this state.

        Args:
          executor: the trainer's executor.
          first: the result of the startup program.

        Raises:
          StateError: the cut (snapshot) with which the trainer begins cannot be read.
        """

    @abstractmethod
    def before_step(self, executor: Executor, step: int, state: tuple[Any, ...]) -> None:
        """Write a cut (snapshot), if one is due before the next step.

        If the write fails, the job continues with its earlier cuts.

        Args:
          executor: the trainer's executor.
          step: number of steps so far.
          state: the state before the next step.
        """

    def keep_constants(self, params: Any) -> Any:
        """Return `params`. Subclasses may replace constant leaves by their last values."""
        return params

    # -- for subclasses --------------------------------------------------------------------------

    @property
    def _epochs(self) -> RoleFolder:
        """The folder of epochs and cuts (snapshots). Only jobs with cuts have this folder."""
        assert self._folder is not None
        return self._folder

    @property
    def _file_name(self) -> str:
        """The name of the role without spaces, for paths."""
        return self._name.replace(" ", "-")

    def _leaves(self, state: tuple[Any, ...]) -> dict[str, Any]:
        """Return the leaves of a state, by name."""
        found: dict[str, Any] = {}
        # without GEO-SGD, a state has no opt_state
        specs = zip(self._plan.trainer_specs, ("params", "opt_state"), state, strict=False)
        for spec, what, tree in specs:
            found |= name_leaves(spec, tree, what)
        return found

    def _replace(self, state: tuple[Any, ...], leaves: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return a state with other values of some leaves."""
        new = {**self._leaves(state), **leaves}
        specs = self._plan.trainer_specs[: len(state)]
        return tuple(spec.unflatten_named(new) for spec in specs)
