"""Simulated jobs: the real state machines with delays, broken connections, pauses, deaths and
planted faults."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import layers
import numpy as np
import pytest
from paths import ROOT
from planted_in_snapshots import (
    PLANTED_AT_LOSS,
    PLANTED_IN_REPLICAS,
    PLANTED_IN_SNAPSHOTS,
    PLANTED_WITH_FULL_DISKS,
    answer_evictions_early,
)
from typer.testing import CliRunner

from dtrans.ops import CommunicatorConfig
from dtrans.protocol import wire
from dtrans.protocol.inbox import Inbox
from dtrans.protocol.numbered_messages import NumberedMessages
from dtrans.protocol.server import trainer_registry, trainer_rounds
from dtrans.protocol.server.async_steps import AsyncSteps
from dtrans.protocol.server.peer_line import PeerLine
from dtrans.protocol.server.save_requests import SaveRequests
from dtrans.protocol.server.server_peers import ServerPeers
from dtrans.protocol.server.serving import Serving
from dtrans.protocol.server.sync_server import SyncServer
from dtrans.protocol.server.trainer_registry import TrainerRegistry
from dtrans.protocol.server.trainer_turns import TrainerTurns
from dtrans.protocol.server_blocks import UpdatePart
from dtrans.protocol.tables import row_answers, rows_ahead
from dtrans.protocol.tables.changed_rows import CHANGED, UnseenChanges
from dtrans.protocol.tables.row_requests import RowRequests
from dtrans.protocol.tables.rows_ahead import RowsAhead
from dtrans.protocol.tables.table_rows import merged_rows
from dtrans.protocol.trainer import announced_lookups, traffic
from dtrans.protocol.trainer.geo_steps import GeoSteps
from dtrans.protocol.trainer.server_connection import ServerConnection
from dtrans.protocol.trainer.server_link import OperationWait
from dtrans.protocol.trainer.traffic import Traffic
from dtrans.protocol.trainer.trainer_line import TrainerLine
from dtrans.protocol.transport import RETRY
from tools.simulate.__main__ import app
from tools.simulate.case import Case, Event, Guest, Request
from tools.simulate.draw import (
    drawn,
    drawn_at_loss,
    drawn_with_replicas,
    drawn_with_snapshots,
)
from tools.simulate.updates import InNumpy
from tools.simulate.verdict import Verdict, reduced, simulated, smaller, verdicts


# number of schedules at night, by kind
BY_NIGHT = {
    drawn: 200_000,
    drawn_with_snapshots: 100_000,
    drawn_at_loss: 60_000,
    drawn_with_replicas: 60_000,
}
PARTS = 20  # tests of a night for each kind
NIGHTS = 3  # nights until the same schedules run again: over a million schedules


def check_schedules(draw: Callable[[int], Case], start: int, count: int) -> None:
    """Simulate the schedules of some seeds. Report the first three that fail."""
    wrong = [v for v in verdicts(range(start, start + count), draw) if v.faults]
    assert not wrong, "\n\n".join(str(smaller(v)) for v in wrong[:3])


@pytest.mark.plan  # machines without sockets, threads and clocks: it runs each day
@pytest.mark.parametrize("draw", BY_NIGHT)
def test_two_thousand_schedules_hold(draw: Callable[[int], Case]) -> None:
    """Each day, the test simulates another 500 schedules of each kind."""
    check_schedules(draw, layers.today().toordinal() % 100 * 500, 500)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("draw", BY_NIGHT)
def test_a_million_schedules_hold_in_three_nights(draw: Callable[[int], Case], part: int) -> None:
    night, count = layers.today().toordinal() % NIGHTS, BY_NIGHT[draw] // PARTS
    check_schedules(draw, (night * PARTS + part) * count, count)


@pytest.mark.parametrize("draw", BY_NIGHT)
def test_a_seed_says_all(draw: Callable[[int], Case]) -> None:
    for seed in range(40):
        assert simulated(draw(seed)) == simulated(draw(seed))


def test_cases_are_of_all_kinds() -> None:
    """Otherwise the schedules that pass would not show much."""
    found = list(verdicts(range(300)))
    cases = [v.case for v in found]
    assert {c.mode for c in cases} == {
        "sync",
        "exchange",
        "async",
        "communicator",
        "half_async",
        "geo",
    }
    assert {c.trainers for c in cases} == {len(c.servers) for c in cases} == {1, 2, 3}
    assert {c.on_trainer_exit for c in cases} == {"drop", "paddle", "error"}
    assert {e.kind for c in cases for e in c.events} == {
        "pause",
        "stop",
        "crash",
        "break",
        "hold",
        "outage",
        "twice",
        "garble",
        "return",
    }
    assert any(e.kind == "late" for seed in range(2000) for e in drawn(seed).events)  # rare
    assert {c.is_followed for c in cases} == {False, True}
    assert {c.rounds for c in cases} == {0, 1, 2}
    assert {c.mode for c in cases if c.table > 1} == {
        "sync",
        "async",
        "communicator",
        "half_async",
        "geo",
    }
    assert {(c.ahead, c.staleness) for c in cases if c.table > 1} == {
        (0, 0),
        (1, 0),
        (2, 0),
        (1, 1),
        (2, 1),
    }
    assert {(c.mode, c.table_blocks) for c in cases if c.table > 1} == {
        *itertools.product(("sync", "async", "communicator", "half_async", "geo"), (1, 2))
    }
    assert {c.moves for c in cases} == {False, True}
    assert {x.kind for c in cases for x in c.requests} == {
        *("save", "report", "changes", "export", "evict")
    }
    assert {x.moment for c in cases for x in c.requests} == {"between", "sent", "ended"}
    assert {x.kind for c in cases for x in c.guests} == {"second", "stale", "stranger", "noise"}
    assert {c.orderly for c in cases if c.requests} == {False, True}
    ends = [how.split(":")[0] for v in found for how in v.ends.values()]
    assert {"well", "killed", "PeerError", "DeadlineError"} <= set(ends)
    assert 0.3 < sum(how == "well" for how in ends) / len(ends) < 0.9


def test_cases_with_snapshots_are_of_all_kinds() -> None:
    assert any(drawn(seed).snapshots for seed in range(40))
    found = list(verdicts(range(300), drawn_with_snapshots))
    cases = [v.case for v in found]
    assert {c.mode for c in cases} == {
        *("sync", "exchange", "async", "communicator", "half_async", "geo"),
    }
    assert {x.kind for c in cases for x in c.requests} == {"evict", "save"}
    assert {c.trainers for c in cases} == {len(c.servers) for c in cases} == {1, 2, 3}
    assert {c.snapshots for c in cases} == {1, 2, 3, 4}
    assert {c.rounds for c in cases} == {0, 1, 2}
    assert {c.moves for c in cases} == {c.has_means for c in cases} == {False, True}
    assert {len(set(c.steps)) > 1 for c in cases} == {False, True}  # uneven steps
    assert {0 in c.steps for c in cases} == {False, True}
    kinds = {"crash", "stop", "pause", "break", "full"}
    assert {e.kind for c in cases for e in c.events} == kinds
    killed = [[e for e in c.events if e.kind == "crash"] for c in cases]
    assert {e.who.split()[0] for of in killed for e in of} == {"trainer", "pserver"}
    # two processes are lost before a new process replaces the second one
    pairs = [(a, b) for of in killed for a in of for b in of if a.who < b.who]
    assert any(abs(a.time - b.time) < 0.1 for a, b in pairs)
    assert any(0.1 < abs(a.time - b.time) < 1.0 for a, b in pairs)
    events = [(e, c) for c in cases for e in c.events]
    assert any(e.kind == "stop" and e.seconds > c.patience for e, c in events)
    assert any(e.kind == "break" and e.seconds > RETRY for e, c in events)
    assert any(len(c.events) > 4 for c in cases)  # many short breaks
    ways = {way for v in found for way in v.restarts}
    assert {"in place", "all", "none", "join"} <= ways <= {*ways, "left"}
    assert {c.quorum for c in cases} == {0, 1, 2, 3}
    assert {len(v.restarts) for v in found} >= {0, 1, 2, 3}


PLAIN = Case(seed=0, mode="sync", steps=(2, 2), servers=((3,), (4, 1)))


@pytest.mark.parametrize("mode", ["async", "communicator", "half_async", "geo"])
def test_an_asynchronous_trainer_that_has_left_need_not_come_back(mode: str) -> None:
    """Trainer 0 leaves after 3 steps. Trainer 1 is killed at moments before and after that."""
    base = dataclasses.replace(PLAIN, mode=mode, steps=(3, 6), snapshots=2)
    ways: set[tuple[str, ...]] = set()
    for i in range(100):
        kill = Event("crash", 0.4 + 0.015 * i, "trainer 1")
        found = simulated(dataclasses.replace(base, seed=i % 7, events=(kill,)))
        assert not found.faults, str(found)
        ways.add(found.restarts)
    # "left": it leaves after the launcher has granted a generation, and before it enters this
    # generation. "all": trainer 1 is killed after it has left one of the servers, which ends.
    assert (
        {("in place",), ("in place", "left")}
        <= ways
        <= {
            *((), ("in place",), ("in place", "left"), ("all",)),
        }
    )


def test_who_is_killed_is_named_by_all_who_wait() -> None:
    found = simulated(
        dataclasses.replace(PLAIN, events=(Event("crash", 0.1, "pserver 127.0.0.1:2"),))
    )
    assert not found.faults
    assert found.ends["pserver 127.0.0.1:2"] == "killed"
    others = {how for name, how in found.ends.items() if name != "pserver 127.0.0.1:2"}
    assert others
    assert all("pserver 127.0.0.1:2" in how for how in others), others


@pytest.mark.parametrize(("mode", "how"), [("sync", "PeerError"), ("async", "well")])
def test_a_killed_trainer_is_noticed_by_the_end_of_its_connection(mode: str, how: str) -> None:
    case = dataclasses.replace(PLAIN, mode=mode, events=(Event("crash", 0.4, "trainer 1"),))
    found = simulated(case)
    assert not found.faults
    assert found.seconds < 0.4 + RETRY + 2.0
    for ep in case.endpoints:
        assert how in found.ends[f"pserver {ep}"].split(":")[0]
        assert mode == "async" or "the connection of trainer 1 to pserver" in str(found)


@pytest.mark.parametrize("mode", ["sync", "async", "communicator"])
def test_a_connection_that_breaks_with_nothing_on_its_way_goes_on(mode: str) -> None:
    """Each connection is cut at many moments.

    Some of the jobs continue, and all have the right numbers.
    """
    ends = set()
    for i in range(40):
        broken = Event("break", 0.02 * i, "trainer 0 pserver 127.0.0.1:1", 0.5)
        found = simulated(dataclasses.replace(PLAIN, mode=mode, events=(broken,)))
        assert not found.faults, str(found)
        well = all(how == "well" for how in found.ends.values())
        ends.add(well)
        assert well or "127.0.0.1:1" in str(found.ends)
    assert True in ends


def broken_at_the_end(mode: str) -> Iterator[Verdict]:
    """Break each connection at moments between its trainer's `complete` and the end of the job."""
    case = dataclasses.replace(PLAIN, mode=mode)
    for line, at in simulated(case).left_at.items():
        for i in range(1, 30):
            yield simulated(
                dataclasses.replace(case, events=(Event("break", at + 0.0004 * i, line, 0.5),))
            )


