"""Membership of this process in a job. `dtrans.connect()` stores it for the other modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from dtrans.errors import ConfigError
from dtrans.run.net.keys import Keys
from dtrans.run.net.sockets import DEADLINE, PATIENCE


@dataclasses.dataclass(frozen=True)
class Membership:
    """Membership of this process in a job: its trainers, options and endpoints.

    Attributes:
      trainer_id: id of this trainer.
      members: ids of the trainers that have not been lost.
      endpoints: endpoints of all trainers, including lost ones; empty if JAX detected the
        processes.
      deadline: seconds to wait for other trainers.
      on_trainer_loss: "abort" or "drop".
      allow_remote: True if processes may bind addresses that other hosts can reach.
      run: unique name of this run, equal on all trainers.
      patience: seconds of silence after which another process counts as dead.
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
        """The token and encryption keys of the job, from this process's environment."""
        return Keys.from_environment(self.encryption)

    @property
    def name(self) -> str:
        """The name of this trainer in messages: `trainer 0`."""
        return f"trainer {self.trainer_id}"


_current: Membership | None = None


def join(membership: Membership) -> Membership:
    """Store the membership of this process, and return it."""
    global _current
    _current = membership
    return membership


def known() -> Membership | None:
    """Return the stored membership of this process, or None before `join`."""
    return _current


def current() -> Membership:
    """Return the stored membership of this process. Raises ConfigError before `join`."""
    if _current is None:
        raise ConfigError(
            "this process is not connected to other trainers: call dtrans.connect() first"
        )
    return _current


def lost(trainers: Collection[int]) -> Membership:
    """Remove lost trainers from this process's membership of the job; return the new membership."""
    now = current()
    survivors = tuple(k for k in now.members if k not in trainers)
    return join(dataclasses.replace(now, members=survivors))
