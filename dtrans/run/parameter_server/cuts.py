"""Cuts of one server: copies of its state every few steps, to which the job can go back.

`dtrans.protocol.epochs` describes cuts and epochs. A cut is a checkpoint in the folder of the
launcher, and each server writes its piece while the next steps run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtrans.checkpoint import api as checkpoint
from dtrans.checkpoint.runs import Mark
from dtrans.errors import ConfigError, DtransError
from dtrans.parameter_server.plan import PServerPlan
from dtrans.protocol.epochs import Epoch
from dtrans.protocol.server.trainer_registry import log
from dtrans.run.net.epoch_folder import EpochFolder
from dtrans.run.parameter_server.trainer_cuts import computed_leaves, server_names


@dataclasses.dataclass(frozen=True)
class ServerCuts:
    """Writer and reader of one server's cuts.

    Attributes:
      folder: folder of the job's epochs and cuts; None without a launcher that restarts roles.
      plan: the job's plan.
      endpoint: the server's endpoint.
      every: number of steps between two cuts.
      first_step: number of steps before the job, from the checkpoint with which it started.
    """

    folder: EpochFolder | None
    plan: PServerPlan
    endpoint: str
    every: int
    first_step: int = 0

    @property
    def is_written(self) -> bool:
        """True if this server writes cuts."""
        return self.folder is not None

    @property
    def epochs(self) -> EpochFolder:
        """The folder, if this server writes cuts."""
        assert self.folder is not None
        return self.folder

    def begin(self, state: Mapping[str, Any]) -> tuple[Epoch, int, dict[str, Any]]:
        """Enter the current epoch.

        Args:
          state: the initial state, by name.

        Returns:
          The epoch, the number of steps before its first step, and the state with which it begins.
        """
        epoch = self.epochs.current()
        if epoch.cut is None:
            found = epoch, self.first_step, dict(state)
        else:
            found = epoch, epoch.cut, self._load(epoch.cut)
        self.epochs.enter(epoch, with_trainers=bool(computed_leaves(self.plan)))
        return found

    def _load(self, step: int) -> dict[str, Any]:
        return checkpoint.restore(self._path(step), self.plan, self.endpoint)

    def write(self, epoch: int, state: Mapping[str, Any], mark: Mark) -> None:
        """Write this server's piece of a cut, and remove its pieces of old cuts.

        If the piece cannot be written, the job continues with its earlier cuts.

        Args:
          epoch: number of the epoch of the state.
          state: the server's arrays, by name.
          mark: the run and the step.
        """
        assert mark.step is not None
        try:
            path, plan = self._path(mark.step), self.plan
            checkpoint.save_serving(path, plan, self.endpoint, state, mark, servers_only=True)
        except (DtransError, OSError) as e:
            newest = self.epochs.newest_cut(server_names(self.plan))
            log.warning(
                "pserver %s cannot write the cut of step %d, so a restart would go back to step "
                "%s: %s",
                self.endpoint,
                mark.step,
                newest,
                e,
            )
            return
        self.epochs.note_cut(epoch, mark.step)
        self.epochs.remove_old_cuts(epoch, server_names(self.plan))

    def _path(self, step: int) -> Path:
        return self.epochs.path / str(step)


def check_cuts(plan: PServerPlan) -> None:
    """Raise ConfigError if a plan has state that cuts do not contain.

    Cuts contain the state of synchronous servers, and leaves that trainers compute. Announced rows
    that lack updates would be newer after the cut.
    """
    remedy = "leave cuts out, and restart from checkpoints (docs/reliability.md)"
    if not plan.sync_mode:
        raise ConfigError(
            f"cuts: an asynchronous server has no step that all trainers share; {remedy}"
        )
    for name, table in plan.tables.of.items():
        if table.staleness:
            raise ConfigError(
                f"cuts: rows of {name} have staleness={table.staleness}, and cuts do not contain "
                "the older rows that trainers have prefetched; pass dtrans.Rows(staleness=0), or "
                f"{remedy}"
            )
    if plan.options.on_trainer_exit == "paddle":
        raise ConfigError(
            "cuts: with on_trainer_exit='paddle' an update uses the last gradients of a trainer "
            f"that has left, and cuts do not contain gradients; {remedy}"
        )
