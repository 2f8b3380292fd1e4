"""A microbatch through a link's coder: exact sizes, no neighbour and no padding in any byte, versions, seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from pipecomp import registry
from pipecomp.buffers.memory import MemoryBuffer
from pipecomp.errors import CodecError, MessageMismatch, NonFiniteValues
from pipecomp.protocol.messages import SampleHeader, SampleRef
from pipecomp.runtime.coding import EncodedMicrobatch, LinkCoder
from pipecomp.types import Kind, SampleId, TensorSpec

COLUMNS = 40
LENGTHS = {11: 3, 12: 7, 13: 1, 14: 5}
CODECS: list[dict[str, Any]] = [
    {"codec": "identity"},
    {"codec": "cast"},
    {"codec": "uniform", "bits": 3, "group": 64, "rounding": "stochastic"},
    {"codec": "delta", "bits": 2, "group": 64, "rounding": "stochastic"},
]
by_codec = pytest.mark.parametrize("options", CODECS, ids=lambda options: options["codec"])


def coder(options: Mapping[str, Any], *, link: str = "0/0-1", run_seed: int = 5) -> LinkCoder:
    rest = {key: value for key, value in options.items() if key != "codec"}
    codec = registry.load("pipecomp.codecs", options["codec"]).from_options(rest)
    buffer = MemoryBuffer() if codec.has_messages else None
    return LinkCoder(codec, buffer, link=link, kind=Kind.FORWARD, run_seed=run_seed)


def values_of(sample: int, visit: int = 0) -> torch.Tensor:
    """Near to those of the visit before, as activations are."""
    chance = torch.Generator().manual_seed(100 * sample)
    values = torch.randn(LENGTHS[sample], COLUMNS, generator=chance)
    for _ in range(visit):
        values = values + 0.3 * torch.randn(LENGTHS[sample], COLUMNS, generator=chance)
    return sample * values


def microbatch(samples: Sequence[int], visit: int = 0, padding: float = 0.0, longest: int = 9) -> torch.Tensor:
    padded = torch.full((len(samples), longest, COLUMNS), padding)
    for row, sample in zip(padded, samples, strict=True):
        row[: LENGTHS[sample]] = values_of(sample, visit)
    return padded


def refs(samples: Sequence[int]) -> list[SampleRef]:
    return [SampleRef(sample, LENGTHS[sample]) for sample in samples]


def encode(end: LinkCoder, samples: Sequence[int], *, step: int = 1, **how: Any) -> EncodedMicrobatch:
    return end.encode(microbatch(samples, **how), refs(samples), step=step, metered=False)


def bytes_by_sample(end: LinkCoder, parts: Sequence[Sequence[int]], **how: Any) -> dict[int, list[bytes]]:
    """Two visits of the samples, each step cut into `parts`; every sample's bytes."""
    found: dict[int, list[bytes]] = {}
    for step in (1, 2):
        for part in parts:
            encoded = encode(end, part, step=step, visit=step, **how)
            for header, buffer in zip(encoded.samples, encoded.buffers, strict=True):
                found.setdefault(header.sample_id, []).append(bytes(buffer))
        end.commit(step)
    return found


@by_codec
def test_a_samples_bytes_do_not_depend_on_its_neighbours_or_its_place(options: dict[str, Any]) -> None:
    together = bytes_by_sample(coder(options), [[11, 12, 13, 14]])
    assert bytes_by_sample(coder(options), [[14, 12], [13], [11]]) == together
    assert bytes_by_sample(coder(options), [[14, 13, 12, 11]]) == together


@by_codec
def test_what_lies_in_the_padding_changes_no_byte_and_is_not_counted(options: dict[str, Any]) -> None:
    samples = [11, 12, 13]
    clean = bytes_by_sample(coder(options), [samples])
    assert bytes_by_sample(coder(options), [samples], padding=float("nan")) == clean
    assert bytes_by_sample(coder(options), [samples], longest=7) == clean
    assert encode(coder(options), samples).num_values == sum(LENGTHS[s] for s in samples) * COLUMNS


@by_codec
def test_a_buffer_has_the_size_that_its_codec_says_on_every_visit(options: dict[str, Any]) -> None:
    end = coder(options)
    for step in (1, 2):
        encoded = encode(end, [12, 13], step=step, visit=step)
        specs = [TensorSpec(LENGTHS[s], COLUMNS) for s in (12, 13)]
        assert [len(b) for b in encoded.buffers] == [end.codec.encoded_nbytes(s, first_visit=step == 1) for s in specs]
        end.commit(step)


def test_a_sample_says_which_version_of_its_message_it_is_coded_against() -> None:
    end = coder(CODECS[3])
    encode(end, [11], step=1)
    end.commit(1)
    encode(end, [11, 12], step=2)
    end.abort(2)
    checksum = end.digest()[SampleId(11)][1]
    seen = encode(end, [11, 12], step=3).samples
    assert seen == (SampleHeader(11, 1, 3, checksum, True), SampleHeader(12, 0, 7, 0, True))


