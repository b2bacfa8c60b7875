"""Evaluation of a jaxpr in a finite field, for all ranks of a mesh at once.

The value of a variable is a tuple with one entry for each rank. If several ranks have the same
object as their entry, an equation is computed once for these ranks. `Evaluator` is the evaluator. A
program for one device has one rank. For the body of a `shard_map`, `Evaluator` creates an inner
evaluator, with one rank for each device of the mesh.

Read `field_values` first. The rules of primitives are in `rules` and `rank_collectives`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import (
    CALLBACKS,
    COND,
    LOOPS,
    SCAN,
    Jaxpr,
    JaxprEqn,
    Literal,
    axes_of,
    bodies,
    body_indices,
    combiner_of,
    constants,
    equations,
    is_identity,
    is_reversed,
    line_of,
    linear_solve,
    lowered_jaxpr,
    opened,
    plain_type,
    scan_length,
    shard_map_of,
)
from dtrans.ir.dataflow import live_equations
from dtrans.ir.selection import retain, values_at
from dtrans.verification import field_values as values
from dtrans.verification.complex_rules import COMPLEX, is_of_complex
from dtrans.verification.exact_rules import EXACT_SUMS
from dtrans.verification.field_values import Complex, NoRuleError, Real, Unknown
from dtrans.verification.matrix_rules import MATRICES
from dtrans.verification.movement_rules import move_rows
from dtrans.verification.rank_collectives import (
    GROUPS,
    Ranked,
    assemble,
    groups_of,
    mapped,
    shard,
)
from dtrans.verification.rules import REAL, plain
from dtrans.verification.value_log import ValueLog


# Largest number of evaluations of equations. An equation in a loop counts in every iteration. A
# larger number would take minutes.
MOST_EQUATIONS = 200_000
# Primitives that a method of `Evaluator` evaluates, and not a rule of another module.
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
# Primitives whose outputs differ from run to run; `empty` is uninitialized memory on a GPU.
# `empty2` (initial value of a scan's outputs) is absent, because it is zero on every platform.
NOT_REPEATABLE = ("rng_uniform", "empty")
TO_FLOATS = ("convert_element_type", "bitcast_convert_type")
CALLS = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "eval_jaxpr",
    "custom_jvp_call",
    "custom_vjp_call",
    "remat2",
    "remat",
    "checkpoint",
)


class Evaluator:
    """Evaluator of a program in a finite field, for all ranks (devices) of a mesh at once.

    A value is a tuple with one entry for each rank. Ranks with the same object share the work.

    Args:
      axes: size of each mesh axis, by name; empty for a one-device program.
      unknown: function that is called for each equation that cannot be evaluated, with the reason.
      log: function that is called for each equation, with its operands and outputs.
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
        self.evaluated = 0  # number of evaluated equations, including inner worlds
        # The keys are ids of the objects, which are stored so that their ids stay unique.
        self._literals: dict[int, tuple[Literal, Ranked]] = {}
        self._live_equations: dict[int, tuple[Jaxpr, list[JaxprEqn]]] = {}

    def run(
        self, jaxpr: Any, args: Sequence[Ranked], consts: Sequence[Any] | None = None
    ) -> list[Ranked]:
        """Evaluate a jaxpr in the finite field, for all ranks.

        Args:
          jaxpr: the jaxpr.
          args: value of each input, for all ranks.
          consts: values of the constants; by default the constants of a closed jaxpr.

        Returns:
          The value of each output, for all ranks.

        Raises:
          NearTie: rounding decides a comparison, so that another random input is needed.
        """
        inner = opened(jaxpr)
        arrays = constants(jaxpr) if consts is None else consts
        env: dict[Any, Ranked] = {}
        for v, c in zip(inner.constvars, arrays, strict=True):
            env[v] = self.replicate(values.lifted(c, v.aval.dtype))
        env |= zip(inner.invars, args, strict=True)

        def read(atom: Any) -> Ranked:
            return self._literal(atom) if isinstance(atom, Literal) else env[atom]

        for eqn in self._live(inner):
            operands = [read(a) for a in eqn.invars]
            outputs = self._equation(eqn, operands)
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [read(a) for a in inner.outvars]

    def _live(self, jaxpr: Jaxpr) -> list[JaxprEqn]:
        """Return the equations on which outputs depend; all other equations need no rule.

        The result is cached, since loops evaluate the same body many times.
        """
        if id(jaxpr) not in self._live_equations:
            self._live_equations[id(jaxpr)] = jaxpr, live_equations(jaxpr.eqns, jaxpr.outvars)
        return self._live_equations[id(jaxpr)][1]

    def _literal(self, atom: Literal) -> Ranked:
        """Return the value of a literal; a cache saves time in loops."""
        if id(atom) not in self._literals:
            value = self.replicate(values.lifted(atom.val, atom.aval.dtype))
            self._literals[id(atom)] = atom, value
        return self._literals[id(atom)][1]

    def replicate(self, x: Any) -> Ranked:
        """Return a tuple with `x` as the value of each rank."""
        return (x,) * self.count

    # -- equations -------------------------------------------------------------------------------

    def _equation(self, eqn: JaxprEqn, operands: list[Ranked]) -> list[Ranked]:
        """Evaluate an equation; if its primitive has no rule, the outputs are `Unknown`."""
        self.evaluated += 1
        name = eqn.primitive.name
        if self.evaluated > MOST_EQUATIONS:
            return self.unknown_outputs(eqn, f"more than {MOST_EQUATIONS:,} equations")
        try:
            if name == "shard_map":
                return self._shard_map(eqn, operands)
            if name in CONTROL_FLOW:
                return CONTROL_FLOW[name](self, eqn, operands)
            if name in GROUPS and mesh_axes(eqn):
                return self.log_outputs(eqn, operands, self._collective(eqn, operands))
            if name == "axis_index":
                return self._axis_index(eqn)
            if name in CALLBACKS or name == "pure_callback":
                return self.unknown_outputs(eqn, f"{name} calls a function of the host")
            if name == "reduce" and any(isinstance(v, Real) for x in operands for v in x):
                return run_reduce(self, eqn, operands)
            if name == "custom_linear_solve":
                return self.run(*linear_solve(eqn, operands))
            if name == "init_on_use":
                # A server computes each row at its first use, but a comparison needs all rows.
                rows = np.arange(eqn.outvars[0].aval.shape[0], dtype=np.int32)
                return self.run(eqn.params["write"](len(rows)), [self.replicate(rows), *operands])
            if name in CALLS:
                (body,) = bodies(eqn)
                return self.run(body, operands)
            return self.log_outputs(eqn, operands, self.each(eqn, operands))
        except NoRuleError as e:
            return self.unknown_outputs(eqn, f"{name}: {e}")

    def log_outputs(
        self, eqn: JaxprEqn, operands: Sequence[Ranked], outputs: list[Ranked]
    ) -> list[Ranked]:
        """Return the outputs of an equation, after recording them in the log, if there is one."""
        if self.log is not None:
            self.log.note(eqn, operands, outputs, self.axes)
        return outputs

    def each(self, eqn: JaxprEqn, operands: list[Ranked]) -> list[Ranked]:
        """Evaluate an equation that does not communicate.

        If several ranks have the same objects as operands, the equation is evaluated once for them.
        """
        outputs: dict[tuple[int, ...], list[Any]] = {}
        keys = []
        for r in range(self.count):
            of_rank = [x[r] for x in operands]
            keys.append(tuple(map(id, of_rank)))
            if keys[-1] not in outputs:
                outputs[keys[-1]] = self._one(eqn, of_rank)
        found = []
        for i in range(len(eqn.outvars)):
            found.append(tuple(outputs[key][i] for key in keys))
        return found

    def _one(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        """Evaluate an equation for one rank."""
        name = eqn.primitive.name
        for x in operands:
            if isinstance(x, Unknown):
                return [x] * len(eqn.outvars)
        if is_identity(eqn):
            return operands[:1]
        if getattr(eqn.primitive, "communicates", False):
            raise NoRuleError("the equation needs a server or another trainer")
        if name in NOT_REPEATABLE:
            raise NoRuleError("the outputs differ from run to run")
        if name == "move_rows":
            return move_rows(eqn, operands)
        if name in EXACT_SUMS:
            return EXACT_SUMS[name](eqn, operands)
        of_complex = is_of_complex(eqn, operands)
        if of_complex and name in COMPLEX:
            return COMPLEX[name](eqn, operands)
        if not any(isinstance(x, (Real, Complex)) for x in operands):
            if name in TO_FLOATS and values.is_float(eqn.outvars[0].aval.dtype):
                return REAL[name](eqn, operands)
            return plain(eqn, operands)
        if name in MATRICES:
            return MATRICES[name](eqn, operands)
        if of_complex:
            raise NoRuleError("there is no rule for complex numbers")
        if name not in REAL:
            raise NoRuleError("there is no rule for floats")
        return REAL[name](eqn, operands)

    def unknown_outputs(self, eqn: JaxprEqn, reason: str) -> list[Ranked]:
        """Return `Unknown` values for all outputs, and record the reason with the user's line."""
        line = line_of(eqn)
        if line:
            reason = f"{reason} ({line})"
        self.unknown[reason] = None
        return [self.replicate(Unknown(reason)) for _ in eqn.outvars]

    # -- collectives -----------------------------------------------------------------------------

    def _collective(self, eqn: JaxprEqn, operands: list[Ranked]) -> list[Ranked]:
        """Evaluate a collective: call its rule once for each group of ranks that it connects."""
        over = mesh_axes(eqn)
        if len(over) < len(axes_of(eqn)):
            raise NoRuleError("the equation reduces over mesh axes and array dimensions at once")
        rule, groups = GROUPS[eqn.primitive.name], groups_of(self.axes, over)
        if (subgroups := eqn.params.get("axis_index_groups")) is not None:
            groups = _split_groups(groups, subgroups)
        found = []
        for x in operands:
            outputs: list[Any] = [None] * self.count
            for ranks in groups:
                parts = values_at(x, ranks)
                unknown = _first_unknown(parts)
                outs = [unknown] * len(parts) if unknown else rule(parts, eqn.params)
                for r, out in zip(ranks, outs, strict=True):
                    outputs[r] = out
            found.append(tuple(outputs))
        return found

    def _axis_index(self, eqn: JaxprEqn) -> list[Ranked]:
        indices: list[Any] = [None] * self.count
        for ranks in groups_of(self.axes, mesh_axes(eqn)):
            for k, r in enumerate(ranks):
                indices[r] = np.asarray(k, np.int32)
        return [tuple(indices)]

    # -- inner worlds ----------------------------------------------------------------------------

    def _shard_map(self, eqn: JaxprEqn, operands: list[Ranked]) -> list[Ranked]:
        """Evaluate a `shard_map`: split operands over the mesh, and run the body for all ranks."""
        if self.count != 1:
            raise NoRuleError("the equation is a shard_map in the body of another shard_map")
        sharded = shard_map_of(eqn)
        # Along automatic axes the body sees global values, so only manual axes have ranks.
        axes = retain(sharded.axes, sharded.manual)
        evaluator = self._enter(self.inner(axes))
        arguments: list[Ranked] = []
        for x, spec in zip(operands, sharded.in_specs, strict=True):
            arguments += evaluator.log_outputs(eqn, [x], [shard(axes, x[0], spec)])
        outputs = evaluator.run(sharded.body, arguments)
        self.evaluated = evaluator.evaluated
        found: list[Ranked] = []
        for pieces, spec in zip(outputs, sharded.out_specs, strict=True):
            found += self.log_outputs(eqn, [pieces], [(evaluator.assemble(pieces, spec),)])
        return found

    def inner(self, axes: Mapping[str, int]) -> Evaluator:
        """Return the evaluator of a `shard_map` body, for the ranks of its mesh."""
        return Evaluator(axes, self.unknown, self.log)

    def assemble(self, pieces: Ranked, spec: Any) -> Any:
        """Assemble an array from pieces; return `Replicas` if the copies of one piece differ."""
        return assemble(self.axes, pieces, spec)

    def without_mesh(self, count: int) -> Evaluator:
        """Return an evaluator for `count` independent ranks, for a body without collectives."""
        return self._enter(Evaluator({"alone": count}, self.unknown, self.log))

    def _enter(self, evaluator: Evaluator) -> Evaluator:
        """Return `evaluator`, which continues this evaluator's count of evaluated equations."""
        evaluator.evaluated = self.evaluated
        return evaluator


def mesh_axes(eqn: JaxprEqn) -> list[str]:
    """Return the mesh axes over which an equation communicates.

    The equation's parameter `axes` may also contain dimensions of the operand.
    """
    return [a for a in axes_of(eqn) if isinstance(a, str)]


def _split_groups(
    groups: Sequence[Sequence[int]], subgroups: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Split each group of ranks into subgroups, for collectives with `axis_index_groups`.

    Args:
      groups: ranks of each group.
      subgroups: for each subgroup, positions within a group (`axis_index_groups`).
    """
    found = []
    for ranks in groups:
        for positions in subgroups:
            found.append(values_at(ranks, positions))
    return found


# -- loops, branches and reductions ----------------------------------------------------------------


def run_scan(evaluator: Evaluator, eqn: JaxprEqn, operands: Sequence[Ranked]) -> list[Ranked]:
    """Evaluate a scan, iteration by iteration."""
    (body,), indices, now = bodies(eqn), body_indices(eqn), list(operands)
    iterations: list[list[Ranked]] = []
    order = range(scan_length(eqn))
    for t in reversed(order) if is_reversed(eqn) else order:
        for i in indices.slices:
            (now[i],) = evaluator.log_outputs(eqn, [operands[i]], [_row_of_ranks(operands[i], t)])
        iterations.append(evaluator.run(body, now))
        for i, j in indices.carried.items():
            now[i] = iterations[-1][j]
    if is_reversed(eqn):
        iterations.reverse()

    outs = values_at(now, indices.carried)
    for j in indices.stacks:
        rows = [outputs[j] for outputs in iterations]
        outs += evaluator.log_outputs(
            eqn, rows, [_stack_of_ranks(evaluator, rows, eqn.outvars[j].aval)]
        )
    return outs


def run_while(evaluator: Evaluator, eqn: JaxprEqn, operands: Sequence[Ranked]) -> list[Ranked]:
    """Evaluate a `while` loop until the condition is false on every rank.

    `jax.vmap` writes a condition for each row of a batch. Then each iteration gives new values only
    to rows with a true condition.
    """
    (condition, body), indices, now = bodies(eqn), body_indices(eqn), list(operands)
    holds = opened(condition).outvars[0].aval
    while True:
        (conditions,) = evaluator.run(condition, values_at(now, indices.ins[0]))
        if (unknown := _first_unknown(conditions)) is not None:
            return [evaluator.replicate(unknown)] * len(eqn.outvars)
        continues = [bool(np.any(x)) for x in conditions]
        if not any(continues):
            return values_at(now, indices.carried)
        if evaluator.evaluated > MOST_EQUATIONS:
            return evaluator.unknown_outputs(
                eqn, f"the loop evaluates {MOST_EQUATIONS:,} equations"
            )
        new = evaluator.run(body, values_at(now, indices.ins[1]))
        if holds.shape:
            select = _select_rows(holds, tuple(v.aval for v in eqn.outvars))
            new = evaluator.run(select, [conditions, *new, *values_at(now, indices.carried)])
        if not all(continues) and _communicates(body):
            raise NoRuleError(
                "the loop communicates, and ranks leave the loop at different iterations"
            )
        for i, j in indices.carried.items():
            ranks = list(now[i])
            for r, runs in enumerate(continues):
                if runs:
                    ranks[r] = new[j][r]
            now[i] = tuple(ranks)


@functools.cache
def _select_rows(condition: Any, types: tuple[Any, ...]) -> Any:
    """Return a jaxpr that selects new values in rows with a true condition, else old values."""

    def select(running: jax.Array, new: list[jax.Array], old: list[jax.Array]) -> list[jax.Array]:
        found = []
        for x, y in zip(new, old, strict=True):
            mask = jax.lax.broadcast_in_dim(running, x.shape, range(running.ndim))
            found.append(jax.lax.select(mask, x, y))
        return found

    return lowered_jaxpr(select, plain_type(condition), *[[*map(plain_type, types)]] * 2)


def run_cond(evaluator: Evaluator, eqn: JaxprEqn, operands: Sequence[Ranked]) -> list[Ranked]:
    """Evaluate a `cond`: each branch for the ranks that choose it."""
    indices, inputs = operands[0], operands[1:]
    if (unknown := _first_unknown(indices)) is not None:
        return [evaluator.replicate(unknown)] * len(eqn.outvars)
    branches = bodies(eqn)
    chosen = [int(np.clip(int(k), 0, len(branches) - 1)) for k in indices]
    if len({*chosen}) > 1 and any(_communicates(b) for b in branches):
        raise NoRuleError("ranks take different branches, and a branch communicates")

    outputs: list[list[Any]] = [[None] * evaluator.count for _ in eqn.outvars]
    for k in sorted({*chosen}):
        ranks = [r for r, branch in enumerate(chosen) if branch == k]
        inner = evaluator if len(ranks) == evaluator.count else evaluator.without_mesh(len(ranks))
        arguments = []
        for x in inputs:
            arguments.append(tuple(values_at(x, ranks)))
        for output, row in zip(inner.run(branches[k], arguments), outputs, strict=True):
            for r, value in zip(ranks, output, strict=True):
                row[r] = value
    return [tuple(row) for row in outputs]


def run_reduce(evaluator: Evaluator, eqn: JaxprEqn, operands: Sequence[Ranked]) -> list[Ranked]:
    """Evaluate a `reduce` with a function of two numbers, one row after the other.

    Each call of the function combines all numbers of a row with the results so far.
    """
    half, axes, body = len(operands) // 2, eqn.params["dimensions"], combiner_of(eqn)
    stacks = [_reduced_in_front(x, axes) for x in operands[:half]]
    first = stacks[0][0]
    found = list(operands[half:])
    if isinstance(first, Unknown):
        return found
    for t in range(first.shape[0]):
        rows = [_row_of_ranks(x, t) for x in stacks]
        found = evaluator.run(body, [*found, *rows], consts=())
    return found


CONTROL_FLOW: Mapping[str, Callable[[Evaluator, JaxprEqn, Sequence[Ranked]], list[Ranked]]] = {
    **dict.fromkeys(LOOPS, run_while),
    SCAN: run_scan,
    COND: run_cond,
}


# -- rows ------------------------------------------------------------------------------------------


def _once_for_each(fn: Callable[[Any], Any], x: Ranked) -> Ranked:
    """Apply a function to the value of each rank; call it once for ranks with the same object."""
    outputs: dict[int, Any] = {}
    for v in x:
        if id(v) not in outputs:
            outputs[id(v)] = v if isinstance(v, Unknown) else fn(v)
    return tuple(outputs[id(v)] for v in x)


def _row_of_ranks(x: Ranked, t: int) -> Ranked:
    """Return row t of each rank's stacked array, as the input of iteration t of a scan."""

    def row(v: Any) -> Any:
        if values.is_key(v):
            return v[t]
        return mapped(lambda a: a[t], v)

    return _once_for_each(row, x)


def _reduced_in_front(x: Ranked, axes: Sequence[int]) -> Ranked:
    """Merge the reduced dimensions of each rank's array into one dimension, and put it first."""

    def move(a: Any) -> Any:
        free = [d for d in range(a.ndim) if d not in axes]
        sizes = values_at(a.shape, free)
        return a.transpose(*axes, *free).reshape(-1, *sizes)

    return _once_for_each(lambda v: mapped(move, v), x)


def _stack_of_ranks(evaluator: Evaluator, rows: Sequence[Ranked], aval: Any) -> Ranked:
    """Stack the rows that the iterations of a scan returned, on each rank.

    Ranks with the same rows share the result.
    """
    if not rows:
        return evaluator.replicate(values.lifted(np.zeros(aval.shape), aval.dtype))
    stacks: dict[tuple[int, ...], Any] = {}
    found = []
    for r in range(evaluator.count):
        parts = [x[r] for x in rows]
        key = tuple(map(id, parts))
        if key not in stacks:
            stacks[key] = _first_unknown(parts) or mapped(_stack, *parts)
        found.append(stacks[key])
    return tuple(found)


def _stack(*parts: Any) -> Any:
    return jnp.stack(parts) if values.is_key(parts[0]) else np.stack(parts)


def _first_unknown(xs: Sequence[Any]) -> Unknown | None:
    """Return the first unknown value; None if all values are known."""
    return next((x for x in xs if isinstance(x, Unknown)), None)


def _communicates(jaxpr: Any) -> bool:
    """Return True if a jaxpr has a collective over an axis of the mesh."""
    collectives = [e for e in equations(jaxpr) if e.primitive.name in GROUPS]
    return any(map(mesh_axes, collectives))
