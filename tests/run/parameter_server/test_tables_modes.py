"""Tables in modes with queues or stored rows: communicators and delay compensation."""

from __future__ import annotations

import threading
from typing import Any

import jax
import numpy as np
import optax
import pytest
import role_threads as roles
from role_threads import RoleThreads, check_state, free_endpoints, serve, until
from table_jobs import (
    DENSE,
    LAZY,
    OPTIMIZERS,
    SYNC,
    D,
    V,
    batches,
    close,
    init,
    loss,
    one_device,
    only,
    outcome,
    planned,
    start_at_zero,
)

import dtrans
from dtrans.errors import ConfigError, WireError
from dtrans.protocol import wire
from dtrans.protocol.server import async_server
from dtrans.protocol.server.async_server import AsyncServer
from dtrans.protocol.server.trainer_registry import TrainerRegistry
from dtrans.protocol.server.trainer_state import Trainer
from dtrans.protocol.trainer.trainer_line import TrainerLine
from dtrans.run.distributed.role import Role
from dtrans.run.parameter_server.block_update import BlockUpdates
from dtrans.run.parameter_server.communicator import Communicator
from dtrans.run.parameter_server.update import ServerUpdate
from dtrans.run.role_jobs.trainer_job import TrainerJob


pytestmark = pytest.mark.usefixtures("x64")

HALF = dtrans.HalfAsync()


def beside(**options: Any) -> dtrans.Async:
    return dtrans.Async(communicator=dtrans.CommunicatorConfig(**options))


# -- steps that wait -------------------------------------------------------------------------------


@pytest.mark.parametrize("sparse", [DENSE, LAZY], ids=["dense", "lazy"])
@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
def test_one_trainer_that_waits_is_sequential_training(
    role_threads: RoleThreads, name: str, sparse: Any
) -> None:
    made = {}
    for mode in (SYNC, HALF):
        made[mode] = outcome(
            role_threads, planned(OPTIMIZERS[name], sparse, 1, 2, mode=mode), batches()
        )[0]
        role_threads.forget()
    close(made[HALF], made[SYNC], 1e-14)
    if sparse is DENSE:
        close(made[HALF], one_device(OPTIMIZERS[name], batches()))


@pytest.mark.parametrize("servers", [1, 3])
def test_leaves_that_are_cut_as_programs_run(role_threads: RoleThreads, servers: int) -> None:
    plan = planned(OPTIMIZERS["clip"], DENSE, 2, servers, mode=dtrans.Sync(runtime_split=True))
    close(outcome(role_threads, plan, batches())[0], one_device(OPTIMIZERS["clip"], batches()))


# -- steps that do not -----------------------------------------------------------------------------


def tables_only(trainers: int, servers: int, mode: Any, ids: Any) -> Any:
    """Return the plan of a step with only a table. Each gradient is an integer."""
    start = start_at_zero(optax.sgd(1.0), V)
    step = dtrans.trace(dtrans.make_train_step(only, optax.sgd(1.0)), *start(), ids)
    return dtrans.pserver(step, dtrans.trace(start), pservers=free_endpoints(servers),
                          trainers=trainers, mode=mode,
                          sparse={"params/emb": dtrans.Rows()}, batch="local",
                          placement=dtrans.BlockPlacement(min_block_size=1))  # fmt: skip


@pytest.mark.parametrize("mode",
                         [HALF, beside(max_merge_var_num=3), beside(independent_recv_thread=False),
                                  dtrans.Sync(runtime_split=True)],
                         ids=["half", "merged", "one at a time", "sync"])  # fmt: skip
@pytest.mark.parametrize("servers", [1, 3])
def test_every_row_is_used_once(role_threads: RoleThreads, servers: int, mode: Any) -> None:
    """Gradients are integers, so their sums do not depend on the order in which servers add
    them."""
    given = [np.random.default_rng(k).integers(0, V, (15, 6)) for k in range(2)]
    plan = tables_only(2, servers, mode, given[0][0])

    def train(k: int) -> None:
        role = Role("trainer", 2, tuple(plan.servers), trainer_id=k)
        with TrainerJob(plan, role, {"deadline": roles.HANG}) as job:
            state = job.init()
            for ids in given[k]:
                state, _ = job.step(state, ids)

    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep)
    for k in range(2):
        role_threads.start(f"trainer {k}", train, k)
    ended = role_threads.all()
    table = np.concatenate(
        [ended[ep][n] for ep in plan.servers for n in ended[ep] if n.startswith("params/emb")]
    )
    share = 2 if isinstance(mode, dtrans.Sync) else 1  # an update uses the mean
    assert np.array_equal(table[:, 0] * share, -np.bincount(np.ravel(given), minlength=V))


