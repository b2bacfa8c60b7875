"""Generations and snapshots: gates, members, server loops, the folder, and `job.steps`, each tested alone.

`test_simulation` tests them together.
"""

from __future__ import annotations

import errno
import functools
import sys
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import optax
import pytest
import table_jobs
from helpers import mlp_batch, mlp_loss, mlp_params

import dtrans
from dtrans.checkpoint import api as checkpoint
from dtrans.checkpoint.runs import SaveId
from dtrans.errors import ConfigError, LostPeerError, PeerError, Rewound, StateError, WireError
from dtrans.job import Job
from dtrans.parameter_server.plan import PServerPlan
from dtrans.protocol import wire
from dtrans.protocol.generations import Generation, NewGeneration, ReplacedError
from dtrans.protocol.refusals import Refusals
from dtrans.protocol.server.generation_gate import GenerationGate
from dtrans.protocol.server.server_loop import ServerLoop
from dtrans.protocol.server.serving import Serving
from dtrans.protocol.server.sync_server import SyncServer
from dtrans.protocol.server.trainer_registry import TrainerRegistry, log
from dtrans.protocol.trainer.generation_member import GenerationMember
from dtrans.protocol.trainer.operation import Operation, nothing
from dtrans.protocol.transport import Event
from dtrans.run.net.ended_roles import EndedRoles, ended_roles
from dtrans.run.net.generation_folder import VARIABLE
from dtrans.run.net.launcher_folder import LauncherFolder
from dtrans.run.net.role_folder import RoleFolder
from dtrans.run.net.role_marks import LostReport, RoleMark
from dtrans.run.parameter_server.server_connections import ServerConnections
from dtrans.run.parameter_server.snapshots import GenerationStart, ServerSnapshots, check_snapshots
from dtrans.run.parameter_server.state_writer import StateWriter
from dtrans.run.role_jobs.return_to_snapshot import ReturnToSnapshot
from dtrans.run.role_jobs.trainer_job import TrainerJob
from tools.simulate.case import Case
from tools.simulate.updates import SimulatedUpdate, served


PLAIN = Case(seed=0, mode="sync", steps=(2, 2), servers=((3,), (4, 1)), snapshots=1)
SERVER = PLAIN.endpoints[0]


class Generations:
    """Stand-in for the launcher."""

    incarnation = 0

    def __init__(self, generation: Generation | None = None) -> None:
        self.generation = generation or Generation()
        self.entered: list[Generation] = []
        self.left = 0
        self.lost: list[tuple[int, str, str]] = []

    def current(self) -> Generation:
        return self.generation

    def enter(self, generation: Generation) -> None:
        self.entered.append(generation)

    def leave(self) -> None:
        self.left += 1

    def report_lost(self, generation: int, role: str, reason: str) -> None:
        self.lost.append((generation, role, reason))


def hello(k: int = 0, session: str = "a", **fields: Any) -> wire.Message:
    """Return the greeting of a trainer of `PLAIN`."""
    counts = {"trainer": k, "trainers": PLAIN.trainers, "session": session}
    return wire.Message("hello", {**counts, "order": sys.byteorder, **fields})


# -- the gate --------------------------------------------------------------------------------------


class Gate(GenerationGate):
    """Gate of generation 2, with the messages that it sent."""

    def __init__(self) -> None:
        self.said: list[tuple[bytes, str, dict[str, Any]]] = []
        super().__init__(Generation(2), self._note)

    def _note(self, to: bytes, op: str, /, blocks: Any = (), **fields: Any) -> None:
        self.said.append((to, op, fields))


def test_a_gate_admits_greetings_of_its_generation() -> None:
    gate = Gate()
    peer = wire.Message("peer", {"endpoint": "127.0.0.1:2", "generation": 2})
    for message in (hello(generation=2), hello(generation=2, back=True), peer):
        assert gate.admits(b"0", message, is_known=False)
    assert gate.said == [] and gate.early == {}


def test_a_gate_drops_messages_of_senders_that_have_not_greeted() -> None:
    gate = Gate()
    for op in ("send", "send_barrier", "recv", "partials", "complete", "goodbye", "abort"):
        assert not gate.admits(b"0", wire.Message(op, {"step": 0}), is_known=False)
        assert gate.admits(b"0", wire.Message(op, {"step": 0}), is_known=True)
    assert gate.said == [] and gate.early == {}


def test_a_gate_stores_greetings_of_later_generations() -> None:
    gate = Gate()
    peer = wire.Message("peer", {"endpoint": "127.0.0.1:2", "generation": 4})
    for address, message in (
        (b"0", hello(generation=3)),
        (b"1", hello(1, generation=3)),
        (b"2", peer),
    ):
        assert not gate.admits(address, message, is_known=False)
    assert gate.early == {b"0": hello(generation=3), b"1": hello(1, generation=3), b"2": peer}
    assert [(to, op) for to, op, _ in gate.said] == [(x, "waiting") for x in (b"0", b"1", b"2")]


def test_a_later_greeting_of_an_address_takes_the_place_of_the_first() -> None:
    gate = Gate()
    for generation in (3, 4):
        assert not gate.admits(b"0", hello(generation=generation), is_known=False)
    assert gate.early == {b"0": hello(generation=4)}


def test_a_stored_greeting_is_forgotten_with_its_connection() -> None:
    gate = Gate()
    for address in (b"0", b"1"):
        assert not gate.admits(address, hello(generation=3), is_known=False)
    gate.lose(b"0")
    gate.lose(b"unknown")
    assert list(gate.early) == [b"1"]


