"""`dtrans.verify`: hand-written `shard_map` steps with and without faults.

The report names each fault.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P
from paths import DOCS

import dtrans
from dtrans.check_command import check
from dtrans.errors import ConfigError, TraceError, VerifyError
from dtrans.verification.evaluate import Evaluator
from dtrans.verification.field_values import lifted, same


DATA = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
GRID = AbstractMesh((2, 3), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
ROWS, WIDTH, HIDDEN = 12, 4, 6
ADAM = optax.adam(1e-2)
RATE = 0.1

PARAMS = {
    "up": jnp.linspace(-1, 1, WIDTH * HIDDEN).reshape(WIDTH, HIDDEN),
    "down": jnp.linspace(1, -1, HIDDEN).reshape(HIDDEN, 1),
}
BATCH = jnp.cos(jnp.arange(ROWS * WIDTH)).reshape(ROWS, WIDTH), jnp.ones((ROWS, 1))


def _loss(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - y) ** 2)


# -- steps of one device ---------------------------------------------------------------------------


def adam_step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
    loss, grads = jax.value_and_grad(_loss)(params, x, y)
    updates, opt_state = ADAM.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


def sgd_step(params: Any, x: Any, y: Any) -> Any:
    loss, grads = jax.value_and_grad(_loss)(params, x, y)
    return jax.tree.map(lambda p, g: p - RATE * g, params, grads), loss


def flat_step(w: Any, x: Any, y: Any) -> Any:
    return w - RATE * jax.grad(lambda w: jnp.mean((x @ w - y[:, 0]) ** 2))(w)


def forward(params: Any, x: Any, y: Any) -> Any:
    del y
    return jnp.tanh(x @ params["up"]) @ params["down"]


def smooth(x: Any) -> Any:
    """Return the mean of each row and the previous row.

    The row before the first is the last row.
    """
    return (x + jnp.roll(x, 1, axis=0)) / 2


# -- the same, by hand -----------------------------------------------------------------------------


def data_parallel(reduce_grads: Any, reduce_loss: Any, *, check_vma: bool = False) -> Any:
    """Return a data-parallel step with Adam."""

    def rank_step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(_loss)(params, x, y)
        updates, opt_state = ADAM.update(jax.tree.map(reduce_grads, grads), opt_state)
        return optax.apply_updates(params, updates), opt_state, reduce_loss(loss)

    specs = (P(), P(), P("data"), P("data"))
    return jax.shard_map(rank_step, mesh=DATA, in_specs=specs, out_specs=P(), check_vma=check_vma)


def of_global_loss(*, scale: float) -> Any:
    """Return a step with SGD whose ranks differentiate the loss of the full batch.

    Here psum is its own transpose.
    """

    def rank_step(params: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: lax.pmean(_loss(p, x, y), "data"))(params)
        grads = jax.tree.map(lambda g: lax.pmean(g, "data") * scale, grads)
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads), loss

    specs = (P(), P("data"), P("data"))
    return jax.shard_map(rank_step, mesh=DATA, in_specs=specs, out_specs=P(), check_vma=False)


def zero(piece_of: Callable[[Any], Any], divisor: int) -> Any:
    """Return a step with SGD in ZeRO stage 1. Each rank updates one piece of the parameters."""

    def rank_step(w: Any, x: Any, y: Any) -> Any:
        grad = jax.grad(lambda w: jnp.mean((x @ w - y[:, 0]) ** 2))(w)
        mine = lax.psum_scatter(grad, "data", tiled=True) / divisor
        size = len(mine)
        piece = (
            lax.dynamic_slice(w, (piece_of(lax.axis_index("data")) * size,), (size,)) - RATE * mine
        )
        return lax.all_gather(piece, "data", tiled=True)

    specs = (P(), P("data"), P("data"))
    return jax.shard_map(rank_step, mesh=DATA, in_specs=specs, out_specs=P(), check_vma=False)


def tensor_parallel(axis: str | None) -> Any:
    """Return a step with a column-sharded and a row-sharded layer, on a mesh of two axes."""

    def rank_forward(params: Any, x: Any, y: Any) -> Any:
        del y
        part = jnp.tanh(x @ params["up"]) @ params["down"]
        return part if axis is None else lax.psum(part, axis)

    specs = ({"up": P(None, "model"), "down": P("model")}, P("data"), P("data"))
    return jax.shard_map(
        rank_forward, mesh=GRID, in_specs=specs, out_specs=P("data"), check_vma=False
    )


def halo(shift: int) -> Any:
    """Return `smooth` on ranks. Each rank receives a row from its neighbour."""

    def rank_smooth(x: Any) -> Any:
        ring = [(k, (k + shift) % 4) for k in range(4)]
        before = lax.ppermute(x[-1:], "data", ring)
        return (x + jnp.concatenate([before, x[:-1]])) / 2

    return jax.shard_map(rank_smooth, mesh=DATA, in_specs=P("data"), out_specs=P("data"))


mean = lambda x: lax.pmean(x, "data")
total = lambda x: lax.psum(x, "data")
keep = lambda x: x
ADAM_ARGS = (PARAMS, ADAM.init(PARAMS), *BATCH)
SGD_ARGS = (PARAMS, *BATCH)
FLAT_ARGS = (jnp.arange(4.0), *BATCH)

# the step, its arguments, a faulty program, the same program without the fault, and the text for
# the fault
FAULTS: dict[str, tuple[Any, Any, Any, Any, str]] = {
    "sum for mean": (
        adam_step, ADAM_ARGS, data_parallel(total, mean), data_parallel(mean, mean),
        r"fault: psum over axis 'data' \(size 4\) at test_user_shard_map.py:\d+ sums, expected a mean; "
        r"use jax.lax.pmean, or divide by 4 \(corrects params/down, params/up, opt_state/0/mu/down "
r"and 3 others\)",
    ),
    "summed by jax.grad": (
        adam_step, ADAM_ARGS, data_parallel(keep, mean, check_vma=True),
        data_parallel(lambda g: g / 4, mean, check_vma=True),
        r"fault: psum_invariant over axis 'data' \(size 4\) at test_user_shard_map.py:\d+, in the "
        r"gradient, sums, expected a mean; divide the gradient by 4",
    ),
    "missing reduction": (
        sgd_step, SGD_ARGS,
        jax.shard_map(sgd_step, mesh=DATA, in_specs=(P(), P("data"), P("data")), out_specs=P(),
                      check_vma=False),
        of_global_loss(scale=1),
        r"params/up: 24 of 24 entries differ; its copies on the ranks differ along axis 'data' "
r"\(size 4\), but "
        r"out_specs says they are equal\n(.*\n)*  fault: a reduction is missing: .*; use "
        r"jax.lax.pmean over "
r"'data' \(corrects",
    ),
    "scaled by the number of devices": (
        sgd_step, SGD_ARGS, of_global_loss(scale=4), of_global_loss(scale=1),
        r"params/down: 6 of 6 entries differ; it changes by the step's change times 4, the size of "
r"axis 'data'",
    ),
    "loss is added again": (
        adam_step, ADAM_ARGS, data_parallel(mean, lambda x: total(mean(x))),
        data_parallel(mean, mean),
        r"loss: 1 of 1 entries differ; it is the step's value times 4, the size of axis 'data': "
r".*\n"
        r"  fault: psum over .* adds 4 equal values, which multiplies the value by the "
r"number of devices; remove it \(corrects loss",
    ),
    "loss is averaged twice": (
        adam_step, ADAM_ARGS, data_parallel(mean, lambda x: mean(x) / 4), data_parallel(mean, mean),
        r"loss: .* it is the step's value divided by 4, the size of axis 'data': averaged where it "
r"should be summed",
    ),
    "pieces of a neighbour": (
        flat_step, FLAT_ARGS, zero(lambda k: (k + 1) % 4, 4), zero(keep, 4),
        r"w: 4 of 4 entries differ; the right change is added to its pieces: its 4 blocks along "
r"dimension 0 are the "
        r"input's blocks 1, 2, 3, 0: other ranks'",
    ),
    "scattered sum for mean": (
        flat_step, FLAT_ARGS, zero(keep, 1), zero(keep, 4),
        r"changes by the step's change times 4, .*\n  fault: reduce_scatter over .* sums, "
        r"expected a mean",
    ),
    "columns are not added": (
        forward, SGD_ARGS, tensor_parallel(None), tensor_parallel("model"),
        r"differ along axis 'model' \(size 3\).*\n  fault: a reduction is missing: .* use "
r"jax.lax.psum over 'model'",
    ),
    "the other axis": (
        forward, SGD_ARGS, tensor_parallel("data"), tensor_parallel("model"),
        r"psum over axis 'data' \(size 2\) at .* is over the wrong axes; use jax.lax.psum over "
r"'model'",
    ),
    "the wrong way": (
        smooth, BATCH[:1], halo(-1), halo(1), r"ppermute over axis 'data' .* sends the wrong way; "
r"swap source",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named_and_repaired_steps_pass(name: str) -> None:
    step, args, faulty, right, words = FAULTS[name]
    with pytest.raises(VerifyError, match=words) as error:
        dtrans.verify(faulty, step, *args)
    assert not error.value.report.equal and str(error.value.report) == str(error.value)
    report = dtrans.verify(right, step, *args)
    assert report and report.points == 3, str(report)


def test_types_stand_for_arrays() -> None:
    """Values for Adam's second moments are drawn with both signs at first, and roots of negative
    numbers are not real."""
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), ADAM_ARGS)
    assert dtrans.verify(data_parallel(mean, mean), adam_step, *types)


def test_the_page_shows_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (DOCS / "verify_shard_map.md").read_text()
    code, shown = re.search(
        r"```python\n(# by_hand.py\n.*?)```\n\n```text\n(.*?)```", page, re.S
    ).groups()
    (tmp_path / "by_hand.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("by_hand")
    with pytest.raises(VerifyError) as error:
        dtrans.verify(module.parallel, module.step, jnp.ones(2), jnp.ones((8, 2)))
    (tmp_path / "checks.py").write_text(
        re.search(r"```python\n(# checks.py\n.*?)```", page, re.S)[1]
    )
    assert check("checks:update").faults == error.value.report.faults
    without_seconds = lambda text: re.sub(r", [\d.]+ s\)", ")", text)
    assert f"dtrans.errors.VerifyError: {without_seconds(str(error.value))}\n" == without_seconds(
        shown
    )


# -- collectives -----------------------------------------------------------------------------------


@jax.custom_vjp
def _doubled(x: Any) -> Any:
    return lax.psum(x, "model") * x


_doubled.defvjp(lambda x: (_doubled(x), x), lambda x, g: (g * x + lax.psum(g, "model"),))

BOTH = ("data", "model")
COLLECTIVES: dict[str, Callable[[Any], Any]] = {
    "psum": lambda x: lax.psum(x, "data"),
    "pmean": lambda x: lax.pmean(x, "data"),
    "pmax": lambda x: lax.pmax(x, "model") - lax.pmin(x, "data"),
    "permute": lambda x: lax.ppermute(x, BOTH, [(0, 1), (1, 2), (5, 3)]),
    "scatter": lambda x: lax.psum_scatter(x, BOTH, tiled=True),
    "scatter rows": lambda x: lax.psum_scatter(x.reshape(3, -1), "model", tiled=False),
    "gather": lambda x: lax.all_gather(x, "model", tiled=True),
    "gather rows": lambda x: lax.all_gather(x, "model", axis=1),
    "all to all": lambda x: lax.all_to_all(x, "model", 0, 1, tiled=True),
    "all to all rows": lambda x: lax.all_to_all(x.reshape(3, -1), "model", 0, 1, tiled=False),
    "index": lambda x: x * lax.axis_index(BOTH) * lax.axis_size("model"),
    "integers": lambda x: x * lax.pcast(jnp.arange(2), BOTH, to="varying")
    * lax.psum(x.argmax(), BOTH),
    "grad": lambda x: x * jax.grad(lambda w: (x * w).sum())(jnp.ones(2)),
    "jit": lambda x: jax.jit(lambda x: lax.psum(x, "data"))(x),
    "loop": lambda x: lax.scan(lambda c, r: (c + lax.psum(r, BOTH).sum(), c * r), x[0].sum(), x)[1],
    "branch": lambda x: lax.cond(lax.psum(x, BOTH).sum() > 3, lambda: lax.psum(x, "model") * x,
                                 lambda: x),
    "remat": lambda x: jax.vmap(jax.grad(jax.checkpoint(lambda r: lax.psum(r * r,
                                                                           "data").sum())))(x),
    "custom rule": lambda x: jax.grad(lambda x: _doubled(x).sum())(x),
}  # fmt: skip
GRADIENTS = ("grad", "remat")  # check_vma determines if their gradients are already sums over ranks


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_are_what_jax_computes(name: str) -> None:
    def mapped(mesh: Any, *, check_vma: bool) -> Any:
        specs = {"in_specs": P(BOTH), "out_specs": P(BOTH)}
        return jax.shard_map(COLLECTIVES[name], mesh=mesh, check_vma=check_vma, **specs)

    with jax.enable_x64(True):
        x = jnp.arange(72.0).reshape(36, 2) % 7
        mesh = jax.make_mesh((2, 3), BOTH, axis_types=(jax.sharding.AxisType.Auto,) * 2)
        wanted = None
        for check_vma in (True, False):
            if wanted is None or name in GRADIENTS:
                wanted = jax.jit(mapped(mesh, check_vma=check_vma))(x)
            jaxpr = jax.make_jaxpr(mapped(GRID, check_vma=check_vma))(x)
            with np.errstate(over="ignore"):
                ((found,),) = Evaluator().run(jaxpr, [(lifted(x, x.dtype),)])
            assert same(found, lifted(wanted, wanted.dtype))


def test_groups_of_an_axis() -> None:
    summed = lambda x: lax.psum(x, "data", axis_index_groups=[[0, 3], [1, 2]])
    mapped = jax.shard_map(
        summed, mesh=DATA, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    ((found,),) = Evaluator().run(
        jax.make_jaxpr(mapped)(jnp.ones(4)), [(lifted(jnp.arange(4.0), jnp.float32),)]
    )
    assert found.approx.tolist() == [3, 3, 3, 3]


def test_axes_that_are_left_to_xla() -> None:
    mesh = jax.make_mesh((2, 3), BOTH, axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def rank_step(params: Any, x: Any, y: Any) -> Any:
        params["up"] = lax.with_sharding_constraint(
            params["up"], NamedSharding(mesh, P(None, "model"))
        )
        loss, grads = jax.value_and_grad(_loss)(params, x, y)
        grads = jax.tree.map(lambda g: g / 2, grads)
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads), lax.pmean(loss, "data")

    specs = (P(), P("data"), P("data"))
    step = jax.shard_map(rank_step, mesh=mesh, in_specs=specs, out_specs=P(), axis_names={"data"})
    assert dtrans.verify(jax.jit(step), sgd_step, *SGD_ARGS)


def test_pmap() -> None:
    def parallel(x: Any) -> Any:
        return jax.pmap(lambda x: lax.psum(x, "i"), axis_name="i")(x)[0]

    assert dtrans.verify(parallel, lambda x: x.sum(0), jnp.ones((4, 3)))


# -- refusals --------------------------------------------------------------------------------------


def _sharded(mesh: Any) -> Any:
    return jax.jit(sgd_step, in_shardings=(None, *[NamedSharding(mesh, P("data"))] * 2))


def _constrained(mesh: Any) -> Any:
    def step(params: Any, x: Any, y: Any) -> Any:
        return sgd_step(params, lax.with_sharding_constraint(x, NamedSharding(mesh, P("data"))), y)

    return step


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_sharded, r"sgd_step has no shard_map in its jaxpr \(it is sharded by jit\)"),
        (
            _constrained,
            r"sharded by sharding_constraint.*\): XLA would insert the collectives",
        ),
        (
            lambda mesh: sgd_step,
            r"has no shard_map in its jaxpr: XLA .*\. Write .* with jax.shard_map",
        ),
    ],
    ids=["jit with shardings", "constraint", "one device"],
)
def test_programs_without_collectives_are_refused(make: Any, words: str) -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with pytest.raises(ConfigError, match=words):
        dtrans.verify(make(mesh), sgd_step, *SGD_ARGS)


def test_explicit_axes_are_refused() -> None:
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    parallel = jax.shard_map(
        lambda x: x, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    with pytest.raises(ConfigError, match=r"lambda has Explicit axes, .*\.AxisType\.Auto,\)"):
        dtrans.verify(parallel, lambda x: x, jnp.ones(4))


def test_another_structure_is_refused() -> None:
    with pytest.raises(
        TraceError, match=r"lambda returns .*, but sgd_step returns .*; both must return the same"
    ):
        dtrans.verify(lambda *args: of_global_loss(scale=1)(*args)[0], sgd_step, *SGD_ARGS)


def test_other_shapes_differ() -> None:
    parallel = jax.shard_map(lambda x: x, mesh=DATA, in_specs=P("data"), out_specs=P("data"))
    with pytest.raises(VerifyError, match=r"its shape is \(4, 3\), the step's is \(3,\)"):
        dtrans.verify(parallel, lambda x: x.sum(0), jnp.ones((4, 3)))


def test_what_cannot_be_followed_is_no_difference() -> None:
    def step(x: Any) -> Any:
        host = jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((), x.dtype), x.sum())
        return host, 2 * x

    each = jax.shard_map(lambda x: 2 * x, mesh=DATA, in_specs=P("data"), out_specs=P("data"))
    report = dtrans.verify(lambda x: (step(x)[0], each(x)), step, jnp.ones(4))
    assert report.equal and not report.complete
    assert "pure_callback calls a function of the host (test_user_shard_map.py:" in str(report)
