"""Options of pipelines.

The tests cover recomputation, updates in groups, state on the host, slices of gradients, the user's
schedules, devices of stages, and the choice of stages.
"""

from __future__ import annotations

import collections
import gc
import itertools

import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import tree_close, tree_equal
from jax.ad_checkpoint import checkpoint_name
from pipeline_models import Job, compiled_quickly

import dtrans
from dtrans._jax import equations
from dtrans.engine.axis_bytes import collectives
from dtrans.errors import BatchError, ConfigError
from dtrans.pipeline_parallel.device_layout import Cluster
from dtrans.pipeline_parallel.schedule import Schedule, schedule as schedule_of
from dtrans.pipeline_parallel.task import Task
from dtrans.run.pipeline_parallel.instructions import RunStage, Transfer
from dtrans.run.pipeline_parallel.profile import measured
from dtrans.step.halves import GRAD


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


def soak(*values):
    """Return a case that runs only in `make nightly`."""
    return pytest.param(*values, marks=pytest.mark.rotated)


def array(*shape, seed=0):
    """Return normal random numbers, scaled by the first dimension, as weights usually are.

    NumPy draws them, because modules are imported without 64 bits.
    """
    x = np.random.default_rng([seed, *shape]).normal(size=shape)
    return x / np.sqrt(shape[0]) if len(shape) > 1 else x


def rows(count=16, n=4, m=4):
    """Return a batch."""
    return jnp.asarray(array(count, n, seed=7) * count**0.5), jnp.asarray(array(count, m, seed=8))


def job_of(loss, params, batch, tx=None, *, has_aux=False):
    """Return a job with given parameters."""
    tx = tx or optax.adam(1e-2)
    return Job(
        dtrans.make_train_step(loss, tx, has_aux=has_aux), lambda key: started(params, tx), batch
    )


def started(params, tx):
    params = jax.tree.map(jnp.asarray, params)
    return params, tx.init(params)


def planned(of, num_stages=2, num_micro_batch=2, flops_per_byte=0, **options):
    """Return a plan whose stages have equal work.

    The models are so small that it would otherwise be best to send nothing.
    """
    return flat_options.pipeline(
        *of.traced(),
        num_stages=num_stages,
        num_micro_batch=num_micro_batch,
        flops_per_byte=flops_per_byte,
        **options,
    )


def check(of, way="verify", **options):
    """Return the plan after its verification, or after a comparison of its job with one device over
    three steps."""
    plan = planned(of, **options)
    if way == "verify":
        assert (report := plan.verify()), str(report)
    else:
        tree_close(of.of(getattr(plan, way)()), of.on_one_device(), 1e-12)
    return plan


def backwards(plan):
    """Return the programs that a stage runs after its forward pass."""
    return [p for s in plan.step_programs.stages for p in (s.backward, s.weights) if p is not None]


def primitives(*programs):
    """Return the number of equations of each primitive in some programs."""
    return collections.Counter(e.primitive.name for p in programs for e in equations(p.jaxpr))


# -- gradient_checkpoint ---------------------------------------------------------------------------

WIDTH, INNER = 4, 16
BLOCKS = [
    {"up": array(WIDTH, INNER, seed=i), "down": array(INNER, WIDTH, seed=i)} for i in range(4)
]


def blocks(params, x, y):
    """Return the loss of residual blocks whose values have names."""
    for p in params:
        before = checkpoint_name(x @ p["up"], "before")
        x = x + checkpoint_name(jnp.sin(before), "after") @ p["down"]
    return jnp.mean((x - y) ** 2)


def net(*widths):
    """Return weights of layers."""
    return {f"w{i}": array(n, m, seed=i) for i, (n, m) in enumerate(itertools.pairwise(widths))}


def square(params, x, y):
    for w in params.values():
        x = jnp.tanh(x @ w)
    return jnp.mean((x - y) ** 2)


