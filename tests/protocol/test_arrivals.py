"""Values of a pipeline arrive in any order and in any pieces. Unexpected values are refused."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from dtrans.errors import WireError
from dtrans.protocol import wire
from dtrans.protocol.collective.arrivals import Arrivals, ValueType


@pytest.fixture
def dropped() -> list[str]:
    return []


@pytest.fixture
def arrivals(dropped: list[str]) -> Arrivals:
    return Arrivals(lambda origin, e: dropped.append(f"{origin}: {e}"))


def kind(x: np.ndarray) -> ValueType:
    return ValueType(x.shape, x.dtype)


def messages(origin: int, step: int, key: int, x: np.ndarray, **fields: Any) -> list[wire.Message]:
    head = {
        "process": origin,
        "step": step,
        "key": key,
        "dtype": x.dtype.name,
        "shape": [*x.shape],
        "impl": "",
    } | fields
    found = []
    for pieces, frames in wire.messages([("value", x)]):
        found.append(
            wire.parse([wire.header("value", **head, pieces=pieces), *(bytes(f) for f in frames)])
        )
    return found


@pytest.mark.parametrize("seed", range(20))
def test_values_come_in_any_order(arrivals: Arrivals, dropped: list[str], seed: int) -> None:
    """Two senders' messages are mixed.

    Values are expected before or after they arrive, and may be 0-d or empty.
    """
    rng, shapes = random.Random(seed), [(), (0, 3), (1,), (700, 3), (2**20 + 1, 2)]
    values = {
        (origin, step, key): np.full(shape, origin * 100 + step * 10 + key, np.float32)
        for origin in (1, 2)
        for step in (1, 2)
        for key, shape in enumerate(shapes)
    }
    lines = {
        o: [m for name, x in values.items() if name[0] == o for m in messages(*name, x)]
        for o in (1, 2)
    }
    wanted = sorted(values, key=lambda name: (name[1], rng.random()))  # step by step
    for name in wanted:
        arrivals.expect(name, kind(values[name]))
        while not arrivals.is_complete(name):
            origin = rng.choice([o for o in lines if lines[o]])
            arrivals.hear(origin, lines[origin].pop(0))
        np.testing.assert_array_equal(arrivals.take(name), values[name])
    assert (dropped, arrivals.waiting) == ([], 0)


def test_a_claim_makes_no_memory(arrivals: Arrivals, dropped: list[str]) -> None:
    x = np.zeros(4, np.float32)
    for key in range(1000):
        (message,) = messages(1, 1, key, x, shape=[2**38])
        arrivals.hear(1, message)
    assert (arrivals._partial, dropped) == ({}, [])
    arrivals.expect((1, 1, 3), kind(x))
    assert dropped == ["1: a value of type 'float32'[274877906944], expected float32[4]"]
    (message,) = messages(1, 1, 3, x)
    arrivals.hear(1, message)
    assert arrivals.is_complete((1, 1, 3))


OTHER = [
    {"dtype": "int32"},
    {"shape": [4, 1]},
    {"shape": [5]},
    {"shape": [-4]},
    {"shape": [True]},
    {"shape": ["4"]},
    {"impl": "threefry2x32"},
    {"process": 2},
    {"step": 0},
    {"key": -1},
    {"key": 1 << 20},
    {"key": 0},  # the value was already taken
]


@pytest.mark.parametrize("before", [False, True], ids=["expected", "not yet"])
@pytest.mark.parametrize("other", OTHER, ids=str)
def test_what_is_not_expected_is_dropped(
    arrivals: Arrivals, dropped: list[str], other: dict[str, Any], before: bool
) -> None:
    x = np.arange(4, dtype=np.float32)
    arrivals.expect((1, 1, 0), kind(x))
    arrivals.hear(1, *messages(1, 1, 0, x))
    arrivals.take((1, 1, 0))
    if before:
        arrivals.hear(1, *messages(**{"origin": 1, "step": 1, "key": 7, "x": x, **other}))
    arrivals.expect((1, 1, 7), kind(x))
    if not before:
        arrivals.hear(1, *messages(**{"origin": 1, "step": 1, "key": 7, "x": x, **other}))
    assert len(dropped) == 1
    arrivals.hear(1, *messages(1, 1, 7, x))
    np.testing.assert_array_equal(arrivals.take((1, 1, 7)), x)


def test_a_shape_that_the_sender_says_stays_what_it_said(
    arrivals: Arrivals, dropped: list[str]
) -> None:
    rows = wire.MESSAGE_BYTES // 4  # two full messages, and a rest
    x = np.ones((rows + 1, 2), np.float32)
    first, second, third = messages(1, 1, 0, x)
    arrivals.expect((1, 1, 0), ValueType((None, None), x.dtype))
    arrivals.hear(1, first)
    arrivals.hear(1, wire.Message(second.op, second.fields | {"shape": [rows, 2]}, second.frames))
    assert len(dropped) == 1 and "but an earlier message of the same value says" in dropped[0]
    arrivals.hear(
        1, wire.Message(second.op, second.fields | {"shape": [2**60, 2**60]}, second.frames)
    )
    arrivals.hear(1, *messages(1, 1, 1, np.ones((1, 2), np.float32), shape=[2**60, 2**60]))
    arrivals.expect((1, 1, 1), ValueType((None, None), x.dtype))
    assert "which is too large" in dropped[-1]
    for message in (second, third):
        arrivals.hear(1, message)
    np.testing.assert_array_equal(arrivals.take((1, 1, 0)), x)


def test_other_messages_are_dropped(arrivals: Arrivals) -> None:
    refused: list[WireError] = []
    Arrivals(lambda _, e: refused.append(e)).hear(
        1, wire.parse([wire.header("abort", reason="I say so")])
    )
    assert str(refused[0]) == "process 1 sent a `abort` message, expected `value`"
