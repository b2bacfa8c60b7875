"""Simulated folder to which a server writes its checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dtrans.errors import StateError
from tools.simulate.case import Case, Request


def checkpoint_name(case: Case, request: Request) -> str:
    """Return the name of a requested checkpoint."""
    return f"checkpoint-{case.requests.index(request)}"


@dataclasses.dataclass(frozen=True, eq=False)
class Pending:
    """Checkpoint that a server writes.

    Attributes:
      name: name of the checkpoint.
      steps: number of steps of the trainer that requested it.
      state: bytes of each array, by name.
      end: virtual time at which the write ends.
    """

    name: str
    steps: int
    state: dict[str, bytes]
    end: float


class SimulatedStorage:
    """Checkpoints of one server.

    Args:
      case: the simulated case.
      endpoint: endpoint of the server.
      write: schedules the end of a checkpoint's write, given its name and the seconds of the write.
        It returns the virtual time of the end.
      has_full_disk: returns True while the server's disk is full.

    Attributes:
      state: returns the server's arrays, by name.
      written: number of steps and arrays of each written checkpoint, by name.
      all_written: the same for each write, in order: (name, number of steps, arrays).
      pending: checkpoints that the server writes, by name.
    """

    def __init__(
        self,
        case: Case,
        endpoint: str,
        write: Callable[[str, float], float],
        has_full_disk: Callable[[], bool],
    ) -> None:
        self.state: Callable[[], Mapping[str, Any]] = dict
        self.written: dict[str, tuple[int, dict[str, bytes]]] = {}
        self.all_written: list[tuple[str, int, dict[str, bytes]]] = []
        self.pending: dict[str, Pending] = {}
        self._endpoint, self._write, self._has_full_disk = endpoint, write, has_full_disk
        saves = [x for x in case.requests if x.kind == "save"]
        self._requests = {checkpoint_name(case, x): x for x in saves}

    def keep(self, name: str, steps: int, arrays: Mapping[str, np.ndarray]) -> int:
        """Start to write a checkpoint; return the number of blocks. See `SaveRequests.start`."""
        request = self._requests[name]
        if request.fails == self._endpoint and request.refuses:
            raise StateError("its folder is read-only")
        state = {n: x.tobytes() for n, x in self.state().items()}
        end = self._write(name, request.seconds)
        self.pending[name] = Pending(name, steps, state, end)
        return len(state)

    def end(self, name: str) -> str:
        """Complete a checkpoint. Return the error of its write; empty if it succeeded."""
        begun = self.pending.pop(name)
        if self._requests[name].fails == self._endpoint or self._has_full_disk():
            return "its disk is full"
        self.written[name] = begun.steps, begun.state
        self.all_written.append((name, begun.steps, begun.state))
        return ""
