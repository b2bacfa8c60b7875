"""Parts of pipelines: the programs of stages, saved and sent values, the placement of arrays, and
errors."""

from __future__ import annotations

import functools
import gc
import math
import re
from collections import Counter

import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import tree_close, tree_equal
from pipeline_models import MODELS, Job, Model, compiled_quickly, transformer

import dtrans
from dtrans._jax import equations
from dtrans.errors import BatchError, ConfigError, GradientError, TraceError
from dtrans.pipeline_parallel.task import Task
from dtrans.run.pipeline_parallel.profile import measured, timed
from dtrans.step.halves import GRAD


SHARED = ("PreferForward", "PreferBackward", "PreferBackwardOptimizer")
PRODUCTS = ("dot_general", "conv_general_dilated")


@pytest.fixture(autouse=True)
def quickly():
    with compiled_quickly():
        yield


@functools.cache
def traced(name, rows=16, *, stacked=False, optimizer=optax.adam):
    """Return a job, and the arguments of its plan. No dimension of a weight is 13 or 17."""
    of = (transformer(4, 16, stacked=True) if stacked else MODELS[name]).job(rows, optimizer(1e-2))
    return of, of.traced()


def planned(name="mlp", num_stages=4, rows=16, *, stacked=False, optimizer=optax.adam, **options):
    main, startup = traced(name, rows, stacked=stacked, optimizer=optimizer)[1]
    return flat_options.pipeline(main, startup, num_stages=num_stages, **options)


def programs(plan):
    return [
        p
        for s in plan.step_programs.stages
        for p in (s.forward, s.backward, s.weights)
        if p is not None
    ]


def primitives(*found):
    """Return the number of equations of each primitive in programs and their bodies."""
    return Counter(e.primitive.name for p in found for e in equations(p.jaxpr))


def nbytes(t):
    return math.prod(t.shape) * t.dtype.itemsize


# -- programs --------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_everything_is_computed_once(name, stages, split):
    """The stages together contain all equations of the loss, and as many products as one device
    computes."""
    of, _ = traced(name)
    plan = planned(
        name, stages, num_micro_batch=2, schedule="ZeroBubble" if split else "PreferBackward"
    )
    assert sum(s.eqns for s in plan.step_programs.stages) == len(plan.model.stage_of)
    assert [s.eqns for s in plan.step_programs.stages] == [
        plan.model.stage_of.count(k) for k in range(stages)
    ]
    assert min(s.eqns for s in plan.step_programs.stages) > 0
    params, batch = jax.eval_shape(of.init, jax.random.key(0))[0], MODELS[name].batch(8)
    whole = Counter(
        e.primitive.name
        for e in equations(jax.make_jaxpr(jax.value_and_grad(MODELS[name].loss))(params, *batch))
    )
    found = primitives(*programs(plan))
    for product in PRODUCTS:
        assert found[product] == whole[product]
    # the transcendental functions of the forward pass, and of its derivatives
    for function in ("exp", "tanh", "log", "rsqrt"):
        assert found[function] == whole[function], function


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_cotangents_and_weights_together_are_the_backward(name, stages):
    """The two backward programs of ZeroBubble contain the equations of the single one.

    Each product is in one of them.
    """
    one = planned(name, stages, num_micro_batch=2).step_programs.stages
    two = planned(name, stages, num_micro_batch=2, schedule="ZeroBubble").step_programs.stages
    for whole, parts in zip(one, two, strict=True):
        assert whole.weights is None and parts.weights is not None
        first, second = primitives(parts.backward), primitives(parts.weights)
        same, found = primitives(whole.backward), first + second
        numbers = {"broadcast_in_dim", "iota"}  # a constant is created again, and not saved
        assert {k: n for k, n in found.items() if k not in numbers} == {
            k: n for k, n in same.items() if k not in numbers
        }
        made = {n for n in parts.backward.out_names if n.startswith("@between/")}
        assert made == {n for n in parts.weights.in_names if n.startswith("@between/")}
        assert not any(n.removesuffix(GRAD) in parts.leaves for n in parts.backward.out_names)
        assert all(n.removesuffix(GRAD) in parts.leaves for n in parts.weights.out_names)


