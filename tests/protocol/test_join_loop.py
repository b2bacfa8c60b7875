"""The loops of a rendezvous, run over the network of the simulator."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from dtrans.errors import DeadlineError, DtransError, PeerError
from dtrans.protocol import wire
from dtrans.protocol.collective.join_loop import LeaderLoop, MemberLoop
from dtrans.protocol.transport import LINGER
from tools.simulate.clock import Clock
from tools.simulate.network import (
    Network,
    SimulatedListener,
    SimulatedTransport,
    drawn_delay,
)
from tools.simulate.process import Process


ENDPOINTS = ("a:1", "b:2", "c:3")
DEADLINE = 60.0


class Trainer(Process):
    """Trainer that joins a rendezvous, with its list of endpoints."""

    def __init__(
        self, network: Network, number: int, endpoints: tuple[str, ...] = ENDPOINTS
    ) -> None:
        super().__init__(f"trainer {number}", network.clock)
        self.begun = True
        self._transport = SimulatedTransport(network, self)
        how: Any = {"secret": "secret", "deadline": DEADLINE}
        self._loop: LeaderLoop | MemberLoop
        if number == 0:
            self._loop = LeaderLoop(self._transport, endpoints, endpoints, **how)
        else:
            door = self._transport.bind(ENDPOINTS[number])
            self._loop = MemberLoop(self._transport, door, number, endpoints, **how)
        self.wake_at(self._loop.wakes)

    def step(self) -> None:
        error: DtransError | None = None
        try:
            self._loop.step()
        except (DeadlineError, PeerError) as e:
            error = e
        if error is None and not self._loop.is_done:
            self.wake_at(self._loop.wakes)
            return
        self._loop.end(error)
        self.end(error)

    def close(self) -> None:
        self._transport.close()


def start(
    seed: int, second: tuple[str, ...] = ENDPOINTS, others: tuple[int, ...] = (1, 2)
) -> tuple[Network, Trainer, list[Trainer]]:
    """Start trainer 0, and other trainers up to three seconds later. A trainer that refuses starts
    last.

    Args:
      second: endpoints of trainer 2.
      others: trainers that start.
    """
    random, clock = Random(seed), Clock()
    network = Network(clock, drawn_delay(random, 0.01), patience=30.0)
    first, found = Trainer(network, 0), list[Trainer]()
    for k in others:
        endpoints = second if k == 2 else ENDPOINTS
        join = lambda k=k, endpoints=endpoints: found.append(Trainer(network, k, endpoints))
        clock.at(3.0 if endpoints != ENDPOINTS else random.uniform(0.0, 2.5), join)
    return network, first, found


@pytest.mark.parametrize("seed", range(20))
def test_all_meet(seed: int) -> None:
    network, first, others = start(seed)
    somebody = Process("a stranger", network.clock)
    somebody.begun, somebody.step = True, lambda: None
    stranger = SimulatedTransport(network, somebody).connect("b:2", user="", role="")
    stranger.send([b""])
    stranger.send([wire.header("go")])
    network.clock.run(DEADLINE / 2)
    assert [(x.over, x.error) for x in (first, *others)] == [(True, None)] * 3


@pytest.mark.parametrize("seed", range(5))
def test_the_others_are_given_up_where_one_refuses(seed: int) -> None:
    network, first, others = start(seed, second=("a:1", "b:2", "z:9"))
    network.clock.run(2 * DEADLINE)
    one, two = sorted(others, key=lambda x: x.name)
    assert "trainer 2 (c:3) refused trainer 0" in str(first.error)
    assert "trainer 0 has different endpoints" in str(two.error)
    assert "trainer 1 stopped because trainer 0 gave up: trainer 2 (c:3) refused" in str(one.error)


def test_only_a_trainer_that_refuses_lingers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal must arrive before its sender ends.

    A trainer that receives the order to give up sends nothing.
    """
    close, lingers = SimulatedListener.close, dict[str, float]()

    def closed(listener: SimulatedListener, linger: float = 0.0) -> None:
        lingers.setdefault(listener.endpoint, linger)
        close(listener, linger)

    monkeypatch.setattr(SimulatedListener, "close", closed)
    network, *_ = start(0, second=("a:1", "b:2", "z:9"))
    network.clock.run(2 * DEADLINE)
    assert lingers == {"b:2": 0.0, "c:3": LINGER}


@pytest.mark.parametrize("seed", range(5))
def test_a_trainer_that_starts_again_is_asked_again(seed: int) -> None:
    network, first, others = start(seed, others=(1,))
    network.clock.run(3.0)
    (killed,) = others
    killed.kill()
    for k in (1, 2):
        others.append(Trainer(network, k, ENDPOINTS))
    network.clock.run(DEADLINE / 2)
    assert killed.killed and killed.ended is None
    assert [(x.over, x.error) for x in (first, *others[1:])] == [(True, None)] * 3


def test_one_that_does_not_come_is_named_to_all() -> None:
    network, first, others = start(0, others=(1,))
    network.clock.run(2 * DEADLINE)
    for process in (first, *others):
        assert isinstance(process.error, DeadlineError)
        assert "trainer 2 (c:3)" in str(process.error)
    assert first.ended == pytest.approx(DEADLINE)
