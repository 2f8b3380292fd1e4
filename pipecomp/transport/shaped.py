"""A slow link in user space: a rate and a latency over any other transport. Knows bytes and times; opens nothing itself.

All that one ShapedTransport sends, over whatever connections, leaves through one gate of `rate_nbytes_per_s`. A message goes
through in pieces of about five milliseconds, one piece of each connection in turn, so that a heartbeat does not wait behind a
tensor. It is handed on whole once its last piece has left, and `latency_s` later:

    send A  |--piece--|         |--piece--|                     returns; handed on after the latency
    send B            |--piece--|                               returns
            ------------------------------------> time, at the given rate

When pieces leave is computed from when the last one left, not from when a sleep ended, so late wake-ups do not add up; a gate
that was not used saves up at most `burst_s` of its rate.
"""

from __future__ import annotations

import asyncio
import collections
import weakref
from collections.abc import Sequence
from typing import Protocol

from pipecomp.errors import TransportClosed, TransportError
from pipecomp.transport.base import Address, Connection, Frame, Listener, Transport

_PIECE_S = 0.005
_SMALLEST_PIECE_NBYTES = 1500
_NOT_WORTH_SLEEPING_S = 0.0002


class Clock(Protocol):
    """Time that a test can turn by hand."""

    def now(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class LoopClock:
    """The running loop's own time."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Gate:
    """Lets bytes out at a rate; who waits is served in turn."""

    def __init__(self, rate_nbytes_per_s: float | None, clock: Clock, *, burst_s: float) -> None:
        """`rate_nbytes_per_s` None: at once."""
        self.limit(rate_nbytes_per_s)
        self._clock = clock
        self._burst_s = burst_s
        self._last_departure = float("-inf")

    def limit(self, rate_nbytes_per_s: float | None, latency_s: float = 0.0) -> None:
        """Another rate and latency from the next message on; None: no limit."""
        if rate_nbytes_per_s is not None and not rate_nbytes_per_s > 0:
            raise ValueError(f"a rate is above zero, got {rate_nbytes_per_s}")
        self._rate = rate_nbytes_per_s
        self.latency_s = latency_s

    async def leave(self, nbytes: int) -> None:
        """Return once `nbytes` have left."""
        if self._rate is None:
            return
        piece_nbytes = max(_SMALLEST_PIECE_NBYTES, int(self._rate * _PIECE_S))
        rate = self._rate
        for start in range(0, nbytes, piece_nbytes):
            await self._leave_piece(min(piece_nbytes, nbytes - start) / rate)

    async def _leave_piece(self, duration_s: float) -> None:
        now = self._clock.now()
        self._last_departure = max(self._last_departure, now - self._burst_s) + duration_s
        wait_s = self._last_departure - now
        # Even without a wait the others get their turn.
        await self._clock.sleep(wait_s if wait_s > _NOT_WORTH_SLEEPING_S else 0)


class ShapedConnection(Connection):
    """A connection whose sending goes through a gate; what it receives was shaped by the other end."""

    def __init__(self, inner: Connection, gate: Gate, clock: Clock) -> None:
        self.peer = inner.peer
        self.nbytes_sent = 0
        self._inner = inner
        self._gate = gate
        self._clock = clock
        self._turn = asyncio.Lock()
        self._on_the_way: collections.deque[tuple[float, Sequence[Frame]]] = collections.deque()
        self._carrier: asyncio.Task[None] | None = None
        self._failure: TransportError | None = None
        self._closed = False

    @property
    def nbytes_received(self) -> int:  # type: ignore[override]  # the inner connection counts
        return self._inner.nbytes_received

    async def send(self, frames: Sequence[Frame]) -> None:
        nbytes = sum(memoryview(f).nbytes for f in frames)
        async with self._turn:
            self._check()
            await self._gate.leave(nbytes)
            self._check()
            if self._gate.latency_s == 0 and (self._carrier is None or self._carrier.done()):
                await self._inner.send(frames)
            else:
                self._on_the_way.append((self._clock.now() + self._gate.latency_s, frames))
                if self._carrier is None or self._carrier.done():
                    self._carrier = asyncio.create_task(self._carry())
            self.nbytes_sent += nbytes

    async def receive(self) -> list[memoryview]:
        try:
            return await self._inner.receive()
        except TransportError as e:
            self._failure = e
            raise

    async def close(self, *, linger_s: float = 0.0) -> None:
        if self._closed:
            return
        self._closed = True
        if self._carrier is not None:
            if linger_s:
                await asyncio.wait((self._carrier,), timeout=linger_s)
            self._carrier.cancel()
            await asyncio.gather(self._carrier, return_exceptions=True)
        await self._inner.close(linger_s=linger_s)

    async def _carry(self) -> None:
        """Hand on, in order, what has travelled for long enough."""
        while self._on_the_way:
            arrival, frames = self._on_the_way[0]
            wait_s = arrival - self._clock.now()
            if wait_s > 0:
                await self._clock.sleep(wait_s)
            self._on_the_way.popleft()
            try:
                await self._inner.send(frames)
            except TransportError as e:
                self._failure = e
                self._on_the_way.clear()

    def _check(self) -> None:
        if self._closed:
            raise TransportClosed(f"the connection to {self.peer} was closed here")
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))


class ShapedListener(Listener):
    """Wraps what the inner listener accepts."""

    def __init__(self, inner: Listener, transport: ShapedTransport) -> None:
        self.address = inner.address
        self._inner = inner
        self._transport = transport
        self._accepted: weakref.WeakSet[ShapedConnection] = weakref.WeakSet()

    async def accept(self) -> Connection:
        connection = self._transport.shape(await self._inner.accept())
        self._accepted.add(connection)
        return connection

    async def close(self) -> None:
        for connection in list(self._accepted):
            await connection.close()
        await self._inner.close()


class ShapedTransport(Transport):
    """`inner`, slower. Shapes what this process sends; for both directions both processes shape."""

    def __init__(
        self,
        inner: Transport,
        *,
        rate_nbytes_per_s: float | None,
        latency_s: float = 0.0,
        burst_s: float = 0.02,
        clock: Clock | None = None,
    ) -> None:
        """`latency_s` is one way. `burst_s` makes up for a loop that wakes late; `clock` is the loop's unless a test turns it."""
        self._inner = inner
        self._clock = clock if clock is not None else LoopClock()
        self._gate = Gate(rate_nbytes_per_s, self._clock, burst_s=burst_s)
        self._gate.limit(rate_nbytes_per_s, latency_s)
        self._made: weakref.WeakSet[ShapedConnection] = weakref.WeakSet()

    def limit(self, *, rate_nbytes_per_s: float | None, latency_s: float) -> None:
        """Another rate and latency, from each connection's next message on."""
        self._gate.limit(rate_nbytes_per_s, latency_s)

    def shape(self, connection: Connection) -> ShapedConnection:
        shaped = ShapedConnection(connection, self._gate, self._clock)
        self._made.add(shaped)
        return shaped

    async def listen(self, address: Address) -> Listener:
        return ShapedListener(await self._inner.listen(address), self)

    async def dial(self, address: Address, *, timeout_s: float) -> Connection:
        return self.shape(await self._inner.dial(address, timeout_s=timeout_s))

    async def close(self) -> None:
        for connection in list(self._made):
            await connection.close()
        await self._inner.close()
