"""Writer of the trainers' programs.

    forward, backward
    after each gradient   `split_byref` (if the leaf has several blocks), `send`
    at the end            `send_barrier`, a `recv` for each parameter, `fetch_barrier`, and `concat`
                          for leaves of several blocks

If messages are compressed, equations encode the blocks before each `send`, and decode parameters
after `concat` (`dtrans.parameter_server.compression`).

Programs of asynchronous trainers have no barriers. With `runtime_split`, `send` and `recv` transfer
full leaves, so `split_byref` and `concat` are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import JaxprEqn, ShapedArray, Var
from dtrans.batch.exact_step import ExactStep
from dtrans.ir.array_fns import is_key, keys_of, times, words_type
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import backward_slice
from dtrans.ir.program import DIST, FORWARD, RPC, Program
from dtrans.ir.pytree import replace_child, without
from dtrans.ir.selection import subset, values_at
from dtrans.ops import (
    CommunicatorConfig,
    concat_p,
    decoded,
    fake_init_p,
    fetch_barrier_p,
    recv_p,
    send_barrier_p,
    send_p,
    send_rows_p,
    split_byref_p,
)
from dtrans.parameter_server.averaged_leaves import add_averages
from dtrans.parameter_server.compression import (
    MOMENTUM,
    ROUNDING_ERROR,
    STEPS,
    Compression,
    count_step,
    encoded_blocks,
    sent_name,
    zeros,
)
from dtrans.parameter_server.exchange_rounds import TRAINERS, sort_by_rounds
from dtrans.parameter_server.tables.lookups import find_lookups
from dtrans.parameter_server.tables.trainer_rows import TableWriter, without_unused
from dtrans.slicing.blocks import Block, Placement, argument
from dtrans.step.batch_numbers import BatchNumbers
from dtrans.step.forward_backward import HalfWriter, write_trainer_half
from dtrans.step.halves import GRAD, DividedStep, check_same_update, divide_step
from dtrans.step.handed_values import hand_over
from dtrans.step.observers import FORWARD as READS_BATCH, GRADIENTS, call_once


@dataclasses.dataclass(frozen=True)
class TrainerCommConfig:
    """Options of the communication between trainers and servers.

    Attributes:
      trainers: the number of trainers.
      sync_mode: True if an update uses the gradients of all trainers.
      runtime_split: True if the runtime cuts full leaves into the servers' blocks; False if the
        trainer's program has equations for this.
      half_async: with `runtime_split`, True if a step waits until its gradients are sent and new
        parameters are received.
      communicator: options of the communicator, which sends and receives in the background; None if
        the step itself sends and receives.
      averages: leaves without gradients, such as batch statistics, that trainers compute and
        servers average.
      argument_servers: for each step argument that the update reads, such as a learning rate, the
        servers that need it.
      state_servers: for each array of the optimizer state that the forward pass reads, its server.
      tables: embedding tables. Trainers request single rows of a table instead of the full leaf.
      callbacks_on_first_trainer: True if only trainer 0 calls host callbacks.
      scale: factor by which trainers multiply gradients. Servers average gradients. If the full
        gradient is the sum of the trainers' gradients, the factor is therefore the number of
        trainers; otherwise it is 1.
      batch_size_numbers: numbers in the update that depend on the batch size, such as 1/n. Trainers
        send them with the gradients.
      batch_arrays: names of the arrays of the batch. If the update reads a value that the forward
        pass computes from these arrays, trainers send this value too. None if trainers cannot send
        values; a step with such an update is then an error.
      compression: the types in which gradients and parameters are sent.
    """

    trainers: int
    sync_mode: bool
    runtime_split: bool = False
    half_async: bool = False
    communicator: CommunicatorConfig | None = None
    averages: tuple[str, ...] = ()
    argument_servers: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    state_servers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    scale: int = 1
    tables: tuple[str, ...] = ()
    callbacks_on_first_trainer: bool = False
    batch_size_numbers: BatchNumbers = dataclasses.field(default_factory=BatchNumbers)
    batch_arrays: tuple[str, ...] | None = None
    compression: Compression = dataclasses.field(default_factory=Compression)

    def hand_over(self, step: DividedStep) -> DividedStep:
        """Add inputs to the update for values that the forward pass computes; return the new step.

        Servers run the update, but only trainers run the forward pass. So trainers must send each
        value of the forward pass that the update reads.
        """
        if self.batch_arrays is None:
            return step
        return hand_over(step, self.batch_arrays, drawn=True)

    def server_update(self, step: DividedStep) -> DividedStep:
        """Return the step with the optimizer's update as servers run it.

        This update has inputs for the values that trainers send. It also averages the leaves in
        `averages`.
        """
        return add_averages(
            self.batch_size_numbers.as_inputs_of(self.hand_over(step)), self.averages
        )

    @property
    def gradients_per_update(self) -> int:
        """The number of gradients that an update combines."""
        return self.trainers if self.sync_mode else 1


@dataclasses.dataclass(frozen=True)
class TrainerWriter:
    """Writer of the trainers' programs of one plan.

    Attributes:
      step: the step on one trainer's part of the batch, with the update that servers run.
      placement: every block and its server.
      init: the single-device init.
      comm: options of the communication with servers.
      shared: the split of the batch over trainers, if the job computes the same results as one
        device on the full batch. None if each trainer runs the step independently.
    """

    step: DividedStep
    placement: Placement
    init: Program
    comm: TrainerCommConfig
    shared: ExactStep | None = None

    @property
    def runtime_split(self) -> bool:
        """True if the runtime, not the program, cuts full leaves into the servers' blocks."""
        return self.comm.runtime_split

    def with_compression(self, compression: Compression) -> TrainerWriter:
        """Return the writer of programs that send gradients in other types."""
        comm = dataclasses.replace(self.comm, compression=compression)
        return dataclasses.replace(self, comm=comm)

    def program(self, trainer_id: int) -> Program:
        """Return the program of one trainer: (params, *batch) -> (params, loss[, aux])."""
        if self.shared is not None and self.shared.for_trainer is not None:
            part = self.shared.for_trainer(1, trainer_id)
            return self._of_part(part, trainer_id, self.comm)
        return write_trainer(self.step, self.placement, trainer_id, self.comm)

    def startup(self, trainer_id: int) -> Program:
        """Return the startup program of one trainer: init's arguments -> params."""
        return write_trainer_startup(self.step, self.placement, self.init, trainer_id, self.comm)

    def uneven(
        self, shared: ExactStep, types: Sequence[jax.ShapeDtypeStruct], trainer_id: int
    ) -> tuple[ExactStep, Program]:
        """Return the split and a trainer's program for a batch that cannot be split evenly.

        An example is a batch of 10 rows for 4 trainers. Each trainer's part of the batch is padded
        to `ceil(rows / trainers)` rows, here 3. With `Batch.speeds`, parts have different numbers
        of rows, without padding.

        Args:
          shared: the split of batches that can be split evenly.
          types: types of the inputs of the full step, for the size of the batch.
          trainer_id: index of the trainer.
        """
        if shared.for_trainer is not None:
            part = shared.for_trainer(types, trainer_id)
            return part, self._of_part(part, trainer_id, self.comm)
        uneven = shared.for_types(types)
        # The gradients of parts of different sizes add up to the full gradient. A server that
        # takes the mean divides by the number of trainers, so each trainer first multiplies its
        # gradient by this number.
        scale = self.comm.trainers
        if shared.reduce == "sum":
            scale = self.comm.scale
        comm = dataclasses.replace(self.comm, scale=scale)
        return uneven, self._of_part(uneven, trainer_id, comm)

    def _of_part(self, part: ExactStep, trainer_id: int, comm: TrainerCommConfig) -> Program:
        """Return the program of one trainer for another split of the batch.

        Servers do not know the split. So the step must have the same update for all splits.

        Raises:
          BatchError: the step has another update for this split.
        """
        step = comm.server_update(divide_step(part.step.program))
        check_same_update(self.step, step)
        return write_trainer(step, self.placement, trainer_id, comm)


