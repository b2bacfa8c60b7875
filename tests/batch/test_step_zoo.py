"""All steps of the zoo: jobs compute the parameters and results of one device, for any loss.

Plans are verified without a tolerance; each day, a sample of them: nccl2 mode, the stages of
sharding and parameter servers, with two or three trainers that may not divide the batch, and
pipelines. Jobs of some cases run in 64 bits. The relative or absolute difference is at most 1e-12.
"""

from __future__ import annotations

import itertools
from typing import Any

import flat_options
import jax
import jax.numpy as jnp
import layers
import numpy as np
import optax
import pytest
import step_cases
import step_table
import step_zoo
import step_zoo_batches
import step_zoo_gradients
from step_zoo import compare

import dtrans
from dtrans.batch.exact_step import shard_step
from dtrans.errors import ConfigError, GradientError
from dtrans.step.batch_sharing import Batch
from dtrans.step.halves import divide_step


NAMES = [c.name for c in step_zoo.CASES]
MODES = ("nccl2", "stage 1", "stage 2", "stage 3", "pserver", "pipeline")
NOT_ON_SERVERS = {  # reasons of refusals
    "metrics_grad_norm": "aux/norm is computed from gradients",
    "deep_equilibrium": "the body of while needs values of the full batch",
    "hessian_free": "the body of while needs values of the full batch",
    **dict.fromkeys(
        step_zoo_gradients.WITHOUT_GRADIENT, "dtrans.sharding, which need no gradients$"
    ),
    "adversarial_updates": "the gradient of params/generator/w is taken at the new params/critic",
}
MEET = (
    "values of the full batch .* and micro-batches exchange gradients and results only; .* or "
    "pass "
    "batch='micro', with which each part has"
)
NOT_IN_PIPELINES = {
    **dict.fromkeys(
        ("flax_batch_norm", "conv_batch_norm", "batch_norm_by_hand", "remat_batch_norm"), MEET
    ),
    **dict.fromkeys(
        ("equinox_batch_norm", "contrastive", "triplet_hard", "barlow_twins", "moe_top1"), MEET
    ),
    "metrics_per_row": MEET,
    **dict.fromkeys(
        ("root_mean_square", "correlation", "dice", "median_of_rows", "hardest_rows", "tilted"),
        MEET,
    ),
    **dict.fromkeys(("worst_row", "worst_group", "invariant_risk", "confident_and_diverse"), MEET),
    **dict.fromkeys(("vicreg_terms", "supervised_contrastive", "class_centres"), MEET),
    **dict.fromkeys(("ranking_of_pairs", "listwise", "sorted_targets", "kernel_discrepancy"), MEET),
    **dict.fromkeys(("covariance_alignment", "optimal_transport", "graph_convolution"), MEET),
    **dict.fromkeys(("message_passing", "in_batch_negatives", "penalty_on_the_gradient"), MEET),
    "deep_equilibrium": MEET,
    "accumulated_in_a_scan": "in a loop or a branch. A pipeline splits the batch into micro-batches",
    **dict.fromkeys(
        step_zoo_gradients.WITHOUT_GRADIENT, "dtrans.sharding, which need no gradients$"
    ),
    **dict.fromkeys(step_zoo_gradients.MARKED, MEET),
    "adversarial_updates": "the gradient of params/generator/w is taken at the new params/critic",
    **dict.fromkeys(
        step_zoo_gradients.BY_JAX, "a pipeline needs the undifferentiated loss function"
    ),
}
REFUSED = {"pserver": NOT_ON_SERVERS, "pipeline": NOT_IN_PIPELINES}
BATCHES = ((2, 12), (3, 13))  # trainers, rows
NEAR_TIES = {"ctc"}  # its paths have nearly equal probability, so verification cannot decide
JOBS = [  # one case for each interaction of rows, and for each mode
    ("mean_loss", "nccl2", 3, 13),
    ("masked_mean", "pserver", 3, 13),
    ("batch_norm_by_hand", "stage 1", 2, 12),
    ("dropout_key_argument", "stage 3", 3, 13),
    ("dropout_key_in_opt_state", "nccl2", 3, 13),  # rows of keys are padded
    ("rnn_time_major", "stage 2", 2, 12),
    ("metrics_counts", "pipeline", 2, 12),
]


def axes_of(case: step_zoo.StepCase) -> Any:
    return 0 if case.batch_axes is None else case.batch_axes


