"""The state of a pipeline between steps: states from other jobs, state that the loss computes, and
donation."""

from __future__ import annotations

import os
import subprocess
import sys

import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import tree_close
from paths import ROOT, SUPPORT

import dtrans
from dtrans.errors import StateError


pytestmark = pytest.mark.usefixtures("x64")


def net(key):
    keys = jax.random.split(key, 2)
    return {f"w{i}": jax.random.normal(k, (4, 4)) / 2 for i, k in enumerate(keys)}


def loss(p, x):
    return jnp.mean(jnp.tanh(jnp.tanh(x @ p["w0"]) @ p["w1"]) ** 2)


def rows(count=8):
    return jax.random.normal(jax.random.key(1), (count, 4))


def planned(step, init, *batch, **options):
    key = jax.random.key(0)
    options = {"num_stages": 2, "num_micro_batch": 2, "flops_per_byte": 0.0} | options
    return flat_options.pipeline(
        dtrans.trace(step, *init(key), *batch), dtrans.trace(init, key), **options
    )


def simple(tx=None, net=net, loss=loss):
    tx = tx or optax.adam(0.1)

    def init(key):
        params = net(key)
        return params, tx.init(params)

    return dtrans.make_train_step(loss, tx), init


def test_a_state_goes_on_in_another_job_of_the_plan():
    step, init = simple()
    plan = planned(step, init, rows())
    first, second = plan.simulate(), plan.on_mesh(jax.devices()[2:])
    state, _ = first.step(first.init(jax.random.key(0)), rows())
    there, _ = second.step(state, rows())
    here, _ = first.step(state, rows())
    tree_close(second.params(there), first.params(here), 1e-12)
    assert {d for x in there.params.values() for d in x.devices()} == {*jax.devices()[2:4]}


def test_a_state_of_another_plan_is_refused_by_the_leaf():
    job = planned(*simple(), rows()).simulate()
    other = planned(
        *simple(
            net=lambda key: {n: w[:, :] for n, w in net(key).items()} | {"w1": jnp.ones((4, 3))}
        ),
        rows(),
    )
    with pytest.raises(StateError, match=r"params/w1 is float64\[4, 3\], expected float64\[4, 4\]"):
        job.step(other.simulate().init(jax.random.key(0)), rows())
    with pytest.raises(StateError, match="it lacks params/w0"):
        job.step(type(other.simulate().init(jax.random.key(0)))({}, {}, {}), rows())


def test_an_array_that_is_twice_in_a_state_is_not_donated_twice():
    job = planned(*simple(optax.sgd(0.1)), rows()).on_mesh()
    state = job.init(jax.random.key(0))
    state.params["params/w1"] = state.params["params/w0"]
    with pytest.raises(StateError, match="are one array"):
        job.step(state, rows())


@pytest.mark.parametrize("way", ["simulate", "on_mesh"])
def test_what_a_step_hands_on_is_not_donated(way):
    """Return an optimizer that stores the parameters of the previous step."""
    step, init = simple(optax.sgd(0.1))

    def keeps(params, state, x):
        q, tx_state, value = step(params, state["tx"], x)
        return q, {"tx": tx_state, "before": params}, value

    start = lambda key: (lambda p, s: (p, {"tx": s, "before": jax.tree.map(jnp.zeros_like, p)}))(
        *init(key)
    )
    job = getattr(planned(keeps, start, rows()), way)()
    state, want = job.init(jax.random.key(0)), start(jax.random.key(0))
    for _ in range(3):
        state, _ = job.step(state, rows())
        *want, _ = keeps(*want, rows())
        tree_close((job.params(state), job.opt_state(state)), tuple(want), 1e-12)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", ["simulate", "on_mesh"])
def test_a_key_that_the_loss_splits_is_the_same_in_all_replicas(way):
    def split(params, x):
        key, _ = jax.random.split(params["key"])
        return loss(params, x), key

    tx = optax.sgd(0.1)

    def step(params, state, x):
        weights = {n: w for n, w in params.items() if n != "key"}
        (value, key), grads = dtrans.value_and_grad(
            lambda w: split(w | {"key": params["key"]}, x), has_aux=True
        )(weights)
        updates, state = tx.update(grads, state, weights)
        return optax.apply_updates(weights, updates) | {"key": key}, state, value

    def init(key):
        return net(key) | {"key": key}, tx.init(net(key))

    job = getattr(planned(step, init, rows(), replicas=2), way)()
    state = job.init(jax.random.key(0))
    for _ in range(2):
        state, _ = job.step(state, rows())
    want = jax.random.split(jax.random.split(jax.random.key(0))[0])[0]
    assert job.params(state)["key"] == want


