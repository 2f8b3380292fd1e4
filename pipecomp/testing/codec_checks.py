"""`check_codec`: what every codec must do. `LinkEnds`: one link's two ends as plain calls. Knows codecs and buffers, no runtime.

Each check is one promise of `codecs/base.py`, on small samples of awkward shapes; a broken one raises AssertionError, saying
which. `LinkEnds` holds law 2: after every step, both ends remember the same messages, bit for bit, however the step ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pipecomp.buffers.base import MessageBuffer
from pipecomp.codecs.base import Codec, Decoded
from pipecomp.errors import CodecError, CorruptPayload, NonFiniteValues
from pipecomp.types import SampleId, TensorSpec

SHAPES = ((1, 1), (1, 7), (3, 64), (5, 24), (7, 100), (13, 33), (0, 8))
SEED = 0x9E3779B97F4A7C15
_GUARD = 16


class Visit(NamedTuple):
    """One call of a codec: a sample, and the message it is coded against."""

    values: torch.Tensor
    message_in: torch.Tensor | None


def check_codec(codec: Codec) -> None:
    """Run every check. Raises AssertionError naming the first promise that is broken."""
    assert codec.name, "a codec needs a name"
    assert codec.describe(), "describe() must say something"
    for visit in _visits(codec):
        check_sizes(codec, visit)
        check_both_ends_agree(codec, visit)
        check_arguments_stay(codec, visit)
        check_bytes_are_a_function(codec, visit)
        if not codec.has_messages:
            check_feedback(codec, visit.values)
    check_bad_values(codec)
    check_bad_payloads(codec)
    check_threads(codec)


def check_sizes(codec: Codec, visit: Visit) -> None:
    """`out` is filled exactly, at any alignment: every byte of it written, none beside it (law 4)."""
    spec, nbytes = _spec(visit.values), _nbytes(codec, visit)
    seen = []
    for fill, offset in ((0x00, 0), (0xFF, 1), (0x55, 7)):
        memory = np.full(nbytes + 2 * _GUARD, fill, np.uint8)
        out = memory[_GUARD + offset - 8 : _GUARD + offset - 8 + nbytes]
        codec.encode(visit.values, visit.message_in, seed=SEED, out=out)
        seen.append(out.tobytes())
        out[:] = fill
        assert (memory == fill).all(), f"{codec.describe()} wrote beside its {nbytes} bytes for {spec}"
    assert len(set(seen)) == 1, f"{codec.describe()} leaves bytes of {spec} unwritten, or heeds their alignment"


def check_both_ends_agree(codec: Codec, visit: Visit) -> None:
    """The decoder's message is the encoder's, bit for bit, and values are (L, H) fp32."""
    payload, message_out = encode(codec, visit)
    payload.flags.writeable = False
    decoded = codec.decode(payload, visit.message_in, _spec(visit.values))
    assert decoded.values.dtype == torch.float32, f"{codec.describe()} decodes to {decoded.values.dtype}"
    assert decoded.values.shape == visit.values.shape, f"{codec.describe()} decodes to {tuple(decoded.values.shape)}"
    assert codec.has_messages == (message_out is not None) == (decoded.message_out is not None)
    if message_out is not None and decoded.message_out is not None:
        assert same_bits(message_out, decoded.message_out), f"{codec.describe()}: the two ends disagree"
        assert same_bits(message_out, decoded.values), f"{codec.describe()}: the decoder hands on other values"


def check_arguments_stay(codec: Codec, visit: Visit) -> None:
    """Neither end writes to what it is given, and what comes back shares no memory with it."""
    before = [None if t is None else t.clone() for t in visit]
    payload, message_out = encode(codec, visit)
    sent = payload.copy()
    decoded = codec.decode(payload, visit.message_in, _spec(visit.values))
    for old, now in zip(before, visit, strict=True):
        assert old is None or now is None or same_bits(old, now), f"{codec.describe()} writes to its arguments"
    assert np.array_equal(sent, payload), f"{codec.describe()} writes to the payload it decodes"
    given = [t.numpy() for t in visit if t is not None]
    for fresh, others in ((message_out, given), (decoded.values, [*given[1:], payload])):
        shared = fresh is not None and any(np.may_share_memory(fresh.numpy(), other) for other in others)
        assert not shared, f"{codec.describe()} returns memory of its arguments"


def check_bytes_are_a_function(codec: Codec, visit: Visit) -> None:
    """The same sample, message and seed give the same bytes, whatever was encoded before and lies beside it (law 5)."""
    alone, _ = encode(codec, visit)
    rows = visit.values.shape[0]
    batch = torch.full((rows + 4, visit.values.shape[1]), 1e30)
    batch[2 : rows + 2] = visit.values
    encode(codec, Visit(torch.full_like(visit.values, 3.0), visit.message_in))
    among, _ = encode(codec, Visit(batch[2 : rows + 2], visit.message_in))
    assert np.array_equal(alone, among), f"{codec.describe()}: a sample's bytes depend on its neighbours"


def check_feedback(codec: Codec, values: torch.Tensor) -> None:
    """Over several visits, what is decoded and the last error add up to what was meant; the arguments stay as they are."""
    spec, error, meant, arrived = _spec(values), None, torch.zeros_like(values), torch.zeros_like(values)
    for visit in range(4):
        sent = values * (1.0 - 0.25 * visit)
        before = sent.clone(), None if error is None else error.clone()
        out = np.empty(codec.encoded_nbytes(spec, first_visit=True), np.uint8)
        error_out = codec.encode_with_feedback(sent, error, seed=SEED + visit, out=out)
        assert same_bits(before[0], sent), f"{codec.describe()} writes to the values it encodes with feedback"
        assert error is None or (before[1] is not None and same_bits(before[1], error)), f"{codec.describe()} writes to the error"
        meant += sent
        arrived += codec.decode(out, None, spec).values
        error = error_out
    assert error is not None and error.dtype == torch.float32 and error.shape == values.shape
    size = 1e-5 * (1.0 + float(values.abs().sum()) / max(1, values.numel()))
    gap = float((arrived - error - meant).abs().sum()) / max(1, values.numel())
    assert gap <= size, f"{codec.describe()} loses {gap:g} of each value that is fed back"
    assert not codec.is_exact or not bool(error.any()), f"{codec.describe()} says that it is exact"


def check_bad_values(codec: Codec) -> None:
    """NaN and infinity are refused, on every kind of visit, saying where; so are other dtypes and shapes."""
    for message_in in [None, torch.zeros(3, 50)] if codec.has_messages else [None]:
        out = np.zeros(codec.encoded_nbytes(TensorSpec(3, 50), first_visit=message_in is None), np.uint8)
        for bad in (float("nan"), float("inf"), -float("inf")):
            values = torch.ones(3, 50)
            values[2, 17] = bad
            message = _raises(NonFiniteValues, lambda: codec.encode(values, message_in, seed=SEED, out=out), codec)  # noqa: B023
            assert "117" in message, f"{codec.describe()}: {message!r} does not say that value 117 is bad"
        for values in (torch.ones(3, 50, dtype=torch.float64), torch.ones(150)):
            _raises(CodecError, lambda: codec.encode(values, message_in, seed=SEED, out=out), codec)  # noqa: B023


def check_bad_payloads(codec: Codec) -> None:
    """A payload of another size is a CorruptPayload; bytes at random decode to finite values or are one as well."""
    spec = TensorSpec(5, 24)
    for message_in in [None, torch.zeros(5, 24)] if codec.has_messages else [None]:
        nbytes = codec.encoded_nbytes(spec, first_visit=message_in is None)
        for size in (0, nbytes - 1, nbytes + 1):
            wrong = np.zeros(size, np.uint8)
            _raises(CorruptPayload, lambda: codec.decode(wrong, message_in, spec), codec)  # noqa: B023
        chance = np.random.default_rng(nbytes)
        for _ in range(50):
            noise = chance.integers(0, 256, nbytes, dtype=np.uint8)
            decoded = _decoded_or_none(codec, noise, message_in, spec)
            assert decoded is None or bool(torch.isfinite(decoded.values).all()), f"{codec.describe()} decodes to NaN"


def check_threads(codec: Codec) -> None:
    """Calls from several threads at once give what they give one after the other."""
    visits = [visit for visit in _visits(codec) if visit.values.numel()] * 4
    expected = [encode(codec, visit)[0] for visit in visits]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda visit: encode(codec, visit)[0], visits))
    same = all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))
    assert same, f"{codec.describe()} is not safe to call from several threads"


class LinkEnds:
    """A link without a network: each end with a codec and a buffer of its own, one step after the other.

    The codecs and buffers are given one by one, so that a test can plant a fault in one of them.
    """

    def __init__(self, sender: tuple[Codec, MessageBuffer], receiver: tuple[Codec, MessageBuffer]) -> None:
        self.sender, self.sender_buffer = sender
        self.receiver, self.receiver_buffer = receiver

    def cross(self, step: int, sample_id: SampleId, values: torch.Tensor, *, seed: int) -> torch.Tensor:
        """Send one sample in `step`; what the receiver computes on. Asserts exact bytes and equal reconstructions."""
        spec, message = _spec(values), self.sender_buffer.get(sample_id)
        payload = np.empty(self.sender.encoded_nbytes(spec, first_visit=message is None), np.uint8)
        message_out = self.sender.encode(values, None if message is None else message.values, seed=seed, out=payload)
        remembered = self.receiver_buffer.get(sample_id)
        decoded = self.receiver.decode(payload, None if remembered is None else remembered.values, spec)
        if message_out is not None and decoded.message_out is not None:
            self.sender_buffer.stage(step, sample_id, message_out)
            self.receiver_buffer.stage(step, sample_id, decoded.message_out)
        return decoded.values

    def end(self, step: int, *, commit: bool) -> None:
        """Commit or abort `step` at both ends."""
        for buffer in (self.sender_buffer, self.receiver_buffer):
            (buffer.commit if commit else buffer.abort)(step)

    def check(self) -> dict[SampleId, tuple[int, int]]:
        """Assert that both ends remember the same samples, versions and bits (law 2); return their digest."""
        sent, received = self.sender_buffer.digest(), self.receiver_buffer.digest()
        assert sent.keys() == received.keys(), "the ends remember different samples"
        for sample_id, remembered in sent.items():
            assert received[sample_id] == remembered, f"the ends disagree about sample {sample_id}"
        return sent


def encode(codec: Codec, visit: Visit) -> tuple[npt.NDArray[np.uint8], torch.Tensor | None]:
    """One encoding into a fresh payload."""
    payload = np.empty(_nbytes(codec, visit), np.uint8)
    return payload, codec.encode(visit.values, visit.message_in, seed=SEED, out=payload)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in every bit, NaN and signed zeros included."""
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


