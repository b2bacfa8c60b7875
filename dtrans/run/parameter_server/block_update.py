"""A server's optimize blocks, one by one: what an asynchronous server does with a gradient that has
come.

The lr_sched block is run once for each step of a trainer, and every other block when its gradients
are there, on the state as it is then; one of a table on the rows that the gradient is of.
`dtrans.run.parameter_server.update` is the same for all blocks at once.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dtrans._jax import evaluate, is_traced
from dtrans.errors import ConfigError
from dtrans.ir.display import without_addresses
from dtrans.ir.program import DIST, LR_SCHED
from dtrans.ops import BACKUP, OptimizeBlock
from dtrans.run.parameter_server.tables.server_tables import ServerTables
from dtrans.run.parameter_server.tables.table_memory import memory_of
from dtrans.run.parameter_server.tables.traced_tables import gradients_with_room
from dtrans.run.parameter_server.update import ServerUpdate


State = Mapping[str, Any]


class BlockUpdates:
    """The blocks of a server, each jitted by itself.

    Args:
      update: of the server.
      state: name to array; the initial values.
      memory: by name, blocks of tables that an update changes a few rows of, as `TableMemory` has
        them; by default in memory of their own.

    Attributes:
      grads: the gradients that each block reads, by its name.
      state: the same, with tables in memory of their own.
      held: what there is of tables.
      spent: the state whose memory an update gives to the new one, by name.
      before: called before each update of a block.

    Raises:
      ConfigError: blocks that reduce over rows with other servers, which takes the gradients of all
        at once.
    """

    def __init__(
        self, update: ServerUpdate, state: State, memory: Mapping[str, Any] | None = None
    ) -> None:
        self.update = update
        self._memory = memory_of(update, state) if memory is None else memory
        self._whole_updates = collections.Counter[
            str
        ]()  # of tables each of whose updates is of all rows
        steps = lambda name: self._whole_updates[name]
        self.held = ServerTables(
            update.endpoint, update.tables, self._memory, lambda: self.state, steps
        )
        self.state = {**state, **{n: x for t in self._memory.values() for n, x in t.held.items()}}
        if any(b.level or b.role == DIST for b in update.blocks):
            raise ConfigError(
                f"pserver {update.endpoint} reduces over rows, and cannot be asynchronous"
            )
        self._first = [b for b in update.blocks if b.role == LR_SCHED]
        self._blocks = {b.name: b for b in update.blocks if b.role != LR_SCHED}
        self.grads = {name: [g.name for g in b.grads] for name, b in self._blocks.items()}
        # what the lr_sched block replaces is read by the others as it was before the step
        self._replaced = {n for b in self._first for n in b.out_names if n in update.types}
        readers = collections.Counter(n for b in update.blocks for n in b.in_names)
        params = set(update.params)
        # what a block makes anew, and nobody else has a use for
        self._spent = {
            name: [
                n for n in b.in_names if n in b.out_names and readers[n] == 1 and n not in params
            ]
            for name, b in self._blocks.items()
        }
        self.spent = frozenset(n for names in self._spent.values() for n in names)
        self.before: Callable[[], object] = lambda: None
        self._tables = {n: t for t in update.tables.values() for n in t.gradients.values()}
        self._sized: dict[
            tuple[str, int], Callable[[State, State], dict[str, Any]]
        ] = {}  # by block and rows
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._jitted = {b.name: self._compile(b) for b in update.blocks}

    def begin(self, state: State) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin a step of a trainer: the state that is new, and the values that blocks of this step
        read."""
        values = {n: state[n] for n in self._replaced}
        new: dict[str, Any] = {}
        for block in self._first:
            made = self._jitted[block.name](_picked(block.in_names, values, state), {})
            new |= {n: x for n, x in made.items() if n in self.update.types}
            values |= {n: x for n, x in made.items() if n not in self.update.types}
        return new, values

    def ready(self, arrived: Collection[str], used: Collection[str]) -> list[str]:
        """The blocks whose gradients have all come, and that were not updated with them yet.

        One that reads no gradient is ready with the first of the others.
        """
        if not arrived:
            return []
        return [
            b
            for b, grads in self.grads.items()
            if b not in used and all(n in arrived for n in grads)
        ]

    def apply(self, block: str, grads: State, state: State, values: State) -> dict[str, Any]:
        """The state that is new after a block's update. What it alone reads of the state may be
        gone.

        Waits until it is computed: the memory of gradients is written again with the next step.
        """
        self.before()
        run = self._jitted[block]
        rows = next((n for n in self.grads[block] if n in self._tables), None)
        if rows is None:
            return self._made(block, run, grads, state, values)
        table = self._tables[rows]
        given = {n: grads[n] for n in (rows, table.name + BACKUP) if n in grads}
        ids, laid_out = gradients_with_room(table, given)
        if table.updates_all:
            self._whole_updates[table.name] += 1
            return self._made(block, run, {**grads, **laid_out}, state, values)
        memory, size = self._memory[table.name], len(laid_out[rows])
        if (block, size) not in self._sized:
            (sized,) = (b for b in self.update.sized({table.name: size}).blocks if b.name == block)
            self._sized[block, size] = self._compile(sized)
        read = {**state, **memory.take(ids, size)}
        read_beside = _picked(memory.reads, values, state)
        seen = {n: x if is_traced(x) else np.asarray(x) for n, x in read_beside.items()}
        made = self._made(block, self._sized[block, size], {**grads, **laid_out}, read, values)
        return {**made, **memory.put(ids, made, seen)}

    def rows(self, name: str, ids: np.ndarray, state: State, *, train: bool) -> np.ndarray:
        """Rows of a block of a table, as they are."""
        return (
            self._memory[name].rows(ids, train=train)
            if name in self._memory
            else np.asarray(state[name])[ids]
        )

    def tables(self) -> dict[str, Any]:
        """Blocks of tables, and their state, as after the last update."""
        return {n: x for t in self._memory.values() for n, x in t.final().items()}

    def snapshot(self, patience: float) -> dict[str, Any]:
        """The same, for a thread that reads them while updates go on (`TableMemory.snapshot`)."""
        return {n: x for t in self._memory.values() for n, x in t.snapshot(patience).items()}

    def _made(
        self,
        block: str,
        run: Callable[[State, State], dict[str, Any]],
        grads: State,
        state: State,
        values: State,
    ) -> dict[str, Any]:
        names = self._blocks[block].in_names
        spent = {n: state[n] for n in self._spent[block]}
        return jax.block_until_ready(
            run(_picked([n for n in names if n not in spent], grads, values, state), spent)
        )

    def _compile(self, block: OptimizeBlock) -> Callable[[State, State], dict[str, Any]]:
        """A block as a function of what it reads: what others may still read, and what nobody will.

        Blocks of one kind and shape are compiled once: they differ in names only.
        """
        spent = self._spent.get(block.name, [])
        given = [n for n in block.in_names if n not in spent]
        order = [(n in spent, (spent if n in spent else given).index(n)) for n in block.in_names]
        kind = (without_addresses(str(block.inner)), tuple(order))
        key = kind if not block.jaxpr.consts else id(block)
        if key not in self._compiled:

            def run(read: Sequence[Any], lost: Sequence[Any]) -> Sequence[Any]:
                made: Sequence[Any] = evaluate(
                    block.jaxpr, *((lost if own else read)[i] for own, i in order)
                )
                return made

            self._compiled[key] = jax.jit(run, donate_argnums=1)
        jitted = self._compiled[key]

        def named(read: State, lost: State) -> dict[str, Any]:
            outs = jitted([read[n] for n in given], [lost[n] for n in spent])
            return dict(zip(block.out_names, outs, strict=True))

        return named


def _picked(names: Collection[str], *where: State) -> dict[str, Any]:
    """Values by name, each from the first that has it."""
    return {n: next(of for of in where if n in of)[n] for n in names}
