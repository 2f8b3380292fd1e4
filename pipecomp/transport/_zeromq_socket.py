"""One ZeroMQ socket in an asyncio loop. Knows when a socket can be read; knows no addresses and no connections.

pyzmq's own asyncio sockets lose a message whose `recv` is cancelled at the wrong moment, and ZeroMQ's file descriptor tells
of readiness by edges that any call on the socket may use up. So: the socket is read to the end whenever its descriptor wakes
*and* after each of our own calls, messages go to a callback at once, and nobody awaits a receive on the socket itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket as tcp
from collections.abc import Callable, Sequence

import zmq

from pipecomp.transport.base import Frame

_NO_WAIT, _MORE_TO_COME = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
"""As plain numbers: pyzmq's flags take longer to combine than a frame to send, and so do its calls for whole messages."""
_AT_ONCE = 64
"""Messages read in one turn of the loop, so that a flood from one socket does not hold up the others."""

LEAST_UNCOPIED_NBYTES = 256 * 2**10
"""A smaller frame is copied: that takes some microseconds, and to hear from ZeroMQ's thread when a frame that was not copied may
be freed takes a hundred."""

MAX_UNSENT_NBYTES = 256 * 2**10
"""What the kernel takes of a connection beyond what it can put on its way. More would hide from the link how slow its peer is."""


def bound_unsent(descriptor: int) -> None:
    """Let the kernel queue so much for a connection, and no more, before it has room on the path.

    A fixed send buffer would also hold what is on its way, and let a path of 100 Mbit/s and 50 ms there and back carry 55.
    The descriptor is ZeroMQ's, and may be gone by now: then there is nothing to bound. Systems without the option have none.
    """
    option = getattr(tcp, "TCP_NOTSENT_LOWAT", None)
    with contextlib.suppress(OSError):
        connection = tcp.socket(fileno=descriptor)
        try:
            if option is not None:
                connection.setsockopt(tcp.IPPROTO_TCP, option, MAX_UNSENT_NBYTES)
        finally:
            connection.detach()


class SocketPump:
    """Reads a socket into `on_message` for as long as it is open."""

    def __init__(
        self, socket: zmq.Socket[bytes], on_message: Callable[[list[zmq.Frame]], None], on_idle: Callable[[], None]
    ) -> None:
        """`on_idle` is called whenever the socket was found empty."""
        self._socket = socket
        self._on_message = on_message
        self._on_idle = on_idle
        socket.copy_threshold = LEAST_UNCOPIED_NBYTES
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._scheduled = False
        self._open = True
        self._loop.add_reader(self._descriptor, self.read)
        self.read_soon()

    def send(self, frames: Sequence[Frame]) -> None:
        """Queue one message without waiting. Raises zmq.ZMQError (EAGAIN, EHOSTUNREACH)."""
        send, last = self._socket.send, len(frames) - 1
        for index, frame in enumerate(frames):
            send(frame, _NO_WAIT if index == last else _MORE_TO_COME, copy=False)
        self.read_soon()

    def read_soon(self) -> None:
        """Look again in the loop's next turn: what was just done may have used up the descriptor's edge."""
        if not self._scheduled and self._open:
            self._scheduled = True
            self._loop.call_soon(self._read_scheduled)

    def read(self) -> None:
        """Hand over what is there, up to a bound; the rest in the loop's next turn."""
        for _ in range(_AT_ONCE):
            if not self._open:
                return
            try:
                message = [self._socket.recv(_NO_WAIT, copy=False)]
                while message[-1].more:
                    message.append(self._socket.recv(_NO_WAIT, copy=False))
            except zmq.Again:
                self._on_idle()
                return
            self._on_message(message)
        self.read_soon()

    def close(self, linger_s: float) -> None:
        """Close the socket; what is queued gets `linger_s` to leave, in ZeroMQ's own thread."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._descriptor)
            self._socket.close(linger=round(1000 * linger_s))

    def _read_scheduled(self) -> None:
        self._scheduled = False
        self.read()
