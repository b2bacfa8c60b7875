"""Files of table rows in a piece: NumPy files of bounded size, one for each segment.

    rows/0/0.npz        the first segment of the first block: `ids`, `changed`, and "0", "1", ...
                        for the block and its state arrays (`dtrans.checkpoint.saved_rows`)
    rows/0/1.npz        the next segment
    rows/0/first.npz    some initial rows, with which a later job checks that its init is the same
    rows/init.npz       the arguments of the init, which generates rows that are not saved

Orbax needs complete arrays, but a running server can have only one segment in memory at a time. So
rows are saved in these files, in the folder of the piece.
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
    """Write the rows of tables, one segment at a time; return a description of each table."""
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
            del segment  # free the segment's memory before the next segment is read
        if table.begins is not None:
            ids = np.unique([0, table.rows // 2, table.rows - 1])
            np.savez(at / FIRST, ids=ids, **_columns(table.first(ids)))
            np.savez(folder / ARGS, **_columns(list(map(as_numpy, table.begins.args))))
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
    """Rows of one server's part of a table (a *block*), in the files that `write_tables` wrote.

    Attributes:
      folder: the folder of the files.
      about: the description that `write_tables` returned.
    """

    folder: Path
    about: Mapping[str, Any]

    def segments(self, columns: Mapping[int, Any]) -> Iterator[RowSegment]:
        """Yield the saved rows in segments, with only some of the arrays.

        Args:
          columns: dtypes of the arrays to read (dict by index in `about["names"]`).
        """
        for i in range(self.about["segments"]):
            with np.load(self.folder / f"{i}.npz") as file:
                yield RowSegment(file["ids"], file["changed"], _read(file, columns))

    def first(self, columns: Mapping[int, Any]) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return the ids and initial values of some rows, from the file `first.npz`.

        A restore generates the same rows, and compares them, to check that the init is unchanged.
        `columns` selects the arrays.
        """
        with np.load(self.folder / FIRST) as file:
            return file["ids"], _read(file, columns)

    def args(self) -> list[np.ndarray]:
        """Return the saved arguments of the init as NumPy arrays.

        The arguments were saved only if `about["begins"]` is True.
        """
        with np.load(self.folder.parent / ARGS) as file:
            return [file[str(i)] for i in range(len(file.files))]


def _columns(rows: Sequence[np.ndarray]) -> dict[str, Any]:
    return {str(i): x for i, x in enumerate(rows)}


def _read(file: Any, columns: Mapping[int, Any]) -> list[np.ndarray]:
    """Read arrays of a file; `columns` restores types that the format lacks, such as bfloat16."""
    return [file[str(i)].view(np.dtype(dtype)) for i, dtype in columns.items()]
