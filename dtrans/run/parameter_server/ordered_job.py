"""Asynchronous job in one process, in which trainers take turns in a fixed order.

Trainers of an asynchronous job step independently, so its results depend on time. `plan.verify()`
needs a job that always has the same result. It traces `OrderedJob.step`, and compares it with a
sequential replay of the same order (`dtrans.run.replays`).

    servers   blocks of parameters, with the updates of an asynchronous server (`block_update`)
    trainers  programs that are divided at their communication with servers

In the first half of a step, a trainer looks up table rows and computes gradients. In the second
half, the servers apply these gradients, and the trainer receives new parameters. Between the two
halves, the next trainer runs the first half of its step. So the next trainer's parameters lack an
update, as in a job of processes. With GEO-SGD, a trainer applies the servers' answer to a push
(message with changes of parameters) in its next step.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import JaxprEqn, Primitive, evaluate
from dtrans.checkpoint.pserver_state import arrays_of, server_state
from dtrans.ir.array_fns import array_type, words
from dtrans.ir.program import Program
from dtrans.ir.pytree import all_names
from dtrans.ir.selection import omit, subset, values_at
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
from dtrans.protocol.server.async_steps import StepUpdates
from dtrans.protocol.server_blocks import RowGradient
from dtrans.protocol.tables.cached_rows import CachedRows
from dtrans.protocol.trainer.traffic import Group, Leaf
from dtrans.run.base.segments import COMPUTED, divide_program
from dtrans.run.parameter_server.block_update import BlockUpdates
from dtrans.run.parameter_server.equation_leaves import as_deltas, leaf_of, sent_blocks
from dtrans.run.parameter_server.geo import GeoTrainer, pushed_leaves, split_push
from dtrans.run.parameter_server.tables.mesh_tables import split_ids
from dtrans.run.parameter_server.tables.missed_steps import MissedSteps
from dtrans.run.parameter_server.tables.traced_geo import (
    TracedCachedRows,
    TracedChanges,
    rows_of_table,
)
from dtrans.run.parameter_server.tables.traced_tables import TracedMemory, fetch_rows, part_of_block
from dtrans.run.parameter_server.update import ServerUpdate


Values = Mapping[str, Any]
OrderedState = Mapping[str, Mapping[str, Any]]
# Generator of a turn: it yields once, between the two halves, and returns results by name.
Step = Generator[None, None, Values]
SENDS = (send_p, send_rows_p)
ROUNDS = 2  # turns of each trainer; GEO-SGD adds the local steps before a push
# Local steps before a push, at most. More steps take longer to compare, and run the same code.
MOST_LOCAL_STEPS = 2


@dataclasses.dataclass(frozen=True)
class Turn:
    """One step of one trainer, in a job in which trainers take steps in a fixed order.

    Attributes:
      trainer: the trainer's id.
      batch: the index of the step's batch in the stack of batches.
      reports: True if `plan.verify()` compares the step's results.
    """

    trainer: int
    batch: int
    reports: bool

    def label(self, result: str) -> str:
        """Return a unique name for a result of this step, such as "trainer 0/batch 1/loss"."""
        return f"trainer {self.trainer}/batch {self.batch}/{result}"


@dataclasses.dataclass(frozen=True)
class RecordedOrder:
    """Order in which the trainers take steps: 0, 1, 2, then 2, 1, 0, and so on.

    A *turn* is one step of one trainer. A *round* is one turn of every trainer.

    Attributes:
      turns: all turns, in order.
      rounds: the number of rounds.
      batches: the number of batches. In each round, the trainers split one batch. With GEO-SGD,
        each trainer has a full batch, and takes the next trainer's batch in the next round.
    """

    turns: tuple[Turn, ...]
    rounds: int
    batches: int

    @property
    def halves(self) -> Iterator[tuple[Turn, bool]]:
        """Yield each step twice: (turn, False) for its first half, (turn, True) for its second.

        A `turn` is one step of one trainer. Steps of different trainers overlap: the second half of
        a step follows the first half of the next step. So the next trainer computes with parameters
        that lack an update. For trainers 0 and 1, the sequence is (0, False), (1, False), (0,
        True), ...
        """
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
        """Choose the number of steps for a plan, so that all kinds of communication occur.

        Trainers use old parameters at least once. With GEO-SGD, they also push changes, and apply
        the servers' answer.
        """
        rounds = ROUNDS + local_steps(plan.push_every)
        turns = []
        for number in range(rounds):
            for k in range(plan.trainers)[:: -1 if number % 2 else 1]:
                batch = (k + number) % plan.trainers if plan.push_every else number
                # With GEO-SGD, the last round's results depend on all earlier results of the same
                # trainer. So a comparison of the last round checks the earlier rounds, too.
                reports = not plan.push_every or number == rounds - 1
                turns.append(Turn(k, batch, reports))
        return cls(tuple(turns), rounds, plan.trainers if plan.push_every else rounds)


def run_to_end(step: Step) -> Values:
    """Run the generator of a trainer's step to its end; return the step's results."""
    while True:
        try:
            next(step)
        except StopIteration as ended:
            found: Values = ended.value
            return found


def local_steps(push_every: int) -> int:
    """Return the number of steps before each push of GEO-SGD, at most 2; 0 without GEO-SGD.

    A *push* is a message with changes of parameters. More steps before a push would run the same
    code, and make `plan.verify()` slower.
    """
    return min(push_every, MOST_LOCAL_STEPS)


def stacked_type(t: Any, count: int) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a stack of `count` arrays."""
    return jax.ShapeDtypeStruct((count, *t.shape), t.dtype)


