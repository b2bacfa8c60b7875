"""Pieces of checkpoints, and what they make up: the only file that knows orbax.

    ckpt/300/pserver-0/arrays     what it holds, by name, as orbax keeps pytrees; arrays without elements left out
    ckpt/300/pserver-0/overview   JSON: of what these are which rows, the names and types of the step's arrays, which
                                  pieces there are to be, a hash of the plan, the run and step, and the user's tag

A whole checkpoint is a folder with all pieces that each of them names, of one plan, run, step and tag. A crash in a
save leaves some of them. A later run that saves to the same folder replaces these, each process its own. A whole
checkpoint is never written over.

Files reach the disk before a piece gets its name, and its name before `write` returns.

Orbax takes the processes of a `jax.distributed` job for writers of one checkpoint. They would wait for each other,
NumPy's arrays would be written by the first of them, and an array that one process has alone by nobody. A piece is one
process's own: so each tells orbax that it is alone, and gives it arrays that it seems to share. And orbax's own handler
of several items tells all processes that a folder is there when one has made its own: pieces have another.
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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtrans.checkpoint.assemble import as_jax, as_numpy, by_origin, joined, overlap, type_of, whole
from dtrans.checkpoint.runs import THIS_PROCESS, Mark, new_run
from dtrans.errors import ConfigError, DtransError, StateError, not_installed
from dtrans.ir.array_fns import words
from dtrans.ir.program import Program
from dtrans.parameter_server.overview import VarDistributed
from dtrans.rows.row_buckets import RowBuckets
from dtrans.step.frozen import check_still


FORMAT = 1
ORBAX_FILES = ("_CHECKPOINT_METADATA", "commit_success.txt")  # which orbax puts beside them

Folder = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint.

    Attributes:
      path: its folder.
      pieces: who saved, and the folder of each.
      types: name to type of each array of the step.
      rows: what there is of each array, and of each that servers keep beside the step's.
      may_differ: whether copies of an array may be of several steps.
    """

    path: Path
    pieces: Mapping[str, str]
    types: Mapping[str, str]
    rows: Mapping[str, Sequence[VarDistributed]]
    may_differ: bool = False

    @classmethod
    def at(cls, path: Folder) -> Checkpoint:
        """The checkpoint at a path. Raises StateError where it is none, or not a whole one."""
        path = Path(path).absolute()
        with _reading(path):
            pieces = _finished(path)
        there = {piece.name: _read_about(piece) for piece in pieces}
        if not there:
            raise StateError(f"there is no checkpoint at {path}" + ("" if path.is_dir() else ": it is no folder"))
        name, first = next(iter(there.items()))
        for count, (other, about) in enumerate(there.items(), 1):
            if not _are_one_save([*there.values()][:count]):
                raise StateError(
                    f"the checkpoint at {path} has pieces of several jobs, runs or steps: {name} ({_origin(first)}) "
                    f"and {other} ({_origin(about)}); take up another one, such as dtrans.checkpoint.latest finds"
                )
        missing = [f"{piece} of {who}" for who, piece in first["pieces"].items() if piece not in there]
        if missing:
            raise StateError(f"the checkpoint at {path} is not whole: {', '.join(missing)} is not there")
        rows = [_from_json(fields) for about in there.values() for fields in about["rows"]]
        may_differ = any(about.get("goes_on") for about in there.values())  # checkpoints of old do not say
        return cls(path, first["pieces"], first["types"], by_origin(rows), may_differ)

    def of(self, main: Program) -> Checkpoint:
        """Itself. Raises StateError where it is that of another step, or of leaves that the step holds still."""
        wanted = _types_of(main)
        for name in (*wanted, *self.types):
            if self.types.get(name) != wanted.get(name):
                raise StateError(
                    f"the checkpoint at {self.path} is of another step: {name} is {self.types.get(name, 'not')} in it, "
                    f"and {wanted.get(name, 'nothing')} in {main.name}"
                )
        for name, x in zip(main.still, self.on_host([whole(n, main.inputs[n]) for n in main.still]), strict=True):
            check_still(main, name, x)
        return self

    def arrays(self, targets: Sequence[VarDistributed]) -> list[jax.Array]:
        """Slices of what was saved, on the default device."""
        return [as_jax(x, target.dtype) for x, target in zip(self.on_host(targets), targets, strict=True)]

    def on_host(self, targets: Sequence[VarDistributed]) -> list[np.ndarray]:
        """Slices of what was saved. Each piece is read once, and of it only the arrays that share rows with these."""
        needed: dict[str, dict[str, None]] = {}
        for target in targets:
            for row in self.rows.get(target.origin_name, ()):
                if overlap(target, row):
                    needed.setdefault(row.endpoint, {})[row.slice_name] = None
        found = {who: _read_arrays(self.path / self.pieces[who], names) for who, names in needed.items()}
        read = lambda row: found[row.endpoint][row.slice_name]
        rows_of = lambda target: self.rows.get(target.origin_name, ())
        return [joined(target, rows_of(target), read, may_differ=self.may_differ) for target in targets]


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
    path: Folder, layout: PieceLayout, who: str, values: Mapping[str, Any], mark: Mark, *, goes_on: bool = False
) -> None:
    """Write one piece: what one of those who save holds, by the names of its rows.

    Where the piece is there already, of the same run and step, nothing is done.

    Args:
      mark: of the run and step.
      goes_on: whether others of the job make steps while it is written, each by itself.

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
        _save_piece(place, values, about)
        for folder in named:
            _sync(folder)


def _about(layout: PieceLayout, who: str, mark: Mark) -> dict[str, Any]:
    """Return what a piece says of itself."""
    return {
        "format": FORMAT,
        "tag": mark.tag,
        "run": list(mark.run),
        "step": mark.step,
        "plan": hashlib.sha256(json.dumps([_as_json(row) for row in layout.rows]).encode()).hexdigest(),
        "pieces": dict(layout.pieces),
        "types": _types_of(layout.main),
        "rows": [_as_json(row) for row in layout.rows if row.endpoint == who],
    }


def _save_piece(place: Path, values: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Let orbax write a piece beside its place, and give it its name."""
    # orbax refuses arrays without elements: their type says all of them
    alone = jax.process_count() == 1
    arrays = {n: as_numpy(x) if alone else _as_shared(x) for n, x in values.items() if math.prod(x.shape)}
    ocp, (handler, args) = _orbax(), _piece_types()
    with _one_at_a_time, ocp.Checkpointer(handler(*_handlers()), multiprocessing_options=_alone()) as checkpointer:
        checkpointer.save(place, args=args(arrays, about))


