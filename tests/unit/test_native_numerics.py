"""What the arithmetic promises: drawn packing, error bounds, unbiasedness, edges of fp32, and what is refused by name.

All on the plain kernels: that the compiled ones have the same bits is shown elsewhere, and compiling them takes time.
"""

from __future__ import annotations

import numpy as np
import pytest

from pipecomp.errors import CodecError, CorruptPayload, NonFiniteValues
from pipecomp.native import ops, reference
from pipecomp.native.ops import Layout

LARGEST = float(np.finfo(np.float32).max)


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch):
    monkeypatch.setattr(ops, "_backend", lambda: reference)


def encode(values, layout, message_in=None, seed=1):
    values = np.asarray(values, np.float32)
    payload = np.full(ops.payload_nbytes(values.size, layout), 0xA5, np.uint8)
    message_out = np.full(values.size, np.nan, np.float32)
    ops.encode(values, layout, out=payload, message_in=message_in, message_out=message_out, seed=seed)
    return payload, message_out


def scales_of(payload, num_values, layout):
    return reference.unpack_scales(payload[: ops.scales_nbytes(num_values, layout)], layout.scale)


def test_codes_lie_as_drawn():
    codes = np.array([1, 2, 3, 0, 1, 2, 3, 3, 0], np.uint8)
    packed = reference.pack(codes, Layout(2, 9))
    assert [f"{byte:08b}" for byte in packed] == ["00110001", "00110110", "00001011"]  # c6 c3 c0 | c7 c4 c1 | c8 c5 c2


def test_three_bits_are_a_plane_of_two_and_a_plane_of_one():
    codes = np.array([7, 0, 5, 2], np.uint8)
    packed = reference.pack(codes, Layout(3, 4))
    assert [f"{byte:08b}" for byte in packed] == ["10010011", "00000101"]


def test_a_block_is_the_fewest_whole_groups_of_128_values():
    assert [ops.block_length(group) for group in (1, 16, 48, 64, 100, 128, 129, 256, 1600)] == [
        128, 128, 144, 128, 200, 128, 129, 256, 1600,
    ]  # fmt: skip


def test_two_bits_have_zero_and_one_level_more_on_the_side_of_the_extreme():
    layout = Layout(2, 8)
    for sign in (1, -1):
        values = sign * np.array([9.0, 4.5, 2.1, 1.9, -1.9, -2.1, -8.9, 0.0], np.float32)
        payload, seen = encode(values, layout)
        assert scales_of(payload, 8, layout) == [-4.0 * sign]
        assert (sign * seen).tolist() == [8.0, 4.0, 4.0, 0.0, 0.0, -4.0, -4.0, 0.0]


def test_of_two_equal_extremes_the_negative_one_has_the_level_more():
    assert encode([4.5, -4.5], Layout(2, 8))[1].tolist() == [2.0, -4.0]


@pytest.mark.parametrize("bits", range(1, 9))
def test_nearest_errs_by_half_a_step_or_where_the_grid_ends_by_one_and_a_quarter(bits):
    layout = Layout(bits, 64)
    values = np.random.default_rng(bits).standard_normal(6400).astype(np.float32)
    payload, seen = encode(values, layout)
    step = np.repeat(scales_of(payload, values.size, layout), 64)
    error = np.abs(seen - values) / np.abs(step)
    rounded_scale = 2.0 ** (bits - 1 - 8) + 1e-5  # 2^-9 of the outermost level and a little fp32
    ends = values / step > 2 ** (bits - 1) - 0.5
    assert (error[~ends] <= 0.5 + rounded_scale).all()
    assert (error[ends] <= 1.25 + rounded_scale).all()


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("power", [1, 3, 9])
def test_nearest_never_errs_by_more_than_the_change_itself(bits, power):
    # So what both ends remember never moves away from the sample, however few values carry its change.
    message, noise = np.random.default_rng(bits).standard_normal((2, 6400)).astype(np.float32)
    change = noise**power
    _, seen = encode(change, Layout(bits, 64))
    assert (np.abs(seen - change) <= np.abs(change) * (1 + 1e-5)).all()
    values = message + change
    _, seen = encode(values, Layout(bits, 64), message)
    assert np.linalg.norm(seen - values) < np.linalg.norm(message - values)


def test_a_lone_change_is_met_and_moves_no_other_value():
    message = np.random.default_rng(1).standard_normal(64).astype(np.float32)
    moved = message.copy()
    moved[17] += 9.0
    _, seen = encode(moved, Layout(2, 64), message)
    assert np.array_equal(np.delete(seen, 17), np.delete(message, 17))
    assert abs(seen[17] - moved[17]) < 1.01


