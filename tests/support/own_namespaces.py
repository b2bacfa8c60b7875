"""Hosts for one test: network namespaces on one switch, which share only the file system.

Each host has a name. It resolves this name and localhost, but no other host. Each host has a
separate folder for temporary files, at one path for all hosts. So the path of a Unix socket on one
host is no socket on another host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path


OWN_FILES = Path("/etc/netns")  # where `ip netns exec` looks for a host's own files of /etc
NET = "10.77.0"
RSH = """#!/bin/sh
name=$1
shift
export TMPDIR={private}
exec ip netns exec "$name" unshare --mount --uts \\
  sh -ec 'hostname "$0"; mount -t tmpfs tmpfs "$TMPDIR"; exec "$@"' "$name" "$@"
"""


@dataclasses.dataclass(frozen=True)
class Namespaces:
    """Running hosts.

    Attributes:
      names: names of the namespaces.
      switch: the namespace that connects the hosts.
      rsh: the command that runs another command on a host.
    """

    names: tuple[str, ...]
    switch: str
    rsh: str

    def address(self, i: int) -> str:
        """Return the address of a host."""
        return f"{NET}.{10 + i}"

    def enter(self, i: int) -> tuple[str, ...]:
        """Return the command prefix that runs a command in a host's network, with this host's
        files.
        """
        return ("nsenter", f"--net=/run/netns/{self.names[i]}")

    def name_addresses(self, addresses: Mapping[str, str]) -> Path:
        """Give the first host more addresses, and names that only this host resolves.

        Returns:
          The host's file /etc/hosts.
        """
        name = self.names[0]
        for address in set(addresses.values()) - {self.address(0)}:
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "e")
        path = OWN_FILES / name / "hosts"
        with path.open("a") as file:
            file.writelines(f"{address} {new}\n" for new, address in addresses.items())
        return path

    def cut(self, i: int) -> None:
        """Drop all packets to and from a host. No process is notified."""
        _ip("-n", self.switch, "link", "set", "dev", f"p{i}", "nomaster")

    def mend(self, i: int) -> None:
        """Let all packets pass again."""
        _ip("-n", self.switch, "link", "set", "dev", f"p{i}", "master", "sw0")
        self._flood(i, "on")

    def deafen(self, i: int) -> None:
        """Drop all packets to a host. Other hosts still receive the packets that the host sends."""
        self._flood(i, "off")
        # the switch forgets the host's address, so that it would flood packets for the host
        _ip("-n", self.switch, "link", "set", "dev", f"p{i}", "type", "bridge_slave", "fdb_flush")

    def part(self, i: int) -> None:
        """Move a host to another switch, where it reaches only the hosts on this switch."""
        _ip("-n", self.switch, "link", "set", "dev", f"p{i}", "master", "sw1")

    def slow(self, i: int, rate: str) -> None:
        """Limit the rate of a host's packets, in both directions, such as `20mbit`."""
        for name, device in ((self.names[i], "e"), (self.switch, f"p{i}")):
            shape = ("root", "tbf", "rate", rate, "burst", "64kb", "latency", "200ms")
            command = ["tc", "-n", name, "qdisc", "add", "dev", device, *shape]
            subprocess.run(command, check=True, capture_output=True)

    def _flood(self, i: int, value: str) -> None:
        kinds = ("learning", "flood", "bcast_flood", "mcast_flood")
        options = [word for kind in kinds for word in (kind, value)]
        _ip("-n", self.switch, "link", "set", "dev", f"p{i}", "type", "bridge_slave", *options)

    def processes(self) -> list[str]:
        """Return the command lines of processes on these hosts. A zombie has no command line."""
        pids = [pid for name in self.names for pid in _ip("netns", "pids", name).split()]
        found = []
        for pid in pids:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found.append(
                    Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                )
        return [command for command in found if command]


def why_not() -> str:
    """Return the reason why namespaces cannot be created here; empty if they can."""
    if shutil.which("ip") is None:
        return "there is no ip (Debian: iproute2)"
    made = subprocess.run(
        ["ip", "netns", "add", f"dt{os.getpid()}try"], capture_output=True, text=True
    )
    if made.returncode:
        return f"network namespaces cannot be made: {made.stderr.strip()}"
    _ip("netns", "del", f"dt{os.getpid()}try")
    return ""


def _remove_if_empty(folder: Path) -> None:
    """Remove a folder, unless it has files of other tests, which run at the same time."""
    try:
        folder.rmdir()
    except OSError as e:
        if e.errno not in (errno.ENOTEMPTY, errno.ENOENT):
            raise


@contextlib.contextmanager
def namespaces(count: int) -> Iterator[Namespaces]:
    """Yield hosts; at the end, remove them and their processes."""
    prefix = f"dt{os.getpid()}"
    had_files = OWN_FILES.exists()
    with contextlib.ExitStack() as stack:
        # a short path: Unix sockets have room for 107 characters
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="t")))
        (folder / "private").mkdir()
        rsh = folder / "rsh"
        rsh.write_text(RSH.format(private=folder / "private"))
        rsh.chmod(0o755)
        hosts = Namespaces(tuple(f"{prefix}h{i}" for i in range(count)), f"{prefix}sw", str(rsh))
        if not had_files:
            stack.callback(_remove_if_empty, OWN_FILES)
        _add(hosts.switch, stack)
        for bridge in ("sw0", "sw1"):
            _ip("-n", hosts.switch, "link", "add", bridge, "type", "bridge")
            _ip("-n", hosts.switch, "link", "set", "dev", bridge, "up")
        for i, name in enumerate(hosts.names):
            _add(name, stack)
            files = OWN_FILES / name
            files.mkdir(parents=True)
            stack.callback(shutil.rmtree, files)
            (files / "hosts").write_text(f"127.0.0.1 localhost\n{hosts.address(i)} {name}\n")
            _ip(
                "link",
                "add",
                "e",
                "netns",
                name,
                "type",
                "veth",
                "peer",
                "name",
                f"p{i}",
                "netns",
                hosts.switch,
            )
            _ip("-n", name, "addr", "add", f"{hosts.address(i)}/24", "dev", "e")
            for device in ("e", "lo"):
                _ip("-n", name, "link", "set", device, "up")
            _ip("-n", hosts.switch, "link", "set", f"p{i}", "master", "sw0")
            _ip("-n", hosts.switch, "link", "set", f"p{i}", "up")
        yield hosts


def _add(name: str, stack: contextlib.ExitStack) -> None:
    _ip("netns", "add", name)
    stack.callback(_remove, name)


def _remove(name: str) -> None:
    for pid in _ip("netns", "pids", name).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), 9)
    _ip("netns", "del", name)


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
