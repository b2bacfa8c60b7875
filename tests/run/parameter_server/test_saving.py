"""Servers save their state while they serve.

All pieces have the state after one step, and form an ordinary checkpoint.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import role_threads as roles
from role_threads import RoleThreads
from table_jobs import (
    DENSE,
    LAZY,
    batches,
    close,
    init,
    one_device,
    only,
    planned,
    start_at_zero,
)

import dtrans
from dtrans.checkpoint import api, orbax_io
from dtrans.checkpoint.api import save_serving
from dtrans.checkpoint.runs import SaveId
from dtrans.errors import (
    CheckpointError,
    CheckpointWarning,
    ConfigError,
    PeerError,
    StateError,
)
from dtrans.protocol import wire
from dtrans.protocol.trainer.trainer_line import TrainerLine
from dtrans.protocol.trainer.trainer_steps import TrainerSteps
from dtrans.run.distributed.role import Role
from dtrans.run.parameter_server import checkpoints, state_writer
from dtrans.run.parameter_server.checkpoints import ServerCheckpoints
from dtrans.run.parameter_server.state_writer import StateWriter
from dtrans.run.role_jobs.server_job import ServerJob
from dtrans.run.role_jobs.trainer_job import TrainerJob
from dtrans.slicing import divide_update


KEY = jax.random.key(0)
pytestmark = pytest.mark.usefixtures("x64")


def serve(plan: Any, endpoint: str, start: Any = None, **options: Any) -> None:
    role = Role("pserver", plan.trainers, tuple(plan.servers), current_endpoint=endpoint)
    with ServerJob(plan, role, {"deadline": roles.HANG}) as job:
        job.serve(dtrans.checkpoint.restore(start, job) if start else job.init(KEY), **options)


def train(plan: Any, k: int, given: Any, saves: dict[int, str], start: Any = None) -> Any:
    with TrainerJob(
        plan,
        Role("trainer", plan.trainers, tuple(plan.servers), trainer_id=k),
        {"deadline": roles.HANG},
    ) as job:
        state = dtrans.checkpoint.restore(start, job) if start else job.init(KEY)
        for at, batch in enumerate(given):
            if at in saves and k == plan.trainers - 1:
                job.save(saves[at])
            state, _ = job.step(state, *job.shard_batch(*batch))
        return job.params(state)


@pytest.mark.parametrize("sparse", [None, DENSE, LAZY], ids=["dense", "table", "lazy"])
def test_a_checkpoint_of_a_job_that_goes_on(
    role_threads: RoleThreads, tmp_path: Path, sparse: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a table, servers update and store pairs of rows separately."""
    for name in ("PART_BYTES", "PIECE_BYTES", "ALIGNMENT"):
        monkeypatch.setattr(divide_update, name, 1)
    tx, given = optax.adam(0.1), batches(5)
    plan = planned(tx, sparse, 2, 3)
    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep, checkpoints=tmp_path)
    for k in range(2):
        role_threads.start(f"trainer {k}", train, plan, k, given, {0: "0", 2: "2"})
    ended = role_threads.all()["trainer 0"]
    for steps in (0, 2):
        params, opt_state = dtrans.checkpoint.load(tmp_path / str(steps), plan.main, plan.startup)
        # arrays without the names of the state
        traced = dtrans.trace(lambda key: init(tx, key), KEY)
        again = dtrans.checkpoint.load(tmp_path / str(steps), plan.main, traced)
        jax.tree.map(np.testing.assert_array_equal, again, (params, opt_state))
        if sparse is not LAZY:
            close(params, one_device(tx, given[:steps])[0])
        assert int(opt_state[0].count) == steps
    if sparse is not LAZY:
        close(ended, one_device(tx, given)[0])


def test_a_job_goes_on_from_it_bit_for_bit(role_threads: RoleThreads, tmp_path: Path) -> None:
    """From three servers to two; or an asynchronous job with one trainer."""
    tx, given = optax.adam(0.1), batches(4)
    ends = []
    plan = planned(tx, DENSE, 1, 3, mode=dtrans.Async())
    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep, checkpoints=tmp_path)
    role_threads.start("trainer 0", train, plan, 0, given, {2: "half"})
    ends.append(role_threads.all()["trainer 0"])
    role_threads.forget()
    again = planned(tx, DENSE, 1, 2, mode=dtrans.Async())

    def go_on(ep: str) -> None:
        with dtrans.Executor(deadline=roles.HANG) as exe:
            exe.run(again.servers[ep].main, dtrans.checkpoint.restore(tmp_path / "half", again, ep))

    for ep in again.servers:
        role_threads.start(ep, go_on, ep)
    role_threads.start("trainer 0", train, again, 0, given[2:], {})
    ends.append(role_threads.all()["trainer 0"])
    jax.tree.map(np.testing.assert_array_equal, *ends)


