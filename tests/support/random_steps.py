"""Random training steps: a forward pass, a gradient, an optimizer, and updates that read values.

The forward pass is a list of random instructions. An instruction takes its operands by number,
modulo the number of values of a kind. So every list of instructions is a step, and a failure
shrinks to a short list. `draw_steps()` is the hypothesis strategy that draws a `RandomStep`.

    rows     (B, D)    vector   (B,)     pairs   (B, B)
    columns  (D,)      matrix   (D, D)   scalar  ()
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import strategies as st
from jax import lax
from jaxpr_edits import Edits, run_with_edits, without_dead_equations

import dtrans
from dtrans._jax import equations, evaluate, opened


WIDTH, LAYERS, CLASSES = 4, 3, 7
SHAPES: dict[str, tuple[int, ...]] = {
    "w": (WIDTH, WIDTH),
    "bias": (WIDTH,),
    "scale": (),
    "layers": (LAYERS, WIDTH, WIDTH),
    "table": (CLASSES, WIDTH),
}
KINDS = ("rows", "vector", "pairs", "columns", "matrix", "scalar")
Instruction = tuple[str, int, int, int]


def make_batch(rows: int) -> tuple[Any, ...]:
    """Return the types of a batch: inputs, targets, labels, a mask of 0 and 1, and a weight of each
    row.
    """
    real = jnp.result_type(float)
    matrix, vector = jax.ShapeDtypeStruct((rows, WIDTH), real), jax.ShapeDtypeStruct((rows,), real)
    labels = jax.ShapeDtypeStruct((rows,), jnp.int32)
    return matrix, matrix, labels, jax.ShapeDtypeStruct((rows,), bool), vector


def make_params(leaves: tuple[str, ...]) -> dict[str, jax.Array]:
    """Return parameters."""
    rng = np.random.default_rng(0)
    drawn = {name: rng.normal(size=shape) / 2 for name, shape in SHAPES.items()}
    return {name: jnp.asarray(drawn[name]) for name in sorted({"w", *leaves})}


# -- forward ---------------------------------------------------------------------------------------


class Writer:
    """Pools of values by kind, and the instructions that add values to these pools.

    Attributes:
      params: parameters of the step.
      batch: arrays of `make_batch`.
      pools: the values of each kind, the newest value last.
    """

    def __init__(self, params: dict[str, jax.Array], batch: tuple[jax.Array, ...]) -> None:
        self.params = params
        x, y, self.labels, self.mask, weights = batch
        self.pools: dict[str, list[jax.Array]] = {
            "rows": [y, x, x @ params["w"]],
            "vector": [weights],
            "pairs": [],
            "columns": [params["bias"]] if "bias" in params else [],
            "matrix": [params["w"]],
            "scalar": [params.get("scale", jnp.asarray(0.5, x.dtype))],
        }

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self.labels)

    def pick(self, kind: str, number: int) -> jax.Array:
        """Return a value of a kind; 0 is the newest."""
        pool = self.pools[kind]
        if not pool and kind == "columns":
            pool.append(self.pools["rows"][0][0])
        elif not pool:
            pool.append(self.pick("rows", number) @ self.pick("rows", number + 1).T / WIDTH)
        return pool[-1 - number % len(pool)]

    def run(self, instruction: Instruction) -> None:
        """Run an instruction, and add its result to the pools."""
        name, i, j, k = instruction
        kind, value = OPERATIONS[name](self, i, j, k)
        self.pools[kind].append(value)


Operation = Callable[[Writer, int, int, int], tuple[str, jax.Array]]
OPERATIONS: dict[str, Operation] = {}


def operation(fn: Operation) -> Operation:
    """Add a function to the operations, under its name."""
    OPERATIONS[fn.__name__] = fn
    return fn


UNARY: list[Callable[[jax.Array], jax.Array]] = [
    jnp.tanh,
    lambda x: 0.5 * x + 0.25,
    jax.nn.relu,
    lambda x: x * x,
    jnp.sin,
    lambda x: -x,
    jax.nn.sigmoid,
    jnp.abs,
    lax.stop_gradient,
    lambda x: jnp.where(x > 0.1, x, 0.3 * x),
    lambda x: jnp.exp(jnp.tanh(x)),
    lambda x: jnp.sqrt(1 + x * x),
    lambda x: jnp.log1p(x * x),
    lambda x: x / (1 + x * x),
    lambda x: jnp.clip(x, -0.7, 0.7),
    lambda x: x.astype(jnp.bfloat16).astype(x.dtype),
    lambda x: jax.checkpoint(lambda z: jnp.sin(z) * z)(x),
    lambda x: jax.jit(lambda z: z * 1.5)(x),
]


@operation
def apply(w: Writer, i: int, j: int, k: int) -> tuple[str, jax.Array]:
    """Return an elementwise function of one value."""
    kind = KINDS[j % len(KINDS)]
    return kind, UNARY[k % len(UNARY)](w.pick(kind, i))


BINARY: list[Callable[[jax.Array, jax.Array], jax.Array]] = [
    jnp.add,
    jnp.multiply,
    jnp.subtract,
    lambda x, y: x / (1 + y * y),
    jnp.maximum,
    jnp.minimum,
    lambda x, y: jnp.where(x > y, x, 0.5 * y),
]


@operation
def combine(w: Writer, i: int, j: int, k: int) -> tuple[str, jax.Array]:
    """Combine two values; the second is broadcast to the first."""
    first = ("rows", "rows", "rows", "rows", "vector", "vector", "columns", "matrix", "pairs")[
        k % 9
    ]
    second = (
        "rows",
        "vector",
        "columns",
        "scalar",
        "vector",
        "scalar",
        "columns",
        "columns",
        "vector",
    )[k % 9]
    x, y = w.pick(first, i), w.pick(second, j)
    if second == "vector" and x.ndim == 2:
        y = y[:, None]
    return first, BINARY[k // 9 % len(BINARY)](x, y)


REDUCED: list[Callable[..., jax.Array]] = [
    jnp.mean,
    jnp.sum,
    jnp.max,
    jnp.var,
    jnp.min,
    jax.nn.logsumexp,
    lambda x, axis: jnp.sum(x > 0.2, axis).astype(x.dtype),
    lambda x, axis: jnp.sqrt(jnp.sum(x * x, axis) + 0.1),
    lambda x, axis: jnp.mean(x, axis) ** 2,
    lambda x, axis: jnp.median(x, axis),
]
# (kind of the operand, reduced axes, kind of the result)
REDUCTIONS: list[tuple[str, tuple[int, ...], str]] = [
    ("rows", (0,), "columns"),
    ("rows", (1,), "vector"),
    ("rows", (0, 1), "scalar"),
    ("vector", (0,), "scalar"),
    ("columns", (0,), "scalar"),
    ("matrix", (0,), "columns"),
    ("matrix", (0, 1), "scalar"),
    ("pairs", (1,), "vector"),
    ("pairs", (0,), "vector"),
]


@operation
def reduce(w: Writer, i: int, j: int, k: int) -> tuple[str, jax.Array]:
    """Return a statistic over some axes."""
    kind, axes, left = REDUCTIONS[j % len(REDUCTIONS)]
    return left, REDUCED[k % len(REDUCED)](w.pick(kind, i), axis=axes)


@operation
def multiply(w: Writer, i: int, j: int, k: int) -> tuple[str, jax.Array]:
    """Return a product of matrices and vectors."""
    rows, other = w.pick("rows", i), w.pick("rows", j)
    products: list[tuple[str, Callable[[], jax.Array]]] = [
        ("rows", lambda: rows @ w.pick("matrix", j)),
        ("vector", lambda: rows @ w.pick("columns", j)),
        ("matrix", lambda: rows.T @ other / w.count),
        ("pairs", lambda: rows @ other.T),
        ("rows", lambda: w.pick("pairs", j) @ rows / w.count),
        ("columns", lambda: w.pick("vector", j) @ rows),
        ("vector", lambda: jnp.einsum("bi,ij,bj->b", rows, w.pick("matrix", j), other)),
        ("scalar", lambda: jnp.vdot(w.pick("vector", i), w.pick("vector", j + 1))),
        ("matrix", lambda: w.pick("matrix", i) @ w.pick("matrix", j).T),
        ("vector", lambda: jax.vmap(jnp.dot)(rows, other)),
    ]
    kind, product = products[k % len(products)]
    return kind, product()


@operation
def mask(w: Writer, i: int, j: int, k: int) -> tuple[str, jax.Array]:
    """Return the rows that a mask, labels or weights select."""
    rows, vector = w.pick("rows", i), w.pick("vector", j)
    kept = [w.mask, w.labels > 1, vector > 0.3][j % 3]
    some = kept.astype(rows.dtype)
    number = jnp.maximum(some.sum(), 1)
    masks: list[tuple[str, Callable[[], jax.Array]]] = [
        ("columns", lambda: (rows * some[:, None]).sum(0) / number),
        ("rows", lambda: jnp.where(kept[:, None], rows, 0.25)),
        ("scalar", lambda: (vector * some).sum() / number),
        ("scalar", lambda: number / w.count),
        ("columns", lambda: jnp.max(jnp.where(kept[:, None], rows, -1e3), 0)),
        ("vector", lambda: vector * some / number),
        ("scalar", lambda: jnp.mean(rows, where=kept[:, None])),
        ("scalar", lambda: lax.cond(jnp.all(kept), lambda: rows.sum(), lambda: rows.mean())),
        ("scalar", lambda: jnp.any(kept & (vector > 0)).astype(rows.dtype)),
    ]
    kind, value = masks[k % len(masks)]
    return kind, value()


@operation
def normalise(w: Writer, i: int, j: int, k: int) -> tuple[str, jax.Array]:
    """Subtract a statistic from rows, and divide by another statistic."""
    rows, vector = w.pick("rows", i), w.pick("vector", j)
    still = lax.stop_gradient
    norms: list[tuple[str, Callable[[], jax.Array]]] = [
        ("rows", lambda: (rows - rows.mean(0)) / jnp.sqrt(rows.var(0) + 0.1)),
        ("rows", lambda: jax.nn.standardize(rows, axis=-1, epsilon=0.1)),
        ("rows", lambda: jax.nn.softmax(rows, axis=-1)),
        ("rows", lambda: jax.nn.softmax(rows, axis=0)),
        ("vector", lambda: vector / (0.1 + jnp.abs(vector).sum())),
        ("rows", lambda: rows - still(rows.mean(0))),
        ("vector", lambda: (vector - still(vector.mean())) / (0.5 + still(vector.var()))),
        ("pairs", lambda: jax.nn.softmax(w.pick("pairs", i), axis=-1)),
        ("rows", lambda: rows / jnp.sqrt(1 + (rows**2).sum(-1, keepdims=True))),
        ("rows", lambda: rows * lax.rsqrt(1 + jnp.mean(rows**2))),
    ]
    kind, value = norms[k % len(norms)]
    return kind, value()


@operation
def move(w: Writer, i: int, j: int, k: int) -> tuple[str, jax.Array]:
    """Return rows in other places: gathers, scatters, sorts, shifts, reshapes."""
    rows, vector, count = w.pick("rows", i), w.pick("vector", j), w.count
    table = w.params.get("table", jnp.tile(w.params["w"], (2, 1))[:CLASSES])
    labels = w.labels % CLASSES
    moves: list[tuple[str, Callable[[], jax.Array]]] = [
        ("rows", lambda: rows + table[labels]),
        ("rows", lambda: jnp.flip(rows, 0)),
        ("rows", lambda: jnp.roll(rows, 1 + j, 0)),
        ("rows", lambda: jnp.roll(rows, 1, 1)),
        ("columns", lambda: rows[j % count]),
        ("columns", lambda: rows[-1]),
        ("vector", lambda: rows[:, j % WIDTH]),
        ("vector", lambda: jnp.take_along_axis(rows, labels[:, None] % WIDTH, 1)[:, 0]),
        ("rows", lambda: jax.ops.segment_sum(rows, labels, CLASSES)[labels]),
        ("vector", lambda: vector / jnp.maximum(jnp.bincount(labels, length=CLASSES), 1)[labels]),
        ("vector", lambda: jnp.sort(vector)),
        ("vector", lambda: jnp.cumsum(vector) / count),
        ("rows", lambda: rows.at[labels % count].add(0.5)),
        ("rows", lambda: jnp.concatenate([rows[:, 1:], vector[:, None]], 1)),
        ("rows", lambda: jnp.pad(rows[:, :3], ((0, 0), (1, 0)))),
        ("rows", lambda: jnp.swapaxes(rows.reshape(count, 2, 2), 1, 2).reshape(count, WIDTH)),
        ("rows", lambda: rows.reshape(count * 2, 2).cumsum(1).reshape(count, WIDTH)),
        ("columns", lambda: jnp.resize(lax.top_k(vector, min(WIDTH, count))[0], WIDTH)),
        ("rows", lambda: rows[jnp.argsort(vector)]),
        ("rows", lambda: rows * (1 + jnp.arange(count)[:, None] % 3)),
        ("scalar", lambda: jnp.argmax(vector) / count),
        ("rows", lambda: rows * jax.nn.one_hot(labels % WIDTH, WIDTH)),
        ("rows", lambda: jnp.zeros_like(rows).at[jnp.arange(count), labels % WIDTH].set(vector)),
        ("rows", lambda: jnp.diff(rows, axis=0, append=rows[:1])),
    ]
    kind, value = moves[k % len(moves)]
    return kind, value()


@operation
def loop(w: Writer, i: int, j: int, k: int) -> tuple[str, jax.Array]:
    """Return results of scans, while loops and branches."""
    rows, vector, scalar = w.pick("rows", i), w.pick("vector", i), w.pick("scalar", j)
    layers = w.params.get("layers", w.params["w"][None])
    counted = lambda h: lax.fori_loop(0, 2, lambda t, z: jnp.tanh(z) * (1 + t), h)
    centred = lambda h, m: (jnp.tanh(h @ m) - jnp.mean(h, 0), jnp.mean(h))

    def until(h: jax.Array) -> jax.Array:
        small = lambda c: (c[0] < 4) & (jnp.abs(c[1]).max() > 0.4)
        return lax.while_loop(small, lambda c: (c[0] + 1, c[1] * 0.5), (0, lax.stop_gradient(h)))[1]

    def attend(h: jax.Array, m: jax.Array) -> tuple[jax.Array, None]:
        return h + jax.checkpoint(lambda z: jax.nn.relu(z @ m) @ m.T)(h), None

    loops: list[tuple[str, Callable[[], jax.Array]]] = [
        ("rows", lambda: lax.scan(lambda h, m: (jnp.tanh(h @ m), None), rows, layers)[0]),
        ("rows", lambda: lax.scan(centred, rows, layers)[0]),
        ("scalar", lambda: lax.scan(centred, rows, layers)[1].sum()),
        ("rows", lambda: lax.scan(attend, rows, layers)[0]),
        ("rows", lambda: counted(rows)),
        ("rows", lambda: rows + until(rows)),
        ("rows", lambda: lax.cond(scalar > 0.1, lambda h: h * scalar, lambda h: jnp.sin(h), rows)),
        (
            "rows",
            lambda: lax.cond(jnp.mean(rows) > 0, lambda h: h - h.mean(0), lambda h: 2 * h, rows),
        ),
        ("columns", lambda: lax.scan(lambda c, r: (jnp.tanh(c + r), None), rows[0], rows)[0]),
        ("vector", lambda: lax.scan(lambda c, r: (0.5 * c + r, c), scalar, vector)[1]),
        (
            "vector",
            lambda: jax.vmap(lambda r: lax.fori_loop(0, 2, lambda t, z: jnp.sin(z), r))(vector),
        ),
        (
            "rows",
            lambda: jax.vmap(lambda r, v: lax.cond(v > 0.2, jnp.sin, jnp.cos, r))(rows, vector),
        ),
        (
            "rows",
            lambda: lax.switch(w.labels[0] % 3, [jnp.sin, lambda h: h - h.max(0), jnp.tanh], rows),
        ),
        ("rows", lambda: lax.map(lambda r: r * r.sum(), rows)),
        ("matrix", lambda: lax.scan(lambda c, m: (c @ m, None), w.pick("matrix", j), layers)[0]),
    ]
    kind, value = loops[k % len(loops)]
    return kind, value()


def _custom(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with a custom backward rule, which gets the operands and the cotangent."""
    fn = jax.custom_vjp(forward)
    fn.defvjp(lambda *xs: (forward(*xs), xs), lambda xs, g: backward(xs, g))
    return fn


