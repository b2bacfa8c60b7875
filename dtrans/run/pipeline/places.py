"""Where a stage is: the devices of its replicas, or one device on which replicas are simulated.

A value of a stage is of one of these kinds:

    SAME        every replica has the same
    EACH        every replica has its own: behind a leading axis of the size of the replicas
    ROWS        of the batch: rows 0 to B/R are replica 0's, and so on
    Cut(axis)   slices of one array along a dimension, replica by replica

With one replica there is no axis, and programs are compiled as they are.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

from dtrans._jax import ClosedJaxpr, jaxpr_as_fun
from dtrans.transforms.pipeline_options import AXIS


@dataclasses.dataclass(frozen=True)
class Kind:
    """How replicas have a value; see the module."""

    name: str
    axis: int | None = None


SAME, EACH, ROWS = Kind("same"), Kind("each"), Kind("rows")


def cut_along(axis: int) -> Kind:
    """Slices along a dimension."""
    return Kind("cut", axis)


Function = Callable[..., Sequence[Any]]


class Places(abc.ABC):
    """Where stages are.

    Attributes:
      replicas: how many each has.
      known: what has been compiled, by what it is of.
    """

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self.known: dict[Any, Function] = {}

    @abc.abstractmethod
    def put(self, x: Any, stage: int, kind: Kind) -> Any:
        """A value where a stage has it."""

    @abc.abstractmethod
    def where(self, stage: int, kind: Kind) -> Any:
        """The sharding of such a value."""

    @abc.abstractmethod
    def startup(self, jaxpr: ClosedJaxpr, stage: int) -> Function:
        """What makes a stage's part of the first state, compiled; every replica makes the same."""

    @abc.abstractmethod
    def compiled(
        self, fn: Function, stage: int, ins: Sequence[Kind], outs: Sequence[Kind], donated: Sequence[int] = ()
    ) -> Function:
        """A function of one replica, compiled for those of a stage.

        Args:
          fn: of flat arrays; collectives are over the axis of replicas.
          donated: positions of operands whose memory may be reused.
        """


class OnDevices(Places):
    """Each stage on devices of its own, one for each replica.

    Args:
      grids: by stage, its devices.
    """

    def __init__(self, grids: Sequence[Sequence[jax.Device]]) -> None:
        super().__init__(len(grids[0]))
        self.grids = [list(grid) for grid in grids]
        self._meshes = [Mesh(np.array(grid), (AXIS,)) for grid in self.grids]
        self._where: dict[tuple[int, Kind], Any] = {}

    def put(self, x: Any, stage: int, kind: Kind) -> Any:
        return jax.device_put(x, self.where(stage, kind))

    def where(self, stage: int, kind: Kind) -> Any:
        place = stage % len(self.grids)
        known = self._where.get((place, kind))
        if known is None:
            one = self.replicas == 1
            known = (
                SingleDeviceSharding(self.grids[place][0]) if one else NamedSharding(self._meshes[place], _spec(kind))
            )
            self._where[place, kind] = known
        return known

    def startup(self, jaxpr: ClosedJaxpr, stage: int) -> Function:
        return jax.jit(jaxpr_as_fun(jaxpr), out_shardings=self.where(stage, SAME))

    def compiled(
        self, fn: Function, stage: int, ins: Sequence[Kind], outs: Sequence[Kind], donated: Sequence[int] = ()
    ) -> Function:
        if self.replicas == 1:
            where = SingleDeviceSharding(self.grids[stage % len(self.grids)][0])
            return jax.jit(fn, donate_argnums=tuple(donated), out_shardings=where)

        def one(*args: Any) -> list[Any]:
            made = fn(*(x[0] if k == EACH else x for x, k in zip(args, ins, strict=True)))
            return [x[None] if k == EACH else x for x, k in zip(made, outs, strict=True)]

        # check_vma: the equations were traced without varying types, and replay only without the check
        mapped = jax.shard_map(
            one,
            mesh=self._meshes[stage % len(self.grids)],
            in_specs=tuple(map(_spec, ins)),
            out_specs=list(map(_spec, outs)),
            check_vma=False,
        )
        return jax.jit(mapped, donate_argnums=tuple(donated))


def _spec(kind: Kind) -> P:
    if kind.axis is not None:
        return P(*[None] * kind.axis, AXIS)
    return P() if kind == SAME else P(AXIS)


class OneDevice(Places):
    """All stages on one device, replicas by `jax.vmap`."""

    def put(self, x: Any, stage: int, kind: Kind) -> Any:
        return jnp.asarray(x) if not isinstance(x, jax.Array) else x

    def where(self, stage: int, kind: Kind) -> Any:
        return None

    def startup(self, jaxpr: ClosedJaxpr, stage: int) -> Function:
        return jax.jit(jaxpr_as_fun(jaxpr))

    def compiled(
        self, fn: Function, stage: int, ins: Sequence[Kind], outs: Sequence[Kind], donated: Sequence[int] = ()
    ) -> Function:
        if self.replicas == 1:
            return jax.jit(fn)
        count = self.replicas

        def split(x: jax.Array, kind: Kind) -> jax.Array:
            if kind.axis is None:
                return x.reshape(count, -1, *x.shape[1:]) if kind == ROWS else x
            a = kind.axis
            return jnp.moveaxis(x.reshape(*x.shape[:a], count, x.shape[a] // count, *x.shape[a + 1 :]), a, 0)

        def joined(x: jax.Array, kind: Kind) -> jax.Array:
            if kind.axis is None:
                return x
            back = jnp.moveaxis(x, 0, kind.axis)
            return back.reshape(*back.shape[: kind.axis], -1, *back.shape[kind.axis + 2 :])

        mapped = jax.vmap(
            lambda *args: list(fn(*args)),
            in_axes=tuple(None if k == SAME else 0 for k in ins),
            out_axes=[None if k == SAME else 0 for k in outs],  # refuses what is not the same in all replicas
            axis_name=AXIS,
            axis_size=count,
        )

        def all_of(*args: Any) -> list[Any]:
            made = mapped(*(split(x, k) for x, k in zip(args, ins, strict=True)))
            return [joined(x, k) for x, k in zip(made, outs, strict=True)]

        return jax.jit(all_of)
