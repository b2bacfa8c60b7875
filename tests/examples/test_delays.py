"""The statements of docs/delays.md, with a part of its examples.

`StepOrder` fixes the age of gradients without a clock.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from paths import ROOT


@pytest.fixture(scope="module")
def delays() -> Iterator[Any]:
    """Return the benchmark, which compiles programs once for all roles."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        module = importlib.import_module("delays")
    with module.compiled_once():
        yield module


def test_a_delay_is_the_updates_by_others_since_a_trainer_last_stepped(delays: Any) -> None:
    assert delays.Delay("", 3).order(7) == [0, 1, 2, 0, 1, 2, 0]
    assert delays.Delay("", 3).of_gradients(7) == [0, 1, 2, 2, 2, 2, 2]
    slow = delays.Delay("", 3, slow=4)
    assert slow.order(12) == [0, 1, 0, 2, 1, 0, 1, 2, 0, 1, 0, 2]
    assert slow.of_gradients(12)[7::4] == [3, 3]


@pytest.mark.soak
def test_asynchronous_training_and_geo_sgd_end_within_the_spread_of_synchronous_seeds(
    delays: Any,
) -> None:
    sync = delays.train(delays.SYNC, delays.IN_TURN, updates=240)
    for delay, mode in itertools.product(
        (delays.IN_TURN, delays.ONE_SLOW), (delays.ASYNC, delays.OFTEN)
    ):
        run = delays.train(mode, delay, updates=240)
        assert delays.within(run, sync), (delay.name, mode.name, run.loss, sync.loss)


def test_geo_sgd_that_waits_gives_the_same_twice(delays: Any) -> None:
    one, other = (delays.train(delays.SELDOM, delays.ONE_SLOW, updates=120) for _ in range(2))
    np.testing.assert_array_equal(one.loss, other.loss)
    np.testing.assert_array_equal(one.curve, other.curve)


@pytest.mark.soak
def test_compensation_is_better_under_heavy_delay(delays: Any) -> None:
    """Plain gradients diverge from a loss of 2.3.

    Compensated gradients of the same examples do not.
    """
    plain = delays.train(delays.ASYNC, delays.HEAVY, updates=480)
    assert np.all(plain.loss > 5)
    for mode in (delays.CONSTANT.strong(16.0), delays.ADAPTIVE.strong(2.0)):
        run = delays.train(mode, delays.HEAVY, updates=480)
        assert np.all(run.loss < 2.3) and np.all(run.loss < plain.loss / 3), (
            mode.name,
            run.loss,
            plain.loss,
        )


def test_the_page_has_every_mode_and_every_delay(delays: Any) -> None:
    text = (ROOT / "docs" / "delays.md").read_text()
    assert not [
        m.name
        for m in (delays.ONE_DEVICE, delays.SYNC, *delays.MODES)
        if f"| {m.name} |" not in text
    ]
    assert not [d.name for d in delays.DELAYS if f"**{d.name}: delay" not in text]
    rows = [
        f"| {rate} | {d.name} |" for rate in delays.RATES for d in (delays.IN_TURN, delays.ONE_SLOW)
    ]
    assert not [row for row in rows if row not in text]
