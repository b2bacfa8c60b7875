"""Snapshots at the failure of a process: gates, server loops, the folder, and the launcher's wait, each
tested alone.

`test_simulation` tests them together.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import re
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import optax
import pytest
import table_jobs
from helpers import mlp_batch, mlp_loss, mlp_params

import dtrans
from dtrans.errors import ConfigError, LaunchError
from dtrans.parameter_server.replica_placement import backups_of
from dtrans.protocol import wire
from dtrans.protocol.generations import Generation, ReplacedError
from dtrans.protocol.refusals import Refusals
from dtrans.protocol.server.generation_gate import GenerationGate
from dtrans.protocol.server.peer_line import PeerLine
from dtrans.protocol.server.serving import Serving
from dtrans.protocol.server.sync_server import SyncServer
from dtrans.protocol.server.trainer_registry import TrainerRegistry
from dtrans.run.distributed.restarts import snapshots_at_loss
from dtrans.run.distributed.restarts.job_generations import JobGenerations
from dtrans.run.distributed.role import roles_of
from dtrans.run.net import shared_files
from dtrans.run.net.launcher_folder import LauncherFolder
from dtrans.run.net.role_folder import RoleFolder
from dtrans.run.parameter_server.server_saves import ServerSaves, ServerStorage
from dtrans.run.parameter_server.snapshots import ServerSnapshots, check_snapshots
from dtrans.run.parameter_server.sync_update import SyncUpdate
from dtrans.run.parameter_server.update import ServerUpdate
from tools.simulate.case import Case, Event
from tools.simulate.verdict import simulated


AT_LOSS = dtrans.Snapshots(10, at_loss=True)
TWO = "127.0.0.1:6174,127.0.0.1:6175"
ADAM = optax.adam(1e-2)


def test_a_closed_gate_stores_greetings_and_drops_all_other_messages() -> None:
    said: list[str] = []
    gate = GenerationGate(Generation(2), lambda to, op, /, blocks=(), **fields: said.append(op))
    known, greeting = wire.Message("send", {"step": 0}), wire.Message("hello", {"generation": 2})
    assert gate.admits(b"0", known, is_known=True) and gate.admits(b"0", greeting, is_known=True)
    gate.is_closed = True
    for message in (known, greeting):
        assert not gate.admits(b"0", message, is_known=True)
    assert gate.early == {b"0": greeting} and said == ["waiting"]


def test_trainers_wait_longer_than_their_deadline_for_a_slow_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Servers send `waiting` during the write, also to a trainer whose messages they drop."""
    monkeypatch.setattr("tools.simulate.launcher.drawn_delay", lambda *_: lambda: 4.0)
    case = Case(
        seed=0, mode="sync", steps=(60, 60), servers=((6,), (2, 3)), deadline=3.0, snapshots=100
    )
    events = (Event("crash", 12.0, "trainer 1"),)
    found = simulated(dataclasses.replace(case, at_loss=True, pace=0.5, events=events))
    assert not found.faults


