"""Parameter servers on plain sockets, written by hand: the alternative of `hosts.py`.

    python socket_servers.py listen SECONDS      measures the rate of a link, on one host
    python socket_servers.py ADDRESS SECONDS     the same, on another host

A trainer sends the gradients to each server as one stream, and a server sends the parameters back
as one stream. Both streams consist of the same blocks of 1 MB. A server updates a block (Adam, in
NumPy) when the gradients of all trainers for this block are there. Then it sends the block at once,
so a link carries gradients in one direction and parameters in the other at the same time. There is
no encryption, no check and no recovery. Gradients are added in the order of the trainers.

The two commands print rates of TCP connections, in bytes per second, as JSON lists. The first host
prints the rate at which it receives alone, and the rate while it also sends. The other host prints
only the latter.
"""

from __future__ import annotations

import concurrent.futures
import json
import queue
import socket
import sys
import threading
import time
from collections.abc import Sequence

import numpy as np


BLOCK = 1 << 18  # float32 numbers in a block of 1 MB
RATE, DECAY1, DECAY2, EPSILON = 1e-3, 0.9, 0.999, 1e-8  # Adam, as in optax.adam(1e-3)
PORT = 6300  # of the measurement of a link's rate
PATIENCE = 60.0  # seconds in which a server must begin to listen


# -- sockets ---------------------------------------------------------------------------------------


def connect(address: str, port: int) -> socket.socket:
    """Connect to a server, which may not listen yet."""
    limit = time.monotonic() + PATIENCE
    while True:
        try:
            found = socket.create_connection((address, port))
        except ConnectionRefusedError:
            if time.monotonic() > limit:
                raise
            time.sleep(0.05)
        else:
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return found


def receive_into(source: socket.socket, array: np.ndarray) -> bool:
    """Fill an array; return False if the connection ends first."""
    rest = memoryview(array).cast("B")
    while rest:
        count = source.recv_into(rest)
        if not count:
            return False
        rest = rest[count:]
    return True


# -- a server --------------------------------------------------------------------------------------


