"""48 faults of rewritten steps, twelve for each strategy: reports show each fault, and name its
place.

A fault replaces one equation of a job's traced step. Two sources give its place: the table of this
file, and the values of the same job without the fault.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxpr_surgery import Surgery

import dtrans
from dtrans._jax import axes_of
from dtrans.verification import check
from dtrans.verification.evaluate import Evaluator
from dtrans.verification.field_values import Real
from dtrans.verification.rank_collectives import GROUPS
from dtrans.verification.value_log import ValueLog


SMALL = dtrans.Slicing(min_slice_size=1)
STRATEGIES = {
    "nccl2": lambda *of: dtrans.nccl2(*of, trainers=3),
    "nccl2 in micro-steps": lambda *of: dtrans.nccl2(*of, trainers=3, num_micro_batch=2),
    "sharding": lambda *of: dtrans.sharding(*of, degree=3, stage=3, slices=SMALL),
    "sharding of state": lambda *of: dtrans.sharding(*of, degree=3, stage=1, slices=SMALL),
    "pserver": lambda *of: dtrans.pserver(
        *of,
        pservers="127.0.0.1:1,127.0.0.1:2",
        trainers=3,
        placement=dtrans.BlockPlacement(min_block_size=1),
    ),
    "pipeline": lambda *of: dtrans.pipeline(*of, num_stages=2, num_micro_batch=3),
}


# -- steps -----------------------------------------------------------------------------------------


def _plain(params: Any, x: Any, y: Any) -> Any:
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] - y) ** 2)


def _residual(params: Any, x: Any, y: Any) -> Any:
    # the second use of `pre` gives its gradient two terms in any version of JAX
    pre = x @ params["w1"] + params["b1"]
    return jnp.mean(((jnp.tanh(pre) + pre) @ params["w2"] - y) ** 2)


def _masked(params: Any, x: Any, y: Any) -> Any:
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    mask = jnp.arange(len(y))[:, None] % 3 < 2
    return jnp.sum(jnp.where(mask, (hidden @ params["w2"] - y) ** 2, 0)) / len(y)


@jax.custom_vjp
def _steeper(x: Any) -> Any:
    return x


_steeper.defvjp(lambda x: (x, None), lambda _, ct: (5.0 * ct,))


def _with_rule(params: Any, x: Any, y: Any) -> Any:
    hidden = _steeper(jnp.tanh(x @ params["w1"] + params["b1"]))
    return jnp.mean((hidden @ params["w2"] - y) ** 2)


@functools.cache
def _comparison(strategy: str, loss: Any, rows: int) -> check.Comparison:
    """Return the comparison that `plan.verify()` makes."""
    tx = optax.adam(1e-2)

    def init() -> Any:
        shapes = {"w1": (4, 6), "b1": (6,), "w2": (6, 1)}
        params = {n: 0.1 + jnp.arange(float(np.prod(t))).reshape(t) / 7 for n, t in shapes.items()}
        return params, tx.init(params)

    batch = jnp.ones((12, 4)), jnp.ones((12, 1))
    main = dtrans.trace(dtrans.make_train_step(loss, tx), *jax.eval_shape(init), *batch)
    plan = STRATEGIES[strategy](main, dtrans.trace(init))
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check.Comparison, "check", lambda self, title, **_: found.append(self))
        plan.verify(jnp.ones((rows, 4)), jnp.ones((rows, 1)))
    return found[0]


# -- faults ----------------------------------------------------------------------------------------


def dropped(x: Any, right: Any) -> Any:
    return x


def doubled(x: Any, right: Any) -> Any:
    return 2 * right


def doubled_term(x: Any, y: Any, right: Any) -> Any:
    return right + y


def third(*_: Any, right: Any) -> Any:
    return right / 3


def reordered(x: Any, right: Any, earlier: Any) -> Any:
    return earlier.reshape(right.shape)


def other_axis(x: Any, right: Any) -> Any:
    return x.reshape(right.shape)


def other_axis_gathered(x: Any, right: Any) -> Any:
    return jax.lax.all_gather(x, "shard", axis=1, tiled=True).reshape(right.shape)


def nearer(x: Any, y: Any, right: Any) -> Any:
    return 3 * x


def next_one(x: Any, y: Any, right: Any) -> Any:
    return (x + 1) % 3 * y


def one_further(x: Any, right: Any) -> Any:
    return x[1 : 1 + len(right)]


def first_term(x: Any, y: Any, right: Any) -> Any:
    return x


def first_term_twice(x: Any, y: Any, right: Any) -> Any:
    return x + x


def last_term(x: Any, y: Any, right: Any) -> Any:
    return y


def rolled(x: Any, y: Any, right: Any) -> Any:
    return jnp.roll(right, 1, 0)


def of_another_rank(x: Any, y: Any, right: Any) -> Any:
    return jax.lax.ppermute(right, "shard", [(0, 1), (1, 2), (2, 0)])


def own_piece(x: Any, right: Any) -> Any:
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index("shard") * len(right), len(right))


def backwards(x: Any, right: Any) -> Any:
    return right.reshape(3, -1, *right.shape[1:])[::-1].reshape(right.shape)


def of_the_first(x: Any, right: Any) -> Any:
    return jax.lax.all_gather(x, "shard")[0]


def flipped(x: Any, right: Any) -> Any:
    return right[::-1]


def unmasked(which: Any, x: Any, y: Any, right: Any) -> Any:
    return y


def other_rows(which: Any, x: Any, y: Any, right: Any) -> Any:
    return jnp.where(jnp.roll(which, 1, which.ndim - 2), y, x)


def of_earlier(*_: Any, right: Any, earlier: Any) -> Any:
    return (earlier[0], *right[1:])


@dataclasses.dataclass(frozen=True)
class Planted:
    """Fault of a traced step.

    Attributes:
      kind: kind of the fault.
      strategy: name of the plan's strategy.
      primitive, number: the equation; a negative number counts from the last equation.
      fault: function that replaces the equation.
      named: the primitive that the cause names.
      shape: shape of the equation's output; by default any shape.
      loss, rows: the step.
      earlier: the equation whose output the fault returns instead.
    """

    kind: str
    strategy: str
    primitive: str
    number: int
    fault: Callable[..., Any]
    named: str
    shape: tuple[int, ...] | None = None
    loss: Any = _plain
    rows: int = 12
    earlier: tuple[str, int] | None = None


W1, ROWS_W1, W2, BLOCK = (4, 6), (2, 6), (6, 1), (3, 1)
MICRO, STATE = "nccl2 in micro-steps", "sharding of state"
PLANTED = (
    Planted("dropped collective", "nccl2", "psum", 0, dropped, "add"),
    Planted("doubled collective", "nccl2", "psum", 0, doubled, "mul"),
    Planted("reordered collectives", "nccl2", "psum", 1, reordered, "add", earlier=("psum", 0)),
    Planted("wrong axis", "nccl2", "transpose", 1, other_axis, "reshape"),
    Planted("wrong offset", "nccl2", "mul", 2, nearer, "reduce_sum", rows=11),
    Planted("mean for sum", "nccl2", "psum", 1, third, "div"),
    Planted("missing term", "nccl2", "add_any", -1, first_term, "reduce_sum", loss=_residual),
    Planted("stale copy", "nccl2", "add", -1, first_term, "shard_map", W1),
    Planted("wrong state", "nccl2", "mul", 3, rolled, "concatenate", W1),
    Planted("padding counted", "nccl2", "select_n", 1, unmasked, "reduce_sum", W1, rows=11),
    Planted("wrong micro-batch", MICRO, "reshape", 1, flipped, "sub"),
    Planted("custom rule lost", "nccl2", "mul", 2, last_term, "mul", loss=_with_rule),
    Planted("dropped collective", "sharding", "reduce_scatter", 2, own_piece, "dynamic_slice"),
    Planted("doubled collective", "sharding", "reduce_scatter", 0, doubled, "mul"),
    Planted("reordered ranks", STATE, "all_gather", 0, backwards, "rev"),
    Planted("wrong axis", "sharding", "all_gather", 0, other_axis_gathered, "all_gather"),
    Planted("wrong offset", "sharding", "slice", -1, one_further, "dot_general", W1),
    Planted("mean for sum", "sharding", "reduce_scatter", 1, third, "div"),
    Planted("missing term", "sharding", "psum", -1, of_the_first, "slice"),
    Planted("stale copy", "sharding", "add", -1, first_term, "shard_map", ROWS_W1),
    Planted("wrong state slice", "sharding", "mul", 1, of_another_rank, "ppermute", ROWS_W1),
    Planted("padding counted", "sharding", "select_n", 1, unmasked, "reduce_sum", W1, rows=11),
    Planted(
        "wrong rows of a mask", "sharding", "select_n", 1, other_rows, "reduce_sum", W1, rows=11
    ),
    Planted("custom rule lost", "sharding", "mul", 2, last_term, "mul", loss=_with_rule),
    Planted("dropped gradient", "pserver", "add", 0, first_term, "add", BLOCK),
    Planted("doubled gradient", "pserver", "add", 1, doubled_term, "add", BLOCK),
    Planted("gradients of one trainer", "pserver", "add", 0, first_term_twice, "add", BLOCK),
    Planted("wrong axis", "pserver", "transpose", 1, other_axis, "reshape"),
    Planted("wrong offset", "pserver", "slice", -1, one_further, "add", ROWS_W1),
    Planted("mean for sum", "pserver", "mul", 0, third, "div", BLOCK),
    Planted("missing term", "pserver", "add_any", -1, first_term, "reduce_sum", loss=_residual),
    Planted("stale copy", "pserver", "add", -1, first_term, "concatenate", BLOCK),
    Planted("wrong state slice", "pserver", "mul", 2, rolled, "concatenate", BLOCK),
    Planted(
        "padding counted", "pserver", "select_n", 1, unmasked, "reduce_sum", (3, 4, 6), rows=11
    ),
    Planted(
        "wrong rows of a mask", "pserver", "select_n", 1, other_rows, "select_n", (3, 4, 6), rows=11
    ),
    Planted("custom rule lost", "pserver", "mul", 2, last_term, "mul", loss=_with_rule),
    Planted("dropped sum", "pipeline", "add", 1, last_term, "mul", W2),
    Planted("doubled term", "pipeline", "add", 1, doubled_term, "add", W2),
    Planted("mean for sum", "pipeline", "div", 0, third, "div", W1),
    Planted("wrong axis", "pipeline", "transpose", 1, other_axis, "reshape"),
    Planted("wrong offset", "pipeline", "mul", 1, nearer, "sub", ()),
    Planted("wrong micro-batch", "pipeline", "mul", 2, next_one, "sub", ()),
    Planted("missing term", "pipeline", "add_any", -1, first_term, "reduce_sum", loss=_residual),
    Planted(
        "stale copy of another micro-batch",
        "pipeline",
        "jit",
        7,
        of_earlier,
        "mul",
        earlier=("jit", 4),
    ),
    Planted("wrong state", "pipeline", "mul", -2, rolled, "concatenate", W1),
    Planted(
        "wrong rows of a mask",
        "pipeline",
        "select_n",
        0,
        other_rows,
        "reduce_sum",
        (4, 1),
        loss=_masked,
    ),
    Planted("mask lost", "pipeline", "select_n", 0, unmasked, "reduce_sum", (4, 1), loss=_masked),
    Planted("custom rule lost", "pipeline", "mul", 3, last_term, "mul", loss=_with_rule),
)


@pytest.mark.parametrize("planted", PLANTED, ids=lambda p: f"{p.strategy}: {p.kind}")
def test_a_planted_fault_is_named(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    with jax.enable_x64(True):
        comparison = _comparison(planted.strategy, planted.loss, planted.rows)
        right = comparison.traced.jaxpr
        where = lambda shape: planted.shape in (None, shape)
        surgery = Surgery(planted.primitive, planted.number, planted.fault, where, planted.earlier)
        faulty = surgery.apply(right)
        traced = dataclasses.replace(comparison.traced, jaxpr=faulty)
        arguments = _note_arguments(monkeypatch)
        report = dataclasses.replace(comparison, traced=traced).check("a plan", points=(0,))
        assert not report.equal
        cause = report.differences[0].cause
        assert cause is not None
        assert cause.primitive == planted.named, str(report)
        allowed = _first_wrong(right, faulty, arguments)
        assert not allowed or cause.equation in allowed, f"{cause.equation} is none of {allowed}"


def test_there_are_twelve_of_each_strategy() -> None:
    of = [p.strategy.partition(" ")[0] for p in PLANTED]
    assert {name: of.count(name) for name in of} == dict.fromkeys(
        ("nccl2", "sharding", "pserver", "pipeline"), 12
    )
    assert len({(p.strategy, p.kind) for p in PLANTED}) == 48


def _note_arguments(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that gets the arguments of the job when the report searches for causes."""
    found: list[Any] = []
    find_causes = check.find_causes

    def noted(step: Any, job: Any, outputs: Any) -> Any:
        found.extend(job[1])
        return find_causes(step, job, outputs)

    monkeypatch.setattr(check, "find_causes", noted)
    return found


def _first_wrong(right: Any, faulty: Any, arguments: Sequence[Any]) -> set[str]:
    """Return the first equation whose value the right job lacks, and further wrong equations up to
    the next collective.

    The set is empty if the fault replaces a right value by another right value.
    """
    logs = []
    for jaxpr in (right, faulty):
        log = ValueLog()
        with np.errstate(all="ignore"):
            Evaluator(log=log).run(jaxpr, [(x,) for x in arguments])
        logs.append(log)
    key = lambda value: tuple((x.shape, x.elements.tobytes()) for x in value if isinstance(x, Real))
    known = {key(x) for made in logs[0].computations for x in made.outputs}
    made = logs[1].computations
    wrong = [n for n, m in enumerate(made) if any(key(x) not in known for x in m.outputs)]
    if not wrong:
        return set()
    reached, found = {wrong[0]}, {str(made[wrong[0]])}
    for n in range(wrong[0] + 1, len(made)):
        sources = {s for x in made[n].operands for s in logs[1].sources(x)}
        if sources & reached:
            found.add(str(made[n]))
            is_collective = made[n].name in GROUPS and any(
                isinstance(a, str) for a in axes_of(made[n].eqn)
            )
            reached |= set() if is_collective else {n}
    return found
