"""What the processes of a job tell each other while they connect, on the board that JAX's coordinator keeps."""

from __future__ import annotations

import jax

from dtrans._jax import bulletin_board
from dtrans.errors import DeadlineError
from dtrans.protocol import token
from dtrans.run.distributed.membership import Membership


def told(cluster: Membership, what: str, mine: str, missed: str) -> dict[int, str]:
    """What each process says; this one says `mine`.

    Args:
      what: it is about, the same in all processes and once in a job.
      missed: what one that says nothing does not do, for the message.

    Raises:
      DeadlineError: one did not say it.
    """
    me, board = cluster.trainer_id, bulletin_board()
    found = {me: mine}
    board.key_value_set(f"dtrans/{what}/{me}", mine)
    for k in set(range(cluster.trainers)) - {me}:
        try:
            found[k] = board.blocking_key_value_get(f"dtrans/{what}/{k}", max(1, int(cluster.deadline * 1000)))
        except jax.errors.JaxRuntimeError as e:
            if "DEADLINE_EXCEEDED" not in str(e):
                raise
            raise DeadlineError(f"trainer {me} waited {cluster.deadline:g} s for trainer {k} to {missed}") from e
    return found


def shared_secret(cluster: Membership, what: str, missed: str) -> str:
    """A secret that the processes of a job have, and nobody else: the job's token, and a word of its first process."""
    words = told(cluster, f"{what}/words", token.new_token(), missed)
    return token.job_token() + words[min(words)]
