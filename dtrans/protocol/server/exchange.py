"""Partial results that servers exchange between two phases of an update, and their packing.

An `all_reduce` has three parts. Its owners send their partial results to every server that takes
part. Every owner also stores its own. Every server then combines all of them in the order of the
owners, so that all servers get the same bits.

One flat vector for each dtype goes from one server to another, for any number of reductions. It
has the partial results that the one owns and the other needs. Both know its layout. Reductions are
sorted by dtype, operation, owners, participants and name. Those of one kind lie side by side, and
are combined as one.
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
from dtrans.ops import OptimizeBlock, all_reduce_p, combine


Parcel = tuple["Alike", ...]  # reductions of the vectors for one server, in this order


@dataclasses.dataclass(frozen=True, eq=False)
class Alike:
    """Reductions that differ only in name and shape.

    Attributes:
      dtype: name of the dtype.
      op, owners, over: parameters of `all_reduce`.
      names, shapes: of each reduction.
    """

    dtype: str
    op: str
    owners: tuple[str, ...]
    over: tuple[str, ...]
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of elements of each reduction."""
        return tuple(math.prod(shape) for shape in self.shapes)


@dataclasses.dataclass(frozen=True, eq=False)
class Exchange:
    """The `all_reduce` equations of one server at one level.

    Attributes:
      me: endpoint of this server.
      level: index of the exchange. Exchanges of a server have ascending levels.
      kinds: the reductions, grouped by dtype, op, owners and `over`.
      local: the computation before the exchange, from the inputs of the block. It first returns the
        partial results of this server, in the order of `owned`. The outputs that need no other
        server follow, in the order of `plain`.
      owned, plain: names of these outputs.
      results: names of each reduced output and of its `all_reduce`.
    """

    me: str
    level: int
    kinds: tuple[Alike, ...]
    local: ClosedJaxpr
    owned: tuple[str, ...]
    plain: tuple[str, ...]
    results: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, block: OptimizeBlock, me: str) -> Exchange | None:
        """Return the exchange that a block ends with; None if the block needs no other server."""
        inner = block.inner
        reductions = [eqn for eqn in inner.eqns if eqn.primitive is all_reduce_p]
        if not reductions:
            return None
        before = [eqn for eqn in inner.eqns if eqn.primitive is not all_reduce_p]
        called = {eqn.outvars[0]: eqn.params["name"] for eqn in reductions}
        reads = {a for eqn in inner.eqns for a in eqn.invars if isinstance(a, Var)}
        assert reads.isdisjoint(called), (
            f"{block}: an equation reads what is reduced in the same block"
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

    # -- who gets what ---------------------------------------------------------------------------

    @cached_property
    def parcels(self) -> dict[str, Parcel]:
        """The reductions for each server, this one included. Servers with the same ones share an
        object."""
        same: dict[Parcel, Parcel] = {}
        found = {}
        for ep in (self.me, *self.peers):
            parcel = tuple(k for k in self.kinds if self.me in k.owners and ep in k.over)
            if parcel or ep == self.me:
                found[ep] = same.setdefault(parcel, parcel)
        return found

    @cached_property
    def sources(self) -> dict[str, Parcel]:
        """The reductions that come from each other server."""
        found = {}
        for ep in self.peers:
            parcel = tuple(k for k in self.kinds if ep in k.owners)
            if parcel:
                found[ep] = parcel
        return found

    @cached_property
    def peers(self) -> tuple[str, ...]:
        """The other servers that have a reduction of this level."""
        return tuple(dict.fromkeys(ep for k in self.kinds for ep in k.over if ep != self.me))

    def fingerprint(self, peer: str) -> str:
        """Return a fingerprint of all that two servers exchange; the same on both.

        It is empty if they exchange nothing.
        """
        ends = (self.me, peer)
        shared = [k for k in self.kinds if set(ends) <= set(k.over)]
        both = [k for k in shared if not set(ends).isdisjoint(k.owners)]
        text = json.dumps([self.level, [dataclasses.astuple(k) for k in both]])
        return hashlib.sha256(text.encode()).hexdigest() if both else ""

    # -- packing, inside a compiled function -----------------------------------------------------

    def pack(self, parts: Mapping[str, Any]) -> list[list[jax.Array]]:
        """Return the vectors of each distinct parcel, in the order of `parcels`."""
        flat = {}
        for k in self.parcels[self.me]:
            flat[k] = _joined([jnp.ravel(jnp.asarray(parts[n], k.dtype)) for n in k.names])
        packed = []
        for parcel in dict.fromkeys(self.parcels.values()):
            groups = itertools.groupby(parcel, lambda k: k.dtype)
            packed.append([_joined([*map(flat.__getitem__, group)]) for _, group in groups])
        return packed

    def addressed(self, packed: Sequence[list[jax.Array]]) -> dict[str, list[jax.Array]]:
        """Return the vectors for each server, this one included."""
        vectors = dict(zip(dict.fromkeys(self.parcels.values()), packed, strict=True))
        return {ep: vectors[parcel] for ep, parcel in self.parcels.items()}

    def combined(self, arrived: Mapping[str, Sequence[jax.Array]]) -> dict[str, jax.Array]:
        """Return the results by output name, from the vectors of every owner.

        Args:
          arrived: by endpoint; this server is included if it is an owner.
        """
        parcels = {**self.sources, self.me: self.parcels[self.me]}
        parts = {ep: _unpacked(parcels[ep], vectors) for ep, vectors in arrived.items()}
        found: dict[str, jax.Array] = {}
        for k in self.kinds:
            total = combine(k.op, [parts[ep][k] for ep in k.owners])
            # XLA may fuse a second copy of the sum into a reader's kernel, with another rounding
            pieces = jax.lax.split(jax.lax.optimization_barrier(total), k.sizes)
            for name, piece, shape in zip(k.names, pieces, k.shapes, strict=True):
                found[name] = piece.reshape(shape)
        return {output: found[name] for output, name in self.results}


def vector_types(parcel: Parcel) -> list[tuple[str, int]]:
    """Return the dtype and length of each vector of a parcel."""
    groups = itertools.groupby(parcel, lambda k: k.dtype)
    return [(dtype, sum(map(_size, group))) for dtype, group in groups]


def _size(kind: Alike) -> int:
    return sum(kind.sizes)


def _alike(reductions: Sequence[tuple[Mapping[str, Any], Any]]) -> tuple[Alike, ...]:
    """Group reductions of one kind, in an order that is the same on all servers."""
    rows = sorted(
        (t.dtype.name, p["op"], tuple(p["owners"]), tuple(p["over"]), p["name"], tuple(t.shape))
        for p, t in reductions
    )
    kinds = []
    for (dtype, op, owners, over), group in itertools.groupby(rows, lambda row: row[:4]):
        names, shapes = zip(*(row[4:] for row in group), strict=True)
        kinds.append(Alike(dtype, op, owners, over, names, shapes))
    return tuple(kinds)


def _unpacked(parcel: Parcel, vectors: Sequence[jax.Array]) -> dict[Alike, jax.Array]:
    """Return the reductions of each kind as one vector."""
    found: dict[Alike, jax.Array] = {}
    for (_, group), vector in zip(
        itertools.groupby(parcel, lambda k: k.dtype), vectors, strict=True
    ):
        kinds = list(group)
        found |= zip(kinds, jax.lax.split(vector, [*map(_size, kinds)]), strict=True)
    return found


def _joined(vectors: Sequence[Any]) -> Any:
    return vectors[0] if len(vectors) == 1 else jnp.concatenate(vectors)
