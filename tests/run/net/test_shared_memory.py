"""Shared memory of processes of one host: agreement, slots, and refused places."""

from __future__ import annotations

import contextlib
import gc
import itertools
import mmap
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import msgpack
import numpy as np
import pytest
from role_threads import HANG, until

from dtrans.errors import ConfigError, WireError
from dtrans.protocol import wire
from dtrans.protocol.token import new_token
from dtrans.protocol.transport import Event
from dtrans.run.net import memory_channel
from dtrans.run.net.keys import STATUS, Keys
from dtrans.run.net.memory_channel import DOOR, LEAST, MemoryChannel, knock
from dtrans.run.net.net_options import SHARED_MEMORY, allows_shared_memory
from dtrans.run.net.shared_memory import LentMemory, PeerMemory, SentFrames
from dtrans.run.net.zmq_transport import ZmqLink, ZmqListener, ZmqTransport


pytestmark = pytest.mark.skipif(
    not memory_channel.IS_AVAILABLE, reason="the system has no memory files"
)
USERS = {"somebody": "trainer 0", "observer": STATUS}
LIMITS = {"frame": 1 << 20, "messages": 100}
SIZE = LEAST + 24


def numbers(seed: int, size: int = SIZE) -> np.ndarray:
    """Return immutable bytes, as JAX returns them."""
    x = np.random.default_rng(seed).integers(0, 255, size, np.uint8)
    x.flags.writeable = False
    return x


class Pair:
    """Listener and links of other transports, which stand for processes of one host."""

    def __init__(self, token: str, links: int) -> None:
        self.here = ZmqTransport(Keys(token))
        self.door: ZmqListener = self.here.bind("127.0.0.1:*", USERS, has_local=True, **LIMITS)
        self.there = [ZmqTransport(Keys(token)) for _ in range(links)]
        self.links: list[ZmqLink] = []
        self.addresses: list[bytes] = []
        for transport in self.there:
            assert transport.reaches(self.door.local)
            self.links.append(transport.connect(self.door.local, user="somebody", role="trainer 0"))
            self.addresses.append(self.sent_here([b"hello"], len(self.links) - 1).address)
            self.sent_there([b"welcome"], len(self.links) - 1)
        for transport in self.there:
            for _ in range(3):  # the answer of the listener, and of the link
                list(self.here.poll(0.0))
                list(transport.poll(0.0))

    def sent_here(self, frames: list[Any], k: int = 0) -> Event:
        """Send a message from link k; return its event at the listener."""
        self.links[k].send(frames)
        return self._message(self.here, self.there[k])

    def sent_there(self, frames: list[Any], k: int = 0) -> list[Any]:
        """Send a message to link k; return its frames there."""
        self.door.send(self.addresses[k], frames)
        return list(self._message(self.there[k], self.here).frames)

    @staticmethod
    def _message(receiver: ZmqTransport, sender: ZmqTransport) -> Event:
        def look() -> list[Event]:
            list(sender.poll(0.0))
            return [e for e in receiver.poll(0.0) if e.kind == "message"]

        return until(look, "a message")[0]

    def close(self) -> None:
        for transport in (*self.there, self.here):
            transport.close()


@contextlib.contextmanager
def paired(links: int = 1) -> Iterator[Pair]:
    pair = Pair(new_token(), links)
    try:
        yield pair
    finally:
        pair.close()


def is_shared(frame: Any) -> bool:
    return isinstance(frame, wire.SharedFrame)


def slots(transport: ZmqTransport) -> list[Any]:
    assert transport.lent is not None
    return list(itertools.chain.from_iterable(transport.lent._slots.values()))


def test_large_frames_are_shared_in_both_directions_and_others_are_sent():
    with paired() as pair:
        sent = [b"header", numbers(0), b"small", numbers(1)]
        for heard in (pair.sent_here(sent).frames, pair.sent_there(sent)):
            assert [is_shared(x) for x in heard] == [False, True, False, True]
            for frame, part in zip(heard, sent, strict=True):
                assert bytes(frame.buffer) == bytes(part)
                assert len(frame) == len(part)


def test_an_array_is_written_once_for_all_readers():
    with paired(3) as pair:
        new = numbers(0, 2 * SIZE)
        first, second = new[:SIZE], new[SIZE:]
        heard = [pair.sent_there([b"", first, second], k) for k in range(3)]
        (slot,) = slots(pair.here)
        assert slot.lent == 6
        for _, one, two in heard:
            assert bytes(one.buffer) == first.tobytes()
            # both parts are in one piece, so that the receiver needs no copy
            assert bytes(one.rest[: new.nbytes]) == new.tobytes()
            assert bytes(two.buffer) == second.tobytes()


