"""Measuring a link before a run: both ends over a memory network of known rate and latency, and who else may call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest

from pipecomp.errors import PeerLost, RemoteProtocolError
from pipecomp.protocol import messages as m
from pipecomp.protocol import wire
from pipecomp.runtime import link_speed
from pipecomp.runtime.link import LinkHub
from pipecomp.runtime.link_speed import CHUNK_NBYTES, LEAST_NBYTES, LinkSpeed, measure, serve
from pipecomp.transport.base import Address, Connection
from pipecomp.transport.memory import MemoryNetwork, MemoryTransport
from pipecomp.transport.shaped import ShapedTransport

HERE = Address("memory://b")


class Ends(NamedTuple):
    dialling: ShapedTransport
    listening: ShapedTransport
    hub: LinkHub


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    """Two machines without limits; the hub of the second one serves those that measure, and knows no run yet."""
    network = MemoryNetwork()
    transports = [ShapedTransport(MemoryTransport(network), rate_nbytes_per_s=None, latency_s=0.0) for _ in range(2)]
    hub = LinkHub(transports[1], worker="b", guests={m.SpeedProbe: serve})
    await hub.listen(HERE)
    yield Ends(*transports, hub)
    await hub.close()


async def measured(ends: Ends, duration_s: float, other: str = "b") -> LinkSpeed:
    connection = await ends.dialling.dial(HERE, timeout_s=5)
    try:
        return await measure(connection, "a", other, duration_s)
    finally:
        await connection.close()


async def test_each_way_has_its_own_rate_and_the_round_trip_has_both_latencies(ends: Ends) -> None:
    ends.dialling.limit(rate_nbytes_per_s=2e6, latency_s=0.02)
    ends.listening.limit(rate_nbytes_per_s=8e6, latency_s=0.03)
    speed = await measured(ends, 0.6)
    assert speed.sent_nbytes_per_s == pytest.approx(2e6, rel=0.1)
    assert speed.received_nbytes_per_s == pytest.approx(8e6, rel=0.1)
    assert 0.05 <= speed.round_trip_s < 0.15


async def test_a_link_that_needs_longer_than_a_turn_for_a_chunk_is_measured_all_the_same(ends: Ends) -> None:
    ends.dialling.limit(rate_nbytes_per_s=2.5e5, latency_s=0.0)  # 0.13 s a chunk
    speed = await measured(ends, 0.05)
    assert speed.sent_nbytes_per_s == pytest.approx(2.5e5, rel=0.3)  # of four chunks


async def test_a_link_that_is_of_no_use_is_given_up(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_speed, "LONGEST_S", 0.3)
    ends.dialling.limit(rate_nbytes_per_s=1e5, latency_s=0.0)
    with pytest.raises(PeerLost, match="too slow to train over"):
        await measured(ends, 0.1)


async def test_another_link_can_be_measured_after_it_and_a_run_goes_on_as_ever(ends: Ends) -> None:
    for _ in range(2):
        assert (await measured(ends, 0.05)).sent_nbytes_per_s > 0
    ends.hub.configure("run", 1)
    dialling = LinkHub(ends.dialling, worker="a", run="run", epoch=1)
    link, other = await asyncio.gather(dialling.dial(HERE, "0/0-1", timeout_s=5), ends.hub.accept("0/0-1", timeout_s=5))
    assert (link.peer_worker, other.peer_worker) == ("b", "a")
    await dialling.close()


async def test_a_stranger_who_says_what_does_not_belong_here_is_closed(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    connection = await ends.dialling.dial(HERE, timeout_s=5)
    for message in (m.SpeedProbe(worker="a", to="b", duration_s=1.0), m.SpeedTold(nbytes_per_s=1.0)):
        await connection.send(wire.encode(message))
    with pytest.raises(PeerLost):
        await connection.receive()
    assert "SpeedTold came while a measures a link" in caplog.text


async def test_who_is_not_the_one_that_is_meant_says_so(ends: Ends) -> None:
    with pytest.raises(RemoteProtocolError, match="b listens here, and not c: say there with --advertise what others dial"):
        await measured(ends, 0.1, other="c")


async def test_the_other_ends_own_reason_is_told(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    ends.listening.limit(rate_nbytes_per_s=1e5, latency_s=0.0)
    monkeypatch.setattr(link_speed, "LONGEST_S", 0.5)
    with pytest.raises(RemoteProtocolError, match=r"b refused to measure a link: .* too slow to train over"):
        await measured(ends, 0.1)


async def test_one_measures_at_a_time(ends: Ends) -> None:
    first = asyncio.create_task(measured(ends, 0.3))
    await asyncio.sleep(0.1)
    with pytest.raises(RemoteProtocolError, match="b is measuring with another one"):
        await measured(ends, 0.1)
    assert (await first).sent_nbytes_per_s > 0


async def test_once_a_run_has_begun_nobody_measures_any_more(ends: Ends) -> None:
    ends.dialling.limit(rate_nbytes_per_s=1e6, latency_s=0.0)
    under_way = asyncio.create_task(measured(ends, 5.0))
    await asyncio.sleep(0.1)
    ends.hub.configure("run", 1)
    with pytest.raises(PeerLost):
        await asyncio.wait_for(under_way, 5)
    with pytest.raises(RemoteProtocolError, match="a link begins with LinkHello, not SpeedProbe"):
        await measured(ends, 0.1)


async def test_more_taken_than_sent_is_no_credit(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    connection = await ends.dialling.dial(HERE, timeout_s=5)
    for message in (m.SpeedProbe(worker="a", to="b", duration_s=5.0), m.SpeedTurn(), *[m.SpeedTaken()] * 100):
        await connection.send(wire.encode(message))
    received = 0
    with contextlib.suppress(PeerLost):
        async with asyncio.timeout(5):
            while await connection.receive():
                received += 1
    assert received <= LEAST_NBYTES // CHUNK_NBYTES + 100 // 2
    assert "has taken more than was sent" in caplog.text


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (m.Refused(worker="b", reason="not now"), "b refused to measure a link: not now"),
        (m.SpeedTaken(), "SpeedTaken came from"),
    ],
)
async def test_what_the_other_end_may_not_answer_is_told(answer: m.Message, words: str) -> None:
    network = MemoryNetwork()
    listener = await MemoryTransport(network).listen(HERE)

    async def reply() -> Connection:
        connection = await listener.accept()
        await connection.send(wire.encode(answer))
        return connection

    replying = asyncio.create_task(reply())
    connection = await MemoryTransport(network).dial(HERE, timeout_s=5)
    with pytest.raises(RemoteProtocolError, match=words):
        await measure(connection, "a", "b", 0.1)
    await (await replying).close()
    await connection.close()
    await listener.close()
