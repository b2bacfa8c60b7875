"""Exchange of partial results between servers, in the middle of an update.

Some servers compute partial results of an `all_reduce`: these servers are its owners. Each owner
sends its partial result to every participant: every server that needs the total. Every participant
combines the partial results in the order of the owners, so that all servers compute the same bits.

A server packs its partial results for another server into one flat vector for each dtype. Both
servers know the layout of a vector: the reductions are sorted by dtype, operation, owners,
participants and name. Reductions that differ only in name and shape are adjacent, and one
operation combines them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import ClosedJaxpr, Var, closed
from dtrans.ir.selection import values_at
from dtrans.ops import OptimizeBlock, all_reduce_p, combine


Parcel = tuple[
    "ReductionGroup", ...
]  # the reductions in the vectors for one server, in their order


@dataclasses.dataclass(frozen=True, eq=False)
class ReductionGroup:
    """Group of reductions that differ only in name and shape.

    Attributes:
      dtype: name of the dtype.
      op: operation of the `all_reduce`, such as "sum".
      owners: endpoints of the servers that have partial results.
      over: endpoints of the servers that receive the result.
      names: name of each reduction.
      shapes: shape of each reduction's result.
    """

    dtype: str
    op: str
    owners: tuple[str, ...]
    over: tuple[str, ...]
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of each reduction."""
        return tuple(math.prod(shape) for shape in self.shapes)


@dataclasses.dataclass(frozen=True, eq=False)
class Exchange:
    """The `all_reduce` equations that one server executes between two parts of its update.

    Attributes:
      me: endpoint of this server.
      level: number of the exchange; a server's exchanges in a step have increasing levels.
      kinds: the reductions, grouped by dtype, op, owners and `over`.
      local: computation before the exchange, as a function. It returns the partial results named
        `owned`, followed by the outputs named `plain`.
      owned: names of the reductions that need a partial result of this server.
      plain: names of the outputs that need no data from other servers.
      results: pairs of names: an output, and the reduction that computes the output.
    """

    me: str
    level: int
    kinds: tuple[ReductionGroup, ...]
    local: ClosedJaxpr
    owned: tuple[str, ...]
    plain: tuple[str, ...]
    results: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, block: OptimizeBlock, me: str) -> Exchange | None:
        """Return the exchange at the end of an optimize block (one program of an update).

        Return None if the program has no `all_reduce`.
        """
        inner = block.inner
        reductions = [eqn for eqn in inner.eqns if eqn.primitive is all_reduce_p]
        if not reductions:
            return None
        before = [eqn for eqn in inner.eqns if eqn.primitive is not all_reduce_p]
        called = {eqn.outvars[0]: eqn.params["name"] for eqn in reductions}
        reads = {a for eqn in inner.eqns for a in eqn.invars if isinstance(a, Var)}
        assert reads.isdisjoint(called), (
            f"{block}: an equation reads the result of a reduction in the same block"
        )
        mine = [eqn for eqn in reductions if me in eqn.params["owners"]]
        plain: dict[str, Any] = {}
        results: list[tuple[str, str]] = []
        for name, a in block.outvars.items():
            if isinstance(a, Var) and a in called:
                results.append((name, called[a]))
            else:
                plain[name] = a

        kinds = _alike([(eqn.params, eqn.outvars[0].aval) for eqn in reductions])
        parts = [eqn.invars[0] for eqn in mine]
        outvars = [*parts, *plain.values()]
        consts = block.jaxpr.consts
        local = closed(inner.constvars, consts, inner.invars, outvars, before, block.jaxpr)
        owned = tuple(eqn.params["name"] for eqn in mine)
        return cls(me, block.level, kinds, local, owned, tuple(plain), tuple(results))

    # -- senders and receivers -------------------------------------------------------------------

    @cached_property
    def parcels(self) -> dict[str, Parcel]:
        """For each receiving server, the reductions for which this server sends partial results.

        The receivers include this server. Receivers of the same reductions share one tuple.
        """
        same: dict[Parcel, Parcel] = {}
        found = {}
        for ep in (self.me, *self.peers):
            parcel = tuple(k for k in self.kinds if self.me in k.owners and ep in k.over)
            if parcel or ep == self.me:
                found[ep] = same.setdefault(parcel, parcel)
        return found

    @cached_property
    def sources(self) -> dict[str, Parcel]:
        """For each sending server, the reductions for which this server gets partial results."""
        found = {}
        for ep in self.peers:
            parcel = tuple(k for k in self.kinds if ep in k.owners)
            if parcel:
                found[ep] = parcel
        return found

    @cached_property
    def peers(self) -> tuple[str, ...]:
        """Endpoints of the other servers that take part in a reduction of this level."""
        return tuple(dict.fromkeys(ep for k in self.kinds for ep in k.over if ep != self.me))

    def fingerprint(self, peer: str) -> str:
        """Return a digest of the reductions in which this server and a peer exchange data.

        Both servers compute the same digest. The digest is empty if no data is exchanged.
        """
        ends = (self.me, peer)
        shared = [k for k in self.kinds if set(ends) <= set(k.over)]
        both = [k for k in shared if not set(ends).isdisjoint(k.owners)]
        text = json.dumps([self.level, [dataclasses.astuple(k) for k in both]])
        return hashlib.sha256(text.encode()).hexdigest() if both else ""

    # -- packing, inside a compiled function -----------------------------------------------------

    def pack(self, parts: Mapping[str, Any]) -> list[list[jax.Array]]:
        """Pack this server's partial results into vectors.

        Args:
          parts: maps the name of each reduction to this server's partial result.

        Returns:
          One list for all servers that receive the same reductions (see `parcels`). It contains one
          vector for each dtype.
        """
        flat = {}
        for k in self.parcels[self.me]:
            flat[k] = _joined([jnp.ravel(jnp.asarray(parts[n], k.dtype)) for n in k.names])
        packed = []
        for parcel in dict.fromkeys(self.parcels.values()):
            packed.append([_joined(values_at(flat, ks)) for ks in _by_dtype(parcel).values()])
        return packed

    def addressed(self, packed: Sequence[list[jax.Array]]) -> dict[str, list[jax.Array]]:
        """Return the vectors for each receiving server, by endpoint.

        Args:
          packed: result of `pack`.
        """
        vectors = dict(zip(dict.fromkeys(self.parcels.values()), packed, strict=True))
        return {ep: vectors[parcel] for ep, parcel in self.parcels.items()}

    def combined(self, arrived: Mapping[str, Sequence[jax.Array]]) -> dict[str, jax.Array]:
        """Reduce the partial results of all owners; return a map from output names to results.

        Args:
          arrived: maps the endpoint of each owner to the owner's vectors. If this server is an
            owner, `arrived` contains its own vectors, too.
        """
        parcels = {**self.sources, self.me: self.parcels[self.me]}
        parts = {ep: _unpacked(parcels[ep], vectors) for ep, vectors in arrived.items()}
        found: dict[str, jax.Array] = {}
        for k in self.kinds:
            total = combine(k.op, [parts[ep][k] for ep in k.owners])
            # Without the barrier, XLA may recompute the sum inside a kernel that reads the sum, and
            # round the sum differently there.
            pieces = jax.lax.split(jax.lax.optimization_barrier(total), k.sizes)
            for name, piece, shape in zip(k.names, pieces, k.shapes, strict=True):
                found[name] = piece.reshape(shape)
        return {output: found[name] for output, name in self.results}


