"""Steps on paper against what can be computed by hand."""

from __future__ import annotations

import itertools
import math
import textwrap

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecomp.errors import LocalProtocolError
from pipecomp.planning import (
    BoundKind,
    Host,
    LinkCost,
    Path,
    Processor,
    Setting,
    StageCost,
    Step,
    compare,
    even_setting,
    ideal,
    shipped_schedules,
    simulate_step,
)
from pipecomp.schedules import Costs, Schedule, format_grid, simulate, without_backward
from pipecomp.schedules.gpipe import GPipe
from pipecomp.schedules.one_f_one_b import OneFOneB
from pipecomp.types import Rank

STAGE = StageCost(forward_s=1.0, backward_s=2.0)
NOTHING = LinkCost(0.0, 0.0)


def on_paper(schedule: Schedule, setting: Setting, num_microbatches: int) -> Step:
    return simulate_step(schedule.actions(setting.ranks, num_microbatches), setting)


def with_paths(setting: Setting, path: Path) -> Setting:
    """Each pair of ranks with a way of its own, so that nothing is shared."""
    ranks = [Rank(rank) for rank in range(len(setting.hosts))]
    return msgspec.structs.replace(setting, paths=dict.fromkeys(itertools.permutations(ranks, 2), path))


# --------------------------------------------------------------------------------------------------------- closed forms


@pytest.mark.parametrize("num_microbatches", [1, 2, 5, 16])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("schedule", [GPipe(), OneFOneB(), OneFOneB(4)])
def test_without_links_a_step_is_the_microbatches_and_a_fill(schedule: Schedule, num_stages: int, num_microbatches: int) -> None:
    step = on_paper(schedule, even_setting(num_stages, STAGE, NOTHING), num_microbatches)
    assert step.duration_s == pytest.approx((num_microbatches + num_stages - 1) * 3)


def test_slow_links_make_gpipe_as_long_as_the_messages_of_both_ways() -> None:
    # Forward, one after the other at 4 s each, then backward at 5 s each; compute shows at the ends only.
    setting = even_setting(2, STAGE, LinkCost(40.0, 50.0), Host(10.0, 10.0))
    step = on_paper(GPipe(), setting, 6)
    assert step.duration_s == pytest.approx((1 + 6 * 4 + 1) + (2 + 6 * 5 + 2))


def test_what_a_middle_stage_sends_both_ways_shares_its_uplink() -> None:
    # From 9 on, the forward of microbatch 1 (1 s of it left) and the backward of microbatch 0 (1 s) have half the rate each.
    #
    #   1F0, 1F1    2 ████ 6 ████ 9 ░░ 11                     2F0 6-8, 1B0 8-9
    #   1B0                       9 ░░ 11                     2F1 11-13, 1B1 13-14, sent 14-15, 0B1 15-16
    setting = Setting(
        stages=(StageCost(1.0, 1.0),) * 3,
        ranks=(Rank(0), Rank(1), Rank(2)),
        links=(LinkCost(0.0, 1.0), LinkCost(4.0, 0.0)),
        hosts=(Host(), Host(uplink_nbytes_per_s=1.0), Host()),
    )
    step = on_paper(OneFOneB(3), setting, 2)
    sent = {str(each.action): (each.start, each.end) for each in step.transfers if each.sender == 1}
    assert sent == {"1F0": (2, 6), "1F1": (6, 11), "1B0": (9, 11), "1B1": (14, 15)}
    assert step.duration_s == 16


def test_what_a_stage_receives_from_both_sides_shares_its_downlink() -> None:
    setting = Setting(
        stages=(StageCost(1.0, 1.0),) * 3,
        ranks=(Rank(0), Rank(1), Rank(2)),
        links=(LinkCost(4.0, 0.0), LinkCost(0.0, 4.0)),
        hosts=(Host(), Host(downlink_nbytes_per_s=1.0), Host()),
    )
    step = on_paper(OneFOneB(3), setting, 2)
    # The second forward of rank 0 (5-9 if alone) and the first backward of rank 2 (from 8 on) come in at once.
    assert {str(each.action): (each.start, each.end) for each in step.transfers if each.receiver == 1} == {
        "0F0": (1, 5),
        "0F1": (5, 10),
        "2B0": (8, 13),
        "2B1": (13, 17),
    }


