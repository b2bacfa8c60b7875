"""EPL's colocation: a replicated body and a split head on the same devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import tree_close
from pipeline_models import Job, compiled_quickly

import dtrans
from dtrans.errors import ConfigError


KEY = "cluster.colocate_split_and_replicate"
CLASSES = 11


def array(*shape: int) -> np.ndarray:
    return np.random.default_rng(list(shape)).normal(size=shape) / np.sqrt(shape[0])


def classifier(devices: int | None = 4) -> Job:
    """Return a dense layer in a replicate scope, and a head in a split scope, as in EPL's
    tutorials."""
    params = {"body": array(6, 8), "bias": array(8), "head": array(8, CLASSES)}
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.05))

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        with dtrans.replicate(devices):
            h = jax.nn.relu(x @ params["body"] + params["bias"])
        with dtrans.split(devices):
            logits = h @ params["head"]
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def init(key: jax.Array) -> Any:
        arrays = jax.tree.map(jnp.asarray, params)
        return arrays, tx.init(arrays)

    batch = jnp.asarray(array(16, 6) * 4), jnp.arange(16) % CLASSES
    return Job(dtrans.make_train_step(loss, tx), init, batch)


@pytest.mark.parametrize("devices, options", [(4, {}), (None, {"replicas": 2})])
def test_a_colocated_head_equals_one_device(
    x64: None, devices: int | None, options: dict[str, Any]
) -> None:
    with compiled_quickly():
        of = classifier(devices)
        plan = dtrans.epl.pipeline(*of.traced(), {KEY: True}, **options)
        count = devices or options["replicas"]
        assert plan.axes == (("data", count),)
        assert plan.program.inputs["params/head"].shape == (8, -(-CLASSES // count))
        tree_close(of.of(plan.on_mesh()), of.on_one_device(), 1e-12)
        report = plan.verify()
        assert report.equal and report.complete, report


@pytest.mark.parametrize(
    "config, options, words",
    [
        (
            {"pipeline.num_micro_batch": 2},
            {},
            "pipeline.num_micro_batch is 2, which is not supported",
        ),
        ({"pipeline.num_stages": 2}, {}, "pipeline.num_stages is 2, which is not supported"),
        ({"zero.level": "v0"}, {}, "zero.level is 'v0', which is not supported together with"),
        ({}, {"bucket_MB": 1}, "bucket_MB is not supported together with cluster.colocate"),
        ({}, {"cluster": dtrans.Cluster()}, "cluster is not supported together with"),
        ({}, {"collection": ["x"]}, "collection is not supported together with"),
        ({}, {"replicas": 2}, "device_count=4, but 2 devices of the mesh divide split layers"),
    ],
)
def test_options_that_colocation_excludes(
    config: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        dtrans.epl.pipeline(*classifier().traced(), {KEY: True, **config}, **options)


def test_the_number_of_devices_is_needed() -> None:
    with pytest.raises(ConfigError, match="device_count of the scopes is missing; pass the number"):
        dtrans.epl.pipeline(*classifier(None).traced(), {KEY: True})


def test_one_stage_and_defaults_are_accepted() -> None:
    config = {KEY: True, "pipeline.num_stages": 1, "pipeline.num_micro_batch": 1}
    config["communication.gradients_reduce_method"] = "MEAN"
    plan = dtrans.epl.pipeline(*classifier().traced(), config)
    assert plan.trainers == 4
