"""Devices of a pipeline's stages: those of each stage's replicas and shards, or one device that
stands for all.

A value of a stage has one of these shardings:

    SAME             one value for all replicas
    EACH             each replica has a value of its own, stacked on a leading dimension
    ROWS             rows of the batch: rows 0 to B/R belong to replica 0, and so on
    FIRST            replicas compute equal values, and the first one's is taken
    cut_along(axis)  slices of one array along a dimension, one for each replica

Of a split stage each of them may also be cut along a dimension over SPLIT, one piece for each
shard. With one replica and one shard there are no axes, and programs are compiled as they are.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from dtrans._jax import ClosedJaxpr, jaxpr_as_fun
from dtrans.pipeline_parallel.options import AXIS, SPLIT
from dtrans.run.base.batch import on_one_device as put_on_one_device
from dtrans.run.base.spmd import AxisSharding, Function, on_mesh, on_one_device


SAME, EACH = AxisSharding(), AxisSharding(stacked=(AXIS,))
ROWS, FIRST = AxisSharding().cut_along(0, AXIS), AxisSharding(first=(AXIS,))


def cut_along(axis: int) -> AxisSharding:
    """Return the sharding of slices along a dimension, one for each replica."""
    return SAME.cut_along(axis, AXIS)


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
    def put(self, x: Any, stage: int, kind: AxisSharding) -> Any:
        """A value where a stage has it."""

    @abc.abstractmethod
    def startup(self, jaxpr: ClosedJaxpr, stage: int) -> Function:
        """What makes a stage's part of the first state, compiled; every replica makes the same."""

    @abc.abstractmethod
    def compiled(
        self,
        fn: Function,
        stage: int,
        ins: Sequence[AxisSharding],
        outs: Sequence[AxisSharding],
        donated: Sequence[int] = (),
    ) -> Function:
        """A function of one replica, compiled for those of a stage.

        Args:
          fn: of flat arrays; collectives are over the axis of replicas.
          donated: positions of operands whose memory may be reused.
        """


class OnDevices(Places):
    """Each stage on devices of its own, one for each replica, or for each shard of it.

    Args:
      grids: by stage, its devices, as [replica, shard].
    """

    def __init__(self, grids: Sequence[Any]) -> None:
        super().__init__(len(grids[0]))
        self._meshes = [Mesh(np.array(grid), (AXIS, SPLIT)) for grid in grids]
        self._where: dict[tuple[int, AxisSharding], Any] = {}

    def put(self, x: Any, stage: int, kind: AxisSharding) -> Any:
        where = self.where(stage, kind)
        # device_put takes 65 microseconds to find out that there is nothing to do
        return x if isinstance(x, jax.Array) and x.sharding == where else jax.device_put(x, where)

    def where(self, stage: int, kind: AxisSharding) -> Any:
        """The sharding of a value of a stage."""
        place = stage % len(self._meshes)
        known = self._where.get((place, kind))
        if known is None:
            mesh = self._meshes[place]
            alone = mesh.size == 1
            known = (
                SingleDeviceSharding(mesh.devices.item())
                if alone
                else NamedSharding(mesh, kind.spec)
            )
            self._where[place, kind] = known
        return known

    def startup(self, jaxpr: ClosedJaxpr, stage: int) -> Function:
        return jax.jit(jaxpr_as_fun(jaxpr), out_shardings=self.where(stage, SAME))

    def compiled(
        self,
        fn: Function,
        stage: int,
        ins: Sequence[AxisSharding],
        outs: Sequence[AxisSharding],
        donated: Sequence[int] = (),
    ) -> Function:
        mesh = self._meshes[stage % len(self._meshes)]
        if mesh.size == 1:
            return jax.jit(fn, donate_argnums=tuple(donated), out_shardings=self.where(stage, SAME))
        return jax.jit(on_mesh(fn, mesh, ins, outs), donate_argnums=tuple(donated))


class OneDevice(Places):
    """All stages on one device, replicas and shards by `jax.vmap`.

    Args:
      replicas: how many each stage has.
      shards: by stage, how many.
    """

    def __init__(self, replicas: int, shards: Sequence[int] = (1,)) -> None:
        super().__init__(replicas)
        self._shards = tuple(shards)

    def put(self, x: Any, stage: int, kind: AxisSharding) -> Any:
        return put_on_one_device(x) if isinstance(x, jax.Array) else jnp.asarray(x)

    def startup(self, jaxpr: ClosedJaxpr, stage: int) -> Function:
        return jax.jit(jaxpr_as_fun(jaxpr))

    def compiled(
        self,
        fn: Function,
        stage: int,
        ins: Sequence[AxisSharding],
        outs: Sequence[AxisSharding],
        donated: Sequence[int] = (),
    ) -> Function:
        sizes = ((AXIS, self.replicas), (SPLIT, self._shards[stage % len(self._shards)]))
        axes = [(name, size) for name, size in sizes if size > 1]
        # shards compute whole values each for itself
        firsts = [
            k if SPLIT in k.varies else dataclasses.replace(k, first=(*k.first, SPLIT))
            for k in outs
        ]
        return jax.jit(on_one_device(fn, axes, ins, firsts))


class Host(OneDevice):
    """The memory of this process's host, where parameters are between uses, and where they are
    updated."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self._device = jax.local_devices(backend="cpu")[0]

    def put(self, x: Any, stage: int, kind: AxisSharding) -> Any:
        return jax.device_put(x, self._device)
