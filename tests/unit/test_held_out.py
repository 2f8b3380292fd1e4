from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecomp.data.samples import Counts, Dataset, Tokenized, assemble
from pipecomp.data.splitting import default_num_held, hold_out
from pipecomp.errors import ConfigError


def numbered(*numbers: int) -> Dataset:
    sequences = [Tokenized(np.array([n, n], dtype=np.int32), np.ones(2, dtype=np.bool_)) for n in numbers]
    return assemble(sequences, "settings", Counts())


def numbers(dataset: Dataset) -> list[int]:
    return [int(sample.input_ids[0]) for sample in dataset]


@given(st.integers(2, 60), st.integers(0, 5), st.data())
def test_every_sample_is_on_one_side(num_samples: int, seed: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, num_samples - 1))
    train, held = hold_out(numbered(*range(num_samples)), size, seed)
    assert len(held) == size
    assert sorted(numbers(train) + numbers(held)) == list(range(num_samples))


def test_both_sides_keep_the_order_of_the_file() -> None:
    train, held = hold_out(numbered(*range(50)), 20, 0)
    assert numbers(train) == sorted(numbers(train))
    assert numbers(held) == sorted(numbers(held))


def test_which_samples_are_held_depends_on_the_seed_and_not_on_their_order() -> None:
    _, held = hold_out(numbered(*range(50)), 20, 0)
    _, reversed_held = hold_out(numbered(*reversed(range(50))), 20, 0)
    _, other_held = hold_out(numbered(*range(50)), 20, 1)
    assert sorted(numbers(held)) == sorted(numbers(reversed_held))
    assert sorted(numbers(held)) != sorted(numbers(other_held))


def test_a_fraction_is_rounded_to_whole_samples_and_at_least_one() -> None:
    assert len(hold_out(numbered(*range(40)), 0.25, 0)[1]) == 10
    assert len(hold_out(numbered(*range(5)), 0.01, 0)[1]) == 1


@pytest.mark.parametrize("size", [0, 3, 4, 1.0])
def test_a_split_that_leaves_one_side_empty_is_refused(size: float) -> None:
    with pytest.raises(ConfigError, match=rf"cannot hold out {size} of 3 samples; data\.max_eval_samples"):
        hold_out(numbered(1, 2, 3), size, 0)


def test_a_twentieth_is_held_out_by_default_between_1_and_256() -> None:
    assert [default_num_held(n) for n in (2, 100, 1_000_000)] == [1, 5, 256]
