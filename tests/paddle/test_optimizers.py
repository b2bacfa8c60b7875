"""Paddle's optimizers, compared with their kernels, written in Python for one element.

Other tests compare them with another optimizer, or with arithmetic, in cases where both must agree.
`fix=True` is compared with the rule of the paper. test_optimizer_losses.py compares with recorded
runs of Paddle.
"""

from __future__ import annotations

import inspect
import math

import by_numpy
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    array,
    mlp_batch,
    mlp_loss,
    mlp_params,
    plain_run,
    plain_step,
    plan_of,
    tree_close,
    tree_equal,
)

import dtrans
from dtrans.errors import ConfigError
from dtrans.paddle.optimizers import (
    adadelta,
    adagrad,
    adam,
    adamax,
    adamw,
    decayed_adagrad,
    dpsgd,
    ftrl,
    gradient_clip_by_global_norm,
    gradient_clip_by_norm,
    gradient_clip_by_value,
    lamb,
    lars_momentum,
    linear_lr_warmup,
    momentum,
    noam_decay,
    piecewise_decay,
    polynomial_decay,
    rmsprop,
    sgd,
)
from dtrans.rows.analysis import analyse
from dtrans.step.halves import divide_step


SHAPES = {
    "scalar": (),
    "vector": (5,),
    "row": (1, 4),
    "matrix": (3, 4),
    "cube": (2, 3, 2),
    "none": (0, 3),
}
STEPS = 6


# -- the kernels of paddle/fluid/operators/optimizers
#
# Each changes the parameter and the accumulators that it is given. `t` is the number of the update,
# from 1, of which Paddle keeps the powers of beta.


def sgd_kernel(p, g, t, lr):
    for i in np.ndindex(p.shape):
        p[i] -= lr * g[i]


def momentum_kernel(p, g, velocity, t, lr, momentum, use_nesterov=False):
    for i in np.ndindex(p.shape):
        velocity[i] = velocity[i] * momentum + g[i]
        p[i] -= (g[i] + velocity[i] * momentum) * lr if use_nesterov else lr * velocity[i]


def adagrad_kernel(p, g, moment, t, lr, epsilon=1e-6, initial_accumulator_value=0.0):
    for i in np.ndindex(p.shape):
        moment[i] += (initial_accumulator_value if t == 1 else 0) + g[i] * g[i]
        p[i] -= lr * g[i] / (math.sqrt(moment[i]) + epsilon)


def decayed_adagrad_kernel(p, g, moment, t, lr, decay=0.95, epsilon=1e-6):
    for i in np.ndindex(p.shape):
        moment[i] = decay * moment[i] + (1 - decay) * g[i] * g[i]
        p[i] -= lr * g[i] / (math.sqrt(moment[i]) + epsilon)


def adadelta_kernel(p, g, grads, updates, t, lr, epsilon=1e-6, rho=0.95):
    """Compute the kernel of adadelta_op.h.

    The kernel's `update` is an Eigen expression. Eigen evaluates `update` at each use, once before
    and once after a write.
    """
    for i in np.ndindex(p.shape):
        grads[i] = rho * grads[i] + (1 - rho) * g[i] ** 2
        update = lambda i=i: -math.sqrt((updates[i] + epsilon) / (grads[i] + epsilon)) * g[i]
        updates[i] = rho * updates[i] + (1 - rho) * update() ** 2
        p[i] += update()


def rmsprop_kernel(
    p, g, square, grad, moment, t, lr, rho=0.95, epsilon=1e-6, momentum=0.0, centered=False
):
    for i in np.ndindex(p.shape):
        square[i] = rho * square[i] + (1 - rho) * g[i] * g[i]
        grad[i] = rho * grad[i] + (1 - rho) * g[i] if centered else 0
        moment[i] = momentum * moment[i] + lr * g[i] / math.sqrt(square[i] - grad[i] ** 2 + epsilon)
        p[i] -= moment[i]


def ftrl_kernel(p, g, squared, linear, t, lr, l1=0.0, l2=0.0, lr_power=-0.5, fix=False):
    """Compute the functor of ftrl_op.h for one element. `FtrlOptimizer` passes l1 as the attribute
    l2."""
    l1, l2 = l1 + 1e-10, (l2 if fix else l1) + 1e-10
    for i in np.ndindex(p.shape):
        new_acc = squared[i] + g[i] * g[i]
        if lr_power == -0.5:
            linear[i] += g[i] - (math.sqrt(new_acc) - math.sqrt(squared[i])) / lr * p[i]
        else:
            linear[i] += (
                g[i] - (math.pow(new_acc, -lr_power) - math.pow(squared[i], -lr_power)) / lr * p[i]
            )
        if math.fabs(linear[i]) > l1:
            x = -linear[i] + l1 if linear[i] >= 0 else -linear[i] - l1
            y = (
                2 * l2
                + (math.sqrt(new_acc) if lr_power == -0.5 else math.pow(new_acc, -lr_power)) / lr
            )
            p[i] = x / y
        else:
            p[i] = 0.0
        squared[i] += g[i] * g[i]