def test_a_server_does_not_wait_for_the_write_of_its_newest_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server answers messages, and enters the next generation.

    After that, it skips its later writes.
    """
    launcher, folder = LauncherFolder(tmp_path), RoleFolder(tmp_path, "pserver 0")
    launcher.grant(Generation(), "a run", 2, ["127.0.0.1:6174"])
    plan = planned()
    (endpoint,) = plan.servers
    snapshots = ServerSnapshots(folder, plan, endpoint, 100, at_loss=True)
    update = ServerUpdate.from_program(plan.servers[endpoint].main)
    state = dtrans.Executor().run(plan.servers[endpoint].startup)
    server = ServerSaves(ServerStorage(snapshots=snapshots), wake=lambda: None)
    trainers = TrainerRegistry(update.served, deadline=9.0, plan={})
    made = SyncUpdate(update, state, 2, keeps_old=True)
    made.old = made.state
    kind = SyncServer(update.served, made, trainers, lambda *_, **__: None, step=8)
    start = snapshots.begin(state)
    may_write, begun, written = threading.Event(), threading.Event(), list[str]()

    def save_serving(path: Path, *args: Any, **options: Any) -> None:
        begun.set()
        assert may_write.wait(60.0)
        written.append(path.name)

    monkeypatch.setattr("dtrans.checkpoint.api.save_serving", save_serving)
    protocol = Serving(kind, trainers, lambda *_, **__: None, Refusals(logging.getLogger()))
    server.begin(
        protocol, made, made.state, dataclasses.replace(start, generation=Generation(0, 8))
    )
    server.write_newest([])
    assert begun.wait(60.0) and launcher.marks()["pserver 0"].ended == -1
    folder.enter(Generation(1))
    may_write.set()
    server.end()
    assert written == ["8"] and launcher.marks()["pserver 0"].ended == -1
    assert launcher.marks()["pserver 0"].snapshots == ()


def test_the_next_generation_is_not_ending(tmp_path: Path) -> None:
    launcher, server = LauncherFolder(tmp_path), RoleFolder(tmp_path, "pserver 0")
    launcher.grant(Generation(), "a run", 2, ["127.0.0.1:1"], {"pserver 0": 0})
    launcher.announce_end()
    assert server.current() == Generation(0, None, is_ending=True)
    assert (launcher.run, launcher.trainers, launcher.endpoints) == ("a run", 2, ("127.0.0.1:1",))
    launcher.grant(Generation(1, 20), "a run")
    assert server.current() == Generation(1, 20)


def test_an_answer_of_an_earlier_generation_does_not_count(tmp_path: Path) -> None:
    launcher, server = LauncherFolder(tmp_path), RoleFolder(tmp_path, "pserver 0")
    launcher.grant(Generation(), "a run")
    server.enter(Generation(), writes_newest=True)
    server.note_snapshot(0, 7)
    assert server.has_written(7) and not server.has_written(8)
    server.note_end(0)
    assert launcher.marks()["pserver 0"].ended == 0
    server.enter(Generation(1, 7), writes_newest=True)
    server.note_end(0)
    mark = launcher.marks()["pserver 0"]
    assert (mark.ended, mark.writes_newest, mark.snapshots) == (-1, True, (7,))


# -- the launcher ----------------------------------------------------------------------------------


class Job:
    """A launcher's generations, and the reports of the two servers and the trainer of its job."""

    def __init__(self, path: Path, *, writes_newest: bool, writes_replicas: bool = False) -> None:
        roles = roles_of(1, ("127.0.0.1:1", "127.0.0.1:2"))
        self.generations = JobGenerations(path, roles)
        self.folders = {role.name: RoleFolder(path, role.name) for role in roles}
        for name, folder in self.folders.items():
            is_server = "pserver" in name
            folder.enter(
                Generation(),
                writes_newest=writes_newest and is_server,
                writes_replicas=writes_replicas and is_server,
            )
        self.looks = 0

    def answer(self, name: str, *steps: int) -> None:
        assert self.folders[name].current().is_ending
        for step in steps:
            self.folders[name].note_snapshot(0, step)
        self.folders[name].note_end(0)


def test_the_launcher_waits_for_the_newest_states_of_all_live_servers(tmp_path: Path) -> None:
    job = Job(tmp_path, writes_newest=True)
    # the first check precedes the announcement
    answers = {2: ("pserver 0", 7, 6), 4: ("pserver 1", 6)}

    def running() -> set[str]:
        job.looks += 1
        if job.looks in answers:
            name, *steps = answers[job.looks]
            job.answer(str(name), *map(int, steps))
        return {"pserver 0", "pserver 1"}

    job.generations.end_generation("trainer 0", running)
    assert job.looks == 4
    job.generations.go_back("trainer 0")
    assert job.generations.generation == Generation(1, 6)


def test_other_servers_learn_which_servers_are_lost(tmp_path: Path) -> None:
    job = Job(tmp_path, writes_newest=True, writes_replicas=True)
    looks = iter([{"pserver 0"}, set[str]()])
    job.generations.end_generation("pserver 1", lambda: next(looks))
    assert job.folders["pserver 0"].current() == Generation(
        0, None, is_ending=True, lost=("pserver 1",)
    )


def test_a_server_that_is_lost_during_the_writes_is_announced_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backup answers again after it has written the lost server's states."""
    monkeypatch.setattr(snapshots_at_loss, "WRITE_PATIENCE", float("inf"))
    job = Job(tmp_path, writes_newest=True, writes_replicas=True)
    live = job.folders["pserver 0"]

    def running() -> set[str]:
        job.looks += 1
        if job.looks == 2:
            job.answer("pserver 0", 7)
        if job.looks < 4:
            return {"pserver 0", "pserver 1"}
        if job.looks == 5:
            assert live.current().lost == ("pserver 1",)
            live.of_lost("pserver 1", 0).note_snapshot(0, 7)
            live.note_end(0, live.current().lost)
        return {"pserver 0"}

    job.generations.end_generation("trainer 0", running)
    assert job.looks == 5
    job.generations.start_again("trainer 0")
    assert job.generations.generation == Generation(1, 7)


