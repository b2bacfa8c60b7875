"""Options of connections, and the environment variables that are their defaults.

DTRANS_ALLOW_REMOTE           1 where a launcher was told of several hosts: processes may bind addresses that others
                              reach
DTRANS_TRANSPORT_ENCRYPTION   required, auto or disabled; see `dtrans.run.net.keys`
"""

from __future__ import annotations

import os

from dtrans.checks import check_one_of


ALLOW_REMOTE = "DTRANS_ALLOW_REMOTE"
ENCRYPTION = "DTRANS_TRANSPORT_ENCRYPTION"
ENCRYPTIONS = ("required", "auto", "disabled")


def allows_remote(given: bool | None) -> bool:
    """Return True if processes may bind addresses that other hosts reach.

    Args:
      given: the user's `allow_remote`; None leaves it to DTRANS_ALLOW_REMOTE.

    Raises:
      ConfigError: neither True, False nor None; or the variable is neither 1 nor 0.

    Example:
      >>> from dtrans.run.net.net_options import allows_remote
      >>> allows_remote(True), allows_remote(None)
      (True, False)
    """
    check_one_of("allow_remote", given, (True, False, None))
    if given is None:
        found = os.environ.get(ALLOW_REMOTE, "").strip()
        check_one_of(ALLOW_REMOTE, found, ("1", "0", ""))
        return found == "1"
    return given


def encryption_of(given: str | None) -> str:
    """Return which connections are encrypted: "required", "auto" or "disabled".

    Args:
      given: the user's `transport_encryption`; None leaves it to DTRANS_TRANSPORT_ENCRYPTION, else
        to "auto".

    Raises:
      ConfigError: it is another word.
    """
    check_one_of("transport_encryption", given, (*ENCRYPTIONS, None))
    if given is None:
        given = os.environ.get(ENCRYPTION, "").strip() or "auto"
        check_one_of(ENCRYPTION, given, ENCRYPTIONS)
    return given
