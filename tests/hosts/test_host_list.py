"""Lists of hosts, as users write them: in a file, or in short form."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrans.errors import ConfigError
from dtrans.hosts.host_list import HostEntry, read_hosts


def test_a_file_of_hosts(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(
        "# ours\ngpu1\n\n  alice@gpu2 slots=2 # two\ngpu3 python=/a/python address=10.0.0.7\n"
    )
    assert read_hosts(str(path)) == (
        HostEntry("gpu1"),
        HostEntry("alice@gpu2", slots=2),
        HostEntry("gpu3", address="10.0.0.7", python="/a/python"),
    )


def test_a_list_of_hosts() -> None:
    assert read_hosts("a:2, b") == (HostEntry("a", slots=2), HostEntry("b"))


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "gpu1 slot=2",
            r"hosts:1 has 'slot'; the fields are slots, address, python: write a line such as",
        ),
        ("gpu1\ngpu2 slots", r"hosts:2 has 'slots'; the fields"),
        ("gpu1 slots=1 slots=2", r"hosts:1 has a field twice"),
        ("gpu1 slots=two", r"hosts:1 has 'two' as the number of slots"),
        ("gpu1 slots=0", r"host gpu1 has slots=0; write 1 or more"),
        ("-oProxyCommand=x", r"'-oProxyCommand=x' is not the name of a host"),
        (
            "gpu1 address=0.0.0.0",
            r"host gpu1 has address=0.0.0.0, to which other hosts cannot connect",
        ),
        ("gpu1\ngpu1", r"host gpu1 is listed 2 times; write it once"),
        ("# nobody", r"hosts contains no hosts"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_hosts(path)


@pytest.mark.parametrize(
    "text, message",
    [
        ("a:x", "--hosts a:x has the number of slots 'x'; expected a number"),
        ("a:2,,b", "'' is not the name of a host"),
        ("no/such/file", "the file of hosts no/such/file does not exist"),
        ("gpu1:2,-x", "'-x' is not the name of a host"),
    ],
)
def test_a_list_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_hosts(text)
