"""Where the time of a step went, for each worker: a pure function of what all workers did, on one clock. Knows spans; no files.

What a wait for a microbatch counts as follows from what its sender and the link did meanwhile:

    sender     | forward of m |.......| encode |
    link                                       |=== m on its way ===|
    receiver   |------------ wait for m ----------------------------------------|
                    bubble    |     coding     |        link        |  coding   |      store: where a codec waited for a disk

Who has done its part of the step waits for the others; until the last of them has its gradients that is bubble too. All that
is neither computing nor one of these counts as other: gradient norms, the vote's way there and back, the optimizer.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from coordinator.events import SpansReported
from pipecomp.protocol.clocks import RemoteClock
from pipecomp.protocol.spans import Doing, Span, Subject
from pipecomp.types import Kind

MAX_PENDING_SPANS = 1 << 18
_COMPUTING = (Doing.FORWARD, Doing.BACKWARD)
_OF_STEPS = frozenset((Kind.FORWARD, Kind.BACKWARD, Kind.TIED, Kind.GRADIENTS, Kind.CONTROL))
_EXCHANGES = {Doing.TIED: Kind.TIED, Doing.REPLICAS: Kind.GRADIENTS}
"""Waits in which both ends send and both wait, and what they send."""
_TELLING = frozenset(
    {
        *(Doing.STEP, Doing.FORWARD, Doing.BACKWARD, Doing.WEIGHTS, Doing.NORMS),
        *(Doing.WAIT, Doing.WAIT_ENCODED, Doing.TIED, Doing.REPLICAS, Doing.VOTE),
        *(Doing.ENCODE, Doing.RECEIVE, Doing.STORE),
    }
)
"""What says where the time went; the rest is for the eye."""
_BEHIND = {Kind.FORWARD: (Doing.FORWARD, -1), Kind.BACKWARD: (Doing.BACKWARD, 1)}
"""What a worker computes whose values go to another stage, and where that worker's stage lies from there."""


class LinkWait(NamedTuple):
    """A link and direction that a worker waits for."""

    link: str
    kind: Kind
    sender: str  # worker


class Times(NamedTuple):
    """Seconds of one worker's steps, by what they went into."""

    total_s: float = 0.0
    computing_s: float = 0.0
    links_s: Mapping[LinkWait, float] = {}
    store_s: float = 0.0
    coding_s: float = 0.0
    bubble_s: float = 0.0
    num_steps: int = 0

    @property
    def other_s(self) -> float:
        return self.total_s - self.computing_s - sum(self.links_s.values()) - self.store_s - self.coding_s - self.bubble_s

    def plus(self, more: Times) -> Times:
        """The sum of both."""
        links = dict(self.links_s)
        for link, seconds in more.links_s.items():
            links[link] = links.get(link, 0.0) + seconds
        return Times(
            self.total_s + more.total_s,
            self.computing_s + more.computing_s,
            links,
            self.store_s + more.store_s,
            self.coding_s + more.coding_s,
            self.bubble_s + more.bubble_s,
            self.num_steps + more.num_steps,
        )


class _Sent(NamedTuple):
    """One message at its sender."""

    worker: str
    computed_ns: int  # its values are there
    encode_ns: int  # encoding begins
    encoded_ns: int


Message = tuple[str, Kind, int, int, int]


def _message(about: Subject) -> Message:
    return about.link, about.kind, about.step, about.stage, about.part


