"""Options of pipelines: what is computed once more, updates in parts, state on the host, slices of
gradients, schedules of the user's own, devices of stages, and how stages are found."""

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
from dtrans.data_parallel.plan import collectives
from dtrans.errors import ConfigError
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
    """64 bits, and programs that are sooner compiled."""
    with compiled_quickly():
        yield


def soak(*values):
    """A case that is left out unless asked for."""
    return pytest.param(*values, marks=pytest.mark.rotated)


def array(*shape, seed=0):
    """Normal numbers, scaled by the first dimension as weights are. Of numpy: modules are loaded in
    32 bits."""
    x = np.random.default_rng([seed, *shape]).normal(size=shape)
    return x / np.sqrt(shape[0]) if len(shape) > 1 else x


def rows(count=16, n=4, m=4):
    """A batch."""
    return jnp.asarray(array(count, n, seed=7) * count**0.5), jnp.asarray(array(count, m, seed=8))


def job_of(loss, params, batch, tx=None, *, has_aux=False):
    """A job whose parameters are given."""
    tx = tx or optax.adam(1e-2)
    return Job(
        dtrans.make_train_step(loss, tx, has_aux=has_aux), lambda key: started(params, tx), batch
    )


def started(params, tx):
    params = jax.tree.map(jnp.asarray, params)
    return params, tx.init(params)


def planned(of, num_stages=2, num_micro_batch=2, flops_per_byte=0, **options):
    """With stages of equal work: models are so small here that it would be best to send nothing."""
    return flat_options.pipeline(
        *of.traced(),
        num_stages=num_stages,
        num_micro_batch=num_micro_batch,
        flops_per_byte=flops_per_byte,
        **options,
    )


def check(of, way="verify", **options):
    """Return the plan, verified, or of a job that has the numbers of one device after three
    steps."""
    plan = planned(of, **options)
    if way == "verify":
        assert (report := plan.verify()), str(report)
    else:
        tree_close(of.of(getattr(plan, way)()), of.on_one_device(), 1e-12)
    return plan


def backwards(plan):
    """The programs that a stage runs after its forward."""
    return [p for s in plan.step_programs.stages for p in (s.backward, s.weights) if p is not None]


def primitives(*programs):
    """How often each primitive is in some programs."""
    return collections.Counter(e.primitive.name for p in programs for e in equations(p.jaxpr))


# -- gradient_checkpoint ---------------------------------------------------------------------------

WIDTH, INNER = 4, 16
BLOCKS = [
    {"up": array(WIDTH, INNER, seed=i), "down": array(INNER, WIDTH, seed=i)} for i in range(4)
]


def blocks(params, x, y):
    """Residual blocks with values that have names."""
    for p in params:
        before = checkpoint_name(x @ p["up"], "before")
        x = x + checkpoint_name(jnp.sin(before), "after") @ p["down"]
    return jnp.mean((x - y) ** 2)


def net(*widths):
    """Weights of layers."""
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
    """Of 4 rows in 64 bits: the stream of `WIDTH`, and for each of two blocks a value of `INNER`,
    or two."""
    of = job_of(blocks, BLOCKS, rows())
    plan = planned(of, num_micro_batch=4, gradient_checkpoint=names, schedule=schedule)
    stream, named = 4 * WIDTH * 8, each * 2 * 4 * INNER * 8
    assert [s.saves for s in plan.stages] == [named, stream + named]
    without = planned(of, num_micro_batch=4, schedule=schedule)
    assert all(a.saves < b.saves for a, b in zip(plan.stages, without.stages, strict=True))
    assert [s.sends for s in plan.stages] == [s.sends for s in without.stages] == [stream, 0]


def test_what_is_kept_while_it_runs():
    """Four micro-batches are kept by both devices, of which the second has what it was sent, and
    nothing else."""
    of = job_of(blocks, BLOCKS, rows())
    found = {}
    for names in ("", "auto"):
        job = planned(
            of, num_micro_batch=4, schedule="PreferForward", gradient_checkpoint=names
        ).simulate()
        _, found[names] = measured(job, job.init(jax.random.key(0)), *of.batch)
    stream = 4 * WIDTH * 8
    assert found[""].peak == (4, 4) and found["auto"].peak == (0, 4)
    # what is under way to and fro is there beside what is kept
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
    """What a loop makes on its way cannot be kept from outside."""

    def loss(params, x, y):
        layer = lambda h, w: (checkpoint_name(jnp.tanh(h @ w), "inside"), None)
        for _ in range(2):  # a loop whose weights are made on the way is no stack of layers
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
    """-1, 0 and 1: sums of products of such are exact, in whatever order they are made."""
    return np.random.default_rng([seed, *shape]).integers(-1, 2, shape).astype(float)


WHOLE = [{"up": whole(WIDTH, INNER, seed=i), "down": whole(INNER, WIDTH, seed=i)} for i in range(4)]


def dropping(params, x, y, key):
    """Half of each block's values are dropped; which ones is returned."""
    masks = []
    for i, p in enumerate(params):
        key, own = jax.random.split(key)
        masks.append(jax.random.bernoulli(own, 0.5, (len(x), INNER)))
        x = x + jnp.where(masks[i], jax.nn.relu(x @ p["up"]), 0) @ p["down"]
    return jnp.mean(x * y), masks


def draws(*programs):
    """The primitives of some programs that make random numbers, or keys."""
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
    """With and without, everything is the same bit for bit; a mask is kept as the bytes that it
    has."""
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
    # stage 1 takes its keys of what stage 0 has split; each makes them of the step's key
    assert [s.saves for s in plan.stages] == [masks, masks + stream]


