"""The codec `uniform`: direct quantization, one scale a group of values. Knows one sample's tensor; remembers nothing."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from pipecomp.codecs import _samples
from pipecomp.codecs._options import check_keys
from pipecomp.codecs._quantizer import OPTIONS, Quantizer
from pipecomp.codecs.base import Codec, Decoded
from pipecomp.types import TensorSpec


class Uniform(Codec):
    """`bits` a value and one scale a group; the arithmetic and its error bound are those of `native.ops.encode`.

    Options: `bits` (1-8, required), `group` (values that share a scale, or `row`), `scale` (`e4m3`, `bf16`, `fp32`, `fp16`),
    `rounding` (`nearest`, or `stochastic`: unbiased), `fit` (`extreme`, or `least_error`), `rotation` (`none`, or `hadamard`),
    `levels` (`zero`, or `either`), `widths` (`equal`, or `mixed`: a bit more for large groups, one less for small ones).
    With neither `group` nor `scale`: groups of 32 and e4m3.
    """

    name = "uniform"

    def __init__(self, quantizer: Quantizer) -> None:
        self.quantizer = quantizer

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> Uniform:
        check_keys(cls.name, options, OPTIONS)
        return cls(Quantizer.from_options(cls.name, options))

    def encoded_nbytes(self, spec: TensorSpec, *, first_visit: bool) -> int:
        return self.quantizer.nbytes(spec)

    def encode(
        self, values: torch.Tensor, message_in: torch.Tensor | None, *, seed: int, out: np.ndarray
    ) -> torch.Tensor | None:
        spec = _samples.spec_of(values)
        self.quantizer.encode(_samples.flat(values), None, None, spec, seed, out)
        return None

    def encode_with_feedback(
        self, values: torch.Tensor, error_in: torch.Tensor | None, *, seed: int, out: np.ndarray
    ) -> torch.Tensor:
        """As `Codec.encode_with_feedback`, in one pass of the kernel and a subtraction: it sends values - error_in and gives
        error_in + decoded, which is the new error once the values are taken off."""
        spec = _samples.spec_of(values)
        error_out, flat = _samples.new(spec)
        self.quantizer.encode(_samples.flat(values), _samples.flat_message(error_in, spec), flat, spec, seed, out)
        return error_out.sub_(values)

    def decode(self, buffer: np.ndarray, message_in: torch.Tensor | None, spec: TensorSpec) -> Decoded:
        values, flat = _samples.new(spec)
        self.quantizer.decode(buffer, None, spec, flat)
        return Decoded(values, None)

    def warm_up(self, num_columns: int) -> None:
        self.quantizer.warm_up(num_columns, has_message=False)

    def describe(self) -> str:
        return f"uniform{self.quantizer}"


PLUGIN = Uniform
