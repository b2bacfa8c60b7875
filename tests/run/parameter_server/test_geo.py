"""GEO-SGD: trainers update parameters, and servers add up the changes.

The tests compare with Paddle's formulas, written in Python, and with the plain step.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import init_of, mlp_batch, mlp_loss, mlp_params, plain_step, tree_close, tree_equal
from role_threads import HANG, RoleThreads, StepOrder, free_endpoints, joined, serve

import dtrans
from dtrans.errors import ConfigError, PeerError, StateError
from dtrans.parameter_server.plan import PServerPlan
from dtrans.protocol.server.async_server import AsyncServer
from dtrans.run.parameter_server.communicator import Communicator


@pytest.fixture(autouse=True)
def x64() -> Any:
    with jax.enable_x64(True):
        yield


TX = optax.adam(optax.cosine_decay_schedule(1e-2, 20))


def params_of(dtype: Any = jnp.float64) -> dict[str, jax.Array]:
    return mlp_params(dtype=dtype)


def batches_of(count: int, seed: int = 0, dtype: Any = jnp.float64) -> list[Any]:
    return [mlp_batch(4, dtype=dtype, seed=100 * seed + s) for s in range(count)]


def plan_for(servers: int, trainers: int, every: int, *, tx: Any = TX, params: Any = None,
             loss: Any = mlp_loss,
             batch: Any = None, block_on_pull: bool = False,
             **options: Any) -> PServerPlan:  # fmt: skip
    params = params_of() if params is None else params
    main = dtrans.trace(
        dtrans.make_train_step(loss, tx),
        params,
        jax.eval_shape(tx.init, params),
        *(batch or mlp_batch(4, dtype=jnp.float64)),
    )
    return flat_options.pserver(
        main,
        dtrans.trace(init_of(tx), params),
        pservers=free_endpoints(servers),
        trainers=trainers,
        mode=dtrans.Geo(every, block_on_pull),
        **{"min_block_size": 1, **options},
    )


def train(
    plan: PServerPlan, k: int, batches: Sequence[Any], params: Any, turns: StepOrder | None = None
) -> Any:
    """Run one trainer. Return the parameters before each step, and the final parameters."""
    went_in = []
    with dtrans.Executor(deadline=HANG) as exe:
        params, opt_state = exe.run(plan.trainer_startup_program(k), params)
        for batch in batches:
            went_in.append((params, opt_state))
            step = lambda p=params, s=opt_state, b=batch: exe.run(plan.trainer_program(k), p, s, *b)
            params, opt_state, _ = turns.take(k, step) if turns else step()
        if turns:
            turns.end()  # a push at the end of one trainer is not in the last steps of the others
    return went_in, params, opt_state


def run(
    role_threads: RoleThreads,
    plan: PServerPlan,
    params: Any,
    batches: Sequence[Any],
    turns: StepOrder | None = None,
) -> Any:
    """Run a job.

    Return the final parameters of the servers, and the result of each trainer. Trainer k has
    `batches[k]`.
    """
    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep, params)
    for k in range(plan.trainers):
        role_threads.start(f"trainer {k}", train, plan, k, batches[k], params, turns)
    ended = role_threads.all()
    states = [ended[ep] for ep in plan.servers]
    on_servers = {n: joined(plan, states, f"params/{n}") for n in params}
    return on_servers, [ended[f"trainer {k}"] for k in range(plan.trainers)]


# -- one trainer -----------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("block_on_pull", [True, False], ids=["wait", "beside"])
@pytest.mark.parametrize("servers, every", [(1, 1), (3, 2), (2, 5), (2, 100)])
def test_one_trainer_is_sequential_training(
    role_threads: RoleThreads, servers: int, every: int, block_on_pull: bool
) -> None:
    """Pulls return exactly the pushed changes.

    At the end, the servers have all changes, pushed or not.
    """
    params, batches = params_of(), batches_of(7)
    plan = plan_for(servers, 1, every, block_on_pull=block_on_pull)
    on_servers, ((_, got, state),) = run(role_threads, plan, params, [batches])
    step, want, want_state = jax.jit(plain_step(mlp_loss, TX)), params, TX.init(params)
    for batch in batches:
        want, want_state, _ = step(want, want_state, *batch)
    tree_equal(got, want)
    tree_equal(state, want_state)
    tree_close(on_servers, want, 1e-14)


@pytest.mark.parametrize(
    "dtype, close", [(jnp.float32, 1e-6), (jnp.bfloat16, 2e-2)], ids=["float32", "bfloat16"]
)
def test_one_trainer_in_other_types(role_threads: RoleThreads, dtype: Any, close: float) -> None:
    """Servers and the trainer differ only by the rounding of pushed changes."""
    params = {"s": jnp.ones((), dtype), "one": jnp.ones((1, 3), dtype), **params_of(dtype)}

    def loss(p: Any, x: Any, y: Any) -> Any:
        return mlp_loss({n: p[n] for n in ("w1", "b1", "w2", "b2")}, x, y) * p["s"] + jnp.sum(
            p["one"] ** 2
        )

    batches = batches_of(5, dtype=dtype)
    tx = optax.sgd(0.05)
    plan = plan_for(2, 1, 2, tx=tx, params=params, loss=loss, batch=batches[0], block_on_pull=True)
    on_servers, ((_, got, _),) = run(role_threads, plan, params, [batches])
    want, state = params, tx.init(params)
    step = jax.jit(plain_step(loss, tx))
    for batch in batches:
        want, state, _ = step(want, state, *batch)
    tree_equal(got, want)
    tree_close(on_servers, want, close)


# -- several trainers ------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("order",
                         [[0, 1, 2] * 6, [0, 0, 1, 2, 1, 2] * 3, [2] * 6 + [1] * 6 + [0] * 6],
                         ids=["in turns", "unevenly", "one after the other"])  # fmt: skip
@pytest.mark.parametrize("every", [1, 2, 4])
def test_three_trainers_do_what_paddles_formulas_say(
    role_threads: RoleThreads, every: int, order: list[int]
) -> None:
    params, count = params_of(), order.count(0)
    assert order.count(1) == order.count(2) == count
    batches = [batches_of(count, seed=k) for k in range(3)]
    plan = plan_for(2, 3, every, block_on_pull=True)
    on_servers, ended = run(role_threads, plan, params, batches, StepOrder(order))

    step = jax.jit(plain_step(mlp_loss, TX))
    as_numpy = lambda tree: {n: np.asarray(x) for n, x in tree.items()}
    server = as_numpy(params)
    local, old, state = [as_numpy(params)] * 3, [as_numpy(params)] * 3, [TX.init(params)] * 3
    done = [0, 0, 0]

    def push(k: int) -> None:
        nonlocal server
        delta = {n: (local[k][n] - old[k][n]) / 3 for n in params}
        old[k] = {n: old[k][n] + delta[n] for n in params}
        server = {n: server[n] + delta[n] for n in params}

    for k in order:
        new, state[k], _ = step(local[k], state[k], *batches[k][done[k]])
        local[k] = as_numpy(new)
        done[k] += 1
        if done[k] % every == 0:
            push(k)
            local[k] = {n: local[k][n] + (server[n] - old[k][n]) for n in params}
            old[k] = server
    for k in range(3):
        tree_close({n: np.asarray(x) for n, x in ended[k][1].items()}, local[k], 1e-12)
        tree_close(ended[k][2], state[k], 1e-12)
    for k in range(
        3
        # the changes that were not pushed at the end; the order of the ends has no effect on the
        # sum
    ):
        if count % every:
            push(k)
    tree_close({n: np.asarray(x) for n, x in on_servers.items()}, server, 1e-12)


def test_beside_the_steps_nothing_is_lost_and_nothing_counts_twice(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results of steps show the arrived changes of other trainers, so the test can recompute
    every push. The servers end with the sum of the pushes."""
    params, batches, every = params_of(), [batches_of(11, seed=k) for k in range(3)], 3
    plan = plan_for(2, 3, every)
    pushed: dict[str, list[Any]] = {}
    put = Communicator.put

    def noted(self: Communicator, group: Any, steps: int) -> None:
        pushed.setdefault(self.name, []).append(
            {leaf.names[0].split("/")[1].split(".")[0]: x for leaf, x in group}
        )
        put(self, group, steps)

    monkeypatch.setattr(Communicator, "put", noted)
    on_servers, ended = run(role_threads, plan, params, batches)
    step = jax.jit(plain_step(mlp_loss, TX))
    server = dict(params)
    for k, (went_in, last, _) in enumerate(ended):
        old, deltas = went_in[0][0], []  # another trainer may have pushed before
        came_out = [p for p, _ in went_in[1:]] + [last]
        for i, ((p, s), out) in enumerate(zip(went_in, came_out, strict=True)):
            alone, _, _ = step(p, s, *batches[k][i])
            old = {n: old[n] + (out[n] - alone[n]) for n in old}
            if (i + 1) % every == 0 or i + 1 == len(batches[k]):
                deltas.append({n: (out[n] - old[n]) / 3 for n in old})
                old = {n: old[n] + deltas[-1][n] for n in old}
        *whole, rest = pushed[f"trainer {k}"]
        assert len(whole) == 3
        for got, want in zip(whole, deltas, strict=False):
            tree_close(got, want, 1e-9)
        server = {n: server[n] + sum(d[n] for d in [*whole, rest]) for n in server}
    tree_close(on_servers, server, 1e-12)


