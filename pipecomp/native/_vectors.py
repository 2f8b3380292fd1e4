"""Whole-vector statements for Numba kernels, as LLVM vectors of 16 to 64 lanes. Knows pointers and lanes, not the contract.

Left to itself the compiler unrolls loops as short as a group before it would vectorize them. Here a chunk of a group is one
value of vector type; LLVM cuts it into what the machine has (AVX-512, AVX2, SSE, NEON), and no target is depended on. No
fast-math flag is set and no multiply is fused with an add, so every lane has the bits of the scalar operations, in order.

`start`, `at`, `offset`, `length`: in elements, of type intp. `lanes`, `bits`, `shift`, `width`, `flags`: literals.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN202, ARG001

from __future__ import annotations

import numba as nb
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

HAS_BEFORE, HAS_AFTER, IS_STOCHASTIC, FITS, IS_EITHER = 1, 2, 4, 8, 16

_FLOAT, _INT, _BYTE = ir.FloatType(), ir.IntType(32), ir.IntType(8)


@intrinsic(prefer_literal=True)
def as_bits(typing_context, value):
    """The bits of a float32, as uint32."""
    return nb.uint32(nb.float32), lambda _, builder, __, args: builder.bitcast(args[0], _INT)


@intrinsic(prefer_literal=True)
def as_float(typing_context, bits):
    """The float32 with these 32 bits."""
    return nb.float32(nb.uint32), lambda _, builder, __, args: builder.bitcast(args[0], _FLOAT)


@intrinsic(prefer_literal=True)
def extremes(typing_context, values, before, start, length, lanes, flags):
    """Bits of the largest and of the lowest difference of a group; 0 for both if there is none.

    The bits of floats, read as signed integers, have the largest one on top, and read as unsigned ones the lowest negative
    one (or, where there is none, the largest). A NaN is beyond infinity in one of them.
    """
    has_before = flags.literal_value & HAS_BEFORE

    def generate(context, builder, signature, args):
        memory = Memory(context, builder, signature, args)
        kinds = (("smax", builder.icmp_signed), ("umax", builder.icmp_unsigned))
        widest = {
            (kind, num_lanes): cgutils.alloca_once_value(builder, splat(_INT, 0, num_lanes))
            for kind, _ in kinds
            for num_lanes in _widths(lanes.literal_value)
        }

        def chunk(offset, num_lanes):
            differences = memory.load(0, builder.add(args[2], offset), num_lanes)
            if has_before:
                differences = builder.fsub(differences, memory.load(1, builder.add(args[2], offset), num_lanes))
            patterns = builder.bitcast(differences, ir.VectorType(_INT, num_lanes))
            for kind, compare in kinds:
                old = builder.load(widest[kind, num_lanes])
                largest = builder.select(compare(">", patterns, old), patterns, old)
                builder.store(largest, widest[kind, num_lanes])

        _for_chunks(builder, args[3], lanes.literal_value, chunk)
        results = []
        for kind, compare in kinds:
            result = _INT(0)
            for num_lanes in _widths(lanes.literal_value):
                candidate = _reduce(builder, kind, builder.load(widest[kind, num_lanes]))
                result = builder.select(compare(">", candidate, result), candidate, result)
            results.append(result)
        return context.make_tuple(builder, signature.return_type, results)

    return nb.types.UniTuple(nb.uint32, 2)(values, before, start, length, lanes, flags), generate


@intrinsic(prefer_literal=True)
def quantize(
    typing_context,
    values,
    before,
    after,
    unpacked,
    start,
    at,
    length,
    step,
    inverse,
    centre,
    place,
    seed_low,
    seed_high,
    bits,
    lanes,
    flags,
):
    """Codes of the group at `values[start:]` into `unpacked[at:]`; what they decode to into `after[start:]`.

    `place`: of its first value in the sample, for chance.
    """
    num_bits, flag = bits.literal_value, flags.literal_value
    half, top = _half(num_bits), float(2**num_bits - 1)

    def generate(context, builder, signature, args):
        memory = Memory(context, builder, signature, args)
        _, _, _, _, start, at, length, step, inverse, centre, place, seed_low, seed_high, *_ = args
        lowest = builder.fsub(centre, _FLOAT(half))

        def chunk(offset, num_lanes):
            here = builder.add(start, offset)
            differences = memory.load(0, here, num_lanes)
            message = memory.load(1, here, num_lanes) if flag & HAS_BEFORE else None
            if message is not None:
                differences = builder.fsub(differences, message)
            position = builder.fmul(differences, broadcast(builder, inverse, num_lanes))
            if flag & IS_STOCHASTIC:
                position = builder.fsub(position, broadcast(builder, lowest, num_lanes))
                position = builder.fadd(position, _uniform(builder, builder.add(place, offset), seed_low, seed_high, num_lanes))
            else:
                nearest = builder.fsub(_FLOAT(0.5), lowest)
                position = builder.fadd(position, broadcast(builder, nearest, num_lanes))
            codes = builder.fptosi(clamp(builder, position, top), ir.VectorType(_INT, num_lanes))
            memory.store(3, builder.add(at, offset), builder.trunc(codes, ir.VectorType(_BYTE, num_lanes)))
            if flag & HAS_AFTER:
                memory.store(2, here, reconstruct(builder, codes, lowest, step, message))

        _for_chunks(builder, length, lanes.literal_value, chunk)
        return context.get_dummy_value()

    arguments = (
        values, before, after, unpacked, start, at, length, step, inverse, centre, place, seed_low, seed_high,
        bits, lanes, flags,
    )  # fmt: skip
    return nb.void(*arguments), generate


@intrinsic(prefer_literal=True)
def squared_error(typing_context, values, before, start, length, inverse, centre, bits, flags):
    """Squared error of a group to nearest levels, in steps squared: 16 sums of every 16th value, folded in halves."""
    num_bits, has_before, num_sums = bits.literal_value, flags.literal_value & HAS_BEFORE, 16
    half, top = _half(num_bits), float(2**num_bits - 1)

    def generate(context, builder, signature, args):
        memory = Memory(context, builder, signature, args)
        _, _, start, length, inverse, centre, *_ = args
        lowest = builder.fsub(centre, _FLOAT(half))
        nearest = builder.fsub(_FLOAT(0.5), lowest)
        sums = cgutils.alloca_once_value(builder, splat(_FLOAT, 0.0, num_sums))

        def chunk(offset, num_lanes):
            here = builder.add(start, offset)
            exact = memory.load(0, here, num_lanes)
            if has_before:
                exact = builder.fsub(exact, memory.load(1, here, num_lanes))
            exact = builder.fmul(exact, broadcast(builder, inverse, num_lanes))
            position = builder.fadd(exact, broadcast(builder, nearest, num_lanes))
            codes = builder.fptosi(clamp(builder, position, top), ir.VectorType(_INT, num_lanes))
            level = builder.sitofp(codes, ir.VectorType(_FLOAT, num_lanes))
            level = builder.fadd(level, broadcast(builder, lowest, num_lanes))
            error = builder.fsub(exact, level)
            square = builder.fmul(error, error)
            old = builder.load(sums)
            if num_lanes == num_sums:
                builder.store(builder.fadd(old, square), sums)
                return
            lane = builder.trunc(builder.urem(offset, offset.type(num_sums)), _INT)
            added = builder.fadd(builder.extract_element(old, lane), builder.extract_element(square, _INT(0)))
            builder.store(builder.insert_element(old, added, lane), sums)

        _for_chunks(builder, length, num_sums, chunk)
        folded = builder.load(sums)
        width = num_sums
        while width > 1:
            width //= 2
            first = shuffle(builder, folded, range(width))
            folded = builder.fadd(first, shuffle(builder, folded, range(width, 2 * width)))
        return builder.extract_element(folded, _INT(0))

    return nb.float32(values, before, start, length, inverse, centre, bits, flags), generate


@intrinsic(prefer_literal=True)
def dequantize(typing_context, unpacked, before, out, at, start, length, step, centre, bits, lanes, flags):
    """What the group of codes at `unpacked[at:]` decodes to, into `out[start:]`."""
    has_before = flags.literal_value & HAS_BEFORE

    def generate(context, builder, signature, args):
        memory = Memory(context, builder, signature, args)
        _, _, _, at, start, length, step, centre, *_ = args
        lowest = builder.fsub(centre, _FLOAT(_half(bits.literal_value)))

        def chunk(offset, num_lanes):
            here = builder.add(start, offset)
            codes = memory.load(0, builder.add(at, offset), num_lanes)
            codes = builder.zext(codes, ir.VectorType(_INT, num_lanes))
            message = memory.load(1, here, num_lanes) if has_before else None
            memory.store(2, here, reconstruct(builder, codes, lowest, step, message))

        _for_chunks(builder, length, lanes.literal_value, chunk)
        return context.get_dummy_value()

    return nb.void(unpacked, before, out, at, start, length, step, centre, bits, lanes, flags), generate


@intrinsic(prefer_literal=True)
def pack(typing_context, unpacked, codes, offset, nbytes, shift, width):
    """A plane of a block, `codes[offset : offset + nbytes]`, from its codes; as many as fit in the bytes are read."""
    low, num_bits = shift.literal_value, width.literal_value

    def generate(context, builder, signature, args):
        memory = Memory(context, builder, signature, args)
        _, _, offset, nbytes, *_ = args

        def chunk(at, num_lanes):
            packed = None
            for part in range(8 // num_bits):
                piece = memory.load(0, builder.add(at, builder.mul(nbytes, nbytes.type(part))), num_lanes)
                if low:
                    piece = builder.lshr(piece, splat(_BYTE, low, num_lanes))
                piece = builder.and_(piece, splat(_BYTE, 2**num_bits - 1, num_lanes))
                if part:
                    piece = builder.shl(piece, splat(_BYTE, num_bits * part, num_lanes))
                packed = piece if packed is None else builder.or_(packed, piece)
            memory.store(1, builder.add(offset, at), packed)

        _for_chunks(builder, nbytes, min(16 * num_bits, 64), chunk)
        return context.get_dummy_value()

    return nb.void(unpacked, codes, offset, nbytes, shift, width), generate


@intrinsic(prefer_literal=True)
def unpack(typing_context, codes, unpacked, offset, nbytes, shift, width):
    """The inverse of `pack`; the plane with shift 0 writes the codes, the others or their bits into them."""
    low, num_bits = shift.literal_value, width.literal_value

    def generate(context, builder, signature, args):
        memory = Memory(context, builder, signature, args)
        _, _, offset, nbytes, *_ = args

        def chunk(at, num_lanes):
            packed = memory.load(0, builder.add(offset, at), num_lanes)
            for part in range(8 // num_bits):
                piece = builder.lshr(packed, splat(_BYTE, num_bits * part, num_lanes)) if part else packed
                piece = builder.and_(piece, splat(_BYTE, 2**num_bits - 1, num_lanes))
                index = builder.add(at, builder.mul(nbytes, nbytes.type(part)))
                if low:
                    piece = builder.shl(piece, splat(_BYTE, low, num_lanes))
                    piece = builder.or_(memory.load(1, index, num_lanes), piece)
                memory.store(1, index, piece)

        _for_chunks(builder, nbytes, min(16 * num_bits, 64), chunk)
        return context.get_dummy_value()

    return nb.void(codes, unpacked, offset, nbytes, shift, width), generate


@intrinsic(prefer_literal=True)
def fetch_groups(typing_context, values, before, after, first, count, group, flags):
    """Ask for the cache lines of `count`, a literal, groups from number `first` on, before they are needed out of order."""
    flag, length = flags.literal_value, group.literal_value
    num_values = length * count.literal_value

    def generate(context, builder, signature, args):
        memory = Memory(context, builder, signature, args)
        start = builder.mul(args[3], args[3].type(length))
        arrays = [(0, False)] + [(1, False)] * bool(flag & HAS_BEFORE) + [(2, True)] * bool(flag & HAS_AFTER)
        for array, is_written in arrays:
            for place in range(0, num_values, 16):  # 64 bytes
                memory.fetch(array, builder.add(start, start.type(place)), is_written=is_written)
        return context.get_dummy_value()

    return nb.void(values, before, after, first, count, group, flags), generate


def _widths(num_lanes):
    """A range is cut into vectors of `num_lanes`, what is left into vectors of 16, what is left then into single lanes."""
    return (num_lanes, 16, 1) if num_lanes > 16 else (num_lanes, 1)


def _for_chunks(builder, length, num_lanes, body) -> None:
    """`body(offset, width)` for the chunks of 0 .. length - 1, from left to right."""
    done = length.type(0)
    for width in _widths(num_lanes):
        left = builder.sub(length, done)
        num_chunks = builder.udiv(left, length.type(width))
        with cgutils.for_range(builder, num_chunks) as loop:
            body(builder.add(done, builder.mul(loop.index, length.type(width))), width)
        done = builder.add(done, builder.mul(num_chunks, length.type(width)))


class Memory:
    """Vector loads and stores on the array arguments of one intrinsic, named by their number."""

    def __init__(self, context, builder, signature, args) -> None:
        self._builder, self._types = builder, signature.args
        self._bases = {
            number: context.make_array(kind)(context, builder, arg).data
            for number, (kind, arg) in enumerate(zip(signature.args, args, strict=True))
            if isinstance(kind, nb.types.Array)
        }

    def load(self, array, index, num_lanes):
        return self._builder.load(self._pointer(array, index, num_lanes), align=self._alignment(array))

    def store(self, array, index, vector) -> None:
        self._builder.store(vector, self._pointer(array, index, vector.type.count), align=self._alignment(array))

    def scalar(self, array, index):
        return self._builder.load(self._builder.gep(self._bases[array], [index]))

    def store_scalar(self, array, index, value) -> None:
        self._builder.store(value, self._builder.gep(self._bases[array], [index]))

    def fetch(self, array, index, *, is_written) -> None:
        """Ask for the cache line of this element; a hint, which changes nothing else."""
        pointer = self._builder.bitcast(self._builder.gep(self._bases[array], [index]), _BYTE.as_pointer())
        function = ir.FunctionType(ir.VoidType(), [pointer.type, _INT, _INT, _INT])
        prefetch = cgutils.get_or_insert_function(self._builder.module, function, "llvm.prefetch.p0i8")
        self._builder.call(prefetch, [pointer, _INT(int(is_written)), _INT(2), _INT(1)])

    def _alignment(self, array):
        return self._types[array].dtype.bitwidth // 8

    def _pointer(self, array, index, num_lanes):
        base = self._bases[array]
        return self._builder.bitcast(
            self._builder.gep(base, [index]), ir.VectorType(base.type.pointee, num_lanes).as_pointer()
        )


def _reduce(builder, kind, vector):
    function = ir.FunctionType(vector.type.element, [vector.type])
    name = f"llvm.vector.reduce.{kind}.v{vector.type.count}i32"
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), [vector])


def _half(bits):
    return float(2 ** (bits - 1))


def splat(element, constant, num_lanes):
    return ir.Constant(ir.VectorType(element, num_lanes), [constant] * num_lanes)


def clamp(builder, position, top):
    """To 0 .. top; a NaN to top."""
    for comparison, bound in ((">", 0.0), ("<", top)):
        limit = splat(_FLOAT, bound, position.type.count)
        position = builder.select(builder.fcmp_ordered(comparison, position, limit), position, limit)
    return position


def shuffle(builder, vector, lanes):
    """The vector of these lanes of `vector`."""
    order = ir.Constant(ir.VectorType(_INT, len(lanes)), list(lanes))
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), order)


def broadcast(builder, scalar, num_lanes):
    vector = ir.VectorType(scalar.type, num_lanes)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, _INT(0))
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), splat(_INT, 0, num_lanes))


def reconstruct(builder, codes, lowest, step, message):
    """Message + (code + lowest) * step, each operation rounded by itself; codes as 32-bit lanes."""
    num_lanes = codes.type.count
    level = builder.fadd(builder.sitofp(codes, ir.VectorType(_FLOAT, num_lanes)), broadcast(builder, lowest, num_lanes))
    change = builder.fmul(level, broadcast(builder, step, num_lanes))
    return change if message is None else builder.fadd(message, change)


def _uniform(builder, start, seed_low, seed_high, num_lanes):
    """`reference.uniform` at positions start, start + 1, ..."""
    vector = ir.VectorType(_INT, num_lanes)
    mixed = broadcast(builder, builder.trunc(start, _INT), num_lanes)
    mixed = builder.add(mixed, ir.Constant(vector, list(range(num_lanes))))
    mixed = builder.mul(mixed, splat(_INT, 0x9E3779B1, num_lanes))
    mixed = builder.xor(mixed, broadcast(builder, seed_low, num_lanes))
    mixed = builder.xor(mixed, builder.lshr(mixed, splat(_INT, 16, num_lanes)))
    mixed = builder.mul(mixed, splat(_INT, 0x7FEB352D, num_lanes))
    mixed = builder.xor(mixed, broadcast(builder, seed_high, num_lanes))
    mixed = builder.xor(mixed, builder.lshr(mixed, splat(_INT, 15, num_lanes)))
    mixed = builder.mul(mixed, splat(_INT, 0x846CA68B, num_lanes))
    mixed = builder.xor(mixed, builder.lshr(mixed, splat(_INT, 16, num_lanes)))
    whole = builder.sitofp(builder.lshr(mixed, splat(_INT, 8, num_lanes)), ir.VectorType(_FLOAT, num_lanes))
    return builder.fmul(whole, splat(_FLOAT, 2.0**-24, num_lanes))
