"""The benchmark `pipecomp bench quality`: what compression costs in trained quality. Starts a process a run, keeps every figure
at once, skips what is there. Knows no model and no training loop."""

from __future__ import annotations

import asyncio
import json as json_text
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pipecomp.config import RunConfig
from pipecomp.errors import ConfigError, PipecompError
from pipecomp.experiments import quality_bars
from pipecomp.experiments.kept import KeptRows
from pipecomp.experiments.quality_cells import (
    UNTRAINED,
    WORKLOADS,
    Cell,
    Workload,
    cells,
    cost,
    described_codecs,
    missing_files,
    run_config,
    settings_hash,
)

RESULTS = Path("docs/results/quality.json")
COMMAND = "pipecomp bench quality"
_CHILD = (sys.executable, "-m", "pipecomp.experiments.quality_training")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
_ERROR_LINES = 6
Row = dict[str, Any]


class Order(NamedTuple):
    """A cell with all that its figures depend on."""

    cell: Cell
    config: RunConfig
    codecs: dict[str, str]
    settings: str
    cost_s: float


class Failure(NamedTuple):
    """A cell whose process ended without figures."""

    cell: Cell
    reason: str


def run(
    *,
    json: bool = True,
    only: str | None = None,
    jobs: int | None = None,
    path: Path = RESULTS,
    workloads: Sequence[Workload] = WORKLOADS,
) -> Row:
    """Train every cell that has no figures yet, print tables and bars, and return the result.

    Args:
        json: keep each cell's figures in `path` as soon as it ends, and skip cells that are there with the same settings.
        only: the key of one workload.
        jobs: runs at a time, a core each; None: as many as there are cores.

    Raises:
        ConfigError: no such workload, or its files are not there.
        PipecompError: some runs failed, after all others have ended.
        KeyboardInterrupt: Ctrl-C; only the cells in flight are lost.
    """
    chosen = _chosen(workloads, only)
    orders = [order for workload in chosen for order in _orders(workload)]
    kept = _kept(path if json else None, orders, workloads)
    missing = [order for order in orders if order.cell not in kept.rows]
    num_jobs = max(1, min(jobs or len(os.sched_getaffinity(0)), len(missing) or 1))
    _say(f"{len(orders)} runs, {len(orders) - len(missing)} of them there already; {num_jobs} at a time")
    failures = asyncio.run(_train_all(missing, num_jobs, kept)) if missing else []
    outcome = kept.finish()
    _say(quality_bars.report(outcome, workloads))
    if failures:
        told = "".join(f"\n{failure.cell}: {failure.reason}" for failure in failures)
        raise PipecompError(f"{len(failures)} of {len(missing)} runs failed; the figures of the others are kept{told}")
    return outcome


def _chosen(workloads: Sequence[Workload], only: str | None) -> list[Workload]:
    keys = [workload.key for workload in workloads]
    if only is not None and only not in keys:
        raise ConfigError(f"--only {only}: there is no such workload; there are: {', '.join(keys)}")
    chosen = []
    for workload in workloads:
        if only not in (None, workload.key):
            continue
        missing = missing_files(run_config(workload, next(cells(workload))))
        if missing:
            fetch = f"; python scripts/fetch_examples.py {workload.needs} gets what is fetched" if workload.needs else ""
            text = f"workload ({workload.key}) needs {', '.join(missing)} in the current folder{fetch}"
            if only is not None:
                raise ConfigError(text)
            _say(f"left out: {text}")
            continue
        chosen.append(workload)
    return chosen


def _orders(workload: Workload) -> list[Order]:
    orders = []
    for cell in cells(workload):
        config = run_config(workload, cell)
        codecs = described_codecs(config)
        orders.append(Order(cell, config, codecs, settings_hash(config, codecs), cost(workload, cell)))
    return orders


def _kept(path: Path | None, orders: Sequence[Order], workloads: Sequence[Workload]) -> KeptRows[Cell]:
    """The figures so far. Figures of workloads that were not chosen stay as they are."""
    places = {cell: index for index, cell in enumerate(cell for workload in workloads for cell in cells(workload))}

    def cell_of(row: Row) -> Cell | None:
        cell = Cell(*(row[field] for field in Cell._fields))
        return cell if cell in places else None

    return KeptRows(
        path,
        COMMAND,
        key_of=cell_of,
        order=places.__getitem__,
        wanted={order.cell: order.settings for order in orders},
        bars=lambda rows: quality_bars.bars(rows, workloads),
    )


# ---------------------------------------------------------------------------------------------------------- processes


async def _train_all(orders: Sequence[Order], num_jobs: int, kept: KeptRows[Cell]) -> list[Failure]:
    """Train in order, `num_jobs` at a time; what fails is told and the rest goes on."""
    waiting = list(reversed(orders))
    progress = _Progress(orders, num_jobs)
    failures: list[Failure] = []

    async def work() -> None:
        while waiting:
            order = waiting.pop()
            started = time.monotonic()
            outcome = await _train_one(order)
            if isinstance(outcome, Failure):
                failures.append(outcome)
                progress.failed(order)
                _say(f"FAILED  {order.cell}: {outcome.reason}")
                continue
            kept.add(order.cell, {**order.cell._asdict(), "settings": order.settings, "codecs": order.codecs, **outcome})
            _say(progress.line(order, outcome, time.monotonic() - started))

    async with asyncio.TaskGroup() as group:
        for _ in range(num_jobs):
            group.create_task(work())
    place = {order.cell: index for index, order in enumerate(orders)}
    return sorted(failures, key=lambda failure: place[failure.cell])  # runs beside each other fail in any order


async def _train_one(order: Order) -> Row | Failure:
    """One run in a process of its own, with one thread; it does not outlive this call."""
    text = json_text.dumps({"config": msgspec.to_builtins(order.config), "train": order.cell.method != UNTRAINED})
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *_CHILD,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        env={**os.environ, **dict.fromkeys(_THREADS, "1")},
        start_new_session=True,  # Ctrl-C is for this process, which ends the others
    )
    try:
        output, errors = await process.communicate(text.encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    code = process.returncode
    if code:
        lines = errors.decode(errors="replace").strip().splitlines()
        ending = f"exit code {code}" if code > 0 else f"ended by {signal.Signals(-code).name}"
        return Failure(order.cell, "\n        ".join([ending, *lines[-_ERROR_LINES:]]))
    figures: Row = json_text.loads(output.splitlines()[-1])
    return figures


class _Progress:
    """How long the rest will take, from how long the runs so far took against what was expected of them."""

    def __init__(self, orders: Sequence[Order], num_jobs: int) -> None:
        self._left = {order.cell: order.cost_s for order in orders}
        self._num_orders, self._num_jobs = len(orders), num_jobs
        self._expected_s = self._taken_s = 0.0

    def failed(self, order: Order) -> None:
        self._left.pop(order.cell)

    def line(self, order: Order, figures: Row, taken_s: float) -> str:
        self._expected_s += self._left.pop(order.cell)
        self._taken_s += taken_s
        remaining_s = sum(self._left.values()) * self._taken_s / self._expected_s / self._num_jobs
        done = self._num_orders - len(self._left)
        return (
            f"[{done}/{self._num_orders}] {order.cell}: held-out loss {figures['held_out_loss']:.4f}, "
            f"{taken_s:.0f} s; about {_duration(remaining_s)} left"
        )


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min" if minutes else f"{seconds:.0f} s"


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
