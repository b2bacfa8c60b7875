"""Steps as people write them: the job gives one device's numbers, parameters and results, whatever the loss.

Numbers are in 64 bits and differ by at most 1e-12 of what they are, or of one. Every case runs under nccl2 or one stage
of sharding, on two or three trainers that may not divide the batch; by night, under all of these."""

from __future__ import annotations

import itertools
from typing import Any

import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import step_table
import step_zoo

import dtrans
from dtrans.batch.shared import share
from dtrans.errors import ConfigError
from dtrans.step.batch_sharing import Batch
from dtrans.step.cut import cut


NAMES = [c.name for c in step_zoo.CASES]
STAGES = (0, 1, 2, 3)  # none: nccl2
BATCHES = ((2, 12), (3, 13))  # trainers, rows


def axes_of(case: step_zoo.StepCase) -> Any:
    return 0 if case.batch_axes is None else case.batch_axes


def planned(case: step_zoo.StepCase, trainers: int, stage: int, **options: Any) -> Any:
    main = dtrans.trace(case.step, *case.init(jax.random.key(0)), *case.batch(6))
    given = main, dtrans.trace(case.init, jax.random.key(0))
    options = {"axes": axes_of(case), **options}
    if not stage:
        return flat_options.nccl2(*given, trainers=trainers, **options)
    return flat_options.sharding(*given, degree=trainers, stage=stage, min_slice_size=0, **options)


def numbers(tree: Any) -> list[np.ndarray]:
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(tree)]


def compare(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(numbers(found), numbers(wanted), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if a.size:
            assert np.max(np.abs(a.astype(float) - b) / (1 + np.abs(b.astype(float)))) < 1e-12


def pairs() -> list[Any]:
    """Each case in one way for every run, and in the others by night."""
    found = []
    for i, name in enumerate(NAMES):
        for k, (stage, batch) in enumerate(itertools.product(STAGES, BATCHES)):
            soak = () if k == (3 * i) % 8 else (pytest.mark.soak,)
            found.append(pytest.param(name, stage, *batch, marks=soak))
    return found


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("name", "stage", "trainers", "rows"), pairs())
def test_a_job_gives_the_numbers_of_one_device(name: str, stage: int, trainers: int, rows: int) -> None:
    case, key = step_zoo.by_name(name), jax.random.key(0)
    job = planned(case, trainers, stage).simulate()
    state, alone = job.init(key), case.init(key)
    step = jax.jit(case.step)
    for i in range(2):
        batch = case.batch(rows, seed=i)
        state, *results = job.step(state, *batch)
        params, opt_state, *wanted = step(*alone, *batch)
        alone = params, opt_state
        compare((job.params(state), job.opt_state(state)), alone)
        compare(tuple(results), tuple(wanted))


@pytest.mark.usefixtures("x64")
def test_the_page_says_what_each_step_takes() -> None:
    """Analysis and programs of all, without running any: `docs/steps.md` is what they say."""
    assert step_table.PAGE.read_text() == step_table.page(), "write it anew with `make docs`"


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["mean_loss", "sum_loss", "metrics_counts", "rnn_time_major"])
def test_what_adds_up_is_taken_as_it_is(name: str) -> None:
    """The program is that of trainers with numbers of their own: nothing is written for it."""
    case = step_zoo.by_name(name)
    exact = planned(case, 2, 0)
    assert exact.shared.proven == (name != "metrics_counts"), exact.notes
    assert not exact.shared.part.exchanged
    if exact.shared.proven and name != "rnn_time_major":
        local = planned(case, 2, 0, kind="local", reduce=exact.shared.reduce)
        assert [op.type for op in exact.program.ops] == [op.type for op in local.program.ops]


def loss_of(kind: str) -> Any:
    """Losses that are one thing, and look like another."""

    def loss(params: Any, x: jax.Array, mask: jax.Array) -> jax.Array:
        each = jnp.tanh(x @ params["w"]).sum(1)
        return {
            "mean": each.mean(),
            "sum": each.sum(),
            "masked": (each * mask).sum() / mask.sum(),
            "mean of squares": (each.sum() / len(x)) ** 2,
            "sum by root": each.sum() / len(x) ** 0.5,
            "mean and penalty": each.mean() + (params["w"] ** 2).sum(),
            "sum and penalty": each.sum() + (params["w"] ** 2).sum(),
            "two means": each.mean() + each.sum() / (2 * len(x)),
            "mean and sum": each.mean() + each.sum(),
            "largest": each.max(),
        }[kind]

    return loss


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("kind", "proven", "reduce"),
    [
        ("mean", True, "mean"),
        ("sum", True, "sum"),
        ("masked", False, "sum"),
        ("mean of squares", False, "sum"),
        ("sum by root", False, "sum"),
        ("mean and penalty", True, "mean"),
        ("sum and penalty", False, "sum"),  # a penalty of each trainer would be added up
        ("two means", True, "mean"),
        ("mean and sum", False, "sum"),
        ("largest", False, "sum"),
    ],
)
def test_a_mean_is_told_from_what_looks_like_one(kind: str, proven: bool, reduce: str) -> None:
    params, tx = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(3, 2)))}, optax.sgd(0.1)
    step = dtrans.make_train_step(loss_of(kind), tx)
    x, mask = np.random.default_rng(1).normal(size=(12, 3)), np.array([1.0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 0, 1])
    main = dtrans.trace(step, params, tx.init(params), x[:6], mask[:6])
    found = share(cut(main).with_reported(), Batch(), 2, ("trainers",))
    assert (found.proven, found.reduce) == (proven, reduce)
    plan = dtrans.nccl2(main, dtrans.trace(lambda p: (p, tx.init(p)), params), trainers=2)
    for rows in (12, 11):  # the last trainer has one that enters nothing
        job = plan.simulate()
        state, loss = job.step(job.init(params), x[:rows], mask[:rows])
        new, _, wanted = step(params, tx.init(params), x[:rows], mask[:rows])
        compare((job.params(state), loss), (new, wanted))


