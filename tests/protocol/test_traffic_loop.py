"""The loop of a communicator, and the waits of a trainer. The test controls the transport."""

from __future__ import annotations

import collections
import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from dtrans.errors import DeadlineError, LostPeerError, PeerError
from dtrans.ops import CommunicatorConfig
from dtrans.protocol import token, wire
from dtrans.protocol.trainer.server_link import FailureReport, OperationWait, ServerLink
from dtrans.protocol.trainer.traffic import Leaf, Traffic
from dtrans.protocol.trainer.traffic_loop import TrafficLoop
from dtrans.protocol.trainer.trainer_steps import TrainerSteps
from dtrans.protocol.transport import RETRY, Event


class OneServer:
    """Transport with one link. The test sets the clock, and delivers events."""

    def __init__(self) -> None:
        self.time, self.said = 0.0, list[wire.Message]()
        self.coming: collections.deque[Event] = collections.deque()
        self.opened: list[str] = []

    def now(self) -> float:
        return self.time

    def connect(self, endpoint: str, /, **how: str) -> OneServer:
        self.opened.append(endpoint)
        return self

    def reaches(self, local: str, /) -> bool:
        return True

    def send(self, frames: Sequence[Any], /) -> None:
        self.said.append(wire.parse(frames))

    def changes(self) -> Iterator[Event]:
        return iter(())

    def poll(self, until: float, link: Any = None) -> Iterator[Event]:
        while self.coming:
            yield self.coming.popleft()

    def close(self, linger: float = 0.0) -> None:
        """Close the link."""

    def comes(self, kind: Any, op: str = "", frames: Sequence[Any] = (), **fields: Any) -> None:
        """Deliver an event. With `op`, the event is a message."""
        head = [wire.header(op, **fields), *frames] if op else []
        self.coming.append(Event(kind, self, head))

    def blocks(self, step: int, value: float) -> None:
        """Deliver parameters."""
        frame = np.full(4, value, np.float32).tobytes()
        self.comes("message", "blocks", [frame], step=step, pieces=[[["w", 0, 16]]])


def linked(local: bool = False, deadline: float = 5.0) -> tuple[OneServer, ServerLink]:
    """Return the link to a server that has welcomed its trainer."""
    server = OneServer()
    link = ServerLink(server, endpoint="here:1", trainer=0, trainers=1, session="", plan={},
                      sync_mode=False, secret="", deadline=deadline)  # fmt: skip
    link.line.opened(local=local)
    link.line.welcomed = True
    return server, link


def test_a_greeting_is_copied_where_it_moves_to_another_address() -> None:
    server, link = linked()
    link.line.opened()
    wait = OperationWait(server, {"here:1": link}, link.greet())

    def welcomed(server: OneServer, wait: OperationWait) -> Any:
        server.comes("connected")
        wait.turn()
        proof = token.shown("", "welcome " + server.said[-1]["nonce"])
        server.comes("message", "welcome", step=3, local="/there", proof=proof)
        wait.turn()
        return wait.done, server.opened, [x.op for x in server.said]

    assert welcomed(server, wait) == (False, ["here:1", "/there"], ["hello"])
    others = copy.deepcopy((server, wait))
    assert welcomed(*others) == (True, ["here:1", "/there"], ["hello", "hello"])
    assert not wait.done
    assert welcomed(server, wait)[0]


def loop_of(server: OneServer, link: ServerLink) -> TrafficLoop:
    leaf = Leaf(("here:1",), ("w",), (4,), (4,), np.dtype(np.float32))
    config = CommunicatorConfig(send_queue_size=2, min_send_grad_num_before_recv=1)
    traffic = Traffic({"here:1": link.line}, {"w": leaf}, config, deadline=5.0, name="trainer 0",
                      room=lambda key, shape, dtype: np.zeros(shape, dtype))  # fmt: skip
    return TrafficLoop(server, {"here:1": link}, traffic, config)


def group(loop: TrafficLoop, value: float) -> list[tuple[Leaf, Any]]:
    (leaf,) = loop._traffic._leaves.values()
    return [(leaf, np.full(4, value, np.float32))]


def turns(loop: TrafficLoop) -> TrafficLoop:
    while not loop.done and loop.turn():
        pass
    return loop


