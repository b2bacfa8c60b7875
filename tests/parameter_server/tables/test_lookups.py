"""Leaves that a step reads only by rows, and the effect of an update on rows that no trainer looks
up."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from table_losses import LOOPS, READ, D, V

import dtrans
from dtrans._jax import equations
from dtrans.errors import ConfigError
from dtrans.parameter_server.tables.lookups import find_lookups
from dtrans.parameter_server.tables.zero_gradient import at_zero_gradient, find_accumulation
from dtrans.rows.analysis import analyse
from dtrans.step.halves import divide_step


PARAMS = {
    "emb": np.ones((V, D), np.float32),
    "w": np.ones((D, D), np.float32),
    "table": np.ones((V, D), np.float32),
}
SGD = optax.sgd(0.1)
IDS = np.zeros((4, 2), np.int32)


def step_of(
    loss: Callable[..., Any], tx: Any = SGD, params: Any = PARAMS, *, has_aux: bool = False
) -> Any:
    step = dtrans.make_train_step(loss, tx, has_aux=has_aux)
    return dtrans.trace(step, params, tx.init(params), IDS)


def found(loss: Callable[..., Any], **options: Any) -> Any:
    return find_lookups(divide_step(step_of(loss, **options)))


@pytest.mark.parametrize("how", READ)
def test_a_leaf_that_is_read_by_rows_is_a_table(how: str) -> None:
    loss, size = READ[how]
    lookups = found(loss)
    assert set(lookups.tables) == {"params/emb"} and lookups.tables["params/emb"].size == size
    assert not lookups.refused


@pytest.mark.parametrize("mode, outside", [("drop", "drop"), ("clip", "clip")])
def test_the_derivative_of_overwritten_rows_has_the_mode_of_the_scatter(
    mode: Any, outside: str
) -> None:
    """The derivative reads rows again, at the ids of the overwritten rows."""

    def loss(p: Any, ids: jax.Array) -> jax.Array:
        emb = p["emb"].at[ids[:, 0]].set(0.0, mode=mode)
        return jnp.mean((emb[ids] @ p["w"]) ** 2)

    table = found(loss).tables["params/emb"]
    assert [x[1:3] for x in table.ids] == [(0, outside), (0, "error")] and table.size == 12


def test_two_tables_and_a_row_number_that_a_step_draws() -> None:
    """The ids of negative samples depend on a key, but not on parameters."""

    def loss(p: Any, ids: jax.Array) -> jax.Array:
        noise = jax.random.randint(jax.random.key(0), (5,), 0, V)
        return jnp.mean(p["emb"][ids[:, 0]] @ p["table"][noise].T)

    lookups = found(loss)
    assert {n: t.size for n, t in lookups.tables.items()} == {"params/emb": 4, "params/table": 5}


@pytest.mark.parametrize("how", LOOPS)
def test_rows_may_be_picked_in_loops_and_branches(how: str) -> None:
    """No value of the trainer's program has as many rows as the table."""
    loss, sizes = LOOPS[how]
    lookups = found(loss)
    assert {n: t.size for n, t in lookups.tables.items()} == sizes and not lookups.refused
    plan = planned({n: dtrans.Rows("dense") for n in sizes}, loss=loss)
    shapes = [
        v.aval.shape
        for e in equations(plan.trainer_program(0).jaxpr)
        for v in (*e.invars, *e.outvars)
    ]
    # of `table`
    assert (
        not [s for s in shapes if V in s and len(sizes) == 2] and sum(V in s for s in shapes) <= 1
    )


def generated(p: Any, ids: jax.Array) -> jax.Array:
    """Return a loss whose ids in each iteration depend on a result of the previous iteration."""
    turn = lambda i, _: (jnp.argmax(p["emb"][i] @ p["w"]), p["emb"][i])
    return jax.lax.scan(turn, ids[0, 0], None, length=3)[1].sum()


