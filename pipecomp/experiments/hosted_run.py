"""One run of a benchmark on hosts: a coordinator, workers, and what they tell. Knows hosts, processes and the files they write;
nothing of what is measured with them.

Steps are timed by the coordinator, from its plan to the last worker's commit. Processor time is read when the last step of the
warm-up ends and when the run does.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipecomp.config import RunConfig, resolved_toml
from pipecomp.errors import PipecompError
from pipecomp.testing.hosts import Hosts

_POLL_S = 0.1
_START_S = 600.0
_TAIL_LINES = 6
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class HostedRun(NamedTuple):
    """What is run: on the first hosts a worker each, on the one after them the coordinator."""

    label: str
    """For people."""
    config: RunConfig
    num_workers: int
    num_warm_up: int
    num_measured: int
    nominal_s: float
    """About how long a step takes; tells when to give up."""


class Outcome(NamedTuple):
    """What a run told."""

    summary: dict[str, Any]
    steps: list[dict[str, Any]]
    """Of the step log, warm-up first."""
    load: dict[str, Any]
    """What it took of this machine's processors in the measured steps, and what others did."""

    @property
    def times_s(self) -> list[float]:
        """Of all steps."""
        return [step["step_time_s"] for step in self.steps]


class Processors(NamedTuple):
    """Processor time so far, in seconds."""

    own: float  # of the run's processes
    own_kernel: float  # the part of it that the kernel worked for them: sockets, packets, fresh memory
    busy: float  # of all processors of this machine, whoever used them
    at: float

    @classmethod
    def read(cls, processes: Sequence[subprocess.Popen[str]]) -> Processors:
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        idle = fields[3] + fields[4]
        used = [_used_s(process.pid) for process in processes]
        own, kernel = (sum(part) for part in zip(*used, strict=True))
        return cls(own, kernel, (sum(fields) - idle) * _TICK_S, time.monotonic())


def run_on_hosts(hosts: Hosts, run: HostedRun, folder: Path) -> Outcome:
    """Run to the end.

    Args:
        hosts: one for each worker, then one for the coordinator.
        folder: an empty one for logs.

    Raises:
        PipecompError: a process failed, or the run took far too long; says what it printed.
    """
    processes = _start(hosts, run, folder)
    begun = _wait_for_step(processes, run, folder, run.num_warm_up)
    ended = _wait_for_step(processes, run, folder, run.num_warm_up + run.num_measured)
    _wait_for_end(processes, run, folder)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return Outcome(summary, _steps(folder), _load(begun, ended, run.num_measured))



def _start(hosts: Hosts, run: HostedRun, folder: Path) -> list[subprocess.Popen[str]]:
    run_file = folder / "run.toml"
    run_file.write_text(resolved_toml(run.config), encoding="utf-8")
    leader = run.num_workers
    address = f"{hosts.address(leader)}:{_free_ports()}"
    files = ["--summary", str(folder / "summary.json"), "--log", str(folder / "steps.jsonl"), "--quiet"]
    coordinator = [hosts.python, "-m", "coordinator", str(run_file), "--bind", address, *files]
    processes = [hosts.start(leader, coordinator, log=folder / "coordinator.log", sees_all=True)]
    for host in range(leader):
        join = ["--coordinator", address, "--name", f"host-{host}", "--bind", f"{hosts.address(host)}:0", "--threads", "1"]
        processes.append(hosts.start(host, [hosts.python, "-m", "workers", *join], log=folder / f"host-{host}.log"))
    return processes


def _free_ports() -> int:
    """A port that is free, and the next one too: weights take it."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as one:
            port: int = one.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except OSError:
                continue
            return port


def _wait_for_step(processes: Sequence[subprocess.Popen[str]], run: HostedRun, folder: Path, step: int) -> Processors:
    deadline = time.monotonic() + _START_S + 10 * run.nominal_s * step
    while len(_steps(folder)) < step:
        if any(process.poll() not in (None, 0) for process in processes) or time.monotonic() > deadline:
            raise _failure(processes, run, folder, f"no step {step}")
        if processes[0].poll() == 0 and len(_steps(folder)) < step:
            raise _failure(processes, run, folder, f"the run ended before step {step}")
        time.sleep(_POLL_S)
    return Processors.read(processes)


def _wait_for_end(processes: Sequence[subprocess.Popen[str]], run: HostedRun, folder: Path) -> None:
    try:
        codes = [process.wait(timeout=60.0) for process in processes]
    except subprocess.TimeoutExpired:
        raise _failure(processes, run, folder, "a process did not end") from None
    if any(codes):
        raise _failure(processes, run, folder, "a process failed at the end")


def _failure(processes: Sequence[subprocess.Popen[str]], run: HostedRun, folder: Path, what: str) -> PipecompError:
    """The coordinator's last words, and those of the first worker that failed."""
    texts = [(folder / "coordinator.log").read_text(encoding="utf-8")]
    for host, process in enumerate(processes[1:]):
        if process.poll() not in (None, 0):
            texts.append((folder / f"host-{host}.log").read_text(encoding="utf-8"))
            break
    tails = ["\n        ".join(text.strip().splitlines()[-_TAIL_LINES:]) for text in texts]
    return PipecompError("\n        ".join([f"{run.label}: {what}", *tails]))


def _steps(folder: Path) -> list[dict[str, Any]]:
    log = folder / "steps.jsonl"
    if not log.exists():
        return []
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event for event in events if event["event"] == "step"]


def _used_s(process_id: int) -> tuple[float, float]:
    """Processor time of a process that may be gone: all of it, and the kernel's part."""
    try:
        fields = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0, 0.0
    user, kernel = int(fields[11]) * _TICK_S, int(fields[12]) * _TICK_S
    return user + kernel, kernel


def _load(begun: Processors, ended: Processors, num_steps: int) -> dict[str, Any]:
    """What the run took of this machine's processors, and what others did."""
    duration = ended.at - begun.at
    own, busy = ended.own - begun.own, ended.busy - begun.busy
    num_cores = os.cpu_count() or 1
    return {
        "cpu_s_per_step": round(own / num_steps, 3),
        "cpu_kernel_s_per_step": round((ended.own_kernel - begun.own_kernel) / num_steps, 3),
        "cores_used": round(own / duration, 3),
        "cores_used_by_others": round(max(0.0, busy - own) / duration, 3),
        "num_cores": num_cores,
    }
