"""Compressed messages of synchronous parameter servers: programs, bytes, numbers and errors."""

from __future__ import annotations

import copy
import pickle
import re
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from batch_norm_job import MEAN, plan_for as batch_norm_plan
from helpers import plan_of, tree_close, tree_equal

import dtrans
from dtrans.errors import CheckpointWarning, ConfigError
from dtrans.ops import WireType, encode_with_feedback, encode_with_momentum
from dtrans.parameter_server.plan import PServerPlan


TX = optax.adamw(0.1)
PACKED = ("int8", "e3m0")


def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((x @ params["w"] * params["s"] + params["b"] - y) ** 2)


def params_of(dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    """Return a matrix whose five rows are divided unevenly, a vector, and a number."""
    rng = np.random.default_rng(0)
    shapes = {"w": (5, 3), "b": (3,), "s": ()}
    return {n: jnp.asarray(rng.normal(size=shape), dtype) for n, shape in shapes.items()}


def batch_of(seed: int = 0, rows: int = 8, dtype: Any = jnp.float32) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(size=(rows, n)), dtype) for n in (5, 3))


def planned(mode: Any, *, dtype: Any = jnp.float32, servers: int = 2, **options: Any) -> Any:
    return plan_of(
        loss,
        TX,
        params_of(dtype),
        *batch_of(dtype=dtype),
        servers=servers,
        trainers=2,
        mode=mode,
        **options,
    )


def types_of(plan: PServerPlan, kind: str) -> dict[str, str]:
    """Return the type of each block that a trainer sends or receives, by its name."""
    found = {}
    for op, eqn in zip(plan.trainer.ops, plan.trainer.eqns, strict=True):
        if op.type == kind:
            atoms = eqn.invars if kind == "send" else eqn.outvars
            found |= zip(op.attrs["names"], [a.aval.str_short() for a in atoms], strict=True)
    return found


# -- programs and bytes ----------------------------------------------------------------------------


def test_casts_are_equations_of_trainers_and_servers() -> None:
    plan = planned(dtrans.Sync(compress="bf16", compress_params="fp16"))
    sent, received = types_of(plan, "send"), types_of(plan, "recv")
    assert sent["params/w@GRAD.block0.trainer_0"] == "bfloat16[3,3]"
    assert sent["params/s@GRAD.trainer_0"] == "bfloat16[]"
    assert received["params/w.block1.fp16"] == "float16[2,3]"
    ops = [op.type for op in plan.trainer.ops]
    last = len(ops) - 1 - ops[::-1].index("send")
    assert ops[last - 1] == "convert_element_type" == ops[-1] and "split_byref" not in ops
    assert [str(t) for t in plan.trainer.outputs.values()][:3] == [
        str(t) for t in plan.trainer.inputs.values()
    ][:3]
    for programs in plan.servers.values():
        (serve,) = programs.main.eqns
        names = serve.params["param_names"]
        assert names and all(n.endswith(".fp16") for n in names)
        for block in serve.params["optimize_blocks"]:
            assert all(g.wire == WireType("bf16") for g in block.grads)
            if f"{block.name}.fp16" in names:
                assert block.eqns[-1].primitive.name == "convert_element_type"
                assert block.outvars[f"{block.name}.fp16"].aval.dtype == jnp.float16


@pytest.mark.parametrize("name", PACKED)
def test_packed_gradients_are_vectors_of_bytes_and_small_leaves_are_not_packed(name: str) -> None:
    plan = planned(dtrans.Sync(compress=name))
    sent = types_of(plan, "send")
    sizes = {"int8": (9, 6), "e3m0": (5, 3)}[name]
    assert sent["params/w@GRAD.block0.trainer_0"] == f"uint8[{4 + sizes[0]}]"
    assert sent["params/w@GRAD.block1.trainer_0"] == f"uint8[{4 + sizes[1]}]"
    assert sent["params/s@GRAD.trainer_0"] == "float32[]"
    rounding_errors = {
        "rounding_error/params/w": "float32[5,3]",
        "rounding_error/params/b": "float32[3]",
    }
    for types in (plan.trainer.inputs, plan.trainer.outputs):
        found = {n: t.str_short() for n, t in types.items() if n.startswith("rounding_error/")}
        assert found == rounding_errors
    # the gradient of a leaf is never sent without its encoding
    assert all(t.startswith("uint8") for n, t in sent.items() if not n.startswith("params/s"))


