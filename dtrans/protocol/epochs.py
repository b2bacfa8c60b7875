"""Epochs of a job with cuts. After the failure of a process, roles go back to a cut.

    cut      copy of the job's state after a step. Each server writes its state, and each trainer
             the leaves that it computes itself
    epoch    part of a job between two events: the failure of a process, or the return of a dropped
             trainer; it begins at a cut

Roles write a cut every few steps. When a process is lost, the launcher chooses the newest cut that
all roles have written, and grants a new epoch that begins there. Live servers load the cut and
continue with new state machines, so that no state of the old epoch has to be cleared. Live
trainers connect again and repeat the steps after the cut. Only the lost process is started again.

The launcher may also drop a lost trainer (`dtrans launch --on-trainer-loss drop`). The set of
trainers is a part of the epoch. So all servers use the gradients of the same trainers in a step.
With `--on-trainer-loss replace`, the dropped trainer starts again while the other roles continue.
When it is ready, the launcher grants an epoch in which the trainer takes part again.

Asynchronous trainers share no step, so each asynchronous server writes separate cuts. A surviving
server keeps its state, and a lost server continues from its newest cut. Each trainer continues
after the last of its steps that a server has received. A trainer that has left the job need not
come back while all servers survive, because they have received all of its steps. The epoch names
such trainers, and servers do not wait for them.

Synchronous servers can also write a *cut at a failure*. The launcher then announces that the epoch
ends. Each live server stops, and writes its states after its newest steps. A trainer begins a step
only after all servers have completed the step before. So servers differ by at most one step, and
the two newest states of each server contain a common step. In a job with tables, trainers may evict
rows after a step. A state after this step may lack these evictions, unless a server knows that a
trainer has begun the next step. Without this knowledge, the job does not continue from the state.

A synchronous update is a function of the state and the gradients, so repeated steps have the same
bits. Messages of an older epoch are never processed in a newer one: each greeting contains the
epoch of its sender.

Source: coordinated checkpoints and rollback (Elnozahy et al., A survey of rollback-recovery
protocols, section 3.1).
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from dtrans.errors import StateError


# Values of `on_trainer_loss` with which a job continues without a lost trainer. With REPLACE, the
# trainer joins the job again later.
REPLACE = "replace"
DROPS = ("drop", REPLACE)


@dataclasses.dataclass(frozen=True)
class Epoch:
    """Part of a job between two failures, with the snapshot from which it starts.

    After the failure of a process, the launcher starts the next epoch: roles go back to the newest
    snapshot (*cut*) of the job. An epoch also ends when a dropped trainer returns.

    Attributes:
      number: number of the epoch, from 0.
      cut: step of the cut (snapshot) at the start of the epoch. None if the epoch starts with the
        initial state, or with the cuts of asynchronous servers.
      is_ending: True if a role was lost, and the launcher waits until servers have written the
        states after their newest steps.
      dropped: ids of the lost trainers that take no part in the epoch, increasing.
      lost: names of the lost servers of an ending epoch. Other servers write the replicas of
        these servers.
      incarnations: for each trainer, the number of the epoch in which its current process was
        started; empty without this information.
      members_since: number of the epoch in which the set of trainers last changed.
      left: ids of the asynchronous trainers that left the job before the epoch, increasing.
    """

    number: int = 0
    cut: int | None = None
    is_ending: bool = False
    dropped: tuple[int, ...] = ()
    lost: tuple[str, ...] = ()
    # Excluded from `==`: the epochs that roles read have incarnations, and the launcher's epochs
    # have none.
    incarnations: tuple[int, ...] = dataclasses.field(default=(), compare=False)
    members_since: int = 0
    left: tuple[int, ...] = ()

    def next(self, cut: int | None, dropped: tuple[int, ...], left: tuple[int, ...] = ()) -> Epoch:
        """Return the epoch after this one.

        Args:
          cut: step of the cut (snapshot) at the start of the new epoch, as for the attribute `cut`.
          dropped: ids of the lost trainers that take no part in the new epoch, increasing.
          left: ids of the asynchronous trainers that have left the job, increasing.

        Example:
          >>> from dtrans.protocol.epochs import Epoch
          >>> epoch = Epoch(3).next(20, (1,))
          >>> (epoch.number, epoch.cut, epoch.dropped, epoch.members_since)
          (4, 20, (1,), 4)
        """
        number, since = self.number + 1, self.members_since
        if dropped != self.dropped:
            since = number
        return Epoch(number, cut, dropped=dropped, members_since=since, left=left)

    def is_cut_due(self, step: int, first: int, every: int) -> bool:
        """Return True if roles write a cut (snapshot of the job) after a step of a synchronous job.

        They write one every `every` steps, and one before the first step of an epoch (the time
        between two failures). If the epoch starts from a cut, they do not write this cut a second
        time.

        Args:
          step: number of steps of the job.
          first: number of steps before the epoch.
          every: number of steps between two cuts.
        """
        return step != self.cut and (step == first or step % every == 0)

    def members(self, trainers: int) -> tuple[int, ...]:
        """Return the ids of the trainers that take part in the epoch, increasing.

        Args:
          trainers: number of trainers of the job.
        """
        return tuple(k for k in range(trainers) if k not in self.dropped)

    def has_role(self, name: str) -> bool:
        """Return False for a trainer that the launcher has dropped, and True for other roles."""
        return name not in [f"trainer {k}" for k in self.dropped]

    def dropped_with(self, lost: str) -> tuple[int, ...]:
        """Return the ids of all dropped trainers, if one more trainer is dropped.

        Args:
          lost: name of the lost trainer.

        Example:
          >>> from dtrans.protocol.epochs import Epoch
          >>> Epoch(dropped=(3,)).dropped_with("trainer 1")
          (1, 3)
        """
        return tuple(sorted({*self.dropped, int(lost.removeprefix("trainer "))}))


def is_cut_due_alone(step: int, newest: int | None, every: int) -> bool:
    """Return True if an asynchronous server writes a cut (snapshot of itself) now.

    It writes one about every `every` steps. One message of a trainer may end several steps, so
    `step` may jump over a multiple of `every`.

    Args:
      step: total number of steps of all trainers.
      newest: step of the server's last cut; None before the first cut.
      every: number of steps between two cuts.
    """
    return newest is None or step // every > newest // every


class NewEpoch(Exception):
    """Signal within a process that the job goes back to a snapshot, after another process failed.

    The main loop of a trainer or server catches it, and continues in the new epoch (the time until
    the next failure). Users never see this exception.

    Attributes:
      number: the smallest possible number of the new epoch.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"epoch {number}")
        self.number = number


class ReplacedError(StateError):
    """Error: the launcher counts this process as lost, and has replaced or dropped its role.

    The process ends. It sends servers no reason, because an error of a trainer would end the job.
    """


class Epochs(Protocol):
    """Interface of a role to the launcher, in a job that survives failures.

    The launcher starts a new epoch after each failure. `dtrans.run.net.role_folder` implements the
    interface by files.

    Attributes:
      incarnation: number of the epoch in which the role's process was started.
    """

    incarnation: int

    def current(self) -> Epoch:
        """Return the current epoch (the time since the last failure of the job)."""

    def enter(self, epoch: Epoch) -> None:
        """Tell the launcher that this role takes part in an epoch (time between two failures)."""

    def leave(self) -> None:
        """Tell the launcher that this role has left the job after its last step."""

    def report_lost(self, epoch: int, role: str, reason: str) -> None:
        """Tell the launcher that this role has lost its connection to another role.

        The launcher ends the other role, and starts a new epoch.

        Args:
          epoch: number of the current epoch (the time since the last failure).
          role: "trainer 1", or "pserver " and its endpoint.
          reason: text of the error.
        """
