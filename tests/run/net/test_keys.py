"""Keys: the connections that are encrypted, the peers that pass the handshake, and the errors of
other peers."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import zmq
from role_processes import memory_of
from role_threads import HANG, until
from socket_attacks import Tap, flips, replay

from dtrans.errors import ConfigError, UnencryptedWarning
from dtrans.protocol.token import new_token, shown
from dtrans.run.net import keys as keys_module
from dtrans.run.net.keys import Keys, check_libzmq, is_local, make_folder, public_key
from dtrans.run.net.sockets import (
    BROKEN,
    Authenticator,
    Handshakes,
    PeerIds,
    bind,
    limit,
    new_socket,
    offers_curve,
    user_of,
)
from dtrans.run.net.temp_dir import TempDir


TOKEN, OTHER = new_token(), new_token()
FAR, NEAR, UNIX = "tcp://192.0.2.1:6174", "tcp://127.0.0.1:6174", "ipc:///tmp/socket"
FLAT = 20.0  # MiB by which the memory of this process may grow
USERS = {"one": "trainer 0", "two": "trainer 1"}


# -- which connections
# ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "encrypted"),
    [
        (Keys(TOKEN), {FAR}),
        (Keys(TOKEN, "required"), {FAR, NEAR, UNIX}),
        (Keys(TOKEN, "disabled"), set()),
        (Keys("", folder="/keys"), {FAR, NEAR, UNIX}),
    ],
)
def test_which_connections_are_encrypted(keys: Keys, encrypted: set[str]) -> None:
    assert {address for address in (FAR, NEAR, UNIX) if keys.encrypts(address)} == encrypted


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1:6174", True),
        ("localhost:1", True),
        ("[::1]:6174", True),
        ("::1", True),
        ("tcp://[::ffff:127.0.0.1]:6174", True),
        ("tcp://127.0.0.3", True),
        ("tcp://[::1]:9", True),
        ("10.0.0.1", False),
        ("fd00::2", False),
        ("tcp://[fd00::2]:6000", False),
        ("node001:6000", False),
        ("node001", False),
        ("127", False),
    ],
)
def test_an_address_is_of_this_host_or_not(address: str, local: bool) -> None:
    assert is_local(address) is local


def test_keys_and_no_encryption_contradict_each_other() -> None:
    with pytest.raises(
        ConfigError,
        match="^transport_encryption is 'disabled' and DTRANS_KEYS is '/keys', but only",
    ):
        Keys("", "disabled", folder="/keys")
    with pytest.raises(
        ConfigError,
        match="^transport_encryption must be 'required', 'auto' or 'disabled', it is 'no'",
    ):
        Keys("", "no")


def test_what_protects_nothing_is_refused_or_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Keys("").check("trainer 0 is at x", NEAR)
        Keys("short").check("trainer 0 is at x", NEAR)
        Keys(TOKEN).check("trainer 0 is at x", FAR)
        Keys("", folder="/keys").check("trainer 0 is at x", FAR)
    with pytest.raises(
        ConfigError,
        match=r"^trainer 0 is at x, which is not on loopback\. Set DTRANS_TOKEN, the",
    ):
        Keys("").check("trainer 0 is at x", FAR)
    with pytest.raises(
        ConfigError,
        match="^trainer 0 is at x, and transport_encryption='required' encrypts the connection",
    ):
        Keys("", "required").check("trainer 0 is at x", NEAR)
    with pytest.raises(
        ConfigError,
        match="and DTRANS_TOKEN has 31 hexadecimal digits; expected at least 32, which contain 128 "
        "random",
    ):
        Keys("0" * 31, "disabled").check("trainer 0 is at x", FAR)
    with pytest.warns(
        UnencryptedWarning,
        match="^trainer 0 is at x, and transport_encryption='disabled': anyone on the network can "
        "read",
    ):
        Keys(TOKEN, "disabled").check("trainer 0 is at x", FAR)


def test_a_library_that_does_not_encrypt_well_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check_libzmq()
    maps = tmp_path / "maps"
    monkeypatch.setattr(keys_module, "MAPS", maps)
    keys_module._has_libsodium.cache_clear()
    maps.write_text("7f00-7f01 r-xp 0 08:01 1 /usr/lib/libzmq.so.5\n")
    with pytest.raises(
        ConfigError,
        match=r"^libzmq \S+ is built without libsodium, .*transport_encryption='disabled'",
    ):
        Keys(TOKEN).check("trainer 0 is at x", FAR)
    keys_module._has_libsodium.cache_clear()
    maps.write_text("7f00-7f01 r-xp 0 08:01 1 /venv/pyzmq.libs/libsodium-6c8f8377.so.26.4.0\n")
    check_libzmq()
    keys_module._has_libsodium.cache_clear()
    monkeypatch.setattr(zmq, "has", lambda what: what != "curve")
    with pytest.raises(
        ConfigError, match=r"^libzmq \S+ is built without CURVE, .*install pyzmq's own wheel"
    ):
        Keys(TOKEN).check("trainer 0 is at x", FAR)


# -- who gets in
# ---------------------------------------------------------------------------------------


class Server:
    """ROUTER socket with an authenticator, bound to TCP and to a Unix socket, as in servers."""

    def __init__(
        self, keys: Keys, folder: Path, users: Mapping[str, str] = USERS, tcp: str = ""
    ) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.refused = 0
        self.authenticator = Authenticator(self.context, keys, users)
        self.socket = new_socket(self.context, zmq.ROUTER)
        limit(self.socket, 1000, 100)
        self.peers = PeerIds(self.socket, self.note)
        bound = bind(self.socket, "tcp://127.0.0.1:*", keys, tcp)
        self.tcp = f"tcp://127.0.0.1:{bound.rpartition(':')[2]}"
        self.unix = bind(self.socket, f"ipc://{folder}/s", keys)

    def note(self) -> None:
        self.refused += 1

    def heard(self) -> tuple[str, bytes] | None:
        """Return the user and the content of the next message; None if no peer is admitted."""
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self.peers.monitor, zmq.POLLIN)
        before = self.refused
        while self.refused == before:
            ready = dict(poller.poll(HANG * 1000))
            assert ready, "nobody comes"
            if self.socket in ready:
                _, frame = self.socket.recv_multipart(copy=False)
                return user_of(frame), bytes(frame.buffer)
            self.peers.read_monitor()
        return None

    def close(self) -> None:
        self.authenticator.close()
        self.peers.close()
        self.context.destroy(linger=0)


@contextlib.contextmanager
def server(keys: Keys, users: Mapping[str, str] = USERS, tcp: str = "") -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        made = Server(keys, Path(folder), users, tcp)
        try:
            yield made
        finally:
            made.close()


@contextlib.contextmanager
def client(
    address: str, keys: Keys, user: str = "one", role: str = "trainer 0", shown: str = ""
) -> Iterator[Any]:
    """Yield a socket that connects as a user, and the results of its handshakes.

    Args:
      shown: the address by which the socket chooses its credentials.
    """
    with (
        zmq.Context() as context,
        new_socket(context, zmq.DEALER) as made,
        contextlib.closing(Handshakes(made, keys, shown or address)) as watched,
    ):
        keys.show(made, shown or address, user, role)
        made.maxmsgsize = -1
        made.connect(address)
        yield made, watched


def why_not(watched: Handshakes) -> str:
    """Return the reason why a client is not admitted."""
    while True:
        assert watched.monitor.poll(HANG * 1000), "no word"
        if why := watched.take()[1]:
            return why


def test_one_socket_is_encrypted_by_tcp_and_not_by_unix() -> None:
    """ZeroMQ stores the security settings and the largest frame for each bound address."""
    keys = Keys(TOKEN)
    with server(keys, tcp=FAR) as s:
        for address, shown in ((s.tcp, FAR), (s.unix, "")):
            with client(address, keys, "two", shown=shown) as (line, watched):
                line.send(b"x" * 1000)  # the largest frame, whatever encryption adds to it
                assert s.heard() == ("two", b"x" * 1000)
                line.send(b"x" * 1001)
                while watched.take()[0] != zmq.EVENT_DISCONNECTED:
                    assert watched.monitor.poll(HANG * 1000), "it is not cut off"
                line.send(b"later")
                assert s.heard() == ("two", b"later")
        for address, shown in ((s.tcp, NEAR), (s.unix, FAR)):  # the other mechanism
            with client(address, keys, shown=shown) as (line, watched):
                line.send(b"never")
                why = why_not(watched)
                assert s.heard() is None
                setting = "disabled" if shown == FAR else "required"
                assert (
                    "(transport_encryption='auto')" in why
                    and f"transport_encryption='{setting}'" in why
                )


@pytest.mark.parametrize("encryption", ["required", "disabled"])
def test_who_has_not_the_token_is_told_so_and_heard_by_nobody(encryption: str) -> None:
    with server(Keys(TOKEN, encryption)) as s:
        for address in (s.tcp, s.unix):
            with client(address, Keys(OTHER, encryption)) as (line, watched):
                line.send(b"never")
                assert (
                    why_not(watched)
                    == "the two processes have different values of DTRANS_TOKEN; set the same "
                    "value in all processes of the job"
                )
                assert s.heard() is None
            with client(address, Keys(TOKEN, encryption), "three") as (
                line,
                watched,
            ):  # no process connects as this user
                line.send(b"never")
                assert "DTRANS_TOKEN" in why_not(watched)
                assert s.heard() is None
            # a client without a key
            with zmq.Context() as context, context.socket(zmq.DEALER) as line:
                line.linger = 0
                line.connect(address)
                line.send(b"never")
                assert s.heard() is None
        with client(s.tcp, Keys(TOKEN, encryption)) as (line, _):
            line.send(b"at last")
            assert s.heard() == ("one", b"at last")


def test_who_does_not_greet_is_waited_for() -> None:
    """A tunnel without a server behind it closes every connection. The server may start later."""
    keys = Keys(TOKEN, "required")

    def hang_up() -> None:
        with contextlib.suppress(OSError):
            while True:
                listener.accept()[0].close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        at = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        tunnel = threading.Thread(target=hang_up, daemon=True)
        tunnel.start()
        with client(at, keys) as (_, watched):
            failed = 0
            while failed < 2 * BROKEN + 1:
                assert watched.monitor.poll(HANG * 1000), "no event"
                event, why = watched.take()
                assert not why
                failed += event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        listener.shutdown(socket.SHUT_RDWR)
        tunnel.join(HANG)
    with server(keys) as s:
        assert offers_curve(s.tcp) and offers_curve(s.unix)
    with server(Keys(TOKEN, "disabled")) as s:
        assert not offers_curve(s.tcp) and not offers_curve(s.unix)
    assert not offers_curve(at)


def test_a_word_makes_other_keys_of_one_token() -> None:
    """Links of a pipeline, and other jobs with the same token, have different keys."""
    with server(Keys(TOKEN, "required", word="links")) as s:
        with client(s.tcp, Keys(TOKEN, "required")) as (line, watched):
            line.send(b"never")
            assert "DTRANS_TOKEN" in why_not(watched)
        with client(s.tcp, Keys(TOKEN, "required", word="links")) as (line, _):
            line.send(b"right")
            assert until(s.heard, "it") == ("one", b"right")


def test_nothing_can_be_read_on_the_way() -> None:
    """With a password, everything can be read, including the password."""
    for encryption, readable in (("required", False), ("disabled", True)):
        keys = Keys(TOKEN, encryption)
        with server(keys) as s:
            tap = Tap(s.tcp.removeprefix("tcp://"))
            with client(f"tcp://{tap.endpoint}", keys) as (line, _):
                line.send(b"a gradient of this job")
                assert s.heard() == ("one", b"a gradient of this job")
            tap.close()
        seen = bytes(tap.recorded)
        assert (b"a gradient of this job" in seen) is readable
        assert TOKEN.encode() not in seen


def test_a_recorded_connection_is_of_no_use() -> None:
    """An attacker replays a recorded encrypted connection, unchanged or with other bits.

    No message is accepted or stored.
    """
    keys = Keys(TOKEN, "required")
    with server(keys) as s:
        tap = Tap(s.tcp.removeprefix("tcp://"))
        with client(f"tcp://{tap.endpoint}", keys) as (line, _):
            line.send(b"a gradient of this job")
            assert s.heard() == ("one", b"a gradient of this job")
        tap.close()
        stream, at = bytes(tap.recorded), s.tcp.removeprefix("tcp://")
        replay(at, stream)
        before = memory_of(os.getpid())
        flips(at, stream, seed=0, connections=300, each=3)
        assert memory_of(os.getpid()) - before < FLAT
        assert not s.socket.poll(0)
        until(lambda: s.peers.read_monitor() or s.refused > 100, "those that the monitor reports")
        with client(s.tcp, keys) as (line, _):
            line.send(b"still here")
            assert s.socket.poll(HANG * 1000)
            assert s.socket.recv_multipart()[1] == b"still here"


# -- separate keys
# -------------------------------------------------------------------------------------


def test_separate_keys_let_in_their_roles_until_they_are_revoked(tmp_path: Path) -> None:
    made = make_folder(tmp_path, ["trainer 0", "trainer 1"])
    assert {p.stat().st_mode & 0o777 for p in made} == {0o600} and len(made) == 7
    any_role = Keys("", folder=str(tmp_path)).users_by_key({"any": "", "one": "trainer 0"})
    assert sorted(any_role.values()) == ["any", "any", "one"]
    assert make_folder(tmp_path, ["trainer 1"]) == []  # existing files stay
    keys = Keys("", folder=str(tmp_path))
    with server(keys) as s:
        for role, user in (("trainer 0", "one"), ("trainer 1", "two")):
            with client(s.tcp, keys, user, role) as (line, _):
                line.send(b"hello")
                assert s.heard() == (user, b"hello")
        with client(s.tcp, keys, "one", "trainer 1") as (
            line,
            _,
        ):  # the key alone determines the user
            line.send(b"hello")
            assert s.heard() == ("two", b"hello")
        (tmp_path / "clients/trainer-1.public").unlink()
        with client(s.tcp, keys, "two", "trainer 1") as (line, watched):
            line.send(b"hello")
            why = (
                f"its keys differ from the keys in DTRANS_KEYS={str(tmp_path)!r}, or this role's "
                "key "
                "was revoked; "
            )
            assert why_not(watched).startswith(why)
            assert s.heard() is None
        with client(s.tcp, keys) as (line, _):
            line.send(b"still here")
            assert s.heard() == ("one", b"still here")
        # trainer 1 stays revoked as long as its secret exists
        assert make_folder(tmp_path, ["trainer 1"]) == []
        (tmp_path / "clients/trainer-0.public").write_text("garbage")
        with client(s.tcp, keys) as (line, watched):
            line.send(b"hello")
            assert why_not(watched).startswith(why)


def test_files_of_keys_that_are_missing_or_no_keys_are_named(tmp_path: Path) -> None:
    make_folder(tmp_path, ["trainer 0"])
    keys = Keys("", folder=str(tmp_path))
    with pytest.raises(
        ConfigError,
        match=r"^DTRANS_KEYS is '.*', and its file trainer-7.secret cannot be read: No such",
    ):
        keys.client_secret("one", "trainer 7")
    (tmp_path / "server.public").write_text("x" * 39)
    with pytest.raises(ConfigError, match="its file server.public does not contain a key; "):
        keys.server_public()
    with pytest.raises(ConfigError, match="^keys cannot be written to '/proc/nowhere': "):
        make_folder(Path("/proc/nowhere"), [])


# -- Unix sockets
# --------------------------------------------------------------------------------------

SPEAKS = """
import json, os, sys, zmq
uid, address, options = json.loads(sys.stdin.readline())
os.setgid(uid); os.setuid(uid)
line = zmq.Context().socket(zmq.DEALER)
for name, value in options.items():
    setattr(line, name, value.encode())
