"""Values of the whole batch that no parameter enters, made before the micro-batches.

How many entries a mask has, a dropout mask, which rows are mixed: such values are of the whole batch, and need no
micro-batch. A program of its own makes them first, from the batch alone, by the equations that one device carries out.
Micro-batches are given them: their rows, or all of them. What is left may add up where the step as it was written does
not (`dtrans.batch.scaled`): a masked mean is a sum over rows, once the number that it is divided by is known. Beside a
penalty of parameters, of which every micro-batch has all, it is a mean over micro-batches that are given a portion of
that number.

    step      params, opt_state, *batch                       ->  what it returns
    becomes   *batch                                          ->  @given/0, @given/1, ...
              params, opt_state, *batch, @given/0, ...        ->  what it returns

Which values those are is found by comparing the step on the whole batch with that on a part. A value is given unless it
is the same rows anyway (labels as one-hot rows), which a part makes by itself. That choice is about use, not truth:
whether parts add up is proven of the step that it leaves.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import Atom, ClosedJaxpr, JaxprEqn, Literal, Var, closed, constants, facts_of, opened
from dtrans.errors import BatchError
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import backward_slice
from dtrans.ir.fingerprint import of_value
from dtrans.ir.inline import eliminate_dead, inline_calls
from dtrans.ir.program import FORWARD, Program
from dtrans.ir.pytree import TreeSpec
from dtrans.step.capture import loss_of
from dtrans.step.collect import COLLECT


ROOT = "@given"  # what the names of these values begin with


@dataclasses.dataclass(frozen=True)
class Spot:
    """Where a captured step makes a value.

    Attributes:
      in_loss: whether an equation of the loss function makes it.
      eqn: which one; None for a constant.
      out: which of its outputs, or of the constants, it is.
    """

    in_loss: bool
    eqn: int | None
    out: int


@dataclasses.dataclass(frozen=True, eq=False)
class GivenValues:
    """The values that micro-batches of a captured step are given.

    Attributes:
      spots: where each is made. One that is made outside of the loss may be there twice: once for the loss, which reads
        a portion, and once for all else.
      whole: the names of those that every micro-batch gets whole; of others it gets rows.
      held: parameters without a gradient that they may be made of, a key perhaps.
      parts: how many micro-batches there are.
      portions: the names of those of which every micro-batch gets an equal portion, not the whole.
      equations: the primitives of the step in which they were found, which spots count.
      loss_reads: the names of portions that the loss reads, by the spot of which the rest of the step reads all.
    """

    spots: tuple[Spot, ...]
    whole: tuple[str, ...]
    held: tuple[str, ...] = ()
    parts: int = 1
    portions: tuple[str, ...] = ()
    equations: tuple[str, ...] = ()
    loss_reads: Mapping[Spot, str] = dataclasses.field(default_factory=dict)

    def by_portions(self, captured: Program) -> Iterator[GivenValues]:
        """The ways to give what every micro-batch gets whole: all of it, then portions of numbers, then of single ones.

        A loss that is a sum over rows, divided by a number of the whole batch, is a sum over micro-batches. Divided by
        a portion of that number it is a mean over them; so is a penalty of parameters, which all of them have whole.
        """
        step = FlatStep(captured)
        numbers = [
            n for n in self.whole if jnp.issubdtype(step.value(self.spots[self.number(n)]).aval.dtype, jnp.inexact)
        ]
        others = [a for e in step.inner.eqns if e is not step.loss for a in e.invars]
        read_elsewhere = {a for a in (*others, *step.inner.outvars) if isinstance(a, Var)}
        twice = {n for n in numbers if step.value(self.spots[self.number(n)]) in read_elsewhere}
        yield self
        if numbers:
            yield self._with_portions(numbers, twice)
        for n in numbers if len(numbers) > 1 else ():
            yield self._with_portions([n], twice)

    def _with_portions(self, numbers: Sequence[str], twice: Collection[str]) -> GivenValues:
        """The same with portions of some; of those in `twice` only the loss gets a portion, all else gets the whole."""
        names = {n: n for n in numbers}
        names |= {n: f"{ROOT}/{len(self.spots) + i}" for i, n in enumerate(n for n in numbers if n in twice)}
        spots = {n: self.spots[self.number(n)] for n in numbers if n in twice}
        return dataclasses.replace(
            self,
            spots=(*self.spots, *spots.values()),
            whole=(*self.whole, *(names[n] for n in spots)),
            portions=tuple(names.values()),
            loss_reads={spot: names[n] for n, spot in spots.items()},
        )

    @staticmethod
    def number(name: str) -> int:
        """Which of these values has a name."""
        return int(name.rpartition("/")[2])

    def _flat(self, captured: Program) -> FlatStep:
        """A captured step whose equations are those among which the values were found."""
        step = FlatStep(captured)
        if step.primitives != self.equations:
            raise BatchError(
                f"{captured.name} has other equations for parts of the batch of these shapes than for those for which "
                "values of the whole batch were found: give each part two rows at least"
            )
        return step

    def taken_by(self, captured: Program) -> Program:
        """A captured step with these values as its last arguments. Raises BatchError for one of other equations."""
        step = self._flat(captured)
        added = [Var(step.value(spot).aval) for spot in self.spots]
        # of a spot that is there twice the first is for all but the loss
        given = dict(reversed([*zip(self.spots, added, strict=True)]))
        sub = {step.value(s): v for s, v in given.items() if not s.in_loss}
        portions = {step.value(s): added[self.number(n)] for s, n in self.loss_reads.items()}
        eqns = [e if e is step.loss else e.replace(invars=_read(e.invars, sub)) for e in step.inner.eqns]
        eqns[step.at] = self._loss(step, given, {**sub, **portions})
        inner = step.inner
        jaxpr = closed(
            inner.constvars,
            step.constants,
            [*inner.invars, *added],
            _read(inner.outvars, sub),
            eqns,
            inner,
        )
        made = dataclasses.replace(
            captured,
            jaxpr=jaxpr,
            args=(*captured.args, TreeSpec.of(tuple(v.aval for v in added), ROOT)),
            roles=(FORWARD,) * len(eqns),
            labels={},
        )
        return captured.rewritten(self.taken_by, made=made)

    def _loss(self, step: FlatStep, given: Mapping[Spot, Var], sub: Mapping[Var, Var]) -> JaxprEqn:
        """The equation of the loss, which reads those that it made."""
        inside = {step.value(s): Var(v.aval) for s, v in given.items() if s.in_loss}
        body = opened(step.body)
        eqns = [e.replace(invars=_read(e.invars, inside)) for e in body.eqns]
        new = closed(
            body.constvars,
            constants(step.body),
            [*body.invars, *inside.values()],
            _read(body.outvars, inside),
            eqns,
            step.body,
        )
        operands = [*_read(step.loss.invars, sub), *(v for s, v in given.items() if s.in_loss)]
        return step.loss.replace(invars=operands, params={**step.loss.params, "loss": eliminate_dead(new)})

    def made_by(self, captured: Program) -> Program:
        """The program that makes these values, from the whole batch; `captured` is of that. Errors as `taken_by`."""
        step = self._flat(captured)
        body = opened(step.body)
        operand = dict(zip(body.invars, step.loss.invars, strict=True))
        inlined = [e.replace(invars=_read(e.invars, operand)) for e in body.eqns]
        eqns = [*step.inner.eqns[: step.at], *inlined, *step.inner.eqns[step.at + 1 :]]
        outs = [operand.get(v, v) for v in map(step.value, self.spots)]
        kept, used = backward_slice(eqns, outs)
        ins = dict(zip(captured.in_names, step.inner.invars, strict=True))
        held = tuple(n for n in self.held if ins[n] in used)
        args = (*captured.args[2:], TreeSpec(jax.tree.structure(held), held))
        whole = closed(
            [*step.inner.constvars, *body.constvars],
            [*step.constants, *constants(step.body)],
            [ins[n] for spec in args for n in spec.names],
            outs,
            [eqns[i] for i in kept],
            step.inner,
        )
        b = Builder(whole)
        values = b.inline(whole, *(b.input(v.aval) for v in opened(whole).invars))
        for n in self.portions:
            (values[self.number(n)],) = b.call(_portion(self.parts), values[self.number(n)])
        jaxpr = eliminate_dead(b.build(values))
        made = Program(
            f"values of the whole batch of {captured.name}",
            jaxpr,
            args,
            TreeSpec.of(tuple(v.aval for v in outs), ROOT),
            (FORWARD,) * len(opened(jaxpr).eqns),
        )
        return captured.rewritten(self.made_by, made=made)


def given_values(whole: Program, part: Program, parts: int, held: Sequence[str]) -> GivenValues:
    """Find the values to be given.

    Args:
      whole: a captured step, of the whole batch.
      part: the same of a micro-batch.
      parts: how many there are.
      held: parameters without a gradient.
    """
    flat = FlatStep(part)
    found = _Finder(FlatStep(whole), flat, parts).found(held)
    return dataclasses.replace(found, held=tuple(held), parts=parts, equations=flat.primitives)


def with_rows_first(main: Program, axes: Mapping[str, int]) -> Program:
    """Return a step whose arrays of the batch have their rows on dim 0, and are transposed to what it wants.

    Args:
      axes: name to the dimension that has the rows in the step as it is.
    """
    moved = {n: axis for n, axis in axes.items() if axis}
    if not moved:
        return main

    def rows_first(step: Program) -> Program:
        b = Builder(step.jaxpr)
        ins = [b.input(t.update(shape=_moved(t, moved.get(n, 0), 0).shape)) for n, t in step.inputs.items()]
        turned = [b.call(_turned(moved[n]), v)[0] if n in moved else v for n, v in zip(step.in_names, ins, strict=True)]
        jaxpr = b.build(b.inline(step.jaxpr, *turned))
        return dataclasses.replace(step, jaxpr=jaxpr, roles=(FORWARD,) * len(jaxpr.jaxpr.eqns), labels={})

    return main.rewritten(rows_first, lambda types: {n: _moved(t, 0, moved.get(n, 0)) for n, t in types.items()})


def _moved(t: Any, source: int, to: int) -> jax.ShapeDtypeStruct:
    shape = list(t.shape)
    if source != to:
        shape.insert(to, shape.pop(source))
    return jax.ShapeDtypeStruct(tuple(shape), t.dtype)


@functools.cache
def _turned(axis: int) -> Callable[[Any], Any]:
    return lambda x: jnp.moveaxis(x, 0, axis)


@functools.cache
def _portion(parts: int) -> Callable[[Any], Any]:
    return lambda x: x / parts


class FlatStep:
    """A captured step without calls, and its loss."""

    def __init__(self, captured: Program) -> None:
        keep = ("loss", "loss_seed", COLLECT)
        flat = _with_named_ends(inline_calls(captured.jaxpr, keep=keep))
        self.program = captured
        self.inner, self.constants = opened(flat), constants(flat)
        self.loss = loss_of(dataclasses.replace(captured, jaxpr=flat, roles=("",) * len(self.inner.eqns)))
        self.at = self.inner.eqns.index(self.loss)
        self.body = _with_named_ends(inline_calls(self.loss.params["loss"], keep=keep, rules=True))

    @property
    def primitives(self) -> tuple[str, ...]:
        """The names of all its primitives, in order."""
        return tuple(e.primitive.name for e in (*self.inner.eqns, *opened(self.body).eqns))

    def value(self, spot: Spot) -> Var:
        """What is made there."""
        of = opened(self.body) if spot.in_loss else self.inner
        return of.constvars[spot.out] if spot.eqn is None else of.eqns[spot.eqn].outvars[spot.out]


@dataclasses.dataclass(frozen=True)
class _Known:
    """Facts about a value that no parameter enters.

    Attributes:
      own: whether parts make it by themselves: it is their rows of it, or all of it.
      spot: where it is made; None for an array of the batch.
    """

    own: bool
    spot: Spot | None = None


class _Finder:
    """Compares a step on the whole batch with that on a part."""

    def __init__(self, whole: FlatStep, part: FlatStep, parts: int) -> None:
        self.whole, self.part, self.parts = whole, part, parts
        self.known: dict[Var, _Known] = {}  # by the value of the part
        self.asked: dict[Spot, int | None] = {}

    def found(self, held: Collection[str]) -> GivenValues:
        w, p = self.whole, self.part
        if w.primitives != p.primitives:
            return GivenValues((), ())  # nothing can be compared
        batch = {n for spec in p.program.args[2:] for n in spec.names}
        for n, a, b in zip(p.program.in_names, w.inner.invars, p.inner.invars, strict=True):
            if n in batch or n in held:
                self.known[b] = _Known(self.rows(a, b) is not NotImplemented)
        self._constants(w.inner, w.constants, p.inner, p.constants, in_loss=False)
        for i, (x, y) in enumerate(zip(w.inner.eqns, p.inner.eqns, strict=True)):
            if i == p.at:
                self._loss(x, y)
            else:
                self._equation(x, y, Spot(in_loss=False, eqn=i, out=0))
        self._read(w.inner.outvars, p.inner.outvars)
        names = [f"{ROOT}/{i}" for i in range(len(self.asked))]
        whole = tuple(n for n, rows in zip(names, self.asked.values(), strict=True) if rows is None)
        return GivenValues(tuple(self.asked), whole)

    def rows(self, a: Any, b: Any) -> Any:
        """The dimension along which parts have rows; None where they have all; `NotImplemented` where it is neither."""
        if a.aval.shape == b.aval.shape:
            return None
        cut = b.aval.ndim and a.aval.shape == (b.aval.shape[0] * self.parts, *b.aval.shape[1:])
        return 0 if cut else NotImplemented

    def _constants(self, w: Any, of_w: Sequence[Any], p: Any, of_p: Sequence[Any], *, in_loss: bool) -> None:
        for i, (x, v) in enumerate(zip(of_w, p.constvars, strict=False)):
            y = of_p[i]
            same = x is y or (np.shape(x) == np.shape(y) and x.dtype == y.dtype and _equal(x, y))
            self.known[v] = _Known(same, Spot(in_loss, None, i))

    def _loss(self, x: JaxprEqn, y: JaxprEqn) -> None:
        w, p = opened(self.whole.body), opened(self.part.body)
        count = y.params["count"]
        for v, a in zip(p.invars[count:], y.invars[count:], strict=True):
            if not isinstance(a, Var):
                self.known[v] = _Known(own=True)
            elif a in self.known:
                self.known[v] = self.known[a]
        self._constants(w, constants(self.whole.body), p, constants(self.part.body), in_loss=True)
        for i, (made, own) in enumerate(zip(w.eqns, p.eqns, strict=True)):
            self._equation(made, own, Spot(in_loss=True, eqn=i, out=0))
        self._read(w.outvars, p.outvars)

    def _equation(self, x: JaxprEqn, y: JaxprEqn, spot: Spot) -> None:
        free = all(not isinstance(a, Var) or a in self.known for a in y.invars)
        if not free or y.effects or x.effects:
            self._read(x.invars, y.invars)
            return
        own = self._is_same(x, y) or self._by_row(x, y)
        if y.primitive.name == "transpose" and self.rows(x.outvars[0], y.outvars[0]) is NotImplemented:
            self._read(x.invars, y.invars)  # parts are given what has its rows on dim 0, and turn it as the step does
            own = True
        for k, v in enumerate(y.outvars):
            # a number of a row is what its part makes of it, or nothing is: nobody else's would do
            if y.primitive.name != "iota":
                self.known[v] = _Known(own, dataclasses.replace(spot, out=k))
            else:
                self.known[v] = _Known(own=y.params["dimension"] != 0, spot=None)

    def _is_same(self, x: JaxprEqn, y: JaxprEqn) -> bool:
        """Return True if the equation makes the same of the same operands, as the split of a key does."""
        for a, b in zip((*x.invars, *x.outvars), (*y.invars, *y.outvars), strict=True):
            if isinstance(b, Literal):
                if not isinstance(a, Literal) or not _equal(a.val, b.val):
                    return False
            elif self.rows(a, b) is not None or not (b in y.outvars or self.known[b].own):
                return False
        return of_value(x.params) == of_value(y.params)

    def _by_row(self, x: JaxprEqn, y: JaxprEqn) -> bool:
        """Return True if a part makes its rows of the result from its rows of the operands.

        Shapes say so of what keeps rows in order: where dim 0 of the operands and of the result is cut by parts, it is
        the same dimension, or begins with it.
        """
        facts = facts_of(y)
        if not (facts.elementwise or facts.reduces or facts.keeps_order(y)):
            return False
        for a, b in zip(x.invars, y.invars, strict=True):
            if isinstance(b, Literal):
                if not isinstance(a, Literal) or not _equal(a.val, b.val):
                    return False
            elif not self.known[b].own:
                return False
        rows = [self.rows(a, b) for a, b in zip(x.invars, y.invars, strict=True)]
        outs = [self.rows(a, b) for a, b in zip(x.outvars, y.outvars, strict=True)]
        return NotImplemented not in (*rows, *outs) and (0 not in rows or None not in outs)

    def _read(self, whole: Sequence[Atom], part: Sequence[Atom]) -> None:
        """Values that are read by what parameters enter, or returned."""
        for a, b in zip(whole, part, strict=True):
            known = self.known.get(b) if isinstance(b, Var) else None
            if known is None or known.own or known.spot is None or known.spot in self.asked:
                continue
            rows = self.rows(a, b)
            if rows is not NotImplemented and not jnp.issubdtype(b.aval.dtype, jax.dtypes.extended):
                self.asked[known.spot] = rows


def _with_named_ends(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """The same with constants for numbers that are returned as they are: how many rows there are, perhaps."""
    inner = opened(jaxpr)
    numbers = {i: Var(a.aval) for i, a in enumerate(inner.outvars) if isinstance(a, Literal)}
    values = [jnp.asarray(inner.outvars[i].val, v.aval.dtype) for i, v in numbers.items()]  # type: ignore[union-attr]
    outs = [numbers.get(i, a) for i, a in enumerate(inner.outvars)]
    return closed(
        [*inner.constvars, *numbers.values()], [*constants(jaxpr), *values], inner.invars, outs, inner.eqns, jaxpr
    )


def _equal(x: Any, y: Any) -> bool:
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return False
    return np.array_equal(x, y, equal_nan=np.asarray(x).dtype.kind in "fc")


def _read(atoms: Collection[Atom], sub: Mapping[Any, Any]) -> list[Atom]:
    return [sub.get(a, a) if isinstance(a, Var) else a for a in atoms]
