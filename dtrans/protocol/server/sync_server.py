"""Synchronous parameter server: each update uses the gradients of all trainers.

    every trainer:  hello                             once
                    recv                              the initial values
                    send..., send_barrier, recv       every step
                    complete                          once

When all trainers have sent `send_barrier`, the server computes the new state, and sends the
requested blocks. If a `recv` precedes the gradients, the server sends blocks earlier, when the
gradients of all trainers for these blocks have arrived (`trainer_turns`). The server ends when
every trainer has sent `complete`. If a trainer sends `complete` while other trainers continue, the
option `on_trainer_exit` of `dtrans.pserver` determines whether the job fails, and which gradients
later updates use.

Optional messages of a trainer:

    before a step:       prefetch...      requests for table rows, for this or a later step
    within a step:       exchange...      values that the server merges over all trainers
    between two steps:   evict            a request to evict table rows, from every trainer

Messages of every other server:

    peer                 once
    partials...          in every step, at every level
    replica...           in every step, if this server stores a copy of that server's state

An update that reduces over rows of several servers has several phases. Between two phases, the
servers exchange partial results. The server handles messages while it waits for other servers.

Every second, the server tells waiting trainers what they wait for. The job ends with an error if a
trainer or server does not connect, falls silent, or lets others wait beyond the deadline. A message
that violates the protocol is refused and logged, and changes nothing.

Read next: `trainer_turns` (gradients and answers), `joint_update` (other servers), `step_waits`
(deadlines), `newest_states` (snapshots at a failure), `trainer_rounds` (exchanges),
`tables.row_answers` (lookups) and `between_steps` (evictions).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dtrans.errors import PeerError, StateError, WireError
from dtrans.protocol import wire
from dtrans.protocol.server.between_steps import BetweenSteps
from dtrans.protocol.server.joint_update import JointUpdate
from dtrans.protocol.server.newest_states import NewestStates
from dtrans.protocol.server.replication import NewReplica, Replication
from dtrans.protocol.server.server_peers import ServerPeers
from dtrans.protocol.server.step_waits import StepWaits
from dtrans.protocol.server.trainer_exits import TrainerExits
from dtrans.protocol.server.trainer_registry import Say, TrainerRegistry, wanted
from dtrans.protocol.server.trainer_rounds import TrainerRounds
from dtrans.protocol.server.trainer_turns import TrainerTurn, TrainerTurns
from dtrans.protocol.server_blocks import ServerBlocks, StepUpdate
from dtrans.protocol.tables.row_answers import RowAnswers
from dtrans.protocol.tables.stored_tables import StoredTables


class SyncServer:
    """Handler of the messages of a synchronous server.

    Args:
      served: description of the server's arrays and messages.
      update: computes the new state from the gradients.
      trainers: the server's trainers.
      say: function that sends a message.
      step: number of updates that the state already contains.
      generation: number of the server's generation.
      replication: the servers that store copies of each other's states (replicas); None without
        replicas.
      new_replica: function that creates the update for a copy of another server's state
        (`Replica`).
      job_has_tables: True if trainers may evict rows of tables, on any server of the job.

    Attributes:
      between_steps: function that is called after each update, with the number of updates. If
        trainers may evict rows, or the server merges results such as the loss, the call is delayed
        until a trainer begins the next step.
      endpoint: endpoint of the server.
      on_trainer_exit: rule for trainers that leave before other trainers do (`TrainerExits`).
      tables: the server's blocks of tables; None if it has none.
      peers: the other servers.
      rounds: exchanges between trainers.
      newest: newest states, for snapshots at the failure of a process.
    """

    word, idle = "synchronous", "serving"

    def __init__(
        self,
        served: ServerBlocks,
        update: StepUpdate,
        trainers: TrainerRegistry,
        say: Say,
        *,
        step: int = 0,
        generation: int = 0,
        replication: Replication | None = None,
        new_replica: NewReplica | None = None,
        job_has_tables: bool = False,
    ) -> None:
        self.between_steps: Callable[[int], object] | None = None
        self.endpoint, self.on_trainer_exit = served.endpoint, served.on_trainer_exit
        self.tables: StoredTables | None = None
        self._served, self._update, self._trainers, self._say = served, update, trainers, say
        self._first, self._job_has_tables = step, job_has_tables
        self._is_between_steps = self.has_tables
        self._rows = RowAnswers(served, update, trainers, say)
        self._exits = TrainerExits(self.on_trainer_exit, trainers)
        self._turns = TrainerTurns(served, update, trainers, self._rows, self._exits, say)
        self.rounds = TrainerRounds(trainers.count)
        self.peers = ServerPeers(
            served.endpoint,
            served.exchanges,
            on_trainer_exit=self.on_trainer_exit,
            plan=trainers.plan,
            generation=generation,
            replication=replication,
        )
        terms = update, self.peers, trainers, say, step
        self._joint = JointUpdate(*terms, replication, new_replica)
        self._between = BetweenSteps(served, trainers, self._joint, say)
        parts = served.endpoint, update, self._joint, self._turns, self.rounds
        self.newest = NewestStates(*parts, has_tables=self.has_tables)
        waits = (self._joint, self._turns, self.rounds, self._between.evicting)
        self._waits = StepWaits(trainers, *waits, say)

    # -- status ----------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Number of complete updates."""
        return self._joint.step

    @property
    def state(self) -> dict[str, Any]:
        """The arrays of the state, by name."""
        return self._update.state

    @property
    def has_tables(self) -> bool:
        """True if trainers may evict rows of tables between steps."""
        return self._job_has_tables or bool(self._served.tables)

    def step_count(self) -> int:
        """Return the number of complete updates; raise StateError during an update."""
        if self._joint.exchange is not None:
            raise StateError(
                f"the update of step {self.step + 1} is incomplete: it waits for other servers"
            )
        return self.step

    def progress(self) -> dict[int, int]:
        """Return a map from the id of each connected trainer to the number of its steps."""
        return dict.fromkeys(self._trainers.known, self.step)

    def count_of(self, k: int) -> None:
        """Return None, because a trainer's number of steps is the server's step."""

    def staleness(self, k: int) -> None:
        """Return None, because the gradients of synchronous trainers are never stale."""

    def has_begun(self, k: int) -> bool:
        """Return True if trainer k has sent the first message of its next step."""
        return self._turns.by_trainer[k].begun

    def doing(self, k: int) -> str:
        """Return the progress of trainer k in the current step, for the job's status."""
        return self._waits.doing(k)

    def awaited(self) -> str:
        """Describe what the waiting trainers wait for; the text is empty if no trainer waits."""
        return self._waits.awaited()

    def look(self, now: float) -> None:
        """Check deadlines, and tell waiting trainers what they wait for. See `StepWaits.look`."""
        self._waits.look(now)

    # -- messages of trainers --------------------------------------------------------------------

    def send(self, k: int, message: wire.Message) -> None:
        """Receive gradients of trainer k."""
        self._open_turn(k, message, "gradients of")
        self._begin_step(k)
        self._turns.take(k, message)
        self._turns.update_parts(message, self.step)

    def send_barrier(self, k: int, message: wire.Message) -> None:
        """Record trainer k's `send_barrier`; start the update if all trainers have sent theirs."""
        self._check_step(message)
        self._turns.reach_barrier(k, self.step)
        self._exits.check(self._trainers.left, [k], self.step)
        self._step_if_all_sent()

    def exchange(self, k: int, message: wire.Message) -> None:
        """Receive trainer k's values of a round; answer all trainers when all have sent values."""
        self._open_turn(k, message, "an exchange of")
        self.rounds.take(k, message)
        self._exits.check(self._trainers.left, [k], self.step)
        self._exchange_if_all_sent()

    def prefetch(self, k: int, message: wire.Message) -> None:
        """Handle a request for rows of tables, for this step or for a later step."""
        turn = self._open_turn(k, message, "a `prefetch` of")
        trains_now = message["train"] and "ahead" not in message.fields
        if trains_now:
            self._begin_step(k)
        self._rows.take(k, message, turn.grads)
        turn.looks_up |= trains_now

    def evict(self, k: int, message: wire.Message) -> None:
        """Record a request to evict rows. If all trainers have requested it, evict the rows."""
        self._check_step(message)
        in_step = [x for x in self._trainers.present if self._turns.by_trainer[x].begun]
        self._between.evict(k, message, self.step, in_step)
        self._exits.check(self._trainers.left, [k], self.step)
        self._evict_if_all_said()

    def check_between(self, k: int, message: wire.Message) -> None:
        """Raise WireError if trainer k waits for this step's update, or is in another step."""
        self._open_turn(k, message, f"a `{message.op}` in")

    def saving(self, k: int, message: wire.Message) -> None:
        """Record that trainer k waits for a checkpoint, so that its deadline starts again."""
        self._check_step(message)
        self._waits.note_saving(k)

    def recv(self, k: int, message: wire.Message) -> None:
        """Handle a request for parameters: answer now, or after the update if one is due.

        A request for the parameters of the next step may precede the gradients of this step.
        """
        t, turn, step = self._trainers.known[k], self._turns.by_trainer[k], message["step"]
        wants = _requested(self._served, k, message, t.wants)
        is_early = step > self.step and not turn.at_barrier
        is_late = turn.requested or (is_early and turn.grads.begun)
        if is_late or step not in (self.step, self.step + 1):
            raise _other_step(self, message)
        if is_early:
            self._begin_step(k)
            turn.requested = True
        t.wants, turn.waits = wants, True
        if step == self.step and not self._joint.waits_for_backup:
            self._turns.answer(k, self.step)

    def complete(self, k: int, message: wire.Message) -> None:
        """Handle `complete`: trainer k has made its last step."""
        t, turn = self._trainers.known[k], self._turns.by_trainer[k]
        t.done, t.left_at = True, self.step
        self._rows.forget_trainer(k)
        self._say(t.address, "goodbye")
        if turn.at_barrier or turn.requested or turn.grads.begun or self.rounds.begun(k):
            after = ", after its send_barrier" if turn.at_barrier else ""
            raise PeerError(f"trainer {k} closed in the middle of step {self.step + 1}{after}")
        self._exits.check([k], set(self._waits.waiting()) - {k}, self.step)
        if self.step == self._first:
            # Before the first update, the memory of this trainer's gradients may be
            # uninitialized, and with "paddle" the update reads it.
            self._turns.forget([k])
        self._evict_if_all_said()
        self._step_if_all_sent()
        self._exchange_if_all_sent()

    def abort(self, k: int, message: wire.Message) -> None:
        """Handle the failure of trainer k, which ends the job."""
        self._trainers.known[k].done = self._trainers.known[k].failed = True
        raise PeerError(f"trainer {k} failed: {message['reason']}")

    def _begin_step(self, k: int) -> None:
        """Begin the current step; raise PeerError if a trainer still waits for an eviction."""
        self._between.check_step(k, self.step)
        self._end_between_steps()

    def _end_between_steps(self) -> None:
        if self._is_between_steps and self.between_steps is not None:
            self.between_steps(self.step)
        self._is_between_steps = False

    def _check_step(self, message: wire.Message) -> None:
        """Raise WireError if `message` is from another step."""
        if message["step"] != self.step:
            raise _other_step(self, message)

    def _open_turn(self, k: int, message: wire.Message, what: str) -> TrainerTurn:
        """Return trainer k's progress in the step; raise WireError if `message` is too late."""
        self._check_step(message)
        turn = self._turns.by_trainer[k]
        if turn.at_barrier:
            raise WireError(
                f"trainer {k} sent {what} step {self.step} after its `send_barrier`, which must "
                "come last"
            )
        return turn

    # -- actions that need all trainers ----------------------------------------------------------

    def _step_if_all_sent(self) -> None:
        """Start the update if all trainers have sent `send_barrier`."""
        all_sent = self._trainers.all_said(self._turns.at_barrier)
        if all_sent and not self._joint.waits_for_backup:
            self._make_step()

    def _exchange_if_all_sent(self) -> None:
        """Send the merged values of the open round if all trainers have sent their values."""
        if self._trainers.all_said(self.rounds.waiting()):
            self._waits.restart()
            self.rounds.carry_out(self._trainers, self._say)

    def _evict_if_all_said(self) -> None:
        """Evict rows if all trainers have requested the eviction."""
        all_said = self._trainers.all_said(self._between.evicting)
        if all_said and not self._joint.waits_for_backup:
            self._waits.restart()
            self._rows.forget_table(self._between.carry_out(self.tables))

    # -- updates ---------------------------------------------------------------------------------

    def _make_step(self) -> None:
        """Start the update with the gradients of the step."""
        # lookups and gradients also end the time between steps, but a step may have neither
        self._end_between_steps()
        self._continue(self._joint.begin(*self._turns.inputs(self.step)))

    def take_peer(self, address: bytes, message: wire.Message) -> bool:
        """Handle a message if its sender is another server. Return False for other senders."""
        if not self._joint.take(address, message):
            return False
        if self._joint.can_go_on:
            self._continue(self._joint.go_on())
        if not self._joint.waits_for_backup:
            self._joint.replicas.apply(self.step)
        return True

    def replicate_state(self) -> None:
        """Send the state to the server that stores a copy of it, if there is one.

        This is called at the start of a generation (time between two failures of the job).
        """
        self._joint.replicate_state()

    def heard_backup(self) -> None:
        """Answer the trainers if they waited only for the backup's acknowledgement."""
        if self._joint.end_wait_for_backup():
            (self._between.answer if self._between.evicting else self._finish)()

    def _continue(self, complete: bool) -> None:
        """End the step if the server may answer its trainers; otherwise wait for other servers."""
        self._waits.restart()
        if complete:
            self._finish()

    def _finish(self) -> None:
        """Answer the trainers that wait for parameters, and start the next step."""
        self._turns.end_step(self.step)
        self._is_between_steps = True
        if not self.has_tables and not self.rounds.merges_results:
            self._end_between_steps()
        self._joint.replicas.apply(self.step)


def _other_step(server: SyncServer, message: wire.Message) -> WireError:
    at = f"pserver {server.endpoint} is at step {server.step}"
    return WireError(f"a `{message.op}` message of step {message['step']} arrived, but {at}")


def _requested(
    served: ServerBlocks, k: int, message: wire.Message, before: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the names of the blocks that a `recv` message of trainer k requests.

    Args:
      served: the server's blocks.
      k: id of the trainer.
      message: the request.
      before: names of the trainer's previous request, which a request without names repeats.

    Raises:
      WireError: the message has a field of asynchronous trainers, or an unknown block.
    """
    for name in ("changed", "count"):
        if name in message.fields:
            raise WireError(
                f"a `recv` message with the field `{name}`, which only asynchronous servers accept"
            )
    if "blocks" not in message.fields:
        return before
    return wanted(served, k, message["blocks"])
