"""EPL's configuration gives the same plan as the options of `dtrans.pipeline`.

Errors name EPL's keys.
"""

from __future__ import annotations

from typing import Any

import flat_options
import jax
import jax.numpy as jnp
import optax
import pytest
from paths import DOCS
from pipeline_models import MODELS

import dtrans
from dtrans.epl import Config
from dtrans.epl.config import DEFAULTS
from dtrans.errors import ConfigError
from dtrans.step import collect


@pytest.fixture(scope="module")
def programs() -> Any:
    return MODELS["transformer"].job(16).traced()


ALWAYS = {"pipeline.num_stages": 2, "pipeline.num_micro_batch": 4}
USUAL = {"num_stages": 2, "num_micro_batch": 4, "max_buckets": 5, "chains": 2}

# keys of EPL, other options, and the equal options of dtrans.pipeline
SAME: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "defaults": ({}, {}, {}),
    "a schedule": ({"pipeline.strategy": "PreferForward"}, {}, {"schedule": "PreferForward"}),
    "checkpoints": (
        {"gradient_checkpoint.type": "auto", "gradient_checkpoint.end_taskgraph": 0},
        {},
        {"gradient_checkpoint": "auto", "last_checkpointed_stage": 0},
    ),
    "zero": ({"zero.level": "V1"}, {"replicas": 2}, {"sharding_stage": 1, "replicas": 2}),
    "offload": ({"offload.level": "v0"}, {}, {"offload": True}),
    "groups": ({"optimizer.num_apply_group": 3}, {}, {"update_groups": 3}),
    "communication": (
        {
            "communication.max_splits": 3,
            "communication.num_communicators": 1,
            "communication.fp16": True,
        },
        {"replicas": 2},
        {"max_buckets": 3, "chains": 1, "compress": "fp16", "compress_scale": 128.0, "replicas": 2},
    ),
    "sums": (
        {"communication.gradients_reduce_method": "sum"},
        {"replicas": 2},
        {"reduce": "sum", "replicas": 2},
    ),
    "a clip is of each micro-batch, as EPL's": (
        {"communication.clip_after_allreduce": False},
        {"clip_local_norm": 1.0},
        {"clip_local_norm": 1.0, "clip_local_per": "micro_batch"},
    ),
    "a clip of all, by name": (
        {},
        {"clip_local_norm": 1.0, "clip_local_per": "step"},
        {"clip_local_norm": 1.0, "clip_local_per": "step"},
    ),
    "mixed precision": (
        {"amp.level": "O1", "amp.loss_scale": 128},
        {},
        {"precision": dtrans.Precision("fp16", loss_scaling=128)},
    ),
    "a dynamic scale": ({"amp.level": "O1"}, {}, {"precision": "fp16"}),
    "texts in other cases": (
        {
            "pipeline.strategy": "PREFERFORWARD",
            "zero.level": "V0",
            "gradient_checkpoint.type": "Auto",
            "communication.gradients_reduce_method": "SUM",
            "amp.level": "o1",
            "amp.loss_scale": "128",
        },
        {"replicas": 2},
        {
            "schedule": "PreferForward",
            "sharding_stage": 1,
            "gradient_checkpoint": "auto",
            "reduce": "sum",
            "precision": dtrans.Precision("fp16", loss_scaling=128),
            "replicas": 2,
        },
    ),
    "every default by name": ({k: v for k, v in DEFAULTS.items() if k not in ALWAYS}, {}, {}),
    "what holds anyway": (
        {"communication.clip_after_allreduce": True, "auto.auto_parallel": True},
        {},
        {},
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SAME)
def test_a_plan_is_that_of_the_packages_own_options(name: str, programs: Any) -> None:
    keys, options, ours = SAME[name]
    plan = dtrans.epl.pipeline(*programs, ALWAYS | keys, **options)
    want = flat_options.pipeline(*programs, **{"kind": "local"} | USUAL | ours)
    assert plan.options == want.options
    assert str(plan) == str(want)


