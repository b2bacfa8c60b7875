"""Scripts of roles that do not import dtrans, and so start in milliseconds; how a test sees that
they have ended."""

from __future__ import annotations

import socket
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path


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


# this one does import dtrans, and prints the variables of its role in each mode that is an argument
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
            while connection.recv(100):  # a timeout is the failure
                continue
        except ConnectionResetError:  # killed with unread input: gone as well
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
