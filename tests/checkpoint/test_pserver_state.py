"""Checkpoints of parameter-server jobs.

A job with another plan, or one device, restores the same values. A restored job computes the same
values as an uninterrupted job. An incomplete checkpoint raises an error.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import batch_norm_job as averages
import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_states import OPTIMIZERS, TX, distinct, odd_state
from helpers import (
    as_numpy,
    batch_statistics_step,
    endpoints,
    init_of,
    mlp_batch,
    mlp_loss,
    mlp_params,
    plain_run,
    plain_step,
    plan_of,
    start_servers,
    tree_close,
    tree_equal,
)
from role_threads import HANG, RoleThreads, free_endpoints

import dtrans
from dtrans import HashName, SizeBalanced, checkpoint
from dtrans.checkpoint import runs
from dtrans.checkpoint.runs import THIS_PROCESS
from dtrans.errors import (
    CheckpointWarning,
    ConfigError,
    StateError,
    TraceError,
    UnknownEndpointError,
)
from dtrans.parameter_server.plan import PServerPlan


SHAPES = {"b": (7,), "empty": (0,), "scalar": (), "table": (11, 4), "w": (9, 3, 2)}


DC_ASGD = {"mode": dtrans.Async(dtrans.DelayCompensation(decay=0.9))}
LAYOUTS: list[dict[str, Any]] = [
    {"servers": 1},
    {"servers": 3},
    {"servers": 4, "min_block_size": 5, "split_method": HashName},
    {"servers": 2, "slice_var_up": False, "split_method": SizeBalanced},
]


def loss(params: Any, x: Any) -> Any:
    return jnp.mean(x) * sum(jnp.sum(p.astype(jnp.float32) ** 2) for p in jax.tree.leaves(params))


def some_params(dtype: Any = jnp.float32) -> Any:
    return {n: jnp.ones(s, jnp.bfloat16 if n == "table" else dtype) for n, s in SHAPES.items()}


def planned(tx: Any, servers: int = 3, **options: Any) -> PServerPlan:
    return plan_of(loss, tx, some_params(), jnp.ones(2), servers=servers, trainers=2, **options)


def distinct_state(tx: Any) -> tuple[Any, Any]:
    params, opt_state = init_of(tx)(some_params())
    return distinct(params), distinct(opt_state)


def save_all(
    path: Any, plan: PServerPlan, servers: Mapping[str, Any], trainer: Any = None, **options: Any
) -> None:
    for endpoint in plan.servers:
        checkpoint.save(path, plan, endpoint, servers[endpoint], **options)
    if trainer is not None:
        checkpoint.save_trainer(path, plan, trainer, **options)


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    """Assert that two states of a server are equal, bit for bit."""
    assert set(a) == set(b)
    for name in a:
        assert (a[name].shape, a[name].dtype) == (b[name].shape, b[name].dtype), name
        assert np.array_equal(as_numpy(a[name]), as_numpy(b[name])), name


@pytest.fixture(params=OPTIMIZERS)
def tx(request: Any) -> Any:
    return OPTIMIZERS[request.param]


# -- values ----------------------------------------------------------------------------------------


@pytest.mark.sampled(8)
@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_what_servers_hold_is_cut_from_the_state_of_one_device_and_put_together(
    tx: Any, options: Any
) -> None:
    plan, (params, opt_state) = planned(tx, **options), distinct_state(tx)
    held = {ep: checkpoint.scatter(plan, ep, params, opt_state) for ep in plan.servers}
    for row in plan.overview:
        origin = dict(zip(plan.main.in_names, jax.tree.leaves((params, opt_state)), strict=False))[
            row.origin_name
        ]
        value = held[row.endpoint][row.slice_name]
        assert (value.shape, value.dtype) == (row.slice_shape, row.dtype)
        assert np.array_equal(as_numpy(value), as_numpy(origin[row.index])), row
    tree_equal(checkpoint.gather(plan, held), (params, opt_state))


@pytest.mark.parametrize("options", [{}, DC_ASGD], ids=["sync", "dc_asgd"])
def test_what_is_cut_from_an_init_is_what_startup_programs_make(options: Any) -> None:
    plan, params = planned(OPTIMIZERS["adam"], **options), distinct(some_params())
    for endpoint, made in start_servers(plan, params).items():
        same(checkpoint.scatter(plan, endpoint, *init_of(OPTIMIZERS["adam"])(params)), made)


def test_values_are_copies() -> None:
    plan = plan_of(
        lambda p, x: jnp.mean(x) * jnp.sum(p["w"]),
        optax.sgd(0.1),
        {"w": jnp.ones((4, 4))},
        jnp.ones(2),
    )
    room = np.zeros(32, np.float32)
    start = -room.ctypes.data % 64 // 4  # JAX may use this memory without a copy
    mine = {"w": room[start : start + 16].reshape(4, 4)}
    held = {
        ep: checkpoint.scatter(plan, ep, mine, plan.startup({"w": mine["w"]})[1])
        for ep in plan.servers
    }
    mine["w"][:] = 7
    assert not any(np.any(x) for state in held.values() for x in state.values())
    there = {ep: {n: np.array(x) for n, x in state.items()} for ep, state in held.items()}
    whole, _ = checkpoint.gather(plan, there)
    for state in there.values():
        for x in state.values():
            x[...] = 7
    assert not np.any(whole["w"])
    # no other array uses memory that may be donated, also for a leaf on one server
    one = plan_of(
        lambda p, x: jnp.mean(x) * jnp.sum(p["w"]), optax.sgd(0.1), mine, jnp.ones(2), servers=1
    )
    given = {"w": jnp.ones((4, 4))}
    (ep,) = one.servers
    state = checkpoint.scatter(one, ep, given, one.startup(given)[1])
    whole, _ = checkpoint.gather(one, {ep: state})
    assert (
        len({x.unsafe_buffer_pointer() for x in (given["w"], state["params/w"], whole["w"])}) == 3
    )


def test_what_several_servers_hold_must_be_the_same() -> None:
    plan, whole = planned(OPTIMIZERS["adam"]), distinct_state(OPTIMIZERS["adam"])
    held = {ep: checkpoint.scatter(plan, ep, *whole) for ep in plan.servers}
    first, second, _ = plan.servers
    held[second]["opt_state/0/count"] += 1
    message = (
        f"opt_state/0/count differs on {first} and {second}: .* pass states that one job returned"
    )
    with pytest.raises(StateError, match=message):
        checkpoint.gather(plan, held)


def test_the_last_bits_of_what_several_servers_compute_may_differ() -> None:
    # state with a norm of all gradients: each server computes it from the partial sums of all
    # servers
    kept = optax.GradientTransformation(
        lambda p: jnp.ones(2), lambda g, s, p=None: (g, 0.9 * s + optax.tree.norm(g))
    )
    plan = planned(optax.chain(kept, optax.sgd(0.1)))
    held = start_servers(plan, some_params())
    first, second, third = plan.servers
    assert all("opt_state/0" in state for state in held.values())
    for last in (1.0, np.nan, np.inf):
        for endpoint, near in ((first, 1), (second, 1 + 1e-6), (third, 1 - 1e-6)):
            held[endpoint]["opt_state/0"] = jnp.array([near, last], jnp.float32)
        assert np.array_equal(checkpoint.gather(plan, held)[1][0], [1, last], equal_nan=True)
        for far in ([1.01, last], [1, 2.0], [np.nan, last], [np.inf, last]):
            held[third]["opt_state/0"] = jnp.array(far, jnp.float32)
            with pytest.raises(
                StateError,
                match=f"opt_state/0 differs on {first} and {third}: .*1.* and .*",
            ):
                checkpoint.gather(plan, held)


def test_states_that_are_none_are_refused_by_name() -> None:
    plan, (params, opt_state) = planned(OPTIMIZERS["adam"]), distinct_state(OPTIMIZERS["adam"])
    held = {ep: checkpoint.scatter(plan, ep, params, opt_state) for ep in plan.servers}
    first, second, _ = plan.servers
    name = next(n for n in held[first] if n.startswith("params/table"))
    refused: list[tuple[Any, str]] = [
        ({first: held[first]}, f"the argument servers has no state of pserver {second}"),
        ({**held, second: {}}, f"the state of pserver {second} lacks .*; pass a state"),
        (
            {**held, second: held[second] | {"params/x": 1}},
            f"the state of pserver {second} has params/x, which is not",
        ),
        (
            {**held, second: [1]},
            f"the state of pserver {second} is a list; expected a dict of arrays by name",
        ),
        (
            {**held, first: held[first] | {name: jnp.ones((4, 4))}},
            rf"{name} is float32\[4, 4\]; pserver {first} expects bfloat16\[4, 4\]",
        ),
        ({**held, first: held[first] | {name: 1.0}}, f"{name} is 1.0; pserver {first} expects"),
    ]
    for states, message in refused:
        with pytest.raises(StateError, match=message):
            checkpoint.gather(plan, states)
    with pytest.raises(UnknownEndpointError, match="'a:1' is not a pserver of this plan"):
        checkpoint.gather(plan, {**held, "a:1": {}})
    with pytest.raises(UnknownEndpointError, match="'a:1' is not a pserver of this plan"):
        checkpoint.scatter(plan, "a:1", params, opt_state)
    with pytest.raises(TraceError, match="opt_state does not have the structure"):
        checkpoint.scatter(plan, first, params, ())
    with pytest.raises(
        StateError,
        match=r"params/w is float32\[2\]; the step of this plan, step, expects float32\[9, ",
    ):
        checkpoint.scatter(plan, first, params | {"w": jnp.ones(2)}, opt_state)
    with pytest.raises(ConfigError, match="plan is a Program; expected a plan of dtrans.pserver"):
        checkpoint.gather(plan.main, held)


def test_a_state_that_was_donated_is_refused(tmp_path: Path) -> None:
    params, batch = mlp_params(), mlp_batch(8)
    plan = plan_of(mlp_loss, optax.adam(0.1), params, *batch, servers=2)
    job = plan.on_mesh()
    old = job.init(params)
    job.step(old, *batch)
    (ep, *_) = plan.servers
    with pytest.raises(
        StateError, match="was donated to job.step; save the state that it returned"
    ):
        checkpoint.save(tmp_path, plan, ep, old.servers[ep])
    assert os.listdir(tmp_path) == []


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_a_checkpoint_serves_any_other_servers_and_one_device(
    tx: Any, options: Any, tmp_path: Path
) -> None:
    plan, (params, opt_state) = planned(tx, **options), distinct_state(tx)
    save_all(
        tmp_path / "1",
        plan,
        {ep: checkpoint.scatter(plan, ep, params, opt_state) for ep in plan.servers},
    )
    tree_equal(checkpoint.load(tmp_path / "1", plan.main), (params, opt_state))
    for layout in LAYOUTS:
        other = planned(tx, **layout)
        for ep in other.servers:
            same(
                checkpoint.restore(str(tmp_path / "1"), other, ep),
                checkpoint.scatter(other, ep, params, opt_state),
            )


def test_backups_are_saved_or_begin_as_the_parameters(tmp_path: Path) -> None:
    tx = OPTIMIZERS["adam"]
    plan, (params, opt_state) = planned(tx, **DC_ASGD), distinct_state(tx)
    held = {ep: checkpoint.scatter(plan, ep, params, opt_state) for ep in plan.servers}
    for i, (ep, state) in enumerate(held.items()):
        held[ep] = {
            n: x + i + 1 if "_bak" in n or "mean_square" in n else x for n, x in state.items()
        }
    save_all(tmp_path / "async", plan, held)
    for ep in plan.servers:
        same(checkpoint.restore(tmp_path / "async", plan, ep), held[ep])
    tree_equal(checkpoint.load(tmp_path / "async", plan.main), (params, opt_state))
    tree_equal(checkpoint.gather(plan, held), (params, opt_state))
    # other servers: rows of two saved blocks
    two = planned(tx, 2, **DC_ASGD)
    (ep, _) = two.servers
    got = checkpoint.restore(tmp_path / "async", two, ep)
    saved = [
        held[r.endpoint][r.slice_name] for r in plan.overview.by_origin("params/w.trainer_1_bak")
    ]
    (row,) = (r for r in two.overview.by_endpoint(ep) if r.origin_name == "params/w.trainer_1_bak")
    assert np.array_equal(got[row.slice_name], np.concatenate(saved)[row.index])
    # a job without a checkpoint
    plain = planned(tx, 2)
    save_all(
        tmp_path / "sync",
        plain,
        {ep: checkpoint.scatter(plain, ep, params, opt_state) for ep in plain.servers},
    )
    for ep in plan.servers:
        same(
            checkpoint.restore(tmp_path / "sync", plan, ep),
            checkpoint.scatter(plan, ep, params, opt_state),
        )


def test_only_what_has_rows_of_a_server_is_read(tmp_path: Path) -> None:
    tx = optax.sgd(0.1, momentum=0.9)
    shapes = {"v": (40, 5), "w": (30, 4)}
    params = distinct({n: jnp.ones(s) for n, s in shapes.items()})
    plan = plan_of(loss, tx, params, jnp.ones(2), servers=4)
    whole = params, distinct(tx.init(params))
    save_all(tmp_path, plan, {ep: checkpoint.scatter(plan, ep, *whole) for ep in plan.servers})
    shutil.rmtree(tmp_path / "pserver-3" / "arrays")
    two = plan_of(loss, tx, params, jnp.ones(2), servers=2)
    first, second = two.servers
    same(checkpoint.restore(tmp_path, two, first), checkpoint.scatter(two, first, *whole))
    for fails in (
        lambda: checkpoint.restore(tmp_path, two, second),
        lambda: checkpoint.load(tmp_path, plan.main),
    ):
        with pytest.raises(
            StateError, match=f"^{tmp_path}/pserver-3 cannot be read as a piece of a checkpoint"
        ):
            fails()


def test_a_piece_is_a_checkpoint_of_orbax(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    tx = OPTIMIZERS["adam"]
    plan, whole = planned(tx), distinct_state(tx)
    (ep, *_) = plan.servers
    held = checkpoint.scatter(plan, ep, *whole)
    checkpoint.save(tmp_path, plan, ep, held)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        found = checkpointer.restore(tmp_path / "pserver-0" / "arrays")
    same(found, {n: x for n, x in held.items() if x.size})


def test_random_keys_of_another_kind_keep_it(tmp_path: Path) -> None:
    with jax.default_prng_impl("rbg"):
        tx, params = optax.chain(odd_state(), optax.sgd(0.1)), {"w": jnp.ones((4, 2))}
        plan = plan_of(loss, tx, params, jnp.ones(2), servers=2)
        opt_state = tx.init(params)
    save_all(
        tmp_path, plan, {ep: checkpoint.scatter(plan, ep, params, opt_state) for ep in plan.servers}
    )
    key = checkpoint.load(tmp_path, plan.main)[1][0]["key"]
    assert jax.random.key_impl(key) == "rbg"
    tree_equal(key, opt_state[0]["key"])


def test_servers_without_blocks_save_that_they_hold_nothing(tmp_path: Path) -> None:
    params = {"w": jnp.arange(2.0)}
    plan = plan_of(loss, optax.sgd(0.1), params, jnp.ones(2), servers=3, min_block_size=8192)
    held = {
        ep: checkpoint.scatter(plan, ep, params, plan.startup(params)[1]) for ep in plan.servers
    }
    assert sorted(map(len, held.values())) == [0, 0, 1]
    save_all(tmp_path, plan, held)
    assert len(os.listdir(tmp_path)) == 3
    for ep in plan.servers:
        same(checkpoint.restore(tmp_path, plan, ep), held[ep])


# -- what trainers hold ----------------------------------------------------------------------------


def statistics_plan(params: Any, batch: Any, servers: int) -> PServerPlan:
    return dtrans.pserver(
        dtrans.trace(batch_statistics_step, params, (), *batch),
        dtrans.trace(lambda p: (p, ()), params),
        pservers=endpoints(servers),
        trainers=2,
        placement=dtrans.BlockPlacement(min_block_size=1),
    )


def test_what_trainers_hold_is_saved_by_trainer_0(tmp_path: Path) -> None:
    params, batch = {"mean": jnp.zeros(5), "w": mlp_params((5, 3))["w1"]}, mlp_batch(8, (5, 3))
    plan = statistics_plan(params, batch, 2)
    assert plan.frozen == ("params/mean",)
    job = plan.on_mesh(jax.devices()[:4])
    state, _ = job.step(job.init(params), *batch)
    trained = job.params(state)
    assert np.any(trained["mean"])
    with pytest.raises(
        StateError,
        match=r"no server stores params/mean, .* pass the parameters of trainer 0, .* gather",
    ):
        checkpoint.gather(plan, state.servers)
    tree_equal(checkpoint.gather(plan, state.servers, trained), (trained, ()))
    save_all(tmp_path / "1", plan, state.servers)
    with pytest.raises(StateError, match="is incomplete: trainer-0 of trainer 0 is missing"):
        checkpoint.load(tmp_path / "1", plan.main)
    with pytest.raises(
        StateError, match=r"params/mean is float32\[2\]; a trainer expects float32\[5\]"
    ):
        checkpoint.save_trainer(tmp_path / "1", plan, trained | {"mean": jnp.ones(2)})
    checkpoint.save_trainer(tmp_path / "1", plan, trained)
    tree_equal(checkpoint.load(tmp_path / "1", plan.main), (trained, ()))
    # trainers restore only the leaves that they compute
    got = checkpoint.restore_trainer(tmp_path / "1", plan, params)
    tree_equal(got, {"mean": trained["mean"], "w": params["w"]})
    # on a mesh, each trainer starts with the leaves of trainer 0
    other = statistics_plan(params, batch, 3)
    job = other.on_mesh(jax.devices()[:5])
    like = job.init(params)
    again = job.state_of(*checkpoint.load(tmp_path / "1", other.main))
    assert np.array_equal(again.params["params/mean"], np.stack([trained["mean"]] * 2))
    for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(like), strict=True):
        assert (x.sharding, x.shape) == (y.sharding, y.shape)
    tree_equal(job.params(again), trained)
    job.step(again, *batch)


def test_statistics_that_servers_average_are_saved_by_servers(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        params, batches = averages.params_of(), averages.batches_of(4)
        plan, other = (averages.plan_for(2, servers, averages.MEAN) for servers in (2, 3))
        own = averages.plan_for(2, 1, None)  # each trainer has separate values
        stats = {f"params/stats/{n}" for n in ("mean", "var")}
        assert stats <= {row.origin_name for row in plan.overview} and stats <= set(own.frozen)
        job = plan.on_mesh()
        state = job.init(params)
        for batch in batches[:2]:
            state, _ = job.step(state, *batch)
        whole = job.params(state), job.opt_state(state)
        tree_equal(checkpoint.gather(plan, state.servers, whole[0]), whole)
        save_all(tmp_path / "2", plan, state.servers, whole[0])
        tree_equal(checkpoint.load(tmp_path / "2", own.main), whole)
        # from servers to trainers, and back
        save_all(
            tmp_path / "own",
            own,
            {ep: checkpoint.scatter(own, ep, *whole) for ep in own.servers},
            whole[0],
        )
        for path in (tmp_path / "2", tmp_path / "own"):
            for p in (plan, other, own):
                for ep in p.servers:
                    same(checkpoint.restore(path, p, ep), checkpoint.scatter(p, ep, *whole))
                got, spec = checkpoint.restore_trainer(path, p, params), p.main.args[0]
                want = [
                    b if n in p.frozen else a
                    for n, a, b in zip(
                        spec.names, spec.flatten(params), spec.flatten(whole[0]), strict=True
                    )
                ]
                tree_equal(got, spec.unflatten(want))
        # a job with other servers continues
        again = other.on_mesh()
        after = again.state_of(*whole)
        for batch in batches[2:]:
            state, _ = job.step(state, *batch)
            after, _ = again.step(after, *batch)
        tree_close(
            (again.params(after), again.opt_state(after)),
            (job.params(state), job.opt_state(state)),
            1e-12,
        )


def test_a_leaf_that_nothing_changes_and_servers_read_is_saved_by_both(tmp_path: Path) -> None:
    def update(g: Any, s: Any, p: Any = None) -> Any:
        return jax.tree.map(lambda x: -0.1 * x / optax.tree.norm(p), g), s

    tx = optax.GradientTransformation(lambda p: jnp.zeros(()), update)

    def step(params: Any, opt_state: Any, x: Any) -> Any:
        value, g = dtrans.value_and_grad(loss)(params, x)
        updates, opt_state = tx.update(g, opt_state, params)
        return {"scale": params["scale"], "w": params["w"] + updates["w"]}, opt_state, value

    params = {"scale": jnp.arange(3.0), "w": jnp.ones((5, 2))}
    whole = distinct(params), jnp.ones(())
    main = dtrans.trace(step, *init_of(tx)(params), jnp.ones(2))
    plan = dtrans.pserver(
        main,
        dtrans.trace(init_of(tx), params),
        pservers=endpoints(2),
        placement=dtrans.BlockPlacement(min_block_size=1),
    )
    assert plan.frozen == ("params/scale",) and len(plan.overview.by_origin("params/scale")) == 2
    held = {ep: checkpoint.scatter(plan, ep, *whole) for ep in plan.servers}
    tree_equal(checkpoint.gather(plan, held, whole[0]), whole)
    save_all(tmp_path, plan, held, whole[0])
    tree_equal(checkpoint.load(tmp_path, main), whole)
    tree_equal(
        checkpoint.restore_trainer(tmp_path, plan, params),
        {"scale": whole[0]["scale"], "w": params["w"]},
    )
    for ep in plan.servers:
        same(checkpoint.restore(tmp_path, plan, ep), held[ep])


def test_there_is_nothing_to_save_where_servers_hold_everything(tmp_path: Path) -> None:
    plan = planned(OPTIMIZERS["adam"])
    checkpoint.save_trainer(tmp_path / "1", plan, some_params())
    assert not (tmp_path / "1").exists()
    params = some_params()
    assert checkpoint.restore_trainer(tmp_path / "1", plan, params) is params


# -- jobs that go on -------------------------------------------------------------------------------


def trained_on_one_device(batches: Sequence[Any]) -> tuple[Any, Any, Any]:
    params = mlp_params(dtype=jnp.float64)
    return plain_run(plain_step(mlp_loss, TX), params, TX.init(params), batches)


def batches_of(count: int) -> list[Any]:
    return [mlp_batch(8, dtype=jnp.float64, seed=i) for i in range(count)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "first, then",
    [
        ((2, {}), (3, {})),
        ((3, {}), (1, {})),
        ((1, {}), (4, {"min_block_size": 7, "split_method": HashName})),
    ],
    ids=["2 to 3", "3 to 1", "1 to 4"],
)
def test_a_job_that_goes_on_with_other_servers_computes_what_one_device_does(
    first: Any, then: Any, tmp_path: Path
) -> None:
    with jax.enable_x64(True):
        params, batches = mlp_params(dtype=jnp.float64), batches_of(6)
        plans = [
            plan_of(mlp_loss, TX, params, *batches[0], servers=n, trainers=2, **options)
            for n, options in (first, then)
        ]
        job = plans[0].on_mesh()
        state = job.init(params)
        for batch in batches[:3]:
            state, _ = job.step(state, *batch)
        save_all(tmp_path / "3", plans[0], state.servers)
        loaded = checkpoint.load(tmp_path / "3", plans[1].main)
        tree_close(loaded, trained_on_one_device(batches[:3])[:2], 1e-12)
        # one device continues
        want = trained_on_one_device(batches)[:2]
        tree_close(plain_run(plain_step(mlp_loss, TX), *loaded, batches[3:])[:2], want, 1e-12)
        # other servers continue
        job = plans[1].on_mesh()
        state = job.state_of(*loaded)
        for batch in batches[3:]:
            state, _ = job.step(state, *batch)
        tree_close((job.params(state), job.opt_state(state)), want, 1e-12)
        tree_close(checkpoint.gather(plans[1], state.servers), want, 1e-12)
        # without the state, or without its count, the comparison must fail
        for wrong in (TX.init(loaded[0]), jax.tree.map(lambda x: x * (x.ndim > 0), loaded[1])):
            state = job.state_of(loaded[0], wrong)
            for batch in batches[3:]:
                state, _ = job.step(state, *batch)
            with pytest.raises(AssertionError):
                tree_close(job.params(state), want[0], 1e-6)


def serve_saved(plan: PServerPlan, endpoint: str, start: Any, stop: Path, params: Any) -> None:
    """Run one pserver from a checkpoint, or from its startup program, up to a checkpoint."""
    with dtrans.Executor(deadline=HANG) as exe:
        programs = plan.servers[endpoint]
        state = (
            checkpoint.restore(start, plan, endpoint)
            if start
            else exe.run(programs.startup, params)
        )
        checkpoint.save(stop, plan, endpoint, exe.run(programs.main, state))


def train_saved(
    plan: PServerPlan, k: int, batches: Any, start: Any, stop: Path, params: Any
) -> Any:
    """Run one trainer from a checkpoint, or from its startup program, up to a checkpoint."""
    with dtrans.Executor(deadline=HANG) as exe:
        params = exe.run(plan.trainer_startup_program(k), params)
        if start:
            params = checkpoint.restore_trainer(start, plan, params)
        for batch in batches:
            n = len(batch[0]) // plan.trainers
            params, _ = exe.run(
                plan.trainer_program(k), params, *(x[k * n : (k + 1) * n] for x in batch)
            )
    if k == 0:
        checkpoint.save_trainer(stop, plan, params)
    return params


def job_of(
    role_threads: RoleThreads,
    plan: PServerPlan,
    batches: Any,
    start: Any,
    stop: Path,
    params: Any,
    name: str,
) -> Any:
    """Return the results of trainer 0. Each role of the job has an executor."""
    for ep in plan.servers:
        role_threads.start(f"{name} {ep}", serve_saved, plan, ep, start, stop, params)
    for k in range(plan.trainers):
        role_threads.start(
            f"{name} trainer {k}", train_saved, plan, k, batches, start, stop, params
        )
    return role_threads.all()[f"{name} trainer 0"]


def over_endpoints(
    servers: int, params: Any, step: Any, init: Any, batch: Any, **options: Any
) -> PServerPlan:
    state = jax.eval_shape(init, params)
    return flat_options.pserver(
        dtrans.trace(step, *state, *batch),
        dtrans.trace(init, params),
        pservers=free_endpoints(servers),
        min_block_size=1,
        **options,
    )


def test_servers_and_trainers_that_start_anew_go_on(
    role_threads: RoleThreads, tmp_path: Path
) -> None:
    with jax.enable_x64(True):
        params, batches = mlp_params(dtype=jnp.float64), batches_of(6)
        step, init = dtrans.make_train_step(mlp_loss, TX), init_of(TX)
        plans = [over_endpoints(n, params, step, init, batches[0], trainers=2) for n in (2, 3)]
        job_of(role_threads, plans[0], batches[:3], None, tmp_path / "3", params, "first")
        got = job_of(
            role_threads, plans[1], batches[3:], tmp_path / "3", tmp_path / "6", params, "second"
        )
        want = trained_on_one_device(batches)[:2]
        tree_close(got, want[0], 1e-12)
        assert checkpoint.latest(tmp_path) == tmp_path / "6"
        tree_close(checkpoint.load(tmp_path / "6", plans[0].main), want, 1e-12)
        tree_close(
            checkpoint.load(tmp_path / "3", plans[0].main),
            trained_on_one_device(batches[:3])[:2],
            1e-12,
        )


def test_statistics_go_on_where_they_were(role_threads: RoleThreads, tmp_path: Path) -> None:
    with jax.enable_x64(True):
        params = {"mean": jnp.zeros(5), "w": mlp_params((5, 3), jnp.float64)["w1"]}
        batches = [mlp_batch(8, (5, 3), jnp.float64, seed=i) for i in range(4)]
        init = lambda p: (p, ())
        plans = [over_endpoints(n, params, batch_statistics_step, init, batches[0]) for n in (2, 1)]
        job_of(role_threads, plans[0], batches[:2], None, tmp_path / "2", params, "first")
        got = job_of(
            role_threads, plans[1], batches[2:], tmp_path / "2", tmp_path / "4", params, "second"
        )
        want = params, ()
        for batch in batches:
            *want, _ = jax.jit(batch_statistics_step)(*want, *batch)
        tree_close(got, want[0], 1e-12)
        tree_close(checkpoint.load(tmp_path / "4", plans[0].main)[0], want[0], 1e-12)


def test_an_asynchronous_job_goes_on(role_threads: RoleThreads, tmp_path: Path) -> None:
    with jax.enable_x64(True):
        tx = optax.adam(optax.exponential_decay(0.05, 2, 0.5))
        params, batches = mlp_params(dtype=jnp.float64), batches_of(4)
        step, init = dtrans.make_train_step(mlp_loss, tx), init_of(tx)
        plans = [over_endpoints(n, params, step, init, batches[0], **DC_ASGD) for n in (2, 3)]
        job_of(role_threads, plans[0], batches[:2], None, tmp_path / "2", params, "first")
        got = job_of(
            role_threads, plans[1], batches[2:], tmp_path / "2", tmp_path / "4", params, "second"
        )
        # one trainer: no delay
        want = plain_run(plain_step(mlp_loss, tx), params, tx.init(params), batches)
        tree_close(got, want[0], 1e-12)
        tree_close(checkpoint.load(tmp_path / "4", plans[0].main), tuple(want[:2]), 1e-12)


# -- what is no whole checkpoint -------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, PServerPlan, Any]:
    """Return the path of a checkpoint of three servers, their plan, and their state."""
    plan, whole = planned(OPTIMIZERS["adam"]), distinct_state(OPTIMIZERS["adam"])
    held = {ep: checkpoint.scatter(plan, ep, *whole) for ep in plan.servers}
    save_all(tmp_path / "1", plan, held)
    return tmp_path / "1", plan, held


def test_a_server_that_has_not_saved_is_named(saved: Any) -> None:
    path, plan, _ = saved
    shutil.rmtree(path / "pserver-1")
    message = (
        f"the checkpoint at {path} is incomplete: pserver-1 of {[*plan.servers][1]} is missing"
    )
    with pytest.raises(StateError, match=message):
        checkpoint.load(path, plan.main)
    for ep in plan.servers:
        with pytest.raises(StateError, match=message):
            checkpoint.restore(path, plan, ep)


def test_a_path_without_a_checkpoint_is_named(saved: Any, tmp_path: Path) -> None:
    _, plan, _ = saved
    with pytest.raises(
        StateError, match=f"there is no checkpoint at {tmp_path}/2, which is not a folder"
    ):
        checkpoint.load(tmp_path / "2", plan.main)
    with pytest.raises(StateError, match=f"there is no checkpoint at {tmp_path}$"):
        checkpoint.load(tmp_path, plan.main)  # the version of the format


def test_a_path_that_is_taken_is_left_as_it_is(saved: Any) -> None:
    path, plan, held = saved
    (ep, *_) = plan.servers
    before = checkpoint.load(path, plan.main)
    with pytest.raises(
        ConfigError, match=f"{path}/pserver-0 exists already; save each checkpoint to another path"
    ):
        checkpoint.save(
            path, plan, ep, {n: x + x if "key" not in n else x for n, x in held[ep].items()}
        )
    tree_equal(checkpoint.load(path, plan.main), before)


def test_a_path_of_another_job_is_taken(saved: Any) -> None:
    path, plan, held = saved
    first, *_ = plan.servers
    shutil.rmtree(path / "pserver-0")
    with pytest.raises(
        ConfigError,
        match=rf"{path} contains pserver-1 of another job, run or step \(run .+; "
        r"this save is tag 'x'\)",
    ):
        checkpoint.save(path, plan, first, held[first], tag="x")
    other = planned(OPTIMIZERS["adam"], 4)
    with pytest.raises(
        ConfigError,
        match=f"{path} contains pserver-1 of another job, .*; save to another path",
    ):
        checkpoint.save(
            path,
            other,
            first,
            checkpoint.scatter(other, first, *distinct_state(OPTIMIZERS["adam"])),
        )
    assert not (path / "pserver-0").exists()


def test_pieces_of_several_jobs_are_not_put_together(saved: Any, tmp_path: Path) -> None:
    path, plan, held = saved
    (ep, *_) = plan.servers
    checkpoint.save(tmp_path / "2", plan, ep, held[ep], tag="job 2")
    shutil.rmtree(path / "pserver-0")
    shutil.copytree(tmp_path / "2" / "pserver-0", path / "pserver-0")
    with pytest.raises(
        StateError,
        match=r"has pieces of several jobs, runs or steps: pserver-0 \(tag 'job 2'\) and pserver-1 "
        r"\(run ",
    ):
        checkpoint.load(path, plan.main)


@pytest.mark.usefixtures("x64")
def test_pieces_of_two_runs_are_not_put_together(role_threads: RoleThreads, tmp_path: Path) -> None:
    """The first of two runs with one plan left a piece.

    The checkpoint is recognized as mixed without a tag from the user.
    """
    params, (batch,) = mlp_params(dtype=jnp.float64), batches_of(1)
    trains = {"w1": "yes", "w2": "yes", "b1": "no", "b2": "no"}
    tx = optax.multi_transform({"yes": TX, "no": optax.set_to_zero()}, trains)
    plan = over_endpoints(
        2, params, dtrans.make_train_step(mlp_loss, tx), init_of(tx), batch, trainers=2
    )
    for run in ("first", "second"):
        job_of(role_threads, plan, [batch], None, tmp_path / run, params, run)
        checkpoint.load(tmp_path / run, plan.main)
    words = {
        word for f in tmp_path.glob("*/*/overview/*") for word in json.loads(f.read_text())["run"]
    }
    assert len(words) == 2 and THIS_PROCESS not in words
    mixed, *both = tmp_path / "second", *plan.servers
    shutil.rmtree(mixed / "pserver-1")
    shutil.copytree(tmp_path / "first" / "pserver-1", mixed / "pserver-1")
    with pytest.raises(
        StateError,
        match="second has pieces of several jobs, runs or steps: pserver-0 .* and pserver-1 ",
    ):
        checkpoint.load(mixed, plan.main)
    # pieces of the first run do not block a save
    shutil.rmtree(mixed / "pserver-0")
    for ep in both:
        checkpoint.save(mixed, plan, ep, checkpoint.scatter(plan, ep, *init_of(tx)(params)))
    checkpoint.load(mixed, plan.main)


def test_the_run_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's id comes from the job, from the launcher, or from this process."""
    monkeypatch.setattr(runs, "_known", {})
    assert runs.run_of("127.0.0.1:1", {}) == THIS_PROCESS != runs.new_run()
    assert runs.run_of("127.0.0.1:1", {"DTRANS_RUN": "launched"}) == "launched"
    runs.note("127.0.0.1:1", "served")
    assert runs.run_of("127.0.0.1:1", {"DTRANS_RUN": "launched"}) == "served"


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"w": jnp.ones((9, 3, 3))},
            r"its params/w is float32\[9, 3, 2\], but params/w of step is float32\[9, 3, 3\]",
        ),
        (
            {"w": jnp.ones((9, 3, 2), jnp.bfloat16)},
            r"its params/w is float32\[9, 3, 2\], but params/w of step is bfloat16\[9, 3, 2\]",
        ),
        ({"x": jnp.ones(2)}, r"its params/x is missing, but params/x of step is float32\[2\]"),
        ({"w": None}, r"its params/w is float32\[9, 3, 2\], but params/w of step is missing"),
    ],
    ids=["shape", "dtype", "more", "less"],
)
def test_a_checkpoint_of_another_step_is_told_by_its_first_difference(
    saved: Any, change: Any, message: str
) -> None:
    path, _, _ = saved
    params = {n: x for n, x in (some_params() | change).items() if x is not None}
    other = plan_of(loss, OPTIMIZERS["adam"], params, jnp.ones(2), servers=3)
    for fails in (
        lambda: checkpoint.load(path, other.main),
        lambda: checkpoint.restore(path, other, next(iter(other.servers))),
    ):
        with pytest.raises(
            StateError, match=f"the checkpoint at {path} belongs to another step: {message}"
        ):
            fails()


