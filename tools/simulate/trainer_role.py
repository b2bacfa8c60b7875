"""Simulated trainer: a script, which uses the same loops as real trainers.

The script is a generator that yields what it waits for: a number of seconds of computation, an
operation, the last messages to a server, or a condition.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Generator, Mapping
from random import Random
from typing import Any

import numpy as np

from dtrans.errors import DtransError, LostPeerError
from dtrans.protocol.generations import NewGeneration
from dtrans.protocol.server.trainer_rounds import RESULTS
from dtrans.protocol.server_blocks import RowGradient
from dtrans.protocol.tables.table_rows import block_parts, runs_of, wanted_of
from dtrans.protocol.trainer.announced_lookups import LookedUp
from dtrans.protocol.trainer.generation_member import GenerationMember
from dtrans.protocol.trainer.operation import Operation
from dtrans.protocol.trainer.server_link import FailureReport, OperationWait, ServerLink
from dtrans.protocol.trainer.traffic import Leaf, Traffic
from dtrans.protocol.trainer.traffic_loop import TrafficLoop
from dtrans.protocol.trainer.trainer_steps import TrainerSteps, leave
from tools.simulate.between_steps import BetweenSteps
from tools.simulate.case import Case
from tools.simulate.clock import Clock
from tools.simulate.launcher import SimulatedGenerations, SimulatedLauncher
from tools.simulate.network import Network, SimulatedTransport
from tools.simulate.process import Process
from tools.simulate.trainer_mean import TrainerMean
from tools.simulate.updates import (
    announced,
    block_name,
    gradient,
    gradient_name,
    looked_up,
    round_part,
    row_gradient,
    spread,
)


Script = Generator[Any, Any, Any]


@dataclasses.dataclass(frozen=True)
class Origin:
    """Identity of a trainer: a part of the simulated job, or a guest.

    Attributes:
      prefix: prefix of the trainer's name; empty for the job's trainers.
      plan: fingerprint of the trainer's plan.
      token: the trainer's token.
    """

    prefix: str = ""
    plan: str = "one"
    token: str = ""


JOB = Origin()


class SimulatedTrainer(Process):
    """Simulated trainer without a communicator.

    Attributes:
      pulled: received parameters, each with the number of this trainer's steps before their
        request. The first ones are the initial parameters.
      pushed: gradients, or pushes of GEO-SGD, of each block in the order of the steps, by name of
        the block. Gradients that were not sent yet are included.
      firsts: for each generation of a job with snapshots, the number of this process's steps, and
        the number of the trainer's steps in the servers' state.
      newest_received: in a job with snapshots, the newest step of the current generation whose
        parameters the trainer has received; 0 before all servers have welcomed it.
      begun_generations: for each of these generations, its number, and the number of elements of
        `pulled` and of `looked_up` before it.
      reduced: step, number and result of each round.
      looked_up: step, row ids and received rows of each lookup.
      left_at: time at which the trainer sent `complete` on a connection, by the connection's name.
      greeted_at: time at which all servers had welcomed the trainer.
      welcomed_at: time of each server's welcome, by endpoint.
      between: requests between steps.
      mean: running mean of the trainer's gradients; None if the case has none.
    """

    def __init__(
        self,
        case: Case,
        k: int,
        clock: Clock,
        random: Random,
        network: Network,
        origin: Origin = JOB,
        launcher: SimulatedLauncher | None = None,
    ) -> None:
        super().__init__(f"{origin.prefix}trainer {k}", clock)
        self._launcher = launcher
        self._generations = None if launcher is None else SimulatedGenerations(launcher, self.name)
        self._member = GenerationMember(self._generations)
        self.case, self.k, self.random = case, k, random
        self._origin = origin
        self.number = 0 if launcher is None else launcher.generation.number
        self.mean: TrainerMean | None = None
        if launcher is not None and case.has_means:
            self.mean = TrainerMean(self, k, launcher)
        self._transport = SimulatedTransport(network, self, origin.token)
        self.greeted_at = math.inf
        self.welcomed_at: dict[str, float] = {}
        self.pulled: list[tuple[int, dict[str, np.ndarray]]] = []
        self.pushed: dict[str, list[np.ndarray]] = {}
        self.firsts: list[tuple[int, int]] = []
        self.begun_generations: list[tuple[int, int, int]] = []
        self.reduced: list[tuple[int, int, np.ndarray]] = []
        self.looked_up: list[tuple[int, np.ndarray, np.ndarray]] = []
        self.left_at: dict[str, float] = {}
        self.between = BetweenSteps(case, k, TrainerSteps(lambda ep: self._links[ep].line))
        self._open(self.number)
        self._script = self._run()
        self._wait: OperationWait | FailureReport | Callable[[], bool] = lambda: True
        self._computes = False
        # error to be raised inside the script
        self._failed: BaseException | None = None

    def _open(self, generation: int) -> None:
        """Create the state of new connections to the servers, from a generation on."""
        self._links: dict[str, ServerLink] = {}
        self.newest_received = 0
        self._least_generation = generation
        # as in a real job, each process has a new session in each generation
        self._session = f"session {generation} of {self.name} ({self.number})"
        self._steps = TrainerSteps(lambda ep: self._links[ep].line)
        self._steps.sync_mode = self.case.sync_mode
        self.between = BetweenSteps(self.case, self.k, self._steps, self.between.answers)

    def _reconnect(self, generation: int) -> None:
        """Leave the connections of an old generation, as `ServerConnections.abandon` does."""
        for link in self._links.values():
            link.close()
        self._member = GenerationMember(self._generations)
        self._open(generation)

    def start(self) -> None:
        """Start the script."""
        self.begun = True
        self.wake_at(self.clock.now)

    # -- the script ------------------------------------------------------------------------------

    def _run(self) -> Script:
        try:
            yield from self._train_in_generations()
        except Exception as e:  # a real executor catches all exceptions, too
            self.error = e
        if self.error is None:
            self._member.leave()
        reason = None if self.error is None else str(self.error)
        if reason is None and self._steps.in_step:
            reason = "it closed in the middle of a step"
        for ep, link in list(self._links.items()):  # an error does not stop the loop
            if reason is None:
                self.left_at[f"{self.name} pserver {ep}"] = self.clock.now
            try:
                yield leave(link.line) if reason is None else self._last_words(link, reason)
            except NewGeneration as e:
                # see `ServerConnections._say_goodbye`
                if self.case.sync_mode or e.__cause__ is not None:
                    self.error = self.error or LostPeerError("lost a server while it left")
                else:
                    self._links.clear()
                    link.close()
                    return
            except DtransError as e:
                self.error = self.error or e
            link.close()

    def _train_in_generations(self) -> Script:
        while True:
            try:
                yield from self._train()
            except NewGeneration as e:
                self._reconnect(e.number)
            else:
                return

    def _last_words(self, link: ServerLink, reason: str) -> FailureReport:
        return FailureReport(self._transport, link, reason)

    def _train(self) -> Script:
        yield from self._greet()
        if self._member.generation is not None:
            counts = len(self.pulled), len(self.looked_up)
            self.begun_generations.append((self._member.generation.number, *counts))
        first = self._first_step()
        if self.mean is not None:
            self.mean.begin(self._member.generation, first)
        yield from self._pull(first, barrier=False)
        if self._asks_before(first):
            yield from self.between.ask(first)
        for step in range(first, self.case.steps[self.k]):
            if self.mean is not None:
                yield self.mean.write_if_due(step, self._links[self.case.endpoints[0]].line.every)
            self._announce(step)
            yield from self._prefetch(step)
            yield self.random.expovariate(1.0) * self.case.pace
            yield from self._exchange(step)
            for name, gradient_ in (*self._gradients(step), *self._row_gradients(step)):
                sent_as = gradient_name(name, self.k if self._steps.sync_mode else 0)
                self._steps.send(name.split("/")[0], sent_as, gradient_)
            yield from self.between.ask_when_sent(step)
            yield from self._pull(step + 1, barrier=self._steps.sync_mode)
            if self.mean is not None:
                self.mean.add(step)
            yield from self.between.ask(step + 1)
        yield from self.between.end_save()

    def _asks_before(self, first: int) -> bool:
        """Return True if requests precede the first step. A snapshot contains earlier evictions."""
        return not first

    def _first_step(self) -> int:
        """Return the number of this trainer's steps before the generation."""
        if self._generations is None:
            return 0
        first = max(link.line.count for link in self._links.values())
        before = self.pulled[-1][0] if self.pulled else first
        self.firsts.append((before, first))
        self.newest_received = first
        return first

    def _announce(self, now: int) -> None:
        """Announce the rows of later steps, for some steps with wrong row ids."""
        case = self.case
        if not case.tables or not case.ahead:
            return
        first = now + case.ahead if now else 1
        for step in range(first, now + case.ahead + 1):
            is_right = announced(case, self.k, step) is not None
            ids = looked_up(case, self.k, step if is_right else step + 100)
            self._steps.announced.add([self._room_for(ids)])

    def _prefetch(self, step: int) -> Script:
        """Receive the rows that a step looks up, unless they were announced correctly."""
        if not self.case.tables:
            return
        ids = looked_up(self.case, self.k, step)
        found = self._steps.announced.take("t", ids, step)
        if found is None:
            found = self._room_for(ids)
            yield self._steps.prefetch(found.wanted, train=True)
        self.looked_up.append((step, ids, found.rows))

    def _room_for(self, ids: np.ndarray) -> LookedUp:
        rows, table = np.empty(len(ids), np.float32), table_of(self.case)
        (parts,) = block_parts([ids], [table.spans])
        wanted = wanted_of(rows, epmap=table.endpoints, names=table.names, parts=parts)
        return LookedUp("t", ids, rows, wanted, parts)

    def _row_gradients(self, step: int) -> list[tuple[str, np.ndarray]]:
        """Return the gradients of the rows that a step looked up, for each block of the table."""
        if not self.case.tables:
            return []
        _, ids, rows = self.looked_up[-1]
        grads, found = row_gradient(rows, self.k, step), []
        runs = runs_of(tuple(self.case.tables.values()))
        for (n, size), run in zip(self.case.tables.items(), runs, strict=True):
            at = run.among(ids)
            found.append((n, grads[at]))
            mine = RowGradient(run.local(ids[at]), grads[at])
            self.pushed.setdefault(n, []).append(spread(mine, size))
        return found

    def _greet(self) -> Script:
        """Connect to all servers, one after the other."""
        for ep in self.case.endpoints:
            link = self._links[ep] = ServerLink(
                self._transport,
                endpoint=ep,
                trainer=self.k,
                trainers=self.case.trainers,
                session=self._session,
                sync_mode=self._steps.sync_mode,
                plan={"init": self._origin.plan},
                secret=self._origin.token,
                deadline=self.case.deadline,
                generation=self._least_generation,
                incarnation=self._member.incarnation,
            )
            yield link.greet()
            self._member.enter(link.line.generation)
            self.welcomed_at[ep] = self.clock.now
        self.greeted_at = self.clock.now
        if self._member.generation is not None:
            self.between.generation = self._member.generation.number

    def _exchange(self, step: int) -> Script:
        for number in range(self.case.rounds):
            ep = self.case.endpoints[number % len(self.case.endpoints)]
            part = round_part(self.k, step, number)
            (found,) = yield self._steps.exchange(ep, number, [(part, ("all_reduce", "sum"))])
            self.reduced.append((step, number, found))

    def _gradients(self, step: int) -> list[tuple[str, np.ndarray]]:
        """Return the gradient of each block."""
        grads = [(n, gradient(n, size, self.k, step)) for n, size in self.case.blocks.items()]
        for n, g in grads:
            self.pushed.setdefault(n, []).append(g)
        return grads

    def _pull(self, step: int, *, barrier: bool) -> Script:
        new = {n: np.empty(size, np.float32) for n, size in self.case.blocks.items()}
        barriered = self.case.endpoints if barrier else ()
        landings = [(n.split("/")[0], n, x) for n, x in new.items()]
        request = self._steps.request(landings, self.case.endpoints, barriered)
        self.between.ask_when_ended(step)
        yield request
        self.pulled.append((step, new))
        if self.case.has_results and barrier:
            first, part = self.case.endpoints[0], round_part(self.k, step, RESULTS)
            yield self._steps.exchange(first, RESULTS, [(part, ("all_reduce", "sum"))])
        self.newest_received = step

    # -- waits -----------------------------------------------------------------------------------

    def step(self) -> None:
        """Run the loops and the script until the script waits for something."""
        self._turn_beside()
        while not self.over and self._is_ready():
            self._go_on()
            self._turn_beside()

    def _turn_beside(self) -> None:
        """Run the loop of the communicator. This trainer has none."""

    def _is_ready(self) -> bool:
        """Return True if the script's wait is over, because of an answer or an error."""
        wait = self._wait
        if callable(wait):
            return wait() or (self._failed is not None and not self._computes)
        try:
            while not wait.done:
                if not wait.turn() and wait.wakes > self.clock.now:
                    self.wake_at(wait.wakes)
                    return False
        except LostPeerError as e:
            self._failed = self._member.lost(e)
            self._failed.__cause__ = e
        except (DtransError, NewGeneration) as e:
            self._failed = e
        return True

    def _go_on(self) -> None:
        wait, failed, self._failed = self._wait, self._failed, None
        result = wait.operation.result if isinstance(wait, OperationWait) and not failed else None
        try:
            wanted = self._script.throw(failed) if failed else self._script.send(result)
        except StopIteration:
            self.end(self.error)
            return
        self._computes = isinstance(wanted, float)
        if isinstance(wanted, float):
            time = self.clock.now + wanted
            self._wait = lambda: self.clock.now >= time
            self.wake_at(time)
        elif isinstance(wanted, Operation):
            self._wait = OperationWait(self._transport, self._links, wanted)
        else:
            self._wait = wanted

    def close(self) -> None:
        """Close the connections. Messages that were sent still arrive."""
        self._transport.close()


