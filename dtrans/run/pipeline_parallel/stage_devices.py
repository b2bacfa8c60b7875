"""Backends of a pipeline: a grid of devices for each stage, or one device for all stages.

A value on a stage has one of these shardings over the replicas of the stage:

    SAME             one value for all replicas
    EACH             one value for each replica, stacked along a new leading dimension
    ROWS             an array of the batch whose rows are divided over the replicas, in order
    FIRST            all replicas compute the same value, and replica 0 returns it

An array of the state may be divided along a dimension; then each replica has one slice. In a split
stage (tensor parallelism), a value may also be divided along a dimension over the stage's shards
(mesh axis SPLIT). With one replica and one shard there is no mesh, and programs are compiled
unchanged.
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
ROWS, FIRST = AxisSharding().sharded_along(0, AXIS), AxisSharding(first=(AXIS,))


class StageBackend(abc.ABC):
    """Backend of a pipeline job: places values on stages and compiles programs for them.

    Attributes:
      replicas: the number of replicas of each stage.
      known: the functions that were compiled so far, by a key and the shardings of their arrays.
    """

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self.known: dict[Any, Function] = {}

    @abc.abstractmethod
    def put(self, x: Any, stage: int, kind: AxisSharding) -> Any:
        """Place a value on the devices of a stage."""

    @abc.abstractmethod
    def startup(self, jaxpr: ClosedJaxpr, stage: int) -> Function:
        """Return a compiled function that computes one stage's part of the first state."""

    @abc.abstractmethod
    def compiled(
        self,
        fn: Function,
        stage: int,
        ins: Sequence[AxisSharding],
        outs: Sequence[AxisSharding],
        donated: Sequence[int] = (),
    ) -> Function:
        """Compile a function of one replica, so that one call runs it for all replicas of a stage.

        Args:
          fn: a function of one replica's flat arrays. Its collectives use the mesh axis AXIS.
          stage: index of the stage.
          ins, outs: the shardings of operands and outputs over the replicas.
          donated: the positions of operands with memory that the function may reuse.
        """


class OnDevices(StageBackend):
    """Backend with a grid of devices for each stage.

    Args:
      grids: the devices of each stage, as [replica, shard].
    """

    def __init__(self, grids: Sequence[Any]) -> None:
        super().__init__(len(grids[0]))
        self._meshes = [Mesh(np.array(grid), (AXIS, SPLIT)) for grid in grids]
        self._shardings: dict[tuple[int, AxisSharding], Any] = {}

    def put(self, x: Any, stage: int, kind: AxisSharding) -> Any:
        sharding = self.sharding(stage, kind)
        # `device_put` takes 65 microseconds, even if the array already has this sharding.
        if isinstance(x, jax.Array) and x.sharding == sharding:
            return x
        return jax.device_put(x, sharding)

    def sharding(self, stage: int, kind: AxisSharding) -> Any:
        """Return the `jax.sharding.Sharding` of a value on a stage."""
        place = stage % len(self._meshes)
        known = self._shardings.get((place, kind))
        if known is None:
            mesh = self._meshes[place]
            if mesh.size == 1:
                known = SingleDeviceSharding(mesh.devices.item())
            else:
                known = NamedSharding(mesh, kind.spec)
            self._shardings[place, kind] = known
        return known

    def startup(self, jaxpr: ClosedJaxpr, stage: int) -> Function:
        return jax.jit(jaxpr_as_fun(jaxpr), out_shardings=self.sharding(stage, SAME))

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
            out = self.sharding(stage, SAME)
            return jax.jit(fn, donate_argnums=tuple(donated), out_shardings=out)
        return jax.jit(on_mesh(fn, mesh, ins, outs), donate_argnums=tuple(donated))


class OneDevice(StageBackend):
    """Backend that simulates all stages on one device, with `jax.vmap` over replicas and shards.

    Args:
      replicas: the number of replicas of each stage.
      shards: for each stage, the number of devices of one replica. Stages on the same devices have
        one entry together.
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
        # All shards compute an output that is not cut, and the first shard returns it.
        results = []
        for kind in outs:
            if SPLIT not in kind.varies:
                kind = dataclasses.replace(kind, first=(*kind.first, SPLIT))
            results.append(kind)
        return jax.jit(on_one_device(fn, axes, ins, results))


class Host(OneDevice):
    """Backend for the host's memory, in which `offload` stores and updates the state.

    Args:
      replicas, shards: see `OneDevice`.
    """

    def __init__(self, replicas: int, shards: Sequence[int]) -> None:
        super().__init__(replicas, shards)
        self._device = jax.local_devices(backend="cpu")[0]

    def put(self, x: Any, stage: int, kind: AxisSharding) -> Any:
        return jax.device_put(x, self._device)
