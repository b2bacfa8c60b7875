"""Asynchronous parameter servers: each gradient causes one update.

With one trainer, this is sequential training. With several trainers that take turns, the tests
compute the result by hand. Without turns, no gradient is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import init_of, mlp_batch, mlp_loss, mlp_params, plain_step, tree_close
from role_threads import (
    HANG,
    Peer,
    RoleThreads,
    StepOrder,
    check_state,
    free_endpoints,
    serve,
    until,
)

import dtrans
from dtrans.errors import ConfigError, GradientError, PeerError
from dtrans.parameter_server.plan import PServerPlan
from dtrans.run.parameter_server.block_update import BlockUpdates
from dtrans.run.parameter_server.update import ServerUpdate


@pytest.fixture(autouse=True)
def x64() -> Any:
    with jax.enable_x64(True):
        yield


def plan_for(
    servers: Sequence[str],
    tx: Any,
    params: Any,
    *batch: Any,
    trainers: int = 1,
    loss: Any = mlp_loss,
    **options: Any,
) -> Any:
    return flat_options.pserver(
        dtrans.trace(
            dtrans.make_train_step(loss, tx), params, jax.eval_shape(tx.init, params), *batch
        ),
        dtrans.trace(init_of(tx), params),
        pservers=servers,
        trainers=trainers,
        **{"mode": dtrans.Async(), "min_block_size": 1, **options},
    )


def train(
    plan: PServerPlan, k: int, batches: Sequence[Any], turns: StepOrder | None, *args: Any
) -> tuple[Any, list[Any]]:
    """Run one trainer on its batches. Return its last parameters and its losses."""
    with dtrans.Executor(deadline=HANG) as exe:
        params = exe.run(plan.trainer_startup_program(k), *args)
        losses = []
        for batch in batches:
            step = lambda params=params, batch=batch: exe.run(
                plan.trainer_program(k), params, *batch
            )
            params, loss = turns.take(k, step) if turns else step()
            losses.append(loss)
        return params, losses


def run(
    role_threads: RoleThreads,
    plan: PServerPlan,
    params: Any,
    batches: Sequence[Any],
    turns: StepOrder | None,
) -> tuple[Any, Any]:
    """Run a job.

    Return the final states of the servers, and the result of each trainer. Trainer k has
    `batches[k]`.
    """
    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep, params)
    for k in range(plan.trainers):
        role_threads.start(f"trainer {k}", train, plan, k, batches[k], turns, params)
    ended = role_threads.all()
    return [ended[ep] for ep in plan.servers], [ended[f"trainer {k}"] for k in range(plan.trainers)]


OPTIMIZERS = {
    "adam": optax.adam(optax.cosine_decay_schedule(1e-2, 20)),
    "momentum, joined schedules": optax.sgd(
        optax.join_schedules(
            [optax.linear_schedule(0.0, 0.1, 3), optax.piecewise_constant_schedule(0.1, {2: 0.5})],
            [3],
        ),
        momentum=0.9,
    ),
    "decay and clip by value": optax.chain(
        optax.clip(0.05), optax.add_decayed_weights(0.01), optax.rmsprop(1e-2)
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("tx", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_one_trainer_is_sequential_training(
    role_threads: RoleThreads, tx: Any, servers: int
) -> None:
    params = mlp_params(dtype=jnp.float64)
    batches = [mlp_batch(4, dtype=jnp.float64, seed=s) for s in range(6)]
    plan = plan_for(free_endpoints(servers), tx, params, *batches[0])
    states, ((got, losses),) = run(role_threads, plan, params, [batches], None)
    step, want, state = jax.jit(plain_step(mlp_loss, tx)), params, tx.init(params)
    for batch, loss in zip(batches, losses, strict=True):
        want, state, want_loss = step(want, state, *batch)
        np.testing.assert_allclose(loss, want_loss, rtol=1e-12)
    tree_close(got, want, 1e-12)
    check_state(plan, states, want, state)


def lagging() -> optax.GradientTransformation:
    """Return an optimizer that uses the learning rate of the previous step, which is state of the
    update."""
    return optax.GradientTransformation(
        lambda p: {"count": jnp.zeros((), jnp.int32), "lr": jnp.asarray(0.1, jnp.float64)},
        lambda g, s, p=None: (
            jax.tree.map(lambda x: -x * s["lr"], g),
            {"count": s["count"] + 1, "lr": jnp.asarray(0.1 / (s["count"] + 2), jnp.float64)},
        ),
    )


def run_alone(
    role_threads: RoleThreads,
    step: Any,
    init: Any,
    params: Any,
    batches: Sequence[Any],
    servers: int = 1,
) -> None:
    """Run one trainer and its servers.

    The final state must equal that of the step on one device.
    """
    main = dtrans.trace(step, params, jax.eval_shape(init, params)[1], *batches[0])
    plan = dtrans.pserver(main, dtrans.trace(init, params), pservers=free_endpoints(servers),
                          mode=dtrans.Async(),
                          placement=dtrans.BlockPlacement(min_block_size=1))  # fmt: skip
    states, ((got, _),) = run(role_threads, plan, params, [batches], None)
    want, state = init(params)
    for batch in batches:
        want, state, *_ = step(want, state, *batch)
    tree_close(got, want, 1e-12)
    check_state(
        plan, states, {n: x for n, x in want.items() if f"params/{n}" not in plan.frozen}, state
    )


def test_a_block_may_be_the_only_reader_of_what_the_schedule_replaces(
    role_threads: RoleThreads,
) -> None:
    tx, params = lagging(), {"b": jnp.ones(())}
    step = dtrans.make_train_step(lambda p, x: jnp.mean((x * p["b"] - 1) ** 2), tx)
    run_alone(role_threads, step, init_of(tx), params, [(jnp.arange(4.0) + i,) for i in range(4)])


def test_a_block_may_read_what_nobody_makes_anew(role_threads: RoleThreads) -> None:
    def step(params: Any, opt_state: Any, x: jax.Array) -> Any:
        value, grads = dtrans.value_and_grad(lambda b: jnp.mean((x * b - 1) ** 2))(params["b"])
        return (
            {"b": params["b"] - params["scale"] * grads, "scale": params["scale"]},
            opt_state,
            value,
        )

    params = {"b": jnp.ones(()), "scale": jnp.asarray(0.01, jnp.float64)}
    run_alone(
        role_threads, step, lambda p: (p, ()), params, [(jnp.arange(4.0) + i,) for i in range(4)]
    )


def test_leaves_that_are_set_to_zero_steps_stay(role_threads: RoleThreads) -> None:
    labels = {"b1": "a", "b2": "b", "w1": "a", "w2": "b"}
    tx = optax.multi_transform({"a": optax.adam(0.1), "b": optax.set_to_zero()}, labels)
    params = mlp_params(dtype=jnp.float64)
    batches = [mlp_batch(4, dtype=jnp.float64, seed=s) for s in range(3)]
    run_alone(role_threads, dtrans.make_train_step(mlp_loss, tx), init_of(tx), params, batches)


def test_blocks_of_one_shape_are_compiled_once() -> None:
    params = {f"w{i}": jnp.ones((4, 2)) for i in range(6)} | {"b": jnp.ones(3)}
    loss = lambda p, x: jnp.mean(x) * sum(jnp.sum(w**2) for w in jax.tree.leaves(p))
    plan = plan_for(("127.0.0.1:1",), optax.adam(0.1), params, jnp.ones(4), loss=loss)
    programs = plan.servers["127.0.0.1:1"]
    blocks = BlockUpdates(ServerUpdate.from_program(programs.main), programs.startup(params))
    assert len(blocks._jitted) == 8 and len(blocks._compiled) == 3  # lr_sched, w, b


def test_a_step_of_several_trainers_is_the_sum_of_what_each_would_do(
    role_threads: RoleThreads,
) -> None:
    """A trainer computes its gradient at the parameters that it received last.

    The server applies this gradient to the newest parameters.
    """
    order = [0, 1, 1, 2, 0, 0, 2, 1, 2, 0, 1, 2]
    tx = OPTIMIZERS["adam"]
    params = mlp_params(dtype=jnp.float64)
    batches = [
        [mlp_batch(4, dtype=jnp.float64, seed=10 * k + s) for s in range(4)] for k in range(3)
    ]
    plan = plan_for(free_endpoints(2), tx, params, *batches[0][0], trainers=3)
    states, ended = run(role_threads, plan, params, batches, StepOrder(order))
    newest, state, own, done = params, tx.init(params), [params] * 3, [0] * 3
    grad = jax.jit(jax.value_and_grad(mlp_loss))
    for k in order:
        loss, g = grad(own[k], *batches[k][done[k]])
        np.testing.assert_allclose(ended[k][1][done[k]], loss, rtol=1e-12)
        updates, state = tx.update(g, state, newest)
        newest = optax.apply_updates(newest, updates)
        own[k] = newest
        done[k] += 1
    for k in range(3):
        tree_close(ended[k][0], own[k], 1e-12)
    assert int(jax.tree.leaves(state)[0]) == len(order)  # steps are counted over all trainers
    check_state(plan, states, newest, state)


def clipped(grads: Any, most: float, by: str) -> Any:
    """Return the gradients of a trainer, clipped by their global norm or each by its own norm."""
    total = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    norm = lambda g: total if by == "global_norm" else jnp.linalg.norm(g.ravel())
    return jax.tree.map(lambda g: g * jnp.minimum(1.0, most / norm(g)), grads)


@pytest.mark.parametrize("by", ["global_norm", "norm"])
@pytest.mark.parametrize("mode", [dtrans.Async, dtrans.HalfAsync])
def test_a_trainer_clips_its_gradients_before_it_sends_them(
    role_threads: RoleThreads, mode: Any, by: str
) -> None:
    """As in Paddle, trainers clip.

    Servers have only blocks of a gradient, and do not know its norm.
    """
    order, most = [0, 1, 1, 0], 1.0
    tx = OPTIMIZERS["momentum, joined schedules"]
    params = mlp_params(dtype=jnp.float64)
    batches = [
        [mlp_batch(4, dtype=jnp.float64, seed=10 * k + s) for s in range(2)] for k in range(2)
    ]
    clip = mode(clip_local_norm=most, clip_local_by=by)
    plan = plan_for(free_endpoints(2), tx, params, *batches[0][0], trainers=2, mode=clip)
    states, _ = run(role_threads, plan, params, batches, StepOrder(order))
    newest, state, own, done, sizes = params, tx.init(params), [params] * 2, [0] * 2, []
    grad = jax.jit(jax.value_and_grad(mlp_loss))
    for k in order:
        _, g = grad(own[k], *batches[k][done[k]])
        sizes += [float(jnp.linalg.norm(x.ravel())) for x in jax.tree.leaves(g)]
        updates, state = tx.update(clipped(g, most, by), state, newest)
        newest = optax.apply_updates(newest, updates)
        own[k] = newest
        done[k] += 1
    assert min(sizes) < most < max(sizes), "some are to be clipped, others not"
    check_state(plan, states, newest, state)


def test_a_clip_on_trainers_needs_marked_gradients_and_no_tables() -> None:
    params, batch = mlp_params(), mlp_batch(4)
    mode = dtrans.Async(clip_local_norm=1.0)
    with pytest.raises(ConfigError, match="^clip_local_norm is 1.0 and sparse is 'auto', but a tr"):
        plan_for(["127.0.0.1:1"], optax.sgd(0.1), params, *batch, mode=mode, sparse="auto")
    with pytest.raises(ConfigError, match="clip_local_norm must be a positive number, or None; it"):
        dtrans.HalfAsync(clip_local_norm=0)

    def step(params: Any, state: Any, *batch: Any) -> Any:
        loss, grads = jax.value_and_grad(mlp_loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), state, loss

    main = dtrans.trace(step, params, (), *batch)
    with pytest.raises(GradientError, match="^clip_local_norm needs all gradients of step at once"):
        dtrans.pserver(main, dtrans.trace(lambda p: (p, ()), params), mode=mode)


def test_no_update_is_lost_where_nobody_waits(role_threads: RoleThreads) -> None:
    """The gradient of a linear loss does not depend on the parameters.

    So in any order, each gradient counts once.
    """
    loss = lambda p, x: jnp.sum(jnp.mean(x, 0) * p["w"]) + jnp.mean(x) * p["b"]
    params = {"w": jnp.zeros(6), "b": jnp.zeros(())}
    rng = np.random.default_rng(0)
    batches = [
        [(jnp.asarray(rng.integers(-9, 9, (2, 6)), jnp.float64),) for _ in range(40)]
        for _ in range(3)
    ]
    tx = optax.sgd(1.0)
    plan = plan_for(free_endpoints(2), tx, params, *batches[0][0], trainers=3, loss=loss)
    states, ended = run(role_threads, plan, params, batches, None)
    every = [x for mine in batches for (x,) in mine]
    want = {"w": -sum(jnp.mean(x, 0) for x in every), "b": -sum(jnp.mean(x) for x in every)}
    check_state(plan, states, want, (), rtol=1e-9)
    assert all(len(losses) == 40 for _, losses in ended)


# -- delay compensation ----------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("decay", [None, 0.95])
@pytest.mark.parametrize("name", ["adam", "momentum, joined schedules"])
def test_delayed_gradients_are_compensated_as_the_paper_says(
    role_threads: RoleThreads, name: str, decay: float | None
) -> None:
    order, strength = [0, 1, 1, 2, 0, 0, 2, 1, 2, 0, 1, 2], 0.7
    tx, params = OPTIMIZERS[name], mlp_params(dtype=jnp.float64)
    batches = [
        [mlp_batch(4, dtype=jnp.float64, seed=10 * k + s) for s in range(4)] for k in range(3)
    ]
    mode = dtrans.Async(dtrans.DelayCompensation(strength, decay))
    plan = plan_for(free_endpoints(2), tx, params, *batches[0][0], trainers=3, mode=mode)
    states, ended = run(role_threads, plan, params, batches, StepOrder(order))
    newest, state, own, done = params, tx.init(params), [params] * 3, [0] * 3
    square = jax.tree.map(jnp.zeros_like, params)
    grad = jax.jit(jax.grad(mlp_loss))
    moved = 0.0
    for k in order:
        g = grad(own[k], *batches[k][done[k]])
        if decay is None:
            strengths = jax.tree.map(lambda x: strength, g)
        else:
            square = jax.tree.map(lambda s, x: decay * s + (1 - decay) * x * x, square, g)
            strengths = jax.tree.map(lambda s: strength / jnp.sqrt(s + 1e-7), square)
        right = jax.tree.map(
            lambda x, by, w, bak: x + by * x * x * (w - bak), g, strengths, newest, own[k]
        )
        moved += sum(
            float(jnp.abs(a - b).sum())
            for a, b in zip(jax.tree.leaves(right), jax.tree.leaves(g), strict=True)
        )
        updates, state = tx.update(right, state, newest)
        newest = own[k] = optax.apply_updates(newest, updates)
        done[k] += 1
    assert moved > 1e-3, "something was compensated"
    for k in range(3):
        tree_close(ended[k][0], own[k], 1e-12)
    check_state(plan, states, newest, state)


def test_one_trainer_has_no_delay_to_compensate(role_threads: RoleThreads) -> None:
    tx, params = OPTIMIZERS["adam"], mlp_params(dtype=jnp.float64)
    batches = [mlp_batch(4, dtype=jnp.float64, seed=s) for s in range(4)]
    plan = plan_for(
        free_endpoints(2), tx, params, *batches[0], mode=dtrans.Async(dtrans.DelayCompensation())
    )
    _, ((got, _),) = run(role_threads, plan, params, [batches], None)
    want, state = params, tx.init(params)
    for batch in batches:
        want, state, _ = plain_step(mlp_loss, tx)(want, state, *batch)
    tree_close(got, want, 1e-12)


def test_servers_keep_what_each_trainer_has() -> None:
    params = mlp_params()
    plan = plan_for(("127.0.0.1:1",), optax.sgd(0.1), params, *mlp_batch(4), trainers=2,
                    mode=dtrans.Async(dtrans.DelayCompensation(decay=0.9)))  # fmt: skip
    server = plan.servers["127.0.0.1:1"]
    held = [n for n in server.main.in_names if "w1" in n]
    suffixes = ("", ".trainer_0_bak", ".trainer_1_bak", "@GRAD.mean_square")
    assert sorted(held) == sorted(f"params/w1{s}" for s in suffixes)
    state = dict(zip(server.startup.out_names, server.startup(params).values(), strict=True))
    assert np.array_equal(state["params/w1.trainer_1_bak"], params["w1"])
    assert not np.any(state["params/w1@GRAD.mean_square"])


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"strength": -1}, "strength must be a number, 0 or more; it is -1"),
        ({"strength": float("inf")}, "strength must be a number, 0 or more; it is inf"),
        ({"decay": 1.0}, "decay must be a number from 0 to 1, or None; it is 1.0"),
    ],
)
def test_compensation_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        dtrans.DelayCompensation(**fields)
    ((name, value),) = fields.items()
    paddles = {"strength": "dc_asgd_lambda", "decay": "dc_asgd_decay"}[name]
    with pytest.raises(ConfigError, match="^" + message.replace(name, paddles)):
        transpiled(enable_dc_asgd=True, **{paddles: value})


def transpiled(**options: Any) -> dtrans.DistributeTranspiler:
    plan = plan_for(("127.0.0.1:1",), optax.sgd(0.1), mlp_params(), *mlp_batch(4))
    t = dtrans.DistributeTranspiler(
        dtrans.DistributeTranspilerConfig(**{"sync_mode": False, **options})
    )
    t.transpile(0, plan.main, trainers=1, startup_program=plan.startup)
    return t


def test_a_synchronous_gradient_has_no_delay() -> None:
    with pytest.raises(
        ConfigError, match="^dc_asgd_decay=0.9 needs enable_dc_asgd=True, it is False$"
    ):
        transpiled(dc_asgd_decay=0.9)
    with pytest.raises(AssertionError, match="^enable_dc_asgd=True needs sync_mode=False"):
        transpiled(enable_dc_asgd=True, sync_mode=True)


@pytest.mark.parametrize(
    "record, fields, message",
    [
        (dtrans.Sync, {"runtime_split": 1}, "runtime_split must be True or False, it is 1"),
        (
            dtrans.Async,
            {"delay": 0.5},
            "delay must be a dtrans.DelayCompensation or None, it is 0.5",
        ),
        (
            dtrans.Async,
            {"communicator": {}},
            "communicator must be a dtrans.CommunicatorConfig, it is {}",
        ),
        (
            dtrans.Async,
            {"delay": dtrans.DelayCompensation(), "communicator": dtrans.CommunicatorConfig()},
            "delay and communicator are both set; .* use mode=dtrans.HalfAsync\\(delay=...\\)",
        ),
        (
            dtrans.HalfAsync,
            {"communicator": None},
            "communicator must be a dtrans.CommunicatorConfig, it is None",
        ),
    ],
)
def test_modes_that_cannot_be(record: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        record(**fields)


# -- programs --------------------------------------------------------------------------------------


def test_programs_have_no_barriers_and_one_gradient_for_each_block() -> None:
    params = mlp_params()
    plan = plan_for(
        ("127.0.0.1:1", "127.0.0.1:2"), optax.adam(0.1), params, *mlp_batch(4), trainers=3
    )
    ops = [op.type for op in plan.trainer_program(2).ops if op.role == "rpc"]
    assert ops == ["send"] * 4 + ["recv"] * 4
    startup = [op.type for op in plan.trainer_startup_program(2).ops if op.role == "rpc"]
    assert startup == ["recv"] * 4 + ["fetch_barrier"]
    for server in plan.servers.values():
        (serve_op,) = server.main.ops
        assert serve_op.attrs["sync_mode"] is False and serve_op.attrs["Fanin"] == 3
        grads = {n for b in serve_op.attrs["optimize_blocks"] for n in b.in_names if "@GRAD" in n}
        assert grads and not any("trainer_" in n for n in grads)
    assert "pservers, async" in str(plan)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("name", ["clip_by_global_norm", "apply_if_finite"])
def test_what_takes_all_gradients_at_once_is_refused(name: str, servers: int) -> None:
    tx = {
        "clip_by_global_norm": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
        "apply_if_finite": optax.apply_if_finite(optax.sgd(0.1), 3),
    }[name]
    with pytest.raises(
        ConfigError,
        match="^the optimizer reduces over several .*; use mode=dtrans.Sync",
    ):
        plan_for(
            [f"127.0.0.1:{i + 1}" for i in range(servers)],
            tx,
            mlp_params(),
            *mlp_batch(4),
            trainers=2,
        )


@pytest.mark.parametrize("other", ["w.trainer_0_bak", "w.bak", "w@GRAD.mean_square", "w@GRAD"])
def test_leaves_that_are_called_as_copies_are_called(other: str) -> None:
    params = {"w": jnp.ones(3), other: jnp.ones(3)}
    loss = lambda p, x: jnp.mean(x) * (jnp.sum(p["w"] ** 2) + jnp.sum(p[other] ** 2))
    with pytest.raises(ConfigError, match="rename"):
        mode = dtrans.Async(dtrans.DelayCompensation(decay=0.9))
        plan_for(("127.0.0.1:1",), optax.sgd(0.1), params, jnp.ones(4), loss=loss, mode=mode)


def test_what_else_is_refused() -> None:
    params, batch = mlp_params(), mlp_batch(4)
    plan = plan_for(("127.0.0.1:1",), optax.sgd(0.1), params, *batch)
    with pytest.raises(
        ConfigError, match="^on_mesh takes a step of all trainers together.*on_cluster"
    ):
        plan.on_mesh()
    with pytest.raises(
        ConfigError, match="^mode must be a dtrans.Sync or a dtrans.Async or .*, it is None$"
    ):
        dtrans.pserver(plan.main, plan.startup, mode=None)  # type: ignore[arg-type]


# -- who fails -------------------------------------------------------------------------------------


def small(trainers: int) -> tuple[PServerPlan, Any, Any]:
    params, batch = {"w": jnp.ones((4, 2))}, (jnp.ones((2, 4)),)
    loss = lambda p, x: jnp.mean(x @ p["w"])
    return (
        plan_for(free_endpoints(1), optax.sgd(0.5), params, *batch, trainers=trainers, loss=loss),
        params,
        batch,
    )


def one_step_was_taken(
    role_threads: RoleThreads, plan: PServerPlan, params: Any, batch: Any
) -> None:
    """Check the server's parameters after one step of trainer 0, and no other step."""
    role_threads.start("trainer 0", train, plan, 0, [batch], None, params)
    role_threads.end("trainer 0")
    gradient = jax.grad(lambda p: jnp.mean(batch[0] @ p["w"]))(params)["w"]
    np.testing.assert_allclose(
        role_threads.end("server")["params/w"], params["w"] - 0.5 * gradient, rtol=1e-12
    )


