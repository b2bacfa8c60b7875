"""Pieces of checkpoints, and what they make up: the only file that knows orbax.

    ckpt/300/pserver-0/arrays     what it holds, by name, as orbax keeps pytrees; arrays without elements left out
    ckpt/300/pserver-0/dense      the same in files of NumPy's (`dtrans.checkpoint.array_files`), in the place of
                                  `arrays`, where a server wrote them that was serving
    ckpt/300/pserver-0/rows       rows of tables, where not all of one are made (`dtrans.checkpoint.table_files`)
    ckpt/300/pserver-0/overview   JSON: of what these are which rows, the names and types of the step's arrays, which
                                  pieces there are to be, a hash of the plan, the run and step, and
                                  the user's tag

A whole checkpoint is a folder with all pieces that each of them names, of one plan, run, step and
tag. A crash in a save leaves some of them. A later run that saves to the same folder replaces
these, each process its own. A whole checkpoint is never written over.

Files reach the disk before a piece gets its name, and its name before `write` returns.

Orbax takes the processes of a `jax.distributed` job for writers of one checkpoint. They would wait
for each other, NumPy's arrays would be written by the first of them, and an array that one process
has alone by nobody. A piece is one process's own: so each tells orbax that it is alone, and gives
it arrays that it seems to share. And orbax's own handler of several items tells all processes that
a folder is there when one has made its own: pieces have another.
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
    by_origin,
    joined,
    overlap,
    same_values,
    type_of,
    whole,
)
from dtrans.checkpoint.runs import THIS_PROCESS, Mark, new_run
from dtrans.checkpoint.saved_rows import ArrayLike, Begins, RowSegment, SavedTable, TableRows
from dtrans.checkpoint.table_files import SavedBlock, write_tables
from dtrans.errors import ConfigError, DtransError, StateError, missing_extra
from dtrans.ir.array_fns import words
from dtrans.ir.program import Program
from dtrans.parameter_server.overview import VarDistributed
from dtrans.rows.row_buckets import RowBuckets
from dtrans.step.frozen import check_frozen


FORMAT, OF_TABLES, OF_FILES = (
    1,
    2,
    3,
)  # of a piece, of one with rows of tables, and of one with files of arrays
ORBAX_FILES = ("_CHECKPOINT_METADATA", "commit_success.txt")  # which orbax puts beside them

Folder = str | os.PathLike[str]
First = Callable[[VarDistributed], np.ndarray]  # a slice as the init makes it


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint.

    Attributes:
      path: its folder.
      pieces: who saved, and the folder of each.
      types: name to type of each array of the step.
      rows: what there is of each array, and of each that servers keep beside the step's.
      tables: of arrays whose rows are there one by one, by who saved and the name of the slice:
        these, and which of their arrays it is.
      may_differ: whether copies of an array may be of several steps.
    """

    path: Path
    pieces: Mapping[str, str]
    types: Mapping[str, str]
    rows: Mapping[str, Sequence[VarDistributed]]
    tables: Mapping[tuple[str, str], tuple[SavedBlock, int]]
    may_differ: bool = False

    @classmethod
    def at(cls, path: Folder) -> Checkpoint:
        """The checkpoint at a path. Raises StateError where it is none, or not a whole one."""
        path = Path(path).absolute()
        with _reading(path):
            pieces = _finished(path)
        there = {piece.name: _read_about(piece) for piece in pieces}
        if not there:
            raise StateError(
                f"there is no checkpoint at {path}" + ("" if path.is_dir() else ": it is no folder")
            )
        name, first = next(iter(there.items()))
        for count, (other, about) in enumerate(there.items(), 1):
            if not _are_one_save([*there.values()][:count]):
                raise StateError(
                    f"the checkpoint at {path} has pieces of several jobs, runs or steps: {name} "
                    f"({_origin(first)}) "
                    f"and {other} ({_origin(about)}); take up another one, such as "
                    "dtrans.checkpoint.latest finds"
                )
        missing = [
            f"{piece} of {who}" for who, piece in first["pieces"].items() if piece not in there
        ]
        if missing:
            raise StateError(
                f"the checkpoint at {path} is not whole: {', '.join(missing)} is not there"
            )
        rows = [_from_json(fields) for about in there.values() for fields in about["rows"]]
        may_differ = any(
            about.get("goes_on") for about in there.values()
        )  # checkpoints of old do not say
        tables: dict[tuple[str, str], tuple[SavedBlock, int]] = {}
        for who, piece in first["pieces"].items():
            for i, of in enumerate(there[piece].get("tables", ())):
                block = SavedBlock(path / piece / "rows" / str(i), of)
                tables |= {(who, n): (block, column) for column, n in enumerate(of["names"])}
        return cls(path, first["pieces"], first["types"], by_origin(rows), tables, may_differ)

    def of(self, main: Program) -> Checkpoint:
        """Itself. Raises StateError where it is that of another step, or of leaves that the step
        holds still."""
        wanted = _types_of(main)
        for name in (*wanted, *self.types):
            if self.types.get(name) != wanted.get(name):
                raise StateError(
                    f"the checkpoint at {self.path} is of another step: {name} is "
                    f"{self.types.get(name, 'not')} in it, "
                    f"and {wanted.get(name, 'nothing')} in {main.name}"
                )
        for name, x in zip(
            main.frozen_constants,
            self.on_host([whole(n, main.inputs[n]) for n in main.frozen_constants]),
            strict=True,
        ):
            check_frozen(main, name, x)
        return self

    def arrays(
        self, targets: Sequence[VarDistributed], first: First | None = None
    ) -> list[jax.Array]:
        """Slices of what was saved, on the default device."""
        return [
            as_jax(x, target.dtype)
            for x, target in zip(self.on_host(targets, first), targets, strict=True)
        ]

    def on_host(
        self, targets: Sequence[VarDistributed], first: First | None = None
    ) -> list[np.ndarray]:
        """Slices of what was saved. Each piece is read once, and of it only the arrays that share
        rows with these.

        Args:
          first: gives a slice as the init makes it, of which rows of tables are taken that were not
            saved.
        """
        needed: dict[str, dict[str, None]] = {}
        by_rows = {id(target) for target in targets if self._blocks(target)}
        for target in targets:
            for row in self.rows.get(target.origin_name, ()):
                if id(target) not in by_rows and overlap(target, row):
                    needed.setdefault(row.endpoint, {})[row.slice_name] = None
        found = {
            who: _read_arrays(self.path / self.pieces[who], names) for who, names in needed.items()
        }
        read = lambda row: found[row.endpoint][row.slice_name]
        rows_of = lambda target: self.rows.get(target.origin_name, ())
        whole = lambda target: joined(target, rows_of(target), read, may_differ=self.may_differ)
        return [self._from_rows(x, first) if id(x) in by_rows else whole(x) for x in targets]

    # -- tables
    # --------------------------------------------------------------------------------------

    def _blocks(self, target: VarDistributed) -> list[tuple[VarDistributed, SavedBlock, int]]:
        """The blocks of tables that share rows with a slice."""
        rows = self.rows.get(target.origin_name, ())
        found = [
            (row, self.tables.get((row.endpoint, row.slice_name)))
            for row in rows
            if overlap(target, row)
        ]
        return [(row, *x) for row, x in found if x is not None]

    def init_args(self, init: Program) -> list[Any] | None:
        """What the init of the job was given that saved; None where all rows are there.

        Raises:
          StateError: another init takes other arguments.
        """
        block = next((block for block, _ in self.tables.values() if block.about["begins"]), None)
        if block is None:
            return None
        with _reading(block.folder):
            args = block.args()
        wanted = [init.inputs[n] for n in init.in_names]
        if len(args) != len(wanted):
            raise StateError(
                f"the init of this plan takes {len(wanted)} arrays, and that of the job that saved "
                f"{self.path} took "
                f"{len(args)}: plan with the init of that job"
            )
        return [as_jax(x, t.dtype) for x, t in zip(args, wanted, strict=True)]

    def _from_rows(self, target: VarDistributed, first: First | None) -> np.ndarray:
        """A slice of an array of a table."""
        if target.is_slice and target.axis:
            everything = whole(
                target.origin_name, jax.ShapeDtypeStruct(target.origin_shape, target.dtype)
            )
            of_all = None if first is None else lambda _: first(everything)
            return self._from_rows(everything, of_all)[target.index]
        made, there, found = (
            np.empty(target.slice_shape, target.dtype),
            np.zeros(target.slice_shape[0], bool),
            0,
        )
        blocks = self._blocks(target)
        for row, block, column in blocks:
            found += _shared_rows(target, row)
            with _reading(block.folder):
                for segment in block.segments({column: target.dtype}):
                    at, local = _places(target, row, segment.made)
                    made[local], there[local] = segment.rows[0][at], True
        if found != len(there):
            raise StateError(f"{target.origin_name}: {found} of {len(there)} rows are there")
        if there.all():
            return made
        if first is None:
            raise StateError(
                f"{len(there) - int(there.sum()):,} of {len(there):,} rows of {target.origin_name} "
                "were not looked up "
                f"by any step, and {self.path} does not have them; give the traced init, which "
                "makes them: "
                "dtrans.checkpoint.load(path, main, startup)"
            )
        new = np.asarray(first(target))
        for row, block, column in blocks:
            with _reading(block.folder):
                ids, (old,) = block.first({column: target.dtype})
            at, local = _places(target, row, ids)
            check_first(target.origin_name, old[at], new[local])
        made[~there] = new[~there]
        return made

    def table(
        self, targets: Sequence[VarDistributed], eqn: Any, args: Sequence[Any] | None
    ) -> SavedTable | None:
        """The rows of a block and of its state; None where they are not there one by one.

        Args:
          targets: the block, and each array of its state.
          eqn: the `init_on_use` that makes the other rows; None where nothing makes them one by
            one.
          args: what the init is given.
        """
        sources = list(zip(*map(self._blocks, targets), strict=False))
        blocks = [of[0][1] for of in sources]
        same = all(x is block for of, block in zip(sources, blocks, strict=True) for _, x, _ in of)
        counts = [_shared_rows(targets[0], of[0][0]) for of in sources]
        if not sources or not same or sum(counts) != targets[0].slice_shape[0]:
            return None
        types = [t.dtype for t in targets]
        parts, probes = [], []
        for of in sources:
            row, block = of[0][0], of[0][1]
            columns = {column: dtype for (_, _, column), dtype in zip(of, types, strict=True)}
            if len(columns) != len(types):
                return None
            with _reading(block.folder):
                parts += [_within(targets[0], row, segment) for segment in block.segments(columns)]
                if block.about["begins"]:
                    ids, rows = block.first(columns)
                    at, local = _places(targets[0], row, ids)
                    probes.append((local, [x[at] for x in rows]))
        segment = _sorted(parts, targets)
        begins = None if eqn is None or args is None else Begins(eqn, args)
        if begins is None and len(segment.made) != targets[0].slice_shape[0]:
            return None
        joined_rows = [np.concatenate(x) for x in zip(*(rows for _, rows in probes), strict=True)]
        ids = np.concatenate([ids for ids, _ in probes]) if probes else np.arange(0)
        return SavedTable(
            [t.slice_name for t in targets],
            segment,
            rows=targets[0].slice_shape[0],
            step=max(block.about["step"] for block in blocks),
            evicted=sum(block.about["evicted"] for block in blocks),
            begins=begins,
            probe=(
                ids,
                joined_rows or [np.empty((0, *t.slice_shape[1:]), t.dtype) for t in targets],
            ),
        )


