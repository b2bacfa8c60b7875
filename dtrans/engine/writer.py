"""Writer of the program of one shard.

Equations are written once and in order, by the strategy that `dtrans.engine.rules` chooses;
`dtrans.engine.values` has the values and their conversions.

A partial sum stays open as long as its only reader is linear: gradients of one input through
several products are added up, then reduced once. Bodies of remat, loops and branches are written in
the same way (`dtrans.engine.loops`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

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
    Literal,
    Var,
    bodies,
    closed_with,
    equations,
    equations_inside,
    facts_of,
    is_rearrangement,
    line_of,
    linear_group,
    linear_operands,
    opened,
    origin_of,
    resized,
    scan_counts,
    scan_iterations,
    scan_length,
    scope_of,
)
from dtrans.engine.array_fns import (
    argmax_marks,
    best_local,
    broadcast_to,
    decode_position,
    local_indices,
    pick_entries,
    select_slots,
    take_entries,
)
from dtrans.engine.custom_rules import call_on_pieces
from dtrans.engine.layout import PARTIAL, Gathered, Partial, ShardLayout, Shards, nbytes, rows_only
from dtrans.engine.loops import LoopPlan, WrittenBody, moved_bytes, plan_loop
from dtrans.engine.row_moves import Move
from dtrans.engine.rules import Strategy, choose
from dtrans.engine.sharded_scans import mask_padding, sharded_iterations
from dtrans.engine.values import ShardValues
from dtrans.ir.array_fns import converted
from dtrans.ir.display import short_type
from dtrans.ir.inline import eliminate_dead, inline_calls
from dtrans.ops import collective_of, identity_of
from dtrans.rows.layout import SHARED, RowAxis
from dtrans.step.capture import value_and_grad_p
from dtrans.step.scopes import has_local_scope, in_local_scope


# Sums are reduced before these if their outputs are larger. `pad` is left out: gradients of several
# slices of one parameter are padded, added up, and reduced once.
_GROWS: Mapping[str, int] = {"broadcast_in_dim": 0, "scatter-add": 2}
_WITH_BODIES = frozenset({*REMAT, SCAN, WHILE, COND})


class SplitWriter(ShardValues):
    """Writer of the equations of one jaxpr for one shard."""

    # values that are computed as pieces only
    only_as_rows: Mapping[Var, RowAxis] = MappingProxyType({})
    planned: dict[Any, LoopPlan | None]  # plans of loops and branches, by equation and layouts
    out_names: Sequence[str] = ()  # names of a program's outputs, for `gathers`
    # True if the program is differentiated later: calls with derivative rules stay
    keeps_rules = False
    # sums that stay open wherever possible, however often they are read
    terms: Collection[Var] = frozenset()

    # -- equations -------------------------------------------------------------------------------

    def equation(self, eqn: JaxprEqn) -> None:
        """Write one equation."""
        self._write_equation(eqn)
        for v in eqn.outvars:
            if v in self.local_terms or (self.layout(v) is SHARED and self._makes_local(eqn)):
                self.local_values.add(v)

    def _makes_local(self, eqn: JaxprEqn) -> bool:
        """Return True if an equation's replicated outputs differ between shards
        (`local_values`)."""
        if any(a in self.local_values for a in eqn.invars if isinstance(a, Var)):
            return True
        if eqn.primitive.name in _WITH_BODIES:
            return self._is_local(eqn)
        reduces = any(isinstance(self.layout(a), RowAxis) for a in eqn.invars)
        return reduces and (self.is_local or in_local_scope(eqn))

    def _write_equation(self, eqn: JaxprEqn) -> None:
        self.needed_by(functools.partial(self._describe, eqn), eqn)
        ins = [self.layout(a) for a in eqn.invars]
        if eqn.primitive.name in _WITH_BODIES and any(x is not SHARED for x in ins):
            iterations = (
                None if self._is_local(eqn) or self.orders is None else sharded_iterations(eqn, ins)
            )
            if iterations is not None and not self._may_not_end(eqn, iterations[0]):
                self._write_sharded_scan(eqn, *iterations)
                return
            if (plan := self._plan(eqn, ins)) is not None:
                self._with_bodies(eqn, plan)
                return
            ins = [SHARED] * len(ins)
        if eqn.primitive is value_and_grad_p and any(x is not SHARED for x in ins):
            self._with_loss(eqn, ins)
            return
        has_rule = eqn.primitive.name in CUSTOM_RULES
        if has_rule and any(isinstance(x, RowAxis) for x in ins):
            if self._with_rules(eqn, ins):
                return
        elif self.keeps_rules and self._needs_whole_cotangents(eqn):
            aval = eqn.outvars[0].aval
            reason = f"the derivative rule of {self._describe(eqn)}"
            self.gathers.append(
                Gathered(aval.shape, aval.dtype, nbytes(aval), reason, line_of(eqn))
            )
        if has_rule:  # its rule needs full values
            ins = [SHARED] * len(ins)
        if all(x is SHARED for x in ins):
            row = self.only_as_rows.get(eqn.outvars[0]) if eqn.outvars else None
            if row and (piece := self.build_rows(eqn.outvars[0], row)):
                self._define(eqn, [row], [piece])
                return
            values: Sequence[Atom] = self.b.copy(
                eqn, [self.read(a, None) for a in eqn.invars], _types(eqn)
            )
            self._define(eqn, [SHARED] * len(values), values)
            return
        if (linear := self._open_operands(eqn, ins)) is not None:
            terms = [
                self.term(a) if i in linear else self.read(a, None)
                for i, a in enumerate(eqn.invars)
            ]
            of_sums = [
                a in self.local_terms
                for a, x in zip(eqn.invars, ins, strict=True)
                if isinstance(x, Partial)
            ]
            if all(of_sums):
                self.local_terms.update(eqn.outvars)
            self._define(eqn, [PARTIAL] * len(eqn.outvars), self.b.copy(eqn, terms, _types(eqn)))
            return
        as_term = bool(eqn.outvars) and eqn.outvars[0] in self.terms
        orders = None if self.in_local else self.orders
        way = choose(eqn, [self.operand(a) for a in eqn.invars], self.shards, as_term, orders)
        values = self.carry_out(eqn, way)
        if orders is not None:
            moved = [x for x in way.outs if isinstance(x, RowAxis) and (x.order or way.moves)]
            orders += [x for x in moved if x not in orders]
        if way.reduce == "sum":
            self._define(eqn, [PARTIAL] * len(eqn.outvars), values)
            if self.in_local:
                self.local_terms.update(eqn.outvars)
        else:
            self._define(
                eqn, way.outs, self._reduced_here(way.reduce, values) if way.reduce else values
            )
        if _is_moved_or_cast(eqn) and self.operand(eqn.invars[0]).is_input:
            self.inputs.update(eqn.outvars)

    def _reduced_here(self, op: str, terms: Sequence[Atom]) -> Sequence[Atom]:
        """All-reduce terms over shards; in `dtrans.local`, return the shard's own."""
        return terms if self.in_local else self.reduced(op, terms)

    def _is_local(self, eqn: JaxprEqn) -> bool:
        """Return True if an equation or one in its bodies is in `dtrans.local`."""
        return self.is_local or has_local_scope(eqn)

    def _define(
        self, eqn: JaxprEqn, layouts: Sequence[ShardLayout], values: Sequence[Atom]
    ) -> None:
        for v, x, value in zip(eqn.outvars, layouts, values, strict=True):
            self.define(v, x, value)

    def _open_operands(self, eqn: JaxprEqn, ins: Sequence[ShardLayout]) -> Collection[int] | None:
        """Return the operands to read as terms if the sum may be reduced later, else None.

        A sum with one reader stays open through rearrangements and further sums. A value that ends
        as a partial sum anyway (`terms`) stays open wherever it is linear; replicated operands then
        become terms on the first shard.
        """
        opens = [i for i, x in enumerate(ins) if isinstance(x, Partial)]
        if not opens or not eqn.outvars or any(isinstance(x, RowAxis) for x in ins):
            return None
        is_mixed = len({eqn.invars[i] in self.local_terms for i in opens}) > 1
        if is_mixed and eqn.outvars[0] not in self.terms:
            return None
        if eqn.outvars[0] in self.terms:
            added = eqn.invars[2] if eqn.primitive.name == "scatter-add" else eqn.outvars[0]
            if not isinstance(added, Var) or added not in self.terms:
                return None
            return linear_group(eqn, opens) or None
        name = eqn.primitive.name
        if any(self._uses[a] != 1 for i in opens if isinstance(a := eqn.invars[i], Var)):
            return None
        if _adds_terms(eqn, opens):
            return opens
        # by a finite literal only: the zero terms of other shards times infinity would be NaN
        factor = next(
            (a.val for a in eqn.invars if isinstance(a, Literal) and not a.aval.ndim), np.nan
        )
        if name not in ("mul", "div") or not np.isfinite(factor):
            return None
        inexact = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact)
        divides = isinstance(ins[0], Partial) and inexact and factor != 0
        return opens if name == "mul" or divides else None

    def _describe(self, eqn: JaxprEqn) -> str:
        where = scope_of(eqn) or origin_of(eqn) or self.within
        operands = ", ".join(short_type(a.aval) for a in eqn.invars[:2])
        return f"{eqn.primitive.name} of {operands}" + (f" ({where})" if where else "")

    def _output(self, number: int) -> str:
        name = self.out_names[number] if self.out_names else f"output {number}"
        return name + (f" of {self.within}" if self.within else "")

    def carry_out(self, eqn: JaxprEqn, way: Strategy) -> list[Atom]:
        atoms = [self.read(a, row) for a, row in zip(eqn.invars, way.operands, strict=True)]
        if way.write:
            return _WRITE[way.write](self, eqn, way, atoms)
        if way.reduce:
            pieces = zip(eqn.invars, atoms, way.operands, strict=True)
            atoms = [self._without_padding(a, x, row, way.reduce) for a, x, row in pieces]
        types = [self.shards.cut(v.aval, x) for v, x in zip(eqn.outvars, way.outs, strict=True)]
        return list(self.b.copy(eqn, atoms, types, **(way.params(types) if way.params else {})))

    def _without_padding(self, full: Atom, piece: Atom, row: RowAxis | None, op: str) -> Atom:
        """Replace padding in a piece by the identity of a reduction."""
        return (
            piece
            if row is None
            else self.pieces.without_padding(piece, full.aval.shape[row.axis], row, op)
        )

    def _move(self, eqn: JaxprEqn, way: Strategy, atoms: list[Atom]) -> list[Atom]:
        """Write moves of entries into other slots."""
        found, pieces = way.moves, atoms
        assert found is not None
        if found.params is not None:
            axis, local = (
                found.moves[0].axis,
                sum(a.aval.shape[found.moves[0].axis] for a in atoms if a.aval.ndim),
            )
            local *= eqn.params["reps"][axis] if eqn.primitive.name == "tile" else 1
            types = [resized(v.aval, axis, local) for v in eqn.outvars]
            pieces = list(self.b.copy(eqn, atoms, types, **found.params(types)))
        return [self._in_slots(pieces[0], move, atoms) for move in found.moves]

    def _in_slots(self, piece: Atom, move: Move, atoms: Sequence[Atom]) -> Atom:
        """Return a piece's entries in new slots; the last operand of a `pad` fills the others."""
        if not move.keeps(piece.aval.shape[move.axis]):
            piece = self._taken(piece, move)
        if move.filled is None:
            return piece
        (value,) = self.b.call(broadcast_to(piece.aval.shape), atoms[-1])
        return self.b.call(
            select_slots(move.axis), piece, self.pieces.shard_row(~move.filled), value
        )[0]

    def _taken(self, piece: Atom, move: Move) -> Atom:
        first, *others = slots = move.slots
        begin, end = int(first[0]), int(first[-1]) + 1
        is_run = len(first) == end - begin and (np.diff(first) == 1).all()
        if is_run and all((other == first).all() for other in others):
            return self.b.part(piece, move.axis, begin, end)
        return self.b.call(take_entries(move.axis), piece, self.pieces.shard_row(slots))[0]

    def _pick(self, eqn: JaxprEqn, way: Strategy, atoms: list[Atom]) -> list[Atom]:
        """Write a gather along the sharded dimension: each shard returns its entries, others are
        0."""
        (row, _), p, (x, _) = way.operands, eqn.params, eqn.invars
        assert row is not None
        size = x.aval.shape[row.axis]
        term = pick_entries(
            way.at, size, p["dimension_numbers"], p["slice_sizes"], p["mode"], p["fill_value"]
        )
        return self.b.call(term, *atoms, self.pieces.start(size, row))

    def _put(self, eqn: JaxprEqn, way: Strategy, atoms: list[Atom]) -> list[Atom]:
        """Write a scatter along the sharded dimension: each shard writes the entries of its
        piece."""
        (row, *_), piece = way.operands, atoms[0]
        assert row is not None
        size = eqn.invars[0].aval.shape[row.axis]
        clips = eqn.params["mode"] == jax.lax.GatherScatterMode.CLIP
        to_local = local_indices(way.at, size, piece.aval.shape[row.axis], clips)
        (at,) = self.b.call(to_local, atoms[1], self.pieces.start(size, row))
        return list(
            self._scatter(eqn, [piece, at, atoms[2]], mode=jax.lax.GatherScatterMode.FILL_OR_DROP)
        )

    def _add_up(self, eqn: JaxprEqn, way: Strategy, atoms: list[Atom]) -> list[Atom]:
        """Write a scatter-add with sharded updates: the first shard adds to the operand, others to
        0."""
        _, of, row = way.operands
        assert row is not None and of is not None
        updates = self._without_padding(eqn.invars[2], atoms[2], row, "sum")
        first = self.term(eqn.invars[0])
        return list(self._scatter(eqn, [first, atoms[1], updates]))

    def _scatter(self, eqn: JaxprEqn, atoms: list[Atom], **params: Any) -> list[Var]:
        return self.b.copy(
            eqn, atoms, [atoms[0].aval], indices_are_sorted=False, unique_indices=False, **params
        )

    def _arg_reduce(self, eqn: JaxprEqn, way: Strategy, atoms: list[Atom]) -> list[Atom]:
        """Write an argmax or argmin: the lowest position among the shards with the best entry."""
        (row,), (x,) = way.operands, atoms
        assert row is not None
        largest = eqn.primitive.name == "argmax"
        op, size = ("max" if largest else "min"), eqn.invars[0].aval.shape[row.axis]
        start = self.pieces.start(size, row)
        (nothing,) = self.b.call(identity_of(op, x.aval.shape, x.aval.dtype))
        found, at = self.b.call(best_local(row.axis, size, largest), x, start, nothing)
        (best,) = self._reduced_here(op, [found])
        (lowest,) = self._reduced_here("min", self.b.call(argmax_marks(size), found, best, at))
        (v,) = eqn.outvars
        return self.b.call(converted(np.dtype(v.aval.dtype)), *self.b.call(decode_position, lowest))

    # -- bodies ----------------------------------------------------------------------------------

    def _plan(self, eqn: JaxprEqn, ins: Sequence[ShardLayout]) -> LoopPlan | None:
        """Return the plan of an equation with bodies; None if it runs on full values."""
        reader = self._describe(eqn)
        inputs = [self.operand(a).is_input for a in eqn.invars]

        def write(
            body: Any, ins: Sequence[ShardLayout], outs: Sequence[ShardLayout] | None, carried: int
        ) -> WrittenBody:
            wanted = [
                *range(carried),
                *(i for i, v in enumerate(eqn.outvars) if v in self.terms and i >= carried),
            ]
            return self._body(
                eqn, body, ins, outs, wanted, reader, inputs[len(inputs) - len(ins) :]
            )

        key = id(eqn), tuple(ins), tuple(inputs)
        if key not in self.planned:
            self.planned[key] = plan_loop(eqn, ins, write, shares_work=self.shards.shares_work)
        return self.planned[key]

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
        """Rewrite a body for one shard, from the layouts of its inputs and wanted outputs.

        Args:
          eqn: the equation that has the body.
          body: the body.
          ins: layouts of its inputs.
          outs: layouts of its outputs; None for the computed ones.
          added: positions of outputs that may be partial sums.
          said: text of the equation, for `gathers`.
          inputs: for each input, True if it is a sharded input of the program.
        """
        is_local = self.is_local or in_local_scope(eqn)
        reads_local = self._is_local(eqn) or any(
            a in self.local_values for a in eqn.invars if isinstance(a, Var)
        )
        flat = inline_calls(body, rules=self.keeps_rules)
        ends = opened(flat).outvars
        terms = linear_terms(
            opened(flat), [a for i in added if i < len(ends) and isinstance(a := ends[i], Var)]
        )

        def write(w: SplitWriter) -> WrittenBody:
            w.terms, w.is_local, w.keeps_rules = terms, is_local, self.keeps_rules
            w.pieces.takes_index = self.pieces.takes_index
            for v, x, is_input in zip(opened(flat).invars, ins, inputs, strict=True):
                w.take(v, x, is_input=is_input)
                if reads_local and x is SHARED:
                    w.local_values.add(v)
            results, layouts = w.write(opened(flat), lambda i, x: x if outs is None else outs[i])
            numbers = {v: i for i, v in enumerate(opened(flat).invars)}
            sliced = {numbers[v]: row for v, row in w.sliced.items() if isinstance(row, RowAxis)}
            return WrittenBody(
                eliminate_dead(w.b.build(results)),
                tuple(layouts),
                tuple(w.gathers),
                sliced,
                w.scaled,
                w.pieces.takes_index and w.pieces.reads_index,
            )

        return _written(flat, self.shards, write, reader, self.orders)[0]

    def _with_bodies(self, eqn: JaxprEqn, plan: LoopPlan) -> None:
        """Write an equation with rewritten bodies."""
        atoms = [self.as_(a, x) for a, x in zip(eqn.invars, plan.operands, strict=True)]
        first = [self.pieces.index()] if any(b.takes_index for b in plan.bodies) else []
        new = [
            b.jaxpr if b.takes_index or not first else _with_an_operand(b.jaxpr, first[0])
            for b in plan.bodies
        ]
        for b in plan.bodies:
            self.gathers += b.gathers
            self.scaled |= b.scaled
        types = [self.shards.cut(v.aval, x) for v, x in zip(eqn.outvars, plan.outs, strict=True)]
        self._define(eqn, plan.outs, self.b.copy_with_bodies(eqn, new, atoms, types, first))

    @property
    def moved(self) -> int:
        """Bytes that are communicated, outputs of gathers included; bodies of loops count once."""
        return sum(
            moved_bytes(e for eqn in self.b.eqns for e in (eqn, *equations_inside(eqn))).values()
        )

    def _with_loss(self, eqn: JaxprEqn, ins: Sequence[ShardLayout]) -> None:
        """Write a loss that is differentiated later: the loss and its gradients are partial
        sums."""
        loss, count, reader = eqn.params["loss"], eqn.params["count"], self._describe(eqn)
        number = len(opened(loss).outvars)
        layouts_in: list[ShardLayout] = [x if isinstance(x, RowAxis) else SHARED for x in ins]
        inputs = [self.operand(a).is_input for a in eqn.invars]
        added = [0, *(i for i, v in enumerate(eqn.outvars[1:number], 1) if v in self.terms)]
        rules, self.keeps_rules = self.keeps_rules, True
        body = self._body(eqn, loss, layouts_in, None, added, reader, inputs)
        if sliced := {i: row for i, row in body.sliced.items() if i >= count}:
            layouts_in = [sliced.get(i, x) for i, x in enumerate(layouts_in)]
            body = self._body(eqn, loss, layouts_in, None, added, reader, inputs)
        if not isinstance(body.outs[0], Partial):
            body = self._body(
                eqn, loss, layouts_in, [PARTIAL, *body.outs[1:]], added, reader, inputs
            )
        self.keeps_rules = rules

        atoms, new = (
            [self.as_(a, x) for a, x in zip(eqn.invars, layouts_in, strict=True)],
            body.jaxpr,
        )
        if body.takes_index:  # after the operands that the loss is differentiated by
            index, *others = opened(new).invars
            new = closed_with(new, invars=[*others, index])
            atoms.append(self.pieces.index())
        self.gathers += body.gathers
        self.scaled |= body.scaled
        gradients = [x if isinstance(x, RowAxis) else PARTIAL for x in layouts_in[:count]]
        layouts = [*body.outs, *gradients]
        types = [self.shards.cut(v.aval, x) for v, x in zip(eqn.outvars, layouts, strict=True)]
        self._define(eqn, layouts, self.b.copy(eqn, atoms, types, loss=new))

    def _with_rules(self, eqn: JaxprEqn, ins: Sequence[ShardLayout]) -> bool:
        """Write a call with its derivative rule for one shard; False if that needs
        communication."""
        ins = [x if isinstance(x, RowAxis) else SHARED for x in ins]

        def on_pieces(
            full: Any, layouts_in: Sequence[ShardLayout], wanted: Sequence[ShardLayout] | None
        ) -> tuple[ClosedJaxpr, list[ShardLayout]] | None:
            flat = eliminate_dead(inline_calls(full))
            ends = [
                a
                for a, x in zip(opened(flat).outvars, wanted or (), strict=False)
                if isinstance(x, Partial)
            ]

            def write(w: SplitWriter) -> tuple[ClosedJaxpr, list[ShardLayout]]:
                w.pieces.takes_index = self.pieces.takes_index
                w.terms = linear_terms(opened(flat), [a for a in ends if isinstance(a, Var)])
                for v, x in zip(opened(flat).invars, layouts_in, strict=True):
                    w.take(v, x, is_input=False)
                results, layouts = w.write(
                    opened(flat), lambda i, x: rows_only(x) if wanted is None else wanted[i]
                )
                return eliminate_dead(w.b.build(results)), layouts

            (results, layouts), _ = _written(
                flat, self.shards, write, self._describe(eqn), self.orders
            )
            exchanged = [e for e in equations(results) if collective_of(e) is not None]
            return None if exchanged else (results, layouts)

        def rule_on_pieces(
            full: Any, layouts_in: Sequence[ShardLayout], wanted: Sequence[ShardLayout]
        ) -> ClosedJaxpr | None:
            found = on_pieces(full, layouts_in, wanted)
            return None if found is None else found[0]

        (body,) = bodies(eqn)
        if (found := on_pieces(body, ins, None)) is None:
            return False
        primal, outs = found
        call = call_on_pieces(eqn, primal, ins, outs, rule_on_pieces)
        if call is None or all(x is SHARED for x in ins):
            return call is not None
        atoms = [self.as_(a, x) for a, x in zip(eqn.invars, ins, strict=True)]
        if len(opened(call).invars) > len(atoms):
            atoms.insert(0, self.pieces.index())
        self._define(eqn, outs, self.b.inline(call, *atoms))
        return True

    def _needs_whole_cotangents(self, eqn: JaxprEqn) -> bool:
        """Return True if a rule on full values may be nonlinear in its cotangents.

        Cotangents of replicated values are partial sums, so that a nonlinear rule would be wrong.
        """
        if eqn.primitive.name == CUSTOM_VJP:
            return not self._with_rules(eqn, [SHARED] * len(eqn.invars))
        return any(e.primitive.name == CUSTOM_VJP for e in equations_inside(eqn))

    def _may_not_end(self, eqn: JaxprEqn, row: RowAxis) -> bool:
        """Return True if iterations on padding may not end, since a `while` in them reads it."""
        return self.shards.pads(scan_length(eqn), row) and any(
            e.primitive.name == WHILE for e in equations_inside(eqn)
        )

    def _write_sharded_scan(self, eqn: JaxprEqn, row: RowAxis, added: Sequence[bool]) -> None:
        """Write a scan whose iterations are sharded."""
        consts, carried = scan_counts(eqn)
        size = scan_length(eqn)
        (body,) = bodies(eqn)
        carry: list[ShardLayout] = [PARTIAL if adds else SHARED for adds in added]
        atoms = [self.read(a, None) for a in eqn.invars[:consts]]
        atoms += [self.as_(a, x) for a, x in zip(eqn.invars[consts:], carry, strict=False)]
        atoms += [self.read(a, row) for a in eqn.invars[consts + carried :]]
        if self.shards.pads(size, row) and any(added):
            body = mask_padding(body, consts, added)
            atoms.append(self.pieces.shard_row(self.shards.entries(size, row) >= 0))
        layouts = [*carry, *(row for _ in eqn.outvars[carried:])]
        types = [self.shards.cut(v.aval, x) for v, x in zip(eqn.outvars, layouts, strict=True)]
        params = scan_iterations(self.shards.local(size, row))
        self._define(eqn, layouts, self.b.copy_with_bodies(eqn, [body], atoms, types, **params))

    # -- programs --------------------------------------------------------------------------------

    def write(
        self, inner: Jaxpr, wanted: Callable[[int, ShardLayout], ShardLayout]
    ) -> tuple[list[Atom], list[ShardLayout]]:
        """Write all equations; return the outputs and their layouts.

        Args:
          inner: the jaxpr.
          wanted: returns the wanted layout of an output, from its position and computed layout.
        """
        for eqn in inner.eqns:
            self.equation(eqn)
        results: list[Atom] = []
        layouts: list[ShardLayout] = []
        for i, a in enumerate(inner.outvars):
            # the output of a body stays local, that of a program becomes a mean
            is_local = isinstance(a, Var) and a in self.local_values and not self.within
            self.needed_by(
                functools.partial(self._output, i),
                self._producers.get(a) if isinstance(a, Var) and is_local else None,
            )
            layout = wanted(i, PARTIAL if is_local else self.layout(a))
            results.append(
                self.reduced("sum", [self.term(a)])[0]
                if is_local and layout is SHARED
                else self.as_(a, layout)
            )
            layouts.append(layout)
        return results, layouts


