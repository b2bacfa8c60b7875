"""Checkpoints of one server: the folder, the names, and the marks of what it writes while it
serves.

A name is what the user called it. When a job ends by an error nobody names what its servers still
hold. The name is the number of the step then, counted as the user does: from the last checkpoint of
this job that has a number for its name, or from the one that the job was begun from.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtrans.checkpoint import api as checkpoint
from dtrans.checkpoint.runs import Mark
from dtrans.errors import ConfigError
from dtrans.parameter_server.plan import PServerPlan


@dataclasses.dataclass(frozen=True)
class ServerCheckpoints:
    """What one server writes to the folder that all servers see.

    Attributes:
      folder: of the checkpoints.
      plan: of the job.
      endpoint: of the server.
      begun: the number of the checkpoint that the job was begun from; 0 where it was from none.
    """

    folder: Path
    plan: PServerPlan
    endpoint: str
    begun: int

    def keep(self, name: str, state: Mapping[str, Any], mark: Mark) -> None:
        """Save what trainers have asked for."""
        checkpoint.save_serving(self.folder / name, self.plan, self.endpoint, state, mark)

    def keep_last(
        self, state: Mapping[str, Any], mark: Mark, asked: Mapping[str, int]
    ) -> Path | None:
        """Save what the server holds when its job ends by an error.

        Synchronous servers that are at different steps write to different folders, neither of them
        whole. Asynchronous ones have no step in common: the first of them chooses the name for all.

        Args:
          mark: of the run, and the step of this server.
          asked: the checkpoints that trainers have asked for, and after how many steps.

        Returns:
          The checkpoint; None where the server holds nothing, and another one says so for it.
        """
        assert mark.step is not None
        name = str(self._number(mark.step, asked))
        if not self.plan.sync_mode:
            holding = [ep for ep in self.plan.servers if self.plan.overview.by_endpoint(ep)]
            if self.endpoint not in holding:
                return None
            name, mark = self._agreed(name, mark), dataclasses.replace(mark, step=None)
            if name in asked:  # the trainers had it saved after their last step
                return self.folder / name
        try:
            self.keep(name, state, mark)
        except ConfigError:  # the name is that of a whole checkpoint of another run
            name = f"{name}-{mark.run[0]}"
            self.keep(name, state, mark)
        if not self.plan.sync_mode and self.endpoint == holding[0]:
            for other in (
                ep for ep in self.plan.servers if ep not in holding
            ):  # these count no steps
                dataclasses.replace(self, endpoint=other).keep(name, {}, mark)
        return self.folder / name

    def _number(self, step: int, asked: Mapping[str, int]) -> int:
        """Return the number of a step as the user counts."""
        last = max(
            ((made, int(name)) for name, made in asked.items() if name.isdecimal()),
            default=(0, self.begun),
        )
        return last[1] + step - last[0]

    def _agreed(self, name: str, mark: Mark) -> str:
        """Return the name that the first server of this run has chosen: a link is there at once, or
        is not."""
        self.folder.mkdir(parents=True, exist_ok=True)
        link = self.folder / f".last-of-{mark.run[0]}"
        try:
            os.symlink(name, link)
        except FileExistsError:
            return os.readlink(link)
        return name
