"""Launching a job with snapshots: the roles that start again, the step to which the others go back, and
the end of the job.

Roles are scripts. They send the reports of servers and trainers, but neither train nor import JAX.
"""

from __future__ import annotations

import collections
import os
import signal
import socket
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from role_scripts import GENERATIONS, assert_gone, came, script_writer
from role_threads import until

from dtrans.errors import ConfigError, LaunchError
from dtrans.run.distributed import identity
from dtrans.run.distributed.launcher import launch
from dtrans.run.distributed.restarts import attempt, lost_reports, run_attempts, snapshots_at_loss
from dtrans.run.distributed.restarts.restart_options import RestartOptions
from dtrans.run.distributed.site import Site
from dtrans.run.net.generation_log import read_log
from dtrans.run.net.launcher_folder import LauncherFolder
from dtrans.run.net.role_folder import RoleFolder


PATIENCE = 60.0  # seconds for something that takes milliseconds on an idle machine


@pytest.fixture
def script(tmp_path: Path) -> Any:
    return script_writer(tmp_path, GENERATIONS)


class Output:
    """Output of a job: the generations that its roles entered, and the lines of the launcher."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        out, self.err = capsys.readouterr()
        self.said = [
            line.removeprefix("[launcher] ")
            for line in self.err.splitlines()
            if line.startswith("[launcher] ") and "this job answers" not in line
        ]
        self.entered = collections.defaultdict(list)
        self.pids = collections.defaultdict(list)
        self.restarts = collections.defaultdict(list)
        for line in out.splitlines():
            role, words = line.removeprefix("[").split("] ")
            if words.startswith("enters"):
                number, step, pid, count = words.split()[1:]
                self.entered[role].append((int(number), None if step == "None" else int(step)))
                self.pids[role].append(pid)
                self.restarts[role].append(int(count))


ROLES = ("pserver 0", "pserver 1", "trainer 0", "trainer 1")
JOB: dict[str, Any] = {"trainers": 2, "pservers": 2, "deadline": PATIENCE}


# -- in place --------------------------------------------------------------------------------------

IN_PLACE = """
    if enter() == 0:
        snapshot(10, 20)
        if name == "pserver 0":
            generations.note_snapshot(generations.current().number, 30)  # the other server does not have this snapshot
        if name == {victim!r}:
            wait(lambda: all_in(0) and 30 in generations.marks()["pserver 0"].snapshots)
            die()
        enter(1)
    finish(1)
"""


@pytest.mark.parametrize("victim", ["trainer 1", "pserver 1"])
def test_the_lost_role_alone_starts_again(
    victim: str, script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    launch(script(IN_PLACE.format(victim=victim)), restarts=3, **JOB)
    seen = Output(capsys)
    assert seen.said == [
        f"{victim} failed with signal SIGKILL; it starts again, and all roles go back to step 20 "
        "(restart 1 of 3)"
    ]
    assert seen.entered == {role: [(0, None), (1, 20)] for role in ROLES}
    for role in ROLES:
        assert len(set(seen.pids[role])) == (2 if role == victim else 1)
        assert seen.restarts[role] == ([0, 1] if role == victim else [0, 0])


def test_a_role_that_is_lost_before_it_goes_back_starts_again_too(
    script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command = script("""
        number = enter()
        if number == 0:
            snapshot(10, 20)
            lose("trainer 1")
            wait(lambda: generations.current().number)
            if name == "trainer 0":
                die()
        if number < 2:
            enter(2)
        finish(2)
    """)
    launch(command, restarts=2, **JOB)
    seen = Output(capsys)
    again = (
        "{} failed with signal SIGKILL; it starts again, and all roles go back to step 20 "
        "(restart {} of 2)"
    )
    assert seen.said == [again.format("trainer 1", 1), again.format("trainer 0", 2)]
    assert {x[-1] for x in seen.entered.values()} == {(2, 20)}
    assert {role: len(set(pids)) for role, pids in seen.pids.items()} == {
        "pserver 0": 1,
        "pserver 1": 1,
        "trainer 0": 2,
        "trainer 1": 2,
    }


@pytest.mark.parametrize("leaves", ["generations.leave(); forever()", "pass"])
def test_all_start_again_if_a_role_leaves_before_it_goes_back(
    leaves: str, script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """This uses no other restart, because no other role was lost."""
    command = script(f"""
        if enter() == 0:
            snapshot(10, 20)
            lose("trainer 1")
            wait(lambda: generations.current().number)
            if name == "trainer 0":
                {leaves}
            else:
                forever()
        else:
            if generations.current().number < 2:
                forever()
            finish(2)
    """)
    launch(command, restarts=1, **JOB)
    seen = Output(capsys)
    assert seen.said[1:] == [
        "trainer 0 has left the job, so it cannot go back to a snapshot; all roles start again "
        "(restart 1 of 1)"
    ]
    assert {x[-1] for x in seen.entered.values()} == {(2, 20)}
    assert min(len(set(pids)) for pids in seen.pids.values()) == 2


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, [0.0, 1.0, 2.0]),
        ({"LONGEST_BACK_OFF": 1.5}, [0.0, 1.0, 1.5]),
        ({"STEADY": 0.0}, [0.0, 0.0, 0.0]),
    ],
)
def test_pauses_precede_restarts_after_roles_that_leave(
    changed: dict[str, float],
    expected: list[float],
    script: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without the pauses, roles that leave again and again would keep the launcher busy."""
    pauses: list[float] = []

    def pause(self: attempt.Attempt, seconds: float) -> bool:
        pauses.append(seconds)
        return False

    monkeypatch.setattr(attempt.Attempt, "pause", pause)
    for name, seconds in changed.items():
        monkeypatch.setattr(run_attempts, name, seconds)
    command = script("""
        number = enter()
        if number < 6 and number % 2 == 0:
            snapshot(10 * number + 10)
            if name == "trainer 1":
                wait(lambda: all_in(number))
                die()
            wait(lambda: generations.current().number > number)
            if name == "trainer 0":
                generations.leave()
        if number < 6:
            forever()
        finish(6)
    """)
    launch(command, restarts=3, **JOB)
    said = [x for x in Output(capsys).said if x.startswith("trainer 0 has left the job")]
    assert len(said) == 3 and pauses == expected


