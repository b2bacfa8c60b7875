"""Site of a job: the hosts on which its roles run. This module has the site of this host."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from dtrans.endpoints import LOOPBACK, ReservedEndpoints, split_endpoint
from dtrans.errors import ConfigError
from dtrans.run.distributed.child_process import Child, Emit
from dtrans.run.distributed.role import Role, roles_of, trainer_roles


class Site:
    """Hosts on which a job's roles run. This class is for this host, subclasses for other hosts.

    Attributes:
      is_this_host: True if all roles run on this host, so that they share its temporary folders.
    """

    is_this_host = True
    _reserved: ReservedEndpoints | None = None

    def _choose_endpoints(self, count: int) -> tuple[str, ...]:
        """Choose loopback endpoints; reserve their ports until `close`."""
        self._reserved = self._reserved or ReservedEndpoints()
        return self._reserved.choose(count)

    def close(self) -> None:
        """Release the ports of a job that has ended."""
        if self._reserved is not None:
            self._reserved.close()

    def roles(
        self,
        mode: str,
        trainers: int,
        pservers: int,
        *,
        endpoints: Sequence[str] = (),
        snapshots: str | os.PathLike[str] | None = None,
    ) -> tuple[Role, ...]:
        """Return every role of the job, with endpoints on the hosts of this site.

        Args:
          mode, trainers, pservers: as for `launch`.
          endpoints: endpoints of the pservers of the job that is continued; empty for a new job.
          snapshots: the folder of the snapshots, which all hosts must share, or None.

        Raises:
          ConfigError: an endpoint is not on the host of its pserver.
        """
        for endpoint in endpoints:
            check_place(endpoint, LOOPBACK, "this host")
        count = trainers if mode == "nccl2" else pservers
        return roles_at(mode, trainers, endpoints or self._choose_endpoints(count))

    def status_endpoint(self, roles: Sequence[Role]) -> str:
        """Return an endpoint at which trainer 0 of an nccl2 job can answer `dtrans status`.

        Args:
          roles: every role of the job, from `roles`.

        Returns:
          The endpoint; empty if no free port is known.
        """
        return self._choose_endpoints(1)[0]

    def variables(self, role: Role) -> dict[str, str]:
        """Return default variables of a role, which the user and the launcher may override."""
        if role.mode != "nccl2":
            return {}
        return jax_variables(role.trainer_id)

    def start(
        self,
        role: Role,
        command: Sequence[str],
        env: Mapping[str, str],
        events: SimpleQueue[Any],
        emit: Emit,
        *,
        inherit_stdout: bool,
    ) -> Child:
        """Start a role. The arguments are the same as those of `Child`."""
        return Child(role, command, env, events, emit, inherit_stdout=inherit_stdout)

    def ended(self, child: Child, *, stopped: bool) -> None:
        """Note the end of a role. A site that shows the states of its roles overrides this method.

        Args:
          child: the process of the role.
          stopped: True if the launcher ended the role.
        """


def roles_at(mode: str, trainers: int, endpoints: Sequence[str]) -> tuple[Role, ...]:
    """Return all roles of a job, if the endpoints are already chosen.

    Args:
      mode: "pserver" or "nccl2".
      trainers: number of trainers.
      endpoints: endpoints of the pservers; in nccl2 mode, of the trainers.
    """
    if mode == "nccl2":
        return trainer_roles(endpoints)
    return roles_of(trainers, endpoints)


def check_place(endpoint: str, address: str, host: str) -> None:
    """Raise ConfigError if a pserver of a continued job would get a different address than before.

    The files of a job that was interrupted contain the endpoints of its pservers. The job can
    continue only at the same endpoints.

    Args:
      endpoint: endpoint of the pserver before the interruption.
      address: address of the host on which the pserver is placed now.
      host: name of this host, for the error.
    """
    if split_endpoint(endpoint)[0] != address:
        raise ConfigError(
            f"snapshots: the job of this folder has a pserver at {endpoint}, but this launch "
            f"places it on {host} at {address}; write the same hosts and numbers of roles as "
            "before, or another folder"
        )


def jax_variables(device: int) -> dict[str, str]:
    """Return environment variables that make JAX use one device of a host, such as GPU 1.

    Each trainer of nccl2 mode gets its own device. The variables also disable JAX's preemption
    service, which would keep a trainer from ending at SIGTERM.

    Args:
      device: number of the device on its host.
    """
    return {"JAX_ENABLE_PREEMPTION_SERVICE": "0", "JAX_LOCAL_DEVICE_IDS": str(device)}
