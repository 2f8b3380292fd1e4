"""The offset of another clock: clocks with a known offset and drift, round trips with queues in one way or the other."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from pipecomp.protocol.clocks import RemoteClock, RoundTrip


class TrueClocks:
    """Our time t and theirs: `offset_s` behind ours at 0, going `drift` faster."""

    def __init__(self, offset_s: float = 0.0, drift: float = 0.0) -> None:
        self.offset_s, self.drift = offset_s, drift

    def theirs(self, ours_s: float) -> float:
        return ours_s * (1 + self.drift) - self.offset_s

    def round_trip(self, ours_s: float, there_s: float, back_s: float) -> RoundTrip:
        """Answered at `ours_s`, after `there_s` of our time on the way and before `back_s` of it back."""
        return RoundTrip(self.theirs(ours_s - there_s), ours_s, self.theirs(ours_s + back_s))


def test_nothing_is_known_before_the_first_round_trip():
    clock = RemoteClock()
    assert not clock.is_known
    assert clock.ours_s(5.0) == 5.0
    assert clock.error_s(5.0) == math.inf


def test_a_symmetric_round_trip_gives_the_offset_exactly():
    clock = RemoteClock()
    clock.take(RoundTrip(100.0, 7.25, 100.5))
    assert clock.is_known
    assert (clock.ours_s(100.0), clock.error_s(100.0)) == (7.0, 0.25)


def test_the_shortest_round_trip_counts_whether_it_comes_first_or_last():
    short, long = RoundTrip(10.0, 110.5, 11.0), RoundTrip(12.0, 115.0, 16.0)
    for trips in ((short, long), (RoundTrip(2.0, 105.0, 6.0), short)):
        clock = RemoteClock()
        for trip in trips:
            clock.take(trip)
        assert (clock.offset_s(11.0), clock.error_s(11.0)) == (100.0, 0.5)


@pytest.mark.parametrize("offset_s", [-1e6, -0.003, 0.0, 0.5, 86_400.0])
@pytest.mark.parametrize("lopsided", ["there", "back", "either"])
def test_the_error_stays_below_half_the_smallest_round_trip(offset_s: float, lopsided: str):
    draw = np.random.default_rng(11)
    true, clock = TrueClocks(offset_s), RemoteClock()
    smallest_s = math.inf
    for beat in range(1, 200):
        queue_s = draw.exponential(0.05)
        into_there = {"there": 1.0, "back": 0.0, "either": float(draw.random())}[lopsided]
        there_s, back_s = 0.002 + queue_s * into_there, 0.002 + queue_s * (1 - into_there)
        clock.take(true.round_trip(beat * 0.05, there_s, back_s))  # all within the distance of two anchors
        smallest_s = min(smallest_s, there_s + back_s)
        theirs_s = true.theirs(beat * 0.05)
        assert abs(clock.ours_s(theirs_s) - beat * 0.05) <= smallest_s / 2 + 1e-9
        assert clock.error_s(theirs_s) == pytest.approx(smallest_s / 2, abs=1e-9)


@pytest.mark.parametrize("drift", [-50e-6, 50e-6])
def test_a_clock_that_drifts_is_followed_for_hours(drift: float):
    draw = np.random.default_rng(7)
    true, clock = TrueClocks(3.0, drift), RemoteClock()
    for beat in range(1, 8 * 3600, 2):
        clock.take(true.round_trip(float(beat), 0.001 + draw.exponential(0.02), 0.001))
    worst_s = max(
        abs(clock.ours_s(true.theirs(t)) - t) - clock.error_s(true.theirs(t)) for t in np.arange(60.0, 8 * 3600.0, 13.0)
    )
    assert worst_s < 1e-3  # 8 hours of drift are 1.4 s
    assert len(clock._anchors) <= 256


def test_our_time_never_goes_back_while_theirs_goes_on():
    draw = np.random.default_rng(1)
    true, clock = TrueClocks(1.0), RemoteClock()
    for beat in range(1, 400):
        there_s, back_s = draw.exponential(0.4), draw.exponential(0.4)
        clock.take(true.round_trip(beat * 0.5, there_s, back_s))
    ours = [clock.ours_s(t) for t in np.arange(-5.0, 250.0, 0.05)]
    assert all(earlier < later for earlier, later in itertools.pairwise(ours))


@pytest.mark.parametrize(
    "nonsense",
    [
        RoundTrip(2.0, 1.0, 1.0),  # heard before it was sent
        RoundTrip(math.nan, 1.0, 2.0),
        RoundTrip(1.0, math.inf, 2.0),
        RoundTrip(1.0, math.nan, 2.0),
        RoundTrip(-math.inf, 1.0, 2.0),
        RoundTrip(-50.0, 0.0, -49.99),  # a clock that went back
    ],
)
def test_a_round_trip_that_cannot_be_is_ignored(nonsense: RoundTrip):
    clock = RemoteClock()
    clock.take(RoundTrip(1.0, 1.0, 1.5))
    clock.take(nonsense)
    assert (clock.offset_s(1.0), clock.error_s(1.0)) == (-0.25, 0.25)


def test_a_frozen_copy_learns_nothing_more():
    clock = RemoteClock()
    clock.take(RoundTrip(0.0, 1.0, 0.0))
    copy = clock.frozen()
    clock.take(RoundTrip(100.0, 201.0, 100.0))
    assert (copy.offset_s(100.0), clock.offset_s(100.0)) == (1.0, 101.0)
