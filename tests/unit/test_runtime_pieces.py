"""Small parts of the runtime: seeds, batches of a plan, the inbox, weights that are not the promised ones."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from pipecomp.codecs.uniform import Uniform
from pipecomp.errors import ConfigError, RemoteProtocolError
from pipecomp.models import tensor_bytes
from pipecomp.protocol import messages as m
from pipecomp.protocol.wire import Received
from pipecomp.runtime.batches import check_refs, make_batches
from pipecomp.runtime.channel import CodecThreads, Destination, Inbox
from pipecomp.runtime.optimizer import squared_norm
from pipecomp.runtime.seeds import DropoutSeeds, derive_seed, rounding_seed
from pipecomp.runtime.tied import TiedExchange, add_tied_gradients
from pipecomp.runtime.weights import fetch_tensors, read_own_tensors, trained_tensors
from pipecomp.types import Kind, SampleId

# ---------------------------------------------------------------- seeds (law 12)


def test_a_seed_is_the_same_in_every_process_and_version() -> None:
    assert derive_seed("dropout", 1, 2, 3) == 14685358894135148958


def test_every_part_of_a_seed_counts() -> None:
    base = rounding_seed(1, "0/0-1", SampleId(5), 2, 7)
    others = [
        rounding_seed(2, "0/0-1", SampleId(5), 2, 7),
        rounding_seed(1, "0/1-2", SampleId(5), 2, 7),
        rounding_seed(1, "0/0-1", SampleId(6), 2, 7),
        rounding_seed(1, "0/0-1", SampleId(5), 3, 7),
        rounding_seed(1, "0/0-1", SampleId(5), 2, 8),
    ]
    assert len({base, *others}) == 6


def test_dropout_seeds_differ_by_step_microbatch_and_layer() -> None:
    seeds = {DropoutSeeds(0, step, micro).seed(layer) for step in range(3) for micro in range(3) for layer in range(3)}
    assert len(seeds) == 27
    assert DropoutSeeds(0, 1, 2).seed(0) == DropoutSeeds(0, 1, 2).seed(0)


# ---------------------------------------------------------------- batches (law 8)


def plan(lengths: list[list[int]]) -> m.StepPlan:
    ids = iter(range(100))
    return m.StepPlan(
        epoch=1,
        step=1,
        learning_rate=1.0,
        num_targets=1,
        microbatches=tuple(tuple(m.SampleRef(next(ids), n) for n in part) for part in lengths),
        has_input_ids=True,
        has_labels=True,
        buffer_nbytes=(),
    )


def buffers(*arrays: list[int]) -> list[memoryview]:
    return [memoryview(np.array(a, "<i4").tobytes()) for a in arrays]


def test_samples_are_padded_to_the_longest_of_their_own_microbatch() -> None:
    tokens = buffers([1, 2, 3, 4, 5, 6], [1, -100, 3, 4, 5, 6])
    batches = make_batches(plan([[1, 3], [2]]), tokens, labels_are_classes=False)
    assert [b.lengths for b in batches] == [(1, 3), (2,)]
    assert batches[0].input_ids is not None
    assert batches[0].input_ids.tolist() == [[1, 0, 0], [2, 3, 4]]
    assert batches[0].labels is not None
    assert batches[0].labels.tolist() == [[1, -100, -100], [-100, 3, 4]]
    assert batches[1].input_ids is not None
    assert batches[1].input_ids.tolist() == [[5, 6]]


def test_token_buffers_of_another_size_than_the_plan_are_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="labels needs 8 bytes for 2 values, got 4"):
        make_batches(plan([[2]]), buffers([1, 2], [1]), labels_are_classes=False)


def test_classes_are_one_label_a_sample() -> None:
    batches = make_batches(plan([[1, 3], [2]]), buffers([1, 2, 3, 4, 5, 6], [2, 0, 1]), labels_are_classes=True)
    assert [b.labels.tolist() for b in batches if b.labels is not None] == [[2, 0], [1]]
    with pytest.raises(RemoteProtocolError, match="labels needs 12 bytes for 3 values, got 24"):
        make_batches(plan([[1, 3], [2]]), buffers([1] * 6, [1] * 6), labels_are_classes=True)


@pytest.mark.parametrize(
    ("microbatches", "reason"),
    [
        (((m.SampleRef(1, 2),), ()), "each microbatch of a plan needs a sample"),
        (((m.SampleRef(1, 0),),), "no tokens"),
        (((m.SampleRef(1, 2),), (m.SampleRef(1, 2),)), "twice"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(microbatches: Any, reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        check_refs(microbatches)


def test_a_plan_without_microbatches_is_one_of_a_batch_in_which_the_replica_has_no_sample() -> None:
    check_refs(())


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("count", [1, 5, 4096, 4097, 70_000, 2**17 + 5])
def test_the_squared_norm_is_the_fp64_sum_in_its_fixed_order(count: int) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(0))
    lanes = [0.0] * 4096
    for index, value in enumerate(values.tolist()):
        lanes[index % 4096] += value * value
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [lanes[i] + lanes[i + half] for i in range(half)]
    assert squared_norm(values.reshape(1, -1)) == lanes[0]


def test_the_squared_norm_has_the_same_bits_with_any_number_of_threads() -> None:
    """torch's own dot product has not: workers of one stage may have unlike numbers of cores."""
    values, found = torch.randn(3_000_017, generator=torch.Generator().manual_seed(0)), set()
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            found.add(squared_norm(values))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1
    assert found.pop() == pytest.approx(float(values.double().square().sum()), rel=1e-12)