class Held:
    """Server that sends rows to a trainer, but answers requests for parameters only after it is
    opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.asked = threading.Event(), threading.Event()
        self.sent: list[int] = []  # number of steps in each message of gradients
        held: list[Any] = []
        answer, look, send = async_server.answer, AsyncServer.look, AsyncServer.send

        def answered(say: Any, t: Any, names: Any, step: int, values: Any) -> None:
            if step and not self.opened.is_set():
                held.append((say, t, names, step, {n: np.array(x) for n, x in values.items()}))
                self.asked.set()
            else:
                answer(say, t, names, step, values)

        def looked(server: Any, now: float) -> None:
            look(server, now)
            while held and self.opened.is_set():
                answer(*held.pop(0))

        def sent(server: Any, k: int, message: Any) -> None:
            send(server, k, message)
            self.sent.append(message.fields.get("steps", 1))

        monkeypatch.setattr(async_server, "answer", answered)
        monkeypatch.setattr(AsyncServer, "look", looked)
        monkeypatch.setattr(AsyncServer, "send", sent)


@pytest.mark.parametrize("name, sparse, merge", [("sgd", DENSE, "sum"), ("adagrad", DENSE, "mean"),
                                                 ("adam", DENSE, "mean"),
                                                 ("sgd", LAZY, "sum")])  # fmt: skip
def test_what_waits_is_merged(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch, name: str, sparse: Any, merge: str
) -> None:
    """The first two steps are sent alone, and later steps wait.

    Rows of later steps include only the first two updates.
    """
    gate, tx, given = Held(monkeypatch), OPTIMIZERS[name], batches(10)
    plan = planned(tx, sparse, 1, 1, mode=beside(max_merge_var_num=5))
    (ep,) = plan.servers
    role_threads.start(ep, serve, plan, ep, jax.random.key(0))

    def train() -> None:
        with TrainerJob(
            plan, Role("trainer", 1, (ep,), trainer_id=0), {"deadline": roles.HANG}
        ) as job:
            state = job.init(jax.random.key(0))
            for i, batch in enumerate(given):
                state, _ = job.step(state, *batch)
                if i < 2:
                    until(
                        lambda i=i: gate.asked.is_set() and len(gate.sent) == i + 1,
                        "a gradient to be used",
                    )
            gate.opened.set()

    role_threads.start("trainer", train)
    ended = role_threads.all()[ep]
    assert gate.sent == [1, 1, 5, 3]
    grad, (want, state), grads = jax.jit(jax.grad(loss)), init(tx, jax.random.key(0)), []
    first = want
    for group, count in enumerate(gate.sent):
        if group < 3:  # the others were computed while all of them waited
            made = given[group : group + 1] if group < 2 else given[2:]
            grads += [grad({**first, "emb": want["emb"]}, *batch) for batch in made]
        parts, grads = grads[:count], grads[count:]
        g = jax.tree.map(
            lambda *xs, count=count: sum(xs) / (count if merge == "mean" else 1), *parts
        )
        for _ in range(count - 1):  # counts are counts of steps
            if name == "adam":
                state = (state[0]._replace(count=state[0].count + 1), *state[1:])
        updates, state = tx.update(g, state, want)
        want = optax.apply_updates(want, updates)
    check_state(plan, [ended], want, state)


def test_servers_that_have_nothing_but_rows_are_waited_for(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainers also send requests for parameters to servers that store only rows. So queued
    gradients are bounded."""
    gate, ids = Held(monkeypatch), np.array([3, 30, 8])
    plan = tables_only(1, 1, beside(max_merge_var_num=4), ids)
    (ep,) = plan.servers

    def train() -> None:
        with TrainerJob(
            plan, Role("trainer", 1, (ep,), trainer_id=0), {"deadline": roles.HANG}
        ) as job:
            state = job.init()
            for i in range(6):
                state, _ = job.step(state, ids)
                if i < 2:
                    until(
                        lambda i=i: gate.asked.is_set() and len(gate.sent) == i + 1,
                        "a gradient to be used",
                    )
            gate.opened.set()

    role_threads.start(ep, serve, plan, ep)
    role_threads.start("trainer 0", train)
    ended = role_threads.all()[ep]
    assert gate.sent == [1, 1, 4]
    assert np.array_equal(ended["params/emb"][:, 0], -6 * np.bincount(ids, minlength=V))


