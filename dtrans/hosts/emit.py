"""Functions that write a job as a file for a scheduler: `dtrans launch --emit slurm`, for example.

Each is a pure function from a table of the job's roles to text.
"""

from __future__ import annotations

from collections.abc import Callable

from dtrans.hosts.emit_jobset import emit_jobset
from dtrans.hosts.emit_slurm import emit_slurm
from dtrans.hosts.emit_ssh import emit_ssh
from dtrans.hosts.emit_torchx import emit_torchx


EMITTERS: dict[str, Callable[..., str]] = {
    "hosts": emit_ssh,
    "slurm": emit_slurm,
    "jobset": emit_jobset,
    "torchx": emit_torchx,
}
IN_IMAGE = ("jobset", "torchx")  # roles run the interpreter of a container image
