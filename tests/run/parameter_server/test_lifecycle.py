"""The life of a job: roles that start late, trainers that leave early, and the next job on the same
servers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assemble, mlp_loss, plain_run, plain_step, tree_close
from lifecycle_job import TX, batch_of, params_of, plan_for, rows
from role_processes import Roles, roles
from role_threads import HANG, FakeServer, Peer, RoleThreads, free_endpoints, serve, train, until

import dtrans
from dtrans.errors import DeadlineError, LostPeerError
from dtrans.parameter_server.plan import PServerPlan
from dtrans.protocol.server.server_loop import ServerLoop


@pytest.fixture(autouse=True)
def x64() -> Any:
    with jax.enable_x64(True):
        yield


def one_device(batches: Sequence[Any]) -> tuple[Any, Any]:
    params, state, _ = plain_run(
        plain_step(mlp_loss, TX), params_of(), TX.init(params_of()), batches
    )
    return params, state


def check(
    plan: PServerPlan, held: Sequence[Any], got: Sequence[Any], batches: Sequence[Any]
) -> None:
    """Check that the servers' states equal one device, and so do the parameters of trainers that
    took the last step."""
    want, state = one_device(batches)
    names = plan.startup.out_names
    made = dict(zip(names, plan.startup.out.flatten((want, state), "the result"), strict=True))
    states = {
        ep: {n: jnp.asarray(x) for n, x in of.items()}
        for ep, of in zip(plan.servers, held, strict=True)
    }
    tree_close(assemble(plan, states, names), made, 1e-12)
    for params in got:
        tree_close({n: jnp.asarray(x) for n, x in params.items()}, want, 1e-12)


# -- late start, as processes ----------------------------------------------------------------------

STEPS = 3


def job(pservers: Sequence[str], **more: Any) -> dict[str, Any]:
    return {
        "pservers": list(pservers),
        "trainers": 2,
        "jobs": 1,
        "first": 0,
        "steps": STEPS,
        "stays": False,
    } | more


# the output of a role before it waits for other roles
WAITS = {
    "pserver": "serving 0",
    "trainer": "connecting",
}


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(("trainer0", "trainer1", "pserver1", "pserver0"), id="servers last"),
        pytest.param(
            ("pserver0", "trainer1", "trainer0", "pserver1"),
            id="one server last",
            marks=pytest.mark.rotated,
        ),
        pytest.param(
            ("pserver1", "trainer1", "pserver0", "trainer0"),
            id="one trainer last",
            marks=pytest.mark.rotated,
        ),
        pytest.param(
            ("pserver0", "pserver1", "trainer0", "trainer1"),
            id="the other trainer last",
            marks=pytest.mark.rotated,
        ),
    ],
)
def test_roles_may_start_in_any_order(tmp_path: Path, order: Sequence[str]) -> None:
    """The last role starts when all other roles have printed that they wait."""
    pservers = free_endpoints(2)
    with roles(tmp_path) as started:
        for name in order[:-1]:
            started.start(name, name[:-1], index=int(name[-1]), **job(pservers))
        for name in order[:-1]:
            started[name].until(WAITS[name[:-1]])
        started.start(order[-1], order[-1][:-1], index=int(order[-1][-1]), **job(pservers))
        found = started.end()
    batches = [batch_of(i, 2) for i in range(STEPS)]
    both = lambda kind: [found[f"{kind}{i}"] for i in range(2)]
    check(plan_for(pservers, 2), both("pserver"), both("trainer"), batches)


def test_a_process_may_leave_early(tmp_path: Path) -> None:
    pservers = free_endpoints(2)
    with roles(tmp_path) as started:
        for i in range(2):
            started.start(f"pserver{i}", "pserver", index=i, **job(pservers))
        for k, steps in enumerate((2, 4)):
            started.start(f"trainer{k}", "trainer", index=k, **job(pservers, steps=steps))
        found = started.end()
    batches = [rows([0, 1] if i < 2 else [1], batch_of(i, 2)) for i in range(4)]
    check(
        plan_for(pservers, 2), [found["pserver0"], found["pserver1"]], [found["trainer1"]], batches
    )
    tree_close(
        {n: jnp.asarray(x) for n, x in found["trainer0"].items()}, one_device(batches[:2])[0], 1e-12
    )


# -- the next job, as processes --------------------------------------------------------------------


def trainers(started: Roles, which: str, pservers: Sequence[str], **more: Any) -> None:
    for k in range(2):
        started.start(f"{which}{k}", "trainer", index=k, **job(pservers, **more))


def test_the_next_job_goes_on_where_the_first_ended(tmp_path: Path) -> None:
    """Trainers of the second job start when trainers of the first have ended.

    One of them starts before the last trainer of the first job has ended.
    """
    pservers = free_endpoints(2)
    with roles(tmp_path) as started:
        for i in range(2):
            started.start(f"pserver{i}", "pserver", index=i, **job(pservers, jobs=2))
        started.start("first0", "trainer", index=0, **job(pservers))
        started.start("first1", "trainer", index=1, **job(pservers, stays=True))
        started["first0"].end()
        started.start("second0", "trainer", index=0, **job(pservers, first=STEPS))
        started["second0"].until("connecting")
        started["first1"].until("done")
        started["first1"].go()
        started["first1"].end()
        started.start("second1", "trainer", index=1, **job(pservers, first=STEPS))
        found = {
            name: started[name].end() for name in ("pserver0", "pserver1", "second0", "second1")
        }
    batches = [batch_of(i, 2) for i in range(2 * STEPS)]
    held = [found["pserver0"], found["pserver1"]]
    check(plan_for(pservers, 2), held, [found["second0"], found["second1"]], batches)


# -- the next job, and what was said to the first --------------------------------------------------


def serves(plan: PServerPlan, ep: str, jobs: int) -> Any:
    """Run one pserver through several jobs."""
    with dtrans.Executor(deadline=HANG) as exe:
        role = plan.servers[ep]
        state = exe.run(role.startup, params_of())
        for _ in range(jobs):
            state = exe.run(role.main, state)
        return state


@pytest.mark.soak
@pytest.mark.parametrize("count, jobs", [(0, 12), (1, 3)])
def test_jobs_follow_one_another_at_once(role_threads: RoleThreads, count: int, jobs: int) -> None:
    """Run many jobs of no step or one step.

    A server, a trainer or the end of the previous job may be first.
    """
    pservers = free_endpoints(2)
    plan = plan_for(pservers, 2)
    for ep in pservers:
        role_threads.start(ep, serves, plan, ep, jobs)

    def trains(k: int) -> Any:
        for i in range(jobs):
            got, _ = train(plan, k, [batch_of(i, 2)][:count], params_of())
        return got

    for k in range(2):
        role_threads.start(f"trainer {k}", trains, k)
    ended = role_threads.all()
    batches = [batch_of(i, 2) for i in range(jobs * count)]
    check(plan, [ended[ep] for ep in pservers], [ended["trainer 0"], ended["trainer 1"]], batches)


def test_a_trainer_of_the_next_job_waits_for_the_end_of_the_first(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The messages reach the server of the first job, which already had a trainer with this id."""
    told = threading.Event()
    real = ServerLoop.say

    def says(self: Any, to: bytes | str, op: str, /, *blocks: Any, **fields: Any) -> None:
        real(self, to, op, *blocks, **fields)
        if (
            op == "waiting"
            and fields["reason"] == "the end of a job of 2 trainers, which trainer 0 has left"
        ):
            told.set()

    monkeypatch.setattr(ServerLoop, "say", says)
    (ep,) = pservers = free_endpoints(1)
    plan = plan_for(pservers, 2)
    role_threads.start("server", serves, plan, ep, 2)
    batches = [batch_of(i, 2) for i in range(2)]
    wait = lambda i: told.wait(HANG) if i else None
    role_threads.start("first 0", train, plan, 0, batches[:1], params_of())
    # the trainer takes its step together with the other one, and closes when the next job's trainer
    # has arrived
    role_threads.start(
        "first 1", train, plan, 1, [*batches[:1], batch_of(9, 2)], params_of(), before=wait
    )
    role_threads.end("first 0")
    role_threads.start("second 0", train, plan, 0, batches[1:], params_of())
    role_threads.end("first 1")
    assert told.is_set()
    role_threads.start("second 1", train, plan, 1, batches[1:], params_of())
    ended = role_threads.all()
    seen = [batches[0], rows([1], batch_of(9, 2)), batches[1]]
    check(plan, [ended["server"]], [ended["second 0"][0], ended["second 1"][0]], seen)


