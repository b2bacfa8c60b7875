"""Roles of an asynchronous job in one process, which take turns in one recorded order.

    servers   their blocks, with the updates of an asynchronous server (`block_update`)
    trainers  their programs, cut at communication; one turn is one step of one trainer

A turn begins with lookups of rows and the computation of gradients. It ends with updates of the
servers, and with the parameters that the trainer receives. The next turn, of another trainer,
begins before that: its parameters and rows lack these updates, as in a job of processes. With
GEO-SGD a trainer takes in what servers answered its last push at its next step.

`plan.verify()` traces `step`, and compares it with a sequential replay of the same order
(`dtrans.run.replays`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import JaxprEqn, evaluate
from dtrans.checkpoint.pserver_state import arrays_of, server_state
from dtrans.ir.array_fns import words
from dtrans.ir.program import Program
from dtrans.ops import (
    BACKUP,
    backup_of,
    fake_init_p,
    fetch_barrier_p,
    geo_init_p,
    geo_prefetch_p,
    geo_send_p,
    prefetch_p,
    recv_p,
    send_barrier_p,
    send_p,
    send_rows_p,
    split_ids_p,
)
from dtrans.parameter_server.plan import PServerPlan, ServerPrograms
from dtrans.protocol.async_server import StepUpdates
from dtrans.protocol.served import RowGradient
from dtrans.protocol.tables.kept_rows import KeptRows
from dtrans.protocol.traffic import Group, Leaf
from dtrans.run.base.segments import COMPUTED, cut_program
from dtrans.run.parameter_server.background import as_deltas, leaf_of
from dtrans.run.parameter_server.block_update import BlockUpdates
from dtrans.run.parameter_server.geo import GeoTrainer
from dtrans.run.parameter_server.tables.mesh_tables import split_ids
from dtrans.run.parameter_server.tables.missed_steps import MissedSteps
from dtrans.run.parameter_server.tables.traced_geo import (
    TracedChanges,
    TracedKeptRows,
    rows_of_table,
)
from dtrans.run.parameter_server.tables.traced_tables import TracedMemory, fetch_rows, part_of_block
from dtrans.run.parameter_server.update import ServerUpdate


Values = Mapping[str, Any]
OrderedState = Mapping[str, Mapping[str, Any]]
Step = Generator[None, None, Values]  # of a trainer: stops where its gradients are computed
SENDS = (send_p, send_rows_p)
ROUNDS = 2  # turns of each trainer; with GEO-SGD two more than it takes to push
MOST_LOCAL_STEPS = 2  # before a push: a hundred turns of each trainer would say no more


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
      rounds: how many turns each trainer has.
      batches: how many batches there are. Each round has one, which trainers share; with GEO-SGD
        each trainer has one, and in the next round the next trainer's.
    """

    turns: tuple[Turn, ...]
    rounds: int
    batches: int

    @property
    def halves(self) -> Iterator[tuple[Turn, bool]]:
        """Yield each turn twice: with False where it begins, with True where it ends."""
        for before, turn in itertools.pairwise((None, *self.turns)):
            assert turn is not None
            overlaps = before is not None and before.trainer != turn.trainer
            if before is not None and not overlaps:
                yield before, True
            yield turn, False
            if before is not None and overlaps:
                yield before, True
        yield self.turns[-1], True

    @classmethod
    def for_plan(cls, plan: PServerPlan) -> RecordedOrder:
        """Return the order for a plan: long enough for stale parameters, and for a push and its
        answer."""
        rounds = ROUNDS + local_steps(plan.push_every)
        turns = []
        for number in range(rounds):
            trainers = range(plan.trainers)[:: -1 if number % 2 else 1]
            for k in trainers:
                batch = (k + number) % plan.trainers if plan.push_every else number
                turns.append(Turn(k, batch, number == rounds - 1))
        if not plan.push_every:
            turns = [dataclasses.replace(turn, reports=True) for turn in turns]
        return cls(tuple(turns), rounds, plan.trainers if plan.push_every else rounds)


