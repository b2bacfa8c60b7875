"""Messages of the protocol, and the frames that they travel in.

A message is a multipart of ZeroMQ: a msgpack map, then raw frames. Its `op` names the kind:

    trainer to server                                  server to trainer
    hello          trainer, trainers, session, order   welcome   step, local
                   [, sync_mode, plan, nonce,                    [, proof]
                   leaves]
    send           step, pieces + frames[, steps]      blocks    step, pieces + frames
    send_barrier   step                                waiting   reason
    recv           step[, blocks, changed]             refuse    reason[, last]
                                                       changed   step, table, count,
                                                                 pieces + frames
    exchange       step, round, values, pieces         exchanged step, round, values,
                   + frames                                      pieces + frames
    prefetch       step, table, count, train, pieces   rows      step, table, pieces + frames
                   + frames
                   [, ahead, request]                            [, ahead, last, count, request]
    row_ids        step, gradient, count, pieces
                   + frames
    save           step, name, made[, request]         saved     name, error[, request]
    saving         step
    tables         step[, request]                     report    tables[, request]
    changed_since  step, table, since[, request]       changes   table, now, count, gone,
                                                                 error, pieces + frames
                                                                 [, request]
    evict          step, table, unused_for[, request]  evicted   table, count, error[, request]
    complete                                           goodbye
    goodbye
    abort          reason

    observer to server, or to trainer 0 (collectives)  and back
    status         [request]                           status_report server, trainers[, request];
                                                       refuse

    server to server                                   and back
    peer           endpoint, order, layout             welcome, waiting, refuse
                   [, on_trainer_exit, plan, nonce,
                   sent, back]
    partials       step, level, pieces + frames        refuse

    trainer 0 to trainer (nccl2 mode)                  and back
    meet           trainer, endpoints[, nonce]         here[, proof]; refuse
    go
    abort          reason

    trainer to trainer 0 (collectives), and from there to all others
    here
    doing          trainer, operations, where[, steps]
    ended          trainer, operations, reason

    process to process (pipelines)
    value          process, step, key, dtype, shape, impl, pieces + frames

`plan` has the parts of the plan's fingerprint (`dtrans.ir.fingerprint`); a role with another plan
is refused. `proof` is derived from `nonce` and the job's token (`dtrans.protocol.token`), and
proves that the sender of a welcome has the token.

A trainer that has sent `complete` waits for the server's `goodbye`, and answers it with its own. A
server ends when it has received that answer, or when the trainer has not come back in time after
its connection broke. If the connection is made again before, `leaves` in the `hello` stands for the
`complete`, and the server sends `goodbye` once more.

A trainer ends a step with one message. Its field `then` lists the messages that follow,
`send_barrier` and `recv`, whose fields are in the same map. The step of that `recv` is the next
one.

`values` has [dtype, shape, way] for each value of a round. The names of their bytes are "0", "1"
and so on. The answer has [dtype, shape] (`dtrans.protocol.server.trainer_rounds`).

`prefetch` asks for rows of a block of a table: `count` increasing row ids, as 32-bit integers
under the name "ids". With `train` the gradient that follows in this step has the same rows, and no
row ids. An asynchronous trainer with a communicator merges gradients, whose rows differ:
`row_ids` sends their numbers first.

With `ahead` the rows are for a later step, that many steps from now, and so is the gradient. The
answer has `ahead`, the number of that step. Rows that have changed since follow, `count` of them,
with their places in the lookup under the name "at". The field `last` marks the last answer
(`dtrans.protocol.tables.rows_ahead`).

A trainer of GEO-SGD stores the rows that it has asked for. If `changed` in its `recv` is true, a
`changed` for each of the server's table blocks precedes the answer. It has the increasing 32-bit
numbers ("ids") and the values ("rows") of `count` rows. These are rows that the trainer stores, and
that others have changed since the last `changed`. If the field is false, the trainer stores no
rows, and no `changed` comes.

Between two steps a trainer may ask for the state of tables
(`dtrans.protocol.tables.stored_tables`). `changes` has the numbers of `count` changed rows in the
block under the name "ids", and of `gone` evicted ones under "gone", as 32-bit integers.

An answer repeats the `request` that it answers, a number that its trainer uses once. A trainer that
no longer waits drops the answer when it comes.

`saved` may come many steps after its `save`, since servers write in the background. A trainer that
waits for it sends `saving` to all servers whenever one of them is still writing, and so is not
late. In a `save`, `made` is the number of steps that the trainer has made: the same for all
servers. Several trainers may ask for one checkpoint after the same number of steps.

`pieces` has one list for each frame, of [name, offset, nbytes] in the order in which they lie in
the frame: nbytes of the block called name, from byte `offset` on. Blocks larger than
`MESSAGE_BYTES` travel as several messages, because ZeroMQ delivers a message when all of it is
here. Small blocks share a frame. The bytes are those of the array in C order and in this machine's
byte order. Both ends must be little-endian, which `hello` and `peer` state.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgpack
import numpy as np

from dtrans.errors import WireError


VERSION = 2
MESSAGE_BYTES = 4 << 20  # above a few MB, fresh allocations take most of the time
SMALL = 16 << 10  # blocks below this share a frame: a copy is cheaper than a frame
# bytes of a frame of any job; a role that knows the plan has a lower limit
MAX_MESSAGE = 16 << 20
HELLO = 512 << 10  # bytes of a header without rows: the fingerprint of a plan is the longest field
ROW = 256  # bytes of a header for one block, without its name

Piece = tuple[str, int, int]

# op to the fields it must have, with their types
FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "hello": {"trainer": int, "trainers": int, "session": str, "order": str},
    "send": {"step": int, "pieces": list},
    "send_barrier": {"step": int},
    "recv": {"step": int},
    "exchange": {"step": int, "round": int, "values": list, "pieces": list},
    "prefetch": {"step": int, "table": str, "count": int, "train": bool, "pieces": list},
    "row_ids": {"step": int, "gradient": str, "count": int, "pieces": list},
    "save": {"step": int, "name": str, "made": int},
    "saving": {"step": int},
    "tables": {"step": int},
    "changed_since": {"step": int, "table": str, "since": int},
    "evict": {"step": int, "table": str, "unused_for": int},
    "complete": {},
    "abort": {"reason": str},
    "peer": {"endpoint": str, "order": str, "layout": str},
    "partials": {"step": int, "level": int, "pieces": list},
    "welcome": {"step": int, "local": str},
    "blocks": {"step": int, "pieces": list},
    "exchanged": {"step": int, "round": int, "values": list, "pieces": list},
    "rows": {"step": int, "table": str, "pieces": list},
    "changed": {"step": int, "table": str, "count": int, "pieces": list},
    "waiting": {"reason": str},
    "refuse": {"reason": str},
    "saved": {"name": str, "error": str},
    "report": {"tables": list},
    "changes": {"table": str, "now": int, "count": int, "gone": int, "error": str, "pieces": list},
    "evicted": {"table": str, "count": int, "error": str},
    "goodbye": {},
    "status": {},
    "status_report": {"server": dict, "trainers": list},
    "meet": {"trainer": int, "endpoints": list},
    "here": {},
    "go": {},
    "doing": {"trainer": int, "operations": int, "where": str},
    "ended": {"trainer": int, "operations": int, "reason": str},
    "value": {
        "process": int,
        "step": int,
        "key": int,
        "dtype": str,
        "shape": list,
        "impl": str,
        "pieces": list,
    },
}


# op to the optional fields, with their types
OPTIONAL: dict[str, dict[str, type | tuple[type, ...]]] = {
    "hello": {
        **{"sync_mode": bool, "plan": dict, "nonce": str, "sent": int, "heard": int},
        **{"back": bool, "local": bool, "leaves": bool},
    },
    "send": {"steps": int, "blocks": list},
    "send_barrier": {"blocks": list},
    "recv": {"blocks": list, "changed": bool},
    "prefetch": {"ahead": int, "request": int},
    "rows": {"ahead": int, "last": bool, "count": int, "request": int},
    "save": {"request": int},
    "saved": {"request": int},
    "tables": {"request": int},
    "report": {"request": int},
    "changed_since": {"request": int},
    "changes": {"request": int},
    "evict": {"request": int},
    "evicted": {"request": int},
    "status": {"request": int},
    "status_report": {"request": int},
    "peer": {"on_trainer_exit": str, "plan": dict, "nonce": str, "sent": int, "back": bool},
    "welcome": {"proof": str},
    "refuse": {"last": bool, "late": bool, "proof": str},
    "meet": {"nonce": str},
    "doing": {"steps": int},
    "here": {"proof": str},
}

# messages that may be lost with a connection: they are sent again, or nobody needs them
UNCOUNTED = ("hello", "welcome", "waiting", "refuse", "complete", "goodbye")

# messages that others may follow, in `then`
FOLLOWED = ("send", "send_barrier")


@dataclasses.dataclass(frozen=True)
class Message:
    """A received message: its op, fields, and raw frames."""

    op: str
    fields: dict[str, Any]
    frames: Sequence[Any] = ()

    def __getitem__(self, field: str) -> Any:
        return self.fields[field]

    @property
    def request(self) -> dict[str, int]:
        """The field that the answer repeats, if there is one."""
        return {n: x for n, x in self.fields.items() if n == "request"}


def header(op: str, **fields: Any) -> bytes:
    """Return the first frame of a message."""
    return msgpack.packb({"v": VERSION, "op": op, **fields})


def parse(parts: Sequence[Any]) -> Message:
    """Parse a message from its frames: bytes, or objects with a `buffer`.

    Raises:
      WireError: the frames are malformed, or of another version; or a field is missing, or of
        another type.
    """
    if not parts:
        raise WireError("an empty message")
    try:
        fields = msgpack.unpackb(_view(parts[0]), raw=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as e:  # msgpack raises both kinds
        raise WireError(f"a message whose header is not msgpack ({e or type(e).__name__})") from e
    if not isinstance(fields, dict) or fields.get("v") != VERSION:
        version = fields.get("v") if isinstance(fields, dict) else None
        raise WireError(
            f"a message of protocol version {brief(version)}; this is version {VERSION}"
        )
    op = fields.get("op")
    if not isinstance(op, str) or op not in FIELDS:
        raise WireError(f"a message of unknown kind {brief(op)}")
    optional = {n: kind for n, kind in OPTIONAL.get(op, {}).items() if n in fields}
    for name, kind in {**FIELDS[op], **optional}.items():
        value = fields.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise WireError(f"a `{op}` message without a proper {name}")
    return Message(op, fields, parts[1:])


def limits(blocks: Mapping[str, int]) -> tuple[int, int]:
    """Return the limits of a job's messages: bytes of the largest frame, and messages to one peer
    that may be on their way.

    Args:
      blocks: name to size in bytes, of all blocks that are sent and received in a step.
    """
    header = HELLO + sum(len(n.encode()) + ROW for n in blocks)
    steps = len(blocks) + sum(blocks.values()) // MESSAGE_BYTES
    return max(MESSAGE_BYTES, header), 1000 + 32 * steps


def brief(value: Any) -> str:
    """Return the text of a value for a message, in at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _view(part: Any) -> memoryview:
    return memoryview(getattr(part, "buffer", part))


