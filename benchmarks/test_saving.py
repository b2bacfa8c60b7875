"""Cost of a checkpoint that a server writes while training continues: runs `saving.py`."""

from __future__ import annotations

import pytest
import saving


@pytest.mark.parametrize("parameters", [10_000, 25_000_000])
def test_stall(benchmark, parameters: int) -> None:
    assert benchmark.pedantic(lambda: saving.launch(str(parameters)), rounds=1) == 0


@pytest.mark.parametrize("rows", [10_000, 100_000, 1_000_000])
def test_rows(benchmark, rows: int) -> None:
    assert benchmark.pedantic(lambda: saving.launch("rows", str(rows)), rounds=1) == 0
