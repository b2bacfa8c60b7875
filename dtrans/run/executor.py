"""`Executor`: runs any program of a job, such as a trainer's or a server's, in this process.

A program without communication is compiled and called. A program with communication is divided into
compiled pieces (`dtrans.run.base.segments`). Between the pieces,
`dtrans.run.parameter_server.fabric` sends and receives messages. The executor connects to servers
at the first communication.

Programs of nccl2 mode (data parallelism without servers) run in another way. A trainer's program is
compiled as one function for all trainers, with XLA's collectives. `dtrans.run.collective.cluster`
executes the communication of the startup program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from dtrans.errors import ConfigError, LostPeerError, StateError
from dtrans.ir.program import Program
from dtrans.ir.selection import values_at
from dtrans.ops import (
    broadcast_p,
    gen_nccl_id_p,
    geo_prefetch_p,
    init_on_use_p,
    prefetch_p,
    split_ids_p,
    trainer_index_p,
)
from dtrans.protocol.generations import Generations, ReplacedError
from dtrans.protocol.trainer.geo_steps import GeoSnapshot
from dtrans.protocol.trainer.operation import Operation
from dtrans.protocol.trainer.trainer_steps import TrainerSteps
from dtrans.run.base.batch import on_one_device
from dtrans.run.base.nonfinite import NonfiniteCheck
from dtrans.run.base.segments import Compute, Rules, Segments, divide_program
from dtrans.run.collective.cluster import ClusterFabric, is_of_cluster
from dtrans.run.net.net_options import allows_remote, choose_encryption
from dtrans.run.net.sockets import DEADLINE, PATIENCE
from dtrans.run.parameter_server.device_mesh import DeviceMesh
from dtrans.run.parameter_server.fabric import EndpointFabric
from dtrans.run.parameter_server.geo import GeoTrainer
from dtrans.run.parameter_server.server_connections import ServerConnections
from dtrans.run.parameter_server.server_saves import ServerStorage
from dtrans.run.parameter_server.tables.batch_rows import BatchRows


T = TypeVar("T")

# A piece ends after this many bytes of gradients, which are sent while the next piece runs. Smaller
# pieces compute more slowly.
GROUP_BYTES = 4 << 20
# Largest result, in bytes, that a compiled copy moves to the device. `device_put` moves larger
# results.
COPIED_BYTES = 64 << 10


class Executor:
    """Executor of the programs of one role; a context manager.

    In a pserver process:

        exe = dtrans.Executor()
        state = exe.run(pserver_startup, key)
        state = exe.run(pserver, state)  # returns when every trainer has closed

    In a trainer process:

        with dtrans.Executor() as exe:
            params = exe.run(t.get_trainer_startup_program(), key)
            for x, y in batches:
                params, loss = exe.run(trainer, params, x, y)

    In a trainer process of GEO-SGD, and of nccl2 mode after `dtrans.connect()`:

        params, opt_state = exe.run(t.get_trainer_startup_program(), key)
        for x, y in batches:
            params, opt_state, loss = exe.run(trainer, params, opt_state, x, y)

    In nccl2 mode, a result with one row per example, or one per trainer, has only this trainer's
    rows. (`plan.on_cluster()` concatenates the rows of all trainers.)

    The end of the `with` block, or `close()`, tells the servers that this trainer has finished. If
    an exception ends the block, the servers receive the exception's text and stop waiting for this
    trainer. A trainer connects when it runs its first program with communication. Until then,
    servers wait for the trainer, up to their deadline.

    Args:
      deadline: seconds that any wait may take. The error names the waiting role, the role that it
        waits for, and the missing message.
      patience: seconds of silence after which another role counts as dead. The job survives shorter
        outages of the network, and shorter pauses of a process.
      wait_port: True to wait for servers that do not listen yet, up to the deadline. False raises
        PeerError at once.
      allow_remote: True to let a server bind an address that other hosts can reach. All processes
        then need the same DTRANS_TOKEN. The default is True if DTRANS_ALLOW_REMOTE is 1.
      transport_encryption: "auto" encrypts connections to other hosts, "required" all connections,
        "disabled" none. All processes must use the same value. The default is
        DTRANS_TRANSPORT_ENCRYPTION, or "auto".
      on_nonfinite: the reaction to an infinity or a NaN in gradients, before a trainer sends them
        to parameter servers: "ignore", "warn", or "error".

    Raises:
      ConfigError: an option has an invalid value.

    Example:
      >>> import jax.numpy as jnp
      >>> import dtrans
      >>> program = dtrans.trace(lambda x: 2 * x, jnp.zeros(3))
      >>> with dtrans.Executor() as exe:
      ...     exe.run(program, jnp.arange(3.0))
      Array([0., 2., 4.], dtype=float32)
    """

    def __init__(
        self,
        *,
        deadline: float = DEADLINE,
        patience: float = PATIENCE,
        wait_port: bool = True,
        allow_remote: bool | None = None,
        transport_encryption: str | None = None,
        on_nonfinite: str = "ignore",
    ) -> None:
        allow_remote = allows_remote(allow_remote)
        self._new_connections = functools.partial(
            ServerConnections,
            deadline=deadline,
            patience=patience,
            wait_port=wait_port,
            encryption=choose_encryption(transport_encryption),
        )
        self._new_fabric = functools.partial(
            EndpointFabric,
            deadline=deadline,
            patience=patience,
            allow_remote=allow_remote,
            watch=NonfiniteCheck(on_nonfinite),
        )
        self._fabric = self._new_fabric(self._new_connections())
        self._cluster = ClusterFabric(
            deadline=deadline,
            patience=patience,
            allow_remote=allow_remote,
            encryption=transport_encryption,
        )
        self._pieces: dict[Program, Segments] = {}
        self._batch_rows: dict[Program, BatchRows] = {}
        # the devices that run a trainer's program; None for programs of one device
        self._meshes: dict[Program, DeviceMesh | None] = {}
        self._interrupted: str | None = None

    def run(self, program: Program, *args: Any) -> Any:
        """Run a program.

        Args:
          program: a program of this process's role.
          args: the program's arguments, as pytrees with the traced structure. Shapes of the batch
            may differ.

        Returns:
          The outputs, in the pytree of the traced function.

        Raises:
          TraceError: the arguments do not fit the program.
          StateError: the executor is closed, or its last step was interrupted.
          PeerError: another role refused a message, or failed.
          DeadlineError: another role did not answer in time.
          NonfiniteError: with on_nonfinite="error", for gradients of this trainer.
          ConfigError: this process of nccl2 mode is not connected; call `dtrans.connect` first.
        """
        flat = program.flatten(*args)
        program = program.specialize_flat(flat)
        # The tests below read all equations, which is slow compared with a small step. So a program
        # that was divided into pieces in an earlier run skips them.
        pieces = self._pieces.get(program)
        is_collective = pieces is None and is_of_cluster(program)
        mesh = self._mesh_of(program)
        if mesh is not None:
            flat = mesh.place(program.in_names, flat)
        elif not is_collective:
            flat = [*map(on_one_device, flat)]
        if pieces is None:
            # table rows are initialized on first use, which a compiled function cannot do
            has_table = any(e.primitive is init_on_use_p for e in program.eqns)
            if not program.communicates and not has_table:
                return program.out.unflatten(program.compiled(*flat))
            if is_collective:
                return program.out.unflatten(self._cluster.run(program, flat))
        self._check_complete()
        if pieces is None:
            self._fabric.prepare(program)
            self._pieces[program] = pieces = pieces_for_role(program, mesh)
        run = pieces.run(flat, self._compute)
        outs: Any = None
        while True:
            try:
                eqn, values = run.send(outs)
            except StopIteration as done:
                # the arrays of a final `recv` must be filled before JAX reads them
                self._fabric.settle()
                self._interrupted = None
                if mesh is not None:
                    return program.out.unflatten(mesh.place(program.out_names, done.value))
                return program.out.unflatten(put_on_device(done.value))
            if eqn.primitive in (gen_nccl_id_p, broadcast_p):
                outs = self._cluster.carry_out(eqn, values)
            else:
                outs = self._fabric.carry_out(eqn, values)
            if eqn.primitive is not split_ids_p:  # `split_ids` sends no message
                self._interrupted = program.name  # stays set if an error interrupts the program

    def _mesh_of(self, program: Program) -> DeviceMesh | None:
        """Return the devices that run a trainer's program; None for a program of one device."""
        if program not in self._meshes:
            self._meshes[program] = DeviceMesh.from_program(program)
        return self._meshes[program]

    def _compute(self, piece: Compute, values: Sequence[Any]) -> Sequence[Any]:
        """Wait for the table rows that a compiled piece of a program reads; then run the piece."""
        self._fabric.receive_rows()
        return piece.jitted(*values)

    def _check_complete(self) -> None:
        """Raise StateError if an error interrupted an earlier program between two of its messages.

        Servers would then wait for messages that never come, so the job cannot continue.
        """
        if self._interrupted:
            raise StateError(
                f"program {self._interrupted} was interrupted in the middle of its communication, "
                "and cannot be continued; close this executor, and restart the job"
            )

    def announce(self, program: Program, *batch: Any) -> None:
        """Request rows of embedding tables for a later step, without waiting for them.

        `job.prefetch` calls this method. `dtrans.protocol.tables.rows_ahead` describes the
        messages.

        Args:
          program: a synchronous trainer's program with tables. The program's first argument is the
            trainer's state.
          batch: the arguments after the state. Each call is for the step after that of the last
            call.

        Raises:
          ConfigError: the ids depend on the state.
          BatchError: an id is not a row of its table; no request was sent.
          StateError: the executor is closed or interrupted, or rows of too many steps are
            requested.
          TraceError: the arguments do not fit the program.
        """
        self._check_complete()
        state = program.args[0]
        # pass types instead of the state's arrays, since ids do not depend on the state
        flat = program.flatten(state.unflatten(values_at(program.inputs, state.names)), *batch)
        program = program.specialize_flat(flat)
        if program not in self._batch_rows:
            self._fabric.prepare(program)
            self._batch_rows[program] = BatchRows(program, _computed(program))
        self._fabric.announce(self._batch_rows[program](flat))

    def exchange(
        self, endpoint: str, number: int, ways: Sequence[Sequence[Any]], values: Sequence[Any]
    ) -> list[Any]:
        """Send this trainer's values to a server, and return the merged values of all trainers.

        For example, a job merges the losses of all trainers into one loss in this way. All trainers
        must call this method between the same two steps, with the same `ways`.

        Args:
          endpoint: the server that merges the values.
          number: number of exchanges in this step before this one.
          ways: for each value, the collective to compute, with its arguments, such as
            ("all_reduce", "sum"); see `dtrans.ops.rpc`.
          values: this trainer's values.
        """
        return put_on_device(self._fabric.exchange(endpoint, number, ways, values))

    def look_up(self, program: Program, table: str, ids: np.ndarray) -> np.ndarray:
        """Return the servers' current rows of a table, between two steps.

        Args:
          program: the trainer's program.
          table: the name of the table.
          ids: row ids, increasing: shape [n].

        Returns:
          The rows, of shape [n, ...].

        Raises:
          ConfigError: the program has no such table.
        """
        for eqn in program.eqns:
            if eqn.primitive in (prefetch_p, geo_prefetch_p) and eqn.params["table"] == table:
                return self._fabric.look_up(eqn, ids)
        raise ConfigError(f"{table} is not a table of {program.name}; pass one of its tables")

    def between_steps(self, what: str, ask: Callable[[TrainerSteps], Operation[T]]) -> T:
        """Send a request, such as for a checkpoint, to the servers between two steps of a trainer.

        The method waits for the answers.

        Args:
          what: the name of the request, for errors.
          ask: starts the request, for example by `TrainerSteps.save`.

        Returns:
          The result of the request.
        """
        return self._fabric.between(what, ask)

    def flush(self) -> None:
        """Wait until servers have received all gradients that a background thread queues."""
        self._fabric.flush()

    def connect(self, generations: Generations | None, generation: int) -> None:
        """Close all connections. The next program connects again; compiled programs are kept.

        A trainer calls this method at the start, and after the failure of another process.

        Args:
          generations: the job's generations, which are the times between failures
            (`dtrans.protocol.generations`). None if the launcher does not restart processes.
          generation: number of a generation. The trainer connects to servers in this generation or
            a later one.
        """
        self._fabric.abandon()
        self._fabric = self._new_fabric(
            self._new_connections(generations=generations, generation=generation)
        )
        for program in self._pieces:
            self._fabric.prepare(program)
        self._interrupted = None

    @property
    def connections(self) -> ServerConnections:
        """This trainer's connections to its servers."""
        return self._fabric.connections

    def begin_with(self, snapshot: GeoSnapshot, push_every: int) -> None:
        """Continue GEO-SGD from a trainer's snapshot, in a process that replaces this trainer.

        Args:
          snapshot: the snapshot.
          push_every: number of steps between two pushes of changes.
        """
        self._fabric.begin_with(snapshot, push_every)

    @property
    def geo(self) -> GeoTrainer | None:
        """GEO-SGD (local steps with pushed changes) of this trainer.

        The property is None before the trainer's startup program.
        """
        return self._fabric.geo

    def set_storage(self, storage: ServerStorage) -> None:
        """Set the functions with which a server in this process saves its state to disk."""
        self._fabric.storage = storage

    def close(self, error: BaseException | None = None) -> None:
        """Tell the servers that this trainer has finished. Later calls do nothing.

        Args:
          error: the exception that ended this trainer; None if it has finished.
        """
        is_lost = isinstance(error, LostPeerError) and self.connections.is_in_generation
        if is_lost or isinstance(error, ReplacedError):
            # An error would end the job. Send none, because the launcher starts this role again.
            self._fabric.abandon()
        self._fabric.close(error)

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        is_exit = isinstance(error, SystemExit) and not error.code  # sys.exit(0) is not a failure
        self.close(None if is_exit else error)


