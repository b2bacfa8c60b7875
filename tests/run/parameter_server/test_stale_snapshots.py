"""Parts of snapshots that earlier generations and launches have left in the folder."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from snapshot_folders import ENDPOINTS, NAMES, ROLES, Servers, first_states, planned

import dtrans
from dtrans.checkpoint import api as checkpoint
from dtrans.errors import ConfigError
from dtrans.protocol.generations import Generation
from dtrans.run.distributed.restarts.job_generations import JobGenerations
from dtrans.run.net.launcher_folder import LauncherFolder
from dtrans.run.net.role_folder import RoleFolder
from dtrans.run.role_jobs.server_job import ServerJob


def test_a_snapshot_contains_no_part_of_an_earlier_launch(tmp_path: Path) -> None:
    """Only one server has written a snapshot at a failure. Then the launcher and the script change."""
    plan = planned()
    first = first_states(plan)
    before = Servers(tmp_path, plan, first, 1)
    for endpoint in ENDPOINTS:
        before.write(endpoint, 0, 0)
    before.write(ENDPOINTS[0], 25, 1)

    after = Servers(tmp_path, plan, first, 2)
    assert after.generation == Generation(1, 0)
    for endpoint in ENDPOINTS:
        after.write(endpoint, 25, 2)
    assert after.snapshots[ENDPOINTS[0]].generations.newest_snapshot(NAMES) == 25
    for endpoint, snapshots in after.snapshots.items():
        for name, x in snapshots._load(25).items():
            np.testing.assert_array_equal(x, first[endpoint][name] + 2)


def test_a_checkpoint_contains_no_part_of_an_earlier_launch(tmp_path: Path) -> None:
    """One server writes its piece of a checkpoint. A later launch with a changed script must not
    use this piece."""
    plan, path = planned(), tmp_path / "ckpt" / "25"
    first = first_states(plan)

    def save(servers: Servers, endpoint: str, plus: float) -> None:
        state = {n: x + plus for n, x in first[endpoint].items()}
        mark = servers.snapshots[endpoint].mark(0, [f"session {plus}"], 25)
        checkpoint.save_serving(path, plan, endpoint, state, mark)

    before = Servers(tmp_path / "snapshots", plan, first, 1)
    for endpoint in ENDPOINTS:
        before.write(endpoint, 0, 0)
    save(before, ENDPOINTS[0], 1)
    after = Servers(tmp_path / "snapshots", plan, first, 2)
    for endpoint in reversed(ENDPOINTS):
        save(after, endpoint, 2)
    for endpoint in ENDPOINTS:
        for name, x in checkpoint.restore(path, plan, endpoint).items():
            np.testing.assert_array_equal(x, first[endpoint][name] + 2)


def test_a_write_that_outlives_its_generation_leaves_no_part_for_a_later_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned()
    servers = Servers(tmp_path, plan, first := first_states(plan), 1)
    one, save = servers.snapshots[ENDPOINTS[0]], checkpoint.save_serving

    def enter_and_save(*args: Any, **options: Any) -> None:
        """Write in the thread of generation 0, while the server enters generation 1."""
        for snapshots in servers.snapshots.values():
            snapshots.generations.enter(Generation(1))
        save(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save_serving", enter_and_save)
        servers.write(ENDPOINTS[0], 25, 1)
    assert (tmp_path / "25" / "pserver-0").exists() and not one.generations.has_written(25)
    servers.generation = Generation(1)
    for endpoint in ENDPOINTS:
        servers.write(endpoint, 25, 2)
    for name, x in one._load(25).items():
        np.testing.assert_array_equal(x, first[ENDPOINTS[0]][name] + 2)


def test_an_asynchronous_server_removes_snapshots_that_it_has_not_reported(tmp_path: Path) -> None:
    """A lost process has written a snapshot, but has not reported it."""
    plan = planned(mode=dtrans.Async())
    before = Servers(tmp_path, plan, first := first_states(plan), 1)
    for endpoint in ENDPOINTS:
        before.write(endpoint, 10, 1)
    (tmp_path / "pserver-0" / "20").mkdir()
    after = Servers(tmp_path, plan, first, 2)
    assert [x.name for x in (tmp_path / "pserver-0").iterdir()] == ["10"]
    after.write(ENDPOINTS[0], 20, 2)
    assert [x.name for x in (tmp_path / "pserver-0").iterdir()] == ["20"]


def test_the_folder_of_snapshots_has_no_checkpoints(tmp_path: Path) -> None:
    """Roles would remove checkpoints from the folder of the snapshots, so errors ask for another
    folder."""
    (tmp_path / "60").mkdir()
    with pytest.raises(ConfigError, match="already has a folder 60, .*; write another folder"):
        JobGenerations(tmp_path, ROLES)
    assert (tmp_path / "60").exists()
    job = types.SimpleNamespace(_generations=RoleFolder(tmp_path, "pserver 0"))
    ServerJob._check_folders(job, tmp_path / "other")
    with pytest.raises(
        ConfigError, match="is also the folder .*; pass another folder to job.serve"
    ):
        ServerJob._check_folders(job, f"{tmp_path}/")


# -- the folder ------------------------------------------------------------------------------------


@pytest.fixture
def roles(tmp_path: Path) -> list[RoleFolder]:
    LauncherFolder(tmp_path).grant(Generation(), "a run", 1)
    folders = [RoleFolder(tmp_path, name) for name in ("pserver 1", "pserver 10", "trainer 1")]
    for folder in folders:
        folder.enter(Generation())
    return folders


def write_parts(path: Path, role: RoleFolder, *steps: int) -> None:
    """Write a role's parts of snapshots, and a part that is incomplete."""
    name = role._slug
    for step in steps:
        folder = path / str(step)
        if name.startswith("pserver"):
            (folder / name).mkdir(parents=True)
            (folder / f"{name}.orbax-checkpoint-tmp").mkdir()
        else:
            (folder / f"{name}.npz").touch()
            (folder / f".{name}.npz").touch()


def test_a_role_removes_its_parts_after_the_snapshot_of_its_generation(
    roles: list[RoleFolder], tmp_path: Path
) -> None:
    for role in roles:
        write_parts(tmp_path, role, 10, 20)
        role.note_snapshot(0, 10)
    roles[0].enter(Generation(1, 10))
    assert {x.name.strip(".").partition(".")[0] for x in (tmp_path / "20").iterdir()} == {
        "pserver-10",
        "trainer-1",
    }
    roles[2].enter(Generation(1, 10))
    assert {x.name.partition(".")[0] for x in (tmp_path / "20").iterdir()} == {"pserver-10"}
    assert len(list((tmp_path / "10").iterdir())) == 6


def test_incomplete_snapshots_are_removed_when_newer_ones_are_complete(
    roles: list[RoleFolder], tmp_path: Path
) -> None:
    """A lost role has not written its part of snapshot 15. The launcher removes this snapshot when newer snapshots
    are complete."""
    servers = ["pserver 1", "pserver 10"]
    for role in roles[:2]:
        write_parts(tmp_path, role, 10, 20, 30)
    write_parts(tmp_path, roles[1], 15)
    for step in (10, 20, 30):
        for role in roles[:2]:
            role.note_snapshot(0, step)
            role.remove_old_snapshots(0, servers)
    assert {x.name for x in tmp_path.iterdir() if x.name.isdecimal()} == {"20", "30"}
