"""Stages that compute in 16 bits: the results of one device in 16 bits, the values in 16 bits, and
scales of the loss."""

from __future__ import annotations

import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import tree_close
from pipeline_models import Job, compiled_quickly

import dtrans
from dtrans._jax import equations
from dtrans.errors import ConfigError


@pytest.fixture(autouse=True)
def quickly():
    with compiled_quickly():
        yield


def array(*shape, seed=0):
    return np.asarray(
        np.random.default_rng([seed, *shape]).normal(size=shape) / np.sqrt(shape[0]), np.float32
    )


def layers(params, x, y):
    for w in params:
        x = jax.nn.relu(x @ w)
    return jnp.mean((x - y) ** 2)


def looped(params, x, y):
    x, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params)
    return jnp.mean((x - y) ** 2)


def job_of(loss, params, tx=None):
    tx = tx or optax.sgd(0.5)
    init = lambda key: (p := jax.tree.map(jnp.asarray, params), tx.init(p))
    return Job(dtrans.make_train_step(loss, tx), init, (array(8, 16, seed=7), array(8, 16, seed=8)))


STACK = np.stack([array(16, 16, seed=i) for i in range(4)])
PLAIN, LOOP = (job_of(f, p) for f, p in ((layers, list(STACK)), (looped, STACK)))


def planned(of, precision, **options):
    given = {"num_stages": 2, "num_micro_batch": 2, "flops_per_byte": 0} | options
    return flat_options.pipeline(*of.traced(), precision=precision, **given)


def on_one_device(of, precision, **options):
    """Return the step on one device with the same precision.

    `dtrans.sharding` rewrites its derivative.
    """
    options = {"num_micro_batch": 2, "degree": 1} | options
    return of.of(dtrans.sharding(*of.traced(), precision=precision, **options).simulate())


CASES = {
    "layers": (PLAIN, "simulate", {}),
    "a loop": (LOOP, "simulate", {}),
    "weights apart": (PLAIN, "on_mesh", {"schedule": "ZB-H1", "num_stages": 4}),
    "computed once more": (LOOP, "simulate", {"gradient_checkpoint": "auto"}),
}
# If a value is cast to bfloat16 and back, XLA may omit the rounding. This depends on the program.
CLOSE = {"fp16": 2e-6, "bf16": 2.0**-12}
SCALED = dtrans.Precision("fp16", loss_scaling=1024)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.sampled(1)
def test_numbers_are_those_of_one_device_in_16_bits(name, dtype):
    of, way, options = CASES[name]
    precision = SCALED if dtype == "fp16" else dtype
    plan = planned(of, precision, **options)
    got = of.of(getattr(plan, way)())
    tree_close(got, on_one_device(of, precision), CLOSE[dtype])
    tree_close(got, of.on_one_device(), 0.02)


def test_products_are_in_16_bits_and_all_else_is_not():
    plan = planned(PLAIN, "bf16", schedule="ZeroBubble")
    for p in plan.programs.values():
        for e in equations(p.jaxpr):
            if e.primitive.name == "dot_general":
                assert {a.aval.dtype for a in (*e.invars, *e.outvars)} == {jnp.dtype(jnp.bfloat16)}
            elif e.primitive.name != "convert_element_type":
                assert all(
                    v.aval.dtype != jnp.bfloat16
                    for v in e.outvars
                    if e.primitive.name in ("max", "sub", "add")
                )
    assert {t.dtype for n, t in plan.types.items()} == {jnp.dtype(jnp.float32)}
    assert {plan.update.program.inputs[n].dtype for n in plan.update.sums} == {
        jnp.dtype(jnp.float32)
    }
    assert "matrix products in bf16" in plan.notes
    # the model is divided as without `precision`, and stages save fewer bytes
    without = planned(PLAIN, None, schedule="ZeroBubble")
    assert plan.model.stage_of == without.model.stage_of
    assert sum(s.saves for s in plan.stages) < sum(s.saves for s in without.stages)


def test_a_value_is_narrowed_where_it_is_read_first():
    """The order of stages differs from the order of the program: the program contains the second
    stage before the end of the first."""

    def loss(params, x, y):
        with dtrans.replicate(name="first"):
            h = jnp.tanh(x @ params[0])
        with dtrans.replicate(name="second"):
            z = h @ params[1]
        with dtrans.replicate(name="first"):
            u = h @ params[2]
        with dtrans.replicate(name="second"):
            return jnp.mean((z + u - y) ** 2)

    of = job_of(loss, list(STACK[:3]))
    plan = planned(of, SCALED)
    # h, which only a product reads, in 16 bits; and u
    assert plan.stages[0].sends == 4 * 16 * (2 + 4)
    # the cotangents of h from two products are added in 16 bits
    tree_close(of.of(plan.simulate()), on_one_device(of, SCALED), 2.0**-11)


def test_a_batch_of_another_size_is_in_16_bits_too():
    job = planned(PLAIN, "bf16").simulate()
    x, y = (np.concatenate([a, a]) for a in PLAIN.batch)
    _, loss = job.step(job.init(jax.random.key(0)), x, y)
    _, want = planned(PLAIN, "bf16").simulate().step(job.init(jax.random.key(0)), *PLAIN.batch)
    assert float(loss) == pytest.approx(float(want), rel=1e-6)


