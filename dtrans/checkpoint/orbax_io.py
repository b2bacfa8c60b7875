"""Files of a checkpoint: writing a piece, and reading all pieces. Only this module imports orbax.

    ckpt/300/pserver-0/arrays     the arrays by name, as orbax stores a pytree; without arrays that
                                  have no elements, which orbax refuses
    ckpt/300/pserver-0/dense      in place of `arrays` if the server was running: the same arrays as
                                  NumPy files (`dtrans.checkpoint.array_files`)
    ckpt/300/pserver-0/rows       rows of tables, if only some rows exist
                                  (`dtrans.checkpoint.table_files`)
    ckpt/300/pserver-0/overview   the *description* of the piece as JSON: its slices, the types of
                                  the step's arrays, the names of all pieces, a hash of the plan,
                                  and the run, step and tag

The role that writes a piece is its *saver*. Each piece lists all pieces. A checkpoint is complete
if its folder has all of them, with the same plan, run, step and tag. If a process crashes during a
save, some pieces are missing. Then each process of a later run replaces its own piece in this
folder. A complete checkpoint is never overwritten.

The files of a piece are flushed to the disk before the piece is renamed. The new name is flushed
before `write` returns.

A running server writes its piece without orbax, which needs several milliseconds of processor time
for each piece.

Orbax assumes that all processes of a `jax.distributed` job write one checkpoint together. They wait
for each other, and only one of them writes a NumPy array. But here each piece belongs to one
process. So each process tells orbax that it is the only one. An array must then be a replicated
`jax.Array`, so that orbax writes it in this process (`_as_replicated`). Orbax's handler for several
items broadcasts the creation of a folder to all processes, so this module has its own handler.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import json
import math
import os
import re
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtrans.checkpoint.array_files import checksums, read_arrays, read_errors, write_arrays
from dtrans.checkpoint.assemble import (
    as_jax,
    as_numpy,
    assemble_slice,
    full_slice,
    group_by_origin,
    overlaps,
    same_values,
    type_of,
)
from dtrans.checkpoint.runs import THIS_PROCESS, SaveId, new_run
from dtrans.checkpoint.saved_rows import ArrayLike, InitRows, RowSegment, SavedTable, TableRows
from dtrans.checkpoint.table_files import SavedBlock, write_tables
from dtrans.errors import (
    CheckpointError,
    ConfigError,
    DamagedError,
    DtransError,
    StateError,
    missing_extra,
)
from dtrans.ir.array_fns import words
from dtrans.ir.program import Program
from dtrans.ir.pytree import all_names
from dtrans.ir.selection import values_at
from dtrans.parameter_server.overview import VarDistributed
from dtrans.rows.row_buckets import RowBuckets
from dtrans.step.frozen import check_frozen


# format of a piece: with `arrays` only; with `rows`; with `dense`
FORMAT, FORMAT_TABLES, FORMAT_FILES = 1, 2, 3
OVERVIEW_FILE = "metadata"  # name that orbax gives the JSON file in `overview`
ORBAX_FILES = ("_CHECKPOINT_METADATA", "commit_success.txt")  # files that orbax adds to a piece

Folder = str | os.PathLike[str]
InitSlice = Callable[[VarDistributed], np.ndarray]  # maps a slice to its initial values


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Complete checkpoint, opened for reading. A *piece* is the subfolder that one process wrote.

    Attributes:
      path: the folder of the checkpoint.
      pieces: maps each saver (the server, trainer or rank that wrote a piece) to the piece's name.
      types: maps the name of each array of the step to its type, as text.
      rows: saved slices of each array, by array name. Arrays that only servers have are included.
      tables: slices of tables, which were saved by rows. A key is (saver, slice name). A value is
        (files of the table's block, index of the slice among the arrays in these files).
      may_differ: True if copies of an array may come from different steps.
      origin: a pair: the job's identifier, or "" if the job writes no snapshots; and the
        step.
    """

    path: Path
    pieces: Mapping[str, str]
    types: Mapping[str, str]
    rows: Mapping[str, Sequence[VarDistributed]]
    tables: Mapping[tuple[str, str], tuple[SavedBlock, int]]
    may_differ: bool = False
    origin: tuple[str, int | None] = ("", None)

    @classmethod
    def at(cls, path: Folder | None) -> Checkpoint:
        """Open the checkpoint at a path.

        Raises:
          DamagedError: the path contains no complete checkpoint.
          StateError: the system cannot read the files.
        """
        path = require_path(path).absolute()
        with _read_errors(path):
            pieces = _finished(path)
        abouts = {piece.name: _read_about(piece) for piece in pieces}
        if not abouts:
            problem = "" if path.is_dir() else ", which is not a folder"
            raise DamagedError(f"there is no checkpoint at {path}{problem}")

        # check that the pieces belong together, and that none is missing
        name, first = next(iter(abouts.items()))
        checked: list[Mapping[str, Any]] = []
        for other, about in abouts.items():
            checked.append(about)
            if not _are_one_save(checked):
                raise DamagedError(
                    f"the checkpoint at {path} has pieces of several jobs, runs or steps: {name} "
                    f"({_origin(first)}) and {other} ({_origin(about)}); restore another "
                    "checkpoint, such as the result of dtrans.checkpoint.latest"
                )
        missing = []
        for who, piece in first["pieces"].items():
            if piece not in abouts:
                missing.append(f"{piece} of {who}")
        if missing:
            raise DamagedError(
                f"the checkpoint at {path} is incomplete: {', '.join(missing)} is missing; restore "
                "another checkpoint, such as the result of dtrans.checkpoint.latest"
            )

        # list the saved slices
        rows: list[VarDistributed] = []
        may_differ = False
        for about in abouts.values():
            rows += map(_from_json, about["rows"])
            # "steps_may_differ" is missing in checkpoints of older versions
            may_differ = may_differ or bool(about.get("steps_may_differ"))
        tables: dict[tuple[str, str], tuple[SavedBlock, int]] = {}
        for who, piece in first["pieces"].items():
            for i, about in enumerate(abouts[piece].get("tables", ())):
                block = SavedBlock(path / piece / "rows" / str(i), about)
                for column, n in enumerate(about["names"]):
                    tables[who, n] = block, column
        by_name, origin = group_by_origin(rows), (first.get("job", ""), first["step"])
        return cls(path, first["pieces"], first["types"], by_name, tables, may_differ, origin)

    def check_snapshot(self, job: str, step: int) -> None:
        """Raise DamagedError unless this is a snapshot of job `job` after step `step`."""
        old_job, old_step = self.origin
        if old_job != job:
            raise DamagedError(f"the snapshot at {self.path} belongs to another job")
        if old_step != step:
            raise DamagedError(f"the snapshot at {self.path} was written after step {old_step}")

    def of(self, main: Program, remedy: str = "") -> Checkpoint:
        """Check that the checkpoint belongs to the step `main`; return the checkpoint.

        Args:
          main: the traced training step of one device.
          remedy: a remedy to append to the error, or an empty string.

        Raises:
          StateError: names or types of arrays differ, or constant arrays have other values.
        """
        wanted = _types_of(main)
        for name in (*wanted, *self.types):
            if self.types.get(name) != wanted.get(name):
                raise StateError(
                    f"the checkpoint at {self.path} belongs to another step: its {name} is "
                    f"{self.types.get(name, 'missing')}, but {name} of {main.name} is "
                    f"{wanted.get(name, 'missing')}{remedy}"
                )
        constants = self.on_host([full_slice(n, main.inputs[n]) for n in main.frozen_constants])
        for name, x in zip(main.frozen_constants, constants, strict=True):
            check_frozen(main, name, x)
        return self

    def arrays(
        self, targets: Sequence[VarDistributed], first: InitSlice | None = None
    ) -> list[jax.Array]:
        """Read slices of saved arrays, and return them as JAX arrays; arguments as in `on_host`."""
        values = self.on_host(targets, first)
        return [as_jax(x, target.dtype) for x, target in zip(values, targets, strict=True)]

    def on_host(
        self, targets: Sequence[VarDistributed], first: InitSlice | None = None
    ) -> list[np.ndarray]:
        """Read slices of saved arrays, and return them as NumPy arrays.

        The slices may have other boundaries than the saved slices. Each piece (the subfolder of one
        process) is read once, and only the arrays that overlap a wanted slice.

        Args:
          targets: the wanted slices.
          first: a function that returns a slice of the init's outputs. Pass it if table rows were
            not saved.
        """
        needed: dict[str, dict[str, None]] = {}
        by_rows: set[int] = set()
        for i, target in enumerate(targets):
            if self._blocks(target):
                by_rows.add(i)
                continue
            for row in self.rows.get(target.origin_name, ()):
                if overlaps(target, row):
                    needed.setdefault(row.endpoint, {})[row.slice_name] = None
        found = {}
        for who, names in needed.items():
            found[who] = _read_arrays(self.path / self.pieces[who], names)
        read = lambda row: found[row.endpoint][row.slice_name]

        arrays = []
        for i, target in enumerate(targets):
            if i in by_rows:
                arrays.append(self._assemble_rows(target, first))
            else:
                rows = self.rows.get(target.origin_name, ())
                arrays.append(assemble_slice(target, rows, read, may_differ=self.may_differ))
        return arrays

    # -- tables ------------------------------------------------------------------------------------

    def _blocks(self, target: VarDistributed) -> list[tuple[VarDistributed, SavedBlock, int]]:
        """Return the saved blocks of a table that overlap `target`.

        Each tuple contains a saved slice, the files of its block, and the slice's index among the
        arrays in these files.
        """
        rows = self.rows.get(target.origin_name, ())
        found = []
        for row in rows:
            saved = self.tables.get((row.endpoint, row.slice_name))
            if saved is not None and overlaps(target, row):
                found.append((row, *saved))
        return found

    def init_args(self, init: Program) -> list[Any] | None:
        """Return the arguments that the saved job passed to its init.

        Return None if all rows are saved, since no row then needs the init.

        Raises:
          StateError: `init` takes another number of arguments.
        """
        block = next((block for block, _ in self.tables.values() if block.about["begins"]), None)
        if block is None:
            return None
        with _read_errors(block.folder):
            args = block.args()
        wanted = values_at(init.inputs, init.in_names)
        if len(args) != len(wanted):
            raise StateError(
                f"the init of this plan has {len(wanted)} arguments, but in the job that saved "
                f"{self.path} it had {len(args)}; plan with the init of that job"
            )
        return [as_jax(x, t.dtype) for x, t in zip(args, wanted, strict=True)]

    def _assemble_rows(self, target: VarDistributed, first: InitSlice | None) -> np.ndarray:
        """Return a slice of an array that was saved by rows; arguments as in `on_host`."""
        if target.is_slice and target.axis:
            # The slice is cut along another dimension, but files contain full rows.
            aval = jax.ShapeDtypeStruct(target.origin_shape, target.dtype)
            full = full_slice(target.origin_name, aval)
            return self._assemble_rows(full, first)[target.index]
        out = np.empty(target.slice_shape, target.dtype)
        is_saved = np.zeros(target.slice_shape[0], bool)
        blocks, found = self._blocks(target), 0
        for row, block, column in blocks:
            found += _shared_rows(target, row)
            with _read_errors(block.folder):
                for segment in block.segments({column: target.dtype}):
                    at, local = _locate_rows(target, row, segment.present)
                    out[local], is_saved[local] = segment.rows[0][at], True
        if found != len(is_saved):
            raise StateError(
                f"{target.origin_name} has {len(is_saved)} rows, but the blocks in {self.path} "
                f"have {found}; restore another checkpoint, such as the result of "
                "dtrans.checkpoint.latest"
            )
        if is_saved.all():
            return out
        if first is None:
            raise StateError(
                f"{self.path} lacks {len(is_saved) - int(is_saved.sum()):,} of {len(is_saved):,} "
                f"rows of {target.origin_name}, since no step looked them up; pass the traced "
                "init, which generates them: dtrans.checkpoint.load(path, main, startup)"
            )
        new = np.asarray(first(target))
        for row, block, column in blocks:
            with _read_errors(block.folder):
                ids, (old,) = block.first({column: target.dtype})
            at, local = _locate_rows(target, row, ids)
            check_first(target.origin_name, old[at], new[local])
        out[~is_saved] = new[~is_saved]
        return out

    def table(
        self, targets: Sequence[VarDistributed], eqn: Any, args: Sequence[Any] | None
    ) -> SavedTable | None:
        """Return an object that reads the saved rows of a table's block (its rows on one server).

        Return None if the block cannot be restored row by row. For example, the files may lack
        rows, and there is no init that generates them.

        Args:
          targets: the slices of the block and of the state arrays that have the block's rows.
          eqn: the `init_on_use` equation, which generates rows that were not saved; or None.
          args: the arguments of the init.
        """
        target = targets[0]
        row_count, found_count = target.slice_shape[0], 0
        # for each saved block, its files and the column of each array in them
        sources: list[tuple[VarDistributed, SavedBlock, dict[int, Any]]] = []
        for source in zip(*map(self._blocks, targets), strict=False):
            row, block, _ = source[0]
            columns: dict[int, Any] = {}
            for t, (_, other, column) in zip(targets, source, strict=True):
                if other is not block:
                    return None
                columns[column] = t.dtype
            if len(columns) != len(targets):
                return None
            found_count += _shared_rows(target, row)
            sources.append((row, block, columns))
        if found_count != row_count:
            return None

        step = evicted = 0
        parts: list[RowSegment] = []
        probe_ids, probe_rows = [np.arange(0)], [_empty_rows(targets)]
        for row, block, columns in sources:
            step = max(step, block.about["step"])
            evicted += block.about["evicted"]
            with _read_errors(block.folder):
                for segment in block.segments(columns):
                    parts.append(_select_rows(target, row, segment))
                if block.about["begins"]:
                    ids, rows = block.first(columns)
                    at, local = _locate_rows(target, row, ids)
                    probe_ids.append(local)
                    probe_rows.append([x[at] for x in rows])
        merged = _merge_segments(parts, targets)
        begins = None
        if eqn is not None and args is not None:
            begins = InitRows(eqn, args)
        if begins is None and len(merged.present) != row_count:
            return None
        return SavedTable(
            [t.slice_name for t in targets],
            merged,
            rows=row_count,
            step=step,
            evicted=evicted,
            begins=begins,
            probe=(np.concatenate(probe_ids), _concatenate_columns(probe_rows)),
        )