@pytest.mark.parametrize(
    "mode, sent, received",
    [
        (dtrans.Sync(compress="bf16"), 2 * 512, 4 * 512),
        (dtrans.Sync(compress_params="bf16"), 4 * 512, 2 * 512),
        (dtrans.Sync(compress="fp16", compress_params="bf16"), 2 * 512, 2 * 512),
        (dtrans.Sync(compress="int8"), 512 + 4 * 4, 4 * 512),
        (dtrans.Sync(compress="e3m0", compress_params="fp16"), 256 + 4 * 4, 2 * 512),
    ],
    ids=str,
)
def test_bytes_are_a_half_a_quarter_and_an_eighth_with_a_scale_for_each_block(
    mode: Any, sent: int, received: int
) -> None:
    params = {"w": jnp.ones((24, 16)), "v": jnp.ones(128)}
    step = lambda params, x: jnp.mean((x @ params["w"]) ** 2) + jnp.sum(params["v"] ** 2)
    plan = plan_of(step, TX, params, jnp.ones((4, 24)), servers=2, trainers=2, mode=mode)
    assert plan.bytes_per_step == {"send": sent, "recv": received}
    trainer, *servers = plan.costs()
    assert (trainer.sent, trainer.received) == (sent, received)
    assert sum(s.received for s in servers) == 2 * sent
    assert sum(s.sent for s in servers) == 2 * received
    counted = {"gradients": 0, "parameters": 0}
    for x in plan.transfers():
        counted[x.what] += x.nbytes
    assert counted == {"gradients": sent, "parameters": received}
    # servers store the blocks that they send, and trainers their rounding errors
    copies = 0 if mode.compress_params is None else 2 * 512
    exact = planned_exactly(step, params)
    assert sum(s.state_bytes for s in servers) == copies + sum(
        s.state_bytes for s in list(exact.costs())[1:]
    )
    rounding_errors = 4 * 512 if mode.compress in PACKED else 0
    assert trainer.state_bytes == 4 * 512 + rounding_errors


def planned_exactly(step: Any, params: Any) -> PServerPlan:
    return plan_of(step, TX, params, jnp.ones((4, 24)), servers=2, trainers=2)


def test_a_plan_names_what_is_rounded_and_has_another_fingerprint() -> None:
    plan = planned(dtrans.Sync(compress="int8", compress_params="bf16"))
    notes = "\n".join(plan.notes)
    assert (
        "results are not those of one device: trainers round gradients to int8 (params/b, params/w)"
        ", and add their rounding errors to their next gradients" in notes
    )
    assert "servers round the parameters that they send to bf16 (params/b, params/s, " in notes
    assert "exact before rounding: mean over 16 rows" in notes
    exact = planned(dtrans.Sync())
    assert "one device" not in "\n".join(exact.notes)
    assert plan.identity["options"] != exact.identity["options"]
    programs = [x.trainer.fingerprint for x in (plan, exact, planned(dtrans.Sync(compress="int8")))]
    assert len({*programs}) == 3


def test_leaves_of_16_bits_and_averaged_leaves_are_sent_as_they_are() -> None:
    with jax.enable_x64(True):
        plan = batch_norm_plan(
            2, 2, MEAN, mode=dtrans.Sync(compress="bf16", compress_params="bf16")
        )
    names = {"params/net/w", "params/net/out"}
    assert {*plan.compression.gradients} == names == {*plan.compression.params}
    half = planned(dtrans.Sync(compress="bf16", compress_params="fp16"), dtype=jnp.bfloat16)
    assert not half.compression.is_used
    smaller = planned(dtrans.Sync(compress="int8"), dtype=jnp.bfloat16)
    assert {*smaller.compression.rounding_errors.values()} == {
        t for t in smaller.compression.rounding_errors.values() if t.dtype == jnp.float32
    }


# -- numbers ---------------------------------------------------------------------------------------