@pytest.mark.parametrize("update", ["lazy", "dense"])
def test_what_is_saved_of_a_row_is_of_one_update(
    role_threads: RoleThreads, tmp_path: Path, update: str
) -> None:
    """Another trainer continues meanwhile.

    All gradients are one, so a row's moments show its number of updates.
    """
    tx, rows = optax.adam(0.1), 40
    start = start_at_zero(tx, rows)
    plan = dtrans.pserver(
        dtrans.trace(dtrans.make_train_step(only, tx), *start(), np.arange(4)), dtrans.trace(start),
        pservers=roles.free_endpoints(3), trainers=2, mode=dtrans.Async(), batch="local",
        sparse={"params/emb": dtrans.Rows(update)},
        placement=dtrans.BlockPlacement(min_block_size=1),
    )  # fmt: skip

    def train(k: int) -> None:
        role = Role("trainer", 2, tuple(plan.servers), trainer_id=k)
        with TrainerJob(plan, role, {"deadline": roles.HANG}) as job:
            state, rng = job.init(), np.random.default_rng(k)
            for at in range(40 if k else 10):
                state, _ = job.step(state, rng.choice(rows - 10, 4, replace=False))
                if not k and at % 3 == 0:
                    job.save(str(at))

    def serve_here(ep: str) -> None:
        role = Role("pserver", 2, tuple(plan.servers), current_endpoint=ep)
        with ServerJob(plan, role, {"deadline": roles.HANG}) as job:
            job.serve(job.init(), checkpoints=tmp_path)

    for ep in plan.servers:
        role_threads.start(ep, serve_here, ep)
    for k in range(2):
        role_threads.start(f"trainer {k}", train, k)
    role_threads.all()
    for at in (0, 3, 6, 9):
        with warnings.catch_warnings():
            # counts of the server, not of rows
            warnings.simplefilter("ignore", CheckpointWarning)
            held = [dtrans.checkpoint.restore(tmp_path / str(at), plan, ep) for ep in plan.servers]
        emb, mu, nu = (
            np.concatenate([x for state in held for n, x in state.items() if n.startswith(name)])[
                :, 0
            ]
            for name in ("params/emb", "opt_state/0/mu/emb", "opt_state/0/nu/emb")
        )
        assert (
            set(np.flatnonzero(emb)) == set(np.flatnonzero(mu)) == set(np.flatnonzero(nu)) != set()
        )
        if update == "lazy":
            counts = np.rint(np.log1p(-mu) / np.log(0.9))
            np.testing.assert_allclose(nu, 1 - 0.999**counts, rtol=1e-6, atol=1e-9)
            assert counts.sum() >= 4 * (at + 1)


def test_counts_of_asynchronous_servers_may_differ(tmp_path: Path) -> None:
    """Counts differ by the steps in progress.

    A warning says so, and the checkpoint can be restored.
    """
    plan, wrong = (
        planned(optax.adam(0.1), DENSE, 1, 2, mode=mode) for mode in (dtrans.Async(), dtrans.Sync())
    )
    for name, of in (("async", plan), ("sync", wrong)):
        for ep, count in zip(of.servers, (5, 4), strict=True):
            with dtrans.Executor() as exe:
                state = exe.run(of.servers[ep].startup, KEY) | {
                    "opt_state/0/count": jax.numpy.int32(count)
                }
            save_serving(tmp_path / name, of, ep, state, SaveId(("run",), 5))
    first, second = plan.servers
    told = (
        f"opt_state/0/count differs on {first} and {second}: 5 and 4; the servers saved "
        "them during asynchronous steps, so the first is used"
    )
    with pytest.warns(CheckpointWarning, match=told):
        assert int(dtrans.checkpoint.load(tmp_path / "async", plan.main)[1][0].count) == 5
    with pytest.raises(
        StateError, match="opt_state/0/count differs .*; pass states that one job returned"
    ):
        dtrans.checkpoint.load(tmp_path / "sync", wrong.main)


