"""What a real launch says of its time: every action once, in an order that can be, with the bytes that were counted."""

from __future__ import annotations

import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")

NUM_WORKERS, NUM_STEPS, NUM_MICROBATCHES = 3, 3, 2
NUM_STAGES = 4  # the first worker holds the head too, whose weight is the embedding's
SHARES = ("computing", "link", "store", "coding", "bubble", "other")
ROUNDED_US = 0.002  # times are written to a thousandth of a microsecond


class Traced:
    """One finished launch of three workers."""

    def __init__(self, launched: Callable[..., Any], rate: str) -> None:
        run = launched(
            f"cluster.num_stages={NUM_WORKERS}", f"cluster.link_rate={rate}", f"train.max_steps={NUM_STEPS}",
            "data.max_eval_samples=4",
        )  # fmt: skip
        assert os.waitstatus_to_exitcode(run.exit_status(120.0)) == 0, run.output
        self.output: str = run.output
        self.summary: dict[str, Any] = run.summary
        self.trace: dict[str, Any] = run.trace
        self.slices = [one for one in self.trace["traceEvents"] if one["ph"] == "X"]
        self.error_us = 1000 * 2 * max(self.trace["otherData"]["clock_error_ms"].values())  # two clocks, each off by so much

    def of(self, *categories: str, **args: object) -> list[dict[str, Any]]:
        return [s for s in self.slices if s["cat"] in categories and args.items() <= s["args"].items()]

    def message(self, slice_: dict[str, Any]) -> tuple[object, ...]:
        args = slice_["args"]
        return tuple(args.get(name) for name in ("link", "kind", "step", "evaluation", "microbatch", "offset"))


def action(slice_: dict[str, Any]) -> tuple[str, int, int, int]:
    args = slice_["args"]
    return slice_["cat"], args["step"], args["stage"], args["microbatch"]


def end(slice_: dict[str, Any]) -> float:
    return float(slice_["ts"] + slice_["dur"])


@pytest.mark.timeout(300)  # two launches
def test_a_launch_says_where_its_time_went(launched: Callable[..., Any]) -> None:
    slow, fast = Traced(launched, "300kbit"), Traced(launched, "100mbit")
    for run in (slow, fast):
        every_action_happens_once(run)
        spans_of_a_thread_do_not_overlap(run)
        causes_come_before_effects(run)
        bytes_are_those_that_were_counted(run)
        shares_add_up(run)
    for worker in slow.summary["time"]:
        assert slow.summary["time"][worker]["link"] > fast.summary["time"][worker]["link"]
    assert "worker-1: " in slow.output
    assert "from worker-0 over the link" in slow.output


def every_action_happens_once(run: Traced) -> None:
    found = Counter((s["pid"], *action(s)) for s in run.of("forward", "backward"))
    expected = {
        (stage % NUM_WORKERS + 1, kind, step, stage, microbatch)
        for stage in range(NUM_STAGES)
        for kind in ("forward", "backward")
        for step in range(1, NUM_STEPS + 1)
        for microbatch in range(NUM_MICROBATCHES)
    }
    assert found == Counter(expected)
    for once_a_step in ("step", "optimizer", "gradient norms", "wait for commit"):
        steps = Counter((s["pid"], s["args"]["step"]) for s in run.of(once_a_step))
        assert steps == Counter((pid + 1, step + 1) for pid in range(NUM_WORKERS) for step in range(NUM_STEPS))


def spans_of_a_thread_do_not_overlap(run: Traced) -> None:
    """Or one lies within the other, as all of a step does in the step."""
    threads = defaultdict(list)
    for slice_ in run.slices:
        threads[slice_["pid"], slice_["tid"]].append(slice_)
    assert len(threads) > 3 * NUM_WORKERS
    for slices in threads.values():
        open_until: list[float] = []
        for slice_ in sorted(slices, key=lambda s: (s["ts"], -s["dur"])):
            while open_until and open_until[-1] <= slice_["ts"] + ROUNDED_US:
                open_until.pop()
            assert not open_until or end(slice_) <= open_until[-1] + ROUNDED_US, slice_
            open_until.append(end(slice_))


def causes_come_before_effects(run: Traced) -> None:
    ends: dict[str, dict[tuple[object, ...], dict[str, Any]]] = {
        category: {run.message(s): s for s in run.of(category)} for category in ("encode", "send", "receive", "decode")
    }
    messages = ends["encode"].keys()
    assert len(messages) == (NUM_STAGES - 1) * 2 * (NUM_STEPS + 1) * NUM_MICROBATCHES  # evaluated twice
    for message in messages:
        encoded, sent, received, decoded = (ends[category][message] for category in ends)
        assert end(encoded) <= sent["ts"] + ROUNDED_US
        assert sent["ts"] <= end(received) + run.error_us
        assert end(received) <= decoded["ts"] + ROUNDED_US
    for before, after in chains(run):
        assert end(before) <= after["ts"] + run.error_us, (before, after)


def chains(run: Traced) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Actions that another action needs: the stage before in the forward pass, the stage after in the backward pass."""
    actions = {action(s): s for s in run.of("forward", "backward")}
    for (kind, step, stage, microbatch), before in actions.items():
        after = actions.get((kind, step, stage + (1 if kind == "forward" else -1), microbatch))
        if after is not None:
            yield before, after


def bytes_are_those_that_were_counted(run: Traced) -> None:
    for kind in ("forward", "backward", "evaluation"):
        counted = run.summary["traffic"][kind]
        sent, received = (sum(s["args"]["bytes"] for s in run.of(category, kind=kind)) for category in ("send", "receive"))
        assert sent == received == counted["payload_bytes"] + counted["header_bytes"] > 0


def shares_add_up(run: Traced) -> None:
    assert list(run.summary["time"]) == [f"worker-{rank}" for rank in range(NUM_WORKERS)]
    for row in run.summary["time"].values():
        assert row["steps"] == NUM_STEPS
        assert sum(row[name] for name in SHARES) == pytest.approx(1.0)
        assert min(row[name] for name in SHARES) >= -1e-9
        assert sum(link["share"] for link in row["links"]) == pytest.approx(row["link"])
        assert all(link["from"] in run.summary["time"] for link in row["links"])


def test_a_run_that_fails_midway_leaves_a_trace_of_what_it_did(launched: Callable[..., Any]) -> None:
    run = launched("cluster.link_rate=1mbit")
    run.until_step(2)
    run.kill("worker-1")
    assert os.waitstatus_to_exitcode(run.exit_status()) == 1
    forwards = [one["args"]["step"] for one in run.trace["traceEvents"] if one.get("cat") == "forward"]
    assert {1, 2} <= {*forwards}
    assert run.summary["time"]["worker-0"]["steps"] >= 2
