"""Bootstrap of trainers: they connect, and start with equal values.

    token = gen_nccl_id            [trainer_id, endpoints]
    x...  = broadcast token x...   [root, over]

`gen_nccl_id` is the first equation: the trainers at `endpoints` connect to each other. (In Paddle,
trainer 0 creates NCCL's id, and sends the id to all trainers.) `broadcast` sends the values of
trainer `root` to all trainers.

Source: paddle/fluid/operators/collective/gen_nccl_id_op.cc and c_broadcast_op.cc.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dtrans.ops.primitive import communication, token


def _gen_nccl_id(*, trainer_id: int, endpoints: Sequence[str]) -> list[Any]:
    assert 0 <= trainer_id < len(endpoints)
    return [token()]


gen_nccl_id_p = communication("gen_nccl_id", _gen_nccl_id)
broadcast_p = communication("broadcast", lambda after, *xs, root, over: list(xs))
