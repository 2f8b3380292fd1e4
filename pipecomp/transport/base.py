"""Frames between two ends, asyncio only. Knows addresses and frames; knows no messages, codecs or steps.

A transport is chosen by the scheme of an address: `tcp://HOST:PORT` (ZeroMQ), `memory://NAME`. A connection carries whole
multi-frame messages in order. It may be lost at any moment (`PeerLost`), with whatever was queued: the link protocol above
numbers messages and sends again. Sockets here block or error; they never drop silently.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import NewType

Address = NewType("Address", str)
"""`scheme://...`, taken literally: never resolved backwards, never rewritten."""

Frame = bytes | bytearray | memoryview


class Connection(abc.ABC):
    """One end of an open connection."""

    peer: str
    """For people: the address of the other end as far as it is known."""

    nbytes_sent: int
    nbytes_received: int
    """Bytes of frames that this end gave to, and took from, the sockets (framing of the transport itself not counted)."""

    @abc.abstractmethod
    async def send(self, frames: Sequence[Frame]) -> None:
        """Hand one message to the transport. Frames must not be changed afterwards.

        Raises:
            PeerLost: the other end is gone.
            TransportClosed: this end was closed.
        """

    @abc.abstractmethod
    async def receive(self) -> list[memoryview]:
        """The next whole message. Raises as `send` does. Cancelling it loses no message."""

    @abc.abstractmethod
    async def close(self, *, linger_s: float = 0.0) -> None:
        """Close; with `linger_s` what is queued gets that long to leave. Closing twice is allowed."""


class Listener(abc.ABC):
    """A bound address that peers dial."""

    address: Address
    """What a peer on the same network dials, with the real port."""

    @abc.abstractmethod
    async def accept(self) -> Connection:
        """The next peer's connection, once its first message is here. Raises TransportClosed after `close`."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Stop listening and close every connection accepted here."""


class Transport(abc.ABC):
    """Makes listeners and connections."""

    @abc.abstractmethod
    async def listen(self, address: Address) -> Listener:
        """Bind. Port 0 takes a free one. Raises AddressError that names the address and the reason."""

    @abc.abstractmethod
    async def dial(self, address: Address, *, timeout_s: float) -> Connection:
        """Connect; returns once the other end is really there. Raises AddressError, or PeerLost after `timeout_s`."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Close all that this transport made."""
