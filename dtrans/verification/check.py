"""Compare the traced step of a job with the one-device step, at random points of the field.

Points are states that occur: those after 0, 1, 2 and 5 steps of one device, floats perturbed. Both
steps are evaluated there, and every output is compared, number by number (`state_placement`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import opened
from dtrans.ir.program import Program
from dtrans.verification import field, field_values as values
from dtrans.verification.evaluate import World
from dtrans.verification.field import Array
from dtrans.verification.field_values import Complex, NearTie, Real, Replicas, Unknown, same
from dtrans.verification.naming import find_causes
from dtrans.verification.outcome import Difference, Report
from dtrans.verification.rank_collectives import mapped
from dtrans.verification.rules import shadow_of
from dtrans.verification.state_placement import (
    StatePlacement,
    TracedStep,
    find_placement,
    holds_leaf,
    place_leaves,
)


STEPS = (0, 1, 2, 5)  # of one device, before the states that are compared
TRIES = 5  # points that are drawn again after a near tie
NEAR_TIES = "a near tie at every point that was tried"


# -- points ----------------------------------------------------------------------------------------


def random_point(
    types: Mapping[str, Any],
    real_values: Mapping[str, Any],
    fixed: frozenset[str],
    rng: np.random.Generator,
) -> dict[str, Any]:
    """Return a value for each input: floats are random elements whose shadows are near the real
    values.

    Args:
      types: name to type.
      real_values: arrays of a real run.
      fixed: names of leaves that keep their values, since a plan may know them.
    """
    point: dict[str, Any] = {}
    for name, t in types.items():
        x = real_values[name]
        moves = values.is_float(t.dtype) or values.is_complex(t.dtype)
        if not moves or name in fixed:
            point[name] = values.lifted(x, t.dtype)
            continue
        if values.is_complex(t.dtype):
            part = jax.ShapeDtypeStruct(t.shape, np.dtype(np.float64))
            both = {"real": np.real(x), "imag": np.imag(x)}
            point[name] = Complex(**random_point(dict.fromkeys(both, part), both, frozenset(), rng))
            continue
        noise = rng.uniform(0.5, 1, t.shape)
        near = np.asarray(x, np.float64)
        # towards zero: a decay that the state keeps, 0.999, must stay below one
        shadow = np.where(near == 0, 1e-3 * noise, near * (1 - 1e-3 * noise))
        point[name] = Real(field.random_elements(rng, t.shape), shadow)
    return point


@dataclasses.dataclass(frozen=True)
class BatchRange:
    """Range of the numbers that are drawn for a batch.

    Attributes:
      positive: True if floats are positive, as logarithms and roots need them.
      labels: integers are drawn from 0 up to this number, which is left out.
    """

    positive: bool
    labels: int


# Labels above the number of classes select NaN; two is the smallest number of classes.
RANGES = (BatchRange(False, 4), BatchRange(False, 2), BatchRange(True, 2))


def random_arrays(
    types: Mapping[str, Any],
    rng: np.random.Generator,
    range_: BatchRange,
    given: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Draw an array for each type that no array is given for."""
    batch: dict[str, Any] = {}
    for name, t in types.items():
        if given is not None and name in given:
            batch[name] = given[name] if values.is_key(given[name]) else np.asarray(given[name])
        elif values.is_float(t.dtype):
            drawn = rng.uniform(0.2, 1, t.shape) if range_.positive else rng.normal(size=t.shape)
            batch[name] = np.asarray(drawn)
        elif values.is_complex(t.dtype):
            batch[name] = rng.normal(size=t.shape) + 1j * rng.normal(size=t.shape)
        elif jnp.issubdtype(t.dtype, jax.dtypes.prng_key):
            keys = jax.random.key(int(rng.integers(1 << 30)))
            batch[name] = jax.random.split(keys, t.shape) if t.shape else keys
        elif t.dtype == bool:
            batch[name] = rng.integers(0, 2, t.shape).astype(bool)
        else:
            batch[name] = rng.integers(0, range_.labels, t.shape).astype(t.dtype)
    return batch


