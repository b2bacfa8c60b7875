"""Connections of one trainer to its servers: opened on first use, closed at the end of the job.

The trainer's id is a parameter of equations in its programs. So the trainer opens connections when
the first of these equations runs.
"""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Collection, Iterator, Mapping
from typing import TypeVar

from dtrans._jax import JaxprEqn
from dtrans.checkpoint.pserver_state import TRAINER
from dtrans.checkpoint.runs import new_run, note
from dtrans.endpoints import split_endpoint
from dtrans.errors import ConfigError, LostPeerError, PeerError
from dtrans.protocol.generations import Generation, Generations, NewGeneration
from dtrans.protocol.trainer.generation_member import GenerationMember
from dtrans.protocol.trainer.operation import Operation
from dtrans.protocol.trainer.server_link import FailureReport, OperationWait, ServerLink
from dtrans.protocol.trainer.trainer_steps import TrainerSteps, leave
from dtrans.protocol.transport import LINGER, RETRY
from dtrans.run.net.keys import Keys
from dtrans.run.net.zmq_transport import ZmqTransport


T = TypeVar("T")


class ServerConnections:
    """Connections of one trainer process to its servers.

    Args:
      deadline: seconds that a server's answer may take.
      patience: seconds without a message after which a server counts as dead.
      wait_port: True to wait for servers that do not listen yet; False to raise PeerError.
      encryption: the option `transport_encryption` of `Executor`.
      generations: the job's generations (periods between two failures); None if the launcher does
        not restart processes.
      generation: smallest number of a generation in which this trainer may take part.

    Attributes:
      steps: the trainer's side of the protocol. It sends messages over these connections.
      plan: digests of the plan in named parts. Servers compare them with their own digests.
    """

    def __init__(
        self,
        *,
        deadline: float,
        patience: float,
        wait_port: bool,
        encryption: str,
        generations: Generations | None = None,
        generation: int = 0,
    ) -> None:
        self.steps = TrainerSteps(lambda endpoint: self.link(endpoint).line)
        self.plan: Mapping[str, str] = {}
        self._deadline, self._patience = deadline, patience
        self._wait_port = wait_port
        self._encryption = encryption
        self._member, self._least_generation = GenerationMember(generations), generation
        self._links: dict[str, ServerLink] = {}
        self._opened: ZmqTransport | None = None
        self._me: tuple[int, int] | None = None  # (id of this trainer, number of trainers)
        self._session = new_run()
        # servers of the old generation, which wait for this trainer in the new one, too
        self._endpoints: tuple[str, ...] = ()

    @property
    def is_known(self) -> bool:
        """True if the trainer's id is known from an equation, so that the trainer can connect."""
        return self._me is not None

    @functools.cached_property
    def keys(self) -> Keys:
        """Token and encryption keys of the job, from environment variables."""
        return Keys.from_environment(self._encryption)

    @property
    def _transport(self) -> ZmqTransport:
        if self._opened is None:
            self._opened = ZmqTransport(self.keys, self._patience)
        return self._opened

    def identify(self, eqn: JaxprEqn) -> None:
        """Read the trainer's id from an equation of its program, before the trainer connects.

        Raises:
          ConfigError: an earlier program belongs to another trainer.
        """
        me = (eqn.params["trainer_id"], eqn.params["trainers"])
        if self._me not in (None, me):
            raise ConfigError(
                f"this executor has run programs of trainer {self._me[0]}, so it cannot run "
                f"programs of trainer {me[0]}; make one Executor for each trainer"
            )
        if self._me is None and eqn.params["trainer_id"] == 0:
            # Servers use trainer 0's session word as the id of the run.
            note(TRAINER, self._session)
        self._me, self.steps.sync_mode = me, eqn.params["sync_mode"]

    def link(self, endpoint: str) -> ServerLink:
        """Return the connection to a server. On first use, connect and wait for the welcome.

        Raises:
          NewGeneration: a process has failed, and this server has already continued after the
            failure.
          PeerError: the server refuses this trainer. Also raised if `wait_port` is False, and no
            process listens at the endpoint.
          DeadlineError: the server does not answer.
        """
        if endpoint in self._links:
            return self._links[endpoint]
        assert self._me is not None
        trainer_id, trainers = self._me
        if (
            not self._wait_port and not self._least_generation
        ):  # a lost server may be starting again
            _check_listens(f"trainer {trainer_id}", endpoint, self._deadline)
        link = self._links[endpoint] = ServerLink(
            self._transport,
            endpoint=endpoint,
            trainer=trainer_id,
            trainers=trainers,
            session=self._session,
            sync_mode=self.steps.sync_mode,
            plan=self.plan,
            secret=self.keys.secret,
            deadline=self._deadline,
            retry=min(RETRY, self._patience),
            generation=self._least_generation,
            incarnation=self._member.incarnation,
        )
        try:
            self.run(link.greet())
        except BaseException:
            self._links.pop(endpoint).close()
            raise
        self._member.enter(link.line.generation)
        return link

    @property
    def is_in_generation(self) -> bool:
        """True if this trainer is connected in a job with snapshots."""
        return self.generation is not None

    @property
    def generation(self) -> Generation | None:
        """Generation of the servers: the current part of the job, between two failures.

        None before a server has answered, and in a job without snapshots.
        """
        return self._member.generation

    @property
    def steps_between_snapshots(self) -> int:
        """Number of steps after which snapshots are written; 0 without snapshots."""
        return next((link.line.every for link in self._links.values()), 0)

    @property
    def step_count(self) -> int:
        """Number of this trainer's steps that servers have received; 0 without a connection.

        Asynchronous servers may have received different numbers of steps. The largest one counts.
        """
        return max((link.line.steps_so_far for link in self._links.values()), default=0)

    def connect(self, endpoints: Collection[str]) -> tuple[ZmqTransport, Mapping[str, ServerLink]]:
        """Connect to servers; return the transport, and the connections by endpoint."""
        for endpoint in (*self._endpoints, *endpoints):
            self.link(endpoint)
        return self._transport, self._links

    def run(self, operation: Operation[T]) -> T:
        """Send an operation's messages, and wait for the answers; return the operation's result.

        Raises:
          NewGeneration: a process has failed, and the job continues from a snapshot.
          DeadlineError: an answer did not arrive in time.
          PeerError: a server refused a message, or the connection to a server was lost.
        """
        try:
            self._wait(OperationWait(self._transport, self._links, operation))
        except LostPeerError as e:
            raise self.lost(e) from e
        return operation.result

    def lost(self, e: LostPeerError) -> BaseException:
        """Report a lost server, and return the exception to raise (`GenerationMember.lost`)."""
        return self._member.lost(e)

    def _wait(self, wait: OperationWait | FailureReport) -> None:
        while not wait.done:
            wait.turn()

    def run_last(self, operation: Operation[None]) -> None:
        """Run an operation after the last step of this trainer, such as the wait for checkpoints.

        Raises:
          LostPeerError: a process was lost, and this trainer cannot go back to a snapshot any more.
        """
        with self.after_last_step():
            self.run(operation)

    @contextlib.contextmanager
    def after_last_step(self) -> Iterator[None]:
        """Convert `NewGeneration` in a `with` block to LostPeerError, after the last step.

        After a failure, a trainer usually repeats steps. After its last step, the trainer has no
        loop that repeats them.
        """
        try:
            yield
        except NewGeneration:
            self.abandon()
            raise LostPeerError(
                "a process was lost, or a trainer joined again. This trainer has made its last "
                "step, so it cannot go back to a snapshot with the other roles"
            ) from None

    def abandon(self) -> None:
        """Close all connections without a message, because the job continues without them."""
        for link in self._links.values():
            link.close()
        self._links.clear()
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def rejoin(self, generation: int) -> None:
        """Close the connections after a failure of another process; the next use connects again.

        Args:
          generation: smallest number that the new generation (period between two failures) can
            have.

        Raises:
          ReplacedError: the launcher has started another process of this trainer.
        """
        self._member = self._member.rejoin()
        self._endpoints = tuple(dict.fromkeys((*self._endpoints, *self._links)))
        self.abandon()
        self.steps.forget_connections()
        self._least_generation, self._session = generation, new_run()
        if self._me is not None and self._me[0] == 0:
            note(TRAINER, self._session)

    def close(self, reason: str | None) -> None:
        """Leave every server and close all connections, even if a server raises an error.

        Args:
          reason: text of the error that ends this trainer; None if the trainer has taken all its
            steps.
        """
        self._member.leave()
        with contextlib.ExitStack() as stack:
            stack.callback(self._close_transport)
            # The stack calls its entries in reverse, so the trainer leaves the servers in the order
            # in which it connected.
            for link in reversed(list(self._links.values())):
                stack.callback(self._leave, link, reason)

    def _close_transport(self) -> None:
        if self._opened is not None:
            self._opened.close(LINGER)

    def _leave(self, link: ServerLink, reason: str | None) -> None:
        """Tell a server that this trainer leaves, and wait for the answer.

        Args:
          link: the connection.
          reason: text of the error that ends this trainer; None if the trainer has taken all its
            steps.
        """
        if link.line.endpoint not in self._links:  # `abandon` has closed all connections
            return
        if reason is not None:
            self._wait(FailureReport(self._transport, link, reason))
            link.close()
            return
        try:
            with self.after_last_step():
                self._say_goodbye(leave(link.line))
        finally:
            link.close(LINGER)

    def _say_goodbye(self, operation: Operation[None]) -> None:
        """Tell a server that this trainer has taken all its steps, and wait for the answer.

        If another process fails meanwhile, an asynchronous trainer does not wait any longer.
        Servers have received all its steps before. The trainer has also told the launcher that it
        leaves (`close`), so servers continue without it.

        Args:
          operation: the message and its answer.
        """
        try:
            self._wait(OperationWait(self._transport, self._links, operation))
        except LostPeerError as e:
            raise self.lost(e) from e
        except NewGeneration:
            if self.steps.sync_mode:
                raise
            self.abandon()


def _check_listens(me: str, endpoint: str, deadline: float) -> None:
    """Raise PeerError if no process listens at an endpoint.

    Args:
      me: name of this trainer, for the error.
      endpoint: the endpoint, such as "127.0.0.1:6174".
      deadline: seconds that the attempt may take.
    """
    try:
        socket.create_connection(split_endpoint(endpoint), timeout=deadline).close()
    except OSError as e:
        raise PeerError(
            f"{me} cannot connect to the pserver at {endpoint}: {e.strerror or e}; start the "
            "pserver first, or pass wait_port=True to wait for it"
        ) from e