@pytest.mark.parametrize("bits", [1, 2, 3, 8])
def test_stochastic_rounding_is_unbiased_at_every_value(bits):
    layout = Layout(bits, 16, "bf16", "stochastic")
    values = np.linspace(-0.7, 1, 16, dtype=np.float32)
    drawn = [encode(values, layout, seed=seed) for seed in range(4000)]
    seen = np.stack([message for _, message in drawn]).astype(np.float64)
    step = np.abs(scales_of(drawn[0][0], 16, layout)[0])
    assert np.abs(seen.mean(axis=0) - values).max() < 5 * (step / 2) / np.sqrt(4000)
    assert np.abs(seen - values).max() <= step


def test_chance_is_a_function_of_seed_and_position():
    layout = Layout(2, 64, "bf16", "stochastic")
    values = np.random.default_rng(0).standard_normal(640).astype(np.float32)
    whole = encode(values, layout, seed=5)[1]
    assert np.array_equal(encode(values, layout, seed=5)[1], whole)
    assert np.array_equal(encode(values[:128], layout, seed=5)[1], whole[:128])
    others = [6, 5 + 2**32, 5 + 2**63, -5]
    assert all((encode(values, layout, seed=s)[1] != whole).any() for s in others)
    assert np.array_equal(encode(values, layout, seed=5 + 2**64)[1], whole)


def test_chance_is_spread_evenly():
    drawn = reference.uniform(123456789, 1 << 16).astype(np.float64)
    assert (drawn >= 0).all()
    assert (drawn < 1).all()
    counts = np.histogram(drawn, 64, (0, 1))[0]
    assert ((counts - 1024) ** 2 / 1024).sum() < 64 + 5 * np.sqrt(2 * 64)
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.02


def test_a_group_that_did_not_move_keeps_its_message():
    layout = Layout(2, 64)
    message = np.random.default_rng(1).standard_normal(128).astype(np.float32)
    moved = message.copy()
    moved[100] += 1.0
    payload, seen = encode(moved, layout, message)
    assert scales_of(payload, 128, layout)[0] == 0
    assert np.array_equal(seen[:64], message[:64])


@pytest.mark.parametrize("scale", ["bf16", "fp32", "fp16"])
def test_steps_too_small_for_the_scale_send_no_change(scale):
    tiny = np.full(64, 2.0**-25 if scale == "fp16" else 2.0**-140, np.float32)
    payload, seen = encode(tiny, Layout(2, 64, scale))
    assert scales_of(payload, 64, Layout(2, 64, scale)) == [0.0]
    assert (seen == 0).all()


