"""Time of a step with `dtrans.sharding`, compared with `jax.jit` and `NamedSharding`.

The steps run on two and four CPU devices. `sharding.py` defines both, and also measures memory and
traffic.
"""

from __future__ import annotations

import jax
import pytest
from sharding import CASES, STAGES, sides


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("model", CASES)
def test_sharded_step_over_annotated(benchmark, ratio, model, devices, stage):
    if len(jax.devices()) < devices:
        pytest.skip(f"needs {devices} devices")
    ours, annotated, _ = sides(model, devices, stage)
    steps = [lambda side=side: (side.run(), side.state()) for side in (ours, annotated)]
    measure = lambda: ratio(
        f"stage {stage} / annotated, {model}, {devices} devices", *steps, pairs=30
    )
    benchmark.extra_info["ratio"] = benchmark.pedantic(measure, rounds=1)
    benchmark.extra_info["memory"] = ours.peak / annotated.peak