@pytest.mark.parametrize(("schedule", "expected"), [(GPipe(), (8 + 2) * 3 + 4 * 0.5), (OneFOneB(1), 8 * (3 * 3 + 4 * 0.5))])
def test_latency_is_paid_once_each_way_or_with_every_microbatch_that_has_to_wait(schedule: Schedule, expected: float) -> None:
    step = on_paper(schedule, even_setting(3, STAGE, NOTHING, Host(latency_s=0.5)), 8)
    assert step.duration_s == pytest.approx(expected)


def test_the_latency_of_a_path_comes_on_top_of_the_senders_own() -> None:
    setting = with_paths(even_setting(2, STAGE, NOTHING, Host(latency_s=0.5)), Path(latency_s=0.25))
    assert on_paper(GPipe(), setting, 1).duration_s == pytest.approx(2 * 3 + 2 * 0.75)


def test_a_message_does_not_wait_for_the_one_before_to_arrive() -> None:
    setting = even_setting(2, StageCost(0.0, 0.0), LinkCost(1.0, 0.0), Host(uplink_nbytes_per_s=1.0, latency_s=10.0))
    arrivals = [each.arrival for each in on_paper(GPipe(), setting, 3).transfers if each.sender == 0]
    assert arrivals == [11, 12, 13]


def test_coding_adds_to_the_latency() -> None:
    setting = even_setting(2, STAGE, LinkCost(0.0, 0.0, forward_coding_s=0.5, backward_coding_s=0.25))
    assert on_paper(GPipe(), setting, 4).duration_s == pytest.approx(5 * 3 + 0.75)


def test_ranks_on_one_processor_slow_each_other_down_when_they_compute_at_once() -> None:
    # 0F0 alone, then 0F1 beside 1F0 at half speed; backwards likewise.
    setting = even_setting(2, StageCost(1.0, 2.0), NOTHING)
    setting = msgspec.structs.replace(setting, processors=(Processor((Rank(0), Rank(1)), 1.0),))
    step = on_paper(GPipe(), setting, 2)
    assert {str(span.action): (span.start, span.end) for span in step.timeline.spans} == {
        "0F0": (0, 1),
        "0F1": (1, 3),
        "1F0": (1, 3),
        "1F1": (3, 4),
        "1B0": (4, 6),
        "0B0": (6, 10),
        "1B1": (6, 10),
        "0B1": (10, 12),
    }
    assert str(step.bound) == "processor of ranks 0, 1"
    assert step.bound.busy_s == step.duration_s == 12


def test_a_processor_that_runs_all_its_ranks_at_once_slows_none_down() -> None:
    setting = even_setting(3, STAGE, LinkCost(40.0, 50.0), Host(10.0, 10.0))
    shared = msgspec.structs.replace(setting, processors=(Processor((Rank(0), Rank(1), Rank(2)), 3.0),))
    apart, together = (on_paper(OneFOneB(), each, 6).duration_s for each in (setting, shared))
    assert together == pytest.approx(apart)


def test_two_stages_of_one_rank_send_each_other_nothing() -> None:
    setting = Setting((STAGE,) * 2, (Rank(0), Rank(0)), (LinkCost(1e9, 1e9),), (Host(1.0, 1.0, 1.0),))
    step = on_paper(GPipe(), setting, 4)
    assert step.transfers == ()
    assert step.duration_s == 4 * 2 * 3


def test_gradients_that_a_frozen_first_stage_does_not_take_are_not_sent() -> None:
    setting = even_setting(3, STAGE, LinkCost(1.0, 1.0), Host(1.0, 1.0))
    step = simulate_step(without_backward(GPipe().actions(setting.ranks, 2), [0]), setting)
    assert {(each.sender, each.receiver) for each in step.transfers} == {(0, 1), (1, 2), (2, 1)}