def test_numbers_of_rows_are_sent_with_gradients_too(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count the bytes of a step with only a table, and compare with the plan."""
    sent: dict[str, int] = {}
    framed, say = wire.framed, TrainerLine._say

    def counted_frames(self: Any, op: str, frames: Any = (), **fields: Any) -> None:
        frames = list(frames)
        if op in ("prefetch", "row_ids", "rows"):
            sent[op] = sent.get(op, 0) + sum(np.asarray(x).nbytes for x in frames)
        say(self, op, frames, **fields)

    def counted(op: str, blocks: Any = (), *stamp: Any, **fields: Any) -> Any:
        if op in ("prefetch", "row_ids", "rows"):
            sent[op] = sent.get(op, 0) + sum(np.asarray(x).nbytes for _, x in blocks)
        return framed(op, blocks, *stamp, **fields)

    monkeypatch.setattr(wire, "framed", counted)
    monkeypatch.setattr(TrainerLine, "_say", counted_frames)
    ids = np.array([3, 30, 8])
    plan = tables_only(1, 2, HALF, ids)

    def train() -> None:
        role = Role("trainer", 1, tuple(plan.servers), trainer_id=0)
        with TrainerJob(plan, role, {"deadline": roles.HANG}) as job:
            job.step(job.init(), ids)

    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep)
    role_threads.start("trainer 0", train)
    role_threads.all()
    assert sent == {"prefetch": 3 * 4, "row_ids": 3 * 4, "rows": 3 * 8}
    assert plan.bytes_per_step == {"send": 3 * 8 + 2 * 3 * 4, "recv": 3 * 8}
    assert any(
        "at most 3 looked up by a trainer in a step, at most 72 bytes" in note
        for note in plan.notes
    )


def test_lookups_do_not_stop_what_sends(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookup between steps reads the servers' rows, and does not count as a step.

    The communicator continues.
    """
    stops: list[bool] = []
    stop = Communicator.stop
    monkeypatch.setattr(
        Communicator, "stop", lambda self, **how: (stops.append(True), stop(self, **how))[1]
    )
    tx, given, ids = optax.sgd(0.3), batches(3), np.array([[39, 0], [3, 21]])
    plan = planned(tx, DENSE, 1, 2, mode=HALF)

    def train() -> None:
        role = Role("trainer", 1, tuple(plan.servers), trainer_id=0)
        with TrainerJob(plan, role, {"deadline": roles.HANG}) as job:
            state = job.init(jax.random.key(0))
            for i, batch in enumerate(given):
                state, _ = job.step(state, *batch)
                want = one_device(tx, given[: i + 1])[0]["emb"]
                np.testing.assert_allclose(job.tables.lookup("params/emb", ids), want[ids])
            assert not stops

    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep, jax.random.key(0))
    role_threads.start("trainer 0", train)
    role_threads.all()
    assert len(stops) == 1


# -- delay compensation ----------------------------------------------------------------------------


DELAYS = {
    "fixed": dtrans.DelayCompensation(0.7),
    "adaptive": dtrans.DelayCompensation(0.7, decay=0.9),
}


@pytest.mark.parametrize("mode", [dtrans.Async, dtrans.HalfAsync])
@pytest.mark.parametrize("sparse", [DENSE, LAZY], ids=["dense", "lazy"])
def test_rows_of_one_trainer_have_no_delay(
    role_threads: RoleThreads, sparse: Any, mode: Any
) -> None:
    made = {}
    for how in (SYNC, mode(DELAYS["adaptive"])):
        made[how] = outcome(
            role_threads, planned(OPTIMIZERS["adam"], sparse, 1, 2, mode=how), batches()
        )[0]
        role_threads.forget()
    close(*made.values(), 1e-12)


class AloneServer:
    """Server that gets messages of three trainers."""

    def __init__(self, tx: Any, sparse: Any, mode: Any) -> None:
        plan = planned(tx, sparse, 3, 1, mode=mode)
        (programs,) = plan.servers.values()
        update = ServerUpdate.from_program(programs.main)
        state = dict(
            zip(
                programs.startup.out_names,
                programs.startup.compiled(jax.random.key(0)),
                strict=True,
            )
        )
        self.first = {n: np.array(x) for n, x in state.items() if n.startswith("params")}
        trainers = TrainerRegistry(update.served, deadline=9.0, plan={}, secret="")
        trainers.known |= {k: Trainer(f"session {k}", bytes([k])) for k in range(3)}
        self.blocks = blocks = BlockUpdates(update, state)
        self.server = AsyncServer(
            update.served, blocks, blocks.state, trainers, lambda *_, **__: None
        )
        self.steps = [0, 0, 0]

    def take(self, k: int, op: str, arrays: Any = (), **fields: Any) -> None:
        (frames,) = wire.framed(op, arrays, step=self.steps[k], **fields)
        getattr(self.server, op)(k, wire.parse(frames))

    def ask(self, k: int, ids: np.ndarray, train: bool = True) -> None:
        numbers = [("params/emb", ids.astype(np.int32))]
        self.take(k, "prefetch", numbers, counts={"params/emb": len(ids)}, train=train)
        if train:
            asked = [["params/w", [2 * D], "float64"]]
            self.server.recv(k, wire.Message("recv", {"step": self.steps[k], "blocks": asked}))

    def give(self, k: int, rows: np.ndarray, w: np.ndarray) -> None:
        self.take(k, "send", [("params/emb@GRAD", rows), ("params/w@GRAD", w)])
        self.steps[k] += 1


