"""Links of several processes' hubs in one loop, over queues and over ZeroMQ through a proxy that cuts connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest

from pipecomp.errors import LocalProtocolError, PeerLost, RemoteProtocolError, TransportClosed
from pipecomp.protocol import wire
from pipecomp.protocol.messages import Ack, LinkHello, Stop, WeightsChunk, WeightsRequest
from pipecomp.runtime.link import Link, LinkHub
from pipecomp.transport.base import Address, Connection, Listener, Transport
from pipecomp.transport.memory import MemoryNetwork, MemoryTransport
from pipecomp.transport.zeromq import ZeromqTransport
from pipecomp.types import Kind

LINK = "0/0-1"


class RecordingTransport(Transport):
    """Another transport that remembers the connections it made."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.connections: list[Connection] = []

    async def listen(self, address: Address) -> Listener:
        return RecordingListener(await self.inner.listen(address), self.connections)

    async def dial(self, address: Address, *, timeout_s: float) -> Connection:
        connection = await self.inner.dial(address, timeout_s=timeout_s)
        self.connections.append(connection)
        return connection

    async def close(self) -> None:
        await self.inner.close()


class RecordingListener(Listener):
    def __init__(self, inner: Listener, connections: list[Connection]) -> None:
        self.address = inner.address
        self.inner = inner
        self.connections = connections

    async def accept(self) -> Connection:
        connection = await self.inner.accept()
        self.connections.append(connection)
        return connection

    async def close(self) -> None:
        await self.inner.close()


