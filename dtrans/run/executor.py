"""`Executor`: runs any one program of a job in this process.

A program that does not communicate is jitted and called. One that does is cut into pieces
(`dtrans.run.base.segments`); what lies between them is carried out by the endpoint fabric
(`dtrans.run.parameter_server`), which connects to the servers on first use. In nccl2 mode a startup
program is carried out that way by `dtrans.run.collective.cluster`; a trainer's program is compiled
as a whole for all trainers, whose reductions XLA carries out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from dtrans.errors import ConfigError, StateError
from dtrans.ir.program import Program
from dtrans.ops import (
    broadcast_p,
    gen_nccl_id_p,
    geo_prefetch_p,
    init_on_use_p,
    prefetch_p,
    trainer_index_p,
)
from dtrans.protocol.trainer.operation import Operation
from dtrans.protocol.trainer.trainer_steps import TrainerSteps
from dtrans.run.base.batch import on_one_device
from dtrans.run.base.nonfinite import NonfiniteCheck
from dtrans.run.base.segments import Compute, Rules, Segments, cut_program
from dtrans.run.collective.cluster import ClusterFabric, is_of_cluster
from dtrans.run.net.net_options import allows_remote, choose_encryption
from dtrans.run.net.sockets import DEADLINE, PATIENCE
from dtrans.run.parameter_server.fabric import EndpointFabric
from dtrans.run.parameter_server.state_writer import Keep, KeepLast
from dtrans.run.parameter_server.tables.batch_rows import BatchRows


T = TypeVar("T")

# gradients are sent as soon as this many bytes are ready; below it one larger piece computes faster
GROUP_BYTES = 4 << 20
COPIED = 64 << 10  # bytes that are rather copied than put on the device one by one


class Executor:
    """Runs the programs of one role.

    In a pserver process:

        exe = dtrans.Executor()
        state = exe.run(pserver, exe.run(pserver_startup, key))   # returns when every trainer has closed

    In a trainer process:

        with dtrans.Executor() as exe:
            params = exe.run(t.get_trainer_startup_program(), key)
            for x, y in batches:
                params, loss = exe.run(trainer, params, x, y)

    In a trainer process of GEO-SGD, and of nccl2 mode after `dtrans.connect()`:

        params, opt_state = exe.run(t.get_trainer_startup_program(), key)
        for x, y in batches:
            params, opt_state, loss = exe.run(trainer, params, opt_state, x, y)

    In nccl2 mode results are reduced as the program says; those that grow with the batch, or have a
    row for each trainer, are this trainer's own part (`plan.on_cluster()` puts the parts together).

    Leaving the `with` block, or `close()`, tells the servers that this trainer is done; leaving it
    with an exception tells them why, so that nobody waits for a trainer that failed. (One that
    fails before it first ran a program that communicates is not known to them yet; they wait for it
    up to their deadline.)

    Args:
      deadline: seconds that any wait may take. Its error says who waited for whom, and for what.
      patience: seconds without a sign of another role's process after which it counts as dead. A
        shorter outage of the network, or pause of the process, is waited for.
      wait_port: wait for servers that are not there yet, up to the deadline; otherwise their
        absence is an error at once.
      allow_remote: let a server bind an address that is not this machine's loopback. It takes
        DTRANS_TOKEN, the same secret in all processes. By default True where DTRANS_ALLOW_REMOTE is
        1, else False.
      transport_encryption: "auto" encrypts connections to other hosts, "required" also those on
        loopback, "disabled" none; the same in all processes. By default
        DTRANS_TRANSPORT_ENCRYPTION, else "auto".
      on_nonfinite: what a trainer of parameter servers does about gradients with an infinity or a
        NaN in them: "ignore", "warn", or "error", before they are sent.
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
        watch = NonfiniteCheck(on_nonfinite)
        allow_remote, encryption = (
            allows_remote(allow_remote),
            choose_encryption(transport_encryption),
        )
        self._fabric = EndpointFabric(
            deadline=deadline,
            patience=patience,
            wait_port=wait_port,
            allow_remote=allow_remote,
            encryption=encryption,
            watch=watch,
        )
        self._cluster = ClusterFabric(
            deadline=deadline,
            patience=patience,
            allow_remote=allow_remote,
            encryption=transport_encryption,
        )
        self._pieces: dict[Program, Segments] = {}
        self._batch_rows: dict[Program, BatchRows] = {}
        self._interrupted: str | None = None

    def run(self, program: Program, *args: Any) -> Any:
        """Run a program on its arguments.

        Raises:
          TraceError: arguments that do not fit the program.
          StateError: the executor is closed, or its last step was interrupted and the servers wait
            for the rest.
          PeerError: another role refused or failed; DeadlineError: it did not answer in time.
          NonfiniteError: gradients of this trainer, with on_nonfinite="error".
          ConfigError: a program of nccl2 mode, and this process is not connected; see
            `dtrans.connect`.
        """
        flat = program.flatten(*args)
        program = program.specialize_flat(flat)
        if not is_of_cluster(program):
            flat = [*map(on_one_device, flat)]
        # rows are made when they are asked for
        is_table = any(e.primitive is init_on_use_p for e in program.eqns)
        if not program.communicates and not is_table:
            return program.out.unflatten(program.compiled(*flat))
        pieces = self._pieces.get(program)
        if pieces is None and is_of_cluster(program):
            return program.out.unflatten(self._cluster.run(program, flat))
        self._check_whole()
        if pieces is None:
            self._fabric.prepare(program)
            self._pieces[program] = pieces = cut_program(
                program,
                computed=_computed(program),
                carried={init_on_use_p},
                group_bytes=GROUP_BYTES,
            )
        run = pieces.run(flat, self._compute)
        outs: Any = None
        while True:
            try:
                eqn, values = run.send(outs)
            except StopIteration as done:
                # what comes last may be a `recv`, into memory that is JAX's from now on
                self._fabric.settle()
                self._interrupted = None
                return program.out.unflatten(_on_device(done.value))
            fabric = (
                self._cluster if eqn.primitive in (gen_nccl_id_p, broadcast_p) else self._fabric
            )
            outs = fabric.carry_out(eqn, values)
            self._interrupted = program.name  # until it has run to its end

    def _compute(self, piece: Compute, values: Sequence[Any]) -> Sequence[Any]:
        """Run a piece; the rows that it reads are received before."""
        self._fabric.receive_rows()
        return piece.jitted(*values)

    def _check_whole(self) -> None:
        if self._interrupted:
            raise StateError(
                f"program {self._interrupted} ended in the middle of its communication, and what "
                "was under way cannot "
                "be taken up again: close this executor, and start the job anew"
            )

    def announce(self, program: Program, *batch: Any) -> None:
        """Ask for the rows of tables that a later step looks up, and wait for none.

        The protocol is `dtrans.protocol.tables.rows_ahead`.

        Args:
          program: of a synchronous trainer with tables; its first argument is its state.
          batch: its others, of the step that follows those which were announced, or the next.

        Raises:
          ConfigError: which rows they are is made of state too. BatchError: a row that a table does
            not have, and nothing is sent. StateError: as of `run`, or too many steps are announced.
            TraceError: as of `run`.
        """
        self._check_whole()
        state, given = program.args[0], [program.inputs[n] for n in program.args[0].names]
        flat = program.flatten(state.unflatten(given), *batch)
        program = program.specialize_flat(flat)
        if program not in self._batch_rows:
            self._fabric.prepare(program)
            self._batch_rows[program] = BatchRows(program, _computed(program))
        self._fabric.announce(self._batch_rows[program](flat))

    def exchange(
        self, endpoint: str, number: int, how: Sequence[Sequence[Any]], values: Sequence[Any]
    ) -> list[Any]:
        """Values of which each trainer of a synchronous job has a part, made one by a server.

        All trainers call it alike, after a step: `dtrans.ops.rpc` says what ways there are.
        """
        return _on_device(self._fabric.exchange(endpoint, number, how, values))

    def look_up(self, program: Program, table: str, ids: np.ndarray) -> np.ndarray:
        """Rows of a table, by numbers that increase; `program` is that of the trainer. It is no
        part of a step."""
        for eqn in program.eqns:
            if eqn.primitive in (prefetch_p, geo_prefetch_p) and eqn.params["table"] == table:
                return self._fabric.look_up(eqn, ids)
        raise ConfigError(f"{table} is no table of {program.name}")

    def between_steps(self, what: str, ask: Callable[[TrainerSteps], Operation[T]]) -> T:
        """Ask servers for something between two steps of a trainer.

        Args:
          what: it is, for an error.
          ask: says it: `TrainerSteps.save` and others.
        """
        return self._fabric.between(what, ask)

    def keep(self, save: Keep, last: KeepLast | None = None) -> None:
        """Say how a server that this executor runs saves what it holds: when trainers ask, and when
        a job fails."""
        self._fabric.keep, self._fabric.keep_last = save, last

    def close(self, error: BaseException | None = None) -> None:
        """Tell the servers that this trainer is done, or with `error` that it failed. May be called
        twice."""
        self._fabric.close(error)

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        leaving = isinstance(error, SystemExit) and not error.code  # sys.exit(0) is not a failure
        self.close(None if leaving else error)


def _computed(program: Program) -> Rules:
    """The communication of a program that is computed."""
    return {trainer_index_p: functools.partial(_index_of, program)}


def _index_of(program: Program, *, over: Any) -> list[Any]:
    """The number of the trainer that a program is of."""
    return [
        jnp.int32(next(e.params["trainer_id"] for e in program.eqns if "trainer_id" in e.params))
    ]


def _on_device(values: list[Any]) -> list[Any]:
    """The same with JAX's arrays for NumPy's.

    All by one call, since each costs as much Python as a small step. `device_put` takes memory as
    it is, and needs much Python for each array; a compiled function copies it.
    """
    at = [i for i, x in enumerate(values) if isinstance(x, np.ndarray)]
    if not at:
        return values
    arrays = [values[i] for i in at]
    if sum(x.nbytes for x in arrays) <= COPIED:
        with jax.transfer_guard_host_to_device("allow"):  # nobody has asked for it without knowing
            made = _as_they_are(*arrays)
    else:
        made = jax.device_put(arrays)
    for i, x in zip(at, made, strict=True):
        values[i] = x
    return values


@jax.jit
def _as_they_are(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    return arrays
