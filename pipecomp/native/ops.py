"""The contract of the kernels: dtypes, shapes, bit order, rounding, sizes. Knows NumPy arrays; knows no tensor, no socket.

Every backend (`reference`, `cpu`, a device's) gives the same bits for the same arguments; `docs/numerics.md` has the whole
arithmetic. Here the arguments are checked once, then a backend is picked.

    values (n,) fp32 ── minus message_in ──> differences, cut into groups of `layout.group`
      group of g differences   -> one scale (its step), and g codes of `bits` bits; with a rotation, of the rotated differences
      block = the fewest whole groups that hold at least 128 values: the unit of packing
      payload = all scales (before them, with e4m3 scales, the byte that they are relative to), then all blocks
      block of L codes         -> one plane of bytes for each width in PLANES[bits], low bits first
      plane of width w         -> Q = ceil(L * w / 8) bytes; code i sits in byte i % Q, shifted left by w * (i // Q)

So neighbouring codes lie in neighbouring bytes, and whole vectors are packed by a shift and an or. 4 codes a byte, Q = 3:

    byte 0: c9 c6 c3 c0      byte 1: c10 c7 c4 c1      byte 2: c11 c8 c5 c2      (highest bits on the left)
"""

from __future__ import annotations

import functools
import types
from typing import Final, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from pipecomp.errors import CodecError, CorruptPayload, NonFiniteValues

Scale = Literal["fp32", "bf16", "fp16", "e4m3"]
Rounding = Literal["nearest", "stochastic"]
Fit = Literal["extreme", "least_error"]
Rotation = Literal["none", "hadamard"]
Levels = Literal["zero", "either"]
Widths = Literal["equal", "mixed"]
FloatArray = npt.NDArray[np.float32]
ByteArray = npt.NDArray[np.uint8]

_CHOICES: Final = {
    "scale": Scale, "rounding": Rounding, "fit": Fit, "rotation": Rotation, "levels": Levels, "widths": Widths,
}  # fmt: skip

MIN_BLOCK: Final = 128
"""A block holds at least this many values (the last one may be shorter): eight 16-byte vectors of one-bit codes."""

PLANES: Final[dict[int, tuple[int, ...]]] = {
    1: (1,),
    2: (2,),
    3: (2, 1),
    4: (4,),
    5: (4, 1),
    6: (4, 2),
    7: (4, 2, 1),
    8: (8,),
}
"""Widths of the planes that codes of so many bits are cut into; the first plane holds the lowest bits."""

SCALE_NBYTES: Final[dict[Scale, int]] = {"fp32": 4, "bf16": 2, "fp16": 2, "e4m3": 1}
_SCALE_MAX: Final[dict[Scale, float]] = {
    "fp32": float(np.finfo(np.float32).max),
    "bf16": float.fromhex("0x1.FEp127"),
    "fp16": 65504.0,
    "e4m3": float.fromhex("0x1.Ep127"),
}
_SCALE_MANTISSA: Final[dict[Scale, int]] = {"fp32": 24, "bf16": 8, "fp16": 11, "e4m3": 4}

OCTAVES: Final = 16
"""An e4m3 scale is within so many octaves of the sample's largest; a group with a smaller step is sent as no change."""

ROTATED_GROUPS: Final = (16, 32, 64, 128, 256)

MIXED_BITS: Final = range(2, 8)
MIXED_GROUP: Final = 8
"""Groups of mixed widths are a multiple of this: then whole groups fill whole bytes, and sizes are those of equal widths."""

SHARES: Final = 510
"""A byte says how many of these parts of the groups have a bit more, and as many a bit less: up to half of all."""

APART: Final = 10
"""A group gets a bit of another if its scale, in eighths of an octave, is larger by more than this.

Error falls fourfold a bit, so that an octave is the least that pays; with a little more, samples of normal values lose nothing.
"""

LEAST_MIXED_TOP: Final = 18
"""Samples whose e4m3 scales are relative to a smaller exponent have equal widths: half of a step might be too small."""

SIGNS: Final[tuple[int, ...]] = tuple(
    -1 if ((i * 0x9E3779B1) ^ (i * 0x9E3779B1 >> 15)) * 0x846CA68B & 0x80000000 else 1 for i in range(ROTATED_GROUPS[-1])
)
"""By place in its group, the sign that a difference gets before it is rotated: without structure, and known to both ends."""

_NUM_CANDIDATES: Final = {1: 4, 2: 3, 3: 3, 4: 3}  # more win 1 % of the error on normal values; 2 from 5 bits on