CASES = [(name, options) for name in MODELS for options in ({}, {"schedule": "ZeroBubble"})]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name,options", CASES)
def test_backward_reads_what_forward_kept_and_what_comes_back(name, options):
    stages = planned(name, 4, num_micro_batch=2, **options).step_programs.stages
    for s, after in zip(stages, [*stages[1:], None], strict=True):
        there = {
            *s.forward.in_names,
            *s.forward.out_names,
            *s.receives,
            *(n + GRAD for n in s.leaves),
        }
        back = {n for n in after.backward.out_names if n.startswith("@value/")} if after else set()
        assert back <= {n + GRAD for n in s.sends}
        assert set(s.backward.in_names) <= there | back
        if s.weights is not None:
            assert set(s.weights.in_names) <= there | back | set(s.backward.out_names)
        assert set(s.params) <= {*s.forward.in_names, *s.backward.in_names}
        kept = {n for n in s.forward.out_names if n.startswith("@residual/")}
        assert kept <= set(s.saved), "it keeps what nobody reads"
        assert s.receives == (stages[s.index - 1].sends if s.index else ())


def low(loss):
    """Return a loss in 16 bits."""

    def cast(*given):
        small = lambda x: x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x
        return loss(*jax.tree.map(small, given)).astype(jnp.float32)

    return cast


@pytest.mark.sampled(1)
@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_no_weights_are_kept_for_each_micro_batch(name, cast):
    """Each saved value belongs to a micro-batch of 13 rows.

    Weights, their transposes and their casts are not saved.
    """
    model = MODELS[name]
    of = Model(low(model.loss) if cast else model.loss, model.params, model.batch).job(26)
    plan = dtrans.pipeline(*of.traced(), num_stages=3, num_micro_batch=2)
    for s in plan.step_programs.stages:
        types = {**s.forward.inputs, **s.forward.outputs}
        assert not {*s.saved} & {*s.params}
        for n in s.saved:
            assert 13 in types[n].shape or math.prod(types[n].shape) % 13 == 0, (n, types[n])


def test_what_is_sent_is_counted():
    """Stages of an MLP send activations of 8 rows with 32 numbers. The last stage sends nothing."""
    plan = planned("mlp", 4, num_micro_batch=2)
    assert [s.sends for s in plan.stages] == [8 * 32 * 4] * 3 + [0]
    wide = planned("transformer", 2, num_micro_batch=4)
    assert wide.stages[0].sends == 4 * 6 * 16 * 4


# -- what is kept ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running():
    """Return a job of four stages and eight micro-batches on one device, and its state."""
    with compiled_quickly():
        job = planned("mlp", 4, num_micro_batch=8).simulate()
        return job, job.init(jax.random.key(0))


PEAKS = {
    "PreferForward": (8, 8, 8, 8),
    "PreferBackward": (4, 3, 2, 1),
    "PreferBackwardOptimizer": (5, 4, 3, 1),
}


@pytest.mark.parametrize("schedule", SHARED)
def test_micro_batches_in_flight_are_as_planned(schedule, running):
    job, state = running
    job = job.scheduled(schedule)
    made, found = measured(job, state, *traced("mlp")[0].batch)
    assert found.peak == job.plan.schedule.peak == PEAKS[schedule]
    assert tuple(s.peak for s in job.plan.stages) == PEAKS[schedule]
    tree_equal(made, job.step(state, *traced("mlp")[0].batch))


@pytest.mark.parametrize(
    "schedule,stages,chunks,peak",
    [("ZeroBubble", 4, 1, (4, 4, 4, 4)), ("Interleaved", 2, 2, (5, 3))],
)
def test_micro_batches_in_flight_are_as_planned_with_programs_of_their_own(
    schedule, stages, chunks, peak
):
    plan = planned("mlp", stages, num_micro_batch=8, schedule=schedule, chunks=chunks)
    job = plan.simulate()
    _, found = measured(job, job.init(jax.random.key(0)), *traced("mlp")[0].batch)
    assert found.peak == plan.schedule.peak == peak


def test_nothing_is_left_of_a_micro_batch(running):
    """After a step, slots contain only the state, the results, and constant values."""
    job, state = running
    program, env = job.prepare(state, *traced("mlp")[0].batch)
    job.execute(program, env)
    stay = {
        *program.state.values(),
        *program.fixed,
        *program.inputs.values(),
        *(slot for slot, *_ in program.results.values()),
    }
    assert {i for i, x in enumerate(env) if x is not None} <= stay
    assert not any(env[slot] is not None for slots in program.saved.values() for slot in slots)