_scaled_back = _custom(lambda x: x, lambda xs, g: (0.5 * g,))
_clipped_back = _custom(
    lambda x: x, lambda xs, g: (g / jnp.maximum(1, 4 * jnp.sqrt((g**2).sum())),)
)
_centred_back = _custom(lambda x: x, lambda xs, g: (g - g.mean(0),))
_mean_back = _custom(
    lambda x: x.mean(0), lambda xs, g: (jnp.broadcast_to(g / len(xs[0]), xs[0].shape),)
)
_linear = _custom(lambda x, m: x @ m, lambda xs, g: (g @ xs[1].T, xs[0].T @ g))
_scaled_linear = _custom(lambda x, m: x @ m, lambda xs, g: (g @ xs[1].T, xs[0].T @ g / len(g)))
_rounded = _custom(jnp.sign, lambda xs, g: (jnp.where(jnp.abs(xs[0]) < 1, g, 0.0),))


@jax.custom_jvp
def _soft(x: jax.Array) -> jax.Array:
    return jnp.log1p(jnp.exp(x))


@_soft.defjvp
def _soft_rule(primals: Any, tangents: Any) -> Any:
    (x,), (t,) = primals, tangents
    return _soft(x), t * jax.nn.sigmoid(x)


@operation
def custom(w: Writer, i: int, j: int, k: int) -> tuple[str, jax.Array]:
    """Return results of functions with custom derivatives."""
    rows = w.pick("rows", i)
    customs: list[tuple[str, Callable[[], jax.Array]]] = [
        ("rows", lambda: _scaled_back(rows)),
        ("rows", lambda: _clipped_back(rows)),
        ("rows", lambda: _centred_back(rows)),
        ("columns", lambda: _mean_back(rows)),
        ("rows", lambda: _linear(rows, w.pick("matrix", j))),
        ("rows", lambda: _scaled_linear(rows, w.pick("matrix", j))),
        ("rows", lambda: _rounded(rows)),
        ("rows", lambda: _soft(rows)),
        ("matrix", lambda: _clipped_back(w.pick("matrix", j))),
        ("vector", lambda: jax.vmap(_clipped_back)(rows).sum(1)),
        ("vector", lambda: jax.vmap(jax.grad(lambda r: jnp.sin(r).sum() ** 2))(rows)[:, 0]),
        ("rows", lambda: rows + lax.stop_gradient(jnp.sign(rows) - rows)),
    ]
    kind, value = customs[k % len(customs)]
    return kind, value()


