"""Transfers of a plan between roles, with bytes, as a table and as a drawing."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import jax.numpy as jnp
import optax
import pytest

import dtrans
from dtrans.transfers import RoleTransfer, Transfers


ENDPOINTS = ["127.0.0.1:6174", "127.0.0.1:6175"]
TX = optax.sgd(0.1)
SVG = "{http://www.w3.org/2000/svg}"


def init(tx):
    params = {"emb": jnp.ones((100, 4)), "w1": jnp.ones((4, 8)), "w2": jnp.ones((8, 1))}
    return params, tx.init(params)


def loss(params, ids, y):
    return jnp.mean((jnp.tanh(params["emb"][ids] @ params["w1"]) @ params["w2"] - y) ** 2)


def programs(tx):
    step = dtrans.make_train_step(loss, tx)
    main = dtrans.trace(step, *init(tx), jnp.zeros(8, int), jnp.ones((8, 1)))
    return main, dtrans.trace(lambda: init(tx))


def sent_by(role: str, transfers: Transfers) -> int:
    return sum(t.nbytes for t in transfers if t.source == role)


@pytest.mark.parametrize("sparse", [None, {"params/emb": dtrans.Rows()}], ids=["dense", "table"])
def test_transfers_with_servers_add_up_to_the_costs_of_each_role(sparse) -> None:
    plan = dtrans.pserver(*programs(optax.sgd(0.1)), pservers=ENDPOINTS, trainers=3, sparse=sparse)
    transfers, (trainer, *servers) = plan.transfers(), plan.costs()
    assert sent_by("trainer", transfers) == trainer.sent
    for server in servers:
        to_trainer = sum(
            t.nbytes for t in transfers if (t.source, t.target) == (server.role, "trainer")
        )
        from_trainer = sum(
            t.nbytes for t in transfers if (t.source, t.target) == ("trainer", server.role)
        )
        assert (server.sent, server.received) == (3 * to_trainer, 3 * from_trainer)
    received = sum(t.nbytes for t in transfers if t.target == "trainer")
    assert received == trainer.received


def test_servers_send_partial_results_to_each_other() -> None:
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    plan = dtrans.pserver(*programs(tx), pservers=ENDPOINTS)
    found = {t.source: t.nbytes for t in plan.transfers() if t.target == "other pservers"}
    # For each of its leaves, a server sends a sum of squares (a float32) to the other server.
    leaves = dict.fromkeys(ENDPOINTS, 0)
    for block in plan.placement.all_blocks:
        leaves[block.endpoint] += 4
    assert found == leaves


def test_transfers_of_collectives_and_of_stages_add_up_to_the_costs() -> None:
    main, startup = programs(optax.sgd(0.1))
    for plan in (
        dtrans.nccl2(main, startup, trainers=2),
        dtrans.sharding(main, startup, degree=2),
        dtrans.pipeline(main, startup, num_stages=3, num_micro_batch=2),
    ):
        for cost in plan.costs():
            assert sent_by(cost.role, plan.transfers()) == cost.sent > 0


def test_transfers_of_a_mesh_name_the_other_trainers_and_the_devices_of_a_trainer() -> None:
    def split_loss(params, ids, y):
        with dtrans.split():
            hidden = jnp.tanh(params["emb"][ids] @ params["w1"]) @ params["w2"]
        return jnp.mean((hidden - y) ** 2)

    step = dtrans.make_train_step(split_loss, TX)
    main = dtrans.trace(step, *init(TX), jnp.zeros(8, int), jnp.ones((8, 1)))
    plan = dtrans.nccl2(main, dtrans.trace(lambda: init(TX)), mesh={"data": 2, "model": 2})
    targets = {t.what: t.target for t in plan.transfers()}
    assert targets["all_reduce over model"] == "devices of the trainer"
    assert targets["all_reduce over data"] == "other trainers"


def test_a_drawing_has_a_box_for_each_role_and_an_arrow_for_each_pair() -> None:
    transfers = dtrans.pserver(
        *programs(optax.sgd(0.1)), pservers=ENDPOINTS, sparse={"params/emb": dtrans.Rows()}
    ).transfers()
    root = ET.fromstring(transfers._repr_html_())
    assert len(root.findall(f"{SVG}rect")) == 3
    assert len(root.findall(f"{SVG}line")) == 4
    texts = [x.text for x in root.findall(f"{SVG}text")]
    to_first = sum(t.nbytes for t in transfers if t.target == ENDPOINTS[0])
    assert f"gradients and 1 more: {to_first:,} B" in texts
    assert {"trainer", *ENDPOINTS} <= set(texts)


def test_arrows_of_stages_connect_neighbours_in_both_directions() -> None:
    root = ET.fromstring(
        Transfers(
            [
                RoleTransfer("stage 0", "stage 1", "activations", 8),
                RoleTransfer("stage 1", "stage 0", "cotangents", 4),
                RoleTransfer("stage 1", "stage 2", "activations", 2),
            ]
        ).svg()
    )
    boxes = [int(x.attrib["x"]) for x in root.findall(f"{SVG}rect")]
    arrows = [(int(x.attrib["x1"]), int(x.attrib["x2"])) for x in root.findall(f"{SVG}line")]
    width = int(root.findall(f"{SVG}rect")[0].attrib["width"])
    assert arrows == [
        (boxes[0] + width, boxes[1]),
        (boxes[1], boxes[0] + width),
        (boxes[1] + width, boxes[2]),
    ]


def test_a_role_that_only_sends_is_on_the_right_of_its_target() -> None:
    transfers = Transfers(
        [
            RoleTransfer("trainer", "a:1", "gradients", 8),
            RoleTransfer("a:1", "trainer", "parameters", 8),
            RoleTransfer("b:2", "trainer", "parameters", 4),
        ]
    )
    lines = ET.fromstring(transfers.svg()).findall(f"{SVG}line")
    ends = [(int(x.attrib["x1"]), int(x.attrib["x2"])) for x in lines]
    assert ends[1] == ends[2] and ends[1][0] > ends[1][1]


def test_the_drawing_of_a_plan_without_transfers_is_empty() -> None:
    plan = dtrans.nccl2(*programs(optax.sgd(0.1)), trainers=1)
    assert plan.transfers() == ()
    root = ET.fromstring(plan.transfers().svg())
    assert root.findall(f"{SVG}rect") == []
    assert (root.attrib["width"], root.attrib["height"]) == ("0", "0")
    assert "transfers of a step" in str(plan.transfers())
