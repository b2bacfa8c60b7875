"""Steps with several tables: one request to each server, and one update for each group of tables."""

from __future__ import annotations

import collections
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import role_threads as roles
from helpers import endpoints
from optimizer_zoo import CASES, Case
from role_threads import RoleThreads, free_endpoints, serve
from table_jobs import ASYNC, OPTIMIZERS, SYNC, close, note_row_messages

import dtrans
from dtrans._jax import equations
from dtrans.protocol import wire
from dtrans.protocol.server_blocks import RowGradient
from dtrans.run.distributed.role import Role
from dtrans.run.parameter_server import sync_update
from dtrans.run.parameter_server.sync_update import SyncUpdate
from dtrans.run.parameter_server.tables.table_groups import (
    TableGroup,
    group_tables,
    single_tables,
    size_groups,
)
from dtrans.run.parameter_server.update import ServerUpdate, copy_state
from dtrans.run.role_jobs.trainer_job import TrainerJob


# Tables `a` and `b` have equal shapes; `c` has fewer rows of the same shape; rows of `d` are
# larger.
SHAPES = {"a": (40, 3), "b": (40, 3), "c": (25, 3), "d": (40, 4)}
KEY, ROWS, STEPS = jax.random.key(0), 6, 4


def start(tx: Any, key: jax.Array) -> Any:
    keys = jax.random.split(key, len(SHAPES))
    params = {n: jax.random.normal(k, s) for (n, s), k in zip(SHAPES.items(), keys, strict=True)}
    params["w"] = jnp.linspace(0.5, 2.0, sum(s[1] for s in SHAPES.values()))
    return params, tx.init(params)


def loss(params: Any, ids: jax.Array, y: jax.Array) -> jax.Array:
    x = jnp.concatenate([params[n][ids[:, i]] for i, n in enumerate(SHAPES)], 1)
    return jnp.mean((jnp.tanh(x) @ params["w"] - y) ** 2)


def batches(steps: int = STEPS, rows: int = ROWS) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [(rng.integers(0, 20, (rows, 4)), rng.normal(size=rows)) for _ in range(steps)]


def planned(tx: Any, trainers: int, servers: Any, mode: Any = SYNC, update: str | None = "dense",
            step: Any = None, key_to_state: Any = None) -> Any:  # fmt: skip
    begin = key_to_state or (lambda key: start(tx, key))
    ids, y = batches(1, ROWS // trainers)[0]
    main = dtrans.trace(
        step or dtrans.make_train_step(loss, tx), *jax.eval_shape(begin, KEY), ids, y
    )
    return dtrans.pserver(
        main, dtrans.trace(begin, KEY), pservers=servers, trainers=trainers, mode=mode,
        placement=dtrans.BlockPlacement(min_block_size=1),
        sparse={f"params/{n}": dtrans.Rows(update) for n in SHAPES},
    )  # fmt: skip


def one_device(tx: Any, given: Any) -> Any:
    step = jax.jit(dtrans.make_train_step(loss, tx))
    (params, opt_state), losses = start(tx, KEY), []
    for batch in given:
        params, opt_state, value = step(params, opt_state, *batch)
        losses.append(float(value))
    return params, losses


def trained(plan: Any, k: int, given: Any, ahead: int) -> Any:
    role = Role("trainer", plan.trainers, tuple(plan.servers), trainer_id=k)
    with TrainerJob(plan, role, {"deadline": roles.HANG}) as job:
        state, losses = job.init(KEY), []
        parts = [job.shard_batch(*batch) for batch in given]
        if ahead:
            for made in job.steps(state, parts, ahead):
                state = made[0]
                losses.append(float(made[1]))
        else:
            for batch in parts:
                state, value = job.step(state, *batch)
                losses.append(float(value))
        return job.params(state), losses


def outcome(role_threads: RoleThreads, plan: Any, ahead: int = 0) -> Any:
    """Return the parameters and losses of trainer 0."""
    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep, KEY)
    for k in range(plan.trainers):
        role_threads.start(f"trainer {k}", trained, plan, k, batches(), ahead)
    ended = role_threads.all()
    role_threads.forget()
    return ended["trainer 0"]