def test_what_cannot_be_saved_is_said(role_threads: RoleThreads, tmp_path: Path) -> None:
    """The job continues."""
    plan = planned(optax.sgd(0.1), DENSE, 1, 2)
    served, alone = plan.servers

    def asks() -> None:
        with TrainerJob(
            plan, Role("trainer", 1, tuple(plan.servers), trainer_id=0), {"deadline": roles.HANG}
        ) as job:
            with pytest.raises(
                ConfigError, match="checkpoint early: this trainer is not connected to servers yet"
            ):
                job.save("early")
            state = job.init(KEY)
            for name, why in (
                ("../out", "'../out' is not a valid name of a checkpoint"),
                ("", "'' is not a valid name of a checkpoint"),
                (
                    "1",
                    "could not save its part of checkpoint 1: the piece of .* cannot be written to "
                    ".*/pserver-0: .*File",
                ),
            ):
                with pytest.raises(CheckpointError, match=why):
                    job.save(name)
            state, _ = job.step(state, *batches(1)[0])

    (tmp_path / "1").write_text("no folder")
    role_threads.start(served, serve, plan, served, checkpoints=tmp_path)
    role_threads.start(alone, serve, plan, alone, checkpoints=tmp_path)
    role_threads.start("trainer 0", asks)
    role_threads.all()


def refused_by_the_disk(monkeypatch: pytest.MonkeyPatch, of: Any, what: str, code: int) -> None:
    """Let a call that writes a piece fail."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(of, what, refuse)


@pytest.mark.parametrize(
    "of, what, code",
    [
        (Path, "exists", errno.EACCES),
        (orbax_io, "_finished", errno.ESTALE),
        (Path, "mkdir", errno.EROFS),
        (orbax_io, "_save_piece", errno.EIO),
        (orbax_io, "_sync", errno.EIO),
        (None, "9" * 300, errno.ENAMETOOLONG),
    ],
    ids=["look", "read", "make", "write", "sync", "name"],
)
def test_a_folder_that_cannot_be_used_ends_no_job(
    role_threads: RoleThreads,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    of: Any,
    what: str,
    code: int,
) -> None:
    """An error names each server, the folder of its checkpoint, and the system's error.

    Training continues unchanged.
    """
    tx, given = optax.adam(0.1), batches(3)
    plan = planned(tx, None, 1, 2)
    name = "0" if of else what

    def train() -> Any:
        role = Role("trainer", 1, tuple(plan.servers), trainer_id=0)
        with TrainerJob(plan, role, {"deadline": roles.HANG}) as job:
            state, _ = job.step(job.init(KEY), *given[0])
            with monkeypatch.context() as m, pytest.raises(CheckpointError) as told:
                if of:
                    refused_by_the_disk(m, of, what, code)
                job.save(name)
            for ep, piece in zip(plan.servers, ("pserver-0", "pserver-1"), strict=True):
                said = (
                    f"pserver {ep} could not save its part of checkpoint {name}: the piece of "
                    f"{ep} cannot be written"
                )
                assert (
                    f"{said} to {tmp_path}/{name}/{piece}: [Errno {code}] {os.strerror(code)}"
                    in str(told.value)
                )
            job.save("0")
            state, _ = job.step(state, *given[1])
            job.save("1")
            return job.params(state)

    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep, checkpoints=tmp_path)
    role_threads.start("trainer 0", train)
    ended = role_threads.all()["trainer 0"]
    close(ended, one_device(tx, given[:2])[0])
    close(dtrans.checkpoint.load(tmp_path / "0", plan.main)[0], one_device(tx, given[:1])[0])
    close(dtrans.checkpoint.load(tmp_path / "1", plan.main)[0], ended)


def test_a_save_that_fails_leaves_no_files_that_take_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(optax.sgd(0.1), None, 1, 1)
    (ep,) = plan.servers
    with dtrans.Executor() as exe:
        state = exe.run(plan.servers[ep].startup, KEY)
    refused_by_the_disk(monkeypatch, orbax_io, "_sync_tree", errno.ENOSPC)
    with pytest.raises(StateError, match="No space left on device"):
        save_serving(tmp_path / "1", plan, ep, state, SaveId(("run",), 1))
    assert os.listdir(tmp_path / "1") == []


@pytest.mark.parametrize("mode", [dtrans.Sync(), dtrans.Async()], ids=["sync", "async"])
def test_all_trainers_may_ask_for_one_checkpoint(
    role_threads: RoleThreads, tmp_path: Path, mode: Any
) -> None:
    """Calls after the same number of steps make one checkpoint, in any order of trainers.

    Another step needs another name.
    """
    tx, given = optax.adam(0.1), batches(3)
    plan = planned(tx, None, 2, 2, mode=mode)

    def train(k: int) -> None:
        role = Role("trainer", 2, tuple(plan.servers), trainer_id=k)
        with TrainerJob(plan, role, {"deadline": roles.HANG}) as job:
            state = job.init(KEY)
            for at, batch in enumerate(given):
                state, _ = job.step(state, *job.shard_batch(*batch))
                job.save(str(at))
                job.save(str(at))
            with pytest.raises(
                CheckpointError,
                match=rf"checkpoint 1 was already requested after 2 steps, and trainer {k} has made 3 "
                "steps; use another name for each checkpoint",
            ):
                job.save("1")

    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep, checkpoints=tmp_path)
    for k in range(2):
        role_threads.start(f"trainer {k}", train, k)
    role_threads.all()
    for at in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)  # counts of asynchronous servers
            params = dtrans.checkpoint.load(tmp_path / str(at), plan.main)[0]
        if plan.sync_mode:
            close(params, one_device(tx, given[: at + 1])[0])


def test_a_run_that_follows_a_crash_in_a_save(
    role_threads: RoleThreads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run continues from the complete checkpoint, and saves other numbers under the same
    name."""
    tx, given, other = optax.adam(0.1), batches(4), batches(8)[4:]
    plan = planned(tx, None, 2, 2)
    last, real = [*plan.servers][-1], api.write

    def write(path: Any, layout: Any, who: str, *rest: Any, **options: Any) -> None:
        if path.name != "2" or who != last:  # this run ends before its piece is renamed
            real(path, layout, who, *rest, **options)

    def run(data: Any, saves: dict[int, str], start: Any = None) -> Any:
        for ep in plan.servers:
            role_threads.start(ep, serve, plan, ep, start=start, checkpoints=tmp_path)
        for k in range(2):
            role_threads.start(f"trainer {k}", train, plan, k, data, saves, start)
        role_threads.all()
        role_threads.forget()

    with monkeypatch.context() as m:
        m.setattr(api, "write", write)
        run(given, {1: "1", 2: "2"})
    assert [p.name for p in (tmp_path / "2").iterdir()] == ["pserver-0"]
    with pytest.warns(CheckpointWarning, match="2 is skipped: .* is incomplete"):
        latest = dtrans.checkpoint.latest(tmp_path)
    assert latest == tmp_path / "1"
    run(other, {1: "2", 3: "4"}, latest)
    close(
        dtrans.checkpoint.load(tmp_path / "2", plan.main, plan.startup)[0],
        one_device(tx, [given[0], other[0]])[0],
    )
    assert dtrans.checkpoint.latest(tmp_path) == tmp_path / "4"