def test_a_gate_sends_processes_of_an_earlier_generation_to_its_own() -> None:
    gate = Gate()
    # The sender may have been lost, so that another process takes its place.
    for greeting in (hello(generation=1, back=True), hello(generation=1), hello()):
        assert not gate.admits(b"0", greeting, is_known=False)
    assert gate.said == [(b"0", "rewind", {"generation": 2})] * 3
    # the launcher informs another server of the generation
    peer = wire.Message("peer", {"endpoint": "127.0.0.1:2", "generation": 1})
    assert not gate.admits(b"1", peer, is_known=False)
    assert len(gate.said) == 3 and gate.early == {}


# -- trainers --------------------------------------------------------------------------------------


def test_a_trainer_enters_the_generation_of_its_first_server_alone() -> None:
    generations = Generations()
    member = GenerationMember(generations)
    for _ in PLAIN.endpoints:
        member.enter(Generation(3, 20))
    assert (member.generation, generations.entered) == (Generation(3, 20), [Generation(3, 20)])


@pytest.mark.parametrize("numbers", [(3, 4), (4, 3)])
def test_a_trainer_between_two_generations_connects_again_for_the_newer(
    numbers: tuple[int, int],
) -> None:
    member = GenerationMember(Generations())
    member.enter(Generation(numbers[0]))
    with pytest.raises(NewGeneration) as e:
        member.enter(Generation(numbers[1]))
    assert e.value.number == 4


def test_a_trainer_reports_a_lost_server_and_waits_for_the_next_generation() -> None:
    generations, lost = Generations(), LostPeerError("it went away", "pserver 127.0.0.1:1")
    member = GenerationMember(generations)
    assert member.lost(lost) is lost  # the trainer takes part in no generation yet
    member.enter(Generation(3))
    found = member.lost(lost)
    assert isinstance(found, NewGeneration) and found.number == 4
    assert generations.lost == [(3, "pserver 127.0.0.1:1", "it went away")]
    member.leave()
    assert generations.left == 1


@pytest.mark.parametrize(
    ("generations", "generation"), [(None, Generation(3)), (Generations(), None)]
)
def test_a_trainer_without_a_launcher_or_snapshots_is_in_no_generation(
    generations: Generations | None, generation: Generation | None
) -> None:
    member, lost = (
        GenerationMember(generations),
        LostPeerError("it went away", "pserver 127.0.0.1:1"),
    )
    member.enter(generation)
    assert member.generation is None and member.lost(lost) is lost
    member.leave()
    assert generations is None or (generations.entered, generations.left, generations.lost) == (
        [],
        0,
        [],
    )


def test_a_process_that_was_replaced_is_refused() -> None:
    """The process greeted for the next generation, and died.

    Then this generation began with a new process.
    """
    generation = Generation(2, incarnations=(0, 2))
    trainers = TrainerRegistry(served(PLAIN, SERVER), deadline=10.0, generation=generation)
    error = "^the launcher has started another process of trainer 1$"
    for incarnation in ({}, {"incarnation": 0}, {"incarnation": 1}):
        with pytest.raises(WireError, match=error):
            trainers.hello(b"old", hello(1, generation=2, session="old", **incarnation), None)
    assert not trainers.known
    trainers.hello(b"new", hello(1, generation=2, session="new", incarnation=2), None)
    trainers.hello(b"0", hello(generation=2, incarnation=0), None)
    assert trainers.by_address == {b"new": 1, b"0": 0}


def test_an_ended_process_without_snapshots_keeps_its_place() -> None:
    trainers = TrainerRegistry(served(PLAIN, SERVER), deadline=10.0)
    trainers.hello(b"old", hello(session="old"), None)
    trainers.lose(b"old", 1.0)
    with pytest.raises(WireError, match="another process is already connected as trainer 0"):
        trainers.hello(b"new", hello(session="new"), None)


@pytest.mark.parametrize("generation", [0, 1, 2])
def test_a_greeting_of_an_earlier_generation_cannot_take_the_place_back(generation: int) -> None:
    trainers = TrainerRegistry(served(PLAIN, SERVER), deadline=10.0)
    trainers.hello(b"new", hello(generation=2, session="new"), None)
    with pytest.raises(WireError, match="another process is already connected as trainer 0"):
        trainers.hello(b"old", hello(generation=generation, session="old"), None)
    assert trainers.by_address == {b"new": 0} and trainers.known[0].session == "new"


def test_a_dropped_trainer_is_not_awaited_and_refused() -> None:
    trainers = TrainerRegistry(
        served(PLAIN, SERVER), deadline=10.0, generation=Generation(2, dropped=(1,))
    )
    assert trainers.unseen == [0]
    with pytest.raises(WireError, match="^trainer 1 was lost, and the job continues without it$"):
        trainers.hello(b"1", hello(1, generation=2), None)
    trainers.hello(b"0", hello(generation=2), None)
    assert trainers.unseen == [] and trainers.all_said([0])
    trainers.died(1, "signal SIGKILL", 0.0)
    assert trainers.lost(100.0) == {}
    trainers.known[0].done = True
    assert trainers.served


