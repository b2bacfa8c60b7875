"""Return of a trainer to a cut (snapshot) after a process failed (`dtrans.protocol.epochs`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dtrans.errors import LostPeerError, Rewound
from dtrans.protocol.epochs import Epochs


class ReturnToCut:
    """Return of one trainer to a cut, a copy of the job's state at an earlier step.

    The return begins when `NewEpoch` is raised, and ends when `job.step` raises `Rewound`.

    Args:
      name: name of the trainer's role.
      epochs: epochs of the job; None without a launcher that restarts roles.
      connect: connects to the servers of an epoch. Its argument is the smallest possible number of
        the epoch.
      receive: returns the parameters that the servers have now.

    Attributes:
      before: the trainer's step when the return began; None without a return.
    """

    def __init__(
        self,
        name: str,
        epochs: Epochs | None,
        connect: Callable[[int], None],
        receive: Callable[[], Any],
    ) -> None:
        self._name, self._epochs = name, epochs
        self._connect, self._receive = connect, receive
        self._params: Any = None
        self.before: int | None = None

    @property
    def is_due(self) -> bool:
        """True if a cut's parameters have arrived: the next `job.step` raises `Rewound`."""
        return self._params is not None

    def begin(self, epoch: int, step: int) -> None:
        """Connect to the servers of a new epoch, and receive the parameters of its cut (snapshot).

        Args:
          epoch: the smallest possible number of the epoch.
          step: the trainer's step.

        Raises:
          StateError: the trainer's state is not from `init`.
        """
        before = step if self.before is None else self.before
        self._connect(epoch)
        self._params = self._receive()
        self.before = before

    def end(self, step: int) -> Rewound:
        """End the return; create the `Rewound` exception with the state of the cut (snapshot).

        Args:
          step: the step of the cut.
        """
        params, self._params = self._params, None
        self.before = None
        epoch = 0 if self._epochs is None else self._epochs.current().number
        return Rewound(step, (params,), epoch)

    def end_request(self, call: str, before: int, step: int, *, repeats: bool | None) -> None:
        """Continue after a request during which the servers went back to a cut (snapshot).

        If the cut has the trainer's step, the return ends. Otherwise the next `job.step` ends the
        return, and the loop over `job.steps` repeats the step and the request.

        Args:
          call: the user's call, for the error.
          before: the trainer's step.
          step: the step of the cut.
          repeats: True if a loop over `job.steps` can repeat steps; None before such a loop.

        Raises:
          LostPeerError: the loop is over.
          Rewound: the user calls `job.step` in another loop.
        """
        if step == before:
            self._params = self.before = None
        elif repeats is None:
            raise self.end(step)
        elif not repeats:
            raise LostPeerError(
                f"a process was lost during {call}, and {self._name} cannot go back from step "
                f"{before} to step {step} after its loop over job.steps"
            )

    @property
    def missed(self) -> LostPeerError | None:
        """Error for a job that is closed while the servers wait for repeated steps; else None."""
        if not self.is_due:
            return None
        return LostPeerError(
            f"a process was lost, and {self._name} closed its job instead of repeating steps"
        )
