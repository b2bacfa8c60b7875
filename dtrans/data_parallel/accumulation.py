"""A trainer's part of the batch, taken in micro-steps: a scan, without any communication inside.

    accumulate    scan: forward, backward, add up         --> one gradient, results
    local steps   scan: forward, backward, optimize       --> parameters and optimizer state, results

Parameters that trainers make (batch statistics), and in local steps all state, go from micro-step
to micro-step; a key is folded with the number of the micro-step.

Source of local steps: Stich, Local SGD Converges Fast and Communicates Little (arXiv 1805.09767);
that the optimizer's state is averaged as well: Yu, Jin, Yang (arXiv 1905.03817). In Paddle,
transpiler/collective.py: `LocalSGD`, which leaves the optimizer's state to each trainer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import Atom, ClosedJaxpr, closed_with, jaxpr_as_fun, opened, small_jaxpr
from dtrans.batch.precomputed_micro_steps import PrecomputedMicroSteps
from dtrans.data_parallel.options import Options
from dtrans.data_parallel.reducer import clipped
from dtrans.errors import BatchError
from dtrans.ir.array_fns import in_one, parts_of, sum_type
from dtrans.ir.builder import Builder
from dtrans.ir.inline import inline_calls
from dtrans.ir.program import BACKWARD, FORWARD, Program
from dtrans.ir.pytree import is_under, unused_name
from dtrans.step.cut import GRAD, Cut, cut
from dtrans.step.forward_backward import write_trainer_half


Outputs = tuple[dict[str, Atom], dict[str, Atom]]  # by name; and gradients, by leaf


@dataclasses.dataclass(frozen=True)
class MicroSteps:
    """Micro-steps of a trainer.

    Attributes:
      count: how many there are.
      reduce: how their gradients are combined: "mean" or "sum".
      ways: how each of their results is merged: "mean", "sum", "max", "concat", or "same" (the last
        one).
      example_count: the result that weights means over micro-steps; it is itself added up.
      axes: the dimension along which each array of the batch is cut; every micro-step gets others
        whole.
      keys: names of keys of the batch that are folded with the number of the micro-step.
      joined: the dimension along which a result that is "concat" is joined, where that is not the
        first.
      carried: parameters that trainers make and that go from micro-step to micro-step, as batch
        statistics of each do; others are made of those before the step, and merged as results are.
      given: what micro-steps are given of the whole batch, if anything.
      clip_norm: the norm that the gradients of each are clipped to, if they are.
      noun: what a trainer is called in errors.
    """

    count: int
    reduce: str
    ways: Mapping[str, str]
    example_count: str | None
    axes: Mapping[str, int]
    keys: Sequence[str]
    joined: Mapping[str, int]
    carried: Sequence[str]
    given: PrecomputedMicroSteps | None
    clip_norm: float | None
    noun: str

    @classmethod
    def of(cls, step: Cut, o: Options, merges: Mapping[str, str]) -> MicroSteps:
        """Return the micro-steps of a trainer with these options."""
        types = step.program.inputs
        own = [n for n in step.batch if not is_under(n, o.batch.unsplit_inputs)]
        shared = o.shared
        axes = {n: 0 for n in own if types[n].ndim} if shared is None else shared.axes
        keys = [
            n
            for n in own
            if jnp.issubdtype(types[n].dtype, jax.dtypes.prng_key) and not types[n].ndim
        ]
        joined = {} if shared is None else shared.joined
        carried = [n for n in step.frozen if n in merges] if shared is None else []
        reduce, count = o.reduce.op or "mean", o.batch.example_count
        clip_norm = o.reduce.clip_of_each(o.num_micro_batch)
        return cls(
            o.micro_steps,
            reduce,
            merges,
            count,
            axes,
            keys,
            joined,
            carried,
            o.given,
            clip_norm,
            o.noun,
        )


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
      half: writes a micro-step where that is not just the trainer half: takes the inputs of
        `given`, each by a variable of its own, behind all others, and returns results and
        parameters that trainers make by name, and gradients.

    Returns:
      Outputs by name, and gradients by leaf.

    Raises:
      BatchError: rows that the micro-steps do not divide.
    """
    micro = cut(_micro_program(step.program, window)).with_reported()
    if not step.early:  # those of parameters alone are called once, behind all micro-steps
        micro = dataclasses.replace(micro, observers=())
    merged = [*results, *(n for n in step.frozen if n in window.ways and n not in window.carried)]
    source = micro.program
    vars_of = source.invars
    outs_of: dict[str, Atom] = source.outvars
    grads: Mapping[str, Atom] = micro.gradients
    inner = Builder(source.jaxpr)
    given = given or {}
    names = [n for n in (*micro.params, *micro.state_read, *micro.batch) if n not in given] + list(
        given
    )
    inner.invars += [vars_of[n] for n in names if n not in given]
    if half is None:
        write_trainer_half(inner, micro, results, lambda leaf, grad: None)
    else:
        made, grads = half(inner, micro)
        outs_of |= made
    if window.clip_norm is not None:
        inner.role = BACKWARD
        grads = dict(
            zip(grads, inner.call(clipped(float(window.clip_norm)), *grads.values()), strict=True)
        )
    called = {n: unused_name(n + GRAD, outs_of) for n in step.gradients}
    outs_of |= {name: grads[n] for n, name in called.items()}
    ways = dict.fromkeys(called.values(), window.reduce) | {n: window.ways[n] for n in merged}
    outs = [*ways, *window.carried]
    body = _Body(inner.build([outs_of[n] for n in outs]), names, outs)
    given = {**given, **_given_first(b, step, window)}
    found = _scanned(b, step, names, body, ways, window.carried, window, given)
    return found, {n: found.pop(name) for n, name in called.items()}


