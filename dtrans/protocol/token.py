"""The job's token: a secret that its processes share, and what they show of it.

`dtrans launch` makes one for each job. Who starts processes otherwise sets the same DTRANS_TOKEN for all of them;
without one a job stays on loopback. The token itself is never sent. A process that connects shows a password that is
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


VARIABLE = "DTRANS_TOKEN"
NEEDED = (
    f"{VARIABLE}, the same secret in all processes, for instance the output of "
    "`python -c 'import secrets; print(secrets.token_hex())'`"
)


def new_token() -> str:
    """A token that nobody can guess."""
    return secrets.token_hex(32)


def job_token(environ: Mapping[str, str] | None = None) -> str:
    """The token of this process's job; empty, where it has none."""
    env = os.environ if environ is None else environ
    return env.get(VARIABLE, "").strip()


def shown(token: str, purpose: str) -> str:
    """What shows that somebody knows a token, for one purpose; nobody can make that for another of it."""
    return hmac.new(token.encode(), purpose.encode(), hashlib.sha256).hexdigest()


def is_shown(given: object, token: str, purpose: str) -> bool:
    """Whether something is what `shown` makes."""
    return isinstance(given, str) and hmac.compare_digest(given.encode(), shown(token, purpose).encode())
