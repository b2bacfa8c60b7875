"""Hosts of a job, as a user writes them.

A file has a host on each line, and `#` begins a comment:

    gpu1                            # as many roles as there are to place
    gpu2  slots=2                   # two at most
    alice@gpu3  address=10.0.0.7    # for connections from the other hosts
    gpu4  python=/opt/venv/bin/python

The short form is a list with the numbers of slots: `gpu1:2,gpu2:2`.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from dtrans.endpoints import WILDCARD_ADDRESSES, parse_host_slots
from dtrans.errors import ConfigError


FIELDS = ("slots", "address", "python")
EXAMPLE = "write a line such as `gpu1 slots=2 address=10.0.0.5 python=/opt/venv/bin/python`"


@dataclasses.dataclass(frozen=True)
class HostEntry:
    """A host that may run roles of a job.

    Attributes:
      name: the user's name for it, as `ssh` takes it; `user@name` is allowed.
      slots: the most roles that it takes; None for any number.
      address: the name or number that other hosts connect to; if empty, the host is asked for it.
      python: the interpreter there; empty for the one of the launcher.

    Raises:
      ConfigError: an invalid field.

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
                f"host {self.name} has slots={self.slots}; give it 1 or more, or leave it out"
            )
        if self.address in WILDCARD_ADDRESSES or re.search(r"[\s/,;@]", self.address):
            raise ConfigError(
                f"host {self.name} has address={self.address}, which other hosts cannot connect "
                "to; "
                "give one of the host's own addresses"
            )


def read_hosts(source: str | Path) -> tuple[HostEntry, ...]:
    """Read the hosts in a file, or in a list such as `gpu1:2,gpu2:2`.

    Raises:
      ConfigError: a line cannot be read, a host is listed twice, or there is none.
    """
    path = Path(source)
    if path.is_file():
        hosts = tuple(_from_file(path))
    elif "/" in str(source) or isinstance(source, Path):
        raise ConfigError(f"there is no file of hosts {source}")
    else:
        hosts = tuple(_from_list(source))
    if not hosts:
        raise ConfigError(f"{source} names no host; {EXAMPLE}")
    names = [host.name for host in hosts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"host {twice[0]} is listed {names.count(twice[0])} times; write it once, with its "
            "slots"
        )
    return hosts


def _from_file(path: Path) -> list[HostEntry]:
    hosts = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        fields = dict(word.partition("=")[::2] for word in words[1:])
        odd = [name for name, value in fields.items() if name not in FIELDS or not value]
        if odd or len(fields) < len(words) - 1:
            wrong = odd[0] if odd else "a field twice"
            raise ConfigError(
                f"{path}:{number} has {wrong!r}; the fields are {', '.join(FIELDS)}: {EXAMPLE}"
            )
        slots = _number(f"{path}:{number}", fields["slots"]) if "slots" in fields else None
        address, python = fields.get("address", ""), fields.get("python", "")
        hosts.append(HostEntry(words[0], slots, address, python))
    return hosts


def _from_list(text: str) -> list[HostEntry]:
    return [HostEntry(name, slots) for name, slots in parse_host_slots(text, "--hosts")]


def _number(where: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(
            f"{where} has {text!r} as the number of slots; write a number, such as gpu1:2 or "
            "slots=2"
        )
    return int(text)