@pytest.mark.sampled(1)
@pytest.mark.parametrize("held", [lambda m: m, jax.lax.stop_gradient])
def test_a_new_statistic_that_the_derivative_reads_is_the_new_one(held):
    """The new statistic has the name of the old one, which the stage also reads."""

    def with_mean(params, x):
        h = jnp.tanh(x @ params["w0"])
        mean = 0.9 * held(params["mean"]) + 0.1 * jnp.mean(h, 0)
        return jnp.mean(jnp.tanh(jnp.dot(h, mean)[:, None] * params["w1"][0]) ** 2), mean

    tx = optax.sgd(0.1)

    def step(params, state, x):
        (value, mean), grads = dtrans.value_and_grad(with_mean, has_aux=True)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates) | {"mean": mean}, state, value

    init = lambda key: (p := net(key) | {"mean": jnp.ones(4)}, tx.init(p))
    job = planned(step, init, rows(), num_micro_batch=1).simulate()
    state, want = job.init(jax.random.key(0)), init(jax.random.key(0))
    for _ in range(2):
        state, value = job.step(state, rows())
        *want, expected = step(*want, rows())
    tree_close((job.params(state), value), (want[0], expected), 1e-12)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stages", [2, 3])
def test_loops_with_results_that_are_in_one_stage(stages):
    def looped(params, x):
        for n in ("w0", "w1"):
            x, seen = jax.lax.scan(lambda h, w: (jnp.tanh(h * w), jnp.sum(h)), x, params[n])
            x = x * (1 + jnp.mean(seen))
        return jnp.mean(x**2)

    step, init = simple(loss=looped)
    job = planned(step, init, rows(), num_stages=stages, num_micro_batch=1).simulate()
    state, want = job.init(jax.random.key(0)), init(jax.random.key(0))
    for _ in range(2):
        state, value = job.step(state, rows())
        *want, expected = step(*want, rows())
    tree_close((job.params(state), value), (want[0], expected), 1e-12)


@pytest.mark.parametrize("way", ["simulate", "on_mesh"])
def test_results_that_are_numbers_and_buckets_by_count(way):
    step, init = simple()

    def told(params, state, x):
        params, state, value = step(params, state, x)
        return params, state, {"loss": value, "one": jnp.ones(())}

    job = getattr(planned(told, init, rows(), replicas=2, max_buckets=2), way)()
    _, results = job.step(job.init(jax.random.key(0)), rows())
    assert results["one"] == 1.0
    np.testing.assert_allclose(
        results["loss"], told(*init(jax.random.key(0)), rows())[2]["loss"], rtol=1e-12
    )


SCRIPT = """
import jax, sys
sys.path.insert(0, {tests!r})
from pipeline_models import MODELS
import dtrans
of = MODELS["convnet"].job(8)
stages = dtrans.Stages(policy="BALANCE_OP_NUM")
plan = dtrans.pipeline(*of.traced(), num_stages=3, num_micro_batch=2, stages=stages)
job = plan.simulate()
program, _ = job.prepare(job.init(jax.random.key(0)), *of.batch)
print("\\n".join(program.lines))
"""


def test_instructions_are_the_same_in_all_processes():
    """Processes name a value that they exchange by its position in the instructions."""
    said = []
    for seed in ("2", "3"):
        env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        made = subprocess.run(
            [sys.executable, "-c", SCRIPT.format(tests=str(SUPPORT))],
            env=env,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert made.returncode == 0, made.stderr
        said.append(made.stdout.splitlines())
    assert said[0] == said[1]
    back = [line for line in said[0] if line.startswith("Transfer") and line.endswith("@GRAD")]
    assert len(back) > 2 * len({line.split()[1] for line in back}), "several cotangents must cross"