@operation
def noise(w: Writer, i: int, j: int, k: int) -> tuple[str, jax.Array]:
    """Return random numbers from a constant key."""
    rows, key = w.pick("rows", i), jax.random.key(j)
    noises: list[tuple[str, Callable[[], jax.Array]]] = [
        ("rows", lambda: jnp.where(jax.random.bernoulli(key, 0.7, rows.shape), rows / 0.7, 0.0)),
        ("rows", lambda: rows + jax.random.uniform(key, (WIDTH,), rows.dtype)),
        ("rows", lambda: rows * jax.random.uniform(key, (w.count, 1), rows.dtype)),
        ("rows", lambda: rows[jax.random.permutation(key, w.count)]),
        ("scalar", lambda: jax.random.uniform(key, (), rows.dtype)),
    ]
    kind, value = noises[k % len(noises)]
    return kind, value()


# -- losses ----------------------------------------------------------------------------------------

LOSSES: dict[str, Callable[[Writer, int], jax.Array]] = {
    "linear": lambda w, i: jnp.mean(w.pick("rows", i)),
    "mean": lambda w, i: jnp.mean(w.pick("rows", i) ** 2),
    "error": lambda w, i: jnp.mean((w.pick("rows", i) - w.pools["rows"][0]) ** 2),
    "sum": lambda w, i: jnp.sum(jnp.sin(w.pick("rows", i))),
    "vector": lambda w, i: jnp.mean(w.pick("vector", i) * w.pick("rows", i)[:, 0]),
    "masked": lambda w, i: _masked_mean(w.pick("rows", i).sum(1) ** 2, w.mask),
    "weighted": lambda w, i: jnp.average(
        w.pick("rows", i)[:, 0] ** 2, weights=1 + w.pools["vector"][0] ** 2
    ),
    "entropy": lambda w, i: _entropy(w.pick("rows", i), w.labels).mean(),
    "penalty": lambda w, i: (
        jnp.mean(w.pick("rows", i) ** 2) + 0.01 * sum((p**2).sum() for p in w.params.values())
    ),
    "scalar": lambda w, i: jnp.mean(w.pick("rows", i) ** 2) + w.pick("scalar", i) ** 2,
    "columns": lambda w, i: jnp.mean(w.pick("columns", i) ** 2) + jnp.mean(w.pick("rows", i)),
    "matrix": lambda w, i: jnp.sum(jnp.tanh(w.pick("matrix", i))) * jnp.mean(w.pick("rows", i)),
    "pairs": lambda w, i: _entropy(w.pick("pairs", i), jnp.arange(w.count)).mean(),
    "largest": lambda w, i: jnp.max(w.pick("rows", i) ** 2),
    "logsumexp": lambda w, i: jax.nn.logsumexp(w.pick("rows", i)),
    "ratio": lambda w, i: jnp.sum(w.pick("rows", i) ** 2) / (1 + jnp.sum(w.pick("vector", i) ** 2)),
}


