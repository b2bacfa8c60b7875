"""Agent of the launcher on another host: checks the host, or runs one role there.

    RSH HOST PYTHON -m dtrans.hosts.remote_agent       checks the host; it imports dtrans and JAX
    RSH HOST PYTHON -I -S hosts/remote_agent.py        runs a role; it does not import JAX

The first line of the agent's standard input is an *order* in JSON. An order for a role contains its
environment, including the job's secret token, which must not be in argv. Each further line is a
message: a signal for the role, the end of another role, or an empty heartbeat of the launcher.
Lines that the agent itself writes begin with a random text, the order's `mark`. All other lines are
output of the role. The agent writes to standard error, or to standard output when it checks a host.

No role runs on after its launcher: the role ends with the agent, and the agent ends with its
standard input. If standard input closes, or no message arrives for a minute, the launcher was
killed or the connection is lost. Then the role gets SIGTERM, and SIGKILL after a grace period. If
the agent is killed, `dtrans.run.distributed.orphan_guard` kills the role.

Read `dtrans.hosts.remote_child` next, which sends the orders.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import queue
import signal
import socket
import sys
import threading
import time
import types
from pathlib import Path
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING, Any


if TYPE_CHECKING:
    from dtrans.run.distributed.child_process import Child
    from dtrans.run.net.ended_roles import EndedRoles


GRACE = 5.0  # seconds between SIGTERM and SIGKILL
# packages whose __init__ is skipped, because it imports JAX
WITHOUT_INIT = ("dtrans", "dtrans.run", "dtrans.run.net", "dtrans.run.distributed")


def main() -> None:
    """Read the launcher's order from standard input, and carry it out."""
    # unbuffered, since Python would wait at exit for a thread that reads a buffered file
    stdin = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115
    line = stdin.readline()
    if not line:
        sys.exit(1)  # the launcher has ended
    order = json.loads(line)
    if "ports" in order:
        print(order["mark"] + json.dumps(look(order)), flush=True)
    else:
        _skip_init()
        start(order, stdin)


# -- checks ----------------------------------------------------------------------------------------


def look(order: dict[str, Any]) -> dict[str, Any]:
    """Return versions, address, ports and missing files of this host, for the launcher's check.

    Args:
      order: the order of the launcher:
        `name`: name of this host;
        `address`: address to which other hosts connect; if it is "", `name` is resolved instead;
        `ports`: number of free ports to choose;
        `directory`, `script`: paths;
        `probe`: path of a file that the launcher has written to a shared folder; "" without one.
    """
    found: dict[str, Any] = {
        "versions": versions(),
        "cores": os.cpu_count(),
        "agent": os.path.abspath(__file__),
        "missing": [],
        "probe": _look_for_probe(order["probe"]),
    }
    if hasattr(os, "sched_getaffinity"):
        found["cores"] = len(os.sched_getaffinity(0))
    for path in (order["directory"], order["script"]):
        if path and not os.path.exists(path):
            found["missing"].append(path)
    address = order["address"] or _local_address(order["name"])
    found["address"] = address
    try:
        found["ports"] = _free_ports(address, order["ports"])
    except OSError as e:
        found["ports"], found["unbound"] = [], e.strerror or str(e)
    return found


def _look_for_probe(path: str) -> str:
    """Check that this host sees a file of the launcher, and can write to the file's folder.

    Returns:
      The end of an error text if not, such as "does not see"; else "".
    """
    if path and not os.path.exists(path):
        return "does not see"
    if path and not os.access(os.path.dirname(path), os.W_OK | os.X_OK):
        return "cannot write to"
    return ""


def versions() -> dict[str, str]:
    """Return the versions of Python and libraries that must be the same on all hosts of a job."""
    import jax

    import dtrans

    python = ".".join(platform.python_version_tuple()[:2])
    libraries = {"jax": jax.__version__, "jaxlib": importlib.metadata.version("jaxlib")}
    return {"Python": python, **libraries, "dtrans": dtrans.__version__}


