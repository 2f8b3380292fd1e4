"""A pipeline in the middle of a step: what runs where, what waits for whom, what an abort at that moment leaves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from pipecomp.config import parse_run_config
from pipecomp.errors import RemoteProtocolError
from pipecomp.protocol.messages import GradientMessage, Message, TensorMessage
from pipecomp.runtime.channel import OutChannel
from pipecomp.runtime.coding import LinkCoder
from pipecomp.runtime.link import Link
from pipecomp.runtime.optimizer import ShardOptimizer
from pipecomp.runtime.rehearsal import make_codec
from pipecomp.runtime.stage import StageRuntime
from pipecomp.testing.local_pipeline import LocalPipeline, LocalSample, Microbatches
from pipecomp.types import Kind, TensorSpec

VOCAB, NUM_MICROBATCHES = 61, 6
MODEL: dict[str, Any] = {
    "model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 32, "vocab_size": VOCAB,
    "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
PATIENCE_S = 30.0


def two_ranks() -> LocalPipeline:
    tree = {
        "model": {"config": MODEL, "weights": "random"},
        "data": {"train": "unused.txt", "tokenizer": "unused", "max_length": 12},
        "train": {"batch_size": NUM_MICROBATCHES, "num_microbatches": NUM_MICROBATCHES, "gradient_checkpointing": True},
        "compression": {"forward": {"codec": "delta", "bits": 4}, "backward": {"codec": "uniform", "bits": 8}},
        "cluster": {"tied_weights": "exchange", "schedule": "gpipe"},
    }
    return LocalPipeline(parse_run_config(tree), MODEL, num_ranks=2)


@pytest.fixture
async def two() -> AsyncIterator[LocalPipeline]:
    async with two_ranks() as pipeline:
        yield pipeline


def batch() -> Microbatches:
    draw = np.random.default_rng(3)
    ids = [draw.integers(1, VOCAB, size=7).tolist() for _ in range(NUM_MICROBATCHES)]
    return [[LocalSample(number, sample, sample)] for number, sample in enumerate(ids)]


def spy(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, before: Callable[..., None]) -> None:
    """Call `before` with the arguments of each call of `owner.name`, in its thread."""
    inner = getattr(owner, name)

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        before(self, *args, **kwargs)
        return inner(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, watched)


# ---------------------------------------------------------------- who runs where (law 9)


async def test_nothing_that_computes_runs_in_the_loop_and_no_codec_in_the_compute_thread(
    two: LocalPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, set[str]] = {}
    watched = [(StageRuntime, n) for n in ("forward", "backward", "evaluate")]
    watched += [(ShardOptimizer, n) for n in ("layer_norms", "step", "forget")]
    watched += [(LinkCoder, n) for n in ("encode", "decode")]
    for owner, name in watched:
        seen = threads.setdefault(f"{owner.__name__}.{name}", set())
        spy(monkeypatch, owner, name, lambda *_, _seen=seen, **__: _seen.add(threading.current_thread().name.split("_")[0]))
    await two.step(batch(), learning_rate=1e-3)
    await two.step(batch(), learning_rate=1e-3, abort=True)
    await two.evaluate(batch())
    coders = {name: {"codec"} for name in threads if name.startswith("LinkCoder")}
    assert threads == {name: {"compute"} for name in threads} | coders


async def test_compute_goes_on_while_a_link_is_stuck(two: LocalPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, all_computed, link_is_well = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    computed: list[int] = []
    send = Link.send

    def count(stage: StageRuntime, _step: int, microbatch: int, *_: Any, **__: Any) -> None:
        if stage.module.is_first:
            computed.append(microbatch)
            if len(computed) == NUM_MICROBATCHES:
                loop.call_soon_threadsafe(all_computed.set)

    async def stuck(self: Link, message: Message, *args: Any, **kwargs: Any) -> None:
        await link_is_well.wait()
        await send(self, message, *args, **kwargs)

    spy(monkeypatch, StageRuntime, "forward", count)
    monkeypatch.setattr(Link, "send", stuck)
    step = asyncio.ensure_future(two.step(batch(), learning_rate=1e-3))
    async with asyncio.timeout(PATIENCE_S):
        await all_computed.wait()
    link_is_well.set()
    await step


async def test_a_stuck_link_stops_the_encoder_after_a_few_microbatches(
    two: LocalPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is being sent, two in the queue, one that waits for room in it (law 10)."""
    submitted, link_is_well = asyncio.Event(), asyncio.Event()
    encoded: list[int] = []
    channel = two.ranks[0].stages[0].forward_out  # type: ignore[index]
    assert channel is not None
    spy(monkeypatch, LinkCoder, "encode", lambda self, *_, **__: encoded.append(1) if self is channel.coder else None)
    last = NUM_MICROBATCHES - 1
    spy(monkeypatch, OutChannel, "submit", lambda _, __, microbatch, *___, **____: microbatch == last and submitted.set())
    send = Link.send

    async def stuck(self: Link, message: Message, *args: Any, **kwargs: Any) -> None:
        await link_is_well.wait()
        await send(self, message, *args, **kwargs)

    monkeypatch.setattr(Link, "send", stuck)
    step = asyncio.ensure_future(two.step(batch(), learning_rate=1e-3))
    await submitted.wait()
    await settled(two)
    assert len(encoded) <= 4 < NUM_MICROBATCHES
    link_is_well.set()
    await step
    assert len(encoded) == NUM_MICROBATCHES


