"""The codec `delta` (AC-SGD): quantize the change since a sample's last visit. Knows a sample and its message, not its buffer.

    first visit    message_in is None: the sample goes through a stateless codec; message_out = what that one decodes to
    later visits   the buffer holds Q(values - message_in); message_out = message_in + Q(values - message_in), at both ends

Wang et al., "Fine-tuning Language Models over Slow Networks using Activation Compression with Guarantees" (2022), Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from pipecomp import registry
from pipecomp.codecs import _samples
from pipecomp.codecs._options import check_keys
from pipecomp.codecs._quantizer import OPTIONS, Quantizer
from pipecomp.codecs.base import Codec, Decoded
from pipecomp.errors import ConfigError
from pipecomp.types import TensorSpec

DEFAULT_FIRST_VISIT: Mapping[str, object] = {"codec": "uniform", "bits": 4}


class Delta(Codec):
    """The options of `uniform`, and `first_visit`: a table of any stateless codec (default: `uniform`, 4 bits), or "whole".

    The error of a visit is that of quantizing the change, not the value; it does not pile up, because the change is taken
    against what the decoder holds. Both ends get the same bits (law 2).
    """

    name = "delta"
    has_messages = True

    def __init__(self, quantizer: Quantizer, first_visit: Codec) -> None:
        self.quantizer = quantizer
        self.first_visit = first_visit

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> Delta:
        check_keys(cls.name, options, (*OPTIONS, "first_visit"))
        return cls(
            Quantizer.from_options(cls.name, options), _first_visit(options.get("first_visit", DEFAULT_FIRST_VISIT))
        )

    def encoded_nbytes(self, spec: TensorSpec, *, first_visit: bool) -> int:
        if first_visit:
            return self.first_visit.encoded_nbytes(spec, first_visit=True)
        return self.quantizer.nbytes(spec)

    def encode(
        self, values: torch.Tensor, message_in: torch.Tensor | None, *, seed: int, out: np.ndarray
    ) -> torch.Tensor | None:
        spec = _samples.spec_of(values)
        if message_in is None:
            self.first_visit.encode(values, None, seed=seed, out=out)
            return self.first_visit.decode(out, None, spec).values
        before = _samples.flat_message(message_in, spec)
        message_out, after = _samples.new(spec)
        self.quantizer.encode(_samples.flat(values), before, after, spec, seed, out)
        return message_out

    def decode(self, buffer: np.ndarray, message_in: torch.Tensor | None, spec: TensorSpec) -> Decoded:
        if message_in is None:
            values = self.first_visit.decode(buffer, None, spec).values
            return Decoded(values, values)
        before = _samples.flat_message(message_in, spec)
        values, flat = _samples.new(spec)
        self.quantizer.decode(buffer, before, spec, flat)
        return Decoded(values, values)

    def warm_up(self, num_columns: int) -> None:
        self.first_visit.warm_up(num_columns)
        self.quantizer.warm_up(num_columns, has_message=True)

    def describe(self) -> str:
        return f"delta{self.quantizer}"


def _first_visit(option: object) -> Codec:
    if option == "whole":
        option = {"codec": "identity"}
    if not isinstance(option, Mapping) or not isinstance(option.get("codec"), str):
        raise ConfigError(
            f"codec 'delta': first_visit = {option!r} is not possible; "
            'use "whole" or a table such as {codec = "uniform", bits = 8}'
        )
    options = {str(key): value for key, value in option.items() if key != "codec"}
    try:
        plugin: type[Codec] = registry.load("pipecomp.codecs", option["codec"])
        if plugin.has_messages:
            raise ConfigError(f"codec {option['codec']!r} has messages; use one without")
        return plugin.from_options(options)
    except ConfigError as e:
        raise ConfigError(f"first_visit: {e}") from e


PLUGIN = Delta
