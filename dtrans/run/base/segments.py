"""Division of a program into compiled pieces, with communication between them.

XLA cannot send messages to other processes. So the equations between two communications become one
jitted function, a *piece*, and Python code executes the communication. A `send` has no result, so
it can wait: it moves behind later computation until `group_bytes` of gradients are ready. So there
are only a few large pieces, and each message contains several gradients. All other communication
stays in its place.

JAX dispatches pieces asynchronously. The sends of a piece come after the dispatch of the next
piece, so that the device computes while gradients are sent.

A *fabric* is an object that executes the communication. If a fabric's values are device arrays,
pieces also split and concatenate arrays themselves.
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
from dtrans.ir.dataflow import avals, variables
from dtrans.ir.program import Program, is_communication
from dtrans.ir.selection import values_at
from dtrans.ops import concat_p, send_p, send_rows_p, split_byref_p


Rules = Mapping[Primitive, Callable[..., Sequence[Any]]]


def _split_rows(x: jax.Array, *, sections: Sequence[int]) -> list[jax.Array]:
    blocks = []
    stop = 0
    for count in sections:
        start, stop = stop, stop + count
        blocks.append(jax.lax.slice_in_dim(x, start, stop))
    return blocks


# implementations of split_byref and concat in compiled pieces, if values are device arrays
COMPUTED: Rules = {
    split_byref_p: _split_rows,
    concat_p: lambda *blocks, axis: [jnp.concatenate(blocks, axis)],
}


@dataclasses.dataclass(frozen=True, eq=False)
class Compute:
    """Piece of a program: consecutive equations that are compiled as one function.

    Attributes:
      fn: the function, which maps the values of `reads` to the values of `makes`.
      reads: variables that the equations read but do not define.
      makes: variables that the equations define, and that later equations or the caller read.
      rules: the communication primitives that the function computes.
    """

    fn: Callable[..., Sequence[Any]]
    reads: tuple[Var, ...]
    makes: tuple[Var, ...]
    rules: frozenset[Primitive] = frozenset()

    @cached_property
    def jitted(self) -> Callable[..., Sequence[Any]]:
        """The piece's function, jitted."""
        return jax.jit(self.fn)


@dataclasses.dataclass(frozen=True, eq=False)
class Carry:
    """Communication equation, which the caller of `Segments.run` executes between two pieces."""

    eqn: JaxprEqn


@dataclasses.dataclass(frozen=True, eq=False)
class Segments:
    """Program, divided into compiled pieces and communication between them.

    Attributes:
      program: the program.
      steps: computation and communication, in the order of execution.
      dropped: for each step, the variables that no later step reads.
    """

    program: Program
    steps: tuple[Compute | Carry, ...]
    dropped: tuple[tuple[Var, ...], ...]

    def run(
        self,
        args: Sequence[Any],
        compute: Callable[[Compute, Sequence[Any]], Sequence[Any]] | None = None,
    ) -> Generator[tuple[JaxprEqn, list[Any]], Sequence[Any], list[Any]]:
        """Run the program as a generator, which yields each communication equation to its caller.

        The caller executes the equation, and sends its results into the generator.

        Args:
          args: arrays of the program's inputs.
          compute: function that runs one piece; by default, it calls the piece's jitted function.

        Yields:
          Pairs (equation to execute, operands). The caller sends the results to the generator.

        Returns:
          The program's outputs.
        """
        jaxpr = self.program.jaxpr
        env: dict[Var, Any] = dict(zip(opened(jaxpr).invars, args, strict=True))
        env.update(zip(opened(jaxpr).constvars, jaxpr.consts, strict=True))

        def read(a: Atom) -> Any:
            if isinstance(a, Literal):
                return jnp.asarray(a.val, a.aval.dtype)
            return env[a]

        for step, dropped in zip(self.steps, self.dropped, strict=True):
            if isinstance(step, Compute):
                values = values_at(env, step.reads)
                if compute is None:
                    outs = step.jitted(*values)
                else:
                    outs = compute(step, values)
                env.update(zip(step.makes, outs, strict=True))
                del values
            else:
                outs = yield step.eqn, [read(a) for a in step.eqn.invars]
                env.update(zip(step.eqn.outvars, outs, strict=True))
            del outs  # now only `env` refers to the outputs, and `env.pop` can free them
            for v in dropped:
                env.pop(v, None)
        return [read(a) for a in opened(jaxpr).outvars]


def divide_program(
    program: Program,
    *,
    computed: Rules | None = None,
    carried: Collection[Primitive] = (),
    group_bytes: float = float("inf"),
) -> Segments:
    """Divide a program into compiled pieces, with communication equations between them.

    Args:
      program: the program.
      computed: functions for communication primitives that pieces compute themselves.
      carried: other primitives that are executed between pieces.
      group_bytes: the number of bytes of gradients that are sent together. By default, gradients
        are sent before the next communication that is not a send, or at the end.
    """
    rules = computed or {}
    order = _order_steps(program, rules, carried, group_bytes)

    last: dict[Var, int] = {}  # variable -> index of the last step that reads or defines it
    for i, step in enumerate(order):
        for eqn in step if isinstance(step, list) else [step]:
            last.update((a, i) for a in eqn.invars if isinstance(a, Var))
            for v in eqn.outvars:
                last.setdefault(v, i)
    outs = set(variables(program.inner.outvars))
    dropped: list[list[Var]] = [[] for _ in order]
    for v, i in last.items():
        if v not in outs:
            dropped[i].append(v)

    steps: list[Compute | Carry] = []
    for i, step in enumerate(order):
        if isinstance(step, list):
            steps.append(_compile_piece(program.jaxpr, step, i, last, outs, rules))
        else:
            steps.append(Carry(step))
    return Segments(program, tuple(steps), tuple(map(tuple, dropped)))


