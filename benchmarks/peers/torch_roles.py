"""Roles in PyTorch: parameter servers over RPC, and DistributedDataParallel over Gloo.

    python -m peers.torch_roles rpc MODEL    a server or a trainer
    python -m peers.torch_roles ddp MODEL    a trainer

A trainer calls each server once in a step. The call brings the gradients of the server's rows. It
returns the parameters after the update with the gradients of all trainers
(`rpc.functions.async_execution`, as in PyTorch's tutorial on batched RPC).
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import torch
from mlp_job import MODELS, batch_of_trainer, first_params, leaves_of
from socket_servers import rows_of_server
from torch.distributed import rpc
from windows import answer_windows

from peers.roles import Role


TIMEOUT = 900.0  # seconds of a call; the jobs of a comparison run in turn


class MLP(torch.nn.Module):
    """The model, with the parameters in the order of `mlp_job.leaves_of`."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        leaves = map(torch.from_numpy, leaves_of(first_params(sizes)))
        self.leaves = torch.nn.ParameterList(map(torch.nn.Parameter, leaves))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the last layer."""
        last = len(self.leaves) - 2
        for i in range(0, last + 1, 2):
            x = torch.addmm(self.leaves[i], x, self.leaves[i + 1])
            x = torch.relu(x) if i < last else x
        return x


class Server:
    """A server of some rows of each parameter."""

    here: Server

    def __init__(self, model: MLP, index: int, role: Role) -> None:
        arrays = [leaf.detach().numpy() for leaf in model.leaves]
        rows = rows_of_server(arrays, index, role.pservers)
        self.params = [torch.nn.Parameter(torch.from_numpy(x.copy())) for x in rows]
        self.adam = torch.optim.Adam(self.params, lr=1e-3)
        self.trainers = role.trainers
        self.lock, self.answer = threading.Lock(), torch.futures.Future()
        self.arrived: dict[int, list[torch.Tensor]] = {}

    @staticmethod
    @rpc.functions.async_execution
    def exchange(trainer: int, gradients: list[torch.Tensor]) -> Any:
        """Store a trainer's gradients; return a future of the updated parameters.

        The call of the last trainer resolves the future.
        """
        self = Server.here
        with self.lock:
            answer = self.answer
            self.arrived[trainer] = gradients
            if len(self.arrived) == self.trainers:
                self._update()
                self.answer = torch.futures.Future()
                answer.set_result([x.detach().clone() for x in self.params])
        return answer

    def _update(self) -> None:
        """Update with the mean of the gradients, which are added in the order of the trainers."""
        first, *others = (self.arrived.pop(trainer) for trainer in range(self.trainers))
        for i, param in enumerate(self.params):
            total = first[i]
            for other in others:
                total += other[i]
            param.grad = total.div_(self.trainers)
        self.adam.step()


def run_rpc(role: Role, model: MLP, x: torch.Tensor, y: torch.Tensor) -> None:
    """Run a server or a trainer."""
    name = lambda kind, index: f"{kind}{index}"
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=4, rpc_timeout=TIMEOUT, init_method=f"tcp://{role.pserver_endpoints[0]}"
    )
    if role.is_pserver:
        Server.here = Server(model, role.index, role)
    rpc.init_rpc(
        name(role.kind, role.index),
        rank=role.index if role.is_pserver else role.pservers + role.index,
        world_size=role.pservers + role.trainers,
        rpc_backend_options=options,
    )
    if not role.is_pserver:
        leaves = [*model.leaves]
        arrays = [leaf.detach().numpy() for leaf in leaves]
        servers = range(role.pservers)
        targets = [rows_of_server(arrays, server, role.pservers) for server in servers]

        def step() -> Any:
            loss = torch.nn.functional.mse_loss(model(x), y)
            found = [g.numpy() for g in torch.autograd.grad(loss, leaves)]
            calls = []
            for server in servers:
                rows = [torch.from_numpy(g) for g in rows_of_server(found, server, role.pservers)]
                call = (name("pserver", server), Server.exchange, (role.index, rows))
                calls.append(rpc.rpc_async(*call))
            for call, target in zip(calls, targets, strict=True):
                for array, value in zip(target, call.wait(), strict=True):
                    array[...] = value.numpy()
            return loss.detach()

        answer_windows(step)
    rpc.shutdown(timeout=0)  # a server waits for the trainers without a limit


def run_ddp(role: Role, model: MLP, x: torch.Tensor, y: torch.Tensor) -> None:
    """Run a trainer that averages its gradients with the other trainers."""
    address = f"tcp://{role.trainer_endpoints[0]}"
    torch.distributed.init_process_group(
        "gloo", init_method=address, rank=role.index, world_size=role.trainers
    )
    parallel = torch.nn.parallel.DistributedDataParallel(
        model, gradient_as_bucket_view=True, broadcast_buffers=False
    )
    adam = torch.optim.Adam(parallel.parameters(), lr=1e-3)

    def step() -> Any:
        adam.zero_grad()
        loss = torch.nn.functional.mse_loss(parallel(x), y)
        loss.backward()
        adam.step()
        return loss.detach()

    answer_windows(step)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    kind, name = sys.argv[1:]
    os.environ.update(GLOO_SOCKET_IFNAME="lo", TP_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    role = Role.from_env()
    sizes = MODELS[name]
    part = batch_of_trainer(sizes, role.index, role.trainers)
    run = {"rpc": run_rpc, "ddp": run_ddp}[kind]
    run(role, MLP(sizes), *map(torch.from_numpy, part))
