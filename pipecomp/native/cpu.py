"""The kernels for processors, compiled by Numba. Knows only arrays; gives the bits of `reference`, and lets other threads run.

A kernel is specialized: bits, scale dtype, rounding and the presence of messages are constants in it. Each specialization is
one function with one signature and one name, hence one file in Numba's cache, so that processes which compile at the same
time never write each other's entries.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"
# ruff: noqa: ANN001, ANN202, ANN401 - what Numba compiles is typed by Numba

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numba as nb
import numpy as np

from pipecomp.native import _fitting, _groups, _lanes, _mixed, _rotation, _vectors, ops
from pipecomp.native._fitting import UNKNOWN, UNSENT, encode_fitted, groups_at_once
from pipecomp.native._groups import (
    PADDING,
    SCALES,
    block_of,
    decode_group,
    decode_rotated,
    encode_group,
    encode_rotated,
    lowest_pattern,
    pack_block,
    top_exponent,
    unpack_block,
)
from pipecomp.native._vectors import FITS, HAS_AFTER, HAS_BEFORE, IS_EITHER, IS_STOCHASTIC, extremes
from pipecomp.native.ops import SCALE_NBYTES, ByteArray, FloatArray, Layout, grid

_FLOATS_IN = nb.types.Array(nb.float32, 1, "C", readonly=True)
_FLOATS_OUT = nb.types.Array(nb.float32, 1, "C")
_BYTES_IN = nb.types.Array(nb.uint8, 1, "C", readonly=True)
_BYTES_OUT = nb.types.Array(nb.uint8, 1, "C")
_ENCODE = nb.boolean(_FLOATS_IN, _FLOATS_IN, _FLOATS_OUT, _BYTES_OUT, nb.int64, nb.uint32, nb.uint32)
_DECODE = nb.boolean(_BYTES_IN, _FLOATS_IN, _FLOATS_OUT, nb.int64)
_NORMS = nb.types.UniTuple(nb.float64, 3)(_FLOATS_IN, _FLOATS_IN, _FLOATS_IN, nb.boolean)
_NOTHING = np.empty(0, np.float32)

FIXED_GROUPS = (16, 32, 64, 128, 256)
"""Groups whose length is a constant of their kernels; all others share one kernel, which takes it as an argument."""

MAX_LANES = 64
_STRIDE = 4096  # values looked at together for the largest of a sample


class Config(NamedTuple):
    """One kind of call that a run will make, for `warm_up`."""

    layout: Layout
    has_message: bool  # messages go in and come out, or neither


def encode(
    values: FloatArray,
    layout: Layout,
    payload: ByteArray,
    message_in: FloatArray | None,
    message_out: FloatArray | None,
    seed: int,
) -> bool:
    """See `ops.encode`. False if a value or a difference is not finite; the outputs are then undefined."""
    kernel = _encode_kernel(_encoding(layout), message_in is not None, message_out is not None)
    before = _NOTHING if message_in is None else message_in
    after = _NOTHING if message_out is None else message_out
    return bool(kernel(values, before, after, payload, layout.group, seed & 0xFFFFFFFF, seed >> 32))


def decode(payload: ByteArray, layout: Layout, out: FloatArray, message_in: FloatArray | None) -> bool:
    """See `ops.decode`. False if the payload is one that no encoder writes."""
    kernel = _decode_kernel(_decoding(layout), message_in is not None)
    return bool(kernel(payload, _NOTHING if message_in is None else message_in, out, layout.group))


def squared_norms(
    values: FloatArray, message_in: FloatArray | None, message_out: FloatArray
) -> tuple[float, float, float]:
    """See `ops.squared_norms`."""
    before = _NOTHING if message_in is None else message_in
    error, change, size = _norms_kernel()(values, before, message_out, message_in is not None)
    return float(error), float(change), float(size)


def warm_up(configs: Iterable[Config]) -> None:
    """Compile, or load from the cache, every kernel that these calls need, so that no step of a run waits for a compiler."""
    for layout, has_message in configs:
        _encode_kernel(_encoding(layout), has_message, has_message)
        _decode_kernel(_decoding(layout), has_message)
    _norms_kernel()


@functools.lru_cache(maxsize=1024)
def _encoding(layout: Layout) -> Layout:
    """The layout without what its kernel takes as an argument: 0 stands for any group."""
    return layout if layout.group in FIXED_GROUPS else layout._replace(group=0)


@functools.lru_cache(maxsize=1024)
def _decoding(layout: Layout) -> Layout:
    """The same for the decoder, which heeds the rounding for one bit only, and never how a step was found."""
    layout = _encoding(layout)._replace(fit="extreme")
    return layout if layout.bits == 1 else layout._replace(rounding="nearest")


def _compile(function: Callable[..., Any], signature: Any, name: str, *, fastmath: bool = False) -> Callable[..., Any]:
    """Compile now, or load: Numba keeps one file a name, in NUMBA_CACHE_DIR, beside this module, or in the user's cache."""
    function.__name__ = function.__qualname__ = f"{name}_{_sources()}"
    try:
        return nb.njit(signature, nogil=True, fastmath=fastmath, cache=True)(function)
    except (RuntimeError, OSError):  # no folder that Numba may write, or it is full: compile in memory, in each process
        return nb.njit(signature, nogil=True, fastmath=fastmath)(function)