def planned(case: step_zoo.StepCase, trainers: int, mode: str, **options: Any) -> Any:
    if mode == "pipeline":
        main = dtrans.trace(case.step, *case.init(jax.random.key(0)), *case.batch(12))
        replicas = (
            {"num_micro_batch": 3, "replicas": 2}
            if trainers == 3
            else {"num_micro_batch": trainers}
        )
        startup = dtrans.trace(case.init, jax.random.key(0))
        return dtrans.pipeline(
            main, startup, num_stages=2, batch=Batch(axes=axes_of(case), **options), **replicas
        )
    main = dtrans.trace(case.step, *case.init(jax.random.key(0)), *case.batch(6))
    given = main, dtrans.trace(case.init, jax.random.key(0))
    options = {"axes": axes_of(case), **options}
    if mode == "nccl2":
        return flat_options.nccl2(*given, trainers=trainers, **options)
    if mode == "pserver":
        servers = {"pservers": "127.0.0.1:1,127.0.0.1:2", "min_block_size": 1}
        return flat_options.pserver(*given, trainers=trainers, **servers, **options)
    return flat_options.sharding(
        *given, degree=trainers, stage=int(mode[-1]), min_slice_size=0, **options
    )


def ways() -> list[tuple[str, str, int, int]]:
    """Return each case in every mode that supports it, with each batch."""
    found = []
    for name, mode, (trainers, rows) in itertools.product(NAMES, MODES, BATCHES):
        if name in REFUSED.get(mode, ()):
            continue
        # the number of parts must divide the batch, in a pipeline or in the user's own loop
        is_divided = mode == "pipeline" or name == "accumulated_in_a_scan"
        found.append((name, mode, trainers, 12 if is_divided else rows))
    return found


@pytest.mark.sampled(14)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("name", "mode", "trainers", "rows"), ways())
def test_a_plan_computes_the_step(name: str, mode: str, trainers: int, rows: int) -> None:
    case = step_zoo.by_name(name)
    report = planned(case, trainers, mode).verify(*case.batch(rows, seed=0))
    assert report.equal, str(report)
    assert report.complete or name in NEAR_TIES, str(report)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("name", "mode", "trainers", "rows"), JOBS)
def test_a_job_gives_the_numbers_of_one_device(
    name: str, mode: str, trainers: int, rows: int
) -> None:
    case, key = step_zoo.by_name(name), jax.random.key(0)
    job = planned(case, trainers, mode).simulate()
    state, alone = job.init(key), case.init(key)
    step = jax.jit(case.step)
    for i in range(2):
        batch = case.batch(rows, seed=i)
        state, *results = job.step(state, *batch)
        params, opt_state, *wanted = step(*alone, *batch)
        alone = params, opt_state
        compare((job.params(state), job.opt_state(state)), alone)
        compare(tuple(results), tuple(wanted))


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("mode", "name"), [(mode, name) for mode, names in REFUSED.items() for name in names]
)
def test_what_servers_and_pipelines_do_not_take_is_said(mode: str, name: str) -> None:
    with pytest.raises((GradientError, ConfigError), match=REFUSED[mode][name]):
        planned(step_zoo.by_name(name), 2, mode)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "cases",
    [
        slice(layers.today().toordinal() % 8, None, 8),
        pytest.param(slice(None), marks=pytest.mark.soak),
    ],
    ids=["today", "all"],
)
def test_the_page_says_what_each_step_takes(cases: slice) -> None:
    """The page equals the analysis and the programs, without running them."""
    lines = step_table.PAGE.read_text().splitlines(keepends=True)
    assert "".join(lines[: -len(step_zoo.CASES)]) == step_table.HEAD
    rows = zip(lines[-len(step_zoo.CASES) :][cases], step_zoo.CASES[cases], strict=True)
    assert all(line == step_table.row(case) for line, case in rows), (
        "write it anew with `make docs`"
    )


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["mean_loss", "sum_loss", "metrics_counts", "rnn_time_major"])
def test_what_adds_up_is_taken_as_it_is(name: str) -> None:
    """The sum over parts is exact, so trainers run the step on their rows without exchanges."""
    case = step_zoo.by_name(name)
    exact = planned(case, 2, "nccl2")
    assert exact.shared.proven == (name != "metrics_counts"), exact.notes
    assert not exact.shared.part.exchanged
    if exact.shared.proven and name != "rnn_time_major":
        local = planned(case, 2, "nccl2", kind="local", reduce=exact.shared.reduce)
        assert [op.type for op in exact.program.ops] == [op.type for op in local.program.ops]
        exact, local = planned(case, 2, "pserver"), planned(case, 2, "pserver", kind="local")
        assert [op.type for op in exact.trainer.ops] == [op.type for op in local.trainer.ops]