CHECKPOINTS = [
    (SHARED, "auto", {}),
    soak(("PreferBackward",), ("after", "before"), {"replicas": 2, "num_stages": 4}),
    (("Interleaved",), ("before",), {"chunks": 2}),
    (("ZeroBubble",), "auto", {"replicas": 2}),
    soak(("ZeroBubble",), ["after"], {}),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", ["simulate", pytest.param("on_mesh", marks=pytest.mark.rotated)])
@pytest.mark.parametrize("schedules,names,options", CHECKPOINTS)
def test_what_is_computed_once_more_changes_no_number(schedules, names, options, way):
    of = job_of(blocks, BLOCKS, rows())
    want = of.on_one_device()
    plan = planned(
        of, num_micro_batch=4, schedule=schedules[0], gradient_checkpoint=names, **options
    )
    assert primitives(*backwards(plan))["sin"] + primitives(*backwards(plan))["dot_general"] > 0
    job = getattr(plan, way)()
    for name in schedules:
        tree_close(of.of(job.scheduled(name)), want, 1e-12)


@pytest.mark.parametrize("schedule", ["PreferBackward", "ZeroBubble"])
@pytest.mark.parametrize("names,each", [("auto", 0), (("before",), 1), (("before", "after"), 2)])
def test_what_is_kept_is_what_was_sent_and_what_has_a_name(names, each, schedule):
    """For 4 rows in 64 bits, a stage saves the residual stream of `WIDTH`.

    It also saves one or two named values of `INNER` for each of two blocks.
    """
    of = job_of(blocks, BLOCKS, rows())
    plan = planned(of, num_micro_batch=4, gradient_checkpoint=names, schedule=schedule)
    stream, named = 4 * WIDTH * 8, each * 2 * 4 * INNER * 8
    assert [s.saves for s in plan.stages] == [named, stream + named]
    without = planned(of, num_micro_batch=4, schedule=schedule)
    assert all(a.saves < b.saves for a, b in zip(plan.stages, without.stages, strict=True))
    assert [s.sends for s in plan.stages] == [s.sends for s in without.stages] == [stream, 0]


def test_what_is_kept_while_it_runs():
    """Both devices save four micro-batches.

    The second device saves only the values that it receives.
    """
    of = job_of(blocks, BLOCKS, rows())
    found = {}
    for names in ("", "auto"):
        job = planned(
            of, num_micro_batch=4, schedule="PreferForward", gradient_checkpoint=names
        ).simulate()
        _, found[names] = measured(job, job.init(jax.random.key(0)), *of.batch)
    stream = 4 * WIDTH * 8
    assert found[""].peak == (4, 4) and found["auto"].peak == (0, 4)
    # values that are being sent exist in addition to saved values
    assert 4 * stream <= found["auto"].peak_bytes[1] <= 6 * stream < found[""].peak_bytes[1]


def test_only_stages_up_to_the_end_compute_once_more():
    of = job_of(blocks, BLOCKS, rows())
    kept = lambda **o: [s.saves for s in planned(of, num_stages=4, **o).stages]
    auto, none = kept(gradient_checkpoint="auto"), kept()
    assert kept(gradient_checkpoint="auto", last_checkpointed_stage=1) == auto[:2] + none[2:]
    assert kept(gradient_checkpoint="auto", last_checkpointed_stage=0) == auto[:1] + none[1:]
    assert kept(gradient_checkpoint="auto", last_checkpointed_stage=3) == auto
    assert kept(last_checkpointed_stage=1) == none
    check(of, num_stages=4, gradient_checkpoint="auto", last_checkpointed_stage=1)


def test_names_of_parts_that_values_do_not_have():
    of = job_of(blocks, BLOCKS, rows())
    with pytest.raises(
        ConfigError, match="gradient_checkpoint contains 'befor'; .* .after, before"
    ):
        planned(of, gradient_checkpoint=("after", "befor"))
    with pytest.raises(ConfigError, match="gradient_checkpoint contains 'x'; .*there are none"):
        planned(job_of(square, net(4, 5, 4), rows()), gradient_checkpoint=("x",))
    with pytest.raises(
        ConfigError, match="gradient_checkpoint is 'before'; expected 'auto', or a collection"
    ):
        planned(of, gradient_checkpoint="before")
    for end in (-2, True, "1"):
        with pytest.raises(
            ConfigError,
            match=f"last_checkpointed_stage must be the index of a stage, .* it is {end!r}",
        ):
            planned(of, gradient_checkpoint="auto", last_checkpointed_stage=end)


def test_a_name_inside_a_loop_is_refused():
    """A stage cannot save an intermediate value of a loop."""

    def loss(params, x, y):
        layer = lambda h, w: (checkpoint_name(jnp.tanh(h @ w), "inside"), None)
        for _ in range(2):  # the loop computes its weights, so it is not a stack of layers
            x, _ = jax.lax.scan(layer, x, jnp.stack([w.T for w in params.values()]))
        return jnp.mean((x - y) ** 2)

    with pytest.raises(
        ConfigError,
        match="gradient_checkpoint contains 'inside', the name of a value inside a loop",
    ):
        planned(job_of(loss, net(4, 4, 4), rows()), gradient_checkpoint=("inside",))


@pytest.mark.parametrize("names", ["auto", ("before",)])
def test_a_backward_in_two_computes_nothing_twice(names):
    of = job_of(blocks, BLOCKS, rows())
    one = planned(of, gradient_checkpoint=names)
    two = planned(of, gradient_checkpoint=names, schedule="ZeroBubble")
    for a, b in zip(one.step_programs.stages, two.step_programs.stages, strict=True):
        whole, parts = primitives(a.backward), primitives(b.backward, b.weights)
        for name in ("dot_general", "sin", "cos", "name"):
            assert whole[name] == parts[name], name


def test_replicas_compute_once_more_by_themselves():
    of = job_of(blocks, BLOCKS, rows())
    plan = planned(of, replicas=2, gradient_checkpoint="auto")
    for s in plan.step_programs.stages:
        assert not [*collectives(s.forward.jaxpr)] and not [*collectives(s.backward.jaxpr)]


# -- random numbers --------------------------------------------------------------------------------


def whole(*shape, seed=0):
    """Return random numbers from -1, 0 and 1. Sums of their products are exact in any order."""
    return np.random.default_rng([seed, *shape]).integers(-1, 2, shape).astype(float)


WHOLE = [{"up": whole(WIDTH, INNER, seed=i), "down": whole(INNER, WIDTH, seed=i)} for i in range(4)]


def dropping(params, x, y, key):
    """Return a loss that drops half of each block's values, and the masks."""
    masks = []
    for i, p in enumerate(params):
        key, own = jax.random.split(key)
        masks.append(jax.random.bernoulli(own, 0.5, (len(x), INNER)))
        x = x + jnp.where(masks[i], jax.nn.relu(x @ p["up"]), 0) @ p["down"]
    return jnp.mean(x * y), masks


def draws(*programs):
    """Return the primitives of some programs that create random numbers or keys."""
    return [n for n in primitives(*programs) if n.startswith(("random_", "threefry", "rng_"))]


@pytest.mark.parametrize(
    "schedule,replicas",
    [
        ("ZeroBubble", 2),
        soak("PreferBackward", 1),
        soak("PreferBackward", 2),
        soak("ZeroBubble", 1),
    ],
)
def test_masks_are_drawn_once(schedule, replicas):
    """The results with and without recomputation are equal bit for bit.

    The stored bytes of a mask are its bytes as a boolean array.
    """
    batch = (
        jnp.asarray(whole(16, WIDTH)),
        jnp.asarray(whole(16, WIDTH, seed=1)),
        jax.random.key(3),
    )
    of = job_of(dropping, WHOLE, batch, optax.sgd(1.0), has_aux=True)
    found = []
    for names in ("", "auto"):
        plan = planned(
            of, replicas=replicas, schedule=schedule, gradient_checkpoint=names, kind="local"
        )
        assert draws(*(s.forward for s in plan.step_programs.stages))
        assert not draws(*backwards(plan))
        assert not any("key" in n for p in backwards(plan) for n in p.in_names)
        found.append(of.of(plan.simulate(), 1))
    tree_equal(*found)
    assert 0.4 < np.mean(found[0][3]) < 0.6
    count = 16 // (2 * replicas)
    masks, stream = 2 * count * INNER, count * WIDTH * 8
    # stage 1 reads keys that stage 0 has split; each stage can compute them from the step's key
    assert [s.saves for s in plan.stages] == [masks, masks + stream]


def test_noise_is_drawn_once_however_it_is_made():
    """Test normal numbers scaled by a parameter, a key that depends on data, and a raw key."""

    def loss(params, x, y, key, old):
        h = jnp.tanh(x @ params["w0"])
        h = h + params["scale"] * jax.random.normal(key, h.shape)
        h = jnp.tanh(h @ params["w1"]) * jax.random.bernoulli(old, 0.5, (4,))
        return jnp.mean((jnp.tanh(h @ params["w2"]) - y) ** 2)

    params = net(4, 4, 4, 4) | {"scale": jnp.asarray(0.1)}
    of = job_of(loss, params, (*rows(), jax.random.key(3), jax.random.PRNGKey(4)), optax.sgd(0.1))
    found = []
    for names in ("", "auto"):
        plan = planned(of, unsplit_inputs=("old",), gradient_checkpoint=names)
        assert not draws(*backwards(plan))
        found.append(of.of(plan.simulate(), 1))
    tree_close(found[1], found[0], 1e-12)


# -- update_groups -------------------------------------------------------------------------------

CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.01))
SIX = net(4, 6, 8, 5, 7, 6, 4)


