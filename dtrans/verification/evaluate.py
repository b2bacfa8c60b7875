"""Evaluate a jaxpr over the field, for all ranks of a mesh in lock step.

The value of a variable is a tuple with one value for each rank. Ranks that hold the same object are
computed once: a program of one device has one rank, and a `shard_map` in it opens a world of more.

Read first: `field_values`. The rules are in `rules` and `rank_collectives`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dtrans._jax import (
    CALLBACKS,
    COND,
    LOOPS,
    SCAN,
    JaxprEqn,
    Literal,
    axes_of,
    bodies,
    combiner_of,
    constants,
    is_identity,
    is_reversed,
    line_of,
    linear_solve,
    opened,
    scan_length,
    shard_map_of,
    wiring,
)
from dtrans.verification import field_values as values
from dtrans.verification.complex_rules import COMPLEX, is_of_complex
from dtrans.verification.exact_rules import EXACT_SUMS
from dtrans.verification.field_values import Complex, Real, Replicas, UnfollowedError, Unknown, same
from dtrans.verification.matrix_rules import MATRICES
from dtrans.verification.rank_collectives import GROUPS, groups_of, joined, mapped
from dtrans.verification.rules import REAL, move_rows, plain
from dtrans.verification.value_log import ValueLog


Ranked = tuple[Any, ...]  # the value of each rank
MOST_EQUATIONS = 200_000  # of loops, before a program counts as too long to be followed


class World:
    """Ranks on the axes of a mesh, and the evaluation of equations for all of them.

    Args:
      axes: the size of each axis by name; none for a program of one device.
      unknown: gets the reason for each equation that cannot be followed.
      log: gets each equation with its operands and outputs.
    """

    def __init__(
        self,
        axes: Mapping[str, int] | None = None,
        unknown: dict[str, None] | None = None,
        log: ValueLog | None = None,
    ) -> None:
        self.axes = dict(axes or {})
        self.log = log
        self.count = math.prod(self.axes.values())
        self.unknown: dict[str, None] = {} if unknown is None else unknown
        self._made = 0
        # by identity, with the literal that keeps it
        self._literals: dict[int, tuple[Literal, Ranked]] = {}

    def run(
        self, jaxpr: Any, args: Sequence[Ranked], consts: Sequence[Any] | None = None
    ) -> list[Ranked]:
        """Return the outputs of a jaxpr.

        Raises:
          NearTie: a decision that is a matter of rounding at this point.
        """
        inner = opened(jaxpr)
        given = constants(jaxpr) if consts is None else consts
        env: dict[Any, Ranked] = {}
        for v, c in zip(inner.constvars, given, strict=True):
            env[v] = self.everywhere(values.lifted(c, v.aval.dtype))
        env |= zip(inner.invars, args, strict=True)

        def read(atom: Any) -> Ranked:
            return self._literal(atom) if isinstance(atom, Literal) else env[atom]

        for eqn in inner.eqns:
            operands = [read(a) for a in eqn.invars]
            made = self._equation(eqn, operands)
            env.update(zip(eqn.outvars, made, strict=True))
        return [read(a) for a in inner.outvars]

    def _literal(self, atom: Literal) -> Ranked:
        """Return the value of a literal, which loops read at each turn."""
        if id(atom) not in self._literals:
            value = self.everywhere(values.lifted(atom.val, atom.aval.dtype))
            self._literals[id(atom)] = atom, value
        return self._literals[id(atom)][1]

    def everywhere(self, x: Any) -> Ranked:
        """Return a value that all ranks have."""
        return (x,) * self.count

    @property
    def evaluated(self) -> int:
        """The number of equations that were evaluated until now."""
        return self._made

    # -- equations -------------------------------------------------------------------------------

    def _equation(self, eqn: JaxprEqn, operands: list[Ranked]) -> list[Ranked]:
        self._made += 1
        name = eqn.primitive.name
        if self._made > MOST_EQUATIONS:
            return self._unknown(eqn, f"more than {MOST_EQUATIONS:,} equations are evaluated")
        try:
            if name == "shard_map":
                return self._shard_map(eqn, operands)
            if name == SCAN:
                return self._scan(eqn, operands)
            if name in LOOPS:
                return self._while(eqn, operands)
            if name == COND:
                return self._cond(eqn, operands)
            if name in GROUPS and self._over(eqn):
                return self._noted(eqn, operands, self._collective(eqn, operands))
            if name == "axis_index":
                return self._axis_index(eqn)
            if name in CALLBACKS or name == "pure_callback":
                return self._unknown(eqn, f"{name} calls a function of the host")
            if name == "reduce" and any(isinstance(v, Real) for x in operands for v in x):
                return self._reduce(eqn, operands)
            if name == "custom_linear_solve":
                return self.run(*linear_solve(eqn, operands))
            if name == "init_on_use":  # all rows are made
                rows = np.arange(eqn.outvars[0].aval.shape[0], dtype=np.int32)
                return self.run(eqn.params["write"](len(rows)), [self.everywhere(rows), *operands])
            if name in CALLS:
                return self.run(*_opened_call(eqn, operands))
            return self._noted(eqn, operands, self.each(eqn, operands))
        except UnfollowedError as e:
            return self._unknown(eqn, f"{name}: {e}")

    def _noted(self, eqn: JaxprEqn, operands: Sequence[Ranked], made: list[Ranked]) -> list[Ranked]:
        """Return outputs of an equation, or values that it moved, which the log notes."""
        if self.log is not None:
            self.log.note(eqn, operands, made, self.axes)
        return made

    def each(self, eqn: JaxprEqn, operands: list[Ranked]) -> list[Ranked]:
        """Evaluate an equation that does not communicate, once for ranks that have the same
        operands."""
        made: dict[tuple[int, ...], list[Any]] = {}
        keys = [tuple(id(x[r]) for x in operands) for r in range(self.count)]
        for r, key in enumerate(keys):
            if key not in made:
                made[key] = self._one(eqn, [x[r] for x in operands])
        return [tuple(made[key][i] for key in keys) for i in range(len(eqn.outvars))]

    def _one(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        for x in operands:
            if isinstance(x, Unknown):
                return [x] * len(eqn.outvars)
        if is_identity(eqn):
            return operands[:1]
        if getattr(eqn.primitive, "communicates", False):
            raise UnfollowedError("nothing carries it out here")
        if eqn.primitive.name in NOT_REPEATABLE:
            raise UnfollowedError("it gives other numbers each time")
        if eqn.primitive.name == "move_rows":
            return move_rows(eqn, operands)
        if eqn.primitive.name in EXACT_SUMS:
            return EXACT_SUMS[eqn.primitive.name](eqn, operands)
        of_complex = is_of_complex(eqn, operands)
        if of_complex and eqn.primitive.name in COMPLEX:
            return COMPLEX[eqn.primitive.name](eqn, operands)
        if not any(isinstance(x, (Real, Complex)) for x in operands):
            return self._plain(eqn, operands)
        if eqn.primitive.name in MATRICES:
            return MATRICES[eqn.primitive.name](eqn, operands)
        if of_complex:
            raise UnfollowedError("no rule follows complex numbers through it")
        rule = REAL.get(eqn.primitive.name)
        if rule is None:
            raise UnfollowedError("no rule follows floats through it")
        return rule(eqn, operands)

    def _plain(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        if eqn.primitive.name in TO_FLOATS and values.is_float(eqn.outvars[0].aval.dtype):
            return REAL[eqn.primitive.name](eqn, operands)
        return plain(eqn, operands)

    def _unknown(self, eqn: JaxprEqn, why: str) -> list[Ranked]:
        line = line_of(eqn)
        why = f"{why} ({line})" if line else why
        self.unknown[why] = None
        return [self.everywhere(Unknown(why)) for _ in eqn.outvars]

    # -- collectives -----------------------------------------------------------------------------

    def _over(self, eqn: JaxprEqn) -> list[str]:
        """Return the axes of the mesh that a collective joins; of a reduction within arrays there
        are none."""
        return [a for a in axes_of(eqn) if isinstance(a, str)]

    def _collective(self, eqn: JaxprEqn, operands: list[Ranked]) -> list[Ranked]:
        within = [a for a in axes_of(eqn) if not isinstance(a, str)]
        if within:
            raise UnfollowedError("axes of the mesh and of the array at once")
        rule, groups = GROUPS[eqn.primitive.name], groups_of(self.axes, self._over(eqn))
        if (parts := eqn.params.get("axis_index_groups")) is not None:
            groups = [[ranks[k] for k in part] for ranks in groups for part in parts]
        found = []
        for x in operands:
            made: list[Any] = [None] * self.count
            for ranks in groups:
                parts = [x[r] for r in ranks]
                bad = [p for p in parts if isinstance(p, Unknown)]
                outs = [bad[0]] * len(parts) if bad else rule(parts, eqn.params)
                for r, out in zip(ranks, outs, strict=True):
                    made[r] = out
            found.append(tuple(made))
        return found

    def _axis_index(self, eqn: JaxprEqn) -> list[Ranked]:
        made: list[Any] = [None] * self.count
        for ranks in groups_of(self.axes, self._over(eqn)):
            for k, r in enumerate(ranks):
                made[r] = np.asarray(k, np.int32)
        return [tuple(made)]

    # -- shard_map -------------------------------------------------------------------------------

    def _shard_map(self, eqn: JaxprEqn, operands: list[Ranked]) -> list[Ranked]:
        if self.count != 1:
            raise UnfollowedError("a shard_map within another")
        found = shard_map_of(eqn)
        # over other axes XLA shards what has one meaning for all of their ranks
        world = self.inner(
            {name: size for name, size in found.axes.items() if name in found.manual}
        )
        world._made = self._made
        given = []
        for x, spec in zip(operands, found.in_specs, strict=True):
            given += world._noted(eqn, [x], [world.cut(x[0], spec)])
        made = world.run(found.body, given)
        self._made = world._made
        whole = []
        for pieces, spec in zip(made, found.out_specs, strict=True):
            whole += self._noted(eqn, [pieces], [(world.put_together(pieces, spec),)])
        return whole

    def inner(self, axes: Mapping[str, int]) -> World:
        """Return the world of the ranks of a mesh, inside of this one."""
        return World(axes, self.unknown, self.log)

    def cut(self, x: Any, spec: Any) -> Ranked:
        """Return the piece of each rank of an array that lies on the mesh as a spec says."""
        if isinstance(x, Unknown):
            return self.everywhere(x)
        pieces: list[Any] = [x] * self.count
        for d, names in enumerate(spec):
            over = _names(names)
            if not over:
                continue
            parts = math.prod(self.axes[n] for n in over)
            for ranks in groups_of(self.axes, over):
                for k, r in enumerate(ranks):
                    pieces[r] = mapped(
                        functools.partial(_part, count=parts, axis=d, number=k), pieces[r]
                    )
        return _shared(pieces, [_spec_key(self.axes, spec, r) for r in range(self.count)])

    def put_together(self, x: Ranked, spec: Any) -> Any:
        """Return the array whose pieces ranks have; `Replicas`, where copies that must agree
        differ."""
        for value in x:
            if isinstance(value, Unknown):
                return value
        pieces = list(x)
        sharded: list[str] = []
        for d, names in reversed(list(enumerate(spec))):
            over = _names(names)
            sharded += over
            if not over:
                continue
            whole: list[Any] = [None] * self.count
            for ranks in groups_of(self.axes, over):
                one = joined([pieces[r] for r in ranks], d)
                for r in ranks:
                    whole[r] = one
            pieces = whole
        if any(p is not pieces[0] and not same(p, pieces[0]) for p in pieces):
            return Replicas("ranks hold copies that differ", tuple(pieces), self.axes)
        return pieces[0]

    # -- loops and branches ----------------------------------------------------------------------

    def _scan(self, eqn: JaxprEqn, operands: list[Ranked]) -> list[Ranked]:
        (body,), wires, now = bodies(eqn), wiring(eqn), list(operands)
        turns: list[list[Ranked]] = []
        for t in range(scan_length(eqn))[:: -1 if is_reversed(eqn) else 1]:
            for i in wires.slices:
                now[i] = self._noted(eqn, [operands[i]], [self._row(operands[i], t)])[0]
            turns.append(self.run(body, now))
            for i, j in wires.carried.items():
                now[i] = turns[-1][j]
        if is_reversed(eqn):
            turns.reverse()
        outs = [now[i] for i in wires.carried]
        for j in wires.stacks:
            rows = [turn[j] for turn in turns]
            outs += self._noted(eqn, rows, [self._stacked(rows, eqn.outvars[j].aval)])
        return outs

    def _stacked(self, rows: Sequence[Ranked], aval: Any) -> Ranked:
        if not rows:
            return self.everywhere(values.lifted(np.zeros(aval.shape), aval.dtype))
        made: dict[tuple[int, ...], Any] = {}
        found = []
        for r in range(self.count):
            parts = [x[r] for x in rows]
            key = tuple(map(id, parts))
            if key not in made:
                bad = [p for p in parts if isinstance(p, Unknown)]
                made[key] = bad[0] if bad else mapped(_stack, *parts)
            found.append(made[key])
        return tuple(found)

    def _row(self, x: Ranked, t: int) -> Ranked:
        """Return row t of each rank's stack, once for ranks that share one."""
        made = {id(v): _row(v, t) for v in {id(v): v for v in x}.values()}
        return tuple(made[id(v)] for v in x)

    def _reduce(self, eqn: JaxprEqn, operands: list[Ranked]) -> list[Ranked]:
        """Combine rows one after the other: the program of two numbers is elementwise, so rows will
        do."""
        half, axes, body = len(operands) // 2, eqn.params["dimensions"], combiner_of(eqn)
        rows = [self._moved(x, axes) for x in operands[:half]]
        first = rows[0][0]
        found = list(operands[half:])
        for t in range(0 if isinstance(first, Unknown) else first.shape[0]):
            found = self.run(body, [*found, *(self._row(x, t) for x in rows)], consts=())
        return found

    def _moved(self, x: Ranked, axes: Sequence[int]) -> Ranked:
        """Return each rank's array with the dimensions that are reduced as one, in front."""

        def move(a: Any) -> Any:
            kept = [d for d in range(a.ndim) if d not in axes]
            return a.transpose(*axes, *kept).reshape(-1, *(a.shape[d] for d in kept))

        made = {id(v): v if isinstance(v, Unknown) else mapped(move, v) for v in x}
        return tuple(made[id(v)] for v in x)

    def _while(self, eqn: JaxprEqn, operands: list[Ranked]) -> list[Ranked]:
        (condition, body), wires, now = bodies(eqn), wiring(eqn), list(operands)
        while True:
            (goes_on,) = self.run(condition, [now[i] for i in wires.ins[0]])
            if any(isinstance(g, Unknown) for g in goes_on):
                return [self.everywhere(_first_unknown(goes_on)) for _ in eqn.outvars]
            if not any(map(bool, goes_on)):
                return [now[i] for i in wires.carried]
            if self._made > MOST_EQUATIONS:
                return self._unknown(eqn, "the loop is too long")
            new = self.run(body, [now[i] for i in wires.ins[1]])
            if not all(map(bool, goes_on)) and _communicates(body):
                raise UnfollowedError("ranks leave a loop that communicates at different turns")
            for i, j in wires.carried.items():
                now[i] = _chosen(goes_on, new[j], now[i])

    def _cond(self, eqn: JaxprEqn, operands: list[Ranked]) -> list[Ranked]:
        which, given = operands[0], operands[1:]
        if any(isinstance(w, Unknown) for w in which):
            return [self.everywhere(_first_unknown(which)) for _ in eqn.outvars]
        branches = bodies(eqn)
        taken = [int(np.clip(int(w), 0, len(branches) - 1)) for w in which]
        if len({*taken}) > 1 and any(_communicates(b) for b in branches):
            raise UnfollowedError("ranks take different branches, which communicate")
        made: list[list[Any]] = [[None] * self.count for _ in eqn.outvars]
        for k in sorted({*taken}):
            ranks = [r for r, t in enumerate(taken) if t == k]
            world = self if len(ranks) == self.count else self._alone(len(ranks))
            outs = world.run(branches[k], [tuple(x[r] for r in ranks) for x in given])
            for out, row in zip(outs, made, strict=True):
                for r, value in zip(ranks, out, strict=True):
                    row[r] = value
        return [tuple(row) for row in made]

    def _alone(self, count: int) -> World:
        """Return a world of ranks that do not communicate."""
        world = World({"alone": count}, self.unknown, self.log)
        world._made = self._made
        return world


