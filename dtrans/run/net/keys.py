"""Keys of a job, which authenticate its processes and encrypt their connections.

A connection uses one of two mechanisms of ZeroMQ: CURVE encrypts and authenticates each message,
and PLAIN sends a password. The option `transport_encryption` and the address select the mechanism:

    transport_encryption   other hosts   loopback   Unix sockets
    "auto"                 CURVE         PLAIN      PLAIN
    "required"             CURVE         CURVE      CURVE
    "disabled"             PLAIN         PLAIN      PLAIN

Both processes of a connection look up the listener's address in this table. So they select the same
mechanism if they have the same option.

By default, HKDF derives all keys from the job's token: one X25519 key for all bound sockets, and
one for each *user*, the name under which a process connects. Any process with the token can derive
all keys. Instead, DTRANS_KEYS may name a folder of separate keys (`dtrans keygen`). Then every
connection is encrypted:

    server.secret, server.public     keys of bound sockets, and of servers that connect to servers
    trainer-0.secret, ...            secret key of each role that connects
    clients/trainer-0.public, ...    public key of each role that servers admit

Servers read the folder `clients` at each handshake. So if the user removes a file, the role can no
longer connect. The role of `dtrans status` is `status`.

Read `dtrans.run.net.sockets` next.
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
STATUS = "status"  # role of `dtrans status`
PUBLIC = "clients"  # name of the folder with the public keys of roles that servers admit
MAPS = Path("/proc/self/maps")  # Linux: list of the libraries that this process has loaded
SALT = b"dtrans"  # salt of the key derivation


def is_local(address: str) -> bool:
    """Return True if messages to an address stay on this host.

    Args:
      address: an endpoint or a host, with or without ZeroMQ's `tcp://`, or ZeroMQ's `ipc://path`.
    """
    if address.startswith("ipc:"):
        return True
    host = address.removeprefix("tcp://")
    has_port = host.rpartition(":")[2].isdigit() and (host.count(":") == 1 or "]" in host)
    return is_loopback(split_endpoint(host)[0] if has_port else host.strip("[]"))


@dataclasses.dataclass(frozen=True)
class Keys:
    """Keys of a job, and the rule that selects the connections to encrypt.

    Args:
      token: the job's token; empty if the job has no token.
      encryption: the option `transport_encryption`: "required", "auto" or "disabled".
      folder: folder of separate keys; empty to derive the keys from the token.
      word: text that is appended to the token before keys are derived. Processes of a pipeline
        append a secret from the board of the job.
    """

    token: str
    encryption: str = "auto"
    folder: str = ""
    word: str = ""

    def __post_init__(self) -> None:
        check_one_of("transport_encryption", self.encryption, ENCRYPTIONS)
        if self.folder and self.encryption == "disabled":
            raise ConfigError(
                f"transport_encryption is 'disabled' and {FOLDER} is {self.folder!r}, but only "
                f"encrypted connections use keys. Omit transport_encryption, or unset {FOLDER}"
            )

    @classmethod
    def from_environment(cls, encryption: str) -> Keys:
        """Return the keys of this process's job, from DTRANS_TOKEN and DTRANS_KEYS.

        Raises:
          ConfigError: the file with the token cannot be read.
        """
        return cls(token.job_token(), encryption, os.environ.get(FOLDER, "").strip())

    @property
    def secret(self) -> str:
        """Secret from which all passwords, proofs and keys are derived: `token`, then `word`."""
        return self.token + self.word

    @property
    def setting(self) -> str:
        """This process's encryption option for error messages: "transport_encryption='auto'".

        All processes of a job must use the same option.
        """
        return f"transport_encryption={self.encryption!r}" + f" and {FOLDER}" * bool(self.folder)

    def encrypts(self, address: str) -> bool:
        """Return True if connections to an address are encrypted."""
        if self.encryption == "auto" and not self.folder:
            return not is_local(address)
        return self.encryption != "disabled"

    def check(self, who: str, address: str) -> None:
        """Raise ConfigError if this process cannot protect a connection as its options require.

        If the options allow a connection to another host without encryption, warn about it.

        Args:
          who: start of errors, such as "trainer 0 connects to 10.0.0.1:6174".
          address: the address of the connection.

        Raises:
          ConfigError: the job has no token, the token is too short, or libzmq cannot encrypt.
        """
        is_far, encrypts = not is_local(address), self.encrypts(address)
        if not is_far and not encrypts:
            return
        if not self.folder:
            reason = f"and {self.setting} encrypts the connection"
            if is_far:
                reason = "which is not on loopback"
            if not self.token:
                raise ConfigError(f"{who}, {reason}. Set {token.NEEDED}")
            token.check_strong(self.token, f"{who}, {reason}")
        if encrypts:
            check_libzmq()
        else:
            warnings.warn(
                f"{who}, and {self.setting}: anyone on the network can read parameters, gradients "
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
        """Return the public key of bound sockets. Clients authenticate a server by this key."""
        if self.folder:
            return self._read(f"{SERVER}.public")
        return public_key(self.server_secret())

    def client_secret(self, user: str, role: str) -> bytes:
        """Return the secret key with which a role connects to servers.

        Args:
          user: name under which the process connects. Without separate keys, it determines the key.
          role: role of the process, such as "trainer 0". With separate keys, it determines the key.
        """
        if self.folder:
            return self._read(f"{_file_name(role)}.secret")
        return _derive_secret(self.secret, f"client {user}")

    def users_by_key(self, users: Mapping[str, str]) -> Mapping[bytes, str]:
        """Return the public keys that a listener admits, each with the user name of its owner.

        The keys of the result are 32 bytes long.

        Args:
          users: maps each user name to the role that may connect under it. An empty role admits all
            roles.
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
                f"{FOLDER} is {self.folder!r}, and its file {name} does not contain a key; "
                "create the folder with `dtrans keygen`"
            )
        return found.encode()

    # -- sockets ---------------------------------------------------------------------------------

    def guard(self, bound: zmq.Socket[Any], address: str) -> None:
        """Configure a socket to require a key or a password from its clients, before `bind`.

        Args:
          bound: the socket.
          address: the address to which clients connect.
        """
        bound.setsockopt_string(zmq.ZAP_DOMAIN, "dtrans")
        if self.encrypts(address):
            bound.setsockopt(zmq.CURVE_SERVER, 1)
            bound.setsockopt(zmq.CURVE_SECRETKEY, self.server_secret())
        else:
            bound.setsockopt(zmq.PLAIN_SERVER, 1)

    def show(self, connecting: zmq.Socket[Any], address: str, user: str, role: str) -> None:
        """Set the key or the password that a socket presents, before it connects.

        Args:
          connecting: the socket.
          address: the address to which the socket connects.
          user: user name under which this process connects.
          role: role of this process, which selects the key if roles have separate keys.
        """
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
        """Return the error text for a connection that one side encrypts and the other does not.

        Args:
          address: the address of the connection.
        """
        encrypts = self.encrypts(address)
        others = [Keys(self.token, e) for e in ENCRYPTIONS]
        theirs = " or ".join(k.setting for k in others if k.encrypts(address) != encrypts)
        here, there = "does not encrypt", "does"
        if encrypts:
            here, there = "encrypts", "does not"
        return (
            f"this process {here} the connection ({self.setting}), and the other process {there} "
            f"({theirs}), or it belongs to another job; set the same transport_encryption, or "
            f"{ENCRYPTION}, in all processes"
        )

    def other_keys(self) -> str:
        """Return the error text for a connection that the other process refused, with a remedy.

        The other process has refused the key or the password of this process.
        """
        if self.folder:
            return (
                f"its keys differ from the keys in {FOLDER}={self.folder!r}, or this role's key "
                "was revoked; use the same server key in both processes, and add the role's public "
                "key to the folder `clients` of the server"
            )
        return (
            f"the two processes have different values of {token.VARIABLE}; set the same value in "
            "all processes of the job"
        )


