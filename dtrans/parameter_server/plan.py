"""Plans of parameter servers: a program for each role, where every block lives, and what a step
moves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, Protocol

import jax

from dtrans.batch.exact_step import ExactStep, shard_step
from dtrans.checks import is_int
from dtrans.costs import Costs
from dtrans.errors import BatchError, ConfigError, UnknownEndpointError
from dtrans.ir import fingerprint
from dtrans.ir.display import short_type
from dtrans.ir.program import OPTIMIZE, Program
from dtrans.ops import backup_of
from dtrans.parameter_server.dispatch import HashName, PSDispatcher, RoundRobin, SizeBalanced
from dtrans.parameter_server.exchange_rounds import TRAINERS
from dtrans.parameter_server.options import BlockPlacement, Geo, Mode, Sync
from dtrans.parameter_server.overview import VarsDistributed, overview_of
from dtrans.parameter_server.placement import dispatched
from dtrans.parameter_server.step_traffic import StepTraffic
from dtrans.parameter_server.tables.choose import Tables
from dtrans.parameter_server.tables.options import Rows
from dtrans.parameter_server.trainer_program import TrainerSide
from dtrans.plan import Plan
from dtrans.slicing.blocks import Placement
from dtrans.slicing.server_update import ServerVariable
from dtrans.step.batch_sharing import Batch
from dtrans.step.cut import OptimizeHalf, cut


@dataclasses.dataclass(frozen=True, eq=False)
class ServerPrograms:
    """The two programs of one parameter server.

    Attributes:
      main: one `listen_and_serv`, on the server's state.
      startup: makes that state.
      held: what of the step each array of that state is.
    """

    main: Program
    startup: Program
    held: Mapping[str, ServerVariable]


@dataclasses.dataclass(frozen=True)
class PServerOptions:
    """Options of `dtrans.pserver`, equal in all roles of a job.

    Attributes:
      mode, placement, on_trainer_exit, batch, trainers, sparse: as the arguments of `dtrans.pserver`.
      pservers: number of servers. Their endpoints are in the plan's placement.
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
        """Steps from one push of changes to the next with `Geo`; otherwise 0."""
        return self.mode.push_every if isinstance(self.mode, Geo) else 0


class TrainerPrograms(Protocol):
    """Writer of the trainers' programs."""

    @property
    def runtime_split(self) -> bool:
        """True if trainers cut leaves into blocks at run time, and their programs do not."""

    def program(self, trainer_id: int) -> Program:
        """Return the program of one trainer."""

    def startup(self, trainer_id: int) -> Program:
        """Return the startup program of one trainer."""


