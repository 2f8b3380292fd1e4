"""The kernels in plain NumPy, slow and obviously right: the oracle for every other backend. Knows only arrays.

Each line is one operation rounded to fp32 by itself, in the order that the contract gives. Same signatures as the other
backends; arguments were checked by `ops`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pipecomp.native._reference_bytes import lowest_pattern, pack, pack_scales, unpack, unpack_scales
from pipecomp.native.ops import (
    APART,
    LEAST_MIXED_TOP,
    SHARES,
    SIGNS,
    ByteArray,
    FloatArray,
    Layout,
    codes_nbytes,
    grid,
    scales_nbytes,
)


def encode(
    values: FloatArray,
    layout: Layout,
    payload: ByteArray,
    message_in: FloatArray | None,
    message_out: FloatArray | None,
    seed: int,
) -> bool:
    """See `ops.encode`. False if a value or a difference is not finite; the outputs are then undefined."""
    with np.errstate(over="ignore", invalid="ignore"):
        differences = values if message_in is None else values - message_in
    if not np.isfinite(differences).all():
        return False
    change = _encode(differences, layout, payload, seed)
    if message_out is not None:
        message_out[:] = _moved(message_in, change)
    return True


def seen(values: FloatArray, layout: Layout, seed: int = 0) -> FloatArray:
    """What the decoder sees of finite `values` without a message: `encode` and `decode` without packing, which is slow here."""
    return _encode(values, layout, None, seed)


def decode(payload: ByteArray, layout: Layout, out: FloatArray, message_in: FloatArray | None) -> bool:
    """See `ops.decode`. False if the payload is one that no encoder writes."""
    split = scales_nbytes(out.size, layout)
    scales, codes = payload[:split], payload[split:]
    if layout.scale == "e4m3" and payload[0] == 255:
        return False
    decode_all = _decode_mixed if layout.widths == "mixed" else _decode
    change = decode_all(scales, codes, out.size, layout)
    if change is None:
        return False
    out[:] = _moved(message_in, change)
    return True


def _moved(message_in: FloatArray | None, change: FloatArray) -> FloatArray:
    with np.errstate(over="ignore"):  # within half a step of the largest float32; refused at the next visit
        return change if message_in is None else message_in + change


def _encode(differences: FloatArray, layout: Layout, payload: ByteArray | None, seed: int) -> FloatArray:
    """Write the payload, if there is one; return the change that it tells."""
    if layout.widths == "mixed":
        return _encode_mixed(differences, layout, payload)
    top = _top(differences, layout)
    unpacked, steps, centres = _quantize(differences, layout, top, seed)
    if payload is not None:
        split = scales_nbytes(differences.size, layout)
        payload[:split] = _pack_steps(steps, centres, layout, top)
        payload[split:] = pack(unpacked, layout)
    return _reconstruct(unpacked, steps, centres, layout)


def _pack_steps(steps: FloatArray, centres: FloatArray, layout: Layout, top: int) -> ByteArray:
    scales = pack_scales(steps, layout.scale, top)
    if layout.levels == "either":
        scales[1:] |= centres > 0
    return scales


def _decode(scales: npt.NDArray[np.integer], codes: ByteArray, num_values: int, layout: Layout) -> FloatArray | None:
    """The change that a payload tells; None if no encoder writes it."""
    centres = np.full(-(-num_values // layout.group), grid(layout).centre, np.float32)
    if layout.levels == "either":
        is_between = (scales[1:] & 1) == 1
        if (is_between & ((scales[1:] & 0xFE == 0) | (scales[1:] >= 128))).any():
            return None
        centres = np.where(is_between, np.float32(0.5), np.float32(0))
        scales = np.concatenate([scales[:1], scales[1:] & 0xFE])
    steps = unpack_scales(scales, layout.scale)
    with np.errstate(invalid="ignore"):
        in_range = (np.abs(steps) >= grid(layout).smallest) & (np.abs(steps) <= grid(layout).largest)
    zero = steps.view(np.uint32) == 0
    unpacked = unpack(codes, num_values, layout)
    if not (in_range | zero).all() or not np.array_equal(pack(unpacked, layout), codes):
        return None
    return _reconstruct(unpacked, steps, centres, layout)


def _encode_mixed(differences: FloatArray, layout: Layout, payload: ByteArray | None) -> FloatArray:
    """The groups of each width as a sample of their own, but for what scales are relative to."""
    equal, num_whole = layout._replace(widths="equal"), differences.size // layout.group
    top = _top(differences, equal._replace(bits=layout.bits + 1))
    top += top > 0
    if top == 0:  # what no group of b + 1 bits can say, none says, though the step of b bits might be sent
        differences = np.zeros_like(differences)
    firsts = _first_steps(differences, equal, top)[0]
    places = pack_scales(firsts, "e4m3", top)[1 : num_whole + 1].astype(np.int64)
    share = _share(places) if top >= LEAST_MIXED_TOP else 0
    ranked = np.append(np.sort(places)[::-1], 0)
    num_wide = num_whole * share // SHARES
    floors = (ranked[num_wide], ranked[num_whole - num_wide], 0)
    change = np.empty_like(differences)
    scales = np.zeros(firsts.size, np.uint8)
    codes = []
    for (piece, groups), floor in zip(_pieces(places, share, firsts.size, equal), floors, strict=True):
        where = np.repeat(groups, layout.group)[: differences.size]
        if groups.any():
            piece_top = top + layout.bits - piece.bits
            unpacked, steps, centres = _quantize(differences[where], piece, piece_top, 0, int(floor))
            change[where] = _reconstruct(unpacked, steps, centres, piece)
            scales[groups] = _pack_steps(steps, centres, piece, piece_top)[1:]
            codes += [pack(unpacked, piece)] if payload is not None else []
    if payload is not None:
        payload[:] = np.concatenate([np.array([top, share], np.uint8), scales, *codes])
    return change


def _decode_mixed(scales: ByteArray, codes: ByteArray, num_values: int, layout: Layout) -> FloatArray | None:
    equal, num_whole = layout._replace(widths="equal"), num_values // layout.group
    top, share, scales = int(scales[0]), int(scales[1]), scales[2:]
    places = (scales[:num_whole] & (0x7E if layout.levels == "either" else 0x7F)).astype(np.int64)
    change, offset = np.empty(num_values, np.float32), 0
    for piece, groups in _pieces(places, share, scales.size, equal):
        where = np.repeat(groups, layout.group)[:num_values]
        end = offset + codes_nbytes(int(where.sum()), piece)
        relative = np.concatenate([[top + layout.bits - piece.bits], scales[groups]])
        part = _decode(relative, codes[offset:end], int(where.sum()), piece)
        if part is None:
            return None
        change[where], offset = part, end
    return change


def _share(places: npt.NDArray[np.int64]) -> int:
    """How many groups, in parts of SHARES, have a bit more: the largest, as long as each is far above its mirror image."""
    ranked = np.sort(places)
    half = ranked.size // 2
    num_wide = int((ranked[::-1][:half] > ranked[:half] + APART).sum())
    return -(-num_wide * SHARES // max(ranked.size, 1))


def _pieces(
    places: npt.NDArray[np.int64], share: int, num_groups: int, layout: Layout
) -> list[tuple[Layout, npt.NDArray[np.bool_]]]:
    """Layout and groups of each width, wide ones first. A short last group, without a place, has the middle one."""
    ranked = np.argsort(-places, kind="stable")
    num_wide = places.size * share // SHARES
    widths = np.full(num_groups, layout.bits)
    widths[ranked[:num_wide]] += 1
    widths[ranked[places.size - num_wide :]] -= 1
    return [(layout._replace(bits=bits), widths == bits) for bits in (layout.bits + 1, layout.bits, layout.bits - 1)]


def squared_norms(
    values: FloatArray, message_in: FloatArray | None, message_out: FloatArray
) -> tuple[float, float, float]:
    """See `ops.squared_norms`."""
    wide = values.astype(np.float64)
    change = wide if message_in is None else wide - message_in
    error = wide - message_out
    return float(error @ error), float(change @ change), float(wide @ wide)


def _quantize(
    differences: FloatArray, layout: Layout, top: int, seed: int, floor: int = 0
) -> tuple[npt.NDArray[np.uint8], FloatArray, FloatArray]:
    """Codes; and of each group, its step and its centre."""
    half = np.float32(grid(layout).half)
    differences = rotate(differences, layout)
    steps, centres = _steps(differences, layout, top, floor)
    inverse = np.repeat(_inverse(steps), layout.group)[: differences.size]
    centre = np.repeat(centres, layout.group)[: differences.size]
    if layout.rounding == "nearest":
        position = differences * inverse + ((half + np.float32(0.5)) - centre)
    else:
        position = differences * inverse + (half - centre) + uniform(seed, differences.size)
    return np.clip(position, np.float32(0), np.float32(2**layout.bits - 1)).astype(np.uint8), steps, centres


def rotate(differences: FloatArray, layout: Layout) -> FloatArray:
    """H (signs * differences) / g for each whole group, by butterflies from neighbours outwards; the rest as it is."""
    if layout.rotation == "none":
        return differences
    whole = differences.size - differences.size % layout.group
    rows = differences[:whole].reshape(-1, layout.group) * _signs(layout) * np.float32(1 / layout.group)
    return np.concatenate([_butterflies(rows).reshape(-1), differences[whole:]])


def unrotate(change: FloatArray, layout: Layout) -> FloatArray:
    """Signs * (H change): H is its own inverse, but for a factor of g."""
    if layout.rotation == "none":
        return change
    whole = change.size - change.size % layout.group
    with np.errstate(over="ignore", invalid="ignore"):
        rows = _butterflies(change[:whole].reshape(-1, layout.group)) * _signs(layout)
    return np.concatenate([rows.reshape(-1), change[whole:]])


def _butterflies(rows: FloatArray) -> FloatArray:
    """Sum and difference of values 1 apart, of those 2 apart, 4 apart, ..."""
    apart = 1
    while apart < rows.shape[1]:
        pairs = rows.reshape(rows.shape[0], rows.shape[1] // (2 * apart), 2, apart)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        rows = np.stack([first + second, first - second], axis=2).reshape(rows.shape)
        apart *= 2
    return rows


def _signs(layout: Layout) -> FloatArray:
    return np.array(SIGNS[: layout.group], np.float32)


def _top(differences: FloatArray, layout: Layout) -> int:
    """Biased exponent of a bound on all steps, which e4m3 scales are relative to; 0 if no step can be sent."""
    constants = grid(layout)
    with np.errstate(over="ignore"):
        bound = np.abs(differences).max() * max(constants.near_factor, constants.far_factor)
    bound = min(bound, constants.largest)
    if bound < constants.smallest:
        return 0
    rounded = _round_to_scale(np.array([bound], np.float32), layout, up=constants.rounds_up)
    return int(rounded.view(np.uint32)[0] >> 23)


def _steps(differences: FloatArray, layout: Layout, top: int, floor: int) -> tuple[FloatArray, FloatArray]:
    """Of each group, the signed step, rounded to the scale's dtype, exactly the number that the decoder reads; and the centre.

    `floor`: a step that is tried, other than the first, must have a larger e4m3 scale than this.
    """
    constants = grid(layout)
    first, is_above = _first_steps(differences, layout, top)
    is_negative = is_above & (constants.centre == 0)
    best, centres = np.where(is_negative & (first > 0), -first, first), np.full_like(first, constants.centre)
    if layout.fit == "extreme":
        return best, centres
    least = np.full_like(first, np.inf)
    for tried_centre in (0.0, 0.5) if layout.levels == "either" else (0.0,):
        for index in range(constants.num_candidates):
            lower = np.uint32(index * constants.candidate)
            pattern = first.view(np.uint32)
            tried = np.where(pattern > lower, pattern - lower, np.uint32(0)).view(np.float32)
            tried = _rounded(tried, layout, top, floor if index else 0)
            ratio = tried * _inverse(first)
            tried = np.where(is_negative & (tried > 0) & (tried_centre == 0), -tried, tried)
            error = _squared_error(differences, tried, tried_centre, layout) * (ratio * ratio)
            is_better = (error < least) & (tried != 0)
            best, least = np.where(is_better, tried, best), np.where(is_better, error, least)
            centres = np.where(is_better, np.float32(tried_centre), centres)
    return best, centres


def _first_steps(differences: FloatArray, layout: Layout, top: int) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """Of each group, the step that follows from its extremes, and whether the largest of them is positive."""
    constants = grid(layout)
    starts = np.arange(0, differences.size, layout.group)
    above = np.maximum.reduceat(np.maximum(differences, np.float32(0)), starts)
    below = np.maximum.reduceat(np.maximum(-differences, np.float32(0)), starts)
    near, far = np.maximum(above, below), np.minimum(above, below)
    with np.errstate(over="ignore"):
        step = np.maximum(near * constants.near_factor, far * constants.far_factor)
    return _rounded(np.minimum(step, constants.largest), layout, top, 0), above > below


def _rounded(step: FloatArray, layout: Layout, top: int, floor: int) -> FloatArray:
    """What the scale's dtype can say; 0 for what it cannot, and where the e4m3 scale would not be above `floor`."""
    step = np.where(step < grid(layout).smallest, np.float32(0), step)
    step = _round_to_scale(step, layout, up=grid(layout).rounds_up)
    if layout.scale != "e4m3":
        return step
    place = (step.view(np.uint32) >> np.uint32(20)).astype(np.int64) - lowest_pattern(top)
    return np.where(place > floor, step, np.float32(0))