def require_path(path: Folder | None) -> Path:
    """Return the path; raise CheckpointError for None, which `latest` may return."""
    if path is None:
        raise CheckpointError(
            "the path of the checkpoint is None, which dtrans.checkpoint.latest returns if the "
            "folder has no complete checkpoint whose name is a number; start with job.init(...), "
            "or pass the path of a checkpoint"
        )
    return Path(path)


@dataclasses.dataclass(frozen=True)
class PieceLayout:
    """Division of a checkpoint into pieces: the slices of arrays that each process writes.

    Attributes:
      main: the traced training step of one device.
      rows: the slices in all pieces; the `endpoint` of a slice is its saver.
      pieces: name of each piece, by saver (the role that writes the piece).
    """

    main: Program
    rows: Sequence[VarDistributed]
    pieces: Mapping[str, str]


def check_place(path: Folder, layout: PieceLayout, here: Sequence[str], save_id: SaveId) -> None:
    """Check, before training, that this process will be able to write its pieces.

    Args:
      path: the folder of the checkpoint.
      layout: the pieces.
      here: the savers in this process.
      save_id: the run, step and tag that the pieces of these savers record.

    Raises:
      ConfigError: the path cannot be written, or contains another checkpoint.
    """
    _orbax()
    path = Path(path).absolute()
    existing = next(p for p in (path, *path.parents) if os.path.exists(p))
    if not existing.is_dir():
        raise ConfigError(
            f"{path} cannot be created, since {existing} is not a folder; save elsewhere"
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{path} cannot be created, since this process may not write to {existing}; change the "
            "permissions of this folder, or save to another path"
        )
    # a process that writes no pieces, such as a driver, checks the place of the first piece
    for who in here or [*layout.pieces][:1]:
        _stale_pieces(path, layout, who, _about(layout, who, save_id), save_id)


