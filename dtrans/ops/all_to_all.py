"""Exchange of rows among shards.

    x... = all_to_all x...       [name, over, size, cut, joined]

A value of which each of the `size` shards on the axes `over` has a piece along dimension `joined`, and all of it along
`cut`, becomes one of which each has a piece along `cut`, and all of it along `joined`. Every shard sends each other one
a `size`-th of what it has. Dimension `cut` is a multiple of `size`.

Source: `MPI_Alltoall`; EPL's exchange of tokens among experts (epl/ops, `all_to_all` around einsums).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dtrans.ops.primitive import communication


def _all_to_all(*xs: Any, name: str, over: Sequence[str], size: int, cut: int, joined: int) -> list[Any]:
    assert cut != joined and all(x.shape[cut] % size == 0 for x in xs), (name, xs)
    sizes = lambda x: [n // size if d == cut else n * size if d == joined else n for d, n in enumerate(x.shape)]
    return [x.update(shape=tuple(sizes(x))) for x in xs]


all_to_all_p = communication("all_to_all", _all_to_all)
