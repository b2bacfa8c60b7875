"""Communication between the compiled pieces of a trainer program, for all trainers of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import JaxprEqn, Primitive, is_traced
from dtrans.errors import ConfigError
from dtrans.ir.array_fns import words
from dtrans.ops import (
    fake_init_p,
    fetch_barrier_p,
    prefetch_p,
    recv_p,
    send_barrier_p,
    send_p,
    send_rows_p,
    split_ids_p,
)
from dtrans.parameter_server.plan import PServerPlan
from dtrans.run.base.nonfinite import GradientWatch
from dtrans.run.base.segments import Segments
from dtrans.run.parameter_server.mesh_placement import MeshPlacement, put, shards_of
from dtrans.run.parameter_server.mesh_servers import MeshServers
from dtrans.run.parameter_server.mesh_trainers import MeshTrainerPrograms
from dtrans.run.parameter_server.tables.mesh_tables import prefetched, sent_rows, split_ids


Rule = Callable[[JaxprEqn, list[Any]], Sequence[Any]]


class MeshFabric:
    """Communication of a startup program, which receives the servers' initial values.

    Args:
      placement: the devices.
      state: endpoint to the server's state.

    Attributes:
      state: the servers' state after the program, by endpoint.
    """

    def __init__(self, placement: MeshPlacement, state: dict[str, dict[str, Any]]) -> None:
        self.state = state
        self._placement = placement
        self._rules: dict[Primitive, Rule] = {
            recv_p: self._receive,
            fake_init_p: self._fake_init,
            fetch_barrier_p: self._fetch_barrier,
        }

    def run(
        self,
        pieces: Segments,
        args: Sequence[Any],
        compute: Callable[..., Sequence[Any]] | None = None,
    ) -> list[Any]:
        """Run a program; return its outputs.

        Args:
          pieces: the program.
          args: its flat arguments.
          compute: runs one piece, as of `Segments.run`.
        """
        run = pieces.run(args, compute)
        outs: Any = None
        while True:
            try:
                eqn, values = run.send(outs)
            except StopIteration as done:
                return done.value
            rule = self._rules.get(eqn.primitive)
            if rule is None:
                raise ConfigError(f"a mesh cannot carry out `{eqn.primitive.name}`")
            outs = rule(eqn, values)

    def _receive(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        blocks = zip(eqn.params["epmap"], eqn.params["names"], strict=True)
        return [words(self.state[ep][n]) for ep, n in blocks]

    def _fake_init(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        return [jnp.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars]

    def _fetch_barrier(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        return [self._placement.broadcast(x) for x in values]


class MeshStepFabric(MeshFabric):
    """Communication of one step: gradients to servers, and rows of tables.

    Args:
      placement: the devices.
      state: endpoint to the server's state.
      plan: the job's plan.
      servers: update the state.
      trainers: the compiled trainer program.
      watch: checks gradients before a server has them.
    """

    def __init__(
        self,
        placement: MeshPlacement,
        state: dict[str, dict[str, Any]],
        plan: PServerPlan,
        servers: MeshServers,
        trainers: MeshTrainerPrograms,
        watch: GradientWatch,
    ) -> None:
        super().__init__(placement, state)
        self._plan, self._servers, self._trainers, self._watch = plan, servers, trainers, watch
        self._grads: dict[str, dict[str, Any]] = {ep: {} for ep in state}
        self._sent: list[tuple[str, Any, bool]] = []  # to check: name, gradient, is stacked
        self._rules |= {
            send_p: self._send,
            send_rows_p: self._send_rows,
            send_barrier_p: self._send_barrier,
            split_ids_p: self._split_ids,
            prefetch_p: self._prefetch,
        }

    def _send(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        where = zip(eqn.params["epmap"], eqn.params["names"], strict=True)
        for atom, x, (ep, name) in zip(eqn.invars, values, where, strict=True):
            is_stacked = self._trainers.is_stacked(atom)
            self._note(name, x, is_stacked)
            self._grads[ep][name] = shards_of(x) if is_stacked else x
        return [None]

    def _send_rows(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        is_stacked = self._trainers.is_stacked(eqn.invars[1])
        self._note(eqn.params["table"], values[1], is_stacked)
        ids, gradients = self._trainers.on_host(eqn.invars, values)
        for ep, sent in sent_rows(self._plan, eqn, ids, gradients).items():
            self._grads[ep] |= sent
        return [None]

    def _send_barrier(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        if self._sent:
            self._check_finite()
        self._servers.update(self.state, self._grads)
        return [None]

    def _note(self, name: str, gradient: Any, is_stacked: bool) -> None:
        if self._watch.looks:
            self._sent.append((name, gradient, is_stacked))

    def _check_finite(self) -> None:
        """Report gradients that are not finite. Raises NonfiniteError, and no server has them."""
        names, gradients, stacked = zip(*self._sent, strict=True)
        blocks = {b.gradient(0, self._plan.trainers): b.name for b in self._plan.placement.table}
        bad: dict[int | None, list[str]] = {}
        finite = jax.device_get(_finite(gradients, stacked))
        for name, each, is_stacked in zip(names, finite, stacked, strict=True):
            for k in np.flatnonzero(~each):
                bad.setdefault(int(k) if is_stacked else None, []).append(blocks.get(name, name))
        for trainer, found in bad.items():
            self._watch.hear(trainer, found)
        self._watch.check()

    def _split_ids(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        return self._from_host(eqn, split_ids(eqn, self._each_trainers(eqn, values)))

    def _prefetch(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        ids = [ids for (ids,) in self._each_trainers(eqn, values)]
        return self._from_host(eqn, prefetched(self._plan, eqn, ids, self.state))

    def _each_trainers(self, eqn: JaxprEqn, values: list[Any]) -> list[tuple[Any, ...]]:
        """Return each trainer's operands on the host; only trainer 0's if all have the same."""
        each = list(zip(*self._trainers.on_host(eqn.invars, values), strict=True))
        return each if self._trainers.is_stacked(eqn.outvars[0]) else each[:1]

    def _from_host(self, eqn: JaxprEqn, made: Sequence[Any]) -> Sequence[Any]:
        """Put the result of an equation on the trainers' devices."""
        if not self._trainers.is_stacked(eqn.outvars[0]):
            return [put(made[0], self._placement.replicated)]
        stack = jnp.stack if any(map(is_traced, made)) else np.stack
        return [put(stack(made), self._placement.split)]


@partial(jax.jit, static_argnums=1)
def _finite(xs: Sequence[Any], stacked: Sequence[bool]) -> list[jax.Array]:
    """Return for each gradient if it is finite: a flag per trainer for stacked ones, else one."""
    found = []
    for x, is_stacked in zip(xs, stacked, strict=True):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            found.append(jnp.ones(1, bool))
            continue
        axes = tuple(range(int(is_stacked), x.ndim))
        found.append(jnp.atleast_1d(jnp.isfinite(x).all(axes)))
    return found
