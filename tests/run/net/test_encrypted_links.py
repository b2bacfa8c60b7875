"""Encrypted messages between trainers of collectives and between stages of pipelines, with the
token and with keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from link_pair import Board, two_links
from role_threads import HANG, RoleThreads, free_endpoints, until

from dtrans.errors import ConfigError, DeadlineError
from dtrans.protocol.collective.arrivals import ValueType
from dtrans.protocol.token import new_token
from dtrans.run.distributed import board as board_module
from dtrans.run.distributed.address import Address
from dtrans.run.distributed.membership import Membership
from dtrans.run.distributed.rendezvous import rendezvous
from dtrans.run.distributed.watch import Watch
from dtrans.run.net.keys import make_folder


Protect = Callable[[pytest.MonkeyPatch, Path], str]


def by_token(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    monkeypatch.setenv("DTRANS_TOKEN", new_token())
    return "required"


def by_separate_keys(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    make_folder(folder, ["trainer 0", "trainer 1"])
    monkeypatch.setenv("DTRANS_KEYS", str(folder))
    return "auto"


protections = pytest.mark.parametrize("protect", [by_token, by_separate_keys])


@protections
def test_trainers_meet(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, protect: Protect
) -> None:
    encryption, endpoints = protect(monkeypatch, tmp_path), free_endpoints(2)
    for k in range(2):
        role_threads.start(
            f"trainer {k}", rendezvous, k, endpoints, deadline=HANG, encryption=encryption
        )
    assert role_threads.all() == {"trainer 0": None, "trainer 1": None}


def test_trainers_with_other_settings_do_not_meet_and_both_are_named(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainer 0 detects this after some handshakes.

    On a busy machine, these take longer than the first deadline.
    """
    monkeypatch.setenv("DTRANS_TOKEN", new_token())
    for deadline in (3.0, HANG):
        endpoints, names = free_endpoints(2), [f"trainer {k}, {deadline} s" for k in range(2)]
        for k, encryption in enumerate(("required", "disabled")):
            role_threads.start(
                names[k], rendezvous, k, endpoints, deadline=deadline, encryption=encryption
            )
        errors = [role_threads.end(name) for name in names]
        assert all(isinstance(error, DeadlineError) for error in errors)
        if "transport_encryption" in str(errors[0]):
            break
    assert "transport_encryption='required'" in str(
        errors[0]
    ) and "transport_encryption='disabled'" in str(errors[0])


@protections
def test_an_end_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, protect: Protect) -> None:
    encryption = protect(monkeypatch, tmp_path)
    members = [Membership(k, (0, 1), free_endpoints(2), encryption=encryption) for k in range(2)]
    first = Watch(members[0], members[0].keys, Address("127.0.0.1", "127.0.0.1"))
    Watch(members[1], members[1].keys, first.address).close()
    until(lambda: first.members.ended, "the end")
    assert first.members.why(1).endswith("has finished")
    first.close()


@protections
def test_values_of_a_pipeline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, protect: Protect
) -> None:
    """Each link has a separate key."""
    with two_links(encryption=protect(monkeypatch, tmp_path)) as (first, second):
        assert first._keys.encrypts(second._peers[1]) and second._keys == first._keys
        value = np.arange(1e6, dtype=np.float32)  # of several messages
        for k, (origin, target) in enumerate([(first, second), (second, first)]):
            origin.send(1 - k, 1, 0, jnp.asarray(value))
            got = target.receive(k, 1, 0, ValueType(value.shape, value.dtype), "a value")
            np.testing.assert_array_equal(got, value)
        assert first.refusals.count == second.refusals.count == 0


def test_processes_with_other_settings_are_both_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRANS_TOKEN", new_token())
    board = Board()
    board.key_value_set("dtrans/links/words/1", f"{new_token()} transport_encryption='required'")
    monkeypatch.setattr(board_module, "bulletin_board", lambda: board)
    said = (
        "^trainer 0 has transport_encryption='auto', and trainer 1 has "
        "transport_encryption='required'; pass the same value in all processes"
    )
    with pytest.raises(ConfigError, match=said):
        board_module.shared_keys(Membership(0, (0, 1)), "links", "connect")