def test_a_greeting_that_nobody_answered_is_said_again(role_threads: RoleThreads) -> None:
    (ep,) = pservers = free_endpoints(1)
    plan, batches = plan_for(pservers, 1), [batch_of(0, 1)]
    with FakeServer(ep) as fake_server:
        role_threads.start("trainer", train, plan, 0, batches, params_of())
        assert fake_server.hear().op == "hello"  # and the server ends
    role_threads.start("server", serve, plan, ep, params_of())
    ended = role_threads.all()
    check(plan, [ended["server"]], [ended["trainer"][0]], batches)


def test_a_server_whose_greeting_nobody_answered_says_it_again(role_threads: RoleThreads) -> None:
    """A server without a welcome sends its greeting again, and holds back other messages."""
    ep, other = pservers = free_endpoints(2)
    plan, batches = plan_for(pservers, 1), [batch_of(0, 1)]
    with FakeServer(other) as fake_server:
        role_threads.start(ep, serve, plan, ep, params_of())
        assert fake_server.hear().op == "peer"
    role_threads.start("trainer", train, plan, 0, batches, params_of())
    role_threads.start(other, serve, plan, other, params_of())
    ended = role_threads.all()
    check(plan, [ended[ep], ended[other]], [ended["trainer"][0]], batches)