class _Step:
    """What all workers did in one step, to look things up."""

    def __init__(self, workers: Mapping[str, Sequence[Span]]) -> None:
        self.sent: dict[Message, _Sent] = {}
        self._arrived: dict[tuple[str, Message], int] = {}
        self._stores: dict[Message, list[Span]] = defaultdict(list)
        self.prepared_ns = max((s.end_ns for spans in workers.values() for s in spans if s.doing is Doing.NORMS), default=0)
        """When the last worker had its gradients."""
        computed = {
            (worker, span.doing, span.about.stage, span.about.part): span.end_ns
            for worker, spans in workers.items()
            for span in spans
            if span.doing in _COMPUTING
        }
        for worker, spans in workers.items():
            for span in spans:
                key = _message(span.about)
                if span.doing is Doing.ENCODE:
                    doing, offset = _BEHIND.get(span.about.kind, (Doing.TIED, 0))
                    ready_ns = computed.get((worker, doing, span.about.stage + offset, span.about.part), span.start_ns)
                    self.sent[key] = _Sent(worker, min(ready_ns, span.start_ns), span.start_ns, span.end_ns)
                elif span.doing is Doing.RECEIVE:
                    self._arrived.setdefault((worker, key), span.end_ns)  # the first counts: a second is dropped
                elif span.doing is Doing.STORE:
                    self._stores[key].append(span)

    def has_arrived(self, worker: str, key: Message) -> bool:
        return (worker, key) in self._arrived

    def arrival_ns(self, worker: str, key: Message, default: int) -> int:
        return self._arrived.get((worker, key), default)

    def store_ns(self, key: Message, start_ns: int, end_ns: int) -> int:
        """How long a codec waited for its store for this message between two moments."""
        return sum(max(0, min(s.end_ns, end_ns) - max(s.start_ns, start_ns)) for s in self._stores.get(key, ()))


class _Sums:
    """Nanoseconds of one worker's step."""

    def __init__(self) -> None:
        self.computing = self.store = self.coding = self.bubble = self.total = 0
        self.links: dict[LinkWait, int] = defaultdict(int)

    def add_coding(self, step: _Step, key: Message, start_ns: int, end_ns: int) -> None:
        waited = step.store_ns(key, start_ns, end_ns)
        self.store += waited
        self.coding += end_ns - start_ns - waited

    def times(self) -> Times:
        links = {link: ns / 1e9 for link, ns in self.links.items()}
        return Times(
            self.total / 1e9, self.computing / 1e9, links, self.store / 1e9, self.coding / 1e9, self.bubble / 1e9, num_steps=1
        )


def split_step(workers: Mapping[str, Sequence[Span]]) -> dict[str, Times]:
    """Where the time of one committed step went, for each worker that reports it whole. Spans are on one clock."""
    step = _Step(workers)
    found: dict[str, Times] = {}
    for worker, spans in workers.items():
        sums = _Sums()
        for span in spans:
            _add(sums, step, worker, span, spans)
        if sums.total:
            found[worker] = sums.times()
    return found


def _add(sums: _Sums, step: _Step, worker: str, span: Span, spans: Sequence[Span]) -> None:
    match span.doing:
        case Doing.STEP:
            sums.total += span.end_ns - span.start_ns
        case Doing.FORWARD | Doing.BACKWARD | Doing.WEIGHTS:
            sums.computing += span.end_ns - span.start_ns
        case Doing.WAIT:
            _add_wait(sums, step, worker, span)
        case Doing.WAIT_ENCODED:
            waited = _covered((s for s in spans if s.doing is Doing.STORE), span)
            sums.store += waited
            sums.coding += span.end_ns - span.start_ns - waited
        case Doing.TIED | Doing.REPLICAS:
            _add_exchange(sums, step, worker, span)
        case Doing.VOTE:
            sums.bubble += _within(step.prepared_ns, span.start_ns, span.end_ns) - span.start_ns
        case _:
            pass


def _add_wait(sums: _Sums, step: _Step, worker: str, span: Span) -> None:
    key = _message(span.about)
    sent = step.sent.get(key)
    if sent is None:
        return  # not told by its sender: other
    computed = _within(sent.computed_ns, span.start_ns, span.end_ns)
    encoded = _within(sent.encoded_ns, computed, span.end_ns)
    arrived = _within(step.arrival_ns(worker, key, span.end_ns), encoded, span.end_ns)
    sums.bubble += computed - span.start_ns
    sums.add_coding(step, key, computed, encoded)
    sums.links[LinkWait(span.about.link, span.about.kind, sent.worker)] += arrived - encoded
    sums.add_coding(step, key, arrived, span.end_ns)


