"""One end of a link over real connections. Knows LinkEnd, connections and the loop's time; not who listens or dials where.

The rules of a link are `pipecomp.protocol.link`; here are the tasks that carry them out. A Link has one task that keeps it
connected (it dials again, or waits to be dialled again) and, while it is connected, one that reads and one that writes:

    send() -> LinkEnd -> outbox -> writer -> connection -> ... -> connection -> reader -> LinkEnd -> inbox -> receive()
                ^                                                                            |
                +--------------- Ack, which overtakes messages in the outbox <--- taken() <--+

All calls are made from the loop; nothing here computes on tensors.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from pipecomp.errors import (
    LocalProtocolError,
    PeerLost,
    PipecompError,
    RemoteProtocolError,
    TransportClosed,
    TransportError,
)
from pipecomp.protocol import link as rules
from pipecomp.protocol import wire
from pipecomp.protocol.link import LinkEnd, LinkState, Outgoing
from pipecomp.protocol.messages import (
    Ack,
    GradientMessage,
    LinkHello,
    Message,
    Resend,
    Resent,
    SequencedMessage,
    TensorMessage,
    Traffic,
)
from pipecomp.protocol.spans import MAX_STAGE, Doing, Subject
from pipecomp.runtime.trace import DEAF, Recorder
from pipecomp.transport.base import Connection, Frame
from pipecomp.types import Kind

_log = logging.getLogger(__name__)
_ENDED = (LinkState.LOST, LinkState.CLOSED)
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.02, 0.5
_REPAIRS = (Resend, Resent)

Received = wire.Received


class _Offer(NamedTuple):
    connection: Connection
    hello: wire.Received | None  # the dialling end's, already read


class _Count:
    """Running sums of what was sent of one kind."""

    __slots__ = ("header_nbytes", "messages", "payload_nbytes", "values")

    def __init__(self) -> None:
        self.values = self.payload_nbytes = self.header_nbytes = self.messages = 0


class Link:
    """One end of one link. Made by a LinkHub."""

    def __init__(
        self,
        end: LinkEnd,
        *,
        reconnect_s: float,
        dial: Callable[[float], Awaitable[Connection]] | None,
        recorder: Recorder = DEAF,
    ) -> None:
        self.name = end.identity.link
        self.recorder = recorder
        self.lost: asyncio.Future[PipecompError] = asyncio.get_running_loop().create_future()
        """Done when the link has ended, with the error that `send` and `receive` raise from then on."""
        self._end = end
        self._reconnect_s = reconnect_s
        self._dial = dial
        self._offers: collections.deque[_Offer] = collections.deque()
        self._connection_number = 0
        self._hello: LinkHello | None = None
        self._ack: Ack | None = None
        self._outbox: collections.deque[Outgoing] = collections.deque()
        self._inbox: collections.deque[Received] = collections.deque()
        self._send_turn = asyncio.Lock()
        self._opened = asyncio.Event()
        self._interrupt = asyncio.Event()
        self._written = asyncio.Event()
        self._to_write = asyncio.Event()
        self._arrived = asyncio.Event()
        self._acknowledged = asyncio.Event()
        self._counts: dict[Kind, _Count] = collections.defaultdict(_Count)
        self._next_counted = 0
        self._away: asyncio.TimerHandle | None = None
        self._last_reason = "never connected"
        self._opened_now = False
        self._open_by = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def peer_worker(self) -> str:
        """The worker at the other end; empty until its first hello."""
        return self._end.peer_worker

    @property
    def is_accepting(self) -> bool:
        """Whether the other end dials this link."""
        return self._dial is None

    @property
    def in_flight_nbytes(self) -> int:
        """Bytes submitted here that the other end has not taken yet."""
        return self._end.in_flight_nbytes

    # ------------------------------------------------------------------------------------------------------ for users

    async def send(self, message: Message, buffers: Sequence[Frame] = (), *, values: int = 0) -> None:
        """Number `message`, wait for credit, and queue it. Calls are served in their order.

        Args:
            message: its `sequence` is set here.
            buffers: raw bytes as `buffer_nbytes` says; kept until the other end has taken them, never to be changed.
            values: real values that the buffers encode, for the traffic's sums.

        Raises:
            PeerLost: the other end was away for too long; names the link and the worker.
            RemoteProtocolError: the other end broke the rules, or refused the link.
            TransportClosed: this end was closed.
        """
        async with self._send_turn:
            self._check_alive()
            outgoing = self._end.number(message, buffers, values=values)
            if not self._end.has_credit_for(outgoing):
                about = self._subject(outgoing.message, outgoing.nbytes)
                with self.recorder.during(Doing.CREDIT, f"{self.name} credit", about):
                    await self._credit_for(outgoing)
            self._apply(self._end.handle(rules.Submitted(outgoing)))

    async def _credit_for(self, outgoing: Outgoing) -> None:
        while not self._end.has_credit_for(outgoing):
            self._acknowledged.clear()
            await self._acknowledged.wait()
            self._check_alive()

    async def receive(self) -> Received:
        """The next message in order. Raises as `send` does, once all that came before is received."""
        while not self._inbox:
            self._check_alive()
            self._arrived.clear()
            await self._arrived.wait()
        return self._inbox.popleft()

    def taken(self, received: Received) -> None:
        """`received` needs no more room here: its credit goes back. From the loop's thread only."""
        self._apply(self._end.handle(rules.Taken(getattr(received.message, "sequence"))))  # noqa: B009 - a union's field

    def traffic(self) -> tuple[Traffic, ...]:
        """What this end has given to its connections since the start, by kind. Bytes sent again count again; values do not."""
        return tuple(
            Traffic(
                link=self.name,
                kind=kind,
                values=c.values,
                payload_nbytes=c.payload_nbytes,
                header_nbytes=c.header_nbytes,
                messages=c.messages,
            )
            for kind, c in sorted(self._counts.items())
        )

    async def drain(self, *, timeout_s: float) -> bool:
        """Wait until the other end has taken all that was sent and this end's acknowledgements have left; whether it did."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.lost.done() and (self._end.unacknowledged or self._outbox or self._ack):
                    self._written.clear()
                    await self._written.wait()
        except TimeoutError:
            return False
        return not self._end.unacknowledged

    async def close(self, *, linger_s: float = 0.0) -> None:
        """Leave the link, after at most `linger_s` of `drain`. Closing twice is allowed."""
        if linger_s and not self.lost.done():
            await self.drain(timeout_s=linger_s)
        if self._end.state is not LinkState.CLOSED:
            self._apply(self._end.handle(rules.Close()))
        self._fail(TransportClosed(f"link {self.name} was closed here"))
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    # ----------------------------------------------------------------------------------------------------- for the hub

    def start(self, timeout_s: float) -> None:
        """Begin to connect; the link is lost if that takes longer than `timeout_s`."""
        self._open_by = asyncio.get_running_loop().time() + timeout_s
        if self._dial is None:
            self._expect_peer(timeout_s)
        self._task = asyncio.create_task(self._keep_connected(), name=f"link {self.name}")

    def offer(self, connection: Connection, hello: wire.Received) -> None:
        """The peer dialled (again): go on over this connection."""
        self._offers.append(_Offer(connection, hello))
        self._interrupt.set()

    async def opened(self) -> None:
        """Wait until both ends have said hello once. Raises the reason when the link ends before that."""
        opening = asyncio.ensure_future(self._opened.wait())
        try:
            await asyncio.wait((opening, self.lost), return_when=asyncio.FIRST_COMPLETED)
        finally:
            opening.cancel()
        if not self._opened.is_set():
            self._check_alive()

    # ---------------------------------------------------------------------------------------------------- connections

    async def _keep_connected(self) -> None:
        try:
            await self._connect_and_serve()
        except RemoteProtocolError as e:
            _log.error("%s", e)
            self._fail(e)
        except Exception as e:  # noqa: BLE001 - a bug here must end the link, not hang those who wait for it
            _log.exception("link %s failed", self.name)
            self._fail(LocalProtocolError(f"link {self.name} failed: {type(e).__name__}: {e}"))
        finally:
            for offer in self._offers:
                await offer.connection.close()

    async def _connect_and_serve(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while self._end.state not in _ENDED:
            try:
                offer = await (self._next_offer() if self._dial is None else self._dialled(self._dial))
            except TransportError as e:
                if not self._opened.is_set():
                    self._fail(type(e)(f"{self}: {e}"))
                self._last_reason = str(e)
            else:
                self._interrupt.clear()
                self._opened_now = False
                try:
                    await self._serve(offer)
                except TransportError as e:
                    self._last_reason = str(e)
            if self._dial is not None and self._end.state not in _ENDED:
                # Longer and longer for as long as nobody says hello over what was dialled.
                backoff_s = _FIRST_BACKOFF_S if self._opened_now else min(2 * backoff_s, _LONGEST_BACKOFF_S)
                await asyncio.sleep(backoff_s)

    async def _next_offer(self) -> _Offer:
        while not self._offers:
            self._interrupt.clear()
            await self._interrupt.wait()
        while len(self._offers) > 1:
            await self._offers.popleft().connection.close()
        return self._offers.popleft()

    async def _dialled(self, dial: Callable[[float], Awaitable[Connection]]) -> _Offer:
        if self._opened.is_set():
            # In short tries, so that the reason is known when there is no more time.
            return _Offer(await dial(self._reconnect_s / 3), None)
        connection = await dial(max(0.0, self._open_by - asyncio.get_running_loop().time()))
        if self._away is None:
            self._expect_peer(max(0.0, self._open_by - asyncio.get_running_loop().time()))
        return _Offer(connection, None)

    async def _serve(self, offer: _Offer) -> None:
        """Read and write until the connection fails, the link ends, or the peer has dialled anew."""
        connection = offer.connection
        self._connection_number += 1
        number = self._connection_number
        tasks: list[asyncio.Task[object]] = []
        try:
            self._apply(self._end.handle(rules.Connected(number)))
            if offer.hello is not None:
                self._apply(self._end.handle(rules.Arrived(number, offer.hello)))
            tasks.append(asyncio.create_task(self._read(number, connection)))
            tasks.append(asyncio.create_task(self._write(connection)))
            tasks.append(asyncio.create_task(self._interrupt.wait()))
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await connection.close()
            if self._end.state not in _ENDED:
                self._apply(self._end.handle(rules.Disconnected(number)))
                if self._opened_now:  # else the time it had to open is still running
                    self._expect_peer(self._reconnect_s)

    async def _read(self, number: int, connection: Connection) -> None:
        while True:
            frames = await connection.receive()
            began_ns = self.recorder.now_ns()
            received = wire.decode(frames)
            self._apply(self._end.handle(rules.Arrived(number, received)))
            if isinstance(received.message, SequencedMessage):
                doing = Doing.RECEIVE_REPAIR if isinstance(received.message, _REPAIRS) else Doing.RECEIVE
                about = self._subject(received.message, received.header_nbytes + received.payload_nbytes)
                self.recorder.add(doing, f"{self.name} in", about, began_ns)

    async def _write(self, connection: Connection) -> None:
        while True:
            if self._hello is not None:
                hello, self._hello = self._hello, None
                await self._write_frames(connection, wire.encode(hello), self._counts[Kind.CONTROL])
            elif self._ack is not None:
                ack, self._ack = self._ack, None
                await self._write_frames(connection, wire.encode(ack), self._counts[Kind.CONTROL])
            elif self._outbox:
                await self._write_outgoing(connection, self._outbox.popleft())
            else:
                self._written.set()
                self._to_write.clear()
                await self._to_write.wait()

    async def _write_outgoing(self, connection: Connection, outgoing: Outgoing) -> None:
        count = self._counts[outgoing.kind]
        again = outgoing.sequence < self._next_counted
        messages, nbytes = count.messages, connection.nbytes_sent
        began_ns = self.recorder.now_ns()
        try:
            await self._write_frames(connection, outgoing.frames, count)
        finally:
            doing = Doing.SEND_REPAIR if isinstance(outgoing.message, _REPAIRS) else Doing.SEND
            about = self._subject(outgoing.message, connection.nbytes_sent - nbytes)
            self.recorder.add(doing, f"{self.name} out", about, began_ns)
        if again:
            count.messages = messages
        else:
            self._next_counted += 1
            count.values += outgoing.values

    async def _write_frames(self, connection: Connection, frames: list[wire.Buffer], count: _Count) -> None:
        before = connection.nbytes_sent
        try:
            await connection.send(frames)
        finally:
            # By what the connection itself has counted, so that a send that failed or was cancelled is counted right too.
            nbytes = connection.nbytes_sent - before
            if nbytes:
                count.header_nbytes += len(frames[0])
                count.payload_nbytes += nbytes - len(frames[0])
                count.messages += 1

    # -------------------------------------------------------------------------------------------------------- effects

    def _apply(self, effects: list[rules.LinkEffect]) -> None:
        for effect in effects:
            match effect:
                case rules.Greet(_, hello):
                    self._outbox.clear()
                    self._ack = None
                    self._hello = hello
                    self._to_write.set()
                case rules.Opened():
                    self._opened_now = True
                    self._opened.set()
                    self._expect_peer(None)
                case rules.Transmit(outgoing):
                    self._outbox.append(outgoing)
                    self._to_write.set()
                case rules.Acknowledge(ack):
                    self._ack = ack
                    self._to_write.set()
                case rules.Deliver(received):
                    self._inbox.append(received)
                    self._arrived.set()
                case rules.CreditFreed():
                    self._acknowledged.set()
                    self._written.set()
                case rules.Drop():
                    self._interrupt.set()
                case rules.Ended(reason):
                    self._fail(RemoteProtocolError(f"{self}: {reason}"))

    def _expect_peer(self, within_s: float | None) -> None:
        """Lose the link unless it opens in time; None: it is open."""
        if self._away is not None:
            self._away.cancel()
            self._away = None
        if within_s is not None:
            self._away = asyncio.get_running_loop().call_later(within_s, self._peer_gone, within_s)

    def _peer_gone(self, after_s: float) -> None:
        if self._end.state in _ENDED:
            return
        self._end.handle(rules.PeerGone())
        self._fail(PeerLost(f"{self} is lost: no connection for {after_s:g} s; {self._last_reason}"))

    def _fail(self, error: PipecompError) -> None:
        if self._away is not None:
            self._away.cancel()
        if self._end.state not in _ENDED:
            self._end.handle(rules.PeerGone())
        if not self.lost.done():
            self.lost.set_result(error)
        for waiting in (self._arrived, self._acknowledged, self._written, self._interrupt):
            waiting.set()
        if self._task is not None and asyncio.current_task() is not self._task:
            self._task.cancel()

    def _subject(self, message: SequencedMessage, nbytes: int) -> Subject:
        match message:
            case TensorMessage() | Resend() | Resent():
                part = message.microbatch
            case _:
                part = message.offset
        stage = message.stage if isinstance(message, TensorMessage | GradientMessage) else 0
        return Subject(
            rules.kind_of(message), self.name, getattr(message, "step", 0), min(stage, MAX_STAGE), part, nbytes
        )

    def _check_alive(self) -> None:
        if self.lost.done():
            error = self.lost.result()
            raise type(error)(str(error))

    def __str__(self) -> str:
        return f"link {self.name} to {self.peer_worker or 'a worker not heard yet'}"
