"""A worker before it has a coordinator, and one that cannot reach its neighbour."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from pipecomp.errors import PeerLost
from pipecomp.protocol import messages as m
from pipecomp.protocol import wire
from pipecomp.protocol.messages import StageAddress
from pipecomp.runtime.assembly import connect
from pipecomp.transport.base import Address
from pipecomp.transport.memory import MemoryNetwork, MemoryTransport
from workers.job import AssignedWork
from workers.service import WorkerOptions, WorkerService


async def test_a_worker_that_waits_for_its_coordinator_leaves_at_once_when_told_to() -> None:
    network = MemoryNetwork()
    work = AssignedWork(name="w", data_address=Address("memory://w"), transport=MemoryTransport(network))
    said: list[str] = []
    joining = asyncio.Event()

    def say(line: str) -> None:
        said.append(line)
        joining.set()

    service = WorkerService(
        WorkerOptions(coordinator="memory://nobody", name="w"), control=MemoryTransport(network), work=work, say=say
    )
    running = asyncio.create_task(service.run())
    await joining.wait()
    await asyncio.sleep(0)  # it dials
    service.leave("w was stopped by SIGINT")
    async with asyncio.timeout(10):
        finish = await running
    assert (finish.exit_code, finish.reason) == (130, "w was stopped by SIGINT")
    assert said == ["w: joining the coordinator at memory://nobody"]


async def test_a_neighbour_that_cannot_be_dialled_is_named_with_what_to_change() -> None:
    def stage(rank: int) -> StageAddress:
        return StageAddress(
            stage=rank,
            rank=rank,
            first_layer=rank,
            end_layer=rank + 1,
            worker=f"w{rank}",
            data_address="tcp://127.0.0.1:35859",
            needs_input_gradient=True,
        )

    async def refuse(*_: Any, **__: Any) -> None:
        raise PeerLost("connection refused")

    assignment: Any = SimpleNamespace(replica=0, rank=0, tied="none", stages=(stage(0), stage(1)), peers=())
    hub: Any = SimpleNamespace(dial=refuse)
    with pytest.raises(PeerLost, match=r"cannot dial w1 at 127.0.0.1:35859 \(connection refused\). Start w1 with --advertise"):
        await connect(hub, assignment, timeout_s=1.0)


LISTS_MODULES = """
import sys
from workers import events, service

async def joins(self):
    print({name for name in ("torch", "transformers", "zmq", "pipecomp.runtime.assembly") if name not in sys.modules})
    return events.Finish(exit_code=0, reason="")

service.WorkerService.run = joins
service.run_worker(service.WorkerOptions(coordinator="127.0.0.1:1", name="w"))
"""


def test_a_worker_has_imported_all_that_is_slow_before_it_joins() -> None:
    """Imports hold the interpreter, and heartbeats with it."""
    done = subprocess.run([sys.executable, "-c", LISTS_MODULES], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout == "set()\n"


async def test_a_worker_that_leaves_tells_what_its_clock_reads_before_its_goodbye() -> None:
    """A run may be over before a second heartbeat would have told it."""
    network = MemoryNetwork()
    listener = await MemoryTransport(network).listen(Address("memory://coordinator"))
    work = AssignedWork(name="w", data_address=Address("memory://w"), transport=MemoryTransport(network))
    options = WorkerOptions(coordinator="memory://coordinator", name="w")
    service = WorkerService(options, control=MemoryTransport(network), work=work)
    running = asyncio.create_task(service.run())
    heard: list[m.Message] = []
    async with asyncio.timeout(10):
        connection = await listener.accept()
        while not any(isinstance(message, m.Heartbeat) for message in heard):
            heard.append(wire.decode(await connection.receive()).message)
        first = next(message for message in heard if isinstance(message, m.Heartbeat))
        for answer in (m.HeartbeatReply(sent_at_s=first.sent_at_s, answered_at_s=7.0), m.Stop(reason="done", failed=False)):
            await connection.send(wire.encode(answer))
        while not isinstance(heard[-1], m.Goodbye):
            heard.append(wire.decode(await connection.receive()).message)
        await running
    last = heard[-2]
    assert isinstance(last, m.Heartbeat)
    assert [trip.answered_s for trip in last.round_trips] == [7.0]
    await listener.close()
