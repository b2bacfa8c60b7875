"""JAX's persistent compilation cache, for the roles of a job that may start again.

A role (process of the job) that starts again finds its compiled programs in a temporary folder.
They are not in the folder of the job's snapshots, because another host may use that folder later.
Compiled programs are for this host's processor.

JAX writes the files in place, so a role may find an incomplete file: another role is writing the
file, or a signal killed the writer. JAX then warns in the role that reads the file, and compiles
the program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from dtrans.run.net.temp_dir import TempDir


FOLDER = "JAX_COMPILATION_CACHE_DIR"
SWITCH = "JAX_ENABLE_COMPILATION_CACHE"
SHORTEST = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"


@contextlib.contextmanager
def open_cache(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield environment variables that give JAX a compilation cache in a temporary folder.

    The dict is empty if the user's variables set or disable a cache.

    Args:
      environment: the variables that all roles share.

    Example:
      >>> from dtrans.run.distributed.compile_cache import open_cache
      >>> with open_cache({}) as variables:
      ...     print(*variables)
      JAX_COMPILATION_CACHE_DIR JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS
      >>> with open_cache({"JAX_ENABLE_COMPILATION_CACHE": "false"}) as variables:
      ...     variables
      {}
    """
    if FOLDER in environment or SWITCH in environment:
        yield {}
        return
    folder = TempDir()
    try:
        # JAX's default is one second. A step of a small model has many shorter compilations.
        yield {FOLDER: str(folder.path), SHORTEST: environment.get(SHORTEST, "0")}
    finally:
        folder.close()