@pytest.mark.parametrize(
    "groups,tx,options",
    [
        soak(2, optax.adam(0.1), {}),
        (3, CLIPPED, {"replicas": 2}),
        soak(100, CLIPPED, {}),
        soak(2, CLIPPED, {"replicas": 2, "sharding_stage": 1, "min_slice_size": 1}),
        soak(3, optax.lamb(0.1), {"schedule": "ZeroBubble", "replicas": 2}),
        soak(2, optax.sgd(0.1, momentum=0.9), {"chunks": 2, "schedule": "Interleaved"}),
    ],
)
def test_an_update_in_parts_changes_no_number(groups, tx, options):
    check(job_of(square, SIX, rows(), tx), update_groups=groups, **options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("tx", [optax.adam(0.1), CLIPPED], ids=["adam", "clipped"])
@pytest.mark.parametrize("groups", [2, 3, 100])
def test_parts_of_an_update_do_what_the_whole_does(groups, tx, replicas):
    """The groups of a stage's update contain each equation of the full update once, and each leaf
    once."""
    of = job_of(square, SIX, rows(), tx)
    one = planned(of, replicas=replicas).update.placed
    plan = planned(of, replicas=replicas, update_groups=groups)
    parts = plan.update.placed
    described = lambda e: (e.primitive.name, *(str(v.aval) for v in e.outvars))
    inner = parts.program.jaxpr.jaxpr
    name_of = {v: n for n, v in zip(parts.program.out_names, inner.outvars, strict=True)}
    leaf_of = lambda n: n.rpartition("/")[2]
    for place in (0, 1):
        whole = [e for p in one.pieces if p.place == place for e in p.jaxpr.jaxpr.eqns]
        mine = [p for p in parts.pieces if p.place == place]
        found = [e for p in mine for e in p.jaxpr.jaxpr.eqns]
        assert collections.Counter(map(described, found)) == collections.Counter(
            map(described, whole)
        )
        made = [v for e in found for v in e.outvars]
        assert len(set(made)) == len(made), "computed twice"
        made_by = [[name_of[v] for v in p.outputs if v in name_of] for p in mine]
        by_leaf = [{leaf_of(n) for n in names if leaf_of(n) in SIX} for names in made_by]
        by_leaf = [names for names in by_leaf if names]
        leaves = [leaf_of(n) for n in plan.stages[place].params]
        assert sorted(n for names in by_leaf for n in names) == sorted(leaves)
        assert len(by_leaf) == min(groups, len(leaves))
        sizes = [sum(SIX[n].size for n in names) for names in by_leaf]
        assert max(sizes) <= sum(sizes) / len(sizes) + max(SIX[n].size for n in leaves)
        assert (
            sum("opt_state" in n and n.endswith("count") for names in made_by for n in names) == 1
        )


def test_steps_are_counted_once_by_each_stage():
    of = job_of(square, SIX, rows(), CLIPPED)
    job = planned(of, update_groups=3).simulate()
    state = job.init(jax.random.key(0))
    for i in range(1, 4):
        state, _ = job.step(state, *of.batch)
        counts = {n: int(x) for n, x in (state.opt_state | state.extra).items() if "count" in n}
        assert len(counts) == 2 and set(counts.values()) == {i}, counts


# -- offload ---------------------------------------------------------------------------------------

OFFLOADED = [
    {},
    {"replicas": 2},
    {"schedule": "Interleaved", "chunks": 2},
    {"schedule": "ZeroBubble", "update_groups": 2},
    {"gradient_checkpoint": "auto", "replicas": 2},
]


def stage_devices():
    """Return all devices except the first, which stands for the host."""
    return jax.devices()[1:]


def there(devices):
    """Return the ids of arrays on some devices, without scalars."""
    gc.collect()
    return {id(x): x for x in jax.live_arrays() if x.devices() & set(devices) and x.size > 1}


def shared(params, x, y):
    """Return a loss whose first weight two stages read, with batch statistics as state."""
    h = jnp.tanh(x @ params["w0"])
    mean = 0.9 * params["mean"] + 0.1 * jnp.mean(h, 0)
    for n in ("w1", "w2", "w0"):
        h = jnp.tanh(h @ params[n])
    return jnp.mean((h - y) ** 2), mean


def statistics(tx):
    """Return a step that stores the new batch statistics."""

    def step(params, opt_state, x, y):
        (value, mean), grads = dtrans.value_and_grad(shared, has_aux=True)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return {**optax.apply_updates(params, updates), "mean": mean}, opt_state, value

    return step


@pytest.mark.parametrize("options", [OFFLOADED[4], *map(soak, OFFLOADED[:4])], ids=str)
def test_state_on_the_host_changes_no_number(options):
    start = net(4, 4, 4, 4) | {"mean": jnp.zeros(4)}
    of = Job(statistics(CLIPPED), lambda key: started(start, CLIPPED), rows())
    want = of.on_one_device()
    tree_close(of.of(planned(of, offload=True, **options).simulate()), want, 1e-12)
    on_mesh = planned(of, offload=True, **options).on_mesh(stage_devices())
    tree_close(of.of(on_mesh), want, 1e-12)
    tree_close(of.of(planned(of, **options).on_mesh(stage_devices())), want, 1e-12)


@pytest.mark.parametrize(
    "options", [OFFLOADED[2], *map(soak, OFFLOADED[:2]), soak(OFFLOADED[3])], ids=str
)
def test_parameters_are_fetched_for_each_task_and_nothing_stays(options):
    of = job_of(square, SIX, rows(), CLIPPED)
    plan = planned(of, offload=True, **options)
    devices = stage_devices()
    before = there(devices)
    job = plan.on_mesh(devices)
    state = job.init(jax.random.key(0))
    (host,) = {d for x in jax.tree.leaves(state) for d in x.devices()}
    assert host == jax.local_devices(backend="cpu")[0]
    assert not there(devices).keys() - before.keys()

    program, env = job.prepare(state, *of.batch)
    fetched = collections.Counter(
        (m.label, m.stage) for m, _ in program.instructions if is_fetch(m, plan)
    )
    wanted = collections.Counter()
    for task in plan.schedule.sequence():
        s = plan.step_programs.stages[task.stage]
        of_task = {"F": s.forward, "B": s.backward, "W": s.weights}[task.kind]
        if of_task is not None and of_task.out_names:
            wanted.update((n, task.stage) for n in of_task.in_names if n in s.params)
    assert fetched == wanted and fetched.total() > 2 * len(SIX)

    new, loss = played(
        job, program, env, {m.target for m, _ in program.instructions if is_fetch(m, plan)}
    )
    del program, env
    assert not there(devices).keys() - before.keys()
    assert {d for x in jax.tree.leaves(new) for d in x.devices()} == {host}
    assert loss.size == 1


def played(job, program, env, fetched):
    """Run one task, and check that fetched parameters exist only during the task."""

    def look(ins):
        if isinstance(ins, RunStage):
            assert {i for i in fetched if env[i] is not None} <= set(ins.reads), (
                "kept for longer than its task"
            )

    job.execute(program, env, look)
    return job.collect(program, env)


def is_fetch(ins, plan):
    return isinstance(ins, Transfer) and ins.label in plan.model.homes and not ins.to_host


def test_gradients_come_to_the_host_once_a_step():
    of = job_of(square, SIX, rows(), CLIPPED)
    plan = planned(of, offload=True, num_micro_batch=4)
    job = plan.simulate()
    program, _ = job.prepare(job.init(jax.random.key(0)), *of.batch)
    sent = [
        m.label
        for m, _ in program.instructions
        if isinstance(m, Transfer) and m.to_host and m.label.endswith(GRAD)
    ]
    assert sorted(sent) == sorted(f"params/{n}{GRAD}" for n in SIX)


def test_offload_is_a_flag():
    of = job_of(square, SIX, rows())
    with pytest.raises(ConfigError, match="offload must be True or False, it is 'v1'"):
        planned(of, offload="v1")
    with pytest.raises(ConfigError, match="offload is True and sharding_stage is 1, but"):
        planned(of, offload=True, sharding_stage=1)


# -- sharding_stage=2 ------------------------------------------------------------------------------

UNEVEN = net(5, 7, 6, 3)  # no size is a multiple of 4 rows
SLICED = [
    soak(2, optax.adam(0.1), 1, "simulate", {}),
    (2, CLIPPED, 1, "on_mesh", {"schedule": "ZeroBubble"}),
    (4, CLIPPED, 1, "simulate", {"update_groups": 2}),
    (4, optax.sgd(0.1, momentum=0.9), 1, "on_mesh", {}),
    soak(
        2,
        CLIPPED,
        30,
        "simulate",
        {"schedule": "Interleaved", "num_micro_batch": 4, "chunks": 2, "num_stages": 1},
    ),
    soak(4, optax.adam(0.1), 30, "simulate", {"gradient_checkpoint": "auto"}),
    soak(2, optax.adam(0.1), 10**6, "simulate", {}),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("replicas,tx,least,way,options", SLICED)
def test_replicas_that_add_up_slices_of_gradients(replicas, tx, least, way, options):
    of = job_of(square, UNEVEN, rows(16, 5, 3), tx)
    check(of, way, replicas=replicas, sharding_stage=2, min_slice_size=least, **options)


@pytest.mark.parametrize("schedule", ["PreferBackward", "ZeroBubble"])
@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("least", [1, 30])
def test_sums_of_gradients_are_slices(least, replicas, schedule):
    """Each backward pass reduces and scatters its gradients. The update does not reduce slices
    again."""
    of = job_of(square, UNEVEN, rows(16, 5, 3), CLIPPED)
    plan = planned(of, replicas=replicas, sharding_stage=2, min_slice_size=least, schedule=schedule)
    sliced = {f"params/{n}" for n, w in UNEVEN.items() if w.size >= least}
    assert len(sliced) == (3 if least == 1 else 2), sliced
    of_whole = []
    for s in plan.step_programs.stages:
        makes = s.weights or s.backward
        scattered = []
        for eqn, _ in collectives(makes.jaxpr):
            assert eqn.primitive.name == "reduce_scatter" and eqn.params["size"] == replicas
            scattered += [v.aval.shape for v in eqn.outvars]
        for n in s.leaves:
            t, full = makes.outputs[n + GRAD], plan.main.inputs[n].shape
            if n in sliced:
                assert t.shape in scattered
                assert (
                    t.size == -(-full[0] // replicas) * full[1]
                    or t.size == -(-full[1] // replicas) * full[0]
                )
            else:
                assert t.shape == full
                of_whole.append(full)
        assert len(scattered) == sum(n in sliced for n in s.leaves)
        assert not [*collectives(s.forward.jaxpr)]
        assert s.weights is None or not [*collectives(s.backward.jaxpr)]
    reduced = [
        v.aval.shape
        for p in plan.update.placed.pieces
        for e, _ in collectives(p.jaxpr)
        if e.primitive.name in ("all_reduce", "reduce_scatter")
        for v in e.invars
        if v.aval.shape
    ]
    assert sorted(reduced) == sorted(of_whole)


def test_devices_hold_slices_of_sums_and_of_state():
    """Check the shards of live arrays after the last backward pass, and in the new state."""
    of = job_of(square, UNEVEN, rows(16, 5, 3))
    plan = planned(of, replicas=4, sharding_stage=2, min_slice_size=1)
    job = plan.on_mesh()
    state = job.init(jax.random.key(0))
    program, env = job.prepare(state, *of.batch)
    tasks = [ins for ins, _ in program.instructions if isinstance(ins, RunStage) and ins.task]
    seen = []

    def look(ins):
        if ins is tasks[-1]:
            seen.extend(env[i] for i in ins.writes)

    job.execute(program, env, look)
    assert seen
    largest = {n: -(-w.shape[0] // 4) * w.shape[1] for n, w in UNEVEN.items()}
    for x in seen:
        assert {s.data.size for s in x.addressable_shards} <= set(largest.values()), x.shape
    new, _ = job.collect(program, env)
    for n, x in new.opt_state.items():
        if x.ndim:
            assert {s.data.size for s in x.addressable_shards} == {largest[n.rpartition("/")[2]]}, n


def test_slices_of_a_leaf_of_two_stages():
    """Both stages that read a leaf sum slices of its gradient, and the two sums are added."""
    tied = net(4, 6, 4) | {"v": array(6, 6)}
    loss = lambda p, x, y: jnp.mean(
        (jnp.tanh(jnp.tanh(x @ p["w0"]) @ p["v"] @ p["w1"]) @ p["w0"] @ p["w0"].T - y) ** 2
    )
    of = job_of(loss, tied, rows(), CLIPPED)
    plan = check(of, replicas=2, sharding_stage=2, min_slice_size=1, schedule="ZeroBubble")
    assert plan.model.users["params/w0"] == (0, 1)


# -- schedules of the user's own -------------------------------------------------------------------


def in_turn(num_stages, num_micro_batch, split=False, chunks=1):
    """Return a schedule that runs one micro-batch after the other, forward and backward."""
    of = lambda d: [k for k in range(num_stages * chunks) if k % num_stages == d]
    orders = [
        [
            t
            for m in range(num_micro_batch)
            for t in (
                *(Task("F", k, m) for k in of(d)),
                *(Task(kind, k, m) for k in reversed(of(d)) for kind in ("BW" if split else "B")),
            )
        ]
        for d in range(num_stages)
    ]
    return Schedule("in turn", num_stages, num_micro_batch, chunks, tuple(map(tuple, orders)))


@pytest.mark.parametrize("split,chunks", [(True, 2), soak(False, 1), soak(True, 1), soak(False, 2)])
def test_a_schedule_of_the_users_own(split, chunks):
    of = job_of(square, net(*[4] * 7), rows())
    mine = in_turn(2, 4, split, chunks)
    plan = check(of, num_micro_batch=4, schedule=mine, chunks=None if chunks == 2 else 1)
    assert (
        plan.schedule is mine
        and plan.options.schedule == "in turn"
        and len(plan.stages) == 2 * chunks
    )
    assert plan.schedule.peak == (chunks, chunks)
    job = plan.simulate()
    _, found = measured(job, job.init(jax.random.key(0)), *of.batch)
    assert found.peak == (chunks, chunks)


def test_a_schedule_of_the_users_own_is_exchanged_for_another():
    of = job_of(square, SIX, rows())
    plan = planned(of, schedule=in_turn(2, 2))
    for name in SHARED:
        assert plan.scheduled(name).schedule == schedule_of(name, 2, 2)
    with pytest.raises(
        ConfigError,
        match=r"ZeroBubble needs different programs than in turn; .*pipeline\(schedule='ZeroB",
    ):
        plan.scheduled("ZeroBubble")
    split = planned(of, schedule=in_turn(2, 2, split=True))
    assert split.scheduled("ZeroBubble").schedule.splits_backward


def test_a_schedule_for_another_job_is_refused():
    of = job_of(square, SIX, rows())
    for options in ({"num_stages": 3}, {"num_micro_batch": 4}, {"chunks": 2}):
        with pytest.raises(
            ConfigError,
            match="in turn is for num_stages=2, num_micro_batch=2, chunks=1; expected",
        ):
            planned(of, schedule=in_turn(2, 2), **options)


def test_interleaved_has_two_stages_on_each_device_if_nothing_is_said():
    of = job_of(square, SIX, rows())
    plan = check(of, schedule="Interleaved")
    assert plan.options.chunks == 2 and len(plan.stages) == plan.options.model_stages == 4
    assert [plan.device_of(s) for s in range(4)] == [0, 1, 0, 1]
    assert len(planned(of, schedule="Interleaved", chunks=3).stages) == 6


# -- devices ---------------------------------------------------------------------------------------


def devices_of(plan, job, state):
    """Return, for each stage, the devices that store its parameters and their optimizer state."""
    found = {}
    for n, x in (state.params | state.opt_state).items():
        home = plan.home(n)
        if home is not None:
            found.setdefault(home, set()).add(tuple(sorted(d.id for d in x.devices())))
    assert all(len(ids) == 1 for ids in found.values()), found
    return [next(iter(found[s])) for s in sorted(found)]


def shuffled():
    return [jax.devices()[i] for i in (3, 1, 4, 6, 5, 2)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "cluster,options,want",
    [
        (lambda: Cluster(), {}, [(0,), (1,)]),
        (lambda: Cluster(), {"replicas": 2}, [(0, 2), (1, 3)]),
        (lambda: Cluster(devices=shuffled()), {"replicas": 3}, [(3, 4, 5), (1, 2, 6)]),
        (lambda: Cluster(devices=shuffled()), {"replicas": 2}, [(3, 4), (1, 6)]),
        (
            lambda: Cluster(
                "specific",
                slices=[[[d] for d in jax.devices()[4:6]], [[d] for d in jax.devices()[0:2]]],
            ),
            {"replicas": 2},
            [(4, 5), (0, 1)],
        ),
        (lambda: Cluster("all"), {"num_stages": 1, "replicas": 8}, [tuple(range(8))]),
        (lambda: Cluster(), {"schedule": "Interleaved", "chunks": 2}, [(0,), (1,), (0,), (1,)]),
        (
            lambda: Cluster(devices=shuffled()),
            {"schedule": "Interleaved", "replicas": 2},
            [(3, 4), (1, 6), (3, 4), (1, 6)],
        ),
    ],
)
def test_stages_are_where_the_cluster_says(cluster, options, want):
    of = job_of(square, SIX, rows(48))
    plan = planned(of, cluster=cluster(), **options)
    job = plan.on_mesh()
    state = job.init(jax.random.key(0))
    assert devices_of(plan, job, state) == want
    if "schedule" in options:
        new, loss = job.step(state, *of.batch)
        assert devices_of(plan, job, new) == want
        assert tuple(sorted(d.id for d in loss.devices())) == want[-1]


def test_devices_that_are_given_come_before_those_of_the_cluster():
    of = job_of(square, SIX, rows())
    plan = planned(of, cluster=Cluster(devices=shuffled()))
    job = plan.on_mesh(jax.devices()[6:])
    assert devices_of(plan, job, job.init(jax.random.key(0))) == [(6,), (7,)]


def test_devices_that_are_not_enough_or_in_no_such_layout():
    of = job_of(square, SIX, rows())
    with pytest.raises(
        ConfigError,
        match="one replica of 2 stages uses 2 devices, so 4 replicas need 8, but there are 6",
    ):
        planned(of, replicas=4, cluster=Cluster(devices=shuffled())).on_mesh()
    with pytest.raises(ConfigError, match="there are 1"):
        planned(of).on_mesh(jax.devices()[:1])
    with pytest.raises(
        ConfigError, match="layout='all' gives all devices to one stage, but the model has 2"
    ):
        planned(of, cluster=Cluster("all")).on_mesh()
    with pytest.raises(
        ConfigError, match="layout='aware_row' is for processes with one device each"
    ):
        planned(of, cluster=Cluster("aware_row")).on_mesh()
    one = Cluster("specific", slices=[[[jax.devices()[0]]]])
    with pytest.raises(ConfigError, match="slices has 1 stages, but the model has 2"):
        planned(of, cluster=one).on_mesh()


@pytest.mark.parametrize(
    "devices, options, replicas, idle",
    [
        (8, {"num_stages": 3}, 2, 2),
        (8, {"num_stages": 2}, 4, 0),
        (7, {"num_stages": 2}, 3, 1),
        (6, {"num_stages": "auto", "num_micro_batch": 1}, 6, 0),
        (5, {"num_stages": 2, "schedule": "Interleaved"}, 2, 1),
        (None, {"num_stages": 5}, 1, 3),
    ],
)
def test_auto_makes_as_many_replicas_as_the_devices_allow(devices, options, replicas, idle):
    of = job_of(square, SIX, rows(48))
    cluster = Cluster() if devices is None else Cluster(devices=jax.devices()[:devices])
    plan = planned(of, replicas="auto", cluster=cluster, **options)
    assert plan.options.replicas == replicas
    assert list(plan.devices.idle) == jax.devices()[:devices][(devices or 8) - idle :]
    named = [note for note in plan.notes if "idle" in note]
    assert len(named) == (idle > 0)
    assert all(str(d) in note for note in named for d in plan.devices.idle)
    job = plan.on_mesh()
    _, loss = job.step(job.init(jax.random.key(0)), *of.batch)
    _, _, want = of.on_one_device(1)
    assert float(loss) == pytest.approx(float(want), rel=1e-5)


def test_auto_counts_the_devices_of_a_scope_and_of_a_split():
    def loss(params, x, y):
        with dtrans.replicate(device_count=2, name="first"):
            x = jnp.tanh(x @ params["w0"])
        with dtrans.replicate(device_count=2, name="second"):
            return jnp.mean((x @ params["w1"] - y) ** 2)

    of = job_of(loss, net(8, 8, 8), rows(48, 8, 8))
    plan = planned(of, replicas="auto", cluster=Cluster(devices=jax.devices()[:7]))
    assert (plan.options.replicas, len(plan.devices.idle)) == (2, 3)

    def headed(params, x, y):
        x = jnp.tanh(x @ params["w0"])
        with dtrans.split(device_count=2):
            return jnp.mean((x @ params["w1"] - y) ** 2)

    of = job_of(headed, net(8, 8, 8), rows(48, 8, 8))
    plan = planned(of, replicas="auto", num_micro_batch=1)
    assert (plan.options.replicas, len(plan.devices.idle)) == (2, 2)


def test_auto_needs_devices_and_rows_for_its_replicas():
    of = job_of(square, SIX, rows(48))
    with pytest.raises(
        ConfigError, match="^replicas is 'auto', but one replica of 2 stages uses 2 devices, and th"
    ):
        planned(of, replicas="auto", cluster=Cluster(devices=jax.devices()[:1]))
    with pytest.raises(BatchError, match=r"times replicas=4"):
        planned(job_of(square, SIX, rows(4)), replicas="auto", num_micro_batch=2)


# -- speeds of devices -----------------------------------------------------------------------------


LAYERS = net(*[8] * 7)
AUTO = {"num_stages": "auto", "num_micro_batch": 8}


def sizes_of(plan):
    return [len(s.params) for s in plan.stages]


@pytest.mark.parametrize(
    "speeds, options, want",
    [
        ([2, 1], {}, [4, 2]),
        ([1, 2], {}, [2, 4]),
        ([1, 1], {}, [3, 3]),
        ([20, 10, 30], {"num_stages": 3}, [2, 1, 3]),
        ([2, 1], {"policy": "BALANCE_FLOPS"}, [4, 2]),
        ([4, 1, 2, 1], {"replicas": 2}, [4, 2]),  # stage 0 waits for its slower device
        ([2, 1], {"schedule": "Interleaved", "chunks": 2}, [2, 1, 2, 1]),
        ([3, 1, 1, 1], {**AUTO, "flops_per_byte": 0}, [4, 1, 1]),
        ([1, 1, 1, 3], {**AUTO, "flops_per_byte": 0}, [1, 1, 1, 3]),
        # the slow devices would save less time than the messages cost
        ([20, 1, 1, 1], AUTO, [6]),
        ([1, 20, 1, 1], AUTO, [1, 5]),
    ],
)
def test_stages_get_operations_by_the_speeds_of_their_devices(speeds, options, want):
    of = job_of(square, LAYERS, rows(32, 8, 8))
    plan = planned(of, cluster=Cluster(speeds=speeds), **options)
    assert sizes_of(plan) == want


@pytest.mark.parametrize("options", [{}, {"replicas": 2, "sharding_stage": 2, "min_slice_size": 0}])
def test_uneven_stages_compute_the_numbers_of_one_device(options):
    speeds = [3, 1] * options.get("replicas", 1)
    of = job_of(square, LAYERS, rows(32, 8, 8), CLIPPED)
    plan = check(of, cluster=Cluster(speeds=speeds), **options)
    assert sizes_of(plan) in ([5, 1], [4, 2])
    check(of, "simulate", cluster=Cluster(speeds=speeds), **options)


def test_a_loop_over_layers_is_divided_by_speeds():
    def loop(params, x, y):
        x, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["w"])
        return jnp.mean((x - y) ** 2)

    of = job_of(loop, {"w": array(6, 8, 8)}, rows(16, 8, 8))
    plan = check(of, cluster=Cluster(speeds=[1, 2]))
    assert [plan.types[s.params[0]].shape[0] for s in plan.stages] == [2, 4]


def test_a_plan_and_its_costs_name_the_speeds():
    of = job_of(square, LAYERS, rows(32, 8, 8))
    plan = planned(of, cluster=Cluster(speeds=[2, 1]))
    (note,) = [note for note in plan.notes if note.startswith("operations by speed")]
    flops = [s.flops for s in plan.stages]
    assert f"stage 0 has speed 2 and {flops[0] / sum(flops):.1%}" in note
    costs = plan.costs()
    assert [cost.speed for cost in costs] == [2, 1]
    times = [cost.flops / cost.speed for cost in costs]
    assert costs.slowest is costs[times.index(max(times))]
    assert f"{max(times) * 2 / sum(times):.2f} times the mean" in str(costs)
    assert planned(of).costs().slowest is None and "speed" not in str(planned(of).costs())


def test_an_unbalanced_plan_is_judged_by_time():
    of = job_of(square, LAYERS, rows(32, 8, 8))
    five_to_one = planned(of, cluster=Cluster(speeds=[5, 1]))
    assert sizes_of(five_to_one) == [5, 1]
    assert not any("unbalanced" in note for note in five_to_one.notes)


def test_auto_chooses_among_the_first_listed_stages():
    d = jax.devices()
    grids = [[[d[2]]], [[d[0]]], [[d[1]]]]
    cluster = Cluster("specific", d[:3], slices=grids, speeds=[1, 4, 1])
    of = job_of(square, LAYERS, rows(32, 8, 8))
    plan = planned(of, cluster=cluster, flops_per_byte=0, **AUTO)
    assert sizes_of(plan) == [1, 1, 4]


@pytest.mark.parametrize(
    "of, remedy",
    [
        (lambda: job_of(square, LAYERS, rows(32, 8, 8)), ", or pass num_stages=3$"),
        (lambda: scoped("a", "b"), "$"),
    ],
    ids=["layers", "scopes"],
)
def test_auto_names_the_number_of_stages_that_slices_do_not_list(of, remedy):
    grids = [[[d]] for d in jax.devices()[:3]]
    message = "num_stages='auto' chose 2 stages, but slices of dtrans.Cluster lists devices for 3; "
    with pytest.raises(ConfigError, match=f"{message}list devices for 2 stages{remedy}"):
        speeds = Cluster("specific", jax.devices()[:3], slices=grids, speeds=[4, 4, 0.01])
        planned(of(), cluster=speeds, flops_per_byte=0, **AUTO)


def test_scopes_determine_stages_in_spite_of_speeds():
    plan = planned(scoped("a", "b"), cluster=Cluster(speeds=[1, 9]))
    assert sizes_of(plan) == [1, 1] and plan.speeds == (1, 9)


def test_jobs_use_other_devices_than_the_plan_knows():
    of = job_of(square, LAYERS, rows(32, 8, 8))
    plan = planned(of, cluster=Cluster(speeds=[2, 1]))
    job = plan.on_mesh(jax.devices()[:3])
    assert devices_of(plan, job, job.init(jax.random.key(0))) == [(0,), (1,)]


@pytest.mark.parametrize(
    "speeds, options, message",
    [
        ([1, 2], {"replicas": 2}, "speeds has 2 entries, but 2 stages with 2 replicas use 4"),
        ([1, 2], {"replicas": "auto"}, "speeds has 2 entries, but there are 8 devices"),
        ([1, 2], {"policy": "REPEATED_LAYERS"}, "the same number of layers; leave out policy"),
        ([1, 2], {"policy": "BALANCE_OP_NUM"}, "the same number of equations; leave out policy"),
    ],
)
def test_speeds_that_do_not_fit(speeds, options, message):
    of = job_of(square, LAYERS, rows(32, 8, 8))
    with pytest.raises(ConfigError, match=message):
        planned(of, cluster=Cluster(speeds=speeds), **options)


def test_speeds_with_a_split_scope_without_stages():
    def headed(params, x, y):
        x = jnp.tanh(x @ params["w0"])
        with dtrans.split(device_count=2):
            return jnp.mean((x @ params["w1"] - y) ** 2)

    of = job_of(headed, net(8, 8, 8), rows(16, 8, 8))
    with pytest.raises(ConfigError, match="speeds of dtrans.Cluster cannot be combined with a dtr"):
        planned(of, cluster=Cluster(speeds=[1, 2, 2]))


# -- how stages are found --------------------------------------------------------------------------


def test_policies_find_other_stages():
    """Divide three blocks into two stages, and four blocks into two stages."""
    three, four = (job_of(blocks, BLOCKS[:n], rows()) for n in (3, 4))
    layers = lambda s: sorted({int(n.split("/")[1]) for n in s.params})

    even = planned(four, policy="REPEATED_LAYERS")
    assert [layers(s) for s in even.stages] == [[0, 1], [2, 3]]
    with pytest.raises(
        ConfigError, match="policy='REPEATED_LAYERS' needs a number of .* multiple of num_stages=2"
    ):
        planned(job_of(square, net(4, 4, 4, 4), rows()), policy="REPEATED_LAYERS")

    assert (
        planned(four, policy="HEURISTIC").model.stage_of
        == even.model.stage_of
        == planned(four).model.stage_of
    )

    by_number = planned(three, policy="BALANCE_OP_NUM")
    assert abs(by_number.stages[0].ops - by_number.stages[1].ops) <= 1

    slowest = lambda plan: max(s.flops for s in plan.stages)
    by_flops = planned(three, policy="BALANCE_FLOPS", flops_per_byte=0)
    assert slowest(by_flops) <= min(slowest(by_number), slowest(planned(three, flops_per_byte=0)))
    with pytest.raises(ConfigError, match="policy must be 'HEURISTIC', .* it is 'FLOPS'"):
        planned(three, policy="FLOPS")


@pytest.mark.parametrize(
    "policy", ["BALANCE_OP_NUM", soak("BALANCE_FLOPS"), soak("REPEATED_LAYERS"), soak("HEURISTIC")]
)
def test_policies_change_no_number(policy):
    check(job_of(blocks, BLOCKS, rows()), policy=policy, replicas=2)


def test_what_a_byte_costs_moves_the_cut():
    """Stages with equal work send 64 numbers for each row.

    If bytes are expensive, the last stage computes only the mean.
    """
    params = net(2, 64, 64, 2, 64)
    of = job_of(square, params, rows(16, 2, 64))
    cheap, dear = (planned(of, policy="BALANCE_FLOPS", flops_per_byte=cost) for cost in (0, 1e4))
    # by default, each stage has one layer
    assert [s.sends for s in planned(of, flops_per_byte=1e4).stages] == [
        8 * 2 * 8,
        0,
    ]
    assert [s.sends for s in cheap.stages] == [8 * 64 * 8, 0] and [
        s.sends for s in dear.stages
    ] == [8, 0]
    for cost in (-1, True, "1", float("nan")):
        with pytest.raises(
            ConfigError, match="flops_per_byte must be a number of flops for each byte"
        ):
            planned(of, flops_per_byte=cost)


def test_a_plan_notes_unbalanced_stages():
    digits = job_of(square, net(64, 32, 4), rows(16, 64, 4))
    plan = planned(digits)
    assert [s.params for s in plan.stages] == [("params/w0",), ("params/w1",)]
    first, last = (f"{s.flops / sum(s.flops for s in plan.stages):.1%}" for s in plan.stages)
    want = (
        f"unbalanced: stage 0 does {first} of the operations and stage 1 does {last}; use fewer "
        "stages, or choose their boundaries with dtrans.replicate"
    )
    assert want in plan.notes and f"\n{want}\n" in str(plan)
    for even in (
        planned(job_of(square, net(8, 8, 8), rows(16, 8, 8))),
        planned(digits, num_stages=1),
    ):
        assert "unbalanced" not in str(even)


# -- scopes ----------------------------------------------------------------------------------------


def scoped(*names):
    """Return a loss with one layer for each name, in a scope of this name.

    None is a scope without a name, '' is no scope.
    """

    def loss(params, x, y):
        for i, name in enumerate(names):
            if name == "":
                x = jnp.tanh(x @ params[f"w{i}"])
                continue
            with dtrans.replicate(name=name):
                x = jnp.tanh(x @ params[f"w{i}"])
        return jnp.mean((x - y) ** 2)

    return job_of(loss, net(*[4] * (len(names) + 1)), rows())


def layers_of(plan):
    return [[n.removeprefix("params/w") for n in s.params] for s in plan.stages]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "names,want",
    [
        (("a", "b", "c"), [["0"], ["1"], ["2"]]),
        # a scope inside a loop counts once for each time that it is entered
        (
            (None, None, None),
            [["0"], ["1"], ["2"]],
        ),
        (("a", "a", "b"), [["0", "1"], ["2"]]),  # a scope that is entered twice is one stage
        (("a", "b", "b", "b"), [["0"], ["1", "2", "3"]]),
        # equations between scopes belong to the scope before them
        (
            ("a", "", "b"),
            [["0", "1"], ["2"]],
        ),
        (("", "a", "b", ""), [["0", "1"], ["2", "3"]]),
    ],
)
def test_scopes_are_stages(names, want):
    plan = check(scoped(*names), num_stages=len(want))
    assert layers_of(plan) == want


@pytest.mark.parametrize(
    "devices,options,want",
    [
        (4, {}, 3),  # the slowest stage has two layers, with three stages and with four
        (2, {}, 2),
        (6, {}, 6),
        (4, {"replicas": 2}, 2),
        (4, {"num_micro_batch": 1}, 1),  # tasks do not overlap
        (2, {"schedule": "Interleaved", "chunks": 3}, 2),
    ],
)
def test_auto_is_the_number_of_stages_with_which_a_step_is_fastest(devices, options, want):
    of = job_of(square, net(*[8] * 7), rows(32, 8, 8))
    options = {"num_micro_batch": 16, "cluster": Cluster(devices=jax.devices()[:devices])} | options
    auto = planned(of, num_stages="auto", **options)
    assert auto.options.num_stages == auto.schedule.num_stages == want
    assert auto.options == planned(of, num_stages=want, **options).options


def test_auto_counts_turns_of_loops():
    stack = np.stack([array(8, 8, seed=i) for i in range(6)])
    loss = lambda p, x, y: jnp.mean(
        (jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p)[0] - y) ** 2
    )
    of = job_of(loss, stack, rows(32, 8, 8), optax.sgd(0.1))
    cluster = Cluster(devices=jax.devices()[:3])
    plan = planned(of, num_stages="auto", num_micro_batch=16, cluster=cluster)
    assert [r.part.size for r in plan.model.stacks["params"]] == [2, 2, 2]


def test_auto_takes_what_the_model_the_schedule_and_the_cluster_say():
    of = scoped("a", "b", "c")
    assert layers_of(check(of, num_stages="auto")) == [["0"], ["1"], ["2"]]
    with pytest.raises(
        ConfigError,
        match="num_stages='auto': the model has 3 scopes, which is not a multiple of chunks=2",
    ):
        planned(of, num_stages="auto", schedule="Interleaved")
    plain = job_of(square, net(*[8] * 7), rows(32, 8, 8))
    assert (
        planned(plain, num_stages="auto", schedule=schedule_of("1F1B", 5, 2)).options.num_stages
        == 5
    )
    with pytest.raises(
        ConfigError, match="num_stages is 'auto', but policy='REPEATED_LAYERS' needs a number"
    ):
        planned(plain, num_stages="auto", policy="REPEATED_LAYERS")


def devices_in_scopes(*counts):
    def loss(params, x, y):
        for i, count in enumerate(counts):
            with dtrans.replicate(count, name=f"layer {i}"):
                x = jnp.tanh(x @ params[f"w{i}"])
        return jnp.mean((x - y) ** 2)

    return job_of(loss, net(*[4] * (len(counts) + 1)), rows())


def test_devices_of_a_scope_share_a_replicas_part_of_the_batch():
    plan = check(devices_in_scopes(2, 2), "on_mesh")
    assert plan.options.replicas == 2 and [s.peak for s in plan.stages] == [2, 1]
    of = devices_in_scopes(2, 2)
    job = plan.on_mesh()
    state = job.init(jax.random.key(0))
    assert {len(x.devices()) for x in state.params.values()} == {2}
    assert planned(of, replicas=2).options.replicas == 4
    with pytest.raises(
        ConfigError,
        match=r"replicate\(name='layer 0'\) has 2 devices and .*layer 1'\) has 1, but ",
    ):
        planned(devices_in_scopes(2, None))


def test_scopes_are_shared_out_over_chunks():
    plan = check(scoped("a", "b", "c", "d"), schedule="Interleaved", num_stages=2, chunks=2)
    assert layers_of(plan) == [["0"], ["1"], ["2"], ["3"]]


def test_scopes_that_contradict():
    with pytest.raises(
        ConfigError, match="num_stages is 2, but the model has 3 scopes, and each scope is"
    ):
        planned(scoped("a", "b", "c"))
    with pytest.raises(
        ConfigError, match="policy is 'BALANCE_FLOPS', but the 2 scopes of this model already"
    ):
        planned(scoped("a", "b"), policy="BALANCE_FLOPS")
    with pytest.raises(
        ConfigError,
        match="in replicate\\(name='a'\\) reads a value of replicate\\(name='b'\\). This "
        "stage begins later",
    ):
        planned(scoped("a", "b", "a"))
