"""Control connections: accepts, reads, writes and counts them. Knows frames and messages; decides nothing.

Each connection has a task that reads and a task that writes, so a slow peer delays nobody else. What waits to be written is
bounded by the protocol: no worker is ever more than one plan ahead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import get_args

from coordinator.events import Event, MessageReceived, Peer, PeerDisconnected
from pipecomp.errors import RemoteProtocolError, TransportClosed, TransportError
from pipecomp.protocol import wire
from pipecomp.protocol.messages import ControlMessage, Traffic
from pipecomp.transport.base import Connection, Listener
from pipecomp.types import Kind

_CONTROL = get_args(ControlMessage)
_LAST_WORDS_S = 1.0


class _Line:
    """One connection and what waits to be written to it; None ends it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.outgoing: asyncio.Queue[list[wire.Buffer] | None] = asyncio.Queue()


class Peers:
    """All control connections of a run. `on_event` is called in the loop and must not block."""

    def __init__(self, listener: Listener, on_event: Callable[[Event], None]) -> None:
        self._listener = listener
        self._on_event = on_event
        self._lines: dict[Peer, _Line] = {}
        self._readers: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.Task[None]] = set()
        self._next_peer = 0
        self._messages = 0
        self._header_nbytes = 0
        self._payload_nbytes = 0

    async def accept(self) -> None:
        """Let connections in until the listener is closed."""
        while True:
            try:
                connection = await self._listener.accept()
            except TransportClosed:
                return
            peer, line = Peer(self._next_peer), _Line(connection)
            self._next_peer += 1
            self._lines[peer] = line
            _keep(self._readers, asyncio.create_task(self._read(peer, line), name=f"read {peer}"))
            _keep(self._writers, asyncio.create_task(self._write(peer, line), name=f"write {peer}"))

    def send(self, peers: Sequence[Peer], message: ControlMessage, buffers: Sequence[wire.Buffer] = ()) -> None:
        """Queue one message for some peers; those that are gone are left out. Encoded once."""
        lines = [self._lines[peer] for peer in peers if peer in self._lines]
        if not lines:
            return
        frames = wire.encode(message, buffers)
        for line in lines:
            line.outgoing.put_nowait(frames)

    def disconnect(self, peer: Peer) -> None:
        """Close once everything queued is written."""
        line = self._lines.pop(peer, None)
        if line is not None:
            line.outgoing.put_nowait(None)

    def traffic(self) -> Traffic:
        """Both directions of all control connections. They carry no tensors: `values` is 0."""
        return Traffic(
            link="control",
            kind=Kind.CONTROL,
            values=0,
            payload_nbytes=self._payload_nbytes,
            header_nbytes=self._header_nbytes,
            messages=self._messages,
        )

    async def close(self) -> None:
        """Give what is queued a moment to leave, then close everything."""
        for peer in list(self._lines):
            self.disconnect(peer)
        if self._writers:
            await asyncio.wait(self._writers, timeout=_LAST_WORDS_S)
        tasks = [*self._readers, *self._writers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._listener.close()

    async def _read(self, peer: Peer, line: _Line) -> None:
        try:
            while True:
                received = wire.decode(await line.connection.receive())
                self._count(received.header_nbytes, received.payload_nbytes)
                if not isinstance(received.message, _CONTROL):
                    raise RemoteProtocolError(f"{type(received.message).__name__} came over a control connection")
                self._on_event(MessageReceived(peer, received.message, received.buffers))
        except (TransportError, RemoteProtocolError) as error:
            self._lost(peer, str(error))
            line.outgoing.put_nowait(None)

    async def _write(self, peer: Peer, line: _Line) -> None:
        try:
            while (frames := await line.outgoing.get()) is not None:
                await line.connection.send(frames)
                header, *buffers = (memoryview(frame).nbytes for frame in frames)
                self._count(header, sum(buffers))
        except TransportError as error:
            self._lost(peer, str(error))
        await line.connection.close(linger_s=_LAST_WORDS_S)

    def _lost(self, peer: Peer, reason: str) -> None:
        if self._lines.pop(peer, None) is not None:
            self._on_event(PeerDisconnected(peer, reason))

    def _count(self, header_nbytes: int, payload_nbytes: int) -> None:
        self._messages += 1
        self._header_nbytes += header_nbytes
        self._payload_nbytes += payload_nbytes


def _keep(tasks: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
    tasks.add(task)
    task.add_done_callback(tasks.discard)
