"""Configuration of pytest: virtual CPU devices, options of XLA and hypothesis, and shared fixtures.

Tests spend more than half of their time on compilation. So XLA and LLVM run few optimizations, here
and in the processes that tests start. XLA also runs without its fusion emitters, which would take a
third of the remaining compile time. `make nightly` and `make compat` use all optimizations. A
temporary folder caches compiled programs during one run.

Without fusion emitters, XLA vectorizes loops by the shape of an array. Then rows of an array can
differ in the last bit from the same rows computed alone. So both options must be set together, and
no test file may change one of them.
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
    # other versions of jaxlib may not know these flags, and would end the process
    plain = "--xla_cpu_use_fusion_emitters=false --xla_cpu_emitter_verification_level=0"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {plain}".strip()
if "PYTEST_XDIST_WORKER" not in os.environ:
    COMPILED = tempfile.mkdtemp(prefix="dtrans-tests-")
    atexit.register(shutil.rmtree, COMPILED, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = COMPILED
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"
    # otherwise each worker rewrites every assert, and each process of a test compiles dtrans
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    layers.today()  # store the date for the workers

import jax  # JAX reads the environment variables set above


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
    """Return the number of workers: one more than processors, since tests of processes mostly
    wait."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(trylast=True)  # after plugins that create cases
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    layers.mark_cases(metafunc)


def pytest_collection() -> None:
    """Collect no garbage while thousands of tests are collected."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before pytest evaluates -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the layer of each test. Mark as `soak` the tests that are not in today's sample."""
    layers.mark(items, config)
    late = set(layers.of_other_nights(items))
    config.hook.pytest_deselected(items=list(late))
    items[:] = layers.longest_first([item for item in items if item not in late])


@pytest.fixture(autouse=True)
def unit_layer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a unit test starts a process or a job, which means that `layers` chose a wrong
    layer."""
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
    """Return the open sockets and pollers of this process, from Linux's /proc.

    Each thread of ZeroMQ has at least one of them.
    """
    found = set()
    for fd in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
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
    runs._known.clear()  # runs that roles in threads of this process belonged to
    gc.collect()
    gc.freeze()
    yield


# options of JAX that change numbers or the compilation
NUMERIC = re.compile("optimization|x64|prng|threefry|promotion|precision|debug_nans")


def numeric_options() -> dict[str, Any]:
    """Return the options of JAX that change bits of programs."""
    return {name: value for name, value in jax.config.values.items() if NUMERIC.search(name)}


@pytest.fixture(autouse=True, scope="module")
def same_options() -> Iterator[None]:
    """Fail if a test file changes options of JAX: later files would then compute other bits."""
    before = numeric_options()
    yield
    assert numeric_options() == before


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run `dtrans ARGUMENTS` in this process, and return the exit code."""
    from dtrans import cli

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["dtrans", *arguments])
        # roles find the package from any folder, installed or not
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
    """Return a folder for temporary files.

    After the test, the folder must be empty, and all threads and sockets of the test must be
    closed.
    """
    from role_threads import RESERVED
    from zmq.utils.garbage import gc as zmq_gc

    from dtrans.protocol.server import server_loop

    tmp_path_factory.getbasetemp()  # create the base folder outside of ours
    where = Path(tempfile.mkdtemp(prefix="t"))  # a short path: sockets have room for 107 characters
    monkeypatch.setattr(tempfile, "tempdir", str(where))
    monkeypatch.setattr(server_loop, "TICK", 0.1)
    # it frees messages that ZeroMQ sent without a copy; one thread for the process
    if zmq_gc.thread is None:
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
    """Enable 64-bit types during the test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def role_threads(folder: Path) -> Iterator[RoleThreads]:
    """Run roles of a job in threads. All threads must have ended after the test."""
    from role_threads import RoleThreads

    made = RoleThreads()
    yield made
    made.join()
