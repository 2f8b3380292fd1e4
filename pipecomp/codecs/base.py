"""What a codec is: one sample's tensor -> bytes -> tensor. Knows tensors; knows no buffers, links, steps or samples' ids.

A codec is a value (name + options) that both ends build from the same configuration. Its two ends are stateless: whatever
the two ends must remember is passed in as `message_in` and handed back as `message_out`, so that a step can commit or abort
without the codec knowing (law 3). Each sample is encoded by itself (law 5): its bytes depend on its values, its message and
its seed, and on nothing else.

    encode:  values (L, H) fp32, message_in (L, H) fp32 or None, seed  ->  Encoded(buffer), message_out
    decode:  buffer, message_in or None                                ->  values (L, H) fp32, message_out
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from pipecomp.types import TensorSpec


class Encoded(NamedTuple):
    """One sample on its way to the wire."""

    buffer: np.ndarray  # (nbytes,) uint8, nbytes == codec.encoded_nbytes(spec, first_visit)
    message_out: torch.Tensor | None
    """(L, H) fp32, what both ends remember if the step commits; None for a codec without messages."""


class Decoded(NamedTuple):
    """One sample as the receiver sees it."""

    values: torch.Tensor  # (L, H) fp32
    message_out: torch.Tensor | None


class Codec(abc.ABC):
    """A pair of encoder and decoder, both pure functions of their arguments; safe to call from several threads.

    `has_messages` says whether the codec remembers a message for each sample (AC-SGD). If it does, a sample without a
    message yet (`message_in is None`) is on its *first visit*.
    """

    name: str
    has_messages: bool = False
    is_exact: bool = False
    """What is decoded is what was encoded, bit for bit, so that there is no error to feed back."""

    @classmethod
    @abc.abstractmethod
    def from_options(cls, options: Mapping[str, object]) -> Codec:
        """Build from the options of a run file, `codec` left out. Raises ConfigError naming the option and what is allowed."""

    @abc.abstractmethod
    def encoded_nbytes(self, spec: TensorSpec, *, first_visit: bool) -> int:
        """Exact size of the encoded buffer, in bytes (law 4)."""

    @abc.abstractmethod
    def encode(self, values: torch.Tensor, message_in: torch.Tensor | None, *, seed: int, out: np.ndarray) -> torch.Tensor | None:
        """Encode one sample into `out`; return message_out (a fresh tensor) or None for a codec without messages.

        Args:
            values: (L, H) fp32, contiguous.
            message_in: (L, H) fp32 or None; never written to.
            seed: 64-bit seed for stochastic rounding, a function of (run seed, link, sample id, version) (law 12).
            out: (encoded_nbytes,) uint8, contiguous, any alignment; every byte is written.

        Raises:
            NonFiniteValues: `values` hold NaN or infinity; says where.
            CodecError: wrong shape or dtype.
        """

    def encode_with_feedback(
        self, values: torch.Tensor, error_in: torch.Tensor | None, *, seed: int, out: np.ndarray
    ) -> torch.Tensor:
        """Encode `values` less the error of what was sent before; return the error with what is sent now (fresh, fp32).

        Error feedback, for gradients: an error is what the decoder has seen too much of so far, and is taken off the next time,
        so that over many steps what arrives adds up to what was meant. It is the sender's alone, and its to keep or forget when
        a step commits or aborts. For codecs without messages only.

        Args:
            values: (L, H) fp32, contiguous.
            error_in: (L, H) fp32, what the last call gave for the same values; None for zeros (the first time).
            seed, out: as `encode` has them.

        Returns:
            (L, H) fp32: decoded - (values - error_in).

        Raises:
            NonFiniteValues, CodecError: as `encode`.

        Source: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019, algorithm 1.
        """
        meant = values if error_in is None else values - error_in
        self.encode(meant, None, seed=seed, out=out)
        decoded = self.decode(out, None, TensorSpec(values.shape[0], values.shape[1])).values
        return decoded.sub_(meant)

    @abc.abstractmethod
    def decode(self, buffer: np.ndarray, message_in: torch.Tensor | None, spec: TensorSpec) -> Decoded:
        """Decode one sample. `values` may share memory with `message_out`, never with `buffer` or `message_in`.

        Raises:
            CorruptPayload: the buffer's size is not `encoded_nbytes`, or its content is one that no encoder writes.
        """

    def warm_up(self, num_columns: int) -> None:  # noqa: B027 - most codecs have nothing to prepare
        """Prepare what the first calls on samples with `num_columns` would else wait for (compile kernels, or load them)."""

    def describe(self) -> str:
        """One word for tables, for example `delta3/g64`."""
        return self.name
