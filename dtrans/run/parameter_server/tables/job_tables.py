"""`job.tables`: rows of a running job's tables, read, exported, evicted and listed as changed.

`JobTables` is the interface of every job. `TrainerTables` asks servers in processes of their own;
`dtrans.run.parameter_server.tables.mesh_tables` reads the arrays of a job in one process.
"""

from __future__ import annotations

import abc
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from dtrans.checks import check_int
from dtrans.errors import ConfigError
from dtrans.ir.display import plan_text
from dtrans.parameter_server.plan import PServerPlan
from dtrans.parameter_server.tables.choose import Table
from dtrans.protocol.tables.stored_tables import TableReport
from dtrans.protocol.tables.table_rows import unique_ids
from dtrans.protocol.trainer.operation import Operation
from dtrans.protocol.trainer.trainer_steps import TrainerSteps


T = TypeVar("T")

CHUNK = 1 << 16  # rows that are read or written at once
NUMBERS = ("rows", "made", "bytes", "limit", "evicted", "step")  # columns of a report


@dataclasses.dataclass(frozen=True)
class TablesReport:
    """Report of a job's tables, one record for each block; it prints as a table.

    Attributes:
      blocks: one `TableReport` for each block, in the order of servers.

    Example:
      >>> import dtrans
      >>> from dtrans.protocol.tables.stored_tables import TableReport
      >>> block = TableReport("params/emb", "127.0.0.1:6174", 1000, 2, 48, None, 3, 9)
      >>> print(dtrans.TablesReport((block,)))
      tables
        block       endpoint         rows  made  bytes  limit  evicted  step
        params/emb  127.0.0.1:6174  1,000     2     48   none        3     9
    """

    blocks: tuple[TableReport, ...]

    def __iter__(self) -> Iterator[TableReport]:
        return iter(self.blocks)

    def __str__(self) -> str:
        rows = []
        for x in self.blocks:
            numbers = (x.rows, x.created, x.bytes, x.limit, x.evicted, x.step)
            columns = ["none" if n is None else f"{n:,}" for n in numbers]
            rows.append((x.name, x.endpoint, *columns))
        return plan_text("tables", ("block", "endpoint", *NUMBERS), rows, (), right=range(2, 8))


@dataclasses.dataclass(frozen=True, eq=False)
class ChangedRows:
    """Rows of a table that have changed since a step: the difference to an older copy.

    Attributes:
      step: the step of these rows; the `since` of the next call.
      ids: the ids of the rows, increasing.
      rows: the row of each id, of shape (len(ids), *row).
      gone: ids of rows that were evicted since, increasing. They have their initial values again.

    Example:
      >>> import numpy as np, dtrans
      >>> copy = np.zeros((4, 2))
      >>> changes = dtrans.ChangedRows(7, np.array([1, 3]), np.ones((2, 2)), np.array([0]))
      >>> copy[changes.ids] = changes.rows
      >>> copy[:, 0].tolist()
      [0.0, 1.0, 0.0, 1.0]
    """

    step: int
    ids: np.ndarray
    rows: np.ndarray
    gone: np.ndarray


