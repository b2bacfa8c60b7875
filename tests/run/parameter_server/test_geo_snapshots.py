"""Jobs of GEO-SGD with snapshots: kills of servers and trainers, and the snapshots of trainers."""

from __future__ import annotations

import dataclasses
import re
import sys
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from paths import ROOT

import dtrans
from dtrans.errors import StateError
from dtrans.parameter_server.plan import PServerPlan
from dtrans.protocol.generations import Generation, ReplacedError
from dtrans.protocol.server_blocks import RowGradient
from dtrans.protocol.tables.cached_rows import CachedSnapshot
from dtrans.protocol.trainer.geo_steps import GeoSnapshot
from dtrans.run.distributed.launcher import launch
from dtrans.run.net.launcher_folder import LauncherFolder
from dtrans.run.net.role_folder import RoleFolder
from dtrans.run.parameter_server.server_connections import ServerConnections
from dtrans.run.role_jobs.geo_snapshots import GeoSnapshots


FINAL, EVERY, SNAPSHOTS = 60, 4, 10

# the gradient is constant, so the sum of all changes of a trainer is known
MODEL = """
import jax, jax.numpy as jnp, optax
import dtrans

key, tx = jax.random.key(0), optax.sgd(1.0, momentum=0.0)
x = jax.ShapeDtypeStruct((4, 3), float)

def step(params, opt_state, x):
    loss = lambda net: -jnp.mean(x @ net["w"]) - jnp.sum(net["b"])
    value, grads = dtrans.value_and_grad(loss)(params["net"])
    updates, opt_state = tx.update(grads, opt_state, params["net"])
    params = {"net": optax.apply_updates(params["net"], updates), "seen": params["seen"] + 1}
    return params, opt_state, value

def init(key):
    net = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(5)}
    return {"net": net, "seen": jnp.zeros((), int)}, tx.init(net)

main = dtrans.trace(step, *jax.eval_shape(init, key), x)
startup = dtrans.trace(init, key)
"""
# Before a step, the last trainer kills a process, and trainers wait for each other. Each step of
# trainer k looks up row 5 + k. All trainers look up rows 0 to 4 in turn.
ROWS = 8
WITH_TABLE = [
    ('"b": jnp.zeros(5)}', '"b": jnp.zeros(5), "emb": jnp.zeros((8, 2))}'),
    ("(params, opt_state, x):", "(params, opt_state, x, ids):"),
    ('jnp.sum(net["b"])', 'jnp.sum(net["b"]) - jnp.sum(net["emb"][ids])'),
    ("key), x)", "key), x, jax.ShapeDtypeStruct((2,), int))"),
]
ITS_PLAN = 'sparse={"params/net/emb": dtrans.Rows("lazy")},'
ITS_BATCH = "np.ones(x.shape, np.float32), np.array([step % 5, 5 + role.trainer_id]))"
TRAIN = """
import os, signal, time
import jax
import numpy as np
import dtrans
from dtrans.run.net.role_folder import RoleFolder
from model import key, main, startup, x

SERVERS = [f"pserver {i}" for i in range({servers})]
role = dtrans.Role.from_env()
open(f"pid {role.name}", "w").write(str(os.getpid()))

def await_snapshots(number):
    # all servers have a snapshot that is newer than the snapshot at the previous kill
    folder, before = RoleFolder.from_environment(role.name), None
    if number:
        before = open(f"snapshots {number - 1}").read()
    while not (snapshots := folder.snapshots_alone(SERVERS)) or str(snapshots) == before:
        time.sleep(0.01)
    open(f"snapshots {number}", "w").write(str(snapshots))

def batch(step):
    for number, (at, victim) in enumerate({kills}):
        if step == at and role.trainer_id == role.trainers - 1:
            try:
                os.mkdir(f"kill {number}")
            except FileExistsError:
                continue
            await_snapshots(number)
            os.kill(int(open(f"pid {victim}").read()), signal.SIGKILL)
    open(f"step {role.trainer_id} {step}", "w")
    while any(not os.path.exists(f"step {k} {max(0, step - 3)}") for k in range(role.trainers)):
        time.sleep(0.01)
    return ({batch}

plan = dtrans.pserver(
    main, startup, pservers=role.pservers, trainers=role.trainers, mode=dtrans.Geo(4, {waits}),
    placement=dtrans.BlockPlacement(min_block_size={size}), {sparse}
)
with plan.on_cluster() as job:
    state = job.init(key)
    if role.is_pserver:
        state = job.serve(state, snapshots=10)
        np.savez(f"end {role.name}.npz", **state)
    else:
        before = job.step_count
        for state, loss in job.steps(state, batch, stop=60):
            print(f"loss of step {job.step_count}: {float(loss)}")
        print(f"began after {before}, and has seen {int(job.params(state)['seen'])} steps")
"""


