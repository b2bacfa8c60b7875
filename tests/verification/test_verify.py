"""`plan.verify()`: plans of all strategies are equal to the step, and reports show planted
faults."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P
from verified_table import ROWS, SERVERS, SMALL, STRATEGIES

import dtrans
from dtrans.errors import BatchError
from dtrans.ops import all_gather_p, all_reduce_p, reduce_scatter_p
from dtrans.run.base import lowering, state
from dtrans.verification.evaluate import Evaluator
from dtrans.verification.field_values import (
    NearTie,
    Real,
    Replicas,
    Unknown,
    lifted,
    same,
    ties_by_elements,
)


pytestmark = pytest.mark.usefixtures("x64")


def _loss(params: Any, x: Any, y: Any) -> Any:
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] - y) ** 2)


def _programs(tx: Any, rows: int = ROWS, loss: Any = _loss) -> tuple[Any, Any]:
    def init(key: Any) -> Any:
        keys = jax.random.split(key)
        params = {
            "w1": jax.random.normal(keys[0], (4, 6)),
            "b1": jnp.zeros(6),
            "w2": jax.random.normal(keys[1], (6, 1)),
        }
        return params, tx.init(params)

    key = jax.random.key(0)
    batch = jnp.ones((rows, 4)), jnp.ones((rows, 1))
    main = dtrans.trace(dtrans.make_train_step(loss, tx), *jax.eval_shape(init, key), *batch)
    return main, dtrans.trace(init, key)


CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_plans_compute_the_step(strategy: str) -> None:
    report = STRATEGIES[strategy](*_programs(CLIPPED)).verify()
    assert report.equal and report.complete and report, str(report)
    assert report.points == 4
    assert any("w1" in name for name in report.compared) and "loss" in report.compared
    states = {name for name in report.compared if name.partition("/")[0] not in ("init", "loss")}
    assert {f"init/{name}" for name in states} <= {*report.compared}


@pytest.mark.parametrize("strategy", ["nccl2", "stage 3", "pserver"])
def test_batches_that_ranks_do_not_divide(strategy: str) -> None:
    plan = STRATEGIES[strategy](*_programs(CLIPPED))
    assert plan.verify(jnp.ones((11, 4)), jax.ShapeDtypeStruct((11, 1), jnp.float64))


OTHERS = {
    "whole leaves": lambda *of: dtrans.sharding(
        *of, degree=3, stage=2, slices=dtrans.Slicing(partition="greedy_even")
    ),
    "groups of ranks": lambda *of: dtrans.sharding(
        *of, degree=3, replicas=2, stage=3, slices=SMALL
    ),
    "bf16": lambda *of: dtrans.sharding(*of, degree=3, stage=3, slices=SMALL, precision="bf16"),
    "a scaled loss": lambda *of: dtrans.sharding(
        *of, degree=3, stage=2, slices=SMALL, precision="fp16"
    ),
    "micro-steps": lambda *of: dtrans.nccl2(*of, trainers=3, num_micro_batch=2),
    "parts of each trainer": lambda *of: dtrans.pserver(
        *of, pservers=SERVERS, trainers=3, batch="local"
    ),
    "replicas": lambda *of: dtrans.pipeline(*of, num_stages=2, num_micro_batch=2, replicas=3),
    "backward in two": lambda *of: dtrans.pipeline(
        *of, num_stages=2, num_micro_batch=3, schedule="ZeroBubble"
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_plans_compute_the_step(name: str) -> None:
    with jax.enable_x64(False):  # as most users compute
        assert (report := OTHERS[name](*_programs(optax.adam(1e-2))).verify()), str(report)


@pytest.mark.parametrize("tx", [optax.adam(1e-2), optax.lamb(1e-2)], ids=["adam", "lamb"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_leaves_that_have_one_value_for_ever(strategy: str, tx: Any) -> None:
    """A leaf without a gradient has moments that are zero. Plans use this fact, and jobs check it.

    LAMB compares the norm of its update with zero.
    """

    def loss(params: Any, x: Any, y: Any) -> Any:
        return _loss({**params, "w1": jax.lax.stop_gradient(params["w1"])}, x, y)

    report = STRATEGIES[strategy](*_programs(tx, loss=loss)).verify()
    assert report, str(report)
    assert any(name.endswith("mu/w1") for name in report.compared)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ties_at_every_point_are_decided_alike(strategy: str) -> None:
    """The first step of Adafactor clips updates whose root mean square is 1 up to rounding.

    At later steps, a fault is found.
    """
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=2)
    assert (report := STRATEGIES[strategy](*_programs(tx)).verify()), str(report)
    right, _ = _programs(tx)
    wrong = dataclasses.replace(STRATEGIES[strategy](*_programs(tx, loss=_summed)), main=right)
    assert wrong.verify().differences


@pytest.mark.parametrize("extreme", [jnp.max, jnp.min])
def test_extremes_of_near_ties_are_those_of_parts(extreme: Any) -> None:
    """Field elements decide near ties, so the order of operands has no effect."""
    x = lifted(np.array([1.0, 2.0, 2.0, -3.0, -3.0]), jnp.float64)
    x = Real(np.arange(5, dtype=np.uint64)[::-1].copy(), x.approx)
    one = lambda fn, *of: Evaluator().run(jax.make_jaxpr(fn)(*of), [(x,)])[0][0]
    whole, parts = (
        (lambda a: extreme(a)),
        (lambda a: extreme(jnp.stack([extreme(a[3:]), extreme(a[:2]), a[2]]))),
    )
    with pytest.raises(NearTie):
        one(whole, jnp.ones(5))
    with ties_by_elements():
        assert same(one(whole, jnp.ones(5)), one(parts, jnp.ones(5)))


# -- faults ----------------------------------------------------------------------------------------


def _summed(params: Any, x: Any, y: Any) -> Any:
    return _loss(params, x, y) * ROWS


def _without_bias(params: Any, x: Any, y: Any) -> Any:
    return _loss({**params, "b1": 0 * params["b1"]}, x, y)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("tx", "loss"),
    [
        (optax.adam(1e-2), _summed),
        (optax.adam(1e-2), _without_bias),
        (optax.adam(1.0001e-2), _loss),
    ],
    ids=["sum for mean", "a term is missing", "another rate"],
)
def test_the_plan_of_another_step_is_seen(strategy: str, tx: Any, loss: Any) -> None:
    plan = STRATEGIES[strategy](*_programs(tx, loss=loss))
    right, _ = _programs(optax.adam(1e-2))
    report = dataclasses.replace(plan, main=right).verify()
    assert not report.equal, str(report)
    assert any("params" in d.output for d in report.differences)


def _dropped(*xs: Any, **params: Any) -> Any:
    return list(xs)


def _doubled(*xs: Any, over: Any, **params: Any) -> Any:
    return [2 * jax.lax.psum(x, over) for x in xs]


def _averaged(*xs: Any, over: Any, **params: Any) -> Any:
    return [jax.lax.pmean(x, over) for x in xs]


def _of_the_first(*xs: Any, over: Any, **params: Any) -> Any:
    return [jax.lax.all_gather(x, over)[0] for x in xs]


def _without_the_last(*xs: Any, over: Any, **params: Any) -> Any:
    return [jax.lax.all_gather(x, over)[:-1].sum(0) for x in xs]


@pytest.mark.parametrize("strategy", ["nccl2", "stage 1"])
@pytest.mark.parametrize("fault", [_dropped, _doubled, _averaged, _of_the_first, _without_the_last])
def test_a_wrong_reduction_is_seen(
    strategy: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(lowering.OVER_AXIS, all_reduce_p, fault)
    report = STRATEGIES[strategy](*_programs(CLIPPED)).verify()
    assert not report.equal, str(report)


def _turned(*xs: Any, over: Any, axis: int, **params: Any) -> Any:
    return [jnp.flip(jax.lax.all_gather(x, over, axis=axis, tiled=True), axis) for x in xs]


def _next_slice(*xs: Any, over: Any, axis: int, **params: Any) -> Any:
    scattered = [jax.lax.psum_scatter(x, over, scatter_dimension=axis, tiled=True) for x in xs]
    return [jax.lax.ppermute(x, over, [(0, 1), (1, 2), (2, 0)]) for x in scattered]


@pytest.mark.parametrize(
    ("primitive", "fault"), [(all_gather_p, _turned), (reduce_scatter_p, _next_slice)]
)
def test_a_wrong_slice_is_seen(primitive: Any, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(lowering.OVER_AXIS, primitive, fault)
    report = STRATEGIES["stage 3"](*_programs(CLIPPED)).verify()
    assert not report.equal, str(report)


def _padded_with_ones(x: Any, axis: int, size: int) -> Any:
    rows = [size - n if k == axis else n for k, n in enumerate(x.shape)]
    return jnp.concatenate([x, jnp.ones(rows, x.dtype)], axis)


def test_the_padding_of_the_first_state_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "padded_to", _padded_with_ones)
    report = STRATEGIES["stage 3"](*_programs(CLIPPED)).verify()
    assert {d.output.partition("/")[0] for d in report.differences} == {"init"}, str(report)


def test_a_server_that_makes_other_rows_is_seen() -> None:
    main, startup = _programs(CLIPPED)
    other = dtrans.trace(
        lambda key: jax.tree.map(lambda x: x * 2, _init_of(startup)(key)), jax.random.key(0)
    )
    plan, wrong = (STRATEGIES["pserver"](main, made) for made in (startup, other))
    servers = dict(plan.servers)
    last = list(servers)[-1]
    servers[last] = dataclasses.replace(servers[last], startup=wrong.servers[last].startup)
    report = dataclasses.replace(plan, servers=servers).verify()
    differing = [d.output for d in report.differences]
    assert differing and all(
        name.startswith((f"init/servers/{last}", "init/params")) for name in differing
    )


def _init_of(startup: Any) -> Any:
    """Return a function that computes (params, opt_state) with a startup program."""
    return lambda key: startup(key)


def test_labels_of_a_given_batch_are_used() -> None:
    """Only label seven shows this fault, and a drawn batch never contains this label."""

    def loss_of(weight: float) -> Any:
        def loss(params: Any, x: Any, y: Any) -> Any:
            rows = (x @ params["w1"]).sum(1)
            return jnp.mean(rows * jnp.where(y == 7, weight, 1.0))

        return loss

    def programs(weight: float) -> Any:
        params = {"w1": jnp.ones((4, 6))}
        init = lambda: (params, optax.sgd(0.1).init(params))
        step = dtrans.make_train_step(loss_of(weight), optax.sgd(0.1))
        labels = jnp.zeros(ROWS, int)
        return dtrans.trace(step, *init(), jnp.ones((ROWS, 4)), labels), dtrans.trace(init)

    wrong = dtrans.nccl2(*programs(2.0), trainers=3)
    plan = dataclasses.replace(wrong, main=programs(3.0)[0])
    x, labels = jnp.ones((ROWS, 4)), jnp.arange(ROWS)
    assert plan.verify()
    assert wrong.verify(x, labels)
    assert not plan.verify(x, labels).equal


# -- parts -----------------------------------------------------------------------------------------


def test_a_batch_of_another_structure_is_refused() -> None:
    with pytest.raises(BatchError, match="takes 2 batch arguments, 1 were given"):
        STRATEGIES["nccl2"](*_programs(CLIPPED)).verify(jnp.ones((12, 4)))


def test_a_callback_is_not_followed() -> None:
    def loss(params: Any, x: Any, y: Any) -> Any:
        scale = jax.pure_callback(lambda: 2.0, jax.ShapeDtypeStruct((), jnp.float64))
        return _loss(params, x, y) * scale

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = STRATEGIES["nccl2"](*_programs(CLIPPED, loss=loss)).verify()
    assert report.equal and not report.complete and not report
    assert "pure_callback calls a function of the host (test_verify.py" in str(report)


def test_copies_that_differ_are_told() -> None:
    mesh = AbstractMesh((3,), ("d",), axis_types=(AxisType.Auto,))
    each = jax.shard_map(lambda x: x, mesh=mesh, in_specs=P("d"), out_specs=P(), check_vma=False)
    x = lifted(jnp.arange(6.0), jnp.float64)
    ((found,),) = Evaluator().run(jax.make_jaxpr(each)(jnp.ones(6)), [(x,)])
    assert isinstance(found, Replicas) and len(found.copies) == 3


COLLECTIVES = {
    "psum": lambda x: jax.lax.psum(x, "d"),
    "pmax": lambda x: jax.lax.pmax(x, "d"),
    "gather": lambda x: jax.lax.all_gather(x, "d", tiled=True)[::2],
    "scatter": lambda x: jax.lax.psum_scatter(jnp.tile(x, (3, 1)), "d", tiled=True),
    "all to all": lambda x: jax.lax.all_to_all(jnp.tile(x, (3, 1)), "d", 0, 1, tiled=True),
    "permute": lambda x: jax.lax.ppermute(x, "d", [(0, 2), (2, 1), (1, 0)]),
    "index": lambda x: x * jax.lax.axis_index("d"),
    "loop": lambda x: jax.lax.scan(lambda c, r: (c + jax.lax.psum(r, "d"), c * r), x[0], x)[1],
    "branch": lambda x: jax.lax.cond(x[0, 0] > 5, lambda: 2 * x, lambda: x - 1),
    "turns": lambda x: jax.lax.while_loop(lambda c: c[0, 0] < 20, lambda c: c * 2, x + 1),
    "rows": lambda x: (
        x.at[jnp.array([1, 1, 7])].add(1.0) + jnp.take(x, jnp.array([0, 1]), axis=0, mode="clip")
    ),
    "order": lambda x: jnp.sort(x, axis=1)[:, ::-1] + jnp.cumsum(x, 0) + jnp.argmax(x, 1)[:, None],
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_float64_values_are_what_jax_computes(name: str) -> None:
    """Compare the float64 value, and for programs of sums and products also the field elements."""
    x = jnp.arange(18.0).reshape(6, 3) % 7
    fn = COLLECTIVES[name]
    run = lambda mesh: jax.shard_map(
        fn, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False
    )
    ((found,),) = Evaluator().run(
        jax.make_jaxpr(run(AbstractMesh((3,), ("d",), axis_types=(AxisType.Auto,))))(x),
        [(lifted(x, x.dtype),)],
    )
    wanted = jax.vmap(fn, axis_name="d")(x.reshape(3, 2, 3))
    wanted = wanted.reshape(-1, *wanted.shape[2:])
    assert (found.approx == wanted).all()
    assert same(found, lifted(wanted, x.dtype))


def test_what_has_no_rule_is_unknown() -> None:
    jaxpr = jax.make_jaxpr(lambda x: jax.lax.linalg.ormqr(x, x[0], x))(jnp.ones((4, 4)))
    evaluator = Evaluator()
    ((found,),) = evaluator.run(jaxpr, [(lifted(jnp.ones((4, 4)), jnp.float64),)])
    assert isinstance(found, Unknown) and evaluator.unknown


def test_a_dead_equation_without_a_rule_is_skipped() -> None:
    """The line search of `optax.lbfgs` reads only the type of uninitialized memory."""

    def halve(x: Any) -> Any:
        return (x / 2).astype(jax.lax.empty((), x.dtype).dtype)

    def shift(x: Any) -> Any:
        return x + jax.lax.empty((), x.dtype)

    x, reasons = jnp.ones((2, 3)), {}
    for fn in (halve, shift):
        evaluator = Evaluator()
        evaluator.run(
            jax.make_jaxpr(lambda x, fn=fn: jax.lax.map(fn, x))(x), [(lifted(x, x.dtype),)]
        )
        reasons[fn] = [*evaluator.unknown]
    assert reasons[halve] == []
    assert reasons[shift][0].startswith("empty: the outputs differ from run to run")
