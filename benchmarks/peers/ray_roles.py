"""Parameter servers as Ray's actors: one driver, which starts servers and trainers.

    python -m peers.ray_roles MODEL

The driver passes references, as in Ray's example of a synchronous parameter server. A trainer gets
the parameters of all servers and returns gradients for each of them. A server gets the gradients of
all trainers and returns its parameters. Gradients and Adam are computed in NumPy.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import ray
from mlp_job import MODELS, batch_of_trainer, first_params, gradients, leaves_of
from socket_servers import SocketServer, rows_of_server
from windows import answer_windows

from peers.roles import Role


STORE = 2 << 30  # bytes of Ray's shared memory


def flat(rows: list[np.ndarray]) -> np.ndarray:
    """Return arrays as one vector."""
    return np.concatenate([x.ravel() for x in rows])


@ray.remote(num_cpus=0)
class ServerActor:
    """A server, with the update of the job on plain sockets."""

    def __init__(self, name: str, index: int, servers: int, trainers: int) -> None:
        leaves = leaves_of(first_params(MODELS[name]))
        self.server = SocketServer(flat(rows_of_server(leaves, index, servers)), trainers)

    def params(self) -> np.ndarray:
        """Return the parameters."""
        return self.server.params

    def apply(self, *found: np.ndarray) -> np.ndarray:
        """Update with the gradients of all trainers, and return the parameters."""
        for target, vector in zip(self.server.gradients, found, strict=True):
            target[:] = vector
        for number in range(len(self.server.blocks)):
            self.server.update(number)
        return self.server.params


@ray.remote(num_cpus=0)
class TrainerActor:
    """A trainer."""

    def __init__(self, name: str, index: int, servers: int, trainers: int) -> None:
        self.leaves = leaves_of(first_params(MODELS[name]))
        self.part, self.servers = batch_of_trainer(MODELS[name], index, trainers), servers

    def gradients(self, *params: np.ndarray) -> tuple[Any, ...]:
        """Return the loss, and the gradients of each server's rows."""
        for server, vector in enumerate(params):
            start = 0
            for rows in rows_of_server(self.leaves, server, self.servers):
                rows[...] = vector[start : start + rows.size].reshape(rows.shape)
                start += rows.size
        loss, found = gradients(self.leaves, *self.part)
        parts = [
            flat(rows_of_server(found, server, self.servers)) for server in range(self.servers)
        ]
        return loss, *parts


def run(name: str, role: Role) -> None:
    """Start the actors, and run the steps that standard input requests."""
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=STORE,
        _node_ip_address="127.0.0.1",
    )
    count = len(role.pserver_endpoints)
    servers = [ServerActor.remote(name, i, count, role.trainers) for i in range(count)]
    trainers = [TrainerActor.remote(name, i, count, role.trainers) for i in range(role.trainers)]
    params = [server.params.remote() for server in servers]

    def step() -> float:
        nonlocal params
        found = [t.gradients.options(num_returns=1 + count).remote(*params) for t in trainers]
        losses, *parts = zip(*found, strict=True)
        params = [s.apply.remote(*part) for s, part in zip(servers, parts, strict=True)]
        ray.wait(params, num_returns=count, fetch_local=False)
        return float(np.mean(ray.get(list(losses))))

    answer_windows(step)
    ray.shutdown()


if __name__ == "__main__":
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    run(sys.argv[1], Role.from_env())
