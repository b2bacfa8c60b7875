"""Import of a user's object from the command line: `module:name`, or `file.py:name`."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from dtrans.errors import ConfigError


def named_object(name: str, option: str, kind: str) -> Any:
    """Import a module, and return the object of this name.

    For a module, this function first inserts the current folder into `sys.path`, as `python -m`
    does. For a file, it inserts the file's folder, as `python file.py` does.

    Args:
      name: `module:name` or `file.py:name`.
      option: the user's option or argument that has this value, for errors.
      kind: kind of the object, such as `plan`, for errors.

    Raises:
      ConfigError: the module does not exist, or has no object with this name.
    """
    module, colon, attribute = name.rpartition(":")
    if not (module and colon and attribute):
        raise ConfigError(f"{option} is {name!r}; expected module:{kind}, a {kind} in a module")
    found = _import(module, f"{option} is {name!r}")
    if not hasattr(found, attribute):
        raise ConfigError(f"{option} is {name!r}; the module {module} has no {attribute}")
    return getattr(found, attribute)


def _import(module: str, option: str) -> Any:
    """Import a module.

    Args:
      module: dotted name, or path of the file.
      option: clause that names the option and its value, for errors.
    """
    folder = os.getcwd()
    if module.endswith(".py"):
        path = Path(module)
        if not path.is_file():
            raise ConfigError(f"{option}; the file {path} does not exist in {folder}")
        folder, module = str(path.parent.resolve()), path.stem
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name is None or not f"{module}.".startswith(f"{e.name}."):
            raise  # the user's module exists, but imports a missing module
        raise ConfigError(
            f"{option}; the module {e.name} is neither in {folder} nor installed"
        ) from e
