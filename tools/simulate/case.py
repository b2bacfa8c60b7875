"""Case of a simulation: a job, its faults and its requests.

The case determines all events of the simulation. `tools.simulate.draw` draws cases from seeds.
"""

from __future__ import annotations

import dataclasses
import itertools

from dtrans.ops import CommunicatorConfig
from dtrans.protocol import wire
from dtrans.protocol.transport import RETRY


# the modes in which trainers have a communicator
COMMUNICATING = (
    "communicator",
    "half_async",
    "geo",
)
ALONE = ("async", *COMMUNICATING)  # the modes whose servers write separate snapshots
LOOKING_UP = ("sync", "async", *COMMUNICATING)  # the modes in which servers may have tables


@dataclasses.dataclass(frozen=True)
class Event:
    """Event that affects a role or a connection.

    Attributes:
      kind: one of
        "pause": a role computes for some seconds;
        "stop": the process of a role stops for some seconds, and sends no heartbeats;
        "crash": a role is killed;
        "host": all servers of a host are killed;
        "return": a killed server is started again, as a new process;
        "break": a connection breaks, and is restored after some seconds;
        "hold": messages in one direction of a connection stop for some seconds;
        "outage": messages in both directions stop for some seconds;
        "late": a connection cannot be established for some seconds;
        "twice": a message of a connection arrives twice;
        "garble": a message of a connection arrives malformed;
        "full": in a job with snapshots, the disk of a role is full for some seconds.
      time: virtual time of the event.
      who: name of the role, or of the connection: "client server".
      seconds: duration of the event; for "twice" and "garble", the number of the message.
      way: direction of a "hold": 0 to the server, 1 to the client.
    """

    kind: str
    time: float
    who: str
    seconds: float = 0.0
    way: int = 0


@dataclasses.dataclass(frozen=True)
class Request:
    """Request that trainers send to all servers, or to the servers with blocks of the table.

    Attributes:
      kind: one of
        "save": a checkpoint;
        "report": a report of tables;
        "changes": changed rows of tables since half as many steps;
        "export": all rows of tables;
        "evict": eviction of rows that were not used in the last steps.
      step: number of steps that a trainer has made before the request.
      trainers: ids of the trainers that send the request.
      moment: "between" for a request between two steps. For a "save", also "sent": after the
        gradients of the next step are sent, before the step's end. Or "ended": after the end of a
        step, before its answer.
      seconds: for "save", the duration of the write.
      fails: for "save", the endpoint of the server whose write fails; empty if none fails.
      refuses: for "save", True if that server fails at once, and not at the end of the write.
      waits: for "save", the number of steps until the trainer waits for the answer.
      unused_for: for "evict", the field of this name.
    """

    kind: str
    step: int
    trainers: tuple[int, ...]
    moment: str = "between"
    seconds: float = 0.0
    fails: str = ""
    refuses: bool = False
    waits: int = 0
    unused_for: int = 1

    def __str__(self) -> str:
        when = {
            "between": f"after {self.step} steps",
            "sent": f"with the gradients of step {self.step} sent",
            "ended": f"before the answer of step {self.step}",
        }
        who = ", ".join(f"trainer {k}" for k in self.trainers)
        text = f"{self.kind} requested by {who} {when[self.moment]}"
        if self.kind == "save":
            text += f", written in {self.seconds:.3g} s"
        if self.waits:
            text += f", awaited {self.waits} steps later"
        if self.fails:
            text += f", fails on {self.fails}" + " at once" * self.refuses
        if self.kind == "evict":
            text += f", of rows unused for {self.unused_for} steps"
        return text


@dataclasses.dataclass(frozen=True)
class Guest:
    """Process that connects to the job without being a part of it.

    Attributes:
      kind: one of
        "second": a second process with the id of a trainer;
        "stale": a trainer with another plan;
        "stranger": a trainer with another token;
        "noise": a sender of malformed messages.
      time: time at which it starts.
      trainer: id of a trainer that it uses.
    """

    kind: str
    time: float
    trainer: int

    def __str__(self) -> str:
        what = {
            "second": "is started a second time",
            "stale": "is started with another plan",
            "stranger": "is started with another token",
            "noise": "is impersonated by a sender of malformed messages",
        }
        return f"{self.time:.3f} s  trainer {self.trainer} {what[self.kind]}"


