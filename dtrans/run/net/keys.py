"""Keys of a job, which authenticate its processes and encrypt their connections.

The handshake of a connection is ZeroMQ's CURVE, which encrypts and authenticates each message, or
PLAIN, which sends a password:

    transport_encryption   other hosts   loopback   Unix sockets
    "auto"                 CURVE         PLAIN      PLAIN
    "required"             CURVE         CURVE      CURVE
    "disabled"             PLAIN         PLAIN      PLAIN

Both ends choose by the address that the connecting end uses. They choose the same mechanism if they
have the same setting.

By default, HKDF derives all keys from the job's token: one X25519 key for all bound sockets, and
one for each *user*, the name under which a process connects. Any process with the token can derive
all keys. DTRANS_KEYS names a folder of separate keys instead (`dtrans keygen`), and then every
connection is encrypted:

    server.secret, server.public     bound sockets, and servers that connect to servers
    trainer-0.secret, ...            roles that connect
    clients/trainer-0.public, ...    roles that servers admit

Servers read `clients` at each handshake: removing a file revokes the role's key. `status` is the
role of `dtrans status`.

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
PUBLIC = "clients"  # the folder with public keys of the roles that servers admit
MAPS = Path("/proc/self/maps")  # Linux lists the libraries of this process there
SALT = b"dtrans"


def is_local(address: str) -> bool:
    """Return True if messages to an address never leave this host.

    Args:
      address: an endpoint or a host, also in ZeroMQ's notation.
    """
    if address.startswith("ipc:"):
        return True
    host = address.removeprefix("tcp://")
    has_port = host.rpartition(":")[2].isdigit() and (host.count(":") == 1 or "]" in host)
    return is_loopback(split_endpoint(host)[0] if has_port else host.strip("[]"))


@dataclasses.dataclass(frozen=True)
class Keys:
    """Keys of a job, and the choice of the connections that they encrypt.

    Args:
      token: the job's token; empty if it has none.
      encryption: `transport_encryption`: "required", "auto" or "disabled".
      folder: the folder of separate keys; empty if keys are derived from the token.
      word: a word that the processes of a connection agreed on, appended to the token.
    """

    token: str
    encryption: str = "auto"
    folder: str = ""
    word: str = ""

    def __post_init__(self) -> None:
        check_one_of("transport_encryption", self.encryption, ENCRYPTIONS)
        if self.folder and self.encryption == "disabled":
            raise ConfigError(
                f"transport_encryption='disabled' and {FOLDER}={self.folder!r}: only encrypted "
                "connections use the keys of that folder; leave out one of the two"
            )

    @classmethod
    def from_environment(cls, encryption: str) -> Keys:
        """Return the keys of this process's job.

        Raises:
          ConfigError: the file with the token cannot be read.
        """
        return cls(token.job_token(), encryption, os.environ.get(FOLDER, "").strip())

    @property
    def secret(self) -> str:
        """The secret from which passwords, proofs and keys are derived."""
        return self.token + self.word

    @property
    def setting(self) -> str:
        """The setting in the words of error messages. All processes of a job must have the same."""
        return f"transport_encryption={self.encryption!r}" + f" and {FOLDER}" * bool(self.folder)

    def encrypts(self, address: str) -> bool:
        """Return True if connections to an address are encrypted."""
        if self.encryption == "auto" and not self.folder:
            return not is_local(address)
        return self.encryption != "disabled"

    def check(self, who: str, address: str) -> None:
        """Check that this process can protect a connection; warn if the user disabled encryption.

        Args:
          who: the subject of error messages: "trainer 0 connects to 10.0.0.1:6174".

        Raises:
          ConfigError: the job has no token, or a weak one, or libzmq cannot encrypt.
        """
        far, encrypts = not is_local(address), self.encrypts(address)
        if not far and not encrypts:
            return
        if not self.folder:
            reason = "which is not on loopback" if far else f"and {self.setting} encrypts it"
            if not self.token:
                raise ConfigError(f"{who}, {reason}; that needs {token.NEEDED}")
            token.check_strong(self.token, f"{who}, {reason}")
        if encrypts:
            check_libzmq()
        else:
            warnings.warn(
                f"{who}, and {self.setting}: anybody on the network can read parameters, gradients "
                "and the job's password",
                UnencryptedWarning,
                stacklevel=3,
            )

    # -- keys ------------------------------------------------------------------------------------

    def server_secret(self) -> bytes:
        """Return the secret key of bound sockets."""
        if self.folder:
            return self._read(f"{SERVER}.secret")
        return _derive_secret(self.secret, "server")

    def server_public(self) -> bytes:
        """Return the public key of bound sockets, by which clients authenticate a server."""
        if self.folder:
            return self._read(f"{SERVER}.public")
        return public_key(self.server_secret())

    def client_secret(self, user: str, role: str) -> bytes:
        """Return the secret key of a role that connects as a user."""
        if self.folder:
            return self._read(f"{_file_name(role)}.secret")
        return _derive_secret(self.secret, f"client {user}")

    def users_by_key(self, users: Mapping[str, str]) -> Mapping[bytes, str]:
        """Return the user of each public key, in the bytes of ZAP requests.

        Args:
          users: each user's role. Only this role may connect as the user; every role may if it is
            empty.
        """
        if not self.folder:
            return _derive_users(self.secret, tuple(users))
        by_role = {_file_name(role): user for user, role in reversed([*users.items()])}
        found: dict[bytes, str] = {}
        for path in Path(self.folder, PUBLIC).glob("*.public"):
            user = by_role.get(path.stem, by_role.get(""))
            if user is not None:
                found[z85.decode(self._read(f"{PUBLIC}/{path.name}"))] = user
        return found

    def _read(self, name: str) -> bytes:
        path = Path(self.folder, name)
        try:
            found = path.read_text().strip()
        except (OSError, UnicodeDecodeError) as e:
            reason = e.strerror if isinstance(e, OSError) else "it is not text"
            raise ConfigError(
                f"{FOLDER} is {self.folder!r}, and its file {name} cannot be read: {reason}"
            ) from e
        if not re.fullmatch(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}", found):
            raise ConfigError(
                f"{FOLDER} is {self.folder!r}, and its file {name} holds no key of `dtrans keygen`"
            )
        return found.encode()

    # -- sockets ---------------------------------------------------------------------------------

    def guard(self, bound: zmq.Socket[Any], address: str) -> None:
        """Require keys, or a password, from the clients of a socket that is about to be bound."""
        bound.setsockopt_string(zmq.ZAP_DOMAIN, "dtrans")
        if self.encrypts(address):
            bound.setsockopt(zmq.CURVE_SERVER, 1)
            bound.setsockopt(zmq.CURVE_SECRETKEY, self.server_secret())
        else:
            bound.setsockopt(zmq.PLAIN_SERVER, 1)

    def show(self, connecting: zmq.Socket[Any], address: str, user: str, role: str) -> None:
        """Set a user's key, or password, on a socket that is about to connect."""
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
        """Return the error message for a peer that uses the other mechanism."""
        encrypts = self.encrypts(address)
        others = [Keys(self.token, e) for e in ENCRYPTIONS]
        theirs = " or ".join(k.setting for k in others if k.encrypts(address) != encrypts)
        here, there = ("encrypts", "does not") if encrypts else ("does not encrypt", "does")
        return (
            f"this process {here} the connection ({self.setting}), and the other {there} "
            f"({theirs}), if it belongs to this job at all; "
            f"give all processes the same transport_encryption, or {ENCRYPTION}"
        )

    def other_keys(self, address: str) -> str:
        """Return the error message for a peer that refuses this process's key or password."""
        if self.folder:
            return (
                f"its keys are not those of {FOLDER}={self.folder!r}, or this role's key was "
                "revoked; give both ends the same server key, and the server the role's file in "
                "the folder `clients`"
            )
        return (
            f"the two have different values of {token.VARIABLE}; give all processes of a job the "
            "same"
        )


