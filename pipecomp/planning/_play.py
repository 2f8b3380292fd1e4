"""Play a step on paper, event by event: what computes when, what is sent when. Pure; knows no clock but its own.

At every moment each rank runs the head of its order if it has the input, else what gradients of weights it has deferred, and each
flow sends the oldest result that it has not sent. Flows that send at once share what they go through max-min fairly, as a fluid;
the shares change whenever a flow starts or ends a message:

    1F1 ──▶ rank 2    ████████░░░░░░░░████      alone on rank 1's uplink, then two share it, then alone again
    1B0 ──▶ rank 0            ░░░░░░░░

A message arrives the latency after its last byte has left; the next one does not wait for that. Ranks that share a processor
share it in the same way: each runs at full speed as long as no more compute than it runs at once, else all a little slower.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
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
        self.left = 0.0
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
        self.left, self.start = self.flow.nbytes, now


class _Worker:
    """A rank that computes on a processor that it shares."""

    def __init__(self, action: Action, left_s: float, now: float) -> None:
        self.action = action
        self.left = left_s
        self.start = now


class _Play:
    """The state of one step."""

    def __init__(self, actions: Sequence[Sequence[Action]], setting: Setting, network: Network, num_deferred: int) -> None:
        self.spans: list[Span] = []
        self.transfers: list[Transfer] = []
        self._setting = setting
        self._network = network
        self._orders = [deque(order) for order in actions]
        self._num_deferred = num_deferred
        self._deferred: list[deque[Action]] = [deque() for _ in setting.stages]
        self._computing = [False] * len(actions)
        self._there: set[Action] = set()
        self._workers: dict[Rank, _Worker] = {}
        self._sharing = {rank for processor in setting.processors for rank in processor.ranks}
        self._senders = {flow.key: _Sender(flow) for flow in network.flows}
        self._events: list[tuple[float, int, Action, bool]] = []  # time, number, whose result, was it computed just then
        self._num_events = 0
        self._shares: dict[tuple[tuple[StageIndex, ActionKind], ...], list[float]] = {}

    def run(self) -> None:
        now = 0.0
        while True:
            self._start_ranks(now, self._next)
            moving = self._moving()
            ends = [now + (each.left / rate if each.left else 0.0) for each, rate in moving]
            then = min([self._events[0][0] if self._events else math.inf, *ends])
            if then > now and self._start_ranks(now, self._next_deferred):  # no input comes at this very moment
                continue
            if then == math.inf:
                break
            for (each, rate), end in zip(moving, ends, strict=True):
                if end > then * (1 + _SAME_TIME):
                    each.left -= rate * (then - now)
                elif isinstance(each, _Sender):
                    self._finish(each, then)
                else:
                    self._leave(each, then)
            now = then
            while self._events and self._events[0][0] <= now:
                _, _, action, computed = heapq.heappop(self._events)
                self._happen(action, now, computed=computed)
        self._check_all_ran()

    def _moving(self) -> list[tuple[_Sender | _Worker, float]]:
        """Whatever is under way at a rate that others change, with that rate."""
        sending = [sender for sender in self._senders.values() if sender.queue]
        key = tuple(sender.flow.key for sender in sending)
        if key not in self._shares:
            capacities = [resource.nbytes_per_s for resource in self._network.resources]
            self._shares[key] = share_fairly([sender.flow.resources for sender in sending], capacities)
        moving: list[tuple[_Sender | _Worker, float]] = list(zip(sending, self._shares[key], strict=True))
        for processor in self._setting.processors:
            workers = [self._workers[rank] for rank in processor.ranks if rank in self._workers]
            moving += [(worker, min(1.0, processor.num_at_once / len(workers))) for worker in workers]
        return moving

    def _leave(self, worker: _Worker, now: float) -> None:
        """An action on a shared processor has ended."""
        rank = self._setting.ranks[worker.action.stage]
        del self._workers[rank]
        self.spans.append(Span(rank, worker.action, worker.start, now))
        self._plan_event(now, worker.action, computed=True)

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
        if action.kind is ActionKind.BACKWARD and self._num_deferred and self._setting.stages[action.stage].weights_s:
            self._deferred[action.stage].append(action._replace(kind=ActionKind.WEIGHTS))
        sender = self._senders.get((action.stage, action.kind))
        if sender is not None and action in self._network.takers:
            sender.add(action, now)
        else:
            self._there.add(action)

    def _start_ranks(self, now: float, choose: Callable[[Rank], Action | None]) -> bool:
        """Let each rank that computes nothing begin what is chosen for it; whether any did."""
        any_did = False
        for rank in range(len(self._orders)):
            action = None if self._computing[rank] else choose(Rank(rank))
            if action is not None:
                any_did = True
                length_s = self._length_s(action)
                self._computing[rank] = True
                if rank in self._sharing:
                    self._workers[Rank(rank)] = _Worker(action, length_s, now)
                else:
                    self.spans.append(Span(Rank(rank), action, now, now + length_s))
                    self._plan_event(now + length_s, action, computed=True)
        return any_did

    def _next(self, rank: Rank) -> Action | None:
        """Gradients of weights if more of them wait than may, else the head of the order if its input is there."""
        order = self._orders[rank]
        full = [queue for queue in self._deferred_of(rank) if len(queue) > self._num_deferred]
        if full:
            return full[0].popleft()
        return order.popleft() if order and self._has_input(order[0]) else None

    def _next_deferred(self, rank: Rank) -> Action | None:
        """Gradients of weights, whether many or few wait."""
        deferred = self._deferred_of(rank)
        return deferred[0].popleft() if deferred else None

    def _deferred_of(self, rank: Rank) -> list[deque[Action]]:
        return [queue for stage, queue in enumerate(self._deferred) if queue and self._setting.ranks[stage] == rank]

    def _length_s(self, action: Action) -> float:
        cost = self._setting.stages[action.stage]
        if action.kind is ActionKind.BACKWARD:
            return cost.backward_s - (cost.weights_s if self._num_deferred else 0.0)
        return cost.forward_s if action.kind is ActionKind.FORWARD else cost.weights_s

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


def play(actions: Sequence[Sequence[Action]], setting: Setting, num_deferred: int = 0) -> Played:
    """Run each rank's actions in their order; of up to `num_deferred` microbatches a stage leaves gradients of weights for later.

    Raises:
        LocalProtocolError: the order deadlocks; names each blocked action and what it waits for.
    """
    network = lay_out(actions, setting)
    run = _Play(actions, setting, network, num_deferred)
    run.run()
    spans = sorted(run.spans, key=lambda span: span.start)
    return Played(Timeline(tuple(spans), len(actions)), tuple(run.transfers), network)
