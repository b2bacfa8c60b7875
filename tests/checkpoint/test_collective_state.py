"""Checkpoints of sharded jobs: any other plan restores the same bits, on ranks, servers or one
device. Files contain no padding."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import flat_options
import jax
import jax.numpy as jnp
import library_zoo
import numpy as np
import optax
import pytest
from checkpoint_states import OPTIMIZERS, TX, distinct
from helpers import (
    as_numpy,
    endpoints,
    mlp_batch,
    mlp_loss,
    mlp_params,
    plain_run,
    plain_step,
    tree_close,
    tree_equal,
)

import dtrans
from dtrans import checkpoint
from dtrans.checkpoint.orbax_io import Checkpoint
from dtrans.errors import CheckpointError, CheckpointWarning, ConfigError, StateError


# leaves: rows that no degree divides, fewer rows than ranks, 16 bits, no rows, no dimension
SHAPES = {
    "b": (13,),
    "empty": (0,),
    "scalar": (),
    "table": (11, 4),
    "tall": (3, 17),
    "w": (9, 3, 2),
}
EIGHT = {"degree": 8, "stage": 3}
OWNERS = {"degree": 3, "replicas": 2, "stage": 1, "partition": "greedy_even"}
LAYOUTS: list[dict[str, Any]] = [
    {"degree": 2, "stage": 1},
    EIGHT,
    {"degree": 3, "replicas": 2, "stage": 2},
    {"degree": 2, "replicas": 4, "stage": 3},
    {"degree": 4, "stage": 1, "precision": "bf16"},
    {"degree": 1, "replicas": 2, "stage": 1},
    {"degree": 2, "stage": 3, "min_slice_size": 30},
    OWNERS,
]


def loss(params: Any, x: Any) -> Any:
    return jnp.mean(x) * sum(jnp.sum(p.astype(jnp.float32) ** 2) for p in jax.tree.leaves(params))


def whole_of(tx: Any) -> tuple[Any, Any]:
    """Return a state of one device in which no two elements are equal."""
    params = {
        n: jnp.ones(s, jnp.bfloat16 if n == "table" else jnp.float32) for n, s in SHAPES.items()
    }
    return distinct(params), distinct(tx.init(params))


def traced(tx: Any) -> tuple[Any, Any]:
    """Return a step, and an init that returns its argument."""
    step = dtrans.make_train_step(loss, tx)
    return dtrans.trace(step, *whole_of(tx), jnp.ones(24)), dtrans.trace(
        lambda *state: state, *whole_of(tx)
    )


def planned(tx: Any, **options: Any) -> Any:
    return flat_options.sharding(*traced(tx), **{"min_slice_size": 0, **options})


def on_mesh(plan: Any) -> Any:
    return plan.on_mesh(jax.devices()[: plan.trainers])


def whole(job: Any, state: Any) -> Any:
    return job.params(state), job.opt_state(state)


@pytest.fixture(params=["sums over rows and columns", "whole matrices", "state of many types"])
def tx(request: Any) -> Any:
    return OPTIMIZERS[request.param]


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Any, Any]:
    job = on_mesh(planned(OPTIMIZERS["adam"], **EIGHT))
    state = job.init(*whole_of(OPTIMIZERS["adam"]))
    checkpoint.save(tmp_path / "1", job, state)
    return tmp_path / "1", job, state


# -- from every layout to every other --------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options", [EIGHT, {"degree": 2, "replicas": 2, "stage": 1}, OWNERS], ids=str
)
def test_what_ranks_held_is_what_any_others_hold(options: Any, tmp_path: Path) -> None:
    check_layouts(OPTIMIZERS["adam"], options, LAYOUTS, tmp_path)


def test_state_of_every_kind_is_cut_and_put_together(tx: Any, tmp_path: Path) -> None:
    check_layouts(tx, EIGHT, LAYOUTS[:1], tmp_path)


def check_layouts(tx: Any, options: Any, layouts: Sequence[Any], path: Path) -> None:
    want = whole_of(tx)
    job = on_mesh(planned(tx, **options))
    checkpoint.save(path / "1", job, job.init(*want))
    tree_equal(checkpoint.load(path / "1", job.plan.main), want)
    for layout in layouts:
        plan = planned(tx, **layout)
        for other in (on_mesh(plan), plan.simulate()):
            state = checkpoint.restore(path / "1", other)
            tree_equal(whole(other, state), want)
            check_ranks(other, state, other.init(*want))


def check_ranks(job: Any, state: Any, like: Any) -> None:
    """Assert that a state equals the state of a job: types, placement, and bits on each device,
    with padding."""
    assert jax.tree.structure(state) == jax.tree.structure(like)
    held = {**like.params, **like.opt_state}
    for n, x in {**state.params, **state.opt_state}.items():
        assert (x.shape, x.dtype) == (held[n].shape, held[n].dtype), n
        assert x.sharding.is_equivalent_to(held[n].sharding, x.ndim), n
        for mine, theirs in zip(x.addressable_shards, held[n].addressable_shards, strict=True):
            assert (mine.device, mine.index) == (theirs.device, theirs.index), n
            assert np.array_equal(as_numpy(mine.data), as_numpy(theirs.data)), n


def test_a_simulated_job_saves_what_a_mesh_does(tmp_path: Path) -> None:
    tx = OPTIMIZERS["adam"]
    plan, found = planned(tx, **EIGHT), []
    for name, job in (("mesh", on_mesh(plan)), ("simulated", plan.simulate())):
        checkpoint.save(tmp_path / name, job, job.init(*whole_of(tx)))
        found.append(pieces_at(tmp_path / name))
    assert [*found[0]] == [*found[1]]
    for piece in found[0]:
        same(found[0][piece], found[1][piece])


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    assert set(a) == set(b)
    for n in a:
        assert np.array_equal(a[n], b[n]), n


def pieces_at(path: Path) -> dict[str, dict[str, np.ndarray]]:
    """Return the arrays of each piece, read by orbax."""
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        folders = {piece: path / piece / "arrays" for piece in sorted(os.listdir(path))}
        return {
            piece: checkpointer.restore(f) if f.exists() else {} for piece, f in folders.items()
        }


@pytest.mark.parametrize("options", [EIGHT, EIGHT | {"stage": 1}], ids=str)
def test_pieces_are_rows_under_the_paths_of_the_step_without_padding(
    options: Any, tmp_path: Path
) -> None:
    tx = OPTIMIZERS["adam"]
    job = on_mesh(planned(tx, **options))
    checkpoint.save(tmp_path, job, job.init(*whole_of(tx)))
    pieces = pieces_at(tmp_path)
    assert [*pieces] == [f"rank-{k}" for k in range(8)]
    names = [n for spec in job.plan.main.args[:2] for n in spec.names]
    cuts = {**job.plan.slices.leaves, **job.plan.slices.state}
    assert {"params/b", "params/tall", "opt_state/0/mu/w"} <= set(cuts)
    assert "params/tall" in job.plan.sliced or options["stage"] == 1
    for n, x in zip(names, jax.tree.leaves(whole_of(tx)), strict=True):
        held = [of[n] for of in pieces.values() if n in of]
        if n not in cuts:
            assert len(held) == (x.size > 0)
            assert not held or np.array_equal(pieces["rank-0"][n], x)
            continue
        assert np.array_equal(np.concatenate(held, cuts[n].axis), x), n
        assert [h.shape[cuts[n].axis] for h in held[:-1]] == [cuts[n].part] * (len(held) - 1)
    assert not pieces["rank-7"]  # 13 rows in parts of 2: the last rank has only padding
    assert {n for of in pieces.values() for n in of} == {*names} - {
        n for n in names if n.endswith("/empty")
    }


def test_each_device_gets_its_rows_and_nothing_is_put_together(
    saved: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, _, _ = saved
    asked: list[Any] = []
    read = Checkpoint.on_host

    def spy(self: Checkpoint, targets: Sequence[Any], **options: Any) -> Any:
        asked.extend(targets)
        return read(self, targets, **options)

    monkeypatch.setattr(Checkpoint, "on_host", spy)
    other = on_mesh(planned(OPTIMIZERS["adam"], degree=4, replicas=2, stage=3))
    checkpoint.restore(path, other)
    for row in asked:
        cut = other.plan.sliced.get(row.origin_name)
        size = row.slice_shape[cut.axis] if cut else 0
        assert row.is_slice == (cut is not None) and (cut is None or size <= cut.part), row
    # each piece once, although two groups of ranks have it
    assert len(asked) == len({(row.origin_name, row.offset) for row in asked})


# -- other kinds of jobs ---------------------------------------------------------------------------


def test_trainers_that_have_everything_and_servers_go_on_from_ranks_and_ranks_from_them(
    tmp_path: Path,
) -> None:
    tx = OPTIMIZERS["state of many types"]
    want = whole_of(tx)
    ranks = on_mesh(planned(tx, **EIGHT))
    checkpoint.save(tmp_path / "ranks", ranks, ranks.init(*want))
    trainers = on_mesh(dtrans.nccl2(*traced(tx), trainers=2))
    checkpoint.save(tmp_path / "trainers", trainers, trainers.init(*want))
    assert os.listdir(tmp_path / "trainers") == ["trainer-0"]
    servers = dtrans.pserver(
        *traced(tx), pservers=endpoints(3), placement=dtrans.BlockPlacement(min_block_size=1)
    )
    for ep in servers.servers:
        checkpoint.save(tmp_path / "servers", servers, ep, checkpoint.scatter(servers, ep, *want))
    for path in tmp_path.iterdir():
        tree_equal(checkpoint.load(path, ranks.plan.main), want)
        for job in (ranks, trainers):
            state = checkpoint.restore(path, job)
            check_ranks(job, state, job.init(*want))
        for ep in servers.servers:
            got, there = (
                checkpoint.restore(path, servers, ep),
                checkpoint.scatter(servers, ep, *want),
            )
            assert set(got) == set(there)
            assert all(np.array_equal(as_numpy(got[n]), as_numpy(there[n])) for n in got)


def test_a_loss_scale_is_saved_and_begins_anew_where_it_was_not(saved: Any, tmp_path: Path) -> None:
    path, _, _ = saved
    scaling = dtrans.LossScaling(initial=2.0**9)
    plan = planned(OPTIMIZERS["adam"], degree=2, stage=3, precision="fp16", loss_scaling=scaling)
    assert plan.extra_state
    job = on_mesh(plan)
    state = checkpoint.restore(path, job)
    for n, x in plan.extra_state.items():
        assert np.array_equal(state.extra[n], x)
    moved = {n: x + 3 for n, x in state.extra.items()}
    checkpoint.save(tmp_path / "2", job, type(state)(state.params, state.opt_state, moved))
    other = on_mesh(
        planned(OPTIMIZERS["adam"], degree=3, stage=1, precision="fp16", loss_scaling=scaling)
    )
    again = checkpoint.restore(tmp_path / "2", other)
    assert {n: x.item() for n, x in again.extra.items()} == {n: x.item() for n, x in moved.items()}
    plain = on_mesh(planned(OPTIMIZERS["adam"], **EIGHT))
    tree_equal(
        whole(plain, checkpoint.restore(tmp_path / "2", plain)), whole_of(OPTIMIZERS["adam"])
    )
    tree_equal(checkpoint.load(tmp_path / "2", plain.plan.main), whole_of(OPTIMIZERS["adam"]))


# -- jobs that go on -------------------------------------------------------------------------------


def test_a_job_that_goes_on_in_another_layout_computes_what_one_device_does(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        params = mlp_params(dtype=jnp.float64)
        batches = [mlp_batch(8, dtype=jnp.float64, seed=i) for i in range(4)]
        init = lambda p: (p, TX.init(p))
        main = dtrans.trace(dtrans.make_train_step(mlp_loss, TX), *init(params), *batches[0])
        plan = lambda **options: flat_options.sharding(
            main, dtrans.trace(init, params), min_slice_size=0, **options
        )
        first, then = on_mesh(plan(degree=4, stage=3)), on_mesh(plan(degree=2, replicas=2, stage=1))
        state = first.init(params)
        for batch in batches[:2]:
            state, _ = first.step(state, *batch)
        checkpoint.save(tmp_path / "2", first, state)
        held = whole(first, state)
        want = plain_run(plain_step(mlp_loss, TX), params, TX.init(params), batches)[:2]
        # one device
        loaded = checkpoint.load(checkpoint.latest(tmp_path) or "", main)
        tree_equal(loaded, jax.device_put(held, jax.devices()[0]))
        tree_close(plain_run(plain_step(mlp_loss, TX), *loaded, batches[2:])[:2], want, 1e-12)
        # other ranks; the first step reuses the memory of the restored state
        state = checkpoint.restore(tmp_path / "2", then)
        for batch in batches[2:]:
            before = state
            state, _ = then.step(state, *batch)
            assert all(x.is_deleted() for x in before.opt_state.values())
        tree_close(whole(then, state), want, 1e-12)
        # without the optimizer's state, the comparison must fail
        state = checkpoint.restore(tmp_path / "2", then)
        state = type(state)(state.params, then.init(params).opt_state)
        for batch in batches[2:]:
            state, _ = then.step(state, *batch)
        with pytest.raises(AssertionError):
            tree_close(then.params(state), want[0], 1e-6)


# -- what is refused -------------------------------------------------------------------------------


def test_states_that_are_none_are_refused_by_name_and_types(saved: Any, tmp_path: Path) -> None:
    _, job, state = saved
    adam = OPTIMIZERS["adam"]
    params, opt_state = state.params, state.opt_state
    other = on_mesh(planned(adam, degree=2, stage=3))
    cases: list[tuple[Any, str]] = [
        (params, "the state is a dict; expected the state that job.init or job.step returned"),
        (
            type(state)({}, opt_state),
            "the state of step lacks params/b; pass a state of this plan",
        ),
        (
            type(state)(params, opt_state | {"opt_state/x": 1}),
            "the state of step has opt_state/x, which is not an array of this plan",
        ),
        (
            type(state)(params | {"params/b": 1.0}, opt_state),
            r"params/b is 1.0; this job expects float32\[16\]",
        ),
        (other.init(*whole_of(adam)), r"params/b is float32\[14\]; this job expects float32\[16\]"),
    ]
    for wrong, message in cases:
        with pytest.raises(StateError, match=f"^{message}"):
            checkpoint.save(tmp_path / "2", job, wrong)
    job.step(state, jnp.ones(24))
    with pytest.raises(
        StateError, match=r"^params/b was donated to job.step; save the state that it returned"
    ):
        checkpoint.save(tmp_path / "2", job, state)
    assert not (tmp_path / "2").exists()
    with pytest.raises(
        ConfigError,
        match=r"plan is a ShardingPlan; expected .*; for plans of other strategies, pass the job",
    ):
        checkpoint.restore(tmp_path / "1", job.plan)  # type: ignore[call-overload]


def test_a_step_refuses_the_state_of_another_plan_by_name_and_shapes(saved: Any) -> None:
    _, _, state = saved
    other = on_mesh(planned(OPTIMIZERS["adam"], degree=2, stage=1))
    message = (
        r"^this state belongs to another job: params/b is float32\[16\], expected float32\[13\]; "
    )
    with pytest.raises(StateError, match=message):
        other.step(state, jnp.ones(24))


def test_checkpoints_that_are_not_whole_or_of_another_step(saved: Any, tmp_path: Path) -> None:
    path, job, state = saved
    with pytest.raises(
        ConfigError,
        match=f"{path}/rank-0 exists already; save each checkpoint to another path",
    ):
        checkpoint.save(path, job, state)
    other = on_mesh(planned(OPTIMIZERS["adam"], degree=2, stage=3))
    (path / "rank-0").rename(tmp_path / "away")
    with pytest.raises(ConfigError, match=f"{path} contains rank-1 of another job"):
        checkpoint.save(path, other, other.init(*whole_of(OPTIMIZERS["adam"])))
    with pytest.raises(StateError, match="is incomplete: rank-0 of rank 0 is missing"):
        checkpoint.restore(path, other)
    with pytest.warns(CheckpointWarning, match="is skipped: .* is incomplete: rank-0"):
        assert checkpoint.latest(tmp_path) is None
    (tmp_path / "away").rename(path / "rank-0")
    sgd = on_mesh(planned(OPTIMIZERS["sgd"], degree=2))
    with pytest.raises(
        StateError,
        match=r"belongs to another step: its opt_state/0/count is int32\[\], but "
        r"opt_state/0/count of .* is missing",
    ):
        checkpoint.restore(path, sgd)
    shutil.rmtree(path / "rank-6" / "arrays")
    with pytest.raises(
        StateError, match=f"^{path}/rank-6 cannot be read as a piece of a checkpoint"
    ):
        checkpoint.restore(path, other)


def test_one_device_loads_the_one_state_of_a_step(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        case, key = library_zoo.by_name("nnx_optimizer"), jax.random.key(0)
        main = dtrans.trace(case.step(case.value_and_grad), case.init(key), *case.batch(12))
        job = dtrans.nccl2(main, dtrans.trace(case.init, key), trainers=2).simulate()
        state, _ = job.step(job.init(key), *case.batch(12))
        checkpoint.save(tmp_path / "1", job, state)
        tree_equal(checkpoint.load(tmp_path / "1", main), job.gather(state))
        pair = job.params(state), job.opt_state(state)
        tree_equal(checkpoint.load(tmp_path / "1", job.plan.main), pair)


def test_an_init_tells_the_one_state_of_a_step_that_returns_what_looks_like_its_batch(
    tmp_path: Path,
) -> None:
    def step(state: Any, x: Any) -> Any:
        code = lambda w: x @ w @ w.T
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((code(w) - x) ** 2))(state["w"])
        return {"w": state["w"] - 0.5 * grad}, code(state["w"]), loss

    init, x = lambda: {"w": jnp.ones((3, 2))}, jnp.ones((4, 3))
    main, startup = dtrans.trace(step, init(), x), dtrans.trace(init)
    job = dtrans.nccl2(main, startup, trainers=2).simulate()
    state, *_ = job.step(job.init(), x)
    checkpoint.save(tmp_path / "1", job, state)
    tree_equal(checkpoint.load(tmp_path / "1", main, startup), job.gather(state))
    with pytest.raises(
        StateError, match=r"x is missing, .*; for a step\(state, \*batch\), .*job\.gather"
    ):
        checkpoint.load(tmp_path / "1", main)


def test_none_of_latest_is_no_path(tmp_path: Path) -> None:
    job = on_mesh(planned(OPTIMIZERS["sgd"], degree=2))
    path: Any = checkpoint.latest(tmp_path / "nowhere")
    for fails in (
        lambda: checkpoint.restore(path, job),
        lambda: checkpoint.load(path, job.plan.main),
    ):
        with pytest.raises(CheckpointError, match="the path of the checkpoint is None"):
            fails()


def test_a_state_is_taken_from_one_runner_to_another_of_its_plan() -> None:
    tx, params, batch = optax.adam(0.1), mlp_params(), mlp_batch(8)
    init = lambda p: (p, tx.init(p))
    main = dtrans.trace(dtrans.make_train_step(mlp_loss, tx), *init(params), *batch)
    plan = dtrans.sharding(
        main, dtrans.trace(init, params), degree=2, stage=3, slices=dtrans.Slicing(min_slice_size=0)
    )
    mesh, one = on_mesh(plan), plan.simulate()
    want = plain_run(plain_step(mlp_loss, tx), params, tx.init(params), [batch])[:2]
    for job, other in ((mesh, one), (one, mesh)):
        state, _ = job.step(other.init(params), *batch)
        tree_close(jax.device_get(whole(job, state)), jax.device_get(want), 1e-5)
