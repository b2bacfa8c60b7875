"""Input files of each worker, for workers with unequal numbers of replicas.

A worker reads files in proportion to its replicas, so that all replicas run out of data at the same
time. The *share* of a worker is its number of replicas, divided by the greatest common divisor of
all workers' numbers of replicas. Files are assigned in rounds. In each round every worker in turn
gets as many files as its share.

If the files do not fill the last round, every worker reads all files, and repeats them as many
times as its share. This is EPL's rule. Two options of `slice_files` replace this rule. EPL also
shuffles the files of a worker; here they keep their order.

Source: `fetch_slice_objects_proportion_to_local_num_replicas` of EPL
  (epl/parallel/graph_editor.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from dtrans.errors import ConfigError


File = TypeVar("File")


def slice_files(
    files: Sequence[File],
    worker: int,
    replicas: Sequence[int],
    *,
    unbalanced: bool = False,
    drop_last: bool = False,
) -> list[File]:
    """Return the files that one worker reads, in order.

    Args:
      files: the names of all files, in the same order on every worker.
      worker: the index of the worker, from 0.
      replicas: the number of replicas of each worker.
      unbalanced: also assign the files of an incomplete round, so that some workers read more than
        their share.
      drop_last: drop the files of an incomplete round.

    Returns:
      The worker's part of the files, if all rounds are full or one of the options is set. Otherwise
      all files, repeated as many times as the worker's share. If the files do not fill the first
      round, options have no effect: the result is all files, repeated.

    Raises:
      ConfigError: `replicas` is empty or has a number below 1, the worker does not exist, or both
        options are set.

    Source: `fetch_slice_objects_proportion_to_local_num_replicas` of EPL
      (epl/parallel/graph_editor.py).

    Example:
      >>> from dtrans.epl import slice_files
      >>> files = ["a", "b", "c", "d", "e", "f"]
      >>> slice_files(files, 0, replicas=[4, 2]), slice_files(files, 1, replicas=[4, 2])
      (['a', 'b', 'd', 'e'], ['c', 'f'])
      >>> slice_files(files[:4], 0, replicas=[4, 2], unbalanced=True)
      ['a', 'b', 'd']
      >>> slice_files(files[:4], 1, replicas=[4, 2])
      ['a', 'b', 'c', 'd']
    """
    if not replicas:
        raise ConfigError("replicas is empty; pass the number of replicas of each worker")
    for i, count in enumerate(replicas):
        if count < 1:
            raise ConfigError(
                f"replicas[{i}] is {count}; expected at least 1 replica for each worker"
            )
    if not 0 <= worker < len(replicas):
        raise ConfigError(
            f"worker is {worker}; expected 0 to {len(replicas) - 1}, because replicas has "
            f"{len(replicas)} entries"
        )
    if unbalanced and drop_last:
        raise ConfigError(
            "unbalanced and drop_last are both True, but unbalanced=True assigns the files of an "
            "incomplete round, and drop_last=True drops them; pass one of them"
        )
    divisor = math.gcd(*replicas)
    shares = [count // divisor for count in replicas]
    round_size, share = sum(shares), shares[worker]
    remainder = len(files) % round_size
    if len(files) < round_size or (remainder and not unbalanced and not drop_last):
        return list(files) * share
    first = sum(shares[:worker])
    if drop_last:
        files = files[: len(files) - remainder]
    assigned: list[File] = []
    for start in range(first, len(files), round_size):
        assigned += files[start : start + share]
    return assigned
