"""A mesh of two axes: the batch over "data", the layers in `dtrans.split` scopes over "model".

Numbers equal one device, plans verify, each device stores its pieces only, and the bytes over the
model axis are those of Megatron.
"""

from __future__ import annotations

import collections
import dataclasses
import re

import flat_options
import jax
import jax.numpy as jnp
import mesh_models
import numpy as np
import optax
import pytest
from helpers import tree_close
from mesh_models import INNER, WIDTH, array, block, block_params, job_of, planners
from pipeline_models import compiled_quickly

import dtrans
from dtrans._jax import equations
from dtrans.errors import ConfigError, GradientError


MESH = {"data": 2, "model": 2}
COLOCATED = {"data": 2, "model": "data"}
ROWS, TOKENS, WORDS = 8, 4, 10


@pytest.fixture(autouse=True)
def quickly(x64):
    """Enable 64 bits, and compile programs fast."""
    with compiled_quickly():
        yield


planned, sharded = planners(MESH)


# -- models ----------------------------------------------------------------------------------------


def tokens_of(rows=ROWS):
    return np.random.default_rng(0).integers(0, WORDS, (rows, TOKENS + 1))


def transformer(tx=None, layers=2, scanned=False, remat=False, rows=ROWS):
    """Return a language model with an embedding, blocks and a head."""
    blocks = [block_params(10 * i) for i in range(layers)]
    params = {"table": array(WORDS, WIDTH) * 3, "head": array(WIDTH, WORDS, seed=5)}
    params["blocks"] = jax.tree.map(lambda *xs: np.stack(xs), *blocks) if scanned else blocks
    apply = jax.checkpoint(block) if remat else block

    def loss(params, tokens):
        x = params["table"][tokens[:, :-1]]
        if scanned:
            x, _ = jax.lax.scan(lambda x, p: (apply(p, x), None), x, params["blocks"])
        else:
            for p in params["blocks"]:
                x = apply(p, x)
        logits = x @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return job_of(loss, params, (tokens_of(rows),), tx)


def classifier(tx=None, classes=7, rows=ROWS, device_count=None):
    """Return a layer with a batch norm, and a split head whose classes do not divide evenly."""
    params = {
        "body": {"w": array(6, WIDTH), "b": array(WIDTH)},
        "head": {"w": array(WIDTH, classes), "b": array(classes, seed=1)},
    }

    def loss(params, x, y):
        h = x @ params["body"]["w"]
        h = jnp.tanh((h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5) + params["body"]["b"])
        with dtrans.split(device_count=device_count, name="head"):
            logits = h @ params["head"]["w"] + params["head"]["b"]
            value = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
            right = jnp.argmax(logits, -1) == y
        return value, {"accuracy": jnp.mean(right), "right": right}

    batch = (array(rows, 6) * 4, np.arange(rows) % classes)
    return job_of(loss, params, batch, tx, has_aux=True)


def tied(tx=None):
    """Return a model whose embedding table is also the head."""
    params = {"table": array(11, WIDTH) * 3, "w": array(WIDTH, WIDTH)}

    def loss(params, tokens):
        with dtrans.split(name="table"):
            h = params["table"][tokens[:, :-1]]
        h = jnp.tanh(h @ params["w"])
        with dtrans.split(name="head"):
            logits = h @ params["table"].T
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return job_of(loss, params, (tokens_of(),), tx)


def embedded(tx=None):
    """Return a model in which only split layers read the batch: an embedding, and a head."""
    params = {"table": array(WORDS, WIDTH) * 3, "w": array(WIDTH, WIDTH), "head": array(WIDTH, 7)}

    def loss(params, tokens, labels):
        with dtrans.split(name="table"):
            h = params["table"][tokens]
        h = jnp.tanh(h @ params["w"])
        with dtrans.split(name="head"):
            logits = h @ params["head"]
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    tokens = tokens_of()
    return job_of(loss, params, (tokens[:, 1:], tokens[:, 1:] % 7), tx)


