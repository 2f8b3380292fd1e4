"""The suite that any schedule must pass, built in or not. Knows the rules of `pipecomp.schedules`, no schedule by name.

    def test_my_schedule() -> None:
        check_schedule(MySchedule())
"""

from __future__ import annotations

from collections.abc import Iterator

from pipecomp.schedules import Costs, Schedule, format_grid, simulate, validate, without_backward
from pipecomp.types import Rank

_UNEVEN = Costs(forward=1, backward=2.5, link=7, latency=40)


def check_schedule(schedule: Schedule, *, max_stages: int = 6, max_microbatches: int = 12) -> None:
    """Try a schedule on every small case.

    For 1 to `max_stages` stages, on ranks of their own and looped over fewer ranks, and for 1 to `max_microbatches`
    microbatches: the order keeps the rules of `validate`, is the same when asked for twice, runs at other costs than those
    it was made for, and still runs when the first stages have no backward.

    Raises:
        AssertionError: a case fails; names the case and draws the order.
    """
    for num_stages in range(1, max_stages + 1):
        for ranks in rank_layouts(num_stages):
            for num_microbatches in range(1, max_microbatches + 1):
                _check_case(schedule, ranks, num_microbatches)


def rank_layouts(num_stages: int) -> Iterator[tuple[Rank, ...]]:
    """Ways to lay `num_stages` stages on ranks, each once.

    For four stages: (0,1,2,3), one each; (0,1,2,0), the head beside the embedding; (0,1,0,1), interleaved; (0,1,1,0), there
    and back; (0,0,0,0), all on one.
    """
    half = (num_stages + 1) // 2
    layouts = [
        range(num_stages),
        [*range(max(1, num_stages - 1)), 0][:num_stages],
        [stage % half for stage in range(num_stages)],
        [min(stage, num_stages - 1 - stage) for stage in range(num_stages)],
        [0] * num_stages,
    ]
    yield from dict.fromkeys(tuple(Rank(rank) for rank in layout) for layout in layouts)


def _check_case(schedule: Schedule, ranks: tuple[Rank, ...], num_microbatches: int) -> None:
    case = f"{schedule.name}, ranks {list(ranks)}, {num_microbatches} microbatches"
    actions = schedule.actions(ranks, num_microbatches)
    try:
        timeline = validate(actions, ranks, num_microbatches)
        simulate(actions, _UNEVEN)
        for num_frozen in range(1, len(ranks)):
            frozen = range(num_frozen)
            validate(without_backward(actions, frozen), ranks, num_microbatches, no_backward=frozen)
    except Exception as e:
        raise AssertionError(f"{case}: {e}") from e
    assert timeline.num_ranks == max(ranks) + 1, case
    again = schedule.actions(ranks, num_microbatches)
    assert again == actions, f"{case}: not the same order twice\n{format_grid(timeline.spans, timeline.num_ranks)}"
