"""Trainers that send gradients and receive parameters in the background.

If steps wait for the communicator, this is sequential training. Otherwise the servers end with the
updates of all gradients, each used once.
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
from helpers import communication, init_of, mlp_batch, mlp_loss, mlp_params, plain_step, tree_close
from role_threads import (
    HANG,
    Peer,
    RoleThreads,
    check_state,
    free_endpoints,
    joined,
    serve,
    until,
)

import dtrans
from dtrans.errors import ConfigError, DeadlineError, PeerError
from dtrans.parameter_server.gradient_merging import merging
from dtrans.parameter_server.plan import PServerPlan
from dtrans.protocol.server.async_server import AsyncServer
from dtrans.protocol.trainer.traffic import merged
from dtrans.protocol.trainer.traffic_loop import TrafficLoop
from dtrans.run.parameter_server.communicator import Communicator
from dtrans.step.halves import divide_step


@pytest.fixture(autouse=True)
def x64() -> Any:
    with jax.enable_x64(True):
        yield


def batches_of(count: int, seed: int = 0) -> list[Any]:
    return [mlp_batch(6, dtype=jnp.float64, seed=100 * seed + s) for s in range(count)]


BESIDE = dtrans.Async(communicator=dtrans.CommunicatorConfig())


def plan_for(servers: int, trainers: int, tx: Any, *, params: Any = None, loss: Any = mlp_loss,
             rows: int = 6,
             **options: Any) -> PServerPlan:  # fmt: skip
    params = mlp_params(dtype=jnp.float64) if params is None else params
    batch = mlp_batch(rows, dtype=jnp.float64)
    return flat_options.pserver(
        dtrans.trace(
            dtrans.make_train_step(loss, tx), params, jax.eval_shape(tx.init, params), *batch
        ),
        dtrans.trace(init_of(tx), params),
        pservers=free_endpoints(servers),
        trainers=trainers,
        **{"mode": BESIDE, "min_block_size": 1, **options},
    )


def train(
    plan: PServerPlan, k: int, batches: Sequence[Any], *args: Any, **options: Any
) -> tuple[Any, list[Any]]:
    """Run one trainer on its batches.

    Return its last parameters, and the parameters of each step.
    """
    with dtrans.Executor(**{"deadline": HANG, **options}) as exe:
        params = exe.run(plan.trainer_startup_program(k), *args)
        went_in = []
        for batch in batches:
            went_in.append(params)
            params, _ = exe.run(plan.trainer_program(k), params, *batch)
        return params, went_in


def run(
    role_threads: RoleThreads, plan: PServerPlan, params: Any, batches: Sequence[Any]
) -> tuple[Any, Any]:
    """Run a job.

    Return the final states of the servers, and the result of each trainer. Trainer k has
    `batches[k]`.
    """
    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep, params)
    for k in range(plan.trainers):
        role_threads.start(f"trainer {k}", train, plan, k, batches[k], params)
    ended = role_threads.all()
    return [ended[ep] for ep in plan.servers], [ended[f"trainer {k}"] for k in range(plan.trainers)]


def sequential(
    tx: Any, params: Any, batches: Sequence[Any], loss: Any = mlp_loss
) -> tuple[Any, Any]:
    step, state = jax.jit(plain_step(loss, tx)), tx.init(params)
    for batch in batches:
        params, state, _ = step(params, state, *batch)
    return params, state


ADAM = optax.adam(optax.cosine_decay_schedule(1e-2, 20))


# -- steps that wait -------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("delay", [None, dtrans.DelayCompensation()], ids=["plain", "compensated"])
@pytest.mark.parametrize("servers", [1, 3])
def test_one_trainer_that_waits_is_sequential_training(
    role_threads: RoleThreads, servers: int, delay: dtrans.DelayCompensation | None
) -> None:
    """Use leaves that are sliced, have one row or no dimension.

    No parameters are older than necessary, so there is nothing to compensate.
    """
    params = {**mlp_params(dtype=jnp.float64), "scale": jnp.ones(()), "row": jnp.ones((1, 3))}

    def loss(p: Any, x: Any, y: Any) -> Any:
        return mlp_loss({n: p[n] for n in ("b1", "b2", "w1", "w2")}, x, y) * p["scale"] + jnp.sum(
            p["row"] ** 2
        )

    batches = batches_of(5)
    plan = plan_for(servers, 1, ADAM, params=params, loss=loss, mode=dtrans.HalfAsync(delay))
    states, ((got, _),) = run(role_threads, plan, params, [batches])
    want, state = sequential(ADAM, params, batches, loss)
    tree_close(got, want, 1e-12)
    check_state(plan, states, want, state)


@pytest.mark.parametrize("half_async", [True, False])
def test_completely_not_async_is_synchronous(role_threads: RoleThreads, half_async: bool) -> None:
    """Run three trainers and several servers; one server has no blocks.

    A clip by the global norm needs all servers.
    """
    tx = optax.chain(optax.clip_by_global_norm(0.1), ADAM)
    params = {"w": jnp.ones((5, 3)) * 0.1}
    loss = lambda p, x, y: jnp.mean((x @ p["w"] - y) ** 2)
    whole = batches_of(4)
    config = dtrans.DistributeTranspilerConfig(
        sync_mode=False,
        runtime_split_send_recv=True,
        completely_not_async=True,
        half_async=half_async,
    )
    mode = config.update_mode(False)
    assert mode == dtrans.Sync(runtime_split=True)
    plan = plan_for(3, 3, tx, params=params, loss=loss, rows=2, mode=mode,
                    slice_var_up=False)  # fmt: skip
    assert sum(not units for units in plan.placement.units.values()) == 2
    parts = [[tuple(x[2 * k : 2 * k + 2] for x in batch) for batch in whole] for k in range(3)]
    states, ended = run(role_threads, plan, params, parts)
    want, state = sequential(tx, params, whole, loss)
    for got, _ in ended:
        tree_close(got, want, 1e-12)
    check_state(plan, states, want, state)


def test_completely_not_async_cuts_as_it_runs(role_threads: RoleThreads) -> None:
    params, whole = mlp_params(dtype=jnp.float64), batches_of(3)
    tx = optax.chain(optax.clip_by_global_norm(0.1), ADAM)
    plan = plan_for(2, 2, tx, rows=3, mode=dtrans.Sync(runtime_split=True))
    parts = [[tuple(x[3 * k : 3 * k + 3] for x in batch) for batch in whole] for k in range(2)]
    states, ended = run(role_threads, plan, params, parts)
    want, state = sequential(tx, params, whole)
    for got, _ in ended:
        tree_close(got, want, 1e-12)
    check_state(plan, states, want, state)


# -- steps that do not wait ------------------------------------------------------------------------


@pytest.mark.parametrize("trainers", [1, 3])
@pytest.mark.parametrize("independent", [True, False])
def test_every_gradient_is_used_once(
    role_threads: RoleThreads, trainers: int, independent: bool
) -> None:
    """Gradients may be merged in any way.

    Plain SGD adds them up, each computed at the parameters of its step.
    """
    tx, params = optax.sgd(0.05), mlp_params(dtype=jnp.float64)
    config = dtrans.CommunicatorConfig(max_merge_var_num=3, independent_recv_thread=independent)
    plan = plan_for(2, trainers, tx, mode=dtrans.Async(communicator=config))
    batches = [batches_of(15, seed=k) for k in range(trainers)]
    states, ended = run(role_threads, plan, params, batches)
    grad, want = jax.jit(jax.grad(mlp_loss)), params
    for (_, went_in), mine in zip(ended, batches, strict=True):
        for p, batch in zip(went_in, mine, strict=True):
            want = jax.tree.map(lambda w, g: w - 0.05 * g, want, grad(p, *batch))
    tree_close({n: joined(plan, states, f"params/{n}") for n in params}, want, 1e-12)


class Gate:
    """Servers that answer a request for parameters only after the gate is opened, except for the
    initial parameters."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.asked = threading.Event()
        self.sent: list[int] = []  # number of steps in each message of gradients
        answer, take = AsyncServer.recv, AsyncServer.send

        def recv(server: Any, k: int, message: Any) -> None:
            if server._steps.of_trainer(k).number:
                self.asked.set()
                assert self.opened.wait(HANG)
            answer(server, k, message)

        def send(server: Any, k: int, message: Any) -> None:
            self.sent.append(message.fields.get("steps", 1))
            take(server, k, message)

        monkeypatch.setattr(AsyncServer, "recv", recv)
        monkeypatch.setattr(AsyncServer, "send", send)

    def stalled(
        self, role_threads: RoleThreads, plan: PServerPlan, params: Any, batches: Sequence[Any]
    ) -> Any:
        """Return the expected state of a single server.

        All steps used the initial parameters, because the server did not answer. The first step was
        sent alone, and requested the answer.
        """
        (ep,) = plan.servers
        role_threads.start(ep, serve, plan, ep, params)

        def trainer() -> None:
            with dtrans.Executor(deadline=HANG) as exe:
                p = exe.run(plan.trainer_startup, params)
                for i, batch in enumerate(batches):
                    exe.run(plan.trainer, p, *batch)
                    assert i or self.asked.wait(HANG)
                self.opened.set()

        role_threads.start("trainer", trainer)
        return role_threads.all()[ep]