def normalized(tx=None):
    """Return an MLP whose kernels are divided by their norms, as in weight normalization."""
    params = {"up": array(WIDTH, INNER), "scale": array(INNER), "down": array(INNER, WIDTH)}

    def loss(params, x, y):
        with dtrans.split(name="mlp"):
            up = params["up"] / jnp.linalg.norm(params["up"], axis=0) * params["scale"]
            down = params["down"] / jnp.linalg.norm(params["down"])
            h = jnp.tanh(x @ up) @ (down / jnp.abs(down).max(0))
        return jnp.mean((x + h - y) ** 2)

    return job_of(loss, params, (array(ROWS, WIDTH) * 4, array(ROWS, WIDTH, seed=1)), tx)


def experts(tx=None, count=4, capacity=6):
    """Return a mixture of experts: top-1 routing with one-hot dispatch, capacity and auxiliary
    loss."""
    params = {
        "gate": array(WIDTH, count) * 3,
        "up": array(count, WIDTH, INNER) * 2,
        "down": array(count, INNER, WIDTH, seed=1) * 2,
    }

    def loss(params, x, y):
        probabilities = jax.nn.softmax(x @ params["gate"])
        chosen = jax.nn.one_hot(jnp.argmax(probabilities, -1), count, dtype=x.dtype)
        place = (jnp.cumsum(chosen, 0) - 1) * chosen
        is_in = chosen * (place < capacity)
        slot = jax.nn.one_hot(place.astype(int), capacity, dtype=x.dtype)
        dispatch = is_in[..., None] * slot
        with dtrans.split(name="experts"):
            h = jnp.einsum("tec,td->ecd", dispatch, x)
            h = jax.nn.relu(jnp.einsum("ecd,edh->ech", h, params["up"]))
            h = jnp.einsum("ech,ehd->ecd", h, params["down"])
            combine = dispatch * probabilities[..., None]
            out = jnp.einsum("tec,ecd->td", combine, h)
        balance = count * jnp.sum(chosen.mean(0) * probabilities.mean(0))
        return jnp.mean((x + out - y) ** 2) + 0.01 * balance

    return job_of(loss, params, (array(ROWS, WIDTH) * 4, array(ROWS, WIDTH, seed=1)), tx)


def dropout(tx=None):
    """Return a model with random numbers inside and outside of a split scope, from one key."""
    params = {"up": array(WIDTH, INNER), "down": array(INNER, WIDTH), "head": array(WIDTH, 4)}

    def dropped(key, x):
        return jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0)

    def loss(params, x, y, key):
        outside, inside = jax.random.split(key)
        with dtrans.split(name="mlp"):
            h = dropped(inside, jnp.tanh(x @ params["up"])) @ params["down"]
        logits = dropped(outside, x + h) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    batch = (array(ROWS, WIDTH) * 4, np.arange(ROWS) % 4)
    of = job_of(loss, params, batch, tx)
    return dataclasses.replace(of, batch=(*of.batch, jax.random.key(3)))


def routed(tx=None, *, by_scatter=False):
    """Mixture of experts behind a layer, with an auxiliary loss over all tokens.

    With `by_scatter`, the routing is top-2, a capacity counts the tokens of all rows, and scatters
    move tokens to experts.
    """
    params = {"w": array(WIDTH, WIDTH), **mesh_models.expert_params()}
    apply = scattered_experts if by_scatter else mesh_models.experts

    def loss(params, x, y):
        h = jnp.tanh(x @ params["w"])
        out = apply(params, h, lambda name: dtrans.split(name=name))
        probabilities = jax.nn.softmax(h @ params["gate"])
        chosen = jax.nn.one_hot(jnp.argmax(probabilities, -1), 4)
        balance = jnp.sum(chosen.mean((0, 1)) * probabilities.mean((0, 1)))
        return jnp.mean((h + out - y) ** 2) + 0.01 * balance

    shape = (ROWS, TOKENS, WIDTH)
    return job_of(loss, params, (array(*shape) * 4, array(*shape, seed=1)), tx)


