"""Programs of trainers of parameter servers.

    forward, backward
    after each gradient   `split_byref` (if the leaf has several blocks), `send`
    at the end            `send_barrier`, a `recv` for each parameter, `fetch_barrier`, and `concat`
                          for leaves of several blocks

Asynchronous trainers have no barriers. With `runtime_split` a `send` and a `recv` transfer a whole
leaf, so no equation splits or concatenates.
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
from dtrans.ir.pytree import without
from dtrans.ops import (
    CommunicatorConfig,
    concat_p,
    fake_init_p,
    fetch_barrier_p,
    recv_p,
    send_barrier_p,
    send_p,
    send_rows_p,
    split_byref_p,
)
from dtrans.parameter_server.averaged_leaves import averaged
from dtrans.parameter_server.exchange_rounds import TRAINERS, in_rounds
from dtrans.parameter_server.tables.lookups import find_lookups
from dtrans.parameter_server.tables.trainer_rows import TableWriter, without_unused
from dtrans.slicing.blocks import Block, Placement, argument
from dtrans.step.batch_numbers import BatchNumbers
from dtrans.step.cut import GRAD, Cut, check_same_update, cut
from dtrans.step.forward_backward import HalfWriter, write_trainer_half
from dtrans.step.handed_values import hand_over
from dtrans.step.observers import FORWARD as READS_BATCH, GRADIENTS, call_once


@dataclasses.dataclass(frozen=True)
class TrainerCommConfig:
    """Communication between trainers and servers.

    Attributes:
      trainers: the number of trainers.
      sync_mode: an update uses the gradients of all trainers.
      runtime_split: leaves are cut into blocks when the program runs, not by the program.
      half_async: with `runtime_split`, a step waits until its gradients are sent and its parameters
        received.
      communicator: the options of a communicator that sends and receives beside the program; None
        without one.
      averages: leaves that trainers compute and servers average.
      told: argument of the step that the update reads, to the servers that need it.
      asked: array of the optimizer's state that trainers receive before a step, to its server.
      tables: leaves that trainers have by rows only: the rows that they look up.
      calls_once: only trainer 0 calls host callbacks.
      scale: factor of gradients before they are sent: the number of trainers, if trainers have
        terms of a sum and servers average.
      numbers: numbers in the update that depend on the size of the batch; trainers send them as
        arguments.
      parts: the arrays of the batch that no server has. Trainers compute the values of them that
        the update reads, and send these as arguments; None if servers refuse such values.
    """

    trainers: int
    sync_mode: bool
    runtime_split: bool = False
    half_async: bool = False
    communicator: CommunicatorConfig | None = None
    averages: tuple[str, ...] = ()
    told: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    asked: Mapping[str, str] = dataclasses.field(default_factory=dict)
    scale: int = 1
    tables: tuple[str, ...] = ()
    calls_once: bool = False
    numbers: BatchNumbers = dataclasses.field(default_factory=BatchNumbers)
    parts: tuple[str, ...] | None = None

    def handed_over(self, step: Cut) -> Cut:
        """Return the step with values of forward as inputs of its update."""
        return step if self.parts is None else hand_over(step, self.parts, drawn=True)

    def update_of(self, step: Cut) -> Cut:
        """Return the step with the update that servers carry out: of averages too, and given what
        trainers send."""
        return averaged(self.numbers.taken_by(self.handed_over(step)), self.averages)

    @property
    def gradients_per_update(self) -> int:
        """Return the number of gradients that an update combines."""
        return self.trainers if self.sync_mode else 1


@dataclasses.dataclass(frozen=True)
class TrainerSide:
    """The trainers of a plan: a writer of their programs.

    Attributes:
      step: the step of one trainer, with the update of the servers.
      placement: every block and its server.
      init: the single-device init.
      comm: how trainers talk to servers.
    """

    step: Cut
    placement: Placement
    init: Program
    comm: TrainerCommConfig

    @property
    def runtime_split(self) -> bool:
        """True if trainers cut leaves into blocks at run time, and their programs do not."""
        return self.comm.runtime_split

    def program(self, trainer_id: int) -> Program:
        """Return the program of one trainer: (params, *batch) -> (params, loss[, aux])."""
        return trainer_program(self.step, self.placement, trainer_id, self.comm)

    def startup(self, trainer_id: int) -> Program:
        """Return the startup program of one trainer: the arguments of init -> params."""
        return trainer_startup_program(self.step, self.placement, self.init, trainer_id, self.comm)

    def uneven(
        self, shared: ExactStep, types: Sequence[jax.ShapeDtypeStruct], trainer_id: int
    ) -> tuple[ExactStep, Program]:
        """Return a trainer's program for a batch whose rows the trainers do not divide.

        Parts are padded to `ceil(rows / trainers)` rows.

        Args:
          shared: how trainers share batches that they divide.
          types: of the inputs of the whole step.
        """
        whole = shared.for_types(types)
        # terms of a sum are added up, where servers may average
        scale = self.comm.scale if shared.reduce == "sum" else self.comm.trainers
        step = self.comm.update_of(cut(whole.step.program))
        check_same_update(self.step, step)
        comm = dataclasses.replace(self.comm, scale=scale)
        return whole, trainer_program(step, self.placement, trainer_id, comm)


def trainer_program(
    step: Cut, placement: Placement, trainer_id: int, wiring: TrainerCommConfig
) -> Program:
    """Return the program of one trainer: (params, *batch) -> (params, loss[, aux])."""
    if wiring.gradients_per_update == 1:  # a gradient is complete on the trainer that makes it
        step = step.with_observers(GRADIENTS, READS_BATCH)
    source = step.program
    vars_of = source.invars
    outs_of = source.outvars
    b = Builder(source.jaxpr)
    none_of = {n: Var(no_rows(vars_of[n].aval)) for n in wiring.tables}
    b.invars += [none_of.get(n, vars_of[n]) for n in (*step.params, *step.batch)]
    wire = TrainerCommWriter(b, placement, trainer_id, wiring)
    wire.ask({n: vars_of[n] for n in wiring.asked})
    rounds = in_rounds(placement.endpoints, trainer_id, wiring.trainers)
    made = write_trainer_half(b, step, step.results, wire.send, wire.on_rows(step), rounds)
    for n, servers in wiring.told.items():
        value = (
            b.constant(step.numbers[n])
            if n in step.numbers
            else made[n]
            if n in step.handed
            else vars_of[n]
        )
        wire.tell(n, value, servers)
    new = wire.update([n for n in step.optimized if n not in wiring.tables])
    outs = {**outs_of, **made, **new, **none_of}
    if wiring.tables:
        without_unused(b, [outs[n] for n in out_names(step)])

    if wiring.calls_once and wiring.trainers > 1:
        call_once(b, TRAINERS)
    out = without(source.out, source.args[1])
    param_args = (source.args[0], *source.args[2:])

    def again(source: Program) -> Program:
        other = wiring.update_of(cut(source))
        check_same_update(step, other)
        return trainer_program(other, placement, trainer_id, wiring)

    return source.rewritten(
        again, result=Program.written(f"trainer {trainer_id}", b, param_args, out, outs)
    )


def out_names(step: Cut) -> tuple[str, ...]:
    """Return the names of the outputs of a trainer's program."""
    return tuple(without(step.program.out, step.program.args[1]).names)


