"""What a run has come to: steps, losses, times, traffic, link errors, memory. Knows records only; prints nothing."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from coordinator import events as e
from coordinator.accounts import Times
from pipecomp.protocol.messages import LinkMeter, StoreMeter, Traffic
from pipecomp.types import Kind

RECENT_STEPS = 20


class KindTraffic(NamedTuple):
    """All bytes of one kind, from whichever end."""

    values: int = 0
    payload_nbytes: int = 0
    header_nbytes: int = 0

    @property
    def nbytes(self) -> int:
        return self.payload_nbytes + self.header_nbytes


class LinkError(NamedTuple):
    """Sums of one link and kind over all committed steps, fp64."""

    squared_error: float = 0.0
    squared_delta: float = 0.0
    squared_delta_values: float = 0.0
    squared_values: float = 0.0
    first_visits: int = 0
    fallbacks: int = 0
    samples: int = 0

    @property
    def relative_error(self) -> float | None:
        """|a - m_out| / |a| over everything that was measured."""
        return (self.squared_error / self.squared_values) ** 0.5 if self.squared_values else None

    @property
    def delta_ratio(self) -> float | None:
        """|a - m_in| / |a| over samples that had a message."""
        return (self.squared_delta / self.squared_delta_values) ** 0.5 if self.squared_delta_values else None


class Ledger:
    """Takes every record of a run."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_samples = 0
        self.num_tokens = 0
        self.losses: list[float] = []
        self.step_times_s: list[float] = []
        self.aborted: list[e.StepAborted] = []
        self.evaluations: list[e.EvaluationEnded] = []
        self.loaded: dict[str, e.WorkerLoaded] = {}
        self.peak_memory_nbytes: dict[str, int] = {}
        self.message_nbytes: dict[str, int] = {}
        self.links: dict[tuple[str, Kind], LinkError] = {}
        self.step_links: dict[tuple[str, Kind], LinkError] = {}
        """Of the last committed step alone."""
        self.stores: dict[tuple[str, str], StoreMeter] = {}
        """By link and end, since the start."""
        self.times: dict[str, Times] = {}
        """Where each worker's steps spent their time; known at the end."""
        self.model_folder = ""
        self.frozen_after: int | None = None
        """The step that ended the warm-up of quantized Adam."""
        self.step_nbytes = 0
        """Bytes that workers sent between the last two committed steps."""
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT_STEPS)
        self._traffic: dict[str, tuple[Traffic, ...]] = {}
        self._nbytes_before = 0

    def take(self, record: e.Record) -> None:
        match record:
            case e.StepCommitted():
                self._take_step(record)
            case e.MomentsFrozen(step):
                self.frozen_after = step
            case e.StepAborted():
                self.aborted.append(record)
            case e.EvaluationEnded():
                self.evaluations.append(record)
                self._nbytes_before = self._sent_nbytes()  # a step is not charged for the evaluation before it
            case e.TrafficReported(worker, traffic):
                self._traffic[worker] = traffic
            case e.WorkerLoaded():
                self.loaded[record.worker] = record
                self.peak_memory_nbytes[record.worker] = record.peak_memory_nbytes
            case e.ModelStored(folder):
                self.model_folder = folder
            case _:
                pass

    @property
    def tokens_per_s(self) -> float:
        """Over the latest steps."""
        seconds = sum(time_s for time_s, _ in self._recent)
        return sum(tokens for _, tokens in self._recent) / seconds if seconds > 0 else 0.0

    def eta_s(self, total_steps: int, step: int) -> float:
        """Seconds that the steps after `step` should take."""
        if not self._recent:
            return 0.0
        return max(0, total_steps - step) * statistics.median(time_s for time_s, _ in self._recent)

    def traffic(self, own: Iterable[Traffic] = ()) -> dict[Kind, KindTraffic]:
        """Of every kind, even when there was none; `own` is what the coordinator counted itself."""
        totals = dict.fromkeys(Kind, KindTraffic())
        for part in (*own, *(part for parts in self._traffic.values() for part in parts if not _is_counted_here(part))):
            old = totals[part.kind]
            totals[part.kind] = KindTraffic(
                old.values + part.values,
                old.payload_nbytes + part.payload_nbytes,
                old.header_nbytes + part.header_nbytes,
            )
        return totals

    def _take_step(self, record: e.StepCommitted) -> None:
        self.num_steps += 1
        self.num_samples += record.size.samples
        self.num_tokens += record.size.tokens
        if record.size.targets:  # else there was nothing to predict, and the loss is 0 by name only
            self.losses.append(record.loss)
        self.step_times_s.append(record.step_time_s)
        self._recent.append((record.step_time_s, record.size.tokens))
        self.step_links = {}
        for worker, report in record.reports.items():
            self._traffic[worker] = report.traffic
            self.peak_memory_nbytes[worker] = max(self.peak_memory_nbytes.get(worker, 0), report.peak_memory_nbytes)
            self.message_nbytes[worker] = report.message_nbytes
            self.stores.update({(meter.link, meter.end): meter for meter in report.stores})
            for meter in report.meters:
                _add(self.links, meter)
                _add(self.step_links, meter)
        sent = self._sent_nbytes()
        self.step_nbytes, self._nbytes_before = sent - self._nbytes_before, sent

    def _sent_nbytes(self) -> int:
        return sum(t.payload_nbytes + t.header_nbytes for parts in self._traffic.values() for t in parts)


def _add(links: dict[tuple[str, Kind], LinkError], meter: LinkMeter) -> None:
    old = links.get((meter.link, meter.kind), LinkError())
    links[meter.link, meter.kind] = LinkError(
        old.squared_error + meter.squared_error,
        old.squared_delta + meter.squared_delta,
        old.squared_delta_values + meter.squared_delta_values,
        old.squared_values + meter.squared_values,
        old.first_visits + meter.first_visits,
        old.fallbacks + meter.fallbacks,
        old.samples + meter.samples,
    )


def _is_counted_here(part: Traffic) -> bool:
    """Weights on their way to the coordinator: it counts what arrives, while a worker's last report may come too early."""
    return part.kind is Kind.WEIGHTS