def _add_exchange(sums: _Sums, step: _Step, worker: str, span: Span) -> None:
    """All send and all wait: until the last of the others begins it is bubble, while a piece is on its way here the link."""
    kind = _EXCHANGES[span.doing]
    pieces = {key: sent for key, sent in step.sent.items() if key[1] is kind and step.has_arrived(worker, key)}
    if not pieces:
        return
    first: dict[str, int] = {}
    for sent in pieces.values():
        first[sent.worker] = min(first.get(sent.worker, sent.encode_ns), sent.encode_ns)
    begun = _within(max(first.values()), span.start_ns, span.end_ns)
    on_the_way = [
        Span(Doing.SEND, key[0], Subject(), sent.encoded_ns, max(sent.encoded_ns, step.arrival_ns(worker, key, span.end_ns)))
        for key, sent in pieces.items()
    ]
    senders = {key[0]: sent.worker for key, sent in pieces.items()}
    waited = 0
    for link, covered in _covered_by(on_the_way, span._replace(start_ns=begun)).items():
        sums.links[LinkWait(link, kind, senders[link])] += covered
        waited += covered
    sums.bubble += begun - span.start_ns
    sums.coding += span.end_ns - begun - waited


def _within(moment: int, start: int, end: int) -> int:
    return min(max(moment, start), end)


def _covered(spans: Iterable[Span], frame: Span) -> int:
    """How much of `frame` lies in any of `spans`."""
    return sum(_covered_by(spans, frame).values())


def _covered_by(spans: Iterable[Span], frame: Span) -> dict[str, int]:
    """The same by the spans' lanes; where several lie over each other, the one that began first counts."""
    covered: dict[str, int] = defaultdict(int)
    until = frame.start_ns
    for span in sorted(spans, key=lambda s: s.start_ns):
        start, end = max(span.start_ns, until), min(span.end_ns, frame.end_ns)
        if end > start:
            covered[span.lane] += end - start
            until = end
    return covered


class Accounts:
    """Sorts reported spans into steps and adds up where the time went. May be called from any thread, one at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[int, dict[str, list[Span]]] = {}
        self._num_pending = 0
        self._totals: dict[str, Times] = {}

    def take(self, reports: Iterable[SpansReported], clocks: Mapping[str, RemoteClock], over: Iterable[int]) -> None:
        """Take reports in; then the steps that are `over`, committed everywhere with all spans reported, are added up. What is
        left of earlier ones was aborted, and is forgotten."""
        with self._lock:
            for report in reports:
                self._sort(report, clocks.get(report.worker, RemoteClock()))
            for step in over:
                for worker, times in split_step(self._pending.get(step, {})).items():
                    self._totals[worker] = self._totals.get(worker, Times()).plus(times)
                for old in [pending for pending in self._pending if pending <= step]:
                    self._forget(old)

    def totals(self) -> dict[str, Times]:
        """Of all steps so far."""
        with self._lock:
            return dict(sorted(self._totals.items()))

    def _sort(self, report: SpansReported, clock: RemoteClock) -> None:
        offset_ns = 0
        for index, (doing, lane, about, start_ns, end_ns) in enumerate(report.batch.spans()):
            if index == 0:  # a clock does not drift within one report
                offset_ns = round(clock.offset_s(start_ns / 1e9) * 1e9)
            if doing in _TELLING and about.kind in _OF_STEPS:
                spans = self._pending.setdefault(about.step, {}).setdefault(report.worker, [])
                spans.append(Span(doing, lane, about, start_ns + offset_ns, end_ns + offset_ns))
                self._num_pending += 1
        while self._num_pending > MAX_PENDING_SPANS:
            self._forget(min(self._pending))

    def _forget(self, step: int) -> None:
        self._num_pending -= sum(map(len, self._pending.pop(step).values()))
