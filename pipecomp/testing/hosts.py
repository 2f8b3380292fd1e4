"""Hosts on one machine: network namespaces joined by a switch, each with mounts and a home of its own. Knows ip(8), tc(8) and
processes; nothing of pipecomp. Needs root and iproute2.

    sw (a namespace of its own: no firewall rule of this machine reaches it)
     └── br0 ── p1 ~~ eth0 in host 1 (10.x.y.1)      both ends of each cable are shaped when a rate is given:
             ── p2 ~~ eth0 in host 2 (10.x.y.2)      a host's sending at eth0, its receiving at the switch's end

A command on a host runs in a mount namespace of its own: the folders in `hidden` are empty there, and HOME is an empty folder,
so that nothing works because two "hosts" happen to share a disk (law 11).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

_MIN_BURST = 16_000


def why_not() -> str:
    """Why this machine cannot have such hosts; empty if it can."""
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


class NamespaceHosts:
    """`with NamespaceHosts(3) as hosts: hosts.start(0, ["python", ...])`. Leaves nothing behind."""

    def __init__(self, num_hosts: int, *, rate_nbits_per_s: int | None = None, hidden: Sequence[Path] = ()) -> None:
        self.num_hosts = num_hosts
        self._rate = rate_nbits_per_s
        self._hidden = tuple(hidden)
        tag = secrets.token_hex(2)
        self._switch = f"pc{tag}-sw"
        self._names = [f"pc{tag}-h{i + 1}" for i in range(num_hosts)]
        self._subnet = f"10.{77 + secrets.randbelow(100)}.{secrets.randbelow(250)}"
        self._processes: list[subprocess.Popen[str]] = []
        self._folder = Path(tempfile.mkdtemp(prefix="pipecomp-hosts-"))

    def address(self, host: int) -> str:
        """IPv4 address of a host, 0 .. num_hosts - 1."""
        return f"{self._subnet}.{host + 1}"

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            self.end(process)
        for name in [*self._names, self._switch]:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        shutil.rmtree(self._folder, ignore_errors=True)

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
        home = self._folder / f"home-{host + 1}-{len(self._processes)}"
        home.mkdir()
        hidden = () if sees_all else self._hidden
        hide = "".join(f"mount -t tmpfs none {shlex.quote(str(folder))} && " for folder in hidden)
        script = f"{hide}exec {shlex.join(command)}"
        kept = {k: v for k, v in os.environ.items() if k in ("PATH", "LANG", "NUMBA_CACHE_DIR", "PYTHONPATH")}
        with log.open("w") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self._names[host], "unshare", "--mount", "sh", "-c", script],
                env={**kept, "HOME": str(home), **(environment or {})},
                text=True,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._processes.append(process)
        return process

    def end(self, process: subprocess.Popen[str]) -> None:
        """Kill a command and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def cut(self, one: int, other: int) -> None:
        """Let nothing pass between two hosts any more, without a word to either: open connections see no reset."""
        self._route("add", one, other)

    def mend(self, one: int, other: int) -> None:
        """Undo a `cut`."""
        self._route("del", one, other)

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
            self._ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            self._ip("-n", self._switch, "link", "set", port, "master", "br0", "up")
            self._ip("-n", name, "addr", "add", f"{self._subnet}.{number}/24", "dev", "eth0")
            self._ip("-n", name, "link", "set", "lo", "up")
            self._ip("-n", name, "link", "set", "eth0", "up")
            if self._rate is not None:
                self._shape(name, "eth0", self._rate)
                self._shape(self._switch, port, self._rate)

    def _route(self, verb: str, one: int, other: int) -> None:
        for here, there in ((one, other), (other, one)):
            self._ip("-n", self._names[here], "route", verb, "blackhole", f"{self.address(there)}/32")

    def _shape(self, namespace: str, device: str, rate: int) -> None:
        burst = max(_MIN_BURST, rate // 8 // 500)  # 2 ms of the rate, and never under ten full frames
        options = ["rate", f"{rate}bit", "burst", str(burst), "latency", "50ms"]
        _run(["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *options])

    def _ip(self, *arguments: str) -> None:
        _run(["ip", *arguments])

    def _in(self, namespace: str, *command: str) -> str:
        return _run(["ip", "netns", "exec", namespace, *command])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}: {done.stderr.strip()}")
    return done.stdout
