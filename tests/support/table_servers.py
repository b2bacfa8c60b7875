"""Servers of a plan with a table, without a protocol: updates, and exchanges between servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

import dtrans
from dtrans.parameter_server.plan import PServerPlan
from dtrans.protocol.server_blocks import RowGradient
from dtrans.run.parameter_server.sync_update import SyncUpdate
from dtrans.run.parameter_server.update import ServerUpdate, copy_state


Gradients = Mapping[str, np.ndarray]  # gradients of a trainer, by the last part of a leaf's name


class TableServers:
    """All servers of a plan with one table, with the initial state of the plan's init.

    Args:
      lookups: for each step, the increasing ids of the rows that each trainer looks up.
    """

    def __init__(self, plan: PServerPlan, lookups: Sequence[Sequence[Sequence[int]]]) -> None:
        self.plan, self._lookups = plan, lookups
        with dtrans.Executor() as exe:
            self.of = {
                ep: _begun(p, plan, exe.run(p.startup, jax.random.key(0)))
                for ep, p in plan.servers.items()
            }

    def step(self, at: int, grads: Sequence[Gradients]) -> None:
        """Run a step, with all its exchanges."""
        present = frozenset(range(self.plan.trainers))
        sent = {
            ep: server.begin(self._received(ep, grads, at), present, at)
            for ep, server in self.of.items()
        }
        while waiting := {
            ep: x for ep, server in self.of.items() if (x := server.exchange) is not None
        }:
            level = min(x.level for x in waiting.values())
            here = {ep: x for ep, x in waiting.items() if x.level == level}
            arrived = {ep: {peer: sent[peer][ep] for peer in x.sources} for ep, x in here.items()}
            sent |= {ep: self.of[ep].go_on(arrived[ep]) for ep in here}

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Return rows of the table, as a server sends them to a trainer that looks them up."""
        ((leaf, table),) = self.plan.tables.of.items()
        blocks = self.plan.placement.blocks[leaf]
        found = np.zeros((table.lookups.rows, *blocks[0].shape[1:]), blocks[0].dtype)
        for b in blocks:
            own = ids[b.span.among(ids)]
            found[own] = self.of[b.endpoint].rows(b.name, b.span.local(own), train=True)
        return found[ids]

    def held(self) -> dict[str, dict[str, Any]]:
        """Return the state of the servers, after all rows have caught up."""
        made = {ep: {n: np.asarray(x) for n, x in s.tables().items()} for ep, s in self.of.items()}
        return {ep: {**s.state, **made[ep]} for ep, s in self.of.items()}

    def _received(self, endpoint: str, grads: Sequence[Gradients], at: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for b in (b for unit in self.plan.placement.units[endpoint] for b in unit.blocks):
            for k, of in enumerate(grads):
                g = of[b.leaf.rpartition("/")[2]]
                if b.is_table:
                    ids = np.array(self._lookups[at][k], np.int32)
                    own = ids[b.span.among(ids)]
                    value: Any = RowGradient(b.span.local(own), g[own])
                else:
                    value = g[b.span.index] if b.span else g
                found[b.gradient(k, self.plan.trainers)] = value
        return found


def _begun(programs: Any, plan: PServerPlan, state: Mapping[str, Any]) -> SyncUpdate:
    update = ServerUpdate.from_program(programs.main)
    by_rows = {n for t in update.tables.values() if not t.updates_all for n in t.arrays}
    own = copy_state({n: x for n, x in state.items() if n not in by_rows})
    return SyncUpdate(update, {**state, **own}, plan.trainers)
