"""A process removes folders of killed processes, but no folders of living processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from paths import ROOT

from dtrans.run.net.temp_dir import TempDir


HOLDS = """
import sys, threading
from dtrans.run.net.temp_dir import TempDir
folder = TempDir()
(folder.path / "socket").write_text("")
print(folder.path, flush=True)
threading.Event().wait()
"""


def test_what_a_kill_leaves_is_swept_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    other = tmp_path / "dtrans-of-something-else"
    other.mkdir()
    environment = {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", HOLDS]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        one = TempDir()
        assert theirs.is_dir() and theirs.parent == tmp_path, "it is alive"
        process.send_signal(signal.SIGKILL)
    assert theirs.is_dir()
    two = TempDir()
    assert not theirs.exists() and one.path.is_dir() and other.is_dir()
    two.close()
    one.close()
    assert [*tmp_path.iterdir()] == [other]
