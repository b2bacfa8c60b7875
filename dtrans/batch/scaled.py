"""Proof that outputs of one device are the mean, or the sum, of outputs on parts of the batch.

If the proof succeeds, each trainer runs the user's step unchanged on its part, and only gradients
and results are merged. For a mean over rows, for example, gradients are averaged.

The proof compares two programs: the user's step traced on a part, and the *derived* step. The
engine writes the derived step for a trainer, from the step on the full batch
(`dtrans.batch.trainer_step`). If the derived step does not communicate, both programs have the same
equations. Only numbers that depend on the batch size differ, such as 1 / B. The proof begins with
the outputs of both programs, and pairs equations backwards until it reaches the inputs. Each value
of the user's step is trainers**exponent times the paired value.

Exponents come from the numbers that differ. In a product exponents add up, and all terms of a sum
must have the same exponent. Some terms, such as a weight penalty, depend on no rows. In the user's
step every trainer adds such a term, but in the derived step only the first trainer does. So the
exponent of the term is 1. Gradients with exponent 1 are averaged over trainers, and gradients with
exponent 0 are summed.

If equations cannot be paired, or exponents do not fit, nothing is proven.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dtrans._jax import (
    COND,
    CUSTOM_JVP,
    REMAT,
    SCAN,
    WHILE,
    Atom,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    bodies,
    closed,
    constants,
    facts_of,
    line_of,
    opened,
    params_besides_bodies,
    scaling_operands,
    scan_counts,
    while_counts,
)
from dtrans.batch.trainer_step import TrainerStep
from dtrans.ir.dataflow import backward_slice
from dtrans.ir.fingerprint import canonical_text
from dtrans.ir.inline import eliminate_dead, inline_calls
from dtrans.ir.program import Program
from dtrans.ir.selection import subset, values_at
from dtrans.step.capture import value_and_grad_p
from dtrans.step.halves import DividedStep
from dtrans.step.marks import mark_p


@dataclasses.dataclass(frozen=True)
class PartScale:
    """Result of `scale_of_parts`: outputs that are means over the batch, and outputs that are sums.

    One device's output is a sum with one term for each trainer. The user's step on a trainer's part
    returns this term times trainers**exponent. The exponent is 1 for a mean over the batch, and 0
    for a sum.

    Attributes:
      gradients: exponent of all gradients: 0 (to sum over trainers) or 1 (to average).
      results: exponent of each result.
    """

    gradients: int
    results: Mapping[str, int]


_ZERO = None  # exponent of a value of zeros; it counts as equal to any exponent
Power = int | None


class _NoScaleError(Exception):
    """Failure of the proof: equations differ, or exponents do not fit.

    The text of the exception is the source line of the equation.
    """


def scale_of_parts(
    step: DividedStep, part: TrainerStep, trainers: int
) -> tuple[PartScale | None, str]:
    """Try to prove that one device's outputs are means or sums of the user's step on parts.

    If the proof succeeds, trainers can run the user's step without communication.

    Args:
      step: the user's step, traced on a trainer's part. If the step contains its loss as one
        undifferentiated equation (`dtrans.step.capture`), the proof compares losses instead of
        gradients. Then the proof also works for gradients that do not depend on the batch.
      part: the derived step of a trainer.
      trainers: number of trainers.

    Returns:
      A pair (exponents, line). If the proof fails, `exponents` is None, and `line` is the source
      line of the equation that differs, or "" if it is unknown.
    """
    if part.exchanged or trainers < 2:
        return None, ""
    marks = {e.params["leaf"]: e.invars[0] for e in part.program.eqns if e.primitive is mark_p}
    results = [n for n in step.results if n not in step.from_gradients]
    asked = [n for n in (*results, *step.frozen) if n in part.merges]

    # outputs of both halves: the gradients, then the results
    part_marks = subset(marks, step.gradients)
    halves = _half(step.program, step.gradients, asked), _half(part.program, part_marks, asked)
    try:
        powers = _Pairing(trainers, part.scaled).powers(halves, [0] * len(step.program.in_names))
    except _NoScaleError as e:
        return None, str(e)
    count = len(step.gradients)
    of_gradients = {p for p in powers[:count] if p is not _ZERO}
    of_results = dict(zip(asked, powers[count:], strict=True))

    # a plan either sums or averages all gradients
    if not of_gradients <= {0} and not of_gradients <= {1}:
        return None, ""
    scales = {}
    for n, merge in part.merges.items():
        scales[n] = of_results.get(n) or 0
        fits = scales[n] == 0 or (merge == "sum" and scales[n] == 1)
        if not fits:
            return None, ""
    return PartScale(max(of_gradients, default=0), scales), ""


def _half(program: Program, gradients: Mapping[str, Atom], results: Sequence[str]) -> ClosedJaxpr:
    """Extract the equations that compute some gradients and results of a step."""
    inner = program.inner
    outs = [*gradients.values(), *values_at(program.outvars, results)]
    positions, _ = backward_slice(inner.eqns, outs)
    eqns = values_at(inner.eqns, positions)
    half = closed(inner.constvars, program.jaxpr.consts, inner.invars, outs, eqns, inner)
    return eliminate_dead(half)


class _Pairing:
    """Comparison of two programs with the same equations; finds the ratio of each pair of values.

    Each ratio is trainers**exponent.

    Args:
      trainers: number of trainers.
      scaled: see `TrainerStep.scaled`.
    """

    def __init__(self, trainers: int, scaled: Mapping[Var, tuple[Atom, int]]) -> None:
        self.trainers = trainers
        self.scaled = scaled

    def powers(self, pair: Sequence[ClosedJaxpr], ins: Sequence[Power]) -> list[Power]:
        """Compare two jaxprs, and return the exponent of each pair of outputs.

        Args:
          pair: the two jaxprs.
          ins: exponent of each pair of inputs.
        """
        here, there = map(opened, pair)
        if len(here.invars) != len(there.invars):
            raise _NoScaleError
        of = lambda a, b: (id(a), id(b))  # id, because JAX literals are not hashable
        known: dict[tuple[int, int], Power] = dict(
            zip(map(of, here.invars, there.invars), ins, strict=True)
        )
        producers = _producers(here), _producers(there)
        values = [dict(zip(opened(x).constvars, constants(x), strict=True)) for x in pair]
        is_scaled = lambda b: isinstance(b, Var) and b in self.scaled
        is_computed = lambda a, side: isinstance(a, Var) and a in producers[side]

        def is_pair(a: Atom, b: Atom) -> bool:
            return is_scaled(b) or is_computed(a, 0) == is_computed(b, 1)

        def power(a: Atom, b: Atom) -> Power:
            """Return the exponent of a pair of values; compute the exponent of two constants."""
            if of(a, b) in known:
                return known[of(a, b)]
            number = lambda x, side: np.asarray(x.val if isinstance(x, Literal) else side.get(x))
            return self.ratio(number(a, values[0]), number(b, values[1]))

        outs = list(zip(here.outvars, there.outvars, strict=True))
        if not all(is_pair(*pair) for pair in outs):
            raise _NoScaleError
        waiting = [pair for pair in outs if is_computed(pair[1], 1)]
        while waiting:
            a, b = waiting[-1]
            if of(a, b) in known:
                waiting.pop()
                continue
            if is_scaled(b):
                one, by = self.scaled[b]  # type: ignore[index]
                if is_computed(a, 0) and is_computed(one, 1) and of(a, one) not in known:
                    waiting.append((a, one))
                    continue
                exponent = power(a, one)
                known[of(a, b)] = exponent if exponent is _ZERO else exponent + by
                continue
            (x, i), (y, k) = producers[0][a], producers[1][b]
            if x.primitive is not y.primitive or i != k or len(x.invars) != len(y.invars):
                raise _NoScaleError(line_of(x))
            pairs = list(zip(x.invars, y.invars, strict=True))
            if not all(is_pair(*pair) for pair in pairs):
                raise _NoScaleError(line_of(x))
            missing = [p for p in pairs if is_computed(p[1], 1) and of(*p) not in known]
            if missing:
                waiting += missing
                continue
            try:
                exponents = self.of_equation(x, y, [power(*p) for p in pairs])
            except _NoScaleError as e:
                raise _NoScaleError(str(e) or line_of(x)) from None
            known.update(zip(map(of, x.outvars, y.outvars), exponents, strict=True))
        return [power(*p) for p in outs]

    def ratio(self, here: Any, there: Any) -> Power:
        """Return the exponent of two constants: `here` equals `there` times trainers**exponent."""
        if here.dtype == object or here.shape != there.shape:
            raise _NoScaleError
        if np.array_equal(here, there, equal_nan=here.dtype.kind in "fc"):
            return _ZERO if not np.any(here) else 0
        for power in (1, -1, 2, -2):
            if np.allclose(here, there * float(self.trainers) ** power, rtol=1e-6, atol=0):
                return power
        raise _NoScaleError

    def of_equation(self, x: JaxprEqn, y: JaxprEqn, ins: Sequence[Power]) -> list[Power]:
        """Return the exponents of the outputs of two paired equations.

        Args:
          x, y: the equations.
          ins: exponent of each pair of operands.
        """
        name, count = x.primitive.name, len(x.outvars)
        if name in (SCAN, WHILE, COND, *REMAT):
            return self.of_bodies(x, y, ins)
        if x.primitive is value_and_grad_p:
            return self.of_loss(x, y, ins)
        if name == CUSTOM_JVP:
            return self.of_rule(x, y, ins)
        if not _have_equal_params(x, y, lambda e: e.params):
            raise _NoScaleError
        if groups := scaling_operands(x):
            return [self.of_product(x, groups, ins)] * count
        known = {p for p in ins if p is not _ZERO}
        if name in ("integer_pow", "square"):
            if ins[0] is _ZERO:
                return [_ZERO]
            return [ins[0] * x.params.get("y", 2)]
        if len(known) <= 1 and len(facts_of(x).scale_free_in) == len(ins):
            return [0] * count
        if any(known):
            raise _NoScaleError
        if not known and facts_of(x).keeps_zero(x):
            return [_ZERO] * count
        return [0] * count

    def of_product(
        self, eqn: JaxprEqn, groups: Sequence[Sequence[int]], ins: Sequence[Power]
    ) -> Power:
        """Return the exponent of the output of a product or a sum.

        The output is linear in each of several groups of operands. The terms of a sum are one
        group, and the factors of a product are several. All operands of a group must have the same
        exponent, and the exponents of groups are added. Other operands must have exponent 0. The
        exponent of a divisor is subtracted.

        Args:
          eqn: the equation.
          groups: the groups, as lists of operand indices.
          ins: exponent of each operand.
        """
        grouped = set(itertools.chain(*groups))
        others = [p or 0 for i, p in enumerate(ins) if i not in grouped]
        if any(others) and eqn.primitive.name != "div":
            raise _NoScaleError
        total = -sum(others)
        for group in groups:
            (power,) = _merge_exponents([[ins[i]] for i in group])
            if power is _ZERO:
                return _ZERO
            total += power
        return total

    def of_loss(self, x: JaxprEqn, y: JaxprEqn, ins: Sequence[Power]) -> list[Power]:
        """Return the exponents of the results and gradients of an equation `value_and_grad`.

        Such an equation contains a loss that is not differentiated yet (`dtrans.step.capture`).
        """
        if any(ins):
            raise _NoScaleError
        losses = [inline_calls(e.params["loss"], rules=True) for e in (x, y)]
        exponents = self.powers(losses, ins)
        return [*exponents, *[exponents[0]] * x.params["count"]]

    def of_rule(self, x: JaxprEqn, y: JaxprEqn, ins: Sequence[Power]) -> list[Power]:
        """Return the exponents of the outputs of two paired calls with a rule of `jax.custom_jvp`.

        The derivative rule is linear in the tangents. So the exponent of an output's tangent
        follows from those of the operands' tangents.
        """
        if any(ins):
            raise _NoScaleError
        calls = [inline_calls(_closed(bodies(eqn)[0])) for eqn in (x, y)]
        return self.powers(calls, ins)

    def of_bodies(self, x: JaxprEqn, y: JaxprEqn, ins: Sequence[Power]) -> list[Power]:
        """Return the exponents of the outputs of a loop, a branch or `jax.checkpoint`."""
        name = x.primitive.name
        here, there = _inlined_bodies(x), _inlined_bodies(y)
        if len(here) != len(there) or not _have_equal_params(x, y, params_besides_bodies):
            raise _NoScaleError
        pairs = list(zip(here, there, strict=True))
        if name in REMAT:
            return self.powers(pairs[0], ins)
        if name == COND:
            if ins[0]:
                raise _NoScaleError
            return _merge_exponents([self.powers(pair, ins[1:]) for pair in pairs])
        if name == SCAN:
            consts, carried = scan_counts(x)
            fixed, carry = ins[:consts], list(ins[consts : consts + carried])
            parts = ins[consts + carried :]
            for _ in range(len(carry) + 1):
                after = self.powers(pairs[0], [*fixed, *carry, *parts])
                joined = _merge_exponents([carry, after[:carried]])
                if joined == carry:
                    return [*carry, *after[carried:]]
                carry = joined
            raise _NoScaleError
        of_cond, of_body = while_counts(x)
        carry = list(ins[of_cond + of_body :])
        for _ in range(len(carry) + 1):
            after = self.powers(pairs[1], [*ins[of_cond : of_cond + of_body], *carry])
            joined = _merge_exponents([carry, after])
            if joined == carry:
                break
            carry = joined
        if any(self.powers(pairs[0], [*ins[:of_cond], *carry])):
            raise _NoScaleError
        return carry


def _merge_exponents(several: Sequence[Sequence[Power]]) -> list[Power]:
    """Return the common exponent of each value in several lists.

    Args:
      several: lists of exponents, such as one list for each branch of a condition.

    Raises:
      _NoScaleError: the lists have different exponents for a value.
    """
    found: list[Power] = []
    for powers in zip(*several, strict=True):
        known = {p for p in powers if p is not _ZERO}
        if len(known) > 1:
            raise _NoScaleError
        found.append(known.pop() if known else _ZERO)
    return found


def _producers(inner: Any) -> dict[Atom, tuple[JaxprEqn, int]]:
    """Return, for each variable, the equation that computes it and the index of the output."""
    producers: dict[Atom, tuple[JaxprEqn, int]] = {}
    for eqn in inner.eqns:
        producers |= {v: (eqn, i) for i, v in enumerate(eqn.outvars)}
    return producers


def _inlined_bodies(eqn: JaxprEqn) -> list[ClosedJaxpr]:
    """Return the bodies of an equation, with calls inlined; calls with custom rules stay."""
    return [inline_calls(_closed(body), rules=True) for body in bodies(eqn)]


def _closed(body: Any) -> ClosedJaxpr:
    inner = opened(body)
    return closed(inner.constvars, constants(body), inner.invars, inner.outvars, inner.eqns, inner)


def _have_equal_params(
    x: JaxprEqn, y: JaxprEqn, params: Callable[[JaxprEqn], Mapping[str, Any]]
) -> bool:
    """Return True if two equations of one primitive have the same parameters."""
    here, there = params(x), params(y)
    if here.keys() != there.keys():
        return False
    is_same = all(here[key] is there[key] for key in here)
    return is_same or canonical_text(dict(here)) == canonical_text(dict(there))
