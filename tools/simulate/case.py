"""Case of a simulation: a job, its faults and its requests, generated from a seed.

The case determines the whole simulation.
"""

from __future__ import annotations

import dataclasses
import itertools
from random import Random

from dtrans.ops import CommunicatorConfig
from dtrans.protocol import wire
from dtrans.protocol.transport import RETRY


# the modes in which trainers have a communicator
COMMUNICATING = (
    "communicator",
    "half_async",
    "geo",
)
ALONE = ("async", *COMMUNICATING)  # the modes whose servers write separate cuts
LOOKING_UP = ("sync", "async", *COMMUNICATING)  # the modes in which servers may have tables


@dataclasses.dataclass(frozen=True)
class Event:
    """Event that affects a role or a connection.

    Attributes:
      kind: one of
        "pause": a role computes for some seconds;
        "stop": the whole process of a role stops for some seconds;
        "crash": a role is killed;
        "host": all servers of a host are killed;
        "return": a killed server is started again, as a new process;
        "cut": a connection breaks, and is restored after some seconds;
        "hold": messages in one direction of a connection stop for some seconds;
        "outage": messages in both directions stop for some seconds;
        "late": a connection cannot be established for some seconds;
        "twice": a message of a connection arrives twice;
        "garble": a message of a connection arrives malformed.
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
      moment: "between" two steps. A "save" may also be "sent": after the gradients of the next
        step, before its end. Or it is "ended": after the end of a step, before its answer.
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
      ahead: number of steps by which synchronous trainers announce rows; 0 if they do not.
      staleness: number of updates that announced rows may lack.
      moves_rows: True if an update may change all rows of a table.
      patience: seconds after which a stopped connection breaks.
      requests: requests of trainers, in order. At most one of them is an eviction, which precedes
        other requests of its step.
      guests: processes that connect to the job without being a part of it.
      is_followed: True if the processes of roles that end without an error start a second job on
        the same endpoints.
      cuts: number of steps between two cuts, which are snapshots of the servers' state; 0 for a job
        that ends when a role fails. A job with cuts has a launcher.
      has_means: in a job with cuts, True if each trainer computes a running mean of its gradients,
        which no server stores.
      at_loss: in a job with cuts, True if servers also write a cut when a role fails.
      has_results: True if the first server merges results of trainers after each update.
      quorum: smallest number of trainers with which a job with cuts continues after a trainer has
        failed; 0 if a failed trainer starts again.
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
    cuts: int = 0
    has_means: bool = False
    at_loss: bool = False
    has_results: bool = False
    quorum: int = 0
    replicas: int = 0
    hosts: int = 0
    replaces: bool = False

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
        return {f"{ep}/t": self.table for ep in self.endpoints[:-1] or self.endpoints}

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

        Pauses together end before the deadlines, and broken connections are made again in time. A
        connection to a Unix socket breaks only if its process ends. Slow messages alone may make a
        greeting late.
        """
        kinds = {e.kind for e in self.events}
        survived = {"pause", "stop", "hold", "outage", "late", "twice"}
        if not self.moves and self.delay <= 0.01:
            survived.add("cut")
        if not kinds <= survived:
            return False
        limits = [self.deadline / 2]
        if kinds - {"pause", "twice"}:
            limits.append(self.patience / 2)
        # messages that are stopped on a broken connection delay its reconnection
        broken = {e.who for e in self.events if e.kind == "cut"}
        delays = ("cut", "hold", "outage")
        breaks = sum(e.seconds for e in self.events if e.kind in delays and e.who in broken)
        spans = sum(e.seconds for e in self.events if e.kind != "twice")
        return breaks < RETRY / 2 and spans < min(limits)

    @property
    def orderly(self) -> bool:
        """True if all requests are valid: sent in time, and by all trainers that must send them."""
        is_early = lambda x: x.moment == "ended" or (x.moment == "sent" and not self.sync_mode)
        return not any(self._is_short(x) or is_early(x) for x in self.requests)

    def _is_short(self, request: Request) -> bool:
        """Return True for an eviction that only some of the trainers that make its step request."""
        may = {k for k, n in enumerate(self.steps) if n >= request.step}
        return self.sync_mode and request.kind == "evict" and not may <= {*request.trainers}

    def eviction_after(self, step: int) -> Request | None:
        """Return the request to evict rows after a step, unless a trainer continues without it."""
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
            text += f", {self.table} rows of a table each"
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
        if self.cuts:
            text += f"\n  cuts every {self.cuts} steps"
            text += ", with a running mean of each trainer" * self.has_means
            text += ", and cuts at failures" * self.at_loss
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
        "cut": f"the connection {e.who} breaks, and is restored after {e.seconds:.3g} s",
        "hold": f"the connection {e.who} delivers nothing to the {('server', 'client')[e.way]} for "
        f"{e.seconds:.3g} s",
        "outage": f"the connection {e.who} delivers nothing for {e.seconds:.3g} s",
        "twice": f"message {e.seconds:.0f} of the connection {e.who} arrives twice",
        "garble": f"message {e.seconds:.0f} of the connection {e.who} arrives malformed",
        "late": f"the connection {e.who} is established {e.seconds:.3g} s later at the earliest",
        "return": f"{e.who} is started again",
    }
    return how[e.kind]


