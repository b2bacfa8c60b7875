"""SSH server for one test, on a port that the system chooses, with new keys."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from role_threads import free_endpoints

from dtrans.endpoints import split_endpoint


# sshd asks for this folder, which Debian makes when it starts a server
SEPARATION = Path("/run/sshd")
PATIENCE = 30.0


def why_not() -> str:
    """Return the reason why no server can be started here; empty if one can be started."""
    missing = [program for program in ("ssh", "ssh-keygen") if shutil.which(program) is None]
    if missing or sshd() is None:
        return f"there is no {missing[0] if missing else 'sshd'} (Debian: openssh-server)"
    return "" if os.geteuid() == 0 else "sshd needs root"


def sshd() -> str | None:
    """Return the absolute path of sshd, which sshd needs to start."""
    return shutil.which("sshd", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"]))


@contextlib.contextmanager
def own_sshd(folder: Path, host: str = "127.0.0.1", wrap: Sequence[str] = ()) -> Iterator[str]:
    """Run a server, and yield the command that reaches it, as an argument of `--rsh`.

    The server knows the key `user`, and not the key `stranger`.

    Args:
      folder: folder for the keys and the log.
      host: the address that the server binds.
      wrap: prefix of the server's command, such as `ip netns exec NAME`.
    """
    folder.mkdir(exist_ok=True)
    for key in ("host", "user", "stranger"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True
        )
    _, port = split_endpoint(free_endpoints(1)[0])
    public = (folder / "host.pub").read_text().split()[:2]
    (folder / "known_hosts").write_text(f"[{host}]:{port} {' '.join(public)}\n")
    (folder / "config").write_text(
        f"ListenAddress {host}:{port}\nHostKey {folder}/host\nAuthorizedKeysFile "
        f"{folder}/user.pub\nPidFile none\n"
        "StrictModes no\nUsePAM no\nPermitRootLogin prohibit-password\nPasswordAuthentication no\n"
        "KbdInteractiveAuthentication no\n"
    )
    # The folder is never removed: servers of other tests, in other processes, need it for each
    # connection.
    SEPARATION.mkdir(exist_ok=True)
    server = subprocess.Popen(
        [*wrap, sshd() or "sshd", "-D", "-e", "-f", folder / "config"],
        stderr=subprocess.PIPE,
        text=True,
    )
    with server:
        assert server.stderr is not None
        said = [server.stderr.readline()]
        assert "Server listening" in said[0], said
        try:
            yield (
                f"ssh -F none -p {port} -i {folder}/user -o IdentitiesOnly=yes -o "
                "StrictHostKeyChecking=yes "
                f"-o UserKnownHostsFile={folder}/known_hosts"
            )
        finally:
            server.kill()
