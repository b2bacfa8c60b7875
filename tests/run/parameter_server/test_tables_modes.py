"""Tables in modes in which something waits, or is kept: communicators, and delay compensation."""

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
from dtrans.protocol import async_server
from dtrans.protocol.async_server import AsyncServer
from dtrans.run.distributed.role import Role
from dtrans.run.parameter_server.communicator import Communicator
from dtrans.run.role_job import TrainerJob


pytestmark = pytest.mark.usefixtures("x64")

HALF = dtrans.HalfAsync()


def beside(**options: Any) -> dtrans.Async:
    return dtrans.Async(communicator=dtrans.CommunicatorConfig(**options))


# -- steps that wait -------------------------------------------------------------------------------


@pytest.mark.parametrize("sparse", [DENSE, LAZY], ids=["dense", "lazy"])
@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
def test_one_trainer_that_waits_is_sequential_training(role_threads: RoleThreads, name: str, sparse: Any) -> None:
    made = {}
    for mode in (SYNC, HALF):
        made[mode] = outcome(role_threads, planned(OPTIMIZERS[name], sparse, 1, 2, mode=mode), batches())[0]
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
    """A plan of a step that has nothing but a table, each gradient of which is a whole number."""
    start = start_at_zero(optax.sgd(1.0), V)
    step = dtrans.trace(dtrans.make_train_step(only, optax.sgd(1.0)), *start(), ids)
    return dtrans.pserver(step, dtrans.trace(start), pservers=free_endpoints(servers), trainers=trainers, mode=mode,
                          sparse={"params/emb": dtrans.Rows()}, batch="local",
                          placement=dtrans.BlockPlacement(min_block_size=1))  # fmt: skip


@pytest.mark.parametrize("mode", [HALF, beside(max_merge_var_num=3), beside(independent_recv_thread=False),
                                  dtrans.Sync(runtime_split=True)],
                         ids=["half", "merged", "one at a time", "sync"])  # fmt: skip
@pytest.mark.parametrize("servers", [1, 3])
def test_every_row_is_used_once(role_threads: RoleThreads, servers: int, mode: Any) -> None:
    """However gradients were merged, and in whatever order they came: they are whole numbers."""
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
    table = np.concatenate([ended[ep][n] for ep in plan.servers for n in ended[ep] if n.startswith("params/emb")])
    share = 2 if isinstance(mode, dtrans.Sync) else 1  # an update is by the mean
    assert np.array_equal(table[:, 0] * share, -np.bincount(np.ravel(given), minlength=V))


class Held:
    """A server that answers a trainer with rows, but not with parameters made of its gradients until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.asked = threading.Event(), threading.Event()
        self.sent: list[int] = []  # of how many steps each message of gradients was
        held: list[Any] = []
        answer, look, send = async_server.answer, AsyncServer.look, AsyncServer.send

        def answered(say: Any, t: Any, step: int, values: Any) -> None:
            if step and not self.opened.is_set():
                held.append((say, t, step, {n: np.array(x) for n, x in values.items()}))
                self.asked.set()
            else:
                answer(say, t, step, values)

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
                                                 ("adam", DENSE, "mean"), ("sgd", LAZY, "sum")])  # fmt: skip
def test_what_waits_is_merged(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch, name: str, sparse: Any, merge: str
) -> None:
    """The first two steps go by themselves, and others wait: rows of these are what the first two have made."""
    gate, tx, given = Held(monkeypatch), OPTIMIZERS[name], batches(10)
    plan = planned(tx, sparse, 1, 1, mode=beside(max_merge_var_num=5))
    (ep,) = plan.servers
    role_threads.start(ep, serve, plan, ep, jax.random.key(0))

    def train() -> None:
        with TrainerJob(plan, Role("trainer", 1, (ep,), trainer_id=0), {"deadline": roles.HANG}) as job:
            state = job.init(jax.random.key(0))
            for i, batch in enumerate(given):
                state, _ = job.step(state, *batch)
                if i < 2:
                    until(lambda i=i: gate.asked.is_set() and len(gate.sent) == i + 1, "a gradient to be used")
            gate.opened.set()

    role_threads.start("trainer", train)
    ended = role_threads.all()[ep]
    assert gate.sent == [1, 1, 5, 3]
    grad, (want, state), grads = jax.jit(jax.grad(loss)), init(tx, jax.random.key(0)), []
    first = want
    for group, count in enumerate(gate.sent):
        if group < 3:  # of the others all waited when they were made
            made = given[group : group + 1] if group < 2 else given[2:]
            grads += [grad({**first, "emb": want["emb"]}, *batch) for batch in made]
        parts, grads = grads[:count], grads[count:]
        g = jax.tree.map(lambda *xs, count=count: sum(xs) / (count if merge == "mean" else 1), *parts)
        for _ in range(count - 1):  # counts are of steps
            if name == "adam":
                state = (state[0]._replace(count=state[0].count + 1), *state[1:])
        updates, state = tx.update(g, state, want)
        want = optax.apply_updates(want, updates)
    check_state(plan, [ended], want, state)


def test_lookups_do_not_stop_what_sends(role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are of what servers have, and no step is made of them; the communicator goes on."""
    stops: list[bool] = []
    stop = Communicator.stop
    monkeypatch.setattr(Communicator, "stop", lambda self, **how: (stops.append(True), stop(self, **how))[1])
    tx, given, ids = optax.sgd(0.3), batches(3), np.array([[39, 0], [3, 21]])
    plan = planned(tx, DENSE, 1, 2, mode=HALF)

    def train() -> None:
        role = Role("trainer", 1, tuple(plan.servers), trainer_id=0)
        with TrainerJob(plan, role, {"deadline": roles.HANG}) as job:
            state = job.init(jax.random.key(0))
            for i, batch in enumerate(given):
                state, _ = job.step(state, *batch)
                want = one_device(tx, given[: i + 1])[0]["emb"]
                np.testing.assert_allclose(job.lookup("params/emb", ids), want[ids])
            assert not stops

    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep, jax.random.key(0))
    role_threads.start("trainer 0", train)
    role_threads.all()
    assert len(stops) == 1
