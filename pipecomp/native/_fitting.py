"""Steps of least error for a few groups at once, for Numba kernels. Knows the grid, blocks of codes, pointers and lanes.

All that is tried stays in registers: first differences, 16 lanes of one group; then what a group has one of, in four lanes for
each of four groups, a lane for each step tried. Sums of all groups are folded side by side, each in the contract's order.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN202, ARG001 - what Numba compiles is typed by Numba

from __future__ import annotations

from typing import NamedTuple

import numba as nb
import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from pipecomp.native._lanes import (
    ACROSS,
    FLOATS,
    INTS,
    LANES,
    across,
    all_lanes,
    bits_of,
    float_of,
    held,
    lanes_of,
    multiplied_added,
    of_each,
    one_lane,
    to_lanes,
    truncated,
)  # fmt: skip
from pipecomp.native._vectors import (
    HAS_AFTER,
    HAS_BEFORE,
    IS_EITHER,
    Memory,
    broadcast,
    shuffle,
    splat,
)
from pipecomp.native.ops import MIN_BLOCK, PLANES, Grid, Layout, Levels, grid

_FLOAT, _INT, _BYTE = ir.FloatType(), ir.IntType(32), ir.IntType(8)
_BYTES, _VECTORS = ir.VectorType(_BYTE, 16), MIN_BLOCK // 16  # of codes, and in a block
_SIGN = 0x80000000

MARKED = 2 * ACROSS
"""Groups that `mark_groups` takes at once."""

UNKNOWN = -128
"""Stands for the pattern that scales count from while that is not known: all steps count, and scales are modulo 128."""

UNSENT = 0x81
"""Then, where levels are either, the scale of a group that is sent as no change: levels at half steps have no sign."""


def groups_at_once(group: int) -> int:
    """How many groups of this length `encode_fitted` takes, whole blocks of them; 0 for a length that it is not made for."""
    return {16: 2 * ACROSS, 32: 2 * ACROSS, 64: ACROSS}.get(group, 0)


class _Unit(NamedTuple):
    """Four groups: where they are, and what is known of each before steps are tried."""

    starts: list[ir.Value]  # of each group, in values
    scales_at: list[ir.Value]  # of each group; of the first alone, if the others' follow
    differences: list[list[ir.Value]]
    near: ir.Value
    first: ir.Value
    is_sent: ir.Value
    is_negative: ir.Value
    is_tried: ir.Value
    inverse: ir.Value
    weight: ir.Value


@intrinsic(prefer_literal=True)
def encode_fitted(
    typing_context, values, before, after, payload, seen, start, scale_at, offset, lowest, group, bits, flags
):  # fmt: skip
    """e4m3 scales, codes and messages of the `groups_at_once(group)` groups at `values[start:]`.

    `scale_at`, `offset`: of their scales and of their codes in `payload`. `lowest`: the pattern that scales count from, or
    UNKNOWN. `seen`, (16,) uint32, gets the bits of the largest magnitudes; returned are the least upper 12 bits of a step that
    may be tried. Values that are not finite do no harm but that the outputs are undefined.
    `group` is a literal. Of two units, each is written when the other's sums are on their way: none waits for a choice.
    """
    flag, length, num_bits = flags.literal_value, group.literal_value, bits.literal_value

    def generate(context, builder, signature, args):
        memory = Memory(context, builder, signature, args)
        _, _, _, _, _, start, scale_at, offset, lowest, *_ = args
        lowest = broadcast(builder, lowest, LANES)
        places = []
        for first in range(0, groups_at_once(length), ACROSS):
            starts = [builder.add(start, start.type((first + number) * length)) for number in range(ACROSS)]
            places.append((starts, [builder.add(scale_at, scale_at.type(first))], None))
        constants = _constants(num_bits, length, flag)
        units = _encode(builder, memory, places, offset, lowest, lowest, constants, length, num_bits, flag)
        return _record(builder, memory, units, constants)

    arguments = (values, before, after, payload, seen, start, scale_at, offset, lowest, group, bits, flags)
    return nb.int32(*arguments), generate


@intrinsic(prefer_literal=True)
def encode_gathered(
    typing_context, values, before, after, payload, groups, marks, turn, scale_at, offset, lowest, floor, group, bits, flags
):  # fmt: skip
    """The same for the groups with the numbers `groups[turn:]`; `scale_at`: of the first of all scales.

    `marks`: by group, what `mark_groups` writes. `floor`: the scale of a step tried, but of the first, must be larger.
    """
    flag, length, num_bits = flags.literal_value, group.literal_value, bits.literal_value

    def generate(context, builder, signature, args):
        memory = Memory(context, builder, signature, args)
        _, _, _, _, _, _, turn, scale_at, offset, lowest, floor, *_ = args
        lowest, floor = (broadcast(builder, each, LANES) for each in (lowest, floor))
        is_other = ir.Constant(INTS, [min(lane % ACROSS, 1) for lane in range(LANES)])
        least = builder.add(lowest, builder.mul(floor, is_other))
        places = []
        for first in range(0, groups_at_once(length), ACROSS):
            numbers = [memory.scalar(4, builder.add(turn, turn.type(first + number))) for number in range(ACROSS)]
            starts = [builder.mul(number, number.type(length)) for number in numbers]
            mark = ir.Constant(ir.VectorType(_INT, ACROSS), ir.Undefined)
            for number, index in enumerate(numbers):
                mark = builder.insert_element(mark, memory.scalar(5, index), _INT(number))
            order = [lane // ACROSS for lane in range(LANES)]
            mark = builder.shuffle_vector(mark, mark, ir.Constant(INTS, order))
            places.append((starts, [builder.add(scale_at, number) for number in numbers], mark))
        constants = _constants(num_bits, length, flag)
        _encode(builder, memory, places, offset, lowest, least, constants, length, num_bits, flag)
        return context.get_dummy_value()

    arguments = (
        values, before, after, payload, groups, marks, turn, scale_at, offset, lowest, floor, group, bits, flags,
    )  # fmt: skip
    return nb.void(*arguments), generate


@intrinsic(prefer_literal=True)
def mark_groups(typing_context, values, before, marks, first, worst, group, flags):
    """Bits of the largest magnitudes of the MARKED groups from number `first` on, with the sign bit where it is positive's.

    `worst`, (16,) uint32, gets the largest of all.
    """
    flag, length = flags.literal_value, group.literal_value

    def generate(context, builder, signature, args):
        memory = Memory(context, builder, signature, args)
        first = args[3]
        largest = memory.load(4, ir.Constant(ir.IntType(64), 0), LANES)
        for start in range(0, MARKED, ACROSS):
            here = builder.add(first, first.type(start))
            at = builder.mul(here, here.type(length))
            differences = [
                [_difference(builder, memory, at, place, flag) for place in range(number, number + length, LANES)]
                for number in range(0, ACROSS * length, length)
            ]
            near, is_positive = _nearest_extremes(builder, differences)
            largest = builder.select(builder.icmp_unsigned(">", near, largest), near, largest)
            sign = builder.select(is_positive, splat(_INT, _SIGN, LANES), splat(_INT, 0, LANES))
            memory.store(2, here, shuffle(builder, builder.or_(near, sign), range(0, LANES, ACROSS)))
        memory.store(4, ir.Constant(ir.IntType(64), 0), largest)
        return context.get_dummy_value()

    return nb.void(values, before, marks, first, worst, group, flags), generate


def _constants(bits: int, length: int, flag: int) -> Grid:
    levels: Levels = "either" if flag & IS_EITHER else "zero"
    return grid(Layout(bits, length, "e4m3", fit="least_error", levels=levels))


def _encode(builder, memory, places, offset, lowest, least, constants: Grid, length, num_bits, flag) -> list[_Unit]:
    """Units of four groups each; `least`: the patterns, in the lanes of steps tried, that those must be above."""
    bottoms = [centre - constants.half for centre in ((0.0, 0.5) if flag & IS_EITHER else (0.0,))]
    units = [
        _prepared(builder, memory, place, lowest, least, length, flag, constants) for place in places
    ]
    chosen: list[tuple[ir.Value, ir.Value]] = []
    codes: list[ir.Value] = []
    for number, unit in enumerate(units):
        sums = _sums_of_squares(builder, unit, bottoms, constants)
        if number:
            codes += _write(builder, memory, units[number - 1], *chosen[-1], lowest, bottoms, flag, constants)
            offset = _pack(builder, memory, codes, offset, num_bits)
        never = splat(_FLOAT, float("inf"), LANES)
        errors = [builder.select(unit.is_tried, builder.fmul(total, unit.weight), never) for total in sums]
        chosen.append(_best(builder, errors))
    codes += _write(builder, memory, units[-1], *chosen[-1], lowest, bottoms, flag, constants)
    _pack(builder, memory, codes, offset, num_bits)
    return units


def _prepared(builder, memory, place, lowest, least, length, flag, constants: Grid) -> _Unit:
    starts, scales_at, mark = place
    differences = [
        [_difference(builder, memory, start, part, flag) for part in range(0, length, LANES)] for start in starts
    ]
    if mark is None:
        near, is_negative = _nearest_extremes(builder, differences)
    else:
        near = builder.and_(mark, splat(_INT, _SIGN - 1, LANES))
        is_negative = builder.icmp_signed("<", mark, splat(_INT, 0, LANES))
    first, is_sent = _first_steps(builder, near, lowest, constants)
    tried, is_tried = _tried_steps(builder, first, is_sent, least, constants)
    inverse = builder.fdiv(splat(_FLOAT, 1.0, LANES), tried)
    ratio = builder.fmul(tried, of_each(builder, inverse, (0, 0, 0, 0)))
    weight = builder.fmul(ratio, ratio)
    return _Unit(starts, scales_at, differences, near, first, is_sent, is_negative, is_tried, inverse, weight)


def _record(builder, memory, units, constants: Grid):
    """Add the largest magnitudes to `seen`; return the least upper bits of a step that may be tried, of a group that is sent."""
    largest = memory.load(4, ir.Constant(ir.IntType(64), 0), LANES)
    least = splat(_INT, 0x7FF, LANES)
    below = (constants.num_candidates - 1) * constants.candidate
    for unit in units:
        largest = builder.select(builder.icmp_unsigned(">", unit.near, largest), unit.near, largest)
        lower = builder.ashr(builder.sub(unit.first, splat(_INT, below, LANES)), splat(_INT, 20, LANES))
        is_less = builder.and_(unit.is_sent, builder.icmp_signed("<", lower, least))
        least = builder.select(is_less, lower, least)
    memory.store(4, ir.Constant(ir.IntType(64), 0), largest)
    function = ir.FunctionType(_INT, [INTS])
    name = f"llvm.vector.reduce.smin.v{LANES}i32"
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), [least])


def _write(builder, memory, unit: _Unit, index, is_between, lowest, bottoms, flag, constants: Grid):
    """Scales and messages of the steps chosen; return the codes."""
    none, zero, one = splat(_INT, 0, LANES), splat(_FLOAT, 0.0, LANES), splat(_FLOAT, 1.0, LANES)
    first, is_sent = unit.first, unit.is_sent
    is_unknown = builder.icmp_signed("==", lowest, splat(_INT, UNKNOWN, LANES))
    unsent = builder.select(is_unknown, splat(_INT, UNSENT, LANES), none)
    chosen = builder.sub(first, builder.mul(index, splat(_INT, constants.candidate, LANES)))
    has_sign = builder.and_(unit.is_negative, builder.not_(is_between))
    sign = builder.select(has_sign, splat(_INT, _SIGN, LANES), none)
    pattern = builder.sub(builder.lshr(chosen, splat(_INT, 20, LANES)), lowest)
    pattern = builder.and_(pattern, splat(_INT, 0x7F, LANES))
    pattern = builder.or_(pattern, builder.lshr(sign, splat(_INT, 24, LANES)))
    pattern = builder.or_(pattern, builder.zext(is_between, INTS))
    pattern = shuffle(builder, builder.select(is_sent, pattern, unsent), range(0, LANES, ACROSS))
    pattern = builder.trunc(pattern, ir.VectorType(_BYTE, ACROSS))
    if len(unit.scales_at) == 1:
        memory.store(3, unit.scales_at[0], pattern)
    else:
        for number, at in enumerate(unit.scales_at):
            memory.store_scalar(3, at, builder.extract_element(pattern, _INT(number)))

    step = builder.bitcast(builder.or_(chosen, sign), FLOATS)
    inverse = builder.select(is_sent, builder.fdiv(one, builder.select(is_sent, step, one)), zero)
    step = builder.select(is_sent, step, zero)
    bottom = builder.select(is_between, splat(_FLOAT, bottoms[-1], LANES), splat(_FLOAT, bottoms[0], LANES))
    nearest = builder.fsub(splat(_FLOAT, 0.5, LANES), bottom)
    codes = []
    for number, parts in enumerate(unit.differences):
        scale, offset, size, lower = (lanes_of(builder, each, number) for each in (inverse, nearest, step, bottom))
        for part, difference in enumerate(parts):
            position = builder.fadd(builder.fmul(difference, scale), offset)
            codes.append(builder.fptosi(held(builder, position, 2 * constants.half - 1, True), INTS))
            if flag & HAS_AFTER:
                here = builder.add(unit.starts[number], unit.starts[number].type(part * LANES))
                change = builder.fmul(builder.fadd(builder.sitofp(codes[-1], FLOATS), lower), size)
                message = memory.load(1, here, LANES) if flag & HAS_BEFORE else None
                memory.store(2, here, change if message is None else builder.fadd(message, change))
    return codes


def _pack(builder, memory, codes, offset, bits):
    """All planes of whole blocks, taken from `codes`; return the offset after them.

    A block is eight vectors. Byte i of a plane has the codes i, i + width * 16, i + 2 * width * 16, ...
    """
    while len(codes) >= _VECTORS:
        block, low = codes[:_VECTORS], 0
        del codes[:_VECTORS]
        for width in PLANES[bits]:
            for start in range(width):
                packed = None
                for shift, code in enumerate(block[start::width]):
                    piece = builder.lshr(code, splat(_INT, low, LANES)) if low else code
                    if low + width < bits:
                        piece = builder.and_(piece, splat(_INT, 2**width - 1, LANES))
                    piece = builder.shl(piece, splat(_INT, shift * width, LANES)) if shift else piece
                    packed = piece if packed is None else builder.or_(packed, piece)
                memory.store(3, offset, builder.trunc(packed, _BYTES))
                offset = builder.add(offset, offset.type(LANES))
            low += width
    return offset


def _difference(builder, memory, start, place, flag):
    here = builder.add(start, start.type(place))
    values = memory.load(0, here, LANES)
    return builder.fsub(values, memory.load(1, here, LANES)) if flag & HAS_BEFORE else values


def _nearest_extremes(builder, differences):
    """Bits of each group's largest magnitude, and whether it is that of a positive difference alone."""

    def largest(compare):
        def of_two(left, right):
            return builder.select(compare(">", left, right), left, right)

        widest = []
        for parts in differences:
            patterns = [builder.bitcast(part, INTS) for part in parts]
            for other in patterns[1:]:
                patterns[0] = of_two(patterns[0], other)
            widest.append(patterns[0])
        return all_lanes(builder, across(builder, widest, of_two), of_two)

    zero = splat(_INT, 0, LANES)
    above, below = largest(builder.icmp_signed), largest(builder.icmp_unsigned)
    above = builder.select(builder.icmp_signed(">", above, zero), above, zero)
    magnitude = builder.and_(below, splat(_INT, _SIGN - 1, LANES))
    below = builder.select(builder.icmp_signed("<", below, zero), magnitude, zero)
    is_negative = builder.icmp_signed(">", above, below)
    return builder.select(is_negative, above, below), is_negative