def no_rows(aval: Any) -> Any:
    """Return the type of a trainer's empty table: none of its rows."""
    return aval.update(shape=(0, *aval.shape[1:]))


def trainer_startup_program(
    step: Cut, placement: Placement, startup: Program, trainer_id: int, wiring: TrainerCommConfig
) -> Program:
    """Write a trainer's startup: it receives parameters, and computes frozen leaves."""
    b, outs = write_start(startup, step.frozen)
    received = [n for n in step.optimized if n not in wiring.tables]
    outs |= TrainerCommWriter(b, placement, trainer_id, wiring).start(received)
    b.role = DIST
    for n in wiring.tables:
        t = step.program.inputs[n]
        (outs[n],) = b.bind(fake_init_p, table=n, shape=t.shape, dtype=t.dtype)
    spec = step.program.args[0]
    return Program.written(f"trainer {trainer_id} startup", b, startup.args, spec, outs)


def write_start(startup: Program, own: Sequence[str]) -> tuple[Builder, dict[str, Any]]:
    """Begin a startup program that computes `own` leaves; return it and the init's outputs."""
    inner = startup.inner
    outs: dict[str, Any] = startup.outvars
    b = Builder(startup.jaxpr)
    b.invars += inner.invars
    b.role = FORWARD
    kept, _ = backward_slice(inner.eqns, [outs[n] for n in own])
    for i in kept:
        b.keep(inner.eqns[i])
    return b, outs


