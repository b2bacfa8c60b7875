"""A mesh with an axis "sequence": devices divide the sequences of a batch.

Numbers equal one device, plans verify, and bytes and activations are those of closed forms.
"""

from __future__ import annotations

import dataclasses
import re

import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import tree_close
from mesh_models import INNER, WIDTH, array, block, block_params, job_of, normed, planners
from pipeline_models import compiled_quickly

import dtrans
from dtrans.errors import BatchError, ConfigError, GradientError


MESH = {"data": 2, "sequence": 4}
ROWS, TOKENS, WORDS = 4, 8, 10
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.05, weight_decay=0.1))


@pytest.fixture(autouse=True)
def quickly(x64):
    """Enable 64 bits, and compile programs fast."""
    with compiled_quickly():
        yield


planned, sharded = planners(MESH)


# -- models ----------------------------------------------------------------------------------------


def words(rows=ROWS, seed=0):
    return np.random.default_rng(seed).integers(0, WORDS, (rows, TOKENS))


def transformer(tx=None, *, scanned=False, remat=False, rows=ROWS, layers=2):
    """Language model with positions, causal attention, and its table as the head."""
    blocks = [block_params(10 * i) for i in range(layers)]
    params = {"table": array(WORDS, WIDTH) * 3, "positions": array(TOKENS, WIDTH)}
    params["blocks"] = jax.tree.map(lambda *xs: np.stack(xs), *blocks) if scanned else blocks
    apply = jax.checkpoint(block) if remat else block

    def loss(params, tokens, labels):
        x = params["table"][tokens] + params["positions"][jnp.arange(tokens.shape[1])]
        if scanned:
            x, _ = jax.lax.scan(lambda x, p: (apply(p, x), None), x, params["blocks"])
        else:
            for p in params["blocks"]:
                x = apply(p, x)
        logits = x @ params["table"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return job_of(loss, params, (words(rows), words(rows, 1)), tx)


def rotary(tx=None):
    """Attention with rotary positions and a mask of padding; a masked mean; results per token."""
    params = {"block": block_params(), "table": array(WORDS, WIDTH) * 3}

    def turned(x):
        angles = jnp.arange(x.shape[1])[:, None] / 10.0 ** jnp.arange(x.shape[-1] // 2)
        one, two = jnp.split(x, 2, axis=-1)
        sin, cos = jnp.sin(angles), jnp.cos(angles)
        return jnp.concatenate([one * cos - two * sin, one * sin + two * cos], -1)

    def loss(params, tokens, labels, real):
        p, x = params["block"], params["table"][tokens]
        h = normed(x, p["norm1"])
        q, k, v = turned(h @ p["q"]), turned(h @ p["k"]), h @ p["v"]
        scores = jnp.where(real[:, None, :], q @ k.swapaxes(1, 2), -1e9)
        x = x + jax.nn.softmax(scores) @ v @ p["o"]
        logits = x @ params["table"].T
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.sum(losses * real) / jnp.sum(real), {"losses": losses, "last": logits[:, -1]}

    real = np.arange(TOKENS) < np.array([8, 3, 5, 1])[:, None]
    return job_of(loss, params, (words(), words(seed=1), real), tx, has_aux=True)


def convolution(tx=None):
    """Causal convolution, a batch norm over rows and tokens, dropout, and the first token."""
    params = {"kernel": array(3, WIDTH, WIDTH), "scale": np.ones(WIDTH), "head": array(WIDTH, 3)}

    def loss(params, x, y, key):
        h = jnp.pad(x, ((0, 0), (2, 0), (0, 0)))
        taps = [h[:, k : k + TOKENS] @ params["kernel"][k] for k in range(3)]
        h = sum(taps)
        h = (h - h.mean((0, 1))) / jnp.sqrt(h.var((0, 1)) + 1e-5) * params["scale"]
        h = jnp.where(jax.random.bernoulli(key, 0.8, h.shape), jnp.tanh(h) / 0.8, 0)
        logits = (h[:, 0] + h.max(1)) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    batch = (array(ROWS, TOKENS, WIDTH) * 4, np.arange(ROWS) % 3, jax.random.key(3))
    of = job_of(loss, params, batch[:2], tx)
    return dataclasses.replace(of, batch=(*of.batch, batch[2]))


def recurrent(tx=None):
    """Recurrence over the tokens, which only complete sequences can compute."""
    params = {"w": array(WIDTH, WIDTH), "u": array(WIDTH, WIDTH, seed=1)}

    def loss(params, x, y):
        cell = lambda h, token: (jnp.tanh(token @ params["w"] + h @ params["u"]),) * 2
        _, h = jax.lax.scan(cell, jnp.zeros((len(x), WIDTH)), x.swapaxes(0, 1))
        return jnp.mean((h.swapaxes(0, 1) - y) ** 2)

    shape = (ROWS, TOKENS, WIDTH)
    return job_of(loss, params, (array(*shape), array(*shape, seed=1)), tx)


def blockwise(tx=None, blocks=4):
    """Causal attention by a loop over blocks of keys, which stores no scores of all tokens."""
    params = {n: array(WIDTH, WIDTH, seed=i) for i, n in enumerate("qkvo")}

    def loss(params, x):
        q, k, v = (x @ params[n] for n in "qkv")
        size = x.shape[1] // blocks
        cut = lambda x: x.reshape(len(x), blocks, size, WIDTH).swapaxes(0, 1)

        @jax.checkpoint
        def body(carry, block):
            highest, total, read = carry
            start, k, v = block
            scores = q @ k.swapaxes(1, 2)
            is_past = jnp.arange(x.shape[1])[:, None] >= start + jnp.arange(size)
            scores = jnp.where(is_past, scores, -1e9)
            top = jnp.maximum(highest, scores.max(-1))
            weights, old = jnp.exp(scores - top[..., None]), jnp.exp(highest - top)
            read = read * old[..., None] + weights @ v
            return (top, total * old + weights.sum(-1), read), None

        zero = jnp.zeros(x.shape[:2])
        blocks_of_keys = size * jnp.arange(blocks), cut(k), cut(v)
        (_, total, read), _ = jax.lax.scan(body, (zero - 1e9, zero, 0 * x), blocks_of_keys)
        return jnp.mean((x + read / total[..., None] @ params["o"]) ** 2)

    return job_of(loss, params, (array(ROWS, TOKENS, WIDTH) * 3,), tx)


STEPS = {
    "transformer": transformer,
    "scanned": lambda tx=None: transformer(tx, scanned=True),
    "remat": lambda tx=None: transformer(tx, remat=True),
    "rotary": rotary,
    "convolution": convolution,
    "recurrent": recurrent,
    "blockwise": blockwise,
}


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("tx", [None, CLIPPED], ids=["adam", "clipped"])
def test_numbers_equal_one_device(name, tx):
    of = STEPS[name](tx)
    tree_close(of.of(planned(of).simulate()), of.on_one_device(), 1e-12)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_plans_verify(name, stage):
    of = STEPS[name](CLIPPED)
    plan = sharded(of, stage=stage) if stage else planned(of)
    report = plan.verify()
    assert report.equal and report.complete, report


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "mesh",
    [
        {"data": 2, "sequence": 2, "model": 2},
        {"sequence": 4, "model": 2},
        {"sequence": 8},
        {"data": 4, "sequence": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_sizes_of_a_mesh_on_devices(mesh, stage):
    of = transformer(CLIPPED, layers=1)
    plan = sharded(of, mesh, stage=stage) if stage else planned(of, mesh)
    tree_close(of.of(plan.on_mesh()), of.on_one_device(), 1e-12)


@pytest.mark.parametrize("rows", [3, 5])
def test_a_batch_that_the_trainers_do_not_divide(rows):
    planned_for, of = transformer(layers=1), transformer(layers=1, rows=rows)
    tree_close(of.of(planned(planned_for).simulate()), of.on_one_device(), 1e-12)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options", [{"num_micro_batch": 2}, {"clip_local_norm": 0.1}, {"kind": "local"}], ids=str
)
def test_options_mean_the_same_as_without_a_sequence_axis(options):
    of = transformer(layers=1)
    mesh = planned(of, **options).simulate()
    trainers = flat_options.nccl2(*of.traced(), trainers=2, **options).simulate()
    tree_close(of.of(mesh), of.of(trainers), 1e-12)


def test_sequences_along_other_dimensions():
    params = {"w": array(WIDTH, WIDTH)}

    def loss(params, x, lengths, bias):  # x is [tokens, rows, width]
        h = jnp.tanh(x @ params["w"]) + bias[:, None]
        real = jnp.arange(TOKENS)[:, None] < lengths
        return jnp.sum(h.sum(-1) ** 2 * real) / jnp.sum(real)

    batch = (array(TOKENS, ROWS, WIDTH), np.array([8, 3, 5, 1]), array(TOKENS, WIDTH))
    of = job_of(loss, params, batch)
    chosen = dtrans.Batch(axes=(1, 0, None), sequence=(0, None, 0))
    plan = dtrans.nccl2(*of.traced(), mesh=MESH, batch=chosen)
    assert plan.sequence.dims == {"x": 0, "bias": 0}
    tree_close(of.of(plan.on_mesh()), of.on_one_device(), 1e-12)


def test_uneven_batches_of_other_lengths():
    """Two batches have the same number of rows, which the trainers do not divide."""
    params = {"w": array(WIDTH, WIDTH)}
    loss = lambda params, x: jnp.mean(jnp.tanh(x @ params["w"]) ** 2)
    of = job_of(loss, params, (array(ROWS, TOKENS, WIDTH),))
    job, state = planned(of).simulate(), of.init(jax.random.key(0))
    divided = job.init(jax.random.key(0))
    for tokens in (8, 4):
        x = jnp.asarray(array(3, tokens, WIDTH, seed=tokens))
        divided, value = job.step(divided, x)
        *state, wanted = of.step(*state, x)
        tree_close(value, wanted, 1e-12)


# -- costs -----------------------------------------------------------------------------------------


def test_bytes_over_the_sequence_axis():
    """Keys and values are gathered once, their cotangents are scattered, gradients are summed."""
    of = transformer(layers=1)
    traffic = planned(of).traffic()
    activations = ROWS * TOKENS * WIDTH * 8
    positions = TOKENS * WIDTH * 8
    weights = sum(x.size for x in jax.tree.leaves(of.init(jax.random.key(0))[0])) * 8
    assert traffic["all_gather", "sequence"] == 2 * activations + positions
    assert traffic["reduce_scatter", "sequence"] == 2 * activations
    # the gradients of all weights but positions, and the loss
    assert traffic["all_reduce", "sequence"] == weights - positions + 8


@pytest.mark.parametrize("blocks", [2, 4, 8])
def test_bytes_of_a_loop_over_blocks_of_keys(blocks):
    """A loop moves the same bytes as a softmax of all scores: keys, values, and cotangents."""
    traffic = planned(blockwise(blocks=blocks)).traffic()
    activations = ROWS * TOKENS * WIDTH * 8
    assert traffic["all_gather", "sequence"] == 2 * activations
    assert traffic["reduce_scatter", "sequence"] == 2 * activations


def test_loops_over_layers_stay_divided():
    notes = [x for x in planned(transformer(scanned=True)).notes if x.startswith("gathered")]
    assert not [x for x in notes if "scan of" in x], notes


def test_activations_of_a_device():
    """One of n devices stores at most 1/n + 10 % of the activations."""
    rows, tokens, width = 2, 256, 16
    params = {n: array(width, width, seed=i) for i, n in enumerate("qkvo")}

    def loss(params, x):
        for _ in range(3):
            q, k, v = (x @ params[n] for n in "qkv")
            scores = jnp.where(np.tri(tokens, dtype=bool), q @ k.swapaxes(1, 2), -1e9)
            x = x + jnp.tanh(jax.nn.softmax(scores) @ v @ params["o"])
        return jnp.mean(x**2)

    of = job_of(loss, params, (array(rows, tokens, width),), optax.sgd(0.1))
    state = of.init(jax.random.key(0))
    one = jax.jit(of.step).lower(*state, *of.batch).compile().memory_analysis()
    plan = dtrans.nccl2(*of.traced(), mesh={"sequence": 4})
    job = plan.on_mesh()
    divided = job.lower(job.init(jax.random.key(0)), *of.batch).compile().memory_analysis()
    assert divided.temp_size_in_bytes <= (1 / 4 + 0.1) * one.temp_size_in_bytes


# -- optimizer state -------------------------------------------------------------------------------


def over_both(of, mesh=MESH, stage=1):
    """Return the plan of a job whose optimizer state is divided over "data" and "sequence"."""
    slices = dtrans.Slicing(min_slice_size=0, state_axes=("data", "sequence"))
    return dtrans.sharding(*of.traced(), mesh=mesh, stage=stage, slices=slices)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "mesh, stage",
    [
        (MESH, 1),
        (MESH, 2),
        (MESH, 3),
        ({"sequence": 4}, 1),
        ({"data": 2, "sequence": 2, "model": 2}, 3),
    ],
    ids=str,
)
def test_optimizer_state_divided_over_both_axes(mesh, stage):
    of = transformer(CLIPPED, layers=1)
    plan = over_both(of, mesh, stage)
    tree_close(of.of(plan.on_mesh()), of.on_one_device(), 1e-12)
    report = plan.verify()
    assert report.equal and report.complete, report


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "tx", [optax.lamb(0.05), optax.adafactor(0.05, min_dim_size_to_factor=4)], ids=["lamb", "ada"]
)
def test_optimizers_divided_over_both_axes(tx):
    of = transformer(tx, layers=1)
    tree_close(of.of(over_both(of).simulate()), of.on_one_device(), 1e-11)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_device_stores_a_slice_of_state_for_each_pair_of_axes(stage):
    """After the update, kernels are gathered over "sequence": in stage 3, only a trainer's slices.

    In stages 1 and 2, the gather over "data" moves pieces, and the one over "sequence" full
    kernels. Arrays of one dimension are divided over "data" only.
    """
    of = transformer(layers=1)
    plan, without = over_both(of, stage=stage), sharded(of, MESH, stage=stage)
    shapes = {n: t.shape for n, t in plan.program.inputs.items()}
    assert shapes["opt_state/0/mu/blocks/0/up"] == (WIDTH // 2, INNER // 4)
    assert shapes["opt_state/0/nu/blocks/0/up_b"] == (INNER // 2,)
    kernel = (WIDTH // 2, INNER) if stage == 3 else (WIDTH, INNER)
    assert shapes["params/blocks/0/up"] == kernel
    kernels = 4 * WIDTH**2 + 2 * WIDTH * INNER + (WORDS + TOKENS) * WIDTH
    others = INNER + 3 * WIDTH
    assert plan.memory()["opt_state"] == 2 * 8 * (kernels / 8 + others / 2) + 4
    more = plan.traffic()["all_gather", "sequence"] - without.traffic()["all_gather", "sequence"]
    assert more == 8 * (kernels / 2 if stage == 3 else kernels)
    if stage == 1:
        assert plan.traffic()["all_gather", "data"] == 8 * (kernels / 4 + others)
    job = plan.on_mesh()
    nu = job.init(jax.random.key(0)).opt_state["opt_state/0/nu/blocks/0/up"]
    assert {s.data.shape for s in nu.addressable_shards} == {(WIDTH // 2, INNER // 4)}


def test_checkpoints_of_state_divided_over_both_axes(tmp_path):
    of = transformer(layers=1)
    one, other = over_both(of).on_mesh(), planned(of).on_mesh()
    state, _ = one.step(one.init(jax.random.key(0)), *of.batch)
    dtrans.checkpoint.save(tmp_path / "saved", one, state)
    restored = dtrans.checkpoint.restore(tmp_path / "saved", other)
    tree_close(other.opt_state(restored), one.opt_state(state), 0.0)
    dtrans.checkpoint.save(tmp_path / "again", other, restored)
    again = dtrans.checkpoint.restore(tmp_path / "again", one)
    tree_close(one.opt_state(again), one.opt_state(state), 0.0)


def test_other_axes_of_the_state_are_refused():
    traced = transformer(layers=1).traced()
    for axes in (("sequence",), ("data", "model"), "data"):
        with pytest.raises(ConfigError, match=r"state_axes must be \('data',\) or"):
            dtrans.Slicing(state_axes=axes)
    with pytest.raises(ConfigError, match="pass partition='rows', or leave state_axes out"):
        dtrans.Slicing("greedy_even", state_axes=("data", "sequence"))
    slices = dtrans.Slicing(state_axes=("data", "sequence"))
    for where in ({"mesh": {"data": 2}}, {"degree": 2}):
        with pytest.raises(ConfigError, match="there is no mesh with this axis; pass mesh="):
            dtrans.sharding(*traced, slices=slices, **where)


# -- texts and errors ------------------------------------------------------------------------------


def test_the_plan_names_the_divided_arrays():
    text = str(planned(transformer(layers=1)))
    assert "mesh of 2 data x 4 sequence" in text
    assert "divided over sequence along dimension 1: tokens, labels" in text


def refused(error, match, of, mesh=MESH, **options):
    with pytest.raises(error, match=match):
        dtrans.nccl2(*of.traced(), mesh=mesh, **options)


def test_sequences_that_the_devices_do_not_divide():
    of = transformer(layers=1)
    text = "tokens has 8 entries along dimension 1, which the 3 devices of the axis 'sequence'"
    refused(BatchError, text, of, {"sequence": 3})
    job = planned(of).simulate()
    state = job.init(jax.random.key(0))
    with pytest.raises(BatchError, match="tokens has 6 entries along dimension 1"):
        job.step(state, *(x[:, :6] for x in of.batch))
    with pytest.raises(BatchError, match="tokens has 6 entries along dimension 1"):
        job.step(state, *(x[:3, :6] for x in of.batch))


def test_other_sequence_dimensions_are_refused():
    of = transformer(layers=1)
    refused(ConfigError, "is the dimension of its rows", of, batch=dtrans.Batch(sequence=0))
    nothing = dtrans.Batch(sequence=None)
    refused(ConfigError, re.escape("no array of the batch has sequences"), of, batch=nothing)
    refused(ConfigError, "has 1 entries, but", of, batch=dtrans.Batch(sequence=(1,)))
    with pytest.raises(ConfigError, match="sequence must be a dimension"):
        dtrans.Batch(sequence="time")


def test_what_a_sequence_axis_excludes():
    refused(ConfigError, "exclude each other", transformer(), {**MESH, "model": "data"})

    def local(params, x):
        with dtrans.local():
            return jnp.mean((x @ params["w"]) ** 2)

    def printing(params, x):
        jax.debug.print("{}", x.sum())
        return jnp.mean((x @ params["w"]) ** 2)

    batch = (array(ROWS, TOKENS, WIDTH),)
    params = {"w": array(WIDTH, WIDTH)}
    refused(ConfigError, re.escape("a dtrans.local() scope"), job_of(local, params, batch))
    refused(GradientError, "every device of a trainer would call", job_of(printing, params, batch))
