"""Pieces of checkpoints, and checkpoints of pieces; the only module that imports orbax.

    ckpt/300/pserver-0/arrays     arrays by name, as orbax stores pytrees, without empty arrays
    ckpt/300/pserver-0/dense      the same as NumPy files (`dtrans.checkpoint.array_files`), in
                                  place of `arrays`, from a server that was serving
    ckpt/300/pserver-0/rows       rows of tables that exist in part
                                  (`dtrans.checkpoint.table_files`)
    ckpt/300/pserver-0/overview   JSON: the step's rows in each saved array, the types of the step's
                                  arrays, all pieces, a hash of the plan, the run, step and tag

A complete checkpoint is a folder with all pieces that each piece lists, with one plan, run, step
and tag. A crash leaves some of the pieces. In a later run with the same folder, each process
replaces its pieces. A complete checkpoint is never overwritten.

Files are flushed to the disk before a piece is renamed, and its name before `write` returns.

Orbax assumes that all processes of a `jax.distributed` job write one checkpoint together. Processes
would wait for each other, only the first would write NumPy arrays, and none would write an array
that one process has alone. But a piece belongs to one process. So each process tells orbax that it
is alone, and passes arrays that appear replicated. Orbax's handler of several items broadcasts the
creation of a folder to all processes, so pieces have another handler.
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
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtrans.checkpoint.array_files import read_arrays, write_arrays
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
from dtrans.checkpoint.runs import THIS_PROCESS, Mark, new_run
from dtrans.checkpoint.saved_rows import ArrayLike, InitRows, RowSegment, SavedTable, TableRows
from dtrans.checkpoint.table_files import SavedBlock, write_tables
from dtrans.errors import CheckpointError, ConfigError, DtransError, StateError, missing_extra
from dtrans.ir.array_fns import words
from dtrans.ir.program import Program
from dtrans.ir.selection import values_at
from dtrans.parameter_server.overview import VarDistributed
from dtrans.rows.row_buckets import RowBuckets
from dtrans.step.frozen import check_frozen


# formats of a piece: plain, with rows of tables, and with files of arrays
FORMAT, FORMAT_TABLES, FORMAT_FILES = 1, 2, 3
ORBAX_FILES = ("_CHECKPOINT_METADATA", "commit_success.txt")  # files that orbax adds to a piece

Folder = str | os.PathLike[str]
InitSlice = Callable[[VarDistributed], np.ndarray]  # returns a slice of the init's outputs


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Complete checkpoint.

    Attributes:
      path: its folder.
      pieces: the savers, and the folder of each.
      types: the type of each array of the step, by name.
      rows: the saved rows of each array, and of each array that servers have in addition.
      tables: saved blocks of tables whose rows exist one by one, with the position of an array in
        them. Keys are the saver and the name of the slice.
      may_differ: True if copies of an array may come from different steps.
    """

    path: Path
    pieces: Mapping[str, str]
    types: Mapping[str, str]
    rows: Mapping[str, Sequence[VarDistributed]]
    tables: Mapping[tuple[str, str], tuple[SavedBlock, int]]
    may_differ: bool = False

    @classmethod
    def at(cls, path: Folder | None) -> Checkpoint:
        """Open the checkpoint at a path. Raises StateError if there is no complete one."""
        path = require_path(path).absolute()
        with _read_errors(path):
            pieces = _finished(path)
        abouts = {piece.name: _read_about(piece) for piece in pieces}
        if not abouts:
            problem = "" if path.is_dir() else ": it is no folder"
            raise StateError(f"there is no checkpoint at {path}{problem}")
        name, first = next(iter(abouts.items()))
        for count, (other, about) in enumerate(abouts.items(), 1):
            if not _are_one_save([*abouts.values()][:count]):
                raise StateError(
                    f"the checkpoint at {path} has pieces of several jobs, runs or steps: {name} "
                    f"({_origin(first)}) and {other} ({_origin(about)}); restore another "
                    "checkpoint, such as dtrans.checkpoint.latest finds"
                )
        missing = [
            f"{piece} of {who}" for who, piece in first["pieces"].items() if piece not in abouts
        ]
        if missing:
            raise StateError(
                f"the checkpoint at {path} is incomplete: {', '.join(missing)} is missing; restore "
                "another one, such as dtrans.checkpoint.latest finds"
            )
        rows = [_from_json(fields) for about in abouts.values() for fields in about["rows"]]
        # older checkpoints lack this key
        may_differ = any(about.get("goes_on") for about in abouts.values())
        tables: dict[tuple[str, str], tuple[SavedBlock, int]] = {}
        for who, piece in first["pieces"].items():
            for i, about in enumerate(abouts[piece].get("tables", ())):
                block = SavedBlock(path / piece / "rows" / str(i), about)
                tables |= {(who, n): (block, column) for column, n in enumerate(about["names"])}
        return cls(path, first["pieces"], first["types"], group_by_origin(rows), tables, may_differ)

    def of(self, main: Program, remedy: str = "") -> Checkpoint:
        """Return this checkpoint. Raises StateError unless it fits a step and its constants.

        Args:
          main: the step.
          remedy: the end of the error.
        """
        wanted = _types_of(main)
        for name in (*wanted, *self.types):
            if self.types.get(name) != wanted.get(name):
                raise StateError(
                    f"the checkpoint at {self.path} belongs to another step: {name} is "
                    f"{self.types.get(name, 'not')} in it, and {wanted.get(name, 'nothing')} in "
                    f"{main.name}{remedy}"
                )
        constants = self.on_host([full_slice(n, main.inputs[n]) for n in main.frozen_constants])
        for name, x in zip(main.frozen_constants, constants, strict=True):
            check_frozen(main, name, x)
        return self

    def arrays(
        self, targets: Sequence[VarDistributed], first: InitSlice | None = None
    ) -> list[jax.Array]:
        """Return slices of saved arrays, on the default device."""
        values = self.on_host(targets, first)
        return [as_jax(x, target.dtype) for x, target in zip(values, targets, strict=True)]

    def on_host(
        self, targets: Sequence[VarDistributed], first: InitSlice | None = None
    ) -> list[np.ndarray]:
        """Return slices of saved arrays. Each piece is read once, and only overlapping arrays.

        Args:
          targets: the slices.
          first: a function that returns a slice of the init's outputs, for table rows that were not
            saved.
        """
        needed: dict[str, dict[str, None]] = {}
        by_rows = {id(target) for target in targets if self._blocks(target)}
        for target in targets:
            for row in self.rows.get(target.origin_name, ()):
                if id(target) not in by_rows and overlaps(target, row):
                    needed.setdefault(row.endpoint, {})[row.slice_name] = None
        found = {}
        for who, names in needed.items():
            found[who] = _read_arrays(self.path / self.pieces[who], names)
        read = lambda row: found[row.endpoint][row.slice_name]
        saver_rows = lambda target: self.rows.get(target.origin_name, ())
        full_slice = lambda target: assemble_slice(
            target, saver_rows(target), read, may_differ=self.may_differ
        )
        return [
            self._assemble_rows(x, first) if id(x) in by_rows else full_slice(x) for x in targets
        ]

    # -- tables ------------------------------------------------------------------------------------

    def _blocks(self, target: VarDistributed) -> list[tuple[VarDistributed, SavedBlock, int]]:
        """Return the table blocks that overlap a slice."""
        rows = self.rows.get(target.origin_name, ())
        found = []
        for row in rows:
            saved = self.tables.get((row.endpoint, row.slice_name))
            if saved is not None and overlaps(target, row):
                found.append((row, *saved))
        return found

    def init_args(self, init: Program) -> list[Any] | None:
        """Return the init's arguments in the job that saved; None if all rows are saved.

        Raises:
          StateError: this init takes another number of arguments.
        """
        block = next((block for block, _ in self.tables.values() if block.about["begins"]), None)
        if block is None:
            return None
        with _read_errors(block.folder):
            args = block.args()
        wanted = values_at(init.inputs, init.in_names)
        if len(args) != len(wanted):
            raise StateError(
                f"the init of this plan takes {len(wanted)} arrays, and the init of the job that "
                f"saved {self.path} took {len(args)}; plan with the init of that job"
            )
        return [as_jax(x, t.dtype) for x, t in zip(args, wanted, strict=True)]

    def _assemble_rows(self, target: VarDistributed, first: InitSlice | None) -> np.ndarray:
        """Return a slice of an array of a table."""
        if target.is_slice and target.axis:
            # a cut of columns: blocks have complete rows
            aval = jax.ShapeDtypeStruct(target.origin_shape, target.dtype)
            everything = full_slice(target.origin_name, aval)
            init_all = None if first is None else lambda _: first(everything)
            return self._assemble_rows(everything, init_all)[target.index]
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
                f"{target.origin_name}: {self.path} has blocks for {found} of {len(is_saved)} "
                "rows; restore another checkpoint, such as dtrans.checkpoint.latest finds"
            )
        if is_saved.all():
            return out
        if first is None:
            raise StateError(
                f"{len(is_saved) - int(is_saved.sum()):,} of {len(is_saved):,} rows of "
                f"{target.origin_name} were not looked up by any step, and {self.path} does not "
                "have them; pass the traced init, which generates them: "
                "dtrans.checkpoint.load(path, main, startup)"
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
        """Return the rows of a block and of its state; None if rows do not exist one by one.

        Args:
          targets: the block, and each array of its state.
          eqn: the `init_on_use` of all other rows; None if there is none.
          args: the arguments of the init.
        """
        sources = list(zip(*map(self._blocks, targets), strict=False))
        blocks = [source[0][1] for source in sources]
        same = all(block is source[0][1] for source in sources for _, block, _ in source)
        counts = [_shared_rows(targets[0], source[0][0]) for source in sources]
        if not sources or not same or sum(counts) != targets[0].slice_shape[0]:
            return None
        types = [t.dtype for t in targets]
        parts, probes = [], []
        for source in sources:
            row, block = source[0][0], source[0][1]
            columns = {column: dtype for (_, _, column), dtype in zip(source, types, strict=True)}
            if len(columns) != len(types):
                return None
            with _read_errors(block.folder):
                parts += [
                    _select_rows(targets[0], row, segment) for segment in block.segments(columns)
                ]
                if block.about["begins"]:
                    ids, rows = block.first(columns)
                    at, local = _locate_rows(targets[0], row, ids)
                    probes.append((local, [x[at] for x in rows]))
        segment = _merge_segments(parts, targets)
        begins = None if eqn is None or args is None else InitRows(eqn, args)
        if begins is None and len(segment.present) != targets[0].slice_shape[0]:
            return None
        ids = np.concatenate([ids for ids, _ in probes]) if probes else np.arange(0)
        if probes:
            columns_of_probes = zip(*(rows for _, rows in probes), strict=True)
            probe_rows = [np.concatenate(column) for column in columns_of_probes]
        else:
            probe_rows = [np.empty((0, *t.slice_shape[1:]), t.dtype) for t in targets]
        slice_names = [t.slice_name for t in targets]
        steps = [block.about["step"] for block in blocks]
        evicted = [block.about["evicted"] for block in blocks]
        return SavedTable(
            slice_names,
            segment,
            rows=targets[0].slice_shape[0],
            step=max(steps),
            evicted=sum(evicted),
            begins=begins,
            probe=(ids, probe_rows),
        )


def require_path(path: Folder | None) -> Path:
    """Return the path. Raises CheckpointError for None, which `latest` returns."""
    if path is None:
        raise CheckpointError(
            "there is no checkpoint to read: the path is None, which dtrans.checkpoint.latest "
            "returns if the folder has no complete checkpoint under a number as name; start with "
            "job.init(...), or pass the path of a checkpoint"
        )
    return Path(path)


@dataclasses.dataclass(frozen=True)
class PieceLayout:
    """Savers of a step's arrays, and the rows that each writes.

    Attributes:
      main: the step.
      rows: the rows of all savers.
      pieces: the savers, and the folder of each.
    """

    main: Program
    rows: Sequence[VarDistributed]
    pieces: Mapping[str, str]


def check_place(path: Folder, layout: PieceLayout, here: Sequence[str], mark: Mark) -> None:
    """Check before training that pieces can be written to a path.

    Args:
      path: the folder of the checkpoint.
      layout: the pieces.
      here: the savers in this process.
      mark: the mark of their pieces.

    Raises:
      ConfigError: they cannot be written.
    """
    _orbax()
    path = Path(path).absolute()
    there = next(p for p in (path, *path.parents) if os.path.exists(p))
    if not there.is_dir():
        raise ConfigError(f"{path} cannot hold a checkpoint: {there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{path} cannot hold a checkpoint: {there} may not be written to")
    for who in here or [*layout.pieces][:1]:
        _stale_pieces(path, layout, who, _about(layout, who, mark), mark)


def write(
    path: Folder,
    layout: PieceLayout,
    who: str,
    values: Mapping[str, Any],
    mark: Mark,
    *,
    goes_on: bool = False,
    serving: bool = False,
) -> None:
    """Write the piece of one saver: arrays by the names of its rows.

    An existing piece of the same run and step is left unchanged.

    Args:
      path: the folder of the checkpoint.
      layout: the pieces.
      who: the saver.
      values: its arrays.
      mark: the run and step.
      goes_on: True if other processes of the job make separate steps meanwhile.
      serving: True if the process makes steps meanwhile, so that writing should use few processors.

    Raises:
      ConfigError: another checkpoint is there.
      StateError: the folder cannot be used.
    """
    path = Path(path).absolute()
    about = _about(layout, who, mark) | ({"goes_on": True} if goes_on else {})
    place = path / layout.pieces[who]
    with _write_errors(who, place):
        there = _read_or_torn(place) if place.exists() else None
        if there and mark.step is not None and _are_one_save([there, about]):
            return
        for piece in _stale_pieces(path, layout, who, about, mark):
            _remove(piece)
        name_leaves = [path, *(p.parent for p in (path, *path.parents) if not p.exists())]
        path.mkdir(parents=True, exist_ok=True)
        _save_piece(place, values, about, serving=serving)
        for folder in name_leaves:
            _sync(folder)


def _about(layout: PieceLayout, who: str, mark: Mark) -> dict[str, Any]:
    """Return the description of a piece."""
    plan = json.dumps([_as_json(row) for row in layout.rows])
    return {
        "format": FORMAT,
        "tag": mark.tag,
        "run": list(mark.run),
        "step": mark.step,
        "plan": hashlib.sha256(plan.encode()).hexdigest(),
        "pieces": dict(layout.pieces),
        "types": _types_of(layout.main),
        "rows": [_as_json(row) for row in layout.rows if row.endpoint == who],
    }


def _save_piece(
    place: Path, values: Mapping[str, Any], about: Mapping[str, Any], *, serving: bool = False
) -> None:
    """Write a piece with orbax under a temporary name, and rename it."""
    alone = serving or jax.process_count() == 1
    tables = _tables_in(values)
    by_rows = {n for t in tables for n in t.names}
    # orbax refuses arrays without elements; their type describes them completely
    dense = {n: x for n, x in values.items() if n not in by_rows and math.prod(x.shape)}
    arrays = {n: as_numpy(x) if alone else _as_replicated(x) for n, x in dense.items()}
    ocp, (handler, args) = _orbax(), _piece_types()
    with (
        _one_at_a_time,
        ocp.Checkpointer(
            handler(*_handlers()), multiprocessing_options=_single_process()
        ) as checkpointer,
    ):
        checkpointer.save(place, args=args(arrays, tables, about, serving))


def _tables_in(values: Mapping[str, Any]) -> list[TableRows]:
    """Return the table rows among the values of a piece."""
    found = dict.fromkeys(
        x.table for x in values.values() if isinstance(x, ArrayLike) and x.table is not None
    )
    complete = []
    for table in found:
        if all(getattr(values.get(n), "table", None) is table for n in table.names):
            complete.append(table)
    return complete


@contextlib.contextmanager
def _write_errors(who: str, place: Path) -> Iterator[None]:
    """Convert errors of orbax and of the disk to StateErrors that name the piece."""
    try:
        yield
    except DtransError:
        raise
    except (OSError, ValueError) as e:  # orbax raises ValueError for a full disk
        # remains of the write would fill the disk
        shutil.rmtree(place.with_name(f"{place.name}.orbax-checkpoint-tmp"), ignore_errors=True)
        raise StateError(
            f"the piece of {who} cannot be written to {place}: {e}; free space, or let this "
            "process write there. Earlier checkpoints are unchanged"
        ) from e


# -- rows of tables --------------------------------------------------------------------------------


def check_first(name: str, old: np.ndarray, new: np.ndarray) -> None:
    """Raise StateError if an init generates different rows than the init of the job that saved."""
    if not same_values(old, new):
        raise StateError(
            f"the init of this plan generates different rows of {name} than the init of the job "
            "that saved, and the checkpoint lacks rows that no step has looked up; plan with the "
            "init of that job"
        )


def _locate_rows(
    target: VarDistributed, row: VarDistributed, ids: np.ndarray
) -> tuple[slice | np.ndarray, np.ndarray]:
    """Return the positions in `ids` of rows that `target` also has, and their indices there.

    Args:
      ids: indices of rows in `row`.
    """
    in_leaf = row.rows.in_leaf(ids)
    at = target.rows.among(in_leaf)
    return at, target.rows.local(in_leaf[at])


def _shared_rows(target: VarDistributed, row: VarDistributed) -> int:
    """Return the number of rows that two slices share."""
    _, local = _locate_rows(target, row, np.arange(row.slice_shape[0]))
    return len(local)


def _select_rows(target: VarDistributed, row: VarDistributed, segment: RowSegment) -> RowSegment:
    """Return the rows of a segment that are in a slice, with their indices there."""
    at, local = _locate_rows(target, row, segment.ids)
    # `rows` has existing rows only, `ids` and `changed` evicted ones too
    positions = np.cumsum(segment.changed > 0) - 1
    present = positions[at][segment.changed[at] > 0]
    return RowSegment(local, segment.changed[at], [x[present] for x in segment.rows])


def _merge_segments(parts: Sequence[RowSegment], targets: Sequence[VarDistributed]) -> RowSegment:
    """Merge segments into one with increasing ids."""
    nothing = np.empty(0, np.int64)
    empty_rows = [np.empty((0, *t.slice_shape[1:]), t.dtype) for t in targets]
    parts = [RowSegment(nothing, nothing, empty_rows), *parts]
    ids = np.concatenate([x.ids for x in parts])
    changed = np.concatenate([x.changed for x in parts])
    order = np.argsort(ids, kind="stable")
    present_order = np.argsort(ids[changed > 0], kind="stable")
    columns = zip(*(x.rows for x in parts), strict=True)
    rows = [np.concatenate(column)[present_order] for column in columns]
    return RowSegment(ids[order], changed[order], rows)


# -- remains of earlier runs -----------------------------------------------------------------------


def _are_one_save(abouts: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if pieces were written by one save of one run."""
    first, runs = abouts[0], [_run_of(about) for about in abouts]
    keys = ("plan", "tag", "step", "pieces", "types")
    same = all(_key_of(about, key) == _key_of(first, key) for about in abouts for key in keys)
    return same and (bool(set.intersection(*runs)) or not any(runs))


def _run_of(about: Mapping[str, Any]) -> set[str]:
    """Return the identifiers of a piece's run; older pieces have a tag only."""
    return set(about.get("run", [about["tag"]]))


def _key_of(about: Mapping[str, Any], key: str) -> Any:
    return about.get(key) if "run" in about or key != "tag" else None


def _origin(about: Mapping[str, Any]) -> str:
    """Describe the origin of a piece, for messages."""
    parts = {
        "tag": repr(_key_of(about, "tag")),
        "run": min(_run_of(about), default=""),
        "step": about.get("step"),
    }
    known = ", ".join(f"{name} {x}" for name, x in parts.items() if x not in ("None", "", None))
    return known or "of an unknown run"


def _may_be_replaced(theirs: Mapping[str, Any] | None, mark: Mark) -> bool:
    """Return True if a piece of an incomplete checkpoint is torn or comes from an earlier run."""
    if theirs is None:
        return True
    run = _run_of(theirs)
    maybe = mark.tag is not None and mark.tag == theirs["tag"] and not (run and mark.run)
    return mark.shared and not maybe and run.isdisjoint({*mark.run, THIS_PROCESS})


def _stale_pieces(
    path: Path, layout: PieceLayout, who: str, about: Mapping[str, Any], mark: Mark
) -> list[Path]:
    """Return the pieces to remove before this one is written: remains of incomplete earlier saves.

    Each process removes those under its name, and those under no name of this job. So it never
    removes a piece that another process of its run has written meanwhile.

    Raises:
      ConfigError: pieces belong to a complete checkpoint, to this run, or to a run that may be this
        one.
    """
    place = path / layout.pieces[who]
    found = {piece: _read_or_torn(piece) for piece in _finished(path)}
    others = {
        piece: theirs
        for piece, theirs in found.items()
        if theirs is None or not _are_one_save([theirs, about])
    }
    readable = [theirs for theirs in others.values() if theirs is not None]
    is_complete = any(_is_complete(path, theirs, others) for theirs in readable)
    blocking = [
        piece
        for piece, theirs in others.items()
        if is_complete or not _may_be_replaced(theirs, mark)
    ]
    if place in found and (place not in others or place in blocking):
        theirs, origins = found[place], ""
        if theirs is not None and place in others:
            origins = f" ({_origin(theirs)}, and this is {_origin(about)})"
        raise ConfigError(
            f"{place} exists already{origins}; save each checkpoint of {who} to a separate path"
        )
    if blocking:
        theirs = found[blocking[0]]
        origins = "torn"
        if theirs is not None:
            origins = f"{_origin(theirs)}, and this is {_origin(about)}"
        raise ConfigError(
            f"{path} is in use: {blocking[0].name} in it belongs to another job, run or step "
            f"({origins}); save to a separate path, and pass the same tag in processes that were "
            "started separately"
        )
    return [piece for piece in others if piece == place or piece.name not in layout.pieces.values()]


def _is_complete(
    path: Path, about: Mapping[str, Any], found: Mapping[Path, Mapping[str, Any] | None]
) -> bool:
    """Return True if all pieces that one of them lists exist and belong to one save."""
    parts = [found.get(path / name) for name in about["pieces"].values()]
    there = [part for part in parts if part is not None]
    return len(there) == len(parts) and _are_one_save(there)


def _read_or_torn(piece: Path) -> dict[str, Any] | None:
    """Return the description of a piece; None if a machine crash left a name without files."""
    try:
        return _read_about(piece)
    except StateError as e:
        torn = isinstance(e.__cause__, (FileNotFoundError, json.JSONDecodeError))
        # it may be empty: another process may have removed it meanwhile
        if torn and _names(piece) <= {"overview", "arrays", "dense", "rows", *ORBAX_FILES}:
            return None
        raise  # a folder that dtrans has not written, or an error of the disk


def _names(folder: Path) -> set[str]:
    """Return the names in a folder; none if it does not exist."""
    try:
        return {*os.listdir(folder)}
    except (FileNotFoundError, NotADirectoryError):
        return set()


def _remove(piece: Path) -> None:
    """Remove a piece: rename it first, so that a crash leaves no torn piece."""
    away = piece.with_name(f".{piece.name}.{new_run()}")
    with contextlib.suppress(FileNotFoundError):  # another process has removed it
        piece.rename(away)
        shutil.rmtree(away)


def _sync(folder: Path) -> None:
    """Flush the names in a folder to the disk, if this process may read the folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # a folder that may be written but not listed
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
    """Flush all files of a folder to the disk."""
    for at, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(at, name), "rb") as file:
                os.fsync(file.fileno())
        _sync(Path(at))


# -- contents of pieces ----------------------------------------------------------------------------


def _types_of(main: Program) -> dict[str, str]:
    """Return the types of the arrays that a step updates, by name."""
    return {n: type_of(main.inputs[n]) for spec in main.args[:2] for n in spec.names}


def _as_json(row: VarDistributed) -> dict[str, Any]:
    return dataclasses.asdict(row) | {"dtype": str(row.dtype)}


def _from_json(fields: Mapping[str, Any]) -> VarDistributed:
    shapes = {n: tuple(fields[n]) for n in ("origin_shape", "slice_shape")}
    buckets = fields.get("buckets")  # older checkpoints lack this key
    row_buckets = RowBuckets(**buckets) if buckets else None
    return VarDistributed(**{**fields, **shapes, "buckets": row_buckets})


def _finished(path: Path) -> list[Path]:
    """Return the pieces that were written completely; others have a longer name."""
    _orbax()
    names = [n for n in _names(path) if re.fullmatch(r"(pserver|trainer|rank)-\d+", n)]
    return sorted(path / n for n in names if (path / n).is_dir())


def _read_about(piece: Path) -> dict[str, Any]:
    """Return the description of a piece."""
    with _read_errors(piece), _one_at_a_time:
        about = _handlers()[1].restore(piece / "overview")
        if about["format"] not in (FORMAT, FORMAT_TABLES, FORMAT_FILES):
            raise ValueError(
                f"its format is {about['format']}, and this dtrans reads {FORMAT} to {FORMAT_FILES}"
            )
        return dict(about)


def _read_arrays(piece: Path, names: Mapping[str, None]) -> dict[str, np.ndarray]:
    """Return some of the arrays of a piece."""
    types = _read_about(piece).get("dense")
    if types is not None:
        with _read_errors(piece):
            return read_arrays(piece / "dense", types, names)
    ocp = _orbax()
    wanted = ocp.args.PyTreeRestore(
        item=dict.fromkeys(names, 0),
        restore_args=dict.fromkeys(names, ocp.RestoreArgs(restore_type=np.ndarray)),
        partial_restore=True,
    )
    with _read_errors(piece), _one_at_a_time:
        return dict(_handlers()[0].restore(piece / "arrays", args=wanted))


@contextlib.contextmanager
def _read_errors(piece: Path) -> Iterator[None]:
    """Convert errors of orbax and of the disk to StateErrors that name the piece."""
    try:
        yield
    except DtransError:
        raise
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as e:
        raise StateError(f"{piece} cannot be read as a piece of a checkpoint: {e}") from e


def _orbax() -> Any:
    try:
        import orbax.checkpoint
    except ImportError as e:
        raise missing_extra("checkpoints need orbax", "checkpoint") from e
    return orbax.checkpoint


def load_orbax() -> None:
    """Import orbax, so that the first save does not: it takes as long as several steps.

    Raises:
      ConfigError: it is not installed.
    """
    _piece_types()


# orbax numbers its operations per process
_one_at_a_time = threading.Lock()


def _single_process() -> Any:
    """Return options of orbax for a process that writes alone."""
    me = jax.process_index()
    prefix = f"dtrans-{me}"
    return _orbax().options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=prefix
    )


def _handlers() -> tuple[Any, Any]:
    """Return orbax's handlers of arrays and of JSON."""
    ocp, alone = _orbax(), _single_process()
    kinds = ocp.type_handlers
    arrays = kinds.ArrayHandler(
        primary_host=alone.primary_host,
        use_replica_parallel=False,
        enable_write_sharding_file=False,
    )
    registry = kinds.create_type_handler_registry(
        (int, kinds.ScalarHandler()),  # placeholders of the arrays to read
        # no copy, which takes memory and time: a save blocks until everything is written
        (np.ndarray, kinds.NumpyHandler(deepcopy_host_arrays=False)),
        (jax.Array, arrays),
    )
    return (
        ocp.PyTreeCheckpointHandler(type_handler_registry=registry, multiprocessing_options=alone),
        ocp.JsonCheckpointHandler(multiprocessing_options=alone),
    )


@functools.cache
def _piece_types() -> tuple[Any, Any]:
    """Return orbax's handler of a piece and the class of its arguments."""
    ocp = _orbax()

    class Handler(ocp.CheckpointHandler):  # type: ignore[name-defined]
        """Handler of a piece: an overview, arrays and rows of tables, each in a folder."""

        def __init__(self, arrays: Any, overview: Any) -> None:
            self.arrays, self.overview = arrays, overview

        def save(self, directory: Any, args: Args) -> None:
            about = dict(args.overview)
            if args.tables:
                about |= {
                    "format": FORMAT_TABLES,
                    "tables": write_tables(Path(directory) / "rows", args.tables),
                }
            arrays = args.arrays
            if args.serving:
                about |= {
                    "format": max(about["format"], FORMAT_FILES),
                    "dense": write_arrays(Path(directory) / "dense", arrays),
                }
                arrays = {}
            (directory / "overview").mkdir()
            self.overview.save(directory / "overview", args=ocp.args.JsonSave(about))
            if arrays:
                (directory / "arrays").mkdir()
                self.arrays.save(directory / "arrays", args=ocp.args.PyTreeSave(arrays))

        def finalize(self, directory: Any) -> None:
            if (directory / "arrays").exists():
                self.arrays.finalize(directory / "arrays")
            _sync_tree(Path(directory))

        def restore(self, directory: Any, args: Any = None) -> Any:
            raise NotImplementedError("the folders of a piece are read separately")

    @ocp.args.register_with_handler(Handler, for_save=True, for_restore=True)
    @dataclasses.dataclass
    class Args(ocp.args.CheckpointArgs):  # type: ignore[name-defined]
        arrays: Mapping[str, Any]
        tables: Sequence[TableRows]
        overview: Mapping[str, Any]
        serving: bool

    return Handler, Args


def _as_replicated(x: Any) -> jax.Array:
    """Return an array of this process as one that a second process replicates.

    Orbax then makes this process, which has the first copy, write it.
    """
    x = words(x)
    local = next(iter(x.devices())) if isinstance(x, jax.Array) else jax.local_devices()[0]
    other = next(d for d in jax.devices() if d.process_index != local.process_index)
    mesh = Mesh(np.array([local, other]), ("copies",))
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.make_array_from_single_device_arrays(x.shape, sharding, [jax.device_put(x, local)])
