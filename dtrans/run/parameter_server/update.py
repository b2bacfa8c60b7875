"""What one server does with gradients: its optimize blocks, as functions to compile.

The blocks of `listen_and_serv` read and write values by name. What lies between two exchanges with
other servers is a *phase*, and is compiled at once: the lr_sched block feeds the others, which are
independent, and XLA sees all of them. Where no block reduces over rows there is one phase, and an
update is one call. Leaves stay separate
arrays: on CPU, one flat vector costs more to assemble than the optimizer costs to run.
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
from dtrans.ops import BACKUP, OptimizeBlock, backup_of, listen_and_serv_p
from dtrans.parameter_server.tables.touched_rows import TableBlock
from dtrans.protocol.exchange import Exchange
from dtrans.protocol.served import ServedBlocks, ServedRows, Vectors
from dtrans.run.base.lowered import call_recorded
from dtrans.run.base.platforms import stable_bits_options
from dtrans.slicing.mean import reduce_gradients, sent_by


@dataclasses.dataclass(frozen=True, eq=False)
class Phase:
    """The blocks between two exchanges.

    Attributes:
      blocks: in their order.
      begins: the exchange whose results it begins with, if any.
      ends: the exchange that its last block ends with, if any.
      grads: whether it reads gradients.
      kept: the state it reads that others read too, or that nobody makes anew: by name.
      spent: the state it makes anew and was the last to read.
      makes: the state it makes.
      takes: the values it reads that phases before it gave; `drops` are those that no later one
        reads.
      gives: the values it makes, or begins with, that later phases read.
    """

    blocks: tuple[OptimizeBlock, ...]
    begins: Exchange | None
    ends: Exchange | None
    grads: bool
    kept: tuple[str, ...]
    spent: tuple[str, ...]
    makes: tuple[str, ...]
    takes: tuple[str, ...]
    drops: tuple[str, ...]
    gives: tuple[str, ...]

    def __call__(
        self, read: Mapping[str, Any], grads: Mapping[str, Any], arrived: Vectors
    ) -> tuple[dict[str, Any], dict[str, Any], list[list[jax.Array]]]:
        """The state it makes, the values it gives, and the parcels of the exchange that ends it.
        Pure.

        Args:
          read: state as it was before the step, and values of earlier phases, by name.
          grads: what trainers have sent, by the name under which they did.
          arrived: the vectors of the exchange it begins with.
        """
        values = dict(read)
        if self.begins is not None:
            values |= self.begins.combined(arrived)
        own = set(self.makes)
        new: dict[str, Any] = {}
        packed: list[list[jax.Array]] = []
        for block in self.blocks:
            ones = {
                g.name: reduce_gradients(g.op, [grads[n] for n in g.sent.values()])
                for g in block.grads
            }
            given = [ones[n] if n in ones else values[n] for n in block.in_names]
            if self.ends is not None and block is self.blocks[-1]:
                outs = evaluate(self.ends.local, *given)
                count = len(self.ends.owned)
                packed = self.ends.pack(dict(zip(self.ends.owned, outs[:count], strict=True)))
                made = dict(zip(self.ends.plain, outs[count:], strict=True))
            else:
                made = dict(zip(block.out_names, evaluate(block.jaxpr, *given), strict=True))
            # no block reads new state: its name stands for the state before the step
            new |= {n: x for n, x in made.items() if n in own}
            values |= {n: x for n, x in made.items() if n not in own}
        return new, {n: values[n] for n in self.gives}, packed


@dataclasses.dataclass(frozen=True, eq=False)
class ServerUpdate:
    """The update of one server.

    Attributes:
      eqn: its `listen_and_serv`.
      watched: values that somebody wants to know of each step, by name.
    """

    eqn: JaxprEqn
    watched: frozenset[str] = frozenset()

    @classmethod
    def of(cls, program: Program) -> ServerUpdate:
        """The update in a pserver program. Raises ConfigError for any other program."""
        for eqn in program.eqns:
            if eqn.primitive is listen_and_serv_p:
                return cls(eqn)
        raise ConfigError(
            f"program {program.name} is not a pserver program: it has no listen_and_serv"
        )

    @cached_property
    def served(self) -> ServedBlocks:
        """What the server's protocol is about."""
        p = self.eqn.params
        of_tables = {n for t in self.tables.values() for n in t.gradients.values()}
        # a gradient that is an update of its own has one name, whoever sends it
        sent = lambda t: (
            t.gradients
            if p["sync_mode"]
            else dict.fromkeys(range(p["Fanin"]), *t.gradients.values())
        )
        read = {n for b in self.blocks for n in b.in_names}
        row = lambda n: (self.types[n].shape[1:], self.types[n].dtype)
        return ServedBlocks(
            self.endpoint,
            p["Fanin"],
            p["sync_mode"],
            p["on_trainer_exit"],
            {n: words_type(self.types[n]) for n in self.params},
            {n: t for n, t in self.grad_types.items() if n not in of_tables},
            self.sent,
            self.arguments,
            self.exchanges,
            frozenset(n for n in self.params if backup_of(n, 0) in self.types),
            {
                n: ServedRows(
                    t.rows,
                    *row(n),
                    sent(t),
                    n + BACKUP in read,
                    t.on_trainers,
                    t.updates_all or t.moves,
                    staleness=t.staleness,
                )
                for n, t in self.tables.items()
            },
        )

    @property
    def tables(self) -> Mapping[str, TableBlock]:
        """The blocks of tables, by their names."""
        served = self.eqn.params.get("tables")
        return {} if served is None else served.blocks

    def sized(self, sizes: Mapping[str, int]) -> ServerUpdate:
        """The update of other numbers of rows of blocks of tables."""
        return dataclasses.replace(self, eqn=self.eqn.params["tables"].sized(sizes))

    def sent_by(self, present: Collection[int]) -> ServerUpdate:
        """The update by the gradients of some of the trainers alone (`dtrans.slicing.mean`)."""
        blocks = tuple(sent_by(block, present) for block in self.blocks)
        return dataclasses.replace(
            self, eqn=self.eqn.replace(params={**self.eqn.params, "optimize_blocks": blocks})
        )

    @property
    def endpoint(self) -> str:
        """The server's."""
        return self.eqn.params["endpoint"]

    @property
    def blocks(self) -> Sequence[OptimizeBlock]:
        """The optimize blocks, in order."""
        return self.eqn.params["optimize_blocks"]

    @cached_property
    def types(self) -> dict[str, Any]:
        """Name to type, of the state."""
        return {
            n: a.aval for n, a in zip(self.eqn.params["state_names"], self.eqn.invars, strict=True)
        }

    @cached_property
    def grad_types(self) -> dict[str, Any]:
        """Name to type, of what all trainers send."""
        found: dict[str, Any] = {}
        for b in self.blocks:
            given = b.invars
            found |= {n: given[g.name].aval for g in b.grads for n in g.sent.values()}
        return found

    @cached_property
    def sent(self) -> tuple[Mapping[int, str], ...]:
        """Of each gradient that is read: trainer to the name under which it comes."""
        return tuple(g.sent for b in self.blocks for g in b.grads)

    @cached_property
    def arguments(self) -> dict[str, Mapping[int, str]]:
        """The arguments of the step that are read: name to what each trainer sends it as."""
        return {g.leaf: g.sent for b in self.blocks for g in b.grads if g.op == "same"}

    @cached_property
    def params(self) -> tuple[str, ...]:
        """The parameter blocks, which trainers ask for; everything else in the state is the
        server's own."""
        return tuple(self.eqn.params["param_names"])

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """The exchanges with other servers that a step has, in order."""
        return tuple(p.ends for p in self.phases if p.ends is not None and p.ends.peers)

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The blocks, cut after each that ends with an exchange. Time is linear in their number."""
        parts: list[tuple[list[OptimizeBlock], Exchange | None]] = []
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

        reads = [list(dict.fromkeys(n for b in blocks for n in b.in_names)) for blocks, _ in parts]
        last = {n: i for i, names in enumerate(reads) for n in names}
        made_in: dict[str, int] = {}  # the first phase that knows a value
        for i, (blocks, exchange) in enumerate(parts):
            results = {n for n, _ in exchange.results} if exchange else set()
            made_in |= {
                n: i + (n in results) for b in blocks for n in b.out_names if n not in self.types
            }
        gives: list[list[str]] = [[] for _ in parts]
        for n, i in made_in.items():
            if last.get(n, -1) > i or n in self.watched:
                gives[i].append(n)

        phases = []
        begins: Exchange | None = None
        params = set(self.params)
        for i, (blocks, exchange) in enumerate(parts):
            makes = {n for b in blocks for n in b.out_names if n in self.types}
            spent = {n for n in reads[i] if n in makes and n not in params and last[n] == i}
            takes = [n for n in reads[i] if made_in.get(n, i) < i]
            phases.append(
                Phase(
                    blocks=tuple(blocks),
                    begins=begins,
                    ends=exchange,
                    grads=any(b.grads for b in blocks),
                    kept=tuple(n for n in reads[i] if n in self.types and n not in spent),
                    spent=tuple(n for n in reads[i] if n in spent),
                    makes=tuple(sorted(makes)),
                    takes=tuple(takes),
                    drops=tuple(n for n in takes if last[n] == i),
                    gives=tuple(gives[i]),
                )
            )
            begins = exchange
        return tuple(phases)


class CompiledUpdate:
    """A server's update, jitted phase by phase, with the optimizer state donated.

    Parameters are never donated: trainers, sockets and users may still look at them.

    Args:
      update: of the server.
      donate: reuse the memory of the optimizer state for the new one.
      prepare: what makes gradients by name of what a call is given; inside the compiled function.
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
        self._jitted = [(phase, self._compile(phase, donate)) for phase in update.phases]

    def run(
        self, grads: Any, state: Mapping[str, Any], watched: dict[str, Any] | None = None
    ) -> Generator[tuple[Exchange, Vectors], Vectors, dict[str, Any]]:
        """Make a step; the new state. That of before keeps its parameters, and with donation may
        lose the rest.

        At each exchange it yields that, with the vectors for every other server
        (`Exchange.parcels`), and goes on with those of every other server (`Exchange.sources`).
        Nothing waits for what is computed.

        Args:
          watched: is given what the update says is watched.
        """
        new, values = dict(state), dict[str, Any]()
        seen = {} if watched is None else watched
        arrived: Vectors = {}
        # a function with options of XLA cannot be called where another one is traced
        in_trace = any(map(is_traced, state.values()))
        copied = (lambda x: x) if in_trace else np.asarray
        # it may be gone afterwards
        seen |= {n: copied(state[n]) for n in self.update.watched if n in state}
        for i, (phase, jitted) in enumerate(self._jitted):
            made, given, packed = call_recorded(
                lambda i=i: f"{self.update.endpoint} phase {i}",  # type: ignore[misc]
                jitted.__wrapped__ if in_trace else jitted,  # type: ignore[attr-defined]
                grads if phase.grads else {},
                {n: state[n] for n in phase.kept},
                {n: state[n] for n in phase.spent},
                {n: values[n] for n in phase.takes},
                arrived,
            )
            new |= made
            for n in phase.drops:
                del values[n]
            values |= given
            seen |= {n: x for n, x in given.items() if n in self.update.watched}
            if phase.ends is not None:
                outgoing = phase.ends.addressed(packed)
                own = outgoing.pop(phase.ends.me)
                others = (yield phase.ends, outgoing) if phase.ends.peers else {}
                arrived = {phase.ends.me: own, **others}
        return new

    def _compile(self, phase: Phase, donate: bool) -> Callable[..., Any]:
        def update(
            grads: Any,
            kept: dict[str, Any],
            spent: dict[str, Any],
            values: dict[str, Any],
            arrived: Vectors,
        ) -> Any:
            read = {**kept, **spent, **values}
            return phase(read, self._prepare(grads) if phase.grads else {}, arrived)

        # rows of a table have the same bits whatever else is on their server
        options = stable_bits_options() if "tables" in self.update.eqn.params else None
        return jax.jit(update, donate_argnums=2 if donate else (), compiler_options=options)


def own_buffers(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state whose arrays share no memory with each other, nor with what they were made from, as
    donation needs."""
    return {n: jnp.copy(x) for n, x in state.items()}
