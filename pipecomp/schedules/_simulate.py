"""Run a schedule on paper: when each action starts and ends, and whether the order can run at all. Pure; knows no clock.

What an action waits for, besides the rank being free:

    0F0 ──link──▶ 1F0 ──link──▶ 2F0          a forward waits for the stage before
                                 │           the last stage's backward waits for its own forward
    0B0 ◀──link── 1B0 ◀──link── 2B0          a backward waits for the stage after

A link between two ranks carries one transfer at a time in each direction, in the order in which the sender computed; two
stages of one rank hand over for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from pipecomp.errors import LocalProtocolError
from pipecomp.schedules._grid import Span, format_grid
from pipecomp.schedules.base import Action, ActionKind
from pipecomp.types import Rank, StageIndex


class Costs(NamedTuple):
    """How long things take, in any unit. The defaults draw one cell an action."""

    forward: float = 1
    backward: float = 1
    link: float = 0
    """How long one transfer keeps its link busy (bytes over rate)."""
    latency: float = 0
    """How much later than that it arrives; several transfers may be on their way."""


UNIT_COSTS: Final = Costs()


class Timeline(NamedTuple):
    """When everything happened."""

    spans: tuple[Span, ...]
    """In order of start."""
    num_ranks: int

    @property
    def end(self) -> float:
        """When the last action ended; the length of a step."""
        return max((span.end for span in self.spans), default=0)

    def busy(self, rank: int) -> float:
        """Time that `rank` spent computing."""
        return sum(span.end - span.start for span in self.spans if span.rank == rank)

    def orders(self) -> list[list[Action]]:
        """Each rank's actions in the order in which they started."""
        orders: list[list[Action]] = [[] for _ in range(self.num_ranks)]
        for span in self.spans:
            orders[span.rank].append(span.action)
        return orders


def needs(action: Action, last_stage: int) -> Action | None:
    """The action whose result `action` takes in; None for the first stage's forward, whose input is the batch."""
    stage, kind, microbatch = action
    if kind is ActionKind.FORWARD:
        return Action(StageIndex(stage - 1), kind, microbatch) if stage > 0 else None
    if stage == last_stage:
        return Action(stage, ActionKind.FORWARD, microbatch)
    return Action(StageIndex(stage + 1), kind, microbatch)


def simulate(actions: Sequence[Sequence[Action]], costs: Costs = UNIT_COSTS) -> Timeline:
    """Run each rank's actions in their order.

    Args:
        actions: for each rank its actions, as `Schedule.actions` gives them.
        costs: how long things take.

    Raises:
        LocalProtocolError: the order deadlocks, or an action stands twice or waits for one that is in no rank's order; the
            text names each blocked action and what it waits for, above the grid of what could run.
    """
    return _run([[order] for order in actions], costs)


def merge_stage_orders(stage_orders: Sequence[Sequence[Action]], ranks: Sequence[Rank], costs: Costs) -> list[list[Action]]:
    """One order for each rank out of one order for each stage it holds.

    The ranks run on paper, and each takes whatever is ready: a backward before a forward (it frees memory and the stage
    before waits for it), the deeper stage before the shallower (it is nearer to a backward), else the one that is ready
    first. An order that has run cannot deadlock, whatever the costs turn out to be: it has run in an order in which
    everything that an action waits for stands before it.

    Args:
        stage_orders: for each stage its actions; together they must be able to run.
        ranks: for each stage the rank that holds it.
        costs: what to expect; only a rank with several stages depends on them.
    """
    queues: list[list[Sequence[Action]]] = [[] for _ in range(max(ranks) + 1)]
    for stage, order in enumerate(stage_orders):
        queues[ranks[stage]].append(order)
    return _run(queues, costs).orders()


class _Queue:
    """Actions that one rank runs in this order, maybe among those of other queues."""

    def __init__(self, rank: int, order: Sequence[Action]) -> None:
        self.rank = rank
        self.order = order
        self._next = 0

    @property
    def head(self) -> Action | None:
        return self.order[self._next] if self._next < len(self.order) else None

    def pop(self) -> None:
        self._next += 1


