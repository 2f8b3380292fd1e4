"""Gradients of weights that wait, on paper: when they are computed, how many wait, what a step gains."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from pipecomp.planning import Host, LinkCost, Processor, StageCost, Step, even_setting, ideal, simulate_step
from pipecomp.schedules import Schedule
from pipecomp.schedules.gpipe import GPipe
from pipecomp.schedules.one_f_one_b import OneFOneB
from pipecomp.types import Rank

NOTHING = LinkCost(0.0, 0.0)
HALVES = StageCost(forward_s=1.0, backward_s=2.0, weights_s=1.0)


def spans_of(step: Step) -> dict[str, tuple[float, float]]:
    return {str(span.action): (span.start, span.end) for span in step.timeline.spans}


@pytest.mark.parametrize("num_deferred", [1, 2, 7])
def test_gradients_of_weights_wait_until_nothing_else_can_be_done(num_deferred: int) -> None:
    setting = even_setting(2, HALVES, NOTHING)
    actions = GPipe().actions(setting.ranks, 2)
    assert simulate_step(actions, setting).duration_s == 9
    step = simulate_step(actions, setting, num_deferred=num_deferred)
    assert spans_of(step) == {
        "0F0": (0, 1), "0F1": (1, 2), "0B0": (4, 5), "0B1": (5, 6), "0W0": (6, 7), "0W1": (7, 8),
        "1F0": (1, 2), "1F1": (2, 3), "1B0": (3, 4), "1B1": (4, 5), "1W0": (5, 6), "1W1": (6, 7),
    }  # fmt: skip
    assert step.loads[0].busy_s == 6  # the same work as before


def test_no_more_of_them_wait_than_may() -> None:
    # 1B0 3-4, 1B1 4-5: now two wait, and the older one is computed before 1B2.
    setting = even_setting(2, HALVES, NOTHING)
    spans = spans_of(simulate_step(GPipe().actions(setting.ranks, 3), setting, num_deferred=1))
    assert [spans[name] for name in ("1B0", "1B1", "1W0", "1B2", "1W1", "1W2")] == [
        (4, 5), (5, 6), (6, 7), (7, 8), (8, 9), (9, 10),
    ]  # fmt: skip


def test_a_wait_for_a_link_is_spent_on_them() -> None:
    setting = even_setting(2, HALVES, LinkCost(0.0, 3.0), Host(uplink_nbytes_per_s=1.0))
    spans = spans_of(simulate_step(GPipe().actions(setting.ranks, 2), setting, num_deferred=4))
    assert spans["0B0"] == (7, 8)  # 1B0 ends at 4 and is sent until 7
    assert spans["0W0"] == (8, 9)  # 1B1 is sent until 10
    assert spans["0B1"] == (10, 11)


@pytest.mark.parametrize("num_deferred", [0, 1, 4, 40])
@pytest.mark.parametrize("schedule", [GPipe(), OneFOneB(), OneFOneB(3)])
def test_each_is_computed_once_after_its_backward_and_few_enough_wait(schedule: Schedule, num_deferred: int) -> None:
    setting = even_setting(3, HALVES, LinkCost(1.0, 2.0), Host(1.0, 1.0, 0.25))
    step = simulate_step(schedule.actions(setting.ranks, 8), setting, num_deferred=num_deferred)
    for rank in range(3):
        own = [span for span in step.timeline.spans if span.rank == rank]
        assert sum(span.end - span.start for span in own) == pytest.approx(8 * 3)
        assert all(one.end <= other.start + 1e-9 for one, other in itertools.pairwise(own))
        kinds = [span.action.kind.value for span in own if span.action.kind.value != "F"]
        microbatches = [span.action.microbatch for span in own if span.action.kind.value == "W"]
        assert microbatches == (list(range(8)) if num_deferred else [])
        waiting = list(itertools.accumulate({"B": 1, "W": -1}[kind] for kind in kinds))
        if num_deferred:
            assert min(waiting) >= 0
            assert max(waiting) <= num_deferred + 1  # one more between its backward and the next action
            assert waiting[-1] == 0


def test_ranks_of_one_processor_share_it_for_them_too() -> None:
    setting = even_setting(2, HALVES, NOTHING)
    setting = msgspec.structs.replace(setting, processors=(Processor((Rank(0), Rank(1)), 1.0),))
    assert simulate_step(GPipe().actions(setting.ranks, 2), setting, num_deferred=2).duration_s == pytest.approx(12)


def test_they_are_a_part_of_a_backward() -> None:
    with pytest.raises(ValueError, match="gradients of weights are a part of a backward pass"):
        even_setting(2, StageCost(1.0, 1.0, 2.0), NOTHING)


def test_waiting_is_compared_where_there_is_something_to_wait_for() -> None:
    link = LinkCost(1024 * 1600 * 3.25 / 8, 1024 * 1600 * 6.25 / 8)
    before, after = (
        ideal(even_setting(8, StageCost(0.051, 0.154, weights_s), link, Host(95.5e6 / 8, 95.5e6 / 8)), 32)
        for weights_s in (0.0, 0.051)
    )
    assert (before.label, before.num_deferred) == ("1f1b", 0)
    assert before.step.duration_s == pytest.approx(9.136, abs=0.001)
    assert (after.label, after.num_deferred) == ("1f1b, 28 in flight, 8 deferred", 8)
    assert after.step.duration_s == pytest.approx(8.386, abs=0.001)
