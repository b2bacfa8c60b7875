"""Synchronous parameter server: each update uses the gradients of all trainers.

    every trainer:  hello                             once
                    recv                              the initial values
                    send..., send_barrier, recv       every step
                    complete                          once

When all trainers have sent `send_barrier`, one compiled call computes the new state, and the server
sends the requested blocks. The server ends when every trainer has sent `complete`. If a trainer
sends `complete` while other trainers continue, the option `on_trainer_exit` of `dtrans.pserver`
determines whether the job fails, and which gradients later updates use.

Optional messages of a trainer:

    before a step:       prefetch...      requests for table rows, for this or a later step
    within a step:       exchange...      values that the server merges over all trainers
    between two steps:   evict            a request to evict table rows, from every trainer

Messages of every other server:

    peer                 once
    partials...          in every step, at every level
    replica...           in every step, if this server stores a copy of the other one's state

An update that reduces over rows of several servers has several phases. Between two phases, the
servers exchange partial results. The server handles messages while it waits for other servers.

Every second, the server tells waiting trainers what they wait for. The job ends with an error if a
trainer or server does not connect, falls silent, or lets others wait beyond the deadline. A message
that violates the protocol is refused and logged, and changes nothing.

Read next: `step_waits` (deadlines), `server_peers` (other servers), `trainer_rounds` (exchanges),
`tables.row_answers` (lookups) and `between_steps` (evictions).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dtrans.errors import PeerError, StateError, WireError
from dtrans.ir.selection import subset
from dtrans.protocol import wire
from dtrans.protocol.buffers import BufferPool
from dtrans.protocol.inbox import Inbox
from dtrans.protocol.server.between_steps import BetweenSteps
from dtrans.protocol.server.replication import NewReplica, Replication, StoredReplicas
from dtrans.protocol.server.server_peers import JointUpdate, ServerPeers
from dtrans.protocol.server.step_waits import StepWaits, TrainerTurn
from dtrans.protocol.server.trainer_exits import TrainerExits
from dtrans.protocol.server.trainer_registry import Say, TrainerRegistry, answer, wanted
from dtrans.protocol.server.trainer_rounds import TrainerRounds
from dtrans.protocol.server_blocks import ServerBlocks, StepUpdate
from dtrans.protocol.tables.row_answers import RowAnswers
from dtrans.protocol.tables.stored_tables import StoredTables


class SyncServer:
    """Handler of the messages of a synchronous server.

    Args:
      served: the server's blocks.
      update: computes the new state from the gradients.
      trainers: the server's trainers.
      say: function that sends a message.
      step: number of updates before the first one.
      epoch: number of the server's epoch.
      replication: replicas of this server; None without replicas.
      new_replica: as for `Replica`.

    Attributes:
      between_steps: called after each update with the number of updates. A server with tables calls
        it when a trainer begins the next step, since trainers may evict rows until then. A server
        that merges results does so, too, since a cut should follow the results of its step.
      merges_results: True if trainers send their results of each step after its update, and this
        server merges them.
      endpoint: endpoint of the server.
      on_trainer_exit: rule for trainers that leave before other trainers do (`TrainerExits`).
      tables: the server's blocks of tables; None if it has none.
      peers: the other servers.
      replicas: copies of other servers' states.
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
        epoch: int = 0,
        replication: Replication | None = None,
        new_replica: NewReplica | None = None,
    ) -> None:
        self.between_steps: Callable[[int], object] | None = None
        self.merges_results = False
        self.endpoint, self.on_trainer_exit = served.endpoint, served.on_trainer_exit
        self.tables: StoredTables | None = None
        self._served, self._update = served, update
        self._trainers, self._say = trainers, say
        self.peers = ServerPeers(
            served.endpoint,
            served.exchanges,
            on_trainer_exit=self.on_trainer_exit,
            plan=trainers.plan,
            epoch=epoch,
            replication=replication,
        )
        self._first = step
        self.replicas = StoredReplicas(
            {} if replication is None else replication.primaries, new_replica
        )
        # True if the update is complete, but the backup lacks inputs, so trainers have no answer
        self._waits_for_backup = False
        self._is_between_steps = self.has_tables
        terms = update, self.peers, trainers, say, step
        backup = None if replication is None else replication.backup
        self._joint = JointUpdate(*terms, backup, self.replicas)
        self._rows = RowAnswers(served, update, trainers, say)
        self._rounds = TrainerRounds(trainers.count)
        self._between = BetweenSteps(served, trainers, say)
        self._exits = TrainerExits(self.on_trainer_exit, trainers)

        pool = BufferPool()
        self._grads = {n: pool.take(n, t.shape, t.dtype) for n, t in served.gradients.items()}
        self._turns = _turns_of(served, self._grads, self._rows, trainers.count)
        waits = (self._joint, self._turns, self._rounds, self._between.evicting)
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
        """True if the server has blocks of tables, whose rows trainers may evict between steps."""
        return bool(self._served.tables)

    @property
    def has_begun_step(self) -> bool:
        """True if a trainer is in the middle of the step after the newest state."""
        return not self._waits_for_backup and any(turn.begun for turn in self._turns.values())

    def newest_states(
        self, lost: Collection[str] = ()
    ) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
        """Yield the newest states of this server, and of its replicas of lost servers.

        Another server may have made a step less than this one, or a step more. If a trainer has
        begun the next step, it has received parameters from all servers. So none has made less.

        Args:
          lost: endpoints of the lost servers.

        Yields:
          The endpoint of the server, the step, and the arrays by name.
        """
        least = self.step if self.has_begun_step else self.step - 1
        states: dict[int, Mapping[str, Any]] = {self.step: self.state}
        if self._update.old is not None:
            states[self.step - 1] = self._update.old
            if self.lacks_results:
                # Live trainers would go forward to the newest step, and never receive its results.
                del states[self.step]
        by_endpoint = {self.endpoint: states}
        for endpoint in lost:
            by_endpoint[endpoint] = self.replicas.newest(endpoint)
        for endpoint, found in by_endpoint.items():
            for step, state in found.items():
                if step >= least:
                    yield endpoint, step, state

    @property
    def has_merged_results(self) -> bool:
        """True if the results of the newest step are merged, or the epoch has no step yet."""
        return self.step == self._first or self._rounds.has_merged_results(self.step)

    @property
    def lacks_results(self) -> bool:
        """True if this server merges the results of the newest step, and has not sent them yet."""
        return self.merges_results and not self.has_merged_results

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
        turn = _open(self._in_turn(k, message), k, self.step, "gradients of")
        self._begin_step(k)
        if not turn.grads.begun:
            self._rows.begin(k, message, turn.grads)
        turn.grads.take(message)

    def send_barrier(self, k: int, message: wire.Message) -> None:
        """Record that trainer k has sent its gradients; start the update if all trainers have."""
        turn = self._in_turn(k, message)
        if turn.at_barrier:
            raise WireError(f"trainer {k} sent a second `send_barrier` in step {self.step}")
        _check_complete(k, turn.grads, self.step)
        turn.at_barrier = True
        self._exits.check(self._trainers.left, [k], self.step)
        self._step_if_all_sent()

    def exchange(self, k: int, message: wire.Message) -> None:
        """Receive trainer k's values of a round. If all trainers have sent values, answer all."""
        _open(self._in_turn(k, message), k, self.step, "an exchange of")
        self._rounds.take(k, message)
        self._exits.check(self._trainers.left, [k], self.step)
        self._exchange_if_all_sent()

    def prefetch(self, k: int, message: wire.Message) -> None:
        """Handle a request for rows of a table, for this step or for a later step."""
        turn = _open(self._in_turn(k, message), k, self.step, "a `prefetch` of")
        trains_now = message["train"] and "ahead" not in message.fields
        if trains_now:
            self._begin_step(k)
        self._rows.take(k, message, turn.grads)
        turn.looks_up |= trains_now

    def evict(self, k: int, message: wire.Message) -> None:
        """Record a request to evict rows. If all trainers have requested it, evict the rows."""
        self._in_turn(k, message)
        in_step = [x for x in self._trainers.present if self._turns[x].begun]
        self._between.evict(k, message, self.step, in_step)
        self._exits.check(self._trainers.left, [k], self.step)
        self._evict_if_all_said()

    def check_between(self, k: int, message: wire.Message) -> None:
        """Raise WireError if trainer k has ended its part of this step, or is in another step."""
        _open(self._in_turn(k, message), k, self.step, f"a `{message.op}` in")

    def saving(self, k: int, message: wire.Message) -> None:
        """Record that trainer k waits for a checkpoint, so that it does not count as late."""
        self._in_turn(k, message)
        self._waits.note_saving(k)

    def recv(self, k: int, message: wire.Message) -> None:
        """Handle a request for parameters: answer now, or after the update if one is due."""
        t, turn, step = self._trainers.known[k], self._turns[k], message["step"]
        _check_fields(message)
        wants = t.wants
        if "blocks" in message.fields:
            wants = wanted(self._served, k, message["blocks"])
        if step not in (self.step, self.step + 1) or (step > self.step and not turn.at_barrier):
            raise _other_step(self, message)
        t.wants, turn.waits = wants, True
        if step == self.step and not self._waits_for_backup:
            self._answer(k)

    def complete(self, k: int, message: wire.Message) -> None:
        """Handle the message that trainer k has made its last step."""
        t, turn = self._trainers.known[k], self._turns[k]
        t.done = True
        self._rows.forget_trainer(k)
        self._say(t.address, "goodbye")
        if turn.at_barrier or turn.grads.begun or self._rounds.begun(k):
            after = ", after its send_barrier" if turn.at_barrier else ""
            raise PeerError(f"trainer {k} closed in the middle of step {self.step + 1}{after}")
        self._exits.check([k], set(self._waits.waiting()) - {k}, self.step)
        if self.step == self._first:
            # Before the first update, the memory of this trainer's gradients may be
            # uninitialized, and with "paddle" the update reads it.
            self._forget([k])
        self._evict_if_all_said()
        self._step_if_all_sent()
        self._exchange_if_all_sent()

    def abort(self, k: int, message: wire.Message) -> None:
        """Handle the failure of trainer k, which ends the job."""
        self._trainers.known[k].done = self._trainers.known[k].failed = True
        raise PeerError(f"trainer {k} failed: {message['reason']}")

    def _begin_step(self, k: int) -> None:
        """Check that trainer k may begin the current step, or continue it."""
        self._between.check_step(k, self.step)
        self._end_between_steps()

    def _end_between_steps(self) -> None:
        if self._is_between_steps and self.between_steps is not None:
            self.between_steps(self.step)
        self._is_between_steps = False

    def _in_turn(self, k: int, message: wire.Message) -> TrainerTurn:
        """Return the progress of trainer k; raise WireError if `message` is from another step."""
        if message["step"] != self.step:
            raise _other_step(self, message)
        return self._turns[k]

    # -- actions that need all trainers ----------------------------------------------------------

    def _step_if_all_sent(self) -> None:
        """Start the update if all trainers have sent `send_barrier`."""
        at_barrier = [k for k, turn in self._turns.items() if turn.at_barrier]
        if self._trainers.all_said(at_barrier) and not self._waits_for_backup:
            self._make_step()

    def _exchange_if_all_sent(self) -> None:
        """Send the merged values of the open round if all trainers have sent their values."""
        if self._trainers.all_said(self._rounds.waiting()):
            self._waits.restart()
            self._rounds.carry_out(self._trainers, self._say)

    def _evict_if_all_said(self) -> None:
        """Evict rows if all trainers have requested the eviction."""
        if self._trainers.all_said(self._between.evicting):
            self._waits.restart()
            self._rows.forget_table(self._between.carry_out(self.tables))

    # -- updates ---------------------------------------------------------------------------------

    def _make_step(self) -> None:
        """Start the update with the gradients of all counted trainers (`TrainerExits.counted`)."""
        self._end_between_steps()  # a step may have neither lookups nor gradients
        counted = self._exits.counted()
        _check_arguments(self._served.arguments, self._grads, sorted(counted), self.step)
        inboxes = {k: turn.grads for k, turn in self._turns.items()}
        grads = {**self._grads, **self._rows.gradients(inboxes, counted)}
        self._continue(self._joint.begin(grads, counted))

    def take_peer(self, address: bytes, message: wire.Message) -> bool:
        """Handle a message if its sender is another server. Return False for other senders."""
        if not self._joint.take(address, message):
            return False
        if self._joint.can_go_on:
            self._continue(self._joint.go_on())
        if not self._waits_for_backup:
            self.replicas.apply(self.step)
        return True

    def replicate_state(self) -> None:
        """Send the state at the beginning of an epoch to the backup, if there is one."""
        self._joint.replicate_state()

    def heard_backup(self) -> None:
        """Answer trainers if they waited for the backup, which now has the step's inputs."""
        if self._waits_for_backup and self._joint.is_replicated:
            self._finish()

    def _continue(self, complete: bool) -> None:
        """End the step if its update is complete; otherwise wait for other servers."""
        self._waits.restart()
        if complete and self._joint.is_replicated:
            self._finish()
        elif complete:
            self._waits_for_backup = True

    def _finish(self) -> None:
        """Start the next step, and answer the trainers that wait for parameters."""
        self._waits_for_backup = False
        for turn in self._turns.values():
            turn.at_barrier = turn.looks_up = False
            turn.grads.clear()
        self._forget(self._trainers.left)
        self._rows.send_changed(self.step)
        for k in self._trainers.known:
            if self._turns[k].waits:
                self._answer(k)
        self._is_between_steps = True
        if not self.has_tables and not self.merges_results:
            self._end_between_steps()
        self.replicas.apply(self.step)

    def _forget(self, trainers: Collection[int]) -> None:
        """Set gradients of trainers that have left to zero if `TrainerExits.spend` says so."""
        for k in self._exits.spend(trainers):
            grads = self._turns[k].grads
            for x in grads.memory.values():
                x.fill(0)
            self._rows.requests.used(k, grads)

    def _answer(self, k: int) -> None:
        self._turns[k].waits = False
        answer(self._say, self._trainers.known[k], self.step, self._update.values)


