"""Steps of parameter servers on hosts with links of 1 Gbit/s, compared with plain sockets.

`hosts.py` has more options, and prints the share of the best possible time.
"""

from __future__ import annotations

import math

import pytest
from hosts import Setup, measure
from mlp_job import MODELS

from tools.namespaces import namespaces, why_not


ROUNDS = 5


@pytest.mark.skipif(bool(why_not("tbf")), reason=why_not("tbf") or "hosts can be created")
@pytest.mark.parametrize("parameters", MODELS)
def test_two_trainers_and_two_servers_on_four_hosts(benchmark, report, parameters):
    setup = Setup(parameters, trainers=2, pservers=2, compute="run", encryption="disabled")
    with namespaces(setup.hosts) as hosts:
        run = lambda: list(measure(setup, hosts, ["1gbit"], 0.0, ROUNDS, steps=ROUNDS))
        (result,) = benchmark.pedantic(run, rounds=1)
    print(f"\n{result}")
    ours, theirs = (result.windows[kind][-1] for kind in setup.jobs)
    assert math.isclose(ours.loss, theirs.loss, rel_tol=1e-4)  # both jobs do the same work
    assert ours.sent >= result.payload
    seconds = [result.seconds(kind) for kind in setup.jobs]
    report(f"{parameters}: a step / on plain sockets", result.ratio(), *(1 / x for x in seconds))
