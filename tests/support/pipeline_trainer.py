"""One process of the jobs in test_pipeline_cluster.py: a script that `dtrans.Role` tells who it is. Its arguments are a
folder and options of the plan. What it finds goes to `trainer-K.npz` in the folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import flat_options
import jax
import numpy as np
import optax
from cluster_trainer import flat, refused
from pipeline_models import MODELS

import dtrans


STEPS, ROWS = 3, 8


def main(folder: Path, given: dict[str, Any]) -> None:
    """Train, and say what was found."""
    jax.config.update("jax_num_cpu_devices", given.pop("devices"))
    jax.config.update("jax_enable_x64", True)
    cluster = dtrans.connect(deadline=given.pop("deadline", 30))
    k = cluster.trainer_id
    clipped = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))
    one = MODELS[given.pop("model")].job(ROWS, clipped)
    step, init = one.traced()
    said = {}
    plan = flat_options.pipeline(step, init, **given)
    job = plan.on_cluster()
    state = job.init(jax.random.key(0))
    found: dict[str, Any] = {}
    for i in range(STEPS):
        state, loss = job.step(state, *one.batch)
        found |= flat(**{f"loss {i}": loss})
    found |= flat(last=(job.params(state), job.opt_state(state)))
    held = sorted({**state.params, **state.opt_state})
    said["odd"] = refused(dtrans.pipeline(step, init, num_stages=cluster.trainers + 1).on_cluster)
    np.savez(folder / f"trainer-{k}.npz", said=np.array(list(said.items())), held=np.array(held), **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
