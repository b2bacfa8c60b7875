"""Batches of collective jobs: checks, and placement on the devices of trainers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from dtrans.data_parallel.plan import CollectivePlan
from dtrans.ir.array_fns import array_type
from dtrans.ir.pytree import all_names, is_under
from dtrans.run.base.batch import (
    Share,
    batch_arrays,
    check_rows,
    check_uneven,
    part_types,
    resize,
    rows_of,
    share_of,
    uneven_rows,
)
from dtrans.run.base.spmd import AxisSharding
from dtrans.run.collective.trainers import Trainers


class TrainerBatches:
    """Division of batches: gives each trainer of a job its rows of every batch array.

    For example, 4 trainers get 2 rows each from a batch of 8 rows. Scalars are replicated.

    Args:
      plan: the plan of the job.
      trainers: the backend, which places arrays and runs the program of each trainer.

    Attributes:
      specs: the structure of each batch argument.
      names: names of the arrays of a batch.
      shares: for each array, the dimension that is split over trainers, "replicated" or "key".
      shardings: the sharding of each array over the mesh.
    """

    def __init__(self, plan: CollectivePlan, trainers: Trainers) -> None:
        self._plan, self._trainers = plan, trainers
        self.specs = plan.main.args[2:]
        self.names = all_names(self.specs)
        self.shares: list[Share]
        if plan.shared is not None and plan.trainers > 1:
            self.shares = [plan.shared.axes.get(n, "replicated") for n in self.names]
        else:
            unsplit = {n for n in self.names if is_under(n, plan.unsplit_inputs)}
            types = plan.main.inputs
            self.shares = [share_of(n, types[n], plan.trainers, unsplit) for n in self.names]

        self.shardings = list(map(self._sharding, self.names, self.shares))

    def _sharding(self, name: str, share: Share) -> AxisSharding:
        sharding, sequence = AxisSharding(), self._plan.sequence
        if isinstance(share, int):
            sharding = sharding.sharded_along(share, *self._plan.options.over)
        if sequence is not None:
            sharding = sharding.sharded_along(sequence.dims.get(name), sequence.name)
        return sharding

    @property
    def axes(self) -> dict[str, int]:
        """Split dimension of each batch array that the trainers divide, by name."""
        found: dict[str, int] = {}
        for name, share in zip(self.names, self.shares, strict=True):
            if isinstance(share, int):
                found[name] = share
        return found

    def flatten(self, batch: Sequence[Any]) -> Sequence[Any]:
        """Return the arrays of a batch.

        Raises:
          BatchError, TraceError: the batch does not have the structure and types of the traced
            step.
        """
        return batch_arrays(self.specs, batch, self._plan.main.inputs)

    def place(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Put the arrays of a batch on the devices of the trainers.

        Raises:
          BatchError: the number of trainers does not divide the rows of the arrays.
        """
        plan, trainers = self._plan, self._trainers
        option = f"dtrans.{plan.strategy}(batch=dtrans.Batch(unsplit_inputs=(...)))"
        rows = rows_of(self.names, self._shared(arrays))
        check_rows(rows, trainers.here, option, trainers.who, noun=plan.options.noun)
        self._of_devices(map(array_type, arrays))
        return trainers.place_batch(arrays, self.shardings)

    def part_types(self, arrays: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes and dtypes of the arrays that one device gets from a batch."""
        return self._of_devices(part_types(self._shared(arrays), self._plan.trainers))

    def _of_devices(self, types: Iterable[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
        """Convert the types of one trainer's arrays to the types of one device's arrays.

        The types differ if a trainer has several devices: these divide the sequence dimension.

        Raises:
          BatchError: the devices of the sequence axis cannot divide an array.
        """
        sequence = self._plan.sequence
        if sequence is None:
            return list(types)
        return [sequence.part_type(n, t) for n, t in zip(self.names, types, strict=True)]

    # -- batches with padding --------------------------------------------------------------------

    def odd_rows(self, arrays: Sequence[Any], global_rows: int = 0) -> int:
        """Return the number of rows of a batch that the trainers cannot divide evenly; else 0.

        The job pads such a batch. For example, the result is 10 for 10 rows and 4 trainers, and 0
        for 8 rows. In a job of several processes, a process knows only its part of the batch.
        There, the job pads only batches that are passed as `dtrans.UnevenPart`s.

        Args:
          global_rows: rows of the global batch, if this process's part is a `dtrans.UnevenPart`.

        Raises:
          BatchError: the plan cannot pad batches.
        """
        plan, takes_uneven = self._plan, self._plan.for_uneven_batch is not None
        if global_rows:
            check_uneven(global_rows, plan.trainers, takes_uneven)
            return global_rows
        if not takes_uneven or self._trainers.here != plan.trainers:
            return 0
        counts = set(rows_of(self.names, self._shared(arrays)).values())
        if len(counts) != 1:
            return 0
        (count,) = counts
        return count if count % plan.trainers else 0

    def place_padded(self, arrays: Sequence[Any], rows: int) -> Sequence[Any]:
        """Pad a batch to a multiple of the number of trainers, and put it on their devices.

        Raises:
          BatchError: the devices of the sequence axis cannot divide an array.
        """
        self._of_devices(map(array_type, arrays))
        trainers = self._trainers
        size = -(-rows // self._plan.trainers) * trainers.here
        padded = uneven_rows(self.names, self._shared(arrays), rows, trainers.part[0], size)
        return trainers.place_batch(padded, self.shardings)

    def global_types(self, arrays: Sequence[Any], rows: int) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes and dtypes of the global batch, from those of this process's part.

        Args:
          arrays: the arrays of a batch, or of this process's part.
          rows: number of rows of the global batch.
        """
        return [resize(x, share, lambda _: rows) for x, share in self._shared(arrays)]

    def _shared(self, arrays: Sequence[Any]) -> list[tuple[Any, Share]]:
        return list(zip(arrays, self.shares, strict=True))
