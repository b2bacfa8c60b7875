"""Test the division of a program whose inputs are stored on several stages.

The programs are written by hand, drawn at random, or are the updates of optimizers.
"""

from __future__ import annotations

import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, strategies as st
from pipeline_models import MODELS, compiled_quickly

import dtrans
from dtrans._jax import Literal, Var, evaluate
from dtrans.ir.program import OPTIMIZE
from dtrans.pipeline_parallel.stage_programs import program_of
from dtrans.pipeline_parallel.update_by_stage import grouped, place


def program(fn, **inputs):
    """Return the program of a function of named arrays, which returns a dict of arrays."""
    made = jax.make_jaxpr(fn)(*inputs.values())
    outs = [*jax.eval_shape(fn, *inputs.values())]
    return program_of("test", made, [*inputs], outs, OPTIMIZE)


def run(placed, values, places):
    """Return the outputs in each place that needs them. A place reads only its own values."""
    inner = placed.program.jaxpr.jaxpr
    env = {}
    for n, v in zip(placed.program.in_names, inner.invars, strict=True):
        home = placed.stage_of_input[n]
        env |= {(p, v): values[n] for p in (range(places) if home is None else [home])}
    sends = dict.fromkeys(placed.sends)
    assert len(sends) == len(placed.sends), "sent twice"

    def deliver():
        for v, origin, target in [s for s in sends if (s[1], s[0]) in env]:
            assert (target, v) not in env, "it is there already"
            env[target, v] = env[origin, v]
            del sends[v, origin, target]

    deliver()
    for piece in placed.pieces:
        missing = [v for v in piece.reads if (piece.place, v) not in env]
        assert not missing, f"{piece.place} reads what was neither made there nor sent: {missing}"
        made = evaluate(piece.jaxpr, *(env[piece.place, v] for v in piece.reads))
        assert not any((piece.place, v) in env for v in piece.outputs), "made twice"
        env |= {(piece.place, v): x for v, x in zip(piece.outputs, made, strict=True)}
        deliver()
    assert not sends, "sent, and never made"
    found = {}
    for n, a in zip(placed.program.out_names, inner.outvars, strict=True):
        at = placed.stage_of_output[n]
        for p in range(places) if at is None else [at]:
            found[n, p] = a.val if isinstance(a, Literal) else env[p, a]
    return found


def check(p, home, out_at, places, values):
    """Check that the pieces together compute the program. Return the placement."""
    placed = place(p, home, out_at, places)
    want = dict(zip(p.out_names, evaluate(p.jaxpr, *(values[n] for n in p.in_names)), strict=True))
    for (n, at), x in run(placed, values, places).items():
        assert np.array_equal(x, want[n]), (n, at)
    return placed


def primitives(piece):
    return [e.primitive.name for e in piece.jaxpr.jaxpr.eqns]


def described(placed):
    return [(piece.place, primitives(piece)) for piece in placed.pieces]


ONE, TWO, THREE = (jnp.asarray(x) for x in (1.0, 2.0, 3.0))


def test_what_is_in_one_place_stays_there():
    p = program(lambda a, b: {"x": jnp.sin(a) * a, "y": jnp.cos(b)}, a=ONE, b=TWO)
    placed = check(p, {"a": 0, "b": 1}, {"x": 0, "y": 1}, 2, {"a": ONE, "b": TWO})
    assert described(placed) == [(0, ["sin", "mul"]), (1, ["cos"])]
    assert not placed.sends


def test_what_is_of_several_places_is_made_at_the_hub_and_sent():
    """The last place is the hub, which may store none of the inputs."""
    p = program(lambda a, b: {"x": a * (total := a + b), "y": b - total}, a=ONE, b=TWO)
    placed = check(p, {"a": 0, "b": 1}, {"x": 0, "y": 1}, 3, {"a": ONE, "b": TWO})
    assert described(placed) == [(2, ["add"]), (0, ["mul"]), (1, ["sub"])]
    assert sorted(s[1:] for s in placed.sends) == [(0, 2), (1, 2), (2, 0), (2, 1)]


