"""Several devices for one trainer: they divide its rows of the batch, and its large layers.

A trainer's program is written for one device. `TrainerDevices.divide` rewrites it for one of
several devices, one mesh axis after the other:

    data    each device computes a part of the trainer's rows. A gradient is all-reduced before its
            `send`
    model   each device computes a part of the layers in `dtrans.split` scopes. The gradient of a
            divided parameter is all-gathered before its `send`

Messages to servers contain full values, so servers need not know the number of devices. A trainer
also receives full parameters. At the start of the next step, the parameters are divided over
"model" again.

Source: Shoeybi et al., Megatron-LM (arXiv 1909.08053) for the division of layers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from dtrans._jax import JaxprEqn, with_equations
from dtrans.batch.exact_step import batch_axes
from dtrans.checks import check_together
from dtrans.engine.axis_bytes import bytes_by_axis
from dtrans.engine.layout import Gathered
from dtrans.errors import ConfigError
from dtrans.ir.dataflow import bits_of, outputs_of, propagate
from dtrans.ir.program import Program
from dtrans.ir.selection import values_at
from dtrans.ops import send_barrier_p, send_p, split_byref_p
from dtrans.parameter_server.options import Mode, Sync
from dtrans.step.batch_sharing import Batch
from dtrans.step.halves import DividedStep
from dtrans.step.observers import refuse_calls
from dtrans.step.scopes import has_local_scope
from dtrans.tensor_parallel.mesh_option import DATA, MODEL, SEQUENCE, sizes_of_mesh
from dtrans.tensor_parallel.model_axis import ModelState, shard_program, shard_state


@dataclasses.dataclass(frozen=True)
class DeviceProgram:
    """Program that each device of a trainer runs, if each trainer has a mesh of several devices.

    Attributes:
      program: the program. Its outputs are full values.
      dims: the dimension of each input that a mesh axis divides: `{"batch/x": {"data": 0}}`.
      gathers: pairs (mesh axis, divided value that the devices along this axis all-gather).
    """

    program: Program
    dims: Mapping[str, Mapping[str, int]]
    gathers: tuple[tuple[str, Gathered], ...]

    @property
    def notes(self) -> Iterator[str]:
        """Yield remarks for a printed plan.

        They give the bytes that the devices of a trainer send over each mesh axis. They also list
        the values that devices all-gather because dtrans has no rule to divide their equation.
        """
        for (kind, axis), count in bytes_by_axis(self.program.jaxpr).items():
            yield f"in each trainer, {kind} over {axis}: {count:,} bytes per step"
        for axis, x in self.gathers:
            # a divided gradient is always gathered for the servers
            if x.reason.split(" of ")[0] not in (split_byref_p.name, send_p.name):
                yield f"gathered over {axis}: {x}"


@dataclasses.dataclass(frozen=True)
class TrainerDevices:
    """Mesh of the devices of each trainer.

    Attributes:
      axes: pairs (name, size) of the mesh axes: `(("data", 2), ("model", 4))`.
      rows: for each array of the batch, the dimension that the axis "data" divides.
      model: the parameters that the axis "model" divides; None for a mesh without this axis.
    """

    axes: tuple[tuple[str, int], ...]
    rows: Mapping[str, int]
    model: ModelState | None

    @property
    def count(self) -> int:
        """Number of devices of a trainer."""
        return math.prod(size for _, size in self.axes)

    def __str__(self) -> str:
        return " x ".join(f"{size} {name}" for name, size in self.axes)

    def divide(self, program: Program) -> DeviceProgram:
        """Rewrite a trainer's program for one of the trainer's devices.

        Equations that communicate with servers keep full values, so servers get the same messages
        as from trainers with one device.
        """
        dims: dict[str, dict[str, int]] = {}
        gathers: list[tuple[str, Gathered]] = []
        for axis, size in self.axes:
            divided = self.rows if axis == DATA else self._params
            # The state is empty, because a trainer's program returns full parameters.
            found = shard_program(program, ModelState(axis, size, {}, (), ()), divided)
            program = found.program
            gathers += ((axis, x) for x in found.gathers)
            for name, dim in divided.items():
                dims.setdefault(name, {})[axis] = dim
        return DeviceProgram(_reduce_results_early(program), dims, tuple(gathers))

    @property
    def _params(self) -> Mapping[str, int]:
        return {} if self.model is None else self.model.dims


def _reduce_results_early(program: Program) -> Program:
    """Move reductions of results, such as the loss, before the equations that wait for servers.

    The part of a program after this wait is compiled once for all trainers, because they all
    receive the same parameters. The loss differs between trainers, so its reduction must not be in
    this part. `shard_program` writes such reductions at the end of the program.
    """
    late = propagate(program.eqns, dict.fromkeys(outputs_of(_barriers(program)), 1), {})
    is_late = [bool(bits_of(late, *e.outvars)) for e in program.eqns]
    order = sorted(range(len(is_late)), key=is_late.__getitem__)  # keeps the order otherwise
    jaxpr = with_equations(program.jaxpr, values_at(program.eqns, order))
    return program.with_jaxpr(jaxpr, roles=tuple(values_at(program.roles, order)))


def _barriers(program: Program) -> list[JaxprEqn]:
    return [e for e in program.eqns if e.primitive is send_barrier_p]


def find_devices(
    step: DividedStep, mesh: Mapping[str, int] | None, mode: Mode, batch: Batch, sparse: Any
) -> TrainerDevices | None:
    """Return the mesh of each trainer's devices for the option `mesh`; None without the option.

    Args:
      step: the single-device step, divided into forward and backward, and the optimizer.
      mesh, mode, batch, sparse: arguments of `dtrans.pserver`.

    Raises:
      ConfigError: the mesh is invalid, or another option or the step cannot be combined with it.
      GradientError: the step has host callbacks.
    """
    if mesh is None:
        return None
    sizes, option = sizes_of_mesh(mesh), f"mesh={dict(mesh)!r}"
    if sizes.model == DATA or sizes.sequence:
        axis = repr(SEQUENCE) if sizes.sequence else f"{MODEL!r}: {DATA!r}"
        raise ConfigError(
            f"{option} has {axis}, but the devices of a trainer of dtrans.pserver divide rows and "
            "split layers only; leave it out, or pass the mesh to dtrans.nccl2"
        )
    _refuse_options(option, mode, batch, sparse)
    refuse_calls(step.observers)
    name = step.program.name
    if any(map(has_local_scope, step.program.eqns)):
        raise ConfigError(
            f"{option}: {name} has a dtrans.local() scope, whose values would be those of a "
            "device, not of a trainer; remove the scope, or leave mesh out"
        )
    rows = batch_axes(step, batch)
    if sizes.data > 1 and not rows:
        raise ConfigError(
            f"{option}: {name} has no array of the batch with rows that the devices could divide; "
            f"leave {DATA!r} out of mesh"
        )
    axes: list[tuple[str, int]] = [(DATA, sizes.data)]
    model = None
    if isinstance(sizes.model, int) and sizes.model:
        model = shard_state(step, MODEL, sizes.model)
        axes.append((MODEL, sizes.model))
    return TrainerDevices(tuple(axes), rows, model)


def _refuse_options(option: str, mode: Mode, batch: Batch, sparse: Any) -> None:
    """Raise ConfigError for options of `dtrans.pserver` that cannot be combined with a mesh."""
    if not isinstance(mode, Sync):
        raise ConfigError(
            f"{option} cannot be combined with mode=dtrans.{type(mode).__name__}(...): dtrans has "
            "no verification of trainers with several devices that take steps independently; "
            "leave mesh out, or pass mode=dtrans.Sync()"
        )
    if sparse is not None:
        raise ConfigError(
            f"{option} cannot be combined with sparse={sparse!r}: a trainer looks up the rows of "
            "tables for its full batch on one device; leave out one of the two"
        )
    if batch.has_shares:
        raise ConfigError(
            f"{option} cannot be combined with batch=dtrans.Batch(speeds=...), which gives each "
            "trainer a separate program; leave out one of the two"
        )
    why = "a trainer encodes gradients on one device; leave out one of the two"
    check_together(mode.compression, why, option)