def adam_kernel(p, g, moment1, moment2, t, lr, beta1=0.9, beta2=0.999, epsilon=1e-8):
    lr *= math.sqrt(1 - beta2**t) / (1 - beta1**t)
    for i in np.ndindex(p.shape):
        moment1[i] = beta1 * moment1[i] + (1 - beta1) * g[i]
        moment2[i] = beta2 * moment2[i] + (1 - beta2) * g[i] * g[i]
        p[i] -= lr * (moment1[i] / (math.sqrt(moment2[i]) + epsilon))


def adamw_kernel(p, g, moment1, moment2, t, lr, weight_decay=0.01, **options):
    """Compute the ops that `extend_with_decoupled_weight_decay` puts before Adam's op, and Adam's
    op."""
    p -= p * weight_decay
    adam_kernel(p, g, moment1, moment2, t, lr, **options)


def adamax_kernel(p, g, moment, inf_norm, t, lr, beta1=0.9, beta2=0.999, epsilon=1e-8):
    for i in np.ndindex(p.shape):
        moment[i] = beta1 * moment[i] + (1 - beta1) * g[i]
        inf_norm[i] = max(abs(g[i]), beta2 * inf_norm[i] + epsilon)
        p[i] -= lr / (1 - beta1**t) * (moment[i] / inf_norm[i])


def lamb_kernel(
    p,
    g,
    moment1,
    moment2,
    t,
    lr,
    lamb_weight_decay=0.01,
    beta1=0.9,
    beta2=0.999,
    epsilon=1e-6,
    corrects=False,
):
    div = np.zeros_like(p)
    for i in np.ndindex(p.shape):
        moment1[i] = beta1 * moment1[i] + (1 - beta1) * g[i]
        moment2[i] = beta2 * moment2[i] + (1 - beta2) * g[i] * g[i]
        m = moment1[i] / (1 - beta1**t) if corrects else moment1[i]
        v = moment2[i] / (1 - beta2**t) if corrects else moment2[i]
        div[i] = m / (math.sqrt(v) + epsilon) + lamb_weight_decay * p[i]
    p_norm, div_norm = length(p), length(div)
    r = p_norm / div_norm if p_norm > 0 and div_norm > 0 else 1.0
    for i in np.ndindex(p.shape):
        p[i] -= lr * r * div[i]


def lars_momentum_kernel(
    p,
    g,
    velocity,
    t,
    lr,
    momentum,
    lars_coeff=0.001,
    lars_weight_decay=0.0005,
    epsilon=0.0,
    rescale_grad=1.0,
):
    """Compute the kernel of 1.8, with two arguments of later versions.

    `TestLarsMomentumOp` in test_momentum_op.py uses the parameter in place of its norm.
    """
    p_norm, g_norm = length(p), length(rescale_grad * g)
    local_lr = lr
    if p_norm > 0 and g_norm > 0:
        local_lr = lr * lars_coeff * p_norm / (g_norm + lars_weight_decay * p_norm + epsilon)
    for i in np.ndindex(p.shape):
        velocity[i] = velocity[i] * momentum + local_lr * (
            rescale_grad * g[i] + lars_weight_decay * p[i]
        )
        p[i] -= velocity[i]


def dpsgd_kernel(p, g, t, lr, clip, batch_size, sigma, seed):
    """Compute the kernel for float32, which uses `std::minstd_rand` and Marsaglia's polar
    method."""
    l2_norm = length(g)
    scale = l2_norm / clip if l2_norm > clip else 1.0
    engine, s = seed, 0.0
    while not 0 < s < 1:
        v = []
        for _ in range(2):
            engine = engine * 48271 % 2147483647
            v.append(
                np.float32(2) * np.float32(np.float32(engine - 1) / np.float32(2147483646))
                - np.float32(1)
            )
        s = v[0] * v[0] + v[1] * v[1]
    noise = float(np.float32(float(v[0]) * math.sqrt(-2 * math.log(s) / float(s)))) * sigma
    for i in np.ndindex(p.shape):
        p[i] -= lr * (g[i] / scale + noise / batch_size)


def length(x):
    return math.sqrt(sum(x[i] ** 2 for i in np.ndindex(x.shape)))


# -- the papers, for fix=True
# --------------------------------------------------------------------------


def adadelta_paper(p, g, grads, updates, t, lr, epsilon=1e-6, rho=0.95):
    """Zeiler 2012, algorithm 1, times a learning rate."""
    for i in np.ndindex(p.shape):
        grads[i] = rho * grads[i] + (1 - rho) * g[i] ** 2
        update = -math.sqrt(updates[i] + epsilon) / math.sqrt(grads[i] + epsilon) * g[i]
        updates[i] = rho * updates[i] + (1 - rho) * update**2
        p[i] += lr * update