def test_a_step_can_be_drawn() -> None:
    setting = even_setting(2, StageCost(1.0, 2.0), LinkCost(1.0, 1.0), Host(1.0, 1.0))
    timeline = on_paper(OneFOneB(2), setting, 3).timeline
    expected = """
        rank 0  0F0 0F1 .   .   .   .   0B0 --  0F2 0B1 --  .   .   .   0B2 --
        rank 1  .   .   1F0 1B0 --  1F1 1B1 --  .   .   1F2 1B2 --
    """
    assert format_grid(timeline.spans, 2) == textwrap.dedent(expected).strip()


def test_an_order_that_cannot_run_names_who_waits_for_what() -> None:
    setting = even_setting(2, STAGE, NOTHING)
    first, second = GPipe().actions(setting.ranks, 1)
    with pytest.raises(LocalProtocolError, match="rank 0 waits before 0B0 for 1B0; rank 1 waits before 1B0 for 1F0"):
        simulate_step([first[::-1], second[::-1]], setting)


# ----------------------------------------------------------------------------------------------------------- what rules


def rules(setting: Setting, num_microbatches: int = 16, schedule: Schedule = OneFOneB()) -> str:  # noqa: B008
    return str(on_paper(schedule, setting, num_microbatches).bound)


def test_the_busiest_rank_rules_where_links_are_fast() -> None:
    setting = msgspec.structs.replace(
        even_setting(3, STAGE, LinkCost(1.0, 1.0), Host(100.0, 100.0)), stages=(STAGE, StageCost(2.0, 3.0), STAGE)
    )
    assert rules(setting) == "compute of rank 1"


def test_the_busiest_link_rules_where_it_is_busier_than_any_rank() -> None:
    setting = even_setting(2, STAGE, LinkCost(40.0, 50.0), Host(10.0, 10.0))
    assert rules(setting) == "backward link from rank 1 to rank 0"
    assert rules(even_setting(2, STAGE, LinkCost(60.0, 50.0), Host(10.0, 10.0))) == "forward link from rank 0 to rank 1"


def test_an_uplink_that_two_flows_share_rules_by_its_own_name() -> None:
    setting = even_setting(3, STAGE, LinkCost(40.0, 50.0), Host(uplink_nbytes_per_s=10.0))
    assert rules(setting) == "uplink of rank 1"
    assert rules(even_setting(3, STAGE, LinkCost(40.0, 50.0), Host(downlink_nbytes_per_s=10.0))) == "downlink of rank 1"


def test_a_slow_path_rules_as_the_link_that_it_carries() -> None:
    slow = {(Rank(1), Rank(2)): Path(10.0)}
    setting = msgspec.structs.replace(even_setting(3, STAGE, LinkCost(40.0, 50.0)), paths=slow)
    assert rules(setting) == "forward link from rank 1 to rank 2"


def test_waiting_rules_where_nothing_is_busy_for_half_of_the_step() -> None:
    setting = even_setting(4, STAGE, NOTHING)
    step = on_paper(OneFOneB(), setting, 2)  # (2 + 3) x 3 s, of which a rank computes 2 x 3 s
    assert step.bound.kind is BoundKind.FILL_AND_DRAIN
    assert step.bound.busy_s == step.waiting_s == pytest.approx(9)
    assert rules(setting, 3) == "compute of rank 0"  # (3 + 3) x 3 s, of which 3 x 3 s
    assert rules(even_setting(2, STAGE, NOTHING, Host(latency_s=50.0))) == "fill and drain"


# ------------------------------------------------------------------------------------------- what holds in every setting

seconds = st.floats(0.01, 10.0)
sizes = st.floats(0.0, 100.0)
rates = st.one_of(st.floats(1.0, 100.0), st.just(math.inf))
SCHEDULES: list[Schedule] = [GPipe(), OneFOneB(), OneFOneB(1), OneFOneB(3)]