def write(
    path: Folder,
    layout: PieceLayout,
    who: str,
    values: Mapping[str, Any],
    save_id: SaveId,
    *,
    steps_may_differ: bool = False,
    serving: bool = False,
) -> None:
    """Write one role's arrays (a piece of a checkpoint), unless this run has written them already.

    If a failed trainer is dropped, the job goes back to an earlier step, and begins a new run.
    Pieces that the old run wrote for later steps are then replaced.

    Args:
      path: the folder of the checkpoint.
      layout: the pieces.
      who: the saver.
      values: the saver's arrays, by the slice names in `layout`.
      save_id: the run and step.
      steps_may_differ: True if other processes of the job may be at another step (asynchronous
        servers).
      serving: True if the process continues to serve during the save, so that the save should use
        little processor time.

    Raises:
      ConfigError: the path contains another checkpoint.
      StateError: the piece cannot be written.
    """
    path = Path(path).absolute()
    about = _about(layout, who, save_id)
    if steps_may_differ:
        about["steps_may_differ"] = True
    place = path / layout.pieces[who]
    with _write_errors(who, place):
        existing = _read_or_torn(place) if place.exists() else None
        if existing and save_id.step is not None and _are_one_save([existing, about]):
            return
        if existing and save_id.job and _is_undone(existing, save_id):
            _remove(place)
        for piece in _stale_pieces(path, layout, who, about, save_id):
            _remove(piece)
        # folders that get a new entry; the new entries must be flushed to the disk
        changed_folders = [path]
        for folder in (path, *path.parents):
            if not folder.exists():
                changed_folders.append(folder.parent)
        path.mkdir(parents=True, exist_ok=True)
        _save_piece(place, values, about, serving=serving)
        for folder in changed_folders:
            _sync(folder)


