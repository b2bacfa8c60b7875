"""Traffic of one step: bytes and rounds of the messages between trainers and servers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from dtrans._jax import JaxprEqn
from dtrans.costs import Costs, RoleCost, program_flops
from dtrans.ir.cost import flops, nbytes, total_bytes
from dtrans.ir.program import DIST, Program
from dtrans.ops import OptimizeBlock, all_reduce_p, exchange_p, send_rows_p
from dtrans.parameter_server.compression import Compression
from dtrans.parameter_server.tables.choose import ID, Tables, table_notes
from dtrans.slicing.blocks import Placement
from dtrans.slicing.divide_update import copied_state_bytes
from dtrans.transfers import RoleTransfer, Transfers


@dataclasses.dataclass(frozen=True)
class Reduction:
    """All-reduce of a value over servers, within the update of one step.

    A server may need a value of all parameters, such as the global norm for clipping. Each server
    then sends its partial result to the other servers.

    Attributes:
      name: name of the value, equal on all servers.
      op: the reduction: `sum`, `max`, ...
      shape, dtype: type of the value.
      owners: endpoints of the servers that contribute a partial result.
      over: endpoints of all servers that take part: the owners, and the servers that need the
        result.
    """

    name: str
    op: str
    shape: tuple[int, ...]
    dtype: Any
    owners: tuple[str, ...]
    over: tuple[str, ...]

    @classmethod
    def from_equation(cls, eqn: JaxprEqn) -> Reduction:
        """Return the record of an `all_reduce` equation."""
        p, aval = eqn.params, eqn.outvars[0].aval
        return cls(p["name"], p["op"], aval.shape, aval.dtype, p["owners"], p["over"])

    @property
    def nbytes(self) -> int:
        """Bytes of the value."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True, eq=False)
