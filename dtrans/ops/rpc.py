"""The parameter-server wire, as a trainer sees it.

    token  = send X...            [epmap, names, trainer_id, trainers, sync_mode]
    token  = send_barrier token...  [endpoints, trainer_id]
    X...   = recv token           [epmap, names, types, trainer_id, trainers, sync_mode]
    X...   = fetch_barrier X...   [endpoints, trainer_id]

`send` gives one gradient's blocks to their servers and does not wait. `send_barrier` says that all
gradients of this step were sent. `recv` gives the newest blocks of one parameter: in sync mode those made of
the gradients of all trainers. `fetch_barrier` says that they have arrived.

Source: paddle/fluid/operators/distributed_ops/{send,recv,send_barrier,fetch_barrier}_op.cc.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dtrans.ops.primitive import communication, token


def _send(*blocks: Any, epmap: Sequence[str], names: Sequence[str], **_: Any) -> list[Any]:
    assert len(blocks) == len(epmap) == len(names)
    return [token()]


def _recv(*tokens: Any, epmap: Sequence[str], names: Sequence[str], types: Sequence[Any], **_: Any) -> list[Any]:
    assert len(types) == len(epmap) == len(names)
    return list(types)


send_p = communication("send", _send)
send_barrier_p = communication("send_barrier", lambda *tokens, endpoints, trainer_id: [token()])
recv_p = communication("recv", _recv)
fetch_barrier_p = communication("fetch_barrier", lambda *blocks, endpoints, trainer_id: list(blocks))