def test_a_loop_is_copied_in_the_middle() -> None:
    server, link = linked()
    loop = turns(loop_of(server, link))
    loop.put(group(loop, 1.0))
    loop.put(group(loop, 2.0))
    assert not loop.has_room

    def finished(server: OneServer, loop: TrafficLoop) -> Any:
        while loop._traffic.pulling:
            server.blocks((step := loop._links["here:1"].line.step), 5.0 + step)
            turns(loop)
        loop.end()
        assert loop.newest is not None
        rows = loop.newest[1]["w"].tolist()
        return [(x.op, x.fields) for x in server.said], loop.newest[0], rows, turns(loop).done

    others = copy.deepcopy((server, loop))
    said = len(server.said)
    made = finished(*others)
    assert len(server.said) == said
    assert finished(server, loop) == made
    assert made[1:] == (2, [6.0] * 4, True)


def test_an_answer_that_is_here_is_not_late() -> None:
    """The thread merges and sends for longer than the deadline.

    The answer arrives meanwhile, so no deadline has passed.
    """
    server, link = linked()
    loop = turns(loop_of(server, link))
    server.time = 60.0
    server.blocks(0, 1.0)
    turns(loop)
    assert loop.received == 0
    loop.put(group(loop, 1.0))
    turns(loop)
    server.time = 120.0
    with pytest.raises(DeadlineError, match="waited 60.0 s for pserver here:1: parameters"):
        turns(loop)


def test_a_server_that_ends_behind_its_answer_is_found() -> None:
    """The last answer of the server and the end of its connection are both pending when the loop
    polls."""
    server, link = linked(local=True)
    loop = turns(loop_of(server, link))
    server.blocks(0, 3.0)
    server.comes("broken")
    loop.turn()
    assert loop.received == 0
    with pytest.raises(
        PeerError, match="pserver here:1 went away while trainer 0 waited for the gradients"
    ):
        loop.turn()


def test_an_operation_between_steps_that_fails_ends_no_loop() -> None:
    server, link = linked()
    loop = loop_of(server, link)
    steps = TrainerSteps({"here:1": link.line}.__getitem__)
    asked = loop.between(lambda: steps.tables(["here:1"]))
    turns(loop)
    assert not asked.done  # parameters have not arrived yet
    server.blocks(0, 3.0)
    turns(loop)
    server.time = 6.0
    turns(loop)
    assert asked.done
    assert isinstance(asked.error, DeadlineError)
    again = loop.between(lambda: steps.tables(["here:1"]))
    turns(loop)
    server.comes("message", "report", tables=[], request=1)  # too late
    server.comes("message", "report", tables=[], request=2)
    turns(loop)
    assert (again.done, again.error, again.result) == (True, None, [])


def test_who_waits_for_a_server_that_has_gone_reads_its_last_words() -> None:
    server, link = linked(local=True)
    wait = OperationWait(server, {"here:1": link}, TrainerSteps(lambda ep: link.line).tables("a"))
    link.line.broken(0.0)
    server.comes("message", "report", tables=[], request=0)
    assert wait.turn()
    with pytest.raises(
        PeerError, match="went away while trainer 0 waited for its report of tables"
    ):
        wait.turn()


class FakeLink(OneServer):
    """One of two links of a transport."""


class TwoServers(OneServer):
    """Transport with links to the servers "a" and "b". The test delivers the events."""

    def __init__(self, *, at_once: bool) -> None:
        super().__init__()
        self.at_once = at_once
        self.opened_links = {ep: FakeLink() for ep in "ab"}
        self.links = {ep: self.linked(ep) for ep in "ab"}
        self.steps = TrainerSteps(lambda ep: self.links[ep].line)

    def connect(self, endpoint: str, /, **how: str) -> OneServer:
        return self.opened_links[endpoint]

    def linked(self, endpoint: str) -> ServerLink:
        link = ServerLink(self, endpoint=endpoint, trainer=0, trainers=2, session="", plan={},
                          sync_mode=True, secret="", deadline=5.0)  # fmt: skip
        link.line.welcomed = True
        return link

    def poll(self, until: float, link: Any = None) -> Iterator[Event]:
        """Yield all pending events; or, as in the simulator, only the first."""
        while self.coming:
            yield self.coming.popleft()
            if not self.at_once:
                return

    def comes_from(self, endpoint: str, op: str, **fields: Any) -> None:
        frames = [wire.header(op, **fields)]
        self.coming.append(Event("message", self.opened_links[endpoint], frames))

    def refuses(self, endpoint: str) -> None:
        self.comes_from(endpoint, "refuse", reason="it ended: trainer 1 failed", last=True)

    def ask(self, endpoint: str) -> OperationWait:
        return OperationWait(self, self.links, self.steps.tables([endpoint]))