def test_a_slot_is_not_filled_again_while_an_array_of_jax_reads_it():
    with paired() as pair:
        first = numbers(0)
        _, frame = pair.sent_here([b"", first]).frames
        before = first.tobytes()
        alias = jax.device_put(frame.buffer)
        assert alias.unsafe_buffer_pointer() == frame.buffer.ctypes.data  # JAX has not copied it
        del frame, first
        gc.collect()
        for seed in (1, 2, 3):
            pair.sent_here([b"", numbers(seed)])
        assert bytes(np.asarray(alias)) == before
        assert len(slots(pair.there[0])) > 1


def test_a_released_slot_is_filled_again():
    with paired() as pair:
        for seed in range(20):
            sent = numbers(seed)
            heard = pair.sent_here([b"", sent]).frames
            assert bytes(heard[1].buffer) == sent.tobytes()
            del heard, sent
            list(pair.here.poll(0.0))  # reports the released frame
        assert len(slots(pair.there[0])) <= 2


def test_an_array_that_may_change_is_copied_for_each_message():
    with paired() as pair:
        sent = np.zeros(SIZE, np.uint8)
        first = pair.sent_here([b"", sent]).frames[1]
        sent += 1
        second = pair.sent_here([b"", sent]).frames[1]
        assert set(bytes(first.buffer)) == {0}
        assert set(bytes(second.buffer)) == {1}


def test_readers_cannot_write():
    with paired() as pair:
        frame = pair.sent_here([b"", numbers(0)]).frames[1]
        assert not frame.buffer.flags.writeable
        with pytest.raises(ValueError):
            frame.rest.flags.writeable = True
        lent = pair.there[0].lent
        assert lent is not None
        with pytest.raises(PermissionError):
            mmap.mmap(lent.file, lent.nbytes)
        with pytest.raises(PermissionError):
            os.ftruncate(lent.file, 0)


def test_memory_files_are_not_files_of_dev_shm():
    memory = LentMemory(1 << 20)
    assert os.readlink(f"/proc/self/fd/{memory.file}").startswith("/memfd:")
    memory.close()


def test_frames_are_sent_as_bytes_if_the_memory_is_full():
    with paired() as pair:
        lent = pair.there[0].lent
        assert lent is not None
        lent.nbytes = lent._end + 2 * SIZE
        heard = [pair.sent_here([b"", numbers(seed)]).frames[1] for seed in range(3)]
        assert [is_shared(x) for x in heard] == [True, False, False]
        for seed, frame in enumerate(heard):
            assert bytes(frame.buffer) == numbers(seed).tobytes()


# -- the agreement ---------------------------------------------------------------------------------


def test_memory_with_another_word_is_not_used(monkeypatch):
    class OtherMemory(PeerMemory):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.nonce = bytes(len(self.nonce))

    monkeypatch.setattr(memory_channel, "PeerMemory", OtherMemory)
    with paired() as pair:
        sent = numbers(0)
        for heard in (pair.sent_here([b"", sent]).frames, pair.sent_there([b"", sent])):
            assert not is_shared(heard[1])
            assert bytes(heard[1].buffer) == sent.tobytes()


def test_a_path_at_which_no_process_of_this_host_listens_is_not_reached(tmp_path):
    """A folder of temporary files may be shared with other hosts."""
    for name in ("socket", DOOR):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            line.bind(str(tmp_path / name))
    transport = ZmqTransport(Keys(new_token()))
    assert not transport.reaches(str(tmp_path / "socket"))
    transport.close()


@pytest.mark.parametrize("side", ["listener", "link"])
def test_shared_memory_can_be_disabled_in_either_process(monkeypatch, side):
    monkeypatch.setenv(SHARED_MEMORY, "disabled")
    disabled = ZmqTransport(Keys(""))
    monkeypatch.setenv(SHARED_MEMORY, "auto")
    made = ZmqTransport
    calls = iter([disabled, made(Keys(""))] if side == "listener" else [made(Keys("")), disabled])
    monkeypatch.setattr(sys.modules[__name__], "ZmqTransport", lambda keys: next(calls))
    pair = Pair("", 1)
    try:
        sent = numbers(0)
        for heard in (pair.sent_here([b"", sent]).frames, pair.sent_there([b"", sent])):
            assert not is_shared(heard[1])
            assert bytes(heard[1].buffer) == sent.tobytes()
    finally:
        pair.close()


def test_another_value_of_the_variable_is_refused(monkeypatch):
    monkeypatch.setenv(SHARED_MEMORY, "no")
    with pytest.raises(ConfigError, match=f"{SHARED_MEMORY} must be 'auto' or 'disabled'"):
        allows_shared_memory()


