"""How fast two workers send to each other, and how long a word takes there and back. Knows connections, their messages and the
clock; nothing of training.

Each end sends in its turn, for some seconds: chunks, each of which the other end says it has taken. Half as much as has been
taken before may be under way, so that a fast link is filled after some round trips, and a slow one is not given more than it
carries in the time. What counts begins after a quarter of the turn, once TCP has found the link's rate, and ends when nothing
more is sent: TCP is slow to repair what is lost at the very end.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any, NamedTuple

from pipecomp.errors import PeerLost, RemoteProtocolError, TransportClosed
from pipecomp.protocol import messages as m
from pipecomp.protocol import wire
from pipecomp.transport.base import Connection

CHUNK_NBYTES = 32 * 2**10
LEAST_NBYTES, MOST_NBYTES = 16 * CHUNK_NBYTES, 16 * 2**20
"""Under way at once: at first, and at most. Less at first would come in bursts, and TCP is slow to repair what it loses at their
end. The most fills 1 Gbit/s with a round trip of 0.13 s."""
_NUM_ECHOES = 5
_BEFORE = 1 / 4
"""Of a turn, that does not count."""
_FEWEST = 4
"""Chunks that must count, however long they take."""
LONGEST_S = 60.0
"""Of sending, in one turn. A link that carries no `_FEWEST` chunks in that time is of no use."""


class LinkSpeed(NamedTuple):
    """As the dialling end has it."""

    sent_nbytes_per_s: float
    received_nbytes_per_s: float
    round_trip_s: float


async def measure(connection: Connection, worker: str, other: str, duration_s: float) -> LinkSpeed:
    """The dialling end's part, from its first message on.

    Args:
        worker, other: who measures, and who is meant to be at the other end.
        duration_s: of each end's turn.

    Raises:
        PeerLost: the other end is gone, or took nothing for too long.
        RemoteProtocolError: it refused, or said what it may not say.
    """
    await _say(connection, m.SpeedProbe(worker=worker, to=other, duration_s=duration_s))
    round_trips_s = []
    for number in range(_NUM_ECHOES):
        started = time.monotonic()
        await _say(connection, m.Echo(number=number))
        await _expect(connection, m.Echo)
        round_trips_s.append(time.monotonic() - started)
    sent = await _send_chunks(connection, duration_s)
    await _say(connection, m.SpeedTurn())
    return LinkSpeed(sent, await _take_chunks(connection), min(round_trips_s))


async def serve(connection: Connection, probe: m.SpeedProbe, worker: str) -> None:
    """The listening end's part, of `worker`, after `probe`; returns when the other end is done, or has been told why not.

    Raises:
        RemoteProtocolError: it said what it may not say.
    """
    if probe.to != worker:
        reason = f"{worker} listens here, and not {probe.to}: say there with --advertise what others dial"
        await _say(connection, m.Refused(worker=worker, reason=reason))
        return
    try:
        while True:
            async with asyncio.timeout(LONGEST_S):
                message = wire.decode(await connection.receive()).message
            match message:
                case m.Echo():
                    await _say(connection, message)
                case m.SpeedChunk():
                    await _say(connection, m.SpeedTaken())
                case m.SpeedTurn():
                    await _say(connection, await _turn(connection, probe, worker))
                case _:
                    raise RemoteProtocolError(f"{type(message).__name__} came while {probe.worker} measures a link")
    except (PeerLost, TransportClosed, TimeoutError):
        return


async def _turn(connection: Connection, probe: m.SpeedProbe, worker: str) -> m.Message:
    """What the other end is told of a turn here."""
    try:
        return m.SpeedTold(nbytes_per_s=await _send_chunks(connection, min(probe.duration_s, LONGEST_S)))
    except PeerLost as error:
        return m.Refused(worker=worker, reason=str(error))


async def _send_chunks(connection: Connection, duration_s: float) -> float:
    """One turn of sending; bytes a second."""
    turn = _Turn(connection, duration_s)
    hearing = asyncio.create_task(turn.hear())
    sending = asyncio.create_task(turn.send())
    try:
        async with asyncio.timeout(LONGEST_S):
            done, _ = await asyncio.wait([hearing, sending], return_when=asyncio.FIRST_COMPLETED)
        for task in done:  # hearing only ends with an error
            task.result()
    except TimeoutError:
        raise PeerLost(
            f"the link to {connection.peer} took {turn.taken} bytes in {LONGEST_S:g} s: too slow to train over"
        ) from None
    finally:
        for task in (hearing, sending):
            task.cancel()
        await asyncio.gather(hearing, sending, return_exceptions=True)
    return turn.nbytes_per_s


class _Turn:
    """One end sends, and hears at the same time what has been taken: a send may wait for the link."""

    def __init__(self, connection: Connection, duration_s: float) -> None:
        self._connection = connection
        self._started = time.monotonic()
        self._begins, self._ends = self._started + _BEFORE * duration_s, self._started + duration_s
        self._begun: tuple[float, int] | None = None  # when counting began, and what had been taken then
        self._ended: tuple[float, int] | None = None  # and when it ended
        self._heard_at = self._started
        self._heard = asyncio.Event()
        self._sent = 0
        self.taken = 0

    @property
    def nbytes_per_s(self) -> float:
        assert self._begun is not None and self._ended is not None
        return (self._ended[1] - self._begun[1]) / max(self._ended[0] - self._begun[0], 1e-9)

    async def send(self) -> None:
        """Returns once all is taken."""
        frames = wire.encode(m.SpeedChunk(buffer_nbytes=(CHUNK_NBYTES,)), [os.urandom(CHUNK_NBYTES)])
        while self._goes_on():
            if self._sent - self.taken < min(LEAST_NBYTES + self.taken // 2, MOST_NBYTES):
                self._sent += CHUNK_NBYTES
                await self._connection.send(frames)
            else:
                await self._next_heard()
        self._ended = self._heard_at, self.taken
        while self.taken < self._sent:
            await self._next_heard()

    async def hear(self) -> None:
        while True:
            await _expect(self._connection, m.SpeedTaken)
            self.taken += CHUNK_NBYTES
            if self.taken > self._sent:
                raise RemoteProtocolError(f"{self._connection.peer} has taken more than was sent")
            self._heard_at = time.monotonic()
            if self._begun is None and self._heard_at >= self._begins:
                self._begun = self._heard_at, self.taken
            self._heard.set()

    async def _next_heard(self) -> None:
        self._heard.clear()
        await self._heard.wait()

    def _goes_on(self) -> bool:
        enough = self._begun is not None and self.taken - self._begun[1] >= _FEWEST * CHUNK_NBYTES
        return not enough or time.monotonic() < self._ends


async def _take_chunks(connection: Connection) -> float:
    while True:
        message = _checked(wire.decode(await connection.receive()).message, connection, m.SpeedTold | m.SpeedChunk)
        if isinstance(message, m.SpeedTold):
            return message.nbytes_per_s
        await _say(connection, m.SpeedTaken())


async def _say(connection: Connection, message: m.Message) -> None:
    await connection.send(wire.encode(message))


async def _expect(connection: Connection, kind: type[m.Message]) -> None:
    _checked(wire.decode(await connection.receive()).message, connection, kind)


def _checked(message: m.Message, connection: Connection, kind: Any) -> Any:  # noqa: ANN401 - one of `kind`
    if isinstance(message, m.Refused):
        raise RemoteProtocolError(f"{message.worker} refused to measure a link: {message.reason}")
    if not isinstance(message, kind):
        raise RemoteProtocolError(f"{type(message).__name__} came from {connection.peer}, which measures a link")
    return message
