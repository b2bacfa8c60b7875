"""Newest states of a synchronous server, which the server writes when another process fails.

Each state is the server's piece of a snapshot of the job after a step. Servers complete a step at
different times: when a process fails, two servers may differ by one step. So each server writes the
states after its two newest steps. The job continues from the newest step for which all servers have
written their states.

Trainers may evict rows of tables after a step. A state is *early* if it may lack these evictions:
its server does not know that a trainer has begun the next step. The job continues from such states
only if another server knows that this step has begun.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from dtrans.protocol.server.joint_update import JointUpdate
from dtrans.protocol.server.trainer_rounds import TrainerRounds
from dtrans.protocol.server.trainer_turns import TrainerTurns
from dtrans.protocol.server_blocks import StepUpdate


class NewestStates:
    """Two newest states of one server, and of the servers for which it stores copies of the state.

    Args:
      endpoint: endpoint of the server.
      update: the server's update, which stores its two newest states.
      joint: the progress of the update, and the replicas of other servers.
      turns: progress of the trainers in the current step.
      rounds: exchanges between trainers; they may also merge results of each step, such as the
        loss.
      has_tables: True if the job has embedding tables. Trainers may evict their rows between steps.
    """

    def __init__(
        self,
        endpoint: str,
        update: StepUpdate,
        joint: JointUpdate,
        turns: TrainerTurns,
        rounds: TrainerRounds,
        *,
        has_tables: bool = False,
    ) -> None:
        self._endpoint, self._update, self._joint = endpoint, update, joint
        self._turns, self._rounds = turns, rounds
        self._first, self._has_tables = joint.step, has_tables

    def states(
        self, lost: Collection[str] = ()
    ) -> Iterator[tuple[str, int, Mapping[str, Any], bool]]:
        """Yield the newest states of this server, and of its replicas of lost servers.

        If a trainer has begun the next step, it has received parameters from all servers. So all
        servers have made the newest step of this server, and earlier states are not needed.

        Args:
          lost: endpoints of the lost servers.

        Yields:
          The endpoint of the server, the step, the arrays by name, and True for an early state.
        """
        newest = self._joint.step
        begun = newest if self.has_begun_step else newest - 1
        least = begun
        states: dict[int, Mapping[str, Any]] = {newest: self._update.newest()}
        if self._update.old is not None:
            states[newest - 1] = self._update.old
            if self.lacks_results:
                # Leave out the newest state: trainers would continue after its step, and never
                # receive the results of this step.
                del states[newest]
        by_endpoint = {self._endpoint: states}
        for endpoint in lost:
            by_endpoint[endpoint] = self._joint.replicas.newest(endpoint)
        for endpoint, found in by_endpoint.items():
            for step, state in found.items():
                # An early state may lack evictions after its step. Only the newest state can be
                # early: a server updates a state only after all trainers have begun the next step.
                is_early = self._has_tables and step == max(found) and step > begun
                if step >= least:
                    yield endpoint, step, state, is_early

    @property
    def has_begun_step(self) -> bool:
        """True if a trainer is in the middle of the step after the newest state."""
        return not self._joint.waits_for_backup and bool(self._turns.begun)

    @property
    def has_merged_results(self) -> bool:
        """True if the trainers' results (such as the loss) of the newest step are merged.

        Also True before the first step.
        """
        step = self._joint.step
        return step == self._first or self._rounds.has_merged_results(step)

    @property
    def lacks_results(self) -> bool:
        """True if this server must still send merged results of the newest step to trainers."""
        return self._rounds.merges_results and not self.has_merged_results
