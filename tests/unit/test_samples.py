from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecomp.data.samples import IGNORED_LABEL, Counts, Dataset, Tokenized, assemble, number_occurrences


def sequence(*ids: int, trained: str = "") -> Tokenized:
    """`trained` is drawn, one character a token: `.` ignored, anything else trained."""
    marks = [mark != "." for mark in trained] if trained else [True] * len(ids)
    return Tokenized(np.array(ids, dtype=np.int32), np.array(marks, dtype=np.bool_))


def dataset(*sequences: Tokenized, settings: str = "settings") -> Dataset:
    return assemble(sequences, settings, Counts(records=len(sequences)))


sequences = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(lambda ids: sequence(*ids)), max_size=40)


def test_a_sample_holds_its_tokens_and_its_labels() -> None:
    sample = dataset(sequence(5, 6, 7, 8, trained="..xx"))[0]
    assert sample.input_ids.tolist() == [5, 6, 7, 8]
    assert sample.labels.tolist() == [IGNORED_LABEL, IGNORED_LABEL, 7, 8]
    assert sample.input_ids.dtype == sample.labels.dtype == np.int32


def test_the_first_token_is_never_a_target() -> None:
    made = dataset(sequence(5, 6, 7), sequence(5), sequence(5, 6, trained=".x"))
    assert [sample.num_targets for sample in made] == [2, 0, 1]
    assert made.num_targets == 3
    assert made.counts.without_targets == 1


def test_ids_are_unsigned_64_bit_numbers() -> None:
    ids = [sample.id for sample in dataset(*(sequence(i) for i in range(200)))]
    assert all(0 <= number < 2**64 for number in ids)
    assert max(ids) >= 2**63


@given(sequences)
def test_ids_are_unique_in_a_data_set(drawn: list[Tokenized]) -> None:
    ids = [sample.id for sample in dataset(*drawn)]
    assert len(set(ids)) == len(drawn)


def test_duplicates_are_kept_counted_and_told_apart() -> None:
    made = dataset(sequence(1, 2), sequence(3), sequence(1, 2), sequence(1, 2))
    assert len({sample.id for sample in made}) == 4
    assert made.counts.duplicates == 2


def test_an_id_does_not_depend_on_what_else_is_in_the_file() -> None:
    alone = dataset(sequence(1, 2))[0]
    assert dataset(sequence(9), sequence(1, 2), sequence(8))[1].id == alone.id


def test_ids_depend_on_the_tokenization_settings() -> None:
    assert dataset(sequence(1, 2), settings="a")[0].id != dataset(sequence(1, 2), settings="b")[0].id


def test_ids_depend_on_what_is_trained() -> None:
    assert dataset(sequence(1, 2, trained=".x"))[0].id != dataset(sequence(1, 2))[0].id


def test_a_boundary_between_tokens_and_labels_cannot_be_shifted() -> None:
    padded = sequence(1, IGNORED_LABEL, trained="x.")
    assert dataset(padded)[0].id != dataset(sequence(1, trained="x"))[0].id


def test_colliding_hashes_are_resolved_in_the_order_of_the_file() -> None:
    def two_bits(content: bytes) -> int:
        return sum(content) % 4

    keys = [b"a", b"b", b"e", b"a"]
    ids = number_occurrences(keys, two_bits)
    assert sorted(ids) == [0, 1, 2, 3]
    assert number_occurrences(keys, two_bits) == ids
    assert number_occurrences(keys[:2], two_bits) == ids[:2]


def test_the_content_hash_says_whether_two_data_sets_are_the_same() -> None:
    first = dataset(sequence(1, 2), sequence(3))
    assert first.content_hash == dataset(sequence(1, 2), sequence(3)).content_hash
    assert first.content_hash != dataset(sequence(3), sequence(1, 2)).content_hash
    assert first.content_hash != dataset(sequence(1, 2), sequence(3), settings="other").content_hash


def test_a_selection_keeps_ids_and_shares_the_tokens() -> None:
    whole = dataset(sequence(1, 2), sequence(3), sequence(4, 5, 6))
    part = whole.select([2, 0])
    assert [sample.id for sample in part] == [whole[2].id, whole[0].id]
    assert [sample.input_ids.tolist() for sample in part] == [[4, 5, 6], [1, 2]]
    assert part.table.input_ids is whole.table.input_ids
    assert part.num_tokens == 5
    assert part.num_targets == 3


def test_a_slice_is_a_selection() -> None:
    whole = dataset(*(sequence(i) for i in range(5)))
    assert [sample.input_ids.tolist() for sample in whole[1:3]] == [[1], [2]]


def test_negative_indices_count_from_the_end() -> None:
    assert dataset(sequence(1), sequence(2))[-1].input_ids.tolist() == [2]


def test_an_index_past_the_end_is_an_error() -> None:
    with pytest.raises(IndexError):
        dataset(sequence(1))[1]


def test_changing_a_sample_does_not_change_the_data_set() -> None:
    made = dataset(sequence(1, 2))
    made[0].input_ids[0] = 99
    assert made[0].input_ids.tolist() == [1, 2]
