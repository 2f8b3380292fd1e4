"""What codecs make of samples that are not the plain case."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipecomp import registry
from pipecomp.codecs.base import Codec, Decoded
from pipecomp.errors import CodecError, CorruptPayload, NonFiniteValues
from pipecomp.native import cpu
from pipecomp.types import TensorSpec

STATELESS = [("identity", {}), ("cast", {}), ("uniform", {"bits": 4}), ("sparse", {"bits": 4, "top": 0.5, "random": 0.5})]


def build(name: str, **options: object) -> Codec:
    return registry.load("pipecomp.codecs", name).from_options(options)


def through(codec: Codec, values: torch.Tensor, message: torch.Tensor | None = None) -> Decoded:
    spec = TensorSpec(*values.shape)
    payload = np.zeros(codec.encoded_nbytes(spec, first_visit=message is None), np.uint8)
    codec.encode(values, message, seed=0, out=payload)
    return codec.decode(payload, message, spec)


def test_identity_keeps_every_bit() -> None:
    values = torch.tensor([[1.0, -0.0, 1e-45, 3.4e38, -1.2345678]])
    assert torch.equal(through(build("identity"), values).values.view(torch.int32), values.view(torch.int32))


def test_identity_takes_values_whose_sum_overflows() -> None:
    values = torch.full((2, 8), 3e38)
    assert torch.equal(through(build("identity"), values).values, values)


def test_a_cast_rounds_to_nearest_ties_to_even() -> None:
    values = torch.tensor([[1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-9]])
    assert through(build("cast"), values).values.tolist() == [[1.0, 1 + 2.0**-6, 1.0]]


@pytest.mark.parametrize(("dtype", "value", "limit"), [("fp16", 65520.0, "65504"), ("bf16", 3.4e38, "3.38953e+38")])
def test_a_value_beyond_the_dtype_of_a_cast_is_refused_by_name(dtype: str, value: float, limit: str) -> None:
    values = torch.ones(2, 8)
    values[1, 2] = value
    with pytest.raises(CodecError) as caught:
        through(build("cast", dtype=dtype), values)
    assert f"value 10 is {value:.6g}, beyond {limit} of {dtype}" in str(caught.value)
    assert not isinstance(caught.value, NonFiniteValues)


@pytest.mark.parametrize(("name", "options"), STATELESS)
def test_a_view_with_gaps_is_encoded_as_what_it_shows(name: str, options: dict[str, object]) -> None:
    values = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).t()
    codec = build(name, **options)
    assert torch.equal(through(codec, values).values, through(codec, values.contiguous()).values)


@pytest.mark.parametrize(("name", "options"), STATELESS)
def test_a_sample_may_be_part_of_a_graph(name: str, options: dict[str, object]) -> None:
    values = torch.ones(2, 8, requires_grad=True)
    received = through(build(name, **options), values * 2).values
    assert not received.requires_grad


@pytest.mark.parametrize(("name", "dtype"), [("identity", np.float32), ("cast", np.float16)])
def test_whole_values_that_are_not_finite_are_corrupt(name: str, dtype: type) -> None:
    codec = build(name) if name == "identity" else build(name, dtype="fp16")
    payload = np.array([1.0, np.nan], dtype).view(np.uint8)
    with pytest.raises(CorruptPayload, match="not finite"):
        codec.decode(payload, None, TensorSpec(1, 2))


def test_a_message_of_another_shape_is_refused() -> None:
    with pytest.raises(CodecError, match="shape"):
        through(build("delta", bits=4), torch.ones(2, 8), torch.ones(2, 7))


def test_a_buffer_of_another_kind_is_refused() -> None:
    with pytest.raises(CodecError, match="uint8"):
        build("identity").decode(np.zeros(2, np.float32), None, TensorSpec(1, 2))


def test_a_change_costs_the_error_of_the_change_and_not_of_the_value() -> None:
    chance = torch.Generator().manual_seed(0)
    message = torch.randn(64, 64, generator=chance)
    values = message + 0.01 * torch.randn(64, 64, generator=chance)
    direct, delta = through(build("uniform", bits=4), values), through(build("delta", bits=4), values, message)
    assert (direct.values - values).norm() > 50 * (delta.values - values).norm()


def test_after_a_warm_up_no_visit_compiles_anything() -> None:
    codec = build("delta", bits=3, group="row")
    codec.warm_up(48)
    compiled = cpu._encode_kernel.cache_info().misses, cpu._decode_kernel.cache_info().misses
    values = torch.randn(5, 48, generator=torch.Generator().manual_seed(0))
    message = through(codec, values).values
    through(codec, values, message)
    assert (cpu._encode_kernel.cache_info().misses, cpu._decode_kernel.cache_info().misses) == compiled
