"""Connections inside one process, for tests and for a whole cluster in one loop. Knows queues; opens no socket.

`memory://NAME`; a name that ends in `:0` gets a number of its own. Like a socket, a connection takes a bounded number of bytes
before its sender waits, copies what it carries, and can be cut with all that was queued (`MemoryNetwork.cut`).
"""

from __future__ import annotations

import asyncio
import collections
import weakref
from collections.abc import Callable, Sequence
from typing import ClassVar

from pipecomp.errors import AddressError, PeerLost, TransportClosed
from pipecomp.transport.base import Address, Connection, Frame, Listener, Transport

_SCHEME = "memory://"
QUEUE_NBYTES = 2**20
"""What one direction holds before its sender waits; a single larger message is let through when the queue is empty."""


class MemoryNetwork:
    """What joins the transports of one loop: the names that are listened to, and the connections that are open."""

    def __init__(self) -> None:
        self._listeners: dict[str, MemoryListener] = {}
        self._connections: set[MemoryConnection] = set()
        self._dialling: set[asyncio.Future[None]] = set()
        self._next_number = 1

    def cut(self) -> int:
        """Lose every open connection and what it had queued, as a pulled cable does; listeners stay. Returns how many."""
        ends = list(self._connections)
        for end in ends:
            end.lose("the connection was cut")
        return len(ends) // 2

    def bind(self, address: Address, listener: MemoryListener) -> Address:
        name = _name(address)
        if name.endswith(":0"):
            name = f"{name[:-2]}:{self._next_number}"
            self._next_number += 1
        if name in self._listeners:
            raise AddressError(f"cannot listen at {address}: the name is in use")
        self._listeners[name] = listener
        for waiting in self._dialling:
            if not waiting.done():
                waiting.set_result(None)
        return Address(_SCHEME + name)

    def unbind(self, address: Address) -> None:
        self._listeners.pop(_name(address), None)

    async def connect(self, address: Address, timeout_s: float) -> MemoryConnection:
        name = _name(address)
        try:
            async with asyncio.timeout(timeout_s):
                while name not in self._listeners:
                    await self._next_bind()
        except TimeoutError:
            raise PeerLost(f"cannot reach {address} within {timeout_s:g} s: nobody listens there") from None
        here = MemoryConnection(address, self._connections)
        there = MemoryConnection(f"the one that dialled {address}", self._connections)
        here.join(there)
        there.join(here)
        there.announce = self._listeners[name].announce
        return here

    async def _next_bind(self) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._dialling.add(waiting)
        try:
            await waiting
        finally:
            self._dialling.discard(waiting)


class MemoryConnection(Connection):
    """One end; messages wait in a queue at the receiving end."""

    def __init__(self, peer: str, open_ends: set[MemoryConnection]) -> None:
        self.peer = peer
        self.nbytes_sent = 0
        self.nbytes_received = 0
        self.announce: Callable[[MemoryConnection], None] | None = None
        """Called with this end when its first message comes."""
        self._open_ends = open_ends
        self._queue: collections.deque[list[bytes]] = collections.deque()
        self._queue_nbytes = 0
        self._changed = asyncio.Event()
        self._other: MemoryConnection = self
        self._lost = ""
        self._closed = False

    def join(self, other: MemoryConnection) -> None:
        self._other = other
        self._open_ends.add(self)

    def lose(self, reason: str) -> None:
        """The connection is gone at this end, with what was queued here."""
        self._queue.clear()
        self._peer_left(reason)

    async def send(self, frames: Sequence[Frame]) -> None:
        nbytes = sum(memoryview(f).nbytes for f in frames)
        other = self._other
        while not self._lost and not self._closed and other._queue and other._queue_nbytes + nbytes > QUEUE_NBYTES:
            await self._wait()
        self._check_open()
        other._queue.append([bytes(f) for f in frames])
        other._queue_nbytes += nbytes
        self.nbytes_sent += nbytes
        other._changed.set()
        if other.announce is not None:
            other.announce(other)
            other.announce = None

    async def receive(self) -> list[memoryview]:
        while not self._queue:
            self._check_open()
            await self._wait()
        if self._closed:
            self._check_open()
        frames = self._queue.popleft()
        nbytes = sum(map(len, frames))
        self._queue_nbytes -= nbytes
        self.nbytes_received += nbytes
        self._other._changed.set()
        return [memoryview(f) for f in frames]

    async def close(self, *, linger_s: float = 0.0) -> None:
        if self._closed:
            return
        self._closed = True
        self._queue.clear()
        self._open_ends.discard(self)
        self._changed.set()
        self._other._peer_left("the other end closed the connection")

    def _peer_left(self, reason: str) -> None:
        self._open_ends.discard(self)
        self._lost = self._lost or reason
        self._changed.set()

    def _check_open(self) -> None:
        if self._closed:
            raise TransportClosed(f"the connection to {self.peer} was closed here")
        if self._lost:
            raise PeerLost(f"{self.peer} is gone: {self._lost}")

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class MemoryListener(Listener):
    """A name in the network."""

    def __init__(self, network: MemoryNetwork, address: Address) -> None:
        self._network = network
        self._arrived: collections.deque[MemoryConnection] = collections.deque()
        self._accepted: list[MemoryConnection] = []
        self._changed = asyncio.Event()
        self._closed = False
        self.address = network.bind(address, self)

    def announce(self, connection: MemoryConnection) -> None:
        self._arrived.append(connection)
        self._changed.set()

    async def accept(self) -> Connection:
        while not self._closed and not self._arrived:
            self._changed.clear()
            await self._changed.wait()
        if self._closed:
            raise TransportClosed(f"{self.address} is no longer listened to")
        self._accepted.append(self._arrived.popleft())
        return self._accepted[-1]

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._changed.set()
        self._network.unbind(self.address)
        for connection in (*self._accepted, *self._arrived):
            await connection.close()


class MemoryTransport(Transport):
    """One process's view of a network."""

    any_address: ClassVar[Address] = Address("memory://any:0")

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network
        self._closed = False
        self._made: weakref.WeakSet[Connection | Listener] = weakref.WeakSet()

    async def listen(self, address: Address) -> Listener:
        self._check_open()
        listener = MemoryListener(self._network, address)
        self._made.add(listener)
        return listener

    async def dial(self, address: Address, *, timeout_s: float) -> Connection:
        self._check_open()
        connection = await self._network.connect(address, timeout_s)
        self._made.add(connection)
        return connection

    async def close(self) -> None:
        self._closed = True
        for made in list(self._made):
            await made.close()
        self._made.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise TransportClosed("the transport was closed here")


def _name(address: Address) -> str:
    name = address.removeprefix(_SCHEME)
    if name == address or not name:
        raise AddressError(f"{address!r} is not an in-process address: write memory://NAME")
    return name


PROCESS_NETWORK = MemoryNetwork()


def plugin() -> Transport:
    """A transport on the network that all of this process shares."""
    return MemoryTransport(PROCESS_NETWORK)


PLUGIN = plugin
