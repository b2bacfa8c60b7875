"""Values that parameter servers exchange within an update, and the order of the exchanges.

Each server stores and updates some parameters. A value may depend on rows of a parameter. The
servers of this parameter compute the value, and the parameter is the *home* of the value.
Parameters that are updated together have one home. Shared values, such as a learning rate, are
computed on every server that reads them. A *cross-server value* is computed at a home and read on
other servers:

    a reduction over the rows of a parameter        each block has a term; servers combine them
    a value of a parameter that is not divided      its server sends it

Servers exchange these values in rounds. The *level* of a value is the number of rounds before the
value is known: 0 for a learning rate, 1 for a norm of all gradients. LAMB after a clip by global
norm has three rounds: one for the norm of the gradients, and two for the norms of updates
(`optax.safe_norm` computes them in two steps). Levels do not depend on the placement. A round
without values to send costs nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

from dtrans._jax import Atom, JaxprEqn, Literal, Var
from dtrans.ir.dataflow import producer_positions, propagate
from dtrans.ops import EXACT
from dtrans.ops.exact_sum import DIGITS, part_type
from dtrans.rows.analysis import RowAnalysis
from dtrans.rows.layout import SHARED, Colocated, row_axes


@dataclasses.dataclass(frozen=True, eq=False)
class CrossServerValue:
    """Value, such as a norm, that some servers compute and other servers read.

    Attributes:
      name: name on every server, e.g. `all_reduce/3`.
      var: variable of the value in the update.
      op: operation, e.g. "sum", that combines the terms of the value, one from each block.
      term_type: type of a term.
      home: the parameter to which the value belongs: its servers compute the terms.
      level: number of exchanges before the terms are computed. One more exchange gives the value.
    """

    name: str
    var: Var
    op: str
    term_type: Any
    home: str
    level: int


class ExchangeRounds:
    """Analysis of an update: the number of exchanges between servers before each value is known.

    A norm of all gradients needs one exchange, in which servers add up their terms. The learning
    rate needs none. We call this number the *level* of the value. On the servers of its own
    parameter, a value has the level `level_at_home`. On all other servers, its level is
    `level_everywhere`.

    Args:
      analysis: row analysis of the update.
      exact: parameters with sums over rows that are computed exactly (`dtrans.ops.exact_sum`).

    Attributes:
      crossings: the values that servers exchange, by variable.
      eqns_of: maps each parameter to the indices of the equations that its servers run, in order.
      makers: maps each variable, except exchanged values, to the equation that computes it.
    """

    def __init__(self, analysis: RowAnalysis, exact: Collection[str] = ()) -> None:
        self.analysis = analysis
        self._exact = exact
        self.eqns: Sequence[JaxprEqn] = analysis.half.eqns
        self.producers = producer_positions(self.eqns)
        self.crossings: dict[Var, CrossServerValue] = {}
        self.eqns_of: dict[str, list[int]] = {}
        self._at_home: dict[Var, int] = {}
        # number of rounds after which all servers know a value: 1 for an input that some servers
        # store
        self._shared: dict[Var, int] = {}
        for v in analysis.inputs.values():
            if analysis.layout(v) is not SHARED:
                self._shared[v] = 1
        self._parts: dict[Var, int] = {}
        for i, eqn in enumerate(self.eqns):
            self._follow(i, eqn)
        for i, eqn in enumerate(self.eqns):
            self._note_crossings(i, eqn)
        for name, out in analysis.outputs.items():
            self._note_read(out, analysis.home(analysis.layout(analysis.inputs[name])))
        self.makers: dict[Var, JaxprEqn] = {}
        for v, i in self.producers.items():
            if v not in self.crossings:
                self.makers[v] = self.eqns[i]
        self._dependent = propagate(self.eqns, dict.fromkeys(analysis.half.inner.invars, 1), {})

    def depends(self, var: Var) -> bool:
        """Return True if a value depends on an input of the update, False for a constant."""
        return bool(self._dependent.get(var))

    # -- homes and levels ------------------------------------------------------------------------

    def home_of(self, i: int) -> str | None:
        """Return a parameter of the servers that run equation `i`; None if all servers run it."""
        step = self.analysis.flow.steps.get(i)
        if step is None:
            return None
        layouts = step.operands if step.reduce else step.outs
        for layout in layouts:
            if layout is not None and layout is not SHARED:
                return self.analysis.home(layout)
        return None

    def level_at_home(self, var: Var) -> int:
        """Return the number of exchanges before the servers of a value's own parameter know it."""
        return self._at_home.get(var, 0)

    def level_everywhere(self, atom: Atom) -> int:
        """Return the number of exchanges before all servers know a value."""
        if isinstance(atom, Literal):
            return 0
        return self._shared.get(atom, 0)

    def level_of_equation(self, i: int) -> int:
        """Return the number of exchanges before a server can run equation `i`.

        The equation must depend on rows of a parameter.
        """
        out = self.eqns[i].outvars[0]
        if out in self._parts:
            return self._parts[out]
        return self.level_at_home(out)

    def level_for(self, atom: Atom, home: str | None) -> int:
        """Return the number of exchanges before the servers of one parameter know a value.

        Args:
          atom: the value.
          home: the parameter; None for all servers.
        """
        layout = self.analysis.layout(atom)
        if home is not None and layout is not SHARED and self.analysis.home(layout) == home:
            assert isinstance(atom, Var)
            return self.level_at_home(atom)
        return self.level_everywhere(atom)

    def exchanges_operands(self, var: Var) -> bool:
        """Return True if servers should exchange an equation's operands instead of its result.

        Each server that needs the result then computes it. This is better if the operands are
        smaller, such as a scalar that is broadcast. It is also better if they have equal size and
        are known one exchange earlier.

        Args:
          var: the result. If it belongs to a parameter that is divided among servers, the method
            returns False.
        """
        i = self.producers.get(var)
        if i is None or not isinstance(self.analysis.layout(var), Colocated):
            return False
        ins = [a for a in self.eqns[i].invars if self.analysis.layout(a) is not SHARED]
        if row_axes(map(self.analysis.layout, ins)):
            return False
        size, parts = math.prod(var.aval.shape), sum(math.prod(a.aval.shape) for a in ins)
        sooner = max(map(self.level_everywhere, self.eqns[i].invars)) <= self.level_at_home(var)
        return size > parts or (size == parts and sooner)

    def _follow(self, i: int, eqn: JaxprEqn) -> None:
        home = self.home_of(i)
        level = max((self.level_for(a, home) for a in eqn.invars), default=0)
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
                self._shared[v] = level + 1
                if self.exchanges_operands(v):
                    self._shared[v] = max(map(self.level_everywhere, eqn.invars))

    # -- crossings -------------------------------------------------------------------------------

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
        """Record that servers read a value; if they do not compute it, it must be exchanged.

        Args:
          atom: the value.
          home: the servers of this parameter read the value; None for all servers.
        """
        layout = self.analysis.layout(atom)
        if not isinstance(layout, Colocated) or self.analysis.home(layout) == home:
            return
        assert isinstance(atom, Var)
        if self.exchanges_operands(atom):
            for a in self.eqns[self.producers[atom]].invars:
                self._note_read(a, None)
        else:
            owner = self.analysis.home(layout)
            assert owner is not None
            op = "or" if atom.aval.dtype == bool else "sum"
            self._cross(atom, op, owner, self.level_at_home(atom))

    def _cross(self, var: Var, op: str, home: str, level: int) -> None:
        if var not in self.crossings:
            part = part_type(var.aval.dtype) if op == EXACT else var.aval
            self.crossings[var] = CrossServerValue(
                f"all_reduce/{len(self.crossings)}", var, op, part, home, level
            )


def _can_be_exact(eqn: JaxprEqn) -> bool:
    """Return True if an equation is a sum that `dtrans.ops.exact_sum` can compute.

    The sum must be over all axes, and in a supported dtype.
    """
    out = eqn.outvars[0].aval
    return eqn.primitive.name == "reduce_sum" and not out.shape and out.dtype.name in DIGITS
