"""Writer of the program of one shard.

Each equation is written in order, by the strategy that `dtrans.engine.rules` chooses. Linear
equations may run on terms of partial sums (`dtrans.engine.open_sums`). `dtrans.engine.values`
stores the values and converts them between layouts. `BodyWriter` applies the same rules to the
bodies of remat, loops and branches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, TypeVar

from dtrans._jax import (
    COND,
    CUSTOM_RULES,
    CUSTOM_VJP,
    REMAT,
    SCAN,
    WHILE,
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Var,
    bodies,
    closed_with,
    equations,
    equations_inside,
    is_rearrangement,
    line_of,
    opened,
    origin_of,
    scan_counts,
    scan_iterations,
    scan_length,
    scope_of,
)
from dtrans.engine.counted_values import CountedValues
from dtrans.engine.custom_rules import call_on_pieces
from dtrans.engine.layout import (
    PARTIAL,
    Gathered,
    Partial,
    ShardLayout,
    Shards,
)
from dtrans.engine.loops import LoopPlan, WrittenBody, condition_rows, moved_bytes, plan_loop
from dtrans.engine.open_sums import linear_terms, open_operands
from dtrans.engine.rules import Strategy, choose
from dtrans.engine.sharded_scans import end_padding, mask_padding, sharded_iterations
from dtrans.engine.strategy_writers import write_strategy
from dtrans.engine.values import ShardValues
from dtrans.ir.cost import nbytes
from dtrans.ir.dataflow import avals, variables
from dtrans.ir.display import short_type
from dtrans.ir.inline import eliminate_dead, inline_calls
from dtrans.ir.selection import number_items
from dtrans.ops import collective_of
from dtrans.rows.layout import SHARED, RowAxis, all_shared, row_axes, rows_or_shared
from dtrans.step.capture import value_and_grad_p
from dtrans.step.scopes import has_local_scope, in_local_scope, in_split_scope


_WITH_BODIES = frozenset({*REMAT, SCAN, WHILE, COND})


Result = TypeVar("Result")


class SplitWriter(ShardValues):
    """Writer of one shard's program: takes the equations of the single-device program one by one.

    For each equation, the writer chooses a strategy, and converts the operands to the layouts that
    the strategy needs. Then it writes the equation on this shard's pieces.
    """

    # values that equations read only as pieces, with their layouts: only these pieces are computed
    only_as_rows: Mapping[Var, RowAxis] = MappingProxyType({})
    out_names: Sequence[str] = ()  # names of the program's outputs, for `gathers`
    # True if the program is differentiated later, so that custom derivative rules must stay
    keeps_rules = False
    # values to leave as partial sums, see `open_operands`
    terms: Collection[Var] = frozenset()
    # values that shards need only as pieces, and the layouts of the pieces (`row_demands`)
    demands: Mapping[Var, RowAxis] = MappingProxyType({})
    # values of `dtrans.split` scopes that other equations read, with the layout of their rows
    # (`dtrans.engine.split.rows_outside`): these equations run on rows of the batch
    outside: Mapping[Var, RowAxis] = MappingProxyType({})
    # sharded state, which is gathered before an equation rearranges or broadcasts the state
    state: Set[Var] = frozenset()
    # output of an equation -> role that the builder assigns to the written equations
    groups: Mapping[Var, str] = MappingProxyType({})

    def __init__(self, jaxpr: ClosedJaxpr, shards: Shards, within: str = "") -> None:
        super().__init__(jaxpr, shards, within)
        self.source = jaxpr
        self.bodies = BodyWriter(self)
        self._counted = CountedValues(self)

    def build_rows(self, var: Var, row: RowAxis) -> Atom | None:
        """Write a shard's piece of a value that depends only on `iota` and constants.

        Return None for any other value (`dtrans.engine.counted_values`).
        """
        return self._counted.build_rows(var, row)

    def carry_out(self, eqn: JaxprEqn, way: Strategy) -> list[Atom]:
        """Write an equation by a strategy; return this shard's outputs before they are reduced."""
        return write_strategy(self, eqn, way)

    # -- equations -------------------------------------------------------------------------------

    def equation(self, eqn: JaxprEqn) -> None:
        """Write one equation of the single-device program for this shard.

        Outputs that differ between shards are added to `local_values`.
        """
        self.b.role = next((self.groups[v] for v in eqn.outvars if v in self.groups), "")
        self._write_equation(eqn)
        for v in eqn.outvars:
            if v in self.local_terms or (self.layout(v) is SHARED and self._makes_local(eqn)):
                self.local_values.add(v)

    def _makes_local(self, eqn: JaxprEqn) -> bool:
        """Return True if full outputs of an equation differ between shards.

        Outputs differ if the equation reads values that differ, or reduces pieces inside
        `dtrans.local`.
        """
        if not self.local_values.isdisjoint(variables(eqn.invars)):
            return True
        if eqn.primitive.name in _WITH_BODIES:
            return self.covers_local(eqn)
        reduces = bool(row_axes(map(self.layout, eqn.invars)))
        return reduces and (self.is_local or in_local_scope(eqn))

    def _write_equation(self, eqn: JaxprEqn) -> None:
        self.needed_by(functools.partial(self.describe, eqn), eqn)
        if self.outside and not in_split_scope(eqn):
            for v in variables(eqn.invars):
                if v in self.outside and not isinstance(self.layout(v), RowAxis):
                    self._to_rows(v, self.outside[v])
        ins = list(map(self.layout, eqn.invars))
        reads_state = is_rearrangement(eqn) and not self.state.isdisjoint(variables(eqn.invars))
        if reads_state and eqn.outvars[0] not in self.demands:
            ins = [SHARED]
        if eqn.primitive.name in _WITH_BODIES and not all_shared(ins):
            in_sequence = self.covers_local(eqn) or self.orders is None
            iterations = None
            if not in_sequence:
                iterations = sharded_iterations(eqn, ins)
            if iterations is not None and not self.bodies.may_not_end(eqn, iterations[0]):
                self.bodies.write_sharded_scan(eqn, *iterations)
                return
            if (plan := self.bodies.plan(eqn, ins)) is not None:
                self.bodies.write_bodies(eqn, plan)
                return
            ins = [SHARED] * len(ins)
        # A loss that reads no rows of the batch (a replay buffer) is scaled inside the loss
        # function. A factor on its gradients would separate them from the equations that mark them.
        if eqn.primitive is value_and_grad_p:
            self.bodies.write_loss(eqn, ins)
            return
        has_rule = eqn.primitive.name in CUSTOM_RULES
        if has_rule and row_axes(ins):
            if self.bodies.write_ruled_call(eqn, ins):
                return
        elif self.keeps_rules and self.bodies.needs_full_cotangents(eqn):
            aval = eqn.outvars[0].aval
            reason = f"the derivative rule of {self.describe(eqn)}"
            self.gathers.append(
                Gathered(aval.shape, aval.dtype, nbytes(aval), reason, line_of(eqn))
            )
        if has_rule:  # `write_ruled_call` could not rewrite the call, so it runs on full values
            ins = [SHARED] * len(ins)
        if all_shared(ins):
            row = self.only_as_rows.get(eqn.outvars[0]) if eqn.outvars else None
            if row and (piece := self.build_rows(eqn.outvars[0], row)):
                self.define_outputs(eqn, [row], [piece])
                return
            atoms = self.in_full(eqn.invars)
            values: Sequence[Atom] = self.b.copy(eqn, atoms, _types(eqn))
            self.define_outputs(eqn, [SHARED] * len(values), values)
            return
        if (linear := open_operands(self, eqn, ins, self.terms)) is not None:
            layouts = [PARTIAL if i in linear else SHARED for i in range(len(ins))]
            terms = self.in_layouts(eqn.invars, layouts)
            sums = [a for a, x in zip(eqn.invars, ins, strict=True) if isinstance(x, Partial)]
            if self.local_terms.issuperset(sums):
                self.local_terms.update(eqn.outvars)
            self.define_outputs(
                eqn, [PARTIAL] * len(eqn.outvars), self.b.copy(eqn, terms, _types(eqn))
            )
            return
        for v in variables(eqn.invars):
            if v in self.demands:
                self.scatter(v, self.demands[v])
        as_term = bool(eqn.outvars) and eqn.outvars[0] in self.terms
        orders = None if self.in_local else self.orders
        way = choose(eqn, [self.operand(a) for a in eqn.invars], self.shards, as_term, orders)
        values = self.carry_out(eqn, way)
        if orders is not None:
            for x in row_axes(way.outs):
                if (x.order or way.moves) and x not in orders:
                    orders.append(x)
        if way.reduce == "sum":
            self.define_outputs(eqn, [PARTIAL] * len(eqn.outvars), values)
            if self.in_local:
                self.local_terms.update(eqn.outvars)
        else:
            if way.reduce:
                values = self.reduced_here(way.reduce, values)
            self.define_outputs(eqn, way.outs, values)
        # a gather has one output for each operand; other equations rearrange their first operand
        is_gather = collective_of(eqn) is not None
        for i, v in enumerate(eqn.outvars):
            a = eqn.invars[i if is_gather else 0]
            if self.operand(a).is_input and self._has_entries_of(eqn, a, v):
                self.inputs.add(v)

    def _to_rows(self, v: Var, row: RowAxis) -> None:
        """Replace a full value or a partial sum by this shard's piece, for all later equations."""
        self.scatter(v, row)
        if self.layout(v) is SHARED:
            self.define(v, row, self.read(v, row))

    def _has_entries_of(self, eqn: JaxprEqn, a: Atom, v: Var) -> bool:
        """Return True if an output contains only entries of an operand, cast or rearranged.

        Such an output of a sharded input counts as an input, too, so that it is gathered only as a
        last resort. One layer of a stacked operand also counts as such an output. So does the
        all-gather of an operand over another mesh axis.
        """
        name, had = eqn.primitive.name, self.layout(a)
        if name not in ("slice", "dynamic_slice", "all_gather", "after"):
            return is_rearrangement(eqn) or name == "convert_element_type"
        if had != self.layout(v):
            return False
        source = self.producer(a)
        is_gathered = source is not None and collective_of(source) is not None
        is_layer = any(n == 1 < m for m, n in zip(a.aval.shape, v.aval.shape, strict=True))
        return collective_of(eqn) is not None or name == "after" or is_gathered or is_layer

    def covers_local(self, eqn: JaxprEqn) -> bool:
        """Return True if an equation, or an equation in its body, is inside `dtrans.local`."""
        return self.is_local or has_local_scope(eqn)

    def define_outputs(
        self, eqn: JaxprEqn, layouts: Sequence[ShardLayout], values: Sequence[Atom]
    ) -> None:
        """Store the outputs of an equation in the layouts in which they were computed."""
        for v, x, value in zip(eqn.outvars, layouts, values, strict=True):
            self.define(v, x, value)

    def describe(self, eqn: JaxprEqn) -> str:
        """Describe an equation: `sort of f32[8,10] (model/head)`."""
        where = scope_of(eqn) or origin_of(eqn) or self.within
        operands = ", ".join(short_type(a.aval) for a in eqn.invars[:2])
        return f"{eqn.primitive.name} of {operands}" + (f" ({where})" if where else "")

    def _output(self, number: int) -> str:
        name = self.out_names[number] if self.out_names else f"output {number}"
        return name + (f" of {self.within}" if self.within else "")

    # -- programs --------------------------------------------------------------------------------

    def write(
        self, inner: Jaxpr, wanted: Callable[[int, ShardLayout], ShardLayout]
    ) -> tuple[list[Atom], list[ShardLayout]]:
        """Write all equations of a program or body; return its outputs, and their layouts.

        Args:
          inner: the jaxpr.
          wanted: function that chooses the layout of an output. It takes the index of the output,
            and the layout in which the output was computed.
        """
        for eqn in inner.eqns:
            self.equation(eqn)
        results: list[Atom] = []
        layouts: list[ShardLayout] = []
        for i, a in enumerate(inner.outvars):
            # an output of the program must be equal on all shards, so a local value is averaged
            is_local = isinstance(a, Var) and a in self.local_values and not self.within
            producer = self.producer(a) if is_local else None
            self.needed_by(functools.partial(self._output, i), producer)
            layout = wanted(i, PARTIAL if is_local else self.layout(a))
            if is_local and layout is SHARED:
                results += self.collectives.all_reduce("sum", [self.term(a)])
            else:
                results.append(self.as_(a, layout))
            layouts.append(layout)
        return results, layouts

    def write_inner(
        self, jaxpr: ClosedJaxpr, write: Callable[[SplitWriter], Result], within: str
    ) -> Result:
        """Write the body of a loop, branch or call with a new writer.

        Args:
          jaxpr: the body, with calls inlined.
          write: function that writes the equations of the body with the new writer.
          within: description of the equation that has the body, for errors and notes.

        Returns:
          The result of `write`.
        """
        return _written(jaxpr, self.shards, write, within, self.orders)[0]

    @property
    def moved(self) -> int:
        """Bytes that one shard communicates (`moved_bytes`); the body of a loop counts once."""
        moved = 0
        for eqn in self.b.eqns:
            moved += sum(moved_bytes([eqn, *equations_inside(eqn)]).values())
        return moved

    @property
    def sent_bytes(self) -> int:
        """Bytes that one shard sends: as `moved`, but an all-reduce sends twice its bytes."""
        reduced = 0
        for eqn in self.b.eqns:
            reduced += moved_bytes([eqn, *equations_inside(eqn)]).get("all_reduce", 0)
        return self.moved + reduced

    def new_writer(
        self, only_as_rows: Mapping[Var, RowAxis], sums_to_scatter: Collection[Var] = ()
    ) -> SplitWriter:
        """Return an empty writer for a second attempt at the same jaxpr.

        Args:
          only_as_rows: values that the first attempt needed only as pieces, with the layouts of the
            pieces.
          sums_to_scatter: partial sums to reduce-scatter, although several equations read them.
        """
        writer = SplitWriter(self.source, self.shards, self.within)
        writer.bodies.plans, writer.orders = self.bodies.plans, self.orders
        writer.only_as_rows, writer.sums_to_scatter = only_as_rows, sums_to_scatter
        return writer


