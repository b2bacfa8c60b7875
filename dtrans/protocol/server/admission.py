"""Admission to a server: checks of greetings, and the server's welcome.

Trainers greet a server by `hello`, and other servers greet it by `peer`. The admitted trainers are
in `dtrans.protocol.server.trainer_registry`, the other servers in
`dtrans.protocol.server.server_peers`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from dtrans.errors import WireError
from dtrans.ir import fingerprint
from dtrans.protocol import token, wire
from dtrans.protocol.server_blocks import ServerBlocks


def check_job(served: ServerBlocks, message: wire.Message) -> None:
    """Raise WireError if a trainer has another byte order, or does not fit this job.

    The checks compare the number of trainers, the trainer's id and the mode (`sync_mode`).

    Args:
      served: the server's blocks.
      message: the trainer's `hello`.
    """
    k, trainers = message["trainer"], message["trainers"]
    sync_mode = message.fields.get("sync_mode", served.sync_mode)
    if message["order"] != sys.byteorder:
        raise WireError(
            f"trainer {k} is {message['order']}-endian, pserver {served.endpoint} is "
            f"{sys.byteorder}-endian; run all roles on machines with the same byte order"
        )
    if trainers != served.trainers:
        raise WireError(
            f"trainer {k} was planned with {trainers} trainers, pserver {served.endpoint} with "
            f"{served.trainers}; every role must plan the same number of trainers"
        )
    if not 0 <= k < served.trainers:
        raise WireError(f"the trainer's id is {k}, expected 0 to {served.trainers - 1}")
    if sync_mode != served.sync_mode:
        modes = {True: "synchronous", False: "asynchronous"}
        raise WireError(
            f"trainer {k} is {modes[not served.sync_mode]}, pserver {served.endpoint} is "
            f"{modes[served.sync_mode]}; every role must plan the same sync_mode"
        )


def check_connection(message: wire.Message, session: str, connection: int) -> None:
    """Raise WireError unless a `hello` is from a new connection of a known trainer's process.

    An old `hello` may arrive late: ZeroMQ may deliver the last messages of a broken connection
    after the first messages of the next connection.

    Args:
      message: the `hello`.
      session: random word of the known trainer's process.
      connection: number of its current connection.
    """
    k = message["trainer"]
    if session != message["session"]:
        raise WireError(
            f"another process is already connected as trainer {k}; set a different "
            "DTRANS_TRAINER_ID, or trainer_id, in each process"
        )
    if message.fields.get("connection", 0) < connection:
        raise WireError(
            f"a `hello` from an earlier connection of trainer {k} arrived after the `hello` of its "
            "current connection"
        )


def check_plan(me: str, plan: Mapping[str, str], other: str, message: wire.Message) -> None:
    """Raise WireError if the sender of a greeting has another plan.

    The error names up to four differences between the two plans.

    Args:
      me: name of this server.
      plan: digest (hash) of each part of this server's plan, by name.
      other: name of the sender.
      message: the greeting.
    """
    theirs = message.fields.get("plan", {})
    if not all(isinstance(x, str) for row in theirs.items() for x in row):
        raise WireError(f"a `{message.op}` message whose field `plan` has the wrong type")
    found = fingerprint.differences(me, plan, other, theirs) if plan else []
    if found and not theirs:
        raise WireError(
            f"{other} sent no fingerprint of its plan, which {me} requires; every role must plan "
            "the same step with the same options"
        )
    if found:
        raise WireError(
            f"{other} plans something else than {me}: {'; '.join(found[:4])}; every role must plan "
            "the same step with the same options"
        )


def welcome(
    secret: str, message: wire.Message, step: int, heard: int, local: str = ""
) -> dict[str, Any]:
    """Return the fields of the welcome that answers a `hello` or `peer` message.

    Args:
      secret: the job's token.
      message: the `hello` or `peer` message.
      step: number of steps of the server.
      heard: number of messages received from the sender.
      local: path of the server's Unix socket, for trainers on the same host.
    """
    proof = token.shown(secret, f"welcome {message.fields.get('nonce', '')}")
    return {"step": step, "local": local, "proof": proof, "heard": heard}
