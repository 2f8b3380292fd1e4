"""Rotation of whole groups for Numba kernels: signs, butterflies, and back. Knows pointers, lanes and the contract's signs.

A group is held in vectors of 16 lanes. Values fewer than 16 apart meet by shuffles in a vector, the others as whole vectors.
`start`, `length`: in elements, of type intp; the length is a constant of the kernel. `size` is the same as a literal.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN202, ARG001

from __future__ import annotations

import numba as nb
from llvmlite import ir
from numba.extending import intrinsic

from pipecomp.native._vectors import _FLOAT, _INT, HAS_BEFORE, Memory, shuffle, splat
from pipecomp.native.ops import SIGNS

_LANES = 16


@intrinsic(prefer_literal=True)
def rotate(typing_context, values, before, rotated, start, size, flags):
    """H (signs * differences) / size of the group at `values[start:]`, into `rotated[0:]`; see `reference.rotate`."""
    num_values, has_before = size.literal_value, flags.literal_value & HAS_BEFORE

    def generate(context, builder, signature, args):
        memory = Memory(context, builder, signature, args)
        vectors = []
        for at in range(0, num_values, _LANES):
            here = builder.add(args[3], args[3].type(at))
            differences = memory.load(0, here, _LANES)
            if has_before:
                differences = builder.fsub(differences, memory.load(1, here, _LANES))
            signed = builder.fmul(differences, _signs(at))
            vectors.append(builder.fmul(signed, splat(_FLOAT, 1 / num_values, _LANES)))
        for index, vector in enumerate(_butterflies(builder, vectors)):
            memory.store(2, args[3].type(index * _LANES), vector)
        return context.get_dummy_value()

    return nb.void(values, before, rotated, start, size, flags), generate


@intrinsic(prefer_literal=True)
def unrotate(typing_context, rotated, before, out, start, size, flags):
    """Signs * (H rotated), and the message where there is one, into the group at `out[start:]`; see `reference.unrotate`."""
    num_values, has_before = size.literal_value, flags.literal_value & HAS_BEFORE

    def generate(context, builder, signature, args):
        memory = Memory(context, builder, signature, args)
        places = range(0, num_values, _LANES)
        vectors = [memory.load(0, args[3].type(at), _LANES) for at in places]
        for at, vector in zip(places, _butterflies(builder, vectors), strict=True):
            here = builder.add(args[3], args[3].type(at))
            change = builder.fmul(vector, _signs(at))
            if has_before:
                change = builder.fadd(memory.load(1, here, _LANES), change)
            memory.store(2, here, change)
        return context.get_dummy_value()

    return nb.void(rotated, before, out, start, size, flags), generate


def _signs(at):
    return ir.Constant(ir.VectorType(_FLOAT, _LANES), [float(sign) for sign in SIGNS[at : at + _LANES]])


def _butterflies(builder, vectors):
    """Sum and difference of values 1 apart, then of those 2 apart, 4, ..., each rounded by itself."""
    apart = 1
    while apart < _LANES:
        vectors = [_within(builder, vector, apart) for vector in vectors]
        apart *= 2
    stride = 1
    while stride < len(vectors):
        mixed = list(vectors)
        for index, first in enumerate(vectors):
            if not index & stride:
                second = vectors[index + stride]
                mixed[index], mixed[index + stride] = builder.fadd(first, second), builder.fsub(first, second)
        vectors = mixed
        stride *= 2
    return vectors


def _within(builder, vector, apart):
    other = shuffle(builder, vector, [lane ^ apart for lane in range(_LANES)])
    sums, differences = builder.fadd(vector, other), builder.fsub(other, vector)
    order = [lane + _LANES if lane & apart else lane for lane in range(_LANES)]
    return builder.shuffle_vector(sums, differences, ir.Constant(ir.VectorType(_INT, _LANES), order))