Result = TypeVar("Result")


def written(
    jaxpr: ClosedJaxpr, shards: Shards, write: Callable[[SplitWriter], Result], within: str = ""
) -> Result:
    """Return the result of `write` with a writer of a jaxpr.

    Shards keep entries in another order only if that moves no more bytes than it saves in gathers.
    """
    orders: list[RowAxis] = []
    first, writer = _written(jaxpr, shards, write, within, orders)
    if not orders or not writer.moved:
        return first
    other, in_sequence = _written(jaxpr, shards, write, within, None)
    return first if writer.moved <= in_sequence.moved else other


def _written(
    jaxpr: ClosedJaxpr,
    shards: Shards,
    write: Callable[[SplitWriter], Result],
    within: str,
    orders: list[RowAxis] | None,
) -> tuple[Result, SplitWriter]:
    """Return the result of `write` with a writer, and the writer.

    If values that are computed in full are read sharded, the program is written again with these
    values computed sharded. The second program is taken unless it has more gathers.
    """
    first = SplitWriter(jaxpr, shards, within)
    first.planned, first.orders = {}, orders
    result = write(first)
    if not first.built_as_rows:
        return result, first
    second = SplitWriter(jaxpr, shards, within)
    second.planned, second.only_as_rows, second.orders = first.planned, first.built_as_rows, orders
    again = write(second)
    return (again, second) if len(second.gathers) <= len(first.gathers) else (result, first)


