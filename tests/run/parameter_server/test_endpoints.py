"""Trainers and parameter servers over endpoints: the results of one device, and an error for each
failure.

Roles are threads with separate executors, which share nothing. A few tests start real processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import zmq
from helpers import (
    distance,
    init_of,
    mlp_batch,
    mlp_loss,
    mlp_params,
    plain_run,
    plain_step,
    tree_close,
    tree_equal,
)
from paths import ROOT, SUPPORT
from role_threads import (
    HANG,
    NEVER,
    FakeServer,
    Peer,
    RoleThreads,
    free_endpoints,
    serve,
    train,
    until,
)
from strict_python import STRICT_PYTHON

import dtrans
from dtrans.errors import ConfigError, DeadlineError, LostPeerError, PeerError, StateError
from dtrans.parameter_server.plan import PServerPlan
from dtrans.protocol import token, wire
from dtrans.protocol.refusals import EACH
from dtrans.protocol.server import sync_server
from dtrans.protocol.trainer import server_link
from dtrans.protocol.trainer.server_link import ServerLink
from dtrans.protocol.transport import ROLE_USER
from dtrans.run.net.ended_roles import EndedRoles
from dtrans.run.net.zmq_transport import ZmqTransport
from dtrans.run.parameter_server import server_connections


pytestmark = pytest.mark.usefixtures("folder")


# -- jobs ------------------------------------------------------------------------------------------


def plan_for(
    pservers: tuple[str, ...],
    *,
    trainers: int = 2,
    tx: Any = None,
    params: Any = None,
    loss: Any = mlp_loss,
    batch: Any = None,
    min_block_size: int = 1,
    **options: Any,
) -> PServerPlan:
    tx = tx or optax.adam(1e-2)
    params = mlp_params() if params is None else params
    batch = batch or mlp_batch(8)
    return flat_options.pserver(
        dtrans.trace(
            dtrans.make_train_step(loss, tx), params, jax.eval_shape(tx.init, params), *batch
        ),
        dtrans.trace(init_of(tx), params),
        pservers=pservers,
        trainers=trainers,
        min_block_size=min_block_size,
        **options,
    )


def whole(plan: PServerPlan, states: list[dict[str, Any]], name: str) -> Any:
    """Return a value, assembled from the blocks in the final states of the servers."""
    held = {n: x for state in states for n, x in state.items()}
    if name in held:
        return held[name]
    count = sum(n.startswith(f"{name}.block") for n in held)
    assert count, name
    return jnp.concatenate([held[f"{name}.block{i}"] for i in range(count)])


def job_equals_one_device(
    role_threads: RoleThreads,
    *,
    trainers: int,
    servers: int,
    tx: Any,
    dtype: Any,
    rtol: float,
    steps: int = 3,
    **options: Any,
) -> list[dict[str, Any]]:
    """Run a job, compare parameters, losses and the servers' final states with one device, and
    return the states."""
    pservers = free_endpoints(servers)
    params = options.pop("params", None) or mlp_params(dtype=dtype)
    loss = options.pop("loss", mlp_loss)
    batches = [mlp_batch(4 * trainers, dtype=dtype, seed=s) for s in range(steps)]
    plan = plan_for(pservers, trainers=trainers, tx=tx, params=params, loss=loss, batch=batches[0])
    for ep in pservers:
        role_threads.start(ep, serve, plan, ep, params)
    for k in range(trainers):
        role_threads.start(f"trainer {k}", train, plan, k, batches, params, **options)
    ended = role_threads.all()
    want, want_state, want_losses = plain_run(
        plain_step(loss, tx), params, tx.init(params), batches
    )
    losses = []
    for k in range(trainers):
        got, mine = ended[f"trainer {k}"]
        tree_close(got, want, rtol)
        losses.append(mine)
    for i, value in enumerate(want_losses):
        assert distance(jnp.mean(jnp.stack([mine[i] for mine in losses])), value) <= rtol
    states = [ended[ep] for ep in pservers]
    # the states that `exe.run(pserver, ...)` returned, by their paths
    spec = dtrans.trace(init_of(tx), params)(params)
    for root, tree in (("params", want), ("opt_state", want_state)):
        for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
            name = f"{root}/{jax.tree_util.keystr(path, simple=True, separator='/')}"
            assert distance(whole(plan, states, name), x) <= rtol, name
    assert jax.tree.structure(spec) == jax.tree.structure((want, want_state))
    return states


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "tx",
    [
        pytest.param(optax.adam(1e-2), id="adam"),
        pytest.param(optax.sgd(0.1, momentum=0.9), id="momentum"),
        pytest.param(optax.sgd(optax.cosine_decay_schedule(0.1, 5)), id="sgd-schedule"),
    ],
)
def test_two_trainers_and_two_pservers_equal_one_device_in_float64(
    role_threads: RoleThreads, tx: Any
) -> None:
    with jax.enable_x64(True):
        job_equals_one_device(
            role_threads, trainers=2, servers=2, tx=tx, dtype=jnp.float64, rtol=1e-12
        )


@pytest.mark.parametrize("trainers, servers", [(2, 2), (1, 1), (1, 2), (3, 1)])
def test_a_job_equals_one_device_in_float32(
    role_threads: RoleThreads, trainers: int, servers: int
) -> None:
    job_equals_one_device(
        role_threads,
        trainers=trainers,
        servers=servers,
        tx=optax.sgd(0.1, momentum=0.9),
        dtype=jnp.float32,
        rtol=1e-6,
    )


def test_a_server_without_blocks_serves_and_ends_cleanly(role_threads: RoleThreads) -> None:
    with jax.enable_x64(True):
        # two leaves that cannot be sliced
        params = {
            "s": jnp.float64(2.0),
            "w": jnp.arange(1.0, 4.0)[None],
        }
        loss = lambda params, x, y: jnp.mean((params["s"] * x[:, :3] * params["w"] - y) ** 2)
        states = job_equals_one_device(
            role_threads,
            trainers=2,
            servers=3,
            tx=optax.adam(0.1),
            dtype=jnp.float64,
            rtol=1e-12,
            params=params,
            loss=loss,
        )
        assert [bool(state) for state in states] == [True, True, False]


def test_odd_leaves_equal_one_device(role_threads: RoleThreads) -> None:
    """Test leaves that are 0-d, unused (with a constant gradient), empty, bfloat16 or larger than a
    message, or have one row."""
    with jax.enable_x64(True):
        params = {
            "big": jnp.linspace(-1, 1, 5 * 140_000).reshape(5, 140_000),  # 5.6 MB
            "empty": jnp.zeros((0, 3)),
            "half": jnp.ones((5, 3), jnp.bfloat16),
            "idle": jnp.float32(2.0),
            "idle16": jnp.bfloat16(2.0),
            "row": jnp.ones((1, 3)),
            "s": jnp.float64(0.5),
        }

        def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
            z = x @ params["big"][:, :3] * params["s"] + params["row"] + x @ params["half"]
            return jnp.mean((z - y) ** 2) + jnp.mean(params["big"] ** 2) + jnp.sum(params["empty"])

        tx = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.125))
        job_equals_one_device(
            role_threads,
            trainers=2,
            servers=2,
            tx=tx,
            dtype=jnp.float64,
            rtol=1e-12,
            params=params,
            loss=loss,
            steps=2,
        )


def test_another_batch_size_in_a_later_step_is_traced_again(role_threads: RoleThreads) -> None:
    (ep,) = pservers = free_endpoints(1)
    params, batches = mlp_params(), [mlp_batch(8), mlp_batch(4), mlp_batch(8)]
    plan = plan_for(pservers)
    role_threads.start("server", serve, plan, ep, params)
    for k in range(2):
        role_threads.start(f"trainer {k}", train, plan, k, batches, params)
    want, _, _ = plain_run(
        plain_step(mlp_loss, optax.adam(1e-2)), params, optax.adam(1e-2).init(params), batches
    )
    tree_close(role_threads.all()["trainer 1"][0], want, 1e-6)


def test_parameters_of_earlier_steps_keep_their_values(role_threads: RoleThreads) -> None:
    """The memory of these parameters is reused for received data only when no array uses it."""
    (ep,) = pservers = free_endpoints(1)
    params, batch, tx = mlp_params((5, 64, 3)), mlp_batch(8), optax.adam(1e-2)
    plan = plan_for(pservers, trainers=1, params=params)
    role_threads.start("server", serve, plan, ep, params)
    with dtrans.Executor(deadline=HANG) as exe:
        kept = [exe.run(plan.trainer_startup, params)]
        views = [np.asarray(kept[0]["w1"])]
        for _ in range(4):
            now, _ = exe.run(plan.trainer, kept[-1], *batch)
            kept.append(now)
            views.append(np.asarray(now["w1"]))
    role_threads.all()
    want = [params]
    state = tx.init(params)
    for _ in range(4):
        now, state, _ = jax.jit(plain_step(mlp_loss, tx))(want[-1], state, *batch)
        want.append(now)
    for got, view, expected in zip(kept, views, want, strict=True):
        tree_close(got, expected, 1e-5)
        assert distance(view, np.asarray(expected["w1"])) < 1e-5
    tree_equal(kept[0], params)


def peer_addresses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of the addresses to which trainers connect."""
    seen: list[str] = []
    real = ServerLink._open

    def opening(self: Any, address: str) -> None:
        seen.append(address)
        real(self, address)

    monkeypatch.setattr(ServerLink, "_open", opening)
    return seen