def test_a_step_does_not_wait_for_what_it_pushed(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers answer after three more steps of the trainer.

    The next step then includes the difference.
    """
    params, batches = params_of(), batches_of(8)
    plan = plan_for(1, 2, 2)
    gate, asked = threading.Event(), threading.Event()
    answer = AsyncServer.recv

    def late(self: Any, k: int, message: Any) -> None:
        if k == 0 and self._steps.of_trainer(0).number:  # not the initial values
            asked.set()
            assert gate.wait(HANG)
        answer(self, k, message)

    monkeypatch.setattr(AsyncServer, "recv", late)
    (ep,) = plan.servers
    role_threads.start(ep, serve, plan, ep, params)
    pushed = threading.Event()

    def other() -> None:
        """Push changes before trainer 0 does anything, and leave at the end."""
        with dtrans.Executor(deadline=HANG) as exe:
            p, s = exe.run(plan.trainer_startup_program(1), params)
            for batch in batches[:2]:
                p, s, _ = exe.run(plan.trainer_program(1), p, s, *batch)
            exe.run(plan.trainer_startup_program(1), params)  # the trainer waits for its push
            pushed.set()

    def first() -> list[Any]:
        found = []
        with dtrans.Executor(deadline=HANG) as exe:
            p, s = exe.run(plan.trainer_startup_program(0), params)
            role_threads.start("other", other)
            assert pushed.wait(HANG)
            step = jax.jit(plain_step(mlp_loss, TX))
            for i, batch in enumerate(batches[:5]):
                alone, _, _ = step(p, s, *batch)
                p, s, _ = exe.run(plan.trainer_program(0), p, s, *batch)
                found.append(float(jnp.max(jnp.abs(p["w1"] - alone["w1"]))))
                if i == 1:
                    assert asked.wait(HANG)
                if i == 2:
                    gate.set()
            # step 4 pushes again, and waits for the answer to the first push, which includes the
            # other trainer's change
        return found

    role_threads.start("first", first)
    found = role_threads.end("first")
    assert not isinstance(found, BaseException), found
    assert found[:3] == [0.0, 0.0, 0.0]
    assert found[3] > 1e-4
    role_threads.all()


# -- what else there is ----------------------------------------------------------------------------


def test_frozen_leaves_and_statistics_stay_with_their_trainer(role_threads: RoleThreads) -> None:
    params = {"w": jnp.ones((5, 3)), "frozen": jnp.full((5, 3), 2.0), "seen": jnp.zeros(())}
    tx = optax.sgd(0.1)

    def step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        trained = {"w": params["w"]}
        loss, grads = dtrans.value_and_grad(
            lambda p: jnp.mean((x @ (p["w"] * params["frozen"]) - y) ** 2)
        )(trained)
        updates, opt_state = tx.update(grads, opt_state, trained)
        new = optax.apply_updates(trained, updates)
        return {**params, **new, "seen": params["seen"] + jnp.sum(x)}, opt_state, loss

    init = lambda p: (p, tx.init({"w": p["w"]}))
    batches = batches_of(4)
    plan = dtrans.pserver(dtrans.trace(step, *init(params), *batches[0]),
                          dtrans.trace(init, params),
                          pservers=free_endpoints(2), trainers=2,
                          mode=dtrans.Geo(2, block_on_pull=True),
                          placement=dtrans.BlockPlacement(min_block_size=1))  # fmt: skip
    assert plan.frozen == ("params/frozen", "params/seen")
    assert {b.leaf for b in plan.placement.all_blocks} == {"params/w"}
    on_servers = [role_threads.start(ep, serve, plan, ep, params) for ep in plan.servers]
    assert len(on_servers) == 2
    for k in range(2):
        role_threads.start(f"trainer {k}", train, plan, k, batches[2 * k : 2 * k + 2], params, None)
    ended = role_threads.all()
    for k in range(2):
        _, got, _ = ended[f"trainer {k}"]
        seen = sum(float(jnp.sum(x)) for x, _ in batches[2 * k : 2 * k + 2])
        np.testing.assert_allclose(got["seen"], seen, rtol=1e-12)
        np.testing.assert_array_equal(got["frozen"], params["frozen"])


def test_state_that_begins_as_the_parameters_is_made_by_the_trainer(
    role_threads: RoleThreads,
) -> None:
    tx = optax.contrib.schedule_free_sgd(0.1)
    params, batches = params_of(), batches_of(4)
    plan = plan_for(2, 1, 2, tx=tx, block_on_pull=True)
    _, ((_, got, state),) = run(role_threads, plan, params, [batches])
    step, want, want_state = jax.jit(plain_step(mlp_loss, tx)), params, tx.init(params)
    for batch in batches:
        want, want_state, _ = step(want, want_state, *batch)
    tree_close(got, want, 1e-14)
    tree_close(state, want_state, 1e-14)


def test_a_trainer_that_skips_its_startup_is_told(role_threads: RoleThreads) -> None:
    plan, params = plan_for(1, 1, 2), params_of()
    (ep,) = plan.servers
    role_threads.start(ep, serve, plan, ep, params)
    with (
        dtrans.Executor(deadline=HANG) as exe,
        pytest.raises(
            StateError,
            match="^this executor has not started GEO-SGD, .*; run the trainer's start",
        ),
    ):
        exe.run(plan.trainer, params, TX.init(params), *batches_of(1)[0])
    # the job is still available to a trainer that continues
    with dtrans.Executor(deadline=HANG) as exe:
        exe.run(plan.trainer_startup, params)
    role_threads.all()


def test_a_trainer_that_has_donated_what_was_to_be_pushed_is_told(
    role_threads: RoleThreads,
) -> None:
    plan, params = plan_for(1, 1, 5), params_of()
    (ep,) = plan.servers
    role_threads.start(ep, serve, plan, ep, params)
    exe = dtrans.Executor(deadline=HANG)
    p, s = exe.run(plan.trainer_startup, params)
    p, s, _ = exe.run(plan.trainer, p, s, *batches_of(1)[0])
    jax.tree.map(lambda x: x.delete(), p)
    with pytest.raises(
        StateError,
        match="^the parameters of the last step were donated to another computation, so their",
    ):
        exe.close()
    ended = role_threads.end(ep)
    assert isinstance(ended, PeerError)
    assert "trainer 0 failed: StateError: the parameters of the last step" in str(ended)


def test_what_was_pushed_may_be_donated(role_threads: RoleThreads) -> None:
    """No change is left to push, so closing does not need the parameters."""
    plan, params, batches = plan_for(1, 1, 2), params_of(), batches_of(2)
    (ep,) = plan.servers
    role_threads.start(ep, serve, plan, ep, params)
    exe = dtrans.Executor(deadline=HANG)
    p, s = exe.run(plan.trainer_startup, params)
    for batch in batches:
        p, s, _ = exe.run(plan.trainer, p, s, *batch)
    jax.tree.map(lambda x: x.delete(), p)
    exe.close()
    assert not isinstance(role_threads.end(ep), BaseException)


def test_a_trainer_that_fails_ends_only_itself(role_threads: RoleThreads) -> None:
    plan, params = plan_for(2, 2, 1, block_on_pull=True), params_of()
    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep, params)
    with pytest.raises(ZeroDivisionError), dtrans.Executor(deadline=HANG) as exe:
        p, s = exe.run(plan.trainer_startup_program(0), params)
        p, s, _ = exe.run(plan.trainer_program(0), p, s, *batches_of(1)[0])
        raise ZeroDivisionError
    went_in, _, _ = train(plan, 1, batches_of(1, seed=1), params)
    states = role_threads.all()
    step, want = jax.jit(plain_step(mlp_loss, TX)), params
    for before, batch in ((params, batches_of(1)[0]), (went_in[0][0], batches_of(1, seed=1)[0])):
        new, _, _ = step(before, TX.init(params), *batch)
        want = {n: want[n] + (new[n] - before[n]) / 2 for n in want}
    tree_close(
        {n: joined(plan, [states[ep] for ep in plan.servers], f"params/{n}") for n in params},
        want,
        1e-12,
    )


def test_a_server_that_ends_is_named(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, params = plan_for(1, 1, 1, block_on_pull=True), params_of()
    (ep,) = plan.servers
    begin = AsyncServer.send

    def broken(self: Any, k: int, message: Any) -> None:
        if self._steps.begun[k].number == 2:
            raise RuntimeError("out of order")
        begin(self, k, message)

    monkeypatch.setattr(AsyncServer, "send", broken)
    role_threads.start(ep, serve, plan, ep, params)
    role_threads.start("trainer", train, plan, 0, batches_of(5), params)
    ended = role_threads.end("trainer")
    assert isinstance(ended, PeerError)
    assert str(ended) == f"pserver {ep} refused trainer 0: it ended: RuntimeError: out of order"
    assert isinstance(role_threads.end(ep), RuntimeError)


def test_a_plan_says_what_it_is() -> None:
    plan = plan_for(2, 3, 7)
    assert str(plan).startswith("pserver plan of step: 3 trainers, 2 pservers, geo\n")
    assert "each of 3 trainers sends 456 and receives 456 bytes in 7 steps" in str(plan)
    with pytest.raises(
        ConfigError, match="^on_mesh takes a step of all trainers together.*on_cluster"
    ):
        plan.on_mesh()


@pytest.mark.parametrize("options, message", [
    ({"every": 0}, "push_every must be a positive number of steps, it is 0"),
    ({"every": True}, "push_every must be a positive number of steps, it is True"),
    ({"block_on_pull": 1}, "block_on_pull must be True or False, it is 1"),
    ({"merge": {"params/w1": "mean"}},
     "merge={'params/w1': 'mean'} cannot be used with dtrans.Geo, where each trainer has separate "
     "values of the leaves without gradients; leave merge out"),
    ({"on_trainer_exit": "error"}, "on_trainer_exit='error' needs mode=dtrans.Sync(), since "
     "asynchronous updates never combine gradients of several trainers; leave on_trainer_exit out"),
])  # fmt: skip
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_for(1, 1, **{"every": 2, **options})
    assert str(caught.value) == message


def test_another_batch_shape_goes_on_with_the_same_parameters(role_threads: RoleThreads) -> None:
    plan, params = plan_for(2, 1, 2, block_on_pull=True), params_of()
    batches = [mlp_batch(n, dtype=jnp.float64, seed=n) for n in (4, 3, 4, 2)]
    on_servers, ((_, got, _),) = run(role_threads, plan, params, [batches])
    want, state, step = params, TX.init(params), plain_step(mlp_loss, TX)
    for batch in batches:
        want, state, _ = step(want, state, *batch)
    tree_close(got, want, 1e-12)
    tree_close(on_servers, want, 1e-12)


def test_only_what_gradients_enter_is_shared(role_threads: RoleThreads) -> None:
    """Counters, random keys of both kinds, and leaves that only decay are separate on each
    trainer."""
    params = {"w": jnp.ones((5, 3)), "count": jnp.zeros((), jnp.int32), "key": jax.random.key(7),
              "raw": jax.random.PRNGKey(7), "decays": jnp.ones(3)}  # fmt: skip

    def step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
        key, noise = jax.random.split(params["key"])
        loss = lambda w: jnp.mean((x @ w + 0.1 * jax.random.normal(noise, y.shape) - y) ** 2)
        value, g = dtrans.value_and_grad(loss)(params["w"])
        new = {"w": params["w"] - 0.1 * g, "count": params["count"] + 1, "key": key,
               "raw": jax.random.split(params["raw"])[0],
               "decays": 0.5 * params["decays"]}  # fmt: skip
        return new, opt_state, value

    init = lambda p: (p, jnp.zeros(()))
    batches = batches_of(4)
    plan = dtrans.pserver(dtrans.trace(step, *init(params), *batches[0]),
                          dtrans.trace(init, params),
                          pservers=free_endpoints(2), mode=dtrans.Geo(push_every=2),
                          placement=dtrans.BlockPlacement(min_block_size=1))  # fmt: skip
    assert plan.frozen == ("params/count", "params/decays", "params/key", "params/raw")
    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep, params)
    _, got, _ = train(plan, 0, batches, params)
    role_threads.all()
    want, state = params, jnp.zeros(())
    for batch in batches:
        want, state, _ = jax.jit(step)(want, state, *batch)
    tree_close(got, want, 1e-14)


def geo_of(params: Any) -> PServerPlan:
    def step(params: Any, opt_state: Any, x: Any) -> Any:
        value, grads = dtrans.value_and_grad(
            lambda p: sum(jnp.sum(x * v) for v in jax.tree.leaves(p))
        )(params)
        return jax.tree.map(lambda w, g: w - g, params, grads), opt_state, value

    init = lambda: (params, jnp.zeros(()))
    return dtrans.pserver(
        dtrans.trace(step, *init(), jnp.ones(())), dtrans.trace(init), mode=dtrans.Geo()
    )


@pytest.mark.parametrize("params, message", [
    ({"w": jnp.ones(2), "w@GRAD": jnp.ones(2)},
     "params/w@GRAD would be the name of both a leaf and a gradient of params/w; rename a leaf"),
    ({"w": jnp.ones(2), "w.delta": jnp.ones(2)},
     "the step has a leaf named params/w.delta, the name that servers give to the change of "
     "params/w; "
     "rename the leaf"),
])  # fmt: skip
def test_leaves_that_are_called_as_messages_are_are_named(params: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        geo_of(params)
    assert str(caught.value) == message


def test_the_transpiler_takes_a_config_as_geo_sgds() -> None:
    config = dtrans.DistributeTranspilerConfig(geo_sgd_need_push_nums=3)
    params = params_of()
    main = dtrans.trace(
        dtrans.make_train_step(mlp_loss, TX), params, TX.init(params), *batches_of(1)[0]
    )
    t = dtrans.GeoSgdTranspiler(config)
    t.transpile(1, main, trainers=2, startup_program=dtrans.trace(init_of(TX), params))
    assert t.plan.push_every == 3
    assert t.get_trainer_program().name == "trainer 1"
    assert (config.geo_sgd_mode, config.sync_mode) == (False, True)
    with pytest.raises(
        ConfigError,
        match="^sync_mode is True, but GEO-SGD has no synchronous mode; leave sync_mode out$",
    ):
        t.transpile(
            1, main, trainers=2, sync_mode=True, startup_program=dtrans.trace(init_of(TX), params)
        )
    with pytest.raises(ConfigError, match="^sync_mode must be True or False, it is None$"):
        dtrans.GeoSgdTranspiler(dtrans.DistributeTranspilerConfig(sync_mode=None))
