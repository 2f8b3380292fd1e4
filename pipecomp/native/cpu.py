"""The kernels for processors, compiled by Numba. Knows only arrays; gives the bits of `reference`, and lets other threads run.

A kernel is specialized: bits, scale dtype, rounding and the presence of messages are constants in it. Each specialization is
one function with one signature and one name, hence one file in Numba's cache, so that processes which compile at the same
time never write each other's entries.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"
# ruff: noqa: ANN001, ANN201, ANN202, ANN401, ARG001 - what Numba compiles is typed by Numba

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numba as nb
import numpy as np
from numba.extending import overload

from pipecomp.native import _vectors, ops
from pipecomp.native._vectors import (
    HAS_AFTER,
    HAS_BEFORE,
    IS_STOCHASTIC,
    as_bits,
    as_float,
    dequantize,
    extremes,
    pack,
    quantize,
    unpack,
)
from pipecomp.native.ops import (
    MIN_BLOCK,
    PLANES,
    SCALE_NBYTES,
    ByteArray,
    FloatArray,
    Grid,
    Layout,
    Scale,
    grid,
)

_FLOATS_IN = nb.types.Array(nb.float32, 1, "C", readonly=True)
_FLOATS_OUT = nb.types.Array(nb.float32, 1, "C")
_BYTES_IN = nb.types.Array(nb.uint8, 1, "C", readonly=True)
_BYTES_OUT = nb.types.Array(nb.uint8, 1, "C")
_ENCODE = nb.boolean(_FLOATS_IN, _FLOATS_IN, _FLOATS_OUT, _BYTES_OUT, nb.int64, nb.uint32, nb.uint32)
_DECODE = nb.boolean(_BYTES_IN, _FLOATS_IN, _FLOATS_OUT, nb.int64)
_NORMS = nb.types.UniTuple(nb.float64, 3)(_FLOATS_IN, _FLOATS_IN, _FLOATS_IN, nb.boolean)
_NOTHING = np.empty(0, np.float32)
_SCALES: tuple[Scale, ...] = ("fp32", "bf16", "fp16")

FIXED_GROUPS = (16, 32, 64, 128, 256)
"""Groups whose length is a constant of their kernels; all others share one kernel, which takes it as an argument."""

MAX_LANES = 64
PADDING = 8  # codes past the end of a block that its last bytes have room for, at most 7


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
    """The same for the decoder, which heeds the rounding for one bit only."""
    return _encoding(layout) if layout.bits == 1 else _encoding(layout)._replace(rounding="nearest")


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
    for module in (ops, _vectors, sys.modules[__name__]):
        digest.update(Path(str(module.__file__)).read_bytes())
    return digest.hexdigest()[:12]


@nb.njit
def block_of(group):
    """`ops.block_length`, for kernels."""
    return group * ((MIN_BLOCK + group - 1) // group)


@nb.njit
def scale_pattern(step, smallest, is_fp32, is_fp16, is_up):
    """The bits, in the scale's dtype, of a step >= 0 that is at most the largest; by integers, so no target needs float16."""
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
def scale_value(pattern, is_fp32, is_fp16):
    """The float32 that a scale's bits stand for; NaN for what is not finite in its dtype."""
    if is_fp32:
        return as_float(pattern)
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
    values,
    before,
    after,
    payload,
    unpacked,
    start,
    at,
    length,
    scale_at,
    seed_low,
    seed_high,
    bits,
    scale,
    lanes,
    flags,
):
    """Scale, codes and message of one group; return the bits of its largest magnitude."""
    raise NotImplementedError("for kernels only")


@overload(encode_group, **_INLINE)
def _encode_group(
    values,
    before,
    after,
    payload,
    unpacked,
    start,
    at,
    length,
    scale_at,
    seed_low,
    seed_high,
    bits,
    scale,
    lanes,
    flags,
):
    num_lanes, num_bits, flag = lanes.literal_value, bits.literal_value, flags.literal_value
    is_fp32, is_fp16, scale_nbytes, constants = _constants(num_bits, scale.literal_value, flag)
    is_up, is_one_sided = bool(flag & IS_STOCHASTIC), constants.centre == 0
    near_factor, far_factor, smallest, largest = constants[2:]
    sign = np.uint32(1 << (8 * scale_nbytes - 1))

    def inlined(
        values,
        before,
        after,
        payload,
        unpacked,
        start,
        at,
        length,
        scale_at,
        seed_low,
        seed_high,
        bits,
        scale,
        lanes,
        flags,
    ):
        above, below = extremes(values, before, start, length, num_lanes, flag)
        below = np.uint32(below & np.uint32(0x7FFFFFFF)) if below > np.uint32(0x7FFFFFFF) else np.uint32(0)
        near, far = max(above, below), min(above, below)
        step = min(max(as_float(near) * near_factor, as_float(far) * far_factor), largest)
        pattern = scale_pattern(step, smallest, is_fp32, is_fp16, is_up)
        if is_one_sided and above > below and pattern > np.uint32(0):
            pattern = np.uint32(pattern | sign)
        write_scale(payload, scale_at, pattern, scale_nbytes)
        step = scale_value(pattern, is_fp32, is_fp16)
        inverse = np.float32(1) / step if step != np.float32(0) else np.float32(0)
        quantize(
            values,
            before,
            after,
            unpacked,
            start,
            at,
            length,
            step,
            inverse,
            seed_low,
            seed_high,
            num_bits,
            num_lanes,
            flag,
        )
        return near

    return inlined


