"""Messages between trainers before their own connections exist: texts in JAX's key-value store.

JAX's coordinator (in trainer 0) has a small store of keys and texts that all processes can reach.
The trainers of an nccl2 job use it to exchange addresses, secrets and digests of their programs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable

import jax

from dtrans._jax import bulletin_board
from dtrans.errors import ConfigError, DeadlineError
from dtrans.protocol import token
from dtrans.run.distributed.membership import Membership
from dtrans.run.net.keys import Keys
from dtrans.run.net.net_options import ENCRYPTION


CHECK_EVERY = 0.5  # seconds between two calls of `check` during a wait


def read(place: str, limit: float, check: Callable[[], None]) -> str | None:
    """Wait until another process has written a key of JAX's store, and return the value.

    JAX's own wait cannot be interrupted. This function waits in short intervals, so that `check`
    can raise an error in between, for example if the other trainer has ended.

    Args:
      place: the key.
      limit: end of the wait, in seconds of the monotonic clock.
      check: called every half a second of the wait. An exception that it raises ends the wait.

    Returns:
      The value; None if the key has no value by `limit`.
    """
    while True:
        left = limit - time.monotonic()
        try:
            found = bulletin_board().blocking_key_value_get(
                place, math.ceil(max(0.001, min(left, CHECK_EVERY)) * 1000)
            )
            return str(found)
        except jax.errors.JaxRuntimeError as e:
            if "DEADLINE_EXCEEDED" not in str(e):
                raise
        check()
        if left <= CHECK_EVERY:
            return None


def all_gather_text(
    cluster: Membership,
    topic: str,
    text: str,
    missed: str,
    check: Callable[[int], None] = lambda k: None,
) -> dict[int, str]:
    """Exchange one text per trainer through the coordinator's store, and return all texts.

    Every trainer calls this function with the same `topic`. For example, trainers exchange the
    names of their hosts before they choose addresses.

    Args:
      cluster: the job.
      topic: a key, the same in all processes. A job uses each key once.
      text: this process's text.
      missed: a verb that completes the error "waited for trainer 1 to ...", such as "connect".
      check: called every half a second of a wait, with the id of the trainer that it waits for.

    Returns:
      The text of each trainer, by its id.

    Raises:
      DeadlineError: a process did not write its text in time.
    """
    me, found = cluster.trainer_id, {cluster.trainer_id: text}
    bulletin_board().key_value_set(f"dtrans/{topic}/{me}", text)
    for k in set(range(cluster.trainers)) - {me}:
        limit = time.monotonic() + cluster.deadline
        theirs = read(f"dtrans/{topic}/{k}", limit, functools.partial(check, k))
        if theirs is None:
            raise DeadlineError(
                f"trainer {me} waited {cluster.deadline:g} s for trainer {k} to {missed}"
            )
        found[k] = theirs
    return found


def shared_keys(
    cluster: Membership, topic: str, missed: str, check: Callable[[int], None] = lambda k: None
) -> Keys:
    """Return keys that only the processes of this run have, for connections between them.

    The keys are derived from the job's token and a random text. The first process draws this text
    and sends it to the other processes. A process of another run may have the same token, but not
    the random text, so it cannot connect.

    Args:
      cluster: the job.
      topic, missed, check: as for `all_gather_text`.

    Raises:
      ConfigError: another process has a different `transport_encryption`.
      DeadlineError: a process did not write its text to the store in time.
    """
    keys = cluster.keys
    text = f"{token.new_token()} {keys.setting}"
    words = all_gather_text(cluster, f"{topic}/words", text, missed, check)
    for k, theirs in words.items():
        _, _, setting = theirs.partition(" ")
        if setting != keys.setting:
            raise ConfigError(
                f"trainer {cluster.trainer_id} has {keys.setting}, and trainer {k} has {setting}; "
                f"pass the same value in all processes, or set {ENCRYPTION} in all of them"
            )
    return dataclasses.replace(keys, word=words[min(words)].partition(" ")[0])
