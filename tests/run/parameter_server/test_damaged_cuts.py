"""Damaged files of cuts: each damage is detected, and the job goes back to an older cut."""

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
from cut_folders import ENDPOINTS, NAMES, Servers, first_states, planned

import dtrans
from dtrans.checkpoint import orbax_io
from dtrans.errors import DamagedCutError, DamagedError, StateError
from dtrans.parameter_server.plan import PServerPlan
from dtrans.protocol.epochs import Epoch
from dtrans.run.net import role_folder
from dtrans.run.net.launcher_folder import LauncherFolder
from dtrans.run.net.role_folder import RoleFolder
from dtrans.run.parameter_server.cuts import ServerCuts


ARRAY = "pserver-0/dense/1.npy"
METADATA = "pserver-0/overview/metadata"


@pytest.fixture(scope="module")
def plan() -> PServerPlan:
    return planned()


@pytest.fixture
def servers(tmp_path: Path, plan: PServerPlan) -> Servers:
    """Return two servers that have written the cuts of steps 0 and 10."""
    servers = Servers(tmp_path / "cuts", plan, first_states(plan), 1)
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


def copy_other_run(cut: Path) -> None:
    """Replace a cut by the cut of another job with the same plan."""
    shutil.rmtree(cut)
    plan = planned()
    other = Servers(cut.parent.parent / "other", plan, first_states(plan), 1)
    for endpoint in ENDPOINTS:
        other.write(endpoint, 10, 3)
    shutil.copytree(cut.parent.parent / "other" / "10", cut)


