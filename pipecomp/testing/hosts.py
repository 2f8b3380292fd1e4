"""Hosts on one machine, and how slow the links between them are. Knows ip(8), processes and link shapes; nothing of training.

    NamespaceHosts    network namespaces joined by a switch, each with mounts and a home of its own; needs root and iproute2
    LocalHosts        plain processes on the loopback interface, slowed down by what they run (`cluster.link_rate`); works
                      anywhere

Both are a `Hosts`, and so can be what starts commands on other machines or in containers.

    sw (a namespace of its own: no firewall rule of this machine reaches it)
     └── br0 ── p1 ~~ eth0 in host 0 (10.x.y.1)      both ends of each cable are shaped: a host's sending at eth0, its
             ── p2 ~~ eth0 in host 1 (10.x.y.2)      receiving at the switch's end

A command on a namespace's host runs in a mount namespace of its own: the folders in `hidden` are empty there, and HOME is an
empty folder, so that nothing works because two "hosts" happen to share a disk (law 11).
"""

from __future__ import annotations

import abc
import contextlib
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pipecomp.testing.packet_delay import delay_command, why_no_delay
from pipecomp.testing.shaping import MTU, LinkShape, kernel_has_netem, receiving_commands, run, sending_commands

_KEPT = ("PATH", "LANG", "NUMBA_CACHE_DIR", "PYTHONPATH")
"""Of this process's environment, what a command on a host gets."""


class HostsFailed(RuntimeError):
    """A command on a host did not do what it was started for."""


class Hosts(abc.ABC):
    """Machines that share nothing but a network, or what stands for them. Leaves nothing behind.

    Attributes:
        num_hosts: hosts have the indices 0 .. num_hosts - 1.
        shape: how slow each host's link is meant to be.
        python: the interpreter there, which can import pipecomp.
        emulation: what stands for machines and links, in words.
        missing: what of the shape could not be had, in words, each with its reason.
    """

    num_hosts: int
    shape: LinkShape
    python: str = sys.executable
    emulation: str
    missing: tuple[str, ...] = ()

    @abc.abstractmethod
    def address(self, host: int) -> str:
        """What the others dial."""

    @abc.abstractmethod
    def start(
        self,
        host: int,
        command: Sequence[str],
        *,
        log: Path,
        sees_all: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command on a host; it is ended with the hosts. All it prints goes to the file `log`; one that `sees_all`
        has nothing hidden from it."""

    def cluster_settings(self) -> dict[str, Any]:
        """Keys of a run's [cluster] that slow its links down where nothing else does."""
        return {}

    def check(self) -> None:  # noqa: B027 - most have nothing that could end
        """See that links are still as slow as they were made. Raises HostsFailed."""

    def end(self, process: subprocess.Popen[str]) -> None:
        """Kill a command and what it started; not one that is known to have ended, whose number may be another's by now."""
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    @abc.abstractmethod
    def __enter__(self) -> Self: ...

    @abc.abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None = None, error: BaseException | None = None, trace: TracebackType | None = None
    ) -> None: ...


