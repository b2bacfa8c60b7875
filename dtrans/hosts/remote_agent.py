"""Agent of the launcher on another host: it looks at the host, or starts one role there and ends
it.

    RSH HOST PYTHON -m dtrans.hosts.remote_agent       looks; it imports dtrans, as a role will
    RSH HOST PYTHON -I -S hosts/remote_agent.py        starts a role; it does not load JAX

The first line of its standard input is an order as JSON. The environment of a role, with the job's
secret, comes by this way and never by argv. Each further line is a message: a signal for the role,
another role that has ended, or nothing, which says that the launcher is there. Notes of the agent
are lines of standard error (standard output, where it looks) behind a mark that the order has; all
other lines are the role's.

One invariant: the role ends with the agent, and the agent with its standard input. The launcher was
killed, or the connection is lost, where that ends, or stays silent for too long; then the role gets
SIGTERM, and SIGKILL after a grace period. An agent that is killed leaves its role to
`dtrans.run.distributed.orphan_guard`.

Read `dtrans.hosts.remote_child` next, which gives the orders.
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
    stdin = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115 - unbuffered: a thread may wait in it at exit
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
    """Return what a launcher has to know of this host.

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
    address = order["address"] or _own_address(order["name"])
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


def _own_address(name: str) -> str:
    """Return the address of this host that others reach: what its name resolves to, or where ssh
    has reached it.

    On Debian a host resolves its own name to 127.0.1.1. Empty where nothing says it.
    """
    candidates = []
    with contextlib.suppress(OSError):
        candidates.append(str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]))
    candidates += os.environ.get("SSH_CONNECTION", "").split()[2:3]
    outside = [c for c in candidates if not c.startswith("127.") and c != "::1"]
    return next(iter(outside + candidates), "")


def _free_ports(address: str, count: int) -> list[int]:
    """Return ports that nobody listens on. All are held at once, so that they differ."""
    with contextlib.ExitStack() as stack:
        held = []
        family, kind, protocol, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[
            0
        ]
        for _ in range(count):
            held.append(stack.enter_context(socket.socket(family, kind, protocol)))
            held[-1].bind(where)
        return [s.getsockname()[1] for s in held]


# -- one role --------------------------------------------------------------------------------------


def start(order: dict[str, Any], stdin: IO[bytes]) -> None:
    """Start the role of an order, and return when it has ended."""
    from dtrans.errors import LaunchError
    from dtrans.run.distributed.child_process import Child, Guard
    from dtrans.run.net.ended_roles import EndedRoles

    writing = threading.Lock()

    def write(stream: str, line: str) -> None:
        # where nobody reads any more, the end of standard input says so too
        with writing, contextlib.suppress(OSError):
            os.write(1 if stream == "stdout" else 2, f"{line}\n".encode())

    def note(**fields: Any) -> None:
        write("stderr", order["mark"] + json.dumps(fields))

    events: SimpleQueue[Any] = SimpleQueue()
    role: Any = types.SimpleNamespace(name=order["role"])
    own = {k: v for k, v in os.environ.items() if not k.startswith("DTRANS_")}
    with Guard(sys.executable) as guard, EndedRoles() as told:
        try:
            os.chdir(order["directory"])
            env = own | order["environment"] | told.environment
            child = Child(role, order["command"], env, events, write)
        except (LaunchError, OSError) as e:
            note(refused=str(e))
            return
        guard.add(child)
        note(pid=child.pid)
        child.begin()
        threading.Thread(target=_listen, args=(stdin, events), daemon=True).start()
        is_lost = _attend(child, events, told, order["silence"])
        child.reap()
        guard.remove(child)
    if not is_lost:  # else its end is the agent's doing, and a launcher that hears it must not take it for the role's
        note(ended=child.returncode)


def _listen(stdin: IO[bytes], events: SimpleQueue[Any]) -> None:
    """Put each message into the queue, and None at their end."""
    for line in stdin:
        events.put(json.loads(line))
    events.put(None)


def _attend(child: Child, events: SimpleQueue[Any], told: EndedRoles, silence: float) -> bool:
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
            told.note(*event["ended"])


def _skip_init() -> None:
    """Let modules of these packages be imported without the packages' own `__init__`, which loads
    JAX."""
    root = Path(__file__).resolve().parents[2]
    for name in WITHOUT_INIT:
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[name] = package


if __name__ == "__main__":
    main()
