"""The documentation is true: examples in docstrings run, and so does the code of README and of the
pages."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import importlib
import inspect
import os
import pydoc
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from paths import ROOT
from ray_cluster import RayCluster

import dtrans
import examples
import tools


PACKAGES = (dtrans, examples, tools)


def names_of(package) -> list[str]:
    """Return the modules of a package. Files are listed, since imports would slow collecting."""
    root = Path(package.__file__).parent
    files = [path.relative_to(root.parent).with_suffix("") for path in sorted(root.rglob("*.py"))]
    names = [".".join(file.parts).removesuffix(".__init__") for file in files]
    return [name for name in names if "__main__" not in name]


MODULES = [name for package in PACKAGES for name in names_of(package)]
FOLDERS = sorted({".".join(name.split(".")[:2]) for name in MODULES})
README = ROOT / "README.md"
PUBLIC = [n for n in dir(dtrans) if not n.startswith("_") and callable(getattr(dtrans, n))]


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstring_examples_run(folder):
    faults = []
    for name in (n for n in MODULES if n == folder or n.startswith(f"{folder}.")):
        module = importlib.import_module(name)
        if doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE).failed:
            faults.append(name)
    assert not faults


def test_public_names_are_documented():
    assert not [n for n in PUBLIC if len(getattr(dtrans, n).__doc__ or "") <= 40]


@pytest.mark.parametrize(
    "name", ["trace", "pserver", "make_train_step", "value_and_grad", "slice_variable", "Program"]
)
def test_main_entry_points_have_an_example(name):
    assert ">>>" in getattr(dtrans, name).__doc__


def sources() -> list[Path]:
    """Return the source files of the package, of the examples and of the tools."""
    return [file for package in PACKAGES for file in Path(package.__file__).parent.rglob("*.py")]


def names_in_texts() -> list[tuple[str, str]]:
    """Return pairs: a file, and a name of the package that a docstring, a comment or a page of this
    file contains."""
    files = [README, ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *sources()]
    named = re.compile(r"`(dtrans\.[\w.]+)")
    return sorted(
        {(str(f.relative_to(ROOT)), n) for f in files for n in named.findall(f.read_text())}
    )


def is_at_home(name: str) -> bool:
    """Return True if a name exists in the module that defines it, and not only in a module that
    imports it."""
    found = pydoc.locate(name.rstrip("."))
    home = name.rpartition(".")[0]
    module = pydoc.locate(home)
    is_file = home in MODULES and not hasattr(module, "__path__")
    if found is None or not is_file or not hasattr(found, "__module__"):
        return found is not None
    return found.__module__ == home or not found.__module__.startswith("dtrans.")


def test_names_in_texts_are_there():
    there = {name: is_at_home(name) for name in {name for _, name in names_in_texts()}}
    assert not [(where, name) for where, name in names_in_texts() if not there[name]]


TEXTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "benchmarks").glob("*.md"),
    *sources(),
]
# Prefixes of paths in other projects, which docstrings cite.
ELSEWHERE = (
    "paddle/",
    "python/paddle/",
    "transpiler/",
    "meta_optimizers/",
    "passes/",
    "alpa/",
    "epl/",
    "torch/",
)


def test_paths_in_texts_lead_to_files():
    """A path in a text must exist in the project's root, in the package, or in the folder of the
    text."""
    missing = []
    for file in TEXTS:
        paths = re.findall(
            r"(?<![\w/.-])((?:[\w.-]+/)+[\w-]+\.(?:py|md|ipynb|svg|yml))\b", file.read_text()
        )
        for path in {p for p in paths if not p.startswith(ELSEWHERE)}:
            if not any((folder / path).exists() for folder in (ROOT, ROOT / "dtrans", file.parent)):
                missing.append(f"{file.relative_to(ROOT)}: {path}")
    assert not missing


# Names of Paddle and EPL that the package also uses for its own objects.
OTHER_PROJECTS = re.compile(r"epl\.\w+|DistributeTranspiler\._\w+")


def members_of_the_package() -> dict[str, set[str]]:
    """Return the names of the members of each class and each module, by the last name of the class
    or module."""
    found: dict[str, set[str]] = {}
    for name in MODULES:
        module = importlib.import_module(name)
        found.setdefault(name.rpartition(".")[2], set()).update(dir(module))
        # `inspect.getsource` would parse the file again for each class
        text = Path(module.__file__).read_text()
        lines = text.splitlines()
        for node in ast.parse(text).body if name.startswith("dtrans") else ():
            if isinstance(node, ast.ClassDef):
                kind = vars(module)[node.name]
                source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                attributes = re.findall(r"\bself\.(\w+)", source)
                names = {*dir(kind), *getattr(kind, "__annotations__", ()), *attributes}
                found.setdefault(node.name, set()).update(names)
    return found


def test_members_in_texts_are_there():
    """Check `Class.member` and `module.Class` of this package, but no names of other projects."""
    members = members_of_the_package()
    missing = []
    for file in TEXTS:
        for owner, member in set(re.findall(r"`(\w+)\.(\w+)", file.read_text())):
            name = f"{owner}.{member}"
            is_checked = owner[0].isupper() or member[0].isupper()
            if not is_checked or OTHER_PROJECTS.fullmatch(name):
                continue
            if owner in members and member not in members[owner]:
                missing.append(f"{file.relative_to(ROOT)}: {name}")
    assert not missing


def blocks_of(page: Path) -> list[tuple[str, str]]:
    """Return the blocks of code on a page, as pairs (language, code)."""
    return re.findall(r"```(python|sh)\n(.*?)```", page.read_text(), re.S)


def saved(blocks: Iterable[tuple[str, str]], folder: Path) -> None:
    """Write each block whose first line is the name of a file to this file."""
    for _, code in blocks:
        if name := re.match(r"# (\w+\.py)\n", code):
            (folder / name[1]).write_text(code)


def run(folder: Path, *command: str, **variables: str) -> str:
    """Return the output of a command in a new process, without variables of dtrans, JAX and XLA."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("DTRANS_", "JAX_", "XLA_"))}
    path = os.pathsep.join([os.path.dirname(sys.executable), env["PATH"]])
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(README.parent), "PATH": path, **variables}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_readme_runs_as_pasted_in_order(tmp_path):
    """Run all blocks of the README in one process. Only the first block creates devices."""
    blocks = blocks_of(README)
    saved(blocks, tmp_path)
    out = run(
        tmp_path,
        sys.executable,
        "-c",
        "\n".join(code for language, code in blocks if language == "python"),
    )
    printed = [line.split() for line in out.splitlines()]
    shown = re.search(r"\n    sharding plan of step.*?\n    \.\.\.\n", README.read_text(), re.S)[0]
    for line in shown.strip().splitlines()[:-1]:
        assert line.split() in printed
    for kind in ("sharding", "nccl2", "pipeline", "pserver"):
        assert f"{kind} plan of step" in out


