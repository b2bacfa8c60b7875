"""Messages between trainers and servers in addition to gradients and parameters: arguments of the
step, and shared state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from role_threads import HANG, RoleThreads, free_endpoints

import dtrans
from dtrans.errors import ConfigError, GradientError, PeerError
from dtrans.run.distributed.role import Role
from dtrans.run.role_jobs.server_job import ServerJob
from dtrans.run.role_jobs.trainer_job import TrainerJob


KEY = jax.random.key(0)
SERVERS = ("127.0.0.1:1", "127.0.0.1:2")
SMALL = dtrans.BlockPlacement(min_block_size=1)


def loss_of(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((x @ params["w"]) ** 2)


def by_arguments(
    params: Any, opt_state: Any, x: jax.Array, rate: jax.Array, scales: jax.Array
) -> Any:
    """Return a step with a learning rate and a scale of each column, which are batch arguments."""
    loss, grads = dtrans.value_and_grad(loss_of)(params, x)
    new = {"w": params["w"] - rate * scales * grads["w"]}
    return new, opt_state, loss


def init(key: jax.Array) -> Any:
    return {"w": jax.random.normal(key, (5, 3))}, {"steps": jnp.zeros((), int)}


X, SCALES = np.random.default_rng(0).normal(size=(12, 5)), np.array([1.0, 2.0, 0.5])
WHOLE = dtrans.Batch(unsplit_inputs=("scales",))


def planned(step: Any, *batch: Any, trainers: int = 2, **options: Any) -> Any:
    options = {"pservers": SERVERS, "placement": SMALL, "batch": WHOLE, **options}
    main = dtrans.trace(step, *jax.eval_shape(init, KEY), *batch)
    return dtrans.pserver(main, dtrans.trace(init, KEY), trainers=trainers, **options)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("trainers", [1, 2, 3])
def test_an_update_may_read_arguments_of_the_step(trainers: int) -> None:
    plan = planned(by_arguments, X[:4], 0.1, SCALES, trainers=trainers)
    for job in (plan.simulate(), plan.on_mesh()):
        state, alone = job.init(KEY), init(KEY)
        for rate in (0.1, 0.02):
            state, loss = job.step(state, X, rate, SCALES)
            *alone, wanted = by_arguments(*alone, X, rate, SCALES)
            np.testing.assert_allclose(loss, wanted, rtol=1e-12)
        np.testing.assert_allclose(job.params(state)["w"], alone[0]["w"], rtol=1e-12)


def test_arguments_go_with_the_gradients_to_the_servers_that_need_them() -> None:
    plan = planned(by_arguments, X[:6], 0.1, SCALES)
    assert plan.traffic.arguments == {
        "rate": dict.fromkeys(SERVERS, 4),
        "scales": dict.fromkeys(SERVERS, 12),
    }
    sends = [
        e
        for e in plan.trainer.eqns
        if e.primitive.name == "send" and "@ARG" in e.params["names"][0]
    ]
    assert [e.params["epmap"] for e in sends] == [SERVERS, SERVERS]
    assert plan.bytes_per_step == {"send": 4 * 15 + 2 * (4 + 12), "recv": 4 * 15}
    for programs in plan.servers.values():
        (serve,) = programs.main.eqns
        first, *others = serve.params["optimize_blocks"]
        assert first.name == "arguments" and first.out_names == ("rate", "scales")
        assert not any(g.op == "same" for block in others for g in block.grads)
    _, *servers = plan.costs()
    assert {s.received for s in servers} == {2 * (4 * 9 + 16), 2 * (4 * 6 + 16)}
    one = planned(by_arguments, X[:6], 0.1, SCALES, pservers=SERVERS[:1], trainers=1)
    assert one.traffic.arguments == {"rate": {SERVERS[0]: 4}, "scales": {SERVERS[0]: 12}}


def test_what_cannot_be_told_is_refused_by_name() -> None:
    def by_rows(params: Any, opt_state: Any, x: jax.Array) -> Any:
        loss, grads = dtrans.value_and_grad(loss_of)(params, x)
        return {"w": params["w"] - jnp.abs(x @ grads["w"]).max() * grads["w"]}, opt_state, loss

    with pytest.raises(
        GradientError, match="params/w is updated with x, which only the trainers have"
    ):
        planned(by_rows, X[:6], batch=dtrans.Batch())
    told = (
        "params/w is updated with rate, which only the trainers have.*With mode=dtrans.Sync.. "
        "an update may read arg"
    )
    with pytest.raises(GradientError, match=told):
        planned(by_arguments, X[:6], 0.1, SCALES, mode=dtrans.Async())
    with pytest.raises(
        ConfigError,
        match="the update reads rate: the value of a trainer that has left would count as zero",
    ):
        planned(by_arguments, X[:6], 0.1, SCALES, on_trainer_exit="paddle")


def with_noise(params: Any, opt_state: Any, x: jax.Array) -> Any:
    """Compute a step with noise from a key in the optimizer state, and a loss whose weight depends
    on the count of steps."""
    key, new_key = jax.random.split(opt_state["key"])
    noise = jax.random.normal(key, x.shape, x.dtype)
    scale = 1.0 / (1 + opt_state["steps"])
    loss, grads = dtrans.value_and_grad(lambda p: scale * loss_of(p, x + noise))(params)
    new = {"w": params["w"] - 0.1 * grads["w"]}
    return new, {"key": new_key, "steps": opt_state["steps"] + 1}, loss


def noisy_init(key: jax.Array) -> Any:
    params, state = init(key)
    return params, {"key": key, **state}


def noisy_plan(trainers: int, **options: Any) -> Any:
    main = dtrans.trace(with_noise, *jax.eval_shape(noisy_init, KEY), X[:4])
    options = {"pservers": SERVERS, "placement": SMALL, **options}
    return dtrans.pserver(main, dtrans.trace(noisy_init, KEY), trainers=trainers, **options)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("trainers", [1, 2, 3])
def test_a_loss_may_read_state_that_no_row_enters(trainers: int) -> None:
    plan = noisy_plan(trainers)
    names = [e.primitive.name for e in plan.trainer.eqns]
    assert names[:3] == ["recv", "recv", "fetch_barrier"], "before anything is computed"
    for job in (plan.simulate(), plan.on_mesh()):
        state, alone = job.init(KEY), noisy_init(KEY)
        for _ in range(3):
            state, loss = job.step(state, X)
            *alone, wanted = jax.jit(with_noise)(*alone, X)
            np.testing.assert_allclose(loss, wanted, rtol=1e-12)
        np.testing.assert_allclose(job.params(state)["w"], alone[0]["w"], rtol=1e-12)
        assert int(job.opt_state(state)["steps"]) == 3
        np.testing.assert_array_equal(
            *map(jax.random.key_data, (job.opt_state(state)["key"], alone[1]["key"]))
        )


@pytest.mark.parametrize("mode", [dtrans.Async(), dtrans.HalfAsync(), dtrans.Geo()])
def test_a_loss_that_reads_state_is_for_synchronous_servers(mode: Any) -> None:
    told = (
        "the gradient of params/w is computed from opt_state/key, which is optimizer state.*With mode=dtrans.Sync.. "
        ".* a loss may read optimizer state"
    )
    with pytest.raises(GradientError, match=told):
        noisy_plan(2, mode=mode, batch="local")


def test_a_loss_may_not_read_state_of_which_each_server_has_rows() -> None:
    tx = optax.sgd(0.1, momentum=0.9)

    def step(params: Any, opt_state: Any, x: jax.Array) -> Any:
        loss, grads = dtrans.value_and_grad(loss_of)(params, x)
        updates, new = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), new, loss + optax.tree.norm(opt_state)

    start = lambda key: (p := init(key)[0], tx.init(p))
    main = dtrans.trace(step, *jax.eval_shape(start, KEY), X[:6])
    with pytest.raises(
        GradientError,
        match="loss is computed from opt_state/0/trace/w, which is optimizer state",
    ):
        dtrans.pserver(main, dtrans.trace(start, KEY), pservers=SERVERS, trainers=2)


# -- in processes --------------------------------------------------------------------------------


def run(
    plan: Any, endpoints: tuple[str, ...], threads: RoleThreads, rates: dict[int, float]
) -> dict[str, Any]:
    """Run one step in each trainer, with a different rate in each.

    Return the result or the error of each role.
    """
    count = len(rates)

    def server(ep: str) -> Any:
        with ServerJob(
            plan, Role("pserver", count, endpoints, current_endpoint=ep), {"deadline": HANG}
        ) as job:
            return job.serve(job.init(KEY))

    def trainer(k: int) -> Any:
        with TrainerJob(
            plan, Role("trainer", count, endpoints, trainer_id=k), {"deadline": HANG}
        ) as job:
            state, loss = job.step(job.init(KEY), X[6 * k : 6 * k + 6], rates[k], SCALES)
            return job.params(state)["w"], loss, state

    for ep in endpoints:
        threads.start(ep, server, ep)
    for k in rates:
        threads.start(f"trainer {k}", trainer, k)
    return {name: threads.end(name) for name in (*endpoints, *(f"trainer {k}" for k in rates))}


@pytest.mark.usefixtures("x64")
def test_processes_are_told_the_same_argument(role_threads: RoleThreads) -> None:
    endpoints = free_endpoints(2)
    plan = planned(by_arguments, X[:6], 0.1, SCALES, pservers=endpoints)
    found = run(plan, endpoints, role_threads, {0: 0.1, 1: 0.1})
    (params, _, loss) = by_arguments(*init(KEY), X, 0.1, SCALES)
    for k in (0, 1):
        w, told, state = found[f"trainer {k}"]
        np.testing.assert_allclose(w, params["w"], rtol=1e-12)
        np.testing.assert_allclose(told, loss, rtol=1e-12)
        # A trainer's state is a tuple that shows no entries of its arrays.
        assert repr(state) == f"<TrainerState: 1 array, {params['w'].nbytes} bytes>"
        assert "TrainerState" in state._repr_html_() and "[5,3]" in state._repr_html_()
        assert type(jax.tree.map(jnp.copy, state)) is type(state) and isinstance(state, tuple)


def test_processes_with_other_arguments_are_told_which(role_threads: RoleThreads) -> None:
    endpoints = free_endpoints(1)
    plan = planned(by_arguments, X[:6], 0.1, SCALES, pservers=endpoints)
    found = run(plan, endpoints, role_threads, {0: 0.5, 1: 0.25})
    message = "rate of step 1 is 0.5 on trainer 0, and 0.25 on trainer 1; the update reads it"
    for role, ended in found.items():
        assert isinstance(ended, PeerError) and message in str(ended), (role, ended)