def pieces_for_role(program: Program, mesh: DeviceMesh | None = None) -> Segments:
    """Divide a trainer's or server's program into compiled pieces, with messages between them.

    Args:
      program: the program.
      mesh: the devices that run a trainer's program; None for a program of one device.
    """
    rules = _computed(program)
    if mesh is not None:
        return mesh.cut(rules, group_bytes=GROUP_BYTES)
    return divide_program(program, computed=rules, carried={init_on_use_p}, group_bytes=GROUP_BYTES)


def _computed(program: Program) -> Rules:
    """Return functions that compute dtrans's own primitives in compiled pieces of a program.

    The only one is `trainer_index`.
    """
    return {trainer_index_p: functools.partial(_trainer_index, program)}


def _trainer_index(program: Program, *, over: Any) -> list[Any]:
    """Return the id of the trainer that runs `program`."""
    index = next(e.params["trainer_id"] for e in program.eqns if "trainer_id" in e.params)
    return [jnp.int32(index)]


def put_on_device(values: list[Any]) -> list[Any]:
    """Replace NumPy arrays by JAX arrays, in place.

    One call moves all arrays, because one call per array would take as long as a small step.
    `device_put` does not copy memory, but runs slow Python code for each array. For small arrays, a
    compiled copy is faster.
    """
    positions = [i for i, x in enumerate(values) if isinstance(x, np.ndarray)]
    if not positions:
        return values
    arrays = values_at(values, positions)
    if sum(x.nbytes for x in arrays) <= COPIED_BYTES:
        # allow this transfer, even if the user has set a guard against implicit transfers
        with jax.transfer_guard_host_to_device("allow"):
            placed = _copy(*arrays)
    else:
        placed = jax.device_put(arrays)
    for i, x in zip(positions, placed, strict=True):
        values[i] = x
    return values


@jax.jit
def _copy(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    return arrays
