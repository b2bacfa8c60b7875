"""Cost of a checkpoint that a server writes during its steps (`saving.py`, which prints its figures)."""

from __future__ import annotations

import pytest
import saving


@pytest.mark.parametrize("parameters", [10_000, 25_000_000])
def test_stall(parameters: int) -> None:
    assert saving.launch(str(parameters)) == 0


@pytest.mark.parametrize("rows", [10_000, 100_000, 1_000_000])
def test_rows(rows: int) -> None:
    assert saving.launch("rows", str(rows)) == 0
