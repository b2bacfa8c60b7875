"""JAX's coordinator binds one address of its host, if it is known, and requires certificates if it
can."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from coordinator_strangers import make_certificates
from paths import SUPPORT
from role_threads import free_endpoints
from trainer_processes import started

import dtrans
from dtrans._jax import detected_coordinator, has_coordinator_mtls
from dtrans.errors import ConfigError
from dtrans.run.distributed import connect as connect_module
from dtrans.run.distributed.connect import bind_address
from dtrans.run.distributed.role import trainer_roles


PATIENCE = 120.0
JOB = f"""
import os, sys
from pathlib import Path
sys.path.insert(0, {str(SUPPORT)!r})
import dtrans
cluster = dtrans.connect(deadline=60.0)
import jax.numpy as jnp
from coordinator_strangers import context, greets, listening
from dtrans.endpoints import split_endpoint
from dtrans.run.distributed.multihost import all_reduce_sum
if cluster.trainer_id == 0:
    print("listens at", *sorted(listening()))
else:
    folder = os.environ.get("JAX_MTLS_CA_FILE")
    shown = [context(Path(folder).parent, own=own) for own in (False, True)] if folder else []
    where = split_endpoint(dtrans.Role.from_env().trainer_endpoints[0])
    print("greets", *(greets(*where, way) for way in (None, *shown)))
(found,) = all_reduce_sum(jnp.ones(1))
print("sum", int(found[0]))
"""


def run_job(host: str, **env: str) -> list[list[str]]:
    """Run a job of two trainers at one address, and return the last two lines of each."""
    said = []
    roles = trainer_roles([f"{host}:{e.rpartition(':')[2]}" for e in free_endpoints(2)])
    command = ["env", *(f"{k}={v}" for k, v in env.items()), sys.executable, "-c", JOB]
    with started(roles, *command) as processes:
        for process in processes:
            out, _ = process.communicate(timeout=PATIENCE)
            assert process.returncode == 0, out
            said.append(
                [line for line in out.splitlines() if line.startswith(("listens", "greets", "sum"))]
            )
    return said


@pytest.mark.skipif(sys.platform != "linux", reason="a second address of loopback")
def test_the_coordinator_listens_at_the_address_of_the_job_alone() -> None:
    """The coordinator answers every connection there: without certificates, it requires no
    secret."""
    assert run_job("127.0.0.2") == [["listens at 127.0.0.2", "sum 2"], ["greets True", "sum 2"]]


@pytest.mark.skipif(not has_coordinator_mtls(), reason="this JAX has no mTLS")
@pytest.mark.skipif(
    shutil.which("openssl") is None, reason="there is no openssl, which makes the certificates"
)
def test_a_stranger_without_a_certificate_is_not_let_in(tmp_path: Path) -> None:
    """Neither a connection without TLS nor the job's certificate authority suffices.

    A certificate of the job does.
    """
    make_certificates(tmp_path, "127.0.0.1")
    files = {"CERT": "own.pem", "KEY": "own.key", "CA": "ca.pem"}
    env = {f"JAX_MTLS_{name}_FILE": str(tmp_path / file) for name, file in files.items()}
    assert run_job("127.0.0.1", **env) == [
        ["listens at 127.0.0.1", "sum 2"],
        ["greets False False True", "sum 2"],
    ]


@pytest.mark.parametrize(
    ("coordinator", "resolves", "bound"),
    [
        # as on Debian, the host resolves its own name to another address than other hosts do
        (
            "node001:61440",
            "127.0.0.1",
            "",
        ),
        ("127.0.0.2:61440", "127.0.0.2", "127.0.0.2:61440"),
        ("[::1]:61440", "::1", "[::1]:61440"),
        ("node002:61440", "192.0.2.1", ""),  # the address of another host
        ("node003:61440", "", ""),
        ("", "", ""),
    ],
)
def test_the_address_that_a_coordinator_binds(
    monkeypatch: pytest.MonkeyPatch, coordinator: str, resolves: str, bound: str
) -> None:
    monkeypatch.setattr(connect_module, "resolve_host", lambda host: resolves)
    assert bind_address(coordinator) == bound


def test_schedulers_say_where_the_coordinator_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert detected_coordinator(1) == ""
    slurm = {
        "JOB_ID": "7",
        "STEP_NODELIST": "node[3-5]",
        "NTASKS": "3",
        "PROCID": "0",
        "LOCALID": "0",
    }
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("JAX_COORDINATOR_PORT", "61440")
    assert detected_coordinator(1) == "node3:61440"
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "10.0.0.1:7")
    assert detected_coordinator(1) == "10.0.0.1:7"


@pytest.mark.parametrize(("loss", "seconds"), [("abort", 2 * (7 + 10)), ("drop", 7)])
def test_heartbeats_of_jax_outlast_the_patience(
    monkeypatch: pytest.MonkeyPatch, loss: str, seconds: int
) -> None:
    """Two heartbeats fit into the timeout, so half of the timeout is longer than the job's
    `patience`."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **options: given.update(options))
    monkeypatch.setattr(connect_module, "backends_started", lambda: False)
    monkeypatch.setattr(connect_module.elastic, "prepare", lambda seconds: None)
    connect_module._connect(None, connect_module._Options(60.0, 6.5, False, "auto", loss))
    assert given["heartbeat_timeout_seconds"] == seconds


@pytest.mark.skipif(has_coordinator_mtls(), reason="this JAX has mTLS")
def test_mtls_that_this_jax_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_MTLS_CERT_FILE", "cert.pem")
    (role,) = trainer_roles(free_endpoints(1))
    with pytest.raises(
        ConfigError,
        match="^JAX_MTLS_CERT_FILE is set, and jax .* has no mTLS: its coordinator would",
    ):
        dtrans.connect(role)