@dataclasses.dataclass(frozen=True)
class ServedUpdate:
    """The update of a plan, by what servers need for it.

    Attributes:
      frozen: parameters that servers do not update: constants, and those of each trainer.
      unsent: parameters on the servers whose update uses no gradient.
      shared_state: optimizer state that belongs to no parameter. Every server that reads it has it.
      sized: the update with its numbers of the size of the batch as inputs, which trainers send with
        each step; None if it has no such number.
      sent_values: the user's lines of the values of the batch that trainers send for the update.
      fixed_size: an output of the update that ties a plan to one size of the batch; empty if there
        is none.
    """

    frozen: tuple[str, ...] = ()
    unsent: tuple[str, ...] = ()
    shared_state: tuple[str, ...] = ()
    sized: OptimizeHalf | None = dataclasses.field(default=None, repr=False)
    sent_values: tuple[str, ...] = ()
    fixed_size: str = ""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PServerPlan(Plan):
    """Parameter-server training of one step; made by `dtrans.pserver`.

    Attributes:
      main: the step, with calls inlined and exact roles.
      startup: the single-device init.
      options: the arguments of `dtrans.pserver`.
      placement: every block and its server.
      servers: endpoint to the programs of that server.
      trainer_side: writer of the trainers' programs.
      update: the update, with the requirements of servers.
      tables: leaves that trainers have by rows only: the rows that they look up.
      shared: the split of the batch of an exact step; None if it is not exact.
      callers: a sentence for each host callback of the step, naming the role that calls it.
    """

    main: Program
    startup: Program
    options: PServerOptions
    placement: Placement
    servers: Mapping[str, ServerPrograms]
    trainer_side: TrainerPrograms = dataclasses.field(compare=False)
    update: ServedUpdate
    tables: Tables = dataclasses.field(compare=False)
    shared: ExactStep | None = dataclasses.field(default=None, compare=False)
    callers: tuple[str, ...] = ()

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
        """Steps from one push of changes to the next with `dtrans.Geo`; otherwise 0."""
        return self.options.push_every

    @property
    def frozen(self) -> tuple[str, ...]:
        """Parameters that servers do not update: constants, and those of each trainer."""
        return self.update.frozen

    @property
    def takes_uneven_batches(self) -> bool:
        """True if trainers can share a batch whose rows they do not divide."""
        return self.shared is not None and self.sync_mode

    # -- programs --------------------------------------------------------------------------------

    @property
    def programs(self) -> dict[str, Program]:
        trainers = {f"trainer {k}": self.trainer_program(k) for k in range(self.trainers)}
        return trainers | {ep: programs.main for ep, programs in self.servers.items()}

    @property
    def trainer(self) -> Program:
        """The program of trainer 0: (params, *batch) -> (params, loss[, aux]); with opt_state in
        GEO-SGD."""
        return self.trainer_program(0)

    @property
    def trainer_startup(self) -> Program:
        """The startup program of trainer 0: the arguments of init -> params; and opt_state in
        GEO-SGD."""
        return self.trainer_startup_program(0)

    def trainer_program(self, trainer_id: int) -> Program:
        """Return one trainer's program. Raises ConfigError for an unknown id."""
        check_trainer_id(trainer_id, self.trainers)
        return self._cached(self.trainer_side.program, trainer_id)

    def trainer_startup_program(self, trainer_id: int) -> Program:
        """Return one trainer's startup program. Raises ConfigError for an unknown id."""
        check_trainer_id(trainer_id, self.trainers)
        return self._cached(self.trainer_side.startup, trainer_id)

    def for_whole(
        self, types: Sequence[jax.ShapeDtypeStruct], trainer_id: int
    ) -> tuple[ExactStep, Program]:
        """Return how trainers share a batch that they do not divide, and a trainer's program for it.

        Args:
          types: of the inputs of `main`, with the batch of all trainers.
        """
        assert self.shared is not None and isinstance(self.trainer_side, TrainerSide)
        return self.trainer_side.uneven(self.shared, types, trainer_id)

    def _cached(self, write: Callable[[int], Program], trainer_id: int) -> Program:
        """Return a program that is written once, with its compiled code."""
        key = write.__name__, trainer_id
        if key not in self._programs:
            self._programs[key] = dataclasses.replace(write(trainer_id), plan=self)
        return self._programs[key]

    @cached_property
    def _programs(self) -> dict[tuple[str, int], Program]:
        return {}

    @cached_property
    def identity(self) -> dict[str, str]:
        """Return the values that all roles must have in common, by part: see
        `dtrans.ir.fingerprint`.

        A server is identified by its index, since roles may know it by several addresses.
        """
        at = {ep: i for i, ep in enumerate(self.servers)}
        table = [(b.name, b.span, at[b.endpoint]) for b in self.placement.table]
        state = {
            n: short_type(self.main.inputs[n]) for spec in self.main.args[:2] for n in spec.names
        }
        batch = {
            n: short_type(self.main.inputs[n]) for spec in self.main.args[2:] for n in spec.names
        }
        update = {}
        if self.update.sized is not None:
            # roles may trace the step with batches of different sizes
            update["update"] = fingerprint.output_digest(self.update.sized)
        return {
            **fingerprint.environment(),
            "options": fingerprint.table(
                {n: fingerprint.canonical_text(x) for n, x in vars(self.options).items()}
            ),
            "state": fingerprint.table(state),
            fingerprint.BATCH: fingerprint.table(batch),
            "init": self.startup.fingerprint,
            "placement": fingerprint.digest(fingerprint.canonical_text(table)),
            **self.main.fingerprints,
            **update,
        }

    # -- what servers hold -----------------------------------------------------------------------

    @cached_property
    def overview(self) -> VarsDistributed:
        """Every array that servers hold, parameters and optimizer state: of what, which rows,
        where.

        Source: Paddle's `program._parameters_on_pservers`.
        """
        held = {ep: programs.held for ep, programs in self.servers.items()}
        return overview_of(held, self.main.inputs, frozenset(self.main.args[0].names))

    @cached_property
    def server_bytes(self) -> dict[str, dict[str, int]]:
        """Bytes held by each server: of parameters, and of optimizer state."""
        found = {ep: {"params": 0, "opt_state": 0} for ep in self.servers}
        for row in self.overview:
            found[row.endpoint]["params" if row.vtype == "Param" else "opt_state"] += row.nbytes
        return found

    @property
    def balance(self) -> float:
        """Bytes of the fullest server over the mean of all, parameters and optimizer state: 1.0 is
        even."""
        return _unevenness([sum(sizes.values()) for sizes in self.server_bytes.values()])

    def compare(self, *split_methods: type[PSDispatcher]) -> dict[str, float]:
        """Return the values that `balance` would have with other dispatchers, by their names.

        Each dispatcher places the blocks of this plan, with the optimizer state that belongs to
        them. State that belongs to no parameter (counts of steps) is taken to be on every server
        that has a block. If an optimizer needs it on fewer, a plan made with that dispatcher may
        differ by those bytes.

        Args:
          split_methods: subclasses of `PSDispatcher`; by default RoundRobin, HashName and
            SizeBalanced.

        Raises:
          ConfigError: one that is not a dispatcher, or does not answer with a server for each
            block.

        Example:
          >>> import jax, jax.numpy as jnp, optax, dtrans
          >>> tx, shapes = optax.adam(1e-3), {"b": (90,), "u": (400,), "w": (5, 90)}
          >>> loss = lambda params, x: jnp.mean((x @ params["w"] + params["b"] + params["u"].sum()) ** 2)
          >>> init = lambda: (p := {name: jnp.ones(shape) for name, shape in shapes.items()}, tx.init(p))
          >>> main = dtrans.trace(dtrans.make_train_step(loss, tx), *init(), jnp.ones((8, 5)))
          >>> plan = dtrans.pserver(main, dtrans.trace(init), pservers="127.0.0.1:6174,127.0.0.1:6175")
          >>> {name: round(balance, 2) for name, balance in plan.compare().items()}
          {'RoundRobin': 1.15, 'HashName': 1.04, 'SizeBalanced': 1.04}
        """
        makes = {
            n: b.name
            for b in self.traffic.optimize_blocks
            if b.role == OPTIMIZE
            for n in b.out_names
        }
        for unit in (u for units in self.placement.units.values() for u in units):
            makes |= {
                backup_of(b.name, k): unit.name for b in unit.blocks for k in range(self.trainers)
            }
        params = {b.name for b in self.placement.table}
        state: dict[str, int] = {}
        shared: dict[str, int] = {}
        for row in self.overview:
            if row.slice_name in params:
                continue
            if row.slice_name in makes:
                owner = makes[row.slice_name]
                state[owner] = state.get(owner, 0) + row.nbytes
            else:
                shared[row.slice_name] = row.nbytes
        everywhere = sum(shared.values())
        found = {}
        for method in split_methods or (RoundRobin, HashName, SizeBalanced):
            units = dispatched(self.placement, method).units.values()
            sizes = [
                sum(u.nbytes + state.get(u.name, 0) for u in us) + (everywhere if us else 0)
                for us in units
            ]
            found[method.__name__] = _unevenness(sizes)
        return found

    # -- cost ------------------------------------------------------------------------------------

    @cached_property
    def traffic(self) -> StepTraffic:
        """The values that roles send in a step."""
        servers = {ep: programs.main for ep, programs in self.servers.items()}
        return StepTraffic(
            self.trainer,
            servers,
            self.placement,
            self.update.unsent,
            self.tables,
            self.trainers,
            self.push_every,
        )

    @property
    def bytes_per_step(self) -> dict[str, int]:
        """Bytes that one trainer sends (gradients) and receives (parameters) in a step that does;
        an upper bound for tables."""
        return self.traffic.bytes_per_step

    def costs(self) -> Costs:
        return self.traffic.costs({ep: sum(x.values()) for ep, x in self.server_bytes.items()})

    # -- showing ---------------------------------------------------------------------------------

    @cached_property
    def rows(self) -> list[tuple[str, str, str, str]]:
        """The placement table: block, rows, bytes, endpoint."""
        table = []
        for b in self.placement.table:
            table.append(
                (b.name, "-" if b.span is None else str(b.span), f"{b.nbytes:,}", b.endpoint)
            )
        return table

    @cached_property
    def notes(self) -> list[str]:
        """Return remarks: bytes of servers, reasons for whole leaves, state that trainers store."""
        notes = [] if self.shared is None else list(self.shared.notes)
        if self.shared is None and self.trainers > 1 and not self.push_every:
            notes.append(self._local_note())
        for endpoint, size in self.server_bytes.items():
            notes.append(
                f"{endpoint} holds {size['params']:,} bytes of parameters, {size['opt_state']:,} "
                "of optimizer state"
            )
        if len(self.servers) > 1:
            notes.append(f"the fullest server holds {self.balance:.2f} times the mean")
        notes += self.traffic.notes
        for leaf, reason in self.placement.unsliced.items():
            notes.append(f"{leaf}: whole on {self.placement.blocks[leaf][0].endpoint}: {reason}")
        where: dict[str, list[str]] = {}
        for name in self.update.shared_state:
            holders = [row.endpoint for row in self.overview.by_origin(name)]
            everywhere = len(holders) == sum(bool(units) for units in self.placement.units.values())
            where.setdefault("every server" if everywhere else " and ".join(holders), []).append(
                name
            )
        for servers, names in where.items():
            notes.append(f"on {servers}: {', '.join(names)}")
        notes += self.callers
        if self.update.sized is not None:
            notes.append(
                "the update has numbers of the size of the batch, which trainers send with each "
                "step: those of the "
                "batch that is given, whatever was traced"
            )
        if self.update.sent_values:
            lines = ", ".join(dict.fromkeys(self.update.sent_values))
            notes.append(
                "the update reads values that trainers make of the batch and send with each step: "
                f"{lines}"
            )
        if self.update.fixed_size and self.shared is not None:
            notes.append(
                f"the new {self.update.fixed_size} depends on the size of the batch: batches have "
                f"{self.shared.rows} rows, "
                f"which are those of {self.trainers} traced ones; for others trace the step with a "
                "trainer's part"
            )
        if self.frozen:
            notes.append(f"on the trainers only: {', '.join(self.frozen)}")
        return notes

    def _local_note(self) -> str:
        """Return the note of a plan whose trainers take the step on their parts alone."""
        step = cut(self.main).with_reported()
        try:
            return shard_step(step, self.options.batch, self.trainers, TRAINERS).local_note
        except BatchError as e:
            # of arrays that `plan.on_mesh(unsplit_inputs=...)` replicates: the plan cannot know them
            return (
                "local: each part has its own numbers, averaged; one device's are not looked at: "
                f"{e}"
            )

    @property
    def _title(self) -> str:
        mode = "geo" if self.push_every else "sync" if self.sync_mode else "async"
        return (
            f"pserver plan of {self.main.name}: {self.trainers} trainers, {len(self.servers)} "
            f"pservers, {mode}"
        )


