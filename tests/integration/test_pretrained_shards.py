"""Pretrained SmolLM2 in four shards computes what plain transformers computes, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipecomp.config import ModelConfig
from pipecomp.models import open_model
from pipecomp.models.base import Batch
from pipecomp.partition import partition_layers

_FOLDER = Path(__file__).parents[2] / "examples" / "cache" / "smollm2"
_TEXTS = (
    "The capital of France is Paris, and it is known for the Eiffel Tower.",
    "Mitochondria are organelles that produce most of a cell's energy.",
    "Hello there.",
)


@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.skipif(not (_FOLDER / "model.safetensors").exists(), reason="examples/cache has no smollm2: see examples/")
def test_pretrained_shards_have_the_whole_models_logits_and_loss() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(_FOLDER)
    encoded = [tokenizer(text)["input_ids"] for text in _TEXTS]
    lengths = tuple(map(len, encoded))
    ids = torch.tensor([sample + [0] * (max(lengths) - len(sample)) for sample in encoded])
    real = torch.arange(max(lengths)).unsqueeze(0) < torch.tensor(lengths).unsqueeze(1)
    labels = torch.where(real, ids, -100)
    num_tokens = sum(lengths) - len(lengths)

    model = open_model(ModelConfig(name=str(_FOLDER)))
    batch, hidden = Batch(lengths, ids, labels), None
    with torch.no_grad():
        for shard in partition_layers([layer.cost for layer in model.plan.layers], 4):
            stage = model.build(shard)
            model.initialize(stage, model.weights, seed=0)
            hidden = stage.forward_layers(None if hidden is None else hidden * real.unsqueeze(-1), batch, seeds=None)
        assert hidden is not None
        loss = stage.loss_sum(hidden, batch) / num_tokens
        whole = AutoModelForCausalLM.from_pretrained(_FOLDER, dtype=torch.float32).eval()
        expected = whole(ids, attention_mask=real.long(), labels=labels, num_items_in_batch=num_tokens)
    assert torch.equal(hidden[real], expected.logits[real])
    assert torch.equal(loss, expected.loss)
    assert float(loss) < 3.5