@dataclasses.dataclass(frozen=True)
class Case:
    """Simulated job, and the events that affect it.

    Attributes:
      seed: seed of message delays and of computation times.
      mode: one of
        "sync": synchronous;
        "exchange": synchronous, and servers exchange partial sums of a norm;
        "async": asynchronous;
        "communicator": asynchronous, with a communicator;
        "half_async": with a communicator, for which each step waits at its end;
        "geo": GEO-SGD.
      steps: number of steps of each trainer.
      servers: for each server, the number of entries of each of its blocks.
      on_trainer_exit: option of `dtrans.pserver`.
      rounds: number of exchanges between trainers in each step.
      moves: True if trainers move to a second connection, as they do for a Unix socket.
      deadline: deadline of all roles in seconds.
      delay: typical delay of a message in seconds.
      message_bytes: maximum number of bytes of arrays in one message.
      communicator: options of the communicator.
      every: for "geo", the number of steps between two pushes.
      waits: for "geo", True if a step waits for the answer to its push.
      events: events that affect roles and connections.
      pace: typical duration of a step's computation in seconds.
      table: number of rows of each server's block of the table; 0 without a table. If there are
        several servers, the last one has no block.
      table_blocks: number of the table's blocks on each server that has blocks.
      ahead: number of steps by which synchronous trainers announce rows; 0 if they do not.
      staleness: number of updates that announced rows may lack.
      moves_rows: True if an update may change all rows of a table.
      patience: seconds after which a stopped connection breaks.
      requests: requests of trainers, in order. At most one of them is an eviction, which precedes
        other requests of its step.
      guests: processes that connect to the job without being a part of it.
      is_followed: True if the processes of roles that end without an error start a second job on
        the same endpoints.
      snapshots: number of steps between two snapshots of the servers' state; 0
        for a job that ends when a role fails. A job with snapshots has a launcher.
      has_means: in a job with snapshots, True if each trainer computes a running mean of its
        gradients, which no server stores.
      at_loss: in a job with snapshots, True if servers also write a snapshot when a role fails.
      has_results: True if the first server merges results of trainers after each update.
      quorum: smallest number of trainers with which a job with snapshots continues after a trainer
        has failed; 0 if a failed trainer starts again.
      replaces: with `quorum`, True if a dropped trainer joins the job again later.
      replicas: with `at_loss`, number of copies of each server's state on other servers, 0 or 1.
      hosts: number of hosts of the servers; 0 if all roles are on one host.
    """

    seed: int
    mode: str
    steps: tuple[int, ...]
    servers: tuple[tuple[int, ...], ...]
    on_trainer_exit: str = "drop"
    rounds: int = 0
    moves: bool = False
    deadline: float = 60.0
    delay: float = 0.002
    message_bytes: int = wire.MESSAGE_BYTES
    communicator: CommunicatorConfig = CommunicatorConfig()
    every: int = 1
    waits: bool = False
    events: tuple[Event, ...] = ()
    pace: float = 0.1
    table: int = 0
    ahead: int = 0
    staleness: int = 0
    moves_rows: bool = False
    patience: float = 30.0
    requests: tuple[Request, ...] = ()
    guests: tuple[Guest, ...] = ()
    is_followed: bool = False
    snapshots: int = 0
    has_means: bool = False
    at_loss: bool = False
    has_results: bool = False
    quorum: int = 0
    replicas: int = 0
    hosts: int = 0
    replaces: bool = False
    table_blocks: int = 1

    @property
    def sync_mode(self) -> bool:
        """True if an update uses the gradients of all trainers."""
        return self.mode in ("sync", "exchange")

    @property
    def sends(self) -> tuple[int, ...]:
        """Number of times that each trainer sends gradients or pushes."""
        return tuple(-(-n // self.every) for n in self.steps)

    @property
    def blocks(self) -> dict[str, int]:
        """Number of entries of each block, by name."""
        rows = zip(self.endpoints, self.servers, strict=True)
        return {f"{ep}/w{i}": n for ep, sizes in rows for i, n in enumerate(sizes)}

    @property
    def tables(self) -> dict[str, int]:
        """Number of rows of each block of the table, by name."""
        if not self.table:
            return {}
        names = ["t", *(f"t{i}" for i in range(1, self.table_blocks))]
        pairs = itertools.product(self.endpoints[:-1] or self.endpoints, names)
        return {f"{ep}/{name}": self.table for ep, name in pairs}

    @property
    def trainers(self) -> int:
        """Number of trainers."""
        return len(self.steps)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Endpoints of the servers."""
        found = []
        for i in range(len(self.servers)):
            host = f"10.0.0.{i % self.hosts + 1}" if self.hosts else "127.0.0.1"
            found.append(f"{host}:{i + 1}")
        return tuple(found)

    @property
    def harmless(self) -> bool:
        """Return True if the job must survive all events.

        The events are only pauses that together end before the deadlines, and breaks of connections
        that are restored in time. A connection to a Unix socket breaks only if its process ends. If
        messages are slow, a break may make a greeting late.
        """
        kinds = {e.kind for e in self.events}
        survived = {"pause", "stop", "hold", "outage", "late", "twice"}
        if not self.moves and self.delay <= 0.01:
            survived.add("break")
        if not kinds <= survived:
            return False
        limits = [self.deadline / 2]
        if kinds - {"pause", "twice"}:
            limits.append(self.patience / 2)
        # on a connection that breaks, stopped messages also delay the reconnection
        broken = {e.who for e in self.events if e.kind == "break"}
        delays = ("break", "hold", "outage")
        breaks = sum(e.seconds for e in self.events if e.kind in delays and e.who in broken)
        spans = sum(e.seconds for e in self.events if e.kind != "twice")
        return breaks < RETRY / 2 and spans < min(limits)

    @property
    def orderly(self) -> bool:
        """True if all requests are valid: sent in time, and by all trainers that must send them."""
        is_early = lambda x: x.moment == "ended" or (x.moment == "sent" and not self.sync_mode)
        return not any(self._is_short(x) or is_early(x) for x in self.requests)

    def _is_short(self, request: Request) -> bool:
        """Return True for an eviction that some trainers of its step do not request."""
        may = {k for k, n in enumerate(self.steps) if n >= request.step}
        return self.sync_mode and request.kind == "evict" and not may <= {*request.trainers}

    def eviction_after(self, step: int) -> Request | None:
        """Return the eviction after a step, if all trainers that continue request it; else None."""
        for x in self.requests:
            later = {k for k, n in enumerate(self.steps) if n > step}
            if x.kind == "evict" and x.step == step and later <= {*x.trainers}:
                return x
        return None

    def __str__(self) -> str:
        blocks = ", ".join(f"{len(sizes)} blocks" for sizes in self.servers)
        steps = ", ".join(map(str, self.steps))
        text = f"{self.mode}, trainers of {steps} steps, servers of {blocks}"
        if self.table:
            text += f", {self.table_blocks} blocks of {self.table} rows of a table each"
            text += ", updates change all rows" * self.moves_rows
            if self.ahead:
                text += f", announced {self.ahead} steps ahead, {self.staleness} stale"
        text += f", on_trainer_exit={self.on_trainer_exit}, patience {self.patience:g} s"
        if self.rounds:
            text += f", {self.rounds} rounds a step"
        if self.moves:
            text += ", trainers move to a Unix socket"
        if self.message_bytes < wire.MESSAGE_BYTES:
            text += f", messages of {self.message_bytes} bytes"
        if self.mode in COMMUNICATING:
            text += f"\n  {self.communicator}"
        if self.mode == "geo":
            text += f", pushes after {self.every} steps" + " and waits" * self.waits
        for event in sorted(self.events, key=lambda event: event.time):
            text += f"\n  {event.time:.3f} s  {_describe(event)}"
        for line in (*self.guests, *self.requests):
            text += f"\n  {line}"
        if self.snapshots:
            text += f"\n  snapshots every {self.snapshots} steps"
            text += ", with a running mean of each trainer" * self.has_means
            text += ", and snapshots at failures" * self.at_loss
            text += ", with merged results" * self.has_results
            text += f", lost trainers are dropped, quorum {self.quorum}" * bool(self.quorum)
            text += ", and join again" * self.replaces
            text += ", with replicas" * self.replicas
            text += f", servers on {self.hosts} hosts" if self.hosts else ""
        return text + "\n  the same job again on the same endpoints" * self.is_followed


def _describe(e: Event) -> str:
    how = {
        "pause": f"{e.who} pauses for {e.seconds:.3g} s",
        "stop": f"{e.who} is stopped for {e.seconds:.3g} s",
        "crash": f"{e.who} is killed",
        "host": f"the host {e.who} is lost",
        "break": f"the connection {e.who} breaks, and is restored after {e.seconds:.3g} s",
        "hold": f"the connection {e.who} delivers nothing to the {('server', 'client')[e.way]} for "
        f"{e.seconds:.3g} s",
        "outage": f"the connection {e.who} delivers nothing for {e.seconds:.3g} s",
        "twice": f"message {e.seconds:.0f} of the connection {e.who} arrives twice",
        "garble": f"message {e.seconds:.0f} of the connection {e.who} arrives malformed",
        "late": f"the connection {e.who} is established {e.seconds:.3g} s later at the earliest",
        "return": f"{e.who} is started again",
        "full": f"the disk of {e.who} is full for {e.seconds:.3g} s",
    }
    return how[e.kind]
