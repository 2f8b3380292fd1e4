"""What a link really carries: bytes of one TCP connection that arrive in a second. Knows sockets and hosts; nothing of training.

    python -m pipecomp.testing.goodput receive HOST PORT [WARM_UP]      wait for one sender, print one JSON object
    python -m pipecomp.testing.goodput send HOST PORT SECONDS           send as fast as the link takes it

`measure_neighbours(hosts)` runs both ends on the machines of a `Hosts`. A rate that a queue is told counts headers and is
never what arrives; figures are held against what arrives.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from pipecomp.testing.hosts import Hosts, HostsFailed

_BLOCK = 1 << 16
_WARM_UP_S = 0.5
"""Slow start, and what a token bucket had saved, are no part of the rate."""
_PATIENCE_S = 30.0
_PORT = 7690


def receive(host: str, port: int, warm_up_s: float = _WARM_UP_S) -> float:
    """Bytes a second that one sender's connection brings after the warm-up; 0 if it ends before that.

    Raises:
        OSError: the port is taken, or no sender comes.
    """
    with socket.create_server((host, port)) as server:
        server.settimeout(_PATIENCE_S)
        connection, _ = server.accept()
    with connection:
        connection.settimeout(_PATIENCE_S)
        block = bytearray(_BLOCK)
        begin = time.monotonic() + warm_up_s
        first = last = 0.0
        nbytes = 0
        while got := connection.recv_into(block):
            last = time.monotonic()
            if last < begin:
                continue
            nbytes += got if first else 0  # what comes first was on its way before
            first = first or last
    return nbytes / (last - first) if last > first else 0.0


def send(host: str, port: int, duration_s: float) -> None:
    """Send zeros for so long; what the link has not taken by then is dropped."""
    with _connect(host, port) as connection:
        block = bytes(_BLOCK)
        deadline = time.monotonic() + duration_s
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < deadline:
                connection.sendall(block)


def measure_neighbours(
    hosts: Hosts, num_hosts: int, *, duration_s: float = 2.0, warm_up_s: float = _WARM_UP_S
) -> list[float]:
    """Bytes a second from host i to host i + 1, one link after another, for the first `num_hosts` hosts. Of each connection the
    first `warm_up_s` do not count.

    Raises:
        HostsFailed: an end did not do its work; says what it printed.
    """
    with tempfile.TemporaryDirectory(prefix="goodput-") as folder:
        return [_measure(hosts, i, i + 1, duration_s, warm_up_s, Path(folder)) for i in range(num_hosts - 1)]


def _measure(hosts: Hosts, sender: int, receiver: int, duration_s: float, warm_up_s: float, folder: Path) -> float:
    address, port = hosts.address(receiver), str(_PORT)
    tool = [hosts.python, "-m", "pipecomp.testing.goodput"]
    received, sent = folder / f"receive-{receiver}", folder / f"send-{sender}"
    ends = [
        hosts.start(receiver, [*tool, "receive", address, port, str(warm_up_s)], log=received),
        hosts.start(sender, [*tool, "send", address, port, str(duration_s + warm_up_s)], log=sent),
    ]
    codes = [end.wait(timeout=4 * _PATIENCE_S) for end in ends]
    if any(codes):
        raise HostsFailed(f"goodput from host {sender} to host {receiver}: {received.read_text()}{sent.read_text()}")
    return float(json.loads(received.read_text())["nbytes_per_s"])


def describe(rates_nbytes_per_s: Sequence[float]) -> str:
    """Such as `94.9 Mbit/s (94.6 to 95.5)`."""
    rates = [8e-6 * rate for rate in rates_nbytes_per_s]
    middle = statistics.median(rates)
    return f"{middle:.1f} Mbit/s" + (f" ({min(rates):.1f} to {max(rates):.1f})" if len(rates) > 1 else "")


def _connect(host: str, port: int) -> socket.socket:
    """The receiver may be a moment late."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return socket.create_connection((host, port), timeout=_PATIENCE_S)
        except ConnectionRefusedError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(0.02)


def main(arguments: Sequence[str] | None = None) -> None:
    """One end."""
    parser = argparse.ArgumentParser(prog="python -m pipecomp.testing.goodput")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("receive", "send"):
        command = commands.add_parser(name)
        command.add_argument("host")
        command.add_argument("port", type=int)
    commands.choices["send"].add_argument("seconds", type=float)
    commands.choices["receive"].add_argument("warm_up", type=float, nargs="?", default=_WARM_UP_S)
    options = parser.parse_args(arguments)
    if options.command == "send":
        send(options.host, options.port, options.seconds)
    else:
        sys.stdout.write(json.dumps({"nbytes_per_s": receive(options.host, options.port, options.warm_up)}) + "\n")


if __name__ == "__main__":
    main()