def why_not() -> str:
    """Why this machine cannot have hosts as namespaces; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc", "unshare", "mount"):
        if shutil.which(program) is None:
            return f"{program} is not installed (Debian: iproute2, util-linux)"
    name = f"pc-try-{secrets.token_hex(2)}"
    probe = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if probe.returncode:
        return f"ip netns add failed: {probe.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    return ""


class LocalHosts(Hosts):
    """Processes of this machine. What they run slows its own sending down, by `cluster_settings`; losses cannot be had."""

    def __init__(self, num_hosts: int, shape: LinkShape = LinkShape()) -> None:  # noqa: B008 - a frozen value
        self.num_hosts, self.shape = num_hosts, shape
        self.emulation = "processes on the loopback interface; each holds its sending back in user space"
        self.missing = ("loss: user space cannot lose packets of a connection",) if shape.loss else ()
        self._processes: list[subprocess.Popen[str]] = []

    def address(self, host: int) -> str:
        return "127.0.0.1"

    def cluster_settings(self) -> dict[str, Any]:
        rate = self.shape.rate_nbits_per_s
        settings: dict[str, Any] = {} if rate is None else {"link_rate": f"{rate / 1e3:.0f}kbit"}
        return settings | ({"link_latency_ms": 1e3 * self.shape.delay_s} if self.shape.delay_s else {})

    def start(
        self,
        host: int,
        command: Sequence[str],
        *,
        log: Path,
        sees_all: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        kept = {k: v for k, v in os.environ.items() if k in (*_KEPT, "HOME")}
        process = _start(command, {**kept, **(environment or {})}, log)
        self._processes.append(process)
        return process

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            self.end(process)


class NamespaceHosts(Hosts):
    """`with NamespaceHosts(3) as hosts: hosts.start(0, ["python", ...])`. Leaves nothing behind."""

    def __init__(
        self,
        num_hosts: int,
        shape: LinkShape = LinkShape(),  # noqa: B008 - a frozen value
        *,
        unshaped: Collection[int] = (),
        hidden: Sequence[Path] = (),
        mtu: int = MTU,
        congestion: str | None = None,
        keeps_windows: bool = False,
    ) -> None:
        """`unshaped`: hosts whose own link is as fast as it goes. `hidden`: folders that are empty for commands there. `mtu`:
        bytes of a frame. `congestion`: TCP's congestion control there; None: this machine's own. `keeps_windows`: a connection
        that was idle goes on as fast as before (`net.ipv4.tcp_slow_start_after_idle = 0`)."""
        self.num_hosts, self.shape = num_hosts, shape
        control = "" if congestion is None else f", TCP with {congestion}"
        control += ", whose connections go on after a pause as fast as before" if keeps_windows else ""
        self.emulation = f"network namespaces of one machine, joined by a bridge, frames of {mtu} bytes{control}"
        self._unshaped = frozenset(unshaped)
        self._hidden = tuple(hidden)
        self._mtu, self._congestion, self._keeps_windows = mtu, congestion, keeps_windows
        tag = secrets.token_hex(2)
        self._switch = f"pc{tag}-sw"
        self._names = [f"pc{tag}-h{i + 1}" for i in range(num_hosts)]
        self._subnet = f"10.{77 + secrets.randbelow(100)}.{secrets.randbelow(250)}"
        self._processes: list[subprocess.Popen[str]] = []
        self._delays: dict[Path, subprocess.Popen[str]] = {}
        self._undo = contextlib.ExitStack()
        self._folder = Path()

    def address(self, host: int) -> str:
        """IPv4 address of a host, 0 .. num_hosts - 1."""
        return f"{self._subnet}.{host + 1}"

    def __enter__(self) -> Self:
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="pipecomp-hosts-"))
            self._undo.callback(shutil.rmtree, self._folder, ignore_errors=True)
            for name in [self._switch, *self._names]:
                self._undo.callback(subprocess.run, ["ip", "netns", "del", name], check=False, capture_output=True)
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def start(
        self,
        host: int,
        command: Sequence[str],
        *,
        log: Path,
        sees_all: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        """See `Hosts.start`."""
        home = self._folder / f"home-{host + 1}-{len(self._processes)}"
        home.mkdir()
        hidden = () if sees_all else self._hidden
        hide = "".join(f"mount -t tmpfs none {shlex.quote(str(folder))} && " for folder in hidden)
        script = f"{hide}exec {shlex.join(command)}"
        kept = {k: v for k, v in os.environ.items() if k in _KEPT}
        inside = ["ip", "netns", "exec", self._names[host], "unshare", "--mount", "sh", "-c", script]
        process = _start(inside, {**kept, "HOME": str(home), **(environment or {})}, log)
        self._processes.append(process)
        self._undo.callback(self.end, process)
        return process

    def cut(self, one: int, other: int) -> None:
        """Let nothing pass between two hosts any more, without a word to either: open connections see no reset."""
        self._route("add", one, other)

    def mend(self, one: int, other: int) -> None:
        """Undo a `cut`."""
        self._route("del", one, other)

    def check(self) -> None:
        for log, process in self._delays.items():
            if process.poll() is not None:
                raise HostsFailed(f"packets are not delayed any more: {log.stem} has ended: {log.read_text().strip()}")

    def nbytes_sent(self, host: int) -> int:
        """Bytes the host's interface has sent, link headers included."""
        return int(self._in(self._names[host], "cat", "/sys/class/net/eth0/statistics/tx_bytes"))

    # ------------------------------------------------------------

    def _build(self) -> None:
        self._ip("netns", "add", self._switch)
        self._ip("-n", self._switch, "link", "add", "br0", "type", "bridge", "forward_delay", "0", "stp_state", "0")
        self._ip("-n", self._switch, "link", "set", "br0", "up")
        for number, name in enumerate(self._names, start=1):
            port = f"p{number}"
            self._ip("netns", "add", name)
            mtu = ("mtu", str(self._mtu))
            self._ip("-n", self._switch, "link", "add", port, *mtu, "type", "veth", "peer", "name", "eth0", *mtu, "netns", name)
            self._ip("-n", self._switch, "link", "set", port, "master", "br0", "up")
            self._ip("-n", name, "addr", "add", f"{self._subnet}.{number}/24", "dev", "eth0")
            self._ip("-n", name, "link", "set", "lo", "up")
            self._ip("-n", name, "link", "set", "eth0", "up")
            if self._keeps_windows:
                self._in(name, "sh", "-c", "echo 0 > /proc/sys/net/ipv4/tcp_slow_start_after_idle")
            if self._congestion is not None:
                subnet, source = f"{self._subnet}.0/24", ("src", f"{self._subnet}.{number}")
                route = ("route", "replace", subnet, "dev", "eth0", "proto", "kernel", "scope", "link", *source)
                self._ip("-n", name, *route, "congctl", self._congestion)
        self._slow_down()

    def _route(self, verb: str, one: int, other: int) -> None:
        for here, there in ((one, other), (other, one)):
            self._ip("-n", self._names[here], "route", verb, "blackhole", f"{self.address(there)}/32")

    def _slow_down(self) -> None:
        needs_netem = bool(self.shape.delay_s or self.shape.loss)
        has_netem = needs_netem and kernel_has_netem()
        slow = [host for host in range(self.num_hosts) if host not in self._unshaped]
        for host in slow:
            for command in sending_commands("eth0", self.shape, has_netem=has_netem, mtu=self._mtu):
                run(["tc", "-n", self._names[host], *command])
            for command in receiving_commands(f"p{host + 1}", self.shape, mtu=self._mtu):
                run(["tc", "-n", self._switch, *command])
        rate = self.shape.rate_nbits_per_s
        self.emulation += "" if rate is None else "; the kernel's token buckets (tbf) slow both ends of each host's cable"
        if has_netem:
            self.emulation += "; delay and loss by netem"
        elif needs_netem:
            self._do_without_netem(slow)

    def _do_without_netem(self, slow: Sequence[int]) -> None:
        if self.shape.loss:
            self.missing += ("loss: this kernel has no netem",)
        reason = why_no_delay() if self.shape.delay_s else ""
        if reason:
            self.missing += (f"delay: this kernel has no netem, and {reason}",)
        elif self.shape.delay_s:
            for host in slow:
                log = self._folder / f"delay-{host + 1}.log"
                self._delays[log] = self.start(host, delay_command(self.python, self.shape.delay_s), log=log)
                wait_until_ready(self._delays[log], log)
            self.emulation += "; a program (NFQUEUE) holds what a host receives for the delay"

    def _ip(self, *arguments: str) -> None:
        run(["ip", *arguments])

    def _in(self, namespace: str, *command: str) -> str:
        return run(["ip", "netns", "exec", namespace, *command])


def wait_until_ready(process: subprocess.Popen[str], log: Path, *, timeout_s: float = 30.0) -> None:
    """Return once a command has said `ready`. Raises HostsFailed if it ends or takes too long."""
    deadline = time.monotonic() + timeout_s
    while "ready" not in log.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            raise HostsFailed(f"not ready: {log.read_text().strip()}")
        time.sleep(0.02)


def _start(command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[str]:
    with log.open("w") as output:
        return subprocess.Popen(
            list(command),
            env=dict(environment),
            text=True,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
