"""Compare `dtrans.sharding` with JAX's own sharding: `python benchmarks/sharding.py`.

`--write` writes the tables to docs/sharding_measured.md.

    ours        `dtrans.sharding(main, startup, stage=1|2|3, degree=N).on_mesh()`
    annotated   `jax.jit` of the one-device step with `NamedSharding`: the optimizer state is sharded (stage
                1), also gradients (stage 2), also parameters (stage 3). Activations are sharded
                along the batch

Both steps replicate leaves of fewer than `LEAST` elements, and shard other leaves along the same
dimension. Both steps donate their state, and get a batch that is already on the devices. They train
in turn in one process, and must compute the same losses.

All virtual CPU devices use the same cores, and have no network between them. A ratio of times
compares only the work of two steps.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from models import (
    Model,
    Pin,
    as_is,
    mlp_model,
    programs,
    scanned_model,
    training,
    transformer_model,
    tx,
)

import dtrans


STAGES: dict[str, dict[str, Any]] = {
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3},
    # by default, jobs on CPUs do not gather the next layer's parameters early in a loop
    "3, prefetch=1": {
        "stage": 3,
        "slices": dtrans.Slicing(prefetch=1),
    },
}
DEVICES = (2, 8)
LEAST = 1024  # the default of min_slice_size
TARGET = 1.05  # largest ratio of times that the table prints in bold
DOCS = Path(__file__).resolve().parent.parent / "docs"


@dataclasses.dataclass(frozen=True)
class Case:
    """A model to train.

    Attributes:
      make: function pin -> model. The model calls `pin` with its activations.
      axis: the dimension along which large leaves are sharded: 1 if dimension 0 is the layer.
    """

    make: Callable[[Pin], Model]
    axis: int = 0


CASES = {
    "MLP, 4 of 512 x 512": Case(lambda pin: mlp_model([512] * 5, 256, pin)),
    "MLP, a scan over 16 of 512 x 512": Case(lambda pin: scanned_model(16, 512, 64, pin), axis=1),
    "transformer, 4 blocks of 128": Case(
        lambda pin: transformer_model(512, 128, 4, 4, 64, 16, pin=pin)
    ),
}


# -- the two steps ---------------------------------------------------------------------------------


@dataclasses.dataclass
class Side:
    """One of the two compared steps.

    Attributes:
      run: trains one step; returns the loss.
      compiled: the compiled step.
      state: returns the arrays of the current state.
      params: returns the current parameters.
    """

    run: Callable[[], jax.Array]
    compiled: Any
    state: Callable[[], Sequence[jax.Array]]
    params: Callable[[], Any]

    @property
    def collectives(self) -> collections.Counter[str]:
        """Number of collectives of each kind in the compiled step; one in a loop counts once."""
        kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
        return collections.Counter(re.findall(rf" ({kinds})(?:-start)?\(", self.compiled.as_text()))

    @property
    def peak(self) -> int:
        """Bytes of memory that a device needs for a step."""
        m = self.compiled.memory_analysis()
        held = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
        return int(held + m.temp_size_in_bytes)

    @property
    def held(self) -> int:
        """Bytes of state on the first device between steps."""
        return sum(x.addressable_shards[0].data.nbytes for x in self.state())


def annotated(case: Case, stage: int, mesh: Mesh) -> Side:
    """Return the one-device step, which XLA distributes by its shardings."""
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("shard"))
    model = case.make(lambda x: jax.lax.with_sharding_constraint(x, split))
    cut = NamedSharding(mesh, P(*[None] * case.axis, "shard"))
    key = jax.random.key(0)

    def init(key: jax.Array) -> Any:
        params = model.params(key)
        return params, tx.init(params)

    types = jax.eval_shape(init, key)
    sliced, opt_state = jax.tree.map(lambda x: cut if x.size >= LEAST else whole, types)
    params = sliced if stage == 3 else jax.tree.map(lambda _: whole, types[0])

    def step(params: Any, opt_state: Any, *batch: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(model.loss_fn)(params, *batch)
        if stage > 1:
            grads = jax.lax.with_sharding_constraint(grads, sliced)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    jitted = jax.jit(
        step,
        in_shardings=(params, opt_state, *[split] * len(model.batch)),
        out_shardings=(params, opt_state, whole),
        donate_argnums=(0, 1),
    )
    batch = jax.device_put(model.batch, split)
    box = list(jax.device_put(init(key), (params, opt_state)))
    compiled = jitted.lower(*box, *batch).compile()

    def run() -> jax.Array:
        *box[:], loss = jitted(*box, *batch)
        return loss

    return Side(run, compiled, lambda: jax.tree.leaves(box), lambda: box[0])


def ours(case: Case, options: dict[str, Any], mesh: Mesh) -> tuple[Side, dtrans.ShardingPlan]:
    """Return the same step, sharded by dtrans, and its plan."""
    step, init, batch = training(case.make(as_is))
    plan = dtrans.sharding(*programs(step, init, batch), degree=mesh.size, **options)
    job = plan.on_mesh(list(mesh.devices.flat))
    batch = jax.device_put(batch, NamedSharding(mesh, P("shard")))
    box = [job.init(jax.random.key(0))]
    compiled = job.lower(box[0], *batch).compile()

    def run() -> jax.Array:
        box[0], loss = job.step(box[0], *batch)
        return loss

    return Side(run, compiled, lambda: jax.tree.leaves(box), lambda: job.params(box[0])), plan


def sides(name: str, devices: int, stage: str) -> tuple[Side, Side, dtrans.ShardingPlan]:
    """Return (ours, annotated, our plan) after three steps, whose losses and parameters agree."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("shard",))
    mine, plan = ours(CASES[name], STAGES[stage], mesh)
    theirs = annotated(CASES[name], STAGES[stage]["stage"], mesh)
    a, b = ([float(side.run()) for _ in range(3)] for side in (mine, theirs))
    np.testing.assert_allclose(a, b, rtol=1e-5)
    pairs = zip(jax.tree.leaves(mine.params()), jax.tree.leaves(theirs.params()), strict=True)
    # The mean is compared: Adam divides by the gradient's magnitude, so where a gradient is almost
    # 0, rounding decides the sign of the update.
    assert max(float(jnp.mean(jnp.abs(x - y))) for x, y in pairs) < 1e-5
    return mine, theirs, plan


