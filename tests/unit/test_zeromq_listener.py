"""A real listening socket: peers that do what no pipecomp does, and last words."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import zmq

from pipecomp.transport._tcp_address import Endpoint
from pipecomp.transport.zeromq import ZeromqListener, ZeromqTransport, _prepare


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


def test_the_kernel_is_left_to_size_what_it_queues() -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        _prepare(socket, Endpoint("127.0.0.1", 1))
        assert (socket.getsockopt(zmq.SNDBUF), socket.getsockopt(zmq.RCVBUF)) == (-1, -1)


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