@pytest.mark.soak
def test_one_forward_one_backward_keeps_less_than_half():
    """For a transformer with 16 micro-batches, count the bytes on each device that wait for
    backward or are being sent."""
    of, _ = traced("transformer")
    job = planned("transformer", 4, num_micro_batch=16).simulate()
    state = job.init(jax.random.key(0))
    few, many = (
        measured(job.scheduled(n), state, *of.batch)[1] for n in ("PreferBackward", "PreferForward")
    )
    assert all(a < b / 2 for a, b in zip(few.peak_bytes, many.peak_bytes, strict=True))
    kept = [s.saves for s in job.plan.stages]
    assert all(b >= 16 * k for b, k in zip(many.peak_bytes, kept, strict=True))
    assert all(b >= n * k for b, n, k in zip(few.peak_bytes, few.peak, kept, strict=True))


@pytest.mark.parametrize("schedule", ["PreferBackward", "ZeroBubble"])
def test_tasks_are_timed_where_they_are(schedule):
    of, _ = traced("mlp")
    plan = planned("mlp", 2, num_micro_batch=4, schedule=schedule)
    job = plan.on_mesh(donate=False)
    state = job.init(jax.random.key(0))
    made, play = timed(job, state, *of.batch)
    tree_close(made, job.step(state, *of.batch), 1e-6)
    # the first stage sends no cotangents, so with a split backward pass all its work is in W
    idle = {Task("B", 0, m) for m in range(4)} if schedule == "ZeroBubble" else set()
    for device, order in enumerate(plan.schedule.orders):
        assert [t.task for t in play if t.device == device] == [t for t in order if t not in idle]
    ends = {t.task: t.end for t in play}
    for t in play:
        assert t.start <= t.end
        assert all(
            ends[need] <= t.start for need in plan.schedule.needs(t.task) if need not in idle
        )


# -- memory ----------------------------------------------------------------------------------------


def live_bytes():
    """Return the bytes of all live arrays, by device."""
    gc.collect()
    found = Counter()
    for x in jax.live_arrays():
        shape = x.sharding.shard_shape(x.shape)
        for d in x.sharding.device_set:
            found[d] += math.prod(shape) * x.dtype.itemsize
    return found