class CommunicatingTrainer(SimulatedTrainer):
    """Simulated trainer with a communicator, whose loop runs before each part of the script."""

    _loop: TrafficLoop | None = None

    def _train(self) -> Script:
        yield from self._greet()
        case, leaves = self.case, leaves_of(self.case)
        traffic = Traffic(
            {ep: link.line for ep, link in self._links.items()},
            leaves,
            case.communicator,
            deadline=case.deadline,
            name=self.name,
            room=lambda key, shape, dtype: np.empty(shape, dtype),
            cached={"t": table_of(case)} if case.mode == "geo" and case.tables else {},
            counts=self._counts(),
        )
        loop = self._loop = TrafficLoop(self._transport, self._links, traffic, case.communicator)
        try:
            yield lambda: loop.newest is not None
            self._note(loop)
            yield from self._steps_beside(loop, leaves)
            yield lambda: loop.is_settled
            self._note(loop)
            loop.end()
            yield lambda: loop.done
        finally:
            self._loop = None
        yield from self.between.ask(case.steps[self.k])
        yield from self.between.end_save()

    def _counts(self) -> Mapping[str, int]:
        """Return the number of steps that each server must count (`Traffic`)."""
        return {}

    def _steps_beside(self, loop: TrafficLoop, leaves: Mapping[str, Leaf]) -> Script:
        """Make the steps, and put their gradients into the communicator's queue."""
        for step in range(self._first_step(), self.case.steps[self.k]):
            yield from self._look_up(loop, step)
            yield self.random.expovariate(1.0) * self.case.pace
            grads = dict(self._gradients(step))
            rows = self._row_gradients(step)
            yield lambda: loop.has_room
            group: list[tuple[Leaf, Any]] = []
            for leaf in leaves.values():
                group.append((as_gradient(leaf), np.concatenate([grads[n] for n in leaf.names])))
            if rows:
                ids, values = self.looked_up[-1][1], np.concatenate([x for _, x in rows])
                group.append((as_gradient(table_of(self.case)), RowGradient(ids, values)))
            loop.put(group)
            if self.case.mode == "half_async":
                yield lambda: loop.is_settled
            self._note(loop)

    def _look_up(self, loop: TrafficLoop, step: int) -> Script:
        if self.case.tables:
            found = self._room_for(looked_up(self.case, self.k, step))
            self.looked_up.append((step, found.uniq, found.rows))
            request = loop.look_up(found.wanted, train=True)
            yield lambda: request.done

    def _note(self, loop: TrafficLoop) -> None:
        assert loop.newest is not None
        steps, arrays = loop.newest
        new: dict[str, np.ndarray] = {}
        for key, leaf in leaves_of(self.case).items():
            new |= {name: rows for _, name, rows in leaf.blocks(arrays[key])}
        self.pulled.append((steps, new))

    def _turn_beside(self) -> None:
        loop = self._loop
        if loop is None:
            return
        try:
            while not loop.done and (loop.turn() or loop.wakes <= self.clock.now):
                pass
        except LostPeerError as e:
            self._loop, self._failed = None, self._member.lost(e)
        except (DtransError, NewGeneration) as e:
            self._loop, self._failed = None, e
        else:
            self.wake_at(loop.wakes)


def leaves_of(case: Case) -> dict[str, Leaf]:
    """Return the leaves, by number as text: leaf i consists of block i of each server."""
    found: dict[str, Leaf] = {}
    for i in range(max(map(len, case.servers))):
        rows = [
            (ep, block_name(ep, i), sizes[i])
            for ep, sizes in zip(case.endpoints, case.servers, strict=True)
            if len(sizes) > i
        ]
        eps, names, sizes = zip(*rows, strict=True)
        found[str(i)] = Leaf(eps, names, sizes, (sum(sizes),), np.dtype(np.float32))
    return found


def table_of(case: Case) -> Leaf:
    """Return the leaf of the table, whose blocks are on several servers."""
    names, sizes = tuple(case.tables), tuple(case.tables.values())
    endpoints, spans = tuple(n.split("/")[0] for n in names), tuple(runs_of(sizes))
    return Leaf(endpoints, names, sizes, (sum(sizes),), np.dtype(np.float32), spans=spans)


def as_gradient(leaf: Leaf) -> Leaf:
    """Return the leaf under whose names the gradients or changes of a leaf are sent."""
    return dataclasses.replace(leaf, names=tuple(gradient_name(n, 0) for n in leaf.names))
