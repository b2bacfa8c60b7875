"""Gathers of parameters that replicas store as slices (`sharding_stage=3`).

Each program of a stage takes slices of the parameters, and gathers a parameter before the first
equation that reads the parameter. So forward and backward gather each parameter separately, and a
stage stores no complete parameter between two tasks. But a stage may compute other values of full
size from a parameter, such as residuals of a loop, and store them between tasks. With the schedule
ZeroBubble, the backward pass may leave such a value for the task that computes gradients of
weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from dtrans._jax import Atom, Var
from dtrans.engine.layout import Sliced
from dtrans.ir.builder import Builder, read_from
from dtrans.ir.dataflow import variables
from dtrans.ir.program import Program
from dtrans.ops import all_gather_p
from dtrans.pipeline_parallel.options import AXIS
from dtrans.pipeline_parallel.stage_programs import StagePrograms, with_jaxpr


def gather_params(stage: StagePrograms, slices: Mapping[str, Sliced]) -> StagePrograms:
    """Rewrite the programs of a stage for parameters that replicas store as slices.

    Args:
      stage: the programs, which read complete parameters.
      slices: the slices of each sliced parameter (dict by parameter).
    """
    weights = stage.weights
    return dataclasses.replace(
        stage,
        forward=_with_gathers(stage.forward, slices),
        backward=_with_gathers(stage.backward, slices),
        weights=None if weights is None else _with_gathers(weights, slices),
    )


def _with_gathers(p: Program, slices: Mapping[str, Sliced]) -> Program:
    """Return a program that takes slices of the parameters in `slices`, and gathers them."""
    b = Builder(p.jaxpr)
    inner = p.inner
    values: dict[Var, Atom] = {}  # parameter -> its slice, and later the gathered parameter
    waiting: dict[Atom, tuple[str, Sliced]] = {}
    for n, v in p.invars.items():
        if n in slices:
            values[v] = b.input(slices[n].rank_type(v.aval))
            waiting[v] = n, slices[n]
        else:
            b.invars.append(v)

    def gather(atoms: list[Atom]) -> list[Atom]:
        """Write the gathers that these operands need; return the operands in the new program."""
        for a in variables(atoms):
            if a not in waiting:
                continue
            n, s = waiting.pop(a)
            (full,) = b.bind(
                all_gather_p, values[a], name=n, over=(AXIS,), size=s.degree, axis=s.axis
            )
            values[a] = b.trim(full, s.axis, s.size)
        return read_from(values, atoms)

    for eqn in inner.eqns:
        b.keep(eqn, gather(list(eqn.invars)))
    return with_jaxpr(p, b.build(gather(list(inner.outvars))))
