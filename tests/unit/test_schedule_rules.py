"""The rules, the paper run and the drawing, on small orders written by hand."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence

import pytest

from pipecomp.errors import LocalProtocolError
from pipecomp.schedules import (
    UNIT_COSTS,
    Action,
    ActionKind,
    Costs,
    Schedule,
    format_grid,
    format_orders,
    peak_in_flight,
    simulate,
    validate,
    without_backward,
)
from pipecomp.testing.schedule_checks import check_schedule, rank_layouts


def orders(*rows: str) -> list[list[Action]]:
    """Read what `format_orders` writes, without its row names."""
    return [[read(word) for word in row.split()] for row in rows]


def read(word: str) -> Action:
    stage, kind, microbatch = re.fullmatch(r"(\d+)([FB])(\d+)", word).groups()
    return Action(int(stage), ActionKind(kind), int(microbatch))


def drawn(actions: list[list[Action]], costs: Costs = UNIT_COSTS) -> str:
    timeline = simulate(actions, costs)
    return format_grid(timeline.spans, timeline.num_ranks)


def picture(text: str) -> str:
    return textwrap.dedent(text).strip()


GOOD = orders("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")


def test_an_action_waits_for_its_input_and_for_its_rank() -> None:
    assert drawn(GOOD) == picture("""
        rank 0  0F0 0F1 .   0B0 .   0B1
        rank 1  .   1F0 1B0 1F1 1B1
    """)


def test_a_long_backward_is_drawn_as_dashes() -> None:
    assert drawn(GOOD, Costs(forward=1, backward=2)) == picture("""
        rank 0  0F0 0F1 .   .   0B0 --  .   0B1 --
        rank 1  .   1F0 1B0 --  1F1 1B1 --
    """)


def test_a_link_carries_one_transfer_at_a_time() -> None:
    # The second microbatch leaves rank 0 at 2 but the link is busy with the first until 4, so it arrives at 7.
    spans = {str(span.action): span.start for span in simulate(GOOD, Costs(forward=1, backward=1, link=3)).spans}
    assert (spans["1F0"], spans["1F1"]) == (4, 7)


def test_latency_lets_transfers_overlap() -> None:
    spans = {str(span.action): span.start for span in simulate(orders("0F0 0F1", "1F0 1F1"), Costs(latency=3)).spans}
    assert (spans["1F0"], spans["1F1"]) == (4, 5)


def test_stages_of_one_rank_hand_over_for_nothing() -> None:
    timeline = simulate(orders("0F0 1F0 1B0 0B0"), Costs(link=100, latency=100))
    assert timeline.end == 4


def test_the_two_directions_of_a_link_do_not_disturb_each_other() -> None:
    actions = orders("0F0 0F1 0F2 0B0", "1F0 1B0 1F1 1F2")
    spans = {str(span.action): span.start for span in simulate(actions, Costs(link=2)).spans}
    assert spans["1F2"] == 1 + 2 + 2 + 2  # no later for 1B0 having gone the other way meanwhile
    assert spans["0B0"] == 1 + 2 + 1 + 1 + 2


def test_a_timeline_knows_its_end_and_how_busy_a_rank_was() -> None:
    timeline = simulate(GOOD, Costs(forward=1, backward=2))
    assert (timeline.end, timeline.busy(0), timeline.busy(1)) == (9, 6, 6)


def test_no_actions_take_no_time() -> None:
    assert simulate([[], []]).end == 0


def test_a_deadlock_names_the_blocked_actions_above_the_grid() -> None:
    with pytest.raises(LocalProtocolError) as caught:
        simulate(orders("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))
    assert str(caught.value) == picture("""
        the schedule deadlocks:
        rank 0 waits before 0B0 for 1B0
        rank 1 waits before 1F1 for 0F1
        what could run before that:
        rank 0  0F0
        rank 1  .   1F0
    """)


def test_a_backward_before_its_own_forward_deadlocks() -> None:
    with pytest.raises(LocalProtocolError, match="rank 0 waits before 0B0 for 0F0"):
        simulate(orders("0B0 0F0"))


def test_a_stage_on_two_ranks_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="action 0B0 stands on rank 1, its stage on 0"):
        simulate(orders("0F0", "0B0"))


def test_validate_returns_how_the_order_runs() -> None:
    assert validate(GOOD, [0, 1], 2, num_in_flight=2).end == 6


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        (["0F0 0F1 0B0", "1F0 1B0 1F1 1B1"], "missing actions: 0B1"),
        (["0F0 0F1 0B0 0B1 0B1", "1F0 1B0 1F1 1B1"], "actions that stand more than once: 0B1"),
        (["0F0 0F1 0B0 0B1 0F2", "1F0 1B0 1F1 1B1"], "unknown actions: 0F2"),
        (["0F0 0F1 0B0 0B1 1B1", "1F0 1B0 1F1"], "actions on a rank that does not hold their stage: 1B1"),
        (["0F0 0F1 0B0 0B1 1F0 1B0 1F1 1B1"], "orders for 1 ranks; there are 2"),
        (["0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0"], "backwards out of order: 0B1 before 0B0"),
    ],
)
def test_validate_names_the_broken_rule(rows: list[str], complaint: str) -> None:
    with pytest.raises(LocalProtocolError, match=complaint) as caught:
        validate(orders(*rows), [0, 1], 2)
    assert str(caught.value).endswith(format_orders(orders(*rows)))


def test_validate_refuses_too_many_in_flight() -> None:
    with pytest.raises(LocalProtocolError, match="holds 2 microbatches in flight; at most 1"):
        validate(GOOD, [0, 1], 2, num_in_flight=1)


def test_validate_refuses_a_deadlock() -> None:
    with pytest.raises(LocalProtocolError, match="deadlocks"):
        validate(orders("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"), [0, 1], 2)


def test_a_frozen_first_stage_runs_no_backward() -> None:
    frozen = without_backward(GOOD, {0})
    assert format_orders(frozen) == picture("""
        rank 0  0F0 0F1
        rank 1  1F0 1B0 1F1 1B1
    """)
    validate(frozen, [0, 1], 2, no_backward={0})


def test_a_backward_that_should_have_been_left_out_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="unknown actions: 0B0, 0B1"):
        validate(GOOD, [0, 1], 2, no_backward={0})


def test_a_stage_without_backward_holds_nothing_in_flight() -> None:
    assert peak_in_flight(without_backward(GOOD, {0})) == {0: 0, 1: 1}
    assert peak_in_flight(GOOD) == {0: 2, 1: 1}


def test_a_very_long_grid_shows_its_end() -> None:
    row = format_orders(orders(" ".join(f"0F{m}" for m in range(300))))
    assert row.startswith("rank 0  ...")
    assert row.endswith("0F299")
    assert "0F99 " not in row


def test_the_layouts_of_four_stages_are_these() -> None:
    assert list(rank_layouts(4)) == [(0, 1, 2, 3), (0, 1, 2, 0), (0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 0, 0)]


def test_one_stage_has_one_layout() -> None:
    assert list(rank_layouts(1)) == [(0,)]


class HandWritten(Schedule):
    """Whatever order a test asks for."""

    name = "by-hand"

    def __init__(self, order: Callable[[int], list[list[Action]]]) -> None:
        self._order = order

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> HandWritten:
        raise NotImplementedError

    def actions(self, ranks: Sequence[int], num_microbatches: int) -> list[list[Action]]:
        return self._order(num_microbatches)


def one_stage(num_microbatches: int) -> list[list[Action]]:
    return orders(" ".join(f"0F{m} 0B{m}" for m in range(num_microbatches)))


def test_the_public_suite_passes_a_good_schedule() -> None:
    check_schedule(HandWritten(one_stage), max_stages=1)


def test_the_public_suite_names_the_case_that_fails() -> None:
    with pytest.raises(AssertionError, match=r"by-hand, ranks \[0, 1\], 1 microbatches: .* orders for 1 ranks; there are 2"):
        check_schedule(HandWritten(one_stage), max_stages=2)


def test_the_public_suite_catches_backwards_in_another_order() -> None:
    def descending(num_microbatches: int) -> list[list[Action]]:
        forwards, backwards = ([f"0{kind}{m}" for m in range(num_microbatches)] for kind in "FB")
        return orders(" ".join([*forwards, *reversed(backwards)]))

    with pytest.raises(AssertionError, match="2 microbatches: backwards out of order: 0B1 before 0B0"):
        check_schedule(HandWritten(descending), max_stages=1)


def test_the_public_suite_catches_an_order_that_changes() -> None:
    asked = iter(range(1000))

    def changing(num_microbatches: int) -> list[list[Action]]:
        if num_microbatches == 2 and next(asked) % 2:
            return orders("0F1 0F0 0B0 0B1")
        return one_stage(num_microbatches)

    with pytest.raises(AssertionError, match="2 microbatches: not the same order twice"):
        check_schedule(HandWritten(changing), max_stages=1)
