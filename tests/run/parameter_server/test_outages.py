"""Networks that deliver nothing for some time, or break connections and lose messages.

The job continues, or ends with an error that names the role.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax
import pytest
import zmq
from helpers import init_of, mlp_batch, mlp_loss, mlp_params, plain_run, plain_step, tree_close
from relay import Relay
from role_threads import HANG, NEVER, RoleThreads, free_endpoints, serve, train

import dtrans
from dtrans.errors import PeerError
from dtrans.parameter_server.plan import PServerPlan
from dtrans.protocol.server.sync_server import SyncServer
from dtrans.protocol.trainer.trainer_line import TrainerLine
from dtrans.protocol.transport import RETRY
from dtrans.run.net import zmq_transport


PARAMS, BATCHES, TX = mlp_params(), [mlp_batch(8)] * 3, optax.adam(1e-2)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[PServerPlan, str, Relay]]:
    """Yield a plan for two trainers, its server's endpoint, and the relay in front of the
    server."""
    (ep,) = free_endpoints(1)
    step = dtrans.make_train_step(mlp_loss, TX)
    main = dtrans.trace(step, PARAMS, jax.eval_shape(TX.init, PARAMS), *BATCHES[0])
    plan = dtrans.pserver(main, dtrans.trace(init_of(TX), PARAMS), pservers=(ep,), trainers=2)
    relay = Relay(ep)
    monkeypatch.setattr(zmq_transport, "tcp_address", lambda endpoint: relay.address)
    monkeypatch.setattr(zmq, "IPC_PATH_MAX_LEN", 0)  # so no Unix socket bypasses the relay
    yield plan, ep, relay
    relay.close()


def run(
    role_threads: RoleThreads, job: tuple[PServerPlan, str, Relay], before: Any, patience: float
) -> dict[str, Any]:
    """Return the result or the error of each role. Trainer 0 calls `before` before each step."""
    plan, ep, _ = job
    options: dict[str, Any] = {"patience": patience, "deadline": NEVER}
    role_threads.start("server", serve, plan, ep, PARAMS, **options)
    for k in range(2):
        own = before if k == 0 else None
        role_threads.start(f"trainer {k}", train, plan, k, BATCHES, PARAMS, before=own, **options)
    return {name: role_threads.end(name) for name in ("server", "trainer 0", "trainer 1")}


def check_numbers(found: dict[str, Any]) -> None:
    """Check that the job has the results of one device."""
    assert not [x for x in found.values() if isinstance(x, BaseException)], found
    expected, _, _ = plain_run(plain_step(mlp_loss, TX), PARAMS, TX.init(PARAMS), BATCHES)
    for k in range(2):
        tree_close(found[f"trainer {k}"][0], expected, 1e-6)


def test_an_outage_shorter_than_the_patience_is_waited_for(
    role_threads: RoleThreads, job: Any
) -> None:
    """The outage is longer than the default limit for silent connections."""
    relay = job[2]
    check_numbers(
        run(role_threads, job, lambda i: relay.hold(5.0) if i == 1 else None, patience=10.0)
    )
    assert relay.connections == 2


def test_an_outage_longer_than_the_patience_ends_the_job_by_name(
    role_threads: RoleThreads, job: Any
) -> None:
    _, ep, relay = job
    found = run(role_threads, job, lambda i: relay.hold(8.0) if i == 1 else None, patience=1.0)
    assert isinstance(found["server"], PeerError) and f"to pserver {ep}" in str(found["server"])
    for k in range(2):
        assert isinstance(found[f"trainer {k}"], PeerError) and ep in str(found[f"trainer {k}"])


def test_a_connection_that_is_made_again_goes_on(role_threads: RoleThreads, job: Any) -> None:
    """Trainer 0 has sent all its messages. Trainer 1 waits for the server, or computes."""
    relay = job[2]

    def cut(i: int) -> None:
        if i == 1:
            time.sleep(1.0)  # trainer 1's message has arrived, and has no answer yet
            relay.cut()
            time.sleep(RETRY + 1.5)  # trainer 1 computes, so only ZeroMQ connects again

    check_numbers(run(role_threads, job, cut, patience=10.0))
    assert relay.connections == 4


def test_a_connection_that_is_not_made_again_ends_the_job_by_name(
    role_threads: RoleThreads, job: Any
) -> None:
    _, ep, relay = job
    cut_at: list[float] = []

    def cut(i: int) -> None:
        if i == 1:
            relay.refuse()
            relay.cut()
            cut_at.append(time.monotonic())

    found = run(role_threads, job, cut, patience=2.0)
    assert time.monotonic() - cut_at[0] > 1.5
    told = f"to pserver {ep} ended without a goodbye, in step 2"
    assert isinstance(found["server"], PeerError) and str(found["server"]).endswith(told)
    for k in range(2):
        error = found[f"trainer {k}"]
        assert isinstance(error, PeerError) and str(error).startswith(
            f"pserver {ep} went away while trainer {k} waited"
        )


def test_a_job_whose_last_words_are_lost_has_ended_well(
    role_threads: RoleThreads, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The `complete` of trainer 0 is lost with its connection.

    Then the goodbye to the last trainer is lost.
    """
    relay, tells, completes = job[2], TrainerLine.tell, SyncServer.complete
    all_have_trained = threading.Barrier(2)

    def lose_complete(line: TrainerLine, op: str, **fields: Any) -> None:
        is_first = op == "complete" and line.me == "trainer 0"
        if op == "complete":
            all_have_trained.wait(HANG)
        lost_data = relay.lose() if is_first else None
        tells(line, op, **fields)
        if lost_data is not None:
            assert lost_data.wait(HANG)
            relay.cut()

    def lose_goodbye(server: SyncServer, k: int, message: Any) -> None:
        if len(server._trainers.left) == 1:
            relay.cut()
        completes(server, k, message)

    monkeypatch.setattr(TrainerLine, "tell", lose_complete)
    monkeypatch.setattr(SyncServer, "complete", lose_goodbye)
    check_numbers(run(role_threads, job, None, patience=10.0))
    assert relay.connections > 2