def test_a_server_with_a_place_needs_orbax_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the first save would import orbax, and steps would wait for the import."""
    plan = planned(optax.sgd(0.1), None, 1, 1)
    (ep,) = plan.servers
    orbax_io._piece_types.cache_clear()
    with (
        monkeypatch.context() as m,
        pytest.raises(ConfigError, match="checkpoints need orbax: pip install"),
    ):
        m.setitem(sys.modules, "orbax.checkpoint", None)
        serve(plan, ep, checkpoints=tmp_path)


def test_a_server_without_a_place_says_so(role_threads: RoleThreads) -> None:
    plan = planned(optax.sgd(0.1), DENSE, 1, 1)
    (ep,) = plan.servers

    def asks() -> None:
        with TrainerJob(
            plan, Role("trainer", 1, (ep,), trainer_id=0), {"deadline": roles.HANG}
        ) as job:
            job.init(KEY)
            with pytest.raises(
                CheckpointError, match=r"call job.serve\(state, checkpoints=folder\)"
            ):
                job.save("1")

    role_threads.start(ep, serve, plan, ep)
    role_threads.start("trainer 0", asks)
    role_threads.all()


# -- beside the steps ------------------------------------------------------------------------------


class HeldWriting:
    """Save that waits until the test continues it.

    Its arrays keep the values at the time of the call.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_go_on, real = (
            threading.Semaphore(0),
            threading.Event(),
            checkpoints.checkpoint.save_serving,
        )

        def save_serving(*args: Any, **options: Any) -> None:
            self.begun.release()
            assert self.may_go_on.wait(roles.HANG)
            real(*args, **options)

        monkeypatch.setattr(checkpoints.checkpoint, "save_serving", save_serving)


