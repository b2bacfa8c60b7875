"""Format of the protocol's messages.

A message is a multipart message of ZeroMQ: a header, which is a msgpack map, and raw frames. The
header's field `op` names the kind of the message, and the header has these other fields (optional
ones are in brackets):

    trainer to server                                  server to trainer
    hello          trainer, trainers, session, order   welcome   step, local
                   [, sync_mode, plan, nonce,                    [, proof, heard, generation,
                   heard, connection,                            snapshot, every, count]
                   back, local, generation,            rewind    generation
                   incarnation]
    send           step, pieces + frames[, steps,      blocks    step, pieces + frames
                   level]
    send_barrier   step                                waiting   reason
    recv           step[, blocks, changed, count]      refuse    reason[, last]
                                                       changed   step, table, count,
                                                                 pieces + frames
    exchange       step, round, values, pieces         exchanged step, round, values,
                   + frames                                      pieces + frames
    prefetch       step, counts, train, pieces         rows      step, pieces + frames
                   + frames[, ahead, request]                    [, ahead, last, counts,
                                                                 request]
    row_ids        step, counts, pieces + frames
    save           step, name, made[, request,         saved     name, error[, request]
                   pieces + frames]
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
                   back, generation]
    partials       step, level, pieces + frames        refuse
    replica        step, is_state, pieces + frames     replicated count; refuse
                   [, rows]
    replica_evict  step, table, unused_for             replicated count; refuse

    trainer 0 to trainer (nccl2 mode)                  and back
    meet           trainer, endpoints[, nonce]         here[, proof]; refuse
    go
    abort          reason

    trainer to trainer 0 (collectives), and from there to all others
    here
    doing          trainer, operations, where[, steps]
    ended          trainer, operations, reason

    process to process (pipelines)                     and back
    value          process, step, key, dtype, shape,   received  heard
                   impl, pieces + frames
    resume

Admission: `plan` contains a digest (hash) of each part of the sender's plan
(`dtrans.ir.fingerprint`). The receiver refuses a process with another plan. `proof` is derived from
`nonce` and the job's token (`dtrans.protocol.token`). It proves that the sender of a welcome has
the token.

Messages between a trainer and a server, between two servers, and of pipelines also have `number`
and `heard`. With these fields a new connection resumes a broken one
(`dtrans.protocol.numbered_messages`). Messages in `UNCOUNTED` have no number.

Generations (`dtrans.protocol.generations`): `generation` in a greeting is the smallest generation
that its sender takes part in. A server stores a greeting of a later generation until it is in that
generation. It answers a trainer of an earlier generation with `rewind`. `incarnation` is the number
of the generation in which the trainer's process was started. A server refuses a process that the
launcher has replaced. When a server begins a generation, it also sends `rewind` to the trainers of
the previous generation. In a `welcome`, `generation` is the server's generation, and `snapshot` the
step of the snapshot with which it begins, if there is one. `every` is the number of steps between
two snapshots. An asynchronous server adds `count`, the number of the trainer's steps that it has
received. A `recv` with `blocks` contains the largest `count` of all servers.

End of a job: a trainer sends `complete`, receives `goodbye`, and answers with its own `goodbye`. A
server ends when it has received this answer. It also ends if the trainer's connection broke and the
trainer does not reconnect in time.

End of a step: the last message of a step also stands for the messages that would follow it,
`send_barrier` and `recv`. Its field `then` lists them, and its header also contains their fields.
The step of this `recv` is the next step. A synchronous trainer sends this `recv` before the
gradients if they need several messages. The server then sends each block, or each piece of a large
block, when its new value is complete.

Levels: in the ramp-up of `dtrans.TopK`, the sizes of gradients change between steps. `level` in a
`send` is the index of the sizes; the default is 0. All messages of a step have the same level.

Rounds: `values` contains [dtype, shape, way] for each value, where `way` is the collective with its
arguments (`dtrans.protocol.server.trainer_rounds`). The values are sent as blocks with the names
"0", "1", and so on. In the answer, `values` contains [dtype, shape] for each merged value.

Table rows: `prefetch` requests rows of several blocks of tables. `counts` maps the name of each
block to its number of requested rows. A block of the same name contains the increasing row ids, as
32-bit integers. The answer `rows` contains all requested rows. If `train` is true, the trainer
later sends the gradients of the same rows without row ids. An asynchronous trainer with a
communicator merges gradients of different rows. So before the gradients, it sends `row_ids`, whose
`counts` and row ids have the names of the gradients.

Announced rows: with `ahead`, the rows and their gradients belong to a later step: the current step
plus `ahead`. A server sends one or several answers. In an answer, `ahead` is the number of that
later step. If an answer has `counts`, it contains only changed rows: `counts` maps the name of each
block to its number of changed rows. A second block, whose name ends with "@AT", contains the
positions of these rows in the lookup. The field `last` is true in the last answer for a block
(`dtrans.protocol.tables.rows_ahead`).

GEO-SGD: a trainer stores the rows that it has requested. If `changed` is true in its `recv`, the
server sends one `changed` for each of its table blocks, before the parameters. Each `changed`
contains the 32-bit row ids ("ids") and values ("rows") of `count` rows. These are stored rows that
other trainers have changed since the last `changed`. If the field is false, the trainer stores no
rows, so the server sends no `changed`.

Tables between two steps (`dtrans.protocol.tables.stored_tables`): `changes` contains 32-bit row
ids. Its block "ids" has the ids of `count` changed rows, and its block "gone" has the ids of `gone`
evicted rows.

Requests: an answer repeats the `request` number of the message that it answers. A trainer uses each
number once, and drops an answer that it no longer waits for.

Checkpoints: servers write in the background, so `saved` may arrive many steps after `save`. While a
trainer waits for `saved`, it sends `saving` to all servers, so that it does not count as late. In a
`save`, `made` is the number of steps that the trainer has made. Several trainers may request the
same checkpoint after the same number of steps. With error feedback, a `save` to one of the servers
also contains the trainer's rounding errors (`dtrans.protocol.server.save_requests`).

Arrays: `pieces` contains one list for each frame. Each item [name, offset, nbytes] of the list
describes the next bytes of the frame: `nbytes` bytes of block `name`, from byte `offset` on. A
block larger than `MESSAGE_BYTES` is sent in several messages, because ZeroMQ delivers only complete
messages.
Small blocks share a frame. Arrays are in C order and in the machine's byte order. Both processes
must be little-endian: `order` in `hello` and `peer` states the byte order.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgpack
import numpy as np

from dtrans.errors import WireError
from dtrans.protocol.row_pieces import RowPieces


VERSION = 6
# Maximum bytes of arrays in a message. Larger messages delay the update of the first block, and
# allocating them takes longer than copying them. Smaller ones cost more processor time.
MESSAGE_BYTES = 2 << 20
SMALL = 16 << 10  # bytes; smaller blocks share a frame, because a copy is cheaper than a frame
MAX_MESSAGE = 16 << 20  # maximum bytes of a frame; `limits` computes a lower limit for a plan
# maximum bytes of a header without names of blocks; the largest field is the plan's fingerprint
HELLO = 512 << 10
ROW = 256  # bytes that a block adds to a header, without the block's name

# First byte of a frame with the places of other frames in shared memory. No header begins with it,
# because msgpack does not use it.
PLACES = b"\xc1"

Piece = tuple[str, int, int]

# required fields of each op, with their types
FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "hello": {"trainer": int, "trainers": int, "session": str, "order": str},
    "send": {"step": int, "pieces": list},
    "send_barrier": {"step": int},
    "recv": {"step": int},
    "exchange": {"step": int, "round": int, "values": list, "pieces": list},
    "prefetch": {"step": int, "counts": dict, "train": bool, "pieces": list},
    "row_ids": {"step": int, "counts": dict, "pieces": list},
    "save": {"step": int, "name": str, "made": int},
    "saving": {"step": int},
    "tables": {"step": int},
    "changed_since": {"step": int, "table": str, "since": int},
    "evict": {"step": int, "table": str, "unused_for": int},
    "complete": {},
    "abort": {"reason": str},
    "peer": {"endpoint": str, "order": str, "layout": str},
    "partials": {"step": int, "level": int, "pieces": list},
    "replica": {"step": int, "is_state": bool, "pieces": list},
    "replica_evict": {"step": int, "table": str, "unused_for": int},
    "replicated": {"count": int},
    "welcome": {"step": int, "local": str},
    "rewind": {"generation": int},
    "blocks": {"step": int, "pieces": list},
    "exchanged": {"step": int, "round": int, "values": list, "pieces": list},
    "rows": {"step": int, "pieces": list},
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
    "resume": {},
    "received": {"heard": int},
}


# optional fields of each op, with their types
OPTIONAL: dict[str, dict[str, type | tuple[type, ...]]] = {
    "hello": {
        **{"sync_mode": bool, "plan": dict, "nonce": str},
        **{"back": bool, "local": bool, "connection": int, "generation": int},
        **{"incarnation": int},
    },
    "send": {"steps": int, "blocks": list, "count": int, "level": int},
    "send_barrier": {"blocks": list},
    "recv": {"blocks": list, "changed": bool, "count": int},
    "prefetch": {"ahead": int, "request": int},
    "rows": {"ahead": int, "last": bool, "counts": dict, "request": int},
    "save": {"request": int, "pieces": list},
    "saved": {"request": int},
    "tables": {"request": int},
    "report": {"request": int},
    "changed_since": {"request": int},
    "changes": {"request": int},
    "evict": {"request": int},
    "evicted": {"request": int},
    "status": {"request": int},
    "status_report": {"request": int},
    "peer": {"on_trainer_exit": str, "plan": dict, "nonce": str, "back": bool, "generation": int},
    "welcome": {"proof": str, "generation": int, "snapshot": int, "every": int, "count": int},
    "refuse": {"last": bool, "late": bool, "proof": str},
    "replica": {"rows": dict},
    "meet": {"nonce": str},
    "doing": {"steps": int},
    "here": {"proof": str},
}

# optional fields of every message (`dtrans.protocol.numbered_messages`)
NUMBERS: dict[str, type | tuple[type, ...]] = {"number": int, "heard": int}

# Messages without a number. They belong to one connection. `abort` has no number, because the
# server must process it even if an earlier message is missing.
UNCOUNTED = ("hello", "peer", "welcome", "waiting", "rewind", "replicated", "abort")

# messages that may have the field `then`
FOLLOWED = ("send", "send_barrier")


@dataclasses.dataclass(frozen=True)
class SharedFrame:
    """Received frame in memory that its sender shares with this process (read-only).

    Attributes:
      buffer: bytes of the frame.
      rest: the memory from the first byte of the frame on. If the frame is the first part of an
        array, the sender writes the later parts there, too.
    """

    buffer: np.ndarray
    rest: np.ndarray

    def __len__(self) -> int:
        return self.buffer.nbytes


@dataclasses.dataclass(frozen=True)
class Message:
    """Received message: its op, the fields of its header, and its raw frames."""

    op: str
    fields: dict[str, Any]
    frames: Sequence[Any] = ()

    def __getitem__(self, field: str) -> Any:
        return self.fields[field]

    @property
    def request(self) -> dict[str, int]:
        """Header field with which an answer names this request.

        The field is the request's number. The result is empty if the request has none.
        """
        return {"request": self.fields["request"]} if "request" in self.fields else {}


def header(op: str, **fields: Any) -> bytes:
    """Return the header of a message, which is its first frame."""
    return msgpack.packb({"v": VERSION, "op": op, **fields})


def parse(parts: Sequence[Any]) -> Message:
    """Parse a message from its frames, which are bytes or objects with a `buffer`.

    Raises:
      WireError: the header is malformed or has another protocol version, or a field is missing or
        has the wrong type.
    """
    if not parts:
        raise WireError("an empty message")
    if _view(parts[0])[:1] == PLACES:
        raise WireError(
            "a message whose header is not msgpack, but places in shared memory that this process "
            "cannot read"
        )
    try:
        fields = msgpack.unpackb(_view(parts[0]), raw=False, strict_map_key=True)
    # msgpack raises both types of exceptions.
    except (ValueError, msgpack.UnpackException) as e:
        raise WireError(f"a message whose header is not msgpack ({e or type(e).__name__})") from e
    version = fields.get("v") if isinstance(fields, dict) else None
    if version != VERSION:
        raise WireError(
            f"a message of protocol version {brief(version)}; this process uses version {VERSION}; "
            "install the same version of dtrans for all processes"
        )
    op = fields.get("op")
    if not isinstance(op, str) or op not in FIELDS:
        raise WireError(f"a message of unknown kind {brief(op)}; expected an op such as `hello`")
    for name, kind in FIELDS[op].items():
        _check_field(op, name, fields.get(name), kind)
    for name, kind in (*OPTIONAL.get(op, {}).items(), *NUMBERS.items()):
        if name in fields:
            _check_field(op, name, fields[name], kind)
    return Message(op, fields, parts[1:])


def _check_field(op: str, name: str, value: Any, kind: type | tuple[type, ...]) -> None:
    # bool is a subclass of int
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise WireError(f"a `{op}` message whose field `{name}` is missing or has the wrong type")


def limits(blocks: Mapping[str, int]) -> tuple[int, int]:
    """Return the largest sizes of messages that a job needs; larger messages are refused.

    Args:
      blocks: size in bytes of each array that is sent or received in a step, by name.

    Returns:
      The size in bytes of the largest frame, and the maximum number of unread messages to one
      process.
    """
    # The header of a trainer's message may list each block twice: with its size or its number of
    # rows, and in `pieces`.
    header = HELLO + sum(2 * len(n.encode()) + ROW for n in blocks)
    steps = len(blocks) + sum(blocks.values()) // MESSAGE_BYTES
    return max(MESSAGE_BYTES, header), 1000 + 32 * steps


def brief(value: Any) -> str:
    """Return the repr of a value, shortened to 80 characters, for an error message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _view(part: Any) -> memoryview:
    return memoryview(getattr(part, "buffer", part))