def test_others_go_on_when_a_trainer_fails(
    role_threads: RoleThreads, caplog: pytest.LogCaptureFixture
) -> None:
    plan, params, batch = small(2)
    (endpoint,) = plan.servers
    role_threads.start("server", serve, plan, endpoint, params)

    def fails() -> None:
        with dtrans.Executor(deadline=HANG) as exe:
            own = exe.run(plan.trainer_startup_program(1), params)
            exe.run(plan.trainer_program(1), own, *batch)
            raise KeyError("this is why")

    role_threads.start("trainer 1", fails)
    assert isinstance(role_threads.end("trainer 1"), KeyError)
    until(
        lambda: (
            "continues without a trainer: trainer 1 failed: KeyError: 'this is why'" in caplog.text
        ),
        "a warning",
    )
    role_threads.start("trainer 0", train, plan, 0, [batch] * 3, None, params)
    got, _ = role_threads.end("trainer 0")
    gradient = jax.grad(lambda p: jnp.mean(batch[0] @ p["w"]))(params)["w"]
    np.testing.assert_allclose(
        role_threads.end("server")["params/w"], params["w"] - 0.5 * 4 * gradient, rtol=1e-12
    )
    np.testing.assert_allclose(got["w"], params["w"] - 0.5 * 4 * gradient, rtol=1e-12)