@dataclasses.dataclass(frozen=True)
class PieceLayout:
    """Who holds what of a step, of those who save.

    Attributes:
      main: the step.
      rows: what each of them holds.
      pieces: their names, and the folder of each.
    """

    main: Program
    rows: Sequence[VarDistributed]
    pieces: Mapping[str, str]


def check_place(path: Folder, layout: PieceLayout, here: Sequence[str], mark: Mark) -> None:
    """Check before training that pieces can be written to a path.

    Args:
      here: who of this process will write one.
      mark: what they will be marked with.

    Raises:
      ConfigError: they cannot.
    """
    _orbax()
    path = Path(path).absolute()
    there = next(p for p in (path, *path.parents) if os.path.exists(p))
    if not there.is_dir():
        raise ConfigError(f"{path} cannot hold a checkpoint: {there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{path} cannot hold a checkpoint: {there} may not be written to")
    for who in here or [*layout.pieces][:1]:
        _remains(path, layout, who, _about(layout, who, mark), mark)


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
    """Write one piece: what one of those who save holds, by the names of its rows.

    Where the piece is there already, of the same run and step, nothing is done.

    Args:
      mark: of the run and step.
      goes_on: whether others of the job make steps while it is written, each by itself.
      serving: whether the process has steps to make meanwhile, from which the writing should not
        take processors.

    Raises:
      ConfigError: another checkpoint is there. StateError: the folder cannot be used.
    """
    path = Path(path).absolute()
    about = _about(layout, who, mark) | ({"goes_on": True} if goes_on else {})
    place = path / layout.pieces[who]
    with _writing(who, place):
        there = _read_or_torn(place) if place.exists() else None
        if there and mark.step is not None and _are_one_save([there, about]):
            return
        for piece in _remains(path, layout, who, about, mark):
            _remove(piece)
        named = [path, *(p.parent for p in (path, *path.parents) if not p.exists())]
        path.mkdir(parents=True, exist_ok=True)
        _save_piece(place, values, about, serving=serving)
        for folder in named:
            _sync(folder)


