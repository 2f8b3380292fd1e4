"""What the codec `sparse` sends of a sample: how many bytes, which values, and what of the rest error feedback makes up for."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from pipecomp.codecs.sparse import Sparse
from pipecomp.codecs.uniform import Uniform
from pipecomp.errors import CodecError, ConfigError, CorruptPayload, NonFiniteValues
from pipecomp.native import _sparse, cpu
from pipecomp.types import TensorSpec

SEED = 0x0123456789ABCDEF
SHAPES = [(0, 8), (1, 1), (1, 2), (1, 9), (3, 50), (7, 64), (13, 33), (100, 101), (64, 1024)]


def build(**options: object) -> Sparse:
    return Sparse.from_options(options)


def normal(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def encoded(codec: Sparse, values: torch.Tensor, seed: int = SEED) -> np.ndarray:
    out = np.empty(codec.encoded_nbytes(TensorSpec(*values.shape), first_visit=True), np.uint8)
    assert codec.encode(values, None, seed=seed, out=out) is None
    return out


def through(codec: Sparse, values: torch.Tensor, seed: int = SEED) -> torch.Tensor:
    return codec.decode(encoded(codec, values, seed), None, TensorSpec(*values.shape)).values


# ----------------------------------------------------------------------------------------------------------------- sizes


def expected_nbytes(num_values: int, bits: int, top: str, random: str, options: dict[str, object]) -> int:
    """Written once more, from the text of `docs/numerics.md`."""
    if num_values == 0:
        return 0
    candidates = max(1, round(Fraction(random) * num_values))
    sent = max(1, math.ceil(Fraction(top) * candidates))
    ways = [math.ceil(candidates / 8)]
    ways += [
        math.ceil((sent + (candidates - 1) // 2**width) / 8) + math.ceil(sent * width / 8) for width in range(1, 40)
    ]
    coded = Uniform.from_options({"bits": bits, **options}).encoded_nbytes(TensorSpec(1, sent), first_visit=True)
    return (8 if random != "1" else 0) + (min(ways) if sent < candidates else 0) + coded


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("top", "random"), [("0.1", "1"), ("0.5", "1"), ("1", "0.3"), ("0.25", "0.5"), ("0.001", "0.001")])
@pytest.mark.parametrize(("bits", "options"), [(4, {}), (3, {"group": "row", "scale": "fp32"}), (1, {"group": 7})])
def test_a_sample_takes_the_bytes_that_the_text_says(
    shape: tuple[int, int], top: str, random: str, bits: int, options: dict[str, object]
) -> None:
    codec = build(bits=bits, top=float(top), random=float(random), **options)
    nbytes = codec.encoded_nbytes(TensorSpec(*shape), first_visit=False)
    assert nbytes == expected_nbytes(math.prod(shape), bits, top, random, options)
    assert nbytes == codec.encoded_nbytes(TensorSpec(*shape), first_visit=True)
    assert through(codec, normal(*shape)).shape == shape


def test_four_bits_for_a_tenth_take_less_than_a_bit_a_value() -> None:
    spec = TensorSpec(1024, 4096)
    assert 8 * build(bits=4, top=0.1).encoded_nbytes(spec, first_visit=True) / spec.num_values == pytest.approx(0.950, abs=5e-4)


def test_a_fraction_counts_as_it_is_written() -> None:
    assert 0.07 * 100 > 7  # in floats
    assert int(through(build(bits=8, top=0.07), normal(2, 50)).count_nonzero()) == 7


# --------------------------------------------------------------------------------------------------------------- choices


@pytest.mark.parametrize("shape", SHAPES[1:])
@pytest.mark.parametrize("top", [0.02, 0.1, 0.4, 0.9])
def test_the_largest_values_arrive_and_all_others_are_zero(shape: tuple[int, int], top: float) -> None:
    values = normal(*shape)
    num_sent = max(1, math.ceil(Fraction(str(top)) * values.numel()))
    is_sent = torch.zeros(values.numel(), dtype=torch.bool)
    is_sent[values.abs().reshape(-1).argsort(descending=True, stable=True)[:num_sent]] = True
    received = through(build(bits=8, top=top, scale="fp32", group=32), values)
    assert bool((received.reshape(-1)[~is_sent] == 0).all())
    assert bool(((received - values).abs().reshape(-1)[is_sent] <= 0.02 * values.abs().max()).all())


def test_what_is_sent_is_what_uniform_makes_of_the_chosen_ones() -> None:
    values = normal(20, 50)
    chosen = values.reshape(-1)[values.abs().reshape(-1).argsort(descending=True)[:100].sort().values].reshape(1, -1)
    direct = np.empty(Uniform.from_options({"bits": 3}).encoded_nbytes(TensorSpec(1, 100), first_visit=True), np.uint8)
    Uniform.from_options({"bits": 3}).encode(chosen, None, seed=SEED, out=direct)
    assert np.array_equal(encoded(build(bits=3, top=0.1), values)[-direct.size :], direct)


def test_of_equal_values_those_that_come_first_arrive() -> None:
    values = torch.tensor([[1.0, -2.0, 2.0, 2.0, -2.0, 0.5, 2.0, 0.0]])
    assert through(build(bits=8, top=0.375), values).nonzero()[:, 1].tolist() == [1, 2, 3]
    assert through(build(bits=8, top=0.25), torch.ones(2, 8)).nonzero().tolist() == [[0, 0], [0, 1], [0, 2], [0, 3]]


def test_the_seed_chooses_and_travels_with_the_values() -> None:
    codec, values = build(bits=8, random=0.25), torch.ones(10, 40)
    payloads = {seed: encoded(codec, values, seed) for seed in (1, 2, 2**64 - 1)}
    assert payloads[1][:8].tobytes() == b"\x01\0\0\0\0\0\0\0"
    received = {seed: codec.decode(payload, None, TensorSpec(10, 40)).values for seed, payload in payloads.items()}
    assert all(int(each.count_nonzero()) == 100 for each in received.values())
    assert not torch.equal(received[1], received[2])
    assert torch.equal(received[1], through(build(bits=8, random=0.25), values, 1))


def test_without_a_random_subset_the_seed_changes_nothing() -> None:
    assert np.array_equal(encoded(build(bits=4, top=0.1), normal(9, 9), 1), encoded(build(bits=4, top=0.1), normal(9, 9), 2))


@pytest.mark.parametrize("random", [0.05, 0.5])
def test_every_place_is_chosen_about_as_often_as_any_other(random: float) -> None:
    codec, num_seeds = build(bits=8, random=random), 3000
    counts = sum((through(codec, torch.ones(3, 40), seed) > 0).double() for seed in range(num_seeds))
    assert float(counts.mean()) == num_seeds * random
    chance = math.sqrt(num_seeds * random * (1 - random))
    assert float((counts - num_seeds * random).abs().max()) < 4.5 * chance
    assert 0.7 < float((counts - num_seeds * random).square().mean()) / chance**2 < 1.3


def test_the_largest_of_the_random_subset_are_sent() -> None:
    values = torch.arange(1.0, 401.0).reshape(10, 40)
    candidates = through(build(bits=8, random=0.5), values).nonzero()
    sent = through(build(bits=8, random=0.5, top=0.1), values).nonzero()
    assert torch.equal(sent, candidates[-20:])


# -------------------------------------------------------------------------------------------------------------- feedback


OPTIONS = [{"bits": 4, "top": 0.1}, {"bits": 4, "random": 0.1}, {"bits": 2, "top": 0.2, "random": 0.5}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_with_feedback_what_arrives_adds_up_to_what_was_meant(options: dict[str, object]) -> None:
    codec, values, error = build(**options), normal(20, 50), None
    out = np.empty(codec.encoded_nbytes(TensorSpec(20, 50), first_visit=True), np.uint8)
    arrived, errors = torch.zeros(20, 50), []
    for step in range(200):
        error = codec.encode_with_feedback(values, error, seed=SEED + step, out=out)
        arrived += codec.decode(out, None, TensorSpec(20, 50)).values
        errors.append(float(error.norm() / values.norm()))
    assert max(errors[100:]) < 1.2 * max(errors[:100])  # it does not grow
    assert float((arrived / 200 - values).norm() / values.norm()) == pytest.approx(errors[-1] / 200, rel=1e-2)
    assert float((arrived / 200 - values).norm() / values.norm()) < 0.1
    assert float(((arrived / 200 - values).abs() / values.abs().max()).max()) < 0.2


def test_without_feedback_small_values_never_arrive() -> None:
    codec, values = build(bits=4, top=0.1), normal(20, 50)
    arrived = sum(through(codec, values, seed) for seed in range(200)) / 200
    assert int((arrived == 0).sum()) == 900


# --------------------------------------------------------------------------------------------------------------- refusal


def test_a_seed_may_be_any_but_a_damaged_bitmap_is_corrupt() -> None:
    codec, spec = build(bits=4, top=0.5, random=0.5), TensorSpec(4, 32)
    payload = encoded(codec, normal(4, 32))
    bitmap = slice(8, 16)  # of 64 candidates
    assert int(np.unpackbits(payload[bitmap]).sum()) == 32
    payload[:8] ^= 0xFF
    codec.decode(payload, None, spec)
    for change in (0x01, 0x80):
        damaged = payload.copy()
        damaged[9] ^= change
        with pytest.raises(CorruptPayload, match="where they are"):
            codec.decode(damaged, None, spec)


def test_places_beyond_the_end_or_twice_are_corrupt() -> None:
    codec, spec = build(bits=4, top=0.1), TensorSpec(1, 18)
    payload = encoded(codec, torch.tensor([[0.0] * 16 + [1.0, 1.0]]))
    # 2 of 18 in ranges of 4: four zeros and two ones, from the lowest bit on, then places 0 and 1 of two bits each.
    assert payload[:2].tolist() == [0b11_0000, 0b01_00]
    for places in (0b10_00, 0b00_01, 0b01_01, 0b1_01_00):
        payload[1] = places
        with pytest.raises(CorruptPayload, match="where they are"):
            codec.decode(payload, None, spec)


def test_what_the_quantizer_refuses_is_corrupt() -> None:
    codec = build(bits=4, top=0.1, scale="fp32", group=32)
    payload = encoded(codec, normal(4, 50))
    uniform = Uniform.from_options({"bits": 4, "scale": "fp32", "group": 32})
    scale = payload[-uniform.encoded_nbytes(TensorSpec(1, 20), first_visit=True) :][:4]
    scale[:] = np.float32([np.nan]).view(np.uint8)
    with pytest.raises(CorruptPayload, match="scale"):
        codec.decode(payload, None, TensorSpec(4, 50))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_payload_cut_short_or_too_long_is_corrupt(options: dict[str, object]) -> None:
    codec, values = build(**options), normal(3, 50)
    payload = encoded(codec, values)
    for wrong in (payload[:0], payload[:-1], np.append(payload, np.uint8(0))):
        with pytest.raises(CorruptPayload, match=f"{payload.size} bytes was expected, got {wrong.size}"):
            codec.decode(wrong, None, TensorSpec(3, 50))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_value_is_named_by_its_place_in_the_sample_even_if_it_is_not_chosen(
    options: dict[str, object], bad: float
) -> None:
    codec, values = build(**options), normal(3, 50)
    out = np.empty(codec.encoded_nbytes(TensorSpec(3, 50), first_visit=True), np.uint8)
    for place in range(0, 150, 7):
        broken = values.clone()
        broken.view(-1)[place] = bad
        with pytest.raises(NonFiniteValues, match=f"value {place} is {bad}"):
            codec.encode(broken, None, seed=SEED, out=out)
        with pytest.raises(NonFiniteValues, match=f"value {place} is {bad}"):
            codec.encode_with_feedback(broken, None, seed=SEED, out=out)


def test_values_whose_sum_overflows_are_none_the_worse() -> None:
    values = torch.full((2, 8), 3e38)
    assert int(through(build(bits=4, top=0.25), values).count_nonzero()) == 4


def test_an_output_of_another_size_is_refused() -> None:
    with pytest.raises(CodecError, match="out must be"):
        build(bits=4, top=0.5).encode(normal(3, 50), None, seed=0, out=np.empty(7, np.uint8))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"top": 0.5}, "needs bits, a whole number from 1 to 8"),
        ({"bits": 9, "top": 0.5}, "bits = 9 is not possible; use a whole number from 1 to 8"),
        ({"bits": 4}, "top = 1 and random = 1 would send every value; .*top = 0.1, or use codec 'uniform'"),
        ({"bits": 4, "top": 1, "random": 1.0}, "use codec 'uniform'"),
        ({"bits": 4, "top": 0}, "top = 0 is not possible; use a number above 0, up to 1"),
        ({"bits": 4, "top": 1.5}, r"top = 1.5 is not possible"),
        ({"bits": 4, "random": -0.1}, "random = -0.1 is not possible"),
        ({"bits": 4, "random": math.nan}, "random = nan is not possible"),
        ({"bits": 4, "top": True}, "top = True is not possible"),
        ({"bits": 4, "top": "0.1"}, "top = '0.1' is not possible"),
        ({"bits": 4, "top": 0.1, "groups": 64}, "no option 'groups'; its options are: top, random, bits, group"),
        ({"bits": 4, "top": 0.1, "scale": "fp8"}, "use one of: fp32, bf16, fp16"),
    ],
)
def test_an_impossible_option_is_named_with_what_to_use(options: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        build(**options)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"bits": 4, "top": 0.1, "random": 0.5}, "sparse4/top0.1/random0.5"),
        ({"bits": 2, "top": 0.05}, "sparse2/top0.05"),
        ({"bits": 3, "random": 0.1, "group": 64}, "sparse3/random0.1/g64"),
    ],
)
def test_a_table_says_what_is_sent(options: dict[str, object], word: str) -> None:
    assert build(**options).describe() == word


def test_after_a_warm_up_no_sample_compiles_anything() -> None:
    makers = (cpu._encode_kernel, cpu._decode_kernel, _sparse._keep_kernel, _sparse._spread_kernel)
    makers += (_sparse._pick_kernel, _sparse._place_kernel)
    for options in ({"bits": 3, "top": 0.1, "random": 0.5}, {"bits": 3, "top": 0.3, "group": "row"}):
        codec = build(**options)
        codec.warm_up(64)
        compiled = [maker.cache_info().misses for maker in makers]
        codec.encode_with_feedback(normal(10, 64), None, seed=0, out=encoded(codec, normal(10, 64)))
        assert [maker.cache_info().misses for maker in makers] == compiled
