"""Options for a trainer's communicators: connections, and parameters and tables to receive.

A *communicator* is a thread that sends gradients and receives parameters while steps run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from dtrans._jax import JaxprEqn
from dtrans.ops import CommunicatorConfig, prefetch_p, recv_p
from dtrans.protocol.trainer.traffic import Leaf
from dtrans.run.parameter_server.communicator import Communicator, Connect, Counts, NoteLost
from dtrans.run.parameter_server.equation_leaves import received_leaf


# GEO-SGD does not merge queued pushes, because it waits for an answer to each push.
ONE_BY_ONE = CommunicatorConfig(max_merge_var_num=1, merge="sum")


@dataclasses.dataclass(eq=False)
class CommunicatorSetup:
    """Options for the communicators of one trainer: threads that communicate while steps run.

    A communicator requests all parameters by one message. So the options must contain all of them
    before it starts. If a program receives further parameters, another communicator is started.

    Attributes:
      connect: function that connects to servers.
      lost: reports a lost server, and returns the exception to raise.
      deadline: seconds that a server may take to answer.
      leaves: the parameters to receive, by name of the first block; with GEO-SGD, by index.
      endpoints: endpoints of the servers that store embedding tables.
      config: the user's options of the next communicator, such as the length of its queue.
    """

    connect: Connect
    lost: NoteLost
    deadline: float
    leaves: dict[str, Leaf] = dataclasses.field(default_factory=dict)
    endpoints: set[str] = dataclasses.field(default_factory=set)
    config: CommunicatorConfig = ONE_BY_ONE

    def lacks(self, eqn: JaxprEqn) -> bool:
        """Return True if an equation receives a parameter or table that is not recorded yet."""
        if "communicator" not in eqn.params:
            return False
        if eqn.primitive is recv_p:
            leaf = received_leaf(eqn)
            return self.leaves.get(leaf.names[0]) != leaf
        return eqn.primitive is prefetch_p and not self.endpoints.issuperset(eqn.params["epmap"])

    def add(self, eqn: JaxprEqn) -> None:
        """Add the parameter of a `recv` equation, or the servers of a `prefetch` equation."""
        if eqn.primitive is recv_p:
            leaf = received_leaf(eqn)
            self.leaves[leaf.names[0]] = leaf
        else:
            self.endpoints.update(eqn.params["epmap"])

    def start(self, name: str, local_tables: Mapping[str, Leaf], counts: Counts) -> Communicator:
        """Connect to the servers, and start a communicator (thread that sends and receives).

        Args:
          name: name of the trainer for errors, such as "trainer 0".
          local_tables: tables with rows that the trainer stores (GEO-SGD), by name.
          counts: as for `Communicator`.
        """
        return Communicator(
            self.connect,
            self.lost,
            self.leaves,
            self.config,
            deadline=self.deadline,
            name=name,
            endpoints=sorted(self.endpoints),
            local_tables=local_tables,
            counts=counts,
        )