@pytest.mark.parametrize("places", [4, 5])
def test_a_sum_over_all_places_is_made_at_the_hub_at_once(places):
    """Each place sends its term to the hub once, and receives the sum.

    With four places, the hub has a term, too.
    """

    def fn(*xs):
        total = jnp.sin(xs[0])
        for x in xs[1:]:
            total = total + jnp.sin(x)
        return {f"new{i}": x / jnp.sqrt(total) for i, x in enumerate(xs)}

    values = {f"x{i}": jnp.asarray(i + 1.0) for i in range(4)}
    home, out_at = ({f"{n}{i}": i for i in range(4)} for n in ("x", "new"))
    placed = check(program(fn, **values), home, out_at, places, values)
    hub, elsewhere = places - 1, [p for p in range(4) if p != places - 1]
    assert sorted(s[1:] for s in placed.sends) == sorted(
        [(p, hub) for p in elsewhere] + [(hub, p) for p in elsewhere]
    )
    assert [piece.place for piece in placed.pieces] == [0, 1, 2, 3, hub, *elsewhere]


def test_what_only_the_hub_made_goes_on_there():
    p = program(lambda a, b: {"x": jnp.sqrt(jnp.sin(a + b)) * a}, a=ONE, b=TWO)
    placed = check(p, {"a": 0, "b": 1}, {"x": 0}, 3, {"a": ONE, "b": TWO})
    assert described(placed) == [(2, ["add", "sin", "sqrt"]), (0, ["mul"])]


def test_what_every_place_has_is_made_where_it_is_read():
    p = program(
        lambda a, b, count: {"x": a / (n := count + 1), "y": b / n, "count": n},
        a=ONE,
        b=TWO,
        count=THREE,
    )
    home = {"a": 0, "b": 1, "count": None}
    placed = check(
        p, home, {"x": 0, "y": 1, "count": None}, 3, {"a": ONE, "b": TWO, "count": THREE}
    )
    assert described(placed) == [(0, ["add", "div"]), (1, ["add", "div"]), (2, ["add"])]
    assert not placed.sends


def test_outputs_that_are_inputs_numbers_or_wanted_elsewhere():
    p = program(
        lambda a, b: {"x": a, "one": 1.0 + 0 * ONE, "b": jnp.sin(b), "all": jnp.cos(a)},
        a=ONE,
        b=TWO,
    )
    placed = check(
        p, {"a": 0, "b": 1}, {"x": 1, "one": 0, "b": 0, "all": None}, 3, {"a": ONE, "b": TWO}
    )
    assert sorted(s[1:] for s in placed.sends) == [(0, 1), (0, 1), (0, 2), (1, 0)]


def test_there_and_back_and_there_again():
    """Two reductions over several places, where the second needs the first.

    Vectors stay in their places.
    """

    def fn(a, b):
        first = jnp.sum(a) + jnp.sum(b)
        x, y = a * first, b * first
        second = jnp.sum(jnp.sin(x)) + jnp.sum(jnp.sin(y))
        return {"x": x + second, "y": y - second}

    values = {"a": jnp.arange(4.0), "b": jnp.arange(3.0)}
    placed = check(program(fn, **values), {"a": 0, "b": 1}, {"x": 0, "y": 1}, 3, values)
    assert [piece.place for piece in placed.pieces] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert all(v.aval.shape == () for v, _, _ in placed.sends)


def test_nothing_is_made_that_nobody_wants():
    p = program(lambda a, b: {"x": jnp.sin(a)}, a=ONE, b=TWO)
    assert described(place(p, {"a": 0, "b": 1}, {"x": 0}, 2)) == [(0, ["sin"])]
    p = program(lambda a, b: {"x": (jnp.cos(a + b), jnp.sin(a))[1]}, a=ONE, b=TWO)
    placed = place(p, {"a": 0, "b": 1}, {"x": 0}, 2)
    assert described(placed) == [(0, ["sin"])] and not placed.sends


def test_constants_are_wherever_they_are_read():
    table = np.arange(3.0)
    p = program(lambda a, b: {"x": a * table, "y": b + jnp.asarray(table)}, a=ONE, b=TWO)
    placed = check(p, {"a": 0, "b": 1}, {"x": 0, "y": 1}, 2, {"a": ONE, "b": TWO})
    assert not placed.sends


# -- drawn programs --------------------------------------------------------------------------------

UNARY = (jnp.sin, jnp.negative, jnp.exp2, jnp.sign)
BINARY = (jnp.add, jnp.multiply, jnp.maximum)


