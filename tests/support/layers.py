"""Layers of tests, and the choice of the tests that run each day.

The layer of a test follows from its code, its fixtures and its helpers:

- `cluster`: it starts another system: Ray, Slurm, an SSH server, network namespaces.
- `process`: it starts processes.
- `job`: it runs a plan, a role or a command, compiles a step, or opens sockets.
- `plan`: it traces a step and plans it.
- `unit`: it does none of these.

Each day, all tests of units and plans run. A part of the other tests runs, too, and changes with
the date. A test with the mark `sampled` runs some of its cases. A test that notices a planted fault
(`tests/faults.py`) runs each day. All remaining tests get the mark `soak`, and run at night. A run
that names files has all tests of these files, whatever the date, but samples their cases. A run
that names a test (`file.py::test`) has all cases of the test.
"""

from __future__ import annotations

import functools
import os
import runpy
import types
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

import pytest


TESTS = str(Path(__file__).parents[1])
OURS = (TESTS, str(Path(__file__).parents[2] / "examples"))  # folders whose functions are read
LAYERS = ("unit", "plan", "job", "process", "cluster")
DAYS = {"unit": 1, "plan": 1, "job": 4, "process": 8, "cluster": 16}  # interval between two runs
SECONDS = {"unit": 0.1, "plan": 0.2, "job": 1, "process": 5, "cluster": 20}  # average of a test

# names that code of a layer reads: modules, functions, methods, and words of commands
NAMES = {
    "plan": "trace make_train_step pserver sharding nccl2 pipeline",
    "job": "on_mesh on_cluster simulate on_ray Executor RoleThreads cli jit pmap shard_map verify "
    "testmod zmq socket threading free_endpoints TrainerJob compiled_once "
    "verdicts simulated",
    "process": "subprocess multiprocessing fork processes launch launch_on_hosts CliRunner",
    "cluster": "RayCluster slurmctld sshd namespaces",
}
LAYER_OF_NAME = {name: LAYERS.index(layer) for layer in NAMES for name in NAMES[layer].split()}

T = TypeVar("T")


# -- layers ----------------------------------------------------------------------------------------


def layer_of(item: pytest.Function) -> str:
    """Return the layer of a test: the highest layer of the test and its fixtures.

    A mark in the code has priority, for functions that are too indirect for this analysis.
    """
    for layer in LAYERS:
        if item.get_closest_marker(layer):
            return layer
    definitions = item._fixtureinfo.name2fixturedefs.values()
    functions = [item.function, *(found[-1].func for found in definitions)]
    layers = [_layer(fn) for fn in functions]
    if callspec := getattr(item, "callspec", None):
        layers += [_layer(value) for value in callspec.params.values()]
    return LAYERS[max(layers)]


def _layer(value: Any) -> int:
    """Return the layer of a function, or of a parameter that is or names a function."""
    if isinstance(value, str):
        return LAYER_OF_NAME.get(value, 0)
    if isinstance(value, functools.partial):
        return _layer(value.func)
    if isinstance(value, tuple | list):
        return max(map(_layer, value), default=0)
    return max(map(_function_layer, _functions(value)), default=0)


@functools.cache
def _function_layer(function: types.FunctionType) -> int:
    """Return the layer of a function and of the test functions and classes that it reads."""
    layer, todo, known = 0, [function], {function}
    while todo:
        own, found = _reads(todo.pop())
        layer = max(layer, own)
        todo += found - known
        known |= found
    return layer


@functools.cache
def _reads(function: types.FunctionType) -> tuple[int, set[types.FunctionType]]:
    """Return the layer of the names in a function, and the tests' functions that it reads."""
    names = set(_names(function.__code__))
    values = [function.__globals__.get(name) for name in names]
    values += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    modules = [value for value in values if isinstance(value, types.ModuleType)]
    values += [vars(module).get(name) for module in modules for name in names]
    return max(map(_layer, names), default=0), {fn for value in values for fn in _functions(value)}


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names and the short texts that code reads, also in inner functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
        elif isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):
            yield from (text for text in constant if isinstance(text, str))


def _functions(value: Any) -> set[types.FunctionType]:
    """Return the test functions in a value: the value itself, its methods, or its entries."""
    if isinstance(value, dict):
        return {fn for kind in set(map(type, value.values())) for fn in _methods(kind)} | {
            fn for inner in value.values() if callable(inner) for fn in _functions(inner)
        }
    if isinstance(value, type):
        return _methods(value)
    value = getattr(value, "__wrapped__", value)  # by functools or contextlib
    value = getattr(getattr(value, "hypothesis", None), "inner_test", value)
    if isinstance(value, types.FunctionType):
        return {value} if value.__code__.co_filename.startswith(OURS) else set()
    return _methods(type(value))


@functools.cache
def _methods(kind: type) -> set[types.FunctionType]:
    """Return the methods of a class of the tests."""
    methods = (getattr(fn, "__func__", getattr(fn, "fget", fn)) for fn in vars(kind).values())
    functions = (fn for fn in methods if isinstance(fn, types.FunctionType))
    return {fn for fn in functions if fn.__code__.co_filename.startswith(OURS)}


# -- days ------------------------------------------------------------------------------------------


def today() -> date:
    """Return the date of the sample, which workers and inner runs get from the first process."""
    text = os.environ.setdefault("SAMPLE_DATE", date.today().isoformat())
    return date.fromisoformat(text)


