"""Division of the optimizer's update by the stages of a pipeline.

A *piece* of the update is a group of equations that one stage runs without communication. A *place*
is a stage of the pipeline. Each input of the update is in one place, or in every place.
*Shared* values depend only on inputs that every place has, such as a step count. The *hub* is the
last place. It computes values that depend on several places, such as a global norm. The operands of
an equation determine its place:

    operands (except shared values)    place of the equation
    in one place                       this place
    in several places                  the hub
    in the hub and one other place     the other place, if it has more bytes of the operands, or if
                                       it alone needs the result. Otherwise the hub
    none                               every place that reads the result

So Adam becomes one piece for each place. Adam after a clip by the global norm needs more pieces.
Each place computes squared norms, the hub computes the global norm, and each place updates its
parameters.

EPL finds the places in several passes over its graph (epl/ir/graph.py,
`_fix_map_operations_to_taskgraph`). In dtrans, one pass is enough.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

from dtrans._jax import Atom, ClosedJaxpr, HoldsJaxpr, JaxprEqn, Var, opened
from dtrans.ir.builder import extract_part
from dtrans.ir.cost import nbytes
from dtrans.ir.dataflow import backward_slice, free_variables, variables
from dtrans.ir.program import Program
from dtrans.ir.selection import exclude, select, values_at


# The place of a value that depends on values of several places. The last place computes it
# (`_Placer.physical`).
HUB = -1


@dataclasses.dataclass(frozen=True, eq=False)
class StagePart(HoldsJaxpr):
    """Piece of an optimizer's update that one stage computes without communication.

    Attributes:
      place: the stage that runs the piece.
      jaxpr: the equations of the piece, from `reads` to `outputs`.
      reads, outputs: the inputs and outputs of the piece, as variables of the program. A variable
        in `reads` is an input of the program, or an output of an earlier piece on any stage.
    """

    place: int
    jaxpr: ClosedJaxpr
    reads: tuple[Var, ...]
    outputs: tuple[Var, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class PlacedUpdate:
    """Update that is divided into pieces. Each piece runs on one stage, its *place*.

    Attributes:
      program: the program.
      pieces: the pieces, in an order in which they can run.
      sends: the transfers between stages, as tuples (variable, sending stage, receiving stage).
      stage_of_input: maps each input to the stage that has it, or to None if every stage has it.
      stage_of_output: maps each output to the stage that needs it, or to None if every stage needs
        it.
      sharded_axes: maps a variable that the devices of a stage divide to the divided dimension.
      copies: maps a variable that `split_update` has added to the copied variable.
      outputs: maps an output to its copy on the stage that stores it. It lists only outputs that
        are computed on another stage, or in another layout.
    """

    program: Program
    pieces: tuple[StagePart, ...]
    sends: tuple[tuple[Var, int, int], ...]
    stage_of_input: Mapping[str, int | None]
    stage_of_output: Mapping[str, int | None]
    sharded_axes: Mapping[Var, int] = dataclasses.field(default_factory=dict)
    copies: Mapping[Var, Var] = dataclasses.field(default_factory=dict)
    outputs: Mapping[str, Var] = dataclasses.field(default_factory=dict)


def place(
    program: Program, home: Mapping[str, int | None], out_at: Mapping[str, int | None], places: int
) -> PlacedUpdate:
    """Divide an optimizer's update into pieces that each run on one stage.

    Each stage updates the parameters that it stores. Values that several stages need, such as a
    global gradient norm, are computed on one stage and sent to the others.

    Args:
      program: the update.
      home: maps each input to the stage that has it, or to None if every stage has it.
      out_at: maps each output to the stage that needs it, or to None if every stage needs it.
      places: the number of stages. The last stage also computes values from several stages.

    Returns:
      The pieces, and the transfers between stages.
    """
    return _Placer(program, home, out_at, places).placed()


def grouped(placed: PlacedUpdate, group: Mapping[str, int]) -> PlacedUpdate:
    """Split the pieces of an update, so that one group of outputs is computed after the other.

    This lowers the peak memory of a stage. The last group runs first.

    Args:
      placed: the update, with pieces that may compute outputs of several groups.
      group: maps each output to its group. Values without a group, and values that several groups
        need, are computed before all groups.
    """
    group_of: dict[Var, int] = {}
    for n, a in placed.program.outvars.items():
        if n in group and isinstance(a, Var):
            group_of[a] = group[n]
    pieces: list[StagePart] = []
    for piece in placed.pieces:
        groups = sorted({*values_at(group_of, select(piece.outputs, group_of))}, reverse=True)
        if len(groups) < 2:
            pieces.append(piece)
        else:
            pieces += _split_piece(piece, group_of, groups)
    return dataclasses.replace(placed, pieces=tuple(pieces))


def _split_piece(
    piece: StagePart, group_of: Mapping[Var, int], groups: Sequence[int]
) -> list[StagePart]:
    """Split a piece of an update into a common part, and a part for each group of outputs.

    The common part has the equations that several groups need.
    """
    eqns = piece.inner.eqns
    outs: dict[int | None, list[Var]] = {g: [] for g in (*groups, None)}
    for v in piece.outputs:
        outs[group_of.get(v)].append(v)

    # The common part: outputs without a group, and equations that several groups need.
    needs = {g: set(backward_slice(eqns, outs[g])[0]) for g in groups}
    times = Counter(itertools.chain(*needs.values()))
    shared: list[Atom] = list(outs[None])
    for i, count in times.items():
        if count > 1:
            shared += eqns[i].outvars
    common = set(backward_slice(eqns, shared)[0])

    # The outputs of the common part: outputs of the piece, and values that a group reads.
    read: set[Atom] = set()
    for i in times.keys() - common:
        read.update(variables(eqns[i].invars))
    computed: dict[Var, None] = {}
    for i in sorted(common):
        computed |= dict.fromkeys(eqns[i].outvars)
    makes = [v for v in computed if v in read or v in piece.outputs]
    parts = [_part(piece.jaxpr, piece.place, sorted(common), makes)]
    for g in groups:
        makes = exclude(outs[g], computed)
        parts.append(_part(piece.jaxpr, piece.place, sorted(needs[g] - common), makes))
    return [part for part in parts if part.outputs]


def _part(jaxpr: ClosedJaxpr, at: int, which: Sequence[int], makes: Sequence[Var]) -> StagePart:
    """Return a part of the update with only the equations at indices `which`, for stage `at`."""
    inner = opened(jaxpr)
    eqns = values_at(inner.eqns, which)
    reads = exclude(free_variables(eqns), inner.constvars)
    return StagePart(at, extract_part(jaxpr, reads, eqns, makes), tuple(reads), tuple(makes))


class _Placer:
    """Algorithm of `place`: it chooses the stage of each value, then lists pieces and transfers."""

    def __init__(
        self,
        program: Program,
        home: Mapping[str, int | None],
        out_at: Mapping[str, int | None],
        places: int,
    ) -> None:
        self.program = program
        self.home, self.out_at, self.places = home, out_at, places
        inner = program.inner
        self.eqns = inner.eqns
        self.producer: dict[Var, int] = {}
        # value -> place of the value; None for shared values
        self.at: dict[Var, int | None] = {v: home[n] for n, v in program.invars.items()}
        users = self._users()
        for i, (eqn, wanted) in enumerate(zip(self.eqns, users, strict=True)):
            found = set(map(self.at.get, variables(eqn.invars))) - {None}
            real = found - {HUB}
            at: int | None = HUB
            if not found:
                at = None
            elif len(real) == 1 and (HUB not in found or wanted <= real or self._larger(eqn)):
                (at,) = real
            self.at |= dict.fromkeys(eqn.outvars, at)
            self.producer |= dict.fromkeys(eqn.outvars, i)
        self.sends: dict[tuple[Var, int, int], None] = {}
        # (value or equation, place) -> level: the largest number of transfers on a path to it
        self.level: dict[tuple[Var, int], int] = {}
        self.done: dict[tuple[int, int], int] = {}
        self.wanted: dict[int, dict[int, list[int]]] = {}  # level -> place -> equations

    def _larger(self, eqn: JaxprEqn) -> bool:
        """Return True if an equation reads more bytes of another stage than of the hub.

        The hub is the last stage, which computes values from several stages. The equation then runs
        on the other stage, so that fewer bytes are sent.
        """
        size = {True: 0, False: 0}
        for a in variables(eqn.invars):
            if self.at.get(a) is not None:
                size[self.at[a] == HUB] += nbytes(a.aval)
        return size[False] > size[True]

    def _users(self) -> list[set[int | None]]:
        """Return for each equation the stages that need its outputs, directly or indirectly."""
        wanted: dict[Var, set[int | None]] = {}
        for v, place in self._ends():
            wanted.setdefault(v, set()).add(place)
        users: list[set[int | None]] = []
        for eqn in reversed(self.eqns):
            mine: set[int | None] = set().union(*(wanted.get(v, set()) for v in eqn.outvars))
            users.append(mine)
            for a in variables(eqn.invars):
                wanted.setdefault(a, set()).update(mine)
        return users[::-1]

    def _ends(self) -> list[tuple[Var, int]]:
        """Return pairs (output of the update, stage that needs the output).

        If every stage needs an output, such as a new step count, there is a pair for each stage.
        """
        found: list[tuple[Var, int]] = []
        for n, a in self.program.outvars.items():
            at = self.out_at[n]
            if not isinstance(a, Var):
                continue
            places = range(self.places) if at is None else [at]
            found += itertools.product([a], places)
        return found

    def physical(self, at: int) -> int:
        """Return the stage at an index; the last stage if the index is `HUB`."""
        return self.places - 1 if at == HUB else at

    def placed(self) -> PlacedUpdate:
        """Return the update as groups of equations; one stage runs each without communication."""
        ends = self._ends()
        for v, p in ends:
            self._schedule(v, p)
        pieces: list[StagePart] = []
        for _, by_place in sorted(self.wanted.items()):
            for p, which in sorted(by_place.items()):
                pieces.append(self._piece(p, sorted(which), {*ends}))
        return PlacedUpdate(self.program, tuple(pieces), tuple(self.sends), self.home, self.out_at)

    def _schedule(self, var: Var, p: int) -> None:
        """Record the equations and the transfers by which stage `p` gets the value `var`."""
        stack: list[tuple[Var, int]] = [(var, p)]
        # The search is depth-first, with an explicit stack, because a long update would exceed
        # Python's recursion limit.
        while stack:
            v, q = stack[-1]
            if (v, q) in self.level:
                stack.pop()
                continue
            at = self.at.get(v)
            here = q if at is None else self.physical(at)
            if v not in self.producer:  # The value is an input or a constant.
                self.level[v, here] = 0
            elif (v, here) not in self.level:
                number = self.producer[v]
                eqn = self.eqns[number]
                operands = [(a, here) for a in variables(eqn.invars)]
                missing = exclude(operands, self.level)
                if missing:
                    stack += missing
                    continue
                level = max(values_at(self.level, operands), default=0)
                if (number, here) not in self.done:
                    self.done[number, here] = level
                    self.wanted.setdefault(level, {}).setdefault(here, []).append(number)
                for out in eqn.outvars:
                    self.level[out, here] = level
            if here != q:
                self.sends[v, here, q] = None
                self.level[v, q] = self.level[v, here] + 1
            stack.pop()

    def _piece(self, p: int, which: Sequence[int], ends: set[tuple[Var, int]]) -> StagePart:
        """Return a piece of the update, with the outputs that other pieces or stages read.



        Args:
          p: the index of the stage that runs the piece.
          which: the indices of the equations.
          ends: the result of `_ends`.
        """
        mine = set(which)
        needed: set[Atom] = {v for v, q in ends if q == p}
        for v, origin, _ in self.sends:
            if origin == p:
                needed.add(v)
        for i, q in self.done:
            if q == p and i not in mine:
                needed.update(variables(self.eqns[i].invars))
        makes: list[Var] = []
        for i in which:
            makes += select(self.eqns[i].outvars, needed)
        return _part(self.program.jaxpr, p, which, makes)
