"""The kernels for processors, compiled by Numba. Knows only arrays; gives the bits of `reference`, and lets other threads run.

A kernel is specialized: bits, scale dtype, rounding and the presence of messages are constants in it. Each specialization is
one function with one signature and one name, hence one file in Numba's cache, so that processes which compile at the same
time never write each other's entries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numba as nb
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from pipecomp.native.ops import (
    MIN_BLOCK,
    PLANES,
    SCALE_NBYTES,
    ByteArray,
    FloatArray,
    Layout,
    Rounding,
    Scale,
    largest_step,
    smallest_step,
    step_factor,
)

_FLOATS_IN = nb.types.Array(nb.float32, 1, "C", readonly=True)
_FLOATS_OUT = nb.types.Array(nb.float32, 1, "C")
_BYTES_IN = nb.types.Array(nb.uint8, 1, "C", readonly=True)
_BYTES_OUT = nb.types.Array(nb.uint8, 1, "C")
_ENCODE = nb.boolean(_FLOATS_IN, _FLOATS_IN, _FLOATS_OUT, _BYTES_OUT, _BYTES_OUT, nb.int64, nb.uint32, nb.uint32)
_DECODE = nb.boolean(_BYTES_IN, _BYTES_IN, _FLOATS_IN, _FLOATS_OUT, nb.int64)
_NORMS = nb.types.UniTuple(nb.float64, 3)(_FLOATS_IN, _FLOATS_IN, _FLOATS_IN, nb.boolean)
_NOTHING = np.empty(0, np.float32)


class Config(NamedTuple):
    """One kind of call that a run will make, for `warm_up`."""

    layout: Layout
    rounding: Rounding
    has_message: bool


def encode(
    values: FloatArray,
    layout: Layout,
    scales: ByteArray,
    codes: ByteArray,
    message_in: FloatArray | None,
    message_out: FloatArray | None,
    rounding: Rounding,
    seed: int,
) -> bool:
    """See `ops.encode`. False if a value or a difference is not finite; the outputs are then undefined."""
    bits, group, scale = layout
    kernel = _encode_kernel(bits, scale, rounding, message_in is not None, message_out is not None)
    before = _NOTHING if message_in is None else message_in
    after = _NOTHING if message_out is None else message_out
    return bool(kernel(values, before, after, scales, codes, group, seed & 0xFFFFFFFF, seed >> 32))


def decode(
    scales: ByteArray,
    codes: ByteArray,
    layout: Layout,
    out: FloatArray,
    message_in: FloatArray | None,
) -> bool:
    """See `ops.decode`. False if the payload is one that no encoder writes."""
    kernel = _decode_kernel(layout.bits, layout.scale, message_in is not None)
    return bool(kernel(scales, codes, _NOTHING if message_in is None else message_in, out, layout.group))


def squared_norms(
    values: FloatArray, message_in: FloatArray | None, message_out: FloatArray
) -> tuple[float, float, float]:
    """See `ops.squared_norms`."""
    before = _NOTHING if message_in is None else message_in
    error, change, size = _norms_kernel()(values, before, message_out, message_in is not None)
    return float(error), float(change), float(size)


def warm_up(configs: Iterable[Config]) -> None:
    """Compile, or load from the cache, every kernel that these calls need, so that no step of a run waits for a compiler."""
    for layout, rounding, has_message in configs:
        for has_out in (False, True):
            _encode_kernel(layout.bits, layout.scale, rounding, has_message, has_out)
        _decode_kernel(layout.bits, layout.scale, has_message)
    _norms_kernel()


def _compile(function: Callable[..., Any], signature: Any, name: str) -> Callable[..., Any]:  # noqa: ANN401 - numba's
    function.__name__ = function.__qualname__ = name
    try:
        return nb.njit(signature, nogil=True, cache=True)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # no folder that Numba may write: compile in memory, in each process
        return nb.njit(signature, nogil=True)(function)  # type: ignore[no-any-return]


@intrinsic
def as_bits(typing_context: Any, value: Any) -> Any:  # noqa: ANN401 - numba's
    """The bits of a float32, as uint32."""
    return nb.uint32(nb.float32), lambda _, builder, __, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic
def as_float(typing_context: Any, bits: Any) -> Any:  # noqa: ANN401 - numba's
    """The float32 with these 32 bits."""
    return nb.float32(nb.uint32), lambda _, builder, __, args: builder.bitcast(args[0], ir.FloatType())


@nb.njit
def block_of(group):  # type: ignore[no-untyped-def]
    """`ops.block_length`, for kernels."""
    return group * ((MIN_BLOCK + group - 1) // group)


@nb.njit
def scale_pattern(step, smallest, is_fp32, is_fp16, is_up):  # type: ignore[no-untyped-def]
    """The bits, in the scale's dtype, of a step that is at most the largest; by integers, so that no target needs a float16."""
    if step < smallest:
        return np.uint32(0)
    pattern = as_bits(step)
    if is_fp32:
        return pattern
    drop = np.uint32(16)  # mantissa bits that bf16 does not have
    if is_fp16:
        pattern = np.uint32(pattern - np.uint32(112 << 23))  # exponent bias 15 instead of 127
        drop = np.uint32(13)
        if step < np.float32(2.0**-14):  # subnormal: all numbers are multiples of 2^-24
            exact = step * np.float32(2.0**24)
            whole = np.uint32(exact)
            rest = exact - np.float32(whole)
            odd = (whole & np.uint32(1)) == np.uint32(1)
            goes_up = rest > np.float32(0) if is_up else rest > np.float32(0.5) or (rest == np.float32(0.5) and odd)
            return np.uint32(whole + np.uint32(1)) if goes_up else whole
    unit = np.uint32(np.uint32(1) << drop)
    if is_up:
        return np.uint32((pattern + (unit - np.uint32(1))) >> drop)
    return np.uint32((pattern + (unit >> np.uint32(1)) - np.uint32(1) + ((pattern >> drop) & np.uint32(1))) >> drop)


