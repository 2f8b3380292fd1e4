"""Which runs `pipecomp bench quality` trains: workloads, methods, bits, epochs, seeds. Knows run configurations and codecs;
trains nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import xxhash

from pipecomp.codecs.base import Codec
from pipecomp.config import RunConfig, parse_run_config
from pipecomp.runtime.rehearsal import CODED_KINDS, make_codec
from pipecomp.types import Kind, TensorSpec

FP32, DIRECT, ACSGD, ACSGD_WHOLE, UNTRAINED = "fp32", "direct", "acsgd", "acsgd-whole", "untrained"
METHODS = (FP32, DIRECT, ACSGD_WHOLE, ACSGD)
BITS: Mapping[str, tuple[int, int]] = {"fw2bw4": (2, 4), "fw3bw6": (3, 6), "fw4bw8": (4, 8)}
_TRAINING_VERSION = 1
"""Goes up when the same settings would train to other figures; every cell is then trained again."""

_CLUSTER_KEYS = ("num_stages", "num_replicas", "schedule", "num_in_flight", "layers", "tied_weights")


class Workload(NamedTuple):
    """A model, its data and how it is trained; the methods differ in nothing but [compression]."""

    key: str
    title: str
    run: Mapping[str, Any]
    """A run file's sections without [compression]; paths from the folder that the command is run in."""
    grid: tuple[tuple[int, int], ...]
    """(epochs, number of seeds), in the order in which they are trained."""
    bits: tuple[str, ...]
    epoch_s: float
    """About what an epoch takes on one core; only the estimate of the remaining time uses it."""
    needs: str = ""
    """What scripts/fetch_examples.py has to fetch first."""


class Cell(NamedTuple):
    """One run."""

    workload: str
    method: str
    bits: str
    """A key of BITS; empty where nothing is quantized."""
    epochs: int
    seed: int

    def __str__(self) -> str:
        words = [f"({self.workload})", self.method, self.bits, "" if self.method == UNTRAINED else count_epochs(self.epochs)]
        return f"{' '.join(word for word in words if word)}, seed {self.seed}"


def count_epochs(epochs: int) -> str:
    """In words."""
    return "1 epoch" if epochs == 1 else f"{epochs} epochs"


WORKLOADS = (
    Workload(
        key="a",
        title="a GPT-2 of 4 layers from scratch on speeches, 4 stages",
        run={
            "model": {
                "config": {
                    "model_type": "gpt2",
                    "vocab_size": 1024,
                    "n_positions": 128,
                    "n_embd": 128,
                    "n_layer": 4,
                    "n_head": 4,
                    "resid_pdrop": 0.0,
                    "embd_pdrop": 0.0,
                    "attn_pdrop": 0.0,
                    "bos_token_id": 0,
                    "eos_token_id": 0,
                    "tie_word_embeddings": False,
                },
                "weights": "random",
            },
            "data": {
                "train": "examples/state-of-the-union.jsonl",
                "tokenizer": "examples/demo-gpt2",
                "max_length": 64,
                "packing": True,
                "max_train_samples": 448,
                "max_eval_samples": 64,
            },
            "train": {"batch_size": 8, "num_microbatches": 4, "learning_rate": 1e-3, "warmup_ratio": 0.1},
            "cluster": {"num_stages": 4},
        },
        grid=((1, 3), (3, 3), (10, 3)),
        bits=("fw2bw4", "fw3bw6", "fw4bw8"),
        epoch_s=8,
    ),
    Workload(
        key="b",
        title="MiniLM learning to tell good reviews from bad ones, 3 stages",
        run={
            "model": {"name": "examples/cache/minilm", "task": "sequence-classification"},
            "data": {
                "train": "examples/cache/reviews.jsonl",
                "max_length": 64,
                "max_train_samples": 512,
                "max_eval_samples": 2000,
            },
            "train": {"batch_size": 32, "num_microbatches": 4, "learning_rate": 1e-4, "warmup_ratio": 0.1},
            "cluster": {"num_stages": 3},
        },
        grid=((3, 3),),
        bits=("fw2bw4", "fw3bw6", "fw4bw8"),
        epoch_s=30,
        needs="minilm reviews",
    ),
    Workload(
        key="c",
        title="SmolLM2-135M on medical abstracts, 4 stages",
        run={
            "model": {"name": "examples/cache/smollm2"},
            "data": {
                "train": "examples/cache/pubmed-512.jsonl",
                "max_length": 96,
                "packing": True,
                "max_train_samples": 56,
                "max_eval_samples": 32,
            },
            "train": {"batch_size": 8, "num_microbatches": 8, "learning_rate": 3e-5, "warmup_steps": 4},
            "cluster": {"num_stages": 4, "num_in_flight": 5},
        },
        grid=((3, 1),),
        bits=("fw3bw6",),
        epoch_s=105,
        needs="smollm2 pubmed",
    ),
)