class Proxy:
    """Forwards TCP to `port`, counts it, and cuts all of it when told."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.nbytes_forth = 0
        self.nbytes_back = 0
        self.cuts_after: list[int] = []  # of bytes forth
        self.writers: set[asyncio.StreamWriter] = set()

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.add(writer)
        with contextlib.suppress(ConnectionError):
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self.port)
            self.writers.add(to_writer)
            await asyncio.gather(self.pump(reader, to_writer, forth=True), self.pump(to_reader, writer, forth=False))
            await close_writers(writer, to_writer)

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, forth: bool) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(3001):
                if forth:
                    self.nbytes_forth += len(piece)
                else:
                    self.nbytes_back += len(piece)
                if self.cuts_after and self.nbytes_forth > self.cuts_after[0]:
                    del self.cuts_after[0]
                    self.cut()
                    return
                writer.write(piece)
                await writer.drain()
        writer.close()

    def cut(self) -> None:
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()


async def close_writers(*writers: asyncio.StreamWriter) -> None:
    for writer in writers:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@contextlib.asynccontextmanager
async def proxy_to(address: Address) -> AsyncIterator[tuple[Proxy, Address]]:
    proxy = Proxy(int(address.rpartition(":")[2]))
    server = await asyncio.start_server(proxy.forward, "127.0.0.1", 0)
    try:
        yield proxy, Address(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    finally:
        server.close()
        proxy.cut()
        await server.wait_closed()


class Joined(NamedTuple):
    """Two hubs with one link between them; a dials b."""

    a: LinkHub
    b: LinkHub
    dialled: Link
    accepted: Link
    address: Address
    transports: tuple[RecordingTransport, RecordingTransport]


@contextlib.asynccontextmanager
async def joined(
    make=None, *, credit_nbytes: int = 100_000, reconnect_s: float = 10.0, through=None
) -> AsyncIterator[Joined]:
    if make is None:
        network = MemoryNetwork()
        make = lambda: MemoryTransport(network)
    transports = (RecordingTransport(make()), RecordingTransport(make()))
    a, b = (
        LinkHub(t, worker=w, run="r", epoch=1, credit_nbytes=credit_nbytes, reconnect_s=reconnect_s)
        for t, w in zip(transports, "ab", strict=True)
    )
    try:
        any_address = transports[1].inner.any_address
        address = await b.listen(any_address)
        async with through(address) if through else no_proxy(address) as (_, dial_address):
            dialling = asyncio.ensure_future(a.dial(dial_address, LINK, timeout_s=10))
            accepted = await b.accept(LINK, timeout_s=10)
            yield Joined(a, b, await dialling, accepted, address, transports)
            await a.close()
            await b.close()
    finally:
        await a.close()
        await b.close()
        for transport in transports:
            await transport.close()


@contextlib.asynccontextmanager
async def no_proxy(address: Address) -> AsyncIterator[tuple[None, Address]]:
    yield None, address


def chunk(number: int, nbytes: int) -> tuple[WeightsChunk, list[bytes]]:
    message = WeightsChunk(
        sequence=0,
        name=str(number),
        dtype="U8",
        shape=(nbytes,),
        offset=0,
        total_nbytes=nbytes,
        buffer_nbytes=(nbytes,),
    )
    return message, [bytes([number % 251]) * nbytes]


async def send_all(link: Link, count: int, nbytes: int) -> None:
    for i in range(count):
        message, buffers = chunk(i, nbytes)
        await link.send(message, buffers, values=nbytes)


async def receive_all(link: Link, count: int, nbytes: int, *, every=lambda i: None) -> None:
    for i in range(count):
        received = await link.receive()
        assert received.message.name == str(i)
        assert bytes(received.buffers[0]) == bytes([i % 251]) * nbytes
        link.taken(received)
        every(i)


async def test_messages_cross_in_order_in_both_directions():
    async with joined() as j:
        assert (j.dialled.name, j.dialled.peer_worker, j.accepted.peer_worker) == (LINK, "b", "a")
        await asyncio.gather(
            send_all(j.dialled, 300, 100),
            receive_all(j.accepted, 300, 100),
            send_all(j.accepted, 300, 2000),
            receive_all(j.dialled, 300, 2000),
        )
        assert await j.dialled.drain(timeout_s=10)


async def test_a_cut_connection_loses_nothing_and_repeats_nothing():
    network = MemoryNetwork()

    def cut_at_times(i: int) -> None:
        if i % 97 == 50:
            network.cut()

    async with joined(lambda: MemoryTransport(network)) as j:
        await asyncio.gather(
            send_all(j.dialled, 600, 1000),
            receive_all(j.accepted, 600, 1000, every=cut_at_times),
            send_all(j.accepted, 400, 100),
            receive_all(j.dialled, 400, 100),
        )
        assert len(j.transports[0].connections) > 4


async def test_zeromq_through_a_proxy_that_cuts_in_the_middle_of_messages_loses_nothing():
    cuts = [250_000, 250_001, 900_000, 1_500_000, 2_100_000]

    @contextlib.asynccontextmanager
    async def cutting(address: Address):
        async with proxy_to(address) as (proxy, dial_address):
            proxy.cuts_after = cuts
            yield proxy, dial_address

    async with joined(ZeromqTransport, through=cutting) as j:
        await asyncio.gather(
            send_all(j.dialled, 250, 10_007),
            receive_all(j.accepted, 250, 10_007),
            send_all(j.accepted, 500, 333),
            receive_all(j.dialled, 500, 333),
        )
        assert cuts == []
        assert len(j.transports[0].connections) >= 5


async def test_a_slow_receiver_of_ten_thousand_messages_bounds_what_is_under_way():
    credit_nbytes = 50_000
    async with joined(credit_nbytes=credit_nbytes) as j:
        sending = asyncio.ensure_future(send_all(j.dialled, 10_000, 500))
        most = 0
        for i in range(10_000):
            received = await j.accepted.receive()
            assert received.message.name == str(i)
            for _ in range(i % 3):
                await asyncio.sleep(0)
            most = max(most, j.dialled.in_flight_nbytes)
            j.accepted.taken(received)
        await sending
        assert 0.9 * credit_nbytes < most <= credit_nbytes


async def test_nothing_is_sent_beyond_the_credit_until_the_receiver_has_taken():
    async with joined(credit_nbytes=2_000) as j:
        await send_all(j.dialled, 1, 1_500)
        second = asyncio.ensure_future(send_all(j.dialled, 1, 1_500))
        received = await j.accepted.receive()
        for _ in range(50):
            await asyncio.sleep(0)
        assert not second.done()
        j.accepted.taken(received)
        await second


async def test_a_send_that_is_cancelled_while_it_waits_leaves_no_gap():
    async with joined(credit_nbytes=2_000) as j:
        await send_all(j.dialled, 1, 1_500)
        waiting = asyncio.ensure_future(send_all(j.dialled, 1, 1_500))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        last = asyncio.ensure_future(j.dialled.send(*chunk(9, 100)))
        j.accepted.taken(await j.accepted.receive())
        assert (await j.accepted.receive()).message.name == "9"
        await last


async def test_senders_are_served_in_the_order_of_their_calls():
    async with joined(credit_nbytes=1_000) as j:
        sends = [asyncio.ensure_future(j.dialled.send(*chunk(i, 10 if i % 2 else 900))) for i in range(20)]
        for i in range(20):
            received = await j.accepted.receive()
            assert received.message.name == str(i)
            j.accepted.taken(received)
        await asyncio.gather(*sends)


@pytest.mark.parametrize("make", [None, ZeromqTransport], ids=["memory", "zeromq"])
async def test_traffic_is_what_the_connections_carried(make):
    async with joined(make) as j:
        await asyncio.gather(
            send_all(j.dialled, 100, 3_000), receive_all(j.accepted, 100, 3_000), j.accepted.send(request())
        )
        await j.dialled.receive()
        await j.dialled.drain(timeout_s=10)
        for hub, transport in zip((j.a, j.b), j.transports, strict=True):
            counted = sum(t.payload_nbytes + t.header_nbytes for t in hub.traffic())
            assert counted == sum(c.nbytes_sent for c in transport.connections)
        weights = {t.kind: t for t in j.dialled.traffic()}[Kind.WEIGHTS]
        assert (weights.values, weights.payload_nbytes, weights.messages) == (300_000, 300_000, 100)
        assert weights.header_nbytes == sum(wire.header_nbytes(numbered(i)) for i in range(100))


def numbered(i: int) -> WeightsChunk:
    message, _ = chunk(i, 3_000)
    return WeightsChunk(**{**{f: getattr(message, f) for f in message.__struct_fields__}, "sequence": i})


async def test_traffic_is_what_went_over_tcp_but_for_zeromqs_own_framing():
    proxies = []

    @contextlib.asynccontextmanager
    async def counting(address: Address):
        async with proxy_to(address) as (proxy, dial_address):
            proxies.append(proxy)
            yield proxy, dial_address

    async with joined(ZeromqTransport, through=counting) as j:
        await asyncio.gather(send_all(j.dialled, 50, 20_000), receive_all(j.accepted, 50, 20_000))
        await j.dialled.drain(timeout_s=10)
        counted = sum(t.payload_nbytes + t.header_nbytes for t in j.a.traffic())
        num_frames = 2 * 50 + 1  # the hello is one
        assert counted < proxies[0].nbytes_forth <= counted + 9 * num_frames + 300


async def test_bytes_sent_again_are_counted_again_and_their_values_are_not():
    network = MemoryNetwork()
    async with joined(lambda: MemoryTransport(network)) as j:
        await send_all(j.dialled, 20, 1_000)
        network.cut()
        await receive_all(j.accepted, 20, 1_000)
        await j.dialled.drain(timeout_s=10)
        weights = {t.kind: t for t in j.dialled.traffic()}[Kind.WEIGHTS]
        assert (weights.values, weights.messages) == (20_000, 20)
        counted = sum(t.payload_nbytes + t.header_nbytes for t in j.dialled.traffic())
        assert counted == sum(c.nbytes_sent for c in j.transports[0].connections)


async def test_a_message_that_was_lost_counts_its_bytes_twice_and_its_values_once():
    network = MemoryNetwork()
    async with joined(lambda: MemoryTransport(network)) as j:
        connection = j.transports[0].connections[0]
        send = connection.send

        async def send_and_cut(frames):
            await send(frames)
            network.cut()

        connection.send = send_and_cut
        await asyncio.gather(send_all(j.dialled, 20, 1_000), receive_all(j.accepted, 20, 1_000))
        await j.dialled.drain(timeout_s=10)
        weights = {t.kind: t for t in j.dialled.traffic()}[Kind.WEIGHTS]
        assert (weights.values, weights.messages, weights.payload_nbytes) == (20_000, 20, 21_000)
        counted = sum(t.payload_nbytes + t.header_nbytes for t in j.dialled.traffic())
        assert counted == sum(c.nbytes_sent for c in j.transports[0].connections)


@pytest.mark.parametrize("make", [None, ZeromqTransport], ids=["memory", "zeromq"])
async def test_a_lost_peer_is_named_to_all_who_wait(make):
    async with joined(make, reconnect_s=0.2, credit_nbytes=2_000) as j:
        await send_all(j.dialled, 1, 1_500)
        waiting = [asyncio.ensure_future(w) for w in (j.dialled.receive(), j.dialled.send(*chunk(1, 1_500)))]
        await j.b.close()
        for use in waiting:
            with pytest.raises(PeerLost, match=f"link {LINK} to b is lost: no connection for 0.2 s"):
                await use
        assert isinstance(await j.dialled.lost, PeerLost)


async def test_a_peer_whose_process_ended_is_lost_at_both_kinds_of_end():
    async with joined(ZeromqTransport, reconnect_s=0.2) as j:
        await j.transports[0].close()  # as a killed process does: no farewell, sockets gone
        with pytest.raises(PeerLost, match=f"link {LINK} to a is lost: no connection for 0.2 s"):
            await j.accepted.receive()


PEER = """
import asyncio, sys
from pipecomp.runtime.link import LinkHub
from pipecomp.transport.zeromq import ZeromqTransport

