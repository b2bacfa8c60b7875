"""Sequential replays: the expected results of modes in which trainers take steps independently.

No single-device step gives the results of an asynchronous job, of GEO-SGD or of local SGD. So
`plan.verify()` compares the job with a replay: one device takes the steps of all trainers one by
one, and merges the results. A replay implements the definition of the mode, and shares no code with
the job.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import closed, constants, evaluate, jaxpr_as_fun, live_part, opened
from dtrans.data_parallel.plan import CollectivePlan
from dtrans.errors import ConfigError
from dtrans.ir.array_fns import array_type
from dtrans.ir.program import Program
from dtrans.ir.pytree import TreeSpec, all_names, is_under
from dtrans.ir.selection import omit, retain, subset, values_at
from dtrans.parameter_server.options import Async, Geo, HalfAsync
from dtrans.parameter_server.plan import PServerPlan
from dtrans.parameter_server.tables.choose import Table
from dtrans.parameter_server.tables.lookups import find_lookups
from dtrans.parameter_server.tables.pick_ids import numbers_first
from dtrans.parameter_server.tables.row_picks import run_ids
from dtrans.run.parameter_server.ordered_job import (
    RecordedOrder,
    Turn,
    local_steps,
    part_axes,
    part_of_trainer,
    rows_at_start,
    stacked_type,
)
from dtrans.step.halves import Gradient, divide_step


Values = Mapping[str, Any]


def replay_local_steps(plan: CollectivePlan, full_step: Program) -> Program:
    """Return a program that computes local SGD on one device, as the reference for `plan.verify()`.

    The program takes the local steps of each trainer, and then averages the trainers' states.

    Args:
      plan: a plan with `local_sgd`.
      full_step: the plan's step for the batch of all trainers and all local steps.

    Raises:
      ConfigError: a result is merged by a rule that has no replay.
    """
    trainers, steps = plan.trainers, plan.options.local_sgd or 1
    state_names = all_names(full_step.args[:2])
    batch_names = all_names(full_step.args[2:])
    split = [n for n in batch_names if not is_under(n, plan.unsplit_inputs)]
    part_types = []
    for n, t in full_step.inputs.items():
        part_types.append(_part_type(t, trainers * steps, n in split))
    part = full_step.specialize_flat(part_types)
    step = jaxpr_as_fun(part.jaxpr)
    ways = {n: plan.merges.get(n, "same") for n in full_step.out_names}
    count = plan.options.batch.example_count

    def run_trainer(trainer: int, inputs: Values) -> list[Values]:
        """Take the local steps of one trainer; return the outputs of each step."""
        state = subset(inputs, state_names)
        outputs: list[Values] = []
        for turn in range(steps):
            parts = {n: _part(inputs[n], trainer, turn, trainers, steps) for n in split}
            operands = {**inputs, **state, **parts}
            found = step(*values_at(operands, part.in_names))
            outputs.append(dict(zip(part.out_names, found, strict=True)))
            state = subset(outputs[-1], state_names)
        return outputs

    def replay(*arrays: Any) -> list[Any]:
        inputs = dict(zip(full_step.in_names, arrays, strict=True))
        by_trainer = [run_trainer(k, inputs) for k in range(trainers)]
        weights = [[1] * steps] * trainers
        if count:
            weights = [_column(outputs, count) for outputs in by_trainer]
        totals = [[sum(of_trainer)] for of_trainer in weights]
        merged = []
        for n in full_step.out_names:
            values = [_column(outputs, n) for outputs in by_trainer]
            if n in state_names:  # states are averaged after the last local step
                values = [of_trainer[-1:] for of_trainer in values]
                merged.append(_merge(n, values, ways[n], totals))
            else:
                merged.append(_merge(n, values, ways[n], weights))
        return merged

    types = list(map(array_type, full_step.inputs.values()))
    jaxpr: Any = jax.make_jaxpr(replay)(*types)
    return _replace_jaxpr(full_step, jaxpr)


def _column(outputs: Sequence[Values], name: str) -> list[Any]:
    return [found[name] for found in outputs]


def _replace_jaxpr(step: Program, jaxpr: Any, **options: Any) -> Program:
    """Return a program with another jaxpr, without equations that no output needs."""
    inner = opened(jaxpr)
    live, _ = live_part(inner, [True] * len(inner.outvars), [True] * len(inner.invars))
    new = closed(live.constvars, constants(jaxpr), live.invars, live.outvars, live.eqns, jaxpr)
    return step.with_jaxpr(new, labels={}, **options)


def _part_type(t: Any, parts: int, is_split: bool) -> jax.ShapeDtypeStruct:
    """Return the type of a batch array; if it is divided, with only 1/`parts` of the rows."""
    shape = t.shape
    if is_split and t.ndim:
        shape = (t.shape[0] // parts, *t.shape[1:])
    return jax.ShapeDtypeStruct(shape, t.dtype)


def _part(x: Any, trainer: int, turn: int, trainers: int, steps: int) -> Any:
    """Return the rows of a batch array that a trainer reads in one of its local steps.

    If the array is a PRNG key, fold the trainer's id and the number of the step into it instead.

    Args:
      x: the array.
      trainer: the trainer's id.
      turn: the number of the local step, from 0.
      trainers: the number of trainers.
      steps: the number of local steps.
    """
    if x.ndim:
        rows = x.shape[0] // (trainers * steps)
        start = (trainer * steps + turn) * rows
        return x[start : start + rows]
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.fold_in(jax.random.fold_in(x, trainer), turn)
    return x


def _merge(
    name: str, values: Sequence[Sequence[Any]], way: str, weights: Sequence[Sequence[Any]]
) -> Any:
    """Merge the values that one output has in all steps of all trainers.

    Args:
      name: the name of the output, for the error.
      values: the values of the output, as [trainer][step].
      way: the merge rule, such as "mean".
      weights: the weight of each value in a mean, as [trainer][step].
    """
    flat = list(itertools.chain(*values))
    if way == "mean":
        factors = [jnp.asarray(w, flat[0].dtype) for w in itertools.chain(*weights)]
        return sum(x * w for x, w in zip(flat, factors, strict=True)) / sum(factors)
    if way in _WAYS:
        return _WAYS[way](values, flat)
    raise ConfigError(f"plan.verify() cannot replay merge[{name!r}]={way!r}; write 'mean' or 'sum'")


_WAYS: Mapping[str, Callable[[Sequence[Sequence[Any]], list[Any]], Any]] = {
    "sum": lambda values, flat: functools.reduce(jnp.add, flat),
    "max": lambda values, flat: functools.reduce(jnp.maximum, flat),
    "concat": lambda values, flat: jnp.concatenate(flat),
    "same": lambda values, flat: values[0][-1],
    "each": lambda values, flat: jnp.stack([of_trainer[-1] for of_trainer in values]),
}


# -- asynchronous parameter servers ----------------------------------------------------------------


def replay_turns(plan: PServerPlan, batch: Values, init_args: Sequence[Any] = ()) -> Program:
    """Return a program that computes an asynchronous job on one device, for `plan.verify()`.

    The program takes single steps of trainers (*turns*) in a fixed order (`RecordedOrder`), which
    the compared job has, too. Batch arrays of the program have an additional first dimension, with
    one entry for each batch. The outputs are a dict: the servers' state, the results of all turns,
    and the trainers' final state.

    Args:
      plan: the plan of the job.
      batch: types of one batch's arrays, by name. With GEO-SGD, one trainer reads this batch.
      init_args: arguments of the user's init. With GEO-SGD, the program needs them for the
        optimizer state of a table row at its first lookup.
    """
    order, axes, trainers = RecordedOrder.for_plan(plan), part_axes(plan), plan.trainers
    state_types = subset(plan.main.inputs, all_names(plan.main.args[:2]))
    part_types = [
        jax.eval_shape(lambda x, n=n: part_of_trainer(x, axes.get(n), 0, trainers), t)
        for n, t in batch.items()
    ]
    step = plan.main.specialize_flat([*map(array_type, [*state_types.values(), *part_types])])
    device = _GeoDevice(plan, step, init_args) if plan.push_every else _AsyncDevice(plan, step)

    def replay(*arrays: Any) -> dict[str, Any]:
        inputs = dict(zip(step.in_names, arrays, strict=True))
        device.begin(subset(inputs, state_types))
        results: dict[str, Any] = {}
        for turn, ends in order.halves:
            if not ends:
                part = {}
                for n in batch:
                    x = inputs[n][turn.batch]
                    part[n] = part_of_trainer(x, axes.get(n), turn.trainer, trainers)
                device.begin_turn(turn, part)
                continue
            found = device.end_turn(turn)
            if turn.reports:
                results |= {turn.label(n): x for n, x in found.items()}
        return {**device.final_state(), **results, **device.final_trainers()}

    types = [*state_types.values(), *(stacked_type(t, order.batches) for t in batch.values())]
    out = TreeSpec.from_tree(jax.eval_shape(replay, *map(array_type, types)))

    def replay_flat(*arrays: Any) -> list[Any]:
        outputs = replay(*arrays)
        return values_at(outputs, out.names)

    jaxpr: Any = jax.make_jaxpr(replay_flat)(*map(array_type, types))
    return _replace_jaxpr(step, jaxpr, out=out)


class LazyRows:
    """Lazy updates of embedding tables on one device: only rows that a step looks up change.

    A single-device optimizer may change all rows. This class computes the expected result of a lazy
    update from such a step: rows that the step does not look up keep their old values. Rows of the
    table's optimizer state change only together with the same rows of the table.

    Args:
      tables: the tables with lazy updates, by name.
      step: the single-device step, for the batch of one update.
    """

    def __init__(self, tables: Mapping[str, Table], step: Program) -> None:
        self._tables = tables
        self._inputs = step.in_names
        if not self._tables:
            return
        found = find_lookups(divide_step(step), [*self._tables])
        numbers: list[Any] = []
        self._picks: dict[str, list[tuple[int | None, str, int]]] = {}
        for n in self._tables:
            self._picks[n] = []
            for atom, component, outside, count in found.tables[n].ids:
                numbers.append(atom)
                self._picks[n].append((component, outside, count))
        eqns = numbers_first([*found.eqns, *found.id_eqns], numbers, step.jaxpr)
        inner = step.inner
        self._numbers = closed(
            inner.constvars, constants(step.jaxpr), inner.invars, numbers, eqns, step.jaxpr
        )

    def __call__(self, new: Values, old: Values, inputs: Values) -> dict[str, Any]:
        """Return the state after a lazy update: new values of rows that the step looks up.

        Other rows keep their old values.

        Args:
          new: the state after an update of all rows.
          old: the state before the update.
          inputs: the inputs of the step, by name.
        """
        state = dict(new)
        for table, touched in self.touched(inputs).items():
            for n in (table, *self._tables[table].zero.state):
                state[n] = _select_rows(touched, new[n], old[n])
        return state

    def select(self, new: Values, old: Values, inputs: Values) -> dict[str, Any]:
        """Return arrays with new rows where the step looks up rows, and old rows elsewhere.

        Unlike a call, this method handles one array for each table, such as a running mean.

        Args:
          new: arrays after an update of all rows, by table.
          old: arrays before the update, by table; a missing array is zero.
          inputs: the inputs of the step, by name.
        """
        found = dict(new)
        if new:
            for n, rows in self.touched(inputs).items():
                if n in new:
                    before = old.get(n, jnp.zeros_like(new[n]))
                    found[n] = _select_rows(rows, new[n], before)
        return found

    def touched(self, inputs: Values) -> dict[str, Any]:
        """Return for each table a mask of the rows that a step looks up.

        Args:
          inputs: the inputs of the step, by name.

        Returns:
          Boolean arrays of shape [rows], by table.
        """
        if not self._tables:
            return {}
        numbers = iter(evaluate(self._numbers, *values_at(inputs, self._inputs)))
        masks = {}
        for n, picks in self._picks.items():
            rows = self._tables[n].lookups.rows
            mask = jnp.zeros(rows, jnp.int32)
            for component, outside, count in picks:
                ids = next(numbers)
                if component is not None:
                    ids = ids[..., component]
                if count > 1:
                    ids = run_ids(ids, count)
                if outside == "clip":
                    ids = jnp.clip(ids, 0, rows - 1)
                elif outside == "drop":
                    ids = jnp.where(ids < 0, rows, ids)
                mask = mask.at[jnp.ravel(ids)].set(1, mode="drop")
            masks[n] = mask > 0
        return masks


def _select_rows(mask: Any, new: Any, old: Any) -> Any:
    """Return an array with rows of `new` where the mask is True, and rows of `old` elsewhere."""
    return jnp.where(mask.reshape(-1, *(1,) * (new.ndim - 1)), new, old)


def lazy_tables(plan: PServerPlan) -> dict[str, Table]:
    """Return the tables for which a job gives other results than a single device, by name.

    These tables have a lazy update, which changes only the rows that a step looks up. With some
    optimizers, such as SGD, the results are equal, because the gradient of other rows is zero. Such
    tables are left out.
    """
    found = {}
    for n, t in plan.tables.of.items():
        if t.zero.changes and not (t.changes_unread_rows or t.updates_all):
            found[n] = t
    return found


def replay_lazy(plan: PServerPlan, batch: Sequence[Any]) -> Program | None:
    """Return the single-device step with lazy updates of tables, for `plan.verify()`.

    A lazy update changes only the rows that the step looks up. If no table has such an update,
    return None. Then the reference is the single-device step.

    Args:
      plan: the plan of the job.
      batch: types of the arrays of the full batch.
    """
    if not lazy_tables(plan):
        return None
    state = values_at(plan.main.inputs, all_names(plan.main.args[:2]))
    step = plan.main.specialize_flat([*state, *batch])
    keep_rows = LazyRows(lazy_tables(plan), step)

    def lazy_step(*arrays: Any) -> list[Any]:
        inputs = dict(zip(step.in_names, arrays, strict=True))
        new = dict(zip(step.out_names, evaluate(step.jaxpr, *arrays), strict=True))
        lazy = keep_rows(new, inputs, inputs)
        return values_at(lazy, step.out_names)

    jaxpr: Any = jax.make_jaxpr(lazy_step)(*map(array_type, step.inputs.values()))
    return _replace_jaxpr(step, jaxpr)


class _ReplayedDevice:
    """One device that computes an asynchronous job: all servers, and trainers one by one.

    This is a base class of two modes, asynchronous updates and GEO-SGD. A *turn* is one step of one
    trainer.

    Args:
      plan: the plan of the job.
      step: the single-device step for the batch of one turn.

    Attributes:
      served: names of the parameters on servers.
      servers: the parameters of servers, by name.
      rest: the optimizer state of servers, by name; empty with GEO-SGD.
      trainers: for each trainer, the arrays of its state by name.
    """

    def __init__(self, plan: PServerPlan, step: Program) -> None:
        self.plan, self.step = plan, step
        self.served = tuple(plan.placement.blocks)
        self.servers: dict[str, Any] = {}
        self.rest: dict[str, Any] = {}
        self.trainers: list[dict[str, Any]] = []

    def begin(self, state: Values) -> None:
        """Give all servers and trainers the same first state, that of one device."""
        on_trainers = set(self.plan.main.args[0].names)
        if self.plan.push_every:  # with GEO-SGD, trainers have the optimizer state
            on_trainers |= state.keys()
        self.servers = subset(state, self.served)
        self.rest = omit(state, on_trainers)
        of_trainer = retain(state, on_trainers)
        self.trainers = [dict(of_trainer) for _ in range(self.plan.trainers)]

    def begin_turn(self, turn: Turn, batch: Values) -> None:
        """Compute the first half of a trainer's step: gradients, from its current parameters.

        Args:
          turn: the trainer and the batch.
          batch: the arrays of the batch, by name.
        """
        raise NotImplementedError

    def end_turn(self, turn: Turn) -> Values:
        """Compute the second half of a trainer's step: apply its gradients on the servers.

        Between the halves, another trainer may begin a step with the older parameters.

        Args:
          turn: the trainer and the batch.

        Returns:
          The step's results, such as the loss, by name.
        """
        raise NotImplementedError

    def cached_rows(self, trainer: int) -> dict[str, Any]:
        """Return a trainer's own copies of tables and of their optimizer state, by name.

        Only trainers of GEO-SGD have such copies, so here the dict is empty.
        """
        return {}

    def final_state(self) -> dict[str, Any]:
        """Return the job's state after the last step as full arrays, by name."""
        of_first = self.trainers[0] | self.cached_rows(0)
        state = omit(of_first, self.served)
        state |= subset(self.servers, self.served)
        return state | self.rest

    def final_trainers(self) -> dict[str, Any]:
        """Return the arrays of trainers that are not in `final_state`, by "trainer 1/NAME"."""
        found = {}
        for k, arrays in enumerate(self.trainers):
            rows = self.cached_rows(k)
            for n in arrays:
                is_table = n in self.plan.tables.of and n not in rows
                if not is_table and (k or n in self.served):
                    found[f"trainer {k}/{n}"] = rows.get(n, arrays[n])
        return found

    def run(self, inputs: Values) -> dict[str, Any]:
        """Evaluate the single-device step; return its outputs by name.

        Args:
          inputs: the inputs of the step, by name.
        """
        outputs = evaluate(self.step.jaxpr, *values_at(inputs, self.step.in_names))
        return dict(zip(self.step.out_names, outputs, strict=True))