def test_a_server_that_is_left_by_failures_only_ends_with_the_last(
    role_threads: RoleThreads,
) -> None:
    plan, params, _ = small(1)
    (endpoint,) = plan.servers
    role_threads.start("server", serve, plan, endpoint, params)

    def fails() -> None:
        with dtrans.Executor(deadline=HANG) as exe:
            exe.run(plan.trainer_startup_program(0), params)
            raise KeyError("this is why")

    role_threads.start("trainer 0", fails)
    error = role_threads.end("server")
    assert (
        isinstance(error, PeerError) and str(error) == "trainer 0 failed: KeyError: 'this is why'"
    )


def test_a_trainer_that_is_gone_is_left_behind(
    role_threads: RoleThreads, caplog: pytest.LogCaptureFixture
) -> None:
    plan, params, batch = small(2)
    (endpoint,) = plan.servers
    role_threads.start("server", serve, plan, endpoint, params)
    with Peer(endpoint) as peer:
        peer.hello(1, 2)
        assert peer.hear().op == "welcome"
        # half of a gradient
        peer.tell("send", np.ones((2, 2)).tobytes(), step=0, pieces=[[["params/w@GRAD", 0, 32]]])
    until(lambda: "the connection of trainer 1 to" in caplog.text, "a warning")
    role_threads.start("trainer 0", train, plan, 0, [batch], None, params)
    role_threads.end("trainer 0")
    gradient = jax.grad(lambda p: jnp.mean(batch[0] @ p["w"]))(params)["w"]
    np.testing.assert_allclose(
        role_threads.end("server")["params/w"], params["w"] - 0.5 * gradient, rtol=1e-12
    )