def scattered_experts(p, x, scope, capacity=8):
    """Top-2 routing: a scatter writes tokens to slots of experts, and a gather reads them."""
    count, tokens = p["gate"].shape[1], x.reshape(-1, WIDTH)
    weights, chosen = jax.lax.top_k(jax.nn.softmax(tokens @ p["gate"]), 2)
    one_hot = jax.nn.one_hot(chosen, count, dtype=int).reshape(-1, count)
    place = jnp.sum((jnp.cumsum(one_hot, 0) - 1) * one_hot, -1)
    expert, slot = chosen.reshape(-1), jnp.where(place < capacity, place, capacity)
    with scope("experts"):
        slots = jnp.zeros((count, capacity, WIDTH), x.dtype)
        slots = slots.at[expert, slot].set(jnp.repeat(tokens, 2, axis=0), mode="drop")
        h = jax.nn.relu(jnp.einsum("ecd,edh->ech", slots, p["expert_up"]))
        h = jnp.einsum("ech,ehd->ecd", h, p["expert_down"])
        read = h.at[expert, slot].get(mode="fill", fill_value=0)
    return (read.reshape(-1, 2, WIDTH) * weights[..., None]).sum(1).reshape(x.shape)


CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.05, weight_decay=0.1))
STEPS = {
    "transformer": transformer,
    "scanned": lambda tx=None: transformer(tx, scanned=True),
    "remat": lambda tx=None: transformer(tx, remat=True),
    "classifier": classifier,
    "tied": tied,
    "embedded": embedded,
    "normalized": normalized,
    "experts": experts,
    "dropout": dropout,
    "routed": routed,
    "scattered": lambda tx=None: routed(tx, by_scatter=True),
}


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("tx", [None, CLIPPED], ids=["adam", "clipped"])
def test_numbers_equal_one_device(name, tx):
    of = STEPS[name](tx)
    tree_close(of.of(planned(of).simulate()), of.on_one_device(), 1e-12)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "mesh",
    [
        {"data": 4, "model": 2},
        {"data": 2, "model": 4},
        {"data": 1, "model": 2},
        {"model": 4},
        {"data": 4, "model": 1},
        {"data": 4},
    ],
    ids=str,
)
def test_sizes_of_a_mesh_on_devices(mesh):
    of = transformer(CLIPPED, layers=1)
    tree_close(of.of(planned(of, mesh).on_mesh()), of.on_one_device(), 1e-12)


OPTIMIZERS = {
    "lamb": lambda: optax.lamb(0.05, weight_decay=0.1),
    "adafactor": lambda: optax.adafactor(0.05, min_dim_size_to_factor=4),
    "muon": lambda: optax.contrib.muon(0.05),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers(optimizer):
    of = transformer(OPTIMIZERS[optimizer](), layers=1)
    tree_close(of.of(planned(of).simulate()), of.on_one_device(), 1e-11)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options",
    [
        {"num_micro_batch": 2},
        {"bucket_MB": 0},
        {"chains": 1},
        {"compress": "bf16"},
        {"clip_local_norm": 0.1},
        {"kind": "local"},
        {"kind": "local", "local_sgd": 2},
    ],
    ids=str,
)
def test_options_mean_the_same_as_without_a_model_axis(options):
    of = transformer(layers=1)
    mesh = planned(of, **options).simulate()
    trainers = flat_options.nccl2(*of.traced(), trainers=2, **options).simulate()
    # sums over devices of the model axis may round to another number of 16 bits
    rtol = 1e-2 if "compress" in options else 1e-12
    tree_close(of.of(mesh), of.of(trainers), rtol)


@pytest.mark.parametrize("rows", [7, 5])
def test_a_batch_that_the_trainers_do_not_divide(rows):
    planned_for, of = classifier(), classifier(rows=rows)
    job = planned(planned_for).simulate()
    tree_close(of.of(job), of.on_one_device(), 1e-12)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", STEPS)