# -- comparison ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A step of one device, and the traced step of a job that must compute it.

    Attributes:
      main: the step, for the whole batch.
      traced: the step of the job.
      batch_types: name to type of the arrays of the batch.
      still: leaves that have one value for ever, and that value: a plan may use it.
      startup: the program that makes the one-device state; None where the first state is not
        compared.
      batch_values: arrays of the batch that are given: integers and keys are used unchanged, and
        floats vary around them. The remaining ones are drawn.
    """

    main: Program
    traced: TracedStep
    batch_types: Mapping[str, Any]
    still: Mapping[str, float] = dataclasses.field(default_factory=dict)
    startup: Program | None = None
    batch_values: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @cached_property
    def leaf_types(self) -> dict[str, Any]:
        """Name to type of the leaves of the one-device state."""
        names = [n for spec in self.main.args[:2] for n in spec.names]
        return {n: self.main.inputs[n] for n in names}

    @cached_property
    def result_names(self) -> list[str]:
        """The outputs of the step beside its state."""
        return [n for n in self.main.out_names if n not in self.leaf_types]

    @cached_property
    def placement(self) -> StatePlacement:
        """The place of each number in the job's state."""
        return find_placement(self.leaf_types, self.traced.state_of, self.still)

    @cached_property
    def leaves_of(self) -> list[set[str]]:
        """The leaves whose numbers each array of the job's state holds."""
        names = list(self.leaf_types)
        starts = np.cumsum([0, *(int(np.prod(t.shape)) for t in self.leaf_types.values())])
        found = []
        for name, where in zip(self.traced.held, self.placement.where, strict=True):
            leaves = np.searchsorted(starts, where[where >= 0], "right") - 1
            of = {names[k] for k in np.flatnonzero(np.bincount(leaves))}
            # random keys, and leaves that have one value, cannot count themselves
            uncounted = [
                n for n, t in self.leaf_types.items() if n in self.still or values.is_key(t)
            ]
            found.append(of | {n for n in uncounted if holds_leaf(name, n)})
        return found

    def check(
        self,
        title: str,
        start: Mapping[str, Any] | None = None,
        *,
        points: Sequence[int] = STEPS,
        seed: int = 0,
    ) -> Report:
        """Compare both at random points.

        Args:
          title: names the plan.
          start: a one-device state, name to array; by default what the startup program makes.
          points: after how many steps of one device states are compared.
          seed: of the points.

        Returns:
          A report. Rounding is the cause of none of its differences.
        """
        report = self._check(title, start, points, seed)
        for traced in self.traced.also:
            report = report.joined(
                dataclasses.replace(self, traced=traced)._check(title, start, points, seed)
            )
        return report

    def _check(
        self, title: str, start: Mapping[str, Any] | None, points: Sequence[int], seed: int
    ) -> Report:
        """Compare one of the steps of a job at random points."""
        begun = time.monotonic()
        found = Findings(unfollowed=dict.fromkeys(self.traced.unfollowed))
        with np.errstate(all="ignore"):
            made = self._compare_first_state(found, np.random.default_rng(seed))
            if start is None:
                start = {n: shadow_of(x) for n, x in made.items()} or self._real_start(seed)
            found.concludes_equal_only = bool(self.traced.equal_parts)
            # what states come to in between, a replay goes through
            points = sorted({steps // self.traced.turns for steps in points})
            drawn = self.batch_values.keys() != self.batch_types.keys()
            walk = lambda range_: self._walk(
                found, start, points, np.random.default_rng(seed), range_
            )
            found.try_ranges(walk, drawn=drawn, rows=self.traced.rows)
        return found.report(title, time.monotonic() - begun)

    def _real_start(self, seed: int) -> dict[str, Any]:
        """Return a one-device state as a device makes it."""
        assert self.startup is not None, "a comparison without a startup program is given a start"
        made = self.startup.compiled(*random_arguments(self.startup.inputs, seed))
        return dict(zip(self.leaf_types, made, strict=True))

    def _compare_first_state(self, found: Findings, rng: np.random.Generator) -> dict[str, Any]:
        """Compare what the job's init makes with what the one-device init makes, padding included.

        Returns:
          The one-device state; none where a part of it could not be followed.
        """
        startup, init = self.startup, self.traced.init
        if startup is None or init is None:
            return {}
        names = [f"init/{name}" for name in self.traced.held]
        for _ in range(TRIES):
            drawn = random_arrays(startup.inputs, rng, RANGES[-1])
            given = [(x,) for x in random_point(startup.inputs, drawn, frozenset(), rng).values()]
            try:
                world = World(unknown=found.unfollowed)
                wanted = [x for (x,) in world.run(startup.jaxpr, given)]
                made = [x for (x,) in World(unknown=found.unfollowed).run(init, given)]
                break
            except NearTie:
                continue
        else:
            found.unfollowed["a near tie in init at every point that was tried"] = None
            found.skipped |= dict.fromkeys(names)
            return {}
        leaves = dict(zip(self.leaf_types, wanted, strict=True))
        lost = {n for n, x in leaves.items() if isinstance(x, Unknown)}
        types = [v.aval for v in opened(init).outvars]
        # what could not be followed is not compared: zeros stand for it
        zeros = {
            n: values.lifted(np.zeros(self.leaf_types[n].shape), self.leaf_types[n].dtype)
            for n in lost
        }
        expected = place_leaves(self.placement, leaves | zeros, types, self.traced.held)
        for name, x, y, of in zip(names, made, expected, self.leaves_of, strict=True):
            found.note(name, x, Unknown("") if of & lost else y)
        drawn = {n: x for n, (x,) in zip(startup.inputs, given, strict=True)}
        found.name_causes(names, (startup.jaxpr, drawn), (init, [x for (x,) in given]))
        return {} if lost else leaves

    def _walk(
        self,
        found: Findings,
        start: Mapping[str, Any],
        points: Sequence[int],
        rng: np.random.Generator,
        range_: BatchRange,
    ) -> None:
        """Compare the states that one device comes to, one step behind the other."""
        state = dict(start)
        batch = random_arrays(self.batch_types, rng, range_, self.batch_values)
        for made in range(max(points) + 1):
            wanted = self._one_step(found, state, batch, rng, compared=made in points)
            if wanted is None:
                return
            if found.differences or any(isinstance(wanted[n], Unknown) for n in self.leaf_types):
                return
            state = {n: shadow_of(wanted[n]) for n in self.leaf_types}

    def _one_step(
        self,
        found: Findings,
        state: Mapping[str, Any],
        batch: Mapping[str, Any],
        rng: np.random.Generator,
        *,
        compared: bool,
    ) -> dict[str, Any] | None:
        """Return what one device makes of a state, or None where that cannot be followed.

        Where each point has a near tie, elements decide. Then two equal programs decide alike, but
        others may differ in decisions alone: nothing is said of them. Later states may have no tie,
        as those of Adafactor, whose first updates all have the norm at which it clips.
        """
        for _ in range(TRIES):
            with contextlib.suppress(NearTie):
                return self._at_a_point(found, state, batch, rng, compared=compared)
        tried = dataclasses.replace(found, differences={}, compared=dict(found.compared))
        wanted = None
        with contextlib.suppress(NearTie), values.ties_by_elements():
            wanted = self._at_a_point(tried, state, batch, rng, compared=compared)
        if wanted is None or tried.differences:
            found.unfollowed[NEAR_TIES] = None
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
        """Return what one device makes at a point near a state; the job's step is compared with
        that."""
        point = random_point(self.leaf_types, state, frozenset(self.still), rng)
        point |= random_point(self.batch_types, batch, frozenset(), rng)
        for name, (axis, count) in self.traced.equal_parts.items():
            repeated = functools.partial(_repeated_part, axis=axis, count=count)
            point[name] = mapped(repeated, point[name])
        wanted = self._one_device(found, point)
        if compared:
            self._compare(found, point, wanted)
        return wanted

    def _one_device(self, found: Findings, point: Mapping[str, Any]) -> dict[str, Any]:
        """Return what one device makes at a point."""
        world = World(unknown=found.unfollowed)
        outs = world.run(self.main.jaxpr, [(point[n],) for n in self.main.inputs])
        return dict(zip(self.main.out_names, (x for (x,) in outs), strict=True))

    def _compare(
        self, found: Findings, point: Mapping[str, Any], wanted: Mapping[str, Any]
    ) -> None:
        """Compare the job's step with what one device makes at a point."""
        held, count = self.traced.held, len(self.traced.held)
        types = [v.aval for v in opened(self.traced.jaxpr).invars[:count]]
        arrays = place_leaves(self.placement, {n: point[n] for n in self.leaf_types}, types, held)
        batch = [point[n] for n in self.batch_types]
        world = World(unknown=found.unfollowed)
        made = [x for (x,) in world.run(self.traced.jaxpr, [(x,) for x in (*arrays, *batch)])]
        found.points += 1

        new = {n: wanted[n] for n in self.leaf_types}
        lost = {n for n, x in new.items() if isinstance(x, Unknown)}
        known = {n: point[n] if n in lost else x for n, x in new.items()}
        expected = place_leaves(self.placement, known, types, held)
        placed = zip(held, made, expected, self.placement.where, self.leaves_of, strict=False)
        for name, x, y, where, leaves in placed:
            y = Unknown("") if leaves & lost else y
            found.note(name, x, y, None if leaves & self.still.keys() else where >= 0)
        for name, t in self.leaf_types.items():
            if t.size and not any(name in leaves for leaves in self.leaves_of):
                found.skipped[name] = None
        for name, x in zip(self.result_names, made[count:], strict=True):
            found.note(name, x, wanted[name])
        inputs = {n: point[n] for n in self.main.inputs}
        names = [*held, *self.result_names]
        found.name_causes(names, (self.main.jaxpr, inputs), (self.traced.jaxpr, (*arrays, *batch)))


@dataclasses.dataclass
class Findings:
    """Outcome of the points that were compared until now.

    Attributes:
      concludes_equal_only: outputs that differ count as not compared.
    """

    differences: dict[str, Difference] = dataclasses.field(default_factory=dict)
    compared: dict[str, None] = dataclasses.field(default_factory=dict)
    skipped: dict[str, None] = dataclasses.field(default_factory=dict)
    unfollowed: dict[str, None] = dataclasses.field(default_factory=dict)
    points: int = 0
    not_finite: bool = False
    concludes_equal_only: bool = False

    def note(self, name: str, x: Any, y: Any, there: Array | None = None) -> None:
        """Compare one output of the job with what it must be.

        Args:
          there: where a number of a leaf is; everywhere by default.
        """
        if isinstance(x, Replicas):
            size = int(np.prod(np.shape(shadow_of(y)))) if not isinstance(y, Unknown) else 1
            self._differs(Difference(name, (size, size), "ranks hold copies that differ"))
            return
        if isinstance(x, Unknown) or isinstance(y, Unknown):
            self.skipped[name] = None
            return
        self.compared[name] = None
        if isinstance(y, (Real, Complex)):
            self.not_finite |= not np.isfinite(y.shadow).all()
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
        """Compare with numbers of one range after the other, until all values are finite.

        Infinities hide differences: a narrower range says more.

        Args:
          compare: compares with arrays of a range, and notes what it finds here.
          drawn: some arrays are drawn. Otherwise each range gives the same ones.
          rows: the least number of rows of tables, which integers may name; 0 where there are none.
        """
        ranges = (BatchRange(False, rows), *RANGES) if rows else RANGES
        for range_ in ranges if drawn else ranges[:1]:
            self.not_finite = False
            compare(range_)
            if not self.not_finite:
                return
        self.unfollowed["infinities and NaN, which are equal wherever they stand"] = None

    def name_causes(
        self,
        names: Sequence[str],
        step: tuple[Any, Mapping[str, Any]],
        job: tuple[Any, Sequence[Any]],
    ) -> None:
        """Give each difference among some outputs its cause.

        Args:
          names: of the job's outputs.
          step, job: see `find_causes`.
        """
        differing = [k for k, name in enumerate(names) if name in self.differences]
        causes = find_causes(step, job, differing) if differing else {}
        for k, cause in causes.items():
            self.differences[names[k]] = dataclasses.replace(
                self.differences[names[k]], cause=cause
            )

    def report(self, title: str, seconds: float) -> Report:
        """Return the report."""
        compared = tuple(n for n in self.compared if n not in self.skipped)
        return Report(
            title,
            tuple(self.differences.values()),
            compared,
            tuple(self.unfollowed),
            tuple(self.skipped),
            self.points,
            seconds,
        )


def _repeated_part(x: Array, *, axis: int, count: int) -> Array:
    """Return an array whose parts along an axis are copies of the first."""
    return np.concatenate([np.split(x, count, axis)[0]] * count, axis)


def _masked(x: Any, there: Array | None) -> Any:
    if there is None or values.is_key(x):
        return x
    return mapped(lambda a: np.where(there, a, np.zeros((), a.dtype)), x)


def _count(x: Any, y: Any, there: Array | None) -> tuple[int, int]:
    """Return how many entries differ, and how many are compared."""
    size = int(np.prod(np.shape(shadow_of(y)) if not values.is_key(y) else y.shape))
    if isinstance(x, Complex) and isinstance(y, Complex) and x.shape == y.shape:
        return max(_count(x.real, y.real, there), _count(x.imag, y.imag, there))
    if not isinstance(x, Real) or not isinstance(y, Real) or x.shape != y.shape:
        return size, size
    differs = x.elements != y.elements
    if there is None:
        return int(differs.sum()), size
    return int((differs & there).sum()), int(there.sum())


def random_arguments(types: Mapping[str, Any], seed: int) -> list[Any]:
    """Draw arguments of an init function."""
    drawn = random_arrays(types, np.random.default_rng(seed), BatchRange(True, 4))
    return [
        x if values.is_key(x) else jnp.asarray(x, t.dtype)
        for x, t in zip(drawn.values(), types.values(), strict=True)
    ]
