"""How far another machine's clock is from ours, out of round trips. Knows times that others read; reads no clock itself.

    there    sent ------.                    .--> heard        theirs, two clocks that share nothing
                         '--> answered -----'
    here                      answered                         ours

Whatever the two ways took, our clock showed `answered` at some moment of theirs between `sent` and `heard`. Taking the middle
errs by at most half the round trip (as NTP does), so of many round trips the shortest says most: queues and busy machines only
make them longer. Clocks drift (quartz by up to 50 millionths), so one round trip is kept for each while, the shortest of it, and
between two of them the offset goes along a line. They are kept apart, or the line between two that err would be steep.
Memory is bounded: when there are too many, the distance doubles.
"""

from __future__ import annotations

import bisect
import math
from typing import NamedTuple

import msgspec

SPACING_S = 15.0
MAX_ANCHORS = 256


class RoundTrip(msgspec.Struct, frozen=True, array_like=True):
    """One heartbeat and its answer."""

    sent_s: float  # by the worker's clock
    answered_s: float  # by the coordinator's
    heard_s: float  # by the worker's


class _Anchor(NamedTuple):
    """The shortest round trip of a while."""

    at_s: float  # their time, in the middle
    offset_s: float  # ours less theirs
    error_s: float  # at most


class RemoteClock:
    """One other machine's clock."""

    def __init__(self, *, spacing_s: float = SPACING_S, max_anchors: int = MAX_ANCHORS) -> None:
        self._spacing_s = spacing_s
        self._max_anchors = max_anchors
        self._anchors: list[_Anchor] = []

    @property
    def is_known(self) -> bool:
        """Whether there was a round trip at all."""
        return bool(self._anchors)

    def take(self, trip: RoundTrip) -> None:
        """Learn from one more round trip; they come in order. One that cannot be is ignored."""
        duration_s = trip.heard_s - trip.sent_s
        if not (math.isfinite(duration_s) and math.isfinite(trip.answered_s) and duration_s >= 0):
            return
        middle_s = trip.sent_s + duration_s / 2
        self._add(_Anchor(middle_s, trip.answered_s - middle_s, duration_s / 2))
        if len(self._anchors) > self._max_anchors:
            self._spacing_s *= 2
            anchors, self._anchors = self._anchors, []
            for anchor in anchors:
                self._add(anchor)

    def ours_s(self, theirs_s: float) -> float:
        """Our time at a moment of theirs; theirs itself while nothing is known."""
        return theirs_s + self.offset_s(theirs_s)

    def offset_s(self, theirs_s: float) -> float:
        """Ours less theirs at a moment of theirs: on the line between the anchors around it, else the nearest one's."""
        if not self._anchors:
            return 0.0
        before, after = self._around(theirs_s)
        if after.at_s <= before.at_s:
            return before.offset_s
        part = (theirs_s - before.at_s) / (after.at_s - before.at_s)
        return before.offset_s + part * (after.offset_s - before.offset_s)

    def error_s(self, theirs_s: float) -> float:
        """What `ours_s` is off by at most, drift beyond the first and last round trip apart; infinity if nothing is known."""
        if not self._anchors:
            return math.inf
        return max(anchor.error_s for anchor in self._around(theirs_s))

    def frozen(self) -> RemoteClock:
        """What is known now, for another thread."""
        copy = RemoteClock(spacing_s=self._spacing_s, max_anchors=self._max_anchors)
        copy._anchors = list(self._anchors)
        return copy

    def _around(self, theirs_s: float) -> tuple[_Anchor, _Anchor]:
        index = bisect.bisect(self._anchors, theirs_s, key=lambda anchor: anchor.at_s)
        last = len(self._anchors) - 1
        return self._anchors[max(0, index - 1)], self._anchors[min(index, last)]

    def _add(self, anchor: _Anchor) -> None:
        after_s = anchor.at_s - self._anchors[-1].at_s if self._anchors else math.inf
        if after_s >= self._spacing_s:
            self._anchors.append(anchor)
        elif after_s >= 0 and anchor.error_s < self._anchors[-1].error_s:
            self._anchors[-1] = anchor
