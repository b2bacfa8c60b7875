"""Search for gradients that a loop can reduce-scatter itself, one layer in each iteration.

The update needs only slices of a gradient. If a loop over layers computes the gradient, each
iteration can scatter the gradient of its layer. So no rank stores the full gradient of all layers.
A gradient may be a sum of terms, and a term may be the padded output of a loop. So the search
follows a gradient backwards to the loops. It continues only through linear equations that compute
each row of the output from one row of the input. A row is one entry along the sliced dimension:

    g = add_any a b          slices of g are computed from slices of a and of b
    a = pad a'               (layers 0 to 8)
    a' = scan ...            computed by a loop: each iteration scatters one layer
    b = mul 2 w              equal on all ranks: the sum over ranks is the number of ranks times b

If a loop accumulates a gradient in a carried value, the rewritten loop carries a slice.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from dtrans._jax import (
    REMAT,
    SCAN,
    Atom,
    BodyIndices,
    Jaxpr,
    JaxprEqn,
    Var,
    bodies,
    body_indices,
    linear_group,
    opened,
)
from dtrans.ir.dataflow import variables
from dtrans.ir.selection import values_at
from dtrans.rows.layout import RowAxis
from dtrans.rows.rules import Step, rows_of_operands
from dtrans.zero.rank_values import local_inside, operands_among


@dataclasses.dataclass(eq=False)
class ScatteredValues:
    """Values of a backward pass that each rank computes as slices, instead of in full.

    Attributes:
      rows: the dimension along which each of these values is sliced (`RowAxis`).
      steps: maps the index of an equation to a description of how it runs on slices.
      loops: maps the index of a loop to its sliced outputs, as a dict: index of the output ->
        sliced dimension inside the loop's body.
    """

    rows: dict[Var, RowAxis]
    steps: dict[int, Step] = dataclasses.field(default_factory=dict)
    loops: dict[int, dict[int, RowAxis]] = dataclasses.field(default_factory=dict)

    def operands(self, eqns: Sequence[JaxprEqn]) -> dict[int, Collection[int]]:
        """Return the indices of the sliced operands of each equation that runs on slices."""
        return {i: self.operands_at(i, eqns[i]) for i in (*self.steps, *self.loops)}

    def operands_at(self, i: int, eqn: JaxprEqn) -> Collection[int]:
        """Return the indices of the operands that equation `i` reads as slices."""
        if i in self.steps:
            return [k for k, row in enumerate(self.steps[i].operands) if row is not None]
        return [k for k, out in body_indices(eqn).carried.items() if out in self.loops[i]]

    def ends_of(self, v: Var, makers: Mapping[Var, tuple[int, JaxprEqn]]) -> tuple[int, bool]:
        """Find the values that must be reduce-scattered so that ranks get slices of `v`.

        The caller uses the result to decide if slices of `v` save memory. They do if these values
        are smaller than `v`, or if loops compute them layer by layer.

        Args:
          v: the value.
          makers: the result of `makers_of`.

        Returns:
          A pair (size, in_loops). `size` is the number of elements of the largest of these values
          outside of loops. `in_loops` is True if a loop scatters one of these values.
        """
        ahead, largest, in_loops = [v], 0, False
        while ahead:
            v = ahead.pop()
            if v not in makers:
                continue
            i, eqn = makers[v]
            if i in self.steps:
                ahead += [a for a in eqn.invars if isinstance(a, Var) and a in self.rows]
            elif i in self.loops and eqn.outvars.index(v) in self.loops[i]:
                in_loops = True
            else:
                largest = max(largest, int(v.aval.size))
        return largest, in_loops


def makers_of(eqns: Sequence[JaxprEqn]) -> dict[Var, tuple[int, JaxprEqn]]:
    """Return the equation that computes each value, with its index."""
    return {v: (i, e) for i, e in enumerate(eqns) for v in e.outvars}


def rows_of_outputs(outvars: Sequence[Atom], rows: Mapping[int, RowAxis]) -> dict[Var, RowAxis]:
    """Return the sliced dimension of each output, by the output's variable; omit literals.

    Args:
      outvars: the outputs.
      rows: the sliced dimension of outputs, by their index.
    """
    found: dict[Var, RowAxis] = {}
    for k, row in rows.items():
        out = outvars[k]
        if isinstance(out, Var):
            found[out] = row
    return found


def scattered_values(
    eqns: Sequence[JaxprEqn],
    wanted: Mapping[Var, RowAxis],
    local: Collection[Var],
    ends: Iterable[Atom] = (),
    inputs: Collection[Var] = (),
) -> ScatteredValues:
    """Find the values that a rank must compute as slices to get slices of the wanted gradients.

    Args:
      eqns: the equations, in order.
      wanted: the gradients that must be slices, with the sliced dimension of each.
      local: values that differ from rank to rank.
      ends: values that are read after the equations, and so are needed in full.
      inputs: inputs that may also become slices.
    """
    search = _Search(eqns, wanted, local, ends, inputs)
    for i in range(len(eqns) - 1, -1, -1):
        search.visit(i)
    _prune(search.flow, eqns, wanted, local, inputs)
    return search.flow


class _Search:
    """Search for values to compute as slices; visits equations from the last to the first.

    `scattered_values` describes the arguments.
    """

    def __init__(
        self,
        eqns: Sequence[JaxprEqn],
        wanted: Mapping[Var, RowAxis],
        local: Collection[Var],
        ends: Iterable[Atom],
        inputs: Collection[Var],
    ) -> None:
        self.eqns, self.wanted, self.local = eqns, wanted, local
        self.flow = ScatteredValues(dict(wanted))
        self.sliceable = set(inputs)
        self.reads: Counter[Atom] = Counter(variables(ends))
        for eqn in eqns:
            self.sliceable.update(eqn.outvars)
            self.reads.update(variables(eqn.invars))

    def visit(self, i: int) -> None:
        """Record that equation `i` runs on slices, if slices of its outputs are wanted.

        Slices of the equation's operands are then wanted, too.
        """
        eqn, flow = self.eqns[i], self.flow
        rows = {k: flow.rows[v] for k, v in enumerate(eqn.outvars) if v in flow.rows}
        if not rows:
            return
        if eqn.primitive.name == SCAN or eqn.primitive.name in REMAT:
            self._enter(i, rows)
        elif len(eqn.outvars) == 1:
            step = _step_on_rows(eqn, rows[0], self.local)
            if step is not None:
                flow.steps[i] = step
                for a, row in zip(eqn.invars, step.operands, strict=True):
                    self._want(a, row)

    def _want(self, a: Atom, row: RowAxis | None) -> None:
        """Record that ranks need only slices of a value, if no other equation reads it.

        Args:
          a: an operand.
          row: the dimension to slice; None if the equation reads the operand in full.
        """
        if row is None or not isinstance(a, Var):
            return
        may_be_slice = a in self.local and a in self.sliceable and a not in self.wanted
        if may_be_slice and self.reads[a] == 1:
            self.flow.rows[a] = row

    def _enter(self, i: int, rows: Mapping[int, RowAxis]) -> None:
        """Search the body of a loop or `jax.checkpoint`, if slices of its outputs are wanted."""
        eqn = self.eqns[i]
        body, indices = opened(*bodies(eqn)), body_indices(eqn)
        carried = {out: body.invars[k] for k, out in indices.carried.items()}
        inside: dict[int, RowAxis] = {}
        for k, row in rows.items():
            if k not in indices.stacks:
                inside[k] = row
            elif row.axis:  # in the body, a stacked output lacks its first dimension
                inside[k] = dataclasses.replace(row, axis=row.axis - 1)
        (local,) = local_inside(eqn, self.local)

        # Slices of one output may need slices of another output. So outputs whose slices save no
        # memory are dropped, repeatedly, until all remaining slices save memory.
        while inside:
            targets = rows_of_outputs(body.outvars, inside)
            inputs = {carried[k] for k in inside if k in carried}
            inner = scattered_values(body.eqns, targets, local, body.outvars, inputs)
            paid = {}
            for k, row in inside.items():
                if _saves_memory(inner, body, k, indices, carried.get(k)):
                    paid[k] = row
            if paid == inside:
                self.flow.loops[i] = inside
                break
            inside = paid
        for k, out in indices.carried.items():
            self._want(eqn.invars[k], inside.get(out))


def _prune(
    flow: ScatteredValues,
    eqns: Sequence[JaxprEqn],
    wanted: Mapping[Var, RowAxis],
    local: Collection[Var],
    inputs: Collection[Var],
) -> None:
    """Remove the values from `flow` that need no less memory as slices.

    To compute slices, a rank scatters the operands of an equation instead of its output. So slices
    save memory only if loops scatter the operands, or if the operands are smaller than the output.

    Args:
      flow: the decisions so far; changed in place.
      eqns, wanted, local, inputs: as for `scattered_values`.
    """
    # value -> size of the largest array that is scattered for its slices; 0 for outputs of loops
    size: dict[Var, int] = dict.fromkeys(inputs, 0)
    for i in sorted({*flow.steps, *flow.loops}):
        eqn = eqns[i]
        if i in flow.loops:
            size |= dict.fromkeys(values_at(eqn.outvars, flow.loops[i]), 0)
            continue
        operands = values_at(eqn.invars, flow.operands_at(i, eqn))
        terms = variables(operands)
        sizes = [size.get(a, int(a.aval.size)) for a in terms if a in local]
        largest = max(sizes, default=0)
        (out,) = eqn.outvars
        # keep an equation with a term that is equal on all ranks, since that term is not scattered
        if len(sizes) == len(terms) and largest >= out.aval.size:
            del flow.steps[i]
        else:
            size[out] = largest

    # then remove the equations whose slices no remaining equation reads
    reached = set(wanted)
    for i in sorted({*flow.steps, *flow.loops}, reverse=True):
        eqn = eqns[i]
        if reached.isdisjoint(eqn.outvars):
            flow.steps.pop(i, None)
            flow.loops.pop(i, None)
            continue
        operands = values_at(eqn.invars, flow.operands_at(i, eqn))
        reached.update(variables(operands))
    flow.rows = {v: row for v, row in flow.rows.items() if v in reached}


def _step_on_rows(eqn: JaxprEqn, row: RowAxis, local: Collection[Var]) -> Step | None:
    """Return a description of how a rank computes only its slice of an equation's output.

    Return None unless the equation is linear in its operands that differ from rank to rank
    (`local`).
    """
    summed = operands_among(eqn, local)
    if not linear_group(eqn, summed):
        return None
    step = rows_of_operands(eqn, row)
    if step is None or any(step.operands[k] is None for k in summed):
        return None
    return step


def _saves_memory(
    inner: ScatteredValues, body: Jaxpr, k: int, indices: BodyIndices, carried: Var | None
) -> bool:
    """Return True if a loop's body needs less memory when it computes output `k` as slices.

    Args:
      inner: the values that the body can compute as slices.
      body: the body.
      k: the index of the output.
      indices: maps inputs and outputs of the body to operands and outputs of its equation.
      carried: the body's input with the previous value of output `k`, if the loop carries the
        output; else None.
    """
    out = body.outvars[k]
    if not isinstance(out, Var) or out in body.invars:
        return False
    if k in indices.stacks:
        return True
    largest, in_loops = inner.ends_of(out, makers_of(body.eqns))
    if carried is None:
        return in_loops
    return carried in inner.rows and 2 * largest <= int(out.aval.size)
