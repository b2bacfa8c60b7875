"""Which values cross from one server to others, and after how many exchanges each value is known.

A value is made where its rows are (its *home*: a leaf, or a group of leaves), or, if it is shared,
on every server that needs it. It crosses where a home gives something to the others:

    a reduction over the rows of a leaf         each block has a part; the parts are combined
    a value of a whole leaf that others read    its one owner has it; it is sent as it is

Crossings are exchanged in rounds: level 0 is what a server knows by itself, level n + 1 what it
knows after round n. LAMB behind a clip by global norm takes three: the norm of the gradients, the
norms of the updates, and those once more (`optax.safe_norm`). Levels are those of the equations,
whatever the placement; a round in which nothing has to leave a server costs nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

from dtrans._jax import Atom, JaxprEqn, Literal, Var
from dtrans.ir.dataflow import propagate
from dtrans.ops import EXACT
from dtrans.ops.exact_sum import DIGITS, part_type
from dtrans.rows.analysis import RowAnalysis
from dtrans.rows.layout import SHARED, Colocated, RowAxis


@dataclasses.dataclass(frozen=True, eq=False)
class CrossServerValue:
    """A value that a home gives to others.

    Attributes:
      name: `all_reduce/3`; the same on every server.
      var: the value.
      op: how its parts become one.
      part: the type of a part.
      home: where the parts are made.
      level: at which they are made; the value itself is known one level later.
    """

    name: str
    var: Var
    op: str
    part: Any
    home: str
    level: int


class ExchangeRounds:
    """The levels of all values of an analysed optimize half.

    Args:
      exact: leaves whose sums over rows are exact, where they are numbers (`dtrans.ops.exact_sum`).

    Attributes:
      crossings: by value.
      eqns_of: for each home, the positions of its equations, in order.
      makers: the equations by what they make, without values that cross.
    """

    def __init__(self, analysis: RowAnalysis, exact: Collection[str] = ()) -> None:
        self.analysis = analysis
        self._exact = exact
        self.eqns: Sequence[JaxprEqn] = analysis.half.eqns
        self.made_by = {v: i for i, e in enumerate(self.eqns) for v in e.outvars}
        self.crossings: dict[Var, CrossServerValue] = {}
        self.eqns_of: dict[str, list[int]] = {}
        self._at_home: dict[Var, int] = {}
        # what goes in at its home is known to others after one exchange
        self._shared: dict[Var, int] = {
            v: 1 for v in analysis.inputs.values() if analysis.layout(v) is not SHARED
        }
        self._parts: dict[Var, int] = {}
        for i, eqn in enumerate(self.eqns):
            self._follow(i, eqn)
        for i, eqn in enumerate(self.eqns):
            self._note_crossings(i, eqn)
        for name, out in analysis.outputs.items():
            self._note_read(out, analysis.home(analysis.layout(analysis.inputs[name])))
        self.makers = {v: self.eqns[i] for v, i in self.made_by.items() if v not in self.crossings}
        self._dependent = propagate(self.eqns, dict.fromkeys(analysis.half.inner.invars, 1), {})

    def depends(self, var: Var) -> bool:
        """Return True if a value depends on an input; the others are constants, made where they are
        read."""
        return bool(self._dependent.get(var))

    # -- where and when --------------------------------------------------------------------------

    def home_of(self, i: int) -> str | None:
        """Where an equation is carried out; None for every server that needs it."""
        step = self.analysis.flow.steps.get(i)
        if step is None:
            return None
        if step.reduce:
            return self.analysis.home(next(x for x in step.operands if x is not None))
        return next((self.analysis.home(x) for x in step.outs if x is not SHARED), None)

    def at_home(self, var: Var) -> int:
        """The level at which a value is known where it is made."""
        return self._at_home.get(var, 0)

    def shared(self, atom: Atom) -> int:
        """The level at which a value is known to everybody."""
        return 0 if isinstance(atom, Literal) else self._shared.get(atom, 0)

    def of_eqn(self, i: int) -> int:
        """The level at which an equation with a home is carried out."""
        out = self.eqns[i].outvars[0]
        return self._parts[out] if out in self._parts else self.at_home(out)

    def read(self, atom: Atom, home: str | None) -> int:
        """The level at which a value is known to a reader."""
        layout = self.analysis.layout(atom)
        if home is not None and layout is not SHARED and self.analysis.home(layout) == home:
            assert isinstance(atom, Var)
            return self.at_home(atom)
        return self.shared(atom)

    def derived(self, var: Var) -> bool:
        """Whether others had better make a value of a whole leaf themselves, from its operands.

        They had where that is smaller (a scalar that is broadcast), or is known to all a round
        earlier (the square of a 0-d leaf, added to the sum of those of others).
        """
        i = self.made_by.get(var)
        if i is None or not isinstance(self.analysis.layout(var), Colocated):
            return False
        ins = [a for a in self.eqns[i].invars if self.analysis.layout(a) is not SHARED]
        if any(isinstance(self.analysis.layout(a), RowAxis) for a in ins):
            return False
        size, parts = math.prod(var.aval.shape), sum(math.prod(a.aval.shape) for a in ins)
        sooner = max(map(self.shared, self.eqns[i].invars)) <= self.at_home(var)
        return size > parts or (size == parts and sooner)

    def _follow(self, i: int, eqn: JaxprEqn) -> None:
        home = self.home_of(i)
        level = max((self.read(a, home) for a in eqn.invars), default=0)
        step = self.analysis.flow.steps.get(i)
        if home is not None:
            self.eqns_of.setdefault(home, []).append(i)
        for v in eqn.outvars:
            if home is None:
                self._shared[v] = level
            elif step is not None and step.reduce:
                self._parts[v] = level
                self._shared[v] = level + 1
            else:
                self._at_home[v] = level
                self._shared[v] = (
                    max(map(self.shared, eqn.invars)) if self.derived(v) else level + 1
                )

    # -- what crosses ----------------------------------------------------------------------------

    def _note_crossings(self, i: int, eqn: JaxprEqn) -> None:
        step = self.analysis.flow.steps.get(i)
        if step is None:
            return
        home = self.home_of(i)
        for a in eqn.invars:
            self._note_read(a, home)
        if step.reduce and home is not None:
            (out,) = eqn.outvars
            op = EXACT if home in self._exact and _can_be_exact(eqn) else step.reduce
            self._cross(out, op, home, self._parts[out])

    def _note_read(self, atom: Atom, home: str | None) -> None:
        """A reader at `home` (None: everywhere) reads a value."""
        layout = self.analysis.layout(atom)
        if not isinstance(layout, Colocated) or self.analysis.home(layout) == home:
            return
        assert isinstance(atom, Var)
        if self.derived(atom):
            for a in self.eqns[self.made_by[atom]].invars:
                self._note_read(a, None)
        else:
            owner = self.analysis.home(layout)
            assert owner is not None
            self._cross(atom, "or" if atom.aval.dtype == bool else "sum", owner, self.at_home(atom))

    def _cross(self, var: Var, op: str, home: str, level: int) -> None:
        if var not in self.crossings:
            part = part_type(var.aval.dtype) if op == EXACT else var.aval
            self.crossings[var] = CrossServerValue(
                f"all_reduce/{len(self.crossings)}", var, op, part, home, level
            )


def _can_be_exact(eqn: JaxprEqn) -> bool:
    """Whether it is a sum of all there is, in a type whose numbers can be cut into digits."""
    out = eqn.outvars[0].aval
    return eqn.primitive.name == "reduce_sum" and not out.shape and out.dtype.name in DIGITS
