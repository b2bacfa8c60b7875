"""Derivative of a stage: the residuals that its forward pass saves, and its backward pass.

Each stage is differentiated separately, with `jax.vjp`. The *residuals* are the values of the
forward pass that the derivative reads. A stage saves its residuals, with three exceptions. It reads
inputs of the stage again. Literals are part of the program. It recomputes values that depend only
on parameters and optimizer state, such as a cast weight.

With checkpoints, a stage saves only these values, and recomputes all other residuals:

  - values with a requested name (`jax.ad_checkpoint.checkpoint_name`)
  - outputs of equations with effects, because these equations must not run twice
  - outputs of collectives
  - values that depend only on random numbers, so that a mask is not drawn twice
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Var,
    checkpoint_name_of,
    closed_with,
    evaluate,
    opened,
    small_jaxpr,
)
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import avals, live_equations, needed_equations, propagate, variables
from dtrans.ir.inline import inline_calls
from dtrans.ir.program import is_communication
from dtrans.ir.selection import exclude, values_at


class StageVjp:
    """Forward and backward pass of a stage.

    Args:
      prelude: jaxpr that computes the values of `reads` from inputs of the step.
      body: jaxpr with the equations of the stage. Its inputs are `reads` and `operands`. Its
        outputs are `outs`, and the loss if the stage computes the loss.
      reads: the inputs of the forward pass that the stage reads.
      received: the values from the previous stage.
      operands: the received values that the stage reads.
      wrt: the variables in `reads` and `operands` for which the backward pass computes cotangents.
      ahead: the outputs to differentiate.
      outs: the outputs that the stage returns.
      in_types: shape and dtype of each input: arrays of the step (state first), then `received`.
      n_state: the number of inputs that are parameters or optimizer state.
      checkpoints: the names of values to save; None to save all residuals.

    Attributes:
      forward: jaxpr from (inputs of the step, `received`) to (`outs`, `saved`).
      backward: jaxpr from (residuals, cotangents of `ahead`) to cotangents of `wrt`.
      saved: the residuals that `forward` returns.
    """

    def __init__(
        self,
        prelude: ClosedJaxpr,
        body: ClosedJaxpr,
        reads: Sequence[Var],
        received: Sequence[Var],
        operands: Sequence[Var],
        wrt: Sequence[Var],
        ahead: Sequence[Atom],
        outs: Sequence[Atom],
        in_types: Sequence[Any],
        n_state: int,
        checkpoints: Collection[str] | None,
    ) -> None:
        self.in_types = in_types
        position: dict[Atom, int] = {}  # output of `body` -> index of the output
        for i, a in enumerate(opened(body).outvars):
            if isinstance(a, Var):
                position[a] = i
        n_step = len(in_types) - len(received)
        structure: list[Any] = []

        def forward(*args: Any) -> list[Any]:
            arrays = [*evaluate(prelude, *args[:n_step]), *args[n_step:]]
            values = dict(zip([*reads, *received], arrays, strict=True))

            def function(*wrt_values: Any) -> tuple[list[Any], list[Any]]:
                local = {**values, **dict(zip(wrt, wrt_values, strict=True))}
                outputs = evaluate(body, *values_at(local, (*reads, *operands)))
                return [outputs[position[a]] for a in ahead], outputs[: len(outs)]

            _, vjp, outputs = jax.vjp(function, *values_at(values, wrt), has_aux=True)
            leaves, tree = jax.tree.flatten(vjp)
            structure.append(tree)
            return [*outputs, *leaves]

        traced = inline_calls(small_jaxpr(forward, in_types))
        inner = opened(traced)
        count = len(outs)
        self._source = traced
        self._residuals: list[Atom] = list(inner.outvars[count:])

        # Residuals that depend on no array of the batch are recomputed. But residuals that depend
        # on an equation with an effect are saved, because the equation must not run twice.
        ins: set[Atom] = {*inner.invars}
        residuals = exclude(variables(self._residuals), ins)
        varying = dict.fromkeys(inner.invars[n_state:], 1)
        effects: dict[Var, int] = {}
        for eqn in inner.eqns:
            if eqn.effects:
                effects |= dict.fromkeys(eqn.outvars, 1)
        of_batch = propagate(inner.eqns, varying, {})
        of_effects = propagate(inner.eqns, effects, {})
        self._again = {a for a in residuals if not of_batch.get(a) and not of_effects.get(a)}
        self.saved: list[Var] = list(dict.fromkeys(exclude(residuals, self._again)))
        if checkpoints is not None:
            self.saved = _barriers(inner, self.saved, ins, checkpoints)
            self._again = set(exclude(residuals, self.saved))

        outvars = [*inner.outvars[:count], *self.saved]
        live = live_equations(inner.eqns, outvars)
        self.forward = closed_with(traced, outvars=outvars, eqns=live)
        tree, n_leaves = structure[-1], len(self._residuals)

        def backward(*args: Any) -> Any:
            return tree.unflatten(args[:n_leaves])(list(args[n_leaves:]))

        types = avals(self._residuals)
        types += [a.aval.update(weak_type=False) for a in ahead]
        self.backward = inline_calls(small_jaxpr(backward, types))

    def names_of_saved(self, outs: Sequence[str], ins: Collection[str]) -> list[str]:
        """Return a name for each saved value.

        A saved value that is also an output has the output's name, unless an input has this name.
        All other saved values are numbered, such as "@residual/0".

        Args:
          outs: the names of the outputs.
          ins: the names of the inputs.
        """
        name_of: dict[Atom, str] = {}
        for n, a in zip(outs, opened(self.forward).outvars, strict=False):
            if isinstance(a, Var) and n not in ins:
                name_of.setdefault(a, n)
        numbers = itertools.count()
        names = []
        for v in self.saved:
            names.append(name_of[v] if v in name_of else f"@residual/{next(numbers)}")
        return names

    def with_outputs(self, outvars: Sequence[Atom]) -> ClosedJaxpr:
        """Return a jaxpr of the forward pass with the outputs `outvars`."""
        return closed_with(self.forward, outvars=outvars)

    def write_backward(
        self, b: Builder, inputs: Sequence[Atom], saved: Sequence[Atom], cotangents: Sequence[Atom]
    ) -> list[Atom]:
        """Write the backward pass; return the cotangents of `wrt`.

        Args:
          b: the builder to write to.
          inputs: the inputs of the stage.
          saved: the saved values.
          cotangents: the cotangents of `ahead`.
        """
        inner = opened(self._source)
        env = dict(zip([*inner.invars, *self.saved], [*inputs, *saved], strict=True))
        again = needed_equations(inner.eqns, self._again, self.saved)
        residuals = b.inline_part(self._source, env, again, self._residuals)
        return b.inline(self.backward, *residuals, *cotangents)


def _barriers(
    inner: Jaxpr, wanted: Sequence[Var], ins: Collection[Atom], names: Collection[str]
) -> list[Var]:
    """Return the values that a stage saves from its forward pass for its backward pass.

    The backward pass recomputes all other residuals from these values and the inputs. The module
    docstring lists the kinds of values that are saved.

    Args:
      inner: the forward pass.
      wanted: the residuals (values that the backward pass reads).
      ins: the inputs, which need not be saved.
      names: the names of values to save.
    """
    producer: dict[Var, JaxprEqn] = {}
    seeds: dict[Var, int] = {}
    drawn, other = 1, 2
    for e in inner.eqns:
        producer |= dict.fromkeys(e.outvars, e)
        if _draws(e):
            seeds |= dict.fromkeys(e.outvars, drawn)
    arrays = [v for v in inner.invars if not jnp.issubdtype(v.aval.dtype, jax.dtypes.prng_key)]
    origin = propagate(inner.eqns, dict.fromkeys(arrays, other), seeds)

    # Walk back from `wanted`, on each path to the first value that must be saved.
    found: dict[Var, None] = {}
    seen: set[Atom] = set()
    stack: list[Atom] = list(wanted)
    while stack:
        v = stack.pop()
        if not isinstance(v, Var) or v in seen or v in ins or v not in producer:
            continue
        seen.add(v)
        eqn = producer[v]
        has_name = checkpoint_name_of(eqn) in names
        if has_name or origin.get(v) == drawn or is_communication(eqn) or eqn.effects:
            found[v] = None
        else:
            stack += eqn.invars
    return list(found)


def _draws(eqn: JaxprEqn) -> bool:
    """Return True if an equation draws random numbers."""
    name = eqn.primitive.name
    return name.startswith(("random_bits", "threefry2x32", "rng_"))
