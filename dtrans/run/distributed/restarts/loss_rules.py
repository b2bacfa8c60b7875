"""Rules for the failure of a role: a restart, a job that continues without it, or the job's end."""

from __future__ import annotations

from dtrans.protocol.generations import DROPS, REPLACE
from dtrans.run.distributed.child_process import Child
from dtrans.run.distributed.restarts.attempt import lacks_quorum
from dtrans.run.distributed.restarts.job_generations import JobGenerations
from dtrans.run.distributed.restarts.restart_options import RestartOptions
from dtrans.run.distributed.role import Role


class LossRules:
    """Rules for the failure of a role, and the number of restarts so far.

    Args:
      options: the restarts that the launcher may make.
      on_trainer_loss: as for `launch`.
      generations: record of the job's failures and restarts; None if the job has no snapshots.

    Attributes:
      most: the largest number of restarts.
      count: number of restarts so far.
    """

    def __init__(
        self, options: RestartOptions, on_trainer_loss: str, generations: JobGenerations | None
    ) -> None:
        self.most, self.count = options.most, 0
        self._on_trainer_loss, self._quorum = on_trainer_loss, options.quorum
        self._generations = generations

    @property
    def number(self) -> str:
        """Text for the log with the number of the last restart."""
        return f"restart {self.count} of {self.most}"

    def may_restart(self, role: Role) -> bool:
        """Return True if a restart may follow the failure of a role."""
        aborts = self._on_trainer_loss == "abort" and role.is_trainer
        return self.count < self.most and not aborts

    def leaves_quorum(self, role: Role) -> bool:
        """Return True if the job may drop a lost role, and enough trainers are left then."""
        if self._generations is None or not self.drops(role):
            return False
        return len(self._generations.members) > self._quorum

    def drops(self, role: Role) -> bool:
        """Return True if a role is a trainer without which the job may continue."""
        return self._on_trainer_loss in DROPS and role.is_trainer

    def continues_after(self, role: Role) -> bool:
        """Return True if the job may continue after the failure of a role."""
        return self.may_restart(role) or self.leaves_quorum(role)

    @property
    def replaces(self) -> bool:
        """True if a dropped trainer starts again, and joins the job when it is ready."""
        return self._on_trainer_loss == REPLACE

    def why_not_replaced(self, dropped: Child) -> str:
        """Return the reason why a dropped trainer does not start again, or ""."""
        if dropped.is_host_lost(was_reached=True):
            return f"the connection to its host{dropped.where.removeprefix(' on')} was lost"
        if self.count >= self.most:
            return f"restarts={self.most} allows no further restart"
        return ""

    def why_not_dropped(self, lost: Child) -> str:
        """Return the reason why the job cannot continue without a lost trainer, for the error.

        Args:
          lost: the process of the trainer.
        """
        assert self._generations is not None
        others, restarts = len(self._generations.members) - 1, f"restarts={self.most}"
        if self.leaves_quorum(lost.role):
            return (
                "the other roles could not go back to a snapshot in place, and "
                f"{restarts} allows no restart of all roles"
            )
        return (
            f"without it, {lacks_quorum(others, self._quorum)}, and {restarts} allows no further "
            "restart"
        )
