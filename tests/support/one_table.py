"""Helpers of tests of one table: its plan, a server without trainers, and jobs in threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import role_threads as roles
from role_threads import RoleThreads, free_endpoints

import dtrans
from dtrans.protocol.server_blocks import RowGradient
from dtrans.run.distributed.role import Role
from dtrans.run.parameter_server.sync_update import SyncUpdate
from dtrans.run.parameter_server.tables.new_rows import with_makers
from dtrans.run.parameter_server.update import ServerUpdate
from dtrans.run.role_jobs.server_job import ServerJob
from dtrans.run.role_jobs.trainer_job import TrainerJob


V, D = 60, 3
EMB, GRAD = "params/emb", "params/emb@GRAD"
KEY = jax.random.key(7)
NONE = np.empty(0, np.int32)
SYNC = dtrans.Sync()


def drawn(key: jax.Array) -> jax.Array:
    return jax.random.normal(key, (V, D))


def planned(tx: Any, servers: int = 1, trainers: int = 1, mode: Any = SYNC,
            emb: Callable[..., Any] = drawn,
            **rows: Any) -> Any:  # fmt: skip
    init = lambda key: (params := {"emb": emb(key)}, tx.init(params))
    step = dtrans.make_train_step(lambda p, ids: jnp.mean(p["emb"][ids] ** 2), tx)
    return dtrans.pserver(
        dtrans.trace(step, *jax.eval_shape(init, KEY), jnp.zeros(3, int)), dtrans.trace(init, KEY),
        mode=mode,
        pservers=free_endpoints(servers), trainers=trainers, sparse={EMB: dtrans.Rows(**rows)},
        batch="local",
        placement=dtrans.BlockPlacement(min_block_size=1),
    )  # fmt: skip


def gradient_rows(step: int, count: int) -> np.ndarray:
    """Return the gradients of `count` rows in a step."""
    return np.random.default_rng(step).normal(size=(count, D)).astype(np.float32)


class Alone:
    """Server without trainers: only its updates run."""

    def __init__(self, tx: Any, before: Any = None, **options: Any) -> None:
        (programs,) = planned(tx, **options).servers.values()
        with dtrans.Executor() as exe:
            state = exe.run(programs.startup, KEY)
        state = state if before is None else with_makers(before, state)
        self.update = SyncUpdate(ServerUpdate.from_program(programs.main), state, 1)
        self.first = np.asarray(jax.jit(drawn)(KEY))
        self.server_tables = self.update.server_tables

    def step(self, *ids: int) -> None:
        numbers = np.array(ids, np.int32)
        self.rows(*ids, train=True)
        gradient = RowGradient(numbers, gradient_rows(self.steps, len(ids)))
        self.update.begin({GRAD: gradient}, frozenset([0]), 0)

    @property
    def steps(self) -> int:
        """The number of updates."""
        return self.server_tables.report()[0].step

    def rows(self, *ids: int, train: bool = False) -> np.ndarray:
        return self.update.rows(EMB, np.array(ids, np.int32), train=train)

    def changed(self, since: int) -> tuple[list[int], list[int]]:
        _, ids, gone = self.server_tables.changed(EMB, since)
        return ids.tolist(), gone.tolist()

    @property
    def state(self) -> dict[str, np.ndarray]:
        """Return the optimizer state of each row."""
        return {n: x for n, x in self.update.tables().items() if n != EMB}


def serve(plan: Any, endpoint: str, state: Any = None, **options: Any) -> Any:
    role = Role("pserver", plan.trainers, tuple(plan.servers), current_endpoint=endpoint)
    with ServerJob(plan, role, {"deadline": roles.HANG}) as job:
        return job.serve(job.init(KEY) if state is None else state(job), **options)


def run(
    role_threads: RoleThreads, plan: Any, train: Callable[[Any, int], Any], **options: Any
) -> list[Any]:
    """Run a job. Return the result of each trainer."""

    def trained(k: int) -> Any:
        role = Role("trainer", plan.trainers, tuple(plan.servers), trainer_id=k)
        with TrainerJob(plan, role, {"deadline": roles.HANG}) as job:
            return train(job, k)

    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep, **options)
    for k in range(plan.trainers):
        role_threads.start(f"trainer {k}", trained, k)
    ended = role_threads.all()
    role_threads.forget()
    return [ended[f"trainer {k}"] for k in range(plan.trainers)]