@pytest.mark.parametrize("tx, merge", [
    (optax.sgd(optax.piecewise_constant_schedule(0.1, {4: 0.1})), "sum"),
    (optax.sgd(0.1, momentum=0.9), "mean"),
], ids=["sgd", "momentum"])  # fmt: skip
def test_what_waits_is_merged(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch, tx: Any, merge: str
) -> None:
    """While an answer is pending, one more group is sent.

    Later gradients form one group of at most five steps. Counts are counts of steps, so the
    schedule is right.
    """
    gate = Gate(monkeypatch)
    params, batches = mlp_params(dtype=jnp.float64), batches_of(10)
    plan = plan_for(
        1, 1, tx, mode=dtrans.Async(communicator=dtrans.CommunicatorConfig(max_merge_var_num=5))
    )
    ended = gate.stalled(role_threads, plan, params, batches)
    assert sum(gate.sent) == 10
    groups = gate.sent
    assert groups[0] == 1
    assert max(groups) == 5
    grad = jax.jit(jax.grad(mlp_loss))
    grads = [grad(params, *batch) for batch in batches]
    want, state = params, tx.init(params)
    for count in groups:
        parts, grads = grads[:count], grads[count:]
        g = jax.tree.map(lambda *xs: sum(xs) / (len(xs) if merge == "mean" else 1), *parts)
        if merge == "sum":  # the rate of the group's last step
            for _ in range(count - 1):
                _, state = tx.update(g, state, want)
        updates, state = tx.update(g, state, want)
        want = optax.apply_updates(want, updates)
    check_state(plan, [ended], want, state)


