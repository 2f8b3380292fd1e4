"""One cell of `pipecomp bench links`, run on hosts: a coordinator, workers, and what they tell. Knows hosts, processes and the
files they write; no grid and no result file.

Steps are timed by the coordinator, from its plan to the last worker's commit. Processor time is read when the last step of the
warm-up ends and when the run does.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from coordinator.preparation import read_run
from pipecomp.config import resolved_toml
from pipecomp.errors import PipecompError
from pipecomp.experiments.links_cells import Order, expected_payload, on_paper
from pipecomp.testing.hosts import Hosts

Figures = dict[str, Any]
_POLL_S = 0.1
_START_S = 600.0
_TAIL_LINES = 6
_SHARES = ("computing", "link", "store", "coding", "bubble", "other")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


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


def run_cell(hosts: Hosts, order: Order, goodput_nbytes_per_s: Sequence[float], folder: Path) -> Figures:
    """Run one cell and return its row, without what names the cell.

    Args:
        hosts: one for each stage, then one for the coordinator.
        goodput_nbytes_per_s: measured, from each stage's host to the next one's.
        folder: an empty one for logs.

    Raises:
        PipecompError: a process failed, or the run took far too long; says what it printed.
    """
    processes = _start(hosts, order, folder)
    begun = _wait_for_step(processes, order, folder, order.num_warm_up)
    ended = _wait_for_step(processes, order, folder, order.num_warm_up + order.num_measured)
    _wait_for_end(processes, order, folder)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    steps = _steps(folder)
    times = [event["step_time_s"] for event in steps]
    return {
        **_speed(order, hosts, times[order.num_warm_up :], goodput_nbytes_per_s, summary),
        "warm_up_times_s": [round(time_s, 4) for time_s in times[: order.num_warm_up]],
        **_load(begun, ended, order.num_measured),
        **_traffic(order, summary),
        **(_whole_run(steps, summary) if order.cell.num_epochs else {}),
        "time": _shares(summary),
        "peak_memory_nbytes": max(worker["peak_memory_bytes"] for worker in summary["workers"].values()),
    }


# ------------------------------------------------------------------------------------------------------------------ processes


def _start(hosts: Hosts, order: Order, folder: Path) -> list[subprocess.Popen[str]]:
    run_file = folder / "run.toml"
    run_file.write_text(resolved_toml(order.config), encoding="utf-8")
    leader = order.setting.num_stages
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


def _wait_for_step(processes: Sequence[subprocess.Popen[str]], order: Order, folder: Path, step: int) -> Processors:
    deadline = time.monotonic() + _START_S + 10 * order.nominal_s * step
    while len(_steps(folder)) < step:
        if any(process.poll() not in (None, 0) for process in processes) or time.monotonic() > deadline:
            raise _failure(processes, order, folder, f"no step {step}")
        if processes[0].poll() == 0 and len(_steps(folder)) < step:
            raise _failure(processes, order, folder, f"the run ended before step {step}")
        time.sleep(_POLL_S)
    return Processors.read(processes)


def _wait_for_end(processes: Sequence[subprocess.Popen[str]], order: Order, folder: Path) -> None:
    try:
        codes = [process.wait(timeout=60.0) for process in processes]
    except subprocess.TimeoutExpired:
        raise _failure(processes, order, folder, "a process did not end") from None
    if any(codes):
        raise _failure(processes, order, folder, "a process failed at the end")


def _failure(processes: Sequence[subprocess.Popen[str]], order: Order, folder: Path, what: str) -> PipecompError:
    """The coordinator's last words, and those of the first worker that failed."""
    texts = [(folder / "coordinator.log").read_text(encoding="utf-8")]
    for host, process in enumerate(processes[1:]):
        if process.poll() not in (None, 0):
            texts.append((folder / f"host-{host}.log").read_text(encoding="utf-8"))
            break
    tails = ["\n        ".join(text.strip().splitlines()[-_TAIL_LINES:]) for text in texts]
    return PipecompError("\n        ".join([f"{order.cell}: {what}", *tails]))


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


