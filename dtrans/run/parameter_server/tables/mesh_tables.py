"""Tables on a mesh: lookups between the pieces of a trainer's program.

    split_ids   the unique ids that each trainer looks up, sorted and checked, on the host
    prefetch    rows from the devices of their servers, through the host
    send_rows   gradients of rows to the host, where the update of a server merges them

A table is on its server's device only. Trainers get a static number of rows
(`TableLookups.size`), as between processes.

In a traced step (`plan.verify()`) ids are not known. Each of these becomes an equation that calls
the same function (`dtrans.run.parameter_server.tables.traced_tables`), and updates have room for
all rows that trainers may look up.
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
    """Tables of a job in one process. Its states have every row.

    Args:
      plan: the job's plan.
      newest: returns the state that `init` or `step` returned last, None if it is gone.
      check: raises StateError for a state of another job, or one whose arrays were donated.
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
          name: the table.
          ids: row ids, of any shape.
          state: a state of the job; by default the one that `init` or `step` returned last.

        Returns:
          An array of shape (*ids.shape, *row).

        Raises:
          ConfigError: `name` is no table. BatchError: an id that the table does not have.
          StateError: a state of another job, or no state is left.
        """
        state = self._newest() if state is None else state
        if state is None:
            raise StateError(
                f"no state of this job is alive; pass one: job.tables.lookup({name!r}, ids, state)"
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
            f"job.tables.{call} needs servers in processes of their own, and this job is one "
            "process, which makes all rows at the start; run it with plan.on_cluster()"
        )


def split_ids(eqn: JaxprEqn, ids: Sequence[Sequence[Any]]) -> list[np.ndarray]:
    """Return the unique ids of the rows that each trainer looks up.

    Args:
      eqn: the `split_ids`.
      ids: for each trainer, the operands.

    Raises:
      BatchError: an id that the table does not have.
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
    """Return the rows that each trainer looks up, padded with zeros.

    Args:
      plan: the job's plan.
      eqn: the `prefetch`.
      ids: for each trainer, increasing ids.
      servers: endpoint to the server's state.
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
        # `rows` are positions of rows: the equation moves rows of any type
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
    """Write rows of a table into `rows`; return that.

    Args:
      plan: the job's plan.
      table: the table.
      ids: increasing ids.
      rows: memory, with at least a row for each id.
      servers: endpoint to the server's state.
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
    """Return the gradients of rows for each server, by the names under which trainers send them.

    Args:
      plan: the job's plan.
      eqn: the `send_rows`.
      ids: for each trainer, the ids of its rows.
      gradients: for each trainer, the gradients of these rows.
    """
    sent: dict[str, dict[str, RowGradient]] = {}
    blocks = plan.placement.blocks[eqn.params["table"]]
    for k, (some, gradient) in enumerate(zip(ids, gradients, strict=True)):
        for b in blocks:
            assert b.span is not None
            part = part_of_block(b.span, RowGradient(some, gradient))
            sent.setdefault(b.endpoint, {})[b.gradient(k, plan.trainers)] = part
    return sent