async def settled(pipeline: LocalPipeline) -> None:
    """Let everything that can run without help run: the loop, the codec threads and the compute thread, each many times."""
    for _ in range(10 * NUM_MICROBATCHES):
        await asyncio.sleep(0)
        await pipeline.ranks[0].compute.run(lambda: None)
        await pipeline.ranks[0].threads.idle()


# ---------------------------------------------------------------- an abort while values are being encoded (law 3)


async def test_an_abort_in_the_middle_of_encoding_leaves_no_message_and_no_job(
    two: LocalPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted, go_on = asyncio.Event(), threading.Event()
    spy(monkeypatch, LinkCoder, "encode", lambda *_, **__: go_on.wait(PATIENCE_S))
    last = NUM_MICROBATCHES - 1
    spy(monkeypatch, OutChannel, "submit", lambda _, __, microbatch, *___, **____: microbatch == last and submitted.set())
    step = asyncio.ensure_future(two.step(batch(), learning_rate=1e-3))
    await submitted.wait()
    step.cancel()
    await asyncio.gather(step, return_exceptions=True)
    aborting = [asyncio.ensure_future(rank.abort(1)) for rank in two.ranks]
    for _ in range(5):  # an abort that waits for nobody is through by now
        await two.ranks[0].compute.run(lambda: None)
    go_on.set()
    await asyncio.gather(*aborting)
    await settled(two)
    assert [rank.message_nbytes for rank in two.ranks] == [0, 0]
    await two.step(batch(), learning_rate=1e-3)
    for sender, receiver in two.digests():
        assert sender == receiver
        assert {version for version, _ in sender.values()} == {2}


async def test_an_abort_behind_a_stuck_link_encodes_nothing_more(
    two: LocalPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted, link_is_well = asyncio.Event(), asyncio.Event()
    last = NUM_MICROBATCHES - 1
    spy(monkeypatch, OutChannel, "submit", lambda _, __, microbatch, *___, **____: microbatch == last and submitted.set())
    send = Link.send

    async def stuck(self: Link, message: Message, *args: Any, **kwargs: Any) -> None:
        await link_is_well.wait()
        await send(self, message, *args, **kwargs)

    monkeypatch.setattr(Link, "send", stuck)
    step = asyncio.ensure_future(two.step(batch(), learning_rate=1e-3))
    await submitted.wait()
    await settled(two)
    step.cancel()
    await asyncio.gather(step, return_exceptions=True)
    for rank in two.ranks:
        await rank.abort(1)
    link_is_well.set()
    await settled(two)
    assert [rank.message_nbytes for rank in two.ranks] == [0, 0]
    await two.step(batch(), learning_rate=1e-3)


async def test_evaluation_crosses_by_its_own_codec_on_every_visit(two: LocalPipeline) -> None:
    await two.step(batch(), learning_rate=1e-3)
    for _ in range(2):
        await two.evaluate(batch())
    sent = [t for hub in two._hubs for t in hub.traffic() if t.kind is Kind.EVALUATION and t.messages]
    assert [(t.values, t.payload_nbytes) for t in sent] == [(values := 2 * 7 * NUM_MICROBATCHES * 16, 2 * values)]


async def test_payloads_have_the_bytes_of_their_codecs_size_functions(two: LocalPipeline) -> None:
    for _ in range(2):
        await two.step(batch(), learning_rate=1e-3)
    spec, carried = TensorSpec(7, 16), dict.fromkeys(Kind, 0)
    for hub in two._hubs:
        for part in hub.traffic():
            carried[part.kind] += part.payload_nbytes
    forward, backward, tied = (make_codec(two.config, kind) for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.TIED))
    visits = [forward.encoded_nbytes(spec, first_visit=first) for first in (True, False)]
    assert carried[Kind.FORWARD] == NUM_MICROBATCHES * sum(visits)
    assert carried[Kind.BACKWARD] == NUM_MICROBATCHES * 2 * backward.encoded_nbytes(spec, first_visit=True)
    assert carried[Kind.TIED] == 2 * 2 * tied.encoded_nbytes(TensorSpec(VOCAB, 16), first_visit=True)
    assert carried[Kind.CONTROL] == carried[Kind.EVALUATION] == 0


async def test_an_aborted_step_is_not_metered(two: LocalPipeline) -> None:
    await two.step(batch(), learning_rate=1e-3)
    metered = [meter for rank in two.ranks for meter in rank.take_meters()]
    assert {meter.kind for meter in metered} == {Kind.FORWARD, Kind.BACKWARD}
    await two.step(batch(), learning_rate=1e-3, abort=True)
    assert [meter for rank in two.ranks for meter in rank.take_meters()] == []


async def test_an_aborted_step_holds_no_memory(two: LocalPipeline) -> None:
    await two.step(batch(), learning_rate=1e-3)
    before = [rank.message_nbytes for rank in two.ranks]
    await two.step(batch(), learning_rate=1e-3, abort=True)
    assert [rank.message_nbytes for rank in two.ranks] == before
    assert all(p.grad is None for modules in two.modules for m in modules.values() for p in m.parameters())


# ---------------------------------------------------------------- messages about something else (law 6)


def change_what_is_sent(
    monkeypatch: pytest.MonkeyPatch, applies: Callable[[Message], bool], change: Callable[[Any], dict[str, Any]]
) -> None:
    send = Link.send

    async def changed(self: Link, message: Message, buffers: Sequence[Any] = (), *, values: int = 0) -> None:
        if applies(message):
            message = msgspec.structs.replace(message, **change(message))
        await send(self, message, buffers, values=values)

    monkeypatch.setattr(Link, "send", changed)


@pytest.mark.parametrize("kind", [Kind.FORWARD, Kind.BACKWARD, Kind.EVALUATION])
@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("replica", lambda _: {"replica": 1}),
        ("stage", lambda m: {"stage": m.stage + 1}),
        ("codec", lambda _: {"codec": "identity"}),
        ("sample_id of sample 0", lambda m: {"samples": (msgspec.structs.replace(m.samples[0], sample_id=5000),)}),
    ],
)
async def test_a_tensor_about_something_else_is_never_computed_on(
    two: LocalPipeline, monkeypatch: pytest.MonkeyPatch, kind: Kind, field: str, change: Callable[[Any], dict[str, Any]]
) -> None:
    change_what_is_sent(monkeypatch, lambda m: isinstance(m, TensorMessage) and m.kind is kind, change)
    work = two.evaluate(batch()) if kind is Kind.EVALUATION else two.step(batch(), learning_rate=1e-3)
    with pytest.raises(RemoteProtocolError, match=f"has {field} "):
        await work


@pytest.mark.parametrize(("field", "value"), [("name", "transformer.wpe.weight"), ("stage", 7), ("num_values", 3)])
async def test_a_tied_gradient_of_something_else_is_never_added(
    two: LocalPipeline, monkeypatch: pytest.MonkeyPatch, field: str, value: object
) -> None:
    change_what_is_sent(monkeypatch, lambda m: isinstance(m, GradientMessage), lambda _: {field: value})
    with pytest.raises(RemoteProtocolError, match=f"has {field} {value!r}"):
        await two.step(batch(), learning_rate=1e-3)


async def test_messages_that_nobody_changed_train(two: LocalPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the tests above fail for the changed fields alone."""
    change_what_is_sent(monkeypatch, lambda m: isinstance(m, TensorMessage), lambda _: {})
    before = two.parameters()
    await two.step(batch(), learning_rate=1e-3)
    assert any(not torch.equal(before[name], now) for name, now in two.parameters().items())
