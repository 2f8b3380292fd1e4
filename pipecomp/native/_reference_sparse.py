"""Which values are kept and picked, and where they were as bytes, in plain NumPy: the oracle for `_sparse`. Knows only arrays.

Slow and obviously right: from the text of `native.sparse`, with numbers that do not overflow.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pipecomp.native.ops import ByteArray, FloatArray
from pipecomp.native.sparse import ends_nbytes

_WHOLE = 2**64 - 1
Places = npt.NDArray[np.int64]


def kept(num_values: int, num_kept: int, seed: int) -> Places:
    """Places that `sparse.keep` takes, in order."""
    taken: list[int] = []
    for index in range(num_values):
        if _draw(seed, index) * (num_values - index) < (num_kept - len(taken)) << 32:
            taken.append(index)
    return np.array(taken, np.int64)


def _draw(seed: int, index: int) -> int:
    """32 bits: the upper half of a step of SplitMix64."""
    mixed = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _WHOLE
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & _WHOLE
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & _WHOLE
    return (mixed ^ (mixed >> 31)) >> 32


def picked(values: FloatArray, num_picked: int) -> Places:
    """Places that `sparse.pick` takes, in order: a stable sort leaves equal magnitudes as they are."""
    return np.sort(np.argsort(-np.abs(values), kind="stable")[:num_picked])


def write(places: Places, num_values: int, width: int) -> ByteArray:
    """Places as the bytes that `sparse.pick` writes."""
    if width == 0:
        is_picked = np.zeros(num_values, np.uint8)
        is_picked[places] = 1
        return np.packbits(is_picked, bitorder="little")
    split = ends_nbytes(num_values, len(places), width)
    ends = np.zeros(8 * split, np.uint8)
    ends[(places >> width) + np.arange(len(places))] = 1
    in_range = (places[:, None] >> np.arange(width)) & 1
    return np.concatenate([np.packbits(ends, bitorder="little"), np.packbits(in_range.astype(np.uint8), bitorder="little")])


def read(payload: ByteArray, num_values: int, num_picked: int, width: int) -> Places | None:
    """The places that these bytes say; None if `write` does not write them."""
    bits = np.unpackbits(payload, bitorder="little").astype(np.int64)
    if width == 0:
        places = np.flatnonzero(bits)
    else:
        split = 8 * ends_nbytes(num_values, num_picked, width)
        ones = np.flatnonzero(bits[:split])
        if len(ones) != num_picked:
            return None
        in_range = bits[split:][: num_picked * width].reshape(num_picked, width) @ (1 << np.arange(width))
        places = ((ones - np.arange(num_picked)) << width) + in_range
    if len(places) != num_picked or (np.diff(places) <= 0).any() or places[-1] >= num_values:
        return None
    return places if np.array_equal(write(places, num_values, width), payload) else None