def test_a_full_queue_is_waited_for(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    params, batches = mlp_params(dtype=jnp.float64), batches_of(9)
    plan = plan_for(
        1,
        1,
        optax.sgd(0.1),
        mode=dtrans.Async(communicator=dtrans.CommunicatorConfig(send_queue_size=2)),
    )
    (ep,) = plan.servers
    lengths = []
    put = TrafficLoop.put

    def noted(self: TrafficLoop, group: Any, steps: int) -> None:
        put(self, group, steps)
        lengths.append(len(self._queue))

    monkeypatch.setattr(TrafficLoop, "put", noted)
    role_threads.start(ep, serve, plan, ep, params)
    role_threads.start("trainer", train, plan, 0, batches, params)
    until(lambda: gate.asked.is_set() and lengths and lengths[-1] == 2, "the queue to be full")
    gate.opened.set()
    role_threads.all()
    assert len(lengths) == 9
    assert max(lengths) == 2


def test_a_communicator_rests_for_a_program_of_another_kind(role_threads: RoleThreads) -> None:
    """A startup program between steps returns the result of all earlier gradients."""
    tx, params, batches = optax.sgd(0.05), mlp_params(dtype=jnp.float64), batches_of(6)
    plan = plan_for(2, 1, tx)
    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep, params)
    grad, want = jax.jit(jax.grad(mlp_loss)), params
    with dtrans.Executor(deadline=HANG) as exe:
        p = exe.run(plan.trainer_startup, params)
        for i, batch in enumerate(batches):
            want = jax.tree.map(lambda w, g: w - 0.05 * g, want, grad(p, *batch))
            p, _ = exe.run(plan.trainer, p, *batch)
            if i % 2:
                p = exe.run(plan.trainer_startup, params)
                tree_close(p, want, 1e-12)
    role_threads.all()


