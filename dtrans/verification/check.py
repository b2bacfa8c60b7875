"""Comparison of a job's step with the one-device step, at random points of a finite field.

A point is a value for each number of the state and of the batch. Points are near the states of a
one-device run after 0, 1, 2 and 5 steps. So comparisons and branches are decided as in training.
Both steps are evaluated at each point, and every output is compared number by number
(`state_placement`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from dtrans._jax import opened
from dtrans.ir.dataflow import avals
from dtrans.ir.program import Program
from dtrans.ir.selection import subset, values_at
from dtrans.verification import field_values as values
from dtrans.verification.evaluate import Evaluator
from dtrans.verification.field import Array
from dtrans.verification.field_values import Complex, NearTie, Real, Replicas, Unknown, same
from dtrans.verification.naming import find_causes
from dtrans.verification.outcome import Difference, Report
from dtrans.verification.random_points import (
    RANGES,
    BatchRange,
    random_arguments,
    random_arrays,
    random_point,
)
from dtrans.verification.rank_collectives import mapped
from dtrans.verification.rule_values import approx_of
from dtrans.verification.state_placement import (
    StatePlacement,
    TracedStep,
    find_placement,
    holds_leaf,
    place_leaves,
)


STEPS = (0, 1, 2, 5)  # compare at the states that one device has after these numbers of steps
TRIES = 5  # number of random points at which near ties are avoided
NEAR_TIES = "a near tie at every point that was tried"


# -- comparison ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Comparison of a job's traced step with the one-device step that the job must compute.

    Attributes:
      main: the one-device step on the full batch, which is taken as correct.
      traced: the step of the job.
      batch_types: type of each batch array, by name.
      frozen: arrays of the state that never change, and have the same number in all entries: name
        -> number. A plan may contain this number as a constant.
      startup: the program that returns the one-device state; None if the first state is not
        compared.
      batch_values: the user's batch arrays, by name. Integers and keys are used unchanged; for
        floats, random numbers near them are used. Arrays without a value here are random.
    """

    main: Program
    traced: TracedStep
    batch_types: Mapping[str, Any]
    frozen: Mapping[str, float] = dataclasses.field(default_factory=dict)
    startup: Program | None = None
    batch_values: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @cached_property
    def leaf_types(self) -> dict[str, Any]:
        """Types of the arrays of the one-device state, by name."""
        params, opt_state = self.main.args[:2]
        return subset(self.main.inputs, (*params.names, *opt_state.names))

    @cached_property
    def result_names(self) -> list[str]:
        """Names of the step's outputs that are not state."""
        return [n for n in self.main.out_names if n not in self.leaf_types]

    @cached_property
    def placement(self) -> StatePlacement:
        """Positions of the one-device state's numbers in the job's state.

        The job's state may be split over ranks, or padded.
        """
        return find_placement(self.leaf_types, self.traced.state_of, self.frozen)

    @cached_property
    def leaves_of(self) -> list[set[str]]:
        """Names of the one-device arrays that each array of the job's state contains.

        A job may pack several arrays into one, for example to shard them over ranks.
        """
        names = list(self.leaf_types)
        sizes = [math.prod(t.shape) for t in self.leaf_types.values()]
        starts = np.cumsum([0, *sizes])
        # `placement` omits random keys and frozen leaves, so their arrays are found by name.
        by_name = [n for n, t in self.leaf_types.items() if n in self.frozen or values.is_key(t)]
        found = []
        for name, where in zip(self.traced.state_names, self.placement.where, strict=True):
            leaves = np.searchsorted(starts, where[where >= 0], "right") - 1
            contained = set(values_at(names, np.flatnonzero(np.bincount(leaves))))
            contained.update(n for n in by_name if holds_leaf(name, n))
            found.append(contained)
        return found

    def check(
        self,
        title: str,
        start: Mapping[str, Any] | None = None,
        *,
        points: Sequence[int] = STEPS,
        seed: int = 0,
    ) -> Report:
        """Compare both steps at random points.

        Args:
          title: name of the plan.
          start: arrays of a one-device state, by name; by default the startup program's state.
          points: numbers of one-device steps after which states are compared.
          seed: seed of the points.

        Returns:
          A report. Its differences are errors of the plan, and not rounding errors.
        """
        report = self._check(title, start, points, seed)
        for traced in self.traced.other_steps:
            other = dataclasses.replace(self, traced=traced)
            report = report.merge(other._check(title, start, points, seed))
        return report

    def _check(
        self, title: str, start: Mapping[str, Any] | None, points: Sequence[int], seed: int
    ) -> Report:
        """Compare the job's step at random points, without the further traces of this step."""
        begun = time.monotonic()
        found = Findings(unevaluated=dict.fromkeys(self.traced.unevaluated))
        with np.errstate(all="ignore"):
            first_state = self._compare_first_state(found, np.random.default_rng(seed))
            if start is None and first_state:
                start = {n: approx_of(x) for n, x in first_state.items()}
            elif start is None:
                start = self._real_start(seed)
            found.concludes_equal_only = bool(self.traced.equal_parts)
            # A replay computes several steps, and only states between replays are compared.
            points = sorted({steps // self.traced.steps_per_replay for steps in points})
            drawn = self.batch_values.keys() != self.batch_types.keys()

            def walk(range_: BatchRange) -> None:
                self._walk(found, start, points, np.random.default_rng(seed), range_)

            found.try_ranges(walk, drawn=drawn, rows=self.traced.rows)
        return found.report(title, time.monotonic() - begun)

    def _real_start(self, seed: int) -> dict[str, Any]:
        """Return a one-device state with realistic numbers: the result of the startup program."""
        assert self.startup is not None, "a comparison without a startup program needs a start"
        arrays = self.startup.compiled(*random_arguments(self.startup.inputs, seed))
        return dict(zip(self.leaf_types, arrays, strict=True))

    def _compare_first_state(self, found: Findings, rng: np.random.Generator) -> dict[str, Any]:
        """Compare the first state that the job's init returns to the one-device state.

        The comparison includes padding.

        Returns:
          The one-device state; empty if an array of it depends on an equation without a rule.
        """
        startup, init = self.startup, self.traced.init
        if startup is None or init is None:
            return {}
        names = [f"init/{name}" for name in self.traced.state_names]
        for _ in range(TRIES):
            drawn = random_arrays(startup.inputs, rng, RANGES[-1])
            point = random_point(startup.inputs, drawn, frozenset(), rng)
            arguments = [*point.values()]
            try:
                wanted = found.evaluate(startup.jaxpr, arguments)
                outputs = found.evaluate(init, arguments)
                break
            except NearTie:
                continue
        else:
            found.unevaluated["a near tie in init at every point that was tried"] = None
            found.skipped |= dict.fromkeys(names)
            return {}
        leaves = dict(zip(self.leaf_types, wanted, strict=True))
        lost = _unknown_names(leaves)
        types = avals(opened(init).outvars)
        # Unknown leaves are not compared, but `place_leaves` needs a value for them.
        for n in lost:
            t = self.leaf_types[n]
            leaves[n] = values.lifted(np.zeros(t.shape), t.dtype)
        expected = place_leaves(self.placement, leaves, types, self.traced.state_names)
        for name, x, y, of_array in zip(names, outputs, expected, self.leaves_of, strict=True):
            found.note(name, x, Unknown("") if of_array & lost else y)
        found.name_causes(names, (startup.jaxpr, point), (init, arguments))
        return {} if lost else leaves

    def _walk(
        self,
        found: Findings,
        start: Mapping[str, Any],
        points: Sequence[int],
        rng: np.random.Generator,
        range_: BatchRange,
    ) -> None:
        """Train on one device, and compare the job's step after each number of steps in `points`.

        These states have realistic numbers, so both steps take the branches that occur in training.

        Args:
          found: receives the differences.
          start: arrays of the first one-device state, by name.
          points: the numbers of steps.
          rng: the random generator.
          range_: range of the random numbers of batches.
        """
        state = dict(start)
        batch = random_arrays(self.batch_types, rng, range_, self.batch_values)
        for steps in range(max(points) + 1):
            wanted = self._one_step(found, state, batch, rng, compared=steps in points)
            if wanted is None:
                return
            if found.differences or any(isinstance(wanted[n], Unknown) for n in self.leaf_types):
                return
            state = {n: approx_of(wanted[n]) for n in self.leaf_types}

    def _one_step(
        self,
        found: Findings,
        state: Mapping[str, Any],
        batch: Mapping[str, Any],
        rng: np.random.Generator,
        *,
        compared: bool,
    ) -> dict[str, Any] | None:
        """Run the one-device step at a random point near a state, and compare the job's step there.

        At a near tie, two values differ only by rounding, and a maximum or a branch must choose one
        of them. The finite field has no order, so the method tries another point. Some steps have
        near ties at every point: the first updates of Adafactor all have the norm at which
        Adafactor clips. So after `TRIES` points, field elements decide the ties. Then equal outputs
        count as compared, but different outputs do not: different choices may be the reason.

        Args:
          found: receives the differences.
          state: arrays of the one-device state, by name.
          batch: arrays of the batch, by name.
          rng: the random generator.
          compared: False to run only the one-device step.

        Returns:
          The outputs by name; None if none of the points could be evaluated.
        """
        for _ in range(TRIES):
            with contextlib.suppress(NearTie):
                return self._at_a_point(found, state, batch, rng, compared=compared)
        tried = dataclasses.replace(found, differences={}, compared=dict(found.compared))
        wanted = None
        with contextlib.suppress(NearTie), values.ties_by_elements():
            wanted = self._at_a_point(tried, state, batch, rng, compared=compared)
        if wanted is None or tried.differences:
            found.unevaluated[NEAR_TIES] = None
        else:
            found.compared, found.points = tried.compared, tried.points
            found.not_finite = tried.not_finite
        return wanted

    def _at_a_point(
        self,
        found: Findings,
        state: Mapping[str, Any],
        batch: Mapping[str, Any],
        rng: np.random.Generator,
        *,
        compared: bool,
    ) -> dict[str, Any]:
        """Return the one-device outputs at a random point near a state.

        Args:
          found: receives the differences.
          state: arrays of the one-device state, by name.
          batch: arrays of the batch, by name.
          rng: the random generator.
          compared: True to compare the job's outputs with the one-device outputs.
        """
        point = random_point(self.leaf_types, state, frozenset(self.frozen), rng)
        point |= random_point(self.batch_types, batch, frozenset(), rng)
        for name, (axis, count) in self.traced.equal_parts.items():
            repeated = functools.partial(_repeated_part, axis=axis, count=count)
            point[name] = mapped(repeated, point[name])
        outputs = found.evaluate(self.main.jaxpr, values_at(point, self.main.inputs))
        wanted = dict(zip(self.main.out_names, outputs, strict=True))
        if compared:
            self._compare(found, point, wanted)
        return wanted

    def _compare(
        self, found: Findings, point: Mapping[str, Any], wanted: Mapping[str, Any]
    ) -> None:
        """Compare the job's outputs with the one-device outputs at a point."""
        state_names, count = self.traced.state_names, len(self.traced.state_names)
        types = avals(opened(self.traced.jaxpr).invars[:count])
        old = subset(point, self.leaf_types)
        arguments = place_leaves(self.placement, old, types, state_names)
        arguments += values_at(point, self.batch_types)
        outputs = found.evaluate(self.traced.jaxpr, arguments)
        found.points += 1

        # Unknown leaves of the new state are not compared, but `place_leaves` needs a value for
        # them, so they get the old value.
        new = subset(wanted, self.leaf_types)
        lost = _unknown_names(new)
        new |= subset(old, lost)
        expected = place_leaves(self.placement, new, types, state_names)
        places, leaves_of = self.placement.where, self.leaves_of
        arrays = zip(state_names, outputs, expected, places, leaves_of, strict=False)
        for name, x, y, where, leaves in arrays:
            y = Unknown("") if leaves & lost else y
            found.note(name, x, y, None if leaves & self.frozen.keys() else where >= 0)
        for name, t in self.leaf_types.items():
            if t.size and not any(name in leaves for leaves in leaves_of):
                found.skipped[name] = None

        for name, x in zip(self.result_names, outputs[count:], strict=True):
            found.note(name, x, wanted[name])
        inputs = subset(point, self.main.inputs)
        names = [*state_names, *self.result_names]
        found.name_causes(names, (self.main.jaxpr, inputs), (self.traced.jaxpr, arguments))


@dataclasses.dataclass
class Findings:
    """Results of a comparison so far; `report` converts them to a `Report` for the user.

    Attributes:
      differences: difference of each output that differs, by name.
      compared, skipped, unevaluated, points: as in `Report`; the dicts are ordered sets.
      not_finite: True if a compared value has an infinity or NaN.
      concludes_equal_only: True if the comparison can prove that outputs are equal, but not that
        they differ. Then an output that differs is recorded as skipped.
    """

    differences: dict[str, Difference] = dataclasses.field(default_factory=dict)
    compared: dict[str, None] = dataclasses.field(default_factory=dict)
    skipped: dict[str, None] = dataclasses.field(default_factory=dict)
    unevaluated: dict[str, None] = dataclasses.field(default_factory=dict)
    points: int = 0
    not_finite: bool = False
    concludes_equal_only: bool = False

    def evaluate(self, jaxpr: Any, arguments: Sequence[Any]) -> list[Any]:
        """Return the outputs of a program on global arrays; record equations that have no rule.

        Raises:
          NearTie: two values that the program compares differ only by rounding, at this point.
        """
        outputs = Evaluator(unknown=self.unevaluated).run(jaxpr, [(x,) for x in arguments])
        return [x for (x,) in outputs]

    def note(self, name: str, x: Any, y: Any, there: Array | None = None) -> None:
        """Compare one output of the job with the expected value.

        Args:
          name: name of the output.
          x: value of the output.
          y: the expected value.
          there: mask of the numbers to compare; None for all numbers.
        """
        if isinstance(x, Replicas):
            size = 1 if isinstance(y, Unknown) else math.prod(np.shape(approx_of(y)))
            self._differs(Difference(name, (size, size), "the copies on the ranks differ"))
            return
        if isinstance(x, Unknown) or isinstance(y, Unknown):
            self.skipped[name] = None
            return
        self.compared[name] = None
        if isinstance(y, (Real, Complex)):
            self.not_finite |= not np.isfinite(y.approx).all()
        if not same(_masked(x, there), _masked(y, there)):
            self._differs(Difference(name, _count(x, y, there)))

    def _differs(self, difference: Difference) -> None:
        if self.concludes_equal_only:
            self.skipped[difference.output] = None
        else:
            self.differences.setdefault(difference.output, difference)

    def try_ranges(
        self, compare: Callable[[BatchRange], None], *, drawn: bool, rows: int = 0
    ) -> None:
        """Compare with narrower and narrower ranges of random numbers, until all values are finite.

        Infinities and NaN compare as equal, and so hide differences.

        Args:
          compare: function that compares both steps with random batches in a given range of
            numbers, and records the result.
          drawn: True if some batch arrays are random. If False, one range is enough.
          rows: number of rows of the smallest embedding table, because batches may contain row ids;
            0 without embedding tables.
        """
        ranges = [*RANGES]
        if rows:
            ranges.insert(0, BatchRange(False, rows))
        for range_ in ranges if drawn else ranges[:1]:
            self.not_finite = False
            compare(range_)
            if not self.not_finite:
                return
        self.unevaluated["infinities and NaN, which all compare equal"] = None

    def name_causes(
        self,
        names: Sequence[str],
        step: tuple[Any, Mapping[str, Any]],
        job: tuple[Any, Sequence[Any]],
    ) -> None:
        """Find the first wrong equation behind each difference, and record it in the difference.

        Args:
          names: names of the job's outputs; the empty string for an output to ignore.
          step, job: as in `find_causes`.
        """
        differing = [k for k, name in enumerate(names) if name in self.differences]
        if not differing:
            return
        for k, cause in find_causes(step, job, differing).items():
            difference = self.differences[names[k]]
            self.differences[names[k]] = dataclasses.replace(difference, cause=cause)

    def report(self, title: str, seconds: float) -> Report:
        """Return the results as a report for the user."""
        compared = tuple(n for n in self.compared if n not in self.skipped)
        return Report(
            title,
            tuple(self.differences.values()),
            compared,
            tuple(self.unevaluated),
            tuple(self.skipped),
            self.points,
            seconds,
        )


def _unknown_names(leaves: Mapping[str, Any]) -> set[str]:
    return {n for n, x in leaves.items() if isinstance(x, Unknown)}


def _repeated_part(x: Array, *, axis: int, count: int) -> Array:
    """Return a batch array that repeats the first of its `count` parts along an axis.

    So a job that takes the mean over one part is not reported as wrong.
    """
    return np.concatenate([np.split(x, count, axis)[0]] * count, axis)


def _masked(x: Any, there: Array | None) -> Any:
    if there is None or values.is_key(x):
        return x
    return mapped(lambda a: np.where(there, a, np.zeros((), a.dtype)), x)


def _count(x: Any, y: Any, there: Array | None) -> tuple[int, int]:
    """Return two numbers for the report: entries that differ, and entries that were compared.

    Args:
      x: value of an output of the job.
      y: the expected value.
      there: mask of the entries to compare; None for all entries.
    """
    size = math.prod(y.shape if values.is_key(y) else np.shape(approx_of(y)))
    if isinstance(x, Complex) and isinstance(y, Complex) and x.shape == y.shape:
        return max(_count(x.real, y.real, there), _count(x.imag, y.imag, there))
    if not isinstance(x, Real) or not isinstance(y, Real) or x.shape != y.shape:
        return size, size
    differs = x.elements != y.elements
    if there is None:
        return int(differs.sum()), size
    return int((differs & there).sum()), int(there.sum())
