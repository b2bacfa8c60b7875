"""Collectives: the parts of a record agree, and a registered record is all that the package
needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import tree_close

import dtrans
from dtrans._jax import JaxprEqn, Primitive, closed_with
from dtrans.engine.axis_bytes import collectives
from dtrans.ops import (
    COLLECTIVES,
    OVER_AXIS,
    UNDER_VMAP,
    all_reduce_p,
    exchange_p,
    exchanged,
    is_way,
    new_collective,
    rpc,
)
from dtrans.parameter_server.exchange_rounds import sort_by_rounds
from dtrans.protocol import wire
from dtrans.protocol.server.trainer_rounds import TrainerRounds
from dtrans.run.collective.cluster import axes_of, is_of_cluster


pytestmark = pytest.mark.usefixtures("x64")
TRAINERS = 3
PARTS = np.arange(TRAINERS * 6 * 3, dtype=np.float64).reshape(TRAINERS, 6, 3)
WAYS = {
    "all_reduce": [("sum",), ("max",), ("prod",)],
    "all_gather": [(0,), (1,)],
    "reduce_scatter": [(0,), (1,)],
    "all_to_all": [(0, 1), (1, 0)],
    "first_sum": [(1,), (3,)],
}


def mine_of(k: int) -> Any:
    return lambda x, axis: np.split(x, TRAINERS, axis)[k]


def check_meanings(name: str, *values: Any) -> None:
    """Compare the lowering of a collective with its NumPy function, and both with its type."""
    record = COLLECTIVES[name]
    params = dict(zip(record.params, values, strict=True)) | {
        "name": "",
        "size": TRAINERS,
        "owners": (),
    }
    lowering = UNDER_VMAP.get(record.primitive, OVER_AXIS[record.primitive])
    (found,) = jax.vmap(lambda x: lowering(x, over=("trainers",), **params), axis_name="trainers")(
        PARTS
    )
    part = jax.ShapeDtypeStruct(PARTS.shape[1:], PARTS.dtype)
    aval = jax.make_jaxpr(lambda x: x)(part).in_avals[0]
    for k in range(TRAINERS):
        wanted = exchanged((name, *values), list(PARTS), mine_of(k), np)
        np.testing.assert_allclose(found[k], wanted, rtol=1e-15)
        assert wanted.shape == record.type_of(aval, TRAINERS, *values).shape
    if record.same_for_all:
        np.testing.assert_array_equal(found, np.broadcast_to(found[:1], found.shape))
    assert is_way([name, *values], part.shape, TRAINERS)
    for wrong in ([name], [name, *values, 0], [name, *[None for _ in values]], [[name], *values]):
        assert not is_way(wrong, part.shape, TRAINERS)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_meanings_of_a_collective_agree(name: str) -> None:
    for values in WAYS[name]:
        check_meanings(name, *values)


# -- a new collective ------------------------------------------------------------------------------


def _gather_and_sum(*xs: Any, over: tuple[str, ...], count: int, **_: Any) -> list[Any]:
    (axis,) = over
    return [jax.lax.all_gather(x, axis)[:count].sum(0) for x in xs]


@pytest.fixture
def first_sum() -> Iterator[Primitive]:
    """Return a collective that the package does not have: a sum over the first trainers."""
    primitive = new_collective(
        "first_sum",
        params=("count",),
        type_of=lambda x, size, count: x,
        fits=lambda shape, trainers, count: type(count) is int and 0 < count <= trainers,
        result=lambda parts, mine, xp, count: sum(parts[:count]),
        over_axis=_gather_and_sum,
        same_for_all=True,
        reduces=True,
    )
    yield primitive
    del COLLECTIVES["first_sum"], OVER_AXIS[primitive]


def test_the_meanings_of_a_new_collective_agree(first_sum: Primitive) -> None:
    for values in WAYS["first_sum"]:
        check_meanings("first_sum", *values)


KEY = jax.random.key(0)
TX = optax.adam(0.1)


def init(key: Any) -> Any:
    params = {"w": jax.random.normal(key, (4, 3)), "b": jnp.zeros(3)}
    return params, TX.init(params)


def loss(params: Any, x: Any, mask: Any) -> Any:
    return jnp.sum(jnp.tanh(x @ params["w"] + params["b"]) ** 2 * mask[:, None]) / jnp.sum(mask)


STEP = dtrans.make_train_step(loss, TX)
BATCH = np.linspace(-1, 1, 72).reshape(18, 4), np.arange(18.0) % 3


def programs() -> tuple[Any, Any]:
    parts = [x[: len(x) // TRAINERS] for x in BATCH]
    return dtrans.trace(STEP, *jax.eval_shape(init, KEY), *parts), dtrans.trace(init, KEY)


def by_first(
    plan: dtrans.CollectivePlan, first_sum: Primitive, count: int
) -> dtrans.CollectivePlan:
    """Return the plan with `first_sum` in place of each sum over all trainers."""

    def replaced(eqn: JaxprEqn) -> JaxprEqn:
        if eqn.primitive is not all_reduce_p or eqn.params["op"] != "sum":
            return eqn
        kept = {name: eqn.params[name] for name in ("name", "over")}
        return eqn.replace(primitive=first_sum, params={**kept, "count": count})

    eqns = [*map(replaced, plan.program.inner.eqns)]
    program = dataclasses.replace(plan.program, jaxpr=closed_with(plan.program.jaxpr, eqns=eqns))
    return dataclasses.replace(plan, program=program)


def test_a_plan_runs_counts_and_verifies_a_new_collective(first_sum: Primitive) -> None:
    plan = dtrans.nccl2(*programs(), trainers=TRAINERS)
    new = by_first(plan, first_sum, TRAINERS)
    kinds = {eqn.primitive for eqn, _ in collectives(new.program.jaxpr)}
    assert (
        kinds == {first_sum}
        and new.costs() == plan.costs()
        and new.bytes_per_step == plan.bytes_per_step
    )
    assert is_of_cluster(new.program) and axes_of(new.program, TRAINERS) == dict(plan.axes)
    wanted = STEP(*init(KEY), *BATCH)
    for job in (new.on_mesh(), new.simulate()):
        state, value = job.step(job.init(KEY), *BATCH)
        tree_close(job.params(state), wanted[0], 1e-12)
        tree_close(value, wanted[2], 1e-12)
    # the plan of a part would be computed again
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in BATCH]
    assert (report := new.verify(*types)), str(report)
    assert not by_first(plan, first_sum, TRAINERS - 1).verify(*types).equal


def test_a_new_collective_goes_through_servers(first_sum: Primitive) -> None:
    """The collective works in the program of a trainer, and where a server combines the parts."""
    jaxpr = jax.make_jaxpr(lambda x: first_sum.bind(x, name="", over=("trainers",), count=2))(
        jnp.ones(3)
    )
    ((made,), _) = sort_by_rounds(["a:1"], 0, TRAINERS)(jaxpr.eqns, [""], jaxpr.jaxpr.outvars)
    assert made.primitive is exchange_p and made.params["how"] == (("first_sum", 2),)
    assert rpc.exchange_p.abstract_eval(*jaxpr.in_avals, **made.params)[0][0].shape == (3,)
    rounds = TrainerRounds(TRAINERS)
    for k, part in enumerate(PARTS):
        way = [[part.dtype.name, list(part.shape), ["first_sum", 2]]]
        (frames,) = wire.framed("exchange", [("0", part)], step=0, round=0, values=way)
        rounds.take(k, wire.parse(frames))
    for (answer,) in rounds.answers(range(TRAINERS)).values():
        np.testing.assert_array_equal(answer, PARTS[0] + PARTS[1])
