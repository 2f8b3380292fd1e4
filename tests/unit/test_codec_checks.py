"""The public suite of codecs sees each kind of broken codec."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipecomp.codecs.base import Decoded
from pipecomp.codecs.delta import Delta
from pipecomp.codecs.identity import Identity
from pipecomp.codecs.uniform import Uniform
from pipecomp.testing.codec_checks import check_codec
from pipecomp.types import TensorSpec


class LeavesAByte(Uniform):
    def encoded_nbytes(self, spec: TensorSpec, *, first_visit: bool) -> int:
        return super().encoded_nbytes(spec, first_visit=first_visit) + 1

    def encode(self, values, message_in, *, seed, out):
        return super().encode(values, message_in, seed=seed, out=out[:-1])

    def decode(self, buffer, message_in, spec):
        return super().decode(buffer[:-1], message_in, spec)


class Upcasts(Uniform):
    def decode(self, buffer, message_in, spec):
        return Decoded(super().decode(buffer, message_in, spec).values.double(), None)


class SharesOneScale(Identity):
    """Encodes against the largest value it has seen, as if the microbatch shared a scale."""

    largest = 1.0

    def encode(self, values, message_in, *, seed, out):
        self.largest = max(self.largest, float(values.abs().max())) if values.numel() else self.largest
        return super().encode(values / self.largest, message_in, seed=seed, out=out)


class EatsItsInput(Identity):
    def encode(self, values, message_in, *, seed, out):
        super().encode(values, message_in, seed=seed, out=out)
        values.zero_()


class UpdatesInPlace(Delta):
    def encode(self, values, message_in, *, seed, out):
        message_out = super().encode(values, message_in, seed=seed, out=out)
        return message_out if message_in is None else message_in.copy_(message_out)


class HidesNaN(Identity):
    def encode(self, values, message_in, *, seed, out):
        return super().encode(torch.nan_to_num(values), message_in, seed=seed, out=out)


class TakesAnySize(Identity):
    def decode(self, buffer, message_in, spec):
        whole = np.zeros(4 * spec.num_values, np.uint8)
        size = min(whole.size, buffer.size)
        whole[:size] = buffer[:size]
        return super().decode(whole, message_in, spec)


class RemembersTheSampleItself(Delta):
    """The fault of coding against the value instead of what the decoder holds of it."""

    def encode(self, values, message_in, *, seed, out):
        super().encode(values, message_in, seed=seed, out=out)
        return values.clone()


class ForgetsItsError(Uniform):
    def encode_with_feedback(self, values, error_in, *, seed, out):
        return super().encode_with_feedback(values, None, seed=seed, out=out)


@pytest.mark.parametrize(
    ("codec", "complaint"),
    [
        (LeavesAByte.from_options({"bits": 4}), "unwritten"),
        (Upcasts.from_options({"bits": 4}), "float64"),
        (SharesOneScale(), "neighbours"),
        (EatsItsInput(), "writes to its arguments|unwritten"),
        (UpdatesInPlace.from_options({"bits": 4}), "writes to its arguments|unwritten|disagree"),
        (HidesNaN(), "NonFiniteValues"),
        (TakesAnySize(), "CorruptPayload"),
        (ForgetsItsError.from_options({"bits": 2}), "fed back"),
        (RemembersTheSampleItself.from_options({"bits": 4}), "the two ends disagree"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_a_broken_codec_is_found(codec: object, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_codec(codec)
