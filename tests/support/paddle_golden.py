"""Recorded programs of Paddle's DistributeTranspiler, and the same models for dtrans.

`golden/transpiled.json` has the results of paddlepaddle 1.8.5.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from helpers import endpoints
from paths import GOLDEN

import dtrans
from dtrans import DistributeTranspiler, DistributeTranspilerConfig
from dtrans.paddle import Embedding


RECORDED = json.loads((GOLDEN / "transpiled.json").read_text())["cases"]
KEY = jax.random.key(0)


class WeightFirst(NamedTuple):
    """Parameters of `fc` in another order than the order of their names."""

    fc_w: Any
    fc_b: Any


def fc(params: Any, x: Any, y: Any) -> Any:
    """Return the mean squared error of one layer."""
    p = params._asdict() if isinstance(params, WeightFirst) else params
    return jnp.mean((x @ p["fc_w"] + p["fc_b"] - y) ** 2)


def fc_params(key: Any) -> dict[str, Any]:
    return {
        "fc_b": jnp.zeros(1000),
        "fc_w": jax.random.uniform(key, (1000, 1000), minval=-0.05, maxval=0.05),
    }


def mlp(params: Any, x: Any, label: Any) -> Any:
    """Return the cross entropy of two layers."""
    hidden = jax.nn.relu(x @ params["w1"] + params["b1"])
    return optax.softmax_cross_entropy_with_integer_labels(
        hidden @ params["w2"] + params["b2"], label
    ).mean()


def mlp_params(key: Any) -> dict[str, Any]:
    one, two = jax.random.split(key)
    w1, w2 = jax.random.normal(one, (784, 256)) / 28, jax.random.normal(two, (256, 10)) / 16
    return {"b1": jnp.zeros(256), "b2": jnp.zeros(10), "w1": w1, "w2": w2}


def embedding(params: Any, label: Any, *ids: Any) -> Any:
    """Return the loss of one layer on pooled rows of a table, with a lookup for each of `ids`."""
    pooled = [params["shared_w"][i].mean(1) for i in ids]
    logits = jnp.concatenate(pooled, 1) @ params["fc_w"] + params["fc_b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()


def embedding_params(inputs: int) -> Callable[[Any], dict[str, Any]]:
    def make(key: Any) -> dict[str, Any]:
        one, two = jax.random.split(key)
        table, w = jax.random.uniform(one, (1000, 64)), jax.random.normal(two, (64 * inputs, 2))
        return {"fc_b": jnp.zeros(2), "fc_w": w, "shared_w": table}

    return make


def of(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


X, LABEL, IDS = of("float32", 32, 1000), of("int32", 32), of("int32", 32, 7)
# name of a model -> (loss, function that creates the parameters, batch)
NETS: dict[str, tuple[Any, Any, tuple[Any, ...]]] = {
    "fc": (fc, fc_params, (X, X)),
    "fc, the weight first": (fc, lambda key: WeightFirst(**fc_params(key)), (X, X)),
    "mlp": (mlp, mlp_params, (of("float32", 32, 784), LABEL)),
    "emb1": (embedding, embedding_params(1), (LABEL, IDS)),
    "emb2": (embedding, embedding_params(2), (LABEL, IDS, IDS)),
}


def decays(params: Any) -> Any:
    """Return True for the weight: L2 decay applies only to the weight."""
    return (
        WeightFirst(True, False)
        if isinstance(params, WeightFirst)
        else {"fc_b": False, "fc_w": True}
    )


SGD = optax.sgd(0.1)
DECAY = optax.exponential_decay(0.1, 10, 0.9)
L2 = optax.chain(optax.add_decayed_weights(1e-2, mask=decays), SGD)
# name of a recording -> (model, optimizer)
CASES: dict[str, tuple[str, Any]] = {
    "fc_sgd": ("fc", SGD),
    "fc_momentum": ("fc", optax.sgd(0.1, momentum=0.9)),
    "fc_adam": ("fc", optax.adam(0.1)),
    "fc_adagrad": ("fc", optax.adagrad(0.1)),
    "fc_lars_momentum": ("fc", dtrans.paddle.optimizers.lars_momentum(0.1, 0.9)),
    "mlp_sgd": ("mlp", SGD),
    "fc_sgd_lr_exponential": ("fc", optax.sgd(DECAY)),
    "mlp_adam_lr_exponential": ("mlp", optax.adam(DECAY)),
    # Paddle dispatches parameters in the order of its ops, and the regularizer of the weight is an
    # early op. dtrans dispatches in leaf order, so this pytree has the weight first.
    "fc_sgd_l2_w": ("fc, the weight first", L2),
    "fc_sgd_clip_value_opt": ("fc", optax.chain(optax.clip(1e-5), SGD)),
    "fc_sgd_clip_global_opt": ("fc", optax.chain(optax.clip_by_global_norm(0.1), SGD)),
    "mlp_sgd_p1_t1": ("mlp", SGD),
    "mlp_sgd_p3_t2": ("mlp", SGD),
    "mlp_sgd_t2_id1": ("mlp", SGD),
    "fc_sgd_block65536": ("fc", SGD),
    "fc_sgd_noslice": ("fc", SGD),
    "mlp_sgd_noslice_p3": ("mlp", SGD),
    "emb1_sparse_sgd_sync": ("emb1", SGD),
    "emb2_sparse_sgd_sync": ("emb2", SGD),
    "fc_sgd_async_arg": ("fc", SGD),
    "fc_sgd_half_async": ("fc", SGD),
    "emb1_sparse_adam_async": ("emb1", optax.adam(0.1)),
    "fc_sgd_dcasgd": ("fc", SGD),
    "mlp_adam_dcasgd": ("mlp", optax.adam(0.1)),
}
GEO = "geo_fc_sgd"
# A table whose rows are assigned to servers by id. Paddle 1.8 raises an error for it, so a patched
# Paddle made this recording.
DISTRIBUTED = {"PATCHED_emb1_dist_sgd_sync": ("emb1", SGD)}
# The options of the table in Paddle's layers, for recordings with a table that is not dense.
TABLES = {
    "emb1_sparse_sgd_sync": Embedding(is_sparse=True),
    "emb2_sparse_sgd_sync": Embedding(is_sparse=True),
    "emb1_sparse_adam_async": Embedding(is_sparse=True),
    "PATCHED_emb1_dist_sgd_sync": Embedding(is_sparse=True, is_distributed=True),
}
# Paddle raises an error for these two, because a clip reads the full gradient of a parameter that
# is cut into blocks. Except for the clip, dtrans's programs equal the recordings without the clip.
WITHOUT_CLIP: dict[str, str] = {
    "fc_sgd_clip_value_opt": "fc_sgd",
    "fc_sgd_clip_global_opt": "fc_sgd",
}


def programs(name: str) -> tuple[dtrans.Program, dtrans.Program]:
    """Return the traced step and the traced init of a case."""
    net, tx = (CASES | DISTRIBUTED)[name]
    loss, make, batch = NETS[net]

    def init(key: Any) -> tuple[Any, Any]:
        params = make(key)
        return params, tx.init(params)

    step = dtrans.make_train_step(loss, tx)
    return dtrans.trace(step, *jax.eval_shape(init, KEY), *batch), dtrans.trace(init, KEY)


def transpiled(
    recorded: dict[str, Any], main: Any, startup: Any, table: Embedding | None = None
) -> DistributeTranspiler:
    """Return the transpiler, called as in the recording, with the layers' options of the table."""
    sparse = None if table is None else {"params/shared_w": table}
    t = DistributeTranspiler(DistributeTranspilerConfig(**recorded["config"], sparse=sparse))
    t.transpile(
        trainer_id=recorded["trainer_id"],
        program=main,
        startup_program=startup,
        pservers=",".join(endpoints(recorded["pservers"])),
        trainers=recorded["trainers"],
        sync_mode=recorded["sync_mode"],
        seed=1,  # `random_seed` of the recorded program
    )
    return t
