"""Devices, servers and communication of a parameter-server job in one process.

`MeshPlacement` assigns the trainers and servers to devices. `MeshServers` updates each server's
state on its device. `MeshFabric` executes the communication equations between the compiled pieces
of a program.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, Sharding, SingleDeviceSharding

from dtrans._jax import JaxprEqn, Primitive, is_traced
from dtrans.errors import ConfigError
from dtrans.ir.array_fns import parts_of, words
from dtrans.ir.selection import subset
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
from dtrans.protocol.server.exchange import Exchange
from dtrans.protocol.server_blocks import RowGradient, Vectors
from dtrans.run.base.batch import Share, pad_for_trainers
from dtrans.run.base.nonfinite import NonfiniteCheck
from dtrans.run.base.segments import Segments
from dtrans.run.parameter_server.mesh_trainers import AXIS, MeshTrainerPrograms
from dtrans.run.parameter_server.tables.mesh_tables import prefetched, sent_rows, split_ids
from dtrans.run.parameter_server.tables.missed_steps import MissedSteps
from dtrans.run.parameter_server.tables.row_updates import RowUpdates, put_padded, take_padded
from dtrans.run.parameter_server.tables.traced_tables import TracedMemory, gradients_with_room
from dtrans.run.parameter_server.update import CompiledUpdate, ServerUpdate


class MeshPlacement:
    """Assignment of trainers and servers to devices.

    Trainers use the first devices, and servers the next ones. With fewer devices than roles, roles
    share devices. Each device of trainers runs the same number of trainers. For example, 4 trainers
    on 3 devices use 2 devices, with 2 trainers on each.

    Args:
      devices: one device or more.
      trainers: the number of trainers.
      servers: endpoints of the servers.

    Attributes:
      mesh: the trainers' devices, on one axis.
      servers: for each server by endpoint, the JAX sharding that puts arrays on its device.
      replicated: the sharding that copies a value to every device of trainers.
      split: the sharding that splits dimension 0 of a value over the devices of trainers.
    """

    def __init__(
        self, devices: Sequence[jax.Device], trainers: int, servers: Sequence[str]
    ) -> None:
        self.trainers = trainers
        divisors = [d for d in range(1, min(len(devices), trainers) + 1) if trainers % d == 0]
        count = divisors[-1]
        self.mesh = Mesh(np.array(devices[:count]), (AXIS,))
        self.servers: dict[str, Sharding] = {}
        for i, ep in enumerate(servers):
            self.servers[ep] = SingleDeviceSharding(devices[(trainers + i) % len(devices)])
        one = SingleDeviceSharding(devices[0])
        self.replicated: Sharding = NamedSharding(self.mesh, P()) if count > 1 else one
        self.split: Sharding = NamedSharding(self.mesh, P(AXIS)) if count > 1 else one

    def put_batch(self, x: Any, share: Share) -> Any:
        """Put one array of a full batch on the trainers' devices.

        Args:
          x: the array.
          share: the dimension that trainers divide. "replicated" if each trainer gets the array in
            full. "key" for a PRNG key, into which each trainer folds its id.
        """
        if share == "key":
            x = jax.vmap(jax.random.fold_in, (None, 0))(x, jnp.arange(self.trainers))
        if isinstance(share, int):
            x = pad_for_trainers(x, share, self.trainers)
            x = x if share == 0 else parts_of(x, share, self.trainers)
        return put(x, self.replicated if share == "replicated" else self.split)

    def broadcast(self, x: jax.Array) -> jax.Array:
        """Copy an array of a server to every device of trainers."""
        if self.mesh.size == 1:
            return put(x, self.replicated)
        devices = list(self.mesh.devices.flat)
        copies = jax.device_put([x] * len(devices), devices)
        return jax.make_array_from_single_device_arrays(x.shape, self.replicated, copies)

    def stack(self, x: jax.Array) -> jax.Array:
        """Repeat an array on a new leading dimension, once for each trainer.

        Trainers can then change their copies independently.
        """
        return jax.device_put(jnp.broadcast_to(x, (self.trainers, *x.shape)), self.split)


def put(x: Any, where: Sharding) -> Any:
    """Put an array on devices. Return the array itself if it is there already, or is traced."""
    if isinstance(x, list):
        return jax.device_put(x, where)
    if is_traced(x):
        return x
    if isinstance(x, jax.Array) and x.sharding == where:
        return x  # `device_put` would return the same array, but takes some microseconds.
    return jax.device_put(x, where)


def shards_of(x: Any) -> list[jax.Array]:
    """Return the devices' pieces of an array that is sharded over the trainers, in trainers' order.

    For a traced array, return the array itself as the only piece.
    """
    if is_traced(x):
        return [x]
    return [s.data for s in sorted(x.addressable_shards, key=lambda s: s.index[0].start or 0)]


# -- servers ---------------------------------------------------------------------------------------


class MeshServers:
    """All servers of a job in one process.

    Args:
      plan: the job's plan.
      placement: the devices of trainers and servers.
      donate: True to let updates reuse the memory of old optimizer state and of tables.
      late: True if table rows without a gradient skip updates, and make up for them later
        (`LateRowsJob`).
    """

    def __init__(
        self, plan: PServerPlan, placement: MeshPlacement, *, donate: bool, late: bool
    ) -> None:
        self.plan, self.placement = plan, placement
        self._options = {"donate": donate, "late": late}

    @cached_property
    def _servers(self) -> dict[str, _MeshServer]:
        found = {}
        at, trainers = self.placement.servers, self.placement.trainers
        for ep, programs in self.plan.servers.items():
            update = ServerUpdate.from_program(programs.main)
            found[ep] = _MeshServer(update, at[ep], trainers, **self._options)
        return found

    def update(
        self, state: dict[str, dict[str, Any]], grads: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Run one update of every server, and pass values between servers, such as partial norms.

        A server pauses when it needs values of other servers. The method repeatedly continues the
        servers that wait for the earliest exchange (smallest `level`), until all updates are
        complete.

        Args:
          state: the state of each server, by endpoint; updated in place.
          grads: the gradients that each server receives, by endpoint.
        """
        runs = {ep: self._servers[ep].run(grads[ep], arrays) for ep, arrays in state.items()}
        arrived: dict[str, Any] = dict.fromkeys(runs)
        # server -> (exchange that the server waits for, vectors that it sends)
        at: dict[str, tuple[Exchange, Vectors]] = {}
        while arrived:
            for ep, vectors in arrived.items():
                try:
                    at[ep] = runs[ep].send(vectors)
                except StopIteration as done:
                    at.pop(ep, None)
                    state[ep] = done.value
            level = min((exchange.level for exchange, _ in at.values()), default=None)
            arrived = {}
            for ep, (exchange, _) in at.items():
                if exchange.level == level:
                    vectors = {source: at[source][1][ep] for source in exchange.sources}
                    arrived[ep] = jax.device_put(vectors, self.placement.servers[ep])