def _about(layout: PieceLayout, who: str, mark: Mark) -> dict[str, Any]:
    """Return what a piece says of itself."""
    return {
        "format": FORMAT,
        "tag": mark.tag,
        "run": list(mark.run),
        "step": mark.step,
        "plan": hashlib.sha256(
            json.dumps([_as_json(row) for row in layout.rows]).encode()
        ).hexdigest(),
        "pieces": dict(layout.pieces),
        "types": _types_of(layout.main),
        "rows": [_as_json(row) for row in layout.rows if row.endpoint == who],
    }


def _save_piece(
    place: Path, values: Mapping[str, Any], about: Mapping[str, Any], *, serving: bool = False
) -> None:
    """Let orbax write a piece beside its place, and give it its name."""
    # orbax refuses arrays without elements: their type says all of them
    alone = serving or jax.process_count() == 1
    tables = _tables_in(values)
    by_rows = {n for t in tables for n in t.names}
    whole = {n: x for n, x in values.items() if n not in by_rows and math.prod(x.shape)}
    arrays = {n: as_numpy(x) if alone else _as_shared(x) for n, x in whole.items()}
    ocp, (handler, args) = _orbax(), _piece_types()
    with (
        _one_at_a_time,
        ocp.Checkpointer(handler(*_handlers()), multiprocessing_options=_alone()) as checkpointer,
    ):
        checkpointer.save(place, args=args(arrays, tables, about, serving))


