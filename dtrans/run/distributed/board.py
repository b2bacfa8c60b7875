"""What the processes of a job tell each other, on the board that JAX's coordinator keeps."""

from __future__ import annotations

import dataclasses
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


LOOK = 0.5  # seconds after which one that waits looks whether another has ended


def read(place: str, limit: float, look: Callable[[], None]) -> str | None:
    """What is at a place of the board, or None when there is nothing by a time of the monotonic
    clock.

    Args:
      look: is called now and then while nothing is there; what it raises ends the wait.
    """
    while True:
        left = limit - time.monotonic()
        try:
            found = bulletin_board().blocking_key_value_get(
                place, math.ceil(max(0.001, min(left, LOOK)) * 1000)
            )
            return str(found)
        except jax.errors.JaxRuntimeError as e:
            if "DEADLINE_EXCEEDED" not in str(e):
                raise
        look()
        if left <= LOOK:
            return None


def told(
    cluster: Membership,
    what: str,
    mine: str,
    missed: str,
    look: Callable[[int], None] = lambda k: None,
) -> dict[int, str]:
    """What each process says; this one says `mine`.

    Args:
      what: it is about, the same in all processes and once in a job.
      missed: what one that says nothing does not do, for the message.
      look: is called now and then with the number of a process that is waited for.

    Raises:
      DeadlineError: one did not say it.
    """
    me, found = cluster.trainer_id, {cluster.trainer_id: mine}
    bulletin_board().key_value_set(f"dtrans/{what}/{me}", mine)
    for k in set(range(cluster.trainers)) - {me}:
        word = read(f"dtrans/{what}/{k}", time.monotonic() + cluster.deadline, lambda k=k: look(k))  # type: ignore[misc]
        if word is None:
            raise DeadlineError(
                f"trainer {me} waited {cluster.deadline:g} s for trainer {k} to {missed}"
            )
        found[k] = word
    return found


def shared_keys(
    cluster: Membership, what: str, missed: str, look: Callable[[int], None] = lambda k: None
) -> Keys:
    """Return keys that only the processes of a job have: of the job, and of a word of its first
    process.

    Raises:
      ConfigError: another process protects its connections in another way.
    """
    keys = cluster.keys
    words = told(cluster, f"{what}/words", f"{token.new_token()} {keys.setting}", missed, look)
    for k, said in words.items():
        _, _, setting = said.partition(" ")
        if setting != keys.setting:
            raise ConfigError(
                f"trainer {cluster.trainer_id} has {keys.setting}, and trainer {k} has {setting}; "
                "give all processes "
                f"of a job the same, or {ENCRYPTION}"
            )
    return dataclasses.replace(keys, word=words[min(words)].partition(" ")[0])
