"""Meshes as real processes: two processes, each with four devices."""

from __future__ import annotations

from pathlib import Path

import jax
import mesh_trainer as script
import trainer_processes
from cluster_trainer import flat
from helpers import distance
from strict_python import STRICT_PYTHON


def test_processes_with_several_devices_are_one_device(tmp_path: Path) -> None:
    command = [*STRICT_PYTHON, script.__file__, str(tmp_path)]
    found = trainer_processes.outcome(2, tmp_path, 240.0, command)
    with jax.enable_x64(True):
        state = script.init(jax.random.key(0))
        step = jax.jit(script.planned("wide").main)
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
