"""What the documentation shows is what happens: docstring examples run, and so does the README's code."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import pkgutil
import re
from pathlib import Path

import pytest

import dtrans


MODULES = ["dtrans", *(m.name for m in pkgutil.walk_packages(dtrans.__path__, "dtrans.") if "__main__" not in m.name)]
README = Path(__file__).parent.parent / "README.md"
PUBLIC = [n for n in dir(dtrans) if not n.startswith("_") and callable(getattr(dtrans, n))]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name):
    assert len(getattr(dtrans, name).__doc__ or "") > 40


@pytest.mark.parametrize("name", ["trace", "pserver", "make_train_step", "value_and_grad", "slice_variable", "Program"])
def test_main_entry_points_have_an_example(name):
    assert ">>>" in getattr(dtrans, name).__doc__


def test_readme_code_runs_and_prints_what_it_says():
    text = README.read_text()
    planning, running, *others = re.findall(r"```python\n(.*?)```", text, re.S)
    names: dict = {}
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(planning, "README.md", "exec"), names)
    shown = re.search(r"\n    pserver plan of step.*?\n    \.\.\.\n", text, re.S)[0]
    printed = [line.split() for line in out.getvalue().splitlines()]
    for line in shown.strip().splitlines()[:-1]:
        assert line.split() in printed
    exec(compile(running, "README.md", "exec"), names)
    assert names["loss"].shape == () and set(names["params"]) == {"w1", "b1", "w2", "b2"}
    (sharded,) = (code for code in others if "dtrans.sharding(" in code)
    exec(compile(sharded, "README.md", "exec"), names)
    assert names["params"]["w1"].shape == (784, 256) and names["plan"].memory()["params"] < 4 * 784 * 256


def test_readme_opens_with_the_two_commands():
    head = README.read_text().splitlines()[:6]
    assert [line.split("#")[0].strip() for line in head if line.startswith("    make")] == ["make demo", "make test"]


def test_the_page_for_paddles_users_has_every_option_and_every_method():
    from dtrans.config import BEYOND, DEFAULTS

    text = (README.parent / "docs" / "paddle.md").read_text()
    methods = [n for n in vars(dtrans.DistributeTranspiler) if not n.startswith("_") and n != "plan"]
    assert not [n for n in (*DEFAULTS, *BEYOND, *methods) if f"`{n}" not in text]
