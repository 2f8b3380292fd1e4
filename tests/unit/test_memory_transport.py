"""Connections inside one process hold no more than a socket would."""

from __future__ import annotations

import asyncio

from pipecomp.transport.base import Address
from pipecomp.transport.memory import QUEUE_NBYTES, MemoryNetwork, MemoryTransport


async def test_a_sender_waits_while_the_other_end_has_its_fill_unread() -> None:
    transport = MemoryTransport(MemoryNetwork())
    listener = await transport.listen(Address("memory://here"))
    here = await transport.dial(listener.address, timeout_s=10)
    half = bytes(QUEUE_NBYTES // 2)
    await here.send([half])
    there = await listener.accept()
    await here.send([half])
    third = asyncio.ensure_future(here.send([half]))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not third.done()
    assert here.nbytes_sent == QUEUE_NBYTES
    await there.receive()
    await third
    await transport.close()
