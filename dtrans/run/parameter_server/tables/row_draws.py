"""Random numbers with which a row filter decides to store a new row of an embedding table.

A number depends on four things: the arguments of the init, the table's name, the row's id, and the
number of the update. So it depends neither on the row's server nor on other rows, and a repeated
step has the same numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from dtrans.ir.array_fns import words


class RowDraws:
    """Random numbers with which a row filter decides to store rows of a table.

    Args:
      table: name of the table.
      args: arguments of the init.

    Example:
      >>> import numpy as np
      >>> from dtrans.run.parameter_server.tables.row_draws import RowDraws
      >>> draws = RowDraws("params/emb", [np.array([0, 7], np.uint32)])
      >>> draws(np.array([3, 8]), step=5).tolist()[1:] == draws(np.array([8]), step=5).tolist()
      True
    """

    def __init__(self, table: str, args: Sequence[Any]) -> None:
        seed = zlib.crc32(table.encode())
        for x in args:
            seed = zlib.crc32(np.asarray(words(x)).tobytes(), seed)
        self._seed = np.array([seed], np.uint64)

    def __call__(self, ids: np.ndarray, step: int) -> np.ndarray:
        """Return a number in [0, 1) for each row.

        Args:
          ids: ids of rows in the table.
          step: the number of updates before this one.
        """
        key = _mix(_mix(self._seed) + np.uint64(step))
        bits = _mix(key ^ _mix(ids.astype(np.uint64)))
        return (bits >> np.uint64(11)) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    """Map 64-bit numbers one-to-one to other numbers; each output bit depends on all input bits.

    Source: the output function of SplitMix64 (Steele, Lea and Flood, 2014).
    """
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