def test_processes_run_as_pasted_in_order(tmp_path):
    """Run the scripts of two pages by the commands of these pages.

    Later scripts read files of earlier ones.
    """
    docs = README.parent / "docs"
    blocks = [b for page in ("processes.md", "checkpoints.md") for b in blocks_of(docs / page)]
    saved([*blocks_of(README), *blocks], tmp_path)
    said = [run(tmp_path, "bash", "-ec", code) for language, code in blocks if language == "sh"]
    assert len(said) == 3
    losses = [re.findall(r"loss (\S+)", text) for text in said]
    assert len(losses[0]) == 2 and len(losses[1]) == 1 and len(losses[2]) == 2
    assert losses[0][0] == losses[0][1] == losses[1][0], (
        "both trainers, and both modes, have the same loss"
    )
    assert losses[2][0] == losses[2][1] and said[2].startswith("200 101 loss")


def test_the_script_for_paddles_users_trains_as_on_one_device(tmp_path):
    """Two trainers with different rows have the loss of one device with all rows."""
    blocks = blocks_of(README.parent / "docs" / "paddle.md")
    saved(blocks, tmp_path)
    (command,) = [code for language, code in blocks if language == "sh"]
    losses = re.findall(r"loss (\S+)", run(tmp_path, "bash", "-ec", command))
    assert len(losses) == 2
    w, b = np.array(jax.random.normal(jax.random.key(0), (2, 1)), float), np.zeros(1)
    velocity = [np.zeros((2, 1)), np.zeros(1)]
    generators = [np.random.RandomState(trainer) for trainer in range(2)]
    for _ in range(100):
        rows = np.concatenate([rng.rand(32, 2).astype("float32") for rng in generators])
        error = rows @ w + b - (rows @ np.array([[2.0], [-1.0]]) + 0.5)
        loss = np.mean(error**2)
        gradients = [2 * rows.T @ error / len(rows), 2 * np.mean(error, axis=0)]
        velocity = [0.9 * v + g for v, g in zip(velocity, gradients, strict=True)]
        w, b = w - 0.1 * velocity[0], b - 0.1 * velocity[1]
    assert np.mean([float(x) for x in losses]) == pytest.approx(loss, rel=1e-3)


ALONE = """
from model import key, init, step, x, y
params, opt_state = init(key)
for _ in range(100):
    params, opt_state, loss = step(params, opt_state, x, y)
print(f"loss {loss:.6f}")
"""


# On a busy machine, the workers of Ray Train need more than a minute to start, which is Ray's
# default limit.
RAY = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "200",
}


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """Start one Ray cluster for all scripts.

    A cluster for each script would start too slowly beside other tests.
    """
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    with RayCluster(nodes=1, cpus=4) as cluster:
        yield cluster.address


