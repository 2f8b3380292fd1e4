"""Kernels of `native.sparse`, compiled by Numba. Knows arrays of 32-bit patterns and bytes; knows no contract and no float.

Loops take or leave a value by adding a truth value to a count, without a branch: which values are taken is a matter of chance,
and a wrongly foreseen branch costs more than a value that is written for nothing and written over.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return, assignment"
# ruff: noqa: ANN001, ANN202 - what Numba compiles is typed by Numba

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba as nb
import numpy as np

from pipecomp.native import cpu
from pipecomp.native.ops import ByteArray, FloatArray
from pipecomp.native.sparse import ends_nbytes

_WORDS_IN = nb.types.Array(nb.uint32, 1, "C", readonly=True)
_WORDS_OUT = nb.types.Array(nb.uint32, 1, "C")
_BYTES_IN = nb.types.Array(nb.uint8, 1, "C", readonly=True)
_BYTES_OUT = nb.types.Array(nb.uint8, 1, "C")
_MOVE = nb.void(_WORDS_IN, nb.uint64, _WORDS_OUT)
_PICK = nb.void(_WORDS_IN, nb.int64, nb.int64, _BYTES_OUT, _WORDS_OUT)
_PLACE = nb.boolean(_WORDS_IN, nb.int64, nb.int64, _BYTES_IN, _WORDS_OUT)

_MAGNITUDE = np.uint32(0x7FFFFFFF)


def keep(values: FloatArray, seed: int, out: FloatArray) -> None:
    """See `sparse.keep`."""
    _keep_kernel()(values.view(np.uint32), np.uint64(seed), out.view(np.uint32))


def spread(kept: FloatArray, seed: int, out: FloatArray) -> None:
    """See `sparse.spread`."""
    _spread_kernel()(kept.view(np.uint32), np.uint64(seed), out.view(np.uint32))


def pick(values: FloatArray, width: int, places: ByteArray, out: FloatArray) -> None:
    """See `sparse.pick`; not all values, and one at least."""
    split = ends_nbytes(values.size, out.size, width) if width else 0
    _pick_kernel()(values.view(np.uint32), width, split, places, out.view(np.uint32))


def place(picked: FloatArray, width: int, places: ByteArray, out: FloatArray) -> bool:
    """See `sparse.place`; False for places that no encoder writes."""
    split = ends_nbytes(out.size, picked.size, width) if width else 0
    return bool(_place_kernel()(picked.view(np.uint32), width, split, places, out.view(np.uint32)))


def warm_up() -> None:
    """Compile, or load from the cache, all of them."""
    for kernel in (_keep_kernel, _spread_kernel, _pick_kernel, _place_kernel):
        kernel()


@nb.njit
def _chance(seed, index, left, needed):
    """1 if this value is kept, else 0: the sign of draw * left - needed * 2^32, which no compiler makes a branch of.

    A draw is the upper half of a step of SplitMix64 (Steele, Lea, Flood, 2014).
    """
    mixed = np.uint64(seed + (np.uint64(index) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    draw = (mixed ^ (mixed >> np.uint64(31))) >> np.uint64(32)
    return np.uint64(draw * left - (needed << np.uint64(32))) >> np.uint64(63)


@functools.cache
def _keep_kernel() -> Callable[..., Any]:
    def kernel(values, seed, out):
        count, index = 0, 0
        left, needed = np.uint64(values.size), np.uint64(out.size)
        while count < out.size:
            is_kept = _chance(seed, index, left, needed)
            out[count] = values[index]
            count += np.int64(is_kept)
            needed -= is_kept
            left -= np.uint64(1)
            index += 1

    return cpu._compile(kernel, _MOVE, "sparse_keep")


@functools.cache
def _spread_kernel() -> Callable[..., Any]:
    def kernel(kept, seed, out):
        count, index = 0, 0
        left, needed = np.uint64(out.size), np.uint64(kept.size)
        while count < kept.size:
            is_kept = _chance(seed, index, left, needed)
            out[index] = np.uint32(kept[count] * is_kept)
            count += np.int64(is_kept)
            needed -= is_kept
            left -= np.uint64(1)
            index += 1
        out[index:] = 0

    return cpu._compile(kernel, _MOVE, "sparse_spread")


@nb.njit
def _threshold(values, num_picked):
    """Bits of the magnitude of which some, and above which all are picked; and how many of those that are equal to it.

    Found in three passes: 11 bits of the magnitude, then 10 and 10 more of the values that had the right ones so far.
    """
    upper, wanted = np.uint32(0), num_picked
    for shift in (20, 10, 0):
        counts = np.zeros((4, 1 << 11), np.int32)  # in turns, since an increment waits for the last one of its bin
        for index in range(values.size):
            rest = ((values[index] & _MAGNITUDE) >> np.uint32(shift)) - upper
            if shift == 20 or rest < np.uint32(1 << 10):
                counts[index & 3, rest & np.uint32(0x7FF)] += 1
        at = np.int64(counts.shape[1] - 1)
        while True:
            here = np.int64(counts[0, at]) + counts[1, at] + counts[2, at] + counts[3, at]
            if here >= wanted:
                break
            wanted -= here
            at -= 1
        upper = np.uint32((upper + np.uint32(at)) << np.uint32(10 if shift else 0))
    return upper, wanted


@nb.njit
def _find(values, threshold, num_equal, num_picked):
    """Places of the picked values, in order."""
    found = np.empty(num_picked + 1, np.int32)
    count, index = 0, 0
    while count < num_picked:
        magnitude = values[index] & _MAGNITUDE
        is_tie = (magnitude == threshold) & (num_equal > 0)
        num_equal -= is_tie
        found[count] = index
        count += (magnitude > threshold) | is_tie
        index += 1
    return found


@nb.njit
def _write(found, num_picked, width, split, places):
    """Places as a bitmap, or as the ends of ranges and then the places in them. Every byte is written."""
    places[:] = 0
    held, num_held, at = np.uint64(0), 0, split  # bits that do not make a byte yet
    mask = (1 << width) - 1
    for index in range(num_picked):
        place = np.int64(found[index])
        bit = (place >> width) + index if width else place
        places[bit >> 3] |= np.uint8(1 << (bit & 7))
        held |= np.uint64(place & mask) << np.uint64(num_held)
        num_held += width
        while num_held >= 8:
            places[at] = np.uint8(held & np.uint64(0xFF))
            held >>= np.uint64(8)
            num_held -= 8
            at += 1
    if num_held > 0:
        places[at] = np.uint8(held)


@functools.cache
def _pick_kernel() -> Callable[..., Any]:
    def kernel(values, width, split, places, out):
        threshold, num_equal = _threshold(values, out.size)
        found = _find(values, threshold, num_equal, out.size)
        _write(found, out.size, width, split, places)
        for index in range(out.size):
            out[index] = values[found[index]]

    return cpu._compile(kernel, _PICK, "sparse_pick")


@nb.njit
def _ones_of(places, num_bytes, num_bits, num_picked):
    """Where the ones are among the first bits, one element more; empty unless there are so many, and none beyond them."""
    count = 0
    for at in range(num_bytes):
        byte = np.uint32(places[at])
        byte -= (byte >> np.uint32(1)) & np.uint32(0x55)
        byte = (byte & np.uint32(0x33)) + ((byte >> np.uint32(2)) & np.uint32(0x33))
        count += np.int64((byte + (byte >> np.uint32(4))) & np.uint32(0x0F))
    is_padded = num_bits % 8 == 0 or places[num_bytes - 1] >> (num_bits % 8) == 0
    if count != num_picked or not is_padded:
        return np.empty(0, np.int32)
    found = np.empty(num_picked + 1, np.int32)
    count = 0
    for at in range(num_bytes):
        byte = np.int64(places[at])
        for bit in range(8):
            found[count] = 8 * at + bit
            count += (byte >> bit) & 1
    return found


@nb.njit
def _read(places, num_values, num_picked, width, split):
    """The places that `_write` wrote; empty if it did not."""
    if width == 0:
        return _ones_of(places, places.size, num_values, num_picked)
    found = _ones_of(places, split, num_picked + ((num_values - 1) >> width), num_picked)
    held, num_held, at, last, is_good = np.uint64(0), 0, split, -1, found.size > 0
    mask = np.uint64((1 << width) - 1)
    for index in range(found.size - 1):
        while num_held < width:
            held |= np.uint64(places[at]) << np.uint64(num_held)
            num_held += 8
            at += 1
        place = ((np.int64(found[index]) - index) << width) | np.int64(held & mask)
        held >>= np.uint64(width)
        num_held -= width
        is_good &= last < place
        last = place
        found[index] = place
    return found if is_good and last < num_values and held == 0 else np.empty(0, np.int32)


@functools.cache
def _place_kernel() -> Callable[..., Any]:
    def kernel(picked, width, split, places, out):
        found = _read(places, out.size, picked.size, width, split)
        if found.size == 0:
            return False
        out[:] = 0
        for index in range(picked.size):
            out[found[index]] = picked[index]
        return True

    return cpu._compile(kernel, _PLACE, "sparse_place")
