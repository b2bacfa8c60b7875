"""Files of the rows of tables in a piece: bounded segments, which NumPy reads.

    rows/0/0.npz        the first rows of a block: `ids`, `changed`, and "0", "1", ... the rows of the block and of each
                        array of its state (`dtrans.checkpoint.saved_rows.RowSegment`)
    rows/0/1.npz        the next ones
    rows/0/first.npz    some rows as the init makes them, by which a later job knows that its init is the same
    rows/init.npz       what the init was given: it makes the rows that are not here

Orbax takes whole arrays, and rows of a running server are there some at a time only: so these are
files beside its own, in the folder that it names when all of it is written.
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
    """Write the rows of tables, a segment at a time, and return what is to be said of each."""
    found = []
    folder.mkdir()
    for i, table in enumerate(tables):
        at, made = folder / str(i), 0
        at.mkdir()
        segments, count = table.segments(), 0
        while (segment := next(segments, None)) is not None:
            np.savez(
                at / f"{count}.npz",
                ids=segment.ids,
                changed=segment.changed,
                **_columns(segment.rows),
            )
            made, count = made + len(segment.rows[0]), count + 1
            del segment  # before the next one is read
        if table.begins is not None:
            ids = np.unique([0, table.rows // 2, table.rows - 1])
            np.savez(at / FIRST, ids=ids, **_columns(table.first(ids)))
            np.savez(folder / ARGS, **_columns([as_numpy(x) for x in table.begins.args]))
        about = {
            "names": list(table.names),
            "step": table.step,
            "evicted": table.evicted,
            "made": made,
        }
        found.append(about | {"segments": count, "begins": table.begins is not None})
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class SavedBlock:
    """The rows of a block in files.

    Attributes:
      folder: that they are in.
      about: what was said of them when they were written.
    """

    folder: Path
    about: Mapping[str, Any]

    def segments(self, columns: Mapping[int, Any]) -> Iterator[RowSegment]:
        """The rows of some arrays, by their place among `about["names"]`, with their types."""
        for i in range(self.about["segments"]):
            with np.load(self.folder / f"{i}.npz") as file:
                yield RowSegment(file["ids"], file["changed"], _read(file, columns))

    def first(self, columns: Mapping[int, Any]) -> tuple[np.ndarray, list[np.ndarray]]:
        """Some rows as the init makes them: their numbers, and those of some arrays."""
        with np.load(self.folder / FIRST) as file:
            return file["ids"], _read(file, columns)

    def args(self) -> list[np.ndarray]:
        """What the init was given, as words; where `about["begins"]`."""
        with np.load(self.folder.parent / ARGS) as file:
            return [file[str(i)] for i in range(len(file.files))]


def _columns(rows: Sequence[np.ndarray]) -> dict[str, Any]:
    return {str(i): x for i, x in enumerate(rows)}


def _read(file: Any, columns: Mapping[int, Any]) -> list[np.ndarray]:
    """Arrays of a file; NumPy has forgotten types that are not its own."""
    return [file[str(i)].view(np.dtype(dtype)) for i, dtype in columns.items()]
