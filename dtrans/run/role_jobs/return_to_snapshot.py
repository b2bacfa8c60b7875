"""Return of a trainer to an earlier snapshot of the job, after another process has failed.

`dtrans.protocol.generations` describes the steps of all processes after a failure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dtrans.errors import LostPeerError, Rewound
from dtrans.parameter_server.state import TrainerState
from dtrans.protocol.generations import Generations


class ReturnToSnapshot:
    """Return of one trainer to a snapshot of the job (copy of its state after an earlier step).

    When a process fails, all processes go back to a snapshot. An operation of a trainer that is
    running then raises `NewGeneration`. The job calls `begin`, which receives the parameters of the
    snapshot. The next `job.step` passes these parameters to the user's loop, in the exception
    `Rewound`.

    Args:
      name: name of the trainer, such as "trainer 0", for errors.
      generations: folder with the job's generations (periods between two failures). None if the
        launcher does not restart processes.
      connect: connects to the servers of a generation. Its argument is the smallest number that the
        generation can have.
      receive: returns the servers' current parameters.

    Attributes:
      before: number of steps that the trainer had taken when the return began. None if no return is
        in progress.
    """

    def __init__(
        self,
        name: str,
        generations: Generations | None,
        connect: Callable[[int], None],
        receive: Callable[[], Any],
    ) -> None:
        self._name, self._generations = name, generations
        self._connect, self._receive = connect, receive
        self._params: Any = None
        self.before: int | None = None

    @property
    def is_due(self) -> bool:
        """True if the snapshot's parameters have arrived; the next `job.step` raises `Rewound`."""
        return self._params is not None

    def begin(self, generation: int, step: int) -> None:
        """Connect to the servers again after a failure, and receive the parameters of the snapshot.

        Args:
          generation: smallest number that the new generation (period between two failures) can
            have.
          step: number of steps that this trainer has taken.

        Raises:
          StateError: the trainer's state is not from `init`.
        """
        before = step if self.before is None else self.before
        self._connect(generation)
        self._params = self._receive()
        self.before = before

    def end(self, step: int) -> Rewound:
        """Return the `Rewound` exception, which makes the user's loop continue from the snapshot.

        Args:
          step: number of steps in the snapshot.
        """
        params, self._params = self._params, None
        self.before = None
        generation = 0 if self._generations is None else self._generations.current().number
        return Rewound(step, TrainerState((params,)), generation)

    def end_request(self, call: str, before: int, step: int, *, repeats: bool | None) -> None:
        """Continue after a request during which the servers went back to a snapshot.

        A request is a call between two steps, such as `job.save`. If the snapshot has the trainer's
        current step, nothing is lost, and the return ends. Otherwise, the next `job.step` raises
        `Rewound`. The loop over `job.steps` then repeats the lost steps and the request.

        Args:
          call: the user's call for the error, such as "job.save('300')".
          before: number of steps that the trainer had taken before the request.
          step: number of steps in the snapshot.
          repeats: True if the user's loop over `job.steps` can repeat steps. False after the loop.
            None if no such loop has begun.

        Raises:
          LostPeerError: the loop is over.
          Rewound: the user calls `job.step` without a loop over `job.steps`.
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
        """Error for a user who closes the job although lost steps must be repeated; else None."""
        if not self.is_due:
            return None
        return LostPeerError(
            f"a process was lost, and {self._name} closed its job instead of repeating steps"
        )
