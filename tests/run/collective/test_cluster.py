"""nccl2 mode in real processes: every trainer has the results of one device.

Failures end the job with an error.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cluster_trainer as script
import jax
import numpy as np
import pytest
import trainer_processes
from helpers import distance
from role_threads import HANG, NEVER, FakeServer, Peer, RoleThreads, free_endpoints
from trainer_processes import ROOT, started

import dtrans
from dtrans.errors import ConfigError, DeadlineError, LaunchError, PeerError
from dtrans.protocol import wait_reminder
from dtrans.protocol.collective import join_loop
from dtrans.run.distributed.launcher import launch
from dtrans.run.distributed.rendezvous import FIRST, rendezvous
from dtrans.run.distributed.role import trainer_roles


PATIENCE = 120.0  # seconds for what takes ten on an idle machine
COMMAND = [sys.executable, script.__file__]
# the greeting of a ZeroMQ socket that requires a password
OTHERWISE = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(52, b"\0")


# -- numbers ---------------------------------------------------------------------------------------


def outcome(trainers: int, folder: Path, what: str = "numbers") -> list[dict[str, Any]]:
    """Run a job. Return the results of each trainer."""
    return trainer_processes.outcome(trainers, folder, PATIENCE, [*COMMAND, what, str(folder)])


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return outcome(2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """Return the results of one device on the full batches."""
    with jax.enable_x64(True):
        params, opt_state = jax.jit(script.init)(jax.random.key(0))
        found = script.flat(first=params, first_state=opt_state)
        step = jax.jit(dtrans.make_train_step(script.loss_fn, script.optimizer(), has_aux=True))
        for i, batch in enumerate(script.batches()):
            params, opt_state, loss, aux = step(params, opt_state, *batch)
            found |= script.flat(**{f"job{i}": {"loss": loss, "aux": aux}})
        return found | script.flat(job=params, job_state=opt_state)


def check_numbers(found: Sequence[dict[str, Any]], alone: dict[str, Any]) -> None:
    assert sum(n.endswith("['wrong']") for n in alone) == script.STEPS  # counts, of all trainers
    check_turned(found, alone)
    for k, of in enumerate(found):
        for name, want in alone.items():
            assert distance(of[name], want) < 1e-12, name
            if name.endswith(
                "['wrong']"
            ):  # counted over all trainers; with Paddle's names, each trainer has a separate count
                assert sum(one[name.replace("job", "exe", 1)] for one in found) == want
                continue
            assert name.startswith("first") or want.dtype in (np.float64, np.int32), name
            if name.startswith("job"):
                got = of[name.replace("job", "exe", 1)]
                rows = len(want) // len(found) if name.endswith("['out']") else None
                assert (
                    distance(got, want if rows is None else want[k * rows : (k + 1) * rows]) < 1e-12
                ), name


def check_uneven(found: Sequence[dict[str, Any]]) -> None:
    """Check batches that the number of trainers does not divide, also for results of each row."""
    with jax.enable_x64(True):
        step = jax.jit(dtrans.make_train_step(script.loss_fn, script.optimizer(), has_aux=True))
        (params, opt_state), made = script.init(jax.random.key(0)), []
        for batch in script.uneven_batches():
            params, opt_state, *results = step(params, opt_state, *batch)
            made.append(results)
        wanted = script.flat(uneven=(params, made))
        for of in found:
            assert {n for n in of if n.startswith("uneven")} == wanted.keys()
            for n, want in wanted.items():
                assert of[n].shape == want.shape and distance(of[n], want) < 1e-12, n


def check_turned(found: Sequence[dict[str, Any]], alone: dict[str, Any]) -> None:
    """Check that rows along another dimension are divided like rows along the first."""
    for of in found:
        names = [n for n in of if n.startswith("job1_turned")]
        assert len(names) == 3
        for n in names:
            assert distance(of[n], alone[n.replace("_turned", "")]) < 1e-12


def test_two_trainers_are_one_device(two: Any, alone: Any) -> None:
    check_numbers(two, alone)


def test_trainers_need_not_divide_the_rows(two: Any) -> None:
    check_uneven(two)


def test_trainers_have_the_same_bits(two: Any) -> None:
    names = [n for n in two[0] if n != "said" and not (n.startswith("exe") and "aux" in n)]
    assert len(names) > 30
    for name in names:
        assert np.array_equal(two[0][name], two[1][name]), name


def test_keys_are_folded_as_on_one_device(two: Any) -> None:
    with jax.enable_x64(True):
        main, startup = script.programs(script.noisy_loss, 2, jax.random.key(0))
        job = dtrans.nccl2(main, startup, trainers=2).simulate()
        state = job.init(jax.random.key(0))
        for batch in script.batches()[:2]:
            state, _ = job.step(state, *batch, jax.random.key(7))
        for name, want in script.flat(noisy=job.params(state)).items():
            assert distance(two[0][name], want) < 1e-12


@pytest.mark.soak
def test_four_trainers_are_one_device(tmp_path: Path, alone: Any) -> None:
    check_numbers(outcome(4, tmp_path), alone)


def check_options(found: Sequence[dict[str, Any]], options: dict[str, Any], trainers: int) -> None:
    """Compare each job of processes with its plan on one device.

    Other tests compare these plans with the step.
    """
    with jax.enable_x64(True):
        for name, given in options.items():
            job = script.planned(given, trainers).simulate()
            state = job.init(jax.random.key(0))
            for batch in script.batches()[:2]:
                state, loss, aux = job.step(state, *batch)
            wanted = script.flat(**{name: (job.params(state), job.opt_state(state), loss, aux)})
            assert len(wanted) > 6
            for of in found:
                for n, want in wanted.items():
                    assert distance(of[n], want) < 1e-12, n


@pytest.mark.soak
def test_every_option_between_two_trainers(tmp_path: Path) -> None:
    check_options(outcome(2, tmp_path, "options"), script.OPTIONS | script.OF_TWO, 2)


@pytest.mark.soak
def test_two_processes_of_two_devices_are_four_trainers(tmp_path: Path, alone: Any) -> None:
    found = outcome(2, tmp_path, "devices")
    check_turned(found, alone)
    check_uneven(found)
    check_options(found, script.OF_DEVICES, 4)
    for of in found:
        assert of["said"].tolist() == [
            "BatchError: x has 3 rows, which cannot be split evenly over the 2 devices of this "
            "process; pass a multiple of 2 rows",
            "ConfigError: the plan is for 8 trainers, 4 are connected: 2 processes with 2 devices "
            "each",
        ]


@pytest.mark.soak
def test_every_option_between_four_trainers(tmp_path: Path) -> None:
    found = outcome(4, tmp_path, "options")
    check_options(found, script.OPTIONS | script.OF_FOUR, 4)
    with jax.enable_x64(True):
        job = script.planned({}, 4).simulate()  # also from trainer 0's parameters
        state = job.init(jax.random.key(0))
        for batch in script.batches()[:2]:
            state, loss, _ = job.step(state, *batch)
        for n, want in script.flat(config=(job.params(state), job.opt_state(state), loss)).items():
            assert all(distance(of[n], want) < 1e-12 for of in found), n


@pytest.mark.parametrize(
    "what, message",
    [
        (
            "nobody",
            "ConfigError: the environment does not name the trainer of this process: start it with "
            "`dtrans launch --mode nccl2`",
        ),
        (
            "pserver",
            "ConfigError: this process is trainer 0 of a job with pservers, but dtrans.connect() "
            "is for mode='nccl2'; remove the call",
        ),
        (
            "unconnected",
            "ConfigError: this process is not connected to other trainers: call dtrans.connect() "
            "first",
        ),
        ("another role", "ConfigError: this process is connected as trainer {k} of 2 (127.0.0.1:"),
        ("donated", "StateError: a step has already used this state"),
        (
            "rows",
            "BatchError: trainers must pass parts of equal size; rows of x: trainer 0 gives 7, "
            "trainer 1 gives 8; split the batch",
        ),
        ("ragged", "BatchError: the arrays of a batch are split over the trainers, but "),
        (
            "even",
            "BatchError: the batch is a dtrans.UnevenPart of 24 rows, but 2 trainers can divide "
            "these rows evenly",
        ),
        (
            "part",
            "BatchError: x has 2 rows, expected {mine} rows in part {k} of a batch of 23 rows; "
            "split batches with job.shard_batch",
        ),
        ("count", "ConfigError: the plan is for 3 trainers, 2 are connected"),
        (
            "plan",
            "PeerError: trainer 1 disagrees with trainer 0 about what is being trained: it has "
            "a different step",
        ),
        (
            "merge",
            "PeerError: trainer 1 disagrees with trainer 0 about what is being trained: it has "
            "a different step",
        ),
        (
            "rate",
            "PeerError: trainer 1 disagrees with trainer 0 about what is being trained: it has "
            "a different step or "
            "options: part 'update' differs",
        ),
        ("dtype", "BatchError: x is float"),
        (
            "init",
            "PeerError: trainer 1 disagrees with trainer 0 about what is being trained: it has "
            "parameters",
        ),
    ],
)
def test_what_is_refused(two: Any, what: str, message: str) -> None:
    for k, of in enumerate(two):
        said = dict(of["said"].tolist())
        assert said[what].startswith(message.format(k=k, mine=12 - k)), said[what]


# -- meeting ---------------------------------------------------------------------------------------


def meeting(
    role_threads: RoleThreads,
    trainers: Sequence[int],
    endpoints: Sequence[str],
    deadline: float = 20.0,
) -> dict[int, Any]:
    """Run these trainers of a job. Return the result or error of each."""
    for k in trainers:
        role_threads.start(f"trainer {k}", rendezvous, k, endpoints, deadline=deadline)
    return {k: role_threads.end(f"trainer {k}") for k in trainers}


def test_trainers_meet_in_any_order(role_threads: RoleThreads) -> None:
    assert meeting(role_threads, [2, 0, 1], free_endpoints(3)) == {0: None, 1: None, 2: None}


def test_a_single_trainer_meets_nobody(role_threads: RoleThreads) -> None:
    assert meeting(role_threads, [0], free_endpoints(1)) == {0: None}


def test_trainers_that_do_not_come_are_named_to_all_that_did(role_threads: RoleThreads) -> None:
    endpoints = free_endpoints(4)
    found = meeting(role_threads, [0, 2], endpoints, 3.0)
    message = (
        f"trainer 0 waited 3 s for trainer 1 ({endpoints[1]}) and trainer 3 "
        f"({endpoints[3]}) "
        "to join"
    )
    assert isinstance(found[0], DeadlineError) and str(found[0]) == message
    assert (
        isinstance(found[2], DeadlineError)
        and str(found[2]) == f"trainer 2 stopped because trainer 0 gave up: {message}"
    )


def test_trainers_that_wait_for_others_say_so(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wait_reminder, "SAY", 0.5)
    endpoints = free_endpoints(3)
    found = meeting(role_threads, [0, 2], endpoints, 4.0)
    assert all(isinstance(e, DeadlineError) for e in found.values())
    told = [re.sub(r"waited \d+ s", "waited N s", message) for message in caplog.messages]
    absent = f"trainer 0 has waited N s for trainer 1 ({endpoints[1]}) to join"
    assert told.count(absent) >= 2
    awaited = (
        f"trainer 2 has waited N s at {endpoints[2]} for trainer 0 ({endpoints[0]}) to "
        "reach the other trainers"
    )
    assert told.count(awaited) >= 2


def test_trainer_0_that_does_not_come(role_threads: RoleThreads) -> None:
    endpoints = free_endpoints(2)
    found = meeting(role_threads, [1], endpoints, 0.5)
    assert isinstance(found[1], DeadlineError)
    # a busy machine may schedule the trainer late
    message = re.sub(r"waited \d\.\d s", "waited N s", str(found[1]))
    there = f"at {endpoints[1]} for trainer 0 ({endpoints[0]})"
    assert message == f"trainer 1 waited N s {there} to connect"


def test_trainers_with_other_endpoints(role_threads: RoleThreads) -> None:
    endpoints = free_endpoints(3)
    role_threads.start("trainer 0", rendezvous, 0, endpoints, deadline=20.0)
    role_threads.start("trainer 1", rendezvous, 1, endpoints[:2], deadline=20.0)
    role_threads.start("trainer 2", rendezvous, 2, endpoints, deadline=20.0)
    errors = [role_threads.end(f"trainer {k}") for k in range(3)]
    assert all(isinstance(e, PeerError) and not isinstance(e, DeadlineError) for e in errors[:2])
    listed = ",".join(endpoints)
    reason = (
        f"this process is trainer 1 of {','.join(endpoints[:2])}, but trainer 0 expects trainer 1 "
        f"of '{listed}'"
    )
    assert str(errors[0]) == f"trainer 1 ({endpoints[1]}) refused trainer 0: {reason}"
    assert str(errors[1]) == f"trainer 0 has different endpoints: {reason}"
    # the trainer gets a message or runs into its deadline, depending on the order of requests
    assert isinstance(errors[2], PeerError)


def test_an_endpoint_in_use(role_threads: RoleThreads) -> None:
    endpoints = free_endpoints(2)
    for k in (0, 1):
        host, port = endpoints[k].split(":")
        with (
            socket.create_server((host, int(port))),
            pytest.raises(
                ConfigError,
                match=f"^trainer {k} \\({endpoints[k]}\\) cannot be bound: Address already in use$",
            ),
        ):
            rendezvous(k, endpoints, deadline=5.0)


def test_endpoints_elsewhere_need_to_be_allowed() -> None:
    with pytest.raises(
        ConfigError,
        match=r"trainer 0 is at 192.0.2.1:1, which is not on loopback.*allow_remote=True",
    ):
        rendezvous(0, ["192.0.2.1:1", "192.0.2.2:1"], deadline=1.0)


def test_something_else_in_the_place_of_a_trainer(role_threads: RoleThreads) -> None:
    endpoints = free_endpoints(2)
    role_threads.start("trainer 0", rendezvous, 0, endpoints, deadline=HANG)
    with FakeServer(endpoints[1]) as fake_server:
        assert fake_server.hear().op == "meet"
        fake_server.say(b"what?")
        fake_server.tell("go")
        fake_server.tell("refuse", reason="I say so", proof="0" * 64)
        assert fake_server.hear().op == "meet"  # the trainer asks again
    # the other trainer starts only now
    role_threads.start("trainer 1", rendezvous, 1, endpoints, deadline=HANG)
    assert role_threads.end("trainer 0") is None and role_threads.end("trainer 1") is None


def test_something_else_in_the_place_of_a_trainer_that_never_comes(
    role_threads: RoleThreads,
) -> None:
    endpoints = free_endpoints(2)
    role_threads.start("trainer 0", rendezvous, 0, endpoints, deadline=1.5)
    with FakeServer(endpoints[1]) as fake_server:
        assert fake_server.hear().op == "meet"
        fake_server.say(b"what?")
        error = role_threads.end("trainer 0")
    assert isinstance(error, DeadlineError)
    assert (
        f"trainer 1 ({endpoints[1]}) to join; the process at {endpoints[1]} is not part of "
        "this job: it sent a" in str(error)
    )


def test_something_that_does_not_speak_as_trainers_do(role_threads: RoleThreads) -> None:
    endpoints = free_endpoints(3)
    host, port = endpoints[1].split(":")
    with socket.create_server((host, int(port))) as server:
        for k in (0, 2):
            role_threads.start(f"trainer {k}", rendezvous, k, endpoints, deadline=3.0)
        server.settimeout(HANG)
        stranger, _ = server.accept()
        with stranger:
            stranger.sendall(OTHERWISE)
            errors = [role_threads.end(f"trainer {k}") for k in (0, 2)]
    why = (
        "this process does not encrypt the connection (transport_encryption='auto'), and the other "
        "process does (transport_encryption='required'), or it belongs to another job; set the "
        "same transport_encryption, or DTRANS_TRANSPORT_ENCRYPTION, in all processes"
    )
    message = f"trainer 0 waited 3 s for trainer 1 ({endpoints[1]}) to join"
    message += f"; {endpoints[1]} does not admit trainer 0: {why}"
    assert all(isinstance(e, DeadlineError) for e in errors)
    assert [str(e) for e in errors] == [
        message,
        f"trainer 2 stopped because trainer 0 gave up: {message}",
    ]


def test_the_rest_is_told_where_one_refuses_and_one_speaks_otherwise(
    role_threads: RoleThreads,
) -> None:
    endpoints = free_endpoints(4)
    host, port = endpoints[1].split(":")
    with socket.create_server((host, int(port))) as server, FakeServer(endpoints[2]) as refuser:
        for k in (0, 3):
            role_threads.start(f"trainer {k}", rendezvous, k, endpoints, deadline=20.0)
        server.settimeout(HANG)
        stranger, _ = server.accept()
        with stranger:
            stranger.settimeout(HANG)
            stranger.sendall(OTHERWISE)
            while stranger.recv(4096):
                pass  # until ZeroMQ has dropped it
            assert refuser.hear().op == "meet"
            refuser.tell("refuse", reason="this is something else")
            errors = [role_threads.end(f"trainer {k}") for k in (0, 3)]
    message = f"trainer 2 ({endpoints[2]}) refused trainer 0: this is something else"
    assert [str(e) for e in errors] == [
        message,
        f"trainer 3 stopped because trainer 0 gave up: {message}",
    ]


def test_one_that_is_told_to_give_up_ends_at_once(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainer 0 may end before it receives the trainer's `here`.

    ZeroMQ then stores this message for at most its linger time.
    """
    monkeypatch.setattr(join_loop, "LINGER", NEVER)
    for i in range(100):
        endpoints = free_endpoints(2)
        role_threads.start(f"trainer {i}", rendezvous, 1, endpoints, deadline=NEVER)
        first = Peer(endpoints[1], FIRST)
        first.tell("meet", trainer=1, endpoints=list(endpoints))
        first.tell("abort", reason="no reason")
        first.end()
        assert (
            str(role_threads.end(f"trainer {i}"))
            == "trainer 1 stopped because trainer 0 gave up: no reason"
        )


