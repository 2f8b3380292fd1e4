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
_LANES = 16  # of a vector, and the sums that a squared error is folded from
_ACROSS = 4  # groups side by side, and steps tried
_SIGN = 0x80000000

UNKNOWN = -128
"""Stands for the pattern that scales count from while that is not known: all steps count, and scales are modulo 128."""

UNSENT = 0x81
"""Then, where levels are either, the scale of a group that is sent as no change: levels at half steps have no sign."""
_FLOATS, _INTS = ir.VectorType(_FLOAT, _LANES), ir.VectorType(_INT, _LANES)


def groups_at_once(group: int) -> int:
    """How many groups of this length `encode_fitted` takes, whole blocks of them; 0 for a length that it is not made for."""
    return {16: 2 * _ACROSS, 32: 2 * _ACROSS, 64: _ACROSS}.get(group, 0)


class _Unit(NamedTuple):
    """Four groups: where they are, and what is known of each before steps are tried."""

    start: ir.Value
    scale_at: ir.Value
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
    levels: Levels = "either" if flag & IS_EITHER else "zero"
    constants = grid(Layout(num_bits, length, "e4m3", fit="least_error", levels=levels))
    bottoms = [centre - constants.half for centre in ((0.0, 0.5) if flag & IS_EITHER else (0.0,))]

    def generate(context, builder, signature, args):
        memory = Memory(context, builder, signature, args)
        _, _, _, _, _, start, scale_at, offset, lowest, *_ = args
        lowest = broadcast(builder, lowest, _LANES)
        units = []
        for first in range(0, groups_at_once(length), _ACROSS):
            here = builder.add(start, start.type(first * length))
            scale_here = builder.add(scale_at, scale_at.type(first))
            units.append(_prepared(builder, memory, here, scale_here, lowest, length, flag, constants))
        chosen: list[tuple[ir.Value, ir.Value]] = []
        codes: list[ir.Value] = []
        for number, unit in enumerate(units):
            sums = _sums_of_squares(builder, unit, bottoms, constants)
            if number:
                codes += _write(builder, memory, units[number - 1], *chosen[-1], lowest, bottoms, flag, constants)
                offset = _pack(builder, memory, codes, offset, num_bits)
            never = splat(_FLOAT, float("inf"), _LANES)
            errors = [builder.select(unit.is_tried, builder.fmul(total, unit.weight), never) for total in sums]
            chosen.append(_best(builder, errors))
        codes += _write(builder, memory, units[-1], *chosen[-1], lowest, bottoms, flag, constants)
        _pack(builder, memory, codes, offset, num_bits)
        return _record(builder, memory, units, constants)

    arguments = (values, before, after, payload, seen, start, scale_at, offset, lowest, group, bits, flags)
    return nb.int32(*arguments), generate


def _prepared(builder, memory, start, scale_at, lowest, length, flag, constants: Grid) -> _Unit:
    differences = [
        [_difference(builder, memory, start, place, flag) for place in range(first, first + length, _LANES)]
        for first in range(0, _ACROSS * length, length)
    ]
    near, first, is_sent, is_negative = _first_steps(builder, differences, lowest, constants)
    tried, is_tried = _tried_steps(builder, first, is_sent, lowest, constants)
    inverse = builder.fdiv(splat(_FLOAT, 1.0, _LANES), tried)
    ratio = builder.fmul(tried, _of_each(builder, inverse, (0, 0, 0, 0)))
    weight = builder.fmul(ratio, ratio)
    return _Unit(start, scale_at, differences, near, first, is_sent, is_negative, is_tried, inverse, weight)


def _record(builder, memory, units, constants: Grid):
    """Add the largest magnitudes to `seen`; return the least upper bits of a step that may be tried, of a group that is sent."""
    largest = memory.load(4, ir.Constant(ir.IntType(64), 0), _LANES)
    least = splat(_INT, 0x7FF, _LANES)
    below = (constants.num_candidates - 1) * constants.candidate
    for unit in units:
        largest = builder.select(builder.icmp_unsigned(">", unit.near, largest), unit.near, largest)
        lower = builder.ashr(builder.sub(unit.first, splat(_INT, below, _LANES)), splat(_INT, 20, _LANES))
        is_less = builder.and_(unit.is_sent, builder.icmp_signed("<", lower, least))
        least = builder.select(is_less, lower, least)
    memory.store(4, ir.Constant(ir.IntType(64), 0), largest)
    function = ir.FunctionType(_INT, [_INTS])
    name = f"llvm.vector.reduce.smin.v{_LANES}i32"
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), [least])