async def main(role, address):
    hub = LinkHub(ZeromqTransport(), worker="peer", run="r", epoch=1)
    if role == "dials":
        await hub.dial(address, "0/0-1", timeout_s=20)
    else:
        print(await hub.listen(address), flush=True)
        await hub.accept("0/0-1", timeout_s=20)
    await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("role", ["dials", "listens"])
async def test_a_killed_peer_is_lost_by_name(role):
    transport = ZeromqTransport()
    hub = LinkHub(transport, worker="here", run="r", epoch=1, reconnect_s=0.3)
    mine = await hub.listen(Address("tcp://127.0.0.1:0"))
    address = mine if role == "dials" else "tcp://127.0.0.1:0"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PEER, role, address, stdout=asyncio.subprocess.PIPE
    )
    try:
        if role == "dials":
            link = await hub.accept(LINK, timeout_s=20)
        else:
            theirs = (await process.stdout.readline()).decode().strip()
            link = await hub.dial(Address(theirs), LINK, timeout_s=20)
        process.kill()
        with pytest.raises(PeerLost, match=f"link {LINK} to peer is lost: no connection for 0.3 s"):
            await link.receive()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await hub.close()
        await transport.close()


async def test_what_came_before_the_loss_is_still_received():
    async with joined(reconnect_s=0.05) as j:
        await send_all(j.dialled, 5, 10)
        await j.dialled.drain(timeout_s=0.05)
        await j.a.close()
        await j.accepted.lost
        await receive_all(j.accepted, 5, 10)
        with pytest.raises(PeerLost):
            await j.accepted.receive()