class _MeshServer:
    """One server of a job in one process; all its updates run on one device.

    Args:
      update: the server's update.
      at: the JAX sharding that puts arrays on the server's device.
      trainers: the number of trainers.
      donate: as in `MeshServers`.
      late: as in `MeshServers`.
    """

    def __init__(
        self, update: ServerUpdate, at: Sharding, trainers: int, *, donate: bool, late: bool
    ) -> None:
        self._update, self._at, self._trainers, self._donate = update, at, trainers, donate
        # An update may also change rows that have no gradient. With `late`, such a row misses steps
        # and catches up later. Without `late`, the update touches every row in each step, because a
        # job's state does not record the missed steps of its rows.
        self._tables = {}
        for n, t in update.tables.items():
            self._tables[n] = dataclasses.replace(
                t, updates_all=t.updates_all or (t.changes_other_rows and not late)
            )
        self._missed: dict[str, MissedSteps] = {}
        for n, t in self._tables.items():
            if t.changes_other_rows and not t.updates_all:
                self._missed[n] = MissedSteps(update, t)
        if self._missed:
            reads: set[str] = set()
            for missed in self._missed.values():
                reads.update(missed.reads)
            self._update = dataclasses.replace(update, watched=frozenset(reads))
        self._by_rows = RowUpdates(self._tables, take_padded, partial(put_padded, donate=donate))
        # numbers of rows of the tables -> compiled update
        self._compiled: dict[tuple[int, ...], CompiledUpdate] = {}

    def run(
        self, grads: Mapping[str, Any], state: Mapping[str, Any]
    ) -> Generator[tuple[Exchange, Vectors], Vectors, dict[str, Any]]:
        """Run one update as a generator, which pauses when it needs values of other servers.

        `CompiledUpdate.run` describes the generator.

        Args:
          grads: gradients by name, on any devices.
          state: the state before the step, by name.
        """
        local, in_trace = {}, False
        for n, x in grads.items():
            if isinstance(x, RowGradient):  # Gradients of table rows stay on the host.
                local[n] = x
                in_trace |= is_traced(x.rows)
            else:
                local[n] = put(x, self._at)
        if in_trace:
            return self._trace(local, state)
        assert not self._missed, "rows that catch up late are traced"
        if self._update.tables:
            state = {n: put(x, self._at) for n, x in state.items()}
        return self._by_rows.run(self._sized, local, range(self._trainers), state)

    def _trace(
        self, grads: Mapping[str, Any], state: Mapping[str, Any]
    ) -> Generator[tuple[Exchange, Vectors], Vectors, dict[str, Any]]:
        """Run one update inside a JAX trace, in which the ids of table rows are unknown.

        So arrays of rows are padded to the largest possible number of rows.

        Args:
          grads: gradients by name.
          state: the state before the step, by name.
        """
        gradients = {n: x for n, x in grads.items() if not isinstance(x, RowGradient)}
        inputs = dict(state)
        ids: dict[str, Any] = {}
        memory: dict[str, TracedMemory] = {}
        for n, t in self._tables.items():
            padded, arrays = gradients_with_room(t, subset(grads, t.gradients.values()))
            gradients |= arrays
            if not t.updates_all:
                ids[n] = padded
                memory[n] = TracedMemory(t, self._missed.get(n), state)
                inputs |= memory[n].take(padded, len(padded))
        watched: dict[str, Any] = {}
        update = self._sized({n: len(x) for n, x in ids.items()})
        new = yield from update.run(gradients, inputs, watched)
        for n, padded in ids.items():
            new |= memory[n].put(padded, new, watched)
        return new

    def _sized(self, sizes: Mapping[str, int]) -> CompiledUpdate:
        """Return the compiled update for the given numbers of table rows, compiled only once.

        Args:
          sizes: number of rows to update, by name of the table's block.
        """
        key = tuple(sizes.values())
        if key not in self._compiled:
            update = self._update.sized(sizes) if sizes else self._update
            prepare = partial(_unstack, update.sent)
            self._compiled[key] = CompiledUpdate(update, donate=self._donate, prepare=prepare)
        return self._compiled[key]