def spread(cases: Sequence[T]) -> list[T]:
    """Return the cases in an order in which each part of the list is spread over all cases.

    The order is that of the fractional parts of multiples of the golden ratio. So no part always
    has the same factor of a product of parameters.
    """
    order = sorted(range(len(cases)), key=lambda i: (i + 1) * 0.6180339887 % 1)
    return [cases[i] for i in order]


def sample(cases: Sequence[T], count: int, name: str, turn: int) -> list[T]:
    """Return `count` cases. Successive turns go through all cases."""
    # the test's name shifts the turns, so that tests do not all begin with their first case
    start = (zlib.crc32(name.encode()) + turn) * count
    order = spread(cases)
    return [order[(start + i) % len(order)] for i in range(min(count, len(order)))]


def of_today(tests: Sequence[T], days: int, name: str) -> list[T]:
    """Return the tests of this day; each test has its turn once in `days` days."""
    day = zlib.crc32(name.encode()) + today().toordinal()
    return [test for rank, test in enumerate(spread(tests)) if (rank + day) % days == 0]


def is_sampled(config: pytest.Config) -> bool:
    """Return True if a run names no test: a named test runs on any day."""
    return not any("::" in argument for argument in config.args)


def is_of_today(config: pytest.Config) -> bool:
    """Return True if a run names no test, file or folder, so that only a part of the tests runs."""
    if "PYTEST_XDIST_WORKER" not in os.environ:  # workers get all names from the first process
        named = config.args_source is pytest.Config.ArgsSource.ARGS
        os.environ["SAMPLE_IS_TAKEN"] = "0" if named else "1"
    return os.environ["SAMPLE_IS_TAKEN"] == "1"


def mark(items: Sequence[pytest.Item], config: pytest.Config) -> None:
    """Mark each test's layer, and mark as `soak` the tests that run at night only."""
    groups: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        layer = layer_of(item) if isinstance(item, pytest.Function) else "process"
        item.add_marker(layer)
        is_daily = item.nodeid.removeprefix("tests/") in noticing()
        if is_of_today(config) and not is_daily and not item.get_closest_marker("soak"):
            groups.setdefault((item.path, layer), []).append(item)
    for (path, layer), group in groups.items():
        for item in set(group) - set(of_today(group, DAYS[layer], path.name)):
            item.add_marker(pytest.mark.soak)


def _with_mark(metafunc: pytest.Metafunc, name: str) -> list[Any]:
    """Return the cases of a test that have the mark `name`."""
    return [call for call in metafunc._calls if any(mark.name == name for mark in call.marks)]


def mark_cases(metafunc: pytest.Metafunc) -> None:
    """Mark as `soak` the cases of a sampled test that run at night only.

    If some cases have the mark `rotated`, all cases take turns: as many run each day as there are
    cases without this mark. A run by day does not collect the soak cases, because thousands of
    cases would take most of the time of collecting.
    """
    marker = metafunc.definition.get_closest_marker("sampled")
    marked = _with_mark(metafunc, "soak")
    rotated = {id(call) for call in _with_mark(metafunc, "rotated")}
    if not (marker or rotated) or not is_sampled(metafunc.config):
        return
    test = f"{metafunc.definition.path.relative_to(TESTS)}::{metafunc.definition.name}"
    daily = [call for call in metafunc._calls if f"{test}[{call.id}]" in noticing()]
    excluded = {id(call) for call in [*marked, *daily]}
    others = [call for call in metafunc._calls if id(call) not in excluded]
    count = marker.args[0] if marker else sum(id(call) not in rotated for call in others)
    # The test itself runs only once in `days` days. So its cases change only then.
    days = DAYS[layer_of(metafunc.definition)] if is_of_today(metafunc.config) else 1
    turn = today().toordinal() // days
    chosen = sample(others, count, test, turn)
    late = {id(call) for call in others} - {id(call) for call in chosen}
    for call in metafunc._calls:
        if id(call) in late:
            call.marks.append(pytest.mark.soak.mark)
    if "not soak" in metafunc.config.option.markexpr:
        metafunc._calls = [call for call in metafunc._calls if id(call) not in late]


def of_other_nights(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the soak tests of other nights, if several nights share the soak tests."""
    nights = int(os.environ.get("SAMPLE_NIGHTS", 1))
    for item in items if nights > 1 else ():
        # The name of a test chooses its night. Its index would change with the daily samples.
        turn = zlib.crc32(item.nodeid.encode()) + today().toordinal()
        if item.get_closest_marker("soak") and turn % nights:
            yield item


def longest_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the tests, with the tests of the longest files first.

    A worker takes one file at a time. If a long file began last, a single worker would finish late.
    """
    files = by_key(items, lambda item: item.path)

    def length(path: Path) -> float:
        """Return the approximate duration of a file's tests by day, in seconds."""
        by_day = (item for item in files[path] if not item.get_closest_marker("soak"))
        return sum(SECONDS[layer] for item in by_day for layer in LAYERS if layer in item.keywords)

    return [item for path in sorted(files, key=length, reverse=True) for item in files[path]]


@functools.cache
def noticing() -> frozenset[str]:
    """Return the tests that notice planted faults, which run each day."""
    faults = runpy.run_path(f"{TESTS}/faults.py")["FAULTS"]
    return frozenset(fault.noticed_by for fault in faults)


def by_key(items: Sequence[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """Return the items in groups with equal keys; each group keeps the order of the items."""
    groups: dict[Any, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
