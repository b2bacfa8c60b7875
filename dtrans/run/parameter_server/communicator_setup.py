"""Setup of a trainer's communicators: connections, options, parameters to receive, and tables."""

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
    """Setup of one trainer's communicators, which run one after the other.

    A communicator requests all parameters by one message. So the setup must contain all of them
    when a communicator starts.

    Attributes:
      connect: function that connects to servers.
      lost: reports a lost server, and returns the exception to raise.
      deadline: seconds that a server may take to answer.
      leaves: the parameters to receive, by name of the first block; with GEO-SGD, by index.
      endpoints: endpoints of the servers of tables.
      config: options of the next communicator.
    """

    connect: Connect
    lost: NoteLost
    deadline: float
    leaves: dict[str, Leaf] = dataclasses.field(default_factory=dict)
    endpoints: set[str] = dataclasses.field(default_factory=set)
    config: CommunicatorConfig = ONE_BY_ONE

    def lacks(self, eqn: JaxprEqn) -> bool:
        """Return True if the setup lacks the parameter or the servers of an equation."""
        if "communicator" not in eqn.params:
            return False
        if eqn.primitive is recv_p:
            leaf = received_leaf(eqn)
            return self.leaves.get(leaf.names[0]) != leaf
        return eqn.primitive is prefetch_p and not self.endpoints.issuperset(eqn.params["epmap"])

    def add(self, eqn: JaxprEqn) -> None:
        """Add the parameter of a `recv`, or the servers of a `prefetch`."""
        if eqn.primitive is recv_p:
            leaf = received_leaf(eqn)
            self.leaves[leaf.names[0]] = leaf
        else:
            self.endpoints.update(eqn.params["epmap"])

    def start(self, name: str, local_tables: Mapping[str, Leaf], counts: Counts) -> Communicator:
        """Connect to the servers, and return a new communicator.

        Args:
          name: the trainer, for errors.
          local_tables: tables with local rows, by name.
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