@pytest.mark.parametrize("sparse", [None, DENSE], ids=["dense", "table"])
def test_steps_go_on_while_servers_write(
    role_threads: RoleThreads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sparse: Any
) -> None:
    """The checkpoint has the bits of the state after the step at which it was requested."""
    tx, given, writing = optax.adam(0.1), batches(6), HeldWriting(monkeypatch)
    plan = planned(tx, sparse, 2, 2)

    def train(k: int) -> Any:
        role = Role("trainer", 2, tuple(plan.servers), trainer_id=k)
        with TrainerJob(plan, role, {"deadline": roles.HANG}) as job:
            state, before = job.init(KEY), None
            for at, batch in enumerate(given):
                if at == 2 and k:
                    before = jax.tree.map(np.array, job.params(state))
                    job.save("2", wait=False)
                state, _ = job.step(state, *job.shard_batch(*batch))
            if k:
                assert all(writing.begun.acquire(timeout=roles.HANG) for _ in plan.servers)
                assert not (tmp_path / "2").exists()
                writing.may_go_on.set()
            return before, job.params(state)

    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep, checkpoints=tmp_path)
    for k in range(2):
        role_threads.start(f"trainer {k}", train, k)
    before, after = role_threads.all()["trainer 1"]
    params, opt_state = dtrans.checkpoint.load(tmp_path / "2", plan.main, plan.startup)
    jax.tree.map(np.testing.assert_array_equal, params, before)
    assert int(opt_state[0].count) == 2
    close(params, one_device(tx, given[:2])[0])
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(opt_state[0].mu))
    close(after, one_device(tx, given)[0])


def test_what_went_wrong_beside_the_steps_is_raised_by_the_next_save_and_at_the_end(
    role_threads: RoleThreads, tmp_path: Path
) -> None:
    plan = planned(optax.sgd(0.1), None, 1, 1)
    (ep,) = plan.servers
    for name in ("1", "2"):
        (tmp_path / name / "pserver-0" / "theirs").mkdir(parents=True)

    def asks() -> None:
        job = TrainerJob(plan, Role("trainer", 1, (ep,), trainer_id=0), {"deadline": roles.HANG})
        state = job.init(KEY)
        job.save("1", wait=False)
        state, _ = job.step(state, *batches(1)[0])
        with pytest.raises(CheckpointError, match="could not save its part of checkpoint 1"):
            job.save("3")
        job.save("2", wait=False)
        with pytest.raises(CheckpointError, match="could not save its part of checkpoint 2"):
            job.close()

    role_threads.start(ep, serve, plan, ep, checkpoints=tmp_path)
    role_threads.start("trainer 0", asks)
    role_threads.all()


def test_an_answer_that_comes_too_late_is_no_answer_to_another_request() -> None:
    sent: list[Any] = []
    line = TrainerLine(
        "here", 0, 1, session="", sync_mode=True, plan={}, secret="", deadline=1.0, say=sent.append
    )
    line.welcomed = True
    steps, heard = (
        TrainerSteps(lambda ep: line),
        lambda op, **fields: line.answer(line.receive([wire.header(op, **fields)]), 0.0),
    )

    def saved() -> Any:
        steps.save(["here"], "1", 0)
        return steps.saved()

    late = {
        "saved": (saved, {"name": "1", "error": ""}),
        "report": (lambda: steps.tables(["here"]), {"tables": []}),
        "evicted": (lambda: steps.evict([("here", "t")], 1),
                    {"table": "t", "count": 0, "error": ""}),
        "rows": (lambda: steps.prefetch([("here", "t", np.arange(1), np.ones((1, 1)))],
                                        train=False),
                 {"table": "t", "step": 0, "pieces": []}),
        "changes": (lambda: steps.changed([("here", "t")], 0),
                    {"table": "t", "now": 0, "count": 0, "gone": 0, "error": "", "pieces": []}),
    }  # fmt: skip
    for op, (ask, fields) in late.items():
        ask().close()  # as after a wait that was too long
        assert heard(op, **fields, request=wire.parse([sent[-1][0]])["request"]) is None, op
        again = ask()
        assert heard(op, **fields, request=wire.parse([sent[-1][0]])["request"]) is not None, op
        again.close()
    assert heard("blocks", step=0, pieces=[]) is not None


def test_a_thread_that_writes_tells_what_it_has_met() -> None:
    """The thread may meet any exception. The job continues without the checkpoint."""
    written: list[Any] = []

    def keep(name: str, state: Any, mark: SaveId) -> None:
        assert mark.step == 5
        if name in ("told", "not told"):
            raise StateError("no room") if name == "told" else ZeroDivisionError("by 0")
        written.append((name, state, jax.config.jax_enable_x64))

    ready = threading.Semaphore(0)
    writer, ended = StateWriter(keep, wake=ready.release), []
    for name in ("told", "1", "not told"):
        writer.begin(name, {"x": 1}, SaveId(step=5))
    while len(ended) < 3:
        assert ready.acquire(timeout=roles.HANG)
        ended += writer.ended()
    writer.begin("2", {"x": 2}, SaveId(step=5))
    writer.close()
    assert ended == [("told", "no room"), ("1", ""), ("not told", "ZeroDivisionError: by 0")]
    assert written == [("1", {"x": 1}, True), ("2", {"x": 2}, True)]


