"""One role of the jobs in test_lifecycle.py, test_failed_saves.py and test_sync_server.py.

The process prints its progress, and waits at gates until the test lets it continue. Its argument is
JSON: the name of a function of this module, and the function's arguments.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np


def say(what: str) -> None:
    print(what, flush=True)


def gate(what: str) -> None:
    """Wait until the test lets this process continue."""
    say(what)
    assert sys.stdin.readline() == "go\n"


def flat(tree: Any) -> dict[str, np.ndarray]:
    """Return the leaves of a pytree as arrays by path, for an npz file."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x)
        for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def pserver(job: dict[str, Any]) -> None:
    """Serve several jobs one after the other, each with the final state of the previous job."""
    from lifecycle_job import params_of, plan_for

    import dtrans

    plan = plan_for(job["pservers"], job["trainers"])
    role = plan.servers[job["pservers"][job["index"]]]
    with dtrans.Executor(deadline=60) as exe:
        state = exe.run(role.startup, params_of())
        for i in range(job["jobs"]):
            say(f"serving {i}")
            state = exe.run(role.main, state)
    np.savez(job["out"], **state)


def trainer(job: dict[str, Any]) -> None:
    """Take the steps from `first` on, with a gate before the step that `gate` names.

    With `stays`, there is also a gate before the trainer closes its connections.
    """
    from lifecycle_job import batch_of, params_of, plan_for, rows

    import dtrans

    k = job["index"]
    plan = plan_for(job["pservers"], job["trainers"])
    with dtrans.Executor(deadline=60) as exe:
        say("connecting")
        params = exe.run(plan.trainer_startup_program(k), params_of())
        for i in range(job["first"], job["first"] + job["steps"]):
            (gate if i == job.get("gate") else say)(f"step {i}")
            params, _ = exe.run(
                plan.trainer_program(k), params, *rows([k], batch_of(i, job["trainers"]))
            )
        jax.block_until_ready(params)
        if job["stays"]:
            gate("done")
    np.savez(job["out"], **flat(params))


def saving(job: dict[str, Any]) -> None:
    """Take a role of a job that saves checkpoints after some of its steps.

    Args:
      job: a dict. `role` is the environment of the role, `start` the checkpoint to continue from,
        `first` and `last` the steps. `data` is an offset by which each run gets different batches.
        `saves` has the name of the checkpoint that trainer 0 requests after each of some steps. The
        writer of the checkpoint `held` waits in the middle of its piece until the process is
        killed. The checkpoints `refused` may fail; for some of them, the dict has the system call
        that fails and its error.
    """
    from lifecycle_job import batch_of, params_of, plan_for

    import dtrans
    from dtrans.errors import CheckpointError

    os.environ.update(job["role"])
    role, folder, said = dtrans.Role.from_env(), Path(job["folder"]), dict[str, str]()
    if job["held"]:
        hold(folder / job["held"])
    if role.is_pserver:
        for name, failure in job["refused"].items():
            refuse(folder / name, *failure)
    with plan_for(role.pserver_endpoints, role.trainers).on_cluster(deadline=60) as cluster:
        state = (
            dtrans.checkpoint.restore(job["start"], cluster)
            if job["start"]
            else cluster.init(params_of())
        )
        if role.is_pserver:
            np.savez(job["out"], **cluster.serve(state, checkpoints=folder))
            return
        for i in range(job["first"], job["last"]):
            state, _ = cluster.step(
                state, *cluster.shard_batch(*batch_of(job["data"] + i, role.trainers))
            )
            name = job["saves"].get(str(i + 1))
            if role.trainer_id or name is None:
                continue
            try:
                cluster.save(name)
            except CheckpointError as e:
                if name not in job["refused"]:
                    raise
                said[f"said/{name}"] = str(e)
        np.savez(job["out"], **said, **flat(cluster.params(state)))


def hold(checkpoint: Path) -> None:
    """Make the writer of a piece wait after the last file, before it renames the folder."""
    from dtrans.checkpoint import orbax_io

    written = orbax_io._sync_tree

    def sync_tree(folder: Path) -> None:
        written(folder)
        if checkpoint in Path(folder).parents:
            say("in the middle")
            threading.Event().wait()

    orbax_io._sync_tree = sync_tree


def refuse(checkpoint: Path, call: str = "", code: int = 0) -> None:
    """Let a system call fail on files of a checkpoint."""
    real = getattr(os, call, None)
    if real is None:
        return

    def refused(file: Any, *args: Any, **options: Any) -> Any:
        path = Path(os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else file)
        if path == checkpoint or checkpoint in path.parents:
            raise OSError(code, os.strerror(code))
        return real(file, *args, **options)

    setattr(os, call, refused)


def matrix_pserver(job: dict[str, Any]) -> None:
    """Serve a job for each optimizer, in this process."""
    from sync_matrix_job import OPTIMIZERS, init_of, plan_for

    import dtrans

    found: dict[str, np.ndarray] = {}
    with dtrans.Executor(deadline=120) as exe:
        for name in OPTIMIZERS:
            plan = plan_for(name, job["pservers"], job["trainers"])
            role = plan.servers[job["pservers"][job["index"]]]
            state = exe.run(role.main, exe.run(role.startup, *init_of(name)[1]))
            found |= {f"{name}/{n}": np.asarray(x) for n, x in state.items()}
    np.savez(job["out"], **found)


def matrix_trainer(job: dict[str, Any]) -> None:
    """Train with each optimizer, in this process: a trainer has an executor for each job."""
    from sync_matrix_job import OPTIMIZERS, STEPS, batch_of, init_of, part_of, plan_for

    import dtrans

    k, n = job["index"], job["trainers"]
    found: dict[str, np.ndarray] = {}
    for name in OPTIMIZERS:
        plan = plan_for(name, job["pservers"], n)
        program = plan.trainer_program(k)
        with dtrans.Executor(deadline=120) as exe:
            params = exe.run(plan.trainer_startup_program(k), *init_of(name)[1])
            losses = []
            for i in range(STEPS):
                params, loss = exe.run(program, params, *part_of(batch_of(i, n), k, n))
                losses.append(np.asarray(loss))
        found |= {f"{name}/{path}": x for path, x in flat(params).items()} | {
            f"{name}/losses": np.stack(losses)
        }
    np.savez(job["out"], **found)


def exact_job(job: dict[str, Any]) -> None:
    """Take a role of the job that `module` plans; `role` is its environment."""
    import dtrans

    planned = importlib.import_module(job["module"])

    os.environ.update(job["role"])
    role = dtrans.Role.from_env()
    found: dict[str, np.ndarray] = {}
    with planned.plan_for(role.pserver_endpoints).on_cluster(deadline=60) as cluster:
        state = cluster.init(*planned.init_args())
        if role.is_pserver:
            np.savez(job["out"], **cluster.serve(state))
            return
        for i in range(len(planned.ROWS)):
            part = cluster.shard_batch(*planned.batch_of(i))
            found[f"rows/{i}"] = np.asarray(len(getattr(part[0], "x", part[0])))
            state, *results = cluster.step(state, *part)
            found |= {f"results/{i}/{n}": x for n, x in flat(results).items()}
        found |= {f"params/{n}": x for n, x in flat(cluster.params(state)).items()}
    np.savez(job["out"], **found)


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent)]
    what = json.loads(sys.argv[1])
    jax.config.update("jax_enable_x64", what["x64"])
    if "devices" in what:
        jax.config.update("jax_num_cpu_devices", what["devices"])
    roles = (pserver, trainer, saving, matrix_pserver, matrix_trainer, exact_job)
    {fn.__name__: fn for fn in roles}[what["do"]](what)
