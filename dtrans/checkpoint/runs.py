"""Which run of a job a process is in: what its pieces of checkpoints are tagged with, unless the user says otherwise.

All processes of a run must find the same word without asking anybody, since a piece is written without a word to any
other process. They have had words before:

    parameter servers   a server knows the trainers by their sessions, which are random: that of trainer 0 is the run's
    collectives         trainer 0 draws a number, and all are told it when they connect
                        (`dtrans.run.distributed.connect`)
    neither             what `dtrans launch` told all processes that it started, else a number of the process's own:
                        such processes have to be given a tag to save one checkpoint together
"""

from __future__ import annotations

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
    """Remember in which run somebody of this process took part last: a server's endpoint, or a trainer."""
    _known[who] = run


def run_of(who: str, environ: Mapping[str, str] | None = None) -> str:
    """The run that somebody of this process took part in last, or is in."""
    env = os.environ if environ is None else environ
    return _known.get(who) or env.get(VARIABLE) or THIS_PROCESS
