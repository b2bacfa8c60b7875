"""Random cases of the simulator, each drawn from a seed."""

from __future__ import annotations

import dataclasses
import itertools
from random import Random

from dtrans.ops import CommunicatorConfig
from dtrans.protocol import wire
from tools.simulate.case import ALONE, COMMUNICATING, LOOKING_UP, Case, Event, Guest, Request


def drawn(seed: int) -> Case:
    """Return the random case of a seed.

    Example:
      >>> from tools.simulate.draw import drawn
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
    return _with_table_blocks(_with_snapshots(r, _with_short_breaks(r, case)))


def _with_table_blocks(case: Case) -> Case:
    """Draw the number of the table's blocks on a server. All other parts stay the same."""
    r = Random(f"table blocks {case.seed}")
    return dataclasses.replace(case, table_blocks=r.choice([1, 2]) if case.table else 1)


def _with_snapshots(r: Random, case: Case) -> Case:
    """Turn some synchronous cases into jobs with snapshots, whose roles fail and start again."""
    has_breaks = any(event.kind == "break" for event in case.events)
    if not case.sync_mode or r.random() < 0.6 or has_breaks:
        return case
    return _job_with_snapshots(r, case)


def drawn_with_snapshots(seed: int) -> Case:
    """Return the random case of a seed: a job with snapshots.

    Example:
      >>> from tools.simulate.draw import drawn_with_snapshots
      >>> drawn_with_snapshots(7) == drawn_with_snapshots(7), drawn_with_snapshots(7).snapshots > 0
      (True, True)
    """
    return _with_disks("snapshots", _draw_with_snapshots(seed))


def _draw_with_snapshots(seed: int) -> Case:
    """Return the case of `drawn_with_snapshots`, without full disks and checkpoints."""
    r = Random(f"snapshots {seed}")
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
        # with fast steps, servers wait for the writes of snapshots
        pace=(0.1, 0.1, 0.1, 0.005)[seed % 4],
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
    case = _with_short_breaks(r, _with_second_death(r, _job_with_snapshots(r, case)))
    # use another generator, so that all other parts of a seed's case stay the same
    if case.mode == "geo":
        table = Random(f"table of geo {seed}").choice([0, 1, 4])
        case = dataclasses.replace(case, table=table)
    # a trainer that leaves before other trainers writes no later snapshots
    has_means = seed % 3 == 2 and len(set(case.steps)) == 1 and case.sync_mode
    case = dataclasses.replace(case, has_means=has_means)
    # draw this last, so that all other parts of a seed's case stay the same
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
    """Return the random case of a seed: a synchronous job that also writes snapshots at failures.

    Example:
      >>> from tools.simulate.draw import drawn_at_loss
      >>> drawn_at_loss(7) == drawn_at_loss(7), drawn_at_loss(7).at_loss
      (True, True)
    """
    return _with_disks("at loss", _draw_at_loss(seed))


def _draw_at_loss(seed: int) -> Case:
    """Return the case of `drawn_at_loss`, without full disks and checkpoints."""
    r, case = Random(f"at loss {seed}"), _draw_with_snapshots(seed)
    breaks = any(event.kind == "break" for event in case.events)
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
        snapshots=r.choice([1, 3, 20]),
        at_loss=True,
        has_results=len(set(case.steps)) == 1 and r.random() < 0.5,
    )


def drawn_with_replicas(seed: int) -> Case:
    """Return the random case of a seed: a job with replicas, whose servers may be on two hosts.

    Example:
      >>> from tools.simulate.draw import drawn_with_replicas
      >>> drawn_with_replicas(7) == drawn_with_replicas(7), drawn_with_replicas(7).replicas
      (True, 1)
    """
    return _with_disks("replicas", _draw_with_replicas(seed))


def _draw_with_replicas(seed: int) -> Case:
    """Return the case of `drawn_with_replicas`, without full disks and checkpoints."""
    r, case = Random(f"replicas {seed}"), _draw_at_loss(seed)
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


