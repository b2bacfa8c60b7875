"""Conversion of one trainer's program to a function that computes all trainers' results.

    on_mesh         by `jax.shard_map`: each trainer is a device
    on_one_device   by `jax.vmap`, one call for each axis: one device simulates all trainers

Trainers are arranged along named axes, such as "data" and "model". The collectives of the program
refer to these names. Both functions take an `AxisSharding` for each operand and result of the
program. They return a function of global arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P

from dtrans.ir.selection import number_items, values_at


Function = Callable[..., Sequence[Any]]
Axes = Sequence[tuple[str, int]]  # pairs (name, size), the outermost axis first


@dataclasses.dataclass(frozen=True)
class AxisSharding:
    """Relation between a value of one trainer and a global array, for trainers along named axes.

    Along an axis that is in no attribute, the value is replicated: all trainers must compute the
    same value. For example, `divided=((0, ("data",)),)` means that the trainers along "data" divide
    the rows.

    Attributes:
      divided: pairs (dimension of the value, axes along which trainers divide this dimension).
      stacked: axes along which trainers have different values. The global array stacks them on a
        leading dimension.
      first: axes along which values may differ. The global array is the value of the first trainer.
    """

    divided: tuple[tuple[int, tuple[str, ...]], ...] = ()
    stacked: tuple[str, ...] = ()
    first: tuple[str, ...] = ()

    @functools.cached_property
    def spec(self) -> P:
        """JAX's `PartitionSpec` of the global array."""
        leading = bool(self.stacked)
        along = {dim + leading: names for dim, names in self.divided}
        if leading:
            along[0] = self.stacked
        entries: list[str | tuple[str, ...] | None] = []
        for dim in range(max(along, default=-1) + 1):
            names = along.get(dim, ())
            # P("a") and P(("a",)) are the same sharding, but do not compare equal
            entries.append(names if len(names) > 1 else next(iter(names), None))
        return P(*entries)

    @functools.cached_property
    def varies(self) -> frozenset[str]:
        """Axes along which trainers have different values or different shards."""
        return frozenset(self.stacked).union(*(names for _, names in self.divided))

    def sharded_along(self, dim: int | None, *axes: str) -> AxisSharding:
        """Return a copy of the sharding in which the given axes divide dimension `dim`.

        In the copy, they divide no other dimension.

        Args:
          dim: the dimension; None to return the sharding unchanged.
          *axes: the axes.
        """
        if dim is None:
            return self
        others = tuple(entry for entry in self.divided if entry[1] != axes)
        return dataclasses.replace(self, divided=(*others, (dim, axes)))

    def without(self, axis: str) -> AxisSharding:
        """Return the sharding of the value after a gather over one axis."""
        return dataclasses.replace(self, divided=tuple(c for c in self.divided if c[1] != (axis,)))

    @classmethod
    def from_dims(cls, dims: Mapping[str, int]) -> AxisSharding:
        """Return the sharding of an array that several mesh axes divide.

        Args:
          dims: the dimension that each axis divides, such as `{"data": 0, "model": 1}`.
        """
        sharding = cls()
        for mesh_axis, dim in dims.items():
            sharding = sharding.sharded_along(dim, mesh_axis)
        return sharding

    def restrict_to(self, axes: Collection[str]) -> AxisSharding:
        """Return the sharding with only the axes in `axes`. All other axes must have size 1."""

        def known(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(name for name in names if name in axes)

        divided = tuple((dim, known(names)) for dim, names in self.divided)
        return AxisSharding(divided, known(self.stacked), known(self.first))


def on_mesh(
    fn: Function,
    mesh: Mesh,
    ins: Sequence[AxisSharding],
    outs: Sequence[AxisSharding],
    gathered: Collection[int] = (),
) -> Function:
    """Convert a function of one trainer to a function of all trainers, each on a mesh device.

    Args:
      fn: function of flat arrays, with collectives over the axes of the mesh.
      mesh: the devices, along named axes.
      ins, outs: shardings of the function's operands and results.
      gathered: indices of results to all-gather, so that every device has the full result.

    Returns:
      A function of global arrays.
    """

    def run_device(*args: Any) -> list[Any]:
        # a device has one entry of a stacked array, so remove the leading dimension
        local = []
        for x, sharding in zip(args, ins, strict=True):
            local.append(x[0] if sharding.stacked else x)
        results: list[Any] = []
        for k, (x, sharding) in enumerate(zip(fn(*local), outs, strict=True)):
            if sharding.stacked:
                x = jnp.asarray(x)[None]
            if k in gathered:
                x = _all_gather(x, sharding)
            results.append(x)
        return results

    in_specs = tuple(sharding.spec for sharding in ins)
    out_specs = []
    for k, sharding in enumerate(outs):
        out_specs.append(P() if k in gathered else sharding.spec)
    # disable the check of varying types, because the step was traced without these types
    return jax.shard_map(
        run_device, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def _all_gather(x: jax.Array, sharding: AxisSharding) -> jax.Array:
    """Gather the shards of a result, so that every device has the full array."""
    for dim, names in enumerate(sharding.spec):
        if names is not None:
            x = jax.lax.all_gather(x, names, axis=dim, tiled=True)
    return x


def on_one_device(
    fn: Function,
    axes: Axes,
    ins: Sequence[AxisSharding],
    outs: Sequence[AxisSharding],
    *,
    in_turn: bool = False,
) -> Function:
    """Convert a function of one trainer to a function of all trainers, which one device computes.

    Args:
      fn: function of flat arrays, with collectives over the axes.
      axes: pairs (name, size), the outermost axis first. Shardings may contain further axes, which
        are ignored.
      ins, outs: shardings of the function's operands and results.
      in_turn: True to run one trainer after the other, in the memory of one trainer. The function
        must have no collectives, and its results must be divided or stacked along every axis.

    Returns:
      A function of global arrays. It raises ValueError if a result is replicated along an axis, but
      the trainers along this axis compute different values.
    """
    names = dict(axes).keys()
    ins = [sharding.restrict_to(names) for sharding in ins]
    outs = [sharding.restrict_to(names) for sharding in outs]

    def all_trainers(*args: Any) -> list[Any]:
        mapped: Function = lambda *parts: [jnp.asarray(x) for x in fn(*parts)]
        for name, size in reversed(axes):
            in_axes = tuple(_leading_if(name in sharding.varies) for sharding in ins)
            if in_turn:
                mapped = _map_in_turn(mapped, in_axes, size)
                continue
            # a replicated result has out_axis None, so vmap raises an error if values differ
            out_axes = [_leading_if(name in s.varies.union(s.first)) for s in outs]
            mapped = jax.vmap(
                mapped, in_axes=in_axes, out_axes=out_axes, axis_name=name, axis_size=size
            )
        operands = []
        for x, sharding in zip(args, ins, strict=True):
            operands.append(_to_leading(x, sharding, axes))
        results = []
        for x, sharding in zip(mapped(*operands), outs, strict=True):
            results.append(_from_leading(x, sharding, axes))
        return results

    return all_trainers


def _leading_if(is_mapped: bool) -> int | None:
    return 0 if is_mapped else None


def _map_in_turn(fn: Function, in_axes: Sequence[int | None], size: int) -> Function:
    """Return a function that calls `fn` for each trainer, one after the other.

    Args:
      fn: function of one trainer.
      in_axes: for each operand, 0 if its leading dimension has one entry for each trainer, else
        None.
      size: the number of trainers.
    """

    def run_all(*args: Any) -> Any:
        def run_one(parts: Sequence[Any]) -> Sequence[Any]:
            part = iter(parts)
            operands = []
            for x, axis in zip(args, in_axes, strict=True):
                operands.append(x if axis is None else next(part))
            return fn(*operands)

        split = [x for x, axis in zip(args, in_axes, strict=True) if axis is not None]
        if size == 1:  # one trainer needs no loop
            first = [x[0] for x in split]
            return [jnp.asarray(x)[None] for x in run_one(first)]
        return jax.lax.map(run_one, split)

    return run_all


def _to_leading(x: Any, sharding: AxisSharding, axes: Axes) -> Any:
    """Reshape a global array for `jax.vmap`, which maps over leading dimensions.

    The result has one leading dimension for each axis along which trainers differ. For example, an
    array of shape [8, 3], whose rows 2 trainers divide, gets the shape [2, 4, 3].
    """
    sizes, divided = dict(axes), dict(sharding.divided)
    shape = values_at(sizes, sharding.stacked)
    position = number_items(sharding.stacked)
    for dim, size in enumerate(x.shape[bool(sharding.stacked) :]):
        names = divided.get(dim, ())
        for k, name in enumerate(names):
            position[name] = len(shape) + k
        parts = values_at(sizes, names)
        shape += [*parts, size // math.prod(parts)]
    leading = [position[name] for name, _ in axes if name in position]
    return jnp.moveaxis(jnp.reshape(x, shape), leading, range(len(leading)))


def _from_leading(x: Any, sharding: AxisSharding, axes: Axes) -> Any:
    """Reshape a result of `jax.vmap` to a global array; the inverse of `_to_leading`.

    The value has one leading dimension for each axis along which trainers differ. Along axes in
    `first`, the function selects the value of the first trainer.
    """
    sizes, divided = dict(axes), dict(sharding.divided)
    mapped = [name for name, _ in axes if name in sharding.varies.union(sharding.first)]
    leading = [name for name in mapped if name in sharding.varies]
    if len(leading) < len(mapped):
        index: list[Any] = []
        for name in mapped:
            index.append(slice(None) if name in leading else 0)
        x = x[tuple(index)]

    order = [leading.index(name) for name in sharding.stacked]
    shape = []
    if sharding.stacked:
        shape.append(math.prod(values_at(sizes, sharding.stacked)))
    for dim, size in enumerate(x.shape[len(leading) :]):
        names = divided.get(dim, ())
        order += [*map(leading.index, names), len(leading) + dim]
        shape.append(size * math.prod(values_at(sizes, names)))
    return jnp.reshape(jnp.transpose(x, order), shape)
