"""Options of connections, and the environment variables that set the defaults of options.

DTRANS_ALLOW_REMOTE           1 if processes may bind addresses that other hosts can connect to.
                              Launchers of jobs on several hosts set it.
DTRANS_TRANSPORT_ENCRYPTION   required, auto or disabled; see `dtrans.run.net.keys`.
DTRANS_SHARED_MEMORY          disabled if processes of one host send all arrays as bytes; auto, the
                              default, if they may use shared memory (`memory_channel`).
"""

from __future__ import annotations

import os

from dtrans.checks import check_one_of


ALLOW_REMOTE = "DTRANS_ALLOW_REMOTE"
ENCRYPTION = "DTRANS_TRANSPORT_ENCRYPTION"
SHARED_MEMORY = "DTRANS_SHARED_MEMORY"
ENCRYPTIONS = ("required", "auto", "disabled")


def allows_remote(option: bool | None) -> bool:
    """Return True if processes may bind addresses that other hosts can connect to.

    Args:
      option: the user's `allow_remote`; None to use the value of DTRANS_ALLOW_REMOTE. If both are
        missing, the result is False.

    Raises:
      ConfigError: the option is not True, False or None, or the variable is not 1 or 0.

    Example:
      >>> from dtrans.run.net.net_options import allows_remote
      >>> allows_remote(True), allows_remote(None)
      (True, False)
    """
    check_one_of("allow_remote", option, (True, False, None))
    if option is None:
        found = os.environ.get(ALLOW_REMOTE, "").strip()
        check_one_of(ALLOW_REMOTE, found, ("1", "0", ""))
        return found == "1"
    return option


def choose_encryption(option: str | None) -> str:
    """Return the selected encryption: "required", "auto" or "disabled".

    Args:
      option: the user's `transport_encryption`; None to use the value of
        DTRANS_TRANSPORT_ENCRYPTION. If both are missing, the result is "auto".

    Raises:
      ConfigError: the option or the variable has another value.
    """
    check_one_of("transport_encryption", option, (*ENCRYPTIONS, None))
    if option is None:
        option = os.environ.get(ENCRYPTION, "").strip() or "auto"
        check_one_of(ENCRYPTION, option, ENCRYPTIONS)
    return option


def allows_shared_memory() -> bool:
    """Return True if DTRANS_SHARED_MEMORY allows shared memory between processes of one host.

    Raises:
      ConfigError: the variable has another value than "auto" or "disabled".
    """
    found = os.environ.get(SHARED_MEMORY, "").strip() or "auto"
    check_one_of(SHARED_MEMORY, found, ("auto", "disabled"))
    return found == "auto"
