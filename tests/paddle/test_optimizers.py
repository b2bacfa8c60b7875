"""Paddle's optimizers: each against its kernel, written out in Python numbers, element after element, and against
what the rule must be in cases where another optimizer, or arithmetic, says so."""

from __future__ import annotations

import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import mlp_batch, mlp_loss, mlp_params, plain_run, plain_step, plan_of, tree_close, tree_equal

import dtrans
from dtrans.errors import ConfigError
from dtrans.paddle.optimizers import decayed_adagrad, ftrl, lars_momentum
from dtrans.rows.analysis import analyse
from dtrans.step.cut import cut


SHAPES = {"scalar": (), "vector": (5,), "row": (1, 4), "matrix": (3, 4), "cube": (2, 3, 2), "none": (0, 3)}
STEPS = 6


# -- the kernels, as ftrl_op.h, decayed_adagrad_op.h and lars_momentum_op.h have them ----------------


def ftrl_kernel(p, g, squared, linear, lr, l1=0.0, l2=0.0, lr_power=-0.5):
    """The functor of ftrl_op.h, which takes one element; the same formulas as `ftrl_step` in test_ftrl_op.py."""
    l1, l2 = l1 + 1e-10, l2 + 1e-10
    for i in np.ndindex(p.shape):
        new_acc = squared[i] + g[i] * g[i]
        if lr_power == -0.5:
            linear[i] += g[i] - (math.sqrt(new_acc) - math.sqrt(squared[i])) / lr * p[i]
        else:
            linear[i] += g[i] - (math.pow(new_acc, -lr_power) - math.pow(squared[i], -lr_power)) / lr * p[i]
        if math.fabs(linear[i]) > l1:
            x = -linear[i] + l1 if linear[i] >= 0 else -linear[i] - l1
            y = 2 * l2 + (math.sqrt(new_acc) if lr_power == -0.5 else math.pow(new_acc, -lr_power)) / lr
            p[i] = x / y
        else:
            p[i] = 0.0
        squared[i] += g[i] * g[i]


def decayed_adagrad_kernel(p, g, moment, lr, decay=0.95, epsilon=1e-6):
    for i in np.ndindex(p.shape):
        moment[i] = decay * moment[i] + (1 - decay) * g[i] * g[i]
        p[i] -= lr * g[i] / (math.sqrt(moment[i]) + epsilon)


def lars_momentum_kernel(
    p, g, velocity, lr, momentum, lars_coeff=0.001, lars_weight_decay=0.0005, epsilon=0.0, rescale_grad=1.0
):
    """By the kernel; `TestLarsMomentumOp` in test_momentum_op.py has the parameter itself for its norm in one place."""
    p_norm = math.sqrt(sum(p[i] ** 2 for i in np.ndindex(p.shape)))
    g_norm = math.sqrt(sum((rescale_grad * g[i]) ** 2 for i in np.ndindex(p.shape)))
    local_lr = lr
    if lars_weight_decay > 0 and p_norm > 0 and g_norm > 0:
        local_lr = lr * lars_coeff * p_norm / (g_norm + lars_weight_decay * p_norm + epsilon)
    for i in np.ndindex(p.shape):
        velocity[i] = velocity[i] * momentum + local_lr * (rescale_grad * g[i] + lars_weight_decay * p[i])
        p[i] -= velocity[i]


KERNELS = {
    ftrl: (ftrl_kernel, ("squared_accum", "linear_accum")),
    decayed_adagrad: (decayed_adagrad_kernel, ("moment",)),
    lars_momentum: (lars_momentum_kernel, ("velocity",)),
}