async def test_a_closed_link_says_so():
    async with joined() as j:
        waiting = asyncio.ensure_future(j.dialled.receive())
        await asyncio.sleep(0)
        await j.dialled.close()
        await j.dialled.close()
        for use in (waiting, j.dialled.receive(), j.dialled.send(*chunk(0, 1))):
            with pytest.raises(TransportClosed, match=f"link {LINK} was closed here"):
                await use


async def test_closing_with_time_to_linger_waits_until_all_is_taken():
    async with joined() as j:
        await send_all(j.dialled, 50, 1_000)
        receiving = asyncio.ensure_future(receive_all(j.accepted, 50, 1_000))
        await j.dialled.close(linger_s=10)
        await receiving


async def test_a_hello_waits_until_the_hub_knows_its_run():
    network = MemoryNetwork()
    a = LinkHub(MemoryTransport(network), worker="a", run="r", epoch=1, credit_nbytes=1000)
    b = LinkHub(MemoryTransport(network), worker="b")
    with pytest.raises(LocalProtocolError, match="call configure first"):
        await b.dial(Address("memory://a"), LINK, timeout_s=1)
    address = await b.listen(Address("memory://b"))
    dialling = asyncio.ensure_future(a.dial(address, LINK, timeout_s=10))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not dialling.done()
    b.configure("r", 1, credit_nbytes=1000)
    assert (await b.accept(LINK, timeout_s=10)).peer_worker == "a"
    await dialling
    await a.close()
    await b.close()


@pytest.mark.parametrize(
    ("run", "epoch", "reason"), [("other", 1, "of run 'other', b of run 'r'"), ("r", 2, "of epoch 2, b of epoch 1")]
)
async def test_a_hello_of_another_run_or_epoch_is_refused_with_both_values(run, epoch, reason, caplog):
    network = MemoryNetwork()
    a = LinkHub(MemoryTransport(network), worker="a", run=run, epoch=epoch)
    b = LinkHub(MemoryTransport(network), worker="b", run="r", epoch=1)
    address = await b.listen(Address("memory://b"))
    with pytest.raises(RemoteProtocolError, match=reason):
        await a.dial(address, LINK, timeout_s=10)
    assert reason in caplog.text
    await a.close()
    await b.close()