def write_trainer(
    step: DividedStep, placement: Placement, trainer_id: int, comm: TrainerCommConfig
) -> Program:
    """Return the program of one trainer: (params, *batch) -> (params, loss[, aux])."""
    if comm.gradients_per_update == 1:
        # Each update uses one trainer's gradient, so callbacks on this trainer may read it.
        step = step.with_observers(GRADIENTS, READS_BATCH)
    source = step.program
    vars_of = source.invars
    b = Builder(source.jaxpr)
    empty = {n: Var(without_rows(vars_of[n].aval)) for n in comm.tables}
    writer = TrainerCommWriter(b, placement, trainer_id, comm)
    b.invars += [empty.get(n, vars_of[n]) for n in step.params]
    writer.take_rounding_errors()
    b.invars += values_at(vars_of, step.batch)

    # Receive the optimizer state that forward reads.
    writer.receive_state(subset(vars_of, comm.state_servers))

    # Write forward and backward, with a send after each gradient.
    rounds = sort_by_rounds(placement.endpoints, trainer_id, comm.trainers)
    on_rows = writer.on_rows(step)
    results = write_trainer_half(b, step, step.results, writer.send, on_rows, rounds)

    # Send the arguments of the update, and receive the new parameters.
    for n, servers in comm.argument_servers.items():
        value: Any = vars_of.get(n)
        if n in step.numbers:
            value = b.constant(step.numbers[n])
        elif n in step.handed:
            value = results[n]
        writer.send_argument(n, value, servers)
    new = writer.finish([n for n in step.optimized if n not in comm.tables])
    outs = {**source.outvars, **results, **new, **empty, **writer.new_rounding_errors}
    if comm.tables:
        without_unused(b, values_at(outs, out_names(step)))
    if comm.callbacks_on_first_trainer and comm.trainers > 1:
        call_once(b, TRAINERS)

    def rewrite(source: Program) -> Program:
        other = comm.server_update(divide_step(source))
        check_same_update(step, other)
        return write_trainer(other, placement, trainer_id, comm)

    state, out = source.args[0], without(source.out, source.args[1])
    if comm.compression.rounding_errors:
        state = comm.compression.trainer_spec(state)
        out = replace_child(out, source.args[0], state)
    args = (state, *source.args[2:])
    program = Program.written(f"trainer {trainer_id}", b, args, out, outs)
    return source.rewritten(rewrite, result=program)


