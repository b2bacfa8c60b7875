"""A trainer's requests for parameters. A *block* is the part of a parameter on one server.

One message to each server requests all blocks and ends the step. So the equations of a program that
receive parameters are executed late:

    recv           records the blocks of a parameter, and returns memory for them
    send_barrier   records the servers that get gradients in this step
    fetch_barrier  sends one request to each server for all recorded blocks, and waits for them
    receive        does the same in a program without fetch_barrier
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
    """Requests of one trainer for parameters. They are collected, and sent at the end of a step.

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
        """Record a request for a parameter; return the arrays into which it will be written."""
        self._connections.identify(eqn)
        leaf = received_leaf(eqn)
        memory = self._pool.take(leaf.names[0], leaf.shape, leaf.dtype)
        blocks = leaf.blocks(memory)
        self._landings += blocks
        if len(eqn.params["types"]) == 1:
            return [memory]
        return [rows for _, _, rows in blocks]

    def send_barrier(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        """Record that all gradients of the step are sent. The next message tells the servers."""
        self._barriered = eqn.params["endpoints"]
        return [None]

    def fetch_barrier(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        """End the step: request all recorded blocks, wait for them, and return their arrays."""
        landings = self._landings
        if "trainers" in eqn.params:
            self._connections.identify(eqn)
        # Servers without a requested block must answer, too. They answer when all trainers have
        # ended the step, so that no trainer runs ahead.
        self._land(landings, eqn.params["endpoints"])
        return [rows for _, _, rows in landings]

    def receive(self) -> None:
        """Request all recorded blocks, if any, and wait for them; this ends the step."""
        if self._landings:
            self._land(self._landings, self._barriered)

    def _land(self, landings: Sequence[Landing], endpoints: Sequence[str]) -> None:
        """Send the message that ends the step to all servers, and wait for their answers.

        Args:
          landings: the blocks to receive, with memory for them.
          endpoints: endpoints of servers that must answer, even if they have none of the blocks.
        """
        barriered, self._landings, self._barriered = self._barriered, [], ()
        self._connections.run(self._connections.steps.request(landings, endpoints, barriered))
