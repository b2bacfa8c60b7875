"""One rank of the jobs in test_sharding_cluster.py, whose role `dtrans.Role` reads.

The first argument is the name of a function of this module, and the other arguments belong to it.
The rank writes its results to `trainer-K.npz` in a folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
from cluster_trainer import flat, refused

import dtrans
from dtrans import checkpoint


ROWS, STEPS, STAGES = 24, 3, (1, 2, 3)


def optimizer() -> Any:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    out = jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"] * params["scale"]
    return jnp.mean((out - y) ** 2), {"out": out}


def init_from(mean: np.ndarray) -> Any:
    """Return an init with a constant, and with state that no rank computes in full.

    The number of rows is odd, so slices have padding.
    """

    def init(key: jax.Array) -> Any:
        k1, k2 = jax.random.split(key)
        w1, w2 = jax.random.normal(k1, (5, 7)) + mean, jax.random.normal(k2, (7, 3))
        params = {"w1": w1, "b1": jnp.zeros(7), "w2": w2, "scale": jnp.ones(())}
        return params, optimizer().init(params)

    return init


def mean_of(k: int) -> np.ndarray:
    return np.linspace(0.0, 0.5 + k, 35).reshape(5, 7)


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    draw = lambda columns: rng.normal(size=(ROWS, columns))
    return [(draw(5), draw(3)) for _ in range(2 * STEPS)]


def step() -> Any:
    return dtrans.make_train_step(loss_fn, optimizer(), has_aux=True)


def planned(k: int = 0, rows: int = ROWS, **options: Any) -> Any:
    """Return the plan of rank k, whose init has other constants than the plans of other ranks."""
    (x, y), init, key = batches()[0], init_from(mean_of(k)), jax.random.key(0)
    main = dtrans.trace(step(), *jax.eval_shape(init, key), x[:rows], y[:rows])
    return flat_options.sharding(main, dtrans.trace(init, key), min_slice_size=0, **options)


def train(folder: Path, options: str) -> None:
    """Train in every stage; save the last state of each stage, and continue from another job's
    state.
    """
    given: dict[str, Any] = json.loads(options)
    cluster = dtrans.connect(deadline=30)
    k, n = cluster.trainer_id, cluster.trainers
    part = lambda xs: tuple(x[k * ROWS // n : (k + 1) * ROWS // n] for x in xs)
    found, said = {"run": np.array(cluster.run)}, {}
    for stage in given["stages"]:
        plan = planned(k, stage=stage, **given["plan"])
        job = plan.on_cluster()
        state = job.init(jax.random.key(100 * k))  # all ranks start from rank 0's state
        found |= flat(**{f"{stage} first": (job.params(state), job.opt_state(state))})
        for i, batch in enumerate(batches()[:STEPS]):
            before = state
            state, loss, aux = job.step(state, *part(batch))
            found |= flat(**{f"{stage} {i}": {"loss": loss, "aux": aux}})
        for name, x in {**state.params, **state.opt_state}.items():
            found[f"{stage} held {name}"] = np.asarray(x.addressable_data(0))
        found |= flat(**{f"{stage} last": (job.params(state), job.opt_state(state))})
        found |= flat(**{f"{stage} applied": job.apply(loss_fn, state, *batches()[0])})
        assert all(x.is_fully_addressable for x in jax.tree.leaves((job.params(state), loss, aux)))
        checkpoint.save(folder / f"stage {stage}", job, state)
        said[f"{stage} donated"] = refused(job.step, before, *part(batch))
        said[f"{stage} saved"] = refused(checkpoint.save, folder / "gone", job, before)
    # calls that must raise an error, on all ranks or on one
    said["rows"] = refused(job.step, state, *(x[: 1 + k] for x in batch))
    said["ragged"] = refused(job.step, state, batch[0][:3], batch[1][:2])
    said["count"] = refused(planned(degree=n + 1).on_cluster)
    mixed = planned(stage=1 + (k > 0), **given["plan"]).on_cluster()
    said["state"] = refused(mixed.step, state, *part(batch))
    said["stage"] = refused(mixed.step, mixed.init(jax.random.key(0)), *part(batch))
    keeps = planned(stage=stage, **given["plan"]).on_cluster(donate=False)
    kept = keeps.init(jax.random.key(0))
    after = [flat(now=keeps.step(kept, *part(batch))[1]) for _ in range(2)]
    assert after[0] == after[1]
    other = dtrans.trace(
        lambda key: init_from(mean_of(0))(jax.random.fold_in(key, k)), jax.random.key(0)
    )
    odd = flat_options.sharding(plan.main, other, min_slice_size=0, **given["plan"])
    said["init"] = refused(odd.on_cluster().init, jax.random.key(0))
    if given["start"] is not None:
        for stage in given["stages"]:
            job = planned(stage=stage, **given["plan"]).on_cluster()
            state = checkpoint.restore(given["start"], job)
            found |= flat(**{f"{stage} restored": (job.params(state), job.opt_state(state))})
            for batch in batches()[STEPS:]:
                state, *_ = job.step(state, *part(batch))
            found |= flat(**{f"{stage} again": (job.params(state), job.opt_state(state))})
    np.savez(folder / f"trainer-{k}.npz", said=np.array(list(said.items())), **found)


def drop(folder: Path) -> None:
    """Request a job that continues without failed ranks."""
    cluster = dtrans.connect(deadline=30, on_trainer_loss="drop")
    said = {"drop": refused(planned(degree=cluster.trainers).on_cluster)}
    np.savez(folder / f"trainer-{cluster.trainer_id}.npz", said=np.array(list(said.items())))


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    {job.__name__: job for job in (train, drop)}[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