class StepTraffic:
    """Values that trainers and servers send in a step, and their bytes.

    Attributes:
      trainer: the program of trainer 0.
      servers: main program of each server, by endpoint.
      placement: every block and its server.
      unsent: parameters that servers update without a gradient.
      tables: leaves that trainers request by rows instead of in full.
      trainers: the number of trainers.
      push_every: the number of steps between two pushes in GEO-SGD; 0 in other modes.
      compression: the types in which gradients and parameters are sent.
    """

    trainer: Program
    servers: Mapping[str, Program]
    placement: Placement
    unsent: tuple[str, ...]
    tables: Tables
    trainers: int
    push_every: int
    compression: Compression = dataclasses.field(default_factory=Compression)

    def costs(self, state_bytes: Mapping[str, int]) -> Costs:
        """Return the costs of a trainer and of each server: memory, traffic and operations.

        Args:
          state_bytes: bytes of each server's state, by endpoint.
        """
        costs = [self._trainer_cost()]
        for endpoint in self.servers:
            costs.append(self._server_cost(endpoint, state_bytes[endpoint]))
        return Costs(costs, link_steps=self.push_every or 1)

    def transfers(self) -> Transfers:
        """Return the transfers between each pair of roles, with their bytes per step.

        With GEO-SGD, the bytes are those of `push_every` steps, because trainers send only once in
        this time.
        """
        found = []
        for endpoint in self.servers:
            for what, size in self._to_server(endpoint).items():
                found.append(RoleTransfer("trainer", endpoint, what, size))
            for what, size in self._from_server(endpoint).items():
                found.append(RoleTransfer(endpoint, "trainer", what, size))
        for endpoint in self.servers:
            size = 0
            for values in self.rounds:
                size += sum(r.nbytes for r in values if endpoint in r.owners)
            if size:
                found.append(RoleTransfer(endpoint, "other pservers", "partial results", size))
        return Transfers(found)

    def _to_server(self, endpoint: str) -> dict[str, int]:
        """Return the bytes that a trainer sends to a server in a step, by kind of value."""
        gradients = 0
        for b in self.placement.all_blocks:
            if b.endpoint == endpoint and not b.is_table and b.leaf not in self.unsent:
                gradients += nbytes(self.compression.sent_gradient(b))
        found = {"changes" if self.push_every else "gradients": gradients}
        found["arguments"] = sum(sizes.get(endpoint, 0) for sizes in self.arguments.values())
        exchanges = self._exchanges_with(endpoint)
        found["values of the batch"] = sum(_exchange_bytes(eqn)[0] for eqn in exchanges)
        for name, (sent, _) in self._row_bytes.items():
            found[f"rows of {name}"] = self._share(name, endpoint, sent)
        return {what: size for what, size in found.items() if size}

    def _from_server(self, endpoint: str) -> dict[str, int]:
        """Return the bytes that a server sends to a trainer in a step, by kind of value."""
        parameters = 0
        for b in self.placement.all_blocks:
            if b.endpoint == endpoint and not b.is_table:
                parameters += nbytes(self.compression.sent_param(b))
        found = {"parameters": parameters}
        exchanges = self._exchanges_with(endpoint)
        found["values of the batch"] = sum(_exchange_bytes(eqn)[1] for eqn in exchanges)
        for name, (_, received) in self._row_bytes.items():
            found[f"rows of {name}"] = self._share(name, endpoint, received)
        return {what: size for what, size in found.items() if size}

    def _share(self, table: str, endpoint: str, size: int) -> int:
        """Return one server's part of the bytes that a trainer sends or receives for a table.

        The estimate assumes that the looked-up rows are evenly spread over the table. For 90 bytes
        and a server with a third of the table's rows, this returns 30.
        """
        blocks = self.placement.blocks[table]
        rows = sum(b.rows for b in blocks if b.endpoint == endpoint)
        return size * rows // sum(b.rows for b in blocks)

    def _exchanges_with(self, endpoint: str) -> list[JaxprEqn]:
        return [eqn for eqn in self.exchanges if eqn.params["endpoint"] == endpoint]

    def _trainer_cost(self) -> RoleCost:
        step, inputs = self.bytes_per_step, self.trainer.inputs
        # A trainer stores the parameters, and in GEO-SGD also the optimizer state.
        names = list(self.trainer.args[0].names)
        if self.push_every:
            names += self.trainer.args[1].names
        sent, received = step["send"], step["recv"]
        for eqn in self.exchanges:
            exchange = _exchange_bytes(eqn)
            sent, received = sent + exchange[0], received + exchange[1]
        return RoleCost(
            "trainer",
            count=self.trainers,
            state_bytes=sum(nbytes(inputs[n]) for n in names),
            sent=sent,
            received=received,
            rounds=1 + len(self.exchanges),
            flops=program_flops(self.trainer),
        )

    def _server_cost(self, endpoint: str, state_bytes: int) -> RoleCost:
        from_trainer = sum(self._to_server(endpoint).values())
        to_trainer = sum(self._from_server(endpoint).values())
        rounds = 1 + len(self._exchanges_with(endpoint))

        # Add the traffic with other servers. In an all-reduce, each owner sends its partial result
        # to all servers that take part.
        to_servers = from_servers = 0
        for values in self.rounds:
            reductions = [r for r in values if endpoint in r.over]
            rounds += bool(reductions)
            for r in reductions:
                is_owner = endpoint in r.owners
                to_servers += is_owner * r.nbytes * (len(r.over) - 1)
                from_servers += r.nbytes * (len(r.owners) - is_owner)

        (serve,) = self.servers[endpoint].eqns
        return RoleCost(
            endpoint,
            count=1,
            state_bytes=state_bytes + copied_state_bytes(serve),
            sent=self.trainers * to_trainer + to_servers,
            received=self.trainers * from_trainer + from_servers,
            rounds=rounds,
            flops=sum(flops(eqn) for x in serve.params["optimize_blocks"] for eqn in x.eqns),
        )

    @cached_property
    def bytes_per_step(self) -> dict[str, int]:
        """Bytes that a trainer sends ("send") and receives ("recv"); an upper bound for tables."""
        send = recv = 0
        for b in self.placement.all_blocks:
            if not b.is_table:
                recv += nbytes(self.compression.sent_param(b))
                if b.leaf not in self.unsent:
                    send += nbytes(self.compression.sent_gradient(b))
        for sizes in self.arguments.values():
            send += sum(sizes.values())
        for sent, received in self._row_bytes.values():
            send += sent
            recv += received
        return {"send": send, "recv": recv}

    @property
    def _row_bytes(self) -> dict[str, tuple[int, int]]:
        """Upper bounds of the bytes that a trainer sends and receives, for each table.

        In GEO-SGD the bytes are for `push_every` steps. The bound assumes that the trainer stores
        no rows yet, and that all trainers run the same number of steps.
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
        """Bytes that a trainer sends in a step for the id of one row.

        If a background thread (the communicator) sends gradients, each id is sent twice.
        """
        for eqn in self.trainer.eqns:
            if eqn.primitive is send_rows_p and "communicator" in eqn.params:
                return 2 * ID
        return ID

    @cached_property
    def arguments(self) -> dict[str, dict[str, int]]:
        """For each step argument that the servers' update reads: bytes sent to each server, by
        endpoint.

        An example of such an argument is a learning rate that the user passes to each step.
        Trainers send its value together with the gradients.
        """
        found: dict[str, dict[str, int]] = {}
        for endpoint, program in self.servers.items():
            (serve,) = program.eqns
            for block in serve.params["optimize_blocks"]:
                for g in block.grads:
                    if g.op == "same":
                        size = nbytes(block.invars[g.name].aval)
                        found.setdefault(g.leaf, {})[endpoint] = size
        return found

    @cached_property
    def exchanges(self) -> tuple[JaxprEqn, ...]:
        """The `exchange` equations in the program of trainer 0.

        In each of these equations, trainers all-reduce some values through a server in the middle
        of the step.
        """
        return tuple(eqn for eqn in self.trainer.eqns if eqn.primitive is exchange_p)

    @cached_property
    def rounds(self) -> tuple[tuple[Reduction, ...], ...]:
        """The all-reduces between servers in a step, in the order in which servers run them.

        All-reduces in the same inner tuple do not depend on each other.
        """
        found: dict[int, dict[str, Reduction]] = {}
        for block in self.optimize_blocks:
            if block.role != DIST:
                continue
            for eqn in block.eqns:
                if eqn.primitive is all_reduce_p and len(eqn.params["over"]) > 1:
                    reduction = Reduction.from_equation(eqn)
                    found.setdefault(block.level, {})[reduction.name] = reduction
        return tuple(tuple(found[level].values()) for level in sorted(found))

    @cached_property
    def optimize_blocks(self) -> tuple[OptimizeBlock, ...]:
        """Updates that the servers run, each for one block or several blocks of parameters."""
        blocks: list[OptimizeBlock] = []
        for program in self.servers.values():
            (serve,) = program.eqns
            blocks += serve.params["optimize_blocks"]
        return tuple(blocks)

    @property
    def notes(self) -> list[str]:
        """Remarks on the traffic, for a printed plan."""
        step = self.bytes_per_step
        often = f"in {self.push_every} steps" if self.push_every else "per step"
        notes = [
            f"each of {self.trainers} trainers sends {step['send']:,} and receives "
            f"{step['recv']:,} bytes {often}"
        ]
        if self.exchanges:
            sends, receives = map(sum, zip(*map(_exchange_bytes, self.exchanges), strict=True))
            count, rounds = sum(len(r.invars) for r in self.exchanges), len(self.exchanges)
            notes.append(
                f"in the middle of a step trainers exchange {count} values through the pservers, "
                f"in {rounds} round{'s' * (rounds > 1)}; each sends {sends:,} and receives "
                f"{receives:,} bytes"
            )
        for i, values in enumerate(self.rounds):
            size = sum(r.nbytes for r in values)
            notes.append(
                f"round {i + 1} between pservers: {len(values)} values, at most {size:,} bytes "
                "from each pserver"
            )
        row_bytes = {n: sum(sizes) for n, sizes in self._row_bytes.items()}
        return notes + table_notes(self.tables, row_bytes, f" {often}" * bool(self.push_every))


def _exchange_bytes(eqn: JaxprEqn) -> tuple[int, int]:
    """Return the bytes that a trainer sends and receives in one `exchange` equation."""
    return total_bytes(eqn.invars), total_bytes(eqn.outvars)
