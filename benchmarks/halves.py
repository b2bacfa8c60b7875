"""Models in two halves, and four implementations of their training step.

    ours      `dtrans.pipeline(main, startup, num_stages=2, num_micro_batch=8).on_mesh()`
    plain     the jitted step of the full batch on one device
    by hand   a loop in Python with the schedule 1F1B: forward and `jax.vjp` of each half are jitted, and
              `jax.device_put` moves arrays between the devices
    fused     `by hand`, but forward and backward of the second half are one jitted function

All implementations donate their state, and must compute the same losses. In the loops, each array
of the batch is already on the device that reads it; `ours` gets the batch on the first device.
`ours` gets the model as one function, and the planner finds the boundary between the halves.

All virtual CPU devices use the same cores, so a second device adds no speed. A ratio of times
compares only the work of two steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from models import Model, programs, training, tx

import dtrans
from dtrans.run.pipeline_parallel.job import PipelineJob


STAGES, MICRO = 2, 8


# -- models, as two halves -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A model in two halves.

    Attributes:
      params: function that maps a key to the parameters {"first": ..., "second": ...}.
      first: function (parameters of the first half, inputs) -> activations.
      second: function (parameters of the second half, shared parameters, activations, targets) ->
        loss.
      shared: names of the parameters of the first half that the second half also reads.
      batch: (inputs, targets).
    """

    params: Callable[[jax.Array], Any]
    first: Callable[[Any, jax.Array], jax.Array]
    second: Callable[[Any, Any, jax.Array, jax.Array], jax.Array]
    batch: tuple[jax.Array, jax.Array]
    shared: tuple[str, ...] = ()

    @property
    def model(self) -> Model:
        """The model with one loss function, for `ours` and `plain`."""

        def loss_fn(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
            first, second = params["first"], params["second"]
            return self.second(
                second, {n: first[n] for n in self.shared}, self.first(first, inputs), targets
            )

        return Model(loss_fn, self.params, self.batch)


def matrices(key: jax.Array, shapes: Sequence[tuple[int, int]]) -> list[jax.Array]:
    """Return random matrices with these shapes."""
    keys = jax.random.split(key, len(shapes))
    return [jax.random.normal(k, s) / s[0] ** 0.5 for k, s in zip(keys, shapes, strict=True)]


def mlp_case(width: int, layers: int, rows: int) -> Case:
    """Return an MLP of equal layers, with the squared error as loss."""

    def through(weights: Any, x: jax.Array) -> jax.Array:
        for w in weights:
            x = jnp.tanh(x @ w)
        return x

    def params(key: jax.Array) -> Any:
        made = matrices(key, [(width, width)] * layers)
        return {"first": made[: layers // 2], "second": made[layers // 2 :]}

    x = jax.random.normal(jax.random.key(1), (2, rows, width))
    return Case(
        params, through, lambda p, _, h, y: jnp.mean((through(p, h) - y) ** 2), (x[0], x[1])
    )


def transformer_case(
    vocabulary: int, width: int, blocks: int, length: int, rows: int, heads: int = 4
) -> Case:
    """Return a decoder-only language model whose last layer uses the embedding matrix again."""

    def norm(x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)

    def block(p: Any, x: jax.Array) -> jax.Array:
        q, k, v = jnp.moveaxis((norm(x) @ p["qkv"]).reshape(*x.shape[:2], 3, heads, -1), 2, 0)
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["out"]
        return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]

    def through(blocks: Any, x: jax.Array) -> jax.Array:
        for p in blocks:
            x = block(p, x)
        return x

    def params(key: jax.Array) -> Any:
        shapes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
        first, *rest = jax.random.split(key, blocks + 1)
        made = [
            dict(zip(("qkv", "out", "up", "down"), matrices(k, shapes), strict=True)) for k in rest
        ]
        embedding = 0.02 * jax.random.normal(first, (vocabulary, width))
        return {
            "first": {"embedding": embedding, "blocks": made[: blocks // 2]},
            "second": made[blocks // 2 :],
        }

    def second(p: Any, shared: Any, h: jax.Array, targets: jax.Array) -> jax.Array:
        logits = norm(through(p, h)) @ shared["embedding"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    tokens = jax.random.randint(jax.random.key(1), (rows, length + 1), 0, vocabulary)
    first = lambda p, x: through(p["blocks"], p["embedding"][x])
    return Case(params, first, second, (tokens[:, :-1], tokens[:, 1:]), ("embedding",))


CASES = {
    "MLP, 8 of 512 x 512": lambda: mlp_case(512, 8, 1024),
    "transformer, 4 blocks of 128": lambda: transformer_case(256, 128, 4, 64, 32),
}
NOTHING = "MLP, 4 of 8 x 8"  # a model with almost no computation
TINY = {NOTHING: lambda: mlp_case(8, 4, 32)}


# -- implementations of a step ---------------------------------------------------------------------


Runner = Callable[[], tuple[Any, jax.Array]]
"""Function that trains one step; it returns the new state and the loss."""


def planned(case: Case, **options: Any) -> dtrans.PipelinePlan:
    """Return the plan of a model; by default 1F1B with two stages and eight micro-batches."""
    return dtrans.pipeline(
        *programs(*training(case.model)),
        **{"num_stages": STAGES, "num_micro_batch": MICRO, **options},
    )


def ours(case: Case, job: PipelineJob | None = None, **options: Any) -> Runner:
    """Return the step of dtrans."""
    job = job or planned(case, **options).on_mesh()
    box = [job.init(jax.random.key(0))]

    def run() -> tuple[Any, jax.Array]:
        box[0], loss = job.step(box[0], *case.batch)
        return box[0], loss

    return run


def plain(case: Case) -> Runner:
    """Return the step on one device."""
    step, init, batch = training(case.model)
    jitted = jax.jit(step, donate_argnums=(0, 1))
    box = [*init(jax.random.key(0))]

    def run() -> tuple[Any, jax.Array]:
        *box[:], loss = jitted(*box, *batch)
        return box, loss

    return run


def by_hand(case: Case, *, fused: bool = False, micro: int = MICRO) -> Runner:
    """Return a loop over micro-batches on two devices, with the schedule 1F1B."""
    one, two = jax.devices()[:2]
    params = case.params(jax.random.key(0))
    p = [jax.device_put(params["first"], one), jax.device_put(params["second"], two)]
    state = [jax.device_put(tx.init(x), d) for x, d in zip(p, (one, two), strict=True)]
    split = lambda x, d: jax.device_put(x.reshape(micro, -1, *x.shape[1:]), d)
    inputs, targets = split(case.batch[0], one), split(case.batch[1], two)
    numbers = [[jax.device_put(np.int32(m), d) for m in range(micro)] for d in (one, two)]
    add = lambda sums, grads: jax.tree.map(jnp.add, sums, grads)
    zeros = jax.jit(lambda tree: jax.tree.map(jnp.zeros_like, tree))

    @jax.jit
    def forward_one(p: Any, x: jax.Array, m: jax.Array) -> Any:
        return jax.vjp(lambda p: case.first(p, x[m]), p)

    @jax.jit
    def forward_two(p: Any, shared: Any, h: jax.Array, y: jax.Array, m: jax.Array) -> Any:
        return jax.vjp(lambda p, shared, h: case.second(p, shared, h, y[m]), p, shared, h)

    def backward_one(pull: Any, dh: jax.Array, sums: Any) -> Any:
        return add(sums, pull(dh)[0])

    def backward_two(pull: Any, sums: Any) -> Any:
        *grads, dh = pull(jnp.ones(()))
        return add(sums, tuple(grads)), dh

    def both_two(p: Any, shared: Any, h: jax.Array, y: jax.Array, m: jax.Array, sums: Any) -> Any:
        loss, pull = jax.vjp(lambda p, shared, h: case.second(p, shared, h, y[m]), p, shared, h)
        return loss, *backward_two(pull, sums)

    def update(p: Any, state: Any, sums: Any) -> Any:
        updates, state = tx.update(jax.tree.map(lambda g: g / micro, sums), state, p)
        return optax.apply_updates(p, updates), state

    backward_one, backward_two = (
        jax.jit(backward_one, donate_argnums=2),
        jax.jit(backward_two, donate_argnums=1),
    )
    both_two, update = jax.jit(both_two, donate_argnums=5), jax.jit(update, donate_argnums=(0, 1))
    mean = jax.jit(lambda losses: jnp.mean(jnp.stack(losses)))

    def run() -> tuple[Any, jax.Array]:
        shared = {n: jax.device_put(p[0][n], two) for n in case.shared}
        sums, sums_two = zeros(p[0]), zeros((p[1], shared))
        losses, pulls, sent = [], {}, {}

        def forward(m: int) -> None:
            h, pulls[m] = forward_one(p[0], inputs, numbers[0][m])
            sent[m] = jax.device_put(h, two)

        forward(0)
        for m in range(micro):
            if m + 1 < micro:
                forward(m + 1)
            given = p[1], shared, sent.pop(m), targets, numbers[1][m]
            if fused:
                loss, sums_two, dh = both_two(*given, sums_two)
            else:
                loss, pull = forward_two(*given)
                sums_two, dh = backward_two(pull, sums_two)
                del pull
            losses.append(loss)
            sums = backward_one(pulls.pop(m), jax.device_put(dh, one), sums)
        sums_two, back = sums_two
        for n in case.shared:
            sums[n] = sums[n] + jax.device_put(back[n], one)
        p[0], state[0] = update(p[0], state[0], sums)
        p[1], state[1] = update(p[1], state[1], sums_two)
        return (p, state), mean(losses)

    return run


PEERS: dict[str, Callable[[Case], Runner]] = {
    "plain": plain,
    "by hand": by_hand,
    "fused": lambda case: by_hand(case, fused=True),
}


def agreeing(*runs: Runner) -> Sequence[Runner]:
    """Run three steps of each, check that the losses agree, and return the arguments.

    The losses of later steps agree only if the gradients also agree.
    """
    losses = [[float(run()[1]) for _ in range(3)] for run in runs]
    for values in losses[1:]:
        np.testing.assert_allclose(values, losses[0], rtol=1e-4)
    return runs