def by_hand(plan: PServerPlan, mode: Any, params: Any, batches: Any) -> tuple[Any, Any]:
    """Train without dtrans: return the parameters on servers and those that trainers receive."""
    cast = None if mode.compress_params is None else WireType(mode.compress_params)
    wire = None if mode.compress is None else WireType(mode.compress, mode.compress_scale)

    def receive(tree: Any) -> Any:
        if cast is None:
            return tree
        return jax.tree.map(lambda x: cast.decode(cast.encode(x), x), tree)

    rounding_errors = [jax.tree.map(jnp.zeros_like, params) for _ in range(plan.trainers)]

    def send(k: int, name: str, gradient: Any) -> Any:
        if wire is None or f"params/{name}" not in plan.compression.gradients:
            return gradient
        found, rests = [], []
        for block in plan.placement.blocks[f"params/{name}"]:
            rows = ... if block.span is None else block.span.index
            part = gradient[rows]
            if wire.is_packed:
                sent, rest = encode_with_feedback(wire, part, rounding_errors[k][name][rows])
                rests.append(rest)
            else:
                sent = wire.encode(part)
            found.append(wire.decode(sent, part))
        in_one = lambda parts: parts[0] if gradient.ndim == 0 else jnp.concatenate(parts)
        if rests:
            rounding_errors[k][name] = in_one(rests)
        return in_one(found)

    opt_state, received = TX.init(params), receive(params)
    for x, y in batches:
        rows, grads = len(x) // plan.trainers, []
        for k in range(plan.trainers):
            part = slice(k * rows, (k + 1) * rows)
            exact = jax.grad(loss)(received, x[part], y[part])
            grads.append({n: send(k, n, g) for n, g in exact.items()})
        mean = jax.tree.map(lambda *g: sum(g) / len(g), *grads)
        updates, opt_state = TX.update(mean, opt_state, params)
        params = optax.apply_updates(params, updates)
        received = receive(params)
    return params, received


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "mode",
    [
        dtrans.Sync(compress="bf16"),
        dtrans.Sync(compress="fp16", compress_scale=64.0),
        dtrans.Sync(compress_params="bf16"),
        dtrans.Sync(compress="int8"),
        dtrans.Sync(compress="e3m0"),
        dtrans.Sync(compress="int8", compress_params="fp16"),
    ],
    ids=str,
)
@pytest.mark.parametrize("way", ["simulate", "on_mesh"])
def test_a_job_equals_training_by_hand_with_the_same_rounding(mode: Any, way: str) -> None:
    with jax.enable_x64(True):
        params = params_of(jnp.float64)
        batches = [batch_of(s, 6, jnp.float64) for s in range(4)]
        plan = planned(mode, dtype=jnp.float64)
        job = getattr(plan, way)()
        state = job.init(params)
        for batch in batches:
            state, _ = job.step(state, *batch)
        stored, received = by_hand(plan, mode, params, batches)
        tree_close(job.params(state), received, 1e-12)
        tree_close(dtrans.checkpoint.gather(plan, state.servers)[0], stored, 1e-12)
        rounded = jax.tree.leaves(jax.tree.map(np.array_equal, stored, received))
        assert all(rounded) == (mode.compress_params is None)


def test_one_trainer_has_rounding_errors_too() -> None:
    mode = dtrans.Sync(compress="e3m0")
    plan = plan_of(loss, TX, params_of(), *batch_of(), servers=1, mode=mode)
    job = plan.simulate()
    state = job.init(params_of())
    for seed in range(3):
        state, _ = job.step(state, *batch_of(seed))
    _, received = by_hand(plan, mode, params_of(), [batch_of(s) for s in range(3)])
    tree_close(job.params(state), received, 1e-5)
    assert np.any(state.params["rounding_error/params/w"])


@pytest.mark.parametrize("compress", ["bf16", "int8"])
def test_batches_that_cannot_be_divided_evenly(compress: str) -> None:
    """Rounded gradients differ from exact ones by the rounding alone."""
    found = []
    for mode in (dtrans.Sync(), dtrans.Sync(compress=compress)):
        plan = plan_of(
            loss, optax.sgd(0.1), params_of(), *batch_of(), servers=2, trainers=2, mode=mode
        )
        job = plan.simulate()
        state, _ = job.step(job.init(params_of()), *batch_of(rows=7))
        found.append(job.params(state))
    exact, rounded = found
    for n, x in exact.items():
        change = np.abs(x - params_of()[n]).max()
        assert np.abs(x - rounded[n]).max() <= change / 64
    assert not all(np.array_equal(x, rounded[n]) for n, x in exact.items())


def as_bf16(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16).astype(x.dtype)