class BodyWriter:
    """Writer of equations that contain jaxprs: loops, branches, remat, and custom derivatives.

    Args:
      outer: writer of the jaxpr that contains these equations.
    """

    def __init__(self, outer: SplitWriter) -> None:
        self.outer = outer
        # (equation, layouts of its operands, ...) -> plan
        self.plans: dict[Any, LoopPlan | None] = {}

    def plan(self, eqn: JaxprEqn, ins: Sequence[ShardLayout]) -> LoopPlan | None:
        """Return the plan of a loop, branch or remat; None if it should run on full values."""
        reader = self.outer.describe(eqn)
        inputs = [self.outer.operand(a).is_input for a in eqn.invars]
        open_ends = {i for i, v in enumerate(eqn.outvars) if v in self.outer.terms}

        def write(
            body: Any, ins: Sequence[ShardLayout], outs: Sequence[ShardLayout] | None, carried: int
        ) -> WrittenBody:
            added = sorted(open_ends.union(range(carried)))
            are_inputs = inputs[len(inputs) - len(ins) :]
            return self._body(eqn, body, ins, outs, added, reader, are_inputs)

        key = id(eqn), tuple(ins), tuple(inputs)
        if key not in self.plans:
            self.plans[key] = plan_loop(eqn, ins, write, self.outer.shards, terms=open_ends)
        return self.plans[key]

    def _body(
        self,
        eqn: JaxprEqn,
        body: Any,
        ins: Sequence[ShardLayout],
        outs: Sequence[ShardLayout] | None,
        added: Sequence[int],
        reader: str,
        inputs: Sequence[bool],
    ) -> WrittenBody:
        """Rewrite a body for one shard.

        Args:
          eqn: the equation with the body.
          body: the body.
          ins: layout of each input.
          outs: wanted layout of each output; None to return each as it was computed.
          added: indices of outputs that may be partial sums.
          reader: text of the equation, for `gathers`.
          inputs: for each input of the body, True if its operand is a sharded input of the program.
        """
        is_local = self.outer.is_local or in_local_scope(eqn)
        reads_local = self.outer.covers_local(eqn)
        reads_local |= not self.outer.local_values.isdisjoint(variables(eqn.invars))
        flat = inline_calls(body, rules=self.outer.keeps_rules)
        ends = opened(flat).outvars
        open_ends = variables(ends[i] for i in added if i < len(ends))
        terms = linear_terms(opened(flat), open_ends)

        def write(w: SplitWriter) -> WrittenBody:
            w.terms, w.is_local, w.keeps_rules = terms, is_local, self.outer.keeps_rules
            w.pieces.takes_index = self.outer.pieces.takes_index
            for v, x, is_input in zip(opened(flat).invars, ins, inputs, strict=True):
                w.take(v, x, is_input=is_input)
                if reads_local and x is SHARED:
                    w.local_values.add(v)
            results, layouts = w.write(opened(flat), lambda i, x: x if outs is None else outs[i])
            numbers = number_items(opened(flat).invars)
            sliced = {numbers[v]: row for v, row in w.sliced.items() if isinstance(row, RowAxis)}
            return WrittenBody(
                eliminate_dead(w.b.build(results)),
                tuple(layouts),
                tuple(w.gathers),
                sliced,
                w.scaled,
                w.pieces.takes_index and w.pieces.reads_index,
            )

        return self.outer.write_inner(flat, write, reader)

    def write_bodies(self, eqn: JaxprEqn, plan: LoopPlan) -> None:
        """Write a loop, branch or remat with bodies that `plan` has rewritten for this shard."""
        atoms = self.outer.in_layouts(eqn.invars, plan.operands)
        first: list[Atom] = []
        if any(b.takes_index for b in plan.bodies):
            first.append(self.outer.pieces.index())
        new = []
        for body in plan.bodies:
            jaxpr = body.jaxpr
            # if one branch reads the shard's index, all branches must take the index as an operand
            if first and not body.takes_index:
                jaxpr = _with_an_operand(jaxpr, first[0])
            new.append(jaxpr)
            self.outer.gathers += body.gathers
            self.outer.scaled |= body.scaled
        rows = condition_rows(eqn, plan)
        if rows is not None:
            size = opened(bodies(eqn)[0]).outvars[0].aval.shape[rows.axis]
            if self.outer.shards.pads(size, rows):  # a row of padding may never finish
                is_real = self.outer.pieces.shard_row(self.outer.shards.entries(size, rows) >= 0)
                new = [end_padding(new[0], rows.axis, is_real), _with_an_operand(new[1], is_real)]
                first.insert(0, is_real)
        types = self.outer.shards.part_types(eqn.outvars, plan.outs)
        outputs = self.outer.b.copy_with_bodies(eqn, new, atoms, types, first)
        self.outer.define_outputs(eqn, plan.outs, outputs)

    def write_loss(self, eqn: JaxprEqn, ins: Sequence[ShardLayout]) -> None:
        """Write a `value_and_grad` equation, which contains the loss before its differentiation.

        The shards divide the examples. So the loss, and gradients of replicated parameters, are
        partial sums.
        """
        loss, count, reader = eqn.params["loss"], eqn.params["count"], self.outer.describe(eqn)
        number = len(opened(loss).outvars)
        layouts_in: list[ShardLayout] = list(map(rows_or_shared, ins))
        inputs = [self.outer.operand(a).is_input for a in eqn.invars]
        added = [0, *(i for i, v in enumerate(eqn.outvars[1:number], 1) if v in self.outer.terms)]
        rules, self.outer.keeps_rules = self.outer.keeps_rules, True
        body = self._body(eqn, loss, layouts_in, None, added, reader, inputs)
        if sliced := {i: row for i, row in body.sliced.items() if i >= count}:
            layouts_in = [sliced.get(i, x) for i, x in enumerate(layouts_in)]
            body = self._body(eqn, loss, layouts_in, None, added, reader, inputs)
        if not isinstance(body.outs[0], Partial):
            wanted = [PARTIAL, *body.outs[1:]]
            body = self._body(eqn, loss, layouts_in, wanted, added, reader, inputs)
        self.outer.keeps_rules = rules

        atoms = self.outer.in_layouts(eqn.invars, layouts_in)
        new = body.jaxpr
        # the index goes last: the loss is differentiated with respect to its first operands
        if body.takes_index:
            index, *others = opened(new).invars
            new = closed_with(new, invars=[*others, index])
            atoms.append(self.outer.pieces.index())
        self.outer.gathers += body.gathers
        self.outer.scaled |= body.scaled
        gradients = [x if isinstance(x, RowAxis) else PARTIAL for x in layouts_in[:count]]
        layouts = [*body.outs, *gradients]
        types = self.outer.shards.part_types(eqn.outvars, layouts)
        self.outer.define_outputs(eqn, layouts, self.outer.b.copy(eqn, atoms, types, loss=new))

    def write_ruled_call(self, eqn: JaxprEqn, ins: Sequence[ShardLayout]) -> bool:
        """Write a `custom_jvp` or `custom_vjp` call for one shard, with its derivative rule.

        Returns:
          True if the call was written; False if the function or the rule needs communication.
        """
        ins = list(map(rows_or_shared, ins))

        def on_pieces(
            full: Any, layouts_in: Sequence[ShardLayout], wanted: Sequence[ShardLayout] | None
        ) -> tuple[ClosedJaxpr, list[ShardLayout]] | None:
            flat = eliminate_dead(inline_calls(full))
            ends = zip(opened(flat).outvars, wanted or (), strict=False)
            open_ends = [a for a, x in ends if isinstance(x, Partial) and isinstance(a, Var)]

            def write(w: SplitWriter) -> tuple[ClosedJaxpr, list[ShardLayout]]:
                w.pieces.takes_index = self.outer.pieces.takes_index
                w.terms = linear_terms(opened(flat), open_ends)
                for v, x in zip(opened(flat).invars, layouts_in, strict=True):
                    w.take(v, x, is_input=False)
                results, layouts = w.write(
                    opened(flat), lambda i, x: rows_or_shared(x) if wanted is None else wanted[i]
                )
                return eliminate_dead(w.b.build(results)), layouts

            results, layouts = self.outer.write_inner(flat, write, self.outer.describe(eqn))
            exchanged = [e for e in equations(results) if collective_of(e) is not None]
            if exchanged:
                return None
            return results, layouts

        def rule_on_pieces(
            full: Any, layouts_in: Sequence[ShardLayout], wanted: Sequence[ShardLayout]
        ) -> ClosedJaxpr | None:
            found = on_pieces(full, layouts_in, wanted)
            if found is None:
                return None
            return found[0]

        (body,) = bodies(eqn)
        if (found := on_pieces(body, ins, None)) is None:
            return False
        primal, outs = found
        call = call_on_pieces(eqn, primal, ins, outs, rule_on_pieces)
        if call is None or all_shared(ins):
            return call is not None
        atoms = self.outer.in_layouts(eqn.invars, ins)
        if len(opened(call).invars) > len(atoms):
            atoms.insert(0, self.outer.pieces.index())
        self.outer.define_outputs(eqn, outs, self.outer.b.inline(call, *atoms))
        return True

    def needs_full_cotangents(self, eqn: JaxprEqn) -> bool:
        """Return True if a `custom_vjp` rule needs sums of cotangents over all shards.

        The cotangent of a replicated value is a partial sum on each shard. A rule that may be
        nonlinear in cotangents cannot run on partial sums.
        """
        if eqn.primitive.name == CUSTOM_VJP:
            return not self.write_ruled_call(eqn, [SHARED] * len(eqn.invars))
        return any(e.primitive.name == CUSTOM_VJP for e in equations_inside(eqn))

    def may_not_end(self, eqn: JaxprEqn, row: RowAxis) -> bool:
        """Return True if a `while` loop in the body may read padding, and so may never end."""
        return self.outer.shards.pads(scan_length(eqn), row) and any(
            e.primitive.name == WHILE for e in equations_inside(eqn)
        )

    def write_sharded_scan(self, eqn: JaxprEqn, row: RowAxis, added: Sequence[bool]) -> None:
        """Write a scan over the sharded dimension: each shard runs its part of the iterations."""
        consts, carried = scan_counts(eqn)
        size = scan_length(eqn)
        (body,) = bodies(eqn)
        carry: list[ShardLayout] = [PARTIAL if adds else SHARED for adds in added]
        stacks = len(eqn.invars) - consts - carried
        layouts_in = [*[SHARED] * consts, *carry, *[row] * stacks]
        atoms = self.outer.in_layouts(eqn.invars, layouts_in)
        if self.outer.shards.pads(size, row) and any(added):
            body = mask_padding(body, consts, added)
            atoms.append(self.outer.pieces.shard_row(self.outer.shards.entries(size, row) >= 0))
        layouts = [*carry, *[row] * (len(eqn.outvars) - carried)]
        types = self.outer.shards.part_types(eqn.outvars, layouts)
        params = scan_iterations(self.outer.shards.local(size, row))
        outputs = self.outer.b.copy_with_bodies(eqn, [body], atoms, types, **params)
        self.outer.define_outputs(eqn, layouts, outputs)