def _order_steps(
    program: Program, rules: Rules, carried: Collection[Primitive], group_bytes: float
) -> list[list[JaxprEqn] | JaxprEqn]:
    """Group equations into pieces, and move each send behind the next piece."""
    order: list[list[JaxprEqn] | JaxprEqn] = [[]]
    behind: list[JaxprEqn] = []  # sends of the piece before the current one
    waiting: list[JaxprEqn] = []  # sends of the current piece
    ready = 0.0

    def end_piece(*, send_all: bool) -> None:
        nonlocal behind, waiting, ready
        order.extend(behind)
        behind, waiting, ready = waiting, [], 0.0
        if send_all:
            order.extend(behind)
            behind = []
        order.append([])

    for eqn in program.inner.eqns:
        if eqn.primitive not in carried and (not is_communication(eqn) or eqn.primitive in rules):
            group = order[-1]
            assert isinstance(group, list)
            group.append(eqn)
        elif eqn.primitive in (send_p, send_rows_p, split_byref_p):
            waiting.append(eqn)
            # split_byref sends nothing: bytes are counted at the sends of its blocks
            if eqn.primitive is not split_byref_p:
                ready += sum(a.aval.size * a.aval.dtype.itemsize for a in eqn.invars)
            if ready >= group_bytes:
                end_piece(send_all=False)
        else:
            end_piece(send_all=True)
            order[-1] = eqn
            order.append([])
    end_piece(send_all=True)
    return [step for step in order if not isinstance(step, list) or step]


def _compile_piece(
    jaxpr: ClosedJaxpr,
    eqns: Sequence[JaxprEqn],
    index: int,
    last: Mapping[Var, int],
    outs: set[Var],
    rules: Rules,
) -> Compute:
    """Return the equations of a piece as one function.

    Args:
      jaxpr: the jaxpr of the program.
      eqns: the equations of the piece.
      index: the index of the piece among the steps.
      last: maps each variable to the index of the last step that reads it.
      outs: the program's outputs.
      rules: implementations of the communication primitives that the piece computes.
    """
    values = dict(zip(opened(jaxpr).constvars, jaxpr.consts, strict=True))
    defined: set[Var] = set(values)
    reads: dict[Var, None] = {}  # a dict, as an ordered set
    makes: list[Var] = []
    used: set[Primitive] = set()
    for eqn in eqns:
        reads.update((a, None) for a in eqn.invars if isinstance(a, Var) and a not in defined)
        makes += [v for v in eqn.outvars if last[v] > index or v in outs]
        used.update({x.primitive for x in (eqn, *equations_inside(eqn))} & rules.keys())
        defined.update(eqn.outvars)
    if not used:
        fn = jaxpr_as_fun(extract_part(jaxpr, list(reads), eqns, makes))
        return Compute(fn, tuple(reads), tuple(makes))

    def run(*args: Any) -> list[Any]:
        return interpret(eqns, {**values, **dict(zip(reads, args, strict=True))}, makes, rules)

    return Compute(run, tuple(reads), tuple(makes), frozenset(used))


def interpret(
    eqns: Sequence[JaxprEqn], env: dict[Var, Any], outs: Sequence[Atom], rules: Rules
) -> list[Any]:
    """Evaluate equations one after the other; `rules` has functions for communication primitives.

    Args:
      eqns: the equations, in order.
      env: values of the variables that the equations read (dict by variable). The function adds the
        values that the equations compute.
      outs: the outputs.
      rules: the implementation of each communication primitive.

    Returns:
      The values of `outs`.
    """

    def read(a: Atom) -> Any:
        return a.val if isinstance(a, Literal) else env[a]

    for eqn in eqns:
        primitive = eqn.primitive
        operands = map(read, eqn.invars)
        if primitive in rules:
            found = rules[primitive](*operands, **eqn.params)
        else:
            params = eqn.params
            if any(x.primitive in rules for x in equations_inside(eqn)):
                params = _retrace_bodies(eqn, rules)
            with jax.named_scope(scope_of(eqn)):
                found = primitive.bind(*operands, **primitive.get_bind_params(params))
        if not primitive.multiple_results:
            found = [found]
        env.update(zip(eqn.outvars, found, strict=True))
    return [read(a) for a in outs]


def _retrace_bodies(eqn: JaxprEqn, rules: Rules) -> dict[str, Any]:
    """Replace communication primitives inside the body of a loop or branch, by tracing it again.

    Args:
      eqn: an equation with bodies, such as a scan.
      rules: the implementation of each communication primitive.

    Returns:
      The equation's new parameters.
    """

    def retrace(body: Any) -> Any:
        inner = opened(body)
        values = dict(zip(inner.constvars, constants(body), strict=True))

        def run(*args: Any) -> list[Any]:
            env = {**values, **dict(zip(inner.invars, args, strict=True))}
            return interpret(inner.eqns, env, inner.outvars, rules)

        traced = small_jaxpr(run, avals(inner.invars))
        return traced if isinstance(body, ClosedJaxpr) else opened(traced)

    return map_bodies(eqn.params, retrace)
