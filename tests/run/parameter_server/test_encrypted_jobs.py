"""Jobs of parameter servers with encrypted connections: the results of one device, and the errors
of refused peers."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from helpers import mlp_loss, plain_run, plain_step, tree_close
from lifecycle_job import TX, batch_of, params_of, plan_for
from role_threads import HANG, RoleThreads, free_endpoints, serve, train, until
from socket_attacks import Tap, address

from dtrans.errors import ConfigError, PeerError
from dtrans.protocol.token import new_token
from dtrans.run.net import zmq_transport
from dtrans.run.net.keys import make_folder
from dtrans.run.status.observer import JobObserver


@pytest.fixture(autouse=True)
def x64() -> Any:
    with jax.enable_x64(True):
        yield


def by_token(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("DTRANS_TOKEN", new_token())
    monkeypatch.setenv("DTRANS_TRANSPORT_ENCRYPTION", "required")


def by_separate_keys(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    make_folder(folder / "keys", ["trainer 0", "trainer 1", "status"])
    monkeypatch.setenv("DTRANS_KEYS", str(folder / "keys"))


@pytest.mark.parametrize("protected", [by_token, by_separate_keys])
def test_an_encrypted_job_equals_one_device(
    role_threads: RoleThreads,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    protected: Callable[[pytest.MonkeyPatch, Path], None],
) -> None:
    """The servers of the job exchange partial sums, and answer requests for their status."""
    protected(monkeypatch, tmp_path)
    pservers, params, batches = free_endpoints(2), params_of(), [batch_of(i, 2) for i in range(2)]
    plan = plan_for(pservers, 2)
    for ep in pservers:
        role_threads.start(ep, serve, plan, ep, params)
    seen: list[bool] = []

    def observe(step: int) -> None:
        if step:
            with JobObserver(pservers, HANG) as observer:
                seen.extend(answer.server is not None for answer in observer.ask())

    for k in range(2):
        role_threads.start(
            f"trainer {k}", train, plan, k, batches, params, before=None if k else observe
        )
    ended = role_threads.all()
    want, *_ = plain_run(plain_step(mlp_loss, TX), params, TX.init(params), batches)
    for k in range(2):
        tree_close(ended[f"trainer {k}"][0], want, 1e-12)
    assert seen == [True, True]


def answers(endpoint: str) -> bool:
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection(address(endpoint)):
        return True
    return False


def test_a_gradient_cannot_be_read_on_the_way(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a password, an observer can read the name of the leaf."""
    monkeypatch.setenv("DTRANS_TOKEN", new_token())
    reaches = lambda self, local: False  # TCP instead of a Unix socket
    monkeypatch.setattr(zmq_transport.ZmqTransport, "reaches", reaches)
    for encryption, readable in (("required", False), ("disabled", True)):
        (ep,), params = free_endpoints(1), params_of()
        tap = Tap(ep)
        monkeypatch.setattr(
            zmq_transport, "tcp_address", lambda endpoint, at=tap.endpoint: f"tcp://{at}"
        )
        plan, options = plan_for((ep,), 1), {"transport_encryption": encryption}
        role_threads.start(ep, serve, plan, ep, params, **options)
        until(lambda at=ep: answers(at), "the server")
        role_threads.start("trainer", train, plan, 0, [batch_of(0, 1)], params, **options)
        role_threads.all()
        role_threads.forget()
        tap.close()
        assert (b"@GRAD" in tap.recorded) is readable


@pytest.mark.parametrize(
    ("server", "trainer", "said"),
    [
        (
            {"transport_encryption": "required"},
            {},
            "does not encrypt the connection (transport_encryption='auto')",
        ),
        (
            {},
            {"transport_encryption": "required"},
            "encrypts the connection (transport_encryption='required')",
        ),
    ],
)
def test_roles_with_other_settings_are_told_both(
    role_threads: RoleThreads,
    monkeypatch: pytest.MonkeyPatch,
    server: dict[str, str],
    trainer: dict[str, str],
    said: str,
) -> None:
    monkeypatch.setenv("DTRANS_TOKEN", new_token())
    (ep,), params = free_endpoints(1), params_of()
    plan = plan_for((ep,), 1)
    role_threads.start(ep, serve, plan, ep, params, **server)
    role_threads.start("trainer", train, plan, 0, [], params, **trainer)
    error = role_threads.end("trainer")
    assert isinstance(error, PeerError)
    start = f"pserver {ep} does not admit trainer 0: this process {said}"
    assert str(error).startswith(start) and "DTRANS_TRANSPORT_ENCRYPTION" in str(error)
    role_threads.start("right", train, plan, 0, [], params, **server)
    assert not isinstance(role_threads.end("right"), BaseException)


def test_who_has_another_token_is_told_so_at_once(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRANS_TRANSPORT_ENCRYPTION", "required")
    monkeypatch.setenv("DTRANS_TOKEN", its := new_token())
    (ep,), params = free_endpoints(1), params_of()
    plan = plan_for((ep,), 1)
    role_threads.start(ep, serve, plan, ep, params)
    monkeypatch.setenv("DTRANS_TOKEN", its)
    role_threads.start("right", train, plan, 0, [batch_of(0, 1)], params, before=lambda i: turn())

    def turn() -> None:
        monkeypatch.setenv("DTRANS_TOKEN", new_token())
        role_threads.start("stranger", train, plan, 0, [], params)
        ended.append(role_threads.end("stranger"))

    ended: list[object] = []
    assert not isinstance(role_threads.end("right"), BaseException)
    assert str(ended[0]).startswith(
        f"pserver {ep} does not admit trainer 0: the two processes have different values of "
        "DTRANS_TOKEN"
    )
    assert isinstance(role_threads.end(ep), dict)


def test_encryption_needs_a_secret(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DTRANS_TOKEN", raising=False)
    (ep,), params = free_endpoints(1), params_of()
    plan = plan_for((ep,), 1)
    with pytest.raises(
        ConfigError, match=f"^this pserver is at {ep}, and transport_encryption='required' enc"
    ):
        serve(plan, ep, params, transport_encryption="required")
    with pytest.raises(
        ConfigError,
        match=f"^trainer 0 connects to {ep}, and transport_encryption='required' encrypts",
    ):
        train(plan, 0, [], params, transport_encryption="required")
    with pytest.raises(
        ConfigError,
        match=r"^trainer 0 connects to 192.0.2.1:1, which is not on loopback\. Set DTRANS_TOKEN",
    ):
        train(plan_for(("192.0.2.1:1",), 1), 0, [], params)