def linear_terms(inner: Jaxpr, outs: Collection[Var], summed: Collection[Var] = ()) -> set[Var]:
    """Return the values that may be partial sums if `outs` are: those that `outs` are linear in.

    Values before a broadcast are reduced first, since they are smaller. Exception: the broadcast
    becomes, entry by entry, one of the values that are `summed` anyway. A cast rounds: where
    another equation needs its sum, partial sums are reduced before it.
    """
    found, anyway = set(outs), set(summed)
    needed: set[Var] = set()  # as sums
    for eqn in reversed(inner.eqns):
        operands = [a for a in eqn.invars if isinstance(a, Var)]
        is_summed = anyway.issuperset(eqn.outvars)
        if _rounds(eqn) and needed.issuperset(eqn.outvars) and not is_summed:
            found.difference_update(eqn.outvars)
        terms: set[Var] = set()
        if not eqn.outvars or not found.issuperset(eqn.outvars):
            pass
        elif eqn.primitive.name in _GROWS and _grows(eqn) and not is_summed:
            if eqn.primitive.name == "broadcast_in_dim":
                found.difference_update(eqn.outvars)
        else:
            if is_summed and (facts_of(eqn).elementwise or is_rearrangement(eqn)):
                anyway.update(operands)
            linear = {i for together in linear_operands(eqn) for i in together}
            terms = {a for i, a in enumerate(eqn.invars) if i in linear and isinstance(a, Var)}
        found |= terms
        needed.update(a for a in operands if a not in terms)
    return found