# -- networks that lose messages again and again ---------------------------------------------------

SIZES, STEPS = (200, 300, 3), 12
MODES: dict[str, dict[str, Any]] = {
    "synchronous, with an exchange between servers": {},
    "asynchronous": {"mode": dtrans.Async()},
    "with a communicator that each step waits for": {"mode": dtrans.HalfAsync()},
}


class Breaks:
    """Breaks of connections; each loses the data in transit.

    Attributes:
      count: number of breaks.
    """

    def __init__(self, relays: Sequence[Relay]) -> None:
        self.count = 0
        self._relays = relays
        self._threads: list[threading.Thread] = []

    def before(self, step: int) -> None:
        """Let the connections of one server break at their next data."""
        for thread in self._threads[-1:]:
            thread.join(HANG)
        if step:
            relay = self._relays[step % len(self._relays)]
            args = (relay, relay.lose())
            self._threads.append(threading.Thread(target=self._cut, args=args, daemon=True))
            self._threads[-1].start()

    def _cut(self, relay: Relay, lost: threading.Event) -> None:
        assert lost.wait(HANG)
        relay.cut()
        self.count += 1


@pytest.mark.parametrize("mode", MODES)
def test_a_network_that_loses_messages_changes_no_bit(
    mode: str, role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one trainer, an asynchronous job also has the same bits in each run."""
    trainers = 1 if MODES[mode] else 2
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    if MODES[mode]:
        tx = optax.adam(1e-2)
    params = mlp_params(SIZES)
    batches = [mlp_batch(8, SIZES, seed=i) for i in range(STEPS)]
    step = dtrans.make_train_step(mlp_loss, tx)
    main = dtrans.trace(step, params, jax.eval_shape(tx.init, params), *batches[0])
    startup = dtrans.trace(init_of(tx), params)

    def outcome(breaks: bool) -> tuple[list[bytes], int]:
        """Return the bytes of all trainers' parameters, and the number of breaks."""
        endpoints = free_endpoints(2)
        plan = dtrans.pserver(
            main,
            startup,
            pservers=endpoints,
            trainers=trainers,
            placement=dtrans.BlockPlacement(min_block_size=1),
            **MODES[mode],
        )
        relays = {ep: Relay(ep) for ep in endpoints}
        monkeypatch.setattr(zmq_transport, "tcp_address", lambda ep: relays[ep].address)
        monkeypatch.setattr(zmq, "IPC_PATH_MAX_LEN", 0)  # so no Unix socket bypasses the relay
        network = Breaks(tuple(relays.values()))
        before = network.before if breaks else None
        with contextlib.ExitStack() as stack:
            for relay in relays.values():
                stack.callback(relay.close)
            for ep in endpoints:
                role_threads.start(ep, serve, plan, ep, params)
            for k in range(trainers):
                own = before if k == 0 else None
                role_threads.start(f"trainer {k}", train, plan, k, batches, params, before=own)
            found = role_threads.all()
        values = [found[f"trainer {k}"][0] for k in range(trainers)]
        leaves = jax.tree.leaves(values)
        return [np.asarray(x).tobytes() for x in leaves], network.count

    expected, _ = outcome(breaks=False)
    role_threads.forget()
    found, count = outcome(breaks=True)
    assert count == STEPS - 1
    assert found == expected
