"""Hosts that are all this machine: a small script replaces ssh.

The script ignores the name of the host, and runs the command. A host called `down` cannot be
reached. The host `apart` has the folder `apart` of the test as its working directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

from dtrans.hosts import on_hosts, remote_agent
from dtrans.hosts.host_check import FoundHost
from dtrans.hosts.host_list import HostEntry


HOSTS = (HostEntry("one"), HostEntry("two"))
RSH = """#!/bin/sh
if [ "$1" = down ]; then echo "no route to down" >&2; exit 255; fi
if [ "$1" = apart ]; then cd "{apart}"; fi
shift
exec "$@"
"""


def write_rsh(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write the script into a folder, and return its path."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (folder / "apart").mkdir()
    path = folder / "rsh"
    path.write_text(RSH.format(apart=folder / "apart"))
    path.chmod(0o755)
    return str(path)


def find_without_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the checks of hosts, which import JAX on each host."""

    def check_hosts(
        hosts: Any, rsh: str, python: str, *, script: str, ports: int, snapshots: Any
    ) -> list[FoundHost]:
        free = remote_agent._free_ports("127.0.0.1", ports * len(hosts))
        parts = [tuple(free[i * ports : (i + 1) * ports]) for i in range(len(hosts))]
        return [
            FoundHost(h, python, remote_agent.__file__, "127.0.0.1", p, 2)
            for h, p in zip(hosts, parts, strict=True)
        ]

    monkeypatch.setattr(on_hosts, "check_hosts", check_hosts)
