"""The compiled kernels give the bits of the plain NumPy ones, for every layout and any values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from pipecomp.native import cpu, ops, reference
from pipecomp.native.ops import Layout

SEED = 0xC0FFEE_1234_5678_9ABC & (2**64 - 1)
SIZES = (1, 7, 63, 64, 65, 127, 128, 129, 400, 1000, 1601)

# Every number of bits, kind of group, scale dtype and rounding at least twice; each combination costs a compilation.
CASES = [
    (Layout(1, 64, "bf16", "nearest"), True),
    (Layout(1, 10, "fp16", "stochastic"), False),
    (Layout(2, 16, "bf16", "nearest"), True),
    (Layout(2, 64, "bf16", "nearest"), True),
    (Layout(2, 1600, "fp32", "stochastic"), True),
    (Layout(3, 32, "bf16", "nearest"), True),
    (Layout(3, 5, "fp32", "nearest"), True),
    (Layout(4, 128, "bf16", "stochastic"), True),
    (Layout(4, 100, "bf16", "nearest"), False),
    (Layout(5, 256, "fp16", "nearest"), True),
    (Layout(5, 1, "bf16", "stochastic"), False),
    (Layout(6, 64, "bf16", "nearest"), False),
    (Layout(7, 48, "fp16", "stochastic"), True),
    (Layout(7, 64, "fp32", "nearest"), False),
    (Layout(8, 64, "bf16", "nearest"), True),
    (Layout(8, 576, "fp32", "stochastic"), False),
    (Layout(1, 16, "e4m3", "stochastic"), True),
    (Layout(2, 32, "e4m3"), True),
    (Layout(4, 16, "e4m3"), False),
    (Layout(6, 50, "e4m3"), True),
    (Layout(1, 64, "e4m3", "nearest", "least_error"), False),
    (Layout(2, 64, "e4m3", "nearest", "least_error"), True),
    (Layout(3, 10, "fp16", "nearest", "least_error"), True),
    (Layout(4, 100, "bf16", "nearest", "least_error"), False),
    (Layout(8, 32, "fp32", "nearest", "least_error"), True),
    (Layout(2, 128, "e4m3", "nearest", "least_error", "hadamard"), True),
    (Layout(3, 16, "e4m3", "stochastic", "extreme", "hadamard"), False),
    (Layout(4, 64, "bf16", "nearest", "extreme", "hadamard"), True),
    (Layout(5, 256, "fp32", "nearest", "extreme", "hadamard"), False),
    (Layout(1, 32, "fp16", "stochastic", "extreme", "hadamard"), True),
    (Layout(1, 16, "e4m3", "nearest", "least_error", "none", "either"), False),
    (Layout(2, 32, "e4m3", "nearest", "least_error", "none", "either"), True),
    (Layout(4, 20, "e4m3", "nearest", "least_error", "none", "either"), True),
    (Layout(1, 32, "e4m3", "nearest", "least_error", "none", "either"), False),
    (Layout(3, 64, "e4m3", "nearest", "least_error", "none", "either"), False),
    (Layout(3, 64, "e4m3", "nearest", "least_error", "hadamard", "either"), True),
    (Layout(2, 32, "e4m3", "nearest", "least_error", "none", "either", "mixed"), True),
    (Layout(3, 64, "e4m3", "nearest", "least_error", "none", "zero", "mixed"), False),
    (Layout(4, 40, "e4m3", "nearest", "least_error", "none", "either", "mixed"), True),
    (Layout(3, 32, "e4m3", widths="mixed"), True),
    (Layout(5, 16, "e4m3", "nearest", "least_error", "none", "either", "mixed"), False),
    (Layout(7, 8, "e4m3", widths="mixed"), False),
]


def both(values, layout, message_in, seed=SEED):
    """Payload and message of each backend; None where it refuses."""
    results = []
    for backend in (reference, cpu):
        payload = np.full(ops.payload_nbytes(values.size, layout), 0xA5, np.uint8)
        message_out = np.full(values.size, np.nan, np.float32)
        accepted = backend.encode(values, layout, payload, message_in, message_out, seed)
        results.append((payload, message_out) if accepted else None)
    return results


def assert_same_bits(values, layout, message_in):
    plain, compiled = both(values, layout, message_in)
    assert (plain is None) == (compiled is None)
    if plain is None:
        return
    assert np.array_equal(plain[0], compiled[0])
    assert np.array_equal(plain[1].view(np.uint32), compiled[1].view(np.uint32))
    for backend in (reference, cpu):
        out = np.full(values.size, np.nan, np.float32)
        assert backend.decode(plain[0], layout, out, message_in)
        assert np.array_equal(out.view(np.uint32), plain[1].view(np.uint32))


def ordinary(chance, size):
    return chance.standard_normal(size).astype(np.float32)


def of_all_magnitudes(chance, size):
    return np.ldexp(chance.standard_normal(size), chance.integers(-150, 126, size)).astype(np.float32)


def of_one_magnitude(chance, size):
    return np.ldexp(chance.standard_normal(size), chance.integers(-150, 126)).astype(np.float32)


def of_groups_unlike(chance, size):
    """Some groups far above others, so that widths are mixed."""
    return (chance.standard_normal(size) * np.repeat(4.0 ** chance.integers(-2, 3, -(-size // 8)), 8)[:size]).astype(np.float32)


def mostly_zero(chance, size):
    return np.where(chance.random(size) < 0.02, chance.standard_normal(size), chance.choice([0.0, -0.0], size)).astype(np.float32)


def at_the_limits(chance, size):
    limits = np.finfo(np.float32)
    return chance.choice(np.array([limits.max, limits.min, limits.tiny, limits.smallest_subnormal, 0.0, 1.0], np.float32), size)


def beside_half_steps(chance, size):
    """Eighths, or the number next to one: where positions round to the next level, and errors are equal."""
    values = (chance.integers(-16, 17, size) / 8).astype(np.float32)
    next_one = np.nextafter(values, chance.choice(np.array([-8, 8], np.float32), size))
    return np.where(chance.random(size) < 0.5, values, next_one)


@pytest.mark.parametrize(("layout", "has_message"), CASES, ids=str)
def test_compiled_kernels_give_the_bits_of_the_plain_ones(layout, has_message):
    chance = np.random.default_rng(layout.bits * layout.group)
    for make in (ordinary, of_all_magnitudes, of_one_magnitude, of_groups_unlike, mostly_zero, at_the_limits, beside_half_steps):
        for size in SIZES:
            values = make(chance, size)
            message_in = values / 2 + make(chance, size) / 4 if has_message else None
            assert_same_bits(values, layout, message_in)


@pytest.mark.parametrize("size", [1, 64, 70, 300])
@pytest.mark.parametrize("levels", ["zero", "either"])
def test_mixed_widths_of_values_that_only_some_widths_can_say_are_zero(size, levels):
    """The first step of 3 bits is the least that can be sent, that of 4 bits is below it."""
    layout = Layout(3, 64, "e4m3", fit="least_error", levels=levels, widths="mixed")
    values = np.full(size, 25165823, np.uint32).view(np.float32)  # 4.7e-38
    assert_same_bits(values, layout, None)
    assert not both(values, layout, None)[1][1].any()


@given(st.data())
@settings(max_examples=200)
def test_any_values_at_all_give_the_same_bits(data):
    layout, has_message = data.draw(st.sampled_from(CASES))
    size = data.draw(st.integers(1, 300))
    any_floats = st_numpy.arrays(np.uint32, size, elements=st.integers(0, 2**32 - 1), fill=st.integers(0, 2**32 - 1))
    finite_ones = st_numpy.arrays(np.float32, size, elements=st.floats(width=32, allow_nan=False, allow_infinity=False))
    values = data.draw(any_floats).view(np.float32) if data.draw(st.booleans()) else data.draw(finite_ones)
    assert_same_bits(values, layout, data.draw(finite_ones) if has_message else None)


@given(st.data())
@settings(max_examples=200)
def test_any_payload_at_all_is_read_or_refused_alike(data):
    layout, has_message = data.draw(st.sampled_from(CASES))
    size = data.draw(st.integers(1, 300))
    payload = data.draw(st_numpy.arrays(np.uint8, ops.payload_nbytes(size, layout), elements=st.integers(0, 255)))
    if data.draw(st.booleans()):  # plausible scales, so that codes are reached
        payload[: ops.scales_nbytes(size, layout)] = 0x20
    message_in = np.linspace(-3, 3, size, dtype=np.float32) if has_message else None
    outs = [np.zeros(size, np.float32), np.zeros(size, np.float32)]
    accepted = [b.decode(payload, layout, o, message_in) for b, o in zip((reference, cpu), outs, strict=True)]
    assert accepted[0] == accepted[1]
    assert not accepted[0] or np.array_equal(outs[0].view(np.uint32), outs[1].view(np.uint32))


@pytest.mark.parametrize("scale", ["fp32", "bf16", "fp16", "e4m3"])
def test_a_nan_that_rounds_to_another_number_is_refused(scale):
    values = np.array([0x7FFF0001, 0xFFFFFFFF], np.uint32).view(np.float32)
    for value in values:
        assert both(np.full(1, value), Layout(4, 100, scale, "nearest", "least_error"), None) == [None, None]


def test_norms_are_those_of_numpy():
    chance = np.random.default_rng(3)
    for size in (0, 1, 1000):
        values, before, after = (chance.standard_normal(size).astype(np.float32) for _ in range(3))
        for message_in in (before, None):
            found = ops.squared_norms(values, message_in, after)
            assert np.allclose(found, reference.squared_norms(values, message_in, after), rtol=1e-12)


def test_kernels_let_other_threads_run():
    kernels = [cpu._encode_kernel(Layout(2, 64), True, True), cpu._decode_kernel(Layout(2, 64), True)]
    assert [kernel.targetoptions["nogil"] for kernel in kernels] == [True, True]


def test_a_warm_kernel_is_there_before_its_first_call():
    layout = Layout(2, 64, "bf16")
    cpu.warm_up([cpu.Config(layout, has_message=True)])
    before = cpu._encode_kernel.cache_info().misses, cpu._decode_kernel.cache_info().misses
    assert_same_bits(np.ones(64, np.float32), layout, np.zeros(64, np.float32))
    assert (cpu._encode_kernel.cache_info().misses, cpu._decode_kernel.cache_info().misses) == before