def _first_steps(builder, near, lowest, constants: Grid):
    """Bits of each group's first step, rounded upwards, and whether a scale can say it."""
    step = builder.fmul(builder.bitcast(near, FLOATS), splat(_FLOAT, float(constants.near_factor), LANES))
    limit = splat(_FLOAT, float(constants.largest), LANES)
    step = builder.select(builder.fcmp_ordered("<", step, limit), step, limit)
    rest = (1 << constants.mantissa_drop) - 1
    first = builder.add(builder.bitcast(step, INTS), splat(_INT, rest, LANES))
    first = builder.and_(first, splat(_INT, 0xFFFFFFFF - rest, LANES))
    is_sent = builder.fcmp_ordered(">=", step, splat(_FLOAT, float(constants.smallest), LANES))
    return first, builder.and_(is_sent, _is_counted(builder, first, lowest))


def _is_counted(builder, pattern, lowest):
    return builder.icmp_signed(">", builder.ashr(pattern, splat(_INT, 20, LANES)), lowest)


def _tried_steps(builder, first, is_sent, least, constants: Grid):
    """The steps, in the lanes of their group, and whether each is one; all are numbers that a scale holds exactly."""
    count = constants.num_candidates
    lower = ir.Constant(INTS, [index * constants.candidate for index in range(ACROSS)] * ACROSS)
    is_one = ir.Constant(ir.VectorType(ir.IntType(1), LANES), [index < count for index in range(ACROSS)] * ACROSS)
    tried = builder.sub(first, lower)
    smallest = splat(_INT, bits_of(float(constants.smallest)), LANES)
    is_tried = builder.and_(builder.icmp_signed(">=", tried, smallest), _is_counted(builder, tried, least))
    is_tried = builder.and_(builder.and_(is_tried, is_sent), is_one)
    return builder.select(is_tried, builder.bitcast(tried, FLOATS), splat(_FLOAT, 1.0, LANES)), is_tried


