"""Requests of a trainer between two steps: checkpoints, and reads and evictions of table rows.

A process may be lost during a request. The trainer then goes back to a cut (`return_to_cut`), and
the request is sent again or skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

import numpy as np

from dtrans.ir.program import Program
from dtrans.parameter_server.plan import PServerPlan
from dtrans.protocol.epochs import NewEpoch
from dtrans.protocol.trainer.operation import Operation
from dtrans.protocol.trainer.trainer_line import log
from dtrans.protocol.trainer.trainer_steps import TrainerSteps
from dtrans.run.parameter_server.tables.job_tables import TrainerTables
from dtrans.run.role_jobs.return_to_cut import ReturnToCut


T = TypeVar("T")


class RunBetweenSteps(Protocol):
    """Function that runs an operation with the servers: `Executor.between_steps`."""

    def __call__(self, what: str, ask: Callable[[TrainerSteps], Operation[T]]) -> T:
        """Return the result of the operation.

        Args:
          what: name of the operation, for errors.
          ask: function that starts the operation.
        """


class TrainerRequests:
    """Requests of one trainer to its servers between two steps.

    Args:
      plan: the job's plan.
      trainer_id: id of the trainer.
      returns: repeats or ends a request after the job went back to a cut (snapshot).
      run: runs an operation with the servers.
      look_up: function that returns the servers' current rows of a table. Its arguments are the
        trainer's program, the table's name and increasing row ids.
      step_count: returns the number of the trainer's steps.
      repeats_steps: returns `Job.repeats_steps`.
    """

    def __init__(
        self,
        plan: PServerPlan,
        trainer_id: int,
        returns: ReturnToCut,
        *,
        run: RunBetweenSteps,
        look_up: Callable[[Program, str, np.ndarray], np.ndarray],
        step_count: Callable[[], int],
        repeats_steps: Callable[[], bool | None],
    ) -> None:
        self._plan, self._trainer_id, self._return = plan, trainer_id, returns
        self._run, self._rows = run, look_up
        self._step_count, self._repeats_steps = step_count, repeats_steps
        self._unconfirmed: tuple[str, int] | None = None  # name and step of a save without a wait

    # -- tables ----------------------------------------------------------------------------------

    @property
    def tables(self) -> TrainerTables:
        """The tables of the job."""
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
        """Implement `dtrans.run.parameter_server.tables.job_tables.AskServers`."""
        request: Callable[[], T] = partial(self._run, what, ask)
        call, retries = f"a request for {what}", not self._plan.sync_mode
        return self._send(call, request, skipped, retries=retries)

    # -- checkpoints -----------------------------------------------------------------------------

    def save(self, name: str, *, wait: bool) -> None:
        """Save a checkpoint on the servers.

        Args:
          name: name of the checkpoint.
          wait: True to return when the checkpoint is written.

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
        step = self._step_count()
        run(lambda to: to.save(tuple(self._plan.servers), name, step))
        if wait:
            run(lambda to: to.saved())
        else:
            self._unconfirmed = name, step

    def drop_save(self, step: int) -> None:
        """Stop waiting for a pending checkpoint that no repeated step saves again; log its name.

        Args:
          step: step of the cut (snapshot) to which the trainer has returned.
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
        """Send a request. If a process is lost during the request, send it again or skip it.

        If the servers go back to the cut (snapshot) of an earlier step, the loop over `job.steps`
        repeats the step, and so the request. A request that only reads is also sent again at once,
        and reads the state of the cut.

        Args:
          call: the user's call, for errors.
          request: sends the request, and returns the answer.
          skipped: returns the result of a request that is skipped, because a repeated step will
            send it; None for a request that only reads.
          retries: False to skip the request even if the cut is after the current step. Use False
            for evictions: such a cut of synchronous servers already contains the eviction.
        """
        while skipped is None or not self._return.is_due:
            before, is_due = self._step_count(), self._return.is_due
            try:
                return request()
            except NewEpoch as e:
                self._return.begin(e.number, before)
            if not is_due:
                repeats = self._repeats_steps()
                self._return.end_request(call, before, self._step_count(), repeats=repeats)
            if skipped is not None and not retries:
                break
        return skipped()