CASES = {
    "ftrl": (ftrl, dict(learning_rate=0.1)),
    "ftrl-l1": (ftrl, dict(learning_rate=0.3, l1=0.6)),
    "ftrl-l2": (ftrl, dict(learning_rate=0.3, l2=0.7)),
    "ftrl-l1-l2": (ftrl, dict(learning_rate=0.3, l1=0.1, l2=0.2)),
    "ftrl-power": (ftrl, dict(learning_rate=0.3, l1=0.1, l2=0.2, lr_power=-0.6)),
    "ftrl-power-plain": (ftrl, dict(learning_rate=0.3, lr_power=-0.25)),
    "ftrl-constant": (ftrl, dict(learning_rate=0.3, lr_power=0.0)),
    "decayed_adagrad": (decayed_adagrad, dict(learning_rate=0.01)),
    "decayed_adagrad-all": (decayed_adagrad, dict(learning_rate=0.1, decay=0.8, epsilon=0.3)),
    "lars": (lars_momentum, dict(learning_rate=5.0, momentum=0.9)),
    "lars-all": (
        lars_momentum,
        dict(learning_rate=2.0, momentum=0.5, lars_coeff=0.1, lars_weight_decay=0.3, epsilon=0.2, rescale_grad=0.25),
    ),
    "lars-no-decay": (lars_momentum, dict(learning_rate=0.1, momentum=0.9, lars_weight_decay=0.0)),
    "lars-negative-decay": (lars_momentum, dict(learning_rate=0.1, momentum=0.9, lars_weight_decay=-0.1)),
}
# one of each kind, where the options do not matter
SOME = ["ftrl-l1-l2", "ftrl-power", "decayed_adagrad", "lars-all", "lars-no-decay"]


def problem(dtype=np.float64, shapes=SHAPES, seed=0):
    """Parameters, and gradients for each of `STEPS` steps. A tenth of the gradients are 0."""
    rng = np.random.default_rng(seed)
    params = {n: jnp.asarray(rng.normal(size=s), dtype) for n, s in shapes.items()}
    grads = [
        {n: jnp.asarray(rng.normal(size=s) * (rng.random(s) > 0.1), dtype) for n, s in shapes.items()}
        for _ in range(STEPS)
    ]
    return params, grads