def _sums_of_squares(builder, unit: _Unit, bottoms, constants: Grid):
    """For each kind of levels, the squared errors of all groups and steps, in steps squared.

    Levels at zero have signed steps. Their sign is multiplied in, which is exact, whether or not the sum is fused with it.
    """
    sign = builder.select(unit.is_negative, splat(_FLOAT, -1.0, LANES), splat(_FLOAT, 1.0, LANES))
    signs = [lanes_of(builder, sign, number) for number in range(ACROSS)]
    folded: list[list[ir.Value]] = [[] for _ in bottoms]
    for index in range(constants.num_candidates):
        sums: list[list[ir.Value]] = [[] for _ in bottoms]
        for number, parts in enumerate(unit.differences):
            scale = one_lane(builder, unit.inverse, 4 * number + index)
            totals: list[ir.Value | None] = [None for _ in bottoms]
            for part in parts:
                exact = builder.fmul(part, scale)
                for kind, bottom in enumerate(bottoms):
                    is_low = _farthest(index, constants) >= 1.5 - bottom
                    square = _square(builder, exact, None if kind else signs[number], bottom, constants, is_low)
                    total = totals[kind]
                    totals[kind] = square if total is None else builder.fadd(total, square)
            for kind, total in enumerate(totals):
                sums[kind].append(total)
        for kind, each in enumerate(sums):
            folded[kind].append(across(builder, each, builder.fadd))
    return [to_lanes(builder, each) for each in folded]


