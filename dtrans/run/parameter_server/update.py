"""Update of one server: its optimize blocks, as functions to compile.

The blocks of `listen_and_serv` read and write values by name. The blocks between two exchanges with
other servers form a *phase*, which is compiled as one function. The lr_sched block feeds the
others, which are independent, and XLA sees all of them. If no block reduces over rows, there is one
phase, and an update is one call.

Leaves stay separate arrays: on CPU, assembling one flat vector costs more time than the optimizer.
"""

from __future__ import annotations

import dataclasses
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
from dtrans.ir.selection import subset, values_at
from dtrans.ops import BACKUP, OptimizeBlock, backup_of, listen_and_serv_p
from dtrans.parameter_server.tables.touched_rows import TableBlock
from dtrans.protocol.server.exchange import Exchange
from dtrans.protocol.server_blocks import ServerBlocks, TableSpec, Vectors
from dtrans.run.base.lowered import call_recorded
from dtrans.run.base.platforms import stable_bits_options
from dtrans.slicing.mean import reduce_gradients, sent_by


# blocks of a phase, and the exchange that ends it
_Part = tuple[list[OptimizeBlock], Exchange | None]


@dataclasses.dataclass(frozen=True, eq=False)
class Phase:
    """Blocks between two exchanges.

    Attributes:
      blocks: the blocks in their order.
      begins: the exchange whose results the phase reads, if any.
      ends: the exchange in which its last block takes part, if any.
      grads: True if it reads gradients.
      reads: state that it reads and does not donate: others read it, too, or nobody replaces it.
      spent: state that it donates: it replaces it, and is the last to read it.
      makes: state that it replaces.
      takes: values of earlier phases that it reads.
      drops: those of `takes` that no later phase reads.
      gives: values that later phases read.
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
        """Compute new state, values for later phases, and the parcels of the exchange that ends it.

        The function is pure.

        Args:
          read: state before the step, and values of earlier phases, by name.
          grads: trainers' gradients, by the names under which they come.
          arrived: the vectors of the exchange `begins`.
        """
        values = dict(read)
        if self.begins is not None:
            values |= self.begins.combined(arrived)
        new_names = set(self.makes)
        new: dict[str, Any] = {}
        packed: list[list[jax.Array]] = []
        for block in self.blocks:
            reduced = {}
            for g in block.grads:
                reduced[g.name] = reduce_gradients(g.op, values_at(grads, g.sent.values()))
            inputs = [reduced[n] if n in reduced else values[n] for n in block.in_names]
            if self.ends is not None and block is self.blocks[-1]:
                outs = evaluate(self.ends.local, *inputs)
                count = len(self.ends.owned)
                packed = self.ends.pack(dict(zip(self.ends.owned, outs[:count], strict=True)))
                outputs = dict(zip(self.ends.plain, outs[count:], strict=True))
            else:
                outputs = dict(zip(block.out_names, evaluate(block.jaxpr, *inputs), strict=True))
            # No block reads new state: its name stands for the state before the step.
            for n, x in outputs.items():
                (new if n in new_names else values)[n] = x
        return new, subset(values, self.gives), packed


@dataclasses.dataclass(frozen=True, eq=False)
class ServerUpdate:
    """Update of one server.

    Attributes:
      eqn: the server's `listen_and_serv`.
      watched: names of values that a step reports to its caller.
    """

    eqn: JaxprEqn
    watched: frozenset[str] = frozenset()

    @classmethod
    def from_program(cls, program: Program) -> ServerUpdate:
        """Return the update in a pserver program.

        Raises:
          ConfigError: any other program.
        """
        for eqn in program.eqns:
            if eqn.primitive is listen_and_serv_p:
                return cls(eqn)
        raise ConfigError(
            f"program {program.name} is not a pserver program (no listen_and_serv); take one from "
            "plan.servers"
        )

    @cached_property
    def served(self) -> ServerBlocks:
        """The blocks and tables that the server's protocol serves."""
        p = self.eqn.params
        of_tables = {n for t in self.tables.values() for n in t.gradients.values()}
        tables = {n: self._served_rows(n, t) for n, t in self.tables.items()}
        backed = frozenset(n for n in self.params if backup_of(n, 0) in self.types)
        dense_gradients = {n: t for n, t in self.grad_types.items() if n not in of_tables}
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
        )

    def _served_rows(self, name: str, table: TableBlock) -> TableSpec:
        """Return what the protocol needs of a block of a table."""
        t, gradients = self.types[name], table.gradients
        if not self.eqn.params["sync_mode"]:
            # each trainer's gradient is applied alone, and all trainers send it under one name
            gradients = dict.fromkeys(range(self.eqn.params["Fanin"]), *gradients.values())
        return TableSpec(
            table.rows,
            t.shape[1:],
            t.dtype,
            gradients,
            any(name + BACKUP in b.in_names for b in self.blocks),
            table.on_trainers,
            table.updates_all or table.moves,
            staleness=table.staleness,
        )

    @property
    def tables(self) -> Mapping[str, TableBlock]:
        """Blocks of tables, by name."""
        tables = self.eqn.params.get("tables")
        return {} if tables is None else tables.blocks

    def sized(self, sizes: Mapping[str, int]) -> ServerUpdate:
        """Return the update for different numbers of rows.

        Args:
          sizes: the number of rows that it updates, by block of a table.
        """
        return dataclasses.replace(self, eqn=self.eqn.params["tables"].sized(sizes))

    def sent_by(self, present: Collection[int]) -> ServerUpdate:
        """Return the update by the gradients of some trainers (`dtrans.slicing.mean`)."""
        blocks = tuple(sent_by(block, present) for block in self.blocks)
        return dataclasses.replace(
            self, eqn=self.eqn.replace(params={**self.eqn.params, "optimize_blocks": blocks})
        )

    @property
    def endpoint(self) -> str:
        """The server's endpoint."""
        return self.eqn.params["endpoint"]

    @property
    def blocks(self) -> Sequence[OptimizeBlock]:
        """Optimize blocks, in order."""
        return self.eqn.params["optimize_blocks"]

    @cached_property
    def types(self) -> dict[str, Any]:
        """Types of the state, by name."""
        names = self.eqn.params["state_names"]
        return {n: a.aval for n, a in zip(names, self.eqn.invars, strict=True)}

    @cached_property
    def grad_types(self) -> dict[str, Any]:
        """Types of all trainers' gradients, by name."""
        found: dict[str, Any] = {}
        for b in self.blocks:
            inputs = b.invars
            for g in b.grads:
                found |= dict.fromkeys(g.sent.values(), inputs[g.name].aval)
        return found

    @cached_property
    def sent(self) -> tuple[Mapping[int, str], ...]:
        """For each gradient that a block reads: trainer to the name that it sends."""
        return tuple(g.sent for b in self.blocks for g in b.grads)

    @cached_property
    def arguments(self) -> dict[str, Mapping[int, str]]:
        """Step arguments that blocks read; for each, trainer to the name that it sends."""
        return {g.leaf: g.sent for b in self.blocks for g in b.grads if g.op == "same"}

    @cached_property
    def params(self) -> tuple[str, ...]:
        """Parameter blocks, which trainers receive. The rest of the state stays on the server."""
        return tuple(self.eqn.params["param_names"])

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Exchanges of a step with other servers, in order."""
        return tuple(p.ends for p in self.phases if p.ends is not None and p.ends.peers)

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """Blocks, cut after each one that takes part in an exchange.

        The time to compute this is linear in the number of blocks.
        """
        parts = self._parts()
        reads: list[list[str]] = []
        last: dict[str, int] = {}  # the last phase that reads a value
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
            makes = {n for b in blocks for n in b.out_names if n in self.types}
            # trainers and sockets may still read parameters, which are thus never donated
            donated = {n for n in makes if n not in params and last.get(n) == i}
            spent = [n for n in reads[i] if n in donated]
            read_state = [n for n in reads[i] if n in self.types and n not in donated]
            takes = [n for n in reads[i] if known.get(n, i) < i]
            drops = [n for n in takes if last[n] == i]
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
        """Cut the blocks after each one that takes part in an exchange."""
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
        levels = [x.level for _, x in parts if x is not None]
        assert levels == sorted(set(levels)), (
            f"pserver {self.endpoint} exchanges at levels {levels}"
        )
        return parts

    def _known(self, parts: Sequence[_Part]) -> dict[str, int]:
        """Return the first phase that knows each value; results of an exchange come one later."""
        known: dict[str, int] = {}
        for i, (blocks, exchange) in enumerate(parts):
            results = {n for n, _ in exchange.results} if exchange else set()
            for b in blocks:
                known |= {n: i + (n in results) for n in b.out_names if n not in self.types}
        return known


class CompiledUpdate:
    """A server's update, jitted phase by phase. Updates donate the optimizer state.

    Parameters are never donated: trainers, sockets and users may still read them.

    Args:
      update: the update.
      donate: reuse the memory of the old optimizer state for the new one.
      prepare: a pure function from the argument `grads` of `run` to gradients by name. It is
        compiled with the phases.
    """

    def __init__(
        self,
        update: ServerUpdate,
        *,
        donate: bool = True,
        prepare: Callable[[Any], Mapping[str, Any]] = dict,
    ) -> None:
        self.update = update
        self._prepare = prepare
        self._jitted = [self._compile(phase, donate) for phase in update.phases]

    def run(
        self, grads: Any, state: Mapping[str, Any], watched: dict[str, Any] | None = None
    ) -> Generator[tuple[Exchange, Vectors], Vectors, dict[str, Any]]:
        """Compute a step; return the new state. With donation the old one keeps only parameters.

        At each exchange it yields the exchange and the vectors for other servers
        (`Exchange.parcels`). The caller sends it those of other servers (`Exchange.sources`).
        Nothing waits for the computation.

        Args:
          grads: gradients by name, or an argument for `prepare`.
          state: the state before the step.
          watched: gets the values that the update watches.
        """
        new, values = dict(state), dict[str, Any]()
        seen = {} if watched is None else watched
        arrived: Vectors = {}
        # JAX refuses to trace a jitted function with compiler options
        in_trace = any(map(is_traced, state.values()))
        for n in self.update.watched:
            if n in state:  # a copy: a phase may donate it
                seen[n] = state[n] if in_trace else np.asarray(state[n])
        for i, phase in enumerate(self.update.phases):
            new_state, gives, packed = self._run_phase(
                i, grads, state, values, arrived, in_trace=in_trace
            )
            new |= new_state
            for n in phase.drops:  # frees their memory during the exchange
                del values[n]
            values |= gives
            seen |= {n: x for n, x in gives.items() if n in self.update.watched}
            if phase.ends is not None:
                outgoing = phase.ends.addressed(packed)
                local = outgoing.pop(phase.ends.me)
                others = (yield phase.ends, outgoing) if phase.ends.peers else {}
                arrived = {phase.ends.me: local, **others}
        return new

    def _run_phase(
        self,
        number: int,
        grads: Any,
        state: Mapping[str, Any],
        values: Mapping[str, Any],
        arrived: Vectors,
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
        )

    def _compile(self, phase: Phase, donate: bool) -> Callable[..., Any]:
        def update(
            grads: Any,
            reads: dict[str, Any],
            spent: dict[str, Any],
            values: dict[str, Any],
            arrived: Vectors,
        ) -> Any:
            read = {**reads, **spent, **values}
            return phase(read, self._prepare(grads) if phase.grads else {}, arrived)

        # With these options the bits of a row do not depend on the other blocks of its server.
        options = stable_bits_options() if "tables" in self.update.eqn.params else None
        return jax.jit(update, donate_argnums=2 if donate else (), compiler_options=options)


def copy_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the arrays of a state: donation needs memory that nothing else refers to."""
    return {n: jnp.copy(x) for n, x in state.items()}
