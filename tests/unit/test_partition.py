"""Splits are exact, complete and by the numbers."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecomp.errors import ConfigError
from pipecomp.partition import StagePlan, partition_by, partition_layers, plan_stages, shards_from_counts
from pipecomp.types import Shard

costs_and_stages = st.lists(st.integers(0, 50), min_size=1, max_size=8).flatmap(
    lambda costs: st.tuples(st.just([float(c) for c in costs]), st.integers(1, len(costs)), st.integers(0, 60))
)


def draw(plan: StagePlan) -> str:
    """`0-2@0 3-5@1`: layers of each stage and its rank."""
    return " ".join(f"{s.first_layer}-{s.end_layer - 1}@{r}" for s, r in zip(plan.shards, plan.ranks, strict=True))


@given(costs_and_stages)
def test_the_largest_stage_is_as_small_as_any_split_allows(case: tuple[list[float], int, int]) -> None:
    costs, num_stages, extra = case
    shards = partition_layers(costs, num_stages, first_extra=extra)

    def largest(cuts: tuple[int, ...]) -> float:
        bounds = (0, *cuts, len(costs))
        return max(sum(costs[a:b]) + (extra if a == 0 else 0) for a, b in itertools.pairwise(bounds))

    assert shards[0].first_layer == 0
    assert shards[-1].end_layer == len(costs)
    assert all(a.end_layer == b.first_layer for a, b in itertools.pairwise(shards))
    every_split = itertools.combinations(range(1, len(costs)), num_stages - 1)
    assert largest(tuple(s.first_layer for s in shards[1:])) == min(map(largest, every_split))


def test_a_prime_number_of_equal_layers_spreads_evenly() -> None:
    assert sorted(len(s) for s in partition_layers([1.0] * 13, 4)) == [3, 3, 3, 4]


def test_fewer_layers_than_stages_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"3 layers cannot be split into 4 stages.*num_stages to 3"):
        partition_layers([1.0] * 3, 4)


def test_counts_by_hand_become_shards() -> None:
    assert shards_from_counts([9, 8, 8, 7], 32) == [Shard(0, 9), Shard(9, 17), Shard(17, 25), Shard(25, 32)]


def test_counts_that_do_not_add_up_are_refused_with_the_sum() -> None:
    with pytest.raises(ConfigError, match=r"adds up to 31 layers, the model has 32"):
        shards_from_counts([9, 8, 8, 6], 32)


def test_an_empty_stage_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one layer"):
        shards_from_counts([4, 0], 4)


def test_an_untied_model_has_one_stage_a_rank() -> None:
    plan = plan_stages([0, 1, 1, 1, 1, 2], 2, tied_values=None, hidden_values_per_step=10)
    assert draw(plan) == "0-3@0 4-5@1"
    assert plan.tied == "none"


def test_one_rank_is_one_stage_and_keeps_a_tied_weight_to_itself() -> None:
    plan = plan_stages([0, 1, 1, 1], 1, tied_values=5, hidden_values_per_step=1, mode="colocate")
    assert draw(plan) == "0-3@0"
    assert plan.tied == "local"


def test_a_colocated_head_counts_against_the_first_rank() -> None:
    plan = plan_stages([0, 1, 1, 1, 1, 2], 2, tied_values=9, hidden_values_per_step=1, mode="colocate")
    assert draw(plan) == "0-1@0 2-4@1 5-5@0"
    assert plan.tied == "local"


def test_exchange_keeps_the_head_on_the_last_rank() -> None:
    plan = plan_stages([0, 1, 1, 1, 1, 2], 2, tied_values=9, hidden_values_per_step=1, mode="exchange")
    assert draw(plan) == "0-3@0 4-5@1"
    assert plan.tied == "exchange"


@pytest.mark.parametrize(("hidden", "tied"), [(99, "local"), (100, "exchange"), (101, "exchange")])
def test_auto_takes_fewer_bytes_a_step(hidden: int, tied: str) -> None:
    assert plan_stages([0, 1, 1, 1], 2, tied_values=100, hidden_values_per_step=hidden).tied == tied


def test_auto_knows_what_compression_does_to_either_choice() -> None:
    plan = plan_stages([0, 1, 1, 1], 2, tied_values=100, hidden_values_per_step=400, hidden_bits=(4, 8))
    assert plan.tied == "local"
    plan = plan_stages([0, 1, 1, 1], 2, tied_values=100, hidden_values_per_step=400, hidden_bits=(4, 8), tied_bits=8)
    assert plan.tied == "exchange"


def test_auto_exchanges_where_there_is_no_layer_to_spare() -> None:
    plan = plan_stages([0, 1, 1], 3, tied_values=1000, hidden_values_per_step=1)
    assert draw(plan) == "0-0@0 1-1@1 2-2@2"
    assert plan.tied == "exchange"


def test_colocation_without_a_layer_to_spare_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"3 layers cannot be split over 3 workers.*exchange"):
        plan_stages([0, 1, 1], 3, tied_values=1000, hidden_values_per_step=1, mode="colocate")


def test_counts_by_hand_include_a_colocated_head_in_the_first() -> None:
    plan = plan_stages([1] * 8, 3, tied_values=9, hidden_values_per_step=1, mode="colocate", layers=[3, 3, 2])
    assert draw(plan) == "0-1@0 2-4@1 5-6@2 7-7@0"


def test_counts_by_hand_that_leave_no_room_for_a_colocated_head_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        plan_stages([1] * 8, 2, tied_values=9, hidden_values_per_step=1, mode="colocate", layers=[1, 7])


def test_counts_for_another_number_of_workers_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 numbers for 3 workers"):
        plan_stages([1] * 8, 3, tied_values=None, hidden_values_per_step=1, layers=[4, 4])


# -------------------------------------------------------------------------------------------------------- unequal stages


def test_a_stage_twice_as_fast_gets_twice_the_layers() -> None:
    speeds = [1.0, 2.0, 1.0]
    shards = partition_by(8, 3, lambda stage, start, end: (end - start) / speeds[stage])
    assert [len(shard) for shard in shards] == [2, 4, 2]


def test_a_stage_gets_no_more_than_fits_it() -> None:
    limits = [4, 1, 4]
    shards = partition_by(8, 3, lambda stage, start, end: end - start if end - start <= limits[stage] else math.inf)
    assert sorted(len(shard) for shard in shards) == [1, 3, 4]
    assert len(shards[1]) == 1


def test_layers_that_fit_nowhere_are_refused() -> None:
    with pytest.raises(ConfigError, match="no split of 8 layers over 2 stages fits"):
        partition_by(8, 2, lambda _stage, start, end: end - start if end - start <= 3 else math.inf)