def _farthest(index: int, constants: Grid) -> float:
    """A bound on the differences of a group, in the steps tried at `index`; one that is held under the largest is too small."""
    lower, drop = index * constants.candidate, constants.mantissa_drop
    firsts = range(127 << 23, 128 << 23, 1 << drop)
    excess = float(np.finfo(np.float32).max) / constants.half / float(constants.largest)
    return constants.half * excess * max(float_of(first) / float_of(first - lower) for first in firsts) * (1 + 2.0**-20)


def _square(builder, exact, sign, bottom, constants: Grid, is_low):
    """The squared error of 16 lanes to their nearest levels. `is_low`: whether they may lie a step or more below the lowest.

    Truncation takes all that lies less than a step below it there anyway.
    """
    if constants.half == 1:  # two levels: one comparison
        signed = exact if sign is None else builder.fmul(exact, sign)
        is_upper = builder.fcmp_ordered(">=", signed, splat(_FLOAT, _least_of_upper(0.5 - bottom), LANES))
        levels = (splat(_FLOAT, bottom + shift, LANES) for shift in (1.0, 0.0))
        error = builder.fsub(signed, builder.select(is_upper, *levels))
        return builder.fmul(error, error)
    nearest = splat(_FLOAT, 0.5 - bottom, LANES)
    position = builder.fadd(exact, nearest) if sign is None else multiplied_added(builder, exact, sign, nearest)
    codes = truncated(builder, held(builder, position, 2 * constants.half - 1, is_low))
    level = builder.fadd(codes, splat(_FLOAT, bottom, LANES))
    error = multiplied_added(builder, builder.fneg(level), sign, exact) if sign is not None else builder.fsub(exact, level)
    return builder.fmul(error, error)


