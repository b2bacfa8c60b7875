"""Ray cluster on this machine, in a separate process, because Ray forks and JAX does not support
forks.

As a script, this file starts nodes, prints the address and waits for lines. A line with the id of a
node removes this node, and the end of standard input ends the cluster.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from types import TracebackType


NODES, CPUS = 3, 2  # nodes of a cluster, and processors of each


class RayCluster:
    """Cluster for a test, as a context manager.

    Args:
      nodes: number of nodes.
      cpus: processors of each node, for Ray.

    Attributes:
      address: address of the cluster, for `ray.init`.
    """

    def __init__(self, nodes: int = NODES, cpus: int = CPUS) -> None:
        # the actors must find dtrans and the modules of the tests
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(x for x in sys.path if x)}
        command = [sys.executable, __file__, str(nodes), str(cpus)]
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.address = next(
            line.split()[1] for line in self._process.stdout if line.startswith("address ")
        )

    def remove(self, node: str) -> None:
        """Remove a node, by its id."""
        assert self._process.stdin is not None
        print(node, file=self._process.stdin, flush=True)

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.communicate()


def main() -> None:
    """Run the cluster until standard input ends."""
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")  # names of sockets in it must be short
    os.environ |= {
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
    }
    os.environ |= {"RAY_worker_niceness": "0"}  # Ray's 15 lets actors starve beside other tests
    from ray.cluster_utils import Cluster

    count, cpus = map(int, sys.argv[1:])
    options = {"num_cpus": cpus, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**options, "include_dashboard": False})
    try:
        nodes = [cluster.head_node, *(cluster.add_node(**options) for _ in range(count - 1))]
        print(f"address {cluster.address}", flush=True)
        for line in sys.stdin:
            (node,) = (x for x in nodes if x.node_id == line.strip())
            cluster.remove_node(node)
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
