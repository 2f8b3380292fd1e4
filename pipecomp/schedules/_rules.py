"""What every schedule must keep to, and what can be read off one. Pure; knows no plugin by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from pipecomp.errors import ConfigError, LocalProtocolError
from pipecomp.schedules._grid import format_orders
from pipecomp.schedules._simulate import Timeline, simulate
from pipecomp.schedules.base import Action, ActionKind
from pipecomp.types import MicrobatchIndex, Rank, StageIndex


def validate(
    actions: Sequence[Sequence[Action]],
    ranks: Sequence[Rank],
    num_microbatches: int,
    *,
    no_backward: Collection[int] = (),
    num_in_flight: int | None = None,
) -> Timeline:
    """Check an order against the rules, and return how it runs at unit costs.

    1. Every forward and backward stands once, on the rank that holds its stage.
    2. A stage's backwards run in the order of the microbatches, so that its gradients are summed in that order.
    3. The order cannot deadlock: on paper it runs to its end.
    4. No stage holds more than `num_in_flight` microbatches between their forward and their backward.

    Args:
        actions: for each rank its order.
        ranks: for each stage the rank that holds it.
        num_microbatches: how many there are.
        no_backward: stages whose backwards were left out (`without_backward`).
        num_in_flight: the bound of rule 4; None: none.

    Raises:
        LocalProtocolError: a rule is broken; names the rule and the actions, above the drawn order.
    """
    try:
        _check_complete(actions, ranks, num_microbatches, no_backward)
        _check_backwards_ascend(actions)
        peak = max(peak_in_flight(actions).values(), default=0)
        if num_in_flight is not None and peak > num_in_flight:
            raise LocalProtocolError(f"a stage holds {peak} microbatches in flight; at most {num_in_flight} are allowed")
    except LocalProtocolError as e:
        raise LocalProtocolError(f"{e}\n{format_orders(actions)}") from None
    return simulate(actions)


def without_backward(actions: Sequence[Sequence[Action]], stages: Collection[int]) -> list[list[Action]]:
    """The same order without the backwards of `stages`.

    For a frozen first part of a model: stages whose parameters need no gradient, and whose input needs none either, have
    no backward, and the stage after them sends none. Taking actions away cannot make an order deadlock as long as `stages`
    are the first ones: no action that stays waits for one that goes.
    """
    return [[a for a in order if a.kind is ActionKind.FORWARD or a.stage not in stages] for order in actions]


def peak_in_flight(actions: Sequence[Sequence[Action]]) -> dict[StageIndex, int]:
    """For each stage the most microbatches it holds between forward and backward at once.

    It is what a stage's memory for activations is made of. A stage without any backward holds none.
    """
    peaks: dict[StageIndex, int] = {}
    for order in actions:
        with_backward = {action.stage for action in order if action.kind is ActionKind.BACKWARD}
        held: Counter[StageIndex] = Counter()
        for action in order:
            if action.stage in with_backward:
                held[action.stage] += 1 if action.kind is ActionKind.FORWARD else -1
            peaks[action.stage] = max(peaks.get(action.stage, 0), held[action.stage])
    return peaks


def check_options(schedule: str, options: Mapping[str, object], known: Collection[str]) -> dict[str, object]:
    """The options that are set. An option that is None was left out.

    Raises:
        ConfigError: one is set that `schedule` does not know.
    """
    given = {name: value for name, value in options.items() if value is not None}
    allowed = ", ".join(sorted(known)) if known else "no options"
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"cluster.{name} = {value!r}: schedule {schedule!r} takes {allowed}; leave {name} out")
    return given


def _check_complete(
    actions: Sequence[Sequence[Action]], ranks: Sequence[Rank], num_microbatches: int, no_backward: Collection[int]
) -> None:
    num_ranks = max(ranks) + 1
    if len(actions) != num_ranks:
        raise LocalProtocolError(f"the schedule has orders for {len(actions)} ranks; there are {num_ranks}")
    wanted = {
        Action(StageIndex(stage), kind, MicrobatchIndex(microbatch)): rank
        for stage, rank in enumerate(ranks)
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
        for microbatch in range(num_microbatches)
        if kind is ActionKind.FORWARD or stage not in no_backward
    }
    count = Counter(action for order in actions for action in order)
    _refuse("unknown actions", [action for action in count if action not in wanted])
    _refuse("actions that stand more than once", [action for action, number in count.items() if number > 1])
    _refuse("missing actions", [action for action in wanted if action not in count])
    misplaced = [action for rank, order in enumerate(actions) for action in order if wanted[action] != rank]
    _refuse("actions on a rank that does not hold their stage", misplaced)


def _check_backwards_ascend(actions: Sequence[Sequence[Action]]) -> None:
    last: dict[StageIndex, Action] = {}
    for order in actions:
        for action in order:
            if action.kind is ActionKind.BACKWARD:
                before = last.get(action.stage)
                if before is not None and before.microbatch > action.microbatch:
                    raise LocalProtocolError(f"backwards out of order: {before} before {action}")
                last[action.stage] = action


def _refuse(what: str, found: Sequence[Action]) -> None:
    if found:
        raise LocalProtocolError(f"{what}: {', '.join(str(action) for action in found)}")