# -- what goes wrong -------------------------------------------------------------------------------


def test_a_server_that_ends_is_named_by_the_next_step(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = mlp_params(dtype=jnp.float64)
    plan = plan_for(1, 1, ADAM)
    (ep,) = plan.servers
    take = AsyncServer.send

    def broken(self: Any, k: int, message: Any) -> None:
        if self._steps.of_trainer(k).number == 2:
            raise RuntimeError("out of order")
        take(self, k, message)

    monkeypatch.setattr(AsyncServer, "send", broken)
    role_threads.start(ep, serve, plan, ep, params)
    role_threads.start("trainer", train, plan, 0, batches_of(400), params)
    ended = role_threads.end("trainer")
    assert isinstance(ended, PeerError)
    assert str(ended) == f"pserver {ep} refused trainer 0: it ended: RuntimeError: out of order"
    assert isinstance(role_threads.end(ep), RuntimeError)


def test_a_server_that_does_not_answer_is_named(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    params = mlp_params(dtype=jnp.float64)
    plan = plan_for(1, 1, ADAM, mode=dtrans.HalfAsync())
    (ep,) = plan.servers
    role_threads.start(ep, serve, plan, ep, params)
    role_threads.start("trainer", train, plan, 0, batches_of(3), params, deadline=1.0)
    ended = role_threads.end("trainer")
    gate.opened.set()
    assert isinstance(ended, DeadlineError)
    assert str(ended).startswith("trainer 0 waited 1.")
    assert str(ended).endswith(f" s for pserver {ep}: parameters")
    assert isinstance(role_threads.end(ep), PeerError)


def test_a_trainer_that_fails_ends_only_itself(role_threads: RoleThreads) -> None:
    params = mlp_params(dtype=jnp.float64)
    plan = plan_for(1, 2, optax.sgd(0.1))
    (ep,) = plan.servers
    role_threads.start(ep, serve, plan, ep, params)
    with pytest.raises(ZeroDivisionError), dtrans.Executor(deadline=HANG) as exe:
        p = exe.run(plan.trainer_startup_program(0), params)
        exe.run(plan.trainer_program(0), p, *batches_of(1)[0])
        raise ZeroDivisionError
    train(plan, 1, batches_of(2, seed=1), params)
    assert not isinstance(role_threads.end(ep), BaseException)


@pytest.mark.parametrize(
    "steps, told",
    [
        (0, "merged gradients of 0 steps, expected 1 to 1000 steps"),
        (1001, "merged gradients of 1001 steps, expected 1 to 1000 steps"),
        ("two", "a `send` message whose field `steps` is missing or has the wrong type"),
        (True, "a `send` message whose field `steps` is missing or has the wrong type"),
    ],
)
def test_a_number_of_steps_that_cannot_be_is_refused(
    role_threads: RoleThreads, steps: Any, told: str
) -> None:
    params = {"b": jnp.zeros(())}
    plan = plan_for(1, 1, optax.sgd(0.1), params=params, loss=lambda p, x, y: p["b"] * jnp.mean(x))
    (ep,) = plan.servers
    role_threads.start(ep, serve, plan, ep, params)
    with Peer(ep) as peer:
        peer.hello(sync_mode=False)
        assert peer.hear().op == "welcome"
        value = np.ones((), np.float64).tobytes()
        peer.tell("send", value, step=0, pieces=[[["params/b@GRAD", 0, 8]]], steps=steps)
        assert told in peer.refused()
        peer.tell("send", value, step=0, pieces=[[["params/b@GRAD", 0, 8]]], steps=2)
        peer.tell("complete")
        assert peer.hear().op == "goodbye"
    np.testing.assert_allclose(role_threads.end(ep)["params/b"], -0.1, rtol=1e-15)


@pytest.mark.parametrize("options, message", [
    ({"max_merge_var_num": 0}, "max_merge_var_num must be a positive number, it is 0"),
    ({"max_merge_var_num": 2000}, "max_merge_var_num must be 1000 or less, it is 2000"),
    ({"send_queue_size": True}, "send_queue_size must be a positive number, it is True"),
    ({"min_send_grad_num_before_recv": "1"}, "min_send_grad_num_before_recv must be a positive "
"number, it is '1'"),
    ({"independent_recv_thread": 1}, "independent_recv_thread must be True or False, it is 1"),
    ({"merge": "max"}, "merge must be 'auto', 'sum' or 'mean', it is 'max'"),
])  # fmt: skip
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        dtrans.CommunicatorConfig(**options)
    assert str(caught.value) == message


def test_the_mesh_has_none() -> None:
    with pytest.raises(
        ConfigError, match="^on_mesh does not support runtime_split; leave runtime_split out"
    ):
        plan_for(1, 1, ADAM, mode=dtrans.Sync(runtime_split=True)).on_mesh()


# -- programs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode, barrier",
    [(BESIDE, False), (dtrans.HalfAsync(), True), (dtrans.Sync(runtime_split=True), True)],
    ids=["async", "half", "not async"],
)
def test_leaves_are_sent_and_received_whole(mode: Any, barrier: bool) -> None:
    """As in Paddle, leaves are neither split nor concatenated.

    Only the startup program has a `fetch_barrier`.
    """
    plan = plan_for(2, 2, ADAM, mode=mode)
    assert communication(plan.trainer) == ["send"] * 4 + ["send_barrier"] * barrier + ["recv"] * 4
    assert communication(plan.trainer_startup) == ["recv"] * 4 + ["fetch_barrier"] + ["concat"] * 4
    named = ".trainer_0" if isinstance(mode, dtrans.Sync) else ""
    for op in plan.trainer.ops:
        if op.type == "send":
            (whole,) = op.inputs
            blocks = plan.placement.blocks[whole.removesuffix("@GRAD")]
            assert op.attrs["sections"] == tuple(b.rows for b in blocks)
            assert op.attrs["epmap"] == tuple(b.endpoint for b in blocks)
            assert op.attrs["names"] == tuple(f"{whole}.block{b.index}{named}" for b in blocks)
            assert ("communicator" in op.attrs) == (not named)


def as_written(change: Any) -> Any:
    """Return a step whose new parameters are a function of (old, gradient), and not the sum of an
    update."""

    def step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
        value, grads = dtrans.value_and_grad(mlp_loss)(params, x, y)
        return jax.tree.map(change, params, grads), opt_state, value

    return step


MERGING = {
    "sgd": (optax.sgd(0.1), "sum"),
    "scheduled": (optax.sgd(optax.cosine_decay_schedule(0.1, 10)), "sum"),
    "masked": (
        optax.masked(optax.sgd(0.1), {"b1": True, "b2": False, "w1": True, "w2": True}),
        "sum",
    ),
    "frozen": (
        optax.multi_transform(
            {"a": optax.sgd(0.1), "b": optax.set_to_zero()},
            {"b1": "a", "b2": "b", "w1": "a", "w2": "a"},
        ),
        "sum",
    ),
    "injected": (optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), "sum"),
    "centralized": (optax.chain(optax.centralize(), optax.sgd(0.1)), "sum"),
    "momentum": (optax.sgd(0.1, momentum=0.9), "mean"),
    "adam": (optax.adam(0.1), "mean"),
    "decay": (optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)), "mean"),
    "clip": (optax.chain(optax.clip(1.0), optax.sgd(0.1)), "mean"),
    "sign": (optax.sign_sgd(0.1), "mean"),
    "norm": (optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), "mean"),
    "noisy": (optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)), "mean"),
    "accumulating": (optax.MultiSteps(optax.sgd(0.1), 2), "none"),
    "written: sgd": (lambda w, g: w - 0.1 * g, "sum"),
    "written: decoupled decay": (lambda w, g: w * 0.9 - 0.1 * g, "mean"),
    "written: the same otherwise": (lambda w, g: (w - 0.01 * w) - 0.1 * g, "mean"),
    "written: by the parameter": (lambda w, g: w - 0.1 * g * w, "mean"),
    "written: another order": (lambda w, g: w[::-1] - 0.1 * g, "mean"),
    "written: no parameter": (lambda w, g: 0 - 0.1 * g, "mean"),
    "written: rounded": (lambda w, g: w - 0.1 * g.astype(jnp.int32).astype(w.dtype), "mean"),
    "written: an offset": (lambda w, g: w - 0.1 * (g + 1), "mean"),
    "written: a mask": (
        lambda w, g: w - jnp.where(np.arange(w.shape[-1]) > 0, 0.1 * g, 0.0),
        "sum",
    ),
    "written: a mask of ones": (
        lambda w, g: w - jnp.where(np.arange(w.shape[-1]) > 0, 0.1 * g, 1.0),
        "mean",
    ),
    "written: rows added up": (lambda w, g: w - 0.1 * jnp.cumsum(g, 0), "sum"),
    "written: joined": (lambda w, g: w - 0.1 * jnp.concatenate([g[:1] * 2, g[1:]]), "sum"),
    "written: with zeros": (
        lambda w, g: w - 0.1 * jnp.concatenate([g[:1], jnp.zeros_like(g[1:])]),
        "sum",
    ),
    "written: the other way": (lambda w, g: 0.1 * g - w, "mean"),
}


