"""Connections over ZeroMQ and TCP: `tcp://HOST:PORT`, `tcp://[IPV6]:PORT`. Knows sockets and frames; no messages or links.

A listener is one bound ROUTER; each dial is a fresh DEALER with a fresh random routing id. No socket here waits or drops:
high-water marks are 0 (the link's credit bounds what is queued), mandatory routing makes a missing peer an error, ZeroMQ's
own reconnecting is off (the link dials again, so that it knows what to send again), and nothing lingers unless asked.

How each end notices that the other is gone:

    dialling end    the monitor's DISCONNECTED event, or the farewell that the listening end sends when it closes
                    one connection, which a ROUTER cannot do by itself
    listening end   the monitor's DISCONNECTED event names a file descriptor, and so does each frame received (SRCFD);
                    a routing id belongs to the latest connection accepted on its descriptor
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import errno
import secrets
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import zmq
from zmq.utils.monitor import parse_monitor_message

from pipecomp.errors import AddressError, PeerLost, TransportClosed, TransportError
from pipecomp.transport._tcp_address import NO_CONNECTION, Endpoint, endpoint_text, parse_address, resolve, why_not
from pipecomp.transport._zeromq_socket import SocketPump, bound_unsent
from pipecomp.transport.base import Address, Connection, Frame, Listener, Transport

_FAREWELL = b"pipecomp: this end has closed the connection \x91\x1f\xa0"
_RETRY_S = 0.05
_UNBIND_S = 1.0
_HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


_VANISHED = (
    (zmq.TCP_KEEPALIVE, 1),
    (zmq.TCP_KEEPALIVE_IDLE, 15),
    (zmq.TCP_KEEPALIVE_INTVL, 5),
    (zmq.TCP_MAXRT, 5000),
    (zmq.HEARTBEAT_IVL, 30_000),
    (zmq.HEARTBEAT_TIMEOUT, 300_000),
)
"""A host that vanished is found by the control session's heartbeats. A path between two hosts that the coordinator still
hears is found here: the kernel gives a connection up whose bytes are not acknowledged for five seconds, however large the
message and slow the link; something between that acknowledges and passes nothing on is found by ZeroMQ's own pings, which
wait behind whole frames and must be patient."""


def _prepare(socket: zmq.Socket[bytes], endpoint: Endpoint) -> None:
    """What the kernel queues is bounded once there is a connection: see `bound_unsent`."""
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, int(":" in endpoint.host))
    for option, value in _VANISHED:
        socket.setsockopt(option, value)


class _Monitor:
    """Calls `on_event(event, value)` for what ZeroMQ's own thread reports of a socket."""

    def __init__(self, socket: zmq.Socket[bytes], events: int, on_event: Callable[[int, int], None]) -> None:
        self._socket = socket
        self._on_event = on_event
        name = f"inproc://monitor-{id(socket):x}-{secrets.token_hex(8)}"
        socket.monitor(name, events)
        reports = socket.context.socket(zmq.PAIR)
        reports.setsockopt(zmq.RCVHWM, 0)  # a full queue would hold up ZeroMQ's thread, and with it every socket
        reports.connect(name)
        self._pump = SocketPump(reports, self._parse, lambda: None)

    def read(self) -> None:
        """Hand over what was reported up to now."""
        self._pump.read()

    def close(self) -> None:
        self._socket.disable_monitor()  # first: ZeroMQ's thread would wait for a reader that is gone
        self._pump.close(0)

    def _parse(self, frames: list[zmq.Frame]) -> None:
        report = parse_monitor_message([f.bytes for f in frames])
        self._on_event(int(report["event"]), int(report["value"]))


