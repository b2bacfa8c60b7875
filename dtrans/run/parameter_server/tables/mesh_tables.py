"""Tables on a mesh: what is done between the pieces of a trainer's program that looks up rows.

    split_ids     the numbers of rows that each trainer looks up, unique and sorted; on the host, where they are checked
    prefetch      the device of each server takes the rows that a trainer asks for; they go by the host
    send_rows     the gradients of these rows to the host, from where the update of a server puts them together

A table is on the device of its server, and nowhere else. Trainers get rows of a static size
(`TableLookups.size`), as between processes.

Where a step is traced (`plan.verify()`), numbers of rows are not known. Then each of these is an
equation that calls the same functions (`dtrans.run.parameter_server.tables.traced_tables`), and an
update has room for all rows that trainers may look up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from dtrans._jax import JaxprEqn, is_traced
from dtrans.errors import ConfigError, StateError
from dtrans.ops.moved_rows import trace_move
from dtrans.parameter_server.plan import PServerPlan
from dtrans.parameter_server.state import MeshState
from dtrans.protocol.served import RowGradient
from dtrans.protocol.tables.table_rows import unique_ids
from dtrans.run.parameter_server.tables.job_tables import JobTables
from dtrans.run.parameter_server.tables.row_updates import fetched
from dtrans.run.parameter_server.tables.traced_tables import part_of_block


Servers = Mapping[str, Mapping[str, Any]]


class MeshTables(JobTables):
    """Tables of a job in one process, where a state has every row.

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
                f"nothing keeps a state of this job: job.tables.lookup({name!r}, ids, state)"
            )
        self._check(state)
        servers = state.servers

        def read(uniq: np.ndarray) -> np.ndarray:
            row = self.plan.main.inputs[name]
            return rows_from(
                self.plan, name, uniq, np.empty((len(uniq), *row.shape[1:]), row.dtype), servers
            )

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
    """The numbers of the rows that each trainer looks up.

    Args:
      ids: of each trainer, the operands.

    Raises:
      BatchError: a number of a row that the table does not have.
    """
    several = len(ids) > 1
    whose = lambda k: f" of trainer {k}'s part" if several else ""
    found = []
    for k, mine in enumerate(ids):
        fn = lambda numbers, k=k: unique_ids(numbers, **eqn.params, whose=whose(k))
        if any(map(is_traced, mine)):
            types = [((eqn.params["size"],), np.int32)]
            found += trace_move(lambda numbers, _, fn=fn: [fn(numbers)], mine, (), types)  # type: ignore[misc]
        else:
            found.append(fn(mine))
    return found


def prefetched(
    plan: PServerPlan, eqn: JaxprEqn, ids: Sequence[np.ndarray], servers: Servers
) -> list[np.ndarray]:
    """The rows that each trainer asks for, and zeros behind them."""
    (t,), table = eqn.params["types"], eqn.params["table"]
    blocks = plan.placement.blocks[table]
    held = [servers[b.endpoint][b.name] for b in blocks]
    if not any(map(is_traced, (*ids, *held))):
        return [rows_from(plan, table, mine, np.zeros(t.shape, t.dtype), servers) for mine in ids]

    def fetch(numbers: Sequence[Any], rows: Sequence[Any]) -> list[np.ndarray]:
        there: dict[str, dict[str, Any]] = {}
        for b, x in zip(blocks, rows, strict=True):
            there.setdefault(b.endpoint, {})[b.name] = x
        return [rows_from(plan, table, numbers[0], np.zeros(t.shape, np.int64), there)]

    return [x for mine in ids for x in trace_move(fetch, [mine], held, [(t.shape, t.dtype)])]


def rows_from(
    plan: PServerPlan, table: str, ids: np.ndarray, rows: np.ndarray, servers: Servers
) -> np.ndarray:
    """Write the rows of a table with these numbers, which increase, into `rows`, and return
    that."""
    blocks = plan.placement.blocks[table]
    for b in blocks:
        assert b.span is not None
        at = b.span.among(ids)
        if len(mine := ids[at]):
            rows[at] = fetched(servers[b.endpoint][b.name], b.span.local(mine))
    return rows


def sent_rows(
    plan: PServerPlan, eqn: JaxprEqn, ids: Sequence[np.ndarray], gradients: Sequence[np.ndarray]
) -> dict[str, dict[str, RowGradient]]:
    """What each server is sent, by the name under which a trainer sends it.

    Args:
      ids, gradients: of each trainer.
    """
    sent: dict[str, dict[str, RowGradient]] = {}
    blocks = plan.placement.blocks[eqn.params["table"]]
    for k, (mine, gradient) in enumerate(zip(ids, gradients, strict=True)):
        for b in blocks:
            assert b.span is not None
            part = part_of_block(b.span, RowGradient(mine, gradient))
            sent.setdefault(b.endpoint, {})[b.gradient(k, plan.trainers)] = part
    return sent
