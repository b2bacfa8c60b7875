"""Updates that read a number of the size of the batch, for steps traced with the full batch.

Batches also have other sizes than the traced one, and sizes that the number of trainers does not
divide. Plans are verified. Jobs of some cases run in 64 bits, within 1e-12 of one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from role_threads import RoleThreads, check_state, free_endpoints, serve, train

import dtrans
from dtrans.errors import BatchError, PeerError


pytestmark = pytest.mark.usefixtures("x64")
TX = optax.adam(0.1)
MODES = ["nccl2", "sharding 1", "sharding 3", "owners", "pserver"]


def init(key: jax.Array) -> tuple[Any, Any]:
    params = {"w": jax.random.normal(key, (6, 4))}
    return params, (TX.init(params), jnp.zeros(()))


def counted(params: Any, opt_state: Any, x: jax.Array) -> tuple[Any, ...]:
    """Divide the gradient of a sum by the number of rows, and count the rows."""
    loss, g = jax.value_and_grad(lambda p: jnp.sum((x @ p["w"]) ** 2))(params)
    u, state = TX.update(jax.tree.map(lambda a: a / len(x), g), opt_state[0])
    return optax.apply_updates(params, u), (state, opt_state[1] + x.shape[0]), loss


def masked(params: Any, opt_state: Any, x: jax.Array, m: jax.Array) -> tuple[Any, ...]:
    """Divide the gradient of a sum by a count of mask entries, after the gradient is taken."""
    loss, g = jax.value_and_grad(lambda p: jnp.sum(m * ((x @ p["w"]) ** 2).sum(1)))(params)
    u, state = TX.update(jax.tree.map(lambda a: a / m.sum(), g), opt_state[0])
    return optax.apply_updates(params, u), (state, opt_state[1]), loss


def in_branch(params: Any, opt_state: Any, x: jax.Array) -> tuple[Any, ...]:
    """Count rows in the body of a branch, where the number cannot be an input of the update."""
    loss, g = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(params)
    u, state = TX.update(g, opt_state[0])
    seen = jax.lax.cond(
        opt_state[1] > 0,
        lambda n: jnp.sqrt(n * n) + len(x),
        lambda n: jnp.cos(n) - 1.0 + len(x),
        opt_state[1],
    )
    return optax.apply_updates(params, u), (state, seen), loss


def rows(n: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (n, 6))


def planned(mode: str, step: Any, *batch: jax.Array, trainers: int = 3, **options: Any) -> Any:
    key = jax.random.key(0)
    main, startup = dtrans.trace(step, *init(key), *batch), dtrans.trace(init, key)
    if mode == "nccl2":
        return dtrans.nccl2(main, startup, trainers=trainers)
    if mode == "pserver":
        servers = options.pop("servers", ("127.0.0.1:1", "127.0.0.1:2"))
        cut = dtrans.BlockPlacement(min_block_size=1)
        return dtrans.pserver(
            main, startup, pservers=servers, trainers=trainers, placement=cut, **options
        )
    slices = dtrans.Slicing(min_slice_size=0)
    if mode == "owners":
        slices = dtrans.Slicing(partition="greedy_even")
    return dtrans.sharding(
        main,
        startup,
        degree=trainers,
        stage=int(mode[-1]) if mode != "owners" else 2,
        slices=slices,
    )


def check(job: Any, step: Any, batches: Sequence[Sequence[jax.Array]]) -> None:
    """Compare a job with one device, step by step."""
    state, alone = job.init(jax.random.key(0)), init(jax.random.key(0))
    for batch in batches:
        state, *results = job.step(state, *batch)
        *alone, loss = step(*alone, *batch)
        np.testing.assert_allclose(results[0], loss, rtol=1e-12)
    found = job.params(state), job.opt_state(state)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), found, tuple(alone)
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize("traced", [4, 12, 13])
@pytest.mark.parametrize("mode", MODES)
def test_a_plan_takes_the_batch_that_it_was_traced_with_and_others(mode: str, traced: int) -> None:
    plan = planned(mode, counted, rows(traced))
    for count in (12, 13, 6):
        assert (report := plan.verify(rows(count), points=(0, 1))), str(report)


def test_a_job_is_given_batches_of_other_sizes() -> None:
    job = planned("sharding 1", counted, rows(12)).simulate()
    check(job, counted, [(rows(n, n),) for n in (12, 13, 6)])


def test_servers_are_sent_the_numbers_and_the_plan_says_so() -> None:
    plan = planned("pserver", counted, rows(12))
    assert "numbers that depend on the batch size; trainers send these numbers" in str(plan)
    assert "@batch_size/0" in plan.traffic.arguments
    check(plan.on_mesh(), counted, [(rows(n, n),) for n in (12, 13)])


def test_servers_advance_the_position_in_a_buffer_that_holds_few_batches() -> None:
    """The step cannot be traced with twice the planned rows, which do not fit in the buffer."""

    def start(key: jax.Array) -> Any:
        return {"p": init(key)[0], "bank": jnp.zeros((24, 6)), "next": jnp.zeros((), int)}

    def step(s: Any, x: jax.Array) -> Any:
        loss, g = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(s["p"])
        bank = jax.lax.dynamic_update_slice(s["bank"], x, (s["next"], 0))
        new = optax.apply_updates(s["p"], jax.tree.map(lambda a: -0.1 * a, g))
        return {"p": new, "bank": bank, "next": (s["next"] + len(x)) % 24}, loss

    key = jax.random.key(0)
    main, startup = dtrans.trace(step, start(key), rows(12)), dtrans.trace(start, key)
    job = dtrans.pserver(main, startup, pservers="127.0.0.1:1", trainers=2).simulate()
    state, alone = job.init(key), start(key)
    for n in (12, 12, 8):
        state, _ = job.step(state, rows(n, n))
        alone, _ = step(alone, rows(n, n))
    found = job.gather(state)
    assert found["next"] == alone["next"] == 8
    np.testing.assert_allclose(found["bank"], alone["bank"], rtol=1e-12)


@pytest.mark.parametrize("options", [{"trainers": 1}, {"trainers": 2, "batch": "local"}])
def test_a_plan_says_that_a_step_has_one_batch_size(options: Any) -> None:
    """The step compares its batch with the rows of the last batch, which the state contains."""

    def start(key: jax.Array) -> Any:
        return {"p": init(key)[0], "last": jnp.ones((12, 6))}

    def step(s: Any, x: jax.Array) -> Any:
        changed = jax.lax.stop_gradient(x - s["last"])
        loss, g = jax.value_and_grad(lambda p: jnp.mean((changed @ p["w"]) ** 2))(s["p"])
        new = optax.apply_updates(s["p"], jax.tree.map(lambda a: -0.1 * a / len(x), g))
        return {"p": new, "last": x}, loss

    key = jax.random.key(0)
    main, startup = dtrans.trace(step, start(key), rows(12)), dtrans.trace(start, key)
    plan = dtrans.pserver(main, startup, pservers="127.0.0.1:1", **options)
    assert "traced neither with twice nor with half the planned rows" in str(plan)
    assert "traced neither" not in str(planned("pserver", counted, rows(12), **options))


@pytest.mark.parametrize("trainers", [1, 2])
def test_a_server_of_local_trainers_has_the_number_of_a_part(trainers: int) -> None:
    job = planned("pserver", counted, rows(12), trainers=trainers, batch="local").simulate()
    state = job.init(jax.random.key(0))
    for n in (12, 6):
        state, _ = job.step(state, rows(n))
    assert job.opt_state(state)[1] == 18 / trainers


@pytest.mark.parametrize("mode", ["nccl2", "sharding 1", "owners", "pserver"])
def test_a_count_of_a_mask_behind_the_gradient(mode: str) -> None:
    batches = [(rows(n, n), (jnp.arange(n) % 3 > 0) * 1.0) for n in (12, 13)]
    plan = planned(mode, masked, *batches[0])
    for batch in batches:
        assert (report := plan.verify(*batch, points=(0, 1))), str(report)


@pytest.mark.parametrize("mode", ["nccl2", "sharding 1"])
def test_results_of_gradients_have_the_size_of_the_whole_batch(mode: str) -> None:
    """The loss of the full batch is the sum of the losses of parts, but a part has fewer rows than
    the batch."""

    def step(params: Any, opt_state: Any, x: jax.Array) -> tuple[Any, ...]:
        loss, g = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(params)
        u, state = TX.update(g, opt_state[0])
        return (
            optax.apply_updates(params, u),
            (state, opt_state[1]),
            loss,
            optax.tree.norm(g) / len(x),
        )

    job = planned(mode, step, rows(12)).simulate()
    _, _, norm = job.step(job.init(jax.random.key(0)), rows(12))
    np.testing.assert_allclose(norm, step(*init(jax.random.key(0)), rows(12))[3], rtol=1e-12)


def test_a_number_in_a_branch_names_both_sizes_and_tracing_with_a_part_helps() -> None:
    plan = planned("pserver", in_branch, rows(12))
    assert "opt_state/1 depends on the batch size, so each batch must have 36 rows" in str(plan)
    job = plan.simulate()
    with pytest.raises(
        BatchError,
        match=r"planned for x of shape \(12, 6\), not \(4, 6\); trace in_branch with arrays of the new",
    ):
        job.step(job.init(jax.random.key(0)), rows(12))
    check(
        planned("pserver", in_branch, rows(4)).simulate(),
        in_branch,
        [(rows(12, 1),), (rows(12, 2),)],
    )
    check(
        planned("sharding 3", in_branch, rows(12)).simulate(),
        in_branch,
        [(rows(12, 1),), (rows(13, 2),)],
    )


def test_a_number_in_a_branch_helps_as_an_argument_of_the_step() -> None:
    def step(params: Any, opt_state: Any, x: jax.Array, n: jax.Array) -> tuple[Any, ...]:
        loss, g = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(params)
        u, state = TX.update(g, opt_state[0])
        seen = jax.lax.cond(
            opt_state[1] > 0,
            lambda s: jnp.sqrt(s * s) + n,
            lambda s: jnp.cos(s) - 1.0 + n,
            opt_state[1],
        )
        return optax.apply_updates(params, u), (state, seen), loss

    batches = [(rows(n, n), jnp.asarray(float(n))) for n in (12, 6)]
    check(planned("pserver", step, *batches[0]).simulate(), step, batches)


@pytest.mark.usefixtures("folder")
def test_processes_that_trace_the_whole_and_a_part_plan_the_same_update(
    role_threads: RoleThreads,
) -> None:
    servers = free_endpoints(2)
    plans = [planned("pserver", counted, rows(n), trainers=2, servers=servers) for n in (12, 6)]
    for ep in servers:
        role_threads.start(ep, serve, plans[0], ep, jax.random.key(0))
    batches = [(rows(n, n),) for n in (12, 8)]
    for k in range(2):
        role_threads.start(f"trainer {k}", train, plans[k], k, batches, jax.random.key(0))
    ended = role_threads.all()
    alone = init(jax.random.key(0))
    for batch in batches:
        *alone, _ = counted(*alone, *batch)
    check_state(plans[0], [ended[ep] for ep in servers], *alone)


@pytest.mark.usefixtures("folder")
def test_processes_send_the_count_of_all_their_parts(role_threads: RoleThreads) -> None:
    """Each trainer has a different number of rows. Servers receive the sum of these numbers."""
    servers, mask = free_endpoints(2), (jnp.arange(12) % 5 > 1) * 1.0
    plan = planned("pserver", masked, rows(6), mask[:6], trainers=2, servers=servers)
    for ep in servers:
        role_threads.start(ep, serve, plan, ep, jax.random.key(0))
    batches = [(rows(12, seed), mask) for seed in range(2)]
    for k in range(2):
        role_threads.start(f"trainer {k}", train, plan, k, batches, jax.random.key(0))
    ended = role_threads.all()
    alone = init(jax.random.key(0))
    for batch in batches:
        *alone, _ = masked(*alone, *batch)
    check_state(plan, [ended[ep] for ep in servers], *alone)


@pytest.mark.usefixtures("folder")
def test_processes_that_give_parts_of_different_sizes_are_named_with_both(
    role_threads: RoleThreads,
) -> None:
    servers = free_endpoints(1)
    plan = planned("pserver", counted, rows(12), trainers=2, servers=servers)
    role_threads.start("server", serve, plan, servers[0], jax.random.key(0))
    for k, n in enumerate((12, 8)):
        role_threads.start(f"trainer {k}", train, plan, k, [(rows(n),)], jax.random.key(0))
    said = role_threads.end("server")
    assert isinstance(said, PeerError)
    assert "@batch_size/0 of step 1 is 12" in str(said) and "8" in str(said)
    for k in range(2):
        assert isinstance(role_threads.end(f"trainer {k}"), PeerError)