def _masked_mean(x: jax.Array, kept: jax.Array) -> jax.Array:
    return (x * kept).sum() / jnp.maximum(kept.sum(), 1)


def _entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels % logits.shape[1])


# -- updates ---------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9),
    "adam": lambda: optax.adam(1e-2),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)),
    "adamw": lambda: optax.adamw(1e-2),
    "lamb": lambda: optax.lamb(1e-2),
    "rmsprop": lambda: optax.rmsprop(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "accumulated": lambda: optax.MultiSteps(optax.sgd(0.1), 2),
    "scheduled": lambda: optax.sgd(optax.linear_schedule(0.1, 0.01, 4)),
    "centralized": lambda: optax.chain(optax.centralize(), optax.sgd(0.1)),
    "muon": lambda: optax.contrib.muon(1e-2),
}
SOURCES = ("loss", "scalar", "rows", "columns", "vector", "gradient", "input", "labels")
USES = ("rate", "gate", "parameter", "outer", "mean", "least", "result", "each")


@dataclasses.dataclass(frozen=True)
class Reading:
    """Value of forward, of gradients or of the batch that enters the new state or the results.

    Attributes:
      source: one of `SOURCES`.
      number: index among the values of this kind.
      statistic: index in `REDUCED` of the function that reduces the value to a number.
      use: one of `USES`.
    """

    source: str
    number: int
    statistic: int
    use: str