class JobTables(abc.ABC):
    """Tables of a running job. A table goes by the name of its leaf: `params/emb`.

    Args:
      plan: the job's plan.

    Example:
      >>> import jax, jax.numpy as jnp, optax, dtrans
      >>> tx = optax.sgd(0.5)
      >>> step = dtrans.make_train_step(lambda params, ids: params["emb"][ids].sum(), tx)
      >>> init = lambda: (p := {"emb": jnp.arange(6.0).reshape(3, 2)}, tx.init(p))
      >>> traced = dtrans.trace(step, *init(), jnp.array([0, 1])), dtrans.trace(init)
      >>> plan = dtrans.pserver(*traced, trainers=1, sparse={"params/emb": dtrans.Rows("dense")})
      >>> job = plan.simulate()
      >>> state = job.init()
      >>> job.tables.lookup("params/emb", [[2, 0]]).tolist()
      [[[4.0, 5.0], [0.0, 1.0]]]
    """

    def __init__(self, plan: PServerPlan) -> None:
        self.plan = plan

    @abc.abstractmethod
    def lookup(self, name: str, ids: Any) -> np.ndarray:
        """Return rows as the servers hold them, for evaluation. It is no part of a step.

        Args:
          name: the table.
          ids: row ids, of any shape.

        Returns:
          An array of shape (*ids.shape, *row).

        Raises:
          ConfigError: `name` is no table. BatchError: an id that the table does not have.
        """

    @abc.abstractmethod
    def report(self) -> TablesReport:
        """Return the number of rows that servers hold, and their bytes, after this trainer's last
        step.

        Raises:
          ConfigError: before `init`.
        """

    @abc.abstractmethod
    def changed(self, name: str, since: int) -> ChangedRows:
        """Return the rows that steps after `since` have changed, to update a copy that serves.

        Some updates move rows that no step looks up, as `dtrans.Rows(update="dense")` with
        momentum. There every step changes all rows that any step has looked up; with AdamW, all
        rows. The result takes memory in proportion to its rows.

        Args:
          name: the table.
          since: a step, counted from the start of the servers. 0 returns all changes of this job;
            the next call takes the `step` of the last result.

        Returns:
          The changed rows. With asynchronous trainers they may be newer than their `step`, and come
          again with the next call.

        Raises:
          ConfigError: `name` is no table, or before `init`. PeerError: a step that the servers have
            not reached.
        """

    @abc.abstractmethod
    def evict(self, name: str, unused_for: int) -> int:
        """Evict the rows that the last `unused_for` steps have not updated, with their optimizer
        state.

        An evicted row that is looked up again has its initial value, bit for bit, and the initial
        optimizer state: it then differs from a single-device row. It counts towards no limit.

        All synchronous trainers call it, with the same arguments, between the same two steps:
        servers evict when all have asked. Asynchronous trainers call it independently, and each
        server counts the steps of all trainers. A row that a trainer has looked up then stays
        until its gradient arrives.

        Args:
          name: the table.
          unused_for: a number of steps. A job that continues from a checkpoint counts on from the
            checkpoint's job.

        Returns:
          The number of evicted rows, over all servers.

        Raises:
          ConfigError: `name` is no table, its update moves rows that no step has looked up, or
            before `init`. PeerError: a server cannot initialize rows again, or a trainer continues
            without the call.
        """

    def export(self, name: str, path: str | os.PathLike[str]) -> None:
        """Write a table as the servers hold it to a file, some rows at a time.

        The file is one NumPy array, which `numpy.load(path, mmap_mode="r")` reads. bfloat16 is
        written as two bytes. The table need not fit into memory.

        Args:
          name: the table.
          path: the file; an existing one is replaced.

        Raises:
          ConfigError: `name` is no table, or the file cannot be written.
        """
        self.lookup(name, np.empty(0, int))  # an error leaves the file as it is
        t = self.plan.main.inputs[name]
        try:
            file = np.lib.format.open_memmap(path, "w+", dtype=t.dtype, shape=t.shape)
        except OSError as e:
            raise ConfigError(f"{name} cannot be written to {os.fspath(path)}: {e.strerror}") from e
        for start in range(0, t.shape[0], CHUNK):
            ids = np.arange(start, min(start + CHUNK, t.shape[0]))
            file[ids] = self.lookup(name, ids)
        file.flush()

    def _table(self, name: str) -> Table:
        """Return a table of the plan.

        Raises:
          ConfigError: the plan has no table of this name.
        """
        tables = self.plan.tables.of
        if name not in tables:
            raise ConfigError(
                f"{name} is no table of this plan; they are: {', '.join(tables) or 'none'}. "
                "job.params(state) has the others"
            )
        return tables[name]

    def _gather(self, name: str, ids: Any, read: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Return rows by ids of any shape and order.

        Args:
          name: the table.
          ids: row ids.
          read: returns rows by increasing ids; at least one.
        """
        rows, wanted = self._table(name).lookups.rows, np.asarray(ids)
        if not wanted.size:
            t = self.plan.main.inputs[name]
            return np.empty((*wanted.shape, *t.shape[1:]), t.dtype)
        uniq = unique_ids([wanted], table=name, rows=rows, size=wanted.size)
        uniq = uniq[: np.searchsorted(uniq, rows)]
        return np.asarray(read(uniq)[np.searchsorted(uniq, wanted)])


class AskServers(Protocol):
    """Function that sends servers a request between two steps (`Executor.between_steps`)."""

    def __call__(self, what: str, ask: Callable[[TrainerSteps], Operation[T]]) -> T:
        """Return the servers' answer; `what` describes the request for an error."""


class TrainerTables(JobTables):
    """Tables of a trainer whose servers are processes.

    Args:
      plan: the job's plan.
      look_up: returns rows of a table by increasing ids, as the servers hold them.
      ask: sends servers a request between two steps.
    """

    def __init__(
        self,
        plan: PServerPlan,
        look_up: Callable[[str, np.ndarray], np.ndarray],
        ask: AskServers,
    ) -> None:
        super().__init__(plan)
        self._look_up, self._ask = look_up, ask

    def lookup(self, name: str, ids: Any) -> np.ndarray:
        return self._gather(name, ids, lambda uniq: self._look_up(name, uniq))

    def report(self) -> TablesReport:
        blocks = [b for b in self.plan.placement.table if b.leaf in self.plan.tables.of]
        servers = list(dict.fromkeys(b.endpoint for b in blocks))
        found = self._ask("tables", lambda to: to.tables(servers))
        return TablesReport(tuple(found))

    def changed(self, name: str, since: int) -> ChangedRows:
        blocks = self._blocks(name)
        check_int("since", since, "a step", least=0)
        found = self._ask(f"changes of {name}", lambda to: to.changed(blocks, since))

        ids = self._ids_in_table(name, [x[1] for x in found])
        gone = self._ids_in_table(name, [x[2] for x in found])
        t = self.plan.main.inputs[name]
        rows = np.empty((len(ids), *t.shape[1:]), t.dtype)
        for at in range(0, len(ids), CHUNK):
            rows[at : at + CHUNK] = self.lookup(name, ids[at : at + CHUNK])
        return ChangedRows(min(x[0] for x in found), ids, rows, gone)

    def evict(self, name: str, unused_for: int) -> int:
        blocks = self._blocks(name)
        check_int("unused_for", unused_for, "a number of steps", least=1)
        self._check_eviction(name)
        return self._ask(f"rows of {name}", lambda to: to.evict(blocks, unused_for))

    def _check_eviction(self, name: str) -> None:
        """Raise ConfigError for a table whose rows cannot be evicted."""
        table = self._table(name)
        if table.on_trainers:
            raise ConfigError(
                f"rows of {name} cannot be evicted: GEO-SGD trainers keep copies of the rows that "
                "they have looked up, and push changes to them; use mode=dtrans.Async()"
            )
        if table.updates_all or (table.catches_up and table.zero.rests is None):
            raise ConfigError(
                f"rows of {name} cannot be evicted: its update also moves rows before their first "
                f"lookup ({table.why}); use dtrans.Rows(update='lazy')"
            )

    def _blocks(self, name: str) -> list[tuple[str, str]]:
        """Return the server and the name of each block of a table."""
        self._table(name)
        return [(b.endpoint, b.name) for b in self.plan.placement.blocks[name]]

    def _ids_in_table(self, name: str, places: Sequence[np.ndarray]) -> np.ndarray:
        """Return the increasing ids of rows, from their places in each block."""
        found = []
        for b, there in zip(self.plan.placement.blocks[name], places, strict=True):
            assert b.span is not None
            found.append(b.span.in_leaf(there))
        return np.sort(np.concatenate(found))
