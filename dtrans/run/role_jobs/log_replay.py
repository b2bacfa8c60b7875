"""`dtrans.replay`: computes the steps of a finished job again, in one process.

A job with snapshots may continue without a trainer that failed. So the result of the
job depends on the failures. The job's log names the trainers of each step, and a replay uses the
same trainers. With a replay, users check the result of a job.

    log       the trainers of each step (`dtrans.run.net.generation_log`)
    trainer   calls the compiled functions that a trainer's process runs (`dtrans.run.executor`)
    server    calls the update that a server's process runs (`SyncUpdate`)

In each step, all trainers compute gradients, one after the other. Then the servers update their
parameters, and the trainers receive the new values. Function calls replace messages. An update is a
function of the state and the gradients, so the replay computes the same bits as the job. If servers
have replicas, the last bits may differ (see `replay`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dtrans._jax import JaxprEqn, Primitive
from dtrans.checkpoint.pserver_state import gather
from dtrans.checks import check_int
from dtrans.errors import ConfigError
from dtrans.ir.program import Program
from dtrans.ir.selection import omit
from dtrans.ops import (
    fetch_barrier_p,
    prefetch_p,
    recv_p,
    send_barrier_p,
    send_p,
    send_rows_p,
)
from dtrans.parameter_server.plan import PServerPlan, ServerPrograms
from dtrans.protocol.server_blocks import RowGradient, Vectors
from dtrans.protocol.tables.table_rows import put_in_place
from dtrans.run.base.batch import on_one_device
from dtrans.run.executor import Executor, pieces_for_role, put_on_device
from dtrans.run.net.generation_log import GenerationRecord, members_of_steps, read_log
from dtrans.run.parameter_server.equation_leaves import (
    parts_in,
    received_leaf,
    rows_wanted,
    sent_blocks,
)
from dtrans.run.parameter_server.local_equations import LOCAL_RULES, EquationRule
from dtrans.run.parameter_server.ordered_job import part_axes
from dtrans.run.parameter_server.sync_update import SyncUpdate
from dtrans.run.parameter_server.tables.traced_tables import part_of_block
from dtrans.run.parameter_server.trainer_calls import TrainerCalls
from dtrans.run.parameter_server.update import ServerUpdate, copy_state
from dtrans.step.batch_sharing import part_of_batch, without_parts


# Run of a trainer's program. It yields once, when it has sent its gradients.
ProgramRun = Generator[None, None, Any]


def replay(
    plan: PServerPlan,
    log: str | os.PathLike[str],
    batch: Callable[[int], Sequence[Any]],
    *,
    init: Sequence[Any],
    stop: int,
) -> tuple[Any, Any]:
    """Compute the steps of a finished synchronous job again, in this process, from the job's log.

    Use this function to check the result of a job in which trainers failed. The log names the
    trainers that took part in each step. The result has the same bits as the job's parameters and
    optimizer state. With `dtrans.Snapshots(replicas=1)`, the last bits can differ, because servers
    merge gradients in a separate compiled function.

    The job must have started from `job.init`, and all its trainers must have taken the same steps.
    The function does not repeat evictions of table rows.

    Args:
      plan: the job's plan, with the same options. The endpoints may differ.
      log: the file `generations.jsonl` in the folder of `dtrans launch --snapshots`.
      batch: function that maps a step number to the global batch, the arguments of
        `job.shard_batch`.
      init: arguments of `job.init`.
      stop: number of steps of the job.

    Returns:
      (params, opt_state), in the pytrees of the step.

    Raises:
      ConfigError: the plan or a batch cannot be replayed, the log's job has other trainers, or the
        log is incomplete.

    Example:
      >>> import tempfile
      >>> import jax.numpy as jnp, optax, dtrans
      >>> from dtrans.run.net.generation_log import GenerationLog, GenerationRecord
      >>> tx = optax.sgd(0.5)
      >>> step = dtrans.make_train_step(lambda params, x: jnp.mean((params["w"] - x) ** 2), tx)
      >>> init = lambda: (p := {"w": jnp.zeros(1)}, tx.init(p))
      >>> x = jnp.array([[1.0], [5.0]])
      >>> plan = dtrans.pserver(dtrans.trace(step, *init(), x), dtrans.trace(init), trainers=2)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     log = GenerationLog(folder)
      ...     log.add(GenerationRecord(0, None, (0, 1)))
      ...     log.add(GenerationRecord(1, 0, (0,), "trainer 1", "signal SIGKILL"))
      ...     params, _ = dtrans.replay(plan, log.path, lambda step: (x,), init=(), stop=1)
      >>> params["w"].tolist()
      [1.0]
    """
    _check_plan(plan)
    check_int("stop", stop, "a number of steps", least=0)
    records = read_log(log)
    _check_log(plan, records)
    job = _ReplayedJob(plan, init)
    for step, members in enumerate(members_of_steps(records, 0, stop)):
        job.step(step, members, batch(step))
    return job.result(records[-1].members[0])


def _check_plan(plan: Any) -> None:
    if not isinstance(plan, PServerPlan) or not plan.sync_mode:
        raise ConfigError(
            "replay needs a plan of dtrans.pserver with mode=dtrans.Sync(); the log does not have "
            "the order of updates in other modes"
        )
    if plan.shares is not None:
        raise ConfigError(
            "replay cannot run a plan with batch=dtrans.Batch(speeds=...). Such a job drops no "
            "trainers, so plan.simulate() computes the same result; use it instead"
        )
    if plan.devices is not None:
        raise ConfigError(
            f"replay runs trainers with one device, but each trainer of the plan has a mesh of "
            f"{plan.devices}, whose sums have other last bits; use plan.simulate(), whose result "
            "differs from the job's only by rounding"
        )
    if plan.compression.rounding_errors:
        raise ConfigError(
            f"replay: with {plan.compression.packing_option}, gradients depend on rounding "
            "errors of earlier steps, which trainers lose when they start again; replay a plan "
            "with compress='bf16', or without compress"
        )
    if plan.shared is not None and not plan.shared.proven and plan.trainers > 1:
        raise ConfigError(
            f"replay: the step needs values of the full batch ({plan.shared.reason}), which "
            "trainers exchange within a step. Such a job drops no trainers, so plan.on_mesh() "
            "computes the same result; use it instead"
        )


def _check_log(plan: PServerPlan, records: Sequence[GenerationRecord]) -> None:
    """Raise ConfigError if the log has other trainers than the plan, or lacks earlier records."""
    everyone = tuple(range(plan.trainers))
    if not records or records[0].members != everyone:
        found = (
            "no generation" if not records else f"trainers {list(records[0].members)} at its start"
        )
        raise ConfigError(
            f"replay: the log has {found}, but the plan has trainers {list(everyone)}; pass the "
            "log and the plan of the same job"
        )
    if records[0].snapshot is not None:
        raise ConfigError(
            f"replay: the log begins with step {records[0].snapshot}, and replay needs all steps; "
            "pass a log that begins with the start of the job"
        )
    for number, record in enumerate(records):
        if record.generation != number:
            raise ConfigError(
                f"replay: the log lacks generation {number}, and replay needs all generations; "
                "pass the complete log of the job"
            )


class _ReplayedJob:
    """All servers and trainers of a replayed job, as objects in one process.

    Args:
      plan: the plan of the job.
      init: arguments of the user's `init`.
    """

    def __init__(self, plan: PServerPlan, init: Sequence[Any]) -> None:
        self._plan = plan
        self._servers = {}
        with Executor() as executor:
            for ep, programs in plan.servers.items():
                state = executor.run(programs.startup, *init)
                self._servers[ep] = _ReplayedServer(programs, state, plan.trainers)
        self._trainers = [_ReplayedTrainer(plan, k, self._servers) for k in range(plan.trainers)]
        for trainer in self._trainers:
            trainer.start(init)
        self._members: Sequence[int] = range(plan.trainers)  # trainers of the last step

    def step(self, step: int, members: Sequence[int], batch: Sequence[Any]) -> None:
        """Compute one step: some trainers send gradients, all servers update, the trainers receive.

        Args:
          step: number of the step.
          members: ids of the trainers that took part in the step, increasing.
          batch: the batch of all trainers; each trainer takes its part.
        """
        for k in members:
            if k not in self._members:  # a trainer that joins receives the current parameters
                self._trainers[k].params = self._trainers[self._members[0]].params
        self._members = members
        runs = {k: self._trainers[k].step(batch) for k in members}
        for run in runs.values():
            next(run)  # run the trainer until it has sent its gradients
        self._update(frozenset(members), step)
        for k, run in runs.items():
            self._trainers[k].params = _result_of(run)[0]

    def _update(self, members: frozenset[int], step: int) -> None:
        """Run the update of all servers, and pass values such as norms between the servers.

        An update may need values that several servers compute together, such as a gradient norm.
        Then each server pauses until the other servers' vectors have arrived. The loop continues
        the servers that wait for the earliest exchange (smallest `level`) first.
        """
        sent: dict[str, Vectors] = {}  # endpoint of a waiting server -> the vectors that it sends
        for ep, server in self._servers.items():
            vectors = server.begin(members, step)
            if vectors is not None:
                sent[ep] = vectors
        while sent:
            exchanges = {ep: self._servers[ep].exchange for ep in sent}
            level = min(exchange.level for exchange in exchanges.values())
            ready = [ep for ep, exchange in exchanges.items() if exchange.level == level]
            arrived: dict[str, Vectors] = {}
            for ep in ready:
                arrived[ep] = {source: sent[source][ep] for source in exchanges[ep].sources}
            for ep in ready:
                vectors = self._servers[ep].update.go_on(arrived[ep])
                if vectors is None:
                    del sent[ep]
                else:
                    sent[ep] = vectors

    def result(self, trainer: int) -> tuple[Any, Any]:
        """Return (params, opt_state) of the job.

        Arrays that no server stores, such as batch statistics, come from the given trainer.
        """
        states = {ep: server.state for ep, server in self._servers.items()}
        return gather(self._plan, states, self._trainers[trainer].params)


class _ReplayedServer:
    """One server of a replayed job.

    Args:
      programs: the server's programs.
      state: the initial arrays, by name.
      trainers: number of trainers of the job.

    Attributes:
      update: the server's state and its update.
      gradients: the gradients that trainers have passed in the current step, by name.
    """

    def __init__(self, programs: ServerPrograms, state: Mapping[str, Any], trainers: int) -> None:
        update = ServerUpdate.from_program(programs.main)
        tables: set[str] = set()
        for t in update.tables.values():
            if not t.updates_all:
                tables.update(t.arrays)
        values = {**state, **copy_state(omit(state, tables))}
        self.update = SyncUpdate(update, values, trainers)
        self.gradients: dict[str, Any] = {}

    @property
    def exchange(self) -> Any:
        """The exchange with other servers at which this server's update is paused."""
        assert self.update.exchange is not None
        return self.update.exchange

    @property
    def state(self) -> dict[str, Any]:
        """All arrays, by name."""
        return {**self.update.state, **self.update.tables()}

    def begin(self, members: frozenset[int], step: int) -> Vectors | None:
        """Begin the update of a step, with the gradients that the trainers have passed.

        Args:
          members: ids of the trainers that took part in the step.
          step: number of the step.

        Returns:
          Vectors for other servers, if the update needs values of other servers. None if the update
          is complete.
        """
        gradients, self.gradients = self.gradients, {}
        return self.update.begin(gradients, members, step)


