"""Messages contain arrays bit for bit. Malformed messages raise WireError and write nothing.

Memory for received arrays is reused only when no array uses it any more.
"""

from __future__ import annotations

import gc
import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from dtrans.errors import WireError
from dtrans.protocol import wire
from dtrans.protocol.buffers import ALIGNMENT, BufferPool
from dtrans.protocol.row_pieces import RowPieces


class Guarded:
    """Blocks for received arrays, each between guard bytes that must not change."""

    MARGIN = 64

    def __init__(self, sizes: dict[str, int]) -> None:
        self.whole = {
            n: np.full(size + 2 * self.MARGIN, 0xAA, np.uint8) for n, size in sizes.items()
        }
        self.sizes = sizes
        self.arrived: dict[str, int] = {}

    def target(self, name: str) -> np.ndarray:
        if name not in self.whole:
            raise WireError(f"unknown block {name}")
        return self.whole[name][self.MARGIN : self.MARGIN + self.sizes[name]]

    def check_margins(self) -> None:
        for name, memory in self.whole.items():
            edges = np.concatenate(
                [memory[: self.MARGIN], memory[self.MARGIN + self.sizes[name] :]]
            )
            assert (edges == 0xAA).all(), name

    def untouched(self) -> bool:
        return not self.arrived and all((memory == 0xAA).all() for memory in self.whole.values())

    def take(self, parts: list[bytes]) -> wire.Message:
        message = wire.parse(parts)
        if "pieces" in wire.FIELDS[message.op]:
            wire.unpack(message, self.target, self.arrived)
        return message


def sent(arrays: dict[str, Any]) -> list[list[bytes]]:
    """Return the messages with some arrays, as frames."""
    return [
        [wire.header("send", step=0, pieces=pieces), *(bytes(f) for f in frames)]
        for pieces, frames in wire.messages(arrays.items())
    ]


def received(arrays: dict[str, Any]) -> tuple[list[list[bytes]], dict[str, np.ndarray]]:
    """Return the messages, and the arrays that a receiver reads from them."""
    messages = sent(arrays)
    there = Guarded({n: np.asarray(x).nbytes for n, x in arrays.items()})
    for parts in messages:
        there.take(parts)
    there.check_margins()
    assert there.arrived == there.sizes
    return messages, {
        n: there.target(n).copy().view(np.asarray(x).dtype).reshape(np.shape(x))
        for n, x in arrays.items()
    }


def assert_bitwise(got: dict[str, np.ndarray], want: dict[str, Any]) -> None:
    assert list(got) == list(want)
    for n, x in want.items():
        assert got[n].tobytes() == np.asarray(x).tobytes(), n


# -- round trips -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.float64(2.5).reshape(()),
        np.zeros((0, 3), np.float32),
        np.zeros((3, 0), np.float32),
        jnp.linspace(0, 1, 7, dtype=jnp.bfloat16),
        jnp.float32(3.0),
        np.arange(12, dtype=np.int8).reshape(3, 4).T,  # not contiguous
        np.arange(10)[::-2],
        np.array([True, False]),
        np.array([np.nan, -0.0, np.inf], np.float32),
        np.arange(4, dtype=np.complex64),
    ],
    ids=lambda x: f"{np.asarray(x).dtype.name}{list(np.shape(x))}",
)
def test_an_array_arrives_bit_for_bit(array: Any) -> None:
    messages, got = received({"x": array})
    assert len(messages) == 1
    assert_bitwise(got, {"x": array})


def test_an_empty_array_among_others_is_named_in_its_message() -> None:
    arrays = {"a": np.arange(3.0), "none": np.zeros((0, 2)), "b": np.arange(2.0)}
    (parts,), got = received(arrays)
    assert [p[0] for table in wire.parse(parts)["pieces"] for p in table] == ["a", "none", "b"]
    assert_bitwise(got, arrays)