def drawn(seed: int) -> Case:
    """Return the random case of a seed.

    Example:
      >>> from tools.simulate.case import drawn
      >>> drawn(7) == drawn(7), drawn(7) == drawn(8)
      (True, False)
    """
    r = Random(seed)
    mode = r.choice(
        [
            "sync",
            "sync",
            "sync",
            "exchange",
            "exchange",
            "async",
            "communicator",
            "half_async",
            "geo",
        ]
    )
    trainers = r.randint(1, 3)
    if r.random() < 0.6:
        steps = (r.randint(1, 3),) * trainers
    else:
        steps = tuple(r.randint(0, 3) for _ in range(trainers))
    servers = tuple(_draw_sizes(r) for _ in range(r.randint(1, 3)))
    if mode == "exchange" and len(servers) == 1:
        mode = "sync"
    case = Case(
        seed,
        mode,
        steps,
        servers,
        r.choice(["drop", "paddle", "error"]) if mode in ("sync", "exchange") else "drop",
        r.choice([0, 0, 1, 2]) if mode == "sync" and len(set(steps)) == 1 else 0,
        r.random() < 0.3,
        r.choice([5.0, 60.0]),
        10 ** r.uniform(-4, -1.5),
        r.choice([8, 16, wire.MESSAGE_BYTES]),
        _communicator(r),
        *((r.randint(1, 3), r.random() < 0.5) if mode == "geo" else ()),
    )
    count = r.choice([0, 0, 1, 1, 1, 2, 3])
    events = tuple(_event(r, case) for _ in range(count))
    table = r.choice([0, 1, 4, 4] if mode == "sync" else [0, 1, 4]) if mode in LOOKING_UP else 0
    # Communicators merge gradients only if steps are fast.
    pace = r.choice([0.1, 0.002]) if mode == "communicator" else 0.1
    case = dataclasses.replace(
        case, events=events, pace=pace, table=table, patience=(3.5, 30.0)[seed % 2]
    )
    if case.table and case.sync_mode:
        ahead, moves = r.choice([0, 1, 1, 2]), r.random() < 0.3
        stale = r.choice([0, 0, 1]) if ahead else 0
        case = dataclasses.replace(case, ahead=ahead, staleness=stale, moves_rows=moves)
    case = _with_guests(r, dataclasses.replace(case, requests=_requests(r, case)))
    case = _with_later_processes(r, _with_garbled_message(r, case))
    return _with_cuts(r, _with_short_breaks(r, case))


def _with_cuts(r: Random, case: Case) -> Case:
    """Turn some synchronous cases into jobs with cuts, whose roles fail and start again."""
    has_breaks = any(event.kind == "cut" for event in case.events)
    if not case.sync_mode or r.random() < 0.6 or has_breaks:
        return case
    return _job_with_cuts(r, case)