def test_a_checkpoint_of_another_optimizer_is_one_of_another_step(saved: Any) -> None:
    path, _, _ = saved
    other = planned(OPTIMIZERS["sgd"])
    with pytest.raises(
        StateError,
        match=r"its opt_state/0/count is int32\[\], but opt_state/0/count of step is missing",
    ):
        checkpoint.load(path, other.main)


def test_copies_in_files_must_be_the_same_too(tmp_path: Path) -> None:
    plan, whole = planned(OPTIMIZERS["adam"]), distinct_state(OPTIMIZERS["adam"])
    held = {ep: checkpoint.scatter(plan, ep, *whole) for ep in plan.servers}
    first, _, third = plan.servers
    held[third]["opt_state/0/count"] += 1
    save_all(tmp_path, plan, held)
    for fails in (
        lambda: checkpoint.load(tmp_path, plan.main),
        lambda: checkpoint.restore(tmp_path, plan, first),
    ):
        with pytest.raises(StateError, match=f"opt_state/0/count differs on {first} and {third}"):
            fails()


def test_a_crash_while_saving_leaves_what_was_there(
    saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import orbax.checkpoint as ocp

    path, plan, held = saved
    first, second, third = plan.servers
    checkpoint.save(tmp_path / "2", plan, first, held[first])
    with monkeypatch.context() as m:  # everything is written, but not renamed

        def crash(*_: Any, **__: Any) -> None:
            raise RuntimeError("crash")

        m.setattr(ocp.PyTreeCheckpointHandler, "finalize", crash)
        with pytest.raises(RuntimeError, match="crash"):
            checkpoint.save(tmp_path / "2", plan, second, held[second])
    assert any("tmp" in name for name in os.listdir(tmp_path / "2"))
    with pytest.warns(CheckpointWarning, match="2 is skipped: .* is incomplete"):
        assert checkpoint.latest(tmp_path) == path
    with pytest.raises(
        StateError, match=f"is incomplete: pserver-1 of {second}, pserver-2 of {third} is missing"
    ):
        checkpoint.load(tmp_path / "2", plan.main)
    # the remaining piece does not block a save
    checkpoint.save(tmp_path / "2", plan, second, held[second])
    checkpoint.save(tmp_path / "2", plan, third, held[third])
    assert checkpoint.latest(tmp_path) == tmp_path / "2"
    tree_equal(checkpoint.load(tmp_path / "2", plan.main), checkpoint.load(path, plan.main))


def test_the_latest_is_the_last_by_number_that_is_whole(saved: Any, tmp_path: Path) -> None:
    path, _, _ = saved
    assert checkpoint.latest(tmp_path / "nothing") is None
    shutil.copytree(path, tmp_path / "9")
    shutil.copytree(path, tmp_path / "10")
    shutil.copytree(path, tmp_path / "last")
    (path / "pserver-old").mkdir()  # a file of the user
    (tmp_path / "12").write_text("no folder")
    assert checkpoint.latest(str(tmp_path)) == tmp_path / "10"
    (tmp_path / "11").mkdir()
    with pytest.warns(CheckpointWarning, match="/11 is skipped: there is no checkpoint at"):
        assert checkpoint.latest(tmp_path) == tmp_path / "10"
    (tmp_path / "11").rmdir()
    shutil.rmtree(tmp_path / "10" / "pserver-2")
    with pytest.warns(CheckpointWarning, match="/10 is skipped: .* is incomplete: pserver-2 of"):
        assert checkpoint.latest(tmp_path) == tmp_path / "9"
    shutil.rmtree(tmp_path / "10")
    shutil.rmtree(tmp_path / "9" / "pserver-0" / "overview")
    with pytest.warns(
        CheckpointWarning, match="/9 is skipped: .*pserver-0 cannot be read as a piece"
    ):
        assert checkpoint.latest(tmp_path) == path


def test_a_disk_that_refuses_is_named_with_the_piece(
    saved: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    import orbax.checkpoint as ocp

    path, plan, held = saved
    who = next(iter(held))
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(
        StateError, match=f"piece of {who} cannot be written to .*/file/1/pserver-0: .*[Nn]ot a dir"
    ):
        checkpoint.save(tmp_path / "file" / "1", plan, who, held[who])

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(ocp.PyTreeCheckpointHandler, "save", full)
        with pytest.raises(
            StateError, match=r"cannot be written to .*/2/pserver-0: \[Errno 28\] No space left"
        ):
            checkpoint.save(tmp_path / "2", plan, who, held[who])
        m.setattr(ocp.PyTreeCheckpointHandler, "restore", lambda *_, **__: full())
        with pytest.raises(
            StateError, match=f"{path}/pserver-.* cannot be read as a piece of a checkpoint"
        ):
            checkpoint.load(path, plan.main)


def test_a_format_of_a_later_version_is_told(saved: Any) -> None:
    path, plan, _ = saved
    (file,) = (path / "pserver-0" / "overview").glob("metadata*")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 4}))
    with pytest.raises(
        StateError,
        match="pserver-0 cannot be read .*: its format is 4, but this version of dtrans reads 1 to "
        "3",
    ):
        checkpoint.load(path, plan.main)


