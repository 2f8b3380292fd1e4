"""When bytes leave a shaped transport, on a clock that stands still unless all wait for it."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools

import pytest

from pipecomp.errors import PeerLost, TransportClosed
from pipecomp.transport.base import Connection
from pipecomp.transport.memory import MemoryNetwork, MemoryTransport
from pipecomp.transport.shaped import Gate, ShapedTransport

MBIT = 1e6 / 8


class StillClock:
    """Jumps to the next time that somebody sleeps until, once nobody else has anything to do. `late_s`: how much too late."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.time = 1000.0
        self.late_s = late_s
        self.sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self.numbers = itertools.count()

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        waking = asyncio.get_running_loop().create_future()
        heapq.heappush(self.sleepers, (self.time + seconds + self.late_s, next(self.numbers), waking))
        await waking

    async def run(self, *work) -> float:
        """Do all `work`; how long it took by this clock."""
        start = self.time
        working = asyncio.gather(*work)
        while not working.done():
            for _ in range(20):
                await asyncio.sleep(0)
            if self.sleepers and not working.done():
                self.time, _, waking = heapq.heappop(self.sleepers)
                if not waking.done():
                    waking.set_result(None)
        await working
        return self.time - start


class Sink(Connection):
    """Takes everything, and writes down when."""

    def __init__(self, clock: StillClock) -> None:
        self.peer = "sink"
        self.nbytes_sent = self.nbytes_received = 0
        self.clock = clock
        self.taken: list[tuple[float, bytes]] = []

    async def send(self, frames) -> None:
        self.taken.append((self.clock.time - 1000.0, bytes(frames[0])))

    async def receive(self) -> list[memoryview]:
        raise PeerLost("nothing ever comes")

    async def close(self, *, linger_s: float = 0.0) -> None:
        pass


def shaped(clock: StillClock, rate: float | None, latency_s: float = 0.0, burst_s: float = 0.0) -> ShapedTransport:
    return ShapedTransport(
        MemoryTransport(MemoryNetwork()), rate_nbytes_per_s=rate, latency_s=latency_s, burst_s=burst_s, clock=clock
    )


@pytest.mark.parametrize("rate", [1 * MBIT, 20 * MBIT, 1000 * MBIT])
async def test_a_message_takes_its_bytes_over_the_rate(rate):
    clock = StillClock()
    connection = shaped(clock, rate).shape(Sink(clock))
    assert await clock.run(connection.send([bytes(1_000_000), bytes(250_000)])) == pytest.approx(1_250_000 / rate)
    assert connection.nbytes_sent == 1_250_000


@pytest.mark.parametrize(
    ("rate", "nbytes"),
    [(1 * MBIT, 200), (10 * MBIT, 200), (1 * MBIT, 70_000), (100 * MBIT, 70_000), (1000 * MBIT, 70_000)],
)
async def test_waking_late_does_not_add_up(rate, nbytes):
    clock = StillClock(late_s=0.003)
    connection = shaped(clock, rate, burst_s=0.02).shape(Sink(clock))

    async def send() -> None:
        for _ in range(count):
            await connection.send([bytes(nbytes)])

    count = max(20, int(rate / nbytes))
    took_s = await clock.run(send())
    assert took_s == pytest.approx(count * nbytes / rate, rel=0.03)


async def test_send_returns_when_the_message_has_left_and_not_before():
    clock = StillClock()
    sink = Sink(clock)
    connection = shaped(clock, 1000.0).shape(sink)
    await clock.run(connection.send([b"x" * 1000]), connection.send([b"y" * 500]))
    assert [round(when, 6) for when, _ in sink.taken] == [1.0, 1.5]


async def test_the_latency_delays_what_arrives_and_not_what_leaves():
    clock = StillClock()
    sink = Sink(clock)
    connection = shaped(clock, 1000.0, latency_s=10.0).shape(sink)
    assert await clock.run(connection.send([b"x" * 1000]), connection.send([b"y" * 1000])) == pytest.approx(2.0)
    await clock.run(connection.close(linger_s=1e9))
    assert [round(when, 6) for when, _ in sink.taken] == [11.0, 12.0]


