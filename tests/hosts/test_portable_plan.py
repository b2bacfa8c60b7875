"""Plans that are sent to another process, and calls that `plan.on_ray` refuses before it connects
to a cluster."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from flax.training.train_state import TrainState

import dtrans
from dtrans.errors import ConfigError, PeerError
from dtrans.hosts.on_ray import of_each
from dtrans.hosts.portable_plan import PortablePlan, pickled
from dtrans.hosts.ray_group import RayPlacement, driver_environment, secret_environment


TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
KEY = jax.random.key(0)
X = jnp.ones((8, 4))
SCALE = 1.0


def loss(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] * SCALE) ** 2)


def init(key: jax.Array) -> tuple[Any, Any]:
    params = {"a": jax.random.normal(key, (4, 6)), "b": jnp.ones((6, 2))}
    return params, TX.init(params)


def programs() -> tuple[Any, Any]:
    step = dtrans.make_train_step(loss, TX)
    return dtrans.trace(step, *jax.eval_shape(init, KEY), X), dtrans.trace(init, KEY)


def travelled(plan: Any) -> PortablePlan:
    """Return the plan as an actor receives it."""
    cloudpickle = pytest.importorskip("ray.cloudpickle", reason="the extra `ray` is not installed")
    return pickle.loads(pickled(PortablePlan.of(plan), cloudpickle))


@pytest.mark.parametrize(
    "plan",
    [
        lambda *p: dtrans.pserver(*p, trainers=2, batch="local"),
        lambda *p: dtrans.nccl2(main=p[0], startup=p[1], trainers=2, batch="local", reduce="sum"),
        lambda *p: dtrans.sharding(*p, degree=2, stage=3),
        lambda *p: dtrans.pipeline(*p, num_stages=2, num_micro_batch=2, schedule="GPipe"),
    ],
)
def test_another_process_makes_the_same_plan(plan):
    original = plan(*programs())
    made = travelled(original).rebuild()
    assert type(made) is type(original)
    assert made.identity == original.identity
    assert str(made) == str(original)


def test_servers_are_where_the_process_says():
    made = travelled(dtrans.pserver(*programs(), trainers=2)).rebuild(pservers="10.0.0.1:7000")
    assert list(made.servers) == ["10.0.0.1:7000"]


def flax_programs() -> tuple[Any, Any]:
    model = linen.Dense(3)

    def init(key: jax.Array) -> TrainState:
        return TrainState.create(apply_fn=model.apply, params=model.init(key, X), tx=TX)

    def step(state: TrainState, x: jax.Array) -> Any:
        value, g = dtrans.value_and_grad(lambda p: jnp.mean(state.apply_fn(p, x) ** 2))(
            state.params
        )
        return state.apply_gradients(grads=g), value

    return dtrans.trace(step, jax.eval_shape(init, KEY), X), dtrans.trace(init, KEY)


def equinox_programs() -> tuple[Any, Any]:
    def init(key: jax.Array) -> Any:
        model = eqx.nn.MLP(4, 2, 4, 1, key=key)
        return model, TX.init(eqx.filter(model, eqx.is_array))

    step = dtrans.make_train_step(lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2), TX)
    return dtrans.trace(step, *init(KEY), X), dtrans.trace(init, KEY)


@pytest.mark.parametrize("made", [flax_programs, equinox_programs])
def test_functions_in_the_state_travel(made):
    """Flax stores functions in the structure of its state, and Equinox stores them among the
    leaves. Both store sentinels."""
    plan = dtrans.nccl2(*made(), trainers=2)
    assert travelled(plan).rebuild().identity == plan.identity


def test_a_function_that_traces_otherwise_there_is_refused(monkeypatch):
    portable = travelled(dtrans.nccl2(*programs(), trainers=2))
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 2.0)
    with pytest.raises(
        PeerError,
        match="differs from the driver's: part trainer. A traced function must not depend",
    ):
        portable.rebuild()


def test_what_cannot_travel_is_named():
    plan = dtrans.nccl2(*programs(), trainers=2)
    with pytest.raises(ConfigError, match="was derived from another plan; call the strategy"):
        plan.for_trainers(4).on_ray()
    startup = plan.startup
    assert startup.specializer is None
    with pytest.raises(ConfigError, match="program init was not returned by dtrans.trace"):
        dtrans.nccl2(programs()[0], startup, trainers=2).on_ray()
    lock = threading.Lock()

    def locked(params: Any, x: jax.Array) -> jax.Array:
        with lock:
            return loss(params, x)

    main = dtrans.trace(dtrans.make_train_step(locked, TX), *init(KEY), X)
    with pytest.raises(ConfigError, match="cannot be pickled.*lock.*import the object"):
        travelled(dtrans.nccl2(main, programs()[1], trainers=2))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"trainers_on": "NEAR"}, "trainers_on must be 'PACK' or 'SPREAD'"),
        ({"trainer_resources": {"CPU": 0}}, "trainer_resources must have positive amounts"),
        ({"processes": 3}, "processes=3 does not divide the 2 trainers"),
        ({"rows": 4}, "rows=4 is for a dataset"),
        ({"batches": object()}, "rows must be a number of rows"),
        ({"deadline": 0}, "deadline must be a positive number of seconds"),
    ],
)
def test_options_that_cannot_be(options, said):
    with pytest.raises(ConfigError, match=said):
        dtrans.nccl2(*programs(), trainers=2).on_ray(**options)


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"need Ray: pip install 'dtrans-jax\[ray\]'"):
        dtrans.nccl2(*programs(), trainers=2).on_ray()


def test_ray_is_imported_when_it_is_used():
    subprocess.run(
        [sys.executable, "-c", "import dtrans, sys; sys.exit('ray' in sys.modules)"], check=True
    )


def test_actors_get_the_variables_of_the_driver(monkeypatch):
    """The actors do not get the driver's role, its secret and its virtual devices."""
    for name in ("DTRANS_TOKEN", "DTRANS_ROLE", "JAX_LOCAL_DEVICE_IDS"):
        monkeypatch.setenv(name, "mine")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_dump_to=/tmp/x")
    monkeypatch.setenv("JAX_LOG_COMPILES", "0")
    with jax.enable_x64(True):
        found = driver_environment({"CPU": 1}, 2)
    assert not found.keys() & {"DTRANS_TOKEN", "DTRANS_ROLE", "JAX_LOCAL_DEVICE_IDS"}
    assert found["XLA_FLAGS"] == "--xla_dump_to=/tmp/x" and found["JAX_NUM_CPU_DEVICES"] == "2"
    assert found["JAX_LOG_COMPILES"] == "0" and found["JAX_ENABLE_X64"] == "1"
    assert found["JAX_PLATFORMS"] == "cpu"
    on_gpu = driver_environment({"CPU": 1, "GPU": 1}, 1)
    assert on_gpu.get("JAX_PLATFORMS") == jax.config.jax_platforms
    assert secret_environment()["DTRANS_TOKEN"] == "mine"
    monkeypatch.delenv("DTRANS_TOKEN")
    assert secret_environment()["DTRANS_TOKEN"] != secret_environment()["DTRANS_TOKEN"]


def test_trainers_are_placed_before_servers():
    groups = RayPlacement(2, 1, "SPREAD").groups
    assert [(kind, count, strategy) for kind, count, _, strategy in groups] == [
        ("trainer", 2, "SPREAD"),
        ("pserver", 1, "SPREAD"),
    ]


def test_results_of_parts_become_one():
    """Numbers are averaged, and other results get a row for each trainer."""
    assert of_each([np.float32(1), np.float32(2)]) == np.float32(1.5)
    assert of_each([np.int32(1), np.int32(2)]).tolist() == [1, 2]
    assert of_each([np.ones(3), np.zeros(3)]).shape == (2, 3)