def run(tx, params, grads):
    """The job: one update after the other, eagerly."""
    state = tx.init(params)
    for g in grads:
        updates, state = tx.update(g, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def by_kernel(factory, options, params, grads):
    """What the kernel makes of each leaf, in float64: parameters, and accumulators by name."""
    kernel, names = KERNELS[factory]
    rest = {k: v for k, v in options.items() if k != "learning_rate"}
    done, accs = {}, {name: {} for name in names}
    for leaf, p in params.items():
        p = np.array(p, np.float64)
        held = [np.zeros_like(p) for _ in names]
        for step, g in enumerate(grads):
            lr = options["learning_rate"]
            kernel(p, np.asarray(g[leaf], np.float64), *held, lr=lr(step) if callable(lr) else lr, **rest)
        done[leaf] = p
        for name, acc in zip(names, held, strict=True):
            accs[name][leaf] = acc
    return done, accs


def check(factory, options, dtype, rtol):
    params, grads = problem(dtype)
    new, state = run(factory(**options), params, grads)
    want, accs = by_kernel(factory, options, params, grads)
    cast = lambda tree: {n: jnp.asarray(x, dtype) for n, x in tree.items()}
    tree_close(new, cast(want), rtol)
    for name, acc in accs.items():
        tree_close(getattr(state, name), cast(acc), rtol)


# -- the kernels -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_kernel_to_rounding(name):
    with jax.enable_x64(True):
        check(*CASES[name], np.float64, 1e-12)


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_kernel_in_single_precision(name):
    check(*CASES[name], np.float32, 2e-5)


@pytest.mark.parametrize("name", SOME)
def test_the_learning_rate_may_be_a_schedule(name):
    factory, options = CASES[name]
    with jax.enable_x64(True):
        schedule = lambda count: options["learning_rate"] * 0.5 ** (count // 2)
        check(factory, options | dict(learning_rate=schedule), np.float64, 1e-12)
        params, grads = problem()
        tx = factory(**options | dict(learning_rate=schedule))
        assert tx.init(params).count == 0
        assert run(tx, params, grads)[1].count == STEPS
        assert run(tx, params, grads)[1].count.dtype == jnp.int32
        # where nothing is scheduled nothing is counted
        state = factory(**options).init(params)
        assert state.count is None
        assert len(jax.tree.leaves(state)) == len(params) * (len(state) - 1)


def test_defaults_are_paddles():
    """python/paddle/fluid/optimizer.py, less what is not the rule's (names, regularization, precision)."""
    defaults = {
        f: {n: p.default for n, p in inspect.signature(f).parameters.items() if p.default is not p.empty}
        for f in KERNELS
    }
    assert defaults == {
        ftrl: dict(l1=0.0, l2=0.0, lr_power=-0.5),
        decayed_adagrad: dict(decay=0.95, epsilon=1e-6),
        lars_momentum: dict(
            lars_coeff=0.001, lars_weight_decay=0.0005, exclude_from_weight_decay=None, epsilon=0, rescale_grad=1.0
        ),
    }
    with pytest.raises(TypeError, match="momentum"):
        lars_momentum(0.1)


# -- what must be so -------------------------------------------------------------------------------


def test_ftrl_without_regularization_is_adagrad():
    """McMahan 2011: then the parameters that it sets are those that Adagrad moves to, wherever they began."""
    with jax.enable_x64(True):
        shapes = {k: s for k, s in SHAPES.items() if k != "none"}
        rng = np.random.default_rng(1)
        params, _ = problem(shapes=shapes)
        grads = [{n: jnp.asarray(rng.normal(size=s)) for n, s in shapes.items()} for _ in range(STEPS)]
        new, _ = run(ftrl(0.1), params, grads)
        want, _ = run(optax.adagrad(0.1, initial_accumulator_value=0.0, eps=0.0), params, grads)
        tree_close(new, want, 1e-7)  # 1e-10 is added to l1 and l2


def test_ftrl_sets_small_sums_to_exactly_zero():
    params, grads = problem(np.float32)
    new, _ = run(ftrl(0.3, l1=0.6), params, grads)
    zeros = sum(int((x == 0).sum()) for x in new.values())
    assert 0 < zeros < sum(x.size for x in new.values())
    new, _ = run(ftrl(0.3, l1=1e3), params, grads)
    assert all((x == 0).all() for x in new.values())


def test_ftrl_forgets_what_no_gradient_has_reached():
    params = jnp.array([3.0, -2.0, 1.0])
    updates, state = ftrl(0.1).update(jnp.array([0.0, 1.0, 0.0]), ftrl(0.1).init(params), params)
    assert optax.apply_updates(params, updates).tolist() == [0.0, pytest.approx(-2.1), 0.0]
    assert state.linear_accum[0] == 0 and state.squared_accum[0] == 0


def test_ftrl_adds_1e_10_to_both_strengths():
    with jax.enable_x64(True):
        tx, p = ftrl(1.0), jnp.zeros(3)
        updates, _ = tx.update(jnp.array([0.5e-10, 1.5e-10, 1e-9]), tx.init(p), p)
        np.testing.assert_allclose(updates, [0.0, -0.5e-10 / 3.5e-10, -0.9e-9 / 1.2e-9], rtol=1e-12)


def test_decayed_adagrad_is_rmsprop_with_epsilon_outside_the_root():
    with jax.enable_x64(True):
        params, grads = problem()
        new, _ = run(decayed_adagrad(0.1, 0.8, 0.3), params, grads)
        want, _ = run(optax.rmsprop(0.1, 0.8, 0.3, eps_in_sqrt=False), params, grads)
        tree_close(new, want, 1e-12)
        inside, _ = run(optax.rmsprop(0.1, 0.8, 0.3), params, grads)
        with pytest.raises(AssertionError):
            tree_close(new, inside, 1e-3)


def test_lars_is_optaxs_where_gradients_point_along_the_parameters():
    """‖g‖ + wd·‖p‖ = ‖g + wd·p‖ then, and only then."""
    with jax.enable_x64(True):
        ours = lars_momentum(3.0, 0.9, lars_coeff=0.02, lars_weight_decay=0.1)
        optaxs = optax.lars(3.0, weight_decay=0.1, trust_coefficient=0.02, momentum=0.9)
        params, _ = problem()

        def follow(tx, turn):
            p, state = params, tx.init(params)
            for k in range(STEPS):
                updates, state = tx.update(jax.tree.map(lambda x, k=k: (k + 1) * turn(x), p), state, p)
                p = optax.apply_updates(p, updates)
            return p

        along, across = lambda x: x, lambda x: jnp.flip(x)
        tree_close(follow(ours, along), follow(optaxs, along), 1e-12)
        with pytest.raises(AssertionError):
            tree_close(follow(ours, across), follow(optaxs, across), 1e-4)


@pytest.mark.parametrize("which", ["gradient", "parameter", "both"])
def test_lars_falls_back_to_the_learning_rate_where_a_norm_is_zero(which):
    p = jnp.zeros((2, 3)) if which != "gradient" else jnp.full((2, 3), 2.0)
    g = jnp.zeros((2, 3)) if which != "parameter" else jnp.full((2, 3), 3.0)
    tx = lars_momentum(0.5, 0.9, lars_weight_decay=0.1)
    with jax.debug_nans(True):  # eagerly: each value is looked at, also those that are not selected
        updates, state = tx.update(g, tx.init(p), p)
    np.testing.assert_allclose(updates, -0.5 * (g + 0.1 * p), rtol=1e-6)
    tree_equal(state.velocity, -updates)


def test_lars_excludes_leaves_by_parts_of_their_path():
    params = {"dense": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}, "norm": {"scale": jnp.ones(2)}}
    grads = [jax.tree.map(lambda x, k=k: 0.1 * k * x, params) for k in range(1, 5)]
    new, _ = run(lars_momentum(0.2, 0.9, exclude_from_weight_decay=["bias", "norm/"]), params, grads)
    sgd, _ = run(optax.sgd(0.2, momentum=0.9), params, grads)
    every, _ = run(lars_momentum(0.2, 0.9), params, grads)
    tree_close(new["dense"]["bias"], sgd["dense"]["bias"], 1e-6)
    tree_close(new["norm"], sgd["norm"], 1e-6)
    tree_equal(new["dense"]["kernel"], every["dense"]["kernel"])
    assert abs(float(every["norm"]["scale"][0] - sgd["norm"]["scale"][0])) > 0.1


def test_lars_does_not_notice_the_scale_of_the_gradients():
    """Up to weight decay: ‖g‖ divides g. And `rescale_grad` is a factor on the gradients, no more."""
    params, grads = problem(np.float32)
    tx = lars_momentum(2.0, 0.9, lars_coeff=0.1, lars_weight_decay=1e-9)
    scaled = [jax.tree.map(lambda x: 64 * x, g) for g in grads]
    tree_close(run(tx, params, scaled)[0], run(tx, params, grads)[0], 1e-5)
    rescaled = lars_momentum(2.0, 0.9, 0.1, 0.3, rescale_grad=64)
    tree_equal(run(rescaled, params, grads)[0], run(lars_momentum(2.0, 0.9, 0.1, 0.3), params, scaled)[0])


# -- as optax transformations ----------------------------------------------------------------------


@pytest.mark.sampled(12)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=lambda d: d.__name__)
@pytest.mark.parametrize("scheduled", [False, True], ids=["constant", "schedule"])
@pytest.mark.parametrize("name", SOME)
def test_dtypes_and_structure_stay(name, scheduled, dtype):
    factory, options = CASES[name]
    if scheduled:
        options = options | dict(learning_rate=optax.exponential_decay(options["learning_rate"], 2, 0.9))
    params, grads = problem(dtype)
    tx = factory(**options)
    start = tx.init(params)
    assert {x.dtype for x in jax.tree.leaves(start._replace(count=None))} == {jnp.dtype(dtype)}

    def body(carry, g):
        p, state = carry
        updates, state = tx.update(g, state, p)
        assert jax.tree.map(jnp.result_type, updates) == jax.tree.map(jnp.result_type, p)
        return (jax.tree.map(jnp.add, p, updates), state), None

    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *grads)
    (new, state), _ = jax.jit(lambda p, s, gs: jax.lax.scan(body, (p, s), gs))(params, start, stacked)  # or it raises
    assert jax.tree.map(jnp.result_type, (new, state)) == jax.tree.map(jnp.result_type, (params, start))
    want, _ = by_kernel(factory, options, params, grads)
    for leaf, p in want.items():
        loose = {2: 0.06, 4: 1e-4}[jnp.dtype(dtype).itemsize]
        np.testing.assert_allclose(np.asarray(new[leaf], np.float64), p, atol=loose * (1 + np.abs(p).max(initial=0)))