def test_an_array_that_numpy_has_a_view_of_is_not_donated() -> None:
    """So a snapshot stays unchanged, although the next update donates its memory."""
    update = jax.jit(lambda x: x * 2, donate_argnums=0)
    x = jax.numpy.arange(1 << 16) + 1
    seen = np.asarray(x)
    y = update(x)
    for _ in range(3):
        y = update(y)
    np.testing.assert_array_equal(seen, np.arange(1 << 16) + 1)
    assert int(y[0]) == 16


def test_what_a_snapshot_was_copied_of_is_donated() -> None:
    """The memory of the server's old array is reused, while its copy waits to be written."""
    update = jax.jit(lambda x: x * 2, donate_argnums=0)
    go_on, written, places = threading.Event(), [], []

    def keep(name: str, state: Any, mark: SaveId) -> None:
        go_on.wait(roles.HANG)
        written.append({n: x.copy() for n, x in state.items()})
        places.append(state["x"].ctypes.data)

    ready = threading.Semaphore(0)
    writer, ended = StateWriter(keep, wake=ready.release), []
    kept, x = np.ones(3), jax.numpy.arange(1 << 16)
    for name in ("1", "2"):
        held, at = np.asarray(x), x.unsafe_buffer_pointer()
        writer.begin(name, {"x": held, "kept": kept}, SaveId(step=5), ["x"])
        del held
        writer.wait_copied()
        x = update(x)
        assert x.unsafe_buffer_pointer() == at
        go_on.set()
        while len(ended) < int(name):
            assert ready.acquire(timeout=roles.HANG)
            ended += writer.ended()
        go_on.clear()
    writer.close()
    for k, of in enumerate(written):
        np.testing.assert_array_equal(of["x"], np.arange(1 << 16) << k)
        np.testing.assert_array_equal(of["kept"], 1)
    assert places[0] == places[1]


def test_memory_for_a_copy_is_there_before_a_save() -> None:
    """The memory is allocated at the start of the server.

    Otherwise a save would wait for pages from the system.
    """
    spent = {"count": jax.numpy.int32(3), "mu": jax.numpy.ones((300, 5), "bfloat16")}
    writer = StateWriter(lambda *_: None, spent, wake=lambda: None)
    writer._copier.submit(lambda: None).result()
    pool = writer._pool
    assert sorted(key for key, _ in pool._owners) == ["count", "mu"]
    assert not pool.take("mu", (300, 5), "bfloat16").any()
    writer.begin("1", {n: np.asarray(x) for n, x in spent.items()}, SaveId(step=1), list(spent))
    writer.close()
    assert {len(owners) for owners in pool._owners.values()} == {1}


@pytest.mark.parametrize("mode", [dtrans.Sync(), dtrans.Async()], ids=["sync", "async"])
def test_a_save_lets_updates_donate_the_state(
    role_threads: RoleThreads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    """The next update waits until the snapshot is copied, so the checkpoint has one step."""
    tx, given = optax.adam(0.1), batches(4)
    plan = planned(tx, None, 1, 2, mode=mode)
    places, copied = list[set[int]](), state_writer._copy_spent
    begin, wait_copied = StateWriter.begin, StateWriter.wait_copied
    # each server's copies wait for its own next update, which says nothing about other servers
    updates: dict[StateWriter, list[threading.Event]] = collections.defaultdict(list)

    def noted_copied(state: Any, spent: Any, pool: Any) -> Any:
        assert {n.split("/")[2] for n in spent} >= {"mu", "nu"}
        assert all(n.startswith("opt_state") for n in spent)
        places.append({x.ctypes.data for n, x in state.items() if n in spent})
        return copied(state, spent, pool)

    def late_begin(writer: StateWriter, *args: Any) -> None:
        update = threading.Event()
        updates[writer].append(update)
        writer._copier.submit(update.wait, roles.HANG)
        begin(writer, *args)

    def wait_late_copied(writer: StateWriter) -> None:
        for update in updates[writer]:
            update.set()
        wait_copied(writer)

    monkeypatch.setattr(state_writer, "_copy_spent", noted_copied)
    monkeypatch.setattr(StateWriter, "begin", late_begin)
    monkeypatch.setattr(StateWriter, "wait_copied", wait_late_copied)

    def train() -> None:
        role = Role("trainer", 1, tuple(plan.servers), trainer_id=0)
        with TrainerJob(plan, role, {"deadline": roles.HANG}) as job:
            state = job.init(KEY)
            for at, batch in enumerate(given):
                job.save(str(at), wait=False)
                state, _ = job.step(state, *batch)

    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep, checkpoints=tmp_path)
    role_threads.start("trainer 0", train)
    role_threads.all()
    for at in range(len(given)):
        close(
            dtrans.checkpoint.load(tmp_path / str(at), plan.main)[0], one_device(tx, given[:at])[0]
        )
    assert len(places) == len(given) * len(plan.servers)
    if (
        plan.sync_mode
    ):  # in the other mode XLA gives memory of the state to parameters, and the reverse
        # no update has changed the state
        assert len(set.union(*places)) == len(places[0]) + len(places[1])