@pytest.mark.parametrize("mode", ["sync", "exchange", "async", "communicator", "half_async", "geo"])
def test_a_connection_that_breaks_at_the_end_of_a_job_is_made_again(mode: str) -> None:
    for found in broken_at_the_end(mode):
        assert not found.faults, str(found)
        assert {*found.ends.values()} == {"well"}, str(found)


def test_a_server_does_not_wait_for_the_welcome_of_a_server_that_has_ended() -> None:
    """The welcome was lost with the connection, and all trainers have left."""
    first, second = "pserver 127.0.0.1:1", "pserver 127.0.0.1:2"
    pause, broken = (
        Event("pause", 0.0, second, 2.6),
        Event("break", 0.5, f"{first} {second}", 20.0),
    )
    case = Case(0, "exchange", (0,), ((3,), (2,)), patience=3.5, events=(pause, broken))
    found = simulated(case)
    assert {*found.ends.values()} == {"well"}, str(found)
    assert found.seconds < 2.6 + 2 * RETRY


def test_a_server_that_waits_for_no_answer_to_its_goodbye_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TrainerRegistry, "parted", TrainerRegistry.served)
    assert any(
        "but no event affects it" in str(found.faults) for found in broken_at_the_end("sync")
    )


def test_a_verdict_is_told() -> None:
    case = dataclasses.replace(
        PLAIN, events=(Event("break", 0.05, "trainer 0 pserver 127.0.0.1:1", 0.5),)
    )
    told = str(simulated(case))
    assert (
        "0.050 s  the connection trainer 0 pserver 127.0.0.1:1 breaks, and is restored after 0.5 s"
        in told
    )
    assert told.endswith("as it must be")


