"""The arithmetic and the options of `benchmarks/hosts.py`; no host is created."""

from __future__ import annotations

import types
from typing import Any

import hosts
import pytest
import typer
from windows import Window


def result(setup: hosts.Setup, **seconds: list[float]) -> hosts.Result:
    """Return a result with a bound of one second; each job has one window for each number."""
    window = lambda x: Window([x], [0.5], 0.1, 0.6, sent=210.0)
    windows = {kind: [*map(window, found)] for kind, found in seconds.items()}
    costs: Any = types.SimpleNamespace(link_seconds=1.0, link_bytes=100)
    return hosts.Result(setup, "1gbit", (100.0, 100.0), costs, 200, windows, 2.5)


def rows(found: hosts.Result) -> dict[str, list[str]]:
    lines = [line.split() for line in str(found).splitlines()[2 : 2 + len(found.windows)]]
    return {line[0]: line[1:] for line in lines}


@pytest.mark.parametrize(
    ("compute", "gradients", "expected"),
    [("none", 0.0, "1.25"), ("sleep", 0.5, "1.25"), ("sleep", 1.25, "1.00"), ("run", 2.5, "0.50")],
)
def test_a_step_is_compared_with_the_larger_of_compute_and_bound(
    compute: str, gradients: float, expected: str
) -> None:
    setup = hosts.Setup("25M", 4, 4, compute, "disabled", gradients)
    found = result(setup, dtrans=[1.25, 1.25, 3.0], sockets=[1.0, 1.0, 1.0])
    assert rows(found)["dtrans"][:5] == ["1.250", "80%", expected, "0.00", "+5.0%"]


def test_a_ring_is_a_third_job_with_a_ratio() -> None:
    setup = hosts.Setup("25M", 4, 4, "none", "disabled")
    assert setup.jobs == ["dtrans", "sockets"]
    setup = hosts.Setup("25M", 4, 4, "none", "disabled", ring=True)
    assert setup.jobs == ["dtrans", "sockets", "gloo"]
    found = result(setup, dtrans=[1.0, 2.0, 1.0], sockets=[2.0, 2.0, 2.0], gloo=[1.5, 3.0, 2.0])
    assert "dtrans / sockets: 0.50, dtrans / gloo: 0.67; medians of 3 pairs" in str(found)
    assert [*rows(found)] == setup.jobs


def test_compute_is_a_word_or_a_number_of_seconds() -> None:
    assert hosts.compute_of("run") == ("run", 0.0)
    assert hosts.compute_of("0.25") == ("sleep", 0.25)
    for text in ("0", "-1", "nan", "inf", "slep"):
        with pytest.raises(typer.BadParameter, match="a number of seconds above 0"):
            hosts.compute_of(text)
