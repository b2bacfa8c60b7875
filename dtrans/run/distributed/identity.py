"""Messages that give a role to a spare, a process that waits to replace a lost role of a job.

A spare runs the job's script, and waits in `Role.from_env` for a role. When a role is lost, the
launcher writes the role's environment variables to the spare's standard input, as one line of JSON.
Then it closes this input.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping


VARIABLE = "DTRANS_SPARE"  # set in a spare until it has an identity


def identity_line(variables: Mapping[str, str]) -> bytes:
    """Return the line that gives a spare process the variables of its role.

    Args:
      variables: the variables that the spare's environment does not have yet.
    """
    return json.dumps(dict(variables)).encode() + b"\n"


def receive_identity() -> None:
    """Wait for a role if this process is a spare, and set the role's variables; else do nothing."""
    if not os.environ.pop(VARIABLE, ""):
        return
    with open(0, "rb", closefd=False) as stdin:
        line = stdin.readline()
    if not line:
        sys.exit("the launcher of this spare has ended")
    os.environ.update(json.loads(line))