def _tables_in(values: Mapping[str, Any]) -> list[TableRows]:
    """The rows of tables of what is to be written."""
    found = dict.fromkeys(
        x.table for x in values.values() if isinstance(x, ArrayLike) and x.table is not None
    )
    return [t for t in found if all(getattr(values.get(n), "table", None) is t for n in t.names)]


@contextlib.contextmanager
def _writing(who: str, place: Path) -> Iterator[None]:
    """Errors of orbax and of the disk, with the piece that they are about."""
    try:
        yield
    except DtransError:
        raise  # it says its own cause
    except (OSError, ValueError) as e:  # of orbax's own writer a full disk is a ValueError
        shutil.rmtree(
            place.with_name(f"{place.name}.orbax-checkpoint-tmp"), ignore_errors=True
        )  # it takes room
        raise StateError(
            f"the piece of {who} cannot be written to {place}: {e}. Make room, or let this process "
            "write there; what "
            "was saved before is as it was"
        ) from e


# -- rows of tables --------------------------------------------------------------------------------


def check_first(name: str, old: np.ndarray, new: np.ndarray) -> None:
    """Raise StateError where an init makes other rows than that of the job that saved."""
    if not same_values(old, new):
        raise StateError(
            f"the init of this plan makes other rows of {name} than that of the job that saved, "
            "and rows that no step "
            "has looked up are not in the checkpoint; plan with the init of that job"
        )


