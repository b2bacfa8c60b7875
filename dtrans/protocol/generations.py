"""Recovery of a job after the failure of a process: its snapshots, and the generations after them.

    snapshot      copy of the job's state after a step. Each server writes its state, and each
                  trainer the leaves that it computes itself
    generation    part of a job between two events: the failure of a process, or the return of a
                  dropped trainer; it begins at a snapshot

A *role* is a trainer or a server; if its process fails, another process continues the role. Roles
write a snapshot every few steps. When a process is lost, the launcher chooses the newest snapshot
that all roles have written, and starts a new generation that begins there. Live servers load the
snapshot. Live trainers connect again and repeat the steps after the snapshot. Only the lost process
is started again.

The launcher may also drop a lost trainer (`dtrans launch --on-trainer-loss drop`). Within a
generation, the set of trainers does not change. So all servers use the gradients of the same
trainers in a step. With `--on-trainer-loss replace`, the dropped trainer starts again while the
other roles continue. When it is ready, the launcher starts a new generation, in which the trainer
takes part again.

Asynchronous trainers share no step, so each asynchronous server writes separate snapshots. A
surviving server keeps its state, and a lost server continues from its newest snapshot. Each trainer
continues after the last of its steps that a server has received. A trainer that has left the job
need not come back while all servers survive, because they have received all of its steps. A
generation has a list of the trainers that have left, and servers do not wait for them.

Synchronous servers can also write a *snapshot at a failure*. The launcher then announces that the
generation ends. Each live server stops, and writes its states after its newest steps. A trainer
begins a step only after all servers have completed the step before. So servers differ by at most
one step, and the two newest states of each server contain a common step. In a job with tables,
trainers may evict rows after a step. A state after this step may lack these evictions, unless a
server knows that a trainer has begun the next step. Without this knowledge, the job does not
continue from the state.

A synchronous update is a function of the state and the gradients, so repeated steps have the same
bits. Messages of an older generation are never processed in a newer one: each greeting contains the
generation of its sender.

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
class Generation:
    """Part of a job between two failures, with the snapshot from which it starts.

    After the failure of a process, the launcher starts the next generation: all trainers and
    servers (*roles*) go back to the newest snapshot of the job. A generation also ends when a
    dropped trainer returns.

    Attributes:
      number: number of the generation, from 0.
      snapshot: step of the snapshot at the start of the generation. None if the
        generation starts with the initial state, or with the snapshots of asynchronous servers.
      is_ending: True after a failure, while the launcher waits until servers have written the
        states after their newest steps.
      dropped: ids of the lost trainers that take no part in the generation, increasing.
      lost: names of the lost servers of an ending generation. Other servers write the replicas of
        these servers.
      incarnations: for each trainer, the number of the generation in which its current process was
        started; empty without this information.
      members_since: number of the generation in which the set of trainers last changed.
      left: ids of the asynchronous trainers that left the job before the generation, increasing.
    """

    number: int = 0
    snapshot: int | None = None
    is_ending: bool = False
    dropped: tuple[int, ...] = ()
    lost: tuple[str, ...] = ()
    # Excluded from `==`: the generations that roles read have incarnations, and the launcher's
    # generations have none.
    incarnations: tuple[int, ...] = dataclasses.field(default=(), compare=False)
    members_since: int = 0
    left: tuple[int, ...] = ()

    def next(
        self, snapshot: int | None, dropped: tuple[int, ...], left: tuple[int, ...] = ()
    ) -> Generation:
        """Return the generation after this one.

        Args:
          snapshot: step of the snapshot at the start of the new generation, as for the
            attribute `snapshot`.
          dropped: ids of the lost trainers that take no part in the new generation, increasing.
          left: ids of the asynchronous trainers that have left the job, increasing.

        Example:
          >>> from dtrans.protocol.generations import Generation
          >>> generation = Generation(3).next(20, (1,))
          >>> (generation.number, generation.snapshot, generation.dropped, generation.members_since)
          (4, 20, (1,), 4)
        """
        number, since = self.number + 1, self.members_since
        if dropped != self.dropped:
            since = number
        return Generation(number, snapshot, dropped=dropped, members_since=since, left=left)

    def is_snapshot_due(self, step: int, first: int, every: int) -> bool:
        """Return True if trainers and servers of a synchronous job write a snapshot after a step.

        They write a snapshot every `every` steps, and before the first step of a generation (the
        time between two failures). If the generation starts from a snapshot, they do not write this
        snapshot a second time.

        Args:
          step: number of steps of the job.
          first: number of steps before the generation.
          every: number of steps between two snapshots.
        """
        return step != self.snapshot and (step == first or step % every == 0)

    def members(self, trainers: int) -> tuple[int, ...]:
        """Return the ids of the trainers that take part in the generation, increasing.

        Args:
          trainers: number of trainers of the job.
        """
        return tuple(k for k in range(trainers) if k not in self.dropped)

    def has_role(self, name: str) -> bool:
        """Return False for a trainer that the launcher has dropped; True otherwise."""
        return name not in [f"trainer {k}" for k in self.dropped]

    def dropped_with(self, lost: str) -> tuple[int, ...]:
        """Return the ids of all dropped trainers, if one more trainer is dropped.

        Args:
          lost: name of the lost trainer.

        Example:
          >>> from dtrans.protocol.generations import Generation
          >>> Generation(dropped=(3,)).dropped_with("trainer 1")
          (1, 3)
        """
        return tuple(sorted({*self.dropped, int(lost.removeprefix("trainer "))}))


def is_snapshot_due_alone(step: int, newest: int | None, every: int) -> bool:
    """Return True if an asynchronous server writes a snapshot of itself now.

    It writes one about every `every` steps. One message of a trainer may end several steps, so
    `step` may jump over a multiple of `every`.

    Args:
      step: total number of steps of all trainers.
      newest: step of the server's last snapshot; None before the first snapshot.
      every: number of steps between two snapshots.
    """
    return newest is None or step // every > newest // every


class NewGeneration(Exception):
    """Exception within a process: another process has failed, and the job goes back to a snapshot.

    The main loop of a trainer or server catches it, and continues in the new generation (the time
    until the next failure). Users never see this exception.

    Attributes:
      number: the smallest possible number of the new generation.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"generation {number}")
        self.number = number


class ReplacedError(StateError):
    """Error: the launcher counts this process as lost, and has replaced or dropped it.

    The process ends without a message, because servers would end the job after a trainer's error.
    """


class Generations(Protocol):
    """Interface of a trainer or server (*role*) to the launcher, in a job that survives failures.

    The launcher starts a new generation after each failure. `dtrans.run.net.role_folder` implements
    the interface by files.

    Attributes:
      incarnation: number of the generation in which the role's process was started.
    """

    incarnation: int

    def current(self) -> Generation:
        """Return the current generation (the time since the job's last failure)."""

    def enter(self, generation: Generation) -> None:
        """Tell the launcher that this process takes part in a generation, after a failure."""

    def leave(self) -> None:
        """Tell the launcher that this process has left the job after its last step."""

    def report_lost(self, generation: int, role: str, reason: str) -> None:
        """Tell the launcher that this process has lost its connection to another trainer or server.

        The launcher ends the process of the other one, and starts a new generation.

        Args:
          generation: number of the current generation (the time since the last failure).
          role: "trainer 1", or "pserver " and its endpoint.
          reason: text of the error.
        """