class ZeromqConnection(Connection):
    """One end of a connection, over a socket of its own (dialling end) or one that it shares (listening end)."""

    def __init__(self, peer: str, put: Callable[[Sequence[Frame]], None], leave: Callable[[float], None]) -> None:
        """`put` queues a message or raises PeerLost; `leave(linger_s)` frees what the connection uses."""
        self.peer = peer
        self.nbytes_sent = 0
        self.nbytes_received = 0
        self._put = put
        self._leave = leave
        self._queue: collections.deque[list[memoryview]] = collections.deque()
        self._changed = asyncio.Event()
        self._lost = ""
        self._closed = False

    def deliver(self, frames: Sequence[zmq.Frame]) -> None:
        """A message came from the socket."""
        if not self._closed:
            self._queue.append([f.buffer for f in frames])
            self._changed.set()

    def lose(self, reason: str) -> None:
        """The other end is gone; what came before can still be received."""
        self._lost = self._lost or reason
        self._changed.set()

    async def send(self, frames: Sequence[Frame]) -> None:
        self._check_open()
        try:
            self._put(frames)
        except PeerLost as e:
            self.lose(str(e))
            self._check_open()
        self.nbytes_sent += sum(memoryview(f).nbytes for f in frames)

    async def receive(self) -> list[memoryview]:
        while self._closed or not self._queue:
            self._check_open()
            self._changed.clear()
            await self._changed.wait()
        frames = self._queue.popleft()
        self.nbytes_received += sum(f.nbytes for f in frames)
        return frames

    async def close(self, *, linger_s: float = 0.0) -> None:
        if self._closed:
            return
        self._closed = True
        self._queue.clear()
        self._changed.set()
        self._leave(linger_s)

    def _check_open(self) -> None:
        if self._closed:
            raise TransportClosed(f"the connection to {self.peer} was closed here")
        if self._lost:
            raise PeerLost(f"{self.peer} is gone: {self._lost}")


class _Dialler:
    """A DEALER on its way to become a connection."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: Endpoint, address: Address, timeout_s: float
    ) -> None:
        self.outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Empty when the handshake is done, else why it is not."""
        socket = context.socket(zmq.DEALER)
        _prepare(socket, endpoint)
        # Never zero at the front: ZeroMQ keeps those names for itself.
        socket.setsockopt(zmq.ROUTING_ID, b"\x01" + secrets.token_bytes(15))
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        for option in (zmq.CONNECT_TIMEOUT, zmq.HANDSHAKE_IVL):
            socket.setsockopt(option, max(1, round(1000 * timeout_s)))
        self.connection = ZeromqConnection(address, self._put, self.leave)
        events = zmq.EVENT_CONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        events |= _HANDSHAKE_FAILURES
        self._monitor = _Monitor(socket, events, self._happened)
        self._ending = ""
        self._pump = SocketPump(socket, self._came, self._idle)
        socket.connect(endpoint_text(endpoint))

    def leave(self, linger_s: float) -> None:
        self._monitor.close()
        self._pump.close(linger_s)

    def _put(self, frames: Sequence[Frame]) -> None:
        try:
            self._pump.send(frames)
        except zmq.Again:
            raise PeerLost("the connection was lost") from None
        except zmq.ZMQError as e:
            raise PeerLost(e.strerror or str(e)) from e

    def _came(self, frames: list[zmq.Frame]) -> None:
        if len(frames) == 1 and len(frames[0]) == len(_FAREWELL) and frames[0].bytes == _FAREWELL:
            self.connection.lose("the other end closed the connection")
        else:
            self.connection.deliver(frames)

    def _happened(self, event: int, value: int) -> None:
        if event == zmq.EVENT_CONNECTED:
            bound_unsent(value)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._conclude("")
        elif event & _HANDSHAKE_FAILURES:
            self._conclude("something else than pipecomp listens there")
        elif not self.outcome.done():
            self._conclude(
                NO_CONNECTION if event == zmq.EVENT_CLOSED else "it closed the connection before saying hello"
            )
        else:
            self._ending = "the connection was lost"
            self._pump.read_soon()  # what came before the end is read first

    def _idle(self) -> None:
        if self._ending:
            self.connection.lose(self._ending)

    def _conclude(self, outcome: str) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)


