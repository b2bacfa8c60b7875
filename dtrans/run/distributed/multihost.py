"""Arrays and checks that span all trainers of a job without parameter servers (mode "nccl2").

Each trainer is a process. It passes its part of the batch, and the parts form one global
`jax.Array`. Parameters and results that a trainer reads are arrays on its first device. The module
also has sums and broadcasts over all trainers.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from dtrans._jax import bulletin_board
from dtrans.errors import BatchError, ConfigError, DeadlineError, PeerError
from dtrans.ir import fingerprint
from dtrans.ir.program import Program
from dtrans.ir.selection import values_at
from dtrans.run.distributed.board import read
from dtrans.run.distributed.membership import current
from dtrans.run.distributed.watch import KNOWN, Watch, is_by_peer, watch


OTHER_STATE = "parameters or an optimizer state of different shapes"
PARTS_DIFFER = "trainers must pass parts of equal size"


def trainer_devices() -> list[jax.Device]:
    """Return the devices of all trainers, ordered by process.

    Raises:
      ConfigError: processes have different numbers of devices.
    """
    members = current().members
    devices = sorted(
        (d for d in jax.devices() if d.process_index in members),
        key=lambda d: (d.process_index, d.id),
    )
    counts = dict.fromkeys(members, 0)
    for d in devices:
        counts[d.process_index] += 1
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"trainer {k} has {n}" for k, n in counts.items())
        raise ConfigError(f"all processes must have the same number of devices: {listed}")
    return devices


def to_global_array(x: Any, sharding: NamedSharding) -> jax.Array:
    """Combine the arrays of all processes into one global `jax.Array`.

    Every process calls this function with its own part. For example, 2 processes with 4 rows each
    get a global array of 8 rows.

    Args:
      x: this process's array: the full value for a replicated sharding, else its rows.
      sharding: the sharding of the global array. Along each dimension, the devices of this process
        have adjacent parts.
    """
    if isinstance(x, jax.Array) and x.sharding == sharding:
        return x
    mesh, shape = sharding.mesh, list(x.shape)
    places = np.argwhere([d.process_index == jax.process_index() for d in mesh.devices.flat])
    places = np.stack(np.unravel_index(places[:, 0], mesh.devices.shape), axis=1)
    indices: list[list[slice]] = [[] for _ in places]  # for each device, its index into `x`
    for dim, names in enumerate(sharding.spec):
        along = () if names is None else (names,) if isinstance(names, str) else names
        sizes = [mesh.shape[n] for n in along]
        # for each device, the number of its part along this dimension
        parts = np.zeros(len(places), int)
        for n, size in zip(along, sizes, strict=True):
            parts = parts * size + places[:, mesh.axis_names.index(n)]
        here = parts.max() - parts.min() + 1
        assert x.shape[dim] % here == 0, (x.shape, dim, here)
        length = x.shape[dim] // here
        shape[dim] = length * math.prod(sizes)
        for index, part in zip(indices, parts - parts.min(), strict=True):
            index.append(slice(part * length, (part + 1) * length))
    pieces = []
    for place, index in zip(places, indices, strict=True):
        is_full = all(i.stop - i.start == n for i, n in zip(index, x.shape, strict=False))
        pieces.append(jax.device_put(x if is_full else x[tuple(index)], mesh.devices[tuple(place)]))
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, pieces)


def local_shard(x: jax.Array) -> jax.Array:
    """Return the shard of a global array on this process's first device."""
    return x.addressable_data(0)