def drawn_with_cuts(seed: int) -> Case:
    """Return the random case of a seed: a job with cuts.

    Example:
      >>> from tools.simulate.case import drawn_with_cuts
      >>> drawn_with_cuts(7) == drawn_with_cuts(7), drawn_with_cuts(7).cuts > 0
      (True, True)
    """
    r = Random(f"cuts {seed}")
    mode = r.choice(["sync", "sync", "sync", "sync", "exchange", "exchange", *ALONE])
    servers = tuple(_draw_sizes(r) for _ in range(r.randint(1, 3)))
    case = Case(
        seed,
        "sync" if len(servers) == 1 and mode == "exchange" else mode,
        (1,) * r.randint(1, 3),
        servers,
        moves=r.random() < 0.3,
        delay=10 ** r.uniform(-4, -1.5),
        message_bytes=r.choice([8, 16, wire.MESSAGE_BYTES]),
        patience=r.choice([3.5, 30.0]),
        pace=(0.1, 0.1, 0.1, 0.005)[seed % 4],  # fast steps wait for the writes of cuts
    )
    if case.mode == "sync":
        case = dataclasses.replace(case, rounds=r.choice([0, 0, 1, 2]))
    if case.mode in ALONE:
        case = dataclasses.replace(case, communicator=_communicator(r))
    if case.mode == "geo":
        case = dataclasses.replace(case, every=r.randint(1, 3), waits=r.random() < 0.5)
    elif case.mode != "exchange":
        case = dataclasses.replace(case, table=r.choice([0, 1, 4]))
    if case.table and case.sync_mode:
        ahead, moves = r.choice([0, 1, 2]), r.random() < 0.3
        case = dataclasses.replace(case, ahead=ahead, moves_rows=moves)
    case = _with_short_breaks(r, _with_second_death(r, _job_with_cuts(r, case)))
    if case.mode == "geo":  # another generator, so that all other parts of a seed's case stay
        table = Random(f"table of geo {seed}").choice([0, 1, 4])
        case = dataclasses.replace(case, table=table)
    # a trainer that leaves before the others writes no later cuts
    has_means = seed % 3 == 2 and len(set(case.steps)) == 1 and case.sync_mode
    case = dataclasses.replace(case, has_means=has_means)
    # drawn last, so that all other parts of a seed's case stay the same
    if not case.sync_mode or case.trainers == 1 or r.random() < 0.5:
        return case
    events = case.events
    if r.random() < 0.6:
        death = Event("crash", r.random() * _span(case), f"trainer {r.randrange(case.trainers)}")
        events = (*events, death)
    # a step with exchanges between trainers needs all trainers
    case = dataclasses.replace(case, quorum=r.randint(1, case.trainers), rounds=0, events=events)
    # a trainer that joins lacks the running mean of the steps without it
    return dataclasses.replace(case, replaces=r.random() < 0.7 and not has_means)


def drawn_at_loss(seed: int) -> Case:
    """Return the random case of a seed: a synchronous job that also writes cuts when a role fails.

    Example:
      >>> from tools.simulate.case import drawn_at_loss
      >>> drawn_at_loss(7) == drawn_at_loss(7), drawn_at_loss(7).at_loss
      (True, True)
    """
    r, case = Random(f"at loss {seed}"), drawn_with_cuts(seed)
    breaks = any(event.kind == "cut" for event in case.events)
    mode = r.choice(["sync", "exchange"]) if len(case.servers) > 1 else "sync"
    case = dataclasses.replace(case, mode=mode, table=0, ahead=0, moves_rows=False)
    if mode == "sync" and r.random() < 0.6:
        ahead, moves = r.choice([0, 1, 2]), r.random() < 0.3
        case = dataclasses.replace(case, table=r.choice([1, 4]), ahead=ahead, moves_rows=moves)
    return dataclasses.replace(
        case,
        rounds=case.rounds if mode == "sync" else 0,
        every=1,
        waits=False,
        requests=_eviction(r, case),
        has_means=False,
        # A trainer that waits for a server does not notice the end of another local connection.
        moves=case.moves and not breaks,
        cuts=r.choice([1, 3, 20]),
        at_loss=True,
        has_results=len(set(case.steps)) == 1 and r.random() < 0.5,
    )


def drawn_with_replicas(seed: int) -> Case:
    """Return the random case of a seed: a job with replicas, whose servers may be on two hosts.

    Example:
      >>> from tools.simulate.case import drawn_with_replicas
      >>> drawn_with_replicas(7) == drawn_with_replicas(7), drawn_with_replicas(7).replicas
      (True, 1)
    """
    r, case = Random(f"replicas {seed}"), drawn_at_loss(seed)
    if len(case.servers) == 1:
        case = dataclasses.replace(case, servers=(*case.servers, _draw_sizes(r)))
    old, hosts = case.endpoints, r.choice([0, 2])
    case = dataclasses.replace(case, replicas=1, hosts=hosts)
    names, events = dict(zip(old, case.endpoints, strict=True)), []
    for event in case.events:
        who = " ".join(names.get(word, word) for word in event.who.split())
        events.append(dataclasses.replace(event, who=who))
    if hosts and r.random() < 0.3:
        time, host = r.random() * (1.0 + 1.5 * _span(case)), r.choice(case.endpoints)
        events.append(Event("host", time, host.partition(":")[0]))
    return dataclasses.replace(case, events=tuple(events))


