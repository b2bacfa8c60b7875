"""Results of pipelines: a job in stages computes the results of one device on the full batch."""

from __future__ import annotations

import functools
import itertools

import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from helpers import distance, tree_close, tree_equal
from pipeline_models import MODELS, Job, compiled_quickly, transformer

import dtrans
from dtrans.errors import BatchError, ConfigError, StateError


# schedules of the same programs
SHARED = (
    "PreferForward",
    "PreferBackward",
    "PreferBackwardOptimizer",
)


@pytest.fixture(autouse=True)
def quickly(x64):
    """Enable 64 bits, and compile programs fast."""
    with compiled_quickly():
        yield


# -- the whole product -----------------------------------------------------------------------------

FACTORS = {
    "model": (*MODELS,),
    "stages": (1, 2, 4),
    "micro": (1, 2, 4, 8),
    "schedule": ("1F1B", "Interleaved", "ZeroBubble"),
    "replicas": (1, 2),
    "way": ("simulate", "on_mesh"),
}
SMALL = MODELS | {"transformer": transformer(1, 8)}
SIZES = {"mlp": 1, "convnet": 2, "transformer": 3}  # number of programs


def pairwise(factors):
    """Return a part of the product of some factors.

    Every two values of two factors occur together at least once.
    """
    names = [*factors]
    product = [
        dict(zip(names, values, strict=True)) for values in itertools.product(*factors.values())
    ]
    pairs = lambda case: {((a, case[a]), (b, case[b])) for a, b in itertools.combinations(names, 2)}
    left = set().union(*map(pairs, product))
    while left:
        # among the cases that cover most pairs, choose the one with the fewest programs to compile
        size = lambda c: (
            SIZES[c["model"]] * c["stages"] * (2 if c["schedule"] == "Interleaved" else 1)
        )
        case = max(product, key=lambda c: (len(pairs(c) & left), -size(c)))
        left -= pairs(case)
        yield case


def check_case(models, case):
    """Compare all results after three steps with one device, for every schedule with the same
    programs."""
    of = models[case["model"]].job(16, gradients=True)
    names = SHARED if case["schedule"] == "1F1B" else (case["schedule"],)
    plan = dtrans.pipeline(
        *of.traced(),
        num_stages=case["stages"],
        num_micro_batch=case["micro"],
        replicas=case["replicas"],
        schedule=names[0],
        stages=dtrans.Stages(chunks=2 if case["schedule"] == "Interleaved" else 1),
    )
    want = of.on_one_device()
    job = getattr(plan, case["way"])()
    for name in names:
        tree_close(of.of(job.scheduled(name)), want, 1e-12)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.rotated] * (k % 2))
        for k, case in enumerate(pairwise(FACTORS))
    ],
    ids=lambda case: "-".join(map(str, case.values())),
)
def test_numbers_are_those_of_one_device(case):
    check_case(SMALL, case)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("schedule", FACTORS["schedule"])
@pytest.mark.parametrize("stages", FACTORS["stages"])
@pytest.mark.parametrize("model", FACTORS["model"])
def test_numbers_are_those_of_one_device_in_the_whole_product(model, stages, schedule):
    for i, (micro, replicas) in enumerate(itertools.product(FACTORS["micro"], FACTORS["replicas"])):
        way = FACTORS["way"][i % 2 ^ (micro in (2, 8))]  # each of the two, for one and two replicas
        check_case(
            MODELS, dict(zip(FACTORS, (model, stages, micro, schedule, replicas, way), strict=True))
        )


# -- one small job after the other -----------------------------------------------------------------


def job_of(loss, params, batch, tx=None, *, has_aux=False):
    """Return a job with given parameters."""
    tx = tx or optax.sgd(0.1, momentum=0.9)  # use small programs
    return Job(
        dtrans.make_train_step(loss, tx, has_aux=has_aux),
        lambda key: (params, tx.init(params)),
        batch,
    )


def of_step(step, params, opt_state, batch):
    return Job(step, lambda key: (params, opt_state), batch)


def planned(of, num_stages=2, num_micro_batch=2, replicas=2, **options):
    return flat_options.pipeline(
        *of.traced(),
        num_stages=num_stages,
        num_micro_batch=num_micro_batch,
        replicas=replicas,
        **options,
    )


def check(of, way="verify", rtol=1e-12, **options):
    """Return the plan after its verification, or after a comparison of its job with one device over
    three steps."""
    plan = planned(of, **options)
    if way == "verify":
        assert (report := plan.verify()), str(report)
    else:
        tree_close(of.of(getattr(plan, way)()), of.on_one_device(), rtol)
    return plan


def array(*shape, seed=0, dtype=None):
    """Return normal random numbers, scaled by the first dimension, as weights usually are."""
    x = np.random.default_rng([seed, *shape]).normal(size=shape)
    # NumPy draws them, because only tests enable 64 bits
    return np.asarray(x / np.sqrt(shape[0]) if len(shape) > 1 else x, dtype)


