"""Replicas: copies of a server's state on another server, in case the first server fails.

    primary    a server; another server stores a copy of its state
    backup     the server that stores the copy

    primary to backup    replica       once in a generation: the state at its beginning
                         replica...    in every step: the inputs of the update, which are the merged
                                       gradients, and partial results of other servers
                         replica_evict between steps: an eviction of table rows
    backup to primary    replicated    when the inputs of a step, or an eviction, have arrived

A primary answers trainers after a step only when its backup has the inputs of the step. So the
backup can compute every step that a trainer completes. The same holds for evictions. The backup
applies the update to its copy after it has answered its trainers. The primary and the backup run
the same compiled update on the same inputs, so the copy has the same bits.

Source: replication after aggregation (Li et al., Scaling Distributed Machine Learning with the
Parameter Server, OSDI 2014, section 4.3).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dtrans.errors import WireError
from dtrans.protocol import wire
from dtrans.protocol.buffers import BufferPool
from dtrans.protocol.inbox import Inbox
from dtrans.protocol.server.exchange import Exchange, vector_types
from dtrans.protocol.server_blocks import RowGradient, StepUpdate, Vectors


# merged gradients count as the gradients of one trainer, whose id is 0
MERGED = frozenset({0})
NewReplica = Callable[[str, Mapping[str, np.ndarray], int], StepUpdate]


@dataclasses.dataclass(frozen=True, eq=False)
class Primary:
    """Arrays that a server (the *primary*) sends to the server that stores its copy (the *backup*).

    Attributes:
      gradients: shape and dtype of each merged gradient, by name.
      state: shape and dtype of each array of the state, by name.
      exchanges: exchanges of the primary in each step.
      row_gradients: names of the gradients of tables. The primary sends rows, and their ids.
      varying: names of arrays in `state` with a number of rows that changes. Their shapes in
        `state` have the maximum number.
      optional: names in `varying` that the primary may leave out.
    """

    gradients: Mapping[str, Any]
    state: Mapping[str, Any]
    exchanges: Sequence[Exchange] = ()
    row_gradients: frozenset[str] = frozenset()
    varying: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()

    def arrays(
        self, rows: Mapping[str, Any], *, is_state: bool
    ) -> Iterator[tuple[str, tuple[int, ...], Any]]:
        """Yield name, shape and dtype of each array of the state, or of the inputs of one step.

        Args:
          rows: number of rows of each varying array, by name.
          is_state: True for the state.

        Raises:
          WireError: a number of rows is missing, or is out of range.
        """
        ids = map(_ids_of, self.row_gradients)
        varying = self.varying if is_state else {*self.row_gradients, *ids}
        for name, shape, dtype in self.largest(is_state=is_state):
            if name in self.optional and name not in rows:
                continue
            if name in varying:
                count = rows.get(name)
                if type(count) is not int or not 0 <= count <= shape[0]:
                    raise WireError(
                        f"a `replica` message with {wire.brief(count)} rows of {name}, expected 0 "
                        f"to {shape[0]}"
                    )
                shape = (count, *shape[1:])
            yield name, shape, dtype

    def largest(self, *, is_state: bool) -> Iterator[tuple[str, tuple[int, ...], Any]]:
        """Yield name, largest shape and dtype of each array. See `arrays`."""
        for name, t in self.state.items() if is_state else self.gradients.items():
            yield name, t.shape, t.dtype
        if is_state:
            return
        for name in self.row_gradients:
            yield _ids_of(name), self.gradients[name].shape[:1], np.dtype(np.int32)
        for exchange in self.exchanges:
            for source, parcel in exchange.sources.items():
                for dtype, size in vector_types(parcel):
                    yield _vector_name(exchange.level, source, dtype), (size,), dtype


@dataclasses.dataclass(frozen=True, eq=False)
class Replication:
    """Servers with which one server exchanges replicas: copies of their states.

    Attributes:
      backup: endpoint of the server that stores the copy of this server's state.
      primaries: the arrays that each primary sends, by endpoint. This server stores copies of the
        states of these primaries.
    """

    backup: str
    primaries: Mapping[str, Primary]

    @property
    def partners(self) -> tuple[str, ...]:
        """Endpoints of all servers with which this server exchanges replicas."""
        return tuple(dict.fromkeys((self.backup, *self.primaries)))


def _ids_of(gradient: str) -> str:
    return f"ids {gradient}"


def gradient_blocks(grads: Mapping[str, Any]) -> tuple[list[tuple[str, Any]], dict[str, int]]:
    """Return the arrays of merged gradients with their names, to send them to the backup.

    The second result has the number of rows of each table gradient, by name.
    """
    blocks, rows = list[tuple[str, Any]](), dict[str, int]()
    for name, x in grads.items():
        if isinstance(x, RowGradient):
            blocks += [(_ids_of(name), x.ids), (name, x.rows)]
            rows |= dict.fromkeys((_ids_of(name), name), len(x.ids))
        else:
            blocks.append((name, x))
    return blocks, rows


def _vector_name(level: int, source: str, dtype: str) -> str:
    return f"partials {level} {source} {dtype}"


def vector_blocks(level: int, arrived: Vectors) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and the array of each vector that a primary has received in an exchange."""
    for source, vectors in arrived.items():
        for vector in vectors:
            yield _vector_name(level, source, vector.dtype.name), vector