def run(
    folder: Path,
    kills: list[tuple[int, str]],
    monkeypatch: Any,
    *,
    trainers: int,
    waits: bool = False,
    servers: int = 2,
    table: bool = False,
) -> dict[str, np.ndarray]:
    """Run the job; return the servers' arrays at its end, by name."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    model, batch = MODEL, "np.ones(x.shape, np.float32),)"
    if table:
        batch = ITS_BATCH
        for old, new in WITH_TABLE:
            assert model.count(old) == 1
            model = model.replace(old, new)
    (folder / "model.py").write_text(model)
    script = TRAIN.replace("{batch}", batch).replace("{sparse}", ITS_PLAN if table else "")
    script = script.replace("{waits}", str(waits)).replace("{kills}", repr(kills))
    # with three servers, the last server has no block
    size = 1 if servers == 2 else 100
    script = script.replace("{servers}", str(servers)).replace("{size}", str(size))
    (folder / "survive.py").write_text(script)
    env = {"PYTHONPATH": f"{folder}:{ROOT}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "survive.py"]
    launch(command, trainers=trainers, pservers=servers, env=env, restarts=len(kills) or 1)
    found: dict[str, np.ndarray] = {}
    for i in range(servers):
        with np.load(folder / f"end pserver {i}.npz") as file:
            found |= file
    return found


def last_steps(name: str, output: str) -> tuple[int, int]:
    """Return the first step of a trainer's last process, and the steps that its leaf has counted."""
    found = re.findall(rf"\[{name}\] began after (\d+), and has seen (\d+) steps", output)
    return int(found[-1][0]), int(found[-1][1])


def returns(output: str) -> list[tuple[int, int]]:
    """Return each return of trainer 0: its step, and the step of its optimizer's state."""
    pattern = r"trainer 0 continues after step (\d+), with its optimizer's state after step (\d+)"
    return [(int(step), int(snapshot)) for step, snapshot in re.findall(pattern, output)]


