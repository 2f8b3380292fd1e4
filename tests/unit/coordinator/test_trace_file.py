"""The trace file: processes, threads, slices and arrows as the Chrome trace format has them, on one clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator import events as e
from coordinator.timeline import MOST_REPORTS, Timeline
from coordinator.tracefile import Trace, write_trace
from pipecomp.protocol.clocks import RemoteClock, RoundTrip
from pipecomp.protocol.spans import Doing, Span, Subject, pack
from pipecomp.types import Kind

MS = 10**6
STAGES = (e.StageSplit(0, 0, 0, 3), e.StageSplit(1, 1, 3, 6), e.StageSplit(2, 0, 6, 8))
FORWARD = Subject(Kind.FORWARD, "", 7, 1, 2)
MESSAGE = Subject(Kind.FORWARD, "0/0-1", 7, 1, 2, 321)


def report(worker: str, *spans: Span, num_dropped: int = 0) -> e.SpansReported:
    return e.SpansReported(worker, pack(spans), num_dropped)


def clock(offset_s: float, error_s: float = 0.0) -> RemoteClock:
    known = RemoteClock()
    known.take(RoundTrip(-error_s, offset_s, error_s))
    return known


def events(*reports: e.SpansReported, clocks: dict[str, RemoteClock] | None = None, began_s: float = 0.0) -> list[dict[str, Any]]:
    return list(Trace(("a", "b"), STAGES, clocks or {}, began_s).events(reports))


def named(found: list[dict[str, Any]], what: str) -> dict[tuple[int, int], Any]:
    return {(one["pid"], one["tid"]): next(iter(one["args"].values())) for one in found if one["name"] == what}


def test_a_worker_is_a_process_named_with_its_stages():
    found = events()
    assert named(found, "process_name") == {(1, 0): "a (stage 0, 2)", (2, 0): "b (stage 1)"}
    assert named(found, "process_sort_index") == {(1, 0): 0, (2, 0): 1}


def test_a_lane_is_a_thread_of_its_worker_and_compute_stands_first():
    spans = [Span(Doing.SEND, lane, MESSAGE, 0, 1) for lane in ("0/0-1 out", "codec_0", "compute")]
    found = events(report("b", *spans), report("a", spans[2]))
    titles = named(found, "thread_name")
    assert sorted(title for (pid, _), title in titles.items() if pid == 2) == ["codec_0", "compute", "link 0/0-1 out"]
    order = named(found, "thread_sort_index")
    assert {titles[place]: index for place, index in order.items()} == {"compute": 0, "codec_0": 1, "link 0/0-1 out": 2}
    assert len(order) == 4


def test_a_span_is_a_slice_in_microseconds_since_the_run_began():
    found = events(report("a", Span(Doing.FORWARD, "compute", FORWARD, 5 * MS, 5 * MS + 1500)))
    assert [one for one in found if one["ph"] == "X"] == [
        {
            "ph": "X", "name": "forward 2", "cat": "forward", "pid": 1, "tid": 1, "ts": 5000.0, "dur": 1.5,
            "args": {"step": 7, "stage": 1, "microbatch": 2},
        }
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("doing", "about", "name", "args"),
    [
        (Doing.SEND, MESSAGE, "send forward 2",
         {"step": 7, "stage": 1, "microbatch": 2, "link": "0/0-1", "kind": "forward", "bytes": 321}),
        (Doing.DECODE, MESSAGE, "decode forward 2",
         {"step": 7, "stage": 1, "microbatch": 2, "link": "0/0-1", "kind": "forward"}),
        (Doing.WAIT, MESSAGE._replace(kind=Kind.EVALUATION), "wait for evaluation 2",
         {"evaluation": 7, "stage": 1, "microbatch": 2, "link": "0/0-1", "kind": "evaluation"}),
        (Doing.RECEIVE, MESSAGE._replace(kind=Kind.TIED, part=4096), "receive tied 4096",
         {"step": 7, "stage": 1, "offset": 4096, "link": "0/0-1", "kind": "tied", "bytes": 321}),
        (Doing.STEP, Subject(step=7), "step 7", {"step": 7}),
        (Doing.ABORTED, Subject(step=7), "aborted step 7", {"step": 7}),
        (Doing.VOTE, Subject(step=7), "wait for commit", {"step": 7}),
    ],
)  # fmt: skip
def test_slices_say_what_they_are_about(doing: Doing, about: Subject, name: str, args: dict[str, Any]):
    (found,) = (one for one in events(report("a", Span(doing, "lane", about, 0, 1))) if one["ph"] == "X")
    assert (found["name"], found["args"]) == (name, args)


@pytest.mark.parametrize("doing", Doing)
def test_whatever_a_worker_does_has_a_slice(doing: Doing):
    assert sum(one["ph"] == "X" for one in events(report("a", Span(doing, "lane", MESSAGE, 0, 1)))) == 1


def test_workers_are_drawn_on_the_coordinators_clock():
    span = Span(Doing.FORWARD, "compute", FORWARD, 2000 * MS, 2001 * MS)
    clocks = {"a": clock(100.0), "b": clock(-1.5)}
    found = events(report("a", span), report("b", span), clocks=clocks, began_s=0.25)
    assert [one["ts"] for one in found if one["ph"] == "X"] == [(102 - 0.25) * 1e6, (0.5 - 0.25) * 1e6]


def test_an_arrow_goes_from_send_to_receive_to_decode_of_one_message():
    other = MESSAGE._replace(part=3)
    found = events(
        report("a", Span(Doing.SEND, "out", MESSAGE, 1000, 2000), Span(Doing.SEND, "out", other, 2000, 3000)),
        report("b", Span(Doing.RECEIVE, "in", MESSAGE, 4000, 5000), Span(Doing.DECODE, "codec_0", MESSAGE, 6000, 7000)),
    )
    arrows = [one for one in found if one["ph"] in "stf"]
    assert [(one["ph"], one["pid"], one["ts"]) for one in arrows if one["id"] == arrows[0]["id"]] == [
        ("s", 1, 1.0), ("t", 2, 4.0), ("f", 2, 6.0)
    ]  # fmt: skip
    assert len({one["id"] for one in arrows}) == 2
    assert {(one["name"], one["cat"]) for one in arrows} == {("forward", "message")}
    assert arrows[-1]["bp"] == "e"


def test_weights_have_slices_and_no_arrows():
    found = events(report("a", Span(Doing.RECEIVE, "in", MESSAGE._replace(kind=Kind.WEIGHTS), 0, 1)))
    assert [one["ph"] for one in found if one["ph"] != "M"] == ["X"]


def test_a_worker_that_never_got_a_rank_is_drawn_last():
    assert named(events(report("c", Span(Doing.IDLE, "compute", Subject(), 0, 1))), "process_name")[3, 0] == "c"


def test_the_worst_error_of_each_clock_is_told():
    trace = Trace(("a", "b"), (), {"a": clock(0.0, 0.002), "b": RemoteClock()}, 0.0)
    list(trace.events([report(worker, Span(Doing.IDLE, "compute", Subject(), 0, 1)) for worker in "ab"]))
    assert trace.clock_errors_ms == {"a": 2.0}


# ---------------------------------------------------------------- the file


def test_the_file_is_one_json_object(tmp_path: Path):
    path = tmp_path / "t.json"
    write_trace(path, iter(events(report("a", Span(Doing.FORWARD, "compute", FORWARD, 0, 1)))), lambda: {"dropped_spans": 0})
    found = json.loads(path.read_text())
    assert found["displayTimeUnit"] == "ms"
    assert found["otherData"] == {"dropped_spans": 0}
    assert len(found["traceEvents"]) == 7
    assert [file.name for file in tmp_path.iterdir()] == ["t.json"]


def test_a_trace_without_anything_is_valid_too(tmp_path: Path):
    write_trace(tmp_path / "t.json", [], dict)
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"] == []


def test_a_file_that_cannot_be_finished_leaves_the_old_one(tmp_path: Path):
    path = tmp_path / "t.json"
    path.write_text("old")

    def fails() -> Any:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        write_trace(path, [{"ph": "X"}], fails)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["t.json"]


# ---------------------------------------------------------------- what is kept for it


def test_without_a_trace_nothing_is_kept():
    timeline = Timeline(keep_nbytes=0)
    timeline.take(report("a", Span(Doing.IDLE, "compute", Subject(), 0, 1)))
    assert not timeline.kept
    assert timeline.num_dropped == 0


def test_reports_are_sorted_at_a_steps_end_or_when_many_wait():
    timeline = Timeline(keep_nbytes=0)
    for _ in range(MOST_REPORTS - 1):
        timeline.take(report("a", Span(Doing.IDLE, "compute", Subject(), 0, 1)))
    assert not timeline.is_due
    timeline.take(report("a", Span(Doing.STEP, "compute", Subject(step=1), 0, 1)))
    assert timeline.is_due
    timeline.accounting()()
    assert not timeline.is_due
    timeline.take(e.StepCommitted(1, 0, 1.0, 1e-3, 1.0, 1.0, e.BatchSize(4, 40, 30), 0.5, {}))
    assert timeline.is_due
    timeline.accounting()()
    assert timeline.times()["a"].num_steps == 1


def test_the_latest_spans_are_kept_and_the_others_counted():
    reports = [
        report("a", *[Span(Doing.IDLE, "compute", Subject(step=step), 0, 1)] * 2, num_dropped=1) for step in range(1, 5)
    ]
    timeline = Timeline(keep_nbytes=sum(len(one.batch.deflated) for one in reports[2:]))
    for one in reports:
        timeline.take(one)
    assert [next(kept.batch.spans()).about.step for kept in timeline.kept] == [3, 4]
    assert timeline.num_dropped == 4 + 4
