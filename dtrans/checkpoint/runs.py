"""Runs of jobs: each piece of a checkpoint is marked with the run that wrote it, and pieces of two
runs never meet.

All processes of a run must find the same word without asking anybody, since a piece is written
without a word to any other process. They have had words before:

    parameter servers   a server knows the trainers by their sessions, which are random: that of trainer 0 is the run's;
                        while it serves, each of those that have come is one of its words
    collectives         trainer 0 draws a number, and all are told it when they connect
                        (`dtrans.run.distributed.connect`)
    neither             what `dtrans launch` told all processes that it started, else a number of the process's own:
                        such processes have to be given a tag to save one checkpoint together
"""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Mapping


VARIABLE = "DTRANS_RUN"  # set by `dtrans launch`

_known: dict[str, str] = {}


def new_run() -> str:
    """A word that no other run has."""
    return secrets.token_hex(8)


THIS_PROCESS = new_run()


def note(who: str, run: str) -> None:
    """Remember in which run somebody of this process took part last: a server's endpoint, or a
    trainer."""
    _known[who] = run


def run_of(who: str, environ: Mapping[str, str] | None = None) -> str:
    """The run that somebody of this process took part in last, or is in."""
    env = os.environ if environ is None else environ
    return _known.get(who) or env.get(VARIABLE) or THIS_PROCESS


@dataclasses.dataclass(frozen=True)
class Mark:
    """Origin of a piece of a checkpoint: pieces make up one checkpoint only where their marks
    agree.

    Attributes:
      run: words of the run; the pieces of one save have at least one in common.
      step: of the run; None where processes have no common count.
      tag: the user's name for the save.
      shared: whether other processes of the run know a word of it too. A process that only knows a
        word of its own cannot tell remains of an earlier run from pieces of its own one.
    """

    run: tuple[str, ...] = ()
    step: int | None = None
    tag: str | None = None
    shared: bool = True


def mark_of(run: str, tag: str | None = None, *, alone: bool = False) -> Mark:
    """Return the mark of a piece that a process saves by itself.

    Args:
      run: of the process.
      tag: the user's, which processes that were not started together share.
      alone: whether this process writes all pieces.
    """
    shared = alone or run != THIS_PROCESS
    return Mark((run,) if shared or tag is None else (), tag=tag, shared=shared or tag is not None)