# besides those of `REAL`, `COMPLEX`, `MATRICES`, `EXACT_SUMS` and `GROUPS`
HANDLED = (
    SCAN,
    *LOOPS,
    COND,
    "shard_map",
    "axis_index",
    "custom_linear_solve",
    "reduce",
    "init_on_use",
    "move_rows",
)
# `empty2`, with which scans begin their outputs, is zero everywhere; `empty` is what a GPU's memory
# has
NOT_REPEATABLE = ("rng_uniform", "empty")
TO_FLOATS = ("convert_element_type", "bitcast_convert_type")
CALLS = (
    "jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "custom_jvp_call", "custom_vjp_call", "remat2", "remat",
    "checkpoint",
)  # fmt: skip


def _opened_call(eqn: JaxprEqn, operands: list[Ranked]) -> tuple[Any, list[Ranked]]:
    (body,) = bodies(eqn)
    return body, operands


def _chosen(which: Ranked, xs: Ranked, ys: Ranked) -> Ranked:
    """Return for each rank its value of xs where it is chosen, else that of ys."""
    return tuple(x if chosen else y for chosen, x, y in zip(which, xs, ys, strict=True))


def _part(x: Any, *, count: int, axis: int, number: int) -> Any:
    return np.split(x, count, axis)[number]


