"""The job's token: a secret that its processes share, and what they show of it.

`dtrans launch` makes one for each job. Who starts processes otherwise sets the same DTRANS_TOKEN for all of them, or
DTRANS_TOKEN_FILE, the path of a file that holds it; without one a job stays on loopback. The token itself is never sent. A process that connects shows a password that is
made of it, which is looked at before anything else that comes by the connection (`dtrans.run.net.sockets`); a server
that welcomes shows a proof that nobody else could have made. Nothing is encrypted: who can read the network reads the
password, and use it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from dtrans.errors import ConfigError


VARIABLE, FILE = "DTRANS_TOKEN", "DTRANS_TOKEN_FILE"
NEEDED = (
    f"{VARIABLE}, the same secret in all processes, for instance the output of "
    "`python -c 'import secrets; print(secrets.token_hex())'`"
)


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
        raise ConfigError(f"{FILE} is {path!r}, and this file is empty; write the job's token into it")
    return found


def shown(token: str, purpose: str) -> str:
    """What shows that somebody knows a token, for one purpose; nobody can make that for another of it."""
    return hmac.new(token.encode(), purpose.encode(), hashlib.sha256).hexdigest()


def is_shown(given: object, token: str, purpose: str) -> bool:
    """Whether something is what `shown` makes."""
    return isinstance(given, str) and hmac.compare_digest(given.encode(), shown(token, purpose).encode())