def test_a_connection_that_was_welcome_and_breaks_is_an_error(role_threads: RoleThreads) -> None:
    """Only a role that was never welcomed may send hello again. After a welcome, its step may be
    lost on the other side."""
    (ep,) = free_endpoints(1)
    plan = plan_for((ep,), 1)
    with FakeServer(ep) as fake_server:
        role_threads.start("trainer", train, plan, 0, [batch_of(0, 1)], params_of())
        assert fake_server.hear().op == "hello"
        fake_server.tell("welcome", step=0, local="")
        until(lambda: fake_server.hear().op == "recv", "the trainer's question")
    assert str(role_threads.end("trainer")).startswith(
        f"pserver {ep} went away while trainer 0 waited for `recv` of step 0"
    )
    assert type(role_threads.end("trainer")) is LostPeerError


def test_who_waits_in_vain_for_the_next_job_is_told_for_what(role_threads: RoleThreads) -> None:
    (ep,) = pservers = free_endpoints(1)
    plan = plan_for(pservers, 2)
    role_threads.start("server", serve, plan, ep, params_of())
    with Peer(ep) as first, Peer(ep) as second:
        for k, peer in enumerate((first, second)):
            peer.hello(k, 2, session=str(k))
            assert peer.hear().op == "welcome"
        first.tell("complete")
        assert first.hear().op == "goodbye"
        first.hello(0, 2, session="0")  # the same trainer, which has not answered the goodbye yet
        assert [first.hear().op for _ in range(2)] == ["welcome", "goodbye"]
        first.tell("recv", step=0, blocks=[])
        assert "a `recv` message of trainer 0, which has left; pserver" in first.refused()
        role_threads.start("again", train, plan, 0, [], params_of(), deadline=1.0)
        error = role_threads.end("again")
        assert isinstance(error, DeadlineError)
        why = "the end of a job of 2 trainers, which trainer 0 has left: an answer to `hello`"
        assert f" s for pserver {ep}, which waited for {why}" in str(error)
        second.tell("complete")
        assert second.hear().op == "goodbye"
    role_threads.end("server")


def test_a_server_leaves_its_endpoint_to_the_next_one(role_threads: RoleThreads) -> None:
    """After each return of `run`, the endpoint can be bound again."""
    (ep,) = pservers = free_endpoints(1)
    plan = plan_for(pservers, 1)
    role_threads.start("server", serves, plan, ep, 30)

    def comes_and_goes() -> None:
        for _ in range(30):
            train(plan, 0, [], params_of())

    role_threads.start("trainer", comes_and_goes)
    ended = role_threads.all()
    assert np.array_equal(ended["server"]["params/b2"], params_of()["b2"])