class Replica:
    """Copy of one primary's state, and the inputs that have arrived for its next steps.

    Args:
      endpoint: endpoint of the primary.
      primary: arrays that the primary sends.
      new_replica: returns the update of a primary, given its endpoint, its state by name, and the
        number of updates before it.

    Attributes:
      due: number of the step for which inputs arrive next; None before the state has arrived.
      evictions: number of received evictions.
    """

    def __init__(self, endpoint: str, primary: Primary, new_replica: NewReplica) -> None:
        self.due: int | None = None
        self.evictions = 0
        self._endpoint, self._primary, self._new_replica = endpoint, primary, new_replica
        self._pool = BufferPool()
        self._state: Inbox | None = None
        self._inputs: dict[int, Inbox] = {}
        self._update: StepUpdate
        self._step = 0  # number of updates in the copy

    @property
    def received(self) -> int | None:
        """Number of updates with complete inputs, plus evictions; None before the state arrives.

        The server with the copy acknowledges this number.
        """
        return None if self.due is None else self.due + self.evictions

    def take(self, message: wire.Message) -> bool:
        """Store a part of the state, or of the inputs of a step. Return True for the last part.

        Raises:
          WireError: the message is not expected. Nothing has been stored.
        """
        step, is_state = message["step"], message["is_state"]
        if is_state != (self.due is None) or (not is_state and step != self.due):
            raise WireError(
                f"pserver {self._endpoint} sent a `replica` message of step {step}, expected "
                + ("the state" if self.due is None else f"inputs of step {self.due}")
            )
        if is_state:
            self._take_state(step, message)
            return False
        inbox = self._inputs.get(step)
        if inbox is None:
            # allocate new memory, because the inputs of the previous step may not be applied yet
            arrays = self._primary.arrays(message.fields.get("rows", {}), is_state=False)
            names = ((f"{step % 2} {n}", n, shape, dtype) for n, shape, dtype in arrays)
            inbox = self._inbox_in_pool(names)
        inbox.take(message)
        self._inputs[step] = inbox
        if inbox.missing():
            return False
        self.due = step + 1
        return True

    def _take_state(self, step: int, message: wire.Message) -> None:
        inbox = self._state
        if inbox is None:
            rows = message.fields.get("rows", {})
            inbox = self._inbox(self._primary.arrays(rows, is_state=True))
        inbox.take(message)
        self._state = inbox
        if not inbox.missing():
            self._update = self._new_replica(self._endpoint, inbox.memory, step)
            self._step = self.due = step
            self._state = None

    def evict(self, message: wire.Message) -> None:
        """Evict rows of the copy, after all updates before the eviction.

        Raises:
          WireError: the message is not expected. No row has been evicted.
        """
        if self.due is None or message["step"] != self.due:
            raise WireError(
                f"pserver {self._endpoint} sent a `replica_evict` message of step "
                f"{message['step']}, expected step {self.due}"
            )
        self.apply(self.due)
        self._update.evict(message["table"], message["unused_for"])
        self.evictions += 1

    def apply(self, end: int) -> None:
        """Update the copy, up to step `end` or to the first step with missing inputs."""
        while self.due is not None and self._step < min(end, self.due):
            self._apply_next(self._inputs.pop(self._step).memory)

    def _apply_next(self, inputs: Mapping[str, np.ndarray]) -> None:
        update = self._update
        grads: dict[str, Any] = {n: inputs[n] for n in self._primary.gradients}
        for n in self._primary.row_gradients:
            grads[n] = RowGradient(inputs[_ids_of(n)], inputs[n])
        outgoing = update.begin(grads, MERGED, self._step)
        while outgoing is not None:
            exchange = update.exchange
            assert exchange is not None
            arrived: dict[str, list[np.ndarray]] = {}
            for source, parcel in exchange.sources.items():
                arrived[source] = []
                for dtype, _ in vector_types(parcel):
                    arrived[source].append(inputs[_vector_name(exchange.level, source, dtype)])
            outgoing = update.go_on(arrived)
        self._step += 1

    def newest(self) -> dict[int, Mapping[str, Any]]:
        """Apply all updates; return the two newest states by step, or {} before the first state."""
        if self.due is None:
            return {}
        self.apply(self.due)
        states: dict[int, Mapping[str, Any]] = {self._step: self._update.newest()}
        if self._update.old is not None:
            states[self._step - 1] = self._update.old
        return states

    def _inbox(self, types: Iterable[tuple[str, tuple[int, ...], Any]]) -> Inbox:
        return self._new_inbox({n: np.empty(shape, dtype) for n, shape, dtype in types})

    def _inbox_in_pool(self, types: Iterable[tuple[str, str, tuple[int, ...], Any]]) -> Inbox:
        memory = {n: self._pool.take(key, shape, dtype) for key, n, shape, dtype in types}
        return self._new_inbox(memory)

    def _new_inbox(self, memory: Mapping[str, np.ndarray]) -> Inbox:
        return Inbox(
            memory,
            lambda name: (
                f"a `replica` message of pserver {self._endpoint} with the unknown array "
                f"{wire.brief(name)}; every role must plan the same step with the same options"
            ),
        )


