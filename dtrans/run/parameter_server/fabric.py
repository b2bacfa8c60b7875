"""Execution of one process's communication equations by messages to other processes.

    split_byref      slices a gradient: views of its memory, without a copy
    send             appends blocks to a server's outbox. The outbox is sent when it is full, or
                     with the message that ends the step
    send_barrier     records its servers; the message that ends the step includes the barrier
    recv             records the blocks to receive, and their locations in the parameter's memory
    fetch_barrier    sends one message to each server: the rest of its outbox, the barrier and the
                     request for blocks. It waits for the blocks. Asynchronous steps have no
                     fetch_barrier: this message is sent before the next equation, or at the end of
                     the program (`settle`)
    exchange         sends one message to the round's server, and waits for its answer
    concat           returns the memory that holds the received blocks in sequence
    split_ids        returns unique ids of rows, sorted and checked
    prefetch         records the rows that a step looks up (`tables.row_lookups`)
    send_rows        sends gradients of rows
    fake_init        returns an array without table rows
    init_on_use      returns placeholders of rows that are initialized on first use
                     (`tables.new_rows`)
    listen_and_serv  serves until all trainers have closed (`server`)

`background` executes the equations of a communicator and of GEO-SGD. `server_connections` has the
connections.

A gradient is sent from the memory in which XLA wrote it, without a copy. Blocks of a few KB are
packed into one frame. A received block is copied once, from ZeroMQ's frame into the parameter's
memory, which JAX uses without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from dtrans._jax import JaxprEqn, Primitive
from dtrans.checks import check_number
from dtrans.errors import ConfigError, DtransError, StateError
from dtrans.ir.program import Program
from dtrans.ir.selection import values_at
from dtrans.ops import (
    concat_p,
    exchange_p,
    fake_init_p,
    fetch_barrier_p,
    geo_send_p,
    init_on_use_p,
    listen_and_serv_p,
    prefetch_p,
    recv_p,
    send_barrier_p,
    send_p,
    send_rows_p,
    split_byref_p,
    split_ids_p,
)
from dtrans.protocol.buffers import BufferPool
from dtrans.protocol.tables.table_rows import unique_ids
from dtrans.protocol.trainer.operation import Operation
from dtrans.protocol.trainer.traffic import Leaf, rows_of
from dtrans.protocol.trainer.trainer_steps import Landing, TrainerSteps
from dtrans.run.base.nonfinite import NonfiniteCheck
from dtrans.run.parameter_server.background import BackgroundComm, leaf_of
from dtrans.run.parameter_server.server import Server
from dtrans.run.parameter_server.server_connections import ServerConnections
from dtrans.run.parameter_server.state_writer import Keep, KeepLast
from dtrans.run.parameter_server.tables.new_rows import new_rows
from dtrans.run.parameter_server.tables.row_lookups import RowLookups
from dtrans.run.parameter_server.update import ServerUpdate


T = TypeVar("T")


class EndpointFabric:
    """Dispatcher of one process's communication equations.

    Outputs of `recv` and `prefetch` are arrays that are filled later: before the next equation that
    may read them, by `receive_rows`, or by `settle`.

    Args:
      deadline, patience, wait_port, allow_remote: as for `Executor`.
      encryption: the option `transport_encryption` of `Executor`.
      watch: checks gradients before they are sent.

    Attributes:
      keep: function that saves a server's state when trainers request a checkpoint; None without.
      keep_last: function that saves a server's state when its job ends by an error; None without.
    """

    def __init__(
        self,
        *,
        deadline: float,
        patience: float,
        wait_port: bool,
        allow_remote: bool,
        encryption: str,
        watch: NonfiniteCheck,
    ) -> None:
        for name, seconds in (("deadline", deadline), ("patience", patience)):
            check_number(name, seconds, "a positive number of seconds", lambda x: x > 0)
        self.deadline, self.patience = deadline, patience
        self.allow_remote = allow_remote
        self.keep: Keep | None = None
        self.keep_last: KeepLast | None = None
        self._watch = watch
        self._connections = ServerConnections(
            deadline=deadline, patience=patience, wait_port=wait_port, encryption=encryption
        )
        self._steps = self._connections.steps
        self._lookups = RowLookups(self._connections)
        self._background = BackgroundComm(self._connections.connect, deadline)
        self._pool = BufferPool()
        self._landings: list[Landing] = []  # blocks that `recv` has recorded
        # servers of the send_barrier of this step, until its message is sent
        self._barriered: tuple[str, ...] = ()
        self._closed = False
        self._rules: dict[Primitive, Callable[[JaxprEqn, list[Any]], Sequence[Any]]] = {
            split_byref_p: _split,
            send_p: self._send,
            send_barrier_p: self._send_barrier,
            recv_p: self._recv,
            fetch_barrier_p: self._fetch_barrier,
            exchange_p: self._exchange,
            split_ids_p: lambda eqn, values: [unique_ids(values, **eqn.params)],
            prefetch_p: self._lookups.prefetch,
            send_rows_p: self._lookups.send_rows,
            fake_init_p: _fake_init,
            concat_p: _concat,
            listen_and_serv_p: self._serve,
            init_on_use_p: new_rows,
        }

    def prepare(self, program: Program) -> None:
        """Record which parameters and tables a program receives. Call it before the first run."""
        self._background.prepare(program)
        if program.plan is not None:
            self._connections.plan = program.plan.identity

    def carry_out(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        """Execute one communication equation; return its outputs.

        Raises:
          StateError: this object is closed.
          NonfiniteError: a gradient has an infinity or a NaN.
          ConfigError: the equation does not belong to parameter servers.
        """
        self._check_open()
        if self._watch.enabled:
            _check_gradients(self._watch, eqn, values)
        if self._background.takes(eqn):
            self.settle()
            if "trainers" in eqn.params:
                self._connections.identify(eqn)
            self._steps.forget_asked()
            return self._background.carry_out(eqn, values)

        # consecutive `prefetch`s share one request, and so do consecutive `recv`s
        if eqn.primitive is not prefetch_p:
            self.receive_rows()
        if eqn.primitive is not split_ids_p:  # split_ids needs no connection
            self._background.drain()
        if eqn.primitive not in (recv_p, fetch_barrier_p):
            self._receive()
        rule = self._rules.get(eqn.primitive)
        if rule is None:
            raise ConfigError(
                f"`{eqn.primitive.name}` is not an equation of parameter servers; run the program "
                "on a mesh: plan.on_mesh()"
            )
        return rule(eqn, values)

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("this executor is closed; make a new one")

    # -- gradients -------------------------------------------------------------------------------

    def _send(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        self._connections.identify(eqn)
        if "sections" in eqn.params:
            blocks = leaf_of(eqn, eqn.invars[0].aval).blocks(np.asarray(values[0]))
            values = [rows for _, _, rows in blocks]
        for x, endpoint, name in zip(values, eqn.params["epmap"], eqn.params["names"], strict=True):
            self._steps.send(endpoint, name, np.asarray(x))
        return [None]

    def _send_barrier(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        self._barriered = eqn.params["endpoints"]
        return [None]

    def _exchange(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        self._connections.identify(eqn)
        self._steps.in_step = True
        return self.exchange(eqn.params["endpoint"], eqn.params["round"], eqn.params["how"], values)

    def exchange(
        self, endpoint: str, number: int, how: Sequence[Sequence[Any]], values: Sequence[Any]
    ) -> list[Any]:
        """Combine values of all trainers on a server; return the results.

        Args:
          endpoint: the server.
          number: the index of the round in the step.
          how: for each value, how it is combined; see `dtrans.ops.rpc`.
          values: this trainer's values.
        """
        parts = [(np.asarray(x), way) for x, way in zip(values, how, strict=True)]
        return self._connections.run(self._steps.exchange(endpoint, number, parts))

    # -- parameters ------------------------------------------------------------------------------

    def _recv(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        self._connections.identify(eqn)
        types, names = eqn.params["types"], eqn.params["names"]
        if len(types) == 1:
            leaf = leaf_of(eqn, types[0])
        else:
            rows = tuple(t.shape[0] for t in types)
            shape = (sum(rows), *types[0].shape[1:])
            leaf = Leaf(eqn.params["epmap"], names, rows, shape, types[0].dtype)
        memory = self._pool.take(names[0], leaf.shape, leaf.dtype)
        blocks = leaf.blocks(memory)
        self._landings += blocks
        if len(types) == 1:
            return [memory]
        return [rows for _, _, rows in blocks]

    def _fetch_barrier(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        if "trainers" in eqn.params:
            self._connections.identify(eqn)
        landings = self._landings
        # Servers without a requested block are asked, too. Their answer comes when all trainers
        # have ended the step, so that no trainer runs ahead.
        self._land(landings, eqn.params["endpoints"])
        return [rows for _, _, rows in landings]

    def _land(self, landings: Sequence[Landing], endpoints: Sequence[str]) -> None:
        """Send the message that ends the step, and wait for the answers.

        Args:
          landings: the blocks to receive, with memory to write them to.
          endpoints: servers that must answer, even if they have none of the blocks.
        """
        barriered, self._landings, self._barriered = self._barriered, [], ()
        self._connections.run(self._steps.request(landings, endpoints, barriered))

    def _receive(self) -> None:
        if self._landings:
            self._land(self._landings, self._barriered)

    def receive_rows(self) -> None:
        """Receive the rows that `prefetch` equations have recorded."""
        self._lookups.receive()

    def settle(self) -> None:
        """Receive all recorded rows and blocks, with one request to each server."""
        self.receive_rows()
        self._receive()

    # -- between steps ---------------------------------------------------------------------------

    def announce(self, lookups: Sequence[tuple[JaxprEqn, np.ndarray]]) -> None:
        """Request the rows of a later step without waiting for them.

        Args:
          lookups: `prefetch` equations, each with the ids of its rows.
        """
        self._check_open()
        self.settle()
        self._lookups.announce(lookups)

    def look_up(self, eqn: JaxprEqn, ids: np.ndarray) -> np.ndarray:
        """Return rows of a table, for evaluation.

        Args:
          eqn: a `prefetch` equation of the table.
          ids: row ids, increasing.
        """
        self._check_open()
        return self._lookups.look_up(eqn, ids, self._background.look_up)

    def between(self, what: str, ask: Callable[[TrainerSteps], Operation[T]]) -> T:
        """Run an operation with the servers between two steps; return its result.

        Args:
          what: the name of the operation, for errors.
          ask: starts the operation.

        Raises:
          ConfigError: this trainer has received no parameters yet.
        """
        self._check_open()
        if not self._connections.is_known:
            raise ConfigError(
                f"{what}: this trainer is not connected to servers yet; call job.init first"
            )
        self.settle()
        if self._background.keeps_running:
            return self._background.between(lambda: ask(self._steps))
        self._background.drain()
        return self._connections.run(ask(self._steps))

    # -- servers, and the end --------------------------------------------------------------------

    def _serve(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        names = eqn.params["state_names"]
        server = Server(
            ServerUpdate(eqn),
            dict(zip(names, values, strict=True)),
            deadline=self.deadline,
            patience=self.patience,
            allow_remote=self.allow_remote,
            keys=self._connections.keys,
            plan=self._connections.plan,
            keep=self.keep,
            keep_last=self.keep_last,
        )
        final = server.serve()
        return values_at(final, names)

    def close(self, error: BaseException | None) -> None:
        """Leave every server. A second call does nothing.

        Args:
          error: the error that has ended this trainer, which servers get as the reason. A trainer
            that leaves in the middle of a synchronous step fails, too.
        """
        if self._closed:
            return
        self._closed = True
        failed: BaseException | None = None
        try:
            self._background.drain(discard=error is not None)
        except BaseException as e:
            # raised at the end, after the servers have got it as the reason
            error = failed = e
        reason = None
        if error is not None:
            reason = f"{type(error).__name__}: {error}"
        try:
            if error is None:
                self._connections.run(self._steps.saved())
        except DtransError as e:
            # A checkpoint could not be written. Servers have all updates, so they get no reason and
            # end normally.
            failed = e
        if self._steps.in_step and reason is None:
            # some servers may have this step's gradients and others may not
            reason = "it closed in the middle of a step"
        self._connections.close(reason)
        if failed is not None:
            raise failed


def _check_gradients(watch: NonfiniteCheck, eqn: JaxprEqn, values: Sequence[Any]) -> None:
    """Check the gradients that an equation sends; other equations pass.

    Raises:
      NonfiniteError: a gradient has an infinity or a NaN.
      ConfigError: the equation sends the deltas of GEO-SGD, not gradients.
    """
    if eqn.primitive is geo_send_p:
        raise ConfigError(
            f"on_nonfinite={watch.reaction!r}: with dtrans.Geo, trainers send changes of "
            "parameters and not gradients, so dtrans cannot check them; leave on_nonfinite out"
        )
    if eqn.primitive is send_rows_p:
        watch.check_values([(eqn.params["table"], values[1])])
    if eqn.primitive is send_p:
        names = eqn.params["names"]
        if len(names) != len(values):  # runtime_split: the one operand is sent as blocks
            names = [", ".join(names)]
        watch.check_values(zip(names, values, strict=True))


def _split(eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
    (x,) = values
    return rows_of(np.asarray(x), eqn.params["sections"])


def _fake_init(eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
    return [np.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars]


def _concat(eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
    if all(isinstance(v, np.ndarray) for v in values):
        memory = _shared_memory(values)
        if memory is not None:
            return [memory]
    return [np.concatenate(values, eqn.params["axis"])]


def _shared_memory(blocks: Sequence[np.ndarray]) -> np.ndarray | None:
    """Return blocks that are contiguous in memory as one array; None if they are not."""
    first, base = blocks[0], blocks[0].base
    if base is None:
        return None
    start = end = first.ctypes.data
    for b in blocks:
        if b.base is not base or b.ctypes.data != end:
            return None
        end += b.nbytes
    rows = sum(b.shape[0] for b in blocks)
    return np.ndarray((rows, *first.shape[1:]), first.dtype, base, start - base.ctypes.data)
