"""Scripts of roles that do not import dtrans, so that they start in milliseconds.

The module also has functions by which a test notices their end.
"""

from __future__ import annotations

import socket
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

from paths import ROOT


PATIENCE = 60.0  # seconds for something that takes milliseconds on an idle machine

PRELUDE = """
import json, os, signal, socket, sys, threading
index = os.environ.get("DTRANS_TRAINER_ID") or str(
    os.environ["DTRANS_PSERVER_ENDPOINTS"].split(",").index(os.environ["DTRANS_CURRENT_ENDPOINT"]))
name = os.environ["DTRANS_ROLE"] + " " + index

def report():
    # the test sees this connection end when the process does
    s = socket.create_connection(("127.0.0.1", int(os.environ["TEST_PORT"])))
    s.sendall(f"{name}\\n".encode())
    return s
"""


# Role of a job with snapshots. The script imports dtrans's reports of roles, but not JAX.
GENERATIONS = f"""
import os, signal, sys, threading, types
package = types.ModuleType("dtrans")  # its own __init__ imports JAX
package.__path__ = [{str(ROOT / "dtrans")!r}]
sys.modules["dtrans"] = package
from dtrans.run.net.ended_roles import ended_roles
from dtrans.run.net.role_folder import RoleFolder

kind = os.environ["DTRANS_ROLE"]
servers = os.environ["DTRANS_PSERVER_ENDPOINTS"].split(",")
index = os.environ.get("DTRANS_TRAINER_ID") or str(
    servers.index(os.environ["DTRANS_CURRENT_ENDPOINT"]))
name = kind.lower() + " " + index
count = int(os.environ["DTRANS_TRAINERS"]) + len(servers)
generations = RoleFolder.from_environment(name)

def wait(condition):
    while not condition():
        threading.Event().wait(0.01)

def forever():
    threading.Event().wait()

def enter(number=0):
    wait(lambda: generations.current().number >= number)
    generation = generations.current()
    # a role that sees the report may end the attempt at once, so the line precedes the report
    words = "enters", generation.number, generation.snapshot, os.getpid(), os.environ["DTRANS_RESTARTS"]
    sys.stdout.write(" ".join(map(str, words)) + "\\n")  # one write, so no line is incomplete
    generations.enter(generation)
    return generation.number

def all_in(number):
    marks = generations.marks().values()
    return len([x for x in marks if x.generation >= number]) == count

def snapshot(*steps):
    # write snapshots on a server; return when all servers have the last snapshot
    if kind.lower() == "pserver":
        for step in steps:
            generations.note_snapshot(generations.current().number, step)
    wait(lambda: generations.newest_snapshot([f"pserver {{k}}" for k in range(len(servers))]) == steps[-1])

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def lose(role):
    # this role is killed when all roles take part in the first generation
    if name == role:
        wait(lambda: all_in(0))
        die()

def finish(number):
    # wait until all roles have entered the generation, and end this role
    wait(lambda: all_in(number))
    ended = ended_roles(number)  # none that started again is among them
    assert all(generations.marks()[role].left for role in ended), ended
    generations.leave()

"""


# This script imports dtrans. For each argument, a list of servers, it prints its role's variables.
ROLE_OF_PROCESS = """
import json, os, sys
from dtrans.run.distributed.role import Role
found = []
for servers in sys.argv[1:]:
    if servers:
        os.environ["DTRANS_PSERVERS"] = servers
    found.append(Role.from_env().environment())
print(json.dumps(found), flush=True)
"""


def came(listener: socket.socket) -> tuple[str, socket.socket]:
    """Return the next role that reports, and its connection."""
    connection, _ = listener.accept()
    connection.settimeout(PATIENCE)
    return connection.makefile().readline().strip(), connection


def assert_gone(*connections: socket.socket) -> None:
    for connection in connections:
        try:
            while connection.recv(100):  # raises TimeoutError if the role has not ended
                continue
        except ConnectionResetError:  # a role that was killed with unread input
            continue
        finally:
            connection.close()


def script_writer(folder: Path, prelude: str) -> Callable[[str], list[str]]:
    """Return a function that writes a script, and returns its command.

    Args:
      folder: the folder of the script.
      prelude: the first lines of each script.
    """

    def write(body: str) -> list[str]:
        path = folder / "script.py"
        path.write_text(prelude + textwrap.dedent(body))
        return [sys.executable, str(path)]

    return write