def finished(step: Step) -> Values:
    """Run a step to its end; return its results."""
    while True:
        try:
            next(step)
        except StopIteration as ended:
            found: Values = ended.value
            return found


def local_steps(push_every: int) -> int:
    """Return after how many steps trainers push in a recorded order; 0 where they send gradients."""
    return min(push_every, MOST_LOCAL_STEPS)


def type_of(x: Any) -> jax.ShapeDtypeStruct:
    """Return the type of an array."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def stacked_type(t: Any, count: int) -> jax.ShapeDtypeStruct:
    """Return the type of so many arrays, one behind the other."""
    return jax.ShapeDtypeStruct((count, *t.shape), t.dtype)


def kept_at_start(rows: int, trainer: int) -> np.ndarray:
    """Return the rows of a table that a trainer of GEO-SGD keeps at the start: every second one."""
    return np.arange(trainer % 2, rows, 2, dtype=np.int32)


def new_state(eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any]:
    """Return the state of all rows of a table as the init makes it, for a `fake_init` equation of
    GEO-SGD."""
    p = eqn.params
    rows = sum(span.rows for span in p["spans"])
    if len(p["types"]) == 1:
        return []
    made: Sequence[Any] = evaluate(p["write"](rows), jnp.arange(rows, dtype=jnp.int32), *args)
    return made


def table_types(plan: PServerPlan) -> dict[str, Any]:
    """Return the types of tables, by name."""
    return {n: plan.main.inputs[n] for n in plan.tables.of}


def part_axes(plan: PServerPlan) -> dict[str, int]:
    """Return the dimension along which trainers have parts of an array of a batch; with GEO-SGD
    there are none."""
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
    With GEO-SGD trainers keep some rows of tables from the start of a step (`kept_at_start`).

    Args:
      plan: asynchronous.
      begins: arguments of the init, which makes the state of rows that trainers of GEO-SGD look up
        for the first time.
    """

    def __init__(self, plan: PServerPlan, begins: Sequence[Any] = ()) -> None:
        self.plan = plan
        self._begins = begins
        self.order = RecordedOrder.for_plan(plan)
        self._axes = part_axes(plan)

    @cached_property
    def served(self) -> tuple[str, ...]:
        """The parameters that servers have, and trainers receive whole."""
        return tuple(n for n in self.plan.placement.blocks if n not in self.plan.tables.of)

    @cached_property
    def own(self) -> tuple[str, ...]:
        """The arrays that trainers make themselves: with GEO-SGD the optimizer's state too."""
        names = [n for spec in self.plan.trainer.args[: self._count] for n in spec.names]
        return tuple(n for n in names if n not in self.served and n not in self.plan.tables.of)

    @cached_property
    def state_of_rows(self) -> dict[str, tuple[str, ...]]:
        """Return the arrays of optimizer state whose rows trainers keep, for each table of
        GEO-SGD."""
        return {n: t.zero.state for n, t in self.plan.tables.of.items() if t.on_trainers}

    @property
    def _count(self) -> int:
        """Return the number of arguments of a trainer's program that are its state."""
        return 2 if self.plan.push_every else 1

    def state_of(self, params: Any, opt_state: Any) -> OrderedState:
        """Return the state in which servers and trainers have what one device has."""
        given = arrays_of(self.plan.main, params, opt_state)
        servers = {ep: server_state(self.plan, ep, given) for ep in self.plan.servers}
        received = {n: given[n] for n in self.served}
        return self._state(
            {n: given[n] for n in self.own}, servers, [received] * self.plan.trainers
        )

    def init(self, *args: Any) -> OrderedState:
        """Return the first state: each role runs its startup program."""
        servers = {}
        for ep, programs in self.plan.servers.items():
            made = programs.startup.compiled(*programs.startup.flatten(*args))
            servers[ep] = _OrderedServer(
                programs, dict(zip(programs.startup.out_names, made, strict=True))
            )
        begun = []
        for k in range(self.plan.trainers):
            startup = self.plan.trainer_startup_program(k)
            begun.append(
                _OrderedTrainer(self, k, servers, {}, {}).start(startup, startup.flatten(*args))
            )
        own = {n: begun[0][n] for n in self.own}
        return self._state(own, {ep: x.state for ep, x in servers.items()}, begun)

    def step(self, state: OrderedState, *batch: Any) -> tuple[OrderedState, Values]:
        """Take all turns: the new state, and results by name.

        Args:
          batch: batches one behind the other (`RecordedOrder.batches`).
        """
        plan = self.plan
        kept = {
            n: [kept_at_start(plan.main.inputs[n].shape[0], k) for k in range(plan.trainers)]
            for n in self.state_of_rows
        }
        servers = {
            ep: _OrderedServer(programs, state["servers"][ep], kept)
            for ep, programs in plan.servers.items()
        }
        trainers = [self._trainer(k, servers, state) for k in range(plan.trainers)]
        specs = plan.main.args[2:]
        arrays = {
            n: x
            for spec, b in zip(specs, batch, strict=True)
            for n, x in zip(spec.names, spec.flatten(b), strict=True)
        }
        results: dict[str, Any] = {}
        steps: dict[int, Step] = {}  # by trainer
        for turn, ends in self.order.halves:
            k = turn.trainer
            if not ends:
                part = {
                    n: part_of_trainer(x[turn.batch], self._axes.get(n), k, plan.trainers)
                    for n, x in arrays.items()
                }
                steps[k] = trainers[k].step(part)
                next(steps[k])
                continue
            made = finished(steps.pop(k))
            results |= {turn.named(n): x for n, x in made.items() if turn.reports}
        for k, trainer in enumerate(trainers):
            of_rows = trainer.rows_over()
            names = (*self.served, *self.own) if k else self.served
            results |= {
                f"trainer {k}/{n}": (trainer.values | of_rows)[n]
                for n in (*names, *self.state_of_rows)
            }
        own = {n: (trainers[0].values | trainers[0].rows_over())[n] for n in self.own}
        newest = {n: trainers[0].newest_of(n) for n in self.served}
        held = {ep: x.settled(plan.trainers) for ep, x in servers.items()}
        return self._state(own, held, [newest] * plan.trainers), results

    def _trainer(
        self, number: int, servers: Mapping[str, _OrderedServer], state: OrderedState
    ) -> _OrderedTrainer:
        """Return a trainer at the start of a step. It has only the table rows that it keeps."""
        types = table_types(self.plan)
        types |= {
            n: self.plan.main.inputs[n] for names in self.state_of_rows.values() for n in names
        }
        none_of = {n: jnp.zeros((0, *t.shape[1:]), t.dtype) for n, t in types.items()}
        values = {**state["own"], **state["trainers"][str(number)], **none_of}
        kept = {}
        for n, names in self.state_of_rows.items():
            blocks = self.plan.placement.blocks[n]
            of_blocks = [
                RowGradient(np.arange(b.rows, dtype=np.int32), servers[b.endpoint].state[b.name])
                for b in blocks
            ]
            spans = [b.span for b in blocks if b.span is not None]
            found = rows_of_table(spans, of_blocks)
            whole = jnp.zeros(types[n].shape, types[n].dtype).at[found.ids].set(found.rows)
            ids = kept_at_start(types[n].shape[0], number)
            kept[n] = TracedKeptRows(ids, [whole, *(state["own"][m] for m in names)])
        return _OrderedTrainer(self, number, servers, values, kept)

    @cached_property
    def new_state(self) -> dict[str, Any]:
        """The state of rows as the init makes it, by name: of all rows of each table of GEO-SGD."""
        found: dict[str, Any] = {}
        startup = self.plan.trainer_startup_program(0)
        for eqn in startup.eqns:
            if eqn.primitive is geo_init_p:
                found |= zip(
                    self.state_of_rows[eqn.params["table"]],
                    new_state(eqn, self._begins),
                    strict=True,
                )
        return found

    def _state(
        self, own: Values, servers: Mapping[str, Mapping[str, Any]], trainers: Sequence[Values]
    ) -> OrderedState:
        received = {
            str(k): {n: values[n] for n in self.served} for k, values in enumerate(trainers)
        }
        return {"own": own, "servers": servers, "trainers": received}


