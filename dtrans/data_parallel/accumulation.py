"""A trainer's part of the batch, taken in micro-steps: a scan, without any communication inside.

    accumulate    scan: forward, backward, add up         --> one gradient, results
    local steps   scan: forward, backward, optimize       --> parameters and optimizer state, results

Parameters that trainers make (batch statistics), and in local steps all state, go from micro-step to micro-step; a key
is folded with the number of the micro-step.

Source of local steps: Stich, Local SGD Converges Fast and Communicates Little (arXiv 1805.09767); that the optimizer's
state is averaged as well: Yu, Jin, Yang (arXiv 1905.03817). In Paddle, transpiler/collective.py: `LocalSGD`, which
leaves the optimizer's state to each trainer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import Atom, ClosedJaxpr, jaxpr_as_fun, opened, small_jaxpr
from dtrans.errors import BatchError
from dtrans.ir.builder import Builder
from dtrans.ir.inline import inline_calls
from dtrans.ir.program import Program
from dtrans.ir.pytree import unused_name
from dtrans.step.cut import GRAD, Cut, cut
from dtrans.step.forward_backward import write_trainer_half


Outputs = tuple[dict[str, Atom], dict[str, Atom]]  # by name; and gradients, by leaf


@dataclasses.dataclass(frozen=True)
class MicroSteps:
    """Micro-steps of a trainer.

    Attributes:
      count: how many there are.
      reduce: how their gradients are combined: "mean" or "sum".
      ways: how each of their results is merged: "mean", "sum", "max", "concat", or "same" (the last one).
      example_count: the result that weights means over micro-steps; it is itself added up.
      whole: names of batch arrays that every micro-step gets whole.
    """

    count: int
    reduce: str
    ways: Mapping[str, str]
    example_count: str | None
    whole: Collection[str]


def write_micro_steps(
    b: Builder,
    step: Cut,
    window: MicroSteps,
    results: Sequence[str],
    given: Mapping[str, Atom] | None = None,
    half: Callable[[Builder, Cut], Outputs] | None = None,
) -> Outputs:
    """Write forward and backward of all micro-steps, on the same parameters.

    Args:
      b: that they are written with; it has the step's inputs.
      results: the outputs that are wanted, beside the parameters that trainers make.
      given: inputs that are not the step's own variables, by name.
      half: writes a micro-step where that is not just the trainer half: takes the inputs of `given`, each by a variable
        of its own, behind all others, and returns results and parameters that trainers make by name, and gradients.

    Returns:
      Outputs by name, and gradients by leaf.

    Raises:
      BatchError: rows that the micro-steps do not divide.
    """
    micro = cut(_micro_program(step.program, step.batch, window)).with_reported()
    held = [n for n in step.frozen if n in window.ways]
    source = micro.program
    vars_of = source.invars
    outs_of: dict[str, Atom] = source.outvars
    grads: Mapping[str, Atom] = micro.gradients
    inner = Builder(source.jaxpr)
    given = given or {}
    names = [n for n in (*micro.params, *micro.batch) if n not in given] + list(given)
    inner.invars += [vars_of[n] for n in names if n not in given]
    if half is None:
        write_trainer_half(inner, micro, results, lambda leaf, grad: None)
    else:
        made, grads = half(inner, micro)
        outs_of |= made
    called = {n: unused_name(n + GRAD, outs_of) for n in step.gradients}
    outs_of |= {name: grads[n] for n, name in called.items()}
    ways = dict.fromkeys(called.values(), window.reduce) | {n: window.ways[n] for n in results}
    outs = [*ways, *held]
    body = _Body(inner.build([outs_of[n] for n in outs]), names, outs)
    found = _scanned(b, step, names, body, ways, held, window, given)
    return found, {n: found.pop(name) for n, name in called.items()}


def write_local_steps(b: Builder, step: Cut, window: MicroSteps) -> dict[str, Atom]:
    """Write whole steps of a trainer by itself, one after the other; arguments and errors as `write_micro_steps`.

    Returns:
      All outputs of the step by name: parameters and optimizer state are those after the last step.
    """
    micro = _micro_program(step.program, step.batch, window)
    state = [*step.params, *step.opt_state]
    ways = {n: window.ways[n] for n in step.results}
    outs = [*ways, *state]
    outs_of = micro.outvars
    inner = Builder(micro.jaxpr)
    inner.invars += micro.inner.invars
    for eqn in micro.eqns:
        inner.keep(eqn)
    names = list(micro.in_names)
    return _scanned(b, step, names, _Body(inner.build([outs_of[n] for n in outs]), names, outs), ways, state, window)


def _micro_program(source: Program, batch: Sequence[str], window: MicroSteps) -> Program:
    """The step, traced for a micro-step's part of the batch."""
    types = []
    for n, t in source.inputs.items():
        shape = t.shape
        if _is_split(n, t, batch, window):
            if shape[0] % window.count:
                raise BatchError(
                    f"{n} has {shape[0]} rows on each trainer, which {window.count} micro-steps do not divide"
                )
            shape = (shape[0] // window.count, *shape[1:])
        types.append(jax.ShapeDtypeStruct(shape, t.dtype))
    return source.specialize_flat(types)


def _is_split(name: str, t: Any, batch: Collection[str], window: MicroSteps) -> bool:
    return name in batch and bool(t.ndim) and name not in window.whole


class _Body:
    """A micro-step as a function of arrays by name."""

    def __init__(self, jaxpr: ClosedJaxpr, ins: Sequence[str], outs: Sequence[str]) -> None:
        self.types = dict(zip(outs, [a.aval for a in opened(jaxpr).outvars], strict=True))
        self._ins, self._outs = ins, outs
        self._fn: Callable[..., list[Any]] = jaxpr_as_fun(jaxpr)

    def __call__(self, given: Mapping[str, Any]) -> dict[str, Any]:
        return dict(zip(self._outs, self._fn(*(given[n] for n in self._ins)), strict=True))


def _scanned(
    b: Builder,
    step: Cut,
    names: Sequence[str],
    body: _Body,
    ways: Mapping[str, str],
    carried: Sequence[str],
    window: MicroSteps,
    given: Mapping[str, Atom] | None = None,
) -> dict[str, Atom]:
    """Write the scan.

    Args:
      names: of the inputs of a micro-step.
      ways: how outputs are merged; by name.
      carried: the outputs that are inputs of the next micro-step.
      given: inputs that are not the step's own variables, by name.
    """
    types, count, example_count = step.program.inputs, window.count, window.example_count
    split = [n for n in names if _is_split(n, types[n], step.batch, window)]
    keys = [
        n
        for n in step.batch
        if jnp.issubdtype(types[n].dtype, jax.dtypes.prng_key) and not types[n].ndim and n not in window.whole
    ]
    added = [n for n, way in ways.items() if way in ("mean", "sum")]
    largest = [n for n, way in ways.items() if way == "max"]
    others = [n for n in ways if n not in added and n not in largest]

    def scan(*arrays: Any) -> list[Any]:
        values = dict(zip(names, arrays, strict=True))
        rows = {n: values[n].reshape(count, -1, *values[n].shape[1:]) for n in split}

        def one(carry: Any, x: tuple[Any, dict[str, Any]]) -> Any:
            so_far, state = carry
            index, parts = x
            folded = {n: jax.random.fold_in(values[n], index) for n in keys}
            made = body({**values, **state, **folded, **parts})
            by = None if example_count is None else jnp.asarray(made[example_count])
            new = {}
            for n in added:
                part = jnp.asarray(made[n]).astype(so_far[n].dtype)
                if by is not None and ways[n] == "mean":  # what counts for nothing may be nothing over nothing
                    part = jnp.where(by == 0, jnp.zeros_like(part), part * by.astype(part.dtype))
                new[n] = so_far[n] + part
            for n in largest:
                new[n] = jnp.maximum(so_far[n], made[n])
            return (new, {n: made[n] for n in carried}), {n: made[n] for n in others}

        # a type of 16 bits may be too small for a sum
        wide = {n: jnp.float32 if _is_small(t.dtype) else t.dtype for n, t in body.types.items()}
        start = {n: jnp.zeros(body.types[n].shape, wide[n]) for n in added}
        start |= {n: _lowest(body.types[n]) for n in largest}
        (found, state), rest = jax.lax.scan(one, (start, {n: values[n] for n in carried}), (jnp.arange(count), rows))
        total = (
            count
            if example_count is None
            else jnp.where(found[example_count] == 0, jnp.ones_like(found[example_count]), found[example_count])
        )
        found |= {n: found[n] / jnp.asarray(total, wide[n]) for n in added if ways[n] == "mean"}
        found |= {n: found[n].astype(body.types[n].dtype) for n in added}
        for n, v in rest.items():
            found[n] = v.reshape(-1, *v.shape[2:]) if ways[n] == "concat" else v[-1]
        return [found[n] for n in ways] + [state[n] for n in carried]

    vars_of = step.program.invars
    atoms = [(given or {}).get(n, vars_of[n]) for n in names]
    made = b.inline(inline_calls(small_jaxpr(scan, [a.aval for a in atoms])), *atoms)
    return dict(zip((*ways, *carried), made, strict=True))


def _is_small(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.finfo(dtype).bits < 32


def _lowest(t: Any) -> jax.Array:
    """What any value of a type is at least."""
    if jnp.issubdtype(t.dtype, jnp.bool_):
        return jnp.zeros(t.shape, t.dtype)
    return jnp.full(t.shape, -jnp.inf if jnp.issubdtype(t.dtype, jnp.inexact) else jnp.iinfo(t.dtype).min, t.dtype)