def net(*widths, dtype=None):
    """Return weights of layers."""
    return {
        f"w{i}": array(n, m, seed=i, dtype=dtype)
        for i, (n, m) in enumerate(itertools.pairwise(widths))
    }


def applied(params, x):
    for w in params.values():
        x = jnp.tanh(x @ w)
    return x


def rows(count=8, n=4, m=3, dtype=None):
    """Return a batch."""
    return array(count, n, seed=7, dtype=dtype) * count**0.5, array(count, m, seed=8, dtype=dtype)


def square(params, x, y):
    return jnp.mean((applied(params, x) - y) ** 2)


PARAMS = net(4, 6, 5, 3)


# -- keys ------------------------------------------------------------------------------------------


def noisy(params, x, y, key):
    """Return a loss with dropout after the first layer, and the mask."""
    key, other = jax.random.split(key)
    kept = jax.random.bernoulli(key, 0.7, (*x.shape[:1], 6))
    h = jnp.tanh(x @ params["w0"]) * kept / 0.7
    h = jnp.tanh(h @ params["w1"]) + 0.1 * jax.random.normal(other, (*x.shape[:1], 5))
    return jnp.mean((h @ params["w2"] - y) ** 2), kept


def test_a_key_is_used_as_it_is_by_one_micro_batch():
    of = job_of(noisy, PARAMS, (*rows(), jax.random.key(3)), has_aux=True)
    for way in ("simulate", "on_mesh"):
        job = getattr(planned(of, num_micro_batch=1, replicas=1), way)()
        got, want = of.of(job, 1), of.on_one_device(1)
        tree_equal(got[2:], want[2:])
        tree_close(got, want, 1e-12)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "micro,replicas,way",
    [(2, 1, "simulate"), (1, 2, "on_mesh"), (2, 2, "simulate"), (4, 2, "on_mesh")],
)
def test_a_key_is_folded_with_replica_and_micro_batch(micro, replicas, way):
    """Fold the key by hand, and compare with nccl2 mode with as many trainers and micro-steps."""
    tx = optax.sgd(0.1)
    x, y, key = batch = (*rows(16), jax.random.key(3))
    of = job_of(noisy, PARAMS, batch, tx, has_aux=True)
    plan = planned(of, num_micro_batch=micro, replicas=replicas, kind="local")
    params, _, loss, kept = of.of(getattr(plan, way)(), 1)

    n = 16 // (micro * replicas)
    losses, grads, masks = [], [], []
    for r, m in itertools.product(range(replicas), range(micro)):
        own = jax.random.fold_in(key, r) if replicas > 1 else key
        own = jax.random.fold_in(own, m) if micro > 1 else own
        part = slice((r * micro + m) * n, (r * micro + m + 1) * n)
        (value, mask), grad = jax.value_and_grad(noisy, has_aux=True)(PARAMS, x[part], y[part], own)
        losses.append(value)
        grads.append(grad)
        masks.append(mask)
    mean = jax.tree.map(lambda *xs: sum(xs) / len(xs), *grads)
    tree_equal(kept, jnp.concatenate(masks))
    tree_close(loss, sum(losses) / len(losses), 1e-12)
    tree_close(params, jax.tree.map(lambda p, g: p - 0.1 * g, PARAMS, mean), 1e-12)

    other = dtrans.nccl2(
        *of.traced(), trainers=replicas, num_micro_batch=micro, batch="local"
    ).simulate()
    state, *rest = other.step(other.init(key), *batch)
    tree_close((loss, kept), tuple(rest), 1e-12)
    tree_close(params, other.params(state), 1e-12)


def test_a_replicated_key_is_the_same_for_all():
    def loss(params, x, y, key):
        return square(params, x * jax.random.bernoulli(key, 0.7, x.shape[1:]), y)

    check(job_of(loss, PARAMS, (*rows(), jax.random.key(3))), unsplit_inputs=("key",))


# -- kinds of leaves -------------------------------------------------------------------------------


def test_16_bits_are_added_up_in_32():
    """Bfloat16 gradients of micro-batches are summed in 32 bits.

    Stages and one device round the values that they send to bfloat16. Sums have 32 bits, so only a
    mean over micro-batches is rounded again.
    """
    params = net(8, 16, 16, 4, dtype=jnp.bfloat16)
    of = job_of(square, params, rows(64, 8, 4, dtype=jnp.bfloat16), optax.sgd(1.0))
    got = of.of(planned(of, num_micro_batch=8).simulate(), 1)
    wide = jax.tree.map(lambda p: p.astype(jnp.float64), params)
    grads = jax.grad(square)(wide, *(x.astype(jnp.float64) for x in of.batch))
    for n in params:
        assert got[0][n].dtype == jnp.bfloat16
        # the gradient is rounded to 8 bits a few times on its path through three layers; the
        # parameter is rounded once
        error = np.abs(np.asarray(got[0][n], float) - np.asarray(wide[n] - grads[n]))
        assert np.all(
            error <= 2**-8 * np.abs(np.asarray(got[0][n], float)) + 2**-6 * np.abs(grads[n]).max()
        ), n


