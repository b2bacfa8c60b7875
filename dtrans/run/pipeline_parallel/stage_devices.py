"""Where a stage is: the devices of its replicas and their shards, or one device on which these are simulated.

A value of a stage is of one of these kinds:

    SAME             every replica has the same
    EACH             every replica has its own: behind a leading axis of the size of the replicas
    ROWS             of the batch: rows 0 to B/R are replica 0's, and so on
    cut_along(axis)  slices of one array along a dimension, replica by replica
    kind.cut(dim)    the same in pieces, where a stage is split

With one replica and one shard there are no axes, and programs are compiled as they are.
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
from dtrans.ir.array_fns import in_one, parts_of
from dtrans.pipeline_parallel.options import AXIS, SPLIT
from dtrans.run.base.batch import on_one_device


@dataclasses.dataclass(frozen=True)
class StageSharding:
    """How the replicas of a stage, and their shards, have a value; see the module.

    Attributes:
      own: each replica has its own.
      rows: each replica has its rows.
      axis: the dimension along which replicas have slices.
      split: the dimension along which shards have pieces, not counting the axis of replicas.
      first: of what is made: replicas make the same, each by itself, and the first one's is taken.
    """

    own: bool = False
    rows: bool = False
    axis: int | None = None
    split: int | None = None
    first: bool = False

    def cut(self, split: int | None) -> StageSharding:
        """The same, in pieces of shards."""
        return self if split is None else dataclasses.replace(self, split=split)


SAME, EACH, ROWS, FIRST = StageSharding(), StageSharding(own=True), StageSharding(rows=True), StageSharding(first=True)


def cut_along(axis: int) -> StageSharding:
    """Slices along a dimension."""
    return StageSharding(axis=axis)


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
    def put(self, x: Any, stage: int, kind: StageSharding) -> Any:
        """A value where a stage has it."""

    @abc.abstractmethod
    def startup(self, jaxpr: ClosedJaxpr, stage: int) -> Function:
        """What makes a stage's part of the first state, compiled; every replica makes the same."""

    @abc.abstractmethod
    def compiled(
        self,
        fn: Function,
        stage: int,
        ins: Sequence[StageSharding],
        outs: Sequence[StageSharding],
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
        self._where: dict[tuple[int, StageSharding], Any] = {}

    def put(self, x: Any, stage: int, kind: StageSharding) -> Any:
        where = self.where(stage, kind)
        # device_put takes 65 microseconds to find out that there is nothing to do
        return x if isinstance(x, jax.Array) and x.sharding == where else jax.device_put(x, where)

    def where(self, stage: int, kind: StageSharding) -> Any:
        """The sharding of a value of a stage."""
        place = stage % len(self._meshes)
        known = self._where.get((place, kind))
        if known is None:
            mesh = self._meshes[place]
            alone = mesh.size == 1
            known = SingleDeviceSharding(mesh.devices.item()) if alone else NamedSharding(mesh, _spec(kind))
            self._where[place, kind] = known
        return known

    def startup(self, jaxpr: ClosedJaxpr, stage: int) -> Function:
        return jax.jit(jaxpr_as_fun(jaxpr), out_shardings=self.where(stage, SAME))

    def compiled(
        self,
        fn: Function,
        stage: int,
        ins: Sequence[StageSharding],
        outs: Sequence[StageSharding],
        donated: Sequence[int] = (),
    ) -> Function:
        mesh = self._meshes[stage % len(self._meshes)]
        if mesh.size == 1:
            return jax.jit(fn, donate_argnums=tuple(donated), out_shardings=self.where(stage, SAME))

        def one(*args: Any) -> list[Any]:
            made = fn(*(x[0] if k.own else x for x, k in zip(args, ins, strict=True)))
            return [jnp.asarray(x)[None] if k.own else x for x, k in zip(made, outs, strict=True)]

        # check_vma: the equations were traced without varying types, and replay only without the check
        mapped = jax.shard_map(
            one, mesh=mesh, in_specs=tuple(map(_spec, ins)), out_specs=list(map(_spec, outs)), check_vma=False
        )
        return jax.jit(mapped, donate_argnums=tuple(donated))


def _spec(kind: StageSharding) -> P:
    """Which axis is along which dimension."""
    along: dict[int, str] = {}
    if kind.own or kind.rows:
        along[0] = AXIS
    if kind.axis is not None:
        along[kind.axis] = AXIS
    if kind.split is not None:
        along[kind.split + kind.own] = SPLIT
    return P(*(along.get(d) for d in range(max(along, default=-1) + 1)))


class OneDevice(Places):
    """All stages on one device, replicas and shards by `jax.vmap`.

    Args:
      replicas: how many each stage has.
      shards: by stage, how many.
    """

    def __init__(self, replicas: int, shards: Sequence[int] = (1,)) -> None:
        super().__init__(replicas)
        self._shards = tuple(shards)

    def put(self, x: Any, stage: int, kind: StageSharding) -> Any:
        return on_one_device(x) if isinstance(x, jax.Array) else jnp.asarray(x)

    def startup(self, jaxpr: ClosedJaxpr, stage: int) -> Function:
        return jax.jit(jaxpr_as_fun(jaxpr))

    def compiled(
        self,
        fn: Function,
        stage: int,
        ins: Sequence[StageSharding],
        outs: Sequence[StageSharding],
        donated: Sequence[int] = (),
    ) -> Function:
        shards = self._shards[stage % len(self._shards)]
        mapped: Function = lambda *args: list(fn(*args))
        if self.replicas > 1:
            of: Callable[[StageSharding], int | None] = lambda k: (
                0 if k.own or k.rows or k.first or k.axis is not None else None
            )
            outs_of = [of(k) for k in outs]  # None refuses what is not the same in all replicas
            mapped = jax.vmap(
                mapped, in_axes=tuple(map(of, ins)), out_axes=outs_of, axis_name=AXIS, axis_size=self.replicas
            )
            mapped = _around(mapped, ins, outs, self._of_replicas)
        if shards > 1:
            parts = tuple(None if k.split is None else 0 for k in ins)
            mapped = jax.vmap(mapped, in_axes=parts, out_axes=0, axis_name=SPLIT, axis_size=shards)
            mapped = _around(mapped, ins, outs, lambda x, k, back: _of_shards(x, k, back, shards))
        return jax.jit(mapped)

    def _of_replicas(self, x: jax.Array, kind: StageSharding, back: bool) -> jax.Array:
        """What replicas have of a value along a leading axis, or back."""
        if kind.first:
            return x[0] if back else x
        if kind.axis is not None:
            return in_one(x, kind.axis) if back else parts_of(x, kind.axis, self.replicas)
        return x.reshape(self.replicas, -1, *x.shape[1:]) if kind.rows and not back else x


def _around(
    fn: Function, ins: Sequence[StageSharding], outs: Sequence[StageSharding], change: Callable[..., Any]
) -> Function:
    """A function of values as they are kept, by one of values as they are mapped over."""

    def around(*args: Any) -> list[Any]:
        made = fn(*(change(x, k, False) for x, k in zip(args, ins, strict=True)))
        return [change(x, k, True) for x, k in zip(made, outs, strict=True)]

    return around


def _of_shards(x: jax.Array, kind: StageSharding, back: bool, shards: int) -> jax.Array:
    """What shards have of a value along a leading axis, or back; of what is whole, the first one's."""
    if kind.split is None:
        return x[0] if back else x
    at = kind.split + kind.own
    return in_one(x, at) if back else parts_of(x, at, shards)


class Host(OneDevice):
    """The memory of this process's host, where parameters are between uses, and where they are updated."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self._device = jax.local_devices(backend="cpu")[0]

    def put(self, x: Any, stage: int, kind: StageSharding) -> Any:
        return jax.device_put(x, self._device)
