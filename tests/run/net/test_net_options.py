"""Options of connections: the user's argument has precedence over the environment."""

from __future__ import annotations

import pytest

import dtrans
from dtrans.errors import ConfigError
from dtrans.run.net.net_options import allows_remote


@pytest.mark.parametrize(
    ("given", "variable", "found"),
    [
        (None, None, False),
        (None, "", False),
        (None, "0", False),
        (None, "1", True),
        (False, "1", False),
        (True, None, True),
        (True, "0", True),
    ],
)
def test_other_hosts_are_allowed_by_word_or_by_the_launcher(
    monkeypatch: pytest.MonkeyPatch, given: bool | None, variable: str | None, found: bool
) -> None:
    monkeypatch.delenv("DTRANS_ALLOW_REMOTE", raising=False)
    if variable is not None:
        monkeypatch.setenv("DTRANS_ALLOW_REMOTE", variable)
    assert allows_remote(given) is found


def test_other_words_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRANS_ALLOW_REMOTE", "yes")
    with pytest.raises(
        ConfigError, match="^DTRANS_ALLOW_REMOTE must be '1', '0' or '', it is 'yes'$"
    ):
        dtrans.Executor()
    with pytest.raises(
        ConfigError, match="^DTRANS_ALLOW_REMOTE must be '1', '0' or '', it is 'yes'$"
    ):
        dtrans.connect()
    with pytest.raises(
        ConfigError, match="^allow_remote must be True, False or None, it is 'yes'$"
    ):
        dtrans.Executor(allow_remote="yes")  # type: ignore[arg-type]
