"""One-byte scales, steps of least error, levels at half steps, and rotations: what they promise, on the plain kernels."""

from __future__ import annotations

import numpy as np
import pytest

from pipecomp.errors import CodecError, CorruptPayload
from pipecomp.native import ops, reference
from pipecomp.native.ops import Layout

FITTED = Layout(2, 32, "e4m3", fit="least_error")
EITHER = Layout(2, 32, "e4m3", fit="least_error", levels="either")
ROTATED = Layout(2, 64, "e4m3", rotation="hadamard")
LARGEST = float(np.finfo(np.float32).max)


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch):
    monkeypatch.setattr(ops, "_backend", lambda: reference)


def encode(values, layout, message_in=None, seed=1):
    values = np.asarray(values, np.float32)
    payload = np.full(ops.payload_nbytes(values.size, layout), 0xA5, np.uint8)
    message_out = np.full(values.size, np.nan, np.float32)
    ops.encode(values, layout, out=payload, message_in=message_in, message_out=message_out, seed=seed)
    out = np.full(values.size, np.nan, np.float32)
    ops.decode(payload, layout, out=out, message_in=message_in)
    assert np.array_equal(out.view(np.uint32), message_out.view(np.uint32))
    return payload, message_out


def error(values, layout):
    values = np.asarray(values, np.float32)
    seen = encode(values, layout)[1]
    return float(np.linalg.norm(seen.astype(np.float64) - values))


def normal(size, seed=0):
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


# ------------------------------------------------------------------------------------------------------ scales of a byte


def test_a_scale_of_one_byte_is_relative_to_the_exponent_of_the_largest_step():
    payload, seen = encode([*[9.0, *[0.0] * 15], *[-1.125, *[0.0] * 15]], Layout(2, 16, "e4m3"))
    assert payload[0] == 127 + 2  # steps of 4 and 1/2
    assert [f"{byte:08b}" for byte in payload[1:3]] == ["11111000", "01100000"]  # 2^15 and 2^12 above the lowest; the sign
    assert (seen[0], seen[16]) == (8.0, -1.0)


def test_a_group_sixteen_octaves_below_the_largest_is_sent_as_no_change():
    values = np.zeros(64, np.float32)
    values[0] = 2.25
    for magnitude, moved in ((2.25 * 2.0**-15 * 1.25, True), (2.25 * 2.0**-15 * 0.9, False)):
        values[32] = magnitude
        seen = encode(values, Layout(2, 32, "e4m3"))[1]
        assert (seen[32] != 0) == moved


@pytest.mark.parametrize("size", [1e-30, 1e-8, 1.0, 1e30])
def test_a_sample_of_any_size_loses_as_much(size):
    values = normal(640) * np.float32(size)
    assert error(values, Layout(4, 32, "e4m3")) < 0.1 * np.linalg.norm(values.astype(np.float64))


def test_a_sample_of_zeros_and_one_too_small_for_a_scale_have_no_exponent():
    for values in (np.zeros(40), np.full(40, 1e-42)):
        payload, seen = encode(values, Layout(3, 32, "e4m3"))
        assert payload[:3].tolist() == [0, 0, 0]
        assert not seen.any()


@pytest.mark.parametrize("bits", range(1, 9))
def test_a_scale_of_one_byte_costs_no_more_than_an_eighth_of_the_error(bits):
    values = normal(6400)
    assert error(values, Layout(bits, 32, "e4m3")) < 1.125 * error(values, Layout(bits, 32, "fp32"))


@pytest.mark.parametrize("rotation", ["none", "hadamard"])
def test_stochastic_rounding_stays_unbiased(rotation):
    layout = Layout(2, 16, "e4m3", "stochastic", rotation=rotation)
    values = np.linspace(-0.7, 1, 16, dtype=np.float32)
    seen = np.stack([encode(values, layout, seed=seed)[1] for seed in range(3000)]).astype(np.float64)
    assert np.abs(seen.mean(axis=0) - values).max() < 5 * seen.std(axis=0).max() / np.sqrt(3000)


@pytest.mark.parametrize("bits", [1, 2, 8])
@pytest.mark.parametrize("layout", [Layout(1, 64, "e4m3"), FITTED, EITHER], ids=str)
def test_the_largest_values_do_not_overflow(bits, layout):
    _, seen = encode(np.array([LARGEST, -LARGEST, 1.0, 0.0] * 16), layout._replace(bits=bits))
    assert np.isfinite(seen).all()
    assert seen[1] < 0


# ----------------------------------------------------------------------------------------------------- fitted, and either


@pytest.mark.parametrize("scale", ["fp32", "bf16", "fp16", "e4m3"])
@pytest.mark.parametrize("bits", range(1, 5))
def test_a_fitted_step_errs_less(bits, scale):
    values = normal(6400)
    assert error(values, Layout(bits, 64, scale, fit="least_error")) < error(values, Layout(bits, 64, scale))


