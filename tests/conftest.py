"""Eight virtual CPU devices before JAX starts, how hypothesis runs, and what tests of the endpoints
start from.

More than half of the time of tests is compilation. So LLVM is asked for little, here and in the
processes that tests start, and XLA does without the emitters of fusions, which take a third of what
is left (`make nightly` and `make compat` ask for all of it); what was compiled is kept in a folder
of this run.

Without these emitters XLA's optimizations vectorize loops by the shapes of arrays: rows of an
array, and the same rows made alone, then differ in their last bit. So the two options belong
together, and no file may change one.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import layers
import pytest
from hypothesis import HealthCheck, settings


os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1" and version("jaxlib").startswith("0.10."):
    # another version may not know these, and ends the process then
    plain = "--xla_cpu_use_fusion_emitters=false --xla_cpu_emitter_verification_level=0"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {plain}".strip()
if "PYTEST_XDIST_WORKER" not in os.environ:
    COMPILED = tempfile.mkdtemp(prefix="dtrans-tests-")
    atexit.register(shutil.rmtree, COMPILED, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = COMPILED
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"
    # otherwise each worker rewrites every assert, and each process of a test compiles dtrans
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    layers.today()  # for the workers

import jax  # behind what it reads of the environment


if TYPE_CHECKING:
    from role_threads import RoleThreads


jax.config.update("jax_num_cpu_devices", 8)

settings.register_profile(
    "dtrans",
    deadline=None,
    max_examples=int(os.environ.get("DTRANS_EXAMPLES", 10)),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("ci", settings.get_profile("dtrans"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dtrans")


def pytest_configure(config: pytest.Config) -> None:
    layers.today(), layers.is_of_today(config)  # for workers, who read the environment
    for line in (
        "sampled(count): so many cases run each day, the others by night",
        "rotated: a case that takes turns by day with the cases without this mark",
        "unit: traces no step, runs no job, and starts no process",
        "plan: traces a step and plans it",
        "job: runs a plan, a role or a command, compiles a step, or opens sockets",
        "process: starts processes",
        "cluster: starts another system, as Ray, Slurm or an SSH server",
    ):
        config.addinivalue_line("markers", line)


def pytest_report_header(config: pytest.Config) -> str:
    if not layers.is_of_today(config):
        return "named files: all of their tests, whatever the date"
    return f"sample of {layers.today()} (SAMPLE_DATE repeats another)"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than there are processors: tests of processes mostly wait."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(trylast=True)  # behind those that make the cases
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    layers.mark_cases(metafunc)


def pytest_collection() -> None:
    """Collect no garbage while thousands of tests are collected."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test's layer, and as `soak` the tests that today's sample leaves to the night."""
    layers.mark(items, config)
    late = set(layers.of_other_nights(items))
    config.hook.pytest_deselected(items=list(late))
    items[:] = layers.longest_first([item for item in items if item not in late])


@pytest.fixture(autouse=True)
def unit_layer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a unit test fail where it starts a process or a job: `layers` took it for another."""
    if {"unit", "plan"} & set(request.node.keywords):

        def refuse(*args: Any, **options: Any) -> None:
            pytest.fail("a unit test starts a process or a job: see layers.py")

        monkeypatch.setattr("subprocess.Popen.__init__", refuse)
        monkeypatch.setattr("dtrans.run.executor.Executor.__init__", refuse)


@pytest.fixture(scope="session")
def system_fonts() -> None:
    """Find the fonts before `unit_layer` refuses processes.

    On its first import on a machine, matplotlib runs `fc-list`.
    """
    import matplotlib.font_manager  # noqa: F401


def open_sockets() -> set[str]:
    """The sockets and pollers that this process has open (Linux tells); ZeroMQ's threads have one
    each at least."""
    found = set()
    for fd in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            kind = os.readlink(fd)
            if kind.startswith("socket:") or "eventpoll" in kind:
                found.add(f"{fd.name} {kind}")
    return found


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> Iterator[None]:
    """Clear compiled functions and known runs before each file, and freeze the remaining objects.

    Thousands of compiled functions take gigabytes. The collected tests and the modules' objects
    would make each garbage collection slow, so that the collector skips them from now on.
    """
    from dtrans.checkpoint import runs

    jax.clear_caches()
    runs._known.clear()  # which runs roles in threads of this process were in
    gc.collect()
    gc.freeze()
    yield


# options of JAX that change numbers or how they are compiled
NUMERIC = re.compile("optimization|x64|prng|threefry|promotion|precision|debug_nans")


def numeric_options() -> dict[str, Any]:
    """Return the options of JAX that change bits of programs."""
    return {name: value for name, value in jax.config.values.items() if NUMERIC.search(name)}


@pytest.fixture(autouse=True, scope="module")
def same_options() -> Iterator[None]:
    """Fail where a file leaves JAX with other options than it found: files behind it would have
    other bits."""
    before = numeric_options()
    yield
    assert numeric_options() == before


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run `dtrans ARGUMENTS` in this process, and return the exit code."""
    from dtrans import cli

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["dtrans", *arguments])
        # roles find the package from anywhere, installed or not
        monkeypatch.setenv(
            "PYTHONPATH",
            os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
        )
        with pytest.raises(SystemExit) as e:
            cli.main()
        code = e.value.code
        return 0 if code is None else int(code)

    return run


@pytest.fixture
def folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Folder for temporary files, empty again at the end, as are the lists of threads and
    sockets."""
    from role_threads import RESERVED
    from zmq.utils.garbage import gc as zmq_gc

    from dtrans.protocol.server import server_loop

    tmp_path_factory.getbasetemp()  # not below ours
    where = Path(tempfile.mkdtemp(prefix="t"))  # a short path: sockets have room for 107 characters
    monkeypatch.setattr(tempfile, "tempdir", str(where))
    monkeypatch.setattr(server_loop, "TICK", 0.1)
    if zmq_gc.thread is None:  # it frees what was sent without a copy; one for the whole process
        zmq_gc.start()
    sockets = open_sockets()
    yield where
    left = [t.name for t in threading.enumerate() if t.name.startswith(("dtrans", "role_threads"))]
    assert not left, f"threads that are left: {left}"
    assert os.listdir(where) == []
    shutil.rmtree(where)
    RESERVED.close()
    gc.collect()
    assert open_sockets() <= sockets


@pytest.fixture
def x64() -> Iterator[None]:
    """64 bits."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def role_threads(folder: Path) -> Iterator[RoleThreads]:
    """Whose threads have ended when the test has."""
    from role_threads import RoleThreads

    made = RoleThreads()
    yield made
    made.join()