def _inverse(step: FloatArray) -> FloatArray:
    with np.errstate(divide="ignore"):
        return np.where(step != 0, np.float32(1) / step, np.float32(0))


def _squared_error(differences: FloatArray, steps: FloatArray, centre: float, layout: Layout) -> FloatArray:
    """(num_groups,) squared error in units of the step squared: 16 sums of every 16th value, folded in halves."""
    half = np.float32(grid(layout).half)
    step = np.repeat(steps, layout.group)[: differences.size]
    with np.errstate(over="ignore"):  # where steps are held under the largest; infinite errors are equally bad
        exact = differences * _inverse(step)
        position = exact + (half + np.float32(0.5 - centre))
        level = np.trunc(np.clip(position, np.float32(0), np.float32(2**layout.bits - 1))) + (np.float32(centre) - half)
        squares = (exact - level) * (exact - level)
    width = -(-layout.group // 16) * 16
    sums = np.zeros((steps.size, 16), np.float32)
    padded = np.zeros((steps.size, width), np.float32)
    for row, start in zip(padded, range(0, differences.size, layout.group), strict=True):
        row[: min(layout.group, differences.size - start)] = squares[start : start + layout.group]
    with np.errstate(over="ignore"):
        for start in range(0, width, 16):
            sums += padded[:, start : start + 16]
        while sums.shape[1] > 1:
            middle = sums.shape[1] // 2
            sums = sums[:, :middle] + sums[:, middle:]
    return sums[:, 0]


def _round_to_scale(step: FloatArray, layout: Layout, *, up: bool) -> FloatArray:
    """To the nearest number of the dtype, ties to even; or, `up`, to the smallest that is not below `step`."""
    scale = layout.scale
    if scale == "fp32":
        return step
    if scale == "fp16":
        rounded = step.astype(np.float16)
        if up:
            below = rounded.astype(np.float32) < step
            with np.errstate(over="ignore"):
                rounded = np.where(below, np.nextafter(rounded, np.float16(np.inf)), rounded)
        return rounded.astype(np.float32)
    bits, drop = step.view(np.uint32), np.uint32(grid(layout).mantissa_drop if scale == "e4m3" else 16)
    rest = (np.uint32(1) << drop) - np.uint32(1)
    carry = rest if up else (rest >> np.uint32(1)) + ((bits >> drop) & np.uint32(1))
    return ((bits + carry) & ~rest).view(np.float32)


def _reconstruct(
    unpacked: npt.NDArray[np.uint8], steps: FloatArray, centres: FloatArray, layout: Layout
) -> FloatArray:
    step, lowest = (np.repeat(each, layout.group)[: unpacked.size] for each in (steps, centres - np.float32(grid(layout).half)))
    level = unpacked.astype(np.float32) + lowest
    return unrotate(level * step, layout)


def uniform(seed: int, num_values: int) -> FloatArray:
    """(n,) fp32 in [0, 1), multiples of 2^-24: chance as a function of (seed, position), by 32-bit integer mixing."""
    low, high = np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32)
    mixed = np.arange(num_values, dtype=np.uint64).astype(np.uint32)
    mixed = mixed * np.uint32(0x9E3779B1) ^ low
    mixed = (mixed ^ (mixed >> np.uint32(16))) * np.uint32(0x7FEB352D)
    mixed ^= high
    mixed = (mixed ^ (mixed >> np.uint32(15))) * np.uint32(0x846CA68B)
    mixed = mixed ^ (mixed >> np.uint32(16))
    return (mixed >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
