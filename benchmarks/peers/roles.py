"""Role of a process in an environment without dtrans, from the variables that dtrans sets."""

from __future__ import annotations

import dataclasses
import os


@dataclasses.dataclass(frozen=True)
class Role:
    """Role of this process.

    Attributes:
      kind: `trainer` or `pserver`.
      index: index among the trainers, or among the servers.
      trainers: number of trainers.
      pserver_endpoints: endpoints of the servers; empty if the job has none.
      trainer_endpoints: endpoints of the trainers; empty if the job has servers.
    """

    kind: str
    index: int
    trainers: int
    pserver_endpoints: tuple[str, ...]
    trainer_endpoints: tuple[str, ...]

    @property
    def is_pserver(self) -> bool:
        return self.kind == "pserver"

    @property
    def pservers(self) -> int:
        return len(self.pserver_endpoints)

    @classmethod
    def from_env(cls) -> Role:
        """Return the role of this process."""
        read = lambda name: tuple(filter(None, os.environ.get(f"DTRANS_{name}", "").split(",")))
        kind, servers = os.environ["DTRANS_ROLE"], read("PSERVER_ENDPOINTS")
        index = os.environ.get("DTRANS_TRAINER_ID", "0")
        if kind == "pserver":
            index = servers.index(os.environ["DTRANS_CURRENT_ENDPOINT"])
        trainers = int(os.environ["DTRANS_TRAINERS"])
        return cls(kind, int(index), trainers, servers, read("TRAINER_ENDPOINTS"))
