"""Objects of a user's modules that the command line names: `module:name`, or `file.py:name`."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from dtrans.errors import ConfigError


def named_object(name: str, option: str, kind: str) -> Any:
    """Import a module and return the object with a name in it.

    The current folder comes first on the path, as with `python -m`. For a path to a file its folder
    comes first, as with `python file.py`.

    Args:
      name: `module:name` or `file.py:name`.
      option: the option or argument with this text, for errors.
      kind: the kind of object, such as `plan`, for errors.

    Raises:
      ConfigError: the module does not exist, or has no such name.
    """
    module, colon, attribute = name.rpartition(":")
    if not (module and colon and attribute):
        raise ConfigError(f"{option} is {name!r}; write module:{kind}, a module and a {kind} in it")
    found = _import(module, f"{option} is {name!r}")
    if not hasattr(found, attribute):
        raise ConfigError(f"{option} is {name!r}; the module {module} has no {attribute}")
    return getattr(found, attribute)


def _import(module: str, option: str) -> Any:
    """Import a module by its dotted name, or by the path of its file.

    Args:
      option: the option and its value, for errors.
    """
    folder = os.getcwd()
    if module.endswith(".py"):
        path = Path(module)
        if not path.is_file():
            raise ConfigError(f"{option}; there is no file {path} in {folder}")
        folder, module = str(path.parent.resolve()), path.stem
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name is None or not f"{module}.".startswith(f"{e.name}."):
            raise  # the module exists, and one of its own imports fails
        raise ConfigError(f"{option}; there is no module {e.name} in {folder} or installed") from e