def test_the_squared_norm_of_large_values_and_of_what_is_not_finite() -> None:
    assert squared_norm(torch.full((3,), 1e30)) == pytest.approx(3e60)  # would overflow in fp32


def test_gradients_of_a_tied_weight_are_added_once_and_the_heads_is_let_go() -> None:
    embedding, head = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    embedding.grad, head.grad = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
    add_tied_gradients(embedding, head)
    assert embedding.grad.tolist() == [11.0, 22.0]
    assert head.grad is None


def test_chance_in_a_tied_gradient_depends_on_run_end_step_and_piece() -> None:
    def drawn(*, step: int = 1, start: int = 0, own_stage: int = 0, run_seed: int = 5) -> bytes:
        exchange = TiedExchange(
            Inbox(FakeLink()),  # type: ignore[arg-type]
            Uniform.from_options({"bits": 3, "rounding": "stochastic"}),
            CodecThreads(),
            Destination("r", 1, 0, Kind.TIED, 1, 40),
            own_stage=own_stage,
            name="wte",
            parameter=torch.nn.Parameter(torch.zeros(4, 40)),
            run_seed=run_seed,
        )
        rows = torch.full((4, 40), 0.3)
        rows[:, 0] = 1.0
        return exchange._encode(step, start, rows).tobytes()

    assert drawn() == drawn()
    assert len({drawn(), drawn(step=2), drawn(start=160), drawn(own_stage=3), drawn(run_seed=6)}) == 5


# ---------------------------------------------------------------- inbox


class FakeLink:
    """Delivers what it is given; remembers what was taken and sent."""

    name = "0/0-1"

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Received] = asyncio.Queue()
        self.taken_messages: list[m.Message] = []
        self.sent: list[m.Message] = []
        self.answer: Any = None

    async def receive(self) -> Received:
        return await self.queue.get()

    def taken(self, received: Received) -> None:
        self.taken_messages.append(received.message)

    async def send(self, message: m.Message, buffers: Any = (), *, values: int = 0) -> None:
        self.sent.append(message)
        if self.answer is not None:
            self.queue.put_nowait(self.answer(message))


def tensor_message(step: int, microbatch: int) -> m.TensorMessage:
    return m.TensorMessage(
        sequence=0,
        run="r",
        epoch=1,
        replica=0,
        kind=Kind.FORWARD,
        step=step,
        microbatch=microbatch,
        stage=1,
        codec="identity",
        num_columns=4,
        samples=(m.SampleHeader(1, 0, 1),),
        buffer_nbytes=(16,),
    )


def received(message: m.Message) -> Received:
    return Received(message, (), 0)


