"""All-to-all: an array sharded along one dimension becomes sharded along another.

    x... = all_to_all x...       [name, over, size, cut, joined]

The operand is sharded along dimension `joined` over the `size` shards on the axes `over`; the
result is sharded along `cut`. Each shard sends 1/`size` of its operand to each other shard.
Dimension `cut` is a multiple of `size`.

Source: `MPI_Alltoall`; EPL's exchange of tokens among experts (epl/ops, `all_to_all` around
einsums).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from dtrans._jax import resized
from dtrans.ops.collective import are_dimensions, new_collective


def _type_of(x: Any, size: int, cut: int, joined: int) -> Any:
    assert cut != joined and x.shape[cut] % size == 0, (x, cut, joined, size)
    return resized(resized(x, cut, x.shape[cut] // size), joined, x.shape[joined] * size)


def _fits(shape: Sequence[int], trainers: int, cut: Any, joined: Any) -> bool:
    return are_dimensions(shape, cut, joined) and cut != joined and shape[cut] % trainers == 0


def _over_axis(*xs: Any, over: tuple[str, ...], cut: int, joined: int, **_: Any) -> Sequence[Any]:
    return [jax.lax.all_to_all(x, over, cut, joined, tiled=True) for x in xs]


all_to_all_p = new_collective(
    "all_to_all",
    params=("cut", "joined"),
    type_of=_type_of,
    fits=_fits,
    result=lambda parts, mine, xp, cut, joined: xp.concatenate(
        [mine(x, cut) for x in parts], joined
    ),
    over_axis=_over_axis,
)