def _turns_of(
    served: ServerBlocks, grads: Mapping[str, np.ndarray], rows: RowAnswers, trainers: int
) -> dict[int, TrainerTurn]:
    """Return a map from the id of each trainer to its progress, with an empty inbox."""
    row_gradients: set[str] = set()
    for table in served.tables.values():
        row_gradients.update(table.gradients.values())
    turns = {}
    for k in range(trainers):
        names = {sent[k] for sent in served.sent} - row_gradients
        memory = subset(grads, names) | rows.requests.memory_of(k)
        turns[k] = TrainerTurn(Inbox(memory, _unknown_gradient(k, served.endpoint)))
    return turns


def _unknown_gradient(k: int, endpoint: str) -> Callable[[str], str]:
    """Return a function that returns the error text for the name of an unknown gradient."""
    return lambda name: f"{name} is not a gradient that trainer {k} sends to pserver {endpoint}"


def _open(turn: TrainerTurn, k: int, step: int, what: str) -> TrainerTurn:
    """Return the progress of trainer k, after a check that it has not sent `send_barrier`.

    Args:
      turn: the progress.
      k: the trainer.
      step: number of complete updates.
      what: the trainer's message in the error, such as "gradients of".

    Raises:
      WireError: trainer k has sent `send_barrier` in this step.
    """
    if turn.at_barrier:
        raise WireError(
            f"trainer {k} sent {what} step {step} after its `send_barrier`, which must come last"
        )
    return turn


