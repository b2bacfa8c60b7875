"""`plan.on_cluster()` for parameter servers: creates the trainer or server job of this process.

Every process of a job runs the same script. Environment variables say which role a process has
(`dtrans.Role.from_env`).
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
    """Create the job of this process: a `TrainerJob` or a `ServerJob`, as its environment says.

    All processes of a job call `plan.on_cluster()` with an equal plan. The launcher has set
    environment variables such as `TRAINING_ROLE`, which `dtrans.Role.from_env` reads.

    Args:
      plan: the plan, the same in all processes.
      donate: must be True; the argument exists because other strategies also accept False.
      options: keyword arguments of `dtrans.Executor`.

    Raises:
      ConfigError: `donate` is False, or the plan does not fit the environment.
    """
    if not donate:
        raise ConfigError("donate=False: a server updates its blocks in place; leave donate out")
    role = Role.from_env()
    job_class = TrainerJob if role.is_trainer else ServerJob
    return job_class(plan, role, options)
