"""The types of what goes from process to process in a step, found without running it.

A process that receives a value knows by them what it has to be, before it makes any memory for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans.protocol.arrivals import ValueType
from dtrans.run.pipeline_parallel.instructions import StepProgram, Transfer


def value_types(
    tape: StepProgram, types: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[int, ValueType]:
    """The type of each transfer, by the number of its instruction, and of each result, by the
    numbers behind these.

    Args:
      types: of the arrays of the state and of the whole batch, by name.
    """
    env: list[Any] = [None] * tape.size
    for slot, x in tape.fixed.items():
        env[slot] = jax.ShapeDtypeStruct(x.shape, x.dtype)
    for (_, name), slot in tape.given.items():
        env[slot] = types[name]
    known: dict[tuple[Any, ...], Any] = {}
    found = {}
    for number, (ins, _) in enumerate(tape.instructions):
        if isinstance(ins, Transfer):
            env[ins.target] = env[ins.source]
            found[number] = of_value(env[ins.source])
            continue
        reads = [env[i] for i in ins.reads]
        key = (ins.fn, *((x.shape, x.dtype) for x in reads))
        if key not in known:
            known[key] = jax.eval_shape(ins.fn, *reads)
        for slot, x in zip(ins.makes, known[key], strict=True):
            env[slot] = x
    return found | {
        len(tape.instructions) + i: of_value(env[slot])
        for i, (slot, _, _) in enumerate(tape.results.values())
    }


def of_value(x: Any, *, any_size: bool = False) -> ValueType:
    """What is to come where another process has such an array, or, with `any_size`, one of as many
    dimensions."""
    impls: list[str] = []

    def data(key: Any) -> Any:
        impls.append(str(jax.random.key_impl(key)))
        return jax.random.key_data(key)

    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.eval_shape(data, jax.ShapeDtypeStruct(x.shape, x.dtype))
    return ValueType(
        (None,) * len(x.shape) if any_size else tuple(x.shape), np.dtype(x.dtype), "".join(impls)
    )
