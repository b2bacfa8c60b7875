"""Split stages with replicas that store slices, with chunks, and with offload: numbers of one device,
verified plans, and what each device stores."""

from __future__ import annotations

import collections

import flat_options
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
    tower,
    two_layers,
    words,
)

import dtrans
from dtrans.engine.axis_bytes import collectives
from dtrans.errors import ConfigError
from dtrans.step.halves import GRAD


@pytest.fixture(autouse=True)
def quickly(x64):
    """64 bits, and programs that are sooner compiled."""
    with compiled_quickly():
        yield


def check(of, way="on_mesh", rtol=1e-12, **options):
    """Compare a job with one device after three steps, and verify the plan; return the plan."""
    plan = compared(of, way, rtol, **options)
    report = plan.verify()
    assert report.equal and report.complete, report
    return plan


# -- slices over replicas --------------------------------------------------------------------------

MODELS = {
    "head": (lambda tx: classifier(2, 7, tx=tx), 2),
    "mlp": (lambda tx: two_layers(2, 13, tx), 3),
    "table": (lambda tx: words(2, tx=tx), 2),
    "tied table": (lambda tx: words(2, tied=True, tx=tx), 2),
    "experts": (lambda tx: experts(2), 2),
}
OPTIONS = [
    {},
    {"schedule": "ZeroBubble", "num_micro_batch": 4},
    {"gradient_checkpoint": "auto", "update_groups": 2},
    {"num_micro_batch": 1},
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["on_mesh", "simulate"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_replicas_of_split_stages_store_slices(stage, model, options, way):
    make, num_stages = MODELS[model]
    check(make(CLIPPED), way, num_stages=num_stages, replicas=2, sharding_stage=stage, **options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(0.1, momentum=0.9),
        optax.adafactor(0.1, min_dim_size_to_factor=2),
        optax.lamb(0.1),
        optax.contrib.muon(0.05),
    ],
    ids=["momentum", "adafactor", "lamb", "muon"],
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_optimizers_on_slices_of_pieces(stage, tx):
    check(two_layers(2, 13, tx), rtol=1e-11, num_stages=3, replicas=2, sharding_stage=stage)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stage", [2, 3])
def test_layers_in_a_loop_of_a_split_stage(stage):
    """Replicas and shards divide different dimensions of stacked parameters."""
    params = {
        "up": np.stack([array(BODY, WIDTH + 1, seed=k) for k in range(3)]),
        "down": np.stack([array(WIDTH + 1, BODY, seed=k) for k in range(3)]),
    }

    def loss(params, x):
        def layer(h, p):
            with dtrans.split(device_count=2, name="mlp"):
                return h + jnp.tanh(h @ p["up"]) @ p["down"], None

        h, _ = jax.lax.scan(layer, x, params)
        return jnp.mean(h**2)

    of = job_of(loss, params, (array(ROWS, BODY),), CLIPPED)
    plan = check(of, num_stages=1, replicas=2, sharding_stage=stage)
    assert plan.model.sharding.params == {"params/up": 2, "params/down": 1}
    for n, cut in plan.slices_by_axis.items():
        dims = [s.axis for s in cut.values()]
        assert len({*dims}) == len(dims), n
        assert ("replica" in cut) == (stage == 3 or n.startswith("opt_state")), n


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_device_stores_a_slice_of_its_piece(stage):
    of = two_layers(2, 12)
    plan = planned(of, num_stages=3, replicas=2, sharding_stage=stage)
    job = plan.on_mesh()
    state = job.init(jax.random.key(0))
    pieces = {"up": (WIDTH, 6), "down": (6, WIDTH), "bias": (6,)}
    slices = {"up": (WIDTH // 2, 6), "down": (6, WIDTH // 2), "bias": (6,)}
    for _ in range(2):
        arrays = state.params | state.opt_state
        for n, shape in pieces.items():
            shapes = {s.data.shape for s in arrays[f"params/{n}"].addressable_shards}
            assert shapes == {slices[n] if stage == 3 else shape}
            for moment in ("mu", "nu"):
                x = arrays[f"opt_state/1/0/{moment}/{n}"]
                assert {s.data.shape for s in x.addressable_shards} == {slices[n]}
                assert len({s.device for s in x.addressable_shards}) == 4
        stored = collections.Counter()
        for x in (arrays | state.extra).values():
            stored.update({s.device: s.data.nbytes for s in x.addressable_shards})
        assert sorted(set(stored.values())) == sorted({s.stores for s in plan.stages})
        state, *_ = job.step(state, *of.batch)


def test_a_task_gathers_pieces_and_scatters_gradients():
    """Over replicas, stage 3 gathers pieces in each pass; shards exchange only activations."""
    plan = planned(two_layers(2, 12), num_stages=3, replicas=2, sharding_stage=3)
    split = plan.step_programs.stages[1]
    gathered = {}
    for p in (split.forward, split.backward):
        for eqn, _ in collectives(p.jaxpr):
            if eqn.primitive.name == "all_gather":
                assert eqn.params["over"] == ("replica",)
                gathered.setdefault(p.name, []).append(eqn.outvars[0].aval.shape)
    assert sorted(gathered["forward of stage 1"]) == [(6, WIDTH), (WIDTH, 6)]
    assert sorted(gathered["backward of stage 1"]) == [(6, WIDTH), (WIDTH, 6)]
    assert split.backward.outputs["params/up" + GRAD].shape == (WIDTH // 2, 6)


@pytest.mark.parametrize("stage", [1, 3])
def test_checkpoints_of_slices_of_pieces(stage, tmp_path):
    of = two_layers(2, 13)
    job = planned(of, num_stages=3, replicas=2, sharding_stage=stage).on_mesh()
    state, _ = job.step(job.init(jax.random.key(0)), *of.batch)
    dtrans.checkpoint.save(tmp_path / "saved", job, state)
    other = flat_options.sharding(*of.traced(), degree=2, stage=3, min_slice_size=0).simulate()
    restored = dtrans.checkpoint.restore(tmp_path / "saved", other)
    tree_close(other.params(restored), job.params(state), 0.0)
    dtrans.checkpoint.save(tmp_path / "again", other, restored)
    back = dtrans.checkpoint.restore(tmp_path / "again", job)
    tree_close(job.opt_state(back), job.opt_state(state), 0.0)


# -- slices of parameters without split stages -----------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["on_mesh", "simulate"])
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"schedule": "ZeroBubble", "gradient_checkpoint": "auto"},
        {"schedule": "Interleaved", "chunks": 2, "num_micro_batch": 4},
        {"min_slice_size": 50},
    ],
    ids=str,
)
@pytest.mark.parametrize("tx", [CLIPPED, optax.sgd(0.1), optax.lamb(0.1)], ids=["c", "sgd", "lamb"])
def test_replicas_store_slices_of_parameters(tx, options, replicas, way):
    split = [1, 1, 1, 1] if "chunks" in options else [1, 1]
    of = tower(split, tx=tx)
    of = Job(of.step, of.init, tuple(jnp.concatenate([x] * 3) for x in of.batch))
    plan = check(of, way, replicas=replicas, sharding_stage=3, **options)
    job = plan.on_mesh()
    least = options.get("min_slice_size", 0)
    for n, x in job.init(jax.random.key(0)).params.items():
        size = {s.data.size for s in x.addressable_shards}
        t = plan.main.inputs[n]
        longest = t.shape[0]
        sliced = -(-longest // replicas) * (t.size // longest)
        assert size == {sliced if t.size >= least else t.size}, n


# -- chunks ----------------------------------------------------------------------------------------

CHUNKS = [
    ([1, 2, 1, 2], {}),
    ([2, 1, 1, 2], {"replicas": 2}),
    ([2, 2, 2, 2], {"replicas": 2, "sharding_stage": 1}),
    ([1, 3, 1, 1], {"sharding_stage": 2, "replicas": 2}),
    ([2, 1, 1, 1], {"sharding_stage": 3, "replicas": 2, "num_micro_batch": 2}),
    ([2, 2, 1, 1], {"offload": True}),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["on_mesh", "simulate"])
@pytest.mark.parametrize("split, options", CHUNKS, ids=str)
def test_split_stages_on_the_devices_of_other_stages(split, options, way):
    interleaved = {"schedule": "Interleaved", "chunks": 2, "num_micro_batch": 4}
    plan = check(tower(split), way, **interleaved | options)
    assert plan.model.device_counts == (max(split[0::2]), max(split[1::2]))
    costs = [cost.count for cost in plan.costs()]
    assert costs == [plan.options.replicas * n for n in plan.model.device_counts] * 2


def test_chunks_of_one_device_have_one_device_count():
    says = (
        r"chunks is 2, so stages 0 and 2 run on the same devices, but stage 0 is split over 2 "
        r"devices by split\(name='mlp0'\), and stage 2 over 4 by split\(name='mlp2'\); give both one"
    )
    with pytest.raises(ConfigError, match=says):
        planned(tower([2, 1, 4, 1]), schedule="Interleaved", chunks=2)


# -- offload ---------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["on_mesh", "simulate"])
@pytest.mark.parametrize(
    "options",
    [{}, {"replicas": 2}, {"replicas": 2, "schedule": "ZeroBubble", "update_groups": 2}],
    ids=str,
)
@pytest.mark.parametrize("model", MODELS)
def test_the_host_stores_the_state_of_split_stages(model, options, way):
    make, num_stages = MODELS[model]
    plan = check(make(CLIPPED), way, num_stages=num_stages, offload=True, **options)
    state = plan.on_mesh().init(jax.random.key(0))
    assert {d.platform for x in state.params.values() for d in x.devices()} == {"cpu"}
    assert all(len(x.devices()) == 1 for x in jax.tree.leaves(state))


# -- values that leave a split stage ---------------------------------------------------------------


def with_gradients(of, loss, tx):
    """Return the job with a step that also returns the gradients."""

    def step(params, opt_state, *batch):
        value, grads = dtrans.value_and_grad(loss)(params, *batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value, grads

    return Job(step, of.init, of.batch)


def head_first(tx, order):
    """Return a split kernel of 7 columns in the first or the last stage."""
    params = {"split": array(BODY, 7), "full": array(7, 4) if order else array(BODY, BODY)}

    def loss(params, x):
        if order:
            with dtrans.split(device_count=2, name="split"):
                h = jnp.tanh(x @ params["split"])
            with dtrans.replicate(name="full"):
                return jnp.mean((h @ params["full"]) ** 2)
        with dtrans.replicate(name="full"):
            h = jnp.tanh(x @ params["full"])
        with dtrans.split(device_count=2, name="split"):
            return jnp.mean((h @ params["split"]) ** 2)

    of = job_of(loss, params, (array(ROWS, BODY) * 4,), tx)
    return with_gradients(of, loss, tx)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("order", [True, False], ids=["split first", "split last"])
@pytest.mark.parametrize("options", [{}, {"replicas": 2}, {"offload": True}], ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_gradients_of_a_split_stage_are_returned(count, options, order):
    check(head_first(optax.sgd(0.1), order), num_micro_batch=count, **options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("order", [True, False], ids=["split first", "split last"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_update_that_joins_the_parameters_of_all_stages(stage, order):
    """One stage computes the joined update from the parameters and gradients of both stages."""
    tx = optax.flatten(optax.adam(0.1))
    check(head_first(tx, order), replicas=2 if stage else 1, sharding_stage=stage)


def test_an_update_that_joins_the_parameters_of_two_split_stages():
    """Each stage has another number of shards, and takes its pieces of the joined update."""
    check(tower([2, 3], tx=optax.flatten(optax.adam(0.1))))