def test_roles_of_two_modes_are_told_so(role_threads: RoleThreads) -> None:
    plan, params, batch = small(1)
    sync = dtrans.pserver(
        plan.main,
        plan.startup,
        pservers=[*plan.servers],
        placement=dtrans.BlockPlacement(min_block_size=1),
    )
    (endpoint,) = plan.servers
    role_threads.start("server", serve, plan, endpoint, params)
    role_threads.start("trainer 0", train, sync, 0, [batch], None, params)
    message = (
        f"trainer 0 is synchronous, pserver {endpoint} is asynchronous; every role must plan "
        "the same sync_mode"
    )
    assert message in str(role_threads.end("trainer 0"))
    role_threads.start("again", train, plan, 0, [batch], None, params)
    role_threads.end("again")
    role_threads.end("server")


def test_who_has_left_is_not_served_any_more(role_threads: RoleThreads) -> None:
    plan, params, batch = small(2)
    (endpoint,) = plan.servers
    role_threads.start("server", serve, plan, endpoint, params)
    with Peer(endpoint) as peer:
        peer.hello(1, 2)
        assert peer.hear().op == "welcome"
        peer.tell("abort", reason="because")
        assert peer.hear().op == "goodbye"
        peer.tell("send", np.ones((4, 2)).tobytes(), step=0, pieces=[[["params/w@GRAD", 0, 64]]])
        assert "a `send` message of trainer 1, which has left; pserver" in peer.refused()
        peer.hello(1, 2, session="another")
        assert peer.refused() == "trainer 1 has left, and cannot come back to this job"
    one_step_was_taken(role_threads, plan, params, batch)


