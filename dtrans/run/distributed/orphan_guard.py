"""Ends the roles of a launcher that was itself killed. Run as a script, by path: it imports nothing
of dtrans.

A launcher that gets SIGKILL, or dies of memory, can end nobody. This small process holds the read
end of a pipe whose only writer is the launcher. It reads `+pid` when a role starts and `-pid` when
one has ended; at the end of the file, which comes when the launcher is gone for whatever reason, it
kills the process groups that are left.

With arguments it is the other end of that: it waits for a line, and then becomes the command that
they say. So a role begins when it is registered, and a launcher that is killed before that leaves
nothing: the line does not come.

The other way would be PR_SET_PDEATHSIG in each role. That is Linux only, needs code between fork
and exec, fires when the *thread* that started the role ends, and does not reach what a role has
started itself.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    """Read process ids from standard input until it ends, then kill what is left."""
    alive = set()
    for line in sys.stdin.buffer:
        pid = int(line[1:])
        if line.startswith(b"+"):
            alive.add(pid)
        else:
            alive.discard(pid)
    for pid in alive:
        # a role may end between the launcher's death and this
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def begin(command: list[str]) -> None:
    """Become a command when a line has come on standard input; end where that is closed before."""
    if not os.read(0, 1):
        sys.exit(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for signum in (
        signal.SIGPIPE,
        signal.SIGXFSZ,
    ):  # Python ignores these, and a command would inherit that
        signal.signal(signum, signal.SIG_DFL)
    os.execvp(command[0], command)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        begin(sys.argv[1:])
    else:
        main()