MEMORY = [
    ("mlp", {"num_stages": 4}),
    ("transformer", {"num_stages": 4}),
    ("transformer", {"num_stages": 4, "stacked": True}),
    ("mlp", {"num_stages": 2, "replicas": 2}),
    ("mlp", {"num_stages": 2, "replicas": 4, "sharding_stage": 1, "min_slice_size": 1}),
    ("mlp", {"num_stages": 2, "schedule": "Interleaved", "chunks": 2}),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name,options", MEMORY)
def test_devices_hold_what_their_stages_have(name, options):
    """After init, and after a step that may donate its state, memory is minimal: the state and the
    batches."""
    of, _ = traced(name, stacked=options.get("stacked", False))
    plan = planned(name, num_micro_batch=2, **options)
    replicas, stages = plan.options.replicas, plan.options.num_stages
    slices = replicas if plan.options.memory.sharding_stage else 1
    job = plan.on_mesh(jax.devices()[: stages * replicas])
    want = Counter()  # bytes on each device of a replica: parameters, and Adam's two moments
    for n, home in plan.model.homes.items():
        want[plan.device_of(home)] += nbytes(plan.types[n]) * (1 + 2 / slices)

    def check(extra):
        now = live_bytes()
        devices = {
            s: {d for n, x in state.params.items() if at(n) == s for d in x.devices()}
            for s in range(stages)
        }
        assert sorted(d.id for ds in devices.values() for d in ds) == [*range(stages * replicas)]
        for s, d in ((s, d) for s, ds in devices.items() for d in ds):
            assert 0.95 * want[s] <= now[d] - before[d] <= 1.05 * want[s] + extra

    at = lambda n: plan.device_of(plan.model.homes[n])
    before = live_bytes()
    state = job.init(jax.random.key(0))
    check(0)
    state, _ = job.step(state, *of.batch)
    check(64)  # the loss and the numbers of micro-batches


@pytest.mark.parametrize("stacked", [False, True])
def test_the_plan_says_what_devices_hold(stacked):
    plan = planned("transformer", 4, num_micro_batch=2, stacked=stacked)
    for s in plan.stages:
        # and a count of steps
        assert s.stores == sum(3 * nbytes(plan.types[n]) for n in s.params) + 4
    assert sum(nbytes(plan.types[n]) for n in plan.model.homes) == sum(
        nbytes(plan.main.inputs[n]) for n in plan.main.args[0].names
    )
    assert sorted(n for s in plan.stages for n in s.params) == sorted(plan.model.homes)


def test_stages_hold_their_rows_of_a_stack():
    """Each of four stages stores the rows of its layer, and of the layer's optimizer state.

    `job.params` returns complete parameters.
    """
    of, _ = traced("transformer", stacked=True)
    plan = planned("transformer", 4, num_micro_batch=2, stacked=True)
    rows = [[n for n in s.params if n.startswith("params/blocks/qkv")] for s in plan.stages]
    assert sum(map(len, rows)) == len({n for names in rows for n in names}) > 1
    shapes = [plan.types[n].shape for names in rows for n in names]
    assert sum(shape[0] for shape in shapes) == 4 and {shape[1:] for shape in shapes} == {(16, 48)}
    for n in (n for names in rows for n in names):
        for moment in ("mu", "nu"):
            assert (
                plan.home(f"opt_state/0/{moment}/{n.removeprefix('params/')}")
                == plan.model.homes[n]
            )
    for job in (plan.simulate(), plan.on_mesh()):
        state = job.init(jax.random.key(0))
        tree_close((job.params(state), job.opt_state(state)), of.init(jax.random.key(0)), 1e-6)


# -- stages ----------------------------------------------------------------------------------------


def blocks(count, width=8):
    """Return equal blocks of two products each."""

    def loss(params, x):
        for p in params:
            x = x + jnp.tanh(x @ p["up"]) @ p["down"]
        return jnp.mean(x**2)

    params = [
        {"up": np.ones((width, width), np.float32), "down": np.ones((width, width), np.float32)}
    ] * count
    tx = optax.sgd(0.1)
    return Job(
        dtrans.make_train_step(loss, tx),
        lambda key: (params, tx.init(params)),
        (np.ones((8, width), np.float32),),
    )


@pytest.mark.parametrize("policy", [None, "REPEATED_LAYERS", "HEURISTIC"])
def test_twelve_equal_blocks_are_three_for_each_of_four_stages(policy):
    plan = dtrans.pipeline(
        *blocks(12).traced(), num_stages=4, num_micro_batch=4, stages=dtrans.Stages(policy=policy)
    )
    for k, s in enumerate(plan.stages):
        assert {n.split("/")[1] for n in s.params} == {str(3 * k + i) for i in range(3)} and len(
            s.params
        ) == 6
    assert [s.sends for s in plan.stages] == [2 * 8 * 4] * 3 + [0], "cut where one value crosses"


def test_the_table_of_stages():
    plan = planned("mlp", 4, num_micro_batch=8)
    text = str(plan)
    assert text.splitlines()[0] == "pipeline plan of step: 4 stages"
    for k, s in enumerate(plan.stages):
        (line,) = [row for row in text.splitlines() if re.match(rf"\s*{k}\s+{s.ops}\s", row)]
        assert (
            all(f"{n:,}" in line for n in (s.flops, s.sends, s.saves, s.peak, s.stores))
            and s.params[0] in line
        )
    assert "schedule PreferBackward: 8 micro-batches, bubble 3/11" in text
    assert repr(plan) == "<pipeline plan of step: 4 stages>"
    html = plan._repr_html_()
    assert html.count("<tr") == 5 and "bubble 3/11" in html
    tied = str(planned("transformer", 4, num_micro_batch=2, replicas=2))
    assert (
        "params/embedding is stored by stage 0 and used by stages 0, 3: its value is sent" in tied
    )
    assert "4 stages, 2 replicas" in tied
    assert "4 stages, 2 on each device" in str(planned("mlp", 2, schedule="Interleaved", chunks=2))


def test_flops_of_stages_are_those_of_a_micro_batch():
    plan = planned("mlp", 1, num_micro_batch=2)
    products = 2 * 8 * (5 * 32 + 3 * 32 * 32 + 32 * 3)
    assert products <= plan.stages[0].flops <= 2 * products
    assert (
        abs(
            sum(s.flops for s in planned("mlp", 4, num_micro_batch=2).stages) - plan.stages[0].flops
        )
        <= 8 * 32 * 4
    )


# -- errors ----------------------------------------------------------------------------------------


def loss(params, x):
    return jnp.mean(jnp.tanh(x @ params["a"]) @ params["b"])


PARAMS = {"a": np.ones((4, 4), np.float32), "b": np.ones((4, 1), np.float32)}
X = np.ones((8, 4), np.float32)


def plan_of(loss=loss, step=None, opt_state=(), num_stages=2, **options):
    """Return the plan of a step; by default, a step with SGD."""

    def sgd(params, state, x):
        value, grads = dtrans.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), state, value

    main = dtrans.trace(step or sgd, PARAMS, opt_state, X)
    startup = dtrans.trace(lambda: (PARAMS, opt_state))
    return flat_options.pipeline(main, startup, num_stages=num_stages, **options)