@nb.njit
def scale_value(pattern, is_fp32, is_fp16):  # type: ignore[no-untyped-def]
    """The float32 that a scale's bits stand for; NaN for a pattern that no encoder writes."""
    if is_fp32:
        return as_float(pattern)
    if is_fp16:
        if pattern < np.uint32(1 << 10):
            return np.float32(pattern) * np.float32(2.0**-24)
        if pattern >= np.uint32(0x7C00):
            return np.float32(np.nan)
        return as_float(np.uint32((pattern << np.uint32(13)) + np.uint32(112 << 23)))
    return as_float(np.uint32(pattern << np.uint32(16)))


@nb.njit
def uniform(position, seed_low, seed_high):  # type: ignore[no-untyped-def]
    """`reference.uniform` at one position."""
    mixed = np.uint32(np.uint32(position * np.uint32(0x9E3779B1)) ^ seed_low)
    mixed = np.uint32(np.uint32(mixed ^ (mixed >> np.uint32(16))) * np.uint32(0x7FEB352D))
    mixed = np.uint32(mixed ^ seed_high)
    mixed = np.uint32(np.uint32(mixed ^ (mixed >> np.uint32(15))) * np.uint32(0x846CA68B))
    mixed = np.uint32(mixed ^ (mixed >> np.uint32(16)))
    return np.float32(np.uint32(mixed >> np.uint32(8))) * np.float32(2.0**-24)


