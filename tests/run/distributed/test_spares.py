"""Spares: their start, the choice of the spare that becomes a role, and the reaction to the end of
a spare."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from role_threads import until

from dtrans.run.distributed import identity
from dtrans.run.distributed.child_process import Guard
from dtrans.run.distributed.restarts.spares import Spares
from dtrans.run.distributed.role import Role
from dtrans.run.distributed.role_output import open_logs


pytestmark = pytest.mark.process

ROLE = Role("trainer", 2, ("127.0.0.1:1",), trainer_id=1)
WAIT = f"""
import os, runpy
runpy.run_path({identity.__file__!r})["receive_identity"]()
print(os.environ["DTRANS_TRAINER_ID"], os.environ["SHARED"], os.environ.get("DTRANS_SPARE"))
print(len(os.read(0, 1)))
"""


class Generations:
    """The generations of a job, reduced to the attributes that spares read."""

    def __init__(self) -> None:
        self.have_all_entered = True
        self.begin(0)

    def begin(self, number: int) -> None:
        self.generation = types.SimpleNamespace(number=number)


class Launcher:
    """Spares, and the values that they get from their launcher."""

    def __init__(self, stack: contextlib.ExitStack, count: int, code: str) -> None:
        self.generations: Any = Generations()
        self.events: SimpleQueue[Any] = SimpleQueue()
        self.open_log = stack.enter_context(open_logs(None))
        guard = stack.enter_context(Guard(sys.executable))
        command = [sys.executable, "-c", code]
        env = {**os.environ, "SHARED": "from the start"}
        self.spares = stack.enter_context(
            Spares(count, command, env, self.open_log, guard, self.events)
        )

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self.spares._waiting]

    def renew(self) -> list[int]:
        self.spares.renew(self.generations)
        return self.pids

    def renew_without(self, pid: int) -> None:
        """Check the spares until the launcher has noted the end of one."""

        def is_noted() -> bool:
            return pid not in self.renew()

        until(is_noted, "the end of a spare")


@pytest.fixture
def start() -> Iterator[Any]:
    with contextlib.ExitStack() as stack:
        yield lambda count, code: Launcher(stack, count, code)


def test_spares_start_when_all_roles_are_in_the_generation(start: Any) -> None:
    launcher = start(2, WAIT)
    launcher.generations.have_all_entered = False
    assert launcher.renew() == []
    launcher.generations.have_all_entered = True
    assert [len(launcher.renew()) for _ in range(3)] == [1, 2, 2]
    assert len(set(launcher.pids)) == 2


def test_the_first_spare_becomes_a_role(start: Any, capsys: pytest.CaptureFixture[str]) -> None:
    launcher = start(2, WAIT)
    launcher.renew()
    first, second = launcher.renew()
    spare = launcher.spares.take()
    assert spare.pid == first and launcher.pids == [second]
    variables = {"SHARED": "from the start", **ROLE.environment()}
    spare.take_role(ROLE, variables, launcher.open_log(ROLE.name))
    assert launcher.events.get(timeout=60) is spare and spare.role is ROLE
    spare.reap()
    assert spare.code == 0
    out = "[trainer 1] 1 from the start None\n[trainer 1] 0\n"
    assert capsys.readouterr().out == out


def test_no_spare_follows_one_that_ended_by_itself(
    start: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher = start(1, "import sys; sys.exit(3)")
    (pid,) = launcher.renew()
    launcher.renew_without(pid)
    launcher.generations.begin(1)
    assert launcher.renew() == [] and launcher.events.empty()
    assert capsys.readouterr().err.count("a spare ended with exit code 3 before it had a role") == 1


def test_a_killed_spare_is_replaced_in_the_next_generation(
    start: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher = start(1, WAIT)
    (pid,) = launcher.renew()
    os.kill(pid, signal.SIGKILL)
    launcher.renew_without(pid)
    assert launcher.renew() == [] and launcher.spares.take() is None
    launcher.generations.begin(1)
    assert len(launcher.renew()) == 1 and launcher.events.empty()
    assert "a spare failed with signal SIGKILL; the next one starts" in capsys.readouterr().err


def test_a_spare_that_has_ended_is_not_taken(start: Any) -> None:
    launcher = start(1, "")
    launcher.renew()
    until(lambda: not launcher.spares._ended.empty(), "the end of a spare")
    assert launcher.spares.take() is None


def test_spares_end_with_the_job(start: Any) -> None:
    with contextlib.ExitStack() as stack:
        launcher = Launcher(stack, 1, WAIT)
        (pid,) = launcher.renew()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_spare_ends_with_its_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(identity.VARIABLE, "1")
    with contextlib.ExitStack() as stack:
        stdin = os.dup(0)
        stack.callback(os.close, stdin)
        stack.callback(os.dup2, stdin, 0)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        with pytest.raises(SystemExit, match="the launcher of this spare has ended"):
            Role.from_env()