def _write(builder, memory, unit: _Unit, index, is_between, lowest, bottoms, flag, constants: Grid):
    """Scales and messages of the steps chosen; return the codes."""
    none, zero, one = splat(_INT, 0, _LANES), splat(_FLOAT, 0.0, _LANES), splat(_FLOAT, 1.0, _LANES)
    first, is_sent = unit.first, unit.is_sent
    is_unknown = builder.icmp_signed("==", lowest, splat(_INT, UNKNOWN, _LANES))
    unsent = builder.select(is_unknown, splat(_INT, UNSENT, _LANES), none)
    chosen = builder.sub(first, builder.mul(index, splat(_INT, constants.candidate, _LANES)))
    has_sign = builder.and_(unit.is_negative, builder.not_(is_between))
    sign = builder.select(has_sign, splat(_INT, _SIGN, _LANES), none)
    pattern = builder.sub(builder.lshr(chosen, splat(_INT, 20, _LANES)), lowest)
    pattern = builder.and_(pattern, splat(_INT, 0x7F, _LANES))
    pattern = builder.or_(pattern, builder.lshr(sign, splat(_INT, 24, _LANES)))
    pattern = builder.or_(pattern, builder.zext(is_between, _INTS))
    pattern = shuffle(builder, builder.select(is_sent, pattern, unsent), range(0, _LANES, _ACROSS))
    memory.store(3, unit.scale_at, builder.trunc(pattern, ir.VectorType(_BYTE, _ACROSS)))

    step = builder.bitcast(builder.or_(chosen, sign), _FLOATS)
    inverse = builder.select(is_sent, builder.fdiv(one, builder.select(is_sent, step, one)), zero)
    step = builder.select(is_sent, step, zero)
    bottom = builder.select(is_between, splat(_FLOAT, bottoms[-1], _LANES), splat(_FLOAT, bottoms[0], _LANES))
    nearest = builder.fsub(splat(_FLOAT, 0.5, _LANES), bottom)
    codes = []
    for number, parts in enumerate(unit.differences):
        scale, offset, size, lower = (_lanes(builder, each, number) for each in (inverse, nearest, step, bottom))
        for difference in parts:
            position = builder.fadd(builder.fmul(difference, scale), offset)
            codes.append(builder.fptosi(_held(builder, position, 2 * constants.half - 1, True), _INTS))
            if flag & HAS_AFTER:
                here = builder.add(unit.start, unit.start.type((len(codes) - 1) * _LANES))
                change = builder.fmul(builder.fadd(builder.sitofp(codes[-1], _FLOATS), lower), size)
                message = memory.load(1, here, _LANES) if flag & HAS_BEFORE else None
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
                    piece = builder.lshr(code, splat(_INT, low, _LANES)) if low else code
                    if low + width < bits:
                        piece = builder.and_(piece, splat(_INT, 2**width - 1, _LANES))
                    piece = builder.shl(piece, splat(_INT, shift * width, _LANES)) if shift else piece
                    packed = piece if packed is None else builder.or_(packed, piece)
                memory.store(3, offset, builder.trunc(packed, _BYTES))
                offset = builder.add(offset, offset.type(_LANES))
            low += width
    return offset


def _difference(builder, memory, start, place, flag):
    here = builder.add(start, start.type(place))
    values = memory.load(0, here, _LANES)
    return builder.fsub(values, memory.load(1, here, _LANES)) if flag & HAS_BEFORE else values


def _first_steps(builder, differences, lowest, constants: Grid):
    """Bits of each group's first step, rounded upwards; whether a scale can say it; whether the extreme is positive."""

    def largest(compare):
        def of_two(left, right):
            return builder.select(compare(">", left, right), left, right)

        widest = []
        for parts in differences:
            patterns = [builder.bitcast(part, _INTS) for part in parts]
            for other in patterns[1:]:
                patterns[0] = of_two(patterns[0], other)
            widest.append(patterns[0])
        return _all_lanes(builder, _across(builder, widest, of_two), of_two)

    zero = splat(_INT, 0, _LANES)
    above, below = largest(builder.icmp_signed), largest(builder.icmp_unsigned)
    above = builder.select(builder.icmp_signed(">", above, zero), above, zero)
    magnitude = builder.and_(below, splat(_INT, _SIGN - 1, _LANES))
    below = builder.select(builder.icmp_signed("<", below, zero), magnitude, zero)
    is_negative = builder.icmp_signed(">", above, below)
    near = builder.bitcast(builder.select(is_negative, above, below), _FLOATS)
    step = builder.fmul(near, splat(_FLOAT, float(constants.near_factor), _LANES))
    limit = splat(_FLOAT, float(constants.largest), _LANES)
    step = builder.select(builder.fcmp_ordered("<", step, limit), step, limit)
    rest = (1 << constants.mantissa_drop) - 1
    first = builder.add(builder.bitcast(step, _INTS), splat(_INT, rest, _LANES))
    first = builder.and_(first, splat(_INT, 0xFFFFFFFF - rest, _LANES))
    is_sent = builder.fcmp_ordered(">=", step, splat(_FLOAT, float(constants.smallest), _LANES))
    return builder.bitcast(near, _INTS), first, builder.and_(is_sent, _is_counted(builder, first, lowest)), is_negative