def rows_at_start(rows: int, trainer: int) -> np.ndarray:
    """Return the ids of the table rows that a GEO-SGD trainer stores at the start.

    The trainer stores every second row, and fetches the others from servers. So a step tests both
    cases. For 5 rows and trainer 1, the function returns [1, 3].
    """
    return np.arange(trainer % 2, rows, 2, dtype=np.int32)


def initial_state(eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any]:
    """Return the initial optimizer state of all rows of a table, as one array for each state.

    With GEO-SGD, a trainer needs this state when it looks up a row for the first time.

    Args:
      eqn: the `geo_init` equation of the table in a trainer's startup program.
      args: the arguments of the user's `init`.
    """
    p = eqn.params
    if len(p["types"]) == 1:
        return []
    rows = sum(span.rows for span in p["spans"])
    state: Sequence[Any] = evaluate(p["write"](rows), jnp.arange(rows, dtype=jnp.int32), *args)
    return state


def table_types(plan: PServerPlan) -> dict[str, Any]:
    """Return the shape and dtype of each embedding table, by name."""
    return subset(plan.main.inputs, plan.tables.of)


def part_axes(plan: PServerPlan) -> dict[str, int]:
    """Return the dimension on which each batch array is split over the trainers, by name.

    For example, `{"x": 0}` splits the rows of x. With GEO-SGD or with one trainer, no array is
    split, and the result is empty.
    """
    if plan.push_every or plan.trainers == 1:
        return {}
    if plan.shared is not None:
        return dict(plan.shared.axes)
    axes = {}
    for spec in plan.main.args[2:]:
        for n in spec.names:
            if plan.main.inputs[n].ndim:
                axes[n] = 0
    return axes


def part_of_trainer(x: Any, axis: int | None, trainer: int, trainers: int) -> Any:
    """Return a trainer's part of a batch array; the array itself if `axis` is None."""
    if axis is None:
        return x
    size = x.shape[axis] // trainers
    return jax.lax.slice_in_dim(x, trainer * size, (trainer + 1) * size, axis=axis)


