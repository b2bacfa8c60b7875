"""The command line: the options that it passes on, its output, and its exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

import dtrans


def test_version(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--version") == 0
    assert capsys.readouterr().out == f"dtrans {dtrans.__version__}\n"


def test_as_a_module() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "dtrans.cli", "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
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
    assert sorted(line.split("]")[0] for line in lines) == [
        "[pserver 0",
        "[trainer 0",
        "[trainer 1",
    ]
    assert [json.loads(line.split("] ", 1)[1]) for line in lines] == [arguments] * 3


def test_launch_in_nccl2_mode(
    command: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os; print(os.environ['DTRANS_CURRENT_ENDPOINT'], "
        "os.environ['DTRANS_TRAINER_ENDPOINTS'])"
    )
    assert command("launch", "--mode", "nccl2", "--trainers", "2", str(script)) == 0
    lines = dict(line.split("] ", 1) for line in capsys.readouterr().out.splitlines())
    own, every = zip(*(lines[f"[trainer {k}"].split(" ") for k in range(2)), strict=True)
    assert set(every) == {",".join(own)}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["--mode", "nccl"],
            "mode must be 'pserver', or 'nccl2' (also for sharding and pipelines), it is 'nccl'",
        ),
        (
            ["--mode", "nccl2", "--pservers", "1"],
            "pservers=1: mode='nccl2' has no parameter servers; leave pservers out",
        ),
        (
            ["--ray-address", "auto"],
            "--ray-address needs --on ray; add --on ray, or remove --ray-address",
        ),
        (
            ["--on", "ray", "--trainers-on", "NEAR"],
            "trainers_on must be 'PACK' or 'SPREAD', it is 'NEAR'",
        ),
    ],
)
def test_launch_errors(
    command: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
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
    assert lines[0].startswith(
        "dtrans: pserver 0 failed with exit code 5, and the other roles were ended"
    )
    assert "Traceback" not in "".join(lines)


def test_launch_deadline(command: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import threading; threading.Event().wait()")
    assert command("launch", "--time-limit", "0.5", str(script)) == 1
    message = (
        "dtrans: the job ran longer than its deadline of 0.5 s; the launcher stopped pserver 0, "
        "trainer 0"
    )
    assert capsys.readouterr().err.splitlines()[1:] == [message]


def plain(text: str) -> str:
    """Return a text without colours, boxes and line breaks."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", " ", text).split())


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["launch", "nothing.py"], "the file nothing.py does not exist"),
        (["launch"], "Missing argument 'SCRIPT'"),
        (["launch", "--trainers", "0", "x.py"], "Invalid value for '--trainers'"),
        (["launch", "--bogus", "x.py"], "No such option: --bogus"),
        (["example", "digits", "--pservers", "no"], "Invalid value for '--pservers'"),
        (["example", "digits", "--stages", "2"], "No such option: --stages"),
        (["example", "digts"], "No such command 'digts'"),
        (["nothing"], "No such command 'nothing'"),
    ],
)
def test_usage_errors(
    command: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert command(*arguments) == 2
    assert message in plain(capsys.readouterr().err)


# -- example ---------------------------------------------------------------------------------------


def test_examples_of_a_checkout_are_listed_and_their_options(
    command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("example") == 0
    out = plain(capsys.readouterr().out)
    assert "Usage: dtrans example " in out
    assert all(
        f" {name} " in out for name in ("digits", "characters", "word2vec", "ctr", "flax_cnn")
    )
    assert command("example", "digits", "--help") == 0
    out = plain(capsys.readouterr().out)
    assert "Usage: dtrans example digits [OPTIONS]" in out and "--optimizer" in out


def test_an_installed_package_says_where_the_examples_are(
    command: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(dtrans, "__file__", str(tmp_path / "dtrans" / "__init__.py"))
    (tmp_path / "examples").mkdir()  # the folder of another project
    (tmp_path / "examples" / "__main__.py").touch()
    assert command("example", "digits") == 1
    assert capsys.readouterr().err == (
        "dtrans: the folder examples/ does not exist, because the installed package has no "
        "examples; "
        "run `python -m dtrans example` in a checkout of dtrans's repository\n"
    )


def test_python_m_dtrans_is_the_command() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "dtrans", "launch", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.returncode == 0, found.stderr
    # that is what a role may wait
    assert "--time-limit" in found.stdout and "--deadline" not in found.stdout


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
        assert (
            "dtrans keygen needs one argument: --token, or a folder for the keys"
            in capsys.readouterr().err
        )


# -- roles -----------------------------------------------------------------------------------------


def test_roles_of_counts(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        command("roles", "--trainers", "2", "--pservers", "2", "train.py", "--trainers", "9") == 0
    )
    shown = capsys.readouterr().out
    assert (
        shown
        == f"{dtrans.role_table('pserver', 2, 2, ['python', 'train.py', '--trainers', '9'])}\n"
    )
    assert command("roles", "--mode", "nccl2", "--json", "-m", "train") == 0
    assert json.loads(capsys.readouterr().out)["roles"][0]["argv"] == ["python", "-m", "train"]


def test_roles_of_a_plan(
    command: Any,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "plan_of_roles.py").write_text(
        "import jax.numpy as jnp, optax, dtrans\n"
        "tx, x = optax.sgd(0.5), jnp.ones((4, 2))\n"
        "step = dtrans.make_train_step(lambda params, x: jnp.mean((x @ params) ** 2), tx)\n"
        "init = lambda: (p := jnp.ones(2), tx.init(p))\n"
        "plan = lambda: dtrans.nccl2(dtrans.trace(step, *init(), x), dtrans.trace(init), "
        "trainers=2)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert command("roles", "--plan", "plan_of_roles:plan", "--json", "train.py") == 0
    found = json.loads(capsys.readouterr().out)
    assert [(r["name"], r["memory"]) for r in found["roles"]] == [
        ("trainer 0", 8),
        ("trainer 1", 8),
    ]
    assert command("roles", "--plan", "plan_of_roles:plan", "--trainers", "2") == 1
    assert "--trainers cannot be combined with --plan" in capsys.readouterr().err