def test_plans_verify(name):
    report = planned(STEPS[name](CLIPPED)).verify()
    assert report.equal and report.complete, report


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sharding_equals_one_device(name, stage):
    of = STEPS[name](CLIPPED)
    plan = sharded(of, stage=stage)
    tree_close(of.of(plan.simulate()), of.on_one_device(), 1e-12)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("stage", [1, 3])
def test_plans_of_sharding_verify(name, stage):
    report = sharded(STEPS[name](CLIPPED), stage=stage).verify()
    assert report.equal and report.complete, report


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "mesh, options",
    [
        ({"data": 4, "model": 2}, {"stage": 3}),
        ({"data": 2, "model": 4}, {"stage": 2}),
        ({"data": 1, "model": 2}, {"stage": 3}),
        ({"data": 4}, {"stage": 3}),
        (MESH, {"stage": 3, "num_micro_batch": 2}),
        (MESH, {"stage": 2, "num_micro_batch": 2}),
        (MESH, {"stage": 3, "prefetch": 0, "gather_bucket_MB": 1}),
        (MESH, {"stage": 3, "overlap": False}),
        (MESH, {"stage": 1, "bucket_MB": 0}),
        (MESH, {"stage": 3, "replicas": 2}),
        ({"data": 1, "model": 2}, {"stage": 1, "replicas": 2}),
        ({"data": 2}, {"stage": 2, "replicas": 2}),
    ],
    ids=str,
)
def test_options_of_sharding_on_devices(mesh, options):
    of = transformer(CLIPPED, layers=2, scanned=True)
    job = sharded(of, mesh, **options).on_mesh()
    tree_close(of.of(job), of.on_one_device(), 1e-12)


def test_devices_of_a_sharded_mesh_are_counted_with_the_model_axis():
    plan = sharded(transformer(layers=1), MESH, stage=3)
    assert plan.on_mesh(jax.devices()[: plan.device_count]) is not None
    with pytest.raises(ConfigError, match="the plan needs 4 devices, but on_mesh received 2"):
        plan.on_mesh(jax.devices()[:2])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_on_slices_of_pieces(optimizer):
    of = transformer(OPTIMIZERS[optimizer](), layers=1)
    tree_close(of.of(sharded(of, stage=3).simulate()), of.on_one_device(), 1e-11)


def test_a_colocated_plan_names_the_arrays_that_trainers_get_in_full():
    full = "each trainer gets all rows of y, which only split layers read"
    assert full in planned(classifier(), COLOCATED).notes
    assert not any("gets all rows" in note for note in planned(classifier()).notes)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("data", [2, 4])
def test_colocated_layers_equal_one_device(name, data):
    """The trainers divide the batch and, in split layers, the parameters."""
    of = STEPS[name](CLIPPED)
    plan = planned(of, {"data": data, "model": "data"})
    tree_close(of.of(plan.on_mesh()), of.on_one_device(), 1e-12)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", STEPS)
def test_plans_of_colocated_layers_verify(name):
    report = planned(STEPS[name](CLIPPED), {"data": 2, "model": "data"}).verify()
    assert report.equal and report.complete, report


def test_a_batch_that_the_ranks_do_not_divide():
    of = classifier(rows=7)
    job = sharded(classifier(), stage=3).simulate()
    tree_close(of.of(job), of.on_one_device(), 1e-12)


def test_16_bits_on_a_mesh():
    of = transformer(layers=1)
    job = sharded(of, stage=3, precision="bf16").simulate()
    ranks = flat_options.sharding(
        *of.traced(), degree=2, stage=3, min_slice_size=0, precision="bf16"
    ).simulate()
    (one, two), (other, _) = (of.of(job)[0], of.of(job)[2]), (of.of(ranks)[0], of.of(ranks)[2])
    tree_close(one, other, 2e-2)
    assert np.isfinite(two)


# -- what a device stores and sends ----------------------------------------------------------------


