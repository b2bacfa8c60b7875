"""A token for jobs on loopback, if the environment requires encryption of all connections."""

from __future__ import annotations

import pytest

from dtrans.protocol import token
from dtrans.run.net.net_options import choose_encryption


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a token, so that these tests also run with DTRANS_TRANSPORT_ENCRYPTION=required."""
    if choose_encryption(None) == "required" and not token.job_token():
        monkeypatch.setenv("DTRANS_TOKEN", token.new_token())
