"""Identifiers of runs, which keep the files of two runs in one checkpoint folder apart.

A job may crash during a save, and a second run may then save to the same folder. Each piece (the
files of one process) records the identifiers of its run, so that pieces of two runs are never
mixed.

All processes of a run need a common identifier. They do not communicate during a save, so they use
a random number that was sent before:

    parameter servers   a number that trainer 0 draws (its session), and sends to the servers when
                        it connects. A save while servers run uses the sessions of all trainers
    collectives         a number that trainer 0 draws, and sends when trainers connect
                        (`dtrans.run.distributed.connect`)
    other processes     the identifier from `dtrans launch`; without it, a number that this process
                        draws. Processes without a common identifier need a tag (`save(tag=...)`)
"""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Mapping


VARIABLE = "DTRANS_RUN"  # environment variable, which `dtrans launch` sets

_known: dict[str, str] = {}


def new_run() -> str:
    """Return a random identifier."""
    return secrets.token_hex(8)


THIS_PROCESS = new_run()


def note(who: str, run: str) -> None:
    """Store the identifier of a role's run, to record it in the role's later checkpoints.

    Args:
      who: the role: a server's endpoint, or a trainer.
      run: the identifier; it replaces the identifier of an earlier run.
    """
    _known[who] = run


def run_of(who: str, environ: Mapping[str, str] | None = None) -> str:
    """Return the identifier of the current or last run of a role in this process."""
    env = os.environ if environ is None else environ
    return _known.get(who) or env.get(VARIABLE) or THIS_PROCESS


@dataclasses.dataclass(frozen=True)
class SaveId:
    """Run, step and tag that a process records in its files of a checkpoint.

    A restore combines only files of one run with equal step and tag.

    Attributes:
      run: identifiers of the run. All pieces of one save have at least one in common.
      step: the step of the run; None if processes have no common step count.
      tag: the user's name of the save.
      shared: True if other processes of the run know one of the identifiers. If False, a piece of
        another process may belong to this run or to an earlier one, so no piece is replaced.
      job: identifier of a job that writes snapshots; empty for other jobs. When a failed
        trainer is dropped, the job gets another run, and repeats steps. It then replaces the pieces
        of these steps.
    """

    run: tuple[str, ...] = ()
    step: int | None = None
    tag: str | None = None
    shared: bool = True
    job: str = ""


def save_id(run: str, tag: str | None = None, *, alone: bool = False) -> SaveId:
    """Return the `SaveId` (run and tag) that a process records in the files that it saves now.

    Args:
      run: the identifier of the process's run.
      tag: the user's tag, for processes that were started separately.
      alone: True if this process writes all pieces.
    """
    if alone or run != THIS_PROCESS:
        return SaveId((run,), tag=tag)
    if tag is not None:
        # other processes do not know this identifier, so the tag replaces it
        return SaveId((), tag=tag)
    return SaveId((run,), shared=False)
