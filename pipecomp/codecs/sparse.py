"""The codec `sparse`: few of the values, and these quantized. Knows one sample's tensor; remembers nothing, not even its error.

    n values -- random subset --> m candidates -- k of largest magnitude --> quantizer

    payload = [ seed, 8 bytes, little-endian, if random < 1 | where the k are among the m, if k < m | scales and codes of the k ]

Made for `encode_with_feedback`: what is left out is not lost, but sent later. Wang et al., "CocktailSGD: Fine-tuning Foundation
Models over 500Mbps Networks" (ICML 2023), has the three in one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch

from pipecomp.codecs import _samples
from pipecomp.codecs._options import check_keys
from pipecomp.codecs._quantizer import OPTIONS, Quantizer
from pipecomp.codecs._samples import ByteArray, FloatArray
from pipecomp.codecs.base import Codec, Decoded
from pipecomp.errors import ConfigError
from pipecomp.native import blocks
from pipecomp.native import sparse as kernels
from pipecomp.types import TensorSpec

SEED_NBYTES = 8


class Parts(NamedTuple):
    """How many values take part, and what each part of a payload takes; a function of the shape and the options."""

    num_candidates: int  # of a random subset
    num_sent: int
    seed_nbytes: int
    places_nbytes: int
    values_nbytes: int

    @property
    def nbytes(self) -> int:
        return self.seed_nbytes + self.places_nbytes + self.values_nbytes

    def of(self, payload: ByteArray) -> tuple[ByteArray, ByteArray, ByteArray]:
        """Seed, places and quantized values, as views."""
        end = self.seed_nbytes + self.places_nbytes
        return payload[: self.seed_nbytes], payload[self.seed_nbytes : end], payload[end:]


class Sparse(Codec):
    """Sends `top` of `random` of the values, in `bits` each; all others decode to exactly 0.

    Of n values, m = max(1, round(random n)), ties to even, are candidates; of these the k = max(1, ceil(top m)) of largest
    magnitude are sent, of equal ones those that come first. Fractions count as they are written: 0.1 of 30 is 3.

    The candidates follow from the seed alone, by selection sampling over the whole sample (`native.sparse`): each set of m is
    as likely as any other, so each value is one with a probability of m / n, whatever its place and its neighbours. They are
    not scaled by n / m, so that what arrives is too small on average, and never too far: it is error feedback that makes up.

    Options: `bits` (1-8, required), `top` and `random` (fractions above 0, up to 1; 1 by default, one of them must be less),
    and those of `uniform`, for the sent values as one row: with `group = "row"`, all of them share a scale.
    """

    name = "sparse"

    def __init__(self, quantizer: Quantizer, top: float, random: float) -> None:
        self.quantizer = quantizer
        self.top = top
        self.random = random

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> Sparse:
        check_keys(cls.name, options, ("top", "random", *OPTIONS))
        quantizer = Quantizer.from_options(cls.name, options)
        top, random = _fraction("top", options), _fraction("random", options)
        if top == random == 1:
            raise ConfigError(
                "codec 'sparse': top = 1 and random = 1 would send every value; make one of them smaller, "
                "for example top = 0.1, or use codec 'uniform'"
            )
        return cls(quantizer, top, random)

    def encoded_nbytes(self, spec: TensorSpec, *, first_visit: bool) -> int:
        return self._parts(spec).nbytes

    def encode(
        self, values: torch.Tensor, message_in: torch.Tensor | None, *, seed: int, out: np.ndarray
    ) -> torch.Tensor | None:
        spec = _samples.spec_of(values)
        parts = self._parts(spec)
        _samples.check_out(out, parts.nbytes)
        _samples.check_finite(values.detach())  # all: a NaN that is not sent now would stay in the error for ever
        if not spec.num_values:
            return None
        seed_out, places, codes = parts.of(out)
        seed &= 0xFFFFFFFFFFFFFFFF
        chosen = _samples.flat(values)
        if parts.seed_nbytes:
            seed_out[:] = np.frombuffer(seed.to_bytes(SEED_NBYTES, "little"), np.uint8)
            chosen, every = blocks.empty(parts.num_candidates), chosen
            kernels.keep(every, seed, out=chosen)
        if parts.num_sent < parts.num_candidates:
            chosen, candidates = blocks.empty(parts.num_sent), chosen
            kernels.pick(candidates, places=places, out=chosen)
        self.quantizer.encode(chosen, None, None, _row(parts), seed, codes)
        return None

    def decode(self, buffer: np.ndarray, message_in: torch.Tensor | None, spec: TensorSpec) -> Decoded:
        parts = self._parts(spec)
        _samples.check_buffer(buffer, parts.nbytes)
        values, flat = _samples.new(spec)
        if not spec.num_values:
            return Decoded(values, None)
        seed, places, codes = parts.of(buffer)
        sent: FloatArray = blocks.empty(parts.num_sent)
        self.quantizer.decode(codes, None, _row(parts), sent)
        if parts.seed_nbytes:
            candidates = sent
            if parts.num_sent < parts.num_candidates:
                candidates = blocks.empty(parts.num_candidates)
                kernels.place(sent, places, out=candidates)
            kernels.spread(candidates, int.from_bytes(seed.tobytes(), "little"), out=flat)
        else:
            kernels.place(sent, places, out=flat)
        return Decoded(values, None)

    def warm_up(self, num_columns: int) -> None:
        self.quantizer.warm_up(1, has_message=False)  # of group = "row", whatever is sent, the kernel for any length
        kernels.warm_up()

    def describe(self) -> str:
        usual = Quantizer.from_options(self.name, {"bits": self.quantizer.bits})
        shares = "".join(f"/{key}{share:g}" for key, share in (("top", self.top), ("random", self.random)) if share < 1)
        rest = "" if self.quantizer == usual else str(self.quantizer).removeprefix(str(self.quantizer.bits))
        return f"sparse{self.quantizer.bits}{shares}{rest}"

    def _parts(self, spec: TensorSpec) -> Parts:
        return _parts(spec.num_values, self.top, self.random, self.quantizer)


@functools.lru_cache(maxsize=4096)
def _parts(num_values: int, top: float, random: float, quantizer: Quantizer) -> Parts:
    if num_values == 0:
        return Parts(0, 0, 0, 0, 0)
    num_candidates = max(1, round(_written(random) * num_values))
    num_sent = max(1, math.ceil(_written(top) * num_candidates))
    return Parts(
        num_candidates=num_candidates,
        num_sent=num_sent,
        seed_nbytes=SEED_NBYTES if random < 1 else 0,
        places_nbytes=kernels.places_nbytes(num_candidates, num_sent),
        values_nbytes=quantizer.nbytes(TensorSpec(1, num_sent)),
    )


def _row(parts: Parts) -> TensorSpec:
    """What is sent, as the quantizer sees it."""
    return TensorSpec(1, parts.num_sent)


def _written(fraction: float) -> Fraction:
    """The number that a run file has, not the float next to it: exact, so that every machine counts alike."""
    return Fraction(repr(fraction))


def _fraction(key: str, options: Mapping[str, object]) -> float:
    value = options.get(key, 1.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError(f"codec 'sparse': {key} = {value!r} is not possible; use a number above 0, up to 1, such as 0.1")
    return float(value)


PLUGIN = Sparse