# -- requests between steps
# ----------------------------------------------------------------------------------


def test_a_checkpoint_that_one_server_cannot_write_is_reported_and_the_job_goes_on() -> None:
    save = Request("save", 1, (0, 1), seconds=0.4, fails="127.0.0.1:2")
    found = simulated(dataclasses.replace(PLAIN, requests=(save,)))
    assert not found.faults
    assert {*found.ends.values()} == {"well"}


@pytest.mark.parametrize(("mode", "moment"), [("sync", "ended"), ("async", "sent")])
def test_a_checkpoint_that_is_asked_for_in_the_middle_of_a_step_is_refused(
    mode: str, moment: str
) -> None:
    save = Request("save", 1, (0, 1), moment=moment)
    case = Case(seed=0, mode=mode, steps=(2, 2), servers=((3, 1),), message_bytes=8)
    found = simulated(dataclasses.replace(case, requests=(save,)))
    assert not found.faults
    assert any("refused trainer" in how for how in found.ends.values()), found


@pytest.mark.parametrize("asked", [(0, 1), (0,)])
def test_rows_are_evicted_when_all_trainers_have_asked(asked: tuple[int, ...]) -> None:
    evict = Request("evict", 2, asked)
    case = Case(seed=0, mode="sync", steps=(3, 3), servers=((3,),), table=4, requests=(evict,))
    found = simulated(case)
    assert not found.faults
    assert ({*found.ends.values()} == {"well"}) == (len(asked) == 2), found
    assert len(asked) == 2 or all("evicts rows" in how for how in found.ends.values())