def _local_address(name: str) -> str:
    """Return this host's address for other hosts; an empty string if unknown.

    The first choice is the address of `name`, as this host resolves it. The second choice is the
    address that ssh has connected to. A loopback address is the last choice, because a host with
    Debian resolves its name to 127.0.1.1.
    """
    candidates = []
    with contextlib.suppress(OSError):
        candidates.append(str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]))
    candidates += os.environ.get("SSH_CONNECTION", "").split()[2:3]
    for address in candidates:
        if not address.startswith("127.") and address != "::1":
            return address
    return next(iter(candidates), "")


def _free_ports(address: str, count: int) -> list[int]:
    """Return `count` free ports. All are bound at the same time, so no port is returned twice."""
    with contextlib.ExitStack() as stack:
        sockets = []
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
        family, kind, protocol, _, where = found[0]
        for _ in range(count):
            sockets.append(stack.enter_context(socket.socket(family, kind, protocol)))
            sockets[-1].bind(where)
        return [bound.getsockname()[1] for bound in sockets]


# -- one role --------------------------------------------------------------------------------------


def start(order: dict[str, Any], stdin: IO[bytes]) -> None:
    """Run one role on this host until it has ended, as the launcher's order says.

    Args:
      order: the `role`, its `command`, `environment` and working `directory`; `silence`, seconds
        without a message after which the launcher counts as lost; and the `mark`.
      stdin: the standard input, with further messages.
    """
    from dtrans.errors import LaunchError
    from dtrans.run.distributed.child_process import Child, Guard
    from dtrans.run.net.ended_roles import EndedRoles

    writing = threading.Lock()

    def write(stream: str, line: str) -> None:
        # if the launcher has ended, the error is ignored: the end of standard input reports it
        with writing, contextlib.suppress(OSError):
            os.write(1 if stream == "stdout" else 2, f"{line}\n".encode())

    def note(**fields: Any) -> None:
        write("stderr", order["mark"] + json.dumps(fields))

    events: SimpleQueue[Any] = SimpleQueue()
    role: Any = types.SimpleNamespace(name=order["role"])
    local = {k: v for k, v in os.environ.items() if not k.startswith("DTRANS_")}
    with Guard(sys.executable) as guard, EndedRoles() as ended:
        try:
            os.chdir(order["directory"])
            env = local | order["environment"] | ended.environment
            child = Child(role, order["command"], env, events, write)
        except (LaunchError, OSError) as e:
            note(refused=str(e))
            return
        guard.add(child)
        note(pid=child.pid)
        child.begin()
        threading.Thread(target=_listen, args=(stdin, events), daemon=True).start()
        is_lost = _attend(child, events, ended, order["silence"])
        child.reap()
        guard.remove(child)
    # If the launcher was lost, the agent itself has ended the role. A note of this end would hide
    # from the launcher that the connection was lost.
    if not is_lost:
        note(ended=child.returncode)


def _listen(stdin: IO[bytes], events: SimpleQueue[Any]) -> None:
    """Put each message of the launcher into the queue, and None when standard input closes."""
    for line in stdin:
        events.put(json.loads(line))
    events.put(None)


def _attend(child: Child, events: SimpleQueue[Any], ended: EndedRoles, silence: float) -> bool:
    """Watch over a running role: pass on signals, and end the role if the launcher is lost.

    Args:
      child: the role.
      events: messages of the launcher, then None after the last one; `child` when the role has
        ended.
      ended: the folder from which the role learns that other roles have ended.
      silence: seconds without a message after which the launcher counts as lost.

    Returns:
      True if the launcher was lost before the role ended.
    """
    limit = time.monotonic() + silence
    ending = False
    while True:
        try:
            event = events.get(timeout=max(0.0, limit - time.monotonic()))
        except queue.Empty:
            event = None
        if event is child:
            return ending
        if event is None:
            # No event: the launcher is lost, or the time after SIGTERM has passed.
            child.signal(signal.SIGKILL if ending else signal.SIGTERM)
            limit, ending = time.monotonic() + GRACE, True
            continue
        if not ending:
            limit = time.monotonic() + silence
        if "signal" in event:
            child.signal(event["signal"])
        elif "ended" in event:
            ended.note(*event["ended"])


def _skip_init() -> None:
    """Let this process import modules of dtrans without JAX, so that roles start fast.

    The `__init__` files of their packages import JAX, so empty packages take their place.
    """
    root = Path(__file__).resolve().parents[2]
    for name in WITHOUT_INIT:
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[name] = package


if __name__ == "__main__":
    main()