def test_an_end_that_remembers_another_version_refuses_by_name() -> None:
    sender, receiver = coder(CODECS[3]), coder(CODECS[3])
    encode(sender, [11], step=1)
    sender.commit(1)
    late = encode(sender, [11], step=2)
    with pytest.raises(MessageMismatch, match=r"link 0/0-1, sample 0{14}0b: no message is held"):
        receiver.decode(late.samples, late.buffers, num_columns=COLUMNS, step=2)


def test_a_sample_that_changes_its_length_is_sent_afresh() -> None:
    end, other = coder(CODECS[3]), coder(CODECS[3])
    encode(end, [11], step=1)
    end.commit(1)
    shorter = end.encode(microbatch([11]), [SampleRef(11, 2)], step=2, metered=False)
    assert shorter.samples == (SampleHeader(11, 0, 2, 0, True),)
    assert (shorter.meter.first_visits, shorter.meter.fallbacks) == (0, 1)
    other.decode(shorter.samples, shorter.buffers, num_columns=COLUMNS, step=2)
    for one in (end, other):
        one.commit(2)
    assert end.digest() == other.digest()


def test_chance_depends_on_run_link_sample_and_step_and_on_nothing_else() -> None:
    def drawn(*, sample: int = 12, step: int = 1, **where: Any) -> bytes:
        tensor = torch.full((1, 7, COLUMNS), 0.3)
        tensor[0, 0, 0] = 1.0
        encoded = coder(CODECS[2], **where).encode(tensor, [SampleRef(sample, 7)], step=step, metered=False)
        return bytes(encoded.buffers[0])

    assert drawn() == drawn()
    others = [drawn(sample=11), drawn(step=2), drawn(link="0/1-2"), drawn(run_seed=6)]
    assert len({drawn(), *others}) == 5


def test_values_that_are_not_finite_are_named_by_kind_sample_and_link() -> None:
    tensor = microbatch([11, 12])
    tensor[1, 2, 3] = float("inf")
    with pytest.raises(NonFiniteValues, match=r"forward values of sample 0{14}0c on link 0/0-1: value 83 is inf"):
        coder(CODECS[2]).encode(tensor, refs([11, 12]), step=1, metered=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@by_codec
def test_activations_of_another_dtype_are_refused_and_never_upcast(options: dict[str, Any], dtype: torch.dtype) -> None:
    with pytest.raises(CodecError, match="float32"):
        coder(options).encode(microbatch([11]).to(dtype), refs([11]), step=1, metered=False)


def test_a_codec_with_messages_needs_a_place_for_them() -> None:
    codec = coder(CODECS[3]).codec
    with pytest.raises(CodecError, match="has_messages is True, buffer is None"):
        LinkCoder(codec, None, link="0/0-1", kind=Kind.FORWARD, run_seed=0)


def test_a_metered_microbatch_says_how_far_the_receiver_is_from_the_truth() -> None:
    end = coder({"codec": "delta", "bits": 2, "group": 64})
    for step in (1, 2):
        encoded = end.encode(microbatch([11, 12], visit=step), refs([11, 12]), step=step, metered=True)
        assert (encoded.meter.samples, encoded.meter.first_visits) == (2, 2 if step == 1 else 0)
        total = sum(float((values_of(s, step).double() ** 2).sum()) for s in (11, 12))
        assert encoded.meter.squared_values == pytest.approx(total)
        end.commit(step)
    change = sum(float(((values_of(s, 2) - values_of(s, 1)).double() ** 2).sum()) for s in (11, 12))
    assert encoded.meter.squared_delta == pytest.approx(change, rel=0.2)  # against the message, which is near the old values


@by_codec
def test_decoded_samples_are_padded_with_zeros_and_one_alone_is_not_copied(options: dict[str, Any]) -> None:
    for samples in ([12], [11, 12, 13]):
        sender, receiver = coder(options), coder(options)
        for step in (1, 2):
            sent = encode(sender, samples, step=step, visit=step, padding=9.0)
            padded = receiver.decode(sent.samples, sent.buffers, num_columns=COLUMNS, step=step)
            assert padded.shape == (len(samples), max(LENGTHS[sample] for sample in samples), COLUMNS)
            assert padded.is_contiguous()
            for row, sample in zip(padded, samples, strict=True):
                assert not row[LENGTHS[sample] :].any()
                error = row[: LENGTHS[sample]] - values_of(sample, step)
                assert error.norm() < values_of(sample, step).norm()
            sender.commit(step)
            receiver.commit(step)
            assert sender.digest() == receiver.digest()


def test_the_receivers_message_of_one_sample_is_the_memory_that_it_decoded() -> None:
    options = {"codec": "delta", "bits": 4}
    sender, receiver = coder(options), coder(options)
    sent = encode(sender, [12])
    padded = receiver.decode(sent.samples, sent.buffers, num_columns=COLUMNS, step=1)
    receiver.commit(1)
    assert receiver._buffer is not None
    held = receiver._buffer.get(SampleId(12))
    assert held is not None
    assert held.values.data_ptr() == padded.data_ptr()
