"""The command `dtrans check module:function`: its arguments, its output and its exit codes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dtrans import cli


MODULE = """
import jax, jax.numpy as jnp, optax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P
import dtrans

mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
args = (jnp.ones(2), jnp.ones((8, 2)))
tx = optax.sgd(0.1)
loss = lambda w, x: jnp.mean((x @ w) ** 2)


def step(w, x):
    return w - 0.1 * jax.grad(loss)(w, x)


def by_hand(reduce):
    rank_step = lambda w, x: w - 0.1 * reduce(jax.grad(loss)(w, x), "data")
    specs = dict(in_specs=(P(), P("data")), out_specs=P())
    return jax.shard_map(rank_step, mesh=mesh, check_vma=False, **specs)


def right():
    return by_hand(jax.lax.pmean), step, args


def wrong():
    return by_hand(jax.lax.psum), step, args


def raising():
    return dtrans.verify(*wrong()[:2], *args)


def sharded():
    return jax.jit(step), step, args


def unevaluated():
    host = lambda w, x: jax.pure_callback(lambda w: w, jax.ShapeDtypeStruct(w.shape, w.dtype), w)
    on_ranks = lambda w, x: (by_hand(jax.lax.pmean)(w, x), host(w, x))
    return on_ranks, lambda w, x: (step(w, x), host(w, x)), args


def plan():
    init = lambda: (jnp.ones(2), tx.init(jnp.ones(2)))
    main = dtrans.trace(dtrans.make_train_step(loss, tx), *init(), jnp.ones((12, 2)))
    return dtrans.nccl2(main, dtrans.trace(init), trainers=3)


def broken():
    return args[7]


number = 3
"""


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run `dtrans check ARGUMENTS` in a folder with the module, and return the exit code."""
    (tmp_path / "checked_here.py").write_text(MODULE)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "checked_inside.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("checked_here", "checked_inside"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["dtrans", "check", *arguments])
        with pytest.raises(SystemExit) as e:
            cli.main()
        code = e.value.code
        return 0 if code is None else int(code)

    return run


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("checked_here:right", 0, "lambda: computes the step (1 outputs at 3 points"),
        ("checked_here:plan", 0, "nccl2 plan of step: 3 trainers: computes the step"),
        (
            "checked_here:wrong",
            1,
            "fault: psum over axis 'data' (size 4) at checked_here.py:17 sums, expected",
        ),
        (
            "inner/checked_inside.py:wrong",
            1,
            "w: 2 of 2 entries differ; it changes by the step's change times 4",
        ),
        ("checked_here:raising", 1, "w: 2 of 2 entries differ"),
        ("checked_here:unevaluated", 2, "not followed: pure_callback calls a function of the host"),
    ],
)
def test_reports(
    check: Callable[..., int], capsys: pytest.CaptureFixture[str], name: str, code: int, words: str
) -> None:
    assert check(name) == code
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("checked_here:sharded", "dtrans: step has no shard_map in its jaxpr"),
        (
            "checked_here:number",
            "checked_here:number returns a int; expected a plan, or a tuple (distributed_step, "
            "step",
        ),
        ("checked_here:broken", "IndexError: tuple index out of range"),
        (
            "checked_here:nothing",
            "dtrans check is 'checked_here:nothing'; the module checked_here has no nothing",
        ),
        ("inner/nothing.py:right", "the file inner/nothing.py does not exist in "),
        ("checked_here", "expected module:function, a function in a module"),
    ],
)
def test_refusals(
    check: Callable[..., int], capsys: pytest.CaptureFixture[str], name: str, words: str
) -> None:
    assert check(name) == 2
    assert words in capsys.readouterr().err


def test_json(check: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert check("checked_here:wrong", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["equal"], report["complete"], report["points"]) == (False, True, 1)
    assert report["differences"][0]["output"] == "w" and len(report["faults"]) == 1
