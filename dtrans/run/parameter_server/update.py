"""A server's update, compiled with XLA: it computes new parameters from the trainers' gradients.

A server program lists *optimize blocks*, which are small programs that read and write arrays by
name. One block computes the learning rate, for example, and another one updates a parameter. If the
optimizer needs values of all servers, such as a gradient norm, the servers exchange vectors during
the update.

The blocks between two exchanges form a *phase*, which is compiled as one function. So XLA optimizes
all blocks of a phase together. If no block needs values of other servers, there is one phase, and
an update is one call.

Each array stays separate, because on CPU, copies into one flat vector take longer than the
optimizer.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import JaxprEqn, evaluate, is_traced
from dtrans.errors import ConfigError
from dtrans.ir.array_fns import words_type
from dtrans.ir.program import Program
from dtrans.ir.selection import omit, retain, subset, values_at
from dtrans.ops import BACKUP, DELTA, BlockGradient, OptimizeBlock, backup_of, listen_and_serv_p
from dtrans.parameter_server.tables.touched_rows import TableBlock
from dtrans.protocol.server.exchange import Exchange
from dtrans.protocol.server_blocks import ServerBlocks, TableSpec, Vectors
from dtrans.run.base.lowered import call_recorded
from dtrans.run.base.platforms import stable_bits_options
from dtrans.slicing.mean import reduce_gradients, sent_by


# the blocks of a phase, and the exchange at its end, if any
_Part = tuple[list[OptimizeBlock], Exchange | None]


@dataclasses.dataclass(frozen=True, eq=False)
class Phase:
    """Part of a server's update between two exchanges with other servers, compiled as one function.

    The attributes from `reads` to `gives` are names of arrays. *State* is stored between steps;
    *values* exist only during a step.

    Attributes:
      blocks: the optimize blocks (small programs) of the phase, in order.
      begins: the exchange before the phase; None for the first phase.
      ends: the exchange after the phase; None if no exchange follows.
      grads: True if the phase reads gradients.
      reads: state that the phase reads, and does not donate.
      spent: state that the phase donates to XLA: the phase replaces it, and no later phase reads
        it.
      makes: state that the phase replaces.
      takes: values of earlier phases that the phase reads.
      drops: values in `takes` that no later phase reads. Their memory can be freed.
      gives: values of the phase that later phases, or the caller, read.
    """

    blocks: tuple[OptimizeBlock, ...]
    begins: Exchange | None
    ends: Exchange | None
    grads: bool
    reads: tuple[str, ...]
    spent: tuple[str, ...]
    makes: tuple[str, ...]
    takes: tuple[str, ...]
    drops: tuple[str, ...]
    gives: tuple[str, ...]

    def __call__(
        self, read: Mapping[str, Any], grads: Mapping[str, Any], arrived: Vectors
    ) -> tuple[dict[str, Any], dict[str, Any], list[list[jax.Array]]]:
        """Compute the phase: new state, and values for later phases.

        Args:
          read: state before the step, and values of earlier phases, by name.
          grads: trainers' gradients, by the name under which a trainer sends each gradient.
          arrived: the vectors that other servers have sent in the exchange before the phase.

        Returns:
          A tuple of three: the new state by name, the values for later phases by name, and the
            vectors to send to other servers after the phase.
        """
        values = dict(read)
        if self.begins is not None:
            values |= self.begins.combined(arrived)
        new_names = set(self.makes)
        new: dict[str, Any] = {}
        packed: list[list[jax.Array]] = []
        for block in self.blocks:
            reduced, types = {}, block.invars
            for g in block.grads:
                sent = values_at(grads, g.sent.values())
                reduced[g.name] = reduce_gradients(g, sent, types[g.name].aval)
            inputs = values_at({**values, **reduced}, block.in_names)
            if self.ends is not None and block is self.blocks[-1]:
                outs = evaluate(self.ends.local, *inputs)
                count = len(self.ends.owned)
                packed = self.ends.pack(dict(zip(self.ends.owned, outs[:count], strict=True)))
                outputs = dict(zip(self.ends.plain, outs[count:], strict=True))
            else:
                outputs = dict(zip(block.out_names, evaluate(block.jaxpr, *inputs), strict=True))
            # New state is stored separately, because later blocks read the state before the step.
            for n, x in outputs.items():
                (new if n in new_names else values)[n] = x
        return new, subset(values, self.gives), packed


@dataclasses.dataclass(frozen=True, eq=False)
class ServerUpdate:
    """Description of one server's update, read from the server's program.

    Attributes:
      eqn: the `listen_and_serv` equation, which contains the update's optimize blocks (small
        programs).
      watched: names of intermediate values that the caller of `CompiledUpdate.run` wants to get.
    """

    eqn: JaxprEqn
    watched: frozenset[str] = frozenset()

    @classmethod
    def from_program(cls, program: Program) -> ServerUpdate:
        """Read the update from a server's program.

        Raises:
          ConfigError: the program has no `listen_and_serv` equation, so it is no server program.
        """
        for eqn in program.eqns:
            if eqn.primitive is listen_and_serv_p:
                return cls(eqn)
        raise ConfigError(
            f"program {program.name} is not a pserver program (it has no listen_and_serv "
            "equation); expected a program of plan.servers"
        )

    @cached_property
    def served(self) -> ServerBlocks:
        """Names and types of the server's arrays and gradients, for the message handlers."""
        p = self.eqn.params
        of_tables: set[str] = set()
        tables = {}
        for n, t in self.tables.items():
            of_tables.update(t.gradients.values())
            tables[n] = self._served_rows(n, t)
        backed = frozenset(n for n in self.params if backup_of(n, 0) in self.types)
        dense_gradients = omit(self.grad_types, of_tables)
        adds_changes = any(n.endswith(DELTA) for n in self.grad_types)
        return ServerBlocks(
            self.endpoint,
            p["Fanin"],
            p["sync_mode"],
            p["on_trainer_exit"],
            {n: words_type(self.types[n]) for n in self.params},
            dense_gradients,
            self.sent,
            self.arguments,
            self.exchanges,
            backed,
            tables,
            adds_changes=adds_changes,
            levels=self.grad_levels,
        )

    def _served_rows(self, name: str, table: TableBlock) -> TableSpec:
        """Return the types and gradients of one table's block, for the message handlers."""
        t, gradients = self.types[name], table.gradients
        if not self.eqn.params["sync_mode"]:
            # An asynchronous server applies one trainer's gradient at a time, so all trainers use
            # one name.
            gradients = dict.fromkeys(range(self.eqn.params["Fanin"]), *gradients.values())
        return TableSpec(
            table.rows,
            t.shape[1:],
            t.dtype,
            gradients,
            any(name + BACKUP in b.in_names for b in self.blocks),
            table.on_trainers,
            table.updates_all or table.changes_other_rows,
            staleness=table.staleness,
        )

    @property
    def tables(self) -> Mapping[str, TableBlock]:
        """Blocks (the rows of this server) of embedding tables, by name."""
        tables = self.eqn.params.get("tables")
        return {} if tables is None else tables.blocks

    def sized(self, sizes: Mapping[str, int]) -> ServerUpdate:
        """Return the same update for other numbers of table rows.

        An update touches only the rows for which gradients have arrived. So their number changes
        from step to step, and the update is compiled for each number.

        Args:
          sizes: maps the name of each table's block to the number of rows that the update changes,
            such as `{"params/emb.block0": 64}`.
        """
        return dataclasses.replace(self, eqn=self.eqn.params["tables"].sized(sizes))

    def sent_by(self, present: Collection[int]) -> ServerUpdate:
        """Return the update for the gradients of the remaining trainers, after others have left.

        The update divides the sum of gradients by the number of these trainers.

        Args:
          present: ids of the remaining trainers.
        """
        blocks = tuple(sent_by(block, present) for block in self.blocks)
        return dataclasses.replace(
            self, eqn=self.eqn.replace(params={**self.eqn.params, "optimize_blocks": blocks})
        )

    def merged(self) -> ServerUpdate:
        """Return the update for gradients that are already summed over trainers.

        A server with a backup merges the gradients first, and sends the result to the backup. Then
        both run this update. A merged gradient has the name under which the first trainer sends it.
        """
        blocks = []
        for block in self.blocks:
            grads = []
            for g in block.grads:
                grads.append(dataclasses.replace(g, sent={0: merged_name(g)}, wire=None))
            blocks.append(dataclasses.replace(block, grads=tuple(grads)))
        params = {**self.eqn.params, "optimize_blocks": tuple(blocks)}
        return dataclasses.replace(self, eqn=self.eqn.replace(params=params))

    @property
    def endpoint(self) -> str:
        """The server's endpoint."""
        return self.eqn.params["endpoint"]

    @property
    def blocks(self) -> Sequence[OptimizeBlock]:
        """Optimize blocks (small programs that read and write arrays by name), in order."""
        return self.eqn.params["optimize_blocks"]

    @cached_property
    def types(self) -> dict[str, Any]:
        """Shape and dtype of each array that the server stores between steps, by name."""
        names = self.eqn.params["state_names"]
        return {n: a.aval for n, a in zip(names, self.eqn.invars, strict=True)}

    @cached_property
    def grad_types(self) -> dict[str, Any]:
        """Shape and dtype of each trainer's gradients in messages, by name."""
        found: dict[str, Any] = {}
        for b in self.blocks:
            inputs = b.invars
            for g in b.grads:
                found |= dict.fromkeys(g.sent.values(), g.sent_type(inputs[g.name].aval))
        return found

    @cached_property
    def grad_levels(self) -> tuple[dict[str, Any], ...]:
        """Shape and dtype of gradients in messages, for each density of `dtrans.TopK`.

        A density is the fraction of a gradient that trainers send. The tuple is empty unless the
        user chose several densities, which follow each other.
        """
        found: list[dict[str, Any]] = []
        for b in self.blocks:
            for g in b.grads:
                levels = () if g.wire is None else g.wire.levels
                if len(levels) > 1:
                    found = found or [{} for _ in levels]
                    for types, wire in zip(found, levels, strict=True):
                        t = wire.type_of(b.invars[g.name].aval)
                        types.update(dict.fromkeys(g.sent.values(), t))
        return tuple(found)

    @cached_property
    def sent(self) -> tuple[Mapping[int, str], ...]:
        """For each gradient that the update reads, a dict from trainer ids to names in messages.

        Trainer k sends the gradient under the name `sent[i][k]`.
        """
        return tuple(g.sent for b in self.blocks for g in b.grads)

    @cached_property
    def arguments(self) -> dict[str, Mapping[int, str]]:
        """Step arguments that the update reads, such as a learning rate, by name.

        For each argument, a dict maps the id of a trainer to the name under which this trainer
        sends the argument.
        """
        found = {}
        for block in self.blocks:
            for g in block.grads:
                if g.op == "same":
                    found[g.leaf] = g.sent
        return found

    @cached_property
    def params(self) -> tuple[str, ...]:
        """Names of the parameter blocks that this server sends to trainers after an update."""
        return tuple(self.eqn.params["param_names"])

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Exchanges of values with other servers during one update, in order."""
        return tuple(p.ends for p in self.phases if p.ends is not None and p.ends.peers)

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """Phases of the update: the consecutive blocks between two exchanges with other servers.

        Computing the phases takes time linear in the number of blocks.
        """
        parts = self._parts()
        reads: list[list[str]] = []
        last: dict[str, int] = {}  # name of a value -> index of the last phase that reads the value
        for i, (blocks, _) in enumerate(parts):
            reads.append(list(dict.fromkeys(n for b in blocks for n in b.in_names)))
            last |= dict.fromkeys(reads[i], i)
        known = self._known(parts)
        gives: list[list[str]] = [[] for _ in parts]
        for n, i in known.items():
            if last.get(n, -1) > i or n in self.watched:
                gives[i].append(n)

        phases = []
        begins: Exchange | None = None
        params = set(self.params)
        for i, (blocks, exchange) in enumerate(parts):
            outputs = itertools.chain.from_iterable(b.out_names for b in blocks)
            makes = self.types.keys() & outputs
            # Parameters are never donated, because trainers and sockets may still read them.
            donated = {n for n in makes if n not in params and last.get(n) == i}
            spent, read_state, takes, drops = [], [], [], []
            for n in reads[i]:
                if n in donated:
                    spent.append(n)
                elif n in self.types:
                    read_state.append(n)
                if known.get(n, i) < i:
                    takes.append(n)
                    if last[n] == i:
                        drops.append(n)
            phase = Phase(
                blocks=tuple(blocks),
                begins=begins,
                ends=exchange,
                grads=any(b.grads for b in blocks),
                reads=tuple(read_state),
                spent=tuple(spent),
                makes=tuple(sorted(makes)),
                takes=tuple(takes),
                drops=tuple(drops),
                gives=tuple(gives[i]),
            )
            phases.append(phase)
            begins = exchange
        return tuple(phases)

    def _parts(self) -> list[_Part]:
        """Split the list of blocks after each block that exchanges values with other servers."""
        parts: list[_Part] = []
        current: list[OptimizeBlock] = []
        for block in self.blocks:
            current.append(block)
            exchange = Exchange.of(block, self.endpoint)
            if exchange is not None:
                parts.append((current, exchange))
                current = []
        if current:
            parts.append((current, None))
        levels = [exchange.level for _, exchange in parts if exchange is not None]
        assert levels == sorted(set(levels)), (
            f"pserver {self.endpoint} exchanges at levels {levels}"
        )
        return parts

    def _known(self, parts: Sequence[_Part]) -> dict[str, int]:
        """Map each value of the update to the index of the first phase that can read the value.

        Usually this is the phase that computes the value. But the result of an exchange with other
        servers can be read only in the phase after the exchange.
        """
        known: dict[str, int] = {}
        for i, (blocks, exchange) in enumerate(parts):
            results: set[str] = set()
            if exchange:
                results = {n for n, _ in exchange.results}
            for b in blocks:
                for n in b.out_names:
                    if n not in self.types:
                        known[n] = i + (n in results)
        return known


class CompiledUpdate:
    """A server's update, with one compiled function for each phase (blocks between two exchanges).

    Parameters are never donated, because trainers, sockets and users may still read them.

    Args:
      update: the update.
      donate: True to reuse the memory of the old optimizer state for the new optimizer state.
      keeps_old: True to leave the state before the step valid. The new optimizer state then reuses
        the memory of a state that the caller passes as `unused`.
      prepare: function that converts the argument `grads` of `run` to gradients by name. It is
        compiled into each phase that reads gradients.
    """

    def __init__(
        self,
        update: ServerUpdate,
        *,
        donate: bool = True,
        keeps_old: bool = False,
        prepare: Callable[[Any], Mapping[str, Any]] = dict,
    ) -> None:
        self.update = update
        self._prepare, self._keeps_old = prepare, keeps_old
        self._jitted = [self._compile(phase, donate) for phase in update.phases]

    def run(
        self,
        grads: Any,
        state: Mapping[str, Any],
        watched: dict[str, Any] | None = None,
        unused: Mapping[str, Any] = {},
    ) -> Generator[tuple[Exchange, Vectors], Vectors, dict[str, Any]]:
        """Run one update as a generator that pauses at each exchange with other servers.

        At an exchange, the generator yields the exchange, and the vectors that this server must
        send to others. The caller sends the other servers' vectors into the generator. The
        generator returns the new state by name.

        The method does not wait until arrays are computed. If the update was compiled with
        donate=True, the arrays in `state` become invalid, except the parameters.

        Args:
          grads: gradients by name, or an argument for `prepare`.
          state: the state before the step.
          watched: an output argument: the method adds the values that `ServerUpdate.watched` names.
          unused: if the update was compiled with keeps_old=True: arrays by name that are no longer
            needed. The new optimizer state is written into their memory. Arrays of tables are left
            out.
        """
        new, values = dict(state), dict[str, Any]()
        seen = {} if watched is None else watched
        arrived: Vectors = {}
        # JAX refuses to trace a jitted function with compiler options
        in_trace = any(map(is_traced, state.values()))
        for n in self.update.watched:
            if n in state:  # The value is copied, because a phase may donate the array.
                seen[n] = state[n] if in_trace else np.asarray(state[n])
        for i, phase in enumerate(self.update.phases):
            new_state, gives, packed = self._run_phase(
                i, grads, state, values, arrived, unused, in_trace=in_trace
            )
            new |= new_state
            # Memory of values that no later phase reads is freed before the exchange.
            for n in phase.drops:
                del values[n]
            values |= gives
            seen |= retain(gives, self.update.watched)
            if phase.ends is not None:
                outgoing = phase.ends.addressed(packed)
                local = outgoing.pop(phase.ends.me)
                others = (yield phase.ends, outgoing) if phase.ends.peers else {}
                arrived = {phase.ends.me: local, **others}
        return new

    def run_part(
        self, grads: Any, state: Mapping[str, Any], unused: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Run an update without exchanges between servers; return the new arrays by name.

        Args:
          grads, state, unused: as for `run`.
        """
        assert len(self.update.phases) == 1
        new, _, _ = self._run_phase(0, grads, state, {}, {}, unused, in_trace=False)
        arrays: dict[str, Any] = new
        return arrays

    def _run_phase(
        self,
        number: int,
        grads: Any,
        state: Mapping[str, Any],
        values: Mapping[str, Any],
        arrived: Vectors,
        unused: Mapping[str, Any],
        *,
        in_trace: bool,
    ) -> Any:
        phase, jitted = self.update.phases[number], self._jitted[number]
        reads = subset(state, phase.reads)
        spent = subset(state, phase.spent)
        takes = subset(values, phase.takes)
        return call_recorded(
            lambda: f"{self.update.endpoint} phase {number}",
            jitted.__wrapped__ if in_trace else jitted,  # type: ignore[attr-defined]
            grads if phase.grads else {},
            reads,
            spent,
            takes,
            arrived,
            {n: unused[n] for n in phase.spent if n in unused} if self._keeps_old else {},
        )

    def _compile(self, phase: Phase, donate: bool) -> Callable[..., Any]:
        def update(
            grads: Any,
            reads: dict[str, Any],
            spent: dict[str, Any],
            values: dict[str, Any],
            arrived: Vectors,
            unused: dict[str, Any],
        ) -> Any:
            read = {**reads, **spent, **values}
            return phase(read, self._prepare(grads) if phase.grads else {}, arrived)

        options = None
        if "tables" in self.update.eqn.params:
            # With these options, a row's bits do not depend on the server's other blocks.
            options = stable_bits_options()
        donated: tuple[int, ...] = ()
        if self._keeps_old:
            donated = (5,)
        elif donate:
            donated = (2,)
        # With `keep_unused`, XLA can write the new state to the memory of `unused`.
        return jax.jit(
            update,
            donate_argnums=donated,
            keep_unused=self._keeps_old,
            compiler_options=options,
        )


