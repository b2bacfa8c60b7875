"""Cuts of one trainer: the leaves that no server stores (`PServerPlan.frozen`).

    computed    leaves that each trainer computes itself, such as batch statistics. They differ
                between trainers. Each trainer writes its values at the cuts of the servers, and
                loads those of the cut when an epoch begins
    constant    leaves that nothing changes. A cut does not contain them: a trainer that goes back
                keeps them, and the init computes them in a process that starts again

When the next step begins, a trainer writes the state that the user passes to this step. Then it
sends gradients.

    STEP/trainer-0.npz    the computed leaves of trainer 0 after STEP steps, by name
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from dtrans.checkpoint.assemble import as_jax, as_numpy, numpy_type
from dtrans.checkpoint.pserver_state import name_leaves
from dtrans.errors import StateError
from dtrans.ir.selection import exclude, subset
from dtrans.parameter_server.plan import PServerPlan
from dtrans.protocol.trainer.trainer_line import log
from dtrans.run.net.role_folder import RoleFolder
from dtrans.run.net.shared_files import write_file
from dtrans.run.parameter_server.server_connections import ServerConnections
from dtrans.step.frozen import changed_leaves


# errors of reading a damaged file of arrays
UNREADABLE = (OSError, EOFError, KeyError, ValueError, BadZipFile)


def computed_leaves(plan: PServerPlan) -> list[str]:
    """Return the names of the leaves that no server stores, and that each trainer computes."""
    return changed_leaves(plan.main, plan.frozen)


def read_array(file: Any, name: str, t: Any) -> np.ndarray:
    """Return an array of type `t` from a file, whose format lacks some types, such as bfloat16."""
    data: np.ndarray = file[name].view(numpy_type(t.shape, t.dtype)[1])
    return data


def server_names(plan: PServerPlan) -> list[str]:
    """Return the names of the servers' roles."""
    return [f"pserver {i}" for i in range(len(plan.servers))]


class TrainerCuts:
    """Writer and reader of one trainer's leaves in cuts.

    Args:
      folder: folder of the job's epochs and cuts; None without a launcher that restarts roles.
      plan: the job's plan.
      name: name of the trainer's role.
    """

    def __init__(self, folder: RoleFolder | None, plan: PServerPlan, name: str) -> None:
        self._folder, self._plan, self._name = folder, plan, name
        self._computed = computed_leaves(plan)
        self._constants = exclude(plan.frozen, self._computed)
        self._last_constants: dict[str, Any] = {}  # the constant leaves of the last step
        self._first = 0  # number of steps before the epoch

    def begin(self, connections: ServerConnections, params: Any) -> Any:
        """Return parameters; if the epoch begins at a cut, with the computed leaves of the cut.

        Args:
          connections: connections to the servers of the epoch.
          params: the servers' parameters, and the initial values of all other leaves.

        Raises:
          StateError: the leaves of the cut cannot be read.
        """
        self._first, epoch = connections.step_count, connections.epoch
        if not self._computed or epoch is None or epoch.cut != self._first:
            return params
        return self._replace(params, self._load(epoch.cut))

    def keep_constants(self, params: Any) -> Any:
        """Return parameters with the constant leaves of the last step."""
        return self._replace(params, self._last_constants)

    def before_step(self, connections: ServerConnections, step: int, params: Any) -> None:
        """Keep constant leaves. Write computed leaves if servers write a cut before this step.

        If they cannot be written, the job continues with its earlier cuts.

        Args:
          connections: connections to the servers.
          step: number of steps so far.
          params: the parameters before the next step.
        """
        epoch, every = connections.epoch, connections.steps_between_cuts
        if not self._plan.frozen or epoch is None or not every:
            return
        leaves = self._leaves(params)
        self._last_constants = subset(leaves, self._constants)
        if self._computed and epoch.is_cut_due(step, self._first, every):
            self._write(epoch.number, step, subset(leaves, self._computed))

    def _leaves(self, params: Any) -> dict[str, Any]:
        return name_leaves(self._plan.main.args[0], params, "params")

    def _replace(self, params: Any, leaves: Mapping[str, Any]) -> Any:
        return self._plan.main.args[0].unflatten_named({**self._leaves(params), **leaves})

    # -- files -----------------------------------------------------------------------------------

    @property
    def _epochs(self) -> RoleFolder:
        """The folder, in a job with cuts."""
        assert self._folder is not None
        return self._folder

    def _path(self, step: int) -> Path:
        return self._epochs.path / str(step) / f"{self._name.replace(' ', '-')}.npz"

    def _load(self, step: int) -> dict[str, Any]:
        found, path = {}, self._path(step)
        try:
            with np.load(path) as file:
                for n in self._computed:
                    t = self._plan.main.inputs[n]
                    found[n] = as_jax(read_array(file, n, t), t.dtype)
        except UNREADABLE as e:
            raise StateError(
                f"the leaves of {self._name} in the cut of step {step} cannot be read from {path}: "
                f"{e}; start the job again with another folder of cuts"
            ) from e
        return found

    def _write(self, epoch: int, step: int, leaves: Mapping[str, Any]) -> None:
        arrays: dict[str, Any] = {n: as_numpy(x) for n, x in leaves.items()}
        servers = server_names(self._plan)
        try:
            write_file(self._path(step), lambda file: np.savez(file, **arrays))
            self._epochs.note_cut(epoch, step)
            self._epochs.remove_old_cuts(epoch, servers)
        except OSError as e:
            log.warning(
                "%s cannot write its leaves in the cut of step %d, so a restart would go back to "
                "step %s: %s",
                self._name,
                step,
                self._epochs.newest_cut(servers),
                e,
            )
