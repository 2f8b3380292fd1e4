"""Peers that do what no pipecomp does, at a real listening socket."""

from __future__ import annotations

import errno
from typing import Any

import zmq

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
