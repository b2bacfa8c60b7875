"""Every optimizer of optax: three servers compute the results of one device.

Each case of `optimizer_zoo.py` runs five steps of a plan with three servers, two trainers and the
smallest blocks, one equation after the other. The reference is `tx.update` on the mean gradient,
compiled as one program for one device. The largest difference in a leaf, state included, is below
1e-12 of its largest number in float64, and below 1e-5 in float32.

bfloat16 leaves must be equal, bit for bit. Both sides round after each equation, because `quick`
forbids XLA to keep more precision, and JAX reduces bfloat16 in float32. A difference of 1e-7 in
such a sum shows only if the sum is near the boundary between two numbers of bfloat16.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import optimizer_zoo
import pytest
from helpers import (
    as_numpy,
    assemble,
    distance,
    no_full_shapes,
    quick,
    reads_only_what_was_there_or_made_before,
    serve,
    start_servers,
)
from hypothesis import given, settings, strategies as st
from optimizer_zoo import CASES, REFUSED, SCHEDULES, STEPS, TRAINERS, Case, gradients, loss, plan_of
from paths import DOCS

import dtrans
from dtrans._jax import constants, opened, scan_counts, while_counts


LIMIT = {"float64": 1e-12, "float32": 1e-5}
PAGE = DOCS / "optimizers.md"


@pytest.fixture(params=["float64", pytest.param("float32", marks=pytest.mark.rotated)])
def dtype(request):
    with jax.enable_x64(request.param == "float64"):
        yield jnp.dtype(request.param)


# -- servers by hand, and one device ---------------------------------------------------------------


def one_by_one(jaxpr, *args):
    """Evaluate a closed jaxpr one equation at a time, with one compilation of each equation for all
    cases."""
    inner = opened(jaxpr)
    env = dict(zip([*inner.invars, *inner.constvars], [*args, *constants(jaxpr)], strict=True))
    read = lambda a: jnp.asarray(a.val, a.aval.dtype) if hasattr(a, "val") else env[a]
    for eqn in inner.eqns:
        operands, p = [a.val if hasattr(a, "val") else env[a] for a in eqn.invars], eqn.params
        if eqn.primitive.name == "cond":
            made = one_by_one(p["branches"][int(operands[0])], *operands[1:])
        elif eqn.primitive.name == "while":
            n, m = while_counts(eqn)[0], sum(while_counts(eqn))
            made = operands[m:]
            while one_by_one(p["cond_jaxpr"], *operands[:n], *made)[0]:
                made = one_by_one(p["body_jaxpr"], *operands[n:m], *made)
        elif eqn.primitive.name == "scan":
            n, m = scan_counts(eqn)[0], sum(scan_counts(eqn))
            made, turns = operands[n:m], []
            for t in range(p["length"])[:: -1 if p["reverse"] else 1]:
                outs = one_by_one(p["jaxpr"], *operands[:n], *made, *(x[t] for x in operands[m:]))
                made, turn = outs[: m - n], outs[m - n :]
                turns.append(turn)
            made += map(jnp.stack, zip(*turns[:: -1 if p["reverse"] else 1], strict=True))
        else:
            made = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(p))
            made = made if eqn.primitive.multiple_results else [made]
        env.update(zip(eqn.outvars, made, strict=True))
    return [read(a) for a in inner.outvars]


LIMIT = {"float64": 1e-12, "float32": 1e-5}


def received(case, params, step):
    """Return the gradients of each trainer: as trees, and by the names that servers use."""
    trees = [gradients(case.trained(params), step, k) for k in range(TRAINERS)]
    prefix = "params/fast" if case.pair else "params"
    return trees, [{f"{prefix}/{n}": g for n, g in tree.items()} for tree in trees]


class OneDevice:
    """Optimizer on full arrays, on one device."""

    def __init__(self, case, dtype):
        tx = case.make()
        self.params = case.params(dtype)
        self.state = tx.init(self.params)

        @quick
        def step(params, state, grads):
            mean = jax.tree.map(lambda *g: sum(g[1:], start=g[0]) * (1 / len(g)), *grads)
            updates, state = tx.update(mean, state, params)
            return optax.apply_updates(params, updates), state

        self.compiled = step

    def step(self, grads):
        self.params, self.state = self.compiled(self.params, self.state, grads)

    def named(self, plan):
        """Return parameters and state by the names of the plan."""
        flat = plan.main.flatten(self.params, self.state, jnp.ones(2))
        return dict(zip(plan.main.in_names[:-1], flat[:-1], strict=True))


def compare(plan, held, device, dtype, what):
    """Compare the state of the servers with the state of one device."""
    whole = device.named(plan)
    got = assemble(plan, held, list(whole))
    assert set(got) == set(whole) - set(plan.frozen)
    for name, value in got.items():
        far = distance(value, whole[name])
        limit = 0 if value.dtype == jnp.bfloat16 else LIMIT[dtype.name]
        assert far <= limit, f"{what}: {name} is off by {far:.3g}"


def check(case, plan, dtype, steps=STEPS):
    """Check that the numbers are equal, and that all parameters are trained and stay finite."""
    device = OneDevice(case, dtype)
    before, moved = device.named(plan), set()
    held = start_servers(plan, device.params, evaluate=one_by_one)
    for step in range(steps):
        trees, by_name = received(case, device.params, step)
        held = serve(plan, held, by_name, evaluate=one_by_one)
        device.step(trees)
        compare(plan, held, device, dtype, f"step {step}")
        now = device.named(plan)
        moved |= {n for n in plan.placement.blocks if not np.array_equal(now[n], before[n])}
    for name in plan.placement.blocks:
        assert np.isfinite(now[name]).all(), name
        assert (name in moved) != (name.removeprefix("params/") in case.still), (
            f"{name} is trained or not"
        )


# -- every optimizer -------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_three_servers_give_what_one_device_gives(name, dtype):
    case = CASES[name]
    plan = plan_of(case, dtype)
    check(case, plan, dtype)
    structure(plan)
    # the row of the table describes this plan, whose numbers were compared
    assert optimizer_zoo.row(name, plan) in PAGE.read_text().splitlines()


def structure(plan):
    """Check that each leaf is sliced into the smallest blocks, or that the plan gives a reason."""
    no_full_shapes(plan)
    reads_only_what_was_there_or_made_before(plan)
    finest = {
        "embedding": 3,
        "few": 2,
        "half": 3,
        "kernel": 3,
        "one_row": 1,
        "scalar": 1,
        "wave": 3,
    }
    text = str(plan)
    for leaf, blocks in plan.placement.blocks.items():
        if leaf in plan.placement.reasons_unsliced:
            reason = plan.placement.reasons_unsliced[leaf]
            assert len(blocks) == 1 and reason
            assert f"{leaf}: whole on {blocks[0].endpoint}: {reason}" in text
        else:
            assert len(blocks) == finest[leaf.rpartition("/")[2]], leaf
    for reductions in plan.traffic.rounds:
        for r in reductions:
            assert len(r.over) > 1 and math.prod(r.shape) <= 4, f"{r} is larger than a row"


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.without])
def test_what_is_left_out_is_what_optax_cannot_train(name, dtype):
    """On one device, optax raises an error, or an update changes the type of the state."""
    tx, params = CASES[name].make(), optimizer_zoo.leaves(dtype)
    try:
        state = jax.eval_shape(tx.init, params)
        _, new = jax.eval_shape(tx.update, params, state, params)
    except (IndexError, TypeError) as e:
        assert "raises a" in "".join(CASES[name].without.values()) and type(e).__name__ in str(
            CASES[name].without
        )
    else:
        types = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
        assert types(new) != types(state)


class Crowded(dtrans.PSDispatcher):
    """Dispatcher that assigns all blocks except the last to the first server, and none to the
    second.

    The first server must combine the parts of its blocks.
    """

    def dispatch(self, varlist):
        first, _, last = self.eps
        leaves = [v.name.partition(".block")[0] for v in varlist]
        return [first if leaf in leaves[i + 1 :] else last for i, leaf in enumerate(leaves)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name",
    ["lamb", "adafactor", "sm3", "dowg", "apply_if_finite", "flatten", "muon", "multi_transform"],
)
def test_servers_may_have_several_blocks_of_a_leaf_or_none(name, dtype):
    plan = plan_of(CASES[name], dtype, split_method=Crowded)
    first, _, last = plan.servers
    if "params/embedding" not in plan.placement.reasons_unsliced:
        assert [b.endpoint for b in plan.placement.blocks["params/embedding"]] == [
            first,
            first,
            last,
        ]
    check(CASES[name], plan, dtype, steps=3)
    structure(plan)


PARTS = {
    "clip": lambda rest: optax.chain(optax.clip(0.8), rest),
    "clip_by_global_norm": lambda rest: optax.chain(optax.clip_by_global_norm(3.0), rest),
    "adaptive_grad_clip": lambda rest: optax.chain(optax.adaptive_grad_clip(1.0), rest),
    "clip_by_block_rms": lambda rest: optax.chain(optax.clip_by_block_rms(0.7), rest),
    "add_noise": lambda rest: optax.chain(optax.add_noise(0.01, 0.5, key=0), rest),
    "centralize": lambda rest: optax.chain(optax.centralize(), rest),
    "scale_by_trust_ratio": lambda rest: optax.chain(optax.scale_by_trust_ratio(), rest),
    "MultiSteps": lambda rest: optax.MultiSteps(rest, 2).gradient_transformation(),
    "apply_if_finite": lambda rest: optax.apply_if_finite(rest, 2),
    "masked": lambda rest: optax.chain(
        optax.masked(optax.scale_by_adam(), optimizer_zoo.by_leaf), rest
    ),
    "flatten": optax.flatten,
}


@given(st.permutations(list(PARTS)))
@settings(max_examples=max(3, settings().max_examples // 3), derandomize=True)
def test_any_chain_of_three_gives_the_same_on_servers(names):
    """Each transformation wraps the next one, and gradient descent is the innermost."""

    def make():
        tx = optax.sgd(0.1)
        for name in reversed(names[:3]):
            tx = PARTS[name](tx)
        return tx

    with jax.enable_x64(True):
        case, dtype = Case(make), jnp.dtype(jnp.float64)
        plan = plan_of(case, dtype)
        check(case, plan, dtype, steps=2)
        structure(plan)


# -- decisions that all servers must take together -------------------------------------------------


def test_an_inf_in_one_slice_stops_every_leaf_on_every_server(dtype):
    case = CASES["apply_if_finite"]
    plan = plan_of(case, dtype)
    device = OneDevice(case, dtype)
    held = start_servers(plan, device.params, evaluate=one_by_one)
    trees, by_name = received(case, device.params, 0)
    held = serve(plan, held, by_name, evaluate=one_by_one)
    device.step(trees)
    params, state = device.params, device.state
    counts = {
        "opt_state/notfinite_count": 1,
        "opt_state/last_finite": False,
        "opt_state/total_notfinite": 1,
    }
    for k, block in enumerate(plan.placement.all_blocks):
        leaf, first = block.leaf.removeprefix("params/"), block.span.start if block.span else 0
        trees, by_name = received(case, params, 1)
        bad = trees[k % TRAINERS]
        where = (first, *(0,) * (bad[leaf].ndim - 1)) if bad[leaf].ndim else ()
        bad[leaf] = bad[leaf].at[where].set([jnp.inf, -jnp.inf, jnp.nan][k % 3])
        by_name[k % TRAINERS][block.leaf] = bad[leaf]
        new = serve(plan, held, by_name, evaluate=one_by_one)
        for endpoint, values in new.items():
            assert set(counts) <= set(values)
            for name, value in values.items():
                if name in counts:
                    assert value == counts[name], (block.name, endpoint, name)
                else:
                    assert np.array_equal(as_numpy(value), as_numpy(held[endpoint][name])), (
                        block.name,
                        name,
                    )
        device.params, device.state = params, state
        device.step(trees)
        compare(plan, new, device, dtype, block.name)
    for step in (2, 3):  # continue from the last of these
        trees, by_name = received(case, params, step)
        new = serve(plan, new, by_name, evaluate=one_by_one)
        device.step(trees)
        compare(plan, new, device, dtype, f"step {step} after an inf")


@pytest.mark.parametrize(
    "name", ["MultiSteps", "MultiSteps, global norm inside", "MultiSteps, skip_large_updates"]
)
def test_micro_batches_make_an_update_every_other_step(name):
    """The five steps contain updates, and steps without an update.

    For skip_large_updates, they contain skipped updates.
    """
    case = CASES[name]
    device = OneDevice(case, jnp.dtype(jnp.float32))
    moved = []
    for step in range(STEPS):
        before = device.params["kernel"]
        device.step(received(case, device.params, step)[0])
        moved.append(not np.array_equal(device.params["kernel"], before))
    assert moved == [False, True, False, "skip" not in name, False]


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_server_can_do_is_refused_by_name(name):
    refusal = REFUSED[name]
    with pytest.raises(refusal.error, match=refusal.match):
        plan_of(
            Case(
                refusal.make,
                without={"half": "half of these mix types, which they would say first"},
            )
        )


@pytest.mark.parametrize("name", ["polyak_sgd", "reduce_on_plateau", "momo", "momo_adam"])
def test_a_step_that_hands_the_loss_to_its_update_is_refused_by_name(name):
    tx, params = REFUSED[name].make(), optimizer_zoo.leaves(jnp.float32, {"half"})

    def step(params, opt_state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params, value=value)
        return optax.apply_updates(params, updates), opt_state, value

    init = lambda params: (params, tx.init(params))
    main = dtrans.trace(step, *jax.eval_shape(init, params), jnp.ones(2))
    with pytest.raises(
        dtrans.errors.OptimizerError, match=f"{name.removesuffix('_sgd')} uses loss"
    ):
        dtrans.pserver(
            main, dtrans.trace(init, params), pservers="127.0.0.1:6170,127.0.0.1:6171", trainers=2
        )


# -- the table -------------------------------------------------------------------------------------


def test_every_optimizer_and_schedule_that_there_is_has_a_row():
    have = {name.partition(", ")[0] for name in (*CASES, *REFUSED)}
    missing = sorted(set(optimizer_zoo.exported()) - have)
    assert not missing, f"optimizer_zoo.py says nothing about {', '.join(missing)}"
    assert sorted(SCHEDULES) == sorted(optimizer_zoo.exported_schedules())
    assert len(CASES) == sum(map(len, optimizer_zoo.GROUPS.values())), "a name is used twice"


@pytest.mark.soak
def test_the_table_in_the_documentation_is_what_the_code_makes():
    assert PAGE.read_text() == optimizer_zoo.document(), "run `make docs`"
