"""One process of a pipeline that Slurm started, with a separate loopback address.

So each process seems to be on a separate host. The argument is a folder for the results.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import jax
import numpy as np
from cluster_trainer import refused
from pipeline_models import MODELS

import dtrans
from dtrans.run.distributed import address
from dtrans.run.pipeline_parallel import p2p


ROWS = 8


def listening(port: str) -> list[str]:
    """Return the addresses at which this host listens at a port, in Linux's notation."""
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    bound = [row[1].split(":") for row in rows if row[3] == "0A"]
    return [host for host, its in bound if int(its, 16) == int(port)]


def main(folder: Path) -> None:
    me = int(os.environ["SLURM_PROCID"])
    p2p.this_host = lambda: f"node{me}"
    address.route_to = lambda host, port: f"127.0.0.{2 + me}"
    address.is_loopback = lambda host: False  # treat loopback addresses as reachable by other hosts
    jax.config.update("jax_num_cpu_devices", 1)
    cluster = dtrans.connect(deadline=60)
    of = MODELS["mlp"].job(ROWS)
    plan = dtrans.pipeline(*of.traced(), num_stages=2, num_micro_batch=2)
    said = {
        "remote": refused(plan.on_cluster),
        "trainers": cluster.trainers,
        "endpoints": cluster.endpoints,
    }
    said["listens"] = listening(os.environ["JAX_COORDINATOR_PORT"])
    dtrans.connect(allow_remote=True)
    job = plan.on_cluster()
    said["peers"] = list(job.processes._links._peers.values())
    mine = slice(me * ROWS // 2, (me + 1) * ROWS // 2)
    _, loss = job.step(job.init(jax.random.key(0)), *(np.asarray(x)[mine] for x in of.batch))
    said["loss"] = float(loss)
    (folder / f"{me}.json").write_text(json.dumps(said))
    job.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
