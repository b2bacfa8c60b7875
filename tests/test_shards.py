"""The slicing of optimizers, shown by numbers: for each optimizer a plan with three servers and blocks as
small as they get is carried out by hand, one optimize block after the other, and what the servers hold is put
together and compared with `tx.update` on whole arrays, over three steps in float64. The structure is tested
beside it: which leaves are cut, and that no server makes an array of a cut leaf's full shape."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from helpers import assemble, blocks_of, distance, endpoints, init_of, plan_of, quick, serve, start_servers
from hypothesis import given, strategies as st

import dtrans
from dtrans._jax import equations
from dtrans.cut import GRAD


SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10)

# name: (optimizer, whether it is elementwise, so that each leaf must be free)
OPTIMIZERS = {
    "sgd": (optax.sgd(0.1), True),
    "momentum": (optax.sgd(0.1, momentum=0.9), True),
    "nesterov": (optax.sgd(0.1, momentum=0.9, nesterov=True), True),
    "adam": (optax.adam(0.1), True),
    "adam_mu_bf16": (optax.adam(0.1, mu_dtype=jnp.bfloat16), True),
    "adamw_schedule": (optax.adamw(SCHEDULE, weight_decay=0.01), True),
    "adamw_masked": (optax.adamw(0.1, weight_decay=0.01, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)), True),
    "adamax": (optax.adamax(0.1), True),
    "rmsprop": (optax.rmsprop(0.1, centered=True, momentum=0.9), True),
    "lion": (optax.lion(0.1), True),
    "yogi": (optax.yogi(0.1), True),
    "adadelta": (optax.adadelta(0.1), True),
    "amsgrad": (optax.amsgrad(0.1), True),
    "adagrad": (optax.adagrad(0.1), True),
    "radam": (optax.radam(0.1), True),
    "clip_by_value": (optax.chain(optax.clip(0.5), optax.sgd(0.1)), True),
    "noisy": (optax.chain(optax.add_noise(0.01, 0.5, 0), optax.sgd(0.1)), True),
    "inject": (optax.inject_hyperparams(optax.adam)(learning_rate=SCHEDULE), True),
    "masked": (optax.chain(optax.masked(optax.sgd(0.5, momentum=0.9), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)), optax.scale(0.1)), True),
    "multi_transform": (
        optax.multi_transform(
            {"a": optax.adam(0.1), "s": optax.sgd(0.1), "z": optax.set_to_zero()},
            lambda p: {k: "z" if k == "frozen" else "a" if x.ndim > 1 else "s" for k, x in p.items()},
        ),
        True,
    ),
    "schedule_free": (optax.contrib.schedule_free_adamw(0.1), False),
    "lookahead_free": (optax.chain(optax.trace(0.9), optax.add_decayed_weights(0.1), optax.scale_by_sign(), optax.scale(-0.01)), True),
    "clip_by_global_norm": (optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)), False),
    "lamb": (optax.lamb(0.1, weight_decay=0.01), False),
    "lars": (optax.lars(0.1, weight_decay=0.01), False),
    "novograd": (optax.novograd(0.1), False),
    "adafactor": (optax.adafactor(0.1, min_dim_size_to_factor=2), False),
    "muon": (optax.contrib.muon(0.1), False),
    "centralize": (optax.chain(optax.centralize(), optax.sgd(0.1)), False),
    "adaptive_grad_clip": (optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)), False),
    "multi_steps": (optax.MultiSteps(optax.adam(0.1), 2), False),
    "apply_if_finite": (optax.apply_if_finite(optax.adam(0.1), 2), False),
    "flatten": (optax.flatten(optax.adam(0.1)), False),
    "sm3": (optax.sm3(0.1), False),
    "ademamix": (optax.contrib.ademamix(0.1), True),
}
ELEMENTWISE = [n for n, (_, free) in OPTIMIZERS.items() if free]
WITHOUT = {
    "sm3": {"scalar"},  # optax.sm3 does not take 0-d leaves
    "inject": {"half"},  # it makes float64 state of bfloat16 leaves, so that no state can stay as it is
    "noisy": {"half", "kernel", "few", "one_row", "scalar"},  # for speed
}


def leaves(dtype=jnp.float64, without=()):
    """One row, fewer rows than servers, no rows, a conv kernel, an uneven last block, bf16, frozen."""
    rng = np.random.default_rng(0)
    # few distinct shapes, of blocks too: each costs a compilation for each primitive
    shapes = {"bias": (4,), "embedding": (7, 2), "few": (2, 2), "frozen": (7, 2), "kernel": (3, 1, 2, 2), "one_row": (1, 2)}
    params = {n: jnp.asarray(rng.normal(size=s), dtype) for n, s in shapes.items()}
    params["half"] = jnp.asarray(rng.normal(size=(3, 2)), jnp.bfloat16)
    params["scalar"] = jnp.asarray(0.7, dtype)
    return {n: p for n, p in params.items() if n not in without}


def loss(params, x):
    """The embedding is used twice (tied), and `frozen` not at all."""
    used = {n: p for n, p in params.items() if n != "frozen"}
    total = sum(jnp.sum(p.astype(x.dtype) ** 2) for p in used.values())
    return jnp.mean(x) * (total + jnp.sum(params["embedding"] @ params["embedding"].T))


def gradients(params, seed):
    """Numbers to be gradients; those of `frozen` are zero."""
    rng = np.random.default_rng(seed)
    return {n: jnp.asarray(rng.normal(size=p.shape) * (n != "frozen"), p.dtype) for n, p in params.items()}


def mean_of(trees):
    return jax.tree.map(lambda *g: sum(g[1:], start=g[0]) * (1 / len(g)), *trees)


def check(tx, params, plan, trainers, steps=3, rtol=1e-12):
    """Carry the plan out by hand and compare with whole arrays, state included."""
    names = plan.main.in_names[: -1]  # all but x
    state = tx.init(params)
    held = quick(lambda p: start_servers(plan, p))(params)
    one_round = quick(lambda held, grads: serve(plan, held, [{f"params/{n}": g for n, g in tree.items()} for tree in grads]))

    @quick
    def reference(params, state, grads):
        updates, state = tx.update(mean_of(grads), state, params)
        return optax.apply_updates(params, updates), state

    for step in range(steps):
        grads = [gradients(params, 10 * step + k) for k in range(trainers)]
        held = one_round(held, grads)
        params, state = reference(params, state, grads)
        whole = dict(zip(names, plan.main.flatten(params, state, jnp.ones(2, jnp.float64)), strict=False))
        got = assemble(plan, held, names)
        assert set(got) == set(names) - set(plan.held)
        for name, value in got.items():
            limit = 0 if value.dtype == jnp.bfloat16 else rtol
            far = distance(value, whole[name])
            assert far <= limit, f"step {step}: {name} is off by {far:.3g}"


@pytest.fixture(params=OPTIMIZERS)
def case(request):
    with jax.enable_x64(True):
        tx, elementwise = OPTIMIZERS[request.param]
        params = leaves(without=WITHOUT.get(request.param, ()))
        plan = plan_of(loss, tx, params, jnp.ones(2, jnp.float64), trainers=2)
        yield tx, elementwise, params, plan


def test_three_servers_compute_what_whole_arrays_compute(case):
    tx, elementwise, params, plan = case
    check(tx, params, plan, trainers=2)
    if elementwise:
        assert plan.placement.whole == {}
        counts = {b.leaf.removeprefix("params/"): b.count for b in plan.placement.table}
        free = {"bias": 2, "embedding": 3, "few": 2, "frozen": 3, "half": 3, "kernel": 3, "one_row": 1, "scalar": 1}
        assert counts == {n: free[n] for n in params}
        no_full_shapes(plan)
    else:
        for leaf, reason in plan.placement.whole.items():
            assert plan.placement.blocks[leaf][0].count == 1
            assert f"{leaf}: whole on {plan.placement.blocks[leaf][0].endpoint}: {reason}" in str(plan)


def no_full_shapes(plan):
    """No equation of a cut leaf's block makes an array of the leaf's full shape (noise is the exception)."""
    for endpoint, units in plan.placement.units.items():
        of = {b.name: b for b in blocks_of(plan, endpoint)}
        for unit in units:
            block = unit.blocks[0]
            if block.count == 1:
                continue
            full = plan.main.inputs[block.leaf].shape
            for eqn in equations(of[unit.name].jaxpr):
                if eqn.primitive.name == "random_bits":
                    continue
                for v in eqn.outvars:
                    assert v.aval.shape != full, f"{block.name}: {eqn}"
