"""A fixed delay for all IPv4 packets that reach a network namespace, where the kernel has no netem. Knows iptables(8), netlink.

    python -m pipecomp.testing.packet_delay SECONDS     run it in the namespace, as root; it says `ready` and works until killed

iptables' NFQUEUE keeps each packet in the kernel and tells this program its number alone, so no byte is copied; after the delay
one verdict lets all packets up to that number go. It works on the receiving side: packets that are held at their sender count
against the little that TCP may keep in the sender's own queues, and would slow it down.

    packet comes in --> queue --> (number, now + delay) --> ... --> verdict: accept up to number --> the socket

If the program ends, packets pass undelayed (`--queue-bypass`), and with its namespace the rule goes too.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence

_QUEUE_NUMBER = 77
_MOST_HELD = 200_000
_NETLINK_NETFILTER = 12
_SO_RCVBUFFORCE = 33
_SOL_NETLINK, _NETLINK_NO_ENOBUFS = 270, 5
_SUBSYSTEM_QUEUE = 3
_VERDICT_BATCH, _CONFIG, _PACKET = 3, 2, 0
_REQUEST, _ACKNOWLEDGE = 1, 4
_COMMAND_BIND, _COPY_META = 1, 1
_FAIL_OPEN, _WHOLE_SEGMENTS = 1, 4
_ACCEPT = 1
_HEADER_NBYTES = 20
"""Of netlink (16) and netfilter (4); attributes follow."""


def why_no_delay() -> str:
    """Why packets cannot be delayed in this way; empty if they can."""
    return "" if _iptables() else "iptables is not installed, which would delay packets too"


def delay_command(python: str, delay_s: float) -> list[str]:
    """What to run in a namespace."""
    return [python, "-m", "pipecomp.testing.packet_delay", repr(delay_s)]


class HeldPackets:
    """The packets of one queue of the kernel, in order of arrival. Needs root."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._held: deque[tuple[float, bytes]] = deque()  # when to let it go; its number as the kernel wrote it
        self.socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER)
        self.socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 64 << 20)
        self.socket.setsockopt(_SOL_NETLINK, _NETLINK_NO_ENOBUFS, 1)
        self.socket.bind((0, 0))
        flags = struct.pack(">I", _FAIL_OPEN | _WHOLE_SEGMENTS)
        self._configure(_attribute(1, struct.pack(">BBH", _COMMAND_BIND, 0, socket.AF_INET)))
        self._configure(
            _attribute(2, struct.pack(">IB", 0, _COPY_META))
            + _attribute(3, struct.pack(">I", _MOST_HELD))
            + _attribute(4, flags)
            + _attribute(5, flags)
        )
        self.socket.setblocking(False)

    def take(self, now: float) -> None:
        """Note every packet that has come."""
        with contextlib.suppress(BlockingIOError):
            while True:
                number = packet_number(self.socket.recv(512))
                if number is not None:
                    self._held.append((now + self._delay_s, number))

    def let_go(self, now: float) -> float | None:
        """Let packets go whose time has come; in how many seconds the next one's has, None if there is none."""
        last = None
        while self._held and self._held[0][0] <= now:
            _, last = self._held.popleft()
        if last is not None:
            self.socket.send(_message(_VERDICT_BATCH, _attribute(2, struct.pack(">I", _ACCEPT) + last), _REQUEST))
        return self._held[0][0] - now if self._held else None

    def _configure(self, attributes: bytes) -> None:
        self.socket.send(_message(_CONFIG, attributes, _REQUEST | _ACKNOWLEDGE))
        code: int = struct.unpack_from("=i", self.socket.recv(4096), 16)[0]
        if code:
            raise OSError(-code, os.strerror(-code))


def packet_number(message: bytes) -> bytes | None:
    """The packet's number (4 bytes, as the kernel wrote them) in one message of the queue; None in any other message."""
    if len(message) < _HEADER_NBYTES + 8 or message[4:6] != struct.pack("=H", _SUBSYSTEM_QUEUE << 8 | _PACKET):
        return None
    return message[_HEADER_NBYTES + 4 : _HEADER_NBYTES + 8]  # the first attribute is the packet's header, its number first


def _message(kind: int, attributes: bytes, flags: int) -> bytes:
    length = _HEADER_NBYTES + len(attributes)
    head = struct.pack("=IHHII", length, _SUBSYSTEM_QUEUE << 8 | kind, flags, 0, 0)
    return head + struct.pack(">BBH", 0, 0, _QUEUE_NUMBER) + attributes


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def _iptables() -> str | None:
    return shutil.which("iptables-nft") or shutil.which("iptables")


def main(arguments: Sequence[str]) -> None:
    """Hold packets until somebody kills this process."""
    packets = HeldPackets(float(arguments[0]))
    rule = ["PREROUTING", "!", "-i", "lo", "-j", "NFQUEUE", "--queue-num", str(_QUEUE_NUMBER), "--queue-bypass"]
    subprocess.run([str(_iptables()), "-t", "mangle", "-A", *rule], check=True)
    with contextlib.suppress(OSError):  # a late verdict is a longer delay
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(10))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        rest = packets.let_go(time.monotonic())
        if select.select([packets.socket], [], [], rest)[0]:
            packets.take(time.monotonic())


if __name__ == "__main__":
    main(sys.argv[1:])
