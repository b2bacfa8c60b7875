"""Roles of an asynchronous job in one process, which take turns in one recorded order.

    servers   their blocks, with the updates of an asynchronous server (`block_update`)
    trainers  their programs, cut at communication; one turn is one step of one trainer

Nothing runs beside a turn: what a trainer sends is an update of the servers before it receives. So a later
turn of another trainer begins with parameters that lack it, as in a job of processes. With GEO-SGD a trainer takes
in what servers answered its last push at its next step.

`plan.verify()` traces `step`, and compares it with a sequential replay of the same order (`dtrans.run.replays`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import JaxprEqn
from dtrans.checkpoint.pserver_state import arrays_of, held_of
from dtrans.ir.array_fns import words
from dtrans.ir.program import Program
from dtrans.ops import BACKUP, backup_of, fetch_barrier_p, geo_send_p, recv_p, send_barrier_p, send_p
from dtrans.parameter_server.plan import PServerPlan, ServerPrograms
from dtrans.protocol.geo_steps import GeoSteps
from dtrans.protocol.traffic import Leaf
from dtrans.run.base.segments import COMPUTED, cut_program
from dtrans.run.parameter_server.background import as_deltas, leaf_of
from dtrans.run.parameter_server.block_update import BlockUpdates
from dtrans.run.parameter_server.geo import DeviceArithmetic
from dtrans.run.parameter_server.update import ServerUpdate


Values = Mapping[str, Any]
OrderedState = Mapping[str, Mapping[str, Any]]
ROUNDS = 2  # turns of each trainer; with GEO-SGD two more than it takes to push


@dataclasses.dataclass(frozen=True)
class Turn:
    """One step of one trainer.

    Attributes:
      trainer: its number.
      batch: the number of the batch, among those that lie behind each other.
      reports: True if the results of the step are compared.
    """

    trainer: int
    batch: int
    reports: bool

    def named(self, result: str) -> str:
        """Return the name of a result of this turn."""
        return f"trainer {self.trainer}/batch {self.batch}/{result}"


@dataclasses.dataclass(frozen=True)
class RecordedOrder:
    """Turns of all trainers, one after the other: rounds that go up and down.

    Attributes:
      turns: in order.
      batches: how many batches there are. Each round has one, which trainers share; with GEO-SGD each trainer.
    """

    turns: tuple[Turn, ...]
    batches: int

    @classmethod
    def for_plan(cls, plan: PServerPlan) -> RecordedOrder:
        """Return the order for a plan: long enough for stale parameters, and for a push and its answer."""
        rounds = plan.push_every + ROUNDS if plan.push_every else ROUNDS
        turns = []
        for number in range(rounds):
            trainers = range(plan.trainers)[:: -1 if number % 2 else 1]
            turns += [Turn(k, k if plan.push_every else number, number == rounds - 1) for k in trainers]
        if not plan.push_every:
            turns = [dataclasses.replace(turn, reports=True) for turn in turns]
        return cls(tuple(turns), plan.trainers if plan.push_every else rounds)


def stacked_type(t: Any, count: int) -> jax.ShapeDtypeStruct:
    """Return the type of so many arrays, one behind the other."""
    return jax.ShapeDtypeStruct((count, *t.shape), t.dtype)


def part_axes(plan: PServerPlan) -> dict[str, int]:
    """Return the dimension along which trainers have parts of an array of a batch; with GEO-SGD there are none."""
    if plan.push_every or plan.trainers == 1:
        return {}
    if plan.shared is not None:
        return dict(plan.shared.axes)
    names = (n for spec in plan.main.args[2:] for n in spec.names)
    return {n: 0 for n in names if plan.main.inputs[n].ndim}


def part_of_trainer(x: Any, axis: int | None, trainer: int, trainers: int) -> Any:
    """Return the rows of an array of a batch that a trainer has."""
    if axis is None:
        return x
    size = x.shape[axis] // trainers
    return jax.lax.slice_in_dim(x, trainer * size, (trainer + 1) * size, axis=axis)


class OrderedJob:
    """An asynchronous plan, running in one process in a recorded order.

    A state has what servers hold, what each trainer has received, and what trainer 0 makes itself.

    Args:
      plan: asynchronous, without tables.
    """

    def __init__(self, plan: PServerPlan) -> None:
        self.plan = plan
        self.order = RecordedOrder.for_plan(plan)
        self._axes = part_axes(plan)

    @cached_property
    def served(self) -> tuple[str, ...]:
        """The parameters that servers have."""
        return tuple(self.plan.placement.blocks)

    @cached_property
    def own(self) -> tuple[str, ...]:
        """The arrays that trainers make themselves: with GEO-SGD the optimizer's state too."""
        names = [n for spec in self.plan.trainer.args[: self._count] for n in spec.names]
        return tuple(n for n in names if n not in self.served)

    @property
    def _count(self) -> int:
        """Return the number of arguments of a trainer's program that are its state."""
        return 2 if self.plan.push_every else 1

    def state_of(self, params: Any, opt_state: Any) -> OrderedState:
        """Return the state in which servers and trainers have what one device has."""
        given = arrays_of(self.plan.main, params, opt_state)
        servers = {ep: held_of(self.plan, ep, given) for ep in self.plan.servers}
        received = {n: given[n] for n in self.served}
        return self._state({n: given[n] for n in self.own}, servers, [received] * self.plan.trainers)

    def init(self, *args: Any) -> OrderedState:
        """Return the first state: each role runs its startup program."""
        servers = {}
        for ep, programs in self.plan.servers.items():
            made = programs.startup.compiled(*programs.startup.flatten(*args))
            servers[ep] = _OrderedServer(programs, dict(zip(programs.startup.out_names, made, strict=True)))
        begun = []
        for k in range(self.plan.trainers):
            startup = self.plan.trainer_startup_program(k)
            begun.append(_OrderedTrainer(self, k, servers, {}).run(startup, startup.flatten(*args)))
        own = {n: begun[0][n] for n in self.own}
        return self._state(own, {ep: x.state for ep, x in servers.items()}, begun)

    def step(self, state: OrderedState, *batch: Any) -> tuple[OrderedState, Values]:
        """Take all turns: the new state, and results by name.

        Args:
          batch: batches one behind the other (`RecordedOrder.batches`).
        """
        plan = self.plan
        servers = {ep: _OrderedServer(programs, state["servers"][ep]) for ep, programs in plan.servers.items()}
        trainers = [
            _OrderedTrainer(self, k, servers, {**state["own"], **state["trainers"][str(k)]})
            for k in range(plan.trainers)
        ]
        specs = plan.main.args[2:]
        arrays = {
            n: x for spec, b in zip(specs, batch, strict=True) for n, x in zip(spec.names, spec.flatten(b), strict=True)
        }
        results: dict[str, Any] = {}
        for turn in self.order.turns:
            k = turn.trainer
            part = {n: part_of_trainer(x[turn.batch], self._axes.get(n), k, plan.trainers) for n, x in arrays.items()}
            made = trainers[k].step(part)
            results |= {turn.named(n): x for n, x in made.items() if turn.reports}
        for k, trainer in enumerate(trainers):
            names = (*self.served, *self.own) if k else self.served
            results |= {f"trainer {k}/{n}": trainer.values[n] for n in names}
        own = {n: trainers[0].values[n] for n in self.own}
        newest = {n: trainers[0].newest_of(n) for n in self.served}
        held = {ep: x.settled(plan.trainers) for ep, x in servers.items()}
        return self._state(own, held, [newest] * plan.trainers), results

    def _state(self, own: Values, servers: Mapping[str, Mapping[str, Any]], trainers: Sequence[Values]) -> OrderedState:
        received = {str(k): {n: values[n] for n in self.served} for k, values in enumerate(trainers)}
        return {"own": own, "servers": servers, "trainers": received}