class _OrderedServer:
    """One server: its blocks, and how it takes messages (`dtrans.protocol.async_server`).

    Args:
      kept: for each table the rows that each trainer keeps at the start.
    """

    def __init__(
        self, programs: ServerPrograms, state: Values, kept: Mapping[str, Sequence[np.ndarray]] = {}
    ) -> None:
        self.update = update = ServerUpdate.of(programs.main)
        by_rows = {n: t for n, t in update.tables.items() if not t.updates_all}
        missed = {n: MissedSteps(update, t, None) for n, t in by_rows.items() if t.moves}
        memory = {n: TracedMemory(t, missed.get(n), state) for n, t in by_rows.items()}
        self._blocks, self._backed = BlockUpdates(update, state, memory), update.served.backed
        self._given: dict[tuple[int, str], RowGradient] = {}  # rows that trainers have received
        there = [(n, t.span, kept[t.leaf]) for n, t in update.tables.items() if t.leaf in kept]
        of_blocks = {n: [span.local(ids[span.among(ids)]) for ids in of] for n, span, of in there}
        self._changed = TracedChanges(update.served.tables, update.served.trainers, of_blocks)
        self.state: dict[str, Any] = dict(self._blocks.state)

    def settled(self, trainers: int) -> Values:
        """Return the state with copies as they are where all trainers have just received."""
        copies = {backup_of(n, k): self.state[n] for n in self._backed for k in range(trainers)}
        return {**self.state, **copies}

    def take(self, trainer: int, grads: Values) -> None:
        """Update blocks with the gradients of one step of a trainer."""
        backups = {n + BACKUP: self.state[backup_of(n, trainer)] for n in self._backed}
        rows = {n + BACKUP: x for (k, n), x in self._given.items() if k == trainer}
        updated = StepUpdates().take(
            self._blocks, self.state, grads.keys(), {**grads, **backups, **rows}
        )
        for name in (x for x in updated if x in self.update.tables):
            (gradient,) = set(self.update.tables[name].gradients.values())
            self._changed.changed(trainer, name, grads[gradient].ids)

    def give(self, trainer: int, name: str) -> Any:
        """Return the block that a trainer receives. Keep a copy where gradients are compensated."""
        if name in self._backed:
            self.state[backup_of(name, trainer)] = self.state[name]
        return words(self.state[name])

    def give_rows(self, trainer: int, name: str, ids: Any) -> Any:
        """Return rows of a block that a trainer looks up. Keep them where gradients are
        compensated."""
        rows: Any = jnp.take(self.state[name], ids, 0, mode="fill", fill_value=0)
        if self.update.served.tables[name].backed:
            self._given[trainer, name] = RowGradient(ids, rows)
        self._changed.asked(trainer, name, ids)
        return rows

    def give_changes(self, trainer: int, name: str) -> RowGradient:
        """Return the rows that a trainer keeps and others have changed since its last answer."""
        ids = self._changed.take(trainer, name)
        rows: Any = jnp.take(self.state[name], ids, 0, mode="fill", fill_value=0)
        return RowGradient(ids, rows)