class _Run:
    """The state of one run: what has ended, when its result is there, and until when ranks and links are busy."""

    def __init__(self, queues: Iterable[_Queue], num_ranks: int, costs: Costs) -> None:
        self.queues = list(queues)
        self.costs = costs
        self.spans: list[Span] = []
        self._free = [0.0] * num_ranks
        self._link_free: dict[tuple[StageIndex, ActionKind], float] = {}
        self._arrival: dict[Action, float] = {}
        self._ranks = _ranks_of_stages(self.queues)
        self._last_stage = max(self._ranks, default=0)

    def candidates(self) -> list[tuple[float, bool, int, int, _Queue]]:
        """Every queue whose head has its input on the way: (earliest start, priority..., queue)."""
        found = []
        for queue in self.queues:
            action = queue.head
            if action is None:
                continue
            needed = needs(action, self._last_stage)
            ready = 0.0 if needed is None else self._arrival.get(needed)
            if ready is not None:
                start = max(ready, self._free[queue.rank])
                found.append((start, action.kind is ActionKind.FORWARD, -action.stage, queue.rank, queue))
        return found

    def start(self, queue: _Queue, start: float) -> None:
        action = queue.head
        assert action is not None
        if action in self._arrival:
            raise LocalProtocolError(f"action {action} stands twice in the schedule\n{self.grid()}")
        queue.pop()
        end = start + (self.costs.forward if action.kind is ActionKind.FORWARD else self.costs.backward)
        self.spans.append(Span(Rank(queue.rank), action, start, end))
        self._free[queue.rank] = end
        self._arrival[action] = self._transfer(action, end)

    def _transfer(self, action: Action, end: float) -> float:
        """When the result of `action`, which ended at `end`, is where it is needed."""
        stage, kind, _ = action
        receiver = StageIndex(stage + 1 if kind is ActionKind.FORWARD else stage - 1)
        if self._ranks.get(receiver, self._ranks[stage]) == self._ranks[stage]:
            return end
        gone = max(end, self._link_free.get((stage, kind), 0.0)) + self.costs.link
        self._link_free[stage, kind] = gone
        return gone + self.costs.latency

    def grid(self) -> str:
        return format_grid(self.spans, len(self._free))

    def blocked(self) -> str:
        """The heads that wait for ever, each with what it waits for."""
        return "\n".join(
            f"rank {queue.rank} waits before {queue.head} for {needs(queue.head, self._last_stage)}"
            for queue in self.queues
            if queue.head is not None
        )


def _run(queues_of_ranks: Sequence[Sequence[Sequence[Action]]], costs: Costs) -> Timeline:
    queues = [_Queue(rank, order) for rank, orders in enumerate(queues_of_ranks) for order in orders]
    run = _Run(queues, len(queues_of_ranks), costs)
    num_left = sum(len(order) for orders in queues_of_ranks for order in orders)
    while num_left:
        # The earliest start over all ranks goes first: whatever is not known yet can only arrive later than that.
        candidates = run.candidates()
        if not candidates:
            raise LocalProtocolError(f"the schedule deadlocks:\n{run.blocked()}\nwhat could run before that:\n{run.grid()}")
        start, *_, queue = min(candidates, key=lambda candidate: candidate[:-1])
        run.start(queue, start)
        num_left -= 1
    return Timeline(tuple(run.spans), len(queues_of_ranks))


def _ranks_of_stages(queues: Iterable[_Queue]) -> dict[StageIndex, Rank]:
    ranks: dict[StageIndex, Rank] = {}
    for queue in queues:
        for action in queue.order:
            if ranks.setdefault(action.stage, Rank(queue.rank)) != queue.rank:
                raise LocalProtocolError(f"action {action} stands on rank {queue.rank}, its stage on {ranks[action.stage]}")
    return ranks
