"""Communication over a named axis, as what JAX has for it; a program as a function of one trainer on such an axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from dtrans.data_parallel.plan import CollectivePlan
from dtrans.ir.program import Program
from dtrans.ops import after_p, all_gather_p, all_reduce_p, all_to_all_p, combine, reduce_scatter_p, trainer_index_p
from dtrans.plan import realises
from dtrans.run.base import platforms
from dtrans.run.base.segments import Rules, interpret


_REDUCE: dict[str, Callable[..., Any]] = {"sum": jax.lax.psum, "max": jax.lax.pmax, "min": jax.lax.pmin}


def _all_reduce(*xs: Any, op: str, over: tuple[str, ...], **_: Any) -> Sequence[Any]:
    if op in _REDUCE:
        reduced: Sequence[Any] = _REDUCE[op](xs, over)
        return reduced
    # products and bits: XLA has no collective for them that all backends carry out; what is so reduced is small
    # one axis after the other: vmap refuses a gather over several
    made: Sequence[Any] = xs
    for name in reversed(over):
        made = [combine(op, list(jax.lax.all_gather(x, name))) for x in made]
    return made


def _all_gather(*xs: Any, over: tuple[str, ...], axis: int, **_: Any) -> Sequence[Any]:
    return [jax.lax.all_gather(x, over, axis=axis, tiled=True) for x in xs]


def _all_to_all(*xs: Any, over: tuple[str, ...], cut: int, joined: int, **_: Any) -> Sequence[Any]:
    return [jax.lax.all_to_all(x, over, cut, joined, tiled=True) for x in xs]


# communication over a named axis, as what JAX has for it
OVER_AXIS: Rules = {
    all_reduce_p: _all_reduce,
    reduce_scatter_p: platforms.reduce_scatter,
    all_gather_p: _all_gather,
    all_to_all_p: _all_to_all,
    after_p: platforms.after,
    trainer_index_p: lambda over: [jax.lax.axis_index(over)],
}


@realises(CollectivePlan, "function")
def per_trainer(program: Program, rules: Callable[[], Rules] = lambda: OVER_AXIS) -> Callable[..., list[Any]]:
    """A program as a function of flat arrays, for one trainer on a named axis.

    Args:
      rules: makes those of a trace.
    """
    inner = program.inner
    constants = dict(zip(inner.constvars, program.jaxpr.consts, strict=True))

    def run(*args: Any) -> list[Any]:
        return interpret(
            inner.eqns, {**constants, **dict(zip(inner.invars, args, strict=True))}, inner.outvars, rules()
        )

    return run
