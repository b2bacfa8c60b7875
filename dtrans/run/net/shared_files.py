"""Files that processes of a job read while another process replaces them.

A file is written under another name and renamed, so readers see complete files only. The processes
may be on several hosts that share a folder by NFS. Each read opens the file again, so that it
returns what another host has written and closed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO


TRIES = 100  # maximum number of tries to read a file that another host may replace meanwhile


def write_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file and flush it to the disk, so that a crash leaves the old or the new file.

    Args:
      path: the file. Its folder is created if it does not exist.
      write: writes the contents to an open file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}")
    try:
        with new.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        new.rename(path)
    except OSError:
        # the disk may be full, so leave no incomplete file
        new.unlink(missing_ok=True)
        raise


def write_json(path: Path, fields: Mapping[str, Any]) -> None:
    """Write a JSON file as `write_file` does."""
    write_file(path, lambda file: file.write(json.dumps(fields).encode()))


def read_json(path: Path) -> dict[str, Any]:
    """Return the contents of a JSON file, also if another host replaces the file at this moment.

    Raises:
      FileNotFoundError: the file does not exist.
    """
    for number in range(TRIES):
        try:
            return dict(json.loads(path.read_text()))
        except OSError as e:
            # On NFS, another host may replace a file while this host reads the file.
            if e.errno != errno.ESTALE or number == TRIES - 1:
                raise
    raise AssertionError("unreachable: the last try either returns or raises an error")


def read_all_json(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the contents of all JSON files in a folder, by name in sorted order."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(folder.iterdir()):
            if not path.name.startswith("."):
                found[path.name] = read_json(path)
    return found
