"""Scripts of the examples: the options that they pass on, their output, and their exit codes."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

from examples import character_job, characters, digits_job


@pytest.fixture
def digits(command: Any) -> Any:
    """Run the script `digits` with some arguments, and return the exit code."""
    return functools.partial(command, "example", "digits")


@pytest.fixture
def pipeline(command: Any) -> Any:
    """Run the script `characters` with some arguments, and return the exit code."""
    return functools.partial(command, "example", "characters")


# -- digits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--engine", "cloud"], "there is no engine 'cloud'; it is one of processes, mesh"),
        (["--mode", "nccl"], "there is no mode 'nccl'; it is one of pserver, nccl2, sharding"),
        (
            ["--mode", "nccl2", "--pservers", "2"],
            "there are no pservers in nccl2 mode; leave out --pservers 2",
        ),
        (
            ["--mode", "sharding", "--pservers", "2"],
            "there are no pservers in sharding mode; leave out --pservers 2",
        ),
        (
            ["--mode", "nccl2", "--sharding-stage", "2"],
            "--sharding-stage needs --mode sharding, and --mode is nccl2; leave",
        ),
        (["--optimizer", "adm"], "there is no optimizer 'adm'; did you mean adam?"),
        (
            ["--batch-size", "63"],
            "a batch of 63 images cannot be divided among 2 trainers; pass a multiple of "
            "--trainers",
        ),
        (
            ["--batch-size", "2000"],
            "--batch-size is 2000; expected 1 to 1437, the number of training images",
        ),
        (["--min-block-size", "100"], "min_block_size must be 8192 or more, it is 100"),
        (["--plot", "/nowhere/at-all.png"], "the folder /nowhere does not exist"),
        (
            ["--plot", "loss.xyz"],
            "the plot cannot be written to loss.xyz: its name must end in one of",
        ),
    ],
)
def test_errors(
    digits: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert digits(*arguments) == 1
    out, err = capsys.readouterr()
    assert err.startswith("dtrans: ") and message in err and "Traceback" not in err
    assert out == ""


@pytest.mark.parametrize(
    "module, arguments", [("sklearn", []), ("matplotlib", ["--plot", "loss.png"])]
)
def test_missing_extra(
    digits: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    arguments: list[str],
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == module else found(name, *a)
    )
    assert digits(*arguments) == 1
    assert "pip install 'dtrans-jax[examples]'" in capsys.readouterr().err


def difference_in(out: str) -> float:
    (found,) = re.findall(r"max relative difference (\S+)", out)
    return float(found)


def test_on_mesh(digits: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "loss.png"
    code = digits("--engine", "mesh", "--epochs", "1", "--optimizer", "adam", "--plot", str(plot))
    out = capsys.readouterr().out
    assert code == 1  # one epoch is too short, and the script says so
    assert "the test accuracy is below 0.95" in out
    # without a terminal, progress is printed as plain lines
    assert out.count("training: step ") == 10 and "training: step 22 of 22, epoch 1/1 loss " in out
    assert "params/hidden/w.block1 │ 32:64 │ 65,536" in out
    assert "on every server: opt_state/0/count" in out
    assert difference_in(out) < 1e-5
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_on_mesh_in_nccl2_mode(
    digits: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plot = tmp_path / "loss.png"
    code = digits("--mode", "nccl2", "--engine", "mesh", "--epochs=1", "--plot", str(plot))
    out = capsys.readouterr().out
    assert code == 1
    assert "bucket/0" in out and "endpoint" not in out and "pservers" not in out
    assert difference_in(out) < 1e-5
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_on_mesh_in_sharding_mode(digits: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert digits("--mode", "sharding", "--engine", "mesh", "--epochs=1", "--optimizer=adam") == 1
    out = capsys.readouterr().out
    assert "2 ranks of sharding" in out and "exact: mean over 64 rows" in out
    assert "each rank holds 77,864 bytes of params, 155,732 bytes of opt_state" in out
    assert difference_in(out) < 1e-5


def test_without_a_check(
    digits: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The script does not train on one device, so it compares nothing."""
    monkeypatch.delattr(digits_job, "single_device")
    plot = tmp_path / "loss.png"
    assert (
        digits("--engine=mesh", "--epochs=1", "--batch-size=256", "--no-check", "--plot", str(plot))
        == 0
    )
    out = capsys.readouterr().out
    assert re.search(r"test accuracy 0\.\d{4} on 360 images$", out, re.M) and "single" not in out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_defaults_on_mesh(digits: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert digits("--engine", "mesh") == 0
    assert difference_in(capsys.readouterr().out) < 1e-5


def test_as_processes(digits: Any, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "loss.svg"
    assert digits("--engine", "processes", "--epochs", "8", "--plot", str(plot)) == 0
    out = capfd.readouterr().out
    assert "2 trainers, 2 pservers" in out
    assert out.count("params/hidden/w.block") == 2
    assert difference_in(out) < 1e-5
    assert "<svg" in plot.read_text()


@pytest.mark.soak
def test_as_processes_in_nccl2_mode(digits: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        digits("--mode", "nccl2", "--engine", "processes", "--epochs", "8", "--optimizer", "adam")
        == 0
    )
    out = capfd.readouterr().out
    assert "bucket/0" in out
    assert difference_in(out) < 1e-5


@pytest.mark.soak
@pytest.mark.parametrize("stage", ["2", "3"])
def test_as_processes_in_sharding_mode(
    digits: Any, capfd: pytest.CaptureFixture[str], stage: str
) -> None:
    assert digits("--mode", "sharding", "--sharding-stage", stage, "--epochs", "8") == 0
    out = capfd.readouterr().out
    assert "training: step 176 of 176, epoch 8/8 loss " in out
    assert difference_in(out) < 1e-5


@pytest.mark.soak
def test_as_processes_in_double_precision() -> None:
    """Use more servers than blocks, and float64."""
    arguments = [
        "--trainers=3",
        "--pservers=7",
        "--batch-size=96",
        "--epochs=1",
        "--optimizer=adamw",
    ]
    found = subprocess.run(
        [sys.executable, "-m", "dtrans", "example", "digits", *arguments],
        cwd=ROOT,
        env={**os.environ, "JAX_ENABLE_X64": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert found.returncode == 1, found.stderr  # one epoch is too short
    assert "(float64, bound 1e-10)" in found.stdout
    assert difference_in(found.stdout) < 1e-10


# -- characters ------------------------------------------------------------------------------------

TINY = ("--steps", "3", "--batch-size", "8", "--micro-batches", "4")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a model of two small layers, and few rows for validation."""
    for name, value in {
        "LAYERS": 2,
        "WIDTH": 16,
        "HEADS": 2,
        "LENGTH": 16,
        "VALIDATION": 2000,
    }.items():
        monkeypatch.setattr(characters, name, value)


def cells(out: str, row: str) -> list[str]:
    """Return the columns of a table's row without the first column."""
    lines = ([cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines())
    (found,) = (rest for first, *rest in lines if first == row)
    return found


@pytest.mark.soak
def test_in_stages(
    pipeline: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny: None
) -> None:
    plot = tmp_path / "gantt.png"
    assert pipeline(*TINY, "--plot", str(plot)) == 1  # three steps are too few
    out = capsys.readouterr().out
    assert (
        "2 stages on 2 devices;" in out
        and "schedule PreferBackward: 4 micro-batches, bubble 1/5" in out
    )
    # the terminal of a test is narrow, so the first cell may have two lines
    first, last = (cells(out, str(k))[0] for k in range(2))
    assert first.startswith("10: blocks/0, embedding,") and last == "10: blocks/1, norm"
    pipeline, alone = cells(out, "loss of the first step")
    assert pipeline == alone and 4 < float(alone) < 5
    assert float(cells(out, "loss of the last 1, mean")[0]) < float(alone)
    assert len({*cells(out, "validation loss")}) == 1
    assert all(int(x.replace(",", "")) > 0 for x in cells(out, "characters per second"))
    assert cells(out, "peak micro-batches by device") == ["2 1", "2 1"]
    assert cells(out, "bubble of equal stages") == ["20.0%", ""]
    planned, measured = (float(x.rstrip("%")) for x in cells(out, "bubble"))
    assert 10 < planned < 50 and 0 < measured < 100
    # the same work, divided among the devices
    assert all(98 <= sum(map(int, x.split())) <= 102 for x in cells(out, "work by device, %"))
    assert "on the same 3 global batches" in out and difference_in(out) < 1e-5
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.soak
def test_plot_of_what_was_planned_and_what_ran(
    pipeline: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny: None
) -> None:
    """Both panels contain every task, and name the schedule, the replicas and the chunks."""
    plot = tmp_path / "gantt.svg"
    arguments = (
        "--schedule",
        "interleaved",
        "--replicas",
        "2",
        "--micro-batches",
        "2",
        "--plot",
        str(plot),
    )
    assert pipeline(*TINY, *arguments) == 1
    out = capsys.readouterr().out
    assert "4 stages on 4 devices, 2 replicas;" in out and difference_in(out) < 1e-5
    drawn = plot.read_text()
    tasks = [
        f"play{p}-{kind}{m}-stage{k}"
        for p in range(2)
        for kind in "FB"
        for m in range(2)
        for k in range(4)
    ]
    assert sorted(re.findall(r'id="(play\d-\w+-stage\d)"', drawn)) == sorted(tasks)
    assert "planned: Interleaved" in drawn and "measured: the median of 7 steps" in drawn


def test_simulated_and_out_of_bounds(
    pipeline: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny: None
) -> None:
    """Three steps are too few. A difference from one device is an error, and the output says so."""
    monkeypatch.setattr(character_job, "bound", lambda: 0.0)
    assert pipeline(*TINY, "--engine", "simulate", "--schedule", "PreferForward") == 1
    out = capsys.readouterr().out
    assert "2 stages on 1 device;" in out and difference_in(out) < 1e-5
    assert cells(out, "bubble")[1] == "one device"
    assert cells(out, "peak micro-batches by device") == ["4 4", "4 4"]
    assert (
        "nothing was learnt from context yet" in out and "the difference is above the bound" in out
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["--engine", "processes"],
            "--engine is 'processes'; expected mesh or simulate, which run all",
        ),
        (["--engine", "cloud"], "--engine is 'cloud'; expected mesh or simulate"),
        (
            ["--batch-size", "20"],
            "cannot be divided among 8 micro-batches of 1 replicas; pass a multiple of 8",
        ),
        (["--replicas", "3"], "of 3 replicas; pass a multiple of 24 as --batch-size"),
        (
            ["--engine", "simulate", "--plot", "x.png"],
            "--engine simulate has only one device; use --engine mesh",
        ),
        (["--plot", "/nowhere/at-all.png"], "the folder /nowhere does not exist"),
        (["--schedule", "PreferNothing"], "expected one of PreferForward"),
        (
            ["--chunks", "2"],
            "chunks is 2, but PreferBackward has one model stage on each device; use Interleaved",
        ),
        (["--schedule", "Interleaved", "--chunks", "1"], "chunks is 1"),
    ],
)
def test_in_stages_errors(
    pipeline: Any,
    capsys: pytest.CaptureFixture[str],
    tiny: None,
    arguments: list[str],
    message: str,
) -> None:
    assert pipeline(*arguments) == 1
    out, err = capsys.readouterr()
    assert err.startswith("dtrans: ") and message in err and "Traceback" not in err
    assert out == ""


@pytest.mark.soak
def test_defaults_in_stages(tmp_path: Path) -> None:
    """Run in a new process, which has only the devices that the command requests."""
    plot = tmp_path / "gantt.png"
    environment = {
        k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    }
    found = subprocess.run(
        [sys.executable, "-m", "dtrans", "example", "characters", "--plot", str(plot)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert found.returncode == 0, found.stderr
    out = found.stdout
    assert "2 stages on 2 devices;" in out and difference_in(out) < 1e-5
    assert float(cells(out, "loss of the first step")[0]) > 4.5
    assert (
        float(cells(out, "loss of the last 10, mean")[0]) < 2.6
        and float(cells(out, "validation loss")[0]) < 2.6
    )
    assert plot.read_bytes().startswith(b"\x89PNG")