class Layout(NamedTuple):
    """How values become bytes; both ends must hold the same."""

    bits: int  # 1 .. 8
    group: int  # values that share one scale, >= 1; the last group of an array may be shorter
    scale: Scale = "bf16"
    rounding: Rounding = "nearest"  # the decoder heeds it for one bit only
    fit: Fit = "extreme"  # the encoder's alone: whether the step follows from the group's extreme, or has the least error
    rotation: Rotation = "none"  # of whole groups
    levels: Levels = "zero"  # "either": each group has a level at zero, or levels at half steps, whichever errs less
    widths: Widths = "equal"  # "mixed": groups of large steps have a bit more a value, as many groups of small ones a bit less


def check_layout(layout: Layout) -> None:
    """Raise CodecError, naming the field, unless the layout is one that the kernels know."""
    if layout.bits not in PLANES:
        raise CodecError(f"bits must be 1 to 8, got {layout.bits!r}")
    if layout.group < 1:
        raise CodecError(f"group must be at least 1, got {layout.group!r}")
    for field, kind in _CHOICES.items():
        if getattr(layout, field) not in get_args(kind):
            raise CodecError(f"{field} must be one of {', '.join(get_args(kind))}, got {getattr(layout, field)!r}")
    if layout.fit == "least_error" and layout.rounding == "stochastic":
        raise CodecError("fit must be 'extreme' with stochastic rounding: a step of least error clips, and is not unbiased")
    if layout.levels == "either" and (layout.fit, layout.scale) != ("least_error", "e4m3"):
        raise CodecError("levels can be 'either' only with fit 'least_error', which chooses, and scale 'e4m3', which says so")
    if layout.rotation == "hadamard" and layout.group not in ROTATED_GROUPS:
        raise CodecError(f"group must be one of {', '.join(map(str, ROTATED_GROUPS))} to be rotated, got {layout.group}")
    if layout.widths == "mixed":
        _check_mixed(layout)


def _check_mixed(layout: Layout) -> None:
    if layout.bits not in MIXED_BITS:
        raise CodecError(f"bits must be {MIXED_BITS[0]} to {MIXED_BITS[-1]} with mixed widths, got {layout.bits}")
    if layout.group % MIXED_GROUP:
        raise CodecError(f"group must be a multiple of {MIXED_GROUP} with mixed widths, got {layout.group}")
    if (layout.scale, layout.rounding, layout.rotation) != ("e4m3", "nearest", "none"):
        raise CodecError("widths can be 'mixed' only with scale 'e4m3', rounding 'nearest' and rotation 'none'")


