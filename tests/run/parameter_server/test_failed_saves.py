"""Saves that end too early, in processes: a server is killed during a save, or the system refuses
its files."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import warnings
from collections.abc import Iterator, Sequence
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


pytestmark = pytest.mark.usefixtures("x64")
# steps of both saves, and a step that a killed run does not reach
TRAINERS, FIRST, SECOND, END = (
    2,
    5,
    10,
    12,
)


def start_run(
    started: Roles, endpoints: Sequence[str], folder: Path, run: int, victim: int | None
) -> list[str]:
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
            saves={str(at): str(at) for at in (FIRST, SECOND)},
            refused={},
            held=str(SECOND) if role.name == f"pserver {victim}" else "",
        )
    return names


def data_of(run: int) -> int:
    """Return the offset of a run's batches. No two runs have the same numbers."""
    return 100 * run


def crash(started: Roles, endpoints: Sequence[str], folder: Path, run: int, victim: int) -> None:
    """Run a job until a server is killed in its second save, after the other server has written its
    piece."""
    names, second = start_run(started, endpoints, folder, run, victim), folder / str(SECOND)
    started[names[victim]].until("in the middle")
    until((second / f"pserver-{1 - victim}").exists, "the piece of the other server")
    started[names[victim]].kill()
    for name in names:
        assert name == names[victim] or "PeerError" in started[name].fail()
    assert f"pserver-{1 - victim}" in [p.name for p in second.iterdir()]


@pytest.mark.parametrize(
    "victims",
    [pytest.param((1,), id="once"), pytest.param((1, 0, 1), id="again", marks=pytest.mark.rotated)],
)
def test_the_next_run_replaces_what_a_killed_server_left(
    tmp_path: Path, victims: Sequence[int]
) -> None:
    """Each run continues from `latest`, which contains pieces of one run only.

    The last run has the right bits.
    """
    endpoints, folder, last = free_endpoints(2), tmp_path / "saved", len(victims)
    with roles(tmp_path) as started:
        for run, victim in enumerate(victims):
            crash(started, endpoints, folder, run, victim)
            with warnings.catch_warnings():
                # the second checkpoint is skipped
                warnings.simplefilter("ignore", CheckpointWarning)
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


# -- what the system refuses -----------------------------------------------------------------------

# names of checkpoints, and the error of each; for some, the system call that fails
REAL = {
    "9" * 300: errno.ENAMETOOLONG,
    "locked": errno.EACCES,
    "full": errno.ENOSPC,
    "read-only": errno.EROFS,
}
MADE = {
    "broken": ("fsync", errno.EIO),
    "stale": ("stat", errno.ESTALE),
    "stale list": ("listdir", errno.ESTALE),
}
WITHOUT_RIGHTS = [
    "setpriv",
    "--bounding-set",
    "-dac_override,-dac_read_search",
    "--inh-caps",
    "-all",
]


@contextlib.contextmanager
def refusing(folder: Path) -> Iterator[None]:
    """Create a folder for each real failure: without permission, without space, and read-only."""
    made = {name: folder / name for name in ("locked", "full", "read-only")}
    for path in made.values():
        path.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        for name, options in {"full": "size=16k", "read-only": "ro"}.items():
            subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", made[name]], check=True)
            stack.callback(subprocess.run, ["umount", "--lazy", made[name]], check=True)
        made["locked"].chmod(0)
        stack.callback(made["locked"].chmod, 0o700)
        yield


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems, which the superuser may")
def test_a_job_goes_on_whatever_the_system_refuses(tmp_path: Path) -> None:
    """An error of the role that requested the save contains the system's text.

    Servers keep their state, and the next save works.
    """
    endpoints, folder = free_endpoints(2), tmp_path / "saved"
    names = [*REAL, *MADE]
    saves = {str(at): name for at, name in enumerate([*names, "100"], 1)}
    steps = len(saves) + 1
    with refusing(folder), roles(tmp_path) as started:
        for role in roles_of(1, endpoints):
            started.start(
                role.name,
                "saving",
                wrap=WITHOUT_RIGHTS if role.is_pserver else (),
                role=role.environment(),
                folder=str(folder),
                start="",
                first=0,
                last=steps,
                data=0,
                saves=saves,
                held="",
                refused=dict.fromkeys(REAL, ()) | MADE,
            )
        found = started.end()
    said = {
        n.removeprefix("said/"): str(x)
        for n, x in found["trainer 0"].items()
        if n.startswith("said/")
    }
    assert [*said] == names
    for name, code in (REAL | {name: code for name, (_, code) in MADE.items()}).items():
        for k, ep in enumerate(endpoints):
            told = (
                f"pserver {ep} could not save its part of checkpoint {name}: the piece of {ep} "
                "cannot be written to "
            )
            _, there, why = said[name].partition(f"{told}{folder}/{name}/pserver-{k}: ")
            assert there and os.strerror(code) in why.partition("; free space")[0], (
                name,
                said[name],
            )
    plan = plan_for(endpoints, 1)
    latest = checkpoint.latest(folder)
    assert latest == folder / "100"
    step = plain_step(mlp_loss, TX)
    batches = [batch_of(i, 1) for i in range(steps)]
    for params, count in (
        (checkpoint.load(latest, plan.main)[0], steps - 1),
        (found["trainer 0"], steps),
    ):
        want, _, _ = plain_run(step, params_of(), TX.init(params_of()), batches[:count])
        tree_close({n: params[n] for n in want}, want, 1e-12)
