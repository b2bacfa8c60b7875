"""A link with a delay, as a process: `python delayed_link.py SECONDS FROM,ENDPOINTS TO,ENDPOINTS`.

Bytes that arrive at an endpoint of FROM leave for its partner in TO SECONDS later, and back. The
link has no limit of bytes a second, and does not interpret them.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys


async def passed_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float
) -> None:
    """Pass on what comes, when it is due."""
    due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
    clock = asyncio.get_running_loop().time

    async def leave() -> None:
        data = b"nothing yet"
        while data:
            at, data = await due.get()
            await asyncio.sleep(max(0.0, at - clock()))
            writer.write(data)
        with contextlib.suppress(OSError):
            writer.write_eof()

    leaving, data = asyncio.create_task(leave()), b"nothing yet"
    while data:
        try:
            data = await reader.read(1 << 20)
        except OSError:
            data = b""
        due.put_nowait((clock() + delay, data))
    await leaving


async def serve(delay: float, here: str, there: str) -> None:
    """Take connections to one endpoint for another."""

    async def joined(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = there.split(":")
        try:
            back, out = await asyncio.open_connection(host, int(port))
        except OSError:  # the server is not there yet: whoever connects tries again
            writer.close()
            return
        await asyncio.gather(passed_on(reader, out, delay), passed_on(back, writer, delay))
        for end in (out, writer):
            end.close()

    host, port = here.split(":")
    async with await asyncio.start_server(joined, host, int(port)) as server:
        await server.serve_forever()


async def main() -> None:
    """Be the link."""
    delay, here, there = sys.argv[1:]
    pairs = zip(here.split(","), there.split(","), strict=True)
    await asyncio.gather(*(serve(float(delay), a, b) for a, b in pairs))


if __name__ == "__main__":
    asyncio.run(main())
