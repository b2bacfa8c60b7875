"""Hosts that a user lists for a job, in a file or in a short form.

A file has a host on each line, and `#` begins a comment:

    gpu1                            # any number of roles
    gpu2  slots=2                   # two roles at most
    alice@gpu3  address=10.0.0.7    # the address to which the other hosts connect
    gpu4  python=/opt/venv/bin/python

The short form lists hosts with optional numbers of slots: `gpu1:2,gpu2:2`.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from pathlib import Path

from dtrans.endpoints import WILDCARD_ADDRESSES, parse_host_slots
from dtrans.errors import ConfigError


FIELDS = ("slots", "address", "python")
EXAMPLE = "write a line such as `gpu1 slots=2 address=10.0.0.5 python=/opt/venv/bin/python`"


@dataclasses.dataclass(frozen=True)
class HostEntry:
    """A host that a user lists for a job: a line such as `gpu1 slots=2`.

    Attributes:
      name: the host's name for `ssh`; `user@name` is allowed.
      slots: the largest number of roles on the host; None for any number.
      address: the name or IP address to which other hosts connect. If it is empty, the host
        resolves its own name.
      python: the interpreter on the host; empty for the launcher's path.

    Raises:
      ConfigError: a field is invalid.

    Example:
      >>> from dtrans.hosts.host_list import HostEntry, read_hosts
      >>> [(host.name, host.slots) for host in read_hosts("gpu1:2,gpu2")]
      [('gpu1', 2), ('gpu2', None)]
    """

    name: str
    slots: int | None = None
    address: str = ""
    python: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"(\w[\w.-]*@)?\w[\w.-]*", self.name):
            raise ConfigError(f"{self.name!r} is not the name of a host; {EXAMPLE}")
        if self.slots is not None and self.slots < 1:
            raise ConfigError(
                f"host {self.name} has slots={self.slots}; write 1 or more, or leave slots out"
            )
        if self.address in WILDCARD_ADDRESSES or re.search(r"[\s/,;@]", self.address):
            raise ConfigError(
                f"host {self.name} has address={self.address}, to which other hosts cannot "
                "connect; write one of the host's own addresses"
            )


def read_hosts(source: str | Path) -> tuple[HostEntry, ...]:
    """Read the hosts in a file, or in a list such as `gpu1:2,gpu2:2`.

    Raises:
      ConfigError: a line is invalid, a host is listed twice, or there are no hosts.
    """
    path = Path(source)
    if path.is_file():
        hosts = tuple(_from_file(path))
    elif "/" in str(source) or isinstance(source, Path):
        raise ConfigError(f"the file of hosts {source} does not exist")
    else:
        hosts = tuple(_from_list(source))
    if not hosts:
        raise ConfigError(f"{source} contains no hosts; {EXAMPLE}")
    counts = collections.Counter(host.name for host in hosts)
    for name in sorted(counts):
        if counts[name] > 1:
            raise ConfigError(
                f"host {name} is listed {counts[name]} times; write it once, with slots="
            )
    return hosts


def _from_file(path: Path) -> list[HostEntry]:
    hosts = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        fields = dict(word.partition("=")[::2] for word in words[1:])
        if len(fields) < len(words) - 1:
            raise ConfigError(f"{path}:{number} has a field twice; {EXAMPLE}")
        for name, value in fields.items():
            if name not in FIELDS or not value:
                raise ConfigError(
                    f"{path}:{number} has {name!r}; the fields are {', '.join(FIELDS)}: {EXAMPLE}"
                )
        slots = None
        if "slots" in fields:
            slots = _number(f"{path}:{number}", fields["slots"])
        address, python = fields.get("address", ""), fields.get("python", "")
        hosts.append(HostEntry(words[0], slots, address, python))
    return hosts


def _from_list(text: str) -> list[HostEntry]:
    return [HostEntry(name, slots) for name, slots in parse_host_slots(text, "--hosts")]


def _number(where: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(
            f"{where} has {text!r} as the number of slots; write a number, such as slots=2"
        )
    return int(text)
