"""EPL's configuration: keys, defaults, and the matching options of `dtrans.pipeline`.

A key is `category.attribute`. In contrast to EPL, unknown keys are errors, and environment
variables are not read.

Source: epl/config.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dtrans.checks import did_you_mean
from dtrans.errors import ConfigError


# Key -> EPL's default. The type of the default is the type of the key.
DEFAULTS: dict[str, Any] = {
    "auto.auto_parallel": False,
    "pipeline.num_stages": -1,
    "pipeline.num_micro_batch": 1,
    "pipeline.strategy": "PreferBackward",
    "gradient_checkpoint.type": "",
    "gradient_checkpoint.end_taskgraph": -1,
    "gradient_checkpoint.check_gradients": False,
    "zero.level": "",
    "offload.level": "",
    "amp.level": "",
    "amp.loss_scale": "dynamic",
    "amp.debug_log": False,
    "optimizer.num_apply_group": 1,
    "cluster.device_place_prefer_intra_node": True,
    "cluster.run_visible_devices": "",
    "cluster.colocate_split_and_replicate": False,
    "communication.sparse_as_dense": False,
    "communication.max_splits": 5,
    "communication.num_communicators": 2,
    "communication.fp16": False,
    "communication.fp16_scale": 128,
    "communication.clip_after_allreduce": False,
    "communication.gradients_reduce_method": "mean",
    "io.slicing": False,
    "io.unbalanced_io_slicing": False,
    "io.drop_last_files": False,
}

# Option of `dtrans.pipeline` -> EPL's key.
NAMES = {
    "num_stages": "pipeline.num_stages",
    "num_micro_batch": "pipeline.num_micro_batch",
    "schedule": "pipeline.strategy",
    "gradient_checkpoint": "gradient_checkpoint.type",
    "last_checkpointed_stage": "gradient_checkpoint.end_taskgraph",
    "sharding_stage": "zero.level",
    "offload": "offload.level",
    "precision": "amp.level",
    "update_groups": "optimizer.num_apply_group",
    "max_buckets": "communication.max_splits",
    "chains": "communication.num_communicators",
    "compress": "communication.fp16",
    "compress_scale": "communication.fp16_scale",
    "reduce": "communication.gradients_reduce_method",
}

_FILES = "call dtrans.epl.slice_files(files, worker, replicas), which has this option"

# Key that is no option of `dtrans.pipeline` -> replacement, as text for an error.
ELSEWHERE = {
    "gradient_checkpoint.check_gradients": "compare the gradients with a plan without checkpoints, "
    "using plan.simulate()",
    "amp.debug_log": "print(plan.programs[...]) shows the type of each value",
    "cluster.run_visible_devices": "pass the devices to plan.on_mesh(devices)",
    "cluster.colocate_split_and_replicate": "stages always have separate devices; plan.simulate() "
    "runs all stages on one device",
    "io.slicing": _FILES,
    "io.unbalanced_io_slicing": _FILES,
    "io.drop_last_files": _FILES,
}


@dataclasses.dataclass(frozen=True)
class Config:
    """EPL's configuration, with checked keys and types.

    Attributes:
      settings: maps each key that the user sets to its value.

    Raises:
      ConfigError: a key does not exist, a value has another type than the default of its key, or
        the key has a replacement in dtrans.

    Source: `Config` of EPL (epl/config.py).

    Example:
      >>> from dtrans.epl import Config
      >>> config = Config({"pipeline.num_stages": 2})
      >>> config["pipeline.num_stages"], config["pipeline.num_micro_batch"]
      (2, 1)
      >>> Config({"pipeline.num_microbatch": 4})
      Traceback (most recent call last):
      ...
      dtrans.errors.ConfigError: EPL's configuration has no key pipeline.num_microbatch; did you
        mean pipeline.num_micro_batch?
    """

    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, value in self.settings.items():
            if key not in DEFAULTS:
                raise ConfigError(
                    f"EPL's configuration has no key {key}; "
                    f"{did_you_mean(key, DEFAULTS, 'its keys are')}"
                )
            default = DEFAULTS[key]
            if type(value) is not type(default) and key != "amp.loss_scale":
                raise ConfigError(
                    f"{key} is {value!r}; expected a value of type {type(default).__name__}"
                )
            if key in ELSEWHERE and value != default:
                raise ConfigError(
                    f"{key} is {value!r}, but dtrans has no such setting: {ELSEWHERE[key]}; leave "
                    "the key out"
                )

    def __getitem__(self, key: str) -> Any:
        """Return the value of a key, or its default; raise KeyError if there is no such key."""
        return {**DEFAULTS, **self.settings}[key]
