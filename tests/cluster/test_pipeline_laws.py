"""Laws 2 and 3 on a whole pipeline, frozen parts, and values that are not finite."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pipecomp.config import RunConfig, parse_run_config
from pipecomp.errors import CodecError
from pipecomp.models.base import StageModule
from pipecomp.runtime.pipeline import StepRefused
from pipecomp.testing.local_pipeline import LocalPipeline, LocalSample, Microbatches
from pipecomp.types import Kind, StageIndex

VOCAB = 61
MODEL: dict[str, Any] = {
    "model_type": "gpt2",
    "n_layer": 4,
    "n_embd": 16,
    "n_head": 2,
    "n_positions": 32,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
DELTA = {"codec": "delta", "bits": 3, "group": 16}


def config(forward: dict[str, Any] = DELTA, freeze: tuple[str, ...] = ()) -> RunConfig:
    return parse_run_config(
        {
            "model": {"config": MODEL, "weights": "random", "freeze": list(freeze)},
            "data": {"train": "unused.txt", "tokenizer": "unused", "max_length": 12},
            "train": {"batch_size": 6, "num_microbatches": 3},
            "compression": {"forward": forward, "backward": {"codec": "uniform", "bits": 6}},
        }
    )


def batch(first_sample: int, sizes: tuple[int, ...] = (2, 3, 1)) -> Microbatches:
    draw = np.random.default_rng(first_sample)
    parts, next_id = [], first_sample
    for size in sizes:
        part = []
        for _ in range(size):
            ids = draw.integers(1, VOCAB, size=int(draw.integers(2, 13))).tolist()
            part.append(LocalSample(next_id, ids, ids))
            next_id += 1
        parts.append(part)
    return parts


def pipeline(**options: Any) -> LocalPipeline:
    return LocalPipeline(config(**options), MODEL, num_ranks=3)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


async def test_both_ends_of_every_link_remember_the_same_messages() -> None:
    async with pipeline() as three:
        for visit in range(4):
            for first in (0, 100, 200):
                await three.step(batch(first), learning_rate=1e-3, abort=(visit, first) == (1, 100))
                for sender, receiver in three.digests():
                    assert sender == receiver
        versions = {version for sender, _ in three.digests() for version, _ in sender.values()}
        assert versions == {10, 11, 12}  # the last step of each sample


async def test_an_aborted_step_leaves_no_trace() -> None:
    async with pipeline() as plain, pipeline() as aborting:
        for first in (0, 100, 0, 100):
            expected = await plain.step(batch(first), learning_rate=1e-3)
            before = aborting.digests(), aborting.parameters()
            await aborting.step(batch(first), learning_rate=1e-3, abort=True)
            assert aborting.digests() == before[0]
            assert same(aborting.parameters(), before[1])
            assert await aborting.step(batch(first), learning_rate=1e-3) == expected
        assert checksums(aborting) == checksums(plain)  # versions are steps, and aborted ones count
        assert same(aborting.parameters(), plain.parameters())


def checksums(three: LocalPipeline) -> list[dict[int, int]]:
    return [{sample: checksum for sample, (_, checksum) in end.items()} for pair in three.digests() for end in pair]


async def test_evaluation_touches_no_message_and_no_weight() -> None:
    async with pipeline() as plain, pipeline() as evaluating:
        for first in (0, 100, 0):
            await plain.step(batch(first), learning_rate=1e-3)
            await evaluating.evaluate(batch(first))
            await evaluating.step(batch(first), learning_rate=1e-3)
        assert evaluating.digests() == plain.digests()
        assert same(evaluating.parameters(), plain.parameters())


async def test_a_frozen_first_stage_gets_no_gradient_and_keeps_its_weights() -> None:
    async with pipeline(forward={"codec": "identity"}, freeze=("transformer.wte.*", "transformer.wpe.*", "*.h.0.*")) as frozen:
        first_stage = frozen.plan.shards[0]
        assert first_stage.end_layer == 2, "the frozen layers are just the first stage"
        before = frozen.parameters()
        await frozen.step(batch(0), learning_rate=1e-2)
        after = frozen.parameters()
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        trainable = {p.name for p in frozen.model.plan.parameters if p.trainable}
        assert changed <= trainable
        assert any(".h.1." in name for name in changed)
        one_link = sum(len(s.input_ids) for part in batch(0) for s in part) * MODEL["n_embd"]
        assert frozen.traffic()[Kind.BACKWARD] == one_link  # of the two links only the second carries gradients


async def test_values_that_are_not_finite_refuse_the_step_and_the_next_one_goes_on() -> None:
    async with pipeline() as three:
        await three.step(batch(0), learning_rate=1e-3)
        before = three.digests(), three.parameters()
        stage: StageModule = three.modules[1][1]
        forward = stage.forward_layers
        stage.forward_layers = lambda *a, **k: forward(*a, **k) * float("nan")  # type: ignore[method-assign]
        with pytest.raises(StepRefused, match=r"step 2: forward values of sample 0{13}064 on link 0/1-2.*"):
            await three.step(batch(100), learning_rate=1e-3)
        stage.forward_layers = forward  # type: ignore[method-assign]
        for rank in three.ranks:
            await rank.abort(2)
        assert three.digests() == before[0]
        assert same(three.parameters(), before[1])
        await three.step(batch(0), learning_rate=1e-3)
        for sender, receiver in three.digests():
            assert sender == receiver


async def test_an_evaluation_of_values_that_are_not_finite_ends_instead_of_waiting_forever() -> None:
    async with pipeline() as three:
        stage: StageModule = three.modules[0][0]
        forward = stage.forward_layers
        stage.forward_layers = lambda *a, **k: forward(*a, **k) * float("inf")  # type: ignore[method-assign]
        with pytest.raises(CodecError, match=r"cannot be evaluated: evaluation values of sample 0{16} on link 0/0-1.*inf"):
            await three.evaluate(batch(0))


async def test_an_aborted_step_gives_the_credit_of_its_messages_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver is interrupted while it decodes."""
    async with pipeline() as three:
        decoding = three.ranks[1].threads.run
        began: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def never(function: Any) -> Any:
            if not began.done():
                began.set_result(None)
                await asyncio.Event().wait()
            return await decoding(function)

        link = three.makers[0].inboxes["0/0-1"].link
        stages = three.ranks[1].stages
        inlet = stages[StageIndex(1)].forward_in
        assert inlet is not None
        interrupted = inlet._replace(threads=SimpleNamespace(run=never))  # type: ignore[arg-type]
        monkeypatch.setitem(stages, StageIndex(1), stages[StageIndex(1)]._replace(forward_in=interrupted))
        stepping = asyncio.create_task(three.step(batch(0), learning_rate=1e-3))
        await began
        stepping.cancel()
        await asyncio.gather(stepping, return_exceptions=True)
        for rank in three.ranks:
            await rank.abort(1)
        assert await link.drain(timeout_s=10.0)


