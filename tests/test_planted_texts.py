"""Faults of `tests/faults.py` and of random steps can be planted: their texts are there."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from typing import Any

from paths import ROOT


FAULTS = runpy.run_path(str(ROOT / "tests" / "faults.py"))["FAULTS"]
RANDOM_STEPS = ROOT / "tests" / "verification" / "test_random_steps.py"


def obstacles(fault: Any) -> Iterator[str]:
    """Yield the reasons why a fault cannot be planted or noticed."""
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


def planted_in_random_steps() -> dict[str, tuple[str, str, str, str]]:
    """Return the table of `test_random_steps.py`, without the import of its strategies."""
    for statement in ast.parse(RANDOM_STEPS.read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "PLANTED":
            return ast.literal_eval(statement.value)
    raise AssertionError("no table PLANTED")


def test_faults_of_random_steps_can_be_planted() -> None:
    for fault, (_, file, old, new) in planted_in_random_steps().items():
        assert (ROOT / "dtrans" / file).read_text().count(old) == 1 and old != new, fault
