"""What a run was busy with, measured: the counterpart of the bound that a plan names. Knows step logs, summaries and processes'
time; no planner, and runs nothing.

A plan weighs the parts of a cluster by arithmetic. Here the same parts are weighed by what a run told, in seconds of a step:

    compute of rank r      the share of its steps that the worker computed (its trace's spans)
    what rank r sends      the bytes that were counted, over the rate that its links were held to
    the shared processor   processor time that all processes of the run used, over the cores

A part is named as a plan names it. The names of equal parts (four workers alike) are a matter of chance, so a plan has named the
right bound when the part that it named was as busy as any, within `NEAR`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

FILL_AND_DRAIN = "fill and drain"
FILL_AND_DRAIN_FROM = 2.0
"""A step that is longer than this many times the busiest part: docs/planning.md."""
NEAR = 0.05
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Bound(NamedTuple):
    """What a step was busy with."""

    name: str
    busy: float
    """Share of the step for which the busiest part worked."""
    named_busy: float
    """That of the part that the plan named; 0 where the run knows no such part."""
    agrees: bool


def measured_bound(named: str, loads: Mapping[str, float], step_s: float) -> Bound:
    """The busiest part of a step, beside the one that a plan named.

    Args:
        named: as `planning.Load` is written out.
        loads: seconds of a step for which each part worked, of `measured_loads`.
        step_s: length of the step.
    """
    name, most_s = max(loads.items(), key=lambda item: item[1])
    if step_s > FILL_AND_DRAIN_FROM * most_s:
        return Bound(FILL_AND_DRAIN, most_s / step_s, most_s / step_s, named == FILL_AND_DRAIN)
    named_s = loads.get(named, 0.0)
    return Bound(name, most_s / step_s, named_s / step_s, named_s >= (1 - NEAR) * most_s)


def measured_loads(
    summary: Mapping[str, Any], step_nbytes: float, *, rate_nbytes_per_s: float, processor_s: float | None
) -> dict[str, float]:
    """Seconds of a step for which each part of a chain of workers, one stage each, worked.

    Args:
        summary: of the run. Its workers' names end with their ranks; all links carry messages of the same sizes.
        step_nbytes: sent between workers in the step, of all kinds.
        rate_nbytes_per_s: what each worker may send.
        processor_s: processor time of the step on cores that all workers share; None where each has a device of its own.
    """
    workers = sorted(summary["time"], key=lambda worker: int(worker.rpartition("-")[2]))
    loads = {
        f"compute of rank {rank}": summary["time"][worker]["computing"] * summary["time"][worker]["step_s"]
        for rank, worker in enumerate(workers)
    }
    for rank in range(len(workers)):
        name, nbytes = _sent(summary["traffic"], step_nbytes, rank, len(workers))
        loads[name] = nbytes / rate_nbytes_per_s
    if processor_s is not None:
        loads[f"processor of ranks {', '.join(map(str, range(len(workers))))}"] = processor_s / (os.cpu_count() or 1)
    return loads


def _sent(traffic: Mapping[str, Any], step_nbytes: float, rank: int, num_ranks: int) -> tuple[str, float]:
    """What a plan calls this rank's sending, and its bytes."""
    forward, backward = (traffic[kind]["payload_bytes"] + traffic[kind]["header_bytes"] for kind in ("forward", "backward"))
    on_link = step_nbytes / (num_ranks - 1)
    if rank == 0:
        return "forward link from rank 0 to rank 1", on_link * forward / (forward + backward)
    if rank == num_ranks - 1:
        return f"backward link from rank {rank} to rank {rank - 1}", on_link * backward / (forward + backward)
    return f"uplink of rank {rank}", on_link


class ProcessorTime:
    """Processor time a step of a run, read while it runs: all processes of one session."""

    def __init__(self, session: int) -> None:
        self._session = session
        self._num_steps = 0
        self._readings: list[tuple[int, float]] = []

    def read(self, num_steps: int) -> None:
        """Note what was used when so many steps were over. Only the first call at each number tells it: later ones do nothing."""
        if num_steps > self._num_steps:
            self._num_steps = num_steps
            self._readings.append((num_steps, session_processor_s(self._session)))

    def per_step_s(self) -> float | None:
        """Between the end of the first step and that of the last one; None if no step lies between them."""
        # The last one at which all lived: a process that has ended takes its time with it.
        if not self._readings:
            return None
        (first, used), (last, used_at_last) = self._readings[0], max(self._readings, key=lambda reading: reading[1])
        return (used_at_last - used) / (last - first) if last > first else None


def session_processor_s(session: int, processes: Sequence[Path] | None = None) -> float:
    """Processor time of the living processes of a session, in seconds."""
    used = 0.0
    for process in processes if processes is not None else Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[3]) == session:
            used += (int(fields[11]) + int(fields[12])) * _TICK_S
    return used
