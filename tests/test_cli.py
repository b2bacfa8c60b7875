"""The command line: what it passes on, what it prints, and how it ends."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

import dtrans
from dtrans import cli


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `dtrans ARGUMENTS` in this process and returns the exit code."""

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["dtrans", *arguments])
        # roles find the package from anywhere, installed or not
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        with pytest.raises(SystemExit) as e:
            cli.main()
        code = e.value.code
        return 0 if code is None else int(code)

    return run


def test_version(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--version") == 0
    assert capsys.readouterr().out == f"dtrans {dtrans.__version__}\n"


def test_as_a_module() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "dtrans.cli", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout == f"dtrans {dtrans.__version__}\n"


# -- launch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["--trainers", "9", "-x", "--help", "a b"],
        ["first", "--", "-m", "--version"],
        ["--", "x", "--"],
        ["-", "", "*", "--a=b"],
    ],
)
def test_arguments_verbatim(
    command: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import json, sys; print(json.dumps(sys.argv[1:]))")
    assert command("launch", "--trainers", "2", "--pservers", "1", str(script), *arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.split("]")[0] for line in lines) == ["[pserver 0", "[trainer 0", "[trainer 1"]
    assert [json.loads(line.split("] ", 1)[1]) for line in lines] == [arguments] * 3


def test_launch_in_nccl2_mode(command: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os; print(os.environ['DTRANS_CURRENT_ENDPOINT'], os.environ['DTRANS_TRAINER_ENDPOINTS'])")
    assert command("launch", "--mode", "nccl2", "--trainers", "2", str(script)) == 0
    lines = dict(line.split("] ", 1) for line in capsys.readouterr().out.splitlines())
    own, every = zip(*(lines[f"[trainer {k}"].split(" ") for k in range(2)), strict=True)
    assert set(every) == {",".join(own)}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--mode", "nccl"], "mode must be 'pserver', or 'nccl2' (also for sharding and pipelines), it is 'nccl'"),
        (["--mode", "nccl2", "--pservers", "1"], "there are no pservers in mode='nccl2', pservers=1"),
        (["--ray-address", "auto"], "--ray-address is an option of --on ray; say so, or leave it out"),
        (["--on", "ray", "--trainers-on", "NEAR"], "trainers_on must be 'PACK' or 'SPREAD', it is 'NEAR'"),
    ],
)
def test_launch_errors(command: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert command("launch", *arguments, "-m", "json.tool") == 1
    assert capsys.readouterr().err == f"dtrans: {message}\n"


def test_launch_module(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("launch", "-m", "json.tool", "--help") == 0
    assert "[trainer 0] usage:" in capsys.readouterr().out


def test_failed_role(command: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nif os.environ['DTRANS_ROLE'] == 'pserver': sys.exit(5)")
    assert command("launch", str(script)) == 5
    first, *lines = capsys.readouterr().err.splitlines()
    assert first.startswith("[launcher] this job answers: dtrans status 127.0.0.1:")
    assert lines[0].startswith("dtrans: pserver 0 failed with exit code 5, and the other roles were ended")
    assert "Traceback" not in "".join(lines)


def test_launch_deadline(command: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import threading; threading.Event().wait()")
    assert command("launch", "--time-limit", "0.5", str(script)) == 1
    message = "dtrans: the launcher waited 0.5 s for the job: pserver 0, trainer 0 had not ended, and was stopped"
    assert capsys.readouterr().err.splitlines()[1:] == [message]


def plain(text: str) -> str:
    """Without colours, boxes and line breaks."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", " ", text).split())


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["launch", "nothing.py"], "there is no script nothing.py"),
        (["launch"], "Missing argument 'SCRIPT'"),
        (["launch", "--trainers", "0", "x.py"], "Invalid value for '--trainers'"),
        (["launch", "--bogus", "x.py"], "No such option: --bogus"),
        (["train", "--pservers", "no"], "Invalid value for '--pservers'"),
        (["nothing"], "No such command 'nothing'"),
    ],
)
def test_usage_errors(command: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert command(*arguments) == 2
    assert message in plain(capsys.readouterr().err)


# -- train -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--engine", "cloud"], "there is no engine 'cloud'; it is one of processes, mesh"),
        (["--mode", "nccl"], "there is no mode 'nccl'; it is one of pserver, nccl2, sharding"),
        (["--mode", "nccl2", "--pservers", "2"], "there are no pservers in nccl2 mode; leave out --pservers 2"),
        (["--mode", "sharding", "--pservers", "2"], "there are no pservers in sharding mode; leave out --pservers 2"),
        (["--mode", "nccl2", "--sharding-stage", "2"], "--sharding-stage is of sharding mode; with --mode nccl2 leave"),
        (["--optimizer", "adm"], "there is no optimizer 'adm'; did you mean adam?"),
        (
            ["--batch-size", "63"],
            "a batch of 63 images cannot be divided among 2 trainers: give --batch-size a multiple",
        ),
        (["--batch-size", "2000"], "--batch-size must be 1 to 1437, the number of training images"),
        (["--min-block-size", "100"], "min_block_size must be 8192 or more, it is 100"),
        (["--plot", "/nowhere/at-all.png"], "there is no directory /nowhere"),
        (["--plot", "loss.xyz"], "the plot cannot be written to loss.xyz: its name must end in one of"),
    ],
)
def test_train_errors(command: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert command("train", *arguments) == 1
    out, err = capsys.readouterr()
    assert err.startswith("dtrans: ") and message in err and "Traceback" not in err
    assert out == ""


@pytest.mark.parametrize("module, arguments", [("sklearn", []), ("matplotlib", ["--plot", "loss.png"])])
def test_missing_extra(
    command: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, module: str, arguments: list[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == module else found(name, *a))
    assert command("train", *arguments) == 1
    assert "pip install 'dtrans-jax[examples]'" in capsys.readouterr().err


def difference_in(out: str) -> float:
    (found,) = re.findall(r"max relative difference (\S+)", out)
    return float(found)


def test_train_on_mesh(command: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "loss.png"
    code = command("train", "--engine", "mesh", "--epochs", "1", "--optimizer", "adam", "--plot", str(plot))
    out = capsys.readouterr().out
    assert code == 1  # one epoch is not enough, and it says so
    assert "the test accuracy is below 0.95" in out
    # there is no terminal, so progress is in plain lines
    assert out.count("training: step ") == 10 and "training: step 22 of 22, epoch 1/1 loss " in out
    assert "params/hidden/w.block1 │ 32:64 │ 65,536" in out
    assert "on every server: opt_state/0/count" in out
    assert difference_in(out) < 1e-5
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_train_on_mesh_in_nccl2_mode(command: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "loss.png"
    code = command("train", "--mode", "nccl2", "--engine", "mesh", "--epochs=1", "--plot", str(plot))
    out = capsys.readouterr().out
    assert code == 1
    assert "bucket/0" in out and "endpoint" not in out and "pservers" not in out
    assert difference_in(out) < 1e-5
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_train_on_mesh_in_sharding_mode(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("train", "--mode", "sharding", "--engine", "mesh", "--epochs=1", "--optimizer=adam") == 1
    out = capsys.readouterr().out
    assert "2 ranks of sharding" in out and "exact: mean over 64 rows" in out
    assert "each rank holds 77,864 bytes of params, 155,732 bytes of opt_state" in out
    assert difference_in(out) < 1e-5


def test_train_without_a_check(
    command: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is trained on one device, and nothing is compared."""
    from dtrans.examples import train

    monkeypatch.delattr(train, "single_device")
    plot = tmp_path / "loss.png"
    assert command("train", "--engine=mesh", "--epochs=1", "--batch-size=256", "--no-check", "--plot", str(plot)) == 0
    out = capsys.readouterr().out
    assert re.search(r"test accuracy 0\.\d{4} on 360 images$", out, re.M) and "single" not in out
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_train_defaults_on_mesh(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("train", "--engine", "mesh") == 0
    assert difference_in(capsys.readouterr().out) < 1e-5


@pytest.mark.slow
def test_train_as_processes(command: Any, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "loss.svg"
    assert command("train", "--engine", "processes", "--epochs", "8", "--plot", str(plot)) == 0
    out = capfd.readouterr().out
    assert "2 trainers, 2 pservers" in out
    assert out.count("params/hidden/w.block") == 2
    assert difference_in(out) < 1e-5
    assert "<svg" in plot.read_text()


@pytest.mark.soak
def test_train_as_processes_in_nccl2_mode(command: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert command("train", "--mode", "nccl2", "--engine", "processes", "--epochs", "8", "--optimizer", "adam") == 0
    out = capfd.readouterr().out
    assert "bucket/0" in out
    assert difference_in(out) < 1e-5


@pytest.mark.soak
@pytest.mark.parametrize("stage", ["2", "3"])
def test_train_as_processes_in_sharding_mode(command: Any, capfd: pytest.CaptureFixture[str], stage: str) -> None:
    assert command("train", "--mode", "sharding", "--sharding-stage", stage, "--epochs", "8") == 0
    out = capfd.readouterr().out
    assert "training: step 176 of 176, epoch 8/8 loss " in out
    assert difference_in(out) < 1e-5


@pytest.mark.soak
@pytest.mark.slow
def test_train_as_processes_in_double_precision() -> None:
    """More servers than there are blocks for, and float64."""
    arguments = ["--trainers=3", "--pservers=7", "--batch-size=96", "--epochs=1", "--optimizer=adamw"]
    found = subprocess.run(
        [sys.executable, "-m", "dtrans.cli", "train", *arguments],
        cwd=ROOT,
        env={**os.environ, "JAX_ENABLE_X64": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert found.returncode == 1, found.stderr  # one epoch is not enough
    assert "(float64, bound 1e-10)" in found.stdout
    assert difference_in(found.stdout) < 1e-10


# -- train --mode pipeline -------------------------------------------------------------------------

TINY = ("--mode", "pipeline", "--steps", "3", "--batch-size", "8", "--micro-batches", "4")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of two small layers, and little to validate it on."""
    from dtrans.examples import characters

    for name, value in {"LAYERS": 2, "WIDTH": 16, "HEADS": 2, "LENGTH": 16, "HELD_OUT": 2000}.items():
        monkeypatch.setattr(characters, name, value)


def cells(out: str, row: str) -> list[str]:
    """What a row of a table has, after its first column."""
    lines = ([cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines())
    (found,) = (rest for first, *rest in lines if first == row)
    return found


@pytest.mark.soak
def test_train_in_stages(command: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny: None) -> None:
    plot = tmp_path / "gantt.png"
    assert command("train", *TINY, "--plot", str(plot)) == 1  # three steps are not enough
    out = capsys.readouterr().out
    assert "2 stages on 2 devices;" in out and "schedule PreferBackward: 4 micro-batches, bubble 1/5" in out
    # at the width of a test's terminal the first may be in two lines
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
    # the same work, of which each device does a part
    assert all(98 <= sum(map(int, x.split())) <= 102 for x in cells(out, "work by device, %"))
    assert "on the same 3 global batches" in out and difference_in(out) < 1e-5
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.soak
def test_plot_of_what_was_planned_and_what_ran(
    command: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny: None
) -> None:
    """Both panels have every task, with the name of the schedule, replicas and chunks."""
    plot = tmp_path / "gantt.svg"
    arguments = ("--schedule", "interleaved", "--replicas", "2", "--micro-batches", "2", "--plot", str(plot))
    assert command("train", *TINY, *arguments) == 1
    out = capsys.readouterr().out
    assert "4 stages on 4 devices, 2 replicas;" in out and difference_in(out) < 1e-5
    drawn = plot.read_text()
    tasks = [f"play{p}-{kind}{m}-stage{k}" for p in range(2) for kind in "FB" for m in range(2) for k in range(4)]
    assert sorted(re.findall(r'id="(play\d-\w+-stage\d)"', drawn)) == sorted(tasks)
    assert "planned: Interleaved" in drawn and "ran: the median of 7 steps" in drawn


@pytest.mark.slow
def test_train_simulated_and_out_of_bounds(
    command: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny: None
) -> None:
    """Three steps are not enough, and numbers that are not those of one device are an error: it says so."""
    from dtrans.examples import pipelined

    monkeypatch.setattr(pipelined, "bound", lambda: 0.0)
    assert command("train", *TINY, "--engine", "simulate", "--schedule", "PreferForward") == 1
    out = capsys.readouterr().out
    assert "2 stages on 1 device;" in out and difference_in(out) < 1e-5
    assert cells(out, "bubble")[1] == "one device"
    assert cells(out, "peak micro-batches by device") == ["4 4", "4 4"]
    assert "nothing was learnt from context yet" in out and "the difference is above the bound" in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--engine", "processes"], "in pipeline mode the engine is mesh or simulate, not 'processes': one process"),
        (["--engine", "cloud"], "in pipeline mode the engine is mesh or simulate, not 'cloud'"),
        (["--batch-size", "20"], "cannot be divided among 8 micro-batches of 1 replicas: give --batch-size a multiple"),
        (["--replicas", "3"], "of 3 replicas: give --batch-size a multiple of 24"),
        (["--engine", "simulate", "--plot", "x.png"], "--engine simulate has one device: use --engine mesh"),
        (["--plot", "/nowhere/at-all.png"], "there is no directory /nowhere"),
        (["--schedule", "PreferNothing"], "schedule must be one of PreferForward"),
        (["--chunks", "2"], "PreferBackward has one model stage on each device, not chunks=2: use Interleaved"),
        (["--schedule", "Interleaved", "--chunks", "1"], "chunks=1"),
    ],
)
def test_train_in_stages_errors(
    command: Any, capsys: pytest.CaptureFixture[str], tiny: None, arguments: list[str], message: str
) -> None:
    assert command("train", "--mode", "pipeline", *arguments) == 1
    out, err = capsys.readouterr()
    assert err.startswith("dtrans: ") and message in err and "Traceback" not in err
    assert out == ""


OF_DIGITS = {"--trainers": 2, "--pservers": 1, "--epochs": 20, "--optimizer": "adam", "--min-block-size": 8192}
OF_SHARDING = {"--sharding-stage": 3}
OF_PIPELINE = {"--stages": 2, "--micro-batches": 8, "--schedule": "ZeroBubble", "--replicas": 1, "--chunks": 2}


@pytest.mark.parametrize("option, value", {**OF_DIGITS, **OF_SHARDING, "--deadline": 60}.items())
def test_options_of_digits_are_refused_in_pipeline_mode(
    command: Any, capsys: pytest.CaptureFixture[str], option: str, value: object
) -> None:
    """Also with the value that is the default."""
    assert command("train", "--mode", "pipeline", f"{option}={value}") == 1
    message = f"dtrans: {option} is an option of pserver, nccl2 and sharding mode; with --mode pipeline leave it out\n"
    assert capsys.readouterr() == ("", message)


@pytest.mark.parametrize("mode", ["pserver", "nccl2"])
@pytest.mark.parametrize("option, value", {**OF_PIPELINE, "--steps": 100}.items())
def test_options_of_pipelines_are_refused_in_other_modes(
    command: Any, capsys: pytest.CaptureFixture[str], mode: str, option: str, value: object
) -> None:
    assert command("train", "--mode", mode, f"{option}={value}") == 1
    message = f"dtrans: {option} is an option of pipeline mode; with --mode {mode} leave it out\n"
    assert capsys.readouterr() == ("", message)


def test_an_unknown_mode_is_named_before_its_options(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("train", "--mode", "pipelines", "--stages", "2") == 1
    assert capsys.readouterr().err == (
        "dtrans: there is no mode 'pipelines'; it is one of pserver, nccl2, sharding, pipeline\n"
    )


def test_help_of_train(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Each option is with the mode that it is for."""
    assert command("train", "--help") == 0
    out = plain(capsys.readouterr().out)
    common, of_digits, of_pipeline = re.split("Of pserver, nccl2 and sharding mode|Of pipeline mode", out)
    listed = lambda part: set(re.findall(r"(?<!\S)--[a-z-]+(?= +(?:--no-check )?<)", part))
    assert listed(common) >= {"--mode", "--engine", "--batch-size", "--seed", "--plot", "--check"}
    assert listed(of_digits) == {*OF_DIGITS, *OF_SHARDING, "--deadline"}
    assert listed(of_pipeline) == {*OF_PIPELINE, "--steps"}


@pytest.mark.soak
def test_train_defaults_in_stages(tmp_path: Path) -> None:
    """In a process of its own, which has no devices but those that the command asks for."""
    plot = tmp_path / "gantt.png"
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    found = subprocess.run(
        [sys.executable, "-m", "dtrans.cli", "train", "--mode", "pipeline", "--plot", str(plot)],
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
    assert float(cells(out, "loss of the last 10, mean")[0]) < 2.6 and float(cells(out, "validation loss")[0]) < 2.6
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_python_m_dtrans_is_the_command() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "dtrans", "launch", "--help"], capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 0, found.stderr
    assert "--time-limit" in found.stdout and "--deadline" not in found.stdout  # that is what a role may wait


# -- simulate --------------------------------------------------------------------------------------


def test_simulate_shows_one_schedule_and_counts_many(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("simulate", "--seed", "16") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("seed 16: ")
    assert shown.endswith("as it must be\n")
    assert command("simulate", "--count", "20") == 0
    assert capsys.readouterr().out.startswith("20 of 20 schedules are as they must be (")


def test_simulate_makes_a_wrong_schedule_small(
    command: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dtrans.protocol.sync_server import SyncServer

    monkeypatch.setattr(SyncServer, "_forget", lambda *a: None)
    monkeypatch.setattr(SyncServer, "look", lambda *a: None)
    assert command("simulate", "--count", "60") == 1
    *_, wrong, last = capsys.readouterr().out.strip().split("\n\n")
    assert "\nwrong\n  " in wrong
    assert re.match(r"\d+ of 60 schedules are as they must be", last)


# -- keygen ----------------------------------------------------------------------------------------


def test_keygen(command: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert command("keygen", "--token") == 0
    assert re.fullmatch("[0-9a-f]{64}\n", capsys.readouterr().out)
    assert command("keygen", str(tmp_path / "keys"), "--trainers", "2") == 0
    made = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(p.name for p in made if p.suffix == ".secret") == [
        "server.secret",
        "status.secret",
        "trainer-0.secret",
        "trainer-1.secret",
    ]
    assert command("keygen", str(tmp_path / "keys"), "--trainers", "3") == 0  # adds one
    assert [Path(line).name for line in capsys.readouterr().out.splitlines()] == [
        "trainer-2.secret",
        "trainer-2.public",
    ]
    for arguments in ([], ["--token", str(tmp_path)]):
        assert command("keygen", *arguments) == 1
        assert "dtrans keygen takes --token, or the folder of the keys" in capsys.readouterr().err


# -- roles -----------------------------------------------------------------------------------------


def test_roles_of_counts(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("roles", "--trainers", "2", "--pservers", "2", "train.py", "--trainers", "9") == 0
    shown = capsys.readouterr().out
    assert shown == f"{dtrans.role_table('pserver', 2, 2, ['python', 'train.py', '--trainers', '9'])}\n"
    assert command("roles", "--mode", "nccl2", "--json", "-m", "train") == 0
    assert json.loads(capsys.readouterr().out)["roles"][0]["argv"] == ["python", "-m", "train"]


def test_roles_of_a_plan(
    command: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plan_of_roles.py").write_text(
        "import jax.numpy as jnp, optax, dtrans\n"
        "tx, x = optax.sgd(0.5), jnp.ones((4, 2))\n"
        "step = dtrans.make_train_step(lambda params, x: jnp.mean((x @ params) ** 2), tx)\n"
        "init = lambda: (p := jnp.ones(2), tx.init(p))\n"
        "plan = lambda: dtrans.nccl2(dtrans.trace(step, *init(), x), dtrans.trace(init), trainers=2)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert command("roles", "--plan", "plan_of_roles:plan", "--json", "train.py") == 0
    found = json.loads(capsys.readouterr().out)
    assert [(r["name"], r["memory"]) for r in found["roles"]] == [("trainer 0", 8), ("trainer 1", 8)]
    assert command("roles", "--plan", "plan_of_roles:plan", "--trainers", "2") == 1
    assert "--trainers does not go with --plan" in capsys.readouterr().err
