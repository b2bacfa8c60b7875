"""Pipelines in real processes, each with some of the stages: the results of one device."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from cluster_trainer import flat
from paths import SUPPORT
from pipeline_models import MODELS
from pipeline_trainer import ROWS, STEPS, masked, noisy, planned_masked, planned_noisy, squares
from role_threads import free_endpoints
from split_models import tower
from trainer_processes import outcome, slurm_environment


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options",
    [
        {"model": "transformer", "num_stages": 2, "num_micro_batch": 4, "devices": 1},
        {"model": "mlp", "num_stages": 4, "num_micro_batch": 2, "replicas": 2, "sharding_stage": 1,
         "devices": 4,
         "min_slice_size": 0, "schedule": "PreferForward"},
        {"model": "transformer", "num_stages": 2, "num_micro_batch": 2, "replicas": 2,
         "sharding_stage": 3, "devices": 2, "min_slice_size": 0},
    ],
    ids=["a stage each, tied embedding", "two stages each, replicas and slices",
         "slices of a tied embedding"],
)  # fmt: skip
@pytest.mark.usefixtures("x64")
def test_two_processes_make_the_numbers_of_one_device(
    options: dict[str, Any], tmp_path: Path
) -> None:
    script = str(SUPPORT / "pipeline_trainer.py")
    found = outcome(
        2, tmp_path, 200, [sys.executable, script, "main", str(tmp_path), json.dumps(options)]
    )
    clipped = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))
    params, opt_state, loss = MODELS[options["model"]].job(ROWS, clipped).on_one_device(STEPS)
    want = flat(last=(params, opt_state)) | flat(**{f"loss {STEPS - 1}": loss})
    for process in found:
        for n, x in want.items():
            np.testing.assert_allclose(process[n], x, rtol=1e-12, atol=1e-12, err_msg=n)
        np.testing.assert_allclose(process["applied"], squares(params, 2.0), rtol=1e-12)
        said = dict(process["said"])
        assert "expected a multiple of 2, the number of processes" in said["odd"]
        assert said["rows"].startswith(
            "BatchError: trainers must pass parts of equal size; rows of "
        )
        assert "trainer 0 gives 1, trainer 1 gives 2; split the batch" in str(said["rows"])
        assert "has 1 rows in each of 2 processes, together 2; expected a multi" in said["few"]
    # each process stores its part; only the count of steps is in both
    first, second = (set(process["held"]) for process in found)
    assert first & second <= {"opt_state/1/0/count"} and len(first | second) == len(want) - 1


@pytest.mark.usefixtures("x64")
def test_two_processes_have_the_devices_of_split_stages(tmp_path: Path) -> None:
    """Each process has two stages. Replicas slice the pieces that shards have of parameters."""
    split = [2, 1, 1, 3]
    options = {"split": split, "devices": 8, "num_stages": 4, "replicas": 2, "sharding_stage": 3}
    script = str(SUPPORT / "pipeline_trainer.py")
    found = outcome(
        2, tmp_path, 200, [sys.executable, script, "split", str(tmp_path), json.dumps(options)]
    )
    params, opt_state, loss = tower(split).on_one_device(STEPS)
    want = flat(last=(params, opt_state)) | flat(**{f"loss {STEPS - 1}": loss})
    for process in found:
        for n, x in want.items():
            np.testing.assert_allclose(process[n], x, rtol=1e-11, atol=1e-12, err_msg=n)
    # kernels have shape [6, 13]: 2 shards have 7 columns each, and 3 shards have 5 columns each
    first, second = (dict(process["pieces"]) for process in found)
    assert first == {"params/0/up": "(3, 7)", "params/1/up": "(3, 13)"}
    assert second == {"params/2/up": "(3, 13)", "params/3/up": "(3, 5)"}


def test_stages_that_slurm_put_on_several_hosts_find_each_other(tmp_path: Path) -> None:
    """Slurm's variables are the only source of the roles.

    Hosts are loopback addresses other than 127.0.0.1.
    """
    port = int(free_endpoints(1)[0].rpartition(":")[2])
    with contextlib.ExitStack() as stack:
        processes = []
        for k in range(2):
            command = [sys.executable, str(SUPPORT / "slurm_trainer.py"), str(tmp_path)]
            env = slurm_environment(k, 2, port)
            out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            processes.append(stack.enter_context(subprocess.Popen(command, env=env, **out)))
            stack.callback(processes[-1].kill)
        said = [p.communicate(timeout=200)[0] for p in processes]
    assert [p.returncode for p in processes] == [0, 0], "\n".join(said)
    want = MODELS["mlp"].job(8).on_one_device(1)[-1]
    for k in range(2):
        found = json.loads((tmp_path / f"{k}.json").read_text())
        assert found["trainers"] == 2 and found["endpoints"] == []
        # only 127.0.0.1
        assert [bytes.fromhex(host)[-4:] for host in found["listens"]] == [b"\x01\0\0\x7f"]
        assert (
            "the 2 trainers are on 2 hosts" in found["remote"]
            and "allow_remote=True" in found["remote"]
        )
        assert sorted(at.rpartition(":")[0] for at in found["peers"]) == [
            "127.0.0.2",
            "127.0.0.3",
        ]
        assert found["loss"] == pytest.approx(float(want), rel=1e-5)


@pytest.mark.usefixtures("x64")
def test_the_batch_is_the_parts_in_the_order_of_processes(tmp_path: Path) -> None:
    """Noise by micro-batch and results by row are those of the global batch.

    Keys and unsplit inputs are passed unchanged.
    """
    found = outcome(
        2,
        tmp_path,
        200,
        [sys.executable, str(SUPPORT / "pipeline_trainer.py"), "parts", str(tmp_path), "{}"],
    )
    one = noisy()
    job = planned_noisy(one).simulate()
    state, (x, *others) = job.init(jax.random.key(0)), one.batch
    want = {}
    for i in range(STEPS):
        state, *results = job.step(state, x + i, *others)
        want |= flat(**{f"results {i}": results})
    want |= flat(last=job.params(state), again=job.step(state, *one.batch)[1])
    assert any(len(v.shape) and v.shape[0] == ROWS for v in want.values())
    for k, process in enumerate(found):
        for n, v in want.items():
            np.testing.assert_allclose(process[n], v, rtol=1e-12, atol=1e-12, err_msg=n)
        said = dict(process["said"])["sizes"]
        assert said.startswith("BatchError: trainers must pass parts of equal size; "), said
        assert f" has shape [{[4, 8][k]}, 4] on trainer {1 - k}, " in said
        assert f"but [{[8, 4][k]}, 4] on trainer {k}; split batches" in said


@pytest.mark.usefixtures("x64")
def test_processes_have_what_is_of_the_whole_batch_and_what_the_update_reads(
    tmp_path: Path,
) -> None:
    """The first process computes masks of the full batch from a key that the last process has.

    The state has a rate and a count of steps.
    """
    one = masked()
    plan = planned_masked(one)
    assert (
        plan.home("params/key") == 1
        and plan.values is not None
        and plan.values.args[-1].names
        == (
            "params/key",
            "opt_state/seen",
        )
    )
    assert plan.arguments == ("rate",) and "rate" not in plan.update.arguments
    assert [s.state for s in plan.step_programs.stages] == [(), ("opt_state/steps",)]
    found = outcome(
        2,
        tmp_path,
        200,
        [sys.executable, str(SUPPORT / "pipeline_trainer.py"), "given", str(tmp_path), "{}"],
    )
    state, (x, mask, rate), want, step = (
        one.init(jax.random.key(0)),
        one.batch,
        {},
        jax.jit(one.step),
    )
    for i in range(STEPS):
        *state, loss = step(*state, x + i, mask, rate / (i + 1))
        want |= flat(**{f"loss {i}": loss})
    want |= flat(last=(state[0]["w"], state[1]))
    for process in found:
        for n, v in want.items():
            np.testing.assert_allclose(process[n], v, rtol=1e-12, atol=1e-12, err_msg=n)
        told = (
            "PeerError: rate is 0.1 on trainer 0, but 1.1 on trainer 1; pass equal values in all "
            "processes"
        )
        assert dict(process["said"])["rate"].startswith(told), process["said"]
