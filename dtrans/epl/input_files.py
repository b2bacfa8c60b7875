"""Which input files each worker reads, where workers have unequal numbers of replicas.

A worker reads in proportion to its replicas, so that all replicas run out of data together. The
counts divided by their greatest common divisor are the workers' shares; files are dealt out in
rounds of as many as the shares make together, and in each round a worker takes as many as its
share, one after the other.

Only files that fill whole rounds can be shared out fairly. For what does not, EPL's rule is kept:
every worker reads every file, as often as its share, unless one of the two options says otherwise.
EPL shuffles what a worker then reads, and each worker does so by itself; here the order is the
files' own.

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
    """The files that one worker reads, in order.

    Args:
      files: the names of all files (or anything else that is read one by one), the same on every
        worker.
      worker: whose files, from 0.
      replicas: how many replicas each worker has.
      unbalanced: deal out the files of a round that is not full, too; some workers then read more
        than their share.
      drop_last: leave those files out; no worker reads them.

    Returns:
      Where the files fill whole rounds, or an option lets the last one go: the worker's part of
      them. Otherwise, and always where there are fewer files than one round takes: all files, as
      many times as the worker's share.

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
        raise ConfigError("replicas is empty; it says how many replicas each worker has")
    for i, count in enumerate(replicas):
        if count < 1:
            raise ConfigError(
                f"replicas[{i}] is {count}; a worker that reads files has at least one replica"
            )
    if not 0 <= worker < len(replicas):
        raise ConfigError(
            f"there is no worker {worker}: replicas={list(replicas)} is of {len(replicas)} workers"
        )
    if unbalanced and drop_last:
        raise ConfigError(
            "unbalanced deals out the files that are left over and drop_last leaves them out; "
            "choose one"
        )
    divisor = math.gcd(*replicas)
    shares = [count // divisor for count in replicas]
    round_size, share = sum(shares), shares[worker]
    left = len(files) % round_size
    if len(files) < round_size or (left and not unbalanced and not drop_last):
        return list(files) * share
    first = sum(shares[:worker])
    dealt = files[: len(files) - left] if drop_last else files
    return [file for i, file in enumerate(dealt) if first <= i % round_size < first + share]
