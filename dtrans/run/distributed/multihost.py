"""What trainers that are processes hold together: arrays, sums, and an agreement on what they run.

A trainer's part of the batch is its piece of an array that all of them hold together; what it gets
back, parameters and results, are arrays of its own device.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from dtrans._jax import bulletin_board
from dtrans.errors import BatchError, ConfigError, DeadlineError, PeerError
from dtrans.ir import fingerprint
from dtrans.ir.program import Program
from dtrans.run.distributed.board import read
from dtrans.run.distributed.membership import current
from dtrans.run.distributed.watch import KNOWN, is_by_peer, watch


OTHER_STATE = "parameters or an optimizer state of other shapes"
PARTS_DIFFER = "trainers must give parts of one size"


def trainer_devices() -> list[jax.Device]:
    """The devices of all trainers, in their order: process by process.

    Raises:
      ConfigError: processes have different numbers of them.
    """
    members = current().members
    devices = sorted(
        (d for d in jax.devices() if d.process_index in members),
        key=lambda d: (d.process_index, d.id),
    )
    counts = {k: sum(d.process_index == k for d in devices) for k in members}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"trainer {k} has {n}" for k, n in counts.items())
        raise ConfigError(f"all processes must have the same number of devices: {listed}")
    return devices


def to_global_array(x: Any, sharding: NamedSharding) -> jax.Array:
    """This process's array as its piece of one of all: the whole if it is replicated, else a run of
    a dimension."""
    if isinstance(x, jax.Array) and x.sharding == sharding:
        return x
    here = [d for d in sharding.mesh.devices.flat if d.process_index == jax.process_index()]
    if not sharding.spec:
        return jax.make_array_from_single_device_arrays(
            x.shape, sharding, [jax.device_put(x, d) for d in here]
        )
    axis = len(sharding.spec) - 1
    rows, before = x.shape[axis] // len(here), (slice(None),) * axis
    own = lambda i: x[(*before, slice(i * rows, (i + 1) * rows))] if len(here) > 1 else x
    pieces = [jax.device_put(own(i), d) for i, d in enumerate(here)]
    shape = (*x.shape[:axis], rows * sharding.mesh.size, *x.shape[axis + 1 :])
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)


def local_shard(x: jax.Array) -> jax.Array:
    """This process's piece, or the first of them."""
    return x.addressable_data(0)


def all_reduce_sum(*xs: np.ndarray) -> list[np.ndarray]:
    """The sums of arrays over all processes, on the host."""
    first = {d.process_index: d for d in reversed(trainer_devices())}
    mesh = Mesh(np.array([first[k] for k in sorted(first)]), ("trainers",))
    everywhere = NamedSharding(mesh, P())
    # each process's own value in the place of one that is the same on all: only the reduction looks
    # at it
    added = jax.shard_map(
        lambda xs: jax.lax.psum(xs, "trainers"),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    with peers():
        made = jax.jit(added)([to_global_array(x, everywhere) for x in xs])
        return [np.asarray(local_shard(x)) for x in made]


def broadcast(xs: Sequence[Any], root: int = 0) -> list[jax.Array]:
    """What trainer `root` has, on all trainers, bit for bit.

    Raises:
      PeerError: they have arrays of other types.
    """
    _refuse(_told([_digest([f"{x.shape} {x.dtype}" for x in xs])]), 0, OTHER_STATE)
    mine = jax.process_index() == root
    raw = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in xs
    ]
    host = [np.asarray(x) for x in raw]
    # as bytes, which every backend can add: all others add zeros
    sent = [
        np.frombuffer(x.tobytes(), np.uint8) if mine else np.zeros(x.nbytes, np.uint8) for x in host
    ]
    kept = [i for i, b in enumerate(sent) if b.size]
    bytes_of = dict(
        zip(kept, all_reduce_sum(*(sent[i] for i in kept)) if kept else [], strict=True)
    )
    made: list[jax.Array] = []
    for i, (x, h) in enumerate(zip(xs, host, strict=True)):
        array = (
            np.frombuffer(bytes_of[i].tobytes(), h.dtype).reshape(h.shape) if i in bytes_of else h
        )
        put = jax.device_put(array, jax.local_devices()[0])
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        made.append(jax.random.wrap_key_data(put, impl=jax.random.key_impl(x)) if is_key else put)
    return made