def test_a_large_block_is_cut_into_several_messages() -> None:
    size = 2 * wire.MESSAGE_BYTES + 12
    arrays = {"w": np.random.default_rng(0).integers(0, 255, size, np.uint8)}
    messages, got = received(arrays)
    assert [sum(map(len, parts[1:])) for parts in messages] == [
        wire.MESSAGE_BYTES,
        wire.MESSAGE_BYTES,
        12,
    ]
    assert [wire.parse(parts)["pieces"] for parts in messages] == [
        [[["w", 0, wire.MESSAGE_BYTES]]],
        [[["w", wire.MESSAGE_BYTES, wire.MESSAGE_BYTES]]],
        [[["w", 2 * wire.MESSAGE_BYTES, 12]]],
    ]
    assert_bitwise(got, arrays)


@pytest.mark.parametrize(
    "size", [wire.MESSAGE_BYTES - 1, wire.MESSAGE_BYTES, wire.MESSAGE_BYTES + 1]
)
def test_blocks_around_the_size_of_a_message_arrive(size: int) -> None:
    rng = np.random.default_rng(0)
    arrays = {n: rng.integers(0, 255, s, np.uint8) for n, s in (("a", 5), ("w", size), ("b", 7))}
    messages, got = received(arrays)
    assert_bitwise(got, arrays)
    assert all(sum(map(len, parts[1:])) <= wire.MESSAGE_BYTES for parts in messages)


def test_many_small_blocks_share_a_frame_and_a_large_one_travels_from_where_it_is() -> None:
    large = np.zeros(wire.SMALL, np.uint8)
    arrays = {f"s{i}": np.full(i, i, np.uint8) for i in range(20)}
    ((pieces, frames),) = wire.messages(
        [*arrays.items(), ("w", large), ("t", np.ones(3, np.uint8))]
    )
    assert [len(table) for table in pieces] == [20, 1, 1]
    assert frames[0].nbytes == sum(range(20))
    assert np.shares_memory(frames[1], large)
    assert not any(np.shares_memory(frames[0], x) for x in arrays.values() if x.size)


