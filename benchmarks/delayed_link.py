"""Process that forwards TCP connections with a delay.

    python delayed_link.py SECONDS HERE,ENDPOINTS THERE,ENDPOINTS

The process listens on the endpoints HERE. It forwards a connection to the first of them to the
first of THERE, and so on. Bytes arrive SECONDS later, in both directions. The rate is not limited.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys


async def passed_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float
) -> None:
    """Forward bytes `delay` seconds after they arrive, until the connection ends."""
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
    """Listen on the endpoint `here`, and forward its connections to `there`."""

    async def joined(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = there.split(":")
        try:
            back, out = await asyncio.open_connection(host, int(port))
        except OSError:  # the server does not listen yet; the client will try again
            writer.close()
            return
        await asyncio.gather(passed_on(reader, out, delay), passed_on(back, writer, delay))
        for end in (out, writer):
            end.close()

    host, port = here.split(":")
    async with await asyncio.start_server(joined, host, int(port)) as server:
        await server.serve_forever()


async def main() -> None:
    """Forward between the endpoints of the command line."""
    delay, here, there = sys.argv[1:]
    pairs = zip(here.split(","), there.split(","), strict=True)
    await asyncio.gather(*(serve(float(delay), a, b) for a, b in pairs))


if __name__ == "__main__":
    asyncio.run(main())