def test_rows_of_steps_that_a_communicator_has_not_sent_stay() -> None:
    """Trainers look up rows for a step before gradients of earlier steps are sent."""
    config = CommunicatorConfig(1, 1, 1, True)
    evict = Request("evict", 1, (1,))
    case = Case(seed=1291, mode="communicator", steps=(2, 1), servers=((4,), (5, 1)))
    case = dataclasses.replace(case, communicator=config, table=4, requests=(evict,))
    for seed in range(40):
        found = simulated(dataclasses.replace(case, seed=seed))
        assert not found.faults, found


# -- processes that are not of the job
# ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "async", "communicator", "geo"])
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (
            "second",
            "another process is already connected as trainer 1; set a different DTRANS_TRAINER_ID",
        ),
        ("stranger", "does not admit trainer 1: it does not have the job's token"),
    ],
)
def test_another_process_is_refused_by_name_and_the_job_goes_on(
    mode: str, kind: str, why: str
) -> None:
    case = dataclasses.replace(PLAIN, mode=mode, guests=(Guest(kind, 0.3, 1),))
    found = simulated(case)
    assert not found.faults
    assert why in found.ends.pop(f"{kind} trainer 1")
    assert {*found.ends.values()} == {"well"}


def test_a_stale_plan_is_refused_before_its_trainer_has_come() -> None:
    found = simulated(dataclasses.replace(PLAIN, guests=(Guest("stale", 0.0, 1),)))
    assert not found.faults
    assert "plans something else than pserver 127.0.0.1:1" in found.ends.pop("stale trainer 1")
    assert {*found.ends.values()} == {"well"}


@pytest.mark.parametrize("mode", ["sync", "async", "communicator"])
def test_a_trainer_that_was_killed_and_comes_back_is_refused_by_name(mode: str) -> None:
    killed = Event("crash", 0.3, "trainer 1")
    case = dataclasses.replace(
        PLAIN, mode=mode, events=(killed,), guests=(Guest("second", 0.4, 1),)
    )
    found = simulated(case)
    assert not found.faults
    assert "another process is already connected as trainer 1" in found.ends["second trainer 1"]
    assert mode != "sync" or "trainer 1" in found.ends["trainer 0"]


# -- planted faults
# ----------------------------------------------------------------------------------


def _is_true_of_any(monkeypatch: pytest.MonkeyPatch) -> None:
    def step_if_any_sent(self: Any) -> None:
        trainers = self._trainers
        if len(trainers.known) == trainers.count and any(
            self._turns.by_trainer[k].at_barrier for k in trainers.present
        ):
            self._make_step()

    monkeypatch.setattr(SyncServer, "_step_if_all_sent", step_if_any_sent)


def _forgets_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SyncServer._finish

    def finish(self: Any) -> None:
        self._turns.by_trainer[0].waits = False
        real(self)

    monkeypatch.setattr(SyncServer, "_finish", finish)


def _computes_parts_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    def has_gradients(self: Any, part: UpdatePart) -> bool:
        grads = self.by_trainer[0].grads
        return all(grads.has_all(names[0]) for names in part.sent)

    monkeypatch.setattr(TrainerTurns, "_has_gradients", has_gradients)