def test_lars_takes_norms_of_half_precision_in_single():
    """600 squared is more than float16 holds."""
    p, g = jnp.full(4, 600, jnp.float16), jnp.full(4, 300, jnp.float16)
    tx = lars_momentum(1.0, 0.0, lars_coeff=0.5, lars_weight_decay=0.5)
    updates, _ = tx.update(g, tx.init(p), p)
    assert updates.tolist() == [-300.0] * 4  # 0.5 · 1200 / (600 + 600) · (300 + 300)


@pytest.mark.parametrize("name", SOME)
def test_what_is_of_another_dtype_does_not_change_the_state(name):
    """Gradients in float32; hyperparameters as numpy's float64, and as arrays."""
    factory, options = CASES[name]
    params, grads = problem(jnp.bfloat16, {"matrix": (3, 4)})
    wide = [jax.tree.map(lambda x: x.astype(jnp.float32), g) for g in grads]
    want = run(factory(**options), params, grads)
    tree_equal(run(factory(**options), params, wide), want)
    tree_equal(run(factory(**{k: np.float64(v) for k, v in options.items()}), params, grads), want)
    arrays = run(factory(**{k: jnp.float32(v) for k, v in options.items()}), params, grads)
    assert jax.tree.map(jnp.result_type, arrays) == jax.tree.map(jnp.result_type, want)


