"""Synchronous training in real processes equals one device on the full batch.

Most jobs have 1 to 3 servers, 1 to 3 trainers, and seven optimizers, for a network with batch norm
and a frozen layer. The trainers of one job have different speeds.

A trainer's batch norm uses the rows of its part of the batch. So the reference is one device that
normalizes each part separately; statistics of the full batch give other numbers. The running
statistics are leaves of the parameters that the step computes, and each trainer has those of its
part.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import speeds_job
from helpers import assemble, distance
from role_processes import roles
from role_threads import free_endpoints
from sync_matrix_job import OPTIMIZERS, ROWS, STEPS, batch_of, init_of, loss_fn, plan_for, step_of

from dtrans.parameter_server.plan import PServerPlan
from dtrans.run.distributed.role import roles_of


def one_device(name: str, trainers: int) -> tuple[Any, Any, list[Any]]:
    """Return the parameters, the optimizer state and the losses of one device.

    Statistics have a row for each part.
    """

    def loss(net: Any, frozen: Any, stats: Any, *batch: Any) -> Any:
        parts = [x.reshape(trainers, ROWS, -1) for x in batch]
        losses, new = jax.vmap(loss_fn, in_axes=(None, None, 0, 0, 0))(net, frozen, stats, *parts)
        return jnp.mean(losses), new

    init, args = init_of(name)
    params, opt_state = init(*args)
    params |= {"stats": jax.tree.map(lambda x: jnp.stack([x] * trainers), params["stats"])}
    step, losses = jax.jit(step_of(name, loss, jax.value_and_grad)), []
    for i in range(STEPS):
        params, opt_state, value = step(params, opt_state, *batch_of(i, trainers))
        losses.append(value)
    return params, opt_state, losses


def own_only(plan: PServerPlan) -> None:
    """Check that frozen leaves, and leaves that each trainer computes from its rows, are neither
    sent nor received."""
    assert sorted(plan.frozen) == ["params/frozen/w0", "params/stats/mean", "params/stats/var"]
    wire = [op for op in plan.trainer.ops if op.type in ("send", "recv")]
    names = {n.split("@GRAD")[0].split(".block")[0] for op in wire for n in op.attrs["names"]}
    assert names == {f"params/net/{n}" for n in ("w1", "scale", "shift", "w2", "b2")}
    assert not any(n.startswith(("params/frozen", "params/stats")) for n in plan.placement.blocks)


def under(found: Any, name: str) -> dict[str, Any]:
    return {
        n.removeprefix(f"{name}/"): jnp.asarray(x)
        for n, x in found.items()
        if n.startswith(f"{name}/")
    }


EVERY = [
    (servers, trainers, x64)
    for servers in (1, 2, 3)
    for trainers in (1, 2, 3)
    for x64 in (True, False)
]
DEFAULT = [(2, 2, False)]


@pytest.mark.soak
@pytest.mark.parametrize(
    "servers, trainers, x64",
    [
        pytest.param(
            *case,
            marks=() if case in DEFAULT else pytest.mark.soak,
            id=f"{case[0]}x{case[1]}-{bits}",
        )
        for case, bits in ((case, "float64" if case[2] else "float32") for case in EVERY)
    ],
)
def test_processes_equal_one_device_with_every_optimizer(
    tmp_path: Path, servers: int, trainers: int, x64: bool
) -> None:
    """Run one job after the other in the same processes and on the same servers."""
    pservers = free_endpoints(servers)
    job = {"pservers": pservers, "trainers": trainers, "x64": x64}
    with roles(tmp_path) as started, jax.enable_x64(x64):
        for i in range(servers):
            started.start(f"pserver{i}", "matrix_pserver", index=i, **job)
        for k in range(trainers):
            started.start(f"trainer{k}", "matrix_trainer", index=k, **job)
        want = {name: one_device(name, trainers) for name in OPTIMIZERS}  # while they work
        plans = {name: plan_for(name, pservers, trainers) for name in OPTIMIZERS}
        found = started.end()
        for name in OPTIMIZERS:
            compare(plans[name], found, name, want[name], 1e-10 if x64 else 1e-5)


def compare(plan: PServerPlan, found: Any, name: str, want: Any, rtol: float) -> None:
    own_only(plan)
    params, opt_state, losses = want
    states = {ep: under(found[f"pserver{i}"], name) for i, ep in enumerate(plan.servers)}
    held = [n for n in plan.startup.out_names if n not in plan.frozen]
    everything = plan.startup.out.flatten((params, opt_state), "the result")
    made = dict(zip(plan.startup.out_names, everything, strict=True))
    got = assemble(plan, states, held)
    assert list(got) == held
    assert not any(n.startswith(tuple(plan.frozen)) for state in states.values() for n in state)
    for n in held:
        assert distance(got[n], made[n]) <= rtol, (name, n)
    for k in range(plan.trainers):
        mine = under(found[f"trainer{k}"], name)
        values = mine.pop("losses")
        for path, x in mine.items():
            whole = made[f"params/{path}"]
            assert distance(x, whole[k] if path.startswith("stats/") else whole) <= rtol, (
                name,
                k,
                path,
            )
        assert sorted(f"params/{n}" for n in mine) == sorted(
            n for n in made if n.startswith("params/")
        )
        assert np.array_equal(mine["frozen/w0"], made["params/frozen/w0"])
        losses = [value - x / plan.trainers for value, x in zip(losses, values, strict=True)]
    # the loss of one device is the mean of the trainers' losses
    assert max(abs(float(x)) for x in losses) <= rtol * max(abs(float(x)) for x in want[2]), name


@pytest.mark.usefixtures("x64")
def test_processes_with_different_speeds_equal_one_device(tmp_path: Path) -> None:
    """The batches differ in their number of rows. The step also returns the error of each row."""
    endpoints = free_endpoints(1)
    with roles(tmp_path) as started:
        for role in roles_of(len(speeds_job.SPEEDS), endpoints):
            job = {"module": "speeds_job", "role": role.environment()}
            started.start(role.name, "exact_job", **job)
        params = speeds_job.params_of()
        opt_state, wanted = speeds_job.TX.init(params), dict[str, Any]()
        step = jax.jit(step_with_errors)
        for i in range(len(speeds_job.ROWS)):
            params, opt_state, *results = step(params, opt_state, *speeds_job.batch_of(i))
            wanted |= {f"results/{i}/{n}": x for n, x in enumerate(results)}
        wanted |= {f"params/{n}": x for n, x in params.items()}
        found = started.end()
    shares = {"trainer 0": [4, 4, 1, 2, 4], "trainer 1": [8, 9, 1, 5, 8]}
    for name, rows in shares.items():
        trainer = found[name]
        assert [int(trainer.pop(f"rows/{i}")) for i in range(len(rows))] == rows
        assert sorted(trainer) == sorted(wanted)
        for n, x in trainer.items():
            assert distance(x, wanted[n]) <= 1e-12, (name, n)


def step_with_errors(params: Any, opt_state: Any, *batch: Any) -> tuple[Any, ...]:
    """Take a step of `speeds_job` on one device, with JAX and optax alone."""
    (value, errors), grads = jax.value_and_grad(speeds_job.loss, has_aux=True)(params, *batch)
    updates, opt_state = speeds_job.TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value, errors
