"""What real models send: activations, their changes over a few steps, and gradients, recorded from one process. Knows no codec.

Modules whose name starts with an underscore are no plugins.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

CACHE = Path(__file__).parents[2] / "examples" / "cache"
NUM_STEPS, LEARNING_RATE, NUM_TOKENS = 4, 3e-5, 1024


class Source(NamedTuple):
    """A model and the text that it is trained on, both as `scripts/fetch_examples.py` leaves them."""

    name: str
    folder: str
    text: str
    layer: int  # whose output is recorded: the middle one
    length: int  # tokens of a sample


SOURCES = (
    Source("SmolLM2-135M", "smollm2", "pubmed-512.jsonl", 14, 256),
    Source("MiniLM", "minilm", "reviews.jsonl", 2, 32),
)


def recordings() -> tuple[dict[str, npt.NDArray[np.float32]], list[str]]:
    """(rows, columns) fp32 by "model, what", and the sources that are not there."""
    found: dict[str, npt.NDArray[np.float32]] = {}
    missing = []
    for source in SOURCES:
        if not (CACHE / source.folder / "model.safetensors").exists() or not (CACHE / source.text).exists():
            missing.append(source.name)
            continue
        found |= {f"{source.name}, {what}": values for what, values in _record(source).items()}
    return found, missing


def _record(source: Source) -> Mapping[str, npt.NDArray[np.float32]]:
    """A few AdamW steps on the same samples, as when one sample is visited again: the change is that of all of them."""
    torch.manual_seed(0)
    model, batch = _model_and_batch(source)
    model.eval()  # without dropout, which would be most of the change
    layers = model.model.layers if hasattr(model, "model") else model.bert.encoder.layer
    output: list[torch.Tensor] = []

    def keep(_module: object, _inputs: object, result: Any) -> None:  # noqa: ANN401 - a tensor, or a tuple that starts with one
        values = result[0] if isinstance(result, tuple) else result
        if values.requires_grad:
            values.retain_grad()
        output[:] = [values]

    layers[source.layer].register_forward_hook(keep)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    first: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
        if step == 0:
            first, gradient = output[0].detach().clone(), output[0].grad
    with torch.no_grad():
        model(**batch)
    assert first is not None
    assert gradient is not None
    real = batch["attention_mask"].bool()
    kinds = {"activation": first, "change": output[0] - first, "gradient": gradient}
    return {name: values[real].numpy().astype(np.float32) for name, values in kinds.items()}


def _model_and_batch(source: Source) -> tuple[Any, dict[str, torch.Tensor]]:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    folder, is_causal = str(CACHE / source.folder), source.name.startswith("Smol")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with (CACHE / source.text).open(encoding="utf-8") as lines:
        records = [json.loads(line) for line in itertools.islice(lines, NUM_TOKENS // source.length)]
    ids = [tokenizer(record["text"])["input_ids"][: source.length] for record in records]
    width = max(map(len, ids))
    batch = {
        "input_ids": torch.tensor([row + [0] * (width - len(row)) for row in ids]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids]),
    }
    if is_causal:
        batch["labels"] = torch.where(batch["attention_mask"] == 1, batch["input_ids"], -100)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), batch
    batch["labels"] = torch.tensor([record["label"] for record in records])
    return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2, dtype=torch.float32), batch
