"""A run's spans as a Chrome trace, which https://ui.perfetto.dev and chrome://tracing open. Knows spans, clocks and one file.

    process   a worker                  thread   its compute, each codec thread, each link and direction
    slice     a span, with args         arrow    from the send of a message to its receive and on to its decode

All times are microseconds of the coordinator's clock since the run began. A worker's times are off by as much as its clock could
not be read more exactly (`clock_error_ms`). The file is written beside its place and then renamed, so it is there whole or not
at all.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from coordinator.events import SpansReported, StageSplit
from pipecomp.protocol.clocks import RemoteClock
from pipecomp.protocol.spans import Doing, Span
from pipecomp.runtime.trace import COMPUTE
from pipecomp.types import Kind

Event = dict[str, Any]

_ARROWS = {Doing.SEND: "s", Doing.RECEIVE: "t", Doing.DECODE: "f"}
_ON_LINKS = frozenset({Doing.SEND, Doing.RECEIVE, Doing.SEND_REPAIR, Doing.RECEIVE_REPAIR, Doing.CREDIT})
_IN_PIECES = (Kind.TIED, Kind.GRADIENTS, Kind.WEIGHTS)
_OF_ACTIONS = frozenset({Doing.FORWARD, Doing.BACKWARD, Doing.EVALUATE})


class Trace:
    """Makes the events of one trace."""

    def __init__(
        self, workers: Sequence[str], stages: Sequence[StageSplit], clocks: Mapping[str, RemoteClock], began_s: float
    ) -> None:
        """`workers` in order of their places; `began_s`: time 0, by the coordinator's clock."""
        self._workers = list(workers)
        self._num_placed = len(workers)
        self._stages = stages
        self._clocks = clocks
        self._began_ns = round(began_s * 1e9)
        self._lanes: dict[tuple[str, str], int] = {}
        self._messages: dict[tuple[str, Kind, int, int], int] = {}
        self._error_s: dict[str, float] = {}

    @property
    def clock_errors_ms(self) -> dict[str, float]:
        """What each worker's times of this trace may be off by."""
        return {worker: round(error_s * 1e3, 3) for worker, error_s in sorted(self._error_s.items())}

    def events(self, reports: Iterable[SpansReported]) -> Iterator[Event]:
        """Names of processes, then spans and arrows; the names of threads last."""
        for worker in self._workers:
            yield from self._process(worker)
        for report in reports:
            if report.worker not in self._workers:
                self._workers.append(report.worker)
                yield from self._process(report.worker)
            clock = self._clocks.get(report.worker, RemoteClock())
            for span in report.batch.spans():
                self._note_error(report.worker, clock, span)
                yield from self._span(report.worker, _on_clock(span, clock))
        for (worker, lane), thread in sorted(self._lanes.items(), key=lambda item: item[1]):
            yield self._named("thread_name", worker, thread, name=_lane_title(lane))
            yield self._named("thread_sort_index", worker, thread, sort_index=_lane_order(lane))

    def _process(self, worker: str) -> Iterator[Event]:
        place = self._workers.index(worker)
        num_ranks = 1 + max((s.rank for s in self._stages), default=0)
        held = ", ".join(str(s.stage) for s in self._stages if s.rank == place % num_ranks and place < self._num_placed)
        of = f"replica {place // num_ranks}, " if self._num_placed > num_ranks else ""
        yield self._named("process_name", worker, 0, name=f"{worker} ({of}stage {held})" if held else worker)
        yield self._named("process_sort_index", worker, 0, sort_index=place)

    def _span(self, worker: str, span: Span) -> Iterator[Event]:
        start_us, end_us = self._us(span.start_ns), self._us(span.end_ns)
        place = {"pid": self._process_id(worker), "tid": self._thread_id(worker, span.lane)}
        yield {
            "ph": "X",
            "name": _name(span),
            "cat": span.doing.value,
            **place,
            "ts": start_us,
            "dur": round(end_us - start_us, 3),
            "args": _args(span),
        }
        arrow = _ARROWS.get(span.doing)
        if arrow is not None and span.about.kind is not Kind.WEIGHTS:
            message = span.about.link, span.about.kind, span.about.step, span.about.part
            number = self._messages.setdefault(message, len(self._messages) + 1)
            binding = {"bp": "e"} if arrow == "f" else {}
            yield {"ph": arrow, "id": number, "name": span.about.kind.value, "cat": "message", **place, "ts": start_us, **binding}

    def _note_error(self, worker: str, clock: RemoteClock, span: Span) -> None:
        if clock.is_known:
            self._error_s[worker] = max(self._error_s.get(worker, 0.0), clock.error_s(span.start_ns / 1e9))

    def _us(self, ns: int) -> float:
        return (ns - self._began_ns) / 1000

    def _process_id(self, worker: str) -> int:
        return self._workers.index(worker) + 1

    def _thread_id(self, worker: str, lane: str) -> int:
        return self._lanes.setdefault((worker, lane), len(self._lanes) + 1)

    def _named(self, what: str, worker: str, thread: int, **args: object) -> Event:
        return {"ph": "M", "name": what, "pid": self._process_id(worker), "tid": thread, "args": args}


def write_trace(path: Path, events: Iterable[Event], about: Callable[[], Mapping[str, Any]]) -> None:
    """Write one JSON object; `about`, called once all events are written, becomes its `otherData`.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    beside = path.with_name(path.name + ".part")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [')
            separator = "\n"
            for event in events:
                file.write(separator + json.dumps(event))
                separator = ",\n"
            file.write('\n], "otherData": ' + json.dumps(about()) + "}\n")
        beside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def _on_clock(span: Span, clock: RemoteClock) -> Span:
    """A worker's span in the coordinator's nanoseconds."""
    start_s, end_s = span.start_ns / 1e9, span.end_ns / 1e9
    return span._replace(start_ns=round(clock.ours_s(start_s) * 1e9), end_ns=round(clock.ours_s(end_s) * 1e9))


def _name(span: Span) -> str:
    about = span.about
    match span.doing:
        case Doing.STEP | Doing.ABORTED:
            return f"{span.doing.value} {about.step}"
        case Doing.FORWARD | Doing.BACKWARD | Doing.EVALUATE:
            return f"{span.doing.value} {about.part}"
        case Doing.WAIT:
            return f"wait for {about.kind.value} {about.part}"
        case Doing.ENCODE | Doing.DECODE | Doing.SEND | Doing.RECEIVE | Doing.CREDIT:
            return f"{span.doing.value} {about.kind.value} {about.part}"
        case other:
            return str(other.value)


def _args(span: Span) -> Event:
    about = span.about
    args: Event = {"evaluation" if about.kind is Kind.EVALUATION else "step": about.step}
    if span.doing in _OF_ACTIONS or about.link:
        args |= {"stage": about.stage, "offset" if about.kind in _IN_PIECES else "microbatch": about.part}
    if about.link:
        args |= {"link": about.link, "kind": about.kind.value}
    if span.doing in _ON_LINKS:
        args["bytes"] = about.nbytes
    return args


_ORDER = (COMPUTE, "codec")


def _lane_order(lane: str) -> int:
    return next((index for index, prefix in enumerate(_ORDER) if lane.startswith(prefix)), len(_ORDER))


def _lane_title(lane: str) -> str:
    return lane if _lane_order(lane) < len(_ORDER) else f"link {lane}"
