"""Recorded programs of Paddle's DistributeTranspiler, compared with dtrans's programs for the same
models.

The tests compare the placement of blocks, the messages of trainers and their order, the ops of
servers for each gradient, and the initial values. `golden/transpiled.json` has the recordings of
paddlepaddle 1.8.5. Comments state the deliberate differences.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    assemble,
    blocks_of,
    communication,
    distance,
    evaluate,
    plain_step,
    serve,
    start_servers,
)
from paddle_golden import (
    CASES,
    DISTRIBUTED,
    GEO,
    KEY,
    L2,
    NETS,
    RECORDED,
    TABLES,
    WITHOUT_CLIP,
    fc,
    programs,
    transpiled,
)

import dtrans
from dtrans._jax import Literal, equations, origin_of
from dtrans.ops import init_on_use_p
from dtrans.step.halves import GRAD


# -- the models ------------------------------------------------------------------------------------


# -- the cases -------------------------------------------------------------------------------------


# Ops of tables have other names in dtrans, and `send_rows` divides the gradient itself.
OF_TABLES = [
    (["distributed_lookup_table"], ["split_ids", "prefetch"]),
    # a gather looks rows up
    (
        ["split_ids", "prefetch", "merge_ids"],
        ["split_ids", "prefetch"],
    ),
    (["split_selected_rows", "send"], ["send_rows"]),
    (["split_ids", "send"], ["send_rows"]),
]

# A trainer requests the rows of the next step after it has sent all gradients of this step, also in
# modes whose steps do not wait for each other.
WAITS = {"emb1_sparse_adam_async"}

# Servers look up and save rows without a block.
NO_BLOCKS = (["lookup_sparse_table"], ["save"])

# all_reduce rounds between servers. Paddle computed the norms of LARS from the rows of one server,
# and could not clip by a global norm.
ROUNDS = {"fc_lars_momentum": 1, "fc_sgd_clip_global_opt": 1}

# number of state arrays with the shape of the parameter, for each optimizer
ACCUMULATORS = {"fc_momentum": 1, "fc_adam": 2, "mlp_adam_lr_exponential": 2, "fc_adagrad": 1,
                "fc_lars_momentum": 1,
                "emb1_sparse_adam_async": 2, "mlp_adam_dcasgd": 2}  # fmt: skip

# Powers of beta in Adam: Paddle has two numbers for each block, and dtrans computes them from one
# count of steps on each server.
BETA_POWERS = {
    "fc_adam": 2,
    "mlp_adam_lr_exponential": 2,
    "emb1_sparse_adam_async": 2,
    "mlp_adam_dcasgd": 2,
}


@pytest.fixture(scope="module", params=[*CASES, *DISTRIBUTED])
def case(request: Any) -> SimpleNamespace:
    """Return a recorded case, and dtrans's plan for it."""
    name, recorded = request.param, RECORDED[request.param]
    assert ("error" in recorded) == (name in WITHOUT_CLIP)
    recorded = {**RECORDED[WITHOUT_CLIP.get(name, name)], **recorded}
    main, startup = programs(name)
    recorded = with_table(name, recorded) if name in DISTRIBUTED else recorded
    t = transpiled(recorded, main, startup, TABLES.get(name))
    plan: Any = t.plan
    assert t.get_trainer_program() is plan.trainer_program(recorded["trainer_id"])
    return SimpleNamespace(
        name=name,
        recorded=recorded,
        plan=plan,
        # the number of gradients in an update: one for an asynchronous update
        merged=recorded["trainers"] if plan.sync_mode else 1,
        trainer=plan.trainer_program(recorded["trainer_id"]),
        trainer_startup=plan.trainer_startup_program(recorded["trainer_id"]),
    )


