"""A server is killed in the middle of a save: the job starts again at the same endpoints, and saves under that name."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from helpers import mlp_loss, plain_run, plain_step, tree_close
from lifecycle_job import TX, batch_of, params_of, plan_for
from role_processes import Roles, roles
from role_threads import free_endpoints, until

from dtrans import checkpoint
from dtrans.errors import CheckpointWarning
from dtrans.run.distributed.role import roles_of


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("x64")]
TRAINERS, FIRST, SECOND, END = 2, 5, 10, 12  # steps: of both saves, and one that a killed run does not come to


def start_run(started: Roles, endpoints: Sequence[str], folder: Path, run: int, victim: int | None) -> list[str]:
    """Start the roles of a run; the writer of the victim waits in the middle of the second save."""
    names = []
    for role in roles_of(TRAINERS, endpoints):
        names.append(f"run {run}, {role.name}")
        started.start(
            names[-1],
            "saving",
            role=role.environment(),
            folder=str(folder),
            start=str(folder / str(FIRST)) if run else "",
            first=FIRST if run else 0,
            last=SECOND if victim is None else END,
            data=data_of(run),
            saves=[FIRST, SECOND],
            held=str(SECOND) if role.name == f"pserver {victim}" else "",
        )
    return names


def data_of(run: int) -> int:
    """Return the offset of a run's batches: no two runs have the same numbers."""
    return 100 * run


def crash(started: Roles, endpoints: Sequence[str], folder: Path, run: int, victim: int) -> None:
    """Run a job until a server is killed in its second save, when the other one has written its piece."""
    names, second = start_run(started, endpoints, folder, run, victim), folder / str(SECOND)
    started[names[victim]].until("in the middle")
    until((second / f"pserver-{1 - victim}").exists, "the piece of the other server")
    started[names[victim]].kill()
    for name in names:
        assert name == names[victim] or "PeerError" in started[name].fail()
    assert f"pserver-{1 - victim}" in [p.name for p in second.iterdir()]


@pytest.mark.parametrize(
    "victims", [pytest.param((1,), id="once"), pytest.param((1, 0, 1), id="again", marks=pytest.mark.soak)]
)
def test_the_next_run_replaces_what_a_killed_server_left(tmp_path: Path, victims: Sequence[int]) -> None:
    """Each run goes on from `latest`, which has pieces of one run only; the last one's are its bits."""
    endpoints, folder, last = free_endpoints(2), tmp_path / "saved", len(victims)
    with roles(tmp_path) as started:
        for run, victim in enumerate(victims):
            crash(started, endpoints, folder, run, victim)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CheckpointWarning)  # the second is passed over
                assert checkpoint.latest(folder) == folder / str(FIRST)
        names = start_run(started, endpoints, folder, last, None)
        found = {name: started[name].end() for name in names}
    plan = plan_for(endpoints, TRAINERS)
    latest = checkpoint.latest(folder)
    assert latest == folder / str(SECOND)
    for ep, name in zip(endpoints, names, strict=False):
        saved = checkpoint.restore(latest, plan, ep)
        assert saved.keys() == found[name].keys()
        for n, x in saved.items():
            np.testing.assert_array_equal(x, found[name][n], err_msg=n, strict=True)
    batches = [batch_of(data_of(last if i >= FIRST else 0) + i, TRAINERS) for i in range(SECOND)]
    want, _, _ = plain_run(plain_step(mlp_loss, TX), params_of(), TX.init(params_of()), batches)
    tree_close(checkpoint.load(latest, plan.main)[0], want, 1e-12)