# -- messages --------------------------------------------------------------------------------------


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any], int]]:
    return note_row_messages(monkeypatch)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("trainers", [1, 2])
def test_a_step_sends_each_server_one_request_for_all_tables(
    role_threads: RoleThreads, trainers: int, said: Any
) -> None:
    tx = OPTIMIZERS["adagrad"]
    found = outcome(role_threads, planned(tx, trainers, free_endpoints(2)))
    close(found, one_device(tx, batches()))
    in_steps = [(op, f["step"]) for op, f, _ in said if op == "rows" or f["train"]]
    count = collections.Counter(op for op, step in in_steps if step < STEPS)
    assert count == {"prefetch": STEPS * trainers * 2, "rows": STEPS * trainers * 2}
    assert {tuple(f["counts"]) for op, f, _ in said if op == "prefetch" and f["train"]} == {
        tuple(f"params/{n}.block{i}" for n in SHAPES) for i in range(2)
    }


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["adagrad", "adam"])
def test_announced_rows_of_all_tables_share_messages(
    role_threads: RoleThreads, name: str, said: Any
) -> None:
    """With `adam`, updates change rows without gradients, so the rows are sent once, when due."""
    plan = planned(OPTIMIZERS[name], 2, free_endpoints(2))
    found = outcome(role_threads, plan, ahead=1)
    close(found, one_device(OPTIMIZERS[name], batches()))
    announced = [f for op, f, _ in said if op == "prefetch" and "ahead" in f]
    answers = [f for op, f, _ in said if op == "rows" and "ahead" in f]
    assert len(announced) == (STEPS - 1) * 2 * 2
    assert len(answers) == len(announced) * (2 if name == "adagrad" else 1)
    assert sum("counts" in f for f in answers) == (len(announced) if name == "adagrad" else 0)


