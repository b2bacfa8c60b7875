"""Membership of this process in a job: `dtrans.connect()` stores it, and others read it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from dtrans.errors import ConfigError
from dtrans.run.net.keys import Keys
from dtrans.run.net.sockets import DEADLINE, PATIENCE


@dataclasses.dataclass(frozen=True)
class Membership:
    """Job that this process is connected to.

    Attributes:
      trainer_id: id of this trainer.
      members: ids of the trainers, without those that were lost and dropped.
      endpoints: endpoints of all trainers, also of lost ones; empty if JAX detected the processes.
      deadline: seconds to wait for other trainers.
      on_trainer_loss: "abort" or "drop".
      allow_remote: True if processes may bind addresses that other hosts reach.
      run: name of this run, which its trainers share and no other run has.
      patience: seconds without a message from another process after which it counts as dead.
      encryption: `transport_encryption`: "auto", "required" or "disabled".
    """

    trainer_id: int
    members: tuple[int, ...]
    endpoints: tuple[str, ...] = ()
    deadline: float = DEADLINE
    on_trainer_loss: str = "abort"
    allow_remote: bool = False
    run: str = ""
    patience: float = PATIENCE
    encryption: str = "auto"

    @property
    def trainers(self) -> int:
        """The number of trainers."""
        return len(self.members)

    @property
    def keys(self) -> Keys:
        """The keys of the job, from this process's environment."""
        return Keys.from_environment(self.encryption)

    @property
    def name(self) -> str:
        """The name of this trainer in messages."""
        return f"trainer {self.trainer_id}"


_current: Membership | None = None


def join(membership: Membership) -> Membership:
    """Store the job that this process is a member of from now on, and return it."""
    global _current
    _current = membership
    return membership


def known() -> Membership | None:
    """Return the job that this process is a member of; None if there is none."""
    return _current


def current() -> Membership:
    """Return the job that this process is a member of. Raises ConfigError if there is none."""
    if _current is None:
        raise ConfigError(
            "this process is not connected to other trainers: call dtrans.connect() first"
        )
    return _current


def lost(trainers: Collection[int]) -> Membership:
    """Remove lost trainers from the job, and return the job of the survivors."""
    now = current()
    survivors = tuple(k for k in now.members if k not in trainers)
    return join(dataclasses.replace(now, members=survivors))
