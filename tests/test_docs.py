"""What the documentation shows is what happens: docstring examples run, and so does the README's code."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
import io
import pkgutil
import re
import sys
from pathlib import Path

import pytest
from pipeline_models import compiled_quickly

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
    (staged,) = (code for code in others if "dtrans.pipeline(" in code)
    with contextlib.redirect_stdout(out), compiled_quickly():
        exec(compile(staged, "README.md", "exec"), names)
    assert names["params"]["w1"].shape == (784, 256)
    assert sorted(n for s in names["plan"].stages for n in s.params) == [
        f"params/{n}" for n in ("b1", "b2", "w1", "w2")
    ]


def test_readme_opens_with_the_two_commands():
    head = README.read_text().splitlines()[:6]
    assert [line.split("#")[0].strip() for line in head if line.startswith("    make")] == ["make demo", "make test"]


def test_the_page_for_paddles_users_has_every_option_and_every_method():
    from dtrans.config import BEYOND, DEFAULTS

    text = (README.parent / "docs" / "paddle.md").read_text()
    methods = [n for n in vars(dtrans.DistributeTranspiler) if not n.startswith("_") and n != "plan"]
    assert not [n for n in (*DEFAULTS, *BEYOND, *methods) if f"`{n}" not in text]


PAGES = ["pipeline.md", "epl.md"]


@pytest.mark.parametrize("page", PAGES)
def test_code_of_a_page_runs_and_prints_what_the_page_says(page):
    """One block after the other; what is printed is in the block of text behind it."""
    text = (README.parent / "docs" / page).read_text()
    names: dict = {}
    blocks = re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", text, re.S)
    assert blocks
    for code, said in blocks:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), compiled_quickly():
            exec(compile(code, page, "exec"), names)
        assert out.getvalue() == said


def test_tables_of_schedules_are_computed(monkeypatch):
    """The page has what its script makes; what takes long to make is written by the script alone."""
    monkeypatch.syspath_prepend(str(README.parent / "benchmarks"))
    for name in ("pipeline", "halves", "models"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    made = importlib.import_module("pipeline")
    docs = README.parent / "docs"
    text = (docs / "pipeline.md").read_text()
    assert f"<!-- schedules -->\n\n{made.schedules_of()}\n\n<!-- /schedules -->" in text
    assert (
        made.written(text, {"schedules": "anything"}) != text == made.written(text, {"schedules": made.schedules_of()})
    )
    memory = re.search(r"<!-- memory -->\n\n(.*?)\n\n<!-- /memory -->", text, re.S)[1].splitlines()
    assert [line.split(" | ")[0].strip("| ") for line in memory[2:]] == [*made.SCHEDULES, made.RECOMPUTED]


def test_the_chart_has_every_task_and_is_small():
    from dtrans.schedules import schedule

    drawn = (README.parent / "docs" / "pipeline.svg").read_text()
    assert len(drawn) < 200_000
    shown = re.findall(r'id="play(\d)-([FBW])(\d+)-stage(\d+)"', drawn)
    names = ("PreferForward", "PreferBackward", "PreferBackwardOptimizer", "Interleaved", "ZeroBubble")
    for i, name in enumerate(names):
        tasks = {(t.kind, str(t.micro), str(t.stage)) for order in schedule(name, 4, 8).orders for t in order}
        assert {found[1:] for found in shown if found[0] == str(i)} == tasks


EPL_OPTIONS = {
    "auto": "auto_parallel",
    "pipeline": "num_stages num_micro_batch strategy",
    "gradient_checkpoint": "type end_taskgraph check_gradients",
    "zero": "level",
    "offload": "level",
    "amp": "level debug_log loss_scale",
    "optimizer": "num_apply_group",
    "cluster": "device_place_prefer_intra_node run_visible_devices colocate_split_and_replicate",
    "communication": "sparse_as_dense max_splits num_communicators fp16 fp16_scale clip_after_allreduce "
    "gradients_reduce_method",
    "io": "slicing unbalanced_io_slicing drop_last_files",
}


def test_the_page_for_epls_users_has_every_option_and_every_call():
    from dtrans.collect import KEYS
    from dtrans.virtual import LAYOUTS

    text = (README.parent / "docs" / "epl.md").read_text()
    keys = [f"`{category}.{key}`" for category, of in EPL_OPTIONS.items() for key in of.split()]
    calls = ["init", "Config", "replicate", "split", "set_default_strategy", "add_to_collection", "get_collection"]
    calls += ["get_all_collections", "GraphKeys", "Cluster", "Graph", "Env"]
    assert not [k for k in keys if k not in text]
    assert not [n for n in calls if f"`epl.{n}" not in text]
    assert not [n for n in (*KEYS, *LAYOUTS) if n not in text]


def test_pages_on_pipelines_name_every_option():
    text = "".join((README.parent / "docs" / page).read_text() for page in PAGES)
    options = [p.name for p in inspect.signature(dtrans.pipeline).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert not [n for n in options if not re.search(rf"`{n}\b|\b{n}=", text)]