def adam_paper(p, g, m, v, t, lr, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.0):
    """Kingma and Ba 2015, algorithm 1.

    With weight decay: Loshchilov and Hutter 2019, algorithm 2, with one learning rate.
    """
    for i in np.ndindex(p.shape):
        m[i] = beta1 * m[i] + (1 - beta1) * g[i]
        v[i] = beta2 * v[i] + (1 - beta2) * g[i] ** 2
        p[i] -= lr * (
            m[i] / (1 - beta1**t) / (math.sqrt(v[i] / (1 - beta2**t)) + epsilon)
            + weight_decay * p[i]
        )


def adamax_paper(p, g, m, u, t, lr, beta1=0.9, beta2=0.999, epsilon=1e-8):
    """Kingma and Ba 2015, algorithm 2. Epsilon is added to the gradient."""
    for i in np.ndindex(p.shape):
        m[i] = beta1 * m[i] + (1 - beta1) * g[i]
        u[i] = max(beta2 * u[i], abs(g[i]) + epsilon)
        p[i] -= lr / (1 - beta1**t) * m[i] / u[i]


def lamb_paper(p, g, m, v, t, lr, **options):
    """You et al. 2020, algorithm 2."""
    lamb_kernel(p, g, m, v, t, lr, corrects=True, **options)


KERNELS = {
    sgd: (sgd_kernel, ()),
    momentum: (momentum_kernel, ("velocity",)),
    adagrad: (adagrad_kernel, ("moment",)),
    decayed_adagrad: (decayed_adagrad_kernel, ("moment",)),
    adadelta: (adadelta_kernel, ("avg_squared_grad", "avg_squared_update")),
    rmsprop: (rmsprop_kernel, ("mean_square", "mean_grad", "moment")),
    ftrl: (ftrl_kernel, ("squared_accum", "linear_accum")),
    adam: (adam_kernel, ("moment1", "moment2")),
    adamw: (adamw_kernel, ("moment1", "moment2")),
    adamax: (adamax_kernel, ("moment", "inf_norm")),
    lamb: (lamb_kernel, ("moment1", "moment2")),
    lars_momentum: (lars_momentum_kernel, ("velocity",)),
    dpsgd: (dpsgd_kernel, ()),
}
PAPERS = {
    adadelta: adadelta_paper,
    adam: adam_paper,
    adamw: adam_paper,
    adamax: adamax_paper,
    lamb: lamb_paper,
}

CASES = {
    "sgd": (sgd, dict(learning_rate=0.1)),
    "momentum": (momentum, dict(learning_rate=0.1, momentum=0.9)),
    "nesterov": (momentum, dict(learning_rate=0.1, momentum=0.9, use_nesterov=True)),
    "adagrad": (adagrad, dict(learning_rate=0.1)),
    "adagrad-all": (adagrad, dict(learning_rate=0.1, epsilon=0.3, initial_accumulator_value=0.2)),
    "decayed_adagrad": (decayed_adagrad, dict(learning_rate=0.01)),
    "decayed_adagrad-all": (decayed_adagrad, dict(learning_rate=0.1, decay=0.8, epsilon=0.3)),
    "adadelta": (adadelta, dict(learning_rate=0.1)),
    "adadelta-all": (adadelta, dict(learning_rate=0.1, epsilon=0.03, rho=0.7)),
    "rmsprop": (rmsprop, dict(learning_rate=0.01)),
    "rmsprop-all": (
        rmsprop,
        dict(learning_rate=0.1, rho=0.8, epsilon=0.3, momentum=0.5, centered=True),
    ),
    "ftrl": (ftrl, dict(learning_rate=0.1)),
    "ftrl-l1": (ftrl, dict(learning_rate=0.3, l1=0.6)),
    "ftrl-l2": (ftrl, dict(learning_rate=0.3, l2=0.7)),
    "ftrl-l1-l2": (ftrl, dict(learning_rate=0.3, l1=0.1, l2=0.2)),
    "ftrl-fix": (ftrl, dict(learning_rate=0.3, l1=0.1, l2=0.7, fix=True)),
    "ftrl-power": (ftrl, dict(learning_rate=0.3, l1=0.1, l2=0.2, lr_power=-0.6)),
    "ftrl-power-plain": (ftrl, dict(learning_rate=0.3, lr_power=-0.25)),
    "ftrl-constant": (ftrl, dict(learning_rate=0.3, lr_power=0.0)),
    "adam": (adam, dict(learning_rate=0.1)),
    "adam-all": (adam, dict(learning_rate=0.1, beta1=0.7, beta2=0.9, epsilon=0.3)),
    "adamw": (adamw, dict(learning_rate=0.1, weight_decay=0.05, epsilon=0.3)),
    "adamax": (adamax, dict(learning_rate=0.1)),
    "adamax-all": (adamax, dict(learning_rate=0.1, beta1=0.7, beta2=0.9, epsilon=0.3)),
    "lamb": (lamb, dict(learning_rate=0.1)),
    "lamb-all": (
        lamb,
        dict(learning_rate=0.1, lamb_weight_decay=0.3, beta1=0.7, beta2=0.9, epsilon=0.3),
    ),
    "lars": (lars_momentum, dict(learning_rate=5.0, momentum=0.9)),
    "lars-all": (
        lars_momentum,
        dict(
            learning_rate=2.0,
            momentum=0.5,
            lars_coeff=0.1,
            lars_weight_decay=0.3,
            epsilon=0.2,
            rescale_grad=0.25,
        ),
    ),
    "lars-no-decay": (
        lars_momentum,
        dict(learning_rate=2.0, momentum=0.9, lars_coeff=0.1, lars_weight_decay=0.0),
    ),
    "dpsgd": (dpsgd, dict(learning_rate=0.1, clip=0.7, batch_size=4.0, sigma=0.5, seed=3)),
}
FIXED = {
    "adadelta": (adadelta, dict(learning_rate=0.1, epsilon=0.03, rho=0.7)),
    "adam": (adam, dict(learning_rate=0.1, beta1=0.7, beta2=0.9, epsilon=0.3)),
    "adamw": (adamw, dict(learning_rate=0.1, weight_decay=0.05, epsilon=0.3)),
    "adamax": (adamax, dict(learning_rate=0.1, beta1=0.7, beta2=0.9, epsilon=0.3)),
    "lamb": (
        lamb,
        dict(learning_rate=0.1, lamb_weight_decay=0.3, beta1=0.7, beta2=0.9, epsilon=0.3),
    ),
}
# one optimizer of each kind of state; the options do not matter
SOME = ["ftrl-l1-l2", "ftrl-power", "decayed_adagrad", "adagrad-all", "adadelta-all", "adam-all",
        "adamax-all",
        "lamb-all", "lars-all", "lars-no-decay"]  # fmt: skip
