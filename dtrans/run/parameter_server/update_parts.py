"""Synchronous update in parts: each part runs as soon as its gradients have arrived.

So a server computes while later gradients are still on their way. `dtrans.slicing.divide_update`
divides the update. If the rows of one array belong to several parts, the array is stored in pieces
(`RowPieces`), one for each part.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from dtrans.ir.array_fns import words
from dtrans.ir.selection import omit, subset
from dtrans.protocol.row_pieces import RowPieces
from dtrans.protocol.server_blocks import UpdatePart
from dtrans.run.parameter_server.update import CompiledUpdate, ServerUpdate
from dtrans.slicing.divide_update import PartBlocks, divide_update


@dataclasses.dataclass(frozen=True, eq=False)
class PartUpdate:
    """One part of a server's update, which can run as soon as its gradients have arrived.

    Attributes:
      part: the gradients, parameters and rows that the part reads and writes.
      update: the server's update, limited to this part. Parts with equal programs have the same
        object, so that it is compiled once.
      of: the optimize blocks (small programs) of the part.
    """

    part: UpdatePart
    update: ServerUpdate
    of: PartBlocks


class UpdateByParts:
    """Update in parts: runs parts in any order, and collects the new state that they compute.

    Args:
      parts: all parts of the update.
      like: an earlier object with the same parts, to use its compiled functions again.
    """

    def __init__(self, parts: Sequence[PartUpdate], like: UpdateByParts | None = None) -> None:
        self._parts = parts
        # (update of a part, ids of the trainers whose gradients are used) -> compiled update
        self._compiled: dict[tuple[ServerUpdate, frozenset[int]], CompiledUpdate] = {}
        if like is not None:
            self._compiled = like._compiled
        self._new: dict[int, dict[str, Any]] = {}  # index of a part -> new arrays of this step

    @property
    def missing(self) -> list[int]:
        """Indices of the parts that have not run in this step."""
        return [i for i in range(len(self._parts)) if i not in self._new]

    def divide(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return copies of arrays, as `RowPieces` if several parts update rows of one array."""
        pieces: dict[str, list[Any]] = {}
        for part in self._parts:
            for n in part.of.divided & state.keys():
                pieces.setdefault(n, []).append(jnp.array(np.asarray(state[n])[part.part.rows]))
        found = {n: jnp.copy(x) for n, x in state.items() if n not in pieces}
        return found | {n: RowPieces(arrays) for n, arrays in pieces.items()}

    def run(
        self,
        number: int,
        grads: Mapping[str, Any],
        present: frozenset[int],
        state: Mapping[str, Any],
        unused: Mapping[str, Any],
    ) -> dict[str, np.ndarray]:
        """Run one part; return its rows of the new parameters, by block name.

        Args:
          number: index of the part.
          grads: gradients by name; the gradients of the part must be among them.
          present: ids of the trainers that contribute gradients.
          state: the state before the step.
          unused: arrays by name that are overwritten by the new optimizer state.
        """
        part = self._parts[number]
        key = part.update, present
        if key not in self._compiled:
            self._compiled[key] = CompiledUpdate(part.update.sent_by(present), keeps_old=True)
        compiled = self._compiled[key]
        # Every part computes the common state, so no part may donate the memory of this state.
        unused = omit(_of_part(unused, part.of), part.of.common)
        used = subset(grads, compiled.update.grad_types)
        if part.part.rows.stop is not None:
            used = {n: x[part.part.rows] for n, x in used.items()}
        new = compiled.run_part(used, _of_part(state, part.of), unused)
        self._new[number] = new
        return {n: np.asarray(words(new[n])) for n in part.part.params}

    def end(self) -> dict[str, Any]:
        """End a step in which all parts have run; return the new state by name."""
        new, pieces = dict[str, Any](), dict[str, list[Any]]()
        for number, part in enumerate(self._parts):
            for n, x in self._new[number].items():
                if n in part.of.divided:
                    pieces.setdefault(n, []).append(x)
                else:
                    new[n] = x
        self._new = {}
        return new | {n: RowPieces(arrays) for n, arrays in pieces.items()}


def _of_part(arrays: Mapping[str, Any], part: PartBlocks) -> dict[str, Any]:
    """Return the arrays that a part reads or writes. Divided arrays have only the part's rows."""
    names = itertools.chain.from_iterable((*b.in_names, *b.out_names) for b in part.blocks)
    found = {}
    for n in names:
        if n in arrays:
            found[n] = arrays[n].arrays[part.piece] if n in part.divided else arrays[n]
    return found


def split_update(update: ServerUpdate) -> tuple[PartUpdate, ...]:
    """Divide a server's update into parts that can run as soon as their gradients arrive.

    The result is empty if the update must run at once.
    """
    updates: dict[tuple[Any, ...], ServerUpdate] = {}  # blocks of a part -> update
    parts = []
    for of in divide_update(update.eqn):
        if of.blocks not in updates:
            params = {**update.eqn.params, "optimize_blocks": of.blocks}
            updates[of.blocks] = ServerUpdate(update.eqn.replace(params=params), of.shared)
        of_part = updates[of.blocks]
        outputs = set(itertools.chain.from_iterable(b.out_names for b in of.blocks))
        names = tuple(n for n in update.params if n in outputs)
        parts.append(PartUpdate(UpdatePart(of_part.sent, names, of.rows), of_part, of))
    return tuple(parts)