async def test_a_link_that_another_worker_holds_is_refused():
    async with joined() as j:
        thief = LinkHub(MemoryTransport(j.transports[0].inner._network), worker="thief", run="r", epoch=1)
        with pytest.raises(RemoteProtocolError, match=f"link {LINK} is held by a, not by thief"):
            await thief.dial(j.address, LINK, timeout_s=10)
        await thief.close()
        await asyncio.gather(send_all(j.dialled, 3, 10), receive_all(j.accepted, 3, 10))


HELLO = LinkHello(run="r", epoch=1, link=LINK, worker="a", next_sequence=0)


@pytest.mark.parametrize(
    "frames",
    [[b"GET / HTTP/1.1"], wire.encode(Stop(reason="", failed=False)), wire.encode(Ack(sequence=3))],
    ids=["garbage", "stop", "ack"],
)
async def test_a_stranger_on_the_port_disturbs_nobody(frames, caplog):
    async with joined() as j:
        stranger = await j.transports[0].inner.dial(j.address, timeout_s=10)
        await stranger.send(frames)
        with contextlib.suppress(PeerLost):
            while True:
                await stranger.receive()
        assert [r.levelno for r in caplog.records] == [logging.WARNING]
        await asyncio.gather(send_all(j.dialled, 3, 10), receive_all(j.accepted, 3, 10))


async def test_a_peer_that_breaks_the_rules_ends_the_link_with_the_reason():
    network = MemoryNetwork()
    transport = MemoryTransport(network)
    b = LinkHub(transport, worker="b", run="r", epoch=1)
    address = await b.listen(Address("memory://b"))
    raw = await transport.dial(address, timeout_s=10)
    await raw.send(wire.encode(HELLO))
    link = await b.accept(LINK, timeout_s=10)
    await raw.send(wire.encode(Ack(sequence=7)))
    with pytest.raises(RemoteProtocolError, match="an acknowledgement of 7, but 0 is the next to be sent"):
        await link.receive()
    await b.close()
    await transport.close()


async def test_a_damaged_message_ends_the_link_with_the_reason():
    network = MemoryNetwork()
    transport = MemoryTransport(network)
    b = LinkHub(transport, worker="b", run="r", epoch=1)
    address = await b.listen(Address("memory://b"))
    raw = await transport.dial(address, timeout_s=10)
    await raw.send(wire.encode(HELLO))
    link = await b.accept(LINK, timeout_s=10)
    header, buffer = wire.encode(*chunk(0, 100))
    await raw.send([header, buffer[:50] + b"!" + buffer[51:]])
    with pytest.raises(RemoteProtocolError, match="damaged on the way"):
        await link.receive()
    await b.close()
    await transport.close()


async def test_links_that_nobody_asked_for_by_name_come_as_they_are_dialled():
    network = MemoryNetwork()
    server = LinkHub(MemoryTransport(network), worker="coordinator", run="r", epoch=1)
    address = await server.listen(Address("memory://weights"))
    clients = [LinkHub(MemoryTransport(network), worker=w, run="r", epoch=1) for w in "abc"]
    dials = [asyncio.ensure_future(c.dial(address, f"weights/{c._worker}", timeout_s=10)) for c in clients]
    names = set()
    async for link in server.incoming():
        names.add(link.name)
        if len(names) == 3:
            break
    assert names == {"weights/a", "weights/b", "weights/c"}
    await asyncio.gather(*dials)
    waiting = asyncio.ensure_future(server.accept_any())
    await asyncio.sleep(0)
    await server.close()
    with pytest.raises(TransportClosed):
        await waiting
    for client in clients:
        await client.close()


async def test_a_link_that_nobody_dials_is_named():
    b = LinkHub(MemoryTransport(MemoryNetwork()), worker="b", run="r", epoch=1)
    await b.listen(Address("memory://b"))
    with pytest.raises(PeerLost, match=f"nobody dialled link {LINK} within 0.05 s"):
        await b.accept(LINK, timeout_s=0.05)
    await b.close()


async def test_dialling_nobody_is_named():
    a = LinkHub(MemoryTransport(MemoryNetwork()), worker="a", run="r", epoch=1)
    with pytest.raises(PeerLost, match="memory://b"):
        await a.dial(Address("memory://b"), LINK, timeout_s=0.05)
    await a.close()


def request() -> WeightsRequest:
    return WeightsRequest(sequence=0, name="w", offset=0, nbytes=1)
