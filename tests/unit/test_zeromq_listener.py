"""A real listening socket: peers that do what no pipecomp does, and last words."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import zmq

from pipecomp.transport._zeromq_socket import MAX_UNSENT_NBYTES, bound_unsent
from pipecomp.transport.zeromq import ZeromqListener, ZeromqTransport


class FrameOfNobody:
    """The first frame of a peer whose connection was reset before ZeroMQ had asked for its address."""

    bytes = b"\x01nobody"

    def get(self, _property: object) -> Any:
        raise zmq.ZMQError(errno.EINVAL)


async def test_a_message_of_a_peer_that_is_gone_already_is_dropped_and_the_next_one_is_heard() -> None:
    transport = ZeromqTransport()
    listener = await transport.listen(transport.any_address)
    assert isinstance(listener, ZeromqListener)
    listener._came([FrameOfNobody(), b"lost"])  # type: ignore[list-item]
    dialled = await transport.dial(listener.address, timeout_s=10)
    await dialled.send([b"hello"])
    assert [bytes(frame) for frame in await (await listener.accept()).receive()] == [b"hello"]
    await transport.close()


def bounds_of_unsent(port: int) -> list[int]:
    """Of every connection of this process from or to a port."""
    bounds = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(path.name))) as connection:
            if connection.family == socket.AF_INET and port in (connection.getpeername()[1], connection.getsockname()[1]):
                bounds.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT))
    return bounds


@pytest.mark.skipif(sys.platform != "linux", reason="looks at descriptors as Linux lists them")
async def test_both_ends_of_a_connection_bound_what_waits_in_the_kernel() -> None:
    transport = ZeromqTransport()
    listener = await transport.listen(transport.any_address)
    dialled = await transport.dial(listener.address, timeout_s=10)
    await dialled.send([b"hello"])
    await listener.accept()
    assert bounds_of_unsent(int(listener.address.rpartition(":")[2])) == [MAX_UNSENT_NBYTES] * 2
    await transport.close()


def test_a_connection_that_is_gone_has_nothing_to_bound(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        bound_unsent(file.fileno())  # whose descriptor it was before
        file.write(b"still open")
    bound_unsent(10**6)


async def test_last_words_leave_although_the_listener_closes() -> None:
    transport = ZeromqTransport()
    listener = await transport.listen(transport.any_address)
    dialled = await transport.dial(listener.address, timeout_s=10)
    await dialled.send([b"hello"])
    accepted = await listener.accept()
    words = bytes(32 << 20)  # more than the kernel takes at once
    await accepted.send([words])
    await accepted.close(linger_s=20.0)
    closing = asyncio.create_task(listener.close())
    (heard,) = await dialled.receive()
    assert heard == words
    await dialled.close()
    await closing
    await transport.close()
