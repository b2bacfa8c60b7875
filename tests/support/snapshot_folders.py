"""Two servers in the test's process that write snapshots of their state to a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optax
from helpers import mlp_batch, mlp_loss, mlp_params

import dtrans
from dtrans.parameter_server.plan import PServerPlan
from dtrans.run.distributed.restarts.job_generations import JobGenerations
from dtrans.run.distributed.role import roles_of
from dtrans.run.net.role_folder import RoleFolder
from dtrans.run.parameter_server.snapshots import ServerSnapshots


ENDPOINTS = ("127.0.0.1:1", "127.0.0.1:2")
NAMES = ["pserver 0", "pserver 1"]
ROLES = roles_of(1, ENDPOINTS)
State = Mapping[str, Any]


def planned(tx: Any = None, **options: Any) -> PServerPlan:
    params, tx = mlp_params(), tx or optax.adam(1e-2)
    init = lambda: (params, tx.init(params))
    main = dtrans.trace(dtrans.make_train_step(mlp_loss, tx), *init(), *mlp_batch())
    return dtrans.pserver(main, dtrans.trace(init), pservers=",".join(ENDPOINTS), **options)


class Servers:
    """The two servers of one launch, which write snapshots."""

    def __init__(self, path: Path, plan: PServerPlan, first: dict[str, State], launch: int) -> None:
        self.first, self.generation = first, JobGenerations(path, ROLES).generation
        self.snapshots = {}
        for name, endpoint in zip(NAMES, ENDPOINTS, strict=True):
            folder = RoleFolder(path, name, started=self.generation.number)
            snapshots = self.snapshots[endpoint] = ServerSnapshots(
                folder, plan, endpoint, 100, at_loss=True
            )
            if plan.sync_mode:
                snapshots.begin(first[endpoint])
            else:
                snapshots.begin_alone(first[endpoint])
        self._session = f"session {launch}"

    def write(self, endpoint: str, step: int, plus: float, *, is_early: bool = False) -> None:
        """Write the initial state plus a number as the state after a step."""
        snapshots = self.snapshots[endpoint]
        save_id = snapshots.save_id(0, [self._session], step)
        state = {n: x + plus for n, x in self.first[endpoint].items()}
        snapshots.write(self.generation.number, {0: step}, state, save_id, is_early=is_early)


def first_states(plan: PServerPlan) -> dict[str, State]:
    return {ep: dtrans.Executor().run(plan.servers[ep].startup) for ep in plan.servers}
