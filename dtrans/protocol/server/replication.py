"""Replicas: copies of a server's state on another server, which survive the failure of the first
one.

    primary    a server whose state another server copies
    backup     the server that stores the copy

    primary to backup    replica       once in an epoch: the state at its beginning
                         replica...    in every step: the inputs of the update, which are the merged
                                       gradients, and partial results of other servers
    backup to primary    replicated    when the inputs of a step have arrived

A primary answers trainers after a step only when its backup has the inputs of the step. So the
backup can compute every step that a trainer completes. It applies the update to its copy after it
has answered its trainers. The primary and the backup run the same compiled update on the same
inputs, so the copy has the same bits.

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
from dtrans.protocol.server_blocks import StepUpdate, Vectors


MERGED = frozenset({0})  # senders of merged gradients, which count as those of one trainer
NewReplica = Callable[[str, Mapping[str, np.ndarray], int], StepUpdate]


@dataclasses.dataclass(frozen=True, eq=False)
class Primary:
    """Arrays that a server (the *primary*) sends to the server that stores its copy (the *backup*).

    Attributes:
      gradients: shape and dtype of each merged gradient, by name.
      state: shape and dtype of each array of the state, by name.
      exchanges: exchanges of the primary in each step.
    """

    gradients: Mapping[str, Any]
    state: Mapping[str, Any]
    exchanges: Sequence[Exchange] = ()

    def inputs(self) -> Iterator[tuple[str, tuple[int, ...], Any]]:
        """Yield name, shape and dtype of each input of the update of one step."""
        for name, t in self.gradients.items():
            yield name, t.shape, t.dtype
        for exchange in self.exchanges:
            for source, parcel in exchange.sources.items():
                for dtype, size in vector_types(parcel):
                    yield _vector_name(exchange.level, source, dtype), (size,), dtype


@dataclasses.dataclass(frozen=True, eq=False)
class Replication:
    """Servers with which one server exchanges replicas: copies of their states.

    Attributes:
      backup: endpoint of the server that stores the copy of this server's state.
      primaries: servers whose states this server copies, by endpoint.
    """

    backup: str
    primaries: Mapping[str, Primary]

    @property
    def partners(self) -> tuple[str, ...]:
        """Endpoints of all servers with which this server exchanges replicas."""
        return tuple(dict.fromkeys((self.backup, *self.primaries)))


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
      due: number of the step whose inputs arrive next; None before the state has arrived.
    """

    def __init__(self, endpoint: str, primary: Primary, new_replica: NewReplica) -> None:
        self.due: int | None = None
        self._endpoint, self._primary, self._new_replica = endpoint, primary, new_replica
        self._pool = BufferPool()
        self._state = self._inbox((n, t.shape, t.dtype) for n, t in primary.state.items())
        self._inputs: dict[int, Inbox] = {}
        self._update: StepUpdate
        self._step = 0  # number of updates in the copy

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
            # The inputs of the previous step may still wait in their memory.
            names = ((f"{step % 2} {n}", n, shape, dtype) for n, shape, dtype in self._inputs_of())
            inbox = self._inputs[step] = self._inbox_in_pool(names)
        inbox.take(message)
        if inbox.missing():
            return False
        self.due = step + 1
        return True

    def _inputs_of(self) -> Iterator[tuple[str, tuple[int, ...], Any]]:
        return self._primary.inputs()

    def _take_state(self, step: int, message: wire.Message) -> None:
        self._state.take(message)
        if not self._state.missing():
            self._update = self._new_replica(self._endpoint, self._state.memory, step)
            self._step = self.due = step
            self._state = self._inbox(())

    def apply(self, end: int) -> None:
        """Update the copy, up to step `end` or to the first step with missing inputs."""
        while self.due is not None and self._step < min(end, self.due):
            self._apply_next(self._inputs.pop(self._step).memory)

    def _apply_next(self, inputs: Mapping[str, np.ndarray]) -> None:
        update = self._update
        grads = {n: inputs[n] for n in self._primary.gradients}
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
        """Apply all updates, and return the two newest states by step; empty before the first."""
        if self.due is None:
            return {}
        self.apply(self.due)
        states: dict[int, Mapping[str, Any]] = {self._step: self._update.state}
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
      primaries: servers whose states this server copies, by endpoint.
      new_replica: as for `Replica`.
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
          message: a `replica` message.

        Returns:
          The number of updates that the copy can contain now, if the inputs of a step are complete.

        Raises:
          WireError: the message is not expected. Nothing has been stored.
        """
        if source not in self._of:
            raise WireError(
                f"pserver {source} sent `replica`, but its backup is another server; every role "
                "must plan the same step with the same options"
            )
        replica = self._of[source]
        return replica.due if replica.take(message) else None

    def due(self, source: str) -> int | None:
        """Return the number of updates that a server's copy can contain; None without a copy."""
        replica = self._of.get(source)
        return None if replica is None else replica.due

    def apply(self, end: int) -> None:
        """Update all copies, each up to step `end` or to the first step with missing inputs."""
        for replica in self._of.values():
            replica.apply(end)

    def newest(self, source: str) -> dict[int, Mapping[str, Any]]:
        """Return the two newest states of a server's copy, by step; empty without a copy."""
        replica = self._of.get(source)
        return {} if replica is None else replica.newest()
