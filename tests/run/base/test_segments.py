"""Segments of a program with communication: one compiled segment followed by sends, or several
segments, each followed by the sends of the segment before it.

No other equation changes its place, and results do not depend on the division.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import distance, mlp_batch, mlp_loss, mlp_params, plan_of, tree_equal
from hypothesis import given, settings, strategies as st

import dtrans
from dtrans._jax import JaxprEqn, Literal, Var
from dtrans.ir.program import Program, is_communication
from dtrans.ops import concat_p, fetch_barrier_p, recv_p, send_barrier_p, send_p, split_byref_p
from dtrans.run.base.segments import COMPUTED, Carry, Compute, Segments, divide_program


SIZES = (5, 8, 8, 3)
PARAMS, BATCH = mlp_params(SIZES), mlp_batch(4, SIZES)
PLAN = plan_of(mlp_loss, optax.sgd(0.1), PARAMS, *BATCH, servers=2, trainers=2)
TRAINER = PLAN.trainer
NAMES = [b.gradient(0, 2) for b in PLAN.placement.all_blocks]


def kinds(pieces: Segments) -> list[str]:
    """Return the kind of each step: `compute`, or the name of an equation that the fabric runs."""
    return ["compute" if isinstance(s, Compute) else s.eqn.primitive.name for s in pieces.steps]


def carried(pieces: Segments) -> list[JaxprEqn]:
    return [s.eqn for s in pieces.steps if isinstance(s, Carry)]


class Fabric:
    """Fabric that runs equations in the test. Received parameters are three times the old ones."""

    def __init__(self) -> None:
        self.sent: dict[str, Any] = {}
        blocks = {}
        for leaf, x in PARAMS.items():
            for b in PLAN.placement.blocks[f"params/{leaf}"]:
                blocks[b.name] = 3 * (x[b.span.start : b.span.stop] if b.span else x)
        self.blocks = blocks

    def __call__(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        if eqn.primitive is split_byref_p:
            ends = np.cumsum(eqn.params["sections"])
            return [values[0][e - n : e] for n, e in zip(eqn.params["sections"], ends, strict=True)]
        if eqn.primitive is send_p:
            self.sent |= zip(eqn.params["names"], values, strict=True)
            return [None]
        if eqn.primitive is send_barrier_p:
            assert sorted(self.sent) == sorted(NAMES), "everything is sent before the barrier"
            return [None]
        if eqn.primitive is recv_p:
            return [self.blocks[n] for n in eqn.params["names"]]
        if eqn.primitive is fetch_barrier_p:
            return values
        assert eqn.primitive is concat_p
        return [jnp.concatenate(values, eqn.params["axis"])]


def carry_out(pieces: Segments, args: Sequence[Any], fabric: Any) -> list[Any]:
    run = pieces.run(args)
    outs: Any = None
    while True:
        try:
            eqn, values = next(run) if outs is None else run.send(outs)
        except StopIteration as done:
            return done.value
        outs = fabric(eqn, values)


def flat_args() -> list[Any]:
    return TRAINER.specialize(PARAMS, *BATCH).flatten(PARAMS, *BATCH)


# -- structure -------------------------------------------------------------------------------------


def test_by_default_there_is_one_piece_and_sends_stand_after_it() -> None:
    pieces = divide_program(TRAINER)
    got = kinds(pieces)
    wire = [op.type for op in TRAINER.ops if op.role in ("rpc", "dist")]
    assert got == ["compute", *wire]
    assert "split_byref" in got and "concat" in got
    assert carried(pieces) == [e for e in TRAINER.jaxpr.jaxpr.eqns if is_communication(e)]


def test_with_rules_split_and_concat_are_computed() -> None:
    got = kinds(divide_program(TRAINER, computed=COMPUTED))
    sends = sum(op.type == "send" for op in TRAINER.ops)
    recvs = sum(op.type == "recv" for op in TRAINER.ops)
    assert got == [
        "compute",
        *["send"] * sends,
        "send_barrier",
        *["recv"] * recvs,
        "fetch_barrier",
        "compute",
    ]


def pieces_are_right(program: Program, group_bytes: float) -> Segments:
    """Check that the segments contain every equation once, in order.

    Only sends, and splits before them, may move. A send follows the segment after the segment that
    computes its gradient, or the last segment.
    """
    pieces = divide_program(program, group_bytes=group_bytes)
    eqns = list(program.jaxpr.jaxpr.eqns)
    late = (send_p, split_byref_p)
    computes = [s for s in pieces.steps if isinstance(s, Compute)]
    plain = [e for e in eqns if not is_communication(e)]
    makes: dict[Var, int] = {}
    position = {v: i for i, e in enumerate(plain) for v in e.outvars}
    for i, piece in enumerate(computes):
        for v in piece.makes:
            makes[v] = i
    # the values of the segments are in the order of the program
    spans = [sorted(position[v] for v in piece.makes) for piece in computes]
    for before, after in itertools.pairwise(spans):
        assert before[-1] < after[0]
    for of_kind in (lambda e: e.primitive in late, lambda e: e.primitive not in late):
        assert [e for e in carried(pieces) if of_kind(e)] == [
            e for e in eqns if is_communication(e) and of_kind(e)
        ]
    done = 0
    last = len(computes)
    parts = {v: e.invars[0] for e in eqns if e.primitive is split_byref_p for v in e.outvars}
    for step in pieces.steps:
        if isinstance(step, Compute):
            done += 1
        elif step.eqn.primitive is send_p:
            for a in step.eqn.invars:
                made_in = makes[parts.get(a, a)]
                assert done == min(made_in + 2, last), (made_in, done, last)
    return pieces


@pytest.mark.parametrize("group_bytes", [1, 4, 100, 300])
def test_with_small_groups_sends_stand_one_piece_behind(group_bytes: int) -> None:
    pieces = pieces_are_right(TRAINER, group_bytes)
    count = kinds(pieces).count("compute")
    assert count > 1
    if group_bytes == 1:  # a segment for each gradient that is followed by more computation
        assert count >= len(PARAMS)


@given(st.integers(1, 2000))
def test_for_any_size_of_groups_the_pieces_are_right(group_bytes: int) -> None:
    pieces = pieces_are_right(TRAINER, group_bytes)
    dropped_once_and_after_their_last_use(pieces)


def test_larger_groups_make_fewer_pieces() -> None:
    counts = [
        kinds(divide_program(TRAINER, group_bytes=n)).count("compute")
        for n in (1, 200, 500, 1 << 20)
    ]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 1


def test_a_piece_ends_when_enough_bytes_of_gradients_are_ready() -> None:
    sizes = {n: b.nbytes for n, b in zip(NAMES, PLAN.placement.all_blocks, strict=True)}
    limit = sum(sizes.values()) // 3
    pieces = divide_program(TRAINER, group_bytes=limit)
    parts = {
        v: e.invars[0] for e in carried(pieces) if e.primitive is split_byref_p for v in e.outvars
    }
    ready: list[list[int]] = []
    for piece in (s for s in pieces.steps if isinstance(s, Compute)):
        sends = [
            e
            for e in carried(pieces)
            if e.primitive is send_p and parts[e.invars[0]] in piece.makes
        ]
        ready.append([sum(sizes[n] for n in e.params["names"]) for e in sends])
    assert len(ready) >= 2
    for group in ready[:-1]:
        assert sum(group) >= limit > sum(group[:-1])


def test_a_program_that_does_not_communicate_is_one_piece() -> None:
    program = dtrans.trace(lambda x: {"y": jnp.sin(x) + 1}, jnp.ones(3))
    pieces = divide_program(program)
    assert kinds(pieces) == ["compute"]
    (y,) = carry_out(pieces, [jnp.arange(3.0)], None)
    assert distance(y, np.sin(np.arange(3, dtype=np.float32)) + 1) < 1e-6


def test_a_program_that_does_nothing_has_no_steps() -> None:
    program = dtrans.trace(lambda x, y: (y, x, 7.0), jnp.ones(3), jnp.zeros(2))
    pieces = divide_program(program)
    assert pieces.steps == ()
    y, x, seven = carry_out(pieces, [jnp.ones(3), jnp.zeros(2)], None)
    assert (y.shape, x.shape, float(seven)) == ((2,), (3,), 7.0)


# -- results ---------------------------------------------------------------------------------------


def reference() -> tuple[dict[str, Any], Any]:
    """Return the sent values and the loss, computed by plain JAX."""
    loss, grads = jax.jit(jax.value_and_grad(mlp_loss))(PARAMS, *BATCH)
    sent = {}
    for b in PLAN.placement.all_blocks:
        g = grads[b.leaf.removeprefix("params/")]
        sent[b.gradient(0, 2)] = g[b.span.start : b.span.stop] if b.span else g
    return sent, loss


@pytest.mark.sampled(1)
@pytest.mark.parametrize("computed", [None, COMPUTED], ids=["carried", "computed"])
@pytest.mark.parametrize("group_bytes", [1, 300, float("inf")])
def test_results_do_not_depend_on_where_a_program_is_cut(computed: Any, group_bytes: float) -> None:
    pieces = divide_program(TRAINER, computed=computed, group_bytes=group_bytes)
    sent, loss = reference()
    for _ in range(2):  # segments are reused
        fabric = Fabric()
        outs = dict(zip(TRAINER.out_names, carry_out(pieces, flat_args(), fabric), strict=True))
        assert sorted(fabric.sent) == sorted(sent)
        for name, g in sent.items():
            assert distance(jnp.asarray(fabric.sent[name]), g) < 1e-6, name
        assert distance(outs.pop("loss"), loss) < 1e-6
        tree_equal(outs, {f"params/{n}": 3 * x for n, x in PARAMS.items()})


@pytest.mark.parametrize("computed", [None, COMPUTED], ids=["carried", "computed"])
def test_constants_and_literals_of_a_program_are_seen_in_every_piece(computed: Any) -> None:
    table = jnp.arange(20.0).reshape(5, 4)  # an array that the step closes over
    params = {"idle": jnp.float32(1.0), "w": jnp.ones((4, 3))}

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((x @ table @ params["w"] - y) ** 2) + jnp.sum(table)

    batch = mlp_batch(4, (5, 3))
    # momentum changes a leaf whose gradient is zero, so the leaf is not frozen
    plan = plan_of(loss, optax.sgd(0.1, momentum=0.9), params, *batch, servers=2)
    (leaf_gradient,) = (
        a
        for e in plan.trainer.jaxpr.jaxpr.eqns
        if e.primitive is send_p
        for a, n in zip(e.invars, e.params["names"], strict=True)
        if n == "params/idle@GRAD"
    )
    pieces = divide_program(plan.trainer, computed=computed, group_bytes=1)
    sent: dict[str, Any] = {}

    def fabric(eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        if eqn.primitive is split_byref_p:
            return np.split(np.asarray(values[0]), np.cumsum(eqn.params["sections"])[:-1])
        if eqn.primitive is send_p:
            sent.update(zip(eqn.params["names"], values, strict=True))
        if eqn.primitive is recv_p:
            return [jnp.zeros(t.shape, t.dtype) for t in eqn.params["types"]]
        if eqn.primitive is fetch_barrier_p:
            return values
        if eqn.primitive is concat_p:
            return [jnp.concatenate(values)]
        return [None]

    *_, value = carry_out(pieces, plan.trainer.flatten(params, *batch), fabric)
    want, grads = jax.value_and_grad(loss)(params, *batch)
    assert distance(value, want) < 1e-6
    got = np.concatenate([np.asarray(sent[n]) for n in sorted(sent) if n.startswith("params/w")])
    assert distance(got, np.asarray(grads["w"])) < 1e-6
    idle = np.asarray(sent["params/idle@GRAD"])
    assert isinstance(leaf_gradient, (Var, Literal))
    assert (idle.shape, idle.dtype, float(idle)) == ((), np.float32, 0.0)


# -- values are let go of --------------------------------------------------------------------------


def dropped_once_and_after_their_last_use(pieces: Segments) -> None:
    inner = pieces.program.jaxpr.jaxpr
    outs = {a for a in inner.outvars if isinstance(a, Var)}
    alive = {*inner.invars, *inner.constvars}
    for step, dropped in zip(pieces.steps, pieces.dropped, strict=True):
        reads = (
            set(step.reads)
            if isinstance(step, Compute)
            else {a for a in step.eqn.invars if isinstance(a, Var)}
        )
        makes = step.makes if isinstance(step, Compute) else step.eqn.outvars
        assert reads <= alive, "what a step reads was made, and was not dropped"
        alive |= set(makes)
        assert not set(dropped) & outs
        alive -= set(dropped)
    assert outs <= alive
    assert alive <= outs | {*inner.invars, *inner.constvars}, (
        "everything made in between is dropped"
    )


@pytest.mark.parametrize("computed", [None, COMPUTED], ids=["carried", "computed"])
@pytest.mark.parametrize("group_bytes", [1, 300, float("inf")])
def test_every_value_is_dropped_after_its_last_use(computed: Any, group_bytes: float) -> None:
    dropped_once_and_after_their_last_use(
        divide_program(TRAINER, computed=computed, group_bytes=group_bytes)
    )


def test_gradients_are_freed_once_they_are_sent() -> None:
    alive: list[weakref.ref[Any]] = []
    fabric = Fabric()

    def watching(eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        if eqn.primitive is send_p:
            alive.extend(weakref.ref(x) for x in values)
            return [None]
        if eqn.primitive is send_barrier_p:
            return [None]
        if eqn.primitive is fetch_barrier_p:
            values = list(values)
            gc.collect()
            assert [r() for r in alive if r() is not None] == []
        return fabric(eqn, values)

    carry_out(divide_program(TRAINER, computed=COMPUTED, group_bytes=1), flat_args(), watching)
    assert len(alive) == len(NAMES)


# -- rules -----------------------------------------------------------------------------------------


@settings(max_examples=10)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 3))
def test_computed_split_then_concat_is_the_identity(sections: list[int], width: int) -> None:
    x = jnp.arange(sum(sections) * width, dtype=jnp.float32).reshape(sum(sections), width)
    parts = COMPUTED[split_byref_p](x, sections=tuple(sections))
    assert [p.shape for p in parts] == [(n, width) for n in sections]
    (joined,) = COMPUTED[concat_p](*parts, axis=0)
    tree_equal(joined, x)
