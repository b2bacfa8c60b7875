"""One role of a job in test_callback_processes.py. The step calls the host by each of JAX's
callbacks.

The first argument is the strategy, the second a folder. The process writes the arguments of all
calls, in order, to `trainer-K.npz` or `pserver-K.npz` in this folder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import io_callback

import dtrans


STEPS, ROWS, TX = 3, 12, optax.adam(0.1)
LATE = {"nccl2"}  # strategies in which callbacks may read gradients and new parameters
CALLED: list[tuple[str, np.ndarray]] = []


def note(name: str) -> Callable[[Any], None]:
    return lambda value: CALLED.append((name, np.array(value)))


def doubled(value: Any) -> np.ndarray:
    """Double a gradient, on the host."""
    CALLED.append(("pure_callback", np.array(value)))
    return 2 * np.asarray(value)


def init(key: jax.Array) -> Any:
    params = {"w": jax.random.normal(key, (2,)), "b": jnp.zeros(())}
    return params, TX.init(params)


def loss_of(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def step_of(strategy: str) -> Callable[..., Any]:
    def step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        jax.debug.print("loss {:.5f}", loss)
        jax.debug.callback(note("debug.callback loss"), loss)
        jax.debug.callback(note("debug.callback rows"), x[:, 0])
        io_callback(note("io_callback"), None, jnp.sum(y))
        w = jax.pure_callback(doubled, jax.ShapeDtypeStruct((2,), x.dtype), grads["w"])
        updates, opt_state = TX.update({**grads, "w": w}, opt_state, params)
        new = optax.apply_updates(params, updates)
        if strategy in LATE:
            jax.debug.print("norm {:.5f}", optax.tree.norm(grads))
            jax.debug.callback(note("debug.callback gradient"), grads["w"])
            jax.debug.callback(note("debug.callback new"), new["w"])
            io_callback(note("io_callback gradient"), None, grads["b"])
        return new, opt_state, loss

    return step


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    made = [(rng.normal(size=(ROWS, 2)), rng.normal(size=ROWS)) for _ in range(STEPS)]
    return [(x.astype(np.float32), y.astype(np.float32)) for x, y in made]


def calls() -> dict[str, np.ndarray]:
    """Return the calls since the last time: name of the callback -> its calls in order."""
    jax.effects_barrier()
    found = {name: np.stack([x for n, x in CALLED if n == name]) for name in dict(CALLED)}
    CALLED.clear()
    return found


def plan_of(strategy: str, role: dtrans.Role) -> Any:
    key, batch = jax.random.key(0), batches()[0]
    main = dtrans.trace(step_of(strategy), *jax.eval_shape(init, key), *batch)
    startup = dtrans.trace(init, key)
    if strategy == "nccl2":
        return dtrans.nccl2(main, startup, trainers=role.trainers)
    if strategy == "sharding":
        return dtrans.sharding(
            main, startup, degree=role.trainers, slices=dtrans.Slicing(min_slice_size=0)
        )
    return dtrans.pserver(main, startup, pservers=role.pservers, trainers=role.trainers)


def main(strategy: str, folder: str) -> None:
    role = dtrans.Role.from_env()
    if not role.pserver_endpoints:
        dtrans.connect(deadline=60)
    with plan_of(strategy, role).on_cluster(
        **({"deadline": 60} if role.pserver_endpoints else {})
    ) as job:
        state, found = job.init(jax.random.key(0)), {}
        if role.is_pserver:
            job.serve(state)
        else:
            for batch in batches():
                state, _ = job.step(state, *job.shard_batch(*batch))
            found = {f"params/{n}": np.asarray(x) for n, x in job.params(state).items()}
        np.savez(Path(folder) / f"{role.name.replace(' ', '-')}.npz", **found, **calls())


if __name__ == "__main__":
    main(*sys.argv[1:])