def decode_group(payload, unpacked, before, out, scale_at, at, start, length, bits, scale, lanes, flags):
    """The values of one group; return whether its scale is one that an encoder writes."""
    raise NotImplementedError("for kernels only")


@overload(decode_group, **_INLINE)
def _decode_group(payload, unpacked, before, out, scale_at, at, start, length, bits, scale, lanes, flags):
    num_lanes, num_bits, flag = lanes.literal_value, bits.literal_value, flags.literal_value
    is_fp32, is_fp16, scale_nbytes, constants = _constants(num_bits, scale.literal_value, flag)
    smallest, largest = constants.smallest, constants.largest

    def inlined(payload, unpacked, before, out, scale_at, at, start, length, bits, scale, lanes, flags):
        pattern = read_scale(payload, scale_at, scale_nbytes)
        step = scale_value(pattern, is_fp32, is_fp16)
        dequantize(unpacked, before, out, at, start, length, step, num_bits, num_lanes, flag)
        magnitude = abs(step)
        return (pattern == np.uint32(0)) | ((magnitude >= smallest) & (magnitude <= largest))

    return inlined


def _constants(bits: int, scale_index: int, flags: int) -> tuple[bool, bool, int, Grid]:
    """(is fp32, is fp16, bytes of a scale, grid) of what a kernel's literals stand for."""
    scale = _SCALES[scale_index]
    layout = Layout(bits, 1, scale, "stochastic" if flags & IS_STOCHASTIC else "nearest")
    return scale == "fp32", scale == "fp16", SCALE_NBYTES[scale], grid(layout)


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


@functools.cache
def _encode_kernel(layout: Layout, has_in: bool, has_out: bool) -> Callable[..., Any]:
    """`layout.group` is a constant of the kernel, or 0: then the kernel takes it as an argument."""
    bits, fixed_group, scale, rounding = layout
    flags = HAS_BEFORE * has_in | HAS_AFTER * has_out | IS_STOCHASTIC * (rounding == "stochastic")
    scale_index, scale_nbytes = _SCALES.index(scale), SCALE_NBYTES[scale]
    lanes = min(fixed_group or MAX_LANES, MAX_LANES)

    # Whole blocks first, where lengths are constants and loops unroll; then the last, short block, in the same order of bytes.
    def kernel(values, before, after, payload, any_group, seed_low, seed_high):
        group = np.int64(fixed_group or any_group)
        block = block_of(group)
        num_values = values.size
        unpacked = np.empty(min(block, num_values) + PADDING, np.uint8)
        worst = np.uint32(0)
        scale_at, offset = np.int64(0), (num_values + group - 1) // group * scale_nbytes
        whole = num_values - num_values % block
        for block_start in range(0, whole, block):
            for at in range(0, block, group):
                largest = encode_group(
                    values, before, after, payload, unpacked, block_start + at, at, group, scale_at,
                    seed_low, seed_high, bits, scale_index, lanes, flags,
                )  # fmt: skip
                worst = max(worst, largest)
                scale_at += scale_nbytes
            offset = pack_block(unpacked, block, payload, offset, bits)
        for start in range(whole, num_values, group):
            largest = encode_group(
                values, before, after, payload, unpacked, start, start - whole, min(group, num_values - start), scale_at,
                seed_low, seed_high, bits, scale_index, lanes, flags,
            )  # fmt: skip
            worst = max(worst, largest)
            scale_at += scale_nbytes
        pack_block(unpacked, num_values - whole, payload, offset, bits)
        return worst < np.uint32(0x7F800000)

    name = f"encode{bits}_{scale}_{rounding}{'_from' * has_in}{'_to' * has_out}_g{fixed_group or 'any'}"
    return _compile(kernel, _ENCODE, name)


@functools.cache
def _decode_kernel(layout: Layout, has_in: bool) -> Callable[..., Any]:
    """As `_encode_kernel` has it."""
    bits, fixed_group, scale, rounding = layout
    flags = HAS_BEFORE * has_in | IS_STOCHASTIC * (rounding == "stochastic")
    scale_index, scale_nbytes = _SCALES.index(scale), SCALE_NBYTES[scale]
    lanes = min(fixed_group or MAX_LANES, MAX_LANES)

    def kernel(payload, before, out, any_group):
        group = np.int64(fixed_group or any_group)
        block = block_of(group)
        num_values = out.size
        unpacked = np.empty(min(block, num_values) + PADDING, np.uint8)
        is_good = True
        scale_at, offset = np.int64(0), (num_values + group - 1) // group * scale_nbytes
        whole = num_values - num_values % block
        for block_start in range(0, whole, block):
            offset, is_padded = unpack_block(payload, offset, unpacked, block, bits)
            is_good &= is_padded
            for at in range(0, block, group):
                is_good &= decode_group(
                    payload, unpacked, before, out, scale_at, at, block_start + at, group,
                    bits, scale_index, lanes, flags,
                )  # fmt: skip
                scale_at += scale_nbytes
        offset, is_padded = unpack_block(payload, offset, unpacked, num_values - whole, bits)
        is_good &= is_padded
        for start in range(whole, num_values, group):
            is_good &= decode_group(
                payload, unpacked, before, out, scale_at, start - whole, start, min(group, num_values - start),
                bits, scale_index, lanes, flags,
            )  # fmt: skip
            scale_at += scale_nbytes
        return is_good

    return _compile(kernel, _DECODE, f"decode{bits}_{scale}_{rounding}{'_from' * has_in}_g{fixed_group or 'any'}")


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
