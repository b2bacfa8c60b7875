"""Layers and samples of tests, as `tests/support/layers.py` computes them."""

from __future__ import annotations

from typing import Any

import jax
import layers
import pytest


def compiled(x: Any) -> Any:
    return jax.jit(lambda x: x + 1)(x)


def by_default(x: Any, run: Any = compiled) -> Any:
    return run(x)


def by_keyword(x: Any, *, run: Any = compiled) -> Any:
    return run(x)


def planned(fn: Any) -> Any:
    return fn.trace


def plain(x: Any) -> Any:
    return x + 1


@pytest.mark.parametrize(
    "function, layer",
    [
        (plain, "unit"),
        (planned, "plan"),
        (compiled, "job"),
        (by_default, "job"),
        (by_keyword, "job"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_layer_follows_from_names_and_default_arguments(function: Any, layer: str) -> None:
    assert layers.LAYERS[layers._function_layer(function)] == layer


@pytest.mark.parametrize("count", [1, 2, 3])
def test_successive_turns_sample_every_case(count: int) -> None:
    cases = [*range(7)]
    turns = [layers.sample(cases, count, "a test", turn) for turn in range(7)]
    assert all(len(chosen) == count for chosen in turns)
    assert {case for chosen in turns for case in chosen} == set(cases)


def test_each_test_runs_once_in_so_many_days(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for day in range(1, 7):
        monkeypatch.setenv("SAMPLE_DATE", f"2026-12-0{day}")
        found += layers.of_today([*range(20)], 6, "a file")
    assert sorted(found) == [*range(20)]