@dataclasses.dataclass(frozen=True)
class RandomStep:
    """Training step.

    Attributes:
      leaves: parameters in addition to `w`.
      instructions: the forward pass, from `OPERATIONS`.
      loss: one of `LOSSES`, and the index of the value that it takes.
      optimizer: one of `OPTIMIZERS`.
      readings: values that the update reads in addition to gradients.
      gradient: `marked` (by `dtrans.value_and_grad`), `plain` (by JAX's function), `twice` (at
        parameters that a first gradient has changed), or `by row` (a mean of clipped gradients of
        rows).
      one_state: True if parameters and state are one pytree.
      anchored: True if every parameter enters the loss. Otherwise a step may be refused, because it
        has no gradient.
      edits: edits of the jaxpr of forward, which reduce a failing step.
    """

    leaves: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    loss: tuple[str, int]
    optimizer: str
    readings: tuple[Reading, ...]
    gradient: str
    one_state: bool
    anchored: bool = False
    edits: Edits = ()

    def init(self) -> Any:
        """Return the first state."""
        params = make_params(self.leaves)
        kept = {"best": jnp.asarray(1e3), "mean": jnp.zeros(())} if self.readings else {}
        state = {**kept, "inner": OPTIMIZERS[self.optimizer]().init(params)}
        return {"params": params, "state": state} if self.one_state else (params, state)

    def forward(self, params: Any, *batch: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """Return the loss, and the values that the update reads."""
        if self.edits:
            whole, out = self._whole_forward(params, *batch)
            run = lambda *leaves: run_with_edits(whole, dict(self.edits), (), leaves)
            short = without_dead_equations(run, [v.aval for v in opened(whole).invars])
            made = evaluate(short, *jax.tree.leaves((params, batch)))
            return jax.tree.unflatten(jax.tree.structure(out), made)
        writer = Writer(params, batch)
        for instruction in self.instructions:
            writer.run(instruction)
        name, number = self.loss
        loss = LOSSES[name](writer, number)
        if self.anchored:
            loss += jnp.mean(writer.pools["rows"][2])
            loss += 0.1 * sum(jnp.sum(jnp.sin(p)) for name, p in params.items() if name != "w")
        read = [writer.pick(r.source, r.number) for r in self.readings if r.source in KINDS]
        return loss, read

    def _whole_forward(self, *args: Any) -> tuple[Any, Any]:
        """Return the jaxpr of forward without edits, and the types of its outputs."""
        return jax.make_jaxpr(dataclasses.replace(self, edits=()).forward, return_shape=True)(*args)

    def editable(self, rows: int) -> tuple[Any, int]:
        """Return the jaxpr that edits change, and the number of outputs that they may replace."""
        first = jax.eval_shape(self.init)
        return self._whole_forward(
            first["params"] if self.one_state else first[0], *make_batch(rows)
        )[0], 0

    def take_gradient(self, params: Any, *batch: jax.Array) -> tuple[Any, Any]:
        """Return (loss, values) and gradients."""
        value_and_grad = dtrans.value_and_grad if self.gradient == "marked" else jax.value_and_grad
        fn = value_and_grad(self.forward, has_aux=True)
        if self.gradient == "twice":
            (_, first) = fn(params, *batch)
            params = jax.tree.map(lambda p, g: p + 0.01 * g, params, first)
        if self.gradient == "by row":
            alone = jax.grad(lambda p, *row: self.forward(p, *(a[None] for a in row))[0])
            each = jax.vmap(alone, in_axes=(None, *(0 for _ in batch)))(params, *batch)
            norms = jnp.sqrt(sum(jax.vmap(jnp.vdot)(g, g) for g in jax.tree.leaves(each)) + 0.1)
            grads = jax.tree.map(
                lambda g: jnp.einsum("b,b...->...", 1 / norms, g) / len(norms), each
            )
            return self.forward(params, *batch), grads
        return fn(params, *batch)

    def values(
        self, loss: Any, read: list[Any], grads: Any, batch: tuple[jax.Array, ...]
    ) -> list[jax.Array]:
        """Return the array of each reading."""
        x, y, labels, *_ = batch
        others: dict[str, Callable[[], jax.Array]] = {
            "loss": lambda: loss,
            "gradient": lambda: grads["w"],
            "input": lambda: x * y,
            "labels": lambda: labels.astype(x.dtype),
        }
        forward = iter(read)
        return [next(forward) if r.source in KINDS else others[r.source]() for r in self.readings]

    def update(self, params: Any, state: Any, *batch: jax.Array) -> tuple[Any, Any, Any]:
        """Run the step, as a user would write it."""
        (loss, read), grads = self.take_gradient(params, *batch)
        updates, inner = OPTIMIZERS[self.optimizer]().update(grads, state["inner"], params)
        new, kept, results = (
            optax.apply_updates(params, updates),
            {**state, "inner": inner},
            {"loss": loss},
        )
        for r, value in zip(self.readings, self.values(loss, read, grads, batch), strict=True):
            number = REDUCED[r.statistic % len(REDUCED)](value, axis=tuple(range(value.ndim)))
            if r.use == "rate":
                new = jax.tree.map(
                    lambda p, q, a=number: q + 0.1 * jnp.tanh(a) * (p - q), params, new
                )
            elif r.use == "gate":
                new = jax.tree.map(lambda p, q, a=number: jnp.where(a < 0.4, p, q), params, new)
            elif r.use == "parameter":
                new["w"] = new["w"] + 0.01 * jnp.tanh(number)
            elif r.use == "outer":
                x, y, *_ = batch
                new["w"] = new["w"] + 0.01 * jnp.tanh(number) * (x.T @ y) / len(x)
            elif r.use == "mean":
                kept["mean"] = 0.9 * kept["mean"] + 0.1 * number
            elif r.use == "least":
                kept["best"] = jnp.minimum(kept["best"], number)
            elif r.use == "result":
                results["number"] = number
            else:
                results["each"] = value
        return new, kept, results

    def step(self) -> Callable[..., Any]:
        """Return the step."""

        def together(both: Any, *batch: Any) -> tuple[Any, Any]:
            params, state, results = self.update(both["params"], both["state"], *batch)
            return {"params": params, "state": state}, results

        return together if self.one_state else self.update

    def trace(self, rows: int) -> tuple[Any, Any]:
        """Return the traced step and the traced init."""
        return dtrans.trace(self.step(), *self.arguments(rows)), dtrans.trace(self.init)

    def arguments(self, rows: int) -> tuple[Any, ...]:
        """Return the types of the step's arguments."""
        first = jax.eval_shape(self.init)
        return (*((first,) if self.one_state else first), *make_batch(rows))

    def short(self, rows: int) -> Any:
        """Return the jaxpr of the step."""
        return jax.make_jaxpr(self.step())(*self.arguments(rows))

    def length(self, rows: int) -> int:
        """Return the number of equations of the step, including bodies."""
        return len(list(equations(self.short(rows))))


def draw_steps(
    *, longest: int = 6, marked: bool = False, most_readings: int = 2
) -> st.SearchStrategy[RandomStep]:
    """Return the strategy that draws a step.

    Args:
      longest: the number of instructions of forward.
      marked: take all gradients with `dtrans.value_and_grad`.
      most_readings: the number of values that the update reads.
    """
    small = st.integers(0, 3)
    instruction = st.tuples(
        st.sampled_from(list(OPERATIONS)), small, st.integers(0, 8), st.integers(0, 71)
    )
    reading = st.builds(
        Reading,
        st.sampled_from(SOURCES),
        small,
        st.integers(0, len(REDUCED) - 1),
        st.sampled_from(USES),
    )
    gradients = (
        ("marked",)
        if marked
        else ("marked", "plain", "marked", "plain", "marked", "twice", "by row")
    )
    return st.builds(
        RandomStep,
        leaves=st.lists(
            st.sampled_from(sorted(SHAPES.keys() - {"w"})), max_size=2, unique=True
        ).map(tuple),
        instructions=st.lists(instruction, max_size=longest).map(tuple),
        loss=st.tuples(st.sampled_from(list(LOSSES)), small),
        optimizer=st.sampled_from(list(OPTIMIZERS)),
        readings=st.lists(reading, max_size=most_readings).map(tuple),
        gradient=st.sampled_from(gradients),
        one_state=st.booleans(),
        anchored=st.sampled_from((False, True, True, True)),  # failures shrink to the first
    )