@pytest.mark.parametrize("name", SOME)
def test_jit_changes_nothing_but_rounding(name):
    factory, options = CASES[name]
    params, grads = problem(np.float32)
    tx = factory(**options)
    eager = tx.update(grads[0], tx.init(params), params)
    tree_close(jax.jit(tx.update)(grads[0], tx.init(params), params), eager, 1e-6)


@pytest.mark.parametrize("name", SOME)
def test_without_parameters_it_says_what_is_missing(name):
    factory, options = CASES[name]
    params, grads = problem(np.float32)
    tx = factory(**options)
    with pytest.raises(ValueError, match=rf"{factory.__name__} needs the parameters: update\(grads, state, params\)"):
        tx.update(grads[0], tx.init(params))


@pytest.mark.parametrize("name", SOME)
def test_leaves_that_are_held_still(name):
    """None in the parameters and None in the gradients alone; `optax.masked`; and no leaves at all."""
    factory, options = CASES[name]
    params, grads = problem(np.float32)
    tx = factory(**options)
    whole, whole_state = tx.update(grads[0], tx.init(params), params)

    part = params | {"matrix": None}
    updates, state = tx.update(grads[0] | {"matrix": None}, tx.init(part), part)
    tree_equal(updates, whole | {"matrix": None})
    assert all(acc["matrix"] is None for acc in state[1:])

    updates, state = tx.update(grads[0] | {"matrix": None}, whole_state, params)
    assert updates["matrix"] is None
    for now, before in zip(state[1:], whole_state[1:], strict=True):
        tree_equal(now["matrix"], before["matrix"])
    assert jax.tree.structure(state) == jax.tree.structure(whole_state)

    masked = optax.masked(tx, {n: n != "matrix" for n in params})
    updates, _ = masked.update(grads[0], masked.init(params), params)
    tree_equal(updates, whole | {"matrix": grads[0]["matrix"]})
    assert tx.update({}, tx.init({}), {})[0] == {}