@st.composite
def any_setting(draw: st.DrawFn) -> Setting:
    ranks = draw(st.sampled_from([[0], [0, 1], [0, 1, 2], [0, 1, 0], [0, 1, 2, 3], [0, 1, 2, 0]]))
    return Setting(
        stages=tuple(StageCost(draw(seconds), draw(seconds)) for _ in ranks),
        ranks=tuple(map(Rank, ranks)),
        links=tuple(LinkCost(draw(sizes), draw(sizes)) for _ in ranks[1:]),
        hosts=tuple(Host(draw(rates), draw(rates), draw(seconds)) for _ in set(ranks)),
    )


@given(setting=any_setting(), schedule=st.sampled_from(SCHEDULES), num_microbatches=st.integers(1, 6))
def test_every_byte_is_sent_once_and_nothing_sends_more_than_its_rate(
    setting: Setting, schedule: Schedule, num_microbatches: int
) -> None:
    step = on_paper(schedule, setting, num_microbatches)
    crossing = [i for i in range(len(setting.links)) if setting.ranks[i] != setting.ranks[i + 1]]
    wanted = num_microbatches * sum(setting.links[i].forward_nbytes + setting.links[i].backward_nbytes for i in crossing)
    assert sum(each.nbytes for each in step.transfers) == pytest.approx(wanted)
    for rank, host in enumerate(setting.hosts):
        for rate, sent in (
            (host.uplink_nbytes_per_s, [each for each in step.transfers if each.sender == rank]),
            (host.downlink_nbytes_per_s, [each for each in step.transfers if each.receiver == rank]),
        ):
            for first, last in itertools.product(sent, sent):
                within = [each.nbytes for each in sent if first.start <= each.start and each.end <= last.end]
                if within and rate < math.inf:
                    assert sum(within) <= rate * (last.end - first.start) * (1 + 1e-6) + 1e-9


@given(setting=any_setting(), schedule=st.sampled_from(SCHEDULES), num_microbatches=st.integers(1, 6))
def test_no_step_is_shorter_than_what_keeps_its_busiest_part_busy(
    setting: Setting, schedule: Schedule, num_microbatches: int
) -> None:
    step = on_paper(schedule, setting, num_microbatches)
    assert step.duration_s >= step.loads[0].busy_s * (1 - 1e-9)


@given(setting=any_setting(), schedule=st.sampled_from(SCHEDULES), factor=st.floats(0.1, 10.0))
def test_a_step_of_things_that_all_take_longer_takes_longer_by_as_much(
    setting: Setting, schedule: Schedule, factor: float
) -> None:
    slower = Setting(
        stages=tuple(StageCost(each.forward_s * factor, each.backward_s * factor) for each in setting.stages),
        ranks=setting.ranks,
        links=setting.links,
        hosts=tuple(
            Host(each.uplink_nbytes_per_s / factor, each.downlink_nbytes_per_s / factor, each.latency_s * factor)
            for each in setting.hosts
        ),
    )
    once, again = (on_paper(schedule, each, 5).duration_s for each in (setting, slower))
    assert again == pytest.approx(once * factor)


@given(
    num_stages=st.integers(1, 4),
    schedule=st.sampled_from(SCHEDULES),
    costs=st.builds(Costs, seconds, seconds, seconds, seconds),
    num_microbatches=st.integers(1, 8),
)
def test_where_nothing_is_shared_and_all_cost_the_same_it_is_what_simulate_says(
    num_stages: int, schedule: Schedule, costs: Costs, num_microbatches: int
) -> None:
    setting = even_setting(num_stages, StageCost(costs.forward, costs.backward), LinkCost(costs.link, costs.link))
    setting = with_paths(setting, Path(1.0, costs.latency))
    expected = simulate(schedule.actions(setting.ranks, num_microbatches), costs).end
    assert on_paper(schedule, setting, num_microbatches).duration_s == pytest.approx(expected)


