"""What every transport must do, as checks that any implementation can run. Knows the contract of `transport.base` only.

    @pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__)
    async def test_my_transport(check):
        await check(MyTransport, Address("mine://localhost:0"))

`make` gives a new transport each time, two of which can reach each other; `address` is one that any number can listen at in
turn and that takes a free port or name (port 0). Each check closes what it opened and takes well under a second.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

from pipecomp.errors import AddressError, PeerLost, TransportClosed
from pipecomp.transport.base import Address, Connection, Frame, Listener, Transport

MakeTransport = Callable[[], Transport]
TransportCheck = Callable[[MakeTransport, Address], Awaitable[None]]
_PATIENCE_S = 20.0


async def check_transport(make: MakeTransport, address: Address) -> None:
    """Run every check. Raises AssertionError, or what the transport raised."""
    for check in TRANSPORT_CHECKS:
        await check(make, address)


class _Pair(NamedTuple):
    dialler: Connection
    accepted: Connection
    listener: Listener
    dialling: Transport


@contextlib.asynccontextmanager
async def _pair(make: MakeTransport, address: Address) -> AsyncIterator[_Pair]:
    """Two ends of one connection; the dialling end has said `hello`, and it was read."""
    async with asyncio.timeout(_PATIENCE_S):
        listening, dialling = make(), make()
        try:
            listener = await listening.listen(address)
            dialler = await dialling.dial(listener.address, timeout_s=_PATIENCE_S)
            await dialler.send([b"hello"])
            accepted = await listener.accept()
            assert await _receive(accepted) == [b"hello"]
            yield _Pair(dialler, accepted, listener, dialling)
        finally:
            await dialling.close()
            await listening.close()


async def _receive(connection: Connection) -> list[bytes]:
    return [bytes(frame) for frame in await connection.receive()]


async def _receive_until_lost(connection: Connection) -> list[bytes]:
    """First frames of all that comes before the end."""
    got = []
    with contextlib.suppress(PeerLost):
        while True:
            got.append((await _receive(connection))[0])
    return got


async def frames_arrive_as_they_were(make: MakeTransport, address: Address) -> None:
    large = bytes(range(256)) * 4096
    messages: list[list[Frame]] = [
        [b"x"],
        [b"header", b"", b"buffer"],
        [large, bytearray(b"mutable"), memoryview(large)[1:-1]],
        [b"%d" % i for i in range(100)],
    ]
    async with _pair(make, address) as pair:
        for here, there in ((pair.dialler, pair.accepted), (pair.accepted, pair.dialler)):
            for message in messages:
                sending = asyncio.ensure_future(here.send(message))
                assert await _receive(there) == [bytes(frame) for frame in message]
                await sending


async def messages_keep_their_order(make: MakeTransport, address: Address) -> None:
    count = 500
    async with _pair(make, address) as pair:

        async def send(connection: Connection) -> None:
            for i in range(count):
                await connection.send([b"%d" % i, bytes(i)])

        async def receive(connection: Connection) -> None:
            for i in range(count):
                assert await _receive(connection) == [b"%d" % i, bytes(i)]

        await asyncio.gather(send(pair.dialler), receive(pair.accepted), send(pair.accepted), receive(pair.dialler))


async def bytes_are_counted_at_both_ends(make: MakeTransport, address: Address) -> None:
    async with _pair(make, address) as pair:
        await pair.dialler.send([b"12345", b"", bytes(100_000)])
        await pair.accepted.receive()
        assert pair.dialler.nbytes_sent == pair.accepted.nbytes_received == len(b"hello") + 5 + 100_000
        assert pair.accepted.nbytes_sent == pair.dialler.nbytes_received == 0


async def peers_are_told_apart(make: MakeTransport, address: Address) -> None:
    async with _pair(make, address) as pair:
        other = await pair.dialling.dial(pair.listener.address, timeout_s=_PATIENCE_S)
        await other.send([b"other"])
        accepted = await pair.listener.accept()
        assert await _receive(accepted) == [b"other"]
        await accepted.send([b"to the other"])
        await pair.accepted.send([b"to the first"])
        assert await _receive(other) == [b"to the other"]
        assert await _receive(pair.dialler) == [b"to the first"]


async def a_cancelled_receive_loses_no_message(make: MakeTransport, address: Address) -> None:
    async with _pair(make, address) as pair:
        got: list[bytes] = []
        for i in range(50):
            receiving = asyncio.ensure_future(_receive(pair.accepted))
            await pair.dialler.send([b"%d" % i])
            for _ in range(i % 7):
                await asyncio.sleep(0)
            receiving.cancel()
            outcome = (await asyncio.gather(receiving, return_exceptions=True))[0]
            if not isinstance(outcome, BaseException):
                got += outcome
        while len(got) < 50:
            got += await _receive(pair.accepted)
        assert got == [b"%d" % i for i in range(50)]


async def a_peer_that_leaves_is_lost_after_what_it_sent(make: MakeTransport, address: Address) -> None:
    async with _pair(make, address) as pair:
        for i in range(200):
            await pair.dialler.send([b"%d" % i, bytes(1000)])
        await pair.dialler.close(linger_s=_PATIENCE_S)
        assert await _receive_until_lost(pair.accepted) == [b"%d" % i for i in range(200)]
        with contextlib.suppress(PeerLost):
            await pair.accepted.send([b"into the void"])
            raise AssertionError("sending to a lost peer raises PeerLost")


async def a_connection_closed_by_the_listening_end_is_lost_to_the_dialler(
    make: MakeTransport, address: Address
) -> None:
    async with _pair(make, address) as pair:
        await pair.accepted.send([b"the last"])
        await pair.accepted.close(linger_s=_PATIENCE_S)
        assert await _receive_until_lost(pair.dialler) == [b"the last"]
        again = await pair.dialling.dial(pair.listener.address, timeout_s=_PATIENCE_S)
        await again.send([b"again"])
        assert await _receive(await pair.listener.accept()) == [b"again"]


async def a_closed_connection_says_so(make: MakeTransport, address: Address) -> None:
    for end in ("dialler", "accepted"):
        async with _pair(make, address) as pair:
            connection = pair.dialler if end == "dialler" else pair.accepted
            waiting = asyncio.ensure_future(connection.receive())
            await asyncio.sleep(0)
            await connection.close()
            await connection.close()
            for use in (waiting, connection.receive(), connection.send([b"x"])):
                with contextlib.suppress(TransportClosed):
                    await use
                    raise AssertionError("a connection that was closed here raises TransportClosed")


async def a_closed_listener_loses_its_peers(make: MakeTransport, address: Address) -> None:
    async with _pair(make, address) as pair:
        accepting = asyncio.ensure_future(pair.listener.accept())
        await asyncio.sleep(0)
        await pair.listener.close()
        await pair.listener.close()
        assert await _receive_until_lost(pair.dialler) == []
        with contextlib.suppress(TransportClosed):
            await accepting
            raise AssertionError("accept raises TransportClosed once the listener is closed")


async def an_address_in_use_is_named(make: MakeTransport, address: Address) -> None:
    async with _pair(make, address) as pair:
        second = make()
        try:
            await second.listen(pair.listener.address)
        except AddressError as e:
            assert pair.listener.address in str(e), f"{e} does not name {pair.listener.address}"  # noqa: PT017
        else:
            raise AssertionError("a second listener at one address raises AddressError")
        finally:
            await second.close()


async def an_address_that_is_none_is_named(make: MakeTransport, address: Address) -> None:
    transport = make()
    for wrong in ("", "nonsense", "nonsense://x", address.partition("://")[0] + "://"):
        for use in (transport.listen(Address(wrong)), transport.dial(Address(wrong), timeout_s=_PATIENCE_S)):
            try:
                await use
            except AddressError as e:
                assert repr(wrong) in str(e), f"{e} does not name {wrong!r}"  # noqa: PT017
            else:
                raise AssertionError(f"{wrong!r} raises AddressError")
    await transport.close()


async def dialling_nobody_ends_in_time(make: MakeTransport, address: Address) -> None:
    async with asyncio.timeout(_PATIENCE_S):
        transport = make()
        listener = await transport.listen(address)
        await listener.close()
        try:
            await transport.dial(listener.address, timeout_s=0.2)
        except PeerLost as e:
            assert listener.address in str(e), f"{e} does not name {listener.address}"  # noqa: PT017
        else:
            raise AssertionError("dialling where nobody listens raises PeerLost")
        finally:
            await transport.close()


async def whoever_dials_first_waits(make: MakeTransport, address: Address) -> None:
    async with asyncio.timeout(_PATIENCE_S):
        listening, dialling = make(), make()
        free = await listening.listen(address)
        await free.close()
        dial = asyncio.ensure_future(dialling.dial(free.address, timeout_s=_PATIENCE_S))
        await asyncio.sleep(0)
        listener = await listening.listen(free.address)
        connection = await dial
        await connection.send([b"early"])
        assert await _receive(await listener.accept()) == [b"early"]
        await dialling.close()
        await listening.close()


async def peers_that_come_and_go_are_each_lost_once_and_only_then(make: MakeTransport, address: Address) -> None:
    """Whatever names connections below (file descriptors, say) is used again and again."""
    async with _pair(make, address) as pair:
        for i in range(40):
            visitor = await pair.dialling.dial(pair.listener.address, timeout_s=_PATIENCE_S)
            await visitor.send([b"%d" % i])
            accepted = await pair.listener.accept()
            if i % 2:
                await accepted.send([b"back"])
                assert await _receive(visitor) == [b"back"]
            await visitor.close(linger_s=_PATIENCE_S)
            assert await _receive_until_lost(accepted) == [b"%d" % i]
        await pair.dialler.send([b"still here"])
        assert await _receive(pair.accepted) == [b"still here"]


async def a_closed_transport_says_so(make: MakeTransport, address: Address) -> None:
    transport = make()
    await transport.close()
    await transport.close()
    for use in (transport.listen(address), transport.dial(address, timeout_s=_PATIENCE_S)):
        with contextlib.suppress(TransportClosed):
            await use
            raise AssertionError("a transport that was closed here raises TransportClosed")


TRANSPORT_CHECKS: tuple[TransportCheck, ...] = (
    frames_arrive_as_they_were,
    messages_keep_their_order,
    bytes_are_counted_at_both_ends,
    peers_are_told_apart,
    a_cancelled_receive_loses_no_message,
    a_peer_that_leaves_is_lost_after_what_it_sent,
    a_connection_closed_by_the_listening_end_is_lost_to_the_dialler,
    a_closed_connection_says_so,
    a_closed_listener_loses_its_peers,
    an_address_in_use_is_named,
    an_address_that_is_none_is_named,
    dialling_nobody_ends_in_time,
    whoever_dials_first_waits,
    peers_that_come_and_go_are_each_lost_once_and_only_then,
    a_closed_transport_says_so,
)
