"""Writing the program of one shard.

Equations are taken in order, and each is written once, on pieces or on whole values, as
`dtrans.engine.rules` chooses; `dtrans.engine.values` has the values.

Sums are left open as long as what reads them is linear, and the only one that does: gradients of
one input through several products are added up before they are reduced, once. Bodies of remat,
loops and branches are written in the same way (`dtrans.engine.loops`).
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
    scan_length,
    scan_turns,
    scope_of,
)
from dtrans.engine.array_fns import (
    best_local,
    broadcast_to,
    candidates,
    decided,
    kept_slots,
    own_indices,
    picked,
    taken,
)
from dtrans.engine.custom_rules import call_on_pieces
from dtrans.engine.layout import PARTIAL, Gathered, Partial, Placed, Shards, nbytes, rows_only
from dtrans.engine.loops import LoopPlan, WrittenBody, moved_bytes, plan_loop
from dtrans.engine.row_moves import Move
from dtrans.engine.rules import Way, choose
from dtrans.engine.turns import own_turns, with_padding
from dtrans.engine.values import ShardValues
from dtrans.ir.array_fns import converted
from dtrans.ir.display import short_type
from dtrans.ir.inline import eliminate_dead, inline_calls
from dtrans.ops import collective_of, identity_of
from dtrans.rows.layout import SHARED, RowAxis
from dtrans.step.capture import value_and_grad_p
from dtrans.step.scopes import has_local_scope, in_local_scope


# Where these make more entries than the operand has, terms are added up before. Not so `pad`:
# gradients of several slices of one parameter are added up in one reduction.
_GROWS: Mapping[str, int] = {"broadcast_in_dim": 0, "scatter-add": 2}
_WITH_BODIES = frozenset({*REMAT, SCAN, WHILE, COND})


class SplitWriter(ShardValues):
    """Writes the equations of one jaxpr for one shard."""

    cut_at_birth: Mapping[Var, RowAxis] = MappingProxyType(
        {}
    )  # what is made in pieces, and not whole as well
    planned: dict[Any, LoopPlan | None]  # how loops and branches are carried out, by what they read
    out_names: Sequence[str] = ()  # of a program's outputs, for `gathers`
    keeps_rules = (
        False  # whether calls with derivative rules stay: the program is to be differentiated
    )
    terms: Collection[Var] = (
        frozenset()
    )  # sums that stay open wherever that can be, however often they are read

    # -- equations -------------------------------------------------------------------------------

    def equation(self, eqn: JaxprEqn) -> None:
        """Write one equation."""
        self._write_equation(eqn)
        for v in eqn.outvars:
            if v in self.own_terms or (self.layout(v) is SHARED and self._makes_own(eqn)):
                self.own.add(v)

    def _makes_own(self, eqn: JaxprEqn) -> bool:
        """Whether what it makes whole is a shard's own: what it reads is, or something in its
        bodies."""
        if any(a in self.own for a in eqn.invars if isinstance(a, Var)):
            return True
        if eqn.primitive.name in _WITH_BODIES:
            return self._is_local(eqn)
        reduces = any(isinstance(self.layout(a), RowAxis) for a in eqn.invars)
        return reduces and (self.is_local or in_local_scope(eqn))

    def _write_equation(self, eqn: JaxprEqn) -> None:
        self.needed_by(functools.partial(self._said, eqn), eqn)
        ins = [self.layout(a) for a in eqn.invars]
        if eqn.primitive.name in _WITH_BODIES and any(x is not SHARED for x in ins):
            turns = None if self._is_local(eqn) or self.orders is None else own_turns(eqn, ins)
            if turns is not None and not self._may_not_end(eqn, turns[0]):
                self._with_own_turns(eqn, *turns)
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
            reason = f"the derivative rule of {self._said(eqn)}"
            self.gathers.append(
                Gathered(aval.shape, aval.dtype, nbytes(aval), reason, line_of(eqn))
            )
        if has_rule:  # its rule is one for whole values
            ins = [SHARED] * len(ins)
        if all(x is SHARED for x in ins):
            row = self.cut_at_birth.get(eqn.outvars[0]) if eqn.outvars else None
            if row and (piece := self.made_as_rows(eqn.outvars[0], row)):
                self._define(eqn, [row], [piece])
                return
            made: Sequence[Atom] = self.b.copy(
                eqn, [self.read(a, None) for a in eqn.invars], _types(eqn)
            )
            self._define(eqn, [SHARED] * len(made), made)
            return
        if (linear := self._open_operands(eqn, ins)) is not None:
            terms = [
                self.term(a) if i in linear else self.read(a, None)
                for i, a in enumerate(eqn.invars)
            ]
            of_sums = [
                a in self.own_terms
                for a, x in zip(eqn.invars, ins, strict=True)
                if isinstance(x, Partial)
            ]
            if all(of_sums):
                self.own_terms.update(eqn.outvars)
            self._define(eqn, [PARTIAL] * len(eqn.outvars), self.b.copy(eqn, terms, _types(eqn)))
            return
        as_term = bool(eqn.outvars) and eqn.outvars[0] in self.terms
        orders = None if self.in_local else self.orders
        way = choose(eqn, [self.operand(a) for a in eqn.invars], self.shards, as_term, orders)
        made = self.carried_out(eqn, way)
        if orders is not None:
            moved = [x for x in way.outs if isinstance(x, RowAxis) and (x.order or way.moves)]
            orders += [x for x in moved if x not in orders]
        if way.reduce == "sum":
            self._define(eqn, [PARTIAL] * len(eqn.outvars), made)
            if self.in_local:
                self.own_terms.update(eqn.outvars)
        else:
            self._define(
                eqn, way.outs, self._reduced_here(way.reduce, made) if way.reduce else made
            )
        if _is_moved_or_cast(eqn) and self.operand(eqn.invars[0]).is_input:
            self.inputs.update(eqn.outvars)

    def _reduced_here(self, op: str, terms: Sequence[Atom]) -> Sequence[Atom]:
        """What terms of all shards make together, or a shard's own, in the equation that is
        written."""
        return terms if self.in_local else self.reduced(op, terms)

    def _is_local(self, eqn: JaxprEqn) -> bool:
        """Whether something in the bodies of an equation is in `dtrans.local`."""
        return self.is_local or has_local_scope(eqn)

    def _define(self, eqn: JaxprEqn, layouts: Sequence[Placed], made: Sequence[Atom]) -> None:
        for v, x, value in zip(eqn.outvars, layouts, made, strict=True):
            self.define(v, x, value)

    def _open_operands(self, eqn: JaxprEqn, ins: Sequence[Placed]) -> Collection[int] | None:
        """Which operands are read as terms, where an equation is linear in sums that may be made
        later; None elsewhere.

        Sums that nothing else reads stay open through what changes no number, and sums of sums.
        What ends up as a term anyway stays open wherever it is linear, and what is whole beside it
        is a term of the first shard.
        """
        opens = [i for i, x in enumerate(ins) if isinstance(x, Partial)]
        if not opens or not eqn.outvars or any(isinstance(x, RowAxis) for x in ins):
            return None
        is_mixed = len({eqn.invars[i] in self.own_terms for i in opens}) > 1
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
        # by a known number only: a term of 0 times what may be infinite is not a number
        factor = next(
            (a.val for a in eqn.invars if isinstance(a, Literal) and not a.aval.ndim), np.nan
        )
        if name not in ("mul", "div") or not np.isfinite(factor):
            return None
        inexact = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact)
        divides = isinstance(ins[0], Partial) and inexact and factor != 0
        return opens if name == "mul" or divides else None

    def _said(self, eqn: JaxprEqn) -> str:
        where = scope_of(eqn) or origin_of(eqn) or self.within
        operands = ", ".join(short_type(a.aval) for a in eqn.invars[:2])
        return f"{eqn.primitive.name} of {operands}" + (f" ({where})" if where else "")

    def _output(self, number: int) -> str:
        name = self.out_names[number] if self.out_names else f"output {number}"
        return name + (f" of {self.within}" if self.within else "")

    def carried_out(self, eqn: JaxprEqn, way: Way) -> list[Atom]:
        atoms = [self.read(a, row) for a, row in zip(eqn.invars, way.operands, strict=True)]
        if way.write:
            return _WRITE[way.write](self, eqn, way, atoms)
        if way.reduce:
            atoms = [self._without_padding(a, x, row, way.reduce)
                     for a, x, row in zip(eqn.invars, atoms, way.operands, strict=True)]  # fmt: skip
        types = [self.shards.cut(v.aval, x) for v, x in zip(eqn.outvars, way.outs, strict=True)]
        return list(self.b.copy(eqn, atoms, types, **(way.params(types) if way.params else {})))

    def _without_padding(self, whole: Atom, piece: Atom, row: RowAxis | None, op: str) -> Atom:
        """A piece with what changes nothing in the place of padding."""
        return (
            piece
            if row is None
            else self.pieces.without_padding(piece, whole.aval.shape[row.axis], row, op)
        )

    def _move(self, eqn: JaxprEqn, way: Way, atoms: list[Atom]) -> list[Atom]:
        """Entries in other slots, by what each shard has of them."""
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
        """Return the entries of a piece in their new slots; of a `pad`, the last operand is the
        padding value."""
        if not move.keeps(piece.aval.shape[move.axis]):
            piece = self._taken(piece, move)
        if move.filled is None:
            return piece
        (value,) = self.b.call(broadcast_to(piece.aval.shape), atoms[-1])
        return self.b.call(kept_slots(move.axis), piece, self.pieces.own_row(~move.filled), value)[
            0
        ]

    def _taken(self, piece: Atom, move: Move) -> Atom:
        first, *others = slots = move.slots
        begin, end = int(first[0]), int(first[-1]) + 1
        is_run = len(first) == end - begin and (np.diff(first) == 1).all()
        if is_run and all((other == first).all() for other in others):
            return self.b.part(piece, move.axis, begin, end)
        return self.b.call(taken(move.axis), piece, self.pieces.own_row(slots))[0]

    def _pick(self, eqn: JaxprEqn, way: Way, atoms: list[Atom]) -> list[Atom]:
        """Entries of a dimension that is cut, by index: each shard gives those that it has."""
        (row, _), p, (x, _) = way.operands, eqn.params, eqn.invars
        assert row is not None
        size = x.aval.shape[row.axis]
        term = picked(
            way.at, size, p["dimension_numbers"], p["slice_sizes"], p["mode"], p["fill_value"]
        )
        return self.b.call(term, *atoms, self.pieces.start(size, row))

    def _put(self, eqn: JaxprEqn, way: Way, atoms: list[Atom]) -> list[Atom]:
        """Updates of a dimension that is cut, by index: each shard makes those that are its own."""
        (row, *_), piece = way.operands, atoms[0]
        assert row is not None
        size = eqn.invars[0].aval.shape[row.axis]
        clips = eqn.params["mode"] == jax.lax.GatherScatterMode.CLIP
        own = own_indices(way.at, size, piece.aval.shape[row.axis], clips)
        (at,) = self.b.call(own, atoms[1], self.pieces.start(size, row))
        return list(
            self._scatter(eqn, [piece, at, atoms[2]], mode=jax.lax.GatherScatterMode.FILL_OR_DROP)
        )

    def _add_up(self, eqn: JaxprEqn, way: Way, atoms: list[Atom]) -> list[Atom]:
        """Updates that are cut: each shard adds its own to nothing, and the first one to what there
        was."""
        _, of, row = way.operands
        assert row is not None and of is not None
        updates = self._without_padding(eqn.invars[2], atoms[2], row, "sum")
        first = self.term(eqn.invars[0])
        return list(self._scatter(eqn, [first, atoms[1], updates]))

    def _scatter(self, eqn: JaxprEqn, atoms: list[Atom], **params: Any) -> list[Var]:
        return self.b.copy(
            eqn, atoms, [atoms[0].aval], indices_are_sorted=False, unique_indices=False, **params
        )

    def _arg_reduce(self, eqn: JaxprEqn, way: Way, atoms: list[Atom]) -> list[Atom]:
        """Where the best entry is: the lowest of the positions of those that are the best of
        all."""
        (row,), (x,) = way.operands, atoms
        assert row is not None
        largest = eqn.primitive.name == "argmax"
        op, size = ("max" if largest else "min"), eqn.invars[0].aval.shape[row.axis]
        start = self.pieces.start(size, row)
        (nothing,) = self.b.call(identity_of(op, x.aval.shape, x.aval.dtype))
        found, at = self.b.call(best_local(row.axis, size, largest), x, start, nothing)
        (best,) = self._reduced_here(op, [found])
        (lowest,) = self._reduced_here("min", self.b.call(candidates(size), found, best, at))
        (v,) = eqn.outvars
        return self.b.call(converted(np.dtype(v.aval.dtype)), *self.b.call(decided, lowest))

    # -- bodies ----------------------------------------------------------------------------------

    def _plan(self, eqn: JaxprEqn, ins: Sequence[Placed]) -> LoopPlan | None:
        """How the bodies of an equation are carried out; None where it is carried out on whole
        values."""
        said = self._said(eqn)
        inputs = [self.operand(a).is_input for a in eqn.invars]

        def write(
            body: Any, ins: Sequence[Placed], outs: Sequence[Placed] | None, carried: int
        ) -> WrittenBody:
            wanted = [
                *range(carried),
                *(i for i, v in enumerate(eqn.outvars) if v in self.terms and i >= carried),
            ]
            return self._body(eqn, body, ins, outs, wanted, said, inputs[len(inputs) - len(ins) :])

        key = id(eqn), tuple(ins), tuple(inputs)
        if key not in self.planned:
            self.planned[key] = plan_loop(eqn, ins, write, shares_work=self.shards.shares_work)
        return self.planned[key]

    def _body(
        self,
        eqn: JaxprEqn,
        body: Any,
        ins: Sequence[Placed],
        outs: Sequence[Placed] | None,
        added: Sequence[int],
        said: str,
        inputs: Sequence[bool],
    ) -> WrittenBody:
        """A body on pieces: its inputs, and its outputs where that is asked, lie as they are said
        to.

        Args:
          added: the outputs of which terms are enough.
          said: the equation that it is of, as text.
          inputs: which of its inputs are inputs of the program that are cut.
        """
        is_local = self.is_local or in_local_scope(eqn)
        reads_own = self._is_local(eqn) or any(
            a in self.own for a in eqn.invars if isinstance(a, Var)
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
                if reads_own and x is SHARED:
                    w.own.add(v)
            made, layouts = w.write(opened(flat), lambda i, x: x if outs is None else outs[i])
            numbers = {v: i for i, v in enumerate(opened(flat).invars)}
            sliced = {numbers[v]: row for v, row in w.sliced.items() if isinstance(row, RowAxis)}
            return WrittenBody(
                eliminate_dead(w.b.build(made)),
                tuple(layouts),
                tuple(w.gathers),
                sliced,
                w.scaled,
                w.pieces.takes_index and w.pieces.reads_index,
            )

        return _written(flat, self.shards, write, said, self.orders)[0]

    def _with_bodies(self, eqn: JaxprEqn, plan: LoopPlan) -> None:
        """Write an equation with its bodies on pieces."""
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
        """Bytes that are put into communication, and of gathers those that come out; bodies of
        loops count once."""
        return sum(
            moved_bytes(e for eqn in self.b.eqns for e in (eqn, *equations_inside(eqn))).values()
        )

    def _with_loss(self, eqn: JaxprEqn, ins: Sequence[Placed]) -> None:
        """Write a loss that is still to be differentiated: each shard has a term of it, and of its
        gradients."""
        loss, count, said = eqn.params["loss"], eqn.params["count"], self._said(eqn)
        number = len(opened(loss).outvars)
        given: list[Placed] = [x if isinstance(x, RowAxis) else SHARED for x in ins]
        inputs = [self.operand(a).is_input for a in eqn.invars]
        added = [0, *(i for i, v in enumerate(eqn.outvars[1:number], 1) if v in self.terms)]
        rules, self.keeps_rules = self.keeps_rules, True
        body = self._body(eqn, loss, given, None, added, said, inputs)
        if sliced := {i: row for i, row in body.sliced.items() if i >= count}:
            given = [sliced.get(i, x) for i, x in enumerate(given)]
            body = self._body(eqn, loss, given, None, added, said, inputs)
        if not isinstance(body.outs[0], Partial):
            body = self._body(eqn, loss, given, [PARTIAL, *body.outs[1:]], added, said, inputs)
        self.keeps_rules = rules

        atoms, new = [self.as_(a, x) for a, x in zip(eqn.invars, given, strict=True)], body.jaxpr
        if body.takes_index:  # behind what the loss is differentiated by
            index, *others = opened(new).invars
            new = closed_with(new, invars=[*others, index])
            atoms.append(self.pieces.index())
        self.gathers += body.gathers
        self.scaled |= body.scaled
        gradients = [x if isinstance(x, RowAxis) else PARTIAL for x in given[:count]]
        layouts = [*body.outs, *gradients]
        types = [self.shards.cut(v.aval, x) for v, x in zip(eqn.outvars, layouts, strict=True)]
        self._define(eqn, layouts, self.b.copy(eqn, atoms, types, loss=new))

    def _with_rules(self, eqn: JaxprEqn, ins: Sequence[Placed]) -> bool:
        """Write a call with its derivative rule on pieces; False if that takes communication."""
        ins = [x if isinstance(x, RowAxis) else SHARED for x in ins]

        def on_pieces(
            whole: Any, given: Sequence[Placed], wanted: Sequence[Placed] | None
        ) -> tuple[ClosedJaxpr, list[Placed]] | None:
            flat = eliminate_dead(inline_calls(whole))
            ends = [
                a
                for a, x in zip(opened(flat).outvars, wanted or (), strict=False)
                if isinstance(x, Partial)
            ]

            def write(w: SplitWriter) -> tuple[ClosedJaxpr, list[Placed]]:
                w.pieces.takes_index = self.pieces.takes_index
                w.terms = linear_terms(opened(flat), [a for a in ends if isinstance(a, Var)])
                for v, x in zip(opened(flat).invars, given, strict=True):
                    w.take(v, x, is_input=False)
                made, layouts = w.write(
                    opened(flat), lambda i, x: rows_only(x) if wanted is None else wanted[i]
                )
                return eliminate_dead(w.b.build(made)), layouts

            (made, layouts), _ = _written(flat, self.shards, write, self._said(eqn), self.orders)
            exchanged = [e for e in equations(made) if collective_of(e) is not None]
            return None if exchanged else (made, layouts)

        def rule_on_pieces(
            whole: Any, given: Sequence[Placed], wanted: Sequence[Placed]
        ) -> ClosedJaxpr | None:
            found = on_pieces(whole, given, wanted)
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
        """Return True if a rule in an equation on whole values is not linear in cotangents, or may
        not be.

        Cotangents of what all shards have are terms of a sum.
        """
        if eqn.primitive.name == CUSTOM_VJP:
            return not self._with_rules(eqn, [SHARED] * len(eqn.invars))
        return any(e.primitive.name == CUSTOM_VJP for e in equations_inside(eqn))

    def _may_not_end(self, eqn: JaxprEqn, row: RowAxis) -> bool:
        """Return True if turns of padding may not end, as a `while` in them is decided by their
        numbers."""
        return self.shards.pads(scan_length(eqn), row) and any(
            e.primitive.name == WHILE for e in equations_inside(eqn)
        )

    def _with_own_turns(self, eqn: JaxprEqn, row: RowAxis, added: Sequence[bool]) -> None:
        """Write a loop whose turns are divided among the shards."""
        consts, carried = scan_counts(eqn)
        size = scan_length(eqn)
        (body,) = bodies(eqn)
        carry: list[Placed] = [PARTIAL if adds else SHARED for adds in added]
        atoms = [self.read(a, None) for a in eqn.invars[:consts]]
        atoms += [self.as_(a, x) for a, x in zip(eqn.invars[consts:], carry, strict=False)]
        atoms += [self.read(a, row) for a in eqn.invars[consts + carried :]]
        if self.shards.pads(size, row) and any(added):
            body = with_padding(body, consts, added)
            atoms.append(self.pieces.own_row(self.shards.entries(size, row) >= 0))
        layouts = [*carry, *(row for _ in eqn.outvars[carried:])]
        types = [self.shards.cut(v.aval, x) for v, x in zip(eqn.outvars, layouts, strict=True)]
        turns = scan_turns(self.shards.local(size, row))
        self._define(eqn, layouts, self.b.copy_with_bodies(eqn, [body], atoms, types, **turns))

    # -- all of it -------------------------------------------------------------------------------

    def write(
        self, inner: Jaxpr, wanted: Callable[[int, Placed], Placed]
    ) -> tuple[list[Atom], list[Placed]]:
        """Write all equations; the outputs, and how they lie.

        Args:
          wanted: how an output is wanted, from its number and how it is made.
        """
        for eqn in inner.eqns:
            self.equation(eqn)
        made: list[Atom] = []
        layouts: list[Placed] = []
        for i, a in enumerate(inner.outvars):
            own = (
                isinstance(a, Var) and a in self.own and not self.within
            )  # inside of a loop it goes on to be
            self.needed_by(
                functools.partial(self._output, i),
                self._made_by.get(a) if isinstance(a, Var) and own else None,
            )
            layout = wanted(i, PARTIAL if own else self.layout(a))
            made.append(
                self.reduced("sum", [self.term(a)])[0]
                if own and layout is SHARED
                else self.as_(a, layout)
            )
            layouts.append(layout)
        return made, layouts


Made = TypeVar("Made")


def written(
    jaxpr: ClosedJaxpr, shards: Shards, write: Callable[[SplitWriter], Made], within: str = ""
) -> Made:
    """Return what `write` makes with a writer of a jaxpr.

    Shards keep entries in another order than that of the whole where this moves no more bytes than
    the gathers that it saves.
    """
    orders: list[RowAxis] = []
    made, writer = _written(jaxpr, shards, write, within, orders)
    if not orders or not writer.moved:
        return made
    other, in_sequence = _written(jaxpr, shards, write, within, None)
    return made if writer.moved <= in_sequence.moved else other


def _written(
    jaxpr: ClosedJaxpr,
    shards: Shards,
    write: Callable[[SplitWriter], Made],
    within: str,
    orders: list[RowAxis] | None,
) -> tuple[Made, SplitWriter]:
    """Return what `write` makes with a writer, and the writer.

    It is written twice where values that are made whole are read in pieces: the second time they
    are made in pieces alone, unless that would take gathers.
    """
    first = SplitWriter(jaxpr, shards, within)
    first.planned, first.orders = {}, orders
    made = write(first)
    if not first.asked:
        return made, first
    second = SplitWriter(jaxpr, shards, within)
    second.planned, second.cut_at_birth, second.orders = first.planned, first.asked, orders
    again = write(second)
    return (again, second) if len(second.gathers) <= len(first.gathers) else (made, first)


def linear_terms(inner: Jaxpr, outs: Collection[Var], summed: Collection[Var] = ()) -> set[Var]:
    """Values of which terms are enough where terms of `outs` are: those that they are linear in.

    What a value is broadcast to has more entries, and is no place to add them up; but where it
    becomes, entry by entry, one of those that are `summed` anyway.
    """
    found, anyway = set(outs), set(summed)
    for eqn in reversed(inner.eqns):
        if eqn.outvars and found.issuperset(eqn.outvars):
            if eqn.primitive.name in _GROWS and _grows(eqn) and not anyway.issuperset(eqn.outvars):
                if eqn.primitive.name == "broadcast_in_dim":
                    found.difference_update(eqn.outvars)
                continue
            if anyway.issuperset(eqn.outvars) and (
                facts_of(eqn).elementwise or is_rearrangement(eqn)
            ):
                anyway.update(a for a in eqn.invars if isinstance(a, Var))
            linear = {i for together in linear_operands(eqn) for i in together}
            found.update(a for i, a in enumerate(eqn.invars) if i in linear and isinstance(a, Var))
    return found


def _grows(eqn: JaxprEqn) -> bool:
    return eqn.outvars[0].aval.size > eqn.invars[_GROWS[eqn.primitive.name]].aval.size


def _adds_terms(eqn: JaxprEqn, opens: Sequence[int]) -> bool:
    """Return True if sums may be made behind an equation as well as before, and are not larger
    there.

    Casts round, so that sums come first. Other operands are indices and conditions: a term of 0
    times a number that may be infinite is not a number.
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
    """Return True if an equation changes no number of its one operand, but for rounding."""
    return is_rearrangement(eqn) or eqn.primitive.name == "convert_element_type"


def _with_an_operand(jaxpr: ClosedJaxpr, operand: Atom) -> ClosedJaxpr:
    """Return a body with one more operand, the first, that it does not read."""
    return closed_with(jaxpr, invars=[Var(operand.aval), *opened(jaxpr).invars])


def _types(eqn: JaxprEqn) -> list[Any]:
    return [v.aval for v in eqn.outvars]


_WRITE: Mapping[str, Callable[[SplitWriter, JaxprEqn, Way, list[Atom]], list[Atom]]] = {
    "move": SplitWriter._move,
    "pick": SplitWriter._pick,
    "put": SplitWriter._put,
    "add_up": SplitWriter._add_up,
    "arg_reduce": SplitWriter._arg_reduce,
}
