"""A TCP proxy on a free port whose faults a test steers: what a bad network does between a client and a server."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

UP, DOWN = "up", "down"
ALWAYS = 1 << 60
_METHODS = (b"GET ", b"PUT ", b"POST ", b"HEAD ", b"DELETE ")
_BLOCK = 1 << 16
Link = tuple[asyncio.StreamWriter, asyncio.StreamWriter]


@dataclass
class _Fault:
    kind: str
    after: int
    times: int
    seen: int = 0
    event: threading.Event = field(default_factory=threading.Event)


class Proxy:
    """``up`` is from client to server. A fault counts bytes over all connections from the moment it is set."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._faults: dict[str, _Fault] = {}
        self._gates: dict[str, asyncio.Event] = {}
        self._links: set[Link] = set()
        self._answer: tuple[int, bytes] = (0, b"")
        self._rate = 0.0
        self._refusing = 0
        self.fired = 0  # faults that have struck since ``ok``: so that a test knows that it has tested something
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._server = self._run(self._listen())
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def ok(self) -> None:
        """Pass everything on again."""
        self._faults, self._answer, self._rate, self._refusing, self.fired = {}, (0, b""), 0.0, 0, 0
        for gate in self._gates.values():
            self._loop.call_soon_threadsafe(gate.set)

    def refuse(self, times: int = ALWAYS) -> None:
        """Reset the connections there are and the next ``times`` that come."""
        self._refusing = times
        self.cut()

    def cut(self) -> None:
        """Reset the connections there are."""
        self._run(self._cut())

    def reset(self, way: str, after: int, times: int = 1) -> None:
        """Reset the connection that carries byte ``after``; each of ``times`` counts anew."""
        self._faults[way] = _Fault("reset", after, times)

    def flip(self, way: str, after: int, times: int = 1) -> None:
        """Flip a bit of byte ``after``; each of ``times`` counts anew."""
        self._faults[way] = _Fault("flip", after, times)

    def stall(self, way: str, after: int = 0, times: int = ALWAYS) -> None:
        """The connection that carries byte ``after`` passes no more this way, and stays open."""
        self._faults[way] = _Fault("stall", after, times)

    def when(self, way: str, after: int) -> threading.Event:
        """Set once byte ``after`` is through."""
        self._faults[way] = fault = _Fault("tell", after, 1)
        return fault.event

    def answer(self, times: int, status: str = "503 Slow Down", code: str = "SlowDown") -> None:
        """Answer the next ``times`` requests ourselves."""
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>by proxy</Message></Error>"
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n"
        self._answer = times, f"{head}Connection: close\r\n\r\n{body}".encode()

    def limit(self, bytes_per_second: float) -> None:
        """Bandwidth of each connection, each way."""
        self._rate = bytes_per_second

    def close(self) -> None:
        """Let all go."""
        self.ok()
        self.cut()
        self._loop.call_soon_threadsafe(self._server.close)
        self._run(self._drain())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _listen(self) -> asyncio.Server:
        self._gates = {UP: asyncio.Event(), DOWN: asyncio.Event()}
        return await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def _cut(self) -> None:
        for client, server in list(self._links):
            _reset(client)
            _reset(server)

    async def _drain(self) -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        if self._refusing:
            self._refusing, self.fired = self._refusing - 1, self.fired + 1
            return _reset(client)
        try:
            answers, server = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            return _reset(client)
        link = (client, server)
        self._links.add(link)
        try:
            with suppress(asyncio.CancelledError):  # by ``close``
                await asyncio.gather(self._pump(reader, server, UP, link), self._pump(answers, client, DOWN, link))
        finally:
            self._links.discard(link)
            client.close()
            server.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, way: str, link: Link) -> None:
        with suppress(OSError):
            while data := await source.read(_BLOCK):
                if way == UP and self._answer[0] and data.startswith(_METHODS):
                    return await self._reply(data, source, link)
                if self._rate:
                    await asyncio.sleep(len(data) / self._rate)
                whole, data = data, await self._meddle(way, data)
                sink.write(data)
                await sink.drain()
                if len(data) < len(whole):
                    _reset(link[0])
                    return _reset(link[1])
        sink.close()

    async def _meddle(self, way: str, data: bytes) -> bytes:
        """``data`` as it goes on; less of it where the connection is to be reset there."""
        fault = self._faults.get(way)
        if fault is not None and fault.times:
            at, fault.seen = fault.after - fault.seen, fault.seen + len(data)
            if at < len(data):
                fault.times, fault.seen = fault.times - 1, 0
                self.fired += 1
                if fault.kind == "reset":
                    return data[:at]
                if fault.kind == "flip":
                    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
                if fault.kind == "stall":
                    self._gates[way].clear()
                    await self._gates[way].wait()
                fault.event.set()
        return data

    async def _reply(self, request: bytes, source: asyncio.StreamReader, link: Link) -> None:
        times, text = self._answer
        self._answer = times - 1, text
        self.fired += 1
        link[0].write(text.partition(b"<?xml")[0] if request.startswith(b"HEAD ") else text)
        await link[0].drain()
        link[0].write_eof()
        while await source.read(_BLOCK):  # a reset now would take the answer from the client
            pass
        link[1].close()


def _reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@pytest.fixture(scope="session")
def _proxy(seaweed: Any) -> Iterator[Proxy]:
    each = Proxy(seaweed.port)
    yield each
    each.close()


@pytest.fixture
def proxy(_proxy: Proxy) -> Iterator[Proxy]:
    """Before the SeaweedFS of this session; passes everything on until a test tells it otherwise."""
    yield _proxy
    _proxy.cut()  # first: what is held back must not arrive
    _proxy.ok()