def turns_of(wait: OperationWait) -> None:
    for _ in range(5):
        if not wait.done:
            wait.turn()


REFUSED = "^pserver b refused trainer 0: it ended: trainer 1 failed$"


@pytest.mark.parametrize("at_once", [True, False])
def test_an_answer_that_has_come_precedes_the_refusal_of_another_server(at_once: bool) -> None:
    """Trainer 1 has failed by the answer that it received. Server b reports this failure."""
    servers = TwoServers(at_once=at_once)
    wait = servers.ask("a")
    servers.refuses("b")
    servers.comes_from("a", "report", tables=[], request=1)
    turns_of(wait)
    assert wait.done and wait.operation.result == []
    with pytest.raises(PeerError, match=REFUSED):
        turns_of(servers.ask("a"))


@pytest.mark.parametrize("asked", ["a", "b"])
def test_a_refusal_of_another_server_ends_a_wait(asked: str) -> None:
    """The trainer does not wait for server a until the deadline."""
    servers = TwoServers(at_once=True)
    wait = servers.ask("a")
    servers.refuses("b")
    if asked == "b":
        servers.comes_from("a", "report", tables=[], request=1)
        turns_of(wait)
        wait = servers.ask("b")
    with pytest.raises(PeerError, match=REFUSED):
        turns_of(wait)
    # The refusal is raised once.
    again = servers.ask("a")
    turns_of(again)
    assert not again.done


@pytest.mark.parametrize("has_answered", [False, True])
def test_the_end_of_a_server_ends_an_operation_that_needs_its_answer(has_answered: bool) -> None:
    """Server a may itself wait for server b.

    An answer that server b has already sent still counts.
    """
    servers = TwoServers(at_once=True)
    servers.links["b"].line.opened(local=True)
    servers.links["b"].line.welcomed = True
    wait = OperationWait(servers, servers.links, servers.steps.tables("ab"))
    if has_answered:
        servers.comes_from("b", "report", tables=[], request=1)
    servers.coming.append(Event("broken", servers.opened_links["b"], []))
    assert not wait.turn()  # no answer of server a
    if has_answered:
        servers.comes_from("a", "report", tables=[], request=1)
        turns_of(wait)
        assert wait.done
        return
    with pytest.raises(LostPeerError, match="^pserver b went away while trainer 0 waited for its"):
        wait.turn()


@pytest.mark.parametrize("answer", ["", "waiting"])
def test_a_greeting_without_an_answer_is_repeated_in_time_or_fails(answer: str) -> None:
    """A server that only says that it waits has not admitted the trainer.

    So the trainer may wait for the next server at this endpoint.
    """
    server, link = linked(deadline=60.0)
    link.line.opened()
    wait = OperationWait(server, {"here:1": link}, link.greet())
    server.comes("connected")
    wait.turn()
    if answer:
        server.comes("message", answer, reason="the end of a job")
        wait.turn()
    server.comes("broken")
    wait.turn()
    assert link.line.retries_until == (math.inf if answer else RETRY)
    server.time = RETRY
    if answer:
        wait.turn()
        assert not wait.done
        return
    with pytest.raises(LostPeerError, match="went away while trainer 0 waited for an answer to"):
        wait.turn(), wait.turn()


@pytest.mark.parametrize("how", ["goodbye", "broken", "too late", "a new generation"])
def test_who_says_why_it_ends_waits_for_one_of_four(how: str) -> None:
    server, link = linked()
    words = FailureReport(server, link, "no reason")
    assert not words.turn()
    server.comes("message", "refuse", reason="it is too late")
    assert words.turn()
    assert not words.done
    if how == "too late":
        server.time = 6.0
    elif how == "a new generation":
        server.comes("message", "rewind", generation=1)
        assert words.turn()
    else:
        server.comes("message", "goodbye") if how == "goodbye" else server.comes("broken")
        assert words.turn()
    assert words.done