def _with_disks(kind: str, case: Case) -> Case:
    """Add, with some probability, full disks, and checkpoints that trainers request.

    Args:
      kind: name of the kind of cases. It selects the random numbers, so that all other parts of a
        seed's case do not depend on them.
      case: a job with snapshots.
    """
    r = Random(f"disks {kind} {case.seed}")
    events, requests = [*case.events], [*case.requests]
    if r.random() < 0.3:
        roles = [f"pserver {ep}" for ep in case.endpoints]
        if case.has_means:
            roles += [f"trainer {k}" for k in range(case.trainers)]
        for _ in range(r.choice([1, 1, 2])):
            time, seconds = r.random() * _span(case), 10 ** r.uniform(-1, 1)
            events.append(Event("full", time, r.choice(roles), seconds))
    if r.random() < 0.4:
        for _ in range(r.choice([1, 1, 2])):
            requests.append(_save_with_snapshots(r, case))
    requests.sort(key=lambda x: (x.step, x.kind != "evict"))
    case = dataclasses.replace(case, events=tuple(events), requests=tuple(requests))
    return _with_table_blocks(case)


def _save_with_snapshots(r: Random, case: Case) -> Request:
    """Return a random checkpoint. Trainers with a communicator request it after their last step."""
    step = r.randint(0, max(case.steps))
    reach = [k for k, n in enumerate(case.steps) if n >= step]
    if case.mode in COMMUNICATING:
        step = r.choice(case.steps)
        reach = [k for k, n in enumerate(case.steps) if n == step]
    trainers = reach if r.random() < 0.5 else r.sample(reach, r.randint(1, len(reach)))
    return Request(
        "save",
        step,
        tuple(sorted(trainers)),
        seconds=10 ** r.uniform(-2, 0.5),
        fails=r.choice(case.endpoints) if r.random() < 0.2 else "",
        refuses=r.random() < 0.3,
        waits=r.choice([0, 0, 1, 2]),
    )


def _with_second_death(r: Random, case: Case) -> Case:
    """Add, at random, a death soon after an event, while roles go back to a snapshot."""
    if not case.events or r.random() < 0.6:
        return case
    roles = [f"trainer {k}" for k in range(case.trainers)]
    roles += [f"pserver {ep}" for ep in case.endpoints]
    time = case.events[0].time + 10 ** r.uniform(-3, 0.7)
    death = Event("crash", time, r.choice(roles))
    return dataclasses.replace(case, events=(*case.events, death))


def _job_with_snapshots(r: Random, case: Case) -> Case:
    """Turn a synchronous case into a job with snapshots."""
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
        snapshots=r.randint(1, 4),
    )
    case = dataclasses.replace(case, requests=_eviction(r, case))
    events = tuple(_event_of_snapshots(r, case) for _ in range(r.choice([0, 1, 1, 2, 2, 3, 4])))
    return dataclasses.replace(case, events=events)


def _eviction(r: Random, case: Case) -> tuple[Request, ...]:
    """Return an eviction that all trainers request between two steps, or nothing."""
    last = min(case.steps)
    if not case.tables or not last or not case.sync_mode or r.random() < 0.3:
        return ()
    # choose a step with a snapshot more often
    step = r.choice([r.randint(1, last), min(last, case.snapshots * r.randint(1, 4))])
    trainers = tuple(range(case.trainers))
    return (Request("evict", step, trainers, unused_for=r.randint(1, 2)),)


def _event_of_snapshots(r: Random, case: Case) -> Event:
    """Return a random event of a job with snapshots. Deaths are the most frequent."""
    servers = [f"pserver {ep}" for ep in case.endpoints]
    roles = [f"trainer {k}" for k in range(case.trainers)] + servers
    kind = r.choice(["crash", "crash", "crash", "stop", "pause", "break"])
    time, seconds = r.random() * (1.0 + 1.5 * _span(case)), 10 ** r.uniform(-2, 1.3)
    if kind == "break":
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
        breaks.append(Event("break", time, r.choice(lines), seconds))
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
    """Add, with some probability, a guest. A trainer may crash before its "second" guest."""
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
    kind = r.choice(["pause", "stop", "crash", "break", "hold", "twice"])
    time = r.random() * _span(case)
    if kind in ("pause", "stop", "crash"):
        return Event(
            kind, time, r.choice(roles), 0.0 if kind == "crash" else 10 ** r.uniform(-2, 2)
        )
    if kind == "twice":
        number = r.randint(0, 8)
        # in a case with rounds, choose an early message, which is a part of a round
        return Event(kind, 0.0, r.choice(lines), number % 5 if case.rounds else number)
    found = Event(kind, time, r.choice(lines), 10 ** r.uniform(-2, 2), r.randint(0, 1))
    both = kind == "hold" and r.random() < 0.4
    return dataclasses.replace(found, kind="outage") if both else found
