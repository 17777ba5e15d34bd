"""`TcpForwarder`: stands between a client and a server on this host, so that a test can cut their connections without any privilege."""

import asyncio
import socket
import struct
from collections.abc import Coroutine
from contextlib import suppress

CHUNK_NBYTES = 2**16
NO_LINGER = struct.pack("ii", 1, 0)  # close() then sends RST instead of FIN, and drops what was not sent yet


class TcpForwarder:
    """Listens on a port of its own and passes every connection on to `target_port`, which may change; existing connections stay.

    The end of one side is the end of both, once what was said before has been passed on: HTTP needs no half-closed connection.
    """

    def __init__(self) -> None:
        self.target_port = 0
        self.port = 0
        self._server: asyncio.Server | None = None
        self._relays: dict[asyncio.Task[None], tuple[asyncio.StreamWriter, ...]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> int:
        """Reset every connection now, on both sides, in the middle of whatever it carries; new ones are taken as before. How many."""
        for writers in self._relays.values():
            for writer in writers:
                with suppress(OSError):  # it is closed already
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
                writer.transport.abort()
        return len(self._relays)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()
        await asyncio.gather(*self._relays, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._relays[task] = (writer,)
        try:
            there, to_there = await asyncio.open_connection("127.0.0.1", self.target_port)
            self._relays[task] = (writer, to_there)
            await _until_one_ends(_pass_on(reader, to_there), _pass_on(there, writer))
        except OSError:  # nobody listens there: hang up, as the kernel would have
            writer.transport.abort()
        finally:
            for each in self._relays.pop(task):
                each.close()


async def _until_one_ends(*ways: Coroutine[None, None, None]) -> None:
    tasks = [asyncio.ensure_future(way) for way in ways]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):  # reset by one side, or by `cut`
        while data := await reader.read(CHUNK_NBYTES):
            writer.write(data)
            await writer.drain()