def test_a_trainer_that_left_in_an_earlier_generation_is_not_awaited() -> None:
    before = TrainerRegistry(served(PLAIN, SERVER), deadline=10.0)
    before.hello(b"1", hello(1, session="first"), None)
    before.hello(b"0", hello(session="old"), None)
    trainers = TrainerRegistry(
        *(served(PLAIN, SERVER),),
        deadline=10.0,
        generation=Generation(2, left=(1,)),
        sessions=before.sessions_by_id,
    )
    assert trainers.unseen == [0] and trainers.sessions == ("first",)
    # a process of the next job
    assert "the end of a job of 2 trainers" in trainers.hello(b"1", hello(1), None)
    trainers.hello(b"0", hello(generation=2, session="new"), None)
    assert trainers.unseen == [] and trainers.sessions == ("new", "first")
    trainers.died(1, "exit code 0", 0.0)
    assert trainers.lost(100.0) == {}
    trainers.known[0].done = True
    assert trainers.served
    # all trainers have left, so a server that begins this generation may end
    assert TrainerRegistry(
        served(PLAIN, SERVER), deadline=10.0, generation=Generation(3, left=(0, 1))
    ).parted


def test_checkpoints_of_undone_steps_are_forgotten() -> None:
    saves = greeted(Generations()).serving.saves
    saves.saved = {"10": 10, "20": 20}
    saves.start = lambda name, steps, arrays: 1
    for step in (12, 22):
        name = str(step)
        saves._pending[name], saves._blocks[name] = (step, []), 1
    saves.undo([("12", ""), ("22", "")], last=15)
    assert saves.saved == {"10": 10, "12": 12}
    assert saves.asked() == {"10": 10, "12": 12}


# -- the loop of a server --------------------------------------------------------------------------


class Network:
    """Transport, and its listener. The test sets the clock and the events."""

    endpoint, local, silent = SERVER, "", 0

    def __init__(self) -> None:
        self.time = 0.0
        self.events: list[Event] = []
        self.said: list[tuple[bytes, wire.Message]] = []

    def now(self) -> float:
        return self.time

    def poll(self, until: float) -> Iterator[Event]:
        events, self.events = self.events, []
        yield from events

    def send(self, address: bytes, frames: Sequence[Any]) -> None:
        self.said.append((address, wire.parse([bytes(x) for x in frames])))

    def take(self, address: bytes, message: wire.Message) -> None:
        """Deliver a message at the next poll."""
        frames = [wire.header(message.op, **message.fields)]
        self.events.append(Event("message", self, frames, address))

    def lose(self, address: bytes) -> None:
        """Deliver the end of a connection at the next poll."""
        self.events.append(Event("lost", self, address=address))


class Server:
    """Server of `PLAIN`, with its loop."""

    def __init__(
        self,
        generations: Generations | None,
        *,
        network: Network | None = None,
        early: Mapping[bytes, wire.Message] = {},
        ended: EndedRoles | None = None,
    ) -> None:
        environ = {} if ended is None else ended.environment
        self.network: Any = network or Network()
        blocks = served(PLAIN, SERVER)
        trainers = TrainerRegistry(blocks, deadline=10.0, retry=1.0)
        found = functools.partial(ended_roles, environ=environ)
        self.loop = ServerLoop(
            self.network, trainers, retry=1.0, generations=generations, ended_roles=found
        )
        update, say = SimulatedUpdate(blocks, lambda: None), self.loop.say
        number = 0 if generations is None else generations.generation.number
        kind = SyncServer(blocks, update, trainers, say, step=5, generation=number)
        self.serving = Serving(kind, trainers, say, Refusals(log))
        if generations is not None:
            self.serving.gate = GenerationGate(generations.generation, say, every=2)
        self.loop.begin(self.serving, self.network, early)

    def step(self, time: float) -> None:
        self.network.time = time
        self.loop.step()

    def said(self) -> list[tuple[bytes, str]]:
        """Return the new messages, without messages that only tell trainers to wait."""
        said, self.network.said = self.network.said, []
        return [(address, x.op) for address, x in said if x.op != "waiting"]


def greeted(generations: Generations | None) -> Server:
    """Return a server that both trainers have greeted."""
    server = Server(generations)
    for k in range(2):
        server.network.take(b"%d" % k, hello(k, f"session {k}"))
        server.step(0.01)
    assert server.said() == [(b"0", "welcome"), (b"1", "welcome")]
    return server


def test_a_loop_looks_for_a_new_generation_each_tenth_of_a_second() -> None:
    generations = Generations()
    server = greeted(generations)
    assert server.loop.wakes == pytest.approx(0.1)
    generations.generation = Generation(1, 5)
    server.step(0.09)
    with pytest.raises(NewGeneration) as e:
        server.step(0.11)
    assert e.value.number == 1
    assert server.said() == [(b"0", "rewind"), (b"1", "rewind")]


@pytest.mark.parametrize("snapshot", [5, None])
def test_a_welcome_names_the_generation_and_its_snapshots(snapshot: int | None) -> None:
    server = Server(Generations(Generation(4, snapshot)))
    server.network.take(b"0", hello(generation=4))
    server.step(0.01)
    ((_, welcome),) = server.network.said
    assert (welcome.op, welcome["step"], welcome["every"]) == ("welcome", 5, 2)
    assert (welcome["generation"], welcome.fields.get("snapshot")) == (4, snapshot)
    alone = Server(None)
    alone.network.take(b"0", hello())
    alone.step(0.01)
    ((_, welcome),) = alone.network.said
    assert {"generation", "snapshot", "every"}.isdisjoint(welcome.fields)


