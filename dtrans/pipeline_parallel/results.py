"""Merge of results: first over the micro-batches of each replica, then over replicas.

A result has one of these merge rules:

    mean, sum, max    reduces over micro-batches, then over replicas
    concat            concatenates rows in the order of the batch: all micro-batches of replica 0,
                      then all micro-batches of replica 1, ...
    same              takes the value of the last micro-batch of each replica
    each              keeps one value for each replica
    GLOBAL_MEAN, ...  a rule that the user chose with `dtrans.collect`. With a LOCAL_* rule, the
                      result is the value of replica 0
    stack             stacks all values as [replica, micro-batch, ...], for `dtrans.summary`

Source: `merge_outputs` of EPL (epl/parallel/parallel.py), with two differences. EPL puts the first
micro-batch last in a concatenation. EPL also reduces means and sums of any shape to scalars.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import Atom, ClosedJaxpr
from dtrans.data_parallel.options import REDUCED
from dtrans.data_parallel.reducer import Reducer
from dtrans.errors import ConfigError
from dtrans.ir.array_fns import sum_type
from dtrans.ir.builder import Builder
from dtrans.ir.program import FORWARD, Program
from dtrans.ir.selection import values_at
from dtrans.pipeline_parallel.options import PipelineOptions
from dtrans.pipeline_parallel.stage_programs import StagePrograms, program_of
from dtrans.step.collect import KEYS, merged


STACK = "stack"


def micro_name(name: str, micro: int) -> str:
    """Return the name of a result's value in one micro-batch, such as "loss.micro3".

    Results are merged over micro-batches at the end of the step.
    """
    return f"{name}.micro{micro}"


def results_program(
    stage: StagePrograms, merges: Mapping[str, str], o: PipelineOptions, like: ClosedJaxpr
) -> Program | None:
    """Return the program that merges the results of a stage; None if the stage has no results.

    Args:
      stage: the programs of the stage.
      merges: maps each result to its merge rule.
      o: the options of the pipeline.
      like: the jaxpr of the forward pass, from which the program takes its constants.
    """
    if not stage.results:
        return None
    types = stage.forward.outputs
    b = Builder(like)
    b.role = FORWARD

    # Merge over the micro-batches of a replica.
    ins: list[str] = []
    local: dict[str, Atom] = {}
    over_replicas: dict[str, str] = {}
    for n in stage.results:
        parts: list[Atom] = [b.input(types[n]) for _ in range(o.num_micro_batch)]
        ins += [micro_name(n, m) for m in range(o.num_micro_batch)]
        way = merges[n]
        if way in KEYS:
            place, _, how = way.partition("_")
            (local[n],) = b.call(_collected(f"LOCAL_{how}"), *parts)
            way = how.lower() if place == "GLOBAL" else "each"
        elif way == STACK:
            (local[n],) = b.call(_stacked, *parts)
        elif len(parts) > 1:
            (local[n],) = b.call(_merged(way, n, o.concat_axes.get(n, 0)), *parts)
        else:
            (local[n],) = parts
        if way in REDUCED:
            over_replicas[n] = way

    # Merge over replicas.
    reduced = Reducer(b, {}, o.over_replicas, None).reduce_results(local, over_replicas, {})
    merged_results = local | reduced
    jaxpr = b.build(values_at(merged_results, stage.results))
    return program_of(f"results of stage {stage.index}", jaxpr, ins, stage.results, FORWARD)


def is_replicated(way: str) -> bool:
    """Return True if the merge rule `way` gives all replicas the same value."""
    return way in REDUCED or way in ("GLOBAL_MEAN", "GLOBAL_SUM")


def _stacked(*parts: jax.Array) -> jax.Array:
    return jnp.stack(parts)


@functools.cache
def _collected(key: str) -> Callable[..., Any]:
    return lambda *parts: merged(key, [parts])


@functools.cache
def _merged(way: str, name: str, axis: int) -> Callable[..., Any]:
    """Return the function that merges the values of one result over micro-batches.

    Args:
      way: the merge rule: "mean", "sum", "max", "concat" or "same".
      name: the name of the result, for errors.
      axis: the dimension along which "concat" concatenates.
    """

    def total(*parts: jax.Array) -> jax.Array:
        return functools.reduce(jnp.add, [p.astype(sum_type(p.dtype)) for p in parts])

    def mean(*parts: jax.Array) -> jax.Array:
        return (total(*parts) / len(parts)).astype(parts[0].dtype)

    def added(*parts: jax.Array) -> jax.Array:
        return total(*parts).astype(parts[0].dtype)

    def largest(*parts: jax.Array) -> jax.Array:
        return functools.reduce(jnp.maximum, parts)

    def joined(*parts: jax.Array) -> jax.Array:
        return jnp.concatenate(parts, axis)

    def last(*parts: jax.Array) -> jax.Array:
        return parts[-1]

    ways = {"mean": mean, "sum": added, "max": largest, "concat": joined, "same": last}
    if way not in ways:
        raise ConfigError(
            f"merge[{name!r}] is {way!r}, which cannot merge values of several micro-batches; use "
            "'concat'"
        )
    return ways[way]


def check_state(merges: Mapping[str, str], params: Sequence[str], o: PipelineOptions) -> None:
    """Raise ConfigError if the user merges new state, such as batch statistics, by "sum".

    Each micro-batch computes new state from the state before the step. A sum would count the old
    state once for each micro-batch.
    """
    for n in params:
        if merges.get(n) == "sum" and o.parts > 1:
            raise ConfigError(
                f"merge[{n!r}] is 'sum', but every micro-batch computes {n} from its value before "
                "the step, and a sum would count that value several times; write "
                f"merge={{{n!r}: 'mean'}} or merge={{{n!r}: 'max'}}"
            )
