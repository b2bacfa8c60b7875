"""Time of `plan.verify()` for a transformer with 40,000 and with 400,000 parameters.

The model is a scan over 8 blocks, with Adam. The times do not include tracing and planning. On two
cores, a verification should take at most 5 s and 20 s.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import pytest
from models import programs, training, transformer_model

import dtrans


SERVERS: dict[str, Any] = {"pservers": "127.0.0.1:6174,127.0.0.1:6175", "trainers": 2}
WIDTHS = {40_000: 20, 400_000: 64}
STRATEGIES: dict[str, Callable[..., Any]] = {
    "nccl2": lambda *of: dtrans.nccl2(*of, trainers=2),
    "stage 1": lambda *of: dtrans.sharding(*of, degree=2, stage=1),
    "stage 3": lambda *of: dtrans.sharding(*of, degree=2, stage=3),
    "pserver": lambda *of: dtrans.pserver(*of, **SERVERS),
    "async": lambda *of: dtrans.pserver(*of, mode=dtrans.Async(), **SERVERS),
    "GEO": lambda *of: dtrans.pserver(*of, mode=dtrans.Geo(), **SERVERS),
    "pipeline": lambda *of: dtrans.pipeline(*of, num_stages=2, num_micro_batch=2),
}


@functools.cache
def traced(parameters: int) -> tuple[dtrans.Program, dtrans.Program]:
    """Return the programs of a model with about this number of parameters."""
    model = transformer_model(32, WIDTHS[parameters], 8, heads=4, length=8, rows=4, scanned=True)
    return programs(*training(model))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("parameters", WIDTHS)
def test_verify(benchmark: Any, parameters: int, strategy: str) -> None:
    main, startup = traced(parameters)
    plan = STRATEGIES[strategy](main, startup)
    held = sum(main.inputs[n].size for n in main.args[0].names)
    assert 0.9 < held / parameters < 1.1
    report = benchmark.pedantic(plan.verify, rounds=1)
    assert report, str(report)
    jax.clear_caches()