def _rounds(eqn: JaxprEqn) -> bool:
    """Return True if an equation casts numbers to a type of fewer bits."""
    if eqn.primitive.name != "convert_element_type":
        return False
    return nbytes(eqn.outvars[0].aval) < nbytes(eqn.invars[0].aval)


def _grows(eqn: JaxprEqn) -> bool:
    return eqn.outvars[0].aval.size > eqn.invars[_GROWS[eqn.primitive.name]].aval.size


def _adds_terms(eqn: JaxprEqn, opens: Sequence[int]) -> bool:
    """Return True if a sum may be reduced after an equation as well, and is not larger there.

    Casts round, so sums are reduced before them. Operands that are not sums must be indices or
    conditions: zero terms times an infinite number would be NaN.
    """
    others = [a for i, a in enumerate(eqn.invars) if i not in opens]
    if (
        eqn.primitive.name == "convert_element_type"
        or len(eqn.outvars) != 1
        or any(map(_is_inexact, others))
    ):
        return False
    size = sum(nbytes(eqn.invars[i].aval) for i in opens)
    return tuple(opens) in linear_operands(eqn) and nbytes(eqn.outvars[0].aval) <= size


def _is_inexact(atom: Atom) -> bool:
    return bool(jnp.issubdtype(atom.aval.dtype, jnp.inexact))


def _is_moved_or_cast(eqn: JaxprEqn) -> bool:
    """Return True if an equation changes no number of its operand, except by rounding."""
    return is_rearrangement(eqn) or eqn.primitive.name == "convert_element_type"


def _with_an_operand(jaxpr: ClosedJaxpr, operand: Atom) -> ClosedJaxpr:
    """Return a body with an unused first operand."""
    return closed_with(jaxpr, invars=[Var(operand.aval), *opened(jaxpr).invars])


def _types(eqn: JaxprEqn) -> list[Any]:
    return [v.aval for v in eqn.outvars]


_WRITE: Mapping[str, Callable[[SplitWriter, JaxprEqn, Strategy, list[Atom]], list[Atom]]] = {
    "move": SplitWriter._move,
    "pick": SplitWriter._pick,
    "put": SplitWriter._put,
    "add_up": SplitWriter._add_up,
    "arg_reduce": SplitWriter._arg_reduce,
}