def in_scopes(*kinds):
    """Return a loss with nested scopes."""

    def nested(params, x):
        with kinds[0](name="outer"), kinds[1](name="inner"):
            return loss(params, x)

    return nested


@pytest.mark.parametrize(
    "kinds,match",
    [
        ((dtrans.replicate, dtrans.replicate), "replicate.*inner.*replicate.*outer"),
        ((dtrans.split, dtrans.split), "split.*inner.*split.*outer"),
        ((dtrans.replicate, dtrans.split), "split.*inner.*replicate.*outer"),
        ((dtrans.split, dtrans.replicate), "replicate.*inner.*split.*outer"),
    ],
)
def test_nested_scopes_are_refused(kinds, match):
    with pytest.raises(ConfigError, match=match):
        plan_of(in_scopes(*kinds))


def test_more_stages_than_equations():
    with pytest.raises(ConfigError, match="num_stages is 30"):
        plan_of(num_stages=30)


def test_more_stages_than_scopes():
    def scoped(params, x):
        with dtrans.replicate(name="first"):
            h = jnp.tanh(x @ params["a"])
        with dtrans.replicate(name="second"):
            return jnp.mean(h @ params["b"])

    assert [s.params for s in plan_of(scoped).stages] == [("params/a",), ("params/b",)]
    with pytest.raises(ConfigError, match="num_stages is 3, but the model has 2 scopes"):
        plan_of(scoped, num_stages=3)


@pytest.mark.parametrize("micro,replicas", [(3, 1), (1, 3), (8, 2), (16, 1)])
def test_batches_that_cannot_be_shared(micro, replicas):
    match = (
        f"x has 8 rows; expected a multiple of {micro * replicas} .num_micro_batch={micro} times "
        f"replicas={replicas}"
    )
    with pytest.raises(BatchError, match=match):
        plan_of(num_micro_batch=micro, replicas=replicas)


BAD = [
    (dict(num_stages=0), "num_stages"),
    (dict(num_stages=True), "num_stages"),
    (dict(num_stages=2.0), "num_stages"),
    (dict(num_micro_batch=0), "num_micro_batch"),
    (dict(num_micro_batch="8"), "num_micro_batch"),
    (dict(replicas=-1), "replicas"),
    (dict(chunks=0, schedule="Interleaved"), "chunks"),
    (dict(chunks=2), "chunks is 2, but PreferBackward has one model stage"),
    (dict(schedule="2F2B"), "^schedule is '2F2B'; expected one of PreferForward, "),
    (dict(policy="EVEN"), "policy must be .*BALANCE_OP_NUM.*'EVEN'"),
    (dict(flops_per_byte=-1.0), "flops_per_byte"),
    (dict(flops_per_byte=float("nan")), "flops_per_byte"),
    (dict(reduce="max"), "reduce must be 'mean', 'sum' or a dtrans.Reduce; it is 'max'"),
    (dict(sharding_stage=4), "sharding_stage is 4; expected 0, 1, 2 or 3"),
    (
        dict(sharding_stage=1, replicas=2, clip_local_norm=1.0),
        "clip_local_norm is 1.0 and sharding_stage is 1",
    ),
    (dict(compress="int8"), "compress must be 'bf16', 'fp16' or None, it is 'int8'"),
    (dict(compress_scale=8.0), "compress_scale=8.0 needs compress"),
    (dict(clip_local_norm=0.0), "clip_local_norm"),
    (dict(max_buckets=0), "max_buckets"),
    (dict(chains=0), "^chains must be"),
    (dict(bucket_MB=-1), "^bucket_MB must be"),
    (dict(merge={"lss": "mean"}), "lss"),
    (dict(merge={"loss": "median"}), "median"),
    (dict(unsplit_inputs=("z",)), "'?z'?"),
    (
        dict(example_count="loss"),
        "example_count is 'loss', but all micro-batches of a pipeline have equal weights",
    ),
    (dict(min_slice_size=-1), "min_slice_size must be a number of elements, 0 or more"),
]


