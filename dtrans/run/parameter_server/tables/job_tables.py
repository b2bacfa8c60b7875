"""`job.tables`: reads rows of a running job's embedding tables, and evicts unused rows.

`JobTables` is the interface of every job with tables. `TrainerTables` sends requests to server
processes. `MeshTables` (`dtrans.run.parameter_server.tables.mesh_tables`) reads the arrays of a job
in one process.
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

CHUNK = 1 << 16  # number of rows of one read or write
NUMBERS = ("rows", "made", "bytes", "limit", "evicted", "step")  # columns of a report


@dataclasses.dataclass(frozen=True)
class TablesReport:
    """Rows and memory of a job's embedding tables. `print` shows the report as a table.

    Attributes:
      blocks: one `TableReport` for each block (rows of a table on one server), in the order of the
        servers.

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
    """Rows of an embedding table that have changed since a step, to update an older copy.

    A server for inference has a copy, for example. `job.tables.changed` returns this object.

    Attributes:
      step: the step after which the rows were read. Pass it as `since` to the next call.
      ids: the sorted ids of the changed rows.
      rows: the new values of these rows, of shape (len(ids), *row).
      gone: the sorted ids of the rows that were evicted since. Evicted rows have their initial
        values again.

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
    """Embedding tables of a running job, by the name of the parameter, such as `params/emb`.

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
        """Return the servers' current rows, for evaluation between steps.

        Args:
          name: name of the table.
          ids: row ids, of any shape.

        Returns:
          An array of shape (*ids.shape, *row).

        Raises:
          ConfigError: the plan has no table `name`.
          BatchError: an id is not a row of the table.
        """

    @abc.abstractmethod
    def report(self) -> TablesReport:
        """Return the number of stored rows of each table on each server, and their bytes.

        The report describes the state after this trainer's last step.

        Raises:
          ConfigError: `init` was not called.
        """

    @abc.abstractmethod
    def changed(self, name: str, since: int) -> ChangedRows:
        """Return the rows that steps after `since` have changed, to update a copy of the table.

        With `dtrans.Rows(update="dense")`, some optimizers also change rows without a gradient.
        With momentum, each step changes all rows that any earlier step has looked up. With AdamW,
        each step changes all rows. The memory of the result is proportional to the number of
        changed rows.

        Args:
          name: name of the table.
          since: a step number, counted from the start of the servers. With since=0, the result has
            all changes of this job. In later calls, pass the `step` of the last result.

        Returns:
          The changed rows. With asynchronous trainers, a row may be newer than `step`. The next
          call returns such a row again.

        Raises:
          ConfigError: the plan has no table `name`, or `init` was not called.
          PeerError: the servers have not reached the step `since`.
        """

    @abc.abstractmethod
    def evict(self, name: str, unused_for: int) -> int:
        """Free the memory of rows that received no gradient in the last `unused_for` steps.

        The servers also free the optimizer state of these rows. When an evicted row is looked up
        again, it has its initial value, bit for bit, and the initial optimizer state. So the row
        may differ from the row of a single-device run. Evicted rows do not count towards the
        table's limit.

        Synchronous trainers must all call this method with the same arguments, between the same two
        steps. Servers evict rows when all trainers have called. Asynchronous trainers call the
        method independently, and each server counts the steps of all trainers. Servers do not evict
        a row while a gradient of the row is on its way.
        """

    def export(self, name: str, path: str | os.PathLike[str]) -> None:
        """Write the servers' current rows of a table to a file, in chunks.

        The file contains one NumPy array; read it with `numpy.load(path, mmap_mode="r")`. A
        bfloat16 value is written as two bytes. The table need not fit into memory.

        Args:
          name: name of the table.
          path: the path of the file. An existing file is replaced.

        Raises:
          ConfigError: the plan has no table `name`, or the file cannot be written.
        """
        # an impossible lookup raises an error here, before the file is replaced
        self.lookup(name, np.empty(0, int))
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
        """Return the plan's description of a table.

        Raises:
          ConfigError: the plan has no table of this name.
        """
        tables = self.plan.tables.of
        if name not in tables:
            raise ConfigError(
                f"{name} is not a table of this plan; its tables are: "
                f"{', '.join(tables) or 'none'}. Read other parameters by job.params(state)"
            )
        return tables[name]

    def _gather(self, name: str, ids: Any, read: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Return rows for ids of any shape and order, by reading each different row once.

        Args:
          name: name of the table.
          ids: row ids, of any shape.
          read: function from sorted ids to their rows. It is called with one id or more.
        """
        rows, wanted = self._table(name).lookups.rows, np.asarray(ids)
        if not wanted.size:
            t = self.plan.main.inputs[name]
            return np.empty((*wanted.shape, *t.shape[1:]), t.dtype)
        uniq = unique_ids([wanted], table=name, rows=rows, size=wanted.size)
        uniq = uniq[: np.searchsorted(uniq, rows)]
        return np.asarray(read(uniq)[np.searchsorted(uniq, wanted)])


class AskServers(Protocol):
    """Function that sends all servers a request about a table, between two steps of a trainer."""

    def __call__(
        self,
        what: str,
        ask: Callable[[TrainerSteps], Operation[T]],
        skipped: Callable[[], T] | None = None,
    ) -> T:
        """Send the request, and return the servers' answer.

        Args:
          what: name of the request, for errors.
          ask: function that starts the request.
          skipped: only for an eviction: returns its result if a process fails during the request.
            The job then goes back to a snapshot. Either the snapshot contains the
            eviction, or a repeated step requests it again.
        """


class TrainerTables(JobTables):
    """Embedding tables of a job in processes: a trainer asks the server processes.

    Args:
      plan: the job's plan.
      look_up: function that returns the servers' current rows. Its arguments are the table's name
        and sorted ids.
      ask: function that sends servers a request between two steps.
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
        blocks = [b for b in self.plan.placement.all_blocks if b.leaf in self.plan.tables.of]
        servers = list(dict.fromkeys(b.endpoint for b in blocks))
        found = self._ask("tables", lambda to: to.tables(servers))
        return TablesReport(tuple(found))

    def changed(self, name: str, since: int) -> ChangedRows:
        blocks = self._blocks(name)
        check_int("since", since, "a step", least=0)
        found = self._ask(f"changes of {name}", lambda to: to.changed(blocks, since))

        steps, changed_ids, gone_ids = zip(*found, strict=True)
        ids = self._ids_in_table(name, changed_ids)
        gone = self._ids_in_table(name, gone_ids)
        t = self.plan.main.inputs[name]
        rows = np.empty((len(ids), *t.shape[1:]), t.dtype)
        for at in range(0, len(ids), CHUNK):
            rows[at : at + CHUNK] = self.lookup(name, ids[at : at + CHUNK])
        return ChangedRows(min(steps), ids, rows, gone)

    def evict(self, name: str, unused_for: int) -> int:
        blocks = self._blocks(name)
        check_int("unused_for", unused_for, "a number of steps", least=1)
        self._check_eviction(name)
        ask = lambda to: to.evict(blocks, unused_for)
        return self._ask(f"rows of {name}", ask, skipped=lambda: 0)

    def _check_eviction(self, name: str) -> None:
        """Raise ConfigError if rows of a table cannot be evicted."""
        table = self._table(name)
        if table.on_trainers:
            raise ConfigError(
                f"rows of {name} cannot be evicted, because GEO-SGD trainers keep copies of the "
                "rows that they have looked up; use mode=dtrans.Async()"
            )
        if table.updates_all or (table.changes_unread_rows and table.zero.initial_values is None):
            raise ConfigError(
                f"rows of {name} cannot be evicted, because its update also changes rows before "
                f"their first lookup ({table.why}); use dtrans.Rows(update='lazy')"
            )

    def _blocks(self, name: str) -> list[tuple[str, str]]:
        """Return (endpoint, name) of each server's rows of a table."""
        self._table(name)
        return [(b.endpoint, b.name) for b in self.plan.placement.blocks[name]]

    def _ids_in_table(self, name: str, places: Sequence[np.ndarray]) -> np.ndarray:
        """Convert ids of rows on each server to sorted ids in the table.

        Args:
          name: name of the table.
          places: for each server with rows of the table, ids that count only these rows.
        """
        found = []
        for b, there in zip(self.plan.placement.blocks[name], places, strict=True):
            assert b.span is not None
            found.append(b.span.in_leaf(there))
        return np.sort(np.concatenate(found))
