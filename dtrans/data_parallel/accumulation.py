"""Micro-steps: each trainer processes its part of the batch in several smaller parts.

    accumulate    scan: forward, backward, add up         --> one gradient, results
    local steps   scan: forward, backward, optimize       --> parameters, optimizer state, results

Accumulation (`num_micro_batch`) saves memory for activations. Local steps (`local_sgd`) save
communication: a trainer takes several complete steps before trainers average their state.

The scan over micro-steps does not communicate. The scan carries the parameters that a trainer
updates locally, such as batch statistics. In local steps, the scan carries all state.
`jax.random.fold_in` gives each micro-step different random keys.

Sources of local steps: Stich, Local SGD Converges Fast and Communicates Little (arXiv 1805.09767);
Yu, Jin, Yang (arXiv 1905.03817), who also average the optimizer's state. Paddle's `LocalSGD`
(transpiler/collective.py) does not average the optimizer's state.
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
from dtrans.errors import BatchError
from dtrans.ir.array_fns import array_type, in_one, is_key, parts_of, sum_type
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import avals
from dtrans.ir.inline import inline_calls
from dtrans.ir.program import BACKWARD, FORWARD, Program
from dtrans.ir.pytree import is_under, unused_name
from dtrans.ir.selection import subset, values_at
from dtrans.step.forward_backward import write_trainer_half
from dtrans.step.halves import GRAD, DividedStep, divide_step
from dtrans.step.local_clip import clip_to_norm


Outputs = tuple[dict[str, Atom], dict[str, Atom]]  # (output name -> value, leaf -> gradient)


@dataclasses.dataclass(frozen=True)
class MicroSteps:
    """Division of a trainer's part of the batch into micro-steps, and merge rules of their outputs.

    Attributes:
      count: the number of micro-steps.
      reduce: the rule that merges gradients of micro-steps: "mean" or "sum".
      ways: maps each result to its merge rule over micro-steps: "mean", "sum", "max", "concat", or
        "same" (the value of the last micro-step).
      example_count: the result that counts examples, and so weights means. Its rule is "sum".
      axes: maps batch arrays to the dimension along which they are split. Other arrays are not
        split.
      keys: random keys of the batch; each micro-step folds its index into them.
      joined: the dimension along which a result with rule "concat" is concatenated (dict by name).
        The default is 0.
      carried: locally updated parameters that the scan carries, such as batch statistics. All other
        locally updated parameters are merged like results: each micro-step reads the value from
        before the step.
      precomputed: the inputs of micro-steps that trainers compute before the scan; None if there
        are none.
      clip_norm: the norm to which the gradients of each micro-step are clipped. None for no clip.
      clip_by: "global_norm" to clip all gradients together, "norm" to clip each one alone.
      noun: the word for a trainer in errors, such as "rank".
    """

    count: int
    reduce: str
    ways: Mapping[str, str]
    example_count: str | None
    axes: Mapping[str, int]
    keys: Sequence[str]
    joined: Mapping[str, int]
    carried: Sequence[str]
    precomputed: PrecomputedMicroSteps | None
    clip_norm: float | None
    clip_by: str
    noun: str

    @classmethod
    def from_options(
        cls, step: DividedStep, options: Options, merges: Mapping[str, str]
    ) -> MicroSteps:
        """Return the number of micro-steps and their merge rules, from the options of the plan.

        Args:
          step: the step of a trainer, divided at its gradients.
          options: the options of the data-parallel strategy.
          merges: the merge rule of each output, such as "mean".
        """
        types, shared = step.program.inputs, options.shared
        axes: Mapping[str, int]
        split = [n for n in step.batch if not is_under(n, options.batch.unsplit_inputs)]
        if shared is None:
            axes = {n: 0 for n in split if types[n].ndim}
            carried = [n for n in step.frozen if n in merges]
        else:
            axes, carried = shared.axes, []
        return cls(
            count=options.micro_steps,
            reduce=options.reduce.op or "mean",
            ways=merges,
            example_count=options.batch.example_count,
            axes=axes,
            keys=[n for n in split if is_key(types[n].dtype) and not types[n].ndim],
            joined={} if shared is None else shared.joined,
            carried=carried,
            precomputed=options.precomputed,
            clip_norm=options.reduce.clip_per_micro_batch(options.num_micro_batch),
            clip_by=options.reduce.clip_local_by,
            noun=options.noun,
        )


def write_micro_steps(
    b: Builder,
    step: DividedStep,
    window: MicroSteps,
    results: Sequence[str],
    inputs: Mapping[str, Atom] | None = None,
    half: Callable[[Builder, DividedStep], Outputs] | None = None,
) -> Outputs:
    """Add equations to a program: a scan over micro-steps, which adds up their gradients.

    A micro-step is the forward and backward pass for some rows. All micro-steps read the same
    parameters. The caller reduces the summed gradients over trainers, once.

    Args:
      b: the builder of the program; it has the step's inputs.
      step: the step of a trainer.
      window: the trainer's micro-steps.
      results: the wanted outputs. Parameters that trainers update locally are returned anyway.
      inputs: values in `b` that replace inputs of the step, by name.
      half: a function (builder, step) that writes one micro-step with another builder. It adds one
        input for each of `inputs`, after all other inputs. It returns two dicts: outputs by name,
        and gradients by leaf. The default is `write_trainer_half`.

    Returns:
      Merged outputs by name, and merged gradients by leaf.

    Raises:
      BatchError: the number of rows is not a multiple of the number of micro-steps.
    """
    micro = divide_step(_micro_program(step.program, window)).with_reported()
    if not step.early:
        # the remaining callbacks only read parameters, so one call after all micro-steps is enough
        micro = dataclasses.replace(micro, observers=())
    source = micro.program
    vars_of = source.invars
    outs_of: dict[str, Atom] = source.outvars
    inputs = dict(inputs or {})
    plain_names = [n for n in (*micro.params, *micro.state_read, *micro.batch) if n not in inputs]
    names = [*plain_names, *inputs]

    # write the body of the scan: one micro-step, from its inputs to results and gradients
    inner = Builder(source.jaxpr)
    inner.invars += values_at(vars_of, plain_names)
    grads: Mapping[str, Atom] = micro.gradients
    if half is None:
        write_trainer_half(inner, micro, results, lambda leaf, grad: None)
    else:
        outputs, grads = half(inner, micro)
        outs_of |= outputs
    if window.clip_norm is not None:
        inner.role = BACKWARD
        clipped = inner.call(clip_to_norm(float(window.clip_norm), window.clip_by), *grads.values())
        grads = dict(zip(grads, clipped, strict=True))

    # the scan also returns gradients, under names that no other output has
    grad_names = {n: unused_name(n + GRAD, outs_of) for n in step.gradients}
    outs_of |= {name: grads[n] for n, name in grad_names.items()}
    merged = [n for n in step.frozen if n in window.ways and n not in window.carried]
    ways = dict.fromkeys(grad_names.values(), window.reduce)
    ways |= subset(window.ways, (*results, *merged))
    outs = [*ways, *window.carried]
    body = _Body(inner.build(values_at(outs_of, outs)), names, outs)

    inputs |= _write_precomputed(b, step, window)
    scan = _Scan(names, body, ways, window.carried, window)
    found = _write_scan(b, step, scan, inputs)
    return found, {n: found.pop(name) for n, name in grad_names.items()}


def write_local_steps(b: Builder, step: DividedStep, window: MicroSteps) -> dict[str, Atom]:
    """Add equations to a program: several steps of one trainer without communication (local SGD).

    Each step reads one part of the trainer's batch, and the state that the previous step returned.
    `write_micro_steps` describes arguments and errors.

    Returns:
      By name: the merged results of all steps, and the parameters and optimizer state after the
      last step.
    """
    micro = _micro_program(step.program, window)
    state = [*step.params, *step.opt_state]
    ways = subset(window.ways, step.results)
    outs = [*ways, *state]
    outs_of = micro.outvars
    names = list(micro.in_names)
    body = _Body(closed_with(micro.jaxpr, outvars=values_at(outs_of, outs)), names, outs)
    return _write_scan(b, step, _Scan(names, body, ways, state, window), {})


def _micro_program(source: Program, window: MicroSteps) -> Program:
    """Trace the step again with the number of rows that one micro-step has."""
    types = [*micro_types(source, window.axes, window.count, window.noun).values()]
    if window.precomputed is None:
        return source.specialize_flat(types)
    return window.precomputed.micro_step(types)


def _write_precomputed(b: Builder, step: DividedStep, window: MicroSteps) -> dict[str, Atom]:
    """Write equations for the values that a trainer computes before its micro-steps.

    A dropout mask is an example. The values depend on the full batch, but on no parameter. Return
    the values by name.
    """
    if window.precomputed is None:
        return {}
    source = step.program
    types = list(map(array_type, source.inputs.values()))
    prelude = window.precomputed.of_trainer(types)
    b.role = FORWARD
    values = b.inline(prelude.jaxpr, *values_at(source.invars, prelude.in_names))
    return dict(zip(prelude.out_names, values, strict=True))


def micro_types(
    source: Program, axes: Mapping[str, int], count: int, noun: str
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the types of a micro-step's inputs, by name: batch arrays have fewer rows.

    Args:
      source: the step of a trainer.
      axes: maps batch arrays to the dimension along which they are split.
      count: the number of micro-steps.
      noun: the word for a trainer in errors.

    Raises:
      BatchError: the number of rows is not a multiple of `count`.
    """
    types = {}
    for n, t in source.inputs.items():
        shape = list(t.shape)
        if n in axes:
            rows = shape[axes[n]]
            if rows % count:
                raise BatchError(
                    f"{n} has {rows} rows on each {noun}, expected a multiple of the {count} "
                    "micro-steps; pass such a batch, or plan fewer micro-steps"
                )
            shape[axes[n]] = rows // count
        types[n] = jax.ShapeDtypeStruct(shape, t.dtype)
    return types