class ZeromqListener(Listener):
    """A bound ROUTER, whose peers are told apart by routing id."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: Endpoint, asked: Address) -> None:
        socket = context.socket(zmq.ROUTER)
        _prepare(socket, endpoint)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            socket.bind(endpoint_text(endpoint))
        except zmq.ZMQError as e:
            socket.close(0)
            raise AddressError(f"cannot listen at {asked}: {_bind_reason(e)}") from e
        port = socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        self.address = Address(endpoint_text(Endpoint(parse_address(asked).host, int(port))))
        self._by_id: dict[bytes, ZeromqConnection | None] = {}  # None: closed here, its end not heard of yet
        self._by_descriptor: dict[int, bytes] = {}
        self._ending: list[bytes] = []
        self._arrived: collections.deque[ZeromqConnection] = collections.deque()
        self._changed = asyncio.Event()
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._linger_until = 0.0
        self._socket = socket
        self._unbound = asyncio.Event()
        self._left = asyncio.Event()
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        self._monitor = _Monitor(socket, events, self._happened)
        self._pump = SocketPump(socket, self._came, self._idle)

    async def accept(self) -> Connection:
        while not self._closed and not self._arrived:
            self._changed.clear()
            await self._changed.wait()
        if self._closed:
            raise TransportClosed(f"{self.address} is no longer listened to")
        return self._arrived.popleft()

    async def close(self) -> None:
        if self._closed:
            return
        for connection in list(self._by_id.values()):
            if connection is not None:
                await connection.close()
        self._closed = True
        self._changed.set()
        await self._see_them_leave()
        await self._stop_listening()
        self._monitor.close()
        self._pump.close(0.0)

    async def _see_them_leave(self) -> None:
        """ZeroMQ drops what is queued for a port's connections along with the port, whatever LINGER says. So those who were
        told to go get their time to hear it, and all that was said before it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._linger_until):
                while self._by_id:
                    self._left.clear()
                    await self._left.wait()

    async def _stop_listening(self) -> None:
        """ZeroMQ's own thread closes the port; once it is done, nobody is let in any more and the port is free."""
        with contextlib.suppress(zmq.ZMQError, TimeoutError):
            self._socket.unbind(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
            async with asyncio.timeout(_UNBIND_S):
                await self._unbound.wait()

    def _came(self, frames: list[zmq.Frame]) -> None:
        routing_id = frames[0].bytes
        if routing_id not in self._by_id:
            try:
                self._welcome(routing_id, frames[0])
            except zmq.ZMQError:  # it was gone before ZeroMQ could ask who it is; nobody could be answered
                return
        connection = self._by_id[routing_id]
        if connection is not None:
            connection.deliver(frames[1:])

    def _welcome(self, routing_id: bytes, frame: zmq.Frame) -> None:
        """First message of a new peer."""
        self._monitor.read()  # so that its descriptor is not taken for that of an earlier connection
        descriptor = int(frame.get(zmq.SRCFD))
        peer = f"{frame.get('Peer-Address')} (dialled {self.address})"
        self._end(descriptor)
        self._by_descriptor[descriptor] = routing_id
        connection = ZeromqConnection(
            peer, lambda frames: self._put(routing_id, frames), lambda linger_s: self._leave(routing_id, linger_s)
        )
        self._by_id[routing_id] = connection
        self._arrived.append(connection)
        self._changed.set()

    def _happened(self, event: int, descriptor: int) -> None:
        if event == zmq.EVENT_CLOSED:
            self._unbound.set()
            return
        if event == zmq.EVENT_ACCEPTED:
            bound_unsent(descriptor)
        # ACCEPTED too: whoever had this descriptor before is gone.
        self._end(descriptor)
        self._pump.read_soon()

    def _end(self, descriptor: int) -> None:
        routing_id = self._by_descriptor.pop(descriptor, None)
        if routing_id is not None:
            self._ending.append(routing_id)

    def _idle(self) -> None:
        """All that came is read: now those whose connection ended are lost."""
        ending, self._ending = self._ending, []
        for routing_id in ending:
            connection = self._by_id.pop(routing_id, None)
            self._left.set()
            if connection is not None:
                connection.lose("the connection was lost")

    def _put(self, routing_id: bytes, frames: Sequence[Frame]) -> None:
        try:
            self._pump.send([routing_id, *frames])
        except zmq.ZMQError as e:
            raise PeerLost("the connection was lost" if e.errno == zmq.EHOSTUNREACH else str(e)) from e

    def _leave(self, routing_id: bytes, linger_s: float) -> None:
        """A ROUTER cannot close one peer, so the peer is asked to: after all that is queued for it."""
        if routing_id in self._by_id:
            self._by_id[routing_id] = None
            with contextlib.suppress(PeerLost):
                self._put(routing_id, [_FAREWELL])
        self._linger_until = max(self._linger_until, self._loop.time() + linger_s)


def _bind_reason(error: zmq.ZMQError) -> str:
    reasons = {
        errno.EADDRINUSE: "the port is in use: choose another, or port 0 for any",
        errno.EADDRNOTAVAIL: "this machine has no such address",
        errno.ENODEV: "this machine has no such address",
        errno.EACCES: "ports below 1024 need more rights",
    }
    return reasons.get(error.errno or 0, error.strerror or str(error))


class ZeromqTransport(Transport):
    """ZeroMQ sockets of one process; its context is made when the first one is needed."""

    any_address: ClassVar[Address] = Address("tcp://127.0.0.1:0")

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._closed = False
        self._made: weakref.WeakSet[Connection | Listener] = weakref.WeakSet()

    async def listen(self, address: Address) -> Listener:
        endpoint, *_ = await resolve(address)
        listener = ZeromqListener(self._zeromq(), endpoint, address)
        self._made.add(listener)
        return listener

    async def dial(self, address: Address, *, timeout_s: float) -> Connection:
        last: TransportError | None = None
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        return await self._dial_once(address, timeout_s)
                    except (PeerLost, AddressError) as e:
                        parse_address(address)
                        last = e
                    await asyncio.sleep(_RETRY_S)
        except TimeoutError:
            if isinstance(last, AddressError):
                raise last from None
            reason = str(last) if last is not None else "nothing answered"
            raise PeerLost(f"cannot reach {address} within {timeout_s:g} s: {reason}") from last

    async def close(self) -> None:
        self._closed = True
        for made in list(self._made):
            await made.close()
        self._made.clear()
        if self._context is not None:
            # Waits for what lingers, so not in the loop's thread.
            with ThreadPoolExecutor(1, thread_name_prefix="zeromq") as pool:
                await asyncio.get_running_loop().run_in_executor(pool, self._context.term)
            self._context = None

    def _zeromq(self) -> zmq.Context[zmq.Socket[bytes]]:
        if self._closed:
            raise TransportClosed("the transport was closed here")
        if self._context is None:
            self._context = zmq.Context()
        return self._context

    async def _dial_once(self, address: Address, timeout_s: float) -> Connection:
        """Try each numeric endpoint once."""
        reasons = []
        for endpoint in await resolve(address):
            dialler = _Dialler(self._zeromq(), endpoint, address, timeout_s)
            try:
                reason = await dialler.outcome
            except BaseException:
                await dialler.connection.close()
                raise
            if not reason:
                self._made.add(dialler.connection)
                return dialler.connection
            await dialler.connection.close()
            reasons.append(await why_not(endpoint) if reason == NO_CONNECTION else reason)
        raise PeerLost(", ".join(dict.fromkeys(reasons)))


PLUGIN = ZeromqTransport