def test_a_loop_reports_a_lost_trainer_once_and_waits_for_the_next_generation() -> None:
    generations = Generations()
    server = greeted(generations)
    server.network.lose(b"1")
    for time in (0.5, 1.0, 2.0, 3.0, 9.0):
        server.step(time)
    ((number, role, reason),) = generations.lost
    assert (number, role) == (0, "trainer 1")
    assert "the connection of trainer 1" in reason
    # messages of the other roles are still handled
    server.network.take(b"0", wire.Message("recv", {"step": 5, "blocks": [], "number": 1}))
    server.step(9.5)
    assert server.said() == [(b"0", "blocks")]
    generations.generation = Generation(1, 5)
    with pytest.raises(NewGeneration):
        server.step(9.7)
    assert (b"0", "rewind") in server.said()


def test_a_role_that_ended_in_an_earlier_generation_is_not_lost() -> None:
    """The report of another host's agent may arrive after the server has entered the next generation."""
    generations = Generations(Generation(2, 5))
    with EndedRoles() as ended:
        server = Server(generations, ended=ended)
        ended.note("trainer 0", "signal SIGKILL", generation=1)
        for time in (1.0, 2.0, 3.0):
            server.step(time)
        assert not generations.lost
        ended.note("trainer 1", "signal SIGKILL", generation=2)
        for time in (4.0, 5.0, 6.0):
            server.step(time)
    ((number, role, reason),) = generations.lost
    assert (number, role) == (2, "trainer 1") and "ended with signal SIGKILL" in reason


def test_a_loop_ends_if_no_generation_begins_within_the_deadline() -> None:
    generations = Generations()
    server = greeted(generations)
    server.network.lose(b"1")
    server.step(0.5)
    for time in (2.0, 7.0, 11.9):
        server.step(time)
    with pytest.raises(LostPeerError, match="the connection of trainer 1") as e:
        server.step(13.1)
    assert e.value.role == "trainer 1" and len(generations.lost) == 1


def test_a_loop_without_snapshots_ends_at_once() -> None:
    server = greeted(None)
    assert server.loop.wakes > 0.9
    server.network.lose(b"1")
    server.step(0.5)
    with pytest.raises(LostPeerError):
        server.step(2.0)


def test_early_greetings_are_answered_in_their_generation() -> None:
    """A generation answers greetings that arrived before the generation, and stores greetings of later
    generations again."""
    generations = Generations()
    old = greeted(generations)
    old.network.take(b"2", hello(0, "session 0", generation=1))
    old.network.take(b"3", hello(1, "new process", generation=2))
    old.step(0.05)
    assert old.said() == [] and old.serving.gate is not None
    generations.generation = Generation(1, 5)
    new = Server(generations, network=old.network, early=old.serving.gate.early)
    assert new.said() == [(b"2", "welcome")]
    assert new.serving.gate is not None and list(new.serving.gate.early) == [b"3"]
    # the new generation does not know connections of the old generation
    new.network.take(b"0", wire.Message("recv", {"step": 5, "blocks": [], "number": 1}))
    new.step(0.06)
    assert new.said() == [] and list(new.serving.trainers.by_address) == [b"2"]
    new.network.lose(b"3")
    new.step(0.07)
    assert new.serving.gate.early == {}


def test_an_early_greeting_may_be_refused() -> None:
    server = Server(Generations(Generation(1, 5)), early={b"0": hello(trainers=3, generation=1)})
    assert server.said() == [(b"0", "refuse")]


# -- the folder ------------------------------------------------------------------------------------


def test_a_folder_that_no_launcher_uses_is_named(tmp_path: Path) -> None:
    folder = RoleFolder.from_environment("trainer 0", {VARIABLE: str(tmp_path)})
    assert folder is not None
    for read in (folder.current, lambda: folder.run):
        with pytest.raises(
            ConfigError, match="has no generation.json; if `dtrans launch --snapshots` has set"
        ):
            read()
    assert RoleFolder.from_environment("trainer 0", {}) is None
    assert RoleFolder.from_environment("trainer 0", {VARIABLE: ""}) is None