def with_table(name: str, recorded: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded case with its table, which the recording does not place.

    The rows become blocks, and the updates become updates of other parameters. Paddle summed the
    table's gradients over trainers, and averaged other gradients.
    """
    shape = [-(-1000 // recorded["pservers"]), 64]
    blocks = {
        ep: [*b, [f"shared_w.block{i}", shape]]
        for i, (ep, b) in enumerate(recorded["placement"].items())
    }
    servers = {}
    for ep, server in recorded["servers"].items():
        does = [b for b in server["blocks"] if b not in NO_BLOCKS]
        assert does[-1] == ["merge", "update"]
        servers[ep] = {**server, "blocks": [*does[:-1], ["merge", "mean", "update"]]}
    return {**recorded, "placement": blocks, "servers": servers}


def short(name: str) -> str:
    """Return the part of a name after the slash: `fc_w.block0` for `params/fc_w.block0`."""
    return name.removeprefix("params/")


def expected_trainer(case: Any, program: str) -> list[str]:
    """Return the expected ops of a trainer, from the recording."""
    ops = list(case.recorded[program])
    for theirs, ours in OF_TABLES if case.name in TABLES else ():
        for i in reversed(range(len(ops))):
            if ops[i : i + len(theirs)] == theirs:
                ops[i : i + len(theirs)] = ours
    return [*ops, "fetch_barrier"] if program == "trainer" and case.name in WAITS else ops


def test_every_recorded_case_is_accounted_for() -> None:
    assert len(RECORDED) == 26
    parts = [set(CASES), {GEO}, set(DISTRIBUTED)]
    assert set.union(*parts) == set(RECORDED)
    assert sum(map(len, parts)) == len(RECORDED)


def test_geo_sgd_is_as_recorded() -> None:
    """Trainers have an optimizer, and send only changes. Servers add the changes."""
    recorded, (main, startup) = RECORDED[GEO], programs("fc_sgd")
    t = transpiled(recorded, main, startup)
    plan: Any = t.plan
    mine: dict[str, list[Any]] = {ep: [] for ep in plan.servers}
    for b in plan.placement.all_blocks:
        mine[b.endpoint].append([short(b.name), list(b.shape)])
    assert {ep: sorted(x) for ep, x in mine.items()} == {
        ep: sorted(x) for ep, x in recorded["placement"].items()
    }
    assert communication(t.get_trainer_program()) == recorded["trainer"]
    assert communication(t.get_trainer_startup_program()) == recorded["startup"]
    assert t.get_trainer_program().ops[-1].type == "send", "after the optimizer"
    for ep, there in recorded["servers"].items():
        (serve_op,) = plan.servers[ep].main.jaxpr.jaxpr.eqns
        blocks = serve_op.params["optimize_blocks"]
        assert [[e.primitive.name for e in b.jaxpr.jaxpr.eqns] for b in blocks] == there["blocks"]
        names = {f"params/{name}" for name, _ in recorded["placement"][ep]}
        assert {b.name for b in blocks} == names == set(plan.servers[ep].startup.out_names)
        assert serve_op.params["grad_to_block_id"] == tuple(
            f"{b.name}.delta:{i + 1}" for i, b in enumerate(blocks)
        )


# -- placement -------------------------------------------------------------------------------------


def test_blocks_live_where_paddle_put_them(case: Any) -> None:
    mine: dict[str, list[Any]] = {ep: [] for ep in case.plan.servers}
    for b in case.plan.placement.all_blocks:
        mine[b.endpoint].append([short(b.name), list(b.shape)])
    recorded = {ep: sorted(blocks) for ep, blocks in case.recorded["placement"].items()}
    assert {ep: sorted(blocks) for ep, blocks in mine.items()} == recorded
    assert case.plan.placement.reasons_unsliced == {}


def test_a_regularizer_does_not_come_first() -> None:
    """Paddle dispatched a parameter with a regularizer first. dtrans orders by name, so this
    parameter is the second."""
    _, make, batch = NETS["fc"]
    step = dtrans.make_train_step(fc, L2)
    params = jax.eval_shape(make, KEY)
    state = jax.eval_shape(L2.init, params)
    startup = dtrans.trace(lambda key: (p := make(key), L2.init(p)), KEY)
    plan: Any = transpiled(
        RECORDED["fc_sgd_l2_w"], dtrans.trace(step, params, state, *batch), startup
    ).plan
    mine = {
        ep: [short(b.name) for b in plan.placement.all_blocks if b.endpoint == ep]
        for ep in plan.servers
    }
    assert mine == {
        ep: [n for n, _ in blocks] for ep, blocks in RECORDED["fc_sgd"]["placement"].items()
    }
    assert mine != {
        ep: [n for n, _ in blocks] for ep, blocks in RECORDED["fc_sgd_l2_w"]["placement"].items()
    }


# -- trainers --------------------------------------------------------------------------------------


def test_a_trainer_says_what_paddles_said_in_that_order(case: Any) -> None:
    assert communication(case.trainer) == expected_trainer(case, "trainer")


def test_each_gradient_is_sent_as_soon_as_it_is_made(case: Any) -> None:
    """Gradients are sent in the order of Paddle's backward pass.

    Only a split may precede a send.
    """
    ops = case.trainer.ops
    at = [i for i, op in enumerate(ops) if op.type in ("send", "send_rows")]
    sent = []
    for i in at:
        whole = (ops[i - 1].inputs if ops[i - 1].type == "split_byref" else ops[i].inputs)[-1]
        maker = ops[i - 2] if ops[i - 1].type == "split_byref" else ops[i - 1]
        assert whole in maker.outputs
        assert maker.role == "backward"
        sent.append(short(whole.removesuffix(GRAD)))
    assert sent == case.recorded["sends"]
    assert any(op.role == "backward" for op in ops[at[0] : at[-1]]), (
        "no send waits for the end of the backward pass"
    )


def test_each_send_goes_where_its_block_lives(case: Any) -> None:
    """If there are several trainers, the name of a sent gradient ends with the trainer's id."""
    me, trainers = case.recorded["trainer_id"], case.merged
    lives = {b.gradient(me, trainers): b.endpoint for b in case.plan.placement.all_blocks}
    assert all(n.endswith(f".trainer_{me}") for n in lives) or trainers == 1
    sends = [op.attrs for op in case.trainer.ops if op.type in ("send", "send_rows")]
    assert {n: ep for s in sends for n, ep in zip(s["names"], s["epmap"], strict=True)} == lives


def test_there_is_one_recv_for_each_parameter_and_one_concat_for_each_that_was_cut(
    case: Any,
) -> None:
    table = {
        n: blocks
        for n, blocks in case.plan.placement.blocks.items()
        if n not in case.plan.tables.of
    }
    for program in (case.trainer, case.trainer_startup):
        recvs = [op.attrs for op in program.ops if op.type == "recv"]
        assert [r["names"] for r in recvs] == [
            tuple(b.name for b in blocks) for blocks in table.values()
        ]
        assert [r["epmap"] for r in recvs] == [
            tuple(b.endpoint for b in blocks) for blocks in table.values()
        ]
        concats = [op for op in program.ops if op.type == "concat"]
        assert len(concats) == sum(len(blocks) > 1 for blocks in table.values())
        assert {op.attrs["axis"] for op in concats} <= {0}
    for op in ("recv", "concat"):
        assert communication(case.trainer).count(op) == case.recorded["trainer"].count(op)


def test_a_trainer_starts_with_what_the_servers_made(case: Any) -> None:
    """Paddle's trainer first initialized parameters, and then received the servers' values.
    dtrans's trainer only receives them."""
    assert [op.type for op in case.trainer_startup.ops] == communication(case.trainer_startup)
    assert communication(case.trainer_startup) == expected_trainer(case, "startup")


# -- servers ---------------------------------------------------------------------------------------


KINDS = {
    "optax.add_decayed_weights": "regularize",
    "optax.clip": "clip",
    "optax.clip_by_global_norm": "clip",
}


def compensation(block: Any, grads: list[str]) -> int:
    """Return the number of equations that compensate a gradient for its delay.

    These equations end with the sum of the gradient and a term from the backup.
    """
    inner = block.jaxpr.jaxpr
    of_backup = {v for n, v in zip(block.in_names, inner.invars, strict=True) if n.endswith(".bak")}
    grad_vars = {v for n, v in zip(block.in_names, inner.invars, strict=True) if n in grads}
    for i, eqn in enumerate(inner.eqns):
        read = {a for a in eqn.invars if not isinstance(a, Literal)}
        if read & of_backup and read & grad_vars and eqn.primitive.name == "add":
            return i + 1
        if read & of_backup:
            of_backup |= {*eqn.outvars}
    return 0


def kinds(blocks: list[Any], grads: list[str]) -> list[str]:
    """Return the kinds of the equations in the blocks of one parameter, in order, from the
    trainers' gradients on."""
    found: list[str] = []
    for block in blocks:
        for g in block.grads:
            assert list(g.sent.values()) == grads and g.name in block.in_names
            found += ["merge", "mean"] if len(grads) > 1 else []
        compensating = compensation(block, grads)
        for i, eqn in enumerate(block.jaxpr.jaxpr.eqns):
            found.append("compensate" if i < compensating else KINDS.get(origin_of(eqn), "update"))
    return [k for i, k in enumerate(found) if found[i - 1 : i] != [k]]


def expected_kinds(case: Any) -> dict[str, dict[str, list[str]]]:
    """Return a dict: server -> parameter block -> expected kinds of equations."""
    expected: dict[str, dict[str, list[str]]] = {}
    for endpoint, blocks in case.recorded["placement"].items():
        names = sorted(n for n, _ in blocks)
        does = [b for b in case.recorded["servers"][endpoint]["blocks"] if b != ["lr_sched"]]
        if case.name in WITHOUT_CLIP:
            does = [[*b[:-1], "clip", b[-1]] for b in does]
        if case.recorded["trainers"] == 1:
            # Paddle's server sums g.trainer_0 here, but the trainer sends g, so the gradient never
            # arrived. With one gradient there is nothing to merge.
            does = [[k for k in b if k not in ("merge", "mean")] for b in does]
        expected[endpoint] = dict(zip(names, does, strict=True))
    return expected


def test_servers_do_with_each_block_what_paddles_did(case: Any) -> None:
    """Each parameter block has one optimize block: merge, mean, regularize, clip, update."""
    trainers = case.recorded["trainers"]
    mine: dict[str, dict[str, list[str]]] = {}
    for endpoint, units in case.plan.placement.units.items():
        main = case.plan.servers[endpoint].main
        assert [op.type for op in main.ops] == ["listen_and_serv"]
        assert main.ops[0].attrs["Fanin"] == trainers
        optimize = [b for b in blocks_of(case.plan, endpoint) if b.role == "optimize"]
        mine[endpoint] = {}
        for unit in units:
            (block,) = unit.blocks
            grads = [block.gradient(k, case.merged) for k in range(case.merged)]
            mine[endpoint][short(block.name)] = kinds(
                [b for b in optimize if b.name == unit.name], grads
            )
    assert mine == expected_kinds(case)


def test_servers_have_as_many_blocks_as_paddles(case: Any) -> None:
    """A server has more blocks only if servers exchange values, which Paddle's servers did not."""
    for endpoint, units in case.plan.placement.units.items():
        blocks = blocks_of(case.plan, endpoint)
        own = [b for b in blocks if b.level == 0 and b.role == "optimize"]
        assert [b.name for b in own] == [u.name for u in units]
        does = case.recorded["servers"][endpoint]["blocks"]
        assert len(own) == len([b for b in does if b != ["lr_sched"]])
        if case.name not in ROUNDS:
            assert {b.level for b in blocks} == {0}
            assert {b.role for b in blocks} <= {"lr_sched", "optimize"}
    assert len(case.plan.traffic.rounds) == ROUNDS.get(case.name, 0)


def test_a_schedule_is_one_block_on_each_server(case: Any) -> None:
    """The block of the schedule is the first block.

    Adam has this block without a schedule, too, for the count of steps. Paddle stores a count for
    each block.
    """
    for endpoint in case.plan.servers:
        blocks = blocks_of(case.plan, endpoint)
        scheduled = [b.role for b in blocks].count("lr_sched")
        does = case.recorded["servers"][endpoint]["blocks"]
        assert does.count(["lr_sched"]) == (does[0] == ["lr_sched"])
        assert scheduled == (does[0] == ["lr_sched"] or case.name in BETA_POWERS)
        (serve_op,) = case.plan.servers[endpoint].main.ops
        assert serve_op.attrs["lr_decay_block_id"] == (1 if scheduled else -1)
        assert [b.role for b in blocks[:scheduled]] == ["lr_sched"] * scheduled


def test_optimizer_state_is_cut_as_its_parameter_is(case: Any) -> None:
    for endpoint, units in case.plan.placement.units.items():
        held = {
            n: t
            for n, t in case.plan.servers[endpoint].main.inputs.items()
            if not n.endswith("_bak")
        }
        copies = len(case.plan.servers[endpoint].main.inputs) - len(held)
        assert copies == case.recorded["servers"][endpoint].get("copies", 0), (
            "one of each block for each trainer"
        )
        for unit in units:
            (block,) = unit.blocks
            suffix = (
                short(block.leaf) if block.count == 1 else f"{short(block.leaf)}.block{block.index}"
            )
            mine = [
                t.shape
                for n, t in held.items()
                if n.startswith("opt_state/") and n.endswith("/" + suffix)
            ]
            assert mine == [block.shape] * ACCUMULATORS.get(case.name, 0)
        rest = [n for n in held if n.endswith("/count")]
        assert len(held) == len(units) * (1 + ACCUMULATORS.get(case.name, 0)) + len(rest)
        assert all(held[n].shape == () for n in rest)


def test_servers_start_with_what_paddles_started_with(case: Any) -> None:
    """Servers start with one value for each parameter block and each accumulator.

    The test lists Paddle's other variables, which are numbers.
    """
    for endpoint, role in case.plan.servers.items():
        recorded = case.recorded["servers"][endpoint]
        assert role.startup.out_names == role.main.in_names
        blocks = case.plan.placement.units[endpoint]
        mine = [n for n in role.startup.out_names if not n.endswith(("/count", "_bak"))]
        # Paddle's learning rate or counter of steps; in dtrans a constant or a count
        numbers = 1 + BETA_POWERS.get(case.name, 0) * len(blocks)
        assert len(mine) == recorded["constants"] + recorded["random"] - numbers
        weights = {"fc_w", "w1", "w2", "shared_w"}
        assert sum(short(b.leaf) in weights for u in blocks for b in u.blocks) == recorded["random"]
        # rows of tables
        on_use = [e.params["write"](1) for e in role.startup.eqns if e.primitive is init_on_use_p]
        eqns = [*role.startup.eqns, *(e for made in on_use for e in equations(made))]
        makes_random = any(e.primitive.name == "random_bits" for e in eqns)
        assert makes_random == bool(recorded["random"]), "nothing is made for another server"


@pytest.mark.sampled(1)
def test_servers_start_with_rows_of_what_one_device_would_make(case: Any) -> None:
    """Paddle draws each block with the same seed, so all blocks of a parameter had the same
    rows."""
    init = case.plan.startup
    whole = dict(zip(init.out_names, evaluate(init.jaxpr, *init.flatten(KEY)), strict=True))
    found = assemble(case.plan, start_servers(case.plan, KEY), list(whole))
    assert found.keys() == whole.keys()
    for name, value in whole.items():
        assert np.array_equal(found[name], value), name


@pytest.mark.sampled(2)
def test_a_step_of_the_servers_is_one_of_one_device_on_the_mean_gradient(case: Any) -> None:
    """Run two steps, because a schedule changes the rate after the first step.

    A server merges gradients, takes the mean, regularizes, clips and updates, in this order.
    """
    net, tx = (CASES | DISTRIBUTED)[case.name]
    params = NETS[net][1](KEY)
    state = tx.init(params)
    held = start_servers(case.plan, KEY)
    rng = np.random.default_rng(0)
    step = jax.jit(
        plain_step(
            lambda p, g: sum(jax.tree.leaves(jax.tree.map(lambda a, b: jnp.sum(a * b), p, g))), tx
        )
    )
    for _ in range(2):
        of_trainers = [
            jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape) * 0.01, p.dtype), params)
            for _ in range(case.merged)
        ]
        held = serve(
            case.plan, held, [{f"params/{n}": g for n, g in leaves(gs)} for gs in of_trainers]
        )
        mean = jax.tree.map(lambda *gs: sum(gs) / len(gs), *of_trainers)
        params, state, _ = step(params, state, mean)
    expected = dict(named((params, state)))
    found = assemble(case.plan, held, list(expected))
    for name, value in expected.items():
        assert distance(found[name], value) < 1e-5, name


