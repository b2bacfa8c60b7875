"""Fixtures of jobs on several hosts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from role_scripts import PATIENCE, PRELUDE, script_writer


@pytest.fixture
def script(tmp_path: Path) -> Any:
    return script_writer(tmp_path, PRELUDE)


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.settimeout(PATIENCE)
        monkeypatch.setenv("TEST_PORT", str(made.getsockname()[1]))
        yield made
