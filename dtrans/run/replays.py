"""Sequential replays: what a mode computes whose trainers step by themselves, written from its
definition.

One device takes the steps of all trainers, one after the other, and merges what they made.
`plan.verify()` compares a job of such a mode with its replay instead of with one step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import closed, constants, evaluate, jaxpr_as_fun, live_part, opened
from dtrans.data_parallel.plan import CollectivePlan
from dtrans.errors import ConfigError
from dtrans.ir.program import Program
from dtrans.ir.pytree import TreeSpec, is_under
from dtrans.parameter_server.options import Async, Geo, HalfAsync
from dtrans.parameter_server.plan import PServerPlan
from dtrans.parameter_server.tables.choose import Table
from dtrans.parameter_server.tables.lookups import find_lookups, numbers_first
from dtrans.run.parameter_server.ordered_job import (
    RecordedOrder,
    Turn,
    local_steps,
    part_axes,
    part_of_trainer,
    rows_at_start,
    stacked_type,
)
from dtrans.step.cut import Gradient, cut


Values = Mapping[str, Any]


def replay_local_steps(plan: CollectivePlan, whole: Program) -> Program:
    """Return a program that takes the local steps of all trainers one after the other, and averages
    their states.

    Args:
      plan: one with `local_sgd`.
      whole: its step, for the batch of all trainers.

    Raises:
      ConfigError: results are merged in a way that has no replay.
    """
    trainers, steps = plan.trainers, plan.options.local_sgd or 1
    state_names = [n for spec in whole.args[:2] for n in spec.names]
    cut = [n for spec in whole.args[2:] for n in spec.names if not is_under(n, plan.unsplit_inputs)]
    own = whole.specialize_flat(
        [_part_type(t, trainers * steps, n in cut) for n, t in whole.inputs.items()]
    )
    step = jaxpr_as_fun(own.jaxpr)
    ways = {n: plan.merges.get(n, "same") for n in whole.out_names}

    def replay(*arrays: Any) -> list[Any]:
        given = dict(zip(whole.in_names, arrays, strict=True))
        start = {n: given[n] for n in state_names}
        made: list[list[Values]] = []
        for trainer in range(trainers):
            state, of_trainer = start, list[Values]()
            for turn in range(steps):
                parts = {n: _part(given[n], trainer, turn, trainers, steps) for n in cut}
                inputs = {**given, **state, **parts}
                outs = dict(
                    zip(own.out_names, step(*(inputs[n] for n in own.in_names)), strict=True)
                )
                state = {n: outs[n] for n in state_names}
                of_trainer.append(outs)
            made.append(of_trainer)
        count = plan.options.batch.example_count
        weights = [[outs[count] if count else 1 for outs in of_trainer] for of_trainer in made]
        found = []
        for n in whole.out_names:
            if n in state_names:  # each trainer has one: that of its last step
                values = [[of_trainer[-1][n]] for of_trainer in made]
                found.append(
                    _merged(n, values, ways[n], [[sum(of_trainer)] for of_trainer in weights])
                )
            else:
                values = [[outs[n] for outs in of_trainer] for of_trainer in made]
                found.append(_merged(n, values, ways[n], weights))
        return found

    types = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in whole.inputs.values()]
    jaxpr: Any = jax.make_jaxpr(replay)(*types)
    return _replaying(whole, jaxpr)


def _replaying(whole: Program, jaxpr: Any, **options: Any) -> Program:
    """Return a program with the arguments of a step, and the live part of another jaxpr."""
    inner = opened(jaxpr)
    live, _ = live_part(inner, [True] * len(inner.outvars), [True] * len(inner.invars))
    made = closed(live.constvars, constants(jaxpr), live.invars, live.outvars, live.eqns, jaxpr)
    return whole.with_jaxpr(made, labels={}, **options)


def _part_type(t: Any, parts: int, is_cut: bool) -> jax.ShapeDtypeStruct:
    shape = (t.shape[0] // parts, *t.shape[1:]) if is_cut and t.ndim else t.shape
    return jax.ShapeDtypeStruct(shape, t.dtype)


def _part(x: Any, trainer: int, turn: int, trainers: int, steps: int) -> Any:
    """Return the rows that a trainer has in one of its steps; of a key, one of its own."""
    if x.ndim:
        rows = x.shape[0] // (trainers * steps)
        start = (trainer * steps + turn) * rows
        return x[start : start + rows]
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.fold_in(jax.random.fold_in(x, trainer), turn)
    return x


def _merged(
    name: str, values: Sequence[Sequence[Any]], way: str, weights: Sequence[Sequence[Any]]
) -> Any:
    """Merge the values of all steps of all trainers.

    Args:
      values: by trainer and step.
      weights: likewise, of a mean.
    """
    flat = [x for of_trainer in values for x in of_trainer]
    if way == "mean":
        by = [w for of_trainer in weights for w in of_trainer]
        total = sum(jnp.asarray(w, flat[0].dtype) for w in by)
        return sum(x * jnp.asarray(w, x.dtype) for x, w in zip(flat, by, strict=True)) / total
    if way in _WAYS:
        return _WAYS[way](values, flat)
    raise ConfigError(
        f"plan.verify(): {name} is merged by {way!r}, which has no replay; merge it by 'mean' or "
        "'sum'"
    )


_WAYS: Mapping[str, Callable[[Sequence[Sequence[Any]], list[Any]], Any]] = {
    "sum": lambda values, flat: functools.reduce(jnp.add, flat),
    "max": lambda values, flat: functools.reduce(jnp.maximum, flat),
    "concat": lambda values, flat: jnp.concatenate(flat),
    "same": lambda values, flat: values[0][-1],
    "each": lambda values, flat: jnp.stack([of_trainer[-1] for of_trainer in values]),
}


# -- asynchronous parameter servers ----------------------------------------------------------------


def replay_turns(plan: PServerPlan, batch: Values, begins: Sequence[Any] = ()) -> Program:
    """Return a program in which one device takes all turns of an asynchronous job, one after the
    other.

    Its batch has the batches of the order behind each other, along a new first dimension. Its
    outputs are the state of the servers as one device has it, results of turns, and what trainers
    hold at the end, by name.

    Args:
      batch: name to type of the arrays of one batch: of all trainers, or with GEO-SGD of each.
      begins: arguments of the init, which makes the state of rows that trainers of GEO-SGD look up
        for the first time.
    """
    order, axes, trainers = RecordedOrder.for_plan(plan), part_axes(plan), plan.trainers
    state_types = {n: plan.main.inputs[n] for spec in plan.main.args[:2] for n in spec.names}
    part_types = {
        n: jax.eval_shape(lambda x, n=n: part_of_trainer(x, axes.get(n), 0, trainers), t)
        for n, t in batch.items()
    }
    typed = lambda t: jax.ShapeDtypeStruct(t.shape, t.dtype)
    own = plan.main.specialize_flat([*map(typed, [*state_types.values(), *part_types.values()])])
    device = _GeoDevice(plan, own, begins) if plan.push_every else _AsyncDevice(plan, own)

    def replay(*arrays: Any) -> dict[str, Any]:
        given = dict(zip(own.in_names, arrays, strict=True))
        device.begin({n: given[n] for n in state_types})
        results: dict[str, Any] = {}
        for turn, ends in order.halves:
            if not ends:
                part = {
                    n: part_of_trainer(given[n][turn.batch], axes.get(n), turn.trainer, trainers)
                    for n in batch
                }
                device.begin_turn(turn, part)
                continue
            found = device.end_turn(turn)
            results |= {turn.label(n): x for n, x in found.items() if turn.reports}
        for k in range(trainers):
            of_rows = device.rows_kept(k)
            kept = [n for n in device.trainers[k] if n in of_rows or n not in plan.tables.of]
            kept = [n for n in kept if k or n in device.served]
            results |= {f"trainer {k}/{n}": (device.trainers[k] | of_rows)[n] for n in kept}
        first = {
            n: x
            for n, x in (device.trainers[0] | device.rows_kept(0)).items()
            if n not in device.served
        }
        return {**first, **{n: device.servers[n] for n in device.served}, **device.rest, **results}

    types = [*state_types.values(), *(stacked_type(t, order.batches) for t in batch.values())]
    out = TreeSpec.from_tree(jax.eval_shape(replay, *map(typed, types)))

    def in_order(*arrays: Any) -> list[Any]:
        made = replay(*arrays)
        return [made[n] for n in out.names]

    jaxpr: Any = jax.make_jaxpr(in_order)(*map(typed, types))
    return _replaying(own, jaxpr, out=out)


class LazyRows:
    """Definition of a lazy update: rows that a step does not look up are not changed by it.

    That holds for rows of the table, and of each array of the optimizer's state that has a row for
    each of them.

    Args:
      tables: those whose updates are lazy.
      step: of one device, for the batch of one update.
    """

    def __init__(self, tables: Mapping[str, Table], step: Program) -> None:
        self._tables = tables
        self._inputs = step.in_names
        if not self._tables:
            return
        found = find_lookups(cut(step), [*self._tables])
        picked = {n: found.tables[n].ids for n in self._tables}
        numbers = [atom for ids in picked.values() for atom, _ in ids]
        eqns = numbers_first([*found.eqns, *found.numbering], numbers, step.jaxpr)
        inner = step.inner
        self._numbers = closed(
            inner.constvars, constants(step.jaxpr), inner.invars, numbers, eqns, step.jaxpr
        )
        self._components = {n: [component for _, component in ids] for n, ids in picked.items()}

    def __call__(self, new: Values, old: Values, inputs: Values) -> dict[str, Any]:
        """Return a new state whose rows are the old ones where the step with these inputs looks no
        row up."""
        left = dict(new)
        for table, touched in self.touched(inputs).items():
            for n in (table, *self._tables[table].zero.state):
                left[n] = _chosen(touched, new[n], old[n])
        return left

    def beside(self, new: Values, old: Values, inputs: Values) -> dict[str, Any]:
        """Return arrays that have the shape of their table, by the name of the table: as `__call__`
        does."""
        touched = self.touched(inputs) if new else {}
        zeros = {n: old.get(n, jnp.zeros_like(x)) for n, x in new.items()}
        return {n: _chosen(touched[n], x, zeros[n]) if n in touched else x for n, x in new.items()}

    def touched(self, inputs: Values) -> dict[str, Any]:
        """Return for each lazy table which of its rows a step looks up."""
        if not self._tables:
            return {}
        made = iter(evaluate(self._numbers, *(inputs[n] for n in self._inputs)))
        found = {}
        for n, components in self._components.items():
            looked_up = jnp.zeros(self._tables[n].lookups.rows, jnp.int32)
            for component in components:
                ids = next(made)
                looked_up = looked_up.at[
                    jnp.ravel(ids if component is None else ids[..., component])
                ].set(1)
            found[n] = looked_up > 0
        return found


def _chosen(rows: Any, new: Any, old: Any) -> Any:
    return jnp.where(rows.reshape(-1, *(1,) * (new.ndim - 1)), new, old)


def lazy_tables(plan: PServerPlan) -> dict[str, Table]:
    """Return the tables whose update leaves rows unmoved that one device moves, by name."""
    leaves = lambda t: t.zero.moves and not (t.catches_up or t.updates_all)
    return {n: t for n, t in plan.tables.of.items() if leaves(t)}


def replay_lazy(plan: PServerPlan, batch: Sequence[Any]) -> Program | None:
    """Return the step of one device with lazy updates of tables; None if no table has one.

    Args:
      batch: types of the arrays of the whole batch.
    """
    if not lazy_tables(plan):
        return None
    state = {n: plan.main.inputs[n] for spec in plan.main.args[:2] for n in spec.names}
    whole = plan.main.specialize_flat([*state.values(), *batch])
    leave = LazyRows(lazy_tables(plan), whole)

    def step(*arrays: Any) -> list[Any]:
        inputs = dict(zip(whole.in_names, arrays, strict=True))
        new = dict(zip(whole.out_names, evaluate(whole.jaxpr, *arrays), strict=True))
        left = leave(new, inputs, inputs)
        return [left[n] for n in whole.out_names]

    types = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in whole.inputs.values()]
    jaxpr: Any = jax.make_jaxpr(step)(*types)
    return _replaying(whole, jaxpr)


class _ReplayedDevice:
    """One device that stands for servers and trainers in turn.

    Attributes:
      served: the parameters that servers have.
      servers: these, by name.
      rest: the optimizer's state, where servers have it.
      trainers: what each trainer holds, by name.
    """

    def __init__(self, plan: PServerPlan, step: Program) -> None:
        self.plan, self.step = plan, step
        self.served = tuple(plan.placement.blocks)
        self.servers: dict[str, Any] = {}
        self.rest: dict[str, Any] = {}
        self.trainers: list[dict[str, Any]] = []

    def begin(self, state: Values) -> None:
        """Let all roles have the state of one device."""
        own = set(self.plan.main.args[0].names) | (state.keys() if self.plan.push_every else set())
        self.servers = {n: state[n] for n in self.served}
        self.rest = {n: x for n, x in state.items() if n not in own}
        self.trainers = [
            {n: x for n, x in state.items() if n in own} for _ in range(self.plan.trainers)
        ]

    def begin_turn(self, turn: Turn, batch: Values) -> None:
        """Let a trainer compute its step from the parameters that it has."""
        raise NotImplementedError

    def end_turn(self, turn: Turn) -> Values:
        """Apply the gradients of a trainer's step on the servers; return the results of the
        step."""
        raise NotImplementedError

    def rows_kept(self, trainer: int) -> dict[str, Any]:
        """Return tables as a trainer keeps rows of them, by name; nothing where it keeps none."""
        return {}

    def run(self, inputs: Values) -> dict[str, Any]:
        """Take the step of one device; return its outputs by name."""
        made = evaluate(self.step.jaxpr, *(inputs[n] for n in self.step.in_names))
        return dict(zip(self.step.out_names, made, strict=True))


class _AsyncDevice(_ReplayedDevice):
    """One device that applies each gradient by itself to the newest parameters.

    Where gradients are compensated for their delay, an update is by g + s g g (w - w'), where w' is
    what the trainer has received, and s the strength; or with a decay s / sqrt(m + 1e-7), and m =
    decay m + (1 - decay) g g.
    """

    def __init__(self, plan: PServerPlan, step: Program) -> None:
        super().__init__(plan, step)
        self._halves = cut(step)
        source = self._halves.program
        inner = source.inner
        # one evaluation of the step gives its outputs and its gradients
        outs = [*inner.outvars, *self._halves.gradients.values()]
        self._names = source.out_names
        self._differentiated = closed(
            inner.constvars, constants(source.jaxpr), inner.invars, outs, inner.eqns, source.jaxpr
        )
        self._leave = LazyRows(lazy_tables(plan), step)
        mode = plan.options.mode
        self._delay = mode.delay if isinstance(mode, Async | HalfAsync) else None

    def begin(self, state: Values) -> None:
        super().begin(state)
        self._squares: dict[str, Any] = {}
        self._is_first = True
        self._computed: dict[int, tuple[Values, Values, Sequence[Any]]] = {}  # by trainer

    def begin_turn(self, turn: Turn, batch: Values) -> None:
        # a trainer has no table: it looks rows up where its step begins
        received = self.trainers[turn.trainer] | {n: self.servers[n] for n in self.plan.tables.of}
        inputs = {**received, **self.rest, **batch}
        made = evaluate(self._differentiated, *(inputs[n] for n in self.step.in_names))
        outs = dict(zip(self._names, made, strict=False))
        self._computed[turn.trainer] = inputs, outs, made[len(outs) :]

    def end_turn(self, turn: Turn) -> Values:
        inputs, outs, grads = self._computed.pop(turn.trainer)
        held = {**self.servers, **self.rest}
        new = {n: outs[n] for n in held}
        given: dict[str, Any] = {}
        squares = dict(self._squares)
        for n, g in zip(self._halves.gradients, grads, strict=True):
            given[n] = self._compensated(n, g, inputs[n])
        if not self._is_first:  # the first turn is a step of one device
            half = self._halves.optimize
            known = {**inputs, **held}
            operands = [
                given[n.leaf] if isinstance(n, Gradient) else known[n] for n in half.in_names
            ]
            new |= zip(half.out_names, evaluate(half.jaxpr, *operands), strict=True)
        self._is_first = False
        new = self._leave(new, held, inputs)
        self._squares = self._leave.beside(self._squares, squares, inputs)
        self.servers = {n: new[n] for n in self.served}
        self.rest = {n: new[n] for n in self.rest}
        received = self.trainers[turn.trainer]
        self.trainers[turn.trainer] = {n: self.servers.get(n, outs[n]) for n in received}
        return {n: x for n, x in outs.items() if n not in received and n not in self.rest}

    def _compensated(self, leaf: str, grad: Any, received: Any) -> Any:
        """Return a gradient for parameters that are older than those of the servers."""
        if self._delay is None:
            return grad
        strength: Any = self._delay.strength
        decay = self._delay.decay
        if decay is not None:
            square = self._squares.get(leaf, jnp.zeros_like(grad))
            self._squares[leaf] = decay * square + (1 - decay) * grad * grad
            strength = strength / jnp.sqrt(self._squares[leaf] + 1e-7)
        return grad + strength * grad * grad * (self.servers[leaf] - received).astype(grad.dtype)


class _GeoDevice(_ReplayedDevice):
    """Trainers train by themselves, and every few steps give servers what they have changed,
    divided by their number.

    What has come back is in the results of the next step: local + (server - old). `old` is what a
    trainer and the servers agreed on last.

    Of a table the same holds row by row. A trainer keeps the rows that its steps have looked up. At
    its first lookup a row is as the servers have it, and its state as the init makes it. A push has
    the rows that were looked up since the last one. The answer has the rows that the trainer keeps
    and that others have pushed since its last answer.

    Args:
      begins: arguments of the init.
    """

    def __init__(self, plan: PServerPlan, step: Program, begins: Sequence[Any]) -> None:
        super().__init__(plan, step)
        self.tables = plan.tables.of
        self._lookups = LazyRows(self.tables, step)
        self._begins = begins

    def begin(self, state: Values) -> None:
        super().begin(state)
        # traced with the turns: what a device rounds here would not be what the job's init computes
        made = evaluate(self.plan.startup.jaxpr, *self._begins) if self.tables else ()
        self._init = dict(zip(self.plan.startup.out_names, made, strict=bool(made)))
        self._old = [dict(self.servers) for _ in self.trainers]
        self._steps = [0 for _ in self.trainers]
        self._answers: list[Values | None] = [None for _ in self.trainers]
        self._outs: dict[int, Values] = {}  # of the step that each trainer is at
        # for each trainer which rows of a table it keeps, owes to servers, and is to be told of;
        # and what it is told of
        none = {n: jnp.zeros(t.lookups.rows, bool) for n, t in self.tables.items()}
        start = lambda k, rows: jnp.zeros(rows, bool).at[rows_at_start(rows, k)].set(True)
        self._kept = [
            {n: start(k, len(x)) for n, x in none.items()} for k in range(self.plan.trainers)
        ]
        self._owed, self._news, self._told = ([dict(none) for _ in self.trainers] for _ in range(3))
        for k in range(self.plan.trainers):
            self._look_up(k, {n: ~rows for n, rows in self._kept[k].items()})

    def begin_turn(self, turn: Turn, batch: Values) -> None:
        k = turn.trainer
        touched = self._lookups.touched({**self.trainers[k], **batch})
        self._look_up(k, {n: rows & ~self._kept[k][n] for n, rows in touched.items()})
        before = self.trainers[k]
        outs = self.run({**before, **batch})
        self._outs[k] = self._lookups(outs, before, {**before, **batch})
        for n, rows in touched.items():
            self._kept[k][n] |= rows
            self._owed[k][n] |= rows

    def end_turn(self, turn: Turn) -> Values:
        k, trainers = turn.trainer, self.plan.trainers
        outs = self._outs[k]
        self.trainers[k] = {n: outs[n] for n in self.trainers[k]}
        self._pull(k)
        self._steps[k] += 1
        if self._steps[k] == local_steps(self.plan.push_every):
            local, old = self.trainers[k], self._old[k]
            deltas = {n: (local[n] - old[n]) / trainers for n in self.served}
            for n, rows in self._owed[k].items():
                deltas[n] = _chosen(rows, deltas[n], jnp.zeros_like(deltas[n]))
            self.servers = {n: x + deltas[n] for n, x in self.servers.items()}
            self._old[k] = {n: old[n] + deltas[n] for n in self.served}
            self._tell_others(k)
            self._answers[k], self._steps[k] = self.servers, 0
            mode = self.plan.options.mode
            if isinstance(mode, Geo) and mode.block_on_pull:
                self._pull(k)
        return {n: x for n, x in outs.items() if n not in self.trainers[k]}

    def rows_kept(self, trainer: int) -> dict[str, Any]:
        """Return tables and the state of their rows as a trainer keeps them: zeros and new state
        elsewhere."""
        found = {}
        for table, t in self.tables.items():
            rows, local = self._kept[trainer][table], self.trainers[trainer]
            found[table] = _chosen(rows, local[table], jnp.zeros_like(local[table]))
            found |= {n: _chosen(rows, local[n], self._init[n]) for n in t.zero.state}
        return found

    def _look_up(self, trainer: int, new: Mapping[str, Any]) -> None:
        """Let a trainer have rows of tables that it does not keep."""
        local, old = self.trainers[trainer], self._old[trainer]
        for table, rows in new.items():
            local[table] = _chosen(rows, self.servers[table], local[table])
            old[table] = _chosen(rows, self.servers[table], old[table])
            local |= {
                n: _chosen(rows, self._init[n], local[n]) for n in self.tables[table].zero.state
            }

    def _tell_others(self, trainer: int) -> None:
        """Note which rows others are to be told of that a trainer has pushed, and what it is told
        of itself."""
        for n, rows in self._owed[trainer].items():
            for k in range(self.plan.trainers):
                if k != trainer:
                    self._news[k][n] |= rows & self._kept[k][n]
            self._owed[trainer][n] = jnp.zeros_like(rows)
        self._told[trainer] = self._news[trainer]
        self._news[trainer] = {n: jnp.zeros_like(rows) for n, rows in self._told[trainer].items()}

    def _pull(self, trainer: int) -> None:
        """Take in the answer to the last push."""
        answer, self._answers[trainer] = self._answers[trainer], None
        if answer is None:
            return
        local, old, told = self.trainers[trainer], self._old[trainer], self._told[trainer]
        for n in self.served:
            pulled = local[n] + (answer[n] - old[n])
            local[n] = _chosen(told[n], pulled, local[n]) if n in told else pulled
            old[n] = _chosen(told[n], answer[n], old[n]) if n in told else answer[n]
