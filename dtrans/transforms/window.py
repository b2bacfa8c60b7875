"""A window of micro-steps: the trainer half as a scan over parts of the batch, with one gradient at its end.

    parts of the batch --> scan: forward, backward, add up --> gradients, results

Nothing is reduced over trainers inside. Parameters that trainers make (batch statistics) go from micro-step to
micro-step; a key is folded with the number of the micro-step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import Atom, jaxpr_as_fun, small_jaxpr
from dtrans.cut import Cut, cut
from dtrans.errors import BatchError
from dtrans.rewrite import Builder, inline_calls
from dtrans.transforms.halves import write_trainer_half


def write_window(
    b: Builder,
    step: Cut,
    count: int,
    results: Sequence[str],
    ways: Mapping[str, str],
    weight: str | None,
    whole: Collection[str],
) -> tuple[dict[str, Atom], dict[str, Atom]]:
    """Write forward and backward over `count` micro-steps.

    Args:
      b: that they are written with; it has the step's inputs.
      results: the outputs that are wanted, beside the parameters that trainers make.
      ways: what becomes of each: "mean", "sum", "max", "concat", or "same".
      weight: the result that weights gradients and means, which are then weighted *sums*; else they are means.
      whole: names of batch arrays that every micro-step gets whole.

    Returns:
      Gradients by leaf, and outputs by name.

    Raises:
      BatchError: rows that the micro-steps do not divide.
    """
    source = step.program
    split = [n for n in step.batch if source.inputs[n].ndim and n not in whole]
    keys = [n for n in step.batch if jnp.issubdtype(source.inputs[n].dtype, jax.dtypes.prng_key) and n not in whole]
    for n in split:
        if source.inputs[n].shape[0] % count:
            raise BatchError(
                f"{n} has {source.inputs[n].shape[0]} rows on each trainer, which {count} micro-steps do not divide"
            )
    micro = cut(
        source.at_flat(
            [
                jax.ShapeDtypeStruct((t.shape[0] // count, *t.shape[1:]) if n in split else t.shape, t.dtype)
                for n, t in source.inputs.items()
            ]
        )
    ).with_observed()
    leaves = list(step.gradients)
    outs = [*results, *(n for n in step.held if n in ways)]
    body = _MicroStep(micro, leaves, outs)
    names = [*step.params, *step.batch]

    def window(*arrays: Any) -> list[Any]:
        given = dict(zip(names, arrays, strict=True))
        held = {n: given[n] for n in step.held if n in ways}
        xs = {n: given[n].reshape(count, -1, *given[n].shape[1:]) for n in split}

        def one(carry: Any, x: tuple[Any, dict[str, Any]]) -> Any:
            sums, held = carry
            index, parts = x
            folded = {n: jax.random.fold_in(given[n], index) for n in keys if not given[n].ndim}
            now = {**given, **held, **folded, **parts}
            made = body(*(now[n] for n in names))
            grads = dict(zip(leaves, made[: len(leaves)], strict=True))
            made_outs = dict(zip(outs, made[len(leaves) :], strict=True))
            by = made_outs[weight] if weight is not None else None
            scaled = lambda v: v if by is None else v * by.astype(v.dtype)
            new = {("grad", n): sums["grad", n] + scaled(g) for n, g in grads.items()}
            for n in results:
                v, way = made_outs[n], ways[n]
                if way in ("mean", "sum"):
                    new["out", n] = sums["out", n] + (scaled(v) if way == "mean" else v)
                elif way == "max":
                    new["out", n] = jnp.maximum(sums["out", n], v)
            stacked = {n: made_outs[n] for n in results if ways[n] not in ("mean", "sum", "max")}
            return (new, {n: made_outs[n] for n in held}), stacked

        types = dict(zip([*leaves, *outs], body.types, strict=True))
        start = {("grad", n): jnp.zeros(types[n].shape, types[n].dtype) for n in leaves}
        for n in results:
            t = types[n]
            if ways[n] in ("mean", "sum"):
                start["out", n] = jnp.zeros(t.shape, t.dtype)
            elif ways[n] == "max":
                low = -jnp.inf if jnp.issubdtype(t.dtype, jnp.inexact) else jnp.iinfo(t.dtype).min
                start["out", n] = jnp.full(t.shape, low, t.dtype)
        (sums, held), stacked = jax.lax.scan(one, (start, held), (jnp.arange(count), xs))
        mean = lambda v: v if weight is not None else v / count
        found = {
            n: mean(sums["out", n]) if ways[n] == "mean" else sums["out", n] for n in results if ("out", n) in sums
        }
        for n, v in stacked.items():
            found[n] = v.reshape(-1, *v.shape[2:]) if ways[n] == "concat" else v[-1]
        return [*(mean(sums["grad", n]) for n in leaves), *(found[n] for n in results), *(held[n] for n in held)]

    vars_of = dict(zip(source.in_names, source.jaxpr.jaxpr.invars, strict=True))
    atoms = [vars_of[n] for n in names]
    made = b.inline(inline_calls(small_jaxpr(window, [a.aval for a in atoms])), *atoms)
    grads = dict(zip(leaves, made[: len(leaves)], strict=True))
    return grads, dict(zip(outs, made[len(leaves) :], strict=True))


class _MicroStep:
    """The trainer half of a micro-step, as a function of parameters and batch: gradients, then outputs."""

    def __init__(self, step: Cut, leaves: Sequence[str], outs: Sequence[str]) -> None:
        source = step.program
        vars_of = dict(zip(source.in_names, source.jaxpr.jaxpr.invars, strict=True))
        outs_of = dict(zip(source.out_names, source.jaxpr.jaxpr.outvars, strict=True))
        b = Builder(source.jaxpr)
        b.invars += [vars_of[n] for n in (*step.params, *step.batch)]
        write_trainer_half(b, step, [n for n in outs if n in step.results], lambda leaf, grad: None)
        made: list[Atom] = [*(step.gradients[n] for n in leaves), *(outs_of[n] for n in outs)]
        self.types = [a.aval for a in made]
        self._fn: Callable[..., list[Any]] = jaxpr_as_fun(b.build(made))

    def __call__(self, *arrays: Any) -> list[Any]:
        return self._fn(*arrays)
