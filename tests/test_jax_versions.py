"""Differences between versions of JAX: only `dtrans._jax` and the tables of primitives depend on
them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import dtrans
from dtrans._jax import (
    FACTS,
    Primitive,
    axes_of,
    bodies,
    bulletin_board,
    checkpoint_name_of,
    equations,
    facts_of,
    is_reversed,
    lowered_jaxpr,
    map_bodies,
    opened,
    scan_counts,
    scan_length,
    scan_with,
    while_counts,
    with_bodies,
)
from dtrans._jax.versions import NEWEST_TESTED, warn_untested
from dtrans.engine.rules import RULES as SPLIT_RULES
from dtrans.engine.split import split
from dtrans.errors import TraceError, UnknownPrimitiveWarning, UntestedJaxWarning
from dtrans.ir.inline import inline_calls
from dtrans.rows.parts import RULES as PART_RULES
from dtrans.rows.rules import RULES


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


@pytest.mark.parametrize(
    "consts, carried, taken, made", [(0, 1, 1, 0), (2, 0, 1, 2), (1, 2, 3, 1), (0, 1, 0, 1)]
)
def test_a_scan_is_written_with_other_stacks(consts, carried, taken, made):
    """Add one stacked input and one stacked output to a scan. The other outputs do not change."""

    def fn(fixed, carry, parts, more):
        def turn(carry, parts):
            one = sum(fixed, sum(carry, sum(parts, jnp.float32(0))))
            return [one + k for k in range(carried)], [one * k for k in range(made)]

        return jax.lax.scan(turn, carry, parts, length=4)

    args = (
        [jnp.float32(2)] * consts,
        [jnp.float32(3)] * carried,
        [jnp.arange(4.0)] * taken,
        jnp.arange(4.0),
    )
    jaxpr = jax.make_jaxpr(fn)(*args)
    inner = opened(jaxpr)
    (eqn,) = (e for e in inner.eqns if e.primitive.name == "scan")
    first = scan_counts(eqn)

    def body(*operands):
        return [*jax.core.eval_jaxpr(opened(*bodies(eqn)), [], *operands[:-1]), operands[-1] + 1]

    longer = jax.make_jaxpr(body)(*(v.aval for v in opened(*bodies(eqn)).invars), jnp.float32(0))
    out = type(eqn.outvars[0])(jax.typeof(jnp.ones(4, jnp.float32)))
    new = scan_with(eqn, longer, [*eqn.invars, inner.invars[-1]], [*eqn.outvars, out])
    assert scan_counts(new) == first
    eqns = [new if e is eqn else e for e in inner.eqns]
    program = inner.replace(
        eqns=eqns, outvars=[*inner.outvars, out], debug_info=inner.debug_info.with_unknown_names()
    )
    *old, stack = jax.core.eval_jaxpr(program, jaxpr.consts, *jax.tree.leaves(args))
    for a, b in zip(jax.tree.leaves(fn(*args)), old, strict=True):
        assert jnp.array_equal(a, b)
    assert jnp.array_equal(stack, jnp.arange(4.0) + 1)


def test_bodies_are_mapped_wherever_a_parameter_holds_them():
    """A linear solve stores its bodies in a tuple with names, and a branch stores its bodies in a
    plain tuple."""
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
    """An unknown primitive raises no error, but a layer would be gathered, or a leaf would be
    stored on one server."""
    fn = ACTIVATIONS[name]
    both = lambda x, g: jax.vjp(fn, x)[1](g)
    jaxpr = inline_calls(lowered_jaxpr(both, jnp.full((4, 3), 0.5), jnp.ones((4, 3))))
    known = RULES.keys() | {"iota", "scan"}
    keeps_rows = lambda e: facts_of(e).elementwise or facts_of(e).axes or e.primitive.name in known
    strange = [e for e in equations(jaxpr) if not keeps_rows(e)]
    assert not strange


# -- accessors -------------------------------------------------------------------------------------


def of_kind(name, fn, *args):
    return next(e for e in equations(jax.make_jaxpr(fn)(*args)) if e.primitive.name == name)


def a_scan():
    return of_kind(
        "scan", lambda x: jax.lax.scan(lambda c, x: (c + x, c), 0.0, x, reverse=True), jnp.ones(4)
    )


def test_accessors_say_what_equations_are():
    scan = a_scan()
    assert (scan_length(scan), is_reversed(scan), scan_counts(scan)) == (4, True, (0, 1))
    cond = of_kind("cond", lambda x: jax.lax.cond(x > 0, jnp.sin, jnp.cos, x), 1.0)
    assert [opened(b).eqns[0].primitive.name for b in bodies(cond)] == ["cos", "sin"]
    loop = of_kind("while", lambda x: jax.lax.while_loop(lambda x: x < 3, lambda x: x + 1, x), 1.0)
    assert [opened(b).eqns[0].primitive.name for b in bodies(loop)] == ["lt", "add"]
    for eqn in (scan, cond, loop):
        assert with_bodies(eqn, bodies(eqn)).items() <= eqn.params.items()
    (psum,) = jax.make_jaxpr(lambda x: jax.lax.psum(x, "i"), axis_env=[("i", 2)])(1.0).eqns
    assert axes_of(psum) == ["i"]
    assert axes_of(of_kind("reduce_sum", lambda x: x.sum(1), jnp.ones((2, 2)))) == [1]


def test_a_name_is_found_in_both_of_its_forms():
    named = jax.make_jaxpr(lambda x: checkpoint_name(x * 2, "here"))(1.0)
    assert [checkpoint_name_of(e) for e in equations(named)] == [None, "here"]


def test_a_key_that_is_gone_is_named():
    """A future JAX may lack a key. The error names the version of JAX, the equation and the key."""
    scan = a_scan()
    counts = {"num_consts", "num_carry", "ft_in", "ft_out"}
    without = lambda keys: scan.replace(
        params={k: v for k, v in scan.params.items() if k not in keys}
    )
    for keys, ask, gone in (
        ({"jaxpr"}, bodies, "jaxpr"), ({"length"}, scan_length, "length"),
        ({"reverse"}, is_reversed, "reverse"),
        (counts, scan_counts, "num_consts"),
    ):  # fmt: skip
        with pytest.raises(
            TraceError,
            match=rf"^the primitive scan of jax {jax.__version__} has no parameter '{gone}', only ",
        ):
            ask(without(keys))


def test_a_version_that_is_answered_wrongly_is_noticed():
    """A scan in the format of another version of JAX is read in that format."""
    scan = a_scan()

    class Trees:
        def unpack(self):
            return (), (1,), ()

    other = {"num_consts": 0, "num_carry": 1} if "ft_in" in scan.params else {"ft_in": Trees()}
    params = {
        k: v
        for k, v in scan.params.items()
        if k not in ("num_consts", "num_carry", "ft_in", "ft_out")
    } | other
    assert scan_counts(scan.replace(params=params)) == scan_counts(scan) == (0, 1)


# -- primitives that no table knows ----------------------------------------------------------------


def new_primitive_of_jax():
    """Return a primitive that a future JAX might have: it doubles its operand."""
    double = Primitive("double")
    double.def_impl(lambda x: 2 * x)
    double.def_abstract_eval(lambda x: x)
    return double


def test_an_unknown_primitive_in_an_update_is_named():
    double = new_primitive_of_jax()

    def step(params, opt_state, x):
        loss, grads = dtrans.value_and_grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(params)
        return {"w": params["w"] - 0.1 * double.bind(grads["w"])}, opt_state, loss

    init = lambda: ({"w": jnp.ones((8, 2))}, ())
    main, startup = dtrans.trace(step, *init(), jnp.ones((4, 8))), dtrans.trace(init)
    words = (
        r"^double \(test_jax_versions.py:\d+\) is assumed to mix rows, so params/w is not sliced$"
    )
    with pytest.warns(UnknownPrimitiveWarning, match=words):
        plan = dtrans.pserver(
            main, startup, pservers="a:1,b:1", placement=dtrans.BlockPlacement(min_block_size=1)
        )
    assert len(plan.placement.blocks["params/w"]) == 1
    assert "double, which dtrans does not know, mixes rows of f32[8,2]" in str(plan)
    words = (
        r"^double \(test_jax_versions.py:\d+\) is assumed to mix rows, so its operands "
        r"are gathered$"
    )
    with pytest.warns(UnknownPrimitiveWarning, match=words):
        plan = dtrans.sharding(main, startup, degree=2, slices=dtrans.Slicing(min_slice_size=0))
    assert list(plan.slices.leaves) == ["params/w"]
    assert "the update gathers float32[8, 2], 64 bytes, for double of f32[8,2]" in str(plan)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_unknown_primitive_in_a_split_layer_is_named(where):
    double = new_primitive_of_jax()

    @jax.custom_vjp
    def layer(x):
        return double.bind(x) if where == "forward" else 2 * x

    layer.defvjp(
        lambda x: (layer(x), None), lambda _, g: (double.bind(g) if where == "backward" else 2 * g,)
    )
    fn = jax.value_and_grad(lambda w, x: jnp.sum(layer(x @ w) ** 2))
    jaxpr = inline_calls(lowered_jaxpr(fn, jnp.ones((4, 4)), jnp.ones((2, 4))))
    with pytest.warns(
        UnknownPrimitiveWarning,
        match="^double .*is assumed to mix rows, so its operands are gathered$",
    ):
        split(jaxpr, {0: 1}, 2, "model")


def test_an_unknown_primitive_in_an_init_is_named():
    double = new_primitive_of_jax()
    tx = optax.sgd(0.1)
    init = lambda: (p := {"w": double.bind(jnp.arange(16.0).reshape(8, 2))}, tx.init(p))
    step = dtrans.make_train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), tx)
    main = dtrans.trace(step, *jax.eval_shape(init), jnp.ones((4, 8)))
    placement = dtrans.BlockPlacement(min_block_size=1)
    with pytest.warns(
        UnknownPrimitiveWarning, match="^double .*each server computes its outputs in full$"
    ):
        dtrans.pserver(main, dtrans.trace(init), pservers="a:1,b:1", placement=placement)


def test_every_table_of_rules_is_of_known_primitives():
    own = {"after", "all_reduce"}
    for rules in (RULES, PART_RULES, SPLIT_RULES):
        assert set(rules) - FACTS.keys() - own == set()


def test_a_jax_that_was_not_tested_is_said(monkeypatch):
    monkeypatch.setattr(
        jax, "__version__", f"{NEWEST_TESTED[0]}.{NEWEST_TESTED[1] + 1}.0.dev20990101"
    )
    with pytest.warns(
        UntestedJaxWarning, match=r"^dtrans was tested with jax up to [\d.]+, and this is "
    ):
        warn_untested()


def test_a_store_that_has_moved_is_named(monkeypatch):
    monkeypatch.delattr("jax.experimental.multihost_utils.distributed")
    with pytest.raises(
        TraceError,
        match=rf"^dtrans cannot read the state of jax.distributed in jax {jax.__version__} "
        r".*'distributed'",
    ):
        bulletin_board()
