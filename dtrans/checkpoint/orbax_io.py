"""Pieces of checkpoints, and what they make up: the only file that knows orbax.

    ckpt/300/pserver-0/arrays     what it holds, by name, as orbax keeps pytrees; arrays without elements left out
    ckpt/300/pserver-0/overview   JSON: of what these are which rows, the names and types of the step's arrays, which
                                  pieces there are to be, a hash of the plan, and the user's tag

A whole checkpoint is a folder with all pieces that each of them names, of one plan and tag.

Orbax takes the processes of a `jax.distributed` job for writers of one checkpoint. They would wait for each other,
NumPy's arrays would be written by the first of them, and an array that one process has alone by nobody. A piece is one
process's own: so each tells orbax that it is alone, and gives it arrays that it seems to share. And orbax's own handler
of several items tells all processes that a folder is there when one has made its own: pieces have another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtrans.checkpoint.assemble import as_jax, as_numpy, by_origin, joined, overlap, type_of, whole
from dtrans.errors import ConfigError, DtransError, StateError, not_installed
from dtrans.ir.array_fns import words
from dtrans.ir.program import Program
from dtrans.parameter_server.overview import VarDistributed
from dtrans.rows.row_buckets import RowBuckets
from dtrans.step.frozen import check_still


FORMAT = 1

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
        for other, about in there.items():
            if any(about[key] != first[key] for key in ("plan", "tag", "pieces", "types")):
                raise StateError(
                    f"the checkpoint at {path} has pieces of several jobs or runs: {name} (tag {first['tag']!r}) and "
                    f"{other} (tag {about['tag']!r}); take up another one, such as dtrans.checkpoint.latest finds"
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


def check_place(path: Folder, layout: PieceLayout, here: Sequence[str]) -> None:
    """Check before training that pieces can be written to a path.

    Args:
      here: who of this process will write one.

    Raises:
      ConfigError: they cannot.
    """
    _orbax()
    path = Path(path).absolute()
    taken = [path / layout.pieces[who] for who in here if os.path.exists(path / layout.pieces[who])] or _finished(path)
    if taken:
        raise ConfigError(f"{taken[0]} is there already: save each checkpoint to a path of its own")
    there = next(p for p in (path, *path.parents) if os.path.exists(p))
    if not there.is_dir():
        raise ConfigError(f"{path} cannot hold a checkpoint: {there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{path} cannot hold a checkpoint: {there} may not be written to")


def write(
    path: Folder, layout: PieceLayout, who: str, values: Mapping[str, Any], tag: str, *, goes_on: bool = False
) -> None:
    """Write one piece: what one of those who save holds, by the names of its rows.

    Args:
      goes_on: whether others of the job make steps while it is written, each by itself.
    """
    ocp = _orbax()
    path = Path(path).absolute()
    about = {
        "format": FORMAT,
        "tag": tag,
        "plan": hashlib.sha256(json.dumps([_as_json(row) for row in layout.rows]).encode()).hexdigest(),
        "pieces": dict(layout.pieces),
        "types": _types_of(layout.main),
        "rows": [_as_json(row) for row in layout.rows if row.endpoint == who],
    } | ({"goes_on": True} if goes_on else {})
    place = path / layout.pieces[who]
    if place.exists():
        raise ConfigError(f"{place} is there already: save each checkpoint of {who} to a path of its own")
    for other in _finished(path):
        theirs = _read_about(other)
        if any(theirs[key] != about[key] for key in ("plan", "tag")):
            raise ConfigError(
                f"{path} is taken: {other.name} in it is of another job"
                + (f", run or step, {theirs['tag']!r} and not {tag!r}" if theirs["tag"] != tag else "")
                + "; save to a path of its own, and give processes that were not started together the same tag"
            )
    # orbax refuses arrays without elements: their type says all of them
    alone = jax.process_count() == 1
    arrays = {n: as_numpy(x) if alone else _as_shared(x) for n, x in values.items() if math.prod(x.shape)}
    handler, args = _piece_types()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time, ocp.Checkpointer(handler(*_handlers()), multiprocessing_options=_alone()) as checkpointer:
            checkpointer.save(place, args=args(arrays, about))
    except (OSError, ValueError) as e:  # of orbax's own writer a full disk is a ValueError
        raise StateError(
            f"the piece of {who} cannot be written to {place}: {e}. Make room, or let this process write there; what "
            "was saved before is as it was"
        ) from e


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
    """The pieces that were written to their end."""
    numbered = [p for p in path.glob("*-*") if re.fullmatch(r"(pserver|trainer|rank)-\d+", p.name)]
    return sorted(p for p in numbered if _orbax().utils.is_checkpoint_finalized(p))


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
