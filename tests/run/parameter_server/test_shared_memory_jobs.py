"""Jobs whose arrays go through shared memory: the bits of a job that sends them as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flat_options
import jax
import numpy as np
import optax
import pytest
from helpers import init_of, mlp_batch, mlp_loss, mlp_params, tree_equal
from role_threads import RoleThreads, free_endpoints, serve, train

import dtrans
from dtrans.parameter_server.plan import PServerPlan
from dtrans.protocol import wire
from dtrans.run.net import memory_channel, zmq_transport
from dtrans.run.net.net_options import SHARED_MEMORY


pytestmark = [
    pytest.mark.usefixtures("folder"),
    pytest.mark.skipif(not memory_channel.IS_AVAILABLE, reason="the system has no memory files"),
]
ADAM = optax.adam(1e-2)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.05), optax.adam(1e-2))


@pytest.fixture(autouse=True)
def least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small frames use shared memory, too."""
    for module in (memory_channel, zmq_transport):
        monkeypatch.setattr(module, "LEAST", 32)


@pytest.fixture
def shared_frames(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Frames that roles have received in shared memory."""
    found: list[Any] = []
    unpack = memory_channel.MemoryChannel.unpack

    def count(self: Any, frames: Sequence[Any]) -> list[Any]:
        received = unpack(self, frames)
        found.extend(len(x) for x in received if isinstance(x, wire.SharedFrame))
        return received

    monkeypatch.setattr(memory_channel.MemoryChannel, "unpack", count)
    return found


def run(
    role_threads: RoleThreads, tx: Any, steps: Sequence[int], servers: int = 2, **options: Any
) -> Any:
    """Run a job; return the servers' states, and the parameters and losses of the trainers."""
    params, count = mlp_params(), len(steps)
    batches = [mlp_batch(4 * count, seed=s) for s in range(max(steps))]
    plan: PServerPlan = flat_options.pserver(
        dtrans.trace(
            dtrans.make_train_step(mlp_loss, tx),
            params,
            jax.eval_shape(tx.init, params),
            *batches[0],
        ),
        dtrans.trace(init_of(tx), params),
        pservers=free_endpoints(servers),
        trainers=count,
        min_block_size=1,
        **options,
    )
    for i, ep in enumerate(plan.servers):
        role_threads.start(f"server {i}", serve, plan, ep, params)
    for k, own in enumerate(steps):
        role_threads.start(f"trainer {k}", train, plan, k, batches[:own], params)
    ended = role_threads.all()
    role_threads.forget()
    return ended


@pytest.mark.parametrize(
    "tx, steps, options",
    [
        pytest.param(ADAM, (4, 4), {}, id="sync"),
        pytest.param(CLIPPED, (4, 4, 4), {}, id="a global norm"),
        pytest.param(ADAM, (4, 2, 3), {"on_trainer_exit": "paddle"}, id="trainers that leave"),
        pytest.param(ADAM, (4, 2), {"on_trainer_exit": "drop"}, id="a trainer that leaves"),
        pytest.param(ADAM, (4,), {"mode": dtrans.Async()}, id="async"),
    ],
)
def test_bits_are_those_of_bytes(role_threads, monkeypatch, shared_frames, tx, steps, options):
    shared = run(role_threads, tx, steps, **options)
    assert len(shared_frames) > 4 * len(steps)
    shared_frames.clear()
    monkeypatch.setenv(SHARED_MEMORY, "disabled")
    as_bytes = run(role_threads, tx, steps, **options)
    assert not shared_frames
    for name, state in shared.items():
        tree_equal(jax.tree.map(np.asarray, state), jax.tree.map(np.asarray, as_bytes[name]))