def test_a_scale_keeps_gradients_that_would_vanish():
    """Cotangents of 2e-8 are zero in float16. Multiplied by 2^20, they are 0.02."""
    params = [np.eye(16, dtype=np.float32)] * 2
    of = job_of(
        lambda p, x, y: 1e-8 * jnp.sum((x @ p[0]) @ p[1] * jnp.sign(y)), params, optax.sgd(1e6)
    )
    moved = {}
    for scale in (1.0, 2.0**20):
        job = planned(
            of, dtrans.Precision("fp16", loss_scaling=scale), num_micro_batch=1, reduce="sum"
        ).simulate()
        state, _ = job.step(job.init(jax.random.key(0)), *of.batch)
        moved[scale] = job.params(state)
    want, _, _ = of.on_one_device(1)
    assert all(np.array_equal(a, b) for a, b in zip(moved[1.0], params, strict=True))
    for got, exact in zip(moved[2.0**20], want, strict=True):
        np.testing.assert_allclose(got, exact, atol=2e-4)
    assert max(float(np.abs(w - p).max()) for w, p in zip(want, params, strict=True)) > 0.01


def test_a_local_clip_sees_gradients_without_their_scale():
    options = {"clip_local_norm": 0.05, "clip_local_per": "micro_batch"}
    plain, scaled = (
        PLAIN.of(planned(PLAIN, dtrans.Precision("bf16", loss_scaling=s), **options).simulate(), 1)[
            0
        ]
        for s in (1, 128)
    )
    tree_close(plain, scaled, 1e-6)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_replicas_that_share_the_update(stage):
    options = {"replicas": 2, "num_micro_batch": 1, "sharding_stage": stage, "min_slice_size": 0}
    got = PLAIN.of(planned(PLAIN, SCALED, **options).simulate())
    tree_close(got, on_one_device(PLAIN, SCALED), CLOSE["fp16"])


def headed(params, x, y):
    x = jnp.tanh(x @ params[0])
    with dtrans.split(device_count=2):
        return jnp.mean((x @ params[1] - y) ** 2)


def test_a_stage_that_is_split():
    of = job_of(headed, list(STACK[:2]))
    plan = planned(of, SCALED)
    assert plan.model.sharding.shards == (1, 2)
    # the gradient of the input is a sum over shards, and each term is rounded
    tree_close(of.of(plan.simulate()), on_one_device(of, SCALED), 2.0**-12)


# The scale overflows in the first step, and again after each increase.
DYNAMIC = dtrans.Precision("fp16", dtrans.LossScaling(initial=2.0**26, interval=2))
ADAM = job_of(layers, list(STACK), optax.adam(1e-3))
HEADED = job_of(headed, list(STACK[:2]), optax.adam(1e-3))
SCALAR = job_of(
    lambda params, x, y: layers(params["layers"], x, y / params["scale"]),
    {"layers": list(STACK), "scale": np.float32(1.5)},
    optax.adam(1e-3),
)
WAYS = {
    "a leaf without dimensions": (SCALAR, {}),
    "one stage": (ADAM, {"num_stages": 1}),
    "two stages": (ADAM, {}),
    "micro-batches of their own": (ADAM, {"kind": "local"}),
    "replicas": (ADAM, {"replicas": 2}),
    "slices of the state": (ADAM, {"replicas": 2, "sharding_stage": 1, "min_slice_size": 0}),
    "slices of gradients": (ADAM, {"replicas": 2, "sharding_stage": 2, "min_slice_size": 0}),
    "slices of parameters": (ADAM, {"replicas": 2, "sharding_stage": 3, "min_slice_size": 0}),
    "groups": (ADAM, {"update_groups": 2}),
    "a stage that is split": (HEADED, {}),
    "slices of pieces": (HEADED, {"replicas": 2, "sharding_stage": 3, "min_slice_size": 0}),
    "a split stage on the host": (HEADED, {"offload": True}),
    "weights apart": (ADAM, {"schedule": "ZeroBubble"}),
}


def scaled_steps(of, plan, count):
    """Run steps; return the job, its last state, and the scale after each step."""
    job, scales = plan.simulate(), []
    state = job.init(jax.random.key(0))
    for _ in range(count):
        state, _ = job.step(state, *of.batch)
        scales.append(float(state.extra["loss_scale/scale"]))
    return job, state, scales


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.sampled(1)
def test_a_dynamic_scale_is_that_of_one_device(name):
    of, options = WAYS[name]
    # means over equally many rows overflow at the same scale
    parts = 2 * options.get("replicas", 1)
    one = dtrans.sharding(*of.traced(), degree=1, num_micro_batch=parts, precision=DYNAMIC)
    want, want_state, want_scales = scaled_steps(of, one, 10)
    plan = planned(of, DYNAMIC, **options)
    job, state, scales = scaled_steps(of, plan, 10)
    assert scales == want_scales
    assert sorted({scales[i + 1] / scales[i] for i in range(9)}) == [0.5, 1.0, 2.0]
    skipped = int(state.extra["loss_scale/skipped_steps"])
    assert skipped == int(want_state.extra["loss_scale/skipped_steps"]) > 1
    assert int(job.opt_state(state)[0].count) == 10 - skipped
    tree_close(job.params(state), want.params(want_state), 1e-4)
    assert any("dynamic loss scale that starts at" in note for note in plan.notes)
    # the user's pytrees have the structure of the step, and one device's state begins with the
    # first scale
    again = job.state_of(*job.gather(state))
    assert float(again.extra["loss_scale/scale"]) == 2.0**26
    assert jax.tree.structure(job.opt_state(again)) == jax.tree.structure(
        of.init(jax.random.key(0))[1]
    )


