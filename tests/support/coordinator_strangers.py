"""Helpers for tests of access to JAX's coordinator: connections from outside the job, listening
addresses, and certificates."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
from pathlib import Path


# first bytes of an HTTP/2 client, which gRPC expects: the preface, and an empty SETTINGS frame
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
SETTINGS = 4
KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def listening() -> set[str]:
    """Return the hosts at which this process listens."""
    found = set()
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            own = socket.socket(fileno=os.dup(fd))
        except OSError:  # the descriptor is no socket, or belongs to `listdir`
            continue
        with own:
            if own.family in (socket.AF_INET, socket.AF_INET6) and own.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            ):
                found.add(str(own.getsockname()[0]).removeprefix("::ffff:"))
    return found


def greets(host: str, port: int, shown: ssl.SSLContext | None = None) -> bool:
    """Return True if a gRPC server answers a connection.

    Args:
      host, port: address of the server.
      shown: the certificates with which to connect; None to connect without TLS.
    """
    try:
        with socket.create_connection((host, port), 20.0) as plain:
            line = shown.wrap_socket(plain, server_hostname=host) if shown else plain
            line.sendall(PREFACE)
            answer = line.recv(9)
    except OSError:  # also covers ssl.SSLError
        return False
    return len(answer) > 3 and answer[3] == SETTINGS


def context(folder: Path, *, own: bool) -> ssl.SSLContext:
    """Return the TLS context of a client, with the job's certificate or without a certificate."""
    made = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    made.set_alpn_protocols(["h2"])
    made.verify_flags &= ~ssl.VERIFY_X509_STRICT  # openssl's default CA fails the strict check
    if own:
        made.load_cert_chain(folder / "own.pem", folder / "own.key")
    return made


def make_certificates(folder: Path, host: str) -> None:
    """Write `ca.pem`, and `own.pem` with `own.key` for processes at one address."""
    (folder / "names").write_text(f"subjectAltName=IP:{host}\n")
    authority = (
        "req",
        "-x509",
        *KEY,
        "-keyout",
        "ca.key",
        "-out",
        "ca.pem",
        "-subj",
        "/CN=authority",
        "-days",
        "2",
    )
    request = ("req", *KEY, "-keyout", "own.key", "-out", "own.csr", "-subj", "/CN=trainer")
    sign = (
        "x509",
        "-req",
        "-in",
        "own.csr",
        "-CA",
        "ca.pem",
        "-CAkey",
        "ca.key",
        "-CAcreateserial",
        "-days",
        "2",
    )
    for command in (authority, request, (*sign, "-extfile", "names", "-out", "own.pem")):
        subprocess.run(["openssl", *command], cwd=folder, check=True, capture_output=True)