def _visits(codec: Codec) -> Iterator[Visit]:
    """A first visit of each shape and, for a codec with messages, two later ones."""
    chance = torch.Generator().manual_seed(7)
    for rows, columns in SHAPES:
        values = torch.randn(rows, columns, generator=chance)
        values[: rows // 2] *= 1e-3
        visit = Visit(values, None)
        yield visit
        for _ in range(2 if codec.has_messages else 0):
            moved = visit.values + 0.1 * torch.randn(rows, columns, generator=chance)
            visit = Visit(moved, encode(codec, visit)[1])
            yield visit


def _spec(values: torch.Tensor) -> TensorSpec:
    return TensorSpec(values.shape[0], values.shape[1])


def _nbytes(codec: Codec, visit: Visit) -> int:
    return codec.encoded_nbytes(_spec(visit.values), first_visit=visit.message_in is None)


def _decoded_or_none(
    codec: Codec, payload: npt.NDArray[np.uint8], message_in: torch.Tensor | None, spec: TensorSpec
) -> Decoded | None:
    try:
        return codec.decode(payload, message_in, spec)
    except CorruptPayload:
        return None


def _raises(kind: type[CodecError], call: object, codec: Codec) -> str:
    assert callable(call)
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"{codec.describe()} does not raise {kind.__name__}")
