"""Plans that the command line names: `module:plan`."""

from __future__ import annotations

from dtrans.errors import ConfigError
from dtrans.named_object import named_object
from dtrans.plan import Plan


def named_plan(name: str) -> Plan:
    """Return the plan of `module:plan`: an object, or the result of a function without arguments.

    Raises:
      ConfigError: there is no such module or name, or it is no plan.
    """
    found = named_object(name, "--plan", "plan")
    plan = found if isinstance(found, Plan) or not callable(found) else found()
    if not isinstance(plan, Plan):
        raise ConfigError(
            f"--plan is {name!r}, which gives a {type(plan).__name__}; it must be a plan of "
            "dtrans.pserver, dtrans.nccl2, dtrans.sharding or dtrans.pipeline, or a function that "
            "returns one"
        )
    return plan
