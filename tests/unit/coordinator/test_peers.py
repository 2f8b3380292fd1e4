"""Control connections count every byte of theirs, in both directions (laws 4 and 13)."""

from __future__ import annotations

import asyncio

from coordinator.events import Event, MessageReceived
from coordinator.peers import Peers
from pipecomp.protocol import messages as m
from pipecomp.protocol import wire
from pipecomp.transport.base import Address
from pipecomp.transport.memory import MemoryNetwork, MemoryTransport
from pipecomp.types import Kind


async def test_both_directions_of_a_control_connection_are_counted() -> None:
    transport = MemoryTransport(MemoryNetwork())
    events: asyncio.Queue[Event] = asyncio.Queue()
    peers = Peers(await transport.listen(Address("memory://control")), events.put_nowait)
    accepting = asyncio.ensure_future(peers.accept())
    worker = await transport.dial(Address("memory://control"), timeout_s=10)
    for step in range(3):
        beat = m.Heartbeat(sent_at_s=1.0, activity="forward", step=step, memory_nbytes=5)
        await worker.send(wire.encode(beat))
        event = await events.get()
        assert isinstance(event, MessageReceived)
        assert event.message == beat
    plan = m.StepPlan(
        epoch=1,
        step=1,
        learning_rate=0.1,
        num_targets=1,
        microbatches=((m.SampleRef(1, 3),),),
        has_input_ids=True,
        has_labels=False,
        buffer_nbytes=(12,),
    )
    peers.send([event.peer], plan, [bytes(12)])
    assert wire.decode(await worker.receive()).message == plan
    await asyncio.sleep(0)
    counted = peers.traffic()
    assert (counted.kind, counted.values, counted.messages, counted.payload_nbytes) == (Kind.CONTROL, 0, 4, 12)
    assert counted.header_nbytes + counted.payload_nbytes == worker.nbytes_sent + worker.nbytes_received
    await peers.close()
    await accepting
    await transport.close()
