"""Guard that kills the roles of a launcher which was itself killed.

It runs as a script, by path, and imports nothing of dtrans.

A launcher that gets SIGKILL, or runs out of memory, cannot end its roles. The guard reads a pipe
whose only writer is the launcher. It reads `+pid` when a role starts, and `-pid` when a role has
ended. The pipe ends when the launcher ends, for whatever reason. The guard then kills the remaining
process groups.

With arguments, the script is the gate of a role. It waits for a line, and then executes its
arguments as a command. A role starts after it is registered. If the launcher is killed before that,
the line does not come, and the gate ends.

PR_SET_PDEATHSIG in each role was the alternative. It exists only on Linux, and needs code between
fork and exec. It fires when the *thread* that started the role ends, and does not reach processes
that a role has started.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    """Read process ids from standard input until it ends, then kill the remaining groups."""
    alive = set()
    for line in sys.stdin.buffer:
        pid = int(line[1:])
        if line.startswith(b"+"):
            alive.add(pid)
        else:
            alive.discard(pid)
    for pid in alive:
        # a role may have ended after the launcher died
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def begin(command: list[str]) -> None:
    """Execute a command when a line arrives on standard input; exit if that ends before."""
    if not os.read(0, 1):
        sys.exit(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # Python ignores these signals, and the command would inherit that
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)
    os.execvp(command[0], command)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        begin(sys.argv[1:])
    else:
        main()
