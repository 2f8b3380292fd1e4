"""How long a step takes on paper and what rules it. Pure; knows settings and orders of actions.

What rules a step. Everything that a step keeps busy has a load: the seconds for which the step's work would keep it busy if it
never waited.

    a rank        the sum of its forwards and backwards
    a processor   that sum over the ranks that share it, over how many of them it runs at once
    an uplink     all bytes that the host sends, over its rate; likewise a downlink and a path

No step is shorter than its largest load: that is the bound. What the step takes beyond it is waiting, when the part with the
largest load has nothing to do: filling and draining the pipeline, latency, too few microbatches in flight. So

    the part with the largest load rules    if it is busy for at least half of the step
    fill and drain rules                    if the step is more than twice as long as its largest load

In the first case a faster part shortens the step by more than all waiting put together could; in the second it is the other way
round: more microbatches, or more in flight, or fewer stages help, and faster parts hardly do. On equal loads a rank goes before
a link, and the earlier before the later. An up- or downlink that only one flow goes through is named as that link: it is what
the link comes to. Only where several flows share it, itself is named. What carries more of the gradients that replicas exchange
(`replicas.py`) than of anything else is named as the exchange.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final, NamedTuple

from pipecomp.planning._network import Flow, Network, Resource
from pipecomp.planning._play import Transfer, play
from pipecomp.planning.setting import Setting
from pipecomp.schedules import Action, ActionKind, Timeline
from pipecomp.types import Rank

FILL_AND_DRAIN_FROM: Final = 2.0
"""Fill and drain rules a step that is longer than this many times its largest load."""


class BoundKind(enum.StrEnum):
    COMPUTE = "compute"
    PROCESSOR = "processor"
    FORWARD_LINK = "forward link"
    BACKWARD_LINK = "backward link"
    UPLINK = "uplink"
    DOWNLINK = "downlink"
    PATH = "path"
    EXCHANGE = "exchange of gradients"
    FILL_AND_DRAIN = "fill and drain"


_ORDER: Final = list(BoundKind)


class Load(NamedTuple):
    """A part of the cluster and for how long a step keeps it busy."""

    kind: BoundKind
    ranks: tuple[Rank, ...]
    """One for compute, up- and downlinks and exchanges, all of a processor; (sender, receiver) for links and paths; none for fill
    and drain."""
    link: int | None
    """Of a link: it is between stage `link` and stage `link + 1`."""
    busy_s: float
    """Of fill and drain: what the step takes beyond its largest load."""

    def __str__(self) -> str:
        ranks = " to ".join(f"rank {rank}" for rank in self.ranks)
        match self.kind:
            case BoundKind.FILL_AND_DRAIN:
                return "fill and drain"
            case BoundKind.FORWARD_LINK | BoundKind.BACKWARD_LINK | BoundKind.PATH:
                return f"{self.kind} from {ranks}"
            case BoundKind.PROCESSOR:
                return f"processor of ranks {', '.join(map(str, self.ranks))}"
            case _:
                return f"{self.kind} of {ranks}"


class Step(NamedTuple):
    """One step on paper."""

    timeline: Timeline
    transfers: tuple[Transfer, ...]
    loads: tuple[Load, ...]
    """Of every rank and everything that messages go through; the largest first."""
    exchange_s: float = 0.0
    """From the last action's end until all replicas have exchanged their gradients, where there are several."""

    @property
    def duration_s(self) -> float:
        """From the first action's start to the last one's end, and the exchange after it."""
        return self.timeline.end + self.exchange_s

    @property
    def waiting_s(self) -> float:
        """What the step takes beyond its largest load."""
        return max(0.0, self.duration_s - self.loads[0].busy_s)

    @property
    def bound(self) -> Load:
        """What rules; see the module."""
        if self.duration_s > FILL_AND_DRAIN_FROM * self.loads[0].busy_s:
            return Load(BoundKind.FILL_AND_DRAIN, (), None, self.waiting_s)
        return self.loads[0]


def simulate_step(actions: Sequence[Sequence[Action]], setting: Setting, *, num_deferred: int = 0) -> Step:
    """Play a step and weigh what it keeps busy.

    Args:
        actions: for each rank its order, as `Schedule.actions(setting.ranks, num_microbatches)` gives it; with
            `without_backward` for a frozen first part: what nobody takes in is not sent.
        setting: costs and rates.
        num_deferred: of so many microbatches a stage may leave gradients of weights for later.

    Raises:
        LocalProtocolError: the order deadlocks; names each blocked action and what it waits for.
    """
    played = play(actions, setting, num_deferred)
    loads = [_compute_load(rank, order, setting) for rank, order in enumerate(actions)]
    loads += [
        Load(BoundKind.PROCESSOR, shared.ranks, None, sum(loads[rank].busy_s for rank in shared.ranks) / shared.num_at_once)
        for shared in setting.processors
    ]
    loads += _network_loads(played.network)
    # Twelve digits: sums in another order are no larger load. What is equal stays in its order.
    return Step(played.timeline, played.transfers, tuple(sorted(loads, key=lambda load: -float(f"{load.busy_s:.12g}"))))


def _compute_load(rank: int, order: Sequence[Action], setting: Setting) -> Load:
    busy_s = sum(
        setting.stages[stage].forward_s if kind is ActionKind.FORWARD else setting.stages[stage].backward_s
        for stage, kind, _ in order
    )
    return Load(BoundKind.COMPUTE, (Rank(rank),), None, busy_s)


def _network_loads(network: Network) -> list[Load]:
    """Links first, then what several flows share, uplinks before downlinks."""
    loads = []
    for position, resource in enumerate(network.resources):
        flows = [flow for flow in network.flows if position in flow.resources]
        loads.append(_resource_load(resource, flows))
    return sorted(loads, key=lambda load: (_ORDER.index(load.kind), load.ranks))


def _resource_load(resource: Resource, flows: Sequence[Flow]) -> Load:
    busy_s = sum(flow.nbytes * flow.num_messages for flow in flows) / resource.nbytes_per_s
    if len(flows) == 1:
        (flow,) = flows
        kind = BoundKind.FORWARD_LINK if flow.kind is ActionKind.FORWARD else BoundKind.BACKWARD_LINK
        return Load(kind, (flow.sender, flow.receiver), flow.link, busy_s)
    return Load(BoundKind(resource.kind), resource.ranks, None, busy_s)