class OrderedJob:
    """Job that runs an asynchronous plan in one process, with steps in a fixed order.

    `RecordedOrder` is this order. A state contains the arrays of servers, and the parameters that
    each trainer has received. It also contains the arrays that trainer 0 computes itself. With
    GEO-SGD, each trainer stores some rows of tables itself when `step` begins (`rows_at_start`).

    Args:
      plan: an asynchronous plan.
      begins: arguments of the user's `init`. With GEO-SGD, they determine the initial optimizer
        state of rows that a trainer looks up for the first time.
    """

    def __init__(self, plan: PServerPlan, begins: Sequence[Any] = ()) -> None:
        self.plan = plan
        self._begins = begins
        self.order = RecordedOrder.for_plan(plan)
        self._axes = part_axes(plan)

    @cached_property
    def served(self) -> tuple[str, ...]:
        """Names of the parameters that trainers receive from servers, without tables."""
        return tuple(n for n in self.plan.placement.blocks if n not in self.plan.tables.of)

    @cached_property
    def local(self) -> tuple[str, ...]:
        """Names of the arrays that trainers compute themselves.

        With GEO-SGD, they include the optimizer state.
        """
        # The first `count` arguments of a trainer's program are its state.
        count = 2 if self.plan.push_every else 1
        names = all_names(self.plan.trainer.args[:count])
        others = {*self.served, *self.plan.tables.of}
        return tuple(n for n in names if n not in others)

    @cached_property
    def state_of_rows(self) -> dict[str, tuple[str, ...]]:
        """For each GEO-SGD table, names of the optimizer state arrays with a row per table row."""
        return {n: t.zero.state for n, t in self.plan.tables.of.items() if t.on_trainers}

    def state_of(self, params: Any, opt_state: Any) -> OrderedState:
        """Return the job's state for given parameters and optimizer state, equal on all roles."""
        arrays = arrays_of(self.plan.main, params, opt_state)
        servers = {ep: server_state(self.plan, ep, arrays) for ep in self.plan.servers}
        local = subset(arrays, self.local)
        return self._state(local, servers, [arrays] * self.plan.trainers)

    def init(self, *args: Any) -> OrderedState:
        """Return the first state, by running the startup programs of all servers and trainers."""
        servers = {}
        for ep, programs in self.plan.servers.items():
            arrays = programs.startup.compiled(*programs.startup.flatten(*args))
            state = dict(zip(programs.startup.out_names, arrays, strict=True))
            servers[ep] = _OrderedServer(programs, state)
        params = []
        for k in range(self.plan.trainers):
            startup = self.plan.trainer_startup_program(k)
            trainer = _OrderedTrainer(self, k, servers, {}, {})
            params.append(trainer.start(startup, startup.flatten(*args)))
        local = subset(params[0], self.local)
        return self._state(local, {ep: x.state for ep, x in servers.items()}, params)

    def step(self, state: OrderedState, *batch: Any) -> tuple[OrderedState, Values]:
        """Take all steps of all trainers, in their order; return the new state and named results.

        The state afterwards looks as if every trainer had just received the newest parameters.

        Args:
          state: the state that `init` or an earlier call returned.
          batch: batch arguments, each a stack of `RecordedOrder.batches` batches.
        """
        trainers_at_start = range(self.plan.trainers)
        local_rows = {}
        for n in self.state_of_rows:
            rows = self.plan.main.inputs[n].shape[0]
            local_rows[n] = [rows_at_start(rows, k) for k in trainers_at_start]
        servers = {}
        for ep, programs in self.plan.servers.items():
            servers[ep] = _OrderedServer(programs, state["servers"][ep], local_rows)
        trainers = [self._trainer(k, servers, state) for k in trainers_at_start]

        results = self._take_turns(trainers, batch)

        local: Values = {}
        for k, trainer in enumerate(trainers):
            values = trainer.values | trainer.rows_over()
            if k == 0:
                local = subset(values, self.local)
            names = [*self.served, *self.state_of_rows]
            if k:  # The state contains trainer 0's local arrays.
                names += self.local
            results |= {f"trainer {k}/{n}": values[n] for n in names}
        newest = {n: trainers[0].newest_of(n) for n in self.served}
        settled = {ep: x.settled(self.plan.trainers) for ep, x in servers.items()}
        return self._state(local, settled, [newest] * self.plan.trainers), results

    def _take_turns(
        self, trainers: Sequence[_OrderedTrainer], batch: Sequence[Any]
    ) -> dict[str, Any]:
        """Run all turns (steps of single trainers) in their order; return their results by label.

        Results of turns that `plan.verify()` does not compare are left out.
        """
        arrays: dict[str, Any] = {}
        for spec, tree in zip(self.plan.main.args[2:], batch, strict=True):
            arrays |= zip(spec.names, spec.flatten(tree), strict=True)
        results: dict[str, Any] = {}
        steps: dict[int, Step] = {}  # id of a trainer -> its open turn
        for turn, ends in self.order.halves:
            k = turn.trainer
            if ends:
                found = run_to_end(steps.pop(k))
                if turn.reports:
                    results |= {turn.label(n): x for n, x in found.items()}
                continue
            part = {}
            for n, stack in arrays.items():
                axis = self._axes.get(n)
                part[n] = part_of_trainer(stack[turn.batch], axis, k, self.plan.trainers)
            steps[k] = trainers[k].step(part)
            next(steps[k])
        return results

    def _trainer(
        self, number: int, servers: Mapping[str, _OrderedServer], state: OrderedState
    ) -> _OrderedTrainer:
        """Return the object for one trainer at the start of `step`, with its table rows."""
        types = table_types(self.plan)
        local_rows = {}
        for table, names in self.state_of_rows.items():
            types |= subset(self.plan.main.inputs, names)
            rows = [self._table(table, servers), *values_at(state["own"], names)]
            ids = rows_at_start(types[table].shape[0], number)
            local_rows[table] = TracedCachedRows(ids, rows)
        # A trainer's program takes tables with 0 rows, because it looks up the rows.
        no_rows = {n: jnp.zeros((0, *t.shape[1:]), t.dtype) for n, t in types.items()}
        values = {**state["own"], **state["trainers"][str(number)], **no_rows}
        return _OrderedTrainer(self, number, servers, values, local_rows)

    def _table(self, name: str, servers: Mapping[str, _OrderedServer]) -> Any:
        """Return a table with all rows, assembled from its blocks on servers."""
        spans, rows_of_blocks = [], []
        for b in self.plan.placement.blocks[name]:
            assert b.span is not None
            spans.append(b.span)
            ids = np.arange(b.rows, dtype=np.int32)
            rows_of_blocks.append(RowGradient(ids, servers[b.endpoint].state[b.name]))
        found = rows_of_table(spans, rows_of_blocks)
        t = self.plan.main.inputs[name]
        return jnp.zeros(t.shape, t.dtype).at[found.ids].set(found.rows)

    @cached_property
    def initial_state(self) -> dict[str, Any]:
        """Initial optimizer state of all rows of GEO-SGD tables, by name of the array."""
        found: dict[str, Any] = {}
        for eqn in self.plan.trainer_startup_program(0).eqns:
            if eqn.primitive is geo_init_p:
                names = self.state_of_rows[eqn.params["table"]]
                found |= zip(names, initial_state(eqn, self._begins), strict=True)
        return found

    def _state(
        self, local: Values, servers: Mapping[str, Mapping[str, Any]], trainers: Sequence[Values]
    ) -> OrderedState:
        received = {}
        for k, values in enumerate(trainers):
            received[str(k)] = subset(values, self.served)
        return {"own": local, "servers": servers, "trainers": received}