def vector_types(parcel: Parcel) -> list[tuple[str, int]]:
    """Return the dtype and length of each vector that one server sends to another.

    Args:
      parcel: the reductions for which the vectors contain partial results.
    """
    found = []
    for dtype, kinds in _by_dtype(parcel).items():
        found.append((dtype, sum(_size(kind) for kind in kinds)))
    return found


def _by_dtype(parcel: Parcel) -> dict[str, list[ReductionGroup]]:
    """Return a map from each dtype to its reductions, in their order in the dtype's vector."""
    found: dict[str, list[ReductionGroup]] = {}
    for kind in parcel:
        found.setdefault(kind.dtype, []).append(kind)
    return found


def _size(kind: ReductionGroup) -> int:
    return sum(kind.sizes)


def _alike(reductions: Sequence[tuple[Mapping[str, Any], Any]]) -> tuple[ReductionGroup, ...]:
    """Group reductions that differ only in name and shape.

    The groups, and the reductions in a group, are sorted, so all servers get them in the same
    order.

    Args:
      reductions: pairs (parameters of an `all_reduce`, type of its output).
    """
    rows = []
    for params, aval in reductions:
        key = (aval.dtype.name, params["op"], tuple(params["owners"]), tuple(params["over"]))
        rows.append((*key, params["name"], tuple(aval.shape)))
    kinds = []
    for (dtype, op, owners, over), group in itertools.groupby(sorted(rows), lambda row: row[:4]):
        names, shapes = zip(*(row[4:] for row in group), strict=True)
        kinds.append(ReductionGroup(dtype, op, owners, over, names, shapes))
    return tuple(kinds)


def _unpacked(parcel: Parcel, vectors: Sequence[jax.Array]) -> dict[ReductionGroup, jax.Array]:
    """Split one server's vectors into one vector for each group of reductions."""
    found: dict[ReductionGroup, jax.Array] = {}
    for kinds, vector in zip(_by_dtype(parcel).values(), vectors, strict=True):
        pieces = jax.lax.split(vector, [_size(kind) for kind in kinds])
        found |= zip(kinds, pieces, strict=True)
    return found


def _joined(vectors: Sequence[Any]) -> Any:
    return vectors[0] if len(vectors) == 1 else jnp.concatenate(vectors)