def loss_of(kind: str) -> Any:
    """Return a loss that looks like another kind of loss."""

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
        ("sum and penalty", False, "sum"),  # each trainer's penalty would be added
        ("two means", True, "mean"),
        ("mean and sum", False, "sum"),
        ("largest", False, "sum"),
    ],
)
def test_a_mean_is_told_from_what_looks_like_one(kind: str, proven: bool, reduce: str) -> None:
    params, tx = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(3, 2)))}, optax.sgd(0.1)
    step = dtrans.make_train_step(loss_of(kind), tx)
    x, mask = (
        np.random.default_rng(1).normal(size=(12, 3)),
        np.array([1.0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 0, 1]),
    )
    main = dtrans.trace(step, params, tx.init(params), x[:6], mask[:6])
    found = shard_step(divide_step(main).with_reported(), Batch(), 2, ("trainers",))
    assert (found.proven, found.reduce) == (proven, reduce)
    plan = dtrans.nccl2(main, dtrans.trace(lambda p: (p, tx.init(p)), params), trainers=2)
    for rows in (12, 11):  # the last trainer has a row that is not used
        job = plan.simulate()
        state, loss = job.step(job.init(params), x[:rows], mask[:rows])
        new, _, wanted = step(params, tx.init(params), x[:rows], mask[:rows])
        compare((job.params(state), loss), (new, wanted))


@pytest.mark.usefixtures("x64")
def test_masks_differ_by_row_and_not_by_trainer() -> None:
    """Trainers have rows of one device's mask.

    With a shared key, trainers that draw separately would draw equal masks.
    """
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
def test_asynchronous_trainers_take_what_adds_up_and_refuse_the_rest_by_line() -> None:
    servers = {"pservers": "127.0.0.1:1,127.0.0.1:2", "trainers": 2}
    for name in ("mean_loss", "sum_loss"):
        _, given = traced(name)
        assert dtrans.pserver(*given, **servers, mode=dtrans.Async()).shared.proven
    for name in ("masked_mean", "dropout_key_argument"):
        _, given = traced(name)
        for mode in (dtrans.Async(), dtrans.HalfAsync()):
            with pytest.raises(
                ConfigError,
                match=r"values of the full batch \(.*\), and asynchronous .*batch='local'",
            ):
                dtrans.pserver(*given, **servers, mode=mode)
        plan = dtrans.pserver(*given, **servers, batch="local")
        assert "local: each trainer computes on its own part" in str(plan)


@pytest.mark.usefixtures("x64")
def test_what_trainers_of_servers_exchange_takes_as_few_rounds_as_it_can() -> None:
    rounds = {
        "masked_mean": 1,
        "contrastive": 4,
        "batch_norm_by_hand": 8,
        "dropout_key_argument": 1,
        "mean_loss": 0,
    }
    for name, count in rounds.items():
        plan = planned(step_zoo.by_name(name), 2, "pserver")
        assert [e.params["round"] for e in plan.traffic.exchanges] == list(range(count)), name
        assert [e.params["endpoint"] for e in plan.traffic.exchanges] == [
            f"127.0.0.1:{1 + k % 2}" for k in range(count)
        ]
    plan = planned(step_zoo.by_name("masked_mean"), 2, "pserver")
    told = (
        "trainers exchange 2 values through the pservers, in 1 round; each sends 16 and "
        "receives 16 bytes"
    )
    assert told in str(plan)
    trainer, first, second = plan.costs()
    assert (trainer.rounds, first.rounds, second.rounds) == (2, 2, 1)
    assert trainer.sent == plan.bytes_per_step["send"] + 16


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("trainers", [2, 3])
def test_micro_batches_have_statistics_of_their_own_by_name(trainers: int) -> None:
    """Each micro-batch computes a mean and a variance of its rows. Gradients and loss are means
    over micro-batches."""
    case, parts = step_zoo.by_name("batch_norm_by_hand"), 2 if trainers == 2 else 6
    plan = planned(case, trainers, "pipeline", kind="micro")
    assert f"batch='micro': each of {parts} micro-batches computes the step independently" in str(
        plan
    )
    assert str(planned(case, trainers, "pipeline", kind="local")) == str(plan)

    def mean_of_parts(params: Any, x: Any, y: Any) -> Any:
        cut = zip(jnp.split(x, parts), jnp.split(y, parts), strict=True)
        return sum(step_zoo_batches.batch_norm_by_hand(params, *part) for part in cut) / parts

    step, key = jax.jit(dtrans.make_train_step(mean_of_parts, step_cases.ADAM)), jax.random.key(0)
    job = plan.simulate()
    state, alone = job.init(key), case.init(key)
    for i in range(2):
        batch = case.batch(12, seed=i)
        state, loss = job.step(state, *batch)
        params, opt_state, wanted = step(*alone, *batch)
        alone = params, opt_state
        compare((job.params(state), job.opt_state(state), loss), (params, opt_state, wanted))
    _, _, exact = case.step(*case.init(key), *case.batch(12))
    _, other = plan.simulate().step(job.init(key), *case.batch(12))
    assert abs(float(exact - other)) > 1e-4  # one device has different statistics