# norms that a rule takes of each leaf
NORMS = {lamb: 2, lars_momentum: 2, dpsgd: 1}
# powers in the state, one number for each
BETAS = {adam: 2, adamax: 1}
# values that are known when a transformation is created
STATIC = {dpsgd: ("seed", "key")}


def problem(dtype=np.float64, shapes=SHAPES, seed=0):
    """Return parameters, and gradients for each of `STEPS` steps.

    A tenth of the gradients are 0.
    """
    rng = np.random.default_rng(seed)
    params = {n: array(rng.normal(size=s), dtype) for n, s in shapes.items()}
    grads = [
        {n: array(rng.normal(size=s) * (rng.random(s) > 0.1), dtype) for n, s in shapes.items()}
        for _ in range(STEPS)
    ]
    return params, grads


def run(tx, params, grads):
    """Return parameters and state after one update for each gradient.

    NumPy computes them: compiling every operation for every shape would take most of the time.
    """

    def updated(params, state, g):
        updates, state = tx.update(g, state, params)
        return optax.apply_updates(params, updates), state

    state = by_numpy.call(tx.init, params)
    update = by_numpy.traced(updated, params, state, grads[0])
    for g in grads:
        params, state = update(params, state, g)
    return params, state


def accumulators_of(state):
    """Return the accumulators that a state has for each leaf."""
    return [x for x in state if isinstance(x, dict)]


def by_kernel(factory, options, params, grads, kernel=None):
    """Return the kernel's results for each leaf in float64: parameters, and accumulators by
    name."""
    names = KERNELS[factory][1]
    kernel = kernel or KERNELS[factory][0]
    rest = {k: v for k, v in options.items() if k != "learning_rate"}
    done, accs = {}, {name: {} for name in names}
    for leaf, p in params.items():
        p = np.array(p, np.float64)
        held = [np.zeros_like(p) for _ in names]
        for step, g in enumerate(grads):
            lr = options["learning_rate"]
            lr = lr(step) if callable(lr) else lr
            kernel(p, np.asarray(g[leaf], np.float64), *held, t=step + 1, lr=lr, **rest)
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
    if type(state).__module__.startswith(
        dtrans.paddle.optimizers.__name__
    ):  # optax has other names
        for name, acc in accs.items():
            tree_close(getattr(state, name), cast(acc), rtol)


# -- the kernels and the papers --------------------------------------------------------------------


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_kernel_to_rounding(name):
    with jax.enable_x64(True):
        check(*CASES[name], np.float64, 1e-12)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_kernel_in_single_precision(name):
    check(*CASES[name], np.float32, 2e-5)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", FIXED)
def test_fixed_it_is_the_papers_rule_and_not_the_kernels(name):
    factory, options = FIXED[name]
    params, grads = problem()
    new, _ = run(factory(**options, fix=True), params, grads)
    tree_close(new, by_kernel(factory, options, params, grads, PAPERS[factory])[0], 1e-12)
    kernels, _ = by_kernel(factory, options, params, grads)
    assert max(np.abs(new[n] - x).max(initial=0) for n, x in kernels.items()) > 1e-3


