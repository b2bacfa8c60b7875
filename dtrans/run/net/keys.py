"""Keys of a job: what its processes show when they connect, and which of their connections are
encrypted.

A connection is opened by ZeroMQ's CURVE, which encrypts and signs each message, or by PLAIN, which
shows a password:

    transport_encryption   other hosts   loopback   Unix sockets
    "auto"                 CURVE         PLAIN      PLAIN
    "required"             CURVE         CURVE      CURVE
    "disabled"             PLAIN         PLAIN      PLAIN

Both ends decide by the address that the connecting one writes, so that they agree where they have
the same setting.

Keys come from the job's token by HKDF: one X25519 key for all sockets that are bound, and one for
each *user*, the name as which a process connects. A process that has the token can make all of
them. DTRANS_KEYS names a folder of separate keys instead (`dtrans keygen`); then every connection
is encrypted:

    server.secret, server.public     of sockets that are bound, and of servers that connect to servers
    trainer-0.secret, ...            of the roles that connect
    clients/trainer-0.public, ...    who is let in: read at each handshake, so that a role whose file is gone is refused

`status` is the role of `dtrans status`.

`dtrans.run.net.sockets` is the next module to read.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from dtrans.checks import check_one_of
from dtrans.endpoints import is_loopback, split_endpoint
from dtrans.errors import ConfigError, UnencryptedWarning
from dtrans.protocol import token
from dtrans.protocol.transport import SERVER
from dtrans.run.net.net_options import ENCRYPTION, ENCRYPTIONS


FOLDER = "DTRANS_KEYS"
STATUS = "status"  # the role of `dtrans status`
PUBLIC = "clients"  # the folder of those who are let in
MAPS = Path("/proc/self/maps")  # of Linux: the libraries of this process
SALT = b"dtrans"


def is_local(address: str) -> bool:
    """Return True if an address never leaves this host: an endpoint, a host, or either as ZeroMQ
    writes it."""
    if address.startswith("ipc:"):
        return True
    host = address.removeprefix("tcp://")
    has_port = host.rpartition(":")[2].isdigit() and (host.count(":") == 1 or "]" in host)
    return is_loopback(split_endpoint(host)[0] if has_port else host.strip("[]"))


@dataclasses.dataclass(frozen=True)
class Keys:
    """Keys of a job, and which connections they encrypt.

    Args:
      token: the job's; empty where it has none.
      encryption: "required", "auto" or "disabled", as `transport_encryption`.
      folder: of separate keys; empty where keys come from the token.
      word: is a part of the secret beside the token, for connections whose processes have agreed on
        one.
    """

    token: str
    encryption: str = "auto"
    folder: str = ""
    word: str = ""

    def __post_init__(self) -> None:
        check_one_of("transport_encryption", self.encryption, ENCRYPTIONS)
        if self.folder and self.encryption == "disabled":
            raise ConfigError(
                f"transport_encryption='disabled' and {FOLDER}={self.folder!r}: keys of that "
                "folder are only of use to "
                "encrypted connections; leave out one of the two"
            )

    @classmethod
    def from_environment(cls, encryption: str) -> Keys:
        """Return the keys of this process's job. Raises ConfigError as `token.job_token`."""
        return cls(token.job_token(), encryption, os.environ.get(FOLDER, "").strip())

    @property
    def secret(self) -> str:
        """The secret that passwords, proofs and derived keys are made of."""
        return self.token + self.word

    @property
    def setting(self) -> str:
        """The setting, which all processes of a job must have in common, as messages write it."""
        return f"transport_encryption={self.encryption!r}" + f" and {FOLDER}" * bool(self.folder)

    def encrypts(self, address: str) -> bool:
        """Return True if connections to an address are encrypted."""
        if self.encryption == "auto" and not self.folder:
            return not is_local(address)
        return self.encryption != "disabled"

    def check(self, who: str, address: str) -> None:
        """Refuse an address that this process cannot protect; warn where it is told not to.

        Args:
          who: is about to bind it or to connect to it, for messages: "trainer 0 connects to
            10.0.0.1:6174".

        Raises:
          ConfigError: there is no secret, or one that can be guessed; or libzmq cannot encrypt.
        """
        far, encrypts = not is_local(address), self.encrypts(address)
        if not far and not encrypts:
            return
        if not self.folder:
            why = "which is not on loopback" if far else f"and {self.setting} encrypts it"
            if not self.token:
                raise ConfigError(f"{who}, {why}; that needs {token.NEEDED}")
            token.check_strong(self.token, f"{who}, {why}")
        if encrypts:
            check_libzmq()
        else:
            warnings.warn(
                f"{who}, and {self.setting}: who can read the network reads parameters, gradients "
                "and the job's "
                "password",
                UnencryptedWarning,
                stacklevel=3,
            )

    # -- keys ------------------------------------------------------------------------------------

    def server_secret(self) -> bytes:
        """Return the secret key of sockets that are bound."""
        return self._read(f"{SERVER}.secret") if self.folder else _derived(self.secret, "server")

    def server_public(self) -> bytes:
        """Return the public key by which those who connect know a server."""
        return self._read(f"{SERVER}.public") if self.folder else public_key(self.server_secret())

    def client_secret(self, user: str, role: str) -> bytes:
        """Return the secret key of a role that connects as a user."""
        return (
            self._read(f"{_file_name(role)}.secret")
            if self.folder
            else _derived(self.secret, f"client {user}")
        )

    def users_by_key(self, users: Mapping[str, str]) -> Mapping[bytes, str]:
        """Return as whom each public key, as ZAP writes it, is let in.

        Args:
          users: to each the role that alone may come as it; an empty one lets every role.
        """
        if not self.folder:
            return _derived_users(self.secret, tuple(users))
        found: dict[bytes, str] = {}
        for path in Path(self.folder, PUBLIC).glob("*.public"):
            own = [user for user, role in users.items() if _file_name(role) == path.stem]
            user = next(iter(own + [user for user, role in users.items() if role == ""]), None)
            if user is not None:
                found[z85.decode(self._read(f"{PUBLIC}/{path.name}"))] = user
        return found

    def _read(self, name: str) -> bytes:
        path = Path(self.folder, name)
        try:
            found = path.read_text().strip()
        except (OSError, UnicodeDecodeError) as e:
            why = e.strerror if isinstance(e, OSError) else "it is not text"
            raise ConfigError(
                f"{FOLDER} is {self.folder!r}, and its file {name} cannot be read: {why}"
            ) from e
        if not re.fullmatch(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}", found):
            raise ConfigError(
                f"{FOLDER} is {self.folder!r}, and its file {name} holds no key of `dtrans keygen`"
            )
        return found.encode()

    # -- sockets ---------------------------------------------------------------------------------

    def guard(self, bound: zmq.Socket[Any], address: str) -> None:
        """Let a socket ask for keys or for a password at the address that it binds next."""
        bound.setsockopt_string(zmq.ZAP_DOMAIN, "dtrans")
        if self.encrypts(address):
            bound.setsockopt(zmq.CURVE_SERVER, 1)
            bound.setsockopt(zmq.CURVE_SECRETKEY, self.server_secret())
        else:
            bound.setsockopt(zmq.PLAIN_SERVER, 1)

    def show(self, connecting: zmq.Socket[Any], address: str, user: str, role: str) -> None:
        """Let a socket show a user's key or password to the address that it connects to next."""
        if self.encrypts(address):
            secret = self.client_secret(user, role)
            connecting.setsockopt(zmq.CURVE_SERVERKEY, self.server_public())
            connecting.setsockopt(zmq.CURVE_SECRETKEY, secret)
            connecting.setsockopt(zmq.CURVE_PUBLICKEY, public_key(secret))
        else:
            connecting.setsockopt_string(zmq.PLAIN_USERNAME, user)
            connecting.setsockopt_string(zmq.PLAIN_PASSWORD, token.shown(self.secret, user))

    # -- refusals --------------------------------------------------------------------------------

    def other_mechanism(self, address: str) -> str:
        """Return what is wrong where the other end has another mechanism; it names both
        settings."""
        encrypts = self.encrypts(address)
        others = [Keys(self.token, e) for e in ENCRYPTIONS]
        theirs = " or ".join(k.setting for k in others if k.encrypts(address) != encrypts)
        does, not_ = ("encrypts", "does not") if encrypts else ("does not encrypt", "does")
        return (
            f"this process {does} the connection ({self.setting}), and the other {not_} "
            f"({theirs}), if it is of this "
            f"job at all; give all processes the same transport_encryption, or {ENCRYPTION}"
        )

    def other_keys(self, address: str) -> str:
        """Return what is wrong where the other end does not take what this process shows."""
        if self.folder:
            return (
                f"its keys are not those of {FOLDER}={self.folder!r}, or do not let this role in "
                "any more; both ends "
                "need one server key, and the server the role's file in the folder `clients`"
            )
        return f"the two have not the same {token.VARIABLE}, which all processes of a job must have"


