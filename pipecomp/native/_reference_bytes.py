"""Scales and codes as bytes, in plain NumPy: part of the oracle `reference`. Knows arrays and the contract's planes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pipecomp.native.ops import OCTAVES, PLANES, ByteArray, FloatArray, Layout, Scale, block_length, block_nbytes


def lowest_pattern(top: int) -> int:
    """Upper 12 bits of a float32 that an e4m3 scale counts from."""
    return (top + 1 - OCTAVES) * 8


def pack_scales(steps: FloatArray, scale: Scale, top: int = 0) -> ByteArray:
    """(num_groups,) fp32 that the dtype holds exactly -> little-endian bytes. `top`: what e4m3 scales are relative to."""
    if scale == "e4m3":
        patterns = (np.abs(steps).view(np.uint32) >> np.uint32(20)).astype(np.int64)
        places = np.where(steps != 0, patterns - lowest_pattern(top) + 128 * (steps < 0), 0)
        return np.concatenate([[top], places]).astype(np.uint8)
    if scale == "fp32":
        return steps.astype("<f4").view(np.uint8)
    if scale == "fp16":
        return steps.astype("<f2").view(np.uint8)
    return (steps.view(np.uint32) >> np.uint32(16)).astype("<u2").view(np.uint8)


def unpack_scales(scales: npt.NDArray[np.integer], scale: Scale) -> FloatArray:
    """Little-endian bytes -> (num_groups,) fp32; NaN for what no encoder writes."""
    if scale == "e4m3":
        places = scales[1:].astype(np.int64)
        patterns = (places & 127) + lowest_pattern(int(scales[0]))
        known = (places & 127 != 0) & (patterns >= 8) & (patterns < 0x7F8)
        steps = (np.where(known, patterns, 0) << 20).astype(np.uint32).view(np.float32)
        steps = np.where(known | (places == 0), steps, np.float32(np.nan))
        return np.where(places >= 128, -steps, steps)
    raw = scales.tobytes()
    if scale == "fp32":
        return np.frombuffer(raw, "<f4").astype(np.float32)
    if scale == "fp16":
        return np.frombuffer(raw, "<f2").astype(np.float32)
    return (np.frombuffer(raw, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def pack(unpacked: npt.NDArray[np.uint8], layout: Layout) -> ByteArray:
    """(n,) codes -> (codes_nbytes,) bytes, block by block, plane by plane (drawn in `ops`)."""
    length = block_length(layout.group)
    planes = [
        _pack_plane(unpacked[start : start + length] >> np.uint8(shift), width)
        for start in range(0, unpacked.size, length)
        for shift, width in _shifts(layout.bits)
    ]
    return np.concatenate(planes) if planes else np.empty(0, np.uint8)


def unpack(codes: ByteArray, num_values: int, layout: Layout) -> npt.NDArray[np.uint8]:
    """(codes_nbytes,) bytes -> (n,) codes."""
    length = block_length(layout.group)
    unpacked = np.zeros(num_values, np.uint8)
    offset = 0
    for start in range(0, num_values, length):
        block = unpacked[start : start + length]
        for shift, width in _shifts(layout.bits):
            nbytes = -(-block.size * width // 8)
            block |= _unpack_plane(codes[offset : offset + nbytes], block.size, width) << shift
            offset += nbytes
    assert offset == codes.size == _codes_nbytes(num_values, layout)
    return unpacked


def _codes_nbytes(num_values: int, layout: Layout) -> int:
    length = block_length(layout.group)
    return sum(block_nbytes(min(length, num_values - start), layout.bits) for start in range(0, num_values, length))


def _shifts(bits: int) -> list[tuple[int, int]]:
    """(lowest bit, width) of each plane."""
    widths = PLANES[bits]
    return [(sum(widths[:index]), width) for index, width in enumerate(widths)]


def _pack_plane(codes: npt.NDArray[np.uint8], width: int) -> ByteArray:
    nbytes = -(-codes.size * width // 8)
    plane = np.zeros(nbytes, np.uint8)
    for index, code in enumerate(codes & (2**width - 1)):
        plane[index % nbytes] |= code << (width * (index // nbytes))
    return plane


def _unpack_plane(plane: ByteArray, num_codes: int, width: int) -> npt.NDArray[np.uint8]:
    index = np.arange(num_codes)
    shift = (width * (index // max(plane.size, 1))).astype(np.uint8)
    return (plane[index % max(plane.size, 1)] >> shift) & np.uint8(2**width - 1)
