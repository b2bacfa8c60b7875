"""A trainer's program on a mesh and on one device has the same global arguments and results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from dtrans.run.base.merge import Merge
from dtrans.run.base.spmd import AxisSharding, on_mesh, on_one_device


AXES = (("group", 2), ("rank", 3))
NAMES = ("group", "rank")
WHOLE, DTRANS_PRIMITIVES = AxisSharding(), AxisSharding(stacked=NAMES)
ROWS, SLICES = WHOLE.sharded_along(0, *NAMES), WHOLE.sharded_along(1, "rank")
BOTH = WHOLE.sharded_along(1, "group").sharded_along(0, "rank")
STACKED_SLICES = AxisSharding(stacked=("group",)).sharded_along(1, "rank")


def both_ways(fn, ins, outs, *args):
    mesh = Mesh(np.array(jax.devices()[:6]).reshape(2, 3), NAMES)
    found = [
        jax.jit(on_mesh(fn, mesh, ins, outs))(*args),
        jax.jit(on_one_device(fn, AXES, ins, outs))(*args),
    ]
    return [[np.asarray(x) for x in of] for of in found]


@pytest.mark.parametrize("sharding", [WHOLE, ROWS, SLICES, BOTH])
def test_values_come_back_as_they_went_in(sharding: AxisSharding) -> None:
    x = jnp.arange(6 * 6 * 2).reshape(6, 6, 2)
    for (found,) in both_ways(lambda part: [part], [sharding], [sharding], x):
        np.testing.assert_array_equal(found, x)


def test_values_of_each_trainer_are_stacked() -> None:
    x = jnp.arange(12).reshape(12, 1)
    expected = np.arange(12).reshape(6, 2, 1)
    for (found,) in both_ways(lambda part: [part], [ROWS], [DTRANS_PRIMITIVES], x):
        np.testing.assert_array_equal(found, expected)
    for (found,) in both_ways(lambda part: [part], [DTRANS_PRIMITIVES], [ROWS], expected):
        np.testing.assert_array_equal(found, x)


def test_slices_of_stacked_values() -> None:
    x = jnp.arange(2 * 4 * 6).reshape(2, 4, 6)
    for (found,) in both_ways(lambda part: [part * 2], [STACKED_SLICES], [STACKED_SLICES], x):
        np.testing.assert_array_equal(found, 2 * x)


def test_trainers_are_numbered_along_the_axes_in_order() -> None:
    index = lambda: jax.lax.axis_index(NAMES)
    fn = lambda rows, w: [rows[0, 0] * 0 + index(), jax.lax.psum(rows.sum() * w.sum(), NAMES)]
    first = AxisSharding(first=NAMES)
    for numbers, total in both_ways(
        fn, [ROWS, SLICES], [DTRANS_PRIMITIVES, first], jnp.ones((6, 1)), jnp.ones((1, 6))
    ):
        np.testing.assert_array_equal(numbers, np.arange(6))
        assert total == 12.0


def test_the_first_is_taken_or_all_must_agree() -> None:
    fn = lambda rows: [rows.sum()]
    x = jnp.arange(6.0)
    ((found,),) = [on_one_device(fn, AXES, [ROWS], [AxisSharding(first=NAMES)])(x)]
    assert found == 0.0
    with pytest.raises(ValueError, match="out_axes"):
        on_one_device(fn, AXES, [ROWS], [WHOLE])(x)


def test_results_that_every_device_gets_whole() -> None:
    mesh = Mesh(np.array(jax.devices()[:6]).reshape(2, 3), NAMES)
    x = jnp.arange(12).reshape(2, 6)
    rows, own = jax.jit(
        on_mesh(
            lambda part: [part, part[0]],
            mesh,
            [SLICES],
            [SLICES, DTRANS_PRIMITIVES],
            gathered=[0, 1],
        )
    )(x)
    assert rows.sharding.is_fully_replicated and own.sharding.is_fully_replicated
    np.testing.assert_array_equal(rows, x)
    np.testing.assert_array_equal(own, np.concatenate([np.arange(6).reshape(3, 2)] * 2))


@pytest.mark.parametrize("size", [1, 3])
def test_trainers_that_run_in_turn(size: int) -> None:
    outs = [AxisSharding(stacked=("turn",))]
    ins = [AxisSharding().sharded_along(0, "turn"), AxisSharding()]
    run = on_one_device(lambda rows, w: [rows.sum() * w], [("turn", size)], ins, outs, in_turn=True)
    (found,) = run(jnp.arange(6.0), jnp.array(2.0))
    np.testing.assert_array_equal(found, 2 * np.arange(6.0).reshape(size, -1).sum(1))


def test_axes_that_are_nowhere_are_ignored() -> None:
    (found,) = on_one_device(lambda x: [x + 1], [], [ROWS], [BOTH])(jnp.arange(4))
    np.testing.assert_array_equal(found, np.arange(1, 5))


def test_a_dimension_is_cut_anew_and_not_twice() -> None:
    assert SLICES.sharded_along(0, "rank") == WHOLE.sharded_along(0, "rank")
    assert SLICES.sharded_along(None, "group") is SLICES


@pytest.mark.parametrize(
    ("merge", "expected"),
    [
        (Merge("mean"), [[2.0, 3.0]]),
        (Merge("sum"), [[4.0, 6.0]]),
        (Merge("same"), [[1.0, 2.0]]),
        (Merge("each"), [[[1.0, 2.0]], [[3.0, 4.0]]]),
        (Merge("concat", 1), [[1.0, 2.0, 3.0, 4.0]]),
        (Merge("concat", 1, rows=3), [[1.0, 2.0, 3.0]]),
    ],
)
def test_merges(merge: Merge, expected: list[list[float]]) -> None:
    stacked = jnp.array([[[1.0, 2.0]], [[3.0, 4.0]]])
    np.testing.assert_array_equal(merge(stacked), expected)
    assert Merge("concat")(jnp.zeros((2, 0, 3))).shape == (0, 3)