@pytest.mark.parametrize("how", DELAYS)
@pytest.mark.parametrize("sparse", [DENSE, LAZY], ids=["dense", "lazy"])
@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_delayed_gradients_of_rows_are_compensated(sparse: Any, how: str, beta: float) -> None:
    """Compensation compares with the rows that the trainer has received, whatever other trainers
    have changed or looked up since."""
    delay, rng, rate = DELAYS[how], np.random.default_rng(0), 0.1
    alone = AloneServer(optax.sgd(rate, beta or None), sparse, dtrans.Async(delay))
    emb, w = (alone.first[n] for n in ("params/emb", "params/w"))
    trace, square, traces, squares = (
        np.zeros_like(emb),
        np.zeros_like(emb),
        np.zeros_like(w),
        np.zeros_like(w),
    )
    asked: dict[int, Any] = {}
    moved = 0.0

    def compensated(g: np.ndarray, now: np.ndarray, old: np.ndarray, ms: np.ndarray) -> np.ndarray:
        by = delay.strength if delay.decay is None else delay.strength / np.sqrt(ms + 1e-7)
        return g + by * g * g * (now - old)

    for _ in range(30):
        k = int(rng.integers(3))
        if k not in asked:
            ids = np.unique(rng.integers(0, V // 4, 4))
            alone.ask(k, ids)
            alone.ask(k, np.arange(V), train=False)  # a lookup for evaluation, not part of a step
            asked[k] = ids, emb[ids].copy(), w.copy()
            continue
        ids, old, old_w = asked.pop(k)
        rows, gw = rng.normal(size=(len(ids), D)), rng.normal(size=w.shape)
        alone.give(k, rows, gw)
        touched = np.arange(V) if sparse is DENSE else ids
        g, backup = np.zeros_like(emb), emb.copy()
        g[ids], backup[ids] = rows, old
        if delay.decay is not None:
            square[touched] = delay.decay * square[touched] + (1 - delay.decay) * g[touched] ** 2
            squares = delay.decay * squares + (1 - delay.decay) * gw**2
        right, right_w = compensated(g, emb, backup, square), compensated(gw, w, old_w, squares)
        moved += np.abs(right - g).sum()
        trace[touched] = right[touched] + beta * trace[touched]
        traces = right_w + beta * traces
        emb[touched] -= rate * trace[touched]
        w = w - rate * traces
    assert moved > 0.1, "something was compensated"
    np.testing.assert_allclose(alone.blocks.tables()["params/emb"], emb, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(alone.server.state["params/w"], w, rtol=1e-12, atol=1e-12)


def test_a_server_keeps_rows_that_are_under_way_alone() -> None:
    alone = AloneServer(optax.sgd(0.1), DENSE, dtrans.Async(DELAYS["fixed"]))
    assert {n for n in alone.server.state if "_bak" in n} == {
        f"params/w.trainer_{k}_bak" for k in range(3)
    }
    kept = lambda: sum(x.rows.shape[0] for x in alone.server._requests._backups.values())
    alone.ask(0, np.array([1, 2]))
    alone.ask(1, np.array([2, 3, 4]))
    assert kept() == 5
    alone.give(0, np.ones((2, D)), np.ones(2 * D))
    assert kept() == 3
    alone.ask(2, np.array([0]))
    alone.server.abort(2, wire.Message("abort", {"reason": "why"}))
    assert kept() == 3
    with pytest.raises(
        WireError, match="trainer 1 sends a gradient for rows of params/emb, but has not"
    ):
        sent = "params/emb@GRAD"
        alone.take(1, "row_ids", [(sent, np.array([5], np.int32))], counts={sent: 1})
    with pytest.raises(WireError, match="params/emb@GRAD"):  # no rows exist before the first lookup
        alone.give(0, np.ones((2, D)), np.ones(2 * D))
    alone.give(1, np.ones((3, D)), np.ones(2 * D))
    assert kept() == 0


def test_a_mean_square_moves_where_nobody_looks() -> None:
    """A gradient of zero changes the servers' mean square, so the user must choose `update=` for
    any optimizer."""
    mode = dtrans.Async(DELAYS["adaptive"])
    with pytest.raises(
        ConfigError, match="since params/emb@GRAD.mean_square changes even if the gradient is zero"
    ):
        planned(optax.sgd(0.1), {"params/emb": dtrans.Rows()}, 1, 1, mode=mode)
    planned(optax.sgd(0.1), {"params/emb": dtrans.Rows()}, 1, 1, mode=dtrans.Async(DELAYS["fixed"]))