def _with_second_death(r: Random, case: Case) -> Case:
    """Add, with some probability, a death soon after an event, while roles go back to a cut."""
    if not case.events or r.random() < 0.6:
        return case
    roles = [f"trainer {k}" for k in range(case.trainers)]
    roles += [f"pserver {ep}" for ep in case.endpoints]
    time = case.events[0].time + 10 ** r.uniform(-3, 0.7)
    death = Event("crash", time, r.choice(roles))
    return dataclasses.replace(case, events=(*case.events, death))


def _job_with_cuts(r: Random, case: Case) -> Case:
    """Turn a synchronous case into a job with cuts."""
    steps = (r.randint(1, 12),) * case.trainers
    if r.random() < 0.15:
        steps = tuple(r.randint(0, 12) for _ in range(case.trainers))
    case = dataclasses.replace(
        case,
        steps=steps,
        on_trainer_exit="drop",
        rounds=case.rounds if len(set(steps)) == 1 else 0,
        deadline=60.0,
        staleness=0,
        requests=(),
        guests=(),
        is_followed=False,
        cuts=r.randint(1, 4),
    )
    case = dataclasses.replace(case, requests=_eviction(r, case))
    events = tuple(_event_of_cuts(r, case) for _ in range(r.choice([0, 1, 1, 2, 2, 3, 4])))
    return dataclasses.replace(case, events=events)


def _eviction(r: Random, case: Case) -> tuple[Request, ...]:
    """Return an eviction that all trainers request between two steps, or nothing."""
    last = min(case.steps)
    if not case.tables or not last or not case.sync_mode or r.random() < 0.3:
        return ()
    # most often after a step with a cut
    step = r.choice([r.randint(1, last), min(last, case.cuts * r.randint(1, 4))])
    trainers = tuple(range(case.trainers))
    return (Request("evict", step, trainers, unused_for=r.randint(1, 2)),)


def _event_of_cuts(r: Random, case: Case) -> Event:
    """Return a random event of a job with cuts. Deaths are the most frequent."""
    servers = [f"pserver {ep}" for ep in case.endpoints]
    roles = [f"trainer {k}" for k in range(case.trainers)] + servers
    kind = r.choice(["crash", "crash", "crash", "stop", "pause", "cut"])
    time, seconds = r.random() * (1.0 + 1.5 * _span(case)), 10 ** r.uniform(-2, 1.3)
    if kind == "cut":
        return Event(kind, time, r.choice(_lines(case)), seconds)
    return Event(kind, time, r.choice(roles), 0.0 if kind == "crash" else seconds)


def _with_short_breaks(r: Random, case: Case) -> Case:
    """Add, with some probability, many short breaks of connections."""
    if r.random() < 0.85 or case.guests or case.moves or case.is_followed:
        return case
    count, lines = r.randint(1, 8), _lines(case)
    breaks = []
    for _ in range(count):
        time, seconds = r.random() * _span(case), 10 ** r.uniform(-3, -0.7)
        breaks.append(Event("cut", time, r.choice(lines), seconds))
    return dataclasses.replace(case, events=tuple(breaks))


def _with_garbled_message(r: Random, case: Case) -> Case:
    """Add, with some probability, a message of a trainer that arrives malformed."""
    if r.random() < 0.93:
        return case
    line = f"trainer {r.randrange(case.trainers)} pserver {r.choice(case.endpoints)}"
    garbled = Event("garble", 0.0, line, r.randint(0, 8))
    events = () if r.random() < 0.5 else case.events
    return dataclasses.replace(case, events=(*events, garbled))


def _with_later_processes(r: Random, case: Case) -> Case:
    """Add, with some probability, the restart of a killed server, or a second job."""
    killed = [e for e in case.events if e.kind == "crash" and e.who.startswith("pserver")]
    if killed and not case.guests and r.random() < 0.5:
        time = killed[0].time + 10 ** r.uniform(-2, 0.5)
        returned = Event("return", time, killed[0].who)
        return dataclasses.replace(case, events=(*case.events, returned))
    if case.guests or r.random() < 0.9:
        return case
    if case.mode != "exchange" or r.random() < 0.5:
        return dataclasses.replace(case, is_followed=True)
    # If trainers make no steps, a server could end before another server has greeted it.
    line = "pserver {} pserver {}".format(*r.sample(case.endpoints, 2))
    late = Event("late", 0.0, line, 10 ** r.uniform(-1, 0.3))
    steps = (0,) * case.trainers
    return dataclasses.replace(case, steps=steps, events=(late,), requests=(), is_followed=True)


