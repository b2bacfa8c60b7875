"""Parameter server of `test_endpoints.py`.

python serve.py ENDPOINT ALL,ENDPOINTS PARAMETERS MODE
"""

from __future__ import annotations

import sys

import jax
from models import mlp, programs
from test_mesh import SIZES

import dtrans


if __name__ == "__main__":
    endpoint, pservers, parameters, mode = sys.argv[1:]
    sizes, rows = SIZES[parameters]
    t = dtrans.DistributeTranspiler()
    main, startup = programs(*mlp(sizes, rows))
    t.transpile(0, main, pservers, 1, sync_mode=mode == "sync", startup_program=startup)
    pserver, pserver_startup = t.get_pserver_programs(endpoint)
    with dtrans.Executor() as exe:
        exe.run(pserver, exe.run(pserver_startup, jax.random.key(0)))