class _OrderedServer:
    """One server: its blocks, and what becomes of messages (`dtrans.protocol.async_server`)."""

    def __init__(self, programs: ServerPrograms, state: Values) -> None:
        update = ServerUpdate.of(programs.main)
        self._blocks, self._backed = BlockUpdates(update, state), update.served.backed
        self.state: dict[str, Any] = dict(self._blocks.state)

    def settled(self, trainers: int) -> Values:
        """Return the state with copies as they are where all trainers have just received."""
        copies = {backup_of(n, k): self.state[n] for n in self._backed for k in range(trainers)}
        return {**self.state, **copies}

    def take(self, trainer: int, grads: Values) -> None:
        """Update blocks with the gradients of one step of a trainer."""
        ready = self._blocks.ready(grads.keys(), ())
        if not ready:
            return
        made, values = self._blocks.begin(self.state)
        self.state |= made
        given = {**grads, **{n + BACKUP: self.state[backup_of(n, trainer)] for n in self._backed}}
        for block in ready:
            self.state |= self._blocks.apply(block, given, self.state, values)

    def give(self, trainer: int, name: str) -> Any:
        """Return the block that a trainer receives. Keep a copy where gradients are compensated."""
        if name in self._backed:
            self.state[backup_of(name, trainer)] = self.state[name]
        return words(self.state[name])