def all_reduce_sum(*xs: np.ndarray) -> list[np.ndarray]:
    """Sum arrays over all processes, and return the sums on the host."""
    first = {d.process_index: d for d in reversed(trainer_devices())}
    mesh = Mesh(np.array(values_at(first, sorted(first))), ("trainers",))
    replicated = NamedSharding(mesh, P())
    # The operands are declared replicated although their values differ between processes. This is
    # safe because only `psum` reads them, which adds the values of all devices.
    added = jax.shard_map(
        lambda xs: jax.lax.psum(xs, "trainers"),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    with peers():
        sums = jax.jit(added)([to_global_array(x, replicated) for x in xs])
        return [np.asarray(local_shard(x)) for x in sums]


def broadcast(xs: Sequence[Any], root: int = 0) -> list[jax.Array]:
    """Return the arrays of trainer `root` on all trainers, with the same bits.

    Args:
      xs: this trainer's arrays. On trainers other than `root` only shapes and types are read.
      root: the trainer whose values are sent.

    Raises:
      PeerError: trainers have arrays of different shapes or types.
    """
    digest = _digest([f"{x.shape} {x.dtype}" for x in xs])
    _check_equal(_all_gather_words([digest]), 0, OTHER_STATE)

    is_root = jax.process_index() == root
    is_key = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in xs]
    host: list[np.ndarray] = []
    for x, key in zip(xs, is_key, strict=True):
        if key:
            x = jax.random.key_data(x)
        host.append(np.asarray(x))

    # The broadcast is a sum of the root's bytes and the other processes' zeros. Bytes are summed
    # because every backend can add them, and because a sum of floats would turn -0.0 into 0.0.
    sent: dict[int, np.ndarray] = {}
    for i, x in enumerate(host):
        if x.nbytes:
            bytes_of_x = np.frombuffer(x.tobytes(), np.uint8)
            sent[i] = bytes_of_x if is_root else np.zeros_like(bytes_of_x)
    received: dict[int, np.ndarray] = {}
    if sent:
        received = dict(zip(sent, all_reduce_sum(*sent.values()), strict=True))

    arrays: list[jax.Array] = []
    for i, x in enumerate(host):
        if i in received:
            x = np.frombuffer(received[i].tobytes(), x.dtype).reshape(x.shape)
        array = jax.device_put(x, jax.local_devices()[0])
        if is_key[i]:
            array = jax.random.wrap_key_data(array, impl=jax.random.key_impl(xs[i]))
        arrays.append(array)
    return arrays


def check_consistent(
    program: Program,
    split: Collection[str],
    merges: Mapping[str, str] | None = None,
    *,
    rows: int | None = None,
) -> None:
    """Check that all trainers are about to run the same program on the same number of rows.

    Trainers call this before the first step with a new program or batch shape. They compare digests
    through JAX's coordinator. Without this check, a reduction would wait forever for a trainer that
    runs a different program.

    Args:
      program: the program of this trainer.
      split: names of the arrays that are split over the trainers.
      merges: the merge rule of each result, by name.
      rows: number of rows of this trainer's part. By default it is the number with which the
        program was traced.

    Raises:
      PeerError: a trainer has a different program, or has ended; the message names it.
      BatchError: parts have different sizes.
      DeadlineError: a trainer did not start the step in time.
    """
    state = []
    for spec in program.args[:2]:
        state += [f"{n} {program.inputs[n].str_short()}" for n in spec.names]
    first = next(iter(split), "the batch")
    if rows is None:
        rows = program.inputs[first].shape[0] if split else 0
    options = fingerprint.digest(fingerprint.canonical_text(merges or {}))
    parts = {**fingerprint.environment(), **program.fingerprints, "options": options}
    digests = [text.rpartition(" ")[2] for text in parts.values()]
    words = _all_gather_words([_digest(state), str(rows), *digests])

    # State and rows are compared first, because a difference in them also makes the programs
    # differ, and the error should name the cause.
    _check_equal(words, 0, OTHER_STATE)
    counts = {k: theirs[1] for k, theirs in words.items()}
    if len({*counts.values()}) > 1:
        listed = ", ".join(f"trainer {k} gives {n}" for k, n in counts.items())
        raise BatchError(
            f"{PARTS_DIFFER}; rows of {first}: {listed}; split the batch by job.shard_batch(*batch)"
        )
    for i, part in enumerate(parts, 2):
        _check_equal(words, i, f"a different step or options: part '{part}' differs")


def _check_equal(words: Mapping[int, Sequence[str]], i: int, difference: str) -> None:
    """Raise PeerError if word `i` of a trainer differs from trainer 0's.

    Args:
      words: the words of each trainer.
      i: the index of the word.
      difference: the words after "it has" or "they have" in the error.
    """
    others = [k for k, theirs in words.items() if theirs[i] != words[0][i]]
    if others:
        raise disagreement(others, "what is being trained", difference)


