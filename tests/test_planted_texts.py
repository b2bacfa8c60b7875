"""Faults that `tests/faults.py` plants can be planted: their texts are there, and so are their
tests."""

from __future__ import annotations

import runpy
from typing import Any

import pytest
from paths import ROOT


FAULTS = runpy.run_path(str(ROOT / "tests" / "faults.py"))["FAULTS"]


@pytest.mark.parametrize(
    "fault", FAULTS, ids=[f"{k}-{fault.name}" for k, fault in enumerate(FAULTS)]
)
def test_a_fault_can_be_planted(fault: Any) -> None:
    text = (ROOT / "dtrans" / fault.file).read_text()
    assert fault.planted(text) != text
    assert all((ROOT / "tests" / name).is_file() for name in fault.tests)