@contextlib.contextmanager
def _writing(who: str, place: Path) -> Iterator[None]:
    """Errors of orbax and of the disk, with the piece that they are about."""
    try:
        yield
    except DtransError:
        raise  # it says its own cause
    except (OSError, ValueError) as e:  # of orbax's own writer a full disk is a ValueError
        shutil.rmtree(place.with_name(f"{place.name}.orbax-checkpoint-tmp"), ignore_errors=True)  # it takes room
        raise StateError(
            f"the piece of {who} cannot be written to {place}: {e}. Make room, or let this process write there; what "
            "was saved before is as it was"
        ) from e


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
    parts = {"tag": repr(_key_of(about, "tag")), "run": min(_run_of(about), default=""), "step": about.get("step")}
    told = ", ".join(f"{name} {x}" for name, x in parts.items() if x not in ("None", "", None))
    return told or "of a process by itself"


def _may_be_replaced(theirs: Mapping[str, Any] | None, mark: Mark) -> bool:
    """Return True if a piece that is part of no whole checkpoint is known to be of an earlier run, or torn."""
    if theirs is None:
        return True
    run = _run_of(theirs)
    maybe = mark.tag is not None and mark.tag == theirs["tag"] and not (run and mark.run)
    return mark.shared and not maybe and run.isdisjoint({*mark.run, THIS_PROCESS})


