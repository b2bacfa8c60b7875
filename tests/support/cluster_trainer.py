"""One trainer of the jobs in test_cluster.py, whose role `dtrans.Role` reads from the environment.

The first argument is the name of a function of this module. The other arguments belong to this
function. The trainer writes its results to `trainer-K.npz` in a folder.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax

import dtrans
from dtrans.errors import DtransError


ROWS, STEPS = 24, 5  # rows of a global batch
SURVIVED = 8  # steps of each surviving trainer


def optimizer(rate: float = 1e-2) -> Any:
    return optax.chain(optax.clip_by_global_norm(0.1), optax.adam(rate))


def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    out = jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"]
    return jnp.mean((out - y) ** 2), {"out": out, "wrong": jnp.sum(out * y < 0)}


def noisy_loss(params: Any, x: jax.Array, y: jax.Array, key: jax.Array) -> jax.Array:
    return jnp.mean((x * jax.random.normal(key, x.shape) @ params["w1"] @ params["w2"] - y) ** 2)


def init(key: jax.Array) -> Any:
    k1, k2 = jax.random.split(key)
    params = {
        "w1": jax.random.normal(k1, (5, 6)),
        "b1": jnp.zeros(6),
        "w2": jax.random.normal(k2, (6, 2)),
    }
    return params, optimizer().init(params)


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(ROWS, 5)), rng.normal(size=(ROWS, 2))) for _ in range(STEPS)]


def programs(
    loss: Callable[..., Any] = loss_fn, rows: int = 2, *more: Any, rate: float = 1e-2
) -> tuple[Any, Any]:
    """Return the traced step and the traced init."""
    step = dtrans.make_train_step(loss, optimizer(rate), has_aux=loss is loss_fn)
    (x, y), key = batches()[0], jax.random.key(0)
    return dtrans.trace(step, *jax.eval_shape(init, key), x[:rows], y[:rows], *more), dtrans.trace(
        init, key
    )


def flat(**trees: Any) -> dict[str, np.ndarray]:
    """Return the leaves of pytrees as arrays by path, for an npz file."""
    return {
        name + jax.tree_util.keystr(path): np.asarray(x)
        for name, tree in trees.items()
        for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def refused(fn: Callable[..., Any], *args: Any, **options: Any) -> str:
    """Return the text of the error that a call raises."""
    try:
        fn(*args, **options)
    except (DtransError, RuntimeError) as e:
        return f"{type(e).__name__}: {e}"
    return "nothing"


def numbers(folder: str) -> None:
    """Train in both ways, and make calls that must raise an error."""
    role, said = dtrans.Role.from_env(), {}
    mine = {n: os.environ.pop(n) for n in role.environment()}
    said["nobody"] = refused(dtrans.connect, deadline=20)
    said["pserver"] = refused(dtrans.connect, dtrans.Role("trainer", 1, ("127.0.0.1:1",)))
    os.environ |= mine
    early = dtrans.nccl2(*programs_without_arrays(), trainers=role.trainers)
    said["unconnected"] = refused(early.on_cluster)

    cluster = dtrans.connect(deadline=20)
    k, n = cluster.trainer_id, cluster.trainers
    assert (k, n) == (role.trainer_id, role.trainers) and dtrans.connect() is cluster
    other = role.trainer_endpoints[::-1]
    said["another role"] = refused(
        dtrans.connect, dtrans.Role("trainer", n, (), k, other[k], other)
    )
    part = lambda *xs: tuple(x[k * ROWS // n : (k + 1) * ROWS // n] for x in xs)

    main, startup = programs()
    plan = dtrans.nccl2(main, startup, trainers=n)
    job = plan.on_cluster()
    state = job.init(jax.random.key(100 * k))  # all trainers start from trainer 0's state
    found = flat(first=job.params(state), first_state=job.opt_state(state))
    for i, batch in enumerate(batches()):
        before = state
        state, loss, aux = job.step(state, *job.shard_batch(*batch))
        found |= flat(**{f"job{i}": {"loss": loss, "aux": aux}})
    found |= flat(job=job.params(state), job_state=job.opt_state(state))
    assert all(x.is_fully_addressable for x in jax.tree.leaves((job.params(state), loss, aux)))
    said["donated"] = refused(job.step, before, *part(*batch))
    found |= flat(job1_turned=turned(n), uneven=uneven(job))
    said["even"] = refused(job.step, state, *(dtrans.UnevenPart(x, ROWS) for x in part(*batch)))
    said["part"] = refused(
        job.step, state, *(dtrans.UnevenPart(x, ROWS - 1) for x in (batch[0][:2], batch[1][:2]))
    )
    said["rows"] = refused(job.step, state, batch[0][: 7 + k], batch[1][: 7 + k])
    said["ragged"] = refused(job.step, state, batch[0][:3], batch[1][:2])
    said["count"] = refused(dtrans.nccl2(main, startup, trainers=n + 1).on_cluster)
    fused = dtrans.nccl2(
        main, startup, trainers=n, reduce=dtrans.Reduce(bucket_MB=32 if k == 0 else 0)
    )
    said["plan"] = refused(lambda: fused.on_cluster().step(state, *part(*batch)))

    merged = dtrans.nccl2(
        main,
        startup,
        trainers=n,
        batch=dtrans.Batch("local", merge={"aux/wrong": "sum" if k == 0 else "max"}),
    )
    said["merge"] = refused(lambda: merged.on_cluster().step(state, *part(*batch)))
    other_rate = dtrans.nccl2(*programs(rate=1e-2 + k), trainers=n)
    said["rate"] = refused(lambda: other_rate.on_cluster().step(state, *part(*batch)))
    said["dtype"] = refused(
        job.step, state, *(x.astype(np.float32 if k else np.float16) for x in part(*batch))
    )
    wide = dtrans.nccl2(*programs_without_arrays(2 + k), trainers=n).on_cluster()
    said["init"] = refused(wide.init, np.ones(2 + k, np.float32))

    noisy, key = (
        dtrans.nccl2(*programs(noisy_loss, 2, jax.random.key(0)), trainers=n),
        jax.random.key(7),
    )
    job = noisy.on_cluster(donate=False)
    state = job.init(jax.random.key(0))
    for batch in batches()[:2]:
        state, _ = job.step(state, *part(*batch), key)
    found |= flat(noisy=job.params(state))

    t = dtrans.DistributeTranspiler(dtrans.DistributeTranspilerConfig(mode="nccl2"))
    t.transpile(
        k,
        main,
        trainers=",".join(role.trainer_endpoints),
        startup_program=startup,
        current_endpoint=role.current_endpoint,
    )
    trainer = t.get_trainer_program()
    with dtrans.Executor(deadline=20) as exe:
        params, opt_state = exe.run(t.get_trainer_startup_program(), jax.random.key(100 * k))
        for i, batch in enumerate(batches()):
            params, opt_state, loss, aux = exe.run(trainer, params, opt_state, *part(*batch))
            found |= flat(**{f"exe{i}": {"loss": loss, "aux": aux}})
    found |= flat(exe=params, exe_state=opt_state)
    np.savez(Path(folder) / f"trainer-{k}.npz", said=np.array(list(said.items())), **found)


def turned(trainers: int) -> dict[str, Any]:
    """Return the results of a job's second step.

    The batch has the rows of `x` along dimension 1.
    """
    step = dtrans.make_train_step(
        lambda params, x, y: loss_fn(params, x.T, y), optimizer(), has_aux=True
    )
    (x, y), key = batches()[0], jax.random.key(0)
    main, startup = dtrans.trace(step, *jax.eval_shape(init, key), x.T, y), dtrans.trace(init, key)
    job = dtrans.nccl2(
        main, startup, trainers=trainers, batch=dtrans.Batch(axes=(1, 0))
    ).on_cluster()
    state = job.init(key)
    for x, y in batches()[:2]:
        state, loss, aux = job.step(state, *job.shard_batch(x.T, y))
    return {"loss": loss, "aux": aux}


def uneven_batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """Return batches that the number of trainers does not divide, and one batch that it divides.

    The last uneven batch has one row.
    """
    return [
        (x[:rows], y[:rows]) for rows, (x, y) in zip((ROWS - 1, ROWS, 1), batches(), strict=False)
    ]


def uneven(job: Any) -> tuple[Any, ...]:
    """Return the results of steps on the batches of `uneven_batches`."""
    state, found = job.init(jax.random.key(0)), []
    for batch in uneven_batches():
        state, *results = job.step(state, *job.shard_batch(*batch))
        found.append(results)
    return job.params(state), found


def counted_loss(params: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the mean over the rows with a nonzero weight, and the number of these rows.

    Trainers have different numbers of these rows.
    """
    mask = (x[:, 0] > 0) + 0.5
    out, _ = loss_fn(params, x, y)
    each = jnp.sum((jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"] - y) ** 2, -1)
    return jnp.sum(each * mask) / jnp.sum(mask) + 0.0 * out, {"count": jnp.sum(mask)}


OPTIONS: dict[str, dict[str, Any]] = {
    "one by one": {"bucket_MB": 0},
    "chains": {"bucket_MB": 0, "chains": 2},
    "splits": {"max_buckets": 3},
    "weight": {"example_count": "aux/count"},
    "window": {"num_micro_batch": 3},
    "window, weight": {"num_micro_batch": 3, "example_count": "aux/count"},
    "clip": {"clip_local_norm": 0.05},
    "local": {"local_sgd": 3},
    "local, weight": {"local_sgd": 3, "example_count": "aux/count"},
}
# the sum of two parts does not depend on their order, so 16-bit sums can be compared exactly
OF_TWO = {"bf16": {"compress": "bf16"}, "fp16": {"compress": "fp16", "compress_scale": 64.0}}
OF_FOUR = {
    "nodes": {"trainers_per_node": 2},
    "nodes, chains": {"trainers_per_node": 2, "bucket_MB": 0, "chains": 2},
    "nodes, local": {"trainers_per_node": 2, "local_sgd": 3},
}


OF_DEVICES = OF_FOUR | {"plain": {}, "window, weight": OPTIONS["window, weight"]}


def planned(options: dict[str, Any], trainers: int) -> Any:
    """Return the plan of a job with these options."""
    (x, y), key = batches()[0], jax.random.key(0)
    step = dtrans.make_train_step(counted_loss, optimizer(), has_aux=True)
    main = dtrans.trace(step, *jax.eval_shape(init, key), x, y)
    return flat_options.nccl2(
        main, dtrans.trace(init, key), trainers=trainers, merge={"aux/count": "sum"}, **options
    )


def devices(folder: str) -> None:
    """Run the jobs of `options` whose trainers are grouped by node, with two devices in each
    process."""
    jax.config.update("jax_num_cpu_devices", 2)
    options(folder, of=OF_DEVICES)


def options(folder: str, of: dict[str, dict[str, Any]] | None = None) -> None:
    """Run a job with each of the options, one after the other."""
    cluster = dtrans.connect(deadline=20)
    k, n = cluster.trainer_id, cluster.trainers
    plain = dtrans.nccl2(*programs(), trainers=jax.device_count()).on_cluster()
    found = flat(job1_turned=turned(jax.device_count()), uneven=uneven(plain))
    for name, given in (of or OPTIONS | (OF_TWO if n == 2 else OF_FOUR)).items():
        job = planned(given, jax.device_count()).on_cluster()
        state = job.init(jax.random.key(0))
        for x, y in batches()[:2]:
            state, loss, aux = job.step(state, *job.shard_batch(x, y))
        if of and name == "nodes":
            found["said"] = (
                refused(job.step, state, x[:3], y[:3]),
                refused(planned(given, 8).on_cluster),
            )
        found |= flat(**{name: (job.params(state), job.opt_state(state), loss, aux)})
    if n == 4:
        found |= nodes_by_config(k)
    np.savez(Path(folder) / f"trainer-{k}.npz", **found)


def nodes_by_config(k: int) -> dict[str, np.ndarray]:
    """Train on two nodes of two trainers, with Paddle's interface."""
    role = dtrans.Role.from_env()
    config = dtrans.DistributeTranspilerConfig(
        mode="nccl2", use_hierarchical_allreduce=True, trainers_per_node=2, chains=2
    )
    t = dtrans.DistributeTranspiler(config)
    plan = planned({}, 4)
    t.transpile(
        k,
        plan.main,
        trainers=role.trainer_endpoints,
        startup_program=plan.startup,
        current_endpoint=role.current_endpoint,
    )
    with dtrans.Executor(deadline=20) as exe:
        params, opt_state = exe.run(t.get_trainer_startup_program(), jax.random.key(k))
        for x, y in batches()[:2]:
            parts = (np.array_split(a, 4)[k] for a in (x, y))
            params, opt_state, loss, _ = exe.run(t.get_trainer_program(), params, opt_state, *parts)
    return flat(config=(params, opt_state, loss))


def programs_without_arrays(width: int = 2) -> tuple[Any, Any]:
    """Return a traced step and a traced init, without letting JAX create devices."""
    w = jax.ShapeDtypeStruct((width,), np.float32)
    step = lambda params, opt_state, x: (
        params - jax.grad(lambda p: jnp.mean((x @ p) ** 2))(params),
        opt_state,
    )
    return dtrans.trace(step, w, (), jax.ShapeDtypeStruct((4, width), np.float32)), dtrans.trace(
        lambda w: (w, ()), w
    )


def endless(fate: str) -> None:
    """Train until trainer 1, in its third step, ends in the given way."""
    k = dtrans.connect(deadline={"idle": 5, "kill": 10, "raise": 300}.get(fate, 60)).trainer_id
    plan = dtrans.nccl2(*programs(), trainers=2)
    job = plan.on_cluster()
    state = job.init(jax.random.key(0))
    batch = [x[: ROWS // 2] for x in batches()[0]]
    for i in range(1_000_000):
        state, *_ = job.step(state, *batch)
        if i == 2 and k == 1:
            jax.block_until_ready(state)
            if fate == "raise":
                raise KeyError("this is why")
            if fate == "fewer":
                return
            os.kill(os.getpid(), signal.SIGSTOP if fate == "stop" else signal.SIGKILL)
        if i == 2 and fate == "idle":
            threading.Event().wait()


def survive(folder: str, fates: str) -> None:
    """Train on separate rows, while other trainers end.

    Args:
      folder: the folder of the results.
      fates: trainers, steps and kinds of ends, such as `2@3:kill,1@5:raise`.
    """
    cluster = dtrans.connect(deadline=10, on_trainer_loss="drop")
    k, n = cluster.trainer_id, cluster.trainers
    fate_of = {}
    for one in fates.split(","):
        who, fate = one.split(":")
        fate_of[tuple(map(int, who.split("@")))] = fate
    job = dtrans.nccl2(*programs(), trainers=n).on_cluster()
    state = job.init(jax.random.key(0))
    losses, counts = [], []
    for i in range(SURVIVED):
        fate = fate_of.get((k, i))
        if fate == "raise":
            raise KeyError("this is why")
        if fate == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        rows = slice(k * ROWS // n, (k + 1) * ROWS // n)
        state, loss, _ = job.step(state, *(x[rows] for x in batches()[i % STEPS]))
        losses.append(float(loss))
        counts.append(job.plan.trainers)
    found = flat(params=job.params(state), state=job.opt_state(state))
    np.savez(Path(folder) / f"trainer-{k}.npz", losses=losses, counts=counts, **found)


def alone() -> None:
    """Train alone: trainer 0 with parts of three rows, trainer 1 with parts of two rows.

    Both trainers have compiled both sizes.
    """
    k = dtrans.connect(deadline=5).trainer_id
    job = dtrans.nccl2(*programs(), trainers=2).on_cluster()
    state = job.init(jax.random.key(0))
    for rows in (3, 2, 3 if k == 0 else 2):
        state, *_ = job.step(state, *(x[:rows] for x in batches()[0]))
        jax.block_until_ready(state)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    jobs = (numbers, options, devices, endless, survive, alone)
    {job.__name__: job for job in jobs}[sys.argv[1]](*sys.argv[2:])
