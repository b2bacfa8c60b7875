"""Meshes and split stages as real processes: two hosts, each with four devices."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import mesh_trainer as script
import numpy as np
import pytest
import trainer_processes
from cluster_trainer import flat
from helpers import distance
from paths import ROOT
from strict_python import STRICT_PYTHON

from tools.namespaces import namespaces, why_not


PATIENCE = 480.0


def test_processes_with_several_devices_are_one_device(tmp_path: Path) -> None:
    command = [*STRICT_PYTHON, script.__file__, str(tmp_path)]
    check(trainer_processes.outcome(2, tmp_path, PATIENCE, command))


@pytest.mark.soak
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces can be made")
def test_two_hosts_with_four_devices_are_one_device(tmp_path: Path) -> None:
    """The hosts are network namespaces, and `dtrans launch` starts a process on each of them."""
    launch = [sys.executable, "-m", "dtrans", "launch", "--mode", "nccl2", "--trainers", "2"]
    with namespaces(2) as hosts:
        launch += ["--hosts", ",".join(hosts.names), "--rsh", hosts.rsh]
        done = subprocess.run(
            [*launch, script.__file__, str(tmp_path)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stderr
        assert all(f" on {name}: ended\n" in done.stderr for name in hosts.names)
    found = []
    for k in range(2):
        with np.load(tmp_path / f"trainer-{k}.npz") as file:
            found.append(dict(file))
    assert {str(process["host"]) for process in found} == {*hosts.names}
    check(found)


def check(found: Sequence[dict[str, np.ndarray]]) -> None:
    """Compare the results of both processes with one device."""
    with jax.enable_x64(True):
        state = script.init(jax.random.key(0))
        step = jax.jit(script.planned("deep").main)
        for batch in script.batches():
            *state, loss, out = step(*state, *batch)
        wanted = flat(of=(*state, loss, out))
    assert len(wanted) > 15
    for process in found:
        for name in script.MESHES:
            for leaf, want in wanted.items():
                got = process[leaf.replace("of", name, 1)]
                assert distance(got, want) < 1e-12, (name, leaf)
        restored = {n for n in process if n.startswith("restored")}
        assert restored
        for n in restored:
            assert (process[n] == process[n.removeprefix("restored ")]).all(), n
        assert list(process["refused"]) == [
            "ConfigError: the plan is for 4 devices, 8 are connected: 2 processes with 4 devices "
            "each",
            "ConfigError: a trainer has 8 devices (8 model), but this process has 4; give each "
            "process a multiple of 8 devices",
        ]
