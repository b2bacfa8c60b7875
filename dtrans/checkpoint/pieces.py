"""Pieces of checkpoints, and what they make up: the only file that knows orbax.

    ckpt/300/pserver-0/arrays     what it holds, by name, as orbax keeps pytrees; arrays without elements left out
    ckpt/300/pserver-0/overview   JSON: of what these are which rows, the names and types of the step's arrays, which
                                  pieces there are to be, a hash of the plan, and the user's tag

A whole checkpoint is a folder with all pieces that each of them names, of one plan and tag.
"""

from __future__ import annotations

import contextlib
import dataclasses
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

from dtrans.checkpoint.slices import as_numpy, by_origin, joined, overlap, type_of
from dtrans.checkpoint.values import TRAINER, held_rows
from dtrans.errors import ConfigError, StateError
from dtrans.overview import VarDistributed
from dtrans.plan import PServerPlan
from dtrans.program import Program


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
    """

    path: Path
    pieces: Mapping[str, str]
    types: Mapping[str, str]
    rows: Mapping[str, Sequence[VarDistributed]]

    @classmethod
    def at(cls, path: Folder) -> Checkpoint:
        """The checkpoint at a path. Raises StateError where it is none, or not a whole one."""
        path = Path(path).absolute()
        there = {piece.name: _read_about(piece) for piece in _finished(path)}
        if not there:
            raise StateError(f"there is no checkpoint at {path}" + ("" if path.is_dir() else ": it is no folder"))
        name, first = next(iter(there.items()))
        for other, about in there.items():
            if any(about[key] != first[key] for key in ("plan", "tag", "pieces", "types")):
                raise StateError(
                    f"the checkpoint at {path} has pieces of several jobs: {name} (tag {first['tag']!r}) and {other} "
                    f"(tag {about['tag']!r})"
                )
        missing = [f"{piece} of {who}" for who, piece in first["pieces"].items() if piece not in there]
        if missing:
            raise StateError(f"the checkpoint at {path} is not whole: {', '.join(missing)} is not there")
        rows = [_from_json(fields) for about in there.values() for fields in about["rows"]]
        return cls(path, first["pieces"], first["types"], by_origin(rows))

    def of(self, main: Program) -> Checkpoint:
        """Itself. Raises StateError where it is that of another step."""
        wanted = _types_of(main)
        for name in (*wanted, *self.types):
            if self.types.get(name) != wanted.get(name):
                raise StateError(
                    f"the checkpoint at {self.path} is of another step: {name} is {self.types.get(name, 'not')} in it, "
                    f"and {wanted.get(name, 'nothing')} in {main.name}"
                )
        return self

    def arrays(self, targets: Sequence[VarDistributed]) -> list[jax.Array]:
        """Slices of what was saved. Each piece is read once, and of it only the arrays that share rows with these."""
        needed: dict[str, dict[str, None]] = {}
        for target in targets:
            for row in self.rows.get(target.origin_name, ()):
                if overlap(target, row):
                    needed.setdefault(row.endpoint, {})[row.slice_name] = None
        found = {who: _read_arrays(self.path / self.pieces[who], names) for who, names in needed.items()}
        read = lambda row: found[row.endpoint][row.slice_name]
        return [joined(target, self.rows.get(target.origin_name, ()), read) for target in targets]


def write(
    path: Folder,
    plan: PServerPlan,
    who: str,
    rows: Sequence[VarDistributed],
    values: Mapping[str, Any],
    tag: str,
) -> None:
    """Write one piece."""
    ocp = _orbax()
    path = Path(path).absolute()
    pieces = _pieces(plan)
    every = [_as_json(row) for row in (*plan.overview, *held_rows(plan))]
    about = {
        "format": FORMAT,
        "tag": tag,
        "plan": hashlib.sha256(json.dumps(every).encode()).hexdigest(),
        "pieces": pieces,
        "types": _types_of(plan.main),
        "rows": [_as_json(row) for row in rows],
    }
    place = path / pieces[who]
    if place.exists():
        raise ConfigError(f"{place} is there already: save each checkpoint of {who} to a path of its own")
    for other in _finished(path):
        theirs = _read_about(other)
        if any(theirs[key] != about[key] for key in ("plan", "tag")):
            raise ConfigError(
                f"{path} is taken: {other.name} in it is of another job"
                + (f" or step, {theirs['tag']!r} and not {tag!r}" if theirs["tag"] != tag else "")
                + "; save to a path of its own"
            )
    path.mkdir(parents=True, exist_ok=True)
    # orbax refuses arrays without elements: their type says all of them
    arrays = {n: as_numpy(x) for n, x in values.items() if math.prod(x.shape)}
    items = {"overview": ocp.args.JsonSave(about)}
    if arrays:
        items["arrays"] = ocp.args.PyTreeSave(arrays)
    with _checkpointer() as checkpointer:
        checkpointer.save(place, args=ocp.args.Composite(**items))


def _pieces(plan: PServerPlan) -> dict[str, str]:
    """Who saves, and the name of its folder."""
    who = {ep: f"pserver-{i}" for i, ep in enumerate(plan.servers)}
    return who | ({TRAINER: "trainer-0"} if plan.held else {})


def _types_of(main: Program) -> dict[str, str]:
    """Name to type of what a step takes and makes anew."""
    return {n: type_of(main.inputs[n]) for spec in main.args[:2] for n in spec.names}


def _as_json(row: VarDistributed) -> dict[str, Any]:
    return dataclasses.asdict(row) | {"dtype": str(row.dtype)}


def _from_json(fields: Mapping[str, Any]) -> VarDistributed:
    shapes = {n: tuple(fields[n]) for n in ("origin_shape", "slice_shape")}
    return VarDistributed(**{**fields, **shapes})


def _finished(path: Path) -> list[Path]:
    """The pieces that were written to their end."""
    numbered = [p for p in path.glob("*-*") if re.fullmatch(r"(pserver|trainer)-\d+", p.name)]
    return sorted(p for p in numbered if _orbax().utils.is_checkpoint_finalized(p))


def _read_about(piece: Path) -> dict[str, Any]:
    """What a piece says of itself."""
    ocp = _orbax()
    with _reading(piece), _checkpointer() as checkpointer:
        about = checkpointer.restore(piece, args=ocp.args.Composite(overview=ocp.args.JsonRestore())).overview
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
    with _reading(piece), _checkpointer() as checkpointer:
        return dict(checkpointer.restore(piece, args=ocp.args.Composite(arrays=wanted)).arrays)


@contextlib.contextmanager
def _reading(piece: Path) -> Iterator[None]:
    """Errors of orbax, with the piece that they are about."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise StateError(f"{piece} cannot be read as a piece of a checkpoint: {e}") from e


def _orbax() -> Any:
    try:
        import orbax.checkpoint
    except ImportError as e:
        raise ConfigError("checkpoints need orbax: install dtrans with its extra, dtrans[checkpoint]") from e
    return orbax.checkpoint


_one_at_a_time = threading.Lock()


@contextlib.contextmanager
def _checkpointer() -> Iterator[Any]:
    """What saves and restores pieces; one at a time, since orbax numbers its operations for the whole process."""
    ocp = _orbax()
    handlers = {"arrays": ocp.PyTreeCheckpointHandler(), "overview": ocp.JsonCheckpointHandler()}
    with _one_at_a_time, ocp.Checkpointer(ocp.CompositeCheckpointHandler(**handlers)) as checkpointer:
        yield checkpointer
