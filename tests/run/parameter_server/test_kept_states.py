"""Updates that leave the state before the step valid, and updates of replicas."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest
from helpers import mlp_batch, mlp_loss, mlp_params

import dtrans
from dtrans.protocol.server.replication import MERGED
from dtrans.run.parameter_server.sync_update import SyncUpdate
from dtrans.run.parameter_server.update import ServerUpdate, copy_state


def server_of(trainers: int) -> tuple[ServerUpdate, dict[str, Any]]:
    """Return the update of a server of Adam's job, and its initial state."""
    tx, params = optax.adam(1e-2), mlp_params()
    main = dtrans.trace(dtrans.make_train_step(mlp_loss, tx), params, tx.init(params), *mlp_batch())
    startup = dtrans.trace(lambda: (params, tx.init(params)))
    (programs,) = dtrans.pserver(main, startup, trainers=trainers).servers.values()
    return ServerUpdate.from_program(programs.main), dtrans.Executor().run(programs.startup)


def gradients(update: ServerUpdate, step: int) -> dict[str, np.ndarray]:
    """Return gradients of all trainers."""
    random = np.random.default_rng(step)
    found = {}
    for name, t in update.grad_types.items():
        found[name] = random.standard_normal(t.shape).astype(t.dtype)
    return found


def pointers(state: dict[str, Any], names: frozenset[str]) -> set[int]:
    return {state[n].unsafe_buffer_pointer() for n in names}


def test_two_states_share_the_memory_of_two_states() -> None:
    """The new optimizer state is written to the memory of the state before the last one."""
    update, first = server_of(2)
    usual = SyncUpdate(update, copy_state(first), 2)
    keeping = SyncUpdate(update, copy_state(first), 2, keeps_old=True)
    assert keeping.spent and keeping.old is None
    states, memory = [], set[int]()
    for step in range(5):
        for updates in (usual, keeping):
            updates.begin(gradients(update, step), frozenset({0, 1}), step)
        states.append({n: np.array(x) for n, x in usual.state.items()})
        jax.block_until_ready(keeping.state)
        memory |= pointers(keeping.state, keeping.spent)
        kept = [(keeping.state, states[-1])]
        if step:
            assert keeping.old is not None
            kept.append((keeping.old, states[-2]))
        for state, expected in kept:
            for n, x in expected.items():
                assert np.asarray(state[n]).tobytes() == x.tobytes()
    sizes = {n: first[n].size for n in keeping.spent}
    assert len(memory) <= 2 * len(sizes)


@pytest.mark.parametrize("left", [{0, 2}, {1, 2}])
def test_a_replica_has_the_bits_of_its_primary(left: set[int]) -> None:
    """Also after a trainer has left, trainer 0 for example."""
    update, first = server_of(3)
    terms: dict[str, Any] = {"keeps_old": True, "merges": True}
    primary, copy = (SyncUpdate(update, copy_state(first), n, **terms) for n in (3, 1))
    for step in range(4):
        present = frozenset({0, 1, 2} if step < 2 else left)
        merged = primary.merge(gradients(update, step), present, step)
        assert sum(x.nbytes for x in merged.values()) * 3 == sum(
            x.nbytes for x in gradients(update, step).values()
        )
        primary.begin(merged, MERGED, step)
        copy.begin({n: np.array(x) for n, x in merged.items()}, MERGED, step)
        for n, x in primary.state.items():
            assert np.asarray(copy.state[n]).tobytes() == np.asarray(x).tobytes()
        assert [n for n, _ in copy.state_blocks()] == list(copy.state)
