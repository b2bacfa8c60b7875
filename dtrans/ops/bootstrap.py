"""How trainers become a group, and start equal.

    token = gen_nccl_id            [trainer_id, endpoints]
    x...  = broadcast token x...   [root, over]

`gen_nccl_id` comes before everything else: the trainers at `endpoints` meet, and know one another
from then on (in Paddle, trainer 0 makes NCCL's id and tells the others). `broadcast` gives all
trainers what trainer `root` has.

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
