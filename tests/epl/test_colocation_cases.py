"""Models of EPL's tests that set `cluster.colocate_split_and_replicate`, as steps of JAX.

The tests are in `add_weights_test.py`, `split_test.py`, `flops_hook_test.py` and
`set_default_scope_test.py` of EPL. Their models have a stack of experts in `epl.split` scopes, and
a dense layer under the default strategy `epl.replicate(1)`, here outside of all scopes. EPL checks
names of operations, or compares two of its own runs; these tests compare with one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import tree_close
from mesh_models import array, job_of
from pipeline_models import Job, compiled_quickly

import dtrans
from dtrans._jax import equations
from dtrans.errors import ConfigError


COLOCATED = {"cluster.colocate_split_and_replicate": True}
AMP = {"amp.level": "O1", "amp.loss_scale": 128}
CLIP_LATE = {"communication.clip_after_allreduce": True}
EXPERTS, GROUPS, SLOTS, WIDTH, TOKENS, CLASSES = 6, 8, 3, 4, 5, 5
DEVICES = 4


# -- models ----------------------------------------------------------------------------------------


def experts(params: Any, x: jax.Array) -> jax.Array:
    """Return the outputs of the experts for slots of tokens [expert, group, slot, feature]."""
    with dtrans.split():
        h = jax.nn.relu(jnp.einsum("egcm,emh->egch", x, params["up"]))
        return jnp.einsum("egch,ehm->egcm", h, params["down"])


def given(features: int) -> dict[str, np.ndarray]:
    shapes = {"up": (EXPERTS, WIDTH, 7), "down": (EXPERTS, 7, WIDTH), "kernel": (features, CLASSES)}
    return {"bias": array(CLASSES), **{n: array(*shape) for n, shape in shapes.items()}}


def slots(tx: Any) -> Job:
    """Return the model of `add_weights_test.py`: experts, and a layer for pairs of groups."""
    params = given(2 * SLOTS * WIDTH)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        h = experts(params, x).reshape(EXPERTS, -1, 2 * SLOTS * WIDTH)
        return jnp.mean(h @ params["kernel"] + params["bias"])

    return job_of(loss, params, (array(EXPERTS, GROUPS, SLOTS, WIDTH),), tx)


def dispatched(tx: Any) -> Job:
    """Return the model of `split_test.py` and `flops_hook_test.py`, which combines the slots."""
    params = given(TOKENS * WIDTH)

    def loss(params: Any, x: jax.Array, combine: jax.Array) -> jax.Array:
        h = experts(params, x)
        with dtrans.split():
            h = jnp.einsum("gsec,egcm->gsm", combine, h)
        return jnp.mean(h.reshape(len(h), -1) @ params["kernel"] + params["bias"])

    batch = (array(EXPERTS, GROUPS, SLOTS, WIDTH), array(GROUPS, TOKENS, EXPERTS, SLOTS))
    return job_of(loss, params, batch, tx)


# -- optimizers of the tests -----------------------------------------------------------------------


def clip_each(norm: float) -> optax.GradientTransformation:
    """Clip the norm of each gradient, as `tf.clip_by_norm` does."""

    def clipped(g: jax.Array) -> jax.Array:
        return g * jnp.minimum(1.0, norm / jnp.linalg.norm(g))

    return optax.stateless(lambda updates, params: jax.tree.map(clipped, updates))


def adam(*before: optax.GradientTransformation) -> Callable[[], Any]:
    return lambda: optax.chain(*before, optax.adam(0.01))


EACH, ALL, HALF = clip_each(0.02), optax.clip_by_global_norm(0.02), optax.scale(0.5)
AXES = {slots: 1, dispatched: (1, 0)}  # dimension of the groups, which the trainers divide
CASES = {
    "graph_with_local_clip": (slots, adam(EACH), {}),
    "graph_with_global_clip": (slots, adam(ALL), {}),
    "graph_with_local_clip_and_scale": (slots, adam(EACH, HALF), {}),
    "graph_with_global_clip_and_scale": (slots, adam(ALL, HALF), {}),
    "graph_with_local_clip_after_allreduce": (slots, adam(EACH), CLIP_LATE),
    "graph_with_global_clip_after_allreduce": (slots, adam(ALL), CLIP_LATE),
    "split_with_apply, 1 group": (dispatched, lambda: optax.sgd(0.1, 0.9), {}),
    "split_with_apply, 3 groups": (
        dispatched,
        lambda: optax.sgd(0.1, 0.9),
        {"optimizer.num_apply_group": 3},
    ),
}
IN_16_BITS = {
    "graph_with_local_clip_and_amp": adam(EACH),
    "graph_with_global_clip_and_amp": adam(ALL),
    "graph_with_local_clip_and_scale_and_amp": adam(EACH, HALF),
}


def planned(of: Job, axes: Any, config: dict[str, Any], devices: int | str = DEVICES) -> Any:
    return dtrans.epl.pipeline(
        *of.traced(), COLOCATED | config, replicas=devices, batch=dtrans.Batch(axes=axes)
    )


@pytest.fixture(autouse=True)
def quickly(x64: None) -> Any:
    """Enable 64 bits, and compile programs fast."""
    with compiled_quickly():
        yield


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_numbers_equal_one_device(name: str) -> None:
    model, tx, config = CASES[name]
    of = model(tx())
    plan = planned(of, AXES[model], config)
    assert plan.axes == (("data", DEVICES),)
    assert plan.program.inputs["params/up"].shape == (-(-EXPERTS // DEVICES), WIDTH, 7)
    tree_close(of.of(plan.on_mesh()), of.on_one_device(), 1e-12)
    report = plan.verify()
    assert report.equal and report.complete, report


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", IN_16_BITS)
def test_numbers_in_16_bits(name: str) -> None:
    """A trainer's products in 16 bits are terms of sums, so sums differ by a rounding in 16 bits.

    The reference is one rank of `dtrans.sharding`, which divides reduced gradients by the scale.
    """
    of = slots(IN_16_BITS[name]())
    plan = planned(of, AXES[slots], AMP)
    kinds = {e.outvars[0].aval.dtype.name for e in equations(plan.program.jaxpr) if is_product(e)}
    assert kinds == {"float16"}
    precision = dtrans.Precision("fp16", loss_scaling=128)
    one = dtrans.sharding(*of.traced(), degree=1, precision=precision)
    tree_close(of.of(plan.on_mesh()), of.of(one.on_mesh()), 2e-3)
    report = plan.verify()
    assert report.equal and report.complete, report


def is_product(eqn: Any) -> bool:
    return str(eqn.primitive.name) == "dot_general"


def test_products_of_a_trainer() -> None:
    """A trainer computes its experts for all groups, and the dense layer for its own groups.

    EPL's test counts the operations of this model.
    """
    plan = planned(dispatched(optax.sgd(0.1)), AXES[dispatched], {})
    read = [e.invars[0].aval.shape for e in equations(plan.program.jaxpr) if is_product(e)]
    assert (-(-EXPERTS // DEVICES), DEVICES * GROUPS, SLOTS, WIDTH) in read
    assert (GROUPS, TOKENS * WIDTH) in read
    assert (DEVICES * GROUPS, TOKENS * WIDTH) not in read


def test_the_default_scope_has_all_devices() -> None:
    """EPL's cluster has one group of all devices, which replicate and split scopes share."""
    plan = planned(slots(optax.adam(0.01)), AXES[slots], {}, devices="auto")
    assert plan.axes == (("data", jax.device_count()),)
    assert plan.device_count == jax.device_count()


def test_a_dynamic_scale_is_refused() -> None:
    of = slots(optax.adam(0.01))
    with pytest.raises(ConfigError, match="amp.loss_scale is 'dynamic', which is not supported"):
        planned(of, AXES[slots], {"amp.level": "O1"})