class _OrderedServer:
    """One server of an `OrderedJob`. It updates its blocks (rows of parameters) like a real server.

    The updates are those of `dtrans.protocol.server.async_server`.

    Args:
      programs: the server's programs.
      state: the server's arrays, by name.
      local_rows: for each GEO-SGD table, a list with the ids of the rows that each trainer stores
        itself at the start.
    """

    def __init__(
        self,
        programs: ServerPrograms,
        state: Values,
        local_rows: Mapping[str, Sequence[np.ndarray]] = {},
    ) -> None:
        self.update = update = ServerUpdate.from_program(programs.main)
        memory = {}
        for n, t in update.tables.items():
            if not t.updates_all:
                missed = MissedSteps(update, t) if t.changes_other_rows else None
                memory[n] = TracedMemory(t, missed, state)
        self._blocks, self._backed = BlockUpdates(update, state, memory), update.served.backed
        # With delay compensation: (trainer, block) -> the rows that the trainer has received
        self._sent_rows: dict[tuple[int, str], RowGradient] = {}
        of_blocks = {}
        for n, t in update.tables.items():
            if t.leaf in local_rows:
                span = t.span
                of_blocks[n] = [span.local(ids[span.among(ids)]) for ids in local_rows[t.leaf]]
        self._changed = TracedChanges(update.served.tables, update.served.trainers, of_blocks)
        self.state: dict[str, Any] = dict(self._blocks.state)

    def settled(self, trainers: int) -> Values:
        """Return this server's state as if every trainer had just received the newest parameters.

        With delay compensation, a server stores a copy of the parameters that each trainer last
        received. These copies are set to the current parameters.
        """
        copies = {backup_of(n, k): self.state[n] for n in self._backed for k in range(trainers)}
        return {**self.state, **copies}

    def take(self, trainer: int, grads: Values) -> None:
        """Update this server's blocks with the gradients that a trainer has sent in one step.

        Args:
          trainer: id of the trainer.
          grads: the gradients, by name.
        """
        backups = {n + BACKUP: self.state[backup_of(n, trainer)] for n in self._backed}
        rows = {n + BACKUP: x for (k, n), x in self._sent_rows.items() if k == trainer}
        values = {**grads, **backups, **rows}
        updated = StepUpdates().take(self._blocks, self.state, grads.keys(), values)
        for name in updated:
            if name in self.update.tables:
                (gradient,) = set(self.update.tables[name].gradients.values())
                self._changed.changed(trainer, name, grads[gradient].ids)

    def give(self, trainer: int, name: str) -> Any:
        """Return a block of parameters for a trainer.

        With delay compensation, the server also stores the block as the newest one that the trainer
        has.
        """
        if name in self._backed:
            self.state[backup_of(name, trainer)] = self.state[name]
        return words(self.state[name])

    def give_rows(self, trainer: int, name: str, ids: Any) -> Any:
        """Return rows of a table for a trainer.

        With delay compensation, the server also stores the rows as the newest ones that the trainer
        has.

        Args:
          trainer: id of the trainer.
          name: name of the table's block on this server.
          ids: ids of the rows in the block.
        """
        rows: Any = jnp.take(self.state[name], ids, 0, mode="fill", fill_value=0)
        if self.update.served.tables[name].backed:
            self._sent_rows[trainer, name] = RowGradient(ids, rows)
        self._changed.asked(trainer, name, ids)
        return rows

    def give_changes(self, trainer: int, name: str) -> RowGradient:
        """Return rows that a trainer stores, and others have changed since its last call."""
        ids = self._changed.take(trainer, name)
        rows: Any = jnp.take(self.state[name], ids, 0, mode="fill", fill_value=0)
        return RowGradient(ids, rows)