@pytest.mark.parametrize(
    "options,match", BAD, ids=[" ".join(f"{k}={v}" for k, v in o.items()) for o, _ in BAD]
)
def test_options_that_cannot_be(options, match):
    with pytest.raises(ConfigError, match=match):
        plan_of(**options)


def updated(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def with_jax_grad(params, state, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    return updated(params, grads), state, value


def in_a_scan(params, state, x):
    def body(params, rows):
        value, grads = dtrans.value_and_grad(loss)(params, rows)
        return updated(params, grads), value

    params, values = jax.lax.scan(body, params, x.reshape(2, 4, 4))
    return params, state, values[-1]


def accumulated(params, state, x):
    def body(total, rows):
        value, grads = dtrans.value_and_grad(loss)(params, rows)
        return jax.tree.map(jnp.add, total, grads), value

    grads, values = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), x.reshape(2, 4, 4))
    return updated(params, grads), state, jnp.mean(values)


def twice(params, state, x):
    value, grads = dtrans.value_and_grad(loss)(params, x)
    other, more = dtrans.value_and_grad(loss)(params, x * 2)
    return updated(updated(params, grads), more), state, value + other


def two_losses(params, state, x):
    value, one = dtrans.value_and_grad(lambda a: loss(params | {"a": a}, x))(params["a"])
    other, two = dtrans.value_and_grad(lambda b: loss(params | {"b": b}, x * 2))(params["b"])
    return updated(params, {"a": one, "b": two}), state, value + other


def weighted(params, state, x):
    value, one = dtrans.value_and_grad(lambda a: loss(params | {"a": a}, x))(params["a"])
    second = lambda b: loss(params | {"b": b}, x) * value
    other, two = dtrans.value_and_grad(second)(params["b"])
    return updated(params, {"a": one, "b": two}), state, other


STEPS = [
    (
        with_jax_grad,
        "with jax.grad or a function that calls jax.grad; .*only dtrans.value_and_grad keeps",
    ),
    (in_a_scan, "a scan computes derivatives.*A step must have one update"),
    (accumulated, "in a loop or a branch. A pipeline splits the batch into micro-batches itself"),
    (
        twice,
        "params/a has 2 marked gradients in twice, but its update may read only their sum; "
        "add them up",
    ),
    (
        weighted,
        r"weighted calls dtrans.value_and_grad 2 times \(.*test_stage_programs.py:\d+.* and .*"
        "each must have its own parameters, read no result of another",
    ),
]


@pytest.mark.parametrize("step,match", STEPS)
def test_steps_whose_gradients_cannot_be_cut(step, match):
    with pytest.raises(GradientError, match=match):
        plan_of(step=step, opt_state={"scale": np.float32(2.0)})


def test_two_losses_with_separate_parameters():
    plan = plan_of(step=two_losses, num_micro_batch=2)
    assert (report := plan.verify()), str(report)
    job = plan.simulate()
    x = np.linspace(0.1, 2, X.size, dtype=np.float32).reshape(X.shape)
    state, value = job.step(job.init(), x)
    params, _, wanted = two_losses(PARAMS, (), x)
    tree_close(job.params(state), params, 1e-5)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)


def test_a_startup_of_something_else():
    main, _ = traced("mlp")[1]
    _, startup = traced("transformer")[1]
    with pytest.raises(TraceError):
        dtrans.pipeline(main, startup, num_stages=2)


def test_too_few_devices():
    plan = plan_of(num_stages=2, replicas=2)
    with pytest.raises(ConfigError, match="3 .*device|device.* 3"):
        plan.on_mesh(jax.devices()[:3])
    assert plan.on_mesh(jax.devices()[4:]).backend.replicas == 2


def test_schedules_that_need_other_programs():
    plan = plan_of(num_micro_batch=2)
    with pytest.raises(
        ConfigError, match="ZeroBubble needs different programs than PreferBackward; make a"
    ):
        plan.scheduled("ZeroBubble")
    with pytest.raises(ConfigError, match="Interleaved needs different programs"):
        plan.scheduled("Interleaved")
    with pytest.raises(ConfigError, match="^schedule is 'DualPipe'; expected one of "):
        plan.scheduled("DualPipe")
    assert plan.scheduled("GPipe").schedule.name == "PreferForward"
    assert plan.scheduled("preferforward").options.schedule in ("preferforward", "PreferForward")
