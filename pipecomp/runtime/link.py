"""All links of one process: who listens, who dials, who is let in. Knows hellos and transports; a Link does the rest.

Neighbours that dial this process are told apart by their hello: it must be of this run and epoch, and of a link that this end
does not dial itself and that no other worker holds. Anybody else is told why not (`Refused`), and nothing is disturbed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from pipecomp.errors import LocalProtocolError, PeerLost, RemoteProtocolError, TransportClosed, TransportError
from pipecomp.protocol import wire
from pipecomp.protocol.link import LinkEnd, LinkIdentity
from pipecomp.protocol.messages import LinkHello, Message, Refused, Traffic
from pipecomp.protocol.wire import Received
from pipecomp.runtime.neighbour import Link
from pipecomp.runtime.trace import DEAF, Recorder
from pipecomp.transport.base import Address, Connection, Listener, Transport

__all__ = ["Link", "LinkHub", "Received"]

_log = logging.getLogger(__name__)
Guest = Callable[[Connection, Any, str], Awaitable[None]]
"""Serves a connection that is no link, from its first message on."""
_GREETING_S = 60.0
"""How long a connection may stay without a hello, or its hello wait for this process to know its run."""


class LinkHub:
    """All links of one process: one listening address for those that dial it, and the links it dials."""

    def __init__(
        self,
        transport: Transport,
        *,
        worker: str,
        run: str = "",
        epoch: int = 0,
        credit_nbytes: int = 64 * 2**20,
        reconnect_s: float = 3.0,
        recorder: Recorder = DEAF,
        guests: Mapping[type[Message], Guest] | None = None,
    ) -> None:
        """`run` and `epoch` may be left out and told later by `configure`; those who dial before that wait. `recorder` hears
        what links send and receive. `guests`: who serves connections that begin with another message than a hello, until this
        process takes part in a run; it is told the message and this worker's name."""
        self._transport = transport
        self._worker = worker
        self._reconnect_s = reconnect_s
        self._recorder = recorder
        self._guests = dict(guests or {})
        self._run, self._epoch, self._credit_nbytes = run, epoch, credit_nbytes
        self._configured = asyncio.Event()
        if run:
            self._configured.set()
        self._links: dict[str, Link] = {}
        self._unclaimed: dict[str, Link] = {}
        self._arrival = asyncio.Event()
        self._listeners: list[Listener] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._visits: set[asyncio.Task[None]] = set()
        self._closed = False

    def configure(self, run: str, epoch: int, *, credit_nbytes: int | None = None) -> None:
        """Say what this process takes part in; before the first link."""
        if self._links:
            raise LocalProtocolError("a hub's run and epoch are set before its first link")
        self._run, self._epoch = run, epoch
        if credit_nbytes is not None:
            self._credit_nbytes = credit_nbytes
        self._configured.set()
        for task in self._visits:
            task.cancel()

    async def listen(self, address: Address) -> Address:
        """Bind; the address as neighbours on the same network dial it. Raises AddressError."""
        listener = await self._transport.listen(address)
        self._listeners.append(listener)
        self._spawn(self._accept_all(listener))
        return listener.address

    async def dial(self, address: Address, name: str, *, timeout_s: float) -> Link:
        """Open the link `name` to whoever listens at `address`; dialled again whenever its connection drops.

        Raises:
            AddressError: the address cannot be used.
            PeerLost: nobody said hello within `timeout_s`.
            RemoteProtocolError: the other end refused the link.
        """
        self._check_new(name)
        link = self._make(name, lambda within_s: self._transport.dial(address, timeout_s=within_s))
        return await self._open(link, timeout_s)

    async def accept(self, name: str, *, timeout_s: float) -> Link:
        """The link `name`, once its other end has dialled. Raises PeerLost after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while name not in self._unclaimed:
                    await self._next_arrival()
                link = self._unclaimed.pop(name)
                await link.opened()
        except TimeoutError:
            raise PeerLost(f"nobody dialled link {name} within {timeout_s:g} s") from None
        return link

    async def accept_any(self) -> Link:
        """The next link that somebody dialled and nobody asked for by name."""
        while not self._unclaimed:
            await self._next_arrival()
        link = self._unclaimed.pop(next(iter(self._unclaimed)))
        await link.opened()
        return link

    async def incoming(self) -> AsyncIterator[Link]:
        """Links as they are dialled, until the hub closes."""
        while True:
            try:
                yield await self.accept_any()
            except TransportClosed:
                return

    def traffic(self) -> tuple[Traffic, ...]:
        """Of all links together, as `Link.traffic` gives it."""
        return tuple(t for link in self._links.values() for t in link.traffic())

    async def close(self, *, linger_s: float = 0.0) -> None:
        """Close all links (each after at most `linger_s` of draining) and stop listening. The transport stays open."""
        self._closed = True
        self._arrival.set()
        await asyncio.gather(*(link.close(linger_s=linger_s) for link in self._links.values()))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listener in self._listeners:
            await listener.close()

    # ----------------------------------------------------------------------------------------------------------------

    def _make(self, name: str, dial: Callable[[float], Awaitable[Connection]] | None) -> Link:
        end = LinkEnd(LinkIdentity(self._run, self._epoch, name, self._worker), self._credit_nbytes)
        link = Link(end, reconnect_s=self._reconnect_s, dial=dial, recorder=self._recorder)
        self._links[name] = link
        return link

    async def _open(self, link: Link, timeout_s: float) -> Link:
        link.start(timeout_s)
        try:
            await link.opened()
        except BaseException:
            del self._links[link.name]
            await link.close()
            raise
        return link

    def _check_new(self, name: str) -> None:
        if self._closed:
            raise TransportClosed("the hub was closed here")
        if not self._configured.is_set():
            raise LocalProtocolError("a hub dials once it knows its run: call configure first")
        if name in self._links:
            raise LocalProtocolError(f"link {name} is there already")

    async def _next_arrival(self) -> None:
        if self._closed:
            raise TransportClosed("the hub was closed here")
        self._arrival.clear()
        await self._arrival.wait()

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept_all(self, listener: Listener) -> None:
        while True:
            try:
                connection = await listener.accept()
            except TransportClosed:
                return
            self._spawn(self._greet(connection))

    async def _greet(self, connection: Connection) -> None:
        """Give a new connection to the link it is for, or tell it why not."""
        try:
            async with asyncio.timeout(_GREETING_S):
                received = wire.decode(await connection.receive())
                guest = None if self._configured.is_set() else self._guests.get(type(received.message))
                if guest is None:
                    await self._configured.wait()
        except (TransportError, RemoteProtocolError, TimeoutError) as e:
            _log.warning(
                "a connection from %s was closed before its hello: %s", connection.peer, str(e) or "nothing came"
            )
            await connection.close()
            return
        if guest is not None:
            await self._serve(guest, connection, received.message)
            return
        if self._closed:  # not refused: that would end the peer's link at once, and the peer is about to stop as well
            await connection.close()
            return
        reason = self._why_not(received.message)
        if reason:
            _log.warning("a connection from %s was refused: %s", connection.peer, reason)
            await self._refuse(connection, reason)
            return
        hello = received.message
        assert isinstance(hello, LinkHello)
        link = self._links.get(hello.link)
        if link is None:
            link = self._make(hello.link, None)
            link.start(self._reconnect_s)
            self._unclaimed[hello.link] = link
            self._arrival.set()
        link.offer(connection, received)

    async def _serve(self, guest: Guest, connection: Connection, message: Message) -> None:
        """One at a time: several that measured at once would find less."""
        if self._visits:
            await self._refuse(connection, f"{self._worker} is measuring with another one")
            return
        visit = asyncio.ensure_future(guest(connection, message, self._worker))
        self._visits.add(visit)
        try:
            await visit
        except (TransportError, RemoteProtocolError) as e:
            _log.warning("a connection from %s was closed: %s", connection.peer, e)
        except asyncio.CancelledError:
            if not self._configured.is_set():
                raise
        finally:
            visit.cancel()
            self._visits.discard(visit)
            await connection.close(linger_s=1.0)

    def _why_not(self, message: Message) -> str:
        if not isinstance(message, LinkHello):
            return f"a link begins with LinkHello, not {type(message).__name__}"
        for field, expected in (("run", self._run), ("epoch", self._epoch)):
            got = getattr(message, field)
            if got != expected:
                return f"{message.worker} is of {field} {got!r}, {self._worker} of {field} {expected!r}"
        link = self._links.get(message.link)
        if link is None:
            return ""
        if link.lost.done():
            return f"{self._worker} has given up link {message.link}: {link.lost.result()}"
        if not link.is_accepting:
            return f"link {message.link} is dialled by {self._worker}, not by {message.worker}"
        if link.peer_worker not in ("", message.worker):
            return f"link {message.link} is held by {link.peer_worker}, not by {message.worker}"
        return ""

    async def _refuse(self, connection: Connection, reason: str) -> None:
        try:
            await connection.send(wire.encode(Refused(worker=self._worker, reason=reason)))
        except TransportError:
            pass
        finally:
            await connection.close(linger_s=1.0)
