"""A communicating program, cut into pieces: what is compiled, and what its fabric carries out in
between.

Equations between two communications become one jitted function. A `send` needs no answer, so it may
wait: it is moved behind later computation until `group_bytes` of gradients are ready, which makes
few, large pieces, and blocks that are ready together travel together. Pieces are dispatched
asynchronously, and the sends of one piece stand after the dispatch of the next, so that gradients
travel while others are computed. Everything that is not a send keeps its place.

A fabric that would rather have `split_byref` and `concat` computed than carried out passes rules
for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import (
    Atom,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Primitive,
    Var,
    constants,
    equations_inside,
    jaxpr_as_fun,
    map_bodies,
    opened,
    scope_of,
    small_jaxpr,
)
from dtrans.ir.builder import extract_part
from dtrans.ir.program import Program, is_communication
from dtrans.ops import concat_p, send_p, send_rows_p, split_byref_p


Rules = Mapping[Primitive, Callable[..., Sequence[Any]]]


def _split(x: jax.Array, *, sections: Sequence[int]) -> list[jax.Array]:
    starts = [sum(sections[:i]) for i in range(len(sections))]
    return [jax.lax.slice_in_dim(x, a, a + n) for a, n in zip(starts, sections, strict=True)]


# split_byref and concat as computation, for fabrics whose values are device arrays
COMPUTED: Rules = {
    split_byref_p: _split,
    concat_p: lambda *blocks, axis: [jnp.concatenate(blocks, axis)],
}


@dataclasses.dataclass(frozen=True, eq=False)
class Compute:
    """A run of plain equations, as a function of the values of `reads`.

    Attributes:
      rules: the communication in it that is computed.
    """

    fn: Callable[..., Sequence[Any]]
    reads: tuple[Var, ...]
    makes: tuple[Var, ...]
    rules: frozenset[Primitive] = frozenset()

    @cached_property
    def jitted(self) -> Callable[..., Sequence[Any]]:
        """The compiled function."""
        return jax.jit(self.fn)


@dataclasses.dataclass(frozen=True, eq=False)
class Carry:
    """An equation that the fabric carries out."""

    eqn: JaxprEqn


@dataclasses.dataclass(frozen=True, eq=False)
class Segments:
    """A program in pieces.

    Attributes:
      program: what was cut.
      steps: computation and communication, in the order to run them.
      dropped: for each step, the variables that nothing reads after it.
    """

    program: Program
    steps: tuple[Compute | Carry, ...]
    dropped: tuple[tuple[Var, ...], ...]

    def run(
        self,
        args: Sequence[Any],
        compute: Callable[[Compute, Sequence[Any]], Sequence[Any]] | None = None,
    ) -> Generator[tuple[JaxprEqn, list[Any]], Sequence[Any], list[Any]]:
        """Run on flat arguments. Yields each equation to carry out with its operands, and is sent
        its results.

        Args:
          args: the arrays of the program's inputs.
          compute: runs one piece; its jitted function by default.
        """
        jaxpr = self.program.jaxpr
        env: dict[Var, Any] = dict(zip(opened(jaxpr).invars, args, strict=True))
        env.update(zip(opened(jaxpr).constvars, jaxpr.consts, strict=True))
        read = lambda a: jnp.asarray(a.val, a.aval.dtype) if isinstance(a, Literal) else env[a]
        for step, dropped in zip(self.steps, self.dropped, strict=True):
            if isinstance(step, Compute):
                values = [env[v] for v in step.reads]
                outs = step.jitted(*values) if compute is None else compute(step, values)
                env.update(zip(step.makes, outs, strict=True))
                del values
            else:
                outs = yield step.eqn, [read(a) for a in step.eqn.invars]
                env.update(zip(step.eqn.outvars, outs, strict=True))
            del outs  # `env` alone holds values, until they are dropped
            for v in dropped:
                env.pop(v, None)
        return [read(a) for a in opened(jaxpr).outvars]


def cut_program(
    program: Program,
    *,
    computed: Rules | None = None,
    carried: Collection[Primitive] = (),
    group_bytes: float = float("inf"),
) -> Segments:
    """Cut a program into pieces.

    Args:
      computed: communication that is to be compiled, as functions of arrays.
      carried: what is carried out though it is no communication.
      group_bytes: send once this many bytes of gradients are ready; by default all at the end.
    """
    rules = computed or {}
    inner = program.inner
    order: list[list[JaxprEqn] | JaxprEqn] = [[]]
    behind: list[JaxprEqn] = []  # sends of the piece before the current one
    waiting: list[JaxprEqn] = []  # sends of the current one
    ready = 0.0

    def end_piece(*, send_all: bool) -> None:
        nonlocal behind, waiting, ready
        order.extend(behind + waiting if send_all else behind)
        behind, waiting, ready = [] if send_all else waiting, [], 0.0
        order.append([])

    for eqn in inner.eqns:
        if eqn.primitive not in carried and (not is_communication(eqn) or eqn.primitive in rules):
            group = order[-1]
            assert isinstance(group, list)
            group.append(eqn)
        elif eqn.primitive in (send_p, send_rows_p, split_byref_p):
            waiting.append(eqn)
            if eqn.primitive is not split_byref_p:
                ready += sum(a.aval.size * a.aval.dtype.itemsize for a in eqn.invars)
            if ready >= group_bytes:
                end_piece(send_all=False)
        else:
            end_piece(send_all=True)
            order[-1] = eqn
            order.append([])
    end_piece(send_all=True)

    last: dict[Var, int] = {}
    order = [s for s in order if not isinstance(s, list) or s]
    for i, step in enumerate(order):
        for eqn in step if isinstance(step, list) else [step]:
            last.update((a, i) for a in eqn.invars if isinstance(a, Var))
            last.update((v, i) for v in eqn.outvars if v not in last)
    outs = {a for a in inner.outvars if isinstance(a, Var)}
    dropped: list[list[Var]] = [[] for _ in order]
    for v, i in last.items():
        if v not in outs:
            dropped[i].append(v)
    steps = [
        _piece(program.jaxpr, s, i, last, outs, rules) if isinstance(s, list) else Carry(s)
        for i, s in enumerate(order)
    ]
    return Segments(program, tuple(steps), tuple(map(tuple, dropped)))


def _piece(
    jaxpr: ClosedJaxpr,
    eqns: Sequence[JaxprEqn],
    index: int,
    last: Mapping[Var, int],
    outs: set[Var],
    rules: Rules,
) -> Compute:
    """The equations of one piece as a function of what they read to what is read later."""
    made = {v for e in eqns for v in e.outvars}
    reads = list(
        dict.fromkeys(a for e in eqns for a in e.invars if isinstance(a, Var) and a not in made)
    )
    constants = set(opened(jaxpr).constvars)
    reads = [v for v in reads if v not in constants]
    makes = [v for e in eqns for v in e.outvars if last[v] > index or v in outs]
    used = frozenset(
        x.primitive for e in eqns for x in (e, *equations_inside(e)) if x.primitive in rules
    )
    if not used:
        return Compute(
            jaxpr_as_fun(extract_part(jaxpr, reads, eqns, makes)), tuple(reads), tuple(makes)
        )
    values = dict(zip(opened(jaxpr).constvars, jaxpr.consts, strict=True))

    def run(*args: Any) -> list[Any]:
        return interpret(eqns, {**values, **dict(zip(reads, args, strict=True))}, makes, rules)

    return Compute(run, tuple(reads), tuple(makes), used)


def interpret(
    eqns: Sequence[JaxprEqn], env: dict[Var, Any], outs: Sequence[Atom], rules: Rules
) -> list[Any]:
    """The values of `outs`, equation by equation; communication by its rule. `env` has what they
    read."""
    read: Callable[[Atom], Any] = lambda a: a.val if isinstance(a, Literal) else env[a]
    for e in eqns:
        operands = map(read, e.invars)
        if e.primitive in rules:
            made = rules[e.primitive](*operands, **e.params)
        else:
            params = (
                _inside(e, rules)
                if any(x.primitive in rules for x in equations_inside(e))
                else e.params
            )
            with jax.named_scope(scope_of(e)):
                made = e.primitive.bind(*operands, **e.primitive.get_bind_params(params))
        env.update(zip(e.outvars, made if e.primitive.multiple_results else [made], strict=True))
    return [read(a) for a in outs]


def _inside(eqn: JaxprEqn, rules: Rules) -> dict[str, Any]:
    """The parameters of an equation, with communication in its bodies as what the rules make of
    it."""

    def traced(body: Any) -> Any:
        inner = opened(body)
        values = dict(zip(inner.constvars, constants(body), strict=True))

        def run(*args: Any) -> list[Any]:
            env = {**values, **dict(zip(inner.invars, args, strict=True))}
            return interpret(inner.eqns, env, inner.outvars, rules)

        made = small_jaxpr(run, [v.aval for v in inner.invars])
        return made if isinstance(body, ClosedJaxpr) else opened(made)

    return map_bodies(eqn.params, traced)