def _computes_pieces_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    def has_gradients(self: Any, part: UpdatePart) -> bool:
        sent = [item for names in part.sent for item in names.items()]
        return all(self.by_trainer[k].grads.has_begun(n) for k, n in sent)

    monkeypatch.setattr(TrainerTurns, "_has_gradients", has_gradients)


def _answers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SyncServer.recv

    def recv(self: Any, k: int, message: Any) -> None:
        real(self, k, message)
        turn = self._turns.by_trainer[k]
        if turn.waits:
            turn.waits = False
            self._say(
                self._trainers.known[k].address, "blocks", _blocks(self, k), step=message["step"]
            )

    def _blocks(self: Any, k: int) -> list[Any]:
        return [(n, self._update.values[n]) for n in self._trainers.known[k].wants]

    monkeypatch.setattr(SyncServer, "recv", recv)


def _counts_those_who_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_step(self: Any) -> None:
        self._continue(self._joint.begin(self._turns._gradients(), self._trainers.known))

    monkeypatch.setattr(SyncServer, "_make_step", make_step)


def _loses_what_came_early(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SyncServer.take_peer

    def take_peer(self: Any, address: bytes, message: Any) -> bool:
        return (message.op == "partials" and self._update.exchange is None) or real(
            self, address, message
        )

    monkeypatch.setattr(SyncServer, "take_peer", take_peer)


def _of_one_step(self: Any, real: Any, gradients: Any, /, steps: int = 1, **at_end: Any) -> None:
    real(self, gradients, **at_end)


def _takes_the_first_answer_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Traffic.heard

    def heard(self: Any, endpoint: str, message: Any) -> None:
        real(self, endpoint, message)
        if self._pull is not None:
            self._pull.missing.clear()

    monkeypatch.setattr(Traffic, "heard", heard)


def _answers_with_rows_of_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SyncServer.prefetch

    def prefetch(self: Any, k: int, message: Any) -> None:
        sent = [i for i in self._trainers.known if i in self._turns.at_barrier]
        update, before = self._update, self._update.state
        if sent and not self._served.exchanges:
            rows = {}
            for i in sent:
                grads = self._turns.by_trainer[i].grads
                rows |= self._rows.requests.gradients(i, grads)
            update.begin({**self._turns._gradients(), **rows}, frozenset(sent), self.step)
        real(self, k, message)
        update.state = before

    monkeypatch.setattr(SyncServer, "prefetch", prefetch)


def _counts_rows_of_those_who_left(monkeypatch: pytest.MonkeyPatch) -> None:
    real = RowRequests.gradients

    def make_step(self: Any) -> None:
        present, turns = self._trainers.present, self._turns.by_trainer
        requests = self._rows.requests
        rows = {n: x for k in turns for n, x in real(requests, k, turns[k].grads).items()}
        for t in self._served.tables.values() if self.on_trainer_exit == "drop" else ():
            again = [rows[t.gradients[k]] for k in self._trainers.left]
            rows[t.gradients[present[0]]] = merged_rows(
                [rows[t.gradients[present[0]]], *again], "sum"
            )
        of = self._trainers.known if self.on_trainer_exit == "paddle" else present
        self._continue(self._joint.begin({**self._turns._gradients(), **rows}, of))

    monkeypatch.setattr(SyncServer, "_make_step", make_step)


def _all_sent(real: Any) -> Any:
    """Return a method that sends the rows that are due, but no rows that have changed since."""

    def made(self: Any, step: int, touched: Any) -> Any:
        return real(self, step, {n: [x[:0] for x in of] for n, of in touched.items()})

    return made


def _due_at_once(real: Any) -> Any:
    def announce(self: Any, k: int, name: str, step: int, ahead: int, ids: Any) -> Any:
        due = real(self, k, name, step, ahead, ids)
        self._of[k, name, step + ahead].due = step
        return due and dataclasses.replace(due, is_last=True)

    return announce


def _without_the_last_table(real: Any) -> Any:
    """The gradient of the last table of a request is expected to have no rows."""

    def expect(self: Any, k: int, message: Any, ids: Any, grads: Any) -> None:
        names = list(ids)
        last = {names[-1]: ids[names[-1]][:0]} if len(names) > 1 else {}
        real(self, k, message, {**ids, **last}, grads)

    return expect


def _tells_of_a_row_once_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    real = UnseenChanges.take

    def take(self: Any, k: int, name: str) -> Any:
        ids = real(self, k, name)
        self._has[k, name][ids] = CHANGED
        return ids

    monkeypatch.setattr(UnseenChanges, "take", take)


def _evicts_when_one_asks(real: Any) -> Any:
    def evict(self: Any) -> None:
        self._trainers.all_said = bool
        real(self)
        del self._trainers.all_said

    return evict


def _accepts_a_second_process(real: Any) -> Any:
    def check(self: Any, k: int, address: bytes, message: Any, peer: str | None) -> None:
        if k in self.known:
            self.known[k].session = message["session"]
        real(self, k, address, message, peer)

    return check


def _without(real: Any, field: str) -> Any:
    """Return a method whose message lacks one field."""

    def take(self: Any, address: bytes, message: Any, *args: Any) -> Any:
        message.fields.pop(field, None)
        return real(self, address, message, *args)

    return take


def _says_hello_once(real: Any) -> Any:
    def connected(self: Any) -> None:
        if not hasattr(self, "said_hello"):
            self.said_hello = True
            real(self)

    return connected


def _counts_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NumberedMessages, "take", lambda *args: True)
    for check in ("check_number", "check_between"):
        monkeypatch.setattr(AsyncSteps, check, lambda self, k, message: self.of_trainer(k))


