"""Waits of a synchronous server's trainers, with deadlines and texts for the log."""

from __future__ import annotations

from collections.abc import Collection

from dtrans.errors import DeadlineError, LostPeerError
from dtrans.protocol.server.joint_update import JointUpdate
from dtrans.protocol.server.trainer_registry import Say, TrainerRegistry, log, named
from dtrans.protocol.server.trainer_rounds import TrainerRounds
from dtrans.protocol.server.trainer_turns import TrainerTurns
from dtrans.protocol.wait_reminder import WaitReminder


class StepWaits:
    """Waits of one server's trainers.

    Args:
      trainers: the server's trainers.
      joint: the update, which may wait for other servers.
      turns: progress of each trainer in the current step.
      rounds: exchanges between the trainers.
      evicting: ids of the trainers that wait for an eviction; the caller updates the collection.
      say: function that sends a message.
    """

    def __init__(
        self,
        trainers: TrainerRegistry,
        joint: JointUpdate,
        turns: TrainerTurns,
        rounds: TrainerRounds,
        evicting: Collection[int],
        say: Say,
    ) -> None:
        self._trainers, self._joint, self._turns = trainers, joint, turns
        self._rounds, self._evicting, self._say = rounds, evicting, say
        self._since: float | None = None
        self._reminder = WaitReminder()
        # Ids of the trainers that have sent `saving` since the last call of `look`
        self._saving: set[int] = set()

    def restart(self) -> None:
        """End the current wait, so that the next wait has the full deadline."""
        self._since = None

    def note_saving(self, k: int) -> None:
        """Record that trainer k waits for a checkpoint, so that the deadline starts again."""
        self._saving.add(k)

    def waiting(self) -> list[int]:
        """Return the ids of the trainers that wait for the update, a round or an eviction."""
        at_barrier = [k for k in self._trainers.known if self._turns.by_trainer[k].at_barrier]
        return at_barrier + self._rounds.waiting() + list(self._evicting)

    def doing(self, k: int) -> str:
        """Return the progress of trainer k in this step, for the job's status."""
        if k not in self._trainers.known:
            return "not here yet"
        if k in self._saving:
            return "waiting for a checkpoint to be written"
        if k in self.waiting():
            return "waiting for the update"
        return self._turns.by_trainer[k].grads.phase()

    def awaited(self) -> str:
        """Describe what the trainers wait for; the text is empty if no trainer waits.

        For example: "gradients of step 3 from trainer 1 (computing)".
        """
        waiting, step = self.waiting(), self._joint.step + 1
        if not waiting:
            return ""
        if self._joint.exchange is not None:
            servers = self._joint.peers.named(self._joint.missing())
            level = self._joint.exchange.level
            return f"partial results of step {step}, level {level}, from {servers}"
        if self._joint.missing():
            servers = self._joint.peers.named(self._joint.missing())
            return f"the replica of step {step - 1} on {servers}"
        late = [f"trainer {k} ({self.doing(k)})" for k in self._trainers.due(waiting)]
        return f"{self._due()} of step {step} from {', '.join(late)}"

    def _due(self) -> str:
        if self._evicting:
            return "job.tables.evict before gradients"
        number = self._rounds.number
        return "gradients" if number is None else f"the exchange of round {number}"

    def look(self, now: float) -> None:
        """Check the deadlines, and tell each waiting trainer what it waits for.

        Raises:
          LostPeerError: a trainer or a server is lost.
          DeadlineError: a wait is longer than the deadline, or a trainer did not connect in time.
        """
        for k, why in self._trainers.lost(now).items():
            raise LostPeerError(f"{why}, in step {self._joint.step + 1}", f"trainer {k}")
        absent, waiting = self._trainers.absent(now), self.waiting()
        if waiting:
            self._look_at_step(now, waiting, says=not absent)
        else:
            self._look_at_end(now)
        self._saving.clear()

    def _look_at_step(self, now: float, waiting: list[int], *, says: bool) -> None:
        """Check the deadline of a wait, and send `waiting` messages.

        Args:
          now: the current time, in seconds.
          waiting: ids of the trainers that wait.
          says: True to log the wait. False if `TrainerRegistry` already logs trainers that have not
            connected.
        """
        what = self.awaited()
        if self._since is None or self._saving.difference(waiting):
            self._since = now
        self._reminder.begin(self._since)
        self._joint.peers.check(self._joint.missing(), what)

        waited, endpoint = now - self._since, self._trainers.endpoint
        if waited > self._trainers.deadline:
            raise DeadlineError(
                f"pserver {endpoint} and {named(waiting)} waited {waited:.1f} s for {what}"
            )
        if says and self._reminder.due(now):
            log.warning("pserver %s has waited %.0f s for %s", endpoint, waited, what)
        for k in waiting:
            reason = f"{waited:.1f} s for {what}"
            self._say(self._trainers.known[k].address, "waiting", reason=reason)

    def _look_at_end(self, now: float) -> None:
        """Check the deadline of the last wait, after all trainers have left.

        The server still waits until all other servers have greeted it. Otherwise the others would
        greet the next job's server.
        """
        peers = self._joint.peers
        if not (self._trainers.served and peers.unsettled):
            self._since = None
            return
        if self._since is None:
            self._since = now
        waited = now - self._since
        if waited > self._trainers.deadline:
            raise DeadlineError(
                f"pserver {self._trainers.endpoint}, whose trainers have all left, waited "
                f"{waited:.1f} s for a greeting of {peers.named(peers.unsettled)}"
            )