def test_messages_out_of_turn_are_refused_and_change_nothing(role_threads: RoleThreads) -> None:
    plan, params, batch = small(2)
    (endpoint,) = plan.servers
    role_threads.start("server", serve, plan, endpoint, params)
    block = np.ones((4, 2))
    with Peer(endpoint) as peer:
        peer.hello(1, 2)
        assert peer.hear().op == "welcome"
        peer.tell("send", block.tobytes(), step=1, pieces=[[["params/w@GRAD", 0, 64]]])
        assert peer.refused() == (
            f"trainer 1 sent `send` of step 1, but pserver {endpoint} expects messages of step 0 "
            "from trainer 1"
        )
        peer.tell("send", block.tobytes(), step=0, pieces=[[["params/w@GRAD.trainer_1", 0, 64]]])
        assert "is not a gradient that trainer 1 sends" in peer.refused()
        peer.tell("send_barrier", step=0)
        assert peer.refused().endswith("is asynchronous; every role must plan the same sync_mode")
        peer.tell("send", block[:2].tobytes(), step=0, pieces=[[["params/w@GRAD", 0, 32]]])
        peer.tell("recv", step=0, blocks=[["params/w", [4, 2], "float64"]])
        assert peer.refused() == (
            "trainer 1 sent `recv` of step 0 before gradient params/w@GRAD was complete"
        )
        peer.tell("complete")
        assert peer.hear().op == "goodbye"
    one_step_was_taken(role_threads, plan, params, batch)
