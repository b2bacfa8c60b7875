"""Base of the jobs of one process, which is a trainer or a parameter server."""

from __future__ import annotations

from typing import Any

from dtrans.checkpoint.runs import run_of
from dtrans.errors import ConfigError
from dtrans.job import Job
from dtrans.parameter_server.plan import PServerPlan
from dtrans.run.distributed.role import Role
from dtrans.run.executor import Executor
from dtrans.run.net.role_folder import RoleFolder


class RoleJob(Job):
    """Base class of the jobs of one process, which is a trainer or a server.

    Args:
      plan: the plan, the same in all processes.
      role: the role of this process.
      options: keyword arguments of `dtrans.Executor`.

    Raises:
      ConfigError: the plan has another number of trainers, or other servers, than the environment.
    """

    def __init__(self, plan: PServerPlan, role: Role, options: dict[str, Any]) -> None:
        if role.trainers != plan.trainers or tuple(plan.servers) != role.pserver_endpoints:
            raise ConfigError(
                f"the plan is for {plan.trainers} trainers and pservers {','.join(plan.servers)}, "
                f"but this process's environment is for {role.trainers} trainers and pservers "
                f"{role.pservers or 'none'}; plan with trainers=role.trainers and "
                "pservers=role.pservers"
            )
        self.plan, self.role = plan, role
        self._executor = Executor(**options)
        self._generations = RoleFolder.from_environment(role.name)

    @property
    def run_id(self) -> str:  # type: ignore[override]
        return run_of(self.role.current_endpoint)

    def close(self) -> None:
        super().close()
        self._executor.close()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.meter.add_note(error)
        super().close()
        self._executor.__exit__(kind, error, trace)  # sends the error to the servers

    def opt_state(self, state: Any) -> Any:
        raise ConfigError(
            "the optimizer's state is on the servers; save a checkpoint, and read it with "
            "dtrans.checkpoint.load"
        )