def _is_undone(about: Mapping[str, Any], save_id: SaveId) -> bool:
    """Return True if the job went back to a step before the one that a piece contains.

    A job that drops a failed trainer goes back, and repeats steps. A piece that the job wrote
    before must then be replaced.
    """
    return bool(about.get("job") == save_id.job and save_id.run[0] not in _run_of(about))


def _about(layout: PieceLayout, who: str, save_id: SaveId) -> dict[str, Any]:
    """Return the description of a piece, which its file `overview` stores as JSON."""
    rows, saver_rows = [], []
    for row in layout.rows:
        fields = _as_json(row)
        rows.append(fields)
        if row.endpoint == who:
            saver_rows.append(fields)
    return {
        "format": FORMAT,
        "tag": save_id.tag,
        "run": list(save_id.run),
        "step": save_id.step,
        "plan": hashlib.sha256(json.dumps(rows).encode()).hexdigest(),
        "pieces": dict(layout.pieces),
        "types": _types_of(layout.main),
        "rows": saver_rows,
        "job": save_id.job,
    }


def _save_piece(
    place: Path, values: Mapping[str, Any], about: Mapping[str, Any], *, serving: bool = False
) -> None:
    """Write a piece (one process's subfolder) under a temporary name, and rename it when complete.

    A running server does not use orbax.
    """
    tables = _tables_in(values)
    by_rows = set[str]()
    for table in tables:
        by_rows.update(table.names)
    to_orbax: Callable[[Any], Any] = _as_replicated
    if serving or jax.process_count() == 1:
        to_orbax = as_numpy
    arrays = {}
    for n, x in values.items():
        # Orbax refuses arrays without elements. Nothing is lost, since their types are saved.
        if n not in by_rows and math.prod(x.shape):
            arrays[n] = to_orbax(x)
    if serving:
        _save_files(place, arrays, tables, about)
        return
    ocp, (handler, args) = _orbax(), _piece_types()
    with (
        _one_at_a_time,
        ocp.Checkpointer(
            handler(*_handlers()), multiprocessing_options=_single_process()
        ) as checkpointer,
    ):
        checkpointer.save(place, args=args(arrays, tables, about))


