"""Trainers of different speeds (`dtrans.Batch.speeds`): shares of the rows, and the numbers of one
device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import step_zoo
from hypothesis import given, strategies as st
from step_cases import StepCase

import dtrans
from dtrans._jax import equations
from dtrans.costs import program_flops
from dtrans.errors import BatchError, ConfigError
from dtrans.ops import collective_of


pytestmark = pytest.mark.usefixtures("x64")

SPEEDS = [3, 1, 2]
ENDPOINTS = "127.0.0.1:1,127.0.0.1:2"


def planned(case: StepCase, speeds: Any = SPEEDS, rows: int = 4, **options: Any) -> Any:
    """Return a plan for `rows` rows on average for each trainer."""
    key = jax.random.key(0)
    main = dtrans.trace(case.step, *case.init(key), *case.batch(rows))
    options.setdefault("batch", dtrans.Batch(speeds=speeds))
    options.setdefault("placement", dtrans.BlockPlacement(min_block_size=1))
    startup = dtrans.trace(case.init, key)
    return dtrans.pserver(main, startup, pservers=ENDPOINTS, trainers=len(speeds), **options)


# -- shares ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "speeds, rows, want",
    [
        ([2, 1], 12, (8, 4)),
        ([2, 1], 13, (9, 4)),
        ([1, 1, 1], 7, (3, 2, 2)),
        ([100, 1], 8, (7, 1)),
        ([100, 1, 1, 1], 5, (2, 1, 1, 1)),
        ([1, 100, 1], 3, (1, 1, 1)),
        ([0.1, 0.2], 3, (1, 2)),
        ([15.7, 8.1], 64, (42, 22)),
    ],
)
def test_shares_are_whole_rows(speeds: list[float], rows: int, want: tuple[int, ...]) -> None:
    assert dtrans.Batch(speeds=speeds).shares(rows) == want


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(0, 40))
def test_shares_are_within_a_row_of_the_speeds_or_one_row(speeds: list[float], more: int) -> None:
    rows = len(speeds) + more
    found = dtrans.Batch(speeds=speeds).shares(rows)
    exact = [rows * speed / sum(speeds) for speed in speeds]
    assert sum(found) == rows and min(found) >= 1
    assert all(share < x + 1 + 1e-9 or share == 1 for share, x in zip(found, exact, strict=True))
    if min(exact) >= 1:
        assert all(share > x - 1 - 1e-9 for share, x in zip(found, exact, strict=True))


def test_too_few_rows() -> None:
    with pytest.raises(
        BatchError, match="the batch has 2 rows for 3 trainers, but each trainer ne"
    ):
        dtrans.Batch(speeds=SPEEDS).shares(2)
    with pytest.raises(ConfigError, match="shares needs speeds; pass dtrans.Batch"):
        dtrans.Batch().shares(2)


# -- numbers ---------------------------------------------------------------------------------------


def check_job(case: StepCase, plan: Any, batches: list[int]) -> None:
    """Compare the steps of a simulated job with one device."""
    key, job = jax.random.key(0), plan.simulate()
    state, (params, opt_state) = job.init(key), case.init(key)
    for i, rows in enumerate(batches):
        batch = case.batch(rows, seed=i)
        state, *results = job.step(state, *batch)
        params, opt_state, *wanted = jax.jit(case.step)(params, opt_state, *batch)
        step_zoo.compare((job.params(state), results), (params, wanted))
    step_zoo.compare(job.opt_state(state), opt_state)


NAMES = [
    "mean_loss",
    "sum_loss",
    "masked_mean_and_penalty",
    "flax_batch_norm",
    "conv_pools",
    "dropout_key_in_opt_state",
    "mixup",
    "transformer_scan",
    "ema_teacher",
    "rate_argument",
    "metrics_counts",
    "metrics_per_row",
    "worst_row",
    "class_centres",
    "moe_top1",
    "contrastive",
    "triplet_hard",
    "sorted_targets",
    "message_passing",
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES)
def test_trainers_of_different_speeds_compute_the_numbers_of_one_device(name: str) -> None:
    case = step_zoo.by_name(name)
    plan = planned(case)
    assert plan.shared.shares == (6, 2, 4)
    check_job(case, plan, [12, 12])


@pytest.mark.parametrize("name", ["mean_loss", "flax_batch_norm"])
def test_batches_of_other_sizes_have_other_shares(name: str) -> None:
    """With 3 rows each trainer has one row."""
    case = step_zoo.by_name(name)
    check_job(case, planned(case), [12, 13, 3, 30])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NAMES)
def test_plans_are_verified(name: str) -> None:
    report = planned(step_zoo.by_name(name)).verify()
    assert report, str(report)


def test_random_numbers_belong_to_the_rows_of_a_trainer() -> None:
    """Each row has other random numbers, so a trainer with other rows has other results."""
    report = planned(step_zoo.by_name("dropout_key_argument")).verify()
    assert report, str(report)


def tied(params: Any, x: Any) -> jax.Array:
    """A loss with a tied leaf, a 0-d leaf, a leaf of one row, and bfloat16 products."""
    w = params["w"].astype(jnp.bfloat16)
    h = jnp.tanh(x.astype(jnp.bfloat16) @ w + params["one"].astype(jnp.bfloat16))
    out = (h @ w.T).astype(x.dtype) * params["scale"]
    return jnp.mean((out - x) ** 2)


def test_tied_leaves_small_leaves_and_bfloat16() -> None:
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(4, 3)), "one": rng.normal(size=(1, 3)), "scale": np.float64(2)}
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1))
    init = lambda: (p := jax.tree.map(jnp.asarray, params), tx.init(p))
    step, x = dtrans.make_train_step(tied, tx), jnp.asarray(rng.normal(size=(9, 4)))
    main = dtrans.trace(step, *init(), x[:3])
    plan = dtrans.pserver(
        main, dtrans.trace(init), pservers=ENDPOINTS, trainers=3, batch=dtrans.Batch(speeds=SPEEDS)
    )
    report = plan.verify()
    assert report, str(report)
    job = plan.simulate()
    _, loss = job.step(job.init(), x)
    *_, wanted = step(*init(), x)
    assert float(loss) == pytest.approx(float(wanted), rel=1e-2)


def test_rows_along_another_dimension_and_unsplit_arrays() -> None:
    tx, params = optax.sgd(0.1), {"w": jnp.arange(6.0).reshape(2, 3)}
    init = lambda: (params, tx.init(params))

    def loss(p: Any, x: Any, table: Any) -> Any:
        out = jnp.einsum("tbi,io->tbo", x, p["w"]) * table
        return jnp.mean(out**2), out

    step = dtrans.make_train_step(loss, tx, has_aux=True)
    x, table = jnp.asarray(np.random.default_rng(0).normal(size=(4, 12, 2))), jnp.arange(3.0)
    batch = dtrans.Batch(axes=(1, None), speeds=SPEEDS)
    main = dtrans.trace(step, *init(), x[:, :4], table)
    plan = dtrans.pserver(main, dtrans.trace(init), trainers=3, batch=batch)
    job = plan.simulate()
    _, *found = job.step(job.init(), x, table)
    *_, wanted, out = step(*init(), x, table)
    step_zoo.compare(found, [wanted, out])


# -- programs and costs ----------------------------------------------------------------------------


def test_each_trainer_computes_its_share_without_padding() -> None:
    plan = planned(step_zoo.by_name("mean_loss"))
    rows = []
    for k in range(3):
        types = plan.trainer_program(k).inputs
        rows.append({types[n].shape[plan.shared.axes[n]] for n in plan.shared.axes})
    assert rows == [{6}, {2}, {4}]
    assert "rows of trainers, by speed: 6, 2, 4" in str(plan)


def test_costs_follow_the_shares_and_bytes_do_not() -> None:
    case = step_zoo.by_name("mean_loss")
    plan, even = planned(case), planned(case, batch="exact")
    *trainers, first, second = plan.costs()
    assert [c.role for c in trainers] == ["trainer 0", "trainer 1", "trainer 2"]
    assert [(c.count, c.speed) for c in trainers] == [(1, 3), (1, 1), (1, 2)]
    flops = [program_flops(plan.trainer_program(k)) for k in range(3)]
    assert [c.flops for c in trainers] == flops and flops[0] > flops[2] > flops[1]
    # a trainer's operations are those of its rows, plus a part that all trainers compute
    assert flops[0] - flops[2] == flops[2] - flops[1]
    # beside gradients and parameters, trainers exchange the loss, a number of 8 bytes
    alone = even.costs()[0]
    assert {(c.sent, c.received) for c in trainers} == {(alone.sent + 8, alone.received + 8)}
    for server in (first, second):
        assert server.speed is None
        sent = [t.nbytes for t in plan.transfers() if t.source == server.role]
        received = [t.nbytes for t in plan.transfers() if t.target == server.role]
        assert (server.sent, server.received) == (sum(sent), sum(received))
    assert {t.source for t in plan.transfers() if t.target == first.role} >= {"trainer 1"}
    assert plan.roles().rows


def test_equal_speeds_are_no_speeds() -> None:
    case = step_zoo.by_name("mean_loss")
    plan = planned(case, batch=dtrans.Batch(speeds=[2, 2, 2]))
    assert plan.shares is None and plan.shared.proven
    assert next(c.role for c in plan.costs()) == "trainer"


@pytest.mark.parametrize("name", ["flax_batch_norm", "contrastive", "triplet_hard"])
def test_programs_of_all_trainers_exchange_values_of_equal_shapes(name: str) -> None:
    plan = planned(step_zoo.by_name(name))
    found = []
    for k in range(3):
        part = plan.shared.for_trainer(1, k).part.program
        sent = [e for e in equations(part.jaxpr) if collective_of(e) is not None]
        found.append([(e.primitive, [a.aval for a in e.invars]) for e in sent])
    assert found[0] and found[0] == found[1] == found[2]


def test_exchanged_rows_are_padded_to_the_largest_share() -> None:
    """The shares are 6, 2 and 4 rows, so three parts of 6 rows arrive for 12 rows."""
    plan = planned(step_zoo.by_name("contrastive"))
    gathered = [x.nbytes for x in plan.shared.part.exchanged if x.op == "all_gather"]
    full = [x.nbytes for x in plan.shared.part.gathers]
    assert gathered and [12 * size for size in gathered] == [18 * size for size in full]


# -- refusals --------------------------------------------------------------------------------------


def mean_loss(**options: Any) -> Any:
    return planned(step_zoo.by_name("mean_loss"), **options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"batch": dtrans.Batch(speeds=[1, 2])}, "has 2 entries, but trainers=3; pass one speed"),
        ({"mode": dtrans.Async()}, r"speeds=.* cannot be combined with mode=dtrans.Async\(...\)"),
        ({"mode": dtrans.Geo()}, r"speeds=.* cannot be combined with mode=dtrans.Geo\(...\)"),
        (
            {"batch": dtrans.Batch("local", speeds=SPEEDS)},
            "speeds=.* cannot be combined with kind='local', which gives the gradients",
        ),
        ({"on_trainer_exit": "paddle"}, "on_trainer_exit='paddle' cannot be combined with speeds"),
        ({"sparse": "auto"}, "sparse='auto' cannot be combined with batch=dtrans.Batch.speeds"),
    ],
)
def test_options_that_speeds_exclude(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mean_loss(**options)


def test_local_scopes_need_equal_parts() -> None:
    tx, params = optax.sgd(0.1), {"w": jnp.ones((2, 3))}
    init = lambda: (params, tx.init(params))

    def loss(p: Any, x: Any) -> jax.Array:
        with dtrans.local():
            x = x - x.mean(0)
        return jnp.mean((x @ p["w"]) ** 2)

    main = dtrans.trace(dtrans.make_train_step(loss, tx), *init(), jnp.ones((4, 2)))
    with pytest.raises(BatchError, match=r"speeds of dtrans.Batch cannot .* dtrans.local\(\)"):
        dtrans.pserver(main, dtrans.trace(init), trainers=2, batch=dtrans.Batch(speeds=[2, 1]))


def test_one_compiled_program_cannot_run_the_trainers() -> None:
    with pytest.raises(ConfigError, match=r"on_mesh runs one program .* plan.simulate\(\)"):
        mean_loss().on_mesh()


@pytest.mark.parametrize(
    "strategy, options",
    [
        (dtrans.nccl2, {"trainers": 2}),
        (dtrans.sharding, {"degree": 2}),
        (dtrans.pipeline, {"num_stages": 2}),
    ],
)
def test_strategies_with_one_program(strategy: Any, options: dict[str, Any]) -> None:
    case = step_zoo.by_name("mean_loss")
    main = dtrans.trace(case.step, *case.init(jax.random.key(0)), *case.batch(4))
    startup = dtrans.trace(case.init, jax.random.key(0))
    message = f"cannot be combined with dtrans.{strategy.__name__}, which runs one program on sev"
    with pytest.raises(ConfigError, match=message):
        strategy(main, startup, batch=dtrans.Batch(speeds=[2, 1]), **options)


@pytest.mark.parametrize(
    "speeds, message",
    [
        (
            [1, -1],
            r"speeds\[1\] must be a positive, finite number, the speed of trainer 1; it is -1",
        ),
        ([float("inf")], r"speeds\[0\] must be a positive, finite number"),
        (None, "speeds must be a list with the speed of each trainer"),
    ],
)
def test_speeds_that_are_no_speeds(speeds: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dtrans.Batch(speeds=speeds)
