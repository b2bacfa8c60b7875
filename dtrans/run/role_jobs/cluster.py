"""`plan.on_cluster()` with parameter servers: creates the job of this process's role.

Environment variables name the role (`dtrans.Role.from_env`).
"""

from __future__ import annotations

from typing import Any

from dtrans.errors import ConfigError
from dtrans.parameter_server.plan import PServerPlan
from dtrans.plan import register_runner
from dtrans.run.distributed.role import Role
from dtrans.run.role_jobs.role_job import RoleJob
from dtrans.run.role_jobs.server_job import ServerJob
from dtrans.run.role_jobs.trainer_job import TrainerJob


@register_runner(PServerPlan, "cluster")
def on_cluster(plan: PServerPlan, *, donate: bool = True, **options: Any) -> RoleJob:
    """Return the job of this process's role.

    Args:
      plan: the plan, the same in all processes.
      donate: must be True.
      options: keyword arguments of `dtrans.Executor`.

    Raises:
      ConfigError: `donate` is False, or the plan does not fit the environment.
    """
    if not donate:
        raise ConfigError("donate=False: a server updates its blocks in place; leave donate out")
    role = Role.from_env()
    job_class = TrainerJob if role.is_trainer else ServerJob
    return job_class(plan, role, options)
