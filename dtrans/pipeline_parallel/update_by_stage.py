"""A program whose inputs live in several places, cut into pieces that each run in one.

The places are the stages of a pipeline, the program its update. An equation belongs where its
operands are:

    all in one place, beside what is shared     there
    in several places                           at the hub, the last place; what it makes can be sent to any
    what the hub made, and things of one place  in that place, if they are larger than what the hub
                                                made, or nobody else wants what comes of it; else at
                                                the hub
    only what is shared                         wherever it is read: each place makes its own

What is shared is made of inputs that every place has (a count of steps). So Adam is one piece for
each place, and a clip by the global norm three layers: squares where the gradients are, the norm at
the hub, the update where they are.

EPL places optimizer operations by a fixpoint of minima over consumers and maxima over inputs
(epl/ir/graph.py, `_fix_map_operations_to_taskgraph`), whose last pass reuses what the one before
left; here one pass is enough.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from dtrans._jax import Atom, ClosedJaxpr, HoldsJaxpr, JaxprEqn, Var, opened
from dtrans.ir.builder import extract_part
from dtrans.ir.cost import nbytes
from dtrans.ir.dataflow import backward_slice, free_variables
from dtrans.ir.program import Program


HUB = -1  # made at the hub, of what several places have


@dataclasses.dataclass(frozen=True, eq=False)
class StagePart(HoldsJaxpr):
    """Piece of the update that one place computes without communication.

    Attributes:
      place: the place.
      jaxpr: `reads` -> `makes`.
      reads, makes: variables of the program. A variable in `reads` is an input, or an output of an
        earlier piece at any place.
    """

    place: int
    jaxpr: ClosedJaxpr
    reads: tuple[Var, ...]
    makes: tuple[Var, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class PlacedUpdate:
    """A program in pieces.

    Attributes:
      program: what was cut.
      pieces: in an order in which they can run.
      sends: what is made in one place and read in another: variable, from, to. Inputs too.
      home: the place of each input; None for those that every place has.
      out_at: the place of each output; None for those that every place makes.
      cuts: of values that are in pieces in a place that is split, the dimension.
    """

    program: Program
    pieces: tuple[StagePart, ...]
    sends: tuple[tuple[Var, int, int], ...]
    home: Mapping[str, int | None]
    out_at: Mapping[str, int | None]
    cuts: Mapping[Var, int] = dataclasses.field(default_factory=dict)


def place(
    program: Program, home: Mapping[str, int | None], out_at: Mapping[str, int | None], places: int
) -> PlacedUpdate:
    """Cut a program by place.

    Args:
      home: the place of each input by name; None for those that every place has.
      out_at: the place where each output is wanted; None for every place.
      places: how many there are; the last is the hub.
    """
    return _Placer(program, home, out_at, places).placed()


def grouped(placed: PlacedUpdate, group: Mapping[str, int]) -> PlacedUpdate:
    """Split the pieces that compute several groups of outputs, the last group first.

    Args:
      group: the group of each output by name; what is not an output, and what several groups need,
        is made before all.
    """
    of = {a: group[n] for n, a in placed.program.outvars.items()
          if n in group and isinstance(a, Var)}  # fmt: skip
    pieces: list[StagePart] = []
    for piece in placed.pieces:
        groups = sorted({of[v] for v in piece.makes if v in of}, reverse=True)
        pieces += [piece] if len(groups) < 2 else _apart(piece, of, groups)
    return dataclasses.replace(placed, pieces=tuple(pieces))


def _apart(piece: StagePart, of: Mapping[Var, int], groups: Sequence[int]) -> list[StagePart]:
    """Split a piece: the common part of groups, and then each group."""
    inner = piece.inner
    wanted = {g: [v for v in piece.makes if of.get(v) == g] for g in groups}
    need = {g: set(backward_slice(inner.eqns, wanted[g])[0]) for g in groups}
    others = [v for v in piece.makes if v not in of]
    common = set(backward_slice(inner.eqns, others)[0])
    common |= {i for i in range(len(inner.eqns)) if sum(i in n for n in need.values()) > 1}
    common = set(backward_slice(inner.eqns, [v for i in common for v in inner.eqns[i].outvars])[0])
    made = {v for i in common for v in inner.eqns[i].outvars}
    read_later = {
        a
        for n in need.values()
        for i in n - common
        for a in inner.eqns[i].invars
        if isinstance(a, Var)
    }
    first = [
        v
        for i in sorted(common)
        for v in inner.eqns[i].outvars
        if v in read_later or v in piece.makes
    ]
    parts = [(sorted(common), first)]
    parts += [(sorted(need[g] - common), [v for v in wanted[g] if v not in made]) for g in groups]
    return [_part(piece.jaxpr, piece.place, which, makes) for which, makes in parts if makes]


def _part(jaxpr: ClosedJaxpr, at: int, which: Sequence[int], makes: Sequence[Var]) -> StagePart:
    """Return some equations of a jaxpr as what one place does."""
    inner = opened(jaxpr)
    eqns = [inner.eqns[i] for i in which]
    reads = [v for v in free_variables(eqns) if v not in inner.constvars]
    return StagePart(at, extract_part(jaxpr, reads, eqns, makes), tuple(reads), tuple(makes))


class _Placer:
    """The working state of one placement."""

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
        self.made_by = {v: i for i, e in enumerate(self.eqns) for v in e.outvars}
        self.at: dict[Var, int | None] = {v: home[n] for n, v in program.invars.items()}
        self.where: list[int | None] = []  # of each equation
        users = self._users()
        for eqn, wanted in zip(self.eqns, users, strict=True):
            found = {self.at.get(a) for a in eqn.invars if isinstance(a, Var)} - {None}
            real = found - {HUB}
            alone = len(real) == 1 and (HUB not in found or wanted <= real or self._larger(eqn))
            at = None if not found else next(iter(real)) if alone else HUB
            self.where.append(at)
            self.at |= dict.fromkeys(eqn.outvars, at)
        self.sends: dict[tuple[Var, int, int], None] = {}
        self.level: dict[tuple[Var, int], int] = {}  # of a value, in a place
        self.done: dict[tuple[int, int], int] = {}  # (equation, place) to level
        self.wanted: dict[int, dict[int, list[int]]] = {}  # level to place to equations

    def _larger(self, eqn: JaxprEqn) -> bool:
        """Return True if an equation reads more bytes of a stage than of the hub."""
        size = {True: 0, False: 0}
        for a in eqn.invars:
            if isinstance(a, Var) and self.at.get(a) is not None:
                size[self.at[a] == HUB] += nbytes(a.aval)
        return size[False] > size[True]

    def _users(self) -> list[set[int | None]]:
        """Return the places of the outputs that depend on each equation."""
        wanted: dict[Var, set[int | None]] = {}
        for n, a in self.program.outvars.items():
            if isinstance(a, Var):
                at = self.out_at[n]
                wanted.setdefault(a, set()).update(range(self.places) if at is None else [at])
        users: list[set[int | None]] = []
        for eqn in reversed(self.eqns):
            mine: set[int | None] = set().union(*(wanted.get(v, set()) for v in eqn.outvars))
            users.append(mine)
            for a in eqn.invars:
                if isinstance(a, Var):
                    wanted.setdefault(a, set()).update(mine)
        return users[::-1]

    def physical(self, at: int) -> int:
        """Return the index of a place; the hub is at the last one."""
        return self.places - 1 if at == HUB else at

    def placed(self) -> PlacedUpdate:
        ends: list[tuple[Atom, int]] = []
        for n, a in self.program.outvars.items():
            at = self.out_at[n]
            ends += [(a, p) for p in (range(self.places) if at is None else [at])]
        for a, p in ends:
            if isinstance(a, Var):
                self._need(a, p)
        pieces: list[StagePart] = []
        outs = {(a, p) for a, p in ends if isinstance(a, Var)}
        for level in sorted(self.wanted):
            for p in sorted(self.wanted[level]):
                pieces.append(self._piece(p, sorted(self.wanted[level][p]), outs))
        return PlacedUpdate(self.program, tuple(pieces), tuple(self.sends), self.home, self.out_at)

    def _need(self, var: Var, p: int) -> int:
        """Have a value in a place; the level from which on it is there."""
        stack: list[tuple[Var, int]] = [(var, p)]
        while stack:  # depth first, without the recursion that a long update would need
            v, q = stack[-1]
            if (v, q) in self.level:
                stack.pop()
                continue
            at = self.at.get(v)
            here = q if at is None else self.physical(at)
            if v not in self.made_by:  # an input, or a constant
                self.level[v, here] = 0
            elif (v, here) not in self.level:
                eqn = self.eqns[self.made_by[v]]
                operands = [(a, here) for a in eqn.invars if isinstance(a, Var)]
                missing = [k for k in operands if k not in self.level]
                if missing:
                    stack += missing
                    continue
                level = max((self.level[k] for k in operands), default=0)
                key = (self.made_by[v], here)
                if key not in self.done:
                    self.done[key] = level
                    self.wanted.setdefault(level, {}).setdefault(here, []).append(self.made_by[v])
                for o in eqn.outvars:
                    self.level[o, here] = level
            if here != q:
                self.sends[v, here, q] = None
                self.level[v, q] = self.level[v, here] + 1
            stack.pop()
        return self.level[var, p]

    def _piece(self, p: int, which: Sequence[int], outs: set[tuple[Var, int]]) -> StagePart:
        mine = set(which)
        later = {
            a
            for (i, q) in self.done
            if q == p and i not in mine
            for a in self.eqns[i].invars
            if isinstance(a, Var)
        }
        later |= {v for v, here, _ in self.sends if here == p} | {v for v, q in outs if q == p}
        makes = [v for i in which for v in self.eqns[i].outvars if v in later]
        return _part(self.program.jaxpr, p, which, makes)
