"""Plans of parameter servers: a program for each role, and the placement of blocks.

See also `server_balance` (bytes on each server), `step_traffic` (bytes that a step sends) and
`plan_notes` (remarks in a printed plan).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, Protocol

import jax

from dtrans.batch.exact_step import ExactStep
from dtrans.checks import is_int
from dtrans.costs import Costs, program_flops
from dtrans.engine.axis_bytes import bytes_by_axis
from dtrans.errors import ConfigError, UnknownEndpointError
from dtrans.ir import fingerprint
from dtrans.ir.display import short_type
from dtrans.ir.program import Program
from dtrans.ir.pytree import TreeSpec, all_names
from dtrans.ir.selection import number_items
from dtrans.parameter_server.compression import Compression
from dtrans.parameter_server.dispatch import HashName, PSDispatcher, RoundRobin, SizeBalanced
from dtrans.parameter_server.options import BlockPlacement, Geo, Mode, Sync
from dtrans.parameter_server.overview import VarsDistributed, overview_of
from dtrans.parameter_server.plan_notes import plan_notes
from dtrans.parameter_server.server_balance import bytes_by_server, compare_dispatchers, imbalance
from dtrans.parameter_server.step_traffic import StepTraffic
from dtrans.parameter_server.tables.choose import Tables
from dtrans.parameter_server.tables.options import Rows
from dtrans.parameter_server.trainer_devices import DeviceProgram, TrainerDevices
from dtrans.parameter_server.trainer_program import TrainerWriter
from dtrans.plan import Plan
from dtrans.slicing.blocks import Placement
from dtrans.slicing.server_update import ServerVariable
from dtrans.step.batch_sharing import Batch
from dtrans.step.halves import UpdateProgram
from dtrans.transfers import RoleTransfer, Transfers


@dataclasses.dataclass(frozen=True, eq=False)
class ServerPrograms:
    """Programs of one parameter server.

    Attributes:
      main: the program that the server runs during the job. It has a single equation,
        `listen_and_serv`, which contains the updates. Its inputs are the server's parameters and
        optimizer state at the start of the job, and its outputs are their values at the end.
      startup: the program that computes the server's initial parameters and optimizer state from
        the arguments of init.
      variables: for each array on the server, by name: the array of the single-device step that
        contains its rows, and the range of these rows.
    """

    main: Program
    startup: Program
    variables: Mapping[str, ServerVariable]


@dataclasses.dataclass(frozen=True)
class PServerOptions:
    """Arguments of `dtrans.pserver` that must be the same in all processes of a job.

    Servers compare a digest of these options with each trainer that connects.

    Attributes:
      mode, placement, on_trainer_exit, batch, trainers, sparse: arguments of `dtrans.pserver`.
      pservers: the number of servers. Their addresses are not included, since two processes may
        reach a server at different addresses.
    """

    mode: Mode
    placement: BlockPlacement
    on_trainer_exit: Literal["drop", "paddle", "error"]
    batch: Batch
    trainers: int
    pservers: int
    sparse: Mapping[str, Rows] | Literal["auto"] | None

    @property
    def push_every(self) -> int:
        """The number of steps between two pushes of changes with `dtrans.Geo`; 0 in other modes."""
        return self.mode.push_every if isinstance(self.mode, Geo) else 0


class TrainerProgramWriter(Protocol):
    """Interface of the object that writes the program of each trainer."""

    @property
    def runtime_split(self) -> bool:
        """True if programs send and receive full arrays, which the runtime cuts into the servers'
        blocks.

        If False, the programs themselves slice gradients into blocks, and concatenate received
        blocks.
        """

    def program(self, trainer_id: int) -> Program:
        """Return the program of one trainer."""

    def startup(self, trainer_id: int) -> Program:
        """Return the startup program of one trainer, which receives the initial parameters from
        servers.
        """


@dataclasses.dataclass(frozen=True)
class ServedUpdate:
    """Properties of the optimizer's update as servers run it, for the notes and checks of a plan.

    Attributes:
      frozen: names of parameters that servers do not update: either nothing changes them, or each
        trainer has its own value.
      unsent: names of parameters that servers update without a gradient (a moving average, say).
      shared_state: names of optimizer state that belongs to no parameter, such as a step count.
        Each server that reads it has a copy.
      sized: the update with inputs in place of numbers that depend on the batch size, such as 1/n.
        Trainers send these numbers with each step. None if the update has no such number.
      sent_values: source lines of the values that trainers compute from the batch and send to the
        update.
      fixed_size: name of an output of the update that is wrong for other batch sizes than the
        traced one. Empty if the plan works with all batch sizes.
      has_one_size: True if the step can be traced neither with twice nor with half the planned
        rows. dtrans then does not know if the update depends on the batch size.
    """

    frozen: tuple[str, ...] = ()
    unsent: tuple[str, ...] = ()
    shared_state: tuple[str, ...] = ()
    sized: UpdateProgram | None = dataclasses.field(default=None, repr=False)
    sent_values: tuple[str, ...] = ()
    fixed_size: str = ""
    has_one_size: bool = False


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PServerPlan(Plan):
    """Plan of a job with parameter servers, as `dtrans.pserver` returns it.

    The plan has a program for each trainer and each server. `plan.simulate()`, `plan.on_mesh()` and
    `plan.on_cluster()` run these programs.

    Attributes:
      main: the single-device step. Each equation has a role, such as `forward` or `optimize`.
      startup: the single-device init.
      options: the arguments of `dtrans.pserver`.
      placement: all blocks (ranges of rows of a parameter), and the server of each block.
      servers: programs of each server, by endpoint.
      trainer_writer: writer of the trainers' programs.
      update: properties of the update that servers run.
      tables: parameters, such as large embeddings, from which trainers request single rows.
      shared: the split of the batch over trainers, with which the job computes the same results as
        one device on the full batch. None if each trainer runs the step independently, or if there
        is one trainer.
      callback_notes: for each host callback of the step (`jax.debug.print`, say), a sentence that
        says which process calls it.
      compression: the types in which gradients and parameters are sent.
      devices: the devices of each trainer; None for trainers with one device.
    """

    main: Program
    startup: Program
    options: PServerOptions
    placement: Placement
    servers: Mapping[str, ServerPrograms]
    trainer_writer: TrainerProgramWriter = dataclasses.field(compare=False)
    update: ServedUpdate
    tables: Tables = dataclasses.field(compare=False)
    shared: ExactStep | None = dataclasses.field(default=None, compare=False)
    callback_notes: tuple[str, ...] = ()
    compression: Compression = dataclasses.field(default_factory=Compression)
    devices: TrainerDevices | None = dataclasses.field(default=None, compare=False)

    _right, _code, _header = (1, 2), 0, ("block", "rows", "bytes", "endpoint")

    def __post_init__(self) -> None:
        mains = {ep: dataclasses.replace(x.main, plan=self) for ep, x in self.servers.items()}
        servers = {ep: dataclasses.replace(x, main=mains[ep]) for ep, x in self.servers.items()}
        object.__setattr__(self, "servers", _Servers(servers))

    # -- options ---------------------------------------------------------------------------------

    @property
    def trainers(self) -> int:
        """The number of trainers."""
        return self.options.trainers

    @property
    def sync_mode(self) -> bool:
        """True if an update waits for the gradients of all trainers."""
        return isinstance(self.options.mode, Sync)

    @property
    def push_every(self) -> int:
        """The number of steps between two pushes of changes with `dtrans.Geo`; 0 in other modes."""
        return self.options.push_every

    @property
    def frozen(self) -> tuple[str, ...]:
        """Parameters that servers do not update: constants, and each trainer's own parameters."""
        return self.update.frozen

    @property
    def takes_uneven_batches(self) -> bool:
        """True if a batch may have any size, not only multiples of the number of trainers."""
        return self.shared is not None and self.sync_mode

    @property
    def shares(self) -> Callable[[int], tuple[int, ...]] | None:
        """Function that divides the rows of a batch over trainers of different speeds.

        For speeds (2, 1), `plan.shares(9)` is (6, 3): trainer 0 gets 6 rows, and trainer 1 gets 3.
        None if all trainers get equally many rows.
        """
        has_shares = self.shared is not None and bool(self.shared.shares)
        return self.options.batch.shares if has_shares else None

    # -- programs --------------------------------------------------------------------------------

    @property
    def programs(self) -> dict[str, Program]:
        trainers = {f"trainer {k}": self.trainer_program(k) for k in range(self.trainers)}
        return trainers | {ep: programs.main for ep, programs in self.servers.items()}

    @property
    def trainer(self) -> Program:
        """The program of trainer 0: (params, *batch) -> (params, loss[, aux]).

        With `dtrans.Geo` it is (params, opt_state, *batch) -> (params, opt_state, loss[, aux]).
        With error feedback (`dtrans.Sync(compress="int8")`), `(params, rounding_errors)` replaces
        params.
        """
        return self.trainer_program(0)

    @property
    def trainer_startup(self) -> Program:
        """The startup program of trainer 0: init's arguments -> params.

        With `dtrans.Geo` it also returns the optimizer state.
        """
        return self.trainer_startup_program(0)

    @cached_property
    def levels(self) -> tuple[PServerPlan, ...]:
        """One plan for each density of `dtrans.TopK`; without it, only this plan.

        With `dtrans.TopK`, trainers send a fraction of each gradient (the density), which may
        decrease during the job. The plans differ in the programs of trainers, and in the bytes of a
        step. The last one is this plan.
        """
        plans = []
        for compression in self.compression.levels:
            if compression.level == self.compression.level:
                plans.append(self)
                continue
            assert isinstance(self.trainer_writer, TrainerWriter)
            side = self.trainer_writer.with_compression(compression)
            plans.append(dataclasses.replace(self, trainer_writer=side, compression=compression))
        return tuple(plans)

    def trainer_program(self, trainer_id: int) -> Program:
        """Return one trainer's program; raise ConfigError for an unknown id."""
        check_trainer_id(trainer_id, self.trainers)
        return self._cached(self.trainer_writer.program, trainer_id)

    def trainer_startup_program(self, trainer_id: int) -> Program:
        """Return one trainer's startup program; raise ConfigError for an unknown id."""
        check_trainer_id(trainer_id, self.trainers)
        return self._cached(self.trainer_writer.startup, trainer_id)

    def on_devices(self, program: Program) -> DeviceProgram | None:
        """Return the program of one device, if each trainer has several devices; otherwise None.

        Args:
          program: a trainer's program of this plan, for any batch size.
        """
        if self.devices is None or program.in_names != self.trainer.in_names:
            return None
        return self.devices.divide(program)

    @cached_property
    def device_program(self) -> DeviceProgram | None:
        """The program of one device of trainer 0; None for trainers with one device."""
        return self.on_devices(self.trainer)

    def for_uneven_batch(
        self, types: Sequence[jax.ShapeDtypeStruct], trainer_id: int
    ) -> tuple[ExactStep, Program]:
        """Return the split of a batch of any size, and one trainer's program for this split.

        An example is the last batch of a data set: 10 rows for 4 trainers.

        Args:
          types: types of the inputs of `main` with the rows of this batch, before the split.
          trainer_id: id of the trainer.
        """
        assert self.shared is not None and isinstance(self.trainer_writer, TrainerWriter)
        return self.trainer_writer.uneven(self.shared, types, trainer_id)

    def _cached(self, write: Callable[[int], Program], trainer_id: int) -> Program:
        """Return `write(trainer_id)`; later calls return the same object.

        A `Program` caches its compiled code, so a new object would be compiled again.
        """
        key = write.__name__, trainer_id
        if key not in self._programs:
            self._programs[key] = dataclasses.replace(write(trainer_id), plan=self)
        return self._programs[key]

    @cached_property
    def _programs(self) -> dict[tuple[str, int], Program]:
        return {}

    @cached_property
    def identity(self) -> dict[str, str]:
        """Digests (hashes) of the parts of a plan that must be equal in all processes of a job.

        The result is a dict by name. If a trainer has other digests than a server, the server
        refuses the trainer, and the error names the differing ones (`dtrans.ir.fingerprint`).
        Digests contain a server's index instead of its address, since processes may reach a server
        at different addresses.
        """
        index = number_items(self.servers)
        blocks = [(b.name, b.span, index[b.endpoint]) for b in self.placement.all_blocks]
        options = {n: fingerprint.canonical_text(x) for n, x in vars(self.options).items()}
        update = {}
        if self.update.sized is not None:
            # This digest is equal for all batch sizes, so roles may trace different sizes.
            update["update"] = fingerprint.output_digest(self.update.sized)
        mesh = {} if self.devices is None else {"mesh": fingerprint.digest(str(self.devices))}
        return {
            **fingerprint.environment(),
            **mesh,
            "options": fingerprint.table(options),
            "state": fingerprint.table(self._input_types(self.main.args[:2])),
            fingerprint.BATCH: fingerprint.table(self._input_types(self.main.args[2:])),
            "init": self.startup.fingerprint,
            "placement": fingerprint.digest(fingerprint.canonical_text(blocks)),
            **self.main.fingerprints,
            **update,
        }

    def _input_types(self, specs: Sequence[TreeSpec]) -> dict[str, str]:
        """Return the types of some inputs of `main` as text, by the input's name."""
        types = {}
        for n in all_names(specs):
            types[n] = short_type(self.main.inputs[n])
        return types

    @property
    def trainer_specs(self) -> tuple[TreeSpec, ...]:
        """Structures of a trainer's state, which are the first arguments of a trainer's program."""
        params, opt_state = self.main.args[:2]
        if self.push_every:
            return params, opt_state
        return (self.compression.trainer_spec(params),)

    # -- state of servers ------------------------------------------------------------------------

    @cached_property
    def overview(self) -> VarsDistributed:
        """Table of all arrays on the servers: name, origin in the step, rows, and server.

        Source: Paddle's `program._parameters_on_pservers`.
        """
        variables = {ep: programs.variables for ep, programs in self.servers.items()}
        params = frozenset(self.main.args[0].names)
        return overview_of(variables, self.main.inputs, params, self.tables.of)

    @cached_property
    def server_bytes(self) -> dict[str, dict[str, int]]:
        """Bytes of parameters and of optimizer state on each server."""
        return bytes_by_server(self.overview, self.servers)

    @property
    def balance(self) -> float:
        """Bytes on the fullest server, divided by the mean over servers; 1.0 is the optimum."""
        return imbalance([sum(sizes.values()) for sizes in self.server_bytes.values()])

    def compare(self, *split_methods: type[PSDispatcher]) -> dict[str, float]:
        """Return the `balance` that this plan would have with each dispatcher, by class name.

        The optimizer state of a block is on the block's server. State that belongs to no parameter,
        such as a step count, is counted on every server that has a block. In a plan, only servers
        that read such state store it, so `plan.balance` can differ slightly.

        Args:
          split_methods: subclasses of `PSDispatcher`; by default RoundRobin, HashName and
            SizeBalanced.

        Raises:
          ConfigError: a class is not a dispatcher, or does not return a server for each block.

        Example:
          >>> import jax, jax.numpy as jnp, optax, dtrans
          >>> tx, shapes = optax.adam(1e-3), {"b": (90,), "u": (400,), "w": (5, 90)}
          >>> def loss(params, x):
          ...     return jnp.mean((x @ params["w"] + params["b"] + params["u"].sum()) ** 2)
          >>> init = lambda: (p := {n: jnp.ones(shape) for n, shape in shapes.items()}, tx.init(p))
          >>> main = dtrans.trace(dtrans.make_train_step(loss, tx), *init(), jnp.ones((8, 5)))
          >>> servers = "127.0.0.1:6174,127.0.0.1:6175"
          >>> plan = dtrans.pserver(main, dtrans.trace(init), pservers=servers)
          >>> {name: round(balance, 2) for name, balance in plan.compare().items()}
          {'RoundRobin': 1.15, 'HashName': 1.04, 'SizeBalanced': 1.04}
        """
        blocks = self.traffic.optimize_blocks
        methods = split_methods or (RoundRobin, HashName, SizeBalanced)
        return compare_dispatchers(self.placement, self.overview, blocks, self.trainers, methods)

    # -- cost ------------------------------------------------------------------------------------

    @cached_property
    def traffic(self) -> StepTraffic:
        """The values that the roles send in a step, and their bytes."""
        servers = {ep: programs.main for ep, programs in self.servers.items()}
        return StepTraffic(
            self.trainer,
            servers,
            self.placement,
            self.update.unsent,
            self.tables,
            self.trainers,
            self.push_every,
            self.compression,
        )

    @property
    def bytes_per_step(self) -> dict[str, int]:
        """Bytes that one trainer sends ("send") and receives ("recv") in a step.

        For tables the bytes are an upper bound. With `dtrans.Geo` they are the bytes of
        `push_every` steps.
        """
        return self.traffic.bytes_per_step

    def _role_costs(self) -> Costs:
        costs = self.traffic.costs({ep: sum(x.values()) for ep, x in self.server_bytes.items()})
        if self.shares is None:
            return costs
        trainer, *servers = costs
        trainers = []
        for k, speed in enumerate(self.options.batch.speeds):
            flops = program_flops(self.trainer_program(k))
            trainers.append(
                dataclasses.replace(trainer, role=_role(k), count=1, flops=flops, speed=speed)
            )
        return Costs([*trainers, *servers], costs.link_steps)

    def transfers(self) -> Transfers:
        transfers = self.traffic.transfers()
        if self.device_program is not None:
            moved = bytes_by_axis(self.device_program.program.jaxpr)
            for (kind, axis), size in moved.items():
                inside = "trainer", "devices of the trainer", f"{kind} over {axis}", size
                transfers = Transfers((*transfers, RoleTransfer(*inside)))
        if self.shares is None:
            return transfers
        found = []
        for t in transfers:
            for k in range(self.trainers if "trainer" in (t.source, t.target) else 1):
                ends = [_role(k) if end == "trainer" else end for end in (t.source, t.target)]
                found.append(dataclasses.replace(t, source=ends[0], target=ends[1]))
        return Transfers(found)

    # -- description -----------------------------------------------------------------------------

    @cached_property
    def rows(self) -> list[tuple[str, str, str, str]]:
        """The placement table: block, rows, bytes, endpoint."""
        table = []
        for b in self.placement.all_blocks:
            rows = "-" if b.span is None else str(b.span)
            table.append((b.name, rows, f"{b.nbytes:,}", b.endpoint))
        return table

    @cached_property
    def notes(self) -> list[str]:
        """Remarks below the placement table: batch split, traffic, uncut leaves, and others."""
        return plan_notes(self)

    @property
    def _title(self) -> str:
        mode = "sync" if self.sync_mode else "async"
        if self.push_every:
            mode = "geo"
        trainers = f"{self.trainers} trainers"
        if self.devices is not None:
            trainers += f" with a mesh of {self.devices}"
        return f"pserver plan of {self.main.name}: {trainers}, {len(self.servers)} pservers, {mode}"


