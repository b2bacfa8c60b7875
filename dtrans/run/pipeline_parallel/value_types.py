"""Shapes and dtypes of the values that processes send to each other in a step.

They are computed without running the step (`jax.eval_shape`). Before a receiver allocates memory,
it compares the type in a message with the expected type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans.ir.array_fns import array_type
from dtrans.ir.selection import values_at
from dtrans.protocol.collective.arrivals import ValueType
from dtrans.run.pipeline_parallel.instructions import StepProgram, Transfer


def value_types(
    program: StepProgram, types: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[int, ValueType]:
    """Return the types of transferred values and results, by their keys in messages.

    The key of a transferred value is the index of the instruction. The keys of results are the
    integers after the last instruction.

    Args:
      program: the instructions of the step.
      types: shape and dtype of each array of the state and of the global batch, by name.
    """
    env: list[Any] = [None] * program.size
    for slot, x in program.fixed.items():
        env[slot] = array_type(x)
    for (_, name), slot in program.inputs.items():
        env[slot] = types[name]
    known: dict[tuple[Any, ...], Any] = {}
    found = {}
    for number, (ins, _) in enumerate(program.instructions):
        if isinstance(ins, Transfer):
            env[ins.target] = env[ins.source]
            found[number] = value_type(env[ins.source])
            continue
        reads = values_at(env, ins.reads)
        # All micro-batches run the same function with equal types, so it is evaluated only once.
        key = (ins.fn, *((x.shape, x.dtype) for x in reads))
        if key not in known:
            known[key] = jax.eval_shape(ins.fn, *reads)
        for slot, x in zip(ins.writes, known[key], strict=True):
            env[slot] = x
    for number, (slot, _, _) in enumerate(program.results.values(), len(program.instructions)):
        found[number] = value_type(env[slot])
    return found


def value_type(x: Any, *, any_size: bool = False) -> ValueType:
    """Return the `ValueType` of an array.

    Args:
      x: the array, or its abstract value.
      any_size: True if the sender may choose the size of each dimension.
    """
    impls: list[str] = []

    def data(key: Any) -> Any:
        impls.append(str(jax.random.key_impl(key)))
        return jax.random.key_data(key)

    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.eval_shape(data, array_type(x))
    shape = (None,) * len(x.shape) if any_size else tuple(x.shape)
    return ValueType(shape, np.dtype(x.dtype), "".join(impls))
