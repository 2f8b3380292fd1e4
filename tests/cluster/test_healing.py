"""A message that one end of a link has lost: the next visit heals it, the step goes on, and both ends agree again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipecomp.buffers.base import MessageBuffer
from pipecomp.runtime.coding import LinkCoder
from pipecomp.runtime.pipeline import StepRefused
from pipecomp.testing.local_pipeline import LocalPipeline
from pipecomp.testing.tiny_runs import MODEL, NUM_SAMPLES, WIDTH, tiny_batch, tiny_run
from pipecomp.types import SampleId, StageIndex


def pipeline(**cluster: Any) -> LocalPipeline:
    return LocalPipeline(tiny_run(cluster=cluster), MODEL, num_ranks=2)


def coders(two: LocalPipeline) -> tuple[LinkCoder, LinkCoder]:
    sender, receiver = two.ranks[0].stages[StageIndex(0)].forward_out, two.ranks[1].stages[StageIndex(1)].forward_in
    assert sender is not None and receiver is not None
    return sender.coder, receiver.coder


def store(coder: LinkCoder) -> MessageBuffer:
    buffer = coder._buffer
    assert buffer is not None
    return buffer


def lose(buffer: MessageBuffer, samples: range) -> None:
    for sample in samples:
        buffer.drop(10**9, SampleId(sample))
    buffer.commit(10**9)


def replace(buffer: MessageBuffer, sample: int, rows: int) -> None:
    buffer.stage(10**9, SampleId(sample), torch.ones(rows, WIDTH))
    buffer.commit(10**9)


async def train(two: LocalPipeline, num_steps: int) -> None:
    for _ in range(num_steps):
        await two.step(tiny_batch(), learning_rate=1e-3)


def agree(two: LocalPipeline) -> bool:
    return all(sender == receiver for sender, receiver in two.digests())


@pytest.mark.parametrize("credit", [64, 2**26], ids=["no credit to spare", "much credit"])
async def test_a_receiver_that_lost_its_messages_is_sent_them_whole_and_training_is_the_same(credit: int) -> None:
    async with pipeline() as plain, pipeline(link_credit_nbytes=credit) as damaged:
        await train(plain, 4)
        await train(damaged, 2)
        lose(store(coders(damaged)[1]), range(NUM_SAMPLES))
        assert not agree(damaged)
        await train(damaged, 2)
        assert agree(damaged)
        assert damaged.digests() == plain.digests()
        expected, found = plain.parameters(), damaged.parameters()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        meters = {meter.end: meter for rank in damaged.ranks for meter in rank.store_meters()}
        assert {end: meter.healed for end, meter in meters.items()} == {"sender": NUM_SAMPLES, "receiver": NUM_SAMPLES}


async def test_a_receiver_that_holds_another_message_is_sent_the_right_one() -> None:
    async with pipeline() as plain, pipeline() as damaged:
        await train(plain, 3)
        await train(damaged, 2)
        replace(store(coders(damaged)[1]), 3, rows=8)
        await train(damaged, 1)
        assert damaged.digests() == plain.digests()


async def test_a_sender_that_lost_a_message_sends_the_sample_afresh() -> None:
    async with pipeline() as two:
        await train(two, 2)
        lose(store(coders(two)[0]), range(2, 3))
        for rank in two.ranks:
            rank.take_meters()
        await train(two, 1)
        assert agree(two)
        meters = [meter for meter in two.ranks[0].take_meters() if meter.kind == "forward"]
        assert sum(meter.first_visits for meter in meters) == 1


async def test_a_message_that_both_ends_have_lost_aborts_the_step_and_the_next_try_sends_it_afresh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pipeline() as two:
        await train(two, 2)
        sender, receiver = coders(two)
        lose(store(receiver), range(1))
        monkeypatch.setattr(sender, "resend", lambda _: None)  # found damaged between encoding and the receiver's request
        with pytest.raises(StepRefused, match=r"sample 0{16}: the sender cannot send its message again: it is lost here too"):
            await train(two, 1)
        for rank in two.ranks:
            await rank.abort(3)
        lose(store(sender), range(1))
        await train(two, 1)
        assert agree(two)
