"""Scopes of the user.

Equations keep their scope through all transformations of JAX. Different scopes with one name are
distinguished, their text is the same in every trace, and scopes cannot be nested.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading

import jax
import jax.numpy as jnp
import pytest
from helpers import closes_remat

from dtrans._jax import equations, lowered_jaxpr, opened, scope_of
from dtrans.errors import ConfigError
from dtrans.ir.inline import inline_calls
from dtrans.step.scopes import Scope, numbered, replicate, scope_of_eqn, scopes_of, split


W, X = jnp.ones((4, 4)), jnp.ones((3, 4))


def scopes(fn, *args):
    """Return the scope of each equation of a traced function, by primitive."""
    with numbered():
        eqns = opened(inline_calls(lowered_jaxpr(fn, *args))).eqns
    return [(e.primitive.name, s) for e, s in zip(eqns, scopes_of(eqns), strict=True)]


def texts(fn, *args):
    with numbered():
        return [scope_of(e) for e in equations(lowered_jaxpr(fn, *args))]


# -- reading ---------------------------------------------------------------------------------------

WRAPPERS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "remat of jit": lambda f: jax.checkpoint(jax.jit(f)),
    "vmap": jax.vmap,
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
    "cond": lambda f: lambda x: jax.lax.cond(x[0, 0] > 0, f, lambda x: x, x),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("inside", [True, False], ids=["scope inside", "scope around"])
@pytest.mark.parametrize("scope", [replicate, split])
def test_a_scope_is_read_however_the_function_is_called(wrap, inside, scope):
    def inner(x):
        with scope(device_count=2, name="a part") if inside else contextlib.nullcontext():
            return jnp.sin(x) * 2

    def fn(x):
        x = jnp.exp(x)
        with contextlib.nullcontext() if inside else scope(device_count=2, name="a part"):
            x = wrap(inner)(x)
        return jnp.tanh(x)

    found = scopes(fn, X)
    want = Scope(scope.__name__, name="a part", device_count=2)
    assert found[0] == ("exp", None) and found[-1] == ("tanh", None)
    assert want in {s for _, s in found} <= {None, want}
    # the condition of the branch is computed outside of the scope that is inside the branch
    assert {n for n, s in found[1:-1] if s is None} <= {
        "slice",
        "squeeze",
        "gt",
        "convert_element_type",
    }


@pytest.mark.parametrize("wrap", [WRAPPERS[k] for k in ("plain", "jit", "remat", "scan")])
def test_derivatives_are_in_the_scope_of_what_they_are_derived_from(wrap):
    def loss(w):
        with replicate(name="a"):
            x = wrap(lambda w: jnp.sin(w @ w))(w)
        with replicate(name="b"):
            return jnp.sum(jnp.cos(x) ** 2)

    eqns = jax.make_jaxpr(jax.grad(loss))(W).jaxpr.eqns
    named = [(str(scope_of(e)), scope_of_eqn(e)) for e in eqns]
    backward = [s.name for text, s in named if text.startswith("transpose(") and s is not None]
    assert backward == sorted(backward, reverse=True) and set(backward) == {"a", "b"}
    forward = [s.name for text, s in named if not text.startswith("transpose(") and s is not None]
    assert set(forward) >= {"a", "b"}


@pytest.mark.parametrize(
    "name", ["stage0", "a/b", "x]y[z", "c:d:3", "jvp(e)", "überschrift", "100%", " "]
)
def test_any_name_is_read_back(name):
    def fn(x):
        with replicate(3, name):
            return jax.grad(lambda x: jnp.sin(x).sum())(x)

    assert {s for _, s in scopes(fn, X)} == {Scope("replicate", name=name, device_count=3)}
    jax.jit(fn)(X)  # and compiles


def test_scopes_of_others_are_none_of_ours():
    def fn(x):
        with jax.named_scope("replicate"), jax.named_scope("dtrans.replicate[oops"):
            return x * 2

    assert scopes(fn, X) == [("mul", None)]


# -- telling apart ---------------------------------------------------------------------------------


def test_each_entry_of_an_unnamed_scope_is_its_own_and_equal_names_are_one():
    def fn(x):
        for _ in range(3):
            with replicate():
                x = jnp.sin(x)
        for name in "aba":
            with replicate(name=name):
                x = jnp.cos(x)
        with replicate():
            return jnp.exp(x)

    found = [s for _, s in scopes(fn, X)]
    assert len(set(found[:3])) == 3 and found[3] == found[5] != found[4] and len(set(found)) == 6
    assert "replicate() in fn, line" in str(found[0]) and str(found[3]) == "replicate(name='a')"


def test_entries_through_a_helper_and_a_decorator_are_told_apart():
    def stage(f, x):
        with replicate():
            return f(x)

    @replicate()
    def decorated(x):
        return jnp.exp(x)

    found = scopes(lambda x: decorated(decorated(stage(jnp.cos, stage(jnp.sin, x)))), X)
    assert len({s for _, s in found}) == 4


def test_scopes_in_traced_functions_of_their_own_do_not_meet_those_around_them():
    def block(x):
        with replicate():
            return jnp.sin(x)

    def fn(x):
        return block(jax.jit(lambda x: block(x))(block(x)))

    assert len({s for _, s in scopes(fn, X)}) == 3


@closes_remat
@pytest.mark.parametrize("times", [1, 3])
def test_each_call_of_a_rematerialised_function_enters_its_scope_anew(times):
    @jax.checkpoint
    def block(x):
        with replicate():
            return jnp.sin(x)

    def fn(x):
        for _ in range(times):
            x = block(x)
        return x

    found = [s for _, s in scopes(fn, X)]
    assert len(set(found)) == times and None not in found


def test_a_name_says_one_number_of_devices():
    def fn(x):
        with replicate(1, "a"):
            x = jnp.sin(x)
        with replicate(2, "a"):
            return jnp.cos(x)

    with pytest.raises(
        ConfigError, match=r"replicate\(name='a'\) has device_count=1 and device_count=2"
    ):
        scopes(fn, X)


# -- the text --------------------------------------------------------------------------------------


def make_model():
    @jax.jit
    def jitted(x):
        with replicate():
            return jnp.cos(x)

    def model(x):
        for _ in range(2):
            with replicate():
                x = jnp.sin(x)
        x = jitted(x)
        with split(name="head"):
            return jax.checkpoint(lambda x: jnp.tanh(x))(x)

    return model


def test_text_is_the_same_in_every_trace():
    first = texts(make_model(), X)
    assert len({t for t in first if t}) == 4
    model = make_model()
    for _ in range(2):  # JAX's cache of the jitted part is used together with new equations
        assert texts(functools.partial(model), X) == first


def test_what_jax_kept_of_a_function_is_no_scope_of_a_later_trace():
    def block(x):
        with replicate():
            return jnp.sin(x)

    jitted = jax.jit(lambda x: block(x))
    model = lambda x: block(jitted(x))
    for _ in range(2):
        assert len({s for _, s in scopes(functools.partial(model), X)}) == 2


def test_threads_number_by_themselves():
    want = texts(make_model(), X)
    found: list[list[str]] = []
    go = threading.Barrier(3)

    def work():
        go.wait()
        for _ in range(3):
            found.append(texts(make_model(), X))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 9 and all(t == want for t in found)


def test_without_numbering_scopes_are_still_told_apart():
    model = make_model()
    one, other = (jax.make_jaxpr(functools.partial(model))(X) for _ in range(2))
    for jaxpr in (one, other):
        assert len(set(scopes_of(inline_calls(jaxpr).jaxpr.eqns))) == 4


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outer", "inner"),
    [(replicate, replicate), (split, split), (split, replicate), (replicate, split)],
)
def test_scopes_are_not_nested(outer, inner):
    def fn(x):
        with outer(name="around"), inner(name="within"):
            return jnp.sin(x)

    named = f"{inner.__name__}(name='within') is entered within {outer.__name__}(name='around')"
    with pytest.raises(ConfigError, match=re.escape(named)):
        jax.make_jaxpr(fn)(X)
    with replicate():  # the failed scope has left no state
        pass


def test_nesting_is_seen_in_what_jax_kept_of_a_jitted_function():
    @jax.jit
    def inner(x):
        with split(name="within"):
            return jnp.sin(x)

    def fn(x):
        with replicate(name="around"):
            return inner(x)

    inner(X)
    with pytest.raises(
        ConfigError,
        match=r"sin equation is in replicate\(name='around'\) and in split\(name='within'\)",
    ):
        scopes(fn, X)


def test_a_loop_has_one_scope():
    def body(x, _):
        with replicate(name="a"):
            x = jnp.sin(x)
        with replicate(name="b"):
            return jnp.cos(x), None

    with pytest.raises(
        ConfigError,
        match=r"one scan equation is in replicate\(name='a'\) and in replicate\(name='b'\)",
    ):
        scopes(lambda x: jax.lax.scan(body, x, None, length=2)[0], X)


@pytest.mark.parametrize("scope", [replicate, split])
@pytest.mark.parametrize(
    "options",
    [
        dict(device_count=0), dict(device_count=True), dict(device_count=1.0),
        dict(device_count="2"), dict(name=""),
        dict(name=3),
    ],
)  # fmt: skip
def test_wrong_options_are_named(scope, options):
    ((option, given),) = options.items()
    words = f"^{option} of {scope.__name__} must be a .*it is {re.escape(repr(given))}$"
    with pytest.raises(ConfigError, match=words), scope(**options):
        pass
