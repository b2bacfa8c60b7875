"""Stages that are split over devices (`dtrans.split`): results, the arrays of each device,
communication, and errors."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import tree_close
from pipeline_models import Job, compiled_quickly
from split_models import (
    BODY,
    CLIPPED,
    ROWS,
    WIDTH,
    array,
    classifier,
    compared,
    experts,
    job_of,
    planned,
    two_layers,
    words,
)

import dtrans
from dtrans._jax import equations
from dtrans.engine.axis_bytes import collectives
from dtrans.errors import ConfigError


@pytest.fixture(autouse=True)
def quickly(x64):
    """Enable 64 bits, and compile programs fast."""
    with compiled_quickly():
        yield


def soak(*values):
    """Return a case that runs only in `make nightly`."""
    return pytest.param(*values, marks=pytest.mark.rotated)


# -- numbers ---------------------------------------------------------------------------------------

HEADS = [
    (2, 7, "simulate", None, {"replicas": 2}),
    (2, 51, "on_mesh", CLIPPED, {"replicas": 2, "schedule": "ZeroBubble"}),
    (4, 51, "simulate", CLIPPED, {"schedule": "ZeroBubble", "gradient_checkpoint": "auto"}),
    soak(4, 7, "on_mesh", optax.sgd(0.1, momentum=0.9), {"update_groups": 2}),
    (4, 50, "simulate", None, {"num_micro_batch": 1, "update_groups": 2}),
    soak(2, 50, "simulate", CLIPPED, {"replicas": 2, "update_groups": 2}),
    soak(4, 50, "simulate", optax.lamb(0.1), {}),
    soak(2, 51, "simulate", None, {"num_micro_batch": 1}),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shards,classes,way,tx,options", HEADS)
def test_a_head_that_is_split(shards, classes, way, tx, options):
    """Test 7, 50 and 51 classes, padded for 2 and 4 devices. Loss and accuracy equal one device."""
    plan = compared(classifier(shards, classes, tx=tx), way, **options)
    assert plan.model.sharding.shards == (1, shards)
    assert [plan.model.sharding.state[f"params/head/{n}"] for n in "wb"] == [1, 0]


@pytest.mark.soak
@pytest.mark.parametrize("way", ["simulate", "on_mesh"])
@pytest.mark.parametrize("schedule", ["PreferBackward", "ZeroBubble"])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("classes", [7, 50, 51])
@pytest.mark.parametrize("shards", [2, 3])
def test_heads_in_the_whole_product(shards, classes, replicas, schedule, way):
    options = {"replicas": replicas, "schedule": schedule}
    compared(classifier(shards, classes, tx=CLIPPED), way, **options)


@pytest.mark.parametrize(
    "shards,way,options", [soak(2, "simulate", {"replicas": 2}), (4, "on_mesh", {})]
)
def test_one_stage_that_is_split(shards, way, options):
    """Without `replicate` scopes, equations outside the split scope are replicated on all
    shards."""
    plan = compared(classifier(shards, 51, body=False), way, num_stages=1, **options)
    assert plan.model.sharding.shards == (shards,)
    assert (
        not {n for n in plan.model.sharding.state if "body" in n}
        and plan.model.sharding.state["params/head/w"] == 1
    )


MODELS = [
    (words, 2, "on_mesh", {"replicas": 2}, ["table"]),
    soak(words, 4, "simulate", {"schedule": "ZeroBubble"}, ["table"]),
    (two_layers, 2, "simulate", {"num_stages": 3, "replicas": 2}, ["bias", "down", "up"]),
    soak(
        two_layers,
        4,
        "on_mesh",
        {"num_stages": 3, "schedule": "ZeroBubble"},
        ["bias", "down", "up"],
    ),
    (experts, 2, "on_mesh", {"replicas": 2}, ["down", "up"]),
    soak(experts, 4, "simulate", {"schedule": "ZeroBubble"}, ["down", "up"]),
    soak(two_layers, 3, "on_mesh", {"num_stages": 3}, ["bias", "down", "up"]),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model,shards,way,options,cut", MODELS)
def test_other_models_that_are_split(model, shards, way, options, cut):
    plan = compared(model(shards), way, **options)
    assert (
        sorted(
            n.removeprefix("params/") for n in plan.model.sharding.state if n.startswith("params/")
        )
        == cut
    )


def test_two_stages_that_are_split_over_other_numbers():
    params = {"a": array(BODY, WIDTH), "b": array(WIDTH, 5), "bias": array(5)}

    def loss(params, x, y):
        with dtrans.split(device_count=2, name="a"):
            h = jnp.tanh(x @ params["a"])
        with dtrans.replicate(name="between"):
            h = h * 2
        with dtrans.split(device_count=3, name="b"):
            return optax.softmax_cross_entropy_with_integer_labels(
                h @ params["b"] + params["bias"], y
            ).mean()

    of = job_of(loss, params, (array(ROWS, BODY), np.arange(ROWS) % 5))
    plan = compared(of, "on_mesh", num_stages=3)
    assert plan.model.sharding.shards == (2, 1, 3)
    assert "stage 0 is split over 2 devices" in str(
        plan
    ) and "stage 2 is split over 3 devices" in str(plan)


@pytest.mark.parametrize("way", ["on_mesh", soak("simulate")])
def test_what_is_compressed_is_as_far_off_as_its_type_says(way):
    """Pieces of each replica's sum are rounded once, and so is each addition."""
    unit, count = 2.0**-8, 2
    of = classifier(2, 51, tx=optax.sgd(1.0))
    got = of.of(getattr(planned(of, replicas=count, compress="bf16"), way)(), 1)[0]
    exact = of.of(planned(of, replicas=count).simulate(), 1)[0]
    params = of.init(jax.random.key(0))[0]
    halves = [
        Job(of.step, of.init, tuple(x[part] for x in of.batch))
        for part in (slice(0, 8), slice(8, 16))
    ]
    shares = [
        jax.tree.map(lambda p, q: (p - q) / count, params, half.on_one_device(1)[0])
        for half in halves
    ]
    errors = []
    for a, b, one, other in zip(*map(jax.tree.leaves, (got, exact, *shares)), strict=True):
        error, size = np.abs(np.asarray(a - b)), np.abs(np.asarray(one)) + np.abs(np.asarray(other))
        assert np.all(error <= 1.05 * count * unit * size)
        errors.append((error / size.mean()).max())
    assert min(errors) > unit / 100, "nothing was rounded"