def test_a_role_that_cannot_read_its_snapshot_has_failed(
    script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The role has not left the job, so the restart of all roles counts."""
    command = script("""
        if enter() == 0:
            snapshot(10, 20)
            lose("trainer 1")
            wait(lambda: generations.current().number)
            if name == "pserver 0":
                from dtrans.errors import DamagedSnapshotError
                raise DamagedSnapshotError("a damaged snapshot")
            forever()
        elif generations.current().number < 2:
            forever()
        finish(2)
    """)
    launch(command, restarts=2, **JOB)
    assert Output(capsys).said[1:] == [
        "pserver 0 failed with exit code 1; all roles start again (restart 2 of 2)"
    ]


# -- all roles -------------------------------------------------------------------------------------

ALL_AGAIN = "trainer 1 failed with signal SIGKILL; all roles start again (restart 1 of 3)"


def all_again(command: list[str], capsys: pytest.CaptureFixture[str]) -> Output:
    """Launch a job, and check that all roles start again once."""
    launch(command, restarts=3, **JOB)
    seen = Output(capsys)
    assert seen.said == [ALL_AGAIN]
    return seen


def test_all_start_again_if_another_role_has_left(
    script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command = script("""
        if enter() == 0:
            snapshot(10, 20)
            if name == "trainer 0":
                generations.leave()
            if name == "trainer 1":
                wait(lambda: all_in(0) and generations.marks()["trainer 0"].left)
                die()
            forever()
        finish(1)
    """)
    seen = all_again(command, capsys)
    assert seen.entered == {role: [(0, None), (1, 20)] for role in ROLES}
    assert {len(set(pids)) for pids in seen.pids.values()} == {2}


def test_all_start_again_without_a_common_snapshot(
    script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command = script("""
        if enter() == 0:
            if name == "pserver 0":
                generations.note_snapshot(generations.current().number, 10)
            if name == "trainer 1":
                wait(lambda: all_in(0) and generations.marks()["pserver 0"].snapshots)
                die()
            forever()
        finish(1)
    """)
    seen = all_again(command, capsys)
    assert seen.entered == {role: [(0, None), (1, None)] for role in ROLES}


def test_all_start_again_while_a_role_has_not_begun(
    script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command = script("""
        if name == "trainer 0" and os.environ["DTRANS_RESTARTS"] == "0":
            forever()
        if enter() == 0:
            snapshot(10, 20)
            if name == "trainer 1":
                die()
            forever()
        finish(1)
    """)
    seen = all_again(command, capsys)
    assert {x[-1] for x in seen.entered.values()} == {(1, 20)}


@pytest.mark.parametrize(
    ("tail", "counts"),
    [
        (["dtrans.errors.LostPeerError: pserver here:1 went away"], True),
        (["dtrans.errors.LostPeerError: pserver here:1 went away", "bye"], True),
        # the user's exception came last, and would be raised again
        (["dtrans.errors.LostPeerError: pserver here:1 went away", "ValueError: mine"], False),
        (["my.package.MyError: dtrans.errors.LostPeerError: quoted"], False),
        ([], False),
    ],
)
def test_the_last_exception_of_a_role_decides_whether_it_was_lost(
    tail: list[str], counts: bool
) -> None:
    found = attempt._last_error(types.SimpleNamespace(tail=tail))  # type: ignore[arg-type]
    assert found.startswith(attempt.LOST_PEER) == counts


LOST_PEER = """
    if generations is None or os.environ["DTRANS_RESTARTS"] == "0":
        if {has_marks}:
            enter()
            snapshot(10, 20)
            wait(lambda: all_in(0))
        if name == "trainer 1":
            sys.exit("dtrans.errors.LostPeerError: pserver 0 has ended")
        forever()
    enter()
    finish(1)
"""


def test_a_role_that_failed_by_a_loss_counts_as_lost_in_a_job_with_snapshots(
    script: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "BLAME", 0.1)
    launch(script(LOST_PEER.format(has_marks=True)), restarts=3, **JOB)
    seen = Output(capsys)
    assert seen.said == [
        "trainer 1 failed with exit code 1; all roles start again (restart 1 of 3)"
    ]
    assert {x[-1] for x in seen.entered.values()} == {(1, 20)}
    with pytest.raises(LaunchError, match="^trainer 1 failed with exit code 1, and the other"):
        launch(script(LOST_PEER.format(has_marks=False)), restarts=3, **JOB)


def test_a_cause_comes_before_a_lost_peer(script: Any) -> None:
    command = script("""
        if name == "trainer 0":
            sys.exit("dtrans.errors.LostPeerError: trainer 1 has ended")
        if name == "trainer 1":
            wait(ended_roles)
            sys.exit("ValueError: this is why")
        forever()
    """)
    with pytest.raises(LaunchError, match="^trainer 1 failed .*\nValueError: this is why$"):
        launch(command, **JOB)


def test_a_dropped_trainer_does_not_start_again(
    script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The servers of this job write no snapshots."""
    command = script("""
        if name == "trainer 1":
            die()
        wait(ended_roles)
    """)
    launch(command, restarts=3, on_trainer_loss="drop", **JOB)
    assert Output(capsys).said == ["trainer 1 failed with signal SIGKILL; the others continue"]


@pytest.mark.parametrize(
    ("quorum", "lost", "left"), [(3, (2,), "2 trainers"), (2, (1, 2), "1 trainer")]
)
def test_a_quorum_ends_a_job_without_snapshots(
    quorum: int, lost: tuple[int, ...], left: str, script: Any
) -> None:
    command = script(f"""
        if name in {[f"trainer {k}" for k in lost]}:
            die()
        forever()
    """)
    with pytest.raises(
        LaunchError,
        match="^trainer . failed with signal SIGKILL, and the other roles were ended; without it, "
        f"{left} would be left, but quorum={quorum}",
    ):
        launch(command, restarts=RestartOptions(0, quorum=quorum), **DROP)


# -- trainers that are dropped ---------------------------------------------------------------------

DROP: dict[str, Any] = {**JOB, "trainers": 3, "on_trainer_loss": "drop"}
NO_RESTART = {"DTRANS_RESTARTS": "0"}  # the scripts print it
# the last trainer is lost, and the others go back without it
DIES = """
    dropped = {dropped!r}

    def all_but_dropped(number):
        marks = generations.marks()
        return len([x for n, x in marks.items() if x.generation >= number and n not in dropped]) == 5 - len(dropped)

    if enter() == 0:
        snapshot(10, 20)
        lose("trainer 2")
        enter(1)
"""
END = """
    wait(lambda: all_but_dropped({number}))
    generations.leave()
"""


def test_the_job_continues_without_a_lost_trainer(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = script(DIES.format(dropped=["trainer 2"]) + END.format(number=1))
    options = RestartOptions(0, tmp_path / "snapshots")
    launch(command, restarts=options, env=NO_RESTART, **DROP)
    seen = Output(capsys)
    assert seen.said == [
        "trainer 2 failed with signal SIGKILL; the job continues with trainers 0, 1, and all roles "
        "go back to step 20"
    ]
    assert seen.entered["trainer 2"] == [(0, None)]
    for role in ROLES:
        assert seen.entered[role] == [(0, None), (1, 20)] and len(set(seen.pids[role])) == 1
    assert [path.name for path in (tmp_path / "snapshots").glob("[!.]*")] == ["generations.jsonl"]
    first, second = read_log(tmp_path / "snapshots" / "generations.jsonl")
    assert (first.snapshot, first.members, first.lost) == (None, (0, 1, 2), "")
    assert (second.snapshot, second.members) == (20, (0, 1))
    assert (second.lost, second.reason) == ("trainer 2", "signal SIGKILL")


def test_a_server_starts_again_after_a_trainer_was_dropped(
    script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    dies_next = """
    if generations.current().number == 1:
        if name == "pserver 1":
            wait(lambda: all_but_dropped(1))
            die()
        enter(2)
    """
    command = script(DIES.format(dropped=["trainer 2"]) + dies_next + END.format(number=2))
    launch(command, restarts=1, **DROP)
    seen = Output(capsys)
    assert seen.said[1] == (
        "pserver 1 failed with signal SIGKILL; it starts again, and all roles go back to step 20 "
        "(restart 1 of 1)"
    )
    assert {seen.entered[role][-1] for role in ROLES} == {(2, 20)}
    assert seen.entered["trainer 2"] == [(0, None)]


def test_a_lost_trainer_starts_again_without_a_quorum(
    script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command = script(DIES.format(dropped=[]) + END.format(number=1))
    launch(command, restarts=RestartOptions(1, quorum=3), **DROP)
    seen = Output(capsys)
    assert seen.said == [
        "trainer 2 failed with signal SIGKILL; it starts again, and all roles go back to step 20 "
        "(restart 1 of 1)"
    ]
    assert seen.entered["trainer 2"] == [(0, None), (1, 20)]


def test_the_job_ends_without_a_quorum_and_restarts(script: Any) -> None:
    command = script(DIES.format(dropped=[]) + "    forever()")
    with pytest.raises(
        LaunchError,
        match="^trainer 2 failed with signal SIGKILL, and the other roles were ended; without it, "
        "2 trainers would be left, but quorum=3, and restarts=0 allows no further restart; it "
        "wrote",
    ):
        launch(command, restarts=RestartOptions(0, quorum=3), env=NO_RESTART, **DROP)


def test_the_job_ends_if_all_would_start_again_without_restarts(script: Any) -> None:
    """The servers have no snapshot yet."""
    command = script("""
        enter()
        lose("trainer 2")
        forever()
    """)
    with pytest.raises(
        LaunchError,
        match="; the other roles could not go back to a snapshot in place, and restarts=0",
    ):
        launch(command, env=NO_RESTART, **DROP)


def test_the_lost_trainer_starts_with_the_others_if_all_start_again(
    script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command = script("""
        if enter() == 0:
            lose("trainer 2")
            forever()
        finish(1)
    """)
    launch(command, restarts=1, **DROP)
    seen = Output(capsys)
    assert seen.said == [
        "trainer 2 failed with signal SIGKILL; all roles start again (restart 1 of 1)"
    ]
    assert {x[-1] for x in seen.entered.values()} == {(1, None)} and len(seen.entered) == 5


def test_a_reported_trainer_is_dropped(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    command = script("""
        if enter() == 0:
            snapshot(10, 20)
            if name == "pserver 0":
                wait(lambda: all_in(0))
                generations.report_lost(0, "trainer 2", "silence")
            if name == "trainer 2":
                forever()
            enter(1)
        wait(lambda: len([x for x in generations.marks().values() if x.generation >= 1]) == 4)
        generations.leave()
    """)
    launch(command, env=NO_RESTART, **DROP)
    reported, dropped = Output(capsys).said
    assert reported == "pserver 0 has lost trainer 2 (silence), which is ended"
    assert dropped.startswith("trainer 2 failed with signal SIGKILL; the job continues with train")


def test_dropped_trainers_stay_dropped_when_all_start_again(
    script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command = script("""
        number = enter()
        if number == 0:
            snapshot(10, 20)
            lose("trainer 2")
            wait(lambda: generations.current().number)
            if name == "trainer 0":
                generations.leave()
            forever()
        wait(lambda: len([x for x in generations.marks().values() if x.generation >= 2]) == 4)
        generations.leave()
    """)
    launch(command, env=NO_RESTART, **DROP)
    seen = Output(capsys)
    assert (
        seen.said[1]
        == "trainer 0 has left the job, so it cannot go back to a snapshot; all roles start again"
    )
    assert seen.entered["trainer 2"] == [(0, None)]
    assert {seen.entered[role][-1] for role in ROLES} == {(2, 20)}


# -- trainers that join again ----------------------------------------------------------------------

REPLACE: dict[str, Any] = {**DROP, "on_trainer_loss": "replace"}
LOST = (
    "trainer 2 failed with signal SIGKILL; the job continues with trainers 0, 1, and all roles go "
    "back to step 20"
)
STARTS = "trainer 2 starts again, and joins the job when it is ready (restart 1 of 1)"
# `begins` runs in the process that replaces trainer 2
JOINS = """
    if not generations.current().has_role(name):
        {begins}
        generations.join()
    number = enter()
    if number == 0:
        snapshot(10, 20)
        lose("trainer 2")
        number = enter(1)
    if number == 1:
        {continues}
"""


def test_a_dropped_trainer_joins_again(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    joins = JOINS.format(begins="", continues="enter(2)")
    command = script(joins + "    finish(2)")
    launch(command, restarts=RestartOptions(1, tmp_path / "snapshots"), **REPLACE)
    seen = Output(capsys)
    joined = "trainer 2 joined the job, and all roles go back to step 20"
    assert seen.said == [LOST, STARTS, joined]
    assert seen.entered["trainer 2"] == [(0, None), (2, 20)]
    assert len(set(seen.pids["trainer 2"])) == 2 and seen.restarts["trainer 2"] == [0, 1]
    for role in ROLES:
        assert seen.entered[role] == [(0, None), (1, 20), (2, 20)]
        assert len(set(seen.pids[role])) == 1
    records = read_log(tmp_path / "snapshots" / "generations.jsonl")
    assert [x.members for x in records] == [(0, 1, 2), (0, 1), (0, 1, 2)]
    assert (records[-1].lost, records[-1].reason) == ("", "trainer 2 joined")


def test_nobody_waits_for_a_trainer_that_is_not_ready(
    script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job ends first, and then the launcher ends the trainer."""
    joins = JOINS.format(begins="forever()", continues="pass")
    ends = (
        "    wait(lambda: len([x for x in generations.marks().values() if x.generation >= 1]) == 4)"
    )
    launch(script(joins + ends + "\n    generations.leave()"), restarts=1, **REPLACE)
    seen = Output(capsys)
    assert seen.said == [LOST, STARTS]
    assert seen.entered["trainer 2"] == [(0, None)]


def test_a_trainer_that_ends_before_it_joins_does_not_start_again(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other roles train until the launcher has seen this."""
    said = str(tmp_path / "ended")
    begins = f"open({said!r}, 'w').close(); sys.exit(3)"
    continues = f"wait(lambda: os.path.exists({said!r})); threading.Event().wait(1)"
    joins = JOINS.format(begins=begins, continues=continues)
    launch(script(joins + "    generations.leave()"), restarts=3, **REPLACE)
    seen = Output(capsys)
    ended = "trainer 2 ended with exit code 3 before it joined the job again"
    assert seen.said == [LOST, STARTS.replace("of 1", "of 3"), ended]


def test_a_trainer_does_not_start_again_without_restarts(
    script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trainer that has joined is lost again."""
    dies = "if name == 'trainer 2': wait(lambda: all_in(2)); die()"
    command = script(
        JOINS.format(begins="", continues="number = enter(2)")
        + f"""
    {dies}
    enter(3)
    wait(lambda: len([x for x in generations.marks().values() if x.generation >= 3]) == 4)
    generations.leave()
    """
    )
    launch(command, restarts=1, **REPLACE)
    assert Output(capsys).said[3:] == [
        LOST,
        "trainer 2 does not start again: restarts=1 allows no further restart",
    ]


@pytest.mark.parametrize("leaves", ["generations.leave(); forever()", "fail()"])
def test_all_start_again_if_a_role_leaves_while_a_trainer_joins(
    leaves: str, script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trainer cannot go back after its last step. No role was lost, so this uses no restart."""
    continues = f"wait(lambda: generations.current().number == 2); {leaves}"
    command = script(
        """
    def fail():
        if name == "trainer 0":
            generations.leave()
            sys.exit("dtrans.errors.LostPeerError: a process was lost after the last step")
        forever()
    """
        + JOINS.format(begins="", continues=continues)
        + """
    if number == 2:
        forever()
    finish(3)
    """
    )
    launch(command, restarts=1, **REPLACE)
    seen = Output(capsys)
    assert seen.said[3].endswith(
        "has left the job, so it cannot go back to a snapshot; all roles start again (restart 1 of "
        "1)"
    )
    assert {x[-1] for x in seen.entered.values()} == {(3, 20)} and len(seen.entered) == 5


def test_dropped_trainers_join_when_all_start_again(
    script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    joins = JOINS.format(
        begins="forever()",
        continues="name == 'trainer 0' and generations.leave(); name == 'pserver 1' and "
        "(wait(lambda: generations.marks()['trainer 0'].left), die()); forever()",
    )
    launch(script(joins + "    finish(2)"), restarts=2, **REPLACE)
    seen = Output(capsys)
    assert seen.said[2] == (
        "pserver 1 failed with signal SIGKILL; all roles start again (restart 2 of 2)"
    )
    assert {x[-1] for x in seen.entered.values()} == {(2, 20)} and len(seen.entered) == 5


def test_a_trainer_that_joins_needs_restarts_and_servers() -> None:
    for options, message in [
        ({"restarts": 0}, "on_trainer_loss='replace' needs restarts, since each new start of a"),
        ({"restarts": 1, "mode": "nccl2", "pservers": None}, "'replace' is for parameter servers"),
    ]:
        with pytest.raises(ConfigError, match=message):
            launch(["true"], **{**REPLACE, **options})


def test_the_loss_of_a_trainer_ends_a_job_that_aborts(script: Any) -> None:
    command = script(DIES.format(dropped=[]) + "    forever()")
    with pytest.raises(LaunchError, match="^trainer 2 failed with signal SIGKILL, and the other"):
        launch(command, restarts=3, **{**DROP, "on_trainer_loss": "abort"})


def test_a_job_that_aborts_restarts_servers(
    script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    launch(script(IN_PLACE.format(victim="pserver 1")), restarts=3, on_trainer_loss="abort", **JOB)
    assert len(Output(capsys).said) == 1


def test_a_quorum_is_for_dropped_trainers() -> None:
    for wanted, options, message in [
        (
            RestartOptions(1, quorum=3),
            {},
            "quorum=3 is for parameter servers with on_trainer_loss=",
        ),
        (RestartOptions(quorum=2), {"mode": "nccl2", "on_trainer_loss": "drop"}, "quorum=2 is for"),
        (
            RestartOptions(quorum=4),
            {},
            "quorum must be a number from 1 to 3, the number of trainers; it is 4",
        ),
        (RestartOptions(quorum=0), {}, "quorum must be a number from 1 to .* it is 0"),
    ]:
        with pytest.raises(ConfigError, match=message):
            launch(["true"], restarts=wanted, trainers=3, **options)


# -- spares ----------------------------------------------------------------------------------------

# a spare writes a file with its id
SPARE = """
import glob, os, runpy
if "DTRANS_SPARE" in os.environ:
    print("waits")
    open(f"spare-{os.getpid()}", "w")
"""
RECEIVE = f"runpy.run_path({identity.__file__!r})['receive_identity']()\n"


@pytest.fixture
def with_spares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    return script_writer(tmp_path, SPARE + RECEIVE + GENERATIONS)


def spares_of(folder: Path) -> set[str]:
    """Return the ids of the spares that have run in a folder, and check that they have ended."""
    found = {path.name.removeprefix("spare-") for path in folder.glob("spare-*")}
    for pid in found:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
    return found


@pytest.mark.parametrize("victim", ["trainer 1", "pserver 1"])
def test_a_spare_takes_the_place_of_a_lost_role(
    victim: str, with_spares: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = with_spares(f"""
        if enter() == 0:
            snapshot(10, 20)
            if name == {victim!r}:
                wait(lambda: glob.glob("logs/spare.log") and open("logs/spare.log").read())
                die()
            enter(1)
        finish(1)
    """)
    launch(command, restarts=RestartOptions(3, spares=1), log_dir="logs", **JOB)
    seen = Output(capsys)
    assert seen.said == [
        f"{victim} failed with signal SIGKILL; a spare takes its place, and all roles go back to "
        "step 20 (restart 1 of 3)"
    ]
    assert seen.entered == {role: [(0, None), (1, 20)] for role in ROLES}
    assert seen.restarts[victim] == [0, 1]
    assert {role for role in ROLES if len(set(seen.pids[role])) == 2} == {victim}
    assert seen.pids[victim][1] in spares_of(tmp_path)
    # its output is that of a spare before, and that of the role afterwards
    logs = {path.stem: path.read_text().splitlines() for path in Path("logs").iterdir()}
    assert set(logs["spare"]) == {"waits"}
    assert [line.split()[0] for line in logs[victim.replace(" ", "-")]] == ["enters", "enters"]


@pytest.mark.rotated
def test_the_next_spare_starts_when_all_roles_have_gone_back(
    with_spares: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = with_spares("""
        number = enter()
        if number == 0:
            snapshot(10, 20)
            if name == "trainer 1":
                wait(lambda: all_in(0) and glob.glob("spare-*"))
                die()
            wait(lambda: generations.current().number)
            if name == "trainer 0":
                die()
        if number < 2:
            number = enter(2)
        if number == 2:
            snapshot(30)
            if name == "trainer 0":
                wait(lambda: all_in(2) and len(glob.glob("spare-*")) == 2)
                die()
            enter(3)
        finish(3)
    """)
    launch(command, restarts=RestartOptions(3, spares=1), **JOB)
    seen = Output(capsys)
    assert [line.split(";")[1].split(",")[0] for line in seen.said] == [
        " a spare takes its place",
        " it starts again",
        " a spare takes its place",
    ]
    spares = spares_of(tmp_path)
    pids = {role: list(dict.fromkeys(seen.pids[role])) for role in ROLES}
    assert [pid in spares for pid in pids["trainer 0"]] == [False, False, True]
    assert [pid in spares for pid in pids["trainer 1"]] == [False, True]


def test_a_spare_that_ends_early_does_not_end_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # the script reads variables of its role before it waits for them
    command = script_writer(tmp_path, SPARE + GENERATIONS)("""
        def is_gone(path):
            try:
                os.kill(int(path.removeprefix("spare-")), 0)
            except ProcessLookupError:
                return True

        if enter() == 0:
            snapshot(10, 20)
            if name == "trainer 1":
                wait(lambda: glob.glob("spare-*") and all(map(is_gone, glob.glob("spare-*"))))
                die()
            enter(1)
        finish(1)
    """)
    launch(command, restarts=RestartOptions(3, spares=1), **JOB)
    seen = Output(capsys)
    assert "[spare] KeyError: 'DTRANS_ROLE'\n" in seen.err
    ended, again = seen.said
    assert ended == (
        "a spare ended with exit code 1 before it had a role, and the job has no more spares; let "
        "the script read variables of its role only after dtrans.Role.from_env(), or leave spares "
        "out"
    )
    assert again.startswith("trainer 1 failed with signal SIGKILL; it starts again, ")


@pytest.mark.rotated
def test_spares_without_snapshots_are_reported(
    script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The warning is printed after a failure, and at the end, if a server writes no snapshots."""
    command = script("""
        if name.startswith("pserver"):
            generations.note_no_snapshots()
        wait(lambda: generations.lacks_snapshots)
        if name == "trainer 1" and os.environ["DTRANS_RESTARTS"] == "0":
            die()
    """)
    launch(command, restarts=RestartOptions(1, spares=1), **JOB)
    said = Output(capsys).said
    assert len(said) == 3 and said[0] == said[2]
    assert said[0].startswith(
        "no spare has started, because the servers write no snapshots; pass snapshot"
    )
    launch(script("enter(); finish(0)"), restarts=RestartOptions(1, spares=1), **JOB)
    assert not Output(capsys).said


def test_the_loss_of_a_role_that_starts_is_no_lack_of_snapshots(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The servers may not serve yet. A report of an earlier launch has no meaning for this
    launch."""
    (tmp_path / "snapshots").mkdir()
    RoleFolder(tmp_path / "snapshots", "pserver 0").note_no_snapshots()
    command = script("""
        if name == "trainer 1" and os.environ["DTRANS_RESTARTS"] == "0":
            die()
        enter()
        finish(1)
    """)
    launch(command, restarts=RestartOptions(1, tmp_path / "snapshots", spares=1), **JOB)
    (said,) = Output(capsys).said
    assert said.startswith("trainer 1 failed with signal SIGKILL; all roles start again (restart 1")


def test_spares_end_with_a_killed_launcher(tmp_path: Path) -> None:
    """A killed launcher also ends spares that still import modules, and do not read the launcher's
    messages."""
    imports = """
import os, socket, threading
if "DTRANS_SPARE" in os.environ:
    connection = socket.create_connection(("127.0.0.1", int(os.environ["TEST_PORT"])))
    connection.sendall(b"spare\\n")
    threading.Event().wait()
"""
    command = script_writer(tmp_path, imports + GENERATIONS)("enter(); forever()")
    options = ["--restarts", "1", "--spares", "2", "--trainers", "1"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE)
        port = str(listener.getsockname()[1])
        launcher = subprocess.Popen(
            [sys.executable, "-m", "dtrans", "launch", *options, *command[1:]],
            cwd=ROOT,
            env={**os.environ, "TEST_PORT": port},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        with launcher:
            spares = [came(listener) for _ in range(2)]
            launcher.send_signal(signal.SIGKILL)
    assert [name for name, _ in spares] == ["spare", "spare"]
    assert_gone(*(connection for _, connection in spares))


def test_spares_are_for_lost_roles_of_servers_on_this_host() -> None:
    one = RestartOptions(1, spares=1)
    for wanted, options, message in [
        (RestartOptions(1, spares=-1), {}, "spares must be 0 or more, it is -1"),
        (RestartOptions(0, spares=1), {}, "spares=1 needs restarts, .* write restarts=3, or leave"),
        (one, {"mode": "nccl2"}, "spares=1: in mode='nccl2' all roles start again .* leave spares"),
        (one, {"site": ElsewhereSite()}, "spares=1: spares are for roles on this host; leave"),
        (one, {"on_trainer_loss": "drop"}, "spares=1: on_trainer_loss='drop' continues without"),
        (one, {"inherit_stdout": True}, "spares=1: a spare cannot inherit standard output; leave"),
    ]:
        with pytest.raises(ConfigError, match=message):
            launch(["true"], restarts=wanted, **options)


# -- losses without an end -------------------------------------------------------------------------


def test_no_role_starts_again_forever(script: Any) -> None:
    """A role that is lost again before servers have written another snapshot ends the job."""
    command = script("""
        number = enter()
        snapshot(10, 20)
        while True:
            wait(lambda: all_in(number))
            if name == "trainer 1":
                die()
            number = enter(number + 1)
    """)
    with pytest.raises(LaunchError) as e:
        launch(command, restarts=9, **JOB)
    assert str(e.value).startswith(
        "trainer 1 failed with signal SIGKILL, and the other roles were ended; it was lost again "
        "before a new snapshot; "
    )
    assert (e.value.role, e.value.code) == ("trainer 1", 137)


def test_all_roles_do_not_start_again_forever(script: Any) -> None:
    command = script("""
        enter()
        if name == "trainer 1":
            wait(lambda: all_in(generations.current().number))
            die()
        forever()
    """)
    with pytest.raises(LaunchError, match="SIGKILL, .* it was lost again before a new snapshot; "):
        launch(command, restarts=9, **JOB)


def test_a_newer_snapshot_allows_another_loss(
    script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command = script("""
        number = enter()
        while number < 2:
            wait(lambda: all_in(number))
            snapshot(10 * number + 10)
            if name == "trainer 1":
                die()
            number = enter(number + 1)
        finish(2)
    """)
    launch(command, restarts=2, **JOB)
    seen = Output(capsys)
    assert seen.entered == {role: [(0, None), (1, 10), (2, 20)] for role in ROLES}
    assert [len(set(seen.pids[role])) for role in ROLES] == [1, 1, 1, 3]


def test_the_last_loss_ends_the_job(script: Any) -> None:
    command = script("""
        number = enter()
        while True:
            wait(lambda: all_in(number))
            snapshot(10 * number + 10)
            if name == "trainer 1":
                die()
            number = enter(number + 1)
    """)
    with pytest.raises(LaunchError, match="^trainer 1 failed with signal SIGKILL") as e:
        launch(command, restarts=1, **JOB)
    assert "lost again" not in str(e.value)


# -- reports ---------------------------------------------------------------------------------------


def test_a_reported_role_is_ended_and_starts_again(
    script: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the next generation, the report is still in the folder, but has no effect."""
    monkeypatch.setattr(lost_reports, "PATIENCE", 0.1)
    command = script("""
        if enter() == 0:
            snapshot(10, 20)
            wait(lambda: all_in(0))
            if name == "trainer 0":
                generations.report_lost(0, "pserver " + servers[1], "no answer\\nfor 9 s")
            if name == "pserver 1":
                forever()
            enter(1)
        if name == "trainer 0":
            generations.report_lost(0, "trainer 1", "an old report")
        finish(1)
    """)
    launch(command, restarts=3, **JOB)
    seen = Output(capsys)
    assert seen.said == [
        "trainer 0 has lost pserver 1 (no answer for 9 s), which is ended and starts again",
        "pserver 1 failed with signal SIGKILL; it starts again, and all roles go back to step 20 "
        "(restart 1 of 3)",
    ]
    assert [len(set(seen.pids[role])) for role in ROLES] == [1, 2, 1, 1]


def test_a_reported_role_may_print_its_error(
    script: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_reports, "PATIENCE", PATIENCE)
    command = script("""
        enter()
        snapshot(10, 20)
        wait(lambda: all_in(0))
        if name == "trainer 0":
            generations.report_lost(0, "trainer 1", "the connection ended")
        if name == "trainer 1":
            wait(lambda: generations.lost(0))
            sys.exit("ValueError: this is why")
        forever()
    """)
    with pytest.raises(LaunchError, match="^trainer 1 failed .*\nValueError: this is why$"):
        launch(command, restarts=3, **JOB)
    assert not Output(capsys).said


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_report_ends_the_job_if_no_restart_can_follow(
    has_ended: bool, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The role that reports would otherwise wait for the other one."""
    monkeypatch.setattr(lost_reports, "PATIENCE", 0.1)
    command = script(f"""
        if enter() == 0:
            snapshot(10, 20)
            wait(lambda: all_in(0))
            if name == "trainer 0":
                die()
            enter(1)
        wait(lambda: all_in(1))
        if name == "trainer 0":
            generations.report_lost(1, "trainer 1", "the connection ended")
        if name == "trainer 1" and {has_ended}:
            sys.exit()
        forever()
    """)
    with pytest.raises(LaunchError) as e:
        launch(command, restarts=1 + has_ended, **JOB)
    assert str(e.value) == (
        "trainer 0 has lost trainer 1, and all roles were ended; the reason was:\n"
        "the connection ended"
    )
    assert e.value.role == "trainer 1"


# -- snapshots at losses ---------------------------------------------------------------------------


def test_a_signal_ends_the_wait_for_snapshots_at_a_loss(
    script: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job ends without a restart."""
    monkeypatch.setattr(snapshots_at_loss, "WRITE_PATIENCE", PATIENCE)
    command = script(f"""
        signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
        generations.enter(generations.current(), writes_newest=True)
        wait(lambda: all_in(0))
        if name == "trainer 1":
            die()
        wait(lambda: generations.current().is_ending)
        if name == "pserver 0":
            os.kill({os.getpid()}, signal.SIGTERM)
        forever()
    """)
    with pytest.raises(SystemExit) as e:
        launch(command, restarts=3, **JOB)
    assert e.value.code == 128 + signal.SIGTERM
    assert not Output(capsys).said


# -- the launcher itself ---------------------------------------------------------------------------


def test_a_killed_launcher_is_started_again(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = script("""
        print("run", generations.run)
        if enter() == 0:
            snapshot(10, 20)
            forever()
        finish(1)
    """)
    snapshots = tmp_path / "snapshots"
    options = [
        "--restarts",
        "1",
        "--snapshots",
        str(snapshots),
        "--trainers",
        "2",
        "--pservers",
        "2",
    ]
    first = subprocess.Popen(
        [sys.executable, "-m", "dtrans", "launch", *options, *command[1:]],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with first:
        folder = LauncherFolder(snapshots)
        servers = [name for name in ROLES if "pserver" in name]
        until(
            lambda: folder.newest_snapshot(servers) == 20 and len(folder.marks()) == 4, "a snapshot"
        )
        with pytest.raises(
            ConfigError, match="snapshots='.*snapshots' is the folder of a job that runs"
        ):
            launch(command, restarts=RestartOptions(1, snapshots), **JOB)
        first.send_signal(signal.SIGKILL)
        assert first.stdout is not None
        # standard output ends when the last role has ended
        runs = {line.split()[-1] for line in first.stdout if "] run " in line}

    with pytest.raises(
        ConfigError, match="has the snapshots of a job with 2 trainers and 2 pservers"
    ):
        launch(command, restarts=RestartOptions(1, snapshots), trainers=2, pservers=1)
    run, endpoints = folder.run, folder.endpoints
    launch(command, restarts=RestartOptions(1, snapshots), **JOB)
    out = capsys.readouterr()
    assert f"dtrans status {' '.join(endpoints)}\n" in out.err
    assert f"[launcher] the job of {snapshots} continues at step 20\n" in out.err
    again = {line.split()[-1] for line in out.out.splitlines() if "] run " in line}
    assert runs == again == {run}
    assert not folder.is_used  # the job has ended without an error
    assert (
        sorted(line.split()[2:5] for line in out.out.splitlines() if "enters" in line)
        == [["enters", "1", "20"]] * 4
    )


def test_the_folder_of_snapshots_is_temporary(
    script: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRANS_SNAPSHOTS", "/of/another/launch")
    found = "print(os.environ.get('DTRANS_SNAPSHOTS'), bool(generations) and os.path.isdir(generations.path))"
    launch(script(found), restarts=1, **JOB)
    ((path, exists),) = {tuple(x.split()[2:]) for x in capsys.readouterr().out.splitlines()}
    assert exists == "True" and not os.path.exists(path)
    launch(script(found), **JOB)
    assert {x.split()[2] for x in capsys.readouterr().out.splitlines()} == {"None"}


class ElsewhereSite(Site):
    is_this_host = False


CACHE = "JAX_COMPILATION_CACHE_DIR"
SHORTEST = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
PRINT_CACHE = f"""
    found = [os.environ.get(x) for x in ({CACHE!r}, {SHORTEST!r})]
    found += [os.path.isdir(found[0] or ""), "lost" if name == "trainer 1" else ""]
    print(" ".join(map(str, found)))  # one write: the launcher may end this role
    if name == "trainer 1" and os.environ.get("DTRANS_RESTARTS") == "0":
        die()
"""


def test_roles_share_a_temporary_compilation_cache(
    script: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CACHE, raising=False)
    monkeypatch.delenv(SHORTEST, raising=False)
    launch(script(PRINT_CACHE), restarts=1, **JOB)
    lines = [line.split()[2:] for line in capsys.readouterr().out.splitlines()]
    assert lines.count([*lines[0][:3], "lost"]) == 2
    ((path, shortest, exists),) = {tuple(line[:3]) for line in lines}
    assert (shortest, exists) == ("0", "True") and not os.path.exists(path)


@pytest.mark.parametrize(
    ("change", "options", "expected"),
    [
        ({}, {"restarts": 0}, "None None"),
        ({}, {"restarts": 1, "site": ElsewhereSite()}, "None None"),
        ({CACHE: "of/the/user"}, {"restarts": 1}, "of/the/user None"),
        ({"JAX_ENABLE_COMPILATION_CACHE": "0"}, {"restarts": 1}, "None None"),
    ],
)
def test_jobs_without_restarts_and_settings_of_the_user_have_no_such_cache(
    change: dict[str, str],
    options: dict[str, Any],
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(CACHE, raising=False)
    monkeypatch.delenv(SHORTEST, raising=False)
    command = script_writer(tmp_path, "import os\n")(
        f"print(os.environ.get({CACHE!r}), os.environ.get({SHORTEST!r}))"
    )
    launch(command, env=change, **{**JOB, **options})
    assert {line.split("] ")[1] for line in capsys.readouterr().out.splitlines()} == {expected}


def test_snapshots_are_for_servers_and_restarts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    one = RestartOptions(1, "x")
    for wanted, options, message in [
        (
            RestartOptions(0, "x"),
            {},
            "snapshots='x' needs restarts, .* write restarts=3, or leave snapshots",
        ),
        (one, {"mode": "nccl2"}, "snapshots='x': mode='nccl2' has no parameter servers"),
        (RestartOptions(1, tmp_path / "file"), {}, "snapshots='.*file' cannot be created: "),
    ]:
        with pytest.raises(ConfigError, match=message):
            launch(["true"], restarts=wanted, **options)