@pytest.mark.parametrize("limit", [5, 24, 1000])
@pytest.mark.parametrize("dtype", ["float32", jnp.bfloat16])
@pytest.mark.parametrize("sent", [0, 1, 3])
def test_a_block_in_pieces_arrives_as_one_block(
    limit: int, dtype: Any, sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first `sent` rows arrive earlier. The rest may begin in the middle of an array."""
    monkeypatch.setattr(wire, "MESSAGE_BYTES", limit)
    rows = np.arange(10).reshape(5, 2).astype(dtype)
    block = RowPieces([rows[:2], rows[2:4], rows[4:]])
    assert np.asarray(block).tobytes() == rows.tobytes() and block.shape == (5, 2)
    start = rows[:sent].nbytes
    first = [("w", RowPieces([rows[:sent]]))] if sent else []
    memory, arrived = np.zeros(rows.nbytes, np.uint8), dict[str, int]()
    for blocks in (first, [("w", wire.after_bytes(block, start)), ("b", np.ones(2))]):
        for pieces, frames in wire.messages(blocks):
            message = wire.Message("blocks", {"pieces": json.loads(json.dumps(pieces))}, frames)
            targets = {"w": memory, "b": np.zeros(16, np.uint8)}
            wire.unpack(message, targets.__getitem__, arrived)
    assert memory.tobytes() == rows.tobytes() and arrived == {"w": rows.nbytes, "b": 16}
    whole = wire.after_bytes(rows, start)
    assert b"".join(x.tobytes() for x in whole.arrays) == rows[sent:].tobytes()


def test_nothing_to_send_is_no_message() -> None:
    assert list(wire.messages([])) == []


@given(st.lists(st.integers(0, 3 * wire.SMALL), max_size=12), st.data())
def test_any_blocks_arrive_whatever_their_sizes(sizes: list[int], data: st.DataObject) -> None:
    limit = data.draw(st.sampled_from([100, wire.SMALL, 10 * wire.SMALL]), "bytes in a message")
    rng = np.random.default_rng(0)
    arrays = {f"x{i}": rng.integers(0, 255, n, np.uint8) for i, n in enumerate(sizes)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "MESSAGE_BYTES", limit)
        messages, got = received(arrays)
    assert_bitwise(got, arrays)
    assert all(sum(map(len, parts[1:])) <= limit for parts in messages)


def test_limits_let_every_message_of_a_plan_pass() -> None:
    """The limits allow every message of a plan, also with many names.

    The list of requested arrays is then longer than any frame of data.
    """
    names = {f"params/layer_{i}/{'kernel' * 9}.block{i}@GRAD.trainer_1": 4 for i in range(20_000)}
    frame, count = wire.limits(names)
    table = [[n, [1 << 30] * 8, "float8_e4m3b11fnuz"] for n in names]
    assert len(wire.header("recv", step=1, blocks=table)) < frame
    sent = [
        [wire.header("send", step=1, pieces=p), *f]
        for p, f in wire.messages((n, np.float32(0)) for n in names)
    ]
    assert max(len(bytes(f)) for parts in sent for f in parts) < frame and len(sent) < count
    assert wire.limits({"w": 1})[0] == wire.MESSAGE_BYTES


def test_limits_let_a_request_of_tables_with_long_names_pass() -> None:
    """Its header has each name twice."""
    names = {f"{i}{'n' * 1000}": 4 for i in range(4000)}
    pieces = [[(n, 1 << 30, 1 << 30) for n in names]]
    counts = dict.fromkeys(names, 1 << 30)
    header = wire.header("prefetch", step=1, counts=counts, train=True, pieces=pieces)
    assert len(header) < wire.limits(names)[0]


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parts, reason",
    [
        ([], "^an empty message$"),
        ([b""], "^a message whose header is not msgpack"),
        ([b"\xc1"], "^a message whose header is not msgpack"),
        (
            [msgpack.packb({"v": wire.VERSION, "op": "complete"}) + b"x"],
            r"^a message whose header is not msgpack \(.*extra data",
        ),
        (
            [msgpack.packb([1, 2])],
            f"^a message of protocol version None; this process uses version {wire.VERSION};",
        ),
        (
            [msgpack.packb({"v": 1, "op": "complete"})],
            f"^a message of protocol version 1; this process uses version {wire.VERSION};",
        ),
        (
            [msgpack.packb({"v": "x" * 999, "op": "complete"})],
            r"^a message of protocol version 'x{76}\.\.\.; this process",
        ),
        ([msgpack.packb({"v": wire.VERSION})], "^a message of unknown kind None; expected"),
        (
            [msgpack.packb({"v": wire.VERSION, "op": ["hello"]})],
            r"^a message of unknown kind \['hello'\]; expected",
        ),
        (
            [msgpack.packb({"v": wire.VERSION, "op": "h" * 99999})],
            r"^a message of unknown kind 'h{76}\.\.\.; expected",
        ),
        (
            [msgpack.packb({"v": wire.VERSION, "op": "send_barrier"})],
            "^a `send_barrier` message whose field `step` is missing or has the wrong type$",
        ),
        (
            [msgpack.packb({"v": wire.VERSION, "op": "send_barrier", "step": True})],
            "whose field `step` is missing or has the wrong type$",
        ),
        (
            [msgpack.packb({"v": wire.VERSION, "op": "recv", "step": 0, "blocks": {}})],
            "whose field `blocks` is missing or has the wrong type$",
        ),
        (
            [msgpack.packb({"v": wire.VERSION, "op": "refuse", "reason": "", "last": 1})],
            "whose field `last` is missing or has the wrong type$",
        ),
        (
            [msgpack.packb({"v": wire.VERSION, "op": "send_barrier", "step": 1.0})],
            "whose field `step` is missing or has the wrong type$",
        ),
        # a key that is not a string
        (
            [msgpack.packb({1: 2})],
            "^a message whose header is not msgpack",
        ),
        (
            [msgpack.packb({"v": wire.VERSION, "op": msgpack.ExtType(5, b"x")})],
            "^a message of unknown kind ExtType",
        ),
    ],
)
def test_a_header_that_is_not_ours_is_refused(parts: list[bytes], reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        wire.parse(parts)


@pytest.mark.parametrize(
    "pieces, frames, reason",
    [
        ([[["w", 0, 8]]], [], "^a `send` message with 0 frames, but its header lists 1$"),
        (
            [[["w", 0, 8]]],
            [b"1234567"],
            "^a truncated frame: its header lists 8 bytes up to the end of w, but it has 7$",
        ),
        ([[["w", 0, 8]]], [b"123456789"], "^a frame of 9 bytes, but its header lists 8$"),
        ([[["w", 9, 8]]], [b"12345678"], "^bytes 9 to 17 of w, which has 16 bytes$"),
        ([[["w", 2, 8]]], [b"12345678"], "^bytes 2 to 10 of w; expected its bytes from 0 on$"),
        (
            [[["w", 0, 8]], [["w", 0, 8]]],
            [b"12345678"] * 2,
            "^bytes 0 to 8 of w; expected its bytes from 8 on$",
        ),
        ([[["w", 0, 4], ["u", 0, 4]]], [b"12345678"], "^unknown block u$"),
        (
            [[["w", -1, 8]]],
            [b"12345678"],
            r"^a piece that is not \[name, offset, nbytes\]: \['w', -1, 8\]$",
        ),
        ([[["w", 0, -8]]], [b""], "^a piece that is not"),
        ([[["w", 0]]], [b""], "^a piece that is not"),
        ([[["w", False, 8]]], [b"12345678"], "^a piece that is not"),
        ([["w"]], [b"12345678"], "^a piece that is not"),
        (["w"], [b"12345678"], "^a message whose field `pieces` is not a list of lists$"),
        ([[["w" * 500, 0, None]]], [b""], r"^a piece that is not .{0,130}\.\.\.$"),
    ],
)
def test_pieces_that_do_not_fit_are_refused_and_nothing_of_their_message_is_written(
    pieces: Any, frames: list[bytes], reason: str
) -> None:
    there = Guarded({"w": 16})
    with pytest.raises(WireError, match=reason):
        there.take([wire.header("send", step=0, pieces=pieces), *frames])
    assert there.untouched()


BLOCKS = {
    "a": np.arange(5, dtype=np.uint8),
    "w": np.arange(2 * wire.SMALL, dtype=np.uint8),
    "z": np.zeros(0, np.uint8),
}
(REAL,) = sent(BLOCKS)


def refused_or_right(parts: list[bytes]) -> None:
    """Receive a message.

    Only WireError may be raised. Then no block may change, and guard bytes never change.
    """
    there = Guarded({n: x.nbytes for n, x in BLOCKS.items()})
    try:
        there.take(parts)
    except WireError:
        assert there.untouched()
    there.check_margins()


@given(st.lists(st.binary(max_size=80), max_size=4))
def test_random_bytes_are_refused(parts: list[bytes]) -> None:
    refused_or_right(parts)


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(
    op=st.sampled_from(sorted(wire.FIELDS)) | st.text(max_size=6),
    fields=st.dictionaries(
        st.sampled_from(["step", "pieces", "trainer", "trainers", "session", "reason", "v"]), JUNK
    ),
    frames=st.lists(st.binary(max_size=40), max_size=3),
)
def test_random_fields_are_refused_or_fit(
    op: str, fields: dict[str, Any], frames: list[bytes]
) -> None:
    refused_or_right([msgpack.packb({"v": wire.VERSION, "op": op} | fields), *frames])


PIECE = st.tuples(
    st.sampled_from([*BLOCKS, "?"]),
    st.integers(-2, 40) | st.integers(0, 2**64 - 1),
    st.integers(-2, 40) | st.integers(0, 2**64 - 1),
)


@given(st.lists(st.tuples(st.lists(PIECE, max_size=3), st.binary(max_size=60)), max_size=3))
@example([([("a", 0, 5)], b"12345"), ([("a", 5, 0)], b"")])
def test_random_pieces_are_refused_or_fit(tables: list[tuple[list[Any], bytes]]) -> None:
    refused_or_right(
        [wire.header("send", step=0, pieces=[t for t, _ in tables]), *(f for _, f in tables)]
    )


@given(st.data())
def test_a_truncated_message_is_refused(data: st.DataObject) -> None:
    parts = list(REAL)
    i = data.draw(st.integers(0, len(parts) - 1), "frame")
    if not parts[i] or data.draw(st.booleans(), "drop the frame"):
        del parts[i]
    else:
        parts[i] = parts[i][: data.draw(st.integers(0, len(parts[i]) - 1), "bytes kept")]
    there = Guarded({n: x.nbytes for n, x in BLOCKS.items()})
    with pytest.raises(WireError):
        there.take(parts)
    assert there.untouched()


@given(st.data())
def test_a_mutated_header_is_refused_or_fits(data: st.DataObject) -> None:
    header = bytearray(REAL[0])
    for _ in range(data.draw(st.integers(1, 4), "mutations")):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    refused_or_right([bytes(header), *REAL[1:]])


# -- memory ----------------------------------------------------------------------------------------


def address(x: np.ndarray) -> int:
    return x.ctypes.data


@pytest.mark.parametrize(
    "shape, dtype",
    [((1000, 7), "float32"), ((), "float64"), ((0, 3), "float32"), ((5,), jnp.bfloat16)],
)
def test_memory_is_aligned_and_of_the_right_type(shape: tuple[int, ...], dtype: Any) -> None:
    x = BufferPool().take("w", shape, dtype)
    assert x.shape == shape and x.dtype == dtype
    assert not x.size or address(x) % ALIGNMENT == 0
    assert x.flags.c_contiguous and x.flags.writeable


def test_memory_that_nobody_holds_is_used_again() -> None:
    pool = BufferPool()
    x = pool.take("w", (1000,), "float32")
    at = address(x)
    del x
    assert address(pool.take("w", (1000,), "float32")) == at
    assert address(pool.take("w", (10, 100), "int32")) == at  # another view of equal size


HOLDS = {
    "the array": lambda x: x,
    "a view": lambda x: x[10:20],
    "the bytes": lambda x: memoryview(x),
    "a jax array": jax.device_put,
    "a view of a jax array": lambda x: np.asarray(jax.device_put(x))[3:4],
    "the result of a computation that hands it through": lambda x: jax.jit(lambda x: x)(
        jax.device_put(x)
    ),
    "a jax array that another one was made of": lambda x: jax.device_put(jax.device_put(x)),
}


@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS)
def test_memory_that_somebody_holds_is_never_handed_out_again(hold: Any) -> None:
    pool = BufferPool()
    x = pool.take("w", (1 << 16,), "float32")
    x[:] = 1
    held = hold(x)
    del x
    want = np.array(held, copy=True)
    for value in (2, 3, 4):
        y = pool.take("w", (1 << 16,), "float32")
        y[:] = value
        jax.block_until_ready(jax.device_put(y))
        del y
        np.testing.assert_array_equal(np.asarray(held), want)


def test_memory_of_a_jax_array_is_used_again_when_the_array_is_gone() -> None:
    pool = BufferPool()
    x = pool.take("w", (1 << 16,), "float32")
    x[:] = 1
    held = jax.device_put(x)
    at = address(x)
    assert address(np.asarray(held)) == at, "taken without a copy"
    total = jax.block_until_ready(held.sum())
    del x
    second = pool.take("w", (1 << 16,), "float32")
    assert address(second) != at
    del held
    gc.collect()
    until = time.monotonic() + 30
    while address(pool.take("w", (1 << 16,), "float32")) != at:
        assert time.monotonic() < until, "it is never used again"
        # JAX releases arrays of a finished thread in a later call of JAX
        jax.device_put(np.zeros(1))
    assert total == 1 << 16


def test_steps_that_keep_one_state_need_few_buffers() -> None:
    """As in a training loop, new parameters arrive while the old ones are still in use."""
    pool = BufferPool()
    seen, params = set(), None
    for i in range(10):
        x = pool.take("w", (1 << 16,), "float32")
        x[:] = i
        seen.add(address(x))
        params = jax.device_put(x)
        del x
        jax.block_until_ready(params)
    assert float(params[0]) == 9
    assert 2 <= len(seen) <= 3  # JAX frees an array shortly after its last reference


def test_keys_do_not_share_memory() -> None:
    pool = BufferPool()
    a = address(pool.take("a", (8,), "float32"))
    b = address(pool.take("b", (8,), "float32"))
    assert a != b