def _places(
    target: VarDistributed, row: VarDistributed, ids: np.ndarray
) -> tuple[slice | np.ndarray, np.ndarray]:
    """Which rows of a slice, by their numbers in it, are among those of another; and where they are
    there."""
    in_leaf = row.rows.in_leaf(ids)
    at = target.rows.among(in_leaf)
    return at, target.rows.local(in_leaf[at])


def _shared_rows(target: VarDistributed, row: VarDistributed) -> int:
    """How many rows two slices share."""
    _, local = _places(target, row, np.arange(row.slice_shape[0]))
    return len(local)


def _within(target: VarDistributed, row: VarDistributed, segment: RowSegment) -> RowSegment:
    """The rows of a segment that a slice has, by their numbers there."""
    at, local = _places(target, row, segment.ids)
    among_made = np.cumsum(segment.changed > 0) - 1
    there = among_made[at][segment.changed[at] > 0]
    return RowSegment(local, segment.changed[at], [x[there] for x in segment.rows])


def _sorted(parts: Sequence[RowSegment], targets: Sequence[VarDistributed]) -> RowSegment:
    """Segments as one."""
    none = RowSegment(
        np.empty(0, np.int64),
        np.empty(0, np.int64),
        [np.empty((0, *t.slice_shape[1:]), t.dtype) for t in targets],
    )
    parts = [none, *parts]
    ids, changed = (
        np.concatenate([x.ids for x in parts]),
        np.concatenate([x.changed for x in parts]),
    )
    order = np.argsort(ids, kind="stable")
    of_made = np.argsort(ids[changed > 0], kind="stable")
    rows = [np.concatenate(of)[of_made] for of in zip(*(x.rows for x in parts), strict=True)]
    return RowSegment(ids[order], changed[order], rows)


# -- remains of earlier runs -----------------------------------------------------------------------