def merged_name(gradient: BlockGradient) -> str:
    """Return the name of a summed gradient: its name in the first trainer's messages."""
    return gradient.sent[min(gradient.sent)]


def compile_merge(
    update: ServerUpdate, present: frozenset[int]
) -> Callable[..., dict[str, jax.Array]]:
    """Return a compiled function that sums gradients over trainers, without the update.

    A server with a backup sends the result to the backup before the update.

    Args:
      update: the update, which reads the gradients of all trainers.
      present: ids of the trainers that contribute gradients to the sums.
    """
    # The update of merged gradients is compiled once, for any trainers in `present`. So the names
    # of its inputs must not depend on `present`.
    names = [merged_name(g) for block in update.blocks for g in block.grads]
    gradients = []
    for block in update.sent_by(present).blocks:
        gradients += [(g, block.invars[g.name].aval) for g in block.grads]

    def merge(grads: Mapping[str, Any]) -> dict[str, jax.Array]:
        found = {}
        for name, (g, t) in zip(names, gradients, strict=True):
            found[name] = reduce_gradients(g, values_at(grads, g.sent.values()), t)
        return found

    return jax.jit(merge)


def copy_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with copies of the arrays, so that an update can donate the copies."""
    return {n: jnp.copy(x) for n, x in state.items()}