@pytest.mark.usefixtures("x64")
def test_ftrl_hands_its_kernel_l1_for_l2():
    params, grads = problem()
    one, other = (run(ftrl(0.3, l1=0.1, l2=l2), params, grads)[0] for l2 in (0.0, 5.0))
    tree_equal(one, other)
    tree_equal(one, run(ftrl(0.3, l1=0.1, l2=0.1, fix=True), params, grads)[0])


@pytest.mark.usefixtures("x64")
def test_fixed_dpsgd_clips_by_one_norm_and_makes_noise_for_each_element():
    shapes = {"a": (100, 50), "b": (80, 50)}
    params, grads = problem(shapes=shapes)
    quiet = dpsgd(0.5, clip=2.0, batch_size=4.0, sigma=0.0, fix=True)
    want = optax.chain(optax.clip_by_global_norm(2.0), optax.sgd(0.5))
    tree_close(run(quiet, params, grads[:2])[0], run(want, params, grads[:2])[0], 1e-12)

    tx = dpsgd(1.0, clip=2.0, batch_size=4.0, sigma=3.0, key=7, fix=True)
    zeros, state, drawn = jax.tree.map(jnp.zeros_like, params), tx.init(params), []
    for _ in range(2):
        updates, state = tx.update(zeros, state)
        drawn += [updates["a"].ravel(), updates["b"].ravel()]
    for x in drawn:  # sigma · clip / batch_size
        assert abs(x.std() / 1.5 - 1) < 0.05 and abs(x.mean()) < 0.1
    for i, x in enumerate(drawn):
        for y in drawn[:i]:
            assert abs(np.corrcoef(x[:4000], y[:4000])[0, 1]) < 0.06
    other = dpsgd(1.0, clip=2.0, batch_size=4.0, sigma=3.0, key=jax.random.key(7), fix=True)
    tree_equal(other.update(zeros, other.init(params))[0]["a"].ravel(), drawn[0])


def test_dpsgd_adds_one_number_to_every_element_and_with_a_seed_in_every_step():
    params, _ = problem(np.float32, {"matrix": (3, 4), "vector": (5,)})
    zeros = jax.tree.map(jnp.zeros_like, params)
    for seed in (0, 3):
        tx = dpsgd(1.0, clip=2.0, batch_size=4.0, sigma=3.0, seed=seed)
        state, drawn = tx.init(params), []
        for _ in range(3):
            updates, state = tx.update(zeros, state)
            (number,) = {float(x) for u in updates.values() for x in u.ravel()}
            drawn.append(number)
        assert len(set(drawn)) == (1 if seed else 3)


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
        # without a schedule, there is no count
        state = factory(**options).init(params)
        assert state.count is None
        accumulators = accumulators_of(state)
        assert len(jax.tree.leaves(state)) == len(params) * len(accumulators) + BETAS.get(
            factory, 0
        )


def test_defaults_are_paddles():
    """Compare with python/paddle/fluid/optimizer.py of 1.8.

    The table lacks names, regularization and precision, because they are not part of the rule. It
    contains options of Paddle 2 and new options. 0.999 is indeed the default batch size of dpsgd in
    Paddle.
    """
    beta = dict(beta1=0.9, beta2=0.999)
    defaults = {
        f: {
            n: p.default
            for n, p in inspect.signature(f).parameters.items()
            if p.default is not p.empty
        }
        for f in KERNELS
    }
    assert defaults == {
        sgd: {},
        momentum: dict(use_nesterov=False),
        adagrad: dict(epsilon=1e-6, initial_accumulator_value=0.0),
        decayed_adagrad: dict(decay=0.95, epsilon=1e-6),
        adadelta: dict(epsilon=1e-6, rho=0.95, fix=False),
        rmsprop: dict(rho=0.95, epsilon=1e-6, momentum=0.0, centered=False),
        ftrl: dict(l1=0.0, l2=0.0, lr_power=-0.5, fix=False),
        adam: dict(learning_rate=0.001, **beta, epsilon=1e-8, fix=False),
        adamw: dict(
            learning_rate=0.001,
            weight_decay=0.01,
            apply_decay_param_fun=None,
            **beta,
            epsilon=1e-8,
            fix=False,
        ),
        adamax: dict(learning_rate=0.001, **beta, epsilon=1e-8, fix=False),
        lamb: dict(
            learning_rate=0.001,
            lamb_weight_decay=0.01,
            **beta,
            epsilon=1e-6,
            exclude_from_weight_decay_fn=None,
            fix=False,
        ),
        lars_momentum: dict(
            lars_coeff=0.001,
            lars_weight_decay=0.0005,
            exclude_from_weight_decay=None,
            epsilon=0,
            rescale_grad=1.0,
        ),
        dpsgd: dict(
            learning_rate=0.001, clip=0.9, batch_size=0.999, sigma=1e-8, seed=0, key=0, fix=False
        ),
    }
    with pytest.raises(TypeError, match="momentum"):
        lars_momentum(0.1)


# -- what must be so -------------------------------------------------------------------------------