async def test_a_message_of_a_step_that_has_not_begun_waits_with_its_credit() -> None:
    link = FakeLink()
    inbox = Inbox(link)  # type: ignore[arg-type]
    running = asyncio.create_task(inbox.run())
    link.queue.put_nowait(received(tensor_message(step=2, microbatch=0)))
    link.queue.put_nowait(received(tensor_message(step=1, microbatch=0)))
    assert (await inbox.take(Kind.FORWARD, 1, 0)).message == tensor_message(step=1, microbatch=0)
    assert link.taken_messages == []
    assert (await inbox.take(Kind.FORWARD, 2, 0)).message == tensor_message(step=2, microbatch=0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_messages_of_a_step_that_is_over_give_their_credit_back() -> None:
    link = FakeLink()
    inbox = Inbox(link)  # type: ignore[arg-type]
    running = asyncio.create_task(inbox.run())
    link.queue.put_nowait(received(tensor_message(step=1, microbatch=0)))  # waiting when the step ends
    link.queue.put_nowait(received(tensor_message(step=2, microbatch=0)))
    await inbox.take(Kind.FORWARD, 2, 0)
    inbox.finish(Kind.FORWARD, 1)
    link.queue.put_nowait(received(tensor_message(step=1, microbatch=1)))  # comes after it
    link.queue.put_nowait(received(tensor_message(step=3, microbatch=0)))
    await inbox.take(Kind.FORWARD, 3, 0)
    assert link.taken_messages == [tensor_message(1, 0), tensor_message(1, 1)]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_message_that_comes_while_its_taker_is_cancelled_waits_for_the_steps_end() -> None:
    link = FakeLink()
    inbox = Inbox(link)  # type: ignore[arg-type]
    running = asyncio.create_task(inbox.run())
    taking = asyncio.create_task(inbox.take(Kind.FORWARD, 1, 0))
    await asyncio.sleep(0)
    link.queue.put_nowait(received(tensor_message(step=1, microbatch=0)))  # the inbox hears of it first,
    taking.cancel()  # but by then nobody waits for it any more
    await asyncio.gather(taking, return_exceptions=True)
    assert not running.done(), running
    assert link.taken_messages == []
    inbox.finish(Kind.FORWARD, 1)
    assert link.taken_messages == [tensor_message(1, 0)]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_second_message_about_the_same_microbatch_is_refused() -> None:
    link = FakeLink()
    inbox = Inbox(link)  # type: ignore[arg-type]
    for _ in range(2):
        link.queue.put_nowait(received(tensor_message(step=1, microbatch=0)))
    with pytest.raises(RemoteProtocolError, match="a second message"):
        await inbox.run()


# ---------------------------------------------------------------- weights


def entry(name: str, tensor: torch.Tensor, content_hash: str | None = None) -> m.TensorEntry:
    import xxhash

    content = tensor_bytes(tensor)
    return m.TensorEntry(
        name=name,
        dtype="F32",
        shape=tuple(tensor.shape),
        nbytes=len(content),
        content_hash=content_hash or xxhash.xxh3_64_hexdigest(content),
    )


def chunk_server(tensor: torch.Tensor, spoil: int = 0) -> Any:
    content = bytes(tensor_bytes(tensor))

    def answer(request: Any) -> Received:
        piece = content[request.offset : request.offset + request.nbytes]
        chunk = m.WeightsChunk(
            sequence=0,
            name=request.name,
            dtype="F32",
            shape=tuple(tensor.shape),
            offset=request.offset + spoil,
            total_nbytes=len(content),
            buffer_nbytes=(len(piece),),
        )
        return Received(chunk, (memoryview(piece),), 0)

    return answer


async def test_a_tensor_larger_than_a_chunk_arrives_whole() -> None:
    tensor = torch.arange(3_000_000, dtype=torch.float32)
    link = FakeLink()
    link.answer = chunk_server(tensor)
    got = await fetch_tensors(link, [entry("a", tensor)])  # type: ignore[arg-type]
    assert torch.equal(got["a"], tensor)
    assert len(link.sent) == len(link.taken_messages) == 3


async def test_weights_with_another_hash_than_promised_are_refused() -> None:
    link = FakeLink()
    link.answer = chunk_server(torch.ones(4))
    with pytest.raises(RemoteProtocolError, match="weights of a arrived with hash"):
        await fetch_tensors(link, [entry("a", torch.ones(4), content_hash="0" * 16)])  # type: ignore[arg-type]


async def test_a_chunk_that_was_not_asked_for_is_refused() -> None:
    link = FakeLink()
    link.answer = chunk_server(torch.ones(4), spoil=4)
    with pytest.raises(RemoteProtocolError, match="asked for a from byte 0"):
        await fetch_tensors(link, [entry("a", torch.ones(4))])  # type: ignore[arg-type]


def test_an_own_folder_with_other_weights_is_refused_by_name() -> None:
    reader: Any = {"a": torch.ones(4)}
    assert torch.equal(read_own_tensors(reader, [entry("a", torch.ones(4))], "/models/x")["a"], torch.ones(4))
    with pytest.raises(ConfigError, match=r"/models/x holds other weights than the coordinator: a has hash"):
        read_own_tensors(reader, [entry("a", torch.zeros(4))], "/models/x")
    with pytest.raises(ConfigError, match="has no tensor b; leave --model out"):
        read_own_tensors(reader, [entry("b", torch.zeros(4))], "/models/x")


def test_only_what_was_trained_is_sent_back_unless_nobody_else_has_it() -> None:
    named = [(n, torch.nn.Parameter(torch.zeros(1), requires_grad=n != "frozen")) for n in ("wte", "frozen", "head")]
    aliases = {"head": "wte"}
    assert [n for n, _ in trained_tensors(named, aliases, frozen_too=False)] == ["wte"]
    assert [n for n, _ in trained_tensors(named, aliases, frozen_too=True)] == ["wte", "frozen"]