def test_sums_of_16_bits_do_not_stop_growing():
    """Each of 16 micro-batches adds 1/16 of the result.

    In bfloat16, a sum of 257 ones would be 256.
    """
    params = {"b": jnp.zeros((), jnp.bfloat16), "w": jnp.ones((2, 2), jnp.bfloat16)}
    loss = lambda params, x: (
        jnp.mean(jnp.sum(x @ params["w"], -1) * 0 + params["b"] * x[:, 0]) + 0 * params["b"]
    )
    x = jnp.asarray(np.stack([np.where(np.arange(512) == 0, 256.0, 1.0)] * 2, 1), jnp.bfloat16)
    of = job_of(loss, params, (x,), optax.sgd(1.0))
    plan = planned(of, num_micro_batch=512, replicas=1, reduce="sum")
    found = of.of(plan.simulate(), 1)[0]["b"]
    assert found == jnp.bfloat16(-(256 + 511))


def test_leaves_that_are_frozen_or_no_numbers():
    """Leaves are set to zero by the optimizer, integers, None, unread, or 0-d."""
    params = {
        "layers": net(4, 6, 5, 3),
        "frozen": array(4, 4, seed=5),
        "table": jnp.arange(4),
        "none": None,
        "unread": array(3),
        "scale": jnp.asarray(1.5),
        "shift": jnp.asarray(0.25),
    }

    def loss(params, x, y):
        h = x[:, params["table"]] @ params["frozen"] * params["scale"]
        return square(params["layers"], h, y - params["shift"])

    def labels(params):
        return {n: "still" if n == "frozen" else "moving" for n in params}

    for way in ("simulate", "on_mesh"):
        tx = optax.multi_transform(
            {"still": optax.set_to_zero(), "moving": optax.adam(0.1)}, labels
        )
        float_params = {n: p for n, p in params.items() if n != "table"}
        of = job_of(
            lambda p, x, y: loss(p | {"table": params["table"]}, x, y), float_params, rows(), tx
        )
        check(of, way)
        # integers have no optimizer state
        tx = optax.sgd(0.1, momentum=0.9)
        step = dtrans.make_train_step(loss, tx)
        check(of_step(step, params, tx.init(params | {"table": None}), rows()), way)


def counted(params, opt_state, x, y):
    """Return a step whose parameters include statistics and a count, which the step updates without
    gradients."""

    def loss(params):
        h = x @ params["w0"]
        mean, spread = jnp.mean(h, 0), jnp.mean(h**2, 0)
        seen = {
            "count": params["seen"]["count"] + 1,
            "mean": params["seen"]["mean"] * 0.9 + 0.1 * mean,
            "spread": params["seen"]["spread"] * 0.9 + 0.1 * spread,
        }
        h = jnp.tanh(h) @ params["w1"]
        return jnp.mean((jnp.tanh(h) @ params["w2"] - y) ** 2), seen

    (value, seen), grads = dtrans.value_and_grad(loss, has_aux=True)(params)
    weights = {n: params[n] - 0.1 * grads[n] for n in ("w0", "w1", "w2")}
    return weights | {"seen": seen}, opt_state, value


@pytest.mark.parametrize("way", ["simulate", "on_mesh"])
def test_batch_statistics_of_micro_batches_are_merged(way):
    """Each micro-batch computes statistics from the statistics before the step.

    Their mean equals one device's statistics.
    """
    start = PARAMS | {
        "seen": {"count": jnp.zeros((), int), "mean": jnp.zeros(6), "spread": jnp.ones(6)}
    }
    check(of_step(counted, start, (), rows()), way)
    start["seen"]["count"] = jnp.zeros(())
    for place in (1, 2):
        check(of_step(counted, start, (), rows(16)), way, num_stages=place, num_micro_batch=4)


# -- results ---------------------------------------------------------------------------------------


def with_results(params, x, y):
    """Return results of the first stage, of the last stage, of all rows, and of no row."""
    h = jnp.tanh(x @ params["w0"])
    predicted = applied({n: params[n] for n in ("w1", "w2")}, h)
    return jnp.mean((predicted - y) ** 2), {
        "bias": params["w1"][0],
        "early": jnp.mean(h),
        "hidden": h,
        "hits": jnp.sum(predicted > 0),
        "predicted": predicted,
        "rows": x.shape[0],
        "seven": 7,
        "worst": jnp.max(h),
    }