# -- when a job ends by an error -------------------------------------------------------------------


def serve_to_an_error(
    plan: Any, endpoint: str, start: Any = None, deadline: float = roles.HANG, **options: Any
) -> Any:
    """Return the error that a server raises, and its notes."""
    role = Role("pserver", plan.trainers, tuple(plan.servers), current_endpoint=endpoint)
    with ServerJob(plan, role, {"deadline": deadline}) as job, pytest.raises(PeerError) as ended:
        job.serve(dtrans.checkpoint.restore(start, job) if start else job.init(KEY), **options)
    return " ".join([str(ended.value), *getattr(ended.value, "__notes__", ())])


class Gone(Exception):
    """Failure of a trainer."""


def train_and_fail(plan: Any, k: int, given: Any, saves: dict[int, str], start: Any = None) -> None:
    """Take all steps. The last trainer fails before it has closed."""
    role = Role("trainer", plan.trainers, tuple(plan.servers), trainer_id=k)
    with (
        contextlib.suppress(Gone, PeerError),
        TrainerJob(plan, role, {"deadline": roles.HANG}) as job,
    ):
        state = dtrans.checkpoint.restore(start, job) if start else job.init(KEY)
        for at, batch in enumerate(given):
            state, _ = job.step(state, *job.shard_batch(*batch))
            if at in saves:
                job.save(saves[at])
        if k == plan.trainers - 1:
            raise Gone


def fail(
    role_threads: RoleThreads,
    plan: Any,
    given: Any,
    saves: Any = (),
    start: Any = None,
    **options: Any,
) -> Any:
    for ep in plan.servers:
        role_threads.start(ep, serve_to_an_error, plan, ep, start, **options)
    for k in range(plan.trainers):
        role_threads.start(f"trainer {k}", train_and_fail, plan, k, given, saves or {}, start)
    ended = role_threads.all()
    role_threads.forget()
    return [ended[ep] for ep in plan.servers]


@pytest.mark.parametrize("sparse", [None, DENSE], ids=["dense", "table"])
def test_what_was_trained_survives_a_trainer(
    role_threads: RoleThreads, tmp_path: Path, sparse: Any
) -> None:
    """A checkpoint that servers write after a failure is named after the user's step.

    The count starts at 0, at the last save, or at the restored checkpoint.
    """
    tx, given = optax.adam(0.1), batches(6)
    plan = planned(tx, sparse, 2, 2)
    told = fail(role_threads, plan, given[:2], checkpoints=tmp_path)
    for ep, said in zip(plan.servers, told, strict=True):
        assert "Gone" in said
        assert f"pserver {ep} saved its state after 2 steps of this job: {tmp_path}/2" in said
    first = dtrans.checkpoint.latest(tmp_path)
    assert first == tmp_path / "2"
    close(dtrans.checkpoint.load(first, plan.main, plan.startup)[0], one_device(tx, given[:2])[0])
    # use other ports, because another process may use the old ones
    plan = planned(tx, sparse, 2, 2)
    fail(role_threads, plan, given[2:4], start=first, checkpoints=tmp_path)
    second = dtrans.checkpoint.latest(tmp_path)
    assert second == tmp_path / "4"
    close(dtrans.checkpoint.load(second, plan.main, plan.startup)[0], one_device(tx, given[:4])[0])
    plan = planned(tx, sparse, 2, 2)
    fail(role_threads, plan, given[4:], {0: "100"}, start=second, checkpoints=tmp_path)
    third = dtrans.checkpoint.latest(tmp_path)
    assert third == tmp_path / "101"
    close(dtrans.checkpoint.load(third, plan.main, plan.startup)[0], one_device(tx, given)[0])


