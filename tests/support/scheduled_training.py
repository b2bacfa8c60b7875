"""Complete training of a tiny model as one role of a job that a scheduler started.

`DTRANS_*` variables determine the role and the mode. Trainer 0 saves the final parameters; `plain`
returns the final parameters of one device.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import dtrans
from dtrans.run.distributed.role import Role


STEPS, ROWS = 3, 8


def training() -> tuple[Any, Any, Any, list[Any]]:
    """Return step, init, parameters and batches."""
    import optax
    from helpers import init_of, mlp_batch, mlp_loss, mlp_params

    tx = optax.sgd(0.1, momentum=0.9)
    batches = [mlp_batch(ROWS, seed=s) for s in range(STEPS)]
    return dtrans.make_train_step(mlp_loss, tx), init_of(tx), mlp_params(), batches


def plain() -> dict[str, Any]:
    """Return the parameters of one device after all steps."""
    from helpers import plain_run

    step, init, params, batches = training()
    return dict(plain_run(step, *init(params), batches)[0])


def main(saved: Path) -> None:
    role = Role.from_env()
    if role.mode == "nccl2":
        dtrans.connect()

    # `connect` must run before JAX creates devices, so these imports come after it
    import jax
    import numpy as np

    step, init, params, batches = training()
    state = jax.eval_shape(init, params)
    traced = dtrans.trace(step, *state, *batches[0]), dtrans.trace(init, params)
    if role.mode == "nccl2":
        plan = dtrans.nccl2(*traced, trainers=role.trainers)
    else:
        plan = dtrans.pserver(*traced, pservers=role.pservers, trainers=role.trainers)
    with plan.on_cluster() as job:
        if role.is_pserver:
            job.serve(job.init(params))
            return
        state = job.init(params)
        for batch in batches:
            state, _ = job.step(state, *job.shard_batch(*batch))
        found = job.params(state)
    if role.trainer_id == 0:
        np.savez(saved, **{name: np.asarray(value) for name, value in found.items()})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