def cells(workload: Workload) -> Iterator[Cell]:
    """Every run of a workload, in the order of training: the untrained model, then method by method within seed within epochs."""
    for seed in range(max(seeds for _, seeds in workload.grid)):
        yield Cell(workload.key, UNTRAINED, "", 0, seed)
    for epochs, seeds in workload.grid:
        for seed in range(seeds):
            yield Cell(workload.key, FP32, "", epochs, seed)
            for bits in workload.bits:
                for method in METHODS[1:]:
                    yield Cell(workload.key, method, bits, epochs, seed)


def cost(workload: Workload, cell: Cell) -> float:
    """About how long a cell takes on one core, in seconds."""
    return workload.epoch_s * max(cell.epochs, 0.3)


def run_config(workload: Workload, cell: Cell) -> RunConfig:
    """The run that trains a cell. Options that a method does not name are the codecs' own defaults.

    Evaluation crosses by the default codec in every method. For the untrained model, only evaluation matters.
    """
    sections = {name: dict(section) for name, section in workload.run.items()}
    sections["train"] |= {"num_train_epochs": max(1, cell.epochs), "seed": cell.seed, "save_model": False}
    return parse_run_config({**sections, "compression": _compression(cell)}, f"workload {workload.key}")


def _compression(cell: Cell) -> dict[str, Any]:
    if cell.method in (FP32, UNTRAINED):
        return {"forward": {"codec": "identity"}, "backward": {"codec": "identity"}}
    forward, backward = BITS[cell.bits]
    ways: dict[str, dict[str, Any]] = {
        DIRECT: {"codec": "uniform", "bits": forward},
        ACSGD: {"codec": "delta", "bits": forward},
        ACSGD_WHOLE: {"codec": "delta", "bits": forward, "first_visit": "whole"},
    }
    return {"forward": ways[cell.method], "backward": {"codec": "uniform", "bits": backward}}


# ------------------------------------------------------------------------------------------------ what a figure depends on


def described_codecs(config: RunConfig) -> dict[str, str]:
    """What each kind of traffic crosses by, defaults resolved, in words and as a hash of what it makes of a fixed sample."""
    described: dict[str, str] = {}
    for kind in CODED_KINDS:
        codec = make_codec(config, kind)
        described[kind.value] = f"{codec.describe()} #{_probe(codec)}"
        first_visit = getattr(codec, "first_visit", None)
        if kind is Kind.FORWARD and isinstance(first_visit, Codec):
            described["first_visit"] = f"{first_visit.describe()} #{_probe(first_visit)}"
    return described


def settings_hash(config: RunConfig, codecs: Mapping[str, str]) -> str:
    """Equal hashes train to equal figures: of every key of the run, every codec's work, and the files that are read.

    Of [cluster] only what can change a figure: links, heartbeats and budgets change no number, and new keys come there most.
    """
    resolved = msgspec.to_builtins(config)
    resolved["cluster"] = {key: resolved["cluster"][key] for key in _CLUSTER_KEYS}
    described = [_TRAINING_VERSION, resolved, dict(codecs), [_digest(path) for path in _files(config)]]
    return xxhash.xxh3_64_hexdigest(json.dumps(described, sort_keys=True).encode())


def missing_files(config: RunConfig) -> list[str]:
    """What has to be there and is not."""
    folders = [name for name in (config.model.name, config.data.tokenizer) if name]
    return [name for name in (*folders, config.data.train) if not Path(name).exists()]


def _probe(codec: Codec) -> str:
    """A hash of three visits of one sample: names of options need not tell all that a codec does."""
    chance = np.random.default_rng(0)
    digest, message = xxhash.xxh3_64(), None
    spec = TensorSpec(4, 256)
    for visit in range(3):
        values = torch.from_numpy(chance.standard_normal((spec.num_rows, spec.num_columns), dtype=np.float32))
        buffer = np.zeros(codec.encoded_nbytes(spec, first_visit=message is None), np.uint8)
        before, message = message, codec.encode(values, message, seed=visit, out=buffer)
        digest.update(buffer.tobytes())
        digest.update(codec.decode(buffer, before, spec).values.numpy().tobytes())
    return digest.hexdigest()[:8]


def _files(config: RunConfig) -> Sequence[Path]:
    """The data, and what is small of model and tokenizer."""
    folders = [Path(name) for name in (config.model.name, config.data.tokenizer) if name]
    small = [folder / name for folder in folders for name in ("config.json", "tokenizer.json")]
    return [Path(config.data.train), *(path for path in small if path.exists())]


def _digest(path: Path) -> str:
    return xxhash.xxh3_64_hexdigest(path.read_bytes())