def test_ftrl_without_regularization_is_adagrad():
    """McMahan 2011: without regularization, FTRL sets the parameters to which Adagrad moves, for
    any start."""
    with jax.enable_x64(True):
        shapes = {k: s for k, s in SHAPES.items() if k != "none"}
        rng = np.random.default_rng(1)
        params, _ = problem(shapes=shapes)
        grads = [
            {n: jnp.asarray(rng.normal(size=s)) for n, s in shapes.items()} for _ in range(STEPS)
        ]
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
    """If gradients point along the parameters, ‖g‖ + wd·‖p‖ = ‖g + wd·p‖. Otherwise the two sides
    differ."""
    with jax.enable_x64(True):
        ours = lars_momentum(3.0, 0.9, lars_coeff=0.02, lars_weight_decay=0.1)
        optaxs = optax.lars(3.0, weight_decay=0.1, trust_coefficient=0.02, momentum=0.9)
        params, _ = problem()

        def follow(tx, turn):
            def updated(p, state, k):
                updates, state = tx.update(jax.tree.map(lambda x: k * turn(x), p), state, p)
                return optax.apply_updates(p, updates), state

            p, state = params, tx.init(params)
            update = by_numpy.traced(updated, p, state, 1.0)
            for k in range(STEPS):
                p, state = update(p, state, k + 1.0)
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
    with jax.debug_nans(True):  # run eagerly, to see also values that are not selected
        updates, state = tx.update(g, tx.init(p), p)
    np.testing.assert_allclose(updates, -0.5 * (g + 0.1 * p), rtol=1e-6)
    tree_equal(state.velocity, -updates)


def test_lars_excludes_leaves_by_parts_of_their_path():
    params = {
        "dense": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)},
        "norm": {"scale": jnp.ones(2)},
    }
    grads = [jax.tree.map(lambda x, k=k: 0.1 * k * x, params) for k in range(1, 5)]
    new, _ = run(
        lars_momentum(0.2, 0.9, exclude_from_weight_decay=["bias", "norm/"]), params, grads
    )
    sgd, _ = run(optax.sgd(0.2, momentum=0.9), params, grads)
    every, _ = run(lars_momentum(0.2, 0.9), params, grads)
    tree_close(new["dense"]["bias"], sgd["dense"]["bias"], 1e-6)
    tree_close(new["norm"], sgd["norm"], 1e-6)
    tree_equal(new["dense"]["kernel"], every["dense"]["kernel"])
    assert abs(float(every["norm"]["scale"][0] - sgd["norm"]["scale"][0])) > 0.1


def test_lars_does_not_notice_the_scale_of_the_gradients():
    """Without weight decay, LARS divides g by ‖g‖. `rescale_grad` is only a factor on the
    gradients."""
    params, grads = problem(np.float32)
    tx = lars_momentum(2.0, 0.9, lars_coeff=0.1, lars_weight_decay=1e-9)
    scaled = [jax.tree.map(lambda x: 64 * x, g) for g in grads]
    tree_close(run(tx, params, scaled)[0], run(tx, params, grads)[0], 1e-5)
    rescaled = lars_momentum(2.0, 0.9, 0.1, 0.3, rescale_grad=64)
    tree_equal(
        run(rescaled, params, grads)[0], run(lars_momentum(2.0, 0.9, 0.1, 0.3), params, scaled)[0]
    )


# -- as optax transformations ----------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=lambda d: d.__name__
)
@pytest.mark.parametrize("scheduled", [False, True], ids=["constant", "schedule"])
@pytest.mark.parametrize("name", SOME)
def test_dtypes_and_structure_stay(name, scheduled, dtype):
    factory, options = CASES[name]
    if scheduled:
        options = options | dict(
            learning_rate=optax.exponential_decay(options["learning_rate"], 2, 0.9)
        )
    params, grads = problem(dtype)
    tx = factory(**options)
    start = tx.init(params)
    assert {x.dtype for x in jax.tree.leaves(accumulators_of(start))} == {jnp.dtype(dtype)}

    def body(carry, g):
        p, state = carry
        updates, state = tx.update(g, state, p)
        assert jax.tree.map(jnp.result_type, updates) == jax.tree.map(jnp.result_type, p)
        return (jax.tree.map(jnp.add, p, updates), state), None

    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *grads)
    # or the optimizer raises an error
    (new, state), _ = jax.jit(lambda p, s, gs: jax.lax.scan(body, (p, s), gs))(
        params, start, stacked
    )
    assert jax.tree.map(jnp.result_type, (new, state)) == jax.tree.map(
        jnp.result_type, (params, start)
    )
    want, _ = by_kernel(factory, options, params, grads)
    for leaf, p in want.items():
        loose = {2: 0.06, 4: 1e-4}[jnp.dtype(dtype).itemsize]
        np.testing.assert_allclose(
            np.asarray(new[leaf], np.float64), p, atol=loose * (1 + np.abs(p).max(initial=0))
        )