class _OrderedTrainer:
    """One trainer of an `OrderedJob`. It calls the servers instead of sending messages.

    With GEO-SGD, this object also implements `PushQueue`, for the pushes (messages with changes of
    parameters) of a `GeoTrainer`.

    Args:
      job: the job.
      number: the trainer's id.
      servers: the servers, by endpoint.
      values: the trainer's arrays at the start, by name.
      local_rows: for each GEO-SGD table, the rows that the trainer stores itself.

    Attributes:
      values: the trainer's arrays, by name.
    """

    name = "a trainer"

    def __init__(
        self,
        job: OrderedJob,
        number: int,
        servers: Mapping[str, _OrderedServer],
        values: Values,
        local_rows: Mapping[str, TracedCachedRows],
    ) -> None:
        self._job, self._number, self._servers = job, number, servers
        self.values = dict(values)
        self._sent: dict[str, dict[str, Any]] = {}  # endpoint -> name -> undelivered gradient
        self._local_rows = local_rows
        self._geo: GeoTrainer | None = None
        self._tables: dict[str, tuple[Leaf, CachedRows]] = {}
        self._answer: dict[str, Any] = {}  # the servers' answer to the last push
        self._pushes = 0
        self._pushed: list[str] = []  # names of the parameters that a push contains, in order

    def step(self, batch: Values) -> Step:
        """Take one step; return its results by name.

        The generator pauses once, before it sends gradients. Meanwhile, other trainers can begin a
        step.

        Args:
          batch: this trainer's part of the batch, by name.
        """
        arrays = {**self.values, **batch}
        program = self._job.plan.trainer_program(self._number)
        inputs = values_at(arrays, program.in_names)
        outs = yield from self._run(program.specialize_flat(list(map(array_type, inputs))), inputs)
        self.values |= subset(outs, self.values)
        return omit(outs, self.values)

    def start(self, program: Program, args: Sequence[Any]) -> Values:
        """Run the trainer's startup program, which receives parameters; return them by name."""
        return run_to_end(self._run(program, args))

    def _run(self, program: Program, args: Sequence[Any]) -> Step:
        """Run a program; return its outputs by name.

        The generator pauses once, before it sends gradients.
        """
        run, rules = divide_program(program, computed=COMPUTED).run(args), self._rules()
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
            outs = rules[eqn.primitive](eqn, values)

    def newest_of(self, leaf: str) -> Any:
        """Return the newest value of a parameter, assembled from its blocks on servers."""
        blocks = self._job.plan.placement.blocks[leaf]
        parts = [self._servers[b.endpoint].state[b.name] for b in blocks]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)

    def _deliver(self) -> None:
        """Pass this trainer's gradients to the servers, which update their parameters."""
        sent, self._sent = self._sent, {}
        for ep, grads in sent.items():
            self._servers[ep].take(self._number, grads)

    def _ask(self, endpoint: str, name: str, ids: Any) -> Any:
        return self._servers[endpoint].give_rows(self._number, name, ids)

    def _rules(self) -> Mapping[Primitive, Callable[[JaxprEqn, Sequence[Any]], Sequence[Any]]]:
        """Return a map from each communication primitive to the function that executes it.

        An attribute with this map would be a reference cycle, and keep the tracers of a finished
        trace alive.
        """
        return {
            send_p: self._send,
            send_rows_p: self._send_rows,
            send_barrier_p: lambda eqn, values: [None],
            recv_p: self._recv,
            fetch_barrier_p: lambda eqn, values: values,
            split_ids_p: lambda eqn, values: split_ids(eqn, [values]),
            prefetch_p: lambda eqn, values: [fetch_rows(eqn, values[0], self._ask)],
            fake_init_p: _fake_init,
            geo_init_p: _geo_init,
            geo_prefetch_p: self._geo_prefetch,
            geo_send_p: self._geo_send,
        }

    # -- equations -------------------------------------------------------------------------------

    def _send(self, eqn: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
        for ep, name, x in sent_blocks(eqn, values):
            self._sent.setdefault(ep, {})[name] = x
        return [None]

    def _send_rows(self, eqn: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
        p = eqn.params
        self._send_parts(p["epmap"], p["names"], p["spans"], RowGradient(*values))
        return [None]

    def _send_parts(
        self,
        endpoints: Sequence[str],
        names: Sequence[str],
        spans: Sequence[Any],
        rows: RowGradient,
    ) -> None:
        """Divide rows of a table among the servers that store them, and queue them for sending.

        Args:
          endpoints: endpoint of each block's server.
          names: name under which the rows of each block are sent.
          spans: the rows of the table that each block contains.
          rows: ids and values of rows.
        """
        for ep, name, span in zip(endpoints, names, spans, strict=True):
            self._sent.setdefault(ep, {})[name] = part_of_block(span, rows)

    def _recv(self, eqn: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
        blocks = []
        for ep, name in zip(eqn.params["epmap"], eqn.params["names"], strict=True):
            blocks.append(self._servers[ep].give(self._number, name))
        return blocks if len(blocks) == len(eqn.outvars) else [jnp.concatenate(blocks)]

    # -- GEO-SGD ---------------------------------------------------------------------------------

    def rows_over(self) -> dict[str, Any]:
        """Return full tables and their optimizer state, with the rows that this trainer stores.

        `plan.verify()` compares full arrays. Rows that the trainer does not store are zero, and
        have the initial optimizer state.
        """
        found: dict[str, Any] = {}
        for table, local in self._local_rows.items():
            t, names = self._job.plan.main.inputs[table], self._job.state_of_rows[table]
            rows = [jnp.zeros(t.shape, t.dtype), *values_at(self._job.initial_state, names)]
            found |= zip((table, *names), local.over(rows), strict=True)
        return found

    def _geo_prefetch(self, eqn: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
        """Return the rows that a GEO-SGD step looks up, and their optimizer state.

        Rows that the trainer does not store yet are fetched from servers first.
        """
        (uniq,), p = values, eqn.params
        local = self._local_rows[p["table"]]
        self._tables[p["table"]] = as_deltas(leaf_of(eqn, p["types"][0])), local
        new = local.missing(uniq)
        state = []
        for n in self._job.state_of_rows[p["table"]]:
            state.append(jnp.take(self._job.initial_state[n], new, 0, mode="fill", fill_value=0))
        local.add(new, fetch_rows(eqn, new, self._ask), state)
        return local.take(uniq, len(uniq))

    def _geo_send(self, eqn: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
        """End a step of GEO-SGD; push changes every few steps; return the next parameters."""
        p = eqn.params
        if not p["push_every"]:  # In the startup program, no step has ended.
            return values
        params, rows_of_tables = split_push(eqn, values)
        if self._geo is None:
            leaf_of_block = {b.name: b.leaf for b in self._job.plan.placement.all_blocks}
            for names in p["names"]:
                self._pushed.append(leaf_of_block[names[0]])
            deltas = list(map(as_deltas, pushed_leaves(eqn)))
            start = values_at(self.values, self._pushed)
            self._geo = GeoTrainer(self, deltas, self._job.plan.trainers, start, self._tables)
        for table, uniq, rows in rows_of_tables:
            self._geo.rows(table).put(uniq, rows)
        every = local_steps(p["push_every"])
        return self._geo.step(params, every, block_on_pull=p["block_on_pull"])

    # -- the `PushQueue` of `GeoTrainer` ---------------------------------------------------------

    def put(self, group: Group, steps: int) -> None:
        """Apply a push (message with changes of parameters) on the servers, and store their answer.

        The trainer reads the answer in its next step.

        Args:
          group: the changes of each parameter and table.
          steps: number of steps in the push.
        """
        for leaf, x in group:
            if isinstance(x, RowGradient):
                self._send_parts(leaf.endpoints, leaf.names, leaf.spans, x)
                continue
            for ep, name, rows in leaf.blocks(x):
                self._sent.setdefault(ep, {})[name] = rows
        self._deliver()
        self._answer = {str(i): self.newest_of(n) for i, n in enumerate(self._pushed)}
        for table, (leaf, _) in self._tables.items():
            parts = []
            for b in self._job.plan.placement.blocks[table]:
                parts.append(self._servers[b.endpoint].give_changes(self._number, b.name))
            self._answer[table] = rows_of_table(leaf.spans, parts)
        self._pushes += 1

    def received(self) -> int:
        """Return the number of pushes so far: the servers apply each push (changes) at once."""
        return self._pushes

    def newest(self) -> Mapping[str, Any]:
        """Return the servers' answer to the last push of changes. See `PushQueue.newest`."""
        return self._answer

    def barrier(self) -> None:
        """Do nothing, because the servers answer each push of changes at once."""


def _fake_init(eqn: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
    return [jnp.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars]


def _geo_init(eqn: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
    """Return a table with 0 rows, and the initial optimizer state of all rows."""
    t = eqn.params["types"][0]
    return [jnp.zeros((0, *t.shape[1:]), t.dtype), *initial_state(eqn, values)]