def test_rows_that_are_nowhere_are_told(saved: Any) -> None:
    path, plan, _ = saved
    for file in (path / "pserver-1" / "overview").glob("metadata*"):
        about = json.loads(file.read_text())
        about["rows"] = [row for row in about["rows"] if row["origin_name"] != "params/table"]
        file.write_text(json.dumps(about))
    ep = [*plan.servers][1]
    for fails in (
        lambda: checkpoint.load(path, plan.main),
        lambda: checkpoint.restore(path, plan, ep),
    ):
        with pytest.raises(
            StateError,
            match=r"params/table has (12|16|44) elements, but only (0|28|32) were found, on ",
        ):
            fails()


def test_without_orbax_the_extra_is_named(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path, plan, held = saved
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    (ep, *_) = plan.servers
    for fails in (
        lambda: checkpoint.load(path, plan.main),
        lambda: checkpoint.save(path, plan, ep, held[ep]),
    ):
        with pytest.raises(
            ConfigError, match=r"^checkpoints need orbax: pip install 'dtrans-jax\[checkpoint\]'"
        ):
            fails()
    tree_equal(checkpoint.gather(plan, held), distinct_state(OPTIMIZERS["adam"]))


def test_orbax_is_imported_by_those_who_save(tmp_path: Path) -> None:
    code = "import sys, dtrans; dtrans.checkpoint.gather; sys.exit('orbax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def geo_plan(tx: Any, servers: int) -> PServerPlan:
    params, x = some_params(), jnp.ones(2)
    main = dtrans.trace(dtrans.make_train_step(loss, tx), *init_of(tx)(params), x)
    startup = dtrans.trace(init_of(tx), params)
    rows = dtrans.BlockPlacement(min_block_size=1)
    return dtrans.pserver(
        main, startup, pservers=endpoints(servers), trainers=2, mode=dtrans.Geo(), placement=rows
    )


def test_jobs_whose_trainers_have_an_optimizer_each_are_refused(tmp_path: Path) -> None:
    tx = OPTIMIZERS["adam"]
    plan, whole = geo_plan(tx, 3), distinct_state(tx)
    held, (ep, *_) = start_servers(plan, some_params()), plan.servers
    for fails in (
        lambda: checkpoint.gather(plan, held),
        lambda: checkpoint.scatter(plan, ep, *whole),
        lambda: checkpoint.save(tmp_path, plan, ep, held[ep]),
        lambda: checkpoint.save_trainer(tmp_path, plan, whole[0]),
        lambda: checkpoint.restore(tmp_path, plan, ep),
        lambda: checkpoint.restore_trainer(tmp_path, plan, whole[0]),
    ):
        with pytest.raises(
            ConfigError,
            match="^opt_state/0/count is different on each trainer, .*; use another mode than "
            "dtrans.Geo",
        ):
            fails()
    assert os.listdir(tmp_path) == []


def test_what_such_jobs_do_without_state_is_saved(tmp_path: Path) -> None:
    tx = OPTIMIZERS["sgd"]
    plan, whole = geo_plan(tx, 3), distinct_state(tx)
    held = {ep: checkpoint.scatter(plan, ep, *whole) for ep in plan.servers}
    save_all(tmp_path, plan, held)
    tree_equal(checkpoint.gather(plan, held), whole)
    tree_equal(checkpoint.load(tmp_path, plan.main), whole)
    for other in (geo_plan(tx, 2), planned(tx, 2)):
        for ep in other.servers:
            same(checkpoint.restore(tmp_path, other, ep), checkpoint.scatter(other, ep, *whole))


def test_what_is_no_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="main is .*; expected the traced step"):
        checkpoint.load("nowhere", planned(OPTIMIZERS["adam"]))  # type: ignore[arg-type]