def disagreement(trainers: Iterable[int], subject: str, difference: str) -> PeerError:
    """Return the error for trainers that differ from trainer 0.

    Args:
      trainers: ids of the trainers that differ.
      subject: the words after "about" in the error.
      difference: the words after "it has" or "they have" in the error.
    """
    names = [f"trainer {k}" for k in trainers]
    verb, has = ("disagrees", "it has") if len(names) == 1 else ("disagree", "they have")
    return PeerError(
        f"{' and '.join(names)} {verb} with trainer 0 about {subject}: {has} {difference}"
    )


# number of calls of `_all_gather_words`, by the ids of the trainers
_rounds: dict[tuple[int, ...], int] = {}


def _all_gather_words(words: Sequence[str]) -> dict[int, list[str]]:
    """Exchange a list of words between all trainers; return the words of each trainer, by its id.

    Every trainer must make the same calls in the same order: the n-th calls of all trainers belong
    together.

    Raises:
      DeadlineError: a trainer did not write its words in time.
      PeerError: a trainer has ended.
    """
    cluster, board = current(), bulletin_board()
    me, among = cluster.trainer_id, cluster.members
    now = _rounds.get(among, 0)
    topic = f"dtrans/agree/{'-'.join(map(str, among))}"
    # the key exists already if an earlier attempt at this round ended with DeadlineError
    board.key_value_set(f"{topic}/{now}/{me}", " ".join(words), allow_overwrite=True)
    limit = time.monotonic() + cluster.deadline
    found: dict[int, list[str]] = {}
    missing, watched = [], watch()
    for k in among:
        check: Callable[[], None] = lambda: None
        if watched:
            check = functools.partial(watched.check, k)
        theirs = read(f"{topic}/{now}/{k}", limit, check)
        if theirs is None:
            missing.append(f"trainer {k}")
        else:
            found[k] = theirs.split(" ")
    if missing:
        raise DeadlineError(
            f"{cluster.name} waited {cluster.deadline:g} s for {' and '.join(missing)} to start "
            "the same step: either they are at another step, or only this trainer's batch has a "
            "new shape; split each batch by job.shard_batch(*batch)"
        )
    # All trainers have written round now - 1, so they have read round now - 2, and no trainer needs
    # its key any more.
    if now > 1:
        board.key_value_delete(f"{topic}/{now - 2}/{me}")
    _rounds[among] = now + 1
    return found


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@contextlib.contextmanager
def peers() -> Iterator[None]:
    """Convert errors of JAX in a `with` block to PeerError, if another trainer's end caused them.

    Code that runs a collective uses this context manager. JAX's errors do not name the lost
    trainer, but a PeerError does.
    """
    watched = watch()
    operation: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if watched is not None:
        operation = watched.operation()
    with operation:
        try:
            yield
        except (jax.errors.JaxRuntimeError, ValueError) as e:  # JAX raises both types
            if not is_by_peer(str(e)):
                raise
            raise _peer_error(e, watched) from e


def _peer_error(error: Exception, watched: Watch | None) -> PeerError:
    """Return the PeerError for an error of JAX, which does not name the trainer that has ended."""
    me, reason = f"trainer {jax.process_index()}", str(error).splitlines()[0]
    if "Timed out" in str(error):
        return PeerError(
            f"{me} waited too long for the other trainers in the middle of a reduction ({reason})"
        )
    others = [f"trainer {k}" for k in current().members if k != jax.process_index()]
    who = f"one of {', '.join(others)}"
    if len(others) == 1:
        (who,) = others
    how = "it has ended"
    # trainer 0 tells the watch which trainer has ended, possibly a moment after JAX's error
    if watched is not None and (failure := watched.failure(wait=KNOWN)):
        who = " and ".join(f"trainer {k}" for k in watched.members.failed()) or who
        how = failure
    return PeerError(f"{me} lost {who} in the middle of a reduction: {how} ({reason})")
