"""Pipelines as real processes, each with some of the stages: the numbers of one device."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from cluster_trainer import flat
from paths import SUPPORT
from pipeline_models import MODELS
from pipeline_trainer import ROWS, STEPS, noisy, planned_noisy
from trainer_processes import outcome


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options",
    [
        {"model": "transformer", "num_stages": 2, "num_micro_batch": 4, "devices": 1},
        {"model": "mlp", "num_stages": 4, "num_micro_batch": 2, "replicas": 2, "sharding_stage": 1, "devices": 4,
         "min_slice_size": 0, "schedule": "PreferForward"},
    ],
    ids=["a stage each, tied embedding", "two stages each, replicas and slices"],
)  # fmt: skip
@pytest.mark.usefixtures("x64")
def test_two_processes_make_the_numbers_of_one_device(options: dict[str, Any], tmp_path: Path) -> None:
    script = str(SUPPORT / "pipeline_trainer.py")
    found = outcome(2, tmp_path, 200, [sys.executable, script, "main", str(tmp_path), json.dumps(options)])
    clipped = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))
    params, opt_state, loss = MODELS[options["model"]].job(ROWS, clipped).on_one_device(STEPS)
    want = flat(last=(params, opt_state)) | flat(**{f"loss {STEPS - 1}": loss})
    for process in found:
        for n, x in want.items():
            np.testing.assert_allclose(process[n], x, rtol=1e-12, atol=1e-12, err_msg=n)
        said = dict(process["said"])
        assert "stages, which 2 processes do not divide" in said["odd"]
        assert said["rows"].startswith("BatchError: trainers must give parts of one size; of ")
        assert said["rows"].endswith("trainer 0 gives 1, trainer 1 gives 2 rows")
        assert "has 1 rows in each of 2 processes, 2 in all, which " in said["few"]
    # each holds its own part: beside the count of steps, nothing is held by both
    first, second = (set(process["held"]) for process in found)
    assert first & second <= {"opt_state/1/0/count"} and len(first | second) == len(want) - 1


@pytest.mark.usefixtures("x64")
def test_the_batch_is_the_parts_in_the_order_of_processes(tmp_path: Path) -> None:
    """Noise by micro-batch and results by row are those of the global batch; keys and unsplit inputs go as they are."""
    found = outcome(
        2, tmp_path, 200, [sys.executable, str(SUPPORT / "pipeline_trainer.py"), "parts", str(tmp_path), "{}"]
    )
    one = noisy()
    job = planned_noisy(one).simulate()
    state, (x, *others) = job.init(jax.random.key(0)), one.batch
    want = {}
    for i in range(STEPS):
        state, *results = job.step(state, x + i, *others)
        want |= flat(**{f"results {i}": results})
    want |= flat(last=job.params(state), again=job.step(state, *one.batch)[1])
    assert any(len(v.shape) and v.shape[0] == ROWS for v in want.values())
    for k, process in enumerate(found):
        for n, v in want.items():
            np.testing.assert_allclose(process[n], v, rtol=1e-12, atol=1e-12, err_msg=n)
        said = dict(process["said"])["sizes"]
        assert said.startswith("BatchError: trainers must give parts of one size; "), said
        assert f"trainer {1 - k} gives" in said and f"trainer {k} as [{[8, 4][k]}, 4]" in said
