"""Updates of simulated servers: a decay, a mean of gradients in the order of trainers, and parts of
a norm.

Numbers are of 32 bits, so that another order of a sum, or a gradient more or less, has other bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from random import Random
from typing import Any

import numpy as np

from dtrans._jax import ClosedJaxpr
from dtrans.protocol.exchange import Alike, Exchange
from dtrans.protocol.served import RowGradient, ServedBlocks, ServedRows, Vectors
from dtrans.protocol.tables.held_tables import TableReport
from tools.simulate.case import Case


class ArrayType:
    """The shape and dtype of a simulated block."""

    def __init__(self, size: int) -> None:
        self.shape = (size,)
        self.dtype = np.dtype(np.float32)
        self.ndim = 1


def block_name(endpoint: str, i: int) -> str:
    """The name of a server's block."""
    return f"{endpoint}/w{i}"


def gradient_name(block: str, k: int) -> str:
    """The name under which trainer k sends the gradient of a block."""
    return f"{block}@GRAD.trainer_{k}"


def initial(block: str, size: int) -> np.ndarray:
    """Return the first value of a block."""
    return _numbers(size, f"initial {block}")


def gradient(block: str, size: int, k: int, step: int) -> np.ndarray:
    """The gradient of trainer k in a step."""
    return _numbers(size, f"{block} {k} {step}")


def looked_up(case: Case, k: int, step: int) -> np.ndarray:
    """The numbers of the rows that trainer k looks up in a step, of a table of all servers.

    There may be none; but there are some of each block where it is by gradients that their trainer
    is known again.
    """
    r, ids = Random(f"rows {k} {step}"), list[int]()
    for i, size in enumerate(case.tables.values()):
        count = r.randint(0 if case.sync_mode else 1, min(size, 3))
        ids += sorted(i * size + x for x in r.sample(range(size), count))
    return np.array(ids, np.int32)


def announced(case: Case, k: int, step: int) -> int | None:
    """At which step trainer k announces what it looks up in this one; None where it does not, or
    announces others."""
    is_right = Random(f"announced {k} {step}").random() < 0.8
    return max(0, step - case.ahead) if case.ahead and case.tables and step and is_right else None


def updates_in(case: Case, k: int, step: int) -> int:
    """Return the number of updates in the rows that trainer k looks up in this step."""
    at = announced(case, k, step)
    if at is None:
        return step
    if case.requests and any(case.eviction_after(x) for x in range(at + 1, step + 1)):
        return step  # what was announced before an eviction is forgotten
    return max(at, step - case.staleness)


def row_gradient(rows: np.ndarray, k: int, step: int) -> np.ndarray:
    """The gradient of rows that trainer k has looked up: they enter it."""
    return np.asarray(
        _numbers(len(rows), f"of rows {k} {step}") + np.float32(0.25) * rows, np.float32
    )


def round_part(k: int, step: int, number: int) -> np.ndarray:
    """Return the contribution of trainer k to a round."""
    return _numbers(2, f"round {k} {step} {number}")


def _numbers(size: int, what: str) -> np.ndarray:
    r = Random(what)
    return np.array([r.uniform(-1, 1) for _ in range(size)], np.float32)


def mean(grads: Sequence[np.ndarray]) -> np.ndarray:
    """The mean, added up in the order in which they are given."""
    total = grads[0].copy()
    for g in grads[1:]:
        total += g
    return total / np.float32(len(grads))


def norm_part(means: Mapping[str, np.ndarray]) -> np.ndarray:
    """One server's part of the norm."""
    return np.array([sum((np.sum(x * x) for x in means.values()), np.float32(0))], np.float32)


def applied(x: np.ndarray, g: np.ndarray, norm: np.float32) -> np.ndarray:
    """A block after a step."""
    return np.asarray(x * np.float32(0.5) + g / np.float32(math.sqrt(1 + norm)), np.float32)