def test_lars_takes_norms_of_half_precision_in_single():
    """Norms are computed in float32, because the square of 600 overflows float16."""
    p, g = jnp.full(4, 600, jnp.float16), jnp.full(4, 300, jnp.float16)
    tx = lars_momentum(1.0, 0.0, lars_coeff=0.5, lars_weight_decay=0.5)
    updates, _ = tx.update(g, tx.init(p), p)
    assert updates.tolist() == [-300.0] * 4  # 0.5 · 1200 / (600 + 600) · (300 + 300)


@pytest.mark.parametrize("name", SOME)
def test_what_is_of_another_dtype_does_not_change_the_state(name):
    """Pass gradients in float32, and hyperparameters as float64 of NumPy or as arrays."""
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
    with pytest.raises(
        ValueError,
        match=rf"{factory.__name__} needs the parameters: update\(grads, state, params\)",
    ):
        tx.update(grads[0], tx.init(params))


@pytest.mark.parametrize("name", SOME)
def test_leaves_that_are_held_still(name):
    """Use None in parameters and gradients, None only in gradients, `optax.masked`, and a tree
    without leaves."""
    factory, options = CASES[name]
    params, grads = problem(np.float32)
    tx = factory(**options)
    whole, whole_state = tx.update(grads[0], tx.init(params), params)

    part = params | {"matrix": None}
    updates, state = tx.update(grads[0] | {"matrix": None}, tx.init(part), part)
    tree_equal(updates, whole | {"matrix": None})
    assert all(acc["matrix"] is None for acc in accumulators_of(state))

    updates, state = tx.update(grads[0] | {"matrix": None}, whole_state, params)
    assert updates["matrix"] is None
    for now, before in zip(accumulators_of(state), accumulators_of(whole_state), strict=True):
        tree_equal(now["matrix"], before["matrix"])
    assert jax.tree.structure(state) == jax.tree.structure(whole_state)

    masked = optax.masked(tx, {n: n != "matrix" for n in params})
    updates, _ = masked.update(grads[0], masked.init(params), params)
    tree_equal(updates, whole | {"matrix": grads[0]["matrix"]})
    assert tx.update({}, tx.init({}), {})[0] == {}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_hyperparameters_may_be_injected(name):
    factory, options = CASES[name]
    params, grads = problem(np.float32)
    plain = factory(**options)
    injected = optax.inject_hyperparams(factory, static_args=STATIC.get(factory, ()))(**options)
    want, _ = run(plain, params, grads)
    tree_close(
        run(optax.GradientTransformation(injected.init, jax.jit(injected.update)), params, grads)[
            0
        ],
        want,
        1e-4,
    )


def test_wrong_options_are_refused():
    with pytest.raises(ConfigError, match="the learning rate of ftrl is 0"):
        ftrl(0.0)
    with pytest.raises(ConfigError, match="lr_power is 0.5"):
        ftrl(0.1, lr_power=0.5)
    with pytest.raises(
        ConfigError, match=r"is a string; expected a list of names: pass \['bias'\]"
    ):
        lars_momentum(0.1, 0.9, exclude_from_weight_decay="bias")
    with pytest.raises(ConfigError, match=r"max is -1.0, so min would be 1.0"):
        gradient_clip_by_value(-1.0)
    for clip in (
        gradient_clip_by_norm,
        gradient_clip_by_global_norm,
        lambda norm: dpsgd(0.1, clip=norm),
    ):
        with pytest.raises(ConfigError, match="clip_norm is 0.0"):
            clip(0.0)
    with pytest.raises(ConfigError, match="values has 2 learning rates; 2 boundaries need 3"):
        piecewise_decay([1, 2], [0.1, 0.2])


# -- clips, and leaves by their names --------------------------------------------------------------


NAMED = {"dense": {"kernel": jnp.array([[3.0], [4.0]]), "bias": jnp.array([12.0])}}


@pytest.mark.parametrize(
    ("clip", "kernel", "bias"),
    [
        (gradient_clip_by_value(2.0), [2.0, 2.0], 2.0),
        (gradient_clip_by_value(20.0, 3.5), [3.5, 4.0], 12.0),
        (gradient_clip_by_norm(2.5), [1.5, 2.0], 2.5),
        (gradient_clip_by_norm(5.0), [3.0, 4.0], 5.0),
        (gradient_clip_by_global_norm(6.5), [1.5, 2.0], 6.0),
        (gradient_clip_by_global_norm(13.0), [3.0, 4.0], 12.0),
        (
            gradient_clip_by_value(2.0, need_clip=lambda path: path == "dense/kernel"),
            [2.0, 2.0],
            12.0,
        ),
        (gradient_clip_by_norm(2.5, need_clip=lambda path: path == "dense/bias"), [3.0, 4.0], 2.5),
        (
            gradient_clip_by_global_norm(2.5, need_clip=lambda path: "kernel" in path),
            [1.5, 2.0],
            12.0,
        ),
        (gradient_clip_by_global_norm(2.5, need_clip=lambda path: False), [3.0, 4.0], 12.0),
    ],
)
def test_clips_clip_what_needs_it(clip, kernel, bias):
    clipped, _ = clip.update(NAMED, clip.init(NAMED))
    np.testing.assert_allclose(clipped["dense"]["kernel"].ravel(), kernel, rtol=1e-6)
    np.testing.assert_allclose(clipped["dense"]["bias"], [bias], rtol=1e-6)
    zeros = jax.tree.map(jnp.zeros_like, NAMED)
    low = clip.update(zeros, clip.init(zeros))[0]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(low))