def _is_counted(builder, pattern, lowest):
    return builder.icmp_signed(">", builder.ashr(pattern, splat(_INT, 20, _LANES)), lowest)


def _tried_steps(builder, first, is_sent, lowest, constants: Grid):
    """The steps, in the lanes of their group, and whether each is one; all are numbers that a scale holds exactly."""
    count = constants.num_candidates
    lower = ir.Constant(_INTS, [index * constants.candidate for index in range(_ACROSS)] * _ACROSS)
    is_one = ir.Constant(ir.VectorType(ir.IntType(1), _LANES), [index < count for index in range(_ACROSS)] * _ACROSS)
    tried = builder.sub(first, lower)
    smallest = splat(_INT, _bits(float(constants.smallest)), _LANES)
    is_tried = builder.and_(builder.icmp_signed(">=", tried, smallest), _is_counted(builder, tried, lowest))
    is_tried = builder.and_(builder.and_(is_tried, is_sent), is_one)
    return builder.select(is_tried, builder.bitcast(tried, _FLOATS), splat(_FLOAT, 1.0, _LANES)), is_tried


def _sums_of_squares(builder, unit: _Unit, bottoms, constants: Grid):
    """For each kind of levels, the squared errors of all groups and steps, in steps squared.

    Levels at zero have signed steps. Their sign is multiplied in, which is exact, whether or not the sum is fused with it.
    """
    sign = builder.select(unit.is_negative, splat(_FLOAT, -1.0, _LANES), splat(_FLOAT, 1.0, _LANES))
    signs = [_lanes(builder, sign, number) for number in range(_ACROSS)]
    folded: list[list[ir.Value]] = [[] for _ in bottoms]
    for index in range(constants.num_candidates):
        sums: list[list[ir.Value]] = [[] for _ in bottoms]
        for number, parts in enumerate(unit.differences):
            scale = _lane(builder, unit.inverse, 4 * number + index)
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
            folded[kind].append(_across(builder, each, builder.fadd))
    return [_to_lanes(builder, each) for each in folded]


def _farthest(index: int, constants: Grid) -> float:
    """A bound on the differences of a group, in the steps tried at `index`; one that is held under the largest is too small."""
    lower, drop = index * constants.candidate, constants.mantissa_drop
    firsts = range(127 << 23, 128 << 23, 1 << drop)
    held = float(np.finfo(np.float32).max) / constants.half / float(constants.largest)
    return constants.half * held * max(_float(first) / _float(first - lower) for first in firsts) * (1 + 2.0**-20)


def _float(pattern: int) -> float:
    return float(np.uint32(pattern).view(np.float32))


def _square(builder, exact, sign, bottom, constants: Grid, is_low):
    """The squared error of 16 lanes to their nearest levels. `is_low`: whether they may lie a step or more below the lowest.

    Truncation takes all that lies less than a step below it there anyway.
    """
    if constants.half == 1:  # two levels: one comparison
        signed = exact if sign is None else builder.fmul(exact, sign)
        is_upper = builder.fcmp_ordered(">=", signed, splat(_FLOAT, _least_of_upper(0.5 - bottom), _LANES))
        levels = (splat(_FLOAT, bottom + shift, _LANES) for shift in (1.0, 0.0))
        error = builder.fsub(signed, builder.select(is_upper, *levels))
        return builder.fmul(error, error)
    nearest = splat(_FLOAT, 0.5 - bottom, _LANES)
    position = builder.fadd(exact, nearest) if sign is None else _multiplied_added(builder, exact, sign, nearest)
    codes = _truncated(builder, _held(builder, position, 2 * constants.half - 1, is_low))
    level = builder.fadd(codes, splat(_FLOAT, bottom, _LANES))
    error = _multiplied_added(builder, builder.fneg(level), sign, exact) if sign is not None else builder.fsub(exact, level)
    return builder.fmul(error, error)


