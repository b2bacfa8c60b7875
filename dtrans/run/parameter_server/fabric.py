"""Executor of one process's communication equations, which exchanges messages with other processes.

A program for one process contains equations such as `send` and `recv`. To save messages, most of
them are only recorded, and one message to each server ends the step:

    send             adds gradients to a server's outbox. The outbox is sent when it is full, or
                     with the message that ends the step
    send_barrier     records that the gradients are complete
    recv             records the parameters to receive, and memory for them
    fetch_barrier    sends one message to each server: the rest of its outbox, the barrier and the
                     request for parameters. Then it waits for the parameters. Asynchronous steps
                     have no fetch_barrier: the same message is sent before the next equation, or at
                     the end of the program (`settle`)
    exchange         sends this trainer's values to a server, and waits for the merged values
    prefetch         records the table rows that a step looks up (`tables.row_lookups`)
    send_rows        sends gradients of table rows
    init_on_use      returns placeholders of rows that are initialized on first use
                     (`tables.new_rows`)
    listen_and_serv  serves until all trainers have closed (`server`)

`local_equations` executes equations without messages. `background` executes communication that
overlaps the steps, and GEO-SGD. `server_connections` opens connections.

A gradient is sent without a copy, from the memory in which XLA wrote the gradient. Blocks of a few
KB are packed into one frame. A received block is copied once, from ZeroMQ's frame to the
parameter's memory. JAX uses this memory without a copy. Processes of one host send large frames in
shared memory (`dtrans.run.net.memory_channel`): the sender copies a frame there, and a server reads
gradients there without a copy.
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
    exchange_p,
    fetch_barrier_p,
    geo_prefetch_p,
    geo_send_p,
    init_on_use_p,
    listen_and_serv_p,
    prefetch_p,
    recv_p,
    send_barrier_p,
    send_p,
    send_rows_p,
    split_ids_p,
)
from dtrans.parameter_server.plan import PServerPlan
from dtrans.protocol.trainer.geo_steps import GeoSnapshot
from dtrans.protocol.trainer.operation import Operation
from dtrans.protocol.trainer.trainer_steps import TrainerSteps
from dtrans.run.base.nonfinite import NonfiniteCheck
from dtrans.run.parameter_server.background import BackgroundComm
from dtrans.run.parameter_server.block_requests import BlockRequests
from dtrans.run.parameter_server.equation_leaves import sent_blocks
from dtrans.run.parameter_server.geo import GeoTrainer
from dtrans.run.parameter_server.local_equations import LOCAL_RULES, EquationRule
from dtrans.run.parameter_server.server import Server
from dtrans.run.parameter_server.server_connections import ServerConnections
from dtrans.run.parameter_server.server_saves import ServerStorage
from dtrans.run.parameter_server.tables.new_rows import new_rows
from dtrans.run.parameter_server.tables.row_lookups import RowLookups
from dtrans.run.parameter_server.update import ServerUpdate


T = TypeVar("T")


class EndpointFabric:
    """Executor of one process's communication equations, by messages to other processes.

    `recv` and `prefetch` return arrays before the values have arrived. The values are written into
    these arrays before the next equation that may read them.

    Args:
      connections: a trainer's connections to its servers.
      deadline, patience, allow_remote: as for `Executor`.
      watch: checks gradients before they are sent.

    Attributes:
      storage: storage of a server's state, such as the folder of checkpoints.
    """

    def __init__(
        self,
        connections: ServerConnections,
        *,
        deadline: float,
        patience: float,
        allow_remote: bool,
        watch: NonfiniteCheck,
    ) -> None:
        for name, seconds in (("deadline", deadline), ("patience", patience)):
            check_number(name, seconds, "a positive number of seconds", lambda x: x > 0)
        self.deadline, self.patience, self.allow_remote = deadline, patience, allow_remote
        self.storage = ServerStorage()
        self.connections, self._steps = connections, connections.steps
        self._lookups, self._blocks = RowLookups(connections), BlockRequests(connections)
        self._background = BackgroundComm(
            connections.connect, connections.lost, connections.rejoin, deadline
        )
        self._watch, self._closed = watch, False
        self._rules: dict[Primitive, EquationRule] = {
            **LOCAL_RULES,
            send_p: self._send,
            send_barrier_p: self._blocks.send_barrier,
            recv_p: self._blocks.recv,
            fetch_barrier_p: self._blocks.fetch_barrier,
            exchange_p: self._exchange,
            prefetch_p: self._lookups.prefetch,
            send_rows_p: self._lookups.send_rows,
            listen_and_serv_p: self._serve,
            init_on_use_p: new_rows,
        }

    def prepare(self, program: Program) -> None:
        """Record the parameters and tables of a program, before the program's first run."""
        self._background.prepare(program)
        if program.plan is not None:
            if isinstance(program.plan, PServerPlan):
                program.plan.compression.check_nonfinite(self._watch.reaction)
            self.connections.plan = program.plan.identity

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
        # Consecutive lookups share one request, and so do consecutive `recv`s.
        if eqn.primitive not in (prefetch_p, geo_prefetch_p):
            self.receive_rows()
        if self._background.takes(eqn):
            self._blocks.receive()
            if "trainers" in eqn.params:
                self.connections.identify(eqn)
            self._steps.forget_asked()
            return self._background.carry_out(eqn, values)

        if eqn.primitive is not split_ids_p:  # `split_ids` needs no connection.
            self._background.drain()
        if eqn.primitive not in (recv_p, fetch_barrier_p):
            self._blocks.receive()
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
        self.connections.identify(eqn)
        if "level" in eqn.params:
            self._steps.level = eqn.params["level"]
        for endpoint, name, x in sent_blocks(eqn, [np.asarray(x) for x in values]):
            self._steps.send(endpoint, name, x)
        return [None]

    def _exchange(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        self.connections.identify(eqn)
        self._steps.in_step = True
        return self.exchange(eqn.params["endpoint"], eqn.params["round"], eqn.params["how"], values)

    def exchange(
        self, endpoint: str, number: int, how: Sequence[Sequence[Any]], values: Sequence[Any]
    ) -> list[Any]:
        """Send this trainer's values to a server, and return the merged values of all trainers.

        Examples are the loss, and sums over the full batch.

        Args:
          endpoint: endpoint of the server that merges.
          number: number of this exchange in the step.
          how: for each value, name and arguments of the collective, such as ("all_reduce", "sum");
            see `dtrans.ops.rpc`.
          values: this trainer's values.

        Returns:
          The merged values.
        """
        parts = [(np.asarray(x), way) for x, way in zip(values, how, strict=True)]
        return self.connections.run(self._steps.exchange(endpoint, number, parts))

    # -- parameters ------------------------------------------------------------------------------

    def receive_rows(self) -> None:
        """Receive the table rows of all recorded lookups, with one request per server."""
        self._lookups.receive()
        self._background.receive_rows()

    def settle(self) -> None:
        """Receive all table rows and parameters that are still to arrive."""
        self.receive_rows()
        self._blocks.receive()

    @property
    def geo(self) -> GeoTrainer | None:
        """Object that runs GEO-SGD (local steps, pushed changes) for this trainer.

        The property is None before the startup program.
        """
        return self._background.geo

    def begin_with(self, snapshot: GeoSnapshot, push_every: int) -> None:
        """Let GEO-SGD begin with a snapshot, in a process that replaces a lost trainer.

        The snapshot is used when the startup program runs.

        Args:
          snapshot: the snapshot.
          push_every: number of steps between two pushes of changes.
        """
        self._background.snapshot = snapshot, push_every

    # -- between steps ---------------------------------------------------------------------------

    def announce(self, lookups: Sequence[tuple[JaxprEqn, np.ndarray]]) -> None:
        """Request the table rows of a later step in advance, without waiting for them.

        Args:
          lookups: the `prefetch` equations of the later step, each with the ids of its rows.
        """
        self._check_open()
        self.settle()
        self._lookups.announce(lookups)

    def look_up(self, eqn: JaxprEqn, ids: np.ndarray) -> np.ndarray:
        """Return current rows of a table, for evaluation between steps.

        Args:
          eqn: a `prefetch` equation of the table.
          ids: row ids, increasing.
        """
        self._check_open()
        return self._lookups.look_up(eqn, ids, self._background.look_up)

    def between(self, what: str, ask: Callable[[TrainerSteps], Operation[T]]) -> T:
        """Run an operation with the servers between two steps, such as saving a checkpoint.

        Args:
          what: name of the operation, for errors.
          ask: function that starts the operation.

        Returns:
          The result of the operation.

        Raises:
          ConfigError: this trainer has received no parameters yet.
        """
        self._check_open()
        if not self.connections.is_known:
            raise ConfigError(
                f"{what}: this trainer is not connected to servers yet; call job.init first"
            )
        self.settle()
        if self._background.keeps_running:
            return self._background.between(lambda: ask(self._steps))
        self._background.drain()
        return self.connections.run(ask(self._steps))

    def flush(self) -> None:
        """Wait until the servers have received all gradients in the background thread's queue.

        With GEO-SGD, the method does nothing: the trainer itself repeats pushes after a failure.
        After `close`, all gradients are sent already.
        """
        if not self._closed and not self._background.keeps_running:
            self._background.drain()

    # -- servers, and the end --------------------------------------------------------------------

    def _serve(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        names = eqn.params["state_names"]
        server = Server(
            ServerUpdate(eqn),
            dict(zip(names, values, strict=True)),
            deadline=self.deadline,
            patience=self.patience,
            allow_remote=self.allow_remote,
            keys=self.connections.keys,
            plan=self.connections.plan,
            storage=self.storage,
        )
        return values_at(server.serve(), names)

    def abandon(self) -> None:
        """Close all connections without a message, because the job continues with new connections.

        After the failure of a process, servers do not process messages from before the failure.
        """
        self._closed = True
        self._background.drain(discard=True)
        self.connections.abandon()

    def close(self, error: BaseException | None) -> None:
        """Leave every server at the end of the job. A second call does nothing.

        If the trainer leaves in the middle of a synchronous step, the servers treat it as failed.

        Args:
          error: the error that has ended this trainer; servers receive its text. None at a normal
            end.
        """
        if self._closed:
            return
        self._closed = True
        failed: BaseException | None = None
        try:
            with self.connections.after_last_step():
                self._background.drain(discard=error is not None)
        except BaseException as e:
            # The error is raised below, after it was sent to the servers as the reason.
            error = failed = e
        reason = None if error is None else f"{type(error).__name__}: {error}"
        try:
            if error is None:
                self.connections.run_last(self._steps.saved())
        except DtransError as e:
            # A server could not write a checkpoint. All updates are complete, so the servers end
            # without an error.
            failed = e
        if self._steps.in_step and reason is None:
            # Perhaps only some servers have received this step's gradients.
            reason = "it closed in the middle of a step"
        self.connections.close(reason)
        if failed is not None:
            raise failed


def _check_gradients(watch: NonfiniteCheck, eqn: JaxprEqn, values: Sequence[Any]) -> None:
    """Check that the gradients of an equation are finite. Equations without gradients pass.

    Raises:
      NonfiniteError: a gradient has an infinity or a NaN.
      ConfigError: the equation sends GEO-SGD's changes of parameters, not gradients.
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
        if len(names) != len(values):  # runtime_split: one operand is sent as several blocks
            names = [", ".join(names)]
        watch.check_values(zip(names, values, strict=True))