@pytest.mark.parametrize("layout", [FITTED, EITHER, EITHER._replace(rotation="hadamard"), EITHER._replace(bits=1)], ids=str)
@pytest.mark.parametrize("power", [1, 3, 9])
def test_what_is_remembered_never_moves_away_from_the_sample(layout, power):
    message, noise = normal((2, 6400))
    values = message + noise**power
    seen = encode(values, layout, message)[1]
    for group in np.split(np.arange(6400), 200):
        assert np.linalg.norm((seen - values)[group]) <= np.linalg.norm((message - values)[group]) * (1 + 1e-5)


def test_values_far_from_zero_are_met_by_levels_at_half_steps():
    values = np.where(np.arange(32) % 2, 1, -1)
    seen = encode(values, EITHER)[1]
    assert np.array_equal(seen, 0.75 * values)
    assert error(values, EITHER) < 0.8 * error(values, FITTED)


def test_a_lone_value_is_met_by_a_level_at_zero():
    values = np.zeros(64, np.float32)
    values[5], values[40] = 8.0, 0.25
    assert error(values, EITHER) == 0


def test_a_lone_clipped_value_is_worth_less_than_all_others():
    values = np.ones(32, np.float32) * np.where(np.arange(32) % 2, 1, -1)
    values[0] = 2.6
    steps = reference.unpack_scales(encode(values, FITTED)[0][:2], "e4m3")
    assert abs(steps[0]) < 2.6 / 2


def test_either_levels_err_least():
    values = normal(6400)
    assert error(values, EITHER) < error(values, FITTED) < error(values, Layout(2, 32, "e4m3"))


# -------------------------------------------------------------------------------------------------------------- rotations


@pytest.mark.parametrize("group", ops.ROTATED_GROUPS)
def test_a_rotation_is_undone(group):
    layout = Layout(2, group, rotation="hadamard")
    values = normal(3 * group + 7)
    rotated = reference.rotate(values, layout)
    assert np.allclose(reference.unrotate(rotated, layout), values, atol=1e-6)
    assert np.isclose(group * np.square(rotated[:group]).sum(), np.square(values[:group]).sum(), rtol=1e-5)


def test_a_short_last_group_is_not_rotated():
    values = normal(64 + 20)
    rotated = reference.rotate(values, ROTATED)
    assert np.array_equal(rotated[64:], values[64:])
    assert not np.isclose(rotated[:64], values[:64]).any()


def test_a_rotation_spreads_a_lone_value_over_its_group():
    values = np.zeros(64, np.float32)
    values[17] = 64.0
    assert np.abs(reference.rotate(values, ROTATED)).tolist() == [1.0] * 64


def test_a_rotation_spares_small_values_beside_large_ones():
    values = normal(6400)
    values[::64] *= 40
    small = np.arange(6400) % 64 != 0

    def error_of_small(layout):
        return np.linalg.norm((encode(values, layout)[1] - values)[small])

    fitted = Layout(4, 64, "e4m3", fit="least_error")
    assert error_of_small(fitted._replace(rotation="hadamard")) < 0.5 * error_of_small(fitted)


@pytest.mark.parametrize("group", ops.ROTATED_GROUPS)
def test_the_signs_of_a_group_have_no_structure(group):
    signs = np.array(ops.SIGNS[:group])
    rows = reference._butterflies(signs.astype(np.float32)[None])[0]
    assert np.abs(rows).max() <= group / 2 if group > 16 else True


# --------------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        (Layout(2, 64, fit="best"), "fit must be one of extreme, least_error"),
        (Layout(2, 64, rotation="random"), "rotation must be one of none, hadamard"),
        (Layout(2, 64, levels="none"), "levels must be one of zero, either"),
        (Layout(2, 64, rounding="stochastic", fit="least_error"), "fit must be 'extreme' with stochastic rounding"),
        (Layout(2, 48, rotation="hadamard"), "group must be one of 16, 32, 64, 128, 256 to be rotated, got 48"),
        (Layout(2, 64, "bf16", fit="least_error", levels="either"), "levels can be 'either' only with"),
        (Layout(2, 64, "e4m3", levels="either"), "levels can be 'either' only with"),
    ],
)
def test_options_that_do_not_go_together_are_refused_by_name(layout, told):
    with pytest.raises(CodecError, match=told):
        ops.encode(np.zeros(64, np.float32), layout, out=np.zeros(18, np.uint8))


@pytest.mark.parametrize(
    ("layout", "head"),
    [
        (Layout(2, 32, "e4m3"), [255, 0]),  # an exponent that no number has
        (Layout(2, 32, "e4m3"), [127, 0x80]),  # a step of -0
        (Layout(2, 32, "e4m3"), [254, 0x7F]),  # above the largest with two bits
        (Layout(2, 32, "e4m3"), [10, 0x10]),  # below the smallest
        (Layout(2, 32, "e4m3"), [0, 0x7F]),
        (EITHER, [127, 0x01]),  # levels at half steps of nothing
        (EITHER, [127, 0xF1]),  # and with a sign
    ],
)
def test_a_scale_that_no_encoder_writes_is_corrupt(layout, head):
    payload = np.zeros(ops.payload_nbytes(32, layout), np.uint8)
    payload[:2] = head
    with pytest.raises(CorruptPayload, match="scale"):
        ops.decode(payload, layout, out=np.zeros(32, np.float32))
