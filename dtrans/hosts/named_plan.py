"""Plans that the command line names: `module:plan`."""

from __future__ import annotations

from dtrans.errors import ConfigError
from dtrans.named_object import named_object
from dtrans.plan import Plan


def named_plan(name: str) -> Plan:
    """Import the plan with a name such as `module:plan`.

    The name may also be the name of a function that takes no arguments and returns the plan.

    Raises:
      ConfigError: the module or name does not exist, or the named object is not a plan.
    """
    plan = named_object(name, "--plan", "plan")
    if callable(plan) and not isinstance(plan, Plan):
        plan = plan()
    if not isinstance(plan, Plan):
        raise ConfigError(
            f"--plan {name} is a {type(plan).__name__}; expected the result of dtrans.pserver, "
            "dtrans.nccl2, dtrans.sharding or dtrans.pipeline, or a function that returns it"
        )
    return plan