@pytest.mark.parametrize("who", ["unknown", "observer"])
def test_only_processes_that_may_train_get_the_memory(who):
    token = new_token()
    here, there = ZmqTransport(Keys(token)), ZmqTransport(Keys(token))
    door = here.bind("127.0.0.1:*", USERS, has_local=True, **LIMITS)
    line = knock(door.local)
    assert line is not None
    address = b"x" * 64
    if who == "observer":
        link = there.connect(door.endpoint, user="observer", role=STATUS)
        link.send([b"status"])
        until(lambda: [e for e in here.poll(0.0) if e.kind == "message"], "a message")
        address = link._id
    memory = LentMemory(1 << 20)
    socket.send_fds(line, [address], [memory.file])
    answer: list[Any] = []

    def look() -> bool:
        list(here.poll(0.0))
        with contextlib.suppress(BlockingIOError):
            answer.extend(socket.recv_fds(line, 100, 1))
        return bool(answer)

    until(look, "the end of the connection")
    assert answer[:2] == [b"", []]
    line.close()
    memory.close()
    there.close()
    here.close()


def test_a_file_that_may_become_shorter_is_not_mapped():
    file = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, 1 << 20)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(OSError, match="may become shorter"):
        PeerMemory(file, ours)
    os.close(file)


# -- wrong places ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "places",
    [
        7,
        [[1, 2]],
        [[0, 0, 0, 1.5, 8]],
        [[0, 0, -1, 8, 8]],
        [[0, 0, 0, -8, 8]],
        [[0, 0, 4, 8, 8]],
        [[0, 8, 0, 4, 8]],
        [[0, 0, 1 << 62, 8, 1 << 63]],
    ],
    ids=str,
)
def test_places_that_are_wrong_are_refused(places):
    with paired() as pair:
        heard = pair.sent_here([wire.PLACES + msgpack.packb(places), b"header"]).frames
        with pytest.raises(
            WireError, match="places in shared memory that this process cannot read"
        ):
            wire.parse(heard)


def test_places_of_a_process_that_shares_no_memory_are_refused(monkeypatch):
    monkeypatch.setenv(SHARED_MEMORY, "disabled")
    with paired() as pair:
        places = wire.PLACES + msgpack.packb([[1, 0, 0, 8, 8]])
        with pytest.raises(WireError, match="places in shared memory"):
            wire.parse(pair.sent_here([places, b"header"]).frames)


# -- the end of a process --------------------------------------------------------------------------


def test_slots_return_when_the_reader_has_closed_its_link_and_uses_no_frame():
    with paired(2) as pair:
        frame = pair.sent_there([b"", numbers(0)])[1]
        before = bytes(frame.buffer)
        pair.links[0].close()
        until(lambda: [e for e in pair.here.poll(0.0) if e.kind == "lost"], "the end")
        for seed in (1, 2, 3):  # the reader may only have been stopped
            pair.sent_there([b"", numbers(seed)], 1)
        assert bytes(frame.buffer) == before and pair.door._lost_channels
        del frame
        gc.collect()
        count = len(slots(pair.here))
        for seed in range(4, 8):
            pair.sent_there([b"", numbers(seed)], 1)
        assert len(slots(pair.here)) == count


def test_a_listener_frees_the_memory_of_a_process_that_has_ended():
    with paired() as pair:
        pair.sent_here([b"", numbers(0)])
        (channel,) = pair.door._channels.values()
        memory = weakref.ref(channel._peer)
        del channel
        pair.links[0].close()

        def is_free() -> bool:
            list(pair.here.poll(0.0))
            gc.collect()
            return memory() is None

        until(is_free, "the memory of the other process to be unmapped")


READER = """
import socket, sys
from dtrans.run.net.shared_memory import PeerMemory
line = socket.socket(fileno=int(sys.argv[1]))
memory = PeerMemory(int(sys.argv[2]), line)
frame = memory.frame(4096, 4096, 100, 8192)
print(bytes(frame.buffer[:3]), flush=True)
sys.stdin.read()
"""


def test_slots_return_when_their_reader_was_killed():
    memory = LentMemory(1 << 20)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    sent = SentFrames(ours)
    memory.add_reader(sent)
    found = memory.lend(numbers(0, 100))
    assert found is not None
    sent.add(found[0])
    numbers_passed = (theirs.fileno(), memory.file)
    with subprocess.Popen(
        [sys.executable, "-c", READER, *map(str, numbers_passed)],
        pass_fds=numbers_passed,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    ) as reader:
        theirs.close()
        assert reader.stdout is not None and reader.stdin is not None
        assert reader.stdout.readline() == f"{numbers(0, 100)[:3].tobytes()}\n"
        kept = numbers(1, 100)  # occupies a slot
        other = memory.lend(kept)
        assert other is not None and other[1] != found[1]
        reader.kill()
        reader.wait(HANG)
    again = memory.lend(numbers(2, 100))
    assert again is not None and again[0] is found[0]
    memory.close()


def test_a_channel_whose_other_end_is_closed_sends_bytes():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    memory = LentMemory(1 << 20)
    channel = MemoryChannel(ours, memory)
    channel.offer(b"address")
    assert channel.is_settled
    frames = [b"", numbers(0)]
    assert channel.pack(frames) is frames
    memory.close()