@pytest.fixture(scope="module")
def loss_of_one_device(tmp_path_factory: pytest.TempPathFactory) -> float:
    folder = tmp_path_factory.mktemp("alone")
    saved(blocks_of(README), folder)
    (found,) = re.findall(r"loss (\S+)", run(folder, sys.executable, "-c", ALONE))
    return float(found)


@pytest.mark.soak
@pytest.mark.parametrize("script", ["on_ray.py", "in_ray_train.py"])
def test_scripts_about_ray_run_as_pasted(script, ray_address, loss_of_one_device, tmp_path):
    saved([*blocks_of(README), *blocks_of(README.parent / "docs" / "ray.md")], tmp_path)
    said = run(tmp_path, sys.executable, script, RAY_ADDRESS=ray_address, **RAY)
    losses = re.findall(r"loss (\S+)", said)
    assert losses and all(float(x) == pytest.approx(loss_of_one_device, abs=2e-6) for x in losses)


def test_readme_opens_with_what_it_is_and_the_two_commands():
    """The first paragraph describes the package, and the commands come before all other code."""
    text = README.read_text()
    assert text.startswith("# dtrans\n\ndtrans takes a JAX training step")
    lines = text.splitlines()
    commands = [i for i, line in enumerate(lines) if line.startswith("    make ")]
    assert [lines[i].split("#")[0].strip() for i in commands] == ["make demo", "make test"]
    assert commands[-1] < 12 < text[: text.index("```")].count("\n")


LINKED = [*sorted(README.parent.glob("*.md")), *sorted(README.parent.glob("[bd]*/*.md"))]


def test_links_between_pages_lead_somewhere():
    faults = []
    for page in LINKED:
        for target, anchor in re.findall(r"\]\((?!http)([^)#]*)(#[^)]*)?\)", page.read_text()):
            other = (page.parent / target).resolve() if target else page
            if not other.exists():
                faults.append(f"{page.name}: {target}")
            elif anchor:
                titles = re.findall(r"^#+ (.*)$", other.read_text(), re.M)
                anchors = [re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles]
                if anchor[1:] not in anchors:
                    faults.append(f"{page.name}: {target}{anchor}, of {anchors}")
    assert not faults


def test_nobody_is_told_to_install_another_project():
    """The package index has another project named `dtrans`."""
    import tomllib

    project = tomllib.loads((README.parent / "pyproject.toml").read_text())["project"]
    assert project["name"] == "dtrans-jax"
    extras = project["optional-dependencies"]
    assert not [d for of in extras.values() for d in of if re.match(r"dtrans\b(?!-jax)", d)]
    pages = [
        *README.parent.glob("*.md"),
        *README.parent.glob("docs/*.md"),
        *README.parent.glob("notebooks/*.ipynb"),
    ]
    for file in [*pages, *sources()]:
        text = file.read_text()
        assert not re.search(r"pip install ['\"]?dtrans(?!-jax)", text) and not re.search(
            r"\bdtrans\[", text
        ), file
        for extra in re.findall(r"dtrans-jax\[(\w+)\]", text):
            assert extra in extras, (file, extra)


def test_the_page_for_paddles_users_has_every_option_and_every_method():
    from dtrans.paddle.config import DEFAULTS, EXTENSIONS

    text = (README.parent / "docs" / "paddle.md").read_text()
    methods = [
        n for n in vars(dtrans.DistributeTranspiler) if not n.startswith("_") and n != "plan"
    ]
    assert not [n for n in (*DEFAULTS, *EXTENSIONS, *methods) if f"`{n}" not in text]


# Rows of pages. Later pages of a row continue the code of the first page, in the same process.
CHAPTERS = [
    ["pipeline.md", "pipeline_schedules.md", "pipeline_stages.md", "pipeline_results.md"],
    ["compression.md"],
    ["early_answers.md"],
    ["epl.md"],
    ["mesh.md"],
    ["mesh_trainers.md"],
    ["speeds.md"],
    [
        "tables.md",
        "tables_placement.md",
        "tables_filters.md",
        "tables_modes.md",
        "tables_service.md",
    ],
]


@pytest.mark.parametrize("pages", CHAPTERS, ids=lambda pages: pages[0])
def test_code_of_pages_runs_and_prints_what_the_pages_say(pages, tmp_path):
    """A block of text after a block of code shows the output of this code."""
    blocks = []
    for page in pages:
        text = (README.parent / "docs" / page).read_text()
        found = re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", text, re.S)
        assert found, page
        blocks += found
    end_of_block = "-- end of block --"
    pasted = "\n".join(f"{code}\nprint({end_of_block!r})" for code, _ in blocks)
    printed = run(tmp_path, sys.executable, "-c", pasted).split(f"{end_of_block}\n")
    assert printed == [*(output for _, output in blocks), ""]


