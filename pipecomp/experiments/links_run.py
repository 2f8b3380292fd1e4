"""One cell of `pipecomp bench links`: a run on hosts, and its figures beside the ideal. Knows what a run tells; no grid and no
result file."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coordinator.preparation import read_run
from pipecomp.experiments.hosted_run import HostedRun, run_on_hosts
from pipecomp.experiments.links_cells import Order, expected_payload, on_paper
from pipecomp.testing.hosts import Hosts

Figures = dict[str, Any]
_SHARES = ("computing", "link", "store", "coding", "bubble", "other")


def run_cell(hosts: Hosts, order: Order, goodput_nbytes_per_s: Sequence[float], folder: Path) -> Figures:
    """Run one cell and return its row, without what names the cell.

    Args:
        hosts: one for each stage, then one for the coordinator.
        goodput_nbytes_per_s: measured, from each stage's host to the next one's.
        folder: an empty one for logs.

    Raises:
        PipecompError: a process failed, or the run took far too long; says what it printed.
    """
    run = HostedRun(
        str(order.cell), order.config, order.setting.num_stages, order.num_warm_up, order.num_measured, order.nominal_s
    )
    summary, steps, load = outcome = run_on_hosts(hosts, run, folder)
    times = outcome.times_s
    return {
        **_speed(order, hosts, times[order.num_warm_up :], goodput_nbytes_per_s, summary),
        "warm_up_times_s": [round(time_s, 4) for time_s in times[: order.num_warm_up]],
        **load,
        **_traffic(order, summary),
        **(_whole_run(steps, summary) if order.cell.num_epochs else {}),
        "time": _shares(summary),
        "peak_memory_nbytes": max(worker["peak_memory_bytes"] for worker in summary["workers"].values()),
    }


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
