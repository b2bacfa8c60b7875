"""Compare meshes of dtrans with `jit` and `NamedSharding`: `python benchmarks/meshes.py`.

    ours        `dtrans.nccl2(mesh=...)` or `dtrans.sharding(mesh=..., stage=3)` on eight devices
    annotated   `jax.jit` of the one-device step; parameters and batch have a `NamedSharding` over
                the same axes

Both steps donate their state, get a batch that is already on the devices, and train in turn in one
process. Their losses must agree, and dtrans must send at most 1.1 times the bytes of the
collectives in JAX's compiled program. The table has the ratio of the times, the median of
interleaved pairs, and the ratio of the bytes.

All virtual CPU devices use the same cores, and have no network between them. A ratio of times
compares only the work of two steps.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from models import programs, tx
from sharding import Side

import dtrans


ROWS, TOKENS, WIDTH, HEADS, BLOCKS, EXPERTS = 16, 64, 128, 4, 2, 8
DEVICES = 8
COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
ARRAY = re.compile(r"(pred|[a-z]+)(\d*)\[([\d,]*)\]")


# -- the model -------------------------------------------------------------------------------------


def norm(x: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def attention(p: Any, x: jax.Array) -> jax.Array:
    heads = lambda w: (x @ w).reshape(*x.shape[:2], HEADS, -1)
    q, k, v = heads(p["q"]), heads(p["k"]), heads(p["v"])
    scores = jnp.einsum("rthc,rshc->rhts", q, k) / math.sqrt(WIDTH // HEADS)
    scores = jnp.where(np.tri(TOKENS, dtype=bool), scores, -1e9)
    read = jnp.einsum("rhts,rshc->rthc", jax.nn.softmax(scores), v)
    return read.reshape(*x.shape[:2], -1) @ p["o"]


def experts(p: Any, x: jax.Array) -> jax.Array:
    """Return the outputs of the experts: top-1 routing in each row, with a capacity."""
    chances = jax.nn.softmax(x @ p["gate"])
    chosen = jax.nn.one_hot(jnp.argmax(chances, -1), EXPERTS)
    place = (jnp.cumsum(chosen, 1) - 1) * chosen
    capacity = 2 * TOKENS // EXPERTS
    slots = jax.nn.one_hot(place.astype(int), capacity)
    dispatch = (chosen * (place < capacity))[..., None] * slots
    with dtrans.split(name="experts"):
        h = jnp.einsum("rtec,rtd->ercd", dispatch, x)
        h = jax.nn.relu(jnp.einsum("ercd,edh->erch", h, p["expert_up"]))
        h = jnp.einsum("erch,ehd->ercd", h, p["expert_down"])
        return jnp.einsum("rtec,ercd->rtd", dispatch * chances[..., None], h)


def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    for p in params:
        h = norm(x)
        if "q" in p:
            with dtrans.split(name="attention"):
                h = attention(p, h)
            x = x + h
            h = norm(x)
        if "gate" in p:
            x = x + experts(p, h)
        else:
            with dtrans.split(name="mlp"):
                h = jax.nn.gelu(h @ p["up"]) @ p["down"]
            x = x + h
    return jnp.mean((x - y) ** 2)


DENSE = {**dict.fromkeys("qkvo", (WIDTH, WIDTH)), "up": (WIDTH, 512), "down": (512, WIDTH)}
MIXED = {
    "gate": (WIDTH, EXPERTS),
    "expert_up": (EXPERTS, WIDTH, 256),
    "expert_down": (EXPERTS, 256, WIDTH),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Mesh to measure.

    Attributes:
      mesh: the option `mesh` of dtrans.
      shapes: shape of each parameter of a block.
      specs: sharding of the parameters by JAX; others are replicated.
      batch: sharding of the batch by JAX.
      stage: stage of ZeRO; 0 for nccl2 mode.
    """

    mesh: Mapping[str, int | str]
    shapes: Mapping[str, tuple[int, ...]]
    specs: Mapping[str, P]
    batch: P
    stage: int = 0

    def with_data(self, size: int) -> Case:
        """Return the case with another size of the axis "data"."""
        return dataclasses.replace(self, mesh={**self.mesh, "data": size})

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the axes of JAX's mesh."""
        return {name: size for name, size in self.mesh.items() if isinstance(size, int)}


COLUMNS, ROWS_OF = P(None, "model"), P("model")
MEGATRON = {**dict.fromkeys(("q", "k", "v", "up"), COLUMNS), "o": ROWS_OF, "down": ROWS_OF}
BOTH = {**dict.fromkeys(("q", "k", "v", "up"), P("data", "model"))} | dict.fromkeys(
    ("o", "down"), P("model", "data")
)
CASES = {
    "data x model": Case({"data": 4, "model": 2}, DENSE, MEGATRON, P("data")),
    "data x ZeRO 3 x model": Case({"data": 4, "model": 2}, DENSE, BOTH, P("data"), 3),
    "data x sequence": Case({"data": 2, "sequence": 4}, DENSE, {}, P("data", "sequence")),
    "experts": Case(
        {"data": 8, "model": "data"},
        MIXED,
        dict.fromkeys(("expert_up", "expert_down"), P("data")),
        P("data"),
    ),
}


# -- the two steps ---------------------------------------------------------------------------------


