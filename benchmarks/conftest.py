"""Fixtures of all benchmarks: four virtual CPU devices, and ratios of times.

The speed of a machine changes during a run. So `ratio` times two functions in turn, A B A B ...,
and returns the median of A/B. pytest prints all ratios after pytest-benchmark's table.

Without `--benchmark-enable`, the benchmarks are a smoke test (`make bench-smoke`): each runs for
one round, with its smallest size, and no ratios are printed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest


jax.config.update("jax_num_cpu_devices", 4)

# parametrized arguments that are sizes; their values are listed from small to large
SIZES = {
    "delay",
    "devices",
    "drawn",
    "leaves",
    "model",
    "parameters",
    "rows",
    "trainers",
}
# names of constants that give the number of timed repetitions in a module
ROUNDS = (
    "ROUNDS",
    "STEPS",
    "WARM",
    "WINDOWS",
)

_ratios: list[tuple[str, float, float, float]] = []
_rates: list[tuple[str, float, float, float]] = []


def _is_smoke(config: pytest.Config) -> bool:
    # pyproject.toml passes --benchmark-disable, and `make bench` adds --benchmark-enable
    return bool(config.getoption("benchmark_disable")) and not config.getoption("benchmark_enable")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a smoke test, keep only the smallest size of each benchmark."""
    if not _is_smoke(config):
        return
    smallest: dict[Any, dict[str, Any]] = {}
    kept, left_out = [], []
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        sizes = {n: x for n, x in given.items() if n in SIZES}
        first = smallest.setdefault((item.path, item.originalname), sizes)
        (kept if sizes == first else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


@pytest.fixture(autouse=True)
def one_round(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a smoke test, set the constants `ROUNDS` of the module to 1."""
    for name in ROUNDS if _is_smoke(request.config) else ():
        if hasattr(request.module, name):
            monkeypatch.setattr(request.module, name, 1)


@pytest.fixture
def ratio(request: pytest.FixtureRequest) -> Callable[..., float]:
    """`ratio(name, ours, theirs, pairs=15)`: time two functions, and return the median ratio.

    The ratio of a pair of calls is the seconds of `ours`, divided by the seconds of `theirs`.
    """

    def measure(
        name: str, ours: Callable[[], Any], theirs: Callable[[], Any], pairs: int = 15
    ) -> float:
        def seconds(fn: Callable[[], Any]) -> float:
            start = time.perf_counter()
            jax.block_until_ready(fn())
            return time.perf_counter() - start

        pairs = 1 if _is_smoke(request.config) else pairs
        seconds(ours), seconds(theirs)
        times = [(seconds(ours), seconds(theirs)) for _ in range(pairs)]
        median = statistics.median(a / b for a, b in times)
        a, b = (statistics.median(t) for t in zip(*times, strict=True))
        _ratios.append((name, median, a, b))
        return median

    return measure


@pytest.fixture
def report() -> Callable[[str, float, float, float], None]:
    """`report(name, ratio, ours, theirs)`: print a given ratio at the end, with two rates per second."""
    return lambda *row: _rates.append(row)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> Iterator[None]:
    yield
    if _is_smoke(config):
        return
    if _ratios:
        terminalreporter.write_sep("-", "ratios: median over pairs, and the two medians in ms")
        for name, median, a, b in _ratios:
            terminalreporter.write_line(
                f"{name:<62} {median:6.2f}  {a * 1e3:10.3f} / {b * 1e3:.3f}"
            )
    if _rates:
        terminalreporter.write_sep(
            "-", "ratios of rates: median over pairs, and the two medians per second"
        )
        for name, median, a, b in _rates:
            terminalreporter.write_line(f"{name:<62} {median:6.2f}  {a:10.0f} / {b:.0f}")
