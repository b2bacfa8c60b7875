"""Traffic of one step: the values that trainers and servers send each other, and their costs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from dtrans._jax import JaxprEqn
from dtrans.costs import Costs, RoleCost, program_flops
from dtrans.ir.cost import flops, nbytes
from dtrans.ir.program import DIST, Program
from dtrans.ops import OptimizeBlock, all_reduce_p, exchange_p, send_rows_p
from dtrans.parameter_server.tables.choose import ID, Tables, notes_of
from dtrans.slicing.blocks import Placement


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A value that servers reduce together.

    Attributes:
      name: its name, equal on every server.
      op: `sum`, `max`, ...
      shape, dtype: of the value.
      owners: the servers that have parts of it.
      over: the servers that take part: the owners, and the servers that need the value.
    """

    name: str
    op: str
    shape: tuple[int, ...]
    dtype: Any
    owners: tuple[str, ...]
    over: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Return its size in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True, eq=False)
class StepTraffic:
    """Values that the roles of a plan send in a step.

    Attributes:
      trainer: the program of trainer 0.
      servers: endpoint to the program of the server.
      placement: every block and its server.
      unsent: parameters whose update uses no gradient.
      tables: leaves that trainers have by rows only: the rows that they look up.
      trainers: the number of trainers.
      push_every: steps from one push of changes to the next in GEO-SGD; otherwise 0.
    """

    trainer: Program
    servers: Mapping[str, Program]
    placement: Placement
    unsent: tuple[str, ...]
    tables: Tables
    trainers: int
    push_every: int

    def costs(self, held_bytes: Mapping[str, int]) -> Costs:
        """Return the costs of each role.

        Args:
          held_bytes: endpoint to the bytes that the server holds.
        """
        step, unsent = self.bytes_per_step, set(self.unsent)
        held = sum(
            nbytes(self.trainer.inputs[n]) for spec in self.trainer.args[:1] for n in spec.names
        )
        own = program_flops(self.trainer)
        told = [(r.params["endpoint"], *_moved(r)) for r in self.exchanges]
        sends, receives = (sum(t[i] for t in told) for i in (1, 2))
        found = [
            RoleCost(
                "trainer",
                self.trainers,
                held,
                step["send"] + sends,
                step["recv"] + receives,
                1 + len(told),
                own,
            )
        ]
        for ep, program in self.servers.items():
            blocks = [b for b in self.placement.table if b.endpoint == ep]
            reduced = [r for values in self.rounds for r in values if ep in r.over]
            sent = sum(r.nbytes * (len(r.over) - 1) for r in reduced if ep in r.owners)
            heard = sum(r.nbytes * (len(r.owners) - (ep in r.owners)) for r in reduced)
            sent += self.trainers * sum(receives for at, _, receives in told if at == ep)
            heard += self.trainers * sum(sends for at, sends, _ in told if at == ep)
            grads = sum(b.nbytes for b in blocks if b.leaf not in unsent)
            grads += sum(told.get(ep, 0) for told in self.arguments.values())
            (serve,) = program.eqns
            work = sum(flops(e) for block in serve.params["optimize_blocks"] for e in block.eqns)
            params = sum(b.nbytes for b in blocks)
            rounds = 1 + sum(any(ep in r.over for r in values) for values in self.rounds)
            rounds += sum(at == ep for at, _, _ in told)
            found.append(
                RoleCost(
                    ep,
                    1,
                    held_bytes[ep],
                    self.trainers * params + sent,
                    self.trainers * grads + heard,
                    rounds,
                    work,
                )
            )
        return Costs(found)

    @cached_property
    def bytes_per_step(self) -> dict[str, int]:
        """Return the bytes that one trainer sends and receives in a step; of tables, the most."""
        unsent = set(self.unsent)
        whole = [b for b in self.placement.table if not b.is_table]
        push = sum(b.nbytes for b in whole if b.leaf not in unsent)
        push += sum(n for told in self.arguments.values() for n in told.values())
        sends, receives = (sum(of[i] for of in self._moved_rows.values()) for i in (0, 1))
        return {"send": push + sends, "recv": sum(b.nbytes for b in whole) + receives}

    @property
    def _moved_rows(self) -> dict[str, tuple[int, int]]:
        """Return the most bytes of each table that one trainer sends and receives.

        In GEO-SGD they are those of `push_every` steps. None of the rows was looked up before, and
        all trainers make equally many steps.
        """
        found = {}
        for n, t in self.tables.of.items():
            first, size = self.placement.blocks[n][0], t.lookups.size
            row = first.nbytes // first.rows
            if not self.push_every:
                found[n] = size * (row + self._id_bytes), size * row
                continue
            touched = min(t.lookups.rows, self.push_every * size)
            changed = min(t.lookups.rows, (self.trainers - 1) * touched)
            found[n] = touched * (row + 2 * ID), touched * row + changed * (row + ID)
        return found

    @property
    def _id_bytes(self) -> int:
        """Return the bytes of row numbers: a communicator sends them again with the gradient."""
        return ID * (
            1
            + any(
                e.primitive is send_rows_p and "communicator" in e.params for e in self.trainer.eqns
            )
        )

    @cached_property
    def arguments(self) -> dict[str, dict[str, int]]:
        """Return the arguments that the update reads, each with its bytes by server."""
        found: dict[str, dict[str, int]] = {}
        for ep, program in self.servers.items():
            for block in (x for eqn in program.eqns for x in eqn.params["optimize_blocks"]):
                types = block.invars
                for g in (g for g in block.grads if g.op == "same"):
                    found.setdefault(g.leaf, {})[ep] = nbytes(types[g.name].aval)
        return found

    @cached_property
    def exchanges(self) -> tuple[JaxprEqn, ...]:
        """Return the `exchange` equations of trainer 0, one for each round of a step."""
        return tuple(eqn for eqn in self.trainer.eqns if eqn.primitive is exchange_p)

    @cached_property
    def rounds(self) -> tuple[tuple[Reduction, ...], ...]:
        """Return the values that servers reduce together in each round of a step."""
        found: dict[int, dict[str, Reduction]] = {}
        for block in self.optimize_blocks:
            for eqn in block.eqns if block.role == DIST else ():
                if eqn.primitive is all_reduce_p and len(eqn.params["over"]) > 1:
                    p, aval = eqn.params, eqn.outvars[0].aval
                    reduction = Reduction(
                        p["name"], p["op"], aval.shape, aval.dtype, p["owners"], p["over"]
                    )
                    found.setdefault(block.level, {})[p["name"]] = reduction
        return tuple(tuple(found[level].values()) for level in sorted(found))

    @cached_property
    def optimize_blocks(self) -> tuple[OptimizeBlock, ...]:
        """The optimize blocks of all servers."""
        serves = (eqn for program in self.servers.values() for eqn in program.eqns)
        return tuple(block for eqn in serves for block in eqn.params["optimize_blocks"])

    @property
    def notes(self) -> list[str]:
        """Return remarks on this traffic."""
        found = []
        step = self.bytes_per_step
        often = f"in {self.push_every} steps" if self.push_every else "per step"
        found.append(
            f"each of {self.trainers} trainers sends {step['send']:,} and receives "
            f"{step['recv']:,} bytes {often}"
        )
        if self.exchanges:
            sends, receives = map(sum, zip(*map(_moved, self.exchanges), strict=True))
            count, rounds = sum(len(r.invars) for r in self.exchanges), len(self.exchanges)
            found.append(
                f"in the middle of a step trainers exchange {count} values through the pservers, "
                f"in {rounds} "
                f"round{'s' * (rounds > 1)}; each sends {sends:,} and receives {receives:,} bytes"
            )
        for i, values in enumerate(self.rounds):
            told = sum(r.nbytes for r in values)
            found.append(
                f"round {i + 1} among pservers: {len(values)} values, {told:,} bytes from each at "
                "most"
            )
        found += notes_of(
            self.tables,
            {n: sum(x) for n, x in self._moved_rows.items()},
            f" {often}" * bool(self.push_every),
        )
        return found


def _moved(eqn: JaxprEqn) -> tuple[int, int]:
    """Return the bytes that a trainer sends and receives in a round."""
    return sum(nbytes(a.aval) for a in eqn.invars), sum(nbytes(v.aval) for v in eqn.outvars)
