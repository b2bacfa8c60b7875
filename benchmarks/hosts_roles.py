"""Roles of the jobs that `hosts.py` measures.

    python hosts_roles.py dtrans MODEL COMPUTE SECONDS    a trainer or a server, in dtrans
    python hosts_roles.py sockets MODEL COMPUTE SECONDS   the same on plain sockets
    python hosts_roles.py gradients MODEL                 prints the seconds of a trainer's gradients

The role is in the environment (`dtrans.Role.from_env`). COMPUTE is one of:

    run     a trainer computes the gradients of the model
    sleep   it sleeps SECONDS, and sends gradients of the same size that cost almost nothing
    none    as `sleep`, without the pause

For each number on standard input, a trainer runs this number of steps. It prints the seconds of
each step, and the last loss, as JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from models import Model, mlp_model, programs, training
from socket_servers import SocketServer, SocketTrainer, rows_of_server

import dtrans
from dtrans.endpoints import split_endpoint


ROWS = 64  # of the batch, for each trainer
MODELS = {
    "0.2M": [784, 256, 10],
    "1.9M": [784, 1024, 1024, 10],
    "25M": [1024, 4096, 4096, 1024],
}
COMPUTE = ("run", "sleep", "none")
WAIT = 600.0  # seconds that a role waits for others; the jobs run in turn
KEY = jax.random.key(0)


def model_for(name: str, compute: str, trainers: int) -> Model:
    """Return a model and its global batch."""
    model = mlp_model(MODELS[name], ROWS * trainers)
    if compute == "run":
        return model

    def mean_of_all(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return (jnp.mean(x) + jnp.mean(y)) * sum(map(jnp.mean, jax.tree.leaves(params)))

    return model._replace(loss_fn=mean_of_all)


def plan_for(name: str, compute: str, pservers: tuple[str, ...], trainers: int) -> Any:
    """Return the plan of a job of dtrans."""
    main, startup = programs(*training(model_for(name, compute, 1)))
    return dtrans.pserver(main, startup, pservers=pservers, trainers=trainers)


def answer_windows(step: Callable[[], Any], pause: float) -> None:
    """Run the steps that standard input requests."""
    for line in sys.stdin:
        times = [time.perf_counter()]
        for _ in range(int(line)):
            time.sleep(pause)
            loss = step()
            times.append(time.perf_counter())
        print(json.dumps({"seconds": np.diff(times).tolist(), "loss": float(loss)}), flush=True)


def run_dtrans(name: str, compute: str, pause: float) -> None:
    """Run a role of a job of dtrans."""
    role = dtrans.Role.from_env()
    plan = plan_for(name, compute, role.pserver_endpoints, role.trainers)
    with plan.on_cluster(deadline=WAIT, patience=WAIT) as job:
        state = job.init(KEY)
        if role.is_pserver:
            job.serve(state)
            return
        part = job.shard_batch(*model_for(name, compute, role.trainers).batch)

        def step() -> Any:
            nonlocal state
            state, loss = job.step(state, *part)
            return loss

        answer_windows(step, pause)


def run_sockets(name: str, compute: str, pause: float) -> None:
    """Run a role of the job on plain sockets."""
    role = dtrans.Role.from_env()
    model = model_for(name, compute, role.trainers)
    leaves, tree = jax.tree.flatten(model.params(KEY))
    params = [np.array(leaf) for leaf in leaves]
    endpoints = [split_endpoint(e) for e in role.pserver_endpoints]
    if role.is_pserver:
        server = role.pserver_endpoints.index(role.current_endpoint)
        rows = rows_of_server(params, server, len(endpoints))
        SocketServer(np.concatenate([x.ravel() for x in rows]), role.trainers).serve(
            *endpoints[server]
        )
        return
    gradients = jax.jit(jax.value_and_grad(model.loss_fn))
    part = dtrans.shard_batch(model.batch, role.trainer_id, role.trainers)
    with SocketTrainer(endpoints, role.trainer_id) as servers:

        def step() -> Any:
            loss, found = gradients(tree.unflatten(params), *part)
            servers.exchange([np.asarray(x) for x in jax.tree.leaves(found)], params)
            return loss

        answer_windows(step, pause)


def time_gradients(name: str) -> None:
    """Print the median seconds of the gradients of one trainer."""
    model = model_for(name, "run", 1)
    params, gradients = model.params(KEY), jax.jit(jax.value_and_grad(model.loss_fn))
    times = []
    for _ in range(8):
        begun = time.perf_counter()
        jax.block_until_ready(gradients(params, *model.batch))
        times.append(time.perf_counter() - begun)
    print(statistics.median(times[3:]))


if __name__ == "__main__":
    _, kind, name, *rest = sys.argv
    if kind == "gradients":
        time_gradients(name)
    else:
        run = {"dtrans": run_dtrans, "sockets": run_sockets}[kind]
        run(name, rest[0], float(rest[1]))