@st.composite
def placements(draw):
    """Draw a program of equations on vectors, the places of its inputs, and the places that need
    its outputs.

    One equation has two outputs.
    """
    places = draw(st.integers(1, 4))
    where = st.one_of(st.none(), st.integers(0, places - 1))
    homes = draw(st.lists(where, min_size=1, max_size=5))
    choices = draw(st.lists(st.tuples(*[st.integers(0, 99)] * 3), min_size=1, max_size=14))
    inputs = {f"in{i}": jnp.asarray([0.5, -1.0, 0.25]) * (i + 1) for i in range(len(homes))}

    def all_values(*given):
        values = list(given)
        for kind, i, j in choices:
            a, b = values[i % len(values)], values[j % len(values)]
            if kind % 3 == 0:
                values.append(UNARY[kind % len(UNARY)](a) * 0.5)
            elif kind % 3 == 1:
                values.append(BINARY[kind % len(BINARY)](a, b))
            else:
                values += jax.lax.sort((a, b), num_keys=1)
        return values

    count = len(jax.eval_shape(all_values, *inputs.values()))
    wanted = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=6, unique=True))
    out_at = {f"out{k}": draw(where) for k in wanted}
    p = program(lambda *given: {f"out{k}": all_values(*given)[k] for k in wanted}, **inputs)
    return p, dict(zip(inputs, homes, strict=True)), out_at, places, inputs


@given(placements())
def test_pieces_in_order_with_sends_are_the_program(case):
    p, home, _, places, _ = case
    placed = check(*case)
    made = [
        (piece.place, v)
        for piece in placed.pieces
        for e in piece.jaxpr.jaxpr.eqns
        for v in e.outvars
    ]
    assert len(made) == len(set(made)), "no place makes anything twice"
    # values of one place are computed there; values of inputs that all places have are computed
    # everywhere, and not sent
    shared = {v for n, v in zip(p.in_names, p.jaxpr.jaxpr.invars, strict=True) if home[n] is None}
    for e in p.jaxpr.jaxpr.eqns:
        if all(not isinstance(a, Var) or a in shared for a in e.invars):
            shared |= {*e.outvars}
    assert not any(v in shared for v, _, _ in placed.sends)
    for e in p.jaxpr.jaxpr.eqns:
        at = {
            piece.place for piece in placed.pieces if any(v in made_here(piece) for v in e.outvars)
        }
        assert len(at) <= (places if e.outvars[0] in shared else 1)
    for piece in placed.pieces:
        read = {a for e in piece.jaxpr.jaxpr.eqns for a in e.invars if isinstance(a, Var)}
        assert set(piece.reads) <= read, "it reads what it does not use"
        assert set(piece.outputs) <= made_here(piece)


def made_here(piece):
    return {v for e in piece.jaxpr.jaxpr.eqns for v in e.outvars}


@given(placements(), st.integers(1, 3))
def test_groups_of_outputs_are_taken_apart(case, count):
    p, home, out_at, places, values = case
    placed = place(p, home, out_at, places)
    group = {n: i % count for i, n in enumerate(p.out_names) if i % 4 < 3}
    apart = grouped(placed, group)
    whole, parts = run(placed, values, places), run(apart, values, places)
    assert whole.keys() == parts.keys()
    assert all(np.array_equal(whole[k], parts[k]) for k in whole)
    of = {
        a: group[n] for n, a in zip(p.out_names, p.jaxpr.jaxpr.outvars, strict=True) if n in group
    }
    for piece in apart.pieces:
        groups = {of[v] for v in piece.outputs if v in of}
        others = [v for v in piece.outputs if v not in of]
        read_later = [
            v
            for v in piece.outputs
            if any(v in later.reads for later in apart.pieces if later is not piece)
        ]
        assert len(groups) < 2 or others or read_later, (
            "groups are together only where another needs of them"
        )


# -- updates ---------------------------------------------------------------------------------------


def planned(tx, num_stages=4, **options):
    of = MODELS["mlp"].job(16, tx)
    return flat_options.pipeline(*of.traced(), num_stages=num_stages, num_micro_batch=2, **options)


def square_roots(piece):
    return primitives(piece).count("sqrt") + primitives(piece).count("rsqrt")


