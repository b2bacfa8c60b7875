"""Jobs of processes with compressed messages: bits, bytes on the wire, snapshots, and training."""

from __future__ import annotations

import re
import types
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import mlp_batch, mlp_loss, mlp_params, tree_equal
from role_threads import HANG, RoleThreads, free_endpoints

import dtrans
from dtrans.errors import CheckpointError, CheckpointWarning, ConfigError, WireError
from dtrans.ops import WireType
from dtrans.parameter_server.plan import PServerPlan
from dtrans.protocol import wire
from dtrans.protocol.generations import Generation
from dtrans.protocol.server.trainer_turns import TrainerTurns
from dtrans.protocol.trainer.trainer_steps import TrainerSteps
from dtrans.run.distributed.role import Role
from dtrans.run.net.generation_log import GenerationLog, GenerationRecord
from dtrans.run.net.launcher_folder import LauncherFolder
from dtrans.run.net.role_folder import RoleFolder
from dtrans.run.parameter_server.snapshots import check_drops, check_snapshots, computed_leaves
from dtrans.run.parameter_server.update import ServerUpdate
from dtrans.run.role_jobs.leaf_snapshots import LeafSnapshots
from dtrans.run.role_jobs.server_job import ServerJob
from dtrans.run.role_jobs.trainer_job import TrainerJob
from dtrans.slicing import divide_update


SIZES, STEPS, TRAINERS = (40, 31, 3), 4, 2
TX = optax.adamw(1e-2)
RAMP = dtrans.TopK((0.25, 0.1), begin_step=1, ramp_steps=2, momentum=0.9, clip_norm=1.0)


def plan_for(mode: Any, endpoints: tuple[str, ...], trainers: int = TRAINERS) -> PServerPlan:
    params, init = mlp_params(SIZES), lambda params: (params, TX.init(params))
    step = dtrans.make_train_step(mlp_loss, TX)
    main = dtrans.trace(step, *jax.eval_shape(init, params), *mlp_batch(4, SIZES))
    placement = dtrans.BlockPlacement(min_block_size=1)
    return dtrans.pserver(
        main,
        dtrans.trace(init, params),
        pservers=endpoints,
        trainers=trainers,
        mode=mode,
        placement=placement,
    )


def batches() -> list[Any]:
    return [mlp_batch(8, SIZES, seed=s) for s in range(STEPS)]


def save_all(job: Any, k: int, step: int) -> None:
    job.save(str(step + 1))


