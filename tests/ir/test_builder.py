"""Reading and rebuilding jaxprs: inline calls, drop dead equations, copy equations.

JAX's type checker accepts every result, and the result computes the same values as the original.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    closes_remat,
    distance,
    evaluate,
    mlp_batch,
    mlp_loss,
    mlp_params,
    plain_step,
    quick,
)

from dtrans._jax import (
    Literal,
    bodies,
    closed_with,
    equations,
    has_bodies,
    lowered_jaxpr,
    opened,
    scope_of,
)
from dtrans.ir.builder import Builder, extract_part, read_from
from dtrans.ir.dataflow import backward_slice, free_variables
from dtrans.ir.inline import eliminate_dead, inline_calls


CALLS = {"jit", "pjit", "custom_jvp_call", "custom_vjp_call", "closed_call", "core_call"}


def checked(jaxpr):
    jax.extend.core.check_jaxpr(opened(jaxpr))
    assert len(opened(jaxpr).constvars) == len(jaxpr.consts)
    return jaxpr


def same(jaxpr, fn, *args, rtol=1e-6):
    """Check that the jaxpr computes the function."""
    got = quick(lambda *a: evaluate(jaxpr, *a))(*jax.tree.leaves(args))
    want = jax.tree.leaves(quick(fn)(*args))
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert distance(a, b) <= rtol


def kinds(jaxpr):
    return [e.primitive.name for e in opened(jaxpr).eqns]


TABLE = np.arange(3.0, dtype=np.float32)


@jax.jit
def closes_over(x):
    return x * jnp.asarray(TABLE) + jax.nn.relu(x)


@jax.custom_jvp
def with_jvp(x):
    return jnp.sin(x) * 2


@with_jvp.defjvp
def _(primals, tangents):
    return with_jvp(*primals), jnp.cos(primals[0]) * 2 * tangents[0]


@jax.custom_vjp
def with_vjp(x):
    return jnp.exp(x)


with_vjp.defvjp(lambda x: (jnp.exp(x), x), lambda x, g: (g * jnp.exp(x),))


@jax.jit
def nested(x):
    @jax.jit
    def inner(y):
        with jax.named_scope("deep"):
            return with_vjp(jnp.tanh(y))

    with jax.named_scope("outer"):
        return inner(x) + inner(2 * x)


@jax.jit
def swaps(a, b):
    return b, a, 1.0


X = jnp.linspace(-1.0, 1.0, 3)
FUNCTIONS = {
    "plain": lambda x: jnp.sin(x) + 1,
    "closes_over": lambda x: closes_over(x) + closes_over(2 * x),
    "custom_jvp": lambda x: with_jvp(x) + jax.nn.relu(x),
    "custom_vjp": lambda x: with_vjp(x),
    "nested": lambda x: nested(x) + nested(jnp.cos(x)),
    "grad_of_custom": jax.grad(lambda x: jnp.sum(nested(x) * with_jvp(x))),
    "hands_through": lambda x: swaps(x, x + 1),
    "scan": lambda x: jax.lax.scan(lambda c, a: (c + nested(a), c), jnp.zeros(()), x),
    "remat": jax.grad(jax.checkpoint(lambda x: jnp.sum(nested(x)))),
    "vmap": jax.vmap(lambda v: nested(v) * 2),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_inlining_keeps_what_is_computed(name):
    fn = FUNCTIONS[name]
    jaxpr = checked(inline_calls(lowered_jaxpr(fn, X)))
    assert not CALLS & set(kinds(jaxpr))
    same(jaxpr, fn, X)


def test_inlining_keeps_the_order_and_number_of_equations():
    jaxpr = lowered_jaxpr(lambda x: jnp.cos(nested(jnp.sin(x))), X)
    flat = inline_calls(jaxpr)
    assert kinds(flat) == ["sin", "tanh", "exp", "mul", "tanh", "exp", "add", "cos"]


def test_a_body_called_twice_gets_variables_of_its_own():
    flat = inline_calls(lowered_jaxpr(FUNCTIONS["nested"], X))
    made = [v for e in flat.jaxpr.eqns for v in e.outvars]
    assert len(made) == len(set(made))
    assert kinds(flat).count("exp") == 4


def test_inlining_a_step_twice_changes_nothing_more():
    once = inline_calls(
        jax.make_jaxpr(plain_step(mlp_loss, optax.sgd(0.1)))(
            mlp_params(), optax.sgd(0.1).init(mlp_params()), *mlp_batch()
        )
    )
    twice = inline_calls(once)
    assert kinds(once) == kinds(twice)
    assert [e.outvars for e in once.jaxpr.eqns] == [e.outvars for e in twice.jaxpr.eqns]


def test_name_stacks_are_kept_under_that_of_the_call():
    def fn(x):
        with jax.named_scope("top"):
            return nested(x)

    flat = inline_calls(lowered_jaxpr(fn, X))
    scopes = {e.primitive.name: scope_of(e) for e in flat.jaxpr.eqns}
    for part in ("top", "outer", "deep"):
        assert part in scopes["exp"].split("/")
    assert scopes["exp"].index("top") < scopes["exp"].index("outer") < scopes["exp"].index("deep")
    assert "outer" in scopes["add"] and "deep" not in scopes["add"]


def test_transposed_equations_of_an_inner_jit_are_known_as_such():
    flat = inline_calls(
        jax.make_jaxpr(jax.jit(jax.grad(jax.jit(lambda x: jnp.sum(jnp.sin(x))))))(X)
    )
    assert any("transpose(" in scope_of(e) for e in flat.jaxpr.eqns)


def test_a_constant_of_several_calls_is_hoisted_once():
    table = jnp.asarray(TABLE)

    @jax.jit
    def f(x):
        return x * table

    flat = checked(inline_calls(jax.make_jaxpr(lambda x: f(x) + f(x + 1))(X)))
    assert sum(1 for c in flat.consts if np.shape(c) == (3,)) == 1
    same(flat, lambda x: f(x) + f(x + 1), X)


@closes_remat
def test_remat_loops_and_branches_stay():
    def fn(x):
        y = jax.checkpoint(jnp.sin)(x)
        return jax.lax.cond(
            x[0] > 0, jnp.sin, jnp.cos, jax.lax.fori_loop(0, 3, lambda i, z: z * 2, y)
        )

    flat = inline_calls(lowered_jaxpr(fn, X))
    assert (
        {"cond"} <= set(kinds(flat))
        and {"scan", "while"} & set(kinds(flat))
        and any("remat" in k or "checkpoint" in k for k in kinds(flat))
    )
    same(flat, fn, X)


def test_a_jit_that_asks_for_a_sharding_stays():
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    fn = jax.jit(lambda x: x + 1, out_shardings=where)
    assert kinds(inline_calls(jax.make_jaxpr(lambda x: fn(x) * 2)(X))) == ["jit", "mul"]


# -- needed and dead code --------------------------------------------------------------------------


def chain(x, y):
    a = jnp.sin(x)
    b = jnp.cos(a)
    c = jnp.exp(y)
    return b + c, jnp.tanh(c)


def test_needed_finds_equations_and_what_they_read():
    jaxpr = inline_calls(jax.make_jaxpr(chain)(X, X))
    x, y = jaxpr.jaxpr.invars
    eqns = jaxpr.jaxpr.eqns
    both, tanh = jaxpr.jaxpr.outvars
    assert kinds(jaxpr) == ["sin", "cos", "exp", "add", "tanh"]
    assert backward_slice(eqns, [tanh]) == ([2, 4], {y})
    assert backward_slice(eqns, [both]) == ([0, 1, 2, 3], {x, y})
    a = eqns[0].outvars[0]
    assert backward_slice(eqns, [both], [a]) == ([1, 2, 3], {a, y})
    assert backward_slice(eqns, [a], [a]) == ([], {a})
    assert backward_slice(eqns, [x]) == ([], {x})
    assert backward_slice(eqns, []) == ([], set())


def test_dead_equations_and_constants_go_and_inputs_stay():
    table = jnp.asarray(TABLE)

    def fn(x, y):
        dead = jnp.sum(x * table) * jnp.exp(y)
        del dead
        return jnp.sin(x)

    live = checked(eliminate_dead(jax.make_jaxpr(fn)(X, X)))
    assert kinds(live) == ["sin"] and live.consts == [] and len(live.jaxpr.invars) == 2
    same(live, fn, X, X)


def test_dead_code_goes_inside_loops_too():
    def fn(x):
        (_, used), _ = jax.lax.scan(
            lambda c, a: ((c[0] + jnp.exp(a), c[1] + a), jnp.cos(a)), (0.0, 0.0), x
        )
        return used

    live = checked(eliminate_dead(jax.make_jaxpr(fn)(X)))
    assert not {"exp", "cos"} & {e.primitive.name for e in equations(live)}
    same(live, fn, X)


# -- the builder -----------------------------------------------------------------------------------


def rebuilt(jaxpr):
    """Return a copy of a jaxpr; each equation is copied."""
    b = Builder(jaxpr)
    env = {v: b.input(v.aval) for v in jaxpr.jaxpr.invars}
    read = lambda a: a if isinstance(a, Literal) else env.get(a, a)
    for eqn in jaxpr.jaxpr.eqns:
        env.update(zip(eqn.outvars, b.copy(eqn, [read(a) for a in eqn.invars]), strict=True))
    return b.build([read(a) for a in jaxpr.jaxpr.outvars])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_copy_of_every_equation_is_the_same_program(name):
    jaxpr = inline_calls(jax.make_jaxpr(FUNCTIONS[name])(X))
    copy = checked(rebuilt(jaxpr))
    assert kinds(copy) == kinds(jaxpr)
    assert not {v for e in copy.jaxpr.eqns for v in e.outvars} & {
        v for e in jaxpr.jaxpr.eqns for v in e.outvars
    }
    same(copy, FUNCTIONS[name], X)


@pytest.mark.parametrize("rows,columns", [(1, 3), (2, 3), (5, 1)])
def test_a_copy_on_other_shapes_works_types_out_anew(rows, columns):
    fn = lambda x: jnp.tanh(x) * 2 + jnp.where(x > 0, x, 0.0)
    jaxpr = inline_calls(jax.make_jaxpr(fn)(jnp.ones((4, 3))))
    b = Builder(jaxpr)
    env = {jaxpr.jaxpr.invars[0]: b.input(jaxpr.jaxpr.invars[0].aval.update(shape=(rows, columns)))}
    for eqn in jaxpr.jaxpr.eqns:
        if eqn.primitive.name == "broadcast_in_dim":
            made = b.copy(eqn, [_look(env, a) for a in eqn.invars], shape=(rows, columns))
        else:
            made = b.copy(eqn, [_look(env, a) for a in eqn.invars])
        env.update(zip(eqn.outvars, made, strict=True))
    out = checked(b.build([env[jaxpr.jaxpr.outvars[0]]]))
    x = jnp.linspace(-1, 1, rows * columns).reshape(rows, columns)
    assert out.jaxpr.outvars[0].aval.shape == (rows, columns)
    same(out, fn, x)


def _look(env, atom):
    return atom if isinstance(atom, Literal) else env[atom]


def test_only_constants_that_are_used_are_kept():
    one, two = jnp.arange(3.0), jnp.arange(3.0) + 5
    jaxpr = jax.make_jaxpr(lambda x: (x * one, x * two))(X)
    b = Builder(jaxpr)
    b.invars += jaxpr.jaxpr.invars
    kept, _ = backward_slice(jaxpr.jaxpr.eqns, [jaxpr.jaxpr.outvars[1]])
    for i in kept:
        b.keep(jaxpr.jaxpr.eqns[i])
    half = checked(b.build([jaxpr.jaxpr.outvars[1]]))
    assert len(half.consts) == 1 and jnp.array_equal(half.consts[0], two)
    assert b.is_constant(half.jaxpr.constvars[0]) and jnp.array_equal(
        b.constant_value(half.jaxpr.constvars[0]), two
    )
    same(half, lambda x: x * two, X)


def test_bound_and_called_equations_carry_the_role_at_hand():
    jaxpr = jax.make_jaxpr(jnp.sin)(X)
    b = Builder(jaxpr)
    x = b.input(jaxpr.jaxpr.invars[0].aval)
    b.role = "forward"
    (y,) = b.copy(jaxpr.jaxpr.eqns[0], [x])
    b.role = "dist"
    (z,) = b.bind(jax.lax.add_p, y, b.constant(jnp.ones(3)))
    (w,) = b.call(_mean_of_two, z, y)
    out = checked(b.build([w]))
    assert (
        b.roles[:2] == ["forward", "dist"]
        and set(b.roles[2:]) == {"dist"}
        and len(b.roles) == len(out.jaxpr.eqns)
    )
    assert len(out.consts) == 1
    same(out, lambda x: (2 * jnp.sin(x) + 1) / 2, X)


def _mean_of_two(a, b):
    return (a + b) / 2


def test_a_function_that_closes_over_an_array_cannot_be_called_in():
    jaxpr = jax.make_jaxpr(jnp.sin)(X)
    b = Builder(jaxpr)
    x = b.input(jaxpr.jaxpr.invars[0].aval)
    with pytest.raises(AssertionError, match="closes over an array"):
        b.call(partial(jnp.multiply, jnp.arange(3.0)), x)


def scaled_bodies(k, x):
    """Return results of each kind of loop, a branch and a checkpoint.

    Each body multiplies by `k`.
    """
    table, limit = jnp.asarray(TABLE), 900 + x[1]
    carried, stack = jax.lax.scan(lambda c, row: ((c + row) * k, c * k), x, jnp.stack([x, table]))
    ended = jax.lax.while_loop(
        lambda s: jnp.sum(s) * k < limit, lambda s: (s + table) * k, jnp.abs(x) + 1
    )
    chosen = jax.lax.cond(x[0] > 0, lambda y: (y * table) * k, lambda y: (y - 1) * k, x)
    again = jax.checkpoint(lambda y: (jnp.sin(y) + table) * k)(x)
    return carried, stack, ended, chosen, again


def plain_bodies(x):
    table, limit = jnp.asarray(TABLE), 900 + x[1]
    carried, stack = jax.lax.scan(lambda c, row: (c + row, c), x, jnp.stack([x, table]))
    ended = jax.lax.while_loop(lambda s: jnp.sum(s) < limit, lambda s: s + table, jnp.abs(x) + 1)
    chosen = jax.lax.cond(x[0] > 0, lambda y: y * table, lambda y: y - 1, x)
    again = jax.checkpoint(lambda y: jnp.sin(y) + table)(x)
    return carried, stack, ended, chosen, again


@pytest.mark.parametrize("sign", [1, -1])
def test_bodies_take_operands_in_front_of_theirs(sign):
    """Multiply each body by a new operand. Constants of the checkpoint become operands."""
    x = sign * jnp.arange(1.0, 4.0)
    old = inline_calls(jax.make_jaxpr(plain_bodies)(x))
    b = Builder(old)
    factor = b.input(jax.typeof(jnp.float32(0)))
    b.invars += old.jaxpr.invars
    env = {}

    def scaled(body):
        inside = Builder(closed_with(body))
        first = inside.input(factor.aval)
        outs = inside.inline(
            closed_with(body), *(inside.input(v.aval) for v in opened(body).invars)
        )
        if [a.aval.dtype for a in outs] == [np.bool_]:  # the condition of the `while`
            total, limit = inside.eqns[-1].invars
            (product,) = inside.call(jnp.multiply, total, first)
            return inside.build(inside.call(jnp.less, product, limit))
        return inside.build([inside.call(jnp.multiply, a, first)[0] for a in outs])

    for eqn in old.jaxpr.eqns:
        atoms = read_from(env, eqn.invars)
        if not has_bodies(eqn):
            b.keep(eqn, atoms)
            continue
        made = b.copy_with_bodies(
            eqn, list(map(scaled, bodies(eqn))), atoms, [v.aval for v in eqn.outvars], [factor]
        )
        env |= zip(eqn.outvars, made, strict=True)
    jaxpr = checked(b.build(read_from(env, old.jaxpr.outvars)))
    assert {"scan", "while", "cond"} < set(kinds(jaxpr))
    same(jaxpr, scaled_bodies, jnp.float32(1.5), x)


def test_a_part_of_a_jaxpr_has_the_constants_that_it_reads():
    old = inline_calls(
        jax.make_jaxpr(lambda x, y: (jnp.sin(x) * TABLE, y - np.arange(9.0)[:3]))(
            *[jnp.ones(3)] * 2
        )
    )
    (x, y), (wanted, other) = old.jaxpr.invars, old.jaxpr.outvars
    eqns = [old.jaxpr.eqns[i] for i in backward_slice(old.jaxpr.eqns, [wanted])[0]]
    assert free_variables(eqns) == [
        x,
        *(v for v in old.jaxpr.constvars if v in free_variables(eqns)),
    ]
    part = checked(extract_part(old, [x], eqns, [wanted]))
    same(part, lambda x: jnp.sin(x) * TABLE, jnp.arange(3.0))

    b = Builder(part)
    given = b.input(y.aval)
    made = b.inline_part(old, {x: given}, eqns, [wanted])
    same(checked(b.build(made)), lambda x: jnp.sin(x) * TABLE, jnp.arange(3.0))
    assert other not in b.eqns[-1].outvars
