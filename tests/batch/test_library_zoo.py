"""Steps in the style of other libraries, in every strategy: the results of one device, or a true
error message.

Plans are verified without a tolerance; each day, a sample of them. Jobs of some cases run in 64
bits, within 1e-12 of one device.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import library_table
import library_zoo
import numpy as np
import pytest
from library_table import MODES, planned

from dtrans.errors import DtransError


REFUSED = library_table.REFUSED


def numbers(tree: Any) -> list[np.ndarray]:
    """Return the leaves of a tree as arrays; a Python integer becomes an array."""
    found = [x for x in jax.tree.leaves(tree) if hasattr(x, "dtype") or isinstance(x, (int, float))]
    is_key = lambda x: jnp.issubdtype(jax.typeof(x).dtype, jax.dtypes.prng_key)
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in found]


def compare(found: Any, wanted: Any) -> None:
    for a, b in zip(numbers(found), numbers(wanted), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert (
            np.max(np.abs(a.astype(float) - b) / (1 + np.abs(b.astype(float))), initial=0) < 1e-12
        )


TAKEN = [
    (c.name, mode)
    for c in library_zoo.CASES
    for mode in MODES
    if c.name not in REFUSED.get(mode, ())
]
JOBS = [  # one case for each form of a state, and for each strategy
    ("flax_train_state", "nccl2"),
    ("nnx_optimizer", "stage 1"),
    ("lora", "stage 3"),
    ("gan", "pserver"),
    ("mean_teacher", "pipeline"),
    ("gan", "pipeline"),
]


@pytest.mark.sampled(12)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("name", "mode"), TAKEN)
def test_a_plan_computes_the_librarys_own_step(name: str, mode: str) -> None:
    assert (report := planned(library_zoo.by_name(name), mode).verify()), str(report)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("name", "mode"), JOBS)
def test_the_librarys_own_step_gives_one_devices_numbers(name: str, mode: str) -> None:
    case, key = library_zoo.by_name(name), jax.random.key(0)
    job = planned(case, mode).simulate()
    state, alone = job.init(key), case.state(key)
    step = case.step(case.value_and_grad)
    for i in range(2):
        batch = case.batch(12, seed=i)
        state, *results = job.step(state, *batch)
        made = step(*alone, *batch)
        alone, wanted = made[: len(alone)], made[len(alone) :]
        compare(results, wanted)
    compare(job.gather(state), alone)
    again = job.scatter(job.gather(state))
    compare(job.gather(again), alone)


def of_micro_batches(case: library_zoo.LibraryCase, count: int) -> library_zoo.Step:
    """Return a step that averages loss, statistics and gradients over parts of the batch."""

    def step(state: Any, *batch: jax.Array) -> Any:
        found = []

        def recorded(fun: Any, **options: Any) -> Any:
            def wrapped(params: Any) -> Any:
                found.append(jax.value_and_grad(fun, **options)(params))
                return found[-1]

            return wrapped

        for i in range(count):
            rows = slice(i * len(batch[0]) // count, (i + 1) * len(batch[0]) // count)
            case.step(recorded)(state, *(array[rows] for array in batch))
        mean = jax.tree.map(lambda *parts: sum(parts) / count, *found)
        return case.step(lambda fun, **options: lambda params: mean)(state, *batch)

    return step


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", library_table.PER_MICRO_BATCH)
def test_a_pipeline_averages_over_micro_batches(name: str) -> None:
    case, key = library_zoo.by_name(name), jax.random.key(0)
    plan = planned(case, "pipeline", batch="micro")
    job, step = plan.simulate(), of_micro_batches(case, library_table.TRAINERS)
    state, alone = job.init(key), case.init(key)
    for i in range(2):
        batch = case.batch(12, seed=i)
        state, *results = job.step(state, *batch)
        alone, *wanted = step(alone, *batch)
        compare(results, wanted)
    compare(job.gather(state), alone)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("mode", "name"), [(mode, name) for mode, names in REFUSED.items() for name in names]
)
def test_what_is_refused_is_said(mode: str, name: str) -> None:
    with pytest.raises(DtransError, match=REFUSED[mode][name]):
        planned(library_zoo.by_name(name), mode)


@pytest.mark.soak
@pytest.mark.usefixtures("x64")
def test_the_page_says_what_each_step_takes() -> None:
    page = library_table.PAGE.read_text()
    assert page == library_table.page(), "make docs"
    assert (
        len(library_zoo.CASES) == len({c.name for c in library_zoo.CASES}) == page.count("\n| ") - 2
    )