# -- what is measured ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Figures:
    """Figures of one case. A pair has the figures of `ours` and of `annotated`.

    Attributes:
      wall: milliseconds of a step.
      quartiles: quartiles of the ratio of wall times, over rounds.
      work: the median ratio of processor times.
      peak, held: bytes on a device during a step, and between steps.
      formula: expected bytes of state on a device.
      psi: bytes of all parameters.
      traffic: bytes that `ours` sends, by kind of collective.
      collectives: the number of collectives of each kind in the compiled step.
    """

    wall: tuple[float, float]
    quartiles: tuple[float, float, float]
    work: float
    peak: tuple[int, int]
    held: tuple[int, int]
    formula: float
    psi: int
    traffic: dict[str, int]
    collectives: tuple[collections.Counter[str], collections.Counter[str]]

    @property
    def ratio(self) -> float:
        """The median ratio of wall times."""
        return self.quartiles[1]


def measured(name: str, devices: int, stage: str, rounds: int) -> Figures:
    """Train both in turn, and return the figures."""
    mine, theirs, plan = sides(name, devices, stage)
    start = time.perf_counter()
    jax.block_until_ready([mine.run(), theirs.run()])
    steps = max(1, round(0.1 / (time.perf_counter() - start)))  # a round takes about 50 ms

    def round_of(side: Side) -> tuple[float, float]:
        wall, processor = time.perf_counter(), time.process_time()
        for _ in range(steps):
            loss = side.run()
        jax.block_until_ready((loss, side.state()))
        return (time.perf_counter() - wall) / steps, (time.process_time() - processor) / steps

    times = [(round_of(mine), round_of(theirs)) for _ in range(rounds)]
    wall, work = ([(a[k], b[k]) for a, b in times] for k in (0, 1))
    a, b = (1e3 * statistics.median(t) for t in zip(*wall, strict=True))
    low, middle, high = statistics.quantiles([a / b for a, b in wall], n=4)
    traffic: collections.Counter[str] = collections.Counter()
    for (kind, _), n in plan.traffic().items():
        traffic[kind] += n
    count = sum(x.size for x in jax.tree.leaves(mine.params()))
    return Figures(
        wall=(a, b),
        quartiles=(low, middle, high),
        work=statistics.median(a / b for a, b in work),
        peak=(mine.peak, theirs.peak),
        held=(mine.held, theirs.held),
        formula=count * (12 / devices if STAGES[stage]["stage"] == 3 else 4 + 8 / devices),
        psi=4 * count,
        traffic=dict(traffic),
        collectives=(mine.collectives, theirs.collectives),
    )


