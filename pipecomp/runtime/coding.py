"""One microbatch through a codec, sample by sample, at one end of a link. Knows codecs, messages' buffers and message headers;
no sockets, no event loop. Its calls run in codec threads.

    sender     values[b, :length]  -- codec.encode(message_in) -->  one frame a sample;  message_out staged for the step
    receiver   frame               -- codec.decode(message_in) -->  values, zeros at padding;  message_out staged likewise

The sender decides, the receiver follows (law 6): a sample's header says which message its values are coded against, by version
and checksum, and whether both ends keep what the visit leaves.

    version 0   sent afresh: no message (a first visit, or one that is not kept), or one that is no nearer than zero:
                |a - m| >= |a|, as dropout, augmentation or a stale message can have it
    version v   coded against the message that step v left. A receiver that does not hold exactly that one asks for it
                (`check`, then `Resend`), decodes against what comes, and so agrees again

Padding is never encoded (law 5).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from pipecomp.buffers.base import MessageBuffer, SampleMessage
from pipecomp.buffers.formats import StoredMessage, is_intact
from pipecomp.buffers.retention import Retained, Retention
from pipecomp.codecs.base import Codec
from pipecomp.errors import CodecError, CorruptPayload, MessageMismatch, NonFiniteValues, RemoteProtocolError
from pipecomp.native import ops
from pipecomp.protocol.messages import LinkMeter, Resent, SampleHeader, SampleRef, StoreMeter
from pipecomp.runtime.seeds import rounding_seed
from pipecomp.types import Kind, SampleId, TensorSpec


class EncodedMicrobatch(NamedTuple):
    """What a TensorMessage carries."""

    samples: tuple[SampleHeader, ...]
    buffers: tuple[memoryview, ...]
    evicted: tuple[int, ...]
    num_values: int
    meter: LinkMeter


class CheckedMicrobatch(NamedTuple):
    """What a receiver holds of the messages that a microbatch is coded against."""

    messages: dict[int, SampleMessage]
    missing: dict[int, str]  # sample id -> why it cannot be decoded yet


class _Visit(NamedTuple):
    """One sample about to be encoded."""

    ref: SampleRef
    values: torch.Tensor
    spec: TensorSpec
    message: SampleMessage | None  # coded against
    nbytes: int


class LinkCoder:
    """Encodes or decodes the microbatches of one kind of traffic at one end of one link."""

    def __init__(
        self,
        codec: Codec,
        buffer: MessageBuffer | None,
        *,
        link: str,
        kind: Kind,
        run_seed: int,
        retention: Retention | None = None,
    ) -> None:
        """`buffer`: this end's messages, needed where the codec has messages and None elsewhere. `retention`: which messages
        a sender keeps; None: all."""
        if codec.has_messages != (buffer is not None):
            raise CodecError(f"codec {codec.name} on {link}: has_messages is {codec.has_messages}, buffer is {buffer}")
        self.codec = codec
        self.num_healed = 0
        self._buffer = buffer
        self._retention = retention
        self._link = link
        self._kind = kind
        self._run_seed = run_seed

    @property
    def message_nbytes(self) -> int:
        """Bytes of messages this end has in memory."""
        return 0 if self._buffer is None else self._buffer.nbytes

    @property
    def message_dtype(self) -> str:
        """How this end keeps messages; empty for a codec without them."""
        return "" if self._buffer is None else self._buffer.format.dtype

    # ------------------------------------------------------------ sender

    def encode(self, tensor: torch.Tensor, refs: Sequence[SampleRef], *, step: int, metered: bool) -> EncodedMicrobatch:
        """Encode the real rows of (B, T, H) fp32 and stage the new messages for `step`.

        Raises:
            NonFiniteValues: names the sample and the position.
            StoreError: a store cannot take more.
        """
        sums = _MeterSums()
        visits = [self._visit(ref, tensor[b, : ref.length], sums) for b, ref in enumerate(refs)]
        whole = np.empty(sum(visit.nbytes for visit in visits), dtype=np.uint8)
        headers, views, start = [], [], 0
        evicted: list[SampleId] = []
        for visit in visits:
            out = whole[start : start + visit.nbytes]
            start += visit.nbytes
            message_out = self._encode_one(visit, step, out)
            is_kept, gone = self._keep(step, visit, message_out)
            evicted += gone
            if metered:
                sums.add_error(visit.values, self._reconstruction(message_out, out, visit.spec))
            version, checksum = (visit.message.version, visit.message.checksum) if visit.message else (0, 0)
            headers.append(SampleHeader(visit.ref.sample_id, version, visit.ref.length, checksum, is_kept))
            views.append(out.data)
        num_values = sum(visit.spec.num_values for visit in visits)
        meter = sums.meter(self._link, self._kind)
        return EncodedMicrobatch(tuple(headers), tuple(views), tuple(evicted), num_values, meter)

    def resend(self, sample_id: int) -> StoredMessage | None:
        """The message that this step's values of a sample are coded against, as it is kept; None if it is lost here too."""
        stored = None if self._buffer is None else self._buffer.get_stored(SampleId(sample_id))
        self.num_healed += stored is not None
        return stored

    # ------------------------------------------------------------ receiver

    def check(self, samples: Sequence[SampleHeader], *, num_columns: int) -> CheckedMicrobatch:
        """Look up the messages that `samples` are coded against.

        Raises:
            RemoteProtocolError: there cannot be any, since the codec has none.
        """
        messages: dict[int, SampleMessage] = {}
        missing: dict[int, str] = {}
        for header in samples:
            if header.version == 0:
                continue
            if self._buffer is None:
                raise RemoteProtocolError(
                    f"link {self._link}, sample {header.sample_id:016x}: version {header.version}, but codec {self.codec.name} "
                    "has no messages"
                )
            message = self._buffer.get(SampleId(header.sample_id))
            shape = (header.num_rows, num_columns)
            if message is None:
                missing[header.sample_id] = "no message is held"
            elif (message.version, message.checksum) != (header.version, header.checksum):
                missing[header.sample_id] = (
                    f"version {message.version} with checksum {message.checksum:016x} is held, "
                    f"version {header.version} with {header.checksum:016x} was coded against"
                )
            elif tuple(message.values.shape) != shape:
                missing[header.sample_id] = f"a message of shape {tuple(message.values.shape)} is held, not {shape}"
            else:
                messages[header.sample_id] = message
        return CheckedMicrobatch(messages, missing)

    def heal(self, header: SampleHeader, resent: Resent, buffers: Sequence[memoryview], *, num_columns: int) -> SampleMessage:
        """The message that the sender holds, out of its answer to Resend.

        Raises:
            MessageMismatch: it is not the one that the values are coded against, or the sender has lost it.
            CorruptPayload: no store wrote it.
        """
        about = f"link {self._link}, sample {header.sample_id:016x}"
        assert self._buffer is not None
        if not buffers:
            raise MessageMismatch(f"{about}: the sender cannot send its message again: {resent.reason}")
        expected = (header.version, header.checksum, self._buffer.format.dtype, header.num_rows, num_columns)
        got = (resent.version, resent.checksum, resent.dtype, resent.num_rows, resent.num_columns)
        if got != expected:
            raise MessageMismatch(f"{about}: the sender sent a message with {got}, expected {expected}")
        payload = np.frombuffer(buffers[0], np.uint8)
        stored = StoredMessage(resent.version, resent.checksum, TensorSpec(header.num_rows, num_columns), payload)
        if not is_intact(stored):
            raise CorruptPayload(f"{about}: the message that the sender sent has another checksum than it says")
        values = self._buffer.format.unpack(stored)
        self.num_healed += 1
        return SampleMessage(stored.version, stored.checksum, values)

    def decode(
        self,
        samples: Sequence[SampleHeader],
        buffers: Sequence[memoryview],
        *,
        num_columns: int,
        step: int,
        evicted: Sequence[int] = (),
        messages: Mapping[int, SampleMessage] | None = None,
    ) -> torch.Tensor:
        """Decode one microbatch to (B, T, H) fp32, zeros at padding, and stage the new messages for `step`. The result may share
        memory with a message, so nobody writes to it.

        `messages`: what `check` and `heal` found; looked up here if None.

        Raises:
            MessageMismatch: this end does not hold the message that a sample is coded against.
            CorruptPayload: a frame that no encoder writes.
            StoreError: a store cannot take more.
        """
        if messages is None:
            checked = self.check(samples, num_columns=num_columns)
            for sample_id, reason in checked.missing.items():
                raise MessageMismatch(f"link {self._link}, sample {sample_id:016x}: {reason}")
            messages = checked.messages
        decoded = []
        for header, frame in zip(samples, buffers, strict=True):
            message_in = messages[header.sample_id].values if header.version else None
            spec = TensorSpec(header.num_rows, num_columns)
            values, message_out = self.codec.decode(np.frombuffer(frame, np.uint8), message_in, spec)
            decoded.append(values)
            self._stage(step, header.sample_id, message_out if header.is_kept else None)
        if self._buffer is not None:
            for sample_id in evicted:
                self._buffer.drop(step, SampleId(sample_id))
        return _padded(decoded)

    # ------------------------------------------------------------ both

    def prefetch(self, sample_ids: Sequence[int]) -> None:
        """Messages of these samples will be wanted soon, in this order."""
        if self._buffer is not None:
            self._buffer.prefetch([SampleId(sample_id) for sample_id in sample_ids])

    def digest(self) -> dict[SampleId, tuple[int, int]]:
        """Version and checksum of every message this end remembers; equal at both ends after each step (law 2)."""
        return {} if self._buffer is None else self._buffer.digest()

    def commit(self, step: int) -> None:
        if self._buffer is not None:
            self._buffer.commit(step)
        if self._retention is not None:
            self._retention.commit(step)

    def abort(self, step: int) -> None:
        if self._buffer is not None:
            self._buffer.abort(step)
        if self._retention is not None:
            self._retention.abort(step)

    def store_meter(self, end: str) -> StoreMeter | None:
        """What the store of this end did so far; None for a codec without messages."""
        if self._buffer is None:
            return None
        counts = self._buffer.counts()
        return StoreMeter(link=self._link, end=end, healed=self.num_healed, **counts._asdict())

    def close(self) -> None:
        """Write what is not written and close the store."""
        if self._buffer is not None:
            self._buffer.close()

    # ------------------------------------------------------------

    def _visit(self, ref: SampleRef, rows: torch.Tensor, sums: _MeterSums) -> _Visit:
        values = rows.detach().contiguous()
        spec = TensorSpec(values.shape[0], values.shape[1])
        message = None if self._buffer is None else self._buffer.get(SampleId(ref.sample_id))
        is_first = message is None
        if message is not None and not self._is_near(values, message.values, sums):
            message = None
        sums.add_sample(is_first=is_first, is_fallback=message is None and not is_first)
        nbytes = self.codec.encoded_nbytes(spec, first_visit=message is None)
        return _Visit(ref, values, spec, message, nbytes)

    def _is_near(self, values: torch.Tensor, message: torch.Tensor, sums: _MeterSums) -> bool:
        """Whether the change is smaller than the values, so that coding it is worth while."""
        if values.shape != message.shape or values.dtype != torch.float32:
            return False
        delta, _, squared = ops.squared_norms(values.numpy().reshape(-1), None, message.numpy().reshape(-1))
        if math.isfinite(delta) and math.isfinite(squared):
            sums.add_change(delta, squared)
        return delta < squared  # NaN and infinity are not near

    def _encode_one(self, visit: _Visit, step: int, out: np.ndarray) -> torch.Tensor | None:
        version = visit.message.version if visit.message else 0
        seed = rounding_seed(self._run_seed, self._link, SampleId(visit.ref.sample_id), version, step)
        message_in = visit.message.values if visit.message else None
        try:
            return self.codec.encode(visit.values, message_in, seed=seed, out=out)
        except NonFiniteValues as e:
            sample = f"{visit.ref.sample_id:016x}"
            raise NonFiniteValues(f"{self._kind} values of sample {sample} on link {self._link}: {e}") from e

    def _keep(self, step: int, visit: _Visit, message_out: torch.Tensor | None) -> tuple[bool, tuple[SampleId, ...]]:
        """Stage what the visit leaves, if it is kept; whether it is, and whose messages make room for it."""
        if self._buffer is None:
            return False, ()
        sample_id = SampleId(visit.ref.sample_id)
        retained = Retained(keep=True, evicted=())
        if self._retention is not None:
            retained = self._retention.visit(step, sample_id, self._buffer.kept_nbytes(visit.spec))
        self._stage(step, sample_id, message_out if retained.keep else None)
        for gone in retained.evicted:
            self._buffer.drop(step, gone)
        return retained.keep, retained.evicted

    def _stage(self, step: int, sample_id: int, message_out: torch.Tensor | None) -> None:
        if self._buffer is None:
            return
        if message_out is None:
            self._buffer.drop(step, SampleId(sample_id))
        else:
            self._buffer.stage(step, SampleId(sample_id), message_out)

    def _reconstruction(self, message_out: torch.Tensor | None, out: np.ndarray, spec: TensorSpec) -> torch.Tensor:
        """What the receiver will see. Only codecs without messages need to decode for it."""
        return message_out if message_out is not None else self.codec.decode(out, None, spec).values


