"""Frames about samples' messages that no honest neighbour sends: refused or of no effect, never a hang or a wrong value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch

from pipecomp.errors import CodecError, RemoteProtocolError
from pipecomp.protocol.messages import Resend, Resent, SampleRef
from pipecomp.runtime.coding import EncodedMicrobatch, LinkCoder
from pipecomp.runtime.link import Link
from pipecomp.runtime.pipeline import StepRefused
from pipecomp.testing.local_pipeline import LocalPipeline
from pipecomp.testing.tiny_runs import MODEL, tiny_batch, tiny_run
from pipecomp.types import Kind, SampleId, StageIndex

LINK = "0/0-1"


def pipeline() -> LocalPipeline:
    return LocalPipeline(tiny_run(), MODEL, num_ranks=2)


async def train(two: LocalPipeline, num_steps: int) -> None:
    for _ in range(num_steps):
        await two.step(tiny_batch(), learning_rate=1e-3)


def link(two: LocalPipeline, rank: int) -> Link:
    return two.makers[rank].inboxes[LINK].link


def forward_sender(two: LocalPipeline) -> LinkCoder:
    channel = two.ranks[0].stages[StageIndex(0)].forward_out
    assert channel is not None
    return channel.coder


def forward_receiver(two: LocalPipeline) -> LinkCoder:
    inlet = two.ranks[1].stages[StageIndex(1)].forward_in
    assert inlet is not None
    return inlet.coder


def resent(**fields: Any) -> Resent:
    plain: dict[str, Any] = {
        "sequence": 0, "step": 3, "microbatch": 0, "kind": Kind.FORWARD, "sample_id": 1, "version": 2, "checksum": 5,
        "dtype": "fp32", "num_rows": 6, "num_columns": 32, "reason": "", "buffer_nbytes": (8,),
    }  # fmt: skip
    return Resent(**{**plain, **fields})


def resend(**fields: Any) -> Resend:
    plain: dict[str, Any] = {
        "sequence": 0, "step": 3, "microbatch": 0, "kind": Kind.FORWARD, "sample_id": 1, "reason": "it is gone",
    }  # fmt: skip
    return Resend(**{**plain, **fields})


async def same_as_undisturbed(two: LocalPipeline, num_steps: int) -> bool:
    async with pipeline() as plain:
        await train(plain, num_steps)
        expected, found = plain.parameters(), two.parameters()
        return plain.digests() == two.digests() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("step", [1, 3, 10**12])
async def test_a_message_sent_again_that_nobody_asked_for_changes_nothing(step: int) -> None:
    async with pipeline() as two:
        await train(two, 2)
        await link(two, 0).send(resent(step=step), [b"whatever"])
        await link(two, 1).send(resent(step=step), [b"whatever"])
        await train(two, 2)
        assert await same_as_undisturbed(two, 4)


@pytest.mark.parametrize("step", [1, 3, 10**12])
@pytest.mark.parametrize("sample", [1, 2**64 - 1])
async def test_asking_for_a_message_that_was_not_used_changes_nothing(step: int, sample: int) -> None:
    async with pipeline() as two:
        await train(two, 2)
        await link(two, 1).send(resend(step=step, sample_id=sample))
        await train(two, 2)
        assert forward_sender(two).num_healed == (sample == 1)  # nothing can be sent of one that is not there
        assert await same_as_undisturbed(two, 4)


@pytest.mark.parametrize("rank", [0, 1])
async def test_asking_for_a_kind_without_messages_is_refused(rank: int) -> None:
    kind = Kind.BACKWARD if rank == 0 else Kind.EVALUATION
    async with pipeline() as two:
        await train(two, 1)
        await link(two, rank).send(resend(kind=kind))
        with pytest.raises(RemoteProtocolError, match=f"no {kind} values with messages are sent from here"):
            await train(two, 3)


@pytest.mark.parametrize(
    "lie",
    [
        {"version": 1}, {"checksum": 1}, {"dtype": "int4"}, {"num_rows": 5}, {"num_columns": 16}, {"buffer_nbytes": (8,)},
    ],
    ids=str,
)  # fmt: skip
async def test_an_answer_that_is_not_the_message_coded_against_ends_the_step(
    lie: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pipeline() as two:
        await train(two, 2)
        receiver = forward_receiver(two)
        assert receiver._buffer is not None
        receiver._buffer.drop(10**9, SampleId(1))
        receiver._buffer.commit(10**9)
        before = two.digests()
        heal = receiver.heal

        def lied_to(header: Any, answer: Resent, buffers: Sequence[memoryview], **rest: Any) -> Any:
            cut = [buffer[: lie["buffer_nbytes"][0]] for buffer in buffers] if "buffer_nbytes" in lie else buffers
            return heal(header, msgspec.structs.replace(answer, **lie), cut, **rest)

        monkeypatch.setattr(receiver, "heal", lied_to)
        with pytest.raises((StepRefused, CodecError)):
            await train(two, 1)
        for rank in two.ranks:
            await rank.abort(3)
        assert two.digests() == before
        monkeypatch.undo()
        await train(two, 1)
        sender_digest, receiver_digest = two.digests()[0]
        assert sender_digest == receiver_digest


async def test_values_coded_against_a_message_by_a_codec_without_them_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pipeline() as two:
        await train(two, 1)
        channel = two.ranks[1].stages[StageIndex(1)].backward_out
        assert channel is not None
        encode = channel.coder.encode

        def pretends(tensor: torch.Tensor, refs: Sequence[SampleRef], **rest: Any) -> EncodedMicrobatch:
            encoded = encode(tensor, refs, **rest)
            return encoded._replace(samples=tuple(msgspec.structs.replace(s, version=1) for s in encoded.samples))

        monkeypatch.setattr(channel.coder, "encode", pretends)
        with pytest.raises(RemoteProtocolError, match=r"link 0/0-1, sample .*: version 1, but codec uniform has no messages"):
            await train(two, 1)


async def test_giving_up_messages_that_nobody_holds_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pipeline() as two:
        await train(two, 2)
        sender = forward_sender(two)
        encode = sender.encode

        def gives_up(tensor: torch.Tensor, refs: Sequence[SampleRef], **rest: Any) -> EncodedMicrobatch:
            return encode(tensor, refs, **rest)._replace(evicted=(2**64 - 1, 77, refs[0].sample_id))

        monkeypatch.setattr(sender, "encode", gives_up)
        await train(two, 2)
        assert await same_as_undisturbed(two, 4)