def test_what_was_saved_last_is_not_saved_again(role_threads: RoleThreads, tmp_path: Path) -> None:
    plan = planned(optax.sgd(0.1), None, 2, 2)
    fail(role_threads, plan, batches(2), {1: "7"}, checkpoints=tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["7"]
    assert dtrans.checkpoint.latest(tmp_path) == tmp_path / "7"


def test_a_state_may_be_dropped(role_threads: RoleThreads, tmp_path: Path) -> None:
    plan = planned(optax.sgd(0.1), None, 2, 2)
    fail(role_threads, plan, batches(1), checkpoints=tmp_path, on_failure="drop")
    # no step was made
    fail(role_threads, planned(optax.sgd(0.1), None, 1, 2), [], checkpoints=tmp_path)
    assert not [*tmp_path.iterdir()]
    role = Role("pserver", 2, tuple(plan.servers), current_endpoint=next(iter(plan.servers)))
    with ServerJob(plan, role, {}) as job:
        with pytest.raises(ConfigError, match='on_failure="save" needs a folder: job.serve'):
            job.serve({}, on_failure="save")
        with pytest.raises(ConfigError, match="on_failure must be None, 'save' or 'drop'"):
            job.serve({}, on_failure="keep")


def test_servers_do_not_save_a_state_without_leaves_of_trainers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the piece of trainer 0, which has the leaves of trainers, a checkpoint of servers is
    incomplete."""
    plan = planned(optax.sgd(0.1), None, 2, 2)
    role = Role("pserver", 2, tuple(plan.servers), current_endpoint=next(iter(plan.servers)))
    saver = ServerCheckpoints(tmp_path, plan, role.current_endpoint, 0)
    with ServerJob(plan, role, {}) as job:
        assert job._keep_last(saver, None) is not None
        monkeypatch.setattr(type(plan), "frozen", ["params/seen"])
        assert job._keep_last(saver, None) is None
        with pytest.raises(ConfigError, match="params/seen is only on trainers, so servers cannot"):
            job.serve({}, checkpoints=tmp_path, on_failure="save")


def test_asynchronous_servers_keep_what_was_trained_without_one_that_never_came(
    role_threads: RoleThreads, tmp_path: Path
) -> None:
    """Trainer 0, by which servers identify the run, has sent no id."""
    tx, given = optax.adam(0.1), batches(3)
    plan = planned(tx, None, 2, 2, mode=dtrans.Async())
    for ep in plan.servers:
        role_threads.start(ep, serve_to_an_error, plan, ep, deadline=6, checkpoints=tmp_path)
    role_threads.start("trainer 1", train, plan, 1, given, {})
    ended = role_threads.all()
    assert all("for trainer 0 to say hello" in ended[ep] for ep in plan.servers)
    latest = dtrans.checkpoint.latest(tmp_path)
    assert latest == tmp_path / "3"
    close(dtrans.checkpoint.load(latest, plan.main)[0], ended["trainer 1"])


def test_servers_save_their_last_under_one_name_or_apart(tmp_path: Path) -> None:
    """Asynchronous servers have counted different steps.

    Pieces of synchronous servers at different steps are never combined.
    """
    for name, mode in (("async", dtrans.Async()), ("sync", dtrans.Sync())):
        plan = planned(optax.sgd(0.1), None, 1, 3, mode=mode)
        states = {}
        for ep, server in plan.servers.items():
            with dtrans.Executor() as exe:
                states[ep] = exe.run(server.startup, KEY)
        held = {ep: ServerCheckpoints(tmp_path / name, plan, ep, 10) for ep in plan.servers}
        found = [
            held[ep].keep_last(states[ep], SaveId(("run",), 4 + k), {})
            for k, ep in enumerate(plan.servers)
        ]
        if name == "async":
            assert {*found} == {tmp_path / "async" / "14"}
            assert dtrans.checkpoint.latest(tmp_path / name) == found[0]
        else:
            assert found == [tmp_path / "sync" / str(14 + k) for k in range(3)]
            with pytest.warns(CheckpointWarning, match="is incomplete"):
                assert dtrans.checkpoint.latest(tmp_path / name) is None


def test_the_last_of_a_job_does_not_write_over_a_whole_checkpoint(
    role_threads: RoleThreads, tmp_path: Path
) -> None:
    plan = planned(optax.sgd(0.1), None, 1, 1)
    first, second = (
        fail(role_threads, plan, batches(2)[at:], checkpoints=tmp_path)[0] for at in (0, 0)
    )
    assert first.endswith(f": {tmp_path}/2")
    other = Path(second.rpartition(": ")[2])
    assert other.parent == tmp_path and other.name.startswith("2-")
    close(
        dtrans.checkpoint.load(other, plan.main)[0],
        dtrans.checkpoint.load(tmp_path / "2", plan.main)[0],
    )


def test_the_error_of_a_job_is_raised_where_its_state_cannot_be_saved(
    role_threads: RoleThreads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused_by_the_disk(monkeypatch, orbax_io, "_save_piece", errno.ENOSPC)
    (told,) = fail(
        role_threads, planned(optax.sgd(0.1), None, 1, 1), batches(1), checkpoints=tmp_path
    )
    assert "Gone" in told and "could not save its state: StateError: the piece of" in told
