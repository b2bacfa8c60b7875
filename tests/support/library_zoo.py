"""Training steps in the style of other libraries' documentation: one state, or several models.

Each case is a step for one device that does not use dtrans. The library's `value_and_grad` computes
its gradients; in a pipeline, `dtrans.value_and_grad` replaces this function. All arrays are in
float64.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training import train_state


Tree = Any
Step = Callable[..., tuple[Any, ...]]

F64 = jnp.float64
FEATURES, HIDDEN, CLASSES = 4, 8, 3
ADAM = optax.adam(1e-2)


@dataclasses.dataclass(frozen=True)
class LibraryCase:
    """Step in the style of a library's documentation.

    Attributes:
      name: name of the case.
      what: description of the step's special property.
      init: key -> state, one pytree or (params, opt_state).
      step: takes a `value_and_grad` and returns the step: (state, *batch) -> (state, ...), or with
        params and opt_state in place of state.
      value_and_grad: the function of the library.
      batch: (number of rows, seed) -> batch.
      one: True if the state is one pytree.
    """

    name: str
    what: str
    init: Callable[[jax.Array], Tree]
    step: Callable[[Callable[..., Any]], Step]
    value_and_grad: Callable[..., Any]
    batch: Callable[..., tuple[Any, ...]]
    one: bool

    def state(self, key: jax.Array) -> tuple[Any, ...]:
        """Return the first arguments of the step."""
        made = self.init(key)
        return (made,) if self.one else tuple(made)


_CASES: list[LibraryCase] = []


def labelled(rows: int, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    x = jax.random.normal(jax.random.key(seed), (rows, FEATURES), F64)
    return x, jnp.arange(rows) % CLASSES


def with_noise(rows: int, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    return labelled(rows, seed)[0], jax.random.normal(jax.random.key(seed + 10), (rows, 2), F64)


def _case(
    init: Any, *, value_and_grad: Any = jax.value_and_grad, batch: Any = labelled, one: bool = True
) -> Callable[[Any], Any]:
    def add(step: Any) -> Any:
        what = " ".join((inspect.getdoc(step) or "").split()).rstrip(".")
        _CASES.append(LibraryCase(step.__name__, what, init, step, value_and_grad, batch, one))
        return step

    return add


def cross_entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def in_float64(tree: Tree) -> Tree:
    """Convert a pytree to float64: Flax stores running statistics in float32."""
    return jax.tree.map(lambda a: a.astype(F64) if a.dtype == jnp.float32 else a, tree)


# -- flax.linen ------------------------------------------------------------------------------------


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Dense(HIDDEN, param_dtype=F64)(x))
        return nn.Dense(CLASSES, param_dtype=F64)(x)


class Convolutional(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(4, (3, 3), param_dtype=F64)(x))
        x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        return nn.Dense(CLASSES, param_dtype=F64)(x.reshape(len(x), -1))


class Normalised(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Dense(HIDDEN, use_bias=False, param_dtype=F64)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, param_dtype=F64)(x))
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(CLASSES, param_dtype=F64)(x)


class StateWithStatistics(train_state.TrainState):
    batch_stats: Any
    key: jax.Array


def _train_state(
    module: nn.Module, shape: tuple[int, ...]
) -> Callable[[jax.Array], train_state.TrainState]:
    def init(key: jax.Array) -> train_state.TrainState:
        params = module.init(key, jnp.ones((1, *shape)))["params"]
        return train_state.TrainState.create(apply_fn=module.apply, params=params, tx=ADAM)

    return init


@_case(_train_state(Classifier(), (FEATURES,)))
def flax_train_state(value_and_grad: Any) -> Step:
    """Flax's `TrainState`, whose count of steps begins as a Python integer."""

    def step(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
        loss, grads = value_and_grad(lambda p: cross_entropy(state.apply_fn({"params": p}, x), y))(
            state.params
        )
        return state.apply_gradients(grads=grads), loss

    return step


def images(rows: int, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    return jax.random.normal(jax.random.key(seed), (rows, 4, 4, 1), F64), jnp.arange(rows) % CLASSES


@_case(_train_state(Convolutional(), (4, 4, 1)), batch=images)
def flax_mnist(value_and_grad: Any) -> Step:
    """A convolutional classifier of images with a `TrainState`; loss and accuracy in a dict."""

    def step(state: Any, image: jax.Array, label: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        def loss_fn(params: Tree) -> tuple[jax.Array, jax.Array]:
            logits = state.apply_fn({"params": params}, image)
            return cross_entropy(logits, label), logits

        (loss, logits), grads = value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), {
            "loss": loss,
            "accuracy": (logits.argmax(-1) == label).mean(),
        }

    return step


def _with_statistics(key: jax.Array) -> StateWithStatistics:
    module = Normalised()
    found = in_float64(module.init(key, jnp.ones((1, FEATURES)), train=False))
    stats = found["batch_stats"]
    return StateWithStatistics.create(
        apply_fn=module.apply, params=found["params"], batch_stats=stats, key=key, tx=ADAM
    )


@_case(_with_statistics)
def flax_batch_norm_dropout(value_and_grad: Any) -> Step:
    """A `TrainState` with running statistics, and a key that is folded with the count of steps for
    dropout."""

    def step(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
        key = jax.random.fold_in(state.key, state.step)

        def loss_fn(params: Tree) -> tuple[jax.Array, Tree]:
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, new = state.apply_fn(
                variables, x, train=True, mutable=["batch_stats"], rngs={"dropout": key}
            )
            return cross_entropy(logits, y), new

        (loss, new), grads = value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads).replace(batch_stats=new["batch_stats"]), loss

    return step


# -- nnx and Equinox -------------------------------------------------------------------------------


class Perceptron(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(FEATURES, HIDDEN, rngs=rngs, param_dtype=F64)
        self.last = nnx.Linear(HIDDEN, CLASSES, rngs=rngs, param_dtype=F64)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(nnx.relu(self.first(x)))


def _nnx(key: jax.Array) -> tuple[Any, Any]:
    model = Perceptron(nnx.Rngs(key))
    graph, state = nnx.split((model, nnx.Optimizer(model, ADAM, wrt=nnx.Param)))
    return graph, state


@_case(lambda key: _nnx(key)[1], value_and_grad=nnx.value_and_grad)
def nnx_optimizer(value_and_grad: Any) -> Step:
    """A model and an optimizer of nnx, split into a graph and one state."""
    graph, _ = _nnx(jax.random.key(0))

    def step(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
        model, optimizer = nnx.merge(graph, state)
        loss, grads = value_and_grad(lambda model: cross_entropy(model(x), y))(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    return step


def _perceptron(key: jax.Array) -> Any:
    return eqx.nn.MLP(FEATURES, CLASSES, HIDDEN, 2, key=key)


def _with_adam(key: jax.Array) -> tuple[Any, Any]:
    model = _perceptron(key)
    return model, ADAM.init(eqx.filter(model, eqx.is_inexact_array))


def _eqx_step(value_and_grad: Any) -> Step:
    def step(model: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = value_and_grad(lambda m: cross_entropy(jax.vmap(m)(x), y))(model)
        updates, opt_state = ADAM.update(grads, opt_state, model)
        return eqx.apply_updates(model, updates), opt_state, loss

    return step


@_case(_with_adam, value_and_grad=eqx.filter_value_and_grad, one=False)
def equinox_mlp(value_and_grad: Any) -> Step:
    """An Equinox model, some of whose leaves are functions, with its optimizer's state."""
    return _eqx_step(value_and_grad)


class Attention(eqx.Module):
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    embed: jax.Array
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        k = jax.random.split(key, 3)
        self.norm = eqx.nn.LayerNorm(HIDDEN)
        self.attention = eqx.nn.MultiheadAttention(2, HIDDEN, key=k[0])
        self.embed = jax.random.normal(k[1], (CLASSES, HIDDEN)) / 3
        self.head = eqx.nn.Linear(HIDDEN, CLASSES, key=k[2])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        h = self.embed[tokens]
        q = jax.vmap(self.norm)(h)
        h = h + self.attention(q, q, q, mask=jnp.tril(jnp.ones((len(tokens), len(tokens)), bool)))
        return jax.vmap(self.head)(h)


def tokens(rows: int, seed: int = 0) -> tuple[jax.Array]:
    return (jax.random.randint(jax.random.key(seed), (rows, 6), 0, CLASSES),)


def _attention(key: jax.Array) -> dict[str, Any]:
    model = Attention(key)
    return {"model": model, "opt": ADAM.init(eqx.filter(model, eqx.is_inexact_array))}


@_case(_attention, value_and_grad=eqx.filter_value_and_grad, batch=tokens)
def equinox_transformer(value_and_grad: Any) -> Step:
    """A causal transformer of Equinox and its optimizer, in one dict."""

    def step(state: dict[str, Any], text: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        loss, grads = value_and_grad(
            lambda m: cross_entropy(jax.vmap(m)(text[:, :-1]), text[:, 1:])
        )(state["model"])
        updates, opt = ADAM.update(grads, state["opt"], state["model"])
        return {"model": eqx.apply_updates(state["model"], updates), "opt": opt}, loss

    return step


# -- by hand ---------------------------------------------------------------------------------------


def _linear(key: jax.Array) -> dict[str, jax.Array]:
    return {"w": jax.random.normal(key, (FEATURES, CLASSES)), "b": jnp.zeros(CLASSES)}


def _logits(p: Tree, x: jax.Array) -> jax.Array:
    return x @ p["w"] + p["b"]


@_case(_linear)
def without_optimizer(value_and_grad: Any) -> Step:
    """Gradient descent by hand, as in JAX's quickstart: no optimizer state."""

    def step(params: Tree, x: jax.Array, y: jax.Array) -> tuple[Tree, jax.Array]:
        loss, grads = value_and_grad(lambda p: cross_entropy(_logits(p, x), y))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


INJECTED = optax.inject_hyperparams(optax.adam)(learning_rate=1e-2)


@_case(lambda key: {"params": (p := _linear(key)), "opt": INJECTED.init(p)})
def injected_rate(value_and_grad: Any) -> Step:
    """A learning rate in the optimizer's state (`optax.inject_hyperparams`)."""

    def step(state: Tree, x: jax.Array, y: jax.Array) -> tuple[Tree, jax.Array]:
        loss, grads = value_and_grad(lambda p: cross_entropy(_logits(p, x), y))(state["params"])
        updates, opt = INJECTED.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return step


@_case(lambda key: {"student": (p := _linear(key)), "teacher": jax.tree.map(jnp.copy, p)})
def mean_teacher(value_and_grad: Any) -> Step:
    """A teacher that follows the student, and that the loss reads."""

    def step(state: Tree, x: jax.Array, y: jax.Array) -> tuple[Tree, jax.Array]:
        def loss_fn(p: Tree) -> jax.Array:
            return (
                cross_entropy(_logits(p, x), y)
                + ((_logits(p, x) - _logits(state["teacher"], x)) ** 2).mean()
            )

        loss, grads = value_and_grad(loss_fn)(state["student"])
        student = jax.tree.map(lambda p, g: p - 0.1 * g, state["student"], grads)
        return {
            "student": student,
            "teacher": optax.incremental_update(student, state["teacher"], 0.1),
        }, loss

    return step


def _low_rank(key: jax.Array) -> Tree:
    lora = {
        "a": jax.random.normal(jax.random.fold_in(key, 1), (FEATURES, 2)),
        "b": jnp.zeros((2, CLASSES)),
    }
    return {"base": _linear(key), "lora": lora, "opt": ADAM.init(lora)}


@_case(_low_rank)
def lora(value_and_grad: Any) -> Step:
    """Low-rank adapters, with frozen weights."""

    def step(state: Tree, x: jax.Array, y: jax.Array) -> tuple[Tree, jax.Array]:
        base = state["base"]

        def loss_fn(p: Tree) -> jax.Array:
            return cross_entropy(_logits({"w": base["w"] + p["a"] @ p["b"], "b": base["b"]}, x), y)

        loss, grads = value_and_grad(loss_fn)(state["lora"])
        updates, opt = ADAM.update(grads, state["opt"], state["lora"])
        return {**state, "lora": optax.apply_updates(state["lora"], updates), "opt": opt}, loss

    return step


@_case(lambda key: {"w": (w := _linear(key)["w"]), "m": jnp.zeros_like(w)})
def sharpness_aware(value_and_grad: Any) -> Step:
    """Sharpness-aware minimisation: a gradient at parameters that another gradient has changed."""

    def step(state: Tree, x: jax.Array, y: jax.Array) -> tuple[Tree, jax.Array]:
        loss_fn = lambda w: cross_entropy(x @ w, y)
        ahead = jax.grad(loss_fn)(state["w"])
        loss, g = value_and_grad(loss_fn)(state["w"] + 0.05 * ahead / jnp.linalg.norm(ahead))
        m = 0.9 * state["m"] + g
        return {"w": state["w"] - 0.1 * m, "m": m}, loss

    return step


@_case(lambda key: {"params": (p := _linear(key)), "opt": ADAM.init(p)})
def meta_gradient(value_and_grad: Any) -> Step:
    """MAML: the gradient of a loss after a step of gradient descent."""

    def step(state: Tree, x: jax.Array, y: jax.Array) -> tuple[Tree, jax.Array]:
        def after_a_step(p: Tree) -> jax.Array:
            inner = jax.grad(lambda p: cross_entropy(_logits(p, x), y))(p)
            return cross_entropy(_logits(jax.tree.map(lambda p, g: p - 0.1 * g, p, inner), x), y)

        loss, grads = value_and_grad(after_a_step)(state["params"])
        updates, opt = ADAM.update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return step


# -- several models --------------------------------------------------------------------------------


def _net(key: jax.Array, inputs: int, outputs: int) -> Tree:
    one, two = jax.random.split(key)
    return {
        "w1": jax.random.normal(one, (inputs, HIDDEN)) / 2,
        "b1": jnp.zeros(HIDDEN),
        "w2": jax.random.normal(two, (HIDDEN, outputs)) / 3,
    }


def _apply(p: Tree, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"]


def _judged(logits: jax.Array, real: float) -> jax.Array:
    return optax.sigmoid_binary_cross_entropy(logits[:, 0], jnp.full(len(logits), real)).mean()


def _adversaries(key: jax.Array) -> Tree:
    g, d = _net(key, 2, FEATURES), _net(jax.random.fold_in(key, 1), FEATURES, 1)
    return {"g": g, "d": d, "opt_g": ADAM.init(g), "opt_d": ADAM.init(d)}


def _gan(value_and_grad: Any, *, in_order: bool) -> Step:
    def step(s: Tree, x: jax.Array, z: jax.Array) -> tuple[Tree, dict[str, jax.Array]]:
        def d_loss(d: Tree) -> jax.Array:
            return _judged(_apply(d, x), 1.0) + _judged(_apply(d, _apply(s["g"], z)), 0.0)

        loss_d, grads = value_and_grad(d_loss)(s["d"])
        updates, opt_d = ADAM.update(grads, s["opt_d"])
        d = optax.apply_updates(s["d"], updates)
        judge = d if in_order else s["d"]
        loss_g, grads = value_and_grad(lambda g: _judged(_apply(judge, _apply(g, z)), 1.0))(s["g"])
        updates, opt_g = ADAM.update(grads, s["opt_g"])
        g = optax.apply_updates(s["g"], updates)
        return {"g": g, "d": d, "opt_g": opt_g, "opt_d": opt_d}, {"d": loss_d, "g": loss_g}

    return step


@_case(_adversaries, batch=with_noise)
def gan(value_and_grad: Any) -> Step:
    """Generator and discriminator, each with its loss and optimizer, updated from the same
    parameters."""
    return _gan(value_and_grad, in_order=False)


@_case(_adversaries, batch=with_noise)
def gan_in_order(value_and_grad: Any) -> Step:
    """The discriminator is updated first; then the generator, with the new discriminator."""
    return _gan(value_and_grad, in_order=True)


def _agents(key: jax.Array) -> Tree:
    actor, critic = _net(key, FEATURES, 2), _net(jax.random.fold_in(key, 1), FEATURES + 2, 1)
    return {
        "actor": actor,
        "critic": critic,
        "actor_target": jax.tree.map(jnp.copy, actor),
        "critic_target": jax.tree.map(jnp.copy, critic),
        "opt_actor": ADAM.init(actor),
        "opt_critic": ADAM.init(critic),
    }


def transitions(rows: int, seed: int = 0) -> tuple[jax.Array, ...]:
    k = jax.random.split(jax.random.key(seed), 4)
    shapes = ((rows, FEATURES), (rows, 2), (rows,), (rows, FEATURES))
    return tuple(jax.random.normal(key, shape, F64) for key, shape in zip(k, shapes, strict=True))


@_case(_agents, batch=transitions)
def actor_critic(value_and_grad: Any) -> Step:
    """DDPG: update a critic, then an actor with the new critic, then targets that follow both."""

    def step(
        s: Tree, seen: jax.Array, act: jax.Array, reward: jax.Array, then: jax.Array
    ) -> tuple[Tree, Any]:
        value = lambda critic, o, a: _apply(critic, jnp.concatenate([o, a], -1))[:, 0]
        goal = reward + 0.9 * value(
            s["critic_target"], then, jnp.tanh(_apply(s["actor_target"], then))
        )
        loss_c, grads = value_and_grad(lambda c: ((value(c, seen, act) - goal) ** 2).mean())(
            s["critic"]
        )
        updates, opt_critic = ADAM.update(grads, s["opt_critic"])
        critic = optax.apply_updates(s["critic"], updates)
        loss_a, grads = value_and_grad(
            lambda a: -value(critic, seen, jnp.tanh(_apply(a, seen))).mean()
        )(s["actor"])
        updates, opt_actor = ADAM.update(grads, s["opt_actor"])
        actor = optax.apply_updates(s["actor"], updates)
        follow = lambda target, new: optax.incremental_update(new, target, 0.05)
        new = {
            "actor": actor,
            "critic": critic,
            "actor_target": follow(s["actor_target"], actor),
            "critic_target": follow(s["critic_target"], critic),
            "opt_actor": opt_actor,
            "opt_critic": opt_critic,
        }
        return new, {"critic": loss_c, "actor": loss_a}

    return step


CASES = tuple(_CASES)


def by_name(name: str) -> LibraryCase:
    return next(c for c in CASES if c.name == name)
