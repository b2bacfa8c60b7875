"""Plans of parameter servers: a program for each role, where every block lives, and what a step
moves."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np

from dtrans._jax import JaxprEqn
from dtrans.batch.exact_step import ExactStep
from dtrans.checks import is_int
from dtrans.costs import Costs, RoleCost, program_flops
from dtrans.errors import ConfigError, UnknownEndpointError
from dtrans.ir import fingerprint
from dtrans.ir.cost import flops, nbytes
from dtrans.ir.display import short_type
from dtrans.ir.program import DIST, OPTIMIZE, Program
from dtrans.ops import OptimizeBlock, all_reduce_p, backup_of, exchange_p, send_rows_p
from dtrans.parameter_server.dispatch import HashName, PSDispatcher, RoundRobin, SizeBalanced
from dtrans.parameter_server.overview import VarsDistributed, overview_of
from dtrans.parameter_server.placement import dispatched
from dtrans.parameter_server.tables.choose import ID, Tables, notes_of
from dtrans.plan import Plan
from dtrans.slicing.blocks import Placement
from dtrans.slicing.server_update import ServerVariable
from dtrans.step.cut import OptimizeHalf


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A value that servers reduce together.

    Attributes:
      name: the same on every server.
      op: `sum`, `max`, ...
      shape, dtype: of the value.
      owners: the servers that have parts of it.
      over: the servers that take part: those, and the ones that need it.
    """

    name: str
    op: str
    shape: tuple[int, ...]
    dtype: Any
    owners: tuple[str, ...]
    over: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


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


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PServerPlan(Plan):
    """Parameter-server training of one step; made by `dtrans.pserver`.

    Attributes:
      main: the step, with calls inlined and exact roles.
      startup: the single-device init.
      placement: every block and where it lives.
      trainers: how many trainers there are.
      sync_mode: whether updates wait for all of them.
      servers: endpoint to the programs of that server.
      frozen: parameters that servers do not update: they never change, or each trainer makes its
        own.
      unsent: parameters on the servers whose update uses no gradient.
      callers: sentences of who calls each host callback of the step.
      shared_state: optimizer state that lives with no leaf, since no row enters it, or only through
        reductions; it is on every server that needs it.
      runtime_split: leaves are cut into blocks when trainers run, not by their programs.
      shared: how the batch is cut, where it is exact.
      local_note: says what one device's numbers would take; None where nobody knows.
      for_whole: says how a batch is shared that trainers do not divide, and gives a trainer's
        program for it, from the types of the inputs of `main` and the trainer's number: parts are
        padded. None where they must divide it.
      tables: leaves of which trainers have only the rows that they look up.
      push_every: in GEO-SGD, after how many steps a trainer sends and receives; otherwise 0, and
        each does.
      options: what the user has said, by the names of arguments: the same in all roles.
      sized_update: the update with its numbers of the size of the batch as inputs, which trainers
        send with each step; None where it has none.
      sent_values: the user's lines that make values of the batch which trainers send for the
        update.
      fixed_size: an output of the update that ties a plan to one size of the batch; empty where
        there is none.
    """

    main: Program
    startup: Program
    placement: Placement
    trainers: int
    sync_mode: bool
    servers: Mapping[str, ServerPrograms]
    frozen: tuple[str, ...]
    unsent: tuple[str, ...]
    callers: tuple[str, ...]
    shared_state: tuple[str, ...]
    runtime_split: bool
    make_trainer: Callable[[int], Program] = dataclasses.field(repr=False)
    make_trainer_startup: Callable[[int], Program] = dataclasses.field(repr=False)
    push_every: int = 0
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    shared: ExactStep | None = dataclasses.field(default=None, repr=False)
    local_note: Callable[[], str] | None = dataclasses.field(default=None, repr=False)
    for_whole: Callable[[Sequence[jax.ShapeDtypeStruct], int], tuple[ExactStep, Program]] | None = (
        dataclasses.field(default=None, repr=False)
    )

    tables: Tables = dataclasses.field(default_factory=Tables, repr=False)
    sized_update: OptimizeHalf | None = dataclasses.field(default=None, repr=False)
    sent_values: tuple[str, ...] = ()
    fixed_size: str = ""

    _right, _code, _header = (1, 2), 0, ("block", "rows", "bytes", "endpoint")

    def __post_init__(self) -> None:
        mains = {
            ep: dataclasses.replace(x.main, identity=lambda: self.identity)
            for ep, x in self.servers.items()
        }
        servers = {ep: dataclasses.replace(x, main=mains[ep]) for ep, x in self.servers.items()}
        object.__setattr__(self, "servers", _Servers(servers))

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
        """The program of one trainer. Raises ConfigError for an id that the plan does not have."""
        check_trainer_id(trainer_id, self.trainers)
        return self._made(self.make_trainer, trainer_id)

    def trainer_startup_program(self, trainer_id: int) -> Program:
        """The startup program of one trainer. Raises ConfigError for an id that the plan does not
        have."""
        check_trainer_id(trainer_id, self.trainers)
        return self._made(self.make_trainer_startup, trainer_id)

    def _made(self, make: Callable[[int], Program], trainer_id: int) -> Program:
        """A program, made once: what is compiled for it is kept with it."""
        if (make, trainer_id) not in self._programs:
            self._programs[make, trainer_id] = dataclasses.replace(
                make(trainer_id), identity=lambda: self.identity
            )
        return self._programs[make, trainer_id]

    @cached_property
    def _programs(self) -> dict[tuple[Callable[[int], Program], int], Program]:
        return {}

    @cached_property
    def identity(self) -> dict[str, str]:
        """What all roles must have in common, in parts: see `dtrans.ir.fingerprint`.

        A server is known by its place among all, since roles may know it by several addresses.
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
        if (
            self.sized_update is not None
        ):  # roles may trace the step with batches of different sizes
            update["update"] = fingerprint.output_digest(self.sized_update)
        return {
            **fingerprint.environment(),
            "options": fingerprint.table(
                {n: fingerprint.canonical_text(x) for n, x in self.options.items()}
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
        """What `balance` would be with other dispatchers, by their names.

        It puts the blocks of this plan where each would have them, with the optimizer state that
        belongs to them. State that belongs to no parameter (counts of steps) is taken to be on
        every server that has a block; where an optimizer needs it on fewer, the plan made with that
        dispatcher may differ by those bytes.

        Args:
          split_methods: subclasses of `PSDispatcher`; by default dtrans's own, RoundRobin, HashName
            and SizeBalanced.

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
            n: b.name for b in self._optimize_blocks if b.role == OPTIMIZE for n in b.out_names
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

    def costs(self) -> Costs:
        step, unsent = self.bytes_per_step, set(self.unsent)
        held = sum(
            nbytes(self.trainer.inputs[n]) for spec in self.trainer.args[:1] for n in spec.names
        )
        own = program_flops(self.trainer)
        told = [(r.params["endpoint"], *_moved(r)) for r in self.exchanges]
        sends, receives = (sum(t[i] for t in told) for i in (1, 2))
        found = [
            RoleCost(
                "trainer",
                self.trainers,
                held,
                step["send"] + sends,
                step["recv"] + receives,
                1 + len(told),
                own,
            )
        ]
        for ep, programs in self.servers.items():
            blocks = [b for b in self.placement.table if b.endpoint == ep]
            reduced = [r for values in self.rounds for r in values if ep in r.over]
            sent = sum(r.nbytes * (len(r.over) - 1) for r in reduced if ep in r.owners)
            heard = sum(r.nbytes * (len(r.owners) - (ep in r.owners)) for r in reduced)
            sent += self.trainers * sum(receives for at, _, receives in told if at == ep)
            heard += self.trainers * sum(sends for at, sends, _ in told if at == ep)
            grads = sum(b.nbytes for b in blocks if b.leaf not in unsent)
            grads += sum(told.get(ep, 0) for told in self.arguments.values())
            (serve,) = programs.main.eqns
            work = sum(flops(e) for block in serve.params["optimize_blocks"] for e in block.eqns)
            params = sum(b.nbytes for b in blocks)
            rounds = 1 + sum(any(ep in r.over for r in values) for values in self.rounds)
            rounds += sum(at == ep for at, _, _ in told)
            size = sum(self.server_bytes[ep].values())
            found.append(
                RoleCost(
                    ep,
                    1,
                    size,
                    self.trainers * params + sent,
                    self.trainers * grads + heard,
                    rounds,
                    work,
                )
            )
        return Costs(found)

    @cached_property
    def bytes_per_step(self) -> dict[str, int]:
        """Bytes that one trainer sends (gradients) and receives (parameters) in a step that does;
        of tables at most."""
        unsent = set(self.unsent)
        whole = [b for b in self.placement.table if not b.is_table]
        push = sum(b.nbytes for b in whole if b.leaf not in unsent)
        push += sum(n for told in self.arguments.values() for n in told.values())
        sends, receives = (sum(of[i] for of in self._moved_rows.values()) for i in (0, 1))
        return {"send": push + sends, "recv": sum(b.nbytes for b in whole) + receives}

    @property
    def _moved_rows(self) -> dict[str, tuple[int, int]]:
        """Bytes that one trainer sends and receives at most of each table.

        In GEO-SGD they are those of `push_every` steps, where none of its rows was looked up
        before, and where all trainers make as many steps.
        """
        found = {}
        for n, t in self.tables.of.items():
            first, size = self.placement.blocks[n][0], t.lookups.size
            row = first.nbytes // first.rows
            if not self.push_every:
                found[n] = size * (row + self._id_bytes), size * row
                continue
            touched = min(t.lookups.rows, self.push_every * size)
            changed = min(t.lookups.rows, (self.trainers - 1) * touched)
            found[n] = touched * (row + 2 * ID), touched * row + changed * (row + ID)
        return found

    @property
    def _id_bytes(self) -> int:
        """For the number of a row: it is said again with the gradient where that waits for
        others."""
        return ID * (
            1
            + any(
                e.primitive is send_rows_p and "communicator" in e.params for e in self.trainer.eqns
            )
        )

    @cached_property
    def arguments(self) -> dict[str, dict[str, int]]:
        """Arguments of the step that the update reads: name to the bytes that each server is sent,
        by its endpoint."""
        found: dict[str, dict[str, int]] = {}
        for ep, programs in self.servers.items():
            for block in (x for eqn in programs.main.eqns for x in eqn.params["optimize_blocks"]):
                types = block.invars
                for g in (g for g in block.grads if g.op == "same"):
                    found.setdefault(g.leaf, {})[ep] = nbytes(types[g.name].aval)
        return found

    @cached_property
    def exchanges(self) -> tuple[JaxprEqn, ...]:
        """What trainers exchange in the middle of a step: the `exchange` equations of trainer 0,
        one for each round."""
        return tuple(eqn for eqn in self.trainer.eqns if eqn.primitive is exchange_p)

    @cached_property
    def rounds(self) -> tuple[tuple[Reduction, ...], ...]:
        """What servers tell each other in a step: for each round, the values that they reduce
        together."""
        found: dict[int, dict[str, Reduction]] = {}
        for block in self._optimize_blocks:
            for eqn in block.eqns if block.role == DIST else ():
                if eqn.primitive is all_reduce_p and len(eqn.params["over"]) > 1:
                    p, aval = eqn.params, eqn.outvars[0].aval
                    reduction = Reduction(
                        p["name"], p["op"], aval.shape, aval.dtype, p["owners"], p["over"]
                    )
                    found.setdefault(block.level, {})[p["name"]] = reduction
        return tuple(tuple(found[level].values()) for level in sorted(found))

    @cached_property
    def _optimize_blocks(self) -> tuple[OptimizeBlock, ...]:
        """The blocks of work of all servers."""
        serves = (eqn for programs in self.servers.values() for eqn in programs.main.eqns)
        return tuple(block for eqn in serves for block in eqn.params["optimize_blocks"])

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
        """What else there is to know: bytes, whole leaves and why, what stays with the trainers."""
        notes = [] if self.shared is None else list(self.shared.notes)
        if self.local_note is not None and self.shared is None and self.trainers > 1:
            notes.append(self.local_note())
        for endpoint, size in self.server_bytes.items():
            notes.append(
                f"{endpoint} holds {size['params']:,} bytes of parameters, {size['opt_state']:,} "
                "of optimizer state"
            )
        if len(self.servers) > 1:
            notes.append(f"the fullest server holds {self.balance:.2f} times the mean")
        step = self.bytes_per_step
        often = f"in {self.push_every} steps" if self.push_every else "per step"
        notes.append(
            f"each of {self.trainers} trainers sends {step['send']:,} and receives "
            f"{step['recv']:,} bytes {often}"
        )
        if self.exchanges:
            sends, receives = map(sum, zip(*map(_moved, self.exchanges), strict=True))
            count, rounds = sum(len(r.invars) for r in self.exchanges), len(self.exchanges)
            notes.append(
                f"in the middle of a step trainers exchange {count} values through the pservers, "
                f"in {rounds} "
                f"round{'s' * (rounds > 1)}; each sends {sends:,} and receives {receives:,} bytes"
            )
        for i, values in enumerate(self.rounds):
            told = sum(r.nbytes for r in values)
            notes.append(
                f"round {i + 1} among pservers: {len(values)} values, {told:,} bytes from each at "
                "most"
            )
        notes += notes_of(
            self.tables,
            {n: sum(x) for n, x in self._moved_rows.items()},
            f" {often}" * bool(self.push_every),
        )
        for leaf, reason in self.placement.unsliced.items():
            notes.append(f"{leaf}: whole on {self.placement.blocks[leaf][0].endpoint}: {reason}")
        where: dict[str, list[str]] = {}
        for name in self.shared_state:
            holders = [row.endpoint for row in self.overview.by_origin(name)]
            everywhere = len(holders) == sum(bool(units) for units in self.placement.units.values())
            where.setdefault("every server" if everywhere else " and ".join(holders), []).append(
                name
            )
        for servers, names in where.items():
            notes.append(f"on {servers}: {', '.join(names)}")
        notes += self.callers
        if self.sized_update is not None:
            notes.append(
                "the update has numbers of the size of the batch, which trainers send with each "
                "step: those of the "
                "batch that is given, whatever was traced"
            )
        if self.sent_values:
            lines = ", ".join(dict.fromkeys(self.sent_values))
            notes.append(
                "the update reads values that trainers make of the batch and send with each step: "
                f"{lines}"
            )
        if self.fixed_size and self.shared is not None:
            notes.append(
                f"the new {self.fixed_size} depends on the size of the batch: batches have "
                f"{self.shared.rows} rows, "
                f"which are those of {self.trainers} traced ones; for others trace the step with a "
                "trainer's part"
            )
        if self.frozen:
            notes.append(f"on the trainers only: {', '.join(self.frozen)}")
        return notes

    @property
    def _title(self) -> str:
        mode = "geo" if self.push_every else "sync" if self.sync_mode else "async"
        return (
            f"pserver plan of {self.main.name}: {self.trainers} trainers, {len(self.servers)} "
            f"pservers, {mode}"
        )


def _moved(eqn: JaxprEqn) -> tuple[int, int]:
    """The bytes that a trainer sends and receives in a round."""
    return sum(nbytes(a.aval) for a in eqn.invars), sum(nbytes(v.aval) for v in eqn.outvars)


def _unevenness(sizes: Sequence[int]) -> float:
    """The largest over the mean; 1.0 where there is nothing."""
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
