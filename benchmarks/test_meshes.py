"""Time of a step on a mesh of four devices, compared with `jax.jit` and `NamedSharding`.

`meshes.py` defines both steps, and also measures meshes of eight devices.
"""

from __future__ import annotations

import jax
import pytest
from meshes import CASES, annotated, compared_bytes, ours


@pytest.mark.parametrize("mesh", CASES)
def test_step_on_a_mesh_over_annotated(benchmark, ratio, mesh):
    if len(jax.devices()) < 4:
        pytest.skip("needs 4 devices")
    case = CASES[mesh].with_data(CASES[mesh].axes["data"] // 2)
    mine, theirs = ours(case), annotated(case)
    compared_bytes(mine, theirs)
    steps = [lambda side=side: (side.run(), side.state()) for side in (mine, theirs)]
    measure = lambda: ratio(f"{mesh} / annotated", *steps, pairs=30)
    benchmark.extra_info["ratio"] = benchmark.pedantic(measure, rounds=1)