def test_noise_is_drawn_once_however_it_is_made():
    """Normal numbers that are scaled by a parameter; a key that is made of data; one of the old
    kind."""

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
    """The equations of a stage's parts are those of its whole update, each once; each leaf is of
    one part."""
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
        made_by = [[name_of[v] for v in p.makes if v in name_of] for p in mine]
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
    """All but the first, on which the host has what is its own."""
    return jax.devices()[1:]


def there(devices):
    """What is on some devices, by id, but for single numbers."""
    gc.collect()
    return {id(x): x for x in jax.live_arrays() if x.devices() & set(devices) and x.size > 1}


def shared(params, x, y):
    """Two stages read the first weight; batch statistics are put back as they are made."""
    h = jnp.tanh(x @ params["w0"])
    mean = 0.9 * params["mean"] + 0.1 * jnp.mean(h, 0)
    for n in ("w1", "w2", "w0"):
        h = jnp.tanh(h @ params[n])
    return jnp.mean((h - y) ** 2), mean


def statistics(tx):
    """A step that puts them back."""

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
        (m.what, m.stage) for m, _ in program.instructions if is_fetch(m, plan)
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
    """A step, in which what is fetched is there for the task that reads it, and gone after it."""

    def look(ins):
        if isinstance(ins, RunStage):
            assert {i for i in fetched if env[i] is not None} <= set(ins.reads), (
                "kept for longer than its task"
            )

    job.execute(program, env, look)
    return job.collect(program, env)


def is_fetch(ins, plan):
    return isinstance(ins, Transfer) and ins.what in plan.model.homes and not ins.to_host


def test_gradients_come_to_the_host_once_a_step():
    of = job_of(square, SIX, rows(), CLIPPED)
    plan = planned(of, offload=True, num_micro_batch=4)
    job = plan.simulate()
    program, _ = job.prepare(job.init(jax.random.key(0)), *of.batch)
    sent = [
        m.what
        for m, _ in program.instructions
        if isinstance(m, Transfer) and m.to_host and m.what.endswith(GRAD)
    ]
    assert sorted(sent) == sorted(f"params/{n}{GRAD}" for n in SIX)


def test_offload_is_a_flag():
    of = job_of(square, SIX, rows())
    with pytest.raises(ConfigError, match="offload must be True or False, it is 'v1'"):
        planned(of, offload="v1")
    with pytest.raises(ConfigError, match="offload is True and sharding_stage is 1, but"):
        planned(of, offload=True, sharding_stage=1)


# -- sharding_stage=2 ------------------------------------------------------------------------------

UNEVEN = net(5, 7, 6, 3)  # of which none is a multiple of 4 rows
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
    """Each backward scatters what it made; the update reduces what is in slices no more."""
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
    """Live arrays after the last backward, and in the new state, by their shards."""
    of = job_of(square, UNEVEN, rows(16, 5, 3))
    plan = planned(of, replicas=4, sharding_stage=2, min_slice_size=1)
    job = plan.on_mesh()
    state = job.init(jax.random.key(0))
    program, env = job.prepare(state, *of.batch)
    tasks = [ins for ins, _ in program.instructions if isinstance(ins, RunStage) and ins.task]
    seen = []

    def look(ins):
        if ins is tasks[-1]:
            seen.extend(env[i] for i in ins.makes)

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
    """The stages that read it add up slices of their own, and these are added."""
    tied = net(4, 6, 4) | {"v": array(6, 6)}
    loss = lambda p, x, y: jnp.mean(
        (jnp.tanh(jnp.tanh(x @ p["w0"]) @ p["v"] @ p["w1"]) @ p["w0"] @ p["w0"].T - y) ** 2
    )
    of = job_of(loss, tied, rows(), CLIPPED)
    plan = check(of, replicas=2, sharding_stage=2, min_slice_size=1, schedule="ZeroBubble")
    assert plan.model.users["params/w0"] == (0, 1)


# -- schedules of the user's own -------------------------------------------------------------------


def in_turn(num_stages, num_micro_batch, split=False, chunks=1):
    """One micro-batch after the other, from its forward to its backward."""
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
    """By stage, the numbers of the devices that have its parameters and the optimizer's state of
    these."""
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


# -- how stages are found --------------------------------------------------------------------------


def test_policies_find_other_stages():
    """Of three blocks in two stages, and of four."""
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
    """Stages of equal work send 64 numbers of each row; where that is dear, the last makes the mean
    alone."""
    params = net(2, 64, 64, 2, 64)
    of = job_of(square, params, rows(16, 2, 64))
    cheap, dear = (planned(of, policy="BALANCE_FLOPS", flops_per_byte=cost) for cost in (0, 1e4))
    # by default a stage has a layer
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
    """A layer for each name, in a scope of that name; unnamed scopes for None, no scope for ''."""

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
        # a scope in a loop is as many as it is entered
        (
            (None, None, None),
            [["0"], ["1"], ["2"]],
        ),
        (("a", "a", "b"), [["0", "1"], ["2"]]),  # entered twice, it is one stage
        (("a", "b", "b", "b"), [["0"], ["1", "2", "3"]]),
        # what stands between scopes goes with the one before
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
        (4, {}, 3),  # the slowest of four stages would have two layers, as with three
        (2, {}, 2),
        (6, {}, 6),
        (4, {"replicas": 2}, 2),
        (4, {"num_micro_batch": 1}, 1),  # nothing runs beside anything
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
        match="in replicate\\(name='a'\\) reads a value of replicate\\(name='b'\\), which begins "
        "later",
    ):
        planned(scoped("a", "b", "a"))