@functools.cache
def _sources() -> str:
    """Digest of all that kernels are made of. Numba itself would look at this file alone, and load kernels made of old parts."""
    digest = hashlib.sha256()
    for module in (ops, _vectors, _lanes, _rotation, _fitting, _groups, _mixed, sys.modules[__name__]):
        digest.update(Path(str(module.__file__)).read_bytes())
    return digest.hexdigest()[:12]


@functools.cache
def _encode_kernel(layout: Layout, has_in: bool, has_out: bool) -> Callable[..., Any]:
    """`layout.group` is a constant of the kernel, or 0: then the kernel takes it as an argument."""
    name = f"encode{_words(layout)}{'_from' * has_in}{'_to' * has_out}"
    if layout.widths == "mixed":
        return _compile(_mixed.encoder(layout, has_in, has_out, MAX_LANES), _ENCODE, name)
    bits, fixed_group, scale, rounding, fit, rotation, levels, _ = layout
    flags = HAS_BEFORE * has_in | HAS_AFTER * has_out | IS_STOCHASTIC * (rounding == "stochastic")
    flags |= FITS * (fit != "extreme") | IS_EITHER * (levels == "either")
    scale_index, scale_nbytes = SCALES.index(scale), SCALE_NBYTES[scale]
    lanes = min(fixed_group or MAX_LANES, MAX_LANES)
    is_relative, is_rotated = scale == "e4m3", rotation != "none"
    at_once = groups_at_once(fixed_group) if is_relative and fit != "extreme" and not is_rotated else 0
    span = at_once * fixed_group
    is_single = span > 0 and levels == "either"
    constants = grid(layout)
    factor, smallest, limit, drop, rounds_up = (
        max(constants.near_factor, constants.far_factor),
        constants.smallest,
        constants.largest,
        constants.mantissa_drop,
        constants.rounds_up,
    )

    # Whole blocks first, where lengths are constants and loops unroll; then the last, short block, in the same order of bytes.
    def kernel(values, before, after, payload, any_group, seed_low, seed_high):
        group = np.int64(fixed_group or any_group)
        block = block_of(group)
        num_values = values.size
        unpacked = np.empty(min(block, num_values) + PADDING, np.uint8)
        scratch = (np.empty(fixed_group, np.float32), np.empty(fixed_group, np.float32))
        worst, top = np.uint32(0), np.uint32(0)
        scale_at, offset = np.int64(is_relative), is_relative + (num_values + group - 1) // group * scale_nbytes
        whole = num_values - num_values % block
        done, seen = np.int64(0), np.zeros(16, np.uint32)
        least = np.empty(num_values // span if is_single else 0, np.int32)
        if is_single:  # all spans before the top is known: few groups need it
            for index in range(least.size):
                least[index] = encode_fitted(
                    values, before, after, payload, seen, index * span, scale_at + index * at_once,
                    offset + index * span * bits // 8, np.int32(UNKNOWN), fixed_group, bits, flags,
                )  # fmt: skip
            done, worst = np.int64(least.size * span), seen.max()
        if is_relative:
            for start in range(done, num_values, _STRIDE):
                above, below = extremes(values, before, start, min(_STRIDE, num_values - start), MAX_LANES, flags)
                worst = max(worst, above, below & np.uint32(0x7FFFFFFF))
            if worst >= np.uint32(0x7F800000):
                return False
            top = top_exponent(worst, factor, smallest, limit, drop, rounds_up)
            payload[0] = np.uint8(top)
        if span:
            lowest = lowest_pattern(top)
            for index in range(num_values // span):
                if is_single and least[index] > lowest:
                    for at in range(scale_at, scale_at + at_once):
                        place = np.uint32((np.uint32(payload[at]) - np.uint32(lowest)) & np.uint32(0x7F))
                        place = np.uint32(place | (payload[at] & np.uint32(0x80)))
                        payload[at] = np.uint8(0 if payload[at] == UNSENT else place)
                else:
                    encode_fitted(
                        values, before, after, payload, seen, index * span, scale_at, offset, lowest, fixed_group, bits, flags
                    )
                scale_at, offset = scale_at + at_once, offset + span * bits // 8
            done = np.int64(num_values // span * span)
        for block_start in range(done, whole, block):
            for at in range(0, block, group):
                if is_rotated:
                    largest = encode_rotated(
                        values, before, after, payload, unpacked, scratch, block_start + at, at, fixed_group, scale_at,
                        top, seed_low, seed_high, bits, scale_index, lanes, flags,
                    )  # fmt: skip
                else:
                    largest = encode_group(
                        values, before, after, payload, unpacked, block_start + at, at, group, scale_at,
                        block_start + at, top, seed_low, seed_high, bits, scale_index, lanes, flags,
                    )  # fmt: skip
                worst = max(worst, largest)
                scale_at += scale_nbytes
            offset = pack_block(unpacked, block, payload, offset, bits)
        for start in range(whole, num_values, group):
            length = min(group, num_values - start)
            if is_rotated and length == group:
                largest = encode_rotated(
                    values, before, after, payload, unpacked, scratch, start, start - whole, fixed_group, scale_at,
                    top, seed_low, seed_high, bits, scale_index, lanes, flags,
                )  # fmt: skip
            else:
                largest = encode_group(
                    values, before, after, payload, unpacked, start, start - whole, length, scale_at,
                    start, top, seed_low, seed_high, bits, scale_index, lanes, flags,
                )  # fmt: skip
            worst = max(worst, largest)
            scale_at += scale_nbytes
        pack_block(unpacked, num_values - whole, payload, offset, bits)
        return worst < np.uint32(0x7F800000)

    return _compile(kernel, _ENCODE, name)


@functools.cache
def _decode_kernel(layout: Layout, has_in: bool) -> Callable[..., Any]:
    """As `_encode_kernel` has it."""
    name = f"decode{_words(layout)}{'_from' * has_in}"
    if layout.widths == "mixed":
        return _compile(_mixed.decoder(layout, has_in, MAX_LANES), _DECODE, name)
    bits, fixed_group, scale, rounding, _, rotation, levels, _ = layout
    flags = HAS_BEFORE * has_in | IS_STOCHASTIC * (rounding == "stochastic") | IS_EITHER * (levels == "either")
    scale_index, scale_nbytes = SCALES.index(scale), SCALE_NBYTES[scale]
    lanes = min(fixed_group or MAX_LANES, MAX_LANES)
    is_relative, is_rotated = scale == "e4m3", rotation != "none"

    def kernel(payload, before, out, any_group):
        group = np.int64(fixed_group or any_group)
        block = block_of(group)
        num_values = out.size
        unpacked = np.empty(min(block, num_values) + PADDING, np.uint8)
        scratch = (np.empty(fixed_group, np.float32), np.empty(fixed_group, np.float32))
        is_good, top = True, np.uint32(0)
        scale_at, offset = np.int64(is_relative), is_relative + (num_values + group - 1) // group * scale_nbytes
        if is_relative:
            top = np.uint32(payload[0])
            is_good &= payload[0] < 255
        whole = num_values - num_values % block
        for block_start in range(0, whole, block):
            offset, is_padded = unpack_block(payload, offset, unpacked, block, bits)
            is_good &= is_padded
            for at in range(0, block, group):
                if is_rotated:
                    is_good &= decode_rotated(
                        payload, unpacked, before, out, scratch, scale_at, at, block_start + at, fixed_group, top,
                        bits, scale_index, lanes, flags,
                    )  # fmt: skip
                else:
                    is_good &= decode_group(
                        payload, unpacked, before, out, scale_at, at, block_start + at, group, top,
                        bits, scale_index, lanes, flags,
                    )  # fmt: skip
                scale_at += scale_nbytes
        offset, is_padded = unpack_block(payload, offset, unpacked, num_values - whole, bits)
        is_good &= is_padded
        for start in range(whole, num_values, group):
            length = min(group, num_values - start)
            if is_rotated and length == group:
                is_good &= decode_rotated(
                    payload, unpacked, before, out, scratch, scale_at, start - whole, start, fixed_group, top,
                    bits, scale_index, lanes, flags,
                )  # fmt: skip
            else:
                is_good &= decode_group(
                    payload, unpacked, before, out, scale_at, start - whole, start, length, top,
                    bits, scale_index, lanes, flags,
                )  # fmt: skip
            scale_at += scale_nbytes
        return is_good

    return _compile(kernel, _DECODE, name)


def _words(layout: Layout) -> str:
    """A layout as part of a kernel's name; a group of 0 is any."""
    bits, group, *names = layout
    return "_".join([str(bits), *names, f"g{group or 'any'}"])


@functools.cache
def _norms_kernel() -> Callable[..., Any]:
    def kernel(values, before, after, has_before):
        error = change = size = 0.0
        for i in range(values.size):
            value = np.float64(values[i])
            error += (value - np.float64(after[i])) ** 2
            size += value**2
        if has_before:
            for i in range(values.size):
                change += (np.float64(values[i]) - np.float64(before[i])) ** 2
        return error, change if has_before else size, size

    # Meters only: the sums may be reordered, so that they vectorize.
    return _compile(kernel, _NORMS, "squared_norms", fastmath=True)
