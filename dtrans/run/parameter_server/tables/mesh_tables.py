"""Embedding tables of a job in one process: lookups between the pieces of a trainer's program.

    split_ids   checks the ids that each trainer looks up; makes them unique and sorted, on the host
    prefetch    copies rows from the devices of their servers to the trainers, through the host
    send_rows   copies gradients of rows to the host, where a server's update merges them

A table's rows are on the devices of their servers. Trainers get a static number of rows
(`TableLookups.size`), as in jobs of processes.

In a traced step (`plan.verify()`), ids are not known. Each of these functions is then traced as an
equation, which calls the function later (`dtrans.run.parameter_server.tables.traced_tables`). An
update has the largest number of rows that trainers can look up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from dtrans._jax import JaxprEqn, is_traced
from dtrans.errors import ConfigError, StateError
from dtrans.ops.moved_rows import trace_move
from dtrans.parameter_server.plan import PServerPlan
from dtrans.parameter_server.state import MeshState
from dtrans.protocol.server_blocks import RowGradient
from dtrans.protocol.tables.table_rows import unique_ids
from dtrans.run.parameter_server.tables.job_tables import JobTables
from dtrans.run.parameter_server.tables.row_updates import read_rows
from dtrans.run.parameter_server.tables.traced_tables import part_of_block


Servers = Mapping[str, Mapping[str, Any]]


class MeshTables(JobTables):
    """Embedding tables of a job in one process; the job's states contain all rows.

    Args:
      plan: the job's plan.
      newest: function that returns the last state of `init` or `step`; None if the caller has
        deleted this state.
      check: function that raises StateError for a state of another job, or for a state with donated
        arrays.
    """

    def __init__(
        self,
        plan: PServerPlan,
        newest: Callable[[], MeshState | None],
        check: Callable[[Any], None],
    ) -> None:
        super().__init__(plan)
        self._newest, self._check = newest, check

    def lookup(self, name: str, ids: Any, state: MeshState | None = None) -> np.ndarray:
        """Return rows of a state, for evaluation.

        Args:
          name: name of the table.
          ids: row ids, of any shape.
          state: a state of the job; by default the last state of `init` or `step`.

        Returns:
          An array of shape (*ids.shape, *row).

        Raises:
          ConfigError: the plan has no table `name`.
          BatchError: an id is not a row of the table.
          StateError: `state` belongs to another job. Or there is no argument `state`, and the
            caller has deleted the last state.
        """
        if state is None:
            state = self._newest()
        if state is None:
            raise StateError(
                "the last state of this job was deleted; pass a state: "
                f"job.tables.lookup({name!r}, ids, state)"
            )
        self._check(state)
        servers = state.servers

        def read(uniq: np.ndarray) -> np.ndarray:
            t = self.plan.main.inputs[name]
            memory = np.empty((len(uniq), *t.shape[1:]), t.dtype)
            return rows_from(self.plan, name, uniq, memory, servers)

        return self._gather(name, ids, read)

    def report(self) -> NoReturn:
        self._refuse("report()")

    def changed(self, name: str, since: int) -> NoReturn:
        self._refuse(f"changed({name!r}, ...)")

    def evict(self, name: str, unused_for: int) -> NoReturn:
        self._refuse(f"evict({name!r}, ...)")

    def _refuse(self, call: str) -> NoReturn:
        raise ConfigError(
            f"job.tables.{call} needs server processes, but this job runs in one process, where "
            "all rows exist from the start; run the plan by plan.on_cluster()"
        )


def split_ids(eqn: JaxprEqn, ids: Sequence[Sequence[Any]]) -> list[np.ndarray]:
    """Return the sorted unique ids of the rows that each trainer looks up.

    Args:
      eqn: the `split_ids` equation.
      ids: the equation's operands of each trainer.

    Raises:
      BatchError: the table has no row with one of the ids.
    """
    found = []
    for k, operands in enumerate(ids):
        whose = f" of trainer {k}'s part" if len(ids) > 1 else ""
        unique = functools.partial(_unique_ids, eqn, whose)
        if any(map(is_traced, operands)):
            found += trace_move(unique, operands, (), [((eqn.params["size"],), np.int32)])
        else:
            found += unique(operands, ())
    return found


def _unique_ids(
    eqn: JaxprEqn, whose: str, ids: Sequence[Any], _: Sequence[Any]
) -> list[np.ndarray]:
    return [unique_ids(ids, **eqn.params, whose=whose)]


def prefetched(
    plan: PServerPlan, eqn: JaxprEqn, ids: Sequence[np.ndarray], servers: Servers
) -> list[np.ndarray]:
    """Return the table rows that each trainer looks up in a step, padded with zeros.

    Args:
      plan: the job's plan.
      eqn: the `prefetch` equation.
      ids: sorted ids of each trainer's rows.
      servers: the state of each server, by endpoint.
    """
    (t,), table = eqn.params["types"], eqn.params["table"]
    blocks = plan.placement.blocks[table]
    arrays = [servers[b.endpoint][b.name] for b in blocks]
    found: list[np.ndarray] = []
    if not any(map(is_traced, (*ids, *arrays))):
        for some in ids:
            found.append(rows_from(plan, table, some, np.zeros(t.shape, t.dtype), servers))
        return found

    def fetch(numbers: Sequence[Any], rows: Sequence[Any]) -> list[np.ndarray]:
        # `trace_move` passes indices of rows in place of rows, so that rows may have any type.
        positions: dict[str, dict[str, Any]] = {}
        for b, x in zip(blocks, rows, strict=True):
            positions.setdefault(b.endpoint, {})[b.name] = x
        return [rows_from(plan, table, numbers[0], np.zeros(t.shape, np.int64), positions)]

    for some in ids:
        found += trace_move(fetch, [some], arrays, [(t.shape, t.dtype)])
    return found


def rows_from(
    plan: PServerPlan, table: str, ids: np.ndarray, rows: np.ndarray, servers: Servers
) -> np.ndarray:
    """Copy rows of a table from the servers' state into `rows`; return `rows`.

    Args:
      plan: the job's plan.
      table: name of the table.
      ids: sorted ids of the rows.
      rows: an array with at least len(ids) rows.
      servers: maps the endpoint of each server to its state.
    """
    for b in plan.placement.blocks[table]:
        assert b.span is not None
        at = b.span.among(ids)
        if len(some := ids[at]):
            rows[at] = read_rows(servers[b.endpoint][b.name], b.span.local(some))
    return rows


def sent_rows(
    plan: PServerPlan, eqn: JaxprEqn, ids: Sequence[np.ndarray], gradients: Sequence[np.ndarray]
) -> dict[str, dict[str, RowGradient]]:
    """Divide the trainers' gradients of table rows among the servers that store the rows.

    Args:
      plan: the job's plan.
      eqn: the `send_rows` equation.
      ids: ids of each trainer's rows.
      gradients: gradients of each trainer's rows.

    Returns:
      The gradients for each server, by the server's endpoint and by name.
    """
    sent: dict[str, dict[str, RowGradient]] = {}
    blocks = plan.placement.blocks[eqn.params["table"]]
    for k, (some, gradient) in enumerate(zip(ids, gradients, strict=True)):
        for b in blocks:
            assert b.span is not None
            part = part_of_block(b.span, RowGradient(some, gradient))
            sent.setdefault(b.endpoint, {})[b.gradient(k, plan.trainers)] = part
    return sent