MODES = {
    "async": ASYNC,
    "half": dtrans.HalfAsync(),
    "communicator": dtrans.Async(communicator=dtrans.CommunicatorConfig(max_merge_var_num=1)),
    "geo": dtrans.Geo(2),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("mode", MODES)
def test_a_step_without_a_barrier_sends_each_server_one_request(
    role_threads: RoleThreads, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One trainer. GEO-SGD requests only rows that it does not store."""
    sent: list[tuple[str, dict[str, Any]]] = []
    header = wire.header
    monkeypatch.setattr(
        wire, "header", lambda op, **fields: (sent.append((op, fields)), header(op, **fields))[1]
    )
    tx = optax.sgd(0.1)
    found = outcome(role_threads, planned(tx, 1, free_endpoints(2), MODES[mode]))
    if mode != "communicator":  # its steps do not wait for the updates of earlier steps
        close(found, one_device(tx, batches()))
    asked = [f for op, f in sent if op == "prefetch" and f["train"]]
    assert len(asked) <= STEPS * 2 and max(len(f["counts"]) for f in asked) == len(SHAPES)
    if mode != "geo":
        assert len(asked) == STEPS * 2
    row_ids = [f for op, f in sent if op == "row_ids"]
    pushes = {"async": 0, "geo": STEPS // 2}.get(mode, STEPS)
    assert len(row_ids) == pushes * 2
    assert all(len(f["counts"]) == len(SHAPES) for f in row_ids)


def test_a_wrong_id_of_one_table_leaves_the_job_usable(role_threads: RoleThreads) -> None:
    """The id is in the last table, and no server has received a request of this step."""
    plan = planned(optax.sgd(0.1), 1, free_endpoints(1))
    (ep,) = plan.servers
    role_threads.start(ep, serve, plan, ep, KEY)
    with TrainerJob(plan, Role("trainer", 1, (ep,), trainer_id=0), {"deadline": roles.HANG}) as job:
        state = job.init(KEY)
        ids, y = batches(1)[0]
        wrong = ids.copy()
        wrong[0, 3] = 99
        with pytest.raises(dtrans.errors.BatchError, match="asks for row 99"):
            job.step(state, wrong, y)
        state, value = job.step(state, ids, y)
        assert np.isfinite(float(value))
    role_threads.all()


# -- updates ---------------------------------------------------------------------------------------


def updates_of(plan: Any) -> dict[str, ServerUpdate]:
    return {ep: ServerUpdate.from_program(p.main) for ep, p in plan.servers.items()}


def names_of(groups: list[TableGroup]) -> list[list[str]]:
    return [[t.leaf.rpartition("/")[2] for t in group.tables] for group in groups]


@pytest.mark.parametrize(
    "name, groups",
    [
        ("adagrad", [["a", "b", "c"], ["d"]]),
        ("adam", [["a", "b", "c"], ["d"]]),
        ("clip", [["a"], ["b"], ["c"], ["d"]]),  # the update reads the norm of all gradients
    ],
)
def test_tables_with_equal_rows_form_a_group(name: str, groups: list[list[str]]) -> None:
    (update,) = updates_of(planned(OPTIMIZERS[name], 2, endpoints(1))).values()
    found = group_tables(update, update.tables)
    assert names_of(found) == groups
    sized = size_groups(update, found, {group.name: 64 for group in found})
    blocks = [b for b in sized.blocks if b.name in update.tables]
    assert {b.name for b in blocks} == {group.name for group in found}
    if name == "adagrad":
        outputs = {v.aval.shape for b in blocks for v in b.jaxpr.jaxpr.outvars}
        assert outputs == {(64, 3), (64, 4)}


def test_tables_with_other_rates_form_other_groups() -> None:
    rates = {"a": 0.1, "b": 0.2, "c": 0.1, "d": 0.1, "w": 0.1}
    tx = optax.multi_transform({n: optax.sgd(r) for n, r in rates.items()}, {n: n for n in rates})
    (update,) = updates_of(planned(tx, 1, endpoints(1))).values()
    assert names_of(group_tables(update, update.tables)) == [["a", "c"], ["b"], ["d"]]


def test_tables_with_other_constants_form_other_groups() -> None:
    """The constants are in functions inside a branch, where the printed jaxpr does not show them."""
    scales = {"a": 0.1, "b": 0.2, "c": 0.1, "d": 0.1, "w": 0.1}

    def scaled(rate: float, g: jax.Array) -> jax.Array:
        return -g * (rate * np.arange(1.0, 1 + g.shape[-1], dtype=g.dtype) if g.ndim else rate)

    parts = {n: jax.jit(functools.partial(scaled, rate)) for n, rate in scales.items()}

    def update(grads: Any, count: jax.Array, params: Any = None) -> Any:
        move = lambda grads: {n: parts[n](g) for n, g in grads.items()}
        stay = lambda grads: jax.tree.map(jnp.zeros_like, grads)
        return jax.lax.cond(count % 2 == 0, move, stay, grads), count + 1

    tx = optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)
    (part,) = updates_of(planned(tx, 1, endpoints(1), update="lazy")).values()
    assert names_of(group_tables(part, part.tables)) == [["a", "c"], ["b"], ["d"]]


Started = Mapping[str, SyncUpdate]


def started(plan: Any, merges: bool = False) -> Started:
    found = {}
    with dtrans.Executor() as exe:
        for ep, update in updates_of(plan).items():
            state = exe.run(plan.servers[ep].startup, KEY)
            by_rows = {n for t in update.tables.values() for n in t.arrays}
            dense = copy_state({n: x for n, x in state.items() if n not in by_rows})
            found[ep] = SyncUpdate(update, {**state, **dense}, plan.trainers, merges=merges)
    return found


def received(plan: Any, endpoint: str, step: int) -> dict[str, Any]:
    """Gradients of random rows, for each block of a server."""
    found: dict[str, Any] = {}
    for i, b in enumerate(b for unit in plan.placement.units[endpoint] for b in unit.blocks):
        for k in range(plan.trainers):
            rng = np.random.default_rng((step, i, k))
            value = rng.uniform(0.3, 1.5, b.shape).astype(b.dtype)
            name = b.gradient(k, plan.trainers)
            if not b.is_table:
                found[name] = value
                continue
            ids = np.sort(rng.choice(b.rows, rng.integers(0, 5), replace=False)).astype(np.int32)
            found[name] = RowGradient(ids, value[ids])
    return found


def run_steps(plan: Any, servers: Started, present: Any = None, merges: bool = False) -> Any:
    """Run some steps; return the state of the servers, after all rows have caught up."""
    everyone = frozenset(range(plan.trainers))
    for step in range(5):
        here = everyone if present is None or step < 2 else frozenset(present)
        for ep, server in servers.items():
            grads = received(plan, ep, step)
            if merges:
                grads, here_now = dict(server.merge(grads, here, step)), frozenset({0})
            else:
                here_now = here
            assert server.begin(grads, here_now, step) is None
    held = {}
    for ep, server in servers.items():
        tables = {n: np.asarray(x) for n, x in server.tables().items()}
        held[ep] = {n: np.asarray(x) for n, x in {**server.state, **tables}.items()}
    return held


def check_groups(monkeypatch: pytest.MonkeyPatch, plan: Any, present: Any = None,
                 merges: bool = False) -> list[list[str]]:  # fmt: skip
    """Compare updates of groups with updates of single tables, bit for bit; return the groups."""
    together = started(plan, merges)
    groups = [names_of(list(server._groups)) for server in together.values()]
    found = run_steps(plan, together, present, merges)
    with monkeypatch.context() as patch:
        patch.setattr(sync_update, "group_tables", lambda update, tables: single_tables(tables))
        alone = started(plan, merges)
    assert all(len(x.tables) == 1 for server in alone.values() for x in server._groups)
    expected = run_steps(plan, alone, present, merges)
    for ep, state in expected.items():
        for n, x in state.items():
            assert x.tobytes() == found[ep][n].tobytes(), f"{n} of {ep}"
    return groups[0]


def zoo_plan(case: Case, servers: int) -> Any:
    begin = lambda key: (params := start(optax.sgd(0.1), key)[0], case.make().init(params))
    return planned(None, 2, endpoints(servers), step=case.step(loss), key_to_state=begin)


# The optimizers of the last line mix rows, so tables are updated one by one.
NAMES = [
    *("sgd", "adagrad", "normalize", "centralize", "rmsprop", "adam", "adamw", "amsgrad", "lion"),
    *("rprop", "schedule_free", "paddle.ftrl", "masked", "inject_hyperparams, adam", "adopt"),
    *("clip_by_global_norm", "clip_by_block_rms", "novograd"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES)
def test_groups_have_the_bits_of_single_tables(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = check_groups(monkeypatch, zoo_plan(CASES[name], 1))
    if name in NAMES[-3:]:
        assert groups == [["a"], ["b"], ["c"], ["d"]]


@pytest.mark.parametrize("present, merges", [(None, False), ([1], False), (None, True)])
def test_groups_of_some_trainers_and_of_merged_gradients(
    present: Any, merges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = zoo_plan(CASES["adam"], 2)
    assert check_groups(monkeypatch, plan, present, merges) == [["a", "b", "c"], ["d"]]


def test_an_update_of_a_group_has_no_equations_of_its_other_tables() -> None:
    (update,) = updates_of(planned(optax.adagrad(0.1), 1, endpoints(1))).values()
    groups = group_tables(update, update.tables)
    sized = size_groups(update, groups, {group.name: 16 for group in groups})
    count = lambda blocks: sum(len(list(equations(b.jaxpr.jaxpr))) for b in blocks)
    tables = [b for b in update.blocks if b.name in update.tables]
    assert count(sized.blocks) == count(update.blocks) - count(tables) // 2
