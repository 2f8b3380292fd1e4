"""The kernels that leave values out do what plain NumPy does, bit for bit, and refuse bytes that it does not write."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecomp.errors import CodecError, CorruptPayload
from pipecomp.native import _reference_sparse as reference
from pipecomp.native import sparse

SEED = 0xFEDCBA9876543210
SIZES = [(1, 1), (2, 1), (7, 3), (8, 8), (64, 1), (100, 99), (257, 26), (1000, 2), (1601, 160), (5000, 7)]


def normal(num_values: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(num_values, dtype=np.float32)


def picked(values: np.ndarray, num_picked: int) -> tuple[np.ndarray, np.ndarray]:
    places = np.full(sparse.places_nbytes(values.size, num_picked), 0xAA, np.uint8)
    out = np.full(num_picked, np.nan, np.float32)
    sparse.pick(values, places=places, out=out)
    return places, out


@pytest.mark.parametrize(("num_values", "num_kept"), SIZES)
@pytest.mark.parametrize("seed", [0, 1, SEED, 2**64 - 1])
def test_a_seed_keeps_what_the_text_says_and_its_values_come_back(num_values: int, num_kept: int, seed: int) -> None:
    values = normal(num_values)
    places = reference.kept(num_values, num_kept, seed)
    out, back = np.empty(num_kept, np.float32), np.full(num_values, np.nan, np.float32)
    sparse.keep(values, seed, out=out)
    assert np.array_equal(out, values[places])
    sparse.spread(out, seed, out=back)
    expected = np.zeros_like(values)
    expected[places] = values[places]
    assert np.array_equal(back, expected)


def test_seeds_count_modulo_two_to_the_64th() -> None:
    values, first, second = normal(50), np.empty(20, np.float32), np.empty(20, np.float32)
    sparse.keep(values, -1, out=first)
    sparse.keep(values, 2**64 - 1, out=second)
    assert np.array_equal(first, second)


def test_every_set_of_values_is_kept_about_equally_often() -> None:
    numbers, out = np.arange(6, dtype=np.float32), np.empty(3, np.float32)
    counts: Counter[bytes] = Counter()
    for seed in range(20_000):
        sparse.keep(numbers, seed, out=out)
        counts[out.tobytes()] += 1
    assert len(counts) == 20  # 3 of 6
    assert all(abs(count - 1000) < 5 * 31 for count in counts.values())  # five times what chance alone does


@pytest.mark.parametrize(("num_values", "num_picked"), SIZES)
def test_the_largest_are_picked_with_the_bytes_that_the_text_says(num_values: int, num_picked: int) -> None:
    values = normal(num_values)
    expected = reference.picked(values, num_picked)
    places, out = picked(values, num_picked)
    assert np.array_equal(out, values[expected])
    if num_picked < num_values:
        assert np.array_equal(places, reference.write(expected, num_values, sparse.width_of(num_values, num_picked)))
    back = np.full(num_values, np.nan, np.float32)
    sparse.place(out, places, out=back)
    assert np.array_equal(np.flatnonzero(back), expected)
    assert np.array_equal(back[expected], values[expected])


ALIKE = st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 1.0, -1.0, 1.0000001, 3e38, -3e38])


@given(st.lists(ALIKE, min_size=1, max_size=40), st.data())
@settings(max_examples=200, deadline=None)
def test_of_equal_magnitudes_those_that_come_first_are_picked(numbers: list[float], data: st.DataObject) -> None:
    values = np.array(numbers, np.float32)
    num_picked = data.draw(st.integers(1, values.size))
    expected = values[reference.picked(values, num_picked)]
    assert picked(values, num_picked)[1].tobytes() == expected.tobytes()


def test_the_width_is_the_one_with_the_fewest_bytes() -> None:
    for num_values, num_picked in itertools.product((1, 2, 9, 100, 1000, 10**6), (1, 2, 7, 50, 1000, 10**5)):
        if num_picked < num_values:
            sizes = [sparse.nbytes_of_width(num_values, num_picked, width) for width in range(31)]
            assert sparse.places_nbytes(num_values, num_picked) == min(sizes)
            assert sizes[sparse.width_of(num_values, num_picked)] == min(sizes)


@pytest.mark.parametrize(
    ("num_values", "num_picked", "nbytes"),
    [
        (0, 0, 0),
        (8, 8, 0),  # all
        (9, 5, 2),  # a bit each
        (1000, 250, 125),  # a bit each, and no better with ranges of 2 or 4
        (1000, 100, 66),  # ranges of 8: 100 ones and 124 zeros in 28 bytes, 100 places of 3 bits in 38
        (1 << 20, 1, 4),  # ranges of 65,536: a one and 15 zeros in 2 bytes, a place of 16 bits in 2
    ],
)
def test_places_take_so_many_bytes(num_values: int, num_picked: int, nbytes: int) -> None:
    assert sparse.places_nbytes(num_values, num_picked) == nbytes


@pytest.mark.parametrize(("num_values", "num_picked"), [(13, 6), (16, 8), (13, 2), (40, 3), (64, 4), (300, 5)])
def test_bytes_are_read_exactly_if_an_encoder_writes_them(num_values: int, num_picked: int) -> None:
    width, chance = sparse.width_of(num_values, num_picked), np.random.default_rng(0)
    values, out = np.ones(num_picked, np.float32), np.empty(num_values, np.float32)
    good = reference.write(np.sort(chance.permutation(num_values)[:num_picked]), num_values, width)
    flipped = [good ^ np.packbits(np.eye(8 * good.size, dtype=np.uint8)[[a, b]].sum(0) % 2) for a, b in pairs(8 * good.size)]
    noise = list(chance.integers(0, 256, (200, good.size), dtype=np.uint8))
    seen = Counter()
    for payload in (good, *flipped, *noise):
        expected = reference.read(payload, num_values, num_picked, width)
        seen[expected is not None] += 1
        if expected is None:
            with pytest.raises(CorruptPayload, match="where they are"):
                sparse.place(values, payload, out=out)
        else:
            sparse.place(values, payload, out=out)
            assert np.array_equal(np.flatnonzero(out), expected)
    assert seen[True] > 1
    assert seen[False] > 100


def pairs(num_bits: int) -> list[tuple[int, int]]:
    """Two bits that are near each other, or one and the last."""
    near = [(a, b) for a in range(num_bits) for b in range(a + 1, min(a + 9, num_bits))]
    return [(a, num_bits - 1) for a in range(num_bits - 1)] + near


@pytest.mark.parametrize("nbytes", [0, 65, 67])
def test_places_of_another_size_are_corrupt(nbytes: int) -> None:
    with pytest.raises(CorruptPayload, match=r"shape \(66,\)"):
        sparse.place(np.ones(100, np.float32), np.zeros(nbytes, np.uint8), out=np.empty(1000, np.float32))


def test_arrays_that_do_not_fit_are_refused() -> None:
    few, many, none = np.ones(3, np.float32), np.ones(5, np.float32), np.empty(0, np.float32)
    with pytest.raises(CodecError, match="5 of 3 values"):
        sparse.keep(few, 0, out=many)
    with pytest.raises(CodecError, match="0 of 3 values"):
        sparse.keep(few, 0, out=none)
    with pytest.raises(CodecError, match="float32"):
        sparse.pick(many.astype(np.float64), places=np.zeros(1, np.uint8), out=few)
    with pytest.raises(CodecError, match="contiguous"):
        sparse.spread(few, 0, out=np.ones(10, np.float32)[::2])
    with pytest.raises(CodecError, match="uint8"):
        sparse.pick(many, places=np.zeros(1, np.int8), out=few)
    with pytest.raises(CodecError, match=r"shape \(1,\)"):
        sparse.pick(many, places=np.zeros(2, np.uint8), out=few)