def _answers_a_round_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NumberedMessages, "take", lambda *args: True)
    monkeypatch.setattr(trainer_rounds.TrainerRounds, "_is_over", lambda *args: False)


def _takes_after_a_gap(self: Any, message: Any) -> bool:
    self.acknowledge(message.fields.get("heard", 0))
    number = message.fields.get("number", self.received)
    is_new = number > self.received or "number" not in message.fields
    self.received = max(self.received, number)
    return is_new


def _releases_one_more(real: Any) -> Any:
    return lambda self, heard: real(self, heard + 1)


def _forgets_each_message(real: Any) -> Any:
    def send(self: Any, step: int, messages: Any) -> None:
        real(self, step, messages)
        if self.peer.welcomed:
            self.peer.messages.clear()

    return send


def _nothing(*args: Any) -> None:
    return None


WRITTEN = SaveRequests.written


PUSHED = InNumpy.pushed
PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a gradient that comes twice counts twice": _counts_twice,
    "a round is added up in the order of arrival": lambda m: m.setattr(
        trainer_rounds, "sorted", list, raising=False
    ),
    "a round that was answered is answered again": _answers_a_round_again,
    "who left counts in each later step": lambda m: m.setattr(TrainerTurns, "forget", _nothing),
    "who left counts though nothing comes": _counts_those_who_left,
    "who left is waited for": lambda m: m.setattr(
        TrainerRegistry, "present", property(lambda self: list(self.known))
    ),
    "a block is whole when a part has come": lambda m: m.setattr(
        Inbox, "missing", lambda self: [n for n in self.memory if n not in self._arrived]
    ),
    "an answer before the step is made": _answers_at_once,
    "an answer comes before the last trainer's gradient": _computes_parts_too_early,
    "a piece is computed before its rows have come": _computes_pieces_too_early,
    "the last answer repeats pieces": lambda m: m.setattr(
        wire, "after_bytes", lambda block, count: block
    ),
    "one trainer at the barrier is enough": _is_true_of_any,
    "a trainer that waits is forgotten": _forgets_who_waits,
    "gradients of the step before stay": lambda m: m.setattr(Inbox, "clear", _nothing),
    "parts of another server that come early are lost": _loses_what_came_early,
    "nobody looks who is late": lambda m: m.setattr(SyncServer, "look", _nothing),
    "a server speaks before it is welcome": lambda m: m.setattr(
        PeerLine, "send", lambda self, step, messages: [self._say(x) for x in messages]
    ),
    "a merged gradient is of one step": lambda m: m.setattr(
        TrainerLine, "send_blocks", functools.partialmethod(_of_one_step, TrainerLine.send_blocks)
    ),
    "parameters of one server are those of all": _takes_the_first_answer_for_all,
    "a server ends with its first trainer": lambda m: m.setattr(
        TrainerRegistry, "served", property(lambda self: any(t.done for t in self.known.values()))
    ),
    "what was pushed is pushed again": lambda m: m.setattr(
        InNumpy,
        "pushed",
        lambda self, local, old, trainers: (PUSHED(self, local, old, trainers)[0], old),
    ),
    "a pull forgets the steps that were made since": lambda m: m.setattr(
        InNumpy, "pulled", lambda self, local, server, old: server
    ),
    "a row that was told of is not told of again": _tells_of_a_row_once_for_ever,
    "the last steps are not pushed": lambda m: m.setattr(GeoSteps, "owes", False),
    "a prefetch is answered with rows of the next step": _answers_with_rows_of_the_next_step,
    "gradients of rows of who left count twice": _counts_rows_of_those_who_left,
    "who left goes on looking up rows": lambda m: m.setattr(RowRequests, "used", _nothing),
    "gradients of all tables but the last are expected": lambda m: m.setattr(
        RowRequests, "expect", _without_the_last_table(RowRequests.expect)
    ),
    "announced rows of one table are sent": lambda m: m.setattr(
        row_answers, "due_messages", lambda due: rows_ahead.due_messages(due[:1])
    ),
    "rows that were announced are not sent again": lambda m: m.setattr(
        RowsAhead, "end_update", _all_sent(RowsAhead.end_update)
    ),
    "rows are due too soon": lambda m: m.setattr(
        RowsAhead, "announce", _due_at_once(RowsAhead.announce)
    ),
    "rows that were announced are those that are looked up": lambda m: m.setattr(
        announced_lookups.np, "array_equal", lambda a, b: True
    ),
    "evict applied when one trainer asked": lambda m: m.setattr(
        SyncServer, "_evict_if_all_said", _evicts_when_one_asks(SyncServer._evict_if_all_said)
    ),
    "rows are evicted whose gradients are to come": lambda m: m.setattr(
        RowRequests, "under_way", lambda self, name: np.empty(0, np.int32)
    ),
    "`saved` reported though the write failed": lambda m: m.setattr(
        SaveRequests, "written", lambda self, name, error, now: WRITTEN(self, name, "", now)
    ),
    "a save in the middle of a step": lambda m: m.setattr(SyncServer, "check_between", _nothing),
    "a second process with one id is accepted": lambda m: m.setattr(
        TrainerRegistry,
        "_check_identity",
        _accepts_a_second_process(TrainerRegistry._check_identity),
    ),
    "a stale plan accepted": lambda m: m.setattr(trainer_registry, "check_plan", _nothing),
    "no goodbye awaited": lambda m: m.setattr(TrainerRegistry, "parted", TrainerRegistry.served),
    "strangers speak as trainers": lambda m: m.setattr(
        TrainerRegistry, "speaker", lambda self, address, message: self.by_address.get(address, 0)
    ),
    "a server of the job before is a peer": lambda m: m.setattr(
        ServerPeers, "meet", _without(ServerPeers.meet, "back")
    ),
    "a trainer says hello once": lambda m: m.setattr(
        ServerConnection, "connected", _says_hello_once(ServerConnection.connected)
    ),
    "a server that comes back takes the trainers of the one before": lambda m: m.setattr(
        TrainerRegistry, "hello", _without(TrainerRegistry.hello, "back")
    ),
    "a malformed message of a trainer is dropped in silence": lambda m: m.setattr(
        Serving, "_refuse", _nothing
    ),
    "of merged gradients of rows the last one counts": lambda m: m.setattr(
        traffic, "merged_rows", lambda parts, how: parts[-1]
    ),
    "messages that a network lost are not repeated": lambda m: m.setattr(
        NumberedMessages, "stored", []
    ),
    "a message after a gap is processed": lambda m: m.setattr(
        NumberedMessages, "take", _takes_after_a_gap
    ),
    "a message is released too early": lambda m: m.setattr(
        NumberedMessages, "acknowledge", _releases_one_more(NumberedMessages.acknowledge)
    ),
    "a connection is resumed only if its server is awaited": lambda m: m.setattr(
        OperationWait, "_take_early", _nothing
    ),
    "a server forgets messages to a peer before a step ends": lambda m: m.setattr(
        PeerLine, "send", _forgets_each_message(PeerLine.send)
    ),
}


