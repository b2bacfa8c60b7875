"""File of a trainer's snapshot: arrays by name, in NumPy's `.npz` format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dtrans.checkpoint.array_files import read_errors
from dtrans.checkpoint.assemble import as_numpy, numpy_type
from dtrans.run.net.shared_files import write_file


class SnapshotFile:
    """File with one trainer's snapshot: arrays by name, in NumPy's `.npz` format.

    NumPy's format has no bfloat16 and no random keys. Such arrays are stored as bytes, without
    their types. `read` therefore takes the types of the arrays as its argument.

    Args:
      path: path of the file. The file need not exist before `write`.
      content: name of the snapshot for error messages, such as "the snapshot of trainer 0 after
        step 10".

    Example:
      >>> import tempfile
      >>> import jax.numpy as jnp
      >>> w = jnp.ones(2, jnp.bfloat16)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = Path(folder) / "10.npz"
      ...     file = SnapshotFile(path, "the snapshot of trainer 0 after step 10")
      ...     file.write({"w": w})
      ...     file.read({"w": w})["w"].tolist()
      [1.0, 1.0]
    """

    def __init__(self, path: Path, content: str) -> None:
        self._path, self._content = path, content

    def read(self, types: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Read some arrays of the file, by name. Random keys are returned as their raw integers.

        Args:
          types: maps the name of each array to an object with the array's `shape` and `dtype`.

        Raises:
          DamagedError: the file is missing or damaged, or lacks an array.
          StateError: the operating system cannot read the file.
        """
        found: dict[str, np.ndarray] = {}
        content = f"{self._content} cannot be read from {self._path}"
        remedy = "; start the job again with another folder of snapshots"
        # `np.load` does not close a damaged file that it has opened itself
        with (
            read_errors(content, remedy),
            self._path.open("rb") as file,
            np.load(file) as arrays,
        ):
            for name, t in types.items():
                found[name] = arrays[name].view(numpy_type(t.shape, t.dtype)[1])
        return found

    def write(self, arrays: Mapping[str, Any]) -> None:
        """Write arrays by name, and flush the file to the disk.

        Raises:
          OSError: the file cannot be written. An earlier file of this name is unchanged.
        """
        data: dict[str, Any] = {name: as_numpy(x) for name, x in arrays.items()}
        write_file(self._path, lambda file: np.savez(file, **data))