def run_processes(
    plan: PServerPlan,
    threads: RoleThreads,
    *,
    steps: range = range(STEPS),
    checkpoints: Path | None = None,
    restored: Path | None = None,
    save: Any = save_all,
) -> dict[str, Any]:
    """Run the roles in threads. Servers return their arrays, and trainers (parameters, state)."""
    endpoints, options = tuple(plan.servers), {"deadline": HANG}

    def first(job: Any) -> Any:
        if restored is None:
            return job.init(mlp_params(SIZES))
        return dtrans.checkpoint.restore(restored, job)

    def server(ep: str) -> Any:
        role = Role("pserver", TRAINERS, endpoints, current_endpoint=ep)
        with ServerJob(plan, role, options) as job:
            return job.serve(first(job), checkpoints=checkpoints)

    def trainer(k: int) -> Any:
        with TrainerJob(plan, Role("trainer", TRAINERS, endpoints, trainer_id=k), options) as job:
            state = first(job)
            for step in steps:
                batch = batches()[step]
                state, _ = job.step(state, *(x[4 * k : 4 * k + 4] for x in batch))
                if checkpoints is not None:
                    save(job, k, step)
            return job.params(state), state

    for ep in endpoints:
        threads.start(ep, server, ep)
    for k in range(TRAINERS):
        threads.start(f"trainer {k}", trainer, k)
    return threads.all()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count the bytes of blocks that trainers send, and the bytes that they request."""
    found: dict[str, int] = defaultdict(int)
    send, request = TrainerSteps.send, TrainerSteps.request

    def counting_send(self: Any, endpoint: str, name: str, block: np.ndarray) -> None:
        found["send"] += block.nbytes
        send(self, endpoint, name, block)

    def counting_request(self: Any, landings: Any, *args: Any) -> Any:
        found["recv"] += sum(memory.nbytes for _, _, memory in landings)
        return request(self, landings, *args)

    monkeypatch.setattr(TrainerSteps, "send", counting_send)
    monkeypatch.setattr(TrainerSteps, "request", counting_request)
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("parts", [False, True], ids=["at once", "in parts"])
@pytest.mark.parametrize(
    "mode",
    [
        dtrans.Sync(compress="bf16", compress_params="bf16"),
        dtrans.Sync(compress="fp16", compress_scale=8.0),
        dtrans.Sync(compress="int8"),
        dtrans.Sync(compress="e3m0", compress_params="fp16"),
        dtrans.Sync(compress=dtrans.TopK(0.1), compress_params="bf16"),
        dtrans.Sync(compress=RAMP),
    ],
    ids=str,
)
def test_processes_have_the_bits_and_bytes_of_the_simulated_job(
    role_threads: RoleThreads,
    counted: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
    mode: Any,
    parts: bool,
) -> None:
    if parts:  # servers answer before the end of the step
        for name in ("PART_BYTES", "PIECE_BYTES", "ALIGNMENT"):
            monkeypatch.setattr(divide_update, name, 1)
    plan = plan_for(mode, free_endpoints(2))
    ended = run_processes(plan, role_threads)

    job = plan.simulate()
    state = job.init(mlp_params(SIZES))
    for batch in batches():
        state, _ = job.step(state, *batch)
    for ep, arrays in state.servers.items():
        tree_equal(ended[ep], arrays)
    for k in range(TRAINERS):
        params, (first,) = ended[f"trainer {k}"]
        tree_equal(params, job.params(state))
        if plan.compression.rounding_errors:
            for leaf, rounding_error in first[1].items():
                tree_equal(rounding_error, state.params[f"rounding_error/{leaf}"][k])

    levels = [0, 1, 2, 2] if mode.compress == RAMP else [0] * STEPS
    sizes = [plan.levels[level].bytes_per_step for level in levels]
    # trainers also receive all parameters before the first step
    assert counted == {
        "send": TRAINERS * sum(x["send"] for x in sizes),
        "recv": TRAINERS * (STEPS + 1) * sizes[0]["recv"],
    }
    assert len({x["send"] for x in sizes}) == len({*levels})


def test_a_trainer_begins_with_rounded_parameters_and_no_rounding_errors() -> None:
    endpoints = ("127.0.0.1:6174",)
    plan = plan_for(dtrans.Sync(compress="int8", compress_params="bf16"), endpoints)
    params, wire = mlp_params(SIZES), WireType("bf16")
    with TrainerJob(plan, Role("trainer", TRAINERS, endpoints), {}) as job:
        ((found, rounding_errors),) = state = job.state_of(params, None)
        tree_equal(job.params(state), found)
    tree_equal(found, jax.tree.map(lambda x: wire.decode(wire.encode(x), x), params))
    assert not np.array_equal(found["w1"], params["w1"])
    assert {n: x.shape for n, x in rounding_errors.items()} == {
        f"params/{n}": x.shape for n, x in params.items()
    }
    assert not any(map(np.any, rounding_errors.values()))


def test_a_replay_of_the_log_has_the_bits_of_the_simulated_job(tmp_path: Path) -> None:
    plan = plan_for(dtrans.Sync(compress="bf16", compress_params="fp16"), ("127.0.0.1:6174",))
    log = GenerationLog(tmp_path)
    log.add(GenerationRecord(0, None, (0, 1)))
    found = dtrans.replay(
        plan, log.path, lambda step: batches()[step], init=(mlp_params(SIZES),), stop=STEPS
    )
    job = plan.simulate()
    state = job.init(mlp_params(SIZES))
    for batch in batches():
        state, _ = job.step(state, *batch)
    tree_equal(found, dtrans.checkpoint.gather(plan, state.servers))


# -- checkpoints -----------------------------------------------------------------------------------


def simulated(plan: PServerPlan, state: Any = None, start: int = 0) -> tuple[Any, Any]:
    """Run the batches from `start` on in a simulated job; return the job and its last state."""
    job = plan.simulate()
    state = job.init(mlp_params(SIZES)) if state is None else state(job)
    for batch in batches()[start:]:
        state, _ = job.step(state, *batch)
    return job, state


PACKED = ["int8", RAMP]


@pytest.mark.parametrize("compress", PACKED, ids=["int8", "topk"])
@pytest.mark.parametrize("trainers", [1, 2])
def test_a_restored_simulated_job_has_the_bits_of_an_uninterrupted_job(
    tmp_path: Path, compress: Any, trainers: int
) -> None:
    mode = dtrans.Sync(compress=compress, compress_params="bf16")
    plan = plan_for(mode, ("127.0.0.1:6174", "127.0.0.1:6175"), trainers)
    _, expected = simulated(plan)
    job = plan.simulate()
    state = job.init(mlp_params(SIZES))
    for batch in batches()[:2]:
        state, _ = job.step(state, *batch)
    dtrans.checkpoint.save(tmp_path / "2", job, state)
    again = lambda job: dtrans.checkpoint.restore(tmp_path / "2", job)
    _, found = simulated(plan, again, 2)
    tree_equal(found.params, expected.params)
    tree_equal(found.servers, expected.servers)


def test_rounding_errors_of_another_number_of_trainers_become_their_mean(tmp_path: Path) -> None:
    mode = dtrans.Sync(compress="int8")
    plans = [plan_for(mode, ("127.0.0.1:6174",), trainers) for trainers in (2, 1)]
    job, state = simulated(plans[0])
    dtrans.checkpoint.save(tmp_path / "4", job, state)
    two = job.rounding_errors(state, 0), job.rounding_errors(state, 1)
    job = plans[1].simulate()
    says = "4 has rounding errors of 2 trainers, and this job has 1; each trainer begins with their"
    with pytest.warns(CheckpointWarning, match=says):
        state = dtrans.checkpoint.restore(tmp_path / "4", job)
    for n, x in job.rounding_errors(state, 0).items():
        np.testing.assert_allclose(x, (two[0][n] + two[1][n]) / 2)
        assert np.any(x)


def test_a_checkpoint_without_rounding_errors_warns(tmp_path: Path) -> None:
    plans = [plan_for(dtrans.Sync(compress=c), ("127.0.0.1:6174",)) for c in (None, "int8")]
    job, state = simulated(plans[0])
    dtrans.checkpoint.save(tmp_path / "4", job, state)
    job = plans[1].simulate()
    says = "4 lacks rounding_error/params/b1 .missing: 4 arrays of each trainer., so trainers begin"
    with pytest.warns(CheckpointWarning, match=says):
        state = dtrans.checkpoint.restore(tmp_path / "4", job)
    assert not any(map(np.any, job.rounding_errors(state, 1).values()))


@pytest.mark.parametrize("compress", PACKED, ids=["int8", "topk"])
def test_restored_processes_have_the_bits_of_an_uninterrupted_job(
    tmp_path: Path, role_threads: RoleThreads, compress: Any
) -> None:
    mode = dtrans.Sync(compress=compress, compress_params="bf16")
    plan = plan_for(mode, free_endpoints(2))
    run_processes(plan, role_threads, steps=range(2), checkpoints=tmp_path)
    plan = plan_for(mode, free_endpoints(2))
    ended = run_processes(plan, role_threads, steps=range(2, STEPS), restored=tmp_path / "2")
    _, expected = simulated(plan)
    for ep, arrays in expected.servers.items():
        tree_equal(ended[ep], arrays)
    for k in range(TRAINERS):
        _, (first,) = ended[f"trainer {k}"]
        for leaf, rounding_error in first[1].items():
            tree_equal(rounding_error, expected.params[f"rounding_error/{leaf}"][k])


@pytest.mark.parametrize("then", ["steps", "closes"])
def test_a_trainer_that_does_not_save_is_named(
    tmp_path: Path, role_threads: RoleThreads, then: str
) -> None:
    plan = plan_for(dtrans.Sync(compress="int8"), free_endpoints(2))
    # The second trainer does not save. The error appears when this trainer closes, or steps again.
    steps = range(2) if then == "closes" else range(3)
    over = {"steps": "begun its next step", "closes": "closed its job"}[then]
    says = rf"trainer 1 has {over} without job.save\('2'\), and only trainer 1 has its rounding"
    failed = {}

    def save(job: Any, k: int, step: int) -> None:
        if k == 0 and step == 1:
            with pytest.raises(CheckpointError, match=says) as e:
                job.save("2")
            failed[k] = str(e.value)

    run_processes(plan, role_threads, steps=steps, checkpoints=tmp_path, save=save)
    assert failed
    with pytest.warns(CheckpointWarning, match="2 is incomplete: pserver-1 of .* is missing"):
        assert dtrans.checkpoint.latest(tmp_path) is None


# -- snapshots -------------------------------------------------------------------------------------


def executor(generation: Generation, step: int) -> Any:
    connections = types.SimpleNamespace(
        generation=generation, step_count=step, steps_between_snapshots=10
    )
    return types.SimpleNamespace(connections=connections)


@pytest.mark.parametrize("compress", ["int8", RAMP], ids=["int8", "topk"])
def test_snapshots_contain_rounding_errors(tmp_path: Path, compress: Any) -> None:
    plan = plan_for(dtrans.Sync(compress=compress), ("127.0.0.1:6174",))
    names = [f"rounding_error/params/{n}" for n in ("b1", "b2", "w1", "w2")]
    if compress is RAMP:
        names += [f"rounding_error/momentum/params/{n}" for n in ("b1", "b2", "w1", "w2")]
        names += ["rounding_error/steps"]
    assert sorted(computed_leaves(plan)) == sorted(names)
    check_snapshots(plan, dtrans.Snapshots(10))
    LauncherFolder(tmp_path).grant(Generation(), "a run", trainers=2)
    folder = RoleFolder(tmp_path, "trainer 1")
    folder.enter(Generation())
    params, rounding_errors = mlp_params(SIZES), {}
    for leaf, t in plan.compression.rounding_errors.items():
        rounding_errors[leaf] = jnp.full(t.shape, 1, t.dtype)
    LeafSnapshots(folder, plan, "trainer 1").before_step(
        executor(Generation(), 0), 10, ((params, rounding_errors),)
    )
    zeros = jax.tree.map(jnp.zeros_like, rounding_errors)
    new = mlp_params(SIZES, seed=3)
    again = LeafSnapshots(RoleFolder(tmp_path, "trainer 1"), plan, "trainer 1")
    (found,), step = again.begin(executor(Generation(1, 10), 10), (new, zeros))
    assert step == 10
    tree_equal(found, (new, rounding_errors))
    if compress is RAMP:
        levels = [plan.compression.level_of(x) for x in (zeros, found[1])]
        assert levels == [0, 1]  # a trainer without the snapshot would send full gradients


def test_a_trainer_that_joins_lacks_rounding_errors() -> None:
    plan = plan_for(dtrans.Sync(compress="e3m0"), ("127.0.0.1:6174",))
    says = "^snapshots: rounding_error/params/b1 is computed by each trainer, so at_loss=True cannot restore"
    with pytest.raises(ConfigError, match=says):
        check_snapshots(plan, dtrans.Snapshots(10, at_loss=True))
    says = "^on_trainer_loss='replace': rounding_error/params/b1 is computed by each trainer"
    with pytest.raises(ConfigError, match=says):
        check_drops(plan, "replace")
    with pytest.raises(ConfigError, match="^replay: with compress='e3m0', gradients depend on"):
        dtrans.replay(plan, "generations.jsonl", lambda step: (), init=(), stop=1)
    check_snapshots(
        plan_for(dtrans.Sync(compress="bf16"), ("a:1",)), dtrans.Snapshots(10, at_loss=True)
    )


def test_a_server_refuses_a_level_that_it_does_not_have() -> None:
    plan = plan_for(dtrans.Sync(compress=RAMP), ("127.0.0.1:6174",))
    (programs,) = plan.servers.values()
    served = ServerUpdate.from_program(programs.main).served
    update: Any = types.SimpleNamespace(parts=())
    requests = types.SimpleNamespace(memory_of=lambda k: {})
    rows: Any = types.SimpleNamespace(requests=requests, begin=lambda *_: None)
    trainers: Any = types.SimpleNamespace(count=TRAINERS)
    none: Any = None
    turns = TrainerTurns(served, update, trainers, rows, none, none)
    message = lambda level: wire.Message("send", {"step": 0, "pieces": [], "level": level})
    for level, sizes in enumerate(served.levels):
        turns.take(1, message(level))
        found = turns.by_trainer[1].grads.memory
        assert {n: (x.shape, x.dtype) for n, x in found.items()} == {
            n: (sizes[n].shape, sizes[n].dtype) for n in found
        }
    says = "^trainer 1 sent compressed gradients with the density number 3, but pserver "
    says += "127.0.0.1:6174 has levels 0 to 2$"
    for level in (3, -1):
        with pytest.raises(WireError, match=says.replace("3, but", f"{level}, but")):
            turns.take(1, message(level))


def test_an_executor_does_not_check_packed_gradients() -> None:
    plan = plan_for(dtrans.Sync(compress="int8"), ("127.0.0.1:6174",))
    says = re.escape("on_nonfinite='warn' cannot be combined with compress='int8'")
    with dtrans.Executor(on_nonfinite="warn") as exe, pytest.raises(ConfigError, match=says):
        exe.run(plan.trainer_startup, mlp_params(SIZES))


# -- training --------------------------------------------------------------------------------------


@pytest.mark.soak
def test_digits_are_learned_as_well_as_by_exact_jobs() -> None:
    """The mean accuracy over five seeds changes less than between seeds."""
    from examples import digits
    from examples.digits_training import DigitsSettings, training

    def accuracies(mode: Any) -> tuple[list[float], Any]:
        """Return the accuracy of each seed, and a parameter of the last."""
        settings = DigitsSettings(optimizer="momentum")
        step, init = training(settings)
        if isinstance(mode.compress, dtrans.TopK):  # the trainers have the momentum
            tx = optax.sgd(0.1)
            step = dtrans.make_train_step(digits.loss_fn, tx)
            init = lambda key: (p := digits.init(key), tx.init(p))
        data = digits.load(0)
        batch = next(digits.batches(data, 0, 0, settings.batch_size // TRAINERS))
        main = dtrans.trace(step, *jax.eval_shape(init, settings.key), *batch)
        plan = dtrans.pserver(
            main,
            dtrans.trace(init, settings.key),
            pservers="127.0.0.1:6174,127.0.0.1:6175",
            trainers=TRAINERS,
            mode=mode,
        )
        job, found = plan.simulate(), []
        for seed in range(5):
            state, data = job.init(jax.random.key(seed)), digits.load(seed)
            for epoch in range(3):
                for x, y in digits.batches(data, seed, epoch, settings.batch_size):
                    state, _ = job.step(state, x, y)
            params = job.params(state)
            found.append(digits.accuracy(params, data.test_x, data.test_y))
        return found, params["output"]["w"]

    exact, weights = accuracies(dtrans.Sync())
    spread = max(exact) - min(exact)
    assert np.mean(exact) > 0.9 and spread > 0
    # Paddle's densities, over 44 of 66 steps
    densities = (0.25, 0.0625, 0.015625, 0.004, 0.001)
    deep = dtrans.TopK(densities, begin_step=11, ramp_steps=44, momentum=0.9, clip_norm=1.0)
    for mode in (
        dtrans.Sync(compress="bf16", compress_params="bf16"),
        dtrans.Sync(compress="int8"),
        dtrans.Sync(compress="e3m0"),
        dtrans.Sync(compress=deep),
    ):
        found, rounded = accuracies(mode)
        assert not np.array_equal(rounded, weights)
        assert abs(np.mean(found) - np.mean(exact)) < spread, (mode, found, exact)