# found late, by seed 7540
_SOAK = (pytest.mark.soak, pytest.mark.timeout(3600))
_SOAKED = {"no goodbye awaited": _SOAK}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("what", [pytest.param(x, marks=_SOAKED.get(x, ())) for x in PLANTED])
def test_a_planted_fault_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[what](monkeypatch)
    found = next((v for v in verdicts(range(10_000)) if v.faults), None)
    assert found is not None
    least = smaller(found)
    assert least.faults
    assert len(least.case.events) <= len(found.case.events)


# -- planted faults in jobs with snapshots ---------------------------------------------------------


# found late, by seed 3422
_LATE_IN_SNAPSHOTS = "an asynchronous trainer that has left is excused from a lost server's steps"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "what",
    [pytest.param(x, marks=_SOAK if x == _LATE_IN_SNAPSHOTS else ()) for x in PLANTED_IN_SNAPSHOTS],
)
def test_a_planted_fault_in_jobs_with_snapshots_is_found(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    PLANTED_IN_SNAPSHOTS[what](monkeypatch)
    found = next((v for v in verdicts(range(10_000), drawn_with_snapshots) if v.faults), None)
    assert found is not None
    least = smaller(found)
    assert least.faults
    assert len(least.case.events) <= len(found.case.events)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("what", PLANTED_AT_LOSS)
def test_a_planted_fault_in_snapshots_at_losses_is_found(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    PLANTED_AT_LOSS[what](monkeypatch)
    found = next((v for v in verdicts(range(10_000), drawn_at_loss) if v.faults), None)
    assert found is not None
    assert smaller(found).faults


@pytest.mark.sampled(2)
@pytest.mark.parametrize("what", PLANTED_IN_REPLICAS)
def test_a_planted_fault_in_replicas_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED_IN_REPLICAS[what](monkeypatch)
    found = next((v for v in verdicts(range(10_000), drawn_with_replicas) if v.faults), None)
    assert found is not None
    assert smaller(found).faults


# found late, by seed 2929
_LATE = ("a server that goes back forgets pending checkpoints", drawn_with_replicas)
_WITH_FULL_DISKS = [
    pytest.param(
        what,
        draw,
        marks=_SOAK if (what, draw) == _LATE else (),
    )
    for what in PLANTED_WITH_FULL_DISKS
    for draw in (drawn_with_snapshots, drawn_at_loss, drawn_with_replicas)
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("what", "draw"), _WITH_FULL_DISKS)
def test_a_planted_fault_with_full_disks_is_found(
    what: str, draw: Callable[[int], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    PLANTED_WITH_FULL_DISKS[what](monkeypatch)
    found = next((v for v in verdicts(range(10_000), draw) if v.faults), None)
    assert found is not None
    assert smaller(found).faults


def test_the_answer_to_an_eviction_waits_for_the_backup(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the primary fails after trainers have its answer, the backup has the eviction, too."""
    case = Case(
        seed=1,
        mode="sync",
        steps=(6, 6),
        servers=((3,), (2,)),
        table=4,
        snapshots=20,
        at_loss=True,
        replicas=1,
        pace=0.05,
        requests=(Request("evict", 3, (0, 1)),),
    )
    primary, backup = case.endpoints
    hold = Event("hold", 0.54, f"pserver {primary} pserver {backup}", 5.0)
    case = dataclasses.replace(case, events=(hold, Event("crash", 0.64, f"pserver {primary}")))
    assert not simulated(case).faults
    answer_evictions_early(monkeypatch)
    assert simulated(case).faults


def test_cases_with_replicas_are_of_all_kinds() -> None:
    """Servers are lost alone, and together with their host."""
    cases = [drawn_with_replicas(seed) for seed in range(200)]
    assert {c.mode for c in cases} == {"sync", "exchange"}
    assert {len(c.servers) for c in cases} == {2, 3}
    assert {c.hosts for c in cases} == {0, 2}
    assert {c.table for c in cases} == {0, 1, 4} and any(c.requests for c in cases)
    kinds = [e.kind + " " * (e.kind == "crash") + e.who.split()[0] for c in cases for e in c.events]
    assert {"crash trainer", "crash pserver"} <= set(kinds)
    assert any(kind.startswith("host") for kind in kinds)


def test_a_smaller_case_is_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED["one trainer at the barrier is enough"](monkeypatch)
    found = next(
        v for v in verdicts(range(10_000)) if v.faults and v.case.events and len(v.case.servers) > 1
    )
    least = smaller(found)
    assert least.faults
    assert not any(simulated(case).faults for case in reduced(least.case))


# -- the command line ------------------------------------------------------------------------------


def test_the_command_shows_one_schedule() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "tools.simulate", "--seed", "16"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("seed 16: ") and shown.stdout.endswith("as it must be\n")


def test_the_command_counts_schedules_and_makes_a_wrong_one_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = CliRunner().invoke(app, ["--count", "20"])
    assert done.exit_code == 0
    assert done.output.startswith("20 of 20 schedules keep all promises (")
    PLANTED["one trainer at the barrier is enough"](monkeypatch)
    done = CliRunner().invoke(app, ["--count", "60"])
    assert done.exit_code == 1
    *_, wrong, last = done.output.strip().split("\n\n")
    assert "\nwrong\n  " in wrong
    assert re.match(r"\d+ of 60 schedules keep all promises", last)
