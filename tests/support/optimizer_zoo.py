"""All optimizers, as cases of `test_optimizer_zoo.py` and rows of docs/optimizers.md.

A `Case` is an optimizer with its special properties. A `Refusal` is an optimizer that needs a value
that no server has. dtrans must refuse it by name. `table()` writes docs/optimizers.md from the
plans of the cases: `make docs`, or `python tests/support/optimizer_zoo.py docs/optimizers.md`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from helpers import endpoints

import dtrans
from dtrans.errors import OptimizerError
from dtrans.paddle import optimizers as paddle
from dtrans.parameter_server.plan import PServerPlan


SERVERS, TRAINERS, STEPS = 3, 2, 5


# -- the model -------------------------------------------------------------------------------------

# Few distinct shapes, of blocks too: each costs a compilation for each primitive.
SHAPES: Mapping[str, tuple[int, ...]] = {
    "embedding": (7, 2),
    "few": (2,),
    "half": (3, 2),
    "kernel": (3, 1, 2, 2),
    "one_row": (1, 2),
    "scalar": (),
}
WHY: Mapping[str, str] = {
    "embedding": "the last block has fewer rows than the others",
    "few": "fewer rows than servers",
    "half": "in bfloat16 also if the other leaves are in float64",
    "kernel": "the kernel of a convolution",
    "one_row": "one row, which cannot be divided",
    "scalar": "no rows",
}


def leaves(dtype: Any, without: Collection[str] = (), complex_leaf: bool = False) -> dict[str, Any]:
    """Return the parameters of the model."""
    rng = np.random.default_rng(0)
    params = {
        n: jnp.asarray(rng.normal(size=s), jnp.bfloat16 if n == "half" else dtype)
        for n, s in SHAPES.items()
    }
    if complex_leaf:
        kind = jnp.complex128 if dtype == jnp.float64 else jnp.complex64
        params["wave"] = jnp.asarray(rng.normal(size=(3, 2)) + 1j * rng.normal(size=(3, 2)), kind)
    return {n: p for n, p in params.items() if n not in without}


def loss(params: Any, x: jax.Array) -> jax.Array:
    """Return a number that has a gradient for every leaf. Tests replace the gradients
    (`gradients`).
    """
    return jnp.mean(x) * sum(
        jnp.sum(jnp.abs(p).astype(x.dtype) ** 2) for p in jax.tree.leaves(params)
    )


def gradients(params: Any, step: int, trainer: int) -> Any:
    """Return numbers that tests use as gradients.

    Trainers agree on signs, and neither a number nor a mean is near zero. Otherwise rounding would
    decide the sign of an update (sign_sgd, lion, rprop), and the tolerances would have to be wider.
    The seed was chosen so that sums over all leaves (of gradients times past gradients, in
    dadapt_adamw) do not cancel. After a cancellation in float32, only rounding errors would remain.
    """
    signs, rng = np.random.default_rng(130 + step), np.random.default_rng((step, trainer))

    def one(p: Any) -> jax.Array:
        def real() -> np.ndarray:
            return rng.uniform(0.3, 1.5, size=p.shape) * signs.choice([-1, 1], size=p.shape)

        return jnp.asarray(real() + 1j * real() if jnp.iscomplexobj(p) else real(), p.dtype)

    return jax.tree.map(one, params)


# -- cases -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """Optimizer of the zoo.

    Attributes:
      make: returns the optimizer.
      without: the leaves that optax itself cannot train with this optimizer on one device, with the
        reason.
      pair: True if the parameters are an `optax.LookaheadParams`, whose gradients are those of the
        first element.
      complex_leaf: True if the model has a leaf of complex numbers.
      still: the leaves that the optimizer does not change.
    """

    make: Callable[[], Any]
    without: Mapping[str, str] = dataclasses.field(default_factory=dict)
    pair: bool = False
    complex_leaf: bool = False
    still: Collection[str] = ()

    def params(self, dtype: Any) -> Any:
        """Return the parameters that the optimizer trains."""
        params = leaves(dtype, self.without, self.complex_leaf)
        return optax.LookaheadParams.init_synced(params) if self.pair else params

    def trained(self, params: Any) -> Any:
        """Return the part of the parameters with respect to which gradients are taken."""
        return params.fast if self.pair else params

    def step(self, loss: Callable[..., Any] = loss) -> Callable[..., Any]:
        """Return the training step for a loss."""
        tx = self.make()
        if not self.pair:
            return dtrans.make_train_step(loss, tx)

        def step(params: Any, opt_state: Any, *batch: jax.Array) -> tuple[Any, Any, Any]:
            value, grads = dtrans.value_and_grad(loss)(params.fast, *batch)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, value

        return step


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Optimizer that dtrans must refuse.

    Attributes:
      make: returns the optimizer.
      needs: the value that the optimizer needs and that no server has.
      instead: the remedy.
      match: pattern of the error: the name of the optimizer, or of its part that needs the value,
        and the value.
      error: type of the error.
    """

    make: Callable[[], Any]
    needs: str
    instead: str
    match: str
    error: type[Exception] = OptimizerError


