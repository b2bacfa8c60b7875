"""Division of an update among servers: the values that each server stores, reads and computes.

First, the programs that update each block are written (`dtrans.slicing.unit_program`). They
determine the shared values that each server reads, such as a learning rate. A server computes a
shared value by itself, unless servers exchange it (`dtrans.slicing.rounds`).

*Shared state* depends on rows only through reductions, such as Adafactor's column sums. Every
server that reads an array of shared state stores a copy of the array. An array that no server reads
is on all servers. All copies are equal.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping, MutableMapping
from functools import cached_property

from dtrans._jax import Atom, Var
from dtrans.errors import ConfigError
from dtrans.ir.selection import values_at
from dtrans.rows.analysis import RowAnalysis
from dtrans.slicing.blocks import Placement, Unit
from dtrans.slicing.rounds import CrossServerValue, ExchangeRounds
from dtrans.slicing.unit_program import UnitProgram, part_name, write_unit
from dtrans.step.halves import Gradient


@dataclasses.dataclass(frozen=True, eq=False)
class ServerSpec:
    """Work of one server: the parameters that it updates, the values that it reads and computes.

    Attributes:
      units: blocks or parameters that the server updates together, with their programs.
      computed: shared values, such as a learning rate, that the server computes.
      crossings: values that the server gets by an exchange with other servers.
      inputs: inputs of the update on which shared values depend; units have further inputs.
      shared_state: names of the shared state that the server stores.
    """

    units: tuple[UnitProgram, ...]
    computed: frozenset[Var]
    crossings: frozenset[Var]
    inputs: frozenset[str]
    shared_state: frozenset[str]

    @cached_property
    def _units_of(self) -> dict[str, list[Unit]]:
        found: dict[str, list[Unit]] = {}
        for u in self.units:
            found.setdefault(u.home, []).append(u.unit)
        return found

    def parts_of(self, crossing: CrossServerValue) -> list[str]:
        """Return the names of the terms that this server adds to an exchanged value.

        For a norm of all gradients, there is one term for each block on this server.
        """
        return [part_name(unit, crossing) for unit in self._units_of.get(crossing.home, ())]


@dataclasses.dataclass(frozen=True, eq=False)
class UpdateSpec:
    """Division of an optimizer's update among all servers, from which their programs are written.

    Attributes:
      rounds: the equations, and the number of exchanges before each value is known.
      placement: placement of the parameters on servers.
      trainers: number of trainers; each sends a gradient of each parameter.
      arguments: arguments of the training step that the update reads, such as a learning rate;
        trainers send them.
      requested: shared optimizer state that the trainers' programs read, so they request it before
        each step.
      exact: parameters with sums over rows that have the same bits for every placement.
      names: maps each name in the update to a description of its value, for errors.
      owners: maps each parameter to the servers that compute terms of its norms and similar values.
      servers: endpoint -> work of the server; a server without work is absent.
      participants: exchanged value -> the servers that compute a term of the value, or read the
        value.
    """

    rounds: ExchangeRounds
    placement: Placement
    trainers: int
    arguments: frozenset[str]
    requested: tuple[str, ...]
    exact: frozenset[str]
    names: Mapping[str, str]
    owners: Mapping[str, tuple[str, ...]]
    servers: Mapping[str, ServerSpec]
    participants: Mapping[Var, tuple[str, ...]]

    @property
    def analysis(self) -> RowAnalysis:
        """Analysis of the update: the values that it computes row by row, for this placement."""
        return self.rounds.analysis

    @property
    def shared_state(self) -> tuple[str, ...]:
        """Names of the optimizer state that belongs to no parameter, such as a count of steps."""
        return self.analysis.state_of[None]

    def is_local(self, crossing: CrossServerValue) -> bool:
        """Return True if a value needs no exchange, because one server computes and reads it.

        In a job with exact sums, all values are exchanged, even in a job of one server. Without the
        exchange, XLA would compile another program, and the results could round differently.

        Args:
          crossing: the value.
        """
        return len(self.participants[crossing.var]) == 1 and not self.exact

    def holder_of(self, name: str) -> str:
        """Return the first server that stores an array of shared state.

        Trainers request the array from this server.

        Args:
          name: name of the array.
        """
        return next(ep for ep, server in self.servers.items() if name in server.shared_state)

    def readers_of(self, name: str) -> tuple[str, ...]:
        """Return the servers that read an argument of the training step, such as a learning rate.

        Args:
          name: name of the argument.
        """
        return tuple(ep for ep, server in self.servers.items() if name in server.inputs)


def analyse_update(
    analysis: RowAnalysis,
    placement: Placement,
    trainers: int = 1,
    summed: Collection[str] = (),
    arguments: Collection[str] = (),
    requested: Collection[str] = (),
    exact: Collection[str] = (),
) -> UpdateSpec:
    """Divide an optimizer's update among servers.

    The result says for each server the parameters that it updates, and the values that it computes
    or exchanges. `write_server` then writes the programs.

    Args:
      analysis: row analysis of the update.
      placement: placement of the parameters on servers.
      trainers: number of trainers; the update of a parameter reads the mean of their gradients.
      summed: parameters for which the update reads the sum of the gradients instead of the mean.
      arguments: step arguments that the update reads; trainers send them to the servers.
      requested: shared optimizer state that the trainers' programs read, so they request it before
        each step.
      exact: parameters with sums over rows that must have the same bits for every placement.

    Raises:
      ConfigError: the name of a parameter is also the name of a block, a gradient or another value.
    """
    endpoints_of: dict[str, set[str]] = {}
    for b in placement.all_blocks:
        endpoints_of.setdefault(b.leaf, set()).add(b.endpoint)
    alone = [blocks[0] for blocks in placement.blocks.values() if len(blocks) == 1]
    unsliced = [b.leaf for b in alone if not b.is_table and b.leaf not in exact]
    analysis = analysis.with_unsliced(unsliced)
    rounds = ExchangeRounds(analysis, exact)

    names = dict.fromkeys(analysis.input_names.values(), "an array of the optimizer's state")
    names |= dict.fromkeys(placement.blocks, "a leaf")
    for crossing in rounds.crossings.values():
        claim(names, crossing.name)

    def write(unit: Unit) -> UnitProgram:
        gradients = []
        for b in unit.blocks:
            if Gradient(b.leaf) in analysis.inputs:
                gradients.append(b.gradients(trainers, "sum" if b.leaf in summed else "mean"))
        program = write_unit(rounds, unit, gradients)
        first = unit.blocks[0]
        if first.count > 1:
            for base, name in program.names.items():
                claim(names, name, f"block {first.index} of {base}")
        for grad in gradients:
            claim(names, grad.name, f"a gradient of {grad.leaf}")
        out_names = itertools.chain(*(p.out_names for p in program.levels.values()))
        for name in set(out_names).difference(program.names.values()):
            claim(names, name)
        return program

    units = {ep: tuple(map(write, of)) for ep, of in placement.units.items() if of}
    every = _server_spec(rounds, tuple(itertools.chain(*units.values())))
    # shared state that no unit reads, such as a count of steps, is stored on all servers
    idle = set(analysis.state_of[None]) - every.shared_state
    servers = {ep: _server_spec(rounds, of, idle) for ep, of in units.items()}

    owners: dict[str, tuple[str, ...]] = {}
    for leaf, of in endpoints_of.items():
        owners[analysis.home_of(leaf)] = tuple(ep for ep in placement.endpoints if ep in of)
    over: dict[Var, tuple[str, ...]] = {}
    for var, crossing in rounds.crossings.items():
        takes_part = set(owners[crossing.home])
        takes_part |= {ep for ep, server in servers.items() if var in server.crossings}
        over[var] = tuple(ep for ep in placement.endpoints if ep in takes_part)
    return UpdateSpec(
        rounds,
        placement,
        trainers,
        frozenset(arguments),
        tuple(requested),
        frozenset(exact),
        names,
        owners,
        servers,
        over,
    )


def claim(
    names: MutableMapping[str, str], name: str, what: str = "a value that the optimizer computes"
) -> str:
    """Reserve a name for a value, and return the name.

    Args:
      names: the reserved names, each with a description of its value.
      name: the name to reserve.
      what: description of the value.

    Raises:
      ConfigError: the name already refers to another value.
    """
    other = names.setdefault(name, what)
    if other != what:
        raise ConfigError(f"{name} would be the name of both {other} and {what}; rename a leaf")
    return name


def _server_spec(
    rounds: ExchangeRounds, units: tuple[UnitProgram, ...], state: Iterable[str] = ()
) -> ServerSpec:
    """Find all values that one server must compute, exchange and store, from its updates.

    Args:
      rounds: equations, and the number of exchanges before each value is known.
      units: programs of the blocks on the server.
      state: shared state that the server stores, even if its updates do not read it.
    """
    analysis = rounds.analysis
    computed, crossings = set[Var](), set[Var]()
    inputs, state_names, new = set[str](), set[str](), set(state)
    pending: list[Atom] = [v for u in units for v in u.shared]
    while pending or new:
        state_names |= new
        pending += values_at(analysis.outputs, new)
        while pending:
            var = pending.pop()
            if not isinstance(var, Var) or var in computed or var in crossings:
                continue
            if var in rounds.crossings:
                crossings.add(var)
            elif var in rounds.producers:
                eqn = rounds.eqns[rounds.producers[var]]
                computed.update(eqn.outvars)
                pending += eqn.invars
            elif var in analysis.input_names:
                inputs.add(analysis.input_names[var])
        # a server stores and updates the shared state that it reads
        new = inputs.intersection(analysis.state_of[None]) - state_names
    return ServerSpec(
        units, frozenset(computed), frozenset(crossings), frozenset(inputs), frozenset(state_names)
    )
