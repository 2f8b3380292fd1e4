"""The codec `cast`: values rounded to bf16 or fp16, little-endian. Knows one sample's tensor; remembers nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import numpy as np
import torch

from pipecomp.codecs import _samples
from pipecomp.codecs._options import check_keys, choice
from pipecomp.codecs.base import Codec, Decoded
from pipecomp.errors import CodecError, CorruptPayload
from pipecomp.types import TensorSpec

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Cast(Codec):
    """2 bytes a value, to nearest, ties to even: relative error at most 2^-9 (bf16) or 2^-12 (fp16, above 6.1e-5).

    Option: `dtype`, `bf16` (default) or `fp16`. A value that the dtype cannot hold (above 65504 in fp16) is refused: a
    number changed in silence by orders of magnitude is worse than a run that stops and says which dtype to take.
    """

    name = "cast"

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> Cast:
        check_keys(cls.name, options, ("dtype",))
        return cls(choice(cls.name, options, "dtype", tuple(_DTYPES), "bf16"))

    def encoded_nbytes(self, spec: TensorSpec, *, first_visit: bool) -> int:
        return 2 * spec.num_values

    def encode(
        self, values: torch.Tensor, message_in: torch.Tensor | None, *, seed: int, out: np.ndarray
    ) -> torch.Tensor | None:
        spec = _samples.spec_of(values)
        _samples.check_out(out, 2 * spec.num_values)
        rounded = values.detach().to(_DTYPES[self.dtype]).contiguous()
        if not _samples.is_finite(rounded.float()):
            _samples.check_finite(values.detach())
            largest = torch.finfo(_DTYPES[self.dtype]).max
            where = int(torch.nonzero(~torch.isfinite(rounded.reshape(-1)))[0, 0])
            shown = float(values.reshape(-1)[where])
            raise CodecError(f"value {where} is {shown:.6g}, beyond {largest:.6g} of {self.dtype}; use bf16 or no cast")
        out[:] = _little_endian(rounded.view(torch.int16).numpy().reshape(-1).view(np.uint8))
        return None

    def decode(self, buffer: np.ndarray, message_in: torch.Tensor | None, spec: TensorSpec) -> Decoded:
        _samples.check_buffer(buffer, 2 * spec.num_values)
        raw = torch.from_numpy(_little_endian(buffer).copy().view(np.int16))
        values = raw.view(_DTYPES[self.dtype]).to(torch.float32).reshape(spec.num_rows, spec.num_columns)
        if not _samples.is_finite(values):
            raise CorruptPayload("the payload holds values that are not finite")
        return Decoded(values, None)

    def describe(self) -> str:
        return self.dtype


def _little_endian(raw: np.ndarray) -> np.ndarray:
    return raw if sys.byteorder == "little" else raw.reshape(-1, 2)[:, ::-1].reshape(-1)


PLUGIN = Cast