class SocketServer:
    """Server of some rows of each parameter.

    Args:
      params: the rows, one array after the other, as one vector.
      trainers: number of trainers.
    """

    def __init__(self, params: np.ndarray, trainers: int) -> None:
        self.params, self.trainers = params, trainers
        self.mean, self.square = np.zeros_like(params), np.zeros_like(params)
        self.gradients = np.empty((trainers, params.size), params.dtype)
        starts = range(0, params.size, BLOCK)
        self.blocks = [slice(start, min(start + BLOCK, params.size)) for start in starts]
        self.arrived = [0] * len(self.blocks)  # gradients of this step, for each block
        self.steps = [0] * len(self.blocks)  # updates of each block
        self.updated = [queue.SimpleQueue() for _ in range(trainers)]  # blocks to send
        # One lock for all blocks: so every trainer gets the blocks in the same order.
        self.lock = threading.Lock()

    def serve(self, address: str, port: int) -> None:
        """Serve until all trainers have closed their connections."""
        threads = []
        with socket.create_server((address, port)) as door:
            for _ in range(self.trainers):
                link, _ = door.accept()
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                number = np.empty(1, np.int32)
                receive_into(link, number)
                for work in (self._receive, self._send):
                    threads.append(threading.Thread(target=work, args=(int(number[0]), link)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _receive(self, trainer: int, link: socket.socket) -> None:
        gradient = self.gradients[trainer]
        number = 0
        while receive_into(link, gradient[self.blocks[number]]):
            with self.lock:
                self.arrived[number] += 1
                if self.arrived[number] == self.trainers:
                    self.update(number)
                    for blocks in self.updated:
                        blocks.put(number)
            number = (number + 1) % len(self.blocks)
        self.updated[trainer].put(None)

    def _send(self, trainer: int, link: socket.socket) -> None:
        with link:
            while (number := self.updated[trainer].get()) is not None:
                link.sendall(self.params[self.blocks[number]])

    def update(self, number: int) -> None:
        """Update a block with Adam, in place."""
        block = self.blocks[number]
        self.arrived[number] = 0
        self.steps[number] += 1
        params, mean, square = self.params[block], self.mean[block], self.square[block]
        gradient = self.gradients[0, block]
        for other in self.gradients[1:, block]:
            gradient += other
        gradient /= self.trainers
        mean *= DECAY1
        mean += (1 - DECAY1) * gradient
        gradient *= gradient
        gradient *= 1 - DECAY2
        square *= DECAY2
        square += gradient
        root = np.sqrt(square / (1 - DECAY2 ** self.steps[number]))
        root += EPSILON
        np.divide(mean, root, out=root)
        root *= RATE / (1 - DECAY1 ** self.steps[number])
        params -= root


# -- a trainer -------------------------------------------------------------------------------------


def rows_of_server(arrays: Sequence[np.ndarray], server: int, servers: int) -> list[np.ndarray]:
    """Return the rows of a server, as views of the arrays."""
    parts = [np.array_split(array, servers)[server] for array in arrays]
    return [part for part in parts if part.size]


class SocketTrainer:
    """Connections of one trainer to all servers; a context manager.

    Args:
      endpoints: (address, port) of each server.
      trainer: index of this trainer.
    """

    def __init__(self, endpoints: Sequence[tuple[str, int]], trainer: int) -> None:
        self.links = [connect(*endpoint) for endpoint in endpoints]
        for link in self.links:
            link.sendall(np.int32([trainer]))
        self.threads = concurrent.futures.ThreadPoolExecutor(2 * len(self.links))

    def exchange(self, gradients: Sequence[np.ndarray], params: Sequence[np.ndarray]) -> None:
        """Send the gradients of a step, and write the updated parameters into `params`."""
        count, work = len(self.links), []
        for server, link in enumerate(self.links):
            sent = rows_of_server(gradients, server, count)
            received = rows_of_server(params, server, count)
            work.append(self.threads.submit(self._send, link, sent))
            work.append(self.threads.submit(self._receive, link, received))
        for each in work:
            each.result()

    def _send(self, link: socket.socket, arrays: Sequence[np.ndarray]) -> None:
        for array in arrays:
            link.sendall(np.ascontiguousarray(array))

    def _receive(self, link: socket.socket, arrays: Sequence[np.ndarray]) -> None:
        for array in arrays:
            if not receive_into(link, array):
                raise ConnectionError("a server has closed its connection")

    def __enter__(self) -> SocketTrainer:
        return self

    def __exit__(self, *error: object) -> None:
        for link in self.links:
            link.close()
        self.threads.shutdown()


# -- the rate of a link ----------------------------------------------------------------------------


def send_for(link: socket.socket, seconds: float) -> None:
    """Send zeros, then close this direction."""
    data, limit = bytes(1 << 20), time.monotonic() + seconds
    while time.monotonic() < limit:
        link.sendall(data)
    link.shutdown(socket.SHUT_WR)


def received_rate(link: socket.socket) -> float:
    """Return the bytes per second that arrive, from the first byte to the end of the stream."""
    buffer, total = bytearray(1 << 20), link.recv_into(bytearray(1))
    begun = time.monotonic()
    while count := link.recv_into(buffer):
        total += count
    return total / (time.monotonic() - begun)


def both_ways(link: socket.socket, seconds: float) -> float:
    """Send and receive at the same time; return the rate at which bytes arrive."""
    sender = threading.Thread(target=send_for, args=(link, seconds))
    sender.start()
    found = received_rate(link)
    sender.join()
    return found


def answer(seconds: float) -> list[float]:
    """Accept one connection that only receives, then one that also sends."""
    with socket.create_server(("", PORT)) as door:
        print("ready", flush=True)
        with door.accept()[0] as link:
            one_way = received_rate(link)
        with door.accept()[0] as link:
            return [one_way, both_ways(link, seconds)]


def ask(address: str, seconds: float) -> list[float]:
    """Connect twice: to send only, then to send and receive."""
    with connect(address, PORT) as link:
        send_for(link, seconds)
        link.recv(1)  # until the other host has received everything
    with connect(address, PORT) as link:
        return [both_ways(link, seconds)]


if __name__ == "__main__":
    where, seconds = sys.argv[1], float(sys.argv[2])
    print(json.dumps(answer(seconds) if where == "listen" else ask(where, seconds)), flush=True)
