"""Agent of the launcher on another host: checks the host, or runs one role there.

    RSH HOST PYTHON -m dtrans.hosts.remote_agent       checks; it imports dtrans, as a role will
    RSH HOST PYTHON -I -S hosts/remote_agent.py        runs a role; it does not load JAX

The first line of its standard input is an order as JSON. It has the environment of a role with the
job's secret, which must not be in argv. Each further line is a message: a signal for the role, the
end of another role, or an empty heartbeat of the launcher. Notes of the agent are lines with the
order's mark, on standard error (standard output for a check). All other lines are the role's.

One invariant: the role ends with the agent, and the agent with its standard input. Its end, or a
long silence, means that the launcher was killed or the connection is lost. Then the role gets
SIGTERM, and SIGKILL after a grace period. An agent that is killed leaves its role to
`dtrans.run.distributed.orphan_guard`.

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
WITHOUT_INIT = ("dtrans", "dtrans.run", "dtrans.run.net", "dtrans.run.distributed")


def main() -> None:
    """Carry out the order on standard input."""
    # unbuffered, since a thread may wait in it at exit
    stdin = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115
    line = stdin.readline()
    if not line:
        sys.exit(1)  # the launcher is gone
    order = json.loads(line)
    if "ports" in order:
        print(order["mark"] + json.dumps(look(order)), flush=True)
    else:
        _skip_init()
        start(order, stdin)


# -- looking ---------------------------------------------------------------------------------------


def look(order: dict[str, Any]) -> dict[str, Any]:
    """Return the facts that a launcher needs about this host.

    Args:
      order: `address` or `name`, where others reach this host; `ports`, the number of them to
        choose; the working `directory` and the `script`.
    """
    found: dict[str, Any] = {
        "versions": versions(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "agent": os.path.abspath(__file__),
        "missing": [
            path
            for path in (order["directory"], order["script"])
            if path and not os.path.exists(path)
        ],
    }
    address = order["address"] or _local_address(order["name"])
    found["address"] = address
    try:
        found["ports"] = _free_ports(address, order["ports"])
    except OSError as e:
        found["ports"], found["unbound"] = [], e.strerror or str(e)
    return found


def versions() -> dict[str, str]:
    """Return the versions that all hosts of a job have in common."""
    import jax

    import dtrans

    python = ".".join(platform.python_version_tuple()[:2])
    libraries = {"jax": jax.__version__, "jaxlib": importlib.metadata.version("jaxlib")}
    return {"Python": python, **libraries, "dtrans": dtrans.__version__}


def _local_address(name: str) -> str:
    """Return the address that others connect to; an empty string if unknown.

    It is the resolved name, or the address that ssh has connected to. On Debian a host resolves its
    name to 127.0.1.1, so loopback addresses come last.
    """
    candidates = []
    with contextlib.suppress(OSError):
        candidates.append(str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]))
    candidates += os.environ.get("SSH_CONNECTION", "").split()[2:3]
    outside = [c for c in candidates if not c.startswith("127.") and c != "::1"]
    return next(iter(outside + candidates), "")


def _free_ports(address: str, count: int) -> list[int]:
    """Return ports without a listener. All are bound at once, so that they differ."""
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
    """Start the role of an order, and return when it has ended."""
    from dtrans.errors import LaunchError
    from dtrans.run.distributed.child_process import Child, Guard
    from dtrans.run.net.ended_roles import EndedRoles

    writing = threading.Lock()

    def write(stream: str, line: str) -> None:
        # a launcher that does not read any more is noticed by the end of standard input
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
    # after a loss the agent has ended the role, which the launcher must not count as the role's end
    if not is_lost:
        note(ended=child.returncode)


def _listen(stdin: IO[bytes], events: SimpleQueue[Any]) -> None:
    """Put each message into the queue, and None at their end."""
    for line in stdin:
        events.put(json.loads(line))
    events.put(None)


def _attend(child: Child, events: SimpleQueue[Any], ended: EndedRoles, silence: float) -> bool:
    """Carry out messages until the role has ended. Return True if the launcher was lost before."""
    limit = time.monotonic() + silence
    ending = False
    while True:
        try:
            event = events.get(timeout=max(0.0, limit - time.monotonic()))
        except queue.Empty:
            event = None
        if event is child:
            return ending
        if event is None:  # the launcher is gone, or the role has had its grace period
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
    """Make modules importable without running their packages' `__init__`, which loads JAX."""
    root = Path(__file__).resolve().parents[2]
    for name in WITHOUT_INIT:
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[name] = package


if __name__ == "__main__":
    main()