# -- arrays ----------------------------------------------------------------------------------------


def as_bytes(array: Any) -> np.ndarray:
    """Return the bytes of an array, as a flat view of its memory if that is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def messages(blocks: Iterable[tuple[str, Any]]) -> Iterator[tuple[list[list[Piece]], list[Any]]]:
    """Cut named arrays into messages; yield the `pieces` of each header, and its frames."""
    pieces: list[list[Piece]] = []
    frames: list[Any] = []
    size = 0
    small: list[np.ndarray] = []

    def close_small() -> None:
        if small:
            frames.append(small[0] if len(small) == 1 else np.concatenate(small))
            small.clear()

    for name, array in blocks:
        data = as_bytes(array)
        at = 0
        while True:
            if size >= MESSAGE_BYTES:
                close_small()
                yield pieces, frames
                pieces, frames, size = [], [], 0
            part = data[at : at + MESSAGE_BYTES - size]
            piece = (name, at, part.nbytes)
            if data.nbytes < SMALL and part.nbytes == data.nbytes:
                if not small:
                    pieces.append([])
                small.append(part)
                pieces[-1].append(piece)
            else:
                close_small()
                pieces.append([piece])
                frames.append(part)
            size += part.nbytes
            at += part.nbytes
            if at >= data.nbytes:
                break
    close_small()
    if pieces:
        yield pieces, frames


def framed(op: str, blocks: Sequence[tuple[str, Any]] = (), **fields: Any) -> Iterator[list[Any]]:
    """Yield the frames of a message, and of those that follow if the named arrays are large."""
    if not blocks:
        yield [header(op, **fields)]
    for pieces, frames in messages(blocks):
        yield [header(op, **fields, pieces=pieces), *frames]


def unpack(message: Message, target: Callable[[str], np.ndarray], arrived: dict[str, int]) -> None:
    """Copy the pieces of a message to their blocks: all of them, or none if it raises.

    Args:
      target: returns the bytes of a block by name; raises WireError for an unknown name.
      arrived: number of bytes of each block that are here, from its start on; updated in place.

    Raises:
      WireError: pieces and frames disagree, or bytes lie outside a block or are not its next ones.
    """
    tables = message["pieces"]
    if len(tables) != len(message.frames):
        raise WireError(
            f"a `{message.op}` message with {len(message.frames)} frames where its header lists "
            f"{len(tables)}"
        )
    here: dict[str, int] = {}
    copies: list[tuple[np.ndarray, np.ndarray]] = []
    for table, frame in zip(tables, message.frames, strict=True):
        data = np.frombuffer(_view(frame), np.uint8)
        at = 0
        for name, offset, nbytes in checked_pieces(table):
            block = target(name)
            if offset + nbytes > block.nbytes:
                raise WireError(
                    f"bytes {offset} to {offset + nbytes} of {name}, which has {block.nbytes}"
                )
            if at + nbytes > data.nbytes:
                raise WireError(
                    f"a truncated frame: {name} ends at byte {at + nbytes} of {data.nbytes}"
                )
            before = here.get(name, arrived.get(name, 0))
            if offset != before:
                raise WireError(
                    f"bytes {offset} to {offset + nbytes} of {name}, which has {before} here"
                )
            copies.append((block[offset : offset + nbytes], data[at : at + nbytes]))
            at += nbytes
            here[name] = offset + nbytes
        if at != data.nbytes:
            raise WireError(f"a frame of {data.nbytes} bytes where its header lists {at}")
    for rows, data in copies:
        rows[:] = data
    arrived.update(here)


def checked_pieces(table: Any) -> list[Piece]:
    """Return the pieces of one frame. Raises WireError if they are not [name, offset, nbytes]."""
    if not isinstance(table, list):
        raise WireError("pieces that are not a list")
    for piece in table:
        ok = isinstance(piece, list) and len(piece) == 3 and isinstance(piece[0], str)
        if not ok or not all(type(n) is int and 0 <= n <= sys.maxsize for n in piece[1:]):
            raise WireError(f"a piece that is not [name, offset, nbytes]: {brief(piece)}")
    return table