def test_restored_jobs_begin_with_encoded_parameters_and_the_saved_rounding_errors(
    tmp_path: Any,
) -> None:
    """A checkpoint of a job without compression has no encoded blocks, and no rounding errors."""
    mode = dtrans.Sync(compress="int8", compress_params="bf16")
    job, exact = planned(mode).simulate(), planned(dtrans.Sync()).simulate()
    for source in (job, exact):
        state = source.init(params_of())
        for seed in range(2):
            state, _ = source.step(state, *batch_of(seed))
        path = tmp_path / str(source is job)
        dtrans.checkpoint.save(path, source, state)
        # only a checkpoint without rounding errors warns
        expected = (
            nullcontext() if source is job else pytest.warns(CheckpointWarning, match="lacks")
        )
        with expected:
            restored = dtrans.checkpoint.restore(path, job)
        for ep, arrays in restored.servers.items():
            for n, x in arrays.items():
                if n.endswith(".bf16"):
                    block = arrays[n.removesuffix(".bf16")]
                    assert np.array_equal(x, block.astype(jnp.bfloat16))
                    saved = state.servers[ep][n.removesuffix(".bf16")]
                    assert np.array_equal(block, saved)
        stored = dtrans.checkpoint.gather(job.plan, restored.servers)[0]
        tree_equal(job.params(restored), jax.tree.map(as_bf16, stored))
        error = np.asarray(restored.params["rounding_error/params/w"])
        if source is job:
            assert np.any(error) and np.array_equal(error, state.params["rounding_error/params/w"])
        else:
            assert not np.any(error)
        job.step(restored, *batch_of())


def test_verify_names_the_rounding_that_it_leaves_out() -> None:
    report = planned(dtrans.Sync(compress="int8", compress_params="bf16")).verify()
    assert report.equal and not report.complete
    assert "the rounding of compressed messages, which verify() leaves out" in report.unevaluated


# -- the largest numbers ---------------------------------------------------------------------------

RAMP = dtrans.TopK((0.4, 0.1), begin_step=1, ramp_steps=4, momentum=0.9, clip_norm=0.5)


def matrix_loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["w"]) * params["s"] + params["b"] - y) ** 2)


def matrix_params(dtype: Any = jnp.float64) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = {"w": (11, 6), "b": (6,), "s": ()}
    return {n: jnp.asarray(rng.normal(size=shape), dtype) for n, shape in shapes.items()}


def matrix_batch(seed: int, dtype: Any = jnp.float64) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(6, 11)), rng.normal(size=(6, 6))
    return jnp.asarray(x, dtype), jnp.asarray(y, dtype)


def topk_plan(topk: dtrans.TopK, dtype: Any = jnp.float64, servers: int = 2) -> PServerPlan:
    return plan_of(
        matrix_loss,
        optax.sgd(0.1),
        matrix_params(dtype),
        *matrix_batch(0, dtype),
        servers=servers,
        trainers=2,
        mode=dtrans.Sync(compress=topk),
    )


def density_at(topk: dtrans.TopK, step: int) -> float:
    """Return the density of a step by Paddle's `get_period_sparsity`."""
    if step < topk.begin_step:
        return 1.0
    index = int((step - topk.begin_step) * len(topk.densities) / topk.ramp_steps)
    return topk.densities[min(index, len(topk.densities) - 1)]


