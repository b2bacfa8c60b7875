"""Roles of the jobs that `hosts.py` measures.

    python hosts_roles.py dtrans MODEL COMPUTE SECONDS    a trainer or a server, in dtrans
    python hosts_roles.py async MODEL COMPUTE SECONDS     the same, asynchronous
    python hosts_roles.py sockets MODEL COMPUTE SECONDS   the same on plain sockets
    python hosts_roles.py gloo MODEL COMPUTE SECONDS      a trainer of data parallelism over Gloo
    python hosts_roles.py gradients MODEL                 prints the seconds of the gradients

The last trainer has no servers: it is written by hand with `jax.shard_map` and `jax.lax.pmean`.

The role is in the environment (`dtrans.Role.from_env`). COMPUTE is one of:

    run     a trainer computes the gradients of the model
    sleep   it sleeps SECONDS, and sends gradients of the same size that cost almost nothing
    none    as `sleep`, without the pause

Trainers run the steps that standard input requests (`windows.answer_windows`).
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from mlp_job import MODELS, batch, first_params
from models import Model, mlp_model, programs, training, tx
from socket_servers import SocketServer, SocketTrainer, rows_of_server
from windows import answer_windows

import dtrans
from dtrans.endpoints import split_endpoint


COMPUTE = ("run", "sleep", "none")
WAIT = 600.0  # seconds that a role waits for others; the jobs run in turn


def model_for(name: str, compute: str, trainers: int) -> Model:
    """Return a model and its global batch."""
    sizes = MODELS[name]
    model = mlp_model(sizes, 1)._replace(
        params=lambda key: first_params(sizes, jnp),
        batch=tuple(map(jnp.asarray, batch(sizes, trainers))),
    )
    if compute == "run":
        return model

    def mean_of_all(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return (jnp.mean(x) + jnp.mean(y)) * sum(map(jnp.mean, jax.tree.leaves(params)))

    return model._replace(loss_fn=mean_of_all)


def plan_for(
    name: str, compute: str, pservers: tuple[str, ...], trainers: int, mode: Any = None
) -> Any:
    """Return the plan of a job of dtrans, by default a synchronous one."""
    main, startup = programs(*training(model_for(name, compute, 1)))
    mode = mode or dtrans.Sync()
    return dtrans.pserver(main, startup, pservers=pservers, trainers=trainers, mode=mode)


def run_dtrans(name: str, compute: str, pause: float, mode: Any = None) -> None:
    """Run a role of a job of dtrans."""
    role = dtrans.Role.from_env()
    plan = plan_for(name, compute, role.pserver_endpoints, role.trainers, mode)
    with plan.on_cluster(deadline=WAIT, patience=WAIT) as job:
        state = job.init(jax.random.key(0))
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
    leaves, tree = jax.tree.flatten(model.params(jax.random.key(0)))
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


def run_gloo(name: str, compute: str, pause: float) -> None:
    """Run a trainer that averages its gradients with the other trainers over Gloo."""
    role = dtrans.Role.from_env()
    first = role.trainer_endpoints[0]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        first, role.trainers, role.trainer_id, coordinator_bind_address=first
    )
    mesh = jax.make_mesh((role.trainers,), ("trainers",))
    replicated, by_rows = jax.P(), jax.P("trainers")
    model = model_for(name, compute, role.trainers)

    def update(state: Any, x: jax.Array, y: jax.Array) -> Any:
        params, moments = state
        loss, found = jax.value_and_grad(model.loss_fn)(params, x, y)
        changes, moments = tx.update(jax.lax.pmean(found, "trainers"), moments, params)
        return (optax.apply_updates(params, changes), moments), loss[None]

    sharded = jax.shard_map(
        update,
        mesh=mesh,
        in_specs=(replicated, by_rows, by_rows),
        out_specs=(replicated, by_rows),
        check_vma=False,
    )
    jitted = jax.jit(sharded, donate_argnums=0)
    params = model.params(jax.random.key(0))
    place = lambda spec, x: jax.make_array_from_process_local_data(
        jax.NamedSharding(mesh, spec), np.asarray(x)
    )
    state = jax.tree.map(lambda x: place(replicated, x), (params, tx.init(params)))
    rows = dtrans.shard_batch(model.batch, role.trainer_id, role.trainers)
    part = [place(by_rows, x) for x in rows]

    def step() -> Any:
        nonlocal state
        state, loss = jitted(state, *part)
        # JAX returns before the step has run: without this wait, only the dispatch is timed.
        jax.block_until_ready(state)
        return loss.addressable_data(0)[0]

    answer_windows(step, pause)
    jax.distributed.shutdown()


def time_gradients(name: str) -> None:
    """Print the median seconds of the gradients of one trainer."""
    model = model_for(name, "run", 1)
    params, gradients = model.params(jax.random.key(0)), jax.jit(jax.value_and_grad(model.loss_fn))
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
        compute, pause = rest[0], float(rest[1])
        if kind == "async":
            run_dtrans(name, compute, pause, dtrans.Async())
        else:
            run = {"dtrans": run_dtrans, "sockets": run_sockets, "gloo": run_gloo}[kind]
            run(name, compute, pause)
