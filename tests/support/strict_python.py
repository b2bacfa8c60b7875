"""The command of a Python process in which a warning is an error."""

from __future__ import annotations

import sys


# JAX writes a file of the compilation cache in place. A process that reads an incomplete file
# warns, and compiles the program.
STRICT_PYTHON = (
    sys.executable,
    "-W",
    "error",
    "-W",
    "default:Error reading persistent compilation cache",
)