def out_names(step: DividedStep) -> tuple[str, ...]:
    """Return the names of a trainer program's outputs.

    These are the step's outputs without the optimizer state, which only servers store.
    """
    return tuple(without(step.program.out, step.program.args[1]).names)


def without_rows(aval: Any) -> Any:
    """Return the type `aval` with 0 rows: a trainer stores no rows of a server's table."""
    return aval.update(shape=(0, *aval.shape[1:]))


def write_trainer_startup(
    step: DividedStep,
    placement: Placement,
    startup: Program,
    trainer_id: int,
    comm: TrainerCommConfig,
) -> Program:
    """Return the program that a trainer runs at the start of a job to get its first parameters.

    The program receives parameters from the servers. It computes the leaves that servers do not
    store.
    """
    b, outs = write_start(startup, step.frozen)
    received = [n for n in step.optimized if n not in comm.tables]
    outs |= TrainerCommWriter(b, placement, trainer_id, comm).receive_initial(received)
    b.role = DIST
    for n in comm.tables:
        t = step.program.inputs[n]
        (outs[n],) = b.bind(fake_init_p, table=n, shape=t.shape, dtype=t.dtype)
    for n, t in comm.compression.rounding_error_types.items():
        (outs[n],) = b.call(zeros(t.shape, t.dtype))
    spec = comm.compression.trainer_spec(step.program.args[0])
    return Program.written(f"trainer {trainer_id} startup", b, startup.args, spec, outs)


def write_start(startup: Program, leaves: Sequence[str]) -> tuple[Builder, dict[str, Any]]:
    """Begin a startup program with the equations of the init that compute `leaves`.

    Returns:
      The builder of the program, and all outputs of the init by name.
    """
    inner = startup.inner
    outs: dict[str, Any] = startup.outvars
    b = Builder(startup.jaxpr)
    b.invars += inner.invars
    b.role = FORWARD
    needed, _ = backward_slice(inner.eqns, values_at(outs, leaves))
    for i in needed:
        b.keep(inner.eqns[i])
    return b, outs


def row_location(table: str, blocks: Sequence[Block]) -> dict[str, Any]:
    """Return the equation parameters that name the server of each row of a table."""
    spans = tuple(x.span for x in blocks)
    return {"table": table, "epmap": _endpoints(blocks), "spans": spans}


def _endpoints(blocks: Sequence[Block]) -> tuple[str, ...]:
    return tuple(x.endpoint for x in blocks)


def _names(blocks: Sequence[Block]) -> tuple[str, ...]:
    return tuple(x.name for x in blocks)