@pytest.mark.parametrize("scale", ["bf16", "fp32", "fp16"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("bits", [1, 2, 8])
def test_the_largest_values_do_not_overflow(bits, scale, rounding):
    layout = Layout(bits, 64, scale, rounding)
    values = np.array([LARGEST, -LARGEST, 1.0, 0.0] * 16, np.float32)
    payload, seen = encode(values, layout)
    assert np.isfinite(scales_of(payload, 64, layout)).all()
    assert np.isfinite(seen).all()
    assert seen[1] < 0  # the one level that one bit has besides zero


@pytest.mark.parametrize("scale", ["bf16", "fp16"])
def test_every_scale_a_payload_can_hold_is_the_nearest_to_its_step(scale):
    # Steps half way between two numbers of the dtype, and their neighbours in fp32.
    patterns = np.arange(2**16, dtype=np.uint32)
    numbers = reference.unpack_scales(patterns.astype("<u2").view(np.uint8), scale)
    numbers = np.sort(numbers[np.isfinite(numbers) & (numbers >= ops.grid(Layout(1, 1, scale)).smallest)])
    half_way = ((numbers[:-1].astype(np.float64) + numbers[1:]) / 2).astype(np.float32)
    steps = np.concatenate([half_way, np.nextafter(half_way, np.float32(0)), np.nextafter(half_way, np.float32(np.inf))])
    layout = Layout(1, 1, scale)
    steps = steps[(steps > ops.grid(layout).smallest) & (steps < ops.grid(layout).largest)]
    found = reference._round_to_scale(steps, layout, up=False).astype(np.float64)
    after = np.searchsorted(numbers, steps)
    below, above = numbers[np.maximum(after - 1, 0)], numbers[np.minimum(after, numbers.size - 1)]
    nearest = np.minimum(np.abs(steps - below.astype(np.float64)), np.abs(above.astype(np.float64) - steps))
    assert np.array_equal(np.abs(found - steps), nearest)


@pytest.mark.parametrize(("index", "bad"), [(0, np.nan), (70, np.inf), (129, -np.inf)])
def test_a_value_that_is_not_finite_is_named(index, bad):
    values = np.ones(130, np.float32)
    values[index] = bad
    with pytest.raises(NonFiniteValues, match=f"value {index} is {bad}"):
        encode(values, Layout(2, 64))


def test_a_difference_that_overflows_is_named():
    values, message = np.zeros(10, np.float32), np.zeros(10, np.float32)
    values[3], message[3] = LARGEST, -LARGEST
    with pytest.raises(NonFiniteValues, match="value 3 minus its message overflows"):
        encode(values, Layout(2, 64), message)


def test_nothing_encodes_to_nothing():
    payload, seen = encode([], Layout(3, 64))
    assert payload.size == seen.size == 0
    ops.decode(payload, Layout(3, 64), out=seen)


def floats(size=64):
    return np.zeros(size, np.float32)


def unaligned_floats():
    return np.zeros(4 * 64 + 1, np.uint8)[1:].view(np.float32)


def read_only(array):
    array.flags.writeable = False
    return array


GOOD = {"values": floats, "out": lambda: np.zeros(18, np.uint8), "message_in": floats, "message_out": floats}


@pytest.mark.parametrize(
    ("name", "make", "told"),
    [
        ("values", lambda: np.zeros(64), "values must be float32, got float64"),
        ("values", lambda: floats(128)[::2], "values must be contiguous"),
        ("values", unaligned_floats, "values must be contiguous and aligned"),
        ("values", lambda: floats().reshape(8, 8), r"values must have shape \(n,\), got \(8, 8\)"),
        ("values", lambda: [0.0] * 64, "values must be a NumPy array, got list"),
        ("message_in", lambda: floats(63), r"message_in must have shape \(64,\), got \(63,\)"),
        ("message_in", lambda: floats(128)[::2], "message_in must be contiguous"),
        ("message_out", lambda: read_only(floats()), "message_out is read-only"),
        ("message_out", lambda: np.zeros(64, np.float16), "message_out must be float32, got float16"),
        ("out", lambda: np.zeros(17, np.uint8), r"out must have shape \(18,\), got \(17,\)"),
        ("out", lambda: np.zeros(36, np.uint8)[::2], "out must be contiguous"),
        ("out", lambda: read_only(np.zeros(18, np.uint8)), "out is read-only"),
        ("out", lambda: np.zeros(18, np.int8), "out must be uint8, got int8"),
    ],
)
def test_an_argument_of_another_kind_is_refused_by_name(name, make, told):
    arguments = {key: build() for key, build in GOOD.items()} | {name: make()}
    values = arguments.pop("values")
    with pytest.raises(CodecError, match=told):
        ops.encode(values, Layout(2, 64), **arguments)


def test_outputs_that_overlap_other_arguments_are_refused_by_name():
    memory = floats(100)
    with pytest.raises(CodecError, match="message_out overlaps"):
        ops.encode(memory[:64], Layout(2, 64), out=GOOD["out"](), message_in=floats(), message_out=memory[36:])
    with pytest.raises(CodecError, match="out overlaps"):
        ops.encode(memory[:64], Layout(2, 64), out=memory[60:].view(np.uint8)[:18])
    payload = memory.view(np.uint8)
    with pytest.raises(CodecError, match="out overlaps"):
        ops.decode(payload[:18], Layout(2, 64), out=memory[:64])


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        (Layout(0, 64), "bits"),
        (Layout(9, 64), "bits"),
        (Layout(2, 0), "group"),
        (Layout(2, 64, "fp8"), "scale"),
        (Layout(2, 64, "bf16", "up"), "rounding"),
    ],
)
def test_a_layout_that_does_not_exist_is_refused_by_name(layout, told):
    with pytest.raises(CodecError, match=told):
        ops.encode(floats(), layout, out=np.zeros(18, np.uint8))


@pytest.mark.parametrize("size", [0, 17, 19])
def test_a_payload_of_another_size_is_corrupt(size):
    with pytest.raises(CorruptPayload, match="payload must have shape"):
        ops.decode(np.zeros(size, np.uint8), Layout(2, 64), out=floats())


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, -0.0, 1e-39, -LARGEST])
def test_a_scale_that_no_encoder_writes_is_corrupt(scale):
    layout = Layout(8, 64, "fp32")
    payload = np.zeros(ops.payload_nbytes(64, layout), np.uint8)
    payload[:4] = np.array([scale], "<f4").view(np.uint8)
    with pytest.raises(CorruptPayload, match="scale"):
        ops.decode(payload, layout, out=floats())


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 7])
def test_padding_bits_that_are_set_are_corrupt(bits):
    layout = Layout(bits, 64)
    values = np.random.default_rng(0).standard_normal(65).astype(np.float32)  # one code in the last byte of each plane
    payload, seen = encode(values, layout)
    out = floats(65)
    ops.decode(payload, layout, out=out)
    assert np.array_equal(out, seen)
    payload[-1] |= 0x80
    with pytest.raises(CorruptPayload, match="padding"):
        ops.decode(payload, layout, out=out)
