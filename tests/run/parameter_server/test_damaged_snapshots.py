"""Damaged files of snapshots: each damage is detected, and the job goes back to an older snapshot."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from snapshot_folders import ENDPOINTS, NAMES, Servers, first_states, planned

import dtrans
from dtrans.checkpoint import orbax_io
from dtrans.errors import DamagedError, DamagedSnapshotError, StateError
from dtrans.parameter_server.plan import PServerPlan
from dtrans.protocol.generations import Generation
from dtrans.run.net import role_folder
from dtrans.run.net.launcher_folder import LauncherFolder
from dtrans.run.net.role_folder import RoleFolder
from dtrans.run.parameter_server.snapshots import ServerSnapshots


ARRAY = "pserver-0/dense/1.npy"
METADATA = "pserver-0/overview/metadata"


@pytest.fixture(scope="module")
def plan() -> PServerPlan:
    return planned()


@pytest.fixture
def servers(tmp_path: Path, plan: PServerPlan) -> Servers:
    """Return two servers that have written the snapshots of steps 0 and 10."""
    servers = Servers(tmp_path / "snapshots", plan, first_states(plan), 1)
    for step in (0, 10):
        for endpoint in ENDPOINTS:
            servers.write(endpoint, step, step)
    return servers


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def replace_text(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def copy_other_run(snapshot: Path) -> None:
    """Replace a snapshot by the snapshot of another job with the same plan."""
    shutil.rmtree(snapshot)
    plan = planned()
    other = Servers(snapshot.parent.parent / "other", plan, first_states(plan), 1)
    for endpoint in ENDPOINTS:
        other.write(endpoint, 10, 3)
    shutil.copytree(snapshot.parent.parent / "other" / "10", snapshot)


def copy_other_step(snapshot: Path) -> None:
    shutil.rmtree(snapshot)
    shutil.copytree(snapshot.with_name("0"), snapshot)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "changed byte": (
        lambda snapshot: flip(snapshot / ARRAY, -1),
        r"1\.npy with the array .*/b1 cannot be read: the file is damaged: its checksum",
    ),
    "changed header": (lambda snapshot: flip(snapshot / ARRAY, 20), r"1\.npy.*checksum"),
    "changed length of header": (lambda snapshot: flip(snapshot / ARRAY, 9), r"1\.npy.*checksum"),
    "truncated": (
        lambda snapshot: (snapshot / ARRAY).write_bytes((snapshot / ARRAY).read_bytes()[:-5]),
        "1.npy",
    ),
    "empty": (lambda snapshot: (snapshot / ARRAY).write_bytes(b""), "1.npy"),
    "missing file": (
        lambda snapshot: (snapshot / ARRAY).unlink(),
        "1.npy with the array .*/b1 is missing",
    ),
    "missing piece": (
        lambda snapshot: shutil.rmtree(snapshot / "pserver-0"),
        "pserver-0 .* is missing",
    ),
    "missing snapshot": (shutil.rmtree, "there is no checkpoint"),
    "empty metadata": (lambda snapshot: (snapshot / METADATA).write_bytes(b""), "pserver-0"),
    "missing metadata": (lambda snapshot: (snapshot / METADATA).unlink(), "pserver-0"),
    "changed metadata": (
        lambda snapshot: replace_text(
            snapshot / METADATA, '"dense": {', '"dense": {"more": "float32", '
        ),
        "pserver-0.*metadata.*checksum",
    ),
    "snapshot of another run": (copy_other_run, "belongs to another job"),
    "snapshot of another step": (copy_other_step, "step 0"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_server_goes_back_to_an_older_snapshot(
    servers: Servers, plan: PServerPlan, tmp_path: Path, damage: str
) -> None:
    """The server ends with an error that the launcher recognizes, and the launcher chooses this
    snapshot."""
    apply, text = DAMAGES[damage]
    snapshot = tmp_path / "snapshots" / "10"
    snapshots = servers.snapshots[ENDPOINTS[0]]
    folder = LauncherFolder(snapshot.parent)
    assert folder.newest_snapshot(NAMES) == 10
    apply(snapshot)
    folder.grant(Generation(1, 10), folder.run, 1, ENDPOINTS)
    with pytest.raises(DamagedSnapshotError, match=text) as raised:
        snapshots.begin(servers.first[ENDPOINTS[0]])
    assert re.search("snapshot of step 10: .* the newest older snapshot", str(raised.value))

    assert folder.newest_snapshot(NAMES) == 0
    folder.grant(Generation(2, 0), folder.run, 1, ENDPOINTS)
    start = snapshots.begin(servers.first[ENDPOINTS[0]])
    assert start.loaded == start.step == 0
    for name, x in start.state.items():
        np.testing.assert_array_equal(x, servers.first[ENDPOINTS[0]][name])


def test_a_damaged_snapshot_before_the_evictions_of_its_step_is_withdrawn(
    servers: Servers, tmp_path: Path
) -> None:
    """The other server knows the evictions of the step, so the snapshot counts as complete until a role
    reads the damaged file."""
    servers.write(ENDPOINTS[0], 20, 5, is_early=True)
    servers.write(ENDPOINTS[1], 20, 5)
    folder, snapshots = LauncherFolder(tmp_path / "snapshots"), servers.snapshots[ENDPOINTS[0]]
    assert folder.newest_snapshot(NAMES) == 20
    flip(tmp_path / "snapshots" / "20" / ARRAY, -1)
    folder.grant(Generation(1, 20), folder.run, 1, ENDPOINTS)
    with pytest.raises(DamagedSnapshotError, match="snapshot of step 20"):
        snapshots.begin(servers.first[ENDPOINTS[0]])
    assert folder.newest_snapshot(NAMES) == 10


def test_a_disk_that_refuses_to_read_is_no_damage(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snapshot may be undamaged, so the job ends without a removal of the snapshot."""

    def refuse(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(orbax_io, "read_arrays", refuse)
    folder = LauncherFolder(tmp_path / "snapshots")
    folder.grant(Generation(1, 10), folder.run, 1, ENDPOINTS)
    with pytest.raises(StateError, match="Permission denied") as raised:
        servers.snapshots[ENDPOINTS[0]].begin(servers.first[ENDPOINTS[0]])
    assert not isinstance(raised.value, DamagedError)
    assert folder.newest_snapshot(NAMES) == 10


def test_a_snapshot_of_another_step_function_ends_the_job(tmp_path: Path, servers: Servers) -> None:
    """The script has changed, and the snapshot is undamaged."""
    folder = LauncherFolder(tmp_path / "snapshots")
    folder.grant(Generation(1, 10), folder.run, 1, ENDPOINTS)
    other = planned(optax.sgd(0.1))
    folder_of = RoleFolder(tmp_path / "snapshots", NAMES[0], started=1)
    snapshots = ServerSnapshots(folder_of, other, ENDPOINTS[0], 100, at_loss=True)
    with pytest.raises(StateError, match="belongs to another step") as raised:
        snapshots.begin({})
    assert not isinstance(raised.value, DamagedError)
    assert folder.newest_snapshot(NAMES) == 10


def test_an_asynchronous_server_has_no_older_snapshot(tmp_path: Path) -> None:
    plan = planned(mode=dtrans.Async())
    servers = Servers(tmp_path, plan, first := first_states(plan), 1)
    servers.write(ENDPOINTS[0], 10, 1)
    flip(tmp_path / "pserver-0" / "10" / ARRAY, -1)
    with pytest.raises(DamagedError, match="1.npy.*checksum") as raised:
        servers.snapshots[ENDPOINTS[0]].begin_alone(first[ENDPOINTS[0]])
    assert not isinstance(raised.value, DamagedSnapshotError)


@pytest.mark.parametrize("call", ["enter", "note_snapshot", "leave"])
def test_a_full_disk_ends_a_role_with_a_named_error(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    folder = servers.snapshots[ENDPOINTS[0]].generations

    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    calls = {
        "enter": lambda: folder.enter(Generation(0)),
        "note_snapshot": lambda: folder.note_snapshot(0, 20),
        "leave": folder.leave,
    }
    text = (
        rf"pserver 0 cannot write its report of \d+ bytes to the folder of snapshots {tmp_path}/snapshots: No "
        "space left on device; free space .* complete snapshots are unchanged"
    )
    before = {path: path.read_bytes() for path in (tmp_path / "snapshots" / "roles").iterdir()}
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", refuse)
        with pytest.raises(StateError, match=text):
            calls[call]()
    after = {path: path.read_bytes() for path in (tmp_path / "snapshots" / "roles").iterdir()}
    assert after == before and not folder.has_written(20)
    calls[call]()  # when there is space


def test_a_snapshot_that_cannot_be_reported_is_logged_and_the_job_goes_on(
    servers: Servers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(role_folder, "write_json", refuse)
        servers.write(ENDPOINTS[0], 20, 20)
    assert (
        "cannot write the snapshot of step 20, so a restart would go back to step 10" in caplog.text
    )
    for endpoint in ENDPOINTS:
        servers.write(endpoint, 20, 20)
    assert LauncherFolder(tmp_path / "snapshots").newest_snapshot(NAMES) == 20


def test_pieces_without_checksums_are_read(servers: Servers, tmp_path: Path) -> None:
    """An older version of dtrans has written pieces without checksums."""
    for path in tmp_path.glob("snapshots/10/*/overview/metadata"):
        about = json.loads(path.read_text())
        del about["checksums"], about["checksum"]
        path.write_text(json.dumps(about))
    snapshots = servers.snapshots[ENDPOINTS[0]]
    for name, x in snapshots._load(10).items():
        np.testing.assert_array_equal(x, servers.first[ENDPOINTS[0]][name] + 10)