def _draw_sizes(r: Random) -> tuple[int, ...]:
    return tuple(r.randint(1, 6) for _ in range(r.randint(1, 2)))


def _with_guests(r: Random, case: Case) -> Case:
    """Add, with some probability, a guest. A "second" may follow the crash of its trainer."""
    if r.random() < 0.75:
        return case
    kind = r.choice(["second", "second", "stale", "stranger", "noise"])
    time, k = r.random() * (0.3 + 0.2 * max(case.steps)), r.randrange(case.trainers)
    killed = Event("crash", time * r.random(), f"trainer {k}")
    events = (*case.events, killed) if kind == "second" and r.random() < 0.3 else case.events
    return dataclasses.replace(case, events=events, guests=(Guest(kind, time, k),))


def _requests(r: Random, case: Case) -> tuple[Request, ...]:
    """Return random requests. Trainers with a communicator send them after their last step."""
    if r.random() < 0.6:
        return ()
    kinds = ["save", "save"]
    if case.tables:
        kinds += ["report", "changes", "export"] + ["evict", "evict"] * (case.mode != "geo")
    found: list[Request] = []
    for _ in range(r.choice([1, 1, 2, 3])):
        kind = r.choice(kinds)
        step = r.choice(case.steps) if case.mode in COMMUNICATING else r.randint(0, max(case.steps))
        reach = [k for k, n in enumerate(case.steps) if n >= step]
        if case.mode in COMMUNICATING:
            reach = [k for k in reach if case.steps[k] == step]
        all_ask = r.random() < (0.8 if kind == "evict" else 0.5)
        trainers = reach if all_ask else r.sample(reach, r.randint(1, len(reach)))
        request = Request(kind, step, tuple(sorted(trainers)), unused_for=r.randint(1, 2))
        if kind == "save":
            request = _save(r, case, request)
        if kind != "evict" or all(x.kind != "evict" for x in found):
            found.append(request)
    return tuple(sorted(found, key=lambda x: (x.step, x.kind != "evict")))


def _save(r: Random, case: Case, request: Request) -> Request:
    moment = r.choice(["between"] * 4 + ["sent", "ended"])
    goes_on = all(case.steps[k] > request.step for k in request.trainers)
    may_be = {"between": True, "sent": goes_on, "ended": request.step > 0}[moment]
    return dataclasses.replace(
        request,
        moment=moment if may_be and case.mode not in COMMUNICATING else "between",
        seconds=10 ** r.uniform(-2, 1.5),
        fails=r.choice(case.endpoints) if r.random() < 0.3 else "",
        refuses=r.random() < 0.3,
        waits=r.choice([0, 0, 1, 2]),
    )


def _communicator(r: Random) -> CommunicatorConfig:
    queue = r.randint(1, 4)
    return CommunicatorConfig(r.randint(1, 3), queue, r.randint(1, queue), r.random() < 0.5)


def _lines(case: Case) -> list[str]:
    """Return the names of a job's connections."""
    trainers = [f"trainer {k}" for k in range(case.trainers)]
    servers = [f"pserver {ep}" for ep in case.endpoints]
    ends = [*itertools.product(trainers, servers)]
    if case.mode == "exchange" or case.replicas:
        ends += itertools.permutations(servers, 2)
    return [f"{client} {server}" for client, server in ends]


def _span(case: Case) -> float:
    """Return the typical duration of a case's job in seconds."""
    return 0.2 + 0.2 * max(case.steps) + 30 * case.delay


def _event(r: Random, case: Case) -> Event:
    trainers = [f"trainer {k}" for k in range(case.trainers)]
    servers = [f"pserver {ep}" for ep in case.endpoints]
    roles, lines = trainers + servers, _lines(case)
    kind = r.choice(["pause", "stop", "crash", "cut", "hold", "twice"])
    time = r.random() * _span(case)
    if kind in ("pause", "stop", "crash"):
        return Event(
            kind, time, r.choice(roles), 0.0 if kind == "crash" else 10 ** r.uniform(-2, 2)
        )
    if kind == "twice":
        number = r.randint(0, 8)
        # parts of rounds come early
        return Event(kind, 0.0, r.choice(lines), number % 5 if case.rounds else number)
    found = Event(kind, time, r.choice(lines), 10 ** r.uniform(-2, 2), r.randint(0, 1))
    both = kind == "hold" and r.random() < 0.4
    return dataclasses.replace(found, kind="outage") if both else found
