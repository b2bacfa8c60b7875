"""File of a trainer's cut: arrays by name, in NumPy's `.npz` format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dtrans.checkpoint.array_files import read_errors
from dtrans.checkpoint.assemble import as_numpy, numpy_type
from dtrans.run.net.shared_files import write_file


class CutFile:
    """Reader and writer of the file of one cut, a copy of a trainer's state after a step.

    The format lacks some types, such as bfloat16 and random keys. The file contains the bytes of
    such arrays, and a reader passes their types.

    Args:
      path: the file.
      content: the file's content, for errors.

    Example:
      >>> import tempfile
      >>> import jax.numpy as jnp
      >>> w = jnp.ones(2, jnp.bfloat16)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     file = CutFile(Path(folder) / "10.npz", "the cut of trainer 0 after step 10")
      ...     file.write({"w": w})
      ...     file.read({"w": w})["w"].tolist()
      [1.0, 1.0]
    """

    def __init__(self, path: Path, content: str) -> None:
        self._path, self._content = path, content

    def read(self, types: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return arrays of the file by name. Random keys are represented by their key data.

        Args:
          types: for the name of each array to read, an object that has its `shape` and `dtype`.

        Raises:
          DamagedError: the file is missing or damaged, or lacks an array.
          StateError: the system cannot read the file.
        """
        found: dict[str, np.ndarray] = {}
        content = f"{self._content} cannot be read from {self._path}"
        remedy = "; start the job again with another folder of cuts"
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
