"""Clicks with known probabilities: the data, and the model compared with one device."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from dtrans.errors import ConfigError
from examples import clicks
from examples.__main__ import app
from examples.click_job import single_device
from examples.clicks import PAIRS, ROWS, TABLES, ClickSettings, auc, batch, logits, vectors


SMALL = ClickSettings(steps=4, batch_size=64)


def test_features_follow_a_power_law() -> None:
    ids, _ = batch(ClickSettings(rows=10_000_000, batch_size=200_000), 0)
    assert ids.shape == (200_000, TABLES) and ids.dtype == np.int32
    assert ids[:, 0].max() >= 9_000_000 and ids[:, 1:].max() == ROWS - 1 and ids.min() == 0
    counts = np.sort(np.bincount(ids[:, 5], minlength=ROWS))[::-1]
    ranks = np.arange(1, ROWS + 1)
    slope, _ = np.polyfit(np.log(ranks[20:1000] + 0.5), np.log(counts[20:1000]), 1)
    assert abs(slope + 1.05) < 0.03
    assert np.argsort(-np.bincount(ids[:, 5]))[:2].tolist() != [0, 1]  # the ids do not show it


def test_hidden_vectors_are_normal_and_those_of_their_numbers() -> None:
    found = vectors(0, 3, np.arange(100_000))
    assert (
        np.abs(found.mean(0)).max() < 0.02
        and np.abs(np.cov(found.T) / clicks.SPREAD**2 - np.eye(4)).max() < 0.02
    )
    np.testing.assert_array_equal(
        vectors(0, 3, np.array([[7], [99_999]]))[:, 0], found[[7, 99_999]]
    )
    for other in (
        vectors(0, 4, np.arange(100_000)),
        vectors(1, 3, np.arange(100_000)),
        np.roll(found, 1, 0),
    ):
        assert abs(np.corrcoef(other[:, 0], found[:, 0])[0, 1]) < 0.02


def test_clicks_are_drawn_by_the_logits() -> None:
    """Among impressions with nearly equal probability, the share of clicks equals the
    probability."""
    ids, clicked = clicks.test_set(SMALL)
    chance = 1 / (1 + np.exp(-logits(0, ids)))
    for low in np.arange(0, 1, 0.1):
        among = (chance >= low) & (chance < low + 0.1)
        assert abs(clicked[among].mean() - chance[among].mean()) < 4 * 0.5 / np.sqrt(among.sum())
    alone = sum((vectors(0, a, ids[:, a]) * vectors(0, b, ids[:, b])).sum(1) for a, b in PAIRS)
    np.testing.assert_allclose(logits(0, ids), alone + clicks.BIAS, rtol=1e-9)
    assert 0 not in (members := [t for pair in PAIRS for t in pair]) and len(set(members)) == len(
        members
    )


def test_batches_are_those_of_seed_and_step() -> None:
    (ids, clicked), again = batch(SMALL, 3), batch(ClickSettings.parse(SMALL.arguments()), 3)
    np.testing.assert_array_equal(again[0], ids)
    np.testing.assert_array_equal(again[1], clicked)
    for other in (
        batch(SMALL, 4),
        batch(ClickSettings(seed=1, batch_size=64), 3),
        clicks.test_set(SMALL),
    ):
        assert not np.array_equal(other[0][:64], ids)
    with pytest.raises(ConfigError, match="rows.*2500 or more"):
        ClickSettings(rows=ROWS - 1)


def test_the_area_is_how_often_a_click_is_scored_higher() -> None:
    rng = np.random.default_rng(0)
    scores, clicked = rng.integers(0, 9, 200), rng.integers(0, 2, 200)
    ones, others = scores[clicked == 1][:, None], scores[clicked == 0][None]
    assert auc(scores, clicked) == pytest.approx(np.mean((ones > others) + (ones == others) / 2))


def test_one_device_with_the_rows_that_are_looked_up_is_one_device() -> None:
    import jax

    step, init = clicks.training(SMALL)
    params, opt_state = init(jax.random.key(0))
    wanted = []
    for i in range(SMALL.steps):
        params, opt_state, loss = jax.jit(step)(params, opt_state, *batch(SMALL, i))
        wanted.append(float(loss) / SMALL.batch_size)
    np.testing.assert_allclose(single_device(SMALL), wanted, rtol=1e-6)


@pytest.mark.skipif(sys.platform != "linux", reason="reads memory from /proc")
def test_a_few_steps_in_processes_are_those_of_one_device() -> None:
    """After so few steps the model has learned little, so the command exits with 1."""
    made = train("--steps", "8", "--batch-size", "64")
    assert made.exit_code == 1 and "less than 98% of what can be learnt" in made.output
    assert (
        "losses against one device on the same 8 batches" in made.output
        and "above the bound" not in made.output
    )
    assert "more than 700 MB" not in made.output and "1024 MiB of data" in made.output


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_what_can_be_learnt_is_learnt_with_a_table_that_no_trainer_could_hold() -> None:
    made = train("--rows", "10000000", "--deadline", "200")
    assert made.exit_code == 0, made.output


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--batch-size", "63"], "63 impressions cannot be divided among 2 trainers"),
        (["--rows", "10"], "rows"),
    ],
)
def test_what_cannot_be_run_is_refused(arguments: list[str], said: str) -> None:
    made = train(*arguments)
    assert made.exit_code and said in str(made.exception)


def train(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["ctr", *arguments])
