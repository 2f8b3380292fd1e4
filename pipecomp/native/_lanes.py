"""Vectors of 16 lanes for a few groups side by side, for Numba kernels: four groups, four lanes each. Knows lanes, not values.

Folds go in halves, as the contract's sums do.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from pipecomp.native._vectors import shuffle, splat

LANES = 16  # of a vector, and the sums that a squared error is folded from
ACROSS = 4  # groups side by side, and steps tried

FLOATS, INTS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(32), LANES)


def across(builder, vectors, operation):
    """Vectors of one group each, folded twice in halves, into four lanes for each group."""
    first, second, third, fourth = vectors
    left, right = (
        operation(_of_both(builder, *pair, range(8)), _of_both(builder, *pair, range(8, 16)))
        for pair in ((first, second), (third, fourth))
    )
    lower, upper = (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)
    return operation(_of_both(builder, left, right, lower), _of_both(builder, left, right, upper))


def to_lanes(builder, folded):
    """What `_across` made for each step tried, folded to the end, into the lanes of the steps."""

    def fold(left, right, halves):
        orders = (
            [4 * number + lane + shift for number in range(ACROSS) for shift in (0, LANES) for lane in half]
            for half in halves
        )
        return builder.fadd(*(builder.shuffle_vector(left, right, ir.Constant(INTS, order)) for order in orders))

    steps = [folded[min(index, len(folded) - 1)] for index in range(ACROSS)]
    pairs = [fold(left, right, ((0, 1), (2, 3))) for left, right in (steps[:2], steps[2:])]
    return fold(pairs[0], pairs[1], ((0, 2), (1, 3)))


def all_lanes(builder, vector, operation):
    """The lanes of each group combined, the result in all of them."""
    vector = operation(vector, of_each(builder, vector, (2, 3, 0, 1)))
    return operation(vector, of_each(builder, vector, (1, 0, 3, 2)))


def of_each(builder, vector, lanes):
    return shuffle(builder, vector, [4 * number + lane for number in range(ACROSS) for lane in lanes])


def _of_both(builder, left, right, lanes):
    order = [lane + shift for shift in (0, LANES) for lane in lanes]
    return builder.shuffle_vector(left, right, ir.Constant(INTS, order))


def lanes_of(builder, vector, number):
    """The four lanes of a group, which are alike, four times: less work than to take one of them."""
    return shuffle(builder, vector, [*range(4 * number, 4 * number + 4)] * ACROSS)


def one_lane(builder, vector, lane):
    return shuffle(builder, vector, [lane] * LANES)


def held(builder, position, top, is_low):
    """To top at most and, if `is_low`, to 0 at least. As integers, which leaves the adders to the sums: no NaN comes here."""
    bits = builder.bitcast(position, INTS)
    bounds = [("<", bits_of(top))] + [(">", 0)] * is_low
    for comparison, bound in bounds:
        limit = splat(ir.IntType(32), bound, LANES)
        bits = builder.select(builder.icmp_signed(comparison, bits, limit), bits, limit)
    return builder.bitcast(bits, FLOATS)


def bits_of(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def float_of(pattern: int) -> float:
    return float(np.uint32(pattern).view(np.float32))


def multiplied_added(builder, vector, factor, other):
    """Vector * factor + other, for an exact product."""
    function = ir.FunctionType(FLOATS, [FLOATS] * 3)
    name = f"llvm.fmuladd.v{LANES}f32"
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), [vector, factor, other])


def truncated(builder, vector):
    function = ir.FunctionType(FLOATS, [FLOATS])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, f"llvm.trunc.v{LANES}f32"), [vector])
