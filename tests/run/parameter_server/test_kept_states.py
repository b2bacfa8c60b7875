"""Updates that leave the state before the step valid, and updates of replicas."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import table_jobs
from helpers import mlp_batch, mlp_loss, mlp_params

import dtrans
from dtrans.checkpoint.saved_rows import ArrayLike
from dtrans.protocol import wire
from dtrans.protocol.server.replication import MERGED, StoredReplicas, gradient_blocks
from dtrans.protocol.server_blocks import RowGradient
from dtrans.run.parameter_server.server_replicas import ServerReplicas
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
    """A replica has the bits of its primary, also after trainers have left."""
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
        blocks, rows = copy.state_blocks()
        assert [n for n, _ in blocks] == list(copy.state) and not rows


def table_server(sparse: str) -> tuple[ServerUpdate, dict[str, Any], str]:
    """Return the update of a server with a table, its initial state, and the name of the block."""
    plan = table_jobs.planned(optax.adam(0.1), {"params/emb": dtrans.Rows(sparse)}, 2, 1)
    (programs,) = plan.servers.values()
    update = ServerUpdate.from_program(programs.main)
    (name,) = update.tables
    return update, dtrans.Executor().run(programs.startup, jax.random.key(0)), name


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with copies of its dense arrays."""
    return {n: x if isinstance(x, ArrayLike) else jnp.copy(x) for n, x in state.items()}


def row_gradients(update: ServerUpdate, name: str, step: int) -> dict[str, Any]:
    """Return gradients of all trainers. Each trainer has looked up three rows."""
    random, found = np.random.default_rng(step), dict[str, Any](gradients(update, step))
    for sent in update.tables[name].gradients.values():
        rows = update.tables[name].rows
        ids = np.sort(random.choice(rows, 3, replace=False)).astype(np.int32)
        t = update.grad_types[sent]
        found[sent] = RowGradient(ids, random.standard_normal((3, *t.shape[1:])).astype(t.dtype))
    return found


def rows_in(array: Any) -> list[bytes]:
    """Return the ids and the rows of a snapshot of a table, and the steps that changed them."""
    found = []
    for segment in array.table.segments():
        found += [x.tobytes() for x in (segment.ids, segment.changed, *segment.rows)]
    return [*found, array.table.step, array.table.evicted]


@pytest.mark.parametrize("sparse", ["lazy", "dense"])
def test_the_state_before_has_the_old_rows_of_tables(sparse: str) -> None:
    """The state before a step has the old rows of tables, also after evictions that follow the
    step.

    Only rows that a step changes are copied.
    """
    update, first, name = table_server(sparse)
    usual = SyncUpdate(update, copied(first), 2)
    keeping = SyncUpdate(update, copied(first), 2, keeps_old=True)
    evicted = 0
    for step in range(6):
        before = rows_in(usual.snapshot(9.0)[name])
        for updates in (usual, keeping):
            updates.begin(row_gradients(update, name, step), frozenset({0, 1}), step)
            if step % 2:
                evicted += updates.server_tables.evict(name, 2, np.empty(0, np.int32))
            updates.rows(name, np.arange(step, step + 3), train=True)
        assert rows_in(usual.snapshot(9.0)[name]) == rows_in(keeping.newest()[name])
        assert keeping.old is not None
        table = keeping.old[name].table
        saved = sum(len(x.ids) for x in table._saved[0])
        assert 0 < saved <= 2 * 3 + 3 + evicted
        assert rows_in(keeping.old[name]) == before
    assert evicted


@pytest.mark.parametrize("sparse", ["lazy", "dense"])
def test_a_replica_of_a_table_has_the_rows_of_its_primary(sparse: str) -> None:
    """The copy begins with the existing rows of the primary. It then applies the same updates and
    evictions."""
    rows_of = {"params/emb": dtrans.Rows(sparse)}  # type: ignore[arg-type]
    plan = table_jobs.planned(optax.adam(0.1), rows_of, 2, 2)
    endpoint, backup = plan.servers
    update = ServerUpdate.from_program(plan.servers[endpoint].main)
    (name,), replicas = update.tables, ServerReplicas(plan, backup)
    copies = StoredReplicas(replicas.replication.primaries, replicas.new_replica)

    def send(op: str, blocks: Any = (), **fields: Any) -> None:
        for frames in wire.framed(op, [(n, np.asarray(x)) for n, x in blocks], **fields):
            copies.take(endpoint, wire.parse(frames))

    state = dtrans.Executor().run(plan.servers[endpoint].startup, jax.random.key(0))
    primary = SyncUpdate(update, copied(state), 2, merges=True)
    begin, everybody, none = 3, frozenset({0, 1}), np.empty(0, np.int32)
    for step in range(8):
        if step == begin:  # a new generation, in which the table has rows and evicted rows
            saved = primary.newest()
            primary = SyncUpdate(update, copied(saved), 2, keeps_old=True, merges=True)
            blocks, rows = primary.state_blocks()
            send("replica", blocks, step=step, is_state=True, rows=rows)
        grads = row_gradients(update, name, step)
        if step == 5:  # no trainer looks up rows
            for sent in update.tables[name].gradients.values():
                grads[sent] = RowGradient(none, grads[sent].rows[:0])
        merged = primary.merge(grads, everybody, step)
        if step >= begin:
            blocks, rows = gradient_blocks(merged)
            send("replica", blocks, step=step, is_state=False, rows=rows)
        primary.begin(merged, MERGED, step)
        if step % 2 == 0:
            assert primary.server_tables.evict(name, 2, none) or step in (0, 6)
            if step >= begin:
                send("replica_evict", step=step + 1, table=name, unused_for=2)
        if step >= begin:
            newest = copies.newest(endpoint)
            assert primary.old is not None and list(newest) == [step + 1, step]
            for found, expected in (
                (newest[step + 1], primary.newest()),
                (newest[step], primary.old),
            ):
                for n in update.types:
                    if n not in update.tables[name].arrays:
                        assert np.asarray(found[n]).tobytes() == np.asarray(expected[n]).tobytes()
                assert rows_in(found[name]) == rows_in(expected[name])
    assert copies.received(endpoint) == 8 + 2
