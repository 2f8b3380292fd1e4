"""Text of addresses, and what a person is told when one cannot be used."""

from __future__ import annotations

import pytest

from pipecomp.errors import AddressError, PeerLost
from pipecomp.transport._tcp_address import parse_address
from pipecomp.transport.base import Address
from pipecomp.transport.zeromq import ZeromqTransport


@pytest.fixture
async def transport():
    made = ZeromqTransport()
    yield made
    await made.close()


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("tcp://10.0.0.1:5555", "10.0.0.1", 5555),
        ("tcp://worker-1.lan:0", "worker-1.lan", 0),
        ("tcp://[::1]:65535", "::1", 65535),
    ],
)
def test_a_host_and_a_port_are_read(text, host, port):
    assert parse_address(Address(text)) == (host, port)


@pytest.mark.parametrize(
    "text",
    ["", "tcp://", "tcp://host", "tcp://host:", "tcp://:5", "tcp://::1:5", "tcp://host:65536", "tcp://host:-1", "tcp://h:٣",
     "host:5555", "udp://host:5", "tcp://host:" + "9" * 5000],
)  # fmt: skip
def test_what_is_no_address_is_answered_with_how_to_write_one(text):
    with pytest.raises(AddressError, match=r"write tcp://HOST:PORT or tcp://\[IPV6\]:PORT"):
        parse_address(Address(text))


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b", "x" * 100])
async def test_a_name_that_cannot_be_resolved_is_named(transport, host):
    with pytest.raises(AddressError, match=f"the name '{host}' cannot be resolved"):
        await transport.dial(Address(f"tcp://{host}:5"), timeout_s=0.1)


async def test_a_refused_dial_says_that_it_was_refused(transport):
    with pytest.raises(PeerLost, match=r"cannot reach tcp://127.0.0.1:1 within 0.1 s: connection refused"):
        await transport.dial(Address("tcp://127.0.0.1:1"), timeout_s=0.1)


async def test_an_address_of_another_machine_cannot_be_listened_at(transport):
    with pytest.raises(AddressError, match=r"tcp://192.0.2.1:0: this machine has no such address"):
        await transport.listen(Address("tcp://192.0.2.1:0"))


async def test_a_port_in_use_is_told_with_what_to_do(transport):
    listener = await transport.listen(Address("tcp://127.0.0.1:0"))
    with pytest.raises(AddressError, match=rf"{listener.address}: the port is in use: choose another, or port 0"):
        await transport.listen(listener.address)