def test_statistics_change_in_a_skipped_step_and_norms_have_no_scale():
    """As in EPL, batch statistics are not part of the update, so a skipped step changes them."""

    def step(params, opt_state, x, y):
        def loss(weights):
            h = x @ weights
            return jnp.mean((h - y) ** 2), h.mean()

        (value, mean), grads = dtrans.value_and_grad(loss, has_aux=True)(params["w"])
        new = {"w": params["w"] - 0.1 * grads, "mean": 0.5 * params["mean"] + 0.5 * mean}
        return new, opt_state, value, jnp.linalg.norm(grads)

    init = lambda key: ({"w": jnp.asarray(STACK[0]), "mean": jnp.zeros(())}, ())
    of = Job(step, init, PLAIN.batch)
    want, _, loss, norm = of.on_one_device(1)
    for initial, is_skipped in ((2.0**10, False), (2.0**60, True)):
        precision = dtrans.Precision("fp16", dtrans.LossScaling(initial=initial))
        plan = planned(of, precision, num_stages=1)
        params, _, got_loss, got_norm = of.of(plan.simulate(), 1)
        assert float(got_loss) == pytest.approx(float(loss), rel=1e-2)
        assert float(params["mean"]) == pytest.approx(float(want["mean"]), rel=1e-2)
        if is_skipped:
            np.testing.assert_array_equal(params["w"], STACK[0])
        else:
            assert float(got_norm) == pytest.approx(float(norm), rel=1e-2)
            tree_close(params["w"], want["w"], 1e-3)


def test_a_checkpoint_has_the_scale(tmp_path):
    plan = planned(ADAM, DYNAMIC)
    job, state, scales = scaled_steps(ADAM, plan, 3)
    dtrans.checkpoint.save(tmp_path / "1", job, state)
    back = dtrans.checkpoint.restore(tmp_path / "1", plan.simulate())
    assert float(back.extra["loss_scale/scale"]) == scales[-1] != 2.0**26
    tree_close(jax.tree.leaves(back), jax.tree.leaves(state), 0.0)
    # one device, and pipelines with a fixed scale, can restore the same checkpoint
    params, _ = dtrans.checkpoint.load(tmp_path / "1", ADAM.traced()[0])
    tree_close(params, job.params(state), 0.0)
    fixed = planned(ADAM, SCALED).simulate()
    dtrans.checkpoint.save(tmp_path / "2", fixed, dtrans.checkpoint.restore(tmp_path / "1", fixed))
    first = dtrans.checkpoint.restore(tmp_path / "2", plan.simulate())
    assert float(first.extra["loss_scale/scale"]) == 2.0**26


def test_what_cannot_be():
    with pytest.raises(ConfigError, match=r"^clip_local_norm is 1.0 and precision='fp16' has a dy"):
        planned(PLAIN, "fp16", clip_local_norm=1.0)
    with pytest.raises(ConfigError, match="precision must be 'fp16', 'bf16' or None, it is 'fp8'"):
        dtrans.StageMemory(precision="fp8")
    half = job_of(lambda p, x, y: layers(p, x, y).astype(jnp.float16), list(STACK))
    with pytest.raises(
        ConfigError,
        match="loss_scaling=100000.0 is infinite in float16, the type of the loss of step",
    ):
        planned(half, dtrans.Precision("fp16", loss_scaling=1e5))


def test_scales_keep_what_terms_would_lose():
    """Cotangents of the mean over a micro-batch are normal numbers in 16 bits. Cotangents of the
    micro-batch's term in the full mean are not."""
    small = lambda params, x: jnp.mean(x @ params[0] @ params[1]) * 2.0**-32
    of = Job(
        dtrans.make_train_step(small, optax.sgd(2.0**32)),
        lambda key: ([jnp.ones((4, 4)), jnp.ones((4, 1))], optax.sgd(1.0).init(0)),
        (np.ones((16, 4), np.float32),),
    )
    precision = dtrans.Precision("fp16", loss_scaling=1024)
    for plan in (
        planned(of, precision, num_micro_batch=8),
        dtrans.sharding(*of.traced(), degree=1, num_micro_batch=8, precision=precision),
    ):
        assert plan.shared.reduce == "mean"
        job = plan.simulate()
        state, _ = job.step(job.init(jax.random.key(0)), *of.batch)
        np.testing.assert_array_equal(job.params(state)[0], np.zeros((4, 4)))