def _unevenness(sizes: Sequence[int]) -> float:
    """Return the largest size over the mean; 1.0 if all are 0."""
    return max(sizes) * len(sizes) / sum(sizes) if any(sizes) else 1.0


class _Servers(dict[str, ServerPrograms]):
    """Endpoint to programs; an unknown endpoint is named in the error."""

    def __missing__(self, endpoint: str) -> ServerPrograms:
        raise UnknownEndpointError(
            f"{endpoint!r} is not a pserver of this plan; its pservers are {', '.join(self)}"
        )


def check_trainer_id(trainer_id: Any, trainers: int) -> None:
    """Raises ConfigError unless 0 <= trainer_id < trainers."""
    if not is_int(trainer_id) or not 0 <= trainer_id < trainers:
        raise ConfigError(
            f"trainer_id {trainer_id!r} is out of range: with {trainers} trainers it is one of 0 "
            f"to {trainers - 1}"
        )


def check_trainer_endpoint(
    trainer_id: Any, current_endpoint: Any, endpoints: Sequence[str]
) -> None:
    """Raises ConfigError unless that trainer of an nccl2 job is at that endpoint."""
    check_trainer_id(trainer_id, len(endpoints))
    if current_endpoint not in endpoints:
        raise ConfigError(
            f"the current endpoint {current_endpoint!r} is not one of the trainers': "
            f"{','.join(endpoints)}"
        )
    if endpoints[trainer_id] != current_endpoint:
        raise ConfigError(
            f"trainer {trainer_id} is at {endpoints[trainer_id]}; the current endpoint "
            f"{current_endpoint} is that of "
            f"trainer {list(endpoints).index(current_endpoint)}"
        )
