"""Benchmarks: the smoke test contains each benchmark, and `make bench` prints the ratios last."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from paths import ROOT


BENCHMARKS = ROOT / "benchmarks"
SAMPLE = """
import pytest

WINDOWS = 7

@pytest.mark.parametrize("other", ["a", "b"])
@pytest.mark.parametrize("rows", [1, 10, 100])
def test_sample(benchmark, ratio, rows, other):
    calls = []
    run = lambda: ratio(f"{rows} / {other}", lambda: calls.append(1), lambda: None, pairs=5)
    benchmark.pedantic(run, rounds=1)
    print(f"{rows} {other}: {len(calls)} calls, {WINDOWS} windows")
"""


def run(folder: Path, *options: str) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(folder)]
    # pytest-benchmark disables benchmarks if it finds these variables of an xdist worker
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    made = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    assert made.returncode == 0, made.stdout + made.stderr
    return made.stdout


def test_the_smoke_test_has_every_benchmark() -> None:
    found = set(
        re.findall(r"::(test_\w+)", run(BENCHMARKS, "--collect-only", "-q", "--benchmark-disable"))
    )
    functions = (
        n for path in BENCHMARKS.glob("test_*.py") for n in ast.parse(path.read_text()).body
    )
    assert found == {
        n.name for n in functions if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")
    }


def test_a_smoke_test_is_one_round_of_the_smallest_size(tmp_path: Path) -> None:
    shutil.copy(BENCHMARKS / "conftest.py", tmp_path)
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    said = run(tmp_path, "-s", "--benchmark-disable")
    assert re.findall(r"\d+ [ab]: .*", said) == [f"1 {other}: 2 calls, 1 windows" for other in "ab"]
    assert "ratios" not in said


def test_ratios_are_listed_last(tmp_path: Path) -> None:
    shutil.copy(BENCHMARKS / "conftest.py", tmp_path)
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    said = run(tmp_path, "-s", "--benchmark-disable", "--benchmark-enable", "--benchmark-only")
    assert len(re.findall("6 calls, 7 windows", said)) == 6
    table, ratios = said.index("Legend:"), said.index("ratios: median over pairs")
    assert table < ratios
    assert [line.split()[:3] for line in said[ratios:].splitlines()[1:7]] == [
        [rows, "/", other] for rows in ("1", "10", "100") for other in "ab"
    ]
    assert re.fullmatch(r"=+ 6 passed in .*", said[ratios:].splitlines()[7])
