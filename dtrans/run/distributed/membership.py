"""The job of processes that this process is a member of.

`dtrans.connect()` notes it here; who needs to know who else there is asks here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from dtrans.errors import ConfigError
from dtrans.run.net.keys import Keys
from dtrans.run.net.sockets import DEADLINE, PATIENCE


@dataclasses.dataclass(frozen=True)
class Membership:
    """The job that this process is connected to.

    Attributes:
      trainer_id: which trainer this process is.
      members: the trainers that there are: all, but for those that were lost and dropped.
      endpoints: of the trainers, also of lost ones; empty if JAX found them by itself.
      deadline: seconds to wait for others.
      patience: seconds without a sign of another process after which it counts as dead.
      on_trainer_loss: "abort" or "drop".
      allow_remote: whether processes may bind addresses that other hosts reach.
      encryption: which of their connections are encrypted, as `transport_encryption`.
      run: a word that the trainers of this run share, and no other run has.
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
        """How many trainers there are."""
        return len(self.members)

    @property
    def keys(self) -> Keys:
        """The keys of the job, as this process's environment has them."""
        return Keys.from_environment(self.encryption)

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"trainer {self.trainer_id}"


_current: Membership | None = None


def join(membership: Membership) -> Membership:
    """Note the job that this process is a member of from now on."""
    global _current
    _current = membership
    return membership


def known() -> Membership | None:
    """The job that this process is a member of, if there is one."""
    return _current


def current() -> Membership:
    """The job that this process is a member of. Raises ConfigError when there is none."""
    if _current is None:
        raise ConfigError(
            "this process is not connected to other trainers: call dtrans.connect() first"
        )
    return _current


def lost(trainers: Collection[int]) -> Membership:
    """Note that trainers are gone; the job of those left."""
    now = current()
    return join(
        dataclasses.replace(now, members=tuple(k for k in now.members if k not in trainers))
    )