def check_consistent(
    program: Program,
    split: Collection[str],
    merges: Mapping[str, str] | None = None,
    *,
    rows: int | None = None,
) -> None:
    """Check that all trainers are about to run the same program on parts of one size.

    Each says what it is about to run, where all can read it; this is not a reduction, so that a
    trainer that runs something else makes the others wait up to the deadline, and not for ever.

    Args:
      split: the names of what trainers have parts of.
      merges: what else is done to results, by name.
      rows: of this trainer's part, if not those that the program was traced with.

    Raises:
      PeerError, BatchError: they are not; the message says who differs from trainer 0.
      DeadlineError: a trainer did not say.
    """
    held = [f"{n} {program.inputs[n].str_short()}" for spec in program.args[:2] for n in spec.names]
    first = next(iter(split), "the batch")
    if rows is None:
        rows = program.inputs[first].shape[0] if split else 0
    options = fingerprint.digest(fingerprint.canonical_text(merges or {}))
    parts = {**fingerprint.environment(), **program.fingerprints, "options": options}
    said = _told([_digest(held), str(rows), *(text.rpartition(" ")[2] for text in parts.values())])
    # held first: a trainer with other parameters runs another program too, and so does one with
    # other rows
    _refuse(said, 0, OTHER_STATE)
    counts = {k: words[1] for k, words in said.items()}
    if len({*counts.values()}) > 1:
        listed = ", ".join(f"trainer {k} gives {n}" for k, n in counts.items())
        raise BatchError(
            f"{PARTS_DIFFER}; of {first} {listed} rows; take parts with job.shard_batch(*batch)"
        )
    for i, part in enumerate(parts, 2):
        _refuse(said, i, f"another step, or other options: part '{part}' differs")


def _refuse(said: Mapping[int, Sequence[str]], i: int, what: str) -> None:
    """Raise PeerError for trainers whose word `i` is not that of trainer 0: they have `what`."""
    others = [k for k, words in said.items() if words[i] != said[0][i]]
    if others:
        who = " and ".join(f"trainer {k}" for k in others)
        raise PeerError(
            f"{who} disagrees with trainer 0 about what is being trained: it has {what}"
        )


_rounds: dict[tuple[int, ...], int] = {}  # how often these trainers have agreed


def _told(words: Sequence[str]) -> dict[int, list[str]]:
    """What each trainer says, by its number. Raises DeadlineError where one says nothing, PeerError
    where it ended."""
    cluster, board = current(), bulletin_board()
    me, among = cluster.trainer_id, cluster.members
    now = _rounds.get(among, 0)
    place = lambda k, i: f"dtrans/agree/{'-'.join(map(str, among))}/{i}/{k}"
    # it may have waited in vain before
    board.key_value_set(place(me, now), " ".join(words), allow_overwrite=True)
    limit = time.monotonic() + cluster.deadline
    said: dict[int, list[str]] = {}
    missing, watched = [], watch()
    for k in among:
        word = read(place(k, now), limit, lambda k=k: watched.check(k) if watched else None)  # type: ignore[misc]
        if word is None:
            missing.append(f"trainer {k}")
        else:
            said[k] = word.split(" ")
    if missing:
        raise DeadlineError(
            f"{cluster.name} waited {cluster.deadline:g} s for {' and '.join(missing)} to start "
            "the same step: "
            "they are at another, or give parts of the shape of before"
        )
    if now > 1:  # all have read it, or they could not have written the last one
        board.key_value_delete(place(me, now - 2))
    _rounds[among] = now + 1
    return said


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@contextlib.contextmanager
def peers() -> Iterator[None]:
    """An operation of all trainers: errors of JAX that another trainer's end causes, as such."""
    watched = watch()
    with contextlib.nullcontext() if watched is None else watched.operation():
        try:
            yield
        except (jax.errors.JaxRuntimeError, ValueError) as e:  # it raises either
            if not is_by_peer(str(e)):
                raise
            me, why = f"trainer {jax.process_index()}", str(e).splitlines()[0]
            if "Timed out" in str(e):
                raise PeerError(
                    f"{me} waited too long for the other trainers in the middle of a reduction "
                    f"({why})"
                ) from e
            others = [f"trainer {k}" for k in current().members if k != jax.process_index()]
            who, how = (
                others[0] if len(others) == 1 else f"one of {', '.join(others)}",
                "it has ended",
            )
            if watched is not None and (found := watched.failure(wait=KNOWN)):
                who, how = (
                    " and ".join(f"trainer {k}" for k in watched.members.failed()) or who,
                    found,
                )
            raise PeerError(f"{me} lost {who} in the middle of a reduction: {how} ({why})") from e
