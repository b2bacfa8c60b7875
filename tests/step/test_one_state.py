"""Steps with one state: the role of each leaf, Python numbers as counts, and conversion of
states."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import library_table
import library_zoo
import numpy as np
import optax
import pytest
from flax import nnx

import dtrans
from dtrans.errors import ConfigError, GradientError, TraceError
from dtrans.ir.inline import inline_calls
from dtrans.step.gradients import InlinedStep
from dtrans.step.one_state import kinds_of


Tree = Any


def kinds(name: str) -> dict[str, str]:
    case, key = library_zoo.by_name(name), jax.random.key(0)
    main = dtrans.trace(case.step(case.value_and_grad), *case.state(key), *case.batch(6))
    return kinds_of(InlinedStep(main, inline_calls(main.jaxpr)))


@pytest.mark.usefixtures("x64")
def test_what_each_leaf_is_for() -> None:
    of = kinds("flax_batch_norm_dropout")
    parts = {
        n.split("/")[1]: {k for m, k in of.items() if m.split("/")[1] == n.split("/")[1]}
        for n in of
    }
    assert parts == {
        "step": {"optimizer"},
        "params": {"parameter"},
        "opt_state": {"optimizer"},
        "batch_stats": {"statistics"},
        "key": {"constant"},
    }
    of = kinds("actor_critic")
    for n, k in of.items():
        part = n.split("/")[1]
        assert k == (
            "optimizer"
            if part.startswith("opt")
            else "follower"
            if "target" in part
            else "parameter"
        ), n
    of = kinds("lora")
    assert {n: k for n, k in of.items() if "/opt" not in n} == {
        "state/base/b": "constant",
        "state/base/w": "constant",
        "state/lora/a": "parameter",
        "state/lora/b": "parameter",
    }
    # a constant that only updates read
    assert kinds("injected_rate")["state/opt/hyperparams/learning_rate"] == "optimizer"


def descent(state: Tree, x: jax.Array) -> tuple[Tree, jax.Array]:
    """Return an autoencoder's step, whose result has the types of the batch.

    A Python number counts its steps.
    """
    loss = lambda w: jnp.mean((x @ w @ w.T - x) ** 2)
    w = state["w"] - 0.1 * jax.grad(loss)(state["w"])
    return {"w": w, "steps": state["steps"] + 1, "rate": state["rate"]}, x @ w @ w.T


def autoencoder() -> Tree:
    return {"w": jnp.arange(8.0).reshape(4, 2) / 8, "steps": 0, "rate": 0.1}


X = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)


def test_a_result_may_look_like_the_batch_and_a_number_that_changes_is_data() -> None:
    main = dtrans.trace(descent, autoencoder(), X)
    assert main.inputs["state/steps"].str_short() == "int32[]" and "state/rate" not in main.inputs
    plan = dtrans.nccl2(main, dtrans.trace(autoencoder), trainers=2)
    assert plan.main.out_names == ("state/w", "state/steps", "new_x")
    job = plan.simulate()
    state, made = job.step(job.init(), X)
    alone, wanted = descent(autoencoder(), X)
    np.testing.assert_allclose(made, wanted, rtol=1e-6)
    whole = job.gather(state)
    assert (int(whole["steps"]), whole["rate"]) == (1, 0.1)
    np.testing.assert_allclose(whole["w"], alone["w"], rtol=1e-6)
    again = job.scatter({**autoencoder(), "steps": 7})  # the step accepts a Python number
    assert int(job.gather(job.step(again, X)[0])["steps"]) == 8
    with pytest.raises(TraceError, match="the state does not have the structure"):
        job.scatter({"w": whole["w"]})


def test_a_startup_program_that_makes_something_else_is_refused_by_leaf() -> None:
    main = dtrans.trace(lambda s, x: (descent(s, x)[0], x.sum()), autoencoder(), X)
    wide = lambda: {**autoencoder(), "w": jnp.ones((4, 3))}
    with pytest.raises(
        TraceError, match=r"s/w as float32\[4, 3\], but the step has float32\[4, 2\]; startup"
    ):
        dtrans.nccl2(main, dtrans.trace(wide), trainers=2)


def test_a_step_without_a_gradient_says_what_was_found() -> None:
    step = lambda s, x: ({"w": s["w"] - 0.1 * x.mean(), "n": s["n"] + 1}, x.sum())
    init = lambda: {"w": jnp.ones(3), "n": jnp.zeros((), int)}
    with pytest.raises(
        GradientError,
        match=r"has the leaves s/n \(optimizer\), s/w \(statistics\), .* Take gradients with",
    ):
        dtrans.nccl2(dtrans.trace(step, init(), X), dtrans.trace(init), trainers=2)


TX = optax.adam(0.1)


def dense(params: Tree, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["w1"]) @ params["w2"]


def start() -> tuple[Tree, Tree]:
    params = {"w1": jnp.arange(20.0).reshape(4, 5) / 20, "w2": jnp.ones((5, 1))}
    return params, TX.init(params)


STEP = dtrans.make_train_step(lambda params, x: jnp.mean(dense(params, x) ** 2), TX)


@pytest.mark.parametrize("mode", ["nccl2", "stage 3", "pserver", "pipeline"])
def test_a_function_of_the_parameters_reads_what_it_needs(mode: str) -> None:
    given = dtrans.trace(STEP, *start(), X), dtrans.trace(start)
    plans: dict[str, Any] = {
        "nccl2": lambda: dtrans.nccl2(*given, trainers=2),
        "stage 3": lambda: dtrans.sharding(
            *given, degree=2, stage=3, slices=dtrans.Slicing(min_slice_size=0)
        ),
        "pserver": lambda: dtrans.pserver(*given, pservers="127.0.0.1:1,127.0.0.1:2", trainers=2),
        "pipeline": lambda: dtrans.pipeline(*given, num_stages=2, num_micro_batch=2),
    }
    job = plans[mode]().on_mesh()
    state, _ = job.step(job.init(), X)
    params, _, _ = STEP(*start(), X)
    np.testing.assert_allclose(job.apply(dense, state, X), dense(params, X), rtol=1e-5)
    np.testing.assert_allclose(job.apply(dense, state, X[:3]), dense(params, X[:3]), rtol=1e-5)
    # any pytree, also with jitted functions
    loss = jax.jit(lambda params, x: {"of": (dense(params, x) ** 2).mean()})
    np.testing.assert_allclose(
        job.apply(loss, state, X)["of"], (dense(params, X) ** 2).mean(), rtol=1e-5
    )


def test_slices_stay_where_they_are() -> None:
    """The compiled function gets slices as inputs. XLA gathers the slices that a product needs."""
    given = dtrans.trace(STEP, *start(), X), dtrans.trace(start)
    job = dtrans.sharding(
        *given, degree=2, stage=3, slices=dtrans.Slicing(min_slice_size=0)
    ).on_mesh()
    state = job.init()
    leaves = job._leaves(state, ["params/w1"])
    assert leaves["params/w1"].sharding.shard_shape((4, 5)) == (2, 5)


@pytest.mark.usefixtures("x64")
def test_servers_are_not_asked_for_what_a_function_does_not_read() -> None:
    case = library_zoo.by_name("flax_train_state")
    main = dtrans.trace(
        case.step(case.value_and_grad), *case.state(jax.random.key(0)), *case.batch(4)
    )
    startup = dtrans.trace(case.init, jax.random.key(0))
    plan = dtrans.pserver(main, startup, pservers="127.0.0.1:1", trainers=1)
    job = plan.simulate()
    state = job.init(jax.random.key(0))
    calls: list[str] = []
    fetch, on_servers = job._leaves, {*plan.main.args[1].names}
    job._leaves = lambda state, names: calls.extend(names) or fetch(state, names)
    x, _ = case.batch(4)
    logits = lambda state, x: state.apply_fn({"params": state.params}, x)
    assert job.apply(logits, state, x).shape == (4, 3)
    assert calls and on_servers.isdisjoint(calls)
    calls.clear()
    assert int(job.apply(lambda state: state.step, state)) == 0
    assert len(calls) == 1 and calls[0] in on_servers


@pytest.mark.parametrize("mode", ["nccl2", "stage 3", "pserver", "pipeline"])
@pytest.mark.parametrize("way", ["on_mesh", "simulate"])
@pytest.mark.sampled(1)
def test_hyperparameters_are_changed_between_steps(mode: str, way: str) -> None:
    case = library_zoo.by_name("injected_rate")
    with jax.enable_x64(True):
        job = getattr(library_table.planned(case, mode), way)()
        state, alone = job.init(jax.random.key(0)), case.init(jax.random.key(0))
        step, batch = case.step(jax.value_and_grad), case.batch(12)
        for rate in (1e-2, 0.5):
            state = job.with_hyperparameters(state, learning_rate=rate)
            kept = alone["opt"].hyperparams
            kept["learning_rate"] = jnp.full((), rate, kept["learning_rate"].dtype)
            state, _ = job.step(state, *batch)
            alone, _ = step(alone, *batch)
        np.testing.assert_allclose(
            job.gather(state)["params"]["w"], alone["params"]["w"], rtol=1e-12
        )
        with pytest.raises(
            ConfigError, match="'lr' is not a hyperparameter .*, which has b1, b2, eps"
        ):
            job.with_hyperparameters(state, lr=0.1)


def test_hyperparameters_of_an_nnx_optimizer_have_their_short_names() -> None:
    """nnx stores each hyperparameter in a variable, whose path ends in `value`."""
    model = lambda key: nnx.Linear(4, 2, rngs=nnx.Rngs(key))
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    build = lambda key: (m := model(key), nnx.Optimizer(m, tx, wrt=nnx.Param))
    init = lambda key: nnx.state(build(key))
    graph = nnx.graphdef(nnx.eval_shape(build, jax.random.key(0)))

    def step(state: Any, x: jax.Array) -> Any:
        parts = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(parts[0])
        parts[1].update(parts[0], grads)
        return nnx.state(parts), loss

    key, x = jax.random.key(0), jnp.ones((4, 4))
    job = dtrans.nccl2(
        dtrans.trace(step, jax.eval_shape(init, key), x), dtrans.trace(init, key), trainers=2
    ).simulate()
    still, _ = job.step(job.with_hyperparameters(job.init(key), learning_rate=0.0), x)
    for one, other in zip(
        jax.tree.leaves(job.params(still)), jax.tree.leaves(job.params(job.init(key))), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(
        ConfigError,
        match="'rate' is not a hyperparameter .*, which has learning_rate;",
    ):
        job.with_hyperparameters(still, rate=0.1)


def layers(params: Tree) -> Tree:
    """Return the name of the layer of each parameter."""
    of = lambda path, _: "first" if "first" in jax.tree_util.keystr(path) else "last"
    return jax.tree.map_with_path(of, params)


OPTIMIZERS_OF_LAYERS = {"first": optax.set_to_zero(), "last": optax.adam(1e-2)}
FROZEN_AFTER_CLIP = optax.chain(
    optax.clip_by_global_norm(0.1), optax.multi_transform(OPTIMIZERS_OF_LAYERS, layers)
)
FOUND = {  # optimizers of an nnx model whose gradients are not marked
    "MultiSteps": optax.MultiSteps(optax.adam(1e-2), 2),
    "clip after MultiSteps": optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)), 2
    ),
    "frozen after a clip": FROZEN_AFTER_CLIP,
    "MultiSteps, frozen after a clip": optax.MultiSteps(FROZEN_AFTER_CLIP, 2),
}


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("name", "mode"), [(name, mode) for name in FOUND for mode in ("nccl2", "stage 3", "pserver")]
)
def test_gradients_of_an_nnx_model_are_found(name: str, mode: str) -> None:
    def build(key: jax.Array) -> Any:
        model = library_zoo.Perceptron(nnx.Rngs(key))
        return nnx.split((model, nnx.Optimizer(model, FOUND[name], wrt=nnx.Param)))

    graph, _ = build(jax.random.key(0))

    def of(value_and_grad: Any) -> Any:
        def step(state: Any, x: jax.Array, y: jax.Array) -> Any:
            model, optimizer = nnx.merge(graph, state)
            loss, grads = value_and_grad(lambda m: library_zoo.cross_entropy(m(x), y))(model)
            optimizer.update(model, grads)
            return nnx.state((model, optimizer)), loss

        return step

    case = dataclasses.replace(
        library_zoo.by_name("nnx_optimizer"), init=lambda key: build(key)[1], step=of
    )
    plan = library_table.planned(case, mode)
    assert (report := plan.verify()), str(report)


def test_a_hyperparameter_that_two_optimizers_keep_is_said_by_its_whole_name() -> None:
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)

    def init() -> Any:
        params = {"critic": jnp.ones(2), "actor": jnp.ones(2)}
        return params, {name: tx.init(leaf) for name, leaf in params.items()}

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((x @ (p["critic"] + p["actor"])) ** 2))(
            params
        )
        new = {n: tx.update(grads[n], state[n], params[n]) for n in params}
        return {n: params[n] + new[n][0] for n in params}, {n: new[n][1] for n in params}, loss

    x = jnp.eye(2)
    job = dtrans.nccl2(dtrans.trace(step, *init(), x), dtrans.trace(init), trainers=2).simulate()
    with pytest.raises(
        ConfigError, match=r"of several optimizers: state/actor/hyperparams/learning_rate, "
    ):
        job.with_hyperparameters(job.init(), learning_rate=0.0)
    name = "state/actor/hyperparams/learning_rate"
    state, _ = job.step(job.with_hyperparameters(job.init(), **{name: 0.0}), x)
    assert job.params(state)["actor"].tolist() == [1.0, 1.0] != job.params(state)["critic"].tolist()


def test_a_step_with_state_behind_its_batch_is_told_where_it_belongs() -> None:
    """The signature is that of Equinox's first page: make_step(model, x, y, opt_state)."""
    tx, model = optax.adam(0.1), {"w": jnp.ones((3, 2))}

    def make_step(model: Any, x: jax.Array, opt_state: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda m: jnp.mean((x @ m["w"]) ** 2))(model)
        updates, opt_state = tx.update(grads, opt_state, model)
        return optax.apply_updates(model, updates), opt_state, loss

    main = dtrans.trace(make_step, model, jnp.ones((4, 3)), tx.init(model))
    said = (
        r"make_step also returns its argument 3 \(opt_state\); the state must be the first "
        r"argument or the first two"
    )
    with pytest.raises(TraceError, match=said):
        dtrans.nccl2(main, dtrans.trace(lambda: (model, tx.init(model))), trainers=2)


def test_a_pipeline_counts_rows_of_the_full_batch() -> None:
    def step(s: Any, x: jax.Array) -> Any:
        of = lambda p: jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"]) ** 2)
        loss, g = dtrans.value_and_grad(of)({n: s[n] for n in "ab"})
        return {"a": s["a"] - g["a"], "b": s["b"] - g["b"], "seen": s["seen"] + len(x)}, loss

    init = lambda: {"a": jnp.eye(4), "b": jnp.eye(4), "seen": jnp.zeros((), int)}
    main, startup = dtrans.trace(step, init(), jnp.ones((4, 4))), dtrans.trace(init)
    with pytest.raises(
        ConfigError,
        match="s/seen .* each micro-batch would count separately; count outside of the step, or "
        "use batch='exact'",
    ):
        dtrans.pipeline(main, startup, num_stages=2, num_micro_batch=2, batch="micro")
    # the remedy in the error
    job = dtrans.pipeline(main, startup, num_stages=2, num_micro_batch=2).simulate()
    state = job.init()
    for rows in (4, 8):
        state, _ = job.step(state, jnp.ones((rows, 4)))
    assert job.gather(state)["seen"] == 12
