"""nccl2 mode as processes: each trainer is one process of a `jax.distributed` job, with one device.

    connect()            the trainers meet (`dtrans.run.meeting`), and JAX connects them
    ClusterTrainers      a plan over the job; made by `plan.on_cluster()`
    ClusterFabric        the programs of the job, one by one; `Executor` has it

Every process runs the same compiled program, and XLA carries out the reductions: with Gloo on CPUs, with NCCL on GPUs.
A trainer's part of the batch is its piece of an array that all of them hold together; what it gets back, parameters
and results, are arrays of its own device. The first state is trainer 0's, whatever the others made.

What fails, and what the others see:

    a trainer does not come     DeadlineError at `connect`, which names it
    a trainer raises            its process ends at once, without JAX's waiting for all at exit; the others get a
                                PeerError, or what is said next, when they next reduce or within the heartbeat
    a trainer is killed         the same. JAX ends processes that cannot raise with SIGABRT, after some lines of C++ log
                                (Terminating process because the JAX distributed service detected fatal errors);
                                `dtrans launch` names the trainer that was killed
    a trainer is too slow       nothing, while it is alive; at the end of the job all wait for it, up to the deadline

All trainers must reduce the same things in the same order. That they mean to is checked whenever a step is compiled,
which is at the same time on all that are given parts of the same shapes in the same order. A trainer that alone returns
to a shape of before is not found out: it and the others wait for one another, or average unequal parts.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import hashlib
import math
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from dtrans._jax import JaxprEqn, backends_started
from dtrans.collective import CollectivePlan
from dtrans.errors import BatchError, ConfigError, PeerError, StateError
from dtrans.ops import all_gather_p, all_reduce_p, broadcast_p, reduce_scatter_p, trainer_index_p
from dtrans.program import Program, is_communication
from dtrans.run.batch import batch_arrays
from dtrans.run.collective import CollectiveState, MeshTrainers, per_trainer
from dtrans.run.endpoints.fabric import DEADLINE
from dtrans.run.meeting import meet
from dtrans.run.roles import Role


HEARTBEAT = 20  # seconds of silence after which JAX takes a process for dead; less when the deadline is
OVER_AXES = (all_reduce_p, reduce_scatter_p, all_gather_p, trainer_index_p)


# -- connecting ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The job that this process is connected to.

    Attributes:
      trainer_id: which trainer this process is.
      trainers: how many there are.
      endpoints: of the trainers; empty if JAX found them by itself.
    """

    trainer_id: int
    trainers: int
    endpoints: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"trainer {self.trainer_id}"


_cluster: Cluster | None = None


def connect(role: Role | None = None, *, deadline: float = DEADLINE, allow_remote: bool = False) -> Cluster:
    """Connect the trainers of an nccl2 job. Call it before anything that makes JAX look for its devices.

    Who this process is comes from the environment, as `dtrans launch --mode nccl2` sets it (see `Role`); without that,
    from JAX's own detection: Slurm, Open MPI, Kubernetes, TPU. Trainer 0's endpoint becomes the coordinator of
    `jax.distributed`. A second call changes nothing.

    Args:
      role: who this process is; from the environment by default.
      deadline: seconds to wait for the other trainers, here and at the end of the job. A process that is silent for as
        long, or for 20 seconds if that is less, is taken for dead.
      allow_remote: let endpoints be on other machines. Nothing is encrypted or authenticated: only on a network where
        everybody may train with everybody.

    Raises:
      ConfigError: JAX was used already, nothing says who this process is, or its endpoint cannot be bound.
      DeadlineError: trainers did not come in time; the message names them.
      PeerError: another trainer was told other endpoints.
    """
    global _cluster
    if not deadline > 0:
        raise ConfigError(f"deadline must be a positive number of seconds, it is {deadline!r}")
    if role is None and _is_told():
        role = Role.from_env()
    if role is not None and not role.trainer_endpoints:
        raise ConfigError(f"this is {role.name} of a job with pservers; dtrans.connect() is for mode='nccl2'")
    if _cluster is None:
        if jax.distributed.is_initialized():  # by the user
            _cluster = Cluster(jax.process_index(), jax.process_count())
        else:
            _connect(role, deadline, allow_remote)
            _cluster = Cluster(jax.process_index(), jax.process_count(), role.trainer_endpoints if role else ())
            atexit.register(_leave)
        _first_word(_cluster)
    if role is not None:
        _check_same(role, _cluster)
    return _cluster


def connected() -> Cluster:
    """The job that this process is connected to. Raises ConfigError when there is none."""
    if _cluster is None and jax.distributed.is_initialized():
        return connect()
    if _cluster is None:
        raise ConfigError("this process is not connected to other trainers: call dtrans.connect() first")
    return _cluster


