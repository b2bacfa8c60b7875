"""Pieces of a program that the devices of one trainer run together.

A trainer may have a mesh of devices. The program of one device is divided into pieces, with
communication between them (`dtrans.run.base.segments`). `map_pieces` maps each piece over the
devices. Between two pieces, a value has one of three layouts:

    divided      a full input of the program. Some of its dimensions are divided: each device gets
                 a part
    replicated   operands and results of communication with other roles, and outputs of the program
    stacked      all other values: parts, partial sums or copies, one for each device
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from dtrans._jax import Primitive, Var
from dtrans.ir.array_fns import padded_to
from dtrans.ir.dataflow import variables
from dtrans.ir.selection import values_at
from dtrans.ops import OVER_AXIS
from dtrans.run.base.segments import Carry, Segments
from dtrans.run.base.spmd import Axes, AxisSharding, Function


REPLICATED = AxisSharding()
# Function of (function of one device, shardings of operands, shardings of results) that returns a
# function of global arrays.
Spread = Callable[[Function, Sequence[AxisSharding], Sequence[AxisSharding]], Function]


def map_pieces(
    pieces: Segments,
    dims: Mapping[str, Mapping[str, int]],
    axes: Axes,
    spread: Spread,
    among_devices: Collection[Primitive],
) -> Segments:
    """Convert the pieces of one device's program to pieces that all devices of a trainer compute.

    Args:
      pieces: the program of one device, divided at its communication with other roles.
      dims: for each divided input, the dimension that each axis divides, such as `{"params/w":
        {"model": 1}}`.
      axes: the axes of the devices.
      spread: function that maps a function of one device over all devices.
      among_devices: the communication primitives that only the devices of one trainer run.

    Returns:
      Pieces that compute with the full inputs of the program.
    """
    shardings: dict[Var, AxisSharding] = {}
    for name, v in pieces.program.invars.items():
        shardings[v] = AxisSharding.from_dims(dims.get(name, {}))
    full = set(variables(pieces.program.inner.outvars))
    for step in pieces.steps:
        if isinstance(step, Carry):
            full.update(variables(step.eqn.invars))

    mapped = []
    names = tuple(name for name, _ in axes)
    stacked = AxisSharding(stacked=names)
    # All devices compute the same full values, but JAX does not know this of values that earlier
    # pieces have stacked.
    equal = AxisSharding(first=names)
    for step in pieces.steps:
        if not isinstance(step, Carry):
            ins = [shardings.get(v, REPLICATED) for v in step.reads]
            differs = any(sharding != REPLICATED for sharding in ins)
            if differs or not step.rules.isdisjoint(OVER_AXIS):
                outs = [equal if v in full else stacked for v in step.makes]
                shardings.update((v, stacked) for v in step.makes if v not in full)
                fn = _with_padding(spread(step.fn, ins, outs), ins, dict(axes))
                rules = step.rules.difference(among_devices)
                step = dataclasses.replace(step, fn=fn, rules=rules)
        mapped.append(step)
    return dataclasses.replace(pieces, steps=tuple(mapped))


def _with_padding(fn: Function, ins: Sequence[AxisSharding], sizes: Mapping[str, int]) -> Function:
    """Return a function that pads its operands, so that all devices get parts of equal size.

    Args:
      fn: function of padded arrays.
      ins: shardings of the operands.
      sizes: sizes of the axes.
    """

    def padded(*args: Any) -> Sequence[Any]:
        operands = []
        for x, sharding in zip(args, ins, strict=True):
            for dim, names in sharding.divided:
                parts = math.prod(values_at(sizes, names))
                x = padded_to(x, dim, -(-x.shape[dim] // parts) * parts)
            operands.append(x)
        return fn(*operands)

    return padded


def place_arrays(
    names: Sequence[str],
    arrays: Sequence[Any],
    dims: Mapping[str, Mapping[str, int]],
    mesh: Mesh,
) -> list[Any]:
    """Put inputs or outputs of a program on a mesh of devices, divided along `dims`.

    If the devices cannot divide a dimension into equal parts, the array is replicated. `map_pieces`
    then pads it.

    Args:
      names: the names of the arrays.
      arrays: the arrays.
      dims: for each divided array, the dimension that each axis divides, as for `map_pieces`.
      mesh: the devices.
    """
    where = []
    for name, x in zip(names, arrays, strict=True):
        of_axis = dims.get(name, {})
        is_even = all(x.shape[dim] % mesh.shape[axis] == 0 for axis, dim in of_axis.items())
        sharding = AxisSharding.from_dims(of_axis) if is_even else REPLICATED
        where.append(NamedSharding(mesh, sharding.spec))
    placed: list[Any] = jax.device_put(list(arrays), where)
    return placed
