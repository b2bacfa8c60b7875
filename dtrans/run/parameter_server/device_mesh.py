"""Trainers with several devices each: their programs are divided among the devices of a mesh.

`simulated_pieces` runs a trainer's program on one device, which simulates the mesh. `DeviceMesh`
runs it on real devices, in the process of a trainer.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dtrans._jax import equations
from dtrans.errors import ConfigError
from dtrans.ir.program import Program
from dtrans.ops import OVER_AXIS, UNDER_VMAP, trainer_index_p
from dtrans.parameter_server.exchange_rounds import TRAINERS
from dtrans.parameter_server.plan import PServerPlan
from dtrans.parameter_server.trainer_devices import DeviceProgram, TrainerDevices
from dtrans.run.base.device_pieces import Spread, map_pieces, place_arrays
from dtrans.run.base.segments import Rules, Segments, divide_program
from dtrans.run.base.spmd import on_mesh, on_one_device


def simulated_pieces(devices: TrainerDevices, program: Program, rules: Rules) -> Segments:
    """Compile a trainer's program for one device, which simulates the trainer's mesh.

    The result has compiled pieces. Communication with servers runs between the pieces.

    Args:
      devices: the axes of the trainer's mesh.
      program: the program of the trainer.
      rules: implementations of the communication primitives that pieces compute.
    """
    spread: Spread = lambda fn, ins, outs: on_one_device(fn, devices.axes, ins, outs)
    return _cut(devices, devices.divide(program), {**UNDER_VMAP, **rules}, spread)


def _cut(
    devices: TrainerDevices, program: DeviceProgram, rules: Rules, spread: Spread, **options: Any
) -> Segments:
    index = functools.partial(_index, rules)
    computed: Rules = {**OVER_AXIS, **rules, trainer_index_p: index}
    pieces = divide_program(program.program, computed=computed, **options)
    among_devices = set(OVER_AXIS)
    for eqn in equations(program.program.jaxpr):
        if eqn.primitive is trainer_index_p and eqn.params["over"] == TRAINERS:
            among_devices.discard(trainer_index_p)
    return map_pieces(pieces, program.dims, devices.axes, spread, among_devices)


def _index(rules: Rules, *, over: tuple[str, ...]) -> Sequence[Any]:
    """Return the result of the primitive `trainer_index` on one device of a trainer.

    If `over` is the axis of trainers, the result is the id of this trainer. Otherwise, it is the
    index of the device along the mesh axes `over`.
    """
    if over == TRAINERS:
        return rules[trainer_index_p](over=over)
    return OVER_AXIS[trainer_index_p](over=over)


class DeviceMesh:
    """Mesh of devices that runs the program of the trainer in this process.

    Args:
      devices: the axes of the mesh.
      program: the program of one device.

    Raises:
      ConfigError: this process has too few devices.
    """

    def __init__(self, devices: TrainerDevices, program: DeviceProgram) -> None:
        check_devices(devices)
        local = jax.local_devices()[: devices.count]
        names, sizes = zip(*devices.axes, strict=True)
        self._devices, self._program = devices, program
        self._mesh = Mesh(np.array(local).reshape(sizes), names)

    @classmethod
    def from_program(cls, program: Program) -> DeviceMesh | None:
        """Return the mesh of a trainer's program; None if the program runs on one device."""
        plan = program.plan
        if not isinstance(plan, PServerPlan) or plan.devices is None:
            return None
        of_device = plan.on_devices(program)
        return None if of_device is None else cls(plan.devices, of_device)

    def cut(self, rules: Rules, **options: Any) -> Segments:
        """Compile the program for all devices of the mesh.

        The result has compiled pieces. Communication with servers runs between the pieces.

        Args:
          rules: implementations of the communication primitives that pieces compute.
          options: other arguments of `divide_program`.
        """
        spread: Spread = lambda fn, ins, outs: on_mesh(fn, self._mesh, ins, outs)
        return _cut(self._devices, self._program, rules, spread, **options)

    def place(self, names: Sequence[str], arrays: Sequence[Any]) -> list[Any]:
        """Put arrays on the devices, with the shardings that the trainer's program uses.

        Args:
          names: for each array, the name of an input or output of the program.
          arrays: the full arrays.
        """
        return place_arrays(names, arrays, self._program.dims, self._mesh)


def check_devices(devices: TrainerDevices | None) -> None:
    """Raise ConfigError if this process has fewer devices than a trainer needs."""
    if devices is None or jax.local_device_count() >= devices.count:
        return
    remedy = "pass a smaller mesh to dtrans.pserver"
    if jax.default_backend() == "cpu":
        option = f'jax.config.update("jax_num_cpu_devices", {devices.count})'
        remedy = f"call {option} before JAX is used, or {remedy}"
    raise ConfigError(
        f"a trainer with a mesh of {devices} needs {devices.count} devices, but this process has "
        f"{jax.local_device_count()}; {remedy}"
    )