line.connect(address)
line.send(b"hello")
sys.stdin.read()
os._exit(0)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("encryption", ["auto", "required"])
def test_another_user_is_not_let_in_by_a_unix_socket(encryption: str) -> None:
    """The attacker has the token, and a user has even opened the folder."""
    keys = Keys(TOKEN, encryption)
    secret = keys.client_secret("one", "")
    options = {
        "auto": {"plain_username": "one", "plain_password": shown(TOKEN, "one")},
        "required": {
            "curve_serverkey": keys.server_public().decode(),
            "curve_secretkey": secret.decode(),
            "curve_publickey": public_key(secret).decode(),
        },
    }[encryption]
    with server(keys) as s:
        path = Path(s.unix.removeprefix("ipc://"))
        path.parent.chmod(0o777)
        path.chmod(0o777)
        for uid, found in ((os.geteuid(), ("one", b"hello")), (65534, None)):
            with subprocess.Popen(
                [sys.executable, "-c", SPEAKS], stdin=subprocess.PIPE, text=True
            ) as other:
                assert other.stdin is not None
                print(json.dumps([uid, s.unix, options]), file=other.stdin, flush=True)
                assert s.heard() == found


def test_the_folder_of_a_unix_socket_is_closed_to_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = os.umask(0)
    try:
        folder = TempDir()
        assert folder.path.stat().st_mode & 0o777 == 0o700
        folder.close()
    finally:
        os.umask(before)
