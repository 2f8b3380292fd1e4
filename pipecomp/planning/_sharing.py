"""How flows share what they go through: max-min fairly. Pure arithmetic; knows no links, ranks or time.

Max-min fair: no flow can be given more without taking from one that has no more than it has. All rates grow together from 0;
whatever is full first stops the flows that go through it, the others go on growing:

    A and B share 10, B and C share 4        B and C stop at 2, A goes on to 8

It is what equal TCP flows come to on equal round trips, and what a sender that serves its connections in turn does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def share_fairly(flows: Sequence[Sequence[int]], capacities: Sequence[float]) -> list[float]:
    """The rate of each flow.

    Args:
        flows: for each flow the positions in `capacities` of what it goes through, each once.
        capacities: above zero, may be infinite.

    Returns:
        A rate for each flow; infinite for one that goes through nothing finite.
    """
    rates = [math.inf] * len(flows)
    left = list(capacities)
    growing = set(range(len(flows)))
    rate = 0.0
    while True:
        users = [0] * len(capacities)
        for flow in growing:
            for resource in flows[flow]:
                users[resource] += 1
        full = min(
            (resource for resource in range(len(capacities)) if users[resource] and left[resource] < math.inf),
            key=lambda resource: left[resource] / users[resource],
            default=None,
        )
        if full is None:
            return rates
        rate = max(rate, left[full] / users[full])  # never less than before, whatever the rounding
        stopped = [flow for flow in growing if full in flows[flow]]
        for flow in stopped:
            rates[flow] = rate
            for resource in flows[flow]:
                left[resource] -= rate
        growing.difference_update(stopped)
