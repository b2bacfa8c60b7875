"""Cuts of one trainer of GEO-SGD: the state that only this trainer has.

    changes       for each parameter, the changes that were not pushed, and those of a pending push
    local leaves  optimizer state, and leaves that the trainer computes, such as batch statistics

Cuts of a trainer are independent of the cuts of servers and of other trainers. A trainer writes a
cut before a step, every few steps.

Servers count the steps whose changes they have received. A trainer that starts again continues
after the largest of these numbers, or after the step of its cut if that is larger. So no server
applies the changes of a step twice. The trainer begins with the servers' parameters. It adds the
changes of its cut, except the parts that later pushes contained (`GeoReturn`). The local leaves
lack the steps after the cut.

    trainer-0/STEP.npz    the cut of trainer 0 after STEP of its steps
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dtrans.checkpoint.assemble import as_jax, as_numpy
from dtrans.checkpoint.pserver_state import name_leaves
from dtrans.errors import StateError
from dtrans.ir.selection import subset
from dtrans.parameter_server.plan import PServerPlan
from dtrans.protocol.epochs import is_cut_due_alone
from dtrans.protocol.trainer.geo_steps import GeoCut
from dtrans.protocol.trainer.trainer_line import log
from dtrans.run.net.role_folder import RoleFolder
from dtrans.run.net.shared_files import write_file
from dtrans.run.parameter_server.geo import GeoTrainer
from dtrans.run.parameter_server.server_connections import ServerConnections
from dtrans.run.parameter_server.trainer_cuts import UNREADABLE, computed_leaves, read_array


# names of arrays in a file: `GeoCut.pushed` and `GeoCut.pending`, and prefixes of other names
COUNTS, CHANGE, DELTA, LOCAL = "counts", "change ", "delta ", "local "


class GeoCuts:
    """Writer and reader of the cuts of one trainer of GEO-SGD.

    Args:
      folder: folder of the job's epochs and cuts; None without a launcher that restarts roles.
      plan: the job's plan.
      name: name of the trainer's role.
    """

    def __init__(self, folder: RoleFolder | None, plan: PServerPlan, name: str) -> None:
        self._folder, self._plan, self._name = folder, plan, name
        self._cut: GeoCut | None = None  # cut with which this process starts
        self._newest = 0  # step of the newest cut
        self._blocks: dict[str, str] = {}  # name of a parameter -> name of its first block
        for leaf, blocks in plan.placement.blocks.items():
            self._blocks[leaf] = blocks[0].name
        self._local = [*computed_leaves(plan), *plan.main.args[1].names]

    def read(self) -> GeoCut | None:
        """Return the newest cut, in which parameters have the names of their first blocks.

        Raises:
          StateError: the cut cannot be read.
        """
        steps = self._steps()
        if not steps:
            return None
        self._newest = max(steps)
        self._cut = self._load(self._newest)
        return self._cut

    def begin(
        self, received: Mapping[str, int], state: tuple[Any, Any]
    ) -> tuple[tuple[Any, Any], int]:
        """Return the first state of this process, and the number of steps before this state.

        Args:
          received: number of the trainer's steps that each server has received, by endpoint.
          state: the parameters, and the initial values of all local leaves.
        """
        step = max(received.values(), default=0)
        if self._cut is None and not step:
            return state, 0
        if self._cut is not None:
            step = max(step, self._cut.step, self._cut.pushed)
            state = self._replace(state, self._cut.local)
        log.warning(
            "%s continues after step %d, with its optimizer's state after step %d",
            self._name,
            step,
            self._newest,
        )
        return state, step

    def before_step(
        self, connections: ServerConnections, geo: GeoTrainer, step: int, state: tuple[Any, Any]
    ) -> None:
        """Write a cut, if one is due before the next step.

        Args:
          connections: connections to the servers.
          geo: GEO-SGD of the trainer.
          step: number of steps so far.
          state: the state before the next step.
        """
        every = connections.steps_between_cuts
        if self._folder is None or not connections.is_in_epoch or not every:
            return
        if is_cut_due_alone(step, self._newest, every):
            leaves = self._leaves(state)
            params = {block: leaves[n] for n, block in self._blocks.items()}
            self._write(geo.cut(step, params, subset(leaves, self._local)))

    def _leaves(self, state: tuple[Any, Any]) -> dict[str, Any]:
        params, opt_state = self._plan.main.args[:2]
        found = name_leaves(params, state[0], "params")
        return found | name_leaves(opt_state, state[1], "opt_state")

    def _replace(self, state: tuple[Any, Any], leaves: Mapping[str, Any]) -> tuple[Any, Any]:
        params, opt_state = self._plan.main.args[:2]
        new = {**self._leaves(state), **leaves}
        return params.unflatten_named(new), opt_state.unflatten_named(new)

    # -- files -----------------------------------------------------------------------------------

    @property
    def _epochs(self) -> RoleFolder:
        """The folder, in a job with cuts."""
        assert self._folder is not None
        return self._folder

    def _path(self, step: int) -> Path:
        return self._epochs.path / self._name.replace(" ", "-") / f"{step}.npz"

    def _steps(self) -> list[int]:
        """Return the steps of the written cuts."""
        if self._folder is None:
            return []
        return [int(path.stem) for path in self._path(0).parent.glob("[0-9]*.npz")]

    def _load(self, step: int) -> GeoCut:
        path = self._path(step)
        try:
            with np.load(path) as file:
                pushed, pending = map(int, file[COUNTS])
                changes, deltas, local = {}, {}, {}
                for name, block in self._blocks.items():
                    changes[block] = self._read(file, CHANGE, name)
                    if pending:
                        deltas[block] = self._read(file, DELTA, name)
                for name in self._local:
                    data = self._read(file, LOCAL, name)
                    local[name] = as_jax(data, self._type(name).dtype)
                return GeoCut(step, pushed, pending, changes, deltas, local)
        except UNREADABLE as e:
            raise StateError(
                f"the cut of {self._name} after step {step} cannot be read from {path}: {e}; start "
                "the job again with another folder of cuts"
            ) from e

    def _read(self, file: Any, kind: str, name: str) -> np.ndarray:
        """Return an array of the kind `kind`, such as the changes, of a leaf."""
        return read_array(file, kind + name, self._type(name))

    def _type(self, name: str) -> Any:
        return self._plan.main.inputs[name]

    def _write(self, cut: GeoCut) -> None:
        arrays: dict[str, Any] = {COUNTS: np.array([cut.pushed, cut.pending])}
        for name, block in self._blocks.items():
            arrays[CHANGE + name] = as_numpy(cut.changes[block])
            if cut.pending:
                arrays[DELTA + name] = as_numpy(cut.deltas[block])
        for name, x in cut.local.items():
            arrays[LOCAL + name] = as_numpy(x)
        old = self._steps()
        self._epochs.current()  # raises an error in a process that was replaced
        try:
            write_file(self._path(cut.step), lambda file: np.savez(file, **arrays))
        except OSError as e:
            log.warning(
                "%s cannot write its cut after step %d, so after a restart the optimizer's state "
                "would be that after step %d: %s",
                self._name,
                cut.step,
                self._newest,
                e,
            )
            return
        self._newest = cut.step
        for step in old:
            self._path(step).unlink(missing_ok=True)
