"""The whole job in one process: trainers on one mesh of devices, each server on a device of
another.

    trainer program, cut in pieces    jit(shard_map) over the `trainers` axis: one dispatch for all trainers
    send                              device_put of each trainer's block to its server's device
    a server's optimize blocks        one jit per server and phase, on its device; optimizer state is donated
    all_reduce                        device_put of each server's parts to the devices of the others
    recv                              device_put of each block back to all trainer devices
    split_ids, prefetch, send_rows    rows of tables go by the host (`dtrans.run.parameter_server.tables.mesh_tables`)
    exchange                          a gather over the axis, and what a server would make of it

A trainer sees its own part of the batch and its own gradients, and nothing else crosses between
trainers but through servers, as between processes. With fewer devices than trainers each device
takes several in turn (a `lax.map`, so that the arithmetic of one trainer is the same wherever it
runs). Without more than one device everything runs on that one, and no copy is made.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Collection, Generator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, Sharding, SingleDeviceSharding

from dtrans._jax import JaxprEqn, is_traced
from dtrans.checkpoint.assemble import by_origin
from dtrans.checkpoint.pserver_state import TRAINER, arrays_of, scatter
from dtrans.checkpoint.runs import THIS_PROCESS
from dtrans.errors import ConfigError
from dtrans.ir.array_fns import parts_of, words
from dtrans.ir.pytree import is_under
from dtrans.job import Job
from dtrans.ops import (
    fake_init_p,
    fetch_barrier_p,
    recv_p,
    send_barrier_p,
    send_p,
    send_rows_p,
    split_ids_p,
)
from dtrans.parameter_server.overview import VarDistributed
from dtrans.parameter_server.plan import PServerPlan
from dtrans.parameter_server.state import MeshState
from dtrans.plan import realises
from dtrans.protocol.exchange import Exchange
from dtrans.protocol.served import RowGradient, Vectors
from dtrans.run.base.batch import (
    Share,
    batch_arrays,
    check_rows,
    even_rows,
    rows_of,
    shared_batch,
)
from dtrans.run.base.lowered import LoweredStep, recording
from dtrans.run.base.nonfinite import GradientWatch
from dtrans.run.base.segments import COMPUTED, Segments, cut_program
from dtrans.run.base.state import check_arrays, check_kind, check_types
from dtrans.run.parameter_server.mesh_trainers import (
    AXIS,
    OF_ROWS,
    MeshTrainerPrograms,
    shared_program,
)
from dtrans.run.parameter_server.tables.mesh_tables import (
    MeshTables,
    Servers,
    prefetched,
    sent_rows,
    split_ids,
)
from dtrans.run.parameter_server.tables.missed_steps import MissedSteps
from dtrans.run.parameter_server.tables.row_updates import RowUpdates, put_there, taken_there
from dtrans.run.parameter_server.tables.traced_tables import TracedMemory, gradients_with_room
from dtrans.run.parameter_server.update import CompiledUpdate, ServerUpdate, own_buffers
from dtrans.step_meter import metered


@realises(PServerPlan, "mesh")
class MeshJob(Job):
    """A plan, running in this process.

    `init` and `step` are functions of a state; the job itself holds only compiled code. What comes
    out of several trainers is merged. Where the batch is shared exactly, results are those of one
    device. With batch="local" a result that grows with the batch is concatenated, any other
    floating-point result (the loss) is averaged, and any other result gets a leading axis, one row
    per trainer, since nothing says whether it is a count to be added or a flag.

    Args:
      plan: what to run.
      devices: trainers take the first, servers those after them, round-robin where there are fewer
        than roles; all of this process's by default.
      unsplit_inputs: with batch="local", names of batch arrays that every trainer gets whole, e.g.
        class weights.
      on_nonfinite: what is done about gradients of a trainer with an infinity or a NaN in them:
        "ignore", "warn", or "error", before a server has them.
      donate: let updates reuse the memory of the optimizer state they replace, and of tables of
        which they replace some rows. A state that was stepped from can then not be stepped from
        again; parameters that trainers have are never donated.

    Raises:
      ConfigError: no devices, or `unsplit_inputs` names that the batch does not have.

    Example:
      >>> import jax, jax.numpy as jnp, optax, dtrans
      >>> tx = optax.sgd(0.5)
      >>> step = dtrans.make_train_step(lambda params, x: jnp.mean((params["w"] - x) ** 2), tx)
      >>> init = lambda key: (p := {"w": jnp.zeros(2)}, tx.init(p))
      >>> key, x = jax.random.key(0), jnp.array([[1.0, 3.0], [3.0, 5.0]])
      >>> plan = dtrans.pserver(dtrans.trace(step, *init(key), x), dtrans.trace(init, key), trainers=2)
      >>> job = plan.on_mesh()
      >>> state, loss = job.step(job.init(key), x)
      >>> job.params(state)["w"].tolist(), float(loss)
      ([1.0, 2.0], 11.0)
    """

    rows_are_late = False

    def __init__(
        self,
        plan: PServerPlan,
        devices: Sequence[jax.Device] | None = None,
        *,
        donate: bool = True,
        unsplit_inputs: Collection[str] = (),
        on_nonfinite: str = "ignore",
        way: str = "on_mesh",
    ) -> None:
        self.watch = GradientWatch(on_nonfinite)
        if not plan.sync_mode:
            raise ConfigError(
                f"{way} takes the steps of all trainers at once, and trainers of an asynchronous "
                "mode take their own; "
                "run the plan in processes, plan.on_cluster()"
            )
        if plan.runtime_split:
            raise ConfigError(
                f"{way} splits no leaves at run time; leave out runtime_split, or run the plan in "
                "processes, "
                "plan.on_cluster()"
            )
        for n, t in plan.tables.of.items():
            if t.staleness:
                raise ConfigError(
                    f"sparse[{n!r}].staleness={t.staleness}: in one process no rows are asked for "
                    "ahead, and none are "
                    "older than the step; leave staleness out, or run the plan in processes "
                    "(on_cluster)"
                )
        devices = list(jax.devices() if devices is None else devices)
        if not devices:
            raise ConfigError("on_mesh was given no devices")
        self.plan = plan
        self.run_id = THIS_PROCESS
        self.donate = donate
        self.trainers = plan.trainers
        self._names = names = [n for spec in plan.main.args[2:] for n in spec.names]
        self._whole = {n for n in names if is_under(n, unsplit_inputs)}
        unknown = [r for r in unsplit_inputs if not any(is_under(n, [r]) for n in names)]
        if isinstance(unsplit_inputs, str) or unknown:
            raise ConfigError(
                f"unsplit_inputs={unsplit_inputs!r} must name arrays of the batch: "
                f"{', '.join(names)}"
            )
        if plan.shared is not None and unsplit_inputs:
            raise ConfigError(
                f"unsplit_inputs={unsplit_inputs!r}: the plan shares the batch exactly; say it "
                "there, as "
                "dtrans.pserver(batch=dtrans.Batch(unsplit_inputs=...))"
            )
        count = max(
            d for d in range(1, min(len(devices), self.trainers) + 1) if self.trainers % d == 0
        )
        self.mesh = Mesh(np.array(devices[:count]), (AXIS,))
        self.device_of = {
            ep: devices[(self.trainers + i) % len(devices)] for i, ep in enumerate(plan.servers)
        }
        self._pieces: dict[tuple[Any, ...], MeshTrainerPrograms] = {}  # by the types of the batch
        self._last: Any = lambda: None  # the state that was returned last: it needs no second look
        one = SingleDeviceSharding(devices[0])
        self._replicated: Sharding = NamedSharding(self.mesh, P()) if count > 1 else one
        self._split: Sharding = NamedSharding(self.mesh, P(AXIS)) if count > 1 else one
        self._at = {ep: SingleDeviceSharding(d) for ep, d in self.device_of.items()}

    # -- what a user calls -----------------------------------------------------------------------

    def init(self, *args: Any) -> MeshState:
        """The first state, from the arguments of `init`."""
        self._check_open()
        servers = {}
        for ep, programs in self.plan.servers.items():
            args_there = jax.device_put(programs.startup.flatten(*args), self.device_of[ep])
            made = programs.startup.compiled(*args_there)
            made = jax.device_put(made, self.device_of[ep])
            servers[ep] = own_buffers(dict(zip(programs.startup.out_names, made, strict=True)))
        startup = self.plan.trainer_startup
        pieces = cut_program(startup, computed=COMPUTED)
        there = jax.device_put(startup.flatten(*args), self._replicated)
        values = self._drive(pieces, there, servers, None)
        params = dict(zip(startup.out_names, values, strict=True))
        params |= {n: self._to_each(params[n]) for n in self._local}
        params |= {n: _put(params[n], self._replicated) for n in self.plan.tables.of}
        return self._newest(MeshState(params, servers))

    @metered
    def step(self, state: MeshState, *batch: Any) -> tuple[Any, ...]:
        """One step on the global batch: (state, loss[, aux]), or whatever else the step returns
        beside its state.

        Arrays of the batch are split over the trainers as the plan says; with batch="local" on dim
        0, where 0-d arrays, and those named in `unsplit_inputs`, go to every trainer whole, and a
        PRNG key (`jax.random.key`) is folded with the trainer's number, so that noise differs
        between trainers, and from what one device would draw.

        Raises:
          BatchError: arrays that differ in their number of rows, or, with batch="local", that the
            trainers do not divide.
          StateError: not a state of this job, or one that was already stepped from, and whose
            optimizer state was donated.
          NonfiniteError: gradients of a trainer, with on_nonfinite="error".
        """
        self.check(state)
        given = batch_arrays(self.plan.main.args[2:], batch, self.plan.main.inputs)
        arrays = self._shared(given)
        runner = self._runner(arrays)
        servers = {ep: dict(held) for ep, held in state.servers.items()}
        params = [state.params[n] for n in runner.param_names]
        shared = [self._place(x, share) for x, share in arrays]
        values = dict(
            zip(
                runner.program.out_names,
                self._drive(runner.pieces, [*params, *shared], servers, runner),
                strict=True,
            )
        )
        results = runner.results({n: values[n] for n in runner.result_names})
        values |= {
            n: self._to_each(values[n])
            for n in self._local
            if not runner.is_stacked(runner.outs[n])
        }
        return (self._newest(MeshState({n: values[n] for n in state.params}, servers)), *results)

    def _newest(self, state: MeshState) -> MeshState:
        """A state that the job returns."""
        self._last = weakref.ref(state)
        return state

    @property
    def tables(self) -> MeshTables:
        """Tables of the job: `lookup` and `export`."""
        return MeshTables(self.plan, self._last, self.check)

    def params(self, state: MeshState) -> Any:
        """The parameters, as the pytree that they were given in; tables too, put together from the
        servers."""
        spec, rows = self.plan.main.args[0], by_origin(self.plan.overview)
        held = dict(state.params) | {
            n: held[0] for n, held in state.params.items() if n in self._local
        }
        held |= {n: _joined(rows[n], state.servers) for n in self.plan.tables.of}
        return spec.unflatten([held[n] for n in spec.names])

    def opt_state(self, state: MeshState) -> Any:
        """The optimizer's state, put together from the servers, as the pytree that it was given
        in."""
        spec, rows = self.plan.main.args[1], by_origin(self.plan.overview)
        return spec.unflatten([_joined(rows[n], state.servers) for n in spec.names])

    def check(self, state: Any) -> None:
        self._check_open()
        check_kind(state, MeshState)
        for ep, held in state.servers.items():
            self.plan.servers[ep]  # raises UnknownEndpointError
            check_arrays(held.items(), donates=self.donate)
        if state is not self._last():
            check_types(state.params, self._param_types)
            for ep, programs in self.plan.servers.items():
                check_types(state.servers.get(ep, {}), programs.main.inputs)

    @property
    def roles(self) -> tuple[str, ...]:
        """Who saves: the servers, and trainer 0."""
        return (*self.plan.servers, TRAINER)

    def held(self, state: MeshState, endpoint: str) -> Mapping[str, Any]:
        """What a server holds."""
        return state.servers[endpoint]

    def state_of(self, params: Any, opt_state: Any) -> MeshState:
        given = arrays_of(self.plan.main, params, opt_state)
        given |= {n: given[n][:0] for n in self.plan.tables.of}
        held = {
            ep: jax.device_put(scatter(self.plan, ep, params, opt_state), self._at[ep])
            for ep in self.plan.servers
        }
        own = {
            n: jax.device_put(jnp.copy(given[n]), self._replicated)
            for n in self.plan.main.args[0].names
        }
        own |= {n: self._to_each(own[n]) for n in self._local}
        return MeshState(own, held)

    def lower(self, state: MeshState, *batch: Any) -> LoweredStep:
        """What `step` compiles for these arguments: the pieces of trainers, and the phases of each
        server.

        It makes a step from a copy of the state.
        """
        with recording() as parts:
            self.step(jax.tree.map(jnp.copy, state), *batch)
        return LoweredStep(parts)

    # -- how it runs -----------------------------------------------------------------------------

    @cached_property
    def _param_types(self) -> dict[str, Any]:
        """Of the parameters, as a state has them."""
        types = {n: self.plan.main.inputs[n] for n in self.plan.main.args[0].names}
        types |= {n: types[n].update(shape=(0, *types[n].shape[1:])) for n in self.plan.tables.of}
        return types | {
            n: types[n].update(shape=(self.trainers, *types[n].shape)) for n in self._local
        }

    @cached_property
    def _local(self) -> frozenset[str]:
        """Parameters of which each trainer has its own: made in the trainer half. None with one
        trainer."""
        outs = self.plan.main.outputs
        if self.trainers == 1:
            return frozenset()
        inner = self.plan.main.inner
        ins = self.plan.main.invars
        made = dict(zip(outs, inner.outvars, strict=True))
        return frozenset(n for n in self.plan.frozen if made[n] is not ins[n])

    def _shared(self, given: Sequence[Any]) -> list[tuple[Any, Share]]:
        """The arrays of a batch, and how trainers share each. Raises BatchError where they
        cannot."""
        if self.plan.shared is None:
            return shared_batch(
                self._names, given, self.trainers, self._whole, "plan.on_mesh(unsplit_inputs=(...))"
            )
        axes = self.plan.shared.axes
        arrays: list[tuple[Any, Share]] = [
            (x, axes.get(n, "replicated")) for n, x in zip(self._names, given, strict=True)
        ]
        option = "dtrans.pserver(batch=dtrans.Batch(unsplit_inputs=(...)))"
        check_rows(
            rows_of(self._names, arrays),
            self.trainers,
            option,
            uneven=self.plan.for_whole is not None,
        )
        return arrays

    def _place(self, x: Any, share: Share) -> Any:
        """One array of the batch on the trainers' devices."""
        if share == "key":
            x = jax.vmap(jax.random.fold_in, (None, 0))(x, jnp.arange(self.trainers))
        if isinstance(share, int):
            x = even_rows(x, share, self.trainers)
            x = x if share == 0 else parts_of(x, share, self.trainers)
        return _put(x, self._replicated if share == "replicated" else self._split)

    def _runner(self, arrays: Sequence[tuple[Any, Share]]) -> MeshTrainerPrograms:
        """The trainer program for this batch, in pieces."""
        key = tuple((x.shape, x.dtype) for x, _ in arrays)
        if key not in self._pieces:
            program, merges = shared_program(self.plan, arrays)
            self._pieces[key] = MeshTrainerPrograms(
                program, arrays, self.mesh, self.plan, self._local, merges
            )
        return self._pieces[key]

    def _drive(
        self,
        pieces: Segments,
        args: Sequence[Any],
        servers: dict[str, dict[str, Any]],
        runner: MeshTrainerPrograms | None,
    ) -> list[Any]:
        """Run a trainer program for all trainers. `servers` is brought up to date in place."""
        run = pieces.run(args, None if runner is None else runner.compute)
        grads: dict[str, dict[str, Any]] = {ep: {} for ep in servers}
        looked_at: list[
            tuple[str, Any, bool]
        ] = []  # gradients that are sent, and whether trainers have their own
        outs: Sequence[Any] | None = None
        while True:
            try:
                eqn, values = next(run) if outs is None else run.send(outs)
            except StopIteration as done:
                return done.value
            if eqn.primitive is send_p:
                assert runner is not None
                for atom, x, ep, name in zip(
                    eqn.invars, values, eqn.params["epmap"], eqn.params["names"], strict=True
                ):
                    if self.watch.looks:
                        looked_at.append((name, x, runner.is_stacked(atom)))
                    grads[ep][name] = _shards(x) if runner.is_stacked(atom) else x
                outs = [None]
            elif eqn.primitive is send_barrier_p:
                self._look(looked_at)
                self._update(servers, grads)
                outs = [None]
            elif eqn.primitive in OF_ROWS:
                assert runner is not None
                outs = [self._of_rows(eqn, values, servers, runner)]
            elif eqn.primitive is send_rows_p:
                assert runner is not None
                if self.watch.looks:
                    looked_at.append(
                        (eqn.params["table"], values[1], runner.is_stacked(eqn.invars[1]))
                    )
                for ep, sent in sent_rows(
                    self.plan, eqn, *runner.on_host(eqn.invars, values)
                ).items():
                    grads[ep] |= sent
                outs = [None]
            elif eqn.primitive is recv_p:
                outs = [
                    words(servers[ep][n])
                    for ep, n in zip(eqn.params["epmap"], eqn.params["names"], strict=True)
                ]
            elif eqn.primitive is fake_init_p:
                outs = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
            elif eqn.primitive is fetch_barrier_p:
                outs = [self._to_trainers(x) for x in values]
            else:
                raise ConfigError(f"a mesh cannot carry out `{eqn.primitive.name}`")

    def _of_rows(
        self, eqn: JaxprEqn, values: Sequence[Any], servers: Servers, runner: MeshTrainerPrograms
    ) -> Any:
        """The numbers of rows that trainers look up, or these rows."""
        stacked = runner.is_stacked(eqn.outvars[0])
        each = [*zip(*runner.on_host(eqn.invars, values), strict=True)][: None if stacked else 1]
        if eqn.primitive is split_ids_p:
            made = split_ids(eqn, each)
        else:
            made = prefetched(self.plan, eqn, [ids for (ids,) in each], servers)
        stack = jnp.stack if any(map(is_traced, made)) else np.stack
        return _put(stack(made), self._split) if stacked else _put(made[0], self._replicated)

    def _look(self, sent: Sequence[tuple[str, Any, bool]]) -> None:
        """Look at the gradients of all trainers, before a server has them. Raises
        NonfiniteError."""
        if not sent:
            return
        blocks = {b.gradient(0, self.trainers): b.name for b in self.plan.placement.table}
        fine = jax.device_get(_finite([x for _, x, _ in sent], tuple(own for *_, own in sent)))
        bad: dict[int | None, list[str]] = {}
        for (name, _, own), each in zip(sent, fine, strict=True):
            for k in np.flatnonzero(~each):
                bad.setdefault(int(k) if own else None, []).append(blocks.get(name, name))
        for trainer, names in bad.items():
            self.watch.hear(trainer, names)
        self.watch.check()

    def _update(
        self, servers: dict[str, dict[str, Any]], grads: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """One update of every server, level by level. `servers` is brought up to date in place."""
        runs = {ep: self._servers[ep].run(grads[ep], held) for ep, held in servers.items()}
        arrived: dict[str, Any] = dict.fromkeys(runs)
        at: dict[str, tuple[Exchange, Vectors]] = {}  # where each is, and what it has for others
        while arrived:
            for ep, vectors in arrived.items():
                try:
                    at[ep] = runs[ep].send(vectors)
                except StopIteration as done:
                    at.pop(ep, None)
                    servers[ep] = done.value
            level = min((exchange.level for exchange, _ in at.values()), default=None)
            arrived = {
                ep: jax.device_put(
                    {source: at[source][1][ep] for source in exchange.sources}, self._at[ep]
                )
                for ep, (exchange, _) in at.items()
                if exchange.level == level
            }

    def _to_trainers(self, x: jax.Array) -> jax.Array:
        """A block on every trainer device."""
        if self.mesh.size == 1:
            return _put(x, self._replicated)
        devices = list(self.mesh.devices.flat)
        copies = jax.device_put([x] * len(devices), devices)
        return jax.make_array_from_single_device_arrays(x.shape, self._replicated, copies)

    def _to_each(self, x: jax.Array) -> jax.Array:
        """A value of all trainers as one of each trainer."""
        return jax.device_put(jnp.broadcast_to(x, (self.trainers, *x.shape)), self._split)

    @cached_property
    def _servers(self) -> dict[str, _MeshServer]:
        updates = {ep: ServerUpdate.of(s.main) for ep, s in self.plan.servers.items()}
        how = {"donate": self.donate, "late": self.rows_are_late}
        return {ep: _MeshServer(u, self._at[ep], self.trainers, **how) for ep, u in updates.items()}


class _MeshServer:
    """The updates of a server on its device.

    Args:
      at: the device.
      trainers: how many there are.
      donate: as in `MeshJob`.
      late: as in `LateRowsJob`.
    """

    def __init__(
        self, update: ServerUpdate, at: Sharding, trainers: int, *, donate: bool, late: bool
    ) -> None:
        self._update, self._at, self._trainers, self._donate = update, at, trainers, donate
        # a state is a value: nothing beside it says which rows are behind
        is_whole = lambda t: t.whole or (t.moves and not late)
        self._tables = {
            n: dataclasses.replace(t, whole=is_whole(t)) for n, t in update.tables.items()
        }
        moving = [t for t in self._tables.values() if t.moves and not t.whole]
        self._missed = {t.name: MissedSteps(update, t, None) for t in moving}
        if self._missed:
            reads = frozenset(n for missed in self._missed.values() for n in missed.reads)
            self._update = dataclasses.replace(update, watched=reads)
        self._by_rows = RowUpdates(self._tables, taken_there, partial(put_there, donate=donate))
        self._compiled: dict[
            tuple[int, ...], CompiledUpdate
        ] = {}  # by how many rows of tables it is of

    def run(
        self, grads: Mapping[str, Any], state: Mapping[str, Any]
    ) -> Generator[tuple[Exchange, Vectors], Vectors, dict[str, Any]]:
        """Make a step, as `CompiledUpdate.run` does, of gradients of trainers or of servers'
        devices."""
        there = {
            n: x if isinstance(x, RowGradient) else _put(x, self._at) for n, x in grads.items()
        }
        if any(isinstance(x, RowGradient) and is_traced(x.rows) for x in there.values()):
            return self._traced(there, state)
        assert not self._missed, "rows that catch up late are traced"
        held = {n: _put(x, self._at) for n, x in state.items()} if self._update.tables else state
        return self._by_rows.run(self._sized, there, range(self._trainers), held)

    def _traced(
        self, grads: Mapping[str, Any], state: Mapping[str, Any]
    ) -> Generator[tuple[Exchange, Vectors], Vectors, dict[str, Any]]:
        """Make a step whose numbers of rows are not known: as `RowUpdates.run`, with room for all
        of them."""
        given = {n: x for n, x in grads.items() if not isinstance(x, RowGradient)}
        read, numbers = dict(state), dict[str, Any]()
        memory = {
            n: TracedMemory(t, self._missed.get(n), state)
            for n, t in self._tables.items()
            if not t.whole
        }
        for n, t in self._tables.items():
            at, each = gradients_with_room(t, {g: grads[g] for g in t.gradients.values()})
            given |= each
            if not t.whole:
                numbers[n] = at
                read |= memory[n].take(at, len(at))
        watched: dict[str, Any] = {}
        made = yield from self._sized({n: len(at) for n, at in numbers.items()}).run(
            given, read, watched
        )
        for n, at in numbers.items():
            made |= memory[n].put(at, made, watched)
        return made

    def _sized(self, sizes: Mapping[str, int]) -> CompiledUpdate:
        key = tuple(sizes.values())
        if key not in self._compiled:
            update = self._update.sized(sizes) if sizes else self._update
            prepare = partial(_unstacked, update.sent)
            self._compiled[key] = CompiledUpdate(update, donate=self._donate, prepare=prepare)
        return self._compiled[key]


@partial(jax.jit, static_argnums=1)
def _finite(xs: Sequence[Any], own: Sequence[bool]) -> list[jax.Array]:
    """Of each gradient whether it is finite, by trainers where each has its own."""
    return [
        jnp.atleast_1d(jnp.isfinite(x).all(tuple(range(k, x.ndim))))
        if jnp.issubdtype(x.dtype, jnp.inexact)
        else jnp.ones(1, bool)
        for x, k in zip(xs, map(int, own), strict=True)
    ]


def _shards(x: jax.Array) -> list[jax.Array]:
    """Return the parts of a stacked array, in the order of the trainers; of a step that is traced
    there is one."""
    if is_traced(x):
        return [x]
    return [s.data for s in sorted(x.addressable_shards, key=lambda s: s.index[0].start or 0)]


def _unstacked(sent: Sequence[Mapping[int, str]], grads: Mapping[str, Any]) -> dict[str, Any]:
    """Each trainer's gradients by name, from those of all under the name that trainer 0 sends them
    by.

    They are stacked shards, or one that all trainers share; of tables each trainer's own.
    """
    each: dict[str, Any] = {}
    for names in sent:
        if all(n in grads for n in names.values()):
            each |= {n: grads[n] for n in names.values()}
            continue
        x = grads[names[0]]
        parts = [row for shard in x for row in shard] if isinstance(x, list) else [x] * len(names)
        each |= {name: parts[k] for k, name in names.items()}
    return each


@realises(PServerPlan, "simulate")
def simulated(plan: PServerPlan) -> MeshJob:
    """Return the whole job on one device, which stands for all trainers and servers in turn."""
    return MeshJob(plan, jax.devices()[:1], donate=False, way="simulate")


class LateRowsJob(MeshJob):
    """A simulated job whose rows of tables catch up behind the update, as on servers in processes
    of their own.

    Its step is traced to be verified, and does not run: rows catch up at once.
    """

    rows_are_late = True

    def __init__(self, plan: PServerPlan) -> None:
        super().__init__(plan, jax.devices()[:1], donate=False, way="verify")


def _put(x: Any, where: Sharding) -> Any:
    """`jax.device_put`, without its cost where there is nothing to do."""
    if isinstance(x, list):
        return jax.device_put(x, where)
    if is_traced(x):
        return x
    return x if isinstance(x, jax.Array) and x.sharding == where else jax.device_put(x, where)


def _joined(rows: Sequence[VarDistributed], servers: Mapping[str, Mapping[str, Any]]) -> Any:
    """A value from what servers hold of it."""
    parts = [servers[row.endpoint][row.slice_name] for row in rows]
    if not rows[0].is_slice:
        return parts[-1]
    whole = np.empty(rows[0].origin_shape, parts[0].dtype)
    for row, part in zip(rows, parts, strict=True):
        whole[row.index] = part
    return jnp.asarray(whole)