def _are_one_save(abouts: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if pieces were written by one save of one run."""
    first, runs = abouts[0], [_run_of(about) for about in abouts]
    keys = ("plan", "tag", "step", "pieces", "types")
    same = all(_key_of(about, key) == _key_of(first, key) for about in abouts for key in keys)
    return same and (bool(set.intersection(*runs)) or not any(runs))


def _run_of(about: Mapping[str, Any]) -> set[str]:
    """Return the words of a piece's run; pieces of old have a tag only."""
    return set(about.get("run", [about["tag"]]))


def _key_of(about: Mapping[str, Any], key: str) -> Any:
    return about.get(key) if "run" in about or key != "tag" else None


def _origin(about: Mapping[str, Any]) -> str:
    """Describe where a piece comes from, for messages."""
    parts = {
        "tag": repr(_key_of(about, "tag")),
        "run": min(_run_of(about), default=""),
        "step": about.get("step"),
    }
    told = ", ".join(f"{name} {x}" for name, x in parts.items() if x not in ("None", "", None))
    return told or "of a process by itself"


def _may_be_replaced(theirs: Mapping[str, Any] | None, mark: Mark) -> bool:
    """Return True if a piece that is part of no whole checkpoint is known to be of an earlier run,
    or torn."""
    if theirs is None:
        return True
    run = _run_of(theirs)
    maybe = mark.tag is not None and mark.tag == theirs["tag"] and not (run and mark.run)
    return mark.shared and not maybe and run.isdisjoint({*mark.run, THIS_PROCESS})


def _remains(
    path: Path, layout: PieceLayout, who: str, about: Mapping[str, Any], mark: Mark
) -> list[Path]:
    """Return the pieces to remove before this one is written: remains of earlier runs whose save
    never became whole.

    Each process removes those in its own place, and those in the place of nobody. So it removes no
    piece that another process of its run has written meanwhile.

    Raises:
      ConfigError: pieces of a whole checkpoint, or of this run, or of a run that may be this one.
    """
    place = path / layout.pieces[who]
    found = {piece: _read_or_torn(piece) for piece in _finished(path)}
    others = {
        piece: theirs
        for piece, theirs in found.items()
        if theirs is None or not _are_one_save([theirs, about])
    }
    whole = any(_is_whole(path, theirs, others) for theirs in others.values() if theirs is not None)
    kept = [
        piece for piece, theirs in others.items() if whole or not _may_be_replaced(theirs, mark)
    ]
    if place in found and (place not in others or place in kept):
        theirs = found[place]
        of = (
            f" ({_origin(theirs)}, and this is {_origin(about)})"
            if theirs is not None and place in others
            else ""
        )
        raise ConfigError(
            f"{place} is there already{of}: save each checkpoint of {who} to a path of its own"
        )
    if kept:
        theirs = found[kept[0]]
        of = f"{_origin(theirs)}, and this is {_origin(about)}" if theirs is not None else "torn"
        raise ConfigError(
            f"{path} is taken: {kept[0].name} in it is of another job, run or step ({of}); save to "
            "a path of its own, "
            "and give processes that were not started together the same tag"
        )
    return [piece for piece in others if piece == place or piece.name not in layout.pieces.values()]


def _is_whole(
    path: Path, about: Mapping[str, Any], found: Mapping[Path, Mapping[str, Any] | None]
) -> bool:
    """Return True if all pieces that one of them names are there, of one save."""
    parts = [found.get(path / name) for name in about["pieces"].values()]
    there = [part for part in parts if part is not None]
    return len(there) == len(parts) and _are_one_save(there)


def _read_or_torn(piece: Path) -> dict[str, Any] | None:
    """Return what a piece says of itself; None where a crash of the machine has left a name without
    its files."""
    try:
        return _read_about(piece)
    except StateError as e:
        torn = isinstance(e.__cause__, (FileNotFoundError, json.JSONDecodeError))
        # another process may have removed it meanwhile
        if torn and _names(piece) <= {"overview", "arrays", "dense", "rows", *ORBAX_FILES}:
            return None
        raise  # somebody's own, or the disk's fault


def _names(folder: Path) -> set[str]:
    """Return what is in a folder; nothing, where there is none."""
    try:
        return {*os.listdir(folder)}
    except (FileNotFoundError, NotADirectoryError):
        return set()


def _remove(piece: Path) -> None:
    """Remove a piece: first its name, so that a crash leaves none that is torn."""
    away = piece.with_name(f".{piece.name}.{new_run()}")
    with contextlib.suppress(FileNotFoundError):  # another process has removed it
        piece.rename(away)
        shutil.rmtree(away)


def _sync(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, where this process may ask for it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # it may be written to, and not listed
        return
    try:
        os.fsync(descriptor)
    except OSError as e:
        if e.errno not in (
            errno.EINVAL,
            errno.ENOTSUP,
        ):  # file systems that have no such thing for folders
            raise
    finally:
        os.close(descriptor)


def _sync_tree(folder: Path) -> None:
    """Wait until all files of a folder are on the disk."""
    for at, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(at, name), "rb") as file:
                os.fsync(file.fileno())
        _sync(Path(at))


# -- what pieces say -------------------------------------------------------------------------------


def _types_of(main: Program) -> dict[str, str]:
    """Name to type of what a step takes and makes anew."""
    return {n: type_of(main.inputs[n]) for spec in main.args[:2] for n in spec.names}


def _as_json(row: VarDistributed) -> dict[str, Any]:
    return dataclasses.asdict(row) | {"dtype": str(row.dtype)}


def _from_json(fields: Mapping[str, Any]) -> VarDistributed:
    shapes = {n: tuple(fields[n]) for n in ("origin_shape", "slice_shape")}
    buckets = fields.get("buckets")  # which checkpoints of old do not have
    return VarDistributed(
        **{**fields, **shapes, "buckets": RowBuckets(**buckets) if buckets else None}
    )


def _finished(path: Path) -> list[Path]:
    """The pieces that were written to their end: others have a longer name."""
    _orbax()
    numbered = [
        path / name for name in _names(path) if re.fullmatch(r"(pserver|trainer|rank)-\d+", name)
    ]
    return sorted(p for p in numbered if p.is_dir())


def _read_about(piece: Path) -> dict[str, Any]:
    """What a piece says of itself."""
    with _reading(piece), _one_at_a_time:
        about = _handlers()[1].restore(piece / "overview")
        if about["format"] not in (FORMAT, OF_TABLES, OF_FILES):
            raise ValueError(
                f"its format is {about['format']}, and this dtrans reads {FORMAT} to {OF_FILES}"
            )
        return dict(about)


def _read_arrays(piece: Path, names: Mapping[str, None]) -> dict[str, np.ndarray]:
    """Some of the arrays of a piece."""
    types = _read_about(piece).get("dense")
    if types is not None:
        with _reading(piece):
            return read_arrays(piece / "dense", types, names)
    ocp = _orbax()
    wanted = ocp.args.PyTreeRestore(
        item=dict.fromkeys(names, 0),
        restore_args=dict.fromkeys(names, ocp.RestoreArgs(restore_type=np.ndarray)),
        partial_restore=True,
    )
    with _reading(piece), _one_at_a_time:
        return dict(_handlers()[0].restore(piece / "arrays", args=wanted))


@contextlib.contextmanager
def _reading(piece: Path) -> Iterator[None]:
    """Errors of orbax and of the disk, with the piece that they are about."""
    try:
        yield
    except DtransError:
        raise  # it says its own cause
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as e:
        raise StateError(f"{piece} cannot be read as a piece of a checkpoint: {e}") from e


def _orbax() -> Any:
    try:
        import orbax.checkpoint
    except ImportError as e:
        raise missing_extra("checkpoints need orbax", "checkpoint") from e
    return orbax.checkpoint


def load_orbax() -> None:
    """Import orbax now: the first save would take a processor for as long as several steps.

    Raises:
      ConfigError: it is not installed.
    """
    _piece_types()


_one_at_a_time = threading.Lock()  # orbax numbers its operations for the whole process


def _alone() -> Any:
    """Options that say that no other process takes part."""
    me = jax.process_index()
    prefix = f"dtrans-{me}"
    return _orbax().options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=prefix
    )