def _role(trainer_id: int) -> str:
    """Return the name of a trainer for tables of costs, such as "trainer 1"."""
    return f"trainer {trainer_id}"


class _Servers(dict[str, ServerPrograms]):
    """Dict of programs by endpoint; its error for an unknown endpoint lists all endpoints."""

    def __missing__(self, endpoint: str) -> ServerPrograms:
        raise UnknownEndpointError(
            f"{endpoint!r} is not a pserver of this plan; its pservers are {', '.join(self)}"
        )


def check_trainer_id(trainer_id: Any, trainers: int) -> None:
    """Raise ConfigError unless 0 <= trainer_id < trainers."""
    if not is_int(trainer_id) or not 0 <= trainer_id < trainers:
        raise ConfigError(
            f"trainer_id is {trainer_id!r}; with {trainers} trainers, expected an integer from 0 "
            f"to {trainers - 1}"
        )


def check_trainer_endpoint(
    trainer_id: Any, current_endpoint: Any, endpoints: Sequence[str]
) -> None:
    """Raise ConfigError unless `endpoints[trainer_id]` is `current_endpoint`.

    Args:
      trainer_id: the id of this trainer.
      current_endpoint: the endpoint of this trainer.
      endpoints: the endpoints of all trainers, by id.
    """
    check_trainer_id(trainer_id, len(endpoints))
    if current_endpoint not in endpoints:
        raise ConfigError(
            f"current_endpoint is {current_endpoint!r}; expected one of the trainers' endpoints "
            f"{','.join(endpoints)}"
        )
    if endpoints[trainer_id] != current_endpoint:
        other = list(endpoints).index(current_endpoint)
        raise ConfigError(
            f"current_endpoint is {current_endpoint}, the endpoint of trainer {other}; expected "
            f"{endpoints[trainer_id]}, the endpoint of trainer {trainer_id}"
        )
