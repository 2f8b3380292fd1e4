"""Law 4: a sample's bytes are what the size function says, and that is what the formula in `docs/numerics.md` says."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch

from pipecomp import registry
from pipecomp.errors import CodecError
from pipecomp.types import TensorSpec

SPECS = [TensorSpec(1, 1), TensorSpec(1, 13), TensorSpec(4, 64), TensorSpec(3, 100), TensorSpec(1024, 1600), TensorSpec(0, 64)]


def quantized_nbytes(num_values: int, bits: int, group: int, scale_nbytes: int, head_nbytes: int) -> int:
    """Written once more, from the text: scales, then for each block of whole groups its planes, each rounded up to a byte."""
    planes = {1: [1], 2: [2], 3: [2, 1], 4: [4], 5: [4, 1], 6: [4, 2], 7: [4, 2, 1], 8: [8]}[bits]
    block = group
    while block < 128:
        block += group
    total = math.ceil(num_values / group) * scale_nbytes + (head_nbytes if num_values else 0)
    while num_values > 0:
        length = min(block, num_values)
        total += sum(math.ceil(length * width / 8) for width in planes)
        num_values -= length
    return total


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("group", [1, 5, 16, 24, 64, 100, 256, "row"])
@pytest.mark.parametrize(
    ("scale", "scale_nbytes", "head_nbytes"), [("e4m3", 1, 1), ("bf16", 2, 0), ("fp16", 2, 0), ("fp32", 4, 0)]
)
def test_sizes_follow_the_formula(
    bits: int, group: int | str, scale: str, scale_nbytes: int, head_nbytes: int
) -> None:
    for name in ("uniform", "delta"):
        codec = registry.load("pipecomp.codecs", name).from_options({"bits": bits, "group": group, "scale": scale})
        for spec in SPECS:
            length = spec.num_columns if group == "row" else group
            expected = quantized_nbytes(spec.num_values, bits, int(length), scale_nbytes, head_nbytes)
            assert codec.encoded_nbytes(spec, first_visit=False) == expected


@pytest.mark.parametrize("bits", range(2, 8))
@pytest.mark.parametrize("group", [8, 24, 32, 64])
def test_mixed_widths_take_a_byte_a_sample_more_than_equal_ones(bits: int, group: int) -> None:
    equal, mixed = (
        registry.load("pipecomp.codecs", "delta").from_options({"bits": bits, "group": group, "scale": "e4m3", "widths": widths})
        for widths in ("equal", "mixed")
    )
    for spec in SPECS:
        more = 1 if spec.num_values else 0
        assert mixed.encoded_nbytes(spec, first_visit=False) == equal.encoded_nbytes(spec, first_visit=False) + more


@pytest.mark.parametrize(("name", "options", "nbytes"), [("identity", {}, 4), ("cast", {}, 2), ("cast", {"dtype": "fp16"}, 2)])
def test_whole_values_take_the_bytes_of_their_dtype(name: str, options: Mapping[str, object], nbytes: int) -> None:
    codec = registry.load("pipecomp.codecs", name).from_options(options)
    assert [codec.encoded_nbytes(spec, first_visit=True) for spec in SPECS] == [nbytes * s.num_values for s in SPECS]


def test_the_published_settings_take_their_bits() -> None:
    spec = TensorSpec(1024, 1600)
    sizes = {
        bits: registry.load("pipecomp.codecs", "delta")
        .from_options({"bits": bits, "group": 64})
        .encoded_nbytes(spec, first_visit=False)
        for bits in (2, 3, 4)
    }
    assert {bits: 8 * nbytes / spec.num_values for bits, nbytes in sizes.items()} == {2: 2.25, 3: 3.25, 4: 4.25}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int32])
def test_no_dtype_is_converted_in_silence(dtype: torch.dtype) -> None:
    sparse = {"bits": 4, "top": 0.5}
    for name, options in [("identity", {}), ("cast", {}), ("uniform", {"bits": 4}), ("delta", {"bits": 4}), ("sparse", sparse)]:
        codec = registry.load("pipecomp.codecs", name).from_options(options)
        out = np.zeros(codec.encoded_nbytes(TensorSpec(2, 8), first_visit=True), np.uint8)
        with pytest.raises(CodecError, match="float32"):
            codec.encode(torch.ones(2, 8).to(dtype), None, seed=0, out=out)