def written(
    jaxpr: ClosedJaxpr, shards: Shards, write: Callable[[SplitWriter], Result], within: str = ""
) -> Result:
    """Write a jaxpr for one shard, and return the result of `write`.

    For a concatenation or slice, the writer can gather the operands. It can also move entries
    within shards, but then the entries of later values have another order than on one device. If
    both are possible, both programs are written, and the program that communicates fewer bytes is
    returned.

    Args:
      jaxpr: the jaxpr of one device.
      shards: number and mesh axes of the shards.
      write: function that writes the equations with a new writer.
      within: description of the equation that has this body; "" for a program.
    """
    orders: list[RowAxis] = []
    first, writer = _written(jaxpr, shards, write, within, orders)
    if not orders or not writer.moved:
        return first
    other, in_sequence = _written(jaxpr, shards, write, within, None)
    if writer.moved <= in_sequence.moved:
        return first
    return other


def _written(
    jaxpr: ClosedJaxpr,
    shards: Shards,
    write: Callable[[SplitWriter], Result],
    within: str,
    orders: list[RowAxis] | None,
) -> tuple[Result, SplitWriter]:
    """Call `write` up to three times with a new writer, and return the result of the best attempt.

    If equations read only pieces of a full value, a second attempt computes only these pieces. It
    is dropped if it has more gathers. If equations read pieces of partial sums, a third attempt
    reduce-scatters these sums. It is dropped if it communicates more bytes. With `dtrans.local`
    scopes there is no third attempt, because a scope computes other results from a piece than from
    a full value.

    Returns:
      The result of `write`, and the writer of this attempt.
    """
    writer = SplitWriter(jaxpr, shards, within)
    writer.orders = orders
    result = write(writer)
    if writer.built_as_rows:
        other = writer.new_writer(writer.built_as_rows)
        again = write(other)
        if len(other.gathers) <= len(writer.gathers):
            result, writer = again, other
    if writer.to_scatter and not any(map(writer.covers_local, opened(jaxpr).eqns)):
        other = writer.new_writer(writer.only_as_rows, writer.to_scatter)
        again = write(other)
        if other.sent_bytes < writer.sent_bytes:
            result, writer = again, other
    return result, writer


def _with_an_operand(jaxpr: ClosedJaxpr, operand: Atom) -> ClosedJaxpr:
    """Return a copy of a body with a new, unused first input, with the type of `operand`."""
    return closed_with(jaxpr, invars=[Var(operand.aval), *opened(jaxpr).invars])


def _types(eqn: JaxprEqn) -> list[Any]:
    return avals(eqn.outvars)
