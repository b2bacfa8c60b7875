"""Updates in parts: equal bits, unchanged state until the step ends, and answers before its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizer_zoo
import pytest
from helpers import mlp_batch, mlp_loss, mlp_params
from optimizer_zoo import CASES, TRAINERS, plan_of
from role_threads import RoleThreads, free_endpoints, serve, train

import dtrans
from dtrans.ops import WireType
from dtrans.parameter_server.plan import PServerPlan
from dtrans.protocol import wire
from dtrans.protocol.server.trainer_turns import TrainerTurns
from dtrans.run.parameter_server.sync_update import SyncUpdate
from dtrans.run.parameter_server.update import ServerUpdate, copy_state
from dtrans.run.parameter_server.update_parts import PartUpdate, split_update
from dtrans.slicing import divide_update


EVERYBODY = frozenset(range(TRAINERS))
SYNC = dtrans.Sync()


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide each block into pairs of rows, except vectors."""
    for name in ("PART_BYTES", "PIECE_BYTES", "ALIGNMENT"):
        monkeypatch.setattr(divide_update, name, 1)


def state_for(update: ServerUpdate) -> dict[str, Any]:
    """Return a state with positive numbers; integers, flags and keys are zero."""
    random = np.random.default_rng(0)

    def value(t: Any) -> Any:
        if jnp.issubdtype(t.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        if jnp.issubdtype(t.dtype, jnp.inexact):
            return jnp.asarray(random.uniform(0.1, 1.0, t.shape), t.dtype)
        return jnp.zeros(t.shape, t.dtype)

    return {n: value(t) for n, t in update.types.items()}


def gradients(update: ServerUpdate, step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(step)
    found = {}
    for n, t in update.grad_types.items():
        if t.dtype == np.uint8:  # packed: the scale, and a byte for each number
            x = random.standard_normal(t.size - 4).astype(np.float32)
            found[n] = np.asarray(WireType("int8").encode(jnp.asarray(x)))
        else:
            found[n] = random.standard_normal(t.shape).astype(t.dtype)
    return found


def bits(state: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the bytes of each array."""
    found = {}
    for n, x in state.items():
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        found[n] = np.asarray(jax.random.key_data(x) if is_key else x).tobytes()
    return found


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("name", CASES)
def test_parts_in_any_order_have_the_bits_of_one_update(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts run in reverse order, and the last part runs at the end of the step."""
    monkeypatch.setattr(optimizer_zoo, "SERVERS", 1)
    update = update_without_scalar(name)
    parts, first = split_update(update), state_for(update)
    if not parts:
        # a part may not need step arguments, or results of other blocks
        with_gradients = [b for b in update.blocks if b.grads]
        assert len(with_gradients) == 1 or update.arguments or _reads_other_blocks(update)
        return
    check_parts(update, parts, first)


def check_parts(update: ServerUpdate, parts: tuple[PartUpdate, ...], first: dict[str, Any]) -> None:
    """Check that parts in reverse order have the bits of one update, also of one trainer."""
    at_once = SyncUpdate(update, copy_state(first), TRAINERS)
    in_parts = SyncUpdate(update, first, TRAINERS, parts=parts)
    for step in range(3):
        before, grads = bits(in_parts.state), gradients(update, step)
        present = EVERYBODY if step < 2 else frozenset({1})
        at_once.begin(grads, present, step)
        sent: list[tuple[PartUpdate, Mapping[str, Any]]] = []
        for number in range(len(parts) - 1, 0, -1):
            sent.append((parts[number], in_parts.update_part(number, grads, present, step)))
        assert bits(in_parts.state) == before
        in_parts.begin(grads, present, step)
        assert bits(in_parts.state) == bits(at_once.state)
        assert bits(in_parts.values) == bits(at_once.values)
        for part, new in sent:
            expected = {}
            for n in part.part.params:
                x = at_once.values[n]
                expected[n] = x if part.part.rows.stop is None else x[part.part.rows]
            assert bits(new) == bits(expected)


@pytest.mark.usefixtures("small_parts")
def test_parts_divide_by_scalars_that_are_converted_for_each_leaf() -> None:
    """XLA divides by each converted scalar as in the update of all blocks."""
    params = {n: jnp.ones((60, 7), jnp.float16) for n in "vw"}
    update = update_of(optax.adam(0.1), params)
    check_parts(update, split_update(update), state_for(update))


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    "mode, is_divided",
    [
        (dtrans.Sync(compress="bf16"), True),
        (dtrans.Sync(compress_params="fp16"), True),
        (dtrans.Sync(compress="fp16", compress_params="bf16"), True),
        (dtrans.Sync(compress="int8", compress_params="bf16"), False),
    ],
    ids=str,
)
def test_parts_of_compressed_updates_have_the_bits_of_one_update(
    mode: dtrans.Sync, is_divided: bool
) -> None:
    """A packed gradient has no rows, so its block is one part."""
    update = update_of(optax.adamw(0.1), mlp_params((60, 7)), mode)
    parts = split_update(update)
    assert bool(divided(update)) == is_divided and len(parts) > 1
    check_parts(update, parts, state_for(update))


@pytest.mark.parametrize("compress", ["bf16", "int8"])
def test_merged_gradients_are_decoded(compress: str) -> None:
    """A server with a replica first merges the gradients of all trainers."""
    mode = dtrans.Sync(compress=compress, compress_params="bf16")
    update = update_of(optax.adamw(0.1), mlp_params((60, 7)), mode)
    first = state_for(update)
    at_once = SyncUpdate(update, copy_state(first), TRAINERS)
    merging = SyncUpdate(update, copy_state(first), TRAINERS, merges=True)
    for step in range(2):
        present = EVERYBODY if step else frozenset({1})
        grads = gradients(update, step)
        at_once.begin(grads, present, step)
        merged = merging.merge(grads, present, step)
        assert {str(x.dtype) for x in merged.values()} == {"float32"}
        merging.begin(merged, present, step)
    for n, x in at_once.state.items():
        np.testing.assert_allclose(
            np.asarray(merging.state[n], np.float64), np.asarray(x, np.float64), rtol=1e-2
        )
        if x.dtype == np.float32:
            np.testing.assert_allclose(merging.state[n], x, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("small_parts")
def test_parts_leave_the_state_before_the_step_valid_for_snapshots() -> None:
    """The state before the newest one is dropped when the first part of the next step runs."""
    update = update_of(optax.adam(0.1), mlp_params())
    parts, first, states = split_update(update), state_for(update), list[dict[str, bytes]]()
    keeping = SyncUpdate(update, first, TRAINERS, parts=parts, keeps_old=True)
    states.append(bits(keeping.newest()))
    for step in range(4):
        grads = gradients(update, step)
        keeping.update_part(1, grads, EVERYBODY, step)
        assert keeping.old is None and bits(keeping.newest()) == states[-1]
        keeping.begin(grads, EVERYBODY, step)
        states.append(bits(keeping.newest()))
        assert keeping.old is not None and bits(keeping.old) == states[-2]
    assert len({x["params/w1"] for x in states}) == len(states)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("name, copies", [("adam", 2), ("clip", 1)])
def test_costs_count_both_copies_of_the_optimizer_state(name: str, copies: int) -> None:
    """With a global norm, a server stores one state."""
    tx = optax.adam(0.1)
    plan = plan_for(
        {"adam": tx, "clip": optax.chain(optax.clip_by_global_norm(1.0), tx)}[name], mlp_params()
    )
    (sizes,) = plan.server_bytes.values()
    _, server = plan.costs()
    assert server.state_bytes == sizes["params"] + copies * sizes["opt_state"]
    (programs,) = plan.servers.values()
    update = ServerUpdate.from_program(programs.main)
    stored = SyncUpdate(update, state_for(update), TRAINERS, parts=split_update(update))
    unused = sum(x.nbytes for x in stored._unused.values())
    assert unused == (copies - 1) * sizes["opt_state"]
    # with snapshots at failures, the server stores two states
    (extra,) = dtrans.Snapshots(1, at_loss=True).extra_bytes(plan).values()
    assert server.state_bytes + extra == 2 * (sizes["params"] + sizes["opt_state"])


def divided(update: ServerUpdate) -> dict[str, list[int]]:
    """Return the number of rows of each piece, by name of the block."""
    found: dict[str, list[int]] = {}
    for x in split_update(update):
        for n in x.part.params:
            if x.part.rows.stop is not None:
                found.setdefault(n, []).append(x.part.rows.stop - x.part.rows.start)
    return found


def update_of(tx: Any, params: Any, mode: dtrans.Sync = SYNC) -> ServerUpdate:
    """Return the update of the only server of `plan_for`."""
    (programs,) = plan_for(tx, params, mode).servers.values()
    return ServerUpdate.from_program(programs.main)


def plan_for(tx: Any, params: Any, mode: dtrans.Sync = SYNC) -> PServerPlan:
    """Return the plan of a job with one server."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(x) * sum(jnp.sum(p * p) for p in jax.tree.leaves(params))

    step = dtrans.make_train_step(loss, tx)
    main = dtrans.trace(step, params, jax.eval_shape(tx.init, params), jnp.ones(2))
    startup = dtrans.trace(lambda: (params, tx.init(params)))
    return dtrans.pserver(main, startup, pservers="127.0.0.1:6174", trainers=TRAINERS, mode=mode)


def test_pieces_are_equal_ranges_of_aligned_rows() -> None:
    """A row of 7,000 bytes is no multiple of 64 bytes, but eight rows are. Vectors stay whole."""
    params = {"w": jnp.ones((1003, 1750)), "v": jnp.ones((7, 200_000)), "b": jnp.ones(700_001)}
    update = update_of(optax.adam(0.1), params)
    assert divided(update) == {
        "params/w": [248, 248, 248, 259],
        "params/v": [2, 2, 3],
    }
    # equal pieces share one program
    assert len({id(x.update) for x in split_update(update)}) == 2 + 2 + 1


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    "name, is_divided",
    [
        ("adam", True),
        ("noisy", False),  # random numbers depend on the position of a row
        ("row_norm", False),  # XLA may add in another order
        ("mask", False),  # a constant with another value for each row
        ("conditional", True),  # equations in branches
        ("trust_ratio", False),  # a norm over all rows
    ],
)
def test_a_block_is_divided_if_its_rows_are_updated_alone(name: str, is_divided: bool) -> None:
    def per_row(updates: Any, params: Any) -> Any:
        return jax.tree.map(lambda g: g / jnp.sqrt(jnp.sum(g * g, 1, keepdims=True)), updates)

    def masked(updates: Any, params: Any) -> Any:
        mask = np.arange(12.0, dtype=np.float32).reshape(6, 2)
        return jax.tree.map(lambda g: g * mask, updates)

    transforms = {
        "adam": optax.adam(0.1),
        "noisy": optax.noisy_sgd(0.1, key=0),
        "row_norm": optax.chain(optax.stateless(per_row), optax.sgd(0.1)),
        "mask": optax.chain(optax.stateless(masked), optax.sgd(0.1)),
        "conditional": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
        "trust_ratio": optax.lamb(0.1),
    }
    params = {"w": jnp.ones((6, 2)), "v": jnp.ones((6, 2))}
    update = update_of(transforms[name], params)
    assert divided(update) == ({"params/w": [2, 2, 2], "params/v": [2, 2, 2]} if is_divided else {})


@pytest.mark.usefixtures("small_parts")
def test_an_update_with_a_norm_of_small_leaves_has_no_parts() -> None:
    """Blocks without gradients then read results of other blocks."""
    small = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1))
    tx = optax.multi_transform({"s": small, "l": optax.adam(0.1)}, {"a": "s", "b": "s", "w": "l"})
    update = update_of(tx, {"a": jnp.ones(2), "b": jnp.ones(3), "w": jnp.ones((4, 2))})
    assert not split_update(update)


def update_without_scalar(name: str) -> ServerUpdate:
    """Return the update of a case without the leaf of one element, with which it has no parts."""
    case = CASES[name]
    without = {**case.without, "scalar": "the update has no parts"}
    programs = next(iter(plan_of(dataclasses.replace(case, without=without)).servers.values()))
    return ServerUpdate.from_program(programs.main)


@pytest.mark.usefixtures("small_parts")
def test_a_block_of_one_element_is_updated_with_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA merges one-element arrays with scalars: schedule_free's parts would round differently."""
    monkeypatch.setattr(optimizer_zoo, "SERVERS", 1)
    programs = next(iter(plan_of(CASES["schedule_free"]).servers.values()))
    update = ServerUpdate.from_program(programs.main)
    assert split_update(update_without_scalar("schedule_free")) and not split_update(update)


def _reads_other_blocks(update: ServerUpdate) -> bool:
    """Return True if a block reads a value that another block with gradients computes."""
    made = {n for b in update.blocks if b.grads for n in b.out_names} - update.types.keys()
    return any(made.intersection(b.in_names) for b in update.blocks)


def planned(tx: Any, pservers: Any) -> Any:
    params = mlp_params()
    main = dtrans.trace(dtrans.make_train_step(mlp_loss, tx), params, tx.init(params), *mlp_batch())
    startup = dtrans.trace(lambda: (params, tx.init(params)))
    return dtrans.pserver(main, startup, pservers=pservers, trainers=TRAINERS)


def job(roles: RoleThreads, tx: Any) -> dict[str, bytes]:
    """Run a job of two trainers and one server; return the server's state and the parameters."""
    plan = planned(tx, ",".join(free_endpoints(1)))
    (endpoint,) = plan.servers
    roles.start("server", serve, plan, endpoint)
    for k in range(TRAINERS):
        roles.start(f"trainer {k}", train, plan, k, [mlp_batch()] * 4)
    found = roles.all()
    roles.forget()
    arrays = dict(found["server"])
    for k in range(TRAINERS):
        params, _ = found[f"trainer {k}"]
        for path, x in jax.tree_util.tree_flatten_with_path(params)[0]:
            arrays[f"{k}/{jax.tree_util.keystr(path)}"] = x
    return bits(arrays)


@pytest.mark.parametrize("name", ["adam", "clip"])
def test_trainers_receive_parts_before_the_last_gradients(
    name: str, role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a global norm, the update is one part."""
    tx = optax.adam(optax.linear_schedule(0.1, 0.01, 5))
    if name == "clip":
        tx = optax.chain(optax.clip_by_global_norm(0.5), tx)
    expected = job(role_threads, tx)
    for constant in ("PART_BYTES", "PIECE_BYTES", "ALIGNMENT"):
        monkeypatch.setattr(divide_update, constant, 1)
    monkeypatch.setattr(wire, "MESSAGE_BYTES", 64)
    early: list[int] = []
    answer = TrainerTurns.answer

    def note_early(self: TrainerTurns, k: int, step: int) -> None:
        early.append(sum(self.by_trainer[k].answered.values()))
        answer(self, k, step)

    monkeypatch.setattr(TrainerTurns, "answer", note_early)
    assert job(role_threads, tx) == expected
    size = sum(x.nbytes for x in jax.tree.leaves(mlp_params()))
    last = mlp_params()["w1"][2:].nbytes  # trainers compute the gradient of w1 last
    # the first answer to each trainer has the initial parameters
    assert sorted(early)[:TRAINERS] == [0] * TRAINERS
    assert {*sorted(early)[TRAINERS:]} == ({0} if name == "clip" else {size - last})
