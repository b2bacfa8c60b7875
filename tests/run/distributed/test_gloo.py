"""The address at which Gloo listens. The host's own name resolves to loopback on Debian."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from typing import Any

import pytest
from trainer_processes import started

from dtrans.endpoints import resolve_host
from dtrans.errors import ConfigError
from dtrans.run.distributed import gloo
from dtrans.run.distributed.gloo import check_host_name, reachable


PATIENCE = 120.0
# a command that runs a process with another host name
RENAMED = [
    "unshare",
    "--uts",
    "sh",
    "-c",
    'hostname nowhere.invalid && exec "$@"',
    "sh",
]
JOB = """
import dtrans, jax, jax.numpy as jnp
cluster = dtrans.connect(deadline=60.0)
from dtrans.run.distributed.multihost import all_reduce_sum
(found,) = all_reduce_sum(jnp.ones(3))
print(__import__("socket").gethostname(), found.tolist())
"""
HOSTS = {0: "node1 a", 1: "node1 a", 2: "node2 b"}


def test_the_route_to_the_coordinator_is_taken() -> None:
    known = {0: "127.0.1.1", 1: "127.0.1.1", 2: "10.0.0.1"}
    assert reachable(2, "10.0.0.2", HOSTS, known) == "10.0.0.2"
    assert (
        reachable(0, "127.0.1.1", HOSTS, known)
        == reachable(1, "127.0.0.1", HOSTS, known)
        == "10.0.0.1"
    )
    assert reachable(0, "127.0.1.1", HOSTS, dict.fromkeys(HOSTS, "127.0.1.1")) == ""


def resolving(monkeypatch: pytest.MonkeyPatch, names: dict[str, str]) -> None:
    monkeypatch.setattr(gloo, "resolve_host", lambda host: names.get(host, host))


def test_a_host_that_does_not_know_itself_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "debian")
    for address, told in (("127.0.1.1", r"127\.0\.1\.1"), ("", "nothing")):
        resolving(monkeypatch, {"debian": address})
        with pytest.raises(
            ConfigError, match=rf"debian resolves to {told}. Either write the host's real address"
        ):
            check_host_name(1)
    resolving(monkeypatch, {"debian": "10.0.0.1"})
    check_host_name(1)


def test_what_a_name_resolves_to() -> None:
    assert resolve_host("127.0.0.1") == "127.0.0.1"
    assert resolve_host("nowhere.invalid") == ""


def may_rename() -> bool:
    found: Any = shutil.which("unshare") and subprocess.run(
        [*RENAMED, "true"], capture_output=True, check=False
    )
    return found is not None and found.returncode == 0


@pytest.mark.skipif(
    not may_rename(), reason="takes a host name of its own, which only root may give a process"
)
def test_a_name_that_resolves_to_nothing_is_not_asked_for() -> None:
    """dtrans passes an address to Gloo. Without this address, Gloo would fail when it resolves the
    host's name."""
    with started(2, *RENAMED, sys.executable, "-c", JOB) as processes:
        for process in processes:
            said, _ = process.communicate(timeout=PATIENCE)
            assert process.returncode == 0, said
            assert "nowhere.invalid [2.0, 2.0, 2.0]" in said
