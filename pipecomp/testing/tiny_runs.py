"""The smallest run that has everything: a GPT-2 of a few thousand weights, ragged samples, a delta codec. Knows run files and
samples; starts nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pipecomp.config import RunConfig, parse_run_config
from pipecomp.testing.local_pipeline import LocalSample, Microbatches

WIDTH, MAX_LENGTH, NUM_SAMPLES, NUM_MICROBATCHES = 32, 12, 6, 3
MODEL: Mapping[str, Any] = {
    "model_type": "gpt2", "vocab_size": 48, "n_positions": 16, "n_embd": WIDTH, "n_layer": 4, "n_head": 2,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip


def tiny_run(**sections: Mapping[str, Any]) -> RunConfig:
    """A run file's sections, each in place of the one here."""
    return parse_run_config(
        {
            "model": {"config": MODEL, "weights": "random"},
            "data": {"train": "unused.txt", "tokenizer": "unused", "max_length": MAX_LENGTH},
            "train": {"batch_size": NUM_SAMPLES, "num_microbatches": NUM_MICROBATCHES},
            "compression": {"forward": {"codec": "delta", "bits": 4}},
            **sections,
        }
    )


def tiny_batch(first: int = 0, *, num_rows: int | None = None) -> Microbatches:
    """Six samples from number `first` on, two a microbatch, of `num_rows` tokens each or, if None, of 5, 6, ... tokens."""
    samples = []
    for index in range(NUM_SAMPLES):
        length = 5 + index if num_rows is None else num_rows
        ids = np.random.default_rng(first + index).integers(0, MODEL["vocab_size"], length).tolist()
        samples.append(LocalSample(first + index, ids, ids))
    size = NUM_SAMPLES // NUM_MICROBATCHES
    return [samples[at : at + size] for at in range(0, NUM_SAMPLES, size)]
