"""All runs of small simulated jobs with snapshots, in which a process may die at any moment."""

from __future__ import annotations

import re

import pytest
from planted_in_snapshots import PLANTED_IN_BREAKS, PLANTED_IN_SNAPSHOTS
from typer.testing import CliRunner

from tools.simulate.__main__ import app
from tools.simulate.choices import Choice, ChosenJob, without_times
from tools.simulate.explore import Explorer, small_case
from tools.simulate.launcher import SNAPSHOT


ROLES = ("trainer 0", "trainer 1", "pserver 127.0.0.1:1")


@pytest.mark.plan
def test_all_runs_without_a_death_hold() -> None:
    found = Explorer(small_case(), deaths=0).run()
    assert not found.faults, str(found)
    assert found.states > 150
    assert found.learned < found.transitions / 3
    assert found.ends


@pytest.mark.plan
def test_all_runs_in_which_one_role_dies_hold() -> None:
    found = Explorer(small_case()).run()
    assert not found.faults, str(found)
    assert found.states > 10_000


@pytest.mark.plan
def test_all_runs_in_which_a_trainer_is_dropped_hold() -> None:
    found = Explorer(small_case(steps=1, quorum=1), roles=["trainer 1"]).run()
    assert not found.faults, str(found)
    assert found.states > 1000


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_all_runs_in_which_a_trainer_joins_again_hold() -> None:
    found = Explorer(small_case(steps=1, quorum=1, replaces=True), roles=["trainer 1"]).run()
    assert not found.faults, str(found)
    assert found.states > 4_000


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("quorum", [0, 1], ids=["restarts", "drops trainers"])
@pytest.mark.parametrize("role", ROLES)
def test_all_runs_of_two_steps_hold(role: str, quorum: int) -> None:
    found = Explorer(small_case(quorum=quorum), roles=[role]).run()
    assert not found.faults, str(found)
    assert found.states > 1_000


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_all_runs_of_two_servers_hold() -> None:
    found = Explorer(small_case(servers=2), deaths=0).run()
    assert not found.faults, str(found)
    assert found.states > 1000


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_all_runs_of_two_servers_in_which_one_role_dies_hold() -> None:
    found = Explorer(small_case(steps=1, servers=2)).run()
    assert not found.faults, str(found)
    assert found.states > 1_000_000


# Faults that show in a job of two trainers, one server and two steps if a process dies
SHOWN = (
    "greetings of later generations are dropped",
    "a snapshot has the state of the next step",
    "a trainer replays with another batch",
    "a server goes back and keeps received gradients",
    "a trainer ignores that servers go back",
)
SHOWN_LATE = ("a server has no fence", "a trainer keeps its step number")
CASES = (*SHOWN, *(pytest.param(x, marks=pytest.mark.soak) for x in SHOWN_LATE))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("what", CASES)
def test_a_planted_fault_is_found_without_a_seed(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    PLANTED_IN_SNAPSHOTS[what](monkeypatch)
    found = Explorer(small_case()).run()
    assert found.faults
    assert any(x.startswith("kill of ") for x in found.events)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("what", PLANTED_IN_BREAKS)
def test_a_planted_fault_is_found_by_a_death_and_a_break(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    PLANTED_IN_BREAKS[what](monkeypatch)
    found = Explorer(small_case(steps=1), breaks=1).run()
    assert any(x.startswith("break of ") for x in found.events)


def test_a_run_is_a_function_of_its_events() -> None:
    states = []
    with without_times():
        for _ in range(2):
            job = ChosenJob(small_case())
            while not job.launcher.is_over:
                job.do(Choice("event", min(job.clock.channels, key=str)))
            states.append((job.events, job.parts()))
            assert not job.faults()
    assert states[0] == states[1]


def test_a_snapshot_of_undone_steps_does_not_count() -> None:
    """The server reports the snapshot after the launcher has dropped a trainer at an earlier snapshot."""
    with without_times():
        job = ChosenJob(small_case(quorum=1))
        writes = "pserver 127.0.0.1:1", 0, SNAPSHOT
        job.do(Choice("event", writes))
        while (
            writes not in job.clock.channels
        ):  # until the server begins to write the next snapshot
            job.do(Choice("event", min(job.clock.channels, key=str)))
        for name in ("trainer 1", "pserver 127.0.0.1:1"):
            job.do(Choice("kill", name))
            job.do(Choice("event", ("launcher", 0, ("_on_end", (name, 0)))))
            if writes in job.clock.channels:
                job.do(Choice("event", writes))
    assert [record.snapshot for record in job.launcher.records] == [None, 0, 0]


def test_an_effect_outside_of_its_footprint_ends_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the footprint of an operation lacked the connections, its effect would be reused for
    different states."""
    monkeypatch.setattr("tools.simulate.explore._footprint", lambda parts, choice: None)
    with pytest.raises(AssertionError, match="more than its footprint"):
        Explorer(small_case(), deaths=0).run()


def test_the_command_prints_the_number_of_states() -> None:
    done = CliRunner().invoke(app, ["--exhaustive", "--deaths", "0"])
    assert done.exit_code == 0
    assert re.match(r"\d+ states, \d+ transitions, \d+ ends \(.*\)\nas it must be\n", done.output)


def test_the_command_prints_the_events_that_lead_to_a_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    PLANTED_IN_SNAPSHOTS["greetings of later generations are dropped"](monkeypatch)
    done = CliRunner().invoke(app, ["--exhaustive"])
    assert done.exit_code == 1
    assert "\n  kill of trainer 0\n" in done.output
    assert done.output.endswith("wrong:\n  nothing can happen any more\n")