def test_pages_say_how_many_steps_the_table_has() -> None:
    rows = re.findall(r"^\| \w+ \|", (ROOT / "docs/steps.md").read_text(), re.M)
    count = len(rows) - len(["column", "alone", "exchanged", "servers", "pipeline", "step"])
    for page in ("README.md", "docs/README.md", "docs/steps.md"):
        assert re.search(rf"\b{count}\s+steps\b", (ROOT / page).read_text()), page


def test_the_loop_between_steps_runs_in_an_empty_folder(tmp_path):
    """The code continues the README's first job, and uses its names."""
    text = (README.parent / "docs" / "between_steps.md").read_text()
    loop = re.search(r"\n\n((?:    .*\n)+)", text)[1]
    first = [code for _, code in blocks_of(README) if "dtrans.nccl2" not in code]
    given = """
loader = [(x, y)] * 2
test_x, test_y = x, y
accuracy = lambda params, x, y: jnp.mean(x @ params["w1"])
"""
    pasted = "\n".join([*first, given, textwrap.dedent(loop)])
    saved(blocks_of(README), tmp_path)
    assert "102 steps" in run(tmp_path, sys.executable, "-c", pasted)
    assert sorted(file.name for file in (tmp_path / "runs").iterdir()) == ["events", "loss.csv"]


def test_tables_of_schedules_are_computed(monkeypatch):
    """The page has what its script makes; what takes long to make is written by the script
    alone."""
    monkeypatch.syspath_prepend(str(README.parent / "benchmarks"))
    for name in ("pipeline", "halves", "models"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    made = importlib.import_module("pipeline")
    docs = README.parent / "docs"
    text = (docs / "pipeline_schedules.md").read_text()
    assert f"<!-- schedules -->\n\n{made.schedules_of()}\n\n<!-- /schedules -->" in text
    assert (
        made.written(text, {"schedules": "anything"})
        != text
        == made.written(text, {"schedules": made.schedules_of()})
    )
    memory = re.search(r"<!-- memory -->\n\n(.*?)\n\n<!-- /memory -->", text, re.S)[1].splitlines()
    assert [line.split(" | ")[0].strip("| ") for line in memory[2:]] == [
        *made.SCHEDULES,
        made.RECOMPUTED,
    ]


def test_the_chart_has_every_task_and_is_small():
    from dtrans.pipeline_parallel.schedule import schedule

    drawn = (README.parent / "docs" / "pipeline.svg").read_text()
    assert len(drawn) < 200_000
    shown = re.findall(r'id="play(\d)-([FBW])(\d+)-stage(\d+)"', drawn)
    names = (
        "PreferForward",
        "PreferBackward",
        "PreferBackwardOptimizer",
        "Interleaved",
        "ZeroBubble",
    )
    for i, name in enumerate(names):
        tasks = {
            (t.kind, str(t.micro), str(t.stage))
            for order in schedule(name, 4, 8).orders
            for t in order
        }
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
    "communication": "sparse_as_dense max_splits num_communicators fp16 fp16_scale "
    "clip_after_allreduce "
    "gradients_reduce_method",
    "io": "slicing unbalanced_io_slicing drop_last_files",
}


def test_the_page_for_epls_users_has_every_option_and_every_call():
    from dtrans.pipeline_parallel.device_layout import LAYOUTS
    from dtrans.step.collect import KEYS

    text = (README.parent / "docs" / "epl.md").read_text()
    keys = [f"{category}.{key}" for category, of in EPL_OPTIONS.items() for key in of.split()]
    assert sorted(dtrans.epl.config.DEFAULTS) == sorted(keys)
    calls = [
        "init",
        "Config",
        "replicate",
        "split",
        "set_default_strategy",
        "add_to_collection",
        "get_collection",
    ]
    calls += ["get_all_collections", "GraphKeys", "Cluster", "Graph", "Env"]
    assert not [k for k in keys if f"`{k}`" not in text]
    assert not [n for n in calls if f"`epl.{n}" not in text]
    assert not [n for n in (*KEYS, *LAYOUTS) if n not in text]


def test_pages_on_pipelines_name_every_option():
    pages = [*CHAPTERS[0], "epl.md"]
    text = "".join((README.parent / "docs" / page).read_text() for page in pages)
    options = [
        p.name
        for p in inspect.signature(dtrans.pipeline).parameters.values()
        if p.kind is p.KEYWORD_ONLY
    ]
    options += [
        f.name for record in (dtrans.Stages, dtrans.StageMemory) for f in dataclasses.fields(record)
    ]
    assert not [n for n in options if not re.search(rf"`{n}\b|\b{n}=", text)]
