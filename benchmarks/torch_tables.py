"""The job of `tables.py`, written with PyTorch's RPC and sparse gradients.

    python torch_tables.py pserver RANK PORT SHAPE    a server, with half of the rows
    python torch_tables.py trainer RANK PORT SHAPE    a trainer

For each number on standard input, a trainer runs this number of steps, and prints their seconds.

In a step, a trainer calls each server twice. The first call returns the rows. The second sends
their gradients, and returns after the update with the gradients of all trainers
(`rpc.functions.async_execution`, as in PyTorch's tutorial on batched RPC). Servers store an
`EmbeddingBag(sparse=True)`, and update it with Adagrad. On one host, RPC uses shared memory.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

import numpy as np
import torch
from torch.distributed import rpc


SERVERS, LEARNING_RATE = 2, 0.1
STRIDE, EXPONENT = 2_654_435_761, 1.05  # as in tables.py


class Server:
    """A server with half of the rows. The first server also has the dense weights."""

    here: Server

    def __init__(self, rank: int, rows: int, width: int, trainers: int) -> None:
        self.trainers = trainers
        self.emb = torch.nn.EmbeddingBag(rows, width, mode="sum", sparse=True)
        self.emb.weight.data.normal_(0, 0.01)
        self.w = torch.nn.Parameter(torch.ones(width)) if rank == 0 else None
        params = [self.emb.weight, *([] if self.w is None else [self.w])]
        self.updates = [
            torch.optim.Adagrad([x], lr=LEARNING_RATE, initial_accumulator_value=0.1)
            for x in params
        ]
        self.lock, self.made, self.arrived = threading.Lock(), torch.futures.Future(), list[Any]()

    @staticmethod
    def rows(ids: torch.Tensor) -> torch.Tensor:
        """Return rows by id."""
        with torch.no_grad():
            return Server.here.emb.weight[ids]

    @staticmethod
    @rpc.functions.async_execution
    def push(ids: torch.Tensor, rows: torch.Tensor, dense: torch.Tensor | None) -> Any:
        """Store the gradients of a trainer; return a future of the new dense weights.

        The gradients of the last trainer start the update, which resolves the future.
        """
        self = Server.here
        with self.lock:
            made = self.made
            self.arrived.append((ids, rows, dense))
            if len(self.arrived) == self.trainers:
                self.made = torch.futures.Future()
                made.set_result(self.update())
        return made

    def update(self) -> torch.Tensor | None:
        """Update with the gradients that have arrived; return the new dense weights."""
        arrived, self.arrived = self.arrived, []
        ids, rows = (torch.cat([x[i] for x in arrived]) for i in range(2))
        self.emb.weight.grad = torch.sparse_coo_tensor(
            ids[None], rows / self.trainers, self.emb.weight.shape
        )
        if self.w is not None:
            self.w.grad = sum(x[2] for x in arrived) / self.trainers
        for update in self.updates:
            update.step()
        return None if self.w is None else self.w.detach().clone()


class Trainer:
    """A trainer."""

    def __init__(self, rank: int, rows: int, width: int, ids: int, drawn: str) -> None:
        self.rng, self.w, self.y = np.random.default_rng(rank), torch.ones(width), torch.ones(ids)
        self.rows, self.half, self.ids, self.drawn = rows, -(-rows // SERVERS), ids, drawn

    def batch(self) -> np.ndarray:
        """Return random row ids."""
        if self.drawn == "uniform":
            return self.rng.integers(0, self.rows, self.ids)
        most = (self.rows + 1.0) ** (1 - EXPONENT)
        rank = ((1 - self.rng.random(self.ids) * (1 - most)) ** (1 / (1 - EXPONENT))).astype(
            np.int64
        ) - 1
        return np.minimum(rank, self.rows - 1) * STRIDE % self.rows

    def step(self) -> None:
        """Run one step."""
        uniq, at = np.unique(self.batch(), return_inverse=True)
        cut = int(np.searchsorted(uniq, self.half))
        parts = [torch.from_numpy(uniq[:cut].copy()), torch.from_numpy(uniq[cut:] - self.half)]
        coming = [rpc.rpc_async(f"pserver{i}", Server.rows, args=(x,)) for i, x in enumerate(parts)]
        rows, w = (
            torch.cat([x.wait() for x in coming]).requires_grad_(),
            self.w.detach().requires_grad_(),
        )
        loss = (
            (torch.nn.functional.embedding(torch.from_numpy(at), rows) @ w - self.y) ** 2
        ).mean()
        loss.backward()
        sent = zip(parts, (rows.grad[:cut], rows.grad[cut:]), (w.grad, None), strict=True)
        made = [rpc.rpc_async(f"pserver{i}", Server.push, args=x) for i, x in enumerate(sent)]
        self.w, _ = (x.wait() for x in made)


def main() -> None:
    """Run the role of the command line."""
    what, rank, port, shape = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    rows, width, ids, drawn, _, trainers, _ = shape.split(",")
    os.environ.update(GLOO_SOCKET_IFNAME="lo", TP_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    serves, half = what == "pserver", -(-int(rows) // SERVERS)
    if serves:
        Server.here = Server(
            rank, half if rank == 0 else int(rows) - half, int(width), int(trainers)
        )
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=4, rpc_timeout=200, init_method=f"tcp://127.0.0.1:{port}"
    )
    number = rank if serves else SERVERS + rank
    rpc.init_rpc(
        f"{what}{rank}",
        rank=number,
        world_size=SERVERS + int(trainers),
        rpc_backend_options=options,
    )
    if not serves:
        trainer = Trainer(rank, int(rows), int(width), int(ids), drawn)
        for line in sys.stdin:
            start = time.perf_counter()
            for _ in range(int(line)):
                trainer.step()
            print(time.perf_counter() - start, flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    main()