async def test_limits_that_come_later_count_for_connections_that_are_there():
    clock = StillClock()
    sink = Sink(clock)
    transport = shaped(clock, None)
    connection = transport.shape(sink)
    await connection.send([b"at once"])
    transport.limit(rate_nbytes_per_s=1000.0, latency_s=5.0)
    assert await clock.run(connection.send([b"x" * 1000])) == pytest.approx(1.0)
    transport.limit(rate_nbytes_per_s=None, latency_s=0.0)
    await connection.send([b"in its turn"])
    await clock.run(connection.close(linger_s=1e9))
    assert [(round(when, 6), frame[:7]) for when, frame in sink.taken] == [
        (0, b"at once"),
        (6, b"xxxxxxx"),
        (6, b"in its "),
    ]


async def test_order_is_kept_however_small_the_messages():
    clock = StillClock()
    sink = Sink(clock)
    connection = shaped(clock, 1e6, latency_s=0.5).shape(sink)
    await clock.run(*(connection.send([b"%d" % i]) for i in range(200)))
    await clock.run(connection.close(linger_s=1e9))
    assert [frame for _, frame in sink.taken] == [b"%d" % i for i in range(200)]


async def test_all_connections_share_one_rate():
    clock = StillClock()
    transport = shaped(clock, 10 * MBIT)
    connections = [transport.shape(Sink(clock)) for _ in range(3)]
    took_s = await clock.run(*(c.send([bytes(1_000_000)]) for c in connections))
    assert took_s == pytest.approx(3_000_000 / (10 * MBIT))


async def test_a_heartbeat_does_not_wait_behind_a_tensor():
    clock = StillClock()
    transport = shaped(clock, 10 * MBIT)
    tensor, heartbeat = Sink(clock), Sink(clock)
    sending = transport.shape(tensor).send([bytes(10_000_000)])
    await clock.run(sending, transport.shape(heartbeat).send([b"alive"]))
    assert heartbeat.taken[0][0] < 0.02
    assert tensor.taken[0][0] == pytest.approx(8.0, rel=0.001)


async def test_an_idle_gate_saves_up_no_more_than_its_burst():
    clock = StillClock()
    gate = Gate(1000.0, clock, burst_s=0.02)
    clock.time += 3600
    assert await clock.run(gate.leave(1000)) == pytest.approx(0.98)


async def test_without_a_rate_only_the_latency_counts():
    clock = StillClock()
    sink = Sink(clock)
    connection = shaped(clock, None, latency_s=0.25).shape(sink)
    assert await clock.run(connection.send([bytes(10**8)])) == 0
    await clock.run(connection.close(linger_s=1e9))
    assert [when for when, _ in sink.taken] == [0.25]


async def test_a_cancelled_send_leaves_out_the_whole_message():
    clock = StillClock()
    sink = Sink(clock)
    connection = shaped(clock, 1000.0).shape(sink)
    sending = asyncio.ensure_future(connection.send([bytes(10_000)]))
    await asyncio.sleep(0)
    sending.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await sending
    await clock.run(connection.send([b"next"]))
    assert [frame for _, frame in sink.taken] == [b"next"]
    assert connection.nbytes_sent == 4


async def test_a_loss_that_receiving_met_is_told_to_senders():
    clock = StillClock()
    connection = shaped(clock, None, latency_s=1.0).shape(Sink(clock))
    with pytest.raises(PeerLost):
        await connection.receive()
    with pytest.raises(PeerLost, match="nothing ever comes"):
        await connection.send([b"x"])


async def test_what_is_on_its_way_when_the_transport_closes_is_dropped():
    clock = StillClock()
    sink = Sink(clock)
    transport = shaped(clock, None, latency_s=1.0)
    connection = transport.shape(sink)
    await connection.send([b"x"])
    await transport.close()
    assert sink.taken == []
    with pytest.raises(TransportClosed):
        await connection.send([b"y"])


@pytest.mark.parametrize("rate", [0, -1.0, float("nan")])
def test_a_rate_is_above_zero(rate):
    with pytest.raises(ValueError, match="a rate is above zero"):
        Gate(rate, StillClock(), burst_s=0.0)
