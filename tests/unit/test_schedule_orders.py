"""The built-in schedules against their drawn grids."""

from __future__ import annotations

import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecomp.errors import ConfigError
from pipecomp.schedules import UNIT_COSTS, Costs, Schedule, format_grid, peak_in_flight, simulate, validate
from pipecomp.schedules.gpipe import GPipe
from pipecomp.schedules.one_f_one_b import OneFOneB


def drawn(schedule: Schedule, ranks: list[int], num_microbatches: int, costs: Costs = UNIT_COSTS) -> str:
    timeline = simulate(schedule.actions(ranks, num_microbatches), costs)
    return format_grid(timeline.spans, timeline.num_ranks)


def picture(text: str) -> str:
    return textwrap.dedent(text).strip()


def test_gpipe_runs_all_forwards_then_all_backwards_in_microbatch_order() -> None:
    assert drawn(GPipe(), [0, 1, 2], 4) == picture("""
        rank 0  0F0 0F1 0F2 0F3 .   .   .   .   0B0 0B1 0B2 0B3
        rank 1  .   1F0 1F1 1F2 1F3 .   .   1B0 1B1 1B2 1B3
        rank 2  .   .   2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3
    """)


def test_gpipe_with_the_head_beside_the_embedding_fills_the_first_rank() -> None:
    assert drawn(GPipe(), [0, 1, 0], 3) == picture("""
        rank 0  0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2
        rank 1  .   1F0 1F1 1F2 .   .   .   1B0 1B1 1B2
    """)


def test_1f1b_with_as_many_in_flight_as_stages_is_the_textbook_order() -> None:
    assert drawn(OneFOneB(num_in_flight=3), [0, 1, 2], 5) == picture("""
        rank 0  0F0 0F1 0F2 .   .   0B0 0F3 0B1 0F4 0B2 .   0B3 .   0B4
        rank 1  .   1F0 1F1 .   1B0 1F2 1B1 1F3 1B2 1F4 1B3 .   1B4
        rank 2  .   .   2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4
    """)


def test_1f1b_with_one_in_flight_runs_one_microbatch_after_the_other() -> None:
    assert drawn(OneFOneB(num_in_flight=1), [0, 1], 2) == picture("""
        rank 0  0F0 .   .   0B0 0F1 .   .   0B1
        rank 1  .   1F0 1B0 .   .   1F1 1B1
    """)


def test_1f1b_by_default_sends_more_forwards_ahead_than_there_are_stages() -> None:
    assert drawn(OneFOneB(), [0, 1], 6) == picture("""
        rank 0  0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0B3 .   0B4 .   0B5
        rank 1  .   1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1F4 1B4 1F5 1B5
    """)


def test_1f1b_with_fewer_microbatches_than_stages_runs_them_all() -> None:
    assert drawn(OneFOneB(), [0, 1, 2], 2) == picture("""
        rank 0  0F0 0F1 .   .   .   0B0 .   0B1
        rank 1  .   1F0 1F1 .   1B0 .   1B1
        rank 2  .   .   2F0 2B0 2F1 2B1
    """)


def test_1f1b_on_one_stage_is_plain_accumulation() -> None:
    assert drawn(OneFOneB(), [0], 3) == "rank 0  0F0 0B0 0F1 0B1 0F2 0B2"


def test_1f1b_with_the_head_beside_the_embedding_keeps_one_head_microbatch_in_flight() -> None:
    assert drawn(OneFOneB(num_in_flight=3), [0, 1, 0], 4) == picture("""
        rank 0  0F0 0F1 2F0 2B0 2F1 2B1 0F2 0B0 2F2 2B2 0F3 0B1 2F3 2B3 0B2 0B3
        rank 1  .   1F0 1F1 .   1B0 .   .   1F2 1B1 .   .   1F3 1B2 .   1B3
    """)


@pytest.mark.parametrize(
    ("num_in_flight", "depths"),
    [(1, [1, 1, 1, 1]), (4, [4, 3, 2, 1]), (5, [5, 4, 3, 1]), (10, [10, 7, 4, 1])],
)
def test_1f1b_depths_fall_evenly_to_one_at_the_last_stage(num_in_flight: int, depths: list[int]) -> None:
    actions = OneFOneB(num_in_flight).actions([0, 1, 2, 3], 16)
    assert list(peak_in_flight(actions).values()) == depths


def test_the_default_depth_is_three_for_each_stage_after_and_one() -> None:
    assert OneFOneB().actions([0, 1, 2, 3], 16) == OneFOneB(10).actions([0, 1, 2, 3], 16)


@given(
    num_stages=st.integers(2, 5),
    num_microbatches=st.integers(1, 24),
    link=st.sampled_from([0.5, 1.0, 3.0, 3.5, 9.0]),
)
def test_by_default_no_stage_waits_for_a_round_trip_whatever_the_links_rate(
    num_stages: int, num_microbatches: int, link: float
) -> None:
    # A step is the time to fill and drain the pipeline, and then one microbatch for each T of the busiest rank or link. Links
    # slower than T make a stage in the middle wait for its last warm-up forwards once, before its first backward.
    ranks = list(range(num_stages))
    step = simulate(OneFOneB().actions(ranks, num_microbatches), Costs(forward=1, backward=2, link=link)).end
    fill_and_drain = (num_stages - 1) * (3 + 2 * link) + 3
    warm_up = max(0, num_stages - 2) * max(0, link - 3)
    assert step <= fill_and_drain + (num_microbatches - 1) * max(3, link) + warm_up


def test_the_textbook_depth_waits_for_round_trips_on_slow_links() -> None:
    costs = Costs(forward=1, backward=2, link=3)
    default = simulate(OneFOneB().actions([0, 1, 2], 12), costs).end
    textbook = simulate(OneFOneB(3).actions([0, 1, 2], 12), costs).end
    assert (default, textbook) == (54, 96)


@given(num_in_flight=st.integers(1, 9), num_stages=st.integers(1, 5), num_microbatches=st.integers(1, 9))
def test_1f1b_never_holds_more_than_num_in_flight(num_in_flight: int, num_stages: int, num_microbatches: int) -> None:
    ranks = list(range(num_stages))
    actions = OneFOneB(num_in_flight).actions(ranks, num_microbatches)
    validate(actions, ranks, num_microbatches, num_in_flight=num_in_flight)


@pytest.mark.parametrize("options", [{}, {"num_in_flight": None}, {"num_in_flight": "auto"}])
def test_1f1b_without_a_number_takes_its_default(options: dict[str, object]) -> None:
    assert OneFOneB.from_options(options).num_in_flight is None


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "deep"])
def test_1f1b_refuses_what_is_no_number_of_microbatches(value: object) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.num_in_flight = .*at least 1"):
        OneFOneB.from_options({"num_in_flight": value})


def test_gpipe_refuses_a_number_in_flight() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.num_in_flight = 4: schedule 'gpipe' takes no options"):
        GPipe.from_options({"num_in_flight": 4})


def test_gpipe_takes_an_option_that_was_left_out() -> None:
    assert isinstance(GPipe.from_options({"num_in_flight": None}), GPipe)
