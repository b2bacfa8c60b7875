"""The job's token, from an environment variable or from a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrans.errors import ConfigError
from dtrans.protocol.token import check_strong, hkdf, job_token, new_token


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
        (b" \n", "which is an empty file; write the job's token into it"),
    ],
)
def test_a_file_without_a_token_is_named(tmp_path: Path, content: bytes | None, why: str) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        job_token({"DTRANS_TOKEN_FILE": str(path)})
    assert str(caught.value) == f"DTRANS_TOKEN_FILE is {str(path)!r}, {why}"


@pytest.mark.parametrize(
    ("secret", "salt", "purpose", "length", "want"),
    [
        (
            "0b" * 22,
            "000102030405060708090a0b0c",
            "f0f1f2f3f4f5f6f7f8f9",
            42,
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
        ),
        (
            "0b" * 22,
            "",
            "",
            42,
            "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
        ),
    ],
)
def test_keys_are_derived_as_rfc_5869_says(
    secret: str, salt: str, purpose: str, length: int, want: str
) -> None:
    given = (bytes.fromhex(x) for x in (secret, salt, purpose))
    assert hkdf(*given, length).hex() == want


@pytest.mark.parametrize(
    ("token", "words"),
    [
        ("0123456789abcdefABCDEF0123456789", None),
        ("a token that is new", None),
        ("Zm9vYmFyYmF6cXV4Zm9vYg", None),
        (
            "0" * 31,
            "DTRANS_TOKEN has 31 hexadecimal digits; expected at least 32, which contain 128 "
            "random bits. Use the output of",
        ),
        (
            "Zm9vYmFyYmF6cXV4Zm9vY",
            "DTRANS_TOKEN has 21 characters; expected at least 22, which contain 128 random bits. "
            "Use the output of",
        ),
    ],
)
def test_a_token_that_can_be_guessed_is_refused(token: str, words: str | None) -> None:
    if words is None:
        # draw the token in the test: as a parameter it would differ between workers, which must
        # collect equal tests
        check_strong(new_token() if token == "a token that is new" else token, "here")
        return
    with pytest.raises(ConfigError, match=f"^here, and {words} `dtrans keygen --token`$"):
        check_strong(token, "here")
