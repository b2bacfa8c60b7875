"""The option `mesh`: the number of devices along each axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from dtrans.checks import check_int, check_type
from dtrans.errors import ConfigError


DATA, MODEL, SEQUENCE = "data", "model", "sequence"  # names of the axes


class MeshSizes(NamedTuple):
    """Number of devices along each axis of the user's `mesh`.

    Attributes:
      data: number of trainers.
      model: number of devices that divide the parameters; 0 without this axis. It is "data" if the
        devices of the data axis also divide the parameters.
      sequence: number of devices that divide each sequence; 0 without this axis.
    """

    data: int
    model: int | str
    sequence: int


def sizes_of_mesh(mesh: Any) -> MeshSizes:
    """Check the user's option `mesh`, and return the size of each axis.

    Raises:
      ConfigError: the mesh is no mapping from names of axes to positive integers, or has another
        axis.

    Example:
      >>> from dtrans.tensor_parallel.mesh_option import sizes_of_mesh
      >>> sizes_of_mesh({"data": 4, "model": 2})
      MeshSizes(data=4, model=2, sequence=0)
    """
    check_type("mesh", mesh, Mapping, "a dict such as {'data': 4, 'model': 2}")
    for name, size in mesh.items():
        if name not in (DATA, MODEL, SEQUENCE):
            raise ConfigError(
                f"mesh has an axis {name!r}; expected {DATA!r}, which splits the batch, "
                f"{MODEL!r}, which splits the layers in dtrans.split scopes, and {SEQUENCE!r}, "
                "which splits sequences"
            )
        if (name, size) != (MODEL, DATA):
            check_int(f"mesh[{name!r}]", size, "a positive number of devices")
    sizes = MeshSizes(mesh.get(DATA, 1), mesh.get(MODEL, 0), mesh.get(SEQUENCE, 0))
    if sizes.model == DATA and sizes.sequence:
        raise ConfigError(
            f"mesh has {MODEL!r}: {DATA!r} and an axis {SEQUENCE!r}, which exclude each other; "
            f"pass a number as {MODEL!r}, or leave {SEQUENCE!r} out"
        )
    return sizes