# -- making keys -----------------------------------------------------------------------------------


def public_key(secret: bytes) -> bytes:
    """Return the public key of a secret one."""
    return bytes(zmq.curve_public(secret))


def _derived(secret: str, purpose: str) -> bytes:
    """Return an X25519 secret key for one purpose, as ZeroMQ writes it."""
    return bytes(z85.encode(token.hkdf(secret.encode(), SALT, f"curve {purpose}".encode(), 32)))


@functools.lru_cache(maxsize=64)
def _derived_users(secret: str, users: tuple[str, ...]) -> Mapping[bytes, str]:
    return {z85.decode(public_key(_derived(secret, f"client {user}"))): user for user in users}


def _file_name(role: str) -> str:
    return role.replace(" ", "-")


def make_folder(folder: Path, roles: Iterable[str]) -> list[Path]:
    """Make separate keys for a server and for roles, each in files of mode 0600; what is there
    stays.

    Returns:
      The files that were written.

    Raises:
      ConfigError: the folder cannot be written.
    """
    made: list[Path] = []
    try:
        for path in (folder, folder / PUBLIC):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for role in (SERVER, *roles):
            secret_path = folder / f"{_file_name(role)}.secret"
            if secret_path.exists():
                continue
            public, secret = zmq.curve_keypair()
            files = {secret_path: secret, folder / PUBLIC / f"{_file_name(role)}.public": public}
            if role == SERVER:
                files[folder / f"{SERVER}.public"] = public
            for path, key in files.items():
                with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as out:
                    out.write(key + b"\n")
            made += files
    except OSError as e:
        raise ConfigError(
            f"keys cannot be written to {str(folder)!r}: {e.strerror or e} ({e.filename})"
        ) from e
    return made


# -- the library -----------------------------------------------------------------------------------


def check_libzmq() -> None:
    """Raise ConfigError where libzmq has no CURVE, or one that is too slow and not audited
    (tweetnacl)."""
    remedy = (
        "install pyzmq's own wheel (`pip install --force-reinstall --only-binary pyzmq pyzmq`), or "
        "write "
        "transport_encryption='disabled' where nobody else can read the network"
    )
    if not zmq.has("curve"):
        raise ConfigError(
            f"libzmq {zmq.zmq_version()} has no CURVE, which encrypts connections; {remedy}"
        )
    if not _has_libsodium():
        raise ConfigError(
            f"libzmq {zmq.zmq_version()} encrypts without libsodium, which is not among the "
            "libraries of this process; "
            f"{remedy}"
        )


@functools.cache
def _has_libsodium() -> bool:
    """Return True if this process has loaded libsodium, or keeps no list of its libraries."""
    if not MAPS.exists():
        return True
    names = (line.rpartition("/")[2] for line in MAPS.read_text().splitlines())
    return any(name.startswith("libsodium") for name in names)