def one_trainer_job(role_threads: RoleThreads, tx: Any = None) -> str:
    """Run a job of one trainer and one server to its end. Return the endpoint."""
    (ep,) = pservers = free_endpoints(1)
    params, batches = mlp_params(), [mlp_batch(4)]
    tx = tx or optax.sgd(0.1)
    plan = plan_for(pservers, trainers=1, tx=tx, batch=batches[0])
    role_threads.start("server", serve, plan, ep, params)
    role_threads.start("trainer", train, plan, 0, batches, params)
    want, _, _ = plain_run(plain_step(mlp_loss, tx), params, tx.init(params), batches)
    tree_close(role_threads.all()["trainer"][0], want, 1e-6)
    return ep


def test_a_trainer_on_the_same_host_moves_to_the_unix_socket(
    role_threads: RoleThreads, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = peer_addresses(monkeypatch)
    ep = one_trainer_job(role_threads)
    assert seen[0] == ep
    assert seen[1].startswith(f"{folder}/dtrans-")
    assert len(seen) == 2


def test_where_no_unix_socket_fits_everything_goes_by_tcp(
    role_threads: RoleThreads, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = folder / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    seen = peer_addresses(monkeypatch)
    ep = one_trainer_job(role_threads)
    assert seen == [ep]
    deep.rmdir()  # the server has removed its files


def test_an_executor_that_is_closed_says_so(role_threads: RoleThreads) -> None:
    (ep,) = pservers = free_endpoints(1)
    params = mlp_params()
    plan = plan_for(pservers, trainers=1)
    role_threads.start("server", serve, plan, ep, params)
    with dtrans.Executor(deadline=HANG) as exe:
        exe.run(plan.trainer_startup, params)
    exe.close()  # a second call changes nothing
    with pytest.raises(StateError, match="^this executor is closed; make a new one$"):
        exe.run(plan.trainer_startup, params)
    role_threads.all()


def test_an_executor_whose_step_was_interrupted_says_so(role_threads: RoleThreads) -> None:
    params = mlp_params()
    plan = plan_for(free_endpoints(1), trainers=1)
    with dtrans.Executor(deadline=0.2) as exe:
        with pytest.raises(DeadlineError):
            exe.run(plan.trainer_startup, params)
        with pytest.raises(
            StateError,
            match="^program trainer 0 startup was interrupted in the middle of its communication",
        ):
            exe.run(plan.trainer_startup, params)


def test_an_executor_is_one_trainer(role_threads: RoleThreads) -> None:
    (ep,) = pservers = free_endpoints(1)
    params = mlp_params()
    plan = plan_for(pservers)
    role_threads.start("server", serve, plan, ep, params)
    role_threads.start("trainer 0", train, plan, 0, [], params)
    with dtrans.Executor(deadline=HANG) as exe:
        exe.run(plan.trainer_startup_program(1), params)
        with pytest.raises(
            ConfigError,
            match="has run programs of trainer 1, so it cannot run programs of trainer 0; make one",
        ):
            exe.run(plan.trainer_program(0), params, *mlp_batch(4))
    role_threads.all()


@pytest.mark.parametrize("deadline", [0, -1.0, float("nan")])
def test_a_deadline_that_is_not_a_time_is_refused(deadline: float) -> None:
    with pytest.raises(ConfigError, match="^deadline must be a positive number of seconds, it is "):
        dtrans.Executor(deadline=deadline)


def test_an_endless_deadline_is_allowed(role_threads: RoleThreads) -> None:
    (ep,) = pservers = free_endpoints(1)
    params = mlp_params()
    plan = plan_for(pservers, trainers=1)
    role_threads.start("server", serve, plan, ep, params, deadline=float("inf"))
    role_threads.start("trainer", train, plan, 0, [mlp_batch(4)], params, deadline=float("inf"))
    role_threads.all()


# -- real processes --------------------------------------------------------------------------------

ROLE = """
import os, sys
sys.path[:0] = {path!r}
import jax, numpy as np, optax
import dtrans
from helpers import init_of, mlp_batch, mlp_loss, mlp_params

kind, index, pservers, trainers, steps, out = sys.argv[1:]
index, trainers, steps = int(index), int(trainers), int(steps)
params, tx, (x, y) = mlp_params(), optax.adam(1e-2), mlp_batch(8)
t = dtrans.DistributeTranspiler()
t.transpile(
    trainer_id=index if kind == "trainer" else 0,
    program=dtrans.trace(dtrans.make_train_step(mlp_loss, tx), params, tx.init(params), x, y),
    startup_program=dtrans.trace(init_of(tx), params),
    pservers=pservers,
    trainers=trainers,
)
n = 8 // trainers
with dtrans.Executor(deadline=60) as exe:
    if kind == "pserver":
        main, startup = t.get_pserver_programs(pservers.split(",")[index])
        state = exe.run(startup, params)
        print("ready", flush=True)
        result = exe.run(main, state)
    else:
        params = exe.run(t.get_trainer_startup_program(), params)
        print("ready", flush=True)
        for i in range(steps):
            mine = slice(index * n, index * n + n)
            params, loss = exe.run(t.get_trainer_program(), params, x[mine], y[mine])
        if steps < 0:
            sys.stdin.read()  # alive, and silent
        result = params
np.savez(out, **result)
"""


class Role:
    """Role in a process, which is killed at the end of the test if it still runs."""

    def __init__(
        self,
        folder: Path,
        kind: str,
        index: int,
        pservers: tuple[str, ...],
        trainers: int,
        steps: int,
    ) -> None:

        self.out = folder / f"{kind}{index}.npz"
        script = ROLE.format(path=[str(SUPPORT), str(ROOT)])
        arguments = [kind, str(index), ",".join(pservers), str(trainers), str(steps), str(self.out)]
        self.process = subprocess.Popen(
            [*STRICT_PYTHON, "-c", script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Role:
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.kill()
        self.process.communicate()

    def ready(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n", self.process.communicate()[1]

    def end(self) -> dict[str, np.ndarray]:
        _, errors = self.process.communicate(timeout=HANG)
        assert self.process.returncode == 0, errors
        with np.load(self.out) as found:
            return dict(found)


def test_four_processes_equal_one_device(tmp_path: Path) -> None:
    pservers, steps = free_endpoints(2), 5
    kinds = [("pserver", 0), ("pserver", 1), ("trainer", 0), ("trainer", 1)]
    roles = [Role(tmp_path, kind, i, pservers, 2, steps) for kind, i in kinds]
    try:
        got = [role.end() for role in roles]
    finally:
        for role in roles:
            role.__exit__()
    params, tx = mlp_params(), optax.adam(1e-2)
    want, want_state, _ = plain_run(
        plain_step(mlp_loss, tx), params, tx.init(params), [mlp_batch(8)] * steps
    )
    for trained in got[2:]:
        tree_close({n: trained[n] for n in want}, jax.tree.map(np.asarray, want), 1e-6)
    held = got[0] | got[1]
    for n, x in want_state[0].mu.items():
        assert distance(held[f"opt_state/0/mu/{n}"], x) < 1e-6


def test_a_trainer_of_a_killed_pserver_is_told_at_once(
    role_threads: RoleThreads, tmp_path: Path
) -> None:
    (ep,) = pservers = free_endpoints(1)
    params = mlp_params()
    with Role(tmp_path, "pserver", 0, pservers, 2, 0) as role:
        role.ready()
        plan = plan_for(pservers, min_block_size=8192, kind="local")
        started = threading.Event()
        role_threads.start(
            *("trainer", train, plan, 0, [mlp_batch(8)], params),
            before=lambda i: started.set(),
            deadline=NEVER,
        )
        assert started.wait(HANG)
        role.process.send_signal(signal.SIGKILL)
        role.process.wait(HANG)
        error = role_threads.end("trainer")
    assert type(error) is LostPeerError
    assert (
        str(error)
        == f"pserver {ep} went away while trainer 0 waited for `recv` of step 1 (params/b1, "
        "params/b2, params/w1, ...)"
    )


def test_a_pserver_that_is_terminated_says_so_and_leaves_nothing(
    role_threads: RoleThreads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = tmp_path / "folders"
    folders.mkdir()
    monkeypatch.setenv("TMPDIR", str(folders))
    (ep,) = pservers = free_endpoints(1)
    params = mlp_params()
    with Role(tmp_path, "pserver", 0, pservers, 2, 0) as role:
        role.ready()
        started = threading.Event()
        plan = plan_for(pservers, min_block_size=8192, kind="local")
        role_threads.start(
            "trainer", train, plan, 0, [mlp_batch(8)], params, before=lambda i: started.set()
        )
        assert started.wait(HANG)
        assert list(folders.iterdir())  # of the Unix socket
        role.process.terminate()
        assert role.process.wait(HANG) == 128 + signal.SIGTERM
        error = role_threads.end("trainer")
    assert str(error) == f"pserver {ep} refused trainer 0: it ended: SystemExit: 143"
    assert not list(folders.iterdir())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_trainer_is_named_by_the_server_before_its_deadline(
    role_threads: RoleThreads, tmp_path: Path, how: signal.Signals
) -> None:
    (ep,) = pservers = free_endpoints(1)
    params = mlp_params()
    plan = plan_for(pservers, min_block_size=8192, kind="local")
    role_threads.start("server", serve, plan, ep, params, deadline=HANG, patience=2.0)
    with Role(tmp_path, "trainer", 0, pservers, 2, -1) as role:
        role.ready()
        started = threading.Event()
        role_threads.start(
            "trainer 1", train, plan, 1, [mlp_batch(8)], params, before=lambda i: started.set()
        )
        assert started.wait(HANG)
        role.process.send_signal(how)
        error, other = role_threads.end("server"), role_threads.end("trainer 1")
        role.process.kill()
    assert type(error) is LostPeerError
    assert (
        str(error)
        == f"the connection of trainer 0 to pserver {ep} ended without a goodbye, in step 1"
    )
    assert isinstance(other, PeerError)
    assert str(other) == f"pserver {ep} refused trainer 1: it ended: {error}"


def test_a_trainer_that_holds_the_lock_of_python_is_not_taken_for_dead(
    role_threads: RoleThreads,
) -> None:
    """Meanwhile, no thread of this process runs Python code."""
    (ep,) = pservers = free_endpoints(1)
    plan, params = plan_for(pservers, trainers=1), mlp_params()
    role_threads.start("server", serve, plan, ep, params, patience=1.0)
    hold = lambda i: ctypes.PyDLL(None).usleep(int(1.5e6))
    role_threads.start("trainer", train, plan, 0, [mlp_batch(8)], params, before=hold, patience=1.0)
    role_threads.all()


def test_a_server_that_is_stopped_for_a_while_goes_on(
    role_threads: RoleThreads, tmp_path: Path
) -> None:
    pservers, params, batches = free_endpoints(1), mlp_params(), [mlp_batch(8)] * 3
    plan, tx = plan_for(pservers, trainers=1, min_block_size=8192, kind="local"), optax.adam(1e-2)
    with Role(tmp_path, "pserver", 0, pservers, 1, 0) as role:
        role.ready()
        going_on = threading.Timer(5.0, role.process.send_signal, [signal.SIGCONT])

        def stop(i: int) -> None:
            if i == 1:
                role.process.send_signal(signal.SIGSTOP)
                going_on.start()

        role_threads.start("trainer", train, plan, 0, batches, params, before=stop)
        trained, _ = role_threads.all()["trainer"]
        role.end()
    expected, _, _ = plain_run(plain_step(mlp_loss, tx), params, tx.init(params), batches)
    tree_close(trained, expected, 1e-6)


# -- who leaves, and who does not come -------------------------------------------------------------


@pytest.mark.parametrize("sync_mode", [True, False])
def test_a_trainer_that_ended_before_its_hello_is_not_waited_for_under_a_launcher(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch, sync_mode: bool
) -> None:
    (ep,) = pservers = free_endpoints(1)
    plan, params = (
        plan_for(pservers, mode=dtrans.Sync() if sync_mode else dtrans.Async()),
        mlp_params(),
    )
    with EndedRoles() as told:
        monkeypatch.setenv(*next(iter(told.environment.items())))
        role_threads.start("server", serve, plan, ep, params, deadline=NEVER)
        role_threads.start("trainer 0", train, plan, 0, [mlp_batch(8)], params, deadline=NEVER)
        told.note("trainer 1", "exit code 3")
        server, trainer = role_threads.end("server"), role_threads.end("trainer 0")
    if sync_mode:
        why = f"trainer 1 ended with exit code 3 before it said hello to pserver {ep}, in step 1"
        assert type(server) is LostPeerError and str(server) == why
        assert type(trainer) is PeerError and str(trainer).endswith(why)
    else:
        assert isinstance(server, dict) and isinstance(trainer, tuple)


def test_the_reason_for_which_a_trainer_failed_reaches_everybody_at_once(
    role_threads: RoleThreads,
) -> None:
    pservers = free_endpoints(2)
    params, batches = mlp_params(), [mlp_batch(8)] * 3
    plan = plan_for(pservers)

    def fails(i: int) -> None:
        if i == 1:
            raise ZeroDivisionError("the third image is blank")

    for ep in pservers:
        role_threads.start(ep, serve, plan, ep, params, deadline=NEVER)
    for k, before in enumerate((fails, None)):
        options = {"before": before, "deadline": NEVER}
        role_threads.start(f"trainer {k}", train, plan, k, batches, params, **options)
    assert isinstance(role_threads.end("trainer 0"), ZeroDivisionError)
    reason = "trainer 0 failed: ZeroDivisionError: the third image is blank"
    for ep in pservers:
        error = role_threads.end(ep)
        assert isinstance(error, PeerError)
        assert reason in str(error)
    error = role_threads.end("trainer 1")
    assert isinstance(error, PeerError)
    assert any(
        str(error) == f"pserver {ep} refused trainer 1: it ended: {reason}" for ep in pservers
    )


def test_a_trainer_that_makes_fewer_steps_than_another_is_named_beside_it(
    role_threads: RoleThreads,
) -> None:
    (ep,) = pservers = free_endpoints(1)
    params, batch = mlp_params(), mlp_batch(8)
    plan = plan_for(pservers, on_trainer_exit="error")
    role_threads.start("server", serve, plan, ep, params)
    role_threads.start("trainer 0", train, plan, 0, [batch], params)
    role_threads.start("trainer 1", train, plan, 1, [batch] * 3, params)
    reason = (
        "trainer 0 closed after step 1 while trainer 1 sends step 2; make the same number of steps "
        "in all trainers, or pass dtrans.pserver(on_trainer_exit='drop')"
    )
    assert str(role_threads.end("server")) == reason
    assert (
        str(role_threads.end("trainer 1")) == f"pserver {ep} refused trainer 1: it ended: {reason}"
    )
    assert isinstance(role_threads.end("trainer 0"), tuple)  # it has done its part


@pytest.mark.parametrize("leave", ["with", "close"])
def test_a_pserver_that_is_not_there_is_named_after_the_deadline(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch, leave: str
) -> None:
    """The close does not wait until messages to the peer are sent."""
    for module in (server_connections, server_link):
        monkeypatch.setattr(module, "LINGER", NEVER)
    (ep,) = pservers = free_endpoints(1)
    params = mlp_params()
    plan = plan_for(pservers)

    def trainer() -> DeadlineError:
        if leave == "with":
            with pytest.raises(DeadlineError) as caught, dtrans.Executor(deadline=0.5) as exe:
                exe.run(plan.trainer_startup_program(1), params)
        else:
            exe = dtrans.Executor(deadline=0.5)
            with pytest.raises(DeadlineError) as caught:
                exe.run(plan.trainer_startup_program(1), params)
            exe.close()
        return caught.value.with_traceback(None)

    role_threads.start("trainer", trainer)
    error = role_threads.end("trainer")
    # a busy machine may schedule the trainer late
    message = re.sub(r"waited \d+\.\d s", "waited N s", str(error))
    assert message == (
        f"trainer 1 waited N s for pserver {ep}: an answer to `hello` (is it running, and is "
        "this its endpoint?)"
    )
    assert isinstance(error, TimeoutError)


def test_an_error_that_was_dropped_leaves_nothing_that_closing_waits_for(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sockets of a failed connection are closed at once, and not by the garbage collector."""
    for module in (server_connections, server_link):
        monkeypatch.setattr(module, "LINGER", NEVER)
    plan = plan_for(free_endpoints(1), trainers=1)

    def trainer() -> None:
        exe = dtrans.Executor(deadline=0.2)
        with contextlib.suppress(DeadlineError):
            exe.run(plan.trainer_startup, mlp_params())
        gc.collect()
        exe.close()

    role_threads.start("trainer", trainer)
    assert role_threads.end("trainer") is None


def test_without_wait_port_a_pserver_that_is_not_there_is_an_error_at_once(
    role_threads: RoleThreads,
) -> None:
    (ep,) = pservers = free_endpoints(1)
    plan = plan_for(pservers, trainers=1)
    options: dict[str, Any] = {"deadline": NEVER, "wait_port": False}
    role_threads.start("trainer", train, plan, 0, [], mlp_params(), **options)
    error = role_threads.end("trainer")
    assert type(error) is PeerError
    told = f"trainer 0 cannot connect to the pserver at {ep}: Connection refused; start"
    assert str(error).startswith(told)


def test_trainers_may_start_before_their_pserver(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    (ep,) = pservers = free_endpoints(1)
    params = mlp_params()
    plan = plan_for(pservers, trainers=1)
    seen = peer_addresses(monkeypatch)
    role_threads.start("trainer", train, plan, 0, [mlp_batch(4)], params)
    until(lambda: seen, "the trainer to connect")
    role_threads.start("server", serve, plan, ep, params)
    role_threads.all()


def test_trainers_that_never_come_are_named(role_threads: RoleThreads) -> None:
    (ep,) = pservers = free_endpoints(1)
    params = mlp_params()
    plan = plan_for(pservers, trainers=3, batch=mlp_batch(6))
    role_threads.start("server", serve, plan, ep, params, deadline=1.0)
    role_threads.start("trainer 1", train, plan, 1, [mlp_batch(6)], params)
    error, other = role_threads.end("server"), role_threads.end("trainer 1")
    assert isinstance(error, DeadlineError)
    waited = str(error).split()[3]
    assert 1.0 <= float(waited) < 10
    assert str(error) in (
        f"pserver {ep} waited {waited} s for trainers 0, 2 to say hello",
        f"pserver {ep} and trainer 1 waited {waited} s for gradients of step 1 from trainer 0 (not "
        "here yet), "
        "trainer 2 (not here yet)",
    )
    assert str(other) == f"pserver {ep} refused trainer 1: it ended: {error}"


def test_a_trainer_that_is_late_at_the_barrier_is_named_beside_those_who_wait(
    role_threads: RoleThreads,
) -> None:
    (ep,) = pservers = free_endpoints(1)
    params = mlp_params()
    plan = plan_for(pservers)
    ended = threading.Event()

    def server() -> None:
        try:
            serve(plan, ep, params, deadline=1.5)
        finally:
            ended.set()

    role_threads.start("server", server)
    # the trainer computes for longer than any deadline
    slow = lambda i: ended.wait(HANG)
    role_threads.start("trainer 0", train, plan, 0, [mlp_batch(8)], params, deadline=1.5)
    role_threads.start(
        "trainer 1", train, plan, 1, [mlp_batch(8)], params, deadline=1.5, before=slow
    )
    error = role_threads.end("server")
    waited = str(error).split()[6]
    assert isinstance(error, DeadlineError)
    late = "gradients of step 1 from trainer 1 (computing)"
    assert str(error) == f"pserver {ep} and trainer 0 waited {waited} s for {late}"
    assert 1.5 <= float(waited) < 10
    # trainer 0 knew for which role the server waits, so it waited as long as the server
    for k in (0, 1):
        assert (
            str(role_threads.end(f"trainer {k}"))
            == f"pserver {ep} refused trainer {k}: it ended: {error}"
        )


def test_a_trainer_that_is_a_little_late_at_every_step_is_not_too_late(
    role_threads: RoleThreads,
) -> None:
    """The deadline limits each single wait, also if a role waits each time when the server
    checks."""
    (ep,) = pservers = free_endpoints(1)
    params, steps = mlp_params(), [mlp_batch(8)] * 8
    plan = plan_for(pservers)
    role_threads.start("server", serve, plan, ep, params, deadline=2.0)
    role_threads.start("trainer 0", train, plan, 0, steps, params)
    # the time of the computation
    role_threads.start("trainer 1", train, plan, 1, steps, params, before=lambda i: time.sleep(0.5))
    role_threads.all()


def test_a_failed_server_tells_its_trainers_why(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Any) -> None:
        raise MemoryError("no room for the moments")

    monkeypatch.setattr(sync_server.SyncServer, "_make_step", fails)
    (ep,) = pservers = free_endpoints(1)
    params = mlp_params()
    plan = plan_for(pservers)
    role_threads.start("server", serve, plan, ep, params)
    for k in range(2):
        role_threads.start(f"trainer {k}", train, plan, k, [mlp_batch(8)], params)
    assert isinstance(role_threads.end("server"), MemoryError)
    for k in range(2):
        assert (
            str(role_threads.end(f"trainer {k}"))
            == f"pserver {ep} refused trainer {k}: it ended: MemoryError: no room for the moments"
        )


# -- roles that do not agree -----------------------------------------------------------------------


def disagreement(role_threads: RoleThreads, mine: dict[str, Any]) -> str:
    """Let a trainer with another plan meet a server. Return the error of the trainer.

    The server then serves a trainer with the right plan. The results are those of the right plan
    alone.
    """
    (ep,) = pservers = free_endpoints(1)
    plan, params, batches = plan_for(pservers, trainers=1), mlp_params(), [mlp_batch(8)]
    role_threads.start("server", serve, plan, ep, params)
    other = plan_for(pservers, **{"trainers": 1} | mine)
    role_threads.start("other", train, other, 0, [], mine.get("params", params))
    error = role_threads.end("other")
    assert isinstance(error, PeerError)
    role_threads.start("trainer", train, plan, 0, batches, params)
    tx = optax.adam(1e-2)
    want, _, _ = plain_run(plain_step(mlp_loss, tx), params, tx.init(params), batches)
    tree_close(role_threads.end("trainer")[0], want, 1e-6)
    assert isinstance(role_threads.end("server"), dict)
    start = f"pserver {ep} refused trainer 0: trainer 0 plans something else than pserver {ep}: "
    end = "; every role must plan the same step with the same options"
    assert str(error).startswith(start) and str(error).endswith(end), error
    return str(error)[len(start) : -len(end)].replace(ep, "{ep}")


@pytest.mark.parametrize(
    "mine, said",
    [
        (
            {"tx": optax.adam(2e-2)},
            "part update (the optimizer, its learning rate, or another of its numbers)",
        ),
        (
            {"loss": lambda p, x, y: 2.0 * mlp_loss(p, x, y)},
            "part loss (the loss, or a constant in it)",
        ),
        (
            {"on_trainer_exit": "error"},
            "on_trainer_exit is 'error' at trainer 0, 'drop' at pserver {ep}",
        ),
    ],
    ids=["rate", "loss", "option"],
)
def test_equal_shapes_do_not_let_another_step_train_in_silence(
    role_threads: RoleThreads, mine: dict[str, Any], said: str
) -> None:
    assert disagreement(role_threads, mine) == said


def test_servers_of_other_plans_refuse_each_other(role_threads: RoleThreads) -> None:
    """The servers exchange the same reductions, but would end with other numbers."""
    pservers, params = free_endpoints(2), mlp_params()
    steps = [optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(rate)) for rate in (0.1, 0.2)]
    for ep, tx in zip(pservers, steps, strict=True):
        role_threads.start(
            ep, serve, plan_for(pservers, trainers=1, tx=tx), ep, params, deadline=2.0
        )
    errors = [str(role_threads.end(ep)) for ep in pservers]
    assert any("plans something else than pserver" in e and "part update" in e for e in errors), (
        errors
    )


def test_who_never_came_since_it_was_refused_is_named_with_the_reason(
    role_threads: RoleThreads,
) -> None:
    (ep,) = pservers = free_endpoints(1)
    role_threads.start("server", serve, plan_for(pservers), ep, mlp_params(), deadline=1.5)
    role_threads.start(
        "trainer 1", train, plan_for(pservers, tx=optax.adam(1.0)), 1, [], mlp_params()
    )
    assert isinstance(role_threads.end("trainer 1"), PeerError)
    error = str(role_threads.end("server"))
    assert "for trainers 0, 1 to say hello; trainer 1 plans something else than" in error, error


# -- the token -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "its, strangers", [("a secret", ""), ("", "a secret"), ("a secret", "another")]
)
def test_who_has_not_the_token_is_told_so_at_once_and_takes_nobodys_place(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch, its: str, strangers: str
) -> None:
    # on loopback, a token may be short, or missing
    monkeypatch.setenv("DTRANS_TRANSPORT_ENCRYPTION", "auto")
    (ep,) = pservers = free_endpoints(1)
    params, plan = mlp_params(), plan_for(pservers, trainers=1)
    bound = threading.Event()
    real = ZmqTransport.bind

    def bind(*args: Any, **options: Any) -> Any:
        door = real(*args, **options)
        bound.set()
        return door

    monkeypatch.setattr(ZmqTransport, "bind", bind)
    monkeypatch.setenv("DTRANS_TOKEN", its)
    role_threads.start("server", serve, plan, ep, params)
    assert bound.wait(HANG)
    monkeypatch.setenv("DTRANS_TOKEN", strangers)
    role_threads.start("stranger", train, plan, 0, [], params, deadline=NEVER)
    error = role_threads.end("stranger")
    assert isinstance(error, PeerError)
    assert str(error).startswith(
        f"pserver {ep} does not admit trainer 0: the two processes have different values of "
        "DTRANS_TOKEN"
    )
    with Peer(ep) as peer:  # none of its messages is read
        peer.hello()
        peer.tell("abort", reason="I say so")
        monkeypatch.setenv("DTRANS_TOKEN", its)
        role_threads.start("trainer", train, plan, 0, [mlp_batch(8)], params)
        role_threads.end("trainer")
        assert not peer._socket.poll(0)
    assert isinstance(role_threads.end("server"), dict)


def test_a_server_that_has_not_the_token_is_told_nothing(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake server admits and welcomes every peer."""
    (ep,) = free_endpoints(1)
    real = token.is_shown
    monkeypatch.setattr(
        token, "is_shown", lambda given, secret, of: of == ROLE_USER or real(given, secret, of)
    )
    with FakeServer(ep) as fake:
        role_threads.start("trainer", train, plan_for((ep,), trainers=1), 0, [], mlp_params())
        assert fake.hear().op == "hello"
        fake.say(wire.header("welcome", step=0, local="", proof="0" * 64))
        error = role_threads.end("trainer")
    assert str(error) == (
        f"the process that welcomes trainer 0 as pserver {ep} does not have the job's token; set "
        "the same token for all processes of the job"
    )


def test_shapes_that_differ_name_the_leaf_and_both_shapes(role_threads: RoleThreads) -> None:
    mine = {"params": mlp_params((5, 7, 3))}
    said = disagreement(role_threads, mine)
    assert said.startswith("params/b1 is f32[7] at trainer 0, f32[6] at pserver {ep}; ")


def test_types_that_differ_name_the_leaf_and_both_types(role_threads: RoleThreads) -> None:
    mine = {"params": mlp_params(dtype=jnp.bfloat16), "batch": mlp_batch(8, dtype=jnp.bfloat16)}
    said = disagreement(role_threads, mine)
    assert said.startswith("params/b1 is bf16[6] at trainer 0, f32[6] at pserver {ep}; ")


def test_a_leaf_that_the_server_does_not_hold_is_named(role_threads: RoleThreads) -> None:
    mine = {"params": mlp_params() | {"a": jnp.ones(3)}}
    mine["loss"] = lambda params, x, y: (
        mlp_loss({n: p for n, p in params.items() if n != "a"}, x, y) + params["a"][0]
    )
    said = disagreement(role_threads, mine)
    assert said.startswith("params/a is f32[3] at trainer 0, missing at pserver {ep}; ")


def test_another_number_of_trainers_is_refused(role_threads: RoleThreads) -> None:
    (ep,) = pservers = free_endpoints(1)
    params, batches = mlp_params(), [mlp_batch(8)]
    plan = plan_for(pservers)
    role_threads.start("server", serve, plan, ep, params)
    role_threads.start("another", train, plan_for(pservers, trainers=4), 0, batches, params)
    assert str(role_threads.end("another")) == (
        f"pserver {ep} refused trainer 0: trainer 0 was planned with 4 trainers, pserver {ep} with "
        "2; every role must plan the same number of trainers"
    )
    for k in range(2):  # the server continues
        role_threads.start(f"trainer {k}", train, plan, k, batches, params)
    assert isinstance(role_threads.end("server"), dict)


def test_the_same_trainer_id_in_two_processes_is_refused(role_threads: RoleThreads) -> None:
    (ep,) = pservers = free_endpoints(1)
    params = mlp_params()
    plan = plan_for(pservers)
    first = threading.Event()
    second = threading.Event()

    def wait(i: int) -> None:
        first.set()
        assert second.wait(HANG)

    role_threads.start("server", serve, plan, ep, params)
    role_threads.start("trainer 0", train, plan, 0, [mlp_batch(8)], params, before=wait)
    assert first.wait(HANG)
    role_threads.start("again", train, plan, 0, [mlp_batch(8)], params)
    assert str(role_threads.end("again")) == (
        f"pserver {ep} refused trainer 0: another process is already connected as trainer 0; set a "
        "different DTRANS_TRAINER_ID, or trainer_id, in each process"
    )
    role_threads.start("trainer 1", train, plan, 1, [mlp_batch(8)], params)
    second.set()
    role_threads.end("trainer 0")
    assert isinstance(role_threads.end("server"), dict)  # the job continued without the impostor


# -- ports -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "endpoint", ["192.0.2.1:6174", "a.host.invalid:6174", "[2001:db8::1]:6174"]
)
def test_binding_another_address_than_loopback_has_to_be_allowed(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DTRANS_TOKEN", raising=False)
    plan = plan_for((endpoint,), trainers=1)
    with pytest.raises(ConfigError) as caught:
        serve(plan, endpoint, mlp_params())
    assert str(caught.value) == (
        f"this pserver is at {endpoint}, which is not on loopback, so other hosts can connect to "
        f"it. To allow this, set Executor(allow_remote=True) and {token.NEEDED}"
    )
    with pytest.raises(
        ConfigError,
        match=r"not on loopback\. Set DTRANS_TOKEN, the same secret in all processes",
    ):
        serve(plan, endpoint, mlp_params(), allow_remote=True)


def test_an_address_that_is_not_this_machines_cannot_be_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DTRANS_TOKEN", token.new_token())
    plan = plan_for(("192.0.2.1:6174",), trainers=1)
    with pytest.raises(ConfigError, match="^pserver 192.0.2.1:6174 cannot be bound: "):
        serve(plan, "192.0.2.1:6174", mlp_params(), allow_remote=True)


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        ep = f"127.0.0.1:{held.getsockname()[1]}"
        plan = plan_for((ep,), trainers=1)
        with pytest.raises(
            ConfigError, match=f"^pserver {ep} cannot be bound: Address already in use$"
        ):
            serve(plan, ep, mlp_params())


# -- messages that are not ours --------------------------------------------------------------------

START = np.arange(8, dtype=np.float32).reshape(4, 2)
GRAD = np.ones((4, 2), np.float32)


def tiny_server(role_threads: RoleThreads, trainers: int = 1) -> str:
    """Start a server of one leaf `params/w` (4 rows of 2) with SGD at rate 0.5.

    Return its endpoint.
    """
    (ep,) = pservers = free_endpoints(1)
    params = {"w": jnp.asarray(START)}
    loss = lambda params, x: jnp.mean(x @ params["w"])
    plan = plan_for(
        pservers,
        trainers=trainers,
        tx=optax.sgd(0.5),
        params=params,
        loss=loss,
        batch=(jnp.ones((trainers, 4)),),
    )
    role_threads.start("server", serve, plan, ep, params)
    return ep


NAME = "params/w@GRAD"
HEADER = {"order": sys.byteorder, "session": "s", "trainer": 0, "trainers": 1}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "frames, reason",
    [
        ([b"\xc1"], "a message whose header is not msgpack"),
        ([b"GET / HTTP/1.1\r\n\r\n"], "a message whose header is not msgpack"),
        (
            [b"\x05"],
            f"a message of protocol version None; this process uses version {wire.VERSION}",
        ),
        ([b"\x93\x01\x02"], "a message whose header is not msgpack"),
        ([wire.header("hello", **HEADER)[:-3]], "a message whose header is not msgpack"),
        (
            [wire.header("hello", **HEADER, v=wire.VERSION + 1)],
            f"a message of protocol version {wire.VERSION + 1}; this process uses version "
            f"{wire.VERSION}",
        ),
        ([wire.header("frobnicate")], "a message of unknown kind 'frobnicate'"),
        ([wire.header("hello", trainer=0)], "a `hello` message whose field `trainers` is missing"),
        (
            [wire.header("hello", **(HEADER | {"trainer": True}))],
            "a `hello` message whose field `trainer` is missing",
        ),
        (
            [wire.header("hello", **(HEADER | {"trainer": 3}))],
            "the trainer's id is 3, expected 0 to 0",
        ),
        (
            [wire.header("hello", **(HEADER | {"trainer": -1}))],
            "the trainer's id is -1, expected 0 to 0",
        ),
        (
            [wire.header("hello", **(HEADER | {"order": "middle"}))],
            "trainer 0 is middle-endian, pserver {ep} is",
        ),
        (
            [wire.header("send", step=0, pieces=[])],
            "a `send` message from a peer that has not said hello",
        ),
        ([wire.header("complete")], "a `complete` message from a peer that has not said hello"),
        (
            [wire.header("abort", reason="no")],
            "a `abort` message from a peer that has not said hello",
        ),
        ([b"", wire.header("complete")], "a message whose header is not msgpack"),
        ([b"\x81" + b"\x91" * 2000], "a message whose header is not msgpack"),
        ([b"\xa1\xff"], "a message whose header is not msgpack"),
    ],
)
def test_a_stranger_that_talks_nonsense_is_refused_and_logged(
    role_threads: RoleThreads,
    caplog: pytest.LogCaptureFixture,
    strange_server: str,
    frames: list[bytes],
    reason: str,
) -> None:
    caplog.set_level(logging.WARNING, "dtrans.pserver")
    reason = reason.replace("{ep}", strange_server)
    with Peer(strange_server) as peer:
        peer.say(*frames)
        assert reason in peer.refused()
    (record,) = caplog.records
    assert record.getMessage().startswith(
        f"pserver {strange_server} refused a message of an unknown process: "
    )
    assert reason in record.getMessage()


@pytest.fixture
def strange_server(role_threads: RoleThreads) -> Iterator[str]:
    """Yield the endpoint of a server that must still serve its trainer correctly after the test."""
    ep = tiny_server(role_threads)
    yield ep
    with Peer(ep) as peer:
        peer.hello()
        assert peer.hear().op == "welcome"
        one_right_step(peer)
        peer.leave()
    (final,) = role_threads.all().values()
    tree_equal(final, {"params/w": jnp.asarray(START - 0.5 * GRAD)})


def one_right_step(peer: Peer, step: int = 0) -> None:
    """Send the gradient of the only trainer of `tiny_server`, and check the answer."""
    peer.tell("send", GRAD.tobytes(), step=step, pieces=[[[NAME, 0, 32]]])
    peer.tell("send_barrier", step=step)
    peer.tell("recv", step=step + 1, blocks=[["params/w", [4, 2], "float32"]])
    answer = peer.hear()
    assert answer.op == "blocks" and answer["step"] == step + 1, answer
    got = np.frombuffer(answer.frames[0], np.float32).reshape(4, 2)
    np.testing.assert_array_equal(got, START - 0.5 * (step + 1) * GRAD)


def test_what_a_trainer_says_wrongly_is_refused_and_changes_nothing(
    role_threads: RoleThreads, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "dtrans.pserver")
    ep = tiny_server(role_threads)
    noise = b"\x7f" * 32
    one = lambda *piece: {"step": 0, "pieces": [[list(piece)]]}
    table = ["params/w", [4, 2], "float32"]
    wrong: list[tuple[str, list[bytes], dict[str, Any], str]] = [
        (
            "send",
            [noise],
            one(NAME, 0, 32) | {"step": 1},
            "a `send` message of step 1 arrived, but pserver {ep} is at step 0",
        ),
        (
            "send",
            [noise],
            one(NAME, 0, 32) | {"step": -1},
            "a `send` message of step -1 arrived, but pserver {ep} is at step 0",
        ),
        (
            "send",
            [noise],
            one("params/v@GRAD", 0, 32),
            "params/v@GRAD is not a gradient that trainer 0 sends to",
        ),
        ("send", [noise], one(NAME, 1, 32), "bytes 1 to 33 of params/w@GRAD, which has 32"),
        ("send", [noise], one(NAME, 2**62, 32), "of params/w@GRAD, which has 32"),
        ("send", [noise], one(NAME, -8, 8), "a piece that is not [name, offset, nbytes]"),
        ("send", [noise], one(NAME, 0, 2**64 - 1), "a piece that is not [name, offset, nbytes]"),
        ("send", [noise], one(NAME, 0.0, 32), "a piece that is not [name, offset, nbytes]"),
        ("send", [noise], one(["w"], 0, 32), "a piece that is not [name, offset, nbytes]"),
        (
            "send",
            [noise[:20]],
            one(NAME, 0, 32),
            "a truncated frame: its header lists 32 bytes up to the end of params/w@GRAD, but it "
            "has 20",
        ),
        (
            "send",
            [noise + noise],
            one(NAME, 0, 32),
            "a frame of 64 bytes, but its header lists 32",
        ),
        ("send", [], one(NAME, 0, 32), "a `send` message with 0 frames, but its header lists 1"),
        (
            "send",
            [noise],
            {"step": 0, "pieces": []},
            "a `send` message with 1 frames, but its header lists 0",
        ),
        (
            "send",
            [noise],
            {"step": 0, "pieces": [7]},
            "whose field `pieces` is not a list of lists",
        ),
        (
            "send",
            [noise],
            {"step": 0, "pieces": "all"},
            "a `send` message whose field `pieces` is missing",
        ),
        # the first piece is valid and the second is not: the server may keep nothing of the message
        (
            "send",
            [noise],
            {"step": 0, "pieces": [[[NAME, 0, 16], ["params/v@GRAD", 0, 16]]]},
            "is not a gradient",
        ),
        (
            "send",
            [noise[:8]],
            one(NAME, 8, 8),
            "bytes 8 to 16 of params/w@GRAD; expected its bytes from 0 on",
        ),
        (
            "send_barrier",
            [],
            {"step": 0},
            "trainer 0 sent `send_barrier` of step 0 before gradient params/w@GRAD was complete "
            "(0 of 32 bytes)",
        ),
        (
            "send_barrier",
            [],
            {"step": 1},
            "a `send_barrier` message of step 1 arrived, but pserver {ep} is at step 0",
        ),
        (
            "recv",
            [],
            {"step": 2},
            "a `recv` message of step 2 arrived, but pserver {ep} is at step 0",
        ),
        (
            "recv",
            [],
            {"step": 0, "blocks": "w"},
            "a `recv` message whose field `blocks` is missing",
        ),
        (
            "recv",
            [],
            {"step": 0, "blocks": [["params/w", [4, 2]]]},
            "a `recv` message whose field `blocks` is not a list of [name, shape, dtype]",
        ),
        (
            "recv",
            [],
            {"step": 0, "blocks": [[["w"], [4, 2], "float32"]]},
            "is not a list of [name, shape, dtype]",
        ),
        (
            "recv",
            [],
            {"step": 0, "blocks": [[{}, [4, 2], "float32"]]},
            "is not a list of [name, shape, dtype]",
        ),
        (
            "recv",
            [],
            {"step": 0, "blocks": [["opt_state/0", [], "int32"]]},
            "requests block opt_state/0, which pserver",
        ),
        (
            "recv",
            [],
            {"step": 0, "blocks": [["params/w", [2, 4], "float32"]]},
            "trainer 0 plans block params/w as float32[2, 4], pserver",
        ),
        (
            "recv",
            [],
            {"step": 9, "blocks": [table]},
            "a `recv` message of step 9 arrived, but pserver {ep} is at step 0",
        ),
        ("fetch_barrier", [], {"step": 3}, "a message of unknown kind 'fetch_barrier'"),
        # the next part of the same message must not be kept either
        (
            "send",
            [noise],
            one(NAME, 0, 32) | {"then": ["complete"]},
            "a `send` message with an invalid field `then`: ['complete']",
        ),
        (
            "send",
            [noise],
            one(NAME, 0, 32) | {"then": "recv"},
            "a `send` message with an invalid field `then`: 'recv'",
        ),
        (
            "recv",
            [],
            {"step": 0, "then": ["recv", "recv"]},
            "a `recv` message with an invalid field `then`: ['recv', 'recv']",
        ),
        (
            "complete",
            [],
            {"then": ["recv"]},
            "a `complete` message with an invalid field `then`: ['recv']",
        ),
        (
            "complete",
            [],
            {"step": "x", "then": ["recv"]},
            "a `complete` message with an invalid field `then`: ['recv']",
        ),
        (
            "complete",
            [],
            {"step": 0, "then": ["recv"]},
            "a `complete` message with an invalid field `then`: ['recv']",
        ),
        (
            "send_barrier",
            [],
            {"step": 0, "blocks": 3, "then": ["recv"]},
            "`send_barrier` message whose field `blocks` is missing",
        ),
        (
            "welcome",
            [],
            {"step": 0, "local": ""},
            "a `welcome` message, which servers do not accept",
        ),
        ("abort", [], {"reason": 3}, "a `abort` message whose field `reason` is missing"),
        (
            "hello",
            [],
            HEADER | {"session": "other"},
            "another process is already connected as trainer 0",
        ),
    ]
    with Peer(ep) as peer:
        peer.hello()
        assert peer.hear().op == "welcome"
        for op, frames, fields, reason in wrong:
            caplog.clear()
            peer.tell(op, *frames, **fields)
            got = peer.refused()
            assert reason.format(ep=ep) in got, (op, fields, got)
            (record,) = caplog.records
            assert record.getMessage() == f"pserver {ep} refused a message of trainer 0: {got}"
        one_right_step(peer)
        # after the barrier of a step, the next step follows
        peer.tell("send", noise, step=0, pieces=[[[NAME, 0, 32]]])
        assert (
            peer.refused() == f"a `send` message of step 0 arrived, but pserver {ep} is at step 1"
        )
        one_right_step(peer, 1)
        peer.leave()
    (final,) = role_threads.all().values()
    tree_equal(final, {"params/w": jnp.asarray(START - GRAD)})


def test_a_trainer_may_send_its_own_gradients_only_and_not_twice(role_threads: RoleThreads) -> None:
    ep = tiny_server(role_threads, trainers=2)
    noise = b"\x7f" * 32
    with Peer(ep) as first, Peer(ep) as second:
        for k, peer in enumerate((first, second)):
            peer.hello(trainer=k, trainers=2, session=str(k))
            assert peer.hear().op == "welcome"
        first.tell("send", noise, step=0, pieces=[[[f"{NAME}.trainer_1", 0, 32]]])
        assert (
            first.refused()
            == f"{NAME}.trainer_1 is not a gradient that trainer 0 sends to pserver {ep}"
        )
        first.tell("send", GRAD.tobytes(), step=0, pieces=[[[f"{NAME}.trainer_0", 0, 32]]])
        first.tell("send", noise, step=0, pieces=[[[f"{NAME}.trainer_0", 0, 32]]])
        assert "of params/w@GRAD.trainer_0; expected its bytes from 32 on" in first.refused()
        first.tell("send_barrier", step=0)
        first.tell("send", noise, step=0, pieces=[[[f"{NAME}.trainer_0", 0, 32]]])
        until(
            lambda: "after its `send_barrier`" in first.hear().fields.get("reason", ""),
            "the refusal",
        )
        second.tell("send", GRAD.tobytes(), step=0, pieces=[[[f"{NAME}.trainer_1", 0, 32]]])
        second.tell("send_barrier", step=0)
        for peer in (first, second):
            peer.tell("recv", step=1, blocks=[["params/w", [4, 2], "float32"]])
            until(lambda peer=peer: peer.hear().op == "blocks", "the new blocks")
            peer.tell("complete")
            until(lambda peer=peer: peer.hear().op == "goodbye", "a goodbye")
    (final,) = role_threads.all().values()
    tree_equal(final, {"params/w": jnp.asarray(START - 0.5 * GRAD)})


def test_one_connection_cannot_be_two_trainers(role_threads: RoleThreads) -> None:
    ep = tiny_server(role_threads, trainers=2)
    with Peer(ep) as one, Peer(ep) as other:
        one.hello(trainer=0, trainers=2, session="a")
        assert one.hear().op == "welcome"
        one.hello(trainer=1, trainers=2, session="b")
        assert "already said hello as trainer 0" in one.refused()
        # as a trainer does that moves to the Unix socket
        other.hello(trainer=0, trainers=2, session="a")
        assert other.hear().op == "welcome"
        one.hello(trainer=1, trainers=2, session="b")
        assert one.hear().op == "welcome"  # this connection has no trainer any more
        for peer in (one, other):
            peer.tell("complete")
            # the other connection of trainer 0 receives the refusal again, because it has not
            # confirmed it
            until(lambda peer=peer: peer.hear().op == "goodbye", "a goodbye")
    role_threads.all()


def test_raw_bytes_on_the_port_are_refused_logged_and_change_nothing(
    role_threads: RoleThreads, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "dtrans.pserver")
    (ep,) = pservers = free_endpoints(1)
    host, port = ep.split(":")
    params, batches = mlp_params(), [mlp_batch(8)] * 3
    plan = plan_for(pservers)
    role_threads.start("server", serve, plan, ep, params)
    with Peer(ep) as peer:  # the server listens
        peer.tell("alive?")
        peer.refused()
    caplog.clear()
    greeting = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00NULL" + b"\0" * 16 + b"\0" * 32
    for garbage in (
        os.urandom(4096) + b"\0",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        greeting + b"\x04\xff" + b"x" * 300,
    ):
        with socket.create_connection((host, int(port)), timeout=HANG) as line:
            line.sendall(garbage)
    role_threads.start("trainer 0", train, plan, 0, batches, params)
    role_threads.start("trainer 1", train, plan, 1, batches, params)
    tx = optax.adam(1e-2)
    want, _, _ = plain_run(plain_step(mlp_loss, tx), params, tx.init(params), batches)
    tree_close(role_threads.all()["trainer 0"][0], want, 1e-6)
    assert any("refused a" in r.getMessage() for r in caplog.records)


def test_a_message_larger_than_any_of_ours_is_dropped_with_its_connection(
    role_threads: RoleThreads, strange_server: str
) -> None:
    """The limit is the largest message of this plan.

    The fixture checks that the server continues.
    """
    with Peer(strange_server) as peer:
        peer.tell("recv", step=0)
        assert "has not said hello" in peer.refused()  # the connection is established
        with peer._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
            peer.say(b"\0" * (wire.limits({NAME: 32, "params/w": 32})[0] + 1))
            assert monitor.poll(HANG * 1000), "it is still connected"
            peer._socket.disable_monitor()


def test_a_message_that_never_ends_is_not_kept(
    role_threads: RoleThreads, strange_server: str
) -> None:
    """ZeroMQ stores all frames of a message until the last arrives.

    A peer without the password is disconnected before its first frame.
    """
    with zmq.Context() as context, context.socket(zmq.DEALER) as line:
        line.linger, line.sndtimeo = 0, 1000
        with line.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
            line.connect(f"tcp://{strange_server}")
            with contextlib.suppress(zmq.Again):
                for _ in range(200):
                    line.send(b"\0" * 10_000, zmq.SNDMORE)
            assert monitor.poll(HANG * 1000), "it is still connected"
            line.disable_monitor()


def test_a_flood_of_nonsense_leaves_few_lines_and_is_counted(
    role_threads: RoleThreads, strange_server: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Peer(strange_server) as peer:
        for _ in range(600):
            peer.say(b"what?")
        for _ in range(600):
            assert "not msgpack" in peer.refused()
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == EACH + 3 and said[-1].endswith("(512 so far; most are not logged)")


def test_strangers_do_not_disturb_a_job(
    role_threads: RoleThreads, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "dtrans.pserver")
    (ep,) = pservers = free_endpoints(1)
    params, batches = mlp_params(), [mlp_batch(8)] * 5
    plan = plan_for(pservers)
    rng = np.random.default_rng(0)
    ended = threading.Event()
    refusals = []

    def pester() -> None:
        with Peer(ep) as peer:
            while not ended.is_set():
                peer.say(rng.bytes(int(rng.integers(0, 60))))
                peer.hello(
                    trainer=int(rng.integers(0, 2)),
                    trainers=2,
                    session="stranger" + str(ended.is_set()),
                )
                peer.tell("abort", reason="I say so")
                until(lambda: peer._socket.poll(10) or ended.is_set(), "a refusal")
                while peer._socket.poll(0):
                    refusals.append(peer.hear().op)

    arrived = [threading.Event(), threading.Event()]
    role_threads.start("server", serve, plan, ep, params)
    both = lambda k: lambda i: arrived[k].set() or all(a.wait(HANG) for a in [*arrived, pestering])
    pestering = threading.Event()
    for k in range(2):
        role_threads.start(f"trainer {k}", train, plan, k, batches, params, before=both(k))
    assert all(a.wait(HANG) for a in arrived)
    role_threads.start("stranger", pester)
    until(lambda: len(refusals) > 5, "the stranger to be refused")
    pestering.set()
    got = role_threads.end("trainer 0")
    ended.set()
    tx = optax.adam(1e-2)
    want, _, _ = plain_run(plain_step(mlp_loss, tx), params, tx.init(params), batches)
    tree_close(got[0], want, 1e-6)
    role_threads.all()
    # a process with the id of a trainer that has left may belong to the next job, and must wait for
    # the end of this job
    assert "refuse" in refusals and set(refusals) <= {"refuse", "waiting"}
