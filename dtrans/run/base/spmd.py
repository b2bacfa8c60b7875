"""Run the program of one trainer for all trainers: on a mesh, or on one device.

    on_mesh         by `jax.shard_map`: each trainer is a device
    on_one_device   by `jax.vmap`, one call for each axis: one device stands for all trainers

Trainers lie on named axes. Both functions take the sharding of each operand and result as an
`AxisSharding`, and both return a function of the global arrays. Collectives of the program name the
axes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P


Function = Callable[..., Sequence[Any]]
Axes = Sequence[tuple[str, int]]  # names and sizes, the outermost first


@dataclasses.dataclass(frozen=True)
class AxisSharding:
    """Sharding of a value over named axes. Without attributes: every trainer has the whole value.

    Attributes:
      cut: Pairs of a dimension and the axes that it is sharded over; dimensions of one trainer's
        value.
      own: Axes along which each trainer has a value of its own. The global array stacks them on a
        leading dimension.
      first: Axes along which each trainer computes the result, and the first trainer's is taken.
        Along axes that are in no attribute, the results of all trainers must be one value.
    """

    cut: tuple[tuple[int, tuple[str, ...]], ...] = ()
    own: tuple[str, ...] = ()
    first: tuple[str, ...] = ()

    @functools.cached_property
    def spec(self) -> P:
        """Return the sharding of the global array."""
        stacked = bool(self.own)
        along = {dim + stacked: names for dim, names in self.cut}
        if stacked:
            along[0] = self.own
        entries = [along.get(dim, ()) for dim in range(max(along, default=-1) + 1)]
        # P("a") and P(("a",)) are one sharding, and compare different
        return P(*(names if len(names) > 1 else next(iter(names), None) for names in entries))

    @functools.cached_property
    def varies(self) -> frozenset[str]:
        """Return the axes along which trainers have different values."""
        return frozenset(self.own).union(*(names for _, names in self.cut))

    def cut_along(self, dim: int | None, *axes: str) -> AxisSharding:
        """Return the same with one dimension sharded over these axes, and no other; with None, the
        same."""
        if dim is None:
            return self
        others = tuple(entry for entry in self.cut if entry[1] != axes)
        return dataclasses.replace(self, cut=(*others, (dim, axes)))

    def restrict_to(self, axes: Collection[str]) -> AxisSharding:
        """Return the sharding over some of the axes, where the others have size 1 and are in no
        program."""
        known = lambda names: tuple(name for name in names if name in axes)
        return AxisSharding(
            tuple((dim, known(names)) for dim, names in self.cut),
            known(self.own),
            known(self.first),
        )


def on_mesh(
    fn: Function,
    mesh: Mesh,
    ins: Sequence[AxisSharding],
    outs: Sequence[AxisSharding],
    gathered: Collection[int] = (),
) -> Function:
    """Map a function of one trainer over the devices of a mesh.

    Args:
      fn: Function of flat arrays, with collectives over the axes of the mesh.
      ins, outs: Shardings of its operands and results.
      gathered: Positions of results that every device gets whole.
    """

    def one(*args: Any) -> list[Any]:
        found = fn(*(x[0] if sharding.own else x for x, sharding in zip(args, ins, strict=True)))
        stacked = [jnp.asarray(x)[None] if s.own else x for x, s in zip(found, outs, strict=True)]
        return [_gathered(x, outs[k]) if k in gathered else x for k, x in enumerate(stacked)]

    in_specs = tuple(sharding.spec for sharding in ins)
    out_specs = [P() if k in gathered else sharding.spec for k, sharding in enumerate(outs)]
    # check_vma: the equations were traced without varying types, and replay only without the check
    return jax.shard_map(one, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _gathered(x: jax.Array, sharding: AxisSharding) -> jax.Array:
    """Return the global array on every device."""
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
    """Map a function of one trainer over axes that exist on one device only.

    Args:
      fn: Function of flat arrays, with collectives over the axes.
      axes: Names and sizes of the axes, the outermost first. Other axes that shardings name are
        ignored.
      ins, outs: Shardings of its operands and results.
      in_turn: One trainer runs after the other, in the memory of one. The function has no
        collectives then, and every result varies.

    Returns:
      A function of global arrays. It raises ValueError where trainers compute different values of a
      result that should be one value.
    """

    names = {name for name, _ in axes}
    ins, outs = [s.restrict_to(names) for s in ins], [s.restrict_to(names) for s in outs]

    def all_trainers(*args: Any) -> list[Any]:
        mapped: Function = lambda *parts: [jnp.asarray(x) for x in fn(*parts)]
        for name, size in reversed(axes):
            in_axes = tuple(0 if name in sharding.varies else None for sharding in ins)
            # None refuses values that differ
            out_axes = [
                0 if name in sharding.varies.union(sharding.first) else None for sharding in outs
            ]
            if in_turn:
                mapped = _mapped_in_turn(mapped, in_axes, size)
            else:
                mapped = jax.vmap(
                    mapped, in_axes=in_axes, out_axes=out_axes, axis_name=name, axis_size=size
                )
        found = mapped(
            *(_to_leading(x, sharding, axes) for x, sharding in zip(args, ins, strict=True))
        )
        return [_from_leading(x, sharding, axes) for x, sharding in zip(found, outs, strict=True)]

    return all_trainers


def _mapped_in_turn(fn: Function, in_axes: Sequence[int | None], size: int) -> Function:
    """Map a function over the leading dimension of some of its operands, one call after the
    other."""

    def every_turn(*args: Any) -> Any:
        def one(mine: Sequence[Any]) -> Sequence[Any]:
            rest = iter(mine)
            return fn(
                *(x if axis is None else next(rest) for x, axis in zip(args, in_axes, strict=True))
            )

        own = [x for x, axis in zip(args, in_axes, strict=True) if axis is not None]
        if size == 1:
            return [jnp.asarray(x)[None] for x in one([x[0] for x in own])]
        return jax.lax.map(one, own)

    return every_turn


def _to_leading(x: Any, sharding: AxisSharding, axes: Axes) -> Any:
    """Return a global array with a leading dimension for each axis along which trainers have
    different values."""
    sizes, cut = dict(axes), dict(sharding.cut)
    shape = [sizes[name] for name in sharding.own]
    position = {name: k for k, name in enumerate(sharding.own)}
    for dim, size in enumerate(x.shape[bool(sharding.own) :]):
        names = cut.get(dim, ())
        position |= {name: len(shape) + k for k, name in enumerate(names)}
        parts = [sizes[name] for name in names]
        shape += [*parts, size // math.prod(parts)]
    leading = [position[name] for name, _ in axes if name in position]
    return jnp.moveaxis(jnp.reshape(x, shape), leading, range(len(leading)))


def _from_leading(x: Any, sharding: AxisSharding, axes: Axes) -> Any:
    """Return the global array of the values of trainers, as `jax.vmap` stacks them."""
    sizes, cut = dict(axes), dict(sharding.cut)
    mapped = [name for name, _ in axes if name in sharding.varies.union(sharding.first)]
    leading = [name for name in mapped if name in sharding.varies]
    if len(leading) < len(mapped):
        x = x[tuple(slice(None) if name in leading else 0 for name in mapped)]

    order = [leading.index(name) for name in sharding.own]
    shape = [math.prod(sizes[name] for name in sharding.own)] if sharding.own else []
    for dim, size in enumerate(x.shape[len(leading) :]):
        names = cut.get(dim, ())
        order += [*map(leading.index, names), len(leading) + dim]
        shape.append(size * math.prod(sizes[name] for name in names))
    return jnp.reshape(jnp.transpose(x, order), shape)
