"""A table with every optimizer of the zoo: `dense` updates equal one device with all rows, within
1e-12.

The updates of two servers run without a protocol. Each server has a part of a table and of another
leaf. Gradients belong to rows that two trainers have looked up, and the servers exchange
reductions. Both trainers look up some rows, other rows are looked up after a gap, and others never.
`CLASSES` states, for each case, what happens to a row that no trainer looks up. A new case of the
zoo needs an entry there.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assemble, distance, endpoints, quick
from optimizer_zoo import CASES, Case
from table_servers import TableServers

import dtrans
from dtrans.errors import ConfigError
from dtrans.run.base.platforms import stable_bits_options


V, D, SERVERS, TRAINERS = 13, 2, 2, 2
LIMIT = 1e-12

# for each step, the rows that each trainer looks up: 2 and 11 never, 0 and 9 after a gap of six, 1
# by both
LOOKUPS = [
    [[0, 1, 5], [1, 9]],
    [[5], [7, 8]],
    [[], [5, 8]],
    [[1, 10], [1, 10]],
    [[7], []],
    [[], []],
    [[6, 12], [3, 4, 6]],
    [[0, 1], [0, 9]],
]

# Classes of the effect on a row whose gradient is zero. A: no change. B: the row's part of the
# state changes. C: the row itself changes. Rows of B and C catch up before they are read. D:
# updates change all rows, because they reduce over rows or draw noise for each row.
CLASSES: Mapping[str, tuple[str, ...]] = {
    "A": (
        "adagrad",
        "sgd",
        "sign_sgd",
        "normalize",
        "paddle.sgd",
        "paddle.adagrad",
        "paddle.gradient_clip_by_value",
        "paddle.gradient_clip_by_norm",
        "paddle.gradient_clip_by_global_norm",
        "paddle.noam_decay",
        "paddle.exponential_decay",
        "paddle.natural_exp_decay",
        "paddle.inverse_time_decay",
        "paddle.polynomial_decay",
        "paddle.piecewise_decay",
        "paddle.cosine_decay",
        "paddle.step_decay",
        "paddle.multi_step_decay",
        "paddle.linear_lr_warmup",
        "clip",
        "clip_by_global_norm",
        "clip_by_block_rms",
        "centralize",
        "masked, global norm",
        "inject_hyperparams, constant_schedule",
        "inject_hyperparams, cosine_decay_schedule",
        "inject_hyperparams, cosine_onecycle_schedule",
        "inject_hyperparams, exponential_decay",
        "inject_hyperparams, join_schedules",
        "inject_hyperparams, linear_onecycle_schedule",
        "inject_hyperparams, linear_schedule",
        "inject_hyperparams, piecewise_constant_schedule",
        "inject_hyperparams, piecewise_interpolate_schedule",
        "inject_hyperparams, polynomial_schedule",
        "inject_hyperparams, sgdr_schedule",
        "inject_hyperparams, warmup_constant_schedule",
        "inject_hyperparams, warmup_cosine_decay_schedule",
        "inject_hyperparams, warmup_exponential_decay_schedule",
    ),
    "B": (
        "adadelta",
        "rmsprop",
        "acprop",
        "paddle.decayed_adagrad",
        "paddle.adadelta",
    ),
    "C": (
        "adabelief",
        "adam",
        "adam, bfloat16 momentum",
        "adamax",
        "adamaxw",
        "adamw",
        "adamw, masked decay and a schedule",
        "adan",
        "amsgrad",
        "lion",
        "nadam",
        "nadamw",
        "novograd",
        "optimistic_adam",
        "optimistic_adam_v2",
        "optimistic_gradient_descent",
        "radam",
        "rmsprop, centered, momentum",
        "rprop",
        "sgd, momentum",
        "sgd, nesterov",
        "signum",
        "yogi",
        "ademamix",
        "adopt",
        "cocob",
        "madgrad",
        "sam",
        "schedule_free",
        "schedule_free_adamw",
        "schedule_free_sgd",
        "simplified_ademamix",
        "sophia, own Hessian",
        "split_real_and_imaginary",
        "paddle.momentum",
        "paddle.adam",
        "paddle.adamw",
        "paddle.adamax",
        "paddle.rmsprop",
        "paddle.ftrl",
        "paddle.dpsgd",
        "MultiSteps",
        "MultiSteps, skip_large_updates",
        "apply_if_finite",
        "lookahead, slow parameters in the state",
        "lookahead, resetting the state",
        "inject_hyperparams, adam",
        "multi_transform",
        "masked",
    ),
    "D": (
        "adafactor",
        "adafactor, momentum, nothing factored",
        "fromage",
        "lamb",
        "lars",
        "noisy_sgd",
        "sm3",
        "dadapt_adamw",
        "dog",
        "dog, first step given",
        "dowg",
        "mechanize",
        "prodigy",
        "paddle.lamb",
        "paddle.lars_momentum",
        "paddle.dpsgd, fix=True",
        "adaptive_grad_clip",
        "add_noise",
        "scale_by_trust_ratio",
        "MultiSteps, global norm inside",
        "clip_by_global_norm, scale_by_adam, scale_by_trust_ratio",
        "centralize, adaptive_grad_clip, add_noise",
        "scale_by_trust_ratio, clip_by_global_norm, clip_by_block_rms",
        "MultiSteps of apply_if_finite of clip_by_global_norm",
    ),
}

# optimizers that cannot update single rows, and the text of their error
REFUSED: Mapping[str, str] = {
    "lbfgs, linesearch=None": r"scatter mixes rows of f64\[13,2\] \(optax.scale_by_lbfgs\)",
    "galore": r"svd mixes rows of f32\[13,2\] \(optax.contrib.scale_by_galore\)",
    "muon": r"scan reduces over rows in each iteration of f64\[1,2,13\] "
    r"\(optax.contrib.scale_by_muon\)",
    "lookahead": r"sub mixes leaves of f64\[13,2\] \(optax.lookahead\)",
    "flatten": r"concatenate mixes leaves of f64\[26\] \(optax.flatten\)",
}
# Cases of B and C without a lazy form: gradients wait for a step that must reach every row, or one
# step sets the state anew. No case of D has a lazy form.
WAITS = (
    "MultiSteps",
    "MultiSteps, skip_large_updates",
    "lookahead, slow parameters in the state",
    "lookahead, resetting the state",
    "sam",
    # their first step differs from later steps
    "adan",
    "adopt",
    "novograd",
    "optimistic_gradient_descent",
)
CLASS = {name: kind for kind, names in CLASSES.items() for name in names}
# some cases of each class; all others run at night
BY_DAY = (
    *("sgd", "adagrad", "clip_by_global_norm", "inject_hyperparams, join_schedules"),
    *("rmsprop", "paddle.adadelta"),
    *(
        "adamw",
        "adan",
        "adopt",
        "schedule_free",
        "paddle.ftrl",
        "MultiSteps, skip_large_updates",
        "multi_transform",
    ),
    *(
        "adafactor",
        "noisy_sgd",
        "sm3",
        "prodigy",
        "MultiSteps of apply_if_finite of clip_by_global_norm",
    ),
)


def init(case: Case, key: jax.Array) -> tuple[Any, Any]:
    params: Any = {"emb": jax.random.normal(key, (V, D)), "w": jnp.linspace(0.5, 2.0, 5)}
    if case.complex_leaf:
        params["wave"] = jnp.linspace(0.5, 2.0, 6).reshape(3, 2) * (1 + 0.5j)
    if case.pair:
        params = optax.LookaheadParams.init_synced(params)
    return params, case.make().init(params)


def loss(params: Any, ids: jax.Array) -> jax.Array:
    """Return a loss that has a gradient for every leaf.

    Tests replace the gradients (`gradients`).
    """
    return sum(jnp.mean(jnp.abs(p[ids] if n == "emb" else p) ** 2) for n, p in params.items())


def planned(case: Case, update: str = "dense", **rows: Any) -> Any:
    name = "params/fast/emb" if case.pair else "params/emb"
    key = jax.random.key(0)
    main = dtrans.trace(
        case.step(loss), *jax.eval_shape(lambda key: init(case, key), key), jnp.zeros(3, int)
    )
    return dtrans.pserver(
        main,
        dtrans.trace(lambda key: init(case, key), key),
        pservers=endpoints(SERVERS),
        trainers=TRAINERS,
        placement=dtrans.BlockPlacement(min_block_size=1),
        sparse={name: dtrans.Rows(update, **rows)},
    )


def gradients(params: Any, step: int, trainer: int) -> dict[str, np.ndarray]:
    """Return a gradient for each leaf; for a table, for the looked-up rows.

    No mean is near zero (see `optimizer_zoo.gradients`).
    """
    signs, rng = np.random.default_rng(130 + step), np.random.default_rng((step, trainer))

    def one(p: Any) -> np.ndarray:
        real = lambda: rng.uniform(0.3, 1.5, p.shape) * signs.choice([-1, 1], p.shape)
        return real() + 1j * real() if jnp.iscomplexobj(p) else real()

    found = {n: one(p) for n, p in params.items()}
    found["emb"][np.setdiff1d(np.arange(V), LOOKUPS[step][trainer])] = 0
    return found


def one_device(case: Case) -> Any:
    """Return the update of full arrays.

    Rates in float32 have the servers' bits only if they are written in the same way.
    """
    tx = case.make()

    @partial(quick, **(stable_bits_options() or {}))
    def step(params: Any, state: Any, grads: Any) -> Any:
        mean = jax.tree.map(lambda *g: sum(g[1:], start=g[0]) * (1 / len(g)), *grads)
        updates, state = tx.update(mean, state, params)
        return optax.apply_updates(params, updates), state

    return step


def check(case: Case, plan: Any) -> None:
    """Compare looked-up rows in each step, and parameters and state at the end."""
    servers, step = TableServers(plan, LOOKUPS), one_device(case)
    params, state = init(case, jax.random.key(0))
    for at, lookups in enumerate(LOOKUPS):
        ids = np.unique(np.concatenate([np.array(x, np.int32) for x in lookups]))
        assert np.abs(servers.rows(ids) - np.asarray(params["emb"])[ids]).max(initial=0) <= LIMIT, (
            f"step {at}"
        )
        grads = [gradients(params, at, k) for k in range(TRAINERS)]
        servers.step(at, grads)
        params, state = step(params, state, grads)
    flat = plan.main.flatten(params, state, np.zeros(3, int))
    whole = dict(zip(plan.main.in_names[:-1], flat[:-1], strict=True))
    found = assemble(plan, servers.held(), list(whole))
    assert set(found) == set(whole) - set(plan.frozen)
    for name, value in found.items():
        far = distance(value, whole[name])
        assert far <= (0 if value.dtype == jnp.bfloat16 else LIMIT), f"{name} is off by {far:.3g}"


def cases() -> list[Any]:
    """Return all cases in both placements. Each day runs a part of them."""
    found = []
    for name, place in itertools.product(CLASS, ("range", "bucket")):
        by_day = name in BY_DAY and BY_DAY.index(name) % 2 == (place == "bucket")
        marks = [] if by_day else [pytest.mark.rotated]
        found.append(pytest.param(name, place, id=f"{CLASS[name]}-{name}-{place}", marks=marks))
    return found


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name, place", cases())
def test_dense_is_one_device(name: str, place: str) -> None:
    plan = planned(CASES[name], place=place, buckets=5)
    ((leaf, table),) = plan.tables.of.items()
    moves = "A" if not table.zero.changes else "C" if leaf in table.zero.changes else "B"
    assert ("D" if table.updates_all else moves) == CLASS[name]
    check(CASES[name], plan)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_rows_or_leaves_is_refused_by_name(name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"emb cannot be a table: its update cannot be cut: {REFUSED[name]}"
    ):
        planned(CASES[name])


LAZY = [
    pytest.param(name, marks=[] if name in (*BY_DAY, *WAITS, "adam") else [pytest.mark.rotated])
    for kind in "BC"
    for name in CLASSES[kind]
]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", LAZY)
def test_lazy_is_refused_where_gradients_wait(name: str) -> None:
    if name not in WAITS:
        ((_, table),) = planned(CASES[name], "lazy").tables.of.items()
        assert not table.changes_unread_rows and not table.updates_all
        return
    with pytest.raises(
        ConfigError, match=r"only in steps that .* selects. Say dtrans.Rows\(update='dense'\)"
    ):
        planned(CASES[name], "lazy")


def test_every_case_of_the_zoo_has_a_class() -> None:
    have = [*REFUSED, *(name for names in CLASSES.values() for name in names)]
    assert sorted(have) == sorted(CASES)
