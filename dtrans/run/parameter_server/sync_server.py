"""A synchronous parameter server.

    every trainer:  hello                             once
                    recv                              the initial values
                    send..., send_barrier, recv       every step
                    complete                          once

Gradients are kept as they come, in memory that is kept too. When all trainers have said `send_barrier`, one
compiled call makes the new state, and the blocks that trainers asked for go out. Serving ends when every trainer
has said `complete`. One that says so before the others has left: `on_trainer_exit` of `dtrans.pserver` says what later
updates are made of.

    every other server:  peer                         once
                         partials...                  every step and level

An update that reduces over rows is made in phases, with an exchange between servers after each but the last
(`dtrans.run.parameter_server.server_peers`). Serving goes on meanwhile.

Who is late is always known: a trainer that waits is told whom for, every few seconds; a trainer that never
comes, falls silent, or keeps the others waiting for longer than the deadline, or a server that does, ends the job
with an error that names it, at the server and at everybody that it serves. A message that does not follow the
protocol is refused and logged, and changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
import zmq

from dtrans.errors import DeadlineError, PeerError, WireError
from dtrans.run.net import wire
from dtrans.run.net.buffers import BufferPool
from dtrans.run.parameter_server.base_server import BaseServer, log, named
from dtrans.run.parameter_server.exchange import Exchange
from dtrans.run.parameter_server.server_peers import ServerPeers
from dtrans.run.parameter_server.update import CompiledUpdate, ServerUpdate, Vectors


class SyncServer(BaseServer):
    """Serves one `listen_and_serv` whose updates are of all trainers; arguments are those of `BaseServer`."""

    def _prepare(self, update: ServerUpdate) -> None:
        """Compile updates lazily, and make the memory that gradients come to."""
        self.on_trainer_exit: str = update.eqn.params["on_trainer_exit"]
        self.step = 0
        self._late_since: float | None = None
        self._exchange: Exchange | None = None  # the one that the update waits for
        self._whole = update
        self._updates = {frozenset(range(self.count)): CompiledUpdate(update)}  # by whose gradients they are made of
        pool = BufferPool()
        self._grads = {n: pool.take(n, t.shape, t.dtype) for n, t in update.grad_types.items()}
        self._bytes = {n: g.reshape(-1).view(np.uint8) for n, g in self._grads.items()}
        # a trainer may send its own gradients only
        self._of = {k: {names[k] for names in update.sent} for k in range(self.count)}
        self._spent: set[int] = set()  # of those who left, whose last gradients have counted

    def _begin(self) -> None:
        self._peers = ServerPeers(
            self._context, self.endpoint, self._whole.exchanges, on_trainer_exit=self.on_trainer_exit
        )
        self._publish()

    def _step_at(self, k: int) -> int:
        return self.step

    # -- what trainers say -----------------------------------------------------------------------

    def _send(self, k: int, message: wire.Message) -> None:
        t = self._trainers[k]
        self._in_turn(k, message)
        if t.at_barrier:
            raise WireError(f"gradients of step {self.step} after its send_barrier")

        def target(name: str) -> np.ndarray:
            if name not in self._of[k]:
                raise WireError(f"{name} is not a gradient that trainer {k} sends to pserver {self.endpoint}")
            return self._bytes[name]

        wire.unpack(message, target, t.arrived)

    def _send_barrier(self, k: int, message: wire.Message) -> None:
        t = self._trainers[k]
        self._in_turn(k, message)
        if t.at_barrier:
            raise WireError(f"a second send_barrier of step {self.step}")
        short = sorted(n for n in self._of[k] if t.arrived.get(n, 0) != self._bytes[n].nbytes)
        if short:
            raise WireError(
                f"send_barrier of step {self.step}, but {short[0]} has {t.arrived.get(short[0], 0)} of "
                f"{self._bytes[short[0]].nbytes} bytes"
            )
        t.at_barrier = True
        gone = sorted(i for i, other in self._trainers.items() if other.done)
        if gone and self.on_trainer_exit == "error":
            raise PeerError(self._unequal(gone[0], k))
        self._step_if_all_sent()

    def _step_if_all_sent(self) -> None:
        """Make the step when all trainers have come, and those who have not left are at the barrier."""
        present = [t for t in self._trainers.values() if not t.done]
        if len(self._trainers) == self.count and present and all(t.at_barrier for t in present):
            self._make_step()

    def _make_step(self) -> None:
        """All gradients are here."""
        update = self._update_of_those_present()
        self._run = update.run({n: self._grads[n] for n in update.update.grad_types}, self.state)
        self._go_on({})

    def _update_of_those_present(self) -> CompiledUpdate:
        """What makes the new state; of every set of trainers one is compiled."""
        present = frozenset(self._trainers) if self.on_trainer_exit == "paddle" else self._present()
        if present not in self._updates:
            gone = named(sorted(self._trainers.keys() - present))
            told = "pserver %s goes on without %s, which left: step %d and later ones are of %s"
            log.warning(told, self.endpoint, gone, self.step + 1, named(sorted(present)))
            self._updates[present] = CompiledUpdate(self._whole.mean_over(present))
        return self._updates[present]

    def _present(self) -> frozenset[int]:
        """The trainers that have not left."""
        return frozenset(k for k, t in self._trainers.items() if not t.done)

    def _go_on(self, arrived: Vectors | None) -> None:
        """Make the step as far as what came from other servers allows."""
        while arrived is not None:
            try:
                self._exchange, parcels = self._run.send(arrived) if self._exchange else next(self._run)
            except StopIteration as done:
                self._exchange = None
                self._finish(done.value)
                return
            self._exchange_since = time.monotonic()
            self._peers.send(self.step, self._exchange, parcels)
            arrived = self._arrived()

    def _arrived(self) -> Vectors | None:
        """What the update waits for, if all of it is here."""
        if self._exchange is None or self._peers.missing(self.step, self._exchange):
            return None
        return self._peers.collected(self.step, self._exchange)

    def _finish(self, state: dict[str, Any]) -> None:
        """A step is made."""
        # the memory of its gradients and of what other servers sent is written again, so nothing may still read it
        self.state = jax.block_until_ready(state) if self._whole.exchanges else state
        self._peers.made(self.step)
        self.step += 1
        self._late_since = None
        for t in self._trainers.values():
            t.at_barrier = False
            t.arrived.clear()
        self._publish()
        self._forget(self._trainers.keys() - self._present())
        for t in self._trainers.values():
            if t.waits:
                self._answer(t, self.step)

    def _forget(self, trainers: Collection[int]) -> None:
        """Zero the gradients of trainers that left: with `on_trainer_exit="paddle"` they have counted once more."""
        for k in set(trainers) - self._spent if self.on_trainer_exit == "paddle" else ():
            for name in self._of[k]:
                self._grads[name].fill(0)
            self._spent.add(k)

    def _publish(self) -> None:
        """The parameters as memory to send from; waits until they are made."""
        self._values = {n: np.asarray(self.state[n]) for n in self._types}

    def _recv(self, k: int, message: wire.Message) -> None:
        t = self._trainers[k]
        wants = self._wanted(k, message["blocks"]) if "blocks" in message.fields else t.wants
        if message["step"] not in (self.step, self.step + 1) or (message["step"] > self.step and not t.at_barrier):
            raise WireError(f"`recv` of step {message['step']}, pserver {self.endpoint} is at {self.step}")
        t.wants, t.waits = wants, True
        if message["step"] == self.step:
            self._answer(t, self.step)

    def _complete(self, k: int, message: wire.Message) -> None:
        t = self._trainers[k]
        t.done = True
        self._say(t.address, "goodbye")
        waiting = sorted(i for i, other in self._trainers.items() if other.at_barrier and i != k)
        if t.at_barrier or t.arrived:
            after = ", after its send_barrier" if t.at_barrier else ""
            raise PeerError(f"trainer {k} closed in the middle of step {self.step + 1}{after}")
        if waiting and self.on_trainer_exit == "error":
            raise PeerError(self._unequal(k, waiting[0]))
        if not self.step:
            self._forget([k])  # it never sent a gradient, and the memory for it holds anything
        self._step_if_all_sent()

    def _unequal(self, gone: int, sends: int) -> str:
        """Why a job with on_trainer_exit="error" ends."""
        return (
            f"trainer {gone} closed after step {self.step} while trainer {sends} sends step {self.step + 1}: "
            "with on_trainer_exit='error' all trainers make the same number of steps"
        )

    def _abort(self, k: int, message: wire.Message) -> None:
        self._trainers[k].done = self._trainers[k].failed = True
        raise PeerError(f"trainer {k} failed: {message['reason']}")

    def _in_turn(self, k: int, message: wire.Message) -> None:
        if message["step"] != self.step:
            raise WireError(f"`{message.op}` of step {message['step']}, pserver {self.endpoint} is at {self.step}")

    # -- what servers say ------------------------------------------------------------------------

    @property
    def _lines(self) -> Sequence[zmq.Socket[Any]]:
        return self._peers.sockets

    def _listen(self) -> None:
        self._peers.listen()

    @property
    def _settled(self) -> bool:
        return self._peers.settled

    @property
    def _others(self) -> Sequence[bytes]:
        return self._peers.addresses

    def _other(self, address: bytes) -> str:
        peer = self._peers.name(address)
        return super()._other(address) if peer is None else f"pserver {peer}"

    def _end(self, *, failed: bool) -> None:
        self._peers.close(failed=failed)

    def _of_others(self, address: bytes, message: wire.Message) -> bool:
        if message.op == "peer":
            self._meet(address, message)
        elif address in self._others:
            self._partials(address, message)
        else:
            return False
        return True

    def _meet(self, address: bytes, message: wire.Message) -> None:
        if address in self._by_address:
            raise WireError(f"trainer {self._by_address[address]} cannot be a pserver too")
        if self._peers.meet(address, message):
            self._say(address, "welcome", step=self.step, local="", silence=self._silence)
        else:
            self._say(address, "waiting", reason=f"the end of a job that pserver {message['endpoint']} is in already")

    def _partials(self, address: bytes, message: wire.Message) -> None:
        if message.op != "partials":
            raise WireError(f"a `{message.op}` message, which servers do not take from each other")
        self._peers.take(address, message, self.step)
        self._go_on(self._arrived())

    # -- who is late -----------------------------------------------------------------------------

    def _look(self) -> None:
        """Raise for whoever is too late, and tell those who wait whom they wait for."""
        now = time.monotonic()
        for k, t in self._trainers.items():
            if not t.done and now - t.heard > self._silence:
                raise DeadlineError(
                    f"pserver {self.endpoint} heard nothing from trainer {k} for {now - t.heard:.1f} s; it is "
                    "taken for dead"
                )
        absent = self._absent(now)
        late = absent + [k for k, t in self._trainers.items() if not t.at_barrier and not t.done]
        waiting = [k for k, t in self._trainers.items() if t.at_barrier]
        if not waiting:
            # at the end servers wait for each other only where one has not heard yet that the other is there
            self._late_since = (self._late_since or now) if self._served() else None
            if self._late_since is not None and now - self._late_since > self.deadline:
                raise DeadlineError(
                    f"pserver {self.endpoint}, whose trainers have closed, waited {now - self._late_since:.1f} s for "
                    f"{self._peers.named(self._peers.unsettled)} to greet it"
                )
            return
        if self._exchange is None:
            self._late_since = self._late_since or now
            what = f"gradients of step {self.step + 1} from {named(late)}"
        else:
            self._late_since = self._exchange_since
            missing = self._peers.missing(self.step, self._exchange)
            what = f"partial results of step {self.step + 1}, level {self._exchange.level}, from "
            what += self._peers.named(missing)
            self._peers.check(missing, what)
        waited = now - self._late_since
        if waited > self.deadline:
            raise DeadlineError(f"pserver {self.endpoint} and {named(waiting)} waited {waited:.1f} s for {what}")
        for k in waiting:
            self._say(self._trainers[k].address, "waiting", reason=f"{waited:.1f} s for {what}")