def _save_files(
    place: Path,
    arrays: Mapping[str, np.ndarray],
    tables: Sequence[TableRows],
    about: Mapping[str, Any],
) -> None:
    """Write a piece of a checkpoint without orbax."""
    unfinished = _unfinished(place)
    shutil.rmtree(unfinished, ignore_errors=True)  # a crashed process may have left this folder
    unfinished.mkdir()
    types = write_arrays(unfinished / "dense", arrays)
    about = _with_tables(unfinished, tables, about)
    about["format"] = max(about["format"], FORMAT_FILES)
    about |= {"dense": types, "checksums": checksums(arrays)}
    overview = unfinished / "overview"
    overview.mkdir()
    text = json.dumps({**about, "checksum": _checksum_of(about)})
    (overview / OVERVIEW_FILE).write_text(text)
    _sync_tree(unfinished)
    unfinished.rename(place)


def _checksum_of(about: Mapping[str, Any]) -> int:
    """Return the checksum of a piece's description, without the description's field `checksum`."""
    return zlib.crc32(json.dumps(about).encode())


def _unfinished(place: Path) -> Path:
    """Return the name of a piece during its write; orbax uses the same temporary name."""
    return place.with_name(f"{place.name}.orbax-checkpoint-tmp")


def _with_tables(
    folder: Path, tables: Sequence[TableRows], about: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the rows of tables to a piece; return the piece's description with the tables added."""
    if not tables:
        return dict(about)
    return {**about, "format": FORMAT_TABLES, "tables": write_tables(folder / "rows", tables)}


def _tables_in(values: Mapping[str, Any]) -> list[TableRows]:
    """Return the tables with all arrays in `values`; these tables are saved by rows."""
    arrays_of: dict[TableRows, set[str]] = {}
    for n, x in values.items():
        if isinstance(x, ArrayLike) and x.table is not None:
            arrays_of.setdefault(x.table, set()).add(n)
    return [table for table, names in arrays_of.items() if names.issuperset(table.names)]


@contextlib.contextmanager
def _write_errors(who: str, place: Path) -> Iterator[None]:
    """Convert errors of orbax and of the disk to StateErrors that name the piece."""
    try:
        yield
    except DtransError:
        raise
    except (OSError, ValueError) as e:  # orbax raises ValueError for a full disk
        # Remove the incomplete files, which would fill the disk.
        shutil.rmtree(_unfinished(place), ignore_errors=True)
        raise StateError(
            f"the piece of {who} cannot be written to {place}: {e}; free space there, or allow "
            "this process to write there. Earlier checkpoints are unchanged"
        ) from e


# -- rows of tables --------------------------------------------------------------------------------


def check_first(name: str, old: np.ndarray, new: np.ndarray) -> None:
    """Raise StateError if this job's init generates other table rows than the saved job's init.

    Args:
      name: name of the table.
      old: some initial rows, which the checkpoint contains for this check.
      new: the same rows, generated by this init.
    """
    if not same_values(old, new):
        raise StateError(
            f"the checkpoint lacks rows of {name} that no step looked up. The init of this plan "
            "would generate other rows than the init of the job that wrote the checkpoint; plan "
            "with the init of that job"
        )


def _locate_rows(
    target: VarDistributed, row: VarDistributed, ids: np.ndarray
) -> tuple[slice | np.ndarray, np.ndarray]:
    """Find the rows of `ids` that are in `target`; return their positions in `ids` and in `target`.

    Args:
      target: a slice of a table.
      row: another slice of the table.
      ids: indices of rows within the slice `row`.
    """
    in_leaf = row.rows.in_leaf(ids)
    at = target.rows.among(in_leaf)
    return at, target.rows.local(in_leaf[at])


def _shared_rows(target: VarDistributed, row: VarDistributed) -> int:
    """Return the number of rows of the full array that are in both slices."""
    _, local = _locate_rows(target, row, np.arange(row.slice_shape[0]))
    return len(local)


def _select_rows(target: VarDistributed, row: VarDistributed, segment: RowSegment) -> RowSegment:
    """Select the rows of `segment` that slice `target` contains; number them as in `target`."""
    at, local = _locate_rows(target, row, segment.ids)
    # `segment.rows` lacks evicted rows, which are in `segment.ids` and `segment.changed`.
    positions = np.cumsum(segment.changed > 0) - 1
    present = positions[at][segment.changed[at] > 0]
    return RowSegment(local, segment.changed[at], [x[present] for x in segment.rows])


def _merge_segments(parts: Sequence[RowSegment], targets: Sequence[VarDistributed]) -> RowSegment:
    """Merge several segments of table rows into one segment with sorted ids."""
    nothing = np.empty(0, np.int64)
    parts = [RowSegment(nothing, nothing, _empty_rows(targets)), *parts]
    ids = np.concatenate([x.ids for x in parts])
    changed = np.concatenate([x.changed for x in parts])
    order = np.argsort(ids, kind="stable")
    present_order = np.argsort(ids[changed > 0], kind="stable")
    columns = _concatenate_columns([x.rows for x in parts])
    return RowSegment(ids[order], changed[order], [x[present_order] for x in columns])


def _empty_rows(targets: Sequence[VarDistributed]) -> list[np.ndarray]:
    """Return an array with 0 rows for each slice; its rows have the slice's shape and dtype."""
    return [np.empty((0, *t.slice_shape[1:]), t.dtype) for t in targets]


def _concatenate_columns(parts: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    """Join the arrays of several row segments: all first arrays, all second arrays, and so on."""
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


# -- remains of earlier runs -----------------------------------------------------------------------


def _are_one_save(abouts: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if the descriptions belong to pieces of one save, by all processes of a job."""
    runs = []
    for about in abouts:
        for key in ("plan", "step", "pieces", "types"):
            if about.get(key) != abouts[0].get(key):
                return False
        if _tag_of(about) != _tag_of(abouts[0]):
            return False
        runs.append(_run_of(about))
    # pieces without any identifier of a run are distinguished by their tags alone
    return bool(set.intersection(*runs)) or not any(runs)


def _run_of(about: Mapping[str, Any]) -> set[str]:
    """Return the identifiers of a piece's run; old versions of dtrans wrote a tag instead."""
    return set(about.get("run", [about["tag"]]))


def _tag_of(about: Mapping[str, Any]) -> str | None:
    """Return the user's tag, or None if an old version of dtrans wrote the piece.

    In pieces of old versions, `tag` identifies the run.
    """
    return about["tag"] if "run" in about else None


def _origin(about: Mapping[str, Any]) -> str:
    """Return a description for errors: the tag, run and step of a piece, as far as known."""
    known = []
    if _tag_of(about) is not None:
        known.append(f"tag {_tag_of(about)!r}")
    if _run_of(about):
        known.append(f"run {min(_run_of(about))}")
    if about.get("step") is not None:
        known.append(f"step {about['step']}")
    return ", ".join(known) or "of an unknown run"


def _may_be_replaced(theirs: Mapping[str, Any] | None, save_id: SaveId) -> bool:
    """Return True if this process may replace a piece of an incomplete checkpoint.

    Args:
      theirs: the description of the piece; None if a crash of the host lost files of the piece.
      save_id: the run, step and tag that this process is about to record in its piece.
    """
    if theirs is None:
        return True
    run = _run_of(theirs)
    # If one of the two pieces has no identifier of its run, tags are compared instead.
    same_tag = (
        save_id.tag is not None and save_id.tag == theirs["tag"] and not (run and save_id.run)
    )
    return save_id.shared and not same_tag and run.isdisjoint({*save_id.run, THIS_PROCESS})


def _stale_pieces(
    path: Path, layout: PieceLayout, who: str, about: Mapping[str, Any], save_id: SaveId
) -> list[Path]:
    """Return the pieces of incomplete earlier saves that this process removes before it writes.

    `layout` has the name of each process's piece in this save. A process removes an old piece with
    the name of its new piece. It also removes old pieces with names that are not in `layout`. So a
    process never removes a piece that another process of this save has just written.

    Args:
      path: the folder of the checkpoint.
      layout: the pieces of this save.
      who: the saver in this process.
      about: the description of the saver's new piece.
      save_id: the run, step and tag that the new piece records.

    Raises:
      ConfigError: the folder contains a complete checkpoint, or pieces that this run has written or
        may have written.
    """
    place = path / layout.pieces[who]
    found = {piece: _read_or_torn(piece) for piece in _finished(path)}
    others = {}  # pieces that do not belong to this save
    for piece, theirs in found.items():
        if theirs is None or not _are_one_save([theirs, about]):
            others[piece] = theirs
    is_complete = False
    for theirs in others.values():
        if theirs is not None and _is_complete(path, theirs, others):
            is_complete = True
    blocking = []  # pieces that must not be removed
    for piece, theirs in others.items():
        if is_complete or not _may_be_replaced(theirs, save_id):
            blocking.append(piece)
    if place in found and (place not in others or place in blocking):
        theirs, origins = found[place], ""
        if theirs is not None and place in others:
            origins = f" ({_origin(theirs)}; this save is {_origin(about)})"
        raise ConfigError(f"{place} exists already{origins}; save each checkpoint to another path")
    if blocking:
        theirs = found[blocking[0]]
        origins = "torn"
        if theirs is not None:
            origins = f"{_origin(theirs)}; this save is {_origin(about)}"
        raise ConfigError(
            f"{path} contains {blocking[0].name} of another job, run or step ({origins}); save to "
            "another path. If the processes of a job were started separately, pass the same tag= "
            "in each"
        )
    return [piece for piece in others if piece == place or piece.name not in layout.pieces.values()]


def _is_complete(
    path: Path, about: Mapping[str, Any], found: Mapping[Path, Mapping[str, Any] | None]
) -> bool:
    """Return True if all pieces that the description `about` lists exist and belong to one save."""
    pieces = []
    for name in about["pieces"].values():
        piece = found.get(path / name)
        if piece is None:
            return False
        pieces.append(piece)
    return _are_one_save(pieces)


def _read_or_torn(piece: Path) -> dict[str, Any] | None:
    """Return the description of a piece; None if it is unreadable after a crash of the host."""
    try:
        return _read_about(piece)
    except StateError as e:
        torn = isinstance(e.__cause__, (FileNotFoundError, json.JSONDecodeError))
        # The folder can also be empty, if another process is removing it.
        if torn and _names(piece) <= {"overview", "arrays", "dense", "rows", *ORBAX_FILES}:
            return None
        # Either the folder has other files and so is not a piece, or the disk has an error.
        raise


def _names(folder: Path) -> set[str]:
    """Return the names in a folder; an empty set if the folder does not exist."""
    try:
        return {*os.listdir(folder)}
    except (FileNotFoundError, NotADirectoryError):
        return set()


def _remove(piece: Path) -> None:
    """Remove a piece of a checkpoint; rename it first, so that no crash leaves it incomplete."""
    away = piece.with_name(f".{piece.name}.{new_run()}")
    with contextlib.suppress(FileNotFoundError):  # another process may have removed the piece
        piece.rename(away)
        shutil.rmtree(away)


def _sync(folder: Path) -> None:
    """Flush the names of the files in a folder to the disk, if the system allows it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # the process may write to the folder, but not read it
        return
    try:
        os.fsync(descriptor)
    except OSError as e:
        # some file systems cannot flush folders
        if e.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _sync_tree(folder: Path) -> None:
    """Flush all files in a folder and its subfolders to the disk."""
    for at, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(at, name), "rb") as file:
                os.fsync(file.fileno())
        _sync(Path(at))


# -- contents of pieces ----------------------------------------------------------------------------


def _types_of(main: Program) -> dict[str, str]:
    """Return the types of the arrays in params and opt_state, by name, as text."""
    types = {}
    for n in all_names(main.args[:2]):
        types[n] = type_of(main.inputs[n])
    return types


def _as_json(row: VarDistributed) -> dict[str, Any]:
    return dataclasses.asdict(row) | {"dtype": str(row.dtype)}


def _from_json(fields: Mapping[str, Any]) -> VarDistributed:
    shapes = {n: tuple(fields[n]) for n in ("origin_shape", "slice_shape")}
    buckets = fields.get("buckets")  # older checkpoints lack this key
    row_buckets = RowBuckets(**buckets) if buckets else None
    return VarDistributed(**{**fields, **shapes, "buckets": row_buckets})


def _finished(path: Path) -> list[Path]:
    """Return the folders of a checkpoint's complete pieces; other pieces have temporary names."""
    _orbax()
    found = []
    for n in _names(path):
        if re.fullmatch(r"(pserver|trainer|rank)-\d+", n) and (path / n).is_dir():
            found.append(path / n)
    return sorted(found)


def _read_about(piece: Path) -> dict[str, Any]:
    """Return the description of a checkpoint's piece."""
    with _read_errors(piece), _one_at_a_time:
        about = dict(_handlers()[1].restore(piece / "overview"))
        # orbax, and older versions of dtrans, write no checksum
        checksum = about.pop("checksum", None)
        if checksum is not None and _checksum_of(about) != checksum:
            raise ValueError(
                f"overview/{OVERVIEW_FILE} is damaged: its checksum has changed since the write"
            )
        if about["format"] not in (FORMAT, FORMAT_TABLES, FORMAT_FILES):
            raise ValueError(
                f"its format is {about['format']}, but this version of dtrans reads {FORMAT} to "
                f"{FORMAT_FILES}"
            )
        return about


def _read_arrays(piece: Path, names: Mapping[str, None]) -> dict[str, np.ndarray]:
    """Return some of the arrays of a checkpoint's piece."""
    about = _read_about(piece)
    if "dense" in about:
        with _read_errors(piece):
            return read_arrays(piece / "dense", about["dense"], names, about.get("checksums", {}))
    ocp = _orbax()
    wanted = ocp.args.PyTreeRestore(
        item=dict.fromkeys(names, 0),
        restore_args=dict.fromkeys(names, ocp.RestoreArgs(restore_type=np.ndarray)),
        partial_restore=True,
    )
    with _read_errors(piece), _one_at_a_time:
        return dict(_handlers()[0].restore(piece / "arrays", args=wanted))


def _read_errors(piece: Path) -> AbstractContextManager[None]:
    """Convert errors of orbax and of the disk to StateErrors that name the piece."""
    return read_errors(f"{piece} cannot be read as a piece of a checkpoint")


def _orbax() -> Any:
    try:
        import orbax.checkpoint
    except ImportError as e:
        raise missing_extra("checkpoints need orbax", "checkpoint") from e
    return orbax.checkpoint


def load_orbax() -> None:
    """Import orbax now, since the import would delay the first save by several steps.

    Raises:
      ConfigError: orbax is not installed.
    """
    _piece_types()


# orbax counts its operations in global state, so threads must not use it at the same time
_one_at_a_time = threading.Lock()


def _single_process() -> Any:
    """Return options that make orbax treat this process as the only one."""
    me = jax.process_index()
    prefix = f"dtrans-{me}"
    return _orbax().options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=prefix
    )


def _handlers() -> tuple[Any, Any]:
    """Return orbax's handlers for arrays and for JSON."""
    ocp, alone = _orbax(), _single_process()
    kinds = ocp.type_handlers
    arrays = kinds.ArrayHandler(
        primary_host=alone.primary_host,
        use_replica_parallel=False,
        enable_write_sharding_file=False,
    )
    registry = kinds.create_type_handler_registry(
        (int, kinds.ScalarHandler()),  # `_read_arrays` passes 0 as a placeholder for each array
        # A copy is not needed, since a save waits until everything is written.
        (np.ndarray, kinds.NumpyHandler(deepcopy_host_arrays=False)),
        (jax.Array, arrays),
    )
    return (
        ocp.PyTreeCheckpointHandler(type_handler_registry=registry, multiprocessing_options=alone),
        ocp.JsonCheckpointHandler(multiprocessing_options=alone),
    )


@functools.cache
def _piece_types() -> tuple[Any, Any]:
    """Return the orbax handler that writes a piece, and the class of its arguments."""
    ocp = _orbax()

    class Handler(ocp.CheckpointHandler):  # type: ignore[name-defined]
        """Orbax handler for a piece: it writes the folders that the module's docstring lists."""

        def __init__(self, arrays: Any, overview: Any) -> None:
            self.arrays, self.overview = arrays, overview

        def save(self, directory: Any, args: Args) -> None:
            about = _with_tables(Path(directory), args.tables, args.overview)
            (directory / "overview").mkdir()
            self.overview.save(directory / "overview", args=ocp.args.JsonSave(about))
            if args.arrays:
                (directory / "arrays").mkdir()
                self.arrays.save(directory / "arrays", args=ocp.args.PyTreeSave(args.arrays))

        def finalize(self, directory: Any) -> None:
            if (directory / "arrays").exists():
                self.arrays.finalize(directory / "arrays")
            _sync_tree(Path(directory))

        def restore(self, directory: Any, args: Any = None) -> Any:
            raise NotImplementedError("dtrans reads the folders of a piece one by one")

    @ocp.args.register_with_handler(Handler, for_save=True, for_restore=True)
    @dataclasses.dataclass
    class Args(ocp.args.CheckpointArgs):  # type: ignore[name-defined]
        arrays: Mapping[str, Any]
        tables: Sequence[TableRows]
        overview: Mapping[str, Any]

    return Handler, Args


def _as_replicated(x: Any) -> jax.Array:
    """Return an array in the form that makes orbax write it in this process.

    Orbax lets the process with the first copy write a replicated array. So the result is a global
    array with its first copy here. Its second copy belongs to a process that does not exist, and
    nothing reads it.
    """
    x = words(x)
    local = jax.local_devices()[0]
    if isinstance(x, jax.Array):
        local = next(iter(x.devices()))
    other = next(d for d in jax.devices() if d.process_index != local.process_index)
    mesh = Mesh(np.array([local, other]), ("copies",))
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.make_array_from_single_device_arrays(x.shape, sharding, [jax.device_put(x, local)])