@pytest.mark.usefixtures("x64")
def test_masks_differ_by_row_and_not_by_trainer() -> None:
    """One device's mask: no two trainers draw the same one, as they would from a key that they share."""
    x, w = np.ones((8, 64)), {"w": jnp.ones(64)}
    kept = lambda x, key: jax.random.bernoulli(key, 0.5, x.shape)
    loss = lambda p, x, key: (jnp.where(kept(x, key), x * p["w"], 0.0).mean(), kept(x, key))
    tx, key = optax.sgd(0.1), jax.random.key(3)
    main = dtrans.trace(dtrans.make_train_step(loss, tx, has_aux=True), w, tx.init(w), x[:4], key)
    job = dtrans.nccl2(main, dtrans.trace(lambda p: (p, tx.init(p)), w), trainers=2).simulate()
    mask = job.step(job.init(w), x, key)[2]
    np.testing.assert_array_equal(mask, kept(x, key))
    assert not np.array_equal(mask[:4], mask[4:])


@pytest.mark.usefixtures("x64")
def test_servers_and_pipelines_take_what_adds_up_and_refuse_the_rest_by_line() -> None:
    servers = {"pservers": "127.0.0.1:1,127.0.0.1:2", "trainers": 2}
    stages = {"num_stages": 2, "num_micro_batch": 3}
    key = jax.random.key(0)
    for name in ("mean_loss", "sum_loss"):
        case, given = traced(name)
        plans = dtrans.pserver(*given, **servers, batch="exact"), dtrans.pipeline(*given, **stages, batch="exact")
        for job in (plan.simulate() for plan in plans):
            state, loss = job.step(job.init(key), *case.batch(12))
            params, _, wanted = case.step(*case.init(key), *case.batch(12))
            compare((job.params(state), loss), (params, wanted))
    for name in ("masked_mean", "dropout_key_argument"):
        _, given = traced(name)
        for plan, options in ((dtrans.pserver, servers), (dtrans.pipeline, stages)):
            with pytest.raises(ConfigError, match=r"values of the whole batch \(.*\), and .* or say batch='local'"):
                plan(*given, **options, batch="exact")
        assert "local: numbers are of each part alone" in str(dtrans.pserver(*given, **servers))


def traced(name: str) -> Any:
    case, key = step_zoo.by_name(name), jax.random.key(0)
    return case, (dtrans.trace(case.step, *case.init(key), *case.batch(6)), dtrans.trace(case.init, key))


@pytest.mark.usefixtures("x64")
def test_what_belongs_to_trainers_with_numbers_of_their_own_is_refused() -> None:
    _, given = traced("mean_loss")
    for options in ({"reduce": "sum"}, {"batch": Batch(merge={"loss": "sum"})}, {"batch": Batch(example_count="loss")}):
        with pytest.raises(ConfigError, match="is for batch='local', where each trainer has numbers of its own"):
            dtrans.nccl2(*given, trainers=2, **options)
    with pytest.raises(ConfigError, match=r"axes=\(0, 1, 0\) has 3 entries, the step has 2 batch arguments"):
        dtrans.nccl2(*given, trainers=2, batch=Batch(axes=(0, 1, 0)))
    with pytest.raises(ConfigError, match=r"axes=\(0, 1\): y is int32\[6\], which has no dimension 1"):
        dtrans.nccl2(*given, trainers=2, batch=Batch(axes=(0, 1)))
    for options in ({"batch": Batch("local", axes=1)}, {"batch": Batch("local", axes=(0, None))}):
        with pytest.raises(ConfigError, match="axes=.* is for batch='exact' of dtrans.nccl2 and dtrans.sharding"):
            dtrans.nccl2(*given, trainers=2, **options)
        with pytest.raises(ConfigError, match="axes=.* is for batch='exact' of dtrans.nccl2 and dtrans.sharding"):
            dtrans.pserver(*given, pservers="127.0.0.1:1", trainers=2, **options)
        with pytest.raises(ConfigError, match="axes=.* is for batch='exact' of dtrans.nccl2 and dtrans.sharding"):
            dtrans.pipeline(*given, num_stages=2, num_micro_batch=2, **options)
    _, given = traced("masked_mean")
    with pytest.raises(ConfigError, match=r"num_micro_batch=2 takes rows .* values of all of them \(all_reduce for"):
        dtrans.nccl2(*given, trainers=2, num_micro_batch=2)
    with pytest.raises(ConfigError, match=r"clip_local_norm=1.0 clips what .* values of all of them \(all_reduce for"):
        dtrans.nccl2(*given, trainers=2, reduce=dtrans.Reduce(clip_local_norm=1.0))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["masked_mean", "dropout_key_argument", "contrastive", "batch_norm_by_hand"])
def test_trainers_may_be_on_two_axes(name: str) -> None:
    case, given = traced(name)
    job = dtrans.nccl2(*given, trainers=4, trainers_per_node=2).on_mesh()
    state, loss, *_ = job.step(job.init(jax.random.key(0)), *case.batch(12))
    params, _, wanted, *_ = case.step(*case.init(jax.random.key(0)), *case.batch(12))
    compare((job.params(state), loss), (params, wanted))