def _is_told() -> bool:
    return "DTRANS_ROLE" in os.environ or "DTRANS_TRAINER_ENDPOINTS" in os.environ


def _check_same(role: Role, cluster: Cluster) -> None:
    found = (role.trainer_id, role.trainers)
    if found != (cluster.trainer_id, cluster.trainers) or cluster.endpoints not in ((), role.trainer_endpoints):
        listed = f" ({','.join(cluster.endpoints)})" if cluster.endpoints else ""
        raise ConfigError(
            f"this process is connected as {cluster.name} of {cluster.trainers}{listed}, and cannot be {role.name} of "
            f"{role.trainers} ({','.join(role.trainer_endpoints)})"
        )


def _connect(role: Role | None, deadline: float, allow_remote: bool) -> None:
    config: Any = jax.config
    if backends_started():
        raise ConfigError(
            "JAX was used already, and its devices cannot be connected any more: call dtrans.connect() before anything "
            "that makes an array or asks for devices, jax.random.key for instance"
        )
    if config.jax_cpu_collectives_implementation in (None, "none"):
        raise ConfigError("jax_cpu_collectives_implementation is 'none': trainers need 'gloo', or 'mpi'")
    seconds = math.ceil(deadline)
    options: dict[str, Any] = {
        "initialization_timeout": seconds,
        "heartbeat_timeout_seconds": min(seconds, HEARTBEAT),
        "shutdown_timeout_seconds": seconds,
    }
    if role is None:
        try:
            jax.distributed.initialize(**options)
        except ValueError as e:
            raise ConfigError(
                "nothing says which trainer this process is: start it with `dtrans launch --mode nccl2`, set "
                f"DTRANS_ROLE and its companions, or start it under Slurm, Open MPI or Kubernetes (JAX says: {e})"
            ) from e
        return
    meet(role.trainer_id, role.trainer_endpoints, deadline=deadline, allow_remote=allow_remote)
    first = role.trainer_endpoints[0]
    if "JAX_COORDINATOR_BIND_ADDRESS" not in os.environ:
        options["coordinator_bind_address"] = first  # JAX's default is every address of this machine
    jax.distributed.initialize(first, role.trainers, role.trainer_id, cluster_detection_method="deactivate", **options)


def _first_word(cluster: Cluster) -> None:
    """Reduce something while all trainers are known to be here.

    The first reduction opens the connections, and Gloo gives the slowest trainer 30 seconds to join it; later ones wait
    for as long as it is alive.
    """
    found = _sums(np.ones((1,), np.int32))
    assert found.tolist() == [cluster.trainers], found


def _leave() -> None:
    """At exit: a trainer that failed goes at once.

    JAX would wait here until all trainers have come to their end, while the others wait for this one's gradients.
    """
    if getattr(sys, "last_value", None) is not None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)


# -- arrays that all trainers hold together --------------------------------------------------------


def trainer_devices() -> list[jax.Device]:
    """One device for each trainer, in their order.

    Raises:
      ConfigError: a process has several.
    """
    if jax.local_device_count() != 1:
        raise ConfigError(
            f"a trainer has one device, this process sees {jax.local_device_count()}: start one process for each, and "
            "show it its own (JAX_LOCAL_DEVICE_IDS, CUDA_VISIBLE_DEVICES; on CPUs leave jax_num_cpu_devices at 1)"
        )
    return sorted(jax.devices(), key=lambda d: d.process_index)


def _together(x: Any, sharding: NamedSharding) -> jax.Array:
    """This trainer's array as its piece of one of all: the whole if it is replicated, else a run of rows."""
    if isinstance(x, jax.Array) and x.sharding == sharding:
        return x
    piece = jax.device_put(x, jax.local_devices()[0])
    shape = piece.shape
    if sharding.spec:
        shape = (shape[0] * sharding.mesh.size, *shape[1:])
    return jax.make_array_from_single_device_arrays(shape, sharding, [piece])


def _own(x: jax.Array) -> jax.Array:
    """This trainer's piece."""
    return x.addressable_data(0)