def test_a_file_that_another_host_replaces_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS, the file that the reader has opened then disappears."""
    folder, read_text, faults = RoleFolder(tmp_path, "trainer 0"), Path.read_text, []

    def read(path: Path) -> str:
        if path.name not in faults:
            faults.append(path.name)
            raise OSError(errno.ESTALE, "Stale file handle")
        return read_text(path)

    LauncherFolder(tmp_path).grant(Generation(2, 20), "a run")
    folder.enter(Generation(2, 20))
    monkeypatch.setattr(Path, "read_text", read)
    assert folder.current() == Generation(2, 20)
    assert folder.marks() == {"trainer 0": RoleMark(2)}
    assert faults == ["generation.json", "trainer 0"]


def test_a_folder_has_complete_files_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A crash during a write leaves the old file in place.

    Readers ignore the new file, which was not renamed.
    """
    folder = RoleFolder(tmp_path, "pserver 0")
    LauncherFolder(tmp_path).grant(Generation(1, 5), "a run")
    folder.enter(Generation(1, 5))
    folder.report_lost(1, "trainer 0", "it went away")

    def crash(fd: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", crash)
    launcher = LauncherFolder(tmp_path)
    for write in (
        lambda: launcher.grant(Generation(2, 9), "a run"),
        lambda: folder.note_snapshot(1, 9),
    ):
        with pytest.raises((OSError, StateError), match="no space"):
            write()
    folder.report_lost(2, "trainer 1", "it went away")
    assert "pserver 0 cannot report to the launcher that trainer 1 is lost: no space" in caplog.text
    assert LauncherFolder(tmp_path).current() == Generation(1, 5)
    assert LauncherFolder(tmp_path).marks() == {"pserver 0": RoleMark(1)}
    assert LauncherFolder(tmp_path).lost(1) == [
        LostReport("pserver 0", 1, "trainer 0", "it went away")
    ]


def test_the_newest_snapshot_is_common_to_all_servers(tmp_path: Path) -> None:
    launcher, names = LauncherFolder(tmp_path), ["pserver 0", "pserver 1"]
    servers = [RoleFolder(tmp_path, name) for name in names]
    assert launcher.newest_snapshot(names) is None and launcher.newest_snapshot([]) is None
    for server in servers:
        server.enter(Generation())
    servers[0].note_snapshot(0, 10)
    assert launcher.newest_snapshot(names) is None and launcher.old_snapshot(names) == 0
    for server, step in ((servers[1], 10), (servers[0], 20), (servers[1], 30)):
        server.note_snapshot(0, step)
    assert launcher.newest_snapshot(names) == 10 and launcher.old_snapshot(names) == 0
    servers[1].note_snapshot(0, 20)
    assert launcher.newest_snapshot(names) == 20 and launcher.old_snapshot(names) == 10
    assert launcher.marks()["pserver 1"] == RoleMark(0, (10, 20, 30))
    servers[1].leave()
    assert launcher.marks()["pserver 1"] == RoleMark(0, (10, 20, 30), left=True)


def test_a_snapshot_is_complete_when_trainers_have_written_their_leaves(tmp_path: Path) -> None:
    """A server may report that trainers write leaves.

    Then a snapshot also needs trainers that have reported nothing.
    """
    launcher, servers = LauncherFolder(tmp_path), ["pserver 0"]
    launcher.grant(Generation(), "a run", trainers=2)
    server = RoleFolder(tmp_path, "pserver 0")
    server.enter(Generation(), with_trainers=True)
    first, second = RoleFolder(tmp_path, "trainer 0"), RoleFolder(tmp_path, "trainer 1")
    first.enter(Generation())
    for step in (10, 20, 30):
        for folder in (server, first):
            folder.note_snapshot(0, step)
            (tmp_path / str(step)).mkdir(exist_ok=True)
    assert launcher.newest_snapshot(servers) is None
    second.enter(Generation())
    second.note_snapshot(0, 10)
    server.remove_old_snapshots(0, servers)
    assert launcher.newest_snapshot(servers) == 10
    second.note_snapshot(0, 20)
    second.note_snapshot(0, 30)
    assert launcher.newest_snapshot(servers) == 30
    for folder in (server, first, second):
        assert folder.marks()[folder._role].snapshots == (10, 20, 30)
        folder.remove_old_snapshots(0, servers)
        assert folder.marks()[folder._role].snapshots == (20, 30)
    assert {x.name for x in tmp_path.iterdir() if x.name.isdecimal()} == {"20", "30"}


def test_a_server_forgets_snapshots_after_that_of_its_generation(tmp_path: Path) -> None:
    """A new process of the server also forgets snapshots that the old process has written."""
    names = ["pserver 0"]
    RoleFolder(tmp_path, "pserver 0").enter(Generation())
    before = RoleFolder(tmp_path, "pserver 0")
    before.enter(Generation())
    for step in (10, 20, 30):
        before.note_snapshot(0, step)
    for folder in (before, RoleFolder(tmp_path, "pserver 0")):
        folder.enter(Generation(1, 20))
        assert folder.marks()["pserver 0"] == RoleMark(1, (10, 20))
    folder = RoleFolder(tmp_path, "pserver 0")
    folder.enter(Generation(2))
    assert folder.newest_snapshot(names) is None


def test_a_snapshot_of_an_old_generation_is_not_noted(tmp_path: Path) -> None:
    folder = RoleFolder(tmp_path, "pserver 0")
    folder.enter(Generation(1, 20))
    for generation in (0, 2):
        folder.note_snapshot(generation, 30)
    assert folder.marks()["pserver 0"] == RoleMark(1)
    folder.note_snapshot(1, 30)
    assert folder.marks()["pserver 0"] == RoleMark(1, (30,))


def test_a_server_drops_its_snapshots_before_a_step(tmp_path: Path) -> None:
    folder = RoleFolder(tmp_path, "pserver 0")
    LauncherFolder(tmp_path).grant(Generation(), "a run")
    folder.enter(Generation())
    for step in (10, 20, 30):
        folder.note_snapshot(0, step)
    assert folder.drop_snapshots(0, 10) == []
    assert folder.drop_snapshots(0, 30) == [10, 20]
    assert folder.marks()["pserver 0"] == RoleMark(0, (30,))


def test_the_snapshot_of_the_current_generation_stays(tmp_path: Path) -> None:
    """A server may write more snapshots before it learns of a generation.

    Then it loads the snapshot of the generation.
    """
    folder = RoleFolder(tmp_path, "pserver 0")
    folder.enter(Generation())
    for step in (10, 20, 30, 40):
        folder.note_snapshot(0, step)
    LauncherFolder(tmp_path).grant(Generation(1, 20), "a run")
    assert folder.drop_snapshots(0, 40) == []
    folder.enter(Generation(1, 20))
    assert folder.newest_snapshot(["pserver 0"]) == 20
    folder.note_snapshot(1, 30)
    folder.note_snapshot(1, 40)
    assert folder.drop_snapshots(0, 40) == []
    assert folder.drop_snapshots(1, 40) == [10, 30]


def test_lost_roles_of_other_generations_are_not_reported(tmp_path: Path) -> None:
    launcher = LauncherFolder(tmp_path)
    assert launcher.lost(0) == []
    RoleFolder(tmp_path, "trainer 1").report_lost(1, "pserver 127.0.0.1:1", "it went away")
    RoleFolder(tmp_path, "trainer 0").report_lost(2, "trainer 1", "it is silent")
    assert launcher.lost(0) == []
    assert launcher.lost(2) == [LostReport("trainer 0", 2, "trainer 1", "it is silent")]
    RoleFolder(tmp_path, "trainer 1").report_lost(2, "trainer 1", "it is silent")
    assert [x.reporter for x in launcher.lost(2)] == ["trainer 0", "trainer 1"]
    assert launcher.lost(1) == []


# -- snapshots of a server -------------------------------------------------------------------------


def planned(**options: Any) -> PServerPlan:
    params, tx = mlp_params(), optax.sgd(0.5)
    step = dtrans.make_train_step(mlp_loss, tx)
    return dtrans.pserver(
        dtrans.trace(step, params, jax.eval_shape(tx.init, params), *mlp_batch(6)),
        dtrans.trace(lambda p: (p, tx.init(p)), params),
        pservers=SERVER,
        trainers=2,
        placement=dtrans.BlockPlacement(min_block_size=1),
        **options,
    )


def test_what_a_snapshot_cannot_contain_is_named() -> None:
    for mode in (dtrans.Sync(), dtrans.Async(), dtrans.Geo()):
        check_snapshots(planned(mode=mode), dtrans.Snapshots(10))
    with pytest.raises(
        ConfigError, match="snapshots: with on_trainer_exit='paddle' an update uses"
    ):
        check_snapshots(planned(on_trainer_exit="paddle"), dtrans.Snapshots(10))


def test_snapshots_do_not_contain_stale_rows() -> None:
    """A trainer that starts again would look up newer rows than the rows announced for its step."""
    check_snapshots(table_jobs.planned(optax.sgd(0.5), table_jobs.LAZY, 2, 1), dtrans.Snapshots(10))
    stale = {"params/emb": dtrans.Rows(update="lazy", staleness=2)}
    with pytest.raises(
        ConfigError, match="snapshots: rows of params/emb have staleness=2, and snapshots do"
    ):
        check_snapshots(table_jobs.planned(optax.sgd(0.5), stale, 2, 1), dtrans.Snapshots(10))


def server_snapshots(path: Path) -> ServerSnapshots:
    folder = RoleFolder(path, "pserver 0")
    LauncherFolder(path).grant(Generation(), "a run")
    snapshots = ServerSnapshots(folder, planned(), SERVER, every=1, first_step=7)
    assert snapshots.begin({"w": 1}) == GenerationStart(Generation(), {"w": 1}, 7)
    return snapshots


def test_a_snapshot_that_cannot_be_written_is_logged_and_the_job_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    snapshots, full = server_snapshots(tmp_path), set()

    def save(path: Path, plan: Any, endpoint: str, state: Any, mark: SaveId, **_: Any) -> None:
        if mark.step in full:
            raise full_disk[mark.step]
        path.mkdir()

    full_disk = {8: OSError(28, "No space left on device"), 9: StateError("no folder")}
    monkeypatch.setattr(checkpoint, "save_serving", save)
    snapshots.write(0, {}, {}, SaveId(("a run",), 7))
    full |= set(full_disk)
    for step in full_disk:
        caplog.clear()
        snapshots.write(0, {}, {}, SaveId(("a run",), step))
        (record,) = caplog.records
        assert (
            f"cannot write the snapshot of step {step}, so a restart would go back to step 7"
            in (record.getMessage())
        )
    assert snapshots.generations.newest_snapshot(["pserver 0"]) == 7
    full.clear()
    snapshots.write(0, {}, {}, SaveId(("a run",), 10))
    assert snapshots.generations.newest_snapshot(["pserver 0"]) == 10


def test_the_two_newest_snapshots_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "save_serving", lambda path, *_, **__: path.mkdir())
    snapshots = server_snapshots(tmp_path)
    for step in (7, 8, 9, 10):
        snapshots.write(0, {}, {}, SaveId(("a run",), step))
    assert {x.name for x in tmp_path.iterdir() if x.name.isdecimal()} == {"9", "10"}
    assert snapshots.generations.marks()["pserver 0"].snapshots == (9, 10)


