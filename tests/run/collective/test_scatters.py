"""Reduce-scatters between CPU processes are correct.

In jaxlib before 0.12, reduce-scatters of Gloo with more than about 10 MB sometimes give wrong
numbers without an error.
"""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
import scatter_trainer as script
from strict_python import STRICT_PYTHON
from trainer_processes import outcome


@pytest.mark.soak
def test_reduce_scatters_of_many_megabytes_are_the_sum_bit_for_bit(tmp_path: Path) -> None:
    found = outcome(
        2,
        tmp_path,
        280,
        [*STRICT_PYTHON, script.__file__, "scatters", str(tmp_path)],
    )
    for of in found:
        assert [int(of[str(side)]) for side in script.SIDES] == [0, 0, 0]
        if jax.__version_info__ < (0, 12):
            assert not of["asked"], "an all-reduce, of which each rank takes its part"


@pytest.mark.soak
def test_sharding_over_processes_is_the_same_from_run_to_run(tmp_path: Path) -> None:
    found = outcome(
        2,
        tmp_path,
        280,
        [*STRICT_PYTHON, script.__file__, "training", str(tmp_path)],
    )
    for of in found:
        for what in ("sharding", "params"):
            assert of[f"{what} 0"].tobytes() == of[f"{what} 1"].tobytes()
            assert of[f"{what} 0"].tobytes() == found[0][f"{what} 0"].tobytes()
        np.testing.assert_allclose(of["sharding 0"], of["nccl2"], rtol=1e-5)
