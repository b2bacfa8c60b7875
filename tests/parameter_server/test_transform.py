"""The parameter-server transform.

Its programs are compared with programs of paddlepaddle 1.8.5 for the same nets: placement, order of
communication, structure of blocks. Other tests check unchanged parts of a step, notes of plans,
initial values, and errors.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from typing import NamedTuple

import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    assemble,
    blocks_of,
    communication,
    distance,
    endpoints,
    init_of,
    mlp_batch,
    mlp_loss,
    mlp_params,
    plain_step,
    plan_of,
    tree_close,
    tree_equal,
)
from paths import GOLDEN as GOLDEN_FOLDER

import dtrans
from dtrans.errors import (
    ConfigError,
    GradientError,
    NotRunnableError,
    TraceError,
    UnknownEndpointError,
)
from dtrans.step.halves import GRAD


GOLDEN = json.loads((GOLDEN_FOLDER / "paddle-transpiler.json").read_text())["cases"]
COMMUNICATION = {"send", "split_byref", "send_barrier", "recv", "fetch_barrier", "concat"}
LEAST = 8192


def fc_loss(params, x, y):
    return jnp.mean((x @ params["fc_w"] + params["fc_b"] - y) ** 2)


def fc_init(key):
    return {
        "fc_b": jnp.zeros(1000),
        "fc_w": jax.random.uniform(key, (1000, 1000), minval=-0.05, maxval=0.05),
    }


def net_loss(params, x, label):
    hidden = jax.nn.relu(x @ params["w1"] + params["b1"])
    return optax.softmax_cross_entropy_with_integer_labels(
        hidden @ params["w2"] + params["b2"], label
    ).mean()


def net_init(key):
    one, two = jax.random.split(key)
    return {
        "b1": jnp.zeros(256),
        "b2": jnp.zeros(10),
        "w1": jax.random.normal(one, (784, 256)) / 28,
        "w2": jax.random.normal(two, (256, 10)) / 16,
    }


X, Y = jax.ShapeDtypeStruct((32, 1000), "float32"), jax.ShapeDtypeStruct((32, 1000), "float32")
IMAGES, LABELS = jax.ShapeDtypeStruct((32, 784), "float32"), jax.ShapeDtypeStruct((32,), "int32")
NETS = {"fc": (fc_loss, fc_init, (X, Y)), "mlp": (net_loss, net_init, (IMAGES, LABELS))}
TX = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.1),
    "adam_lr": optax.adam(optax.exponential_decay(0.1, 10, 0.9)),
}
# golden case: net and optimizer
CASES = {
    "fc_sgd": ("fc", "sgd"),
    "fc_momentum": ("fc", "momentum"),
    "fc_adam": ("fc", "adam"),
    "fc_sgd_block65536": ("fc", "sgd"),
    "fc_sgd_noslice": ("fc", "sgd"),
    "mlp_sgd": ("mlp", "sgd"),
    "mlp_sgd_p1_t1": ("mlp", "sgd"),
    "mlp_sgd_p3_t2": ("mlp", "sgd"),
    "mlp_sgd_t2_id1": ("mlp", "sgd"),
    "mlp_sgd_noslice_p3": ("mlp", "sgd"),
    "mlp_adam_lr_exponential": ("mlp", "adam_lr"),
}


def programs(net, tx):
    loss, make, batch = NETS[net]

    def init(key):
        params = make(key)
        return params, tx.init(params)

    key = jax.random.key(0)
    return dtrans.trace(
        dtrans.make_train_step(loss, tx), *jax.eval_shape(init, key), *batch
    ), dtrans.trace(init, key)


@pytest.fixture(scope="module", params=CASES)
def case(request):
    golden = GOLDEN[request.param]
    config = golden["config"]
    net, tx = CASES[request.param]
    # the recorded programs have random_seed 1, which determines the order of unsliced leaves
    options = {"min_block_size": LEAST, "seed": 1, **config["cfg"]}
    plan = flat_options.pserver(
        *programs(net, TX[tx]),
        pservers=endpoints(config["pservers"]),
        trainers=config["trainers"],
        **options,
    )
    return golden, plan


# -- against Paddle --------------------------------------------------------------------------------


def test_blocks_live_where_paddle_put_them(case):
    golden, plan = case
    mine = {ep: [] for ep in plan.servers}
    for b in plan.placement.all_blocks:
        mine[b.endpoint].append([b.name.removeprefix("params/"), list(b.shape)])
    assert {ep: sorted(bs) for ep, bs in mine.items()} == {
        ep: sorted(bs) for ep, bs in golden["placement"].items()
    }


@pytest.mark.parametrize(
    "name,clip,rounds",
    [
        ("fc_sgd_clip_value_opt", optax.clip(0.001), 0),
        ("fc_sgd_clip_global_opt", optax.clip_by_global_norm(0.1), 1),
    ],
)
def test_clipping_works_where_paddle_ended_in_an_error(name, clip, rounds):
    """In Paddle, a clip combined a sliced parameter with the full gradient. dtrans slices both, and
    places them as in the recording."""
    golden = GOLDEN[name]
    assert "dimensions do not match" in golden["paddle_error"]
    tx = optax.chain(clip, optax.sgd(0.1))
    plan = dtrans.pserver(
        *programs("fc", tx),
        pservers=endpoints(2),
        trainers=2,
        placement=dtrans.BlockPlacement(min_block_size=LEAST),
    )
    test_blocks_live_where_paddle_put_them((golden, plan))
    assert len(plan.traffic.rounds) == rounds
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=(32, 1000)), jnp.float32) for _ in range(2))
    params = fc_init(jax.random.key(0))
    job = plan.on_mesh()
    state, _ = job.step(job.init(jax.random.key(0)), x, y)
    expected, *_ = plain_step(fc_loss, tx)(params, tx.init(params), x, y)
    unclipped, *_ = plain_step(fc_loss, optax.sgd(0.1))(params, (optax.EmptyState(),) * 2, x, y)
    tree_close(job.params(state), expected, 1e-6)
    assert distance(unclipped["fc_w"], expected["fc_w"]) > 1e-5, "the clip does something"


def test_the_trainer_communicates_as_paddles_did(case):
    golden, plan = case
    trainer = plan.trainer_program(golden["config"]["trainer_id"])
    assert communication(trainer) == [t for t in golden["trainer_main"] if t in COMMUNICATION]


def test_the_trainer_starts_up_as_paddles_did(case):
    golden, plan = case
    startup = plan.trainer_startup_program(golden["config"]["trainer_id"])
    assert communication(startup) == [t for t in golden["trainer_startup"] if t in COMMUNICATION]


def test_each_send_stands_right_after_the_op_that_makes_its_gradient(case):
    golden, plan = case
    trainer = plan.trainer_program(golden["config"]["trainer_id"])
    ops = trainer.ops
    sends = [i for i, op in enumerate(ops) if op.type == "send"]
    assert len(sends) == len(plan.placement.blocks)
    for i in sends:
        maker = ops[i - 1]
        assert set(maker.outputs) >= set(ops[i].inputs)
        if maker.type == "split_byref":
            assert maker.outputs == ops[i].inputs == ops[i].attrs["names"]
            assert ops[i - 2].outputs == maker.inputs
            maker = ops[i - 2]
        assert maker.role in ("forward", "backward")
        assert len(ops[i].attrs["epmap"]) == len(ops[i].inputs)
    first, last = sends[0], sends[-1]
    assert any(op.role == "backward" for op in ops[first:last]), (
        "sends do not wait for the end of the backward pass"
    )
    assert not any(op.role in ("optimize", "lr_sched") for op in ops)


def test_servers_have_a_block_for_each_parameter_block_as_paddles_had(case):
    golden, plan = case
    trainers = golden["config"]["trainers"]
    for endpoint, programs in plan.servers.items():
        want = golden["pservers"][endpoint]["main"]
        assert want[0] == [op.type for op in programs.main.ops] == ["listen_and_serv"]
        learning_rate = [b for b in want[1:] if b[0] not in ("sum", "sgd", "momentum", "adam")]
        (serve,) = programs.main.ops
        blocks = serve.attrs["optimize_blocks"]
        counts = any(n.endswith("/count") for n in programs.main.in_names)
        assert serve.attrs["Fanin"] == trainers
        assert serve.attrs["lr_decay_block_id"] == (1 if counts else -1)
        if learning_rate:
            assert counts
        if counts:
            assert (blocks[0].name, blocks[0].role) == ("lr_sched", "lr_sched")
            blocks = blocks[1:]
        assert {b.role for b in blocks} == {"optimize"}
        assert len(blocks) == len(want) - 1 - len(learning_rate)
        assert [b.name for b in blocks] == [u.name for u in plan.placement.units[endpoint]]
        for block, unit in zip(blocks, plan.placement.units[endpoint], strict=True):
            (b,) = unit.blocks
            (grad,) = block.grads  # the mean of the trainers' gradients
            assert grad.sent == {k: b.gradient(k, trainers) for k in range(trainers)}
            assert (grad.name, grad.leaf, grad.index) == (block.in_names[0], b.leaf, b.index)
            assert block.jaxpr.jaxpr.invars[0].aval.shape == b.shape
        first = 2 if counts else 1
        assert serve.attrs["grad_to_block_id"] == tuple(
            f"{u.blocks[0].named(u.blocks[0].leaf + GRAD)}:{i}"
            for i, u in enumerate(plan.placement.units[endpoint], first)
        )


def test_what_a_trainer_sends_is_what_the_servers_wait_for(case):
    _, plan = case
    sent = Counter()
    for k in range(plan.trainers):
        for op in plan.trainer_program(k).ops:
            if op.type == "send":
                sent.update(zip(op.attrs["names"], op.attrs["epmap"], strict=True))
    waited = Counter()
    for endpoint in plan.servers:
        names = {n for b in blocks_of(plan, endpoint) for g in b.grads for n in g.sent.values()}
        waited.update((n, endpoint) for n in names)
    assert sent == waited
    assert set(sent.values()) == {1}


def test_what_a_trainer_receives_is_what_the_servers_hold(case):
    _, plan = case
    for program in (plan.trainer, plan.trainer_startup):
        got = {}
        for op in program.ops:
            if op.type == "recv":
                for n, ep, t in zip(
                    op.attrs["names"], op.attrs["epmap"], op.attrs["types"], strict=True
                ):
                    got[n, ep] = (t.shape, t.dtype)
        held = {(b.name, b.endpoint): (b.shape, b.dtype) for b in plan.placement.all_blocks}
        assert got == held
        for (n, ep), (shape, dtype) in got.items():
            t = plan.servers[ep].main.inputs[n]
            assert (t.shape, t.dtype) == (shape, dtype)


def test_each_trainer_names_its_own_gradients():
    golden = GOLDEN["mlp_sgd"]
    plan = dtrans.pserver(*programs("mlp", TX["sgd"]), pservers=endpoints(2), trainers=2)
    for k in range(2):
        names = [
            n for op in plan.trainer_program(k).ops if op.type == "send" for n in op.attrs["names"]
        ]
        assert sorted(names) == [
            f"params/{n}.trainer_{k}"
            for n in ("b1@GRAD", "b2@GRAD", "w1@GRAD.block0", "w1@GRAD.block1", "w2@GRAD")
        ]
    one = dtrans.pserver(*programs("mlp", TX["sgd"]), pservers=endpoints(2), trainers=1)
    names = [n for op in one.trainer.ops if op.type == "send" for n in op.attrs["names"]]
    assert "params/b1@GRAD" in names and "params/w1@GRAD.block0" in names
    assert golden["config"]["trainers"] == 2


# -- what it leaves alone --------------------------------------------------------------------------


def fingerprint(program):
    return str(program.jaxpr), program.in_names, program.out_names, program.roles


def test_the_programs_handed_in_are_not_changed_and_twice_gives_the_same():
    main, startup = programs("mlp", TX["adam"])
    before = fingerprint(main), fingerprint(startup)
    one = dtrans.pserver(main, startup, pservers=endpoints(3), trainers=2)
    assert (fingerprint(main), fingerprint(startup)) == before
    two = dtrans.pserver(main, startup, pservers=endpoints(3), trainers=2)
    again = dtrans.pserver(*programs("mlp", TX["adam"]), pservers=endpoints(3), trainers=2)
    for other in (two, again):
        assert str(one) == str(other)
        assert str(one.trainer) == str(other.trainer)
        assert str(one.trainer_startup) == str(other.trainer_startup)
        for ep in endpoints(3):
            assert str(one.servers[ep].startup) == str(other.servers[ep].startup)
            for a, b in zip(blocks_of(one, ep), blocks_of(other, ep), strict=True):
                assert (a.name, a.role, a.in_names, a.out_names, str(a.jaxpr)) == (
                    b.name,
                    b.role,
                    b.in_names,
                    b.out_names,
                    str(b.jaxpr),
                )


def test_planning_does_not_touch_numpys_global_generator():
    np.random.seed(7)
    before = np.random.get_state()[1].copy()
    dtrans.pserver(
        *programs("mlp", TX["sgd"]),
        pservers=endpoints(3),
        placement=dtrans.BlockPlacement(slice_var_up=False, seed=5),
    )
    assert np.array_equal(np.random.get_state()[1], before)


def test_the_seed_orders_whole_leaves():
    main, startup = programs("mlp", TX["sgd"])
    plans = [
        dtrans.pserver(
            main,
            startup,
            pservers=endpoints(3),
            placement=dtrans.BlockPlacement(slice_var_up=False, seed=s),
        )
        for s in range(6)
    ]
    where = [tuple(b.endpoint for b in p.placement.all_blocks) for p in plans]
    assert len(set(where)) > 1
    assert all(b.count == 1 for p in plans for b in p.placement.all_blocks)


# -- what the plan says ----------------------------------------------------------------------------


def test_bytes_per_step_are_those_of_the_parameters():
    plan = dtrans.pserver(*programs("mlp", TX["adam"]), pservers=endpoints(3), trainers=2)
    size = 4 * (784 * 256 + 256 + 256 * 10 + 10)
    assert plan.bytes_per_step == {"send": size, "recv": size}
    assert sum(s["params"] for s in plan.server_bytes.values()) == size
    # two moments, and a count on each server
    assert sum(s["opt_state"] for s in plan.server_bytes.values()) == 2 * size + 3 * 4
    text = str(plan)
    assert f"each of 2 trainers sends {size:,} and receives {size:,} bytes per step" in text
    assert "on every server: opt_state/0/count" in text
    for b in plan.placement.all_blocks:
        assert f"{b.nbytes:,}" in text


def test_the_plan_prints_and_renders_each_block():
    plan = dtrans.pserver(*programs("mlp", TX["sgd"]), pservers=endpoints(3), trainers=2)
    assert str(plan).splitlines()[0] == "pserver plan of step: 2 trainers, 3 pservers, sync"
    assert repr(plan) == "<pserver plan of step: 2 trainers, 3 pservers, sync>"
    html = plan._repr_html_()
    for b in plan.placement.all_blocks:
        row = f"{b.span.start}:{b.span.stop}"
        assert any(
            line.split() == [b.name, row, f"{b.nbytes:,}", b.endpoint]
            for line in str(plan).splitlines()
        )
        assert f"<code>{b.name}</code></td><td>{row}</td>" in html
    assert html.count("<tr>") == 1 + 6


def mixing() -> optax.GradientTransformation:
    """Return an optimizer that mixes the rows of every leaf."""
    return optax.stateless_with_tree_map(lambda g, p: -0.1 * jnp.cumsum(g, 0))


def test_leaves_that_cannot_be_cut_say_why():
    params = mlp_params()
    plan = plan_of(mlp_loss, mixing(), params, *mlp_batch(), servers=2)
    assert set(plan.placement.reasons_unsliced) == {f"params/{n}" for n in params}
    for leaf, reason in plan.placement.reasons_unsliced.items():
        assert reason.startswith("cumsum mixes rows of f32[") and reason.endswith("(mixing)")
        assert f"{leaf}: whole on {plan.placement.blocks[leaf][0].endpoint}: {reason}" in plan.notes
    assert {b.endpoint for b in plan.placement.all_blocks} == set(endpoints(2)), (
        "each leaf is whole, on any server"
    )


def test_a_whole_leaf_is_named_with_the_optimizer_that_made_it_so():
    plan = plan_of(
        mlp_loss,
        optax.contrib.muon(0.1),
        mlp_params((5, 5, 5)),
        *mlp_batch(4, (5, 5, 5)),
        servers=2,
    )
    assert set(plan.placement.reasons_unsliced) == {"params/w1", "params/w2"}
    for leaf in plan.placement.reasons_unsliced:
        at = plan.placement.blocks[leaf][0].endpoint
        reason = "dot_general mixes rows of f32[1,5,5] (optax.contrib.scale_by_muon)"
        assert f"{leaf}: whole on {at}: {reason}" in plan.notes


def test_slicing_can_be_required():
    made = plan_of(mlp_loss, optax.lamb(0.1), mlp_params(), *mlp_batch(), slice_var_up="require")
    assert made.placement.reasons_unsliced == {}
    with pytest.raises(
        dtrans.errors.OptimizerError,
        match="slice_var_up is 'require', .*params/b1: cumsum mixes rows of",
    ):
        plan_of(mlp_loss, mixing(), mlp_params(), *mlp_batch(), slice_var_up="require")
    with pytest.raises(
        dtrans.errors.ConfigError,
        match="slice_var_up must be True, False or 'require', it is 'yes'",
    ):
        plan_of(mlp_loss, optax.sgd(0.1), mlp_params(), *mlp_batch(), slice_var_up="yes")


def test_what_servers_tell_each_other_is_in_the_plan():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))
    plan = plan_of(mlp_loss, tx, mlp_params(), *mlp_batch(), servers=2)
    assert plan.placement.reasons_unsliced == {}
    (norms,) = plan.traffic.rounds
    assert [(r.op, r.shape, r.owners, r.over) for r in norms] == [
        ("sum", (), endpoints(2), endpoints(2))
    ] * 4
    assert "round 1 between pservers: 4 values, at most 16 bytes from each pserver" in str(plan)
    alone = plan_of(mlp_loss, tx, mlp_params(), *mlp_batch(), servers=1)
    assert alone.traffic.rounds == (), "one server has nobody to tell"
    assert plan_of(mlp_loss, optax.adam(0.1), mlp_params(), *mlp_batch()).traffic.rounds == ()


def test_a_leaf_of_one_block_is_reduced_where_it_is():
    """Only the server of the leaf needs the norm that LAMB takes."""
    plan = plan_of(
        mlp_loss, optax.lamb(0.1), mlp_params(), *mlp_batch(), servers=2, min_block_size=8192
    )
    assert {b.count for b in plan.placement.all_blocks} == {1}
    assert plan.traffic.rounds == ()
    assert all(b.level == 0 for ep in plan.servers for b in blocks_of(plan, ep))


def test_whole_leaves_go_to_the_server_that_holds_least():
    params = {"a": jnp.ones((8, 8)), "b": jnp.ones((4, 4)), "c": jnp.ones((3, 3))}
    plan = plan_of(
        lambda p, x: x * sum(jnp.sum(q**2) for q in p.values()),
        optax.stateless_with_tree_map(lambda g, p: jnp.cumsum(g, 0)),
        params,
        jnp.ones(()),
        servers=2,
    )
    where = {b.leaf: b.endpoint for b in plan.placement.all_blocks}
    assert where["params/a"] != where["params/b"] == where["params/c"]


def test_whole_leaves_keep_away_from_servers_that_cut_leaves_fill():
    tx = optax.GradientTransformation(
        lambda p: (), lambda g, s, p: ({**g, "w": g["w"] / jnp.sum(g["w"])}, s)
    )
    params = {"a": jnp.ones(64), "w": jnp.ones(3)}
    loss = lambda p, x: x * (jnp.sum(p["a"]) + jnp.sum(p["w"]))
    plan = plan_of(loss, tx, params, jnp.ones(()), servers=2, min_block_size=100)
    assert [(b.leaf, b.endpoint) for b in plan.placement.all_blocks] == list(
        zip(("params/a", "params/w"), endpoints(2), strict=True)
    )


def test_a_leaf_the_trainers_keep_is_named():
    def step(params, opt_state, x, y):
        loss, grads = dtrans.value_and_grad(lambda w: mlp_loss({**params, **w}, x, y))(
            {n: params[n] for n in ("b2", "w2")}
        )
        return {**params, **{n: params[n] - g for n, g in grads.items()}}, opt_state, loss

    params = mlp_params()
    plan = dtrans.pserver(
        dtrans.trace(step, params, (), *mlp_batch()), dtrans.trace(lambda p: (p, ()), params)
    )
    assert plan.frozen == ("params/b1", "params/w1")
    assert "on the trainers only: params/b1, params/w1" in plan.notes
    assert {b.leaf for b in plan.placement.all_blocks} == {"params/b2", "params/w2"}
    outs = dict(zip(plan.trainer.out_names, plan.trainer.jaxpr.jaxpr.outvars, strict=True))
    ins = dict(zip(plan.trainer.in_names, plan.trainer.jaxpr.jaxpr.invars, strict=True))
    assert outs["params/b1"] is ins["params/b1"]


def test_parameters_without_a_gradient_are_not_sent():
    """Weight decay is the only update of `v`."""

    def step(params, opt_state, x):
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(params["w"])
        return {"v": 0.9 * params["v"], "w": params["w"] - grads}, opt_state, loss

    params = {"v": jnp.ones((4, 2)), "w": jnp.ones((5, 2))}
    main = dtrans.trace(step, params, (), jnp.ones((3, 5)))
    plan = dtrans.pserver(main, dtrans.trace(lambda p: (p, ()), params), trainers=2)
    assert plan.update.unsent == ("params/v",)
    assert plan.bytes_per_step == {"send": 4 * 10, "recv": 4 * 18}
    assert [op.type for op in plan.trainer.ops if op.type in COMMUNICATION] == [
        "send",
        "send_barrier",
        "recv",
        "recv",
        "fetch_barrier",
    ]


# -- initial values --------------------------------------------------------------------------------


def test_servers_start_from_the_rows_of_the_single_device_init():
    """Compare bit for bit: both sides jit the same equations with the same key, and then slice."""
    tx = TX["adam"]

    def init(key):
        params = net_init(key)
        return params, tx.init(params)

    key = jax.random.key(3)
    main, startup = programs("mlp", tx)
    plan = dtrans.pserver(main, startup, pservers=endpoints(3), trainers=2)
    want = dict(
        zip(
            (n for n in main.in_names if n not in ("x", "label")),
            jax.tree.leaves(jax.jit(init)(key)),
            strict=True,
        )
    )
    held = {ep: p.startup(key) for ep, p in plan.servers.items()}
    got = assemble(plan, held, list(want))
    tree_equal(got, want)
    for ep, values in held.items():
        assert {n: (v.shape, v.dtype) for n, v in values.items()} == {
            n: (t.shape, t.dtype) for n, t in plan.servers[ep].main.inputs.items()
        }


def test_a_server_makes_only_the_initial_values_it_holds():
    plan = dtrans.pserver(*programs("fc", TX["adam"]), pservers=endpoints(2))
    held = {ep: set(p.startup.out_names) for ep, p in plan.servers.items()}
    assert held[endpoints(2)[1]] == {
        "params/fc_w.block0",
        "opt_state/0/mu/fc_w.block0",
        "opt_state/0/nu/fc_w.block0",
        "opt_state/0/count",
    }
    no_weights = dtrans.pserver(
        *programs("fc", TX["sgd"]),
        pservers=endpoints(2),
        placement=dtrans.BlockPlacement(slice_var_up=False),
    )
    (bias,) = [
        p.startup for p in no_weights.servers.values() if "params/fc_b" in p.startup.out_names
    ]
    assert not any("random" in op.type for op in bias.ops)


def test_servers_without_blocks_serve_nothing():
    params = {"w": jnp.ones((2, 2))}
    plan = plan_of(
        lambda p, x: jnp.sum(p["w"]) * x,
        optax.adam(0.1),
        params,
        jnp.ones(()),
        servers=3,
        min_block_size=100,
    )
    for ep in endpoints(3)[1:]:
        empty = plan.servers[ep]
        assert blocks_of(plan, ep) == ()
        assert empty.main.in_names == empty.main.out_names == ()
        assert empty.startup(params) == {}
        assert plan.server_bytes[ep] == {"params": 0, "opt_state": 0}
    assert plan.trainer.ops[-1].attrs["endpoints"] == endpoints(3), (
        "every server is told that a step is over"
    )


# -- shapes of user code ---------------------------------------------------------------------------


class Layer(NamedTuple):
    kernel: jax.Array
    bias: jax.Array


def test_nested_pytrees_keep_their_paths_and_structure():
    params = {
        "body": [Layer(jnp.ones((4, 4)), jnp.zeros(4)), Layer(jnp.ones((4, 4)), jnp.zeros(4))],
        "head": {"w": jnp.ones((4, 2))},
    }

    def loss(params, batch):
        x = batch["x"]
        for layer in params["body"]:
            x = jnp.tanh(x @ layer.kernel + layer.bias)
        return jnp.mean((x @ params["head"]["w"] - batch["y"]) ** 2)

    plan = plan_of(
        loss, optax.adam(0.1), params, {"x": jnp.ones((3, 4)), "y": jnp.ones((3, 2))}, servers=2
    )
    assert [b.leaf for b in plan.placement.all_blocks if b.index == 0] == [
        "params/body/0/kernel", "params/body/0/bias", "params/body/1/kernel", "params/body/1/bias",
        "params/head/w"
    ]  # fmt: skip
    assert plan.trainer.in_names[-2:] == ("batch/x", "batch/y")
    assert plan.trainer.out_names == (
        *(
            f"params/{n}"
            for n in ("body/0/kernel", "body/0/bias", "body/1/kernel", "body/1/bias", "head/w")
        ),
        "loss",
    )
    assert jax.tree.structure(
        plan.trainer.args[0].unflatten(jax.tree.leaves(params))
    ) == jax.tree.structure(params)
    out = plan.trainer.out.unflatten([*jax.tree.leaves(params), 0.0])
    assert jax.tree.structure(out[0]) == jax.tree.structure(params) and out[1] == 0.0


def test_a_trainer_program_fits_another_batch_size():
    plan = plan_of(
        mlp_loss, optax.adam(0.1), params := mlp_params(), *mlp_batch(8), servers=2, trainers=2
    )
    assert plan.trainer.specialize(params, *mlp_batch(8)) is plan.trainer
    other = plan.trainer_program(1).specialize(params, *mlp_batch(3))
    assert other.inputs["x"].shape == (3, 5)
    assert communication(other) == communication(plan.trainer)
    names = lambda p: [op.attrs["names"] for op in p.ops if op.type == "send"]
    assert names(other) == names(plan.trainer_program(1))


def test_a_trainer_program_cannot_be_called():
    plan = plan_of(mlp_loss, optax.sgd(0.1), params := mlp_params(), *mlp_batch(), servers=2)
    with pytest.raises(
        NotRunnableError,
        match=r"program trainer 0 contains communication \(fetch_barrier, recv, send, "
        r"send_barrier\), so "
        r"it cannot be called; ",
    ):
        plan.trainer(params, *mlp_batch())
    with pytest.raises(
        NotRunnableError,
        match=r"`\w+` communicates, so the program cannot be called as a function",
    ):
        plan.trainer.compiled(*plan.trainer.flatten(params, *mlp_batch()))
    with pytest.raises(
        NotRunnableError,
        match=r"program pserver 127.0.0.1:6170 contains communication \(listen_and_serv\)",
    ):
        plan.servers["127.0.0.1:6170"].main(plan.servers["127.0.0.1:6170"].startup(params))


def test_the_transforms_roles_name_what_distribution_added():
    plan = plan_of(mlp_loss, optax.adam(0.1), mlp_params(), *mlp_batch(), servers=2)
    of = {}
    for op in plan.trainer.ops:
        of.setdefault(op.type, set()).add(op.role)
    assert {t: of[t] for t in COMMUNICATION} == {
        t: {"dist" if t in ("split_byref", "concat") else "rpc"} for t in COMMUNICATION
    }


# -- refusals --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    params, tx = mlp_params(), optax.sgd(0.1)
    return dtrans.trace(
        dtrans.make_train_step(mlp_loss, tx), params, tx.init(params), *mlp_batch()
    ), dtrans.trace(init_of(tx), params)


class Nonsense(dtrans.RoundRobin):
    def dispatch(self, varlist):
        return ["nowhere:1"] * len(varlist)


class TooFew(dtrans.RoundRobin):
    def dispatch(self, varlist):
        return []


@pytest.mark.parametrize(
    "options,text",
    [
        (
            {"pservers": "a:1,a:1"},
            "the endpoint a:1 is listed 2 times; each pserver needs a different endpoint",
        ),
        ({"pservers": ""}, "pservers has no endpoints"),
        ({"pservers": ()}, "pservers has no endpoints"),
        ({"pservers": "127.0.0.1"}, "'127.0.0.1' is not an endpoint; expected host:port"),
        ({"pservers": "a:0"}, "'a:0' is not an endpoint"),
        ({"pservers": "a:65536"}, "'a:65536' is not an endpoint"),
        ({"pservers": "a:1,"}, "'' is not an endpoint"),
        ({"pservers": ["a b:1"]}, "'a b:1' is not an endpoint"),
        ({"pservers": [6000]}, "'6000' is not an endpoint; expected host:port"),
        ({"trainers": 0}, "trainers must be a positive number of trainers, it is 0"),
        ({"trainers": -1}, "trainers must be a positive number of trainers, it is -1"),
        ({"trainers": True}, "trainers must be a positive number of trainers, it is True"),
        ({"trainers": "2"}, "trainers must be a positive number of trainers, it is '2'"),
        ({"mode": "sync"}, "mode must be a dtrans.Sync or a dtrans.Async or .*, it is 'sync'"),
        ({"slice_var_up": None}, "slice_var_up must be True, False or 'require', it is None"),
        ({"seed": -1}, r"seed must be an integer from 0 to 2\*\*32 - 1, it is -1"),
        ({"min_block_size": 0}, "min_block_size must be a positive number of elements, it is 0"),
        (
            {"min_block_size": 0.5},
            "min_block_size must be a positive number of elements, it is 0.5",
        ),
        (
            {"split_method": object},
            "split_method is .*; expected a subclass of dtrans.PSDispatcher",
        ),
        (
            {"split_method": dtrans.PSDispatcher},
            "split_method is .*; expected a subclass of dtrans.PSDispatcher",
        ),
        (
            {"split_method": dtrans.RoundRobin(["a:1"])},
            "split_method is .*; expected a subclass of dtrans.PSDispatcher",
        ),
        (
            {"split_method": Nonsense},
            r"Nonsense.dispatch returned 'nowhere:1' for params/b1; expected one of ",
        ),
        (
            {"split_method": TooFew},
            r"TooFew.dispatch returned \[\] for 4 blocks; expected one of .* for each block$",
        ),
    ],
)
def test_options_are_refused_by_name(small, options, text):
    with pytest.raises(ConfigError, match=text):
        flat_options.pserver(*small, **options)


def test_programs_must_be_programs(small):
    with pytest.raises(ConfigError, match=r"main is a function; expected a Program"):
        dtrans.pserver(mlp_loss, small[1])
    with pytest.raises(ConfigError, match="startup is a .*; expected a Program"):
        dtrans.pserver(small[0], None)


def test_an_unknown_endpoint_is_named(small):
    plan = dtrans.pserver(*small, pservers=endpoints(2))
    with pytest.raises(
        UnknownEndpointError,
        match="'b:9' is not a pserver of this plan; its pservers are 127.0.0.1:6170, "
        "127.0.0.1:6171",
    ):
        plan.servers["b:9"]


@pytest.mark.parametrize("trainer_id", [2, -1, True, "0"])
def test_a_trainer_id_out_of_range_is_refused(small, trainer_id):
    plan = dtrans.pserver(*small, trainers=2)
    for ask in (plan.trainer_program, plan.trainer_startup_program):
        with pytest.raises(
            ConfigError,
            match=f"trainer_id is {trainer_id!r}; with 2 trainers, expected an integer from 0 to 1",
        ):
            ask(trainer_id)


def test_a_startup_that_makes_something_else_is_refused(small):
    main, _ = small
    params = mlp_params()
    with pytest.raises(
        TraceError, match="it returns opt_state/0/trace/b1, which the step does not have"
    ):
        dtrans.pserver(main, dtrans.trace(init_of(optax.sgd(0.1, momentum=0.9)), params))
    with pytest.raises(
        TraceError, match=r"params/b1 as float32\[7\], but the step has float32\[6\]"
    ):
        dtrans.pserver(main, dtrans.trace(init_of(optax.sgd(0.1)), mlp_params((5, 7, 3))))
    with pytest.raises(
        TraceError, match=r"does not return params/b1, which is float32\[6\] in the step"
    ):
        dtrans.pserver(
            main,
            dtrans.trace(
                lambda p: ({"_" + n: x for n, x in p.items()}, optax.sgd(0.1).init(p)), params
            ),
        )
    with pytest.raises(
        TraceError, match=r"it returns params alone, expected \(params, opt_state\)"
    ):
        dtrans.pserver(main, dtrans.trace(lambda p: p, params))


@pytest.mark.parametrize("form", ["in order", "swapped", "dict"])
def test_what_startup_returns_is_told_apart_by_what_it_is(form):
    # momentum has the shapes of the parameters, so position and shape alone would not distinguish
    # them
    tx = optax.sgd(0.1, momentum=0.9)

    def init(params):
        state = tx.init(params)
        named = {"params": params, "opt_state": state}
        return {"in order": (params, state), "swapped": (state, params), "dict": named}[form]

    params = mlp_params()
    step = dtrans.make_train_step(mlp_loss, tx)
    plan = dtrans.pserver(
        dtrans.trace(step, params, tx.init(params), *mlp_batch()), dtrans.trace(init, params)
    )
    job = plan.on_mesh()
    state, _ = job.step(job.init(params), *mlp_batch())
    expected, _, _ = jax.jit(step)(params, tx.init(params), *mlp_batch())
    tree_close(job.params(state), expected, 1e-6)


def test_a_program_that_is_no_step_is_refused(small):
    with pytest.raises(GradientError, match="is not a training step"):
        dtrans.pserver(small[1], small[1])


def test_a_leaf_called_as_a_block_of_another_is_refused():
    params = {"w": jnp.ones((4, 2)), "w.block0": jnp.ones(1)}
    with pytest.raises(
        ConfigError,
        match="params/w.block0 would be the name of both a leaf and block 0 of params/w; rename a "
        "leaf",
    ):
        plan_of(
            lambda p, x: x * (jnp.sum(p["w"]) + jnp.sum(p["w.block0"])),
            optax.sgd(0.1),
            params,
            jnp.ones(()),
            servers=2,
        )


def test_a_plan_is_a_value(small):
    plan = dtrans.pserver(*small)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.trainers = 3
    assert math.prod(plan.placement.all_blocks[0].shape) == 6


def test_a_result_computed_from_gradients_is_refused_with_several_trainers():
    tx = optax.sgd(0.1)

    def step(params, opt_state, x):
        loss, grads = dtrans.value_and_grad(lambda p, x: jnp.mean((x @ p["w"]) ** 2))(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, optax.tree.norm(grads)

    init = lambda key: (p := {"w": jax.random.normal(key, (4, 2))}, tx.init(p))
    key = jax.random.key(0)
    main, startup = dtrans.trace(step, *init(key), jnp.ones((4, 4))), dtrans.trace(init, key)
    with pytest.raises(
        dtrans.errors.GradientError, match="^aux is computed from gradients, but each of 2 trainers"
    ):
        dtrans.pserver(main, startup, trainers=2)
    job = dtrans.pserver(main, startup, trainers=1).on_mesh()
    _, _, norm = job.step(job.init(key), jnp.ones((4, 4)))
    np.testing.assert_allclose(norm, step(*init(key), jnp.ones((4, 4)))[3], rtol=1e-6)


@pytest.mark.parametrize("trainers", [1, 2])
def test_a_result_of_the_update_is_refused_with_a_remedy(trainers):
    """The norm of new parameters reads a count of the optimizer state."""
    tx = optax.adam(0.1)

    def step(state, x):
        params, opt_state = state
        loss, grads = dtrans.value_and_grad(lambda p, x: jnp.mean((x @ p["w"]) ** 2))(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates)
        return (new, opt_state), loss, optax.tree.norm(new)

    init = lambda key: (p := {"w": jax.random.normal(key, (4, 2))}, tx.init(p))
    key = jax.random.key(0)
    main, startup = dtrans.trace(step, init(key), jnp.ones((4, 4))), dtrans.trace(init, key)
    plans = {
        "count": lambda: dtrans.pserver(main, startup, trainers=trainers),
        "mu/w": lambda: dtrans.pipeline(main, startup, num_stages=1, num_micro_batch=trainers),
    }
    for name, plan in plans.items():
        with pytest.raises(dtrans.errors.GradientError) as e:
            plan()
        assert f"aux is computed from gradients and from state/1/0/{name}" in str(e.value)
        assert "only the update can compute it, which runs on the servers of" in str(e.value)
        assert "leave aux out of the results" in str(e.value)
        assert "second argument" not in str(e.value)
    # the remedies in the error
    plan = dtrans.nccl2(main, startup, trainers=2)
    assert plan.verify()


@pytest.mark.parametrize("what", ["the loss", "momentum"])
def test_what_a_step_prints_is_printed_once_and_what_trainers_cannot_see_is_refused(what, capfd):
    tx = optax.sgd(0.1, momentum=0.9)

    def step(params, opt_state, x):
        loss, grads = dtrans.value_and_grad(lambda p, x: jnp.mean((x @ p["w"]) ** 2))(params, x)
        if what == "the loss":
            jax.debug.print("the loss is {}", loss)
        updates, opt_state = tx.update(grads, opt_state, params)
        if what == "momentum":
            jax.debug.print("momentum {}", opt_state[0].trace["w"])
        return optax.apply_updates(params, updates), opt_state, loss

    init = lambda key: (p := {"w": jnp.ones((4, 2))}, tx.init(p))
    key = jax.random.key(0)
    main, startup = dtrans.trace(step, *init(key), jnp.ones((4, 4))), dtrans.trace(init, key)
    if what == "momentum":
        with pytest.raises(
            dtrans.errors.GradientError,
            match=r"^debug_.* \(test_transform.py:\d+\) reads .* servers",
        ):
            dtrans.pserver(main, startup, trainers=2)
        return
    job = dtrans.pserver(main, startup, trainers=2).on_mesh()
    jax.block_until_ready(job.step(job.init(key), jnp.ones((4, 4))))
    jax.effects_barrier()
    printed = capfd.readouterr().out
    assert printed.count("the loss is 16.0") == 1


# -- random keys -----------------------------------------------------------------------------------


def test_a_random_key_in_the_parameters_is_each_trainers_own():
    """No gradient enters the new key, so servers do not update it, and could not send it."""

    def step(params, opt_state, x):
        key, noise = jax.random.split(params["key"])
        loss = lambda w: jnp.mean((x @ w + jax.random.normal(noise, ())) ** 2)
        value, g = dtrans.value_and_grad(loss)(params["w"])
        return {"key": key, "w": params["w"] - 0.1 * g}, opt_state, value

    init = lambda: ({"key": jax.random.key(3), "w": jnp.ones((4, 2))}, jnp.zeros(()))
    x = jnp.ones((2, 4))
    main, startup = dtrans.trace(step, *init(), x), dtrans.trace(init)
    plan = dtrans.pserver(main, startup, placement=dtrans.BlockPlacement(min_block_size=1))
    assert plan.frozen == ("params/key",)
    assert "params/key" not in {row.origin_name for row in plan.overview}
    job, (want, state) = plan.on_mesh(), init()
    held = job.init()
    collective = dtrans.nccl2(main, startup, trainers=1).on_mesh()
    alike = collective.init()
    for _ in range(3):
        held, loss = job.step(held, x)
        alike, other = collective.step(alike, x)
        want, state, expected = step(want, state, x)
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
        np.testing.assert_allclose(other, expected, rtol=1e-6)
    for got in (job.params(held), collective.params(alike)):
        np.testing.assert_allclose(got["w"], want["w"], rtol=1e-6)
        assert (jax.random.key_data(got["key"]) == jax.random.key_data(want["key"])).all()