MERGE = {"aux/hits": "sum", "aux/worst": "max", "aux/bias": "same"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", ["simulate", "on_mesh"])
@pytest.mark.parametrize(
    "micro,replicas", [pytest.param(2, 1, marks=pytest.mark.rotated), (1, 2), (4, 2)]
)
def test_results_are_those_of_the_whole_batch(micro, replicas, way):
    of = job_of(with_results, PARAMS, rows(16), has_aux=True)
    plan = check(of, way, num_micro_batch=micro, replicas=replicas, merge=MERGE)
    assert plan.model.merges["aux/predicted"] == plan.model.merges["aux/hidden"] == "concat"
    assert plan.model.merges["aux/early"] == "mean" and plan.model.merges["aux/rows"] == "sum"


@pytest.mark.parametrize("way", ["simulate", "on_mesh"])
def test_a_result_of_the_first_stage_is_merged_there(way):
    """The result is not sent to other stages."""
    loss = scoped(
        lambda p, v: {
            "h": (h := jnp.tanh(v["x"] @ p["w0"])),
            "seen": {"each": h, "mean": jnp.mean(h, 0)},
        },
        layer(1),
        lambda p, v: (jnp.mean((v["h"] @ p["w2"] - v["y"]) ** 2), v["seen"]),
    )
    plan = check(job_of(loss, net(4, 4, 4, 4), TARGETS, has_aux=True), way, num_stages=3)
    assert [[*s.results] for s in plan.step_programs.stages] == [
        ["aux/each", "aux/mean"],
        [],
        ["loss"],
    ]
    assert [len(s.sends) for s in plan.step_programs.stages] == [1, 1, 0]


def test_a_result_that_nobody_can_merge_is_each_replicas_own():
    of = job_of(with_results, PARAMS, rows(16), has_aux=True)
    for way in ("simulate", "on_mesh"):
        plan = planned(of, num_micro_batch=1, merge={"aux/worst": "max", "aux/hits": "each"})
        hits = of.of(getattr(plan, way)(), 1)[-1]["hits"]
        predicted = of.on_one_device(1)[-1]["predicted"]
        assert hits.tolist() == [
            int((half > 0).sum()) for half in np.split(np.asarray(predicted), 2)
        ]


def test_what_becomes_of_integers_must_be_said_for_micro_batches():
    of = job_of(with_results, PARAMS, rows(16), has_aux=True)
    with pytest.raises(
        ConfigError, match="aux/hits is int64.*has 2 values, one for each micro-step;.*merge="
    ):
        planned(of, merge={"aux/worst": "max"})
    with pytest.raises(
        ConfigError, match="merge\\['aux/hits'\\]='each' needs one value .* has 2 values"
    ):
        planned(of, merge={"aux/hits": "each"})
    with pytest.raises(ConfigError, match="aux/wrost"):
        planned(of, merge={"aux/wrost": "max"})


def test_results_of_gradients():
    def step(params, opt_state, x, y):
        (value, h), grads = dtrans.value_and_grad(
            lambda p: (square(p, x, y), jnp.mean(x @ p["w0"])), has_aux=True
        )(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        flags = {n: jnp.max(g) > 0 for n, g in grads.items()}
        return (
            params,
            opt_state,
            {"loss": value, "norm": optax.tree.norm(grads), "flags": flags, "h": h, "g": grads},
        )

    for way in ("simulate", "on_mesh"):
        check(of_step(step, PARAMS, (), rows()), way)
        check(of_step(step, PARAMS, (), rows()), way, replicas=1, num_micro_batch=4)


@pytest.mark.parametrize("micro,replicas", [(4, 1), (1, 2), (2, 2)])
def test_a_loss_that_is_a_sum_is_added_up(micro, replicas):
    total = lambda params, x, y: jnp.sum((applied(params, x) - y) ** 2)
    of = job_of(total, PARAMS, rows(), optax.sgd(0.01))
    check(of, reduce="sum", num_micro_batch=micro, replicas=replicas)


def test_arrays_that_are_not_of_rows():
    def loss(params, x, y, scales, factor):
        return square(params, x * scales, y) * factor

    batch = (*rows(), jnp.asarray([1.0, 0.5, 2.0, 1.0]), jnp.asarray(0.75))
    for way in ("simulate", "on_mesh"):
        check(job_of(loss, PARAMS, batch), way, unsplit_inputs=("scales",))


# -- optimizers ------------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 5)),
    "clipped adam": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "lamb": lambda: optax.lamb(0.1),
    "muon": lambda: optax.contrib.muon(0.1),
    "several steps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "clip each, noise-free lion": lambda: optax.chain(optax.clip(0.01), optax.lion(0.1)),
    "ema": lambda: optax.chain(optax.adam(0.1), optax.ema(0.9)),
}


# each kind of equation in an update occurs in at least one of these optimizers
FIRST = ("adamw", "clipped adam", "adafactor", "several steps")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name",
    [*FIRST, *(pytest.param(n, marks=pytest.mark.rotated) for n in OPTIMIZERS if n not in FIRST)],
)
def test_optimizers(name):
    of = job_of(square, net(4, 6, 5, 3), rows(), OPTIMIZERS[name]())
    check(of, num_stages=3, replicas=1)