def test_an_asynchronous_server_keeps_its_newest_snapshot_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = lambda path, *_, **options: path.mkdir(parents=True)
    monkeypatch.setattr(checkpoint, "save_serving", save)
    LauncherFolder(tmp_path).grant(Generation(), "a run")
    plan = planned(mode=dtrans.Async())
    snapshots = ServerSnapshots(RoleFolder(tmp_path, "pserver 0"), plan, SERVER, every=1)
    snapshots.enter_alone()
    for step in (4, 9):
        snapshots.write(0, {1: step}, {}, SaveId(("a run",), step))
    assert {x.name for x in (tmp_path / "pserver-0").iterdir()} == {"9"}
    launcher = LauncherFolder(tmp_path)
    assert launcher.marks()["pserver 0"] == RoleMark(0, (9,), is_alone=True, counts=(0, 9))
    assert launcher.snapshots_alone(["pserver 0"]) == (9,)
    assert launcher.snapshots_alone(["pserver 0", "pserver 1"]) == ()
    # a generation of a new process keeps the snapshot
    launcher.grant(Generation(1), run="a run")
    ServerSnapshots(RoleFolder(tmp_path, "pserver 0"), plan, SERVER, every=1).enter_alone()
    assert launcher.marks()["pserver 0"] == RoleMark(1, (9,), is_alone=True, counts=(0, 9))
    launcher.clear()
    assert not (tmp_path / "pserver-0").exists()


