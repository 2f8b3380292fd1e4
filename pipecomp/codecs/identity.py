"""The codec `identity`: fp32 values as they are, little-endian. Knows one sample's tensor; remembers nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import numpy as np
import torch

from pipecomp.codecs import _samples
from pipecomp.codecs._options import check_keys
from pipecomp.codecs.base import Codec, Decoded
from pipecomp.errors import CorruptPayload
from pipecomp.types import TensorSpec


class Identity(Codec):
    """4 bytes a value, no error. Options: none. Still refuses NaN and infinity, as every codec does."""

    name = "identity"
    is_exact = True

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> Identity:
        check_keys(cls.name, options, ())
        return cls()

    def encoded_nbytes(self, spec: TensorSpec, *, first_visit: bool) -> int:
        return 4 * spec.num_values

    def encode(
        self, values: torch.Tensor, message_in: torch.Tensor | None, *, seed: int, out: np.ndarray
    ) -> torch.Tensor | None:
        spec = _samples.spec_of(values)
        _samples.check_out(out, 4 * spec.num_values)
        _samples.check_finite(values.detach())
        out[:] = _little_endian(_samples.flat(values).view(np.uint8))
        return None

    def decode(self, buffer: np.ndarray, message_in: torch.Tensor | None, spec: TensorSpec) -> Decoded:
        _samples.check_buffer(buffer, 4 * spec.num_values)
        values, flat = _samples.new(spec)
        flat.view(np.uint8)[:] = _little_endian(buffer)
        if not _samples.is_finite(values):
            raise CorruptPayload("the payload holds values that are not finite")
        return Decoded(values, None)


def _little_endian(raw: np.ndarray) -> np.ndarray:
    return raw if sys.byteorder == "little" else raw.reshape(-1, 4)[:, ::-1].reshape(-1)


PLUGIN = Identity