def _row_counts(blocks: Sequence[Block]) -> tuple[int, ...]:
    return tuple(x.rows for x in blocks)


class TrainerCommWriter:
    """Writer of the equations by which one trainer communicates with servers.

    Args:
      b: builder of the trainer's program.
      placement: every block and its server.
      trainer_id: index of the trainer.
      comm: options of the communication with servers.
    """

    def __init__(
        self, b: Builder, placement: Placement, trainer_id: int, comm: TrainerCommConfig
    ) -> None:
        self.b = b
        self.placement = placement
        self.comm = comm
        self.me = {"trainer_id": trainer_id}
        self.common = {
            "trainer_id": trainer_id,
            "trainers": comm.trainers,
            "sync_mode": comm.sync_mode,
        }
        # The outputs of `send` equations are operands of a barrier, so that it follows the sends.
        self.tokens: list[Var] = []
        self._tables: TableWriter | None = None
        self._rounding_errors: dict[str, Var] = {}  # name -> rounding error before the step
        self.new_rounding_errors: dict[str, Any] = {}  # name -> rounding error after the step

    def take_rounding_errors(self) -> None:
        """Add an input for each rounding error to the program.

        Compressed gradients are rounded. The trainer stores the rounding error of each gradient,
        and adds it to the next gradient. If the trainer also counts its steps (`dtrans.TopK`), this
        method writes the equation that increases the count.
        """
        types = self.comm.compression.rounding_error_types
        for name in self.comm.compression.rounding_error_spec.names:
            self._rounding_errors[name] = self.b.input(types[name])
        steps = f"{ROUNDING_ERROR}/{STEPS}"
        if steps in self._rounding_errors:
            self.b.role = DIST
            (self.new_rounding_errors[steps],) = self.b.call(
                count_step, self._rounding_errors[steps]
            )

    def on_rows(self, step: DividedStep) -> Callable[..., HalfWriter] | None:
        """Return a function that creates the writer of a step with embedding tables; None without
        tables.

        Such a step looks up rows of a table that servers store. The writer replaces each lookup by
        a request to the servers.
        """
        if not self.comm.tables:
            return None
        found = find_lookups(step, self.comm.tables)
        assert not found.refused, found.refused
        tables = subset(step.program.invars, self.comm.tables)
        locations = {}
        for n in tables:
            names = _names(self.placement.blocks[n])
            locations[n] = {**self._row_location(n), "names": names}

        def writer(eqns: Sequence[JaxprEqn], roles: Sequence[str], ends: Any) -> HalfWriter:
            jaxpr = step.program.jaxpr
            self._tables = TableWriter(self.b, jaxpr, found, tables, locations, eqns, roles)
            return self._tables

        return writer

    def _row_location(self, leaf: str) -> dict[str, Any]:
        """Return the parameters of an equation that sends or receives rows of a table."""
        blocks = self.placement.blocks[leaf]
        return {**row_location(leaf, blocks), **self._background, **self.common}

    @property
    def _background(self) -> dict[str, Any]:
        """The equation parameter `communicator`: options of the thread that sends and receives.

        Empty if the plan has no such thread.
        """
        if self.comm.communicator is None:
            return {}
        return {"communicator": self.comm.communicator}

    def _at_run_time(self, blocks: Sequence[Block]) -> dict[str, Any]:
        """Return the parameters by which a `send` or `recv` cuts or joins a leaf's blocks.

        The result is empty if the program has separate equations that cut and concatenate leaves.
        """
        if not self.comm.runtime_split:
            return {}
        return {"sections": _row_counts(blocks), **self._background}

    def send(self, leaf: str, grad: Any) -> None:
        """Write the `send` of a gradient, after a `split_byref` if the leaf has several blocks."""
        trainer_id, count = self.me["trainer_id"], self.comm.gradients_per_update
        blocks = self.placement.blocks[leaf]
        names = tuple(x.gradient(trainer_id, count) for x in blocks)
        if self.comm.scale != 1:
            (grad,) = self.b.call(times(self.comm.scale), grad)
        if isinstance(grad, Var):
            self.b.labels.setdefault(grad, leaf + GRAD)

        if leaf in self.comm.tables:
            assert self._tables is not None
            self.b.role = RPC
            params = {"names": names, **self._row_location(leaf), **self._merge(leaf)}
            self.tokens += self.b.bind(send_rows_p, self._tables.uniq[leaf], grad, **params)
            return

        parts: list[Any] = [grad]
        if leaf in self.comm.compression.gradients:
            parts = self._encode(leaf, grad)
            self.b.labels.update(zip(parts, names, strict=True))
        elif len(blocks) > 1 and not self.comm.runtime_split:
            self.b.role = DIST
            parts = self.b.bind(split_byref_p, grad, sections=_row_counts(blocks))
            self.b.labels.update(zip(parts, names, strict=True))
        self.b.role = RPC
        params = {"epmap": _endpoints(blocks), "names": names, **self._merge(leaf)}
        params |= {**self._at_run_time(blocks), **self.common, **self._level(leaf)}
        self.tokens += self.b.bind(send_p, *parts, **params)

    def _level(self, leaf: str) -> dict[str, Any]:
        """Return the equation parameter `level`, from which servers know how to decode a gradient.

        It is an index into the densities of `dtrans.TopK` (fractions of a gradient that are sent).
        """
        compression = self.comm.compression
        if leaf not in compression.gradients or len(compression.levels) == 1:
            return {}
        return {"level": compression.level}

    def _encode(self, leaf: str, grad: Any) -> list[Any]:
        """Write the equations that encode the blocks of a gradient; return the encoded blocks."""
        self.b.role = DIST
        wire = self.comm.compression.gradients[leaf]
        sections = _row_counts(self.placement.blocks[leaf])
        compression = self.comm.compression
        # the order of `encoded_blocks`: the rounding error, then the momentum
        names = [f"{ROUNDING_ERROR}/{leaf}", f"{ROUNDING_ERROR}/{MOMENTUM}/{leaf}"]
        state = {n: self._rounding_errors[n] for n in names if n in self._rounding_errors}
        clip = None
        if compression.topk is not None:
            clip = compression.topk.clip_at(compression.level, self.comm.trainers)
        encode = encoded_blocks(wire, sections, compression.topk, clip)
        encoded = self.b.call(encode, grad, *state.values())
        parts = encoded[: len(sections)]
        self.new_rounding_errors.update(zip(state, encoded[len(sections) :], strict=True))
        return parts

    def _merge(self, leaf: str) -> dict[str, Any]:
        """Return the equation parameter `merge`: the rule that merges gradients of several steps.

        The communicator, a background thread, merges gradients that it has not sent yet.
        """
        if self.comm.communicator is None:
            return {}
        if leaf in self.comm.averages:
            return {"merge": "newest"}
        return {"merge": self.comm.communicator.merge}

    def receive_state(self, state: Mapping[str, Var]) -> None:
        """Write the equations that receive the optimizer state that the forward pass reads.

        Servers store the optimizer state. But the forward pass of some steps reads a part of it,
        such as a step count.

        Args:
          state: for each name of an array, the step's variable that the received array replaces.
        """
        if not state:
            return
        b = self.b
        b.role = RPC
        endpoints = self.comm.state_servers
        arrived: list[Var] = []
        for n, v in state.items():
            params = {"epmap": (endpoints[n],), "names": (n,), "types": (words_type(v.aval),)}
            arrived += b.bind(recv_p, **params, **self.common)
        servers = tuple(dict.fromkeys(endpoints.values()))
        received = b.bind(fetch_barrier_p, *arrived, endpoints=servers, **self.me)

        # The barrier's outputs become the step's variables. Random keys are sent as integers, so an
        # equation that converts them defines the step's variable.
        outvars: list[Var] = []
        keys: dict[Var, Var] = {}
        for x, v in zip(received, state.values(), strict=True):
            if is_key(v.aval.dtype):
                keys[x] = v
                outvars.append(x)
            else:
                outvars.append(v)
        b.eqns[-1] = b.eqns[-1].replace(outvars=outvars)
        b.role = DIST
        for x, v in keys.items():
            b.call(keys_of(str(jax.random.key_impl(jnp.zeros((), v.aval.dtype)))), x)
            b.eqns[-1] = b.eqns[-1].replace(outvars=[v])

    def send_argument(self, name: str, value: Any, servers: Sequence[str]) -> None:
        """Write the `send` of an argument of the update to the servers that need it."""
        if not servers:
            return
        # The copy has the traced type, even if the user passes a Python number.
        (value,) = self.b.call(jnp.copy, value)
        self.b.role = RPC
        sent_name = argument(name, self.comm.gradients_per_update).sent[self.me["trainer_id"]]
        values, names = [value] * len(servers), (sent_name,) * len(servers)
        self.tokens += self.b.bind(
            send_p, *values, epmap=tuple(servers), names=names, **self.common
        )

    def finish(self, leaves: Sequence[str]) -> dict[str, Var]:
        """Write the end of a step: a `send_barrier` in synchronous mode, and a `recv` of each leaf.

        Returns:
          The received parameters, by leaf.
        """
        after = self.tokens
        if self.comm.sync_mode or (self.comm.runtime_split and self.comm.half_async):
            self.b.role = RPC
            params = {"half_async": True} if self.comm.runtime_split else {}
            after = self.b.bind(
                send_barrier_p, *after, endpoints=self.placement.endpoints, **params, **self.me
            )
        if self.comm.runtime_split:
            return self.receive_full(leaves, after)
        # With tables, the fetch barrier keeps the next step from looking up rows before all
        # gradients of this step are sent.
        barrier = self.comm.sync_mode or bool(self.comm.tables)
        return self.receive_blocks(leaves, after, barrier=barrier)

    def receive_full(self, leaves: Sequence[str], after: Sequence[Var]) -> dict[str, Var]:
        """Write one `recv` for each full parameter; return the received parameters by leaf.

        The `recv` itself joins the blocks of the servers when the step runs, so the program needs
        no `concat`.
        """
        self.b.role = RPC
        new: dict[str, Var] = {}
        if not leaves:
            # If all leaves are tables, no `recv` waits for the sends, so a barrier does.
            params = {**self._background, **self.common}
            self.b.bind(fetch_barrier_p, endpoints=self.placement.endpoints, **params)
        for leaf in leaves:
            blocks = self.placement.blocks[leaf]
            shape = blocks[0].shape
            if shape:
                shape = (sum(_row_counts(blocks)), *shape[1:])
            (new[leaf],) = self.b.bind(
                recv_p,
                *after,
                epmap=_endpoints(blocks),
                names=_names(blocks),
                types=(ShapedArray(shape, blocks[0].dtype),),
                **self._at_run_time(blocks),
                **self.common,
            )
            self.b.labels[new[leaf]] = leaf
        return new

    def receive_initial(self, leaves: Sequence[str]) -> dict[str, Var]:
        """Write equations that receive the initial parameters; return these by leaf."""
        return self.receive_blocks(leaves, (), barrier=True)

    def receive_blocks(
        self, leaves: Sequence[str], after: Sequence[Var], *, barrier: bool
    ) -> dict[str, Var]:
        """Write the `recv` of each leaf's blocks, and the `concat` of leaves with several blocks.

        Args:
          leaves: names of the leaves to receive.
          after: outputs of equations that must run before each `recv`, such as a barrier after all
            sends.
          barrier: True to write a `fetch_barrier` after the last `recv`.

        Returns:
          The received leaves, by name.
        """
        b, compression = self.b, self.comm.compression
        b.role = RPC
        arrived: list[Var] = []
        for leaf in leaves:
            blocks, wire = self.placement.blocks[leaf], compression.params.get(leaf)
            names = tuple(sent_name(x.name, wire) for x in blocks)
            received = b.bind(
                recv_p,
                *after,
                epmap=_endpoints(blocks),
                names=names,
                types=tuple(map(compression.sent_param, blocks)),
                **self.common,
            )
            b.labels.update(zip(received, names, strict=True))
            arrived += received
        if barrier:
            # If all leaves are tables, there is no `recv`. The barrier then gets the parameters
            # that a `recv` would have, such as `sync_mode`.
            params = self.me if arrived else self.common
            endpoints = self.placement.endpoints
            arrived = b.bind(fetch_barrier_p, *arrived, endpoints=endpoints, **params)

        b.role = DIST
        new: dict[str, Var] = {}
        first = 0
        for leaf in leaves:
            blocks, wire = self.placement.blocks[leaf], compression.params.get(leaf)
            names = tuple(sent_name(x.name, wire) for x in blocks)
            parts: list[Any] = arrived[first : first + len(names)]
            first += len(names)
            if len(parts) > 1:
                b.labels.update(zip(parts, names, strict=True))
                parts = list(b.bind(concat_p, *parts, axis=0))
            if wire is not None:
                shape = parts[0].aval.shape
                parts = b.call(decoded(wire, shape, blocks[0].dtype), *parts)
            (new[leaf],) = parts
        return new