REFUSED = {
    "a tied output": (
        lambda p, ids: jnp.mean(p["emb"][ids[:, 0]] @ p["emb"].T),
        "reads all of its rows",
    ),
    "a penalty": (
        lambda p, ids: jnp.mean(p["emb"][ids]) + jnp.sum(p["emb"] ** 2),
        "reads all of its rows",
    ),
    "a row that a row chooses": (
        lambda p, ids: jnp.mean(p["emb"][jnp.argmax(p["emb"][ids[:, 0]], 1)]),
        "depend on rows of a table",
    ),
    "a loop that looks up what it has made": (generated, "depend on rows of a table"),
    "a loop that stops by itself": (
        lambda p, ids: (
            p["emb"][ids[0, 0]].sum()
            + jax.lax.stop_gradient(
                jax.lax.while_loop(
                    lambda x: x < 9, lambda x: x + p["emb"][ids[0, 0]].sum() ** 2 + 1, 0.0
                )
            )
        ),
        "while .* looks rows up in an unknown number of iterations",
    ),
    "one-hot beside": (
        lambda p, ids: jnp.mean(p["emb"][ids]) + jnp.mean(jax.nn.one_hot(ids[:, 0], V) @ p["emb"]),
        r"dot_general of f32\[4,40\] \(test_lookups.py",
    ),
    "a row of zeros": (
        lambda p, ids: jnp.mean(jnp.concatenate([jnp.zeros((1, D)), p["emb"]])[ids]),
        r"concatenate mixes rows of .*padding an id outside the table, and read jnp.take\(table",
    ),
    "another shape": (
        lambda p, ids: jnp.mean(p["emb"].reshape(V // 2, -1)[ids]),
        "reshape mixes rows of .* \\(let init return the parameter in the shape whose rows",
    ),
    "a factor that is trained": (
        lambda p, ids: jnp.mean((p["emb"] * p["w"][0])[ids[:, 0]]),
        "reads all of its rows",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_reads_all_rows_is_named(what: str) -> None:
    loss, why = REFUSED[what]
    lookups = found(loss)
    assert not lookups.tables
    assert re.search(why, lookups.refused["params/emb"])
    with pytest.raises(
        ConfigError, match="sparse contains params/emb, which cannot be a table: .*" + why
    ):
        dtrans.pserver(step_of(loss), dtrans.trace(lambda: (PARAMS, optax.sgd(0.1).init(PARAMS))),
                       sparse={"params/emb": dtrans.Rows()})  # fmt: skip


def test_refused_tables_are_in_the_order_of_the_leaves() -> None:
    """Rows that select other rows are found after leaves that other equations read."""
    by_rows, _ = REFUSED["a row that a row chooses"]
    loss = lambda p, ids: by_rows(p, ids) + p["table"][ids].sum() + (p["table"] ** 2).sum()
    assert list(found(loss).refused) == ["params/emb", "params/table"]


def test_a_result_that_reads_the_table_is_named() -> None:
    loss = lambda p, ids: (jnp.mean(p["emb"][ids]), optax.tree.norm(p))
    assert "reduce_sum" in found(loss, has_aux=True).refused["params/emb"]
    loss = lambda p, ids: (jnp.mean(p["emb"][ids]), 2 * p["emb"])
    assert found(loss, has_aux=True).refused["params/emb"] == "the step returns its rows in aux"


# -- options ---------------------------------------------------------------------------------------


def planned(sparse: Any, tx: Any = SGD, loss: Any = READ["by index"][0], **options: Any) -> Any:
    return dtrans.pserver(
        step_of(loss, tx), dtrans.trace(lambda: (PARAMS, tx.init(PARAMS))), sparse=sparse, **options
    )


def test_auto_takes_what_is_large_enough_and_says_so() -> None:
    plan = planned("auto")
    assert set(plan.tables.of) == {"params/emb"}
    said = (
        "table params/emb: 40 rows, at most 8 looked up by a trainer in a step, at most 224 "
        "bytes; dense: rows that"
    )
    assert said in str(plan)
    assert plan.bytes_per_step == {"send": 36 + 8 * (12 + 4), "recv": 36 + 8 * 12}
    many = lambda p, ids: jnp.mean(p["emb"][jnp.concatenate([ids, ids])])
    assert "no table: params/emb: a step looks up as many as 16 of its 40 rows" in str(
        planned("auto", loss=many)
    )


@pytest.mark.parametrize(
    "sparse, said",
    [
        ("all", "sparse is 'all'; expected None, 'auto', or"),
        ({"params/emb": "dense"}, "a dtrans.Rows"),
        (
            {"params/nothing": dtrans.Rows()},
            "sparse contains 'params/nothing'; expected parameters that servers update: ",
        ),
        ({"params/w": dtrans.Rows()}, "params/w, which cannot be a table: dot_general"),
    ],
)
def test_what_is_no_option_is_refused(sparse: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        planned(sparse)


def test_the_update_of_other_rows_has_to_be_said_where_they_would_move() -> None:
    named = {"params/emb": dtrans.Rows()}
    assert not planned(named, optax.adagrad(0.1)).tables.of["params/emb"].updates_all
    with pytest.raises(
        ConfigError, match="params/emb needs update=.* opt_state/0/mu/emb, .* change even"
    ):
        planned(named, optax.adam(0.1))
    with pytest.raises(
        ConfigError, match="cannot have update='lazy': reduce_sum .*trust_ratio.* over all rows"
    ):
        planned({"params/emb": dtrans.Rows("lazy")}, optax.lamb(0.1))
    with pytest.raises(ConfigError, match="params/emb cannot be a table: its update cannot be cut"):
        planned({"params/emb": dtrans.Rows("lazy")}, optax.contrib.muon(0.1))


# -- rows whose gradient is zero -------------------------------------------------------------------

STILL = {
    "sgd": optax.sgd(0.1),
    "schedule": optax.sgd(optax.cosine_decay_schedule(0.1, 10)),
    "adagrad": optax.adagrad(0.1),
    "clip": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
    "clip, adagrad": optax.chain(optax.clip(1.0), optax.adagrad(0.1)),
    "sign": optax.sign_sgd(0.1),
    "finite": optax.apply_if_finite(optax.sgd(0.1), 3),
    "rowwise_adagrad": dtrans.optimizers.rowwise_adagrad(0.1),
}
MOVES = {
    "momentum": (optax.sgd(0.1, 0.9), ("params/emb", "opt_state/0/trace/emb")),
    "adam": (optax.adam(0.1), ("params/emb", "opt_state/0/mu/emb", "opt_state/0/nu/emb")),
    "decay": (optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)), ("params/emb",)),
    "rmsprop": (optax.rmsprop(0.1), ("opt_state/0/nu/emb",)),
    "rowwise_adam": (
        dtrans.optimizers.rowwise_adam(0.1),
        ("params/emb", "opt_state/0/mu/emb", "opt_state/0/nu/emb")),
    "every second": (optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
                     ("params/emb", "opt_state/acc_grads/emb")),
}  # fmt: skip


def zero_of(tx: Any) -> Any:
    step = divide_step(step_of(READ["by index"][0], tx))
    return at_zero_gradient(analyse(step.optimize, step.optimized), "params/emb", {})


@pytest.mark.parametrize("name", STILL)
def test_rows_with_a_gradient_of_zero_stay(name: str) -> None:
    zero = zero_of(STILL[name])
    assert (
        zero.changes,
        zero.reduction_over_rows,
        zero.index_dependence,
        zero.state_on_other_axis,
    ) == ((), "", "", ())


@pytest.mark.parametrize("name", MOVES)
def test_rows_with_a_gradient_of_zero_move(name: str) -> None:
    tx, moves = MOVES[name]
    assert zero_of(tx).changes == moves


def test_what_such_rows_add_is_named() -> None:
    assert "trust_ratio" in zero_of(optax.lamb(0.1)).reduction_over_rows
    noisy = optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1))
    assert "add_noise" in zero_of(noisy).index_dependence


def behind_a_barrier() -> Any:
    """Return momentum whose old and new values pass one optimization barrier."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        new = jax.tree.map(
            lambda m, g: jax.lax.optimization_barrier((m, 0.9 * m + g))[1], state, updates
        )
        return jax.tree.map(lambda g: -0.1 * g, updates), new

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def test_values_behind_a_barrier_are_each_their_own() -> None:
    assert zero_of(behind_a_barrier()).changes == ("opt_state/emb",)


@pytest.mark.parametrize("name", [*STILL, *MOVES])
def test_the_proof_is_what_the_update_does(name: str) -> None:
    """Run the user's update on rows of random numbers, with random state."""
    tx = STILL.get(name) or MOVES[name][0]
    params = {"emb": jnp.asarray(np.random.default_rng(0).normal(size=(5, 2)), jnp.float32)}
    state = jax.tree.map(
        lambda x: jnp.full_like(x, 1) if x.dtype == jnp.float32 else x, tx.init(params)
    )
    updates, new = tx.update({"emb": jnp.zeros((5, 2))}, state, params)
    moved = {"params/emb"} if jnp.any(updates["emb"] != 0) else set()
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(new), strict=True
    ):
        if a.shape == (5, 2) and jnp.any(a != b):
            moved.add("opt_state/" + jax.tree_util.keystr(path, simple=True, separator="/"))
    assert moved <= set(zero_of(tx).changes) or name == "every second"
    assert bool(moved) == (name in MOVES) or name == "every second"