# -- derived keys, and files of keys ---------------------------------------------------------------


def public_key(secret: bytes) -> bytes:
    """Return the public key that belongs to a secret key."""
    return bytes(zmq.curve_public(secret))


def _derive_secret(secret: str, purpose: str) -> bytes:
    """Derive an X25519 secret key for one purpose, in ZeroMQ's text encoding."""
    return bytes(z85.encode(token.hkdf(secret.encode(), SALT, f"curve {purpose}".encode(), 32)))


@functools.lru_cache(maxsize=64)
def _derive_users(secret: str, users: tuple[str, ...]) -> Mapping[bytes, str]:
    found = {}
    for user in users:
        found[z85.decode(public_key(_derive_secret(secret, f"client {user}")))] = user
    return found


def _file_name(role: str) -> str:
    return role.replace(" ", "-")


def make_folder(folder: Path, roles: Iterable[str]) -> list[Path]:
    """Generate separate keys for servers and roles, in files of mode 0600.

    Existing files are not changed.

    Returns:
      The new files.

    Raises:
      ConfigError: the folder cannot be written.
    """
    written: list[Path] = []
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
            written += files
    except OSError as e:
        raise ConfigError(
            f"keys cannot be written to {str(folder)!r}: {e.strerror or e} ({e.filename})"
        ) from e
    return written


# -- the library -----------------------------------------------------------------------------------


def check_libzmq() -> None:
    """Raise ConfigError unless libzmq encrypts with libsodium.

    Its other implementation, tweetnacl, is slow and not audited.
    """
    remedy = (
        "install pyzmq's own wheel (`pip install --force-reinstall --only-binary pyzmq pyzmq`), or "
        "write transport_encryption='disabled' if nobody else can read the network"
    )
    if not zmq.has("curve"):
        raise ConfigError(
            f"libzmq {zmq.zmq_version()} has no CURVE, which encrypts connections; {remedy}"
        )
    if not _has_libsodium():
        raise ConfigError(
            f"libzmq {zmq.zmq_version()} encrypts without libsodium, which this process has not "
            f"loaded; {remedy}"
        )


@functools.cache
def _has_libsodium() -> bool:
    """Return True if this process has loaded libsodium, or if the system lists no libraries."""
    if not MAPS.exists():
        return True
    names = (line.rpartition("/")[2] for line in MAPS.read_text().splitlines())
    return any(name.startswith("libsodium") for name in names)
