"""Checkpoints that one server writes while a job runs: their folder and names.

Trainers request checkpoints by name. When a job ends by an error, its servers save their state in a
last checkpoint. Its name is a step number that continues the user's numbers: the number of an
earlier checkpoint, plus the steps since then. The earlier checkpoint is the last one that this job
has saved under a number. If there is none, it is the checkpoint with which the job started.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from dtrans.checkpoint import api as checkpoint
from dtrans.checkpoint.rounding_errors import rounding_error_rows
from dtrans.checkpoint.runs import SaveId
from dtrans.errors import ConfigError
from dtrans.ir.selection import omit, retain
from dtrans.parameter_server.plan import PServerPlan


@dataclasses.dataclass(frozen=True)
class ServerCheckpoints:
    """Writer of one server's part of each checkpoint, in a folder that all servers share.

    Attributes:
      folder: the folder of all checkpoints.
      plan: the job's plan.
      endpoint: the server's endpoint.
      begun: the number of the checkpoint that the job started from; 0 without a checkpoint.
    """

    folder: Path
    plan: PServerPlan
    endpoint: str
    begun: int

    @property
    def sent(self) -> dict[int, dict[str, Any]]:
        """Types of the arrays that trainers send with each request for a checkpoint.

        These are the rounding errors of compressed gradients, by the trainer's id and by name.
        """
        found = {}
        for k, rows in rounding_error_rows(self.plan, self.endpoint).items():
            found[k] = {
                row.slice_name: jax.ShapeDtypeStruct(row.slice_shape, row.dtype) for row in rows
            }
        return found

    def keep(self, name: str, state: Mapping[str, Any], save_id: SaveId) -> None:
        """Save a state under the name that a trainer has requested.

        Args:
          name: the name of the checkpoint.
          state: the server's arrays, by name, and the rounding errors that trainers have sent.
          save_id: identifier of the run and the step, which is stored with the arrays.
        """
        names = {n for types in self.sent.values() for n in types}
        self._save(name, omit(state, names), save_id, rounding_errors=retain(state, names))

    def _save(
        self,
        name: str,
        state: Mapping[str, Any],
        save_id: SaveId,
        *,
        rounding_errors: Mapping[str, Any] | None = None,
    ) -> None:
        """Save a state under a name.

        Without `rounding_errors`, the checkpoint lacks the rounding errors of all trainers.
        """
        place, plan, endpoint = self.folder / name, self.plan, self.endpoint
        checkpoint.save_serving(
            place, plan, endpoint, state, save_id, rounding_errors=rounding_errors
        )

    def keep_last(
        self, state: Mapping[str, Any], save_id: SaveId, asked: Mapping[str, int]
    ) -> Path | None:
        """Save the server's part of a last checkpoint, because the job ends by an error.

        If synchronous servers are at different steps, they write different checkpoints, which are
        incomplete. Asynchronous servers have no common step: the first server to save chooses the
        name for all servers. The checkpoint has no rounding errors of trainers.

        Args:
          state: the server's arrays, by name.
          save_id: identifier of the run and the step, which is stored with the arrays.
          asked: server's step of each checkpoint that trainers have requested in this job, by name.

        Returns:
          The path of the checkpoint. None if the server has no arrays; another server then writes
          its part.
        """
        assert save_id.step is not None
        name = str(self._number(save_id.step, asked))
        if not self.plan.sync_mode:
            holding = [ep for ep in self.plan.servers if self.plan.overview.by_endpoint(ep)]
            if self.endpoint not in holding:
                return None
            name, save_id = self._agreed(name, save_id), dataclasses.replace(save_id, step=None)
            if name in asked:  # A trainer has already requested a checkpoint of this name.
                return self.folder / name
        try:
            self._save(name, state, save_id)
        except ConfigError:  # Another run has written a checkpoint of this name.
            name = f"{name}-{save_id.run[0]}"
            self._save(name, state, save_id)
        if not self.plan.sync_mode and self.endpoint == holding[0]:
            # Servers without arrays cannot count steps, so this server writes their parts.
            for other in self.plan.servers:
                if other not in holding:
                    dataclasses.replace(self, endpoint=other)._save(name, {}, save_id)
        return self.folder / name

    def _number(self, step: int, asked: Mapping[str, int]) -> int:
        """Return the number for the name of a last checkpoint. It continues the user's numbers.

        For example, a trainer saved checkpoint "300" after 100 steps of this job. After 120 steps,
        the number is 320.

        Args:
          step: number of steps of this job.
          asked: maps the name of each checkpoint of this job to the number of steps before it.
        """
        numbered = [(at, int(name)) for name, at in asked.items() if name.isdecimal()]
        last_step, number = max(numbered, default=(0, self.begun))
        return number + step - last_step

    def _agreed(self, name: str, save_id: SaveId) -> str:
        """Return a checkpoint name for all servers of this run: the `name` of the first caller.

        Asynchronous servers count different steps, so their names differ. The name is stored as the
        target of a symbolic link, because the system creates a link atomically.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        link = self.folder / f".last-of-{save_id.run[0]}"
        try:
            os.symlink(name, link)
        except FileExistsError:
            return os.readlink(link)
        return name