def pushed(trainers: int) -> float:
    """Return the sum of the changes that a trainer pushes in all steps, if each change is 1."""
    rest = 0.0
    for _ in range(FINAL // EVERY):
        rest = (rest + EVERY) * (1 - 1 / trainers)
    return FINAL - rest


WAITS = pytest.mark.parametrize("waits", [False, pytest.param(True, marks=pytest.mark.rotated)])


@WAITS
def test_the_only_trainer_loses_steps_of_its_own_leaves_alone(
    waits: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Servers apply each change of the trainer once."""
    kills = [(27, "trainer 0"), (51, "trainer 0")]
    servers = run(tmp_path / "killed", kills, monkeypatch, trainers=1, waits=waits)
    output = capsys.readouterr()
    assert output.err.count("it starts again, and the other roles continue") == 2
    for name, x in servers.items():
        np.testing.assert_array_equal(x, FINAL if name.startswith("params/net/b") else FINAL / 2)
    lost = [step - snapshot for step, snapshot in returns(output.err)]
    assert len(lost) == 2 and all(0 <= x <= SNAPSHOTS for x in lost)
    began, seen = last_steps("trainer 0", output.out)
    # batches are read one step ahead, and the push of step 48 may not have been sent
    assert 44 <= began <= 51 and seen == FINAL - sum(lost)


@pytest.mark.parametrize(
    ("waits", "count"),
    [
        pytest.param(False, 2, id="beside"),
        pytest.param(True, 2, id="waits", marks=pytest.mark.rotated),
        pytest.param(False, 3, id="a server without blocks", marks=pytest.mark.rotated),
    ],
)
def test_a_lost_server_goes_back_alone_and_trainers_keep_their_steps(
    waits: bool,
    count: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kills = [(25, "pserver 0"), (44, "trainer 0")]
    servers = run(tmp_path / "killed", kills, monkeypatch, trainers=2, waits=waits, servers=count)
    output = capsys.readouterr()
    assert output.err.count("it starts again, and the other roles continue") == 2
    assert "all roles start again" not in output.err
    went_back = re.findall(
        r"\[pserver 0\] .* continues from its snapshot after (\d+) steps", output.err
    )
    assert len(went_back) == 1
    lacks = re.findall(r"\[pserver 0\] .* lacks (\d+) steps of trainer \d, which", output.err)
    most = 2 * SNAPSHOTS + 2 * EVERY
    assert sum(map(int, lacks)) <= most

    # trainer 1 was not lost, and keeps its leaves; trainer 0 has lost steps since its snapshot
    assert last_steps("trainer 1", output.out) == (0, FINAL)
    began, seen = last_steps("trainer 0", output.out)
    ((step, snapshot),) = returns(output.err)
    assert began == step and 0 <= step - snapshot <= SNAPSHOTS and seen == FINAL - (step - snapshot)
    both = 2 * pushed(2)
    for name, x in servers.items():
        changes = x if name.startswith("params/net/b") else 2 * x
        lost = (step - snapshot) + (most if name in blocks_of(0, tmp_path) else 0)
        assert np.all(changes <= both + 1e-3) and np.all(changes >= both - lost - 1e-3)


def rows_of(servers: dict[str, np.ndarray]) -> np.ndarray:
    """Return the rows of the table in the two servers' blocks."""
    names = [name for name in sorted(servers) if name.startswith("params/net/emb")]
    return np.concatenate([servers[name] for name in names])


def pushed_rows(trainers: int, since: int = 0) -> np.ndarray:
    """Return the sum of the changes of each row that all trainers push in steps from `since` on."""
    total = np.zeros(ROWS)
    for k in range(trainers):
        rest, touched = np.zeros(ROWS), set[int]()
        for step in range(since, FINAL):
            for row in (step % 5, 5 + k):
                rest[row] += 1
                touched.add(row)
            if (step + 1) % EVERY == 0:
                for row in touched:
                    total[row] += rest[row] / trainers
                    rest[row] *= 1 - 1 / trainers
                touched.clear()
    return total


@WAITS
def test_the_only_trainer_of_a_table_loses_no_change_of_a_row(
    waits: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The servers have the rows of an undisturbed job."""
    kills = [(27, "trainer 0"), (51, "trainer 0")]
    servers = run(tmp_path / "k", kills, monkeypatch, trainers=1, waits=waits, table=True)
    output = capsys.readouterr()
    assert output.err.count("it starts again, and the other roles continue") == 2
    expected = np.repeat(pushed_rows(1)[:, None], 2, 1)
    assert expected[:6, 0].tolist() == [12] * 5 + [FINAL]
    np.testing.assert_array_equal(rows_of(servers), expected)
    losses = re.findall(r"loss of step (\d+): (\S+)", output.out)
    assert {int(step) for step, _ in losses} == {*range(1, FINAL + 1)}
    for step, loss in losses:
        before = int(step) - 1  # a step adds 1/2 to 6 entries of w, 1 to 5 of b, and 1 to 2 rows
        assert float(loss) == -(1.5 * before + 5 * before + 2 * before + 2 * (before // 5))
    lost = [step - snapshot for step, snapshot in returns(output.err)]
    assert len(lost) == 2 and all(0 <= x <= SNAPSHOTS for x in lost)


@WAITS
def test_a_lost_server_of_a_table_goes_back_alone(
    waits: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The table's rows lack the server's changes since its snapshot, and changes of the lost trainer's
    last steps."""
    kills = [(25, "pserver 0"), (44, "trainer 0")]
    servers = run(tmp_path / "killed", kills, monkeypatch, trainers=2, waits=waits, table=True)
    output = capsys.readouterr()
    assert output.err.count("it starts again, and the other roles continue") == 2
    assert "all roles start again" not in output.err
    assert len(re.findall(r"\[pserver 0\] .* continues from its snapshot after", output.err)) == 1
    assert last_steps("trainer 1", output.out) == (0, FINAL)
    ((step, snapshot),) = returns(output.err)
    assert 0 <= step - snapshot <= SNAPSHOTS

    rows, expected = rows_of(servers)[:, 0], pushed_rows(2)
    on_first = sum(
        len(servers[n]) for n in blocks_of(0, tmp_path) if n.startswith("params/net/emb")
    )
    assert 0 < on_first < ROWS
    most = np.where(np.arange(ROWS) < on_first, 2 * SNAPSHOTS + 2 * EVERY, 0) + (step - snapshot)
    assert np.all(rows <= expected + 1e-3) and np.all(rows >= expected - most - 1e-3)
    # no trainer looks up the last row, and only trainer 1 looks up the row before, whose server was
    # not lost
    assert rows[7] == 0
    np.testing.assert_allclose(rows[6], expected[6], rtol=1e-6)


def blocks_of(server: int, folder: Path) -> set[str]:
    with np.load(folder / "killed" / f"end pserver {server}.npz") as file:
        return set(file.files)


# -- snapshots of a trainer ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> dict[str, Any]:
    """Return the names of the script `model.py`."""
    found: dict[str, Any] = {}
    exec(MODEL, found)
    return found


def plan_of(model: dict[str, Any], **options: Any) -> PServerPlan:
    return dtrans.pserver(
        *(model["main"], model["startup"]),
        pservers="127.0.0.1:6174,127.0.0.1:6175",
        trainers=2,
        mode=dtrans.Geo(4),
        placement=dtrans.BlockPlacement(min_block_size=1),
        **options,
    )


class StandIn:
    """GEO-SGD of a trainer that has pushed the changes of eight steps. The last push is pending."""

    def __init__(self, received_before: dict[str, int]) -> None:
        self.received_before, self.pushed = received_before, 8

    def snapshot(self, step: int, params: dict[str, Any], local: dict[str, Any]) -> GeoSnapshot:
        return GeoSnapshot(step, self.pushed, 4, params, {n: -x for n, x in params.items()}, local)


def executor(received: dict[str, int] | None = None) -> Any:
    """Return the fields of a trainer's executor that its snapshots read."""
    connections = types.SimpleNamespace(steps_between_snapshots=10, is_in_generation=True)
    return types.SimpleNamespace(connections=connections, geo=StandIn(received or {}))


def sharding_of(plan: PServerPlan, path: Path) -> GeoSnapshots:
    LauncherFolder(path).grant(Generation(), "a run", trainers=2)
    return GeoSnapshots(RoleFolder(path, "trainer 1"), plan, "trainer 1")


def test_a_trainer_writes_snapshots_and_begins_with_the_newest(
    model: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = plan_of(model)
    snapshots, state = sharding_of(plan, tmp_path), model["init"](model["key"])
    assert snapshots.read() is None
    assert snapshots.begin(executor({"a": 0, "b": 0}), state) == (state, 0)
    for step in (0, 9, 11, 12, 20, 21):
        changed = jax.tree.map(lambda x, step=step: x + step, state)
        snapshots.before_step(executor(), step, changed)
    assert [x.name for x in tmp_path.glob("trainer-1/*")] == ["20.npz"]

    again = sharding_of(plan, tmp_path)
    snapshot = again.read()
    assert snapshot is not None and (snapshot.step, snapshot.pushed, snapshot.pending) == (20, 8, 4)
    w = "params/net/w.block0"
    np.testing.assert_array_equal(snapshot.changes[w], np.full((3, 2), 20.0))
    np.testing.assert_array_equal(snapshot.deltas[w], np.full((3, 2), -20.0))
    # the servers' parameters, with the leaves that only the trainer has
    (params, opt_state), step = again.begin(executor({"a": 24, "b": 20}), state)
    assert step == 24 and params["seen"] == 20 and params["net"]["b"].tolist() == [0] * 5
    trace = jax.tree.leaves(opt_state)
    assert trace and all(np.all(x == 20) for x in trace)
    assert caplog.messages == [
        "trainer 1 continues after step 24, with its optimizer's state after step 20"
    ]


def test_a_trainer_without_a_snapshot_continues_with_the_initial_optimizer_state(
    model: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    snapshots, state = sharding_of(plan_of(model), tmp_path), model["init"](model["key"])
    assert snapshots.read() is None
    assert snapshots.begin(executor({"a": 4, "b": 8}), state) == (state, 8)
    assert "continues after step 8, with its optimizer's state after step 0" in caplog.text


def test_a_snapshot_that_cannot_be_written_is_logged(
    model: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    snapshots, state = sharding_of(plan_of(model), tmp_path), model["init"](model["key"])
    snapshots.before_step(executor(), 10, state)
    with monkeypatch.context() as full:

        def fail(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        full.setattr(np, "savez", fail)
        snapshots.before_step(executor(), 20, state)
    (message,) = caplog.messages
    assert message.startswith(
        "trainer 1 cannot write its snapshot after step 20, so a restart would begin"
    )
    assert "with the optimizer's state after step 10: " in message
    (tmp_path / "trainer-1/10.npz").write_bytes(b"")
    with pytest.raises(
        StateError, match="the snapshot of trainer 1 after step 10 cannot be read from"
    ):
        sharding_of(plan_of(model), tmp_path).read()


def table_plan() -> PServerPlan:
    text, found = MODEL, dict[str, Any]()
    for old, new in WITH_TABLE:
        text = text.replace(old, new)
    exec(text, found)
    return plan_of(found, sparse={"params/net/emb": dtrans.Rows("lazy")})


class StandInWithRows(StandIn):
    """Stand-in whose trainer stores three rows; a push with two of them is pending."""

    note_push: Any = None

    def snapshot(self, step: int, params: dict[str, Any], local: dict[str, Any]) -> GeoSnapshot:
        rows, ids = np.full((3, 2), step, np.float32), np.array([1, 4, 5], np.int32)
        pending = RowGradient(ids[1:], -rows[1:])
        snapshot = CachedSnapshot(ids, ids == 4, rows, [rows + 1], pending)
        dense = super().snapshot(step, params, local)
        return dataclasses.replace(dense, tables={"params/net/emb": snapshot})


def with_rows(received: dict[str, int]) -> Any:
    found = executor()
    found.geo = StandInWithRows(received)
    return found


def state_of(plan: PServerPlan) -> Any:
    """Return zeros as a trainer's state, in which tables have no rows."""
    leaves = {}
    for name, t in plan.main.inputs.items():
        leaves[name] = np.zeros((0, 2) if "emb" in name else t.shape, t.dtype)
    return tuple(spec.unflatten_named(leaves) for spec in plan.main.args[:2])


def test_a_trainer_writes_its_rows_and_the_row_ids_of_later_pushes(tmp_path: Path) -> None:
    plan, name = table_plan(), "params/net/emb"
    snapshots, state = sharding_of(plan, tmp_path), state_of(plan)
    running = with_rows({"a": 0, "b": 0})
    assert snapshots.begin(running, state) == (state, 0)
    running.geo.note_push(4, {name: np.array([1], np.int32)})  # before the first snapshot
    snapshots.before_step(running, 20, state)
    for count in (12, 16):
        running.geo.note_push(count, {name: np.array([1, count], np.int32)})

    again = sharding_of(plan, tmp_path)
    snapshot = again.read()
    assert snapshot is not None
    rows = snapshot.tables[name]
    assert (rows.ids.tolist(), rows.is_touched.tolist()) == ([1, 4, 5], [False, True, False])
    assert rows.changes.tolist() == [[20, 20]] * 3 and rows.pending is not None
    assert [x.tolist() for x in rows.state] == [[[21, 21]] * 3]
    assert (rows.pending.ids.tolist(), rows.pending.rows.tolist()) == ([4, 5], [[-20, -20]] * 2)
    assert {n: ids[name].tolist() for n, ids in snapshot.pushes.items()} == {
        12: [1, 12],
        16: [1, 16],
    }

    # no server has received the second push, and a new snapshot contains the first push
    again.begin(with_rows({"a": 12, "b": 8}), state)
    assert [x.name for x in tmp_path.glob("trainer-1/push*")] == ["push-12.npz"]
    running.geo.pushed = 12
    again.before_step(running, 31, state)
    assert [x.name for x in tmp_path.glob("trainer-1/*")] == ["31.npz"]


def test_a_trainer_that_cannot_write_the_rows_of_a_push_removes_its_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plan = table_plan()
    snapshots, state = sharding_of(plan, tmp_path), state_of(plan)
    running = with_rows({"a": 0, "b": 0})
    snapshots.begin(running, state)
    snapshots.before_step(running, 20, state)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(np, "savez", fail)
        running.geo.note_push(12, {"params/net/emb": np.array([1], np.int32)})
    (message,) = caplog.messages
    assert message.startswith("trainer 1 cannot write the row ids of its push after step 12")
    assert sharding_of(plan, tmp_path).read() is None
    snapshots.before_step(running, 21, state)
    assert sharding_of(plan, tmp_path).read() is not None


def test_a_replaced_process_writes_no_snapshot(model: dict[str, Any], tmp_path: Path) -> None:
    snapshots, state = sharding_of(plan_of(model), tmp_path), model["init"](model["key"])
    LauncherFolder(tmp_path).grant(Generation(1), "a run", trainers=2, started={"trainer 1": 1})
    with pytest.raises(ReplacedError):
        snapshots.before_step(executor(), 10, state)
    assert not list(tmp_path.glob("trainer-1/*"))


def test_snapshots_of_trainers_are_forgotten_with_those_of_servers(tmp_path: Path) -> None:
    """A new start of all roles without a snapshot of each server begins with the initial state."""
    folder = LauncherFolder(tmp_path)
    for forget in (folder.forget_marks, folder.clear):
        folder.grant(Generation(), "a run", trainers=2)
        (tmp_path / "trainer-1").mkdir()
        forget()
        assert not (tmp_path / "trainer-1").exists()


def test_a_trainer_connects_to_the_servers_without_blocks_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In each generation, every server waits for all trainers."""
    greeted = []

    def link(self: Any, endpoint: str) -> Any:
        greeted.append(endpoint)
        return self._links.setdefault(endpoint, types.SimpleNamespace(close=lambda: None))

    monkeypatch.setattr(ServerConnections, "link", link)
    connections = ServerConnections(
        deadline=1.0, patience=1.0, wait_port=True, encryption="disabled"
    )
    try:
        for generation in (1, 2):
            connections.connect(["a", "b", "without blocks"] if generation == 1 else ["b"])
            connections.rejoin(generation)
            greeted.clear()
            connections.connect(["a", "b"])
            assert {*greeted} == {"a", "b", "without blocks"}
    finally:
        connections.abandon()