# -- arrays ----------------------------------------------------------------------------------------


def as_bytes(array: Any) -> np.ndarray:
    """Return the bytes of an array in C order, without a copy if possible."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def after_bytes(block: Any, count: int) -> RowPieces:
    """Return the rest of an array after its first `count` bytes, which were sent before.

    Args:
      block: an array, or `RowPieces` (an array in several pieces).
      count: number of bytes to leave out.
    """
    rest, at = [], 0
    for array in block.arrays if isinstance(block, RowPieces) else [block]:
        if at + array.nbytes > count:
            rest.append(as_bytes(array)[max(0, count - at) :])
        at += array.nbytes
    return RowPieces(rest, count)


def messages(blocks: Iterable[tuple[str, Any]]) -> Iterator[tuple[list[list[Piece]], list[Any]]]:
    """Split named arrays into messages of limited size; small arrays share a message.

    Args:
      blocks: name of each block, with its array or its `RowPieces` (an array in several pieces).

    Yields:
      The header field `pieces` of each message, which lists the parts of arrays in it, and its
      frames.
    """
    pieces: list[list[Piece]] = []
    frames: list[Any] = []
    size = 0
    small: list[np.ndarray] = []

    def close_small() -> None:
        if small:
            frames.append(small[0] if len(small) == 1 else np.concatenate(small))
            small.clear()

    for name, start, data in _pieces_of(blocks):
        at = 0
        while True:
            if size >= MESSAGE_BYTES:
                close_small()
                yield pieces, frames
                pieces, frames, size = [], [], 0
            part = data[at : at + MESSAGE_BYTES - size]
            piece = (name, start + at, part.nbytes)
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


def _pieces_of(blocks: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, int, np.ndarray]]:
    """Yield for each array: the name of its block, the index of its first byte, and its bytes."""
    for name, block in blocks:
        if not isinstance(block, RowPieces):
            yield name, 0, as_bytes(block)
            continue
        start = block.start
        for array in block.arrays:
            yield name, start, as_bytes(array)
            start += array.nbytes


def framed(
    op: str,
    blocks: Sequence[tuple[str, Any]] = (),
    stamp: Callable[[], Mapping[str, int]] = dict,
    **fields: Any,
) -> Iterator[list[Any]]:
    """Yield complete messages that together send some arrays; without arrays, one message.

    Args:
      op: kind of the message.
      blocks: name of each block, with its array or its `RowPieces`.
      stamp: returns further header fields of each message, such as its number.
      fields: header fields of all messages.
    """
    if not blocks:
        yield [header(op, **fields, **stamp())]
    for pieces, frames in messages(blocks):
        yield [header(op, **fields, **stamp(), pieces=pieces), *frames]


def unpack(
    message: Message,
    target: Callable[[str], np.ndarray],
    arrived: dict[str, int],
    adopt: Callable[[str, np.ndarray], None] | None = None,
    adopted: Container[str] = (),
) -> None:
    """Copy the arrays in a received message to their memory, after a check of all sizes.

    A large array arrives in several messages. If a check fails, nothing is copied.

    Args:
      target: function from a block's name to its memory. It raises WireError for an unknown name.
      arrived: maps the name of each block to the number of its received bytes; updated in place.
      adopt: function that replaces the memory of a block.
      adopted: names of blocks that are not copied from shared memory. It becomes their memory,
        which is then read-only.

    Raises:
      WireError: the pieces do not match the frames, a piece does not continue its block, or a piece
        ends outside its block.
    """
    tables = message["pieces"]
    if len(tables) != len(message.frames):
        raise WireError(
            f"a `{message.op}` message with {len(message.frames)} frames, but its header lists "
            f"{len(tables)}"
        )
    here: dict[str, int] = {}
    copies: list[tuple[str, int, np.ndarray, np.ndarray | None]] = []
    for table, frame in zip(tables, message.frames, strict=True):
        data = np.frombuffer(_view(frame), np.uint8)
        at = 0
        for name, offset, nbytes in checked_pieces(table):
            block = target(name)
            if offset + nbytes > block.nbytes:
                raise WireError(
                    f"bytes {offset} to {offset + nbytes} of {name}, which has {block.nbytes} bytes"
                )
            if at + nbytes > data.nbytes:
                raise WireError(
                    f"a truncated frame: its header lists {at + nbytes} bytes up to the end of "
                    f"{name}, but it has {data.nbytes}"
                )
            before = here.get(name, arrived.get(name, 0))
            if offset != before:
                raise WireError(
                    f"bytes {offset} to {offset + nbytes} of {name}; expected its bytes from "
                    f"{before} on"
                )
            rest = frame.rest if isinstance(frame, SharedFrame) and len(table) == 1 else None
            copies.append((name, offset, data[at : at + nbytes], rest))
            at += nbytes
            here[name] = offset + nbytes
        if at != data.nbytes:
            raise WireError(f"a frame of {data.nbytes} bytes, but its header lists {at}")
    for name, offset, data, rest in copies:
        block = target(name)
        if adopt is None or name not in adopted:
            block[offset : offset + data.nbytes] = data
        else:
            _adopt_or_copy(name, block, offset, data, rest, adopt)
    arrived.update(here)


def _adopt_or_copy(
    name: str,
    block: np.ndarray,
    offset: int,
    data: np.ndarray,
    rest: np.ndarray | None,
    adopt: Callable[[str, np.ndarray], None],
) -> None:
    """Use the shared memory of a block's first part as its memory, or copy a part to its memory.

    Args:
      name: name of the block.
      block: bytes of its memory.
      offset: position of the part in the block.
      data: bytes of the part.
      rest: shared memory from the first byte of the part on; None if the part is not shared.
      adopt: as for `unpack`.
    """
    if rest is not None and offset == 0 and rest.nbytes >= block.nbytes:
        adopt(name, rest[: block.nbytes])
        return
    if not block.flags.writeable:
        if offset and data.ctypes.data == block.ctypes.data + offset:
            return  # this part is where the sender has written it
        copy = np.empty_like(block)
        copy[:offset] = block[:offset]
        adopt(name, copy)
        block = copy
    block[offset : offset + data.nbytes] = data


def checked_pieces(table: Any) -> list[Piece]:
    """Check the list of the parts of arrays in one frame, which the header of a message has.

    Returns:
      The list. Each item is [name, offset, nbytes].

    Raises:
      WireError: a piece is not [name, offset, nbytes].
    """
    if not isinstance(table, list):
        raise WireError("a message whose field `pieces` is not a list of lists")
    for piece in table:
        ok = isinstance(piece, list) and len(piece) == 3 and isinstance(piece[0], str)
        if not ok or not all(type(n) is int and 0 <= n <= sys.maxsize for n in piece[1:]):
            raise WireError(f"a piece that is not [name, offset, nbytes]: {brief(piece)}")
    return table
