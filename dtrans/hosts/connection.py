"""Commands that run another one on a host: `ssh`, or the user's `--rsh`.

A remote shell parses the words that ssh passes on; `ip netns exec` passes them unchanged. Words
that a shell would change are refused, so that one command serves both.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence

from dtrans.errors import ConfigError
from dtrans.hosts.host_list import HostEntry


CONNECT = 10  # seconds that ssh may take for a connection
# ssh uses the first value of an option, so the user's options precede these
SSH = (
    *("-o", "BatchMode=yes"),  # no prompt for a password: a launcher has no terminal
    *("-o", f"ConnectTimeout={CONNECT}"),
    *("-o", "LogLevel=ERROR"),
    # 20 s until a lost host is noticed: less than the deadlines of the other roles
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=4"),
    "-T",
)


def connection(rsh: str, host: HostEntry, command: Sequence[str]) -> list[str]:
    """Return the command that runs another one on a host.

    Args:
      rsh: `ssh`, with options or without; or another command that takes a host and a command, `ip
        netns exec`.

    Raises:
      ConfigError: a word that a shell on the host would change.

    Example:
      >>> from dtrans.hosts.connection import connection
      >>> from dtrans.hosts.host_list import HostEntry
      >>> connection("ip netns exec", HostEntry("h1"), ["python", "-V"])
      ['ip', 'netns', 'exec', 'h1', 'python', '-V']
    """
    words = shlex.split(rsh)
    if not words:
        raise ConfigError(
            "--rsh is empty; give the command that reaches a host, such as 'ssh -p 2222'"
        )
    odd = [word for word in command if not re.fullmatch(r"[\w@%+=:,./-]+", word)]
    if odd:
        raise ConfigError(
            f"{odd[0]!r} cannot be passed to host {host.name}, whose shell would change it; give a "
            "path of letters, digits, . _ - and /, with --python or in PYTHONPATH"
        )
    options = SSH if os.path.basename(words[0]) == "ssh" else ()
    return [*words, *options, host.name, *command]


def rsh_name(rsh: str) -> str:
    """Return the name of the program that reaches a host."""
    return os.path.basename(shlex.split(rsh)[0])
