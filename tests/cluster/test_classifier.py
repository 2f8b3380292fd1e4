"""A classifier in a pipeline: law 1 for its task, its accuracy, and what evaluation leaves alone."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from pipecomp.config import RunConfig, parse_run_config
from pipecomp.models import model_from_config
from pipecomp.runtime.optimizer import squared_norm
from pipecomp.testing.local_pipeline import Evaluation, LocalPipeline, LocalSample
from pipecomp.types import Shard

VOCAB, CLASSES, BATCH, NUM_STEPS = 61, 3, 8, 5
LEARNING_RATE, NORM_LIMIT, SEED = 1e-2, 0.5, 7
IDENTITY = {"codec": "identity"}


def model_config(dropout: float = 0.0) -> dict[str, Any]:
    size = {"num_hidden_layers": 3, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    rest = {"vocab_size": VOCAB, "max_position_embeddings": 16, "num_labels": CLASSES}
    return {"model_type": "bert", **size, **rest, "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}


def run_config(num_microbatches: int = 3, *, recompute: bool = False, **compression: Any) -> RunConfig:
    return parse_run_config(
        {
            "model": {"config": model_config(), "task": "sequence-classification"},
            "data": {"train": "unused.jsonl", "tokenizer": "unused", "max_length": 12},
            "train": {
                "batch_size": BATCH,
                "num_microbatches": num_microbatches,
                "max_grad_norm": NORM_LIMIT,
                "weight_decay": 0.1,
                "gradient_checkpointing": recompute,
                "seed": SEED,
            },
            "compression": {**dict.fromkeys(("forward", "backward", "evaluation"), IDENTITY), **compression},
        }
    )


@functools.cache
def batches(num_microbatches: int) -> list[list[list[LocalSample]]]:
    """Five batches of ragged samples, the last of them short; one sample of a single token."""
    draw = np.random.default_rng(3)
    result = []
    for step in range(NUM_STEPS):
        samples = []
        for i in range(BATCH if step < NUM_STEPS - 1 else 3):
            ids = draw.integers(1, VOCAB, size=1 if (step, i) == (1, 2) else int(draw.integers(2, 13)))
            samples.append(LocalSample(step * 100 + i, ids.tolist(), [int(draw.integers(CLASSES))]))
        parts = np.array_split(np.arange(len(samples)), min(num_microbatches, len(samples)))
        result.append([[samples[i] for i in part] for part in parts])
    return result


class Outcome(NamedTuple):
    losses: list[float]
    norms: list[float]
    evaluations: list[Evaluation]
    parameters: dict[str, torch.Tensor]


async def run(num_ranks: int, num_microbatches: int, *, dropout: float = 0.0, recompute: bool = False) -> Outcome:
    losses, norms, evaluations = [], [], []
    config = run_config(num_microbatches, recompute=recompute)
    async with LocalPipeline(config, model_config(dropout), num_ranks=num_ranks) as pipeline:
        for batch in batches(num_microbatches):
            outcome = await pipeline.step(batch, learning_rate=LEARNING_RATE)
            losses.append(outcome.loss)
            norms.append(outcome.gradient_norm)
            evaluations.append(await pipeline.evaluate(batch))
        return Outcome(losses, norms, evaluations, pipeline.parameters())


def plain_transformers(num_microbatches: int) -> Outcome:
    """The loop a person would write, with nothing of this project but its initial weights and its norm's summation."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    values = {k: v for k, v in model_config().items() if k != "model_type"}
    model: Any = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bert", **values))
    ours = model_from_config(model_config())
    module = ours.build(Shard(0, len(ours.plan.layers)))
    ours.initialize(module, None, seed=SEED)
    model.load_state_dict(dict(module.named_checkpoint_parameters()))
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)
    result = Outcome([], [], [], {})
    for batch in batches(num_microbatches):
        num_samples, loss_sum = sum(map(len, batch)), 0.0
        model.train()
        for part in batch:
            loss = cross_entropy(model, part)
            loss_sum += float(loss.detach())
            (loss / num_samples).backward()
        total = 0.0
        for parameter in named.values():
            total += squared_norm(parameter.grad)
        norm = math.sqrt(total)
        for parameter in named.values():
            parameter.grad.mul_(min(1.0, NORM_LIMIT / (norm + 1e-6)))
        optimizer.step()
        optimizer.zero_grad()
        result.losses.append(loss_sum / num_samples)
        result.norms.append(norm)
        result.evaluations.append(evaluate(model.eval(), batch))
    return result._replace(parameters={name: p.detach().clone() for name, p in named.items()})


def logits_of(model: Any, part: list[LocalSample]) -> torch.Tensor:
    width = max(len(s.input_ids) for s in part)
    ids = torch.tensor([list(s.input_ids) + [0] * (width - len(s.input_ids)) for s in part])
    mask = torch.tensor([[1] * len(s.input_ids) + [0] * (width - len(s.input_ids)) for s in part])
    logits: torch.Tensor = model(input_ids=ids, attention_mask=mask).logits
    return logits


def cross_entropy(model: Any, part: list[LocalSample]) -> torch.Tensor:
    labels = torch.tensor([s.labels[0] for s in part])
    return torch.nn.functional.cross_entropy(logits_of(model, part), labels, reduction="sum")


@torch.no_grad()
def evaluate(model: Any, batch: list[list[LocalSample]]) -> Evaluation:
    num_samples, loss_sum, num_correct = sum(map(len, batch)), 0.0, 0
    for part in batch:
        loss_sum += float(cross_entropy(model, part))
        num_correct += sum(
            int(row.argmax()) == sample.labels[0] for row, sample in zip(logits_of(model, part), part, strict=True)
        )
    return Evaluation(loss_sum / num_samples, num_correct / num_samples)


def assert_same_bits(got: Outcome, expected: Outcome) -> None:
    assert got.losses == expected.losses
    assert got.norms == expected.norms
    assert got.evaluations == expected.evaluations
    assert got.parameters.keys() == expected.parameters.keys()
    different = [n for n, p in expected.parameters.items() if not torch.equal(got.parameters[n], p)]
    assert not different


@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
async def test_a_split_classifier_trains_the_bits_of_a_plain_transformers_loop(num_ranks: int, num_microbatches: int) -> None:
    assert_same_bits(await run(num_ranks, num_microbatches), plain_transformers(num_microbatches))


async def test_dropout_and_recompute_train_the_same_bits_in_any_split() -> None:
    whole = await run(1, 3, dropout=0.1)
    assert_same_bits(await run(3, 3, dropout=0.1, recompute=True), whole)
    assert whole.losses != (await run(1, 3)).losses


async def test_both_ends_agree_on_a_classifiers_activations() -> None:
    config = run_config(forward={"codec": "delta", "bits": 4}, backward={"codec": "uniform", "bits": 8})
    async with LocalPipeline(config, model_config(), num_ranks=3) as pipeline:
        for _ in range(2):
            await pipeline.step(batches(3)[0], learning_rate=1e-3)
        before = await pipeline.evaluate(batches(3)[0])
        for sender, receiver in pipeline.digests():
            assert sender == receiver
            assert len(sender) == BATCH
        assert await pipeline.evaluate(batches(3)[0]) == before
        assert before.accuracy is not None
        assert before.accuracy * BATCH == round(before.accuracy * BATCH)