def plan_of(case: Case, dtype: Any = jnp.float32, **options: Any) -> PServerPlan:
    """Return the plan of a case. Its startup program takes the parameters."""
    params, tx, x = case.params(dtype), case.make(), jax.ShapeDtypeStruct((2,), dtype)
    main = dtrans.trace(case.step(), params, jax.eval_shape(tx.init, params), x)
    startup = dtrans.trace(lambda params: (params, tx.init(params)), params)
    pservers = endpoints(SERVERS)
    return flat_options.pserver(
        main, startup, pservers=pservers, trainers=TRAINERS, min_block_size=1, **options
    )


def then_sgd(*transforms: Any) -> Any:
    """Return transformations of the gradient, followed by gradient descent."""
    return optax.chain(*transforms, optax.sgd(0.1))


def deprecated(make: Callable[..., Any], *args: Any) -> Any:
    """Return an optimizer that optax has deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return make(*args)


def by_leaf(params: Any) -> Any:
    """Return labels of leaves: one label for matrices and larger arrays, another for the rest."""
    return jax.tree.map(lambda p: p.ndim > 1, params)


class _SlowState(NamedTuple):
    inner: Any
    slow: Any


def slow_in_state(tx: Any) -> Any:
    """`optax.lookahead` with the slow parameters in the optimizer state.

    So a server stores the same rows of a fast leaf and of its slow leaf.
    """

    def init(params: Any) -> _SlowState:
        return _SlowState(tx.init(optax.LookaheadParams.init_synced(params)), params)

    def update(grads: Any, state: _SlowState, params: Any) -> tuple[Any, _SlowState]:
        both = optax.LookaheadParams(fast=params, slow=state.slow)
        updates, inner = tx.update(grads, state.inner, both)
        return updates.fast, _SlowState(inner, optax.apply_updates(state.slow, updates.slow))

    return optax.GradientTransformation(init, update)


def squared_gradients() -> Any:
    """Return the Gauss-Newton estimate of a Hessian's diagonal for sophia; it needs no loss
    function.
    """
    return optax.stateless(lambda updates, params: jax.tree.map(jnp.square, updates))


SCHEDULES: Mapping[str, Callable[[], Any]] = {
    "constant_schedule": lambda: optax.constant_schedule(0.1),
    "cosine_decay_schedule": lambda: optax.cosine_decay_schedule(0.1, 4),
    "cosine_onecycle_schedule": lambda: optax.cosine_onecycle_schedule(5, 0.1),
    "exponential_decay": lambda: optax.exponential_decay(0.1, 2, 0.5, staircase=True),
    "join_schedules": lambda: optax.join_schedules(
        [optax.constant_schedule(0.1), optax.linear_schedule(0.2, 0, 3)], [2]
    ),
    "linear_onecycle_schedule": lambda: optax.linear_onecycle_schedule(5, 0.1),
    "linear_schedule": lambda: optax.linear_schedule(0.1, 0.01, 4),
    "piecewise_constant_schedule": lambda: optax.piecewise_constant_schedule(0.1, {2: 0.5, 4: 0.5}),
    "piecewise_interpolate_schedule": lambda: optax.piecewise_interpolate_schedule(
        "cosine", 0.1, {2: 0.5, 4: 0.5}
    ),
    "polynomial_schedule": lambda: optax.polynomial_schedule(0.1, 0.01, 2, 4),
    "sgdr_schedule": lambda: optax.sgdr_schedule(
        [dict(init_value=0.0, peak_value=0.1, decay_steps=3, warmup_steps=1, end_value=0.01)] * 2
    ),
    "warmup_constant_schedule": lambda: optax.warmup_constant_schedule(0.0, 0.1, 2),
    "warmup_cosine_decay_schedule": lambda: optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 4),
    "warmup_exponential_decay_schedule": lambda: optax.warmup_exponential_decay_schedule(
        0.0, 0.1, 2, 2, 0.5
    ),
}

# Reasons why optax cannot train some leaves on one device; checked by
# `test_what_is_left_out_is_what_optax_cannot_train`.
PROMOTES = {"half": "optax makes its bfloat16 state wider in an update"}
NO_ROWS = {"scalar": "optax raises an IndexError"}
NO_MIX = {"half": "optax raises a TypeError for leaves of two types"}

ALIASES: Mapping[str, Case] = {
    "adabelief": Case(lambda: optax.adabelief(0.1)),
    "adadelta": Case(lambda: optax.adadelta(10.0)),
    "adafactor": Case(lambda: optax.adafactor(0.1, min_dim_size_to_factor=2)),
    "adafactor, momentum, nothing factored": Case(
        lambda: optax.adafactor(0.1, momentum=0.9, weight_decay_rate=0.01)
    ),
    "adagrad": Case(lambda: optax.adagrad(0.1)),
    "adam": Case(lambda: optax.adam(0.1)),
    "adam, bfloat16 momentum": Case(lambda: optax.adam(0.1, mu_dtype=jnp.bfloat16)),
    "adamax": Case(lambda: optax.adamax(0.1)),
    "adamaxw": Case(lambda: optax.adamaxw(0.1, weight_decay=0.01)),
    "adamw": Case(lambda: optax.adamw(0.1, weight_decay=0.01)),
    "adamw, masked decay and a schedule": Case(
        lambda: optax.adamw(
            optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10), weight_decay=0.01, mask=by_leaf
        )
    ),
    "adan": Case(lambda: optax.adan(0.1, weight_decay=0.01)),
    "amsgrad": Case(lambda: optax.amsgrad(0.1)),
    "fromage": Case(lambda: optax.fromage(0.1)),
    "lamb": Case(lambda: optax.lamb(0.1, weight_decay=0.01)),
    "lars": Case(lambda: optax.lars(0.1, weight_decay=0.01, trust_coefficient=0.5)),
    "lbfgs, linesearch=None": Case(lambda: optax.lbfgs(0.1, memory_size=2, linesearch=None)),
    "lion": Case(lambda: optax.lion(0.1, weight_decay=0.01)),
    "nadam": Case(lambda: optax.nadam(0.1)),
    "nadamw": Case(lambda: optax.nadamw(0.1, weight_decay=0.01)),
    "noisy_sgd": Case(lambda: optax.noisy_sgd(0.1, key=0)),
    "novograd": Case(lambda: optax.novograd(0.1, weight_decay=0.01)),
    "optimistic_adam": Case(lambda: deprecated(optax.optimistic_adam, 0.1)),
    "optimistic_adam_v2": Case(lambda: optax.optimistic_adam_v2(0.1)),
    "optimistic_gradient_descent": Case(lambda: optax.optimistic_gradient_descent(0.1)),
    "radam": Case(lambda: optax.radam(0.1, threshold=4.5)),
    "rmsprop": Case(lambda: optax.rmsprop(0.1)),
    "rmsprop, centered, momentum": Case(
        lambda: optax.rmsprop(0.1, centered=True, momentum=0.9, nesterov=True)
    ),
    # rprop changes the scalar only after three gradients with equal signs, which do not occur
    "rprop": Case(lambda: optax.rprop(0.1), still={"scalar"}),
    "sgd": Case(lambda: optax.sgd(0.1)),
    "sgd, momentum": Case(lambda: optax.sgd(0.1, momentum=0.9)),
    "sgd, nesterov": Case(lambda: optax.sgd(0.1, momentum=0.9, nesterov=True)),
    "sign_sgd": Case(lambda: optax.sign_sgd(0.1)),
    "signum": Case(lambda: optax.signum(0.1)),
    "sm3": Case(lambda: optax.sm3(0.1), without=NO_ROWS),
    "yogi": Case(lambda: optax.yogi(0.1)),
}

CONTRIB: Mapping[str, Case] = {
    "acprop": Case(lambda: optax.contrib.acprop(0.1)),
    "ademamix": Case(lambda: optax.contrib.ademamix(0.1)),
    "adopt": Case(lambda: optax.contrib.adopt(0.1)),
    "cocob": Case(lambda: optax.contrib.cocob()),
    "dadapt_adamw": Case(lambda: optax.contrib.dadapt_adamw(1.0, estim_lr0=0.1), without=PROMOTES),
    "dog": Case(lambda: optax.contrib.dog(1.0, init_step=("heuristic", 0.1)), without=PROMOTES),
    "dog, first step given": Case(
        lambda: optax.contrib.dog(1.0, init_step=("learning_rate", 0.1), weight_decay=0.01),
        without=PROMOTES,
    ),
    "dowg": Case(lambda: optax.contrib.dowg(1.0, init_estim_sq_dist=0.1), without=PROMOTES),
    "galore": Case(lambda: optax.contrib.galore(0.1, rank=1, update_proj_gap=2, weight_decay=0.01)),
    "madgrad": Case(lambda: optax.contrib.madgrad(0.1)),
    "mechanize": Case(lambda: optax.contrib.mechanize(optax.sgd(0.1), s_init=0.1), without=NO_MIX),
    "muon": Case(lambda: optax.contrib.muon(0.1)),
    "normalize": Case(lambda: then_sgd(optax.contrib.normalize())),
    "prodigy": Case(lambda: optax.contrib.prodigy(1.0, estim_lr0=0.1), without=PROMOTES),
    "sam": Case(
        lambda: optax.contrib.sam(
            optax.sgd(0.1, momentum=0.9), optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
        )
    ),
    "schedule_free": Case(lambda: optax.contrib.schedule_free(optax.adam(0.1, b1=0.0), 0.1)),
    "schedule_free_adamw": Case(
        lambda: optax.contrib.schedule_free_adamw(0.1, warmup_steps=2, weight_decay=0.01)
    ),
    "schedule_free_sgd": Case(lambda: optax.contrib.schedule_free_sgd(0.1, warmup_steps=2)),
    "simplified_ademamix": Case(lambda: optax.contrib.simplified_ademamix(0.01)),
    "sophia, own Hessian": Case(
        lambda: optax.contrib.sophia(
            0.1, update_interval=2, hessian_diagonal_fn=squared_gradients()
        )
    ),
    "split_real_and_imaginary": Case(
        lambda: optax.contrib.split_real_and_imaginary(optax.adam(0.1)), complex_leaf=True
    ),
}

PADDLE: Mapping[str, Case] = {
    f"paddle.{name}": Case(make)
    for name, make in {
        "sgd": lambda: paddle.sgd(0.1),
        "momentum": lambda: paddle.momentum(0.1, 0.9, use_nesterov=True),
        "adam": lambda: paddle.adam(0.1),
        "adamw": lambda: paddle.adamw(0.1, weight_decay=0.01),
        "adamax": lambda: paddle.adamax(0.1),
        "adagrad": lambda: paddle.adagrad(0.1),
        "decayed_adagrad": lambda: paddle.decayed_adagrad(0.1),
        # with a smaller epsilon, updates of bfloat16 leaves would round to zero
        "adadelta": lambda: paddle.adadelta(1.0, epsilon=1e-3),
        "rmsprop": lambda: paddle.rmsprop(0.1, momentum=0.9, centered=True),
        "ftrl": lambda: paddle.ftrl(0.1, l1=0.01),
        "lamb": lambda: paddle.lamb(0.1),
        "lars_momentum": lambda: paddle.lars_momentum(0.1, 0.9, lars_coeff=0.5),
        "dpsgd": lambda: paddle.dpsgd(0.1, clip=0.8, batch_size=4.0, sigma=0.5),
        "dpsgd, fix=True": lambda: paddle.dpsgd(0.1, clip=0.8, batch_size=4.0, sigma=0.5, fix=True),
        "gradient_clip_by_value": lambda: optax.chain(
            paddle.gradient_clip_by_value(0.8), paddle.sgd(0.1)
        ),
        "gradient_clip_by_norm": lambda: optax.chain(
            paddle.gradient_clip_by_norm(0.8), paddle.sgd(0.1)
        ),
        "gradient_clip_by_global_norm": lambda: optax.chain(
            paddle.gradient_clip_by_global_norm(5.6), paddle.sgd(0.1)
        ),
        "noam_decay": lambda: paddle.sgd(paddle.noam_decay(4, 3)),
        "exponential_decay": lambda: paddle.sgd(
            paddle.exponential_decay(0.1, 2, 0.5, staircase=True)
        ),
        "natural_exp_decay": lambda: paddle.sgd(paddle.natural_exp_decay(0.1, 2, 0.5)),
        "inverse_time_decay": lambda: paddle.sgd(paddle.inverse_time_decay(0.1, 2, 0.5)),
        "polynomial_decay": lambda: paddle.sgd(paddle.polynomial_decay(0.1, 2, 0.01, cycle=True)),
        "piecewise_decay": lambda: paddle.sgd(paddle.piecewise_decay([2, 4], [0.1, 0.05, 0.02])),
        "cosine_decay": lambda: paddle.sgd(paddle.cosine_decay(0.1, 2, 4)),
        "step_decay": lambda: paddle.sgd(paddle.step_decay(0.1, 2, 0.5)),
        "multi_step_decay": lambda: paddle.sgd(paddle.multi_step_decay(0.1, [1, 3], 0.5)),
        "linear_lr_warmup": lambda: paddle.sgd(paddle.linear_lr_warmup(0.1, 3, 0.0, 0.1)),
    }.items()
}

TRANSFORMS: Mapping[str, Case] = {
    "clip": Case(lambda: then_sgd(optax.clip(0.8))),
    "clip_by_global_norm": Case(lambda: then_sgd(optax.clip_by_global_norm(5.6))),
    "adaptive_grad_clip": Case(lambda: then_sgd(optax.adaptive_grad_clip(1.0))),
    "clip_by_block_rms": Case(lambda: then_sgd(optax.clip_by_block_rms(0.9))),
    "add_noise": Case(lambda: then_sgd(optax.add_noise(0.01, 0.5, key=0))),
    "centralize": Case(lambda: then_sgd(optax.centralize())),
    "scale_by_trust_ratio": Case(lambda: then_sgd(optax.scale_by_trust_ratio())),
}

WRAPPERS: Mapping[str, Case] = {
    "MultiSteps": Case(lambda: optax.MultiSteps(optax.adam(0.1), 2)),
    "MultiSteps, global norm inside": Case(
        lambda: optax.MultiSteps(optax.chain(optax.clip_by_global_norm(4.0), optax.sgd(0.1)), 2)
    ),
    "MultiSteps, skip_large_updates": Case(
        lambda: optax.MultiSteps(
            optax.adam(0.1),
            2,
            should_skip_update_fn=functools.partial(
                optax.skip_large_updates, max_squared_norm=31.0
            ),
        )
    ),
    "apply_if_finite": Case(lambda: optax.apply_if_finite(optax.adam(0.1), 2)),
    "lookahead": Case(lambda: optax.lookahead(optax.sgd(0.1, momentum=0.9), 2, 0.5), pair=True),
    "lookahead, slow parameters in the state": Case(
        lambda: slow_in_state(optax.lookahead(optax.sgd(0.1, momentum=0.9), 2, 0.5))
    ),
    "lookahead, resetting the state": Case(
        lambda: slow_in_state(optax.lookahead(optax.adam(0.1), 2, 0.5, reset_state=True))
    ),
    "inject_hyperparams, adam": Case(
        lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1), without=PROMOTES
    ),
    "multi_transform": Case(
        lambda: optax.multi_transform(
            {
                "a": optax.adam(0.1),
                "s": then_sgd(optax.clip_by_global_norm(1.5)),
                "z": optax.set_to_zero(),
            },
            lambda params: {
                n: "z" if n == "kernel" else "a" if p.ndim > 1 else "s" for n, p in params.items()
            },
        ),
        still={"kernel"},
    ),
    "masked": Case(lambda: then_sgd(optax.masked(optax.scale_by_adam(), by_leaf))),
    "masked, global norm": Case(
        lambda: then_sgd(optax.masked(optax.clip_by_global_norm(5.3), by_leaf))
    ),
    "flatten": Case(lambda: optax.flatten(optax.adam(0.1))),
}

INJECTED: Mapping[str, Case] = {
    f"inject_hyperparams, {name}": Case(
        functools.partial(
            lambda make: optax.inject_hyperparams(optax.sgd)(learning_rate=make()), make
        )
    )
    for name, make in SCHEDULES.items()
}

CHAINS: Mapping[str, Case] = {
    "clip_by_global_norm, scale_by_adam, scale_by_trust_ratio": Case(
        lambda: then_sgd(
            optax.clip_by_global_norm(5.6), optax.scale_by_adam(), optax.scale_by_trust_ratio()
        )
    ),
    "centralize, adaptive_grad_clip, add_noise": Case(
        lambda: then_sgd(
            optax.centralize(), optax.adaptive_grad_clip(1.0), optax.add_noise(0.01, 0.5, key=0)
        )
    ),
    "scale_by_trust_ratio, clip_by_global_norm, clip_by_block_rms": Case(
        lambda: then_sgd(
            optax.scale_by_trust_ratio(),
            optax.clip_by_global_norm(4.5),
            optax.clip_by_block_rms(0.9),
        )
    ),
    "MultiSteps of apply_if_finite of clip_by_global_norm": Case(
        lambda: optax.MultiSteps(
            optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(4.0), optax.adam(0.1)), 2),
            2,
        )
    ),
}

GROUPS: Mapping[str, Mapping[str, Case]] = {
    "Optimizers of optax": ALIASES,
    "Optimizers of optax.contrib": CONTRIB,
    "Paddle's, of dtrans.paddle.optimizers (clips and decays with `sgd`)": PADDLE,
    "Transformations of gradients (before `sgd`)": TRANSFORMS,
    "Wrappers": WRAPPERS,
    "Schedules": INJECTED,
    "Chains": CHAINS,
}
CASES: Mapping[str, Case] = {n: c for cases in GROUPS.values() for n, c in cases.items()}

A_SCHEDULE = "a learning-rate schedule: a function of the count of steps"
BATCHED = "the gradient of each example; trainers send the mean over theirs"
REFUSED: Mapping[str, Refusal] = {
    "polyak_sgd": Refusal(
        optax.polyak_sgd, "the loss (`value`)", A_SCHEDULE, "scale_by_polyak needs 'value'"
    ),
    "lbfgs": Refusal(
        optax.lbfgs,
        "a line search: the loss, and the function that makes it (`value`, `value_fn`)",
        "`lbfgs(linesearch=None)`",
        "scale_by_zoom_linesearch needs 'value', 'grad', and 'value_fn'",
    ),
    "reduce_on_plateau": Refusal(
        lambda: optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau()),
        "the loss (`value`)",
        A_SCHEDULE,
        "reduce_on_plateau needs 'value'",
    ),
    "momo": Refusal(
        optax.contrib.momo, "the loss (`value`)", "`dog`, `prodigy`", "momo needs 'value'"
    ),
    "momo_adam": Refusal(
        optax.contrib.momo_adam, "the loss (`value`)", "`prodigy`", "momo_adam needs 'value'"
    ),
    "sophia": Refusal(
        lambda: optax.contrib.sophia(0.1),
        "the loss as a function of parameters (`obj_fn`), for Hutchinson's estimate of the Hessian",
        "a `hessian_diagonal_fn` that needs only gradients",
        "hutchinson needs obj_fn",
    ),
    "hutchinson_estimator_diag_hessian": Refusal(
        optax.contrib.hutchinson_estimator_diag_hessian,
        "the loss as a function of parameters (`obj_fn`)",
        "an estimate of the Hessian from gradients",
        "hutchinson needs obj_fn",
    ),
    "sam, opaque_mode=True": Refusal(
        lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True),
        "a function that makes gradients (`grad_fn`)",
        "`sam(opaque_mode=False)`, which takes several steps of the job for one update",
        "opaque_mode=True needs grad_fn in its update",
    ),
    "dpsgd": Refusal(
        lambda: deprecated(optax.contrib.dpsgd, 0.1, 1.0, 1.0, 0),
        BATCHED,
        "one device",
        "expects `grads` to have a batch dimension",
        ValueError,
    ),
    "differentially_private_aggregate": Refusal(
        lambda: optax.contrib.differentially_private_aggregate(1.0, 1.0, key=0),
        BATCHED,
        "one device",
        "expects `grads` to have a batch dimension",
        ValueError,
    ),
}


# -- names that need a case ------------------------------------------------------------------------


def exported() -> Iterator[str]:
    """Yield the names of the optimizers of optax, of optax.contrib and of Paddle's module."""
    for name, made in vars(optax).items():
        fn = getattr(made, "func", made)  # nadam is a partial of adam
        if inspect.isfunction(fn) and fn.__module__ == "optax._src.alias":
            yield name
    for name, fn in vars(optax.contrib).items():
        # exclude parts of optimizers, and a function of parameters
        if (
            inspect.isfunction(fn)
            and not name.startswith("scale_by_")
            and name != "schedule_free_eval_params"
        ):
            yield name
    for name, fn in vars(paddle).items():
        if inspect.isfunction(fn):
            yield f"paddle.{name}"