def where_rows_are(table: str, blocks: Sequence[Block]) -> dict[str, Any]:
    """Return the parameters of an equation that name the rows of a table and their servers."""
    return {
        "table": table,
        "epmap": tuple(x.endpoint for x in blocks),
        "spans": tuple(x.span for x in blocks),
    }


class TrainerCommWriter:
    """Writes the communication of one trainer into a program."""

    def __init__(
        self, b: Builder, placement: Placement, trainer_id: int, wiring: TrainerCommConfig
    ) -> None:
        self.b = b
        self.placement = placement
        self.wiring = wiring
        self.me = {"trainer_id": trainer_id}
        self.common = {
            "trainer_id": trainer_id,
            "trainers": wiring.trainers,
            "sync_mode": wiring.sync_mode,
        }
        self.tokens: list[Var] = []
        self._tables: TableWriter | None = None

    def on_rows(self, step: Cut) -> Callable[..., HalfWriter] | None:
        """Return the writer of a trainer's half on looked-up rows, or None without tables."""
        if not self.wiring.tables:
            return None
        found = find_lookups(step, self.wiring.tables)
        assert not found.refused, found.refused

        def writer(eqns: Sequence[JaxprEqn], roles: Sequence[str], ends: Any) -> HalfWriter:
            tables = {n: step.program.invars[n] for n in self.wiring.tables}
            where = {
                n: {**self._rows_of(n), "names": tuple(x.name for x in self.placement.blocks[n])}
                for n in tables
            }
            self._tables = TableWriter(
                self.b, step.program.jaxpr, found, tables, where, eqns, roles
            )
            return self._tables

        return writer

    def _rows_of(self, leaf: str) -> dict[str, Any]:
        """Return the parameters of an equation that transfers rows of a table."""
        return {**where_rows_are(leaf, self.placement.blocks[leaf]), **self._beside, **self.common}

    @property
    def _beside(self) -> dict[str, Any]:
        """Return the parameter of an equation that a communicator runs; empty without one."""
        return {"communicator": self.wiring.communicator} if self.wiring.communicator else {}

    def _at_run_time(self, blocks: Sequence[Block]) -> dict[str, Any]:
        """Return the parameters of an equation that cuts a leaf at run time; empty otherwise."""
        if not self.wiring.runtime_split:
            return {}
        return {"sections": tuple(x.rows for x in blocks), **self._beside}

    def send(self, leaf: str, grad: Any) -> None:
        """`split_byref` where the leaf has several blocks and is not cut later, and `send`."""
        blocks = self.placement.blocks[leaf]
        names = tuple(
            x.gradient(self.me["trainer_id"], self.wiring.gradients_per_update) for x in blocks
        )
        if self.wiring.scale != 1:
            (grad,) = self.b.call(times(self.wiring.scale), grad)
        if isinstance(grad, Var):
            self.b.labels.setdefault(grad, leaf + GRAD)
        if leaf in self.wiring.tables:
            assert self._tables is not None
            self.b.role = RPC
            where = {"names": names, **self._rows_of(leaf), **self._merge(leaf)}
            self.tokens += self.b.bind(send_rows_p, self._tables.uniq[leaf], grad, **where)
            return
        parts: list[Any] = [grad]
        if len(blocks) > 1 and not self.wiring.runtime_split:
            self.b.role = DIST
            parts = self.b.bind(split_byref_p, grad, sections=tuple(x.rows for x in blocks))
            self.b.labels.update(zip(parts, names, strict=True))
        self.b.role = RPC
        where = {"epmap": tuple(x.endpoint for x in blocks), "names": names, **self._merge(leaf)}
        self.tokens += self.b.bind(
            send_p, *parts, **where, **self._at_run_time(blocks), **self.common
        )

    def _merge(self, leaf: str) -> dict[str, Any]:
        """Return the rule by which a communicator merges the values that several steps send."""
        if self.wiring.communicator is None:
            return {}
        return {
            "merge": "newest" if leaf in self.wiring.averages else self.wiring.communicator.merge
        }

    def ask(self, state: Mapping[str, Var]) -> None:
        """Arrays of the optimizer's state as they are before the step, by their variables."""
        if not state:
            return
        b = self.b
        b.role = RPC
        where = self.wiring.asked
        arrived: list[Var] = []
        for n, v in state.items():
            arrived += b.bind(
                recv_p, epmap=(where[n],), names=(n,), types=(words_type(v.aval),), **self.common
            )
        there = b.bind(
            fetch_barrier_p, *arrived, endpoints=tuple(dict.fromkeys(where.values())), **self.me
        )
        outs = {
            x: v for x, v in zip(there, state.values(), strict=True) if not is_key(v.aval.dtype)
        }
        b.eqns[-1] = b.eqns[-1].replace(outvars=[outs.get(x, x) for x in there])
        b.role = DIST
        for x, v in zip(there, state.values(), strict=True):
            if x not in outs:
                b.call(keys_of(str(jax.random.key_impl(jnp.zeros((), v.aval.dtype)))), x)
                b.eqns[-1] = b.eqns[-1].replace(outvars=[v])

    def tell(self, name: str, value: Any, servers: Sequence[str]) -> None:
        """Send an argument of the step to the servers that need it."""
        if not servers:
            return
        (value,) = self.b.call(jnp.copy, value)  # of the type of the program, whatever it is given
        self.b.role = RPC
        names = (
            argument(name, self.wiring.gradients_per_update).sent[self.me["trainer_id"]],
        ) * len(servers)
        self.tokens += self.b.bind(
            send_p, *[value] * len(servers), epmap=tuple(servers), names=names, **self.common
        )

    def update(self, leaves: Sequence[str]) -> dict[str, Var]:
        """Write the barrier after the last gradient, if there is one, and receive parameters."""
        after = self.tokens
        if self.wiring.sync_mode or (self.wiring.runtime_split and self.wiring.half_async):
            self.b.role = RPC
            how = {"half_async": True} if self.wiring.runtime_split else {}
            after = self.b.bind(
                send_barrier_p, *after, endpoints=self.placement.endpoints, **how, **self.me
            )
        if self.wiring.runtime_split:
            return self.newest(leaves, after)
        # the rows of the next step are asked for when all of this one is sent
        return self.fetch(leaves, after, barrier=self.wiring.sync_mode or bool(self.wiring.tables))

    def newest(self, leaves: Sequence[str], after: Sequence[Var]) -> dict[str, Var]:
        """Write a `recv` of each whole parameter."""
        self.b.role = RPC
        new: dict[str, Var] = {}
        if not leaves:  # all are tables; the step has sent all the same
            who = {**self._beside, **self.common}
            self.b.bind(fetch_barrier_p, endpoints=self.placement.endpoints, **who)
        for leaf in leaves:
            blocks = self.placement.blocks[leaf]
            shape = (sum(x.rows for x in blocks), *blocks[0].shape[1:]) if blocks[0].shape else ()
            (new[leaf],) = self.b.bind(
                recv_p,
                *after,
                epmap=tuple(x.endpoint for x in blocks),
                names=tuple(x.name for x in blocks),
                types=(ShapedArray(shape, blocks[0].dtype),),
                **self._at_run_time(blocks),
                **self.common,
            )
            self.b.labels[new[leaf]] = leaf
        return new

    def start(self, leaves: Sequence[str]) -> dict[str, Var]:
        """Write the receipt of initial values, with a barrier."""
        return self.fetch(leaves, (), barrier=True)

    def fetch(
        self, leaves: Sequence[str], after: Sequence[Var], *, barrier: bool
    ) -> dict[str, Var]:
        """Write a `recv` for each parameter, `fetch_barrier` if wanted, `concat` of blocks."""
        b = self.b
        b.role = RPC
        arrived: list[Var] = []
        table = [self.placement.blocks[leaf] for leaf in leaves]
        for blocks in table:
            got = b.bind(
                recv_p,
                *after,
                epmap=tuple(x.endpoint for x in blocks),
                names=tuple(x.name for x in blocks),
                types=tuple(ShapedArray(x.shape, x.dtype) for x in blocks),
                **self.common,
            )
            b.labels.update(zip(got, (x.name for x in blocks), strict=True))
            arrived += got
        if barrier:
            who = self.me if arrived else self.common  # all leaves may be tables
            arrived = b.bind(fetch_barrier_p, *arrived, endpoints=self.placement.endpoints, **who)
        done = iter(arrived)
        b.role = DIST
        new: dict[str, Var] = {}
        for leaf, blocks in zip(leaves, table, strict=True):
            parts = [next(done) for _ in blocks]
            if len(parts) > 1:
                b.labels.update(zip(parts, (x.name for x in blocks), strict=True))
                parts = b.bind(concat_p, *parts, axis=0)
            (new[leaf],) = parts
        return new