@pytest.mark.parametrize(
    "tx", [optax.adam(0.1), optax.sgd(0.1, momentum=0.9), optax.adamw(optax.constant_schedule(0.1))]
)
def test_elementwise_updates_are_one_piece_for_each_stage(tx):
    plan = planned(tx)
    placed = plan.update.placed
    assert sorted(piece.place for piece in placed.pieces) == [0, 1, 2, 3]
    assert not placed.sends
    for piece in placed.pieces:
        of = {n for n in plan.update.program.in_names if plan.home(n) == piece.place}
        names = dict(
            zip(plan.update.program.jaxpr.jaxpr.invars, plan.update.program.in_names, strict=True)
        )
        assert {names[v] for v in piece.reads} - of <= {
            n for n in names.values() if plan.home(n) is None
        }


def test_a_clip_by_the_global_norm_is_three_layers_of_scalars():
    """Each stage computes sums of squares, the last stage the norm, each stage its updates.

    One number is sent in each direction.
    """
    plan = planned(optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)))
    placed = plan.update.placed
    count = 4
    assert [piece.place for piece in placed.pieces[:count]] == [0, 1, 2, 3]
    squares, hub, rest = placed.pieces[:count], placed.pieces[count], placed.pieces[count + 1 :]
    assert all("reduce_sum" in primitives(piece) and not square_roots(piece) for piece in squares)
    here = list(plan.model.homes.values())
    # the norm, and Adam's equations for the leaves of this stage
    assert hub.place == 3 and square_roots(hub) == 1 + here.count(3)
    assert [(piece.place, square_roots(piece)) for piece in rest] == [
        (p, here.count(p)) for p in range(3)
    ]
    to_hub = [s for s in placed.sends if s[2] == 3]
    back = [s for s in placed.sends if s[1] == 3]
    assert len(to_hub) + len(back) == len(placed.sends)
    assert {s[1] for s in to_hub} == {s[2] for s in back} == {0, 1, 2}
    assert all(v.aval.shape == () for v, _, _ in placed.sends)


SCALARS = {
    "clip": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)),
    "clip twice": lambda: optax.chain(
        optax.clip_by_global_norm(0.1), optax.adam(0.1), optax.clip_by_global_norm(1.0)
    ),
}


@pytest.mark.parametrize("name", SCALARS)
@pytest.mark.parametrize("stages", [2, 4])
def test_only_scalars_go_to_the_hub(name, stages):
    """Updates that read the state of all stages send only scalars. No gradient leaves its stage."""
    sends = planned(SCALARS[name](), stages).update.placed.sends
    assert sends and all(v.aval.shape == () for v, _, _ in sends)


def test_counts_of_steps_are_in_every_stage():
    """Each stage has a copy of state that belongs to no leaf, and all copies change equally."""
    of = MODELS["mlp"].job(16, optax.adam(optax.linear_schedule(0.1, 0.0, 10)))
    plan = dtrans.pipeline(*of.traced(), num_stages=4, num_micro_batch=2)
    counts = [n for n in plan.main.args[1].names if n.endswith("count")]
    assert len(counts) == 2 and all(plan.home(n) is None for n in counts)
    assert all(plan.home(n) is not None for n in plan.main.args[1].names if n not in counts)
    with compiled_quickly():
        job = plan.on_mesh()
        state = job.init(jax.random.key(0))
        for _ in range(2):
            state, _ = job.step(state, *of.batch)
    copies = [state.opt_state[n] for n in counts] + [*state.extra.values()]
    assert [int(x) for x in copies] == [2] * 8
    assert len({d for x in copies for d in x.devices()}) == 4


def test_state_is_in_the_stage_of_its_leaf():
    plan = planned(optax.adam(0.1))
    for n in plan.main.args[1].names:
        kind, _, leaf = n.removeprefix("opt_state/0/").partition("/")
        if kind in ("mu", "nu"):
            assert plan.home(n) == plan.model.homes[f"params/{leaf}"]


def test_results_of_gradients_are_made_at_the_last_stage():
    of = MODELS["mlp"].job(16, gradients=True)
    plan = dtrans.pipeline(*of.traced(), num_stages=3, num_micro_batch=2)
    names = [
        n
        for n in plan.update.program.out_names
        if n.partition("/")[0] not in ("params", "opt_state")
    ]
    assert len(names) == 11 and all(plan.update.placed.stage_of_output[n] == 2 for n in names)