def _sums(*xs: np.ndarray) -> Any:
    """The sums over all trainers, on the host; of one array, or a list of them."""
    mesh = Mesh(np.array(trainer_devices()), ("trainers",))
    everywhere = NamedSharding(mesh, P())
    # each trainer's own value in the place of one that is the same on all: only the reduction looks at it
    added = jax.shard_map(
        lambda xs: jax.lax.psum(xs, "trainers"), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    with _peers():
        made = jax.jit(added)([_together(x, everywhere) for x in xs])
        found = [np.asarray(_own(x)) for x in made]
    return found[0] if len(found) == 1 else found


def shared(xs: Sequence[Any], root: int = 0) -> list[jax.Array]:
    """What trainer `root` has, on all trainers, bit for bit."""
    mine = jax.process_index() == root
    raw = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in xs]
    host = [np.asarray(x) for x in raw]
    # as bytes, which every backend can add: all others add zeros
    sent = [np.frombuffer(x.tobytes(), np.uint8) if mine else np.zeros(x.nbytes, np.uint8) for x in host]
    kept = [i for i, b in enumerate(sent) if b.size]
    sums = _sums(*(sent[i] for i in kept)) if kept else []
    bytes_of = dict(zip(kept, [sums] if len(kept) == 1 else sums, strict=True))
    made: list[jax.Array] = []
    for i, (x, h) in enumerate(zip(xs, host, strict=True)):
        array = np.frombuffer(bytes_of[i].tobytes(), h.dtype).reshape(h.shape) if i in bytes_of else h
        put = jax.device_put(array, jax.local_devices()[0])
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        made.append(jax.random.wrap_key_data(put, impl=jax.random.key_impl(x)) if is_key else put)
    return made


def agree(program: Program, split: Collection[str]) -> None:
    """Check that all trainers are about to run the same program on parts of one size.

    Args:
      split: the names of what trainers have parts of.

    Raises:
      PeerError, BatchError: they are not; the message says who differs from trainer 0.
    """
    inner = program.jaxpr.jaxpr
    moved = [f"{e.primitive} {[a.aval.str_short() for a in e.invars]}" for e in inner.eqns if is_communication(e)]
    held = [f"{n} {program.inputs[n].str_short()}" for spec in program.args[:2] for n in spec.names]
    first = next(iter(split), "the batch")
    rows = program.inputs[first].shape[0] if split else 0
    me, count = jax.process_index(), jax.process_count()
    # held first: a trainer with other rows moves other things too, where results are of the batch's size
    mine = np.stack([_digest("\n".join(held)), np.full(8, rows, np.uint32), _digest("\n".join(moved))])
    table = np.zeros((count, *mine.shape), np.uint32)
    table[me] = mine
    table = _sums(table)
    for i in range(len(mine)):
        others = [k for k in range(count) if (table[k, i] != table[0, i]).any()]
        if others and i == 1:
            listed = ", ".join(f"trainer {k} gives {table[k, 1, 0]}" for k in range(count))
            raise BatchError(f"trainers must give parts of one size; of {first} {listed} rows")
        if others:
            who = " and ".join(f"trainer {k}" for k in others)
            what = "parameters or an optimizer state of other shapes" if i == 0 else "another step, or other options"
            raise PeerError(f"{who} disagrees with trainer 0 about what is being trained: it has {what}")


def _digest(text: str) -> np.ndarray:
    return np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint32)


def is_by_peer(text: str) -> bool:
    """Whether an error of JAX, or the last line of its log, is what the end of another process looks like."""
    return "Gloo" in text or "NCCL" in text or "distributed service detected fatal errors" in text


@contextlib.contextmanager
def _peers() -> Iterator[None]:
    """Errors of JAX that another trainer's end causes, as such."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as e:  # it raises either
        if not is_by_peer(str(e)):
            raise
        raise PeerError(
            f"trainer {jax.process_index()} lost the other trainers in the middle of a reduction: one of them has "
            f"ended ({str(e).splitlines()[0]})"
        ) from e


# -- a plan ----------------------------------------------------------------------------------------


class ClusterTrainers(MeshTrainers):
    """Trainers that are processes; made by `plan.on_cluster()`, in each of them.

    As `plan.on_mesh()`, but for the batch: each process gives its own part to `step`. Parts are of one size; trainer k
    has rows k*B/N to (k+1)*B/N of the global batch. 0-d arrays, and those that the plan has as replicated, must be the
    same on every trainer. Parameters, state and results come whole, as arrays of this process's device.
    """

    def __init__(self, plan: CollectivePlan, *, donate: bool = True) -> None:
        self.cluster = connected()
        if self.cluster.trainers != plan.trainers:
            raise ConfigError(f"the plan is for {plan.trainers} trainers, {self.cluster.trainers} are connected")
        super().__init__(plan, trainer_devices(), donate=donate)

    def step(self, state: CollectiveState, *batch: Any) -> tuple[Any, ...]:
        """One step on this trainer's part of the batch: (state, loss[, aux]), merged over all trainers.

        Raises:
          BatchError: arrays of the batch that differ in their number of rows, or parts of trainers that do.
          StateError: not a state of this job, or one that was already stepped from, and was donated.
          PeerError: another trainer has ended, or trains something else.
        """
        with _peers():
            state, *results = super().step(state, *batch)
        return (state, *jax.tree.map(_own_of, results))

    def params(self, state: CollectiveState) -> Any:
        """The parameters, as the pytree that they were given in."""
        return jax.tree.map(_own_of, super().params(state))

    def opt_state(self, state: CollectiveState) -> Any:
        """The optimizer's state, as the pytree that it was given in."""
        return jax.tree.map(_own_of, super().opt_state(state))

    def _start(self, startup: Program, args: list[Any]) -> list[Any]:
        return [_together(x, self._everywhere) for x in shared(startup.compiled(*args))]

    def _arrays(self, batch: Sequence[Any]) -> list[Any]:
        parts = batch_arrays(self._specs, batch)
        return [_together(x, where) for x, where in zip(parts, self._places, strict=True)]

    def _check(self, state: CollectiveState, arrays: list[Any]) -> None:
        super()._check(state, arrays)
        program = self._program(state, arrays)
        agree(program, self._split)

    def _mapped(self, program: Program) -> Callable[[list[Any], Sequence[Any]], Sequence[Any]]:
        axes, count = self.plan.axis_names, len(program.in_names) - len(self._shares)
        ways = [self._way(n) for n in program.out_names]
        one = per_trainer(program)

        def trainer(held: Sequence[Any], batch: Sequence[Any]) -> list[Any]:
            outs = one(*held, *batch)
            return [
                x if way == "same" else jax.lax.all_gather(x, axes, tiled=way == "concat")
                for x, way in zip(outs, ways, strict=True)
            ]

        specs = ([P()] * count, [P(axes) if s == "split" else P() for s in self._shares])
        # check_vma: see MeshTrainers
        return jax.shard_map(trainer, mesh=self.mesh, in_specs=specs, out_specs=P(), check_vma=False)