def copy_other_step(cut: Path) -> None:
    shutil.rmtree(cut)
    shutil.copytree(cut.with_name("0"), cut)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "changed byte": (
        lambda cut: flip(cut / ARRAY, -1),
        r"1\.npy with the array .*/b1 cannot be read: the file is damaged: its checksum",
    ),
    "changed header": (lambda cut: flip(cut / ARRAY, 20), r"1\.npy.*checksum"),
    "changed length of header": (lambda cut: flip(cut / ARRAY, 9), r"1\.npy.*checksum"),
    "truncated": (lambda cut: (cut / ARRAY).write_bytes((cut / ARRAY).read_bytes()[:-5]), "1.npy"),
    "empty": (lambda cut: (cut / ARRAY).write_bytes(b""), "1.npy"),
    "missing file": (lambda cut: (cut / ARRAY).unlink(), "1.npy with the array .*/b1 is missing"),
    "missing piece": (lambda cut: shutil.rmtree(cut / "pserver-0"), "pserver-0 .* is missing"),
    "missing cut": (shutil.rmtree, "there is no checkpoint"),
    "empty metadata": (lambda cut: (cut / METADATA).write_bytes(b""), "pserver-0"),
    "missing metadata": (lambda cut: (cut / METADATA).unlink(), "pserver-0"),
    "changed metadata": (
        lambda cut: replace_text(cut / METADATA, '"dense": {', '"dense": {"more": "float32", '),
        "pserver-0.*metadata.*checksum",
    ),
    "cut of another run": (copy_other_run, "belongs to another job"),
    "cut of another step": (copy_other_step, "step 0"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_server_goes_back_to_an_older_cut(
    servers: Servers, plan: PServerPlan, tmp_path: Path, damage: str
) -> None:
    """The server ends with an error that the launcher recognizes, and the launcher chooses this
    cut."""
    apply, text = DAMAGES[damage]
    cut = tmp_path / "cuts" / "10"
    cuts = servers.cuts[ENDPOINTS[0]]
    folder = LauncherFolder(cut.parent)
    assert folder.newest_cut(NAMES) == 10
    apply(cut)
    folder.grant(Epoch(1, 10), folder.run, 1, ENDPOINTS)
    with pytest.raises(DamagedCutError, match=text) as raised:
        cuts.begin(servers.first[ENDPOINTS[0]])
    assert re.search("cut of step 10: .* the newest older cut", str(raised.value))

    assert folder.newest_cut(NAMES) == 0
    folder.grant(Epoch(2, 0), folder.run, 1, ENDPOINTS)
    start = cuts.begin(servers.first[ENDPOINTS[0]])
    assert start.loaded == start.step == 0
    for name, x in start.state.items():
        np.testing.assert_array_equal(x, servers.first[ENDPOINTS[0]][name])


def test_a_damaged_cut_before_the_evictions_of_its_step_is_withdrawn(
    servers: Servers, tmp_path: Path
) -> None:
    """The other server knows the evictions of the step, so the cut counts as complete until a role
    reads the damaged file."""
    servers.write(ENDPOINTS[0], 20, 5, is_early=True)
    servers.write(ENDPOINTS[1], 20, 5)
    folder, cuts = LauncherFolder(tmp_path / "cuts"), servers.cuts[ENDPOINTS[0]]
    assert folder.newest_cut(NAMES) == 20
    flip(tmp_path / "cuts" / "20" / ARRAY, -1)
    folder.grant(Epoch(1, 20), folder.run, 1, ENDPOINTS)
    with pytest.raises(DamagedCutError, match="cut of step 20"):
        cuts.begin(servers.first[ENDPOINTS[0]])
    assert folder.newest_cut(NAMES) == 10


def test_a_disk_that_refuses_to_read_is_no_damage(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cut may be undamaged, so the job ends without a removal of the cut."""

    def refuse(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(orbax_io, "read_arrays", refuse)
    folder = LauncherFolder(tmp_path / "cuts")
    folder.grant(Epoch(1, 10), folder.run, 1, ENDPOINTS)
    with pytest.raises(StateError, match="Permission denied") as raised:
        servers.cuts[ENDPOINTS[0]].begin(servers.first[ENDPOINTS[0]])
    assert not isinstance(raised.value, DamagedError)
    assert folder.newest_cut(NAMES) == 10


def test_a_cut_of_another_step_function_ends_the_job(tmp_path: Path, servers: Servers) -> None:
    """The script has changed, and the cut is undamaged."""
    folder = LauncherFolder(tmp_path / "cuts")
    folder.grant(Epoch(1, 10), folder.run, 1, ENDPOINTS)
    other = planned(optax.sgd(0.1))
    folder_of = RoleFolder(tmp_path / "cuts", NAMES[0], started=1)
    cuts = ServerCuts(folder_of, other, ENDPOINTS[0], 100, at_loss=True)
    with pytest.raises(StateError, match="belongs to another step") as raised:
        cuts.begin({})
    assert not isinstance(raised.value, DamagedError)
    assert folder.newest_cut(NAMES) == 10


def test_an_asynchronous_server_has_no_older_cut(tmp_path: Path) -> None:
    plan = planned(mode=dtrans.Async())
    servers = Servers(tmp_path, plan, first := first_states(plan), 1)
    servers.write(ENDPOINTS[0], 10, 1)
    flip(tmp_path / "pserver-0" / "10" / ARRAY, -1)
    with pytest.raises(DamagedError, match="1.npy.*checksum") as raised:
        servers.cuts[ENDPOINTS[0]].begin_alone(first[ENDPOINTS[0]])
    assert not isinstance(raised.value, DamagedCutError)


@pytest.mark.parametrize("call", ["enter", "note_cut", "leave"])
def test_a_full_disk_ends_a_role_with_a_named_error(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    folder = servers.cuts[ENDPOINTS[0]].epochs

    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    calls = {
        "enter": lambda: folder.enter(Epoch(0)),
        "note_cut": lambda: folder.note_cut(0, 20),
        "leave": folder.leave,
    }
    text = (
        rf"pserver 0 cannot write its report of \d+ bytes to the folder of cuts {tmp_path}/cuts: No "
        "space left on device; free space .* complete cuts are unchanged"
    )
    before = {path: path.read_bytes() for path in (tmp_path / "cuts" / "roles").iterdir()}
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", refuse)
        with pytest.raises(StateError, match=text):
            calls[call]()
    after = {path: path.read_bytes() for path in (tmp_path / "cuts" / "roles").iterdir()}
    assert after == before and not folder.has_written(20)
    calls[call]()  # when there is space


def test_a_cut_that_cannot_be_reported_is_logged_and_the_job_goes_on(
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
    assert "cannot write the cut of step 20, so a restart would go back to step 10" in caplog.text
    for endpoint in ENDPOINTS:
        servers.write(endpoint, 20, 20)
    assert LauncherFolder(tmp_path / "cuts").newest_cut(NAMES) == 20


def test_pieces_without_checksums_are_read(servers: Servers, tmp_path: Path) -> None:
    """An older version of dtrans has written pieces without checksums."""
    for path in tmp_path.glob("cuts/10/*/overview/metadata"):
        about = json.loads(path.read_text())
        del about["checksums"], about["checksum"]
        path.write_text(json.dumps(about))
    cuts = servers.cuts[ENDPOINTS[0]]
    for name, x in cuts._load(10).items():
        np.testing.assert_array_equal(x, servers.first[ENDPOINTS[0]][name] + 10)