# -- what devices have -----------------------------------------------------------------------------


@pytest.mark.parametrize("shards,classes,replicas", [(2, 50, 2), (4, 51, 1)])
def test_each_device_has_its_piece(shards, classes, replicas):
    """Check the shards of the head, its bias and their moments in Adam, before and after a step, on
    all replicas."""
    of = classifier(shards, classes)
    plan = planned(of, replicas=replicas)
    job = plan.on_mesh()
    state = job.init(jax.random.key(0))
    columns = -(-classes // shards)
    for _ in range(2):
        bytes_of = collections.Counter()
        for n, x in (state.params | state.opt_state | state.extra).items():
            pieces = {s.data.shape for s in x.addressable_shards}
            if "head" in n:
                assert pieces == {(WIDTH, columns) if n.endswith("w") else (columns,)}, n
                assert len({s.device for s in x.addressable_shards}) == shards * replicas
            for s in x.addressable_shards:
                bytes_of[s.device] += s.data.nbytes
        mine = 8 * 3 * (WIDTH + 1) * columns + 4  # includes the count of steps
        body = 8 * 3 * (BODY + 1) * WIDTH + 4
        assert sorted(bytes_of.values()) == sorted([mine] * shards * replicas + [body] * replicas)
        assert [s.stores for s in plan.stages] == [body, mine]
        state, *_ = job.step(state, *of.batch)


@pytest.mark.parametrize("schedule", ["PreferBackward", "ZeroBubble"])
def test_logits_are_never_whole(schedule):
    """No program of the stage has an array of all classes, and no program gathers.

    Reduced arrays have one number for each row.
    """
    shards, classes, per = 2, 51, ROWS // 2
    plan = planned(classifier(shards, classes), schedule=schedule)
    s = plan.step_programs.stages[1]
    programs = [p for p in (s.forward, s.backward, s.weights) if p is not None]
    padded = shards * -(-classes // shards)
    for p in programs:
        for e in equations(p.jaxpr):
            for v in (*e.invars, *e.outvars):
                assert not {classes, padded} & set(v.aval.shape), e
    kinds = lambda p: collections.Counter((e.primitive.name, e.params["op"],
                                           tuple(v.aval.shape for v in e.outvars))
                                          for e, _ in collectives(p.jaxpr))  # fmt: skip
    of_rows = (per,)
    assert kinds(s.forward) in (
        # the largest logit, the sum of exponentials, the label's logit, and the value and the index
        # of the maximum
        {
            ("all_reduce", "sum", (of_rows,)): 2,
            ("all_reduce", "max", (of_rows,)): 2,
            ("all_reduce", "min", (of_rows,)): 1,
        },
    )
    (back,) = [e for p in programs[1:] for e, _ in collectives(p.jaxpr)]
    assert back.params["op"] == "sum" and [v.aval.shape for v in back.outvars] == [(per, WIDTH)]


@pytest.mark.parametrize("tx", [optax.adam(0.1), CLIPPED], ids=["adam", "clipped"])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("groups", [1, 2])
def test_updates_of_pieces_gather_nothing(tx, replicas, groups):
    """Replicas reduce pieces of gradients. If there is a norm, shards add up one number."""
    plan = planned(classifier(2, 50, tx=tx), replicas=replicas, update_groups=groups)
    found = collections.Counter()
    for piece in plan.update.placed.pieces:
        if piece.place == 1:
            for e, _ in collectives(piece.jaxpr):
                found.update((e.primitive.name, e.params["over"], v.aval.shape) for v in e.outvars)
    over = {o for _, o, _ in found}
    assert all(kind == "all_reduce" for kind, _, _ in found), found
    assert len(over) == (replicas > 1) + (tx is CLIPPED), over
    shapes = {shape for _, _, shape in found}
    assert shapes <= {(), (25,), (WIDTH, 25)}
    assert ((WIDTH, 25) in shapes) == (replicas > 1)


def test_layers_in_a_loop_are_divided():
    """Stacked parameters are divided along a dimension of a layer."""
    params = {
        "up": np.stack([array(BODY, WIDTH), array(BODY, WIDTH, seed=1)]),
        "down": np.stack([array(WIDTH, BODY), array(WIDTH, BODY, seed=1)]),
    }

    def loss(params, x):
        def layer(h, p):
            with dtrans.split(device_count=2, name="mlp"):
                return h + jnp.tanh(h @ p["up"]) @ p["down"], None

        h, _ = jax.lax.scan(layer, x, params)
        return jnp.mean(h**2)

    plan = compared(job_of(loss, params, (array(ROWS, BODY),), CLIPPED), num_stages=1)
    dims = {n: d for n, d in plan.model.sharding.state.items() if n.startswith("params")}
    assert dims == {"params/up": 2, "params/down": 1}


def test_maxima_over_shards_are_verified():
    """The cross entropy and the accuracy of a split head compare numbers of several shards."""
    report = planned(classifier(2, 7)).verify()
    assert report.equal and report.complete, report


def test_a_parameter_of_another_stage_too_is_not_cut():
    of = words(2, tied=True)
    plan = compared(of, "on_mesh")
    assert (
        plan.model.users["params/table"] == (0, 1)
        and "params/table" not in plan.model.sharding.state
    )
    assert "stage 0 is split over 2 devices: no parameter is sharded" in str(plan)


@pytest.mark.parametrize(
    "tx",
    [optax.adafactor(0.1, min_dim_size_to_factor=2), soak(optax.lamb(0.1))],
    ids=["adafactor", "lamb"],
)
def test_optimizers_that_are_not_elementwise(tx):
    """Adafactor stores sums of rows and columns, and LAMB takes norms of leaves."""
    compared(classifier(2, 51, tx=tx), rtol=1e-11)


@pytest.mark.parametrize("way", ["simulate", soak("on_mesh")])
def test_another_batch_size_than_was_traced(way):
    of = classifier(2, 51)
    job = getattr(planned(of), way)()
    for count in (8, 16):
        other = Job(of.step, of.init, tuple(x[:count] for x in of.batch))
        tree_close(other.of(job, 1), other.on_one_device(1), 1e-12)


# -- errors ----------------------------------------------------------------------------------------


def test_a_split_must_say_over_how_many_devices():
    with pytest.raises(
        ConfigError,
        match="split\\(name='head'\\) has no number of devices; write dtrans.split\\(device_c",
    ):
        planned(classifier(None, 7))


def test_a_stage_is_split_over_one_number_of_devices():
    def loss(params, x, y):
        with dtrans.split(device_count=2, name="a"):
            h = jnp.tanh(x @ params["a"])
        with dtrans.split(device_count=4, name="b"):
            return jnp.mean((h @ params["b"] - y) ** 2)

    of = job_of(loss, {"a": array(4, 8), "b": array(8, 4)}, (array(8, 4), array(8, 4)))
    with pytest.raises(
        ConfigError,
        match="stage 0 is split over 2 devices by split\\(name='a'\\), and over 4 by split",
    ):
        planned(of, num_stages=1)


@pytest.mark.parametrize(
    "outer,inner", [("replicate", "split"), ("split", "replicate"), ("split", "split")]
)
def test_scopes_within_others_are_refused(outer, inner):
    def loss(params, x, y):
        with getattr(dtrans, outer)(name="outer"), getattr(dtrans, inner)(name="inner"):
            return jnp.mean((x @ params - y) ** 2)

    of = job_of(loss, array(4, 3), (array(8, 4), array(8, 3)))
    with pytest.raises(
        ConfigError, match=f"{inner}\\(name='inner'\\) is entered within {outer}\\(name='outer'\\)"
    ):
        of.traced()


def test_devices_that_are_not_enough():
    with pytest.raises(
        ConfigError,
        match="one replica of 2 stages uses 5 devices, so 2 replicas need 10, but there are 8",
    ):
        planned(classifier(4, 50), replicas=2).on_mesh()
