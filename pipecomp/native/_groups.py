"""One group and one block at a time, for Numba kernels: scales in their dtypes, codes in their planes. Knows arrays and the grid.

Scalar code, in front of the whole-vector statements of `_vectors`. Nothing here is called from Python.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN202, ARG001 - what Numba compiles is typed by Numba

from __future__ import annotations

import numba as nb
import numpy as np
from numba.extending import overload

from pipecomp.native._rotation import rotate, unrotate
from pipecomp.native._vectors import (
    FITS,
    HAS_AFTER,
    HAS_BEFORE,
    IS_EITHER,
    IS_STOCHASTIC,
    as_bits,
    as_float,
    dequantize,
    extremes,
    pack,
    quantize,
    squared_error,
    unpack,
)
from pipecomp.native.ops import (
    MIN_BLOCK,
    OCTAVES,
    PLANES,
    SCALE_NBYTES,
    Fit,
    Grid,
    Layout,
    Levels,
    Rounding,
    Scale,
    grid,
)

SCALES: tuple[Scale, ...] = ("fp32", "bf16", "fp16", "e4m3")
"""A kernel's literal for a scale dtype is its place here."""

PADDING = 8  # codes past the end of a block that its last bytes have room for, at most 7


@nb.njit
def block_of(group):
    """`ops.block_length`, for kernels."""
    return group * ((MIN_BLOCK + group - 1) // group)


@nb.njit
def scale_pattern(step, smallest, top, is_fp32, is_fp16, mantissa_drop, is_up):
    """The bits, in the scale's dtype, of a step >= 0 that is at most the largest; by integers, so no target needs float16.

    `mantissa_drop`: bits of a float32 that an e4m3 scale does not have; 0 for others. `top`: the exponent that it is relative
    to, of a step that is not smaller than this one.
    """
    if step < smallest:
        return np.uint32(0)
    pattern = as_bits(step)
    if is_fp32:
        return pattern
    drop = np.uint32(16)  # mantissa bits that bf16 does not have
    if mantissa_drop:
        drop = np.uint32(mantissa_drop)
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
        rounded = np.uint32((pattern + (unit - np.uint32(1))) >> drop)
    else:
        rounded = np.uint32((pattern + (unit >> np.uint32(1)) - np.uint32(1) + ((pattern >> drop) & np.uint32(1))) >> drop)
    if mantissa_drop:
        upper = np.int32(rounded << np.uint32(mantissa_drop - 20))
        return np.uint32(max(upper - lowest_pattern(top), np.int32(0)))
    return rounded


@nb.njit
def lowest_pattern(top):
    """Upper 12 bits of a float32 that an e4m3 scale counts from."""
    return np.int32((np.int32(top) + np.int32(1 - OCTAVES)) * np.int32(8))


@nb.njit
def top_exponent(largest, factor, smallest, limit, mantissa_drop, is_up):
    """Biased exponent of a bound on all steps of a sample whose largest magnitude has these bits; 0 if none can be sent."""
    step = min(as_float(largest) * factor, limit)
    if step < smallest:
        return np.uint32(0)
    pattern = as_bits(step)
    if is_up:
        return np.uint32((pattern + np.uint32((1 << mantissa_drop) - 1)) >> np.uint32(23))
    carry = np.uint32((1 << (mantissa_drop - 1)) - 1) + ((pattern >> np.uint32(mantissa_drop)) & np.uint32(1))
    return np.uint32((pattern + carry) >> np.uint32(23))


@nb.njit
def scale_value(pattern, top, is_fp32, is_fp16, is_e4m3):
    """The float32 that a scale's bits stand for; NaN for what is not finite in its dtype."""
    if is_fp32:
        return as_float(pattern)
    if is_e4m3:
        place = np.int32(pattern & np.uint32(0x7F))
        if place == np.int32(0):
            return np.float32(0)
        upper = place + lowest_pattern(top)
        if upper < np.int32(8) or upper >= np.int32(0x7F8):
            return np.float32(np.nan)
        sign = np.uint32((pattern & np.uint32(0x80)) << np.uint32(24))
        return as_float(np.uint32((np.uint32(upper) << np.uint32(20)) | sign))
    if is_fp16:
        sign = np.uint32((pattern & np.uint32(0x8000)) << np.uint32(16))
        pattern = np.uint32(pattern & np.uint32(0x7FFF))
        if pattern >= np.uint32(0x7C00):
            return np.float32(np.nan)
        if pattern < np.uint32(1 << 10):
            magnitude = as_bits(np.float32(pattern) * np.float32(2.0**-24))
        else:
            magnitude = np.uint32((pattern << np.uint32(13)) + np.uint32(112 << 23))
        return as_float(np.uint32(magnitude | sign))
    return as_float(np.uint32(pattern << np.uint32(16)))


@nb.njit
def write_scale(scales, offset, pattern, nbytes):
    """The low `nbytes` bytes of `pattern`, little-endian, to `scales[offset:]`."""
    for byte in range(nbytes):
        scales[offset + byte] = np.uint8((pattern >> np.uint32(8 * byte)) & np.uint32(0xFF))


@nb.njit
def read_scale(scales, offset, nbytes):
    """The inverse of `write_scale`."""
    pattern = np.uint32(0)
    for byte in range(nbytes):
        pattern = np.uint32(pattern | (np.uint32(scales[offset + byte]) << np.uint32(8 * byte)))
    return pattern


@nb.njit
def plane_nbytes(length, width):
    """Bytes of one plane of a block of `length` codes."""
    return (length * width + 7) // 8


# What follows is written once and compiled into each kernel with that kernel's constants: an overload is chosen by the
# types of its arguments, and the type of a literal holds its value. It costs no call: LLVM is told to inline it. Arguments
# that change are given as np.int64, so that 0 and a group's length do not make types, and compilations, of their own.
_INLINE = {"prefer_literal": True, "jit_options": {"forceinline": True}}


def encode_group(
    values, before, after, payload, unpacked, start, at, length, scale_at, place, top, seed_low, seed_high,
    bits, scale, lanes, flags,
):  # fmt: skip
    """Scale, codes and message of one group; return the bits of its largest magnitude."""
    raise NotImplementedError("for kernels only")


@overload(encode_group, **_INLINE)
def _encode_group(
    values, before, after, payload, unpacked, start, at, length, scale_at, place, top, seed_low, seed_high,
    bits, scale, lanes, flags,
):  # fmt: skip
    num_lanes, num_bits, scale_index, flag = (each.literal_value for each in (lanes, bits, scale, flags))

    def inlined(
        values, before, after, payload, unpacked, start, at, length, scale_at, place, top, seed_low, seed_high,
        bits, scale, lanes, flags,
    ):  # fmt: skip
        above, below = extremes_of(values, before, start, length, num_lanes, flag)
        encode_known(
            values, before, after, payload, unpacked, start, at, length, scale_at, place, top, above, below, np.uint32(0),
            seed_low, seed_high, num_bits, scale_index, num_lanes, flag,
        )  # fmt: skip
        return max(above, below)

    return inlined


def extremes_of(values, before, start, length, lanes, flags):
    """Bits of the largest magnitudes of a group's positive and of its negative differences; 0 where there is none."""
    raise NotImplementedError("for kernels only")


@overload(extremes_of, **_INLINE)
def _extremes_of(values, before, start, length, lanes, flags):
    num_lanes, flag = lanes.literal_value, flags.literal_value

    def inlined(values, before, start, length, lanes, flags):
        above, below = extremes(values, before, start, length, num_lanes, flag)
        return above, np.uint32(below & np.uint32(0x7FFFFFFF)) if below > np.uint32(0x7FFFFFFF) else np.uint32(0)

    return inlined


def encode_known(
    values, before, after, payload, unpacked, start, at, length, scale_at, place, top, above, below, floor,
    seed_low, seed_high, bits, scale, lanes, flags,
):  # fmt: skip
    """`encode_group` where the extremes are known. `floor`: the scale of a step tried, but of the first, must be larger."""
    raise NotImplementedError("for kernels only")


@overload(encode_known, **_INLINE)
def _encode_known(
    values, before, after, payload, unpacked, start, at, length, scale_at, place, top, above, below, floor,
    seed_low, seed_high, bits, scale, lanes, flags,
):  # fmt: skip
    num_lanes, num_bits, flag = lanes.literal_value, bits.literal_value, flags.literal_value
    is_fp32, is_fp16, is_e4m3, scale_nbytes, constants = constants_of(num_bits, scale.literal_value, flag)
    is_one_sided, drop = constants.centre == 0, constants.mantissa_drop * is_e4m3
    near_factor, far_factor, smallest, largest, is_up, num_candidates, candidate = constants[2:9]
    fixed_centre, is_fitted = np.float32(constants.centre), bool(flag & FITS)
    num_tried = num_candidates * (2 if flag & IS_EITHER else 1)
    sign = np.uint32(1 << (8 * scale_nbytes - 1))

    def inlined(
        values, before, after, payload, unpacked, start, at, length, scale_at, place, top, above, below, floor,
        seed_low, seed_high, bits, scale, lanes, flags,
    ):  # fmt: skip
        near, far = max(above, below), min(above, below)
        step = min(max(as_float(near) * near_factor, as_float(far) * far_factor), largest)
        pattern = scale_pattern(step, smallest, top, is_fp32, is_fp16, drop, is_up)
        centre = fixed_centre
        first = scale_value(pattern, top, is_fp32, is_fp16, is_e4m3)
        is_negative = is_one_sided and above > below and pattern > np.uint32(0)
        if is_negative:
            pattern = np.uint32(pattern | sign)
        step = scale_value(pattern, top, is_fp32, is_fp16, is_e4m3)
        inverse = np.float32(1) / step if step != np.float32(0) else np.float32(0)
        if is_fitted and first > np.float32(0):  # the pattern of a NaN may have been rounded to that of -0
            per_first, least = np.float32(1) / first, np.float32(np.inf)
            for index in range(num_tried):
                is_between = index >= num_candidates
                lower = np.uint32((index - num_candidates if is_between else index) * candidate)
                lower = np.uint32(as_bits(first) - np.uint32(min(lower, as_bits(first))))
                tried = scale_pattern(as_float(lower), smallest, top, is_fp32, is_fp16, drop, is_up)
                if tried > (floor if index % num_candidates else np.uint32(0)):
                    tried_step = scale_value(tried, top, is_fp32, is_fp16, is_e4m3)
                    ratio = tried_step * per_first
                    tried_centre = np.float32(0.5) if is_between else np.float32(0)
                    if is_between:
                        tried = np.uint32(tried | np.uint32(1))
                    elif is_negative:
                        tried, tried_step = np.uint32(tried | sign), -tried_step
                    tried_inverse = np.float32(1) / tried_step
                    error = squared_error(
                        values, before, start, length, tried_inverse, tried_centre, num_bits, flag
                    ) * (ratio * ratio)
                    if error < least:
                        least, pattern, step, inverse, centre = error, tried, tried_step, tried_inverse, tried_centre
        write_scale(payload, scale_at, pattern, scale_nbytes)
        quantize(
            values, before, after, unpacked, start, at, length, step, inverse, centre, place, seed_low, seed_high,
            num_bits, num_lanes, flag,
        )  # fmt: skip

    return inlined


def decode_group(payload, unpacked, before, out, scale_at, at, start, length, top, bits, scale, lanes, flags):
    """The values of one group; return whether its scale is one that an encoder writes."""
    raise NotImplementedError("for kernels only")


@overload(decode_group, **_INLINE)
def _decode_group(payload, unpacked, before, out, scale_at, at, start, length, top, bits, scale, lanes, flags):
    num_lanes, num_bits, flag = lanes.literal_value, bits.literal_value, flags.literal_value
    is_fp32, is_fp16, is_e4m3, scale_nbytes, constants = constants_of(num_bits, scale.literal_value, flag)
    smallest, largest, fixed_centre = constants.smallest, constants.largest, np.float32(constants.centre)
    is_either = bool(flag & IS_EITHER)

    def inlined(payload, unpacked, before, out, scale_at, at, start, length, top, bits, scale, lanes, flags):
        pattern = read_scale(payload, scale_at, scale_nbytes)
        centre, is_known = fixed_centre, True
        if is_either and pattern & np.uint32(1):
            pattern = np.uint32(pattern & np.uint32(0xFE))
            centre, is_known = np.float32(0.5), bool((pattern > np.uint32(0)) & (pattern < np.uint32(0x80)))
        step = scale_value(pattern, top, is_fp32, is_fp16, is_e4m3)
        dequantize(unpacked, before, out, at, start, length, step, centre, num_bits, num_lanes, flag)
        magnitude = abs(step)
        return is_known & ((pattern == np.uint32(0)) | ((magnitude >= smallest) & (magnitude <= largest)))

    return inlined


def encode_rotated(
    values, before, after, payload, unpacked, scratch, start, at, length, scale_at, top, seed_low, seed_high,
    bits, scale, lanes, flags,
):  # fmt: skip
    """`encode_group` of a rotated group; `scratch` holds it, and what it decodes to."""
    raise NotImplementedError("for kernels only")


@overload(encode_rotated, **_INLINE)
def _encode_rotated(
    values, before, after, payload, unpacked, scratch, start, at, length, scale_at, top, seed_low, seed_high,
    bits, scale, lanes, flags,
):  # fmt: skip
    num_bits, scale_index, size, flag = bits.literal_value, scale.literal_value, length.literal_value, flags.literal_value
    num_lanes, flat, has_after = lanes.literal_value, flag & ~HAS_BEFORE, bool(flag & HAS_AFTER)

    def inlined(
        values, before, after, payload, unpacked, scratch, start, at, length, scale_at, top, seed_low, seed_high,
        bits, scale, lanes, flags,
    ):  # fmt: skip
        rotate(values, before, scratch[0], start, size, flag)
        largest = encode_group(
            scratch[0], scratch[0], scratch[1], payload, unpacked, np.int64(0), at, np.int64(size), scale_at,
            start, top, seed_low, seed_high, num_bits, scale_index, num_lanes, flat,
        )  # fmt: skip
        if has_after:
            unrotate(scratch[1], before, after, start, size, flag)
        return largest

    return inlined


def decode_rotated(payload, unpacked, before, out, scratch, scale_at, at, start, length, top, bits, scale, lanes, flags):
    """`decode_group` of a rotated group."""
    raise NotImplementedError("for kernels only")


@overload(decode_rotated, **_INLINE)
def _decode_rotated(payload, unpacked, before, out, scratch, scale_at, at, start, length, top, bits, scale, lanes, flags):
    num_bits, scale_index, size, flag = bits.literal_value, scale.literal_value, length.literal_value, flags.literal_value
    num_lanes, flat = lanes.literal_value, flag & ~HAS_BEFORE

    def inlined(payload, unpacked, before, out, scratch, scale_at, at, start, length, top, bits, scale, lanes, flags):
        is_good = decode_group(
            payload, unpacked, scratch[0], scratch[0], scale_at, at, np.int64(0), np.int64(size), top,
            num_bits, scale_index, num_lanes, flat,
        )  # fmt: skip
        unrotate(scratch[0], before, out, start, size, flag)
        return is_good

    return inlined


def constants_of(bits: int, scale_index: int, flags: int) -> tuple[bool, bool, bool, int, Grid]:
    """(is fp32, is fp16, is e4m3, bytes of a scale, grid) of what a kernel's literals stand for."""
    scale = SCALES[scale_index]
    rounding: Rounding = "stochastic" if flags & IS_STOCHASTIC else "nearest"
    fit: Fit = "least_error" if flags & FITS else "extreme"
    levels: Levels = "either" if flags & IS_EITHER else "zero"
    layout = Layout(bits, 1, scale, rounding, fit, levels=levels)
    return scale == "fp32", scale == "fp16", scale == "e4m3", SCALE_NBYTES[scale], grid(layout)


def pack_block(unpacked, length, codes, offset, bits):
    """All planes of a block of `length` codes to `codes[offset:]`; return the offset after them."""
    raise NotImplementedError("for kernels only")


@overload(pack_block, **_INLINE)
def _pack_block(unpacked, length, codes, offset, bits):
    low, middle, high = (*PLANES[bits.literal_value], 0, 0)[:3]
    second, third = low, low + middle

    def inlined(unpacked, length, codes, offset, bits):
        if length % 8:
            for index in range(length, length + PADDING):
                unpacked[index] = 0
        nbytes = plane_nbytes(length, low)
        pack(unpacked, codes, offset, nbytes, 0, low)
        offset += nbytes
        if middle:
            nbytes = plane_nbytes(length, middle)
            pack(unpacked, codes, offset, nbytes, second, middle)
            offset += nbytes
        if high:
            nbytes = plane_nbytes(length, high)
            pack(unpacked, codes, offset, nbytes, third, high)
            offset += nbytes
        return offset

    return inlined


def unpack_block(codes, offset, unpacked, length, bits):
    """The inverse; return the offset after the block, and whether its padding bits are 0."""
    raise NotImplementedError("for kernels only")


@overload(unpack_block, **_INLINE)
def _unpack_block(codes, offset, unpacked, length, bits):
    low, middle, high = (*PLANES[bits.literal_value], 0, 0)[:3]
    second, third = low, low + middle

    def inlined(codes, offset, unpacked, length, bits):
        if length % 8:
            for index in range(length, length + PADDING):
                unpacked[index] = 0
        nbytes = plane_nbytes(length, low)
        unpack(codes, unpacked, offset, nbytes, 0, low)
        offset += nbytes
        if middle:
            nbytes = plane_nbytes(length, middle)
            unpack(codes, unpacked, offset, nbytes, second, middle)
            offset += nbytes
        if high:
            nbytes = plane_nbytes(length, high)
            unpack(codes, unpacked, offset, nbytes, third, high)
            offset += nbytes
        is_padded = True
        if length % 8:
            for index in range(length, length + PADDING):
                is_padded &= unpacked[index] == 0
        return offset, is_padded

    return inlined