def _unstack(sent: Sequence[Mapping[int, str]], grads: Mapping[str, Any]) -> dict[str, Any]:
    """Divide gradients that contain the values of all trainers into one gradient for each trainer.

    Args:
      sent: one dict for each gradient. It maps the id of a trainer to the name under which this
        trainer sends the gradient.
      grads: gradients by name. A gradient of a table has one entry for each trainer. Any other
        gradient has only trainer 0's entry. This entry contains the stacked shards of all trainers,
        or one array that all trainers share.
    """
    each: dict[str, Any] = {}
    for names in sent:
        if all(n in grads for n in names.values()):
            each |= subset(grads, names.values())
            continue
        x = grads[names[0]]
        if isinstance(x, list):
            parts = list(itertools.chain(*x))
        else:
            parts = [x] * len(names)
        for k, name in names.items():
            each[name] = parts[k]
    return each


# -- communication ---------------------------------------------------------------------------------


class MeshFabric:
    """Communication of a startup program, in which trainers receive the servers' initial values.

    Args:
      placement: the devices of trainers and servers.
      state: the state of each server, by endpoint.

    Attributes:
      state: the state of each server after the program, by endpoint.
      rules: maps each primitive to the name of the method that executes it. Bound methods would
        form a reference cycle, which delays the release of gradients and state.
    """

    rules: ClassVar[dict[Primitive, str]] = {
        recv_p: "_receive",
        fake_init_p: "_fake_init",
        fetch_barrier_p: "_fetch_barrier",
    }

    def __init__(self, placement: MeshPlacement, state: dict[str, dict[str, Any]]) -> None:
        self.state = state
        self._placement = placement

    def run(
        self,
        pieces: Segments,
        args: Sequence[Any],
        compute: Callable[..., Sequence[Any]] | None = None,
    ) -> list[Any]:
        """Run a program: compute its compiled pieces, and execute the communication between them.

        Args:
          pieces: the program, divided at its communication equations.
          args: the flat arguments of the program.
          compute: function that runs one piece (see `Segments.run`).

        Returns:
          The program's outputs.
        """
        run = pieces.run(args, compute)
        outs: Any = None
        while True:
            try:
                eqn, values = run.send(outs)
            except StopIteration as done:
                return done.value
            outs = self._carry_out(eqn, values)

    def _carry_out(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        """Execute a communication equation; return its results.

        Raises:
          ConfigError: jobs in one process do not support the equation.
        """
        rule = self.rules.get(eqn.primitive)
        if rule is None:
            raise ConfigError(
                f"`{eqn.primitive.name}` cannot run on a mesh; run the plan as processes: "
                "plan.on_cluster()"
            )
        execute: Callable[[JaxprEqn, list[Any]], Sequence[Any]] = getattr(self, rule)
        return execute(eqn, values)

    def _receive(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        blocks = zip(eqn.params["epmap"], eqn.params["names"], strict=True)
        return [words(self.state[ep][n]) for ep, n in blocks]

    def _fake_init(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        return [jnp.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars]

    def _fetch_barrier(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        return [self._placement.broadcast(x) for x in values]


class StepFabric(MeshFabric):
    """Communication of one training step: gradients to servers, updates, and new parameters.

    This is a base class: subclasses add `_send`.

    Args:
      servers: the updates of all servers, with the job's plan and placement.
      state: the state of each server, by endpoint.
      watch: checks gradients before servers get them.
    """

    rules: ClassVar[dict[Primitive, str]] = MeshFabric.rules | {
        send_p: "_send",
        send_barrier_p: "_send_barrier",
    }

    def __init__(
        self, servers: MeshServers, state: dict[str, dict[str, Any]], watch: NonfiniteCheck
    ) -> None:
        super().__init__(servers.placement, state)
        self._plan, self._servers, self._watch = servers.plan, servers, watch
        self._grads: dict[str, dict[str, Any]] = {ep: {} for ep in state}
        # Gradients to check: name, array, and True if the array is stacked
        self._sent: list[tuple[str, Any, bool]] = []

    def _send_barrier(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        if self._sent:
            self._check_finite()
        self._servers.update(self.state, self._grads)
        return [None]

    def _note(self, name: str, gradient: Any, is_stacked: bool) -> None:
        """Record a gradient for `_check_finite`, if the job checks gradients for NaN.

        Args:
          name: name of the gradient.
          gradient: its values.
          is_stacked: True if the array has a leading dimension with one entry for each trainer.
        """
        if self._watch.enabled:
            self._sent.append((name, gradient, is_stacked))

    def _check_finite(self) -> None:
        """Check the recorded gradients; warn or raise NonfiniteError if one is not finite."""
        names, gradients, stacked = zip(*self._sent, strict=True)
        blocks = {
            b.gradient(0, self._plan.trainers): b.name for b in self._plan.placement.all_blocks
        }
        bad: dict[int | None, list[str]] = {}
        finite = jax.device_get(_finite(gradients, stacked))
        for name, each, is_stacked in zip(names, finite, stacked, strict=True):
            for k in np.flatnonzero(~each):
                bad.setdefault(int(k) if is_stacked else None, []).append(blocks.get(name, name))
        for trainer, found in bad.items():
            self._watch.note(trainer, found)
        self._watch.check()


class MeshStepFabric(StepFabric):
    """Communication of one training step on a mesh, including rows of embedding tables.

    Args:
      servers, state, watch: as for `StepFabric`.
      trainers: the compiled trainer program.
    """

    rules: ClassVar[dict[Primitive, str]] = StepFabric.rules | {
        send_rows_p: "_send_rows",
        split_ids_p: "_split_ids",
        prefetch_p: "_prefetch",
    }

    def __init__(
        self,
        servers: MeshServers,
        state: dict[str, dict[str, Any]],
        watch: NonfiniteCheck,
        trainers: MeshTrainerPrograms,
    ) -> None:
        super().__init__(servers, state, watch)
        self._trainers = trainers

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

    def _split_ids(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        return self._from_host(eqn, split_ids(eqn, self._each_trainers(eqn, values)))

    def _prefetch(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        # A `prefetch` has one operand: the ids.
        ids = itertools.chain(*self._each_trainers(eqn, values))
        return self._from_host(eqn, prefetched(self._plan, eqn, list(ids), self.state))

    def _each_trainers(self, eqn: JaxprEqn, values: list[Any]) -> list[tuple[Any, ...]]:
        """Copy an equation's operands to the host; return a list with the operands of each trainer.

        If all trainers have the same operands, the result has one entry.
        """
        each = list(zip(*self._trainers.on_host(eqn.invars, values), strict=True))
        return each if self._trainers.is_stacked(eqn.outvars[0]) else each[:1]

    def _from_host(self, eqn: JaxprEqn, results: Sequence[Any]) -> Sequence[Any]:
        """Copy results that were computed on the host to the trainers' devices.

        Args:
          eqn: the equation.
          results: one result for each trainer, or one for all trainers.
        """
        if not self._trainers.is_stacked(eqn.outvars[0]):
            return [put(results[0], self._placement.replicated)]
        stack = jnp.stack if any(map(is_traced, results)) else np.stack
        return [put(stack(results), self._placement.split)]


@partial(jax.jit, static_argnums=1)
def _finite(xs: Sequence[Any], stacked: Sequence[bool]) -> list[jax.Array]:
    """Return, for each gradient, an array of flags: True if all its elements are finite.

    Args:
      xs: the gradients.
      stacked: for each gradient, True if its leading dimension has one entry for each trainer. Then
        there is one flag for each trainer, otherwise one flag.
    """
    found = []
    for x, is_stacked in zip(xs, stacked, strict=True):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            found.append(jnp.ones(1, bool))
            continue
        axes = tuple(range(int(is_stacked), x.ndim))
        found.append(jnp.atleast_1d(jnp.isfinite(x).all(axes)))
    return found
