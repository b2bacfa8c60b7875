"""A trainer's requests for blocks of parameters. The request for blocks ends a step.

recv           records the blocks of a parameter
send_barrier   records the servers to which the end of the step is sent
fetch_barrier  sends one request to each server for all recorded blocks, and waits for the blocks
receive        does the same before an equation that may read the parameters
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dtrans._jax import JaxprEqn
from dtrans.protocol.buffers import BufferPool
from dtrans.protocol.trainer.trainer_steps import Landing
from dtrans.run.parameter_server.equation_leaves import received_leaf
from dtrans.run.parameter_server.server_connections import ServerConnections


class BlockRequests:
    """Requests of one trainer for blocks of parameters.

    Args:
      connections: the trainer's connections to servers.
    """

    def __init__(self, connections: ServerConnections) -> None:
        self._connections = connections
        self._pool = BufferPool()
        self._landings: list[Landing] = []  # blocks that `recv` has recorded
        # endpoints of this step's `send_barrier`, until the message that ends the step is sent
        self._barriered: tuple[str, ...] = ()

    def recv(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        """Return the arrays into which the blocks of a `recv` are written later."""
        self._connections.identify(eqn)
        leaf = received_leaf(eqn)
        memory = self._pool.take(leaf.names[0], leaf.shape, leaf.dtype)
        blocks = leaf.blocks(memory)
        self._landings += blocks
        if len(eqn.params["types"]) == 1:
            return [memory]
        return [rows for _, _, rows in blocks]

    def send_barrier(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        """Record the servers of a `send_barrier`, until the request for blocks ends the step."""
        self._barriered = eqn.params["endpoints"]
        return [None]

    def fetch_barrier(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        """End the step, and receive all recorded blocks; return their arrays."""
        landings = self._landings
        if "trainers" in eqn.params:
            self._connections.identify(eqn)
        # Servers without a requested block must answer, too. They answer when all trainers have
        # ended the step, so that no trainer runs ahead.
        self._land(landings, eqn.params["endpoints"])
        return [rows for _, _, rows in landings]

    def receive(self) -> None:
        """Receive all recorded blocks, if there are any; this ends the step."""
        if self._landings:
            self._land(self._landings, self._barriered)

    def _land(self, landings: Sequence[Landing], endpoints: Sequence[str]) -> None:
        """Send the message that ends the step, and wait for the answers.

        Args:
          landings: the blocks to receive, with memory for them.
          endpoints: endpoints of servers that must answer, even if they have none of the blocks.
        """
        barriered, self._landings, self._barriered = self._barriered, [], ()
        self._connections.run(self._connections.steps.request(landings, endpoints, barriered))
