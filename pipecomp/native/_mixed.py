"""Groups of mixed widths, for Numba kernels: which group has which, and kernels that keep three streams of codes. Knows places.

A place is the magnitude of an e4m3 scale as stored, 0 .. 127. All follows from how many groups have each: no sorting.
Nothing here is called from Python but the two makers of kernels.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN202, ARG001 - what Numba compiles is typed by Numba

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba as nb
import numpy as np
from numba.extending import overload

from pipecomp.native._fitting import MARKED, encode_gathered, groups_at_once, mark_groups
from pipecomp.native._groups import (
    _INLINE,
    PADDING,
    SCALES,
    block_of,
    decode_group,
    encode_known,
    extremes_of,
    lowest_pattern,
    pack_block,
    scale_pattern,
    top_exponent,
    unpack_block,
)
from pipecomp.native._vectors import FITS, HAS_AFTER, HAS_BEFORE, IS_EITHER, as_float, fetch_groups
from pipecomp.native.ops import APART, LEAST_MIXED_TOP, SHARES, Layout, grid

_NUM_PLACES = 128
_STRIDE = 128  # groups looked at for one width after the other, while they are in a near cache
_E4M3 = SCALES.index("e4m3")
_IS_ABOVE = np.uint32(0x80000000)  # with the bits of a largest magnitude: it is that of a positive difference


@nb.njit
def _share_of(counts, num_groups):
    """See `reference._share`."""
    wide, narrow, num_wide = _NUM_PLACES - 1, 0, 0
    wide_left, narrow_left = counts[wide], counts[narrow]
    while num_wide < num_groups // 2:
        while wide_left == 0:
            wide -= 1
            wide_left = counts[wide]
        while narrow_left == 0:
            narrow += 1
            narrow_left = counts[narrow]
        if wide <= narrow + APART:
            break
        num_more = min(wide_left, narrow_left, num_groups // 2 - num_wide)
        wide_left, narrow_left, num_wide = wide_left - num_more, narrow_left - num_more, num_wide + num_more
    return (num_wide * SHARES + num_groups - 1) // num_groups if num_groups else 0


@nb.njit
def _ranked(counts, rank):
    """(place of the group with this rank, how many have a larger one); the largest has rank 0. (0, rank) if there is none."""
    above = 0
    for place in range(_NUM_PLACES - 1, -1, -1):
        if above + counts[place] > rank:
            return place, above
        above += counts[place]
    return 0, rank


@nb.njit
def _bounds(counts, num_groups, num_wide):
    """What `_widths` needs: (least place of a wide one, of them so many; largest of a narrow one, of them all but so many)."""
    if num_wide == 0:
        return _NUM_PLACES, 0, -1, 0
    wide, above_wide = _ranked(counts, num_wide - 1)
    narrow, above_narrow = _ranked(counts, num_groups - num_wide)
    return wide, num_wide - above_wide, narrow, num_groups - num_wide - above_narrow


@nb.njit
def _widths(places, bounds):
    """Turn places into 0 for a bit more, 1, or 2 for a bit less; of equal places, the first are the wide ones."""
    wide, wide_left, narrow, spared = bounds
    for index in range(places.size):
        place = np.int64(places[index])
        is_wide = (place > wide) | ((place == wide) & (wide_left > 0))
        is_narrow = (place < narrow) | ((place == narrow) & (spared <= 0))
        wide_left -= place == wide
        spared -= place == narrow
        places[index] = np.uint8(1) - np.uint8(is_wide) + np.uint8(is_narrow)  # without branches, which no one could foresee


def _put(
    values, before, after, payload, unpacked, index, length, at, offset, top, mark, floor, group, bits, lanes, flags,
):  # fmt: skip
    """Encode a group to `unpacked[at:]` and its scale; pack what is a whole block. Return the new `at` and `offset`."""
    raise NotImplementedError("for kernels only")


@overload(_put, **_INLINE)
def _put_overload(
    values, before, after, payload, unpacked, index, length, at, offset, top, mark, floor, group, bits, lanes, flags,
):  # fmt: skip
    num_bits, num_lanes, flag = bits.literal_value, lanes.literal_value, flags.literal_value

    def inlined(
        values, before, after, payload, unpacked, index, length, at, offset, top, mark, floor, group, bits, lanes, flags,
    ):  # fmt: skip
        is_above = (mark & _IS_ABOVE) != np.uint32(0)
        near = np.uint32(mark & np.uint32(0x7FFFFFFF))
        above, below = (near, np.uint32(0)) if is_above else (np.uint32(0), near)
        encode_known(
            values, before, after, payload, unpacked, index * group, at, length, np.int64(2) + index, index * group,
            top, above, below, floor, np.uint32(0), np.uint32(0), num_bits, _E4M3, num_lanes, flag,
        )  # fmt: skip
        at += length
        block = block_of(group)
        if at == block:
            offset, at = pack_block(unpacked, block, payload, offset, num_bits), np.int64(0)
        return at, offset

    return inlined


def _take(payload, unpacked, before, out, index, length, at, held, left, offset, top, group, bits, lanes, flags):
    """Decode a group; unpack a block first if none is left. Return whether all was good, and `at`, `held`, `left`, `offset`.

    `at` of `held` codes unpacked were taken; `left` are still packed.
    """
    raise NotImplementedError("for kernels only")


@overload(_take, **_INLINE)
def _take_overload(payload, unpacked, before, out, index, length, at, held, left, offset, top, group, bits, lanes, flags):
    num_bits, num_lanes, flag = bits.literal_value, lanes.literal_value, flags.literal_value

    def inlined(payload, unpacked, before, out, index, length, at, held, left, offset, top, group, bits, lanes, flags):
        is_good = True
        if at == held:
            held, at = min(left, block_of(group)), np.int64(0)
            left -= held
            offset, is_good = unpack_block(payload, offset, unpacked, held, num_bits)
        is_good &= decode_group(
            payload, unpacked, before, out, np.int64(2) + index, at, index * group, length, top,
            num_bits, _E4M3, num_lanes, flag,
        )  # fmt: skip
        return is_good, at + length, held, left, offset

    return inlined


def encoder(layout: Layout, has_in: bool, has_out: bool, max_lanes: int) -> Callable[..., Any]:
    """What is compiled; as for equal widths, `layout.group` may be 0."""
    bits, fixed_group = layout.bits, layout.group
    is_fitted = layout.fit != "extreme"
    flags = HAS_BEFORE * has_in | HAS_AFTER * has_out | FITS * is_fitted | IS_EITHER * (layout.levels == "either")
    lanes = min(fixed_group or max_lanes, max_lanes)
    at_once = groups_at_once(fixed_group) if is_fitted else 0
    middle, wide = (grid(layout._replace(bits=each, widths="equal")) for each in (bits, bits + 1))
    wide_bits, narrow_bits = bits + 1, bits - 1
    factor, smallest, limit, drop, is_up = (
        middle.near_factor, middle.smallest, middle.largest, middle.mantissa_drop, middle.rounds_up,
    )  # fmt: skip
    wide_factor, wide_smallest, wide_limit, wide_is_up = wide.near_factor, wide.smallest, wide.largest, wide.rounds_up
    is_vector = fixed_group in (16, 32, 64)

    def kernel(values, before, after, payload, any_group, seed_low, seed_high):
        group = np.int64(fixed_group or any_group)
        num_values, num_whole = values.size, values.size // group
        num_groups = (num_values + group - 1) // group
        marks = np.empty(num_groups, np.uint32)
        num_marked, worsts = np.int64(0), np.zeros(16, np.uint32)
        if is_vector:
            for index in range(num_whole // MARKED):
                mark_groups(values, before, marks, index * MARKED, worsts, fixed_group, flags)
            num_marked = num_whole // MARKED * MARKED
        worst = worsts.max()
        for index in range(num_marked, num_groups):
            start = index * group
            above, below = extremes_of(values, before, start, min(group, num_values - start), lanes, flags)
            near = max(above, below)
            worst = max(worst, near)
            marks[index] = np.uint32(near | (_IS_ABOVE if above > below else np.uint32(0)))
        if worst >= np.uint32(0x7F800000):
            return False
        top = top_exponent(worst, wide_factor, wide_smallest, wide_limit, drop, wide_is_up)
        if top > np.uint32(0):
            top = np.uint32(top + np.uint32(1))
        else:
            marks[:] = 0  # what no group of b + 1 bits can say, none says
        places, counts = np.empty(num_whole, np.uint8), np.zeros(_NUM_PLACES, np.int64)
        for index in range(num_whole):
            near = as_float(np.uint32(marks[index] & np.uint32(0x7FFFFFFF)))
            places[index] = scale_pattern(min(near * factor, limit), smallest, top, False, False, drop, is_up)
            counts[places[index]] += 1
        share = _share_of(counts, num_whole) if top >= np.uint32(LEAST_MIXED_TOP) else 0
        num_wide = num_whole * share // SHARES
        payload[0], payload[1] = np.uint8(top), np.uint8(share)
        wide_floor = np.uint32(_ranked(counts, num_wide)[0])
        middle_floor = np.uint32(_ranked(counts, num_whole - num_wide)[0])
        _widths(places, _bounds(counts, num_whole, num_wide))

        wide_top, narrow_top = np.uint32(top - np.uint32(1)), np.uint32(top + np.uint32(1))
        wide_lowest, lowest, narrow_lowest = lowest_pattern(wide_top), lowest_pattern(top), lowest_pattern(narrow_top)
        wide_offset = np.int64(2) + num_groups
        offset = wide_offset + num_wide * group * wide_bits // 8
        narrow_offset = payload.size - num_wide * group * narrow_bits // 8
        room_of_codes = min(block_of(group), num_values) + PADDING
        wide_codes, codes, narrow_codes = (
            np.empty(room_of_codes, np.uint8), np.empty(room_of_codes, np.uint8), np.empty(room_of_codes, np.uint8)
        )  # fmt: skip
        wide_at, at, narrow_at = np.int64(0), np.int64(0), np.int64(0)
        nothing = np.uint32(0)
        order, num_rest = np.empty(num_groups, np.int64), num_groups
        if at_once:
            turns = np.array([0, num_wide, num_whole - num_wide], np.int64)
            for index in range(num_whole):
                kind = places[index]
                order[turns[kind]] = index
                turns[kind] += 1
            ahead = np.int64(_STRIDE)
            turn, wide_turn, narrow_turn = num_wide, np.int64(0), num_whole - num_wide
            for end in range(_STRIDE, num_whole + _STRIDE, _STRIDE):
                while wide_turn + at_once <= num_wide and order[wide_turn + at_once - 1] < end:
                    fetch_groups(values, before, after, min(ahead, num_whole - at_once), at_once, fixed_group, flags)
                    ahead += at_once
                    encode_gathered(
                        values, before, after, payload, order, marks, wide_turn, np.int64(2), wide_offset, wide_lowest,
                        np.int32(wide_floor), fixed_group, wide_bits, flags,
                    )  # fmt: skip
                    wide_turn, wide_offset = wide_turn + at_once, wide_offset + at_once * group * wide_bits // 8
                while turn + at_once <= num_whole - num_wide and order[turn + at_once - 1] < end:
                    fetch_groups(values, before, after, min(ahead, num_whole - at_once), at_once, fixed_group, flags)
                    ahead += at_once
                    encode_gathered(
                        values, before, after, payload, order, marks, turn, np.int64(2), offset, lowest,
                        np.int32(middle_floor), fixed_group, bits, flags,
                    )  # fmt: skip
                    turn, offset = turn + at_once, offset + at_once * group * bits // 8
                while narrow_turn + at_once <= num_whole and order[narrow_turn + at_once - 1] < end:
                    fetch_groups(values, before, after, min(ahead, num_whole - at_once), at_once, fixed_group, flags)
                    ahead += at_once
                    encode_gathered(
                        values, before, after, payload, order, marks, narrow_turn, np.int64(2), narrow_offset, narrow_lowest,
                        np.int32(0), fixed_group, narrow_bits, flags,
                    )  # fmt: skip
                    narrow_turn, narrow_offset = narrow_turn + at_once, narrow_offset + at_once * group * narrow_bits // 8
            num_rest = np.int64(0)
            for first, last in ((wide_turn, num_wide), (turn, num_whole - num_wide), (narrow_turn, num_whole)):
                for index in range(first, last):
                    order[num_rest] = order[index]
                    num_rest += 1
            if num_groups > num_whole:
                order[num_rest] = num_whole
                num_rest += 1
        for turn in range(num_rest):
            index = order[turn] if at_once else turn
            kind = places[index] if index < num_whole else np.uint8(1)
            if kind == 1:
                length = min(group, num_values - index * group)
                at, offset = _put(
                    values, before, after, payload, codes, index, length, at, offset, top, marks[index], middle_floor,
                    group, bits, lanes, flags,
                )  # fmt: skip
            elif kind == 0:
                wide_at, wide_offset = _put(
                    values, before, after, payload, wide_codes, index, group, wide_at, wide_offset, wide_top,
                    marks[index], wide_floor, group, wide_bits, lanes, flags,
                )  # fmt: skip
            else:
                narrow_at, narrow_offset = _put(
                    values, before, after, payload, narrow_codes, index, group, narrow_at, narrow_offset, narrow_top,
                    marks[index], nothing, group, narrow_bits, lanes, flags,
                )  # fmt: skip
        pack_block(wide_codes, wide_at, payload, wide_offset, wide_bits)
        pack_block(codes, at, payload, offset, bits)
        pack_block(narrow_codes, narrow_at, payload, narrow_offset, narrow_bits)
        return True

    return kernel


def decoder(layout: Layout, has_in: bool, max_lanes: int) -> Callable[..., Any]:
    """As `encoder` has it."""
    bits, fixed_group = layout.bits, layout.group
    flags = HAS_BEFORE * has_in | IS_EITHER * (layout.levels == "either")
    lanes = min(fixed_group or max_lanes, max_lanes)
    wide_bits, narrow_bits = bits + 1, bits - 1
    mask = np.uint8(0x7E if layout.levels == "either" else 0x7F)

    def kernel(payload, before, out, any_group):
        group = np.int64(fixed_group or any_group)
        num_values, num_whole = out.size, out.size // group
        num_groups = (num_values + group - 1) // group
        if payload[0] == 255:
            return False
        top, num_wide = np.uint32(payload[0]), num_whole * np.int64(payload[1]) // SHARES
        wide_top, narrow_top = np.uint32(top - np.uint32(1)), np.uint32(top + np.uint32(1))
        places, counts = np.empty(num_whole, np.uint8), np.zeros(_NUM_PLACES, np.int64)
        for index in range(num_whole):
            places[index] = payload[2 + index] & mask
            counts[places[index]] += 1
        _widths(places, _bounds(counts, num_whole, num_wide))

        side = num_wide * group  # values that have a bit more, and as many that have one less
        wide_offset = np.int64(2) + num_groups
        offset = wide_offset + side * wide_bits // 8
        narrow_offset = payload.size - side * narrow_bits // 8
        room = min(block_of(group), num_values) + PADDING
        wide_codes, codes, narrow_codes = np.empty(room, np.uint8), np.empty(room, np.uint8), np.empty(room, np.uint8)
        wide_at, at, narrow_at = np.int64(0), np.int64(0), np.int64(0)
        wide_held, held, narrow_held = np.int64(0), np.int64(0), np.int64(0)
        wide_left, left, narrow_left = side, np.int64(num_values - 2 * side), side
        is_good = True
        for index in range(num_groups):
            kind = places[index] if index < num_whole else np.uint8(1)
            if kind == 1:
                length = min(group, num_values - index * group)
                is_fine, at, held, left, offset = _take(
                    payload, codes, before, out, index, length, at, held, left, offset, top, group, bits, lanes, flags
                )
            elif kind == 0:
                is_fine, wide_at, wide_held, wide_left, wide_offset = _take(
                    payload, wide_codes, before, out, index, group, wide_at, wide_held, wide_left, wide_offset, wide_top,
                    group, wide_bits, lanes, flags,
                )  # fmt: skip
            else:
                is_fine, narrow_at, narrow_held, narrow_left, narrow_offset = _take(
                    payload, narrow_codes, before, out, index, group, narrow_at, narrow_held, narrow_left, narrow_offset,
                    narrow_top, group, narrow_bits, lanes, flags,
                )  # fmt: skip
            is_good &= is_fine
        return is_good

    return kernel
