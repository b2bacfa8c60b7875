"""Hosts for a test or a benchmark: network namespaces on one switch, which share the file system.

Each host has a name. A host resolves this name and localhost, but no other host. Each host has a
separate folder for temporary files, at one path for all hosts. So the path of a Unix socket on one
host is no socket on another host.

Namespaces need Linux, root and `ip`. Shaped links also need `tc` and two modules of the kernel:
sch_tbf, which limits the rate, and sch_netem for a delay.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from dtrans.costs import link_rate


HOST_FILES = Path("/etc/netns")  # folder of `ip netns exec`, with a host's files of /etc
NET = "10.77.0"
# arguments with which `why_not` tries each kind of queue
TRIED = {"tbf": ("rate", "1mbit", "burst", "64kb", "latency", "1ms"), "netem": ("delay", "1ms")}
RSH = """#!/bin/sh
name=$1
shift
export TMPDIR={private}
exec ip netns exec "$name" unshare --mount --uts \\
  sh -ec 'hostname "$0"; mount -t tmpfs tmpfs "$TMPDIR"; exec "$@"' "$name" "$@"
"""


@dataclasses.dataclass(frozen=True)
class Namespaces:
    """Running hosts, each in its network namespace.

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
        path = HOST_FILES / name / "hosts"
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

    def shape(self, i: int, rate: str, delay: float = 0.0) -> None:
        """Limit the rate of a host's link, in each direction, and delay the packets that it sends.

        Args:
          i: index of the host.
          rate: rate such as "20mbit". A second call replaces the rate of the first.
          delay: seconds from this host to the switch.
        """
        rate_bytes = link_rate(rate)
        # Linux sends up to 64 KB at once to a virtual link. A burst must also last until the next
        # tick of the kernel's clock, at most 4 ms.
        burst = max(65536, int(0.004 * rate_bytes))
        limit = ("rate", f"{8 * rate_bytes:.0f}bit", "burst", f"{burst}b", "latency", "100ms")
        for name, device in ((self.names[i], "e"), (self.switch, f"p{i}")):
            _tc(name, device, "root", "handle", "1:", "tbf", *limit)
        if delay:
            packets = ("delay", f"{1e6 * delay:.0f}us", "limit", "20000")
            _tc(self.names[i], "e", "parent", "1:", "handle", "2:", "netem", *packets)

    def sent_bytes(self) -> int:
        """Return the bytes that all hosts have sent so far: every packet, with its headers."""
        total = 0
        for name in self.names:
            (link,) = json.loads(_ip("-n", name, "-s", "-j", "link", "show", "dev", "e"))
            total += link["stats64"]["tx"]["bytes"]
        return total

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


def why_not(*qdiscs: str) -> str:
    """Return the reason why hosts cannot be created here; empty if they can.

    Args:
      qdiscs: kinds of queues that links need: "tbf" for a rate, "netem" for a delay.
    """
    for program in ("ip", *(["tc"] if qdiscs else [])):
        if shutil.which(program) is None:
            return f"there is no {program} (Debian: iproute2)"
    name = f"dt{os.getpid()}try"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if done.returncode:
        return f"network namespaces cannot be created: {done.stderr.strip()}"
    try:
        for kind in qdiscs:
            _tc(name, "lo", "root", kind, *TRIED[kind])
    except subprocess.CalledProcessError as e:
        return f"tc cannot add a queue of the kind {kind}: {e.stderr.strip()}"
    finally:
        _remove(name)
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
    had_files = HOST_FILES.exists()
    with contextlib.ExitStack() as stack:
        # a short path: Unix sockets have room for 107 characters
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="t")))
        (folder / "private").mkdir()
        rsh = folder / "rsh"
        rsh.write_text(RSH.format(private=folder / "private"))
        rsh.chmod(0o755)
        hosts = Namespaces(tuple(f"{prefix}h{i}" for i in range(count)), f"{prefix}sw", str(rsh))
        if not had_files:
            stack.callback(_remove_if_empty, HOST_FILES)
        _add(hosts.switch, stack)
        for bridge in ("sw0", "sw1"):
            _ip("-n", hosts.switch, "link", "add", bridge, "type", "bridge")
            _ip("-n", hosts.switch, "link", "set", "dev", bridge, "up")
        for i, name in enumerate(hosts.names):
            _add(name, stack)
            files = HOST_FILES / name
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
    stack.callback(_remove, name)  # first, since Ctrl-C may end this function after `ip`
    _ip("netns", "add", name)


def _remove(name: str) -> None:
    if not Path("/run/netns", name).exists():
        return
    for pid in _ip("netns", "pids", name).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), 9)
    _ip("netns", "del", name)


def _tc(name: str, device: str, *arguments: str) -> None:
    _run("tc", "-n", name, "qdisc", "replace", "dev", device, *arguments)


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    # a separate session, so that Ctrl-C does not end the command in the middle
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, start_new_session=True
    )
    return done.stdout
