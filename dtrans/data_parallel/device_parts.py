"""Rewrite of a trainer's program for one of its devices, if a trainer has several devices.

A strategy first plans trainers with one device. If the user's mesh has a model axis, the devices of
a trainer divide parameters. `DeviceParts.on_model_axis` then rewrites the program for one device
(`dtrans.tensor_parallel.model_axis`). If the mesh has a sequence axis, the devices divide
sequences, and `on_sequence_axis` rewrites the program (`dtrans.data_parallel.sequence_axis`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dtrans.data_parallel.plan import Bucket
from dtrans.data_parallel.sequence_axis import SequenceAxis
from dtrans.engine.layout import Gathered
from dtrans.ir.program import Program
from dtrans.tensor_parallel.model_axis import ModelState, ShardedProgram, shard_program


@dataclasses.dataclass(frozen=True)
class DeviceParts:
    """Fields of a `CollectivePlan` that change if a trainer has several devices.

    Attributes:
      program: the program of a trainer, or of one of its devices.
      buckets: the buckets of gradients, which are reduced together.
      for_uneven_batch: function that writes the program for a batch with another number of rows.
        The trainers need not divide this batch equally. None if they must.
      device_gathers: pairs (axis, value that the devices of this axis gather).
    """

    program: Program
    buckets: tuple[Bucket, ...]
    for_uneven_batch: Callable[[Sequence[Any]], Program] | None
    device_gathers: tuple[tuple[str, Gathered], ...] = ()

    @property
    def fields(self) -> dict[str, Any]:
        """Keyword arguments for the constructor of a `CollectivePlan`."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def on_model_axis(self, state: ModelState, types: Mapping[str, Any]) -> DeviceParts:
        """Rewrite the fields for one of the devices that divide a trainer's parameters.

        Args:
          state: the state that the devices of a trainer divide.
          types: the single-device types of the leaves, by name.
        """
        buckets = tuple(_bucket_of_device(b, types, state) for b in self.buckets)
        parts = dataclasses.replace(self, buckets=buckets)
        return parts._rewritten(state.axis, lambda program: shard_program(program, state))

    def on_sequence_axis(self, axis: SequenceAxis) -> DeviceParts:
        """Rewrite the fields for one of the devices that divide a trainer's sequences."""
        return self._rewritten(axis.name, axis.shard, axis.full_types)

    def _rewritten(
        self,
        axis: str,
        shard: Callable[[Program], ShardedProgram],
        full_types: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
    ) -> DeviceParts:
        """Rewrite all programs for one device of a mesh axis.

        Args:
          axis: name of the axis.
          shard: rewrites a program for one device.
          full_types: function from the types of a device's arrays to those of the trainer, for
            `Program.rewritten`. By default, both have equal types.
        """
        write_uneven = self.for_uneven_batch
        rewrite = lambda program: shard(program).program
        uneven = None
        if write_uneven is not None:
            uneven = lambda batch_types: rewrite(write_uneven(batch_types))
        first = shard(self.program)
        return dataclasses.replace(
            self,
            program=self.program.rewritten(rewrite, full_types, result=first.program),
            for_uneven_batch=uneven,
            device_gathers=(*self.device_gathers, *((axis, x) for x in first.gathers)),
        )


def _bucket_of_device(bucket: Bucket, types: Mapping[str, Any], state: ModelState) -> Bucket:
    """Return a copy of a bucket in which `nbytes` counts the gradients of one device only."""
    full = piece = 0
    for leaf in bucket.leaves:
        t, sliced = types[leaf], state.sliced.get(leaf)
        full += t.size
        piece += t.size if sliced is None else sliced.rank_type(t).size
    return dataclasses.replace(bucket, nbytes=bucket.nbytes * piece // max(full, 1))
