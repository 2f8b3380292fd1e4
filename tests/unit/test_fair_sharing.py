"""What flows get of what they share."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecomp.planning._sharing import share_fairly


def test_a_flow_takes_what_the_flow_beside_it_cannot_use() -> None:
    assert share_fairly([[0], [0, 1], [1]], [10.0, 4.0]) == [8.0, 2.0, 2.0]


def test_a_flow_through_nothing_finite_is_not_limited() -> None:
    assert share_fairly([[], [0], [1]], [math.inf, 3.0]) == [math.inf, math.inf, 3.0]


def test_no_flow_at_all_is_no_error() -> None:
    assert share_fairly([], [1.0]) == []


@given(
    capacities=st.lists(st.floats(0.1, 1e3), min_size=4, max_size=4),
    flows=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True), min_size=1, max_size=8),
)
def test_every_flow_meets_something_full_of_flows_no_faster_than_itself(capacities: list[float], flows: list[list[int]]) -> None:
    rates = share_fairly(flows, capacities)
    used = [sum(rate for rate, flow in zip(rates, flows, strict=True) if r in flow) for r in range(4)]
    assert all(use <= capacity * (1 + 1e-9) for use, capacity in zip(used, capacities, strict=True))
    for rate, flow in zip(rates, flows, strict=True):
        full = [r for r in flow if used[r] == pytest.approx(capacities[r])]
        assert any(
            rate >= other * (1 - 1e-9) for r in full for other in [max(x for x, f in zip(rates, flows, strict=True) if r in f)]
        )
