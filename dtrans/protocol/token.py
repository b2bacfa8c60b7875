"""The job's token: a secret that all processes of a job share, and proofs that a process knows it.

`dtrans launch` generates a token for each job. Other launchers set the same DTRANS_TOKEN for all
processes, or set DTRANS_TOKEN_FILE to the path of a file with the token. A job without a token or
keys can use loopback addresses only.

The token itself is never sent. A process that connects presents a key or a password that is derived
from the token. The listening process verifies this key or password before it reads messages
(`dtrans.run.net.keys`). A server's welcome contains a proof that only a process with the token can
compute.
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
BITS = 128  # minimum number of random bits in the token of a job on several hosts


def new_token() -> str:
    """Return a new token of 256 random bits."""
    return secrets.token_hex(32)


def job_token(environ: Mapping[str, str] | None = None) -> str:
    """Return the token of this process's job; empty if the job has no token.

    The token is the value of DTRANS_TOKEN. Without DTRANS_TOKEN, it is the content of the file at
    the path DTRANS_TOKEN_FILE.

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
            f"{FILE} is {path!r}, which is an empty file; write the job's token into it"
        )
    return found


def shown(token: str, purpose: str) -> str:
    """Return a proof that this process knows the job's token, without revealing the token.

    It is an HMAC of the purpose, with the token as key. Nobody can compute the proof for another
    purpose from this proof.

    Args:
      token: the job's token.
      purpose: text for which the proof is valid, such as "welcome " and a random word.
    """
    return hmac.new(token.encode(), purpose.encode(), hashlib.sha256).hexdigest()


def is_shown(proof: object, token: str, purpose: str) -> bool:
    """Return True if `proof` shows that its sender knows the token (see `shown`)."""
    return isinstance(proof, str) and hmac.compare_digest(
        proof.encode(), shown(token, purpose).encode()
    )


def check_strong(token: str, where: str) -> None:
    """Raise ConfigError if the token is too short to contain 128 random bits.

    Args:
      where: start of the error text, which names the process and its address.
    """
    is_hex = all(c in string.hexdigits for c in token)
    # A character of base 64 encodes 6 bits, and a hexadecimal digit encodes 4 bits.
    least, kind = math.ceil(BITS / 6), "characters"
    if is_hex:
        least, kind = BITS // 4, "hexadecimal digits"
    if len(token) < least:
        raise ConfigError(
            f"{where}, and {VARIABLE} has {len(token)} {kind}; expected at least {least}, which "
            f"contain {BITS} random bits. Use {NEW_TOKEN}"
        )


def hkdf(secret: bytes, salt: bytes, purpose: bytes, length: int) -> bytes:
    """Derive bytes from a secret for one purpose (HKDF-SHA256, RFC 5869).

    The bytes reveal neither the secret nor the bytes derived for another purpose.
    """
    key = hmac.digest(salt, secret, "sha256")
    block, derived = b"", b""
    for i in range(1, math.ceil(length / hashlib.sha256().digest_size) + 1):
        block = hmac.digest(key, block + purpose + bytes([i]), "sha256")
        derived += block
    return derived[:length]