class StoredReplicas:
    """Copies of other servers' states on one server.

    Args:
      primaries: the arrays that each primary (server with a copy here) sends, by endpoint.
      new_replica: function that creates the update for a copy (`Replica`).
    """

    def __init__(
        self, primaries: Mapping[str, Primary] = {}, new_replica: NewReplica | None = None
    ) -> None:
        self._of: dict[str, Replica] = {}
        for endpoint, primary in primaries.items():
            assert new_replica is not None
            self._of[endpoint] = Replica(endpoint, primary, new_replica)

    def take(self, source: str, message: wire.Message) -> int | None:
        """Store a part of a primary's arrays.

        Args:
          source: endpoint of the primary.
          message: a `replica` or `replica_evict` message.

        Returns:
          `Replica.received`, if an eviction or the inputs of a step are complete.

        Raises:
          WireError: the message is not expected. Nothing has been stored.
        """
        if source not in self._of:
            raise WireError(
                f"pserver {source} sent `{message.op}`, but its backup is another server; every "
                "role must plan the same step with the same options"
            )
        replica = self._of[source]
        if message.op == "replica_evict":
            replica.evict(message)
        elif not replica.take(message):
            return None
        return replica.received

    def received(self, source: str) -> int | None:
        """Return `Replica.received` of a server's copy; None without a copy."""
        replica = self._of.get(source)
        return None if replica is None else replica.received

    def apply(self, end: int) -> None:
        """Update all copies, each up to step `end` or to the first step with missing inputs."""
        for replica in self._of.values():
            replica.apply(end)

    def newest(self, source: str) -> dict[int, Mapping[str, Any]]:
        """Return the two newest states of a server's copy, by step; empty without a copy."""
        replica = self._of.get(source)
        return {} if replica is None else replica.newest()
