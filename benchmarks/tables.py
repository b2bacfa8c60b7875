"""Jobs of `test_sparse.py`: a table on two parameter servers.

    python tables.py pserver SHAPE ENDPOINT ALL,ENDPOINTS    a server
    python tables.py trainer SHAPE ALL,ENDPOINTS             the last trainer

pytest's process is the first trainer; this file runs the other processes. For each number on
standard input, the last trainer runs this number of steps. It prints their seconds, and by how
many MB its peak memory exceeds the memory after the imports.

A step looks up rows of a table by id, and updates them with Adagrad, which does not change other
rows. SHAPE is a `Shape` as text.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dtrans


STRIDE, EXPONENT, LEARNING_RATE = 2_654_435_761, 1.05, 0.1
tx = optax.adagrad(LEARNING_RATE)
MODES = {"sync": dtrans.Sync(), "async": dtrans.Async(), "geo": dtrans.Geo(push_every=100)}
Steps = Callable[[int], float]  # runs this number of steps, and returns the seconds


@dataclasses.dataclass(frozen=True)
class Shape:
    """A table, and the job that trains it.

    Attributes:
      rows, width: the shape of the table.
      ids: the number of ids that each trainer looks up in a step.
      drawn: the distribution of the ids: "uniform" or "zipf".
      sparse: True if trainers receive only the rows that they look up, False if they receive all.
      trainers: the number of trainers.
      mode: "sync", "async" or "geo" (GEO-SGD, which sends changes every 100 steps).
    """

    rows: int
    width: int
    ids: int
    drawn: str = "uniform"
    sparse: bool = True
    trainers: int = 2
    mode: str = "sync"

    def __str__(self) -> str:
        return ",".join(str(x) for x in dataclasses.astuple(self))

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Return the shape from its text."""
        rows, width, ids, drawn, sparse, trainers, mode = text.split(",")
        return cls(int(rows), int(width), int(ids), drawn, sparse == "True", int(trainers), mode)

    def batch(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return random row ids, and targets."""
        if self.drawn == "uniform":
            ids = rng.integers(0, self.rows, self.ids)
        else:
            most = (self.rows + 1.0) ** (1 - EXPONENT)
            rank = ((1 - rng.random(self.ids) * (1 - most)) ** (1 / (1 - EXPONENT))).astype(
                np.int64
            ) - 1
            ids = np.minimum(rank, self.rows - 1) * STRIDE % self.rows
        return ids.astype(np.int32), np.ones(self.ids, np.float32)


def loss(params: Any, ids: jax.Array, y: jax.Array) -> jax.Array:
    """Return the squared error of a linear function of the looked-up rows."""
    return jnp.mean((params["emb"][ids] @ params["w"] - y) ** 2)


step = dtrans.make_train_step(loss, tx)


def init_of(shape: Shape) -> Callable[[], Any]:
    """Return the init of the parameters and the optimizer state."""

    def init() -> Any:
        rows = 0.01 * jax.random.normal(jax.random.key(0), (shape.rows, shape.width))
        params = {"emb": rows, "w": jnp.ones(shape.width)}
        return params, tx.init(params)

    return init


def plan_for(shape: Shape, endpoints: str) -> dtrans.PServerPlan:
    """Return the plan of the job."""
    init, batch = init_of(shape), shape.batch(np.random.default_rng(0))
    return dtrans.pserver(
        dtrans.trace(step, *jax.eval_shape(init), *batch),
        dtrans.trace(init),
        pservers=endpoints,
        trainers=shape.trainers,
        mode=MODES[shape.mode],
        sparse={"params/emb": dtrans.Rows()} if shape.sparse else None,
    )


def stepping(exe: dtrans.Executor, shape: Shape, plan: dtrans.PServerPlan, trainer: int) -> Steps:
    """Return a function that runs steps of one trainer."""
    begins, rng = exe.run(plan.trainer_startup_program(trainer)), np.random.default_rng(trainer)
    box = list(begins) if shape.mode == "geo" else [begins]
    program = plan.trainer_program(trainer)

    def steps(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            *box[:], value = exe.run(program, *box, *shape.batch(rng))
        jax.block_until_ready(value)
        return time.perf_counter() - start

    return steps


def announcing(exe: dtrans.Executor, shape: Shape, plan: dtrans.PServerPlan) -> tuple[Steps, Steps]:
    """Return two functions that run steps of a single trainer.

    The first requests the rows of the next step during the current step. The second requests the
    rows of a step when it begins.
    """
    box, rng, program = (
        [exe.run(plan.trainer_startup_program(0))],
        np.random.default_rng(0),
        plan.trainer_program(0),
    )

    def steps(count: int, *, ahead: bool) -> float:
        start = time.perf_counter()
        batch = shape.batch(rng)
        for i in range(count):
            after = shape.batch(rng)
            if ahead and i < count - 1:
                exe.announce(program, *after)
            box[0], value = exe.run(program, box[0], *batch)
            batch = after
        jax.block_until_ready(value)
        return time.perf_counter() - start

    return functools.partial(steps, ahead=True), functools.partial(steps, ahead=False)


def dense_steps(shape: Shape) -> Steps:
    """Return a function that runs steps on one device, where Adagrad updates all rows."""
    box, rng = [*init_of(shape)()], np.random.default_rng(0)
    jitted = jax.jit(step, donate_argnums=(0, 1))

    def steps(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            *box[:], value = jitted(*box, *shape.batch(rng))
        jax.block_until_ready(value)
        return time.perf_counter() - start

    return steps


def row_steps(shape: Shape) -> Steps:
    """Return a function that runs steps on one device, and updates only the looked-up rows."""
    params, _ = init_of(shape)()
    box: list[Any] = [params, jax.tree.map(lambda x: jnp.full_like(x, 0.1), params)]
    rng = np.random.default_rng(0)

    def by_rows(params: Any, sums: Any, uniq: jax.Array, at: jax.Array, y: jax.Array) -> Any:
        rows = lambda tree: {"emb": jnp.take(tree["emb"], uniq, 0, mode="clip"), "w": tree["w"]}
        back = lambda tree, new: {
            "emb": tree["emb"].at[uniq].set(new["emb"], mode="drop"),
            "w": new["w"],
        }
        here = rows(params)
        value, g = jax.value_and_grad(loss)(here, at, y)
        new = jax.tree.map(lambda s, g: s + g * g, rows(sums), g)
        moved = jax.tree.map(
            lambda x, g, s: x - LEARNING_RATE * g * jax.lax.rsqrt(s + 1e-7), here, g, new
        )
        return back(params, moved), back(sums, new), value

    jitted = jax.jit(by_rows, donate_argnums=(0, 1))

    def steps(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            ids, y = shape.batch(rng)
            uniq, at = np.unique(ids, return_inverse=True)
            uniq = np.concatenate([uniq, np.full(len(ids) - len(uniq), shape.rows, np.int32)])
            *box[:], value = jitted(*box, uniq, at.astype(np.int32), y)
        jax.block_until_ready(value)
        return time.perf_counter() - start

    return steps


def peak() -> float:
    """Return the peak memory of this process, in MB."""
    (line,) = (
        x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM")
    )
    return int(line.split()[1]) / 1024


def main() -> None:
    """Run the role of the command line."""
    before, what, shape, *where, every = (
        peak(),
        sys.argv[1],
        Shape.parse(sys.argv[2]),
        *sys.argv[3:],
    )
    plan = plan_for(shape, every)
    with dtrans.Executor(deadline=200) as exe:
        if what == "pserver":
            programs = plan.servers[where[0]]
            exe.run(programs.main, exe.run(programs.startup))
            return
        steps = stepping(exe, shape, plan, shape.trainers - 1)
        for line in sys.stdin:
            print(steps(int(line)), peak() - before, flush=True)


if __name__ == "__main__":
    main()
