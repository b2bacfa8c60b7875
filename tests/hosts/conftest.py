"""Fixtures of jobs on several hosts."""

from __future__ import annotations

import socket
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from role_scripts import PATIENCE, PRELUDE


@pytest.fixture
def script(tmp_path: Path) -> Any:
    def write(body: str) -> list[str]:
        path = tmp_path / "script.py"
        path.write_text(PRELUDE + textwrap.dedent(body))
        return [sys.executable, str(path)]

    return write


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.settimeout(PATIENCE)
        monkeypatch.setenv("TEST_PORT", str(made.getsockname()[1]))
        yield made
