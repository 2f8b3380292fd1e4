"""Every transport, the shaped ones included, on both kinds of loop, against the public checks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

import pipecomp.transport
from pipecomp.errors import AddressError
from pipecomp.testing.transport_checks import TRANSPORT_CHECKS
from pipecomp.transport import open_transport
from pipecomp.transport.base import Address, Transport
from pipecomp.transport.memory import MemoryNetwork, MemoryTransport
from pipecomp.transport.shaped import ShapedTransport
from pipecomp.transport.zeromq import ZeromqTransport


def memory() -> tuple[Callable[[], Transport], Address]:
    network = MemoryNetwork()
    return lambda: MemoryTransport(network), MemoryTransport.any_address


def zeromq() -> tuple[Callable[[], Transport], Address]:
    return ZeromqTransport, ZeromqTransport.any_address


def zeromq_ipv6() -> tuple[Callable[[], Transport], Address]:
    return ZeromqTransport, Address("tcp://[::1]:0")


def shaped_memory() -> tuple[Callable[[], Transport], Address]:
    network = MemoryNetwork()
    return lambda: ShapedTransport(MemoryTransport(network), rate_nbytes_per_s=1e9, latency_s=0.001), Address(
        "memory://a:0"
    )


def shaped_zeromq() -> tuple[Callable[[], Transport], Address]:
    return lambda: ShapedTransport(ZeromqTransport(), rate_nbytes_per_s=1e9, latency_s=0.001), Address(
        "tcp://127.0.0.1:0"
    )


def run_on_asyncio(main):
    with asyncio.Runner() as runner:
        runner.run(main)


def run_on_uvloop(main):
    uvloop = pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


@pytest.mark.parametrize("run", [run_on_asyncio, run_on_uvloop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize(
    "kind", [memory, zeromq, zeromq_ipv6, shaped_memory, shaped_zeromq], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__)
def test_a_transport_keeps_its_contract(check, kind, run):
    make, address = kind()
    run(check(make, address))


@pytest.mark.parametrize("scheme", pipecomp.transport.schemes())
async def test_every_scheme_opens_a_transport(scheme):
    transport = open_transport(Address(f"{scheme}://127.0.0.1:0"))
    await transport.close()


@pytest.mark.parametrize("address", ["", "host:5555", "udp://host:1"])
def test_an_unknown_scheme_is_answered_with_those_there_are(address):
    with pytest.raises(AddressError, match=r"memory, tcp"):
        open_transport(Address(address))
