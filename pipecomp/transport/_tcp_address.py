"""Addresses of TCP: `tcp://HOST:PORT`, `tcp://[IPV6]:PORT`. Knows text and name resolution; opens no lasting connection."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import os
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from pipecomp.errors import AddressError
from pipecomp.transport.base import Address

SCHEME = "tcp://"
NO_CONNECTION = "no connection"
_PORT = re.compile("[0-9]{1,5}")


class Endpoint(NamedTuple):
    host: str
    port: int


def parse_address(address: Address) -> Endpoint:
    """Host and port of `tcp://HOST:PORT`. Raises AddressError that says how to write it."""
    rest = address.removeprefix(SCHEME)
    host, colon, port = rest.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if rest == address or not colon or not host or not _PORT.fullmatch(port) or int(port) > 65535:
        raise AddressError(
            f"{address!r} is not an address: write tcp://HOST:PORT or tcp://[IPV6]:PORT, with a port up to 65535"
        )
    return Endpoint(host, int(port))


async def resolve(address: Address) -> list[Endpoint]:
    """Numeric endpoints of an address, in the order the system prefers."""
    host, port = parse_address(address)
    with contextlib.suppress(ValueError):  # numeric: nothing to ask, and no thread to ask it in
        return [Endpoint(str(ipaddress.ip_address(host)), port)]
    # A thread of its own: those of the loop stay for as long as the loop, and a name server may not answer for long.
    pool = ThreadPoolExecutor(1, thread_name_prefix="resolve")
    try:
        lookup = functools.partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(pool, lookup)
    except (OSError, ValueError) as e:  # ValueError: text that is no name at all
        raise AddressError(f"{address}: the name {host!r} cannot be resolved: {getattr(e, 'strerror', '') or e}") from e
    finally:
        pool.shutdown(wait=False)
    return list(dict.fromkeys(Endpoint(str(sockaddr[0]), port) for *_, sockaddr in found))


def endpoint_text(endpoint: Endpoint) -> str:
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    return f"{SCHEME}{host}:{endpoint.port}"


async def why_not(endpoint: Endpoint) -> str:
    """ZeroMQ does not tell why it could not connect; the system does."""
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            await loop.sock_connect(probe, (endpoint.host, endpoint.port))
    except OSError as e:
        return os.strerror(e.errno).lower() if e.errno else str(e)
    return NO_CONNECTION