def test_a_backup_writes_in_place_of_a_lost_server(tmp_path: Path) -> None:
    job = Job(tmp_path, writes_newest=True)
    lost = job.folders["pserver 0"].of_lost("pserver 1", 0)
    job.folders["pserver 0"].note_snapshot(0, 7)
    lost.note_snapshot(0, 7)
    job.generations.go_back("pserver 1")
    assert job.generations.generation == Generation(1, 7)
    with pytest.raises(ReplacedError):  # another process of the lost server has started
        lost.note_snapshot(0, 8)


@pytest.mark.parametrize(
    ("lost", "running"),
    [
        pytest.param("pserver 1", {"pserver 0", "pserver 1", "trainer 0"}, id="the lost role"),
        pytest.param("trainer 0", {"pserver 0"}, id="another role, such as one on a lost host"),
    ],
)
def test_the_launcher_does_not_wait_if_a_server_is_lost(
    lost: str, running: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No snapshot can become complete."""
    monkeypatch.setattr(snapshots_at_loss, "WRITE_PATIENCE", float("inf"))
    job = Job(tmp_path, writes_newest=True)
    job.generations.end_generation(lost, lambda: running)
    assert not job.folders["pserver 0"].current().is_ending


def test_the_launcher_does_not_wait_for_a_server_that_ends_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots_at_loss, "WRITE_PATIENCE", float("inf"))
    job = Job(tmp_path, writes_newest=True)
    looks = iter([{"pserver 0", "pserver 1"}, {"pserver 0"}])
    job.generations.end_generation("trainer 0", lambda: next(looks))
    assert job.folders["pserver 0"].current().is_ending


def test_the_launcher_does_not_wait_when_the_job_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A signal, or the time limit of the job, ends the wait."""
    monkeypatch.setattr(snapshots_at_loss, "WRITE_PATIENCE", float("inf"))
    job = Job(tmp_path, writes_newest=True)
    stops = iter([False, True, True])
    job.generations.end_generation(
        "trainer 0", lambda: {"pserver 0", "pserver 1"}, lambda: next(stops)
    )
    assert not capsys.readouterr().err


def test_a_job_continues_from_an_earlier_snapshot_if_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launcher removes unneeded snapshots, and then grants the next generation."""
    job = Job(tmp_path, writes_newest=True)
    for name in ("pserver 0", "pserver 1"):
        for step in (10, 20):
            (tmp_path / str(step)).mkdir(exist_ok=True)
            job.folders[name].note_snapshot(0, step)
    write = shared_files.write_file

    def write_file(path: Path, contents: Any) -> None:
        if (tmp_path / "10").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, contents)

    monkeypatch.setattr(shared_files, "write_file", write_file)
    job.generations.end_generation("trainer 0", lambda: {"pserver 0", "pserver 1"})
    text = "the servers write no snapshot at this failure, because .* cannot be written: No space left on"
    assert re.search(text, capsys.readouterr().err)
    job.folders["pserver 0"].report_lost(0, "trainer 0", "it went away")  # writes a warning
    job.generations.go_back("trainer 0")
    assert job.folders["pserver 0"].current() == Generation(1, 20)
    assert {x.name for x in tmp_path.iterdir() if x.name.isdecimal()} == {"20"}

    (tmp_path / "10").mkdir()
    monkeypatch.setattr(LauncherFolder, "remove_other_snapshots", lambda *_: None)
    with pytest.raises(LaunchError, match="cannot be written: No space left .*; free space there"):
        job.generations.go_back("trainer 0")


def test_the_launcher_waits_for_a_limited_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(snapshots_at_loss, "WRITE_PATIENCE", 0.1)
    job = Job(tmp_path, writes_newest=True)
    job.folders["pserver 0"].note_end(0)
    job.generations.end_generation("trainer 0", lambda: {"pserver 0", "pserver 1"})
    assert "pserver 1 did not write a snapshot within 0 s" in capsys.readouterr().err


def test_other_jobs_do_not_wait(tmp_path: Path) -> None:
    job = Job(tmp_path, writes_newest=False)
    job.generations.end_generation("trainer 0", lambda: {"pserver 0", "pserver 1"})
    assert not job.folders["pserver 0"].current().is_ending


# -- plans -----------------------------------------------------------------------------------------


def planned(tx: Any = ADAM, **options: Any) -> Any:
    step = dtrans.make_train_step(mlp_loss, tx)
    params = mlp_params()
    init = lambda: (params, tx.init(params))
    main = dtrans.trace(step, *init(), *mlp_batch())
    return dtrans.pserver(main, dtrans.trace(init), trainers=2, **options)


def test_plans_without_a_common_newest_state_are_refused() -> None:
    check_snapshots(planned(), AT_LOSS)
    with pytest.raises(ConfigError, match="snapshots: at_loss=True needs .* pass mode=dtrans.Sync"):
        check_snapshots(planned(mode=dtrans.Async()), AT_LOSS)
    tables = table_jobs.planned(optax.sgd(0.5), table_jobs.LAZY, 2, 1)
    check_snapshots(tables, AT_LOSS)
    # for the table, a server stores only old values of the rows that a step changes
    assert [*AT_LOSS.extra_bytes(tables).values()] == [2 * table_jobs.D * 4]


def test_replicas_need_a_trained_parameter_on_each_server() -> None:
    """A server without gradients has no inputs of a step that its backup could acknowledge."""
    replicas = dtrans.Snapshots(10, replicas=1)
    tables = table_jobs.planned(optax.sgd(0.5), table_jobs.LAZY, 2, 2)
    check_snapshots(tables, replicas)
    # a backup stores the table once, and dense parameters as two states and six copies of gradients
    sizes = [sum(found.values()) for found in tables.server_bytes.values()]
    table = table_jobs.V // 2 * table_jobs.D * 4
    extra = [9 * (size - table) + table for size in sizes]
    assert [*replicas.extra_bytes(tables).values()] == extra
    more = ",".join(f"127.0.0.1:{6174 + k}" for k in range(9))
    empty = planned(pservers=more)
    without = next(ep for ep, sizes in empty.server_bytes.items() if not sum(sizes.values()))
    check_snapshots(empty, AT_LOSS)
    with pytest.raises(ConfigError, match=f"pserver {without} has none; write fewer pservers"):
        check_snapshots(empty, replicas)
    check_snapshots(
        planned(pservers=more, placement=dtrans.BlockPlacement(min_block_size=1)), replicas
    )

    decay = optax.chain(optax.set_to_zero(), optax.add_decayed_weights(0.1))
    decayed = planned(decay, pservers=TWO)
    assert all(sum(sizes.values()) for sizes in decayed.server_bytes.values())
    with pytest.raises(ConfigError, match="min_block_size=N. with N smaller than 8192"):
        check_snapshots(decayed, replicas)


def test_replicas_need_several_servers() -> None:
    replicas = dtrans.Snapshots(10, replicas=1)
    assert replicas.at_loss
    check_snapshots(planned(pservers=TWO), replicas)
    with pytest.raises(ConfigError, match="snapshots: replicas=1 stores a copy .* has one server"):
        check_snapshots(planned(), replicas)
    with pytest.raises(ConfigError, match="snapshots: replicas=1 needs a common step"):
        check_snapshots(planned(mode=dtrans.Async()), replicas)
    with pytest.raises(ConfigError, match="replicas"):
        dtrans.Snapshots(10, replicas=2)


@pytest.mark.parametrize(
    ("endpoints", "backups"),
    [
        (["a:1", "a:2"], ["a:2", "a:1"]),
        (["a:1", "a:2", "a:3"], ["a:2", "a:3", "a:1"]),
        (["a:1", "b:1", "a:2", "b:2"], ["b:1", "a:2", "b:2", "a:1"]),
        (["a:1", "a:2", "b:1"], ["b:1", "b:1", "a:1"]),
        (["a:1", "a:2", "a:3", "b:1", "b:2"], ["b:1", "b:2", "b:1", "a:1", "a:2"]),
    ],
)
def test_a_replica_is_on_another_server_and_host(endpoints: list[str], backups: list[str]) -> None:
    assert list(backups_of(endpoints).values()) == backups


def test_a_server_sends_its_backup_one_merged_gradient_in_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server sends its backup its state at the beginning, and then one gradient in each step,
    merged from three trainers."""
    sent: dict[str, list[int]] = {}
    send = PeerLine.send

    def count(line: PeerLine, step: int, messages: Iterable[list[Any]]) -> None:
        listed = list(messages)
        arrays = sum(frame.nbytes for _, *frames in listed for frame in frames)
        sent.setdefault(line.me, []).append(arrays)
        send(line, step, listed)

    monkeypatch.setattr(PeerLine, "send", count)
    case = Case(seed=0, mode="sync", steps=(4, 4, 4), servers=((6,), (2, 3)), snapshots=20)
    found = simulated(dataclasses.replace(case, at_loss=True, replicas=1))
    assert not found.faults
    assert sent == {"127.0.0.1:1": [24] * 5, "127.0.0.1:2": [20] * 5}


@pytest.mark.parametrize("options", [{"every": 0}, {"every": 2.5}, {"every": 1, "at_loss": 1}])
def test_wrong_options_are_named(options: Any) -> None:
    with pytest.raises(ConfigError, match="at_loss" if "at_loss" in options else "every"):
        dtrans.Snapshots(**options)