def write_local_steps(b: Builder, step: Cut, window: MicroSteps) -> dict[str, Atom]:
    """Write whole steps of a trainer by itself, one after the other; arguments and errors as
    `write_micro_steps`.

    Returns:
      All outputs of the step by name: parameters and optimizer state are those after the last step.
    """
    micro = _micro_program(step.program, window)
    state = [*step.params, *step.opt_state]
    ways = {n: window.ways[n] for n in step.results}
    outs = [*ways, *state]
    outs_of = micro.outvars
    names = list(micro.in_names)
    body = _Body(closed_with(micro.jaxpr, outvars=[outs_of[n] for n in outs]), names, outs)
    return _scanned(b, step, names, body, ways, state, window)


def _micro_program(source: Program, window: MicroSteps) -> Program:
    """Return the step, traced for a micro-step's part of the batch."""
    types = [*micro_types(source, window.axes, window.count, window.noun).values()]
    return source.specialize_flat(types) if window.given is None else window.given.micro_step(types)


def _given_first(b: Builder, step: Cut, window: MicroSteps) -> dict[str, Atom]:
    """Write what micro-steps are given of the whole batch, by name: a trainer's rows of it, or
    all."""
    if window.given is None:
        return {}
    source = step.program
    made = window.given.of_trainer(
        [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in source.inputs.values()]
    )
    b.role = FORWARD
    values = b.inline(made.jaxpr, *(source.invars[n] for n in made.in_names))
    return dict(zip(made.out_names, values, strict=True))


def micro_types(
    source: Program, axes: Mapping[str, int], count: int, noun: str
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the types of a micro-step's inputs.

    Args:
      axes: the dimension along which each array of the batch is cut.
      noun: what a trainer is called in errors.

    Raises:
      BatchError: rows that the micro-steps do not divide.
    """
    types = {}
    for n, t in source.inputs.items():
        shape = t.shape
        if n in axes:
            at, rows = axes[n], shape[axes[n]]
            if rows % count:
                raise BatchError(
                    f"{n} has {rows} rows on each {noun}, which {count} micro-steps do not divide"
                )
            shape = (*shape[:at], rows // count, *shape[at + 1 :])
        types[n] = jax.ShapeDtypeStruct(shape, t.dtype)
    return types


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
    count, example_count = window.count, window.example_count
    split = [n for n in names if n in window.axes]
    added = [n for n, way in ways.items() if way in ("mean", "sum")]
    largest = [n for n, way in ways.items() if way == "max"]
    others = [n for n in ways if n not in added and n not in largest]

    def scan(*arrays: Any) -> list[Any]:
        values = dict(zip(names, arrays, strict=True))
        rows = {n: parts_of(values[n], window.axes[n], count) for n in split}

        def one(carry: Any, x: tuple[Any, dict[str, Any]]) -> Any:
            so_far, state = carry
            index, parts = x
            folded = {n: jax.random.fold_in(values[n], index) for n in window.keys}
            made = body({**values, **state, **folded, **parts})
            by = None if example_count is None else jnp.asarray(made[example_count])
            new = {}
            for n in added:
                part = jnp.asarray(made[n]).astype(so_far[n].dtype)
                if (
                    by is not None and ways[n] == "mean"
                ):  # what counts for nothing may be nothing over nothing
                    part = jnp.where(by == 0, jnp.zeros_like(part), part * by.astype(part.dtype))
                new[n] = so_far[n] + part
            for n in largest:
                new[n] = jnp.maximum(so_far[n], made[n])
            return (new, {n: made[n] for n in carried}), {n: made[n] for n in others}

        wide = {n: sum_type(t.dtype) for n, t in body.types.items()}
        start = {n: jnp.zeros(body.types[n].shape, wide[n]) for n in added}
        start |= {n: _lowest(body.types[n]) for n in largest}
        (found, state), rest = jax.lax.scan(
            one, (start, {n: values[n] for n in carried}), (jnp.arange(count), rows)
        )
        total = (
            count
            if example_count is None
            else jnp.where(
                found[example_count] == 0, jnp.ones_like(found[example_count]), found[example_count]
            )
        )
        found |= {n: found[n] / jnp.asarray(total, wide[n]) for n in added if ways[n] == "mean"}
        found |= {n: found[n].astype(body.types[n].dtype) for n in added}
        for n, v in rest.items():
            found[n] = in_one(v, window.joined.get(n, 0)) if ways[n] == "concat" else v[-1]
        return [found[n] for n in ways] + [state[n] for n in carried]

    vars_of = step.program.invars
    atoms = [given[n] if given and n in given else vars_of[n] for n in names]
    made = b.inline(inline_calls(small_jaxpr(scan, [a.aval for a in atoms])), *atoms)
    return dict(zip((*ways, *carried), made, strict=True))


def _lowest(t: Any) -> jax.Array:
    """Return an array of the least value of a type."""
    if jnp.issubdtype(t.dtype, jnp.bool_):
        return jnp.zeros(t.shape, t.dtype)
    return jnp.full(
        t.shape,
        -jnp.inf if jnp.issubdtype(t.dtype, jnp.inexact) else jnp.iinfo(t.dtype).min,
        t.dtype,
    )
