"""Sequence parallelism: the devices of a trainer divide the sequences of the batch.

The user's mesh has an axis "sequence". A device has its part of each sequence, so it stores and
computes only this part of the activations. Layers that treat tokens alone (norms, products with
kernels, losses) need no communication. Attention gathers keys and values, and the gradient of a
kernel is a sum over the devices. The rules of `dtrans.engine.split` find this communication.

Source: Li et al., Sequence Parallelism (arXiv 2105.13120). Difference: keys and values are
all-gathered; they do not travel in a ring. In a ring, each device would loop over the blocks of
keys in another order. The engine cannot prove from the body of a loop that the order does not
change the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from dtrans.batch.exact_step import batch_axes, full_type
from dtrans.data_parallel.options import Options
from dtrans.engine.layout import Sliced
from dtrans.errors import BatchError, ConfigError
from dtrans.ir.display import short_type
from dtrans.ir.program import Program
from dtrans.ir.pytree import is_under
from dtrans.step.halves import DividedStep
from dtrans.step.scopes import has_local_scope
from dtrans.tensor_parallel.mesh_option import SEQUENCE
from dtrans.tensor_parallel.model_axis import ModelState, ShardedProgram, shard_program


@dataclasses.dataclass(frozen=True)
class SequenceAxis:
    """Mesh axis along which devices divide sequences, and the divided arrays.

    Attributes:
      size: number of devices that divide each sequence.
      dims: maps each divided array of the batch to the dimension of its sequences.
      state: arrays of optimizer state that the devices also divide, by name.
    """

    size: int
    dims: Mapping[str, int]
    state: Mapping[str, Sliced] = dataclasses.field(default_factory=dict)
    name: ClassVar = SEQUENCE

    @property
    def notes(self) -> list[str]:
        """Sentences for the user about the arrays that the devices divide, for the plan's notes."""
        by_dim: dict[int, list[str]] = {}
        for name, dim in self.dims.items():
            by_dim.setdefault(dim, []).append(name)
        notes = []
        for dim, names in sorted(by_dim.items()):
            notes.append(f"divided over {self.name} along dimension {dim}: {', '.join(names)}")
        if self.state:
            notes.append(f"divided over {self.name}: {len(self.state)} arrays of optimizer state")
        return notes

    def shard(self, program: Program) -> ShardedProgram:
        """Rewrite the program of a trainer for one device; all devices get equal results."""
        state = ModelState(self.name, self.size, self.state, (), ())
        return shard_program(program, state, self.dims, gathers_in_loops=True)

    def full_types(self, types: Mapping[str, Any]) -> dict[str, Any]:
        """Return the types of a trainer's arrays from the types of one device's arrays."""
        return {n: full_type(t, self.dims.get(n), self.size) for n, t in types.items()}

    def part_type(self, name: str, t: Any) -> Any:
        """Return the type of one device's part of a batch array.

        Raises:
          BatchError: the number of devices does not divide the sequences.
        """
        dim = self.dims.get(name)
        if dim is None:
            return t
        length = t.shape[dim]
        if length % self.size:
            raise BatchError(
                f"{name} has {length} entries along dimension {dim}, which the {self.size} devices "
                f"of the axis {self.name!r} cannot divide; pad the sequences to a multiple of "
                f"{self.size}, or pass dtrans.Batch(sequence=...) with None for an array without "
                "sequences"
            )
        shape = list(t.shape)
        shape[dim] = length // self.size
        return t.update(shape=tuple(shape))


def find_sequence_axis(step: DividedStep, options: Options) -> SequenceAxis | None:
    """Find the batch arrays with sequences that the devices of a trainer divide.

    Return None if the user's mesh has no axis "sequence".

    Args:
      step: the single-device step, divided at its gradients.
      options: the options of the strategy.

    Raises:
      BatchError: the devices cannot divide the sequences.
      ConfigError: no array has sequences, the rows of an array are its sequences, or the step has
        `dtrans.local` scopes.
    """
    if not options.sequence:
        return None
    program, batch = step.program, options.batch
    rows = batch_axes(step, batch)
    if any(map(has_local_scope, program.eqns)):
        raise ConfigError(
            f"{program.name} has a dtrans.local() scope, which a mesh with an axis {SEQUENCE!r} "
            f"does not support; remove the scope, or leave {SEQUENCE!r} out of mesh"
        )
    specs = program.args[2:]
    dims: dict[str, int] = {}
    for spec, dim in zip(specs, batch.dims_of("sequence", len(specs)), strict=True):
        for name in spec.names:
            t = program.inputs[name]
            if dim is None or dim >= t.ndim or is_under(name, batch.unsplit_inputs):
                continue
            if rows.get(name) == dim:
                raise ConfigError(
                    f"dimension {dim} of {name}, {short_type(t)}, is the dimension of its rows, "
                    "and also of its sequences; pass dtrans.Batch(axes=..., sequence=...) with two "
                    "different dimensions, or None for an array without sequences"
                )
            dims[name] = dim
    axis = SequenceAxis(options.sequence, dims)
    if axis.size > 1 and not dims:
        raise ConfigError(
            f"mesh has an axis {SEQUENCE!r}, but no array of the batch has sequences along "
            f"{batch.sequence!r}; pass their dimension as dtrans.Batch(sequence=...), or leave "
            f"{SEQUENCE!r} out of mesh"
        )
    for name in dims:
        axis.part_type(name, program.inputs[name])
    return axis