def test_strangers_at_the_door_are_let_stand(role_threads: RoleThreads) -> None:
    endpoints = free_endpoints(2)
    role_threads.start("trainer 1", rendezvous, 1, endpoints, deadline=20.0)
    with Peer(endpoints[1], FIRST) as stranger:
        stranger.say(b"what?")
        stranger.tell("go")  # this trainer did not ask it
        assert meeting(role_threads, [0], endpoints) == {0: None}
    assert role_threads.end("trainer 1") is None


def test_a_stranger_without_the_token_cannot_end_a_trainer(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the token, the stranger could end the trainer: by wrong endpoints, or by the right ones
    and an order to give up."""
    endpoints = free_endpoints(2)
    monkeypatch.setenv("DTRANS_TOKEN", "guessed")
    wrong = Peer(endpoints[1], FIRST)
    monkeypatch.setenv("DTRANS_TOKEN", "a secret")
    role_threads.start("trainer 1", rendezvous, 1, endpoints, deadline=HANG)
    with wrong:
        for told in ([*endpoints, "h:1"], list(endpoints)):
            wrong.tell("meet", trainer=1, endpoints=told)
            wrong.tell("abort", reason="I say so")
        assert meeting(role_threads, [0], endpoints) == {0: None}
        assert not wrong._socket.poll(0)
    assert role_threads.end("trainer 1") is None


# -- connecting ------------------------------------------------------------------------------------


CONNECTED = """
import sys, jax, jax.numpy as jnp, optax, dtrans

jax.distributed.initialize(sys.argv[1], 1, 0)
tx = optax.sgd(0.5)
step = dtrans.make_train_step(lambda w, x: jnp.mean((x @ w) ** 2), tx)
init = lambda: (w := jnp.ones(2), tx.init(w))
main = dtrans.trace(step, *jax.eval_shape(init), jnp.eye(2))
job = dtrans.nccl2(main, dtrans.trace(init), trainers=1).on_cluster()
state, loss = job.step(job.init(), jnp.eye(2))
print(float(loss), job.params(state).tolist())
"""


def test_a_job_that_the_user_has_connected() -> None:
    """Ray Train, for example, connects its workers itself, so `dtrans.connect()` is not needed."""
    command = [sys.executable, "-c", CONNECTED, *free_endpoints(1)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout == "1.0 [0.5, 0.5]\n", done.stderr


def test_jax_was_used_already(monkeypatch: pytest.MonkeyPatch) -> None:
    jax.devices()
    (role,) = trainer_roles(free_endpoints(1))
    with pytest.raises(
        ConfigError, match="^JAX was used already, .* call dtrans.connect\\(\\) before anything"
    ):
        dtrans.connect(role)
    for n, v in role.environment().items():
        monkeypatch.setenv(n, v)
    with pytest.raises(ConfigError, match="^JAX was used already"):
        dtrans.connect()


@pytest.mark.parametrize("deadline", [0, -1.0, float("nan")])
def test_a_deadline_that_is_none(deadline: float) -> None:
    with pytest.raises(ConfigError, match="^deadline must be a positive number of seconds"):
        dtrans.connect(deadline=deadline)


# -- failures --------------------------------------------------------------------------------------


def launched(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> LaunchError:
    """Return the error of a job of two trainers under the launcher."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with pytest.raises(LaunchError) as e:
        launch([*COMMAND, *arguments], trainers=2, mode="nccl2", deadline=PATIENCE)
    return e.value


def test_a_killed_trainer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    error = launched("endless", "kill", monkeypatch=monkeypatch)
    assert (error.role, error.code) == ("trainer 1", 137)
    assert str(error).startswith(
        "trainer 1 failed with signal SIGKILL, and the other roles were ended"
    )


def test_a_trainer_that_raises_is_named_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX's wait for other processes at exit would exceed the launcher's deadline."""
    error = launched("endless", "raise", monkeypatch=monkeypatch)
    assert (error.role, error.code) == ("trainer 1", 1)
    assert str(error).splitlines()[-1] == "KeyError: 'this is why'"


@pytest.mark.soak
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fate", ["kill", "idle"])
def test_survivors_end_without_a_launcher(fate: str) -> None:
    """A survivor in a reduction gets an error, or JAX ends it.

    JAX ends a survivor outside a reduction within the heartbeat.
    """
    with started(2, *COMMAND, "endless", fate) as (first, second):
        assert second.wait(timeout=PATIENCE) == -signal.SIGKILL
        killed = time.monotonic()
        said, _ = first.communicate(timeout=PATIENCE)
        assert time.monotonic() - killed < 40.0
    if first.returncode == 1 and fate == "kill":
        # the broken connection may be detected before the reduction fails
        lost = (
            "lost trainer 1 in the middle of a reduction: it has ended",
            r"cannot continue: trainer 1 \(.*\) has ended: its connection ended without a goodbye",
        )
        assert re.search(f"dtrans.errors.PeerError: trainer 0 ({'|'.join(lost)})", said)
    else:
        assert first.returncode == -signal.SIGABRT, said
        assert "JAX distributed service detected fatal errors" in said


def test_a_trainer_that_changes_its_part_alone_is_told_so() -> None:
    with started(2, *COMMAND, "alone") as (first, second):
        said, _ = first.communicate(timeout=PATIENCE)
        second.wait(timeout=PATIENCE)
    assert first.returncode == 1 and second.returncode != 0
    want = (
        "dtrans.errors.DeadlineError: trainer 0 waited 5 s for trainer 1 to start the same "
        "step: either they are at another step, "
    )
    assert want + "or only this trainer's batch has a new shape" in said


# -- going on with those left ----------------------------------------------------------------------


def with_those_left(
    trainers: int, fates: dict[tuple[int, int], str]
) -> tuple[Any, Any, list[float], list[int]]:
    """Return one device's results on the rows of the trainers that exist in each step."""
    with jax.enable_x64(True):
        params, opt_state = jax.jit(script.init)(jax.random.key(0))
        step = jax.jit(dtrans.make_train_step(script.loss_fn, script.optimizer(), has_aux=True))
        losses, counts, there = [], [], list(range(trainers))
        for i in range(script.SURVIVED):
            there = [k for k in there if (k, i) not in fates]
            part = script.ROWS // trainers
            rows = np.concatenate([np.arange(k * part, (k + 1) * part) for k in there])
            batch = [x[rows] for x in script.batches()[i % script.STEPS]]
            params, opt_state, loss, _ = step(params, opt_state, *batch)
            losses.append(float(loss))
            counts.append(len(there))
        return params, opt_state, losses, counts


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "trainers, fates",
    [
        (2, {(1, 3): "raise"}),
        (3, {(2, 0): "kill", (1, 6): "raise"}),
        pytest.param(4, {(1, 2): "kill", (3, 2): "kill"}, marks=pytest.mark.rotated),
    ],
)
def test_those_left_go_on_with_the_mean_of_their_own(
    trainers: int, fates: Any, tmp_path: Path
) -> None:
    told = ",".join(f"{k}@{i}:{fate}" for (k, i), fate in fates.items())
    with started(trainers, *COMMAND, "survive", str(tmp_path), told) as processes:
        said = [p.communicate(timeout=PATIENCE)[0] for p in processes]
    ends = {k: {"raise": 1, "kill": -signal.SIGKILL}[fate] for (k, _), fate in fates.items()}
    assert [p.returncode for p in processes] == [ends.get(k, 0) for k in range(trainers)], (
        "\n".join(said)
    )
    params, opt_state, losses, counts = with_those_left(trainers, fates)
    for k in range(trainers):
        if k in ends:
            continue
        with np.load(tmp_path / f"trainer-{k}.npz") as found:
            assert found["counts"].tolist() == counts
            assert distance(found["losses"], np.array(losses)) < 1e-12
            for name, want in script.flat(params=params, state=opt_state).items():
                assert distance(found[name], want) < 1e-12, name
        for lost, _ in fates:
            assert f"trainer {lost}" in said[k] and "continuing with" in said[k]


def test_the_launcher_goes_on_with_those_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [*COMMAND, "survive", str(tmp_path), "1@2:raise"]
    launch(command, trainers=3, mode="nccl2", on_trainer_loss="drop", deadline=PATIENCE)
    assert (
        "[launcher] trainer 1 failed with exit code 1; the others continue"
        in capfd.readouterr().err
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["trainer-0.npz", "trainer-2.npz"]


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"on_trainer_loss": "wait", "mode": "nccl2"},
            "on_trainer_loss must be 'restart', 'drop', 'replace' or 'abort', it is 'wait'",
        ),
    ],
)
def test_the_launcher_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        launch(COMMAND, trainers=2, **options)


def test_going_on_must_be_one_of_two() -> None:
    with pytest.raises(
        ConfigError, match="^on_trainer_loss must be 'abort' or 'drop', it is 'wait'$"
    ):
        dtrans.connect(on_trainer_loss="wait")
