"""The layers of the package: imports only go down, and each name has one meaning."""

from __future__ import annotations

import ast
import collections
import importlib
import inspect
import re
import subprocess
import sys

import jax
import pytest
from paths import DOCS, ROOT

import dtrans


@pytest.fixture(scope="module")
def architecture():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS))
        patch.delitem(sys.modules, "architecture", raising=False)
        return importlib.import_module("architecture")


def test_every_folder_is_in_a_layer(architecture):
    for module in architecture.modules():
        if module:
            architecture.rank(module)


def test_no_import_goes_up(architecture):
    """Include lazy imports and imports for type checkers.

    The registry of runners is the one exception.
    """
    assert architecture.climbs() == []
    assert "run.runners" in architecture.arrows()["plan"], "the exception is still needed"


def test_the_package_does_without_the_rest_of_the_repository(architecture):
    beside = ("examples", "tools", "tests", "benchmarks")
    imports = re.compile(rf"^\s*(?:from|import) ({'|'.join(beside)})\b", re.M)
    assert not [
        path for path in architecture.modules().values() if imports.search(path.read_text())
    ]


def test_zeromq_is_imported_in_one_package(architecture):
    imports = re.compile(r"^\s*(?:from|import) zmq\b", re.M)
    found = {n for n, path in architecture.modules().items() if imports.search(path.read_text())}
    assert found and all(name.startswith("run.net.") for name in found), found


def test_there_are_no_circles(architecture):
    arrows = {module: set(targets) for module, targets in architecture.arrows().items()}
    arrows["plan"].discard("run.runners")
    state: dict[str, int] = {}

    def visit(module, way):
        assert state.get(module) != 1, f"a circle: {' -> '.join([*way, module])}"
        if module not in state:
            state[module] = 1
            for target in sorted(arrows[module]):
                if target:  # the package's own __init__ is not a part of it
                    visit(target, [*way, module])
            state[module] = 2

    for module in arrows:
        if module:
            visit(module, [])


def test_each_layer_is_there(architecture):
    known = architecture.modules()
    layers = {n for layer in architecture.LAYERS for n in layer}
    rooms = {f"run.{n}" for layer in architecture.RUN_LAYERS for n in layer}
    assert layers | rooms <= set(known)


def test_no_name_of_a_package_hides_a_module(architecture):
    """`dtrans.checkpoint.load` is a function, so there must be no file
    dtrans/checkpoint/load.py."""
    for module, path in architecture.modules().items():
        package = importlib.import_module(f"dtrans.{module}".rstrip("."))
        if path.name == "__init__.py":
            for inner in set(path.parent.glob("*.py")) - {path}:
                found = getattr(package, inner.stem, None)
                assert found is None or inspect.ismodule(found), (
                    f"dtrans.{module}: {inner.stem} is {found!r}"
                )


def test_the_package_shows_its_public_names_alone():
    assert dir(dtrans) == sorted([*dtrans.__all__, "__version__"])
    folders = {name for name in dtrans.__all__ if inspect.ismodule(getattr(dtrans, name))}
    assert folders == {"checkpoint", "epl", "errors", "nn", "optimizers", "paddle", "summary"}
    starred: dict[str, object] = {}
    exec("from dtrans import *", starred)
    assert {*starred} - {"__builtins__"} == {*dtrans.__all__}


def test_public_classes_have_names_of_their_own(architecture):
    where = collections.defaultdict(list)
    for module, path in architecture.modules().items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(module)
    assert {name: modules for name, modules in where.items() if len(modules) > 1} == {}


SAME_PART = {  # name of a file -> content of such a file in each folder that has one
    "all_gather": "the collective, and where sharding writes it",
    "array_fns": "small functions of arrays that equations are written with",
    "cluster": "the job as processes",
    "config": "options as the original has them",
    "job": "the job of a strategy",
    "layout": "where the parts of a value are",
    "mesh": "the job in this process",
    "options": "what may be asked of a strategy",
    "plan": "the plan of a strategy",
    "reduce_scatter": "the collective, and where sharding writes it",
    "rules": "what each primitive does",
    "startup": "programs that run before the first step",
    "state": "what a job hands from step to step",
    "transform": "the transform of a strategy",
    "update": "the update of a strategy",
    "writer": "writes the equations of a layout",
}


# Files that count the operands of a loop themselves. Others use `dtrans.ir.interpret.enter` or
# `dtrans._jax.body_indices`.
OPEN_LOOPS = {
    "batch.scaled": "pairs the bodies of two loops",
}


def test_loops_are_opened_by_the_drivers_of_analyses(architecture):
    opens = re.compile(r"\b(scan_counts|while_counts|scan_with|scan_with_constants)\(")
    found = {m for m, path in architecture.modules().items() if opens.search(path.read_text())}
    others = {m for m in found if m.split(".")[0] not in ("_jax", "ir", "engine")}
    assert others == set(OPEN_LOOPS)


def test_files_of_one_name_are_the_same_part_of_different_strategies(architecture):
    names = collections.Counter(
        p.stem for p in architecture.modules().values() if p.stem != "__init__"
    )
    assert {n for n, count in names.items() if count > 1} <= set(SAME_PART)


def test_the_page_is_what_the_code_says(architecture, tmp_path):
    """`make architecture` writes the page.

    The walks also contain functions of JAX, so the test compares them with the locked version only.
    """
    made = subprocess.run(
        [sys.executable, DOCS / "architecture.py", tmp_path],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "architecture.svg").read_text() == (DOCS / "architecture.svg").read_text()
    page, wanted = (folder.joinpath("architecture.md").read_text() for folder in (tmp_path, DOCS))
    if f"\njax=={jax.__version__} " in ROOT.joinpath("requirements.lock").read_text():
        assert page == wanted
        assert (tmp_path / "walks.svg").read_text() == (DOCS / "walks.svg").read_text()
    assert page.split("- **")[0] == wanted.split("- **")[0]
    passed = [int(count) for count in re.findall(r"(\d+) files pass the value on", page)]
    assert len(passed) == 5 and max(passed) <= 15
