"""EPL's `Parallel`: a call of `dtrans.pipeline` with a configuration in EPL's keys.

Most keys are options of `dtrans.pipeline` under another name (`dtrans.epl.config.NAMES`).
`pipeline` converts EPL's values, such as "v0" and "O1", to values of these options. The caller
passes options that EPL does not have as keyword arguments.

Source: epl/parallel/parallel.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import jax

from dtrans.checks import check_known, check_one_of, group_options
from dtrans.data_parallel.options import Reduce
from dtrans.data_parallel.plan import CollectivePlan
from dtrans.data_parallel.transform import nccl2
from dtrans.epl.config import DEFAULTS, NAMES, Config, config_from
from dtrans.errors import ConfigError, rename_options
from dtrans.ir.program import Program
from dtrans.pipeline_parallel.device_layout import Cluster
from dtrans.pipeline_parallel.options import StageMemory, Stages
from dtrans.pipeline_parallel.plan import PipelinePlan
from dtrans.pipeline_parallel.transform import pipeline as pipeline_of
from dtrans.step.batch_sharing import Batch
from dtrans.step.halves import divide_step
from dtrans.step.scopes import scopes_within
from dtrans.step.startup import normalize_step
from dtrans.zero.mixed_precision import low_precision
from dtrans.zero.options import Precision


RECORDS = {"stages": Stages(), "memory": StageMemory(), "reduce": Reduce(), "batch": Batch("local")}
ZERO_LEVELS = {"": 0, "v0": 1, "v1": 1}
OFFLOAD_LEVELS = {"": False, "v0": True}
COLOCATED = "cluster.colocate_split_and_replicate"
# Values besides the defaults that colocation accepts, and keys with any value. XLA compiles the
# update of a colocated plan as one program that overwrites leaf after leaf. So groups of leaves
# (`num_apply_group`) need no other plan, and a clip in the optimizer reads reduced gradients.
FIXED = {COLOCATED: True, "pipeline.num_stages": 1, "communication.clip_after_allreduce": True}
TOGETHER = ("amp.level", "amp.loss_scale", "optimizer.num_apply_group")


def pipeline(
    main: Program,
    startup: Program,
    config: Config | Mapping[str, Any] | None = None,
    *,
    collection: Collection[str] = (),
    cluster: Cluster | None = None,
    **options: Any,
) -> PipelinePlan | CollectivePlan:
    """Plan a pipeline from a configuration with EPL's keys.

    Args:
      main: the traced training step, (params, opt_state, *batch) -> (params, opt_state, loss, ...).
      startup: the traced init, (...) -> (params, opt_state).
      config: EPL's configuration, or a mapping of its keys to values. By default, the configuration
        of `dtrans.epl.init`.
      collection: with `gradient_checkpoint.type="collection"`, the names of the values to save. The
        model assigns these names with `jax.ad_checkpoint.checkpoint_name`.
      cluster: the devices and their layout. By default `Cluster()` with the value of
        `cluster.device_place_prefer_intra_node`.
      **options: options of `dtrans.pipeline` that EPL does not have, such as `replicas`. Fields of
        its option classes, such as `min_slice_size` of `dtrans.StageMemory`, are also allowed. The
        default of `clip_local_per` is "micro_batch", as in EPL.

    Returns:
      The plan of `dtrans.pipeline`. With `cluster.colocate_split_and_replicate`, the plan of
      `dtrans.nccl2` for devices that divide both the batch and the layers in `split` scopes.

    Raises:
      ConfigError: a key or an option is unknown, out of range, or contradicts another one. The
        message has the name of EPL's key.
      BatchError, GradientError, TraceError: as for `dtrans.pipeline`.

    Source: `Parallel` of EPL (epl/parallel/parallel.py).

    Example:
      >>> import jax, jax.numpy as jnp, optax, dtrans
      >>> tx = optax.sgd(0.5)
      >>> model = lambda p, x: jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"])
      >>> step = dtrans.make_train_step(lambda p, x: jnp.mean(model(p, x) ** 2), tx)
      >>> init = lambda key: (p := {"a": jnp.eye(64), "b": jnp.eye(64)}, tx.init(p))
      >>> key, x = jax.random.key(0), jnp.ones((8, 64))
      >>> main, startup = dtrans.trace(step, *init(key), x), dtrans.trace(init, key)
      >>> config = dtrans.epl.Config({"pipeline.num_stages": 2, "pipeline.num_micro_batch": 4})
      >>> plan = dtrans.epl.pipeline(main, startup, config)
      >>> [s.params for s in plan.stages], plan.schedule.name
      ([('params/a',), ('params/b',)], 'PreferBackward')
    """
    config = config_from(config)
    if config[COLOCATED]:
        if cluster is not None:
            options = {**options, "cluster": cluster}
        if collection:
            options = {**options, "collection": collection}
        return colocated(main, startup, config, options)
    check_known(
        "EPL's configuration", options, inspect.signature(pipeline_of).parameters, RECORDS, NAMES
    )
    scoped = any(scope.kind == "replicate" for scope in scopes_within(main.jaxpr))
    if config["pipeline.num_stages"] == -1 and not scoped:
        raise ConfigError(
            "pipeline.num_stages is missing, and the model has no dtrans.replicate scopes that "
            "determine it; set it to the number of stages"
        )
    clip_after = config["communication.clip_after_allreduce"]
    norm = options.get("clip_local_norm")
    if clip_after and norm is not None:
        raise ConfigError(
            f"communication.clip_after_allreduce is True, but clip_local_norm is {norm!r}, which "
            "clips before the all-reduce; leave out clip_local_norm, and clip in the optimizer "
            "with optax.clip_by_global_norm"
        )
    if norm is not None:
        # EPL clips the gradients of each micro-batch before the sum over micro-batches
        options = {"clip_local_per": "micro_batch"} | options
    chosen = {name: config[key] for name, key in NAMES.items()}
    num_stages = config["pipeline.num_stages"]
    if num_stages == -1:
        num_stages = "auto"
    is_fp16 = config["communication.fp16"]
    chosen |= {
        "precision": _precision(config["amp.level"], config["amp.loss_scale"]),
        "num_stages": num_stages,
        "reduce": config["communication.gradients_reduce_method"].lower(),
        "gradient_checkpoint": _checkpoint(config["gradient_checkpoint.type"].lower(), collection),
        "sharding_stage": _level("zero.level", config["zero.level"], ZERO_LEVELS),
        "offload": _level("offload.level", config["offload.level"], OFFLOAD_LEVELS),
        "compress": "fp16" if is_fp16 else None,
        "compress_scale": float(config["communication.fp16_scale"]) if is_fp16 else 1.0,
    }
    is_exact = Batch.from_option(options.get("batch", "local"), "local", micro=True).exact
    if is_exact and chosen["reduce"] == "mean":
        del chosen["reduce"]  # EPL's default; exact plans infer the reduction
    if cluster is None and not config["cluster.device_place_prefer_intra_node"]:
        cluster = Cluster(prefer_intra_node=False)
    if cluster is not None:
        options["cluster"] = cluster
    with rename_options(NAMES | {"op": NAMES["reduce"]}):
        records = {"batch": RECORDS["batch"], **group_options({**options, **chosen}, RECORDS)}
        return pipeline_of(main, startup, **records)


def colocated(
    main: Program, startup: Program, config: Config, options: dict[str, Any]
) -> CollectivePlan:
    """Plan a job in which data-parallel layers and split layers use the same devices.

    EPL calls this colocation. In `replicate` scopes each device computes its rows of the batch. In
    `split` scopes it computes its slice of each layer.

    Args:
      main, startup: as in `pipeline`.
      config: EPL's configuration, with `cluster.colocate_split_and_replicate`.
      options: two optional entries. `batch` is the option of `dtrans.nccl2`. `replicas` is the
        number of devices, or "auto" for all devices. The default is the `device_count` of the
        scopes.

    Raises:
      ConfigError: the number of devices is missing, or another option is set.
    """
    for key, value in config.settings.items():
        allowed = {str(x).lower() for x in (DEFAULTS[key], FIXED.get(key, DEFAULTS[key]))}
        # texts may be in upper or lower case
        if key not in TOGETHER and str(value).lower() not in allowed:
            raise ConfigError(
                f"{key} is {value!r}, which is not supported together with {COLOCATED}; leave out "
                "one of the two keys"
            )
    others = [name for name in options if name not in ("replicas", "batch")]
    if others:
        raise ConfigError(
            f"{others[0]} is not supported together with {COLOCATED}; leave {others[0]} out"
        )
    mesh: dict[str, int | str] = {"data": _device_count(main, options), "model": "data"}
    main, startup = normalize_step(main, startup)
    main = _lowered(main, _precision(config["amp.level"], config["amp.loss_scale"]))
    return nccl2(main, startup, mesh=mesh, batch=options.get("batch", Batch()))


def _device_count(main: Program, options: Mapping[str, Any]) -> int:
    """Return the number of devices that divide the batch and the split layers.

    It is the option `replicas`, else the `device_count` of the model's scopes. The function ignores
    scopes `replicate(1)`: they state that a replica has one device.

    Raises:
      ConfigError: the number is missing, or scopes have different numbers.
    """
    replicas: int | str | None = options.get("replicas")
    if replicas is not None:
        return jax.device_count() if replicas == "auto" else replicas  # type: ignore[return-value]
    counts: set[int] = set()
    for scope in scopes_within(main.jaxpr):
        count = scope.device_count
        if count is not None and (scope.kind, count) != ("replicate", 1):
            counts.add(count)
    if len(counts) != 1:
        raise ConfigError(
            f"{COLOCATED} needs one number of devices, but the device_count of the scopes is "
            f"{sorted(counts) or 'missing'}; pass the number, or 'auto' for all devices, to "
            "dtrans.epl.pipeline as replicas="
        )
    return counts.pop()


def _lowered(main: Program, precision: Precision) -> Program:
    """Return the step with matrix products of low precision, and with a constant loss scale.

    Args:
      main: the traced single-device step.
      precision: the number type of products, and the loss scale.

    Raises:
      ConfigError: the loss scale is dynamic.
    """
    scaling = precision.scaling
    if precision.dtype is None:
        return main
    if scaling is not None and scaling.dynamic:
        raise ConfigError(
            f"amp.loss_scale is 'dynamic', which is not supported together with {COLOCATED}: the "
            "plan has no state for a scale that changes; set amp.loss_scale to a number, such as "
            "128, or leave amp.level out"
        )
    return low_precision(main, divide_step(main), precision.dtype, scaling, unscales=True)


def _checkpoint(kind: str, collection: Collection[str]) -> str | Collection[str]:
    """Return the value of `dtrans.StageMemory(gradient_checkpoint=...)`: "", "auto" or names."""
    check_one_of("gradient_checkpoint.type", kind, ("", "auto", "collection"))
    if kind != "collection" and collection:
        raise ConfigError(
            f"collection is {collection!r}, but gradient_checkpoint.type is {kind!r}; set the type "
            "to 'collection', or leave collection out"
        )
    if kind != "collection":
        return kind
    if not collection:
        raise ConfigError(
            "gradient_checkpoint.type is 'collection', but collection is empty; pass the names of "
            "values in collection="
        )
    return collection


def _precision(level: str, scale: Any) -> Precision:
    """Return the option `precision`; EPL's level O1 means float16 products and a loss scale."""
    check_one_of("amp.level", level.lower(), ("", "o1"))
    if not level:
        return Precision()
    return Precision("fp16", loss_scaling=None if scale == "dynamic" else scale)


def _level(key: str, level: str, levels: Mapping[str, Any]) -> Any:
    """Return the option of dtrans for one of EPL's levels, such as 1 for "v0" of `zero.level`.

    As in EPL, a level may be in upper or lower case.

    Args:
      key: EPL's key, for errors.
      level: the user's value of the key.
      levels: the option for each level.
    """
    check_one_of(key, level.lower(), levels)
    return levels[level.lower()]
