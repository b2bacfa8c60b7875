"""The job's token: from the environment, or from a file that it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrans.errors import ConfigError
from dtrans.protocol.token import job_token


def test_a_token_is_in_the_environment_or_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("of the file\n")
    assert job_token({}) == ""
    assert job_token({"DTRANS_TOKEN_FILE": str(path)}) == "of the file"
    assert job_token({"DTRANS_TOKEN": "", "DTRANS_TOKEN_FILE": str(path)}) == "of the file"
    assert job_token({"DTRANS_TOKEN": " said ", "DTRANS_TOKEN_FILE": str(path)}) == "said"
    path.unlink()
    assert job_token({"DTRANS_TOKEN": "said", "DTRANS_TOKEN_FILE": str(path)}) == "said"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "which cannot be read: No such file or directory"),
        (b"\xff\xfe", "which cannot be read: it is not text"),
        (b" \n", "and this file is empty; write the job's token into it"),
    ],
)
def test_a_file_without_a_token_is_named(tmp_path: Path, content: bytes | None, why: str) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        job_token({"DTRANS_TOKEN_FILE": str(path)})
    assert str(caught.value) == f"DTRANS_TOKEN_FILE is {str(path)!r}, {why}"
