"""The contract of the kernels that leave values out: which ones, in what order, as which bytes. Knows NumPy arrays; no codec.

Two steps, each with its way back. Values are moved, never computed with, so both ends have the same bits.

    keep    a random subset that follows from a seed: no byte says which       spread   back to their places, zeros between
    pick    those of largest magnitude, and bytes that say where they were     place    back to their places, zeros between

Chance: value i of n is kept if draw(i) * (n - i) < (m - kept so far) * 2^32, where draw(i) is 32 bits of (seed, i). So of the
values left, one in (left / still needed) is taken: exactly m in the end, every set of m values as likely as any other, hence
every value with a probability of m / n (each decision is off by 2^-32 at most).

Bytes that say where k of m values are, for a `width` w that follows from m and k alone:

    w = 0    bitmap: bit i % 8 of byte i // 8 is value i                            ceil(m / 8) bytes
    w > 0    ranges of 2^w values, range by range: a 1 for each value picked, then, but for the last range, a 0;
             the k ones and (m - 1) // 2^w zeros in bits as above                   ceil((k + (m - 1) // 2^w) / 8) bytes
             and the place in its range of each value picked, w bits, low first     ceil(k w / 8) bytes

The second is the code of Elias (1974) and Fano (1971): at most about k (2 + log2(m / k)) bits, with a size known beforehand.
Unused bits are 0.
"""

from __future__ import annotations

import functools
import types

import numpy as np

from pipecomp.errors import CodecError, CorruptPayload
from pipecomp.native.ops import ByteArray, FloatArray

MAX_VALUES = 2**31 - 1
"""Of a sample: places are 32 bits."""


@functools.lru_cache(maxsize=4096)
def width_of(num_values: int, num_picked: int) -> int:
    """The width whose bytes are fewest, the smallest of equal ones; 0 is the bitmap."""
    widths = range(max(num_values - 1, 1).bit_length() + 1)
    return min(widths, key=lambda width: nbytes_of_width(num_values, num_picked, width))


def nbytes_of_width(num_values: int, num_picked: int, width: int) -> int:
    """Bytes that say where the picked values are, with this width."""
    if width == 0:
        return -(-num_values // 8)
    return ends_nbytes(num_values, num_picked, width) + -(-num_picked * width // 8)


def ends_nbytes(num_values: int, num_picked: int, width: int) -> int:
    """Bytes of the ones and zeros that say how many values each range has; the rest are places in ranges."""
    return -(-(num_picked + (num_values - 1 >> width)) // 8)


def places_nbytes(num_values: int, num_picked: int) -> int:
    """Exact bytes that `pick` writes. None if all are picked, or none."""
    if num_picked in (0, num_values):
        return 0
    return nbytes_of_width(num_values, num_picked, width_of(num_values, num_picked))


def keep(values: FloatArray, seed: int, *, out: FloatArray) -> None:
    """Copy the (m,) values that `seed` says, of (n,), into `out`, in order. `seed` counts modulo 2^64."""
    _check(values, out)
    _backend().keep(values, seed & 0xFFFFFFFFFFFFFFFF, out)


def spread(kept: FloatArray, seed: int, *, out: FloatArray) -> None:
    """The way back of `keep`: (m,) values to where they were among (n,), zeros elsewhere. Every m values are possible."""
    _check(out, kept)
    _backend().spread(kept, seed & 0xFFFFFFFFFFFFFFFF, out)


def pick(values: FloatArray, *, places: ByteArray, out: FloatArray) -> None:
    """Copy the (k,) values of largest magnitude of (m,) into `out`, in order; of equal ones, those that come first.

    Args:
        values: (m,) fp32, finite.
        places: (places_nbytes(m, k),) uint8, written, any alignment: where they were.
        out: (k,) fp32, written.
    """
    _check(values, out)
    _check_places(places, values.size, out.size, CodecError)
    if out.size in (0, values.size):
        out[:] = values[: out.size]
        return
    _backend().pick(values, width_of(values.size, out.size), places, out)


def place(picked: FloatArray, places: ByteArray, *, out: FloatArray) -> None:
    """The way back of `pick`: (k,) values to where they were among (m,), zeros elsewhere.

    Raises:
        CorruptPayload: `places` has another size than `places_nbytes`, or says what `pick` never does: another number of values,
            one beyond the end, two in one place or out of order, unused bits that are not 0. `out` is then undefined.
    """
    _check(out, picked)
    _check_places(places, out.size, picked.size, CorruptPayload)
    if picked.size in (0, out.size):
        out[: picked.size] = picked
        out[picked.size :] = 0
    elif not _backend().place(picked, width_of(out.size, picked.size), places, out):
        raise CorruptPayload("the payload says of values where they are as no encoder does")


def warm_up() -> None:
    """Compile, or load, all four."""
    _backend().warm_up()


def _backend() -> types.ModuleType:
    """Imported when first needed: a compiler is heavy."""
    from pipecomp.native import _sparse

    return _sparse


def _check(all_values: FloatArray, some: FloatArray) -> None:
    for array in (all_values, some):
        if array.dtype != np.float32 or array.ndim != 1 or not (array.flags.c_contiguous and array.flags.aligned):
            raise CodecError(f"values must be a flat, contiguous float32 array, got {array.dtype} {array.shape}")
    if not min(1, all_values.size) <= some.size <= all_values.size <= MAX_VALUES:
        raise CodecError(f"{some.size} of {all_values.size} values is not possible; use 1 to all, of {MAX_VALUES} at most")


def _check_places(places: ByteArray, num_values: int, num_picked: int, wrong_size: type[CodecError]) -> None:
    nbytes = places_nbytes(num_values, num_picked)
    if places.dtype != np.uint8 or not places.flags.c_contiguous:
        raise CodecError(f"places must be contiguous uint8, got {places.dtype}")
    if places.shape != (nbytes,):
        raise wrong_size(f"places must have shape ({nbytes},), got {places.shape}")
