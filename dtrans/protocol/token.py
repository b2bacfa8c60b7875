"""The job's token: a secret of its processes, and the proofs that they show of it.

`dtrans launch` makes a token for each job. Other launchers set the same DTRANS_TOKEN for all
processes, or DTRANS_TOKEN_FILE, the path of a file with the token. A job without a token stays on
loopback.

The token itself is never sent. A process that connects shows a key or a password that is derived
from it. The other end checks that before it reads any message (`dtrans.run.net.keys`). A server
that welcomes a trainer shows a proof that only an owner of the token can compute.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import secrets
import string
from collections.abc import Mapping
from pathlib import Path

from dtrans.errors import ConfigError


VARIABLE, FILE = "DTRANS_TOKEN", "DTRANS_TOKEN_FILE"
NEW_TOKEN = "the output of `dtrans keygen --token`"
NEEDED = f"{VARIABLE}, the same secret in all processes, for instance {NEW_TOKEN}"
BITS = 128  # random bits of a token that nobody can guess


def new_token() -> str:
    """Return a new token that nobody can guess."""
    return secrets.token_hex(32)


def job_token(environ: Mapping[str, str] | None = None) -> str:
    """Return the token of this process's job; an empty text if it has none.

    DTRANS_TOKEN holds it, or else the file that DTRANS_TOKEN_FILE names.

    Raises:
      ConfigError: the file cannot be read, or is empty.
    """
    env = os.environ if environ is None else environ
    token, path = env.get(VARIABLE, "").strip(), env.get(FILE, "").strip()
    if token or not path:
        return token
    try:
        found = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) else "it is not text"
        raise ConfigError(f"{FILE} is {path!r}, which cannot be read: {why}") from e
    if not found:
        raise ConfigError(
            f"{FILE} is {path!r}, and this file is empty; write the job's token into it"
        )
    return found


def shown(token: str, purpose: str) -> str:
    """Return the proof that its sender knows a token, for one purpose.

    Without the token nobody can compute the proof for another purpose.
    """
    return hmac.new(token.encode(), purpose.encode(), hashlib.sha256).hexdigest()


def is_shown(proof: object, token: str, purpose: str) -> bool:
    """Return True if `proof` is the output of `shown` for these arguments."""
    return isinstance(proof, str) and hmac.compare_digest(
        proof.encode(), shown(token, purpose).encode()
    )


def check_strong(token: str, where: str) -> None:
    """Raise ConfigError for a token that is too short to hold 128 random bits.

    Args:
      where: place where a process uses it, for the message.
    """
    is_hex = all(c in string.hexdigits for c in token)
    least, kind = math.ceil(BITS / 6), "characters"  # of 64 different ones
    if is_hex:
        least, kind = BITS // 4, "hexadecimal digits"
    if len(token) < least:
        raise ConfigError(
            f"{where}, and {VARIABLE} has {len(token)} {kind}, where {least} hold {BITS} random "
            f"bits; take {NEW_TOKEN}"
        )


def hkdf(secret: bytes, salt: bytes, purpose: bytes, length: int) -> bytes:
    """Return bytes that are derived from a secret for one purpose (HKDF-SHA256, RFC 5869).

    They reveal neither the secret nor the bytes for another purpose.
    """
    key = hmac.digest(salt, secret, "sha256")
    block, derived = b"", b""
    for i in range(1, math.ceil(length / hashlib.sha256().digest_size) + 1):
        block = hmac.digest(key, block + purpose + bytes([i]), "sha256")
        derived += block
    return derived[:length]