def test_a_snapshot_waits_until_the_one_before_is_written() -> None:
    written, may_end, has_begun = list[int](), threading.Semaphore(0), threading.Semaphore(0)

    def keep(state: Any, mark: SaveId) -> None:
        has_begun.release()
        assert may_end.acquire(timeout=60.0)
        assert mark.step is not None
        written.append(mark.step)
        if mark.step == 1:
            raise ZeroDivisionError("by 0")

    writer = StateWriter(None, wake=lambda: None)
    writer.begin_snapshot(keep, {"x": 1}, SaveId(step=1))
    assert has_begun.acquire(timeout=60.0)
    begun = threading.Thread(target=writer.begin_snapshot, args=(keep, {"x": 2}, SaveId(step=2)))
    begun.start()
    begun.join(0.1)
    assert begun.is_alive() and written == []
    may_end.release()
    begun.join(60.0)
    assert not begun.is_alive() and written == [1]
    may_end.release()
    writer.close()
    assert written == [1, 2]
    assert list(writer.ended()) == []


def test_a_process_that_was_replaced_ends(tmp_path: Path) -> None:
    launcher, old = LauncherFolder(tmp_path), RoleFolder(tmp_path, "pserver 0")
    launcher.grant(Generation(), "a run", started={"pserver 0": 0})
    assert old.current() == Generation()
    launcher.grant(Generation(1, 20), "a run", started={"pserver 0": 1, "trainer 0": 0})
    for act in (old.current, old.leave, lambda: old.enter(Generation(1, 20))):
        with pytest.raises(ReplacedError, match="has lost this process of pserver 0, and has"):
            act()
    assert launcher.marks() == {}
    assert RoleFolder(tmp_path, "trainer 0").current() == Generation(1, 20)
    environment = launcher.environment(1)
    new = RoleFolder.from_environment("pserver 0", environment)
    assert new is not None and new.current() == Generation(1, 20)


def test_an_asynchronous_server_refuses_snapshots_of_synchronous_ones(tmp_path: Path) -> None:
    server_snapshots(tmp_path).generations.note_snapshot(0, 10)
    plan = planned(mode=dtrans.Async())
    snapshots = ServerSnapshots(RoleFolder(tmp_path, "pserver 0"), plan, SERVER, every=1)
    with pytest.raises(
        ConfigError, match="has snapshots of synchronous servers, but the plan's mode"
    ):
        snapshots.begin_alone({})


def test_a_synchronous_server_refuses_snapshots_of_asynchronous_ones(tmp_path: Path) -> None:
    folder = RoleFolder(tmp_path, "pserver 0")
    LauncherFolder(tmp_path).grant(Generation(), "a run")
    folder.enter_alone(folder.current())
    with pytest.raises(
        ConfigError, match="snapshots of asynchronous servers, but the plan's mode is s"
    ):
        ServerSnapshots(folder, planned(), SERVER, every=1).begin({})


def test_an_asynchronous_server_counts_from_the_restored_checkpoint(tmp_path: Path) -> None:
    LauncherFolder(tmp_path).grant(Generation(), "a run")
    plan = planned(mode=dtrans.Async())
    snapshots = ServerSnapshots(
        RoleFolder(tmp_path, "pserver 0"), plan, SERVER, every=1, first_step=40
    )
    assert snapshots.begin_alone({"w": 1}) == GenerationStart(
        Generation(), {"w": 1}, counts={0: 40, 1: 40}
    )


def returning(step: int) -> ReturnToSnapshot:
    """Return a `ReturnToSnapshot` to the snapshot after `step`, for a trainer that has completed three
    steps."""
    back = ReturnToSnapshot("trainer 0", None, lambda generation: None, lambda: "parameters")
    back.begin(1, 3)
    return back


def test_a_request_between_steps_ends_a_return_or_raises() -> None:
    back = returning(3)
    assert back.is_due and back.before == 3
    back.end_request("job.save('a')", 3, 3, repeats=True)
    assert not back.is_due and back.before is None  # the snapshot has the trainer's step
    back = returning(2)
    back.end_request("job.save('a')", 3, 2, repeats=True)
    back.begin(2, 2)  # a second loss
    assert back.is_due and back.before == 3
    with pytest.raises(
        LostPeerError, match=r"during job.save\('a'\), and trainer 0 cannot go back"
    ):
        returning(2).end_request("job.save('a')", 3, 2, repeats=False)
    with pytest.raises(Rewound) as e:  # a loop that the user writes
        returning(2).end_request("job.save('a')", 3, 2, repeats=None)
    assert (e.value.step, e.value.state) == (2, ("parameters",))


# -- steps of a job --------------------------------------------------------------------------------


class CountingJob(Job):
    """Job whose state is its number of steps. Some of its steps go back to an earlier step.

    Args:
      back: number of a call of `step` -> the step to which this call goes back.
      first: the number of steps before the job.
    """

    def __init__(self, back: Mapping[int, int] = {}, first: int = 0) -> None:
        self.back, self.calls = dict(back), 0
        self.made = 0
        self.returns_to: int | None = None  # step to which the job goes back after its last step
        self.first = first
        self.batches: list[int] = []
        self.prefetched: list[int] = []

    @property
    def first_step(self) -> int:
        return self.made

    def step(self, state: Any, *batch: Any) -> tuple[Any, ...]:
        self.calls += 1
        assert state == self.first + self.made
        if self.calls in self.back:
            self.made = self.back[self.calls] - self.first
            raise Rewound(self.back[self.calls], self.back[self.calls], self.calls)
        self.batches.append(batch[0])
        self.made += 1
        return state + 1, -batch[0]

    def check_return(self) -> None:
        if self.returns_to is not None:
            self.made, self.returns_to = self.returns_to, None
            raise Rewound(self.made, self.made, 1)

    def prefetch(self, *batch: Any) -> bool:
        self.prefetched.append(batch[0])
        return True

    def check(self, state: Any) -> None: ...

    def init(self, *args: Any) -> Any: ...

    def params(self, state: Any) -> Any: ...

    def opt_state(self, state: Any) -> Any: ...

    def state_of(self, params: Any, opt_state: Any) -> Any: ...

    def lower(self, state: Any, *batch: Any) -> Any: ...


