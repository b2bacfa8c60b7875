"""Faults of `tests/faults.py` can be planted: their texts and their tests are there."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from typing import Any

from paths import ROOT


FAULTS = runpy.run_path(str(ROOT / "tests" / "faults.py"))["FAULTS"]


def obstacles(fault: Any) -> Iterator[str]:
    """Yield what keeps a fault from being planted and noticed."""
    count = (ROOT / "dtrans" / fault.file).read_text().count(fault.old)
    if count != 1 or fault.old == fault.new:
        yield f"{fault.file} has {fault.old!r} {count} times"
    for name in fault.tests:
        if not (ROOT / "tests" / name).is_file():
            yield f"no tests/{name}"
    file, _, test = fault.noticed_by.partition("::")
    function = test.partition("[")[0]
    if test and not re.search(
        rf"^def {function}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE
    ):
        yield f"no {function} in tests/{file}"


def test_faults_can_be_planted() -> None:
    assert not [obstacle for fault in FAULTS for obstacle in obstacles(fault)]