# -- gradients that wait in the state --------------------------------------------------------------


def keeping(fn: Callable[..., Any], *, by_row: bool = False) -> Any:
    """Return an optimizer whose state is a sum of gradients and a count.

    Each row may have its own count.
    """

    def init(params: Any) -> Any:
        count = lambda p: jnp.zeros(p.shape if by_row else (), jnp.int32)
        return jax.tree.map(lambda p: (jnp.zeros_like(p), count(p)), params)

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        used = lambda n, g: state[n][1] + ((g != 0) if by_row else 1)
        made = {n: fn(g, state[n][0], used(n, g) % 3 == 2) for n, g in grads.items()}
        return {n: x[0] for n, x in made.items()}, {
            n: (x[1], used(n, grads[n])) for n, x in made.items()
        }

    return optax.GradientTransformation(init, update)


def when_due(g: Any, x: Any, due: Any) -> Any:
    return jnp.where(due, -(x + g), 0.0), jnp.where(due, 0.0, x + g)


WAITS = {
    "MultiSteps": optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
    "MultiSteps, sums": optax.MultiSteps(optax.sgd(0.1), 2,
                                         use_grad_mean=False).gradient_transformation(),
    "MultiSteps of adam": optax.MultiSteps(optax.adam(0.1), 3).gradient_transformation(),
    "MultiSteps in a chain": optax.chain(
        optax.clip(1.0), optax.MultiSteps(optax.identity(), 2).gradient_transformation(),
        optax.adagrad(0.1)),
    "apply_every": optax.chain(optax.apply_every(4), optax.sgd(0.1)),
    "apply_every, behind adam": optax.chain(optax.scale_by_adam(), optax.apply_every(2),
                                            optax.scale(-0.1)),
    "where": keeping(when_due),
    "a count of each row": keeping(when_due, by_row=True),
    "cond": keeping(lambda g, x, due: jax.lax.cond(
        due, lambda: (-(x + g), jnp.zeros_like(x)), lambda: (jnp.zeros_like(x), x + g))),
    "switch": keeping(lambda g, x, due: jax.lax.switch(
        due * 2, [lambda: (0 * x, x + g)] * 2 + [lambda: (-(x + g), jnp.zeros_like(x))])),
    "factor": keeping(lambda g, x, due: (-due.astype(float) * (x + g), (1 - due) * (x + g))),
    "used at once, and once more": keeping(
        lambda g, x, due: (jnp.where(due, -(g + x), -g), jnp.where(due, 0.0, x + g))),
    "apply_every, behind momentum": optax.chain(optax.trace(0.9), optax.apply_every(3)),
    "momentum, a rate that pauses": optax.sgd(lambda count: jnp.where(count % 4 > 1, 0.0, 0.1),
                                              0.9),
}  # fmt: skip
AT_ONCE = {
    **{name: tx for name, (tx, _) in MOVES.items() if name != "every second"},
    "adam, warmup": optax.adam(optax.warmup_cosine_decay_schedule(0.0, 0.1, 4, 10)),
    "adam, joined rates": optax.adam(
        optax.join_schedules([optax.constant_schedule(x) for x in (0.1, 0.2)], [3])
    ),
    "nesterov": optax.sgd(0.1, 0.9, nesterov=True),
    "amsgrad": optax.amsgrad(0.1),
    "radam": optax.radam(0.1),
    "lion": optax.lion(0.1),
    "finite": optax.apply_if_finite(optax.adam(0.1), 3),
    "finite, clipped": optax.apply_if_finite(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)), 3
    ),
    "ftrl": dtrans.paddle.optimizers.ftrl(0.1, l1=0.1),
}


