"""Shared memory of this process and one other process of the host: agreement, and frames.

A listener with a Unix socket for messages (`zmq_transport`) also has a Unix socket for descriptors
of memory files (`shared_memory`). A process that connects to the first one also connects to the
second one. Each of the two processes proves that it sees the memory of the other one:

    link to listener    its ZeroMQ id, and its memory file
    listener to link    the random word in the link's memory, and the listener's memory file
    link to listener    the random word in the listener's memory

The listener accepts only the id of a process that ZeroMQ has authenticated, and the kernel reports
the user of the other process. If a step fails, the processes continue with bytes in messages.

From then on, a message with large frames begins with a frame of their places. The other frames
follow. The receiver replaces the places by the memory there. So nothing else changes: messages have
the same order, numbers and checks. On the second socket, the two processes only report the frames
that they have released.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from dtrans.errors import WireError
from dtrans.protocol import wire
from dtrans.run.net.shared_memory import LentMemory, PeerMemory, SentFrames


log = logging.getLogger(__name__)
DOOR = "memory"  # name of the socket for descriptors, in the folder of the socket for messages
BACKLOG = 4096  # connections that wait while the listener's process computes
LEAST = 64 << 10  # bytes of the smallest frame in shared memory; a smaller one costs less as bytes
LARGEST = 256  # bytes of the largest message of the agreement
IS_AVAILABLE = hasattr(os, "memfd_create")  # Linux


def open_door(local: str) -> socket.socket | None:
    """Listen for processes that ask for shared memory; return None if the system has none.

    Args:
      local: path of the listener's Unix socket for messages.
    """
    if not IS_AVAILABLE:
        return None
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door.bind(str(Path(local).with_name(DOOR)))
    door.listen(BACKLOG)
    door.setblocking(False)
    return door


def knock(local: str) -> socket.socket | None:
    """Connect to the socket for descriptors of another process; None if no process listens there.

    In a shared folder, the path also exists on other hosts, where no process listens.

    Args:
      local: path of the other process's Unix socket for messages.
    """
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.setblocking(False)
    try:
        line.connect(str(Path(local).with_name(DOOR)))
    except OSError:
        line.close()
        return None
    return line


class MemoryChannel:
    """Shared memory of this process and one other process, in both directions.

    Args:
      line: connected socket for descriptors.
      lent: memory of this process.

    Attributes:
      address: ZeroMQ id of the process that connects; empty before it is known.
      is_settled: True if the agreement has ended, with or without shared memory.
      may_send: True if the other process sees this process's memory.
    """

    def __init__(self, line: socket.socket, lent: LentMemory) -> None:
        self.address = b""
        self.is_settled = self.may_send = False
        self._line, self._lent = line, lent
        self.file_number = line.fileno()
        self._sent = SentFrames(line)
        self._peer: PeerMemory | None = None
        line.setblocking(False)

    # -- agreement -------------------------------------------------------------------------------

    def offer(self, address: bytes) -> None:
        """Send the listener this process's ZeroMQ id, and its memory file."""
        self.address = address
        try:
            socket.send_fds(self._line, [address], [self._lent.file])
        except OSError as e:
            self._refuse(e)

    def take(self, members: set[bytes] | None = None) -> None:
        """Handle a message of the agreement.

        Args:
          members: at a listener, the ids of the processes that ZeroMQ has authenticated.
        """
        try:
            self._take(members)
        except OSError as e:
            self._refuse(e)

    def _take(self, members: set[bytes] | None) -> None:
        word, files, _, _ = socket.recv_fds(self._line, LARGEST, 1, socket.MSG_CMSG_CLOEXEC)
        try:
            if not word:
                raise OSError("the other process has closed its socket")
            _check_user(self._line)
            if members is not None and not self.address:
                if word not in members:
                    raise OSError("the other process is not authenticated")
                self.address = word
            elif word != self._lent.nonce:
                raise OSError("the other process does not see the memory of this process")
            else:
                self.may_send = True
            if self._peer is None:
                self._map(files)
        finally:
            for file in files:
                os.close(file)
        if self.may_send:
            self.is_settled = True
            self._lent.add_reader(self._sent)
            log.info("arrays use shared memory with another process of this host")

    def _map(self, files: Sequence[int]) -> None:
        """Map the memory of the other process, and send the random word there."""
        if not files:
            raise OSError("the other process has sent no memory file")
        self._peer = PeerMemory(files[0], self._line)
        sent = [] if self.may_send else [self._lent.file]  # `offer` has sent a link's file
        socket.send_fds(self._line, [self._peer.nonce], sent)

    def _refuse(self, why: OSError) -> None:
        log.info("no shared memory with another process of this host: %s", why)
        self.is_settled, self.may_send, self._peer = True, False, None
        self._line.close()

    # -- frames ----------------------------------------------------------------------------------

    def pack(self, frames: Sequence[Any]) -> Sequence[Any]:
        """Return the frames to send for a message: large ones are replaced by their places."""
        self.report()
        if not self.may_send:
            return frames
        places, rest = [], []
        for i, frame in enumerate(frames):
            found = None
            if isinstance(frame, np.ndarray) and frame.nbytes >= LEAST:
                found = self._lent.lend(frame)
            if found is None:
                rest.append(frame)
                continue
            slot, start = found
            self._sent.add(slot)
            places.append([i, slot.start, start, frame.nbytes, slot.start + slot.nbytes])
        if not places:
            return frames
        return [wire.PLACES + msgpack.packb(places), *rest]

    def unpack(self, frames: Sequence[Any]) -> list[Any]:
        """Return the frames of a message that was received with places.

        Raises:
          WireError: the places are malformed, or not within the other process's memory.
        """
        if self._peer is None:
            raise WireError("a message with places in shared memory, which was not agreed on")
        try:
            places: Any = msgpack.unpackb(memoryview(frames[0].buffer)[len(wire.PLACES) :])
        except (ValueError, msgpack.UnpackException) as e:
            raise WireError(f"places in shared memory that are not msgpack ({e})") from e
        rest = list(frames[1:])
        for index, *place in _checked_places(places):
            rest.insert(index, self._peer.frame(*place))
        return rest

    def report(self) -> None:
        """Tell the other process which of its frames this process has released."""
        if self._peer is not None:
            self._peer.report()

    def lose(self) -> None:
        """Send no more frames, as the connection for messages has ended.

        The slots of earlier frames stay in use until the other process has closed its socket: it
        may only have been stopped, and still read them.
        """
        self.may_send = False
        self.report()

    def has_ended(self) -> bool:
        """Return True if the other process has closed its socket: it reads no frame any more."""
        return not self._sent.collect()

    def close(self) -> None:
        """End the channel. The socket stays open while this process reads the other's memory."""
        self.lose()
        if self._peer is None:
            self._line.close()
        else:
            self._peer.close()


def _checked_places(places: Any) -> list[list[int]]:
    """Return received places; raise WireError if one is not [index, slot, start, nbytes, end]."""
    found = places if isinstance(places, list) else [places]
    for place in found:
        is_list = isinstance(place, list) and len(place) == 5
        if not is_list or not all(type(n) is int for n in place):
            raise WireError(f"an invalid place in shared memory: {wire.brief(place)}")
    return found


def _check_user(line: socket.socket) -> None:
    """Raise OSError if the other process belongs to another user."""
    found = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", found)
    if user != os.geteuid():
        raise OSError(f"the other process belongs to user {user}")