Results = dict[tuple[str, int, str], Figures]


# -- the page --------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def times_of(results: Results) -> str:
    """Return the table of times."""
    rows = [
        [name, str(n), stage, f"{'**' * (f.ratio <= TARGET)}{f.ratio:.2f}{'**' * (f.ratio <= TARGET)}",
         f"{f.quartiles[0]:.2f} to {f.quartiles[2]:.2f}", f"{f.work:.2f}", f"{f.wall[0]:.1f} / "
f"{f.wall[1]:.1f}"]
        for (name, n, stage), f in results.items()
    ]  # fmt: skip
    header = (
        "model",
        "devices",
        "stage",
        "time, ours / annotated",
        "quartiles",
        "processor time",
        "ms",
    )
    return table(header, rows)


def memory_of(results: Results) -> str:
    """Return the table of memory."""
    mb = lambda n: f"{n / 2**20:.2f}"
    rows = [
        [name, str(n), stage, mb(f.held[0]), mb(f.held[1]), mb(f.formula), mb(f.peak[0]), mb(f.peak[1]),
         f"{'**' * (f.peak[0] <= f.peak[1])}{f.peak[0] / f.peak[1]:.3f}{'**' * (f.peak[0] <= f.peak[1])}"]
        for (name, n, stage), f in results.items()
    ]  # fmt: skip
    header = (
        "model",
        "devices",
        "stage",
        "state",
        "annotated",
        "formula",
        "step",
        "annotated",
        "ours / annotated",
    )
    return table(header, rows)


def traffic_of(results: Results) -> str:
    """Return the table of traffic and collectives."""
    most = max(n for _, n, _ in results)
    kinds = ("reduce_scatter", "all_gather", "all_reduce")
    rows = []
    for (name, n, stage), f in results.items():
        if n == most:
            of = [f.traffic.get(k, 0) / f.psi for k in kinds]
            told = [
                ", ".join(f"{count} {kind}" for kind, count in sorted(c.items()))
                for c in f.collectives
            ]
            rows.append([name, stage, *(f"{x:.2f}" for x in of), f"{sum(of):.2f}", *told])
    return table(("model", "stage", *kinds, "together", "in our program", "in the annotated"), rows)


def figures(results: Results) -> dict[str, str]:
    """Return the tables of the page, by the name of each table's marker."""
    return {
        "times": times_of(results),
        "memory": memory_of(results),
        "traffic": traffic_of(results),
    }


def written(page: str, parts: dict[str, str]) -> str:
    """Return the page with new tables between `<!-- name -->` and `<!-- /name -->`."""
    for name, text in parts.items():
        page, count = re.subn(
            rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)",
            lambda m, t=text: f"{m[1]}\n{t}\n\n{m[2]}",
            page,
            flags=re.S,
        )
        assert count == 1, f"docs/sharding_measured.md has {count} places for {name}"
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--write", action="store_true", help="write the figures into docs/sharding_measured.md"
    )
    parser.add_argument("--rounds", type=int, default=30, help="number of rounds of each case")
    parser.add_argument("--only", default="", help="run only models whose name contains this")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", max(DEVICES))
    results: Results = {}
    for name in CASES:
        for n in DEVICES:
            for stage in STAGES:
                if args.only in name:
                    f = results[name, n, stage] = measured(name, n, stage, args.rounds)
                    print(
                        f"{name}, {n} devices, stage {stage}: {f.ratio:.2f}, memory "
                        f"{f.peak[0] / f.peak[1]:.3f}",
                        flush=True,
                    )
    parts = figures(results)
    print(*parts.values(), sep="\n\n")
    if args.write:
        page = DOCS / "sharding_measured.md"
        page.write_text(written(page.read_text(), parts))


if __name__ == "__main__":
    main()