def test_scopes_say_how_many_stages_there_are() -> None:
    """As in EPL, only models without scopes need a number of stages."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for i, w in enumerate(params):
            with dtrans.replicate(device_count=2, name=f"layer {i}"):
                x = x @ w
        return x.mean()

    tx = optax.sgd(0.1)
    init = lambda key: (p := [jnp.eye(4)] * 3, tx.init(p))
    key, x = jax.random.key(0), jnp.ones((8, 4))
    main = dtrans.trace(dtrans.make_train_step(loss, tx), *init(key), x)
    plan = dtrans.epl.pipeline(main, dtrans.trace(init, key), {"pipeline.num_micro_batch": 2})
    assert (plan.options.num_stages, plan.options.replicas) == (3, 2)


def test_devices_are_taken_as_the_configuration_says(programs: Any) -> None:
    for given in (True, False):
        plan = dtrans.epl.pipeline(
            *programs, ALWAYS | {"cluster.device_place_prefer_intra_node": given}
        )
        assert plan.options.stages.cluster.prefer_intra_node is given
    plan = dtrans.epl.pipeline(*programs, ALWAYS, cluster=dtrans.Cluster("aware_row"))
    assert plan.options.stages.cluster.layout == "aware_row"


@pytest.mark.parametrize(
    "keys, options, says",
    [
        ({"pipeline.num_stages": 0}, {}, "pipeline.num_stages must be a positive number, it is 0"),
        ({"pipeline.num_stages": -1}, {}, "pipeline.num_stages is missing"),
        (
            {"pipeline.num_stages": "2"},
            {},
            "pipeline.num_stages is '2'; expected a value of type int",
        ),
        (
            {"pipeline.num_micro_batch": True},
            {},
            "pipeline.num_micro_batch is True; expected a value of type int",
        ),
        (
            {"pipeline.num_microbatch": 4},
            {},
            "EPL's configuration has no key pipeline.num_microbatch; did you mean pipe",
        ),
        ({"loss_scale": 128}, {}, "EPL's configuration has no key loss_scale; "),
        (
            {"pipeline.strategy": "Prefer"},
            {},
            "pipeline.strategy is 'Prefer'; expected one of PreferForward, ",
        ),
        ({"zero.level": "v2"}, {}, "zero.level must be '', 'v0' or 'v1', it is 'v2'"),
        ({"offload.level": "v1"}, {}, "offload.level must be '' or 'v0', it is 'v1'"),
        ({"amp.level": "O2", "amp.loss_scale": 8}, {}, "amp.level must be '' or 'o1', it is 'o2'"),
        ({"amp.debug_log": True}, {}, "amp.debug_log is True, but .* print"),
        ({"io.slicing": True}, {}, "io.slicing is True, but .* call dtrans.epl.slice_files"),
        (
            {"cluster.run_visible_devices": "0,1"},
            {},
            "cluster.run_visible_devices is '0,1', but .* pass the devices to plan.on_mesh",
        ),
        (
            {"communication.clip_after_allreduce": True},
            {"clip_local_norm": 1.0},
            "communication.clip_after_allreduce is True, but clip_local_norm is 1.0",
        ),
        ({"communication.max_splits": 0}, {}, "communication.max_splits must be"),
        (
            {"communication.gradients_reduce_method": "max"},
            {},
            "communication.gradients_reduce_method must be",
        ),
        (
            {"gradient_checkpoint.type": "collection"},
            {},
            "gradient_checkpoint.type is 'collection', but collection is empty",
        ),
        ({}, {"collection": ("h",)}, r"collection is \('h',\), but gradient_checkpoint.type is ''"),
        (
            {"gradient_checkpoint.type": "collection"},
            {"collection": ("h",)},
            "gradient_checkpoint.type contains 'h'",
        ),
        (
            {},
            {"schedule": "PreferForward"},
            "schedule is an unknown option of EPL's configuration; use pipeline.strategy",
        ),
        (
            {},
            {"replica": 2},
            "replica is an unknown option of EPL's configuration; did you mean replicas",
        ),
    ],
    ids=str,
)
def test_errors_name_epls_keys(keys: Any, options: Any, says: str, programs: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{says}"):
        dtrans.epl.pipeline(*programs, ALWAYS | keys, **options)


def test_every_key_is_on_the_page() -> None:
    page = (DOCS / "epl.md").read_text()
    assert not [key for key in DEFAULTS if f"`{key}`" not in page]


def test_a_configuration_has_epls_defaults() -> None:
    config = Config({"pipeline.num_stages": 3})
    assert config["pipeline.num_stages"] == 3 and config["communication.max_splits"] == 5
    with pytest.raises(KeyError):
        config["pipeline.stages"]


VARIABLES = {
    "EPL_PIPELINE_NUM_STAGES": "2",
    "EPL_PIPELINE_NUM_MICRO_BATCH": "8",
    "EPL_ZERO_LEVEL": "v0",
    "EPL_COMMUNICATION_FP16": "True",
    "EPL_COMMUNICATION_FP16_SCALE": "64",
    "EPL_AMP_LOSS_SCALE": "256",
    "EPLX": "1",
    "EPL_LOG": "1",
}


def test_a_configuration_reads_epls_variables(monkeypatch: Any) -> None:
    """A setting has precedence over its variable, and a variable over its default."""
    for name, text in VARIABLES.items():
        monkeypatch.setenv(name, text)
    assert Config({"pipeline.num_micro_batch": 4}).settings == {
        "pipeline.num_stages": 2,
        "pipeline.num_micro_batch": 4,
        "zero.level": "v0",
        "communication.fp16": True,
        "communication.fp16_scale": 64,
        "amp.loss_scale": 256.0,
    }


@pytest.mark.parametrize(
    "name, text, says",
    [
        ("EPL_PIPELINE_NUM_MICRO_BATCH", "4.0", "is '4.0'; expected a value of type int"),
        ("EPL_COMMUNICATION_FP16", "1", "is '1'; expected 'true' or 'false'"),
        ("EPL_AMP_LOSS_SCALE", "big", "is 'big'; expected 'dynamic', or a number such as 1024"),
        ("EPL_IO_SLICING", "true", "is True, but dtrans has no such setting: call dtrans.epl.sl"),
    ],
)
def test_an_error_names_the_variable(name: str, text: str, says: str, monkeypatch: Any) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=f"^{name} {says}"):
        Config()


def test_an_unknown_variable_is_an_error(monkeypatch: Any) -> None:
    monkeypatch.setenv("EPL_PIPELINE_NUM_MICROBATCH", "4")
    with pytest.raises(ConfigError, match=r"variable EPL_PIPELINE_NUM_MICROBATCH is .* did you me"):
        Config()


def test_a_plan_without_a_configuration_has_that_of_init(programs: Any) -> None:
    dtrans.epl.init(ALWAYS | {"pipeline.strategy": "PreferForward"})
    plan = dtrans.epl.pipeline(*programs)
    assert (plan.schedule.name, plan.options.num_micro_batch) == ("PreferForward", 4)
    assert dtrans.epl.pipeline(*programs, ALWAYS).schedule.name == "PreferBackward"
    dtrans.epl.init()
    with pytest.raises(ConfigError, match=r"^pipeline\.num_stages is missing"):
        dtrans.epl.pipeline(*programs)


def test_names_of_epl_are_those_of_the_package() -> None:
    assert dtrans.epl.replicate is dtrans.replicate and dtrans.epl.split is dtrans.split
    keys = {n: k for n, k in vars(dtrans.epl.GraphKeys).items() if n.endswith("_OBJECTS")}
    assert sorted(keys.values()) == list(collect.KEYS)
    assert all(n == f"{key}_OBJECTS" for n, key in keys.items())


def test_a_job_of_it_trains() -> None:
    of = MODELS["mlp"].job(16)
    plan = dtrans.epl.pipeline(*of.traced(), ALWAYS)
    job = plan.simulate()
    _, loss = job.step(job.init(jax.random.key(0)), *of.batch)[:2]
    _, _, want = of.on_one_device(1)
    assert abs(float(loss) - float(want)) < 1e-5


def test_an_exact_batch_infers_the_reduction(programs: Any) -> None:
    key = "communication.gradients_reduce_method"
    implicit = dtrans.epl.pipeline(*programs, ALWAYS, batch="exact")
    explicit = dtrans.epl.pipeline(*programs, ALWAYS | {key: "mean"}, batch="exact")
    assert str(implicit) == str(explicit)
    assert any(note.startswith("exact: ") for note in implicit.notes)
    with pytest.raises(ConfigError, match=f"{key}='sum' needs batch='micro'"):
        dtrans.epl.pipeline(*programs, ALWAYS | {key: "sum"}, batch="exact")