def test_a_function_returns_the_batch_of_each_step() -> None:
    job = CountingJob()
    assert list(job.steps(0, lambda i: (i,), stop=4)) == [(i + 1, -i) for i in range(4)]
    assert job.batches == [0, 1, 2, 3] and job.prefetched == [1, 2, 3]
    # the servers' state has the number of its step, so a second loop continues there
    assert list(job.steps(4, lambda i: (i,), stop=6)) == [(5, -4), (6, -5)]
    assert list(job.steps(6, lambda i: (i,), start=6, stop=6)) == []


def test_steps_count_from_the_start_of_a_job() -> None:
    job = CountingJob(first=100)
    assert list(job.steps(100, lambda i: (i,), start=100, stop=103)) == [
        (101, -100),
        (102, -101),
        (103, -102),
    ]


@pytest.mark.parametrize("ahead", [1, 3])
def test_steps_after_a_snapshot_are_repeated_with_their_batches(ahead: int) -> None:
    job = CountingJob({4: 2, 6: 0})
    found = list(job.steps(0, lambda i: (i,), ahead, stop=5))
    assert job.batches == [0, 1, 2, 2, 0, 1, 2, 3, 4]
    assert found == [(i + 1, -i) for i in job.batches]


def test_a_loss_after_the_last_step_repeats_steps() -> None:
    job, found = CountingJob(), list[Any]()
    for result in job.steps(0, lambda i: (i,), stop=3):
        found.append(result)
        if len(found) == 3:
            job.returns_to = 1
    assert found == [(1, 0), (2, -1), (3, -2), (2, -1), (3, -2)]


def test_a_loop_repeats_steps_whose_gradients_a_communicator_has_not_sent() -> None:
    """The trainer has completed step 3.

    The servers go back to step 1 before they receive the gradients.
    """

    def flush() -> None:
        raise NewGeneration(2)

    def begin(generation: int, step: int) -> None:
        begun.append((generation, step))
        job._return.is_due = True

    begun = list[tuple[int, int]]()
    job: Any = object.__new__(TrainerJob)
    connections = types.SimpleNamespace(is_in_generation=True)
    job._executor = types.SimpleNamespace(connections=connections, flush=flush)
    end = lambda step: Rewound(1, "the state of step 1", 2)
    job._return = types.SimpleNamespace(begin=begin, end=end, is_due=False)
    job._step_count = 3
    with pytest.raises(Rewound):
        job.end_loop()
    assert begun == [(2, 3)]
    connections.is_in_generation = job._return.is_due = False
    job.end_loop()  # a job without snapshots sends the gradients when it ends


def test_steps_of_an_iterable_cannot_be_repeated() -> None:
    job = CountingJob({2: 0})
    found = []
    with pytest.raises(Rewound, match="the job continues after step 0; use job.steps") as e:
        for result in job.steps(0, [(0,), (1,), (2,)]):
            found.append(result)
    assert found == [(1, 0)]
    assert (e.value.step, e.value.state, e.value.generation) == (0, 0, 2)


def test_errors_of_steps_name_the_argument() -> None:
    job, batch = CountingJob(), lambda i: (i,)
    with pytest.raises(ConfigError, match=r"pass the number of steps: job.steps"):
        job.steps(0, batch)
    for options in ({"stop": 3}, {"start": 1}, {"start": 1, "stop": 3}):
        with pytest.raises(ConfigError, match="but batches is list; leave them out"):
            job.steps(0, [(0,)], **options)
    for ahead in (0, -1, 1.5):
        with pytest.raises(ConfigError, match="ahead"):
            job.steps(0, batch, ahead, stop=3)  # type: ignore[arg-type]
    assert job.calls == 0


def test_a_lost_role_is_a_peer_error_with_its_name() -> None:
    e = LostPeerError("it went away", "trainer 1")
    assert isinstance(e, PeerError) and (e.role, str(e)) == ("trainer 1", "it went away")
    assert LostPeerError("it went away").role == ""


# -- the end of a trainer --------------------------------------------------------------------------


def test_a_trainer_cannot_go_back_after_its_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation after the last step meets a new generation, so the launcher starts all roles
    again."""
    connections = ServerConnections(
        deadline=1.0, patience=1.0, wait_port=True, encryption="disabled", generations=Generations()
    )
    closed = []
    link: Any = types.SimpleNamespace(close=lambda: closed.append(1))
    connections._links = {"here:1": link, "here:2": link}

    def meet_new_generation(operation: Any) -> None:
        raise NewGeneration(3)

    monkeypatch.setattr(connections, "run", meet_new_generation)
    with pytest.raises(
        LostPeerError, match="a process was lost, .* made its last step, so it cannot go back"
    ):
        connections.run_last(Operation([], nothing))
    assert closed == [1, 1]
    connections.close(None)  # the trainer waits for no server