# -------------------------------------------------------------------------------------------------------------------- figures


def _speed(
    order: Order, hosts: Hosts, times: Sequence[float], goodput_nbytes_per_s: Sequence[float], summary: dict[str, Any]
) -> Figures:
    """Steps against the ideal, which has the goodput of the link that is the middle one."""
    step_s = statistics.median(times)
    goodput = statistics.median(goodput_nbytes_per_s)
    in_user_space = "link_rate" in hosts.cluster_settings()
    if in_user_space and order.cell.nbits_per_s is not None:  # the interface is fast; the processes are what holds back
        goodput = min(goodput, order.cell.nbits_per_s / 8)
    num_messages = (order.num_warm_up + order.num_measured) * (order.setting.num_stages - 1) * order.setting.num_microbatches
    header_nbytes = summary["traffic"]["forward"]["header_bytes"] / num_messages
    best = on_paper(
        order.setting,
        order.config,
        goodput,
        header_nbytes=header_nbytes,
        both_ways=not in_user_space,
        delay_ms=order.cell.delay_ms,
    )[0]
    return {
        "emulation": hosts.emulation,
        "goodput_nbits_per_s": round(8 * goodput),
        "goodputs_nbits_per_s": [round(8 * rate) for rate in goodput_nbytes_per_s],
        "times_s": [round(time_s, 4) for time_s in times],
        "step_s": round(step_s, 4),
        "sequences_per_s": round(order.setting.batch_size / step_s, 4),
        "ideal_s": round(best.step.duration_s, 4),
        "ideal_sequences_per_s": round(order.setting.batch_size / best.step.duration_s, 4),
        "schedule": order.schedule,
        "ideal_schedule": best.label,
        "bound": str(best.step.bound),
        "ratio": round(best.step.duration_s / step_s, 4),
    }


def _load(begun: Processors, ended: Processors, num_steps: int) -> Figures:
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


def _traffic(order: Order, summary: dict[str, Any]) -> Figures:
    expected = expected_payload(order, [int(length) for length in read_run(order.config, None).batches.lengths])
    kinds = {kind: summary["traffic"][kind] for kind in expected}
    forward = [link["forward"] for link in summary["links"].values()]
    changes = [link["delta_ratio"] for link in forward if link["delta_ratio"] is not None]
    return {
        "payload_nbytes": {kind: row["payload_bytes"] for kind, row in kinds.items()},
        "header_nbytes": {kind: row["header_bytes"] for kind, row in kinds.items()},
        "payload_differs_nbytes": sum(abs(kinds[kind]["payload_bytes"] - nbytes) for kind, nbytes in expected.items()),
        "fallbacks": sum(link["fallbacks"] for link in forward),
        "change": round(statistics.median(changes), 4) if changes else None,
    }


def _whole_run(steps: Sequence[dict[str, Any]], summary: dict[str, Any]) -> Figures:
    """When each epoch ended, after the first step began; and what became of messages that are kept on disk."""
    begun = steps[0]["time_s"] - steps[0]["step_time_s"]
    ends = {step["epoch"]: step["time_s"] - begun for step in steps}
    stores = [end for link in summary["stores"].values() for end in link.values()]
    return {
        "epoch_ends_s": [round(ends[epoch], 3) for epoch in sorted(ends)],
        "disk_nbytes": sum(store["disk_bytes"] for store in stores),
        "disk_reads": sum(store["disk_reads"] for store in stores),
        "store_wait_s": round(sum(store["wait_s"] for store in stores), 4),
    }


def _shares(summary: dict[str, Any]) -> dict[str, float]:
    """What the workers' steps spent their time on, the mean of all workers, warm-up included."""
    workers = summary["time"].values()
    return {share: round(statistics.fmean(worker[share] for worker in workers), 4) for share in _SHARES}
