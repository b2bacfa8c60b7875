"""Requests of a trainer between two steps: save a checkpoint, read or evict rows of a table.

A process may fail during a request, and the trainer then goes back to a snapshot of the job
(`return_to_snapshot`). This module decides if the trainer sends the request again or skips it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from dtrans.checkpoint.rounding_errors import rounding_error_saver, rounding_error_slices
from dtrans.ir.program import Program
from dtrans.parameter_server.plan import PServerPlan
from dtrans.protocol.generations import NewGeneration
from dtrans.protocol.trainer.operation import Operation
from dtrans.protocol.trainer.trainer_line import log
from dtrans.protocol.trainer.trainer_steps import TrainerSteps
from dtrans.run.parameter_server.tables.job_tables import TrainerTables
from dtrans.run.role_jobs.return_to_snapshot import ReturnToSnapshot


T = TypeVar("T")


class RunBetweenSteps(Protocol):
    """Function that runs an operation with the servers: `Executor.between_steps`."""

    def __call__(self, what: str, ask: Callable[[TrainerSteps], Operation[T]]) -> T:
        """Run the operation, and return its result.

        Args:
          what: name of the operation for errors, such as "checkpoint 300".
          ask: function that starts the operation.
        """


class TrainerRequests:
    """Requests of one trainer to its servers between two steps, such as `job.save`.

    Args:
      plan: the job's plan.
      trainer_id: id of the trainer.
      returns: the `ReturnToSnapshot` of the trainer, which handles failures of other processes.
      run: runs an operation with the servers.
      look_up: function that returns the servers' current rows of a table. Its arguments are the
        trainer's program, the table's name and increasing row ids.
      step_count: returns the number of the trainer's steps.
      rounding_errors: returns the rounding errors of the trainer's newest state, by name.
      repeats_steps: returns True if the user's loop can repeat lost steps (`Job.repeats_steps`).
    """

    def __init__(
        self,
        plan: PServerPlan,
        trainer_id: int,
        returns: ReturnToSnapshot,
        *,
        run: RunBetweenSteps,
        look_up: Callable[[Program, str, np.ndarray], np.ndarray],
        step_count: Callable[[], int],
        rounding_errors: Callable[[], Mapping[str, Any]],
        repeats_steps: Callable[[], bool | None],
    ) -> None:
        self._plan, self._trainer_id, self._return = plan, trainer_id, returns
        self._run, self._rows = run, look_up
        self._step_count, self._repeats_steps = step_count, repeats_steps
        self._rounding_errors = rounding_errors
        self._unconfirmed: tuple[str, int] | None = None  # name and step of a save without a wait

    # -- tables ----------------------------------------------------------------------------------

    @property
    def tables(self) -> TrainerTables:
        """Embedding tables of the job, to look up, export or evict rows."""
        return TrainerTables(self._plan, self._look_up, self._ask)

    def _look_up(self, table: str, ids: np.ndarray) -> np.ndarray:
        program = self._plan.trainer_program(self._trainer_id)
        return self._send(f"a lookup of {table}", partial(self._rows, program, table, ids))

    def _ask(
        self,
        what: str,
        ask: Callable[[TrainerSteps], Operation[T]],
        skipped: Callable[[], T] | None = None,
    ) -> T:
        """Send a request about a table to all servers, and return their answer.

        Args:
          what: name of the request for errors.
          ask: function that starts the request.
          skipped: as for `_send`.
        """
        request: Callable[[], T] = partial(self._run, what, ask)
        call, retries = f"a request for {what}", not self._plan.sync_mode
        return self._send(call, request, skipped, retries=retries)

    # -- checkpoints -----------------------------------------------------------------------------

    def save(self, name: str, *, wait: bool) -> None:
        """Ask the servers to save a checkpoint.

        Args:
          name: name of the checkpoint.
          wait: True to wait until the checkpoint is written.

        Raises:
          CheckpointError: a server could not write its piece of this checkpoint or of the previous
            one.
        """
        request = partial(self._save, name, wait=wait)
        self._send(f"job.save({name!r})", request, skipped=lambda: None)

    def _save(self, name: str, *, wait: bool) -> None:
        run = partial(self._run, f"checkpoint {name}")
        run(lambda to: to.saved())  # wait for an earlier save with wait=False
        self._unconfirmed = None
        step, k = self._step_count(), self._trainer_id
        slices = rounding_error_slices(self._plan, self._rounding_errors(), k)
        arrays = {rounding_error_saver(self._plan, k): [*slices.items()]}
        run(lambda to: to.save(tuple(self._plan.servers), name, step, arrays))
        if wait:
            run(lambda to: to.saved())
        else:
            self._unconfirmed = name, step

    def drop_save(self, step: int) -> None:
        """Forget a checkpoint that servers were writing at a failure; warn if it may be incomplete.

        After the failure, the trainer repeats the steps after a snapshot, and saves checkpoints of
        these steps again. A checkpoint of an earlier step is not saved again, so a warning names
        it.

        Args:
          step: number of steps in the snapshot.
        """
        if self._unconfirmed is not None and self._unconfirmed[1] <= step:
            log.warning(
                "checkpoint %s may be incomplete: a process was lost while servers wrote it, and "
                "no repeated step saves it again",
                self._unconfirmed[0],
            )
        self._unconfirmed = None

    # -- lost processes --------------------------------------------------------------------------

    def _send(
        self,
        call: str,
        request: Callable[[], T],
        skipped: Callable[[], T] | None = None,
        *,
        retries: bool = True,
    ) -> T:
        """Send a request to the servers. If a process fails meanwhile, send it again or skip it.

        After a failure, the servers go back to a snapshot. If the snapshot is older than the
        current step, the user's loop over `job.steps` repeats the lost steps, and then the request.
        A request that only reads is also sent again at once, and reads the state of the snapshot.

        Args:
          call: the user's call for errors, such as "job.save('300')".
          request: function that sends the request, and returns the answer.
          skipped: function that returns the result of a skipped request. None for a request that
            only reads, which is never skipped.
          retries: False to skip the request even if the snapshot has the current step. Evictions
            need False, because a snapshot of synchronous servers after this step already contains
            the eviction.
        """
        while skipped is None or not self._return.is_due:
            before, is_due = self._step_count(), self._return.is_due
            try:
                return request()
            except NewGeneration as e:
                self._return.begin(e.number, before)
            if not is_due:
                repeats = self._repeats_steps()
                self._return.end_request(call, before, self._step_count(), repeats=repeats)
            if skipped is not None and not retries:
                break
        return skipped()
