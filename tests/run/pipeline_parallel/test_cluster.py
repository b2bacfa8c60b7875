"""Pipelines as real processes, each with some of the stages: the numbers of one device."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from cluster_trainer import flat
from paths import SUPPORT
from pipeline_models import MODELS
from pipeline_trainer import ROWS, STEPS
from trainer_processes import outcome


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
    found = outcome(2, tmp_path, 200, [sys.executable, script, str(tmp_path), json.dumps(options)])
    clipped = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))
    params, opt_state, loss = MODELS[options["model"]].job(ROWS, clipped).on_one_device(STEPS)
    want = flat(last=(params, opt_state)) | flat(**{f"loss {STEPS - 1}": loss})
    for process in found:
        for n, x in want.items():
            np.testing.assert_allclose(process[n], x, rtol=1e-12, atol=1e-12, err_msg=n)
        assert "stages, which 2 processes do not divide" in dict(process["said"])["odd"]
    # each holds its own part: beside the count of steps, nothing is held by both
    first, second = (set(process["held"]) for process in found)
    assert first & second <= {"opt_state/1/0/count"} and len(first | second) == len(want) - 1