class _ReplayedTrainer:
    """One trainer of a replayed job. It calls methods of the servers instead of sending messages.

    Args:
      plan: the plan of the job.
      number: id of the trainer.
      servers: all servers, by endpoint.

    Attributes:
      params: the trainer's parameters.
    """

    def __init__(
        self, plan: PServerPlan, number: int, servers: Mapping[str, _ReplayedServer]
    ) -> None:
        self.params: Any = None
        self._plan, self._number, self._servers = plan, number, servers
        self._calls = TrainerCalls(plan, number)
        self._pieces: dict[Program, Any] = {}
        self._received: list[np.ndarray] = []
        self._rules: dict[Primitive, EquationRule] = {
            **LOCAL_RULES,
            send_p: self._send,
            send_barrier_p: lambda eqn, values: [None],
            recv_p: self._recv,
            fetch_barrier_p: self._fetch_barrier,
            prefetch_p: self._prefetch,
            send_rows_p: self._send_rows,
        }

    def start(self, init: Sequence[Any]) -> None:
        """Receive the initial parameters from the servers.

        Args:
          init: arguments of the user's `init`.
        """
        startup = self._plan.trainer_startup_program(self._number)
        self.params = _result_of(self._run(startup, *init))

    def step(self, batch: Sequence[Any]) -> ProgramRun:
        """Return a generator that takes one step with this trainer's part of a batch.

        The generator pauses once, when the trainer has sent its gradients. The servers then update
        their parameters. The generator continues by receiving the new parameters.

        Args:
          batch: the batch of all trainers.
        """
        plan, part = self._plan, (self._number, self._plan.trainers)
        if plan.trainers > 1:
            uneven = plan.trainers if plan.takes_uneven_batches else 0
            batch = part_of_batch(plan.main.args[2:], batch, part_axes(plan), part, uneven)
        _, rows = without_parts(batch)
        if rows:
            raise ConfigError(
                f"dtrans.replay: the batch has {rows} rows, expected a multiple of the "
                f"{plan.trainers} trainers; with other batches, trainers exchange values within a "
                "step, and dtrans.replay cannot do this; run plan.on_mesh() instead"
            )
        call = self._calls(batch)
        return self._run(call.program, self.params, *call.batch)

    def _run(self, program: Program, *args: Any) -> ProgramRun:
        """Run a program like `Executor.run`, as a generator that yields when gradients are sent."""
        flat = program.flatten(*args)
        program = program.specialize_flat(flat)
        flat = [*map(on_one_device, flat)]
        if program not in self._pieces:
            self._pieces[program] = pieces_for_role(program)
        run = self._pieces[program].run(flat)
        outs: Any = None
        while True:
            try:
                eqn, values = run.send(outs)
            except StopIteration as done:
                return program.out.unflatten(put_on_device(done.value))
            outs = self._rules[eqn.primitive](eqn, values)
            if eqn.primitive is send_barrier_p:
                yield

    # -- equations -------------------------------------------------------------------------------

    def _send(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        for ep, name, x in sent_blocks(eqn, [np.array(x) for x in values]):
            self._servers[ep].gradients[name] = x
        return [None]

    def _recv(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        leaf = received_leaf(eqn)
        memory = np.empty(leaf.shape, leaf.dtype)
        received = []
        for ep, name, block in leaf.blocks(memory):
            block[...] = self._servers[ep].update.values[name]
            received.append(block)
        self._received += received
        return [memory] if len(eqn.params["types"]) == 1 else received

    def _fetch_barrier(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        received, self._received = self._received, []
        return received

    def _prefetch(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        (uniq,), (t,) = values, eqn.params["types"]
        rows = np.empty(t.shape, t.dtype)
        (parts,) = parts_in([eqn], [uniq])
        wanted = rows_wanted(eqn, rows, parts)
        for ep, name, ids, memory in wanted:
            memory[...] = self._servers[ep].update.rows(name, ids, train=True)
        put_in_place(rows, wanted, parts)
        return [rows]

    def _send_rows(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        p, gradient = eqn.params, RowGradient(*map(np.asarray, values))
        for ep, name, span in zip(p["epmap"], p["names"], p["spans"], strict=True):
            self._servers[ep].gradients[name] = part_of_block(span, gradient)
        return [None]


def _result_of(run: ProgramRun) -> Any:
    """Run a paused or new program to its end, and return its result.

    The program may not pause again: all its gradients were already sent.
    """
    try:
        next(run)
    except StopIteration as done:
        return jax.block_until_ready(done.value)
    raise AssertionError("a program has one barrier")