def _other_step(server: SyncServer, message: wire.Message) -> WireError:
    at = f"pserver {server.endpoint} is at step {server.step}"
    return WireError(f"a `{message.op}` message of step {message['step']} arrived, but {at}")


def _check_fields(message: wire.Message) -> None:
    """Raise WireError if a `recv` message has a field of asynchronous trainers."""
    for name in ("changed", "count"):
        if name in message.fields:
            raise WireError(
                f"a `recv` message with the field `{name}`, which only asynchronous servers accept"
            )


def _check_complete(k: int, grads: Inbox, step: int) -> None:
    """Raise WireError if trainer k sends `send_barrier` before its gradients are complete."""
    short = sorted(grads.missing())
    if short:
        raise WireError(
            f"trainer {k} sent `send_barrier` of step {step} before gradient {short[0]} was "
            f"complete ({grads.progress(short[0])})"
        )


def _check_arguments(
    arguments: Mapping[str, Mapping[int, str]],
    grads: Mapping[str, np.ndarray],
    trainers: Sequence[int],
    step: int,
) -> None:
    """Raise PeerError if trainers sent different values of a step argument that the update reads.

    Args:
      arguments: maps each step argument to a dict. The dict maps the id of a trainer to the name
        under which this trainer sends the argument.
      grads: received arrays by name.
      trainers: sorted ids of the trainers to compare.
      step: number of complete updates.
    """
    for argument, sent in arguments.items():
        first, *others = trainers
        value = grads[sent[first]]
        for k in others:
            other = grads[sent[k]]
            if other.tobytes() != value.tobytes():
                raise PeerError(
                    f"{argument} of step {step + 1} is {wire.brief(value.tolist())} on trainer "
                    f"{first}, and {wire.brief(other.tolist())} on trainer {k}; the update reads "
                    "it, so all trainers must pass the same value"
                )