# -- derived keys, and files of keys ---------------------------------------------------------------


def public_key(secret: bytes) -> bytes:
    """Return the public key of a secret key."""
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

    The function does not change existing keys.

    Args:
      folder: the folder, which is created if it does not exist.
      roles: names of the roles, such as "trainer 0".

    Returns:
      The paths of the new files.

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
    """Raise ConfigError if libzmq does not encrypt with libsodium.

    Some builds of libzmq use tweetnacl instead, which is slow and not audited.
    """
    remedy = (
        "install pyzmq's own wheel (`pip install --force-reinstall --only-binary pyzmq pyzmq`), or "
        "use transport_encryption='disabled' on a network that nobody else can read"
    )
    if not zmq.has("curve"):
        raise ConfigError(
            f"libzmq {zmq.zmq_version()} is built without CURVE, which encrypts connections; "
            f"{remedy}"
        )
    if not _has_libsodium():
        raise ConfigError(
            f"libzmq {zmq.zmq_version()} is built without libsodium, which must encrypt "
            f"connections; {remedy}"
        )


@functools.cache
def _has_libsodium() -> bool:
    """Return True if this process has loaded libsodium.

    Also return True if the operating system does not list the loaded libraries.
    """
    if not MAPS.exists():
        return True
    names = (line.rpartition("/")[2] for line in MAPS.read_text().splitlines())
    return any(name.startswith("libsodium") for name in names)
