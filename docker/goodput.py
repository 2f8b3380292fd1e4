"""What a link really carries: bytes of one TCP connection that arrive in a second. Knows sockets; nothing of pipecomp.

    goodput.py receive PORT                 wait for one sender, print what arrived as one JSON object
    goodput.py send HOST PORT SECONDS       send as fast as the link takes it
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import time

_BLOCK = 1 << 16
_WARM_UP_S = 0.5  # slow start, and what a token bucket had saved, are no part of the rate
_PATIENCE_S = 30.0


def receive(port: int) -> dict[str, float]:
    """Bytes, seconds and Mbit/s of what arrives after the warm-up."""
    with socket.create_server(("", port)) as server:
        server.settimeout(_PATIENCE_S)
        connection, _ = server.accept()
    with connection:
        connection.settimeout(_PATIENCE_S)
        block = bytearray(_BLOCK)
        begin = time.monotonic() + _WARM_UP_S
        first = last = 0.0
        nbytes = 0
        while got := connection.recv_into(block):
            last = time.monotonic()
            if last < begin:
                continue
            if not first:
                first = last  # what came now was sent before
            else:
                nbytes += got
    duration = last - first
    mbit_per_s = nbytes * 8e-6 / duration if duration else 0.0
    return {"nbytes": nbytes, "seconds": round(duration, 3), "mbit_per_s": round(mbit_per_s, 3)}


def send(host: str, port: int, duration_s: float) -> None:
    """Send zeros until the time is over; what the link has not taken by then is dropped."""
    with _connect(host, port) as connection:
        block = bytes(_BLOCK)
        deadline = time.monotonic() + duration_s
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < deadline:
                connection.sendall(block)


def _connect(host: str, port: int) -> socket.socket:
    """The receiver may be a moment late."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return socket.create_connection((host, port), timeout=_PATIENCE_S)
        except ConnectionRefusedError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    receiver = commands.add_parser("receive")
    receiver.add_argument("port", type=int)
    sender = commands.add_parser("send")
    sender.add_argument("host")
    sender.add_argument("port", type=int)
    sender.add_argument("seconds", type=float)
    options = parser.parse_args()
    if options.command == "receive":
        print(json.dumps(receive(options.port)))
    else:
        send(options.host, options.port, options.seconds)


if __name__ == "__main__":
    main()
