"""Pieces record their run and step.

Pieces of two runs or steps never form one checkpoint. The remains of a save that crashed do not
block later saves.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dtrans
from dtrans import checkpoint
from dtrans.checkpoint import orbax_io
from dtrans.checkpoint.api import save_serving
from dtrans.checkpoint.runs import SaveId, save_id
from dtrans.errors import CheckpointWarning, ConfigError, StateError


OLD, NEW = SaveId(("old 0", "old 1"), 10), SaveId(("new 1",), 10)


def init() -> Any:
    params = {"w": jnp.arange(12.0)}
    return params, optax.sgd(0.5).init(params)


def traced() -> tuple[Any, Any]:
    step = dtrans.make_train_step(lambda params, x: jnp.mean(x @ params["w"]), optax.sgd(0.5))
    return dtrans.trace(step, *init(), jnp.ones((4, 12))), dtrans.trace(init)


def servers(count: int) -> Any:
    ends = [f"127.0.0.1:{6174 + k}" for k in range(count)]
    return dtrans.pserver(
        *traced(), pservers=ends, placement=dtrans.BlockPlacement(min_block_size=1)
    )


def save(path: Path, plan: Any, k: int, value: float, mark: SaveId) -> None:
    """Save a state of server k in which all numbers equal `value`."""
    ep = [*plan.servers][k]
    held = checkpoint.scatter(plan, ep, {"w": jnp.full(12, float(value))}, init()[1])
    save_serving(path, plan, ep, held, mark)


def values(path: Path, plan: Any) -> list[float]:
    return np.unique(checkpoint.load(path, plan.main)[0]["w"]).tolist()


def test_what_a_crash_left_of_an_earlier_run_is_replaced(tmp_path: Path) -> None:
    """At each moment, the latest checkpoint has pieces of one run, or there is none."""
    plan, path = servers(3), tmp_path / "10"
    save(path, plan, 0, 1, OLD)
    save(path, plan, 1, 1, OLD)
    for k, latest in enumerate((None, None, path)):
        save(path, plan, (k + 1) % 3, 2, NEW)
        if latest is None:
            with pytest.warns(CheckpointWarning, match="10 is skipped: "):
                assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path) == path
    assert values(path, plan) == [2]
    assert sorted(os.listdir(path)) == ["pserver-0", "pserver-1", "pserver-2"]


@pytest.mark.parametrize("count", [1, 2])
def test_other_servers_replace_all_that_was_left(tmp_path: Path, count: int) -> None:
    three, other, path = servers(3), servers(count), tmp_path / "10"
    for k in (1, 2):
        save(path, three, k, 1, OLD)
    for k in range(count):
        save(path, other, k, 2, NEW)
    assert values(path, other) == [2]
    assert sorted(os.listdir(path)) == [f"pserver-{k}" for k in range(count)]


def test_pieces_of_one_run_share_a_word(tmp_path: Path) -> None:
    """Servers identify a run by the ids of its trainers. Servers may know different trainers."""
    plan, path = servers(3), tmp_path / "10"
    for k, run in enumerate((("a", "b"), ("b",), ("b", "c"))):
        save(path, plan, k, 2, SaveId(run, 10))
    assert values(path, plan) == [2]
    shutil.rmtree(path / "pserver-1")
    # this piece shares an id with each other piece, but no id is in all three
    save(tmp_path / "11", plan, 1, 2, SaveId(("a", "c"), 10))
    (tmp_path / "11" / "pserver-1").rename(path / "pserver-1")
    with pytest.raises(
        StateError,
        match=r"has pieces of several jobs, runs or steps: pserver-0 \(run a, step 10\) and",
    ):
        checkpoint.load(path, plan.main)


def test_pieces_of_two_steps_are_not_put_together(tmp_path: Path) -> None:
    plan, path = servers(2), tmp_path / "10"
    save(path, plan, 0, 1, NEW)
    later = dataclasses.replace(NEW, step=12)
    told = (
        r"pserver-0 exists already \(run new 1, step 10; this save is run new 1, step 12\); "
        r"save each"
    )
    with pytest.raises(ConfigError, match=told):
        save(path, plan, 0, 2, later)
    with pytest.raises(
        ConfigError,
        match=r"10 contains pserver-0 of another job, run or step \(run new 1, ",
    ):
        save(path, plan, 1, 2, later)
    save(tmp_path / "12", plan, 1, 2, later)
    (tmp_path / "12" / "pserver-1").rename(path / "pserver-1")
    with pytest.raises(
        StateError, match=r"pserver-0 \(run new 1, step 10\) and pserver-1 \(run new 1, step 12\)"
    ):
        checkpoint.load(path, plan.main)
    with pytest.warns(CheckpointWarning):
        assert checkpoint.latest(tmp_path) is None


def test_a_piece_of_the_same_step_is_there_already_and_stays(tmp_path: Path) -> None:
    plan, path = servers(1), tmp_path / "10"
    save(path, plan, 0, 1, NEW)
    save(path, plan, 0, 1, NEW)
    assert values(path, plan) == [1]


def test_a_whole_checkpoint_is_never_written_over(tmp_path: Path) -> None:
    plan, path = servers(2), tmp_path / "10"
    for k in range(2):
        save(path, plan, k, 1, OLD)
    for k in range(2):
        with pytest.raises(
            ConfigError,
            match="exists already.*run new 1.*; save each checkpoint to another path",
        ):
            save(path, plan, k, 2, NEW)
    with pytest.raises(ConfigError, match="contains pserver-0 of another job, run or step"):
        save(path, servers(3), 2, 2, NEW)
    assert values(path, plan) == [1]


def test_a_job_replaces_pieces_of_steps_that_it_has_undone(tmp_path: Path) -> None:
    """After the drop of a trainer, the job has another run."""
    before = SaveId(("job", "a"), 10, job="job")
    after = SaveId(("job-2", "b"), 10, job="job")
    plan, path = servers(2), tmp_path / "10"
    for k in range(2):
        save(path, plan, k, 1, before)
    save(path, plan, 0, 1, before)  # a repeated step without a drop
    save(path, plan, 0, 2, after)
    with pytest.warns(CheckpointWarning, match="10 is skipped: "):
        assert checkpoint.latest(tmp_path) is None
    save(path, plan, 1, 2, after)
    save(path, plan, 1, 3, SaveId(("job-2", "c"), 10, job="job"))  # repeated in a later generation
    assert values(path, plan) == [2]
    with pytest.raises(ConfigError, match="exists already"):
        save(path, plan, 0, 4, SaveId(("another", "d"), 10, job="another"))


def test_a_process_that_knows_no_run_replaces_nothing(tmp_path: Path) -> None:
    """Existing pieces may belong to another process of the same run."""
    plan, path = servers(2), tmp_path / "10"
    save(path, plan, 0, 1, OLD)
    with pytest.raises(
        ConfigError,
        match="contains pserver-0 .*started separately, pass the same tag= in each",
    ):
        checkpoint.save(
            path, plan, [*plan.servers][1], checkpoint.scatter(plan, [*plan.servers][1], *init())
        )
    assert os.listdir(path) == ["pserver-0"]


def test_runs_are_told_apart_under_one_tag(tmp_path: Path) -> None:
    """A scheduler starts a job again with the same job number, which is the user's tag of both
    runs."""
    plan, path = servers(2), tmp_path / "10"
    save(path, plan, 0, 1, save_id("first run", "job 7"))
    save(path, plan, 1, 2, save_id("second run", "job 7"))
    with pytest.raises(
        StateError,
        match=r"pserver-0 \(tag 'job 7', run first run\) and pserver-1 \(tag 'job 7', run s",
    ):
        checkpoint.load(path, plan.main)
    save(path, plan, 0, 2, save_id("second run", "job 7"))
    assert values(path, plan) == [2]


@pytest.mark.parametrize("torn", ["no files", "empty files"])
def test_a_name_without_files_is_replaced(tmp_path: Path, torn: str) -> None:
    """A power failure may leave a folder without files, or with empty files."""
    plan, path = servers(2), tmp_path / "10"
    save(path, plan, 0, 1, OLD)
    for file in [f for f in (path / "pserver-0").rglob("*") if f.is_file()]:
        file.write_text("") if torn == "empty files" else file.unlink()
    for k in range(2):
        save(path, plan, k, 2, NEW)
    assert values(path, plan) == [2]


def test_a_piece_of_a_later_format_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, path = servers(1), tmp_path / "10"
    with monkeypatch.context() as m:
        m.setattr(orbax_io, "FORMAT", 99)
        save(path, plan, 0, 1, OLD)
    with pytest.raises(StateError, match="its format is 99"):
        save(path, plan, 0, 2, NEW)
    assert os.listdir(path) == ["pserver-0"]


def test_files_are_on_the_disk_before_a_piece_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, path = servers(1), tmp_path / "ckpt" / "10"
    synced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        at = os.readlink(f"/proc/self/fd/{descriptor}")
        if str(tmp_path) in at:
            synced.append(os.path.relpath(at, tmp_path))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    save(path, plan, 0, 1, NEW)
    before = [at for at in synced if "orbax-checkpoint-tmp" in at]
    files = {
        p.relative_to(path / "pserver-0")
        for p in (path / "pserver-0" / "overview").rglob("*")
        if p.is_file()
    }
    arrays = {
        p.relative_to(path / "pserver-0")
        for p in (path / "pserver-0" / "dense").rglob("*")
        if p.is_file()
    }
    assert files and arrays
    assert {os.path.join(*Path(at).parts[3:]) for at in before if len(Path(at).parts) > 3} >= {
        *map(str, files | arrays)
    }
    assert synced[len(before) :] == ["ckpt/10", "ckpt", "."]


# -- jobs of collectives ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["sharding", "nccl2"])
def test_jobs_of_collectives_replace_what_a_crash_left(tmp_path: Path, how: str) -> None:
    path, whole = tmp_path / "10", (lambda x: ({"w": jnp.full(12, float(x))}, init()[1]))
    plan: Any = (
        dtrans.sharding(*traced(), degree=2, slices=dtrans.Slicing(min_slice_size=0))
        if how == "sharding"
        else dtrans.nccl2(*traced(), trainers=2)
    )

    def save_as(run: str, value: float) -> None:
        job = plan.simulate()
        job.run_id = run
        checkpoint.check(path, job)
        checkpoint.save(path, job, job.state_of(*whole(value)))

    save_as("old", 1)
    if how == "sharding":
        shutil.rmtree(path / "rank-1")
    else:
        for file in [f for f in path.rglob("*") if f.is_file()]:
            file.unlink()
    save_as("new", 2)
    assert values(path, plan) == [2]
    with pytest.raises(ConfigError, match="exists already"):
        save_as("third", 3)
    assert values(path, plan) == [2]