def analysis_of(tx: Any) -> Any:
    step = divide_step(step_of(READ["by index"][0], tx))
    return analyse(step.optimize, step.optimized)


@pytest.mark.parametrize("name", WAITS)
def test_lazy_rows_are_refused_where_gradients_wait(name: str) -> None:
    """The error names the array that stores gradients. A plan with the remedy succeeds."""
    with pytest.raises(
        ConfigError, match=r"params/emb cannot have update='lazy': .* only in steps that .* selects"
    ):
        planned({"params/emb": dtrans.Rows("lazy")}, WAITS[name])
    assert "params/emb" in planned({"params/emb": dtrans.Rows("dense")}, WAITS[name]).tables.of


@pytest.mark.parametrize("name", AT_ONCE)
def test_lazy_rows_are_taken_where_each_step_uses_gradients_at_once(name: str) -> None:
    assert find_accumulation(analysis_of(AT_ONCE[name]), "params/emb") == ""


@pytest.mark.parametrize(
    "name", [*AT_ONCE, "MultiSteps", "apply_every", "cond", "momentum, a rate that pauses"]
)
def test_what_waits_is_what_the_update_does(name: str) -> None:
    """Run steps with real state.

    A row without a gradient is unchanged in some steps and changes in others.
    """
    tx = {**WAITS, **AT_ONCE}[name]
    params = {"emb": jnp.asarray(np.random.default_rng(0).normal(size=(5, 2)), jnp.float32)}
    state, update, moved = tx.init(params), jax.jit(tx.update), list[bool]()
    for _ in range(8):
        idle, _ = update(jax.tree.map(jnp.zeros_like, params), state, params)
        # FTRL sets rows again, up to a rounding
        moved.append(bool(jnp.any(jnp.abs(idle["emb"]) > 1e-6)))
        updates, state = update(jax.tree.map(jnp.ones_like, params), state, params)
        params = optax.apply_updates(params, updates)
    # before the first step, the state contains no gradients
    assert (len(set(moved[1:])) == 2) == (name in WAITS)


def test_a_trainer_that_updates_rows_itself_is_told_what_helps() -> None:
    """GEO-SGD supports neither value of `update` here, so no error recommends the other value."""
    for update in ("lazy", "dense"):
        with pytest.raises(
            ConfigError,
            match=r"only in steps that .* Leave it out of sparse, or use another optimizer",
        ):
            planned({"params/emb": dtrans.Rows(update)}, WAITS["MultiSteps"], mode=dtrans.Geo(2))


def test_programs_have_the_ops_of_tables() -> None:
    plan = planned("auto")
    ops = [e.primitive.name for e in plan.trainer_program(0).eqns]
    assert (
        ops.index("split_ids")
        < ops.index("prefetch")
        < ops.index("send_rows")
        < ops.index("send_barrier")
    )
    assert ops.count("recv") == 1 and "concat" not in ops  # of `w`
    assert not any(V in getattr(v.aval, "shape", ()) for e in equations(plan.trainer.jaxpr)
                   for v in e.outvars
                   if e.primitive.name in ("gather", "scatter-add"))  # fmt: skip
