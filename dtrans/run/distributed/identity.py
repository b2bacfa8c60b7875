"""Identity of a spare: the environment variables of the role that the spare becomes.

A spare is a process that runs the script of a job, and waits in `Role.from_env` for a role. The
launcher writes the identity to the spare's standard input, as one line of JSON, and closes this
input.
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
    """Wait until a spare process has a role, and set the role's variables; else do nothing."""
    if not os.environ.pop(VARIABLE, ""):
        return
    with open(0, "rb", closefd=False) as stdin:
        line = stdin.readline()
    if not line:
        sys.exit("the launcher of this spare has ended")
    os.environ.update(json.loads(line))
