"""The job's token: a secret that its processes share, and what they show of it.

`dtrans launch` makes one for each job. Who starts processes otherwise sets the same DTRANS_TOKEN
for all of them, or DTRANS_TOKEN_FILE, the path of a file that holds it; without one a job stays on
loopback. The token itself is never sent. A process that connects shows a key or a password that is
made of it, which is looked at before anything else that comes by the connection
(`dtrans.run.net.keys`); a server that welcomes shows a proof that nobody else could have made.
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
MADE = "the output of `dtrans keygen --token`"
NEEDED = f"{VARIABLE}, the same secret in all processes, for instance {MADE}"
BITS = 128  # that a token must have at random where others can try to guess it


def new_token() -> str:
    """A token that nobody can guess."""
    return secrets.token_hex(32)


def job_token(environ: Mapping[str, str] | None = None) -> str:
    """Return the token of this process's job; empty, where it has none.

    DTRANS_TOKEN holds it, or else the file that DTRANS_TOKEN_FILE names.

    Raises:
      ConfigError: the file cannot be read, or holds nothing.
    """
    env = os.environ if environ is None else environ
    given, path = env.get(VARIABLE, "").strip(), env.get(FILE, "").strip()
    if given or not path:
        return given
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
    """What shows that somebody knows a token, for one purpose; nobody can make that for another of
    it."""
    return hmac.new(token.encode(), purpose.encode(), hashlib.sha256).hexdigest()


def is_shown(given: object, token: str, purpose: str) -> bool:
    """Whether something is what `shown` makes."""
    return isinstance(given, str) and hmac.compare_digest(
        given.encode(), shown(token, purpose).encode()
    )


def check_strong(token: str, where: str) -> None:
    """Raise ConfigError for a token that is too short to hold 128 random bits.

    Args:
      where: a process uses it, for the message.
    """
    is_hex = all(c in string.hexdigits for c in token)
    least, kind = (
        (BITS // 4, "hexadecimal digits") if is_hex else (math.ceil(BITS / 6), "characters")
    )
    if len(token) < least:
        raise ConfigError(
            f"{where}, and {VARIABLE} has {len(token)} {kind}, where {least} hold {BITS} random "
            f"bits; take {MADE}"
        )


def hkdf(secret: bytes, salt: bytes, purpose: bytes, length: int) -> bytes:
    """Return bytes for one purpose that say nothing of the secret, nor of those for another
    (HKDF-SHA256, RFC 5869)."""
    key = hmac.digest(salt, secret, "sha256")
    block, made = b"", b""
    for i in range(1, math.ceil(length / hashlib.sha256().digest_size) + 1):
        block = hmac.digest(key, block + purpose + bytes([i]), "sha256")
        made += block
    return made[:length]