class _OrderedTrainer:
    """One trainer: what it holds, and how its program communicates.

    Attributes:
      values: its state, by name.
    """

    def __init__(self, job: OrderedJob, number: int, servers: Mapping[str, _OrderedServer], values: Values) -> None:
        self._job, self._number, self._servers = job, number, servers
        self.values = dict(values)
        self._sent: dict[str, dict[str, Any]] = {}
        self._geo: GeoSteps | None = None
        self._answer: list[Any] = []  # of the servers to the last push
        self._pushes = 0
        self._pushed: list[str] = []  # the parameters of a push, and how each is sent
        self._deltas: list[Leaf] = []

    def step(self, batch: Values) -> Values:
        """Take one step; return its results by name."""
        given = {**self.values, **batch}
        program = self._job.plan.trainer_program(self._number)
        inputs = [given[n] for n in program.in_names]
        made = self.run(program.specialize_flat([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]), inputs)
        self.values |= {n: made[n] for n in self.values}
        return {n: x for n, x in made.items() if n not in self.values}

    def run(self, program: Program, args: Sequence[Any]) -> dict[str, Any]:
        """Run a program, and carry out its communication; return its outputs by name."""
        run = cut_program(program, computed=COMPUTED).run(args)
        outs: Sequence[Any] | None = None
        while True:
            try:
                eqn, values = next(run) if outs is None else run.send(outs)
            except StopIteration as ended:
                self._deliver()
                return dict(zip(program.out_names, ended.value, strict=True))
            outs = self._carry_out(eqn, values)

    def newest_of(self, leaf: str) -> Any:
        """Return a parameter as servers have it."""
        parts = [self._servers[b.endpoint].state[b.name] for b in self._job.plan.placement.blocks[leaf]]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)

    def _carry_out(self, eqn: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
        p = eqn.params
        if eqn.primitive is send_p:
            whole = "sections" in p
            parts = [x for *_, x in leaf_of(eqn, eqn.invars[0].aval).blocks(values[0])] if whole else values
            for ep, name, x in zip(p["epmap"], p["names"], parts, strict=True):
                self._sent.setdefault(ep, {})[name] = x
            return [None]
        if eqn.primitive is geo_send_p:
            return self._geo_send(eqn, values) if p["push_every"] else values
        self._deliver()
        if eqn.primitive is recv_p:
            there = [self._servers[ep].give(self._number, n) for ep, n in zip(p["epmap"], p["names"], strict=True)]
            return there if len(there) == len(eqn.outvars) else [jnp.concatenate(there)]
        assert eqn.primitive in (send_barrier_p, fetch_barrier_p), eqn
        return values if eqn.primitive is fetch_barrier_p else [None]

    def _deliver(self) -> None:
        """Let servers have what was sent."""
        sent, self._sent = self._sent, {}
        for ep, grads in sent.items():
            self._servers[ep].take(self._number, grads)

    # -- GEO-SGD ---------------------------------------------------------------------------------

    def _geo_send(self, eqn: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
        """End a step of GEO-SGD; return the parameters of the next step."""
        p = eqn.params
        if self._geo is None:
            of_block = {b.name: b.leaf for b in self._job.plan.placement.table}
            self._pushed = [of_block[names[0]] for names in p["names"]]
            where = zip(p["epmap"], p["names"], p["sections"], values, strict=True)
            self._deltas = [as_deltas(Leaf(eps, names, n, x.shape, x.dtype)) for eps, names, n, x in where]
            begun = [self.values[n] for n in self._pushed]
            self._geo = GeoSteps(self, DeviceArithmetic(), self._job.plan.trainers, begun)
        waits = self._geo.step(values, p["push_every"], block_on_pull=p["block_on_pull"])
        while True:
            try:
                next(waits)  # every push is answered already
            except StopIteration as ended:
                found: Sequence[Any] = ended.value
                return found

    def put(self, deltas: Sequence[Any]) -> None:
        """Push what has changed, and keep the answer for the next step."""
        for leaf, delta in zip(self._deltas, deltas, strict=True):
            for ep, name, rows in leaf.blocks(delta):
                self._sent.setdefault(ep, {})[name] = rows
        self._deliver()
        self._answer = [self.newest_of(n) for n in self._pushed]
        self._pushes += 1

    def received(self) -> int:
        """Return how many pushes are answered."""
        return self._pushes

    def newest(self) -> Sequence[Any]:
        """Return the parameters that servers answered the last push with."""
        return self._answer