def _remains(path: Path, layout: PieceLayout, who: str, about: Mapping[str, Any], mark: Mark) -> list[Path]:
    """Return the pieces to remove before this one is written: remains of earlier runs whose save never became whole.

    Each process removes those in its own place, and those in the place of nobody. So it removes no piece that another
    process of its run has written meanwhile.

    Raises:
      ConfigError: pieces of a whole checkpoint, or of this run, or of a run that may be this one.
    """
    place = path / layout.pieces[who]
    found = {piece: _read_or_torn(piece) for piece in _finished(path)}
    others = {piece: theirs for piece, theirs in found.items() if theirs is None or not _are_one_save([theirs, about])}
    whole = any(_is_whole(path, theirs, others) for theirs in others.values() if theirs is not None)
    kept = [piece for piece, theirs in others.items() if whole or not _may_be_replaced(theirs, mark)]
    if place in found and (place not in others or place in kept):
        theirs = found[place]
        of = f" ({_origin(theirs)}, and this is {_origin(about)})" if theirs is not None and place in others else ""
        raise ConfigError(f"{place} is there already{of}: save each checkpoint of {who} to a path of its own")
    if kept:
        theirs = found[kept[0]]
        of = f"{_origin(theirs)}, and this is {_origin(about)}" if theirs is not None else "torn"
        raise ConfigError(
            f"{path} is taken: {kept[0].name} in it is of another job, run or step ({of}); save to a path of its own, "
            "and give processes that were not started together the same tag"
        )
    return [piece for piece in others if piece == place or piece.name not in layout.pieces.values()]


def _is_whole(path: Path, about: Mapping[str, Any], found: Mapping[Path, Mapping[str, Any] | None]) -> bool:
    """Return True if all pieces that one of them names are there, of one save."""
    parts = [found.get(path / name) for name in about["pieces"].values()]
    there = [part for part in parts if part is not None]
    return len(there) == len(parts) and _are_one_save(there)


def _read_or_torn(piece: Path) -> dict[str, Any] | None:
    """Return what a piece says of itself; None where a crash of the machine has left a name without its files."""
    try:
        return _read_about(piece)
    except StateError as e:
        torn = isinstance(e.__cause__, (FileNotFoundError, json.JSONDecodeError))
        # another process may have removed it meanwhile
        if torn and _names(piece) <= {"overview", "arrays", *ORBAX_FILES}:
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
        if e.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that have no such thing for folders
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
    return VarDistributed(**{**fields, **shapes, "buckets": RowBuckets(**buckets) if buckets else None})


def _finished(path: Path) -> list[Path]:
    """The pieces that were written to their end: others have a longer name."""
    _orbax()
    numbered = [path / name for name in _names(path) if re.fullmatch(r"(pserver|trainer|rank)-\d+", name)]
    return sorted(p for p in numbered if p.is_dir())


def _read_about(piece: Path) -> dict[str, Any]:
    """What a piece says of itself."""
    with _reading(piece), _one_at_a_time:
        about = _handlers()[1].restore(piece / "overview")
        if about["format"] != FORMAT:
            raise ValueError(f"its format is {about['format']}, and this dtrans reads {FORMAT}")
        return dict(about)


def _read_arrays(piece: Path, names: Mapping[str, None]) -> dict[str, np.ndarray]:
    """Some of the arrays of a piece."""
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
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise StateError(f"{piece} cannot be read as a piece of a checkpoint: {e}") from e


def _orbax() -> Any:
    try:
        import orbax.checkpoint
    except ImportError as e:
        raise not_installed("checkpoints need orbax", "checkpoint") from e
    return orbax.checkpoint


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
        primary_host=alone.primary_host, use_replica_parallel=False, enable_write_sharding_file=False
    )
    registry = kinds.create_type_handler_registry(
        (int, kinds.ScalarHandler()),  # in what says which arrays to read
        (np.ndarray, kinds.NumpyHandler()),
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
        """An overview, and arrays if there are any, in folders of their own."""

        def __init__(self, arrays: Any, overview: Any) -> None:
            self.arrays, self.overview = arrays, overview

        def save(self, directory: Any, args: Args) -> None:
            (directory / "overview").mkdir()
            self.overview.save(directory / "overview", args=ocp.args.JsonSave(args.overview))
            if args.arrays:
                (directory / "arrays").mkdir()
                self.arrays.save(directory / "arrays", args=ocp.args.PyTreeSave(args.arrays))

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
        overview: Mapping[str, Any]

    return Handler, Args


def _as_shared(x: Any) -> jax.Array:
    """An array of this process, as one that a second process has too, of which this one has the first copy."""
    x = words(x)
    mine = next(iter(x.devices())) if isinstance(x, jax.Array) else jax.local_devices()[0]
    other = next(d for d in jax.devices() if d.process_index != mine.process_index)
    where = NamedSharding(Mesh(np.array([mine, other]), ("copies",)), PartitionSpec())
    return jax.make_array_from_single_device_arrays(x.shape, where, [jax.device_put(x, mine)])
