"""Simulated folder to which a server writes its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dtrans.errors import StateError
from tools.simulate.case import Case, Request


def checkpoint_name(case: Case, request: Request) -> str:
    """Return the name of a requested checkpoint."""
    return f"checkpoint-{case.requests.index(request)}"


class SimulatedStorage:
    """Checkpoints of one server.

    Args:
      case: the simulated case.
      endpoint: endpoint of the server.
      state: returns the server's arrays, by name.
      write: schedules the call of `end` for a checkpoint after some seconds.

    Attributes:
      written: number of steps and arrays of each written checkpoint, by name.
    """

    def __init__(
        self,
        case: Case,
        endpoint: str,
        state: Callable[[], Mapping[str, Any]],
        write: Callable[[str, float], None],
    ) -> None:
        self.written: dict[str, tuple[int, dict[str, bytes]]] = {}
        self._endpoint, self._state, self._write = endpoint, state, write
        saves = [x for x in case.requests if x.kind == "save"]
        self._requests = {checkpoint_name(case, x): x for x in saves}
        self._begun: dict[str, tuple[int, dict[str, bytes]]] = {}

    def keep(self, name: str, steps: int) -> int:
        """Start to write a checkpoint; return the number of blocks. See `SaveRequests.start`."""
        request = self._requests[name]
        if request.fails == self._endpoint and request.refuses:
            raise StateError("its folder is read-only")
        state = {n: x.tobytes() for n, x in self._state().items()}
        self._begun[name] = steps, state
        self._write(name, request.seconds)
        return len(state)

    def end(self, name: str) -> str:
        """Complete a checkpoint. Return the error of its write; empty if it succeeded."""
        begun = self._begun.pop(name)
        if self._requests[name].fails == self._endpoint:
            return "its disk is full"
        self.written[name] = begun
        return ""
