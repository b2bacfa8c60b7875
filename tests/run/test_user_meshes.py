"""Arrays on a user's mesh, and a mesh from `jax.set_mesh`: jobs compute the results of one device.

A step is traced with such arrays, closes over one, or gets them as arguments. A state is built from
them, or they are the state of the next step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from pipeline_models import compiled_quickly

import dtrans


pytestmark = pytest.mark.usefixtures("x64")

KEY = jax.random.key(0)
TX = optax.adam(1e-2)
RNG = np.random.default_rng(0)
W, V, SHIFT = RNG.normal(size=(6, 8)), RNG.normal(size=(8, 5)), RNG.normal(size=8)
X, Y = RNG.normal(size=(12, 6)), np.arange(12) % 5

PLANS: dict[str, Callable[..., Any]] = {
    "nccl2": lambda *given: dtrans.nccl2(*given, trainers=2),
    "stage 1": lambda *given: dtrans.sharding(
        *given, degree=2, stage=1, slices=dtrans.Slicing(min_slice_size=0)
    ),
    "stage 3": lambda *given: dtrans.sharding(
        *given, degree=2, stage=3, slices=dtrans.Slicing(min_slice_size=0)
    ),
    "pserver": lambda *given: dtrans.pserver(
        *given, pservers="127.0.0.1:1,127.0.0.1:2", trainers=2
    ),
    "pipeline": lambda *given: dtrans.pipeline(*given, num_stages=2, num_micro_batch=2),
}
WAYS = [
    (plan, way)
    for plan in PLANS
    for way in ("on_mesh", "simulate")
    if (plan, way) != ("pserver", "simulate")
]


def mesh(kind: str) -> Mesh:
    """Return a mesh: two devices that the job also uses, with Auto or Explicit axes; or four other
    devices."""
    if kind == "elsewhere":
        return Mesh(np.array(jax.devices()[4:]), ("d",))
    types = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
    return jax.make_mesh((2,), ("d",), axis_types=(types[kind],))


def placed(kind: str, tree: Any) -> Any:
    """Return arrays whose rows are sharded over a mesh, if possible; or arrays on another
    device."""
    if kind == "one device":
        return jax.device_put(tree, jax.devices()[3])
    on = mesh(kind)
    spec = lambda x: P("d") if np.ndim(x) and np.shape(x)[0] % on.size == 0 else P()
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(on, spec(x))), tree)


def init(key: jax.Array) -> Any:
    params = {"w": jnp.asarray(W) + 0 * jax.random.normal(key, W.shape), "v": jnp.asarray(V)}
    return params, TX.init(params)


def step_with(shift: Any) -> Callable[..., Any]:
    def loss(p: Any, x: jax.Array, y: jax.Array, key: jax.Array) -> jax.Array:
        logits = (jnp.tanh(x @ p["w"]) + shift) @ p["v"]
        mean = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        return mean * (1 + jax.random.uniform(key))

    return dtrans.make_train_step(loss, TX)


def trained(plan: str, way: str, kind: str = "", what: str = "") -> Any:
    """Return the results of two steps.

    The argument `what` is on a mesh of this kind, or everything if it is `all`.
    """
    at: Callable[[str, Any], Any] = lambda name, tree: (
        placed(kind, tree) if what in (name, "all") else tree
    )
    step, batch = step_with(at("constant", SHIFT)), (X, Y, KEY)
    main = dtrans.trace(step, *at("trace", init(KEY)), *at("trace", batch))
    job = getattr(PLANS[plan](main, dtrans.trace(init, at("trace", KEY))), way)()
    state = job.init(at("init", KEY))
    state, first = job.step(state, *at("batch", batch))
    state = job.scatter(at("state", job.gather(state)))
    state, second = job.step(state, *at("batch", batch))
    logits = job.apply(lambda p, x: x @ p["w"] @ p["v"], state, at("batch", X))
    return jax.tree.map(np.asarray, (job.params(state), first, second, logits))


def alone() -> Any:
    step, state, losses = jax.jit(step_with(SHIFT)), init(KEY), []
    for _ in range(2):
        *state, loss = step(*state, X, Y, KEY)
        losses.append(loss)
    return state[0], *losses, X @ state[0]["w"] @ state[0]["v"]


def check(found: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(alone()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", ["auto", "explicit", "elsewhere", "one device"])
@pytest.mark.parametrize("what", ["trace", "constant", "init", "batch", "state", "all"])
@pytest.mark.parametrize(("plan", "way"), WAYS)
def test_a_job_is_given_arrays_that_lie_elsewhere(
    plan: str, way: str, what: str, kind: str
) -> None:
    with compiled_quickly():
        check(trained(plan, way, kind, what))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["auto", "explicit", "elsewhere"])
@pytest.mark.parametrize(("plan", "way"), WAYS)
def test_a_mesh_that_is_set_stays_out_of_jobs(plan: str, way: str, kind: str) -> None:
    main, startup = (
        dtrans.trace(step_with(SHIFT), *jax.eval_shape(init, KEY), X, Y, KEY),
        dtrans.trace(init, KEY),
    )
    with compiled_quickly(), jax.set_mesh(mesh(kind)):
        within = (
            dtrans.trace(step_with(SHIFT), *jax.eval_shape(init, KEY), X, Y, KEY),
            dtrans.trace(init, KEY),
        )
        job = getattr(PLANS[plan](*within), way)()
        state, loss = job.step(job.init(KEY), X, Y, KEY)
        loss, w = np.asarray(loss), np.asarray(job.params(state)["w"])
    with compiled_quickly():
        job = getattr(PLANS[plan](main, startup), way)()
        state, wanted = job.step(job.init(KEY), X, Y, KEY)
    np.testing.assert_allclose(loss, wanted, rtol=1e-12)
    np.testing.assert_allclose(w, job.params(state)["w"], rtol=1e-12)


@pytest.mark.parametrize("plan", ["nccl2", "pipeline"])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_a_step_that_says_where_its_values_should_be(plan: str, kind: str) -> None:
    """Constraints, shardings of `jit` and `device_put` are dropped, because the plan places
    values."""
    on = mesh(kind)
    plain = step_with(SHIFT)
    rows = NamedSharding(on, P("d"))
    put = jax.sharding.reshard if kind == "explicit" else jax.lax.with_sharding_constraint

    def step(params: Any, opt_state: Any, x: Any, y: Any, key: Any) -> Any:
        x = put(x, P("d"))
        y = jax.device_put(y, rows)
        double = (
            jax.jit(lambda a: 2 * a)
            if kind == "explicit"
            else jax.jit(lambda a: 2 * a, in_shardings=rows)
        )
        return plain(params, opt_state, double(x) / 2, y, key)

    with compiled_quickly():
        with contextlib.ExitStack() as stack:
            stack.enter_context(jax.set_mesh(on))
            main, startup = (
                dtrans.trace(step, *jax.eval_shape(init, KEY), X, Y, KEY),
                dtrans.trace(init, KEY),
            )
        named = {e.primitive.name for e in main.eqns}
        assert named.isdisjoint(("reshard", "sharding_constraint", "device_put"))
        job = PLANS[plan](main, startup).on_mesh()
        state, first = job.step(job.init(KEY), X, Y, KEY)
        # traced again without a mesh
        job.step(state, np.tile(X, (2, 1)), np.tile(Y, 2), KEY)
    np.testing.assert_allclose(first, alone()[1], rtol=1e-10)
