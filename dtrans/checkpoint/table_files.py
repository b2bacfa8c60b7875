"""Files of table rows in a piece: segments of bounded size, in NumPy's format.

    rows/0/0.npz        the first rows of a block: `ids`, `changed`, and "0", "1", ... for the block
                        and the arrays of its state (`dtrans.checkpoint.saved_rows.RowSegment`)
    rows/0/1.npz        the next rows
    rows/0/first.npz    some initial rows, which a later job compares with those of its init
    rows/init.npz       the arguments of the init, which generates all other rows

Orbax takes complete arrays, but rows of a running server are in memory only a segment at a time. So
these are separate files, in the folder that orbax renames when all files are written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dtrans.checkpoint.assemble import as_numpy
from dtrans.checkpoint.saved_rows import RowSegment, TableRows


ARGS, FIRST = "init.npz", "first.npz"


def write_tables(folder: Path, tables: Sequence[TableRows]) -> list[dict[str, Any]]:
    """Write the rows of tables, a segment at a time; return a description of each table."""
    found = []
    folder.mkdir()
    for i, table in enumerate(tables):
        at, row_count = folder / str(i), 0
        at.mkdir()
        segments, count = table.segments(), 0
        while (segment := next(segments, None)) is not None:
            np.savez(
                at / f"{count}.npz",
                ids=segment.ids,
                changed=segment.changed,
                **_columns(segment.rows),
            )
            row_count, count = row_count + len(segment.rows[0]), count + 1
            del segment  # frees its memory before the next one is read
        if table.begins is not None:
            ids = np.unique([0, table.rows // 2, table.rows - 1])
            np.savez(at / FIRST, ids=ids, **_columns(table.first(ids)))
            np.savez(folder / ARGS, **_columns([as_numpy(x) for x in table.begins.args]))
        about = {
            "names": list(table.names),
            "step": table.step,
            "evicted": table.evicted,
            "made": row_count,
        }
        found.append(about | {"segments": count, "begins": table.begins is not None})
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class SavedBlock:
    """Rows of a block in files.

    Attributes:
      folder: the folder of the files.
      about: their description from `write_tables`.
    """

    folder: Path
    about: Mapping[str, Any]

    def segments(self, columns: Mapping[int, Any]) -> Iterator[RowSegment]:
        """Yield the rows of some arrays.

        Args:
          columns: positions of the arrays in `about["names"]`, with their types.
        """
        for i in range(self.about["segments"]):
            with np.load(self.folder / f"{i}.npz") as file:
                yield RowSegment(file["ids"], file["changed"], _read(file, columns))

    def first(self, columns: Mapping[int, Any]) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return ids of some initial rows, and these rows of some arrays."""
        with np.load(self.folder / FIRST) as file:
            return file["ids"], _read(file, columns)

    def args(self) -> list[np.ndarray]:
        """Return the arguments of the init as NumPy arrays; needs `about["begins"]`."""
        with np.load(self.folder.parent / ARGS) as file:
            return [file[str(i)] for i in range(len(file.files))]


def _columns(rows: Sequence[np.ndarray]) -> dict[str, Any]:
    return {str(i): x for i, x in enumerate(rows)}


def _read(file: Any, columns: Mapping[int, Any]) -> list[np.ndarray]:
    """Read arrays of a file; NumPy's format does not keep types of other libraries."""
    return [file[str(i)].view(np.dtype(dtype)) for i, dtype in columns.items()]