def _least_of_upper(nearest: float) -> float:
    """The least float32 whose sum with `nearest`, as float32 has it, is 1 or more; one below 0, or 0."""
    holds, fails = 0, _bits(2.0)  # bits of its magnitude
    while fails - holds > 1:
        middle = (holds + fails) // 2
        if np.float32(nearest) - np.float32(_float(middle)) >= 1:
            holds = middle
        else:
            fails = middle
    return -_float(holds)


def _held(builder, position, top, is_low):
    """To top at most and, if `is_low`, to 0 at least. As integers, which leaves the adders to the sums: no NaN comes here."""
    bits = builder.bitcast(position, _INTS)
    bounds = [("<", _bits(top))] + [(">", 0)] * is_low
    for comparison, bound in bounds:
        limit = splat(_INT, bound, _LANES)
        bits = builder.select(builder.icmp_signed(comparison, bits, limit), bits, limit)
    return builder.bitcast(bits, _FLOATS)


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def _multiplied_added(builder, vector, factor, other):
    """Vector * factor + other, for an exact product."""
    function = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    name = f"llvm.fmuladd.v{_LANES}f32"
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), [vector, factor, other])


def _truncated(builder, vector):
    function = ir.FunctionType(_FLOATS, [_FLOATS])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, f"llvm.trunc.v{_LANES}f32"), [vector])


def _best(builder, errors):
    """Of each group, the first of the least errors: its place among the steps, and whether its levels are the second kind."""

    def least_of_two(left, right):
        return builder.select(builder.fcmp_ordered("<", left, right), left, right)

    def first_of_two(left, right):
        return builder.select(builder.icmp_signed("<", left, right), left, right)

    least = [_all_lanes(builder, each, least_of_two) for each in errors]
    best, value = errors[0], least[0]
    is_between = ir.Constant(ir.VectorType(ir.IntType(1), _LANES), [False] * _LANES)
    if len(errors) > 1:
        is_between = builder.fcmp_ordered("<", least[1], least[0])
        best, value = builder.select(is_between, errors[1], best), builder.select(is_between, least[1], value)
    index = ir.Constant(_INTS, [*range(_ACROSS)] * _ACROSS)
    index = builder.select(builder.fcmp_ordered("==", best, value), index, splat(_INT, _ACROSS, _LANES))
    return _all_lanes(builder, index, first_of_two), is_between


def _across(builder, vectors, operation):
    """Vectors of one group each, folded twice in halves, into four lanes for each group."""
    first, second, third, fourth = vectors
    left, right = (
        operation(_of_both(builder, *pair, range(8)), _of_both(builder, *pair, range(8, 16)))
        for pair in ((first, second), (third, fourth))
    )
    lower, upper = (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)
    return operation(_of_both(builder, left, right, lower), _of_both(builder, left, right, upper))


def _to_lanes(builder, folded):
    """What `_across` made for each step tried, folded to the end, into the lanes of the steps."""

    def fold(left, right, halves):
        orders = (
            [4 * number + lane + shift for number in range(_ACROSS) for shift in (0, _LANES) for lane in half]
            for half in halves
        )
        return builder.fadd(*(builder.shuffle_vector(left, right, ir.Constant(_INTS, order)) for order in orders))

    steps = [folded[min(index, len(folded) - 1)] for index in range(_ACROSS)]
    pairs = [fold(left, right, ((0, 1), (2, 3))) for left, right in (steps[:2], steps[2:])]
    return fold(pairs[0], pairs[1], ((0, 2), (1, 3)))


def _all_lanes(builder, vector, operation):
    """The lanes of each group combined, the result in all of them."""
    vector = operation(vector, _of_each(builder, vector, (2, 3, 0, 1)))
    return operation(vector, _of_each(builder, vector, (1, 0, 3, 2)))


def _of_each(builder, vector, lanes):
    return shuffle(builder, vector, [4 * number + lane for number in range(_ACROSS) for lane in lanes])


def _of_both(builder, left, right, lanes):
    order = [lane + shift for shift in (0, _LANES) for lane in lanes]
    return builder.shuffle_vector(left, right, ir.Constant(_INTS, order))


def _lanes(builder, vector, number):
    """The four lanes of a group, which are alike, four times: less work than to take one of them."""
    return shuffle(builder, vector, [*range(4 * number, 4 * number + 4)] * _ACROSS)


def _lane(builder, vector, lane):
    return shuffle(builder, vector, [lane] * _LANES)
