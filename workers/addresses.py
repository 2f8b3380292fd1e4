"""Addresses as a worker's user writes them. Knows text and the system's routes; dials nothing."""

from __future__ import annotations

import socket

from pipecomp.errors import AddressError

_LAST_PORT = 65535


def with_scheme(address: str) -> str:
    """`HOST:PORT` as a transport's address."""
    return address if "://" in address else f"tcp://{address}"


def check_advertised(advertise: str) -> None:
    """Find out here, not when the others cannot dial it. Raises AddressError."""
    host, port = advertise, "1"
    if not advertise.endswith("]") and ":" in advertise:
        host, _, port = advertise.rpartition(":")
    is_one_host = (host.startswith("[") and host.endswith("]")) or ":" not in host
    if not host or not is_one_host or not port.isdigit() or not 0 < int(port) <= _LAST_PORT:
        raise AddressError(f"--advertise {advertise}: write HOST, HOST:PORT or [IPV6]:PORT, as the others dial it")


def source_address(coordinator: str) -> str | None:
    """The local address from which packets to the coordinator leave; None where the route is not known yet.

    Raises:
        AddressError: `coordinator` is not HOST:PORT, or its name is not known.
    """
    host, _, port = coordinator.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) <= _LAST_PORT:
        raise AddressError(f"--coordinator {coordinator}: write HOST:PORT of the coordinator, for example 192.0.2.7:7700")
    try:
        family, kind, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            found: str = probe.getsockname()[0]
            return f"[{found}]" if ":" in found else found
    except (OSError, ValueError) as error:  # ValueError: text that is no name at all
        reason = getattr(error, "strerror", None) or error
        raise AddressError(f"--coordinator {coordinator}: {reason}; write HOST:PORT of the running coordinator") from error
