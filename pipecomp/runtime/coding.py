"""One microbatch through a codec, sample by sample, at one end of a link. Knows codecs, messages' buffers and message headers;
no sockets, no event loop. Its calls run in codec threads.

    sender     values[b, :length]  -- codec.encode(message_in) -->  one frame a sample;  message_out staged for the step
    receiver   frame               -- codec.decode(message_in) -->  values, zeros at padding;  message_out staged likewise

Padding is never encoded (law 5). The version in each sample's header says which message the values are coded against; an end
that remembers another one refuses (law 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from pipecomp.buffers.base import MessageBuffer, SampleMessage
from pipecomp.codecs.base import Codec
from pipecomp.errors import CodecError, MessageMismatch, NonFiniteValues, RemoteProtocolError
from pipecomp.native import ops
from pipecomp.protocol.messages import LinkMeter, SampleHeader, SampleRef
from pipecomp.runtime.seeds import rounding_seed
from pipecomp.types import Kind, SampleId, TensorSpec


class EncodedMicrobatch(NamedTuple):
    """What a TensorMessage carries."""

    samples: tuple[SampleHeader, ...]
    buffers: tuple[memoryview, ...]
    num_values: int
    meter: LinkMeter | None


class LinkCoder:
    """Encodes or decodes the microbatches of one kind of traffic at one end of one link."""

    def __init__(self, codec: Codec, buffer: MessageBuffer | None, *, link: str, kind: Kind, run_seed: int) -> None:
        """`buffer`: this end's messages, needed where the codec has messages and None elsewhere."""
        if codec.has_messages != (buffer is not None):
            raise CodecError(f"codec {codec.name} on {link}: has_messages is {codec.has_messages}, buffer is {buffer}")
        self.codec = codec
        self._buffer = buffer
        self._link = link
        self._kind = kind
        self._run_seed = run_seed

    @property
    def message_nbytes(self) -> int:
        """Bytes of messages this end remembers."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def encode(self, tensor: torch.Tensor, refs: Sequence[SampleRef], *, step: int, metered: bool) -> EncodedMicrobatch:
        """Encode the real rows of (B, T, H) fp32 and stage the new messages for `step`.

        Raises:
            NonFiniteValues: names the sample and the position.
        """
        values = [tensor[b, : ref.length].detach().contiguous() for b, ref in enumerate(refs)]
        messages = [self._message(ref) for ref in refs]
        specs = [TensorSpec(v.shape[0], v.shape[1]) for v in values]
        sizes = [
            self.codec.encoded_nbytes(s, first_visit=m is None) for s, m in zip(specs, messages, strict=True)
        ]
        whole = np.empty(sum(sizes), dtype=np.uint8)
        headers, views, sums, start = [], [], _MeterSums(), 0
        for ref, value, message, spec, size in zip(refs, values, messages, specs, sizes, strict=True):
            out = whole[start : start + size]
            start += size
            version = 0 if message is None else message.version
            message_in = None if message is None else message.values
            message_out = self._encode_one(ref, value, message_in, version, step, out)
            if metered:
                sums.add(value, message_in, self._reconstruction(message_out, out, spec))
            headers.append(SampleHeader(ref.sample_id, version, ref.length))
            views.append(out.data)
        meter = sums.meter(self._link, self._kind) if metered else None
        return EncodedMicrobatch(tuple(headers), tuple(views), sum(s.num_values for s in specs), meter)

    def decode(
        self, samples: Sequence[SampleHeader], buffers: Sequence[memoryview], *, num_columns: int, step: int
    ) -> torch.Tensor:
        """Decode one microbatch to (B, T, H) fp32, zeros at padding, and stage the new messages for `step`.

        Raises:
            MessageMismatch: this end remembers another version of a sample's message.
            CorruptPayload: a frame that no encoder writes.
        """
        longest = max(s.num_rows for s in samples)
        padded = torch.zeros(len(samples), longest, num_columns)
        for b, (header, frame) in enumerate(zip(samples, buffers, strict=True)):
            message = self._message(SampleRef(header.sample_id, header.num_rows))
            version = 0 if message is None else message.version
            if version != header.version:
                raise MessageMismatch(
                    f"link {self._link}, sample {header.sample_id:016x}: the sender coded against version "
                    f"{header.version} of its message, this end remembers version {version}"
                )
            spec = TensorSpec(header.num_rows, num_columns)
            decoded = self.codec.decode(np.frombuffer(frame, np.uint8), None if message is None else message.values, spec)
            padded[b, : header.num_rows] = decoded.values
            self._stage(step, header.sample_id, version, decoded.message_out)
        return padded

    def digest(self) -> dict[SampleId, tuple[int, int]]:
        """Version and hash of every message this end remembers; equal at both ends after each step (law 2)."""
        return {} if self._buffer is None else self._buffer.digest()

    def commit(self, step: int) -> None:
        if self._buffer is not None:
            self._buffer.commit(step)

    def abort(self, step: int) -> None:
        if self._buffer is not None:
            self._buffer.abort(step)

    def _message(self, ref: SampleRef) -> SampleMessage | None:
        message = None if self._buffer is None else self._buffer.get(SampleId(ref.sample_id))
        if message is not None and message.values.shape[0] != ref.length:
            raise RemoteProtocolError(
                f"sample {ref.sample_id:016x} had {message.values.shape[0]} rows at its last visit and has {ref.length} now"
            )
        return message

    def _encode_one(
        self, ref: SampleRef, value: torch.Tensor, message_in: torch.Tensor | None, version: int, step: int, out: np.ndarray
    ) -> torch.Tensor | None:
        seed = rounding_seed(self._run_seed, self._link, SampleId(ref.sample_id), version, step)
        try:
            message_out = self.codec.encode(value, message_in, seed=seed, out=out)
        except NonFiniteValues as e:
            raise NonFiniteValues(f"{self._kind} values of sample {ref.sample_id:016x} on link {self._link}: {e}") from e
        self._stage(step, ref.sample_id, version, message_out)
        return message_out

    def _stage(self, step: int, sample_id: int, version: int, message_out: torch.Tensor | None) -> None:
        if self._buffer is not None:
            assert message_out is not None
            self._buffer.stage(step, SampleId(sample_id), SampleMessage(version + 1, message_out))

    def _reconstruction(self, message_out: torch.Tensor | None, out: np.ndarray, spec: TensorSpec) -> torch.Tensor:
        """What the receiver will see. Only codecs without messages need to decode for it."""
        return message_out if message_out is not None else self.codec.decode(out, None, spec).values


class _MeterSums:
    """fp64 sums over the samples of one metered microbatch."""

    def __init__(self) -> None:
        self._error = self._delta = self._delta_values = self._values = 0.0
        self._first_visits = self._samples = 0

    def add(self, values: torch.Tensor, message_in: torch.Tensor | None, received: torch.Tensor) -> None:
        flat = values.numpy().reshape(-1)
        old = None if message_in is None else message_in.numpy().reshape(-1)
        error, delta, squared = ops.squared_norms(flat, old, received.numpy().reshape(-1))
        self._error += error
        self._values += squared
        if message_in is not None:
            self._delta += delta
            self._delta_values += squared
        self._first_visits += message_in is None
        self._samples += 1

    def meter(self, link: str, kind: Kind) -> LinkMeter:
        return LinkMeter(
            link=link,
            kind=kind,
            squared_error=self._error,
            squared_delta=self._delta,
            squared_delta_values=self._delta_values,
            squared_values=self._values,
            first_visits=self._first_visits,
            samples=self._samples,
        )