def block_length(group: int) -> int:
    """Values in one unit of packing: the fewest whole groups that hold at least MIN_BLOCK values."""
    return group * -(-MIN_BLOCK // group)


def block_nbytes(length: int, bits: int) -> int:
    """Bytes of the planes of one block of `length` codes."""
    return sum(-(-length * width // 8) for width in PLANES[bits])


def codes_nbytes(num_values: int, layout: Layout) -> int:
    """Exact bytes of the packed codes of `num_values` values: `num_values * bits / 8`, each plane of each block rounded up."""
    num_blocks, rest = divmod(num_values, block_length(layout.group))
    return num_blocks * block_nbytes(block_length(layout.group), layout.bits) + block_nbytes(rest, layout.bits)


def scales_nbytes(num_values: int, layout: Layout) -> int:
    """Exact bytes of the scales of `num_values` values, one for each group begun, and what they are relative to."""
    head = (2 if layout.widths == "mixed" else 1) if layout.scale == "e4m3" and num_values else 0
    return head + -(-num_values // layout.group) * SCALE_NBYTES[layout.scale]


@functools.lru_cache(maxsize=4096)
def payload_nbytes(num_values: int, layout: Layout) -> int:
    """Exact bytes of an encoded array: its scales, then its codes."""
    return scales_nbytes(num_values, layout) + codes_nbytes(num_values, layout)


class Grid(NamedTuple):
    """Levels of a group: (code - half + centre) * step, code 0 .. 2^bits - 1. The step is signed.

    Its sign makes the group's value of largest magnitude negative in units of the step, so that the one level more that lies
    below zero is on that side:

        nearest, 2 bits    -2 ---- -1 ----- 0 ----- 1        the extreme is at -2.25; zero is a level
        stochastic, 1 bit        -0.5 ------------ 0.5       zero cannot be one; all other stochastic grids are as above
        either, 2 bits           as in the first line, or -1.5 -- -0.5 -- 0.5 -- 1.5 with a positive step, for each group
    """

    half: float
    centre: float
    near_factor: np.float32  # step = max(largest magnitude * near_factor, largest of the other sign * far_factor)
    far_factor: np.float32
    smallest: np.float32  # a step below this becomes 0: the group is sent as no change
    largest: np.float32  # a step above this becomes this: what the scale's dtype holds and no level overflows with
    rounds_up: bool  # the step, to the scale's dtype: then no value lies beyond the outermost level
    num_candidates: int  # steps that are tried: the first, and those one `candidate`, two, ... below
    candidate: int  # as the bits of a float32 count: a quarter of the octave, or an eighth
    mantissa_drop: int  # bits of a float32 that an e4m3 scale does not have; one more if its last one tells the levels


@functools.lru_cache(maxsize=1024)
def grid(layout: Layout) -> Grid:
    """The constants of a layout.

    Nearest: the extreme lies a quarter step outside its level, a compromise between many values near zero and few outliers.
    Stochastic: the outermost levels reach the extremes of both signs, so that no value is clipped and the mean is unbiased.
    Least error: the first step tried clips nothing, the others more and more.
    """
    half = 2.0 ** (layout.bits - 1)
    is_wide = layout.rounding == "stochastic" and layout.bits == 1
    near, far = 1 / (half + 0.25), 0.0
    if layout.rounding == "stochastic":
        near, far = (2.0, 0.0) if is_wide else (1 / half, 1 / (half - 1))
    elif layout.fit == "least_error":
        near = 1 / half
    # An e4m3 scale may be a sixteenth too small, which 5 bits or more have no use for: that would clip by a step and more.
    rounds_up = layout.rounding == "stochastic" or layout.fit == "least_error" or (layout.scale == "e4m3" and layout.bits > 4)
    smallest = 2.0**-24 if layout.scale == "fp16" else 2.0**-126
    limit = min(_SCALE_MAX[layout.scale], _SCALE_MAX["fp32"] / half)
    mantissa, exponent = np.frexp(limit)
    unit = 2.0 ** (_SCALE_MANTISSA[layout.scale] - (layout.levels == "either"))
    largest = np.ldexp(np.floor(mantissa * unit) / unit, int(exponent))
    return Grid(
        half=half,
        centre=0.5 if is_wide else 0.0,
        near_factor=np.float32(near),
        far_factor=np.float32(far),
        smallest=np.float32(smallest),
        largest=np.float32(largest),
        rounds_up=rounds_up,
        num_candidates=_NUM_CANDIDATES.get(layout.bits, 2) if layout.fit == "least_error" else 1,
        candidate=1 << (21 if layout.bits < 4 or layout.levels == "either" else 20),
        mantissa_drop=21 if layout.levels == "either" else 20,
    )


def encode(
    values: FloatArray,
    layout: Layout,
    *,
    out: ByteArray,
    message_in: FloatArray | None = None,
    message_out: FloatArray | None = None,
    seed: int = 0,
) -> None:
    """Quantize `values - message_in` into `out`, in one pass; write what the decoder will see to `message_out`.

    Args:
        values: (n,) fp32.
        layout: bits, group, dtype of the scales, and rounding: to the nearest level, or up or down by chance so that the mean
            is unbiased.
        out: (payload_nbytes,) uint8, written: the scales, little-endian, then the packed codes; any alignment.
        message_in: (n,) fp32, or None for zeros.
        message_out: (n,) fp32, written, or None; bit for bit what `decode` gives for the same `message_in`.
        seed: of stochastic rounding, taken modulo 2^64. Chance is a function of (seed, position) alone.

    Error bound, up to the rounding of the scale and of fp32: nearest, half a step, or 1.25 steps for values of the other sign
    than the group's extreme, and never more than |values - message_in|; stochastic, one step. `docs/numerics.md` has the terms.
    Deterministic in every case.

    Raises:
        NonFiniteValues: NaN or infinity in `values` or in the difference; says where. The outputs are then undefined.
        CodecError: an argument of the wrong dtype, shape or memory layout, or outputs that overlap other arguments.
    """
    check_layout(layout)
    num_values = _check_floats("values", values, None)
    _check_bytes("out", out, payload_nbytes(num_values, layout))
    if message_in is not None:
        _check_floats("message_in", message_in, num_values)
    if message_out is not None:
        _check_floats("message_out", message_out, num_values)
        _check_output("message_out", message_out, values, message_in, out)
    _check_output("out", out, values, message_in)
    if num_values == 0:
        return
    if not _backend().encode(values, layout, out, message_in, message_out, seed & 0xFFFFFFFFFFFFFFFF):
        raise NonFiniteValues(_where_not_finite(values, message_in))


def decode(payload: ByteArray, layout: Layout, *, out: FloatArray, message_in: FloatArray | None = None) -> None:
    """Unpack the codes of `payload`, multiply by their scales, add `message_in`, into `out`.

    Args:
        payload: (payload_nbytes,) uint8, as `encode` wrote it; any alignment, read-only is fine.
        layout: the encoder's.
        out: (n,) fp32, written: message_in + (code - half + centre) * scale (see `Grid`), each operation rounded by itself.
        message_in: (n,) fp32, or None for zeros.

    Raises:
        CorruptPayload: a size that does not fit `out`, a scale that no encoder writes (NaN, out of range), or
            padding bits that are not 0. `out` is then undefined.
        CodecError: an argument of the wrong dtype, shape or memory layout, or `out` overlapping another argument.
    """
    check_layout(layout)
    num_values = _check_floats("out", out, None)
    _check_bytes("payload", payload, payload_nbytes(num_values, layout), wrong_size=CorruptPayload)
    if message_in is not None:
        _check_floats("message_in", message_in, num_values)
    _check_output("out", out, payload, message_in)
    if num_values == 0:
        return
    if not _backend().decode(payload, layout, out, message_in):
        raise CorruptPayload("the payload holds a scale or padding bits that no encoder writes")


def squared_norms(
    values: FloatArray, message_in: FloatArray | None, message_out: FloatArray
) -> tuple[float, float, float]:
    """(sum |values - message_out|^2, sum |values - message_in|^2, sum |values|^2) in fp64, in one pass; for meters.

    All arrays (n,) fp32; `message_in` None stands for zeros. Sums run in a fixed order on any one machine; the last digits may
    differ between machines, so nothing that must agree may depend on them.
    """
    num_values = _check_floats("values", values, None)
    _check_floats("message_out", message_out, num_values)
    if message_in is not None:
        _check_floats("message_in", message_in, num_values)
    error, change, size = _backend().squared_norms(values, message_in, message_out)
    return float(error), float(change), float(size)


def warm_up(layout: Layout, *, has_message: bool) -> None:
    """Compile, or load, what `encode` and `decode` need for this layout, with messages in and out or without any."""
    check_layout(layout)
    cpu = _backend()
    cpu.warm_up([cpu.Config(layout, has_message)])


def _backend() -> types.ModuleType:
    """Imported when first needed: a compiler is heavy. Arrays of other devices, with kernels of their own, would branch here."""
    from pipecomp.native import cpu

    return cpu


def _check_floats(name: str, array: FloatArray, num_values: int | None) -> int:
    if not isinstance(array, np.ndarray):
        raise CodecError(f"{name} must be a NumPy array, got {type(array).__name__}")
    if array.dtype != np.float32:
        raise CodecError(f"{name} must be float32, got {array.dtype}")
    if array.ndim != 1 or (num_values is not None and array.size != num_values):
        wanted = "(n,)" if num_values is None else f"({num_values},)"
        raise CodecError(f"{name} must have shape {wanted}, got {array.shape}")
    flags = array.flags
    if not (flags.c_contiguous and flags.aligned):
        raise CodecError(f"{name} must be contiguous and aligned; copy the view first")
    return int(array.size)


def _check_bytes(name: str, array: ByteArray, nbytes: int, wrong_size: type[CodecError] = CodecError) -> None:
    if not isinstance(array, np.ndarray):
        raise CodecError(f"{name} must be a NumPy array, got {type(array).__name__}")
    if array.dtype != np.uint8:
        raise CodecError(f"{name} must be uint8, got {array.dtype}")
    if array.shape != (nbytes,):
        raise wrong_size(f"{name} must have shape ({nbytes},), got {array.shape}")
    if not array.flags.c_contiguous:
        raise CodecError(f"{name} must be contiguous; copy the view first")


def _check_output(name: str, array: np.ndarray, *others: np.ndarray | None) -> None:
    if not array.flags.writeable:
        raise CodecError(f"{name} is read-only")
    for other in others:
        if other is not None and np.may_share_memory(array, other):
            raise CodecError(f"{name} overlaps another argument in memory")


def _where_not_finite(values: FloatArray, message_in: FloatArray | None) -> str:
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        return f"value {bad[0]} is {values[bad[0]]} ({bad.size} of {values.size} values are not finite)"
    if message_in is None:
        raise AssertionError("a backend reported a value that is not finite where there is none")
    with np.errstate(over="ignore", invalid="ignore"):
        bad = np.flatnonzero(~np.isfinite(values - message_in))
    index = bad[0]
    return f"value {index} minus its message overflows: {values[index]} - {message_in[index]}"