@pytest.mark.parametrize("name", MERGING)
def test_what_may_be_made_of_several_gradients(name: str) -> None:
    how, expected = MERGING[name]
    params = mlp_params(dtype=jnp.float64)
    batch = mlp_batch(6, dtype=jnp.float64)
    if name.startswith("written"):
        step, state = as_written(how), jnp.zeros(())
    else:
        step, state = dtrans.make_train_step(mlp_loss, how), how.init(params)
    assert merging(divide_step(dtrans.trace(step, params, state, *batch))) == expected


def test_a_parameter_that_changes_without_a_gradient_is_not_merged() -> None:
    """With merged gradients, the parameter would change once for each group of steps."""
    params = {**mlp_params(dtype=jnp.float64), "n": jnp.zeros(())}

    def step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
        net = {n: params[n] for n in ("b1", "b2", "w1", "w2")}
        value, grads = dtrans.value_and_grad(mlp_loss)(net, x, y)
        new = jax.tree.map(lambda w, g: w - 0.1 * g, net, grads)
        return {**new, "n": params["n"] + 1}, opt_state, value

    assert (
        merging(
            divide_step(dtrans.trace(step, params, jnp.zeros(()), *mlp_batch(6, dtype=jnp.float64)))
        )
        == "none"
    )


def test_what_is_not_to_be_merged_goes_one_by_one(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accumulate over three steps: every third gradient causes an update, in any queue."""
    gate = Gate(monkeypatch)
    tx = optax.MultiSteps(optax.sgd(0.1), 3)
    params, batches = mlp_params(dtype=jnp.float64), batches_of(7)
    plan = plan_for(1, 1, tx)
    ended = gate.stalled(role_threads, plan, params, batches)
    assert gate.sent == [1] * 7
    grad, want, state = jax.jit(jax.grad(mlp_loss)), params, tx.init(params)
    for batch in batches:
        updates, state = tx.update(grad(params, *batch), state, want)
        want = optax.apply_updates(want, updates)
    check_state(plan, [ended], want, state)


def test_of_averaged_state_the_newest_is_sent(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of queued steps are added.

    Running statistics are not added, and change nothing about this.
    """
    gate = Gate(monkeypatch)
    params = {"w": jnp.ones((5, 3)), "seen": jnp.zeros(3)}
    loss = lambda w, x, y: jnp.mean((x @ w - y) ** 2)

    def step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
        value, g = dtrans.value_and_grad(loss)(params["w"], x, y)
        return (
            {"w": params["w"] - 0.1 * g, "seen": 0.5 * params["seen"] + 0.5 * y.mean(0)},
            opt_state,
            value,
        )

    init = lambda p: (p, jnp.zeros(()))
    batches = batches_of(6)
    plan = dtrans.pserver(dtrans.trace(step, *init(params), *batches[0]),
                          dtrans.trace(init, params),
                          pservers=free_endpoints(1), mode=BESIDE,
                          batch=dtrans.Batch("local", merge={"params/seen": "mean"}))  # fmt: skip
    sends = {op.inputs[0]: op.attrs["merge"] for op in plan.trainer.ops if op.type == "send"}
    assert sends == {"params/w@GRAD": "sum", "params/seen@GRAD": "newest"}
    ended = gate.stalled(role_threads, plan, params, batches)
    assert max(gate.sent) > 1
    grad = jax.jit(jax.grad(loss))
    want = params["w"] - 0.1 * sum(grad(params["w"], *batch) for batch in batches)
    np.testing.assert_allclose(ended["params/w"], want, rtol=1e-12)
    np.testing.assert_allclose(ended["params/seen"], 0.5 * batches[-1][1].mean(0), rtol=1e-12)


def test_gradients_are_merged_in_their_own_type() -> None:
    import ml_dtypes

    parts = [np.full((3,), x, ml_dtypes.bfloat16) for x in (1, 2, 6)]
    before = [p.copy() for p in parts]
    for how, want in (("sum", 9), ("mean", 3)):
        got = merged(parts, how)
        assert got.dtype == parts[0].dtype
        np.testing.assert_array_equal(got.astype(np.float32), np.full((3,), want))
    assert all((p == b).all() for p, b in zip(parts, before, strict=True)), "they are JAX's memory"
    assert merged([np.float64(2.0).reshape(())] * 2, "mean").shape == ()
    assert float(merged([np.float64(2.0).reshape(())] * 2, "mean")) == 2.0


# -- what was found by reading it again ------------------------------------------------------------


def test_gradients_without_dims_are_merged_in_any_number() -> None:
    parts = [np.float64(x).reshape(()) for x in (1, 2, 3, 6)]
    assert float(merged(parts, "sum")) == 12
    assert float(merged(parts, "mean")) == 3
    assert merged(parts, "sum").shape == ()
    assert merged(parts, "newest") is parts[-1]


def test_leaves_are_merged_with_themselves_whatever_their_order(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one executor, batches of two shapes have gradients that are computed in different
    orders."""
    gate = Gate(monkeypatch)

    def loss(p: Any, x: Any) -> Any:
        a, b = (lambda: jnp.sum(x @ p["a"])), (lambda: 100 * jnp.sum(x @ p["b"]))
        first, second = (a, b) if len(x) == 2 else (b, a)
        return first() + second()

    params, tx = {"a": jnp.zeros((3, 2)), "b": jnp.zeros((3, 2))}, optax.sgd(1.0)
    batches = [jnp.ones((2, 3)), jnp.ones((4, 3))]
    main = dtrans.trace(dtrans.make_train_step(loss, tx), params, tx.init(params), batches[0])
    plan = dtrans.pserver(
        main, dtrans.trace(init_of(tx), params), pservers=free_endpoints(1), mode=BESIDE
    )
    order = lambda p: [op.inputs[0] for op in p.ops if op.type == "send"]
    assert order(plan.trainer) == order(plan.trainer.specialize(params, batches[1]))[::-1], (
        "else this shows nothing"
    )
    ended = gate.stalled(role_threads, plan, params, [(batches[i % 2],) for i in range(6)])
    assert max(gate.sent) > 1
    np.testing.assert_allclose(ended["params/a"], -(3 * 2.0 + 3 * 4))
    np.testing.assert_allclose(ended["params/b"], -100 * (3 * 2.0 + 3 * 4))


def test_only_what_is_computed_is_put_into_the_queue(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX dispatches steps asynchronously, so all steps would otherwise use the same parameters."""
    ready: list[bool] = []
    put = Communicator.put

    def noted(self: Communicator, group: Any, steps: int = 1) -> None:
        ready.extend(x.is_ready() for _, x in group)
        put(self, group, steps)

    monkeypatch.setattr(Communicator, "put", noted)
    sizes = (256, 512, 512, 8)
    params = mlp_params(sizes, jnp.float64)
    loss = lambda p, x, y: mlp_loss(p, x, y)
    tx, batch = optax.sgd(0.01), mlp_batch(256, sizes, jnp.float64)
    main = dtrans.trace(dtrans.make_train_step(loss, tx), params, tx.init(params), *batch)
    plan = dtrans.pserver(
        main, dtrans.trace(init_of(tx), params), pservers=free_endpoints(1), mode=BESIDE
    )
    (ep,) = plan.servers
    role_threads.start(ep, serve, plan, ep, params)
    train(plan, 0, [batch] * 3, params)
    role_threads.all()
    assert ready == [True] * 18


def test_a_step_gives_arrays_of_its_own(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user may donate the result of a step before newer parameters have arrived."""
    gate = Gate(monkeypatch)
    params, batches = mlp_params(dtype=jnp.float64), batches_of(4)
    plan = plan_for(1, 1, optax.sgd(0.1))
    (ep,) = plan.servers
    role_threads.start(ep, serve, plan, ep, params)
    eat = jax.jit(lambda p: jax.tree.map(lambda x: 2 * x, p), donate_argnums=0)
    with dtrans.Executor(deadline=HANG) as exe:
        first = exe.run(plan.trainer_startup, params)
        for batch in batches:
            p, _ = exe.run(plan.trainer, first, *batch)
            tree_close(eat(p), jax.tree.map(lambda x: 2 * x, params), 1e-15)
        gate.opened.set()
    role_threads.all()


def test_the_leaves_of_a_step_are_of_one_answer(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers may arrive between the `recv` equations of two leaves.

    Each leaf counts its own updates.
    """
    params = {f"w{i}": jnp.zeros(()) for i in range(20)}
    tx = optax.sgd(1.0)
    loss = lambda p, x: -sum(p.values()) * jnp.mean(x)
    main = dtrans.trace(dtrans.make_train_step(loss, tx), params, tx.init(params), jnp.ones(3))
    plan = dtrans.pserver(
        main, dtrans.trace(init_of(tx), params), pservers=free_endpoints(1), mode=BESIDE
    )
    newest = Communicator.newest

    def after_the_next(self: Communicator) -> Any:
        """Return the newest parameters, after all gradients are applied.

        This version differs from the version of the step's first leaf.
        """
        found = newest(self)
        self.barrier()
        return found

    monkeypatch.setattr(Communicator, "newest", after_the_next)
    (ep,) = plan.servers
    role_threads.start(ep, serve, plan, ep, params)
    got, went_in = train(plan, 0, [(jnp.ones(3),)] * 10, params)
    role_threads.all()
    for p in (*went_in, got):
        assert len({float(x) for x in p.values()}) == 1


def test_whatever_ends_a_communicator_ends_the_connections(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server learns of the end, although the exception is not one of dtrans's errors."""
    params = mlp_params(dtype=jnp.float64)
    plan = plan_for(1, 1, optax.sgd(0.1))
    (ep,) = plan.servers
    role_threads.start(ep, serve, plan, ep, params)

    def interrupted(self: Communicator, *, discard: bool = False) -> None:
        stop(self, discard=True)
        raise KeyboardInterrupt

    stop = Communicator.stop
    monkeypatch.setattr(Communicator, "stop", interrupted)
    exe = dtrans.Executor(deadline=HANG)
    p = exe.run(plan.trainer_startup, params)
    exe.run(plan.trainer, p, *batches_of(1)[0])
    with pytest.raises(KeyboardInterrupt):
        exe.close()
    ended = role_threads.end(ep)
    assert isinstance(ended, PeerError)
    assert str(ended) == "trainer 0 failed: KeyboardInterrupt: "


def test_what_is_under_way_is_bounded_by_the_queue() -> None:
    with pytest.raises(ConfigError) as caught:
        dtrans.CommunicatorConfig(min_send_grad_num_before_recv=21)
    assert str(caught.value) == (
        "min_send_grad_num_before_recv=21 must not exceed send_queue_size=20, because "
        "gradients are acknowledged only by the answer to a request for parameters"
    )
