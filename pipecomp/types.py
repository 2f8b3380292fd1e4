"""The words every layer shares: indices, ids and small frozen values. Knows nothing about arrays, tensors or sockets."""

from __future__ import annotations

import enum
from typing import NewType

import msgspec

Rank = NewType("Rank", int)
"""Position of a worker inside its pipeline, 0 .. num_ranks - 1."""

StageIndex = NewType("StageIndex", int)
"""Position of a shard in the order a microbatch visits, 0 .. num_stages - 1. A rank may hold several stages."""

MicrobatchIndex = NewType("MicrobatchIndex", int)

SampleId = NewType("SampleId", int)
"""Unsigned 64-bit hash of a sample's content, its tokenization settings and its occurrence number."""

WorkerId = NewType("WorkerId", str)
"""What a person calls a worker (`--name`), unique within a run."""

RunId = NewType("RunId", str)
"""Random hexadecimal name of one run of a coordinator."""


class Kind(enum.StrEnum):
    """What a byte on the wire is for. Every byte between machines has exactly one kind (law 13)."""

    FORWARD = "forward"
    BACKWARD = "backward"
    GRADIENTS = "gradients"
    TIED = "tied"
    EVALUATION = "evaluation"
    WEIGHTS = "weights"
    CONTROL = "control"


class Shard(msgspec.Struct, frozen=True):
    """A half-open range of a model's flat list of layers: `first_layer <= layer < end_layer`."""

    first_layer: int
    end_layer: int

    def __post_init__(self) -> None:
        if not 0 <= self.first_layer < self.end_layer:
            raise ValueError(f"a shard needs 0 <= first_layer < end_layer, got {self.first_layer}, {self.end_layer}")

    def __len__(self) -> int:
        return self.end_layer - self.first_layer

    def __str__(self) -> str:
        return f"layers {self.first_layer}-{self.end_layer - 1}"


class TensorSpec(msgspec.Struct, frozen=True):
    """Shape of one sample's real (unpadded) values: `num_rows` positions of `num_columns` features."""

    num_rows: int
    num_columns: int

    @property
    def num_values(self) -> int:
        return self.num_rows * self.num_columns