@given(
    link=st.builds(LinkCost, sizes, sizes),
    schedule=st.sampled_from(SCHEDULES),
    slow=st.floats(1.0, 100.0),
    factor=st.floats(1.0, 10.0),
)
def test_where_nothing_is_shared_a_faster_rate_makes_no_step_longer(
    link: LinkCost, schedule: Schedule, slow: float, factor: float
) -> None:
    setting = even_setting(3, STAGE, link)
    slower, faster = (on_paper(schedule, with_paths(setting, Path(rate)), 5) for rate in (slow, slow * factor))
    assert faster.duration_s <= slower.duration_s * (1 + 1e-9)


# -------------------------------------------------------------------------------------------------------- the best of all


def test_the_ideal_is_the_shortest_step_and_of_equal_ones_the_one_that_holds_least() -> None:
    best = ideal(even_setting(4, STAGE, NOTHING), 16)
    assert (best.label, best.num_in_flight) == ("1f1b, 4 in flight", 4)


def test_candidates_come_with_the_shortest_step_first() -> None:
    candidates = compare(even_setting(3, STAGE, LinkCost(40.0, 50.0), Host(10.0, 10.0)), 8)
    durations = [each.step.duration_s for each in candidates]
    assert durations == sorted(durations)
    assert {each.label for each in candidates} == set(shipped_schedules(3, 8))


@settings(deadline=None, max_examples=20)
@given(num_stages=st.integers(1, 9), num_microbatches=st.integers(1, 40))
def test_every_shipped_schedule_is_tried_once(num_stages: int, num_microbatches: int) -> None:
    labels = list(shipped_schedules(num_stages, num_microbatches))
    assert {"gpipe", "1f1b", f"1f1b, {num_microbatches} in flight"} <= set(labels)


def gpt2_xl(*, shared: bool) -> Setting:
    """Eight stages of the published setting: samples of 1024 x 1600 values at 3.25 and 6.25 bits, 100 Mbit/s links."""
    goodput, num_values = 95.6e6 / 8, 1024 * 1600
    link = LinkCost(num_values * 3.25 / 8, num_values * 6.25 / 8)
    setting = even_setting(8, StageCost(0.051, 0.154), link, Host(goodput, goodput) if shared else Host())
    return setting if shared else with_paths(setting, Path(goodput))


@pytest.mark.parametrize("shared", [True, False])
def test_the_published_setting_is_bound_by_compute_and_pays_its_links_once(shared: bool) -> None:
    # 39 forwards and backwards, and one message each way over seven links that nothing else uses at that time.
    best = ideal(gpt2_xl(shared=shared), 32)
    once_each_way = 7 * 1024 * 1600 * (3.25 + 6.25) / 95.6e6
    assert best.step.duration_s == pytest.approx(39 * 0.205 + once_each_way)
    assert 32 / best.step.duration_s == pytest.approx(3.50, abs=0.005)
    assert str(best.step.bound) == "compute of rank 0"


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    "change",
    [
        {"ranks": (Rank(0),)},
        {"ranks": (Rank(0), Rank(2))},
        {"links": ()},
        {"hosts": (Host(),)},
        {"stages": (STAGE, StageCost(-1.0, 1.0))},
        {"stages": (STAGE, StageCost(math.inf, 1.0))},
        {"links": (LinkCost(math.nan, 1.0),)},
        {"hosts": (Host(), Host(uplink_nbytes_per_s=0.0))},
        {"paths": {(Rank(0), Rank(1)): Path(nbytes_per_s=-1.0)}},
        {"paths": {(Rank(0), Rank(1)): Path(latency_s=-1.0)}},
        {"links": (LinkCost(1.0, 1.0, backward_coding_s=-1.0),)},
        {"processors": (Processor((Rank(0),), 0.0),)},
        {"processors": (Processor((Rank(0), Rank(1)), 1.0), Processor((Rank(1),), 1.0))},
    ],
    ids=str,
)
def test_a_setting_that_does_not_fit_together_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"need|not negative|above zero"):
        msgspec.structs.replace(even_setting(2, STAGE, NOTHING), **change)
