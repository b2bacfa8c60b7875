"""Commands that run a program on another host: by `ssh`, or by the program in option `--rsh`.

With ssh, a shell on the host parses the command, and would change a word such as `*`. Other
programs, such as `ip netns exec`, pass all words unchanged. So a word that a shell would change
raises an error.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence

from dtrans.errors import ConfigError
from dtrans.hosts.host_list import HostEntry


CONNECT = 10  # seconds until ssh gives up a connection
# ssh uses the first value of an option, so the user's options come before these
SSH = (
    *("-o", "BatchMode=yes"),  # no password prompt, since the launcher may have no terminal
    *("-o", f"ConnectTimeout={CONNECT}"),
    *("-o", "LogLevel=ERROR"),
    # a lost host is noticed after 20 s, before the deadlines of the other roles
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=4"),
    "-T",
)


def connection(rsh: str, host: HostEntry, command: Sequence[str]) -> list[str]:
    """Return the command line that runs a command on a host.

    Args:
      rsh: `ssh` with optional options, or another program that takes a host and a command, such as
        `ip netns exec`.
      host: the host.
      command: program and arguments.

    Raises:
      ConfigError: `rsh` is empty, or a shell on the host would change a word of the command.

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
            f"{odd[0]!r} cannot be passed to host {host.name}, because the shell of the host would "
            "change the text; use paths of letters, digits, . _ - and / in --python and PYTHONPATH"
        )
    options = SSH if os.path.basename(words[0]) == "ssh" else ()
    return [*words, *options, host.name, *command]


def absolute_path(path: str) -> str:
    """Make the folders of a search path absolute, for a process with another working directory.

    Empty entries are removed. In the folder `/job`, `src:` becomes `/job/src`.
    """
    return os.pathsep.join(os.path.abspath(p) for p in path.split(os.pathsep) if p)


def carried_variables(
    env: Mapping[str, str], prefixes: tuple[str, ...], names: Collection[str] = ()
) -> dict[str, str]:
    """Return the environment variables that the launcher sends to a role on another host.

    They include PYTHONPATH, and all variables that differ from this process's environment. The role
    gets all other variables from its host.

    Args:
      env: all variables of the role.
      prefixes: prefixes of further variables to return.
      names: names of further variables to return.
    """
    carried = {}
    for name, value in env.items():
        if os.environ.get(name) != value or name.startswith(prefixes) or name in names:
            carried[name] = value
    if path := absolute_path(env.get("PYTHONPATH", "")):
        carried["PYTHONPATH"] = path
    return carried


def rsh_name(rsh: str) -> str:
    """Return the name of the program of an `--rsh` command: `ssh` for `ssh -p 2222`."""
    return os.path.basename(shlex.split(rsh)[0])