@nb.njit
def pack_plane(unpacked, length, shift, width, codes, offset):  # type: ignore[no-untyped-def]
    """Write bits shift .. shift + width - 1 of `length` codes to `codes[offset:]`; return the offset after them."""
    nbytes = (length * width + 7) // 8
    mask = np.uint8((1 << width) - 1)
    for i in range(nbytes):
        codes[offset + i] = (unpacked[i] >> np.uint8(shift)) & mask
    for part in range(1, 8 // width):
        start = part * nbytes
        for i in range(min(nbytes, length - start)):
            codes[offset + i] |= np.uint8(((unpacked[start + i] >> np.uint8(shift)) & mask) << np.uint8(width * part))
    return offset + nbytes


@nb.njit
def unpack_plane(codes, offset, length, shift, width, unpacked):  # type: ignore[no-untyped-def]
    """The inverse: or the plane at `codes[offset:]` into `unpacked`; return the offset after it, and whether its padding is 0."""
    nbytes = (length * width + 7) // 8
    mask = np.uint8((1 << width) - 1)
    padding = np.uint8(0)
    for part in range(8 // width):
        start = part * nbytes
        num_codes = max(min(nbytes, length - start), 0)
        for i in range(num_codes):
            unpacked[start + i] |= np.uint8(((codes[offset + i] >> np.uint8(width * part)) & mask) << np.uint8(shift))
        for i in range(num_codes, nbytes):
            padding |= (codes[offset + i] >> np.uint8(width * part)) & mask
    return offset + nbytes, padding == np.uint8(0)


@functools.cache
def _encode_kernel(bits: int, scale: Scale, rounding: Rounding, has_in: bool, has_out: bool) -> Callable[..., Any]:
    is_stochastic = rounding == "stochastic"
    half = np.float32(2 ** (bits - 1))
    centre = np.float32(0.5) - half
    top = np.float32(2**bits - 1)
    factor, smallest, largest = step_factor(bits, rounding), smallest_step(scale), largest_step(bits, scale)
    scale_is_fp32, scale_is_fp16, scale_nbytes = scale == "fp32", scale == "fp16", SCALE_NBYTES[scale]
    wide, middle, narrow = (*PLANES[bits], 0, 0)[:3]

    def kernel(values, before, after, scales, codes, group, seed_low, seed_high):  # type: ignore[no-untyped-def]
        num_values = values.size
        block = block_of(group)
        differences = np.empty(min(group, num_values), np.float32)
        unpacked = np.empty(min(block, num_values), np.uint8)
        worst = np.int32(0)
        offset = 0
        scale_at = 0
        for block_start in range(0, num_values, block):
            block_end = min(block_start + block, num_values)
            for start in range(block_start, block_end, group):
                length = min(start + group, block_end) - start
                for i in range(length):
                    if has_in:
                        differences[i] = values[start + i] - before[start + i]
                    else:
                        differences[i] = values[start + i]
                absmax = np.int32(0)
                for i in range(length):
                    absmax = max(absmax, np.int32(as_bits(differences[i]) & np.uint32(0x7FFFFFFF)))
                worst = max(worst, absmax)
                step = min(as_float(absmax) * factor, largest)
                pattern = scale_pattern(step, smallest, scale_is_fp32, scale_is_fp16, is_stochastic)
                step = scale_value(pattern, scale_is_fp32, scale_is_fp16)
                for byte in range(scale_nbytes):
                    scales[scale_at + byte] = np.uint8((pattern >> np.uint32(8 * byte)) & np.uint32(0xFF))
                scale_at += scale_nbytes
                inverse = np.float32(0)
                if step > np.float32(0):
                    inverse = np.float32(1) / step
                at = start - block_start
                for i in range(length):
                    position = differences[i] * inverse
                    if is_stochastic:
                        chance = uniform(np.uint32(start + i), seed_low, seed_high)
                        position = position + (half - np.float32(0.5)) + chance
                    else:
                        position = position + half
                    position = min(max(position, np.float32(0)), top)
                    code = np.int32(position)
                    unpacked[at + i] = np.uint8(code)
                    if has_out:
                        change = (np.float32(code) + centre) * step
                        if has_in:
                            after[start + i] = before[start + i] + change
                        else:
                            after[start + i] = change
            length = block_end - block_start
            offset = pack_plane(unpacked, length, 0, wide, codes, offset)
            if middle:
                offset = pack_plane(unpacked, length, wide, middle, codes, offset)
            if narrow:
                offset = pack_plane(unpacked, length, wide + middle, narrow, codes, offset)
        return worst < np.int32(0x7F800000)

    name = f"encode{bits}_{scale}_{rounding}{'_from_message' if has_in else ''}{'_to_message' if has_out else ''}"
    return _compile(kernel, _ENCODE, name)


@functools.cache
def _decode_kernel(bits: int, scale: Scale, has_in: bool) -> Callable[..., Any]:
    centre = np.float32(0.5 - 2 ** (bits - 1))
    smallest, largest = smallest_step(scale), largest_step(bits, scale)
    scale_is_fp32, scale_is_fp16, scale_nbytes = scale == "fp32", scale == "fp16", SCALE_NBYTES[scale]
    wide, middle, narrow = (*PLANES[bits], 0, 0)[:3]

    def kernel(scales, codes, before, out, group):  # type: ignore[no-untyped-def]
        num_values = out.size
        block = block_of(group)
        unpacked = np.empty(min(block, num_values), np.uint8)
        is_good = True
        offset = 0
        scale_at = 0
        for block_start in range(0, num_values, block):
            block_end = min(block_start + block, num_values)
            length = block_end - block_start
            unpacked[:length] = 0
            offset, is_padded = unpack_plane(codes, offset, length, 0, wide, unpacked)
            is_good &= is_padded
            if middle:
                offset, is_padded = unpack_plane(codes, offset, length, wide, middle, unpacked)
                is_good &= is_padded
            if narrow:
                offset, is_padded = unpack_plane(codes, offset, length, wide + middle, narrow, unpacked)
                is_good &= is_padded
            for start in range(block_start, block_end, group):
                length = min(start + group, block_end) - start
                pattern = np.uint32(0)
                for byte in range(scale_nbytes):
                    pattern = np.uint32(pattern | (np.uint32(scales[scale_at + byte]) << np.uint32(8 * byte)))
                scale_at += scale_nbytes
                step = scale_value(pattern, scale_is_fp32, scale_is_fp16)
                is_good &= pattern == np.uint32(0) or (step >= smallest and step <= largest)
                at = start - block_start
                for i in range(length):
                    change = (np.float32(unpacked[at + i]) + centre) * step
                    if has_in:
                        out[start + i] = before[start + i] + change
                    else:
                        out[start + i] = change
        return is_good

    return _compile(kernel, _DECODE, f"decode{bits}_{scale}{'_from_message' if has_in else ''}")


@functools.cache
def _norms_kernel() -> Callable[..., Any]:
    def kernel(values, before, after, has_before):  # type: ignore[no-untyped-def]
        error = change = size = 0.0
        for i in range(values.size):
            value = np.float64(values[i])
            error += (value - after[i]) ** 2
            size += value**2
            if has_before:
                change += (value - before[i]) ** 2
        return error, change if has_before else size, size

    return _compile(kernel, _NORMS, "squared_norms")
