"""Sharding beside what JAX users write today: `python benchmarks/sharding.py`; `--write` puts it
into docs/sharding_measured.md.

    ours        `dtrans.sharding(main, startup, stage=1|2|3, degree=N).on_mesh()`
    annotated   jax.jit of the step for one device with NamedShardings: the optimizer's state is cut (stage 1),
                gradients are constrained to be (2), and so are parameters (3). Activations are held
                to the axis of the batch

Both keep a leaf of fewer than `LEAST` elements whole and cut others along the same dimension,
donate their state, and get a batch that is there already. Both are stepped in turn, in one process,
and must give the same losses.

Virtual CPU devices share the cores of the machine: a ratio of times here says what the programs
cost in work and in waiting for each other, and nothing about links.
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
    # in loops too, where jobs on CPUs do not gather ahead by themselves
    "3, prefetch=1": {
        "stage": 3,
        "slices": dtrans.Slicing(prefetch=1),
    },
}
DEVICES = (2, 8)
LEAST = 1024  # the default of min_slice_size
TARGET = 1.05
DOCS = Path(__file__).resolve().parent.parent / "docs"


@dataclasses.dataclass(frozen=True)
class Case:
    """A model to train.

    Attributes:
      make: the model, of what holds activations to the axis of the batch.
      axis: the dimension along which its large leaves are cut: the second where the first is that
        of layers.
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
    """One of the two.

    Attributes:
      run: takes one step more; the loss.
      compiled: the step.
      state: the arrays that are there now.
      params: the parameters as they are now.
    """

    run: Callable[[], jax.Array]
    compiled: Any
    state: Callable[[], Sequence[jax.Array]]
    params: Callable[[], Any]

    @property
    def collectives(self) -> collections.Counter[str]:
        """Collectives in the compiled step, as often as they are written."""
        kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
        return collections.Counter(re.findall(rf" ({kinds})(?:-start)?\(", self.compiled.as_text()))

    @property
    def peak(self) -> int:
        """Bytes that a device has to have for a step."""
        m = self.compiled.memory_analysis()
        held = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
        return int(held + m.temp_size_in_bytes)

    @property
    def held(self) -> int:
        """Bytes of state that the first device has between steps."""
        return sum(x.addressable_shards[0].data.nbytes for x in self.state())


def annotated(case: Case, stage: int, mesh: Mesh) -> Side:
    """The step for one device, compiled by XLA for all of them."""
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
    """The same step, sharded by dtrans."""
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
    """(ours, annotated, our plan), three steps on; the losses of these agree, and so do
    parameters."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("shard",))
    mine, plan = ours(CASES[name], STAGES[stage], mesh)
    theirs = annotated(CASES[name], STAGES[stage]["stage"], mesh)
    a, b = ([float(side.run()) for _ in range(3)] for side in (mine, theirs))
    np.testing.assert_allclose(a, b, rtol=1e-5)
    pairs = zip(jax.tree.leaves(mine.params()), jax.tree.leaves(theirs.params()), strict=True)
    # Adam divides by the size of a gradient: where that is next to nothing, its sign is a matter of
    # rounding
    assert max(float(jnp.mean(jnp.abs(x - y))) for x, y in pairs) < 1e-5
    return mine, theirs, plan


# -- what is measured ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Figures:
    """Of one case.

    Attributes:
      wall, processor: milliseconds of a step, ours and annotated.
      quartiles: of the ratio of wall times, over rounds.
      work: the median ratio of processor times.
      peak, held: bytes on a device, ours and annotated.
      formula: bytes of state that there should be.
      psi: bytes of parameters.
      traffic: bytes that ours moves, by collective.
      collectives: in the compiled steps.
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
    """Step both in turn."""
    mine, theirs, plan = sides(name, devices, stage)
    start = time.perf_counter()
    jax.block_until_ready([mine.run(), theirs.run()])
    steps = max(1, round(0.1 / (time.perf_counter() - start)))  # of a round: about 50 ms

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
    """In Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def times_of(results: Results) -> str:
    """The table of ratios."""
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
    """The table of bytes."""
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
    """The table of what moves."""
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
    """What the page has between its markers, by name."""
    return {
        "times": times_of(results),
        "memory": memory_of(results),
        "traffic": traffic_of(results),
    }


def written(page: str, parts: dict[str, str]) -> str:
    """The page with other figures between `<!-- name -->` and `<!-- /name -->`."""
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
    parser.add_argument("--rounds", type=int, default=30, help="of each case")
    parser.add_argument("--only", default="", help="models whose name has this in it")
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
