"""The drivers of analyses, on small jaxprs with loops, branches and calls."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dtrans._jax import evaluate, has_bodies, opened
from dtrans.ir.interpret import BackwardAnalysis, ForwardAnalysis, backward, forward_jaxpr


@jax.custom_jvp
def halved(x: Any, y: Any) -> Any:
    return x // 2, y


halved.defjvp(lambda primals, tangents: (halved(*primals), tangents))


@jax.custom_vjp
def tripled(x: Any, y: Any) -> Any:
    return 3 * x, y + 1


tripled.defvjp(lambda x, y: (tripled(x, y), None), lambda res, g: (g, g))


def shifted(a: Any, b: Any, c: Any, d: Any) -> Any:
    """Return a loop in which `a` reaches the last output in the fourth iteration."""
    (a, b, c), stack = jax.lax.scan(
        lambda s, x: ((s[0], s[0] % 5, s[1]), s[2] + x), (a, b, c), d + jnp.arange(4)
    )
    return a, b, c, stack[3]


def nested(a: Any, b: Any, c: Any, d: Any) -> Any:
    """Return nested loops: the inner loop moves `a` to `b`, and the outer loop moves `b` to `c`."""

    def outer(s: Any, _: Any) -> Any:
        inner = jax.lax.fori_loop(0, 2, lambda i, t: (t[0], t[0] % 3), s[:2])
        return (*inner, s[1]), None

    return *jax.lax.scan(outer, (a, b, c), length=3)[0], d


def turns(a: Any, b: Any, c: Any, d: Any) -> Any:
    """Return a loop whose number of iterations depends on `a`. Each iteration adds `b` to `c`."""
    i, c = jax.lax.while_loop(lambda s: s[0] < a, lambda s: (s[0] + 1, (s[1] + b) % 7), (0, c))
    return i, c, b, d


def idle(a: Any, b: Any, c: Any, d: Any) -> Any:
    """Return a loop that never changes `b`."""
    return *jax.lax.while_loop(
        lambda s: s[0] < a, lambda s: (s[0] + 1, s[1] * 1, s[2]), (0, b, c)
    ), d


ZOO: dict[str, tuple[Any, list[str]]] = {
    "plain": (lambda a, b, c, d: (a + b, b * c, c, 7), ["ab", "bc", "c", ""]),
    "scan": (shifted, ["a", "ab", "abc", "abcd"]),
    "reversed": (lambda a, b, c, d: jax.lax.scan(lambda s, x: (x, s + b), a, jnp.stack([c, d]),
                                                 reverse=True),
                 ["acd", "abcd"]),
    "nested": (nested, ["a", "ab", "abc", "d"]),
    "while": (turns, ["a", "abc", "b", "d"]),
    "idle": (idle, ["a", "ab", "c", "d"]),
    "branches": (lambda a, b, c, d: jax.lax.cond(a > 0, lambda: (b, c, 3), lambda: (b, d, 4)),
                 ["b", "acd", "a"]),
    "switch": (lambda a, b, c, d: jax.lax.switch(2, [lambda: a, lambda: b, lambda: c * d]),
               ["abcd"]),
    "known branch": (lambda a, b, c, d: jax.lax.switch(jnp.minimum(1, 5),
                                                       [lambda: a, lambda: b * c]), ["abc"]),
    "remat": (jax.checkpoint(lambda a, b, c, d: (a * b, d - c)), ["ab", "cd"]),
    "call": (lambda a, b, c, d: jax.jit(lambda x, y: (x + x, y))(a, jax.jit(operator.mul)(c, d)),
             ["a", "cd"]),
    "rules": (lambda a, b, c, d: (*halved(a, b), *tripled(c, d)), ["a", "b", "c", "d"]),
    "constants": (lambda a, b, c, d: jax.lax.scan(lambda s, x: (s, s * x), a, np.arange(3)),
                  ["a", "a"]),
}  # fmt: skip
INPUTS = "abcd"


def traced(name: str) -> Any:
    return jax.make_jaxpr(ZOO[name][0])(*(jnp.int32(n) for n in (3, 2, 1, 5)))


# -- what enters a value ---------------------------------------------------------------------------


def read_rule(eqn: Any, outs: Any) -> Any:
    return None if has_bodies(eqn) else [frozenset().union(*outs)] * len(eqn.invars)


def enter_rule(eqn: Any, ins: Any) -> Any:
    return None if has_bodies(eqn) else [frozenset().union(*ins)] * len(eqn.outvars)


@pytest.mark.parametrize("name", ZOO)
def test_inputs_enter_the_outputs_that_are_made_of_them(name: str) -> None:
    """The forward driver and the backward driver find the same inputs."""
    inner = opened(traced(name))
    enters = ForwardAnalysis[Any](
        operator.or_, enter_rule, lambda aval, value: frozenset(), decide=operator.or_
    )
    facts = forward_jaxpr(enters, inner, [frozenset(n) for n in INPUTS])
    assert ["".join(sorted(facts.of(a))) for a in inner.outvars] == ZOO[name][1]
    reads = BackwardAnalysis[Any](operator.or_, read_rule, frozenset())
    ends = [(a, frozenset([i])) for i, a in enumerate(inner.outvars)]
    found = backward(reads, inner.eqns, ends)
    for n, v in zip(INPUTS, inner.invars, strict=True):
        assert found.of(v) == {i for i, names in enumerate(ZOO[name][1]) if n in names}, n


# -- which numbers a value may be ------------------------------------------------------------------

MOST = 40  # possible values of a number; a larger set is `ANY`
ANY = None


def numbers_of(value: Any) -> Any:
    return frozenset(np.asarray(value).ravel().tolist())


def either(a: Any, b: Any) -> Any:
    return ANY if a is ANY or b is ANY or len(a | b) > MOST else a | b


def computed(eqn: Any, ins: Any) -> Any:
    """Return all results of an elementwise equation, for all values of its operands."""
    if has_bodies(eqn):
        return None
    if ANY in ins or eqn.primitive.name == "iota":
        return [ANY] * len(eqn.outvars)
    outs: list[Any] = [frozenset() for _ in eqn.outvars]
    for numbers in itertools.product(*ins):
        made = eqn.primitive.bind(
            *(
                jnp.full(a.aval.shape, n, a.aval.dtype)
                for a, n in zip(eqn.invars, numbers, strict=True)
            ),
            **eqn.params,
        )
        made = made if eqn.primitive.multiple_results else [made]
        outs = [either(x, numbers_of(y)) for x, y in zip(outs, made, strict=True)]
    return outs


NUMBERS = ForwardAnalysis[Any](
    either,
    computed,
    lambda aval, value: ANY if value is None else numbers_of(value),
    branch=lambda index: None if index is ANY or len(index) > 1 else int(*index),
)


@pytest.mark.parametrize("name", ZOO)
def test_values_are_among_the_numbers_of_their_facts(name: str) -> None:
    jaxpr = traced(name)
    args = [jnp.int32(n) for n in (3, 2, 1, 5)]
    facts = forward_jaxpr(NUMBERS, jaxpr, [numbers_of(x) for x in args])
    loops = name in ("scan", "reversed", "nested", "while", "idle", "constants")
    for a, value in zip(opened(jaxpr).outvars, evaluate(jaxpr, *args), strict=True):
        fact = facts.of(a)
        assert fact is ANY or numbers_of(value) <= fact
        assert loops or fact == numbers_of(value), "without loops a value is one number, and known"
    if name == "nested":
        assert [facts.of(a) for a in opened(jaxpr).outvars] == [{3}, {2, 0}, {1, 2, 0}, {5}]
    if name == "idle":
        assert [facts.of(a) for a in opened(jaxpr).outvars] == [ANY, {2}, {1}, {5}]


# -- stacks, bodies --------------------------------------------------------------------------------


def test_stacks_have_one_dimension_more_than_their_turns() -> None:
    """A fact is a dimension. Dimension 1 of the stack is dimension 0 in an iteration."""
    rule = lambda eqn, ins: None if has_bodies(eqn) else [min(ins)] * len(eqn.outvars)
    axis = ForwardAnalysis[int](
        max,
        rule,
        lambda aval, value: 9,
        slice_fact=lambda axis: axis - 1,
        stack=lambda axis: axis + 1,
    )
    jaxpr = jax.make_jaxpr(lambda x: jax.lax.scan(lambda s, row: (s, jnp.sin(row)), 0.0, x))(
        jnp.zeros((2, 3))
    )
    facts = forward_jaxpr(axis, jaxpr, [1])
    _, stack = opened(jaxpr).outvars
    (entered,) = facts.entered.values()
    assert facts.of(stack) == 1
    assert entered.operands == [9, 1]
    (inside,) = entered.bodies.values()
    assert [
        inside.of(e.outvars[0]) for e in opened(jaxpr.eqns[0].params["jaxpr"]).eqns if e.invars
    ] == [0]


def test_a_branch_that_is_not_taken_is_not_entered() -> None:
    (entered,) = (
        x
        for x in forward_jaxpr(NUMBERS, traced("known branch"), [ANY] * 4).entered.values()
        if x.decision == {1}
    )
    assert list(entered.bodies) == [1]


def test_what_no_rule_describes_has_the_default() -> None:
    jaxpr = jax.make_jaxpr(lambda x: jnp.sin(x) + 1)(1.0)
    silent = ForwardAnalysis[str](
        lambda a, b: a + b, lambda eqn, ins: None, lambda aval, value: str(value)
    )
    assert forward_jaxpr(silent, jaxpr, ["x"]).of(opened(jaxpr).outvars[0]) == "None"
    mute = BackwardAnalysis[int](max, lambda eqn, outs: None, 0)
    assert (
        backward(mute, jaxpr.eqns, [(opened(jaxpr).outvars[0], 1)]).of(opened(jaxpr).invars[0]) == 0
    )