def decayed(x: np.ndarray, g: np.ndarray) -> np.ndarray:
    """A block of an asynchronous server after a gradient."""
    return applied(x, g, np.float32(0))


def with_rows(x: np.ndarray, grads: Sequence[RowGradient]) -> np.ndarray:
    """A block of a table after the mean of gradients: rows that none of them is of stay as they
    are."""
    ids = np.unique(np.concatenate([g.ids for g in grads]))
    if not len(ids):
        return x
    new = x.copy()
    new[ids] = decayed(x[ids], mean([spread(g, len(x))[ids] for g in grads]))
    return new


def spread(gradient: RowGradient, rows: int) -> np.ndarray:
    """A gradient of rows among zeros."""
    whole = np.zeros(rows, np.float32)
    whole[gradient.ids] = gradient.rows
    return whole


def added_rows(x: np.ndarray, delta: RowGradient) -> np.ndarray:
    """A block of a table after a push of GEO-SGD."""
    new = x.copy()
    new[delta.ids] = added(x[delta.ids], delta.rows)
    return new


def added(x: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """A block after a push of GEO-SGD."""
    return np.asarray(x + delta, np.float32)


class InNumpy:
    """`dtrans.protocol.geo_steps.GeoArithmetic` of simulated parameters."""

    def copied(self, values: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Copies."""
        return [x.copy() for x in values]

    def pushed(
        self, local: Sequence[np.ndarray], old: Sequence[np.ndarray], trainers: int
    ) -> tuple[Sequence[np.ndarray], Sequence[np.ndarray]]:
        """What is sent, and what is agreed on from then."""
        deltas = [
            np.asarray((x - o) / np.float32(trainers), np.float32)
            for x, o in zip(local, old, strict=True)
        ]
        return deltas, [added(o, d) for o, d in zip(old, deltas, strict=True)]

    def pulled(
        self, local: Sequence[np.ndarray], server: Sequence[np.ndarray], old: Sequence[np.ndarray]
    ) -> Sequence[np.ndarray]:
        """With what others have changed."""
        return [added(x, s - o) for x, s, o in zip(local, server, old, strict=True)]


def served(case: Case, endpoint: str) -> ServedBlocks:
    """Blocks, tables and rounds that a simulated server serves."""
    sizes = case.servers[case.endpoints.index(endpoint)]
    blocks = {block_name(endpoint, i): ArrayType(n) for i, n in enumerate(sizes)}
    sync = case.sync_mode
    # a synchronous trainer has names of its own; asynchronous ones send one name each
    table = {n: rows for n, rows in case.tables.items() if n.startswith(f"{endpoint}/")}
    sent = [
        {k: gradient_name(b, k if sync else 0) for k in range(case.trainers)}
        for b in (*blocks, *table)
    ]
    rows_of = lambda rows, sent: ServedRows(
        rows,
        (),
        np.dtype(np.float32),
        sent,
        kept=case.mode == "geo",
        moves=case.moves_rows,
        staleness=case.staleness,
    )
    tables = {n: rows_of(rows, sent[-1]) for n, rows in table.items()}
    types = {
        gradient_name(b, k): t
        for b, t in blocks.items()
        for k in (range(case.trainers) if sync else (0,))
    }
    exchanges = (_exchange(case, endpoint),) if case.mode == "exchange" else ()
    how = (sync, case.on_trainer_exit)
    return ServedBlocks(
        endpoint, case.trainers, *how, blocks, types, sent, exchanges=exchanges, tables=tables
    )


def _exchange(case: Case, endpoint: str) -> Exchange:
    everywhere = case.endpoints
    kinds = (Alike("float32", "sum", everywhere, everywhere, ("norm",), ((1,),)),)
    nothing: Any = None  # what is computed is computed here
    local: ClosedJaxpr = nothing
    return Exchange(endpoint, 1, kinds, local, ("norm",), (), (("norm", "norm"),))


def _rows(blocks: ServedBlocks) -> dict[str, int]:
    """Return the number of rows of each block of a table."""
    return {n: t.rows for n, t in blocks.tables.items()}


def _sizes(blocks: ServedBlocks) -> dict[str, int]:
    """The blocks of a server, and those of tables: name to the number of entries."""
    return {n: t.shape[0] for n, t in blocks.params.items()} | _rows(blocks)


class SimulatedTables:
    """The tables of a simulated server (`dtrans.protocol.tables.held_tables.HeldTables`).

    Args:
      sizes: block to the number of its rows.
      state: returns the server's arrays, by name.
      note: is called with the block and the numbers of rows when rows were evicted.

    Attributes:
      changed_at: for each row, the number of the update that changed it last; negative if it was
        evicted after so many updates, less one.
      steps: number of updates of each block.
    """

    def __init__(
        self,
        endpoint: str,
        sizes: Mapping[str, int],
        state: Callable[[], dict[str, Any]],
        note: Callable[[str, np.ndarray], None] = lambda name, ids: None,
    ) -> None:
        self._endpoint, self._state, self._note = endpoint, state, note
        self.changed_at = {n: np.zeros(size, np.int64) for n, size in sizes.items()}
        self.steps = dict.fromkeys(sizes, 0)
        self._evicted = dict.fromkeys(sizes, 0)

    def touch(self, name: str, parts: Sequence[np.ndarray]) -> None:
        """Count an update that changes some rows."""
        self.steps[name] += 1
        for ids in parts:
            self.changed_at[name][ids] = self.steps[name]

    def report(self) -> list[TableReport]:
        """As `HeldTables.report`."""
        return [
            TableReport(
                *(n, self._endpoint, len(at), int(np.sum(at > 0)), at.nbytes),
                *(None, self._evicted[n], self.steps[n]),
            )
            for n, at in self.changed_at.items()
        ]

    def evict(self, name: str, unused_for: int, under_way: np.ndarray) -> int:
        """As `HeldTables.evict`."""
        at, state = self.changed_at[name], self._state()
        is_old = (at > 0) & (at <= self.steps[name] - unused_for)
        is_old[under_way] = False
        at[is_old] = -self.steps[name] - 1
        state[name] = np.where(is_old, initial(name, len(at)), state[name])
        ids = np.flatnonzero(is_old)
        self._evicted[name] += len(ids)
        self._note(name, ids)
        return len(ids)

    def changed(self, name: str, since: int) -> tuple[int, np.ndarray, np.ndarray]:
        """As `HeldTables.changed`."""
        at = self.changed_at[name]
        return self.steps[name], np.flatnonzero(at > since), np.flatnonzero(at < -since)


class SimulatedUpdate:
    """The update of a synchronous server (`dtrans.protocol.served.StepUpdate`).

    Args:
      work: is called for each piece of work.
    """

    def __init__(self, blocks: ServedBlocks, work: Callable[[], None]) -> None:
        self.state: dict[str, Any] = {n: initial(n, size) for n, size in _sizes(blocks).items()}
        self.exchange: Exchange | None = None
        self._blocks, self._work = blocks, work
        self._means: dict[str, np.ndarray] = {}
        self._rows: dict[str, list[RowGradient]] = {}
        self.tables = SimulatedTables(blocks.endpoint, _rows(blocks), lambda: self.state)

    @property
    def values(self) -> Mapping[str, Any]:
        """The parameters as memory to send from."""
        return self.state

    def begin(self, grads: Mapping[str, Any], present: frozenset[int], step: int) -> Vectors | None:
        """As `StepUpdate.begin`."""
        self._work()
        sent = dict(zip(_sizes(self._blocks), self._blocks.sent, strict=True))
        given = {n: [grads[names[k]] for k in sorted(present)] for n, names in sent.items()}
        self._means = {n: mean(given[n]) for n in self._blocks.params}
        self._rows = {n: given[n] for n in self._blocks.tables}
        if self._blocks.exchanges:
            (self.exchange,) = self._blocks.exchanges
            return {ep: [norm_part(self._means)] for ep in self.exchange.peers}
        self._finish(np.float32(0))
        return None

    def go_on(self, arrived: Vectors | None) -> Vectors | None:
        """As `StepUpdate.go_on`."""
        assert arrived is not None and self.exchange is not None
        self._work()
        parts = {**arrived, self._blocks.endpoint: [norm_part(self._means)]}
        (kind,) = self.exchange.kinds
        self.exchange = None
        self._finish(sum((parts[ep][0][0] for ep in kind.owners), np.float32(0)))
        return None

    def rows(self, name: str, ids: np.ndarray, *, train: bool) -> np.ndarray:
        """As `StepUpdate.rows`."""
        return self.values[name][ids]

    def _finish(self, norm: np.float32) -> None:
        new = {n: applied(self.state[n], g, norm) for n, g in self._means.items()}
        self.state = new | {n: with_rows(self.state[n], g) for n, g in self._rows.items()}
        for name, gradients in self._rows.items():
            self.tables.touch(name, [g.ids for g in gradients])


class SimulatedBlocks:
    """The blocks of an asynchronous server (`dtrans.protocol.served.BlockUpdate`).

    Attributes:
      log: what was applied: block, and the bytes of its gradient; of a table, of all its rows; no
        bytes where rows were evicted.
      history: every value that each block has had.
      begun: how many steps of trainers have begun.
      evicted: rows that were evicted: block, number of its value then, and their numbers.
      state: name to array, as its server has it.
    """

    def __init__(self, blocks: ServedBlocks, work: Callable[[], None], *, geo: bool) -> None:
        self.log: list[tuple[str, bytes]] = []
        self.begun = 0
        self.history = {n: [initial(n, size).tobytes()] for n, size in _sizes(blocks).items()}
        self.evicted: list[tuple[str, int, np.ndarray]] = []
        self.state: dict[str, Any] = {
            n: np.frombuffer(h[0], np.float32) for n, h in self.history.items()
        }
        self.tables = SimulatedTables(
            blocks.endpoint, _rows(blocks), lambda: self.state, self._note_eviction
        )
        self._blocks, self._work, self._geo = blocks, work, geo

    def _note_eviction(self, name: str, ids: np.ndarray) -> None:
        self.log.append((name, b""))
        self.evicted.append((name, len(self.history[name]), ids))
        self.history[name].append(self.state[name].tobytes())

    def begin(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """As `BlockUpdate.begin`."""
        self.begun += 1
        return {}, {}

    def ready(self, arrived: Collection[str], used: Collection[str]) -> list[str]:
        """As `BlockUpdate.ready`."""
        return [n for n in self.history if n not in used and gradient_name(n, 0) in arrived]

    def apply(
        self,
        block: str,
        grads: Mapping[str, Any],
        state: Mapping[str, Any],
        values: Mapping[str, Any],
    ) -> dict[str, Any]:
        """As `BlockUpdate.apply`."""
        self._work()
        given = grads[gradient_name(block, 0)]
        if isinstance(given, RowGradient):
            self.tables.touch(block, [given.ids])
            made = (
                added_rows(state[block], given) if self._geo else with_rows(state[block], [given])
            )
            given = spread(given, len(state[block]))
        else:
            given = given.copy()
            made = (added if self._geo else decayed)(state[block], given)
        self.log.append((block, given.tobytes()))
        self.history[block].append(made.tobytes())
        return {block: made}

    def rows(
        self, name: str, ids: np.ndarray, state: Mapping[str, Any], *, train: bool
    ) -> np.ndarray:
        """As `BlockUpdate.rows`."""
        rows: np.ndarray = state[name][ids]
        return rows