PROCESS = """
    import sys, warnings
    warnings.simplefilter("error")
    import jax.numpy as jnp, optax, dtrans

    path, what, count, k = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    tx = optax.adam(0.1)
    params = {"w": jnp.arange(24.0).reshape(12, 2), "b": jnp.arange(5.0)}
    step = dtrans.make_train_step(lambda p, x: jnp.mean(x) * (p["w"].sum() + p["b"].sum()), tx)
    init = lambda p: (p, tx.init(p))
    pservers = [f"127.0.0.1:{6170 + i}" for i in range(count)]
    main, startup = dtrans.trace(step, *init(params), jnp.ones(2)), dtrans.trace(init, params)
    placement = dtrans.BlockPlacement(min_block_size=1)
    plan = dtrans.pserver(main, startup, pservers=pservers, placement=placement)
    whole = dtrans.checkpoint.scatter(plan, pservers[k], *init(params))
    if what == "save":
        dtrans.checkpoint.save(path, plan, pservers[k], whole, tag="7")
    else:
        held = dtrans.checkpoint.restore(path, plan, pservers[k])
        assert set(held) == set(whole) and all((held[n] == whole[n]).all() for n in whole)
        print("restored", len(held))
"""


def test_processes_save_and_restore_at_the_same_time(tmp_path: Path) -> None:
    def run(what: str, count: int) -> list[str]:
        code = textwrap.dedent(PROCESS)
        args = [
            [sys.executable, "-c", code, str(tmp_path / "1"), what, str(count), str(k)]
            for k in range(count)
        ]
        roles = [
            subprocess.Popen(a, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for a in args
        ]
        try:
            said = [role.communicate(timeout=120)[0] for role in roles]
        finally:
            for role in roles:
                role.kill()
                role.wait()
        assert [role.returncode for role in roles] == [0] * count, said
        return said

    run("save", 3)
    assert sorted(os.listdir(tmp_path / "1")) == ["pserver-0", "pserver-1", "pserver-2"]
    assert all("restored" in said for said in run("restore", 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpoint.latest(tmp_path) == tmp_path / "1"