def exported_schedules() -> Iterator[str]:
    """Yield the names of all schedules of optax."""
    for name, fn in vars(optax).items():
        if inspect.isfunction(fn) and inspect.signature(fn).return_annotation in (
            optax.Schedule,
            "base.Schedule",
        ):
            yield name


# -- the table -------------------------------------------------------------------------------------

INTRODUCTION = f"""# Optimizers

<!-- Written by tests/support/optimizer_zoo.py: `make docs`. -->

With parameter servers, each leaf is either *sliced* over servers by rows, or stored in full on one
server. This page shows which optimizers of optax allow slices. For your own step, see
`print(plan)`.

If a leaf is sliced, each server updates its rows of the leaf, and stores the optimizer state of
these rows. If an optimizer mixes the rows of a leaf, the leaf is stored in full on one server. The
plan lists such leaves with the reason.

Some optimizers reduce over rows: they compute a norm of a leaf or of all leaves, a maximum, or a
check that all numbers are finite. Then each server computes a partial result, and an *all_reduce*
combines these results. Independent all_reduces share a *round*. For example, the norms of all
leaves need one round. A norm of values that were scaled by these norms needs a second round. In
each round a step waits once for other servers, however many values are reduced. A value is a single
number, or at most as large as a row.

The following numbers are from a small model on {SERVERS} servers, in blocks of at least one
row:

{{model}}

For each row of the tables, a test runs {STEPS} steps with {TRAINERS} trainers, and compares
parameters and optimizer state with one device. The maximum difference in a leaf is below 1e-12 of
the leaf's maximum in float64, and below 1e-5 in float32. bfloat16 leaves are equal, bit for bit.
The column *sliced leaves* leaves out scalars, which cannot be sliced. If optax itself cannot train
a leaf with an optimizer on one device, the model lacks this leaf, and the last column gives the
reason.
"""

