"""The example with digits: data, batches and model are functions of their arguments, and shards
tile the global batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import distance

from dtrans.errors import BatchError, ConfigError
from examples import digits
from examples.compare import difference
from examples.digits_training import DigitsSettings, Outcome, training
from examples.optimizer_choice import OPTIMIZERS, make_optimizer


@pytest.fixture(scope="module")
def data() -> digits.Digits:
    return digits.load(0)


def listed(data: digits.Digits, *args: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    return list(digits.batches(data, *args))


def test_data(data: digits.Digits) -> None:
    assert data.x.shape == (digits.TRAIN_IMAGES, 64) and data.test_x.shape == (
        digits.TEST_IMAGES,
        64,
    )
    assert data.x.dtype == np.float32 and data.y.dtype == np.int32
    assert data.x.min() == 0 and data.x.max() == 1
    assert set(data.y.tolist()) == set(data.test_y.tolist()) == set(range(10))


def test_split_depends_on_the_seed_alone(data: digits.Digits) -> None:
    again, other = digits.load(0), digits.load(1)
    assert np.array_equal(data.x, again.x) and np.array_equal(data.test_y, again.test_y)
    assert not np.array_equal(data.test_x, other.test_x)
    # a split contains every image once
    rows = lambda d: sorted(map(bytes, np.concatenate([d.x, d.test_x])))
    assert rows(data) == rows(other)


def test_data_in_double_precision() -> None:
    with jax.enable_x64(True):
        assert digits.load(0).x.dtype == np.float64


def test_batches_depend_on_seed_and_epoch_alone(data: digits.Digits) -> None:
    first = listed(data, 0, 0, 64)
    assert len(first) == 1437 // 64 == DigitsSettings(batch_size=64).steps_per_epoch
    for (x, y), (x2, y2) in zip(first, listed(data, 0, 0, 64), strict=True):
        assert np.array_equal(x, x2) and np.array_equal(y, y2)
    for other in (listed(data, 0, 1, 64), listed(data, 1, 0, 64)):
        assert not np.array_equal(first[0][0], other[0][0])


def test_an_epoch_sees_each_image_at_most_once(data: digits.Digits) -> None:
    whole = np.concatenate([x for x, _ in listed(data, 3, 2, 479)])
    assert sorted(map(bytes, whole)) == sorted(map(bytes, data.x))  # 3 * 479 == 1437


@pytest.mark.parametrize("trainers", [1, 2, 3, 4])
def test_shards_tile_the_global_batch(data: digits.Digits, trainers: int) -> None:
    batch = listed(data, 0, 0, 48)[5]
    shards = [digits.shard(batch, k, trainers) for k in range(trainers)]
    assert {len(x) for x, _ in shards} == {48 // trainers}
    assert np.array_equal(np.concatenate([x for x, _ in shards]), batch[0])
    assert np.array_equal(np.concatenate([y for _, y in shards]), batch[1])


def test_bad_batches(data: digits.Digits) -> None:
    with pytest.raises(BatchError, match="a batch of 64 images cannot be divided among 3 trainers"):
        digits.shard(listed(data, 0, 0, 64)[0], 0, 3)
    with pytest.raises(BatchError, match="the batch size is 5000; expected 1 to 1437 images"):
        listed(data, 0, 0, 5000)


def test_loss_is_the_mean_over_shards(data: digits.Digits) -> None:
    params = digits.init(jax.random.key(0))
    batch = listed(data, 0, 0, 64)[0]
    losses = [digits.loss_fn(params, *digits.shard(batch, k, 4)) for k in range(4)]
    assert distance(np.mean(losses), np.asarray(digits.loss_fn(params, *batch))) < 1e-6


def test_accuracy(data: digits.Digits) -> None:
    params = jax.tree.map(jnp.zeros_like, digits.init(jax.random.key(0)))
    params["output"]["b"] = params["output"]["b"].at[3].set(1.0)
    assert digits.accuracy(params, data.test_x, data.test_y) == pytest.approx(
        np.mean(data.test_y == 3)
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_learns(data: digits.Digits, name: str) -> None:
    settings = DigitsSettings(optimizer=name)
    step, init = training(settings)
    params, opt_state = init(settings.key)
    jitted = jax.jit(step)
    losses = []
    for x, y in listed(data, 0, 0, 64):
        params, opt_state, loss = jitted(params, opt_state, x, y)
        losses.append(float(loss))
    assert np.mean(losses[-4:]) < 0.7 * losses[0]


def test_unknown_optimizer() -> None:
    with pytest.raises(ConfigError, match="there is no optimizer 'zzz'; there are sgd, momentum"):
        make_optimizer("zzz")


def test_settings_round_trip() -> None:
    settings = DigitsSettings(
        "adam", epochs=3, batch_size=12, seed=5, min_block_size=9000, deadline=0.25
    )
    assert DigitsSettings.parse(settings.arguments()) == settings
    assert DigitsSettings.parse([]) == DigitsSettings()


def test_outcome_round_trip(tmp_path: Path) -> None:
    before = Outcome(np.array([2.0, 1.0]), digits.init(jax.random.key(1)))
    before.save(tmp_path / "x.npz")
    after = Outcome.load(tmp_path / "x.npz")
    assert np.array_equal(before.losses, after.losses)
    assert jax.tree.structure(before.params) == jax.tree.structure(after.params)
    for a, b in zip(jax.tree.leaves(before.params), jax.tree.leaves(after.params), strict=True):
        assert np.array_equal(a, b) and a.dtype == b.dtype


def test_difference() -> None:
    b = {"l": {"w": jnp.array([1.0, -4.0]), "b": jnp.zeros(2)}}
    assert difference(b, b) == 0.0
    assert difference({"l": {"w": jnp.array([1.0, -3.0]), "b": jnp.zeros(2)}}, b) == 0.25
    assert difference({"l": {"w": b["l"]["w"], "b": jnp.full(2, 0.5)}}, b) == 0.5
    assert np.isnan(difference({"l": {"w": jnp.array([1.0, jnp.nan]), "b": jnp.zeros(2)}}, b))