class _Body:
    """One micro-step as a function of arrays by name, which returns arrays by name."""

    def __init__(self, jaxpr: ClosedJaxpr, ins: Sequence[str], outs: Sequence[str]) -> None:
        self.types = dict(zip(outs, avals(opened(jaxpr).outvars), strict=True))
        self._ins, self._outs = ins, outs
        self._fn: Callable[..., list[Any]] = jaxpr_as_fun(jaxpr)

    def __call__(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return dict(zip(self._outs, self._fn(*values_at(values, self._ins)), strict=True))


class _Scan:
    """Function that runs all micro-steps in a scan.

    It returns the merged outputs, then the carried outputs of the last micro-step.

    Args:
      names: the names of the function's arguments, the inputs of a micro-step.
      body: one micro-step.
      ways: maps each output to the rule that merges it.
      carried: outputs that are inputs of the next micro-step.
      window: the description of the micro-steps.
    """

    def __init__(
        self,
        names: Sequence[str],
        body: _Body,
        ways: Mapping[str, str],
        carried: Sequence[str],
        window: MicroSteps,
    ) -> None:
        self.names, self.body, self.window = names, body, window
        self.ways, self.carried = ways, carried
        self.types = body.types
        self.summed: list[str] = []
        self.largest: list[str] = []
        self.stacked: list[str] = []
        for n, way in ways.items():
            if way in ("mean", "sum"):
                self.summed.append(n)
            elif way == "max":
                self.largest.append(n)
            else:
                self.stacked.append(n)
        # 16-bit floats are summed in a wider type, since a large sum would round small terms away
        self.sum_types = {n: sum_type(t.dtype) for n, t in body.types.items()}

    def __call__(self, *arrays: Any) -> list[Any]:
        values = dict(zip(self.names, arrays, strict=True))
        axes, count = self.window.axes, self.window.count
        parts = {n: parts_of(values[n], axes[n], count) for n in self.names if n in axes}

        def run_micro_step(carry: Any, x: tuple[Any, dict[str, Any]]) -> Any:
            merged, state = carry
            index, part = x
            keys = {n: jax.random.fold_in(values[n], index) for n in self.window.keys}
            outputs = self.body({**values, **state, **keys, **part})
            merged = self._merge(merged, outputs)
            return (merged, subset(outputs, self.carried)), subset(outputs, self.stacked)

        start = self._start(), subset(values, self.carried)
        (merged, state), stacks = jax.lax.scan(run_micro_step, start, (jnp.arange(count), parts))
        found = self._finish(merged, stacks)
        outputs = values_at(found, self.ways)
        return outputs + values_at(state, self.carried)

    def _start(self) -> dict[str, jax.Array]:
        """Return the initial value of each sum (zero) and of each maximum (the lowest value)."""
        start: dict[str, jax.Array] = {}
        for n in self.summed:
            start[n] = jnp.zeros(self.types[n].shape, self.sum_types[n])
        for n in self.largest:
            start[n] = _lowest_value(self.types[n])
        return start

    def _merge(self, merged: Mapping[str, Any], outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Add the outputs of one more micro-step to the sums and maxima.

        Args:
          merged: the sums and maxima so far.
          outputs: the outputs of the micro-step.
        """
        weight = None
        if self.window.example_count is not None:
            weight = jnp.asarray(outputs[self.window.example_count])
        found = {}
        for n in self.summed:
            term = jnp.asarray(outputs[n]).astype(merged[n].dtype)
            if weight is not None and self.ways[n] == "mean":
                # drop the mean of a micro-step without examples, which may be 0 / 0
                weighted = term * weight.astype(term.dtype)
                term = jnp.where(weight == 0, jnp.zeros_like(term), weighted)
            found[n] = merged[n] + term
        for n in self.largest:
            found[n] = jnp.maximum(merged[n], outputs[n])
        return found

    def _finish(self, merged: Mapping[str, Any], stacks: Mapping[str, Any]) -> dict[str, Any]:
        """Compute the final outputs from the sums and maxima, and from stacks of outputs.

        Sums become means if the rule is "mean". Concatenated outputs are joined.
        """
        found, total = dict(merged), self._total_weight(merged)
        for n in self.summed:
            if self.ways[n] == "mean":
                found[n] = found[n] / jnp.asarray(total, self.sum_types[n])
        for n in self.summed:
            found[n] = found[n].astype(self.types[n].dtype)
        for n, stack in stacks.items():
            if self.ways[n] == "concat":
                found[n] = in_one(stack, self.window.joined.get(n, 0))
            else:
                found[n] = stack[-1]
        return found

    def _total_weight(self, merged: Mapping[str, Any]) -> Any:
        """Return the divisor of means: the number of micro-steps, or the number of examples."""
        if self.window.example_count is None:
            return self.window.count
        examples = merged[self.window.example_count]
        return jnp.where(examples == 0, jnp.ones_like(examples), examples)


def _write_scan(
    b: Builder, step: DividedStep, scan: _Scan, inputs: Mapping[str, Atom]
) -> dict[str, Atom]:
    """Write the scan over micro-steps into a trainer's program, and return its outputs by name.

    Args:
      b: the builder of the program.
      step: the step of a trainer.
      scan: the scan, as a function of arrays.
      inputs: values in `b` that replace inputs of the step, by name.
    """
    atoms_of = {**step.program.invars, **inputs}
    atoms = values_at(atoms_of, scan.names)
    jaxpr = inline_calls(small_jaxpr(scan, avals(atoms)))
    outputs = b.inline(jaxpr, *atoms)
    return dict(zip((*scan.ways, *scan.carried), outputs, strict=True))


def _lowest_value(t: Any) -> jax.Array:
    """Return an array filled with the lowest value of its type: the start of a maximum."""
    if jnp.issubdtype(t.dtype, jnp.bool_):
        return jnp.zeros(t.shape, t.dtype)
    if jnp.issubdtype(t.dtype, jnp.inexact):
        return jnp.full(t.shape, -jnp.inf, t.dtype)
    return jnp.full(t.shape, jnp.iinfo(t.dtype).min, t.dtype)