def test_a_state_whose_new_value_is_a_constant_is_held():
    """JAX stores the array of a constant schedule as a constant of the jaxpr, so no stage computes
    it."""
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=optax.constant_schedule(0.1))
    of = job_of(square, PARAMS, rows(), tx)
    job = check(of, replicas=1).simulate()
    state, _ = job.step(job.init(jax.random.key(0)), *of.batch)
    assert job.opt_state(state).hyperparams["learning_rate"] == 0.1


def test_a_clip_in_the_optimizer_is_of_reduced_gradients_and_one_before_of_each_replicas():
    """As in EPL, gradients are (3, 0) and (0, 4) on two replicas.

    A clip before the reduction limits both to 1.
    """
    params = {"w": jnp.zeros(2), "v": jnp.zeros(())}
    x = jnp.asarray([[3.0, 0.0], [0.0, 4.0]])
    loss = lambda params, x: jnp.mean(x @ params["w"]) + 0 * params["v"] ** 2
    after = job_of(loss, params, (x,), optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)))
    before = job_of(loss, params, (x,), optax.sgd(1.0))
    for way in ("simulate", "on_mesh"):
        for of, options, want in (
            (after, {}, (0.6, 0.8)),
            (before, {"clip_local_norm": 1.0}, (0.5, 0.5)),
        ):
            plan = planned(of, num_micro_batch=1, **options)
            got = of.of(getattr(plan, way)(), 1)[0]["w"]
            assert distance(got, -jnp.asarray(want)) < 1e-12


def test_a_local_clip_is_of_all_stages_and_of_sums_over_micro_batches():
    of = job_of(square, PARAMS, rows(16), optax.sgd(1.0))
    x, y = of.batch
    most = 0.05
    got = of.of(planned(of, num_stages=3, clip_local_norm=most).simulate(), 1)[0]
    clipped = []
    for half in (slice(0, 8), slice(8, 16)):
        grads = jax.grad(square)(PARAMS, x[half], y[half])
        norm = optax.tree.norm(grads)
        assert norm > most
        clipped.append(jax.tree.map(lambda g, n=norm: g * most / n, grads))
    tree_close(got, jax.tree.map(lambda p, a, b: p - (a + b) / 2, PARAMS, *clipped), 1e-12)


