"""What every worker did and when, as far as it was reported: clocks, spans for the trace file, and where the steps' time went.
Knows records; writes no file and runs no thread.

The loop only collects. `accounting` gives the work of one step as a function that may run elsewhere (law 9).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable

from coordinator import events as e
from coordinator.accounts import Accounts, Times
from pipecomp.protocol.clocks import RemoteClock

KEPT_NBYTES = 16 << 20
"""Of reported spans, for a trace file: about a million, which is as much as a browser shows."""

MOST_REPORTS = 256
"""That wait to be sorted."""


class Timeline:
    """Of one run."""

    def __init__(self, *, keep_nbytes: int) -> None:
        """`keep_nbytes`: of spans, the latest ones, for a trace file; 0: none."""
        self.clocks: dict[str, RemoteClock] = {}
        self.kept: deque[e.SpansReported] = deque()
        self.num_dropped = 0
        """Spans that are missing in `kept`: too old, or without room at their worker."""
        self._keep_nbytes = keep_nbytes
        self._kept_nbytes = 0
        self._reports: list[e.SpansReported] = []
        self._over: list[int] = []
        self._accounts = Accounts()

    def take(self, record: e.Record) -> None:
        match record:
            case e.ClockRead(worker, round_trips):
                clock = self.clocks.setdefault(worker, RemoteClock())
                for trip in round_trips:
                    clock.take(trip)
            case e.SpansReported():
                self._reports.append(record)
                self.num_dropped += record.num_dropped
                self._keep(record)
            case e.StepCommitted(step):
                self._over.append(step)
            case _:
                pass

    @property
    def is_due(self) -> bool:
        """Whether there is work for `accounting`: a step is over, or much has come of a long evaluation."""
        return bool(self._over) or len(self._reports) >= MOST_REPORTS

    def accounting(self) -> Callable[[], None]:
        """The work on what has come since the last call, to be run in order of the calls."""
        reports, self._reports = self._reports, []
        over, self._over = self._over, []
        clocks = {worker: clock.frozen() for worker, clock in self.clocks.items()}
        return functools.partial(self._accounts.take, reports, clocks, over)

    def times(self) -> dict[str, Times]:
        """Where each worker's time went, in all steps whose accounting has run."""
        return self._accounts.totals()

    def _keep(self, record: e.SpansReported) -> None:
        if not self._keep_nbytes:
            return
        self.kept.append(record)
        self._kept_nbytes += len(record.batch.deflated)
        while self._kept_nbytes > self._keep_nbytes:
            oldest = self.kept.popleft()
            self._kept_nbytes -= len(oldest.batch.deflated)
            self.num_dropped += oldest.batch.num_spans
