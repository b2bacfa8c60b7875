"""EPL's configuration: keys, defaults, and the matching options of `dtrans.pipeline`.

A key is `category.attribute`. The environment variable of the key is `EPL_CATEGORY_ATTRIBUTE`. In
contrast to EPL, unknown keys and variables are errors.

Source: epl/config.py.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from dtrans.checks import did_you_mean, is_number
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
    "io.slicing": _FILES,
    "io.unbalanced_io_slicing": _FILES,
    "io.drop_last_files": _FILES,
}


# Environment variable -> key.
_KEYS = {"EPL_" + key.replace(".", "_").upper(): key for key in DEFAULTS}
_CATEGORIES = tuple(sorted({"EPL_" + key.split(".")[0].upper() + "_" for key in DEFAULTS}))
_SWITCHES = {"true": True, "false": False}


@dataclasses.dataclass(frozen=True)
class Config:
    """EPL's configuration, with checked keys and types.

    A new `Config` also reads EPL's environment variables, such as `EPL_PIPELINE_NUM_STAGES`. If
    `settings` has the key of a variable, the value in `settings` is used. Strings may be in upper
    or lower case.

    Attributes:
      settings: the values of all keys that the user or the environment sets (dict by key).

    Raises:
      ConfigError: a key or variable does not exist. A value has another type than the default of
        its key. Or the key has a replacement in dtrans.

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
        checked = {}
        for key, value in self.settings.items():
            if key not in DEFAULTS:
                raise ConfigError(
                    f"EPL's configuration has no key {key}; "
                    f"{did_you_mean(key, DEFAULTS, 'its keys are')}"
                )
            checked[key] = _checked(key, key, value)
        for name, text in _variables().items():
            key = _KEYS[name]
            if key not in checked:
                checked[key] = _checked(key, name, _parsed(key, name, text))
        object.__setattr__(self, "settings", checked)

    def __getitem__(self, key: str) -> Any:
        """Return the value of a key, or its default; raise KeyError if there is no such key."""
        return {**DEFAULTS, **self.settings}[key]


def _variables() -> dict[str, str]:
    """Return EPL's environment variables that are set, by name.

    Raises:
      ConfigError: a variable begins like EPL's variables, such as `EPL_PIPELINE_`, but is not one.
    """
    found = {n: text for n, text in os.environ.items() if n.startswith(_CATEGORIES)}
    for name in found:
        if name not in _KEYS:
            raise ConfigError(
                f"the environment variable {name} is no key of EPL's configuration; "
                f"{did_you_mean(name, _KEYS, 'the variables are')}"
            )
    return found


def _parsed(key: str, name: str, text: str) -> Any:
    """Convert the text of an environment variable to the type of a key."""
    default = DEFAULTS[key]
    if isinstance(default, bool):
        if text.lower() not in _SWITCHES:
            raise ConfigError(f"{name} is {text!r}; expected 'true' or 'false'")
        return _SWITCHES[text.lower()]
    if not isinstance(default, int):
        return text
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r}; expected a value of type int") from None


def _checked(key: str, name: str, value: Any) -> Any:
    """Return the value of a key after checking its type; a loss scale becomes a float or "dynamic".

    Args:
      key: the key, such as "pipeline.num_stages".
      name: the name for errors: the key, or the environment variable that has the value.
      value: the value.

    Raises:
      ConfigError: the value has a wrong type, or dtrans has no such setting.
    """
    default = DEFAULTS[key]
    if key == "amp.loss_scale":
        return _loss_scale(name, value)
    if type(value) is not type(default):
        raise ConfigError(f"{name} is {value!r}; expected a value of type {type(default).__name__}")
    if key in ELSEWHERE and value != default:
        raise ConfigError(
            f"{name} is {value!r}, but dtrans has no such setting: {ELSEWHERE[key]}; leave it out"
        )
    return value


def _loss_scale(name: str, value: Any) -> Any:
    """Return "dynamic", or the number of a fixed loss scale. EPL also takes a number as text."""
    if isinstance(value, str) and value.lower() == "dynamic":
        return "dynamic"
    if is_number(value):
        return float(value)
    try:
        return float(str(value))
    except ValueError:
        raise ConfigError(
            f"{name} is {value!r}; expected 'dynamic', or a number such as 1024"
        ) from None


# -- the configuration of `init` -------------------------------------------------------------------

_initialized: dict[str, Config] = {}  # the configuration of the last call of `init`


def init(config: Config | Mapping[str, Any] | None = None) -> Config:
    """Set the configuration of later calls of `dtrans.epl.pipeline` without `config`.

    The setting is global to the process, as in EPL.

    Args:
      config: EPL's configuration, or a mapping of its keys to values. None takes the defaults and
        the environment variables.

    Returns:
      The configuration.

    Raises:
      ConfigError: see `Config`.

    Source: `init` of EPL (epl/__init__.py).

    Example:
      >>> import dtrans
      >>> dtrans.epl.init({"pipeline.num_micro_batch": 4})["pipeline.num_micro_batch"]
      4
      >>> dtrans.epl.init()["pipeline.num_micro_batch"]
      1
    """
    _initialized["config"] = config_from(config, default=Config())
    return _initialized["config"]


def config_from(config: Config | Mapping[str, Any] | None, default: Config | None = None) -> Config:
    """Return the configuration that a function uses for its argument `config`.

    Args:
      config: a configuration, a dict with its settings, or None.
      default: the configuration to return for None. If it is None, too, the function returns the
        configuration that was passed to `dtrans.epl.init`, or else EPL's defaults.
    """
    if config is None:
        return default or _initialized.get("config") or Config()
    return config if isinstance(config, Config) else Config(config)