CLIPS = [
    ("simulate", {}),
    ("on_mesh", {"replicas": 1, "schedule": "ZeroBubble"}),
    ("on_mesh", {"offload": True, "replicas": 1}),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way,options", CLIPS, ids=["replicas", "weights apart", "on the host"])
def test_a_local_clip_of_each_micro_batch(way, options):
    """As in EPL by default, the gradients of each micro-batch over all stages are clipped before
    the sum."""
    of = job_of(square, PARAMS, rows(16), optax.sgd(1.0))
    x, y = of.batch
    parts = [
        jax.grad(square)(PARAMS, *of) for of in zip(np.split(x, 4), np.split(y, 4), strict=True)
    ]
    norms = sorted(float(optax.tree.norm(g)) for g in parts)
    most = (norms[1] + norms[2]) / 2  # two of the four are clipped
    options = {"num_micro_batch": 4 // options.get("replicas", 2)} | options
    plan = planned(of, num_stages=3, clip_local_norm=most, clip_local_per="micro_batch", **options)
    assert any(
        note.startswith("the gradients of each micro-batch are clipped to ") for note in plan.notes
    )
    got = of.of(getattr(plan, way)(), 1)[0]
    factors = [min(1, most / float(optax.tree.norm(g))) for g in parts]
    clipped = [
        jax.tree.map(lambda g, by=by: g * by, of) for of, by in zip(parts, factors, strict=True)
    ]
    tree_close(got, jax.tree.map(lambda p, *gs: p - sum(gs) / 4, PARAMS, *clipped), 1e-12)
    whole = of.of(planned(of, num_stages=3, clip_local_norm=most, **options).simulate(), 1)[0]
    assert distance(whole["w0"], got["w0"]) > 1e-6, "the two clips differ"


@pytest.mark.parametrize("way", ["simulate", "on_mesh"])
@pytest.mark.parametrize("to,unit,least", [("fp16", 2.0**-11, 2.0**-25), ("bf16", 2.0**-8, 0.0)])
def test_what_is_compressed_is_as_far_off_as_its_type_says(to, unit, least, way):
    """The bound is the bound of nccl2 mode: each replica rounds its sum once, and each addition
    rounds once."""
    count = 2
    of = job_of(square, PARAMS, rows(16), optax.sgd(1.0))
    x, y = of.batch
    got = of.of(getattr(planned(of, replicas=count, compress=to, compress_scale=8.0), way)(), 1)[0]
    grads = [jax.grad(square)(PARAMS, x[half], y[half]) for half in (slice(0, 8), slice(8, 16))]
    errors = []
    for n, p in PARAMS.items():
        sent = np.stack([np.asarray(g[n]) / count for g in grads])
        error = np.abs(np.asarray(p - got[n]) - sent.sum(0))
        assert np.all(error <= 1.05 * count * unit * np.abs(sent).sum(0) + least * count / 8), n
        errors.append((error / np.abs(sent).mean()).max())
    assert max(errors) > unit / 100, "nothing was rounded"


# -- sharding in a stage ---------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", ["simulate", "on_mesh"])
@pytest.mark.parametrize("replicas", [2, pytest.param(4, marks=pytest.mark.rotated)])
@pytest.mark.parametrize("optimizer", ["adamw", "clipped adam"])
def test_replicas_that_keep_slices_of_the_state(replicas, way, optimizer):
    """Leaves of 5 and 7 rows are padded for 2 and 4 replicas."""
    of = job_of(square, net(5, 7, 6, 3), rows(16, 5), OPTIMIZERS[optimizer]())
    plan = planned(of, replicas=replicas, sharding_stage=1, min_slice_size=1)
    job = getattr(plan, way)()
    tree_close(of.of(job), of.on_one_device(), 1e-12)
    if way == "on_mesh":
        state = job.init(jax.random.key(0))
        (mu,) = [x for n, x in state.opt_state.items() if n.endswith("mu/w0")]
        whole = -(-5 // replicas) * replicas * 7
        assert [s.data.size for s in mu.addressable_shards] == [whole // replicas] * replicas


# -- batches and states ----------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["simulate", "on_mesh"])
def test_another_batch_size_than_was_traced(way):
    of = job_of(with_results, PARAMS, rows(8), has_aux=True)
    job = getattr(planned(of, merge=MERGE), way)()
    for count in (16, 4, 8):
        other = Job(of.step, of.init, rows(count))
        tree_close(other.of(job), other.on_one_device(), 1e-12)
    with pytest.raises(
        BatchError, match="10 rows; expected a multiple of 4 .num_micro_batch=2 times replicas=2"
    ):
        job.step(job.init(jax.random.key(0)), *rows(10))


def test_a_donated_state_is_refused_and_one_that_is_not_is_kept():
    of = job_of(square, PARAMS, rows())
    plan = planned(of)
    job = plan.on_mesh()
    old = job.init(jax.random.key(0))
    new, loss = job.step(old, *of.batch)
    with pytest.raises(
        StateError, match="already used this state, and .*w0.* was donated .*donate=False"
    ):
        job.step(old, *of.batch)
    kept = plan.on_mesh(donate=False)
    state = kept.init(jax.random.key(0))
    first, again = kept.step(state, *of.batch), kept.step(state, *of.batch)
    tree_equal(first, again)
    tree_equal((new, loss), first)


def test_states_of_something_else_are_refused():
    of = job_of(square, PARAMS, rows())
    job = planned(of).simulate()
    state = job.init(jax.random.key(0))
    with pytest.raises(
        StateError, match="step takes the state that init or step returned, not dict"
    ):
        job.step(state.params, *of.batch)
    other = planned(job_of(square, net(4, 3), rows()), num_stages=1).simulate()
    with pytest.raises(StateError, match="this state belongs to another job: it lacks .*w1"):
        job.step(other.init(jax.random.key(0)), *of.batch)


def test_schedules_give_the_same_numbers_bit_for_bit():
    of = job_of(square, PARAMS, rows(16))
    job = planned(of, num_micro_batch=4, replicas=1).on_mesh()
    first, *others = (of.of(job.scheduled(name)) for name in SHARED)
    for other in others:
        tree_equal(other, first)


# -- models ----------------------------------------------------------------------------------------


def scoped(*stages):
    """Return a loss from functions of (params, values so far).

    Each function is a stage, and the last returns the loss.
    """

    def loss(params, x, y):
        values = {"x": x, "y": y}
        for i, stage in enumerate(stages):
            with dtrans.replicate(name=f"stage{i}"):
                made = stage(params, values)
            values = values | made if isinstance(made, dict) else made
        return values

    return loss


def layer(i, source="h"):
    return lambda p, v: {"h": jnp.tanh(v[source] @ p[f"w{i}"])}


SQUARES = net(4, 4, 4, 4, 4)
TARGETS = rows(8, 4, 4)


def test_a_value_that_skips_two_stages():
    """Only stage 3 reads a value of stage 0.

    The stages in between forward the value and its gradient.
    """
    loss = scoped(
        lambda p, v: {"h": (h := v["x"] @ p["w0"]), "skip": jnp.sin(h)},
        layer(1),
        layer(2),
        lambda p, v: jnp.mean((v["h"] @ p["w3"] + v["skip"] - v["y"]) ** 2),
    )
    plan = check(job_of(loss, SQUARES, TARGETS), num_stages=4, replicas=1)
    sent = [s.sends for s in plan.step_programs.stages]
    assert [len(s) for s in sent] == [2, 2, 2, 0]
    assert set(sent[0]) & set(sent[1]) & set(sent[2]), "one value goes all the way"
    check(job_of(loss, SQUARES, TARGETS), "on_mesh", num_stages=4)


def test_a_value_that_three_stages_read():
    loss = scoped(
        lambda p, v: {"h": (h := v["x"] @ p["w0"]), "skip": h},
        lambda p, v: {"h": jnp.tanh(v["h"] @ p["w1"]) + v["skip"]},
        lambda p, v: {"h": jnp.tanh(v["h"] @ p["w2"]) * v["skip"]},
        lambda p, v: jnp.mean((v["h"] @ p["w3"] + v["skip"] - v["y"]) ** 2),
    )
    for options in ({}, {"schedule": "ZeroBubble"}):
        check(job_of(loss, SQUARES, TARGETS), num_stages=4, replicas=1, **options)


def test_a_parameter_that_three_stages_read():
    loss = scoped(
        lambda p, v: {"h": jnp.tanh(v["x"] @ p["w0"])},
        lambda p, v: {"h": jnp.tanh(v["h"] @ p["w0"] @ p["w1"])},
        lambda p, v: jnp.mean((v["h"] @ p["w0"].T - v["y"]) ** 2),
    )
    for options in (
        {},
        {"replicas": 1},
        {"schedule": "ZeroBubble"},
        {"sharding_stage": 1, "min_slice_size": 1},
    ):
        plan = check(job_of(loss, net(4, 4, 4), TARGETS), num_stages=3, **options)
        assert plan.model.users["params/w0"] == (0, 1, 2) and plan.model.homes["params/w0"] == 0


def test_the_first_stage_holds_a_parameter_that_it_reads_and_makes_no_gradient_of():
    """Stage 0 reads the parameter through `stop_gradient`. Stage 1 computes the parameter's
    gradient."""
    loss = scoped(
        lambda p, v: {"h": jnp.tanh(v["x"] @ p["w0"] @ jax.lax.stop_gradient(p["w1"]))},
        lambda p, v: jnp.mean((v["h"] @ p["w1"] - v["y"]) ** 2),
    )
    for way in ("simulate", "on_mesh"):
        plan = check(job_of(loss, net(4, 4, 4), TARGETS), way)
        assert plan.model.homes["params/w1"] == 0 and 1 in plan.model.users["params/w1"]


def test_a_loss_that_is_made_before_the_last_stage():
    """Stage 1 computes the loss.

    Stage 2 computes only an auxiliary result, without a derivative.
    """
    loss = scoped(
        layer(0, "x"),
        lambda p, v: {"loss": jnp.mean((v["h"] @ p["w1"] - v["y"]) ** 2)},
        lambda p, v: (
            v["loss"],
            {"root": jnp.sqrt(v["loss"]), "late": jnp.tanh(v["h"] @ p["w2"] @ p["w3"])},
        ),
    )
    for way, options in (
        ("simulate", {}),
        ("on_mesh", {}),
        ("simulate", {"schedule": "ZeroBubble"}),
    ):
        merge = {"aux/root": "mean"}
        of = job_of(loss, SQUARES, TARGETS, has_aux=True)
        plan = planned(of, num_stages=3, merge=merge, **options)
        assert ["loss" in s.results for s in plan.step_programs.stages] == [False, True, False]
        got, want = of.of(getattr(plan, way)()), of.on_one_device()
        tree_close(got[:3], want[:3], 1e-12)
        # the mean of roots is not the root of the mean
        tree_close(got[3]["late"], want[3]["late"], 1e-12)


def test_a_parameter_of_no_stage_that_makes_gradients_has_a_home():
    """Only the last stage reads the parameter, for an auxiliary result.

    The optimizer computes its decay.
    """
    loss = scoped(
        layer(0, "x"),
        lambda p, v: (jnp.mean((v["h"] - v["y"]) ** 2), v["h"] @ p["w1"]),
    )
    check(job_of(loss, net(4, 4, 4), TARGETS, optax.adamw(0.1), has_aux=True))


@jax.custom_vjp
def doubled(x):
    return jnp.sin(x)


doubled.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda cos, ct: (2 * ct * cos,))


@jax.custom_jvp
def tripled(x):
    return jnp.sin(x)


tripled.defjvps(lambda dx, _, x: 3 * jnp.cos(x) * dx)


def test_rules_of_derivatives_are_used():
    """Custom derivative rules double, triple or stop the gradient.

    Compare with a computation by hand, and with one device.
    """

    def loss(params, x, y, one=doubled, other=tripled, stop=jax.lax.stop_gradient):
        h = one(x @ params["w0"])
        h = other(h @ params["w1"]) + stop(h @ params["w1"])
        return jnp.mean((h @ params["w2"] - y) ** 2)

    of = job_of(loss, net(4, 4, 4, 3), rows(), optax.sgd(1.0))
    for options in ({}, {"num_stages": 3, "replicas": 1}, {"schedule": "ZeroBubble"}):
        check(of, **options)
    plain = functools.partial(loss, one=jnp.sin, other=jnp.sin)
    got = of.of(planned(of, num_stages=3).simulate(), 1)[0]
    grads = jax.grad(plain)(net(4, 4, 4, 3), *of.batch)
    tree_close(got["w2"], net(4, 4, 4, 3)["w2"] - grads["w2"], 1e-12)
    tree_close(got["w1"], net(4, 4, 4, 3)["w1"] - 3 * grads["w1"], 1e-12)
    tree_close(got["w0"], net(4, 4, 4, 3)["w0"] - 6 * grads["w0"], 1e-12)


def test_jit_and_checkpoint_and_loops_in_the_loss():
    """Divide a model before and after a checkpointed layer, a jitted layer and a scan over layers."""

    def loss(params, x, y):
        h = jax.checkpoint(lambda w, x: jnp.tanh(jnp.sin(x @ w)))(params["w0"], x)
        h = jax.jit(lambda w, x: jnp.tanh(x @ w))(params["w1"], h)
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, params["stack"])
        h = jax.lax.cond(params["flag"] > 0, jnp.sin, jnp.cos, h)
        return jnp.mean((h @ params["w2"] - y) ** 2)

    params = net(4, 4, 4, 3) | {"stack": array(3, 4, 4), "flag": jnp.asarray(1.0)}
    for way in ("simulate", "on_mesh"):
        check(job_of(loss, params, rows()), way, num_stages=3)


def test_a_step_that_is_jitted():
    of = job_of(square, PARAMS, rows())
    check(Job(jax.jit(of.step), of.init, of.batch))
    of.on_one_device(1)  # JAX's cache of that step must not replace the captured step
    check(Job(jax.jit(of.step), jax.jit(of.init), of.batch), "on_mesh")


def looped(params, x, y):
    """Return a scan over five layers, which also stacks a result of each layer."""

    def layer(h, p):
        h = h + jnp.tanh(h @ p["w"] + p["b"])
        return h, jnp.mean(h, -1)

    h, means = jax.lax.scan(layer, x @ params["first"], params["layers"])
    return jnp.mean((h @ params["last"] - y) ** 2) + 0.1 * jnp.mean(means**2)


LAYERS = {
    "first": array(4, 6),
    "layers": {"w": array(5, 6, 6), "b": array(5, 6)},
    "last": array(6, 3),
}
LOOPS = [
    ("adamw", "simulate", {}),
    ("adamw", "on_mesh", {"num_stages": 3}),
    ("adamw", "simulate", {"schedule": "ZeroBubble", "replicas": 1}),
    ("adamw", "simulate", {"schedule": "Interleaved", "chunks": 2, "replicas": 1}),
    ("clipped adam", "on_mesh", {"num_stages": 3, "replicas": 1}),
    ("clipped adam", "simulate", {"num_micro_batch": 1}),
    ("muon", "simulate", {"replicas": 1}),
    ("adamw", "on_mesh", {"sharding_stage": 1, "min_slice_size": 1}),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "optimizer,way,options",
    [pytest.param(*of, marks=[pytest.mark.rotated] * (k % 2)) for k, of in enumerate(LOOPS)],
)
def test_a_scan_over_layers_is_cut(optimizer, way, options):
    """Each stage stores its layers of a stacked parameter, if the optimizer can update them alone.

    Otherwise one stage stores the stacked parameter.
    """
    of = job_of(looped, LAYERS, rows(), OPTIMIZERS[optimizer]())
    plan = check(
        of, way, rtol=1e-11 if optimizer == "muon" else 1e-12, flops_per_byte=0.0, **options
    )
    loops = [
        [e.primitive.name for e in s.forward.jaxpr.jaxpr.eqns].count("scan")
        for s in plan.step_programs.stages
    ]
    assert max(loops) == 1 and sum(loops) > 1
    owners = lambda leaf: len(
        {home for n, home in plan.model.homes.items() if n.startswith(f"params/layers/{leaf}")}
    )
    # Muon treats only matrices: a stack of biases is one matrix, and stacked weights are updated by
    # Adam
    assert (owners("w"), owners("b")) == (sum(loops), 1 if optimizer == "muon" else sum(loops))


@pytest.mark.soak
def test_a_transformer_whose_layers_are_a_scan():
    check(transformer(2, 8, stacked=True).job(8), replicas=1)


def test_parameters_from_a_key():
    """Each stage initializes its parameters from the key.

    Together they equal one device. One array occurs twice.
    """

    def init(key):
        first, second = jax.random.split(key)
        w = jax.random.normal(first, (4, 4)) / 2
        params = {"w0": w, "w1": w, "w2": jax.random.normal(second, (4, 3)) / 2}
        return params, optax.adam(0.1).init(params)

    of = Job(dtrans.make_train_step(square, optax.adam(0.1)), init, rows())
    plan = planned(of, num_stages=3)
    for job in (plan.simulate(), plan.on_mesh()):
        state = job.init(jax.random.key(0))
        # compile, as for stages; evaluated op by op, the last bit may differ
        startup = plan.startup
        tree_equal(
            (job.params(state), job.opt_state(state)),
            startup.out.unflatten(startup.compiled(jax.random.key(0))),
        )
        tree_close(of.of(job), of.on_one_device(), 1e-12)
