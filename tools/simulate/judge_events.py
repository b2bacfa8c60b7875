"""Checks of roles that are lost and come back, and of messages that arrive malformed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from tools.simulate.case import Case
from tools.simulate.server_role import SimulatedServer
from tools.simulate.trainer_role import SimulatedTrainer


Servers = Mapping[str, SimulatedServer]
Trainers = Sequence[SimulatedTrainer]


def faults_of_returns(case: Case, servers: Servers, trainers: Trainers) -> Iterator[str]:
    """Yield trainers that continue with a new process of a killed server.

    It has lost the updates of the first process. Each trainer of that process therefore fails, with
    an error that names the server.
    """
    for event in case.events:
        server = servers[event.who.partition(" ")[2]] if event.kind == "return" else None
        if server is None or not server.killed:
            continue
        for t in trainers:
            welcomed = t.welcomed_at.get(server.endpoint, math.inf)
            left = t.left_at.get(f"{t.name} {event.who}", math.inf)
            if welcomed < server.killed_at < left and t.ended is not None and t.error is None:
                yield f"{t.name} ended well, and {event.who} was killed and came back"


def faults_of_garbled(case: Case, servers: Servers, trainers: Trainers) -> Iterator[str]:
    """Yield roles that do not end as they must if one message of a trainer arrives malformed.

    The server refuses the message, and the trainer ends with that. Of an asynchronous job the
    others continue.
    """
    if [e.kind for e in case.events] != ["garble"] or case.guests or not case.orderly:
        return
    line = case.events[0].who
    sender = next(t for t in trainers if line.startswith(f"{t.name} "))
    if sender.error is None or sender.greeted_at == math.inf:
        # it was not sent, or it was the last one; or the server does not know its trainer
        return
    if f"refused {sender.name}" not in str(sender.error):
        yield f"{sender.name} sent a malformed message, and ends with {sender.error}"
    if case.sync_mode or case.trainers == 1:
        return
    for role in (*servers.values(), *trainers):
        if role is not sender and role.error is not None:
            yield f"{role.name} ends with the trainer that sent a malformed message: {role.error}"
