from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecomp.data.batching import epoch_order, eval_batches, num_batches, plan_batches, scramble, split_batch
from pipecomp.errors import ConfigError

sizes = st.tuples(st.integers(0, 60), st.integers(1, 17), st.integers(1, 9))


@given(st.integers(0, 2**64 - 1), st.integers(0, 1000), st.integers(0, 300))
def test_an_epochs_order_is_a_permutation(seed: int, epoch: int, num_samples: int) -> None:
    assert sorted(epoch_order(seed, epoch, num_samples).tolist()) == list(range(num_samples))


def test_an_epochs_order_is_a_function_of_seed_and_epoch() -> None:
    state = np.random.get_state()  # noqa: NPY002 - shows that the shared generator is not touched
    first = epoch_order(7, 3, 100).tolist()
    assert epoch_order(7, 3, 100).tolist() == first
    assert np.random.get_state()[1].tolist() == state[1].tolist()  # noqa: NPY002
    assert epoch_order(7, 4, 100).tolist() != first
    assert epoch_order(8, 3, 100).tolist() != first


def test_the_order_of_a_seed_stays_what_it_was_in_earlier_versions() -> None:
    assert epoch_order(0, 0, 8).tolist() == [0, 7, 2, 5, 4, 6, 3, 1]


def test_orders_of_near_seeds_and_epochs_have_nothing_in_common() -> None:
    orders = [epoch_order(seed, epoch, 500) for seed in range(4) for epoch in range(4)]
    # Two random permutations agree in one place on average.
    agreements = [int((a == b).sum()) for a, b in itertools.combinations(orders, 2)]
    assert max(agreements) <= 8


def test_scrambling_is_one_to_one() -> None:
    values = np.arange(10_000, dtype=np.uint64)
    assert len(np.unique(scramble(values, 1, 2))) == len(values)


@given(sizes)
def test_every_sample_is_in_exactly_one_batch(drawn: tuple[int, int, int]) -> None:
    num_samples, batch_size, num_microbatches = drawn
    batches = list(
        plan_batches(range(num_samples), batch_size=batch_size, num_microbatches=num_microbatches, seed=1, epoch=2)
    )
    flat = [index for batch in batches for microbatch in batch for index in microbatch]
    assert sorted(flat) == list(range(num_samples))
    assert len(batches) == num_batches(num_samples, batch_size)


@given(sizes)
def test_no_microbatch_is_empty_and_sizes_differ_by_one_at_most(drawn: tuple[int, int, int]) -> None:
    num_samples, batch_size, num_microbatches = drawn
    for batch in eval_batches(range(num_samples), batch_size=batch_size, num_microbatches=num_microbatches):
        lengths = [len(microbatch) for microbatch in batch]
        assert len(lengths) == min(num_microbatches, sum(lengths))
        assert min(lengths) >= 1
        assert max(lengths) - min(lengths) <= 1


def test_a_prime_number_of_samples_ends_with_a_smaller_batch() -> None:
    batches = list(eval_batches(range(13), batch_size=5, num_microbatches=4))
    assert batches == [
        [[0], [1], [2], [3, 4]],
        [[5], [6], [7], [8, 9]],
        [[10], [11], [12]],
    ]


def test_a_last_batch_of_one_sample_is_one_microbatch() -> None:
    assert split_batch([7], 4) == [[7]]


def test_a_batch_is_found_again_from_its_index_alone() -> None:
    def plan(first_batch: int) -> list[list[list[int]]]:
        return list(
            plan_batches(range(23), batch_size=4, num_microbatches=3, seed=5, epoch=1, first_batch=first_batch)
        )

    whole = plan(0)
    assert len(whole) == 6
    for index in range(7):
        assert plan(index) == whole[index:]


def test_training_batches_follow_the_order_of_the_epoch() -> None:
    batches = plan_batches(range(11), batch_size=3, num_microbatches=2, seed=9, epoch=4)
    flat = [index for batch in batches for microbatch in batch for index in microbatch]
    assert flat == epoch_order(9, 4, 11).tolist()


@pytest.mark.parametrize("sizes", [{"batch_size": 0, "num_microbatches": 1}, {"batch_size": 1, "num_microbatches": 0}])
def test_sizes_below_one_are_refused_by_name(sizes: dict[str, int]) -> None:
    name = next(name for name, value in sizes.items() if value == 0)
    with pytest.raises(ConfigError, match=f"train.{name} is 0"):
        plan_batches(range(3), seed=0, epoch=0, **sizes)