def test_each_device_stores_its_pieces():
    of = transformer(layers=1)
    job = planned(of, {"data": 2, "model": 4}).on_mesh()
    state = job.init(jax.random.key(0))
    for _ in range(2):
        shapes = {n: {s.data.shape for s in x.addressable_shards} for n, x in state.params.items()}
        assert shapes["params/blocks/0/q"] == {(WIDTH, WIDTH // 4)}
        assert shapes["params/blocks/0/down"] == {(INNER // 4, WIDTH)}
        assert shapes["params/blocks/0/norm1"] == {(WIDTH,)}
        nu = state.opt_state["opt_state/0/nu/blocks/0/up"]
        assert {s.data.shape for s in nu.addressable_shards} == {(WIDTH, INNER // 4)}
        state, _ = job.step(state, *of.batch)


def reductions(plan, axis):
    """Return the shapes of the operands of all-reduces over an axis."""
    found = collections.Counter()
    for eqn in equations(plan.program.jaxpr):
        if eqn.primitive.name == "all_reduce" and eqn.params["over"] == (axis,):
            found.update(a.aval.shape for a in eqn.invars)
    return found


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("data, model", [(2, 2), (1, 4), (4, 2)])
def test_bytes_of_megatron(data, model, scanned):
    """A block all-reduces activations twice in forward, and twice in backward: no byte more.

    The step is traced with the rows of one trainer.
    """
    layers = 3
    plan = planned(transformer(layers=layers, scanned=scanned), {"data": data, "model": model})
    activation = ROWS * TOKENS * WIDTH * 8
    assert plan.traffic()["all_reduce", "model"] == layers * 4 * activation
    assert set(reductions(plan, "model")) == {(ROWS, TOKENS, WIDTH)}
    assert not plan.device_gathers

    # over the data axis, each device reduces gradients of its pieces, and the loss
    if data > 1:
        block_size = 4 * WIDTH**2 // model + (2 * WIDTH + 1) * INNER // model + 3 * WIDTH
        size = layers * block_size + 2 * WORDS * WIDTH
        assert plan.traffic()["all_reduce", "data"] == 8 * (size + 1)
        assert sum(bucket.nbytes for bucket in plan.buckets) == 8 * size


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("stage, gathers", [(1, 1), (2, 1), (3, 2)])
def test_bytes_of_zero_and_megatron(stage, gathers, scanned):
    """ZeRO moves the bytes of pieces, and Megatron the bytes of activations."""
    layers, data, model = 2, 2, 2
    plan = sharded(transformer(layers=layers, scanned=scanned), stage=stage)
    activation = ROWS * TOKENS * WIDTH * 8
    assert plan.traffic()["all_reduce", "model"] == layers * 4 * activation
    assert ("all_gather", "model") not in plan.traffic()

    # one-dimensional biases that model divides are not sliced over data, unless they are stacked
    pieces = layers * ((4 * WIDTH**2 + 2 * WIDTH * INNER) // model + 3 * WIDTH)
    pieces += 2 * WORDS * WIDTH
    bias = layers * INNER // model
    slices, full = (pieces + bias, 0) if scanned else (pieces, bias)
    assert plan.traffic()["reduce_scatter", "data"] == 8 * slices
    assert plan.traffic()["all_reduce", "data"] == 8 * (full + 1)
    # stage 3 gathers a parameter again in backward if backward reads it
    assert 8 * slices <= plan.traffic()["all_gather", "data"] <= gathers * 8 * slices
    assert plan.memory()["opt_state"] == 2 * 8 * (slices // data + full) + 4


def test_bytes_of_a_colocated_head():
    """Rows are all-gathered before the layer, and reduce-scattered in backward."""
    trainers, classes = 2, 7
    plan = planned(classifier(), {"data": trainers, "model": "data"})
    rows = trainers * ROWS
    assert plan.traffic()["all_gather", "data"] == rows * WIDTH * 8
    assert plan.traffic()["reduce_scatter", "data"] == rows * WIDTH * 8
    assert set(plan.traffic()) == {
        (op, "data") for op in ("all_gather", "reduce_scatter", "all_reduce")
    }
    shapes = reductions(plan, "data")
    # of each row: the maximum, the sum of exponentials, the label's logit, and for the accuracy the
    # largest logit and its class
    assert shapes[rows,] == 5
    # gradients of the body; the head's gradients are complete on each device
    assert shapes[6, WIDTH] == 1 and (WIDTH, -(-classes // trainers)) not in shapes
    state = plan.on_mesh().init(jax.random.key(0))
    pieces = {shard.data.shape for shard in state.params["params/head/w"].addressable_shards}
    assert pieces == {(WIDTH, 4)}


def test_layers_between_split_layers_compute_the_rows_of_a_trainer():
    trainers = 4
    of = embedded()
    plan = planned(of, {"data": trainers, "model": "data"})
    of_body = []
    for e in equations(plan.program.jaxpr):
        if e.primitive.name == "dot_general" and e.outvars[0].aval.shape == (WIDTH, WIDTH):
            of_body.append(e)
    assert [e.invars[0].aval.shape for e in of_body] == [(ROWS, TOKENS, WIDTH)]
    # behind the embedding a reduce-scatter; before the head an all-gather; and the same in
    # backward, where the gradient of the table is smaller than its cotangents
    activation, table = trainers * ROWS * TOKENS * WIDTH * 8, 12 * WIDTH * 8
    assert plan.traffic()["reduce_scatter", "data"] == 2 * activation + table
    assert plan.traffic()["all_gather", "data"] == activation
    tree_close(of.of(plan.on_mesh()), of.on_one_device(), 1e-12)


def test_kernels_that_are_normalized_are_sharded():
    plan = planned(normalized())
    shapes = {n: plan.program.inputs[f"params/{n}"].shape for n in ("up", "down")}
    assert shapes == {"up": (WIDTH, INNER // 2), "down": (INNER // 2, WIDTH)}
    assert not plan.device_gathers


def test_bytes_of_experts_on_the_devices_of_the_trainers():
    """Tokens go to their experts and back by all-to-alls, forward and backward."""
    trainers, count, capacity = 4, 4, 3
    plan = planned(routed(), {"data": trainers, "model": "data"})
    slots = count * ROWS * capacity * WIDTH * 8
    assert plan.traffic()["all_to_all", "data"] == 4 * slots
    assert ("all_gather", "data") not in plan.traffic()
    weights = WIDTH * WIDTH + WIDTH * count
    # gradients of the weights outside of experts, the loss, and the auxiliary loss
    assert plan.traffic()["all_reduce", "data"] == 8 * (weights + 1 + 2 * count)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("by_scatter", [False, True])
def test_experts_on_the_devices_of_the_trainers(by_scatter):
    of = routed(CLIPPED, by_scatter=by_scatter)
    plan = planned(of, {"data": 4, "model": "data"})
    tree_close(of.of(plan.on_mesh()), of.on_one_device(), 1e-12)
    report = plan.verify()
    assert report.equal and report.complete, report


def test_a_rank_stores_slices_of_pieces():
    of = transformer(layers=1)
    job = sharded(of, {"data": 4, "model": 2}, stage=3).on_mesh()
    state = job.init(jax.random.key(0))
    for _ in range(2):
        shapes = {n: {s.data.shape for s in x.addressable_shards} for n, x in state.params.items()}
        assert shapes["params/blocks/0/q"] == {(WIDTH // 4, WIDTH // 2)}
        assert shapes["params/blocks/0/down"] == {(INNER // 2, WIDTH // 4)}
        assert shapes["params/blocks/0/up_b"] == {(INNER // 2,)}
        assert shapes["params/head"] == {(WIDTH // 4, WORDS)}
        state, _ = job.step(state, *of.batch)


def test_bytes_of_a_split_head():
    """A row has three numbers: the maximum, the sum of exponentials, and the label's logit."""
    of = tied()
    lookups = ROWS * TOKENS
    traffic = planned(of).traffic()["all_reduce", "model"]
    # rows that are looked up, and the gradient of the head's operand
    assert traffic == 8 * (2 * lookups * WIDTH + 3 * lookups)


def test_the_plan_describes_the_mesh():
    plan = planned(transformer(layers=1))
    text = str(plan)
    assert "mesh of 2 data x 2 model" in text
    assert "sharded over model along dimension 0: params/blocks/0/o" in text
    assert re.search(r"all_reduce over model: 8,192 bytes per step", text)
    assert re.search(r"all_reduce over data: [\d,]+ bytes per step", text)
    assert plan.axes == (("data", 2), ("model", 2)) and plan.device_count == 4
    (cost,) = plan.costs()
    assert cost.count == 4
    labels = [op.outputs[0] for op in plan.program.ops if op.type == "all_reduce"]
    assert "params/head@GRAD.sum" in labels
    assert {op.role for op in plan.program.ops} >= {"forward", "backward", "optimize", "dist"}


def test_parameters_that_stay_replicated_are_listed():
    def loss(params, x):
        with dtrans.split(name="mlp"):
            h = jnp.tanh(x @ params["up"]) @ params["down"] + params["bias"]
        return jnp.mean(h**2)

    params = {"up": array(4, 6), "down": array(6, 4), "bias": array(4)}
    plan = planned(job_of(loss, params, (array(8, 4),)))
    assert "replicated over model: params/bias" in plan.notes


# -- checkpoints and roles -------------------------------------------------------------------------


def test_checkpoints_move_between_meshes(tmp_path):
    of = transformer(layers=1)
    one = planned(of, {"data": 2, "model": 4}).on_mesh()
    state, _ = one.step(one.init(jax.random.key(0)), *of.batch)
    dtrans.checkpoint.save(tmp_path / "saved", one, state)
    plans = [planned(of), flat_options.nccl2(*of.traced(), trainers=2)]
    plans.append(flat_options.sharding(*of.traced(), degree=2, stage=3, min_slice_size=0))
    plans += [sharded(of, stage=3), sharded(of, {"data": 4, "model": 2}, stage=1)]
    plans.append(sharded(of, stage=2, replicas=2))
    for k, plan in enumerate(plans):
        job = plan.on_mesh()
        restored = dtrans.checkpoint.restore(tmp_path / "saved", job)
        tree_close(job.params(restored), one.params(state), 0.0)
        tree_close(job.opt_state(restored), one.opt_state(state), 0.0)
        dtrans.checkpoint.save(tmp_path / f"again-{k}", job, restored)
        back = dtrans.checkpoint.restore(tmp_path / f"again-{k}", one)
        tree_close(one.params(back), one.params(state), 0.0)


def test_a_process_has_the_devices_of_its_trainers():
    plan = planned(transformer(layers=1), {"data": 4, "model": 2})
    state = (
        sum(x.size * x.dtype.itemsize for x in plan.program.inputs.values())
        - ROWS * (TOKENS + 1) * 8
    )
    table = plan.roles(["python", "train.py"], processes=2)
    assert [entry.memory for entry in table] == [2 * 2 * state] * 2


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        ({"mesh": {"data": 2, "tensor": 2}}, "mesh has an axis 'tensor'; expected 'data'"),
        ({"mesh": {"data": 2, "model": 0}}, r"mesh\['model'\]"),
        ({"mesh": {"data": "model"}}, r"mesh\['data'\]"),
        ({"mesh": COLOCATED, "num_micro_batch": 2}, "cannot be combined with num_micro_batch=2"),
        ({"mesh": COLOCATED, "kind": "local"}, "cannot be combined with batch='local'"),
        ({"mesh": COLOCATED, "compress": "bf16"}, "cannot be combined with reduce="),
        ({"mesh": COLOCATED, "unsplit_inputs": ("nope",)}, "unsplit_inputs names 'nope'"),
        ({"mesh": 4}, "a dict such as {'data': 4, 'model': 2}"),
        ({"trainers": 2}, r"mesh=\{'data': 2, 'model': 2\} cannot be combined with trainers=2"),
        ({"trainers_per_node": 2}, "cannot be combined with trainers_per_node=2"),
        ({"axis_name": "dp"}, "cannot be combined with axis_name='dp'"),
    ],
)
def test_options_that_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        planned(transformer(layers=1), **options)


@pytest.mark.parametrize(
    "options, words",
    [
        (
            {"mesh": COLOCATED},
            "cannot divide dtrans.split layers over the same devices as the batch; pass the mesh",
        ),
        ({"degree": 2}, r"mesh=.* cannot be combined with degree=2"),
        ({"replica_axis_name": "model"}, "cannot be combined with replica_axis_name='model'"),
        ({"axis_name": "ranks"}, "cannot be combined with axis_name='ranks'"),
        ({"partition": "greedy_even"}, r"cannot be combined with mesh=\{..., 'model': 2\}"),
    ],
)
def test_options_of_sharding_that_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        sharded(transformer(layers=1), **options)


def test_a_step_without_split_layers():
    of = job_of(lambda params, x: jnp.mean((x @ params) ** 2), array(4, 2), (array(8, 4),))
    with pytest.raises(ConfigError, match=r"has no dtrans.split\(\) scope; put"):
        planned(of)
    tree_close(of.of(planned(of, {"data": 4}).simulate()), of.on_one_device(), 1e-12)


def test_a_scope_without_parameters():
    def loss(params, x):
        h = x @ params
        with dtrans.split(name="activation"):
            h = jnp.tanh(h)
        return jnp.mean(h**2)

    of = job_of(loss, array(4, 2), (array(8, 4),))
    with pytest.raises(ConfigError, match="no parameter that can be sharded in split.*activation"):
        planned(of)


def test_a_scope_whose_parameters_no_rule_divides():
    def loss(params, x):
        with dtrans.split(name="experts"):
            h = jax.lax.ragged_dot(x, params, jnp.array([3, 5]))
        return jnp.mean(h**2)

    words = r"no parameter.* in split\(name='experts'\), since no rule divides params in ragged_dot"
    with pytest.raises(ConfigError, match=words):
        planned(job_of(loss, array(2, 4, 6), (array(8, 4),)))


def test_a_scope_for_another_number_of_devices():
    with pytest.raises(ConfigError, match="device_count=4, but 2 devices of the mesh divide split"):
        planned(classifier(device_count=4))
    of = classifier(device_count=2)
    tree_close(of.of(planned(of).simulate()), of.on_one_device(), 1e-12)


def test_local_scopes_and_callbacks_are_refused():
    def local(params, x):
        with dtrans.local():
            x = x - x.mean(0)
        with dtrans.split(name="mlp"):
            return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)

    def calls(params, x):
        jax.debug.print("rows {}", x.sum())
        with dtrans.split(name="mlp"):
            return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)

    params, batch = {"up": array(4, 6), "down": array(6, 4)}, (array(8, 4),)
    with pytest.raises(ConfigError, match=r"has a dtrans.local\(\) scope, which a mesh"):
        planned(job_of(local, params, batch))
    with pytest.raises(GradientError, match="every device of a trainer would call"):
        planned(job_of(calls, params, batch))


# -- plans without a model axis --------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["nccl2", "mesh", "sharding", "pserver"])
def test_a_split_scope_is_never_ignored_in_silence(strategy):
    traced = classifier().traced()
    if strategy == "nccl2":
        plan = dtrans.nccl2(*traced, trainers=2)
    elif strategy == "mesh":
        plan = dtrans.nccl2(*traced, mesh={"data": 2})
    elif strategy == "sharding":
        plan = dtrans.sharding(*traced, degree=2)
    else:
        plan = dtrans.pserver(*traced, trainers=2, pservers=("127.0.0.1:6174",))
    (note,) = [n for n in plan.notes if "has no effect" in n]
    assert "split(name='head') has no effect: every trainer computes the layer in full" in note
    assert "mesh={'data': n, 'model': m}" in note


def test_a_step_without_scopes_has_no_such_note():
    of = job_of(lambda params, x: jnp.mean((x @ params) ** 2), array(4, 2), (array(8, 4),))
    assert not [n for n in dtrans.nccl2(*of.traced(), trainers=2).notes if "has no effect" in n]
