"""Memory of sharding stage 3 for many kinds of loops: `python benchmarks/sharding_shapes.py`.

`--write` writes the table to docs/sharding_measured.md.

The table compares the temporary memory of two compiled steps on eight devices: the step of dtrans,
and the step of `jax.jit` with `NamedSharding`. Both steps shard the same leaves along the same
dimensions. The unit Psi is the bytes of all parameters. XLA computes the figures when it compiles
(`memory_analysis()`); no step runs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from sharding import DOCS, table, written

import dtrans


sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from loop_shapes import SHAPES, Shape


DEVICES, LAYERS, WIDTH, ROWS = 8, 16, 512, 64
ADAM = optax.adam(1e-3)
LEAST = 1024  # the default of min_slice_size


def temporaries(compiled: Any) -> int:
    """Return the bytes of temporary memory on a device."""
    return int(compiled.memory_analysis().temp_size_in_bytes)


def measured(shape: Shape) -> tuple[float, float, int]:
    """Return the temporary memory of ours and of `jax.jit`, and the sharded dimension.

    The unit is Psi.
    """

    def init() -> Any:
        params = shape.params(LAYERS, WIDTH)
        return params, ADAM.init(params)

    types = jax.eval_shape(init)
    x = jnp.zeros((ROWS, WIDTH))
    plan = dtrans.sharding(
        dtrans.trace(dtrans.make_train_step(shape.loss, ADAM), *types, x),
        dtrans.trace(init),
        stage=3,
        degree=DEVICES,
    )
    job = plan.on_mesh()
    ours = job.lower(job.init(), x).compile()
    axes = {s.axis for s in plan.slices.leaves.values()}
    (axis,) = axes
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("shard",))
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("shard"))
    cut = NamedSharding(mesh, P(*[None] * axis, "shard"))
    params, state = jax.tree.map(lambda t: cut if t.size >= LEAST else whole, types)

    def step(p: Any, s: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(shape.loss)(p, x)
        updates, s = ADAM.update(jax.lax.with_sharding_constraint(grads, params), s, p)
        return optax.apply_updates(p, updates), s, loss

    shardings = (params, state, rows), (params, state, whole)
    annotated = jax.jit(
        step, in_shardings=shardings[0], out_shardings=shardings[1], donate_argnums=(0, 1)
    )
    psi = sum(t.size * t.dtype.itemsize for t in jax.tree.leaves(types[0]))
    return temporaries(ours) / psi, temporaries(annotated.lower(*types, x).compile()) / psi, axis


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="run only shapes whose name contains this")
    parser.add_argument(
        "--write", action="store_true", help="write the table into docs/sharding_measured.md"
    )
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    rows: list[list[str]] = []
    for name, shape in SHAPES.items():
        if args.only not in name:
            continue
        ours, annotated, axis = measured(shape)
        mark = "**" * (ours <= 1.05 * annotated)
        rows.append(
            [
                name,
                str(axis),
                f"{ours:.3f}",
                f"{annotated:.3f}",
                f"{mark}{ours / annotated:.2f}{mark}",
            ]
        )
        print(*rows[-1], sep="\t", flush=True)
    if args.write:
        page = DOCS / "sharding_measured.md"
        head = (
            "how the model reads its layers",
            "sharded along",
            "ours",
            "annotated",
            "ours / annotated",
        )
        page.write_text(written(page.read_text(), {"shapes": table(head, rows)}))


if __name__ == "__main__":
    main()
