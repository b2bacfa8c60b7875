"""Names of differences: the first value of a job that is not a piece, a partial sum or a copy of a
value of the step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

from dtrans.verification.field_values import Real
from dtrans.verification.naming import find_causes


ROWS, RANKS = 12, 3
MESH = AbstractMesh((RANKS,), ("rank",), axis_types=(AxisType.Auto,))


pytestmark = pytest.mark.usefixtures("x64")


def _random(shape: tuple[int, ...], seed: int) -> Real:
    rng = np.random.default_rng(seed)
    return Real(rng.integers(1 << 40, 1 << 60, shape, np.uint64), rng.normal(size=shape))


def _step(w: Any, x: Any) -> Any:
    return w - 0.1 * ((x @ w) @ x / ROWS)


def _named(body: Callable[..., Any]) -> Any:
    """Return the cause that the report gives for a faulty body of a `shard_map`."""
    w, x = jnp.ones(4), jnp.ones((ROWS, 4))
    job = jax.shard_map(body, mesh=MESH, in_specs=(P(), P("rank")), out_specs=P(), check_vma=False)
    values = {"w": _random((4,), 0), "x": _random((ROWS, 4), 1)}
    step = jax.make_jaxpr(_step)(w, x)
    return find_causes((step, values), (jax.make_jaxpr(job)(w, x), [*values.values()]), [0])[0]


def _line(fn: Any, text: str) -> str:
    """Return the line of a function that contains a text, in the format of reports."""
    lines, start = inspect.getsourcelines(fn)
    (k,) = [k for k, line in enumerate(lines) if text in line]
    return f"test_naming.py:{start + k}"


def test_a_sum_that_is_counted_twice() -> None:
    def body(w: Any, x: Any) -> Any:
        grad = jax.lax.psum((x @ w) @ x, "rank")
        grad = 2 * grad
        return w - 0.1 * (grad / ROWS)

    cause = _named(body)
    assert cause.equation == f"mul ({_line(body, '2 * grad')})"
    assert cause.value.startswith("2 times a copy of dot_general (test_naming.py:")


def test_a_mean_that_is_not_divided() -> None:
    def body(w: Any, x: Any) -> Any:
        grad = jax.lax.psum((x @ w) @ x / len(x), "rank")
        return w - 0.1 * grad

    cause = _named(body)
    assert cause.equation == f"psum ({_line(body, 'psum')})"
    assert cause.value.startswith("3 times a copy of div")
    assert cause.operands[0].startswith("3 times partial sums of div")


def test_a_reduction_that_is_missing() -> None:
    def body(w: Any, x: Any) -> Any:
        grad = (x @ w) @ x
        return w - 0.1 * (grad / ROWS)

    cause = _named(body)
    assert cause.equation == f"sub ({_line(body, 'ROWS')})"
    assert cause.value.startswith("no piece, partial sum or copy")
    assert "a copy of input w" in cause.operands
    assert any(text.startswith("partial sums of mul") for text in cause.operands)


def test_another_piece() -> None:
    def body(w: Any, x: Any) -> Any:
        rows = jax.lax.ppermute(x @ w, "rank", [(0, 1), (1, 2), (2, 0)])
        grad = jax.lax.psum(rows @ x, "rank")
        return w - 0.1 * (grad / ROWS)

    cause = _named(body)
    assert cause.primitive == "ppermute"
    assert cause.behind == f"psum ({_line(body, 'psum')})"


def test_a_value_that_is_handed_on() -> None:
    cause = _named(lambda w, x: w)
    assert cause.primitive == "shard_map" or cause.value.endswith("returned unchanged")
    assert "a copy of input w" in str(cause)


def test_copies_that_differ() -> None:
    def body(w: Any, x: Any) -> Any:
        return (x @ w) @ x / ROWS

    cause = _named(body)
    assert cause.primitive == "shard_map" and cause.value == "copies on the ranks that differ"
    assert cause.operands[0].startswith("partial sums of div")


@pytest.mark.parametrize("micro", [1, 2])
def test_what_has_no_meaning_is_passed_by(micro: int) -> None:
    """The sum over the first rows of all ranks is not a sum of consecutive rows, but is not
    wrong."""

    def body(w: Any, x: Any) -> Any:
        parts = x.reshape(micro, -1, 4)
        grad = jnp.zeros_like(w)
        for part in parts:
            grad += jax.lax.psum((part @ w) @ part, "rank")
        grad = grad + grad
        return w - 0.1 * (grad / ROWS)

    cause = _named(body)
    assert cause.equation == f"add ({_line(body, 'grad + grad')})"


def test_terms_that_only_their_sum_gives_a_meaning() -> None:
    """A trainer's sum over every second row is not a sum of consecutive rows."""
    w, x = jnp.ones(4), jnp.ones((ROWS, 4))

    def job(w: Any, x: Any) -> Any:
        terms = jnp.stack([(x[k::3] @ w) @ x[k::3] for k in range(3)])
        return w - 0.1 * ((terms[0] + 5 * terms[1] + terms[2]) / ROWS)

    values = {"w": _random((4,), 0), "x": _random((ROWS, 4), 1)}
    found = find_causes(
        (jax.make_jaxpr(_step)(w, x), values), (jax.make_jaxpr(job)(w, x), [*values.values()]), [0]
    )
    assert found[0] is not None and found[0].primitive == "mul"
    assert found[0].operands[0].startswith("a term of partial sums of dot_general")


def test_programs_that_are_too_large_have_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from dtrans.verification import value_log

    monkeypatch.setattr(value_log, "MOST_NUMBERS", 10)
    assert _named(lambda w, x: w) is None