@pytest.mark.parametrize("fix", [False, True])
def test_leaves_without_weight_decay_are_picked_by_their_path(fix):
    grads = jax.tree.map(jnp.ones_like, NAMED)
    one = lambda tx: by_numpy.call(lambda g: tx.update(g, tx.init(NAMED), NAMED)[0]["dense"], grads)
    off, on = lamb(0.1, 0.0, fix=fix), lamb(0.1, 0.5, fix=fix)
    picked = lamb(0.1, 0.5, exclude_from_weight_decay_fn=lambda path: path == "dense/bias", fix=fix)
    tree_equal(one(picked), {"bias": one(off)["bias"], "kernel": one(on)["kernel"]})
    off, on = adamw(0.1, 0.0, fix=fix), adamw(0.1, 0.5, fix=fix)
    picked = adamw(0.1, 0.5, lambda path: path != "dense/bias", fix=fix)
    tree_equal(one(picked), {"bias": one(off)["bias"], "kernel": one(on)["kernel"]})


# -- decays ----------------------------------------------------------------------------------------


def test_decays_go_on_at_their_ends():
    np.testing.assert_allclose(
        by_numpy.call(polynomial_decay(1.0, 4, 0.5), np.arange(3, 7)), [0.625, 0.5, 0.5, 0.5]
    )
    cycle = polynomial_decay(1.0, 4, 0.0, cycle=True)
    np.testing.assert_allclose(
        by_numpy.call(cycle, np.arange(3, 10)),
        [1 / 4, 0, 3 / 8, 2 / 8, 1 / 8, 0, 3 / 12],
        rtol=1e-6,
    )
    assert noam_decay(1, 4)(0) > 0  # step 1
    after = linear_lr_warmup(lambda count: 10.0 * count, 2, 0.0, 1.0)
    np.testing.assert_allclose(by_numpy.call(after, np.arange(4)), [0.0, 0.5, 20.0, 30.0])


@pytest.mark.usefixtures("x64")
def test_decays_have_64_bits_where_jax_has():
    assert noam_decay(16, 3)(1).dtype == jnp.float64
    np.testing.assert_allclose(noam_decay(16, 3)(1), 0.25 * 2 * 3**-1.5, rtol=1e-15)


# -- in a job --------------------------------------------------------------------------------------


def primitives(tx, params):
    """Return the equations of an update: names, with the shape of the first operand."""
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
    found = primitives(
        factory(**options | dict(learning_rate=optax.exponential_decay(1.0, 2, 0.9))), params
    )
    assert "mul" in {p for p, _ in found}
    assert not {
        p
        for p, _ in found
        if p in ("reshape", "concatenate", "slice", "transpose", "dot_general", "gather")
    }
    sums = sorted(s for p, s in found if p.startswith("reduce"))
    assert sums == sorted(NORMS.get(factory, 0) * [p.shape for p in params.values()])


def test_lars_takes_no_norms_of_what_it_excludes():
    params, _ = problem(np.float32, {"kernel": (3, 4), "bias": (4,)})
    found = primitives(lars_momentum(0.1, 0.9, exclude_from_weight_decay=["bias"]), params)
    assert [s for p, s in found if p.startswith("reduce")] == [(3, 4), (3, 4)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [n for n, (factory, _) in CASES.items() if factory not in NORMS])
def test_elementwise_rules_leave_every_leaf_free_to_be_cut(name):
    factory, options = CASES[name]
    params, batch = mlp_params((5, 5, 5)), mlp_batch(4, (5, 5, 5))
    for lr in (options["learning_rate"], optax.exponential_decay(options["learning_rate"], 2, 0.9)):
        tx = factory(**options | dict(learning_rate=lr))
        program = dtrans.trace(
            dtrans.make_train_step(mlp_loss, tx), params, jax.eval_shape(tx.init, params), *batch
        )
        done = divide_step(program)
        assert analyse(done.optimize, done.optimized).groups == {}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scheduled", [False, True], ids=["constant", "schedule"])
@pytest.mark.parametrize(
    "name", ["ftrl-power", "adadelta-all", "adam-all", "adamw", "lamb-all", "lars-all"]
)
def test_a_job_trains_as_one_device_does(name, scheduled):
    factory, options = CASES[name]
    if scheduled:
        options = options | dict(
            learning_rate=optax.exponential_decay(options["learning_rate"], 2, 0.9)
        )
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
