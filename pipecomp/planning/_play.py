"""Play a step on paper, event by event: what computes when, what is sent when. Pure; knows no clock but its own.

At every moment each rank runs the head of its order if it has the input, and each flow sends the oldest result that it has not
sent. Flows that send at once share what they go through max-min fairly, as a fluid; the shares change whenever a flow starts or
ends a message:

    1F1 ──▶ rank 2    ████████░░░░░░░░████      alone on rank 1's uplink, then two share it, then alone again
    1B0 ──▶ rank 0            ░░░░░░░░

A message arrives the latency after its last byte has left; the next one does not wait for that.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from pipecomp.errors import LocalProtocolError
from pipecomp.planning._network import Flow, Network, lay_out
from pipecomp.planning._sharing import share_fairly
from pipecomp.planning.setting import Setting
from pipecomp.schedules import Action, ActionKind, Span, Timeline, needs
from pipecomp.types import Rank, StageIndex

_SAME_TIME = 1e-12
"""Flows that end within this part of the time are taken to end together: rounding would split them."""


class Transfer(NamedTuple):
    """One message on its way."""

    action: Action
    """Whose result it is."""
    sender: Rank
    receiver: Rank
    nbytes: float
    start: float
    """When its first byte leaves."""
    end: float
    """When its last byte has left."""
    arrival: float


class _Sender:
    """One flow under way."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.queue: deque[Action] = deque()
        self.left_nbytes = 0.0
        self.start = 0.0

    def add(self, action: Action, now: float) -> None:
        self.queue.append(action)
        if len(self.queue) == 1:
            self._begin(now)

    def finish(self, now: float) -> Transfer:
        """The message at the head has left."""
        flow, action = self.flow, self.queue.popleft()
        done = Transfer(action, flow.sender, flow.receiver, flow.nbytes, self.start, now, now + flow.latency_s)
        if self.queue:
            self._begin(now)
        return done

    def _begin(self, now: float) -> None:
        self.left_nbytes, self.start = self.flow.nbytes, now


class _Play:
    """The state of one step."""

    def __init__(self, actions: Sequence[Sequence[Action]], setting: Setting, network: Network) -> None:
        self.spans: list[Span] = []
        self.transfers: list[Transfer] = []
        self._setting = setting
        self._network = network
        self._orders = [deque(order) for order in actions]
        self._computing = [False] * len(actions)
        self._there: set[Action] = set()
        self._senders = {flow.key: _Sender(flow) for flow in network.flows}
        self._events: list[tuple[float, int, Action, bool]] = []  # time, number, whose result, was it computed just then
        self._num_events = 0
        self._shares: dict[tuple[tuple[StageIndex, ActionKind], ...], list[float]] = {}

    def run(self) -> None:
        now = 0.0
        self._start_ranks(now)
        while True:
            sending, rates = self._sending()
            ends = [
                now + (sender.left_nbytes / rate if sender.left_nbytes else 0.0)
                for sender, rate in zip(sending, rates, strict=True)
            ]
            then = min([self._events[0][0] if self._events else math.inf, *ends])
            if then == math.inf:
                break
            for sender, rate, end in zip(sending, rates, ends, strict=True):
                if end <= then * (1 + _SAME_TIME):
                    self._finish(sender, then)
                else:
                    sender.left_nbytes -= rate * (then - now)
            now = then
            while self._events and self._events[0][0] <= now:
                _, _, action, computed = heapq.heappop(self._events)
                self._happen(action, now, computed=computed)
            self._start_ranks(now)
        self._check_all_ran()

    def _sending(self) -> tuple[list[_Sender], list[float]]:
        sending = [sender for sender in self._senders.values() if sender.queue]
        key = tuple(sender.flow.key for sender in sending)
        if key not in self._shares:
            capacities = [resource.nbytes_per_s for resource in self._network.resources]
            self._shares[key] = share_fairly([sender.flow.resources for sender in sending], capacities)
        return sending, self._shares[key]

    def _finish(self, sender: _Sender, now: float) -> None:
        done = sender.finish(now)
        self.transfers.append(done)
        self._plan_event(done.arrival, done.action, computed=False)

    def _happen(self, action: Action, now: float, *, computed: bool) -> None:
        """A result was computed, or has arrived."""
        if not computed:
            self._there.add(action)
            return
        self._computing[self._setting.ranks[action.stage]] = False
        sender = self._senders.get((action.stage, action.kind))
        if sender is not None and action in self._network.takers:
            sender.add(action, now)
        else:
            self._there.add(action)

    def _start_ranks(self, now: float) -> None:
        for rank, order in enumerate(self._orders):
            if order and not self._computing[rank] and self._has_input(order[0]):
                action = order.popleft()
                cost = self._setting.stages[action.stage]
                end = now + (cost.forward_s if action.kind is ActionKind.FORWARD else cost.backward_s)
                self._computing[rank] = True
                self.spans.append(Span(Rank(rank), action, now, end))
                self._plan_event(end, action, computed=True)

    def _has_input(self, action: Action) -> bool:
        needed = needs(action, len(self._setting.stages) - 1)
        return needed is None or needed in self._there

    def _plan_event(self, time: float, action: Action, *, computed: bool) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time, self._num_events, action, computed))

    def _check_all_ran(self) -> None:
        blocked = [
            f"rank {rank} waits before {order[0]} for {needs(order[0], len(self._setting.stages) - 1)}"
            for rank, order in enumerate(self._orders)
            if order
        ]
        if blocked:
            raise LocalProtocolError("the schedule deadlocks: " + "; ".join(blocked))


class Played(NamedTuple):
    """When everything happened."""

    timeline: Timeline
    transfers: tuple[Transfer, ...]
    """In order of their end."""
    network: Network


def play(actions: Sequence[Sequence[Action]], setting: Setting) -> Played:
    """Run each rank's actions in their order.

    Raises:
        LocalProtocolError: the order deadlocks; names each blocked action and what it waits for.
    """
    network = lay_out(actions, setting)
    run = _Play(actions, setting, network)
    run.run()
    return Played(Timeline(tuple(run.spans), len(actions)), tuple(run.transfers), network)
