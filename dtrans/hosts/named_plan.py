"""Plans that the command line names: `module:plan`."""

from __future__ import annotations

import importlib
import os
import sys

from dtrans.errors import ConfigError
from dtrans.plan import Plan


def named_plan(name: str) -> Plan:
    """Return the plan that `module:plan` names: an object of a module, or what a function without arguments returns.

    The module is looked for in the current folder first, as `python -m` does.

    Raises:
      ConfigError: no such module, nothing of this name in it, or something else than a plan.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(f"--plan is {name!r}; write module:plan, a module and a plan in it")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name is None or not f"{module}.".startswith(f"{e.name}."):
            raise  # the module is there, and one of its imports fails
        raise ConfigError(f"--plan is {name!r}; there is no module {e.name} in {os.getcwd()} or installed") from e
    if not hasattr(found, attribute):
        raise ConfigError(f"--plan is {name!r}; the module {module} has no {attribute}")
    made = getattr(found, attribute)
    plan = made if isinstance(made, Plan) or not callable(made) else made()
    if not isinstance(plan, Plan):
        raise ConfigError(
            f"--plan is {name!r}, which gives a {type(plan).__name__}; it must be a plan, as dtrans.pserver, "
            "dtrans.nccl2, dtrans.sharding and dtrans.pipeline make it, or a function that returns one"
        )
    return plan
