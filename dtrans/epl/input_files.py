"""Input files of each worker, where workers have unequal numbers of replicas.

A worker reads in proportion to its replicas, so that all replicas run out of data together. A
worker's share is its number of replicas, divided by the greatest common divisor of all. Files are
dealt in rounds. In each round the workers take as many files as their share, one after the other.

Only full rounds are fair. Where the last round is not full, EPL's rule applies: every worker reads
every file, as many times as its share. Two options change this rule. Workers of EPL shuffle their
files; here files keep their order.

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
      files: the names of all files (or other things to read), the same on every worker.
      worker: the index of the worker, from 0.
      replicas: the number of replicas of each worker.
      unbalanced: deal the files of an incomplete round too; some workers then read more than their
        share.
      drop_last: drop the files of an incomplete round.

    Returns:
      The worker's part of the files, if rounds are full or an option covers the incomplete one.
      Otherwise all files, as many times as the worker's share. The same where there are fewer files
      than one round takes.

    Raises:
      ConfigError: no replicas, a worker that does not exist, or both options.

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
                f"replicas[{i}] is {count}; a worker that reads files has at least one replica"
            )
    if not 0 <= worker < len(replicas):
        raise ConfigError(
            f"there is no worker {worker}: replicas={list(replicas)} has {len(replicas)} workers"
        )
    if unbalanced and drop_last:
        raise ConfigError(
            "unbalanced=True deals out the files of an incomplete round, and drop_last=True drops "
            "them; choose one"
        )
    divisor = math.gcd(*replicas)
    shares = [count // divisor for count in replicas]
    round_size, share = sum(shares), shares[worker]
    remainder = len(files) % round_size
    if len(files) < round_size or (remainder and not unbalanced and not drop_last):
        return list(files) * share
    first = sum(shares[:worker])
    dealt = files[: len(files) - remainder] if drop_last else files
    return [file for i, file in enumerate(dealt) if first <= i % round_size < first + share]