class _AsyncDevice(_ReplayedDevice):
    """Replay of an asynchronous job: each gradient is applied to the servers' newest parameters.

    A trainer has computed the gradient from older parameters. Delay compensation corrects this: it
    replaces a gradient g by g + s g g (w - w'). Here w are the parameters on the servers, w' the
    parameters that the trainer received, and s is the strength. With a decay d, the strength is s /
    sqrt(m + 1e-7). Here m is a running mean of g g: each gradient first sets m to d m + (1 - d) g
    g.
    """

    def __init__(self, plan: PServerPlan, step: Program) -> None:
        super().__init__(plan, step)
        self._halves = divide_step(step)
        source = self._halves.program
        inner = source.inner
        # one evaluation of the step gives its outputs and its gradients
        outs = [*inner.outvars, *self._halves.gradients.values()]
        self._names = source.out_names
        self._differentiated = closed(
            inner.constvars, constants(source.jaxpr), inner.invars, outs, inner.eqns, source.jaxpr
        )
        self._keep_rows = LazyRows(lazy_tables(plan), step)
        mode = plan.options.mode
        self._delay = mode.delay if isinstance(mode, Async | HalfAsync) else None

    def begin(self, state: Values) -> None:
        super().begin(state)
        self._squares: dict[str, Any] = {}
        self._is_first = True
        # trainer -> (inputs, outputs, gradients) of the step that the trainer has computed
        self._computed: dict[int, tuple[Values, Values, Sequence[Any]]] = {}

    def begin_turn(self, turn: Turn, batch: Values) -> None:
        # trainers store no tables: a trainer looks up rows at the start of its step
        received = self.trainers[turn.trainer] | subset(self.servers, self.plan.tables.of)
        inputs = {**received, **self.rest, **batch}
        found = evaluate(self._differentiated, *values_at(inputs, self.step.in_names))
        outs = dict(zip(self._names, found, strict=False))
        self._computed[turn.trainer] = inputs, outs, found[len(outs) :]

    def end_turn(self, turn: Turn) -> Values:
        inputs, outs, grads = self._computed.pop(turn.trainer)
        state = {**self.servers, **self.rest}
        new = subset(outs, state)
        squares = dict(self._squares)
        compensated: dict[str, Any] = {}
        for n, g in zip(self._halves.gradients, grads, strict=True):
            compensated[n] = self._compensate(n, g, inputs[n])

        # In the first turn the gradient is not stale, so use the outputs of the step. In later
        # turns, run the optimizer half with the newest parameters.
        if not self._is_first:
            half = self._halves.optimize
            known = {**inputs, **state}
            operands = []
            for name in half.in_names:
                if isinstance(name, Gradient):
                    operands.append(compensated[name.leaf])
                else:
                    operands.append(known[name])
            new |= zip(half.out_names, evaluate(half.jaxpr, *operands), strict=True)
        self._is_first = False

        new = self._keep_rows(new, state, inputs)
        self._squares = self._keep_rows.select(self._squares, squares, inputs)
        self.servers = subset(new, self.served)
        self.rest = subset(new, self.rest)
        received = self.trainers[turn.trainer]
        self.trainers[turn.trainer] = {n: self.servers.get(n, outs[n]) for n in received}
        return omit(outs, {*received, *self.rest})

    def _compensate(self, leaf: str, grad: Any, received: Any) -> Any:
        """Correct a gradient for the updates since its trainer received parameters.

        Without delay compensation, the gradient is returned unchanged.

        Args:
          leaf: name of the parameter.
          grad: the trainer's gradient.
          received: the parameter's value that the trainer received.
        """
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
    """Replay of GEO-SGD: trainers train their own copies, and push changes every few steps.

    A push is (local - old) / trainers. Here `local` is the trainer's parameter, and `old` is the
    last value that was equal on the trainer and the servers. After the next step, the trainer
    applies the servers' answer: local + (server - old).

    For a table, each row is pushed separately. A trainer stores the rows that its steps have looked
    up. At the first lookup, a row gets the servers' value and the initial optimizer state. A push
    contains the rows that were looked up since the last push. The answer contains rows that the
    trainer stores, and that other trainers have pushed since the last answer.

    Args:
      plan: the plan of the job.
      step: the single-device step for the batch of one trainer.
      init_args: arguments of the init.
    """

    def __init__(self, plan: PServerPlan, step: Program, init_args: Sequence[Any]) -> None:
        super().__init__(plan, step)
        self.tables = plan.tables.of
        self._lookups = LazyRows(self.tables, step)
        self._init_args = init_args

    def begin(self, state: Values) -> None:
        super().begin(state)
        # trace the init together with the turns, so that XLA rounds both in the same way
        first = evaluate(self.plan.startup.jaxpr, *self._init_args) if self.tables else ()
        self._init = dict(zip(self.plan.startup.out_names, first, strict=bool(first)))
        self._old = [dict(self.servers) for _ in self.trainers]
        self._steps = [0] * len(self.trainers)
        self._answers: list[Values | None] = [None] * len(self.trainers)
        self._outs: dict[int, Values] = {}  # outputs of the current step, by trainer

        # for each trainer, masks of rows by table
        none = {n: jnp.zeros(t.lookups.rows, bool) for n, t in self.tables.items()}
        empty = lambda: [dict(none) for _ in self.trainers]
        self._cached = empty()  # rows that the trainer caches
        self._unpushed = empty()  # rows that the trainer has looked up since its last push
        # cached rows that other trainers pushed after this trainer's last answer
        self._stale = empty()
        self._answered = empty()  # rows of this trainer's next answer
        for k in range(self.plan.trainers):
            for n, rows in none.items():
                start = rows_at_start(len(rows), k)
                self._cached[k][n] = rows.at[start].set(True)
            self._look_up(k, {n: ~rows for n, rows in self._cached[k].items()})

    def begin_turn(self, turn: Turn, batch: Values) -> None:
        k = turn.trainer
        touched = self._lookups.touched({**self.trainers[k], **batch})
        self._look_up(k, {n: rows & ~self._cached[k][n] for n, rows in touched.items()})
        before = self.trainers[k]
        outs = self.run({**before, **batch})
        self._outs[k] = self._lookups(outs, before, {**before, **batch})
        for n, rows in touched.items():
            self._cached[k][n] |= rows
            self._unpushed[k][n] |= rows

    def end_turn(self, turn: Turn) -> Values:
        k, trainers = turn.trainer, self.plan.trainers
        outs = self._outs[k]
        self.trainers[k] = subset(outs, self.trainers[k])
        self._pull(k)
        self._steps[k] += 1
        if self._steps[k] == local_steps(self.plan.push_every):
            local, old = self.trainers[k], self._old[k]
            deltas = {n: (local[n] - old[n]) / trainers for n in self.served}
            for n, rows in self._unpushed[k].items():
                deltas[n] = _select_rows(rows, deltas[n], jnp.zeros_like(deltas[n]))
            self.servers = {n: x + deltas[n] for n, x in self.servers.items()}
            self._old[k] = {n: old[n] + deltas[n] for n in self.served}
            self._mark_pushed(k)
            self._answers[k], self._steps[k] = self.servers, 0
            mode = self.plan.options.mode
            if isinstance(mode, Geo) and mode.block_on_pull:
                self._pull(k)
        return omit(outs, self.trainers[k])

    def cached_rows(self, trainer: int) -> dict[str, Any]:
        """Return a trainer's copies of tables and of their optimizer state, by name.

        Rows that the trainer does not store are zero, and have the initial optimizer state.
        """
        found = {}
        for table, t in self.tables.items():
            rows, local = self._cached[trainer][table], self.trainers[trainer]
            found[table] = _select_rows(rows, local[table], jnp.zeros_like(local[table]))
            for n in t.zero.state:
                found[n] = _select_rows(rows, local[n], self._init[n])
        return found

    def _look_up(self, trainer: int, masks: Mapping[str, Any]) -> None:
        """Copy rows of tables from the servers to a trainer, at the trainer's first lookup.

        Args:
          trainer: the trainer's id.
          masks: a mask of the rows to copy, by table.
        """
        local, old = self.trainers[trainer], self._old[trainer]
        for table, rows in masks.items():
            local[table] = _select_rows(rows, self.servers[table], local[table])
            old[table] = _select_rows(rows, self.servers[table], old[table])
            for n in self.tables[table].zero.state:
                local[n] = _select_rows(rows, self._init[n], local[n])

    def _mark_pushed(self, trainer: int) -> None:
        """Record the effect of a push on table rows.

        On all other trainers, the pushed rows are now out of date. The servers' answer to the push
        contains the rows that are out of date on this trainer.

        Args:
          trainer: id of the trainer that has pushed its changes.
        """
        for n, rows in self._unpushed[trainer].items():
            for k in range(self.plan.trainers):
                if k != trainer:
                    self._stale[k][n] |= rows & self._cached[k][n]
            self._unpushed[trainer][n] = jnp.zeros_like(rows)
        stale = self._stale[trainer]
        self._answered[trainer] = stale
        self._stale[trainer] = {n: jnp.zeros_like(rows) for n, rows in stale.items()}

    def _pull(self, trainer: int) -> None:
        """Apply the servers' answer to a trainer's last push, unless it has been applied already.

        Args:
          trainer: the trainer's id.
        """
        answer, self._answers[trainer] = self._answers[trainer], None
        if answer is None:
            return
        local, old, masks = self.trainers[trainer], self._old[trainer], self._answered[trainer]
        for n in self.served:
            local_new, old_new = local[n] + (answer[n] - old[n]), answer[n]
            if n in masks:
                local_new = _select_rows(masks[n], local_new, local[n])
                old_new = _select_rows(masks[n], old_new, old[n])
            local[n], old[n] = local_new, old_new