def training(case: Case) -> tuple[Any, Any, tuple[jax.Array, ...]]:
    """Return the one-device step, its init and a batch."""

    def init(key: jax.Array) -> Any:
        params = []
        for key_of_block in jax.random.split(key, BLOCKS):
            keys = jax.random.split(key_of_block, len(case.shapes))
            block = {}
            for k, (name, shape) in zip(keys, case.shapes.items(), strict=True):
                block[name] = jax.random.normal(k, shape) / math.sqrt(shape[-2])
            params.append(block)
        return params, tx.init(params)

    step = dtrans.make_train_step(loss_fn, tx)
    x = jax.random.normal(jax.random.key(1), (ROWS, TOKENS, WIDTH))
    return step, init, (x, jnp.roll(x, 1, axis=1))


def annotated(case: Case) -> Side:
    """Return the one-device step, which XLA distributes by its shardings."""
    _, init, batch = training(case)
    axes = case.axes
    devices = np.array(jax.devices()[: math.prod(axes.values())])
    mesh = Mesh(devices.reshape([*axes.values()]), [*axes])
    state = init(jax.random.key(0))

    def sharding(path: Any, x: jax.Array) -> NamedSharding:
        name = getattr(path[-1], "key", "")
        return NamedSharding(mesh, case.specs.get(name, P()) if x.ndim else P())

    shardings = jax.tree_util.tree_map_with_path(sharding, state)
    along = NamedSharding(mesh, case.batch)

    def step(params: Any, opt_state: Any, *batch: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    jitted = jax.jit(
        step,
        in_shardings=(*shardings, *[along] * len(batch)),
        out_shardings=(*shardings, NamedSharding(mesh, P())),
        donate_argnums=(0, 1),
    )
    placed = jax.device_put(batch, along)
    box = list(jax.device_put(state, shardings))
    compiled = jitted.lower(*box, *placed).compile()

    def run() -> jax.Array:
        *box[:], loss = jitted(*box, *placed)
        return loss

    return Side(run, compiled, lambda: jax.tree.leaves(box), lambda: box[0])


def ours(case: Case) -> Side:
    """Return the same step on dtrans's mesh."""
    step, init, batch = training(case)
    options: dict[str, Any] = {"mesh": case.mesh}
    if case.stage:
        options |= {"stage": case.stage, "slices": dtrans.Slicing(min_slice_size=0)}
    strategy = dtrans.sharding if case.stage else dtrans.nccl2
    job = strategy(*programs(step, init, batch), **options).on_mesh()
    placed = job.place(*batch)
    box = [job.init(jax.random.key(0))]
    compiled = job.lower(box[0], *placed).compile()

    def run() -> jax.Array:
        box[0], loss = job.step(box[0], *placed)
        return loss

    return Side(run, compiled, lambda: jax.tree.leaves(box), lambda: job.params(box[0]))


# -- what is measured ------------------------------------------------------------------------------


def bytes_of(side: Side) -> int:
    """Return the bytes that a device sends in a ring for the collectives of a compiled step.

    An all-reduce sends its array twice. Other collectives send the largest of operand and result
    once.
    """
    found = 0
    for line in side.compiled.as_text().splitlines():
        match = COLLECTIVE.search(line)
        if match is None:
            continue
        result, kind = match.groups()
        operands = line[match.end() :].split("), ")[0]
        size = max(_size(result), _size(operands))
        found += 2 * size if kind == "all-reduce" else size
    return found


def _size(text: str) -> int:
    """Return the bytes of the arrays in a text of HLO, such as `f32[4,8]`."""
    total = 0
    for _, bits, dims in ARRAY.findall(text):
        count = math.prod(int(n) for n in dims.split(",") if n)
        total += count * (int(bits) // 8 if bits else 1)
    return total


def ratios(mine: Side, theirs: Side, pairs: int) -> list[float]:
    """Return the ratio of the times of a step, for interleaved pairs."""

    def seconds(side: Side) -> float:
        begin = time.perf_counter()
        jax.block_until_ready((side.run(), side.state()))
        return time.perf_counter() - begin

    for side in (mine, theirs):
        seconds(side)
    return [seconds(mine) / seconds(theirs) for _ in range(pairs)]


def losses(side: Side) -> Sequence[float]:
    return [float(side.run()) for _ in range(3)]


def compared_bytes(mine: Side, theirs: Side) -> tuple[int, int]:
    """Return the bytes of both steps; check these bytes and the losses."""
    np.testing.assert_allclose(losses(mine), losses(theirs), rtol=1e-5)
    sent, other = bytes_of(mine), bytes_of(theirs)
    assert sent <= 1.1 * other, (sent, other)
    return sent, other


def main(
    pairs: int = typer.Option(11, help="Number of interleaved pairs of each mesh."),
    only: str = typer.Option("", help="Measure only meshes whose name contains this text."),
) -> None:
    """Compare meshes of dtrans with `jit` and `NamedSharding`."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    print("| mesh | time, ours / annotated | bytes, ours / annotated | bytes of ours |")
    print("| --- | --- | --- | --- |")
    for name, case in CASES.items():
        if only not in name:
            continue
        mine, theirs = ours(case), annotated(case)
        sent, other = compared_bytes(mine, theirs)
        found = ratios(mine, theirs, pairs)
        low, middle, high = min(found), statistics.median(found), max(found)
        row = f"| {name} | {middle:.2f} ({low:.2f} to {high:.2f}) | {sent / other:.2f} | {sent:,} |"
        print(row, flush=True)
    print(f"load {os.getloadavg()[0]:.1f}, {pairs} pairs")


if __name__ == "__main__":
    typer.run(main)
