"""Communication that a trainer's steps leave to something beside them: a communicator, or GEO-SGD.

    send, recv     with a `communicator`: into its queue, and from what it received last
    prefetch       with one: rows of a table, which it asks for at once
    send_rows      with one: into its queue, with the numbers of these rows
    fetch_barrier  with one: a step that receives no parameters has sent all
    send_barrier   after such: until all is sent, and what was made of it received
    send           of GEO-SGD (`geo_send_p`)
    prefetch       of GEO-SGD: rows that the trainer keeps; it asks servers for those that it does not have
    fake_init      of GEO-SGD: the trainer keeps no row yet

The connections belong to the communicator from the first such equation on, until `rest`, which
whoever uses them in another way calls first.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from dtrans._jax import JaxprEqn
from dtrans.errors import StateError
from dtrans.ir.program import Program
from dtrans.ops import (
    DELTA,
    CommunicatorConfig,
    fetch_barrier_p,
    geo_init_p,
    geo_prefetch_p,
    geo_send_p,
    prefetch_p,
    recv_p,
    send_barrier_p,
    send_p,
    send_rows_p,
)
from dtrans.protocol.buffers import BufferPool
from dtrans.protocol.operation import Operation
from dtrans.protocol.served import RowGradient
from dtrans.protocol.tables.kept_rows import KeptRows
from dtrans.protocol.tables.table_rows import WantedRows, put_in_place, wanted_of
from dtrans.protocol.traffic import Leaf
from dtrans.run.parameter_server.communicator import Communicator, Connect
from dtrans.run.parameter_server.geo import GeoTrainer
from dtrans.run.parameter_server.tables.new_rows import RowMaker


T = TypeVar("T")


log = logging.getLogger("dtrans.trainer")

ONE_BY_ONE = CommunicatorConfig(max_merge_var_num=1, merge="sum")  # of the deltas of GEO-SGD


class BackgroundComm:
    """What is beside the steps of one trainer.

    Args:
      connect: connects to servers.
      deadline: seconds that parameters may be on their way.
    """

    def __init__(self, connect: Connect, deadline: float) -> None:
        self._connect = connect
        self._deadline = deadline
        self._leaves: dict[str, Leaf] = {}  # what is received
        self._endpoints: set[str] = set()  # of tables
        self._pool = BufferPool()
        self._pending: list[tuple[Leaf, Any]] = []  # what a step has made so far
        self._received: dict[str, jax.Array] | None = None  # what this step goes on with
        self._config: CommunicatorConfig = ONE_BY_ONE
        self._communicator: Communicator | None = None
        self._geo: GeoTrainer | None = None
        self._tables: dict[str, tuple[Leaf, KeptRows]] = {}  # that GEO-SGD is to begin with

    def prepare(self, program: Program) -> None:
        """Note what a program receives, all of which is received at once."""
        for eqn in program.eqns:
            is_lookup = eqn.primitive is prefetch_p and "communicator" in eqn.params
            if is_lookup and not self._endpoints.issuperset(eqn.params["epmap"]):
                self.rest()
                self._endpoints.update(eqn.params["epmap"])
            if eqn.primitive is recv_p and "communicator" in eqn.params:
                (t,) = eqn.params["types"]
                leaf = leaf_of(eqn, t)
                if self._leaves.get(leaf.names[0]) != leaf:
                    self.rest()
                    self._leaves[leaf.names[0]] = leaf

    def takes(self, eqn: JaxprEqn) -> bool:
        """Whether an equation is carried out here."""
        if eqn.primitive is send_barrier_p:
            return bool(self._pending)
        of_communicator = (send_p, recv_p, prefetch_p, send_rows_p, fetch_barrier_p)
        of_geo = (geo_send_p, geo_prefetch_p, geo_init_p)
        return eqn.primitive in of_geo or (
            eqn.primitive in of_communicator and "communicator" in eqn.params
        )

    def carry_out(self, eqn: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
        """The outputs of one equation. Raises what has ended the communicator."""
        if eqn.primitive is geo_send_p:
            return self._geo_send(eqn, values)
        if eqn.primitive is geo_prefetch_p:
            return self._geo_prefetch(eqn, *values)
        if eqn.primitive is geo_init_p:
            return self._geo_init(eqn, values)
        if eqn.primitive is send_p:
            self._config = eqn.params["communicator"]
            self._pending.append((leaf_of(eqn, eqn.invars[0].aval), values[0]))
            return [None]
        if eqn.primitive is send_rows_p:
            self._config = eqn.params["communicator"]
            self._pending.append(_of_rows(eqn, *values))
            return [None]
        if eqn.primitive is prefetch_p:
            return [self._prefetch(eqn, *values)]
        communicator = self._running(f"trainer {eqn.params['trainer_id']}")
        if self._pending:
            pending, self._pending = self._pending, []
            self._received = None
            # not before they are made: a queue of what is still being computed would have steps run
            # ahead of themselves
            jax.block_until_ready([x.rows if isinstance(x, RowGradient) else x for _, x in pending])
            communicator.put(pending)
        if eqn.primitive is fetch_barrier_p:
            return []
        if eqn.primitive is send_barrier_p:
            communicator.barrier()
            return [None]
        if (
            self._received is None
        ):  # all leaves of a step are of one answer, and its own: the user may donate them
            newest = communicator.newest()
            self._received = dict(zip(newest, jax.device_put(list(newest.values())), strict=True))
        return [self._received[eqn.params["names"][0]]]

    def _prefetch(self, eqn: JaxprEqn, uniq: np.ndarray) -> np.ndarray:
        """The rows of a table that a step looks up."""
        p, (t,) = eqn.params, eqn.params["types"]
        self._config = p["communicator"]
        rows = self._pool.take(f"{p['table']} rows", t.shape, t.dtype)
        wanted = rows_wanted(eqn, uniq, rows)
        self._running(f"trainer {p['trainer_id']}").look_up(wanted, train=True)
        put_in_place(uniq, rows, wanted, p["spans"])
        return rows

    def look_up(self, wanted: Sequence[WantedRows]) -> bool:
        """Receive rows of which no step is made, if a communicator runs; whether one does."""
        if self._communicator is None:
            return False
        self._communicator.look_up(wanted, train=False)
        return True

    @property
    def goes_on(self) -> bool:
        """Return True if it runs on while others ask servers: with GEO-SGD."""
        return self._geo is not None and self._communicator is not None

    def between(self, begin: Callable[[], Operation[T]]) -> T:
        """Run an operation when all pushes are answered, if it `goes_on`."""
        assert self._communicator is not None
        return self._communicator.between(begin)

    def rest(self, *, discard: bool = False) -> None:
        """Send what is left, unless it is to be discarded, and give the connections back."""
        communicator, self._communicator = self._communicator, None
        geo, self._geo = self._geo, None
        self._received = None
        try:
            if geo is not None and not discard:
                geo.finish()
                for line in geo.report:
                    log.info("%s", line)
        except BaseException:
            discard = True
            raise
        finally:
            if communicator is not None:
                communicator.stop(discard=discard)

    def _running(self, name: str, kept: Mapping[str, Leaf] = {}) -> Communicator:
        """The communicator, which is started if it is not."""
        if self._communicator is None:
            self._communicator = Communicator(
                self._connect,
                self._leaves,
                self._config,
                deadline=self._deadline,
                name=name,
                endpoints=sorted(self._endpoints),
                kept=kept,
            )
        return self._communicator

    def _geo_send(self, eqn: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
        params = eqn.params
        if params["push_every"]:
            geo, values, of_tables = (
                self._begun(),
                values[: len(params["names"])],
                iter(values[len(params["names"]) :]),
            )
            for table, count in params.get("tables", ()):
                uniq, *made = (next(of_tables) for _ in range(1 + count))
                geo.rows(table).put(_numbers(uniq, geo.leaf(table)), made)
            return geo.step(values, params["push_every"], block_on_pull=params["block_on_pull"])
        self.rest()
        tables, self._tables = self._tables, {}
        rows = zip(params["epmap"], params["names"], params["sections"], eqn.invars, strict=True)
        table = [Leaf(eps, names, n, v.aval.shape, v.aval.dtype) for eps, names, n, v in rows]
        self._leaves = {str(i): leaf for i, leaf in enumerate(table)}
        self._config = ONE_BY_ONE
        deltas = [as_deltas(x) for x in table]
        made = [jax.device_put(x) for x in values]
        kept = {n: leaf for n, (leaf, _) in tables.items()}
        communicator = self._running(f"trainer {params['trainer_id']}", kept)
        changes = {n: (as_deltas(leaf), rows) for n, (leaf, rows) in tables.items()}
        self._geo = GeoTrainer(communicator, deltas, params["trainers"], made, changes)
        return made

    def _geo_init(self, eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any]:
        """The trainer keeps no row of a table."""
        p = eqn.params
        of_state = eqn.replace(params={**p, "types": p["types"][1:]})
        state = RowMaker(of_state, args) if of_state.params["types"] else None
        self._tables[p["table"]] = leaf_of(eqn, p["types"][0]), KeptRows(p["types"], state)
        return [np.zeros(t.shape, t.dtype) for t in p["types"]]

    def _geo_prefetch(self, eqn: JaxprEqn, uniq: np.ndarray) -> Sequence[Any]:
        """Rows that the trainer keeps, and their state."""
        p, geo = eqn.params, self._begun()
        kept, ids = geo.rows(p["table"]), _numbers(uniq, geo.leaf(p["table"]))
        new = kept.missing(ids)
        if len(new):
            t = p["types"][0]
            rows = np.empty((len(new), *t.shape[1:]), t.dtype)
            wanted = rows_wanted(eqn, new, rows)
            self._running(f"trainer {p['trainer_id']}").look_up(wanted, train=True)
            put_in_place(new, rows, wanted, p["spans"])
            kept.add(new, rows)
        return kept.take(ids, len(uniq))

    def _begun(self) -> GeoTrainer:
        if self._geo is None:
            raise StateError(
                "GEO-SGD changes parameters that the servers know: run the trainer's startup "
                "program in this "
                "executor first, and no other program that communicates between its steps"
            )
        return self._geo


def leaf_of(eqn: JaxprEqn, t: Any) -> Leaf:
    """The leaf that a `send` or a `recv` of one operand is of."""
    p = eqn.params
    merge, spans = p.get("merge", "sum"), p.get("spans", ())
    return Leaf(p["epmap"], p["names"], p.get("sections", ()), t.shape, t.dtype, merge, spans)


def rows_wanted(eqn: JaxprEqn, uniq: np.ndarray, rows: np.ndarray) -> list[WantedRows]:
    """What a `prefetch` asks of servers."""
    p = eqn.params
    return wanted_of(uniq, rows, epmap=p["epmap"], names=p["names"], spans=p["spans"])


def _of_rows(eqn: JaxprEqn, uniq: np.ndarray, grad: Any) -> tuple[Leaf, RowGradient]:
    """What a `send_rows` is of. Behind the gradient of rows that there are, others may be."""
    leaf = leaf_of(eqn, eqn.invars[1].aval)
    return leaf, RowGradient(_numbers(uniq, leaf), grad)


def _numbers(uniq: np.ndarray, table: Leaf) -> np.ndarray:
    """The numbers of rows, without those that stand for none."""
    return uniq[: np.searchsorted(uniq, sum(x.rows for x in table.spans))]


def as_deltas(leaf: Leaf) -> Leaf:
    """Return a leaf as what has changed in it is sent."""
    return dataclasses.replace(leaf, names=tuple(n + DELTA for n in leaf.names))