def leaves(tree: Any) -> list[tuple[str, Any]]:
    """Return pairs (path, leaf), with dtrans's names."""
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), x) for path, x in found]


def named(state: tuple[Any, Any]) -> list[tuple[str, Any]]:
    """Return pairs (name, array) of the parameters and the optimizer state."""
    return [
        (f"{root}/{n}", x)
        for root, tree in zip(("params", "opt_state"), state, strict=True)
        for n, x in leaves(tree)
    ]


# -- tables ----------------------------------------------------------------------------------------


def test_a_trainer_has_no_row_of_a_table(case: Any) -> None:
    """All lookups use one `prefetch`.

    A trainer starts without rows, and no value has as many rows as the table.
    """
    table = "params/shared_w"
    if case.name not in TABLES:
        assert not case.plan.tables.of
        return
    (ids,), (rows,) = (
        [op for op in case.trainer.ops if op.type == n] for n in ("split_ids", "prefetch")
    )
    assert ids.attrs["rows"] == 1000 and ids.attrs["size"] == (
        448 if case.name.startswith("emb2") else 224
    )
    assert rows.attrs["names"] == tuple(b.name for b in case.plan.placement.blocks[table])
    assert rows.attrs["epmap"] == tuple(case.plan.servers)
    (fake,) = (op for op in case.trainer_startup.ops if op.type == "fake_init")
    assert fake.attrs["shape"] == (1000, 64)
    for program in (case.trainer, case.trainer_startup):
        values = (v for e in program.jaxpr.jaxpr.eqns for v in (*e.invars, *e.outvars))
        assert 1000 not in {n for v in values for n in v.aval.shape}
    size = ids.attrs["size"]
    others = sum(b.nbytes for b in case.plan.placement.all_blocks if b.leaf != table)
    assert case.plan.bytes_per_step == {
        "send": others + size * (4 + 64 * 4),
        "recv": others + size * 64 * 4,
    }


@pytest.mark.parametrize("pservers", [1, 2, 3, 7])
def test_a_distributed_table_has_each_row_on_the_server_of_its_number(pservers: int) -> None:
    """Row `id` is on server `id % pservers`, at index `id // pservers`.

    If servers do not divide the rows, Paddle adds padding.
    """
    (name,) = DISTRIBUTED
    plan: Any = transpiled(
        {**RECORDED[name], "pservers": pservers}, *programs(name), TABLES[name]
    ).plan
    blocks = plan.placement.blocks["params/shared_w"]
    assert [b.endpoint for b in blocks] == list(plan.servers)
    assert max(b.rows for b in blocks) == -(-1000 // pservers)
    ids = np.arange(1000)
    for k, b in enumerate(blocks):
        assert np.array_equal(ids[b.span.among(ids)], np.arange(k, 1000, pservers))
        assert np.array_equal(
            b.span.local(np.arange(k, 1000, pservers)), np.arange(k, 1000, pservers) // pservers
        )