@pytest.mark.parametrize("name", CASES)
def test_hyperparameters_may_be_injected(name):
    factory, options = CASES[name]
    params, grads = problem(np.float32)
    plain, injected = factory(**options), optax.inject_hyperparams(factory)(**options)
    want, _ = run(plain, params, grads)
    tree_close(run(optax.GradientTransformation(injected.init, jax.jit(injected.update)), params, grads)[0], want, 1e-4)


def test_wrong_options_are_refused():
    with pytest.raises(ConfigError, match="divides by its learning rate"):
        ftrl(0.0)
    with pytest.raises(ConfigError, match="lr_power is 0.5"):
        ftrl(0.1, lr_power=0.5)
    with pytest.raises(ConfigError, match=r"a list of names: \['bias'\]"):
        lars_momentum(0.1, 0.9, exclude_from_weight_decay="bias")


# -- in a job --------------------------------------------------------------------------------------


def primitives(tx, params):
    """The equations of an update, by name and with the shape of their first operand."""
    found = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            inner = [j for j in jax.tree.leaves(list(eqn.params.values())) if hasattr(j, "jaxpr")]
            for j in inner:
                walk(j.jaxpr)
            if not inner:
                found.append((eqn.primitive.name, eqn.invars[0].aval.shape))

    walk(jax.make_jaxpr(tx.update)(params, tx.init(params), params).jaxpr)
    return found


@pytest.mark.parametrize("name", CASES)
def test_rules_are_elementwise_but_for_the_norms(name):
    factory, options = CASES[name]
    params, _ = problem(np.float32)
    found = primitives(factory(**options | dict(learning_rate=optax.exponential_decay(1.0, 2, 0.9))), params)
    assert "mul" in {p for p, _ in found}
    assert not {p for p, _ in found if p in ("reshape", "concatenate", "slice", "transpose", "dot_general", "gather")}
    sums = sorted(s for p, s in found if p.startswith("reduce"))
    decays = factory is lars_momentum and options.get("lars_weight_decay", 1) > 0
    assert sums == sorted(2 * [p.shape for p in params.values()] if decays else [])


def test_lars_takes_no_norms_of_what_it_excludes():
    params, _ = problem(np.float32, {"kernel": (3, 4), "bias": (4,)})
    found = primitives(lars_momentum(0.1, 0.9, exclude_from_weight_decay=["bias"]), params)
    assert [s for p, s in found if p.startswith("reduce")] == [(3, 4), (3, 4)]


@pytest.mark.parametrize("name", [n for n in CASES if not n.startswith("lars")])
def test_elementwise_rules_leave_every_leaf_free_to_be_cut(name):
    factory, options = CASES[name]
    params, batch = mlp_params((5, 5, 5)), mlp_batch(4, (5, 5, 5))
    for lr in (options["learning_rate"], optax.exponential_decay(options["learning_rate"], 2, 0.9)):
        tx = factory(**options | dict(learning_rate=lr))
        program = dtrans.trace(dtrans.make_train_step(mlp_loss, tx), params, jax.eval_shape(tx.init, params), *batch)
        done = cut(program)
        assert analyse(done.optimize, done.optimized).groups == {}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("scheduled", [False, True], ids=["constant", "schedule"])
@pytest.mark.parametrize("name", ["ftrl-l1-l2", "ftrl-power", "decayed_adagrad", "lars-all"])
def test_a_job_trains_as_one_device_does(name, scheduled):
    factory, options = CASES[name]
    if scheduled:
        options = options | dict(learning_rate=optax.exponential_decay(options["learning_rate"], 2, 0.9))
    tx = factory(**options)
    with jax.enable_x64(True):
        params = mlp_params(dtype=jnp.float64)
        batches = [mlp_batch(6, dtype=jnp.float64, seed=s) for s in range(3)]
        job = plan_of(mlp_loss, tx, params, *batches[0], servers=3, trainers=2).on_mesh()
        state = job.init(params)
        for batch in batches:
            state, _ = job.step(state, *batch)
        want, want_state, _ = plain_run(plain_step(mlp_loss, tx), params, tx.init(params), batches)
        tree_close(job.params(state), want, 1e-10)
        tree_close(job.opt_state(state), want_state, 1e-10)
