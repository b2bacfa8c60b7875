"""Memory that processes of one host share, in place of bytes in the messages between them.

    lent memory   memory file of this process. It writes large frames there, and sends their places
    peer memory   memory file of another process, which this process has mapped read-only

A memory file (`memfd`) has no name, so that only a process that receives its descriptor can map it.
The kernel frees it when the last process that has mapped it has ended. It does not count as a file
of /dev/shm.

The file is divided into *slots*. A slot is filled again only when nothing reads it: neither a later
message of this process with the same array, nor another process. The readers report each frame
to which they no longer refer. A JAX array that uses the frame without a copy is such a reference.

Read next: `memory_channel`, which agrees on shared memory with another process.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import itertools
import mmap
import os
import secrets
import socket
import weakref

import numpy as np

from dtrans.errors import WireError
from dtrans.protocol.wire import SharedFrame


NONCE = 32  # bytes of the random word at the start of a memory file
F_SEAL_FUTURE_WRITE = 0x10  # since Linux 5.1; `fcntl` does not name it in all versions of Python
# The size of a memory file never changes, so that no access is after its end. And no other process
# can map the file for writing.
SEALS = 0
if hasattr(os, "memfd_create"):
    SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
STEPS = 8  # sizes of slots between two powers of two


class Slot:
    """Part of a memory file that contains one array, or the parts of the array that were sent.

    Attributes:
      start: position of the slot in the file.
      nbytes: size of the slot.
      lent: number of sent frames in this slot to which other processes may still refer.
      key: id() of the immutable array whose bytes are in the slot; 0 for one frame.
    """

    def __init__(self, start: int, nbytes: int) -> None:
        self.start, self.nbytes, self.lent, self.key = start, nbytes, 0, 0
        # the immutable array whose bytes are in the slot; None if later messages cannot use them
        self._array: weakref.ref[np.ndarray] | None = None
        self._parts: set[tuple[int, int]] = set()  # parts of this array that are in the slot

    @property
    def is_free(self) -> bool:
        """True if nothing reads the slot, so that it may be filled again."""
        return not self.lent and (self._array is None or self._array() is None)

    def contains(self, array: np.ndarray) -> bool:
        """Return True if the slot belongs to an array."""
        return self._array is not None and self._array() is array

    def begin(self, array: np.ndarray | None) -> None:
        """Begin to use the free slot for an immutable array, or for one frame (None)."""
        self._array, self.key = None, 0
        if array is not None:
            self._array, self.key = weakref.ref(array), id(array)
        self._parts.clear()

    def fill(self, memory: np.ndarray, part: np.ndarray, at: int) -> int:
        """Copy a part of the array into the slot, unless it is there; return its place in the file.

        Args:
          memory: the memory file.
          part: bytes of the array.
          at: index of the first byte in the array.
        """
        start = self.start + at
        if (at, part.nbytes) not in self._parts:
            memory[start : start + part.nbytes] = part
            self._parts.add((at, part.nbytes))
        return start


class LentMemory:
    """Memory file of this process, in which other processes of the host read frames.

    An immutable array is written once, also if several messages contain it. So a server writes new
    parameters once for all trainers.

    Args:
      nbytes: size of the file; by default, half of the memory of the host. Only the part that is
        written takes memory.

    Attributes:
      file: descriptor of the file.
      nonce: random word at the start of the file. A process that knows it has mapped the file.

    Raises:
      OSError: the system has no memory files, or refuses the mapping.
    """

    def __init__(self, nbytes: int = 0) -> None:
        self.nbytes = nbytes or os.sysconf("SC_PHYS_PAGES") // 2 * mmap.PAGESIZE
        self.file = os.memfd_create("dtrans", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.file, self.nbytes)
            self._memory = np.frombuffer(mmap.mmap(self.file, self.nbytes), np.uint8)
            fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, SEALS)
        except BaseException:
            os.close(self.file)
            raise
        self.nonce = secrets.token_bytes(NONCE)
        self._memory[:NONCE] = np.frombuffer(self.nonce, np.uint8)
        self._end = mmap.PAGESIZE
        self._slots: dict[int, list[Slot]] = {}  # size -> slots of this size
        self._by_array: dict[int, Slot] = {}  # id() of an immutable array -> its slot
        self._readers: list[SentFrames] = []

    def lend(self, frame: np.ndarray) -> tuple[Slot, int] | None:
        """Write a frame into a slot; return the slot, and the place of the frame in the file.

        The result is None if there is no memory for it.
        """
        array = frame.base if isinstance(frame.base, np.ndarray) else frame
        if array.flags.writeable or not array.flags.c_contiguous:
            slot = self._free_slot(frame.nbytes)
            if slot is None:
                return None
            self._begin(slot, None)
            return slot, slot.fill(self._memory, frame, 0)
        # All parts of an immutable array get one slot. So the receiver finds it in one piece.
        slot = self._by_array.get(id(array))
        if slot is None or not slot.contains(array):
            slot = self._free_slot(array.nbytes)
            if slot is None:
                return None
            self._begin(slot, array)
        return slot, slot.fill(self._memory, frame, frame.ctypes.data - array.ctypes.data)

    def _begin(self, slot: Slot, array: np.ndarray | None) -> None:
        """Begin to use a free slot for an immutable array, or for one frame of another array."""
        if self._by_array.get(slot.key) is slot:
            del self._by_array[slot.key]
        slot.begin(array)
        if array is not None:
            self._by_array[slot.key] = slot

    def _free_slot(self, nbytes: int) -> Slot | None:
        """Return a slot to fill: a used one or a new one; None if the system has no memory."""
        size = _slot_size(nbytes)
        slots = self._slots.setdefault(size, [])
        found = next((slot for slot in slots if slot.is_free), None)
        if found is None:
            for reader in self._readers[:]:
                if not reader.collect():
                    self._readers.remove(reader)
            found = next((slot for slot in slots if slot.is_free), None)
        if found is not None or self._end + size > self.nbytes:
            return found
        # Without this call, the system would end the process by SIGBUS if it has no memory.
        try:
            os.posix_fallocate(self.file, self._end, size)
        except OSError:
            return None
        slots.append(Slot(self._end, size))
        self._end += size
        return slots[-1]

    def add_reader(self, reader: SentFrames) -> None:
        """Let `lend` collect the reports of a process that reads this memory."""
        self._readers.append(reader)

    def close(self) -> None:
        """Close the file. Other processes can still read the frames that they have received."""
        os.close(self.file)


class SentFrames:
    """Frames in the memory of this process to which one other process may still refer.

    Args:
      line: socket on which the other process reports the slots of frames that it has released.
    """

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._slots: dict[int, Slot] = {}
        self._counts: collections.Counter[int] = collections.Counter()

    def add(self, slot: Slot) -> None:
        """Count a frame that is sent to the other process."""
        slot.lent += 1
        self._slots[slot.start] = slot
        self._counts[slot.start] += 1

    def collect(self) -> bool:
        """Read the reports of the other process. Return False if it has closed the socket.

        It closes the socket when it has released all frames, and the kernel does so when it ends.
        """
        while True:
            try:
                report = self._line.recv(1 << 16)
            except BlockingIOError:
                return True
            except OSError:  # the other process has ended, or this process has closed the socket
                report = b""
            if not report:
                break
            for start in np.frombuffer(report[: len(report) // 8 * 8], np.uint64):
                self._release(int(start), 1)
        for start, count in self._counts.items():
            self._release(start, count)
        self._line.close()
        return False

    def _release(self, start: int, count: int) -> None:
        count = min(count, self._counts[start])
        if count:
            self._counts[start] -= count
            self._slots[start].lent -= count


class PeerMemory:
    """Memory file of another process, mapped read-only.

    Args:
      file: descriptor of the file.
      line: socket on which this process reports the slots of the frames that it has released.

    Attributes:
      nonce: the random word at the start of the file.

    Raises:
      OSError: the file cannot be mapped, or the other process could make it shorter.
    """

    def __init__(self, file: int, line: socket.socket) -> None:
        if fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK == 0:
            raise OSError("the memory file may become shorter")
        self.nbytes = os.fstat(file).st_size
        if self.nbytes < NONCE:
            raise OSError("the memory file has no random word")
        self._memory = memoryview(mmap.mmap(file, self.nbytes, prot=mmap.PROT_READ))
        self.nonce = bytes(self._memory[:NONCE])
        self._line = line
        self._numbers = itertools.count()
        self._slots: dict[int, int] = {}  # number of a received frame -> position of its slot
        # Finalizers run in any thread, at any time. So they take no lock, and leave the report
        # to the thread of the transport.
        self._released: collections.deque[int] = collections.deque()
        self._is_closing = False

    def frame(self, slot: int, start: int, nbytes: int, end: int) -> SharedFrame:
        """Return a received frame, without a copy.

        Args:
          slot: position of its slot in the file.
          start: position of the frame.
          nbytes: size of the frame.
          end: end of the slot.

        Raises:
          WireError: the frame is not within its slot, or not within the file.
        """
        if not 0 <= slot <= start <= start + nbytes <= end <= self.nbytes:
            raise WireError(
                f"a frame at bytes {start} to {start + nbytes} of a slot at {slot} to {end} in "
                f"shared memory of {self.nbytes} bytes"
            )
        # Views of an array refer to its base. The base of `rest` is no array, so they refer to
        # `rest`.
        rest = np.frombuffer(self._memory[start:end], np.uint8)
        number = next(self._numbers)
        self._slots[number] = slot
        weakref.finalize(rest, self._release, number).atexit = False
        return SharedFrame(rest[:nbytes], rest)

    def _release(self, number: int) -> None:
        self._released.append(self._slots.pop(number))
        if self._is_closing and not self._slots:
            self._line.close()

    def report(self) -> None:
        """Tell the other process which frames this process has released."""
        if not self._released:
            return
        starts = []
        while self._released:
            starts.append(self._released.popleft())
        try:
            self._line.send(np.array(starts, np.uint64).tobytes())
        except BlockingIOError:  # the other process has not read the earlier reports
            self._released.extend(starts)
        except OSError:  # the other process has ended
            self._released.clear()

    def close(self) -> None:
        """Close the socket as soon as no received frame is used any more."""
        self._is_closing = True
        if not self._slots:
            with contextlib.suppress(OSError):
                self._line.close()


def _slot_size(nbytes: int) -> int:
    """Return the size of a slot for an array: at most an eighth more than the array.

    There are few sizes. So arrays of varying sizes, such as rows of tables, use the same slots.
    """
    step = max(mmap.PAGESIZE, (1 << nbytes.bit_length()) // (2 * STEPS))
    return -(-nbytes // step) * step
