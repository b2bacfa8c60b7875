"""The same job gives the same programs: in any order of calls, repeatedly, in several threads, and
in other processes.

Another process orders sets differently.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import optax
import pytest
from helpers import init_of, mlp_batch, mlp_loss, mlp_params

import dtrans
from dtrans.ir.program import Program


SIZES = (30, 600, 5)
PSERVERS = ("127.0.0.1:6174", "127.0.0.1:6175", "127.0.0.1:6176")
ENDPOINTS = ("127.0.0.1:6184", "127.0.0.1:6185")
JOBS: dict[str, dict[str, Any]] = {
    "pserver": {},
    "asynchronous": {"sync_mode": False, "enable_dc_asgd": True},
    "whole leaves": {"slice_var_up": False, "split_method": dtrans.HashName},
    "nccl2": {"mode": "nccl2"},
}

Asks = dict[str, Callable[[], Program]]


def transpiled(job: str) -> dtrans.DistributeTranspiler:
    """Return a transpiler that has traced the step and the init."""
    options = JOBS[job]
    clip = optax.identity() if job == "asynchronous" else optax.clip_by_global_norm(0.1)
    tx = optax.chain(clip, optax.adamw(optax.cosine_decay_schedule(1e-2, 9)))
    params = mlp_params(SIZES)
    main = dtrans.trace(
        dtrans.make_train_step(mlp_loss, tx),
        params,
        jax.eval_shape(tx.init, params),
        *mlp_batch(8, SIZES),
    )
    t = dtrans.DistributeTranspiler(dtrans.DistributeTranspilerConfig(**options))
    startup, nccl2 = dtrans.trace(init_of(tx), params), options.get("mode") == "nccl2"
    t.transpile(
        1,
        main,
        ",".join(PSERVERS),
        ",".join(ENDPOINTS) if nccl2 else 2,
        True,
        startup,
        ENDPOINTS[1],
    )
    return t


def asks_of(t: dtrans.DistributeTranspiler, job: str) -> Asks:
    """Return the calls for all programs, by name."""
    asks: Asks = {
        "trainer": t.get_trainer_program,
        "trainer startup": t.get_trainer_startup_program,
    }
    for ep in () if job == "nccl2" else PSERVERS:
        asks[f"{ep}"] = lambda ep=ep: t.get_pserver_program(ep)
        asks[f"{ep} startup"] = lambda ep=ep: t.get_pserver_programs(ep)[1]
    return asks


def told(program: Program) -> tuple[str, str]:
    return str(program), program.fingerprint


def of(t: dtrans.DistributeTranspiler, job: str) -> dict[str, tuple[str, str]]:
    """Return the text and the fingerprint of each program, and the plan."""
    return {name: told(ask()) for name, ask in asks_of(t, job).items()} | {
        "plan": (str(t.plan), "")
    }


@pytest.mark.sampled(1)
@pytest.mark.parametrize("job", JOBS)
def test_any_order_and_any_number_of_calls(job: str) -> None:
    want = of(transpiled(job), job)
    # no two programs are equal
    assert len({fingerprint for _, fingerprint in want.values()}) == len(want)
    programs = {n: x for n, x in want.items() if n != "plan"}
    for t in (transpiled(job), transpiled(job)):
        asks = asks_of(t, job)
        names = [*asks]
        orders = [names[i:] + names[:i] for i in range(len(names))]
        for order in (*orders, *(o[::-1] for o in orders)):
            assert {name: told(asks[name]()) for name in order} == programs
        assert str(t.plan) == want["plan"][0]
    backwards = asks_of(transpiled(job), job)  # the last program is requested first
    assert {name: told(backwards[name]()) for name in reversed(backwards)} == programs


@pytest.mark.parametrize("job", JOBS)
def test_eight_threads_at_once(job: str) -> None:
    """Each thread has a transpiler, and all threads share another one."""
    want, shared = of(transpiled(job), job), transpiled(job)
    begin = threading.Barrier(8)
    found: list[Any] = [None] * 8

    def body(i: int) -> None:
        begin.wait(60)
        asks = [*asks_of(shared, job).items()]
        asks = asks[i % len(asks) :] + asks[: i % len(asks)]
        found[i] = of(transpiled(job), job), {name: told(ask()) for name, ask in asks}

    threads = [threading.Thread(target=body, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for own, of_shared in found:
        assert own == want
        assert of_shared == {n: x for n, x in want.items() if n != "plan"}


SCRIPT = """
import json
from test_same_programs import JOBS, of, transpiled
print(json.dumps({job: of(transpiled(job), job) for job in JOBS}))
"""


def test_processes_that_order_sets_differently_print_the_same_bytes() -> None:
    path = os.pathsep.join([os.path.dirname(__file__), *(p for p in sys.path if p)])
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for seed in ("1", "2")
    ]
    try:
        said = [p.communicate(timeout=120) for p in started]
    finally:
        for p in started:
            p.kill()
            p.wait()
    assert [p.returncode for p in started] == [0, 0], said
    assert said[0][0] == said[1][0]
    assert json.loads(said[0][0]).keys() == JOBS.keys()
