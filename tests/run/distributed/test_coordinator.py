"""JAX's coordinator is bound to one address of its host where that is known, and mTLS is asked for in vain by name."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from role_threads import free_endpoints

import dtrans
from dtrans._jax import detected_coordinator, has_coordinator_mtls
from dtrans.errors import ConfigError
from dtrans.run.distributed import connect as connect_module
from dtrans.run.distributed.connect import bind_address
from dtrans.run.distributed.role import trainer_roles


@pytest.mark.parametrize(
    ("coordinator", "resolves", "bound"),
    [
        ("node001:61440", "127.0.0.1", ""),  # its own name, as Debian has it: other hosts know another address
        ("127.0.0.2:61440", "127.0.0.2", "127.0.0.2:61440"),
        ("[::1]:61440", "::1", "[::1]:61440"),
        ("node002:61440", "192.0.2.1", ""),  # another host's
        ("node003:61440", "", ""),
        ("", "", ""),
    ],
)
def test_the_address_that_a_coordinator_binds(
    monkeypatch: pytest.MonkeyPatch, coordinator: str, resolves: str, bound: str
) -> None:
    monkeypatch.setattr(connect_module, "resolved", lambda host: resolves)
    assert bind_address(coordinator) == bound


def test_schedulers_say_where_the_coordinator_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert detected_coordinator(1) == ""
    slurm = {"JOB_ID": "7", "STEP_NODELIST": "node[3-5]", "NTASKS": "3", "PROCID": "0", "LOCALID": "0"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("JAX_COORDINATOR_PORT", "61440")
    assert detected_coordinator(1) == "node3:61440"
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "10.0.0.1:7")
    assert detected_coordinator(1) == "10.0.0.1:7"


@pytest.mark.parametrize(("loss", "seconds"), [("abort", 2 * (7 + 10)), ("drop", 7)])
def test_heartbeats_of_jax_outlast_the_patience(monkeypatch: pytest.MonkeyPatch, loss: str, seconds: int) -> None:
    """Two heartbeats fit into the timeout: half of it is longer than the job's own patience."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **options: given.update(options))
    monkeypatch.setattr(connect_module, "backends_started", lambda: False)
    monkeypatch.setattr(connect_module.elastic, "prepare", lambda seconds: None)
    connect_module._connect(None, 60.0, 6.5, False, "auto", loss)
    assert given["heartbeat_timeout_seconds"] == seconds


@pytest.mark.skipif(has_coordinator_mtls(), reason="this JAX has mTLS")
def test_mtls_that_this_jax_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_MTLS_CERT_FILE", "cert.pem")
    (role,) = trainer_roles(free_endpoints(1))
    with pytest.raises(ConfigError, match="^JAX_MTLS_CERT_FILE is set, and jax .* has no mTLS: its coordinator would"):
        dtrans.connect(role)
