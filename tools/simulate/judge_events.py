"""Checks of servers that are killed and started again, and of messages that arrive malformed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from tools.simulate.case import Case
from tools.simulate.server_role import SimulatedServer
from tools.simulate.trainer_role import SimulatedTrainer


Servers = Mapping[str, SimulatedServer]
Trainers = Sequence[SimulatedTrainer]


def faults_of_returns(case: Case, servers: Servers, trainers: Trainers) -> Iterator[str]:
    """Yield trainers that continue with the new process of a killed server.

    The new process does not have the updates of the killed process. So each trainer that was
    connected to the killed process must fail with an error that names the server.
    """
    for event in case.events:
        server = servers[event.who.partition(" ")[2]] if event.kind == "return" else None
        if server is None or not server.killed:
            continue
        for t in trainers:
            welcomed = t.welcomed_at.get(server.endpoint, math.inf)
            left = t.left_at.get(f"{t.name} {event.who}", math.inf)
            if welcomed < server.killed_at < left and t.ended is not None and t.error is None:
                yield f"{t.name} ended without an error, but {event.who} was killed and restarted"


def faults_of_garbled(case: Case, servers: Servers, trainers: Trainers) -> Iterator[str]:
    """Yield roles that end in another way than expected after a malformed message of a trainer.

    The server must refuse the message, and the trainer must end with this error. In an asynchronous
    job, the other trainers must continue.
    """
    if [e.kind for e in case.events] != ["garble"] or case.guests or not case.orderly:
        return
    line = case.events[0].who
    sender = next(t for t in trainers if line.startswith(f"{t.name} "))
    if sender.error is None or sender.greeted_at == math.inf:
        # The message was not sent, or was the last one, or the server did not know the trainer yet.
        return
    if f"refused {sender.name}" not in str(sender.error):
        yield f"{sender.name} sent a malformed message, but ended with {sender.error}"
    if case.sync_mode or case.trainers == 1:
        return
    for role in (*servers.values(), *trainers):
        if role is not sender and role.error is not None:
            yield f"{role.name} ends with the trainer that sent a malformed message: {role.error}"
