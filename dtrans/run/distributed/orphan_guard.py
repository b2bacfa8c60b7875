"""Guard process that ends the roles of a launcher if the launcher itself is killed.

It runs as a script, by path, and does not import dtrans.

A launcher that gets SIGKILL, or runs out of memory, cannot end its roles. The guard reads a pipe;
only the launcher writes to it: `+pid` when a role starts, and `-pid` when a role has ended. The
pipe closes when the launcher ends for any reason. The guard then sends SIGTERM to the remaining
process groups, so that parameter servers save their state. After a grace period it sends SIGKILL.

With arguments, the script is the *gate* of a role: the first program of the role's process. It
waits for a line on standard input, and then executes its arguments as a command. The launcher
registers the process with the guard before it writes the line. If the launcher is killed before
that, standard input closes, and the gate exits.

The alternative was PR_SET_PDEATHSIG in each role. It exists only on Linux, and needs code between
fork and exec. The signal comes when the *thread* that started the role ends, and does not reach the
processes that a role has started.
"""

import contextlib
import os
import signal
import sys
import time


GRACE = 5.0  # seconds between SIGTERM and SIGKILL
PAUSE = 0.05  # seconds between two looks at the groups


def main() -> None:
    """Read process ids from standard input until it closes, then end the remaining groups."""
    alive = set()
    for line in sys.stdin.buffer:
        pid = int(line[1:])
        if line.startswith(b"+"):
            alive.add(pid)
        else:
            alive.discard(pid)
    _end(alive)


def _end(groups: set[int]) -> None:
    """Send SIGTERM to process groups, and SIGKILL to those that remain after the grace period."""
    _send(groups, signal.SIGTERM)
    limit = time.monotonic() + GRACE
    while time.monotonic() < limit and _send(groups, 0):
        time.sleep(PAUSE)
    _send(groups, signal.SIGKILL)


def _send(groups: set[int], signum: int) -> bool:
    """Send a signal to process groups; return False if no group remains."""
    remains = False
    for pid in groups:
        # a role may have ended after the launcher died
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signum)
            remains = True
    return remains


def begin(command: list[str]) -> None:
    """Wait for a line on standard input, then replace this process by a command.

    If standard input closes first, the launcher has been killed, and this process exits.
    """
    if not os.read(0, 1):
        sys.exit(1)
    # standard input stays open for a spare, which reads its role's variables there
    if "DTRANS_SPARE" not in os.environ:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # Python ignores these signals at its start, and the command would inherit the setting
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)
    os.execvp(command[0], command)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        begin(sys.argv[1:])
    else:
        main()