def test_the_note_of_a_local_sum_promises_no_error() -> None:
    """An exact step with a sum needs no alternative, so the note mentions no error."""
    params, tx = {"w": jnp.ones(3)}, optax.sgd(0.1)
    step = dtrans.make_train_step(lambda params, x: jnp.sum((x @ params["w"]) ** 2), tx)
    plan = dtrans.pserver(
        dtrans.trace(step, params, tx.init(params), jnp.ones((4, 3))),
        dtrans.trace(lambda: (params, tx.init(params))),
        pservers="127.0.0.1:1",
        trainers=2,
        batch="local",
    )
    (note,) = [n for n in plan.notes if n.startswith("local: ")]
    assert note.endswith("; one device's step is the sum of the steps on parts")


@pytest.mark.usefixtures("x64")
def test_only_pipelines_have_micro_batches_with_statistics() -> None:
    _, given = traced("mean_loss")
    for strategy, options in (
        (dtrans.nccl2, {"trainers": 2, "num_micro_batch": 2}),
        (dtrans.sharding, {"degree": 2}),
        (dtrans.pserver, {"pservers": "127.0.0.1:1", "trainers": 2}),
    ):
        for batch in ("micro", Batch("micro")):
            with pytest.raises(
                ConfigError,
                match="batch='micro' is for dtrans.pipeline only; pass batch='local': each",
            ):
                strategy(*given, batch=batch, **options)


@pytest.mark.usefixtures("x64")
def test_micro_batches_are_given_what_no_parameter_enters() -> None:
    """Micro-batches compute values that depend on parameters.

    Values of the full batch without parameters are computed once, and micro-batches receive their
    rows.
    """
    values = {
        "masked_mean": [()],
        "dropout_key_argument": [(12, 8)],
        "metrics_counts": None,
        "mean_loss": None,
    }
    for name, shapes in values.items():
        case = step_zoo.by_name(name)
        plan = planned(case, 2, "pipeline")
        assert (plan.values and [t.shape for t in plan.values.outputs.values()]) == shapes, name
    case = step_zoo.by_name("masked_mean")
    plan = planned(case, 2, "pipeline")
    assert "precomputed from the full batch: 1 value, 8 bytes" in str(plan)
    job = plan.on_mesh()
    state, alone = job.init(jax.random.key(0)), case.init(jax.random.key(0))
    for rows in (12, 8, 12):  # another batch has another number
        state, loss = job.step(state, *case.batch(rows))
        params, opt_state, wanted = case.step(*alone, *case.batch(rows))
        alone = params, opt_state
        compare((job.params(state), loss), (params, wanted))


@pytest.mark.usefixtures("x64")
def test_an_exchange_in_each_turn_of_a_loop_is_refused_by_line() -> None:
    def loss(w: Any, x: jax.Array) -> jax.Array:
        normed = lambda h, v: (jnp.tanh((h - h.mean(0)) @ v), None)
        return (jax.lax.scan(normed, x, w)[0] ** 2).mean()

    w, tx = jnp.ones((3, 2, 2)) / 2 + jnp.eye(2), optax.sgd(0.1)
    main = dtrans.trace(dtrans.make_train_step(loss, tx), w, tx.init(w), jnp.ones((6, 2)))
    given = main, dtrans.trace(lambda w: (w, tx.init(w)), w)
    with pytest.raises(
        ConfigError,
        match=r"scan needs .* \(all_reduce for .*test_step_zoo.py:\d+\).*each iteration would wait",
    ):
        dtrans.pserver(*given, trainers=2)
    assert "exact: sum over 12 rows" in str(dtrans.nccl2(*given, trainers=2))


