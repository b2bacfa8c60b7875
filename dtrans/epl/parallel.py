"""EPL's `Parallel` over `dtrans.pipeline`: a configuration with EPL's keys becomes the options of a
plan.

Most keys are an option under another name (`dtrans.epl.config.NAMES`). Levels and switches become
the option that they stand for. Options that EPL has no key for keep their names.

Source: epl/parallel/parallel.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from dtrans.checks import check_known, check_one_of, grouped, is_number
from dtrans.data_parallel.options import Reduce
from dtrans.epl.config import NAMES, Config
from dtrans.errors import ConfigError, options_named
from dtrans.ir.program import Program
from dtrans.pipeline_parallel.device_layout import Cluster
from dtrans.pipeline_parallel.options import StageMemory, Stages
from dtrans.pipeline_parallel.plan import PipelinePlan
from dtrans.pipeline_parallel.transform import pipeline as pipeline_of
from dtrans.step.batch_sharing import Batch
from dtrans.step.scopes import scopes_within
from dtrans.zero.options import Precision


RECORDS = {"stages": Stages(), "memory": StageMemory(), "reduce": Reduce(), "batch": Batch("local")}
ZERO_LEVELS = {"": 0, "v0": 1, "v1": 1}
OFFLOAD_LEVELS = {"": False, "v0": True}


def pipeline(
    main: Program,
    startup: Program,
    config: Config | Mapping[str, Any],
    *,
    collection: Collection[str] = (),
    cluster: Cluster | None = None,
    **options: Any,
) -> PipelinePlan:
    """Plan a pipeline from a configuration with EPL's keys.

    Args:
      main: the traced training step, (params, opt_state, *batch) -> (params, opt_state, loss, ...).
      startup: the traced init, -> (params, opt_state).
      config: EPL's configuration, or its keys and values.
      collection: the names of the values to keep with `gradient_checkpoint.type="collection"`, as
        `jax.ad_checkpoint.checkpoint_name` gave them.
      cluster: how stages and replicas are laid out; by default "auto", with
        `cluster.device_place_prefer_intra_node`.
      **options: options of `dtrans.pipeline` that EPL has no key for, such as `replicas`, and
        fields of its records, as `min_slice_size`. With `clip_local_norm` each micro-batch is
        clipped, as EPL does by default, unless `clip_local_per` says otherwise.

    Returns:
      The plan that `dtrans.pipeline` makes.

    Raises:
      ConfigError: a key or an option that is out of range, unknown, or contradicts another, by
        EPL's key.
      BatchError, GradientError, TraceError: as `dtrans.pipeline`.

    Source: `Parallel` of EPL (epl/parallel/parallel.py).

    Example:
      >>> import jax, jax.numpy as jnp, optax, dtrans
      >>> tx = optax.sgd(0.5)
      >>> step = dtrans.make_train_step(lambda p, x: jnp.mean(jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) ** 2), tx)
      >>> init = lambda key: (p := {"a": jnp.eye(64), "b": jnp.eye(64)}, tx.init(p))
      >>> key, x = jax.random.key(0), jnp.ones((8, 64))
      >>> config = dtrans.epl.Config({"pipeline.num_stages": 2, "pipeline.num_micro_batch": 4})
      >>> plan = dtrans.epl.pipeline(dtrans.trace(step, *init(key), x), dtrans.trace(init, key), config)
      >>> [s.params for s in plan.stages], plan.schedule.name
      ([('params/a',), ('params/b',)], 'PreferBackward')
    """
    if not isinstance(config, Config):
        config = Config(config)
    check_known(
        "EPL's configuration", options, inspect.signature(pipeline_of).parameters, RECORDS, NAMES
    )
    scoped = any(scope.kind == "replicate" for scope in scopes_within(main.jaxpr))
    if config["pipeline.num_stages"] == -1 and not scoped:
        raise ConfigError(
            "pipeline.num_stages must be given: how many stages; the model has no dtrans.replicate "
            "scopes, which would "
            "say it"
        )
    after, norm = (
        config.given.get("communication.clip_after_allreduce"),
        options.get("clip_local_norm"),
    )
    if after is False and norm is None:
        raise ConfigError(
            "communication.clip_after_allreduce=False: a clip in the optimizer is always one of "
            "the reduced gradients; "
            "clip_local_norm= clips those of each replica and micro-batch before. Leave one of "
            "them out"
        )
    if after and norm is not None:
        raise ConfigError(
            f"communication.clip_after_allreduce=True and clip_local_norm={norm!r}, which clips "
            "before: clip in the "
            "optimizer, optax.clip_by_global_norm"
        )
    if norm is not None:
        options = {
            "clip_local_per": "micro_batch"
        } | options  # EPL clips before it adds micro-batches up
    chosen = {name: config[key] for name, key in NAMES.items()}
    chosen |= {
        "precision": _precision(config["amp.level"], config["amp.loss_scale"]),
        "num_stages": "auto"
        if config["pipeline.num_stages"] == -1
        else config["pipeline.num_stages"],
        "gradient_checkpoint": _kept(config["gradient_checkpoint.type"], collection),
        "sharding_stage": _level("zero.level", config["zero.level"], ZERO_LEVELS),
        "offload": _level("offload.level", config["offload.level"], OFFLOAD_LEVELS),
        "compress": "fp16" if config["communication.fp16"] else None,
        "compress_scale": float(config["communication.fp16_scale"])
        if config["communication.fp16"]
        else 1.0,
    }
    if cluster is None and not config["cluster.device_place_prefer_intra_node"]:
        cluster = Cluster(prefer_intra_node=False)
    if cluster is not None:
        options["cluster"] = cluster
    with options_named(NAMES | {"op": NAMES["reduce"]}):
        return pipeline_of(
            main, startup, **{"batch": RECORDS["batch"], **grouped({**options, **chosen}, RECORDS)}
        )


def _kept(kind: str, collection: Collection[str]) -> str | Collection[str]:
    """The option `gradient_checkpoint`."""
    check_one_of("gradient_checkpoint.type", kind, ("", "auto", "collection"))
    if bool(collection) != (kind == "collection"):
        raise ConfigError(
            f"gradient_checkpoint.type={kind!r} and collection={collection!r}: the type "
            "'collection' needs names, and "
            "no other has any"
        )
    return collection if kind == "collection" else kind


def _precision(level: str, scale: Any) -> Precision:
    """What stages compute in: EPL's level O1 is products in float16, with a scaled loss."""
    check_one_of("amp.level", level.lower(), ("", "o1"))
    if not level:
        return Precision()
    if not is_number(scale):
        raise ConfigError(
            f"amp.loss_scale={scale!r}: stages of a pipeline take a fixed scale: give a number, "
            "such as 1024, beside "
            "which optax.apply_if_finite skips steps that are not finite"
        )
    return Precision("fp16", loss_scaling=float(scale))


def _level(key: str, level: str, levels: Mapping[str, Any]) -> Any:
    """What a level stands for; as in EPL, upper and lower case are the same."""
    check_one_of(key, level.lower(), levels)
    return levels[level.lower()]