def _communicates(jaxpr: Any) -> bool:
    from dtrans._jax import equations

    return any(
        e.primitive.name in GROUPS and any(isinstance(a, str) for a in axes_of(e))
        for e in equations(jaxpr)
    )


def _first_unknown(xs: Ranked) -> Unknown:
    return next(x for x in xs if isinstance(x, Unknown))


def _row(v: Any, t: int) -> Any:
    if isinstance(v, Unknown):
        return v
    return v[t] if values.is_key(v) else mapped(lambda a: a[t], v)


def _stack(*parts: Any) -> Any:
    import jax.numpy as jnp

    return jnp.stack(parts) if values.is_key(parts[0]) else np.stack(parts)


def _names(names: Any) -> list[str]:
    """Return the axes that a dimension lies on, of an entry of a `PartitionSpec`."""
    if names is None:
        return []
    return [names] if isinstance(names, str) else list(names)


def _spec_key(axes: Mapping[str, int], spec: Any, rank: int) -> tuple[int, ...]:
    """Return the coordinates of a rank on the axes of a spec: ranks with the same have the same
    piece."""
    place = np.unravel_index(rank, [*axes.values()])
    used = {n for names in spec for n in _names(names)}
    return tuple(int(p) for p, n in zip(place, axes, strict=True) if n in used)


def _shared(pieces: Sequence[Any], keys: Sequence[Any]) -> Ranked:
    """Let ranks with equal keys hold one object."""
    first: dict[Any, Any] = {}
    for key, piece in zip(keys, pieces, strict=True):
        first.setdefault(key, piece)
    return tuple(first[key] for key in keys)