def _least_of_upper(nearest: float) -> float:
    """The least float32 whose sum with `nearest`, as float32 has it, is 1 or more; one below 0, or 0."""
    holds, fails = 0, bits_of(2.0)  # bits of its magnitude
    while fails - holds > 1:
        middle = (holds + fails) // 2
        if np.float32(nearest) - np.float32(float_of(middle)) >= 1:
            holds = middle
        else:
            fails = middle
    return -float_of(holds)


def _best(builder, errors):
    """Of each group, the first of the least errors: its place among the steps, and whether its levels are the second kind."""

    def least_of_two(left, right):
        return builder.select(builder.fcmp_ordered("<", left, right), left, right)

    def first_of_two(left, right):
        return builder.select(builder.icmp_signed("<", left, right), left, right)

    least = [all_lanes(builder, each, least_of_two) for each in errors]
    best, value = errors[0], least[0]
    is_between = ir.Constant(ir.VectorType(ir.IntType(1), LANES), [False] * LANES)
    if len(errors) > 1:
        is_between = builder.fcmp_ordered("<", least[1], least[0])
        best, value = builder.select(is_between, errors[1], best), builder.select(is_between, least[1], value)
    index = ir.Constant(INTS, [*range(ACROSS)] * ACROSS)
    index = builder.select(builder.fcmp_ordered("==", best, value), index, splat(_INT, ACROSS, LANES))
    return all_lanes(builder, index, first_of_two), is_between