async def test_a_tied_gradient_that_is_not_finite_refuses_the_step_instead_of_waiting_forever() -> None:
    tied = {**MODEL, "tie_word_embeddings": True}
    tree = {
        "model": {"config": tied, "weights": "random"},
        "data": {"train": "unused.txt", "tokenizer": "unused", "max_length": 12},
        "train": {"batch_size": 6, "num_microbatches": 3},
        "cluster": {"tied_weights": "exchange"},
    }
    async with LocalPipeline(parse_run_config(tree), tied, num_ranks=2) as two:
        head = dict(two.modules[1][1].named_checkpoint_parameters())["lm_head.weight"]
        head.register_hook(lambda gradient: gradient * float("nan"))
        with pytest.raises(StepRefused, match=r"step 1: tied gradient: value 0 is nan"):
            await two.step(batch(0), learning_rate=1e-3)


async def test_a_tied_weight_keeps_two_equal_copies_whatever_its_codec() -> None:
    """Both ends add the same two reconstructions, so a lossy exchange cannot make the copies drift apart."""
    tied = {**MODEL, "tie_word_embeddings": True}
    tree = {
        "model": {"config": tied, "weights": "random"},
        "data": {"train": "unused.txt", "tokenizer": "unused", "max_length": 12},
        "train": {"batch_size": 6, "num_microbatches": 3},
        "compression": {"tied": {"codec": "uniform", "bits": 4}},
        "cluster": {"tied_weights": "exchange"},
    }
    async with LocalPipeline(parse_run_config(tree), tied, num_ranks=2) as two:
        before = two.parameters()
        for first in (0, 100, 0):
            await two.step(batch(first), learning_rate=1e-2)
            after = two.parameters()
            assert torch.equal(after["transformer.wte.weight"], after["lm_head.weight"])
        assert not torch.equal(after["lm_head.weight"], before["lm_head.weight"])
        assert two.traffic()[Kind.TIED] == 3 * 2 * VOCAB * MODEL["n_embd"]