def _handlers() -> tuple[Any, Any]:
    """What saves and restores arrays, and JSON."""
    ocp, alone = _orbax(), _alone()
    kinds = ocp.type_handlers
    arrays = kinds.ArrayHandler(
        primary_host=alone.primary_host,
        use_replica_parallel=False,
        enable_write_sharding_file=False,
    )
    registry = kinds.create_type_handler_registry(
        (int, kinds.ScalarHandler()),  # in what says which arrays to read
        # a save returns when all is written, so that nothing changes meanwhile: a copy would take
        # memory and time
        (np.ndarray, kinds.NumpyHandler(deepcopy_host_arrays=False)),
        (jax.Array, arrays),
    )
    return (
        ocp.PyTreeCheckpointHandler(type_handler_registry=registry, multiprocessing_options=alone),
        ocp.JsonCheckpointHandler(multiprocessing_options=alone),
    )


@functools.cache
def _piece_types() -> tuple[Any, Any]:
    """What saves a piece, and its arguments: classes, which orbax wants to know of."""
    ocp = _orbax()

    class Handler(ocp.CheckpointHandler):  # type: ignore[name-defined]
        """An overview, arrays and rows of tables if there are any, in folders of their own."""

        def __init__(self, arrays: Any, overview: Any) -> None:
            self.arrays, self.overview = arrays, overview

        def save(self, directory: Any, args: Args) -> None:
            about = dict(args.overview)
            if args.tables:
                about |= {
                    "format": OF_TABLES,
                    "tables": write_tables(Path(directory) / "rows", args.tables),
                }
            arrays = args.arrays
            if args.serving:
                about |= {
                    "format": max(about["format"], OF_FILES),
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
            raise NotImplementedError("what is in a piece is read by itself")

    @ocp.args.register_with_handler(Handler, for_save=True, for_restore=True)
    @dataclasses.dataclass
    class Args(ocp.args.CheckpointArgs):  # type: ignore[name-defined]
        arrays: Mapping[str, Any]
        tables: Sequence[TableRows]
        overview: Mapping[str, Any]
        serving: bool

    return Handler, Args


def _as_shared(x: Any) -> jax.Array:
    """An array of this process, as one that a second process has too, of which this one has the
    first copy."""
    x = words(x)
    mine = next(iter(x.devices())) if isinstance(x, jax.Array) else jax.local_devices()[0]
    other = next(d for d in jax.devices() if d.process_index != mine.process_index)
    where = NamedSharding(Mesh(np.array([mine, other]), ("copies",)), PartitionSpec())
    return jax.make_array_from_single_device_arrays(x.shape, where, [jax.device_put(x, mine)])
