"""What servers give each other between two phases of an update, and how it is packed.

An `all_reduce` becomes three things: its owners send their parts to every server that takes part,
everybody keeps its own, and everybody combines all of them, in the order of the owners, so that all
get the same bits.

From one server to another goes one flat vector for each dtype, however many reductions there are:
the parts that the one owns and the other needs. Both know the layout without asking. Reductions are
sorted by dtype, operation, owners, participants and name, so those that are alike lie side by side
and are combined as one.
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


Parcel = tuple["Alike", ...]  # what one vector for each dtype holds, in this order


@dataclasses.dataclass(frozen=True, eq=False)
class Alike:
    """Reductions that differ in name and shape only.

    Attributes:
      dtype: its name.
      op, owners, over: as those of `all_reduce`.
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
        """The number of elements of each."""
        return tuple(math.prod(shape) for shape in self.shapes)


@dataclasses.dataclass(frozen=True, eq=False)
class Exchange:
    """The `all_reduce` equations of one server at one level.

    Attributes:
      me: this server's endpoint.
      level: which exchange it is; every server has its own in ascending order.
      kinds: the reductions, those that are alike together.
      local: what has to be computed before: from the inputs of the block to the parts that this
        server owns, in the order of `owned`, and to the outputs that need no other server, in that
        of `plain`.
      owned, plain: the names of those.
      results: for each output that is reduced, its name and that of its `all_reduce`.
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
        """The exchange that a block ends with; None for a block that needs no other server."""
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
        own = [eqn for eqn in reductions if me in eqn.params["owners"]]
        outs = list(block.outvars.items())
        is_reduced = lambda a: isinstance(a, Var) and a in called
        plain = [(n, a) for n, a in outs if not is_reduced(a)]
        return cls(
            me,
            block.level,
            _alike([(eqn.params, eqn.outvars[0].aval) for eqn in reductions]),
            closed(
                inner.constvars,
                block.jaxpr.consts,
                inner.invars,
                [*(eqn.invars[0] for eqn in own), *(a for _, a in plain)],
                before,
                block.jaxpr,
            ),
            tuple(eqn.params["name"] for eqn in own),
            tuple(n for n, _ in plain),
            tuple((n, called[a]) for n, a in outs if isinstance(a, Var) and a in called),
        )

    # -- who gets what ---------------------------------------------------------------------------

    @cached_property
    def parcels(self) -> dict[str, Parcel]:
        """What goes to each server, itself included. Servers that get the same share one object."""
        same: dict[Parcel, Parcel] = {}
        found = {}
        for ep in (self.me, *self.peers):
            parcel = tuple(k for k in self.kinds if self.me in k.owners and ep in k.over)
            if parcel or ep == self.me:
                found[ep] = same.setdefault(parcel, parcel)
        return found

    @cached_property
    def sources(self) -> dict[str, Parcel]:
        """What comes from each other server."""
        every = {ep: tuple(k for k in self.kinds if ep in k.owners) for ep in self.peers}
        return {ep: parcel for ep, parcel in every.items() if parcel}

    @cached_property
    def peers(self) -> tuple[str, ...]:
        """The other servers that have a reduction of this level."""
        return tuple(dict.fromkeys(ep for k in self.kinds for ep in k.over if ep != self.me))

    def fingerprint(self, peer: str) -> str:
        """Of everything that this server and another one send each other; the same on both."""
        ends = (self.me, peer)
        both = [
            k for k in self.kinds if set(ends) <= set(k.over) and any(ep in k.owners for ep in ends)
        ]
        told = json.dumps([self.level, [dataclasses.astuple(k) for k in both]])
        return hashlib.sha256(told.encode()).hexdigest() if both else ""

    # -- packing, inside a compiled function -----------------------------------------------------

    def pack(self, parts: Mapping[str, Any]) -> list[list[jax.Array]]:
        """The vectors of each parcel that is different from the others, in the order of
        `parcels`."""
        flat = {
            k: _joined([jnp.ravel(jnp.asarray(parts[n], k.dtype)) for n in k.names])
            for k in self.parcels[self.me]
        }
        packed = []
        for parcel in dict.fromkeys(self.parcels.values()):
            groups = itertools.groupby(parcel, lambda k: k.dtype)
            packed.append([_joined([flat[k] for k in group]) for _, group in groups])
        return packed

    def addressed(self, packed: Sequence[list[jax.Array]]) -> dict[str, list[jax.Array]]:
        """The vectors for each server, itself included."""
        made = dict(zip(dict.fromkeys(self.parcels.values()), packed, strict=True))
        return {ep: made[parcel] for ep, parcel in self.parcels.items()}

    def combined(self, arrived: Mapping[str, Sequence[jax.Array]]) -> dict[str, jax.Array]:
        """The results by name of the output, from the vectors of every owner, this server included
        if it is one."""
        parts = {
            ep: _unpacked(self.parcels[ep] if ep == self.me else self.sources[ep], v)
            for ep, v in arrived.items()
        }
        found: dict[str, jax.Array] = {}
        for k in self.kinds:
            whole = combine(k.op, [parts[ep][k] for ep in k.owners])
            # not to be combined again in the kernel of every reader, with roundings that may differ
            pieces = jax.lax.split(jax.lax.optimization_barrier(whole), k.sizes)
            found |= {
                n: x.reshape(shape) for n, x, shape in zip(k.names, pieces, k.shapes, strict=True)
            }
        return {n: found[of] for n, of in self.results}


def vector_types(parcel: Parcel) -> list[tuple[str, int]]:
    """The dtype and length of each vector of a parcel."""
    return [
        (d, sum(sum(k.sizes) for k in group))
        for d, group in itertools.groupby(parcel, lambda k: k.dtype)
    ]


def _alike(reductions: Sequence[tuple[Mapping[str, Any], Any]]) -> tuple[Alike, ...]:
    """Put the reductions that are alike together. An order that no server can disagree about."""
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
    """The reductions that are alike, each as one vector."""
    found: dict[Alike, jax.Array] = {}
    for (_, group), vector in zip(
        itertools.groupby(parcel, lambda k: k.dtype), vectors, strict=True
    ):
        kinds = list(group)
        found |= zip(kinds, jax.lax.split(vector, [sum(k.sizes) for k in kinds]), strict=True)
    return found


def _joined(vectors: Sequence[Any]) -> Any:
    return vectors[0] if len(vectors) == 1 else jnp.concatenate(vectors)
