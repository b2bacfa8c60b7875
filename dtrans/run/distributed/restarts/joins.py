"""Joins of dropped trainers: a trainer starts again while the job continues, and joins when ready.

A trainer that is ready has planned the step, and waits in `plan.on_cluster`. The launcher then ends
the current generation (time between two failures), and starts one in which the trainer takes part.
The other roles go back to a snapshot, as after a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dtrans.run.distributed.child_process import Child
from dtrans.run.distributed.restarts.attempt import Attempt
from dtrans.run.distributed.restarts.job_generations import JobGenerations
from dtrans.run.distributed.restarts.loss_rules import LossRules
from dtrans.run.distributed.restarts.spares import Spares
from dtrans.run.distributed.role_output import say


class Joins:
    """Restarts of trainers that a job has dropped, with `on_trainer_loss="replace"`.

    The job continues while the trainer starts again. When the trainer is ready, it joins the job.

    Args:
      rules: rules for the failure of a role.
      spares: spares of the job. A spare may become a dropped trainer.
      start: starts the process of a dropped trainer, as `Restarts` does.
      is_late: returns True if the job's deadline has passed.
    """

    def __init__(
        self,
        rules: LossRules,
        spares: Spares,
        start: Callable[..., None],
        is_late: Callable[[], bool],
    ) -> None:
        self._rules, self._spares, self._start, self._is_late = rules, spares, start, is_late

    def replace(self, attempt: Attempt, dropped: Child, shared: Mapping[str, str]) -> None:
        """Start a dropped trainer again, if the user wants this and a restart is left.

        Args:
          attempt: the attempt, which continues without the trainer.
          dropped: the process of the trainer that was lost.
          shared: variables that all roles of the attempt share.
        """
        if not self._rules.replaces:
            return
        role = dropped.role
        if reason := self._rules.why_not_replaced(dropped):
            say(f"{role.name} does not start again: {reason}")
            return
        self._rules.count += 1
        spare = self._spares.take()
        how = "starts again" if spare is None else "is replaced by a spare"
        say(f"{role.name} {how}, and joins the job when it is ready ({self._rules.number})")
        self._start(attempt, role, shared, spare, joins=True)

    def look(self, generations: JobGenerations, attempt: Attempt) -> None:
        """Take back dropped trainers that are ready, if other roles can go back to a snapshot.

        All roles go back to the newest snapshot, so that returning trainers begin with the same
        state as the others.

        Args:
          generations: record of the job's failures and restarts.
          attempt: the attempt.
        """
        if not attempt.joining or self._is_late():
            return
        running = {child.role.name for child in attempt.running}
        ready = generations.find_ready([child.role.name for child in attempt.joining], running)
        if not ready:
            return
        generations.end_generation(
            "", attempt.find_alive, lambda: attempt.has_signal or self._is_late()
        )
        if attempt.has_signal:
            return
        generations.join(ready)
        attempt.join(ready, generations.generation.number)
        say(f"{', '.join(ready)} joined the job, and {generations.other_roles}")
