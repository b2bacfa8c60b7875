"""What all benchmarks share: CPU devices to stand for a mesh, and ratios measured in pairs.

Machines drift, so a figure alone says little. `ratio` times two things in turn, A B A B ..., and keeps the
median of A/B; the ratios are listed after the table.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import pytest


jax.config.update("jax_num_cpu_devices", 4)

_ratios: list[tuple[str, float, float, float]] = []
_rates: list[tuple[str, float, float, float]] = []


@pytest.fixture
def ratio() -> Callable[..., float]:
    """`ratio(name, ours, theirs, pairs=15)`: the median of the time of `ours` over that of `theirs`."""

    def measure(name: str, ours: Callable[[], Any], theirs: Callable[[], Any], pairs: int = 15) -> float:
        def seconds(fn: Callable[[], Any]) -> float:
            start = time.perf_counter()
            jax.block_until_ready(fn())
            return time.perf_counter() - start

        seconds(ours), seconds(theirs)
        times = [(seconds(ours), seconds(theirs)) for _ in range(pairs)]
        median = statistics.median(a / b for a, b in times)
        a, b = (statistics.median(t) for t in zip(*times, strict=True))
        _ratios.append((name, median, a, b))
        return median

    return measure


@pytest.fixture
def report() -> Callable[[str, float, float, float], None]:
    """`report(name, ratio, ours, theirs)`: list a ratio that was measured otherwise, with two rates per second."""
    return lambda *row: _rates.append(row)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _ratios:
        terminalreporter.write_sep("-", "ratios: median over pairs, and the two medians in ms")
        for name, median, a, b in _ratios:
            terminalreporter.write_line(f"{name:<62} {median:6.2f}  {a * 1e3:10.3f} / {b * 1e3:.3f}")
    if _rates:
        terminalreporter.write_sep("-", "ratios of rates: median over pairs, and the two medians per second")
        for name, median, a, b in _rates:
            terminalreporter.write_line(f"{name:<62} {median:6.2f}  {a:10.0f} / {b:.0f}")