def dgc_in_numpy(
    plan: PServerPlan, topk: dtrans.TopK, batches: Any
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Train by Paddle's dgc op in NumPy; return the parameters, and trainer 1's unsent sums."""
    params = {n: np.array(x) for n, x in matrix_params().items()}
    u = [{n: np.zeros_like(x) for n, x in params.items()} for _ in range(2)]
    v = [{n: np.zeros_like(x) for n, x in params.items()} for _ in range(2)]
    for step, (x, y) in enumerate(batches):
        density, total = density_at(topk, step), {n: np.zeros_like(p) for n, p in params.items()}
        for k in range(2):
            rows = slice(3 * k, 3 * k + 3)
            grads = jax.grad(matrix_loss)(params, x[rows], y[rows])
            for n, grad in grads.items():
                g = np.array(grad)
                if topk.clip_norm is not None and step >= topk.begin_step:
                    limit, norm = topk.clip_norm / np.sqrt(2), np.sqrt((g**2).sum())
                    g = g if norm < limit else g / norm * limit
                if topk.nesterov:
                    u[k][n][...] = topk.momentum * (u[k][n] + g)
                    v[k][n] += u[k][n] + g
                else:
                    u[k][n][...] = topk.momentum * u[k][n] + g
                    v[k][n] += u[k][n]
                for block in plan.placement.blocks[f"params/{n}"]:
                    index = ... if block.span is None else block.span.index
                    rest, velocity = v[k][n][index].reshape(-1), u[k][n][index].reshape(-1)
                    sent, count = np.zeros_like(rest), max(1, round(density * rest.size))
                    if count * 12 >= rest.size * 8:  # values and indices need no fewer bytes
                        sent, rest = rest, np.zeros_like(rest)
                    else:
                        largest = np.argsort(-np.abs(rest), kind="stable")[:count]
                        sent[largest] = rest[largest]
                        rest[largest] = velocity[largest] = 0.0
                    total[n][index] += sent.reshape(total[n][index].shape)
                    v[k][n][index] = rest.reshape(total[n][index].shape)
                    u[k][n][index] = velocity.reshape(total[n][index].shape)
        for n in params:
            params[n] = params[n] - 0.1 * total[n] / 2
    return params, v[1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "topk",
    [
        dtrans.TopK(0.1),
        dtrans.TopK(0.2, momentum=0.9, clip_norm=1.0),
        dtrans.TopK(0.2, momentum=0.8, nesterov=True),
        dtrans.TopK((0.4, 0.1), ramp_steps=3),
        RAMP,
    ],
    ids=["constant", "momentum", "nesterov", "ramp", "all"],
)
@pytest.mark.parametrize("way", ["simulate", "on_mesh"])
def test_the_largest_numbers_are_sent_as_by_paddles_dgc(topk: dtrans.TopK, way: str) -> None:
    with jax.enable_x64(True):
        batches = [matrix_batch(s) for s in range(7)]
        plan = topk_plan(topk)
        job = getattr(plan, way)()
        state = job.init(matrix_params())
        for batch in batches:
            state, _ = job.step(state, *batch)
        params, unsent = dgc_in_numpy(plan, topk, batches)
        tree_close(job.params(state), params, 1e-12)
        for n in ("b", "w"):
            tree_close(state.params[f"rounding_error/params/{n}"][1], unsent[n], 1e-12)
        assert np.any(unsent["w"])


def test_full_gradients_with_momentum_are_sgd_with_momentum() -> None:
    with jax.enable_x64(True):
        params, batches = matrix_params(), [matrix_batch(s) for s in range(5)]
        for nesterov in (False, True):
            job = topk_plan(dtrans.TopK(1.0, momentum=0.9, nesterov=nesterov)).simulate()
            exact = plan_of(
                matrix_loss,
                optax.sgd(0.1, momentum=0.9, nesterov=nesterov),
                params,
                *batches[0],
                servers=2,
                trainers=2,
            ).simulate()
            states = [job.init(params), exact.init(params)]
            for batch in batches:
                states = [x.step(s, *batch)[0] for x, s in zip((job, exact), states, strict=True)]
            tree_close(job.params(states[0]), exact.params(states[1]), 1e-12)


def test_a_plan_has_programs_bytes_and_a_note_for_each_level() -> None:
    plan = topk_plan(RAMP, jnp.float32)
    # blocks of 6 rows and 5 rows, of 6 numbers each; b is two blocks of 3 numbers
    sizes = [4 * 73, 8 * (14 + 12) + 8 + 8 + 4, 8 * (4 + 3) + 8 + 8 + 4]
    assert [x.bytes_per_step["send"] for x in plan.levels] == sizes
    assert plan.levels[-1] is plan and plan.costs()[0].sent == sizes[-1]
    for level, (count, at) in enumerate(zip((None, 14, 4), plan.levels, strict=True)):
        sent = types_of(at, "send")
        block = "float32[6,6]" if count is None else f"uint8[{8 * count}]"
        assert sent["params/w@GRAD.block0.trainer_0"] == block
        assert sent["params/s@GRAD.trainer_0"] == "float32[]"
        (level_of_sends,) = {op.attrs["level"] for op in at.trainer.ops if op.type == "send"}
        assert level_of_sends == level
        assert at.identity == plan.identity
        for ep, programs in at.servers.items():
            assert programs.main.fingerprint == plan.servers[ep].main.fingerprint
    notes = "\n".join(plan.notes)
    for text in (
        "results are not those of one device: trainers send the largest numbers of momenta (",
        f"from step 0 on, a trainer sends full gradients: {sizes[0]} bytes per step",
        f"from step 1 on, a trainer sends 40% of each gradient: {sizes[1]} bytes per step",
        f"from step 3 on, a trainer sends 10% of each gradient: {sizes[2]} bytes per step",
    ):
        assert text in notes
    assert plan.verify().equal


def test_leaves_of_16_bits_are_sent_as_16_bit_values_with_indices() -> None:
    with jax.enable_x64(True):
        params = {"w": jnp.ones((8, 5), jnp.bfloat16)}
        total = lambda params, x: jnp.sum(params["w"] * x)
        for density, sent in ((0.25, "uint8[60]"), (0.35, "bfloat16[8,5]")):
            plan = plan_of(
                total,
                optax.sgd(0.1),
                params,
                jnp.ones((8, 5), jnp.bfloat16),
                servers=1,
                mode=dtrans.Sync(compress=dtrans.TopK(density, momentum=0.5)),
            )
            assert [*types_of(plan, "send").values()] == [sent]
            assert plan.compression.rounding_errors["params/w"].dtype == jnp.float32
    wire = WireType("topk", densities=(0.25,))
    rng, rest = np.random.default_rng(0), jnp.zeros((8, 5))
    sums = np.zeros((2, 8, 5))
    for _ in range(20):
        x = jnp.asarray(rng.normal(size=(8, 5)), jnp.bfloat16)
        sent, rest = encode_with_feedback(wire, x, rest)
        assert sent.dtype == np.uint8 and sent.size == 10 * 6
        sums += np.stack([wire.decode(sent, x), x]).astype(float)
    np.testing.assert_allclose(sums[0] + np.asarray(rest), sums[1], atol=1e-5)


def test_a_state_contains_all_that_later_steps_read() -> None:
    batches = [matrix_batch(s, jnp.float32) for s in range(7)]
    job = topk_plan(RAMP, jnp.float32).simulate()
    state, middle = job.init(matrix_params(jnp.float32)), None
    for i, batch in enumerate(batches):
        if i == 2:
            middle = jax.tree.map(np.asarray, state)
        state, _ = job.step(state, *batch)
    again, other = jax.tree.map(jnp.asarray, middle), topk_plan(RAMP, jnp.float32).simulate()
    for batch in batches[2:]:
        again, _ = other.step(again, *batch)
    tree_equal(again.params, state.params)
    tree_equal(again.servers, state.servers)


def test_numbers_that_are_not_finite_are_sent_and_not_stored() -> None:
    wire = WireType("topk", densities=(0.3,))
    x = jnp.array([1.0, jnp.inf, 2.0, 0.5, jnp.nan, 3.0, -4.0, 0.1, 0.2, 0.3])
    sent, rest, momentum = encode_with_momentum(
        wire, x, jnp.full(10, 0.25), jnp.zeros(10), 0.9, nesterov=False
    )
    found = wire.decode(sent, x)
    assert np.isinf(found[1]) and np.isnan(found[4]) and found[6] == -3.75
    assert np.all(np.isfinite(rest)) and np.all(np.isfinite(momentum))
    # what was sent has no momentum, and infinities leave the stored sums as they were
    np.testing.assert_array_equal(momentum[jnp.array([1, 4, 6])], 0)
    np.testing.assert_array_equal(rest[jnp.array([1, 4, 6])], [0.25, 0.25, 0])


def test_each_of_eleven_leaves_has_its_own_rounding_error() -> None:
    """The names of 11 leaves in a list are sorted differently from the leaves."""
    params = [jnp.ones((6, 4)) for _ in range(11)]
    total = lambda params, x: sum(4 * i * jnp.mean(x @ p) for i, p in enumerate(params))
    mode = dtrans.Sync(compress=dtrans.TopK(0.1))
    plan = plan_of(total, TX, params, jnp.ones((2, 6)), trainers=2, mode=mode)
    job = plan.simulate()
    state = job.init(params)
    for _ in range(3):
        state, _ = job.step(state, jnp.ones((4, 6)))
    for i in range(11):
        # all numbers of a gradient are i, and most of them have not been sent in three steps
        unsent = state.params[f"rounding_error/params/{i}"]
        assert {*np.unique(unsent)} <= {0.0, i, 2.0 * i, 3.0 * i} and np.max(unsent) == 3 * i


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, says",
    [
        ({"density": 0}, "density must be a number above 0, and at most 1; it is 0"),
        ({"density": 1.5}, "density must be a number above 0, and at most 1; it is 1.5"),
        ({"density": "0.1"}, "density must be a number above 0, and at most 1; it is '0.1'"),
        ({"density": (0.1, -1)}, "density[1] must be a number above 0, and at most 1; it is -1"),
        ({"density": ()}, "density is empty; pass one number for each level of the ramp-up"),
        ({"begin_step": -1}, "begin_step must be a number of steps, 0 or more; it is -1"),
        ({"ramp_steps": 0}, "ramp_steps must be a positive number of steps, it is 0"),
        ({"ramp_steps": 9}, "ramp_steps=9 needs several densities, but density has one; pass "),
        ({"momentum": 1.0}, "momentum must be a number from 0 to 1, it is 1.0"),
        ({"nesterov": True}, "nesterov=True needs momentum, but momentum is 0; pass momentum=0.9"),
        ({"clip_norm": 0.0}, "clip_norm must be a positive number, or None; it is 0.0"),
    ],
)
def test_options_of_the_largest_numbers(options: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(says)}"):
        dtrans.TopK(**options)


def test_the_largest_numbers_exclude_other_options() -> None:
    topk = dtrans.TopK(0.1)
    for options, says in (
        (
            {"runtime_split": True},
            "runtime_split=True cannot be combined with compress=dtrans.TopK(",
        ),
        (
            {"compress_scale": 8.0},
            "compress_scale=8.0 needs compress='bf16' or 'fp16', but compress",
        ),
    ):
        with pytest.raises(ConfigError, match=f"^{re.escape(says)}"):
            dtrans.Sync(compress=topk, **options)
    with pytest.raises(ConfigError, match="^compress must be 'bf16', 'fp16', 'int8', 'e3m0', a dt"):
        dtrans.Sync(compress="topk")
    plan = topk_plan(topk, jnp.float32)
    says = (
        r"^on_nonfinite='error' cannot be combined with compress=dtrans.TopK\(...\): trainers pack"
    )
    with pytest.raises(ConfigError, match=says):
        plan.on_mesh(on_nonfinite="error")
    with pytest.raises(
        ConfigError, match=r"^compress=dtrans.TopK\(...\) cannot be combined with sp"
    ):
        plan_of(
            lambda params, ids: jnp.mean(params["table"][ids] ** 2),
            optax.sgd(0.1),
            {"table": jnp.ones((100, 4))},
            jnp.zeros(4, jnp.int32),
            mode=dtrans.Sync(compress=topk),
            sparse={"params/table": dtrans.Rows()},
        )


@pytest.mark.parametrize(
    "options, says",
    [
        (
            {"compress": "int4"},
            "compress must be 'bf16', 'fp16', 'int8', 'e3m0', a dtrans.TopK or None, it is 'int4'",
        ),
        ({"compress_params": "int8"}, "compress_params must be 'bf16', 'fp16' or None, it is"),
        (
            {"compress": "bf16", "compress_scale": 0},
            "compress_scale must be a positive number, it is 0",
        ),
        (
            {"compress": "int8", "compress_scale": 8.0},
            "compress_scale=8.0 needs compress='bf16' or 'fp16', but compress is 'int8'; leave ",
        ),
        (
            {"compress": "bf16", "runtime_split": True},
            "runtime_split=True cannot be combined with compress='bf16': trainers encode each ",
        ),
        (
            {"compress_params": "fp16", "runtime_split": True},
            "runtime_split=True cannot be combined with compress_params='fp16'",
        ),
    ],
)
def test_options_that_contradict_each_other(options: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(says)}"):
        dtrans.Sync(**options)


@pytest.mark.parametrize("compress", ["bf16", dtrans.TopK(0.1)], ids=["bf16", "topk"])
@pytest.mark.parametrize("mode", [dtrans.Async, dtrans.HalfAsync, dtrans.Geo])
def test_only_synchronous_modes_compress(mode: Any, compress: Any) -> None:
    name = mode.__name__
    says = f"^dtrans.{name} has no option compress: only synchronous trainers send smaller messages"
    with pytest.raises(ConfigError, match=says):
        mode(compress=compress)
    with pytest.raises(ConfigError, match=f"^dtrans.{name} has no option compress_params: only"):
        mode(compress_params="bf16")
    # the remedies: the synchronous mode, and no compression
    assert planned(dtrans.Sync(compress=compress)).compression.gradients
    assert copy.copy(pickle.loads(pickle.dumps(mode()))) == mode()


TABLE = {"table": jnp.ones((100, 4)), "w": jnp.ones((4, 8))}


def lookup_loss(params: Any, ids: jax.Array) -> jax.Array:
    return jnp.mean((params["table"][ids] @ params["w"]) ** 2)


@pytest.mark.parametrize("compress", ["int8", dtrans.TopK(0.1)], ids=["int8", "topk"])
def test_tables_are_not_compressed(compress: Any) -> None:
    def plan(mode: Any, **options: Any) -> PServerPlan:
        ids = jnp.zeros(4, jnp.int32)
        return plan_of(lookup_loss, optax.sgd(0.1), TABLE, ids, mode=mode, **options)

    mode, sparse = dtrans.Sync(compress=compress), {"params/table": dtrans.Rows()}
    says = (
        f"compress={mode.compress_text} cannot be combined with sparse: rows of the table "
        "params/table are sent without compression; leave one of the two options out"
    )
    for tables in (sparse, "auto"):
        with pytest.raises(ConfigError, match=f"^{re.escape(says)}"):
            plan(mode, sparse=tables)
    # the remedies: either option alone
    assert {*plan(mode).compression.gradients} == {"params/table", "params/w"}
    assert plan(dtrans.Sync(), sparse=sparse).tables.names


@pytest.mark.parametrize("mesh", [{"data": 2}, {"data": 1, "model": 2}], ids=str)
def test_trainers_with_several_devices_do_not_send_the_largest_numbers(mesh: Any) -> None:
    mode = dtrans.Sync(compress=dtrans.TopK(0.1))
    says = (
        f"mesh={mesh} cannot be combined with compress=dtrans.TopK(...): a trainer encodes "
        "gradients on one device; leave out one of the two"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(says)}"):
        planned(mode, mesh=mesh)
    # the remedies: either option alone
    assert planned(mode).compression.topk is not None
    assert planned(dtrans.Sync(), mesh={"data": 2}).devices is not None


def test_trainers_of_different_speeds_do_not_compress() -> None:
    says = "batch=dtrans.Batch(speeds=...) cannot be combined with compress='bf16': trainers of "
    with pytest.raises(ConfigError, match=f"^{re.escape(says)}"):
        planned(dtrans.Sync(compress="bf16"), batch=dtrans.Batch(speeds=(1, 2)))


def test_complex_gradients_are_not_compressed() -> None:
    size = lambda params, x: jnp.mean(jnp.abs(params["w"]) ** 2) * jnp.mean(x)
    with pytest.raises(ConfigError, match="^compress='bf16': params/w is complex64"):
        plan_of(
            size,
            optax.sgd(0.1),
            {"w": jnp.ones(4, jnp.complex64)},
            jnp.ones(4),
            mode=dtrans.Sync(compress="bf16"),
        )


def test_a_leaf_with_the_name_of_an_encoded_block() -> None:
    params = {"w": jnp.ones((4, 2)), "w.bf16": jnp.ones(2)}
    both = lambda params, x: jnp.mean(x @ params["w"] + params["w.bf16"])
    with pytest.raises(
        ConfigError, match="^the step has a leaf named params/w.bf16, the name that"
    ):
        plan_of(
            both,
            optax.sgd(0.1),
            params,
            jnp.ones((2, 4)),
            mode=dtrans.Sync(compress_params="bf16"),
        )


def test_packed_gradients_are_not_checked_for_infinities() -> None:
    plan = planned(dtrans.Sync(compress="e3m0"))
    says = "^on_nonfinite='error' cannot be combined with compress='e3m0': trainers pack gradients"
    with pytest.raises(ConfigError, match=says):
        plan.on_mesh(on_nonfinite="error")
    planned(dtrans.Sync(compress="bf16")).on_mesh(on_nonfinite="error")
