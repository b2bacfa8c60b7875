"""Sharded jobs in real processes: every process has the complete results of one device.

Checkpoints move between jobs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import sharding_trainer as script
import trainer_processes
from cluster_trainer import flat
from helpers import distance
from strict_python import STRICT_PYTHON

from dtrans import checkpoint


PATIENCE = 240.0  # seconds for what takes thirty on an idle machine


@pytest.fixture(autouse=True, scope="module")
def double() -> Iterator[None]:
    """Enable 64 bits, as in the processes."""
    with jax.enable_x64(True):
        yield


def outcome(ranks: int, folder: Path, what: str, **options: Any) -> list[dict[str, Any]]:
    """Run a job. Return the results of each rank."""
    command = [*STRICT_PYTHON, script.__file__, what, str(folder)]
    return trainer_processes.outcome(
        ranks, folder, PATIENCE, [*command, *([json.dumps(options)] if options else [])]
    )


@pytest.fixture(scope="module")
def two_at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def two(two_at: Path) -> list[dict[str, Any]]:
    return outcome(2, two_at, "train", stages=script.STAGES, plan={"degree": 2}, start=None)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """Return the results of one device on the full batches."""
    params, opt_state = jax.jit(script.init_from(script.mean_of(0)))(jax.random.key(0))
    found, step = flat(first=(params, opt_state)), jax.jit(script.step())
    for i, batch in enumerate(script.batches()):
        params, opt_state, loss, aux = step(params, opt_state, *batch)
        if i < script.STEPS:
            found |= flat(**{f"{i}": {"loss": loss, "aux": aux}})
        if i == script.STEPS - 1:
            found |= flat(last=(params, opt_state))
            found |= flat(applied=script.loss_fn(params, *script.batches()[0]))
    return found | flat(again=(params, opt_state))


def check(found: Sequence[dict[str, Any]], wanted: dict[str, Any], stage: int) -> None:
    """Check that every process has the numbers of one device, and that all processes have the same
    bits."""
    assert len(wanted) > 10
    for of in found:
        for name, want in wanted.items():
            got = of[f"{stage} {name}"]
            assert distance(got, want) < 1e-12, name
            assert got.tobytes() == found[0][f"{stage} {name}"].tobytes(), name


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stage", script.STAGES)
def test_two_ranks_are_one_device(two: Any, alone: Any, stage: int) -> None:
    check(two, {n: x for n, x in alone.items() if not n.startswith("again")}, stage)


@pytest.mark.parametrize("stage", script.STAGES)
def test_each_process_holds_its_slice(two: Any, stage: int) -> None:
    plan = script.planned(stage=stage, degree=2)
    assert plan.sliced and ("params/w1" in plan.sliced) == (stage == 3)
    for k, of in enumerate(two):
        held = {
            n: x for name, x in of.items() if (n := name.removeprefix(f"{stage} held ")) != name
        }
        assert set(held) == {n for spec in plan.main.args[:2] for n in spec.names}
        last = {n: of[f"{stage} last{path}"] for n, path in paths(plan).items()}
        for n, x in held.items():
            cut = plan.sliced.get(n)
            want = (
                last[n]
                if cut is None
                else np.take(
                    last[n], range(k * cut.part, min((k + 1) * cut.part, cut.size)), cut.axis
                )
            )
            assert x.shape == plan.program.inputs[n].shape, n
            assert np.array_equal(
                x if cut is None else np.take(x, range(want.shape[cut.axis]), cut.axis), want
            ), n


def paths(plan: Any) -> dict[str, str]:
    """Return the paths at which the script stores arrays, by name."""
    tree = tuple(spec.unflatten(list(spec.names)) for spec in plan.main.args[:2])
    return {
        n: jax.tree_util.keystr(path) for path, n in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


@pytest.mark.parametrize(
    "what, message",
    [
        ("1 donated", "StateError: a step has already used this state"),
        (
            "3 saved",
            "StateError: params/b1 was donated to job.step; save the state that it returned",
        ),
        (
            "rows",
            "BatchError: trainers must pass parts of equal size; rows of x: trainer 0 gives 1, "
            "trainer 1 gives 2; split the batch",
        ),
        (
            "ragged",
            "BatchError: the arrays of a batch are split over the ranks, but x has 3 and y has 2",
        ),
        ("count", "ConfigError: the plan is for 3 ranks, 2 are connected"),
        (
            "state",
            "StateError: this state belongs to another job: params/b1 is float64[8], expected "
            "float64[7]",
        ),
        (
            "stage",
            "PeerError: trainer 1 disagrees with trainer 0 about what is being trained: it has "
            "a different step",
        ),
        (
            "init",
            "PeerError: trainer 1 disagrees with trainer 0 about the first state: it has "
            "another init",
        ),
    ],
)
def test_what_is_refused(two: Any, what: str, message: str) -> None:
    for of in two:
        assert dict(of["said"].tolist())[what].startswith(message)


def test_a_job_that_would_go_on_without_its_slices_is_refused(tmp_path: Path) -> None:
    for of in outcome(2, tmp_path, "drop"):
        assert dict(of["said"].tolist())["drop"].startswith(
            "ConfigError: a sharded job cannot continue when it loses ranks"
        )


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", script.STAGES)
def test_what_processes_saved_is_what_they_had(two: Any, two_at: Path, stage: int) -> None:
    path = two_at / f"stage {stage}"
    assert sorted(os.listdir(path)) == ["rank-0", "rank-1"]
    plan = script.planned(stage=3, degree=8)
    for n, x in flat(last=checkpoint.load(path, plan.main)).items():
        assert np.array_equal(x, two[0][f"{stage} {n}"]), n
    job = plan.on_mesh()
    state = checkpoint.restore(path, job)
    for n, x in flat(last=(job.params(state), job.opt_state(state))).items():
        assert np.array_equal(x, two[0][f"{stage} {n}"]), n


def test_all_ranks_know_the_same_run(two: Any, two_at: Path) -> None:
    assert two[0]["run"] == two[1]["run"]
    runs = [json.loads(f.read_text())["run"] for f in two_at.glob("stage */rank-*/overview/*")]
    assert (
        runs
        and all(str(two[0]["run"]) in words for words in runs)
        and len(str(two[0]["run"])) == 16
    )


def test_orbax_reads_the_pieces_of_processes(two: Any, two_at: Path) -> None:
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        for k in range(2):
            path = two_at / "stage 3" / f"rank-{k}" / "arrays"
            names = checkpointer.metadata(path).item_metadata.tree
            as_numpy = {n: ocp.RestoreArgs(restore_type=np.ndarray) for n in names}
            found = checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
            assert found["params/w1"].shape == (3 - k, 7)  # of 5 rows: without padding
            assert np.array_equal(found["params/w1"], two[k]["3 held params/w1"][: 3 - k])


@pytest.mark.soak
def test_four_ranks_in_two_groups_are_one_device_and_go_on_where_two_ended(
    two: Any, two_at: Path, tmp_path: Path, alone: Any
) -> None:
    found = outcome(
        4,
        tmp_path,
        "train",
        stages=[1, 3],
        plan={"degree": 2, "replicas": 2},
        start=str(two_at / "stage 2"),
    )
    for stage in (1, 3):
        check(found, alone, stage)
        for of in found:
            for name in (n for n in alone if n.startswith("last")):
                want = two[0][f"2 {name}"]
                assert np.array_equal(of[f"{stage} restored{name.removeprefix('last')}"], want), (
                    name
                )
        assert sorted(os.listdir(tmp_path / f"stage {stage}")) == ["rank-0", "rank-1"]
