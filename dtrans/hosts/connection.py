"""Commands that run something on another host: `ssh`, or what the user says instead.

A remote shell reads what ssh is given, and none reads what `ip netns exec` is given. So words are
refused that a shell would change: one command then serves both.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence

from dtrans.errors import ConfigError
from dtrans.hosts.host_list import HostEntry


CONNECT = 10  # seconds that ssh may take for a connection
# ssh takes the first value that it is given for an option: the user's stand before these
SSH = (
    *("-o", "BatchMode=yes"),  # nobody is there to type a password
    *("-o", f"ConnectTimeout={CONNECT}"),
    *("-o", "LogLevel=ERROR"),
    # a host that is gone is known after 20 s, before roles lose patience with one another
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
            f"{odd[0]!r} cannot be passed to host {host.name}, whose shell would read it "
            "otherwise; give a path "
            "without spaces and signs, with --python or in PYTHONPATH"
        )
    options = SSH if os.path.basename(words[0]) == "ssh" else ()
    return [*words, *options, host.name, *command]


def rsh_name(rsh: str) -> str:
    """Return the name of the program that reaches a host."""
    return os.path.basename(shlex.split(rsh)[0])
