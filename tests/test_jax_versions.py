"""What differs from one JAX to the next is known in `dtrans._jax` and in the tables of primitives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from dtrans._jax import equations, lowered_jaxpr, map_bodies, opened, scan_counts, scan_with, while_counts
from dtrans.ir.inline import inline_calls
from dtrans.rows.rules import ELEMENTWISE, RULES


def loops(fn, *args):
    return [e for e in equations(lowered_jaxpr(fn, *args)) if e.primitive.name in ("scan", "while")]


def test_the_operands_of_a_scan_are_counted_by_kind():
    w = jnp.ones((3, 3))

    def fn(v, h, xs):
        return jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x @ v), (h, 2 * x)), h, xs)

    (eqn,) = loops(fn, jnp.ones((2, 3)), jnp.ones(3), jnp.ones((5, 2)))
    consts, carried = scan_counts(eqn)
    assert [a.aval.shape for a in eqn.invars[:consts]] in ([(2, 3), (3, 3)], [(3, 3), (2, 3)])
    assert [a.aval.shape for a in eqn.invars[consts : consts + carried]] == [(3,)]
    assert [a.aval.shape for a in eqn.invars[consts + carried :]] == [(5, 2)]
    assert [v.aval.shape for v in eqn.outvars[carried:]] == [(5, 3), (5, 2)]


def test_the_operands_of_a_while_are_counted_by_kind():
    def fn(limit, by, x):
        return jax.lax.while_loop(lambda s: s[0] < limit, lambda s: (s[0] + 1, s[1] * by), (0, x))

    (eqn,) = loops(fn, jnp.int32(3), jnp.ones(4), jnp.ones(4))
    of_cond, of_body = while_counts(eqn)
    assert (of_cond, of_body) == (1, 1)
    assert [a.aval.shape for a in eqn.invars] == [(), (4,), (), (4,)]


@pytest.mark.parametrize("consts, carried, taken, made", [(0, 1, 1, 0), (2, 0, 1, 2), (1, 2, 3, 1), (0, 1, 0, 1)])
def test_a_scan_is_written_with_other_stacks(consts, carried, taken, made):
    """One stack more goes in and comes out; what it computes of the others stays."""

    def fn(fixed, carry, parts, more):
        def turn(carry, parts):
            one = sum(fixed, sum(carry, sum(parts, jnp.float32(0))))
            return [one + k for k in range(carried)], [one * k for k in range(made)]

        return jax.lax.scan(turn, carry, parts, length=4)

    args = [jnp.float32(2)] * consts, [jnp.float32(3)] * carried, [jnp.arange(4.0)] * taken, jnp.arange(4.0)
    jaxpr = jax.make_jaxpr(fn)(*args)
    inner = opened(jaxpr)
    (eqn,) = (e for e in inner.eqns if e.primitive.name == "scan")
    first = scan_counts(eqn)

    def body(*operands):
        return [*jax.core.eval_jaxpr(opened(eqn.params["jaxpr"]), [], *operands[:-1]), operands[-1] + 1]

    longer = jax.make_jaxpr(body)(*(v.aval for v in opened(eqn.params["jaxpr"]).invars), jnp.float32(0))
    out = type(eqn.outvars[0])(jax.typeof(jnp.ones(4, jnp.float32)))
    new = scan_with(eqn, longer, [*eqn.invars, inner.invars[-1]], [*eqn.outvars, out])
    assert scan_counts(new) == first
    eqns = [new if e is eqn else e for e in inner.eqns]
    program = inner.replace(eqns=eqns, outvars=[*inner.outvars, out], debug_info=inner.debug_info.with_unknown_names())
    *old, stack = jax.core.eval_jaxpr(program, jaxpr.consts, *jax.tree.leaves(args))
    for a, b in zip(jax.tree.leaves(fn(*args)), old, strict=True):
        assert jnp.array_equal(a, b)
    assert jnp.array_equal(stack, jnp.arange(4.0) + 1)


def test_bodies_are_mapped_wherever_a_parameter_holds_them():
    """A linear solve keeps its in a tuple that has names; a branch in one that has none."""
    a, b = jnp.eye(3), jnp.ones(3)

    def fn(a, b):
        return jax.lax.cond(b[0] > 0, lambda: jnp.linalg.solve(a, b), lambda: b)

    jaxpr = inline_calls(lowered_jaxpr(fn, a, b))
    seen = []

    def twice(body):
        seen.append(body)
        return body

    for eqn in equations(jaxpr):
        made = map_bodies(eqn.params, twice)
        assert made == dict(eqn.params)
        assert [type(v) for v in made.values()] == [type(v) for v in eqn.params.values()]
    assert len(seen) > 5


ACTIVATIONS = {
    "tanh": jnp.tanh,
    "mish": jax.nn.mish,
    "gelu": jax.nn.gelu,
    "exact gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "silu": jax.nn.silu,
    "softplus": jax.nn.softplus,
    "log2": jnp.log2,
    "exp2": jnp.exp2,
    "polyval": lambda x: jnp.polyval(jnp.array([1.0, 2.0, 3.0]), x, unroll=8),
    "normal cdf": jax.scipy.stats.norm.cdf,
    "inverse normal cdf": jax.scipy.special.ndtri,
    "sinc": jnp.sinc,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_their_derivatives_keep_rows(name):
    """An unknown primitive is no error: a layer would be gathered, a leaf would live whole on one server."""
    fn = ACTIVATIONS[name]
    both = lambda x, g: jax.vjp(fn, x)[1](g)
    jaxpr = inline_calls(lowered_jaxpr(both, jnp.full((4, 3), 0.5), jnp.ones((4, 3))))
    strange = {e.primitive.name for e in equations(jaxpr)} - ELEMENTWISE - RULES.keys() - {"iota", "scan"}
    assert not strange