class _OrderedTrainer:
    """One trainer: what it holds, and how its program communicates.

    Attributes:
      values: its state, by name.
    """

    def __init__(
        self,
        job: OrderedJob,
        number: int,
        servers: Mapping[str, _OrderedServer],
        values: Values,
        kept: Mapping[str, TracedKeptRows],
    ) -> None:
        self._job, self._number, self._servers = job, number, servers
        self.values = dict(values)
        self._sent: dict[str, dict[str, Any]] = {}
        self._kept = kept
        self._geo: GeoTrainer | None = None
        self._tables: dict[str, tuple[Leaf, KeptRows]] = {}
        self._answer: dict[str, Any] = {}  # of the servers to the last push
        self._pushes = 0
        self._pushed: list[str] = []  # the parameters of a push

    def step(self, batch: Values) -> Step:
        """Take one step, and stop once: where gradients are computed, and not sent. Return results
        by name."""
        given = {**self.values, **batch}
        program = self._job.plan.trainer_program(self._number)
        inputs = [given[n] for n in program.in_names]
        made = yield from self._run(program.specialize_flat(list(map(type_of, inputs))), inputs)
        self.values |= {n: made[n] for n in self.values}
        return {n: x for n, x in made.items() if n not in self.values}

    def start(self, program: Program, args: Sequence[Any]) -> Values:
        """Run the startup program, which sends nothing; return its outputs by name."""
        return finished(self._run(program, args))

    def _run(self, program: Program, args: Sequence[Any]) -> Step:
        """Run a program, and carry out its communication; stop before what it sends first. Return
        outputs by name."""
        run = cut_program(program, computed=COMPUTED).run(args)
        outs: Sequence[Any] | None = None
        while True:
            try:
                eqn, values = next(run) if outs is None else run.send(outs)
            except StopIteration as ended:
                if self._sent:
                    yield
                self._deliver()
                return dict(zip(program.out_names, ended.value, strict=True))
            if (self._sent and eqn.primitive not in SENDS) or eqn.primitive is geo_send_p:
                yield
                self._deliver()
            outs = self._carry_out(eqn, values)

    def newest_of(self, leaf: str) -> Any:
        """Return a parameter as servers have it."""
        parts = [
            self._servers[b.endpoint].state[b.name] for b in self._job.plan.placement.blocks[leaf]
        ]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)

    def _carry_out(self, eqn: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
        p = eqn.params
        if eqn.primitive is send_p:
            whole = "sections" in p
            parts = (
                [x for *_, x in leaf_of(eqn, eqn.invars[0].aval).blocks(values[0])]
                if whole
                else values
            )
            for ep, name, x in zip(p["epmap"], p["names"], parts, strict=True):
                self._sent.setdefault(ep, {})[name] = x
            return [None]
        if eqn.primitive is send_rows_p:
            of_all = RowGradient(*values)
            for ep, name, span in zip(p["epmap"], p["names"], p["spans"], strict=True):
                self._sent.setdefault(ep, {})[name] = part_of_block(span, of_all)
            return [None]
        if eqn.primitive is split_ids_p:
            return split_ids(eqn, [values])
        if eqn.primitive is prefetch_p:
            give = lambda ep, name, ids: self._servers[ep].give_rows(self._number, name, ids)
            return [fetch_rows(eqn, values[0], give)]
        if eqn.primitive is geo_prefetch_p:
            return self._geo_prefetch(eqn, *values)
        if eqn.primitive is geo_init_p:
            none = jnp.zeros((0, *p["types"][0].shape[1:]), p["types"][0].dtype)
            return [none, *new_state(eqn, values)]
        if eqn.primitive is fake_init_p:
            return [jnp.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
        if eqn.primitive is geo_send_p:
            return self._geo_send(eqn, values) if p["push_every"] else values
        if eqn.primitive is recv_p:
            there = [
                self._servers[ep].give(self._number, n)
                for ep, n in zip(p["epmap"], p["names"], strict=True)
            ]
            return there if len(there) == len(eqn.outvars) else [jnp.concatenate(there)]
        assert eqn.primitive in (send_barrier_p, fetch_barrier_p), eqn
        return values if eqn.primitive is fetch_barrier_p else [None]

    def _deliver(self) -> None:
        """Let servers have what was sent."""
        sent, self._sent = self._sent, {}
        for ep, grads in sent.items():
            self._servers[ep].take(self._number, grads)

    # -- GEO-SGD ---------------------------------------------------------------------------------

    name = "a trainer"

    def rows_over(self) -> dict[str, Any]:
        """Return tables and the state of their rows: those that are kept, zeros and new state
        elsewhere."""
        found: dict[str, Any] = {}
        for table, kept in self._kept.items():
            t, names = self._job.plan.main.inputs[table], self._job.state_of_rows[table]
            rows = [jnp.zeros(t.shape, t.dtype), *(self._job.new_state[n] for n in names)]
            found |= zip((table, *names), kept.over(rows), strict=True)
        return found

    def _geo_prefetch(self, eqn: JaxprEqn, uniq: Any) -> Sequence[Any]:
        """Return rows that the trainer keeps, and their state; new ones are as servers and the init
        have them."""
        p = eqn.params
        kept, state = (
            self._kept[p["table"]],
            [self._job.new_state[n] for n in self._job.state_of_rows[p["table"]]],
        )
        self._tables[p["table"]] = as_deltas(leaf_of(eqn, p["types"][0])), kept
        new = kept.missing(uniq)
        give = lambda ep, name, ids: self._servers[ep].give_rows(self._number, name, ids)
        kept.add(
            new,
            fetch_rows(eqn, new, give),
            [jnp.take(x, new, 0, mode="fill", fill_value=0) for x in state],
        )
        return kept.take(uniq, len(uniq))

    def _geo_send(self, eqn: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
        """End a step of GEO-SGD; return the parameters of the next step."""
        p = eqn.params
        values, of_tables = values[: len(p["names"])], iter(values[len(p["names"]) :])
        if self._geo is None:
            of_block = {b.name: b.leaf for b in self._job.plan.placement.table}
            self._pushed = [of_block[names[0]] for names in p["names"]]
            where = zip(p["epmap"], p["names"], p["sections"], values, strict=True)
            deltas = [
                as_deltas(Leaf(eps, names, n, x.shape, x.dtype)) for eps, names, n, x in where
            ]
            begun = [self.values[n] for n in self._pushed]
            self._geo = GeoTrainer(self, deltas, self._job.plan.trainers, begun, self._tables)
        for table, count in p.get("tables", ()):
            uniq, *made = (next(of_tables) for _ in range(1 + count))
            self._geo.rows(table).put(uniq, made)
        every = local_steps(p["push_every"])
        return self._geo.step(values, every, block_on_pull=p["block_on_pull"])

    # A communicator, as `GeoTrainer` has one: servers answer at once.

    def put(self, group: Group) -> None:
        """Push what has changed, and keep the answer for the next step."""
        for leaf, x in group:
            if not isinstance(x, RowGradient):
                for ep, name, rows in leaf.blocks(x):
                    self._sent.setdefault(ep, {})[name] = rows
                continue
            for ep, name, span in zip(leaf.endpoints, leaf.names, leaf.spans, strict=True):
                self._sent.setdefault(ep, {})[name] = part_of_block(span, x)
        self._deliver()
        self._answer = {str(i): self.newest_of(n) for i, n in enumerate(self._pushed)}
        for table, (leaf, _) in self._tables.items():
            blocks = self._job.plan.placement.blocks[table]
            parts = [self._servers[b.endpoint].give_changes(self._number, b.name) for b in blocks]
            self._answer[table] = rows_of_table(leaf.spans, parts)
        self._pushes += 1

    def received(self) -> int:
        """Return how many pushes are answered."""
        return self._pushes

    def newest(self) -> Mapping[str, Any]:
        """Return what servers answered the last push with: parameters by number, and changed rows
        by table."""
        return self._answer

    def barrier(self) -> None:
        """Wait for nothing: every push is answered."""
