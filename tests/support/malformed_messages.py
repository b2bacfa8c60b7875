"""Messages that no process of a job sends."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgpack

from dtrans.protocol import wire


NUMBERS = [None, True, -1, 0, 1, 2**63, 2**64 - 1, 1.5, float("nan")]
VALUES: list[Any] = [
    *NUMBERS,
    "",
    "x" * 300,
    b"",
    [],
    [[]],
    {},
    {"a": 1},
    [["float32", [1 << 40], []]],
]


def malformed(
    r: random.Random, proper: Sequence[list[bytes]], values: Sequence[Any] = VALUES
) -> list[bytes]:
    """Return noise, a header with arbitrary values, or a valid message with changed bits."""
    kind = r.randrange(3)
    if kind == 0:
        return [r.randbytes(r.randrange(60)) for _ in range(r.randrange(4))]
    if kind == 1:
        op = r.choice([*wire.FIELDS, "other", 7, None])
        fields = {
            n: r.choice(values)
            for n in [*wire.FIELDS.get(op, {}), *wire.OPTIONAL.get(op, {}), "then"]
            if r.random() < 0.9
        }
        head = msgpack.packb(
            {"v": r.choice([wire.VERSION, wire.VERSION, 0, "1"]), "op": op, **fields}
        )
        return [head, *(r.randbytes(r.randrange(40)) for _ in range(r.randrange(3)))]
    frames = [bytearray(f) for f in r.choice(proper)]
    for _ in range(r.randrange(1, 4)):
        frame = r.choice(frames)
        frame[r.randrange(len(frame))] ^= 1 << r.randrange(8)
    return [bytes(f) for f in frames]
