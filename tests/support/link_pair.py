"""The links between two processes of a pipeline, in one process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from unittest import mock

import jax
from role_threads import HANG, free_endpoints

from dtrans.run.distributed import board as board_module
from dtrans.run.distributed.membership import Membership
from dtrans.run.pipeline_parallel import p2p
from dtrans.run.pipeline_parallel.p2p import P2PChannels


class Board:
    """Key-value store that all processes of a job share, as in `jax.distributed`."""

    def __init__(self) -> None:
        self._told: dict[str, str] = {}
        self._changed = threading.Condition()

    def key_value_set(self, key: str, value: str) -> None:
        with self._changed:
            self._told[key] = value
            self._changed.notify_all()

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._told, milliseconds / 1000):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self._told[key]


@contextlib.contextmanager
def two_links(encryption: str = "auto") -> Iterator[list[P2PChannels]]:
    """Yield the connected links of both processes."""
    board, made = Board(), dict[int, P2PChannels]()
    endpoints = free_endpoints(2)

    def make(k: int) -> None:
        made[k] = P2PChannels(
            Membership(k, (0, 1), endpoints, deadline=HANG, encryption=encryption), "job"
        )

    with (
        mock.patch.object(board_module, "bulletin_board", lambda: board),
        mock.patch.object(p2p, "coordinator", lambda: "127.0.0.1:1"),
    ):
        threads = [threading.Thread(target=make, args=(k,)) for k in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(HANG)
    try:
        yield [made[0], made[1]]
    finally:
        for x in made.values():
            x.close()