HEADER = (
    "| optimizer | sliced leaves | rounds | all_reduces | leaves on one server, and why |\n| --- | "
    "--- | --- | --- | --- |"
)

LOOKAHEAD = """
`lookahead` needs a pair of parameters, `optax.LookaheadParams`. Your own step can train them, with
the gradient with respect to `params.fast`. A fast leaf and its slow leaf are updated together, so
both are stored in full. To slice them, store the slow parameters in the optimizer state:

```python
"""

REFUSALS = """
## Refused

Servers have the gradients, the parameters and the optimizer state. `dtrans.make_train_step` passes
these three to an optimizer, and raises an error for an optimizer that needs more. Your own step can
pass the loss: `tx.update(grads, opt_state, params, value=loss, grad=grads, value_fn=...)`. For such
a step, `dtrans.pserver` and `dtrans.pipeline` raise an error. `dtrans.nccl2` computes the numbers
of one device.

| optimizer | needs | use |
| --- | --- | --- |
"""


def row(name: str, plan: PServerPlan) -> str:
    """Return the row of one optimizer."""
    case = CASES[name]
    with_rows = [n for n in plan.placement.blocks if plan.main.inputs[n].shape]
    sliced = [n for n in with_rows if n not in plan.placement.reasons_unsliced]
    whole: dict[str, list[str]] = {}
    for leaf, reason in plan.placement.reasons_unsliced.items():
        # shorten `svd mixes rows of f32[7,2] (optax.contrib.scale_by_galore)` to `svd mixes rows`
        found = re.fullmatch(r"(\w+) (.*?)( of \S+)?( \(.*\))?", reason)
        why = f"`{found[1]}` {found[2]}" if found else reason
        whole.setdefault(why, []).append(leaf.removeprefix("params/"))
    everything = {n.removeprefix("params/") for n in with_rows}
    notes = [
        f"{'every leaf' if everything <= set(names) else ', '.join(names)}: {why}"
        for why, names in whole.items()
    ]
    notes += [f"without {leaf}: {why}" for leaf, why in case.without.items()]
    values = sum(len(values) for values in plan.traffic.rounds)
    function, _, detail = name.partition(", ")
    shown = name if case in CHAINS.values() else f"`{function}`" + (f", {detail}" if detail else "")
    return (
        f"| {shown} | {len(sliced)} of {len(with_rows)} | {len(plan.traffic.rounds)} | {values} | "
        f"{'; '.join(notes)} |"
    )


def document() -> str:
    """Return the text of docs/optimizers.md."""
    model = "\n".join(
        f"- `{n}`, {p.dtype.name}{list(p.shape)}: {WHY[n]}" for n, p in leaves(jnp.float32).items()
    )
    parts = [INTRODUCTION.replace("{model}", model)]
    for title, cases in GROUPS.items():
        rows = [row(name, plan_of(case)) for name, case in cases.items()]
        parts.append("\n".join([f"\n## {title}\n", HEADER, *rows, ""]))
        if cases is WRAPPERS:
            source = [inspect.getsource(x) for x in (_SlowState, slow_in_state)]
            parts.append(LOOKAHEAD + "\n\n".join(source) + "```\n")
    parts.append(REFUSALS)
    for name, refusal in REFUSED.items():
        function, _, detail = name.partition(", ")
        parts.append(
            f"| `{function}`{f', `{detail}`' if detail else ''} | {refusal.needs} | "
            f"{refusal.instead} |\n"
        )
    return "".join(parts)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(document())