@pytest.mark.usefixtures("x64")
def test_an_exchange_in_a_branch_is_refused_with_a_remedy() -> None:
    def loss(w: Any, x: jax.Array, select: Any = jax.lax.cond) -> jax.Array:
        h = x @ w
        centered = select(w[0, 0] > 0, lambda: h - h.mean(0), lambda: h)
        return jnp.mean(jnp.tanh(centered) ** 2)

    w, tx = jnp.ones((2, 2)), optax.sgd(0.1)
    start = dtrans.trace(lambda w: (w, tx.init(w)), w)

    def plan(loss: Any) -> Any:
        step = dtrans.make_train_step(loss, tx)
        main = dtrans.trace(step, w, tx.init(w), jnp.ones((6, 2)))
        return dtrans.pserver(main, start, trainers=2)

    with pytest.raises(ConfigError, match="body of cond .*in a branch; .*jnp.where") as e:
        plan(lambda w, x: loss(w, x))
    assert "iteration" not in str(e.value)
    where = lambda on, yes, no: jnp.where(on, yes(), no())
    plan(lambda w, x: loss(w, x, where))


@pytest.mark.usefixtures("x64")
def test_sums_are_added_up_by_servers_also_without_a_trainer_that_left() -> None:
    plan = planned(step_zoo.by_name("sum_loss"), 2, "pserver")
    (serve,) = plan.servers["127.0.0.1:1"].main.eqns
    assert {g.op for block in serve.params["optimize_blocks"] for g in block.grads} == {"sum"}
    assert serve.params["on_trainer_exit"] == "drop"
    (serve,) = (
        planned(step_zoo.by_name("masked_mean"), 2, "pserver").servers["127.0.0.1:1"].main.eqns
    )
    # its numbers are those of both trainers' batch
    assert serve.params["on_trainer_exit"] == "error"
    with pytest.raises(
        ConfigError,
        match=r"^on_trainer_exit='paddle' cannot be used if the step needs values of the full "
        r"batch \(all_",
    ):
        planned(step_zoo.by_name("masked_mean"), 2, "pserver", on_trainer_exit="paddle")


def traced(name: str) -> Any:
    case, key = step_zoo.by_name(name), jax.random.key(0)
    return case, (
        dtrans.trace(case.step, *case.init(key), *case.batch(6)),
        dtrans.trace(case.init, key),
    )


@pytest.mark.usefixtures("x64")
def test_what_belongs_to_trainers_with_numbers_of_their_own_is_refused() -> None:
    _, given = traced("mean_loss")
    for options in (
        {"reduce": "sum"},
        {"batch": Batch(merge={"loss": "sum"})},
        {"batch": Batch(example_count="loss")},
    ):
        with pytest.raises(
            ConfigError, match="needs batch='local', where each trainer computes separate results"
        ):
            dtrans.nccl2(*given, trainers=2, **options)
    with pytest.raises(
        ConfigError, match=r"axes=\(0, 1, 0\) has 3 entries, but the step has 2 batch arguments"
    ):
        dtrans.nccl2(*given, trainers=2, batch=Batch(axes=(0, 1, 0)))
    with pytest.raises(
        ConfigError,
        match=r"y is int32\[6\], which has no dimension 1, but axes=\(0, 1\); write the ",
    ):
        dtrans.nccl2(*given, trainers=2, batch=Batch(axes=(0, 1)))
    for options in ({"batch": Batch("local", axes=1)}, {"batch": Batch("local", axes=(0, None))}):
        with pytest.raises(
            ConfigError, match="axes=.* needs batch='exact'. With batch='local' leave out"
        ):
            dtrans.nccl2(*given, trainers=2, **options)
        with pytest.raises(
            ConfigError, match="axes=.* needs batch='exact'. With batch='local' leave out"
        ):
            dtrans.pserver(*given, pservers="127.0.0.1:1", trainers=2, **options)
        with pytest.raises(
            ConfigError, match="axes=.* needs batch='exact'. With batch='local' leave out"
        ):
            dtrans.pipeline(*given, num_stages=2, num_micro_batch=2, **options)
    _, given = traced("masked_mean")
    with pytest.raises(
        ConfigError,
        match=r"clip_local_norm=1.0 clips .* values that depend on all rows \(all_reduce for",
    ):
        dtrans.nccl2(*given, trainers=2, reduce=dtrans.Reduce(clip_local_norm=1.0))


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "name", ["masked_mean", "dropout_key_argument", "contrastive", "batch_norm_by_hand"]
)
def test_trainers_may_be_on_two_axes(name: str) -> None:
    case, given = traced(name)
    job = dtrans.nccl2(*given, trainers=4, trainers_per_node=2).on_mesh()
    state, loss, *_ = job.step(job.init(jax.random.key(0)), *case.batch(12))
    params, _, wanted, *_ = case.step(*case.init(jax.random.key(0)), *case.batch(12))
    compare((job.params(state), loss), (params, wanted))
