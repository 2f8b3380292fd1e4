"""Mixed widths: which groups get a bit more, what that costs, and that a decoder sees it in the scales. On plain kernels."""

from __future__ import annotations

import numpy as np
import pytest

from pipecomp.errors import CodecError, CorruptPayload
from pipecomp.native import ops, reference
from pipecomp.native.ops import Layout

MIXED = Layout(2, 32, "e4m3", widths="mixed")
EITHER = Layout(2, 32, "e4m3", fit="least_error", levels="either", widths="mixed")


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch):
    monkeypatch.setattr(ops, "_backend", lambda: reference)


def encode(values, layout, message_in=None):
    values = np.asarray(values, np.float32)
    payload = np.full(ops.payload_nbytes(values.size, layout), 0xA5, np.uint8)
    message_out = np.full(values.size, np.nan, np.float32)
    ops.encode(values, layout, out=payload, message_in=message_in, message_out=message_out)
    out = np.full(values.size, np.nan, np.float32)
    ops.decode(payload, layout, out=out, message_in=message_in)
    assert np.array_equal(out.view(np.uint32), message_out.view(np.uint32))
    return payload, message_out


def errors(values, layout):
    """RMS error of each group, as part of its largest magnitude."""
    groups = np.asarray(values, np.float32).reshape(-1, layout.group)
    seen = encode(groups.reshape(-1), layout)[1].reshape(groups.shape)
    return np.sqrt(np.square(seen - groups).mean(axis=1)) / np.abs(groups).max(axis=1)


def groups_of(*sizes, group=32):
    """Groups that are alike but for their size."""
    pattern = np.random.default_rng(0).standard_normal(group).astype(np.float32)
    return (pattern[None] * np.array(sizes, np.float32)[:, None]).reshape(-1)


def num_wide(payload, num_whole):
    return num_whole * int(payload[1]) // ops.SHARES


@pytest.mark.parametrize("layout", [MIXED, EITHER], ids=str)
def test_groups_far_above_their_mirror_image_have_a_bit_more(layout):
    values = groups_of(1, 16, 4, 4, 0.25, 5)
    payload, _ = encode(values, layout)
    assert num_wide(payload, 6) == 2
    middle, wide, _, _, narrow, other_wide = errors(values, layout)
    alone = {bits: errors(groups_of(1), layout._replace(bits=bits, widths="equal"))[0] for bits in (1, 2, 3)}
    assert [wide, other_wide, narrow] == pytest.approx([alone[3], alone[3], alone[1]], rel=0.35)
    assert wide < middle < 1.2 * narrow


@pytest.mark.parametrize("layout", [MIXED, EITHER], ids=str)
def test_a_sample_of_groups_alike_has_equal_widths(layout):
    values = groups_of(*np.linspace(1, 1.9, 50))
    payload, seen = encode(values, layout)
    equal_payload, equal_seen = encode(values, layout._replace(widths="equal"))
    assert payload[1] == 0
    assert np.array_equal(np.delete(payload, 1), equal_payload)
    assert np.array_equal(seen, equal_seen)


def test_of_groups_alike_the_first_have_a_bit_more_and_the_last_a_bit_less():
    places = np.array([9, 50, 20, 20, 50, 9, 20, 50])
    pieces = reference._pieces(places, ops.SHARES // 4 + 1, 9, MIXED)
    assert [(layout.bits, np.flatnonzero(groups).tolist()) for layout, groups in pieces] == [
        (3, [1, 4]), (2, [2, 3, 6, 7, 8]), (1, [0, 5]),
    ]  # fmt: skip
    pieces = reference._pieces(np.array([5, 5, 5, 5]), ops.SHARES // 2, 4, MIXED)
    assert [np.flatnonzero(groups).tolist() for _, groups in pieces] == [[0, 1], [], [2, 3]]


@pytest.mark.parametrize(("bits", "most"), [(2, 0.95), (3, 0.85), (4, 0.8)])
@pytest.mark.parametrize("levels", ["zero", "either"])
def test_groups_unlike_each_other_lose_less_in_as_many_bytes(bits, levels, most):
    chance = np.random.default_rng(1)
    values = (chance.standard_normal((400, 32)) * 2 ** chance.normal(0, 1.5, (400, 1))).astype(np.float32).reshape(-1)
    layout = EITHER._replace(bits=bits) if levels == "either" else MIXED._replace(bits=bits)
    equal = layout._replace(widths="equal")
    assert ops.payload_nbytes(values.size, layout) == ops.payload_nbytes(values.size, equal) + 1
    lost, lost_equal = (np.linalg.norm(reference.seen(values, each) - values) for each in (layout, equal))
    assert lost < most * lost_equal


@pytest.mark.parametrize("bits", ops.MIXED_BITS)
@pytest.mark.parametrize("group", [8, 24, 32])
@pytest.mark.parametrize("fit", ["extreme", "least_error"])
def test_a_decoder_sees_the_widths_from_the_scales(bits, group, fit):
    # Steps are chosen with the widths known, and must not change the order that they follow from.
    chance = np.random.default_rng(bits * group)
    for size in (1, group - 1, group, 5 * group + 3, 41 * group):
        scales = np.repeat(2 ** chance.normal(0, 1, -(-size // group)), group)[:size]
        values = (chance.standard_normal(size) * scales).astype(np.float32)
        encode(values, Layout(bits, group, "e4m3", fit=fit, levels="either" if fit == "least_error" else "zero", widths="mixed"))


def test_a_message_never_moves_away_from_its_sample():
    message, noise = np.random.default_rng(0).standard_normal((2, 6400)).astype(np.float32)
    values = message + noise**5
    seen = encode(values, EITHER, message)[1]
    for group in np.split(np.arange(6400), 200):
        assert np.linalg.norm((seen - values)[group]) <= np.linalg.norm((message - values)[group]) * (1 + 1e-5)


@pytest.mark.parametrize("size", [1e-38, 1e-31, 1e38])
def test_samples_at_the_limits_of_fp32_have_finite_steps(size):
    values = groups_of(1, 1e-3, 1, 1e-3) * np.float32(size)
    payload, seen = encode(values, EITHER)
    assert np.isfinite(seen).all()
    assert num_wide(payload, 4) == (0 if size < 1e-36 else 2)


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        (MIXED._replace(widths="any"), "widths must be one of equal, mixed"),
        (MIXED._replace(bits=8), "bits must be 2 to 7 with mixed widths, got 8"),
        (MIXED._replace(group=20), "group must be a multiple of 8 with mixed widths, got 20"),
        (MIXED._replace(scale="bf16"), "widths can be 'mixed' only with scale 'e4m3'"),
        (MIXED._replace(rounding="stochastic"), "widths can be 'mixed' only with"),
        (MIXED._replace(rotation="hadamard"), "widths can be 'mixed' only with"),
    ],
)
def test_what_cannot_be_mixed_is_refused_by_name(layout, told):
    with pytest.raises(CodecError, match=told):
        ops.encode(np.zeros(64, np.float32), layout, out=np.zeros(20, np.uint8))


def test_a_scale_that_no_encoder_writes_for_its_width_is_corrupt():
    values = groups_of(1, 100, 1, 100)
    payload, _ = encode(values, MIXED)
    for top in (0, 254, 255):
        payload[0] = top
        with pytest.raises(CorruptPayload, match="scale"):
            ops.decode(payload, MIXED, out=values)
