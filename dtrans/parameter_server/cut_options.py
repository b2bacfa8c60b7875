"""Options of cuts: copies of the state of parameter servers, to which a job goes back."""

from __future__ import annotations

import dataclasses

from dtrans.checks import check_flag, check_int


@dataclasses.dataclass(frozen=True)
class Cuts:
    """Options of cuts: copies of the servers' state, from which a job continues after a loss.

    Pass the object to `job.serve`. Servers write cuts only in jobs that `dtrans launch --restarts`
    started.

    Attributes:
      every: number of steps between two cuts. An asynchronous server counts the steps of all
        trainers.
      at_loss: True to also write a cut when a process is lost. Each server then stores the states
        after its two newest steps, which takes the memory of one more state. After the loss of a
        trainer, the job repeats only the incomplete step. Requires synchronous servers without
        tables, and trainers that compute no leaves.

    Raises:
      ConfigError: a value is out of range.

    Example:
      >>> import dtrans
      >>> dtrans.Cuts(every=100, at_loss=True).every
      100
    """

    every: int
    at_loss: bool = False

    def __post_init__(self) -> None:
        check_int("every", self.every, "a number of steps", least=1)
        check_flag("at_loss", self.at_loss)