def _padded(samples: Sequence[torch.Tensor]) -> torch.Tensor:
    """(L, H) each -> (B, T, H), zeros from each sample's end to the longest one's. A single sample is not copied."""
    if len(samples) == 1:
        return samples[0].unsqueeze(0)
    longest = max(values.shape[0] for values in samples)
    padded = torch.empty(len(samples), longest, samples[0].shape[1])
    for row, values in zip(padded, samples, strict=True):
        row[: values.shape[0]] = values
        row[values.shape[0] :] = 0.0
    return padded


class _MeterSums:
    """fp64 sums over the samples of one microbatch."""

    def __init__(self) -> None:
        self._error = self._values = self._delta = self._delta_values = 0.0
        self._first_visits = self._fallbacks = self._samples = 0

    def add_sample(self, *, is_first: bool, is_fallback: bool) -> None:
        self._samples += 1
        self._first_visits += is_first
        self._fallbacks += is_fallback

    def add_change(self, delta: float, squared: float) -> None:
        self._delta += delta
        self._delta_values += squared

    def add_error(self, values: torch.Tensor, received: torch.Tensor) -> None:
        error, _, squared = ops.squared_norms(values.numpy().reshape(-1), None, received.numpy().reshape(-1))
        self._error += error
        self._values += squared

    def meter(self, link: str, kind: Kind) -> LinkMeter:
        return LinkMeter(
            link=link,
            kind=kind,
            squared_error=self._error,
            squared_values=self._values,
            squared_delta=self._delta,
            squared_delta_values=self._delta_values,
            first_visits=self._first_visits,
            fallbacks=self._fallbacks,
            samples=self._samples,
        )
