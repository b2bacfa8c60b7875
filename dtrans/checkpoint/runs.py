"""Runs of jobs: the mark of each piece names the run that wrote it, so that runs are never mixed.

All processes of a run must agree on an identifier without communication, since each writes its
pieces alone. Earlier messages provide it:

    parameter servers   the random session of trainer 0, which servers know. While a server serves,
                        the sessions of all trainers identify the run.
    collectives         a number that trainer 0 draws and sends when trainers connect
                        (`dtrans.run.distributed.connect`)
    neither             the identifier from `dtrans launch`, else a random one of this process.
                        Processes without a common one need a tag to save one checkpoint.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Mapping


VARIABLE = "DTRANS_RUN"  # set by `dtrans launch`

_known: dict[str, str] = {}


def new_run() -> str:
    """Return a random identifier."""
    return secrets.token_hex(8)


THIS_PROCESS = new_run()


def note(who: str, run: str) -> None:
    """Remember the last run of a role in this process: a server's endpoint, or a trainer."""
    _known[who] = run


def run_of(who: str, environ: Mapping[str, str] | None = None) -> str:
    """Return the current or last run of a role in this process."""
    env = os.environ if environ is None else environ
    return _known.get(who) or env.get(VARIABLE) or THIS_PROCESS


@dataclasses.dataclass(frozen=True)
class Mark:
    """Origin of a piece of a checkpoint: pieces are combined only if their marks agree.

    Attributes:
      run: identifiers of the run; pieces of one save have at least one in common.
      step: the step of the run; None if processes have no common count.
      tag: the user's name of the save.
      shared: True if other processes of the run know one of the identifiers. Otherwise pieces of an
        earlier run look like those of another process of this run.
    """

    run: tuple[str, ...] = ()
    step: int | None = None
    tag: str | None = None
    shared: bool = True


def mark_of(run: str, tag: str | None = None, *, alone: bool = False) -> Mark:
    """Return the mark of a piece that a process saves alone.

    Args:
      run: the run of the process.
      tag: the user's tag, for processes that were started separately.
      alone: True if this process writes all pieces.
    """
    shared = alone or run != THIS_PROCESS
    return Mark((run,) if shared or tag is None else (), tag=tag, shared=shared or tag is not None)
