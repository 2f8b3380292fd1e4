"""How the kernel slows a link down: queues for rate, delay and loss. Knows tc(8) and its answers; no hosts.

    netem (delay, loss)  -->  tbf (rate)       where the kernel has netem
                              tbf (rate)       where it has not; a delay can then be had in another way (`packet_delay`)

Rates of a token bucket count Ethernet and TCP headers: one TCP connection gets about 95.5 % of them, or 99 % with jumbo frames.
A link that was idle lets ten frames through at once.
"""

from __future__ import annotations

import functools
import secrets
import shlex
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

_QUEUE_S = 0.05
_FULL_FRAME = 1514
_LEAST_PACKETS = 1000
_UNSHAPED_NBITS_PER_S = 10e9
AT_ROOT: tuple[str, ...] = ("root",)
BEHIND_DELAY: tuple[str, ...] = ("parent", "1:1")
"""Where a queue for the rate stands: alone, or behind that of `delay_command`."""
MTU, JUMBO_MTU = 1500, 9000
"""Bytes of a frame. Where all hosts are one machine, all their packets are its work: with jumbo frames a fifth of it."""


class LinkShape(NamedTuple):
    """What is asked of a machine's link, in each direction."""

    rate_nbits_per_s: float | None = None
    """None: as fast as it goes."""
    delay_s: float = 0.0
    """One way, of everything that is sent."""
    loss: float = 0.0
    """Part of all packets that is lost, from 0 to 1."""

    def describe(self) -> str:
        """Such as `100 Mbit/s, 10 ms, 1 % lost`."""
        rate = "unshaped" if self.rate_nbits_per_s is None else f"{self.rate_nbits_per_s / 1e6:g} Mbit/s"
        delay = [f"{1e3 * self.delay_s:g} ms"] if self.delay_s else []
        return ", ".join([rate, *delay, *([f"{100 * self.loss:g} % lost"] if self.loss else [])])


class KernelRefused(RuntimeError):
    """A command of ip(8), tc(8) or iptables(8) failed; the text has the command and its answer."""


def sending_commands(device: str, shape: LinkShape, *, has_netem: bool, mtu: int = MTU) -> list[list[str]]:
    """Arguments of tc(8) that shape what leaves through `device`; without netem, its rate alone."""
    is_first = has_netem and bool(shape.delay_s or shape.loss)
    commands = [delay_command(device, shape)] if is_first else []
    return commands + _rate_commands(device, shape, BEHIND_DELAY if is_first else AT_ROOT, mtu)


def receiving_commands(device: str, shape: LinkShape, *, mtu: int = MTU) -> list[list[str]]:
    """The same for the switch's end of a cable, through which all leaves that the host receives: its rate alone."""
    return _rate_commands(device, shape, AT_ROOT, mtu)


def delay_command(device: str, shape: LinkShape) -> list[str]:
    """Arguments of tc(8) for delay and loss of what leaves through `device`. What may be under way fits its queue, or would be
    dropped."""
    rate = shape.rate_nbits_per_s or _UNSHAPED_NBITS_PER_S
    limit = max(_LEAST_PACKETS, round(2 * rate / 8 * (shape.delay_s + _QUEUE_S) / _FULL_FRAME))
    options = ["delay", f"{1e3 * shape.delay_s:g}ms"] if shape.delay_s else []
    options += ["loss", f"{100 * shape.loss:g}%"] if shape.loss else []
    return ["qdisc", "replace", "dev", device, "root", "handle", "1:", "netem", *options, "limit", str(limit)]


def rate_command(
    device: str, rate_nbits_per_s: float, parent: Sequence[str] = AT_ROOT, *, mtu: int = MTU, delay_s: float = 0.0
) -> list[str]:
    """Arguments of tc(8) for the rate of what leaves through `device`. It bursts for 2 ms, or a timer's tick would cost
    throughput, and never for fewer than ten full frames. It queues 50 ms, and what is under way there and back (`delay_s` each
    way): with less, TCP falls below the rate after each loss."""
    burst = max(10 * mtu + 1000, int(rate_nbits_per_s / 8 / 500))
    options = ["rate", f"{rate_nbits_per_s:.0f}bit", "burst", str(burst), "latency", f"{1e3 * (_QUEUE_S + 2 * delay_s):g}ms"]
    return ["qdisc", "replace", "dev", device, *parent, "handle", "10:", "tbf", *options]


def _rate_commands(device: str, shape: LinkShape, parent: Sequence[str], mtu: int) -> list[list[str]]:
    rate = shape.rate_nbits_per_s
    return [] if rate is None else [rate_command(device, rate, parent, mtu=mtu, delay_s=shape.delay_s)]


@functools.cache
def kernel_has_netem() -> bool:
    """Whether a queue of this kind can be made; needs root.

    Raises:
        KernelRefused: there is another reason why not.
    """
    name = f"pc-try-{secrets.token_hex(2)}"
    run(["ip", "netns", "add", name])
    try:
        run(["tc", "-n", name, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"])
    except KernelRefused as refused:
        if "qdisc kind is unknown" not in str(refused):
            raise
        return False
    finally:
        run(["ip", "netns", "del", name])
    return True


def run(command: Sequence[str]) -> str:
    """What a command prints. Raises KernelRefused with its answer."""
    done = subprocess.run(list(command), capture_output=True, text=True, check=False)
    if done.returncode:
        raise KernelRefused(f"{shlex.join(command)}: {done.stderr.strip()}")
    return done.stdout