def _own_of(x: Any) -> Any:
    return _own(x) if isinstance(x, jax.Array) else x


# -- programs one by one ---------------------------------------------------------------------------


class ClusterFabric:
    """What one process needs to run the programs of an nccl2 job; arguments are those of `Executor`."""

    def __init__(self, *, deadline: float, allow_remote: bool) -> None:
        self._deadline = deadline
        self._allow_remote = allow_remote
        self._compiled: dict[Program, tuple[Callable[..., Any], list[NamedSharding]]] = {}

    def carry_out(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        """The outputs of one equation of a startup program."""
        if eqn.primitive is broadcast_p:
            return shared(values[1:], eqn.params["root"])
        endpoints, k = eqn.params["endpoints"], eqn.params["trainer_id"]
        role = Role("trainer", len(endpoints), (), k, endpoints[k], endpoints)
        connect(role, deadline=self._deadline, allow_remote=self._allow_remote)
        return [None]

    def run(self, program: Program, flat: Sequence[Any]) -> list[Any]:
        """The outputs of a trainer's program: results as far as they are reduced, else this trainer's own part."""
        if program not in self._compiled:
            self._compiled[program] = self._compile(program)
        compiled, places = self._compiled[program]
        with _peers():
            made = compiled(*map(_together, flat, places))
        return [_own(x) for x in made]

    def _compile(self, program: Program) -> tuple[Callable[..., Any], list[NamedSharding]]:
        axes = axes_of(program, connected().trainers)
        mesh = Mesh(np.array(trainer_devices()).reshape([*axes.values()]), tuple(axes))
        held = {n for spec in program.args[:2] for n in spec.names}
        batch = [n for n, t in program.inputs.items() if n not in held and t.ndim]
        agree(program, batch)
        specs = [P(tuple(axes)) if n in batch else P() for n in program.in_names]
        # every output is in the place of one that is the same on all: a trainer reads its own
        one = per_trainer(program)
        mapped = jax.shard_map(lambda *xs: one(*xs), mesh=mesh, in_specs=tuple(specs), out_specs=P(), check_vma=False)
        return jax.jit(mapped), [NamedSharding(mesh, s) for s in specs]


def axes_of(program: Program, trainers: int) -> dict[str, int]:
    """The axes that a program's trainers are on, with their sizes.

    Raises:
      StateError: it is for another number of trainers.
    """
    eqns = [e for e in program.jaxpr.jaxpr.eqns if e.primitive in OVER_AXES]
    names = max((tuple(e.params["over"]) for e in eqns), key=len)
    known = {e.params["over"][0]: e.params["size"] for e in eqns if "size" in e.params}
    free = [n for n in names if n not in known]
    rest, odd = divmod(trainers, math.prod(known.values()))
    if odd or len(free) != 1:
        raise StateError(f"program {program.name} does not fit {trainers} trainers")
    return {n: known.get(n, rest) for n in names}


def is_of_cluster(program: Program) -> bool:
    """Whether a program reduces over trainers, and so is compiled as a whole."""
    return any(e.primitive in OVER_AXES for e in program.jaxpr.jaxpr.eqns)
