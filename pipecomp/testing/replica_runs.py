"""Runs of several replicas of a small GPT-2, with ragged shares, some of them empty. Knows run files and samples; starts
nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pipecomp.config import RunConfig, parse_run_config
from pipecomp.testing.local_pipeline import LocalSample

VOCAB = 61
IDENTITY: Mapping[str, Any] = {"codec": "identity"}
Shares = list[list[list[LocalSample]]]
"""Of each replica its microbatches."""


def replica_model(dropout: float = 0.0) -> dict[str, Any]:
    """A transformers configuration."""
    return {
        "model_type": "gpt2", "n_layer": 4, "n_embd": 16, "n_head": 2, "n_positions": 32, "vocab_size": VOCAB,
        "bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout,
    }  # fmt: skip


def replica_run(
    num_replicas: int,
    num_stages: int,
    *,
    gradients: Mapping[str, Any] = IDENTITY,
    activations: Mapping[str, Any] = IDENTITY,
    dropout: float = 0.0,
    **sections: Mapping[str, Any],
) -> RunConfig:
    """`sections`: keys of a run file's sections, on top of those here."""
    tree: dict[str, dict[str, Any]] = {
        "model": {"config": replica_model(dropout), "weights": "random"},
        "data": {"train": "unused.txt", "tokenizer": "unused", "max_length": 12},
        "train": {"batch_size": 16, "num_microbatches": 2, "max_grad_norm": 0.5, "weight_decay": 0.1, "seed": 7},
        "compression": {"forward": activations, "backward": IDENTITY, "tied": IDENTITY, "gradients": gradients},
        "cluster": {"num_stages": num_stages, "num_replicas": num_replicas},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return parse_run_config(tree)


def shares_of_step(step: int, replicas: int, *, count: int = 13) -> Shares:
    """One global batch, cut for `replicas`: one sample in each one's first microbatch, the rest in its second. In every fourth
    step the last replicas have none."""
    draw = np.random.default_rng(step)
    samples = []
    for i in range(count if step % 4 else 2):
        ids = draw.integers(1, VOCAB, size=int(draw.integers(2, 13))).tolist()
        samples.append(LocalSample(1000 * (step % 5) + i, ids, ids))
    owned = [samples[len(samples) * r // replicas : len(samples) * (r + 1) // replicas] for r in range(replicas)]
    return [[list(part) for part in (own[:1], own[1:]) if part] for own in owned]


def one_process(shares: Shares) -> Shares:
    """The same microbatches, in the same order, of one replica."""
    return [[microbatch for share in shares for microbatch in share]]
